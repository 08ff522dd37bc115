"""Conversion between records (what happened to a partition) and frames (what a log stores).

Owns: `encode_records` and `decode_frame`.
Consecutive Produced records share a DATA frame, other consecutive records share a STATE frame. So the frames, read in
order, give the same records in the same order.
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
"""Payload bytes after which the next Produced record of a turn begins another frame."""
_PACKED = struct.Struct("<II")  # items, columns
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[StateRecord])


def encode_records(written: Sequence[Record], now: Moment, next_offset: int) -> list[Draft]:
    """The frames of some records. `next_offset`: the partition's next offset after these records."""
    if len(written) == 1:
        return [_draft(written, type(written[0]) is Produced, now, next_offset)]
    found: list[Draft] = []
    at = next((record.base for record in written if type(record) is Produced), next_offset)
    for data, group in groupby(written, lambda record: type(record) is Produced):
        found += [_draft(records, data, now, at) for records in (_split(list(group)) if data else [list(group)])]
        at = found[-1].base_offset + found[-1].count if data else at  # the offset after these items
    return found


def _split(produced: list[Record]) -> list[list[Record]]:
    """Split Produced records into groups of at most FRAME_BYTES; a larger record, or a view, is a group of its own."""
    groups: list[list[Record]] = []
    room = 0
    for record in produced:
        assert isinstance(record, Produced)
        size = FRAME_BYTES + 1 if record.batch.is_view else record.batch.size_bytes
        if not groups or size > room:
            groups.append([])
            room = FRAME_BYTES
        groups[-1].append(record)
        room -= size
    return groups


def _draft(group: Sequence[Record], data: bool, now: Moment, next_offset: int) -> Draft:
    if data:
        return columns.encode(group, now)  # type: ignore[arg-type]
    return Draft(FrameType.STATE, next_offset, len(group), 0, now.elapsed, now.wall, [_encoder.encode(group)])


def pack_batch(batch: Batch) -> bytes:
    """Items as bytes, to be stored inside a record."""
    draft = columns.encode([Produced(0, batch)], Moment(0, 0))
    return b"".join([_PACKED.pack(draft.count, draft.column_bits), *draft.parts])


def unpack_batch(packed: bytes) -> Batch:
    """The items of `pack_batch`."""
    count, present = _PACKED.unpack_from(packed)
    body = memoryview(packed)[_PACKED.size :]
    return columns.FrameColumns(Frame(FrameType.DATA, 0, 0, count, present, 0, 0, body)).batch()


def base_draft(body: bytes, now: Moment, next_offset: int) -> Draft:
    """The frame of an encoded Base."""
    return Draft(FrameType.BASE, next_offset, 1, 0, now.elapsed, now.wall, [body])


def decode_frame(frame: Frame, *, outline: bool = False) -> Sequence[Record]:
    """The records of a DATA or STATE frame; CorruptLog when they cannot be decoded.

    outline: without payloads, keys and texts, which replay does not need.
    """
    try:
        if frame.type is FrameType.DATA:
            return columns.FrameColumns(frame).records(outline=outline)
        return _decoder.decode(frame.body)
    except (msgspec.MsgspecError, ValueError, IndexError) as error:
        raise CorruptLog(f"frame {frame.sequence} is whole but cannot be understood ({error}); use a newer Penstock") from error
