"""Operations that change one queue.

Owns: `CHANGE_HANDLERS`, the function for each kind of operation. A handler takes the queue's `QueueEngine` and the
operation, and runs inside a turn of the queue. Queries are in queries.py.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from penstock.broker import queries
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.retention import RetentionResult
from penstock.loop.turn import QueueEngine
from penstock.operations import (
    CancelItems,
    ClearItems,
    CompactQueue,
    ListCursors,
    MoveCursor,
    Operation,
    PauseQueue,
    PublishLog,
    RedriveItems,
    ReleaseCursor,
    ReleaseKey,
    ReportProgress,
    RescheduleItems,
    SeekItems,
)
from penstock.reports import ItemChange
from penstock.rules import commands, runs
from penstock.rules.calls import RememberedAnswer
from penstock.rules.commands import AskAgain, ItemCount, ItemOutcome, ItemOutcomes
from penstock.rules.item_states import ItemState, Transition, states_allowing
from penstock.rules.outbox import moved_to
from penstock.words.errors import InvalidRequest, PenstockError, StorageFailed
from penstock.words.ids import format_id
from penstock.words.logs import log_fields

_log = logging.getLogger("penstock")


def target_partitions(engine: QueueEngine, partition: int | None) -> list[PartitionHandle]:
    """The handle of one partition, or of every partition (None).

    StorageFailed when a partition is failing, InvalidRequest when the queue has no such partition.
    """
    if partition is None:
        broken = next((handle for handle in engine.handles.values() if not handle.is_usable), None)
        if broken is not None:
            raise StorageFailed(f"partition {broken.number} is failing ({broken.error}); try again later, or name a partition")
        return list(engine.usable())
    if partition not in engine.handles:
        raise InvalidRequest(f"queue {engine.name!r} has no partition {partition}; it has {sorted(engine.handles)}")
    handle = engine.handles[partition]
    _ = handle.usable_partition  # raises when it is failing
    return [handle]


def _once(engine: QueueEngine, handle: PartitionHandle, change: Callable[[], int]) -> int:
    """Make a change in a partition, unless the same call made it before; gives the number of items that it changed.

    What a call does in a partition is remembered there, in one frame with the change.
    """
    request = engine.running_function
    if request is None or not request.calls:
        return change()
    known = engine.remembered(handle, request)
    if known is not None:
        engine.touch(handle)  # the answer waits for its commit
        return sum(answer.count for answer in known)
    count = change()
    engine.run(handle, commands.RememberCall(request.calls, [RememberedAnswer(count=count)]))
    return count


def _is_repeated(engine: QueueEngine) -> bool:
    """Whether a usable partition remembers the call that runs now."""
    request = engine.running_function
    if request is None or not request.may_be_known:
        return False
    return any(engine.remembered(handle, request) is not None for handle in engine.usable())


def _total(engine: QueueEngine, handles: Sequence[PartitionHandle], command: commands.Command) -> int:
    """Run a command in each partition until it has nothing left to do; gives the number of items that it changed."""
    return sum(_once(engine, handle, partial(_run_to_end, engine, handle, command)) for handle in handles)


def _run_to_end(engine: QueueEngine, handle: PartitionHandle, command: commands.Command) -> int:
    answer = engine.run(handle, command)
    while isinstance(answer, AskAgain):
        answer = engine.run(handle, command)
    assert isinstance(answer, ItemCount)
    return answer.items


def pause(engine: QueueEngine, operation: PauseQueue) -> None:
    command = commands.Pause(operation.lease, operation.produce)
    if operation.partition is None:
        if not _is_repeated(engine):  # else those that were not usable then had their part
            engine.note_missed_pause(command)
        _total(engine, [*engine.usable()], command)
    else:
        _total(engine, target_partitions(engine, operation.partition), command)
    engine.wants_turn = True  # waiting requests may be served now


def clear(engine: QueueEngine, operation: ClearItems) -> int:
    engine.wants_turn = True
    command = commands.Clear(*(state in operation.states for state in ("ready", "scheduled", "leased", "buried")))
    return _total(engine, target_partitions(engine, operation.partition), command)


def seek(engine: QueueEngine, operation: SeekItems) -> int:
    engine.wants_turn = True
    if isinstance(operation.start, int):
        starts = {handle: handle.usable_partition.offset_at(operation.start) for handle in target_partitions(engine, None)}
    else:
        starts = {handle: offset for number, offset in operation.start.items() for handle in target_partitions(engine, number)}
    if operation.skip:
        return sum(_once(engine, handle, partial(_skip, engine, handle, offset)) for handle, offset in starts.items())
    return sum(_total(engine, [handle], commands.Seek(offset)) for handle, offset in starts.items())


def _skip(engine: QueueEngine, handle: PartitionHandle, offset: int) -> int:
    total = 0
    while items := _run_to_end(engine, handle, commands.SkipWaiting(offset)):
        total += items
    return total


def redrive(engine: QueueEngine, operation: RedriveItems) -> int:
    if operation.to == engine.incarnation:
        return _return_buried(engine, operation.items)
    if operation.items is None:
        raise InvalidRequest("only chosen items can be redriven to another queue; name the items")
    return _send_to_queue(engine, operation.items, operation.to)


def _return_buried(engine: QueueEngine, items: Mapping[int, Sequence[int]] | None) -> int:
    """Make buried items ready again: the given ones, or (None) all. Gives how many."""
    engine.wants_turn = True
    if items is None:
        return _total(engine, target_partitions(engine, None), commands.Redrive())
    found = 0
    for handle in _known_partitions(engine, items):
        buried = [offset for offset in items[handle.number] if handle.state.state_of(offset) is ItemState.BURIED]
        found += _once(engine, handle, partial(_run_to_end, engine, handle, commands.Redrive(buried)) if buried else lambda: 0)
    return found


def _send_to_queue(engine: QueueEngine, items: Mapping[int, Sequence[int]], to: int) -> int:
    """Send those of these items that wait or are buried to another queue. Gives how many."""
    handles = _known_partitions(engine, items)
    return sum(_once(engine, handle, partial(_send_from, engine, handle, items[handle.number], to)) for handle in handles)


def _send_from(engine: QueueEngine, handle: PartitionHandle, chosen: Sequence[int], to: int) -> int:
    sent = [offset for offset in chosen if handle.state.state_of(offset) in states_allowing(Transition.SENT)]
    if sent:
        engine.transfer_step.send(handle, sent, to)
        _release_parked(engine, handle, set(sent))
    return len(sent)


def _known_partitions(engine: QueueEngine, numbers: Iterable[int]) -> list[PartitionHandle]:
    """The handles of those of these partitions that the queue has; StorageFailed when one of them is failing."""
    return [handle for number in numbers if number in engine.handles for handle in target_partitions(engine, number)]


def _release_parked(engine: QueueEngine, handle: PartitionHandle, gone: set[int]) -> None:
    """Free the keys that were parked only because of items that have now left for another queue."""
    for key, line in handle.state.keys.lines():
        if line.parked and gone.issuperset(line.parked):
            engine.run(handle, commands.ReleaseParkedKey(key))


def cancel(engine: QueueEngine, operation: CancelItems) -> list[ItemChange]:
    outcomes = _change_waiting(engine, operation.items, commands.CancelWaiting)
    return _item_changes(operation.items, outcomes, "cancelled")


def reschedule(engine: QueueEngine, operation: RescheduleItems) -> list[ItemChange]:
    outcomes = _change_waiting(engine, operation.items, partial(commands.RescheduleWaiting, at=operation.at, delay=operation.delay))
    return _item_changes(operation.items, outcomes, "rescheduled")


_OUTCOME_NAMES = {
    ItemOutcome.LEASED: "leased",
    ItemOutcome.COMPLETED: "completed",
    ItemOutcome.CANCELLED: "already cancelled",
    ItemOutcome.BURIED: "buried",
    ItemOutcome.MOVING: "moving",
    ItemOutcome.MOVED: "moved",
    ItemOutcome.UNKNOWN: "not found",
}


def _item_changes(items: Sequence[tuple[int, int]], outcomes: Mapping[int, ItemOutcome], done: str) -> list[ItemChange]:
    return [ItemChange(format_id(*item), _OUTCOME_NAMES.get(outcomes[index], done)) for index, item in enumerate(items)]


def _change_waiting(
    engine: QueueEngine, items: Sequence[tuple[int, int]], command: Callable[[list[int]], commands.Command]
) -> dict[int, ItemOutcome]:
    """Change items that wait; gives what became of each, by its index.

    Nothing is changed when the partition of one of the items is failing. Each partition remembers, in one frame with
    the change, what became of the items of the call: a repetition changes only those that no partition remembers.
    """
    engine.wants_turn = True
    outcomes = _remembered_outcomes(engine)
    shares: dict[int, list[tuple[int, int]]] = {}
    for index, (partition, offset) in enumerate(items):
        if index not in outcomes:
            place = _present_position(engine, partition, offset)
            if place is None:
                outcomes[index] = ItemOutcome.UNKNOWN
            else:
                shares.setdefault(place[0], []).append((index, place[1]))
    request = engine.running_function
    for number, share in shares.items():
        handle, chosen = engine.handles[number], command([offset for _, offset in share])
        answer = engine.run(handle, chosen)
        while isinstance(answer, AskAgain):
            answer = engine.run(handle, chosen)
        assert isinstance(answer, ItemOutcomes)
        indexes = [index for index, _ in share]
        outcomes.update(zip(indexes, answer.outcomes, strict=True))
        if request is not None and request.calls:
            done = RememberedAnswer(indexes=runs.from_offsets(indexes), outcomes=[*map(int, answer.outcomes)])
            engine.run(handle, commands.RememberCall(request.calls, [done]))
    return outcomes


def _remembered_outcomes(engine: QueueEngine) -> dict[int, ItemOutcome]:
    """What became of items when the same call was made before, by their indexes."""
    request, found = engine.running_function, dict[int, ItemOutcome]()
    if request is None or not request.calls:
        return found
    for handle in engine.usable():
        known = engine.remembered(handle, request)
        if known is not None:
            engine.touch(handle)  # the answer waits for its commit
            for answer in known:
                found.update(zip(runs.offsets(answer.indexes or []), map(ItemOutcome, answer.outcomes), strict=True))
    return found


def _present_position(engine: QueueEngine, partition: int, offset: int) -> tuple[int, int] | None:
    """Where an item is now in this queue, if a resize moved it; None when the queue has no such partition.

    StorageFailed when its partition is failing.
    """
    while partition in engine.handles:
        (handle,) = target_partitions(engine, partition)
        there = moved_to(handle.state, offset)
        if there is None or there[0] != engine.incarnation:
            return partition, offset
        _, partition, offset = there
    return None


def release(engine: QueueEngine, operation: ReleaseKey) -> int:
    engine.wants_turn = True
    return _total(engine, target_partitions(engine, None), commands.ReleaseParkedKey(operation.key))


def report_progress(engine: QueueEngine, operation: ReportProgress) -> None:
    for handle in target_partitions(engine, operation.partition):
        engine.run(handle, commands.SetProgress(operation.lease, operation.offset, operation.text))


def compact(engine: QueueEngine, operation: CompactQueue) -> list[RetentionResult]:
    freed = []
    for handle in target_partitions(engine, operation.partition):
        engine.touch(handle)
        freed.append(handle.usable_partition.compact())
    return freed


def move_cursor(engine: QueueEngine, operation: MoveCursor) -> None:
    for handle in _known_partitions(engine, operation.to):
        _once(engine, handle, partial(_move_cursor, engine, handle, operation))


def _move_cursor(engine: QueueEngine, handle: PartitionHandle, operation: MoveCursor) -> int:
    known = handle.state.cursors.get(operation.name, 0) if operation.forward_only else 0
    engine.run(handle, commands.PutCursor(operation.name, min(max(operation.to[handle.number], known), handle.state.next_offset)))
    return 0


def release_cursor(engine: QueueEngine, operation: ReleaseCursor) -> None:
    handles = target_partitions(engine, None)
    if not any(operation.name in handle.state.cursors for handle in handles) and not _is_repeated(engine):
        there = sorted(queries.cursors(engine, ListCursors()))
        raise InvalidRequest(f"there is no cursor {operation.name!r} in queue {engine.name!r}; there are {there or 'none'}")
    for handle in handles:
        _once(engine, handle, partial(_forget_cursor, engine, handle, operation.name))


def _forget_cursor(engine: QueueEngine, handle: PartitionHandle, name: str) -> int:
    if name in handle.state.cursors:
        engine.run(handle, commands.ForgetCursor(name))
    return 0


CHANGE_HANDLERS: dict[type[Operation[Any]], Callable[[Any, Any], Any]] = {
    PauseQueue: pause,
    ClearItems: clear,
    SeekItems: seek,
    RedriveItems: redrive,
    CancelItems: cancel,
    RescheduleItems: reschedule,
    ReleaseKey: release,
    ReportProgress: report_progress,
    CompactQueue: compact,
    MoveCursor: move_cursor,
    ReleaseCursor: release_cursor,
    PublishLog: lambda engine, operation: publish_partitions(engine, operation.partition),
}
"""Kind of operation → its handler."""

# -- lines in the program's log --------------------------------------------------------------------------


def log_line(operation: Operation[Any], name_of: Callable[[int], str | None]) -> Callable[[Any], str] | None:
    """Gives, from the answer of an operation, the line about it in the program's log; None: it is worth none."""
    describe = _LOG_LINES.get(type(operation))
    return None if describe is None else partial(describe, operation, name_of)


