"""Retention as time passes: what is older than `max_age` goes within a bounded time, what is younger never does."""

import contextlib
import errno

import msgspec
import pytest

from penstock.logs.files.filelog import FileLog
from penstock.loop.partition import Partition, Taken
from penstock.loop.retention import DROPS_AT_ONCE, FIRST_LOOK, to_drop_soon
from penstock.rules import base
from penstock.rules.commands import Complete, Granted, Lease, Produce
from penstock.testing import Halt, ManualClock, SimulatedFiles
from penstock.words.batch import Batch
from penstock.words.clock import DAY, HOUR, MINUTE, SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, StorageFailed
from penstock.words.limits import Policy, Retention
from tests.partition_under_test import Bench

BY_AGE = Retention(max_age=DAY, max_bytes=0)
SLACK = DAY // 10
"""What the documentation promises: a tenth of `max_age`, at least a minute."""


def let_pass(bench: Bench, duration: int) -> int:
    """Let time pass as the loop does, with retention whenever the partition asks for it; how often it did."""
    end = bench.clock.read().elapsed + duration
    looks = 0
    while True:
        part = bench.partition
        when, left = part.next_retention(), end - bench.clock.read().elapsed
        wait = left if when is None else min(left, max(0, when - part.now().elapsed))
        bench.clock.advance(wait)
        if wait == left and (when is None or when > part.now().elapsed):
            return looks
        part.upkeep()
        looks += 1
        assert looks < 10_000, "it always wants another look"


def retained(part: Partition) -> list[int]:
    return part.state.dropped.missing(0, part.state.next_offset)


def worked_off(bench: Bench, *texts: str) -> list[int]:
    """Items that were produced and completed; their offsets."""
    found = bench.produce(*texts)
    bench.complete(bench.lease().lease)
    return found


