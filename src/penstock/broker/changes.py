"""Operations that change one queue, run inside a turn of it.

Owns: `CHANGES`, the function that does each kind of operation: of the queue's `QueueEngine` and the operation. Queries are in queries.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.broker import queries
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.retention import RetentionResult
from penstock.loop.turn import QueueEngine
from penstock.operations import (
    ClearItems,
    CompactQueue,
    ListCursors,
    MoveCursor,
    Operation,
    PauseQueue,
    RedriveItems,
    ReleaseCursor,
    ReleaseKey,
    ReportProgress,
    SeekItems,
)
from penstock.rules import commands
from penstock.rules.commands import AskAgain, ItemCount
from penstock.rules.item_states import ItemState
from penstock.words.errors import InvalidRequest, StorageFailed


def target_partitions(turns: QueueEngine, partition: int | None) -> list[PartitionHandle]:
    """The partitions that an operation is for: one, or all that are in order."""
    if partition is None:
        broken = next((member for member in turns.handles.values() if not member.is_usable), None)
        if broken is not None:
            raise StorageFailed(f"partition {broken.number} is failing ({broken.error}); try again later, or name the partition it is for")
        return list(turns.usable())
    if partition not in turns.handles:
        raise InvalidRequest(f"queue {turns.name!r} has no partition {partition}; it has {sorted(turns.handles)}")
    member = turns.handles[partition]
    _ = member.usable_partition  # or why it cannot be used
    return [member]


def _total(turns: QueueEngine, members: Sequence[PartitionHandle], command: commands.Command) -> int:
    items = 0
    for member in members:
        answer = turns.run(member, command)
        while isinstance(answer, AskAgain):
            answer = turns.run(member, command)
        assert isinstance(answer, ItemCount)
        items += answer.items
    return items


def pause(turns: QueueEngine, asked: PauseQueue) -> None:
    command = commands.Pause(asked.lease, asked.produce)
    if asked.partition is None:
        turns.pause(command)
    else:
        _total(turns, target_partitions(turns, asked.partition), command)
    turns.wants_turn = True  # who waits may go on


def clear(turns: QueueEngine, asked: ClearItems) -> int:
    turns.wants_turn = True
    command = commands.Clear(*(state in asked.states for state in ("ready", "scheduled", "leased", "buried")))
    return _total(turns, target_partitions(turns, asked.partition), command)


def seek(turns: QueueEngine, asked: SeekItems) -> int:
    turns.wants_turn = True
    if isinstance(asked.start, int):
        starts = {member: member.usable_partition.offset_at(asked.start) for member in target_partitions(turns, None)}
    else:
        starts = {member: offset for number, offset in asked.start.items() for member in target_partitions(turns, number)}
    return sum(_total(turns, [member], commands.Seek(offset)) for member, offset in starts.items())


def redrive(turns: QueueEngine, asked: RedriveItems) -> int:
    if asked.to == turns.incarnation:
        return _return(turns, asked.items)
    if asked.items is None:
        raise InvalidRequest("all items can only be redriven to their own queue; name those that are to go to another")
    return _send(turns, asked.items, asked.to)


def _return(turns: QueueEngine, items: Mapping[int, Sequence[int]] | None) -> int:
    """Buried items become ready again where they are."""
    found = 0
    turns.wants_turn = True
    for member in turns.usable():
        if items is None:
            found += _total(turns, [member], commands.Redrive())
            continue
        still = [offset for offset in items.get(member.number, ()) if member.state.state_of(offset) is ItemState.BURIED]
        found += _total(turns, [member], commands.Redrive(still)) if still else 0
    return found


def _send(turns: QueueEngine, items: Mapping[int, Sequence[int]], to: int) -> int:
    """Of these items, those that are still ready or buried leave for another queue. Refused as a whole while one cannot be looked up."""
    found = 0
    for number in items:
        if number in turns.handles:
            _ = turns.handles[number].usable_partition  # or why it cannot be used
    for number, offsets in items.items():
        member = turns.handles.get(number)
        if member is None:
            continue
        still = [offset for offset in offsets if member.state.state_of(offset) in (ItemState.READY, ItemState.BURIED)]
        if still:
            turns.transfer_step.send(member, still, to)
            found += len(still)
            _release_parked(turns, member, set(still))
    return found


def _release_parked(turns: QueueEngine, member: PartitionHandle, gone: set[int]) -> None:
    """Keys that were parked only for items which have left for another queue go on."""
    for key, line in member.state.keys.lines():
        if line.parked and gone.issuperset(line.parked):
            turns.run(member, commands.ReleaseParkedKey(key))


def release(turns: QueueEngine, asked: ReleaseKey) -> int:
    turns.wants_turn = True
    return _total(turns, target_partitions(turns, None), commands.ReleaseParkedKey(asked.key))


def note(turns: QueueEngine, asked: ReportProgress) -> None:
    for member in target_partitions(turns, asked.partition):
        turns.run(member, commands.SetProgress(asked.lease, asked.offset, asked.text))


def compact(turns: QueueEngine, asked: CompactQueue) -> list[RetentionResult]:
    freed = []
    for member in target_partitions(turns, asked.partition):
        turns.touch(member)
        freed.append(member.usable_partition.compact())
    return freed


def move_cursor(turns: QueueEngine, asked: MoveCursor) -> None:
    for member in target_partitions(turns, None):
        if member.number in asked.to:
            known = member.state.cursors.get(asked.name, 0) if asked.forward_only else 0
            turns.run(member, commands.PutCursor(asked.name, min(max(asked.to[member.number], known), member.state.next_offset)))


def release_cursor(turns: QueueEngine, asked: ReleaseCursor) -> None:
    found = [member for member in target_partitions(turns, None) if asked.name in member.state.cursors]
    if not found:
        there = sorted(queries.cursors(turns, ListCursors()))
        raise InvalidRequest(f"there is no cursor {asked.name!r} in queue {turns.name!r}; there are {there or 'none'}")
    for member in found:
        turns.run(member, commands.ForgetCursor(asked.name))


CHANGE_HANDLERS: dict[type[Operation[Any]], Callable[[Any, Any], Any]] = {
    PauseQueue: pause,
    ClearItems: clear,
    SeekItems: seek,
    RedriveItems: redrive,
    ReleaseKey: release,
    ReportProgress: note,
    CompactQueue: compact,
    MoveCursor: move_cursor,
    ReleaseCursor: release_cursor,
}
"""The function that does each kind of operation."""

# -- what a broker asks of its own queues ---------------------------------------------------------------


def complete_ended_leases(turns: QueueEngine, items: Mapping[int, Sequence[int]], consumer: str) -> int:
    """Of these items, those that are ready are done: their consumer had handled them, and its leases have ended since."""
    done = 0
    turns.wants_turn = True
    for number, offsets in items.items():
        if number in turns.handles:
            done += _total(turns, target_partitions(turns, number), commands.CompleteUnleased(offsets, consumer, only_lease_expired=True))
    return done


def publish_partitions(turns: QueueEngine, partition: int | None = None) -> None:
    """Everything up to now, of one partition or of all that are in order, may be seen by those who read beside the queue."""
    for member in [*turns.usable()] if partition is None else target_partitions(turns, partition):
        turns.touch(member)
        member.usable_partition.sync_and_publish()
