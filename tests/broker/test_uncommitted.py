"""No log records what another could still undo, and what was answered outlives the failure of something else."""

import copy
import errno
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from penstock.broker import partition_layout
from penstock.loop.partition_handle import Member
from penstock.loop.requests import ProduceRequest, Reshape
from penstock.testing import Halt
from penstock.testing.disk import Fault
from penstock.words.errors import PenstockError
from tests.broker.broker_under_test import Asked, Desk, Rig, batch_of, ids_of
from tests.broker.crashes import prepared
from tests.broker.storages import Simulated

KEY = "a"
"""It lives in partition 0 of one, and elsewhere in eight."""
FAULTS: tuple[Fault, ...] = ("halt", errno.EIO, "interrupt")


def resize(desk: Desk, partitions: int) -> Asked:
    """Put a resize that shares the next turn with whatever else is put."""
    change = desk.broker._change_shape
    return desk.submit(Reshape(lambda turns: change(turns, lambda entry: partition_layout.resized(entry, partitions)), firm=True))


def cut_off(width: int, work: Callable[[Desk], object], fault: Fault) -> Iterator[Desk]:
    """The same work on copies of one disk, with the fault at its first file call, its second, …; the broker goes on, or is opened again."""
    files, clock = prepared(lambda rig: _ignore(rig.create(partitions=width, dedup_window=10**10).produce("warm", key="warm")))
    for call in range(1, 1 << 30):
        rig = Rig(Simulated(files.copy()), clock=copy.deepcopy(clock))
        disk = rig.ground.files  # type: ignore[attr-defined]
        desk = rig.find()
        rig.turn()
        disk.fail(disk.calls + call, fault)
        work(desk)
        try:
            rig.turn()
        except Halt:
            rig.kill()
        except KeyboardInterrupt:
            pass
        done = disk.calls < call
        disk.mend()
        rig.pass_by(20)
        yield rig.find()
        rig.check()
        rig.broker.close()
        if done or call > 60:
            return


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mark_counts_no_item_that_is_undone(fault: Fault) -> None:
    """A produce that shares a turn with a resize fails. When the slots come back, no later item passes their fence."""

    def work(desk: Desk) -> None:
        desk.submit(ProduceRequest(batch_of(*["undone"] * 20, key="other")))
        resize(desk, 8)

    for desk in cut_off(1, work, fault):
        desk.drain()
        first = desk.produce("A", key=KEY)
        desk.resize(1)
        desk.produce("B", key=KEY)
        held = desk.lease(5)
        assert held.ids == first, f"{held.texts} are leased at the same time"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1)])
def test_a_dedup_id_moves_only_with_its_item(old: int, new: int, fault: Fault) -> None:
    """Whatever fails, an id that is known after a resize is that of an item that is there."""
    keys = [f"k{number}" for number in range(6)]

    def work(desk: Desk) -> None:
        for key in keys:
            desk.submit(ProduceRequest(batch_of(f"p-{key}", key=key, dedups=[f"d-{key}"])))
        resize(desk, new)

    for desk in cut_off(old, work, fault):
        for key in keys:
            desk.produce(f"p-{key}", key=key, dedups=[f"d-{key}"])
        assert sorted(desk.drain()) == sorted(["warm", *(f"p-{key}" for key in keys)])


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC, "short", "interrupt"])
def test_an_answered_lease_outlives_what_fails_after_it(fault: Fault) -> None:
    """A lease record that is not synced yet is appended again: one holder, the same token, the attempt counted."""
    for call in range(1, 12):
        rig = Rig(Simulated())
        desk = rig.create(max_attempts=5)
        desk.produce("one", "two", key="customer")
        desk.lease(1).retry()
        held = desk.lease(1)
        assert held.attempts == [2]
        disk = rig.ground.files  # type: ignore[attr-defined]
        disk.fail(disk.calls + call, fault)
        with suppress(PenstockError, KeyboardInterrupt):
            desk.produce("other", key="other")
        disk.mend()
        rig.pass_by(5)
        assert desk.lease(5).keys in ([], ["other"])
        assert held.complete() == 1
        again = desk.lease(5)
        assert (again.texts, again.attempts) == (["two"], [1])


def test_an_answered_lease_that_was_synced_after_all_is_not_appended_again() -> None:
    rig = Rig(Simulated())
    desk = rig.create(max_attempts=5)
    desk.produce("one", "two", key="customer")
    held = desk.lease(1)
    partition = desk.loop.turns.members[0].open
    partition.log.sync()  # it reached the disk, though nobody told the partition so
    before = partition.log.sequence
    partition.reopen()
    assert partition.log.sequence == before + 1, "only the opening was appended"
    assert desk.lease(5).texts == []
    assert held.complete() == 1
    again = desk.lease(5)
    assert (again.texts, again.attempts) == (["two"], [1])
    rig.check()


def test_an_interrupt_is_nobody_elses_error() -> None:
    """Wherever it comes in a turn, the others of that turn get their answers, and each of their items is there once."""
    for call in range(1, 40):
        rig = Rig(Simulated())
        desk = rig.create(partitions=3)
        waiting = desk.waiter(1)
        disk = rig.ground.files  # type: ignore[attr-defined]
        disk.fail(disk.calls + call, "interrupt")
        asked = [desk.submit(ProduceRequest(batch_of(*[f"{number}:{key}" for key in "abcdef"], keys=[*"abcdef"]))) for number in range(3)]
        with suppress(KeyboardInterrupt):
            rig.turn()
        disk.mend()
        rig.turn()
        for one in asked:
            assert len(ids_of(one.result, 6)) == 6
        first = waiting.held
        served = [*first.texts]
        first.complete()
        served += desk.drain()
        assert sorted(served) == sorted(f"{number}:{key}" for number in range(3) for key in "abcdef")
        rig.check()


def test_an_interrupt_does_not_hide_a_failed_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken back is not acknowledged, though an interrupt came before anybody was told."""
    leave, interrupts = Member.leave, [True]

    def interrupted(member: Member, job: Callable[[], None] | None = None) -> None:
        if interrupts.pop() if interrupts else False:
            raise KeyboardInterrupt
        leave(member, job)

    rig = Rig(Simulated())
    desk = rig.create()
    disk = rig.ground.files  # type: ignore[attr-defined]
    disk.fail(disk.calls + 1, errno.EIO)
    asked = desk.submit(ProduceRequest(batch_of("one")))
    monkeypatch.setattr(Member, "leave", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.turn()
    assert not interrupts
    disk.mend()
    rig.pass_by(20)
    stored = bool(desk.drain())
    with suppress(PenstockError):
        assert all(one.refused is not None or stored for one in asked.result)
    rig.check()


def _ignore(answer: object) -> None:
    """A piece of work answers nothing."""
