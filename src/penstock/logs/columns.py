"""The body of a DATA frame: items as columns, in the buffer layout of Arrow (docs/format.md shows it).

Owns: `encode` (records to a draft), `FrameColumns` (a frame to items, blocks and records) and `trim_frame` (a frame
without the items that retention removes).
Every buffer is aligned to 8 bytes, so a frame becomes an Arrow RecordBatch without copying. A column is stored only
when some item has a value; a value that all items share is stored once (a constant). The header's column bits say which
columns are present (low 16 bits) and which are constants (high 16 bits).
A trimmed frame holds the offsets from its first to its last kept item, with the old times; items between them that are
not kept have empty values, so that offsets do not change. It has no parts: a later Base contains what they say.
"""

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, repeat
from operator import eq
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec

from penstock.logs.log import Buffer, Draft, Frame, FrameType
from penstock.rules.calls import FORMER, CallName
from penstock.rules.records import Produced
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import Block
from penstock.words.batch import Batch
from penstock.words.binary_column import BinaryColumn, TextColumn, pack_bits, presence
from penstock.words.clock import Moment
from penstock.words.fields import COLUMNS, STORED, Column, ColumnLayout

BITS: Final = {field.name: 1 << column.bit for field, column in STORED if column.bit >= 0}
PARTS, ORIGIN = BITS["parts"], BITS["origin"]
CONSTANT_SHIFT: Final = 16
KNOWN: Final = sum(set(BITS.values()))
_COLUMNS: Final = {field.name: column.name for field, column in COLUMNS}
_TEXTS: Final = {column.name for _, column in STORED if column.layout is ColumnLayout.TEXTS}
_CONSTANTS: Final = {layout for layout in ColumnLayout if layout.constant != "never"}
_LAYOUTS: Final = [(field.name, 1 << column.bit, column.layout) for field, column in STORED[1:]]
_RULED: Final = ("priority", "at", "ttl", "dedup", "dedup_window", "origin")
"""The fields that `rules.machine.apply` reads, besides key ids."""
_TWO_OFFSETS: Final = struct.Struct("<ii")
_PADDING: Final = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")


class ProducePart(msgspec.Struct, array_like=True):
    """One Produced record in a frame. Stored when a frame has several, or one with more than items."""

    count: int
    request: bytes | None = None
    """Not written any more: `calls` replaced it."""
    ids: list[int] | None = None
    source: bytes | None = None
    sequence: int = 0
    replaced: list[int] | None = None
    calls: list[CallName] = []
    indexes: list[int] | None = None


_parts_encoder = msgspec.msgpack.Encoder()
_parts_decoder = msgspec.msgpack.Decoder(list[ProducePart])


# -- encode ------------------------------------------------------------------------------------------


def encode(records: Sequence[Produced], now: Moment) -> Draft:
    """A DATA frame of records whose offsets follow each other."""
    first = records[0]
    batch = first.batch if len(records) == 1 else Batch.join([record.batch for record in records])
    produce_parts = None
    if len(records) > 1 or first.calls or first.source is not None or first.replaced is not None:
        produce_parts = [ProducePart(len(r.batch), None, r.ids, r.source, r.sequence, r.replaced, [*r.calls], r.indexes) for r in records]
    parts: list[Buffer] = []
    _add_binary(parts, batch.payloads)
    column_bits = 0 if produce_parts is None and batch.payloads_only else _add_columns(parts, batch, produce_parts)
    return Draft(FrameType.DATA, first.base, len(batch.payloads), column_bits, now.elapsed, now.wall, parts)


def _add_columns(parts: list[Buffer], batch: Batch, produce_parts: list[ProducePart] | None) -> int:
    """Add all columns except the payloads, and return the column bits."""
    column_bits = 0
    for bit, name, add in _ADD:
        values = getattr(batch, name) if name else produce_parts
        if values is not None:
            column_bits |= bit | add(parts, bit, values)
    return column_bits


def _add_texts(parts: list[Buffer], bit: int, values: Sequence[str | None]) -> int:
    if isinstance(values, TextColumn):
        return _add_nullable(parts, bit, values)
    if not _same(values):
        return _add_nullable(parts, bit, [None if value is None else value.encode() for value in values])
    _add_blob(parts, (values[0] or "").encode())
    return bit << CONSTANT_SHIFT


def _add_small(parts: list[Buffer], bit: int, values: bytes) -> int:
    same = _same(values)
    add_padded(parts, values[:1] if same else values)
    return bit << CONSTANT_SHIFT if same else 0


