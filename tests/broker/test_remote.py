"""A client whose connections end: what it sends again, how it is marked, and what its callers get."""

import socket
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from penstock import operations
from penstock.broker.remote import RemoteBroker
from penstock.loop.requests import StoredPart
from penstock.operations import CreateQueue, FindQueue, LeaseItems, Operation, ProduceItems
from penstock.rules.commands import Stored
from penstock.wire.connection import ConnectionLost, WireConnection
from penstock.wire.messages import ANSWER, CALL, CANCEL, MAX_MESSAGE_BYTES, WELCOME, MessageBuffer, encode_message, encode_refusal
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import BrokerClosed, OutcomeUnknown, PenstockError, QueueBusy, QueueExists, Refused

Reply = Callable[[Operation[Any]], Any]
"""What the owner answers: an answer, a PenstockError, None for nothing, or `DROP`."""
DROP = object()
UNKNOWN = OutcomeUnknown("not yet; wait")
STORED = [StoredPart(0, None, Stored(7, 1))]


class ScriptedOwner:
    """An owner that answers calls as a test wants, over as many connections as the client makes."""

    def __init__(self) -> None:
        self.received: SimpleQueue[Operation[Any]] = SimpleQueue()
        self.cancelled: SimpleQueue[int] = SimpleQueue()
        self.replies: SimpleQueue[Any] = SimpleQueue()
        self.reachable = True
        self.connections = 0
        self._sockets: list[socket.socket] = []

    def connect(self) -> WireConnection:
        if not self.reachable:
            raise ConnectionLost("nobody is there")
        ours, theirs = socket.socketpair()
        self.connections += 1
        self._sockets.append(theirs)
        theirs.sendall(encode_message(WELCOME, 0, {"major": 1, "minor": 0}))
        clock = SystemClock()
        connection = WireConnection(ours, "secret", clock, clock.read().elapsed + 60 * SECOND)
        threading.Thread(target=self._serve, args=(theirs,), daemon=True).start()
        return connection

    def _serve(self, theirs: socket.socket) -> None:
        buffer = MessageBuffer(MAX_MESSAGE_BYTES)
        while data := theirs.recv(1 << 16):
            for message in buffer.feed(data):
                if message.kind == CANCEL:
                    self.cancelled.put(message.number)
                if message.kind != CALL:
                    continue
                self.received.put(operations.decode(message.body))
                reply = self.replies.get()
                if reply is DROP:
                    theirs.shutdown(socket.SHUT_RDWR)
                    return
                if isinstance(reply, PenstockError):
                    theirs.sendall(encode_refusal(message.number, reply))
                elif reply is not None:
                    theirs.sendall(encode_message(ANSWER, message.number, reply))

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@pytest.fixture
def owner() -> Iterator[ScriptedOwner]:
    owner = ScriptedOwner()
    yield owner
    owner.close()


@pytest.fixture
def client(owner: ScriptedOwner) -> Iterator[RemoteBroker]:
    def no_files() -> Any:
        raise AssertionError("no file is read")

    client = RemoteBroker(owner.connect(), owner.connect, lambda: "the owner (process 7)", no_files, SystemClock())
    yield client
    client.close()


def produce(wait: float = 30) -> ProduceItems:
    return ProduceItems(queue=1, batch=Batch([b"x"]), wait=int(wait * SECOND))


def test_calls_of_a_session_follow_one_another_and_queries_have_none(owner: ScriptedOwner, client: RemoteBroker) -> None:
    for reply in (STORED, STORED, QueueExists("there is one; x")):
        owner.replies.put(reply)
    client.call(produce())
    client.call(produce())
    with pytest.raises(QueueExists):
        client.call(FindQueue(name="q"))
    first, second, query = (owner.received.get() for _ in range(3))
    assert first.call is not None and second.call is not None and query.call is None
    assert (second.call.session, second.call.number, second.call.again) == (first.call.session, first.call.number + 1, False)


def test_a_lost_call_is_sent_again_as_a_repetition_with_the_rest_of_its_wait(owner: ScriptedOwner, client: RemoteBroker) -> None:
    owner.replies.put(DROP)
    owner.replies.put(STORED)
    assert client.call(produce()) == STORED
    first, again = owner.received.get(), owner.received.get()
    assert isinstance(first, ProduceItems) and isinstance(again, ProduceItems)
    assert first.call is not None and again.call is not None
    assert (again.call.session, again.call.number) == (first.call.session, first.call.number)
    assert not first.call.again and again.call.again and again.call.age > 0
    assert again.wait <= first.wait - again.call.age and owner.connections == 2


