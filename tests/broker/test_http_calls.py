"""What a client over HTTP sends again, how it is marked, and what its callers get."""

import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from penstock.broker import http_client
from penstock.broker.http_home import HttpBroker
from penstock.loop.requests import LeaseResult, StoredPart
from penstock.operations import (
    AwaitItems,
    CreateQueue,
    DeleteQueue,
    FindQueue,
    LeaseDoubt,
    LeaseItems,
    Operation,
    ProduceItems,
    ReadStats,
    SettleItems,
)
from penstock.rules.commands import LeaseAnswer, Settled, Stored
from penstock.wire.http_address import HttpAddress, HttpOptions
from penstock.wire.http_calls import ANSWER_TYPE, encode_error
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import (
    AccessDenied,
    BrokerClosed,
    InvalidRequest,
    OutcomeUnknown,
    PenstockError,
    QueueBusy,
    QueueExists,
    Refused,
    StorageFailed,
    Unauthenticated,
)
from tests.broker.scripted_server import DROP, SILENCE, Raw, ScriptedServer

WAIT = 60
STORED = [StoredPart(0, None, Stored(7, 1))]
LEASED = [LeaseResult(0, LeaseAnswer(5), [], 60.0)]
ENDED = Refused("lease_lost", "it has ended; stop")
UNKNOWN = OutcomeUnknown("not yet; wait")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[HttpBroker]:
    client = HttpBroker(HttpAddress.parse(server.url), HttpOptions(api_key="secret-key"))
    yield client
    client.close()


def produce(wait: float = 30) -> ProduceItems:
    return ProduceItems(queue=1, batch=Batch([b"x"]), wait=int(wait * SECOND))


def outcome_of(client: HttpBroker, operation: Any, submitted: bool = False) -> Any:
    """The answer or the error of an operation."""
    outcomes: SimpleQueue[Any] = SimpleQueue()
    if submitted:
        client.submit(operation, outcomes.put)
        return outcomes.get(timeout=WAIT)
    try:
        return client.call(operation)
    except PenstockError as error:
        return error


# -- sessions ------------------------------------------------------------------------------------------


def test_calls_of_a_session_follow_one_another_and_queries_have_none(server: ScriptedServer, client: HttpBroker) -> None:
    server.answer(STORED, STORED, QueueExists("there is one; x"))
    client.call(produce())
    client.call(produce())
    with pytest.raises(QueueExists, match="there is one; x"):
        client.call(FindQueue(name="q"))
    first, second, query = (server.received.get() for _ in range(3))
    assert first.call is not None and second.call is not None and query.call is None
    assert (second.call.session, second.call.number, second.call.again) == (first.call.session, first.call.number + 1, False)
    assert server.connections == 1


def test_a_request_says_who_sends_it(server: ScriptedServer, client: HttpBroker) -> None:
    server.answer(STORED)
    client.call(produce())
    lines = server.heads[0].lower().splitlines()
    assert lines[0] == "post /v1/call http/1.1"
    assert {f"host: 127.0.0.1:{server.port}", "authorization: bearer secret-key", "penstock-protocol: 1.0"} <= {*lines}


@pytest.mark.parametrize("submitted", [False, True], ids=["call", "submit"])
def test_a_lost_call_is_sent_again_as_a_repetition_with_the_rest_of_its_wait(
    server: ScriptedServer, client: HttpBroker, submitted: bool
) -> None:
    server.answer(DROP, STORED)
    assert outcome_of(client, produce(), submitted) == STORED
    first, again = server.received.get(), server.received.get()
    assert isinstance(first, ProduceItems) and isinstance(again, ProduceItems)
    assert first.call is not None and again.call is not None
    assert (again.call.session, again.call.number) == (first.call.session, first.call.number)
    assert not first.call.again and again.call.again and again.call.age > 0
    assert again.wait <= first.wait - again.call.age and server.connections == 2


@pytest.mark.parametrize("unknown", [UNKNOWN, [StoredPart(0, None, None, Refused.of(UNKNOWN))]], ids=["whole", "part"])
def test_a_repetition_that_could_not_be_run_is_sent_again(server: ScriptedServer, client: HttpBroker, unknown: Any) -> None:
    server.answer(DROP, unknown, unknown, STORED)
    assert client.call(produce()) == STORED
    assert server.received.qsize() == 4


