"""Which item of a whole queue is next?

Owns: `KeyOrder` and `PriorityOrder`, which check every lease that was handed out. Times are those of the model: what has passed since the
simulation began.
Keys are strict, whatever partitions the items of a key lie in. `KeyOrder` knows in which order items of a key were stored, and which keys
are parked by an item that was given up. An item loses its place in the order when nobody can say what it is: it was scheduled, sought,
sent to another queue, given up without parking its key, or the answer to its produce was lost.
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
    """The order of keys, queue by queue."""

    def __init__(self, census: ItemInventory) -> None:
        self._census = census
        self._lines: dict[tuple[int, bytes], list[TrackedItem]] = {}
        self.parked: dict[tuple[int, bytes], dict[TrackedItem, CopyPlace]] = {}
        """Queue and key → items that hold it though they were given up, each with the place where that happened."""
        self.maybe_parked: set[tuple[int, bytes]] = set()
        """Keys that are parked unless an operator's word, never answered, has freed them."""
        self._burials: dict[CopyPlace, TrackedItem] = {}
        """Places where an item was found buried, or as it left for a dead queue."""
        self._former: set[TrackedItem] = set()
        """Items that are buried, or were at the last look."""
        self._on_bury: dict[tuple[int, int], str] = {}
        self._just_parked: set[TrackedItem] = set()
        """Items that were given up since the last look, and park their keys."""

    def enter(self, tag: TrackedItem) -> None:
        """An item with a key was acknowledged: it has its place in the order in which items were found stored."""
        if tag.key is not None:
            tag.order = None if tag.out_of_order else tag.arrival
            self._lines.setdefault((tag.queue, tag.key), []).append(tag)

    # -- what happens to items by themselves ---------------------------------------------------------

    def follow(self) -> None:
        """Items that were given up, came back, or left."""
        self._just_parked.clear()
        burials = {place: tag for place, tag in self._burials.items() if not self._census.healthy(place)}
        for tag, found in self._census.found.items():
            for spot in (*found.live, *found.moving):
                if spot.buried:
                    burials[spot.place] = tag
                    if spot.place not in self._burials:
                        self._give_up(tag, spot)
                elif tag.key is not None and spot.life in HOLDS:
                    self._return(tag, spot)
                elif spot.life is ItemState.MOVING:
                    tag.attempt = 0
                    tag.forget_order()
        self._former = {*self._burials.values(), *burials.values()}
        self._burials = burials
        self._on_bury = {owner: seen.policy.on_bury for owner, seen in self._census.partitions.items()}

    def _give_up(self, tag: TrackedItem, spot: ItemCopy) -> None:
        tag.at = tag.not_before = tag.returning_to = tag.attempt = 0  # what is given up waits for nothing any more, and begins anew
        owner = spot.place[:2]
        now = self._census.partitions[owner].policy.on_bury
        before = self._on_bury.get(owner, now)
        if tag.key is not None and "park" == now == before:
            self.parked.setdefault((spot.place.incarnation, tag.key), {})[tag] = spot.place
            self._just_parked.add(tag)
            return
        tag.forget_order()
        if tag.key is not None and "park" in (now, before):  # nobody can say which came first
            self.maybe_parked.add((spot.place.incarnation, tag.key))

    def _return(self, tag: TrackedItem, spot: ItemCopy) -> None:
        """An item that parks its key is back in its place; if it was not sent there, it is a stranger."""
        assert tag.key is not None
        holders = self.parked.get((spot.place.incarnation, tag.key), {})
        if tag in holders and (spot.place == holders[tag] or spot.place.incarnation == tag.returning_to):
            del holders[tag]

    def sending(self, tags: Iterable[TrackedItem], incarnation: int, to: int) -> None:
        """An operator sends items to another queue: home to where their keys are parked, or away from there."""
        for tag in tags:
            if tag.key is not None:
                tag.returning_to = to if tag in self.parked.get((to, tag.key), {}) else 0
                if tag in self.parked.get((incarnation, tag.key), {}):
                    self.release(incarnation, tag.key)  # perhaps: it may be parked for others too

    def stuck(self) -> list[tuple[int, bytes]]:
        """Keys that an operator must free: what parks them will not return, or nobody knows whether they are parked."""
        found = set(self.maybe_parked)
        for (queue, key), holders in self.parked.items():
            for tag in holders:
                spot = self._census.lives_in(tag, queue)
                if tag.resolved or (spot is not None and not spot.buried):
                    found.add((queue, key))
        return sorted(found)

    def release(self, incarnation: int, key: bytes) -> None:
        """Somebody sets out to let a key go on without what was given up."""
        self.maybe_parked.add((incarnation, key))
        for tag in self.parked.pop((incarnation, key), {}):
            tag.forget_order()

    def clear_parked(self, incarnation: int, partition: int | None) -> list[bytes]:
        """Somebody sets out to clear what was given up; returns which keys that lets go on."""
        freed: list[bytes] = []
        for (queue, key), holders in self.parked.items():
            chosen = [tag for tag, buried_in in holders.items() if queue == incarnation and partition in (None, buried_in.partition)]
            for tag in chosen:
                del holders[tag]
                tag.forget_order()
            if chosen:
                freed.append(key)
                self.maybe_parked.add((queue, key))
        return freed

    def released(self, incarnation: int, keys: Iterable[bytes]) -> None:
        """These keys are surely not parked any more."""
        self.maybe_parked.difference_update((incarnation, key) for key in keys)

    def was_buried(self, tag: TrackedItem) -> bool:
        """Whether retention may let go of it though nobody completed it."""
        return tag in self._former

    def is_parked(self, incarnation: int, key: bytes) -> bool:
        return bool(self.parked.get((incarnation, key))) or (incarnation, key) in self.maybe_parked

    # -- a lease was handed out ----------------------------------------------------------------------

    def check(self, held: TrackedLease, per_key: int, others: list[TrackedLease], now: int) -> None:
        """Judge the items of a lease that was just given, as everything is after the turn that gave it."""
        given: dict[bytes, list[TrackedItem]] = {}
        for tag in held.open.values():
            if tag.key is not None:
                given.setdefault(tag.key, []).append(tag)
        for key, tags in given.items():
            assert len(tags) <= per_key, f"{tags} were given together, more than {per_key} of a key"
            self._check_alone(held, key, others, now)
            for place, tag in enumerate(tags):
                self._check_parked(held, tag, tags)
                self._check_earlier(held, tag, tags[:place])

    def _check_alone(self, held: TrackedLease, key: bytes, others: list[TrackedLease], now: int) -> None:
        for other in others:
            if other is not held and other.incarnation == held.incarnation and other.valid(now):
                for offset, tag in other.open.items():
                    place = CopyPlace(other.incarnation, other.partition, offset)
                    if offset in other.leaving and not self._census.holds(place, other.lease):
                        continue  # its holder has settled it, and will be told so
                    assert tag.key != key or tag.holder is not other, f"{held} has key {key!r} while {other} has {tag}"

    def _check_parked(self, held: TrackedLease, tag: TrackedItem, others: list[TrackedItem]) -> None:
        """Nothing goes past an item that was given up and parks the key; one that was not behind it may have been given just before."""
        assert tag.key is not None
        for holder, buried_in in self.parked.get((held.incarnation, tag.key), {}).items():
            later = holder.order is not None and tag.order is not None and holder.order.before(tag.order)
            passed = holder not in others and (later or (buried_in.partition == held.partition and holder not in self._just_parked))
            assert not passed, f"{held} was given {tag}, whose key is parked because {holder} was given up"

    def _check_earlier(self, held: TrackedLease, tag: TrackedItem, before: list[TrackedItem]) -> None:
        """Nothing of its key that was stored earlier waits in the queue."""
        if tag.order is None or tag.key is None or tag.queue != held.incarnation:
            return
        for earlier in self._lines[tag.queue, tag.key]:
            if earlier.order is None or not earlier.order.before(tag.order) or earlier in before:
                continue
            spot = self._census.lives_in(earlier, tag.queue)
            assert spot is None or spot.life not in HOLDS, f"{tag} was given before {earlier}, which is {self._census.of(earlier)}"


