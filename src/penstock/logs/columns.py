"""Items as bytes: the body of a DATA frame, columns in Arrow buffer layout.

Owns: `encode` (records → draft), `FrameColumns` (frame → items, blocks, records) and `trim_frame` (a frame cut down to the items that are still
wanted). Drawn in docs/format.md.
Every buffer starts 8-aligned, so a frame becomes an Arrow RecordBatch without copying. A column is there only when some item has it;
where all items have the same value it is stored once (a constant). Building costs one `join` and one array of lengths per column.
The header's `columns` word says which are there: present in the low 16 bits, constant in the high 16.
A trimmed frame is the stretch from its first to its last kept item; the others inside are blanked, so that offsets stay. It is an ordinary
frame with the old times. What a produce wanted remembered (parts) goes: it is in a Base by now.
"""

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, repeat
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec

from penstock.logs.log import Buffer, Draft, Frame, FrameType
from penstock.rules.records import Produced
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import Block
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from penstock.words.fields import COLUMNS, STORED, Column, ColumnLayout

BITS: Final = {field.name: 1 << column.bit for field, column in STORED if column.bit >= 0}
PARTS, ORIGIN = BITS["parts"], BITS["origin"]
CONSTANT_SHIFT: Final = 16
KNOWN: Final = sum(set(BITS.values()))
_COLUMNS: Final = {field.name: column.name for field, column in COLUMNS}
_TEXTS: Final = {column.name for _, column in STORED if column.form is ColumnLayout.TEXTS}
_CONSTANTS: Final = {form for form in ColumnLayout if form.constant != "never"}
_LAYOUT: Final = [(field.name, 1 << column.bit, column.form) for field, column in STORED[1:]]
_RULED: Final = ("priority", "at", "ttl", "dedup")
"""What `apply` looks at, besides key ids."""
_TWO_OFFSETS: Final = struct.Struct("<ii")
_PADDING: Final = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")


class ProducePart(msgspec.Struct, array_like=True):
    """The share of one produce in a frame, when there are several or there is something to remember of it."""

    count: int
    request: bytes | None = None
    ids: list[int] | None = None
    source: bytes | None = None
    sequence: int = 0
    places: list[int] | None = None


_parts_encoder = msgspec.msgpack.Encoder()
_parts_decoder = msgspec.msgpack.Decoder(list[ProducePart])


# -- encode ------------------------------------------------------------------------------------------


def encode(records: Sequence[Produced], now: Moment) -> Draft:
    """One DATA frame of the records, which must follow each other."""
    first = records[0]
    alone = len(records) == 1
    batch = first.batch if alone else join([record.batch for record in records])
    shares = None
    if not alone or first.request is not None or first.source is not None or first.replaced is not None:
        shares = [ProducePart(len(r.batch), r.request, r.ids, r.source, r.sequence, r.replaced) for r in records]
    parts: list[Buffer] = []
    _add_binary(parts, batch.payloads)
    columns = 0 if shares is None and batch.payloads_only else _add_columns(parts, batch, shares)
    return Draft(FrameType.DATA, first.base, len(batch), columns, now.elapsed, now.wall, parts)


def join(batches: Sequence[Batch]) -> Batch:
    """One batch of several; a column that only some have is filled up."""

    def joined(column: Column) -> Any:
        given = [getattr(batch, column.name) for batch in batches]
        if all(values is None for values in given):
            return None
        whole = chain.from_iterable(repeat(column.missing_value, len(b)) if v is None else v for v, b in zip(given, batches, strict=True))
        return bytes(whole) if column.form is ColumnLayout.SMALL else list(whole)

    return Batch(*(joined(column) for _, column in COLUMNS))


def _add_columns(parts: list[Buffer], batch: Batch, shares: list[ProducePart] | None) -> int:
    """All columns but the payloads; gives the word that says which there are."""
    word = 0
    for bit, name, add in _ADD:
        values = getattr(batch, name) if name else shares
        if values is not None:
            word |= bit | add(parts, bit, values)
    return word


def _add_texts(parts: list[Buffer], bit: int, values: Sequence[str | None]) -> int:
    encoded = [None if value is None else value.encode() for value in values]
    if not _same(encoded):
        return _add_nullable(parts, bit, encoded)
    _add_blob(parts, encoded[0] or b"")
    return bit << CONSTANT_SHIFT


def _add_small(parts: list[Buffer], bit: int, values: bytes) -> int:
    same = _same(values)
    _add_padded(parts, values[:1] if same else values)
    return bit << CONSTANT_SHIFT if same else 0


def _add_numbers(parts: list[Buffer], bit: int, values: Sequence[int]) -> int:
    same = _same(values)
    _add_padded(parts, array("q", values[:1] if same else values).tobytes())
    return bit << CONSTANT_SHIFT if same else 0


