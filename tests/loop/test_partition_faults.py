"""Invalid commands and failing storage: nothing is acknowledged that is not stored."""

import errno
from pathlib import Path
from typing import Any

import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.log import Frame, FrameType
from penstock.loop.partition import Partition
from penstock.rules import base
from penstock.rules.commands import (
    AcquireLease,
    CompleteLeased,
    Configure,
    Drop,
    ExtendLease,
    LeaseAnswer,
    Pause,
    Produce,
    RetryLeased,
    Stored,
)
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import BrokerClosed, BrokerLocked, InvalidRequest, PenstockError, StorageFailed

WRONG: list[Any] = [
    None,
    Batch([b"x"]),
    Produce([b"x"]),  # type: ignore[arg-type]
    Produce(Batch(["text"])),  # type: ignore[list-item]
    Produce(Batch([b"x"], ["key"])),  # type: ignore[list-item]
    Produce(Batch([b"a", b"b"], [b"k"], [7])),
    Produce(Batch([b"x"], priorities=bytes([10]))),
    Produce(Batch([b"x"], ats=[1 << 70])),
    Produce(Batch([b"x"]), calls="r"),  # type: ignore[arg-type]
    Produce(Batch([b"x"]), source="s", sequence=1),  # type: ignore[arg-type]
    AcquireLease(0),
    AcquireLease(-1),
    AcquireLease(10**9),
    AcquireLease(1, consumer=None),  # type: ignore[arg-type]
    AcquireLease(1, timeout=0.5 * SECOND),  # type: ignore[arg-type]
    AcquireLease(1, per_key=0),
    CompleteLeased("x"),  # type: ignore[arg-type]
    CompleteLeased(0),
    CompleteLeased(1, ["0"]),  # type: ignore[list-item]
    RetryLeased(1, delay=0.5),  # type: ignore[arg-type]
    RetryLeased(1, delay=-1),
    RetryLeased(1, reason=None),  # type: ignore[arg-type]
    RetryLeased(1, counted=None),  # type: ignore[arg-type]
    ExtendLease(1, timeout=1.5),  # type: ignore[arg-type]
    Pause(1, 1),  # type: ignore[arg-type]
    Configure(None),  # type: ignore[arg-type]
    Drop([-5, -1]),
    Drop([0]),
]


@pytest.mark.parametrize("command", WRONG, ids=repr)
def test_an_invalid_command_is_refused_with_a_message_and_changes_nothing(command: Any) -> None:
    part = Partition(FileLog(SimulatedFiles(), "/log", 1, 0), MicrosecondClock())
    part.run(Produce(Batch([b"good"])))
    before = base.dump(part.state)
    with pytest.raises(InvalidRequest, match=r"; |takes"):
        part.run(command)
    assert base.dump(part.state) == before
    part.commit()
    assert part.payloads([0, 1]) == [b"good"]


def test_the_callers_batch_is_copied() -> None:
    part = Partition(FileLog(SimulatedFiles(), "/log", 1, 0), MicrosecondClock())
    payloads = [b"as given"]
    part.run(Produce(Batch(payloads)))
    payloads[0] = b"changed since"
    part.commit()
    assert part.payloads([0, 1]) == [b"as given"]


def test_a_failure_within_a_turn_also_fails_its_commit() -> None:
    files = SimulatedFiles()
    part = Partition(FileLog(files, "/log", 1, 0), MicrosecondClock())
    part.run(Produce(Batch([b"keyed"], [b"k"])))
    part.commit()
    part.reopen()
    part.run(Produce(Batch([b"lost with its turn"])))
    files.fail(files.calls + 1, errno.EIO)
    with pytest.raises(StorageFailed):
        part.run(AcquireLease(2))  # must look at keys, and writes first what the turn has
    files.clear_faults()
    with pytest.raises(StorageFailed, match=r"^storage failed, and nothing was changed; send the request again$"):
        part.commit()
    assert part.state.next_offset == 1
    part.run(Produce(Batch([b"again"])))
    part.commit()
    part.reopen()
    assert part.payloads([0, 2]) == [b"keyed", b"again"]


