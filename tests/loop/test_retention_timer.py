"""Retention by age: items older than `max_age` are deleted within a bounded time, younger ones never."""

import contextlib
import errno

import msgspec
import pytest

from penstock.logs.files.filelog import FileLog
from penstock.loop.partition import Partition
from penstock.loop.retention import DROPS_AT_ONCE, FIRST_RUN, DroppedBuried, buried_to_drop
from penstock.rules import base
from penstock.rules.commands import AcquireLease, CompleteLeased, LeaseAnswer, Produce
from penstock.testing import Halt, SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch
from penstock.words.clock import DAY, HOUR, MINUTE, SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, StorageFailed
from penstock.words.limits import Policy, Retention
from tests.partition_under_test import PartitionUnderTest

BY_AGE = Retention(max_age=DAY, max_bytes=0)
SLACK = DAY // 10
"""The documented bound: a tenth of `max_age`, at least a minute."""


def let_pass(partition: PartitionUnderTest, duration: int) -> int:
    """Let time pass as the loop does, and run retention when it is planned; gives how often it ran."""
    end = partition.clock.read().elapsed + duration
    looks = 0
    while True:
        part = partition.wrapped
        when, left = part.next_retention(), end - partition.clock.read().elapsed
        wait = left if when is None else min(left, max(0, when - part.now().elapsed))
        partition.clock.advance(wait)
        if wait == left and (when is None or when > part.now().elapsed):
            return looks
        part.apply_due_retention()
        looks += 1
        assert looks < 10_000, "it always wants another look"


def retained(part: Partition) -> list[int]:
    return part.state.dropped.missing(0, part.state.next_offset)


def worked_off(partition: PartitionUnderTest, *texts: str) -> list[int]:
    """Produce and complete items; gives their offsets."""
    found = partition.produce(*texts)
    partition.complete(partition.lease().lease)
    return found


