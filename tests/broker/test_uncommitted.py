"""No log records what another could still undo, and what was answered outlives the failure of something else."""

import copy
import errno
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from penstock.broker import partition_layout
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.requests import ProduceRequest, ResizeRequest
from penstock.testing import Halt
from penstock.testing.disk import Fault
from penstock.words.errors import PenstockError
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, SubmittedRequest, batch_of, ids_of
from tests.broker.crashes import disk_after
from tests.broker.storages import SimulatedStorage

KEY = "a"
"""It lives in partition 0 of one, and elsewhere in eight."""
FAULTS: tuple[Fault, ...] = ("halt", errno.EIO, "interrupt")


def resize(queue: QueueUnderTest, partitions: int) -> SubmittedRequest:
    """Put a resize that shares the next turn with whatever else is put."""
    change = queue.broker.settings.record_layout
    return queue.submit(
        ResizeRequest(
            lambda engine: change(engine, lambda entry: partition_layout.resized_layout(entry, partitions), None), recorded_elsewhere=True
        )
    )


def cut_off(width: int, work: Callable[[QueueUnderTest], object], fault: Fault) -> Iterator[QueueUnderTest]:
    """The same work on copies of one disk, with the fault at its first file call, its second, …; the broker goes on, or
    is opened again.
    """
    files, clock = disk_after(lambda broker: _ignore(broker.create(partitions=width, dedup_window=10**10).produce("warm", key="warm")))
    for call in range(1, 1 << 30):
        broker = BrokerUnderTest(SimulatedStorage(files.copy()), clock=copy.deepcopy(clock))
        disk = broker.storage.files  # type: ignore[attr-defined]
        queue = broker.find()
        broker.turn()
        disk.fail(disk.calls + call, fault)
        work(queue)
        try:
            broker.turn()
        except Halt:
            broker.kill()
        except KeyboardInterrupt:
            pass
        done = disk.calls < call
        disk.clear_faults()
        broker.advance_in_steps(20)
        yield broker.find()
        broker.check()
        broker.embedded.close()
        if done or call > 60:
            return


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mark_counts_no_item_that_is_undone(fault: Fault) -> None:
    """A produce that shares a turn with a resize fails. When the slots come back, no later item passes their fence."""

    def work(queue: QueueUnderTest) -> None:
        queue.submit(ProduceRequest(batch_of(*["undone"] * 20, key="other")))
        resize(queue, 8)

    for queue in cut_off(1, work, fault):
        queue.drain()
        first = queue.produce("A", key=KEY)
        queue.resize(1)
        queue.produce("B", key=KEY)
        held = queue.lease(5)
        assert held.ids == first, f"{held.texts} are leased at the same time"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1)])
def test_a_dedup_id_moves_only_with_its_item(old: int, new: int, fault: Fault) -> None:
    """Whatever fails, an id that is known after a resize is that of an item that is there."""
    keys = [f"k{number}" for number in range(6)]

    def work(queue: QueueUnderTest) -> None:
        for key in keys:
            queue.submit(ProduceRequest(batch_of(f"p-{key}", key=key, dedups=[f"d-{key}"])))
        resize(queue, new)

    for queue in cut_off(old, work, fault):
        for key in keys:
            queue.produce(f"p-{key}", key=key, dedups=[f"d-{key}"])
        assert sorted(queue.drain()) == sorted(["warm", *(f"p-{key}" for key in keys)])


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, "short", "interrupt"])
def test_an_answered_lease_outlives_what_fails_after_it(fault: Fault) -> None:
    """A lease record that is not synced yet is appended again: one holder, the same token, the attempt counted."""
    for call in range(1, 12):
        broker = BrokerUnderTest(SimulatedStorage())
        queue = broker.create(max_attempts=5)
        queue.produce("one", "two", key="customer")
        queue.lease(1).retry()
        held = queue.lease(1)
        assert held.attempts == [2]
        disk = broker.storage.files  # type: ignore[attr-defined]
        disk.fail(disk.calls + call, fault)
        with suppress(PenstockError, KeyboardInterrupt):
            queue.produce("other", key="other")
        disk.clear_faults()
        broker.advance_in_steps(5)
        assert queue.lease(5).keys in ([], ["other"])
        assert held.complete() == 1
        again = queue.lease(5)
        assert (again.texts, again.attempts) == (["two"], [1])


def test_an_answered_lease_that_was_synced_after_all_is_not_appended_again() -> None:
    broker = BrokerUnderTest(SimulatedStorage())
    queue = broker.create(max_attempts=5)
    queue.produce("one", "two", key="customer")
    held = queue.lease(1)
    partition = queue.loop.engine.handles[0].usable_partition
    partition.log.sync()  # it reached the disk, though nobody told the partition so
    before = partition.log.sequence
    partition.reopen()
    assert partition.log.sequence == before + 1, "only the opening was appended"
    assert queue.lease(5).texts == []
    assert held.complete() == 1
    again = queue.lease(5)
    assert (again.texts, again.attempts) == (["two"], [1])
    broker.check()


def test_an_interrupt_affects_only_its_caller() -> None:
    """Wherever it comes in a turn, the others of that turn get their answers, and each of their items is there once."""
    for call in range(1, 40):
        broker = BrokerUnderTest(SimulatedStorage())
        queue = broker.create(partitions=3)
        waiting = queue.submit_lease(1)
        disk = broker.storage.files  # type: ignore[attr-defined]
        disk.fail(disk.calls + call, "interrupt")
        asked = [queue.submit(ProduceRequest(batch_of(*[f"{number}:{key}" for key in "abcdef"], keys=[*"abcdef"]))) for number in range(3)]
        with suppress(KeyboardInterrupt):
            broker.turn()
        disk.clear_faults()
        broker.turn()
        for one in asked:
            assert len(ids_of(one.result, 6)) == 6
        first = waiting.leased
        served = [*first.texts]
        first.complete()
        served += queue.drain()
        assert sorted(served) == sorted(f"{number}:{key}" for number in range(3) for key in "abcdef")
        broker.check()


def test_an_interrupt_does_not_hide_a_failed_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken back is not acknowledged, though an interrupt came before anybody was told."""
    leave, interrupts = PartitionHandle.start_io, [True]

    def interrupted(handle: PartitionHandle, job: Callable[[], None] | None = None) -> None:
        if interrupts.pop() if interrupts else False:
            raise KeyboardInterrupt
        leave(handle, job)

    broker = BrokerUnderTest(SimulatedStorage())
    queue = broker.create()
    disk = broker.storage.files  # type: ignore[attr-defined]
    disk.fail(disk.calls + 1, errno.EIO)
    asked = queue.submit(ProduceRequest(batch_of("one")))
    monkeypatch.setattr(PartitionHandle, "start_io", interrupted)
    with pytest.raises(KeyboardInterrupt):
        broker.turn()
    assert not interrupts
    disk.clear_faults()
    broker.advance_in_steps(20)
    stored = bool(queue.drain())
    with suppress(PenstockError):
        assert all(one.refused is not None or stored for one in asked.result)
    broker.check()


def _ignore(answer: object) -> None:
    """A piece of work answers nothing."""
