"""Base: the whole state as bytes; the same state gives the same bytes."""

from typing import get_args

import msgspec
import pytest

from penstock.logs import codec
from penstock.logs.log import Frame, FrameType
from penstock.loop.partition import Partition
from penstock.rules import base, machine
from penstock.rules.records import Lost, Produced, RequestAnswered, Restored, StateRecord
from penstock.rules.state import State
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog
from tests.full_history import write_every_record
from tests.partition_under_test import MemoryPartitionBackend, PartitionUnderTest


def frames(partition: PartitionUnderTest) -> list[Frame]:
    return [frame for frame in partition.wrapped.log.frames() if isinstance(frame, Frame)]


def apply(state: State, frame: Frame) -> None:
    for record in codec.decode_frame(frame):
        machine.apply(state, record, Moment(frame.elapsed, frame.wall))


def test_a_full_history_leaves_something_in_every_part_of_a_base(partition: PartitionUnderTest) -> None:
    write_every_record(partition)
    image = msgspec.to_builtins(base._decoder.decode(base.dump(partition.wrapped.state)))
    empty = [name for name, value in zip(base._StateImage.__struct_fields__, image, strict=True) if not value]
    assert empty == ["paused_produce", "lost", "requests", "holes", "first_lease"]


def test_a_full_history_has_every_kind_of_record_but_lost(partition: PartitionUnderTest) -> None:
    write_every_record(partition)
    written = {type(record) for frame in frames(partition) if frame.type is not FrameType.BASE for record in codec.decode_frame(frame)}
    assert written == {Produced, *get_args(StateRecord)} - {Lost, RequestAnswered, Restored}


def test_replay_from_a_base_at_any_point_gives_the_same_bytes(partition: PartitionUnderTest) -> None:
    write_every_record(partition)
    history = frames(partition)
    expected = base.dump(partition.wrapped.state)
    live = State()
    for cut in range(len(history)):
        loaded = base.load(base.dump(live))
        for frame in history[cut:]:
            apply(loaded, frame)
        assert base.dump(loaded) == expected, f"from a Base before frame {cut}"
        apply(live, history[cut])


def test_a_state_loaded_from_a_base_behaves_like_the_original(partition: PartitionUnderTest) -> None:
    """Parts that are derived and not stored (held keys, heads, deadlines) show in the operations that follow."""
    write_every_record(partition)
    twin, known = base.load(base.dump(partition.wrapped.state)), len(frames(partition))
    partition.pause(lease=False)
    partition.advance(250)
    for _ in range(5):
        partition.lease(4, per_key=2, timeout=3)
        partition.advance(5)
    for frame in frames(partition)[known:]:
        apply(twin, frame)
    assert base.dump(twin) == base.dump(partition.wrapped.state)


def test_reading_a_state_does_not_change_its_bytes(partition: PartitionUnderTest) -> None:
    partition.produce("a", "b", "c", keys=["k", None, "m"])
    granted = partition.lease()
    before = base.dump(partition.wrapped.state)
    for offset in range(3):
        partition.why(offset)
    partition.complete(granted.lease, [99])
    assert base.dump(partition.wrapped.state) == before


def test_two_ways_to_the_same_state_have_the_same_bytes() -> None:
    """The image after these completes: at once or one by one, it is the same."""
    assert _left_after([None]) == _left_after([[1], [0], [2]])


def _left_after(completes: list[list[int] | None]) -> bytes:
    partition = PartitionUnderTest(MemoryPartitionBackend())
    partition.produce("a", "b", "c", keys=["k", None, "m"])
    granted = partition.lease()
    for which in completes:
        partition.complete(granted.lease, which)
    return base.dump(partition.wrapped.state)


def test_a_newer_base_is_refused_and_the_error_says_what_to_do() -> None:
    image = base._decoder.decode(base.dump(State()))
    image.version = base.VERSION + 1
    with pytest.raises(CorruptLog, match="; use a newer Penstock"):
        base.load(msgspec.msgpack.encode(image))


@pytest.mark.parametrize("body", [b"", b"\x90", b"not a Base"])
def test_bytes_that_are_no_base_are_refused(body: bytes) -> None:
    with pytest.raises(CorruptLog, match="; run verify"):
        base.load(body)


def test_a_partition_opens_from_its_latest_base_and_forgets_nothing(partition: PartitionUnderTest) -> None:
    partition.backend.kill(partition.wrapped.log)
    partition.wrapped = Partition(partition.backend.open(), partition.clock, segment_bytes=1)
    partition.produce("a", "b", "c", key="k")
    granted = partition.lease()
    partition.kill()
    assert FrameType.BASE in {frame.type for frame in frames(partition)}
    partition.complete(granted.lease)
    assert partition.drain() == ["b", "c"]
