"""The server of a broker's socket: clients that are killed, silent, slow, many, or not what they say."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.broker.shared import SharedBroker, SharedHome
from penstock.logs.backends import holder_of
from penstock.operations import CreateQueue, FindQueue, LeaseItems, ListItems, ProduceItems, ReadStats
from penstock.rules.commands import Call
from penstock.wire import address, socket_server
from penstock.wire.connection import ConnectionLost, SentCall, WireConnection
from penstock.wire.messages import (
    ANSWER,
    CALL,
    CANCEL,
    HEADER,
    HELLO,
    MAJOR,
    MAX_MESSAGE_BYTES,
    MINOR,
    REFUSED,
    WELCOME,
    Hello,
    Message,
    MessageBuffer,
    decode_refusal,
    encode_message,
)
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import AccessDenied, InvalidRequest, QueueBusy


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[penstock.Broker]:
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("q")
        yield broker


def owner_of(broker: penstock.Broker) -> SharedBroker:
    assert isinstance(broker._home, SharedHome)
    return broker._home.broker


class RawClient:
    """A client that sends any bytes it likes."""

    def __init__(self, broker: penstock.Broker, hello: bool = True, **changes: Any) -> None:
        directory = owner_of(broker).directory
        holder = holder_of(directory)
        assert holder is not None
        self.socket = self._connect(directory)
        self.socket.settimeout(60)
        self._buffer = MessageBuffer(MAX_MESSAGE_BYTES)
        self._messages: list[Message] = []
        if hello:
            fields: dict[str, Any] = {"major": MAJOR, "minor": MINOR, "secret": holder.secret, "pid": os.getpid(), "name": "raw"}
            self.send(HELLO, 0, Hello(**(fields | changes)))

    @staticmethod
    def _connect(directory: str) -> socket.socket:
        while True:
            with suppress(BlockingIOError):  # more clients wait than the system lets: as a real one, try again
                return address.connect(directory)
            threading.Event().wait(0.001)

    def send(self, kind: int, number: int, body: Any) -> None:
        self.socket.sendall(encode_message(kind, number, body))

    def receive(self) -> Message | None:
        """The next message; None when the owner has closed the connection."""
        while not self._messages:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._messages += self._buffer.feed(data)
        return self._messages.pop(0)

    def close(self) -> None:
        self.socket.close()


def incarnation(broker: penstock.Broker) -> int:
    return broker._home.call(FindQueue(name="q")).incarnation


def produce(broker: penstock.Broker, text: str, call: Call | None = None) -> ProduceItems:
    return ProduceItems(queue=incarnation(broker), batch=Batch([text.encode()]), call=call)


# -- who may connect -----------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused(broker: penstock.Broker) -> None:
    with closing(RawClient(broker, secret="guess")) as client:
        message = client.receive()
        assert message is not None and message.kind == REFUSED and isinstance(decode_refusal(message.body), AccessDenied)
        assert client.receive() is None


def test_another_major_version_is_refused_and_a_newer_minor_one_is_not(broker: penstock.Broker) -> None:
    with closing(RawClient(broker, major=MAJOR + 1)) as client:
        message = client.receive()
        assert message is not None and "same major version" in str(decode_refusal(message.body))
    with closing(RawClient(broker, minor=MINOR + 5)) as client:
        message = client.receive()
        assert message is not None and message.kind == WELCOME


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(encode_message(CALL, 1, FindQueue(name="q"))),
        HEADER.pack(1 << 30, HELLO, 0),
        HEADER.pack(3, HELLO, 0) + b"\xc1\xc1\xc1",
        bytes(encode_message(HELLO, 0, {"major": 1})),
    ],
    ids=["http", "a call before the hello", "a huge hello", "not msgpack", "fields missing"],
)
def test_what_is_no_hello_ends_the_connection_alone(broker: penstock.Broker, raw: bytes) -> None:
    with closing(RawClient(broker, hello=False)) as client:
        client.socket.sendall(raw)
        assert client.receive() is None
    assert broker.queue("q").stats().ready == 0


def test_an_operation_that_cannot_be_understood_is_refused_and_the_connection_goes_on(broker: penstock.Broker) -> None:
    with closing(RawClient(broker)) as client:
        assert client.receive() is not None
        client.send(CALL, 5, {"type": "Nonsense"})
        message = client.receive()
        assert message is not None and (message.kind, message.number) == (REFUSED, 5)
        assert isinstance(decode_refusal(message.body), InvalidRequest)
        client.send(CALL, 6, FindQueue(name="q"))
        answered = client.receive()
        assert answered is not None and (answered.kind, answered.number) == (ANSWER, 6)


# -- clients that are killed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
def test_a_client_killed_at_any_byte_of_a_message_leaves_all_or_nothing(broker: penstock.Broker, step: int) -> None:
    """Real processes, killed by SIGKILL when so many bytes were sent and no answer was read."""
    message = bytes(encode_message(CALL, 1, produce(broker, "x", Call(b"s" * 16, 1))))
    queue = broker.queue("q")
    queue.produce(b"first")  # its partition is open: a whole message is taken before the end of its connection is read
    for sent in range(len(message), -1, -step):
        session = sent.to_bytes(16, "big")
        message = bytes(encode_message(CALL, 1, produce(broker, "x", Call(session, 1))))
        client = RawClient(broker)
        assert client.receive() is not None
        inherited = client.socket.dup()  # a socket of the wire is closed in a forked child
        if not (child := os.fork()):
            with suppress(OSError):
                inherited.sendall(message[:sent])
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        inherited.close()
        client.close()
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    while owner_of(broker)._server.clients():  # type: ignore[union-attr]
        pass
    assert queue.stats().ready == 2  # only the first message was whole


def test_items_leased_for_a_client_that_is_gone_are_returned_at_once(broker: penstock.Broker) -> None:
    queue = broker.queue("q")
    client = RawClient(broker)
    client.send(CALL, 1, LeaseItems(queue=incarnation(broker), count=1, wait=60 * SECOND, consumer="gone"))
    while not queue.stats().waiting_consumers:
        pass
    client.close()
    while queue.stats().waiting_consumers:  # its place is freed
        pass
    queue.produce(b"x")
    (lease,) = queue.lease(1, wait=20)
    assert lease.item.attempts == 1


def test_a_cancelled_call_is_refused(broker: penstock.Broker) -> None:
    with closing(RawClient(broker)) as client:
        assert client.receive() is not None
        client.send(CALL, 1, LeaseItems(queue=incarnation(broker), wait=60 * SECOND))
        client.send(CANCEL, 1, None)
        client.send(CANCEL, 99, None)  # unknown: ignored
        client.send(CALL, 2, FindQueue(name="q"))
        messages = [client.receive(), client.receive()]
        assert [(one.kind, one.number) for one in messages if one is not None] == [(REFUSED, 1), (ANSWER, 2)]
    assert broker.queue("q").stats().waiting_consumers == 0


# -- repeated calls ------------------------------------------------------------------------------------------


def test_a_repeated_call_cancels_the_original_that_still_waits(broker: penstock.Broker) -> None:
    queue = broker.queue("q")
    with closing(RawClient(broker)) as lost, closing(RawClient(broker)) as client:
        assert lost.receive() is not None and client.receive() is not None
        lost.send(CALL, 1, LeaseItems(queue=incarnation(broker), wait=60 * SECOND, call=Call(b"s" * 16, 1)))
        while queue.stats().waiting_consumers != 1:
            pass
        client.send(CALL, 1, LeaseItems(queue=incarnation(broker), wait=60 * SECOND, call=Call(b"s" * 16, 1, True, 5)))
        client.send(CALL, 2, FindQueue(name="q"))
        assert client.receive() is not None
        assert queue.stats().waiting_consumers == 1
        queue.produce_many([b"x", b"y"])
        message = client.receive()
        assert message is not None and (message.kind, message.number) == (ANSWER, 1)
        assert queue.stats().leased == 1


def test_an_original_that_is_read_after_its_repetition_is_ignored(broker: penstock.Broker) -> None:
    with closing(RawClient(broker)) as late, closing(RawClient(broker)) as client:
        assert late.receive() is not None and client.receive() is not None
        client.send(CALL, 1, produce(broker, "x", Call(b"s" * 16, 3, True, 5)))
        assert client.receive() is not None
        late.send(CALL, 1, produce(broker, "x", Call(b"s" * 16, 3)))
        late.send(CALL, 2, produce(broker, "older", Call(b"s" * 16, 2)))
        late.send(CALL, 3, FindQueue(name="q"))
        message = late.receive()
        assert message is not None and message.number == 3
    assert broker.queue("q").stats().ready == 1


# -- slow, silent and many clients ---------------------------------------------------------------------------


def test_a_client_that_says_nothing_is_closed(broker: penstock.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "HELLO_WITHIN", 0)
    with closing(RawClient(broker, hello=False)) as client:
        assert client.receive() is None


def test_a_client_that_reads_nothing_holds_up_nobody(broker: penstock.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "UNSENT_BYTES", 1 << 20)
    queue = broker.queue("q")
    queue.produce(b"x" * (1 << 20))
    owner = owner_of(broker)
    with closing(RawClient(broker)) as slow:
        assert slow.receive() is not None
        slow.socket.setblocking(False)
        number = 0
        while True:  # until the owner reads no more of it
            number += 1
            try:
                slow.socket.send(encode_message(CALL, number, ListItems(queue=incarnation(broker), limit=10)))
            except BlockingIOError:
                if all(one.unsent_bytes > socket_server.UNSENT_BYTES for one in owner._server._connections):  # type: ignore[union-attr]
                    break
        connections = [*owner._server._connections]  # type: ignore[union-attr]
        assert max(one.unsent_bytes for one in connections) < 300 << 20
        with closing(RawClient(broker)) as other:
            assert other.receive() is not None
            other.send(CALL, 1, ReadStats(queue=incarnation(broker)))
            message = other.receive()
            assert message is not None and message.kind == ANSWER
        monkeypatch.setattr(socket_server, "STALLED", 0)
        while len(owner._server._connections):  # type: ignore[union-attr]
            threading.Event().wait(0.01)
    queue.produce(b"y")


def test_two_hundred_clients(broker: penstock.Broker) -> None:
    queue = broker.queue("q")
    clients = [RawClient(broker) for _ in range(200)]
    try:
        for client in clients:
            assert client.receive() is not None
        for client in clients:
            client.send(CALL, 1, LeaseItems(queue=incarnation(broker), wait=60 * SECOND))
        while queue.stats().waiting_consumers < 200:
            pass
        queue.produce_many([str(number) for number in range(200)])
        kinds = [message.kind for client in clients if (message := client.receive()) is not None]
        assert kinds == [ANSWER] * 200 and queue.stats().leased == 200
        assert len(owner_of(broker)._server.clients()) == 200  # type: ignore[union-attr]
    finally:
        for client in clients:
            client.close()


def test_more_clients_than_allowed_are_refused(broker: penstock.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "MAX_CONNECTIONS", 2)
    clients = [RawClient(broker) for _ in range(2)]
    for client in clients:
        assert client.receive() is not None
    with closing(RawClient(broker, hello=False)) as third:
        message = third.receive()
        assert message is not None and isinstance(decode_refusal(message.body), QueueBusy)
    clients.pop().close()
    while len(owner_of(broker)._server._connections) > 1:  # type: ignore[union-attr]
        pass
    with closing(RawClient(broker)) as fourth:
        message = fourth.receive()
        assert message is not None and message.kind == WELCOME
    clients.pop().close()


def test_too_many_waiting_calls_of_one_client_are_refused(broker: penstock.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "MAX_WAITING_CALLS", 3)
    with closing(RawClient(broker)) as client:
        assert client.receive() is not None
        for number in range(1, 5):
            client.send(CALL, number, LeaseItems(queue=incarnation(broker), wait=60 * SECOND))
        message = client.receive()
        assert message is not None and message.number == 4 and isinstance(decode_refusal(message.body), QueueBusy)


def test_a_full_backlog_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner does not accept connections for a while; an open waits for it, and then connects."""
    monkeypatch.setattr(address, "BACKLOG", 1)
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("q")
        turning = owner_of(broker)._server
        assert turning is not None
        blocked, go_on = threading.Event(), threading.Event()

        def wait_instead() -> None:
            blocked.set()
            go_on.wait(60)

        monkeypatch.setattr(turning, "_accept", wait_instead)
        turning._selector.modify(turning._listener, 1, turning._accept)
        waiting: list[socket.socket] = []
        while True:
            try:
                waiting.append(address.connect(str(tmp_path / "data")))
            except BlockingIOError:
                break
        assert blocked.wait(60)
        opened: list[SharedBroker] = []
        options: dict[str, Any] = {"durability": "fsync", "segment_bytes": 1 << 26, "compression": True, "entropy": os.urandom}
        thread = threading.Thread(
            target=lambda: opened.append(SharedBroker(tmp_path / "data", own=False, wait=60 * SECOND, min_free_bytes=0, **options))
        )
        thread.start()
        monkeypatch.undo()
        turning._selector.modify(turning._listener, 1, turning._accept)
        for one in waiting:
            one.close()
        go_on.set()
        thread.join(60)
        assert opened[0].call(FindQueue(name="q")).name == "q"
        opened[0].close()


