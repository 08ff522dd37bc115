"""zstd for frame bodies: tried only where it is likely to pay, bounded on the way back.

Owns: `Compressor` (one per log, because it learns from what it saw) and `expand`.
A body is stored compressed only when that saves at least 5 %. Most time is lost on bodies that do not compress, so a large body is
probed on a sample first, and after each failure a growing number of bodies is stored as it is without looking.
"""

import sys
from collections.abc import Sequence

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MIN_BODY_BYTES = 512
"""Smaller bodies are never tried: the header outweighs what could be saved."""
SAMPLE_BYTES = 4096
LEVEL = 1
MAX_SKIPPED = 512
"""Bodies stored without a look after repeated failures: the price of a probe is then spread over so many."""


class Compressor:
    """Compresses bodies that shrink, and learns to leave the others alone."""

    __slots__ = ("_failures", "_skip", "_zstd")

    def __init__(self) -> None:
        self._zstd = zstd.ZstdCompressor(level=LEVEL)
        self._failures = 0
        self._skip = 0

    def shrink(self, parts: Sequence[bytes], size: int) -> bytes | None:
        """A body of at least MIN_BODY_BYTES compressed, or None when it is to be stored as it is."""
        if self._skip:
            self._skip -= 1
            return None
        packed = self._attempt(parts, size)
        if packed is None:
            self._failures += 1
            self._skip = min(1 << self._failures, MAX_SKIPPED)
        else:
            self._failures = 0
        return packed

    def _attempt(self, parts: Sequence[bytes], size: int) -> bytes | None:
        if size > 2 * SAMPLE_BYTES and self._pack(_sample(parts)) is None:
            return None
        return self._pack(b"".join(parts))

    def _pack(self, data: bytes) -> bytes | None:
        packed = self._zstd.compress(data, self._zstd.FLUSH_FRAME)
        return packed if len(packed) * 20 <= len(data) * 19 else None


def _sample(parts: Sequence[bytes]) -> bytes:
    """From the middle of the longest part: the payloads, not the columns of small numbers, which always compress."""
    longest = max(parts, key=len)
    start = max(0, (len(longest) - SAMPLE_BYTES) // 2)
    return longest[start : start + SAMPLE_BYTES]


def expand(stored: memoryview, size: int) -> bytes | None:
    """The `size` bytes that were compressed, or None when they are not exactly that many: never more than `size` + 1 are made."""
    unpacker = zstd.ZstdDecompressor()
    try:
        body = unpacker.decompress(stored, max_length=size + 1)
    except zstd.ZstdError:
        return None
    return body if unpacker.eof and len(body) == size and not unpacker.unused_data else None
