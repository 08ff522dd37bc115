"""The outbox: transfers of items to other partitions, of this queue or another.

Owns: how destinations are packed, and the decisions about transfers at their source and their application. A transfer
is three records: `Sent` (or `FollowUpSent`) here, `Produced` at the destination, which takes each sequence once, and
`Delivered` here. Sequences count per destination and contain the owner's epoch, so that none is given twice, even if
its record was lost with the machine. Until it is delivered an item is MOVING: it cannot be leased, and its bytes and
its burial are kept.
"""

import struct
from collections.abc import Sequence

from penstock.rules.commands import AskAgain, ConfirmTransfer, FollowUpBatch, ItemCount, Send
from penstock.rules.item_states import Transition, next_state
from penstock.rules.leases import EPOCH_SHIFT
from penstock.rules.records import Delivered, FollowUpSent, Lost, Record, Sent
from penstock.rules.removal import keys_in_line, withdraw_items
from penstock.rules.runs import RunSet, from_offsets, offsets, pairs
from penstock.rules.state import BlockSource, OutboxEntry, State
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest, QueueBusy
from penstock.words.limits import MAX_BATCH_BYTES

_DESTINATION = struct.Struct(">QI")
MAX_OUTBOX_BYTES = 2 * MAX_BATCH_BYTES
"""Limit of the follow-ups in a partition's outbox; they are kept in memory."""


def pack_destination(incarnation: int, partition: int) -> bytes:
    """The bytes that name a partition of any queue, as a destination or source of transfers."""
    return _DESTINATION.pack(incarnation, partition)


def unpack_destination(packed: bytes) -> tuple[int, int]:
    """The incarnation and partition of `pack_destination`."""
    incarnation, partition = _DESTINATION.unpack(packed)
    return incarnation, partition


def decide_send(state: State, command: Send, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount | AskAgain]:
    _check_destination(command.destination)
    chosen = sorted(set(command.offsets))
    for offset in chosen:
        next_state(state.state_of(offset), Transition.SENT)
    if not chosen:
        return [], ItemCount(0)
    keys = keys_in_line(state, chosen, blocks)
    if isinstance(keys, Lost):
        return [keys], AskAgain()
    sequence = _next_sequence(state, command.destination)
    return [Sent(command.destination, sequence, from_offsets(chosen), keys)], ItemCount(len(chosen))


def follow_up_records(state: State, follow_ups: Sequence[FollowUpBatch]) -> list[Record]:
    """A record for each batch of follow-ups. Raises QueueBusy beyond MAX_OUTBOX_BYTES in the outbox."""
    if not follow_ups:
        return []
    size = sum(len(batch.body) for batch in follow_ups) + sum(len(entry.body) for entries in state.outbox.values() for entry in entries)
    if size > MAX_OUTBOX_BYTES:
        raise QueueBusy(f"{size} bytes of follow-ups wait for their queues; complete this a little later, when some have arrived")
    given: dict[bytes, int] = {}
    records: list[Record] = []
    for batch in follow_ups:
        _check_destination(batch.destination)
        sequence = given.get(batch.destination, _next_sequence(state, batch.destination) - 1) + 1
        given[batch.destination] = sequence
        records.append(FollowUpSent(batch.destination, sequence, batch.body))
    return records


def decide_confirm_transfer(state: State, command: ConfirmTransfer, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    entries = state.outbox.get(command.destination)
    if not entries or entries[0].sequence != command.sequence:
        return [], ItemCount(0)
    return [Delivered(command.destination, command.sequence, command.base)], ItemCount(1)


def _check_destination(packed: bytes) -> None:
    if type(packed) is not bytes or len(packed) != _DESTINATION.size:
        raise InvalidRequest(f"the destination is not {_DESTINATION.size} bytes; make it with outbox.pack_destination")


def _next_sequence(state: State, packed: bytes) -> int:
    return max(state.sent_sequences.get(packed, 0), state.epoch << EPOCH_SHIFT) + 1


def apply_sent(state: State, record: Sent, now: Moment) -> None:
    withdraw_items(state, record.runs, record.keys)
    state.buried_set.remove_all(record.runs)
    state.moving.add_all(record.runs)
    _add_to_outbox(state, record.destination, OutboxEntry(record.sequence, record.runs))


def apply_follow_up_sent(state: State, record: FollowUpSent, now: Moment) -> None:
    _add_to_outbox(state, record.destination, OutboxEntry(record.sequence, [], record.body))


def _add_to_outbox(state: State, packed: bytes, entry: OutboxEntry) -> None:
    state.outbox.setdefault(packed, []).append(entry)
    state.sent_sequences[packed] = max(entry.sequence, state.sent_sequences.get(packed, 0))


def apply_delivered(state: State, record: Delivered, now: Moment) -> None:
    entries = state.outbox.get(record.destination, [])
    entry = next((entry for entry in entries if entry.sequence == record.sequence), None)
    if entry is None:  # damage took its Sent record
        return
    entries.remove(entry)
    if not entries:
        del state.outbox[record.destination]
    state.moving.remove_all(entry.runs)
    state.completed.add_all(entry.runs)
    for offset in offsets(entry.runs):
        state.burials.pop(offset, None)
    base = record.base
    for start, stop in pairs(entry.runs):
        state.moved[start] = (stop, record.destination, base)
        state.moved_items += stop - start
        base += stop - start if base >= 0 else 0


def moved_to(state: State, offset: int) -> tuple[int, int, int] | None:
    """New incarnation, partition and offset of a transferred item; None if it was not, or if they are unknown."""
    start = max((start for start in state.moved if start <= offset), default=None)
    if start is None:
        return None
    stop, packed, base = state.moved[start]
    return (*unpack_destination(packed), base + offset - start) if offset < stop and base >= 0 else None


def moved_runs(state: State) -> list[int]:
    """Flat runs of all items that were transferred to other partitions."""
    return [edge for start, (stop, _, _) in state.moved.items() for edge in (start, stop)]


def forget_moved(state: State, runs: list[int]) -> None:
    """Delete from `moved` the items that retention dropped."""
    dropped = RunSet(runs)
    for first, (last, packed, base) in [(first, entry) for first, entry in state.moved.items() if dropped.overlaps(first, entry[0])]:
        del state.moved[first]
        state.moved_items -= last - first
        for start, stop in pairs(dropped.missing(first, last)):
            state.moved_items += stop - start
            state.moved[start] = (stop, packed, base + start - first if base >= 0 else base)
