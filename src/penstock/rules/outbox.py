"""The outbox: items on their way to another partition, of this queue or another.

Owns: `destination`, the decisions about transfers at their source and their application. A transfer is three records: `Sent` (or
`FollowUpSent`) here, a produce there that takes each sequence once, `Delivered` here. Sequences count per destination and carry the
owner's epoch, so that one is never given twice, even if the record of it was lost with the machine. Until it is delivered an item
is MOVING: nobody can lease it, its bytes stay, and what was known of its burial is kept for whoever carries it.
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
"""Follow-ups that wait for their destination; they are kept in memory."""


def pack_destination(incarnation: int, partition: int) -> bytes:
    """A partition of any queue, as outboxes and producers name it."""
    return _DESTINATION.pack(incarnation, partition)


def unpack_destination(packed: bytes) -> tuple[int, int]:
    """The incarnation and partition that `destination` named."""
    incarnation, partition = _DESTINATION.unpack(packed)
    return incarnation, partition


def decide_send(state: State, command: Send, now: Moment, peek: BlockSource) -> tuple[list[Record], ItemCount | AskAgain]:
    _check(command.destination)
    chosen = sorted(set(command.offsets))
    for offset in chosen:
        next_state(state.state_of(offset), Transition.SENT)
    if not chosen:
        return [], ItemCount(0)
    keys = keys_in_line(state, chosen, peek)
    if isinstance(keys, Lost):
        return [keys], AskAgain()
    sequence = _next(state, command.destination)
    return [Sent(command.destination, sequence, from_offsets(chosen), keys)], ItemCount(len(chosen))


def follow_up_records(state: State, letters: Sequence[FollowUpBatch]) -> list[Record]:
    """The records of follow-ups, one for each letter."""
    size = sum(len(letter.body) for letter in letters) + sum(len(one.body) for line in state.outbox.values() for one in line)
    if size > MAX_OUTBOX_BYTES:
        raise QueueBusy(f"{size} bytes of follow-ups wait for their queues; complete this a little later, when some have arrived")
    given: dict[bytes, int] = {}
    records: list[Record] = []
    for letter in letters:
        _check(letter.destination)
        sequence = given.get(letter.destination, _next(state, letter.destination) - 1) + 1
        given[letter.destination] = sequence
        records.append(FollowUpSent(letter.destination, sequence, letter.body))
    return records


def decide_confirm(state: State, command: ConfirmTransfer, now: Moment, peek: BlockSource) -> tuple[list[Record], ItemCount]:
    line = state.outbox.get(command.destination)
    if not line or line[0].sequence != command.sequence:
        return [], ItemCount(0)
    return [Delivered(command.destination, command.sequence, command.base)], ItemCount(1)


def _check(packed: bytes) -> None:
    if type(packed) is not bytes or len(packed) != _DESTINATION.size:
        raise InvalidRequest("the destination is not one; make it with outbox.destination")


def _next(state: State, packed: bytes) -> int:
    return max(state.sent_sequences.get(packed, 0), state.epoch << EPOCH_SHIFT) + 1


def apply_sent(state: State, record: Sent, now: Moment) -> None:
    withdraw_items(state, record.runs, record.keys)
    state.buried_set.remove_all(record.runs)
    state.moving.add_all(record.runs)
    _enter(state, record.destination, OutboxEntry(record.sequence, record.runs))


def apply_promised(state: State, record: FollowUpSent, now: Moment) -> None:
    _enter(state, record.destination, OutboxEntry(record.sequence, [], record.body))


def _enter(state: State, packed: bytes, entry: OutboxEntry) -> None:
    state.outbox.setdefault(packed, []).append(entry)
    state.sent_sequences[packed] = max(entry.sequence, state.sent_sequences.get(packed, 0))


def apply_delivered(state: State, record: Delivered, now: Moment) -> None:
    line = state.outbox.get(record.destination, [])
    entry = next((one for one in line if one.sequence == record.sequence), None)
    if entry is None:  # damage took the record of its sending
        return
    line.remove(entry)
    if not line:
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
    """Incarnation, partition and offset under which an item that left goes on; None when it did not, or that is not known."""
    start = max((start for start in state.moved if start <= offset), default=None)
    if start is None:
        return None
    stop, packed, base = state.moved[start]
    return (*unpack_destination(packed), base + offset - start) if offset < stop and base >= 0 else None


def moved_runs(state: State) -> list[int]:
    """Everything that went elsewhere."""
    return [edge for start, (stop, _, _) in state.moved.items() for edge in (start, stop)]


def forget_moved(state: State, runs: list[int]) -> None:
    """These items are gone for good; so is where they went."""
    gone = RunSet(runs)
    for first, (last, packed, base) in [(first, entry) for first, entry in state.moved.items() if gone.overlaps(first, entry[0])]:
        del state.moved[first]
        state.moved_items -= last - first
        for start, stop in pairs(gone.missing(first, last)):
            state.moved_items += stop - start
            state.moved[start] = (stop, packed, base + start - first if base >= 0 else base)