def _pause_line(operation: PauseQueue, name_of: Callable[[int], str | None], answer: None) -> str:
    parts = [
        f"{what} queue {name_of(operation.queue)!r} is {'paused' if paused else 'resumed'}"
        for what, paused in (("leasing from", operation.lease), ("producing to", operation.produce))
        if paused is not None
    ]
    return (" and ".join(parts) or f"nothing is changed in queue {name_of(operation.queue)!r}") + _in_partition(operation.partition)


def _clear_line(operation: ClearItems, name_of: Callable[[int], str | None], answer: int) -> str:
    states = ", ".join(operation.states)
    return f"{answer} items of queue {name_of(operation.queue)!r} ({states}) were cleared{_in_partition(operation.partition)}"


def _seek_line(operation: SeekItems, name_of: Callable[[int], str | None], answer: int) -> str:
    name = name_of(operation.queue)
    if operation.skip:
        return f"{answer} waiting items of queue {name!r} were skipped by a seek"
    return f"{answer} completed items of queue {name!r} are ready again after a seek"


def _redrive_line(operation: RedriveItems, name_of: Callable[[int], str | None], answer: int) -> str:
    return f"{answer} items were redriven from queue {name_of(operation.queue)!r} to queue {name_of(operation.to)!r}"


def _release_line(operation: ReleaseKey, name_of: Callable[[int], str | None], answer: int) -> str:
    return f"a parked key of queue {name_of(operation.queue)!r} was released"


