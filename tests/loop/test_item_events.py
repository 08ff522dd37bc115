"""Events of items read from logs, and read-only partitions."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.frame import DROPPED
from penstock.logs.log import FrameType, Gap, ReadableLog
from penstock.loop.item_events import events, frame_events, item_history
from penstock.loop.partition import Partition
from penstock.loop.partition_reader import PartitionReader, retained_runs
from penstock.loop.recovery import replay
from penstock.rules import base
from penstock.rules.events import Event
from penstock.rules.item_states import TRANSITIONS, ItemState
from penstock.rules.item_states import Transition as Kind
from penstock.testing.clock import MicrosecondClock
from penstock.words.errors import BrokerClosed
from penstock.words.limits import Retention
from simulation.partition.simulation import PartitionSimulation
from tests.full_history import write_every_record
from tests.logs.backends import noise
from tests.partition_under_test import INCARNATION, PARTITION, FilePartitionBackend, PartitionUnderTest

KEEP_NOTHING = Retention(max_segments=1)


def names(found: list[Event]) -> list[str]:
    return [event.event for event in found]


def rotate(partition: PartitionUnderTest) -> None:
    """Begin a new segment."""
    partition.wrapped._rotation.room = 0
    partition.wrapped.commit()


@pytest.fixture
def file_partition(tmp_path: Path) -> Iterator[PartitionUnderTest]:
    """A partition in files that publishes everything it syncs."""
    partition = PartitionUnderTest(FilePartitionBackend(tmp_path, "fsync"))
    yield partition
    partition.check()


def published(partition: PartitionUnderTest) -> PublishedLog:
    log = partition.wrapped.log
    assert isinstance(log, FileLog)
    return PublishedLog(SystemFiles(), log.directory, INCARNATION, PARTITION)


def reader_of(partition: PartitionUnderTest) -> PartitionReader:
    return PartitionReader(published(partition), partition.clock)


# -- reading a log -------------------------------------------------------------------------------------


def test_an_items_history_is_read_from_the_segment_it_was_produced_in(partition: PartitionUnderTest) -> None:
    partition.produce("other")
    partition.retry(partition.lease().lease, reason="no")
    rotate(partition)
    (offset,) = partition.produce("item")
    rotate(partition)
    leased = partition.lease(2)
    rotate(partition)
    partition.complete(leased.lease)
    log = partition.wrapped.log
    assert names(item_history(log, offset)) == ["produced", "leased", "completed"]
    assert [(event.event, event.attempt) for event in item_history(log, 0)] == [
        ("produced", 0), ("leased", 1), ("retried", 1), ("leased", 2), ("completed", 2),
    ]  # fmt: skip
    assert item_history(log, 2) == []


def test_any_range_of_frames_can_be_read_alone(partition: PartitionUnderTest) -> None:
    partition.produce("again")
    partition.retry(partition.lease().lease, reason="no")
    rotate(partition)
    write_every_record(partition)
    rotate(partition)
    partition.pause(lease=False)
    partition.complete(partition.lease().lease)
    log = partition.wrapped.log
    whole = list(frame_events(log))
    assert {one.event for _, runs in whole for one in runs} == set(Kind) - {Kind.LOST}
    for cut in range(1, max(sequence for sequence, _ in whole) + 2):
        assert [*frame_events(log, 0, cut), *frame_events(log, cut)] == whole
    assert [event for _, runs in whole for one in runs for event in one.events()] == list(events(log))


def test_a_published_log_gives_the_same_events(file_partition: PartitionUnderTest) -> None:
    write_every_record(file_partition)
    file_partition.wrapped.sync_and_publish()
    assert list(events(published(file_partition))) == list(events(file_partition.wrapped.log))


def test_events_lead_to_the_state() -> None:
    """With kills, power cuts and retention: the known events of each item are valid transitions to its state."""
    items = 0
    for seed in range(7_000, 7_020):
        simulation = PartitionSimulation(seed)
        simulation.run()
        partition = simulation.harness.partition
        lives: dict[int, ItemState] = {}
        for event in events(partition.log, whole_since(partition.log)):
            lives[event.offset] = life_after(lives.get(event.offset), event)
        assert {offset: partition.state.state_of(offset) for offset in lives} == lives
        items += len(lives)
    assert items > 100


def whole_since(log: ReadableLog) -> int:
    """The first sequence from which on no segment was rewritten."""
    segments = log.segments()
    return next((after.first_sequence for before, after in reversed([*pairwise(segments)]) if before.rewritten), 0)


def life_after(before: ItemState | None, event: Event) -> ItemState:
    """The state after an event; of an item without earlier events, whichever state it was in."""
    found = [TRANSITIONS.get((life, Kind(event.event))) for life in ([before] if before is not None else [None, *ItemState])]
    known = {life for life in found if life is not None}
    assert len(known) == 1, f"{before}: {event}"
    return known.pop()


def test_events_of_deleted_segments_are_missing_and_later_ones_are_given(partition: PartitionUnderTest) -> None:
    partition.configure(retention=KEEP_NOTHING)
    partition.produce("done", "failed")
    granted = partition.lease(2)
    partition.complete(granted.lease, [0])
    partition.retry(granted.lease, [1], reason="no")
    partition.complete(partition.lease().lease)
    for _ in range(3):
        rotate(partition)
    (offset,) = partition.produce("kept")
    assert partition.wrapped.log.segments()[0].base_offset > 0
    assert names(item_history(partition.wrapped.log, 1)) == []
    assert names(item_history(partition.wrapped.log, offset)) == ["produced"]


def test_a_rewritten_segment_gives_produced_events_only(partition: PartitionUnderTest) -> None:
    partition.configure(retention=KEEP_NOTHING)
    (later,) = partition.produce("later", at=partition.after(60))
    began = partition.wall
    (held,) = partition.produce("held", priority=0)
    partition.produce("gone")
    lease = partition.lease(1, timeout=3600).lease
    partition.complete(partition.lease(1).lease)
    for _ in range(4):
        rotate(partition)
    partition.wrapped.compact()
    assert any(facts.rewritten for facts in partition.wrapped.log.segments())
    partition.advance(60)
    partition.retry(lease, reason="no")
    log = partition.wrapped.log
    assert item_history(log, later)[0] == Event("scheduled", later, began)
    assert names(item_history(log, later)) == ["scheduled", "due"]
    assert [(event.event, event.attempt) for event in item_history(log, held)] == [("produced", 0), ("retried", 1)]


# -- damage --------------------------------------------------------------------------------------------


def damaged(partition: PartitionUnderTest, kind: FrameType, count: int) -> PublishedLog:
    """The published log, with one byte changed in the `count`th frame of a type."""
    log = partition.wrapped.log
    assert isinstance(log, FileLog)
    partition.wrapped.sync_and_publish()
    frame = [found for found in log.frames() if not isinstance(found, Gap) and found.type is kind][count]
    (path,) = Path(log.directory).glob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(bytes(frame.body))] ^= 0xFF
    path.write_bytes(data)
    return published(partition)


@pytest.fixture
def unchecked_partition(tmp_path: Path) -> PartitionUnderTest:
    """A partition whose files will be damaged."""
    return PartitionUnderTest(FilePartitionBackend(tmp_path, "fsync"))


def test_damaged_items_have_a_lost_event(unchecked_partition: PartitionUnderTest) -> None:
    unchecked_partition.produce("a", "b")
    lost = unchecked_partition.produce("c" * 50, "d" * 50)
    unchecked_partition.produce("e")
    unchecked_partition.complete(unchecked_partition.lease(1).lease)
    log = damaged(unchecked_partition, FrameType.DATA, 1)
    for offset in lost:
        (event,) = item_history(log, offset)
        assert event.event == "lost" and event.reason.startswith("damage: ") and ".log bytes " in event.reason
    assert names(item_history(log, 0)) == ["produced", "leased", "completed"]
    assert names(item_history(log, 4)) == ["produced"]


def test_an_items_history_continues_after_a_lost_record(unchecked_partition: PartitionUnderTest) -> None:
    unchecked_partition.produce("a", "b")
    granted = unchecked_partition.lease(2)
    unchecked_partition.complete(granted.lease, [0])
    unchecked_partition.retry(granted.lease, [1])
    unchecked_partition.complete(unchecked_partition.lease(1).lease, [1])
    log = damaged(unchecked_partition, FrameType.STATE, 1)  # the lease
    assert names(item_history(log, 0)) == ["produced", "completed"]
    assert names(item_history(log, 1))[-1] == "completed"


def test_a_log_whose_first_base_is_lost_gives_the_remaining_events(unchecked_partition: PartitionUnderTest) -> None:
    for text in ("dropped", "first", "second"):
        unchecked_partition.produce(text)
        unchecked_partition.complete(unchecked_partition.lease().lease)
        rotate(unchecked_partition)
    log = unchecked_partition.wrapped.log
    assert isinstance(log, FileLog)
    dropped, oldest, _, _ = sorted(Path(log.directory).glob("*.log"))
    dropped.unlink()
    oldest.write_bytes(b"\0" * 100 + oldest.read_bytes()[100:])
    found = list(events(published(unchecked_partition)))
    assert [(event.event, event.offset) for event in found] == [
        ("produced", 1), ("produced", 2), ("leased", 2), ("completed", 2),
    ]  # fmt: skip


# -- reading on ----------------------------------------------------------------------------------------


READABLE: dict[str, Callable[[PartitionUnderTest], ReadableLog]] = {
    "owner": lambda bench: bench.wrapped.log,
    "published": published,
}


@pytest.mark.parametrize("which", READABLE)
def test_frames_after_a_sequence_are_read_without_earlier_ones(file_partition: PartitionUnderTest, which: str) -> None:
    write_every_record(file_partition)
    file_partition.wrapped.sync_and_publish()
    rotate(file_partition)
    file_partition.produce("more")
    log = READABLE[which](file_partition)
    whole = list(log.frames())
    for place, frame in enumerate(whole):
        assert not isinstance(frame, Gap)
        assert list(log.frames(frame.sequence)) == whole[place + 1 :]
    last = whole[-1]
    assert not isinstance(last, Gap) and list(log.frames(last.sequence)) == []
    file_partition.produce("new")
    rotate(file_partition)
    file_partition.produce("in another segment")
    kinds = [frame.type for frame in log.frames(last.sequence) if not isinstance(frame, Gap)]
    assert kinds == [FrameType.DATA, FrameType.BASE, FrameType.DATA]


def test_frames_after_a_sequence_in_memory(partition: PartitionUnderTest) -> None:
    partition.produce("a")
    partition.produce("b")
    whole = list(partition.wrapped.log.frames())
    assert [list(partition.wrapped.log.frames(after)) for after in range(1, len(whole) + 1)] == [
        whole[n:] for n in range(1, len(whole) + 1)
    ]


def test_frames_deleted_after_a_sequence_are_a_gap(partition: PartitionUnderTest) -> None:
    partition.configure(retention=KEEP_NOTHING)
    partition.produce("done")
    partition.complete(partition.lease().lease)
    for _ in range(3):
        rotate(partition)
    log = partition.wrapped.log
    oldest = log.segments()[0].first_sequence
    gap, *rest = log.frames(1)
    assert isinstance(gap, Gap) and (gap.first_sequence, gap.last_sequence, gap.why) == (2, oldest - 1, DROPPED)
    assert rest == list(log.frames())
    assert list(log.frames(oldest - 1)) == rest


# -- a partition that is only read ---------------------------------------------------------------------


def test_a_reader_follows_everything_its_owner_does(file_partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(file_partition)
    turn = PartitionUnderTest._turn

    def turn_and_look(partition: PartitionUnderTest, command: Any) -> Any:
        answer = turn(partition, command)
        partition.wrapped.sync_and_publish()
        reader.refresh()
        assert base.dump(reader.state) == base.dump(partition.wrapped.state)
        return answer

    monkeypatch.setattr(PartitionUnderTest, "_turn", turn_and_look)
    write_every_record(file_partition)
    rotate(file_partition)
    file_partition.produce("last")
    assert reader.state.next_offset == file_partition.wrapped.state.next_offset


def test_a_reader_sees_what_its_owner_sees(file_partition: PartitionUnderTest) -> None:
    write_every_record(file_partition)
    file_partition.wrapped.sync_and_publish()
    reader, owner = reader_of(file_partition), file_partition.wrapped
    assert reader.now() == owner.now()
    end = owner.state.next_offset
    assert [reader.explain(offset) for offset in range(end)] == [owner.explain(offset) for offset in range(end)]
    mine, theirs = reader.read_retained(0, 100).items, owner.read_retained(0, 100).items
    assert [(part.start, part.produced_at, list(part.batch.payloads)) for part in mine] == [
        (part.start, part.produced_at, list(part.batch.payloads)) for part in theirs
    ]
    assert [reader.offset_at(file_partition.wall + shift) for shift in (-(1 << 40), 0, 1)] == [
        owner.offset_at(file_partition.wall + shift) for shift in (-(1 << 40), 0, 1)
    ]


def test_a_reader_whose_next_frames_are_deleted_replays_from_a_base(file_partition: PartitionUnderTest) -> None:
    file_partition.configure(retention=KEEP_NOTHING)
    file_partition.produce("done")
    reader = reader_of(file_partition)
    file_partition.complete(file_partition.lease().lease)
    for _ in range(3):
        rotate(file_partition)
    file_partition.produce("new")
    reader.refresh()
    assert base.dump(reader.state) == base.dump(file_partition.wrapped.state)
    assert reader.read_retained(0, 10).items[0].batch.payloads == [b"new"]


def test_a_refresh_reads_only_what_is_new(file_partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        file_partition.produce(noise(30_000, seed))
    reader = reader_of(file_partition)
    file_partition.produce("new")
    read: list[int] = []
    pread = SystemFiles.pread

    def counting(handle: int, size: int, position: int) -> bytes:
        read.append(size)
        return pread(handle, size, position)

    monkeypatch.setattr(SystemFiles, "pread", staticmethod(counting))
    reader.refresh()
    assert reader.state.next_offset == 21
    assert sum(read) < 20_000
    read.clear()
    list(reader.log.frames())
    assert sum(read) > 400_000  # so much there was


def test_a_reader_that_failed_replays_from_a_base(file_partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    file_partition.produce("a")
    reader = reader_of(file_partition)
    file_partition.produce("b")
    monkeypatch.setattr(reader.log, "_closed", True)
    with pytest.raises(BrokerClosed):
        reader.refresh()
    monkeypatch.setattr(reader.log, "_closed", False)
    file_partition.produce("c")
    reader.refresh()
    assert base.dump(reader.state) == base.dump(file_partition.wrapped.state)


def test_a_reader_finds_lost_items(unchecked_partition: PartitionUnderTest) -> None:
    unchecked_partition.produce("a", "b")
    unchecked_partition.produce("c" * 50)
    unchecked_partition.produce("d")
    reader = PartitionReader(damaged(unchecked_partition, FrameType.DATA, 1), unchecked_partition.clock)
    assert reader.state.lost.runs == [2, 3] and len(reader.gaps) == 1
    assert [list(part.batch.payloads) for part in reader.items([0, 4])] == [[b"a", b"b"], [b"d"]]
    reader.refresh()
    assert reader.state.lost.runs == [2, 3]


def test_a_reader_keeps_time_without_an_owner(tmp_path: Path) -> None:
    clock = MicrosecondClock()
    directory = FileStore.open(tmp_path / "data", clock=clock)
    partition = Partition(directory.log(1, 0), clock)
    partition.close()
    directory.close()
    reader = PartitionReader(FileStore.open(tmp_path / "data", read_only=True).reader(1, 0), clock)
    before = reader.now()
    clock.advance(5)
    assert reader.now().elapsed == before.elapsed + 5
    clock.reboot(7)
    assert reader.now().elapsed >= before.elapsed + 12
    assert base.dump(reader.state) == base.dump(replay(reader.log)[0])


def test_retained_runs_are_limited(partition: PartitionUnderTest) -> None:
    partition.produce(*"abcdef")
    partition.complete(partition.lease(2).lease)
    partition.drop(1, 2)
    assert retained_runs(partition.wrapped.state, 0, 3) == [0, 1, 2, 4]
    assert retained_runs(partition.wrapped.state, 3, 100) == [3, 6]
    assert retained_runs(partition.wrapped.state, 3, 0) == []
