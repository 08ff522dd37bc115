"""Damage under a broker run by hand: whoever waits gets what is whole, and no queue runs turn after turn for what is not."""

import errno
from collections.abc import Iterator

import pytest

from penstock.loop.partition_handle import FIRST_WAIT
from penstock.operations import ListHeldKeys, ReadItems
from penstock.testing import SimulatedFiles
from penstock.testing.tree import error
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import Desk, Rig
from tests.broker.storages import Simulated


class Unreadable(SimulatedFiles):
    """A disk from which no log can be read for as long as a test wants."""

    broken = False

    def pread(self, handle: int, size: int, position: int) -> bytes:
        path = self._at(handle).path
        if self.broken and path.endswith(".log"):
            raise error(errno.EIO, path)
        return super().pread(handle, size, position)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(Simulated(Unreadable()), compression=False)
    yield rig
    rig.check()
    rig.broker.close()


def disk(rig: Rig) -> Unreadable:
    assert isinstance(rig.ground, Simulated) and isinstance(rig.ground.files, Unreadable)
    return rig.ground.files


def flip(rig: Rig, desk: Desk, text: str) -> None:
    """Damage the frame that holds a payload, in whichever partition it lies; the broker is closed and opened again around it."""
    rig.broker.close()
    files = disk(rig)
    paths = [path for path in files.contents() if f"{desk.incarnation:016x}" in path and path.endswith(".log")]
    (path,) = [path for path in paths if text.encode() in files.content(path)]
    files.flip(path, 8 * files.content(path).index(text.encode()))
    rig.broker = rig._open()


def records(desk: Desk) -> int:
    return sum(member.open.changes for member in desk.loop.turns.members.values())


def test_an_empty_answer_is_not_given_for_items_that_are_lost(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("lost 0", "lost 1")
    desk.produce("whole 2", "whole 3")
    flip(rig, desk, "lost 0")
    held = desk.lease(2)
    assert held.texts == ["whole 2", "whole 3"]
    assert held.complete() == 2
    assert not desk.lease(2)
    assert (desk.counts(), desk.stats().partitions[0].lost) == ({"completed": 2}, 2)


def test_a_lease_says_only_what_it_gives(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("whole 0")
    desk.produce("lost 1")
    desk.produce("whole 2")
    flip(rig, desk, "lost 1")
    (handed,) = desk.lease().handed
    assert handed.granted.runs == [0, 1, 2, 3]


def test_one_who_waits_is_not_answered_with_what_is_lost(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("lost")
    flip(rig, desk, "lost")
    waiter = desk.waiter(wait=60)
    assert not waiter.done
    before = records(desk)
    assert rig.turn() == 0 and records(desk) == before
    desk.produce("whole")
    assert waiter.held.texts == ["whole"]


def test_what_cannot_be_read_is_tried_again_after_a_while_and_not_at_once(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("x" * 500_000)
    rig.restart()  # so that it is not in memory
    disk(rig).broken = True
    waiter = desk.waiter(wait=600)
    assert not waiter.done
    before = records_known(desk)
    for _ in range(10):
        rig.advance(FIRST_WAIT / SECOND)
    assert records_known(desk) - before <= 40, "a few for every try"
    assert desk.stats().partitions[0].status == "failing"
    disk(rig).broken = False
    rig.advance(10)
    assert waiter.held.texts == ["x" * 500_000]


def records_known(desk: Desk) -> int:
    """Also of a partition that fails."""
    return sum(member.partition.changes for member in desk.loop.turns.members.values() if member.partition is not None)


def test_keys_are_listed_though_what_stands_in_their_lines_is_lost(rig: Rig) -> None:
    desk = rig.create()
    desk.produce("a", "b", keys=["k1", "k2"])
    held = desk.lease()
    desk.produce("lost a", "lost b", keys=["k1", "k2"])
    desk.produce("whole", key="k3")
    assert desk.lease(timeout=1_000).texts == ["whole"]  # the others wait in their keys' lines
    held.complete()
    flip(rig, desk, "lost a")
    assert [one.key for one in desk.call(ListHeldKeys(limit=10))] == [b"k3"]
    assert desk.stats().partitions[0].lost == 2


def test_items_on_their_way_that_turn_out_to_be_lost_hold_nothing_up(rig: Rig) -> None:
    dead, desk = rig.create("dead"), rig.create("q")
    desk.produce("whole 0")
    desk.produce("lost 1")
    desk.produce("whole 2")
    desk.lease().bury()
    flip(rig, desk, "lost 1")
    desk.update(dead_queue="dead")
    rig.turn()
    assert desk.counts() == {}
    assert dead.drain() == ["whole 0", "whole 2"]
    assert desk.stats().partitions[0].lost == 1


def test_an_item_that_was_sent_and_is_then_damaged_counts_once(rig: Rig) -> None:
    dead, desk = rig.create("dead"), rig.create("q", dead_queue="dead")
    desk.produce("gone")
    desk.lease().bury()
    rig.turn()
    assert dead.drain() == ["gone"]
    flip(rig, desk, "gone")
    assert desk.call(ReadItems(start={}, limit=10)).items == []
    stats = desk.stats()
    assert (stats.completed, stats.partitions[0].lost) == (0, 1)