# -- the client's side ---------------------------------------------------------------------------------------


def soon(seconds: float = 60) -> int:
    """A deadline."""
    return SystemClock().read().elapsed + int(seconds * SECOND)


@pytest.fixture
def pair() -> Iterator[tuple[WireConnection, socket.socket]]:
    """A connection whose other side is the test."""
    ours, theirs = socket.socketpair()
    theirs.sendall(encode_message(WELCOME, 0, {"major": 1, "minor": 0}))
    connection = WireConnection(ours, "secret", SystemClock(), soon())
    theirs.settimeout(60)
    assert MessageBuffer(10_000).feed(theirs.recv(10_000))[0].kind == HELLO
    yield connection, theirs
    connection.close()
    theirs.close()


@pytest.mark.parametrize("cut", [1, 8, 12, 30])
def test_an_owner_that_dies_in_the_middle_of_an_answer_loses_the_call(pair: tuple[WireConnection, socket.socket], cut: int) -> None:
    connection, theirs = pair
    call = SentCall(CreateQueue)
    connection.send(CreateQueue(name="q"), call, soon())
    theirs.sendall(encode_message(REFUSED, call.number, {"code": "queue_exists", "message": "there is one; x"})[:cut])
    theirs.close()
    connection.wait(call, soon())
    assert call.lost and not call.done and connection.lost


