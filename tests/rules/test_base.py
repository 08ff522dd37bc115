"""Base: the whole state as bytes, the same however it came about."""

from typing import get_args

import msgspec
import pytest

from penstock.logs import codec
from penstock.logs.log import Frame, FrameType
from penstock.loop.partition import Partition
from penstock.rules import base, machine
from penstock.rules.records import Lost, Produced, StateRecord
from penstock.rules.state import State
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog
from tests.full_history import everything
from tests.partition_under_test import Bench, MemoryHome


def frames(bench: Bench) -> list[Frame]:
    return [frame for frame in bench.partition.log.frames() if isinstance(frame, Frame)]


def apply(state: State, frame: Frame) -> None:
    for record in codec.records(frame):
        machine.apply(state, record, Moment(frame.elapsed, frame.wall))


def test_a_full_history_leaves_something_in_every_part_of_a_base(bench: Bench) -> None:
    everything(bench)
    image = msgspec.to_builtins(base._decoder.decode(base.dump(bench.partition.state)))
    empty = [name for name, value in zip(base._Image.__struct_fields__, image, strict=True) if not value]
    assert empty == ["paused_produce", "lost"]


def test_a_full_history_has_every_kind_of_record_but_lost(bench: Bench) -> None:
    everything(bench)
    written = {type(record) for frame in frames(bench) if frame.type is not FrameType.BASE for record in codec.records(frame)}
    assert written == {Produced, *get_args(StateRecord)} - {Lost}


def test_replay_from_a_base_at_any_point_gives_the_same_bytes(bench: Bench) -> None:
    everything(bench)
    history = frames(bench)
    expected = base.dump(bench.partition.state)
    live = State()
    for cut in range(len(history)):
        loaded = base.load(base.dump(live))
        for frame in history[cut:]:
            apply(loaded, frame)
        assert base.dump(loaded) == expected, f"from a Base before frame {cut}"
        apply(live, history[cut])


def test_a_base_is_a_whole_state_that_goes_on_as_if_nothing_had_happened(bench: Bench) -> None:
    """What is derived and not stored (held keys, heads, deadlines) shows in what comes next."""
    everything(bench)
    twin, known = base.load(base.dump(bench.partition.state)), len(frames(bench))
    bench.pause(lease=False)
    bench.advance(250)
    for _ in range(5):
        bench.lease(4, per_key=2, timeout=3)
        bench.advance(5)
    for frame in frames(bench)[known:]:
        apply(twin, frame)
    assert base.dump(twin) == base.dump(bench.partition.state)


def test_looking_at_a_state_does_not_change_its_bytes(bench: Bench) -> None:
    bench.produce("a", "b", "c", keys=["k", None, "m"])
    granted = bench.lease()
    before = base.dump(bench.partition.state)
    for offset in range(3):
        bench.why(offset)
    bench.complete(granted.lease, [99])
    assert base.dump(bench.partition.state) == before


def test_two_ways_to_the_same_state_have_the_same_bytes() -> None:
    """Completed in one go or one by one: what is left is the same."""
    assert _left_after([None]) == _left_after([[1], [0], [2]])


def _left_after(completes: list[list[int] | None]) -> bytes:
    bench = Bench(MemoryHome())
    bench.produce("a", "b", "c", keys=["k", None, "m"])
    granted = bench.lease()
    for which in completes:
        bench.complete(granted.lease, which)
    return base.dump(bench.partition.state)


def test_a_newer_base_is_refused_with_a_word_on_what_to_do() -> None:
    image = base._decoder.decode(base.dump(State()))
    image.version = base.VERSION + 1
    with pytest.raises(CorruptLog, match="; use a newer Penstock"):
        base.load(msgspec.msgpack.encode(image))


@pytest.mark.parametrize("body", [b"", b"\x90", b"not a Base"])
def test_bytes_that_are_no_base_are_refused(body: bytes) -> None:
    with pytest.raises(CorruptLog, match="; run verify"):
        base.load(body)


def test_a_partition_opens_from_its_latest_base_and_forgets_nothing(bench: Bench) -> None:
    bench.home.kill(bench.partition.log)
    bench.partition = Partition(bench.home.open(), bench.clock, segment_bytes=1)
    bench.produce("a", "b", "c", key="k")
    granted = bench.lease()
    bench.kill()
    assert FrameType.BASE in {frame.type for frame in frames(bench)}
    bench.complete(granted.lease)
    assert bench.drain() == ["b", "c"]