def _add_numbers(parts: list[Buffer], bit: int, values: Sequence[int]) -> int:
    same = _same(values)
    add_padded(parts, array("q", values[:1] if same else values).tobytes())
    return bit << CONSTANT_SHIFT if same else 0


def _add_key_ids(parts: list[Buffer], bit: int, values: Sequence[int]) -> int:
    add_padded(parts, array("Q", values).tobytes())
    return 0


def _add_digests(parts: list[Buffer], bit: int, values: Sequence[bytes | None]) -> int:
    add_padded(parts, _bitmap(values))
    add_padded(parts, b"".join(digest or bytes(16) for digest in values))
    return 0


def _add_produce_parts(parts: list[Buffer], bit: int, produce_parts: list[ProducePart]) -> int:
    _add_blob(parts, _parts_encoder.encode(produce_parts))
    return 0


def _add_nullable(parts: list[Buffer], bit: int, values: Sequence[bytes | None]) -> int:
    if isinstance(values, BinaryColumn):
        add_padded(parts, values.bits if values.bits is not None else pack_bits("1" * len(values)))
        _add_binary(parts, values)
    else:
        add_padded(parts, _bitmap(values))
        _add_binary(parts, [value or b"" for value in values])
    return 0


_BY_LAYOUT: Final[Mapping[ColumnLayout, Callable[[list[Buffer], int, Any], int]]] = {
    ColumnLayout.OPTIONAL_BYTES: _add_nullable,
    ColumnLayout.KEY_IDS: _add_key_ids,
    ColumnLayout.TEXTS: _add_texts,
    ColumnLayout.SMALL: _add_small,
    ColumnLayout.NUMBERS: _add_numbers,
    ColumnLayout.DIGESTS: _add_digests,
    ColumnLayout.PARTS: _add_produce_parts,
}
_ADD: Final = [(BITS[field.name], column.name, _BY_LAYOUT[column.layout]) for field, column in STORED[1:]]
"""Of each column except the payloads: its bit, its name in a Batch, and the function that adds its values to the body.

The function returns the bit shifted by CONSTANT_SHIFT when it stored a constant, else 0.
"""


def _same(values: Sequence[object]) -> bool:
    """Whether all values are equal and not None."""
    first = values[0]
    return first is not None and all(map(eq, values, repeat(first)))


def _add_blob(parts: list[Buffer], data: bytes) -> None:
    add_padded(parts, len(data).to_bytes(4, "little") + data)


def _add_binary(parts: list[Buffer], values: Sequence[bytes]) -> None:
    if len(values) == 1 and type(values) is list:
        value = values[0]
        parts += (_TWO_OFFSETS.pack(0, len(value)), value, _PADDING[len(value) & 7])
        return
    if isinstance(values, BinaryColumn):  # its bytes, as they are
        add_padded(parts, values.offsets.cast("B"))
        add_padded(parts, values.data)
        return
    add_padded(parts, struct.pack(f"<{len(values) + 1}i", *accumulate(map(len, values), initial=0)))  # faster than an array
    add_padded(parts, b"".join(values))


def add_padded(parts: list[Buffer], data: Buffer) -> None:
    """Add data, and zeros up to a multiple of 8 bytes."""
    parts.append(data)
    if len(data) & 7:
        parts.append(_PADDING[len(data) & 7])


def _bitmap(values: Sequence[object]) -> bytes:
    """A bit per value, the first value in the lowest bit; 1 where the value is not None."""
    return pack_bits("".join(["0" if value is None else "1" for value in values]) if None in values else "1" * len(values))


# -- decode ------------------------------------------------------------------------------------------


class ConstantColumn:
    """A column in which all items have the same value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def values(self, start: int, stop: int) -> list[Any]:
        return [self.value] * (stop - start)


class NumberColumn:
    """A column of fixed-width numbers."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: memoryview) -> None:
        self.numbers = numbers

    def values(self, start: int, stop: int) -> list[int]:
        return self.numbers[start:stop].tolist()


