"""The file calls that some work makes, and which of them change the disk.

Owns: `calls_of`, for tests that let each call fail. A kill at a call that changes nothing has the same effect as a kill
right after the last call that did.
"""

from collections.abc import Callable
from typing import NamedTuple

from penstock.testing import SimulatedFiles

READS = {"pread", "list"}


class FileCalls(NamedTuple):
    """The numbers of file calls, counted from the first call of some work."""

    all: list[int]
    changing: list[int]


def calls_of(files: SimulatedFiles, work: Callable[[], object]) -> FileCalls:
    """The calls that the work makes if none fails."""
    before = files.calls
    work()
    made = [line.split() for line in files.trace if int(line.split()[0]) > before]
    assert len(made) == files.calls - before, "the trace holds them all"
    return FileCalls([int(line[0]) - before for line in made], [int(line[0]) - before for line in made if line[1] not in READS])