def _cancel_line(operation: CancelItems, name_of: Callable[[int], str | None], answer: list[ItemChange]) -> str:
    return f"{sum(one.done for one in answer)} of {len(answer)} items of queue {name_of(operation.queue)!r} were cancelled"


def _reschedule_line(operation: RescheduleItems, name_of: Callable[[int], str | None], answer: list[ItemChange]) -> str:
    return f"{sum(one.done for one in answer)} of {len(answer)} items of queue {name_of(operation.queue)!r} were rescheduled"


def _in_partition(partition: int | None) -> str:
    return "" if partition is None else f", in partition {partition}"


_LOG_LINES: dict[type[Operation[Any]], Callable[..., str]] = {
    PauseQueue: _pause_line,
    ClearItems: _clear_line,
    SeekItems: _seek_line,
    RedriveItems: _redrive_line,
    ReleaseKey: _release_line,
    CancelItems: _cancel_line,
    RescheduleItems: _reschedule_line,
}


def log_failure(operation: Operation[Any], name_of: Callable[[int], str | None], answer: Any) -> None:
    """Log the error of an operation whose answer nobody wants."""
    if isinstance(answer, PenstockError):
        _log.warning("%s failed: %s", _named(operation, name_of), answer, extra=log_fields(queue=name_of(operation.queue)))


