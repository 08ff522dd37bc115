"""Adoption cut off at any file call: every item of a write is there once, and every key in order."""

import copy
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest

from penstock.broker.inbox import InboxProcessor
from penstock.broker.partition_layout import KEPT_MAPS
from penstock.logs.store import write_name
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import BrokerUnderTest, batch_of
from tests.broker.crashes import disk_after
from tests.broker.other_process import OtherProcess, cut_at_each_call, numbers_by_key, other_process, process_inbox
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage

KEYS = [f"key-{number}" for number in range(8)]
WHOLE = {key: [0, 1, 2, 3, 4, 5] for key in KEYS}


def frame(number: int, dedup: bool) -> Batch:
    names = [f"{key}:{number}" for key in KEYS] if dedup else None
    return batch_of(*[f"{key}:{number}" for key in KEYS], keys=KEYS, dedups=names)


@cache
def disk_with_two_writes(dedup: bool) -> tuple[SimulatedFiles, MicrosecondClock]:
    """A queue with some items, and two published writes that are not adopted yet."""

    def work(broker: BrokerUnderTest) -> None:
        queue = broker.create(partitions=2, dedup_window=60 * SECOND)
        queue.produce(*[f"{key}:0" for key in KEYS], keys=KEYS)
        broker.turn()
        other = other_process(broker)
        other.publish(queue.incarnation, *[frame(n, dedup) for n in (1, 2, 3)], number=1, parts=2)
        other.publish(queue.incarnation, *[frame(n, dedup) for n in (4, 5)], number=2)

    return disk_after(work)


