"""The body of a request before it is decoded: its compression, and how much it may hold.

Owns: `decompress` and `check_value_count`. A small compressed body can be large when it is decompressed, and a small
JSON body large when it is decoded: both are stopped before they take much memory.
"""

import re
import sys
import zlib
from typing import Any

from penstock.words.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from penstock.words.limits import MIB

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENCODINGS = ("gzip", "zstd")
MAX_VALUES = 1_000_000
"""The most values in one JSON body."""
_UNCOUNTED_BYTES = 1 * MIB
"""Shorter bodies cannot hold MAX_VALUES."""
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The body without its compression.

    encoding: the header Content-Encoding. UnsupportedMediaType when it is unknown, BodyTooLarge when the result would
    be longer than `limit`, InvalidRequest when the body is not compressed in this way.
    """
    name = encoding.strip().lower()
    if name not in ENCODINGS:
        raise UnsupportedMediaType(f"the body is encoded as {encoding[:40]!r}; send it plain, or compressed by {' or '.join(ENCODINGS)}")
    parts: list[bytes] = []
    left = limit
    try:
        while body or not parts:  # a body may consist of several compressed ones
            unpacker: Any = zlib.decompressobj(wbits=31) if name == "gzip" else zstd.ZstdDecompressor()
            parts.append(unpacker.decompress(body, left + 1))
            left -= len(parts[-1])
            if left < 0:
                raise BodyTooLarge(f"the body has more than {limit} bytes when it is decompressed; send less at a time")
            if not unpacker.eof:
                raise InvalidRequest(f"the body ends in the middle of its {name} data; send all of it")
            body = unpacker.unused_data
    except (zlib.error, zstd.ZstdError) as error:
        raise InvalidRequest(f"the body is not {name} data ({error}); compress it, or leave the header Content-Encoding out") from None
    return b"".join(parts)


def check_value_count(body: bytes) -> bytes:
    """Return a JSON body; InvalidRequest when it has so many values that decoding it would take much memory."""
    if len(body) > _UNCOUNTED_BYTES and body.count(b",") > MAX_VALUES and _STRING.sub(b"", body).count(b",") > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES:,} values; send less at a time")
    return body
