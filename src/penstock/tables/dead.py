"""Dead letters as record batches.

Owns: `dead` (the table). A dead letter lies where it was buried, or waits in a dead queue, with its origin. It is told under the id that it
had in the queue that gave it up, and with what was known of it there; where it lies now, which is what a redrive needs, is told too.
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
    """A dead letter, but for its bytes."""

    place: tuple[int, int]
    """Partition and offset in the queue that gave it up."""
    reason: str
    attempts: int
    buried_at: int
    first_failed_at: int
    last_failed_at: int
    produced_at: int
    """0: as the item here says."""
    current_id: str


def dead(
    open_log: OpenLog, queue: str, columns: Sequence[str], *, waiting: bool = False, origin: str | None = None
) -> Iterator[pa.RecordBatch]:
    """The dead letters in a partition of `queue`: what was buried there, and, with `waiting`, what waits there (it is a dead queue).

    origin: only what waits there and came from the queue of that name.
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
            made = ItemRows(slices, partition)
            told = [_letter(state, partition, *item, origin) for item in zip(offsets(made.runs), made.origins, strict=True)]
            letters = [letter for letter in told if letter is not None]
            if letters:
                arrays = [_column(name, made, letters, [letter is not None for letter in told], queue) for name in columns]
                yield batch_of(arrays, schema, len(letters))


def _letter(state: State, partition: int, offset: int, known: Origin | None, origin: str | None) -> DeadLetter | None:
    """The dead letter that an item is, or None when it is none of those asked for."""
    lies_at = format_id(partition, offset)
    burial = state.burials.get(offset)
    if burial is not None:
        reason, buried_at, attempts, first_failed_at, last_failed_at, _ = burial
        return DeadLetter((partition, offset), reason, attempts, buried_at, first_failed_at, last_failed_at, 0, lies_at)
    if origin is not None and (known is None or known.queue != origin):
        return None
    life = state.state_of(offset) or ItemState.READY
    if known is None:  # produced into the dead queue by hand
        return DeadLetter((partition, offset), last_failure_reason(state, offset), attempt_count(state, offset, life), 0, 0, 0, 0, lies_at)
    failed = (known.first_failed_at, known.last_failed_at)
    reason = last_failure_reason(state, offset) or known.reason
    return DeadLetter(known.partition_and_offset, reason, known.attempts, known.buried_at, *failed, known.produced_at, lies_at)


def _column(name: str, made: ItemRows, letters: Sequence[DeadLetter], kept: Sequence[bool], queue: str) -> pa.Array:
    kind = DEAD.field(name).type
    if name == "dead_queue":
        return pa.repeat(pa.scalar(queue, kind), len(letters))
    if name in _TOLD:
        return pa.array([_TOLD[name](letter) for letter in letters], kind)
    column = made.column(name)
    column = column if all(kept) else column.filter(pa.array(kept))
    if name == "produced_at" and any(letter.produced_at for letter in letters):
        numbers = zip((letter.produced_at for letter in letters), column.cast(pa.int64()).to_pylist(), strict=True)
        return pa.array([first or here for first, here in numbers], pa.int64()).cast(kind)
    return column


_TOLD: dict[str, Callable[[DeadLetter], Any]] = {
    "id": lambda letter: format_id(*letter.place),
    "partition": lambda letter: letter.place[0],
    "offset": lambda letter: letter.place[1],
    "reason": lambda letter: letter.reason or None,
    "attempts": lambda letter: letter.attempts,
    "buried_at": lambda letter: letter.buried_at or None,
    "first_failed_at": lambda letter: letter.first_failed_at or None,
    "last_failed_at": lambda letter: letter.last_failed_at or None,
    "dead_id": lambda letter: letter.current_id,
}
