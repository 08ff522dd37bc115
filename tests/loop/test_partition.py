"""The partition: turns, commits, opening, and failures of the disk."""

import errno
import random
from pathlib import Path

import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.log import Frame, FrameType
from penstock.loop import item_cache
from penstock.loop import partition as partition_module
from penstock.loop.partition import Partition
from penstock.rules import base
from penstock.rules.calls import CallName
from penstock.rules.commands import AcquireLease, CompleteLeased, LeaseAnswer, Produce, Stored
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import DAY, SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, StorageFailed
from penstock.words.limits import Policy
from tests.full_history import write_every_record
from tests.partition_under_test import FilePartitionBackend, PartitionUnderTest, items


def frame_types(partition: PartitionUnderTest) -> list[FrameType]:
    return [frame.type for frame in partition.wrapped.log.frames() if isinstance(frame, Frame)]


def test_commands_of_a_turn_see_each_other_and_are_one_group(partition: PartitionUnderTest) -> None:
    partition.wrapped.run(Produce(items("ab")))
    granted = partition.wrapped.run(AcquireLease(10))
    assert isinstance(granted, LeaseAnswer)
    partition.wrapped.run(CompleteLeased(granted.lease))
    partition.wrapped.commit()
    partition.kill()
    assert partition.counts == (0, 0, 0, 2, 0, 0, 0)


