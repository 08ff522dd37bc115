"""Index, checkpoint, synced position and marker are rebuildable: deleted, cut, damaged or old ones change nothing.

The synced position and the checkpoint have the layouts of docs/format.md, and damage to them is noticed.
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


def owner_after(steps: Sequence[Step]) -> ScriptedOwner:
    """An owner that ran the steps, synced everything and closed the log."""
    owner = ScriptedOwner(SimulatedFiles())
    owner.run([*steps, Step("sync")])
    owner.log.close()
    owner.files.kill()
    return owner


@cache
def finished_owner() -> ScriptedOwner:
    return owner_after(STEPS)


def side_files(*kinds: str) -> list[str]:
    paths = [path for path in finished_owner().files.contents() if path.replace("/", ".").split(".")[-1] in kinds]
    assert {path.replace("/", ".").split(".")[-1] for path in paths} == set(kinds), "the history leaves none of a kind to try this on"
    return paths


def check_same(files: SimulatedFiles) -> None:
    promised: list[Sequence[Draft]] = finished_owner().synced
    wanted = expected(chain(*promised))
    log = open_log(files)
    found = comparable(log.recover())
    assert comparable(log.frames()) == wanted
    check_replay(found, wanted)
    assert comparable(log.read(0, 1_000)) == [frame for frame in wanted if frame.type is FrameType.DATA]


def with_file(path: str, content: bytes) -> SimulatedFiles:
    files = finished_owner().files.copy()
    files.put_file(path, content)
    return files


def test_side_files_deleted() -> None:
    paths = side_files(*KINDS)
    for chosen in chain.from_iterable(combinations(paths, size) for size in range(len(paths) + 1)):
        files = finished_owner().files.copy()
        for path in chosen:
            files.remove(path)
        check_same(files)


@pytest.mark.parametrize("kind", KINDS)
def test_a_side_file_cut_at_every_byte(kind: str) -> None:
    for path in side_files(kind):
        content = finished_owner().files.content(path)
        for size in range(len(content)):
            check_same(with_file(path, content[:size]))


@pytest.mark.parametrize("kind", ["idx", "checkpoint", "synced"])
def test_a_side_file_with_a_bit_flipped_in_every_byte(kind: str) -> None:
    for path in side_files(kind):
        for byte in range(len(finished_owner().files.content(path))):
            files = finished_owner().files.copy()
            files.flip_bit(path, byte * 8 + byte % 8)
            check_same(files)


@pytest.mark.parametrize("age", range(1, len(STEPS)))
def test_old_side_files(age: int) -> None:
    """A power cut or an operator restores an old side file: opening takes longer, but the log is the same."""
    earlier = owner_after(STEPS[:age]).files.contents()
    for path in side_files("idx", "checkpoint", "synced"):
        if path in earlier:
            check_same(with_file(path, earlier[path]))


NAME = SegmentName(400, 17)
SYNCED = SyncedPosition(NAME, 4_096, 21, 450, "interval")
BASE = Draft(FrameType.BASE, 450, 1, 0, 5, 6, [b"state" * 200])
OWNER = Whose(0xFEED, 3)


def flips(data: bytes) -> list[bytes]:
    return [data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :] for place in range(len(data))]


def test_segment_names_have_offset_and_sequence() -> None:
    assert str(NAME) == "00000000000000000400-00000000000000000017"
    assert parse_name(f"{NAME}.log") == NAME
    for other in (f"{NAME}.idx", "synced", "1-2.log", f"{NAME}.log.tmp", f"{400:020}.log", f"{400:020}+{17:020}.log"):
        assert parse_name(other) is None


def test_the_synced_position_has_the_documented_layout() -> None:
    data = SYNCED.pack()
    body = struct.pack("<4sBBHQQQQQ", b"PSYN", 1, 2, 0, 400, 17, 4_096, 21, 450)
    assert data == body + value(body).to_bytes(8, "little")
    assert unpack_synced(data) == SYNCED


def test_a_damaged_synced_position_counts_as_none() -> None:
    data = SYNCED.pack()
    assert [unpack_synced(flipped) for flipped in flips(data)] == [None] * len(data)
    assert [unpack_synced(data[:size]) for size in range(len(data))] == [None] * len(data)


def test_a_checkpoint_has_the_documented_layout() -> None:
    data = pack_checkpoint(NAME, 4_000, 4_096, 21, BASE, OWNER)
    place = struct.pack("<4sHHQQQQ", b"PSCP", 1, 0, 400, 17, 4_000, 4_096)
    assert data.startswith(place + value(place).to_bytes(8, "little") + b"PSTK")
    found = unpack_checkpoint(data, OWNER)
    assert found is not None
    assert found[:3] == (NAME, 4_000, 4_096)
    assert (found.frame.sequence, found.frame.base_offset, bytes(found.frame.body)) == (21, 450, b"state" * 200)


def test_a_checkpoint_that_is_damaged_or_of_another_log_counts_as_none() -> None:
    data = pack_checkpoint(NAME, 4_000, 4_096, 21, BASE._replace(parts=[b"state"]), OWNER)
    whole = len(data) - 7  # the rest is padding
    assert [unpack_checkpoint(flipped, OWNER) for flipped in flips(data)[:whole]] == [None] * whole
    assert [unpack_checkpoint(data[:size], OWNER) for size in range(whole)] == [None] * whole
    assert unpack_checkpoint(data, Whose(0xFEED, 4)) is None
    assert unpack_checkpoint(pack_checkpoint(NAME, 0, 8, 1, BASE._replace(type=FrameType.STATE), OWNER), OWNER) is None