def _add_key_ids(parts: list[Buffer], bit: int, values: Sequence[int]) -> int:
    _add_padded(parts, array("Q", values).tobytes())
    return 0


def _add_digests(parts: list[Buffer], bit: int, values: Sequence[bytes | None]) -> int:
    _add_padded(parts, _bitmap(values))
    _add_padded(parts, b"".join(digest or bytes(16) for digest in values))
    return 0


def _add_shares(parts: list[Buffer], bit: int, shares: list[ProducePart]) -> int:
    _add_blob(parts, _parts_encoder.encode(shares))
    return 0


def _add_nullable(parts: list[Buffer], bit: int, values: Sequence[bytes | None]) -> int:
    _add_padded(parts, _bitmap(values))
    _add_binary(parts, [value or b"" for value in values])
    return 0


_BY_FORM: Final[Mapping[ColumnLayout, Callable[[list[Buffer], int, Any], int]]] = {
    ColumnLayout.OPTIONAL_BYTES: _add_nullable,
    ColumnLayout.KEY_IDS: _add_key_ids,
    ColumnLayout.TEXTS: _add_texts,
    ColumnLayout.SMALL: _add_small,
    ColumnLayout.NUMBERS: _add_numbers,
    ColumnLayout.DIGESTS: _add_digests,
    ColumnLayout.PARTS: _add_shares,
}
_ADD: Final = [(BITS[field.name], column.name, _BY_FORM[column.form]) for field, column in STORED[1:]]
"""How each column but the payload is added: its bit, its name in a Batch, and what adds the values and says whether they are a constant."""


def _same(values: Sequence[object]) -> bool:
    """Whether all items share a value."""
    first = values[0]
    return first is not None and all(value == first for value in values)


def _add_blob(parts: list[Buffer], data: bytes) -> None:
    _add_padded(parts, len(data).to_bytes(4, "little") + data)


def _add_binary(parts: list[Buffer], values: Sequence[bytes]) -> None:
    if len(values) == 1:
        value = values[0]
        parts += (_TWO_OFFSETS.pack(0, len(value)), value, _PADDING[len(value) & 7])
        return
    _add_padded(parts, array("i", accumulate(map(len, values), initial=0)).tobytes())
    _add_padded(parts, b"".join(values))


def _add_padded(parts: list[Buffer], data: bytes) -> None:
    parts.append(data)
    if len(data) & 7:
        parts.append(_PADDING[len(data) & 7])


def _bitmap(values: Sequence[object]) -> bytes:
    """A bit per value, 1 where there is one, first value lowest."""
    size = (len(values) + 7) // 8
    if None not in values:
        return b"\xff" * size
    digits = "".join("0" if value is None else "1" for value in reversed(values))
    return int(digits, 2).to_bytes(size, "little")


# -- decode ------------------------------------------------------------------------------------------


class BinaryColumn:
    """A column of byte strings: an offsets buffer and a data buffer, perhaps a bitmap of which are there."""

    __slots__ = ("bits", "data", "offsets")

    def __init__(self, offsets: memoryview, data: memoryview, bits: memoryview | None = None) -> None:
        self.offsets = offsets
        self.data = data
        self.bits = bits

    def values(self, start: int, stop: int) -> list[Any]:
        if self.bits is None and stop - start == 1:
            return [bytes(self.data[self.offsets[start] : self.offsets[stop]])]
        edges = self.offsets[start : stop + 1].tolist()
        low = edges[0]
        data = bytes(self.data[low : edges[-1]])
        if low:
            edges = [edge - low for edge in edges]
        found: list[Any] = [data[a:b] for a, b in zip(edges, edges[1:])]  # noqa: B905, RUF007 (hot path)
        if self.bits is not None:
            there = int.from_bytes(self.bits, "little") >> start
            if there & ((1 << len(found)) - 1) != (1 << len(found)) - 1:
                found = [value if there >> index & 1 else None for index, value in enumerate(found)]
        return found


