"""The limit of free disk space: produce is refused in time, other commands are not."""

import pytest

from penstock.logs.files.filelog import FileLog
from penstock.loop.partition import Partition
from penstock.rules.commands import AcquireLease, CompleteLeased, LeaseAnswer, Produce
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch
from penstock.words.errors import QueueFull
from penstock.words.limits import MIB, Policy, Retention


def produce_for_ever(part: Partition) -> None:
    while True:
        part.run(Produce(Batch([bytes(50_000)])))
        part.commit()


def test_produce_is_refused_when_the_disk_is_nearly_full_and_other_commands_are_not() -> None:
    files = SimulatedFiles()
    policy = Policy(retention=Retention(max_segments=1))
    part = Partition(FileLog(files, "/log", 1, 0, compression=False), MicrosecondClock(), policy, segment_bytes=MIB, min_free_bytes=2 * MIB)
    files.set_free_bytes(8 * MIB)
    with pytest.raises(QueueFull, match="must stay so"):
        produce_for_ever(part)
    assert 100 < part.state.next_offset < 127  # six of the eight megabytes
    part.run(Produce(Batch([b"a transfer was promised"]), source=b"elsewhere", sequence=1))
    granted = part.run(AcquireLease(1_000))
    assert isinstance(granted, LeaseAnswer)
    part.run(CompleteLeased(granted.lease))
    part.commit()
    part.compact()
    part.run(Produce(Batch([b"room again"])))
    part.commit()
    assert part.state.counts.ready == 1


def test_without_a_limit_free_space_is_not_read() -> None:
    files = SimulatedFiles()
    part = Partition(FileLog(files, "/log", 1, 0), MicrosecondClock())
    part.run(Produce(Batch([b"x"])))
    part.commit()
    assert not any("free" in line for line in files.trace)