def test_uncommitted_items_do_not_survive_a_kill(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.wrapped.run(Produce(items("b")))
    partition.kill()
    assert partition.lease_texts() == ["a"]


def test_produces_of_a_turn_share_a_frame(partition: PartitionUnderTest) -> None:
    before = frame_types(partition)
    for letter in "abc":
        partition.wrapped.run(Produce(items(letter)))
    partition.wrapped.commit()
    assert frame_types(partition)[len(before) :] == [FrameType.DATA]


def test_a_produce_evicted_from_the_cache_is_read_while_another_of_its_frame_is_cached(
    partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in one frame of the log; the frame that is read takes the place of the one that is cached."""
    monkeypatch.setattr(item_cache, "CACHE_BYTES", 2_000)
    partition.wrapped.run(Produce(items([b"x" * 1_500])))
    partition.wrapped.run(Produce(items("y")))
    partition.wrapped.commit()
    assert partition.wrapped.payloads([0, 1]) == [b"x" * 1_500]
    partition.produce("z")  # the cache is over its limit: it drops what was read, the first item
    assert partition.wrapped.payloads([0, 3]) == [b"x" * 1_500, b"y", b"z"]


def test_a_turn_that_only_leases_needs_no_sync_and_others_do(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    granted = partition.lease(1)
    assert partition.wrapped.log.unsynced
    partition.complete(granted.lease)
    assert not partition.wrapped.log.unsynced


def test_every_opening_is_an_epoch_of_its_own(partition: PartitionUnderTest) -> None:
    epochs = []
    for _ in range(3):
        epochs.append(partition.wrapped.state.epoch)
        partition.kill()
    assert epochs == [1, 2, 3]


def test_opening_with_another_policy_applies_it_at_once(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.retry(partition.lease().lease)
    partition.backend.kill(partition.wrapped.log)
    partition.wrapped = Partition(partition.backend.open(), partition.clock, Policy(max_attempts=1))
    assert partition.counts.buried == 1
    partition.kill()
    assert partition.counts.buried == 1


def test_a_wrong_policy_is_refused_before_anything_is_written(partition: PartitionUnderTest) -> None:
    before = frame_types(partition)
    log = partition.backend.open()
    with pytest.raises(InvalidRequest):
        Partition(log, partition.clock, Policy(max_attempts=-1))
    partition.backend.kill(log)
    assert frame_types(partition) == before


def test_a_partition_rotates_by_size_and_by_age_and_forgets_nothing(partition: PartitionUnderTest) -> None:
    partition.backend.kill(partition.wrapped.log)
    partition.wrapped = Partition(partition.backend.open(), partition.clock, segment_bytes=4_000, segment_age=DAY)
    for number in range(20):
        partition.produce(random.Random(number).randbytes(500))
    by_size = frame_types(partition).count(FrameType.BASE)
    assert by_size >= 2
    partition.clock.advance(DAY)
    partition.produce("late")
    assert frame_types(partition).count(FrameType.BASE) == by_size + 1
    partition.kill()
    assert len(partition.wrapped.payloads(partition.lease().runs)) == 21


def test_reopening_after_nothing_failed_gives_the_same_state(partition: PartitionUnderTest) -> None:
    write_every_record(partition)
    counts, policy = partition.counts, partition.wrapped.state.policy
    partition.wrapped.reopen()
    assert (partition.counts, partition.wrapped.state.policy) == (counts, policy)


def test_blocks_of_many_small_frames_are_looked_at_in_one_decision(partition: PartitionUnderTest) -> None:
    for number in range(500):
        partition.wrapped.run(Produce(items([str(number)], key=str(number % 50))))
        partition.wrapped.commit()
    first = partition.lease(100)
    assert [int(text) % 50 for text in partition.texts(first)] == list(range(50))


def test_reading_follows_the_order_asked_for(partition: PartitionUnderTest) -> None:
    partition.produce(*"abc")
    partition.produce(*"de")
    assert partition.wrapped.payloads([4, 5, 0, 2, 3, 4]) == [b"e", b"a", b"b", b"d"]
    assert [(part.start, list(part.batch.payloads)) for part in partition.wrapped.items([1, 4])] == [(1, [b"b", b"c"]), (3, [b"d"])]


def test_repr_shows_the_state(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b")
    partition.lease(1)
    assert repr(partition.wrapped) == "Partition(7, State(next=2 ready=1 leased=1 epoch=1))"


# -- a failing disk ------------------------------------------------------------------------------------


def on_disk(files: SimulatedFiles, clock: MicrosecondClock) -> Partition:
    return Partition(FileStore.open(["/data"], files=files).log(1, 7), clock)


def test_a_failed_write_is_never_reported_as_success_and_leaves_what_was_synced() -> None:
    files, clock = SimulatedFiles(), MicrosecondClock()
    partition = on_disk(files, clock)
    partition.run(Produce(items("ab")))
    partition.commit()
    before = partition.state.counts
    partition.run(Produce(items("c")))
    files.fail(files.calls + 1, errno.EIO)
    with pytest.raises(StorageFailed):
        partition.commit()
    assert partition.state.counts == before
    stored = partition.run(Produce(items("c")))
    partition.commit()
    assert isinstance(stored, Stored)
    assert list(stored.offsets) == [2]
    assert partition.payloads([0, 3]) == [b"a", b"b", b"c"]


def test_a_failed_produce_repeated_with_its_request_id_is_stored_once() -> None:
    """For each file call that fails in a turn: after the repetition the items are stored once."""
    for failing in range(1, 12):
        files, clock = SimulatedFiles(), MicrosecondClock()
        partition = on_disk(files, clock)
        command = Produce(items("a"), calls=(CallName(bytes(16)),))
        files.fail(files.calls + failing, errno.EIO)
        try:
            partition.run(command)
            partition.commit()
        except (StorageFailed, OutcomeUnknown):
            partition.reopen()
        partition.run(command)
        partition.commit()
        assert partition.state.next_offset == 1, f"call {failing} failed"


def test_when_undoing_fails_the_outcome_is_unknown_and_commands_are_refused_until_reopened() -> None:
    files, clock = SimulatedFiles(), MicrosecondClock()
    partition = on_disk(files, clock)
    partition.run(Produce(items("a")))
    files.set_read_only()
    with pytest.raises(OutcomeUnknown, match="it is not known what was stored, and undoing it failed "):
        partition.commit()
    with pytest.raises(StorageFailed, match="; reopen it"):
        partition.run(AcquireLease(1))
    assert "failing" in repr(partition)


def test_a_failed_partition_closes_without_writing() -> None:
    files, clock = SimulatedFiles(), MicrosecondClock()
    partition = on_disk(files, clock)
    partition.run(Produce(items("a")))
    files.set_read_only()
    with pytest.raises(OutcomeUnknown):
        partition.commit()
    before = base.dump(partition.state)
    partition.close()
    assert base.dump(partition.state) == before


def test_time_passes_while_a_partition_is_closed(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.retry(partition.lease().lease, delay=10)
    partition.wrapped.close()
    partition.clock.advance(10 * SECOND)
    partition.open()
    partition.run_due()
    assert partition.lease_texts() == ["a"]


def test_an_opening_that_replayed_much_is_soon_followed_by_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = PartitionUnderTest(FilePartitionBackend(tmp_path))
    for number in range(30):
        part.produce(str(number))
    monkeypatch.setattr(partition_module, "CHECKPOINT_FRAMES", 20)
    monkeypatch.setattr(partition_module, "SOON_FRAMES", 5)
    part.kill()
    checkpoint = tmp_path / "log" / "checkpoint"
    part.produce("one")
    assert not checkpoint.exists(), "the first callers after an opening do not wait for it"
    for _ in range(6):
        part.produce("more")
    assert checkpoint.exists()
    part.check()
