"""The outcome of an item: what happens to the item after its handler ended, and how long it waits for its next attempt.

Owns: `Retry`, `Bury`, `Snooze` and `Failed`, which a handler raises; `RetryPolicy`; and `Outcome`, which the settler
sends to the queue. Pure: random numbers are passed in.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.api.arguments import Seconds, bounded_duration
from penstock.api.items import Item
from penstock.words import errors
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_DELAY

OutcomeName: TypeAlias = Literal["completed", "retried", "buried", "snoozed", "returned"]
RandomFraction: TypeAlias = Callable[[], float]
"""Gives a number from 0 to 1."""


class Outcome(NamedTuple):
    """What happens to an item. "snoozed" and "returned" (the handler did not run, or was stopped) count no attempt."""

    name: OutcomeName
    delay: int = 0
    reason: str = ""
    follow_ups: Sequence[tuple[int, Batch]] = ()
    """(incarnation of a queue, items to produce into it)."""


COMPLETED = Outcome("completed")
RETURNED = Outcome("returned")

# -- exceptions for handlers -------------------------------------------------------------------------


class Retry(Exception):
    """Raised by a handler: retry the item after `delay` (None: the delay of the retry policy). Counts an attempt."""

    def __init__(self, delay: Seconds | None = None, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = None if delay is None else bounded_duration(delay, "delay")
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Bury(Exception):
    """Raised by a handler: bury the item."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Snooze(Exception):
    """Raised by a handler: make the item ready again after `delay`. Counts no attempt."""

    def __init__(self, delay: Seconds, reason: str = "") -> None:
        super().__init__(delay, reason)
        self.delay = bounded_duration(delay, "delay")
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Failed(Exception):
    """Raised or returned by a batch handler: some items failed, the others are completed.

    failed: a dict from the id or index of each failed item to the reason: a text, or an exception such as `Retry(30)`.
    """

    def __init__(self, failed: Mapping[Any, str | BaseException]) -> None:  # Any: a Mapping is invariant in its keys
        super().__init__(failed)
        if not isinstance(failed, Mapping):
            raise InvalidRequest(f"failed is {type(failed).__name__}; give a dict from item ids or indexes to reasons")
        self.failed = dict(failed)


# -- retry policy ------------------------------------------------------------------------------------

ErrorAction: TypeAlias = "type[Bury] | Retry | Bury | Snooze | RetryPolicy"


class RetryPolicy(msgspec.Struct, frozen=True):
    """How long an item waits after a failure: `base` seconds the first time, then each time `factor` times as long.

    by_type: what to do for some exception classes; the most specific class is used. `Bury` buries the item, a
        RetryPolicy replaces this one, and `Retry(delay)` and `Snooze(delay)` act as if the handler had raised them.
    The number of attempts is limited by the queue's option `max_attempts`.
    """

    base: float = 1.0
    factor: float = 2.0
    most: float = 600.0
    """The longest wait, in seconds."""
    jitter: float = 0.2
    """The wait varies at random by up to this share, so that items that failed together are not retried together."""
    by_type: Mapping[type[BaseException], ErrorAction] = {}

    def __post_init__(self) -> None:
        _check("base", self.base, 0.0, MAX_DELAY / SECOND)
        _check("factor", self.factor, 1.0, 1_000.0)
        _check("most", self.most, 0.0, MAX_DELAY / SECOND)
        _check("jitter", self.jitter, 0.0, 1.0)
        for kind, action in self.by_type.items():
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise InvalidRequest(f"by_type has {kind!r}; name classes of exceptions")
            if action is not Bury and not isinstance(action, Retry | Bury | Snooze | RetryPolicy):
                raise InvalidRequest(f"by_type gives {action!r} for {kind.__name__}; give Bury, Retry(…), Snooze(…) or a RetryPolicy")

    def delay(self, attempts: int, random_fraction: RandomFraction) -> int:
        """Microseconds to wait after this many attempts."""
        try:
            seconds = min(self.most, self.base * self.factor ** max(0, attempts - 1))
        except OverflowError:
            seconds = self.most
        return min(MAX_DELAY, round(seconds * (1 + self.jitter * (2 * random_fraction() - 1)) * SECOND))

    def for_error(self, error: BaseException) -> "ErrorAction | None":
        """The action of `by_type` for this error, or None."""
        for kind in type(error).__mro__:
            if kind in self.by_type:
                return self.by_type[kind]
        return None


def _check(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or math.isnan(value):
        raise InvalidRequest(f"{name} is {value!r}; give a number from {low:g} to {high:g}")


# -- from an error to an outcome ---------------------------------------------------------------------


def outcome_of(error: BaseException, attempts: int, policy: RetryPolicy, random_fraction: RandomFraction) -> Outcome:
    """The outcome of an item whose handler raised this error at this attempt."""
    action: Any = policy.for_error(error) if policy.by_type else None
    if action is None:
        action = error
    elif action is Bury:
        action = Bury(failure_reason(error))
    reason = getattr(action, "reason", "") or (failure_reason(error) if action is not error else "")
    if isinstance(action, Bury):
        return Outcome("buried", reason=reason)
    if isinstance(action, Snooze):
        return Outcome("snoozed", action.delay, reason)
    if isinstance(action, Retry):
        return Outcome("retried", policy.delay(attempts, random_fraction) if action.delay is None else action.delay, reason)
    used = action if isinstance(action, RetryPolicy) else policy
    return Outcome("retried", used.delay(attempts, random_fraction), failure_reason(error))


def expected_outcome(item: Item, outcome: Outcome) -> OutcomeName:
    """What will become of an item with this outcome: the queue buries an item that is retried after its last attempt.

    The queue decides it, by what it allows then: see `Settled.buried`.
    """
    return "buried" if outcome.name == "retried" and 0 < item.max_attempts <= item.attempts else outcome.name


class PlainReasonError(Exception):
    """An error whose text alone is the reason, without the name of its class."""


def failure_reason(error: BaseException) -> str:
    """The reason that is stored with an item whose handler raised this error."""
    return str(error) if isinstance(error, PlainReasonError) else errors.reason_of(error)


def batch_failures(failed: Failed, ids: Sequence[str]) -> dict[int, BaseException]:
    """The errors of the failed items by index. InvalidRequest if an id or index is not in this batch."""
    found: dict[int, BaseException] = {}
    for name, why in failed.failed.items():
        if isinstance(name, int) and 0 <= name < len(ids):
            index = name
        elif isinstance(name, str) and name in ids:
            index = ids.index(name)
        else:
            raise InvalidRequest(f"the handler reports that item {name!r} failed, which it was not given; use ids or indexes of its list")
        found[index] = why if isinstance(why, BaseException) else Retry(reason=str(why))
    return found
