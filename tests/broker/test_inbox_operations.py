"""Operations in the inbox: whatever is asked there is answered, and is out of the way then."""

import logging
from typing import Any

import msgspec
import pytest

from penstock.broker.inbox import Errand
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
from tests.broker.broker_under_test import Rig, batch_of
from tests.broker.grants import taking
from tests.broker.other_process import ROOT, Outsider, Raw, ask, errand, look, outsider
from tests.broker.storages import PatchyFiles, Simulated


def answered(rig: Rig, incarnation: int, body: bytes) -> Any:
    """What is answered to an errand of these bytes."""
    other = outsider(rig)
    other.inbox.put_errand(incarnation, "asked", body)
    assert look(rig)
    assert other.left() == []
    return other.answer(incarnation, "asked")


# -- wrong ones ------------------------------------------------------------------------------------------


def test_an_unknown_operation(rig: Rig) -> None:
    desk = rig.create()
    with pytest.raises(InvalidRequest, match=r"the operation cannot be understood .*'Dance'.*; use the same Penstock on both sides"):
        answered(rig, desk.incarnation, errand({"type": "Dance", "queue": desk.incarnation}))


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
def test_wrong_fields(rig: Rig, wrong: Raw) -> None:
    desk = rig.create()
    desk.produce("a")
    with pytest.raises(InvalidRequest):
        answered(rig, desk.incarnation, errand({"queue": desk.incarnation, **wrong}))
    assert outsider(rig).answers() == []
    assert desk.counts() == {"ready": 1} and desk.stats().holder == ""


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
        errand({"type": "TakeGrant", 1: 2}),  # type: ignore[dict-item]
        errand({"type": 1}),
        errand({"type": "MoveCursor", "name": b"\xff", "to": {}}),
        b"\x81\xa9operation\x82\xa4type\xa4\xff\xfe\xfd\xfc\xa2to\x80",
        b"\x81\xa9operation" + b"\x91" * 100_000,
        msgspec.json.encode(Errand(msgspec.Raw(b"{}"))),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_operation(rig: Rig, body: bytes) -> None:
    desk = rig.create()
    with pytest.raises(InvalidRequest, match="cannot be understood"):
        answered(rig, desk.incarnation, body)


def test_one_cut_anywhere(rig: Rig) -> None:
    desk = rig.create()
    whole = errand(MoveCursor(queue=desk.incarnation, name="c", to={0: 0}))
    for size in range(len(whole)):
        with pytest.raises(InvalidRequest):
            answered(rig, desk.incarnation, whole[:size])
    assert answered(rig, desk.incarnation, whole) is None


def test_of_a_deleted_queue(rig: Rig) -> None:
    desk = rig.create()
    rig.delete("q")
    rig.create("q")
    gone: list[Operation[Any]] = [taking("s", want=1), MoveCursor(name="c", to={}), EndStream(stream="s", run="")]
    for operation in gone:
        with pytest.raises(QueueNotFound, match="any more"):
            ask(rig, desk, operation)
    assert outsider(rig).left() == []
    outsider(rig).put(desk.incarnation, EndStream(stream="s", run=""))
    look(rig)
    assert len(outsider(rig).answers()) == 1, "nobody has read it"
    rig.restart()
    assert outsider(rig).answers() == []


def test_one_that_wants_no_answer_gets_none(rig: Rig) -> None:
    desk = rig.create()
    for kind in ("EndStream", "Dance"):
        body = errand({"type": kind, "queue": desk.incarnation, "stream": "s", "run": ""}, answer=False)
        outsider(rig).inbox.put_errand(desk.incarnation, "told", body)
        look(rig)
    assert outsider(rig).left() == [] and outsider(rig).answers() == []


def test_one_that_is_taken_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    name = other.put(desk.incarnation, taking("s", want=1))
    inbox = rig.broker.store.inbox
    waiting = inbox.waiting()
    other.inbox.withdraw(desk.incarnation, name)
    monkeypatch.setattr(inbox, "waiting", lambda: waiting)
    look(rig)
    assert other.answers() == [] and desk.stats().holder == ""


