"""The step of a turn that stores produced items: chooses the partition of each item.

Owns: `ProduceStep`. An item with a key goes to the partition of its slot. An item without a key, but with a dedup id or
in a request with an id, goes to the partition of that id's slot, so that a repetition finds it. All others go together
to the usable partition with the fewest ready items. A request that does not fit waits for room until its deadline. A
partition remembers a request id together with the version of the slot map by which the request was divided. A
repetition after a resize is looked up under the old versions first, and only items that none of them has are stored.
The chunks of a published write (broker/inbox.py) are remembered in the same way, by their sequence.
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
CANDIDATES = 64
"""Partitions among which the least busy one is chosen."""
AVOIDED = 1 << 60
"""Added to the ready items of a partition to avoid: it is chosen only when there is no other."""
FREE = -1
"""The partition of an item that may go to any."""
OTHER_ITEMS = Refused.of(InvalidRequest("this request id was used before, for other items; give each request an id of its own"))


class ProduceStep:
    """Stores produced items; keeps the requests that wait for room."""

    def __init__(self, partitions: PartitionSet) -> None:
        self._partitions = partitions
        self.waiting: list[requests.ProduceRequest] = []
        self._from = 0
        self.versions: set[int] = set()
        """Versions of the slot map by which requests with an id were divided since the queue was opened."""
        self.max_items = 0
        self.max_bytes = 0

    def run(self, request: requests.ProduceRequest) -> None:
        """Store the items, or let the request wait for room, after those that wait already."""
        if request.sequence:  # of a published write, which is on this disk already: limits do not apply
            self._check_not_paused()
            self._store_all(request)
        elif (self.max_items or self.max_bytes) and (self.waiting or not self._fits(request.batch)) and not self._is_stored(request):
            self.waiting.append(request)
        else:
            self._store_all(request)

    def retry(self, now: int) -> None:
        """Store waiting requests for which there is room now, in order; QueueFull at their deadlines."""
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
            partitions.answer(request, [self._store(self._least_busy().number, None, commands.Produce(batch, checked=True))])
            return
        left: Sequence[int] | None = None
        parts: list[StoredPart] = []
        if request.request is not None:
            self.versions.add(partitions.map.version)
            maps = (partitions.map, *partitions.older_maps) if request.sequence else partitions.older_maps
            parts, left = self._stored_parts(request, maps)
            if request.sequence and any(one.refused is not None for one in parts):
                left = []  # a sequence stands for all of a partition's items, so store none while some are unknown
        if left is None or left:
            rest = batch if left is None else batch.take(left)
            for number, indexes in self._divide(rest, request.request, partitions.map).items():
                share = rest if indexes is None else rest.take(indexes)
                whole = indexes if left is None else [left[index] for index in (range(len(rest)) if indexes is None else indexes)]
                parts.append(self._store(number, whole, self._command(request, share)))
        partitions.answer(request, parts)

    def _command(self, request: requests.ProduceRequest, share: Batch) -> commands.Produce:
        slots = self._partitions.map
        if request.sequence:
            return commands.Produce(share, source=_source(slots), sequence=request.sequence, dedup=True)
        return commands.Produce(share, None if request.request is None else _name(request.request, slots), checked=True)

    def _check_not_paused(self) -> None:
        """QueueHeld while producing is paused in a partition."""
        for number in self._partitions.active:
            handle = self._partitions.handles[number]
            if handle.is_usable and handle.state.paused_produce:
                raise QueueHeld(f"producing to queue {self._partitions.name!r} is paused; resume it or try again later")

    def _full(self) -> PenstockError:
        return QueueFull(f"queue {self._partitions.name!r} is full; wait until items are resolved, or raise max_items or max_bytes")

    def _fits(self, batch: Batch) -> bool:
        """Whether there is room. An empty queue takes a batch of any size."""
        items, size = self._partitions.unresolved(with_bytes=bool(self.max_bytes))
        if not items:
            return True
        if self.max_items and items + len(batch) > self.max_items:
            return False
        return not self.max_bytes or size + batch.size_bytes <= self.max_bytes

    def needs(self, request: requests.ProduceRequest) -> Collection[int]:
        """Numbers of the partitions that a request needs."""
        partitions, batch = self._partitions, request.batch
        if self.max_items or self.max_bytes:
            return partitions.handles.keys()  # their items are counted
        if request.request is not None:
            maps = (partitions.map, *partitions.older_maps)
            return {number for slots in maps for number in _partitions_of(batch, request.request, slots) if number in partitions.handles}
        if batch.key_ids is None and batch.dedups is None:
            return self._needs_for_any()
        found = set(_partitions_of(batch, None, partitions.map))
        if FREE in found:
            found.discard(FREE)
            found.update(self._needs_for_any())
        return found

    def _needs_for_any(self) -> Collection[int]:
        """For items that may go to any partition: a partition to open and wait for, if all usable ones are fuller.

        Other closed partitions are opened with it, for the next items. Of a partition that is being opened without a
        summary, after its last owner was killed, nobody knows how full it is: it is waited for only if none is usable.
        """
        partitions = self._partitions
        best = self._least_busy_of(self._candidates())
        if partitions.closed or partitions.handles_in_io:
            some = [partitions.handles[number] for number in self._candidates()]
            closed = [handle for handle in some if handle.closed]
            opening = [handle for handle in some if handle.is_opening and (best is None or handle.summary is not None)]
            emptiest = min([*closed, *opening], key=lambda handle: handle.unresolved[0], default=None)
            if emptiest is not None and (best is None or emptiest.unresolved[0] < best.state.ready):
                partitions.to_open.update((handle.number, handle) for handle in closed[:OPENED_AHEAD])
                return (emptiest.number,)
        return () if best is not None else partitions.active

    # -- choosing partitions -------------------------------------------------------------------------

    def _least_busy(self) -> PartitionHandle:
        """The partition for items that may go to any: usable, not paused, with the fewest ready items."""
        active = self._partitions.active
        best = self._least_busy_of(self._candidates()) or self._least_busy_of(active)
        if best is not None:
            return best
        self._check_not_paused()
        failing = self._partitions.handles[active[0]]
        raise StorageFailed(f"no partition of queue {self._partitions.name!r} is usable ({failing.error}); try again in a moment")

    def _least_busy_of(self, numbers: Sequence[int]) -> PartitionHandle | None:
        best: PartitionHandle | None = None
        fewest = 0
        for number in numbers:
            handle = self._partitions.handles[number]
            if handle.partition is None or not handle.is_usable or not handle.fences_ready:
                continue
            state = handle.partition.state
            if state.paused_produce:
                continue
            waits = state.ready if handle.avoid_until <= self._partitions.now else state.ready + AVOIDED
            if best is None or waits < fewest:
                best, fewest = handle, waits
        return best

    def _candidates(self) -> Sequence[int]:
        """The partitions to choose from: all, or CANDIDATES of many, different ones each time."""
        active = self._partitions.active
        if len(active) <= CANDIDATES:
            return active
        self._from = (self._from + CANDIDATES) % len(active)
        return [*active[self._from :], *active[: self._from]][:CANDIDATES]

    def _divide(self, batch: Batch, request: bytes | None, slots: SlotMap) -> dict[int, Sequence[int] | None]:
        """Divide a batch: partition → indexes of its items (None: all)."""
        numbers = _partitions_of(batch, request, slots)
        if len(set(numbers)) == 1:
            return {numbers[0] if numbers[0] != FREE else self._least_busy().number: None}
        shares: dict[int, Sequence[int] | None] = {**_by_partition(numbers)}
        free = shares.pop(FREE, None)
        if free is not None:
            least = self._least_busy().number
            shares[least] = sorted([*(shares.get(least) or ()), *free])
        return shares

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

    def _is_stored(self, request: requests.ProduceRequest) -> bool:
        """Whether every item is stored already, by a request id or dedup ids: then a full queue answers too."""
        if request.request is not None and self._stored_parts(request, (self._partitions.map, *self._partitions.older_maps))[1] == []:
            return True
        names = request.batch.dedups
        return names is not None and all(name is not None and self._knows_dedup(name) for name in names)

    def _knows_dedup(self, name: bytes) -> bool:
        handle = self._partitions.handles[self._partitions.map.owners[dedup_slot(name)]]
        return handle.is_usable and handle.state.dedup.get(name, handle.usable_partition.now().elapsed) is not None

    def _stored_parts(self, request: requests.ProduceRequest, maps: Sequence[SlotMap]) -> tuple[list[StoredPart], Sequence[int] | None]:
        """The parts of a request stored under these slot maps, and the indexes of the other items (None: all)."""
        assert request.request is not None
        parts: list[StoredPart] = []
        left: list[int] | None = None
        for slots in maps:
            for number, indexes in _by_partition(_partitions_of(request.batch, request.request, slots)).items():
                handle = self._partitions.handles.get(number)
                indexes = indexes if left is None else sorted(set(indexes).intersection(left))
                if handle is None or not indexes:
                    continue
                if not handle.is_usable:  # it may have them or not
                    left = _without(left, indexes, len(request.batch))
                    parts.append(StoredPart(number, indexes, None, Refused.of(handle.refusal)))
                    continue
                stored = _stored_part(handle, request, slots, len(indexes))
                if stored is not None:
                    left = _without(left, indexes, len(request.batch))
                    same = len(stored.offsets) == len(indexes)
                    parts.append(StoredPart(number, indexes, stored if same else None, None if same else OTHER_ITEMS))
        return parts, left


def _stored_part(handle: PartitionHandle, request: requests.ProduceRequest, slots: SlotMap, count: int) -> Stored | None:
    """What a partition stored of a request divided by that slot map; of a chunk the offsets are not known."""
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
    """The source name of chunks divided by a slot map, in `State.received_sequences`."""
    return b"inbox" + slots.version.to_bytes(4, "big")


def _partitions_of(batch: Batch, request: bytes | None, slots: SlotMap) -> list[int]:
    """The partition of each item."""
    owners = slots.owners
    default = FREE if request is None else owners[slot(request)]
    numbers = slots.partitions_of(batch, default)
    if batch.dedups is not None:
        for index, name in enumerate(batch.dedups):
            if name is not None:
                numbers[index] = owners[dedup_slot(name)]
    return numbers


def _by_partition(numbers: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, number in enumerate(numbers):
        found.setdefault(number, []).append(index)
    return found