@contextmanager
def inbox_ignored() -> Iterator[None]:
    """Inside, brokers do not process the inbox."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InboxProcessor, "process", lambda adopter, most=0: False)
        yield


def cut_at_every_call(dedup: bool, step: int, between: Callable[[BrokerUnderTest], None] | None = None) -> Iterator[BrokerUnderTest]:
    """A broker opened again for every file call at which another was cut off while it was opened, adopting.

    `between` is done, if given, by a broker that leaves the inbox alone: the adoption is still in the middle.
    """
    files, clock = disk_with_two_writes(dedup)
    now = clock

    def open_again(disk: SimulatedFiles) -> Callable[[], object]:
        nonlocal now
        now = copy.deepcopy(clock)
        return partial(BrokerUnderTest, SimulatedStorage(disk), clock=now)

    for disk, _ in cut_at_each_call(files, open_again, (True, False, True), step):
        if between is not None:
            with inbox_ignored():
                broker = BrokerUnderTest(SimulatedStorage(disk), clock=now)
                between(broker)
                disk.kill()
        broker = BrokerUnderTest(SimulatedStorage(disk), clock=now)
        broker.turn()
        yield broker
        broker.check()
        broker.embedded.close()


def whole(broker: BrokerUnderTest) -> None:
    """Check that both writes are adopted once, in order, and removed from the inbox."""
    other, queue = other_process(broker), broker.find()
    for _ in range(9):
        if other.inbox_files():
            broker.advance(5)
            process_inbox(broker)
    assert [name for name in other.inbox_files() if not name.endswith(".gone")] == []
    assert numbers_by_key(queue.drain(7)) == WHOLE
    broker.restart()
    other.publish(queue.incarnation, batch_of("never"), number=2)
    process_inbox(broker)
    assert queue.drain() == [] and other.inbox_files() == []


# -- cut off -------------------------------------------------------------------------------------------


def resized(to: int) -> Callable[[BrokerUnderTest], None]:
    def between(broker: BrokerUnderTest) -> None:
        broker.find().resize(to)
        broker.turn()

    return between


def away(broker: BrokerUnderTest) -> None:
    """Wait for longer than request ids and dedup ids are remembered."""
    broker.advance_in_steps(20 * 60)


def resized_and_away(broker: BrokerUnderTest) -> None:
    queue = broker.find()
    for width in (3, 1, 4):
        queue.resize(width)
        broker.advance_in_steps(20 * 60)


def rebooted(broker: BrokerUnderTest) -> None:
    broker.clock.reboot()


BETWEEN: dict[str, Callable[[BrokerUnderTest], None] | None] = {
    "at once": None,
    "wider": resized(3),
    "narrower": resized(1),
    "away": away,
    "resized and away": resized_and_away,
    "rebooted": rebooted,
}


CASES = [
    pytest.param(between, dedup, id=f"{between}-{'dedup ids' if dedup else 'plain'}", marks=[pytest.mark.long] * (dedup and number % 2))
    for number, between in enumerate(BETWEEN)
    for dedup in (False, True)
]


@pytest.mark.parametrize(("between", "dedup"), CASES)
def test_cut_off_anywhere(between: str, dedup: bool) -> None:
    for broker in cut_at_every_call(dedup, 11, BETWEEN[between]):
        whole(broker)


@pytest.mark.long
@pytest.mark.parametrize("dedup", [False, True], ids=["plain", "dedup ids"])
@pytest.mark.parametrize("between", BETWEEN)
def test_cut_off_at_every_file_call(between: str, dedup: bool) -> None:
    for broker in cut_at_every_call(dedup, 1, BETWEEN[between]):
        whole(broker)


def test_resized_in_the_middle_more_often_than_maps_are_kept() -> None:
    broker, files, other = patchy(2)
    queue = broker.find()
    break_partition(broker, files, 1)
    process_inbox(broker)
    files.failing_paths.clear()
    served = []
    with inbox_ignored():
        broker.advance(100)
        for at in range(KEPT_MAPS + 3):
            served += queue.drain()  # fences are inherited: they must not pile up
            queue.resize(1 + at % 2)
            broker.advance_in_steps(20 * 60)
    assert served and other.inbox_files()
    process_inbox(broker)
    assert numbers_by_key(served + queue.drain()) == {key: [*range(6)] for key in KEYS}


@pytest.mark.parametrize("kind", ["errno", "short"])
def test_a_file_call_that_fails(kind: str) -> None:
    """Each file call of an adoption fails once: the same owner adopts the write a little later."""
    files, clock = disk_with_two_writes(False)
    for call in range(1, 1 << 20, 3):
        disk = files.copy()
        with inbox_ignored():
            broker = BrokerUnderTest(SimulatedStorage(disk), clock=copy.deepcopy(clock))
        broker.turn()
        disk.fail(disk.calls + call, errno.EIO if kind == "errno" else "torn")
        process_inbox(broker)
        over = bool(disk._faults)
        disk.clear_faults()
        broker.advance_in_steps(60)
        whole(broker)
        broker.check()
        if over:
            break
    assert call > 30


# -- partitions that fail ------------------------------------------------------------------------------


def break_partition(broker: BrokerUnderTest, files: PartlyFailingFiles, number: int) -> None:
    files.failing_paths.add(f"/{broker.find().incarnation:016x}/{number:05d}/")


def patchy(width: int, frames: int = 6) -> tuple[BrokerUnderTest, PartlyFailingFiles, OtherProcess]:
    """A queue of so many partitions, a published write of so many frames, and a disk on which chosen paths fail."""
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue, other = broker.create(partitions=width), other_process(broker)
    other.publish(queue.incarnation, *[frame(n, False) for n in range(frames)])
    return broker, files, other


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_partition_that_fails_for_a_while(broken: int) -> None:
    broker, files, other = patchy(3)
    queue = broker.find()
    break_partition(broker, files, broken)
    process_inbox(broker)
    other.publish_texts(queue, *[f"{key}:6" for key in KEYS], source="another", write=write_name(1))
    for _ in range(5):
        broker.advance(40)
        process_inbox(broker)
    assert len(other.inbox_files()) == 2, "nothing overtakes it, or its chunks would be taken for those of the next"
    files.failing_paths.clear()
    for _ in range(3):
        broker.advance(40)
        process_inbox(broker)
    assert other.inbox_files() == []
    assert numbers_by_key(queue.drain()) == {key: [*range(7)] for key in KEYS}


def test_partitions_fail_before_and_after_a_resize() -> None:
    """A failing partition does not say which chunks it has: they must not be adopted again."""
    for first in range(3):
        for second in range(4):
            broker, files, other = patchy(3)
            queue = broker.find()
            break_partition(broker, files, first)
            process_inbox(broker)
            files.failing_paths.clear()
            with inbox_ignored():
                broker.advance(100)
                queue.resize(4)
                broker.advance(100)
            break_partition(broker, files, second)
            for _ in range(3):
                process_inbox(broker)
                broker.advance(40)
            files.failing_paths.clear()
            for _ in range(3):
                broker.advance(100)
                process_inbox(broker)
            assert other.inbox_files() == []
            assert numbers_by_key(queue.drain()) == {key: [*range(6)] for key in KEYS}
            broker.embedded.close()
