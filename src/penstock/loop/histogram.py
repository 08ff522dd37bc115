"""Histograms of durations.

Owns: `Histogram`, and the bounds of the buckets in microseconds. A duration is counted in the first bucket whose bound
it does not exceed. Histograms with the same bounds can be added.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

_STEPS = (100, 125, 160, 200, 250, 315, 400, 500, 630, 800)
FINE_BOUNDS = tuple(sorted({step * 10**power // 100 for power in range(10) for step in _STEPS}))
"""About ten buckets for each power of ten up to two hours: a quantile is right to within about a tenth."""
REQUEST_BOUNDS = (
    *(100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000, 25_000_000),
)
"""Of reports about requests. All of them are in FINE_BOUNDS, so that the coarser histogram is exact."""
TURN_BOUNDS = (50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000)
SYNC_BOUNDS = (*TURN_BOUNDS[1:], 2_500_000, 5_000_000)
LEASE_BOUNDS = (
    *(1_000, 5_000, 10_000, 50_000, 100_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000),
    *(60_000_000, 300_000_000, 900_000_000, 3_600_000_000, 14_400_000_000),
)


class Histogram:
    """Counts of durations, in buckets; the last bucket is of those above all bounds."""

    __slots__ = ("bounds", "counts", "sum", "worst")

    def __init__(self, bounds: Sequence[int] = FINE_BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0
        """Of all durations, in microseconds."""
        self.worst = 0

    def add(self, microseconds: int, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, microseconds)] += times
        self.sum += microseconds * times
        if microseconds > self.worst:
            self.worst = microseconds

    @property
    def total(self) -> int:
        return sum(self.counts)

    def include(self, others: "Iterable[Histogram]") -> "Histogram":
        """Add other histograms with the same bounds; gives this one."""
        for other in others:
            if not other.worst and not other.counts[0]:  # empty
                continue
            self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
            self.sum += other.sum
            self.worst = max(self.worst, other.worst)
        return self

    def counts_up_to(self, bounds: Sequence[int]) -> list[int]:
        """The counts in the buckets of `bounds`, all of which are bounds of this histogram; the last is of the rest."""
        edges = [0, *(bisect_left(self.bounds, bound) + 1 for bound in bounds), len(self.counts)]
        return [sum(self.counts[start:stop]) for start, stop in pairwise(edges)]

    def quantile(self, share: float) -> float:
        """The duration in microseconds that a share of all cases did not exceed; 0 without any.

        It is the middle of its bucket, in proportion.
        """
        wanted = share * self.total
        seen = 0
        for at, number in enumerate(self.counts):
            seen += number
            if number and seen >= wanted:
                if at == len(self.bounds):
                    return float(self.worst)
                below = self.bounds[at - 1] if at else 1
                return float(min(self.worst, (below * self.bounds[at]) ** 0.5))
        return 0.0
