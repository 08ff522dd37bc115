"""A client's connection that several threads use: when one of them leaves, or the connection is closed."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.broker.shared import SharedHome
from penstock.logs.backends import holder_of
from penstock.operations import FindQueue, LeaseItems, ProduceItems
from penstock.wire import address
from penstock.wire.connection import SentCall, WireConnection
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, SystemClock

MINUTE = 60 * SECOND


def connect(directory: Path) -> WireConnection:
    holder = holder_of(str(directory))
    assert holder is not None
    clock = SystemClock()
    return WireConnection(address.connect(str(directory)), holder.secret, clock, clock.read().elapsed + MINUTE)


def lease(connection: WireConnection, incarnation: int) -> SentCall:
    """Send a lease that waits, and give the call."""
    call, now = SentCall(LeaseItems), SystemClock().read().elapsed
    connection.send(LeaseItems(queue=incarnation, wait=MINUTE), call, now + MINUTE)
    return call


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_thread_that_leaves_at_its_deadline_lets_another_one_read(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        assert isinstance(broker._home, SharedHome)
        connection = connect(tmp_path / "data")
        now = connection._clock.read().elapsed
        first, second = lease(connection, queue.incarnation), lease(connection, queue.incarnation)
        reader = in_thread(lambda: connection.wait(first, now + SECOND // 2))
        while connection._reading.acquire(blocking=False):  # until the other thread reads
            connection._reading.release()
        other = in_thread(lambda: connection.wait(second, now + MINUTE))
        reader.join()
        assert not first.done
        connection.cancel(first)
        queue.produce(b"for the second")
        other.join(30)
        assert second.done and second.answer
        connection.close()


def test_a_connection_is_not_closed_while_a_thread_is_about_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that thread would wait for the file that gets the number of the closed descriptor."""
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        connection = connect(tmp_path / "data")
        about_to_read, go_on = threading.Event(), threading.Event()
        read_some = connection._read_some

        def slowly(milliseconds: float | None) -> None:
            about_to_read.set()
            go_on.wait(60)
            read_some(milliseconds)

        monkeypatch.setattr(connection, "_read_some", slowly)
        call, now = lease(connection, queue.incarnation), connection._clock.read().elapsed
        waiting = in_thread(lambda: connection.wait(call, now + MINUTE))
        assert about_to_read.wait(60)
        closing = in_thread(connection.close)
        while not call.lost:
            pass
        assert connection.fileno() >= 0 and closing.is_alive()
        go_on.set()
        waiting.join(30)
        closing.join(30)
        assert not waiting.is_alive() and not closing.is_alive()
        assert connection.fileno() == -1


def test_a_callback_may_close_the_connection(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        connection = connect(tmp_path / "data")
        closed = threading.Event()

        def close(_: SentCall) -> None:
            connection.close()
            closed.set()

        now = connection._clock.read().elapsed
        connection.send(ProduceItems(queue=queue.incarnation, batch=Batch([b"x"])), SentCall(ProduceItems, close), now + MINUTE)
        assert closed.wait(30)
        call = SentCall(FindQueue)
        connection.send(FindQueue(name="q"), call, now + MINUTE)
        assert call.lost
