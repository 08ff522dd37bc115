"""What is leased and waits for a place.

Owns: `Shelf`, for one queue, which is a deque and nothing more, and `Shares`, for several queues or a limit per partition: a free place
goes to the queue that has the fewest places for its weight, and among equals to the one that was served the least for its weight.
So while all have work each has its share of the places, and what one does not use the others have.
Taking needs no lock beyond the interpreter's in a `Shelf`; `Shares` have one, held for a few steps.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from penstock.worker.holding import Hold, Pair, Source


class Waiting(Protocol):
    """Either kind."""

    counting: bool
    """Whether it wants to know what has `finished`."""

    def put(self, source: Source, pairs: Sequence[Pair]) -> None: ...
    def take(self) -> Pair:
        """The next item; IndexError when there is none for a place now."""

    def take_many(self, most: int) -> list[Pair]:
        """Several of one queue, at least one; IndexError when there is none."""

    def put_back(self, pairs: Sequence[Pair]) -> None:
        """Items that were taken but not begun: they come first again."""

    def finished(self, pair: Pair) -> None:
        """The place of an item that was taken is free."""

    def drop(self, hold: Hold) -> list[Pair]:
        """Take out what is held by a lease."""

    def clear(self) -> list[Pair]:
        """Take everything out."""

    def count(self, source: Source) -> int:
        """Items of one queue that wait."""

    def taken(self, source: Source) -> int:
        """Items of one queue that are in places, as far as it is counted."""

    @property
    def ready(self) -> bool:
        """Whether `take` would give something."""

    def __len__(self) -> int: ...


class Shelf:
    """One queue, no limit but the places."""

    counting = False

    def __init__(self) -> None:
        self._pairs: deque[Pair] = deque()
        self.take = self._pairs.popleft

    def put(self, source: Source, pairs: Sequence[Pair]) -> None:
        self._pairs.extend(pairs)

    def take_many(self, most: int) -> list[Pair]:
        found = [self.take()]
        try:
            while len(found) < most:
                found.append(self.take())
        except IndexError:
            pass
        return found

    def put_back(self, pairs: Sequence[Pair]) -> None:
        self._pairs.extendleft(reversed(pairs))

    def finished(self, pair: Pair) -> None:
        return

    def drop(self, hold: Hold) -> list[Pair]:
        found = self.clear()
        self.put_back([pair for pair in found if pair[0] is not hold])
        return [pair for pair in found if pair[0] is hold]

    def clear(self) -> list[Pair]:
        found: list[Pair] = []
        try:
            while True:
                found.append(self.take())
        except IndexError:
            return found

    def count(self, source: Source) -> int:
        return len(self._pairs)

    def taken(self, source: Source) -> int:
        return 0

    @property
    def ready(self) -> bool:
        return bool(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


class _Lane:
    """What waits of one queue, by partition."""

    def __init__(self, weight: int, per_partition: int) -> None:
        self.weight = weight
        self.limit = per_partition
        self.taken = 0
        self.served = 0
        self.count = 0
        self._parts: dict[int, deque[Pair]] = {}
        self._busy: dict[int, int] = {}
        self._open: dict[int, None] = {}
        """Partitions that have something for a place now, in the order in which they are served."""

    @property
    def open(self) -> bool:
        return bool(self._open)

    def put(self, pairs: Iterable[Pair], first: bool = False) -> None:
        for pair in pairs:
            number = pair[0].partition if self.limit else 0
            part = self._parts.setdefault(number, deque())
            part.appendleft(pair) if first else part.append(pair)
            self.count += 1
            self._look(number)

    def take(self) -> Pair:
        number = next(iter(self._open))
        del self._open[number]
        pair = self._parts[number].popleft()
        self.count -= 1
        self.taken += 1
        self.served += 1
        self._busy[number] = self._busy.get(number, 0) + 1
        self._look(number)
        return pair

    def untake(self, pair: Pair) -> None:
        self.finished(pair)
        self.served -= 1
        self.put([pair], first=True)

    def finished(self, pair: Pair) -> None:
        number = pair[0].partition if self.limit else 0
        self.taken -= 1
        self._busy[number] -= 1
        self._look(number)

    def clear(self) -> list[Pair]:
        found = [pair for part in self._parts.values() for pair in part]
        self._parts.clear()
        self._open.clear()
        self.count = 0
        return found

    def _look(self, number: int) -> None:
        if self._parts.get(number) and (not self.limit or self._busy.get(number, 0) < self.limit):
            self._open.setdefault(number)


class Shares:
    """Several queues, or a limit per partition."""

    counting = True

    def __init__(self, weights: Mapping[Source, int], per_partition: int) -> None:
        self._lock = threading.Lock()
        self._lanes = {source: _Lane(weight, per_partition) for source, weight in weights.items()}

    def put(self, source: Source, pairs: Sequence[Pair]) -> None:
        with self._lock:
            lane = self._lanes[source]
            if not lane.count and not lane.taken:
                self._catch_up(lane)
            lane.put(pairs)

    def _catch_up(self, lane: _Lane) -> None:
        """It did not want its share for a while: that gives it no claim to more of it now."""
        others = [other.served / other.weight for other in self._lanes.values() if other.count or other.taken]
        lane.served = max(lane.served, round(min(others, default=0) * lane.weight))

    def take(self) -> Pair:
        with self._lock:
            return self._best().take()

    def take_many(self, most: int) -> list[Pair]:
        with self._lock:
            lane = self._best()
            found = [lane.take()]
            while len(found) < most and lane.open:
                found.append(lane.take())
            return found

    def _best(self) -> _Lane:
        lanes = [lane for lane in self._lanes.values() if lane.open]
        if not lanes:
            raise IndexError
        return lanes[0] if len(lanes) == 1 else min(lanes, key=_score)

    def put_back(self, pairs: Sequence[Pair]) -> None:
        with self._lock:
            for pair in reversed(pairs):
                self._lanes[pair[0].source].untake(pair)

    def finished(self, pair: Pair) -> None:
        with self._lock:
            self._lanes[pair[0].source].finished(pair)

    def drop(self, hold: Hold) -> list[Pair]:
        with self._lock:
            lane = self._lanes[hold.source]
            found = lane.clear()
            lane.put(pair for pair in found if pair[0] is not hold)
            return [pair for pair in found if pair[0] is hold]

    def clear(self) -> list[Pair]:
        with self._lock:
            return [pair for lane in self._lanes.values() for pair in lane.clear()]

    def count(self, source: Source) -> int:
        return self._lanes[source].count

    def taken(self, source: Source) -> int:
        return self._lanes[source].taken

    @property
    def ready(self) -> bool:
        return any(lane.open for lane in self._lanes.values())

    def __len__(self) -> int:
        return sum(lane.count for lane in self._lanes.values())


def _score(lane: _Lane) -> tuple[float, float]:
    return lane.taken / lane.weight, lane.served / lane.weight
