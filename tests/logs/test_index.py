"""The sparse index points to frames, comes back from its file as it was, and is rebuilt when it lies."""

import struct

from penstock.logs.files import index as indexes
from penstock.logs.files.index import SparseIndex, unpack
from penstock.testing import SimulatedFiles
from tests.logs.conformance import base_draft, draft, expected, noise, told
from tests.logs.histories import FOLDER, open_log

IDX = f"{FOLDER}/{0:020}-{1:020}.idx"


def sample() -> SparseIndex:
    index = SparseIndex()
    for number in range(5):
        index.add(10 * number, 1_000 + number, 5_000 * number)
    index.extend(25_000, 1_004)
    return index


def test_floor_finds_the_last_entry_at_or_before() -> None:
    index = sample()
    assert [index.floor(offset) for offset in (0, 9, 10, 49, 1_000)] == [(0, 0), (0, 0), (10, 5_000), (40, 20_000), (40, 20_000)]
    assert SparseIndex().floor(7) == (-1, 0)


def test_it_comes_back_as_it_was() -> None:
    index = sample()
    again = unpack(index.pack())
    assert again is not None
    assert [getattr(again, name) for name in SparseIndex.__slots__] == [getattr(index, name) for name in SparseIndex.__slots__]


def test_any_damage_to_the_file_shows() -> None:
    data = sample().pack()
    for place in range(len(data)):
        if place not in (6, 7):  # reserved
            assert unpack(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) is None
        assert unpack(data[:place]) is None
    assert unpack(data + b"\0") is None


def filled() -> tuple[SimulatedFiles, list[int]]:
    """A closed log of frames that each earn an entry or not, and their offsets."""
    files = SimulatedFiles()
    log = open_log(files)
    list(log.recover())
    for number in range(40):
        log.append([draft(number, 1, noise(1_000, number))])
    log.close()
    return files, list(range(40))


def check_reads(files: SimulatedFiles, offsets: list[int]) -> None:
    log = open_log(files)
    list(log.recover())
    for offset in reversed(offsets):
        assert told(log.read(offset, offset + 1)) == expected([draft(offset, 1, noise(1_000, offset))], offset + 1)
    log.close()


def test_an_entry_about_every_4_kib() -> None:
    files, _ = filled()
    index = unpack(files.content(IDX))
    assert index is not None
    steps = [later - earlier for earlier, later in zip(index.positions, index.positions[1:], strict=False)]
    assert len(steps) > 5
    assert all(indexes.EVERY_BYTES <= step < indexes.EVERY_BYTES + 1_100 for step in steps)


def test_an_index_that_lies_is_found_out() -> None:
    files, offsets = filled()
    log = open_log(files)
    list(log.recover())
    log.rotate(base_draft(40))
    log.close()
    index = unpack(files.content(IDX))
    assert index is not None
    for number in range(len(index.positions)):
        index.positions[number] += 8
    files.plant(IDX, index.pack())
    check_reads(files, offsets)


def test_the_layout_is_the_documented_one() -> None:
    data = sample().pack()
    assert struct.unpack_from("<4sHHI", data) == (b"PSIX", 1, 0, 5)
    assert struct.unpack_from("<Qqq", data, 16) == (25_000, 1_004, 1_004)
    assert struct.unpack_from("<5Q5q5Q", data, 40) == (*range(0, 50, 10), *range(1_000, 1_005), *range(0, 25_000, 5_000))