def log_bug(operation: Operation[Any], name_of: Callable[[int], str | None]) -> None:
    """Log the exception that is being handled: a bug of Penstock."""
    _log.exception("%s went wrong", _named(operation, name_of), extra=log_fields(queue=name_of(operation.queue)))


def _named(operation: Operation[Any], name_of: Callable[[int], str | None]) -> str:
    name = name_of(operation.queue)
    return type(operation).__name__ if name is None else f"{type(operation).__name__} of queue {name!r}"


# -- requests of the broker itself -----------------------------------------------------------------------


def complete_ended_leases(engine: QueueEngine, items: Mapping[int, Sequence[int]], consumer: str) -> int:
    """Complete those of these items whose lease expired after the consumer had handled them; gives how many.

    Items that are not ready any more are skipped.
    """
    done = 0
    engine.wants_turn = True
    for number, offsets in items.items():
        if number in engine.handles:
            done += _total(engine, target_partitions(engine, number), commands.CompleteUnleased(offsets, consumer, only_lease_expired=True))
    return done


def publish_partitions(engine: QueueEngine, partition: int | None = None) -> None:
    """Sync one partition, or every usable one, and publish everything up to now to readers outside the turns."""
    for handle in [*engine.usable()] if partition is None else target_partitions(engine, partition):
        engine.touch(handle)
        handle.usable_partition.sync_and_publish()
