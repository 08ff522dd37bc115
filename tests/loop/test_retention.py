"""Retention: resolved items are deleted, needed ones kept, and the record is written before files change."""

import contextlib
import errno

import pytest

from penstock.logs.files.filelog import FileLog
from penstock.loop.partition import Partition
from penstock.loop.retention import RetentionResult
from penstock.rules import base
from penstock.rules.commands import (
    AcquireLease,
    BuryLeased,
    CompleteLeased,
    Drop,
    ForgetCursor,
    LeaseAnswer,
    Produce,
    PutCursor,
    RetryLeased,
)
from penstock.rules.item_states import ItemState
from penstock.rules.routing import key_ids
from penstock.testing import Fault, Halt, SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch
from penstock.words.clock import DAY, HOUR
from penstock.words.errors import InvalidRequest, OutcomeUnknown, StorageFailed
from penstock.words.limits import Policy, Retention
from tests.partition_under_test import PartitionUnderTest

NOW = Policy(retention=Retention(max_segments=1))
"""Everything but the newest segment is too old."""


def segment(part: Partition, *texts: str, key: str | None = None) -> None:
    """Produce items and begin a new segment after them."""
    keys = [key.encode()] * len(texts) if key is not None else None
    part.run(Produce(Batch([text.encode() for text in texts], keys, None if keys is None else key_ids(keys))))
    part.commit()
    part._rotate()


def work_off(part: Partition, want: int) -> None:
    granted = part.run(AcquireLease(want, per_key=want))
    assert isinstance(granted, LeaseAnswer)
    part.run(CompleteLeased(granted.lease))
    part.commit()


def configured(partition: PartitionUnderTest, policy: Policy) -> Partition:
    partition.configure(retention=policy.retention, on_bury=policy.on_bury)
    return partition.wrapped


def test_old_segments_of_resolved_items_are_deleted(partition: PartitionUnderTest) -> None:
    part = configured(partition, Policy(retention=Retention(max_age=DAY, max_bytes=0)))
    segment(part, "old", "older")
    work_off(part, 2)
    partition.advance(3600)
    segment(part, "young")
    assert part.apply_retention() == RetentionResult(0, 0, 0, 0)
    part._rotation._started += DAY  # not by itself
    partition.advance(23 * 3600)
    freed = part.apply_retention()
    assert (freed.segments, freed.items) == (1, 2)
    assert freed.size_bytes > 0
    assert partition.texts(partition.lease()) == ["young"]


def test_unresolved_items_are_never_deleted(partition: PartitionUnderTest) -> None:
    part = configured(partition, NOW)
    for number in range(5):
        segment(part, f"ready {number}")
    assert part.apply_retention().items == 0
    assert partition.texts(partition.lease()) == [f"ready {number}" for number in range(5)]
    assert part.apply_retention().items == 0


def test_a_rotation_applies_retention(partition: PartitionUnderTest) -> None:
    part = configured(partition, NOW)
    segment(part, "done")
    work_off(part, 1)
    part._rotation.room = 0
    partition.produce("next")
    assert part.state.dropped.runs == [0, 1]
    assert [facts.base_offset for facts in part.log.segments()] == [1, 2]


def test_a_few_needed_items_do_not_keep_old_segments(partition: PartitionUnderTest) -> None:
    part = configured(partition, NOW)
    for number in range(6):
        segment(part, *(f"{number}.{item}" for item in range(100)))
    granted = part.run(AcquireLease(600))
    assert isinstance(granted, LeaseAnswer)
    part.run(RetryLeased(granted.lease, [7, 205], delay=HOUR, reason="later"))
    part.run(CompleteLeased(granted.lease))
    part.commit()
    before = sum(facts.size_bytes for facts in part.log.segments())
    freed = part.compact()
    assert (freed.rewritten > 0, freed.items) == (True, 598)
    assert sum(facts.size_bytes for facts in part.log.segments()) == before - freed.size_bytes + part.log.segments()[-1].size_bytes
    partition.restart()
    partition.advance(3601)
    assert partition.texts(partition.lease()) == ["0.7", "2.5"]
    assert partition.why(8) == "resolved, and deleted by retention"


def test_a_rewritten_segment_is_rewritten_again_when_more_items_are_resolved(partition: PartitionUnderTest) -> None:
    part = configured(partition, NOW)
    for number in range(4):
        segment(part, *(f"{number}.{item}" for item in range(50)))
    granted = part.run(AcquireLease(200))
    assert isinstance(granted, LeaseAnswer)
    part.run(RetryLeased(granted.lease, [3, 60, 61, 62], delay=HOUR))
    part.run(CompleteLeased(granted.lease))
    part.commit()
    part.compact()
    partition.advance(3601)
    late = part.run(AcquireLease(3))
    assert isinstance(late, LeaseAnswer)
    part.run(CompleteLeased(late.lease))
    part.commit()
    assert part.compact().items == 3
    assert partition.texts(partition.lease()) == ["1.12"]


def test_a_cursor_holds_retention_back_until_it_has_passed(partition: PartitionUnderTest) -> None:
    part = configured(partition, NOW)
    partition.move_cursor("audit", 0)
    for number in range(4):
        segment(part, f"item {number}")
    work_off(part, 4)
    assert part.apply_retention().segments == 0
    assert [item.batch.payloads[0] for item in part.read_retained(0, 2).items] == [b"item 0", b"item 1"]
    partition.move_cursor("audit", 2)
    assert part.apply_retention().segments == 2
    partition.restart()
    part = partition.wrapped
    assert [item.start for item in part.read_retained(0, 10).items] == [2, 3]
    partition.release_cursor("audit")
    part.apply_retention()
    assert part.read_retained(0, 10).items == []