def test_answers_in_any_order_reach_their_threads(pair: tuple[WireConnection, socket.socket]) -> None:
    connection, theirs = pair
    calls = [SentCall(ReadStats) for _ in range(20)]
    threads = [threading.Thread(target=lambda call=call: connection.wait(call, soon())) for call in calls]
    for call in calls:
        connection.send(ReadStats(queue=1), call, soon())
    for thread in threads:
        thread.start()
    for call in reversed(calls):
        theirs.sendall(encode_message(REFUSED, call.number, {"code": "queue_not_found", "message": f"{call.number}; x"}))
    for thread in threads:
        thread.join(60)
    assert [str(call.error) for call in calls] == [f"{call.number}; x" for call in calls]


def test_an_owner_that_takes_no_bytes_ends_the_call_at_its_deadline(pair: tuple[WireConnection, socket.socket]) -> None:
    connection, _ = pair
    call = SentCall(ProduceItems)
    connection.send(ProduceItems(queue=1, batch=Batch([b"x" * (1 << 20)] * 8)), call, soon(0.1))
    assert call.lost


def test_a_silent_owner_does_not_finish_the_introduction() -> None:
    ours, theirs = socket.socketpair()
    with closing(theirs), pytest.raises(ConnectionLost, match="does not answer"):
        WireConnection(ours, "secret", SystemClock(), soon(0.05))
