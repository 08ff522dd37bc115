"""What a stream said of items that failed: of one batch, of one that is repeated, and of what became of the others meanwhile."""

import pytest

from penstock.broker.streams import Streams
from penstock.errors import OutcomeUnknown
from penstock.logs.files.inbox import FileInbox
from penstock.operations import SeekItems
from penstock.testing import Halt
from penstock.words import ids
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import Rig
from tests.broker.grants import fail, grant, granted, keyed, named, renewing, settle, take, taking
from tests.broker.other_process import Outsider, ask, look, order_of, outsider
from tests.broker.storages import PatchyFiles, Simulated

# -- in a key's line ---------------------------------------------------------------------------------------


def test_those_behind_a_buried_one_are_done(rig: Rig) -> None:
    desk = rig.create(partitions=2)
    keyed(desk, *[f"k:{n}" for n in range(5)], *[f"l:{n}" for n in range(5)])
    take(rig, desk)
    settle(rig, desk, named(granted(rig, desk, 1), "k:1", "k:3", "l:0"), "bury")
    assert take(rig, desk, 1) == (1, 0)
    assert desk.counts() == {"completed": 7, "buried": 3}
    desk.redrive_buried()
    assert take(rig, desk, 1) == (2, 3)
    assert order_of([*granted(rig, desk, 2).values()]) == {"k": [1, 3], "l": [0]}


def test_buried_for_several_reasons(rig: Rig) -> None:
    desk = rig.create()
    keyed(desk, *[f"k:{n}" for n in range(5)])
    take(rig, desk)
    found = granted(rig, desk, 1)
    settle(rig, desk, named(found, "k:3"), "bury", reason="x")
    settle(rig, desk, named(found, "k:1"), "bury", reason="y")
    assert take(rig, desk, 1) == (1, 0)
    assert desk.counts() == {"completed": 3, "buried": 2}
    assert [desk.explain(id).reason for id in named(found, "k:1", "k:3")] == ["y", "x"]


def test_one_buried_and_one_retried_of_a_key(rig: Rig) -> None:
    """What stands behind the retried one comes again with it, in order."""
    desk = rig.create()
    keyed(desk, *[f"k:{n}" for n in range(6)], *[f"l:{n}" for n in range(3)])
    take(rig, desk)
    found = granted(rig, desk, 1)
    settle(rig, desk, named(found, "k:3", "l:1"), "retry", reason="once more")
    settle(rig, desk, named(found, "k:1", "k:5"), "bury")
    assert take(rig, desk, 1) == (2, 4)
    assert order_of([*granted(rig, desk, 2).values()]) == {"k": [3, 4], "l": [1, 2]}
    assert [desk.explain(id).attempts for id in named(found, "k:3", "k:4")] == [2, 1]
    assert take(rig, desk, 2) == (2, 0)
    assert desk.counts() == {"completed": 7, "buried": 2}


@pytest.mark.parametrize("away", [0, 1_000])
@pytest.mark.parametrize("cut_at", ["_fail", "_complete", "remove_note"])
def test_an_owner_cut_off_between_burying_and_completing(rig: Rig, cut_at: str, away: int) -> None:
    desk = rig.create()
    keyed(desk, *[f"k:{n}" for n in range(5)])
    take(rig, desk)
    found = granted(rig, desk, 1)
    settle(rig, desk, named(found, "k:1"), "bury")
    outsider(rig).put(desk.incarnation, taking(done=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileInbox if cut_at == "remove_note" else Streams, cut_at, _cut_off)
        with pytest.raises(Halt):
            look(rig)
    rig.clock.advance(away * SECOND)
    rig.kill()
    rig.turn()
    look(rig)
    if cut_at == "_fail" and away:
        assert desk.counts() == {"completed": 4, "ready": 1}, "its lease has ended, so it comes again"
    else:
        assert desk.counts() == {"completed": 4, "buried": 1}


def _cut_off(*args: object, **options: object) -> None:
    raise Halt("here")


# -- a batch that is repeated --------------------------------------------------------------------------------


def test_what_was_said_of_a_batch_counts_no_more_when_it_is_repeated(rig: Rig) -> None:
    desk = rig.create()
    desk.produce(*"abc")
    take(rig, desk, want=2)
    settle(rig, desk, named(granted(rig, desk, 1), "a"), "bury")
    ask(rig, desk, renewing())
    assert grant(rig, desk, 1).failed, "a sign of life says nothing of that"
    ask(rig, desk, renewing(run="2", again=1))
    assert grant(rig, desk, 1).failed, "that one is committed"
    ask(rig, desk, renewing(run="2", again=0))
    assert grant(rig, desk, 1).failed == []
    assert take(rig, desk, 1) == (2, 1)
    assert desk.counts() == {"completed": 2, "leased": 1}


# -- many reasons ----------------------------------------------------------------------------------------------


def test_many_reasons_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = rig.create()
    desk.produce(*[f"{n}" for n in range(50)])
    take(rig, desk)
    saved = []
    save = Streams._save

    def noted(self: Streams, incarnation: int, stream: str, number: int, found: object) -> None:
        saved.append(number)
        save(self, incarnation, stream, number, found)  # type: ignore[arg-type]

    monkeypatch.setattr(Streams, "_save", noted)
    lots = [(f"because {n}", {0: [n]}) for n in range(40)] + [("the last word", {0: [7, 7, 99]})]
    assert fail(rig, desk, "bury", lots) == (40, 1) and saved == [1]
    assert fail(rig, desk, "bury", [("no, because", {0: [5]})]) == (1, 0)
    take(rig, desk, 1, want=0)
    assert desk.counts() == {"buried": 40, "completed": 10}
    reasons = {n: desk.explain(ids.format_id(0, n)).reason for n in (0, 5, 7, 39)}
    assert reasons == {0: "because 0", 5: "no, because", 7: "the last word", 39: "because 39"}


# -- what happened meanwhile -------------------------------------------------------------------------------------


def test_what_was_sought_again_since_is_not_completed_by_right(rig: Rig) -> None:
    desk = rig.create()
    desk.produce(*"abc")
    take(rig, desk, timeout=10)
    rig.pass_by(10)
    desk.lease(2, consumer="other").complete()
    desk.call(SeekItems(start={0: 0}))
    assert desk.counts() == {"ready": 3}
    assert take(rig, desk, 1) == (2, 2)
    assert sorted(granted(rig, desk, 2).values()) == ["a", "b"]
    assert desk.counts() == {"completed": 1, "leased": 2}


def test_a_partition_that_is_out_of_order_stops_no_stream() -> None:
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    desk = rig.create(partitions=3)
    keyed(desk, *[f"k{n}:1" for n in range(30)])
    lost = desk.loop.turns.members[1].state.ready
    files.break_partition(1)
    with pytest.raises(OutcomeUnknown):
        keyed(desk, *[f"k{n}:2" for n in range(30)])
    assert not desk.loop.turns.members[1].healthy and lost
    other = Outsider(files)
    name = other.put(desk.incarnation, taking(want=1_000))
    look(rig)
    assert other.answer(desk.incarnation, name).items == 30 - lost
    files.broken.clear()
    rig.broker.close()
