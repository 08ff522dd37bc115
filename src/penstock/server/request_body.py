"""The body of a request before it is decoded: its compression, and how much it may hold.

Owns: `decompress` and `check_value_count`. A small compressed body can be large when it is decompressed, and a small
JSON body large when it is decoded: both are stopped before they take much memory.
"""

import re
import sys
import zlib
from typing import Any

from penstock.words.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from penstock.words.limits import KIB, MIB

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENCODINGS = ("gzip", "zstd")
MAX_VALUES = 1_000_000
"""The most values in one JSON body."""
_UNCOUNTED_BYTES = 1 * MIB
"""Shorter bodies cannot hold MAX_VALUES."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string, also one that does not end. (If that was no match, each quote in it would be tried: quadratic time.)"""
MAX_PARTS = 10_000
"""The most compressed bodies, one after the other, in one body."""
_PIECE_BYTES = 64 * KIB
"""So much is decompressed at a time: what follows a compressed body is copied."""


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The body without its compression.

    encoding: the header Content-Encoding. UnsupportedMediaType when it is unknown, BodyTooLarge when the result would
    be longer than `limit`, InvalidRequest when the body is not compressed in this way.
    """
    name = encoding.strip().lower()
    if name not in ENCODINGS:
        raise UnsupportedMediaType(f"the body is encoded as {encoding[:40]!r}; send it plain, or compressed by {' or '.join(ENCODINGS)}")
    found: list[bytes] = []
    left, parts = limit, 0
    unpacker: Any = None
    try:
        for start in range(0, len(body) or 1, _PIECE_BYTES):
            piece = body[start : start + _PIECE_BYTES]
            while piece or unpacker is None:  # a body may consist of several compressed ones
                if unpacker is None or unpacker.eof:
                    parts += 1
                    if parts > MAX_PARTS:
                        raise InvalidRequest(f"the body has more than {MAX_PARTS:,} parts that are compressed one by one; send fewer")
                    unpacker = zlib.decompressobj(wbits=31) if name == "gzip" else zstd.ZstdDecompressor()
                found.append(unpacker.decompress(piece, left + 1))
                left -= len(found[-1])
                if left < 0:
                    raise BodyTooLarge(f"the body has more than {limit} bytes when it is decompressed; send less at a time")
                piece = unpacker.unused_data if unpacker.eof else b""
        if not unpacker.eof:
            raise InvalidRequest(f"the body ends in the middle of its {name} data; send all of it")
    except (zlib.error, zstd.ZstdError) as error:
        raise InvalidRequest(f"the body is not {name} data ({error}); compress it, or leave the header Content-Encoding out") from None
    return b"".join(found)


def check_value_count(body: bytes) -> bytes:
    """Return a JSON body; InvalidRequest when it has so many values that decoding it would take much memory."""
    if len(body) > _UNCOUNTED_BYTES and body.count(b",") > MAX_VALUES and _STRING.sub(b"", body).count(b",") > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES:,} values; send less at a time")
    return body
