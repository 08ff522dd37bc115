"""Transfers: what leaves a queue and what arrives.

Owns: `TransferStep`. Dead letters, redrives, follow-ups and items whose key lives elsewhere now all go the same way: a record in the
source's outbox, durable before anything else happens; a delivery to the queue of the destination, which takes each sequence once; the
news of its arrival back to the source. One transfer at a time is under way per source and destination, so that they arrive in order.
One that fails is tried again after a while; nothing is dropped.
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
"""A transfer holds about so much; an item more, if it is large."""
READ_ITEMS = 32
DISPATCH_ITEMS = 4 * SEND_ITEMS
"""Dead letters that leave a partition in one turn."""
RETRY_AFTER = 1 * SECOND


class QueueRouter(msgspec.Struct):
    """How a queue reaches others: set by the broker."""

    post: Callable[[int, Request], None]
    """Put a request into the inbox of the queue with that incarnation; raises QueueNotFound."""
    map_of: Callable[[int], tuple[SlotMap, Sequence[int]]]
    """The slot map and the partitions that take items of a queue; raises QueueNotFound."""


class TransferStep:
    """The transfers of a queue."""

    def __init__(self, partitions: PartitionSet, office: QueueRouter) -> None:
        self._partitions = partitions
        self._office = office
        self.dead = 0
        """The incarnation of the dead queue; 0 is none."""
        self._spread = 0
        self._senders: dict[int, PartitionHandle] = {}
        """Partitions whose outboxes may hold something."""
        self.ending = False
        """The queue is being deleted: nothing leaves any more."""

    @property
    def busy(self) -> bool:
        """Whether an outbox may hold something."""
        return bool(self._senders)

    # -- at the source -------------------------------------------------------------------------------

    def send_buried(self) -> None:
        """With a dead queue, whatever is buried here leaves for it."""
        if self.ending:
            return
        for member in self._partitions.usable():
            if member.state.buried_set:
                chosen = first_of(member.state.buried_set.runs, DISPATCH_ITEMS)
                self._partitions.wants_turn = self._partitions.wants_turn or count(chosen) < len(member.state.buried_set)
                with suppress(PenstockError):  # it stays buried, and is tried again in the next turn
                    self.send(member, offsets(chosen), self.dead)

    def forward(self, member: PartitionHandle, strays: Sequence[int]) -> None:
        """Items that became ready where their slot no longer lives leave for where it does."""
        self.send(member, strays, self._partitions.incarnation, parking=False)

    def send(self, member: PartitionHandle, chosen: Sequence[int], incarnation: int, *, parking: bool = True) -> None:
        """Items leave for another queue (or this one), each for the partition where its key lives there.

        With `parking`, one for which a key is parked in that queue goes back to its old place.
        """
        self._refuse_at_the_end()
        slots, active = self._office.map_of(incarnation)
        shares: dict[int, list[int]] = {}
        size = items_sent = 0
        for start in range(0, len(chosen), READ_ITEMS):
            for items in self._read(member, from_offsets(sorted(chosen[start : start + READ_ITEMS]))):
                homes = self._homes(items, incarnation if parking else -1, slots, active)
                for offset, home, payload in zip(_offsets(items), homes, items.batch.payloads, strict=True):
                    if items_sent and (size + len(payload) > SEND_BYTES or items_sent >= SEND_ITEMS):
                        self._enter(member, shares, incarnation)
                        size = items_sent = 0
                    shares.setdefault(home, []).append(offset)
                    size += len(payload)
                    items_sent += 1
        self._enter(member, shares, incarnation)

    def _enter(self, member: PartitionHandle, shares: dict[int, list[int]], incarnation: int) -> None:
        for home, share in shares.items():
            self._partitions.run(member, commands.Send(share, pack_destination(incarnation, home)))
        shares.clear()
        self._spread += 1

    def _homes(self, items: Items, parked_in: int, slots: SlotMap, active: Sequence[int]) -> list[int]:
        """Where items go: by key; without one all together to one partition after the other; parked ones back to their old place."""
        anywhere = active[self._spread % len(active)]
        homes = slots.partitions_of(items.batch, anywhere)
        for index, packed in enumerate(items.batch.origins or ()):
            parking = origin.decode(packed).parking_in(parked_in) if packed is not None else None
            if parking is not None:
                homes[index] = parking[0]
        return homes

    def follow_ups(self, then: Sequence[tuple[int, Batch]]) -> list[commands.FollowUpBatch]:
        """Follow-ups as letters: cut by destination."""
        self._refuse_at_the_end()
        found: list[commands.FollowUpBatch] = []
        for incarnation, batch in then:
            slots, active = self._office.map_of(incarnation)
            self._spread += 1
            anywhere = active[self._spread % len(active)]
            homes = slots.partitions_of(batch, anywhere)
            for home in sorted(set(homes)):
                share = batch.take([index for index, there in enumerate(homes) if there == home])
                found.append(commands.FollowUpBatch(pack_destination(incarnation, home), codec.pack_batch(share)))
        return found

    def stop_sending(self) -> bool:
        """Nothing leaves from now on, unless something is on its way still; whether that is so."""
        self.ending = not self.outgoing_count and not self.outbox_unreadable
        return self.ending

    @property
    def outbox_unreadable(self) -> bool:
        """Whether an outbox cannot be looked at: its partition is failing or out, or what is seen there is not committed yet."""
        members = self._partitions.handles.values()
        return any(
            member.error is not None or member.in_io or (member.is_usable and not member.usable_partition.is_committed)
            for member in members
        )

    def _refuse_at_the_end(self) -> None:
        if self.ending:
            raise QueueHeld(f"queue {self._partitions.name!r} is being deleted; nothing leaves it any more")

    def note_senders(self) -> None:
        """Partitions that were used in this turn may have something to send."""
        for member in self._partitions.touched:
            if member.partition is not None and member.partition.state.outbox:
                self._senders[member.number] = member

    def send_outboxes(self, now: int) -> None:
        """Set out with the first transfer of every outbox that has none under way."""
        for member in [*self._senders.values()]:
            if not member.is_usable or not member.usable_partition.is_committed:
                continue
            if not member.state.outbox:
                del self._senders[member.number]
                continue
            for packed, line in member.state.outbox.items():
                under_way = member.transfers_under_way.get(packed)
                if under_way is None or (under_way < 0 and now >= -under_way):
                    self._set_out(member, packed, line, now)

    def _set_out(self, member: PartitionHandle, packed: bytes, line: Sequence[OutboxEntry], now: int) -> None:
        """With as many of the first transfers as make a good load."""
        incarnation, partition = unpack_destination(packed)
        try:
            entries: list[tuple[int, Batch | None]] = []
            items = size = 0
            for entry in line:
                batch = codec.unpack_batch(entry.body) if entry.body else self._load(member, entry, incarnation)
                entries.append((entry.sequence, batch))
                items += len(batch) if batch is not None else 0
                size += batch.size_bytes if batch is not None else 0
                if items >= SEND_ITEMS or size >= SEND_BYTES:
                    break
            request = DeliverRequest(partition, pack_destination(self._partitions.incarnation, member.number), entries)
            request.on_done = self._news(member.number, packed, entries[-1][0])
            self._office.post(incarnation, request)
            member.transfers_under_way[packed] = entries[-1][
                0
            ]  # after it is posted: an interrupt in between has it sent twice, and it is taken once
        except PenstockError:
            member.transfers_under_way[packed] = -(now + RETRY_AFTER)
            self._partitions.touch(member)

    def _news(self, number: int, packed: bytes, until: int) -> Callable[[Request], None]:
        """What to do when a delivery is over, in whatever thread that is: tell the source."""

        def tell(done: Request) -> None:
            self._partitions.post(ConfirmRequest(number, packed, until, done.answer or () if done.error is None else (), done.error))

        return tell

    def _load(self, member: PartitionHandle, entry: OutboxEntry, incarnation: int) -> Batch | None:
        """The items of a transfer, each with where it comes from."""
        batches = [self._addressed(member, items, incarnation) for items in self._read(member, entry.runs)]
        return Batch.join(batches) if batches else None

    def _addressed(self, member: PartitionHandle, items: Items, incarnation: int) -> Batch:
        """Items as they leave: without what belongs to their past (schedule, dedup id), with where they come from."""
        batch, known = items.batch, items.batch.origins
        keys = batch.key_ids or [NO_KEY] * len(batch)
        packed = [
            origin.encode(self._origin(member, offset, keys[index], items.produced_at, known[index] if known else None, incarnation))
            for index, offset in enumerate(_offsets(items))
        ]
        ttls = batch.ttls if incarnation == self._partitions.incarnation else None  # it begins anew, as the item does
        return msgspec.structs.replace(batch, ats=None, dedups=None, ttls=ttls, origins=packed)

    def _origin(self, member: PartitionHandle, offset: int, key: int, produced_at: int, packed: bytes | None, incarnation: int) -> Origin:
        """What an item that leaves says of where it was, and of where a key is parked for it."""
        state, partitions = member.state, self._partitions
        before = origin.decode(packed) if packed is not None else None
        burial = state.burials.get(offset)
        if burial is None and before is not None:
            if incarnation != partitions.incarnation:
                return before
            parked = before.parked and before.incarnation != incarnation  # keys of other queues go on waiting for its return
            parked_in = before.parked_in if before.parked_in != incarnation else 0
            parked_id = before.parked_id if parked_in else ""
            return msgspec.structs.replace(before, forwarded=True, parked=parked, parked_in=parked_in, parked_id=parked_id)
        here = ids.format_id(member.number, offset)
        if burial is None:
            return Origin(
                partitions.name, partitions.incarnation, here, produced_at=produced_at, forwarded=incarnation == partitions.incarnation
            )
        line = state.keys.by_key.get(key)
        others = [parking for parking in before.parkings if parking[0] != partitions.incarnation] if before is not None else []
        others.sort(key=lambda parking: parking[0] != incarnation)  # if it returns to where its key waits for it, that is the one to keep
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
        """News of transfers from here."""
        member = self._partitions.handles.get(request.partition)
        if member is None or member.transfers_under_way.get(request.destination) != request.until:
            return
        if request.failed is not None:
            member.transfers_under_way[request.destination] = -(self._partitions.now + RETRY_AFTER)
            self._partitions.touch(member)
            return
        del member.transfers_under_way[request.destination]
        if member.is_usable:
            for sequence, base in request.arrived:
                self._partitions.run(member, commands.ConfirmTransfer(request.destination, sequence, base))
            self._partitions.wants_turn = True

    # -- at the destination --------------------------------------------------------------------------

    def deliver(self, request: DeliverRequest) -> None:
        """Take transfers in, but for those that were taken before; as many as go in."""
        partitions = self._partitions
        member = partitions.handles.get(request.partition)
        if member is None:
            raise QueueNotFound(f"queue {partitions.name!r} has no partition {request.partition}; it is tried again")
        taken: list[tuple[int, int]] = []
        for sequence, batch in request.entries:
            try:
                taken.append((sequence, self._take_in(member, request.source, sequence, batch)))
            except PenstockError:
                if not taken:
                    raise
                break
        partitions.answer(request, (member, taken))

    def _take_in(self, member: PartitionHandle, source: bytes, sequence: int, batch: Batch | None) -> int:
        if batch is None:
            return -1
        command = commands.Produce(batch, None, source, sequence, incarnation=self._partitions.incarnation, partition=member.number)
        stored = self._partitions.run(member, command)
        assert isinstance(stored, Stored)
        return stored.base

    def _read(self, member: PartitionHandle, runs: list[int]) -> list[Items]:
        self._partitions.touch(member)
        return member.usable_partition.items(runs)

    @property
    def outgoing_count(self) -> int:
        """Transfers in the outboxes of this queue."""
        return sum(len(line) for member in self._partitions.usable() for line in member.state.outbox.values())

    def addressed_to(self, incarnation: int) -> int:
        """Transfers in the outboxes of this queue that are for another."""
        lines = (pair for member in self._partitions.usable() for pair in member.state.outbox.items())
        return sum(len(line) for packed, line in lines if unpack_destination(packed)[0] == incarnation)


def _offsets(items: Items) -> range:
    return range(items.start, items.start + len(items.batch))
