"""A queue with a limit: produce waits for room, in order, until its deadline."""

import random
from collections.abc import Callable
from contextlib import suppress
from string import ascii_letters
from typing import Any

import pytest

from penstock.loop.requests import LeaseRequest, ProduceRequest, SettlePart, SettleRequest
from penstock.operations import ClearItems, RedriveItems
from penstock.testing import SimulatedFiles
from penstock.words.errors import QueueFull, QueueHeld
from simulation.simulated_machine import InterruptingClock
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, SubmittedRequest, batch_of, ids_of, keys_at, run_threads
from tests.broker.storages import SimulatedStorage


def put(queue: QueueUnderTest, *texts: str, wait: float = 60, **options: Any) -> SubmittedRequest:
    """A produce that may have to wait."""
    asked = queue.submit(ProduceRequest(batch_of(*texts, **options), deadline=queue.owner.deadline(wait) if wait else 0))
    queue.owner.turn()
    return asked


def full(broker: BrokerUnderTest, most: int = 10, **options: Any) -> QueueUnderTest:
    queue = broker.create(max_items=most, partitions=2, **options)
    queue.produce(*[f"old-{number}" for number in range(most)])
    return queue


def test_produce_waits_until_there_is_room(broker: BrokerUnderTest) -> None:
    queue = full(broker)
    asked = put(queue, "new")
    assert not asked.done and queue.stats().waiting_producers == 1
    held = queue.lease(1)
    assert not asked.done, "a leased item still takes its room"
    held.complete()
    assert ids_of(asked.result, 1)
    assert queue.stats().waiting_producers == 0
    assert sorted(queue.drain()) == sorted(["new", *[f"old-{number}" for number in range(1, 10)]])


def test_a_produce_that_waits_for_room_also_waits_for_its_partition() -> None:
    """Room appears while the partition of the item is in I/O: nothing failed, so the produce is not refused."""
    broker = BrokerUnderTest(SimulatedStorage())
    queue = broker.create(max_items=2, partitions=2)
    here, elsewhere = (keys_at(queue, number)[0] for number in (0, 1))
    queue.produce("a", key=elsewhere)
    queue.produce("b", key=here)
    leases = {one.partition: one.granted.lease for one in queue.run(LeaseRequest(2))}
    asked = put(queue, "c", key=here)
    assert not asked.done
    queue.loop.stays_in_io = lambda handle: handle.number == 0
    queue.submit(SettleRequest("extend", [SettlePart(0, leases[0])]))
    broker.turn()
    assert queue.loop.engine.handles[0].in_io
    queue.submit(SettleRequest("complete", [SettlePart(1, leases[1])]))
    broker.turn()
    assert not asked.done
    queue.loop.stays_in_io = lambda handle: False
    broker.turn()
    assert ids_of(asked.result, 1) == ["0-1"]
    broker.embedded.close()


FREEING: dict[str, Callable[[BrokerUnderTest, QueueUnderTest], object]] = {
    "clear": lambda broker, queue: queue.call(ClearItems(states=["ready"])),
    "bury": lambda broker, queue: queue.lease(1).bury(),
    "a higher limit": lambda broker, queue: queue.update(max_items=11),
    "no limit": lambda broker, queue: queue.update(max_items=0),
    "ttl": lambda broker, queue: broker.advance_in_steps(50),
    "redrive to another queue": lambda broker, queue: queue.call(RedriveItems(items={0: [0]}, to=broker.create("other").incarnation)),
}


@pytest.mark.parametrize("how", FREEING)
def test_room_is_made_by(broker: BrokerUnderTest, how: str) -> None:
    queue = full(broker, ttl=50_000_000)
    asked = put(queue, "new")
    assert not asked.done
    FREEING[how](broker, queue)
    broker.turn()
    assert ids_of(asked.result, 1)


def test_produce_fails_at_the_deadline_and_not_before(broker: BrokerUnderTest) -> None:
    queue = full(broker)
    asked = put(queue, "new", wait=5)
    endless = put(queue, "patient", wait=0)
    broker.advance_in_steps(4.999)
    assert not asked.done
    broker.advance_in_steps(0.001)
    with pytest.raises(QueueFull, match="queue 'q' is full; wait until items are resolved, or raise max_items or max_bytes"):
        _ = asked.result
    broker.advance_in_steps(3_600)
    assert not endless.done
    assert len(queue.drain(100)) == 11
    assert endless.done, "nothing of the refused one is there"


