"""Adoption cut off anywhere, by whatever: every item of a drop is there once, and every key in order."""

import copy
import errno
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from penstock.broker.inbox import InboxKeeper
from penstock.broker.partition_layout import KEPT_MAPS
from penstock.logs.store import write_name
from penstock.testing import Halt, ManualClock, SimulatedFiles
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import Rig, batch_of
from tests.broker.crashes import prepared
from tests.broker.other_process import Outsider, look, order_of, outsider
from tests.broker.storages import PatchyFiles, Simulated

KEYS = [f"key-{number}" for number in range(8)]
WHOLE = {key: [0, 1, 2, 3, 4, 5] for key in KEYS}


def frame(number: int, dedup: bool) -> Batch:
    names = [f"{key}:{number}" for key in KEYS] if dedup else None
    return batch_of(*[f"{key}:{number}" for key in KEYS], keys=KEYS, dedups=names)


@cache
def waiting_drop(dedup: bool) -> tuple[SimulatedFiles, ManualClock]:
    """A queue with something in it, and two drops beside it that nobody has looked at."""

    def work(rig: Rig) -> None:
        desk = rig.create(partitions=2, dedup_window=60 * SECOND)
        desk.produce(*[f"{key}:0" for key in KEYS], keys=KEYS)
        rig.turn()
        other = outsider(rig)
        other.publish(desk.incarnation, *[frame(n, dedup) for n in (1, 2, 3)], number=1, parts=2)
        other.publish(desk.incarnation, *[frame(n, dedup) for n in (4, 5)], number=2)

    return prepared(work)


