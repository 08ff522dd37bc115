"""Where every item of a simulated broker is: looked up in its partitions, between two turns.

Owns: `ItemInventory`, and the invariants that need no model: counters equal a recount, a key is in one lease at a time,
nothing counts as damaged.
Only queues that ran a turn since the last look are looked at again. A failing partition cannot be looked into: while
there is one, `all_healthy` is False, and an item that is not found may be in it.
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
    state: ItemState
    buried: bool
    """Whether it was buried there, also if its transfer to a dead queue has begun."""


class ItemCopies:
    """All copies of an item, by state."""

    __slots__ = ("done", "live", "moving", "promised")

    def __init__(self) -> None:
        self.live: list[ItemCopy] = []
        self.moving: list[ItemCopy] = []
        self.done: list[ItemCopy] = []
        self.promised = False
        """A follow-up that is still in the outbox of the partition that completed its parent."""

    @property
    def anywhere(self) -> bool:
        return bool(self.live or self.moving or self.done or self.promised)

    @property
    def unresolved(self) -> bool:
        return bool(self.live or self.moving or self.promised)

    def __repr__(self) -> str:
        said = [f"{copy.place.partition}-{copy.place.offset} of {copy.place.incarnation:x} {copy.state.value}" for copy in self.copies()]
        return ", ".join([*said, *(["promised"] * self.promised)]) or "nowhere"

    def copies(self) -> Iterator[ItemCopy]:
        yield from self.live
        yield from self.moving
        yield from self.done


NOWHERE = ItemCopies()
FULL_LOOK = 10
"""At every tenth look, partitions that applied no records are looked into too."""


def _no_reader(incarnation: int, partition: int) -> ReadablePartition:
    raise AssertionError("`reader_of` is not set")


class ObservedPartition:
    """One partition as it was last seen."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.summary: Summary | None = None
        """The summary of a closed partition."""
        self.items: list[TrackedItem | None] = []
        """By offset; None where retention dropped an item before it was seen."""
        self.changes = -1
        """The number of records that it had applied."""
        self.copies: list[tuple[TrackedItem, ItemCopy]] = []
        """Every copy of an item in it."""
        self.states: list[ItemState] = []
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
        """Whether it was healthy at the look before the last."""
        self.failed = False
        """Whether it was failing or slow since it was last healthy, or at the look before."""
        self.failing = False
        """Whether it is failing or slow, or its queue's next turn extends its leases because it was."""
        self.takes_items = False
        """Whether items without a key may be stored in it."""


