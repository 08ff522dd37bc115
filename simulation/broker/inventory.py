"""Where every item of a simulated broker is: looked up in its partitions, between two turns.

Owns: `ItemInventory`, and the invariants that need no model: an item is in one place at a time, a key is in one lease at a time, counters are
a recount, nothing counts as damaged.
Only queues that ran a turn since the last look are looked at again. A partition that fails has nothing to say: while there is one,
`whole` is False and nobody can say that an item is lost.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from penstock.broker import queries
from penstock.logs import codec
from penstock.loop.loop import Loop
from penstock.loop.partition import Partition
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_reader import ReadablePartition
from penstock.operations import ReadStats
from penstock.rules.item_states import ItemState
from penstock.rules.runs import offsets
from penstock.rules.state import State
from penstock.rules.summary import Summary
from penstock.words import origin
from penstock.words.limits import Policy
from penstock.words.origin import Origin
from simulation.broker.items import CopyPlace, FirstSighting, TrackedItem
from simulation.partition.checks import states_of


class ItemCopy(NamedTuple):
    """One copy of an item."""

    place: CopyPlace
    life: ItemState
    buried: bool
    """It was given up there, even if it is on its way to a dead queue already."""


class ItemCopies:
    """All copies of an item."""

    __slots__ = ("done", "live", "moving", "promised")

    def __init__(self) -> None:
        self.live: list[ItemCopy] = []
        self.moving: list[ItemCopy] = []
        self.done: list[ItemCopy] = []
        self.promised = False
        """A follow-up that waits in the outbox of the partition where it was promised."""

    @property
    def anywhere(self) -> bool:
        return bool(self.live or self.moving or self.done or self.promised)

    @property
    def unresolved(self) -> bool:
        return bool(self.live or self.moving or self.promised)

    def __repr__(self) -> str:
        said = [f"{spot.place.partition}-{spot.place.offset} of {spot.place.incarnation:x} {spot.life.value}" for spot in self.spots()]
        return ", ".join([*said, *(["promised"] * self.promised)]) or "nowhere"

    def spots(self) -> Iterator[ItemCopy]:
        yield from self.live
        yield from self.moving
        yield from self.done


NOWHERE = ItemCopies()
FULL_LOOK = 10
"""Every so many looks, partitions that say that nothing was applied to them are looked into too."""


def _no_reader(incarnation: int, partition: int) -> ReadablePartition:
    raise AssertionError("nobody has said how closed partitions are looked into")


class ObservedPartition:
    """What was last seen of one partition."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.summary: Summary | None = None
        """Of one that is closed."""
        self.tags: list[TrackedItem | None] = []
        """By offset; None where retention had let go of an item before it was looked at."""
        self.changes = -1
        """How many records it had applied."""
        self.spots: list[tuple[TrackedItem, ItemCopy]] = []
        """Every copy of an item in it."""
        self.lives: list[ItemState] = []
        self.buried: set[int] = set()
        self.dropped: set[int] = set()
        self.held: dict[int, list[int]] = {}
        """Lease → offsets."""
        self.promised: list[TrackedItem] = []
        self.policy = Policy()
        self.paused = False
        """Whether leasing is paused."""
        self.healthy = False
        self.was_healthy = False
        """At the look before the last."""
        self.takes_items = False
        """Whether it may be given items without a key."""


