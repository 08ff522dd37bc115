"""The order of a partition's items: which items may be leased next.

Owns: `ModelItem` and the functions about order. They keep nothing and look at all items each time, O(n).
Where the rules do not say which of two items is first, because they became ready close together, both are allowed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND

UNSURE = 2 * SECOND
"""How much longer an item may seem to have waited than it has: items that became ready within a second are kept
together, and a lease stays in a partition whose items are up to a second younger than the oldest of other
partitions."""


@dataclass(slots=True, repr=False)
class ModelItem:
    """One item of the model."""

    offset: int
    key: bytes | None
    priority: int
    lane: int
    """The priority at which it is leased: its own, or the default after a seek."""
    state: ItemState = ItemState.READY
    attempts: int = 0
    """Leases that ended without completing it."""
    reason: str = ""
    position: int = 0
    """The number of items that had been produced when it became ready. An item with a key keeps it when it returns."""
    arrival: tuple[int, str, int, int] = (0, "", 0, 0)
    """(step, cause, time, number). The order of two causes within a step is not defined; within a cause it is."""
    returned: bool = False
    """It returned to its position. The partition may order it by its offset instead."""
    jumps: bool = False
    """It returned after a seek or redrive put other items of its key before it: it may still be leased first."""
    ready_since: int = 0
    at: int = 0
    """Scheduled until this wall time, or (0) until `due`."""
    due: int = 0
    """Scheduled until this elapsed time; with a key it then holds that key, unless it is `rescheduled`."""
    rescheduled: bool = False
    """It was given its time by a reschedule: it holds nothing, and has no position to return to."""
    ttl_deadline: int = 0
    overdue: bool = False
    """Its ttl ended while it was leased."""
    spared: bool = False
    """Its ttl ended while it was buried: the partition may or may not bury it again."""
    parked: bool = False
    """Buried, and holding its key."""
    dropped: bool = False
    """Retention dropped it: it never becomes ready again."""

    def __repr__(self) -> str:
        """Only the fields that differ from their defaults."""
        said = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return f"ModelItem({', '.join(f'{name}={value}' for name, value, usual in said if value != usual)})"

    @property
    def waits(self) -> bool:
        return self.state in (ItemState.READY, ItemState.SCHEDULED)

    @property
    def backs_off(self) -> bool:
        return self.state is ItemState.SCHEDULED and self.due > 0 and not self.rescheduled

    @property
    def earliest(self) -> int:
        """The first position at which it may be."""
        return min(self.position, self.offset) if self.returned else self.position


def holder_of_key(items: Iterable[ModelItem], key: bytes) -> ModelItem | None:
    """The item that holds a key: it is leased, or backs off, or is buried and parks the key."""
    return next((item for item in items if item.key == key and (item.state is ItemState.LEASED or item.parked or item.backs_off)), None)


def earlier_of_key(items: Iterable[ModelItem], item: ModelItem) -> ModelItem | None:
    """A ready item of the same key that must be leased before `item`, if there is one."""
    if item.jumps:
        return None
    return next((one for one in items if one.key == item.key and one.state is ItemState.READY and one.position < item.earliest), None)


def rivals(items: Iterable[ModelItem], item: ModelItem) -> bool:
    """Whether another ready item of the same key may be first instead."""
    others = [one for one in items if one.key == item.key and one.state is ItemState.READY and one is not item]
    return any(item.jumps or one.jumps or (item.earliest <= one.position and one.earliest <= item.position) for one in others)


def available(items: list[ModelItem]) -> list[ModelItem]:
    """The items that may be leased: all ready items without a key, and the first item of each key that is not held."""
    ready = [item for item in items if item.state is ItemState.READY]
    free = {key for key in {item.key for item in ready} if key is not None and holder_of_key(items, key) is None}
    return [item for item in ready if item.key is None or (item.key in free and earlier_of_key(ready, item) is None)]


def someone_ahead(items: list[ModelItem], item: ModelItem, now: int, aging: int) -> ModelItem | None:
    """The head of a lane that must be leased before `item`, if there is one."""
    lanes: dict[int, list[ModelItem]] = {}
    for other in available(items):
        if other.key is None or not rivals(items, other):
            lanes.setdefault(other.lane, []).append(other)
    heads = [min(lane, key=lambda one: (one.earliest, one.arrival)) for lane in lanes.values()]
    return next((head for head in heads if head is not item and _ahead(head, item, now, aging) and not _hidden(items, head)), None)


def _hidden(items: list[ModelItem], head: ModelItem) -> bool:
    """Whether younger items stand before a lane's head, as after a seek: the partition may then not see the head's
    age."""
    ready = [one for one in items if one.state is ItemState.READY and one.lane == head.lane]
    return any(one.earliest < head.position and one.ready_since > head.ready_since for one in ready)


def _ahead(head: ModelItem, item: ModelItem, now: int, aging: int) -> bool:
    """Whether a lane's head must be leased before an item of the same or another lane."""
    its, best = _lifted(head, now, aging), _lifted(item, now + UNSURE, aging)
    if head.lane != item.lane:
        return its < best
    return its <= best and _before(head, item)


def _lifted(item: ModelItem, now: int, aging: int) -> int:
    return lifted(item.lane, now - item.ready_since, aging)


def lifted(priority: int, age: int, aging: int) -> int:
    """The priority of an item after waiting: it rises by one for each `aging`."""
    return max(0, priority - age // aging) if aging else priority


def _before(one: ModelItem, other: ModelItem) -> bool:
    """Whether `one` must be before `other` in their lane."""
    if one.position != other.position or one.key is not None or other.key is not None:
        return one.position < other.earliest
    if one.arrival[0] == other.arrival[0] and one.arrival[1] != other.arrival[1]:
        return False
    return one.arrival < other.arrival
