"""Remote operations in the inbox: every one is answered and removed."""

import logging
from typing import Any

import msgspec
import pytest

from penstock.broker.inbox import RemoteOperation
from penstock.errors import InvalidRequest, OutcomeUnknown, PenstockError, QueueNotFound, StorageFailed
from penstock.operations import (
    A,
    EndStream,
    FindOffsets,
    ListCursors,
    MoveCursor,
    Operation,
    PauseQueue,
    ProduceItems,
    RedriveItems,
)
from penstock.words.clock import MINUTE, SECOND
from penstock.words.errors import Refused
from tests.broker.broker_under_test import BrokerUnderTest, batch_of
from tests.broker.grants import take_grant_operation
from tests.broker.other_process import ROOT, OtherProcess, Raw, ask_through_inbox, encoded_remote_operation, other_process, process_inbox
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage


def answered(broker: BrokerUnderTest, incarnation: int, body: bytes) -> Any:
    """The answer to a remote operation of these bytes."""
    other = other_process(broker)
    other.inbox.put_operation(incarnation, "asked", body)
    assert process_inbox(broker)
    assert other.inbox_files() == []
    return other.answer(incarnation, "asked")


# -- wrong ones ------------------------------------------------------------------------------------------


def test_an_unknown_remote_operation_is_refused(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    with pytest.raises(InvalidRequest, match=r"the operation cannot be understood .*'Dance'.*; use the same Penstock on both sides"):
        answered(file_broker, queue.incarnation, encoded_remote_operation({"type": "Dance", "queue": queue.incarnation}))


GOOD_TAKE = {"stream": "s", "run": "r", "done": 0, "want": 1, "per_key": 1, "timeout": MINUTE}


def fail(*, action: object = "retry", **more: object) -> Raw:
    return {"type": "FailGranted", "action": action, **more}


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "TakeGrant"},
        {"type": "TakeGrant", **GOOD_TAKE, "more": 1},
        {"type": "TakeGrant", **GOOD_TAKE, "stream": 7},
        {"type": "TakeGrant", **GOOD_TAKE, "stream": ""},
        {"type": "TakeGrant", **GOOD_TAKE, "stream": "a.b"},
        {"type": "TakeGrant", **GOOD_TAKE, "stream": "../x"},
        {"type": "TakeGrant", **GOOD_TAKE, "stream": "s" * 65},
        {"type": "TakeGrant", **GOOD_TAKE, "done": -1},
        {"type": "TakeGrant", **GOOD_TAKE, "done": "1"},
        {"type": "TakeGrant", **GOOD_TAKE, "want": -1},
        {"type": "TakeGrant", **GOOD_TAKE, "want": 10_000_001},
        {"type": "TakeGrant", **GOOD_TAKE, "want": None},
        {"type": "TakeGrant", **GOOD_TAKE, "per_key": 0},
        {"type": "TakeGrant", **GOOD_TAKE, "timeout": 0},
        {"type": "TakeGrant", **GOOD_TAKE, "timeout": 1 << 62},
        {"type": "RenewStream", "stream": "s", "run": "r", "timeout": 0},
        {"type": "RenewStream", "stream": "s", "run": "r", "timeout": 1 << 62},
        {"type": "RenewStream", "stream": "s", "run": "r"},
        fail(action="complete", lots=[]),
        fail(lots={0: [1]}),
        fail(lots=[["", [1, 2]]]),
        fail(lots=[["", {0: 1}]]),
        fail(lots=[["", {"0": [1]}]]),
        fail(lots=[["", {0: [-1]}]]),
        fail(lots=[["", {0: [1 << 63]}]]),
        fail(lots=[["", {0: [0]}]], delay=-1),
        fail(lots=[[5, {0: [0]}]]),
        fail(),
        {"type": "EndStream", "run": "r"},
        {"type": "EndStream", "stream": 1, "run": "r"},
        {"type": "MoveCursor", "name": "c"},
        {"type": "MoveCursor", "name": "", "to": {0: 1}},
        {"type": "MoveCursor", "name": 5, "to": {0: 1}},
        {"type": "MoveCursor", "name": "c", "to": {0: -1}},
        {"type": "MoveCursor", "name": "c", "to": {0: "x"}},
        {"type": "MoveCursor", "name": "c", "to": [1]},
        {"type": "RedriveItems"},
        {"type": "RedriveItems", "to": 1, "items": [1]},
        {"type": "RedriveItems", "to": 1, "items": {0: [1.5]}},
        {"type": "RedriveItems", "to": "work", "items": {0: [0]}},
        {"type": "RedriveItems", "items": {0: [0]}},
        {"type": "MoveCursor", "name": "c", "to": {0: 1}, "queue": 5},
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_operation_with_wrong_fields_is_refused(file_broker: BrokerUnderTest, wrong: Raw) -> None:
    queue = file_broker.create()
    queue.produce("a")
    with pytest.raises(InvalidRequest):
        answered(file_broker, queue.incarnation, encoded_remote_operation({"queue": queue.incarnation, **wrong}))
    assert other_process(file_broker).answer_files() == []
    assert queue.counts() == {"ready": 1} and queue.stats().holder == ""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"\xc1",
        b"\xff" * 50,
        b"\x91" * 100_000,
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"operation": 1}),
        msgspec.msgpack.encode({"answer": True}),
        encoded_remote_operation({"type": "TakeGrant", 1: 2}),  # type: ignore[dict-item]
        encoded_remote_operation({"type": 1}),
        encoded_remote_operation({"type": "MoveCursor", "name": b"\xff", "to": {}}),
        b"\x81\xa9operation\x82\xa4type\xa4\xff\xfe\xfd\xfc\xa2to\x80",
        b"\x81\xa9operation" + b"\x91" * 100_000,
        msgspec.json.encode(RemoteOperation(msgspec.Raw(b"{}"))),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bytes_that_are_no_operation_are_refused(file_broker: BrokerUnderTest, body: bytes) -> None:
    queue = file_broker.create()
    with pytest.raises(InvalidRequest, match="cannot be understood"):
        answered(file_broker, queue.incarnation, body)


