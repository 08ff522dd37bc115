"""Items as bytes: the body of a DATA frame, columns in Arrow buffer layout.

Owns: `encode` (records → draft), `Columns` (frame → items, blocks, records) and `trimmed` (a frame cut down to the items that are still
wanted). Drawn in docs/format.md.
Every buffer starts 8-aligned, so a frame becomes an Arrow RecordBatch without copying. A column is there only when some item has it;
where all items have the same value it is stored once (a constant). Building costs one `join` and one array of lengths per column.
The header's `columns` word says which are there: present in the low 16 bits, constant in the high 16.
A trimmed frame is the stretch from its first to its last kept item; the others inside are blanked, so that offsets stay. It is an ordinary
frame with the old times. What a produce wanted remembered (parts) goes: it is in a Base by now.
"""

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, repeat
from types import MappingProxyType
from typing import Any, Final

import msgspec

from penstock.logs import columns
from penstock.logs.api import Buffer, Draft, Frame, FrameType
from penstock.rules.records import Produced
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import Block
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from penstock.words.limits import DEFAULT_PRIORITY

KEY, HEADERS, KIND, ENCODING, REFERENCE, PRIORITY, AT, TTL, DEDUP, PARTS, ORIGIN = (1 << bit for bit in range(11))
CONSTANT_SHIFT: Final = 16
KNOWN: Final = (1 << 11) - 1
_TEXTS: Final = {"kinds": KIND, "encodings": ENCODING, "references": REFERENCE}
_NUMBERS: Final = {"ats": AT, "ttls": TTL}
_TWO_OFFSETS: Final = struct.Struct("<ii")
_PADDING: Final = (b"", b"\0" * 7, b"\0" * 6, b"\0" * 5, b"\0" * 4, b"\0" * 3, b"\0" * 2, b"\0")


class Part(msgspec.Struct, array_like=True):
    """The share of one produce in a frame, when there are several or there is something to remember of it."""

    count: int
    request: bytes | None = None
    ids: list[int] | None = None
    source: bytes | None = None
    sequence: int = 0
    places: list[int] | None = None


_parts_encoder = msgspec.msgpack.Encoder()
_parts_decoder = msgspec.msgpack.Decoder(list[Part])


# -- encode ------------------------------------------------------------------------------------------


def encode(records: Sequence[Produced], now: Moment) -> Draft:
    """One DATA frame of the records, which must follow each other."""
    first = records[0]
    alone = len(records) == 1
    batch = first.batch if alone else join([record.batch for record in records])
    parts: list[Buffer] = []
    _add_binary(parts, batch.payloads)
    columns = 0 if batch.plain else _add_columns(parts, batch)
    if not alone or first.request is not None or first.source is not None or first.places is not None:
        columns |= PARTS
        shares = [Part(len(r.batch), r.request, r.ids, r.source, r.sequence, r.places) for r in records]
        _add_blob(parts, _parts_encoder.encode(shares))
    if batch.origins is not None:
        columns |= ORIGIN
        _add_nullable(parts, batch.origins)
    return Draft(FrameType.DATA, first.base, len(batch), columns, now.elapsed, now.wall, parts)


def join(batches: Sequence[Batch]) -> Batch:
    """One batch of several; a column that only some have is filled up."""

    def column(name: str, missing: Any) -> Any:
        given = [getattr(batch, name) for batch in batches]
        if all(values is None for values in given):
            return None
        return list(chain.from_iterable(repeat(missing, len(b)) if v is None else v for v, b in zip(given, batches, strict=True)))

    priorities = column("priorities", DEFAULT_PRIORITY)
    numbers = {name: column(name, 0) for name in ("key_ids", *_NUMBERS)}
    others = {name: column(name, None) for name in ("keys", "headers", *_TEXTS, "dedups", "origins")}
    payloads = list(chain.from_iterable(batch.payloads for batch in batches))
    return Batch(payloads, priorities=None if priorities is None else bytes(priorities), **numbers, **others)


