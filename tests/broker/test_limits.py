"""A queue with a limit: produce waits for room, in order, until its deadline."""

import random
from collections.abc import Callable
from string import ascii_letters
from typing import Any

import pytest

from penstock.loop.requests import ProduceRequest
from penstock.operations import ClearItems, RedriveItems
from penstock.testing import SimulatedFiles
from penstock.words.errors import QueueFull, QueueHeld
from tests.broker.broker_under_test import Asked, Desk, Rig, batch_of, ids_of, keys_at, together
from tests.broker.storages import Simulated


def put(desk: Desk, *texts: str, wait: float = 60, **options: Any) -> Asked:
    """A produce that may have to wait."""
    asked = desk.submit(ProduceRequest(batch_of(*texts, **options), deadline=desk.rig.deadline(wait) if wait else 0))
    desk.rig.turn()
    return asked


def full(rig: Rig, most: int = 10, **options: Any) -> Desk:
    desk = rig.create(max_items=most, partitions=2, **options)
    desk.produce(*[f"old-{number}" for number in range(most)])
    return desk


def test_produce_waits_until_there_is_room(broker: Rig) -> None:
    desk = full(broker)
    asked = put(desk, "new")
    assert not asked.done and desk.stats().waiting_producers == 1
    held = desk.lease(1)
    assert not asked.done, "a leased item still takes its room"
    held.complete()
    assert ids_of(asked.result, 1)
    assert desk.stats().waiting_producers == 0
    assert sorted(desk.drain()) == sorted(["new", *[f"old-{number}" for number in range(1, 10)]])


FREEING: dict[str, Callable[[Rig, Desk], object]] = {
    "clear": lambda rig, desk: desk.call(ClearItems(states=["ready"])),
    "bury": lambda rig, desk: desk.lease(1).bury(),
    "a higher limit": lambda rig, desk: desk.update(max_items=11),
    "no limit": lambda rig, desk: desk.update(max_items=0),
    "ttl": lambda rig, desk: rig.pass_by(50),
    "redrive to another queue": lambda rig, desk: desk.call(RedriveItems(items={0: [0]}, to=rig.create("other").incarnation)),
}


@pytest.mark.parametrize("how", FREEING)
def test_room_is_made_by(broker: Rig, how: str) -> None:
    desk = full(broker, ttl=50_000_000)
    asked = put(desk, "new")
    assert not asked.done
    FREEING[how](broker, desk)
    broker.turn()
    assert ids_of(asked.result, 1)


def test_it_is_full_at_the_deadline_and_not_before(broker: Rig) -> None:
    desk = full(broker)
    asked = put(desk, "new", wait=5)
    endless = put(desk, "patient", wait=0)
    broker.pass_by(4.999)
    assert not asked.done
    broker.pass_by(0.001)
    with pytest.raises(QueueFull, match="queue 'q' is full; wait until items are resolved, or raise max_items or max_bytes"):
        _ = asked.result
    broker.pass_by(3_600)
    assert not endless.done
    assert len(desk.drain(100)) == 11
    assert endless.done, "nothing of the refused one is there"


def test_those_who_wait_go_in_the_order_in_which_they_came(broker: Rig) -> None:
    desk = full(broker)
    line = [put(desk, "a1", "a2", "a3"), put(desk, "b"), put(desk, "c1", "c2")]
    for room, done in ((1, [0, 0, 0]), (1, [0, 0, 0]), (1, [1, 0, 0]), (1, [1, 1, 0]), (2, [1, 1, 1])):
        desk.lease(room).complete()
        assert [asked.done for asked in line] == [bool(one) for one in done], "a small one does not overtake a large one"


def test_who_comes_later_does_not_overtake_who_waits(broker: Rig) -> None:
    desk = full(broker)
    first = put(desk, *[f"large-{number}" for number in range(5)])
    desk.lease(3).complete()
    later = put(desk, "small")
    assert not first.done and not later.done, "else small ones keep a large one out for ever"
    desk.lease(2).complete()
    assert first.done and not later.done
    desk.lease(1).complete()
    assert later.done


def test_deadlines_in_the_middle_of_the_line(broker: Rig) -> None:
    desk = full(broker)
    line = [put(desk, "a", wait=30), put(desk, "b", wait=10), put(desk, "c", wait=20)]
    broker.pass_by(10)
    assert [asked.done for asked in line] == [False, True, False]
    line[0].cancel()
    desk.lease(1).complete()
    assert line[2].done and line[2].result[0].refused is None, "the place of one that is gone goes to the next"
    assert len(desk.drain()) == 10


