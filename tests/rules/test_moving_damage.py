"""Damage to what is on its way: what is lost never arrives and holds nothing up; what is whole still does. On real files, really broken."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.logs import codec
from penstock.logs.log import Frame
from penstock.rules import base
from penstock.rules.item_states import Life
from penstock.rules.outbox import moved_to
from penstock.rules.reconciliation import mend
from penstock.rules.records import Delivered, Fenced, Record, Released, Sent
from penstock.words.errors import InvalidRequest
from tests.partition_under_test import ELSEWHERE, Bench, FileHome
from tests.rules.test_damage import damage, three_frames


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(FileHome(tmp_path, "fsync"))
    yield bench
    assert list(bench.counts) == bench.recount()
    _check_outbox(bench)
    before = base.dump(bench.partition.state)
    mend(bench.partition.state)
    mended = base.dump(bench.partition.state)
    mend(bench.partition.state)
    assert base.dump(bench.partition.state) == mended
    assert base.dump(base.load(before)) == before
    bench.home.kill(bench.partition.log)


def _check_outbox(bench: Bench) -> None:
    """On its way is exactly what the outbox holds, each item once."""
    state = bench.partition.state
    held = sorted(runs for line in state.outbox.values() for entry in line for runs in _pairs(entry.runs))
    moving = [offset for offset in range(state.next_offset) if bench.life(offset) is Life.MOVING]
    assert [offset for start, stop in held for offset in range(start, stop)] == moving


def _pairs(runs: list[int]) -> list[tuple[int, int]]:
    return list(zip(runs[::2], runs[1::2], strict=True))


def lose(bench: Bench, home: Path, kind: type[Record]) -> None:
    """Damage the only frame that has a record of a kind, and open again."""
    frames = [frame for frame in bench.partition.log.frames() if isinstance(frame, Frame)]
    [body] = [bytes(frame.body) for frame in frames if any(type(record) is kind for record in codec.records(frame))]
    damage(home, body)
    bench.kill()


def on_their_way(bench: Bench) -> list[list[int]]:
    return [entry.runs for entry in bench.partition.state.outbox.get(ELSEWHERE, [])]


@pytest.mark.parametrize("key", [None, "k"])
def test_lost_items_are_taken_out_of_their_transfers(bench: Bench, tmp_path: Path, key: str | None) -> None:
    three_frames(bench, **({} if key is None else {"key": key}))
    bench.send(1, 2)
    bench.send(3)
    bench.send(4)
    damage(tmp_path, b"broken 2")
    bench.kill()
    assert on_their_way(bench) == [[1, 2], [], [4, 5]]
    assert [bench.life(offset) for offset in range(6)] == [
        *(Life.READY, Life.MOVING, Life.COMPLETED, Life.COMPLETED, Life.MOVING, Life.READY)
    ]
    assert bench.why(2) == "lost: damage took its bytes"
    assert [bench.deliver(70), bench.deliver(), bench.deliver(71)] == [1, 1, 1]  # an emptied transfer keeps its place
    assert [moved_to(bench.partition.state, offset) for offset in (1, 2, 3, 4)] == [(0xDEAD, 3, 70), None, None, (0xDEAD, 3, 71)]
    assert bench.drain(10) == ["before 0", "after 5"]


def test_items_found_lost_when_they_are_read_leave_their_transfer(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench)
    bench.send(1, 2, 4)
    bench.partition.close()
    damage(tmp_path, b"broken 2")
    bench.open()  # from a checkpoint: it does not read the frames before that
    assert on_their_way(bench) == [[1, 3, 4, 5]]
    assert bench.partition.payloads([1, 3, 4, 5]) == [b"before 1", b"after 4"]
    assert (on_their_way(bench), bench.counts.moving) == ([[1, 2, 4, 5]], 2)


@pytest.mark.parametrize("delivered", [False, True])
def test_a_lost_item_that_parked_its_key_and_left_frees_it_unless_it_arrived(bench: Bench, tmp_path: Path, delivered: bool) -> None:
    bench.configure(on_bury="park")
    bench.produce("broken", key="k")
    bench.produce("after", key="k")
    bench.bury(bench.lease().lease)
    bench.send(0)
    if delivered:
        bench.deliver(70)
    damage(tmp_path, b"broken")
    bench.kill()
    assert bench.drain() == ([] if delivered else ["after"])
    bench.release("k")
    assert bench.drain() == (["after"] if delivered else [])


@pytest.mark.parametrize("buried", [False, True])
def test_what_left_is_back_where_it_was_when_the_record_of_it_is_lost(bench: Bench, tmp_path: Path, buried: bool) -> None:
    bench.produce("a", "b")
    if buried:
        bench.bury(bench.lease(1).lease, reason="no")
    bench.send(0)
    [sent] = bench.partition.state.outbox[ELSEWHERE]
    lose(bench, tmp_path, Sent)
    assert (on_their_way(bench), bench.life(0)) == ([], Life.BURIED if buried else Life.READY)
    assert bench.confirm(sent.sequence, 70) == 0
    bench.send(0)
    [again] = bench.partition.state.outbox[ELSEWHERE]
    assert again.sequence > sent.sequence  # the destination may have taken the first


def test_the_arrival_of_what_nobody_knows_to_have_left_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.produce("a", "b")
    bench.send(0)
    bench.deliver(70)
    lose(bench, tmp_path, Sent)
    assert (bench.life(0), moved_to(bench.partition.state, 0)) == (Life.READY, None)


def test_an_item_is_on_its_way_again_when_the_record_of_its_arrival_is_lost(bench: Bench, tmp_path: Path) -> None:
    bench.produce("a", "b")
    bench.send(0)
    [sent] = bench.partition.state.outbox[ELSEWHERE]
    bench.deliver(70)
    lose(bench, tmp_path, Delivered)
    assert (bench.life(0), on_their_way(bench)) == (Life.MOVING, [[0, 1]])
    assert bench.confirm(sent.sequence, 70) == 1  # it is carried again, and was taken
    assert bench.drain() == ["b"]


def test_a_fence_whose_record_is_lost_can_be_put_up_again(bench: Bench, tmp_path: Path) -> None:
    bench.fence("a", version=2)
    bench.produce("a1", key="a")
    lose(bench, tmp_path, Fenced)
    assert bench.partition.state.fence_version == 0
    fence = bench.fence("a", version=2)
    bench.produce("a2", key="a")
    assert bench.drain() == ["a1"]
    bench.narrow(fence)
    assert bench.drain() == ["a2"]


def test_fences_stand_through_other_damage(bench: Bench, tmp_path: Path) -> None:
    fence = bench.fence("a", "b")
    bench.produce("broken", "broken too", keys=["a", "b"])
    bench.produce("a2", "c1", keys=["a", "c"])
    assert bench.take() == ["c1"]
    bench.clear(leased=True)
    damage(tmp_path, b"broken too")
    bench.kill()
    assert bench.take() == []
    bench.narrow(fence, "a")
    assert bench.take() == []
    bench.lift(fence, "a")
    assert bench.drain() == ["a2"]


def test_a_parked_key_is_parked_again_when_the_record_of_its_release_is_lost(bench: Bench, tmp_path: Path) -> None:
    bench.configure(on_bury="park")
    bench.produce("a1", "a2", key="a")
    bench.bury(bench.lease().lease)
    bench.send(0)
    bench.deliver(70)
    bench.release("a")
    lose(bench, tmp_path, Released)
    assert bench.take() == []
    bench.release("a")
    assert bench.drain() == ["a2"]


def test_an_item_in_line_that_is_found_lost_when_it_is_sent(bench: Bench, tmp_path: Path) -> None:
    three_frames(bench, key="k")
    held = bench.lease()
    assert bench.take() == []
    bench.partition.close()
    damage(tmp_path, b"broken 2")
    bench.open()
    with pytest.raises(InvalidRequest, match="completed cannot be sent"):
        bench.send(2, 4)
    bench.send(4)
    assert (bench.why(3), on_their_way(bench)) == ("lost: damage took its bytes", [[4, 5]])
    bench.complete(held.lease)
    assert bench.drain() == ["before 1", "after 5"]
