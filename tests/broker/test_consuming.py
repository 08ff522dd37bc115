"""A consumer outside of the owner's process: it is granted leases, and what it has committed is completed."""

from typing import Literal

import pytest

from penstock.broker.snapshot import Snapshot
from penstock.broker.streams import Streams
from penstock.errors import InvalidRequest
from penstock.operations import FindOffsets, ReadStats
from penstock.reports import TakenGrant
from penstock.testing import Halt
from penstock.words import ids
from penstock.words.clock import MINUTE, SECOND
from tests.broker.broker_under_test import Rig
from tests.broker.grants import grant, granted, keyed, named, renewing, settle, take, taking
from tests.broker.other_process import ROOT, ask, look, order_of, outsider
from tests.broker.storages import Simulated

# -- grants ----------------------------------------------------------------------------------------------


def test_grant_after_grant_until_nothing_is_left(rig: Rig) -> None:
    desk = rig.create(partitions=2)
    desk.produce(*[f"{n}" for n in range(25)], keys=[f"k{n}" for n in range(25)])
    found = ask(rig, desk, taking(want=10, timeout=MINUTE))
    assert found == TakenGrant(1, 10, 15)
    assert desk.counts() == {"ready": 15, "leased": 10}
    seen = [*granted(rig, desk, 1).values()]
    for number, items in ((1, 10), (2, 5)):
        assert take(rig, desk, number, want=10) == (number + 1, items)
        seen += granted(rig, desk, number + 1).values()
        assert desk.counts().get("completed", 0) == len(seen) - items
    assert take(rig, desk, 3) == (3, 0)
    assert sorted(seen, key=int) == [f"{n}" for n in range(25)]
    assert desk.counts() == {"completed": 25} and desk.stats().completed == 25
    assert outsider(rig).answers() == [], "grants that are done are removed"
    assert outsider(rig).left() == []


def test_nothing_is_granted_when_nothing_is_wanted_or_there(rig: Rig) -> None:
    desk = rig.create()
    assert take(rig, desk) == (0, 0)
    desk.produce("a")
    assert take(rig, desk, want=0) == (0, 0)
    assert take(rig, desk) == (1, 1)
    assert take(rig, desk, done=1, want=0) == (1, 0)
    assert desk.counts() == {"completed": 1}


def test_asked_twice_the_same_grant_is_given(rig: Rig) -> None:
    desk = rig.create(partitions=3)
    desk.produce(*"abcdef")
    assert take(rig, desk, want=3) == (1, 3)
    first = granted(rig, desk, 1)
    desk.produce(*"ghi")
    assert take(rig, desk, want=100) == (1, 3)
    rig.restart()
    assert take(rig, desk, want=100) == (1, 3)
    assert granted(rig, desk, 1) == first


def test_a_large_grant_is_several_leases(rig: Rig) -> None:
    desk = rig.create()
    for _ in range(3):
        desk.produce(*["x"] * 10_000)
    assert take(rig, desk, want=25_000) == (1, 25_000)
    assert len(grant(rig, desk, 1).leases) == 3
    assert take(rig, desk, 1, want=25_000) == (2, 5_000)
    assert desk.counts() == {"completed": 25_000, "leased": 5_000}


def test_keys_are_given_in_units(rig: Rig) -> None:
    desk = rig.create(partitions=2)
    keyed(desk, *[f"k{n % 3}:{n}" for n in range(12)])
    assert take(rig, desk, per_key=2) == (1, 6)
    assert order_of([*granted(rig, desk, 1).values()]) == {"k0": [0, 3], "k1": [1, 4], "k2": [2, 5]}
    assert take(rig, desk, 1, per_key=100) == (2, 6)
    assert order_of([*granted(rig, desk, 2).values()]) == {"k0": [6, 9], "k1": [7, 10], "k2": [8, 11]}


def test_a_stream_that_comes_back_with_an_old_checkpoint_is_told(rig: Rig) -> None:
    desk = rig.create()
    desk.produce(*"abc")
    for number in range(3):
        take(rig, desk, number, want=1)
    assert take(rig, desk, 1) == (3, 1)
    with pytest.raises(InvalidRequest, match="new checkpoint"):
        grant(rig, desk, 2)


