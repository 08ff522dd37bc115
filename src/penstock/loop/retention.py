"""Which segments may go, which are worth rewriting.

Owns: `plan`, and estimates of size, pure. Segments are looked at from the oldest on, as long as a limit of the retention is exceeded
and no cursor stands in the way. Those without a needed item at the very front are dropped. Behind a needed item everything is pinned: a
stretch of pinned segments is rewritten into one that holds just what is needed, when at least half of it is not, or when it has become
many small files. The newest two segments are left alone: recovery must always have a Base to fall back on.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.logs.api import SegmentFacts
from penstock.rules.retention import needed
from penstock.rules.runs import RunSet, count
from penstock.rules.state import State
from penstock.words.limits import Retention

UNTOUCHED = 2
MERGE_SEGMENTS = 8


class Plan(NamedTuple):
    """Drop the first `drop` segments; then rewrite those from `first` to `last` (numbers before the drop) so that only `keep` stays."""

    drop: int
    first: int
    last: int
    keep: list[int]
    forget: list[int]
    """Runs of items whose bytes go."""

    @property
    def rewrites(self) -> bool:
        return self.first <= self.last


class Freed(NamedTuple):
    """What a pass of retention did."""

    segments: int
    """Dropped."""
    rewritten: int
    items: int
    """Resolved items let go."""
    size_bytes: int

    def __str__(self) -> str:
        done = f"{self.segments} segments dropped, {self.rewritten} rewritten, {self.items:,} resolved items let go"
        return f"{self.size_bytes:,} bytes freed: {done}"


def plan(segments: Sequence[SegmentFacts], state: State, retention: Retention, wall: int, *, thorough: bool = False) -> Plan:
    """What retention asks for now. `thorough`: rewrite whatever frees anything."""
    due = _due(segments, retention, wall)
    ends = [segments[number + 1].base for number in range(due)]
    cursor = min(state.cursors.values(), default=state.next_offset)
    while ends and ends[-1] > cursor:
        ends.pop()
    kept = needed(state, ends[-1]) if ends else RunSet()
    drop = 0
    while drop < len(ends) and not kept.overlaps(0, ends[drop]):
        drop += 1
    start = segments[drop].base
    pinned = min(len(ends), len(segments) - UNTOUCHED)
    forget = RunSet((0, start))
    keep: list[int] = []
    if pinned > drop and _worth_it(segments[drop:pinned], start, ends[pinned - 1], kept, state, thorough):
        keep = kept.within(start, ends[pinned - 1])
        forget.add(start, ends[pinned - 1])
        forget.remove_all(keep)
    else:
        pinned = drop
    forget.remove_all(state.dropped.runs)
    return Plan(drop, drop, pinned - 1, keep, forget.runs)


def _due(segments: Sequence[SegmentFacts], retention: Retention, wall: int) -> int:
    """How many of the oldest segments exceed a limit."""
    total = sum(segment.size_bytes for segment in segments)
    most = max(0, len(segments) - max(1, retention.min_segments))
    for number in range(most):
        segment = segments[number]
        old = retention.max_age and segment.last_wall + retention.max_age <= wall
        large = retention.max_bytes and total > retention.max_bytes
        many = retention.max_segments and len(segments) - number > retention.max_segments
        if not (old or large or many):
            return number
        total -= segment.size_bytes
    return most


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
    ends = [facts.base for facts in segments[1:]] + [state.next_offset]
    for facts, stop in zip(segments, ends, strict=True):
        items = stop - facts.base
        if items > 0:
            done = count(state.resolved.within(facts.base, stop)) + count(state.buried_set.within(facts.base, stop))
            size += facts.size_bytes * (items - done) // items
    return size


def mean_bytes(segments: Sequence[SegmentFacts], state: State) -> int:
    """About how many bytes an item takes."""
    return sum(facts.size_bytes for facts in segments) // max(1, state.next_offset - segments[0].base)
