"""Metrics of a queue: counters, and how long callers waited.

Owns: `Meter` and `Histogram`. Always on: it costs a few additions per request. Each latency bucket is a quarter wider
than the one before, so a quantile is right to within about a tenth.
"""

import math
from collections.abc import Sequence

from penstock.loop.requests import LeaseRequest, Request, SettleRequest
from penstock.words.errors import Refused

BUCKETS = 100
GROWTH = 1.25
_LOG_GROWTH = math.log(GROWTH)


class Histogram:
    """Counts of durations, in buckets."""

    __slots__ = ("counts", "total", "worst")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.total = 0
        self.worst = 0

    def add(self, microseconds: int) -> None:
        at = int(math.log(microseconds) / _LOG_GROWTH) if microseconds > 1 else 0
        self.counts[min(at, BUCKETS - 1)] += 1
        self.total += 1
        if microseconds > self.worst:
            self.worst = microseconds

    def quantile(self, share: float) -> float:
        """The duration in microseconds that a share of all cases did not exceed; 0 without any."""
        wanted = share * self.total
        seen = 0
        for at, number in enumerate(self.counts):
            seen += number
            if number and seen >= wanted:
                return float(min(self.worst, GROWTH ** (at + 0.5)))
        return 0.0


class Meter:
    """Counters of one queue since it was opened."""

    def __init__(self) -> None:
        self.turns = 0
        self.requests: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.items: dict[str, int] = {}
        self.latencies: dict[str, Histogram] = {}

    def turn(self, taken: Sequence[Request], answered: Sequence[Request], now: int, produced: int) -> None:
        """Count the requests that a turn took and those that it answered."""
        self.turns += 1
        if produced:
            self._items("produced", produced)
        for request in taken:
            self.requests[request.verb] = self.requests.get(request.verb, 0) + 1
            if request.error is not None:
                self.errors[request.error.code] = self.errors.get(request.error.code, 0) + 1
        for request in answered:
            found = self.latencies.get(request.verb)
            if found is None:
                found = self.latencies[request.verb] = Histogram()
            found.add(now - request.entered_at)
            if isinstance(request, SettleRequest):
                self._settled(request)
            elif isinstance(request, LeaseRequest) and request.answer:
                self._items("leased", sum(part.granted.count for part in request.answer))

    def _settled(self, request: SettleRequest) -> None:
        done = 0
        for one in request.answer or ():
            if isinstance(one, Refused):
                self.errors[one.code] = self.errors.get(one.code, 0) + 1
            else:
                done += one.done
        self._items(_PAST[request.action], done)

    def _items(self, what: str, number: int) -> None:
        self.items[what] = self.items.get(what, 0) + number


_PAST = {"complete": "completed", "retry": "retried", "bury": "buried", "extend": "extended"}
