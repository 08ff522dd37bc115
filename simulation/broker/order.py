"""Whose turn is it in a whole queue? Keys are strict, whatever partitions an item of a key lies in.

Owns: `Order`: in which order items of a key were stored, which keys an item that was given up parks, and the check of every lease
that was handed out. An item loses its place in the order when nobody can say what it is: it was scheduled, sought, sent to another
queue, given up without parking its key, or the answer to its produce was lost.
"""

from collections.abc import Iterable

from penstock.rules.life import Life
from simulation.broker.census import Census, Spot
from simulation.broker.items import Held, Place, Tag

HOLDS = (Life.READY, Life.LEASED, Life.SCHEDULED)


class Order:
    """The order of keys, queue by queue."""

    def __init__(self, census: Census) -> None:
        self._census = census
        self._lines: dict[tuple[int, bytes], list[Tag]] = {}
        self.parked: dict[tuple[int, bytes], dict[Tag, Place]] = {}
        """Queue and key → items that hold it though they were given up, each with the place where that happened."""
        self.perhaps: set[tuple[int, bytes]] = set()
        """Keys that are parked unless an operator's word, never answered, has freed them."""
        self._graves: dict[Place, Tag] = {}
        """Places where an item was found buried, or as it left for a dead queue."""
        self._former: set[Tag] = set()
        """Items that are buried, or were at the last look."""
        self._on_bury: dict[tuple[int, int], str] = {}
        self._just_parked: set[Tag] = set()
        """Items that were given up since the last look, and park their keys."""

    def enter(self, tag: Tag) -> None:
        """An item with a key was acknowledged: it has its place in the order in which items were found stored."""
        if tag.key is not None:
            tag.order = None if tag.out_of_order else tag.arrival
            self._lines.setdefault((tag.queue, tag.key), []).append(tag)

    # -- what happens to items by themselves ---------------------------------------------------------

    def follow(self) -> None:
        """Items that were given up, came back, or left."""
        self._just_parked.clear()
        graves = {place: tag for place, tag in self._graves.items() if not self._census.healthy(place)}
        for tag, found in self._census.found.items():
            for spot in (*found.live, *found.moving):
                if spot.buried:
                    graves[spot.place] = tag
                    if spot.place not in self._graves:
                        self._give_up(tag, spot)
                elif tag.key is not None and spot.life in HOLDS:
                    self._return(tag, spot)
                elif spot.life is Life.MOVING:
                    tag.attempt = 0
                    tag.forget_order()
        self._former = {*self._graves.values(), *graves.values()}
        self._graves = graves
        self._on_bury = {owner: room.policy.on_bury for owner, room in self._census.rooms.items()}

    def _give_up(self, tag: Tag, spot: Spot) -> None:
        tag.at = tag.not_before = tag.homing = tag.attempt = 0  # what is given up waits for nothing any more, and begins anew
        owner = spot.place[:2]
        now = self._census.rooms[owner].policy.on_bury
        before = self._on_bury.get(owner, now)
        if tag.key is not None and "park" == now == before:
            self.parked.setdefault((spot.place.incarnation, tag.key), {})[tag] = spot.place
            self._just_parked.add(tag)
            return
        tag.forget_order()
        if tag.key is not None and "park" in (now, before):  # nobody can say which came first
            self.perhaps.add((spot.place.incarnation, tag.key))

    def _return(self, tag: Tag, spot: Spot) -> None:
        """An item that parks its key is back in its place; if it was not sent there, it is a stranger."""
        assert tag.key is not None
        holders = self.parked.get((spot.place.incarnation, tag.key), {})
        if tag in holders and (spot.place == holders[tag] or spot.place.incarnation == tag.homing):
            del holders[tag]

    def sending(self, tags: Iterable[Tag], incarnation: int, to: int) -> None:
        """An operator sends items to another queue: home to where their keys are parked, or away from there."""
        for tag in tags:
            if tag.key is not None:
                tag.homing = to if tag in self.parked.get((to, tag.key), {}) else 0
                if tag in self.parked.get((incarnation, tag.key), {}):
                    self.release(incarnation, tag.key)  # perhaps: it may be parked for others too

    def stuck(self) -> list[tuple[int, bytes]]:
        """Keys that an operator must free: what parks them will not return, or nobody knows whether they are parked."""
        found = set(self.perhaps)
        for (queue, key), holders in self.parked.items():
            for tag in holders:
                spot = self._census.lives_in(tag, queue)
                if tag.resolved or (spot is not None and not spot.buried):
                    found.add((queue, key))
        return sorted(found)

    def release(self, incarnation: int, key: bytes) -> None:
        """Somebody sets out to let a key go on without what was given up."""
        self.perhaps.add((incarnation, key))
        for tag in self.parked.pop((incarnation, key), {}):
            tag.forget_order()

    def clear_parked(self, incarnation: int, partition: int | None) -> list[bytes]:
        """Somebody sets out to clear what was given up; says which keys that lets go on."""
        freed: list[bytes] = []
        for (queue, key), holders in self.parked.items():
            chosen = [tag for tag, grave in holders.items() if queue == incarnation and partition in (None, grave.partition)]
            for tag in chosen:
                del holders[tag]
                tag.forget_order()
            if chosen:
                freed.append(key)
                self.perhaps.add((queue, key))
        return freed

    def released(self, incarnation: int, keys: Iterable[bytes]) -> None:
        """These keys are surely not parked any more."""
        self.perhaps.difference_update((incarnation, key) for key in keys)

    def was_buried(self, tag: Tag) -> bool:
        """Whether retention may let go of it though nobody completed it."""
        return tag in self._former

    def is_parked(self, incarnation: int, key: bytes) -> bool:
        return bool(self.parked.get((incarnation, key))) or (incarnation, key) in self.perhaps

    # -- a lease was handed out ----------------------------------------------------------------------

    def check(self, held: Held, per_key: int, others: list[Held], now: int) -> None:
        """Judge the items of a lease that was just given, as everything is after the turn that gave it."""
        given: dict[bytes, list[Tag]] = {}
        for tag in held.open.values():
            if tag.key is not None:
                given.setdefault(tag.key, []).append(tag)
        for key, tags in given.items():
            assert len(tags) <= per_key, f"{tags} were given together, more than {per_key} of a key"
            self._check_alone(held, key, others, now)
            for place, tag in enumerate(tags):
                self._check_parked(held, tag, tags)
                self._check_earlier(held, tag, tags[:place])

    def _check_alone(self, held: Held, key: bytes, others: list[Held], now: int) -> None:
        for other in others:
            if other is not held and other.incarnation == held.incarnation and other.valid(now):
                for offset, tag in other.open.items():
                    place = Place(other.incarnation, other.partition, offset)
                    if offset in other.leaving and not self._census.holds(place, other.lease):
                        continue  # its holder has settled it, and will be told so
                    assert tag.key != key or tag.holder is not other, f"{held} has key {key!r} while {other} has {tag}"

    def _check_parked(self, held: Held, tag: Tag, others: list[Tag]) -> None:
        """Nothing goes past an item that was given up and parks the key; one that was not behind it may have been given just before."""
        assert tag.key is not None
        for holder, grave in self.parked.get((held.incarnation, tag.key), {}).items():
            later = holder.order is not None and tag.order is not None and holder.order.before(tag.order)
            passed = holder not in others and (later or (grave.partition == held.partition and holder not in self._just_parked))
            assert not passed, f"{held} was given {tag}, whose key is parked because {holder} was given up"

    def _check_earlier(self, held: Held, tag: Tag, before: list[Tag]) -> None:
        """Nothing of its key that was stored earlier waits in the queue."""
        if tag.order is None or tag.key is None or tag.queue != held.incarnation:
            return
        for earlier in self._lines[tag.queue, tag.key]:
            if earlier.order is None or not earlier.order.before(tag.order) or earlier in before:
                continue
            spot = self._census.lives_in(earlier, tag.queue)
            assert spot is None or spot.life not in HOLDS, f"{tag} was given before {earlier}, which is {self._census.of(earlier)}"