# -- ages and priorities -----------------------------------------------------------------------------


class ReadySince(NamedTuple):
    """An item that is ready: where, and since when at the earliest and at the latest."""

    place: CopyPlace
    earliest: int
    latest: int


class PriorityOrder:
    """Ages and priorities across the partitions of a queue: no lease takes an item while a clearly better one is ready elsewhere.

    Only items without a key are judged: what holds or frees a key is for `KeyOrder`. Only partitions count that were in order and not
    paused before and after the turn. A partition knows how long an item waits to a second (items that became ready within one are kept
    together), and a lease may stay in a partition for what is up to a second younger than the oldest elsewhere.
    """

    def __init__(self, census: ItemInventory) -> None:
        self._census = census
        self._waiting: dict[TrackedItem, ReadySince] = {}
        self._before: dict[TrackedItem, ReadySince] = {}
        """As it was at the look before the last."""
        self._giving: dict[tuple[int, int], object] = {}
        """Partitions that are in order and not paused, each with what tells whether it was opened anew since."""
        self._gave: dict[tuple[int, int], object] = {}
        self._sought: set[int] = set()
        """Queues of which items were sought: those stand before older ones, and at another priority."""
        self._rebooted = False
        self.judging = True
        """False while answers of a process that is gone are judged: what was ready then is not known."""

    def rebooted(self) -> None:
        """The date says how long the machine was off, and it may be wrong: what waits is younger or older than it seems."""
        self._rebooted = True

    def look(self, now: int, seeking: set[int]) -> None:
        """See what waits after a turn."""
        self._sought |= seeking
        giving: dict[tuple[int, int], object] = {
            owner: seen.state for owner, seen in self._census.partitions.items() if seen.healthy and not seen.paused
        }
        self._gave, self._giving = self._giving, giving
        self._before, self._waiting = self._waiting, {}
        for tag, found in self._census.found.items():
            for spot in found.live:
                if spot.life is ItemState.READY:
                    self._waiting[tag] = self._wait(self._before.get(tag), spot.place, now)
        self._rebooted = False

    def _wait(self, known: ReadySince | None, place: CopyPlace, now: int) -> ReadySince:
        if known is not None and known.place == place and not self._rebooted:
            return known
        seen = place[:2] in self._gave and not self._rebooted  # else it may have become ready while nobody could look
        return ReadySince(place, now if seen else -ENDLESS, now)

    def check(self, held: TrackedLease, now: int) -> None:
        """Judge the items of a lease that was just given, as everything is after the turn that gave it."""
        if not self.judging or held.incarnation in self._sought or not self._steady((held.incarnation, held.partition)):
            return
        if held.incarnation in self._census.unfinished_leases:
            return
        aging = self._census.partitions[held.incarnation, held.partition].policy.priority_aging
        passed = [(tag, wait) for tag, wait in self._waiting.items() if self._before.get(tag) == wait and self._elsewhere(held, tag, wait)]
        for offset, tag in held.open.items() if passed else ():
            place = CopyPlace(held.incarnation, held.partition, offset)
            taken = self._before.get(tag, ReadySince(place, now, now))
            if tag.key is not None or taken.place != place:
                continue
            best = lifted(tag.priority, now + UNSURE - taken.earliest, aging)
            for other, wait in passed:
                its = lifted(other.priority, now - wait.latest, aging)
                older = taken.earliest - wait.latest
                ahead = its < best or (its == best and older >= UNSURE)
                assert not ahead, (
                    f"{held} was given {tag} of priority {tag.priority}, while {other} of priority {other.priority}, "
                    f"{older / SECOND} s older, waits in partition {wait.place.partition}"
                )

    def _elsewhere(self, held: TrackedLease, tag: TrackedItem, wait: ReadySince) -> bool:
        """Whether an item lay in another partition of the queue all the time, and could have been leased there."""
        owner = wait.place[:2]
        return tag.key is None and owner[0] == held.incarnation and owner[1] != held.partition and self._steady(owner)

    def _steady(self, owner: tuple[int, int]) -> bool:
        """Whether a partition was in order before the turn and is so after it, and nothing happened to it in between."""
        return owner in self._gave and self._gave[owner] is self._giving.get(owner)