class ItemInventory:
    """Every partition of every queue, and every item in them."""

    def __init__(self, item_of: Callable[[bytes], TrackedItem], undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
        self.partitions: dict[tuple[int, int], ObservedPartition] = {}
        self.found: dict[TrackedItem, ItemCopies] = {}
        self._before: dict[TrackedItem, ItemCopies] = {}
        self.origins: dict[CopyPlace, Origin | None] = {}
        self.arrivals: list[tuple[TrackedItem, CopyPlace, Origin | None]] = []
        """Copies that were not found at the look before."""
        self.changed: set[int] = set()
        """Incarnations of queues that ran a turn since the last look."""
        self.all_healthy = True
        self.unfinished_leases: set[int] = set()
        """Queues with a lease that did not search all items in its turn and continues in the next one."""
        self._looks = 0
        self.reader_of: Callable[[int, int], ReadablePartition] = _no_reader
        """Opens the log of a closed partition (incarnation, number). Set by the harness."""
        self._item_of = item_of
        self._undisturbed = undisturbed

    def look(self, loops: Iterable[Loop]) -> None:
        """Look into all partitions of queues that have changed."""
        self.arrivals = []
        self._looks += 1
        there = {loop.engine.incarnation: loop for loop in loops}
        for owner in [owner for owner in self.partitions if owner[0] not in there or owner[1] not in there[owner[0]].engine.handles]:
            del self.partitions[owner]  # the queue was deleted, or a resize that needed the partition was abandoned
        with self._undisturbed():
            for incarnation, loop in there.items():
                if incarnation in self.changed:
                    for handle in loop.engine.handles.values():
                        self._look_into(incarnation, handle, recovering=handle in loop.engine._recovered)
        self.unfinished_leases = {incarnation for incarnation, loop in there.items() if loop.engine.lease_step.search_unfinished}
        self.changed.clear()
        self.all_healthy = all(seen.healthy for seen in self.partitions.values())
        self._gather()

    def _look_into(self, incarnation: int, handle: PartitionHandle, *, recovering: bool) -> None:
        seen = self.partitions.setdefault((incarnation, handle.number), ObservedPartition())
        closed = handle.closed and handle.summary is not None
        seen.was_healthy, seen.healthy = seen.healthy, closed or (handle.is_usable and not handle.usable_partition.failed)
        seen.failed = seen.failing or (seen.failed and not seen.was_healthy)
        seen.failing = handle.error is not None or recovering
        seen.failed = seen.failed or seen.failing
        paused = handle.summary.paused_produce if closed and handle.summary is not None else seen.healthy and handle.state.paused_produce
        seen.takes_items = seen.healthy and handle.fences_ready and not paused
        if not seen.healthy or (closed and seen.summary is handle.summary):
            return
        seen.summary = handle.summary if closed else None
        opened: ReadablePartition = self.reader_of(incarnation, handle.number) if closed else handle.usable_partition
        state = opened.state
        assert not state.lost and not opened.gaps, f"nothing was damaged, and partition {handle.number} has lost {state.lost.runs}"
        if state is not seen.state:
            self._forget(seen, state)
        elif isinstance(opened, Partition) and seen.changes == opened.records_applied and self._looks % FULL_LOOK:
            return
        seen.changes = opened.records_applied if isinstance(opened, Partition) else -1
        self._read(incarnation, handle.number, opened, seen)
        seen.states = states_of(state)
        seen.buried = set(state.burials)
        seen.dropped = set(offsets(state.dropped.runs))
        seen.held = {number: offsets(lease.runs()) for number, lease in state.leases.live.items()}
        seen.copies = [
            (item, ItemCopy(CopyPlace(incarnation, handle.number, offset), item_state, offset in seen.buried))
            for offset, (item, item_state) in enumerate(zip(seen.items, seen.states, strict=True)) if item is not None
        ]  # fmt: skip
        seen.policy = state.policy
        seen.paused = state.paused_lease
        bodies = [entry.body for line in state.outbox.values() for entry in line if entry.body]
        seen.promised = [self._item_of(payload) for body in bodies for payload in codec.unpack_batch(body).payloads]
        recount = Counter(seen.states)
        wrong = {name: value for name, value in state.counts._asdict().items() if value != recount[ItemState(name)]}
        assert not wrong, f"partition {handle.number} counts {wrong}, a recount gives {recount}"
        if seen.summary is not None:
            assert seen.summary.counts == state.counts, f"partition {handle.number} is closed, and its summary says {seen.summary.counts}"

    def _forget(self, seen: ObservedPartition, state: State) -> None:
        """Forget items of a partition that was reopened: offsets that were not durable may now be other items'."""
        seen.items = [item if offset in state.dropped else None for offset, item in enumerate(seen.items[: state.next_offset])]
        if not any(item is not None for item in seen.items):
            seen.items = []
        seen.state = state

    def _read(self, incarnation: int, number: int, opened: ReadablePartition, seen: ObservedPartition) -> None:
        """Read the items at offsets that were not seen before."""
        state = opened.state
        seen.items += [None] * (state.next_offset - len(seen.items))
        unread = [offset for offset, item in enumerate(seen.items) if item is None and offset not in state.dropped]
        if not unread:
            return
        for block in opened.items([edge for offset in unread for edge in (offset, offset + 1)]):
            for index, payload in enumerate(block.batch.payloads):
                item, place = self._item_of(payload), CopyPlace(incarnation, number, block.start + index)
                seen.items[place.offset] = item
                if item.arrival is None:
                    item.arrival = FirstSighting(self._looks, place.partition, place.offset)
                if place not in item.places:
                    item.places.append(place)
                    packed = block.batch.origins[index] if block.batch.origins is not None else None
                    self.origins[place] = origin.decode(packed) if packed is not None else None
                    self.arrivals.append((item, place, self.origins[place]))

    def _gather(self) -> None:
        self._before, self.found = self.found, {}
        for seen in self.partitions.values():
            if not seen.healthy:
                continue
            for item, copy in seen.copies:
                found = self.found.get(item)
                if found is None:
                    found = self.found[item] = ItemCopies()
                done = copy.state in (ItemState.COMPLETED, ItemState.CANCELLED)
                kind = found.done if done else found.moving if copy.state is ItemState.MOVING else found.live
                kind.append(copy)
            for item in seen.promised:
                self.found.setdefault(item, ItemCopies()).promised = True

    # -- look-ups --------------------------------------------------------------------------------------

    def of(self, item: TrackedItem) -> ItemCopies:
        return self.found.get(item, NOWHERE)

    def before(self, item: TrackedItem) -> ItemCopies:
        """Its copies at the look before the last."""
        return self._before.get(item, NOWHERE)

    def at(self, place: CopyPlace) -> TrackedItem | None:
        seen = self.partitions.get((place.incarnation, place.partition))
        return seen.items[place.offset] if seen is not None and place.offset < len(seen.items) else None

    def live_copy_in(self, item: TrackedItem, incarnation: int) -> ItemCopy | None:
        """An item's copy in a queue, if it is neither resolved nor being transferred."""
        return next((copy for copy in self.of(item).live if copy.place.incarnation == incarnation), None)

    def moved_from(self, incarnation: int) -> list[CopyPlace]:
        """Places in a queue whose items were transferred to another queue or partition."""
        return [place for item, place in self._done_in(incarnation) if place != item.places[-1] or item.deleted_with_queue]

    def perhaps_left(self, incarnation: int) -> int:
        """How many of these may have been completed there instead, because the queue that they went to was deleted
        unseen."""
        return sum(place == item.places[-1] and item.deleted_with_queue for item, place in self._done_in(incarnation))

    def _done_in(self, incarnation: int) -> list[tuple[TrackedItem, CopyPlace]]:
        done = ((item, copy.place) for item, found in self.found.items() for copy in found.done)
        return [(item, place) for item, place in done if place.incarnation == incarnation]

    def holds(self, place: CopyPlace, lease: int) -> bool:
        """Whether a lease held an item when its partition was last seen."""
        seen = self.partitions.get((place.incarnation, place.partition))
        return seen is not None and place.offset in seen.held.get(lease, ())

    def healthy(self, place: CopyPlace) -> bool:
        seen = self.partitions.get((place.incarnation, place.partition))
        return seen is not None and seen.healthy

    # -- checks without a model ------------------------------------------------------------------------

    def check_stats(self, loops: Iterable[Loop]) -> None:
        """Check that the statistics of a queue equal a recount.

        Transferred items do not count as completed; whether they arrived can be seen only while all partitions are
        healthy.
        """
        for loop in loops:
            incarnation = loop.engine.incarnation
            partitions = [self.partitions[incarnation, number] for number in loop.engine.handles]
            if not all(seen.healthy for seen in partitions):
                continue
            stats = loop.run_between_turns(lambda engine: queries.stats(engine, ReadStats()))
            recount = Counter(state for seen in partitions for state in seen.states)
            for state in ItemState:
                said, least, most = getattr(stats, state.value), recount[state], recount[state]
                if state is ItemState.COMPLETED:
                    least -= len(self.moved_from(incarnation))
                    most = least + self.perhaps_left(incarnation)
                    if not self.all_healthy or any(seen.dropped for seen in partitions):
                        continue
                right = least <= said <= most
                assert right, f"{said} items of {stats.name} are {state.value} by its statistics, and {least} to {most} are found"

    def check_keys(self) -> None:
        """Check that all leased items of a key in a queue are in one lease."""
        holders: dict[tuple[int, bytes], tuple[int, int]] = {}
        for (incarnation, partition), seen in self.partitions.items():
            for lease, held in seen.held.items() if seen.healthy else ():
                for offset in held:
                    item = seen.items[offset]
                    if item is not None and item.key is not None:
                        first = holders.setdefault((incarnation, item.key), (partition, lease))
                        assert first == (partition, lease), f"{item} is leased as {partition, lease} and its key as {first} too"
