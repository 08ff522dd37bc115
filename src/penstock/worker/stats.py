"""The statistics of a worker.

Owns: `WorkerStats`, the result of `Worker.stats()`, and `WorkerCounters`, which count under a lock.
"""

import threading
from collections import Counter, deque

import msgspec

from penstock.words.clock import SECOND

WINDOW = 5 * SECOND
SETTLED = ("completed", "retried", "buried", "snoozed", "returned", "late")
"""What is counted of an item at the end."""


class WorkerStats(msgspec.Struct, frozen=True):
    """The counts of a worker since it was made."""

    handled: int
    """Items completed."""
    failed: int
    """Attempts that failed: retried or buried."""
    retried: int
    buried: int
    snoozed: int
    returned: int
    """Items returned without an attempt: not started when the worker drained, or of a kind without a handler."""
    late: int
    """Attempts whose lease had ended before they were settled."""
    in_hand: int
    """Items leased and not settled yet."""
    per_second: float
    """Items completed per second, over the last five seconds."""


class WorkerCounters:
    """Counts that several threads may add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._samples: deque[tuple[int, int]] = deque()
        """(time, items completed by then), the oldest sample just outside the window."""

    def add(self, outcome: str, count: int, now: int) -> None:
        with self._lock:
            if not self._samples:
                self._samples.append((now, 0))
            self._counts[outcome] += count
            if outcome == "completed":
                self._sample(now)

    def _sample(self, now: int) -> None:
        samples = self._samples
        if now - samples[-1][0] >= WINDOW // 20:
            samples.append((now, self._counts["completed"]))
        while len(samples) > 1 and now - samples[1][0] >= WINDOW:
            samples.popleft()

    @property
    def leased(self) -> int:
        """Items leased so far."""
        return self._counts["leased"]

    @property
    def in_hand(self) -> int:
        """Items leased and not settled yet."""
        with self._lock:
            return self._counts["leased"] - sum(self._counts[outcome] for outcome in SETTLED)

    def stats(self, now: int) -> WorkerStats:
        with self._lock:
            counts = self._counts
            settled = sum(counts[outcome] for outcome in SETTLED)
            since, before = self._samples[0] if self._samples else (now, 0)
            return WorkerStats(
                handled=counts["completed"],
                failed=counts["retried"] + counts["buried"],
                retried=counts["retried"],
                buried=counts["buried"],
                snoozed=counts["snoozed"],
                returned=counts["returned"],
                late=counts["late"],
                in_hand=counts["leased"] - settled,
                per_second=(counts["completed"] - before) * SECOND / (now - since) if now > since else 0.0,
            )
