"""The state of a partition's model, and the basic changes of an item.

Owns: `ModelState` (the state of `PartitionModel`), `ModelLease` (one lease), `ComparedState` (the part that is compared
with a real partition).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from penstock.rules.calls import CallName
from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND, Moment
from penstock.words.limits import Policy
from simulation.partition.order import ModelItem, earlier_of_key

EXPIRED = "expired"
LEASE_EXPIRED = "lease expired"
SPENT = "spent"
Cause: TypeAlias = tuple[str, int, int]
"""Why an item became ready again, when, and its number among the items with that cause and time."""


@dataclass(slots=True)
class ModelLease:
    """A lease: the items that may be settled under its number, and until when."""

    number: int
    deadline: int
    timeout: int
    open: list[int]
    """Unsettled items, in the order in which they were granted."""
    done: list[int]
    size: int
    given_at: int
    ended_at: int | None = None

    @property
    def finished(self) -> bool:
        """Whether all of its items were completed under it."""
        return len(self.done) == self.size

    def close(self, offsets: Iterable[int], now: Moment) -> None:
        """Remove these items; the lease ends when it has none left."""
        for offset in offsets:
            self.open.remove(offset)
        if not self.open:
            self.ended_at = now.elapsed


class ComparedState(NamedTuple):
    """The state that is compared after every step."""

    states: list[ItemState]
    failures: dict[int, tuple[int, str]]
    """Items with failed attempts: offset → (attempts, reason)."""
    burials: dict[int, tuple[int, bool]]
    """Offset → (attempts, whether its ttl expired)."""
    leases: dict[int, tuple[int, list[int]]]
    """Lease number → (deadline, unsettled items)."""
    paused: tuple[bool, bool]
    policy: Policy
    overdue: set[int]
    requests: set[bytes]
    dedups: dict[bytes, int]
    dropped: set[int]
    cursors: dict[str, int]


class ModelState:
    """The state of one partition's model."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.items: list[ModelItem] = []
        self.leases: dict[int, ModelLease] = {}
        """Every lease ever granted; those with `ended_at` have ended."""
        self.paused_lease = False
        self.paused_produce = False
        self.answers: dict[bytes, tuple[int, int, Any]] = {}
        """Request id → (remembered until, answer); for a lease request its lease number."""
        self.dedups: dict[bytes, tuple[int, int]] = {}
        """Dedup id → (remembered until, offset of the first item)."""
        self.sources: dict[bytes, int] = {}
        self.cursors: dict[str, int] = {}
        """Name → the offset that the cursor reads next."""
        self.step = 0

    def view(self, now: Moment) -> ComparedState:
        """The state that the partition should have."""
        items = self.items
        return ComparedState(
            [item.state for item in items],
            {item.offset: (item.attempts, item.reason) for item in items if item.attempts and not item.state.resolved},
            {item.offset: (item.attempts, item.reason == EXPIRED) for item in items if item.state is ItemState.BURIED},
            {one.number: (one.deadline, sorted(one.open)) for one in self.live()},
            (self.paused_lease, self.paused_produce),
            self.policy,
            {item.offset for item in items if item.overdue},
            {name for name, (until, _, _) in self.answers.items() if until > now.elapsed},
            {name: offset for name, (until, offset) in self.dedups.items() if until > now.elapsed},
            {item.offset for item in items if item.dropped},
            dict(self.cursors),
        )

    def live(self) -> list[ModelLease]:
        return [one for one in self.leases.values() if one.ended_at is None]

    def lease_of(self, item: ModelItem) -> ModelLease:
        """The lease that holds an item."""
        return next(one for one in self.live() if item.offset in one.open)

    def opened(self, now: Moment, *, rebooted: bool) -> None:
        """No lease ends for two seconds: while the partition was closed, nobody could settle or extend it.

        After a reboot every lease gets its full timeout again: how long the machine was off is not known.
        """
        for one in self.live():
            deadline = now.elapsed + one.timeout if rebooted else one.deadline
            one.deadline = max(deadline, now.elapsed + 2 * SECOND)

    # -- changes of an item ----------------------------------------------------------------------------

    def to_tail(self, item: ModelItem, now: Moment, *, position: int | None = None, cause: Cause = ("", 0, 0)) -> None:
        """Make an item ready behind all ready items, or, if `position` is given, at that position in the log's
        order."""
        item.state, item.ready_since, item.jumps, item.returned = ItemState.READY, now.elapsed, False, False
        item.rescheduled = False
        item.position = len(self.items) if position is None else position
        item.arrival = (self.step, *cause) if position is None else (self.step, "", item.offset, 0)

    def to_former_position(self, item: ModelItem, now: Moment) -> None:
        """Make an item ready at its former position. It is the first of its key unless a seek or redrive put others
        before it."""
        item.returned, item.jumps = True, earlier_of_key(self.items, item) is not None
        item.state, item.ready_since = ItemState.READY, now.elapsed

    def return_item(self, item: ModelItem, now: Moment, reason: str, delay: int, cause: Cause, *, counted: bool = True) -> None:
        """Return a leased item. Without a key it goes to the tail; with one it keeps its position, and a delay holds
        its key."""
        if counted:
            item.attempts += 1
            item.reason = reason
        if delay:
            item.state, item.due, item.at, item.rescheduled = ItemState.SCHEDULED, now.elapsed + delay, 0, False
        elif item.key is None:
            self.to_tail(item, now, cause=cause)
        else:
            self.to_former_position(item, now)

    def bury(self, item: ModelItem, reason: str, *, counted: bool = False) -> None:
        item.attempts += counted
        item.state, item.reason, item.at, item.due, item.overdue = ItemState.BURIED, reason, 0, 0, False
        item.parked = item.key is not None and self.policy.on_bury == "park"

    @staticmethod
    def resolve(item: ModelItem) -> None:
        item.state, item.attempts, item.reason, item.at, item.due = ItemState.COMPLETED, 0, "", 0, 0
        item.overdue = item.parked = False

    def cancel(self, item: ModelItem) -> None:
        self.resolve(item)
        item.state = ItemState.CANCELLED
        self.dedups = {name: known for name, known in self.dedups.items() if known[1] != item.offset}

    def drop(self, offsets: Iterable[int]) -> None:
        """Drop items, as retention did; fail unless each is resolved, parks no key and was passed by every cursor."""
        held = min(self.cursors.values(), default=len(self.items))
        for item in map(self.items.__getitem__, offsets):
            assert item.dropped or (item.state.resolved and not item.parked and item.offset < held), f"{item} was dropped"
            self.resolve(item)
            item.dropped = True

    def attempts_spent(self, item: ModelItem) -> bool:
        """Whether an item's current lease is its last allowed attempt."""
        return bool(self.policy.max_attempts) and item.attempts + 1 >= self.policy.max_attempts

    # -- requests --------------------------------------------------------------------------------------

    def known(self, calls: Sequence[CallName], now: Moment) -> Any:
        """The remembered answer to a call, if there is one."""
        until, number, answer = self.answers.get(calls[0].session, (0, 0, None)) if calls else (0, 0, None)
        return answer if until > now.elapsed and number == calls[0].number else None

    def remember(self, calls: Sequence[CallName], now: Moment, answer: Any) -> None:
        for call in calls:
            self.answers[call.session] = (now.elapsed + self.policy.result_memory, call.number, answer)