@contextmanager
def nobody_looks() -> Iterator[None]:
    """Brokers opened meanwhile leave the inbox alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InboxKeeper, "look", lambda adopter, most=0: False)
        yield


def cut_at_every_call(dedup: bool, step: int, between: Callable[[Rig], None] | None = None) -> Iterator[Rig]:
    """A broker opened again for every file call at which another was cut off while it was opened, adopting.

    `between` is done, if given, by a broker that leaves the inbox alone: the adoption is still in the middle.
    """
    files, clock = waiting_drop(dedup)
    for seed, power in ((0, True), (1, False), (2, True)):
        done, call = False, seed * step // 3
        while not done:
            call += step
            disk, now = files.copy(), copy.deepcopy(clock)
            disk._rng = random.Random(1_000 * seed + call)
            disk.fail(disk.calls + call, "halt")
            try:
                Rig(Simulated(disk), clock=now)
                done = True
            except Halt:
                pass
            disk.mend()
            if power:
                disk.crash()
            else:
                disk.kill()
            if between is not None:
                with nobody_looks():
                    rig = Rig(Simulated(disk), clock=now)
                    between(rig)
                    disk.kill()
            rig = Rig(Simulated(disk), clock=now)
            rig.turn()
            yield rig
            rig.check()
            rig.broker.close()


def whole(rig: Rig) -> None:
    """Both drops are in, once, in order, and out of the inbox."""
    other, desk = outsider(rig), rig.find()
    for _ in range(9):
        if other.left():
            rig.advance(5)
            look(rig)
    assert [name for name in other.left() if not name.endswith(".gone")] == []
    assert order_of(desk.drain(7)) == WHOLE
    rig.restart()
    other.publish(desk.incarnation, batch_of("never"), number=2)
    look(rig)
    assert desk.drain() == [] and other.left() == []


# -- cut off -------------------------------------------------------------------------------------------


def resized(to: int) -> Callable[[Rig], None]:
    def between(rig: Rig) -> None:
        rig.find().resize(to)
        rig.turn()

    return between


def away(rig: Rig) -> None:
    """For longer than requests are remembered, and dedup ids."""
    rig.pass_by(20 * 60)


def resized_and_away(rig: Rig) -> None:
    desk = rig.find()
    for width in (3, 1, 4):
        desk.resize(width)
        rig.pass_by(20 * 60)


def rebooted(rig: Rig) -> None:
    rig.clock.reboot()


BETWEEN: dict[str, Callable[[Rig], None] | None] = {
    "at once": None,
    "wider": resized(3),
    "narrower": resized(1),
    "away": away,
    "resized and away": resized_and_away,
    "rebooted": rebooted,
}


@pytest.mark.parametrize("dedup", [False, True], ids=["plain", "dedup ids"])
@pytest.mark.parametrize("between", BETWEEN)
def test_cut_off_anywhere(between: str, dedup: bool) -> None:
    for rig in cut_at_every_call(dedup, 11, BETWEEN[between]):
        whole(rig)


@pytest.mark.long
@pytest.mark.parametrize("dedup", [False, True], ids=["plain", "dedup ids"])
@pytest.mark.parametrize("between", BETWEEN)
def test_cut_off_at_every_file_call(between: str, dedup: bool) -> None:
    for rig in cut_at_every_call(dedup, 1, BETWEEN[between]):
        whole(rig)


def test_resized_in_the_middle_more_often_than_maps_are_kept() -> None:
    rig, files, other = patchy(2)
    desk = rig.find()
    break_partition(rig, files, 1)
    look(rig)
    files.broken.clear()
    served = []
    with nobody_looks():
        rig.advance(100)
        for at in range(KEPT_MAPS + 3):
            served += desk.drain()  # fences are inherited: they must not pile up
            desk.resize(1 + at % 2)
            rig.pass_by(20 * 60)
    assert served and other.left()
    look(rig)
    assert order_of(served + desk.drain()) == {key: [*range(6)] for key in KEYS}


@pytest.mark.parametrize("kind", ["errno", "short"])
def test_a_file_call_that_fails(kind: str) -> None:
    """Each file call of an adoption fails once: it is done a little later, by the same owner."""
    files, clock = waiting_drop(False)
    for call in range(1, 1 << 20, 3):
        disk = files.copy()
        with nobody_looks():
            rig = Rig(Simulated(disk), clock=copy.deepcopy(clock))
        rig.turn()
        disk.fail(disk.calls + call, errno.EIO if kind == "errno" else "torn")
        look(rig)
        over = bool(disk._faults)
        disk.mend()
        rig.pass_by(60)
        whole(rig)
        rig.check()
        if over:
            break
    assert call > 30


# -- partitions that fail ------------------------------------------------------------------------------


def break_partition(rig: Rig, files: PatchyFiles, number: int) -> None:
    files.broken.add(f"/{rig.find().incarnation:016x}/{number:05d}/")


def patchy(width: int, frames: int = 6) -> tuple[Rig, PatchyFiles, Outsider]:
    """A queue of so many partitions, a drop of so many frames beside it, and a disk that may fail in places."""
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    desk, other = rig.create(partitions=width), outsider(rig)
    other.publish(desk.incarnation, *[frame(n, False) for n in range(frames)])
    return rig, files, other


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_partition_that_fails_for_a_while(broken: int) -> None:
    rig, files, other = patchy(3)
    desk = rig.find()
    break_partition(rig, files, broken)
    look(rig)
    other.drop(desk, *[f"{key}:6" for key in KEYS], source="another", write=write_name(1))
    for _ in range(5):
        rig.advance(40)
        look(rig)
    assert len(other.left()) == 2, "nothing overtakes it, or its chunks would be taken for those of the next"
    files.broken.clear()
    for _ in range(3):
        rig.advance(40)
        look(rig)
    assert other.left() == []
    assert order_of(desk.drain()) == {key: [*range(7)] for key in KEYS}


def test_partitions_fail_before_and_after_a_resize() -> None:
    """What a partition does not say because it is away is not taken for what it has not."""
    for first in range(3):
        for second in range(4):
            rig, files, other = patchy(3)
            desk = rig.find()
            break_partition(rig, files, first)
            look(rig)
            files.broken.clear()
            with nobody_looks():
                rig.advance(100)
                desk.resize(4)
                rig.advance(100)
            break_partition(rig, files, second)
            for _ in range(3):
                look(rig)
                rig.advance(40)
            files.broken.clear()
            for _ in range(3):
                rig.advance(100)
                look(rig)
            assert other.left() == []
            assert order_of(desk.drain()) == {key: [*range(6)] for key in KEYS}
            rig.broker.close()
