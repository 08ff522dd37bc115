"""Work that crashes at every single file call.

Owns: `crash_at_each_call`, which repeats the same work on copies of one disk. It ends the process (or the machine) in
the middle of the first file call, then of the second, …, and opens the broker again for the test to check.
"""

import copy
import random
from collections.abc import Callable, Iterator

from penstock.testing import Halt, SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.storages import SimulatedStorage

Work = Callable[[BrokerUnderTest], None]


def disk_after(work: Work) -> tuple[SimulatedFiles, MicrosecondClock]:
    """A disk on which some work was done by a broker that was then killed."""
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    work(broker)
    files.kill()
    return files, broker.clock


def crash_at_each_call(
    start: tuple[SimulatedFiles, MicrosecondClock], work: Work, *, step: int = 1
) -> Iterator[tuple[BrokerUnderTest, bool]]:
    """For every file call of the work: the broker opened after a crash in that call, and whether the work was done
    before.

    In the last one of each series the work was not interrupted.
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


def _run(start: tuple[SimulatedFiles, MicrosecondClock], work: Work, call: int, rng: random.Random) -> tuple[BrokerUnderTest, bool]:
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
