"""Which file calls of a piece of work change the disk: being killed at another one is being killed just after the last of these.

Owns: `calls_of`, for tests that let every step of something go wrong.
"""

from collections.abc import Callable
from typing import NamedTuple

from penstock.testing import SimulatedFiles

READS = {"pread", "list"}


class FileCalls(NamedTuple):
    """Numbers of file calls, counted from the first that a piece of work makes."""

    all: list[int]
    changing: list[int]


def calls_of(files: SimulatedFiles, work: Callable[[], object]) -> FileCalls:
    """The calls that the work makes when nothing goes wrong."""
    before = files.calls
    work()
    made = [line.split() for line in files.trace if int(line.split()[0]) > before]
    assert len(made) == files.calls - before, "the trace holds them all"
    return FileCalls([int(line[0]) - before for line in made], [int(line[0]) - before for line in made if line[1] not in READS])