def test_an_unknown_outcome_of_a_first_sending_is_told_and_its_session_is_not_used_again(
    server: ScriptedServer, client: HttpBroker
) -> None:
    server.answer(OutcomeUnknown("the disk hangs; x"), STORED)
    with pytest.raises(OutcomeUnknown, match="the disk hangs"):
        client.call(produce())
    client.call(produce())
    first, second = server.received.get(), server.received.get()
    assert first.call is not None and second.call is not None and first.call.session != second.call.session


@pytest.mark.parametrize("refusal", [QueueBusy("too many requests; wait"), StorageFailed("no keys can be read; wait")])
def test_a_repetition_that_the_server_did_not_let_in_is_sent_again(server: ScriptedServer, client: HttpBroker, refusal: Any) -> None:
    server.answer(DROP, refusal, refusal, STORED)
    assert client.call(produce()) == STORED
    sent = [server.received.get() for _ in range(4)]
    assert [one.call.again for one in sent if one.call] == [False, True, True, True]


@pytest.mark.parametrize(
    ("operation", "replies"),
    [
        (produce(), [DROP, Unauthenticated("the key was revoked; get another")]),
        (produce(wait=0), [DROP, *[QueueBusy("too many requests; wait")] * 1_000]),
        (DeleteQueue(queue=1), [DROP, QueueBusy("too many requests; wait")]),
    ],
)
def test_a_refused_repetition_does_not_say_that_nothing_was_done(
    server: ScriptedServer, client: HttpBroker, operation: Any, replies: list[Any]
) -> None:
    server.answer(*replies)
    error = outcome_of(client, operation)
    assert isinstance(error, OutcomeUnknown)
    assert "the key was revoked" in str(error) or "too many requests" in str(error)
    while not server.replies.empty():
        server.replies.get()
    sent = server.received.get()
    server.answer(STORED)
    client.call(produce())
    while not server.received.empty():
        newest = server.received.get()
    assert sent.call and newest.call and newest.call.session != sent.call.session


def test_a_query_that_is_refused_has_changed_nothing(server: ScriptedServer, client: HttpBroker) -> None:
    server.answer(DROP, QueueBusy("too many requests; wait"))
    assert isinstance(outcome_of(client, ReadStats(queue=1)), QueueBusy)


def test_concurrent_calls_have_sessions_of_their_own(server: ScriptedServer, client: HttpBroker) -> None:
    outcomes: SimpleQueue[Any] = SimpleQueue()
    for _ in range(3):
        client.submit(produce(), outcomes.put)
    sent = [server.received.get(timeout=WAIT) for _ in range(3)]
    server.answer(STORED, STORED, STORED)
    assert [outcomes.get(timeout=WAIT) for _ in range(3)] == [STORED] * 3
    assert len({one.call.session for one in sent if one.call is not None}) == 3


# -- deadlines -----------------------------------------------------------------------------------------