def test_waiting_produces_are_served_in_order(broker: BrokerUnderTest) -> None:
    queue = full(broker)
    line = [put(queue, "a1", "a2", "a3"), put(queue, "b"), put(queue, "c1", "c2")]
    for room, done in ((1, [0, 0, 0]), (1, [0, 0, 0]), (1, [1, 0, 0]), (1, [1, 1, 0]), (2, [1, 1, 1])):
        queue.lease(room).complete()
        assert [asked.done for asked in line] == [bool(one) for one in done], "a small one does not overtake a large one"


def test_a_later_produce_does_not_overtake_a_waiting_one(broker: BrokerUnderTest) -> None:
    queue = full(broker)
    first = put(queue, *[f"large-{number}" for number in range(5)])
    queue.lease(3).complete()
    later = put(queue, "small")
    assert not first.done and not later.done, "else small ones keep a large one out for ever"
    queue.lease(2).complete()
    assert first.done and not later.done
    queue.lease(1).complete()
    assert later.done


def wait_for_room(queue: QueueUnderTest, lease: int) -> list[SubmittedRequest]:
    """A small and a large produce wait, and then there is room for the small one."""
    asked = [put(queue, "small"), put(queue, *"large")]
    queue.submit(SettleRequest("complete", [SettlePart(0, lease, [0])]))
    return asked


def come_together(queue: QueueUnderTest, lease: int) -> list[SubmittedRequest]:
    """There is room for a small produce when it comes, together with a large one."""
    queue.run(SettleRequest("complete", [SettlePart(0, lease, [0])]))
    return [queue.submit(ProduceRequest(batch_of(*texts), deadline=queue.owner.deadline(60))) for texts in (["small"], "large")]


def wait_for_a_disk(queue: QueueUnderTest, lease: int) -> list[SubmittedRequest]:
    """A small produce waits for a disk, not for room, when a large one comes."""
    queue.loop.stays_in_io = lambda handle: True
    queue.submit(SettleRequest("complete", [SettlePart(0, lease, [0])]))
    queue.loop.turn()
    asked = [put(queue, "small")]
    assert queue.loop.engine.deferred == [asked[0].request]
    queue.loop.stays_in_io = lambda handle: False
    queue.loop.run_io(queue.loop.manual_io[0])
    asked.append(queue.submit(ProduceRequest(batch_of(*"large"), deadline=queue.owner.deadline(60))))
    queue.submit(SettleRequest("extend", [SettlePart(0, lease)]))  # runs before them: the interrupt may come there
    return asked


@pytest.mark.parametrize("come", [wait_for_room, come_together, wait_for_a_disk])
def test_after_an_interrupt_the_line_is_as_before(come: Callable[[QueueUnderTest, int], list[SubmittedRequest]]) -> None:
    """A small produce that came first, and for which there is room, does not get behind a large one that must wait."""
    for look in range(30):
        clock = InterruptingClock()
        broker = BrokerUnderTest(SimulatedStorage(), clock=clock)
        queue = broker.create(max_items=10)
        queue.produce(*"abcdefghij")
        lease = queue.run(LeaseRequest(10))[0].granted.lease
        queue.submit_lease(1)  # waits for items, so that the turn goes on when it has stored some
        broker.turn()
        small, large = come(queue, lease)
        clock.interrupt_after = look
        with suppress(KeyboardInterrupt):
            broker.turn()
        clock.interrupt_after = None
        broker.turn()
        assert small.done and not large.done, f"interrupted at look {look}"
        assert ids_of(small.result, 1)
        broker.embedded.close()


def test_deadlines_in_the_middle_of_the_line(broker: BrokerUnderTest) -> None:
    queue = full(broker)
    line = [put(queue, "a", wait=30), put(queue, "b", wait=10), put(queue, "c", wait=20)]
    broker.advance_in_steps(10)
    assert [asked.done for asked in line] == [False, True, False]
    line[0].cancel()
    queue.lease(1).complete()
    assert line[2].done and line[2].result[0].refused is None, "the place of one that is gone goes to the next"
    assert len(queue.drain()) == 10