def _add_columns(parts: list[Buffer], batch: Batch) -> int:
    """The columns whose bits come before that of the parts."""
    columns = 0
    if batch.keys is not None and batch.key_ids is not None:
        columns |= KEY
        _add_nullable(parts, batch.keys)
        _add_padded(parts, array("Q", batch.key_ids).tobytes())
    if batch.headers is not None:
        columns |= HEADERS
        _add_nullable(parts, batch.headers)
    for name, bit in _TEXTS.items():
        values = getattr(batch, name)
        if values is not None:
            columns |= bit
            encoded = [None if value is None else value.encode() for value in values]
            columns |= _add_constant(parts, bit, encoded, _add_blob) or _add_nullable(parts, encoded)
    if batch.priorities is not None:
        columns |= PRIORITY
        columns |= _add_constant(parts, PRIORITY, batch.priorities, _add_byte) or _add_padded(parts, batch.priorities)
    for name, bit in _NUMBERS.items():
        numbers = getattr(batch, name)
        if numbers is not None:
            columns |= bit
            columns |= _add_constant(parts, bit, numbers, _add_number) or _add_padded(parts, array("q", numbers).tobytes())
    if batch.dedups is not None:
        columns |= DEDUP
        _add_padded(parts, _bitmap(batch.dedups))
        _add_padded(parts, b"".join(digest or bytes(16) for digest in batch.dedups))
    return columns


def _add_constant(parts: list[Buffer], bit: int, values: Sequence[Any], add: Callable[[list[Buffer], Any], int]) -> int:
    """Store a value that all items share once; gives the bit that says so, or 0 when they do not."""
    first = values[0]
    if first is None or any(value != first for value in values):
        return 0
    add(parts, first)
    return bit << CONSTANT_SHIFT


def _add_padded(parts: list[Buffer], data: bytes) -> int:
    parts.append(data)
    if len(data) & 7:
        parts.append(_PADDING[len(data) & 7])
    return 0


def _add_byte(parts: list[Buffer], number: int) -> int:
    return _add_padded(parts, bytes([number]))


def _add_number(parts: list[Buffer], number: int) -> int:
    return _add_padded(parts, array("q", [number]).tobytes())


def _add_blob(parts: list[Buffer], data: bytes) -> int:
    return _add_padded(parts, len(data).to_bytes(4, "little") + data)


def _add_binary(parts: list[Buffer], values: Sequence[bytes]) -> None:
    if len(values) == 1:
        value = values[0]
        parts += (_TWO_OFFSETS.pack(0, len(value)), value, _PADDING[len(value) & 7])
        return
    _add_padded(parts, array("i", accumulate(map(len, values), initial=0)).tobytes())
    _add_padded(parts, b"".join(values))


def _add_nullable(parts: list[Buffer], values: Sequence[bytes | None]) -> int:
    _add_padded(parts, _bitmap(values))
    _add_binary(parts, [value or b"" for value in values])
    return 0


def _bitmap(values: Sequence[object]) -> bytes:
    """A bit per value, 1 where there is one, first value lowest."""
    size = (len(values) + 7) // 8
    if None not in values:
        return b"\xff" * size
    digits = "".join("0" if value is None else "1" for value in reversed(values))
    return int(digits, 2).to_bytes(size, "little")


# -- decode ------------------------------------------------------------------------------------------


class Binary:
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


class Constant:
    """A value that all items share."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def values(self, start: int, stop: int) -> list[Any]:
        return [self.value] * (stop - start)


class Numbers:
    """A column of fixed-width numbers."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: memoryview) -> None:
        self.numbers = numbers

    def values(self, start: int, stop: int) -> list[int]:
        return self.numbers[start:stop].tolist()


class Digests:
    """A column of 16-byte digests, some of them missing."""

    __slots__ = ("bits", "data")

    def __init__(self, data: memoryview, bits: memoryview) -> None:
        self.data = data
        self.bits = bits

    def values(self, start: int, stop: int) -> list[bytes | None]:
        there = int.from_bytes(self.bits, "little")
        return [bytes(self.data[16 * i : 16 * i + 16]) if there >> i & 1 else None for i in range(start, stop)]


