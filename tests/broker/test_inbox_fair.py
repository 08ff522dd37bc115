"""Large drops keep nobody waiting, anonymous writes push nobody out of the ledger, and what is left behind goes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import inbox
from penstock.broker.inbox import InboxKeeper
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.store import DropManifest, StagedPart
from penstock.loop.requests import ProduceRequest, Request
from penstock.operations import MoveCursor
from penstock.rules import catalog
from penstock.testing import Halt
from penstock.words.clock import DAY, SECOND
from tests.broker.broker_under_test import Rig, batch_of
from tests.broker.grants import renewing, take
from tests.broker.other_process import Outsider, ask, look, order_of, outsider
from tests.broker.storages import Real

TIMEOUT = 10


def slow(rig: Rig, monkeypatch: pytest.MonkeyPatch, where: str, meanwhile: Callable[[], object]) -> None:
    """Whatever is done with a chunk of a drop takes seconds, and something else happens meanwhile."""

    def passes() -> None:
        rig.clock.advance(4 * SECOND)
        meanwhile()

    if where == "adopted":
        ran = rig.broker.run

        def run(incarnation: int, request: Request) -> Any:
            if isinstance(request, ProduceRequest):
                passes()
            return ran(incarnation, request)

        monkeypatch.setattr(rig.broker, "run", run)
    else:
        monkeypatch.setattr(inbox, "validate", lambda batch: passes())


@pytest.mark.parametrize("where", ["looked through", "adopted"])
def test_a_living_stream_keeps_its_right_while_a_large_drop_is(rig: Rig, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    desk, bulk, other = rig.create(), rig.create("bulk"), outsider(rig)
    desk.produce("a", "b")
    assert take(rig, desk, timeout=TIMEOUT) == (1, 2)
    other.publish(bulk.incarnation, *[batch_of(f"{n}") for n in range(8)])
    asked: list[str] = []
    slow(rig, monkeypatch, where, lambda: asked.append(other.put(desk.incarnation, renewing(timeout=TIMEOUT * SECOND))))
    look(rig)
    assert desk.stats().holder and desk.counts() == {"leased": 2}
    assert sum(other.inbox.note(desk.incarnation, name) is not None for name in asked) >= len(asked) - 1
    assert len(bulk.drain()) == 8


def test_a_look_ends_when_its_time_is_over_and_the_next_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    other.publish(desk.incarnation, *[batch_of(f"k:{n}", keys=["k"]) for n in range(6)], source="large")
    other.drop(desk, "k:6", source="small")
    with monkeypatch.context() as patch:
        slow(rig, patch, "adopted", lambda: None)
        assert not rig.broker.inbox.look(10 * SECOND)
    rig.turn()
    assert desk.stats().ready == 3, "of the large one a part; nothing overtakes the rest"
    rig.kill()
    assert order_of(desk.drain()) == {"k": [*range(7)]}
    assert other.left() == []


def test_an_opening_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InboxKeeper, "_watch", lambda self: None)
    rig = Rig(Real(tmp_path), live=True)
    desk, other = rig.create(), Outsider(SystemFiles(), str(tmp_path / "data"))
    other.drop(desk, "a:1")
    rig.restart()
    assert desk.stats().ready == 1, "what is small is there"
    other.drop(desk, "a:2", number=2)
    monkeypatch.setattr(inbox, "OPENING", 1)
    rig.restart()
    assert desk.stats().ready == 1
    assert rig.broker.inbox.look()
    assert desk.stats().ready == 2
    rig.broker.close()


# -- who is remembered -------------------------------------------------------------------------------------


def test_anonymous_writes_push_no_stream_out_of_the_ledger(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_SOURCES", 4)
    monkeypatch.setattr(catalog, "MAX_ONCE", 3)
    desk, other = rig.create(), outsider(rig)
    for source, number in (("stream", 7), ("load", 1)):
        other.drop(desk, f"{source}:{number}", source=source, number=number)
        look(rig)
    for n in range(9):
        write, parts = other.stage(desk.incarnation, [[batch_of(f"anonymous:{n}")]])
        other.inbox.publish(write, desk.incarnation, manifest_of(parts, write))
        look(rig)
    rig.restart()
    for source, number in (("stream", 7), ("load", 1)):
        other.drop(desk, f"{source}:{number}", source=source, number=number)
        look(rig)
    assert sorted(desk.drain()) == sorted(["stream:7", "load:1", *[f"anonymous:{n}" for n in range(9)]])
    known = rig.broker.catalog.get(desk.incarnation).adopted
    assert len(known) == 5 and known["stream"] == 7


def manifest_of(parts: list[StagedPart], source: str) -> DropManifest:
    return DropManifest(parts, source, 1)


def test_an_anonymous_write_is_adopted_once_though_its_removal_is_cut_off(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = rig.create(), outsider(rig)
    write, parts = other.stage(desk.incarnation, [[batch_of("a")]])
    other.inbox.publish(write, desk.incarnation, manifest_of(parts, write))

    def cut_off(*args: object) -> None:
        raise Halt("before it is removed")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.logs.files.inbox.FileInbox.done", cut_off)
        with pytest.raises(Halt):
            look(rig)
    rig.kill()
    assert other.left() == [] and desk.drain() == ["a"]


# -- what is left behind -------------------------------------------------------------------------------------


def test_an_owner_that_lives_long_sweeps_every_day(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    desk.produce("a")
    take(rig, desk, timeout=TIMEOUT)
    other.stage(desk.incarnation, [[batch_of("a")]], f"{rig.clock.read().wall:016x}-0123")
    other.put(desk.incarnation, MoveCursor(name="c", to={}))
    other.files.close(other.files.open(f"{other.root}/inbox/{desk.incarnation:016x}-cursor-x.errand.tmp", "append"))
    look(rig)
    kept: dict[int, tuple[int, int]] = {}
    for day in range(1, 35):
        rig.clock.advance(DAY)
        look(rig)
        kept[day] = len(other.left()), len(other.answers())
    assert kept[1] == (2, 2), "a killed driver's write, half an errand; a grant, an answer that nobody reads"
    assert kept[3] == (1, 1)
    assert kept[9] == (0, 1), "the grant is kept: its stream may come back"
    assert kept[34] == (0, 0)
    rig.turn()
    ask(rig, desk, MoveCursor(name="c", to={}))