def test_streams_do_not_mix_their_grants(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a", "b")
    take(rig, desk, want=1, timeout=5, stream="one")
    rig.pass_by(5)
    take(rig, desk, want=1, timeout=5, stream="one-2")
    rig.pass_by(5)
    assert take(rig, desk, done=1, want=0, stream="one") == (1, 0)
    assert len(outsider(rig).answers()) == 1
    assert [*granted(rig, desk, 1, "one-2")] != []


def test_a_pause_of_leases_holds_grants_back(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a")
    desk.pause(lease=True)
    assert take(rig, desk) == (0, 0)
    desk.pause(lease=False)
    assert take(rig, desk) == (1, 1)


@pytest.mark.parametrize("durability", ["fsync", "interval", "os"])
def test_those_who_read_beside_the_queue_find_what_is_granted(durability: str) -> None:
    rig = Rig(Simulated(), durability=durability)
    desk = rig.create(partitions=2)
    keyed(desk, *[f"k{n}:1" for n in range(9)])
    take(rig, desk)
    snapshot = Snapshot.open(ROOT, files=outsider(rig).files, clock=rig.clock)
    assert snapshot.call(FindOffsets(queue=desk.incarnation, at="newest")) == rig.broker.call(
        FindOffsets(queue=desk.incarnation, at="newest")
    )
    assert snapshot.call(ReadStats(queue=desk.incarnation)).leased == 9
    snapshot.close()
    rig.broker.close()


# -- leases that ended -----------------------------------------------------------------------------------


def test_leases_are_renewed_with_the_right(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a")
    take(rig, desk, timeout=10)
    for _ in range(5):
        rig.pass_by(9)
        ask(rig, desk, renewing(timeout=10 * SECOND))
    assert desk.counts() == {"leased": 1}
    rig.pass_by(10)
    assert desk.counts() == {"ready": 1}
    ask(rig, desk, renewing(timeout=10 * SECOND))
    assert desk.counts() == {"ready": 1}, "what has ended is not renewed, and that is no matter"


def test_what_was_committed_is_done_though_its_leases_ended(rig: Rig) -> None:
    desk = rig.create(partitions=2)
    keyed(desk, *[f"k{n % 3}:{n}" for n in range(9)])
    take(rig, desk, timeout=10, want=6)
    rig.kill()
    rig.pass_by(1_000)
    assert desk.counts() == {"ready": 9}
    assert take(rig, desk, 1) == (2, 3)
    assert desk.counts() == {"completed": 6, "leased": 3}
    assert take(rig, desk, 2) == (2, 0)
    assert desk.counts() == {"completed": 9}


def test_what_others_took_meanwhile_is_theirs(rig: Rig) -> None:
    desk = rig.create()
    desk.produce(*"abcd")
    take(rig, desk, timeout=10)
    rig.pass_by(10)
    held = desk.lease(2, consumer="other")
    assert take(rig, desk, 1) == (1, 0)
    assert desk.counts() == {"leased": 2, "completed": 2}
    held.complete()
    assert desk.counts() == {"completed": 4}


def test_a_grant_that_was_never_read_and_whose_leases_ended_is_not_given_again(rig: Rig) -> None:
    """Its answer was lost with the stream; meanwhile somebody else has taken some of the items."""
    desk = rig.create()
    desk.produce(*"abcd")
    assert take(rig, desk, timeout=10, want=3) == (1, 3)
    rig.pass_by(10)
    held = desk.lease(2, consumer="other")
    assert take(rig, desk) == (1, 2)
    held.complete()
    assert take(rig, desk, 1) == (1, 0)
    assert desk.counts() == {"completed": 4}


def test_an_owner_away_for_long_between_leasing_and_noting(rig: Rig) -> None:
    """What it leased then has ended; the stream gets those items again at once, not when the request is forgotten."""
    desk = rig.create()
    desk.produce(*"abc")
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Streams, "_save", _cut_off)
            outsider(rig).put(desk.incarnation, taking(want=2, timeout=10 * SECOND))
            with pytest.raises(Halt):
                look(rig)
        outsider(rig).inbox.withdraw(desk.incarnation, "errand-1")  # whoever asked has given up
        rig.kill()
        assert desk.counts() == {"ready": 1, "leased": 2}
        rig.pass_by(60)
        assert desk.counts() == {"ready": 3}
    assert take(rig, desk, want=2) == (1, 2)


def _cut_off(*args: object) -> None:
    raise Halt("between leasing and noting")


# -- items that failed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["retry", "bury"])
def test_items_that_failed_are_not_completed_with_the_rest(rig: Rig, action: Literal["retry", "bury"]) -> None:
    desk = rig.create(partitions=2)
    desk.produce(*"abcdef")
    take(rig, desk)
    bad = named(granted(rig, desk, 1), "b", "e")
    assert settle(rig, desk, bad, action, reason="no good") == (2, 0)
    assert desk.counts() == {"leased": 6}, "nothing happens before the batch is committed"
    number, items = take(rig, desk, 1)
    if action == "bury":
        assert (number, items) == (1, 0) and desk.counts() == {"completed": 4, "buried": 2}
        assert {desk.explain(id).state for id in bad} == {"buried"}
    else:
        assert (number, items) == (2, 2) and sorted(granted(rig, desk, 2).values()) == ["b", "e"]
        assert take(rig, desk, 2) == (2, 0)
        assert desk.counts() == {"completed": 6}


def test_a_delay_and_attempts(rig: Rig) -> None:
    desk = rig.create(max_attempts=2)
    desk.produce("a", "b")
    take(rig, desk)
    settle(rig, desk, named(granted(rig, desk, 1), "a"), delay=30 * SECOND, reason="later")
    assert take(rig, desk, 1) == (1, 0)
    assert desk.counts() == {"completed": 1, "scheduled": 1}
    rig.pass_by(31)
    assert take(rig, desk, 1) == (2, 1)
    settle(rig, desk, named(granted(rig, desk, 2), "a"))
    assert take(rig, desk, 2) == (2, 0)
    assert desk.counts() == {"completed": 1, "buried": 1}, "attempts count as with any consumer"


def test_one_of_a_key_fails_and_those_behind_it_come_again(rig: Rig) -> None:
    """Whatever comes before it in its key's line is done, though it was not settled when it failed."""
    desk = rig.create(partitions=2)
    keyed(desk, *[f"k:{n}" for n in range(5)], *[f"l:{n}" for n in range(5)])
    take(rig, desk)
    assert settle(rig, desk, named(granted(rig, desk, 1), "k:2")) == (1, 0)
    assert take(rig, desk, 1) == (2, 3)
    assert order_of([*granted(rig, desk, 2).values()]) == {"k": [2, 3, 4]}
    settle(rig, desk, named(granted(rig, desk, 2), "k:2"), "bury")
    assert take(rig, desk, 2) == (2, 0)
    assert desk.counts() == {"completed": 9, "buried": 1}


def test_a_parked_key_stays_parked(rig: Rig) -> None:
    desk = rig.create(on_bury="park")
    keyed(desk, "k:0", "k:1", "k:2", "l:0")
    take(rig, desk)
    settle(rig, desk, named(granted(rig, desk, 1), "k:1"), "bury")
    assert take(rig, desk, 1) == (1, 0)
    assert desk.counts() == {"completed": 2, "buried": 1, "ready": 1}
    desk.redrive_buried()
    assert take(rig, desk, 1) == (2, 2)
    assert order_of([*granted(rig, desk, 2).values()]) == {"k": [1, 2]}


def test_what_is_said_last_of_an_item_counts(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a", "b")
    take(rig, desk)
    both = [*granted(rig, desk, 1)]
    assert settle(rig, desk, both, "bury") == (2, 0)
    assert settle(rig, desk, both[:1], "retry", delay=SECOND) == (1, 0)
    assert settle(rig, desk, both[:1] * 2, "retry", delay=SECOND) == (1, 0)
    take(rig, desk, 1)
    assert desk.counts() == {"scheduled": 1, "buried": 1}


def test_items_that_are_not_granted_are_not_found(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a", "b")
    take(rig, desk, want=1)
    (own,) = granted(rig, desk, 1)
    assert settle(rig, desk, [own, ids.format_id(0, 1), ids.format_id(0, 99), ids.format_id(7, 0)]) == (1, 3)
    take(rig, desk, 1, want=0)
    assert settle(rig, desk, [own]) == (0, 1)
    assert desk.counts() == {"ready": 2}


def test_items_that_failed_under_leases_that_ended_come_again(rig: Rig) -> None:
    desk = rig.create()
    keyed(desk, "k:0", "k:1", "k:2", "l:0")
    take(rig, desk, timeout=10)
    settle(rig, desk, named(granted(rig, desk, 1), "k:1"), "bury")
    rig.pass_by(10)
    take(rig, desk, 1, want=0)
    assert desk.stats().completed >= 2 and desk.stats().ready >= 1
    rig.pass_by(60)
    assert "k:1" in desk.drain()