class Columns:
    """The items of one DATA frame. Nothing is decoded before it is asked for."""

    key: Binary | None = None
    raw_key_ids: memoryview | None = None
    headers: Binary | None = None
    texts: Mapping[str, Binary | Constant] = MappingProxyType({})
    priorities: bytes | None = None
    numbers: Mapping[str, Numbers | Constant] = MappingProxyType({})
    dedup: Digests | None = None
    origin: Binary | None = None

    def __init__(self, frame: Frame) -> None:
        self.base = frame.base
        self.stop = frame.base + frame.count
        self.wall = frame.wall
        self._body = frame.body
        self._count = frame.count
        self._at = 0
        self._parts: list[Part] | None = None
        self.payload = self._binary()
        if frame.columns:
            self._locate(frame.columns & 0xFFFF, frame.columns >> CONSTANT_SHIFT)

    def _locate(self, present: int, constant: int) -> None:
        """Find the columns besides the payloads."""
        if present & ~KNOWN:
            raise ValueError(f"it has columns {present & ~KNOWN:#x}, which are not known here")
        count = self._count
        if present & KEY:
            self.key = self._nullable()
            self.raw_key_ids = self._take(8 * count).cast("Q")
        if present & HEADERS:
            self.headers = self._nullable()
        self.texts = {
            name: Constant(bytes(self._blob())) if constant & bit else self._nullable() for name, bit in _TEXTS.items() if present & bit
        }
        if present & PRIORITY:
            self.priorities = bytes(self._take(1)) * count if constant & PRIORITY else bytes(self._take(count))
        self.numbers = {
            name: Constant(self._take(8).cast("q")[0]) if constant & bit else Numbers(self._take(8 * count).cast("q"))
            for name, bit in _NUMBERS.items()
            if present & bit
        }
        if present & DEDUP:
            bits = self._take((count + 7) // 8)
            self.dedup = Digests(self._take(16 * count), bits)
        if present & PARTS:
            self._parts = _parts_decoder.decode(self._blob())
        if present & ORIGIN:
            self.origin = self._nullable()

    @property
    def size_bytes(self) -> int:
        return len(self._body)

    @property
    def parts(self) -> list[Part]:
        return [Part(self._count)] if self._parts is None else self._parts

    def _take(self, size: int) -> memoryview:
        taken = self._body[self._at : self._at + size]
        self._at += (size + 7) & ~7
        return taken

    def _blob(self) -> memoryview:
        size = int.from_bytes(self._body[self._at : self._at + 4], "little")
        return self._take(4 + size)[4:]

    def _binary(self, bits: memoryview | None = None) -> Binary:
        edges = self._take(4 * (self._count + 1)).cast("i")
        return Binary(edges, self._take(edges[-1]), bits)

    def _nullable(self) -> Binary:
        return self._binary(self._take((self._count + 7) // 8))

    @cached_property
    def key_ids(self) -> list[int] | None:
        return None if self.raw_key_ids is None else self.raw_key_ids.tolist()

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
        key_ids = self.key_ids
        return Batch(
            self.payload.values(low, high),
            None if self.key is None else self.key.values(low, high),
            None if key_ids is None else key_ids[low:high],
            None if self.headers is None else self.headers.values(low, high),
            priorities=None if self.priorities is None else self.priorities[low:high],
            dedups=None if self.dedup is None else self.dedup.values(low, high),
            origins=None if self.origin is None else self.origin.values(low, high),
            **self._texts(low, high),
            **self._numbers(low, high),
        )

    def records(self, *, outline: bool = False) -> list[Produced]:
        """The records that were encoded; as an outline, without what `apply` does not look at."""
        found, at = [], self.base
        parts = self.parts
        for part in parts:
            batch = self._outline(at, at + part.count) if outline else self.batch(at, at + part.count)
            if len(parts) > 1:
                batch.compact()
            found.append(Produced(at, batch, part.request, part.ids, part.source, part.sequence, part.places))
            at += part.count
        return found

    def _outline(self, start: int, stop: int) -> Batch:
        low, high = start - self.base, stop - self.base
        nothing: Any = range(stop - start)
        return Batch(
            nothing,
            nothing if self.raw_key_ids is not None else None,
            None if self.raw_key_ids is None else self.raw_key_ids[low:high],
            priorities=None if self.priorities is None else self.priorities[low:high],
            dedups=None if self.dedup is None else self.dedup.values(low, high),
            **self._numbers(low, high),
        )

    def _texts(self, low: int, high: int) -> dict[str, Any]:
        return {name: _decoded(column.values(low, high)) for name, column in self.texts.items()}

    def _numbers(self, low: int, high: int) -> dict[str, Any]:
        return {name: column.values(low, high) for name, column in self.numbers.items()}


def _decoded(values: Iterable[bytes | None]) -> list[str | None]:
    return [None if value is None else value.decode() for value in values]


# -- trimming --------------------------------------------------------------------------------------


_BLANKS: dict[str, Any] = {"payloads": b"", "key_ids": NO_KEY, "priorities": DEFAULT_PRIORITY, "ats": 0, "ttls": 0}
"""What a blanked item has in a column; None in the others."""


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

    def column(name: str) -> Any:
        values, blank = getattr(batch, name), _BLANKS.get(name)
        if values is None:
            return None
        left: Any = [value if there else blank for value, there in zip(values, alive, strict=True)]
        return bytes(left) if name == "priorities" else left

    return Batch(*(column(name) for name in batch.__struct_fields__)).compact()
