"""The partition: turns, commits, opening, and what a failing disk does to it."""

import errno
import random

import pytest

from penstock.logs.files.file_store import Directory
from penstock.logs.log import Frame, FrameType
from penstock.loop.partition import Partition
from penstock.rules import base
from penstock.rules.commands import Complete, Granted, Lease, Produce, Stored
from penstock.testing import ManualClock, SimulatedFiles
from penstock.words.clock import DAY, SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, StorageFailed
from penstock.words.limits import Policy
from tests.full_history import everything
from tests.partition_under_test import Bench, items


def frame_types(bench: Bench) -> list[FrameType]:
    return [frame.type for frame in bench.partition.log.frames() if isinstance(frame, Frame)]


def test_commands_of_a_turn_see_each_other_and_are_one_group(bench: Bench) -> None:
    bench.partition.run(Produce(items("ab")))
    granted = bench.partition.run(Lease(10))
    assert isinstance(granted, Granted)
    bench.partition.run(Complete(granted.lease))
    bench.partition.commit()
    bench.kill()
    assert bench.counts == (0, 0, 0, 2, 0, 0)


def test_what_was_not_committed_is_not_there(bench: Bench) -> None:
    bench.produce("a")
    bench.partition.run(Produce(items("b")))
    bench.kill()
    assert bench.take() == ["a"]


def test_produces_of_a_turn_share_a_frame(bench: Bench) -> None:
    before = frame_types(bench)
    for letter in "abc":
        bench.partition.run(Produce(items(letter)))
    bench.partition.commit()
    assert frame_types(bench)[len(before) :] == [FrameType.DATA]


def test_a_turn_that_only_leases_owes_no_sync_and_others_do(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease(1)
    assert bench.partition.log.unsynced
    bench.complete(granted.lease)
    assert not bench.partition.log.unsynced


def test_every_opening_is_an_epoch_of_its_own(bench: Bench) -> None:
    epochs = []
    for _ in range(3):
        epochs.append(bench.partition.state.epoch)
        bench.kill()
    assert epochs == [1, 2, 3]


def test_opening_with_another_policy_applies_it_at_once(bench: Bench) -> None:
    bench.produce("a")
    bench.retry(bench.lease().lease)
    bench.home.kill(bench.partition.log)
    bench.partition = Partition(bench.home.open(), bench.clock, Policy(max_attempts=1))
    assert bench.counts.buried == 1
    bench.kill()
    assert bench.counts.buried == 1


def test_a_wrong_policy_is_refused_before_anything_is_written(bench: Bench) -> None:
    before = frame_types(bench)
    log = bench.home.open()
    with pytest.raises(InvalidRequest):
        Partition(log, bench.clock, Policy(max_attempts=-1))
    bench.home.kill(log)
    assert frame_types(bench) == before


def test_a_partition_rotates_by_size_and_by_age_and_forgets_nothing(bench: Bench) -> None:
    bench.home.kill(bench.partition.log)
    bench.partition = Partition(bench.home.open(), bench.clock, segment_bytes=4_000, segment_age=DAY)
    for number in range(20):
        bench.produce(random.Random(number).randbytes(500))
    by_size = frame_types(bench).count(FrameType.BASE)
    assert by_size >= 2
    bench.clock.advance(DAY)
    bench.produce("late")
    assert frame_types(bench).count(FrameType.BASE) == by_size + 1
    bench.kill()
    assert len(bench.partition.payloads(bench.lease().runs)) == 21


def test_reopening_after_nothing_failed_gives_the_same_state(bench: Bench) -> None:
    everything(bench)
    counts, policy = bench.counts, bench.partition.state.policy
    bench.partition.reopen()
    assert (bench.counts, bench.partition.state.policy) == (counts, policy)


def test_blocks_of_many_small_frames_are_looked_at_in_one_decision(bench: Bench) -> None:
    for number in range(500):
        bench.partition.run(Produce(items([str(number)], key=str(number % 50))))
        bench.partition.commit()
    first = bench.lease(100)
    assert [int(text) % 50 for text in bench.texts(first)] == list(range(50))


def test_reading_follows_the_order_asked_for(bench: Bench) -> None:
    bench.produce(*"abc")
    bench.produce(*"de")
    assert bench.partition.payloads([4, 5, 0, 2, 3, 4]) == [b"e", b"a", b"b", b"d"]
    assert [(part.start, list(part.batch.payloads)) for part in bench.partition.items([1, 4])] == [(1, [b"b", b"c"]), (3, [b"d"])]


def test_a_repr_says_how_it_stands(bench: Bench) -> None:
    bench.produce("a", "b")
    bench.lease(1)
    assert repr(bench.partition) == "Partition(7, State(next=2 ready=1 leased=1 epoch=1))"


# -- a failing disk ------------------------------------------------------------------------------------


def on_disk(files: SimulatedFiles, clock: ManualClock) -> Partition:
    return Partition(Directory.open(["/data"], files=files).log(1, 7), clock)


def test_a_failed_write_is_never_reported_as_success_and_leaves_what_was_synced() -> None:
    files, clock = SimulatedFiles(), ManualClock()
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


def test_the_same_request_id_settles_a_failed_produce() -> None:
    """For every call that may fail in a turn: afterwards the request is stored once, whatever the caller was told."""
    for failing in range(1, 12):
        files, clock = SimulatedFiles(), ManualClock()
        partition = on_disk(files, clock)
        command = Produce(items("a"), request=bytes(16))
        files.fail(files.calls + failing, errno.EIO)
        try:
            partition.run(command)
            partition.commit()
        except (StorageFailed, OutcomeUnknown):
            partition.reopen()
        partition.run(command)
        partition.commit()
        assert partition.state.next_offset == 1, f"call {failing} failed"


def test_a_partition_that_cannot_even_go_back_says_that_the_outcome_is_unknown_and_refuses_until_reopened() -> None:
    files, clock = SimulatedFiles(), ManualClock()
    partition = on_disk(files, clock)
    partition.run(Produce(items("a")))
    files.readonly()
    with pytest.raises(OutcomeUnknown, match="; repeat with the same request id"):
        partition.commit()
    with pytest.raises(StorageFailed, match="; reopen it"):
        partition.run(Lease(1))
    assert "failing" in repr(partition)


def test_a_failed_partition_closes_without_writing() -> None:
    files, clock = SimulatedFiles(), ManualClock()
    partition = on_disk(files, clock)
    partition.run(Produce(items("a")))
    files.readonly()
    with pytest.raises(OutcomeUnknown):
        partition.commit()
    before = base.dump(partition.state)
    partition.close()
    assert base.dump(partition.state) == before


def test_time_passes_while_a_partition_is_closed(bench: Bench) -> None:
    bench.produce("a")
    bench.retry(bench.lease().lease, delay=10)
    bench.partition.close()
    bench.clock.advance(10 * SECOND)
    bench.open()
    bench.settle()
    assert bench.take() == ["a"]
