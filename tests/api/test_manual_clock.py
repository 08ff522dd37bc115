"""Calls that wait, under a clock that only the test moves."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest

import penstock
from penstock import Broker, Context, Item, Queue, Retry
from penstock.errors import QueueFull
from penstock.testing import ManualClock
from penstock.words.clock import SystemClock
from tests.worker.harness import WAIT, running_worker, wait_until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def alone(clock: ManualClock) -> Iterator[Broker]:
    """A broker without threads."""
    with penstock.open("memory://", clock=clock, threaded=False) as broker:
        yield broker


@pytest.fixture
def threaded(clock: ManualClock) -> Iterator[Broker]:
    with penstock.open("memory://", clock=clock) as broker:
        yield broker


@contextmanager
def in_thread(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a call in a thread during the block, and wait for its end. Gives a list that then has its result."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        thread.join(WAIT)
    assert not thread.is_alive(), "the call still waits"


def wait_for_consumers(queue: Queue, count: int = 1) -> None:
    wait_until(lambda: queue.stats().waiting_consumers, lambda found: found == count)


# -- without threads ---------------------------------------------------------------------------------


def test_without_threads_a_waiting_lease_is_empty_at_once(alone: Broker, clock: ManualClock) -> None:
    queue = alone.create_queue("orders")
    before = clock.read()
    assert len(queue.lease(wait=5)) == 0
    queue.produce(b"later", at=clock.now() + timedelta(seconds=5))
    assert len(queue.lease(wait=600)) == 0
    assert clock.read() == before
    clock.advance(5)
    assert queue.lease(wait=5).payloads == [b"later"]
    assert queue.stats().waiting_consumers == 0


def test_without_threads_a_wait_ends_when_a_dead_letter_has_arrived(alone: Broker) -> None:
    dead = alone.create_queue("dead")
    queue = alone.create_queue("orders", dead_queue=dead)
    queue.produce(b"bad")
    queue.lease(wait=5)[0].bury("no")
    assert dead.lease(wait=5).payloads == [b"bad"]


def test_without_threads_a_full_queue_is_full_at_once(alone: Broker) -> None:
    queue = alone.create_queue("orders", max_items=1)
    queue.produce(b"1")
    with pytest.raises(QueueFull):
        queue.produce(b"2")
    queue.lease().complete()
    queue.produce(b"3")


def test_without_threads_a_following_cursor_ends_at_the_last_item(alone: Broker) -> None:
    queue = alone.create_queue("orders")
    queue.produce_many([b"1", b"2"])
    cursor = queue.cursor("audit", follow=True)
    assert [item.payload for item in cursor] == [b"1", b"2"]
    assert cursor.read() == []
    queue.produce(b"3")
    assert [item.payload for item in cursor.read()] == [b"3"]


def test_without_threads_a_call_by_the_real_clock_waits_for_the_next_item() -> None:
    with penstock.open("memory://", threaded=False) as broker:
        queue = broker.create_queue("orders")
        queue.produce(b"1")
        queue.lease()[0].retry(delay=0.05)
        began = SystemClock().read().elapsed
        assert queue.lease(wait=WAIT)[0].attempts == 2
        assert len(queue.lease(wait=0.05)) == 0
        assert SystemClock().read().elapsed - began < 4_000_000


# -- with threads ------------------------------------------------------------------------------------


def test_advance_ends_the_wait_of_a_lease(threaded: Broker, clock: ManualClock) -> None:
    queue = threaded.create_queue("orders")
    with in_thread(lambda: len(queue.lease(wait=600))) as found:
        wait_for_consumers(queue)
        clock.advance(599)
        assert queue.stats().waiting_consumers == 1 and not found
        clock.advance(1)
    assert found == [0]


def test_advance_gives_a_waiting_lease_the_item_that_is_due(threaded: Broker, clock: ManualClock) -> None:
    queue = threaded.create_queue("orders")
    queue.produce(b"1")
    queue.lease()[0].retry(delay=300)
    with in_thread(lambda: queue.lease(wait=600).payloads) as found:
        wait_for_consumers(queue)
        clock.advance(timedelta(minutes=5))
    assert found == [[b"1"]]


def test_advance_ends_the_wait_for_room(threaded: Broker, clock: ManualClock) -> None:
    queue = threaded.create_queue("orders", max_items=1)
    queue.produce(b"1")
    with in_thread(lambda: queue.produce(b"2", timeout=600)) as found:
        wait_until(lambda: queue.stats().waiting_producers)
        clock.advance(600)
    assert isinstance(found[0], QueueFull)


def test_advance_in_another_task_ends_the_wait_of_a_lease(clock: ManualClock) -> None:
    async def wait_and_advance() -> list[int]:
        async with await penstock.aopen("memory://", clock=clock) as broker:
            queue = await broker.create_queue("orders")
            waiting = [asyncio.create_task(queue.lease(wait=600)) for _ in range(2)]
            while (await queue.stats()).waiting_consumers < 2:
                await asyncio.sleep(0)
            clock.advance(600)
            return [len(batch) for batch in await asyncio.wait_for(asyncio.gather(*waiting), WAIT)]

    assert asyncio.run(wait_and_advance()) == [0, 0]


def test_a_closed_broker_no_longer_watches_the_clock(clock: ManualClock) -> None:
    with penstock.open("memory://", clock=clock) as broker:
        broker.create_queue("orders")
        assert len(clock._watchers) == 1
    assert clock._watchers == []
    clock.advance(5)


def test_a_worker_handles_a_retried_item_when_the_clock_is_advanced(threaded: Broker, clock: ManualClock) -> None:
    queue = threaded.create_queue("orders")
    attempts: list[int] = []

    def handle(item: Item) -> None:
        attempts.append(item.attempts)
        if item.attempts < 3:
            raise Retry(3_600)

    queue.produce(b"1")
    with running_worker(penstock.Worker(queue, handle)):
        for attempt in (1, 2):
            wait_until(lambda attempt=attempt: len(attempts) == attempt and queue.stats().scheduled)  # type: ignore[misc]
            clock.advance(3_600)
        wait_until(lambda: queue.stats().completed)
    assert attempts == [1, 2, 3]
    assert len(clock._watchers) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_times_out_when_the_clock_is_advanced(threaded: Broker, clock: ManualClock, is_async: bool) -> None:
    queue = threaded.create_queue("orders", max_attempts=1)
    begun, end = threading.Event(), threading.Event()

    def handle(item: Item) -> None:
        begun.set()
        end.wait(WAIT)

    async def handle_async(item: Item) -> None:
        begun.set()
        await asyncio.sleep(WAIT)

    queue.produce(b"1")
    with running_worker(penstock.Worker(queue, handle_async if is_async else handle, handler_timeout=30)):
        assert begun.wait(WAIT)
        clock.advance(30)
        wait_until(lambda: queue.stats().buried)
        end.set()
    assert "the handler ran longer than 30 s" in queue.items("buried")[0].reason


def test_the_deadline_of_a_handler_is_a_datetime(threaded: Broker, clock: ManualClock) -> None:
    queue = threaded.create_queue("orders")
    found: list[datetime | None] = []

    def handle(item: Item, context: Context) -> None:
        found.append(context.deadline)
        context.extend(timedelta(minutes=5))
        found.append(context.deadline)

    queue.produce_many([b"1"])
    penstock.Worker(queue, handle, handler_timeout=30).run(until_empty=True)
    queue.produce_many([b"2"])
    penstock.Worker(queue, handle).run(until_empty=True)
    half, five = clock.now() + timedelta(seconds=30), clock.now() + timedelta(minutes=5)
    assert found == [half, five, None, five]
