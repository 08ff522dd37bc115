"""Cutting a DATA frame down to the items that are still wanted.

Owns: `trimmed`. The frame is cut to the stretch from its first to its last kept item; the others inside are blanked, so that offsets stay.
What comes out is an ordinary frame with the old times. What a produce wanted remembered (parts) goes: it is in a Base by now.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.logs import columns
from penstock.logs.api import Draft, Frame
from penstock.logs.columns import Columns
from penstock.rules.records import Produced
from penstock.rules.runs import RunSet, pairs
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from penstock.words.fields import COLUMNS, Column, Form


def trimmed(frame: Frame, keep: RunSet) -> Draft | None:
    """A draft of the frame with the items of `keep`, or None when it has none of them. One that cannot be taken apart is kept as it is."""
    stop = frame.base + frame.count
    kept = keep.within(frame.base, stop)
    if not kept:
        return None
    whole = Draft(frame.type, frame.base, frame.count, frame.columns, frame.elapsed, frame.wall, [frame.body])
    if kept == [frame.base, stop] and not frame.columns & columns.PARTS:
        return whole
    try:
        batch = Columns(frame).batch(kept[0], kept[-1])
    except (msgspec.MsgspecError, ValueError, IndexError, TypeError):
        return whole
    return columns.encode([Produced(kept[0], _blanked(batch, kept))], Moment(frame.elapsed, frame.wall))


def _blanked(batch: Batch, kept: Sequence[int]) -> Batch:
    """The batch, which starts at the first kept item, with nothing in the places of those not kept."""
    alive = bytearray(len(batch))
    for start, stop in pairs(kept):
        alive[start - kept[0] : stop - kept[0]] = b"\1" * (stop - start)
    if all(alive):
        return batch.compact()

    def blanked(column: Column) -> Any:
        values = getattr(batch, column.name)
        if values is None:
            return None
        left: Any = [value if there else column.nothing for value, there in zip(values, alive, strict=True)]
        return bytes(left) if column.form is Form.SMALL else left

    return Batch(*(blanked(column) for _, column in COLUMNS)).compact()
