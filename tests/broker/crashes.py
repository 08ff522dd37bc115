"""A piece of work, cut off at every single file call.

Owns: `cut_off`, which runs the same work again and again on copies of one disk, ends the process (with or without the machine) in the
middle of its first call, then of its second, …, opens the broker again and hands it to whoever checks what is left.
"""

import copy
import random
from collections.abc import Callable, Iterator

from penstock.testing import Halt, ManualClock, SimulatedFiles
from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.storages import SimulatedStorage

Work = Callable[[BrokerUnderTest], None]


def disk_after(work: Work) -> tuple[SimulatedFiles, ManualClock]:
    """A disk on which some work was done by a broker that was then killed."""
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    work(broker)
    files.kill()
    return files, broker.clock


def crash_at_each_call(start: tuple[SimulatedFiles, ManualClock], work: Work, *, step: int = 1) -> Iterator[tuple[BrokerUnderTest, bool]]:
    """A broker for every call of the work at which it was cut off, opened again; and whether the work was done before.

    What is checked must hold for every one of them; the last one is that of a work that was not cut off.
    """
    for seed, power in ((0, True), (1, False), (2, True)):
        for call in range(1 + seed * step // 3, 1 << 30, step):
            broker, done = _run(start, work, call, random.Random(1_000 * seed + call))
            files = _files(broker)
            _end(files, power)
            again = BrokerUnderTest(SimulatedStorage(files), clock=broker.clock)
            yield again, done
            again.check()
            again.embedded.close()
            if done:
                break
        assert call > 3, "the work makes file calls"


def _run(start: tuple[SimulatedFiles, ManualClock], work: Work, call: int, rng: random.Random) -> tuple[BrokerUnderTest, bool]:
    files = start[0].copy()
    files._rng = rng
    broker = BrokerUnderTest(SimulatedStorage(files), clock=copy.deepcopy(start[1]))
    broker.turn()
    files.fail(files.calls + call, "halt")
    try:
        work(broker)
    except Halt:
        return broker, False
    files.clear_faults()
    return broker, True


def _files(broker: BrokerUnderTest) -> SimulatedFiles:
    assert isinstance(broker.storage, SimulatedStorage)
    return broker.storage.files


def _end(files: SimulatedFiles, power: bool) -> None:
    if power:
        files.crash()
    else:
        files.kill()
