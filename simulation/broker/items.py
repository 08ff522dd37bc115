"""What is known of one item and of one lease in a simulated broker, from the answers that were seen.

Owns: `Tag` (an item, followed by its payload through all queues), `HeldLease` (a lease in somebody's hands), `ItemPlace`.
Times are those of the model: microseconds that have passed since the simulation began, which no reboot and no setting of the date changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ENDLESS = 1 << 62


class CopyPlace(NamedTuple):
    """Where a copy of an item lies."""

    incarnation: int
    partition: int
    offset: int


class FirstSighting(NamedTuple):
    """When (which look of the census) and where an item was found for the first time."""

    look: int
    partition: int
    offset: int

    def before(self, other: "FirstSighting") -> bool:
        """Whether it is surely the earlier one. What came between two looks to different partitions has no order."""
        if self.look == other.look:
            return self.partition == other.partition and self.offset < other.offset
        return self.look < other.look


@dataclass(eq=False, slots=True)
class TrackedItem:
    """An item, told from all others by its payload."""

    payload: bytes
    queue: int
    """The incarnation of the queue that it was produced to."""
    key: bytes | None = None
    priority: int = 5
    dedup: bytes | None = None
    at: int = 0
    """Not to be handed out before this date was seen."""
    due: int = 0
    """The same date, kept."""
    scheduled: bool = False
    """It takes its place when it is due, whenever that is noticed."""
    has_ttl: bool = False
    """It has a ttl."""
    acknowledged: bool = False
    must_not_exist: bool = False
    """It must not be found anywhere: it was refused, or was the duplicate of another."""
    seen: bool = False
    """It was found stored, whether or not that was acknowledged."""
    resolved: bool = False
    """Completed or cleared for good, unless it is sought."""
    deleted_with_queue: bool = False
    """Its queue was deleted, unless it had just left."""
    completed_by: "TrackedLease | None" = None
    resolving_requests: int = 0
    """Requests under way, or lost, that may have resolved it."""
    arrival: "FirstSighting | None" = None
    """When and where it was found for the first time."""
    order: "FirstSighting | None" = None
    """The same, while that is its place in the order of its key; None when nobody can say what that is."""
    out_of_order: bool = False
    """It has lost its place, perhaps before it was acknowledged."""
    holder: "TrackedLease | None" = None
    times_leased: int = 0
    """How often it was handed out."""
    attempt: int = 0
    """The next lease of it is a later attempt than this; 0 when nobody can say."""
    not_before: int = 0
    """A delay holds it until then; 0 when there is none, or nobody knows."""
    returning_to: int = 0
    """The queue to which an operator sent it, and where its key is parked for it."""
    places: list[CopyPlace] = field(default_factory=list)
    """Every place where it was ever found, in that order."""
    parents: "list[TrackedItem]" = field(default_factory=list)
    """The items whose completion was to produce it."""

    def __repr__(self) -> str:
        key = "" if self.key is None else f", key {self.key.decode(errors='replace')}"
        return f"item {self.payload.split(b':')[0].decode()}{key}"

    def forget_order(self) -> None:
        self.order = None
        self.out_of_order = True


@dataclass(eq=False, slots=True)
class TrackedLease:
    """A lease as its holder knows it."""

    incarnation: int
    partition: int
    lease: int
    open: dict[int, TrackedItem]
    """By offset, in the order given."""
    deadline: int
    timeout: int
    doubtful: bool = False
    """It may have ended before its deadline: its record may be lost, or what was asked of it was never answered."""
    spared_until: int = 0
    """It does not end before, because its partition was slow."""
    busy: bool = False
    """Its holder waits for an answer."""
    leaving: set[int] = field(default_factory=set)
    """What that request completes, returns or buries, if it was run: its answer may wait for other partitions."""
    left: set[int] = field(default_factory=set)
    """Of these, what was seen with somebody else before the answer came."""
    surely_left: set[int] = field(default_factory=set)
    """Of these, what nothing but that request can have taken from its holder: the answer must say that it was done."""
    done: set[int] = field(default_factory=set)
    """Completed under it, and acknowledged."""

    def valid(self, now: int) -> bool:
        """Whether nobody else may have its open items."""
        return not self.doubtful and now < self.deadline

    def holds(self, tag: TrackedItem, now: int) -> bool:
        return self.valid(now) and tag.holder is self and any(one is tag for one in self.open.values())

    def early(self, wanted: Iterable[int]) -> list[int]:
        """Which of these must wait for an earlier one of their key that is not among them."""
        chosen, waiting, found = set(wanted), set(), []
        for offset, tag in self.open.items():
            if offset in chosen and tag.key in waiting:
                found.append(offset)
            elif offset not in chosen and tag.key is not None:
                waiting.add(tag.key)
        return found

    def close(self, offset: int) -> None:
        """An item was settled."""
        self.open.pop(offset, None)

    def close_behind(self, offset: int) -> None:
        """An item went back or was buried: the later ones of its key go back with it."""
        tag = self.open.get(offset)
        if tag is None:
            return
        line = [other for other, one in self.open.items() if one.key is not None and one.key == tag.key]
        for other in line[line.index(offset) :] if line else [offset]:
            self.close(other)

    def __repr__(self) -> str:
        return f"lease {self.lease:#x} of partition {self.partition}"
