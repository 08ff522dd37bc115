"""A real process appends to a real directory and is killed (SIGKILL) at a random moment, many times.

Every group that it reported as synced is found, groups are complete, sequences and offsets continue where they stopped.
The child is killed after a random number of reports, not after a random time, so that it is always appending then.
"""

import contextlib
import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.log import FrameType
from tests.logs.backends import base_draft, comparable, draft

INCARNATION, PARTITION = 1, 0
GROUP = 3
"""Frames per group."""
SEGMENT_BYTES = 20_000


@contextlib.contextmanager
def recovered(root: str) -> Iterator[tuple[FileLog, int]]:
    """The recovered log and its next offset, after a check of all frames."""
    with contextlib.closing(FileStore.open([root])) as directory, contextlib.closing(directory.log(INCARNATION, PARTITION)) as log:
        list(log.recover())
        yield log, check(log)


def check(log: FileLog) -> int:
    everything = comparable(log.frames())
    assert [frame.sequence for frame in everything] == list(range(1, len(everything) + 1))
    items = [frame for frame in everything if frame.type is FrameType.DATA]
    assert [frame.base for frame in items] == list(range(len(items)))
    assert len(items) % GROUP == 0, "a group was torn"
    assert all(frame.body == body(frame.base) for frame in items)
    return len(items)


def body(offset: int) -> bytes:
    return random.Random(offset).randbytes(offset * 37 % 600)


def work(root: str, line: Connection) -> None:
    """Append groups without end, and report the next offset after each sync."""
    with recovered(root) as (log, offset):
        while True:
            for _ in range(offset % 3 + 1):
                log.append([draft(offset + number, 1, body(offset + number)) for number in range(GROUP)])
                offset += GROUP
            if log.segment_bytes > SEGMENT_BYTES:
                log.rotate(base_draft(offset))
            else:
                log.sync()
            if offset % 5 == 0:
                log.write_checkpoint(b"state", 1, 2, offset)
            line.send(offset)


context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


def run_and_kill(root: str, reports: int) -> int:
    """Run a child until it has sent `reports` reports and kill it; returns the last offset that it reported."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(root, theirs), daemon=True)
    process.start()
    theirs.close()
    synced = 0
    with contextlib.suppress(EOFError):  # all reports sent before the kill count
        for number in range(1 << 30):
            synced = ours.recv()
            if number == reports:
                process.kill()
    process.join()
    ours.close()
    assert process.exitcode == -9
    return synced


def check_kills(root: str, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(kills):
        synced = run_and_kill(root, rng.randrange(12))
        with recovered(root) as (_, offset):
            assert offset >= synced


@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random(tmp_path: Path, seed: int) -> None:
    check_kills(str(tmp_path / "data"), 80, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 120))
def test_killed_at_random_thousands_of_times(tmp_path: Path, seed: int) -> None:
    check_kills(str(tmp_path / "data"), 200, seed)