class ByteColumn:
    """A column of one-byte numbers."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: bytes) -> None:
        self.numbers = numbers

    def values(self, start: int, stop: int) -> bytes:
        return self.numbers[start:stop]


class DigestColumn:
    """A column of 16-byte digests; some items may have none."""

    __slots__ = ("bits", "data")

    def __init__(self, data: memoryview, bits: memoryview) -> None:
        self.data = data
        self.bits = bits

    def values(self, start: int, stop: int) -> list[bytes | None]:
        data = bytes(self.data[16 * start : 16 * stop])
        present = presence(self.bits, start, stop)
        return [data[16 * at : 16 * at + 16] if here == "1" else None for at, here in enumerate(present)]


StoredColumn: TypeAlias = BinaryColumn | ConstantColumn | NumberColumn | ByteColumn | DigestColumn


class FrameColumns:
    """The items of one DATA frame. The constructor only finds the columns; values are decoded when they are read."""

    stored: Mapping[str, StoredColumn] = MappingProxyType({})
    """The columns of the frame except the payloads, by field name."""

    def __init__(self, frame: Frame) -> None:
        self.base = frame.base_offset
        self.stop = frame.base_offset + frame.count
        self.wall = frame.wall
        self._body = frame.body
        self._count = frame.count
        self._at = 0
        self._parts: list[ProducePart] | None = None
        self.payload = self._binary()
        if frame.column_bits:
            self.stored = self._locate(frame.column_bits & 0xFFFF, frame.column_bits >> CONSTANT_SHIFT)

    def _locate(self, present: int, constant: int) -> dict[str, StoredColumn]:
        """Find the columns except the payloads; ValueError for a column that this version does not know."""
        if present & ~KNOWN:
            raise ValueError(f"its columns {present & ~KNOWN:#x} are unknown")
        found: dict[str, StoredColumn] = {}
        for name, bit, layout in _LAYOUTS:
            if not present & bit:
                continue
            if layout is ColumnLayout.PARTS:
                self._parts = _parts_decoder.decode(self._blob())
            else:
                found[name] = self._take_constant(layout) if constant & bit and layout in _CONSTANTS else self._take_column(layout)
        return found

    def _take_column(self, layout: ColumnLayout) -> StoredColumn:
        count = self._count
        if layout is ColumnLayout.KEY_IDS:
            return NumberColumn(self._take(8 * count).cast("Q"))
        if layout is ColumnLayout.NUMBERS:
            return NumberColumn(self._take(8 * count).cast("q"))
        if layout is ColumnLayout.SMALL:
            return ByteColumn(bytes(self._take(count)))
        bits = self._take((count + 7) // 8)
        return DigestColumn(self._take(16 * count), bits) if layout is ColumnLayout.DIGESTS else self._binary(bits)

    def _take_constant(self, layout: ColumnLayout) -> StoredColumn:
        if layout is ColumnLayout.TEXTS:
            return ConstantColumn(bytes(self._blob()))
        if layout is ColumnLayout.SMALL:
            return ByteColumn(bytes(self._take(1)) * self._count)
        return ConstantColumn(self._take(8).cast("q")[0])

    def column(self, name: str) -> StoredColumn | None:
        """The column of a field; None when the frame does not have it."""
        return self.payload if name == "payload" else self.stored.get(name)

    @property
    def size_bytes(self) -> int:
        return len(self._body)

    @property
    def parts(self) -> list[ProducePart]:
        return [ProducePart(self._count)] if self._parts is None else self._parts

    def _take(self, size: int) -> memoryview:
        """The next `size` bytes of the body; skips the padding behind them."""
        taken = self._body[self._at : self._at + size]
        self._at += (size + 7) & ~7
        return taken

    def _blob(self) -> memoryview:
        size = int.from_bytes(self._body[self._at : self._at + 4], "little")
        return self._take(4 + size)[4:]

    def _binary(self, bits: memoryview | None = None) -> BinaryColumn:
        edges = self._take(4 * (self._count + 1)).cast("i")
        return BinaryColumn(edges, self._take(edges[-1]), bits)

    @cached_property
    def key_ids(self) -> list[int] | None:
        found = self.stored.get("key_id")
        return found.values(0, self._count) if isinstance(found, NumberColumn) else None

    @property
    def priorities(self) -> bytes | None:
        found = self.stored.get("priority")
        return found.numbers if isinstance(found, ByteColumn) else None

    def block(self) -> Block:
        """Offsets, key ids and priorities, for the rules."""
        return Block(self.base, self.stop, self.key_ids, self.priorities)

    def payloads(self, start: int, stop: int) -> list[bytes]:
        """The payloads of the offsets [start, stop). A small range decodes and caches all payloads."""
        if stop - start < self._count // 8:
            return list(self._all_items.payloads[start - self.base : stop - self.base])
        return self.payload.values(start - self.base, stop - self.base)

    def batch(self, start: int | None = None, stop: int | None = None) -> Batch:
        """The items at offsets [start, stop), by default all. A small range decodes and caches all items."""
        low = 0 if start is None else start - self.base
        high = self._count if stop is None else stop - self.base
        if high - low < self._count // 8:
            return self._all_items.slice(low, high)
        return self._decode(low, high)

    @cached_property
    def _all_items(self) -> Batch:
        return self._decode(0, self._count)

    def gather(self, chosen: Sequence[int]) -> Batch:
        """The items at these offsets, in that order."""
        base = self.base
        if len(chosen) * 128 < self._count and "_all_items" not in vars(self):
            return Batch.join([self._decode(offset - base, offset - base + 1) for offset in chosen])
        return self._all_items.take([offset - base for offset in chosen])

    def _decode(self, low: int, high: int) -> Batch:
        found: dict[str, Any] = {_COLUMNS[name]: column.values(low, high) for name, column in self.stored.items()}
        for name in _TEXTS & found.keys():
            found[name] = [None if value is None else value.decode() for value in found[name]]
        return Batch(self.payload.values(low, high), **found)

    def view(self) -> Batch:
        """All items, without an object for each: columns of bytes and texts are parts of the frame, key ids an array.

        `encode` copies such columns to another frame. ValueError when the columns are not exactly its body.
        """
        count = self._count
        if self._at != len(self._body):
            raise ValueError(f"its columns have {self._at} bytes, not {len(self._body)}")
        found: dict[str, Any] = {}
        for name, column in [("payload", self.payload), *self.stored.items()]:
            as_text = _COLUMNS[name] in _TEXTS
            if isinstance(column, BinaryColumn):
                if len(column) != count or column.offsets[0] or column.offsets[-1] != len(column.data):
                    raise ValueError(f"its column {name} is incomplete")
                values: Any = TextColumn(column.offsets, column.data, column.bits) if as_text else column
            elif name == "key_id" and isinstance(column, NumberColumn):
                values = array("Q", column.numbers.tobytes())
            elif as_text and isinstance(column, ConstantColumn):
                values = [column.value.decode()] * count
            else:
                values = column.values(0, count)
            found[_COLUMNS[name]] = values
        return Batch(**found)

    def records(self, *, outline: bool = False) -> list[Produced]:
        """The records of `encode`. outline: their batches have only the columns that `rules.machine.apply` reads."""
        found, at = [], self.base
        parts = self.parts
        for part in parts:
            batch = self._outline(at, at + part.count) if outline else self.batch(at, at + part.count)
            if len(parts) > 1:
                batch.drop_empty_columns()
            calls = tuple(part.calls) if part.request is None else (CallName(part.request, 1, FORMER),)
            found.append(Produced(at, batch, calls, part.ids, part.source, part.sequence, part.replaced, part.indexes))
            at += part.count
        return found

    def _outline(self, start: int, stop: int) -> Batch:
        low, high = start - self.base, stop - self.base
        placeholder: Any = range(stop - start)  # has the right length; the values are not read
        found: dict[str, Any] = {_COLUMNS[name]: self.stored[name].values(low, high) for name in _RULED if name in self.stored}
        ids = self.stored.get("key_id")
        if isinstance(ids, NumberColumn):
            found |= {"keys": placeholder, "key_ids": ids.numbers[low:high]}
        return Batch(placeholder, **found)


# -- trimming ----------------------------------------------------------------------------------------


def trim_frame(frame: Frame, keep: RunSet) -> Draft | None:
    """The frame with only the items of `keep`; None when it has none. A frame that cannot be decoded is kept."""
    stop = frame.base_offset + frame.count
    kept = keep.within(frame.base_offset, stop)
    if not kept:
        return None
    whole = Draft(frame.type, frame.base_offset, frame.count, frame.column_bits, frame.elapsed, frame.wall, [frame.body])
    if kept == [frame.base_offset, stop] and not frame.column_bits & PARTS:
        return whole
    try:
        batch = FrameColumns(frame).batch(kept[0], kept[-1])
    except (msgspec.MsgspecError, ValueError, IndexError, TypeError):
        return whole
    return encode([Produced(kept[0], _blanked(batch, kept))], Moment(frame.elapsed, frame.wall))


def _blanked(batch: Batch, kept: Sequence[int]) -> Batch:
    """A batch that begins at offset `kept[0]`, with empty values for the items that are not in the runs `kept`."""
    is_kept = bytearray(len(batch))
    for start, stop in pairs(kept):
        is_kept[start - kept[0] : stop - kept[0]] = b"\1" * (stop - start)
    if all(is_kept):
        return batch.drop_empty_columns()

    def blanked(column: Column) -> Any:
        values = getattr(batch, column.name)
        if values is None:
            return None
        found: Any = [value if keep else column.missing_value for value, keep in zip(values, is_kept, strict=True)]
        return bytes(found) if column.layout is ColumnLayout.SMALL else found

    return Batch(*(blanked(column) for _, column in COLUMNS)).drop_empty_columns()