def test_a_lost_call_of_an_async_caller_is_sent_again(owner: ScriptedOwner, client: RemoteBroker) -> None:
    owner.replies.put(DROP)
    owner.replies.put(STORED)
    answers: SimpleQueue[Any] = SimpleQueue()
    client.submit(produce(), answers.put)
    assert answers.get(timeout=60) == STORED
    assert [owner.received.get().call.again for _ in range(2)] == [False, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("unknown", [UNKNOWN, [StoredPart(0, None, None, Refused.of(UNKNOWN))]], ids=["whole", "part"])
@pytest.mark.parametrize("submitted", [False, True], ids=["call", "submit"])
def test_a_repetition_that_could_not_be_run_is_sent_again(
    owner: ScriptedOwner, client: RemoteBroker, unknown: Any, submitted: bool
) -> None:
    """The next owner cannot tell yet, because a partition is slow: the call still has time."""
    for reply in (DROP, unknown, unknown, STORED):
        owner.replies.put(reply)
    answers: SimpleQueue[Any] = SimpleQueue()
    if submitted:
        client.submit(produce(), answers.put)
    else:
        answers.put(client.call(produce()))
    assert answers.get(timeout=60) == STORED and owner.received.qsize() == 4


def test_a_repetition_that_was_not_looked_at_is_sent_again(owner: ScriptedOwner, client: RemoteBroker) -> None:
    """The first sending may have been executed: "try again" would be done twice."""
    for reply in (DROP, QueueBusy("too many calls wait; x"), STORED):
        owner.replies.put(reply)
    assert client.call(produce()) == STORED


def test_an_unknown_outcome_of_a_first_sending_is_told_and_its_session_is_not_used_again(
    owner: ScriptedOwner, client: RemoteBroker
) -> None:
    owner.replies.put(OutcomeUnknown("the disk hangs; x"))
    owner.replies.put(STORED)
    with pytest.raises(OutcomeUnknown):
        client.call(produce())
    client.call(produce())
    first, second = owner.received.get(), owner.received.get()
    assert first.call is not None and second.call is not None and first.call.session != second.call.session


def test_a_call_without_an_answer_ends_at_its_deadline_and_is_cancelled(owner: ScriptedOwner, client: RemoteBroker) -> None:
    owner.replies.put(None)
    with pytest.raises(OutcomeUnknown, match=r"the owner \(process 7\) has not answered for 2"):
        client.call(produce(1))
    assert owner.cancelled.get(timeout=60)


def test_a_call_that_was_never_sent_says_that_nothing_was_done(owner: ScriptedOwner, client: RemoteBroker) -> None:
    owner.reachable = False
    owner.replies.put(DROP)
    with pytest.raises(OutcomeUnknown):
        client.call(produce(1))
    with pytest.raises(QueueBusy, match="nothing was done"):
        client.call(produce(1))
    owner.reachable = True
    owner.replies.put(STORED)
    assert client.call(produce()) == STORED


def test_a_failure_to_connect_ends_calls_until_it_is_over(
    owner: ScriptedOwner, client: RemoteBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> WireConnection:
        raise QueueBusy("too many clients; close some")

    monkeypatch.setattr(client, "_reconnect", refuse)
    owner.replies.put(DROP)
    with pytest.raises(OutcomeUnknown):  # it was sent: "nothing was done" would be a guess
        client.call(produce(1))
    with pytest.raises(QueueBusy, match="too many clients"):
        client.call(produce())
    with pytest.raises(QueueBusy, match="too many clients"):
        client.submit(produce())
    monkeypatch.setattr(client, "_reconnect", owner.connect)
    owner.replies.put(STORED)
    while True:
        try:
            assert client.call(produce()) == STORED
            return
        except QueueBusy:
            threading.Event().wait(0.01)


def test_closing_ends_waiting_calls(owner: ScriptedOwner, client: RemoteBroker) -> None:
    owner.replies.put(None)
    owner.replies.put(None)
    answers: SimpleQueue[Any] = SimpleQueue()

    def wait() -> None:
        try:
            client.call(LeaseItems(queue=1, wait=60 * SECOND))
        except PenstockError as error:
            answers.put(error)

    thread = threading.Thread(target=wait)
    thread.start()
    owner.received.get(timeout=60)
    client.submit(LeaseItems(queue=1, wait=60 * SECOND), answers.put)
    owner.received.get(timeout=60)
    client.close()
    assert {type(answers.get(timeout=60)) for _ in range(2)} == {BrokerClosed}
    thread.join()
    with pytest.raises(BrokerClosed):
        client.call(CreateQueue(name="q"))
