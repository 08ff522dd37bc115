"""Index, checkpoint, synced position and marker are not truth: deleted, cut, flipped or stale, the log is the same.

The synced position and the checkpoint: what is written is what is drawn in docs/format.md, and damage shows.
"""

import struct
from collections.abc import Sequence
from functools import cache
from itertools import chain, combinations

import pytest
from google_crc32c import value

from penstock.logs.files.segment import LogId as Whose
from penstock.logs.files.segment import SegmentName, parse_name
from penstock.logs.files.sidefiles import SyncedPosition, pack_checkpoint, unpack_checkpoint, unpack_synced
from penstock.logs.log import Draft, FrameType
from penstock.testing import SimulatedFiles
from tests.logs.backends import comparable, expected
from tests.logs.scripted_owner import STEPS, ScriptedOwner, Step, check_replay, open_log

KINDS = ("idx", "checkpoint", "synced", "json")


def lived(steps: Sequence[Step]) -> ScriptedOwner:
    """An owner at the end of its life, everything synced and closed."""
    owner = ScriptedOwner(SimulatedFiles())
    owner.run([*steps, Step("sync")])
    owner.log.close()
    owner.files.kill()
    return owner


@cache
def whole_life() -> ScriptedOwner:
    return lived(STEPS)


def side_files(*kinds: str) -> list[str]:
    paths = [path for path in whole_life().files.contents() if path.replace("/", ".").split(".")[-1] in kinds]
    assert {path.replace("/", ".").split(".")[-1] for path in paths} == set(kinds), "the history leaves none of a kind to try this on"
    return paths


def check_same(files: SimulatedFiles) -> None:
    promised: list[Sequence[Draft]] = whole_life().synced
    wanted = expected(chain(*promised))
    log = open_log(files)
    found = comparable(log.recover())
    assert comparable(log.frames()) == wanted
    check_replay(found, wanted)
    assert comparable(log.read(0, 1_000)) == [frame for frame in wanted if frame.type is FrameType.DATA]


def with_file(path: str, content: bytes) -> SimulatedFiles:
    files = whole_life().files.copy()
    files.put_file(path, content)
    return files


def test_deleted_each_and_all() -> None:
    paths = side_files(*KINDS)
    for chosen in chain.from_iterable(combinations(paths, size) for size in range(len(paths) + 1)):
        files = whole_life().files.copy()
        for path in chosen:
            files.remove(path)
        check_same(files)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_at_every_byte(kind: str) -> None:
    for path in side_files(kind):
        content = whole_life().files.content(path)
        for size in range(len(content)):
            check_same(with_file(path, content[:size]))


@pytest.mark.parametrize("kind", ["idx", "checkpoint", "synced"])
def test_a_bit_flipped_in_every_byte(kind: str) -> None:
    for path in side_files(kind):
        for byte in range(len(whole_life().files.content(path))):
            files = whole_life().files.copy()
            files.flip_bit(path, byte * 8 + byte % 8)
            check_same(files)


@pytest.mark.parametrize("age", range(1, len(STEPS)))
def test_put_back_from_an_earlier_day(age: int) -> None:
    """A power cut or a person restores what was: a side file that lags costs time, nothing else."""
    earlier = lived(STEPS[:age]).files.contents()
    for path in side_files("idx", "checkpoint", "synced"):
        if path in earlier:
            check_same(with_file(path, earlier[path]))


NAME = SegmentName(400, 17)
SYNCED = SyncedPosition(NAME, 4_096, 21, 450, "interval")
BASE = Draft(FrameType.BASE, 450, 1, 0, 5, 6, [b"state" * 200])
OWNER = Whose(0xFEED, 3)


def flips(data: bytes) -> list[bytes]:
    return [data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :] for place in range(len(data))]


def test_names_tell_offset_and_sequence() -> None:
    assert str(NAME) == "00000000000000000400-00000000000000000017"
    assert parse_name(f"{NAME}.log") == NAME
    for other in (f"{NAME}.idx", "synced", "1-2.log", f"{NAME}.log.tmp", f"{400:020}.log", f"{400:020}+{17:020}.log"):
        assert parse_name(other) is None


def test_the_synced_position_comes_back_and_has_the_documented_layout() -> None:
    data = SYNCED.pack()
    body = struct.pack("<4sBBHQQQQQ", b"PSYN", 1, 2, 0, 400, 17, 4_096, 21, 450)
    assert data == body + value(body).to_bytes(8, "little")
    assert unpack_synced(data) == SYNCED


def test_a_damaged_synced_position_counts_as_none() -> None:
    data = SYNCED.pack()
    assert [unpack_synced(flipped) for flipped in flips(data)] == [None] * len(data)
    assert [unpack_synced(data[:size]) for size in range(len(data))] == [None] * len(data)


def test_a_checkpoint_comes_back_and_has_the_documented_layout() -> None:
    data = pack_checkpoint(NAME, 4_000, 4_096, 21, BASE, OWNER)
    place = struct.pack("<4sHHQQQQ", b"PSCP", 1, 0, 400, 17, 4_000, 4_096)
    assert data.startswith(place + value(place).to_bytes(8, "little") + b"PSTK")
    found = unpack_checkpoint(data, OWNER)
    assert found is not None
    assert found[:3] == (NAME, 4_000, 4_096)
    assert (found.frame.sequence, found.frame.base_offset, bytes(found.frame.body)) == (21, 450, b"state" * 200)


def test_a_damaged_or_strange_checkpoint_counts_as_none() -> None:
    data = pack_checkpoint(NAME, 4_000, 4_096, 21, BASE._replace(parts=[b"state"]), OWNER)
    whole = len(data) - 7  # the rest is padding
    assert [unpack_checkpoint(flipped, OWNER) for flipped in flips(data)[:whole]] == [None] * whole
    assert [unpack_checkpoint(data[:size], OWNER) for size in range(whole)] == [None] * whole
    assert unpack_checkpoint(data, Whose(0xFEED, 4)) is None
    assert unpack_checkpoint(pack_checkpoint(NAME, 0, 8, 1, BASE._replace(type=FrameType.STATE), OWNER), OWNER) is None
