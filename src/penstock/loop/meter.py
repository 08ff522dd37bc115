"""Metrics of a queue's requests and turns: counters, and how long callers waited.

Owns: `Meter`. Always on: it costs a few additions per request. What became of items is counted in each partition
(tally.py).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from threading import Lock

from penstock.loop.histogram import TURN_BOUNDS, Histogram
from penstock.loop.requests import ProduceRequest, Request, SettleRequest
from penstock.words.errors import LeaseLost, PenstockError, Refused


class Meter:
    """Counters of one queue since it was opened."""

    def __init__(self) -> None:
        self.turns = 0
        self.turn_durations = Histogram(TURN_BOUNDS)
        self.requests: dict[str, int] = defaultdict(int)
        """verb → requests that turns took."""
        self.errors: dict[str, int] = {}
        """code → requests, and parts of requests, that a turn refused."""
        self.latencies: dict[str, Histogram] = {}
        """verb → time from the arrival of a request to its answer."""
        self._rejected: dict[str, int] = {}
        self._lock = Lock()

    def turn(self, taken: Sequence[Request], answered: Sequence[Request], began: int, now: int) -> None:
        """Count a turn, the requests that it took and those that it answered."""
        self.turns += 1
        took, durations = now - began, self.turn_durations
        durations.counts[bisect_left(TURN_BOUNDS, took)] += 1  # as `add` does it: every request pays for this
        durations.sum += took
        counts = self.requests
        for request in taken:
            counts[request.verb] += 1
        if answered:
            self.answered(answered, now)

    def answered(self, answered: Sequence[Request], now: int) -> None:
        """Count requests that were answered."""
        for request in answered:
            if not request.done:  # it waits again: its lease was lost to damage
                continue
            verb = request.verb
            found = self.latencies.get(verb)
            if found is None:
                found = self.latencies[verb] = Histogram()
            found.add(now - request.entered_at)
            if request.error is not None:
                self._refused(request.error.code)
            elif type(request) is SettleRequest:
                for one in request.answer:
                    if type(one) is Refused:
                        self._refused(one.code)
                    elif one.refused:  # the lease does not hold these items, though perhaps others
                        self._refused(LeaseLost.code)
            elif type(request) is ProduceRequest:
                for part in request.answer:
                    if part.refused is not None:
                        self._refused(part.refused.code)

    def rejected(self, error: PenstockError) -> None:
        """Count a request that no turn took. Any thread may call this."""
        with self._lock:
            self._rejected[error.code] = self._rejected.get(error.code, 0) + 1

    def all_errors(self) -> dict[str, int]:
        """Code → requests, and parts of requests, that were refused."""
        with self._lock:
            rejected = dict(self._rejected)
        return {code: self.errors.get(code, 0) + rejected.get(code, 0) for code in {**self.errors, **rejected}}

    def _refused(self, code: str) -> None:
        self.errors[code] = self.errors.get(code, 0) + 1
