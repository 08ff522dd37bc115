"""From which partition is leased next: the best item of the whole queue goes first.

Owns: `Stock` (what one partition has to give) and `BestFirst` (the partitions that have something, in the order of their best items).
- Partitions are compared by their best heads: priority lifted by age, then how long it waits. Each partition counts elapsed time for
  itself, so times are put on the queue's clock before they are compared.
- Of one lifted priority, a partition is leased from as long as its head is at most SAME_AGE younger than the oldest elsewhere: so a
  batch touches few partitions. The rules know a time to about a second anyway (lanes.py: JOIN_WITHIN).
- Looking is cheap: a partition in which nothing happened since is not looked into again, unless aging lifts one of its heads.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from penstock.loop.member import Member
from penstock.loop.partition import Partition
from penstock.rules.fences import ENDLESS
from penstock.rules.lanes import Rank, best_rank
from penstock.words.clock import SECOND

SAME_AGE = 1 * SECOND
Entry: TypeAlias = "tuple[Rank, int, int, Stock]"


class Stock:
    """What a partition has to give, as it was when something last happened there."""

    __slots__ = ("_aging", "_changes", "_good_until", "_heads", "_partition", "_shift", "_used", "entry", "member", "rank", "ready")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.ready = 0
        """How many items are ready, whether or not their keys are free; 0 while leasing is paused."""
        self.rank: Rank | None = None
        """Of its best head, by the queue's clock; None when there is nothing to lease."""
        self.entry: Entry | None = None
        """What it is sorted by: of partitions that are equally good, the one that was not leased from for longest comes first."""
        self._used = 0
        self._partition: Partition | None = None
        self._changes = -1
        self._good_until = 0
        self._heads: list[Rank] = []
        self._aging = self._shift = 0

    @property
    def changed(self) -> bool:
        """Whether anything happened in the partition since the last look."""
        return self._partition is not self.member.partition or self._partition is None or self._partition.changes != self._changes

    def look(self, now: int) -> bool:
        """See what there is at `now`, by the queue's clock; whether there is anything to lease."""
        if now >= self._good_until or self.changed:
            self._look(now)
        return self.rank is not None

    def _look(self, now: int) -> None:
        partition = self.member.partition
        if partition is not None and self.changed:
            state = partition.state
            self._partition, self._changes = partition, partition.changes
            self._shift, self._aging = state.shift, state.policy.priority_aging
            self.ready = 0 if state.paused_lease else state.ready
            self._heads = state.heads() if self.ready else []
        own, aging = now + self._shift, self._aging
        best = best_rank(self._heads, aging, own)
        self.rank = None if best is None else Rank(best.priority, best.since - self._shift)
        self._good_until = now + min((aging - (own - head.since) % aging for head in self._heads), default=0) if aging else ENDLESS
        self._sort()

    def use(self, turn: int) -> None:
        """It was leased from, in this turn."""
        self._used = turn
        self._sort()

    def _sort(self) -> None:
        if self.rank is None:
            self.entry = None
        else:  # by the second: of partitions that are about equally old, the one that was not leased from for longest comes first
            about = Rank(self.rank.priority, self.rank.since - self.rank.since % SAME_AGE)
            self.entry = (about, self._used, self.member.number, self)

    def own_time(self, rank: Rank) -> Rank:
        """A rank by the queue's clock as this partition counts time."""
        return Rank(rank.priority, rank.since + self._shift)

    def __repr__(self) -> str:
        return f"Stock({self.member.number}, {self.ready} ready, {self.rank})"


class BestFirst:
    """The partitions that have something to lease, as they are dealt from within one turn."""

    def __init__(self, found: Iterable[Stock], now: int) -> None:
        self._now = now
        self._current: Stock | None = None
        self._others = [stock.entry for stock in found if stock.entry is not None]
        heapify(self._others)

    def __bool__(self) -> bool:
        return self._current is not None or bool(self._others)

    def __iter__(self) -> Iterator[Stock]:
        yield from (stock for *_, stock in self._others)
        if self._current is not None:
            yield self._current

    def best(self) -> Stock | None:
        """The partition to lease from next: the last one, unless another is clearly better."""
        current, bound = self._current, self._bound()
        if current is not None:
            if current.look(self._now) and (bound is None or (current.rank is not None and current.rank <= bound)):
                return current
            self.add(current)
        self._current = heappop(self._others)[-1] if self._others else None
        return self._current

    def until(self) -> Rank | None:
        """How far to lease from the partition that `best` gave: beyond this another one is clearly better."""
        bound = self._bound()
        return None if bound is None or self._current is None else self._current.own_time(bound)

    def leave_out(self) -> None:
        """The partition that `best` gave has nothing (more) to give in this turn, unless it is added again."""
        self._current = None

    def add(self, stock: Stock) -> None:
        if stock.look(self._now) and stock.entry is not None:
            heappush(self._others, stock.entry)

    def _bound(self) -> Rank | None:
        """The worst that is not clearly worse than the best of the others."""
        if not self._others:
            return None
        rank = self._others[0][-1].rank
        return None if rank is None else Rank(rank.priority, rank.since + SAME_AGE)
