"""Produce, for a whole queue: which partition takes which items.

Owns: `ProduceStep`. An item with a key goes where its slot lives; one without, but with a dedup id or in a request with an id, goes where
the slot of that id lives, so that its repetition finds it; all others go together to the partition with the least to do that is in
order. A request that does not fit waits for room until its deadline.
A request id is remembered by each partition under the version of the slot map that cut the request: a repetition after a resize looks
up the old versions first and adds only what none of them knows. So are the chunks of a drop (broker/inbox.py), by their sequence.
"""

from collections.abc import Collection, Sequence

from penstock.loop import requests
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import PartitionSet
from penstock.loop.requests import StoredPart
from penstock.rules import commands
from penstock.rules.commands import Stored
from penstock.rules.routing import dedup_slot, digest, slot
from penstock.rules.slots import SlotMap
from penstock.words.batch import Batch
from penstock.words.errors import InvalidRequest, PenstockError, QueueFull, QueueHeld, Refused, StorageFailed

OPENED_AHEAD = 8
"""Closed partitions that are opened together when one of them is wanted for items without a key."""
LOOKED_AT = 64
"""Partitions among which the one with the least to do is chosen."""
LATE = 1 << 60
"""Counts as so many items ready: a partition whose disk is late is chosen when there is no other."""
FREE = -1  # goes wherever there is least to do
OTHER_ITEMS = Refused.of(InvalidRequest("this request id was used before, for other items; give each request an id of its own"))


