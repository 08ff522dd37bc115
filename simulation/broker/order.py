"""The order of items in a whole queue.

Owns: `KeyOrder` and `PriorityOrder`, which check every granted lease. Times are those of the model: since the
simulation began.
The order of a key's items is strict, also across partitions. `KeyOrder` knows in which order the items of a key were
stored, and which keys are parked by buried items. An item has no known position after it was scheduled, sought,
redriven to another queue or buried without parking its key, or if the answer to its produce was lost.
"""

from collections.abc import Iterable
from typing import NamedTuple

from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND
from simulation.broker.inventory import ItemCopy, ItemInventory
from simulation.broker.items import ENDLESS, CopyPlace, TrackedItem, TrackedLease
from simulation.partition.order import UNSURE, lifted

HOLDS = (ItemState.READY, ItemState.LEASED, ItemState.SCHEDULED)


class KeyOrder:
    """The order of the items of each key, per queue."""

    def __init__(self, inventory: ItemInventory) -> None:
        self._inventory = inventory
        self._lines: dict[tuple[int, bytes], list[TrackedItem]] = {}
        self.parked: dict[tuple[int, bytes], dict[TrackedItem, CopyPlace]] = {}
        """(Queue, key) → the buried items that park it, each with the place where it was buried."""
        self.maybe_parked: set[tuple[int, bytes]] = set()
        """Keys that may be parked: an operation that releases them was not answered."""
        self._burials: dict[CopyPlace, TrackedItem] = {}
        """Places where an item was found buried, or moving to a dead queue."""
        self._former: set[TrackedItem] = set()
        """Items that are buried, or were at the look before."""
        self._on_bury: dict[tuple[int, int], str] = {}
        self._just_parked: set[TrackedItem] = set()
        """Items buried since the last look that park their keys."""

    def enter(self, item: TrackedItem) -> None:
        """An item with a key was acknowledged: its position is that at which it was first found."""
        if item.key is not None:
            item.order = None if item.out_of_order else item.arrival
            self._lines.setdefault((item.queue, item.key), []).append(item)

    # -- changes without a request ---------------------------------------------------------------------

    def follow(self) -> None:
        """Follow items that were buried, became ready again or were transferred."""
        self._just_parked.clear()
        burials = {place: item for place, item in self._burials.items() if not self._inventory.healthy(place)}
        for item, found in self._inventory.found.items():
            for copy in (*found.live, *found.moving):
                if copy.buried:
                    burials[copy.place] = item
                    if copy.place not in self._burials:
                        self._buried(item, copy)
                elif item.key is not None and copy.state in HOLDS:
                    self._ready_again(item, copy)
                elif copy.state is ItemState.MOVING:
                    item.attempt = 0
                    item.forget_order()
        self._former = {*self._burials.values(), *burials.values()}
        self._burials = burials
        self._on_bury = {owner: seen.policy.on_bury for owner, seen in self._inventory.partitions.items()}

    def _buried(self, item: TrackedItem, copy: ItemCopy) -> None:
        item.at = item.not_before = item.returning_to = item.attempt = 0  # a buried item has no delay, and its attempts start again
        owner = copy.place[:2]
        now = self._inventory.partitions[owner].policy.on_bury
        before = self._on_bury.get(owner, now)
        if item.key is not None and "park" == now == before:
            self.parked.setdefault((copy.place.incarnation, item.key), {})[item] = copy.place
            self._just_parked.add(item)
            return
        item.forget_order()
        if item.key is not None and "park" in (now, before):  # whether it was buried before or after the change is not known
            self.maybe_parked.add((copy.place.incarnation, item.key))

    def _ready_again(self, item: TrackedItem, copy: ItemCopy) -> None:
        """An item is ready again: it parks its key no longer if it is where it was buried, or was redriven to this
        queue."""
        assert item.key is not None
        holders = self.parked.get((copy.place.incarnation, item.key), {})
        if item in holders and (copy.place == holders[item] or copy.place.incarnation == item.returning_to):
            del holders[item]

    def redrive_sent(self, items: Iterable[TrackedItem], incarnation: int, to: int) -> None:
        """Items are about to be redriven: to the queue where their keys are parked for them, or away from it."""
        for item in items:
            item.not_before = 0  # the delay of a retry ends; a time that the item was given stays
            if item.key is not None:
                item.returning_to = to if item in self.parked.get((to, item.key), {}) else 0
                if item in self.parked.get((incarnation, item.key), {}):
                    self.release(incarnation, item.key)  # perhaps not: other items may park it too

    def stuck(self) -> list[tuple[int, bytes]]:
        """Keys that an operator must release: the item that parks them will not return, or it is not known whether they
        are parked."""
        found = set(self.maybe_parked)
        for (queue, key), holders in self.parked.items():
            for item in holders:
                copy = self._inventory.live_copy_in(item, queue)
                if item.resolved or (copy is not None and not copy.buried):
                    found.add((queue, key))
        return sorted(found)

    def release(self, incarnation: int, key: bytes) -> None:
        """A release of a parked key is about to be run."""
        self.maybe_parked.add((incarnation, key))
        for item in self.parked.pop((incarnation, key), {}):
            item.forget_order()

    def clear_parked(self, incarnation: int, partition: int | None) -> list[bytes]:
        """A clear of buried items is about to be run; returns the keys that it will release."""
        freed: list[bytes] = []
        for (queue, key), holders in self.parked.items():
            chosen = [item for item, buried_in in holders.items() if queue == incarnation and partition in (None, buried_in.partition)]
            for item in chosen:
                del holders[item]
                item.forget_order()
            if chosen:
                freed.append(key)
                self.maybe_parked.add((queue, key))
        return freed

    def released(self, incarnation: int, keys: Iterable[bytes]) -> None:
        """These keys are certainly not parked any more."""
        self.maybe_parked.difference_update((incarnation, key) for key in keys)

    def was_buried(self, item: TrackedItem) -> bool:
        """Whether an item is or was buried, so that retention may drop it although it was not completed."""
        return item in self._former

    def is_parked(self, incarnation: int, key: bytes) -> bool:
        return bool(self.parked.get((incarnation, key))) or (incarnation, key) in self.maybe_parked

    # -- checks of a granted lease ---------------------------------------------------------------------

    def check(self, held: TrackedLease, per_key: int, others: list[TrackedLease], now: int) -> None:
        """Check the items of a lease against the state after the turn that granted it."""
        given: dict[bytes, list[TrackedItem]] = {}
        for item in held.open.values():
            if item.key is not None:
                given.setdefault(item.key, []).append(item)
        for key, items in given.items():
            assert len(items) <= per_key, f"{items} were given together, more than {per_key} of a key"
            self._check_alone(held, key, others, now)
            for place, item in enumerate(items):
                self._check_parked(held, item, items)
                self._check_earlier(held, item, items[:place])

    def _check_alone(self, held: TrackedLease, key: bytes, others: list[TrackedLease], now: int) -> None:
        for other in others:
            if other is not held and other.incarnation == held.incarnation and other.valid(now):
                for offset, item in other.open.items():
                    place = CopyPlace(other.incarnation, other.partition, offset)
                    if offset in other.leaving and not self._inventory.holds(place, other.lease):
                        continue  # it was settled, and the answer is pending
                    assert item.key != key or item.holder is not other, f"{held} has key {key!r} while {other} has {item}"

    def _check_parked(self, held: TrackedLease, item: TrackedItem, others: list[TrackedItem]) -> None:
        """Check that no item is granted behind a buried item that parks its key. Others may have been granted just
        before the burial."""
        assert item.key is not None
        for holder, buried_in in self.parked.get((held.incarnation, item.key), {}).items():
            later = holder.order is not None and item.order is not None and holder.order.before(item.order)
            passed = holder not in others and (later or (buried_in.partition == held.partition and holder not in self._just_parked))
            assert not passed, f"{held} was given {item}, whose key is parked because {holder} was buried"

    def _check_earlier(self, held: TrackedLease, item: TrackedItem, before: list[TrackedItem]) -> None:
        """Check that no earlier item of the key is still unresolved in the queue."""
        if item.order is None or item.key is None or item.queue != held.incarnation:
            return
        for earlier in self._lines[item.queue, item.key]:
            if earlier.order is None or not earlier.order.before(item.order) or earlier in before:
                continue
            copy = self._inventory.live_copy_in(earlier, item.queue)
            assert copy is None or copy.state not in HOLDS, f"{item} was given before {earlier}, which is {self._inventory.of(earlier)}"


