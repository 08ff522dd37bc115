"""The step of a turn that stores produced items: chooses the partition of each item.

Owns: `ProduceStep`. An item with a key goes to the partition of its slot, an item with only a dedup id to the partition
of that id's slot. All others go together to the usable partition with the fewest ready items. A request that does not
fit waits for room until its deadline. A partition remembers which items of a call or request id it stored. A request
that may be known is looked up in every partition of the queue, also in retired and closed ones, and only items that
none of them has are stored. The chunks of a published write (broker/inbox.py) are remembered by their sequence and the
version of the slot map by which they were divided.
"""

from bisect import insort
from collections.abc import Collection, Sequence
from operator import attrgetter

from penstock.loop import requests
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import PartitionSet
from penstock.loop.requests import StoredPart, not_reached_error
from penstock.rules import commands
from penstock.rules.calls import RememberedAnswer
from penstock.rules.commands import Stored
from penstock.rules.routing import dedup_slot, slot
from penstock.rules.runs import from_offsets, offsets
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
OTHER_ITEMS = Refused.of(InvalidRequest("this call was made before, for other items; give each call of a session its own number"))


class ProduceStep:
    """Stores produced items; keeps the requests that wait for room."""

    def __init__(self, partitions: PartitionSet) -> None:
        self._partitions = partitions
        self.waiting: list[requests.ProduceRequest] = []
        """Requests that wait for room, by place."""
        self._last_place = 0
        self._from = 0
        self.max_items = 0
        self.max_bytes = 0

    def run(self, request: requests.ProduceRequest) -> None:
        """Store the items, or let the request wait for room, after those that wait already."""
        if request.sequence:  # of a published write, which is on this disk already: limits do not apply
            self._check_not_paused()
            self._partitions.answer(request, self._store_chunks(request))
        elif (self.max_items or self.max_bytes) and self._must_wait(request):
            insort(self.waiting, request, key=attrgetter("place"))  # one of an undone turn goes before those that came after it
        else:
            self._store_all(request)

    def _must_wait(self, request: requests.ProduceRequest) -> bool:
        """Whether there is no room for a request, or others wait already. It gets its place if it has none."""
        if not request.place:
            self._last_place += 1
            request.place = self._last_place
        return bool(self.waiting or not self._fits(request.batch)) and not self._is_stored(request)

    def retry(self, now: int) -> None:
        """Store waiting requests for which there is room now, in order; QueueFull at their deadlines."""
        still: list[requests.ProduceRequest] = []
        for request in self.waiting:
            if request.cancelled or request.done:
                continue
            fits = not still and self._fits(request.batch)
            if fits and self._can_store(request):
                self._partitions.attempt(request, self._store_all)
            elif request.deadline and request.deadline <= now:
                reason = not_reached_error(self._partitions.name) if fits else self._full()
                self._partitions.attempt(request, lambda late, reason=reason: self._refuse(late, reason))  # type: ignore[misc]
            else:
                still.append(request)
        self.waiting[:] = still

    def _can_store(self, request: requests.ProduceRequest) -> bool:
        """Whether no partition that the request stores in is closed or in I/O; closed ones are opened."""
        found = [self._partitions.handles[number] for number in self._stores_in(request)]
        for handle in found:
            self._partitions.request_open(handle)
        return not any(handle.closed or handle.is_worth_waiting_for for handle in found)

    def _refuse(self, request: requests.ProduceRequest, error: PenstockError) -> None:
        """Refuse all items, or those that were not stored when the same call was sent before."""
        parts, left = self._remembered_parts(request) if request.may_be_known else ([], None)
        if left is None:
            raise error
        self._partitions.answer(request, [*parts, self._refused_rest(left, error)])

    def _refused_rest(self, left: Sequence[int], error: PenstockError) -> StoredPart:
        """The items of a repeated call that could not be stored now; others were stored before."""
        return StoredPart(self._partitions.active[0], left, None, Refused.of(error))

    def _store_all(self, request: requests.ProduceRequest) -> None:
        partitions, batch = self._partitions, request.batch
        parts, left = self._remembered_parts(request) if request.may_be_known else ([], None)
        if left is None and batch.key_ids is None and batch.dedups is None:
            partitions.answer(request, [self._store(self._least_busy().number, None, self._command(request, batch, None))])
            return
        if left is None or left:
            try:
                parts += self._store_rest(request, left)
            except PenstockError as error:
                if left is None:
                    raise
                partitions.answer(request, [*parts, self._refused_rest(left, error)])
                return
        partitions.answer(request, sorted(parts, key=attrgetter("partition")) if request.may_be_known else parts)

    def _store_chunks(self, first: requests.ProduceRequest) -> list[StoredPart]:
        """Store a chunk and those that follow it, up to one of which something is refused.

        A sequence stands for all earlier chunks too. So no partition may get a chunk after one that it lacks, and no
        part of a chunk is stored while some partition cannot say whether it has its part.
        """
        found: list[StoredPart] = []
        for chunk in (first, *first.following):
            parts, left = self._stored_chunk_parts(chunk)
            if (left is None or left) and not any(one.refused is not None for one in parts):
                parts += self._store_rest(chunk, left)
            found += parts
            if any(one.refused is not None for one in parts):
                break
        return found

    def _store_rest(self, request: requests.ProduceRequest, left: Sequence[int] | None) -> list[StoredPart]:
        """Store the items at the indexes `left` (None: all) in the partitions that they go to."""
        rest = request.batch if left is None else request.batch.take(left)
        parts: list[StoredPart] = []
        for number, indexes in self._divide(rest, request).items():
            share = rest if indexes is None else rest.take(indexes)
            whole = indexes if left is None else [left[index] for index in (range(len(rest)) if indexes is None else indexes)]
            parts.append(self._store(number, whole, self._command(request, share, whole)))
        return parts

    def _command(self, request: requests.ProduceRequest, share: Batch, indexes: Sequence[int] | None) -> commands.Produce:
        if request.sequence:
            return commands.Produce(share, source=_source(self._partitions.map), sequence=request.sequence, dedup=True)
        which = None if indexes is None or not request.calls else from_offsets(indexes)
        return commands.Produce(share, request.calls, checked=True, indexes=which)

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
        partitions = self._partitions
        if self.max_items or self.max_bytes:
            return partitions.handles.keys()  # their items are counted
        if request.sequence:
            maps = (partitions.map, *partitions.older_maps)
            chunks = (request, *request.following)
            return {number for chunk in chunks for slots in maps for number in _chunk_shares(chunk, slots) if number in partitions.handles}
        return self._stores_in(request)

    def _stores_in(self, request: requests.ProduceRequest) -> Collection[int]:
        """Numbers of the partitions that the items of a request go to, and of those that must be asked for it."""
        partitions, batch = self._partitions, request.batch
        if batch.key_ids is None and batch.dedups is None:
            found = set(self._needs_for_any())
        else:
            found = set(_partitions_of(batch, partitions.map))
            if FREE in found:
                found.discard(FREE)
                found.update(self._needs_for_any())
        if request.may_be_known:
            found.update(number for number, handle in partitions.handles.items() if handle.must_be_asked(partitions.now))
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
        if len(active) == 1:
            only = self._partitions.handles[active[0]]
            if only.is_usable and only.fences_ready and not only.state.paused_produce:
                return only
        best = self._least_busy_of(self._candidates() if len(active) > CANDIDATES else active) or self._least_busy_of(active)
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

    def _divide(self, batch: Batch, request: requests.ProduceRequest) -> dict[int, Sequence[int] | None]:
        """Divide a batch of a request, or what is left of it: partition → indexes of its items (None: all)."""
        slots = self._partitions.map
        if batch is request.batch and request.sequence:
            found = _chunk_shares(request, slots)
        else:
            found = _divided(batch, slots, _chunk_default(request, slots) if request.sequence else FREE)
        if len(found) == 1:
            (number,) = found
            return {number if number != FREE else self._least_busy().number: None}
        shares: dict[int, Sequence[int] | None] = {**found}
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
        if stored.ids is not None or stored.repeated:
            if len(stored.offsets) != len(command.batch):
                return StoredPart(number, indexes, None, OTHER_ITEMS)
            if stored.ids is not None:
                handle.tally.note_duplicates(len(command.batch) - stored.count)
        return StoredPart(number, indexes, stored)

    # -- repetitions ---------------------------------------------------------------------------------

    def _is_stored(self, request: requests.ProduceRequest) -> bool:
        """Whether every item is stored already, by a call or by dedup ids: then a full queue answers too."""
        if request.may_be_known and self._remembered_parts(request)[1] == []:
            return True
        names = request.batch.dedups
        return names is not None and all(name is not None and self._knows_dedup(name) for name in names)

    def _knows_dedup(self, name: bytes) -> bool:
        handle = self._partitions.handles[self._partitions.map.owners[dedup_slot(name)]]
        return handle.is_usable and handle.state.duplicate_of(name, handle.usable_partition.now().elapsed) is not None

    def _remembered_parts(self, request: requests.ProduceRequest) -> tuple[list[StoredPart], Sequence[int] | None]:
        """The parts that partitions stored when the same call was sent before, and the indexes of the other items
        (None: all)."""
        partitions, count = self._partitions, len(request.batch)
        parts: list[StoredPart] = []
        known: set[int] = set()
        for handle in [*partitions.handles.values()]:
            answers = partitions.remembered(handle, request)
            for one in answers or ():
                stored = Stored(one.base, one.count, one.ids, repeated=True)
                indexes = range(count) if one.indexes is None else offsets(one.indexes)
                if len(indexes) != len(stored.offsets) or (indexes and indexes[-1] >= count):
                    raise InvalidRequest("this call was made before, for other items; give each call of a session its own number")
                if known.isdisjoint(indexes):
                    parts.append(StoredPart(handle.number, None if one.indexes is None else list(indexes), stored))
                    known.update(indexes)
            if answers and len(request.calls) > 1 and handle.is_usable:
                self._remember_session(handle, request, answers)
        return parts, [index for index in range(count) if index not in known] if parts else None

    def _remember_session(self, handle: PartitionHandle, request: requests.ProduceRequest, answers: Sequence[RememberedAnswer]) -> None:
        """Remember what is known by a request id also for the session's call: the request id is forgotten first."""
        call = request.calls[:1]
        if handle.state.calls.answers(call, handle.elapsed_at(self._partitions.now)) is None:
            self._partitions.run(handle, commands.RememberCall(call, answers))

    def _stored_chunk_parts(self, request: requests.ProduceRequest) -> tuple[list[StoredPart], Sequence[int] | None]:
        """The parts of a chunk that are stored already, and the indexes of the other items (None: all)."""
        parts: list[StoredPart] = []
        left: list[int] | None = None
        for slots in (self._partitions.map, *self._partitions.older_maps):
            for number, indexes in _chunk_shares(request, slots).items():
                handle = self._partitions.handles.get(number)
                indexes = indexes if left is None else sorted(set(indexes).intersection(left))
                if handle is None or not indexes:
                    continue
                if not handle.is_usable:  # it may have them or not
                    left = _without(left, indexes, len(request.batch))
                    parts.append(StoredPart(number, indexes, None, Refused.of(handle.refusal)))
                elif handle.state.received_sequences.get(_source(slots), 0) >= request.sequence:
                    left = _without(left, indexes, len(request.batch))
                    parts.append(StoredPart(number, indexes, Stored(-1, len(indexes), repeated=True)))  # its offsets are not known
        return parts, left


