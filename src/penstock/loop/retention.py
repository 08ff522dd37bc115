"""Retention of a partition: which segments to delete, which to rewrite, and when.

Owns: `plan_retention`, estimates of size, `buried_to_drop` (buried items that will soon be deleted), all pure;
`RetentionSchedule`; and `FreeSpaceCheck`, the disk space below which produce is refused, so that there is room to
complete, bury and delete. Segments are examined from the oldest on, while a limit of the retention is exceeded and no
cursor points before their end. Leading segments without a needed item are deleted. Later ones cannot be: a range of
them is rewritten into one segment with only the needed items, when at least half of the items are not needed, or when
it has become many small files. The newest two segments are never changed: recovery must always have a Base.
Ages are elapsed time, so that setting the date changes none. A segment is as old as its youngest frame: what is deleted
by age is older than `max_age`. So that it is deleted soon after that, a segment with items is closed after
`rotation_age`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from penstock.logs.log import Log, SegmentFacts
from penstock.rules.retention import buried_since, offsets_to_keep
from penstock.rules.runs import RunSet, count, offsets
from penstock.rules.state import State
from penstock.words.clock import DAY, HOUR, SECOND
from penstock.words.errors import QueueFull, StorageFailed
from penstock.words.limits import MIB, Retention

UNTOUCHED = 2
MERGE_SEGMENTS = 8
SEGMENT_AGE = 1 * DAY
"""A segment is closed at this age at the latest."""
DROPS_AT_ONCE = 16
"""Segments deleted in one run, so that requests do not wait long for the partition."""
FIRST_RUN = 15 * SECOND
"""When retention first runs after opening: the requests that opened the partition come first."""


class RetentionPlan(NamedTuple):
    """Delete the first `drop` segments; rewrite those from `first` to `last` with only the items of `keep`."""

    drop: int
    first: int
    last: int
    keep: list[int]
    forget: list[int]
    """Runs of items that are deleted."""
    more: bool = False
    """Whether more segments could be deleted now."""
    held_until: int | None = None
    """The elapsed time at which the first item may be deleted that is kept only because it was buried recently."""

    @property
    def rewrites(self) -> bool:
        return self.first <= self.last


class RetentionResult(NamedTuple):
    """What one run of retention did."""

    segments: int
    """Deleted segments."""
    rewritten: int
    items: int
    """Deleted items, all of them resolved."""
    size_bytes: int
    buried: int = 0
    """How many of the items were buried."""

    def __str__(self) -> str:
        done = f"{self.segments} segments dropped, {self.rewritten} rewritten, {self.items:,} resolved items deleted"
        if self.buried:
            done += f" ({self.buried:,} of them buried)"
        return f"{self.size_bytes:,} bytes freed: {done}"


class DroppedBuried(NamedTuple):
    """Buried items that one run of retention deleted."""

    items: int
    first: int
    last: int
    """Offsets of the first and the last."""


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
    """What to delete and rewrite now. `thorough`: rewrite if it frees anything. `drops`: most segments to delete."""
    over, old = _over(segments, retention), _old(segments, retention, now)
    stops = [segments[number + 1].base_offset for number in range(max(over, old))]
    cursor = min(state.cursors.values(), default=state.next_offset)
    while stops and stops[-1] > cursor:
        stops.pop()
    kept = offsets_to_keep(state, stops[-1]) if stops else RunSet()
    held_until = None
    if len(stops) > over:  # only because of age: items buried recently are kept for max_age from then
        recent = buried_since(state, segments[over].base_offset, stops[-1], now - retention.max_age)
        held_until = min((state.burials[offset].since + retention.max_age for offset in recent), default=None)
        for offset in recent:
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
    if not more and pinned > drop and _is_worth_rewrite(segments[drop:pinned], start, stops[pinned - 1], kept, state, thorough):
        keep = kept.within(start, stops[pinned - 1])
        forget.add(start, stops[pinned - 1])
        forget.remove_all(keep)
    else:
        pinned = drop
    forget.remove_all(state.dropped.runs)
    return RetentionPlan(drop, drop, pinned - 1, keep, forget.runs, more, held_until)


def should_rotate_for_rewrite(segments: Sequence[SegmentFacts], state: State, now: int) -> bool:
    """Whether a new segment would allow a useful rewrite of the second-newest one: an idle queue begins none."""
    chosen = plan_retention(segments, state, state.policy.retention, now, drops=DROPS_AT_ONCE, untouched=UNTOUCHED - 1)
    return chosen.rewrites and chosen.last >= len(segments) - UNTOUCHED


def _over(segments: Sequence[SegmentFacts], retention: Retention) -> int:
    """How many of the oldest segments exceed max_bytes or max_segments."""
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
    """How many of the oldest segments hold only frames older than `max_age`."""
    if not retention.max_age:
        return 0
    return bisect_right(segment_ends(segments, now)[: _most(segments, retention)], now - retention.max_age)


def _most(segments: Sequence[SegmentFacts], retention: Retention) -> int:
    return max(0, len(segments) - max(1, retention.min_segments))


def segment_ends(segments: Sequence[SegmentFacts], now: int) -> list[int]:
    """The elapsed time at which each segment but the newest ended, or a later one where that is not readable."""
    found: list[int] = []
    end = now
    for following in reversed(segments[1:]):
        end = following.first_elapsed if following.first_elapsed >= 0 else end
        found.append(end)
    return found[::-1]


def _is_worth_rewrite(segments: Sequence[SegmentFacts], start: int, stop: int, kept: RunSet, state: State, thorough: bool) -> bool:
    """Whether a rewrite of these segments frees enough."""
    live = count(kept.within(start, stop))
    removed = state.dropped if all(segment.rewritten for segment in segments) else state.holes  # a rewrite removes dropped items
    present = stop - start - count(removed.within(start, stop))
    return live * 2 <= present or len(segments) >= MERGE_SEGMENTS or (thorough and live < present)


def unresolved_bytes(segments: Sequence[SegmentFacts], state: State) -> int:
    """About how many bytes unresolved items take: of each segment its share of unresolved items."""
    size = 0
    ends = [facts.base_offset for facts in segments[1:]] + [state.next_offset]
    for facts, stop in zip(segments, ends, strict=True):
        never = count(state.holes.within(facts.base_offset, stop))
        items = stop - facts.base_offset - never
        if items > 0:
            done = count(state.completed.within(facts.base_offset, stop)) - never + count(state.buried_set.within(facts.base_offset, stop))
            size += facts.size_bytes * (items - done) // items
    return size


def mean_bytes(segments: Sequence[SegmentFacts], state: State) -> int:
    """About how many bytes an item takes."""
    first, stop = segments[0].base_offset, state.next_offset
    return sum(facts.size_bytes for facts in segments) // max(1, stop - first - count(state.holes.within(first, stop)))


# -- time --------------------------------------------------------------------------------------------


LEAST_ROTATION_AGE = 30 * SECOND


def rotation_age(retention: Retention, segment_age: int = SEGMENT_AGE) -> int:
    """The age at which a segment with items is closed. With `max_segments` it does not depend on `max_age`:
    more segments would shorten the time for which items are kept."""
    if not retention.max_age or retention.max_segments:
        return segment_age
    return min(segment_age, max(retention.max_age // 20, LEAST_ROTATION_AGE))


def rotation_time(state: State, base_offset: int, started: int, segment_age: int) -> int | None:
    """When the newest segment, which began at that offset and time, is closed for its age; None: it has no items."""
    if state.next_offset == base_offset:
        return None
    retention = state.policy.retention
    when = started + rotation_age(retention, segment_age)
    if retention.max_segments:  # the rotation may delete its items: they must be older than max_age
        when = max(when, state.moment.elapsed + retention.max_age)
    return when


def recheck_age(retention: Retention) -> int:
    """How long until retention runs again when old segments could not be deleted and the partition has changed."""
    return max(retention.max_age // 40, FIRST_RUN)


def warning_period(retention: Retention) -> int:
    """How long before buried items are deleted to warn: a tenth of `max_age`, at least an hour, at most half."""
    return max(retention.max_age // 10, min(HOUR, retention.max_age // 2))


class RetentionSchedule:
    """When retention must run in a partition, by elapsed time, from the segments as of its last run."""

    def __init__(self) -> None:
        self._ends: list[int] | None = None  # None until the first run
        self._last_run = 0
        self._run_again_at = 0
        self._records = 0
        self._held_until: int | None = None

    def opened(self, now: int) -> None:
        """Plan the first run after the partition was opened."""
        self._ends = None
        self._run_again_at = now + FIRST_RUN

    def postpone(self, now: int, retention: Retention) -> None:
        """Plan the next run after one that failed."""
        self._ends = None
        self._run_again_at = now + recheck_age(retention)

    def note_segments(self, segments: Sequence[SegmentFacts], now: int) -> None:
        """Note the segments of a partition closed before its first run, so that it is not opened for a useless one."""
        if self._ends is None:
            self._ends, self._last_run = segment_ends(segments, now), -1

    def note_run(self, segments: Sequence[SegmentFacts], now: int, retention: Retention, records: int, done: RetentionPlan) -> None:
        """Note a run: the segments after it, the number of records applied so far, and its plan."""
        self._ends = segment_ends(segments, now)
        self._last_run = now
        self._run_again_at = now if done.more else now + recheck_age(retention)
        self._records = records - 1 if done.more else records
        self._held_until = None if done.held_until is None else max(done.held_until, self._run_again_at)

    def next(self, retention: Retention, rotate_at: int | None, records: int) -> int | None:
        """When to run next; None: not before a change. `rotate_at`: when the newest segment is closed by age."""
        if self._ends is None:
            return self._run_again_at
        times = [] if rotate_at is None else [rotate_at]
        most = len(self._ends) + 1 - max(1, retention.min_segments)
        seen = bisect_right(self._ends, self._last_run - retention.max_age)
        if seen < most:
            times.append(self._ends[seen] + retention.max_age)
        if min(seen, most) > 0 and records != self._records:  # an old segment could not be deleted; now it may be
            times.append(self._run_again_at)
        if self._held_until is not None:
            times.append(self._held_until)
        return min(times, default=None)


def buried_to_drop(segments: Sequence[SegmentFacts], state: State, now: int) -> tuple[int, int]:
    """How many buried items retention will soon delete because of age, and in how many microseconds; or (0, 0)."""
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


CHECK_BYTES = 64 * MIB


class FreeSpaceCheck:
    """Checks that a number of bytes stay free; 0 is no limit. Asks the system every CHECK_BYTES and near the limit."""

    __slots__ = ("_known", "_log", "bytes", "refusal", "written")

    def __init__(self, log: Log, least: int) -> None:
        self.bytes = least
        self.refusal = ""
        """Why too few bytes were free at the last check; empty when there were enough."""
        self._log = log
        self._known = 0
        self.written = CHECK_BYTES
        """Bytes written since the system was asked: whoever writes adds them."""

    def check(self) -> None:
        """QueueFull when too few bytes are free."""
        if self.written >= CHECK_BYTES or self._known - self.written < self.bytes + CHECK_BYTES:
            self._known, self.written = self._log.free_bytes(), 0
        if self._known - self.written < self.bytes:
            self.refusal = f"only {self._known:,} bytes are free and {self.bytes:,} must stay so; make room, or wait for retention"
            raise QueueFull(self.refusal)
        self.refusal = ""

    def has_room(self) -> bool:
        """Whether enough bytes are free now. Asks the system."""
        try:
            return self._log.free_bytes() >= self.bytes
        except StorageFailed:
            return False
