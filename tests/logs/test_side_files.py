"""Index, checkpoint, synced position and marker are not truth: deleted, cut, flipped or stale, the log is the same."""

from collections.abc import Sequence
from functools import cache
from itertools import chain, combinations

import pytest

from penstock.logs.api import Draft, FrameType
from penstock.testing import SimulatedFiles
from tests.logs.conformance import expected, told
from tests.logs.histories import STEPS, Owner, Step, check_replay, open_log

KINDS = ("idx", "checkpoint", "synced", "json")


def lived(steps: Sequence[Step]) -> Owner:
    """An owner at the end of its life, everything synced and closed."""
    owner = Owner(SimulatedFiles())
    owner.run([*steps, Step("sync")])
    owner.log.close()
    owner.files.kill()
    return owner


@cache
def whole_life() -> Owner:
    return lived(STEPS)


def side_files(*kinds: str) -> list[str]:
    paths = [path for path in whole_life().files.contents() if path.replace("/", ".").split(".")[-1] in kinds]
    assert {path.replace("/", ".").split(".")[-1] for path in paths} == set(kinds), "the history leaves none of a kind to try this on"
    return paths


def check_same(files: SimulatedFiles) -> None:
    promised: list[Sequence[Draft]] = whole_life().promised
    wanted = expected(chain(*promised))
    log = open_log(files)
    found = told(log.recover())
    assert told(log.frames()) == wanted
    check_replay(found, wanted)
    assert told(log.read(0, 1_000)) == [frame for frame in wanted if frame.type is FrameType.DATA]


def with_file(path: str, content: bytes) -> SimulatedFiles:
    files = whole_life().files.copy()
    files.plant(path, content)
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
            files.flip(path, byte * 8 + byte % 8)
            check_same(files)


@pytest.mark.parametrize("age", range(1, len(STEPS)))
def test_put_back_from_an_earlier_day(age: int) -> None:
    """A power cut or a person restores what was: a side file that lags costs time, nothing else."""
    earlier = lived(STEPS[:age]).files.contents()
    for path in side_files("idx", "checkpoint", "synced"):
        if path in earlier:
            check_same(with_file(path, earlier[path]))