def test_a_batch_larger_than_the_limit_goes_in_alone(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_items=3)
    queue.produce("one")
    asked = put(queue, *"abcdef")
    assert not asked.done
    queue.lease().complete()
    assert asked.done
    assert queue.drain() == list("abcdef")


def test_every_partition_counts(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_items=4, partitions=4)
    for number in range(4):
        queue.produce(f"item-{number}", key=keys_at(queue, number)[0])
    assert not put(queue, "fifth", key="k").done
    assert queue.stats().waiting_producers == 1


def test_scheduled_and_backing_off_items_count_and_buried_ones_do_not(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_items=3)
    queue.produce("later", at=broker.after(100))
    queue.produce("retried", "buried")
    queue.lease(1).retry(delay=100)
    assert not put(queue, "x").done
    queue.lease(1).bury()
    broker.turn()
    assert queue.stats().waiting_producers == 0
    assert not put(queue, "y").done


def test_bytes_are_limited_too(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_bytes=100_000)
    noise = random.Random(1)  # what is stored is counted, and a row of one letter takes no room
    first, second, third = ("".join(noise.choices(ascii_letters, k=size)) for size in (70_000, 70_000, 1_000))
    queue.produce(first)
    asked = put(queue, second)
    small = put(queue, third)
    assert not asked.done and not small.done
    queue.lease(1).complete()
    assert asked.done and small.done
    assert queue.drain(1) == [second, third]


def test_transfers_are_not_held_up(broker: BrokerUnderTest) -> None:
    dead = broker.create("dead", max_items=1)
    dead.produce("fills it")
    queue = broker.create(dead_queue="dead")
    queue.produce("letter")
    queue.lease().bury()
    assert dead.counts() == {"ready": 2}
    dead.pause(produce=True)
    queue.produce("another")
    queue.lease().bury()
    assert dead.counts() == {"ready": 3}


def test_a_paused_queue_refuses_at_once(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.pause(produce=True)
    for options in ({}, {"key": "k"}):
        with pytest.raises(QueueHeld, match="paused; resume it or try again later") as caught:
            queue.produce("x", **options)
        assert caught.value.retryable
    queue.pause(produce=False, partition=1)
    assert queue.produce("y") == ["1-0"], "the one that takes items takes it"
    queue.pause(produce=False)
    queue.produce("z", key=keys_at(queue, 0)[0])


def test_a_disk_that_is_nearly_full_takes_no_items_but_lets_work_go_on() -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files), min_free_bytes=1_000_000)
    dead = broker.create("dead")
    queue = broker.create(partitions=2, dead_queue="dead")
    queue.produce("a", "b", "c")
    files.set_free_bytes(1_000_000 - 1)
    for options in ({}, {"key": "k"}):
        with pytest.raises(QueueFull, match=r"bytes are free and 1,000,000 must stay so; make room, or wait for retention"):
            queue.produce("x", **options)
    queue.lease(1).complete()
    queue.lease(1).retry()
    queue.lease(1).bury()
    assert dead.counts() == {"ready": 1}, "what was promised arrives"
    files.set_free_bytes(None)
    queue.produce("y")
    assert len(queue.drain()) == 2
    broker.embedded.close()


def test_the_limit_holds_with_many_producers_and_consumers(threaded_broker: BrokerUnderTest) -> None:
    queue = threaded_broker.create(max_items=10, partitions=3)
    deepest: list[int] = []
    done: list[str] = []

    def produce(name: int) -> Callable[[], None]:
        def run() -> None:
            for number in range(0, 60, 2):
                answer = queue.produce_batch(batch_of(f"{name}-{number}", f"{name}-{number + 1}"), wait=15)
                ids_of(answer, 2)

        return run

    def consume() -> None:
        while len(done) < 240:
            held = queue.lease(3, wait=0.1)
            deepest.append(queue.stats().depth)
            done.extend(held.texts)
            held.complete()

    run_threads(*[produce(name) for name in range(4)], consume, consume)
    assert max(deepest) <= 10
    assert sorted(done) == sorted(f"{name}-{number}" for name in range(4) for number in range(60))
    for name in range(4):
        own = [int(text.partition("-")[2]) for text in done if text.startswith(f"{name}-")]
        assert sorted(own) == list(range(60))
