"""A waiting lease is woken by anything that makes an item ready, and by nothing else."""

from collections.abc import Callable

import pytest

from penstock.operations import ClearItems, RedriveItems, ReleaseKey, SeekItems
from tests.broker.broker_under_test import Asked, Desk, Rig, batch_of, moving_key, together, until
from tests.partition_under_test import key_id

# Each begins with a queue that has nothing to give, returns a lease that waits, and makes an item ready.
WAKERS: dict[str, Callable[[Rig, Desk], Asked]] = {}


def waker(function: Callable[[Rig, Desk], Asked]) -> Callable[[Rig, Desk], Asked]:
    WAKERS[function.__name__] = function
    return function


def waiting(desk: Desk, **options: object) -> Asked:
    """A lease in line that nothing was found for, though the queue had many turns."""
    asked = desk.waiter(**options)  # type: ignore[arg-type]
    desk.rig.turn()
    assert not asked.done
    return asked


@waker
def produce(rig: Rig, desk: Desk) -> Asked:
    asked = waiting(desk)
    desk.produce("woken")
    return asked


@waker
def immediate_retry(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken")
    held = desk.lease()
    asked = waiting(desk)
    held.retry()
    return asked


@waker
def delayed_retry(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken")
    desk.lease().retry(delay=5)
    asked = waiting(desk)
    rig.pass_by(4.9)
    assert not asked.done
    rig.pass_by(0.1)
    return asked


@waker
def schedule(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken", at=rig.after(7))
    asked = waiting(desk)
    rig.pass_by(6.9)
    assert not asked.done
    rig.pass_by(0.1)
    return asked


@waker
def lease_expiry(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken")
    desk.lease(timeout=10)
    asked = waiting(desk)
    rig.pass_by(9.9)
    assert not asked.done
    rig.pass_by(0.1)
    return asked


@waker
def dead_letter(rig: Rig, desk: Desk) -> Asked:
    source = rig.create("source", dead_queue=desk.name)
    source.produce("woken")
    held = source.lease()
    asked = waiting(desk)
    held.bury()
    return asked


@waker
def redrive_in_place(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken")
    desk.lease().bury()
    asked = waiting(desk)
    assert desk.redrive_buried() == 1
    return asked


@waker
def redrive_from_another_queue(rig: Rig, desk: Desk) -> Asked:
    dead = rig.create("dead")
    dead.produce("woken")
    asked = waiting(desk)
    assert dead.call(RedriveItems(items={0: [0]}, to=desk.incarnation)) == 1
    rig.turn()
    return asked


@waker
def follow_up(rig: Rig, desk: Desk) -> Asked:
    source = rig.create("source")
    source.produce("first")
    held = source.lease()
    asked = waiting(desk)
    held.complete(then=[(desk.incarnation, batch_of("woken"))])
    return asked


@waker
def resume(rig: Rig, desk: Desk) -> Asked:
    desk.pause(lease=True)
    desk.produce("woken")
    asked = waiting(desk)
    desk.pause(lease=False)
    rig.turn()
    return asked


@waker
def resume_of_one_partition(rig: Rig, desk: Desk) -> Asked:
    desk.resize(2)
    desk.pause(lease=True)
    desk.produce("woken")
    asked = waiting(desk)
    desk.pause(lease=False, partition=next(one.partition for one in desk.stats().partitions if one.ready))
    rig.turn()
    return asked


@waker
def released_key(rig: Rig, desk: Desk) -> Asked:
    """A parked key goes on without the item that parked it."""
    desk.update(on_bury="park")
    desk.produce("poison", "woken", key="k")
    desk.lease().bury()
    asked = waiting(desk)
    assert desk.call(ReleaseKey(key=key_id("k"))) == 1
    rig.turn()
    return asked


@waker
def cleared_burial(rig: Rig, desk: Desk) -> Asked:
    desk.update(on_bury="park")
    desk.produce("poison", "woken", key="k")
    desk.lease().bury()
    asked = waiting(desk)
    desk.call(ClearItems(states=["buried"]))
    rig.turn()
    return asked


@waker
def completed_head_of_a_key(rig: Rig, desk: Desk) -> Asked:
    desk.produce("head", "woken", key="k")
    held = desk.lease()
    asked = waiting(desk)
    held.complete()
    return asked


@waker
def back_off_of_a_key_that_ends(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken", "behind", key="k")
    desk.lease().retry(delay=3)
    asked = waiting(desk)
    rig.pass_by(2.9)
    assert not asked.done
    rig.pass_by(0.1)
    return asked


@waker
def seek(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken")
    desk.drain()
    asked = waiting(desk)
    assert desk.call(SeekItems(start={0: 0})) == 1
    rig.turn()
    return asked


@waker
def resize(rig: Rig, desk: Desk) -> Asked:
    """The key moves to a new partition and waits there for its last item in the old one."""
    key = moving_key(1, 2)
    desk.produce("head", key=key)
    held = desk.lease()
    desk.resize(2)
    desk.produce("woken", key=key)
    asked = waiting(desk)
    held.complete()
    return asked


@waker
def cancelled_holder(rig: Rig, desk: Desk) -> Asked:
    """What was leased to somebody who is gone goes to the next in line."""
    first = waiting(desk, wait=120)
    asked = waiting(desk, wait=120)
    desk.produce("woken")
    assert first.held.texts == ["woken"]
    assert not asked.done
    first.cancel()
    rig.turn()
    assert desk.stats().consumers == {"": 1}
    return asked


@pytest.mark.parametrize("name", WAKERS)
def test_a_waiting_lease_is_woken_by(broker: Rig, name: str) -> None:
    desk = broker.create()
    asked = WAKERS[name](broker, desk)
    assert asked.held.texts == ["woken"]
    assert asked.held.attempts in ([1], [2])
    assert desk.stats().waiting_consumers == 0


def test_nothing_wakes_a_lease_before_its_time(broker: Rig) -> None:
    """A queue in which nothing is ready looks at its deadlines and at nothing else: no turn is run in vain."""
    desk = broker.create(partitions=3)
    desk.produce("later", at=broker.after(3_600))
    asked = waiting(desk, wait=100)
    looked: list[int] = []
    turn = desk.loop.turn

    def counted() -> bool:
        looked.append(broker.clock.read().elapsed)
        return turn()

    desk.loop.turn = counted  # type: ignore[method-assign]
    start = broker.clock.read().elapsed
    broker.pass_by(99.9)
    assert not asked.done
    assert len(looked) <= 101, "a date may be stepped, so it is looked at once a second; else nothing happens"
    broker.pass_by(0.1)
    assert asked.held.texts == []
    assert looked[-1] == start + 100_000_000


# -- with real threads and the real clock ---------------------------------------------------------------


def live_produce(rig: Rig, desk: Desk) -> Asked:
    asked = desk.waiter()
    desk.produce("woken")
    return asked


def live_retry(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken")
    held = desk.lease()
    asked = desk.waiter()
    held.retry()
    return asked


def live_delayed_retry(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken")
    desk.lease().retry(delay=0.05)
    return desk.waiter()


def live_schedule(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken", at=rig.after(0.15))
    return desk.waiter()


def live_lease_expiry(rig: Rig, desk: Desk) -> Asked:
    desk.produce("woken")
    desk.lease(timeout=1)
    return desk.waiter()


def live_dead_letter(rig: Rig, desk: Desk) -> Asked:
    source = rig.create("source", dead_queue=desk.name)
    source.produce("woken")
    asked = desk.waiter()
    source.lease().bury()
    return asked


def live_resume(rig: Rig, desk: Desk) -> Asked:
    desk.pause(lease=True)
    desk.produce("woken")
    asked = desk.waiter()
    desk.pause(lease=False)
    return asked


def live_resize(rig: Rig, desk: Desk) -> Asked:
    key = moving_key(1, 2)
    desk.produce("head", key=key)
    held = desk.lease()
    desk.resize(2)
    desk.produce("woken", key=key)
    asked = desk.waiter()
    held.complete()
    return asked


def live_cancelled_holder(rig: Rig, desk: Desk) -> Asked:
    first = desk.waiter()
    desk.produce("woken")
    assert first.held.texts == ["woken"]
    asked = desk.waiter()
    first.cancel()
    return asked


@pytest.mark.parametrize(
    "wake",
    [
        live_produce,
        live_retry,
        live_delayed_retry,
        live_schedule,
        live_lease_expiry,
        live_dead_letter,
        live_resume,
        live_resize,
        live_cancelled_holder,
    ],
)
def test_a_thread_that_waits_is_woken_by(live: Rig, wake: Callable[[Rig, Desk], Asked]) -> None:
    desk = live.create()
    assert wake(live, desk).held.texts == ["woken"]


def test_a_caller_that_sleeps_is_woken_by_another_caller(live: Rig) -> None:
    """Both inside `call`: no message of the loop's own helps."""
    desk = live.create()
    asked: list[list[str]] = []

    def consume() -> None:
        asked.append(desk.lease(wait=15).texts)

    def produce() -> None:
        until(lambda: desk.stats().waiting_consumers == 1)
        desk.produce("woken")

    together(consume, produce)
    assert asked == [["woken"]]