def test_an_idle_partition_deletes_everything_soon_after_max_age(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    worked_off(partition, *"abc")
    let_pass(partition, DAY - SECOND)
    assert retained(partition.wrapped) == [0, 3]
    let_pass(partition, SLACK + SECOND)
    assert retained(partition.wrapped) == []
    assert len(partition.wrapped.log.segments()) == 1


def test_with_nothing_to_delete_no_run_is_planned(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    assert partition.wrapped.next_retention() is None
    worked_off(partition, "a")
    assert let_pass(partition, 3 * DAY) <= 4
    assert partition.wrapped.next_retention() is None
    partition.restart()
    assert partition.wrapped.next_retention() is None
    worked_off(partition, "b")
    partition.configure(retention=Retention(max_age=0))
    assert partition.wrapped.next_retention() is None


def test_a_closed_partition_plans_no_run(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    for _ in range(2):
        partition.wrapped.close()
        assert partition.wrapped.next_retention() is None
        partition.open()
        worked_off(partition, "a")


@pytest.mark.parametrize("max_age", [MINUTE, HOUR, DAY], ids=["minute", "hour", "day"])
def test_a_trickle_of_an_item_a_minute_keeps_max_age(partition: PartitionUnderTest, max_age: int) -> None:
    partition.configure(retention=Retention(max_age=max_age, max_bytes=0))
    late = max_age + max(max_age // 10, MINUTE)
    produced: list[int] = []
    for _ in range(3 * late // MINUTE):
        produced.append(partition.clock.read().elapsed)
        worked_off(partition, "item")
        let_pass(partition, MINUTE)
        oldest = partition.wrapped.state.dropped.first_missing(0)
        now = partition.clock.read().elapsed
        assert all(now - when >= max_age for when in produced[:oldest]), "something went before its time"
        assert oldest == len(produced) or now - produced[oldest] <= late, "something is kept for too long"
        assert len(partition.wrapped.log.segments()) <= 25
    assert partition.wrapped.state.dropped


@pytest.mark.parametrize("step", [-DAY, DAY], ids=["back", "forward"])
def test_setting_the_date_changes_no_age(partition: PartitionUnderTest, step: int) -> None:
    partition.configure(retention=BY_AGE)
    worked_off(partition, "a")
    let_pass(partition, 2 * HOUR)
    partition.clock.step_wall(step)
    worked_off(partition, "b")
    let_pass(partition, 2 * HOUR)
    assert retained(partition.wrapped) == [0, 2]
    assert partition.wrapped.apply_retention().items == 0
    let_pass(partition, DAY - 4 * HOUR - SECOND)
    assert retained(partition.wrapped) == [0, 2]
    let_pass(partition, SLACK + 2 * HOUR)
    assert retained(partition.wrapped) == []


def test_restarts_and_reboots_lose_no_time(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    worked_off(partition, "a")
    for hour in range(26):
        partition.clock.advance(59 * MINUTE) if hour % 2 else partition.clock.reboot(59 * MINUTE)
        partition.kill()
        let_pass(partition, MINUTE)
        assert (retained(partition.wrapped) == [0, 1]) or hour >= 23
    let_pass(partition, HOUR)
    assert retained(partition.wrapped) == []


def test_items_that_became_old_while_closed_are_deleted_after_opening(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    worked_off(partition, "a")
    let_pass(partition, 3 * HOUR)
    partition.wrapped.close()
    partition.clock.advance(3 * DAY)
    partition.open()
    assert retained(partition.wrapped) == [0, 1]
    let_pass(partition, FIRST_RUN)
    assert retained(partition.wrapped) == []


def test_the_summary_of_a_closed_partition_has_the_time_of_its_next_run(partition: PartitionUnderTest) -> None:
    """It is not opened for a run that deletes nothing, and is for each that deletes something."""
    partition.configure(retention=BY_AGE)
    worked_off(partition, "a")
    began = partition.wrapped.now().elapsed
    assert partition.wrapped.summary().due_elapsed == began + DAY // 20
    let_pass(partition, 3 * HOUR)
    partition.restart()
    assert partition.wrapped.summary().due_elapsed == began + DAY // 20 + DAY
    partition.restart()
    partition.clock.advance(2 * DAY)
    let_pass(partition, FIRST_RUN)
    assert retained(partition.wrapped) == []
    assert partition.wrapped.summary().due_elapsed is None


def test_unresolved_items_are_kept_and_others_of_their_segment_deleted(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    partition.produce(*(f"item {number}" for number in range(10)))
    granted = partition.lease()
    partition.retry(granted.lease, [7], delay=3 * 24 * 3600)
    partition.complete(granted.lease)
    let_pass(partition, DAY + SLACK)
    assert retained(partition.wrapped) == [7, 8]
    assert let_pass(partition, 1 * DAY) <= 1, "an item that waits is no reason to look again and again"
    partition.advance(24 * 3600)
    granted = partition.lease()
    assert partition.texts(granted) == ["item 7"]
    partition.complete(granted.lease)
    let_pass(partition, SLACK)
    assert retained(partition.wrapped) == []


def test_a_backlog_is_kept_whole(partition: PartitionUnderTest) -> None:
    partition.configure(retention=Retention(max_age=HOUR, max_bytes=0))
    for number in range(200):
        partition.produce(f"item {number}")
        let_pass(partition, 10 * MINUTE)
    assert retained(partition.wrapped) == [0, 200]
    assert partition.drain(want=50) == [f"item {number}" for number in range(200)]


def test_a_cursor_holds_items_until_it_is_moved(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    worked_off(partition, "a")
    let_pass(partition, 3 * HOUR)
    worked_off(partition, "b")
    partition.move_cursor("audit", 0)
    let_pass(partition, 2 * DAY)
    assert partition.wrapped.next_retention() is None
    partition.move_cursor("audit", 1)
    let_pass(partition, SLACK)
    assert retained(partition.wrapped) == [1, 2]
    partition.release_cursor("audit")
    let_pass(partition, SLACK)
    assert retained(partition.wrapped) == []


def test_min_segments_are_kept(partition: PartitionUnderTest) -> None:
    partition.configure(retention=Retention(max_age=HOUR, max_bytes=0, min_segments=3))
    for _ in range(10):
        worked_off(partition, "item")
        let_pass(partition, 10 * MINUTE)
    let_pass(partition, DAY)
    assert len(partition.wrapped.log.segments()) == 3
    assert retained(partition.wrapped)[-1] == 10
    assert partition.wrapped.next_retention() is None


def test_counted_segments_are_not_made_smaller_by_the_timer(partition: PartitionUnderTest) -> None:
    """Else `max_segments` would delete items long before `max_age`."""
    partition.configure(retention=Retention(max_age=DAY, max_bytes=0, max_segments=1))
    for _ in range(20):
        worked_off(partition, "item")
        let_pass(partition, HOUR)
    assert retained(partition.wrapped) == [0, 20]
    let_pass(partition, DAY - HOUR - SECOND)
    assert retained(partition.wrapped) == [0, 20]
    let_pass(partition, SECOND)
    assert retained(partition.wrapped) == []


def test_one_run_deletes_a_few_segments(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    for _ in range(2 * DROPS_AT_ONCE + 3):
        worked_off(partition, "item")
        partition.wrapped._rotate()
    partition.clock.advance(2 * DAY)
    left = []
    while (when := partition.wrapped.next_retention()) is not None:
        assert when <= partition.wrapped.now().elapsed
        partition.wrapped.apply_due_retention()
        left.append(len(partition.wrapped.log.segments()))
    assert left == [DROPS_AT_ONCE + 4, 4, 1]


def test_after_a_failed_deletion_the_next_run_is_later(partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(count: int) -> int:
        raise InvalidRequest("no Base behind it can be read; call rotate() with a Base first")

    partition.configure(retention=BY_AGE)
    worked_off(partition, "item")
    with monkeypatch.context() as patch:
        patch.setattr(partition.wrapped.log, "drop", refuse)
        assert let_pass(partition, DAY + SLACK) < 10
        assert len(partition.wrapped.log.segments()) > 1
    let_pass(partition, SLACK)
    assert len(partition.wrapped.log.segments()) == 1


# -- buried items ------------------------------------------------------------------------------------


def buried(partition: PartitionUnderTest, *texts: str) -> list[int]:
    found = partition.produce(*texts)
    partition.bury(partition.lease().lease, reason="no use")
    return found


def to_drop(partition: PartitionUnderTest) -> tuple[int, int]:
    part = partition.wrapped
    return buried_to_drop(part.log.segments(), part.state, part.now().elapsed)


def test_buried_items_are_announced_then_deleted_and_counted(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE)
    worked_off(partition, "done")
    buried(partition, "bad", "worse")
    worked_off(partition, "done too")
    told_at = 0
    for _ in range((DAY + SLACK) // (10 * MINUTE)):
        if partition.wrapped.state.buried_dropped:
            break
        let_pass(partition, 10 * MINUTE)
        items, wait = to_drop(partition)
        if items and not told_at:
            told_at = partition.clock.read().elapsed + wait
            assert (items, wait >= HOUR) == (2, True)
            assert partition.counts.buried == 2
    assert 0 <= partition.clock.read().elapsed - told_at <= 10 * MINUTE
    assert partition.wrapped.dropped_buried == [DroppedBuried(2, 1, 2)]
    assert to_drop(partition) == (0, 0)
    for _ in range(2):
        assert partition.wrapped.state.buried_dropped == 2
        partition.kill()
    partition.wrapped.compact()
    assert base.load(base.dump(partition.wrapped.state)).buried_dropped == 2


def test_an_item_buried_late_is_kept_for_max_age_from_then(partition: PartitionUnderTest) -> None:
    """Else there would be no time for a warning: its segment is old already."""
    partition.configure(retention=BY_AGE)
    worked_off(partition, *"abcdef")
    partition.produce("slow to fail")
    let_pass(partition, 2 * DAY)
    partition.bury(partition.lease().lease)
    partition.clock.step_wall(DAY)
    let_pass(partition, DAY - SECOND)
    assert (retained(partition.wrapped), to_drop(partition)) == ([6, 7], (1, SECOND))
    let_pass(partition, SLACK)
    assert (retained(partition.wrapped), partition.wrapped.state.buried_dropped) == ([], 1)


def test_only_items_that_may_be_deleted_are_announced(partition: PartitionUnderTest) -> None:
    partition.configure(retention=BY_AGE, on_bury="park")
    partition.produce("holds its key", key="k")
    partition.bury(partition.lease().lease)
    partition.configure(on_bury="release")
    worked_off(partition, *"abc")
    buried(partition, "taken")
    let_pass(partition, 3 * HOUR)
    (unread,) = buried(partition, "not read yet")
    partition.move_cursor("audit", unread)
    let_pass(partition, DAY - 3 * HOUR)
    assert to_drop(partition)[0] == 1
    let_pass(partition, DAY)
    assert (partition.wrapped.state.buried_dropped, to_drop(partition)) == (1, (0, 0))
    assert retained(partition.wrapped) == [0, 1, unread, unread + 1]
    assert partition.counts.buried == 2


def test_a_base_without_the_count_and_the_times_of_burials_can_be_read(partition: PartitionUnderTest) -> None:
    """A Base written before these fields existed."""
    buried(partition, "bad")
    image = msgspec.msgpack.decode(base.dump(partition.wrapped.state))
    place = base._StateImage.__struct_fields__.index("burials")
    dropped = base._StateImage.__struct_fields__.index("buried_dropped")
    assert image[dropped] == 0 and image[place][0][1][-1] == partition.wrapped.now().elapsed
    image[place] = [[offset, burial[:-1]] for offset, burial in image[place]]
    old = base.load(msgspec.msgpack.encode(image[:dropped]))
    assert (old.buried_dropped, old.burials[0].since, old.burials[0].reason) == (0, 0, "no use")


# -- a disk that fails -------------------------------------------------------------------------------


def old_partition(files: SimulatedFiles, clock: MicrosecondClock) -> Partition:
    """Old segments with one ready item in the second, and an uncommitted command."""
    part = Partition(FileLog(files, "/log", 1, 0), clock, Policy(retention=BY_AGE))
    for number in range(4):
        part.run(Produce(Batch([f"{number}.{item}".encode() for item in range(10)])))
        part.commit()
        part._rotate()
    for want in (13, 1, 26):
        granted = part.run(AcquireLease(want))
        assert isinstance(granted, LeaseAnswer)
        if want != 1:
            part.run(CompleteLeased(granted.lease))
        part.commit()
    clock.advance(2 * DAY)
    part.due()
    part.run(Produce(Batch([b"asked for in the same turn"])))
    return part


@pytest.mark.parametrize("trouble", ["halt", errno.EIO, errno.ENOSPC])
def test_a_crash_at_any_step_loses_nothing_and_retention_runs_later(trouble: int | str) -> None:
    whole = SimulatedFiles()
    part = old_partition(whole, MicrosecondClock())
    before = whole.calls
    part.apply_due_retention()
    assert part.state.dropped.runs == [0, 13, 14, 40]
    tidied = 0
    for step in range(1, whole.calls - before + 1):
        files, clock = SimulatedFiles(), MicrosecondClock()
        part = old_partition(files, clock)
        files.fail(files.calls + step, trouble)  # type: ignore[arg-type]
        stored = False
        with contextlib.suppress(Halt, StorageFailed, OutcomeUnknown):
            part.apply_due_retention()
            stored = True
        if part.maintenance_error is not None and not part.failed:
            when = part.next_retention()
            assert when is not None and when > part.now().elapsed + MINUTE, "a failing disk is not tried again at once"
            tidied += 1
        files.clear_faults()
        if trouble == "halt":
            files.crash()
        else:
            files.kill()
        again = Partition(FileLog(files, "/log", 1, 0), clock)
        assert again.gaps == [], f"step {step}"
        assert again.payloads([13, 14]) == [b"1.3"], f"step {step}"
        assert not stored or again.payloads([40, 41]) == [b"asked for in the same turn"], f"step {step}"
        clock.advance(FIRST_RUN)
        again.apply_due_retention()
        assert again.state.dropped.runs == [0, 13, 14, 40], f"step {step}"
    assert tidied or trouble == "halt"
