"""The table of dead letters.

Owns: `dead`. A dead letter is a buried item. It is either still in the queue in which it was buried, or in a dead
queue, with its origin. The columns `id`, `partition` and `offset`, and the facts of its failure, are those of the queue
in which it was buried. `dead_queue` and `dead_id` say where it is now, which is what a redrive needs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import pyarrow as pa

from penstock.loop.partition_reader import PartitionReader
from penstock.rules.item_states import ItemState
from penstock.rules.runs import RunSet, offsets
from penstock.rules.state import State
from penstock.tables.item_columns import ItemRows, grouped_slices, stored_columns
from penstock.tables.items import OpenLog, frame_slices
from penstock.tables.schemas import DEAD, batch_of, select_columns
from penstock.tables.state import attempt_count, last_failure_reason
from penstock.words.clock import SystemClock
from penstock.words.ids import format_id
from penstock.words.origin import Origin


class DeadLetter(NamedTuple):
    """A dead letter without its payload and other stored columns."""

    position: tuple[int, int]
    """Partition and offset in the queue in which it was buried."""
    reason: str
    attempts: int
    buried_at: int
    first_failed_at: int
    last_failed_at: int
    produced_at: int
    """0 if it is that of the stored item."""
    current_id: str
    """Its id in the queue that is read."""


def dead(
    open_log: OpenLog, queue: str, columns: Sequence[str], *, waiting: bool = False, origin: str | None = None
) -> Iterator[pa.RecordBatch]:
    """The dead letters in one partition of `queue`, in batches: the buried items.

    waiting: the queue is a dead queue, so its ready, scheduled and leased items are dead letters too.
    origin: only the dead letters that came from the queue of this name.
    """
    schema = select_columns(DEAD, columns)
    with closing(PartitionReader(open_log(), SystemClock())) as reader, closing(open_log()) as log:
        state, partition = reader.state, log.partition
        runs = RunSet(state.buried_set.runs if origin is None else ())
        if waiting:
            runs.add_all(state.waiting_within(0, state.next_offset).runs)
            runs.add_all(state.leased_within(0, state.next_offset).runs)
        for slices in grouped_slices(
            frame_slices(log, open_log, runs.runs, strict=False), [*dict.fromkeys([*stored_columns(columns), "origin"])]
        ):
            rows = ItemRows(slices, partition)
            found = [_dead_letter(state, partition, *item, origin) for item in zip(offsets(rows.runs), rows.origins, strict=True)]
            wanted = [dead_letter for dead_letter in found if dead_letter is not None]
            if wanted:
                kept = [dead_letter is not None for dead_letter in found]
                yield batch_of([_column(name, rows, wanted, kept, queue) for name in columns], schema, len(wanted))


def _dead_letter(state: State, partition: int, offset: int, known: Origin | None, origin: str | None) -> DeadLetter | None:
    """The item as a dead letter; None if it did not come from the queue `origin`."""
    current_id = format_id(partition, offset)
    burial = state.burials.get(offset)
    if burial is not None:
        reason, buried_at, attempts, first_failed_at, last_failed_at, _ = burial
        return DeadLetter((partition, offset), reason, attempts, buried_at, first_failed_at, last_failed_at, 0, current_id)
    if origin is not None and (known is None or known.queue != origin):
        return None
    reason = last_failure_reason(state, offset)
    if known is None:  # the item was produced directly to the dead queue
        attempts = attempt_count(state, offset, state.state_of(offset) or ItemState.READY)
        return DeadLetter((partition, offset), reason, attempts, 0, 0, 0, 0, current_id)
    failed = (known.first_failed_at, known.last_failed_at)
    reason = reason or known.reason
    return DeadLetter(known.partition_and_offset, reason, known.attempts, known.buried_at, *failed, known.produced_at, current_id)


def _column(name: str, rows: ItemRows, dead_letters: Sequence[DeadLetter], kept: Sequence[bool], queue: str) -> pa.Array:
    """A column of the dead letters, which are the kept rows."""
    kind = DEAD.field(name).type
    if name == "dead_queue":
        return pa.repeat(pa.scalar(queue, kind), len(dead_letters))
    if name in _COLUMNS:
        return pa.array([_COLUMNS[name](dead_letter) for dead_letter in dead_letters], kind)
    column = rows.column(name)
    column = column if all(kept) else column.filter(pa.array(kept))
    if name == "produced_at" and any(dead_letter.produced_at for dead_letter in dead_letters):
        stored = column.cast(pa.int64()).to_pylist()
        times = [dead_letter.produced_at or at for dead_letter, at in zip(dead_letters, stored, strict=True)]
        return pa.array(times, pa.int64()).cast(kind)
    return column


_COLUMNS: dict[str, Callable[[DeadLetter], Any]] = {
    "id": lambda dead_letter: format_id(*dead_letter.position),
    "partition": lambda dead_letter: dead_letter.position[0],
    "offset": lambda dead_letter: dead_letter.position[1],
    "reason": lambda dead_letter: dead_letter.reason or None,
    "attempts": lambda dead_letter: dead_letter.attempts,
    "buried_at": lambda dead_letter: dead_letter.buried_at or None,
    "first_failed_at": lambda dead_letter: dead_letter.first_failed_at or None,
    "last_failed_at": lambda dead_letter: dead_letter.last_failed_at or None,
    "dead_id": lambda dead_letter: dead_letter.current_id,
}
