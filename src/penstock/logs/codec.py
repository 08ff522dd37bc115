"""Records to frames and back: what the rules say, as what a log keeps.

Owns: `drafts` and `records`. Order is kept exactly: produces that follow each other share a DATA frame, all other records that follow
each other share a STATE frame, so reading the frames back gives the very records that were written.
"""

import struct
from collections.abc import Sequence
from itertools import groupby

import msgspec

from penstock.logs import columns
from penstock.logs.log import Draft, Frame, FrameType
from penstock.rules.records import Produced, Record, StateRecord
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog
from penstock.words.limits import MIB

FRAME_BYTES = 64 * MIB
"""Payload bytes after which a turn's produces go on in another frame."""
_PACKED = struct.Struct("<II")  # items, columns
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[StateRecord])


def encode_records(written: Sequence[Record], now: Moment, next_offset: int) -> list[Draft]:
    """The frames of records, in their order. `next_offset` is the partition's after them."""
    if len(written) == 1:
        return [_draft(written, type(written[0]) is Produced, now, next_offset)]
    found: list[Draft] = []
    at = next((record.base for record in written if type(record) is Produced), next_offset)
    for data, group in groupby(written, lambda record: type(record) is Produced):
        found += [_draft(share, data, now, at) for share in (_shares(list(group)) if data else [list(group)])]
        at = found[-1].base_offset + found[-1].count if data else at  # what follows stands behind these items, not behind the whole turn's
    return found


def _shares(group: list[Record]) -> list[list[Record]]:
    """Produces in shares that a frame can hold."""
    shares: list[list[Record]] = []
    room = 0
    for record in group:
        size = record.batch.size_bytes if isinstance(record, Produced) else 0
        if not shares or size > room:
            shares.append([])
            room = FRAME_BYTES
        shares[-1].append(record)
        room -= size
    return shares


def _draft(group: Sequence[Record], data: bool, now: Moment, next_offset: int) -> Draft:
    if data:
        return columns.encode(group, now)  # type: ignore[arg-type]
    return Draft(FrameType.STATE, next_offset, len(group), 0, now.elapsed, now.wall, [_encoder.encode(group)])


def pack_batch(batch: Batch) -> bytes:
    """Items as bytes, for a record that carries some."""
    draft = columns.encode([Produced(0, batch)], Moment(0, 0))
    return b"".join([_PACKED.pack(draft.count, draft.column_bits), *draft.parts])


def unpack_batch(packed: bytes) -> Batch:
    """The items that `pack_batch` saw."""
    count, present = _PACKED.unpack_from(packed)
    body = memoryview(packed)[_PACKED.size :]
    return columns.FrameColumns(Frame(FrameType.DATA, 0, 0, count, present, 0, 0, body)).batch()


def join_batches(batches: Sequence[Batch]) -> Batch:
    """One batch of several; a column that only some have is filled up."""
    return batches[0] if len(batches) == 1 else columns.join(batches)


def base_draft(body: bytes, now: Moment, next_offset: int) -> Draft:
    """The frame of a Base."""
    return Draft(FrameType.BASE, next_offset, 1, 0, now.elapsed, now.wall, [body])


def decode_frame(frame: Frame, *, outline: bool = False) -> Sequence[Record]:
    """The records of a DATA or STATE frame. An outline has no payloads, keys or texts, which is all that replay needs."""
    try:
        if frame.type is FrameType.DATA:
            return columns.FrameColumns(frame).records(outline=outline)
        return _decoder.decode(frame.body)
    except (msgspec.MsgspecError, ValueError, IndexError) as error:
        raise CorruptLog(f"frame {frame.sequence} is whole but cannot be understood ({error}); use a newer Penstock") from error
