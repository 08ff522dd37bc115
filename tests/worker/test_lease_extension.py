"""Leases are kept while handlers work, whatever these do; and a lease that is lost all the same is noticed."""

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock import Broker, Item, Queue
from penstock.broker.embedded import EmbeddedBroker
from penstock.worker.settings import Hooks
from penstock.worker.worker import Worker
from tests.worker.harness import WAIT, HandlerEvents, running_worker, wait_completed, wait_elapsed, wait_until

SECONDS = 1.3
"""Longer than a lease of one second."""


def block(item: Item) -> None:
    """Hold the interpreter: no other thread runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(SECONDS * 1e6))


async def ablock(item: Item) -> None:
    block(item)


class CompetingConsumer:
    """Another consumer, who wants the same items and waits for them."""

    def __init__(self, queue: Queue) -> None:
        self.got: list[Any] = []
        self._queue = queue
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()
        wait_until(lambda: queue.stats().waiting_consumers)

    def _wait(self) -> None:
        batch = self._queue.lease(10, wait=WAIT)
        self.got = [lease.item.payload for lease in batch]
        batch.complete()

    def gets(self) -> list[Any]:
        self._thread.join(WAIT)
        return self.got


@pytest.mark.parametrize("handle", [block, ablock], ids=["thread", "task"])
def test_a_handler_that_holds_the_interpreter_longer_than_its_lease_keeps_it(
    broker: Broker, log: HandlerEvents, handle: Callable[..., Any]
) -> None:
    queue = broker.create_queue("orders", lease_timeout=1, max_attempts=1)
    queue.produce(b"1")
    one = Worker(queue, handle, concurrency=2, hooks=Hooks(started=lambda item: log.add(item.payload), late=lambda item: log.add("late")))
    with running_worker(one):
        log.next()
        rival = CompetingConsumer(queue)
        wait_completed(queue, 1)
    queue.produce(b"2")
    assert rival.gets() == [b"2"]
    assert (one.stats().handled, one.stats().late) == (1, 0)
    assert "late" not in log.rest()


def test_a_long_handler_keeps_its_lease_and_those_that_wait_with_it(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", lease_timeout=1, max_attempts=1)
    go = threading.Event()

    def handle(item: Item) -> None:
        log.add(item.payload)
        if item.payload == b"slow":
            go.wait(WAIT)

    one = Worker(queue, handle, batch=0, concurrency=2)
    with running_worker(one):
        queue.produce_many([b"quick", b"slow"])
        log.take(2)
        rival = CompetingConsumer(queue)
        wait_elapsed(broker, 2.2)  # more than two leases long
        assert queue.stats().leased == 1
        go.set()
        wait_completed(queue, 2)
    queue.produce(b"other")
    assert rival.gets() == [b"other"]
    assert one.stats().late == 0


def test_when_the_handler_is_done_its_lease_is_let_go(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders")
    queue.produce_many([b""] * 3)
    with running_worker(Worker(queue, log.add, concurrency=3)):
        wait_completed(queue, 3)
        embedded = queue.home
        assert isinstance(embedded, EmbeddedBroker)
        (loop,) = [loop for loop in embedded.loops() if loop.engine.name == "orders"]
        wait_until(lambda: not loop.engine.auto_extended_leases)


def test_a_lease_that_is_lost_is_late_and_what_waits_under_it_is_not_begun(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders")
    queue.produce_many([b"%d" % n for n in range(200)])
    go, first = threading.Event(), threading.Event()

    def handle(item: Item) -> None:
        if item.payload == b"150":
            first.set()
            go.wait(WAIT)

    late = HandlerEvents()
    one = Worker(queue, handle, hooks=Hooks(late=lambda item: late.add(item.payload)))
    with running_worker(one):
        assert first.wait(WAIT)
        cleared = queue.clear("leased")
        queue.produce(b"151")
        go.set()
        wait_until(lambda: one.stats().in_hand == 0 and queue.stats().depth == 0)
    assert one.stats().handled + one.stats().late + one.stats().returned >= 151
    assert b"150" in late.rest()
    assert cleared >= 1