def test_a_change_without_an_answer_ends_at_its_deadline_and_its_connection_is_closed(
    server: ScriptedServer, client: HttpBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.remote_calls.SHORT_GRACE", SECOND // 10)
    server.answer(SILENCE)
    with pytest.raises(OutcomeUnknown, match=rf"the server at {server.url} has not answered for 0\.\d s; repeat with the same request id"):
        client.call(produce(0.1))
    server.left.get(timeout=WAIT)


def test_a_query_without_an_answer_changed_nothing(server: ScriptedServer, client: HttpBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "WAIT_SLICE", SECOND // 10)
    monkeypatch.setattr(http_client, "GRACE", SECOND // 10)
    monkeypatch.setattr("penstock.broker.remote_calls.GRACE", SECOND // 2)
    server.answer(*[SILENCE] * 10)
    with pytest.raises(QueueBusy, match=r"has not answered for 0\.\d s; nothing was done"):
        client.call(AwaitItems(queue=1, start={}, wait=SECOND // 10))


def test_a_call_that_could_not_be_sent_says_that_nothing_was_done_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.remote_calls.SHORT_GRACE", SECOND // 10)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = HttpBroker(HttpAddress(False, "127.0.0.1", port, ""), HttpOptions())
    with pytest.raises(QueueBusy, match=r"\(Connection refused\) has not answered for 0\.\d s; nothing was done"):
        client.call(produce(0.1))
    client.close()


def test_a_server_that_vanished_is_noticed_during_a_long_wait(
    server: ScriptedServer, client: HttpBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "WAIT_SLICE", SECOND // 10)
    monkeypatch.setattr(http_client, "GRACE", SECOND // 10)
    server.answer(SILENCE, LEASED)
    assert client.call(LeaseItems(queue=1, wait=60 * SECOND)) == LEASED
    first, again = server.received.get(), server.received.get()
    assert first.call is not None and again.call is not None
    assert again.call == first.call.__class__(first.call.session, first.call.number, True, again.call.age)
    server.left.get(timeout=WAIT)


def test_a_long_wait_is_sent_in_slices_each_a_call_of_its_own(
    server: ScriptedServer, client: HttpBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "WAIT_SLICE", 20 * SECOND)
    server.answer([], [], LEASED)
    assert client.call(LeaseItems(queue=1, wait=45 * SECOND, request=b"r")) == LEASED
    slices = [server.received.get() for _ in range(3)]
    assert all(isinstance(one, LeaseItems) and one.wait == 20 * SECOND and one.request == b"r" for one in slices)
    assert [one.call.number for one in slices if one.call is not None and not one.call.again] == [1, 2, 3]
    server.answer(False, True)
    assert client.call(AwaitItems(queue=1, start={}, wait=45 * SECOND)) is True


@pytest.mark.parametrize("wait", [0, SECOND])
def test_a_lease_that_was_returned_with_its_connection_is_asked_anew(server: ScriptedServer, client: HttpBroker, wait: int) -> None:
    server.answer(DROP, [], LEASED)
    assert client.call(LeaseItems(queue=1, wait=wait)) == LEASED
    first, again, new = (server.received.get().call for _ in range(3))
    assert first and again and new
    assert again.again and again.number == first.number
    assert (new.session, new.number, new.again) == (first.session, first.number + 1, False)


def test_a_lease_without_a_wait_is_not_asked_for_ever(server: ScriptedServer, client: HttpBroker) -> None:
    server.answer(DROP, [], DROP, [])
    assert client.call(LeaseItems(queue=1)) == []
    assert server.received.qsize() == 4


def test_a_wait_that_the_server_ends_early_goes_on(server: ScriptedServer, client: HttpBroker) -> None:
    server.answer([], [], LEASED)
    assert client.call(LeaseItems(queue=1, wait=20 * SECOND)) == LEASED
    waits = [operation.wait for operation in [server.received.get() for _ in range(3)] if isinstance(operation, LeaseItems)]
    assert 20 * SECOND == waits[0] > waits[1] > waits[2] > 10 * SECOND


def test_a_wait_that_is_over_gives_nothing(server: ScriptedServer, client: HttpBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer(*[[]] * 10_000)
    before = client.clock.read().elapsed
    assert client.call(LeaseItems(queue=1, wait=SECOND // 10)) == []
    assert client.clock.read().elapsed - before >= SECOND // 10 - 2_000, "a server that ends a wait sooner is asked again"
    assert server.received.qsize() > 1


# -- what servers and proxies answer -------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
def test_a_call_is_sent_again_when_a_proxy_cannot_reach_the_server(server: ScriptedServer, client: HttpBroker, status: int) -> None:
    dated = Raw(status, b"{}", "application/json", "retry-after: Wed, 21 Oct 2026 07:28:00 GMT\r\n")
    server.answer(Raw(status), dated, Raw(status, headers=f"retry-after: {'9' * 5_000}\r\n"), STORED)
    assert client.call(produce()) == STORED
    sent = [server.received.get() for _ in range(4)]
    assert [one.call.again for one in sent if one.call is not None] == [False, True, True, True]


def test_a_proxy_that_asks_to_wait_is_obeyed(server: ScriptedServer, client: HttpBroker) -> None:
    server.answer(Raw(503, headers="retry-after: 1\r\n"), STORED)
    assert client.call(produce()) == STORED
    server.received.get()
    again = server.received.get()
    assert again.call is not None and again.call.age >= SECOND


FOREIGN: list[tuple[Raw, type[PenstockError], str]] = [
    (Raw(404), InvalidRequest, r"no Penstock server answers at http://127.* \(status 404, text/html\); fix the address"),
    (Raw(200, b"hello", "text/plain"), InvalidRequest, r"\(status 200, text/plain\); fix the address"),
    (Raw(404, b"{}", "application/json"), InvalidRequest, "fix the address"),
    (
        Raw(301, headers="location: https://elsewhere/\r\n"),
        InvalidRequest,
        r"redirects to 'https://elsewhere/' \(status 301\); give the address",
    ),
    (Raw(401), AccessDenied, r"a proxy before http.* refuses this client \(status 401\)"),
    (Raw(413), InvalidRequest, "refuses a request of this size"),
]


@pytest.mark.parametrize(("reply", "kind", "message"), FOREIGN, ids=[str(one[0].status) for one in FOREIGN])
def test_a_foreign_answer_is_an_error_unless_the_call_was_sent_before(
    server: ScriptedServer, client: HttpBroker, reply: Raw, kind: type[PenstockError], message: str
) -> None:
    server.answer(reply)
    with pytest.raises(kind, match=message):
        client.call(produce())
    server.answer(DROP, reply, STORED)
    assert client.call(produce()) == STORED, "what became of the first sending was not known"


@pytest.mark.parametrize("error", [QueueBusy("too many; wait"), StorageFailed("the disk is full; x"), AccessDenied("no; x")])
def test_an_error_of_the_server_is_the_callers(server: ScriptedServer, client: HttpBroker, error: PenstockError) -> None:
    server.answer(error)
    with pytest.raises(type(error), match=str(error)):
        client.call(produce())
    assert server.received.qsize() == 1


def test_a_repetition_that_is_refused_at_the_door_is_sent_again(server: ScriptedServer, client: HttpBroker) -> None:
    """The first sending may have been executed: "try again" would be done twice."""
    server.answer(DROP, QueueBusy("too many connections; wait"), STORED)
    assert client.call(produce()) == STORED
    server.answer(DROP, Unauthenticated("the key was revoked; x"))
    with pytest.raises(OutcomeUnknown, match=r"its repetition was refused \(the key was revoked; x\)"):
        client.call(produce())
    server.answer(DROP, AccessDenied("no; x"))
    with pytest.raises(AccessDenied):
        client.call(FindQueue(name="q"))


def test_a_server_that_is_being_closed_is_asked_again(server: ScriptedServer, client: HttpBroker) -> None:
    ends = Raw(503, encode_error(OutcomeUnknown("the server ends; send it again")), ANSWER_TYPE, "connection: close\r\n")
    server.answer(BrokerClosed("the broker is closed; open it again"), ends, STORED)
    assert client.call(produce()) == STORED


def test_an_error_of_a_newer_server_is_a_penstock_error(server: ScriptedServer, client: HttpBroker) -> None:
    class Novel(PenstockError):
        code = "novel"
        http_status = 418

    server.answer(Novel("something new; x"))
    with pytest.raises(PenstockError, match="something new; x"):
        client.call(produce())


def test_an_answer_that_cannot_be_understood(server: ScriptedServer, client: HttpBroker) -> None:
    server.answer("nonsense", "nonsense", STORED)
    with pytest.raises(StorageFailed, match="use the same Penstock on both sides"):
        client.call(FindQueue(name="q"))
    with pytest.raises(OutcomeUnknown, match="use the same Penstock on both sides"):
        client.call(produce())
    assert client.call(produce()) == STORED


def test_an_answer_that_is_too_large_is_not_asked_for_again(
    server: ScriptedServer, client: HttpBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.wire.http_connection.MAX_BODY_BYTES", 1_000)
    server.answer(*[Raw(200, bytes(2_000))] * 2)
    with pytest.raises(InvalidRequest, match=r"the answer has 2000 bytes or more.*; ask for less at a time"):
        client.call(ReadStats(queue=1))
    with pytest.raises(OutcomeUnknown, match="ask for less at a time"):
        client.call(LeaseItems(queue=1, count=1_000))
    assert server.received.qsize() == 2


def test_what_cannot_be_encoded_is_refused(server: ScriptedServer, client: HttpBroker) -> None:
    for submitted in (False, True):
        found = outcome_of(client, CreateQueue(name="\ud800"), submitted)
        assert isinstance(found, InvalidRequest) and "CreateQueue cannot be sent to the server" in str(found)
    assert server.received.empty()


# -- leaving -------------------------------------------------------------------------------------------


def test_a_cancelled_lease_closes_its_connection_and_returns_what_comes_late(server: ScriptedServer, client: HttpBroker) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    cancel = client.submit(LeaseItems(queue=7, wait=60 * SECOND), answers.put)
    server.received.get(timeout=WAIT)
    cancel()
    server.answer(LEASED, [])
    returned = server.received.get(timeout=WAIT)
    assert isinstance(returned, SettleItems)
    assert (returned.queue, returned.action, returned.counted, returned.parts[0].lease) == (7, "retry", False, 5)
    server.left.get(timeout=WAIT)
    assert answers.empty()


def test_a_lease_that_is_cancelled_after_its_answer_is_returned(server: ScriptedServer, client: HttpBroker) -> None:
    """The task of an async caller may be cancelled just when the answer has come."""
    answers: SimpleQueue[Any] = SimpleQueue()
    server.answer(LEASED, [])
    cancel = client.submit(LeaseItems(queue=7), answers.put)
    assert answers.get(timeout=WAIT) == LEASED
    server.received.get(timeout=WAIT)
    cancel()
    assert isinstance(server.received.get(timeout=WAIT), SettleItems)


def test_a_call_that_is_cancelled_before_it_is_sent_is_not_sent(server: ScriptedServer, client: HttpBroker) -> None:
    blocked, go = threading.Event(), threading.Event()
    server.answer(STORED, STORED)

    def block(answer: Any) -> None:
        blocked.set()
        go.wait(WAIT)

    client.submit(produce(), block)
    assert blocked.wait(WAIT)
    client.submit(CreateQueue(name="never"))()
    go.set()
    assert client.call(produce()) == STORED
    assert [type(server.received.get()) for _ in range(2)] == [ProduceItems, ProduceItems]


def test_closing_ends_all_calls_and_returns_leases_that_come_late(server: ScriptedServer, client: HttpBroker) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    thread = threading.Thread(target=lambda: answers.put(outcome_of(client, produce())))
    thread.start()
    server.received.get(timeout=WAIT)
    client.submit(LeaseItems(queue=7, wait=60 * SECOND), answers.put)
    server.received.get(timeout=WAIT)
    closing = threading.Thread(target=client.close)
    closing.start()
    server.answer(SILENCE, LEASED, [])
    assert {type(answers.get(timeout=WAIT)) for _ in range(2)} == {BrokerClosed}
    thread.join()
    assert isinstance(server.received.get(timeout=WAIT), SettleItems)
    closing.join()
    for verb in (client.call, client.submit):
        with pytest.raises(BrokerClosed):
            verb(produce())
    client.close()


def test_closing_does_not_wait_long_for_a_server_that_does_not_answer(
    server: ScriptedServer, client: HttpBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "CLOSING_SECONDS", 0.1)
    client.submit(LeaseItems(queue=7, wait=60 * SECOND))
    server.received.get(timeout=WAIT)
    before = client.clock.read().elapsed
    client.close()
    assert client.clock.read().elapsed - before < 5 * SECOND
    server.answer(SILENCE)


def test_closing_ends_calls_to_a_server_that_is_gone(server: ScriptedServer, client: HttpBroker) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    client.submit(produce(), answers.put)
    client.submit(LeaseItems(queue=7, wait=60 * SECOND), answers.put)
    server.answer(DROP, DROP)
    for _ in range(2):
        server.received.get(timeout=WAIT)
    server.close()
    client.close()
    assert {type(answers.get(timeout=WAIT)) for _ in range(2)} == {BrokerClosed}


def test_the_thread_that_reads_answers_cannot_wait_for_one(server: ScriptedServer, client: HttpBroker) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    server.answer(STORED)
    client.submit(produce(), lambda answer: answers.put(outcome_of(client, produce())))
    found = answers.get(timeout=WAIT)
    assert isinstance(found, InvalidRequest) and "use submit there" in str(found)


# -- many calls ----------------------------------------------------------------------------------------


def test_calls_that_wait_do_not_keep_others_from_being_sent(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "WAITING_CONNECTIONS", 2)
    monkeypatch.setattr(http_client, "OTHER_CONNECTIONS", 1)
    monkeypatch.setattr(http_client, "SETTLING_CONNECTIONS", 1)
    client = HttpBroker(HttpAddress.parse(server.url), HttpOptions())
    settle = SettleItems(queue=1, action="complete", parts=[])
    given: list[Operation[Any]] = [*[LeaseItems(queue=1, wait=60 * SECOND)] * 4, *[produce()] * 3, *[settle] * 2]
    for operation in given:
        client.submit(operation)
    assert sorted(type(server.received.get(timeout=WAIT)).__name__ for _ in range(4)) == [
        "LeaseItems",
        "LeaseItems",
        "ProduceItems",
        "SettleItems",
    ]
    assert server.received.empty()
    server.answer(*[SILENCE] * 4)
    client.close()


# -- leases that are extended --------------------------------------------------------------------------


def test_leases_are_extended_until_that_is_stopped_or_they_have_ended(server: ScriptedServer, client: HttpBroker) -> None:
    def leases_of_next_extension() -> list[int]:
        operation = server.received.get(timeout=WAIT)
        assert isinstance(operation, SettleItems) and (operation.queue, operation.action) == (7, "extend")
        server.answer([ENDED if part.lease == 6 else Settled(1) for part in operation.parts])
        return [part.lease for part in operation.parts]

    client.auto_extend(7, 0, 5, 0.03)
    client.auto_extend(7, 1, 6, 0.03)
    extended: list[int] = []
    while extended.count(5) < 4 or 6 not in extended:
        extended += leases_of_next_extension()
    assert extended.count(6) == 1
    client.stop_extending(7, 0, 5)
    server.answer(*[STORED] * 3)  # for an extension that was on its way, too
    client.call(produce())
    found = [server.received.get(timeout=WAIT) for _ in range(server.received.qsize())]
    assert len(found) <= 2 and isinstance(found[-1], ProduceItems)


def test_the_holder_of_a_lease_is_told_when_it_may_have_ended(server: ScriptedServer, client: HttpBroker) -> None:
    told: SimpleQueue[None] = SimpleQueue()
    client.auto_extend(7, 0, 5, 0.03, LeaseDoubt(client.clock.read().elapsed + SECOND // 30, lambda: told.put(None)))
    told.get(timeout=WAIT)  # no answer came in the time of the lease
    client.stop_extending(7, 0, 5)
    server.answer([Settled(1)], [ENDED])
    client.auto_extend(7, 0, 6, 0.03, LeaseDoubt(client.clock.read().elapsed + 100 * SECOND, lambda: told.put(None)))
    told.get(timeout=WAIT)  # the server said that it has ended
    server.answer(STORED)
    client.call(produce())
    found = [server.received.get(timeout=WAIT) for _ in range(3)]
    assert [type(operation) for operation in found] == [SettleItems, SettleItems, ProduceItems], "it is not extended any more"
    assert told.empty()


def test_an_extension_that_fails_is_tried_again(server: ScriptedServer, client: HttpBroker) -> None:
    server.answer(QueueBusy("later; x"), [Settled(1)])
    client.auto_extend(7, 0, 5, 0.03)
    assert [type(server.received.get(timeout=WAIT)) for _ in range(3)] == [SettleItems] * 3
    client.stop_extending(7, 0, 5)
    server.answer([Settled(1)])