def test_after_a_failed_reopening_every_command_is_refused() -> None:
    files = SimulatedFiles()
    part = Partition(FileLog(files, "/log", 1, 0), MicrosecondClock())
    part.run(Produce(Batch([b"never stored"])))
    for ahead in range(1, 40):
        files.fail(files.calls + ahead, errno.EIO)
    with pytest.raises(PenstockError):
        part.commit()
    with pytest.raises(PenstockError):
        part.reopen()
    with pytest.raises(StorageFailed):
        part.run(Produce(Batch([b"x"])))
    with pytest.raises(StorageFailed):
        part.commit()
    files.clear_faults()
    part.reopen()
    assert part.state.next_offset == 0


def test_a_closed_partition_refuses_every_command() -> None:
    part = Partition(FileLog(SimulatedFiles(), "/log", 1, 0), MicrosecondClock())
    part.close()
    part.close()
    for use in (lambda: part.run(AcquireLease(1)), part.commit, part.due, lambda: part.payloads([0, 1]), lambda: part.explain(0)):
        with pytest.raises(BrokerClosed):
            use()


def test_a_full_disk_does_not_keep_a_partition_from_closing() -> None:
    files = SimulatedFiles()
    part = Partition(FileLog(files, "/log", 1, 0), MicrosecondClock())
    part.run(Produce(Batch([b"stored"])))
    part.commit()
    files.set_free_bytes(0)
    part.close()
    files.set_free_bytes(None)
    again = Partition(FileLog(files, "/log", 1, 0), MicrosecondClock())
    assert again.payloads([0, 1]) == [b"stored"]


def test_one_log_has_one_owner(tmp_path: Path) -> None:
    directory = FileStore.open(tmp_path)
    part = Partition(directory.log(1, 0), MicrosecondClock())
    with pytest.raises(BrokerLocked, match="open already"):
        directory.log(1, 0)
    directory.close()
    part.run(Produce(Batch([b"x"])))
    with pytest.raises(BrokerClosed):
        part.commit()
    again = FileStore.open(tmp_path)
    Partition(again.log(1, 0), MicrosecondClock()).close()
    Partition(again.log(1, 0), MicrosecondClock()).close()
    again.close()


def test_a_lease_for_one_passes_a_hot_key_in_few_steps() -> None:
    part = Partition(FileLog(SimulatedFiles(), "/log", 1, 0), MicrosecondClock())
    for _ in range(30):
        part.run(Produce(Batch([b"hot"] * 1_000, [b"hot"] * 1_000)))
    part.run(Produce(Batch([b"cold"], [b"cold"])))
    part.commit()
    first, second = part.run(AcquireLease(1)), part.run(AcquireLease(1))
    part.commit()
    assert isinstance(first, LeaseAnswer) and isinstance(second, LeaseAnswer)
    assert part.payloads([*first.runs, *second.runs]) == [b"hot", b"cold"]
    records = sum(frame.count for frame in part.log.frames() if isinstance(frame, Frame) and frame.type is FrameType.STATE)
    assert records < 20


def test_a_turn_may_hold_more_than_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.logs.codec.FRAME_BYTES", 1_000)
    part = Partition(FileLog(SimulatedFiles(), "/log", 1, 0), MicrosecondClock())
    stored = [part.run(Produce(Batch([bytes([number]) * 400]))) for number in range(7)]
    part.commit()
    assert [answer.base for answer in stored if isinstance(answer, Stored)] == list(range(7))
    part.reopen()
    assert part.payloads([0, 7]) == [bytes([number]) * 400 for number in range(7)]


def test_an_expired_lease_is_refused_even_before_its_items_are_taken_back() -> None:
    clock = MicrosecondClock()
    part = Partition(FileLog(SimulatedFiles(), "/log", 1, 0), clock)
    part.run(Produce(Batch([b"a", b"b"])))
    granted = part.run(AcquireLease(2, timeout=10 * SECOND))
    assert isinstance(granted, LeaseAnswer)
    part.run(CompleteLeased(granted.lease, [0]))
    part.commit()
    clock.advance(10 * SECOND)
    late = part.run(CompleteLeased(granted.lease, [0, 1]))
    assert (late.done, late.refused) == (1, [1])  # type: ignore[union-attr]
    for command in (CompleteLeased(granted.lease), RetryLeased(granted.lease), ExtendLease(granted.lease)):
        with pytest.raises(PenstockError, match="has ended"):
            part.run(command)
