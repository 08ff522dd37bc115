"""Byte strings and texts as the columns of a frame hold them: offsets and data, without an object per item.

Owns: `BinaryColumn` and `TextColumn`. They are sequences, so that a Batch may have them in place of lists: a batch made
of a frame is then validated, divided and written to another frame by its bytes. A value is decoded when it is read.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import Any

STRIDE = 16


class BinaryColumn(Sequence[Any]):
    """A column of byte strings: offsets, data and, when values may be missing, a bitmap. It is never changed."""

    __slots__ = ("_pieces", "bits", "data", "offsets")

    def __init__(self, offsets: memoryview, data: memoryview, bits: memoryview | None = None) -> None:
        """offsets: one more than values, as 32-bit numbers."""
        self.offsets = offsets
        self.data = data
        self.bits = bits
        self._pieces: list[bytes] | None = None  # made by the first `take`: a batch is divided into many shares

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self.values(start, max(start, stop)) if step == 1 else self.values(0, len(self))[index]
        at = range(len(self))[index]
        if self.bits is not None and not self.bits[at >> 3] >> (at & 7) & 1:
            return None
        return self.values(at, at + 1)[0]

    def values(self, start: int, stop: int) -> list[Any]:
        """The values [start, stop); None for a missing one."""
        if self.bits is None and stop - start == 1:
            return [bytes(self.data[self.offsets[start] : self.offsets[stop]])]
        found: list[Any] = self._cut(start, stop)
        if self.bits is not None:
            present = presence(self.bits, start, stop)
            if "0" in present:
                found = [value if here == "1" else None for value, here in zip(found, present, strict=True)]
        return found

    def _cut(self, start: int, stop: int) -> list[bytes]:
        """The bytes of the values [start, stop); of a missing one b""."""
        edges = self.offsets[start : stop + 1].tolist()
        low = edges[0]
        data = bytes(self.data[low : edges[-1]])
        if low:
            edges = [edge - low for edge in edges]
        return [data[a:b] for a, b in zip(edges, edges[1:])]  # noqa: B905, RUF007 (hot path)

    @property
    def is_in_order(self) -> bool:
        """Whether no offset is below the one before it; only damage can cause that."""
        edges = self.offsets.tolist()
        return edges == sorted(edges)

    def longest_above(self, limit: int) -> int:
        """The length of the longest value if it is above the limit, else 0. The offsets must be in order."""
        edges = self.offsets.tolist()
        if max(map(sub, [*edges[STRIDE::STRIDE], edges[-1]], edges[::STRIDE])) <= limit:
            return 0  # no value is longer than STRIDE of them together: usually that is known so
        longest = max(map(sub, edges[1:], edges), default=0)
        return longest if longest > limit else 0

    @property
    def size_bytes(self) -> int:
        """The length of all values."""
        return self.offsets[-1] - self.offsets[0]

    def take(self, indexes: Sequence[int]) -> "BinaryColumn":
        """The values at `indexes`, in that order, as a column."""
        if self._pieces is None:
            self._pieces = self._cut(0, len(self))
        pieces = self._pieces
        values = [pieces[index] for index in indexes]
        offsets = memoryview(array("i", accumulate(map(len, values), initial=0)))
        bits = None
        if self.bits is not None:
            present = presence(self.bits, 0, len(self))
            bits = memoryview(pack_bits("".join([present[index] for index in indexes]) if "0" in present else "1" * len(indexes)))
        return type(self)(offsets, memoryview(b"".join(values)), bits)

    def count(self, value: Any) -> int:
        if value is None:
            return 0 if self.bits is None else presence(self.bits, 0, len(self)).count("0")
        return super().count(value)


class TextColumn(BinaryColumn):
    """A column of texts, stored as UTF-8. Reading a value that is not UTF-8 raises UnicodeDecodeError."""

    __slots__ = ()

    def values(self, start: int, stop: int) -> list[Any]:
        return [None if value is None else value.decode() for value in super().values(start, stop)]


def presence(bits: memoryview, start: int, stop: int) -> str:
    """The bits [start, stop) of a bitmap, whose first bit is the lowest, as the digits 0 and 1."""
    low, high = start >> 3, (stop + 7) >> 3
    digits = format(int.from_bytes(bits[low:high], "little"), f"0{8 * (high - low)}b")[::-1]
    return digits[start - 8 * low : stop - 8 * low]


def pack_bits(present: str) -> bytes:
    """The bitmap of such digits. Without missing values all bits of its bytes are 1, as a frame stores it."""
    size = (len(present) + 7) // 8
    return int(present[::-1], 2).to_bytes(size, "little") if "0" in present else b"\xff" * size