class ProduceStep:
    """The produces of a queue, and those that wait for room."""

    def __init__(self, partitions: PartitionSet) -> None:
        self._partitions = partitions
        self.waiting: list[requests.ProduceRequest] = []
        self._from = 0
        self.versions: set[int] = set()
        """Of the slot maps by which requests with an id were cut since the queue was opened."""
        self.max_items = 0
        self.max_bytes = 0

    def run(self, request: requests.ProduceRequest) -> None:
        """Store the items, or let the request wait for room, behind those who wait already."""
        if request.sequence:  # of a drop, which is on this disk already: limits do not hold it up
            self._check_taking()
            self._store_all(request)
        elif (self.max_items or self.max_bytes) and (self.waiting or not self._fits(request.batch)) and not self._adds_nothing(request):
            self.waiting.append(request)
        else:
            self._store_all(request)

    def retry(self, now: int) -> None:
        """Those that wait for room try again, in the order in which they came; who waited too long is told so."""
        still: list[requests.ProduceRequest] = []
        for request in self.waiting:
            if request.cancelled or request.done:
                continue
            if not still and self._fits(request.batch):
                self._partitions.attempt(request, self._store_all)
            elif request.deadline and request.deadline <= now:
                request.finish(error=self._full())
            else:
                still.append(request)
        self.waiting[:] = still

    def _store_all(self, request: requests.ProduceRequest) -> None:
        partitions, batch = self._partitions, request.batch
        if request.request is None and batch.key_ids is None and batch.dedups is None:
            partitions.answer(request, [self._store(self._least().number, None, commands.Produce(batch, checked=True))])
            return
        left: Sequence[int] | None = None
        placed: list[StoredPart] = []
        if request.request is not None:
            self.versions.add(partitions.map.version)
            maps = (partitions.map, *partitions.older_maps) if request.sequence else partitions.older_maps
            placed, left = self._known(request, maps)
            if request.sequence and any(one.refused is not None for one in placed):
                left = []  # a partition counts as having all that is its own, so none may be stored while nobody knows of some
        if left is None or left:
            cut = batch if left is None else batch.take(left)
            for number, indexes in self._cut(cut, request.request, partitions.map).items():
                share = cut if indexes is None else cut.take(indexes)
                whole = indexes if left is None else [left[index] for index in (range(len(cut)) if indexes is None else indexes)]
                placed.append(self._store(number, whole, self._command(request, share)))
        partitions.answer(request, placed)

    def _command(self, request: requests.ProduceRequest, share: Batch) -> commands.Produce:
        slots = self._partitions.map
        if request.sequence:
            return commands.Produce(share, source=_source(slots), sequence=request.sequence, dedup=True)
        return commands.Produce(share, None if request.request is None else _name(request.request, slots), checked=True)

    def _check_taking(self) -> None:
        """A drop waits while producing is paused."""
        for number in self._partitions.active:
            handle = self._partitions.handles[number]
            if handle.is_usable and handle.state.paused_produce:
                raise QueueHeld(f"producing to queue {self._partitions.name!r} is paused; resume it or try again later")

    def _full(self) -> PenstockError:
        return QueueFull(f"queue {self._partitions.name!r} is full; wait until items are resolved, or raise max_items or max_bytes")

    def _fits(self, batch: Batch) -> bool:
        """Whether there is room. A batch larger than the limit itself goes in when nothing else is there."""
        items, size = self._partitions.unresolved(with_bytes=bool(self.max_bytes))
        if not items:
            return True
        if self.max_items and items + len(batch) > self.max_items:
            return False
        return not self.max_bytes or size + batch.size_bytes <= self.max_bytes

    def needs(self, request: requests.ProduceRequest) -> Collection[int]:
        """Numbers of the partitions without which a request cannot be run."""
        partitions, batch = self._partitions, request.batch
        if self.max_items or self.max_bytes:
            return partitions.handles.keys()  # what is in them is counted
        if request.request is not None:
            maps = (partitions.map, *partitions.older_maps)
            return {home for slots in maps for home in _homes(batch, request.request, slots) if home in partitions.handles}
        if batch.key_ids is None and batch.dedups is None:
            return self._anywhere()
        found = set(_homes(batch, None, partitions.map))
        if FREE in found:
            found.discard(FREE)
            found.update(self._anywhere())
        return found

    def _anywhere(self) -> Collection[int]:
        """Of partitions that may take any item: the one to wait for until it is open, if that is better than all that are at hand.

        With it others are opened that are closed too: the next items will be for them.
        """
        partitions = self._partitions
        best = self._least_of(self._some())
        if partitions.closed or partitions.handles_in_io:
            some = [partitions.handles[number] for number in self._some()]
            closed = [handle for handle in some if handle.closed]
            emptiest = min(
                [*closed, *(handle for handle in some if handle.is_opening)], key=lambda handle: handle.unresolved[0], default=None
            )
            if emptiest is not None and (best is None or emptiest.unresolved[0] < best.state.ready):
                partitions.to_open.update((handle.number, handle) for handle in closed[:OPENED_AHEAD])
                return (emptiest.number,)
        return () if best is not None else partitions.active

    # -- where to ------------------------------------------------------------------------------------

    def _least(self) -> PartitionHandle:
        """The partition for items that may go anywhere: in order, taking items, with the fewest ready."""
        active = self._partitions.active
        best = self._least_of(self._some()) or self._least_of(active)
        if best is not None:
            return best
        if any(handle.is_usable and handle.state.paused_produce for handle in map(self._partitions.handles.__getitem__, active)):
            raise QueueHeld(f"producing to queue {self._partitions.name!r} is paused; resume it or try again later")
        broken = self._partitions.handles[active[0]]
        raise StorageFailed(f"no partition of queue {self._partitions.name!r} is in order ({broken.error}); try again in a moment")

    def _least_of(self, numbers: Sequence[int]) -> PartitionHandle | None:
        best: PartitionHandle | None = None
        fewest = 0
        for number in numbers:
            handle = self._partitions.handles[number]
            if handle.partition is None or not handle.is_usable or not handle.fences_ready:
                continue
            state = handle.partition.state
            if state.paused_produce:
                continue
            waits = state.ready if handle.avoid_until <= self._partitions.now else state.ready + LATE
            if best is None or waits < fewest:
                best, fewest = handle, waits
        return best

    def _some(self) -> Sequence[int]:
        """The partitions to choose from: all, or of very many some, other ones each time."""
        active = self._partitions.active
        if len(active) <= LOOKED_AT:
            return active
        self._from = (self._from + LOOKED_AT) % len(active)
        return [*active[self._from :], *active[: self._from]][:LOOKED_AT]

    def _cut(self, batch: Batch, request: bytes | None, slots: SlotMap) -> dict[int, Sequence[int] | None]:
        """Partition → indexes of its items (None: all)."""
        homes = _homes(batch, request, slots)
        if len(set(homes)) == 1:
            return {homes[0] if homes[0] != FREE else self._least().number: None}
        found: dict[int, list[int]] = {}
        for index, home in enumerate(homes):
            found.setdefault(home, []).append(index)
        cut: dict[int, Sequence[int] | None] = {home: indexes for home, indexes in found.items() if home != FREE}
        if FREE in found:
            least = self._least().number
            cut[least] = sorted([*(cut.get(least) or ()), *found[FREE]])
        return cut

    def _store(self, number: int, indexes: Sequence[int] | None, command: commands.Produce) -> StoredPart:
        partitions = self._partitions
        try:
            handle = partitions.handles[number]
            if not handle.fences_ready:
                raise StorageFailed(f"partition {number} is being prepared for keys that moved to it; try again in a moment")
            stored = partitions.run(handle, command)
        except PenstockError as error:
            return StoredPart(number, indexes, None, Refused.of(error))
        assert isinstance(stored, Stored)
        if len(stored.offsets) != len(command.batch):
            return StoredPart(number, indexes, None, OTHER_ITEMS)
        partitions.produced += stored.count
        return StoredPart(number, indexes, stored)

    # -- repetitions after a resize ------------------------------------------------------------------

    def _adds_nothing(self, request: requests.ProduceRequest) -> bool:
        """Whether it is the repetition of what is stored: it may be answered even when the queue is full."""
        if request.request is not None and self._known(request, (self._partitions.map, *self._partitions.older_maps))[1] == []:
            return True
        names = request.batch.dedups
        return names is not None and all(name is not None and self._remembers(name) for name in names)

    def _remembers(self, name: bytes) -> bool:
        handle = self._partitions.handles[self._partitions.map.owners[dedup_slot(name)]]
        return handle.is_usable and handle.state.dedup.get(name, handle.usable_partition.now().elapsed) is not None

    def _known(self, request: requests.ProduceRequest, maps: Sequence[SlotMap]) -> tuple[list[StoredPart], Sequence[int] | None]:
        """What is known of a request under these versions of the slot map, and the indexes that none of them has (None: all)."""
        assert request.request is not None
        placed: list[StoredPart] = []
        left: list[int] | None = None
        for slots in maps:
            for number, indexes in _grouped(_homes(request.batch, request.request, slots)).items():
                handle = self._partitions.handles.get(number)
                indexes = indexes if left is None else sorted(set(indexes).intersection(left))
                if handle is None or not indexes:
                    continue
                if not handle.is_usable:  # it cannot be asked, so nobody knows
                    left = _without(left, indexes, len(request.batch))
                    placed.append(StoredPart(number, indexes, None, Refused.of(handle.refusal)))
                    continue
                stored = _stored_before(handle, request, slots, len(indexes))
                if stored is not None:
                    left = _without(left, indexes, len(request.batch))
                    same = len(stored.offsets) == len(indexes)
                    placed.append(StoredPart(number, indexes, stored if same else None, None if same else OTHER_ITEMS))
        return placed, left


