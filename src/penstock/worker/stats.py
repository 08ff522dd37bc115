"""The statistics of a worker.

Owns: `WorkerStats`, what `Worker.stats()` gives, and `WorkerCounters`, which are counted under a lock.
"""

import threading
from collections import Counter, deque

import msgspec

from penstock.words.clock import SECOND

WINDOW = 5 * SECOND


class WorkerStats(msgspec.Struct, frozen=True):
    """What a worker has done since it was made."""

    handled: int
    """Items completed."""
    failed: int
    """Attempts that failed: retried or buried."""
    retried: int
    buried: int
    snoozed: int
    returned: int
    """Given back without being handled: not begun when the worker drained, or of a kind it has no handler for."""
    late: int
    """Attempts whose lease had ended before they were settled."""
    in_hand: int
    """Items leased and not settled yet."""
    per_second: float
    """Items completed a second, lately."""


class WorkerCounters:
    """Counts that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._marks: deque[tuple[int, int]] = deque()
        """(when, completed by then), the oldest just outside the window."""

    def add(self, what: str, count: int, now: int) -> None:
        with self._lock:
            if not self._marks:
                self._marks.append((now, 0))
            self._counts[what] += count
            if what == "completed":
                self._mark(now)

    def _mark(self, now: int) -> None:
        marks = self._marks
        if now - marks[-1][0] >= WINDOW // 20:
            marks.append((now, self._counts["completed"]))
        while len(marks) > 1 and now - marks[1][0] >= WINDOW:
            marks.popleft()

    def stats(self, now: int) -> WorkerStats:
        with self._lock:
            counts = self._counts
            settled = sum(counts[outcome] for outcome in ("completed", "retried", "buried", "snoozed", "returned", "late"))
            since, before = self._marks[0] if self._marks else (now, 0)
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
