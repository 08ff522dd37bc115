"""The outcome of an item: what happens to it when its handler has ended, and how long it waits for its next attempt.

Owns: `Retry`, `Bury`, `Snooze` and `Failed`, which a handler raises; `RetryPolicy`; and `Outcome`, which the settler sends to the queue.
Pure: random numbers are passed in.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.api.arguments import Seconds, bounded_duration
from penstock.words import errors
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_DELAY

OutcomeName: TypeAlias = Literal["completed", "retried", "buried", "snoozed", "returned"]
RandomFraction: TypeAlias = Callable[[], float]
"""A number from 0 to 1."""


class Outcome(NamedTuple):
    """What happens to an item. "snoozed" and "returned" (its handler did not run, or was stopped) count as no attempt."""

    name: OutcomeName
    delay: int = 0
    reason: str = ""
    follow_ups: Sequence[tuple[int, Batch]] = ()
    """Follow-ups: (incarnation, items)."""


COMPLETED = Outcome("completed")
RETURNED = Outcome("returned")

# -- what a handler raises ---------------------------------------------------------------------------


class Retry(Exception):
    """Raised by a handler: try the item again, after `delay` (None: as the retry policy says). Counts as an attempt."""

    def __init__(self, delay: Seconds | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = None if delay is None else bounded_duration(delay, "delay")
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Bury(Exception):
    """Raised by a handler: give the item up."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Snooze(Exception):
    """Raised by a handler: not now; try the item again after `delay`, as if it had not been leased: it counts as no attempt."""

    def __init__(self, delay: Seconds, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = bounded_duration(delay, "delay")
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Failed(Exception):
    """Raised or returned by a batch handler: some of its items failed, the others are done.

    failed: for each item that failed, by its id or its place in the list, why: a text, or an exception, such as `Retry(30)`.
    """

    def __init__(self, failed: Mapping[str | int, str | BaseException]) -> None:
        super().__init__(failed)
        if not isinstance(failed, Mapping):
            raise InvalidRequest(f"what failed is {type(failed).__name__}; give a dict of item ids or places to reasons")
        self.failed = dict(failed)


# -- how long to wait --------------------------------------------------------------------------------

ErrorAction: TypeAlias = "type[Bury] | Retry | Bury | Snooze | RetryPolicy"


class RetryPolicy(msgspec.Struct, frozen=True):
    """How long an item waits after a failure: `base` seconds after its first attempt, `factor` times as long after each further one.

    by_type: what to do for some kinds of exception: the most special class counts. `Bury` gives the item up, a RetryPolicy has its
    own times, `Retry(delay)` and `Snooze(delay)` are as if they had been raised.
    How many attempts there are is the queue's option `max_attempts`.
    """

    base: float = 1.0
    factor: float = 2.0
    most: float = 600.0
    """Seconds, however many attempts there were."""
    jitter: float = 0.2
    """Up to this share more or less, by chance, so that what failed together does not come back together."""
    by_type: Mapping[type[BaseException], ErrorAction] = {}

    def __post_init__(self) -> None:
        _check("base", self.base, 0.0, MAX_DELAY / SECOND)
        _check("factor", self.factor, 1.0, 1_000.0)
        _check("most", self.most, 0.0, MAX_DELAY / SECOND)
        _check("jitter", self.jitter, 0.0, 1.0)
        for kind, answer in self.by_type.items():
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise InvalidRequest(f"by_type has {kind!r}; name classes of exceptions")
            if answer is not Bury and not isinstance(answer, Retry | Bury | Snooze | RetryPolicy):
                raise InvalidRequest(f"by_type gives {answer!r} for {kind.__name__}; give Bury, Retry(…), Snooze(…) or a RetryPolicy")

    def delay(self, attempts: int, chance: RandomFraction) -> int:
        """Microseconds to wait after so many attempts."""
        try:
            seconds = min(self.most, self.base * self.factor ** max(0, attempts - 1))
        except OverflowError:
            seconds = self.most
        return min(MAX_DELAY, round(seconds * (1 + self.jitter * (2 * chance() - 1)) * SECOND))

    def for_error(self, error: BaseException) -> "ErrorAction | None":
        for kind in type(error).__mro__:
            if kind in self.by_type:
                return self.by_type[kind]
        return None


def _check(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or math.isnan(value):
        raise InvalidRequest(f"{name} is {value!r}; give a number from {low:g} to {high:g}")


# -- from an error to an outcome ---------------------------------------------------------------------


def outcome_of(error: BaseException, attempts: int, policy: RetryPolicy, chance: RandomFraction) -> Outcome:
    """The outcome of an item whose handler raised this error after so many attempts."""
    answer: Any = policy.for_error(error) if policy.by_type else None
    if answer is None:
        answer = error
    elif answer is Bury:
        answer = Bury(failure_reason(error))
    reason = getattr(answer, "reason", "") or (failure_reason(error) if answer is not error else "")
    if isinstance(answer, Bury):
        return Outcome("buried", reason=reason)
    if isinstance(answer, Snooze):
        return Outcome("snoozed", answer.delay, reason)
    if isinstance(answer, Retry):
        return Outcome("retried", policy.delay(attempts, chance) if answer.delay is None else answer.delay, reason)
    times = answer if isinstance(answer, RetryPolicy) else policy
    return Outcome("retried", times.delay(attempts, chance), failure_reason(error))


class PlainReasonError(Exception):
    """An error whose text is a reason by itself."""


def failure_reason(error: BaseException) -> str:
    """What an exception says; see words/errors.py."""
    return str(error) if isinstance(error, PlainReasonError) else errors.reason_of(error)


def batch_failures(failed: Failed, ids: Sequence[str]) -> dict[int, BaseException]:
    """The errors of the failed items, by their index; InvalidRequest if an id or index is not of this batch."""
    found: dict[int, BaseException] = {}
    for name, why in failed.failed.items():
        if isinstance(name, int) and 0 <= name < len(ids):
            place = name
        elif isinstance(name, str) and name in ids:
            place = ids.index(name)
        else:
            raise InvalidRequest(f"the handler says that item {name!r} failed, which it was not given; name ids or places in the list")
        found[place] = why if isinstance(why, BaseException) else Retry(reason=str(why))
    return found