def _stored_before(handle: PartitionHandle, request: requests.ProduceRequest, slots: SlotMap, count: int) -> Stored | None:
    """What a partition has of a request that was cut by that map; of a chunk it only knows that it has it."""
    if request.sequence:
        return Stored(-1, count, repeated=True) if handle.state.received_sequences.get(_source(slots), 0) >= request.sequence else None
    known = handle.state.requests.get(_name(request.request or b"", slots), handle.usable_partition.now().elapsed)
    return None if known is None else Stored(known.base, known.count, known.ids, repeated=True)


def _without(left: list[int] | None, indexes: Sequence[int], count: int) -> list[int]:
    gone = set(indexes)
    return [index for index in (range(count) if left is None else left) if index not in gone]


def _name(request: bytes, slots: SlotMap) -> bytes:
    return digest(b"produce", request, slots.version.to_bytes(4, "big"))


def _source(slots: SlotMap) -> bytes:
    """What the chunks of drops that were cut by a map come from, for `State.producers`."""
    return b"inbox" + slots.version.to_bytes(4, "big")


def _homes(batch: Batch, request: bytes | None, slots: SlotMap) -> list[int]:
    """The partition of each item."""
    owners = slots.owners
    default = FREE if request is None else owners[slot(request)]
    homes = slots.partitions_of(batch, default)
    if batch.dedups is not None:
        for index, name in enumerate(batch.dedups):
            if name is not None:
                homes[index] = owners[dedup_slot(name)]
    return homes


def _grouped(homes: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, home in enumerate(homes):
        found.setdefault(home, []).append(index)
    return found