def test_a_truncated_operation_is_refused(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    whole = encoded_remote_operation(MoveCursor(queue=queue.incarnation, name="c", to={0: 0}))
    for size in range(len(whole)):
        with pytest.raises(InvalidRequest):
            answered(file_broker, queue.incarnation, whole[:size])
    assert answered(file_broker, queue.incarnation, whole) is None


def test_an_operation_on_a_deleted_queue_is_refused(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    file_broker.delete("q")
    file_broker.create("q")
    gone: list[Operation[Any]] = [take_grant_operation("s", want=1), MoveCursor(name="c", to={}), EndStream(stream="s", run="")]
    for operation in gone:
        with pytest.raises(QueueNotFound, match="any more"):
            ask_through_inbox(file_broker, queue, operation)
    assert other_process(file_broker).inbox_files() == []
    other_process(file_broker).put_remote_operation(queue.incarnation, EndStream(stream="s", run=""))
    process_inbox(file_broker)
    assert len(other_process(file_broker).answer_files()) == 1, "nobody has read it"
    file_broker.restart()
    assert other_process(file_broker).answer_files() == []


def test_an_operation_that_wants_no_answer_gets_none(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    for kind in ("EndStream", "Dance"):
        body = encoded_remote_operation({"type": kind, "queue": queue.incarnation, "stream": "s", "run": ""}, answer=False)
        other_process(file_broker).inbox.put_operation(queue.incarnation, "told", body)
        process_inbox(file_broker)
    assert other_process(file_broker).inbox_files() == [] and other_process(file_broker).answer_files() == []


def test_a_withdrawn_operation_is_not_done(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    name = other.put_remote_operation(queue.incarnation, take_grant_operation("s", want=1))
    inbox = file_broker.embedded.store.inbox
    waiting = inbox.waiting()
    other.inbox.withdraw_operation(queue.incarnation, name)
    monkeypatch.setattr(inbox, "waiting", lambda: waiting)
    process_inbox(file_broker)
    assert other.answer_files() == [] and queue.stats().holder == ""


def test_an_operation_that_replaces_one_being_done_is_done_too(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    queue.produce(*"abcdef")
    words = [encoded_remote_operation(MoveCursor(queue=queue.incarnation, name="c", to={0: n}), answer=False) for n in (1, 3, 5)]
    other.inbox.put_operation(queue.incarnation, "told", words.pop(0))
    call = file_broker.embedded.call

    def meanwhile(operation: Operation[A]) -> A:
        if isinstance(operation, MoveCursor) and words:
            other.inbox.put_operation(queue.incarnation, "told", words.pop(0))
        return call(operation)

    monkeypatch.setattr(file_broker.embedded, "call", meanwhile)
    for _ in range(3):
        process_inbox(file_broker)
    assert queue.call(ListCursors())["c"] == {0: 5}
    assert other.inbox_files() == []


def test_a_bug_in_one_entry_does_not_stop_the_others(
    file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    wrong = other.put_remote_operation(queue.incarnation, MoveCursor(name="c", to={0: 1}))
    name = other.put_remote_operation(queue.incarnation, EndStream(stream="s", run=""))
    call = file_broker.embedded.call

    def mistaken(operation: Operation[A]) -> A:
        if isinstance(operation, MoveCursor):
            raise ArithmeticError("a mistake")
        return call(operation)

    monkeypatch.setattr(file_broker.embedded, "call", mistaken)
    for _ in range(3):
        process_inbox(file_broker)
        file_broker.advance(1)
    assert other.answer(queue.incarnation, name) is None
    with pytest.raises(OutcomeUnknown, match=r"this failed because of a bug.*please report it"):
        other.answer(queue.incarnation, wrong)
    assert other.inbox_files() == []
    assert [record.levelno for record in caplog.records if record.name == "penstock"] == [logging.ERROR], "said once"


def test_every_error_keeps_its_type_in_an_answer() -> None:
    assert [type(Refused.of(kind("gone")).error()) for kind in PenstockError.__subclasses__()] == PenstockError.__subclasses__()
    with pytest.raises(QueueNotFound, match="gone"):
        raise Refused(QueueNotFound.code, "gone").error()
    with pytest.raises(PenstockError, match="of tomorrow"):
        raise Refused("of-tomorrow", "of tomorrow").error()


# -- what cannot be done just now --------------------------------------------------------------------------


def test_an_operation_that_fails_for_now_is_done_later() -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue, other = broker.create(partitions=2), OtherProcess(files)
    files.failing_paths.add(f"/{queue.incarnation:016x}/00001/")
    with pytest.raises(OutcomeUnknown):
        queue.produce(*[f"{n}" for n in range(20)], keys=[f"k{n}" for n in range(20)])
    name = other.put_remote_operation(queue.incarnation, MoveCursor(name="c", to={0: 1, 1: 0}))
    for _ in range(3):
        process_inbox(broker)
        broker.advance(1)
    assert other.inbox.blob(queue.incarnation, name) is None and len(other.inbox_files()) == 1
    files.failing_paths.clear()
    broker.advance_in_steps(60)
    process_inbox(broker)
    assert other.answer(queue.incarnation, name) is None
    assert queue.call(ListCursors()) == {"c": {0: 1, 1: 0}}
    broker.embedded.close()


def test_an_answer_that_cannot_be_written_is_written_later(file_broker: BrokerUnderTest) -> None:
    files = PartlyFailingFiles()
    file_broker = BrokerUnderTest(SimulatedStorage(files))
    queue, other = file_broker.create(), OtherProcess(files)
    files.failing_paths.add("/answers/")
    name = other.put_remote_operation(queue.incarnation, MoveCursor(name="c", to={0: 0}))
    process_inbox(file_broker)
    assert len(other.inbox_files()) == 1
    files.failing_paths.clear()
    file_broker.advance(1)
    process_inbox(file_broker)
    assert other.answer(queue.incarnation, name) is None
    assert files.list(f"{ROOT}/answers") == []
    file_broker.embedded.close()


# -- cursors and redrives ----------------------------------------------------------------------------------


def test_a_cursor_never_goes_back(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    queue.produce(*[f"{n}" for n in range(40)], keys=[f"k{n}" for n in range(40)])
    ends = queue.call(FindOffsets(at="newest"))
    ask_through_inbox(file_broker, queue, MoveCursor(name="c", to={0: 5, 1: 3}, forward_only=True))
    ask_through_inbox(file_broker, queue, MoveCursor(name="c", to={0: 2, 1: 7}, forward_only=True))
    assert queue.call(ListCursors())["c"] == {0: 5, 1: 7}
    ask_through_inbox(file_broker, queue, MoveCursor(name="c", to={0: 1 << 50}, forward_only=True))
    assert queue.call(ListCursors())["c"] == {0: ends[0], 1: 7}
    ask_through_inbox(file_broker, queue, MoveCursor(name="c", to={9: 5}, forward_only=True))
    ask_through_inbox(file_broker, queue, MoveCursor(name="d", to={}, forward_only=True))
    file_broker.kill()
    assert queue.call(ListCursors())["c"] == {0: ends[0], 1: 7}


def test_a_remote_redrive_within_a_queue(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    ids = queue.produce(*"abcd", keys=[*"abcd"])
    queue.lease(10).bury()
    chosen: dict[int, list[int]] = {}
    for id in ids[:3]:
        partition, _, offset = id.partition("-")
        chosen.setdefault(int(partition), []).append(int(offset))
    assert ask_through_inbox(file_broker, queue, RedriveItems(items=chosen, to=queue.incarnation)) == 3
    assert ask_through_inbox(file_broker, queue, RedriveItems(items=chosen, to=queue.incarnation)) == 0, "asked again it does nothing"
    assert ask_through_inbox(file_broker, queue, RedriveItems(items={9: [1], 0: [99]}, to=queue.incarnation)) == 0
    assert queue.counts() == {"ready": 3, "buried": 1} and sorted(queue.drain()) == ["a", "b", "c"]


def test_a_remote_redrive_to_another_queue(file_broker: BrokerUnderTest) -> None:
    dead, queue = file_broker.create("dead"), file_broker.create("work", partitions=3)
    dead.produce(*"abcd")
    assert ask_through_inbox(file_broker, dead, RedriveItems(items={0: [0, 2]}, to=queue.incarnation)) == 2
    file_broker.turn()
    assert sorted(queue.drain()) == ["a", "c"] and dead.drain() == ["b", "d"]
    assert ask_through_inbox(file_broker, dead, RedriveItems(items={0: [0, 1, 2, 3]}, to=queue.incarnation)) == 0
    with pytest.raises(QueueNotFound):
        ask_through_inbox(file_broker, dead, RedriveItems(items={0: [0]}, to=queue.incarnation + 1))


def test_several_operations_are_all_done(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    queue.produce(*"abc")
    names = [other.put_remote_operation(queue.incarnation, MoveCursor(name=f"c{n}", to={0: n})) for n in range(4)]
    other.publish_texts(queue, "d:1")
    process_inbox(file_broker)
    assert [other.answer(queue.incarnation, name) for name in names] == [None] * 4
    assert queue.call(ListCursors()) == {f"c{n}": {0: n} for n in range(4)}
    assert other.inbox_files() == [] and queue.stats().ready == 4
    ask_through_inbox(file_broker, queue, take_grant_operation("s", want=9, per_key=9, timeout=SECOND))


# -- operations that wait, or are done twice -------------------------------------------------------------


def test_an_operation_that_would_wait_does_not_delay_the_others(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(max_items=1)
    queue.produce("full")
    other = other_process(file_broker)
    name = other.put_remote_operation(queue.incarnation, ProduceItems(queue=queue.incarnation, batch=batch_of("more"), wait=600 * SECOND))
    paused = other.put_remote_operation(queue.incarnation, PauseQueue(queue=queue.incarnation, lease=True))
    before = file_broker.clock.read().elapsed
    file_broker.embedded.inbox.process()
    assert file_broker.clock.read().elapsed == before and other.inbox.blob(queue.incarnation, paused) is not None
    assert other.inbox.blob(queue.incarnation, name) is None, "the queue is full for now: it is tried again"


def test_an_operation_done_twice_adds_items_once(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = file_broker.create()
    other = other_process(file_broker)
    name = other.put_remote_operation(queue.incarnation, ProduceItems(queue=queue.incarnation, batch=batch_of("once")))
    with monkeypatch.context() as patch:
        patch.setattr(type(file_broker.embedded.store.inbox), "put_blob", failing)
        file_broker.embedded.inbox.process()
    file_broker.advance(1)
    file_broker.embedded.inbox.process()
    assert queue.stats().produced == 1 and other.inbox.blob(queue.incarnation, name) is not None


def failing(*_: object) -> None:
    raise StorageFailed("the disk is full; make room")
