"""How many items per second, and how long the calls took.

Owns: `Rate`, `percentile`, and the loops that repeat a call for a while: `repeat` and `repeat_async`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Rate(NamedTuple):
    per_s: float
    """Items per second."""
    p50_ms: float
    """Milliseconds of a call, as those below."""
    p99_ms: float

    @classmethod
    def of(cls, items: int, took: float, times: Sequence[float]) -> "Rate":
        """took: seconds of all; times: seconds of each call."""
        return cls(items / took, percentile(times, 50) * 1e3, percentile(times, 99) * 1e3)


def percentile(times: Sequence[float], percent: int) -> float:
    return sorted(times)[min(len(times) - 1, len(times) * percent // 100)]


class Repeated(NamedTuple):
    """Calls that were repeated for a while."""

    answers: list[object]
    took: float
    times: list[float]

    def rate(self, items: int) -> Rate:
        """items: of all calls."""
        return Rate.of(items, self.took, self.times)


def repeat(act: Callable[[], object], seconds: float, at_most: float = float("inf")) -> Repeated:
    """Call again and again, until the time is over."""
    answers: list[object] = []
    times: list[float] = []
    began = now = time.perf_counter()
    while now < began + seconds and len(times) < at_most:
        answers.append(act())
        before, now = now, time.perf_counter()
        times.append(now - before)
    return Repeated(answers, now - began, times)


async def repeat_async(acts: Sequence[Callable[[], Awaitable[object]]], seconds: float, at_most: float = float("inf")) -> Repeated:
    """The same in as many tasks as there are acts. at_most: calls of all tasks."""
    answers: list[object] = []
    times: list[float] = []
    began = last = time.perf_counter()
    started = 0

    async def run(act: Callable[[], Awaitable[object]]) -> None:
        nonlocal last, started
        now = time.perf_counter()
        while now < began + seconds and started < at_most:
            started += 1
            answers.append(await act())
            before, now = now, time.perf_counter()
            times.append(now - before)
            last = now

    await asyncio.gather(*(run(act) for act in acts))
    return Repeated(answers, last - began, times)
