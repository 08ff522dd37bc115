"""What a model knows of every item and every lease, and the few ways in which an item moves.

Owns: `ModelState`, the plain facts beneath `QueueLoadModel`; `ModelLease`, one lease; `ComparedState`, what of it can be compared with a real partition.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from penstock.rules.item_states import ItemState
from penstock.words.clock import Moment
from penstock.words.limits import Policy
from simulation.partition.order import ModelItem, earlier_of_key

EXPIRED = "expired"
LEASE_EXPIRED = "lease expired"
SPENT = "spent"
Cause: TypeAlias = tuple[str, int, int]
"""Why an item became ready again, when, and its number among those."""


@dataclass(slots=True)
class ModelLease:
    """A lease: who may settle what until when."""

    number: int
    deadline: int
    timeout: int
    open: list[int]
    """In the order given."""
    done: list[int]
    size: int
    given_at: int
    ended_at: int | None = None

    @property
    def finished(self) -> bool:
        """Everything it gave was completed under it."""
        return len(self.done) == self.size

    def close(self, offsets: Iterable[int], now: Moment) -> None:
        """It holds these no longer, and ends when it holds nothing."""
        for offset in offsets:
            self.open.remove(offset)
        if not self.open:
            self.ended_at = now.elapsed


class ComparedState(NamedTuple):
    """What is compared after every step."""

    states: list[ItemState]
    failures: dict[int, tuple[int, str]]
    """Items that came back: (attempts, reason)."""
    burials: dict[int, tuple[int, bool]]
    """(attempts, whether its ttl ran out)."""
    leases: dict[int, tuple[int, list[int]]]
    """(deadline, items still open)."""
    paused: tuple[bool, bool]
    policy: Policy
    overdue: set[int]
    requests: set[bytes]
    dedups: dict[bytes, int]
    dropped: set[int]
    cursors: dict[str, int]


class ModelState:
    """All there is to know of one partition."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.items: list[ModelItem] = []
        self.leases: dict[int, ModelLease] = {}
        """Every lease ever given; those with `ended_at` are over."""
        self.paused_lease = False
        self.paused_produce = False
        self.answers: dict[bytes, tuple[int, Any]] = {}
        """Request id → (until, answer; of a lease its number)."""
        self.dedups: dict[bytes, tuple[int, int]] = {}
        """Dedup id → (until, offset)."""
        self.sources: dict[bytes, int] = {}
        self.cursors: dict[str, int] = {}
        """Name → the offset it reads next."""
        self.step = 0

    def view(self, now: Moment, *, rebooted: bool = False) -> ComparedState:
        """What a partition should show; after a reboot every lease has its full timeout again."""
        items = self.items
        return ComparedState(
            [item.state for item in items],
            {item.offset: (item.attempts, item.reason) for item in items if item.attempts and not item.state.resolved},
            {item.offset: (item.attempts, item.reason == EXPIRED) for item in items if item.state is ItemState.BURIED},
            {one.number: (now.elapsed + one.timeout if rebooted else one.deadline, sorted(one.open)) for one in self.live()},
            (self.paused_lease, self.paused_produce),
            self.policy,
            {item.offset for item in items if item.overdue},
            {name for name, (until, _) in self.answers.items() if until > now.elapsed},
            {name: offset for name, (until, offset) in self.dedups.items() if until > now.elapsed},
            {item.offset for item in items if item.dropped},
            dict(self.cursors),
        )

    def live(self) -> list[ModelLease]:
        return [one for one in self.leases.values() if one.ended_at is None]

    def lease_of(self, item: ModelItem) -> ModelLease:
        """The lease that holds an item."""
        return next(one for one in self.live() if item.offset in one.open)

    def restart_timeouts(self, now: Moment) -> None:
        """The machine was off: how long is not known, so every holder gets its full timeout again."""
        for one in self.live():
            one.deadline = now.elapsed + one.timeout

    # -- how an item moves ---------------------------------------------------------------------------

    def to_tail(self, item: ModelItem, now: Moment, *, position: int | None = None, cause: Cause = ("", 0, 0)) -> None:
        """Ready: behind everything that is, or (an item that was never late) at its own place in the log's order."""
        item.state, item.ready_since, item.jumps, item.returned = ItemState.READY, now.elapsed, False, False
        item.position = len(self.items) if position is None else position
        item.arrival = (self.step, *cause) if position is None else (self.step, "", item.offset, 0)

    def to_place(self, item: ModelItem, now: Moment) -> None:
        """Ready again at its place, which is the first of its key unless an operator put others there meanwhile."""
        item.returned, item.jumps = True, earlier_of_key(self.items, item) is not None
        item.state, item.ready_since = ItemState.READY, now.elapsed

    def return_item(self, item: ModelItem, now: Moment, reason: str, delay: int, cause: Cause, *, counted: bool = True) -> None:
        """Without a key to the tail; with one it keeps its place, and a delay holds the key."""
        if counted:
            item.attempts += 1
            item.reason = reason
        if delay:
            item.state, item.due, item.at = ItemState.SCHEDULED, now.elapsed + delay, 0
        elif item.key is None:
            self.to_tail(item, now, cause=cause)
        else:
            self.to_place(item, now)

    def bury(self, item: ModelItem, reason: str, *, counted: bool = False) -> None:
        item.attempts += counted
        item.state, item.reason, item.at, item.due, item.overdue = ItemState.BURIED, reason, 0, 0, False
        item.parked = item.key is not None and self.policy.on_bury == "park"

    @staticmethod
    def resolve(item: ModelItem) -> None:
        item.state, item.attempts, item.reason, item.at, item.due = ItemState.COMPLETED, 0, "", 0, 0
        item.overdue = item.parked = False

    def drop(self, offsets: Iterable[int]) -> None:
        """Retention let go of items: only resolved ones that park no key and that every cursor has passed."""
        held = min(self.cursors.values(), default=len(self.items))
        for item in map(self.items.__getitem__, offsets):
            assert item.dropped or (item.state.resolved and not item.parked and item.offset < held), f"{item} was dropped"
            self.resolve(item)
            item.dropped = True

    def attempts_spent(self, item: ModelItem) -> bool:
        """Whether the lease it is under was its last."""
        return bool(self.policy.max_attempts) and item.attempts + 1 >= self.policy.max_attempts

    # -- requests ------------------------------------------------------------------------------------

    def known(self, request: bytes | None, now: Moment) -> Any:
        """What the same request was answered before, if that is remembered."""
        until, answer = self.answers.get(request, (0, None)) if request is not None else (0, None)
        return answer if until > now.elapsed else None

    def remember(self, request: bytes | None, now: Moment, answer: Any) -> None:
        if request is not None:
            self.answers[request] = (now.elapsed + self.policy.result_memory, answer)