def test_a_batch_larger_than_the_limit_goes_in_alone(broker: Rig) -> None:
    desk = broker.create(max_items=3)
    desk.produce("one")
    asked = put(desk, *"abcdef")
    assert not asked.done
    desk.lease().complete()
    assert asked.done
    assert desk.drain() == list("abcdef")


def test_every_partition_counts(broker: Rig) -> None:
    desk = broker.create(max_items=4, partitions=4)
    for number in range(4):
        desk.produce(f"item-{number}", key=keys_at(desk, number)[0])
    assert not put(desk, "fifth", key="k").done
    assert desk.stats().waiting_producers == 1


def test_scheduled_and_backing_off_items_count_and_buried_ones_do_not(broker: Rig) -> None:
    desk = broker.create(max_items=3)
    desk.produce("later", at=broker.after(100))
    desk.produce("retried", "buried")
    desk.lease(1).retry(delay=100)
    assert not put(desk, "x").done
    desk.lease(1).bury()
    broker.turn()
    assert desk.stats().waiting_producers == 0
    assert not put(desk, "y").done


def test_bytes_are_limited_too(broker: Rig) -> None:
    desk = broker.create(max_bytes=100_000)
    noise = random.Random(1)  # what is stored is counted, and a row of one letter takes no room
    first, second, third = ("".join(noise.choices(ascii_letters, k=size)) for size in (70_000, 70_000, 1_000))
    desk.produce(first)
    asked = put(desk, second)
    small = put(desk, third)
    assert not asked.done and not small.done
    desk.lease(1).complete()
    assert asked.done and small.done
    assert desk.drain(1) == [second, third]


def test_transfers_are_not_held_up(broker: Rig) -> None:
    dead = broker.create("dead", max_items=1)
    dead.produce("fills it")
    desk = broker.create(dead_queue="dead")
    desk.produce("letter")
    desk.lease().bury()
    assert dead.counts() == {"ready": 2}
    dead.pause(produce=True)
    desk.produce("another")
    desk.lease().bury()
    assert dead.counts() == {"ready": 3}


def test_a_paused_queue_refuses_at_once(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    desk.pause(produce=True)
    for options in ({}, {"key": "k"}):
        with pytest.raises(QueueHeld, match="paused; resume it or try again later") as caught:
            desk.produce("x", **options)
        assert caught.value.retryable
    desk.pause(produce=False, partition=1)
    assert desk.produce("y") == ["1-0"], "the one that takes items takes it"
    desk.pause(produce=False)
    desk.produce("z", key=keys_at(desk, 0)[0])


def test_a_disk_that_is_nearly_full_takes_no_items_but_lets_work_go_on() -> None:
    files = SimulatedFiles()
    rig = Rig(Simulated(files), min_free_bytes=1_000_000)
    dead = rig.create("dead")
    desk = rig.create(partitions=2, dead_queue="dead")
    desk.produce("a", "b", "c")
    files.fill(1_000_000 - 1)
    for options in ({}, {"key": "k"}):
        with pytest.raises(QueueFull, match=r"bytes are free and 1,000,000 must stay so; make room, or wait for retention"):
            desk.produce("x", **options)
    desk.lease(1).complete()
    desk.lease(1).retry()
    desk.lease(1).bury()
    assert dead.counts() == {"ready": 1}, "what was promised arrives"
    files.fill(None)
    desk.produce("y")
    assert len(desk.drain()) == 2
    rig.broker.close()


def test_the_limit_holds_with_many_producers_and_consumers(live: Rig) -> None:
    desk = live.create(max_items=10, partitions=3)
    deepest: list[int] = []
    done: list[str] = []

    def produce(name: int) -> Callable[[], None]:
        def run() -> None:
            for number in range(0, 60, 2):
                answer = desk.place(batch_of(f"{name}-{number}", f"{name}-{number + 1}"), wait=15)
                ids_of(answer, 2)

        return run

    def consume() -> None:
        while len(done) < 240:
            held = desk.lease(3, wait=0.1)
            deepest.append(desk.stats().depth)
            done.extend(held.texts)
            held.complete()

    together(*[produce(name) for name in range(4)], consume, consume)
    assert max(deepest) <= 10
    assert sorted(done) == sorted(f"{name}-{number}" for name in range(4) for number in range(60))
    for name in range(4):
        own = [int(text.partition("-")[2]) for text in done if text.startswith(f"{name}-")]
        assert sorted(own) == list(range(60))
