"""A piece of work, cut off at every single file call.

Owns: `cut_off`, which runs the same work again and again on copies of one disk, ends the process (with or without the machine) in the
middle of its first call, then of its second, …, opens the broker again and hands it to whoever checks what is left.
"""

import copy
import random
from collections.abc import Callable, Iterator

from penstock.testing import Halt, ManualClock, SimulatedFiles
from tests.broker.broker_under_test import Rig
from tests.broker.storages import Simulated

Work = Callable[[Rig], None]


def prepared(work: Work) -> tuple[SimulatedFiles, ManualClock]:
    """A disk on which some work was done by a broker that was then killed."""
    files = SimulatedFiles()
    rig = Rig(Simulated(files))
    work(rig)
    files.kill()
    return files, rig.clock


def cut_off(start: tuple[SimulatedFiles, ManualClock], work: Work, *, step: int = 1) -> Iterator[tuple[Rig, bool]]:
    """A broker for every call of the work at which it was cut off, opened again; and whether the work was done before.

    What is checked must hold for every one of them; the last one is that of a work that was not cut off.
    """
    for seed, power in ((0, True), (1, False), (2, True)):
        for call in range(1 + seed * step // 3, 1 << 30, step):
            rig, done = _run(start, work, call, random.Random(1_000 * seed + call))
            files = _files(rig)
            _end(files, power)
            again = Rig(Simulated(files), clock=rig.clock)
            yield again, done
            again.check()
            again.broker.close()
            if done:
                break
        assert call > 3, "the work makes file calls"


def _run(start: tuple[SimulatedFiles, ManualClock], work: Work, call: int, rng: random.Random) -> tuple[Rig, bool]:
    files = start[0].copy()
    files._rng = rng
    rig = Rig(Simulated(files), clock=copy.deepcopy(start[1]))
    rig.turn()
    files.fail(files.calls + call, "halt")
    try:
        work(rig)
    except Halt:
        return rig, False
    files.mend()
    return rig, True


def _files(rig: Rig) -> SimulatedFiles:
    assert isinstance(rig.ground, Simulated)
    return rig.ground.files


def _end(files: SimulatedFiles, power: bool) -> None:
    if power:
        files.crash()
    else:
        files.kill()
