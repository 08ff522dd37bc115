"""Files of LedgerQ: every whole entry is read, and nothing else."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli import ledgerq_files
from penstock.cli.ledgerq_files import LedgerEntry, SkippedBytes
from penstock.words.limits import MAX_PAYLOAD_BYTES
from tests.cli.ledgerq_files import NOW, crc, entry, metadata, segment, zipped

A, B, C = entry(1, b"alpha"), entry(2, b"beta"), entry(3, b"gamma")


def read(data: bytes) -> list[LedgerEntry | SkippedBytes]:
    return list(ledgerq_files.entries(data))


def payloads(data: bytes) -> list[bytes]:
    return [one.payload for one in read(data) if isinstance(one, LedgerEntry)]


def test_a_plain_entry_takes_as_many_bytes_as_described() -> None:
    four = entry(1, b"four")
    assert len(four) == 34 and struct.unpack_from("<I", four) == (30,)
    assert read(segment(four)) == [LedgerEntry(1, NOW, b"four")]


def test_every_field() -> None:
    given = entry(7, b"x", priority=2, expires=NOW + 5, headers={b"a": b"1", b"": b"\xff"}, time=NOW + 1)
    assert read(segment(given, B)) == [
        LedgerEntry(7, NOW + 1, b"x", 2, NOW + 5, ((b"a", b"1"), (b"", b"\xff"))),
        LedgerEntry(2, NOW, b"beta"),
    ]


@given(
    st.lists(
        st.builds(
            LedgerEntry,
            st.integers(1, 2**64 - 1),
            st.integers(-(2**63), 2**63 - 1),
            st.binary(max_size=50),
            st.integers(1, 255),
            st.integers(1, 2**63 - 1),
            st.dictionaries(st.binary(max_size=5), st.binary(max_size=5), max_size=3).map(lambda found: tuple(found.items())),
        ),
        max_size=5,
    )
)
def test_whatever_is_written_is_read(given: list[LedgerEntry]) -> None:
    written = [
        entry(one.id, one.payload, time=one.time, priority=one.priority, expires=one.expires, headers=dict(one.headers)) for one in given
    ]
    assert read(segment(*written)) == given


def test_compressed_payloads() -> None:
    assert payloads(segment(zipped(1, b"long " * 1000, priority=1), B)) == [b"long " * 1000, b"beta"]


def test_decompression_stops_above_the_limit() -> None:
    (bomb, after) = read(segment(zipped(1, bytes(MAX_PAYLOAD_BYTES + 1)), B))
    assert isinstance(bomb, SkippedBytes) and "more than 16,777,216 bytes" in bomb.why
    assert isinstance(after, LedgerEntry)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (entry(9, b"secret", flags=2), "encrypted"),
        (entry(9, b"", kind=2), "its type 2 holds no message"),
        (entry(9, b"x", compression=7), "its compression 07 is not known"),
        (entry(9, b"not gzip", compression=1), "cannot be decompressed"),
        (entry(9, zipped(1, b"x" * 100)[30:50], compression=1), "cannot be decompressed"),
        (entry(9, b"", flags=1), "its compression missing is not known"),
        (entry(9, b"", flags=16), "its fields do not fit"),
        (entry(9, b"1234", flags=4), "its fields do not fit"),
        (entry(9, b"\x05\x00\x09\x00ab", flags=8), "its headers do not fit"),
        (entry(9, b"\x05", flags=8), "its fields do not fit"),
    ],
)
def test_unusable_entries_are_reported(given: bytes, why: str) -> None:
    first, bad, last = read(segment(A, given, C))
    assert isinstance(first, LedgerEntry) and isinstance(last, LedgerEntry)
    assert isinstance(bad, SkippedBytes)
    assert bad.id == 9 and why in bad.why and bad.why.startswith("message 9 is not imported") and not bad.torn
    assert bad.where == 64 + len(A) and bad.size == len(given) - 4


def test_compressed_and_cut_off_inside() -> None:
    whole = zipped(1, b"x" * 100)
    body = whole[4:-8]
    shorter = struct.pack("<I", len(body) - 6 + 8) + body[:-6]
    (found,) = read(segment(shorter + crc(shorter) + bytes(4)))
    assert isinstance(found, SkippedBytes) and "cut off" in found.why


def test_cut_at_every_byte() -> None:
    data = segment(A, B, C)
    ends = [64 + len(A) - 4, 64 + len(A) + len(B) - 4, len(data) - 4]
    for cut in range(64, len(data)):
        found = read(data[:cut])
        whole = sum(cut >= end for end in ends)
        assert [one.id for one in found if isinstance(one, LedgerEntry)] == [1, 2, 3][:whole]
        rest = [one for one in found if isinstance(one, SkippedBytes)]
        assert all(one.torn for one in rest) and len(rest) <= 1
        assert bool(rest) == (cut > 64 and cut not in range(ends[whole - 1], ends[whole - 1] + 5) if whole else cut > 64)


def test_every_bit_of_an_entry_in_the_middle() -> None:
    data = segment(A, B, C)
    start, stop = 64 + len(A), 64 + len(A) + len(B) - 4
    for place in range(start, stop):
        for bit in range(8):
            broken = bytearray(data)
            broken[place] ^= 1 << bit
            found = read(bytes(broken))
            assert [one.payload for one in found if isinstance(one, LedgerEntry)] == [b"alpha", b"gamma"]
            (gap,) = [one for one in found if isinstance(one, SkippedBytes)]
            assert gap.where == start and not gap.torn and gap.why == "damaged"


def test_garbage_between_entries() -> None:
    found = read(segment(A, b"\x01\x02\x03" * 40, B))
    assert [type(one).__name__ for one in found] == ["LedgerEntry", "SkippedBytes", "LedgerEntry"]


def test_zeros_at_the_end_are_ignored() -> None:
    assert payloads(segment(A, bytes(1000))) == [b"alpha"]
    assert len(read(segment(A, bytes(1000)))) == 1


@given(st.binary(max_size=300))
def test_garbage_is_never_a_message(rubbish: bytes) -> None:
    found = read(segment(rubbish))
    assert not any(isinstance(one, LedgerEntry) for one in found)
    assert payloads(segment(A, rubbish, C))[:1] == [b"alpha"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (segment(A), ""),
        (segment(A)[:63], "the header is cut off"),
        (b"", "the header is cut off"),
        (segment(magic=0x4C445149), "it is not a segment of LedgerQ"),
        (segment(version=2), "its version is 2, and 1 is known"),
        (b"\x51" + segment(A)[1:20] + b"!" + segment(A)[21:], "the header is damaged"),
    ],
)
def test_the_header(data: bytes, problem: str) -> None:
    assert ledgerq_files.check_header(data) == problem


def test_the_metadata() -> None:
    assert ledgerq_files.read_id(metadata(10, 7)) == 7
    for wrong in (b"", metadata(10, 7)[:-1], metadata(10, 7, version=2)):
        with pytest.raises(ValueError, match=r"it has|its version"):
            ledgerq_files.read_id(wrong)