# -- ages and priorities ---------------------------------------------------------------------------


class ReadySince(NamedTuple):
    """A ready item: its place, and the earliest and latest time at which it became ready."""

    place: CopyPlace
    earliest: int
    latest: int


class PriorityOrder:
    """Ages and priorities across the partitions of a queue: no lease gets an item while a clearly better one is ready
    in another partition.

    Only items without a key are checked, and only in partitions that were healthy and not paused before and after the
    turn. A partition knows the age of an item to a second (items that became ready within one are kept together), and a
    lease may stay in a partition whose items are up to a second younger than the oldest of other partitions.
    """

    def __init__(self, inventory: ItemInventory) -> None:
        self._inventory = inventory
        self._waiting: dict[TrackedItem, ReadySince] = {}
        self._before: dict[TrackedItem, ReadySince] = {}
        """As it was at the look before the last."""
        self._leasable: dict[tuple[int, int], object] = {}
        """Healthy partitions that are not paused → their state object, which changes when they are reopened."""
        self._leasable_before: dict[tuple[int, int], object] = {}
        self._sought: set[int] = set()
        """Queues with a seek: sought items are before older ones, and at another priority."""
        self._rebooted = False
        self.judging = True
        """False while answers of an ended process are checked: the items that were ready then are not known."""

    def rebooted(self) -> None:
        """After a reboot the ages of items are not known: how long the machine was off is taken from its wall clock."""
        self._rebooted = True

    def look(self, now: int, seeking: set[int]) -> None:
        """Record the ready items after a turn."""
        self._sought |= seeking
        leasable: dict[tuple[int, int], object] = {
            owner: seen.state for owner, seen in self._inventory.partitions.items() if seen.healthy and not seen.paused
        }
        self._leasable_before, self._leasable = self._leasable, leasable
        self._before, self._waiting = self._waiting, {}
        for item, found in self._inventory.found.items():
            for copy in found.live:
                if copy.state is ItemState.READY:
                    self._waiting[item] = self._ready_since(self._before.get(item), copy.place, now)
        self._rebooted = False

    def _ready_since(self, known: ReadySince | None, place: CopyPlace, now: int) -> ReadySince:
        if known is not None and known.place == place and not self._rebooted:
            return known
        seen = place[:2] in self._leasable_before and not self._rebooted  # else it may have become ready unseen
        return ReadySince(place, now if seen else -ENDLESS, now)

    def check(self, held: TrackedLease, now: int) -> None:
        """Check the items of a lease against the state after the turn that granted it."""
        if not self.judging or held.incarnation in self._sought or not self._steady((held.incarnation, held.partition)):
            return
        if held.incarnation in self._inventory.unfinished_leases:
            return
        aging = self._inventory.partitions[held.incarnation, held.partition].policy.priority_aging
        passed = [
            (item, wait)
            for item, wait in self._waiting.items()
            if self._before.get(item) == wait and self._in_other_partition(held, item, wait)
        ]
        for offset, item in held.open.items() if passed else ():
            place = CopyPlace(held.incarnation, held.partition, offset)
            taken = self._before.get(item, ReadySince(place, now, now))
            if item.key is not None or taken.place != place:
                continue
            best = lifted(item.priority, now + UNSURE - taken.earliest, aging)
            for other, wait in passed:
                its = lifted(other.priority, now - wait.latest, aging)
                older = taken.earliest - wait.latest
                ahead = its < best or (its == best and older >= UNSURE)
                assert not ahead, (
                    f"{held} was given {item} of priority {item.priority}, while {other} of priority {other.priority}, "
                    f"{older / SECOND} s older, waits in partition {wait.place.partition}"
                )

    def _in_other_partition(self, held: TrackedLease, item: TrackedItem, wait: ReadySince) -> bool:
        """Whether an item was ready in another partition of the queue before and after the turn."""
        owner = wait.place[:2]
        return item.key is None and owner[0] == held.incarnation and owner[1] != held.partition and self._steady(owner)

    def _steady(self, owner: tuple[int, int]) -> bool:
        """Whether a partition was healthy before and after the turn and was not reopened in between."""
        return owner in self._leasable_before and self._leasable_before[owner] is self._leasable.get(owner)