class ItemInventory:
    """Every partition of every queue, and every item in it."""

    def __init__(self, tag_of: Callable[[bytes], TrackedItem], undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
        self.partitions: dict[tuple[int, int], ObservedPartition] = {}
        self.found: dict[TrackedItem, ItemCopies] = {}
        self._before: dict[TrackedItem, ItemCopies] = {}
        self.origins: dict[CopyPlace, Origin | None] = {}
        self.arrivals: list[tuple[TrackedItem, CopyPlace, Origin | None]] = []
        """Copies that were not there at the last look."""
        self.changed: set[int] = set()
        """Incarnations of queues that ran a turn since the last look."""
        self.all_healthy = True
        self.unfinished_leases: set[int] = set()
        """Queues of which a lease did not look through everything in its turn: it goes on in the next."""
        self._looks = 0
        self.reader_of: Callable[[int, int], ReadablePartition] = _no_reader
        """Looks into the log of a partition that is closed. Set by the world."""
        self._tag_of = tag_of
        self._undisturbed = undisturbed

    def look(self, loops: Iterable[Loop]) -> None:
        """See what has changed."""
        self.arrivals = []
        self._looks += 1
        there = {loop.engine.incarnation: loop for loop in loops}
        for owner in [owner for owner in self.partitions if owner[0] not in there or owner[1] not in there[owner[0]].engine.handles]:
            del self.partitions[owner]  # the queue was deleted, or a resize that wanted the partition was given up
        with self._undisturbed():
            for incarnation, loop in there.items():
                if incarnation in self.changed:
                    for member in loop.engine.handles.values():
                        self._look_into(incarnation, member)
        self.unfinished_leases = {incarnation for incarnation, loop in there.items() if loop.engine.lease_step.search_unfinished}
        self.changed.clear()
        self.all_healthy = all(seen.healthy for seen in self.partitions.values())
        self._gather()

    def _look_into(self, incarnation: int, member: PartitionHandle) -> None:
        seen = self.partitions.setdefault((incarnation, member.number), ObservedPartition())
        closed = member.closed and member.summary is not None
        seen.was_healthy, seen.healthy = seen.healthy, closed or (member.is_usable and not member.usable_partition.failed)
        paused = member.summary.paused_produce if closed and member.summary is not None else seen.healthy and member.state.paused_produce
        seen.takes_items = seen.healthy and member.fences_ready and not paused
        if not seen.healthy or (closed and seen.summary is member.summary):
            return
        seen.summary = member.summary if closed else None
        opened: ReadablePartition = self.reader_of(incarnation, member.number) if closed else member.usable_partition
        state = opened.state
        assert not state.lost and not opened.gaps, f"nothing was damaged, and yet partition {member.number} lacks {state.lost.runs}"
        if state is not seen.state:
            self._forget(seen, state)
        elif isinstance(opened, Partition) and seen.changes == opened.records_applied and self._looks % FULL_LOOK:
            return
        seen.changes = opened.records_applied if isinstance(opened, Partition) else -1
        self._read(incarnation, member.number, opened, seen)
        seen.lives = states_of(state)
        seen.buried = set(state.burials)
        seen.dropped = set(offsets(state.dropped.runs))
        seen.held = {number: offsets(grant.runs()) for number, grant in state.leases.live.items()}
        seen.spots = [
            (tag, ItemCopy(CopyPlace(incarnation, member.number, offset), life, offset in seen.buried))
            for offset, (tag, life) in enumerate(zip(seen.tags, seen.lives, strict=True)) if tag is not None
        ]  # fmt: skip
        seen.policy = state.policy
        seen.paused = state.paused_lease
        bodies = [entry.body for line in state.outbox.values() for entry in line if entry.body]
        seen.promised = [self._tag_of(payload) for body in bodies for payload in codec.unpack_batch(body).payloads]
        recount = Counter(seen.lives)
        wrong = {name: value for name, value in state.counts._asdict().items() if value != recount[ItemState(name)]}
        assert not wrong, f"partition {member.number} counts {wrong}, but one by one there are {recount}"
        if seen.summary is not None:
            assert seen.summary.counts == state.counts, f"partition {member.number} is closed and said to have {seen.summary.counts}"

    def _forget(self, seen: ObservedPartition, state: State) -> None:
        """A partition was opened anew: offsets that were never durable may be given to other items."""
        seen.tags = [tag if offset in state.dropped else None for offset, tag in enumerate(seen.tags[: state.next_offset])]
        if not any(tag is not None for tag in seen.tags):
            seen.tags = []
        seen.state = state

    def _read(self, incarnation: int, number: int, opened: ReadablePartition, seen: ObservedPartition) -> None:
        """Learn what lies at offsets not seen before."""
        state = opened.state
        seen.tags += [None] * (state.next_offset - len(seen.tags))
        unread = [offset for offset, tag in enumerate(seen.tags) if tag is None and offset not in state.dropped]
        if not unread:
            return
        for items in opened.items([edge for offset in unread for edge in (offset, offset + 1)]):
            for index, payload in enumerate(items.batch.payloads):
                tag, place = self._tag_of(payload), CopyPlace(incarnation, number, items.start + index)
                seen.tags[place.offset] = tag
                if tag.arrival is None:
                    tag.arrival = FirstSighting(self._looks, place.partition, place.offset)
                if place not in tag.places:
                    tag.places.append(place)
                    packed = items.batch.origins[index] if items.batch.origins is not None else None
                    self.origins[place] = origin.decode(packed) if packed is not None else None
                    self.arrivals.append((tag, place, self.origins[place]))

    def _gather(self) -> None:
        self._before, self.found = self.found, {}
        for seen in self.partitions.values():
            if not seen.healthy:
                continue
            for tag, spot in seen.spots:
                found = self.found.get(tag)
                if found is None:
                    found = self.found[tag] = ItemCopies()
                kind = found.done if spot.life is ItemState.COMPLETED else found.moving if spot.life is ItemState.MOVING else found.live
                kind.append(spot)
            for tag in seen.promised:
                self.found.setdefault(tag, ItemCopies()).promised = True

    # -- looking things up ---------------------------------------------------------------------------

    def of(self, tag: TrackedItem) -> ItemCopies:
        return self.found.get(tag, NOWHERE)

    def before(self, tag: TrackedItem) -> ItemCopies:
        """As it was at the look before the last."""
        return self._before.get(tag, NOWHERE)

    def at(self, place: CopyPlace) -> TrackedItem | None:
        seen = self.partitions.get((place.incarnation, place.partition))
        return seen.tags[place.offset] if seen is not None and place.offset < len(seen.tags) else None

    def lives_in(self, tag: TrackedItem, incarnation: int) -> ItemCopy | None:
        """The copy of an item that a queue has, if it is neither resolved nor on its way elsewhere."""
        return next((spot for spot in self.of(tag).live if spot.place.incarnation == incarnation), None)

    def moved_from(self, incarnation: int) -> list[CopyPlace]:
        """Places in a queue whose items have gone on elsewhere."""
        return [place for tag, place in self._done_in(incarnation) if place != tag.places[-1] or tag.deleted_with_queue]

    def perhaps_left(self, incarnation: int) -> int:
        """How many of these may have been completed there instead: a queue was deleted, with what had come to it before anybody looked."""
        return sum(place == tag.places[-1] and tag.deleted_with_queue for tag, place in self._done_in(incarnation))

    def _done_in(self, incarnation: int) -> list[tuple[TrackedItem, CopyPlace]]:
        done = ((tag, spot.place) for tag, found in self.found.items() for spot in found.done)
        return [(tag, place) for tag, place in done if place.incarnation == incarnation]

    def holds(self, place: CopyPlace, lease: int) -> bool:
        """Whether an item was in a lease when its partition was last seen."""
        seen = self.partitions.get((place.incarnation, place.partition))
        return seen is not None and place.offset in seen.held.get(lease, ())

    def healthy(self, place: CopyPlace) -> bool:
        seen = self.partitions.get((place.incarnation, place.partition))
        return seen is not None and seen.healthy

    # -- what needs no model -------------------------------------------------------------------------

    def check_stats(self, loops: Iterable[Loop]) -> None:
        """The counters of a queue are a recount of its partitions. What went elsewhere is not counted among the completed, and that it
        arrived there can be seen only while every partition can."""
        for loop in loops:
            incarnation = loop.engine.incarnation
            partitions = [self.partitions[incarnation, number] for number in loop.engine.handles]
            if not all(seen.healthy for seen in partitions):
                continue
            stats = loop.run_between_turns(lambda turns: queries.stats(turns, ReadStats()))
            recount = Counter(life for seen in partitions for life in seen.lives)
            for life in ItemState:
                said, least, most = getattr(stats, life.value), recount[life], recount[life]
                if life is ItemState.COMPLETED:
                    least -= len(self.moved_from(incarnation))
                    most = least + self.perhaps_left(incarnation)
                    if not self.all_healthy or any(seen.dropped for seen in partitions):
                        continue
                right = least <= said <= most
                assert right, f"{said} items of {stats.name} are said to be {life.value}, and {least} to {most} are"

    def check_keys(self) -> None:
        """Of a key, everything that is leased in a queue is in one lease."""
        holders: dict[tuple[int, bytes], tuple[int, int]] = {}
        for (incarnation, partition), seen in self.partitions.items():
            for lease, held in seen.held.items() if seen.healthy else ():
                for offset in held:
                    tag = seen.tags[offset]
                    if tag is not None and tag.key is not None:
                        first = holders.setdefault((incarnation, tag.key), (partition, lease))
                        assert first == (partition, lease), f"{tag} is leased as {partition, lease} and its key as {first} too"
