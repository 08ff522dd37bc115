"""After a resize: which items of a partition wait for another partition, and which slots no longer belong to it.

Owns: `Fence`, `Fences` and `MovedSlots`. Items of a fenced slot or key at position `since` or later wait until
partition `source` has resolved the items of the slot or key that it holds from before its position `mark`. Items before
`since` were here before the slot left and came back: they do not wait, because the other partition waits for them.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from penstock.rules.records import FenceSpec, pack_keys, unpack_keys
from penstock.rules.routing import SLOT_MASK

ENDLESS = 1 << 63


def pack_slots(slots: Iterable[int]) -> bytes:
    return array("H", sorted(slots)).tobytes()


def unpack_slots(packed: bytes) -> list[int]:
    return array("H", packed).tolist()


class Fence:
    """One fence: of whole slots until the old partition has resolved its backlog, then of the keys that are left."""

    __slots__ = ("keys", "mark", "number", "since", "slots", "source")

    def __init__(self, spec: FenceSpec) -> None:
        self.number = spec.number
        self.source = spec.source
        self.mark = spec.mark
        self.since = spec.since
        self.slots = None if spec.slots is None else frozenset(unpack_slots(spec.slots))
        self.keys = set(unpack_keys(spec.keys))

    def covers(self, key: int) -> bool:
        return key in self.keys if self.slots is None else key & SLOT_MASK in self.slots

    @property
    def spec(self) -> FenceSpec:
        slots = None if self.slots is None else pack_slots(self.slots)
        return FenceSpec(self.number, self.source, self.mark, self.since, slots, pack_keys(sorted(self.keys)))

    def __repr__(self) -> str:
        what = f"{len(self.keys)} keys" if self.slots is None else f"{len(self.slots)} slots"
        return f"Fence({self.number}: {what} wait for partition {self.source})"


class Fences:
    """All fences of a partition, oldest first."""

    __slots__ = ("_all",)

    def __init__(self) -> None:
        self._all: list[Fence] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Fence]:
        return iter(self._all)

    def waits_from(self, key: int) -> int:
        """The position from which on items of a key must wait; ENDLESS if none must."""
        return min((fence.since for fence in self._all if fence.covers(key)), default=ENDLESS)

    def add(self, spec: FenceSpec) -> None:
        fence = Fence(spec)
        if fence.slots or fence.keys:
            self._all.append(fence)

    def find(self, number: int) -> Fence | None:
        return next((fence for fence in self._all if fence.number == number), None)

    def drop_empty(self) -> None:
        self._all = [fence for fence in self._all if fence.slots or fence.keys]


class MovedSlots:
    """For one partition: slots that belong to other partitions, and from which position on their items are strays.

    Items before that position are the backlog that the slot's new partition waits for: they are handled here.
    """

    __slots__ = ("_awaited", "_backlog", "_number", "_owners", "_unknown")

    def __init__(
        self,
        owners: Sequence[int],
        number: int,
        backlog: Mapping[int, int],
        unknown: Collection[int] = (),
        awaited: Collection[int] = (),
    ) -> None:
        self._owners = owners
        self._number = number
        self._backlog = backlog
        """slot → position."""
        self._unknown = unknown
        """Partitions that cannot be asked what they wait for: all items of their slots are handled here."""
        self._awaited = awaited
        """Keys that wait in their new partition until their lines here are resolved."""

    def moved_any(self, keys: Iterable[int]) -> bool:
        """Whether one of these keys belongs to another partition."""
        owners, number = self._owners, self._number
        return any(owners[key & SLOT_MASK] != number for key in keys if key)

    def is_stray_key(self, key: int) -> bool:
        """Whether all items in a key's line are strays: its partition does not wait for them."""
        return key not in self._awaited and self.strays_from(key) == 0

    def strays_from(self, key: int) -> int:
        """The position from which on items of a key are strays; ENDLESS if none is."""
        slot = key & SLOT_MASK
        owner = self._owners[slot]
        if owner == self._number:
            return ENDLESS
        return self._backlog.get(slot, ENDLESS if owner in self._unknown else 0)
