"""A waiting lease is woken by anything that makes an item ready, and by nothing else."""

from collections.abc import Callable

import pytest

from penstock.operations import ClearItems, RedriveItems, ReleaseKey, SeekItems
from tests.broker.broker_under_test import (
    BrokerUnderTest,
    QueueUnderTest,
    SubmittedRequest,
    batch_of,
    key_that_moves,
    run_threads,
    wait_until,
)
from tests.partition_under_test import key_id

# Each begins with a queue that has nothing to give, returns a lease that waits, and makes an item ready.
WAKERS: dict[str, Callable[[BrokerUnderTest, QueueUnderTest], SubmittedRequest]] = {}


def waker(
    function: Callable[[BrokerUnderTest, QueueUnderTest], SubmittedRequest],
) -> Callable[[BrokerUnderTest, QueueUnderTest], SubmittedRequest]:
    WAKERS[function.__name__] = function
    return function


def waiting(queue: QueueUnderTest, **options: object) -> SubmittedRequest:
    """A lease in line that nothing was found for, though the queue had many turns."""
    asked = queue.submit_lease(**options)  # type: ignore[arg-type]
    queue.owner.turn()
    assert not asked.done
    return asked


@waker
def produce(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    asked = waiting(queue)
    queue.produce("woken")
    return asked


@waker
def immediate_retry(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken")
    held = queue.lease()
    asked = waiting(queue)
    held.retry()
    return asked


@waker
def delayed_retry(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken")
    queue.lease().retry(delay=5)
    asked = waiting(queue)
    broker.advance_in_steps(4.9)
    assert not asked.done
    broker.advance_in_steps(0.1)
    return asked


@waker
def schedule(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken", at=broker.after(7))
    asked = waiting(queue)
    broker.advance_in_steps(6.9)
    assert not asked.done
    broker.advance_in_steps(0.1)
    return asked


@waker
def lease_expiry(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken")
    queue.lease(timeout=10)
    asked = waiting(queue)
    broker.advance_in_steps(9.9)
    assert not asked.done
    broker.advance_in_steps(0.1)
    return asked


@waker
def dead_letter(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    source = broker.create("source", dead_queue=queue.name)
    source.produce("woken")
    held = source.lease()
    asked = waiting(queue)
    held.bury()
    return asked


@waker
def redrive_in_place(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken")
    queue.lease().bury()
    asked = waiting(queue)
    assert queue.redrive_buried() == 1
    return asked


@waker
def redrive_from_another_queue(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    dead = broker.create("dead")
    dead.produce("woken")
    asked = waiting(queue)
    assert dead.call(RedriveItems(items={0: [0]}, to=queue.incarnation)) == 1
    broker.turn()
    return asked


@waker
def follow_up(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    source = broker.create("source")
    source.produce("first")
    held = source.lease()
    asked = waiting(queue)
    held.complete(then=[(queue.incarnation, batch_of("woken"))])
    return asked


@waker
def resume(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.pause(lease=True)
    queue.produce("woken")
    asked = waiting(queue)
    queue.pause(lease=False)
    broker.turn()
    return asked


@waker
def resume_of_one_partition(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.resize(2)
    queue.pause(lease=True)
    queue.produce("woken")
    asked = waiting(queue)
    queue.pause(lease=False, partition=next(one.partition for one in queue.stats().partitions if one.ready))
    broker.turn()
    return asked


@waker
def released_key(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    """A parked key goes on without the item that parked it."""
    queue.update(on_bury="park")
    queue.produce("poison", "woken", key="k")
    queue.lease().bury()
    asked = waiting(queue)
    assert queue.call(ReleaseKey(key=key_id("k"))) == 1
    broker.turn()
    return asked


@waker
def cleared_burial(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.update(on_bury="park")
    queue.produce("poison", "woken", key="k")
    queue.lease().bury()
    asked = waiting(queue)
    queue.call(ClearItems(states=["buried"]))
    broker.turn()
    return asked


@waker
def completed_head_of_a_key(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("head", "woken", key="k")
    held = queue.lease()
    asked = waiting(queue)
    held.complete()
    return asked


@waker
def back_off_of_a_key_that_ends(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken", "behind", key="k")
    queue.lease().retry(delay=3)
    asked = waiting(queue)
    broker.advance_in_steps(2.9)
    assert not asked.done
    broker.advance_in_steps(0.1)
    return asked


@waker
def seek(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken")
    queue.drain()
    asked = waiting(queue)
    assert queue.call(SeekItems(start={0: 0})) == 1
    broker.turn()
    return asked


@waker
def resize(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    """The key moves to a new partition and waits there for its last item in the old one."""
    key = key_that_moves(1, 2)
    queue.produce("head", key=key)
    held = queue.lease()
    queue.resize(2)
    queue.produce("woken", key=key)
    asked = waiting(queue)
    held.complete()
    return asked


@waker
def cancelled_holder(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    """What was leased to somebody who is gone goes to the next in line."""
    first = waiting(queue, wait=120)
    asked = waiting(queue, wait=120)
    queue.produce("woken")
    assert first.leased.texts == ["woken"]
    assert not asked.done
    first.cancel()
    broker.turn()
    assert queue.stats().consumers == {"": 1}
    return asked


@pytest.mark.parametrize("name", WAKERS)
def test_a_waiting_lease_is_woken_by(broker: BrokerUnderTest, name: str) -> None:
    queue = broker.create()
    asked = WAKERS[name](broker, queue)
    assert asked.leased.texts == ["woken"]
    assert asked.leased.attempts in ([1], [2])
    assert queue.stats().waiting_consumers == 0


def test_nothing_wakes_a_lease_before_its_time(broker: BrokerUnderTest) -> None:
    """A queue in which nothing is ready looks at its deadlines and at nothing else: no turn is run in vain."""
    queue = broker.create(partitions=3)
    queue.produce("later", at=broker.after(3_600))
    asked = waiting(queue, wait=100)
    looked: list[int] = []
    turn = queue.loop.turn

    def counted() -> bool:
        looked.append(broker.clock.read().elapsed)
        return turn()

    queue.loop.turn = counted  # type: ignore[method-assign]
    start = broker.clock.read().elapsed
    broker.advance_in_steps(99.9)
    assert not asked.done
    assert len(looked) <= 101, "a date may be stepped, so it is looked at once a second; else nothing happens"
    broker.advance_in_steps(0.1)
    assert asked.leased.texts == []
    assert looked[-1] == start + 100_000_000


# -- with real threads and the real clock ---------------------------------------------------------------


def live_produce(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    asked = queue.submit_lease()
    queue.produce("woken")
    return asked


def live_retry(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken")
    held = queue.lease()
    asked = queue.submit_lease()
    held.retry()
    return asked


def live_delayed_retry(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken")
    queue.lease().retry(delay=0.05)
    return queue.submit_lease()


def live_schedule(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken", at=broker.after(0.15))
    return queue.submit_lease()


def live_lease_expiry(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.produce("woken")
    queue.lease(timeout=1)
    return queue.submit_lease()


def live_dead_letter(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    source = broker.create("source", dead_queue=queue.name)
    source.produce("woken")
    asked = queue.submit_lease()
    source.lease().bury()
    return asked


def live_resume(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    queue.pause(lease=True)
    queue.produce("woken")
    asked = queue.submit_lease()
    queue.pause(lease=False)
    return asked


def live_resize(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    key = key_that_moves(1, 2)
    queue.produce("head", key=key)
    held = queue.lease()
    queue.resize(2)
    queue.produce("woken", key=key)
    asked = queue.submit_lease()
    held.complete()
    return asked


def live_cancelled_holder(broker: BrokerUnderTest, queue: QueueUnderTest) -> SubmittedRequest:
    first = queue.submit_lease()
    queue.produce("woken")
    assert first.leased.texts == ["woken"]
    asked = queue.submit_lease()
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
def test_a_thread_that_waits_is_woken_by(
    threaded_broker: BrokerUnderTest, wake: Callable[[BrokerUnderTest, QueueUnderTest], SubmittedRequest]
) -> None:
    queue = threaded_broker.create()
    assert wake(threaded_broker, queue).leased.texts == ["woken"]


def test_a_sleeping_caller_is_woken_by_another_caller(threaded_broker: BrokerUnderTest) -> None:
    """Both inside `call`: no message of the loop's own helps."""
    queue = threaded_broker.create()
    asked: list[list[str]] = []

    def consume() -> None:
        asked.append(queue.lease(wait=15).texts)

    def produce() -> None:
        wait_until(lambda: queue.stats().waiting_consumers == 1)
        queue.produce("woken")

    run_threads(consume, produce)
    assert asked == [["woken"]]
