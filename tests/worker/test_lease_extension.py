"""Leases are extended while handlers run, whatever they do. A lease that is lost nevertheless is detected."""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Broker, Item, Queue
from penstock.broker.embedded import EmbeddedBroker
from penstock.worker.settings import Hooks
from penstock.worker.worker import Worker
from tests.broker.owner_process import BrokerProcess
from tests.worker.harness import WAIT, HandlerEvents, running_worker, wait_completed, wait_elapsed, wait_until

SECONDS = 1.3
"""Longer than a lease of one second."""


def block(item: Item) -> None:
    """Hold the interpreter, so that no other thread runs."""
    ctypes.PyDLL(None).usleep(int(SECONDS * 1e6))


async def ablock(item: Item) -> None:
    block(item)


class CompetingConsumer:
    """Another consumer, which waits in a thread for items of the same queue."""

    def __init__(self, queue: Queue) -> None:
        self.got: list[Any] = []
        self._queue = queue
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()
        wait_until(lambda: queue.stats().waiting_consumers)

    def _wait(self) -> None:
        batch = self._queue.lease(10, wait=WAIT)
        self.got = [lease.item.payload for lease in batch]
        batch.complete()

    def gets(self) -> list[Any]:
        self._thread.join(WAIT)
        return self.got


@pytest.mark.parametrize("handle", [block, ablock], ids=["thread", "task"])
def test_a_handler_that_holds_the_interpreter_longer_than_its_lease_keeps_it(
    broker: Broker, log: HandlerEvents, handle: Callable[..., Any]
) -> None:
    queue = broker.create_queue("orders", lease_timeout=1, max_attempts=1)
    queue.produce(b"1")
    one = Worker(queue, handle, concurrency=2, hooks=Hooks(started=lambda item: log.add(item.payload), late=lambda item: log.add("late")))
    with running_worker(one):
        log.next()
        competitor = CompetingConsumer(queue)
        wait_completed(queue, 1)
    queue.produce(b"2")
    assert competitor.gets() == [b"2"]
    assert (one.stats().handled, one.stats().late) == (1, 0)
    assert "late" not in log.rest()


def test_leases_of_running_and_buffered_items_are_extended(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", lease_timeout=1, max_attempts=1)
    go = threading.Event()

    def handle(item: Item) -> None:
        log.add(item.payload)
        if item.payload == b"slow":
            go.wait(WAIT)

    one = Worker(queue, handle, batch=0, concurrency=2)
    with running_worker(one):
        queue.produce_many([b"quick", b"slow"])
        log.take(2)
        competitor = CompetingConsumer(queue)
        wait_elapsed(broker, 2.2)  # more than two leases long
        assert queue.stats().leased == 1
        go.set()
        wait_completed(queue, 2)
    queue.produce(b"other")
    assert competitor.gets() == [b"other"]
    assert one.stats().late == 0


def test_the_lease_is_not_extended_after_its_items_are_settled(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders")
    queue.produce_many([b""] * 3)
    with running_worker(Worker(queue, log.add, concurrency=3)):
        wait_completed(queue, 3)
        embedded = queue.home
        assert isinstance(embedded, EmbeddedBroker)
        (loop,) = [loop for loop in embedded.loops() if loop.engine.name == "orders"]
        wait_until(lambda: not loop.engine.auto_extended_leases)


def test_items_of_a_lost_lease_are_late_and_buffered_ones_are_not_started(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders")
    queue.produce_many([b"%d" % n for n in range(200)])
    go, first = threading.Event(), threading.Event()

    def handle(item: Item) -> None:
        if item.payload == b"150":
            first.set()
            go.wait(WAIT)

    late = HandlerEvents()
    one = Worker(queue, handle, hooks=Hooks(late=lambda item: late.add(item.payload)))
    with running_worker(one):
        assert first.wait(WAIT)
        cleared = queue.clear("leased")
        queue.produce(b"151")
        go.set()
        wait_until(lambda: one.stats().in_hand == 0 and queue.stats().depth == 0)
    assert one.stats().handled + one.stats().late + one.stats().returned >= 151
    assert b"150" in late.rest()
    assert cleared >= 1


def test_no_handler_starts_on_an_item_whose_lease_may_have_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The owner does not answer for longer than a lease lasts, while items wait in the worker's buffer."""
    blocked, go, handled = threading.Event(), threading.Event(), HandlerEvents()

    def handle(item: Item) -> None:
        handled.add(item.value)
        if item.value == 150:
            blocked.set()
            go.wait(WAIT)

    with BrokerProcess(tmp_path / "data") as owner, penstock.open(tmp_path / "data", own=False) as broker:
        queue = broker.create_queue("orders", lease_timeout=1)
        queue.produce_many([*range(400)])
        one = Worker(queue, handle)
        with running_worker(one):
            assert blocked.wait(WAIT)
            started = handled.rest()
            owner.freeze()
            wait_until(lambda: [record for record in caplog.records if "are returned unhandled" in record.getMessage()])
            go.set()
            wait_until(lambda: one._run is not None and one._run._pool.free_handlers == 1)  # its handler looked for an item
            assert not handled.rest()
            owner.thaw()
            wait_until(lambda: queue.stats().completed == 400)
        assert {*started, *handled.rest()} == {*range(400)}
