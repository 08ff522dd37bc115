"""The context of a handler: progress, follow-ups, timeouts."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock import Broker, Item, NewItem, Queue
from penstock.errors import InvalidRequest, QueueNotFound
from penstock.worker.context import Context
from penstock.worker.handlers import Handler
from penstock.worker.outcomes import Retry, RetryPolicy
from penstock.worker.worker import Worker
from tests.worker.harness import WAIT, HandlerEvents, running_worker, wait_completed, wait_until


class Object:
    def method(self, item: Any, context: Any) -> None: ...

    async def __call__(self, item: Any) -> None: ...


async def asynchronous(item: Any) -> None: ...


def keyword(item: Any, *, context: Any) -> str:
    return f"{item} {context}"


def second(item: Any, whatever: Any) -> str:
    return f"{item} {whatever}"


def optional(item: Any, dry_run: bool = False) -> str:
    return f"{item} {dry_run}"


def named(item: Any, context: Any = None) -> str:
    return f"{item} {context}"


def test_a_handler_gets_a_context_if_it_wants_one() -> None:
    calls: list[tuple[Callable[..., Any], str]] = [(keyword, "i c"), (second, "i c"), (optional, "i False"), (named, "i c"), (str, "i")]
    assert [Handler(function)("i", "c") for function, _ in calls] == [said for _, said in calls]
    others: list[Callable[..., Any]] = [print, Object().method, Object(), asynchronous]
    assert [Handler(function).wants_context for function in others] == [False, True, False, False]
    assert [Handler(function).is_async for function in others] == [False, False, True, True]


def test_a_context_knows_its_item(queue: Queue, log: HandlerEvents) -> None:
    item_id = queue.produce(b"x")

    def handle(item: Item, context: Context) -> None:
        log.add((context.item.id, context.queue, context.attempt, context.cancelled, repr(context)[:18]))
        queue.extend(context.token)  # the token is that of the lease
        if context.attempt == 1:
            raise Retry(0)

    with running_worker(Worker(queue, handle)):
        assert log.take(2) == [(item_id, "orders", attempt, False, "Context(Item('0-0'") for attempt in (1, 2)]
        wait_completed(queue, 1)


@pytest.mark.parametrize(("said", "seen"), [((0.5, "half way"), "50% half way"), ((1,), "100%"), (("reading",), "reading")])
def test_progress_is_seen_while_the_handler_works(queue: Queue, said: tuple[Any, ...], seen: str) -> None:
    item_id = queue.produce(b"x")
    go = threading.Event()

    def handle(item: Item, context: Context) -> None:
        for share in range(100):
            context.progress(share / 100)
        context.progress(*said)
        go.wait(WAIT)

    with running_worker(Worker(queue, handle, name="host-1")):
        why = wait_until(lambda: queue.explain(item_id).why, lambda why: f"({seen})" in why)
        assert why.startswith("leased by host-1 for another")
        assert queue.stats().consumers == {"host-1": 1}
        go.set()
        wait_completed(queue, 1)


def test_async_handlers_report_progress_too(queue: Queue) -> None:
    item_id = queue.produce(b"x")
    go = threading.Event()

    async def handle(item: Item, context: Context) -> None:
        context.progress("on it")
        await asyncio.to_thread(go.wait, WAIT)

    with running_worker(Worker(queue, handle)):
        wait_until(lambda: queue.explain(item_id).why, lambda why: "(on it)" in why)
        go.set()
        wait_completed(queue, 1)


@pytest.mark.parametrize("wrong", [2, -0.1, True, None])
def test_wrong_progress_is_refused(queue: Queue, log: HandlerEvents, wrong: Any) -> None:
    queue.produce(b"x")

    def handle(item: Item, context: Context) -> None:
        with pytest.raises(InvalidRequest, match="give a share from 0 to 1, or a text"):
            context.progress(wrong)
        log.add("refused")

    with running_worker(Worker(queue, handle)):
        assert log.next() == "refused"


def test_follow_ups_are_made_exactly_if_the_item_is_completed(broker: Broker, queue: Queue, log: HandlerEvents) -> None:
    mail = broker.create_queue("mail")
    queue.produce(b"order")

    def handle(item: Item, context: Context) -> None:
        context.follow_up(NewItem({"attempt": context.attempt}, queue="mail"))
        if item.payload == b"order":
            context.follow_up(b"more")
        log.add(item.payload)
        if context.attempt == 1:
            raise Retry(0)

    with running_worker(Worker(queue, handle)):
        assert sorted(log.take(4)) == [b"more", b"more", b"order", b"order"]
        wait_completed(queue, 2)
    found: list[Any] = []
    while len(found) < 2:  # a lease does not wait to fill up
        found += [lease.item.value for lease in mail.lease(10, wait=WAIT)]
    assert found == [{"attempt": 2}] * 2  # one from the order, one from its follow-up


def test_a_follow_up_of_an_item_that_the_handler_completed_is_logged(
    queue: Queue, log: HandlerEvents, caplog: pytest.LogCaptureFixture
) -> None:
    queue.produce(b"order")

    def handle(item: Item, context: Context) -> None:
        queue.complete([context.token])
        context.follow_up(b"more")
        log.add(item.payload)

    with running_worker(Worker(queue, handle)):
        assert log.next() == b"order"
        wait_until(lambda: "could not be made" in caplog.text)
    assert "this call made no follow-ups" in caplog.text
    assert (queue.stats().completed, queue.stats().produced) == (1, 1)


def test_a_follow_up_to_an_unknown_queue_is_refused_in_the_handler(broker: Broker, queue: Queue, log: HandlerEvents) -> None:
    queue.produce(b"x")
    wrong: list[tuple[Any, type[Exception]]] = [(NewItem(b"", queue="nowhere"), QueueNotFound), (None, InvalidRequest)]

    def handle(item: Item, context: Context) -> None:
        for given, error in wrong:
            with pytest.raises(error):
                context.follow_up(given)
        log.add("refused")

    with running_worker(Worker(queue, handle)):
        assert log.next() == "refused"
        wait_completed(queue, 1)


def test_a_follow_up_to_a_deleted_queue_retries_the_item(broker: Broker, queue: Queue, log: HandlerEvents) -> None:
    broker.create_queue("mail")
    queue.produce(b"x")

    def handle(item: Item, context: Context) -> None:
        context.follow_up(NewItem(b"", queue="mail"))
        broker.delete_queue("mail")

    with running_worker(Worker(queue, handle)):
        wait_until(lambda: queue.stats().scheduled)
        assert queue.items("scheduled")[0].reason.startswith("its follow-ups could not be made: QueueNotFound")


def test_a_batch_has_no_follow_ups(queue: Queue, log: HandlerEvents) -> None:
    queue.produce_many([b"1", b"2"])

    def handle(items: list[Item], context: Context) -> None:
        log.add(len(context.items))
        context.follow_up(b"x")

    with running_worker(Worker(queue, handle, batch=2, retry=RetryPolicy(base=100))):
        assert log.next() == 2
        wait_until(lambda: queue.stats().scheduled)
    assert "a follow-up belongs to one item" in queue.items("scheduled")[0].reason


# -- handlers that run too long --------------------------------------------------------------------------------


def exceed_timeout(queue: Queue, log: HandlerEvents, go: threading.Event) -> Callable[..., None]:
    """A handler that exceeds the timeout at its first attempt, and then reports `cancelled`."""

    def handle(item: Item, context: Context) -> None:
        if item.attempts == 1:
            log.add("begun")
            go.wait(WAIT)
            log.add(("late", context.cancelled))
        else:
            log.add("again")

    return handle


def test_a_thread_that_exceeds_the_timeout_is_abandoned(queue: Queue, log: HandlerEvents) -> None:
    item_id = queue.produce(b"x")
    go = threading.Event()
    one = Worker(queue, exceed_timeout(queue, log, go), handler_timeout=0.05, retry=RetryPolicy(base=0))
    with running_worker(one):
        assert log.take(2) == ["begun", "again"]  # the abandoned thread was replaced
        wait_completed(queue, 1)
        go.set()
        assert log.next() == ("late", True)
        queue.produce(b"y")  # the pool still has one thread
        assert log.next() == "begun"
    assert queue.explain(item_id).state == "completed"
    assert one.stats().late == 0
    assert one.stats().handled == 2


def test_threads_are_not_replaced_when_too_many_are_abandoned(queue: Queue, log: HandlerEvents) -> None:
    go = threading.Event()
    queue.produce_many([b"%d" % n for n in range(8)])

    def handle(item: Item) -> None:
        log.add(item.id)
        go.wait(WAIT)

    with running_worker(Worker(queue, handle, concurrency=2, handler_timeout=0.05, retry=RetryPolicy(base=100))):
        assert len({*log.take(4)}) == 4
        wait_until(lambda: queue.stats().scheduled, lambda count: count == 4)
        assert log.rest() == []
        go.set()
        log.take(4)


def test_a_thread_that_lost_its_lease_is_replaced_after_the_timeout(queue: Queue, log: HandlerEvents) -> None:
    queue.produce(b"lost")
    go = threading.Event()

    def handle(item: Item, context: Context) -> None:
        if item.payload == b"lost":
            queue.clear("leased")
            context.progress("the report finds that the lease is lost")
            wait_until(lambda: context.cancelled)
            go.wait(WAIT)
        log.add(item.payload)

    with running_worker(Worker(queue, handle, handler_timeout=0.5)):
        wait_until(lambda: queue.stats().completed)
        queue.produce(b"next")
        assert log.next() == b"next"
        go.set()
        assert log.next() == b"lost"


def test_a_task_that_exceeds_the_timeout_is_cancelled(queue: Queue, log: HandlerEvents) -> None:
    queue.produce(b"x")

    async def handle(item: Item) -> None:
        try:
            if item.attempts == 1:
                await asyncio.sleep(WAIT)
        except asyncio.CancelledError:
            log.add("cancelled")
            raise
        log.add("done")

    with running_worker(Worker(queue, handle, handler_timeout=0.05, retry=RetryPolicy(base=0))):
        assert log.take(2) == ["cancelled", "done"]
        wait_completed(queue, 1)


def test_a_timeout_error_of_the_handler_is_not_a_handler_timeout(queue: Queue, log: HandlerEvents) -> None:
    queue.produce(b"x")

    async def handle(item: Item) -> None:
        raise TimeoutError("the network is slow")

    with running_worker(Worker(queue, handle, handler_timeout=WAIT, retry=RetryPolicy(base=100))):
        wait_until(lambda: queue.stats().scheduled)
    assert queue.items("scheduled")[0].reason == "TimeoutError: the network is slow"


@pytest.mark.parametrize("how", ["thread", "task"])
def test_the_timeout_is_the_reason_and_a_handler_can_extend_it(queue: Queue, log: HandlerEvents, how: str) -> None:
    queue.produce_many([b"more", b"less"])
    go = threading.Event()

    def handle(item: Item, context: Context) -> None:
        if item.payload == b"more":
            context.extend(WAIT)
        go.wait(WAIT)
        log.add(item.payload)

    async def ahandle(item: Item, context: Context) -> None:
        await asyncio.to_thread(handle, item, context)

    one = Worker(queue, handle if how == "thread" else ahandle, concurrency=2, handler_timeout=0.1, retry=RetryPolicy(base=100))
    with running_worker(one):
        wait_until(lambda: queue.stats().scheduled)
        assert [(item.payload, item.reason) for item in queue.items("scheduled")] == [(b"less", "the handler ran longer than 0.1 s")]
        go.set()
        wait_completed(queue, 1)
    assert queue.explain("0-0").state == "completed"