def test_a_cursor_reads_items_in_any_state(partition: PartitionUnderTest) -> None:
    partition.produce("completed", "buried", "leased", "ready")
    granted = partition.lease(3)
    partition.complete(granted.lease, [0])
    partition.bury(granted.lease, [1], "bad")
    (found,) = partition.wrapped.read_retained(0, 10).items
    assert list(found.batch.payloads) == [b"completed", b"buried", b"leased", b"ready"]
    assert [item.start for item in partition.wrapped.read_retained(2, 1).items] == [2]
    assert partition.wrapped.read_retained(4, 10).items == []


def test_a_buried_item_is_kept_as_long_as_a_completed_one(partition: PartitionUnderTest) -> None:
    part = configured(partition, NOW)
    segment(part, "bad")
    granted = partition.lease()
    partition.bury(granted.lease, reason="no use")
    segment(part, "next")
    assert part.apply_retention().items == 1
    assert partition.state_of(0) is ItemState.COMPLETED
    with pytest.raises(InvalidRequest, match="cannot be redriven"):
        partition.redrive(0)


def test_a_parked_item_is_kept_for_its_key(partition: PartitionUnderTest) -> None:
    part = configured(partition, Policy(on_bury="park", retention=NOW.retention))
    segment(part, "bad", "waits behind", key="k")
    granted = part.run(AcquireLease(1))
    assert isinstance(granted, LeaseAnswer)
    part.run(BuryLeased(granted.lease, reason="no use"))
    part.commit()
    segment(part, "next")
    part.compact()
    assert partition.lease().runs == [2, 3]
    partition.redrive(0)
    assert partition.texts(partition.lease()) == ["bad"]


def test_deleted_items_cannot_be_sought(partition: PartitionUnderTest) -> None:
    part = configured(partition, NOW)
    segment(part, "gone")
    segment(part, "kept")
    work_off(part, 2)
    partition.produce("new")
    part.apply_retention()
    assert partition.seek(0) == 0
    partition.configure(retention=Retention())
    work_off(part, 1)
    assert partition.seek(0) == 1
    assert partition.lease_texts() == ["new"]


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 3), (2, 9)])
def test_a_drop_command_for_needed_items_is_refused(partition: PartitionUnderTest, start: int, stop: int) -> None:
    partition.produce("ready", "leased", "completed")
    granted = partition.lease(3)
    partition.complete(granted.lease, [2])
    partition.retry(granted.lease, [0])
    with pytest.raises(InvalidRequest, match="cannot be dropped"):
        partition.wrapped.run(Drop([start, stop]))
    assert not partition.wrapped.state.dropped


@pytest.mark.parametrize("command", [PutCursor("", 0), PutCursor("c", -1), PutCursor("c", 2), ForgetCursor("nobody")])
def test_wrong_cursors_are_refused(partition: PartitionUnderTest, command: PutCursor | ForgetCursor) -> None:
    partition.produce("one")
    with pytest.raises(InvalidRequest):
        partition.wrapped.run(command)
    assert partition.wrapped.state.cursors == {}


def test_offset_at_a_wall_time(partition: PartitionUnderTest) -> None:
    part = partition.wrapped
    marks = []
    for number in range(5):
        marks.append(partition.wall)
        segment(part, f"{number}", f"{number} again")
        partition.advance(60)
    assert [part.offset_at(mark) for mark in marks] == [0, 2, 4, 6, 8]
    assert part.offset_at(marks[2] + 1) == 6
    assert part.offset_at(0) == 0
    assert part.offset_at(partition.wall) == 10


def busy(files: SimulatedFiles) -> Partition:
    """Old segments of resolved items, with one ready item in the second."""
    clock = MicrosecondClock()
    part = Partition(FileLog(files, "/log", 1, 0), clock, NOW)
    for number in range(5):
        segment(part, *(f"{number}.{item}" for item in range(10)))
    granted = part.run(AcquireLease(50))
    assert isinstance(granted, LeaseAnswer)
    part.run(RetryLeased(granted.lease, [13], delay=HOUR))
    part.run(CompleteLeased(granted.lease))
    part.commit()
    return part


@pytest.mark.parametrize("trouble", ["halt", errno.EIO, errno.ENOSPC])
def test_a_crash_at_any_step_of_retention_loses_no_needed_item(trouble: Fault) -> None:
    whole = SimulatedFiles()
    part = busy(whole)
    wanted = part.state.counts
    calls = whole.calls
    part.compact()
    steps = whole.calls - calls
    assert steps > 20
    for step in range(1, steps + 1):
        files = SimulatedFiles()
        part = busy(files)
        files.fail(files.calls + step, trouble)
        with contextlib.suppress(Halt, StorageFailed, OutcomeUnknown):
            part.compact()
        files.clear_faults()
        files.crash()
        again = Partition(FileLog(files, "/log", 1, 0), MicrosecondClock())
        assert again.gaps == [], f"step {step}"
        assert again.state.counts == wanted, f"step {step}"
        assert again.payloads([13, 14]) == [b"1.3"], f"step {step}"
        again.compact()
        assert again.state.dropped.runs == [0, 13, 14, 50], f"step {step}"
        assert base.dump(again.state) == base.dump(base.load(base.dump(again.state)))
