"""Transfers of items to other partitions and queues.

Owns: `TransferStep`. Dead letters, redrives, follow-ups and strays are all sent the same way: a record in the source's
outbox, made durable first; a delivery to the destination queue, which stores each sequence once; a confirmation to the
source. From one source to one destination one delivery is under way at a time, so that items arrive in order. A
delivery that fails is repeated after RETRY_AFTER, for ever.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from penstock.logs import codec
from penstock.loop.item_cache import Items
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import PartitionSet
from penstock.loop.requests import ConfirmRequest, DeliverRequest, Request
from penstock.rules import commands
from penstock.rules.commands import Stored
from penstock.rules.keys import KeyLine
from penstock.rules.outbox import pack_destination, unpack_destination
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import count, first_of, from_offsets, offsets
from penstock.rules.slots import SlotMap
from penstock.rules.state import OutboxEntry
from penstock.words import ids, origin
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import PenstockError, QueueHeld, QueueNotFound
from penstock.words.limits import MIB
from penstock.words.origin import Origin

SEND_ITEMS = 1_000
SEND_BYTES = 16 * MIB
"""About how much one transfer holds; a large item may exceed it."""
READ_ITEMS = 32
DEAD_LETTERS_PER_TURN = 4 * SEND_ITEMS
"""Dead letters that a partition sends in one turn."""
RETRY_AFTER = 1 * SECOND


class QueueRouter(msgspec.Struct):
    """How a queue reaches other queues; the broker provides it."""

    post: Callable[[int, Request], None]
    """Add a request to the pending ones of the queue of an incarnation; raises QueueNotFound."""
    map_of: Callable[[int], tuple[SlotMap, Sequence[int]]]
    """The slot map and the active partitions of the queue of an incarnation; raises QueueNotFound."""
    is_dead_queue: Callable[[str], bool]
    """Whether the queue of this name is the dead queue of another."""


class TransferStep:
    """Sends and stores the transfers of a queue."""

    def __init__(self, partitions: PartitionSet, router: QueueRouter) -> None:
        self._partitions = partitions
        self._router = router
        self.dead = 0
        """The incarnation of the dead queue; 0 is none."""
        self._spread = 0
        self._senders: dict[int, PartitionHandle] = {}
        """Partitions whose outboxes may hold transfers."""
        self.ending = False
        """Whether the queue is being deleted, so that nothing is sent."""

    @property
    def is_dead_queue(self) -> bool:
        """Whether this queue is the dead queue of another."""
        return self._router.is_dead_queue(self._partitions.name)

    @property
    def busy(self) -> bool:
        """Whether an outbox may hold a transfer."""
        return bool(self._senders)

    # -- at the source -------------------------------------------------------------------------------

    def send_buried(self) -> None:
        """Send buried items to the dead queue."""
        if self.ending:
            return
        for handle in self._partitions.usable():
            if handle.state.buried_set:
                chosen = first_of(handle.state.buried_set.runs, DEAD_LETTERS_PER_TURN)
                self._partitions.wants_turn = self._partitions.wants_turn or count(chosen) < len(handle.state.buried_set)
                with suppress(PenstockError):  # they stay buried, and the next turn tries again
                    self.send(handle, offsets(chosen), self.dead)

    def forward(self, handle: PartitionHandle, strays: Sequence[int]) -> None:
        """Send strays to the partitions that now own their slots."""
        self.send(handle, strays, self._partitions.incarnation, parking=False)

    def send(self, handle: PartitionHandle, chosen: Sequence[int], incarnation: int, *, parking: bool = True) -> None:
        """Record transfers of items to a queue, each to the partition of its key there.

        With `parking`, an item for which a key is parked in that queue goes back to the partition of the parked key.
        """
        self._check_not_ending()
        slots, active = self._router.map_of(incarnation)
        shares: dict[int, list[int]] = {}
        size = items_sent = 0
        for start in range(0, len(chosen), READ_ITEMS):
            for items in self._read(handle, from_offsets(sorted(chosen[start : start + READ_ITEMS]))):
                numbers = self._destinations(items, incarnation if parking else -1, slots, active)
                for offset, number, payload in zip(_offsets(items), numbers, items.batch.payloads, strict=True):
                    if items_sent and (size + len(payload) > SEND_BYTES or items_sent >= SEND_ITEMS):
                        self._record(handle, shares, incarnation)
                        size = items_sent = 0
                    shares.setdefault(number, []).append(offset)
                    size += len(payload)
                    items_sent += 1
        self._record(handle, shares, incarnation)

    def _record(self, handle: PartitionHandle, shares: dict[int, list[int]], incarnation: int) -> None:
        for number, share in shares.items():
            self._partitions.run(handle, commands.Send(share, pack_destination(incarnation, number)))
        shares.clear()
        self._spread += 1

    def _destinations(self, items: Items, parked_in: int, slots: SlotMap, active: Sequence[int]) -> list[int]:
        """The partition of each item: by key; without a key another one for each transfer; parked ones go back."""
        anywhere = active[self._spread % len(active)]
        numbers = slots.partitions_of(items.batch, anywhere)
        for index, packed in enumerate(items.batch.origins or ()):
            parking = origin.decode(packed).parking_in(parked_in) if packed is not None else None
            if parking is not None:
                numbers[index] = parking[0]
        return numbers

    def follow_ups(self, then: Sequence[tuple[int, Batch]]) -> list[commands.FollowUpBatch]:
        """Follow-ups, divided by destination partition."""
        self._check_not_ending()
        found: list[commands.FollowUpBatch] = []
        for incarnation, batch in then:
            slots, active = self._router.map_of(incarnation)
            self._spread += 1
            anywhere = active[self._spread % len(active)]
            numbers = slots.partitions_of(batch, anywhere)
            for number in sorted(set(numbers)):
                share = batch.take([index for index, other in enumerate(numbers) if other == number])
                found.append(commands.FollowUpBatch(pack_destination(incarnation, number), codec.pack_batch(share)))
        return found

    def stop_sending(self) -> bool:
        """Stop sending, if no outbox holds a transfer; whether it is stopped."""
        self.ending = not self.outgoing_count and not self.outbox_unreadable
        return self.ending

    @property
    def outbox_unreadable(self) -> bool:
        """Whether an outbox is not known: its partition is failing, in I/O or uncommitted."""
        handles = self._partitions.handles.values()
        return any(
            handle.error is not None or handle.in_io or (handle.is_usable and not handle.usable_partition.is_committed)
            for handle in handles
        )

    def _check_not_ending(self) -> None:
        if self.ending:
            raise QueueHeld(f"queue {self._partitions.name!r} is being deleted; it sends nothing any more")

    def note_senders(self) -> bool:
        """Note the partitions of this turn whose outboxes hold transfers; whether any partition may hold some."""
        for handle in self._partitions.touched:
            if handle.partition is not None and handle.partition.state.outbox:
                self._senders[handle.number] = handle
        return bool(self._senders)

    def send_outboxes(self, now: int) -> None:
        """Deliver the first transfers of every outbox that has no delivery under way."""
        for handle in [*self._senders.values()]:
            if not handle.is_usable or not handle.usable_partition.is_committed:
                continue
            if not handle.state.outbox:
                del self._senders[handle.number]
                continue
            for packed, outbox in handle.state.outbox.items():
                sent = handle.transfers_under_way.get(packed)
                if sent is None or (sent < 0 and now >= -sent):
                    self._send_first(handle, packed, outbox, now)

    def _send_first(self, handle: PartitionHandle, packed: bytes, outbox: Sequence[OutboxEntry], now: int) -> None:
        """Deliver the first transfers of an outbox, up to SEND_ITEMS or SEND_BYTES."""
        incarnation, partition = unpack_destination(packed)
        try:
            entries: list[tuple[int, Batch | None]] = []
            items = size = 0
            for entry in outbox:
                batch = codec.unpack_batch(entry.body) if entry.body else self._load(handle, entry, incarnation)
                entries.append((entry.sequence, batch))
                items += len(batch) if batch is not None else 0
                size += batch.size_bytes if batch is not None else 0
                if items >= SEND_ITEMS or size >= SEND_BYTES:
                    break
            request = DeliverRequest(partition, pack_destination(self._partitions.incarnation, handle.number), entries)
            request.on_done = self._confirmation(handle.number, packed, entries[-1][0])
            self._router.post(incarnation, request)
            # after the post: an interrupt in between sends it twice, and the destination stores it once
            handle.transfers_under_way[packed] = entries[-1][0]
        except PenstockError:
            handle.transfers_under_way[packed] = -(now + RETRY_AFTER)
            self._partitions.touch(handle)

    def _confirmation(self, number: int, packed: bytes, until: int) -> Callable[[Request], None]:
        """The `on_done` of a delivery: sends its result to the source queue, from any thread."""

        def confirm(done: Request) -> None:
            self._partitions.post(ConfirmRequest(number, packed, until, done.answer or () if done.error is None else (), done.error))

        return confirm

    def _load(self, handle: PartitionHandle, entry: OutboxEntry, incarnation: int) -> Batch | None:
        """The items of a transfer, each with its origin; None when damage took all."""
        batches = [self._with_origins(handle, items, incarnation) for items in self._read(handle, entry.runs)]
        return Batch.join(batches) if batches else None

    def _with_origins(self, handle: PartitionHandle, items: Items, incarnation: int) -> Batch:
        """Items as they are sent: without dedup id, with their origin.

        A time before which an item must not run goes along to another queue, unless the item is a dead letter.
        """
        batch, known = items.batch, items.batch.origins
        keys = batch.key_ids or [NO_KEY] * len(batch)
        packed = [
            origin.encode(self._origin(handle, offset, keys[index], items.produced_at, known[index] if known else None, incarnation))
            for index, offset in enumerate(_offsets(items))
        ]
        # in this queue the ttl starts again; another queue has its own
        ttls = batch.ttls if incarnation == self._partitions.incarnation else None
        burials, ats = handle.state.burials, None
        if batch.ats is not None and incarnation != self._partitions.incarnation:
            ats = [0 if offset in burials else at for offset, at in zip(_offsets(items), batch.ats, strict=True)]
        return msgspec.structs.replace(batch, ats=ats, dedups=None, dedup_windows=None, ttls=ttls, origins=packed)

    def _origin(self, handle: PartitionHandle, offset: int, key: int, produced_at: int, packed: bytes | None, incarnation: int) -> Origin:
        """The origin of an item that is sent: where it was, why it was buried, and where a key is parked for it."""
        state, partitions = handle.state, self._partitions
        before = origin.decode(packed) if packed is not None else None
        burial = state.burials.get(offset)
        if burial is None and before is not None:
            if incarnation != partitions.incarnation:
                return before
            parked = before.parked and before.incarnation != incarnation  # keys of other queues stay parked for it
            parked_in = before.parked_in if before.parked_in != incarnation else 0
            parked_id = before.parked_id if parked_in else ""
            return msgspec.structs.replace(before, forwarded=True, parked=parked, parked_in=parked_in, parked_id=parked_id)
        here = ids.format_id(handle.number, offset)
        if burial is None:
            return Origin(
                partitions.name, partitions.incarnation, here, produced_at=produced_at, forwarded=incarnation == partitions.incarnation
            )
        line = state.keys.by_key.get(key)
        others = [parking for parking in before.parkings if parking[0] != partitions.incarnation] if before is not None else []
        others.sort(key=lambda parking: parking[0] != incarnation)  # only one is kept: the destination's first
        return Origin(
            partitions.name,
            partitions.incarnation,
            here,
            burial.attempts,
            burial.reason,
            produced_at,
            burial.first_failed_at,
            burial.last_failed_at,
            burial.buried_at,
            parked=isinstance(line, KeyLine) and offset in line.parked,
            parked_in=others[0][0] if others else 0,
            parked_id=ids.format_id(*others[0][1:]) if others else "",
        )

    def confirm(self, request: ConfirmRequest) -> None:
        """Remove confirmed transfers from an outbox; after a failure plan the next delivery."""
        handle = self._partitions.handles.get(request.partition)
        if handle is None or handle.transfers_under_way.get(request.destination) != request.until:
            return
        if request.failed is not None:
            handle.transfers_under_way[request.destination] = -(self._partitions.now + RETRY_AFTER)
            self._partitions.touch(handle)
            return
        del handle.transfers_under_way[request.destination]
        if handle.is_usable:
            for sequence, base in request.arrived:
                self._partitions.run(handle, commands.ConfirmTransfer(request.destination, sequence, base))
            self._partitions.wants_turn = True

    # -- at the destination --------------------------------------------------------------------------

    def deliver(self, request: DeliverRequest) -> None:
        """Store transfers, without those stored before, up to the first that is refused."""
        partitions = self._partitions
        handle = partitions.handles.get(request.partition)
        if handle is None:
            raise QueueNotFound(f"queue {partitions.name!r} has no partition {request.partition}; the delivery is repeated")
        taken: list[tuple[int, int]] = []
        for sequence, batch in request.entries:
            try:
                taken.append((sequence, self._store(handle, request.source, sequence, batch)))
            except PenstockError:
                if not taken:
                    raise
                break
        partitions.answer(request, (handle, taken))

    def _store(self, handle: PartitionHandle, source: bytes, sequence: int, batch: Batch | None) -> int:
        if batch is None:
            return -1
        command = commands.Produce(batch, (), source, sequence, incarnation=self._partitions.incarnation, partition=handle.number)
        stored = self._partitions.run(handle, command)
        assert isinstance(stored, Stored)
        return stored.base

    def _read(self, handle: PartitionHandle, runs: list[int]) -> list[Items]:
        self._partitions.touch(handle)
        return handle.usable_partition.items(runs)

    @property
    def outgoing_count(self) -> int:
        """Number of transfers in the outboxes of this queue."""
        return sum(len(outbox) for handle in self._partitions.usable() for outbox in handle.state.outbox.values())

    def addressed_to(self, incarnation: int) -> int:
        """Number of transfers in the outboxes of this queue for another queue."""
        outboxes = (pair for handle in self._partitions.usable() for pair in handle.state.outbox.items())
        return sum(len(outbox) for packed, outbox in outboxes if unpack_destination(packed)[0] == incarnation)


def _offsets(items: Items) -> range:
    return range(items.start, items.start + len(items.batch))
