"""Which item of a partition is next? The order of DESIGN §4, judged on plain items, one at a time.

Owns: `ModelItem` and the questions of order. O(n) everywhere, nothing kept: each question looks at all items anew.
Where two items became ready so closely together that the rules do not say which is first, either may be.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND

UNSURE = 2 * SECOND
"""By so much an item may count as waiting longer than it does: items ready within a second of each other are kept together,
and a lease stays in a partition for what is up to a second younger than the oldest elsewhere."""


@dataclass(slots=True, repr=False)
class ModelItem:
    """One item, as the rules see it."""

    offset: int
    key: bytes | None
    priority: int
    lane: int
    """The priority it competes with now: its own, unless a seek brought it back."""
    state: ItemState = ItemState.READY
    attempts: int = 0
    """Leases that ended without completing it."""
    reason: str = ""
    position: int = 0
    """How many items had been produced when it became ready; with a key it keeps this when it comes back."""
    arrival: tuple[int, str, int, int] = (0, "", 0, 0)
    """(step, cause, when, number): within a step the order of two causes is open, within a cause it is not."""
    returned: bool = False
    """It came back to its place, which may be taken for that of its offset though it became ready later."""
    jumps: bool = False
    """It came back when an operator had put others of its key before it: it may be first all the same."""
    ready_since: int = 0
    at: int = 0
    """Scheduled until this wall time, or (0) until `due`."""
    due: int = 0
    """Scheduled until this elapsed time; with a key it then holds that key."""
    ttl_deadline: int = 0
    overdue: bool = False
    """Its ttl ended while it was leased."""
    spared: bool = False
    """Its ttl ended while it was buried: perhaps that was noticed then, perhaps it is now."""
    parked: bool = False
    """Buried, and holding its key."""
    dropped: bool = False
    """Resolved, and its bytes let go by retention: it never comes back."""

    def __repr__(self) -> str:
        """Only what is to be said of it."""
        said = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        return f"ModelItem({', '.join(f'{name}={value}' for name, value, usual in said if value != usual)})"

    @property
    def waits(self) -> bool:
        return self.state in (ItemState.READY, ItemState.SCHEDULED)

    @property
    def backs_off(self) -> bool:
        return self.state is ItemState.SCHEDULED and self.due > 0

    @property
    def earliest(self) -> int:
        """The best position it may claim."""
        return min(self.position, self.offset) if self.returned else self.position


def holder_of_key(items: Iterable[ModelItem], key: bytes) -> ModelItem | None:
    """The item that holds a key: somebody works on it, or it backs off, or it was buried and parks the key."""
    return next((item for item in items if item.key == key and (item.state is ItemState.LEASED or item.parked or item.backs_off)), None)


def earlier_of_key(items: Iterable[ModelItem], item: ModelItem) -> ModelItem | None:
    """A ready item of the same key that must go before it, if there is one."""
    if item.jumps:
        return None
    return next((one for one in items if one.key == item.key and one.state is ItemState.READY and one.position < item.earliest), None)


def rivals(items: Iterable[ModelItem], item: ModelItem) -> bool:
    """Whether another ready item of its key may as well be first."""
    others = [one for one in items if one.key == item.key and one.state is ItemState.READY and one is not item]
    return any(item.jumps or one.jumps or (item.earliest <= one.position and one.earliest <= item.position) for one in others)


def available(items: list[ModelItem]) -> list[ModelItem]:
    """What may be leased: every ready item without a key, and the first of every key that nothing holds."""
    ready = [item for item in items if item.state is ItemState.READY]
    free = {key for key in {item.key for item in ready} if key is not None and holder_of_key(items, key) is None}
    return [item for item in ready if item.key is None or (item.key in free and earlier_of_key(ready, item) is None)]


def someone_ahead(items: list[ModelItem], item: ModelItem, now: int, aging: int) -> ModelItem | None:
    """The head of a lane that must go before `item`, if there is one."""
    lanes: dict[int, list[ModelItem]] = {}
    for other in available(items):
        if other.key is None or not rivals(items, other):
            lanes.setdefault(other.lane, []).append(other)
    heads = [min(lane, key=lambda one: (one.earliest, one.arrival)) for lane in lanes.values()]
    return next((head for head in heads if head is not item and _ahead(head, item, now, aging) and not _hidden(items, head)), None)


def _hidden(items: list[ModelItem], head: ModelItem) -> bool:
    """Whether others, not to be leased, that came later than a lane's head stand before it (a seek does that): its age may not be seen."""
    ready = [one for one in items if one.state is ItemState.READY and one.lane == head.lane]
    return any(one.earliest < head.position and one.ready_since > head.ready_since for one in ready)


def _ahead(head: ModelItem, item: ModelItem, now: int, aging: int) -> bool:
    """Whether a lane's head surely goes before an item of the same or of another lane."""
    its, best = _lifted(head, now, aging), _lifted(item, now + UNSURE, aging)
    if head.lane != item.lane:
        return its < best
    return its <= best and _before(head, item)


def _lifted(item: ModelItem, now: int, aging: int) -> int:
    return lifted(item.lane, now - item.ready_since, aging)


def lifted(priority: int, age: int, aging: int) -> int:
    """The priority that an item has gained by waiting: one step for each `aging`."""
    return max(0, priority - age // aging) if aging else priority


def _before(one: ModelItem, other: ModelItem) -> bool:
    """Whether one surely stands before the other in their lane."""
    if one.position != other.position or one.key is not None or other.key is not None:
        return one.position < other.earliest
    if one.arrival[0] == other.arrival[0] and one.arrival[1] != other.arrival[1]:
        return False
    return one.arrival < other.arrival
