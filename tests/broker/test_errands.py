"""Errands: whatever is asked in the inbox is answered, and is out of the way then."""

import logging
from typing import Any

import msgspec
import pytest

from penstock.broker.errands import Errand, Reply
from penstock.errors import InvalidRequest, OutcomeUnknown, PenstockError, QueueNotFound
from penstock.words.clock import MINUTE, SECOND
from tests.broker.grounds import PatchyFiles, Simulated
from tests.broker.inbox import ROOT, Outsider, ask, look, outsider
from tests.broker.rig import Rig


def answered(rig: Rig, incarnation: int, body: bytes) -> Any:
    """What is answered to an errand of these bytes."""
    other = outsider(rig)
    other.inbox.put_errand(incarnation, "asked", body)
    assert look(rig)
    assert other.left() == []
    return other.answer(incarnation, "asked")


# -- wrong ones ------------------------------------------------------------------------------------------


def test_an_unknown_verb(rig: Rig) -> None:
    desk = rig.create()
    with pytest.raises(InvalidRequest, match="no errand 'dance'; there are cursor, let_go, redrive, renew, settle, take"):
        ask(rig, desk, "dance")
    assert outsider(rig).left() == []


GOOD_TAKE = {"stream": "s", "done": 0, "want": 1, "per_key": 1, "timeout": MINUTE}


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("take", {}),
        ("take", {**GOOD_TAKE, "more": 1}),
        ("take", {**GOOD_TAKE, "stream": 7}),
        ("take", {**GOOD_TAKE, "stream": ""}),
        ("take", {**GOOD_TAKE, "stream": "a.b"}),
        ("take", {**GOOD_TAKE, "stream": "../x"}),
        ("take", {**GOOD_TAKE, "stream": "s" * 65}),
        ("take", {**GOOD_TAKE, "done": -1}),
        ("take", {**GOOD_TAKE, "done": "1"}),
        ("take", {**GOOD_TAKE, "want": -1}),
        ("take", {**GOOD_TAKE, "want": 10_000_001}),
        ("take", {**GOOD_TAKE, "want": None}),
        ("take", {**GOOD_TAKE, "per_key": 0}),
        ("take", {**GOOD_TAKE, "timeout": 0}),
        ("take", {**GOOD_TAKE, "timeout": 1 << 62}),
        ("renew", {"stream": "s", "timeout": 0}),
        ("renew", {"stream": "s", "timeout": 1 << 62}),
        ("renew", {"stream": "s"}),
        ("settle", {"action": "complete", "items": {}}),
        ("settle", {"action": "retry", "items": [1, 2]}),
        ("settle", {"action": "retry", "items": {0: 1}}),
        ("settle", {"action": "retry", "items": {"0": [1]}}),
        ("settle", {"action": "retry", "items": {0: [-1]}}),
        ("settle", {"action": "retry", "items": {0: [1 << 63]}}),
        ("settle", {"action": "retry", "items": {0: [0]}, "delay": -1}),
        ("settle", {"action": "retry", "items": {0: [0]}, "reason": 5}),
        ("settle", {"action": "retry"}),
        ("let_go", {}),
        ("let_go", {"stream": 1}),
        ("cursor", {"name": "c"}),
        ("cursor", {"name": "", "positions": {0: 1}}),
        ("cursor", {"name": 5, "positions": {0: 1}}),
        ("cursor", {"name": "c", "positions": {0: -1}}),
        ("cursor", {"name": "c", "positions": {0: "x"}}),
        ("cursor", {"name": "c", "positions": [1]}),
        ("redrive", {}),
        ("redrive", {"items": [1]}),
        ("redrive", {"items": {0: [1.5]}}),
        ("redrive", {"items": {0: [0]}, "to": 5}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_wrong_arguments(rig: Rig, verb: str, args: dict[str, Any]) -> None:
    desk = rig.create()
    desk.produce("a")
    with pytest.raises(InvalidRequest):
        ask(rig, desk, verb, **args)
    assert outsider(rig).left() == [] and outsider(rig).answers() == []
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
        msgspec.msgpack.encode({"verb": 1}),
        msgspec.msgpack.encode({"args": {}}),
        msgspec.msgpack.encode({"verb": "take", "args": {1: 2}}),
        msgspec.msgpack.encode({"verb": "cursor", "args": {"name": b"\xff", "positions": {}}}),
        b"\x82\xa4verb\xa4\xff\xfe\xfd\xfc\xa4args\x80",
        msgspec.json.encode(Errand("take")),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_errand(rig: Rig, body: bytes) -> None:
    desk = rig.create()
    with pytest.raises(InvalidRequest, match="cannot be understood"):
        answered(rig, desk.incarnation, body)


def test_an_errand_cut_anywhere(rig: Rig) -> None:
    desk = rig.create()
    whole = msgspec.msgpack.encode(Errand("cursor", {"name": "c", "positions": {0: 0}}))
    for size in range(len(whole)):
        with pytest.raises(InvalidRequest):
            answered(rig, desk.incarnation, whole[:size])
    assert answered(rig, desk.incarnation, whole) is None


def test_of_a_deleted_queue(rig: Rig) -> None:
    desk = rig.create()
    rig.broker.delete("q")
    rig.create("q")
    for verb, args in (("take", GOOD_TAKE), ("cursor", {"name": "c", "positions": {}}), ("let_go", {"stream": "s"})):
        with pytest.raises(QueueNotFound, match="any more"):
            ask(rig, desk, verb, **args)
    assert outsider(rig).left() == []
    outsider(rig).put(desk.incarnation, "let_go", stream="s")
    look(rig)
    assert len(outsider(rig).answers()) == 1, "nobody has read it"
    rig.restart()
    assert outsider(rig).answers() == []


def test_one_that_wants_no_answer_gets_none(rig: Rig) -> None:
    desk = rig.create()
    for verb in ("let_go", "dance"):
        body = msgspec.msgpack.encode(Errand(verb, {"stream": "s"}, answer=False))
        outsider(rig).inbox.put_errand(desk.incarnation, "told", body)
        look(rig)
    assert outsider(rig).left() == [] and outsider(rig).answers() == []


def test_one_that_is_taken_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    name = other.put(desk.incarnation, "take", **GOOD_TAKE)
    inbox = rig.broker.store.inbox
    waiting = inbox.waiting()
    other.inbox.withdraw(desk.incarnation, name)
    monkeypatch.setattr(inbox, "waiting", lambda: waiting)
    look(rig)
    assert other.answers() == [] and desk.stats().holder == ""


def test_one_that_is_replaced_while_it_is_done_is_done_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    desk.produce(*"abcdef")
    words = [msgspec.msgpack.encode(Errand("cursor", {"name": "c", "positions": {0: n}}, answer=False)) for n in (1, 3, 5)]
    other.inbox.put_errand(desk.incarnation, "told", words.pop(0))
    asked = rig.broker.ask

    def meanwhile(incarnation: int, verb: str, **args: Any) -> Any:
        if verb == "move_cursor" and words:
            other.inbox.put_errand(desk.incarnation, "told", words.pop(0))
        return asked(incarnation, verb, **args)

    monkeypatch.setattr(rig.broker.outside, "ask", meanwhile)
    for _ in range(3):
        look(rig)
    assert desk.ask("cursor", name="c") == {0: 5}
    assert other.left() == []


def test_a_mistake_of_ours_holds_nobody_else_up(rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    desk, other = rig.create(), outsider(rig)
    other.put(desk.incarnation, "cursor", name="c", positions={0: 1})
    name = other.put(desk.incarnation, "let_go", stream="s")
    asked = rig.broker.ask

    def mistaken(incarnation: int, verb: str, **args: Any) -> Any:
        if verb == "cursor":
            raise ArithmeticError("a mistake")
        return asked(incarnation, verb, **args)

    monkeypatch.setattr(rig.broker.outside, "ask", mistaken)
    for _ in range(3):
        look(rig)
        rig.advance(1)
    assert other.answer(desk.incarnation, name) is None
    assert len(other.left()) == 1
    assert [record.levelno for record in caplog.records if record.name == "penstock"] == [logging.ERROR], "said once"


def test_every_error_comes_back_as_what_it_was() -> None:
    with pytest.raises(QueueNotFound, match="gone"):
        Reply(error=QueueNotFound.code, message="gone").result()
    with pytest.raises(PenstockError, match="of tomorrow"):
        Reply(error="of-tomorrow", message="of tomorrow").result()
    assert Reply(5).result() == 5


# -- what cannot be done just now --------------------------------------------------------------------------


def test_one_that_cannot_be_done_for_now_is_done_later() -> None:
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    desk, other = rig.create(partitions=2), Outsider(files)
    files.broken.add(f"/{desk.incarnation:016x}/00001/")
    with pytest.raises(OutcomeUnknown):
        desk.produce(*[f"{n}" for n in range(20)], keys=[f"k{n}" for n in range(20)])
    name = other.put(desk.incarnation, "cursor", name="c", positions={0: 1})
    for _ in range(3):
        look(rig)
        rig.advance(1)
    assert other.inbox.note(desk.incarnation, name) is None and len(other.left()) == 1
    files.broken.clear()
    rig.pass_by(60)
    look(rig)
    assert other.answer(desk.incarnation, name) is None
    assert desk.ask("cursors") == {"c": {0: 1}}
    rig.broker.close()


def test_an_answer_that_cannot_be_written_is_written_later(rig: Rig) -> None:
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    desk, other = rig.create(), Outsider(files)
    files.broken.add("/answers/")
    name = other.put(desk.incarnation, "cursor", name="c", positions={0: 0})
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
    ends = desk.ask("ends")
    ask(rig, desk, "cursor", name="c", positions={0: 5, 1: 3})
    ask(rig, desk, "cursor", name="c", positions={0: 2, 1: 7})
    assert desk.ask("cursor", name="c") == {0: 5, 1: 7}
    ask(rig, desk, "cursor", name="c", positions={0: 1 << 50})
    assert desk.ask("cursor", name="c") == {0: ends[0], 1: 7}
    ask(rig, desk, "cursor", name="c", positions={9: 5})
    ask(rig, desk, "cursor", name="d", positions={})
    rig.kill()
    assert desk.ask("cursor", name="c") == {0: ends[0], 1: 7}


def test_redriven_in_place(rig: Rig) -> None:
    desk = rig.create(partitions=2)
    ids = desk.produce(*"abcd", keys=[*"abcd"])
    desk.lease(10).bury()
    chosen: dict[int, list[int]] = {}
    for id in ids[:3]:
        partition, _, offset = id.partition("-")
        chosen.setdefault(int(partition), []).append(int(offset))
    assert ask(rig, desk, "redrive", items=chosen) == 3
    assert ask(rig, desk, "redrive", items=chosen) == 0, "asked again it does nothing"
    assert ask(rig, desk, "redrive", items={9: [1], 0: [99]}) == 0
    assert desk.counts() == {"ready": 3, "buried": 1} and sorted(desk.drain()) == ["a", "b", "c"]


def test_redriven_to_a_queue(rig: Rig) -> None:
    dead, desk = rig.create("dead"), rig.create("work", partitions=3)
    dead.produce(*"abcd")
    assert ask(rig, dead, "redrive", items={0: [0, 2]}, to="work") == 2
    rig.turn()
    assert sorted(desk.drain()) == ["a", "c"] and dead.drain() == ["b", "d"]
    assert ask(rig, dead, "redrive", items={0: [0, 1, 2, 3]}, to="work") == 0
    with pytest.raises(QueueNotFound):
        ask(rig, dead, "redrive", items={0: [0]}, to="nowhere")


def test_several_at_once_are_all_done(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    desk.produce(*"abc")
    names = [other.put(desk.incarnation, "cursor", name=f"c{n}", positions={0: n}) for n in range(4)]
    other.drop(desk, "d:1")
    look(rig)
    assert [other.answer(desk.incarnation, name) for name in names] == [None] * 4
    assert desk.ask("cursors") == {f"c{n}": {0: n} for n in range(4)}
    assert other.left() == [] and desk.stats().ready == 4
    ask(rig, desk, "take", stream="s", done=0, want=9, per_key=9, timeout=SECOND)
