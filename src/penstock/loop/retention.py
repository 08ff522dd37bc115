"""Which segments may go, which are worth rewriting, and when retention has to look again.

Owns: `plan`, estimates of size, `buried_to_drop` (buried items whose time is nearly over), all pure; and `RetentionSchedule`. `FreeSpaceCheck`, the disk space
below which produce is refused, so that there is room to complete, bury and tidy up.
Segments are looked at from the oldest on, as long as a limit of the retention is exceeded
and no cursor stands in the way. Those without a needed item at the very front are dropped. Behind a needed item everything is pinned: a
stretch of pinned segments is rewritten into one that holds just what is needed, when at least half of it is not, or when it has become
many small files. The newest two segments are left alone: recovery must always have a Base to fall back on.
Ages are elapsed time, so that setting the date changes none of them. A segment is as old as its youngest frame: what goes by its age is
older than `max_age`. So that it goes soon after that, no segment with items is added to for longer than `rotation_age`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from penstock.logs.log import Log, SegmentFacts
from penstock.rules.retention import buried_since, offsets_to_keep
from penstock.rules.runs import RunSet, count, offsets
from penstock.rules.state import State
from penstock.words.clock import DAY, HOUR, SECOND
from penstock.words.errors import QueueFull
from penstock.words.limits import MIB, Retention

UNTOUCHED = 2
MERGE_SEGMENTS = 8
SEGMENT_AGE = 1 * DAY
"""A segment is not added to for longer, whatever the retention says."""
DROPS_AT_ONCE = 16
"""Segments that go in one pass: others want the partition too."""
FIRST_LOOK = 15 * SECOND
"""After opening: those who open a partition to use it come first."""


class RetentionPlan(NamedTuple):
    """Drop the first `drop` segments; then rewrite those from `first` to `last` (numbers before the drop) so that only `keep` stays."""

    drop: int
    first: int
    last: int
    keep: list[int]
    forget: list[int]
    """Runs of items whose bytes go."""
    more: bool = False
    """Whether more could be dropped at once."""
    held_until: int | None = None
    """When the first of the items that are kept only because they were buried lately may go, by elapsed time."""

    @property
    def rewrites(self) -> bool:
        return self.first <= self.last


class RetentionResult(NamedTuple):
    """What a pass of retention did."""

    segments: int
    """Dropped."""
    rewritten: int
    items: int
    """Resolved items let go."""
    size_bytes: int
    buried: int = 0
    """How many of the items were buried."""

    def __str__(self) -> str:
        done = f"{self.segments} segments dropped, {self.rewritten} rewritten, {self.items:,} resolved items let go"
        if self.buried:
            done += f" ({self.buried:,} of them buried)"
        return f"{self.size_bytes:,} bytes freed: {done}"


def plan_retention(
    segments: Sequence[SegmentFacts],
    state: State,
    retention: Retention,
    now: int,
    *,
    thorough: bool = False,
    drops: int = 1 << 30,
    untouched: int = UNTOUCHED,
) -> RetentionPlan:
    """What retention asks for at this elapsed time. `thorough`: rewrite whatever frees anything. `drops`: no more segments than that."""
    over, old = _over(segments, retention), _old(segments, retention, now)
    stops = [segments[number + 1].base_offset for number in range(max(over, old))]
    cursor = min(state.cursors.values(), default=state.next_offset)
    while stops and stops[-1] > cursor:
        stops.pop()
    kept = offsets_to_keep(state, stops[-1]) if stops else RunSet()
    held_until = None
    if len(stops) > over:  # by their age alone: what was buried lately is kept for as long again
        lately = buried_since(state, segments[over].base_offset, stops[-1], now - retention.max_age)
        held_until = min((state.burials[offset].since + retention.max_age for offset in lately), default=None)
        for offset in lately:
            kept.add(offset, offset + 1)
    drop = 0
    while drop < len(stops) and not kept.overlaps(0, stops[drop]):
        drop += 1
    more = drop > drops
    drop = min(drop, drops)
    start = segments[drop].base_offset
    pinned = min(len(stops), len(segments) - untouched)
    forget = RunSet((0, start))
    keep: list[int] = []
    if not more and pinned > drop and _worth_it(segments[drop:pinned], start, stops[pinned - 1], kept, state, thorough):
        keep = kept.within(start, stops[pinned - 1])
        forget.add(start, stops[pinned - 1])
        forget.remove_all(keep)
    else:
        pinned = drop
    forget.remove_all(state.dropped.runs)
    return RetentionPlan(drop, drop, pinned - 1, keep, forget.runs, more, held_until)


def _over(segments: Sequence[SegmentFacts], retention: Retention) -> int:
    """How many of the oldest segments are too many, or more than there is to be room for."""
    total = sum(segment.size_bytes for segment in segments)
    most = _most(segments, retention)
    for number in range(most):
        large = retention.max_bytes and total > retention.max_bytes
        many = retention.max_segments and len(segments) - number > retention.max_segments
        if not (large or many):
            return number
        total -= segments[number].size_bytes
    return most


def _old(segments: Sequence[SegmentFacts], retention: Retention, now: int) -> int:
    """How many of the oldest segments hold nothing that is younger than `max_age`."""
    if not retention.max_age:
        return 0
    return bisect_right(segment_ends(segments, now)[: _most(segments, retention)], now - retention.max_age)


def _most(segments: Sequence[SegmentFacts], retention: Retention) -> int:
    return max(0, len(segments) - max(1, retention.min_segments))


def segment_ends(segments: Sequence[SegmentFacts], now: int) -> list[int]:
    """When each segment but the newest ended, by elapsed time: when the next began. Where that cannot be read, a later time."""
    found: list[int] = []
    end = now
    for following in reversed(segments[1:]):
        end = following.first_elapsed if following.first_elapsed >= 0 else end
        found.append(end)
    return found[::-1]


def _worth_it(segments: Sequence[SegmentFacts], start: int, stop: int, kept: RunSet, state: State, thorough: bool) -> bool:
    """Whether rewriting these segments frees enough."""
    live = count(kept.within(start, stop))
    there = stop - start
    if all(segment.rewritten for segment in segments):  # what was let go then is not there any more
        there -= count(state.dropped.within(start, stop))
    return live * 2 <= there or len(segments) >= MERGE_SEGMENTS or (thorough and live < there)


def unresolved_bytes(segments: Sequence[SegmentFacts], state: State) -> int:
    """About how many bytes unresolved items take: of each segment the share that its unresolved items are of all."""
    size = 0
    ends = [facts.base_offset for facts in segments[1:]] + [state.next_offset]
    for facts, stop in zip(segments, ends, strict=True):
        items = stop - facts.base_offset
        if items > 0:
            done = count(state.completed.within(facts.base_offset, stop)) + count(state.buried_set.within(facts.base_offset, stop))
            size += facts.size_bytes * (items - done) // items
    return size


def mean_bytes(segments: Sequence[SegmentFacts], state: State) -> int:
    """About how many bytes an item takes."""
    return sum(facts.size_bytes for facts in segments) // max(1, state.next_offset - segments[0].base_offset)


# -- time --------------------------------------------------------------------------------------------


LEAST_ROTATION_AGE = 30 * SECOND


def rotation_age(retention: Retention, segment_age: int = SEGMENT_AGE) -> int:
    """How long a segment that holds items is added to. Where segments are counted it does not depend on `max_age`: more of them would
    mean that each item is kept for a shorter time."""
    if not retention.max_age or retention.max_segments:
        return segment_age
    return min(segment_age, max(retention.max_age // 20, LEAST_ROTATION_AGE))


def recheck_age(retention: Retention) -> int:
    """How long retention leaves a partition alone in which something old could not go and something has happened since."""
    return max(retention.max_age // 40, FIRST_LOOK)


def warning_period(retention: Retention) -> int:
    """How long before they are dropped buried items are warned of: a tenth of `max_age`, at least an hour, but no more than half of it."""
    return max(retention.max_age // 10, min(HOUR, retention.max_age // 2))


class RetentionSchedule:
    """When retention has something to look at in a partition, by elapsed time. It learns of the segments by looking."""

    def __init__(self) -> None:
        self._ends: list[int] | None = None  # not known before the first look
        self._looked_at = 0
        self._look_again_at = 0
        self._changes = 0
        self._held_until: int | None = None

    def opened(self, now: int) -> None:
        """The partition was opened: it is looked at before long."""
        self._ends = None
        self._look_again_at = now + FIRST_LOOK

    def postpone(self, now: int, retention: Retention) -> None:
        """A look could not be brought to its end: nothing is known of the segments, and the next one waits."""
        self._ends = None
        self._look_again_at = now + recheck_age(retention)

    def learn(self, segments: Sequence[SegmentFacts], now: int) -> None:
        """Before the first look: what the segments are, so that one which is closed is not opened again for a look that finds nothing."""
        if self._ends is None:
            self._ends, self._looked_at = segment_ends(segments, now), -1

    def looked(self, segments: Sequence[SegmentFacts], now: int, retention: Retention, changes: int, done: RetentionPlan) -> None:
        """A look is over, after so many changes of the state, and this was done."""
        self._ends = segment_ends(segments, now)
        self._looked_at = now
        self._look_again_at = now if done.more else now + recheck_age(retention)
        self._changes = changes - 1 if done.more else changes
        self._held_until = None if done.held_until is None else max(done.held_until, self._look_again_at)

    def next(self, retention: Retention, rotate_at: int | None, changes: int) -> int | None:
        """When to look next; None: not unless something happens. `rotate_at`: when the newest segment is to be closed, if it is."""
        if self._ends is None:
            return self._look_again_at
        times = [] if rotate_at is None else [rotate_at]
        most = len(self._ends) + 1 - max(1, retention.min_segments)
        seen = bisect_right(self._ends, self._looked_at - retention.max_age)
        if seen < most:
            times.append(self._ends[seen] + retention.max_age)
        if min(seen, most) > 0 and changes != self._changes:  # it was old when last looked at and could not go: perhaps now it can
            times.append(self._look_again_at)
        if self._held_until is not None:
            times.append(self._held_until)
        return min(times, default=None)


def buried_to_drop(segments: Sequence[SegmentFacts], state: State, now: int) -> tuple[int, int]:
    """How many buried items retention is to drop before long because of their age, and in how many microseconds it begins; or (0, 0)."""
    retention = state.policy.retention
    if not retention.max_age or not state.buried_set:
        return 0, 0
    horizon = now + warning_period(retention) - retention.max_age
    cursor = min(state.cursors.values(), default=state.next_offset)
    newest_ends = max(now, segments[-1].first_elapsed + rotation_age(retention))
    stops = [*(facts.base_offset for facts in segments[1:]), state.next_offset]
    found: list[int] = []
    first = horizon
    for number, end in enumerate([*segment_ends(segments, now), newest_ends][: len(segments) + 1 - max(1, retention.min_segments)]):
        if end > horizon or segments[number].base_offset >= cursor:
            break
        for offset in offsets(state.buried_set.within(segments[number].base_offset, min(stops[number], cursor))):
            burial = state.burials.get(offset)
            since = max(end, burial.since if burial is not None else 0)
            if since <= horizon:
                found.append(offset)
                first = min(first, since)
    if found:
        parked = {offset for _, line in state.keys.lines() for offset in line.parked}
        found = [offset for offset in found if offset not in parked]
    return (len(found), max(0, first + retention.max_age - now)) if found else (0, 0)


# -- disk space -------------------------------------------------------------------------------------


LOOK_BYTES = 64 * MIB


class FreeSpaceCheck:
    """How many bytes must stay free; 0 is no floor. The system is asked every LOOK_BYTES written, and always once the floor is near."""

    __slots__ = ("_known", "_log", "_since", "bytes")

    def __init__(self, log: Log, least: int) -> None:
        self.bytes = least
        self._log = log
        self._known = 0
        self._since = LOOK_BYTES

    def used(self, size: int) -> None:
        self._since += size

    def check(self) -> None:
        """Raise QueueFull when less than the floor is free."""
        if self._since >= LOOK_BYTES or self._known - self._since < self.bytes + LOOK_BYTES:
            self._known, self._since = self._log.free_bytes(), 0
        if self._known - self._since < self.bytes:
            raise QueueFull(f"only {self._known:,} bytes are free and {self.bytes:,} must stay so; make room, or wait for retention")