def test_one_that_is_replaced_while_it_is_done_is_done_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    desk.produce(*"abcdef")
    words = [errand(MoveCursor(queue=desk.incarnation, name="c", to={0: n}), answer=False) for n in (1, 3, 5)]
    other.inbox.put_errand(desk.incarnation, "told", words.pop(0))
    call = rig.broker.call

    def meanwhile(operation: Operation[A]) -> A:
        if isinstance(operation, MoveCursor) and words:
            other.inbox.put_errand(desk.incarnation, "told", words.pop(0))
        return call(operation)

    monkeypatch.setattr(rig.broker, "call", meanwhile)
    for _ in range(3):
        look(rig)
    assert desk.call(ListCursors())["c"] == {0: 5}
    assert other.left() == []


def test_a_mistake_of_ours_holds_nobody_else_up(rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    desk, other = rig.create(), outsider(rig)
    wrong = other.put(desk.incarnation, MoveCursor(name="c", to={0: 1}))
    name = other.put(desk.incarnation, EndStream(stream="s", run=""))
    call = rig.broker.call

    def mistaken(operation: Operation[A]) -> A:
        if isinstance(operation, MoveCursor):
            raise ArithmeticError("a mistake")
        return call(operation)

    monkeypatch.setattr(rig.broker, "call", mistaken)
    for _ in range(3):
        look(rig)
        rig.advance(1)
    assert other.answer(desk.incarnation, name) is None
    with pytest.raises(OutcomeUnknown, match=r"it went wrong.*please report this"):
        other.answer(desk.incarnation, wrong)
    assert other.left() == []
    assert [record.levelno for record in caplog.records if record.name == "penstock"] == [logging.ERROR], "said once"


def test_every_error_comes_back_as_what_it_was() -> None:
    assert [type(Refused.of(kind("gone")).error()) for kind in PenstockError.__subclasses__()] == PenstockError.__subclasses__()
    with pytest.raises(QueueNotFound, match="gone"):
        raise Refused(QueueNotFound.code, "gone").error()
    with pytest.raises(PenstockError, match="of tomorrow"):
        raise Refused("of-tomorrow", "of tomorrow").error()


# -- what cannot be done just now --------------------------------------------------------------------------


def test_one_that_cannot_be_done_for_now_is_done_later() -> None:
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    desk, other = rig.create(partitions=2), Outsider(files)
    files.broken.add(f"/{desk.incarnation:016x}/00001/")
    with pytest.raises(OutcomeUnknown):
        desk.produce(*[f"{n}" for n in range(20)], keys=[f"k{n}" for n in range(20)])
    name = other.put(desk.incarnation, MoveCursor(name="c", to={0: 1}))
    for _ in range(3):
        look(rig)
        rig.advance(1)
    assert other.inbox.note(desk.incarnation, name) is None and len(other.left()) == 1
    files.broken.clear()
    rig.pass_by(60)
    look(rig)
    assert other.answer(desk.incarnation, name) is None
    assert desk.call(ListCursors()) == {"c": {0: 1}}
    rig.broker.close()


def test_an_answer_that_cannot_be_written_is_written_later(rig: Rig) -> None:
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    desk, other = rig.create(), Outsider(files)
    files.broken.add("/answers/")
    name = other.put(desk.incarnation, MoveCursor(name="c", to={0: 0}))
    look(rig)
    assert len(other.left()) == 1
    files.broken.clear()
    rig.advance(1)
    look(rig)
    assert other.answer(desk.incarnation, name) is None
    assert files.list(f"{ROOT}/answers") == []
    rig.broker.close()


# -- cursors and redrives ----------------------------------------------------------------------------------


def test_a_cursor_never_goes_back(rig: Rig) -> None:
    desk = rig.create(partitions=2)
    desk.produce(*[f"{n}" for n in range(40)], keys=[f"k{n}" for n in range(40)])
    ends = desk.call(FindOffsets(at="newest"))
    ask(rig, desk, MoveCursor(name="c", to={0: 5, 1: 3}, onward=True))
    ask(rig, desk, MoveCursor(name="c", to={0: 2, 1: 7}, onward=True))
    assert desk.call(ListCursors())["c"] == {0: 5, 1: 7}
    ask(rig, desk, MoveCursor(name="c", to={0: 1 << 50}, onward=True))
    assert desk.call(ListCursors())["c"] == {0: ends[0], 1: 7}
    ask(rig, desk, MoveCursor(name="c", to={9: 5}, onward=True))
    ask(rig, desk, MoveCursor(name="d", to={}, onward=True))
    rig.kill()
    assert desk.call(ListCursors())["c"] == {0: ends[0], 1: 7}


def test_redriven_in_place(rig: Rig) -> None:
    desk = rig.create(partitions=2)
    ids = desk.produce(*"abcd", keys=[*"abcd"])
    desk.lease(10).bury()
    chosen: dict[int, list[int]] = {}
    for id in ids[:3]:
        partition, _, offset = id.partition("-")
        chosen.setdefault(int(partition), []).append(int(offset))
    assert ask(rig, desk, RedriveItems(items=chosen, to=desk.incarnation)) == 3
    assert ask(rig, desk, RedriveItems(items=chosen, to=desk.incarnation)) == 0, "asked again it does nothing"
    assert ask(rig, desk, RedriveItems(items={9: [1], 0: [99]}, to=desk.incarnation)) == 0
    assert desk.counts() == {"ready": 3, "buried": 1} and sorted(desk.drain()) == ["a", "b", "c"]


def test_redriven_to_a_queue(rig: Rig) -> None:
    dead, desk = rig.create("dead"), rig.create("work", partitions=3)
    dead.produce(*"abcd")
    assert ask(rig, dead, RedriveItems(items={0: [0, 2]}, to=desk.incarnation)) == 2
    rig.turn()
    assert sorted(desk.drain()) == ["a", "c"] and dead.drain() == ["b", "d"]
    assert ask(rig, dead, RedriveItems(items={0: [0, 1, 2, 3]}, to=desk.incarnation)) == 0
    with pytest.raises(QueueNotFound):
        ask(rig, dead, RedriveItems(items={0: [0]}, to=desk.incarnation + 1))


def test_several_at_once_are_all_done(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    desk.produce(*"abc")
    names = [other.put(desk.incarnation, MoveCursor(name=f"c{n}", to={0: n})) for n in range(4)]
    other.drop(desk, "d:1")
    look(rig)
    assert [other.answer(desk.incarnation, name) for name in names] == [None] * 4
    assert desk.call(ListCursors()) == {f"c{n}": {0: n} for n in range(4)}
    assert other.left() == [] and desk.stats().ready == 4
    ask(rig, desk, taking("s", want=9, per_key=9, timeout=SECOND))


# -- operations that wait, or are done twice -------------------------------------------------------------


def test_one_that_would_wait_does_not_hold_the_others_up(rig: Rig) -> None:
    desk = rig.create(max_items=1)
    desk.produce("full")
    other = outsider(rig)
    name = other.put(desk.incarnation, ProduceItems(queue=desk.incarnation, batch=batch_of("more"), wait=600 * SECOND))
    paused = other.put(desk.incarnation, PauseQueue(queue=desk.incarnation, lease=True))
    before = rig.clock.read().elapsed
    rig.broker.inbox.look()
    assert rig.clock.read().elapsed == before and other.inbox.note(desk.incarnation, paused) is not None
    assert other.inbox.note(desk.incarnation, name) is None, "the queue is full for now: it is tried again"


def test_one_that_is_done_twice_adds_nothing_twice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = rig.create()
    other = outsider(rig)
    name = other.put(desk.incarnation, ProduceItems(queue=desk.incarnation, batch=batch_of("once")))
    with monkeypatch.context() as patch:
        patch.setattr(type(rig.broker.store.inbox), "put_note", failing)
        rig.broker.inbox.look()
    rig.advance(1)
    rig.broker.inbox.look()
    assert desk.stats().produced == 1 and other.inbox.note(desk.incarnation, name) is not None


def failing(*_: object) -> None:
    raise StorageFailed("the disk is full; make room")
