"""Operations that other processes send as bytes: wrong ones are refused and change nothing; cursors and redrives."""

from typing import Any

import msgspec
import pytest

from penstock import operations
from penstock.errors import InvalidRequest, PenstockError, QueueNotFound
from penstock.operations import EndStream, FindOffsets, ListCursors, MoveCursor, Operation, RedriveItems
from penstock.words.clock import MINUTE
from penstock.words.errors import Refused
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest
from tests.broker.grants import take_grant_operation
from tests.broker.other_process import ask_owner

Raw = dict[str, Any]
"""An operation, valid or not, as the dictionary that its bytes encode."""


def answered(broker: BrokerUnderTest, queue: QueueUnderTest, body: bytes) -> Any:
    """The answer to an operation of these bytes."""
    return ask_owner(broker, queue, operations.decode(body))


# -- wrong ones ------------------------------------------------------------------------------------------


def test_an_unknown_operation_is_refused(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    with pytest.raises(InvalidRequest, match=r"the operation cannot be understood .*'Dance'.*; use the same Penstock on both sides"):
        answered(file_broker, queue, msgspec.msgpack.encode({"type": "Dance", "queue": queue.incarnation}))


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
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_operation_with_wrong_fields_is_refused(file_broker: BrokerUnderTest, wrong: Raw) -> None:
    queue = file_broker.create()
    queue.produce("a")
    with pytest.raises(InvalidRequest):
        answered(file_broker, queue, msgspec.msgpack.encode(wrong))
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
        msgspec.msgpack.encode({"type": "TakeGrant", 1: 2}),
        msgspec.msgpack.encode({"type": 1}),
        msgspec.msgpack.encode({"type": "MoveCursor", "name": b"\xff", "to": {}}),
        b"\x82\xa4type\xa4\xff\xfe\xfd\xfc\xa2to\x80",
        msgspec.json.encode({"type": "ListQueues"}),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bytes_that_are_no_operation_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be understood"):
        operations.decode(body)


def test_a_truncated_operation_is_refused(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    whole = operations.encode(MoveCursor(queue=queue.incarnation, name="c", to={0: 0}))
    for size in range(len(whole)):
        with pytest.raises(InvalidRequest):
            operations.decode(whole[:size])
    assert answered(file_broker, queue, whole) is None


def test_an_operation_on_a_deleted_queue_is_refused(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    file_broker.delete("q")
    file_broker.create("q")
    gone: list[Operation[Any]] = [take_grant_operation("s", want=1), MoveCursor(name="c", to={}), EndStream(stream="s", run="")]
    for operation in gone:
        with pytest.raises(QueueNotFound):
            ask_owner(file_broker, queue, operation)


def test_every_error_keeps_its_type_in_an_answer() -> None:
    assert [type(Refused.of(kind("gone")).error()) for kind in PenstockError.__subclasses__()] == PenstockError.__subclasses__()
    with pytest.raises(QueueNotFound, match="gone"):
        raise Refused(QueueNotFound.code, "gone").error()
    with pytest.raises(PenstockError, match="of tomorrow"):
        raise Refused("of-tomorrow", "of tomorrow").error()


# -- cursors and redrives ----------------------------------------------------------------------------------


def test_a_cursor_never_goes_back(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    queue.produce(*[f"{n}" for n in range(40)], keys=[f"k{n}" for n in range(40)])
    ends = queue.call(FindOffsets(at="newest"))
    ask_owner(file_broker, queue, MoveCursor(name="c", to={0: 5, 1: 3}, forward_only=True))
    ask_owner(file_broker, queue, MoveCursor(name="c", to={0: 2, 1: 7}, forward_only=True))
    assert queue.call(ListCursors())["c"] == {0: 5, 1: 7}
    ask_owner(file_broker, queue, MoveCursor(name="c", to={0: 1 << 50}, forward_only=True))
    assert queue.call(ListCursors())["c"] == {0: ends[0], 1: 7}
    ask_owner(file_broker, queue, MoveCursor(name="c", to={9: 5}, forward_only=True))
    ask_owner(file_broker, queue, MoveCursor(name="d", to={}, forward_only=True))
    file_broker.kill()
    assert queue.call(ListCursors())["c"] == {0: ends[0], 1: 7}


def test_a_redrive_of_chosen_items_within_a_queue(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    ids = queue.produce(*"abcd", keys=[*"abcd"])
    queue.lease(10).bury()
    chosen: dict[int, list[int]] = {}
    for id in ids[:3]:
        partition, _, offset = id.partition("-")
        chosen.setdefault(int(partition), []).append(int(offset))
    assert ask_owner(file_broker, queue, RedriveItems(items=chosen, to=queue.incarnation)) == 3
    assert ask_owner(file_broker, queue, RedriveItems(items=chosen, to=queue.incarnation)) == 0, "asked again it does nothing"
    assert ask_owner(file_broker, queue, RedriveItems(items={9: [1], 0: [99]}, to=queue.incarnation)) == 0
    assert queue.counts() == {"ready": 3, "buried": 1} and sorted(queue.drain()) == ["a", "b", "c"]


def test_a_redrive_of_chosen_items_to_another_queue(file_broker: BrokerUnderTest) -> None:
    dead, queue = file_broker.create("dead"), file_broker.create("work", partitions=3)
    dead.produce(*"abcd")
    assert ask_owner(file_broker, dead, RedriveItems(items={0: [0, 2]}, to=queue.incarnation)) == 2
    file_broker.turn()
    assert sorted(queue.drain()) == ["a", "c"] and dead.drain() == ["b", "d"]
    assert ask_owner(file_broker, dead, RedriveItems(items={0: [0, 1, 2, 3]}, to=queue.incarnation)) == 0
    with pytest.raises(QueueNotFound):
        ask_owner(file_broker, dead, RedriveItems(items={0: [0]}, to=queue.incarnation + 1))
