"""Damage: items whose bytes are gone are never served and never stand in the way; all others are served. On real files, really broken."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.logs.log import Frame, FrameType
from penstock.rules.commands import Lift, Narrow
from penstock.rules.item_states import Life
from tests.full_history import everything
from tests.partition_under_test import Bench, FileHome, given


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(FileHome(tmp_path, "fsync"))  # what was not promised by an fsync and is broken counts as torn, not as damaged
    yield bench
    bench.home.kill(bench.partition.log)


def damage(home: Path, content: bytes) -> None:
    """Flip one bit of some content on disk, so that its frame cannot be read."""
    [segment] = (home / "log").glob("*.log")
    data = bytearray(segment.read_bytes())
    assert data.count(content) == 1
    data[data.index(content)] ^= 1
    segment.write_bytes(data)


def three_frames(bench: Bench, **options: object) -> None:
    """Offsets 0 and 1, 2 and 3, 4 and 5: a frame each."""
    for pair in (("before 0", "before 1"), ("broken 2", "broken 3"), ("after 4", "after 5")):
        bench.produce(*pair, **options)


def test_a_lost_frame_found_at_opening_is_a_gap_and_the_rest_is_served(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench)
    damage(tmp_path, b"broken 2")
    bench.kill()
    assert [(gap.start, gap.stop) for gap in bench.partition.gaps] == [(2, 4)]
    assert bench.drain(10) == ["before 0", "before 1", "after 4", "after 5"]
    assert [bench.life(2), bench.why(2)] == [Life.COMPLETED, "lost: damage took its bytes"]


def test_lost_offsets_are_not_given_again(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench)
    damage(tmp_path, b"broken 2")
    bench.kill()
    assert bench.produce("new") == [6]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_lost_frame_found_at_a_lease_is_not_served_and_the_rest_is(bench: Bench, tmp_path: Path, key: str | None) -> None:
    three_frames(bench, **({} if key is None else {"key": key}))
    bench.partition.close()
    damage(tmp_path, b"broken 2")
    bench.open()  # from a checkpoint: it does not read the frames before that
    assert bench.drain(10) == ["before 0", "before 1", "after 4", "after 5"]
    assert bench.counts == (0, 0, 0, 6, 0, 0)


def test_a_lost_item_leaves_the_lease_that_holds_it(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench)
    bench.partition.close()
    damage(tmp_path, b"broken 2")
    bench.open()
    granted = bench.lease()
    assert bench.texts(granted) == ["before 0", "before 1", "after 4", "after 5"]
    settled = bench.complete(granted.lease, given(granted))
    assert (settled.done, settled.refused) == (4, [2, 3])


def test_a_lost_item_frees_its_key(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench, key="k")
    bench.complete(bench.lease(2, per_key=2).lease)
    held = bench.lease(1)
    assert given(held) == [2]
    assert bench.take() == []
    damage(tmp_path, b"broken 2")
    bench.kill()
    assert bench.drain() == ["after 4", "after 5"]


def test_lost_items_are_out_of_every_state(bench: Bench, tmp_path: Path) -> None:
    bench.configure(on_bury="park")
    bench.produce("before", "before too", "before as well", keys=["p", "b", "l"])
    bench.produce("broken 0", "broken 1", "broken 2", "broken 3", keys=["p", "b", "l", "b"], ttl=1_000)
    bench.produce("after 0", "after 1", "after 2", keys=["p", "b", "l"])
    bench.complete(bench.lease(3).lease)
    held = bench.lease(3)
    assert given(held) == [3, 4, 5]
    bench.bury(held.lease, [3])
    bench.retry(held.lease, [4], delay=100)
    assert bench.take() == []
    damage(tmp_path, b"broken 0")
    bench.kill()
    assert sorted(bench.drain()) == ["after 0", "after 1", "after 2"]
    bench.advance(10_000)
    assert bench.counts == (0, 0, 0, 10, 0, 0)


def test_items_in_line_found_lost_when_their_ttl_ends_are_not_buried(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench, key="k", ttl=100)
    held = bench.lease(timeout=1_000)
    assert bench.take() == []
    bench.partition.close()
    damage(tmp_path, b"broken 2")
    bench.open()
    bench.advance(100)
    buried, lost = Life.BURIED, Life.COMPLETED
    assert [bench.life(offset) for offset in range(6)] == [Life.LEASED, buried, lost, lost, buried, buried]
    bench.complete(held.lease)
    assert not bench.partition.state.keys.map


def test_items_in_line_found_lost_when_their_attempts_are_spent_are_not_buried(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench, key="k")
    bench.complete(bench.lease(2, per_key=2).lease)
    bench.retry(bench.lease().lease)
    bench.partition.close()
    damage(tmp_path, b"broken 2")
    bench.open()
    assert bench.configure(max_attempts=1) == 0
    assert (bench.counts.buried, bench.drain()) == (0, ["after 4", "after 5"])


def test_lost_items_are_not_sought(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench)
    bench.drain(10)
    damage(tmp_path, b"broken 2")
    bench.kill()
    assert bench.seek(0) == 4


def test_a_lost_item_cannot_be_sought_or_redriven(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench)
    granted = bench.lease()
    bench.bury(granted.lease, [2])
    bench.complete(granted.lease)
    bench.partition.close()
    damage(tmp_path, b"broken 2")
    bench.open()
    assert bench.redrive() == 0
    bench.seek(0)
    assert bench.drain(10) == ["before 0", "before 1", "after 4", "after 5"]


def test_a_lost_item_stays_lost_over_restarts(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench)
    damage(tmp_path, b"broken 2")
    bench.kill()
    bench.restart()
    bench.kill()
    assert bench.drain(10) == ["before 0", "before 1", "after 4", "after 5"]
    assert bench.why(3) == "lost: damage took its bytes"


def test_whichever_frame_is_lost_the_others_do_no_harm(tmp_path: Path) -> None:
    whole = Bench(FileHome(tmp_path, "fsync"))
    everything(whole)
    frames = [frame for frame in whole.partition.log.frames() if isinstance(frame, Frame)]
    whole.home.kill(whole.partition.log)
    for lost in frames[:-1]:
        copy = tmp_path / str(lost.sequence)
        shutil.copytree(tmp_path / "log", copy / "log")
        (copy / "log" / "checkpoint").unlink(missing_ok=True)
        damage(copy, bytes(lost.body))
        survivor = Bench(FileHome(copy, "fsync"))
        (gap,) = survivor.partition.gaps
        assert (gap.start, gap.stop) == (lost.base, lost.base + (lost.count if lost.type is FrameType.DATA else 0))
        _work_off(survivor)
        survivor.home.kill(survivor.partition.log)


def _work_off(bench: Bench) -> None:
    """Serve all there is to serve; at no time may the state contradict itself."""
    assert list(bench.counts) == bench.recount()
    bench.pause(lease=False)
    bench.advance(20_000)
    bench.redrive()
    bench.clear(buried=True)  # nothing is buried: it frees the keys parked by what left
    _deliver_all(bench)
    _lower_all(bench)
    bench.drain(10)
    bench.advance(20_000)
    assert list(bench.counts) == bench.recount()
    assert (bench.counts[:3], bench.counts.moving) == ((0, 0, 0), 0)


def _deliver_all(bench: Bench) -> None:
    outbox = bench.partition.state.outbox
    for to in list(outbox):
        while to in outbox:
            assert bench.deliver(70, to=to) == 1


def _lower_all(bench: Bench) -> None:
    for fence in list(bench.partition.state.keys.fences):
        bench.partition.run(Narrow(fence.number, []) if fence.slots is not None else Lift(fence.number, sorted(fence.keys)))
    assert not bench.partition.state.keys.fences
