"""What the model of a broker knows about one item and one lease, from the answers that were seen.

Owns: `TrackedItem` (an item, recognized by its payload in all queues), `TrackedLease` (a lease as its holder knows it),
`CopyPlace`.
Times are those of the model: microseconds since the simulation began, not affected by reboots and changes of the wall
clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ENDLESS = 1 << 62


class CopyPlace(NamedTuple):
    """Where a copy of an item is stored."""

    incarnation: int
    partition: int
    offset: int


class FirstSighting(NamedTuple):
    """When (the number of the inventory's look) and where an item was first found."""

    look: int
    partition: int
    offset: int

    def before(self, other: "FirstSighting") -> bool:
        """Whether this is certainly the earlier one. Items first found at the same look in different partitions have no
        order."""
        if self.look == other.look:
            return self.partition == other.partition and self.offset < other.offset
        return self.look < other.look


@dataclass(eq=False, slots=True)
class TrackedItem:
    """An item; its payload is unique."""

    payload: bytes
    queue: int
    """The incarnation of the queue that it was produced to."""
    key: bytes | None = None
    priority: int = 5
    dedup: bytes | None = None
    at: int = 0
    """Must not be leased before this wall time was reached; 0 once it was."""
    due: int = 0
    """The same wall time, which is not reset."""
    scheduled: bool = False
    """Its position in the order is decided only when it becomes due."""
    has_ttl: bool = False
    acknowledged: bool = False
    must_not_exist: bool = False
    """It was refused, or is a duplicate: it must not be found."""
    seen: bool = False
    """It was found, acknowledged or not."""
    resolved: bool = False
    """Completed or cleared, until a seek makes it ready again."""
    deleted_with_queue: bool = False
    """Its queue was deleted; it may have been transferred just before."""
    completed_by: "TrackedLease | None" = None
    resolving_requests: int = 0
    """The number of pending or lost requests that may have resolved it."""
    arrival: "FirstSighting | None" = None
    """When and where it was first found."""
    order: "FirstSighting | None" = None
    """The same while that decides its position among the items of its key; None if the position is not known."""
    out_of_order: bool = False
    """Its position is not known any more, perhaps since before it was acknowledged."""
    holder: "TrackedLease | None" = None
    times_leased: int = 0
    """How often it was leased, as far as answers were seen."""
    attempt: int = 0
    """Its next lease must be a later attempt than this; 0 if that is not known."""
    not_before: int = 0
    """The end of its delay; 0 if there is none or it is not known."""
    returning_to: int = 0
    """The queue to which it was redriven, if its key is parked for it there; else 0."""
    places: list[CopyPlace] = field(default_factory=list)
    """Every place where it was found, oldest first."""
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
    """Unsettled items by offset, in the order in which they were granted."""
    deadline: int
    timeout: int
    given_at: int = 0
    """When the request that it was given to was executed."""
    doubtful: bool = False
    """It may have ended before its deadline: its record may be lost, or a request about it was not answered."""
    spared_until: int = 0
    """It does not end before this, because its partition was slow."""
    busy: bool = False
    """Whether a request of its holder is pending."""
    leaving: set[int] = field(default_factory=set)
    """The items that this request settles. It may have been executed already, while its answer waits for other
    partitions."""
    left: set[int] = field(default_factory=set)
    """Of these, the items that another lease was granted before the answer came."""
    surely_left: set[int] = field(default_factory=set)
    """Of these, the items that only this request can have released: the answer must say that it settled them."""
    done: set[int] = field(default_factory=set)
    """Items completed under it and acknowledged."""

    def valid(self, now: int) -> bool:
        """Whether no other lease may have its unsettled items."""
        return not self.doubtful and now < self.deadline

    def holds(self, item: TrackedItem, now: int) -> bool:
        return self.valid(now) and item.holder is self and any(one is item for one in self.open.values())

    def early(self, wanted: Iterable[int]) -> list[int]:
        """Those of the wanted items that must wait for an earlier item of their key that is not wanted."""
        chosen, waiting, found = set(wanted), set(), []
        for offset, item in self.open.items():
            if offset in chosen and item.key in waiting:
                found.append(offset)
            elif offset not in chosen and item.key is not None:
                waiting.add(item.key)
        return found

    def close(self, offset: int) -> None:
        """Remove an item that was settled."""
        self.open.pop(offset, None)

    def close_behind(self, offset: int) -> None:
        """Remove an item that was returned or buried, and the later ones of its key, which are returned with it."""
        item = self.open.get(offset)
        if item is None:
            return
        line = [other for other, one in self.open.items() if one.key is not None and one.key == item.key]
        for other in line[line.index(offset) :] if line else [offset]:
            self.close(other)

    def __repr__(self) -> str:
        return f"lease {self.lease:#x} of partition {self.partition}"
