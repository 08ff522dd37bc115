"""Bodies that are made to take long."""

import gzip
import time

import pytest

from penstock.server.request_body import ENCODINGS, MAX_PARTS, MAX_VALUES, check_value_count, decompress, zstd
from penstock.words.errors import BodyTooLarge, InvalidRequest
from penstock.words.limits import KIB, MIB

SECONDS = 5.0
"""Far more than these take, far less than they took in quadratic time."""


def test_a_string_that_does_not_end_takes_no_longer() -> None:
    body = b"," * (MAX_VALUES + 1) + b'"' + b'\\"' * MIB
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="more than 1,000,000 values"):
        check_value_count(body)
    assert time.monotonic() - began < SECONDS


def test_commas_in_strings_are_no_values() -> None:
    body = b'["' + b"," * (MAX_VALUES + 1) + b'\\"","",' + b'"' + b"," * MAX_VALUES + b'\\\\"]'
    assert check_value_count(body) is body
    with pytest.raises(InvalidRequest):
        check_value_count(body + b"," * MAX_VALUES)


@pytest.mark.parametrize("name", ENCODINGS)
def test_compressed_bodies_one_after_the_other(name: str) -> None:
    pack = gzip.compress if name == "gzip" else zstd.compress
    parts = [b"", b"a" * 200 * KIB, bytes(range(256)) * KIB, b"", b"end"]
    body = b"".join(map(pack, parts))
    whole = b"".join(parts)
    assert decompress(body, name, len(whole)) == whole
    with pytest.raises(BodyTooLarge):
        decompress(body, name, len(whole) - 1)
    for cut in (b"", body[:-1], body + body[:5]):
        with pytest.raises(InvalidRequest, match="ends in the middle"):
            decompress(cut, name, 2 * len(whole))
    with pytest.raises(InvalidRequest, match=f"is not {name} data"):
        decompress(body + b"more than that", name, len(whole))


@pytest.mark.parametrize("name", ENCODINGS)
def test_very_many_compressed_bodies_are_refused_soon(name: str) -> None:
    pack = gzip.compress if name == "gzip" else zstd.compress
    assert decompress(pack(b"") * MAX_PARTS, name, 10) == b""
    body = pack(b"") * (16 * MIB // len(pack(b"")))
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match="compressed one by one"):
        decompress(body, name, 10)
    assert time.monotonic() - began < SECONDS