def _without(left: list[int] | None, indexes: Sequence[int], count: int) -> list[int]:
    gone = set(indexes)
    return [index for index in (range(count) if left is None else left) if index not in gone]


def _source(slots: SlotMap) -> bytes:
    """The source name of chunks divided by a slot map, in `State.received_sequences`."""
    return b"inbox" + slots.version.to_bytes(4, "big")


def _partitions_of(batch: Batch, slots: SlotMap, default: int = FREE) -> list[int]:
    """The partition of each item; that of an item without a key and a dedup id is `default`."""
    numbers = slots.partitions_of(batch, default)
    if batch.dedups is not None:
        for index, name in enumerate(batch.dedups):
            if name is not None:
                numbers[index] = slots.owners[dedup_slot(name)]
    return numbers


def _chunk_shares(request: requests.ProduceRequest, slots: SlotMap) -> dict[int, Sequence[int]]:
    """The shares of a chunk by a slot map: partition → indexes of its items. They are kept in the request."""
    found = request.shares.get(slots.version)
    if found is None:
        sole, batch = slots.sole_owner, request.batch
        found = {sole: range(len(batch))} if sole is not None else _divided(batch, slots, _chunk_default(request, slots))
        request.shares[slots.version] = found
    return found


def _chunk_default(request: requests.ProduceRequest, slots: SlotMap) -> int:
    """The partition of a chunk's items without a key: the same whenever the chunk is divided by that map."""
    return slots.owners[slot(request.request or b"")]


def _divided(batch: Batch, slots: SlotMap, default: int) -> dict[int, Sequence[int]]:
    """Partition → indexes of its items; `default` as in `_partitions_of`."""
    if batch.key_ids is None and batch.dedups is None:
        return {default: range(len(batch))}
    numbers = _partitions_of(batch, slots, default)
    first = numbers[0]
    if numbers.count(first) == len(numbers):
        return {first: range(len(batch))}
    found: dict[int, list[int]] = {number: [] for number in dict.fromkeys(numbers)}
    for index, number in enumerate(numbers):
        found[number].append(index)
    return {**found}