class ConstantColumn:
    """A value that all items share."""

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
    """A column of numbers of one byte."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: bytes) -> None:
        self.numbers = numbers

    def values(self, start: int, stop: int) -> bytes:
        return self.numbers[start:stop]


class DigestColumn:
    """A column of 16-byte digests, some of them missing."""

    __slots__ = ("bits", "data")

    def __init__(self, data: memoryview, bits: memoryview) -> None:
        self.data = data
        self.bits = bits

    def values(self, start: int, stop: int) -> list[bytes | None]:
        there = int.from_bytes(self.bits, "little")
        return [bytes(self.data[16 * i : 16 * i + 16]) if there >> i & 1 else None for i in range(start, stop)]


StoredColumn: TypeAlias = BinaryColumn | ConstantColumn | NumberColumn | ByteColumn | DigestColumn


class FrameColumns:
    """The items of one DATA frame. Nothing is decoded before it is asked for."""

    stored: Mapping[str, StoredColumn] = MappingProxyType({})
    """The columns that it has besides the payloads, by the names of the fields."""

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
        """Find the columns besides the payloads."""
        if present & ~KNOWN:
            raise ValueError(f"it has columns {present & ~KNOWN:#x}, which are not known here")
        found: dict[str, StoredColumn] = {}
        for name, bit, form in _LAYOUT:
            if not present & bit:
                continue
            if form is ColumnLayout.PARTS:
                self._parts = _parts_decoder.decode(self._blob())
            else:
                found[name] = self._take_constant(form) if constant & bit and form in _CONSTANTS else self._take_column(form)
        return found

    def _take_column(self, form: ColumnLayout) -> StoredColumn:
        count = self._count
        if form is ColumnLayout.KEY_IDS:
            return NumberColumn(self._take(8 * count).cast("Q"))
        if form is ColumnLayout.NUMBERS:
            return NumberColumn(self._take(8 * count).cast("q"))
        if form is ColumnLayout.SMALL:
            return ByteColumn(bytes(self._take(count)))
        bits = self._take((count + 7) // 8)
        return DigestColumn(self._take(16 * count), bits) if form is ColumnLayout.DIGESTS else self._binary(bits)

    def _take_constant(self, form: ColumnLayout) -> StoredColumn:
        if form is ColumnLayout.TEXTS:
            return ConstantColumn(bytes(self._blob()))
        if form is ColumnLayout.SMALL:
            return ByteColumn(bytes(self._take(1)) * self._count)
        return ConstantColumn(self._take(8).cast("q")[0])

    def column(self, name: str) -> StoredColumn | None:
        """The column of a field, if the frame has it."""
        return self.payload if name == "payload" else self.stored.get(name)

    @property
    def size_bytes(self) -> int:
        return len(self._body)

    @property
    def parts(self) -> list[ProducePart]:
        return [ProducePart(self._count)] if self._parts is None else self._parts

    def _take(self, size: int) -> memoryview:
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
        """What rules may need to see."""
        return Block(self.base, self.stop, self.key_ids, self.priorities)

    def payloads(self, start: int, stop: int) -> list[bytes]:
        """Payloads of the offsets [start, stop). Whoever takes items one by one will take many: all are cut out once."""
        if stop - start < self._count // 8:
            return self._all_payloads[start - self.base : stop - self.base]
        return self.payload.values(start - self.base, stop - self.base)

    @cached_property
    def _all_payloads(self) -> list[bytes]:
        return self.payload.values(0, self._count)

    def batch(self, start: int | None = None, stop: int | None = None) -> Batch:
        """The items [start, stop) (all by default) as they were produced."""
        low = 0 if start is None else start - self.base
        high = self._count if stop is None else stop - self.base
        found: dict[str, Any] = {_COLUMNS[name]: column.values(low, high) for name, column in self.stored.items()}
        for name in _TEXTS & found.keys():
            found[name] = [None if value is None else value.decode() for value in found[name]]
        return Batch(self.payload.values(low, high), **found)

    def records(self, *, outline: bool = False) -> list[Produced]:
        """The records that were encoded; as an outline, without what `apply` does not look at."""
        found, at = [], self.base
        parts = self.parts
        for part in parts:
            batch = self._outline(at, at + part.count) if outline else self.batch(at, at + part.count)
            if len(parts) > 1:
                batch.drop_empty_columns()
            found.append(Produced(at, batch, part.request, part.ids, part.source, part.sequence, part.places))
            at += part.count
        return found

    def _outline(self, start: int, stop: int) -> Batch:
        low, high = start - self.base, stop - self.base
        nothing: Any = range(stop - start)
        found: dict[str, Any] = {_COLUMNS[name]: self.stored[name].values(low, high) for name in _RULED if name in self.stored}
        ids = self.stored.get("key_id")
        if isinstance(ids, NumberColumn):
            found |= {"keys": nothing, "key_ids": ids.numbers[low:high]}
        return Batch(nothing, **found)


# -- trimming --------------------------------------------------------------------------------------


def trim_frame(frame: Frame, keep: RunSet) -> Draft | None:
    """A draft of the frame with the items of `keep`, or None when it has none of them. One that cannot be taken apart is kept as it is."""
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
    """The batch, which starts at the first kept item, with nothing in the places of those not kept."""
    alive = bytearray(len(batch))
    for start, stop in pairs(kept):
        alive[start - kept[0] : stop - kept[0]] = b"\1" * (stop - start)
    if all(alive):
        return batch.drop_empty_columns()

    def blanked(column: Column) -> Any:
        values = getattr(batch, column.name)
        if values is None:
            return None
        left: Any = [value if there else column.missing_value for value, there in zip(values, alive, strict=True)]
        return bytes(left) if column.form is ColumnLayout.SMALL else left

    return Batch(*(blanked(column) for _, column in COLUMNS)).drop_empty_columns()