def test_an_idle_partition_lets_go_of_everything_soon_after_its_time(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    worked_off(bench, *"abc")
    let_pass(bench, DAY - SECOND)
    assert retained(bench.partition) == [0, 3]
    let_pass(bench, SLACK + SECOND)
    assert retained(bench.partition) == []
    assert len(bench.partition.log.segments()) == 1


def test_with_nothing_to_drop_it_wants_no_look(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    assert bench.partition.next_retention() is None
    worked_off(bench, "a")
    assert let_pass(bench, 3 * DAY) <= 4
    assert bench.partition.next_retention() is None
    bench.restart()
    assert bench.partition.next_retention() is None
    worked_off(bench, "b")
    bench.configure(retention=Retention(max_age=0))
    assert bench.partition.next_retention() is None


def test_one_that_is_closed_wants_no_look(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    for _ in range(2):
        bench.partition.close()
        assert bench.partition.next_retention() is None
        bench.open()
        worked_off(bench, "a")


@pytest.mark.parametrize("max_age", [MINUTE, HOUR, DAY], ids=["minute", "hour", "day"])
def test_a_trickle_of_an_item_a_minute_keeps_max_age(bench: Bench, max_age: int) -> None:
    bench.configure(retention=Retention(max_age=max_age, max_bytes=0))
    late = max_age + max(max_age // 10, MINUTE)
    produced: list[int] = []
    for _ in range(3 * late // MINUTE):
        produced.append(bench.clock.read().elapsed)
        worked_off(bench, "item")
        let_pass(bench, MINUTE)
        oldest = bench.partition.state.dropped.first_missing(0)
        now = bench.clock.read().elapsed
        assert all(now - when >= max_age for when in produced[:oldest]), "something went before its time"
        assert oldest == len(produced) or now - produced[oldest] <= late, "something is kept for too long"
        assert len(bench.partition.log.segments()) <= 25
    assert bench.partition.state.dropped


@pytest.mark.parametrize("step", [-DAY, DAY], ids=["back", "forward"])
def test_setting_the_date_changes_no_age(bench: Bench, step: int) -> None:
    bench.configure(retention=BY_AGE)
    worked_off(bench, "a")
    let_pass(bench, 2 * HOUR)
    bench.clock.step_wall(step)
    worked_off(bench, "b")
    let_pass(bench, 2 * HOUR)
    assert retained(bench.partition) == [0, 2]
    assert bench.partition.retain().items == 0
    let_pass(bench, DAY - 4 * HOUR - SECOND)
    assert retained(bench.partition) == [0, 2]
    let_pass(bench, SLACK + 2 * HOUR)
    assert retained(bench.partition) == []


def test_restarts_and_reboots_lose_no_time(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    worked_off(bench, "a")
    for hour in range(26):
        bench.clock.advance(59 * MINUTE) if hour % 2 else bench.clock.reboot(59 * MINUTE)
        bench.kill()
        let_pass(bench, MINUTE)
        assert (retained(bench.partition) == [0, 1]) or hour >= 23
    let_pass(bench, HOUR)
    assert retained(bench.partition) == []


def test_what_became_old_while_it_was_closed_goes_after_the_opening(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    worked_off(bench, "a")
    let_pass(bench, 3 * HOUR)
    bench.partition.close()
    bench.clock.advance(3 * DAY)
    bench.open()
    assert retained(bench.partition) == [0, 1]
    let_pass(bench, FIRST_LOOK)
    assert retained(bench.partition) == []


def test_what_is_closed_says_when_it_wants_to_be_opened(bench: Bench) -> None:
    """Not for a look that finds nothing; and for every one that finds something."""
    bench.configure(retention=BY_AGE)
    worked_off(bench, "a")
    began = bench.partition.now().elapsed
    assert bench.partition.summary().due_elapsed == began + DAY // 20
    let_pass(bench, 3 * HOUR)
    bench.restart()
    assert bench.partition.summary().due_elapsed == began + DAY // 20 + DAY
    bench.restart()
    bench.clock.advance(2 * DAY)
    let_pass(bench, FIRST_LOOK)
    assert retained(bench.partition) == []
    assert bench.partition.summary().due_elapsed is None


def test_unresolved_items_stay_and_the_others_of_their_segment_go(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    bench.produce(*(f"item {number}" for number in range(10)))
    granted = bench.lease()
    bench.retry(granted.lease, [7], delay=3 * 24 * 3600)
    bench.complete(granted.lease)
    let_pass(bench, DAY + SLACK)
    assert retained(bench.partition) == [7, 8]
    assert let_pass(bench, 1 * DAY) <= 1, "an item that waits is no reason to look again and again"
    bench.advance(24 * 3600)
    granted = bench.lease()
    assert bench.texts(granted) == ["item 7"]
    bench.complete(granted.lease)
    let_pass(bench, SLACK)
    assert retained(bench.partition) == []


def test_a_backlog_stays_whole(bench: Bench) -> None:
    bench.configure(retention=Retention(max_age=HOUR, max_bytes=0))
    for number in range(200):
        bench.produce(f"item {number}")
        let_pass(bench, 10 * MINUTE)
    assert retained(bench.partition) == [0, 200]
    assert bench.drain(want=50) == [f"item {number}" for number in range(200)]


def test_a_cursor_holds_until_it_is_moved_on(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    worked_off(bench, "a")
    let_pass(bench, 3 * HOUR)
    worked_off(bench, "b")
    bench.move_cursor("audit", 0)
    let_pass(bench, 2 * DAY)
    assert bench.partition.next_retention() is None
    bench.move_cursor("audit", 1)
    let_pass(bench, SLACK)
    assert retained(bench.partition) == [1, 2]
    bench.release_cursor("audit")
    let_pass(bench, SLACK)
    assert retained(bench.partition) == []


def test_min_segments_are_kept(bench: Bench) -> None:
    bench.configure(retention=Retention(max_age=HOUR, max_bytes=0, min_segments=3))
    for _ in range(10):
        worked_off(bench, "item")
        let_pass(bench, 10 * MINUTE)
    let_pass(bench, DAY)
    assert len(bench.partition.log.segments()) == 3
    assert retained(bench.partition)[-1] == 10
    assert bench.partition.next_retention() is None


def test_counted_segments_are_not_made_smaller_by_the_timer(bench: Bench) -> None:
    """Else items would go by their number of segments long before their time."""
    bench.configure(retention=Retention(max_age=DAY, max_bytes=0, max_segments=1))
    for _ in range(20):
        worked_off(bench, "item")
        let_pass(bench, HOUR)
    assert retained(bench.partition) == [0, 20]
    let_pass(bench, DAY - HOUR - SECOND)
    assert retained(bench.partition) == [0, 20]
    let_pass(bench, SECOND)
    assert retained(bench.partition) == []


def test_a_pass_takes_a_few_segments_at_a_time(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    for _ in range(2 * DROPS_AT_ONCE + 3):
        worked_off(bench, "item")
        bench.partition._rotate()
    bench.clock.advance(2 * DAY)
    left = []
    while (when := bench.partition.next_retention()) is not None:
        assert when <= bench.partition.now().elapsed
        bench.partition.upkeep()
        left.append(len(bench.partition.log.segments()))
    assert left == [DROPS_AT_ONCE + 4, 4, 1]


def test_segments_that_the_log_refuses_to_drop_are_not_tried_again_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(count: int) -> int:
        raise InvalidRequest("no Base behind it can be read; call rotate() with a Base first")

    bench.configure(retention=BY_AGE)
    worked_off(bench, "item")
    with monkeypatch.context() as patch:
        patch.setattr(bench.partition.log, "drop", refuse)
        assert let_pass(bench, DAY + SLACK) < 10
        assert len(bench.partition.log.segments()) > 1
    let_pass(bench, SLACK)
    assert len(bench.partition.log.segments()) == 1


# -- buried items ------------------------------------------------------------------------------------


def buried(bench: Bench, *texts: str) -> list[int]:
    found = bench.produce(*texts)
    bench.bury(bench.lease().lease, reason="no use")
    return found


def to_drop(bench: Bench) -> tuple[int, int]:
    part = bench.partition
    return to_drop_soon(part.log.segments(), part.state, part.now().elapsed)


def test_buried_items_are_warned_of_then_taken_and_counted(bench: Bench) -> None:
    bench.configure(retention=BY_AGE)
    worked_off(bench, "done")
    buried(bench, "bad", "worse")
    worked_off(bench, "done too")
    told_at = 0
    for _ in range((DAY + SLACK) // (10 * MINUTE)):
        if bench.partition.state.buried_dropped:
            break
        let_pass(bench, 10 * MINUTE)
        items, wait = to_drop(bench)
        if items and not told_at:
            told_at = bench.clock.read().elapsed + wait
            assert (items, wait >= HOUR) == (2, True)
            assert bench.counts.buried == 2
    assert 0 <= bench.clock.read().elapsed - told_at <= 10 * MINUTE
    assert bench.partition.taken == [Taken(2, 1, 2)]
    assert to_drop(bench) == (0, 0)
    for _ in range(2):
        assert bench.partition.state.buried_dropped == 2
        bench.kill()
    bench.partition.compact()
    assert base.load(base.dump(bench.partition.state)).buried_dropped == 2


def test_what_is_buried_late_is_kept_for_as_long_again(bench: Bench) -> None:
    """Else nobody could be warned: its segment is old already."""
    bench.configure(retention=BY_AGE)
    worked_off(bench, *"abcdef")
    bench.produce("slow to fail")
    let_pass(bench, 2 * DAY)
    bench.bury(bench.lease().lease)
    bench.clock.step_wall(DAY)
    let_pass(bench, DAY - SECOND)
    assert (retained(bench.partition), to_drop(bench)) == ([6, 7], (1, SECOND))
    let_pass(bench, SLACK)
    assert (retained(bench.partition), bench.partition.state.buried_dropped) == ([], 1)


def test_only_what_may_be_taken_is_warned_of(bench: Bench) -> None:
    bench.configure(retention=BY_AGE, on_bury="park")
    bench.produce("holds its key", key="k")
    bench.bury(bench.lease().lease)
    bench.configure(on_bury="release")
    worked_off(bench, *"abc")
    buried(bench, "taken")
    let_pass(bench, 3 * HOUR)
    (unread,) = buried(bench, "not read yet")
    bench.move_cursor("audit", unread)
    let_pass(bench, DAY - 3 * HOUR)
    assert to_drop(bench)[0] == 1
    let_pass(bench, DAY)
    assert (bench.partition.state.buried_dropped, to_drop(bench)) == (1, (0, 0))
    assert retained(bench.partition) == [0, 1, unread, unread + 1]
    assert bench.counts.buried == 2


def test_a_base_without_the_count_and_the_times_of_burials_can_be_read(bench: Bench) -> None:
    """As it was written before there were these."""
    buried(bench, "bad")
    image = msgspec.msgpack.decode(base.dump(bench.partition.state))
    place = base._Image.__struct_fields__.index("buried")
    assert image[-1] == 0 and image[place][0][1][-1] == bench.partition.now().elapsed
    image[place] = [[offset, burial[:-1]] for offset, burial in image[place]]
    old = base.load(msgspec.msgpack.encode(image[:-1]))
    assert (old.buried_dropped, old.buried[0].since, old.buried[0].reason) == (0, 0, "no use")


# -- a disk that fails -------------------------------------------------------------------------------


def old_partition(files: SimulatedFiles, clock: ManualClock) -> Partition:
    """Segments whose time is over, an item of the second still waiting, and something that is not committed yet."""
    part = Partition(FileLog(files, "/log", 1, 0), clock, Policy(retention=BY_AGE))
    for number in range(4):
        part.run(Produce(Batch([f"{number}.{item}".encode() for item in range(10)])))
        part.commit()
        part._rotate()
    for want in (13, 1, 26):
        granted = part.run(Lease(want))
        assert isinstance(granted, Granted)
        if want != 1:
            part.run(Complete(granted.lease))
        part.commit()
    clock.advance(2 * DAY)
    part.due()
    part.run(Produce(Batch([b"asked for in the same turn"])))
    return part


@pytest.mark.parametrize("trouble", ["halt", errno.EIO, errno.ENOSPC])
def test_cut_off_at_any_step_nothing_is_lost_and_it_is_tried_again_later(trouble: int | str) -> None:
    whole = SimulatedFiles()
    part = old_partition(whole, ManualClock())
    before = whole.calls
    part.upkeep()
    assert part.state.dropped.runs == [0, 13, 14, 40]
    tidied = 0
    for step in range(1, whole.calls - before + 1):
        files, clock = SimulatedFiles(), ManualClock()
        part = old_partition(files, clock)
        files.fail(files.calls + step, trouble)  # type: ignore[arg-type]
        stored = False
        with contextlib.suppress(Halt, StorageFailed, OutcomeUnknown):
            part.upkeep()
            stored = True
        if part.untidy is not None and not part.failed:
            when = part.next_retention()
            assert when is not None and when > part.now().elapsed + MINUTE, "a failing disk is not tried again at once"
            tidied += 1
        files.mend()
        if trouble == "halt":
            files.crash()
        else:
            files.kill()
        again = Partition(FileLog(files, "/log", 1, 0), clock)
        assert again.gaps == [], f"step {step}"
        assert again.payloads([13, 14]) == [b"1.3"], f"step {step}"
        assert not stored or again.payloads([40, 41]) == [b"asked for in the same turn"], f"step {step}"
        clock.advance(FIRST_LOOK)
        again.upkeep()
        assert again.state.dropped.runs == [0, 13, 14, 40], f"step {step}"
    assert tidied or trouble == "halt"
