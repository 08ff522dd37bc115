"""The outcomes of items: completed, retried, buried, snoozed, returned."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock import Broker, Item, NewItem, Queue
from penstock.worker.context import Context
from penstock.worker.outcomes import Bury, Failed, Retry, RetryPolicy, Snooze
from penstock.worker.settings import Hooks
from penstock.worker.worker import Worker, worker
from tests.worker.harness import WAIT, HandlerEvents, running_worker, wait_completed, wait_until

AT_ONCE = RetryPolicy(base=0)
Handle = Callable[..., Any]


def in_a_thread(handle: Handle) -> Handle:
    return handle


def in_a_task(handle: Handle) -> Handle:
    """The handler as a coroutine that yields to other tasks before and after."""

    async def ahandle(item: Any, context: Context) -> Any:
        await asyncio.sleep(0)
        found = handle(item, context) if "context" in handle.__code__.co_varnames[: handle.__code__.co_argcount] else handle(item)
        await asyncio.sleep(0)
        return found

    return ahandle


@pytest.fixture(params=[in_a_thread, in_a_task], ids=["threads", "tasks"])
def kind(request: pytest.FixtureRequest) -> Callable[[Handle], Handle]:
    """Runs the test with a plain and with an async handler."""
    found: Callable[[Handle], Handle] = request.param
    return found


# -- done --------------------------------------------------------------------------------------------------


def test_items_are_handled_and_completed(queue: Queue, log: HandlerEvents, kind: Callable[[Handle], Handle]) -> None:
    queue.produce_many([NewItem({"n": n}, key=f"k{n % 3}", headers={"h": "1"}) for n in range(30)])
    with running_worker(Worker(queue, kind(lambda item: log.add((item.value["n"], item.key, item.headers["h"]))), concurrency=4)) as _:
        assert sorted(log.take(30)) == [(n, f"k{n % 3}", "1") for n in range(30)]
        wait_completed(queue, 30)
    assert queue.stats().depth == 0


def test_items_produced_later_are_handled_too(queue: Queue, log: HandlerEvents, kind: Callable[[Handle], Handle]) -> None:
    with running_worker(Worker(queue, kind(lambda item: log.add(item.payload)), concurrency=2)):
        for payload in (b"1", b"2", b"3"):
            queue.produce(payload)
            assert log.next() == payload
        wait_completed(queue, 3)


def test_items_of_a_key_are_handled_in_order_one_at_a_time(broker: Broker, log: HandlerEvents, kind: Callable[[Handle], Handle]) -> None:
    queue = broker.create_queue("orders", partitions=3)
    queue.produce_many([NewItem(b"%d" % n, key=f"key {n % 7}") for n in range(210)])
    held: set[str] = set()

    def handle(item: Item) -> None:
        assert item.key is not None and item.key not in held
        held.add(item.key)
        log.add((item.key, int(item.payload)))
        held.remove(item.key)
        if item.attempts == 1 and int(item.payload) % 3 == 0:
            raise Retry(0)

    with running_worker(Worker(queue, kind(handle), concurrency=8)):
        wait_completed(queue, 210)
    seen = log.rest()
    for key in range(7):
        ours = [number for name, number in seen if name == f"key {key}"]
        assert sorted(set(ours)) == list(range(key, 210, 7)) and ours == sorted(ours)


def test_a_quick_handler_does_not_hold_up_slow_ones_and_the_other_way_round(queue: Queue, log: HandlerEvents) -> None:
    go = threading.Event()

    def handle(item: Item) -> None:
        if item.payload == b"slow":
            go.wait(WAIT)
        log.add(item.payload)

    with running_worker(Worker(queue, handle, concurrency=3)):
        for _ in range(200):  # after quick items the worker leases many at once
            queue.produce(b"quick")
        log.take(200)
        queue.produce_many([b"slow", b"quick", b"slow", b"quick", b"quick"])
        assert log.take(3) == [b"quick"] * 3
        go.set()
        assert log.take(2) == [b"slow"] * 2


# -- failed ------------------------------------------------------------------------------------------------


def test_a_failed_item_is_retried_until_its_attempts_are_spent(
    broker: Broker, log: HandlerEvents, kind: Callable[[Handle], Handle]
) -> None:
    queue = broker.create_queue("orders", max_attempts=3)
    queue.produce(b"x")

    def handle(item: Item) -> None:
        log.add(item.attempts)
        raise ValueError("no such order")

    with running_worker(Worker(queue, kind(handle), retry=AT_ONCE)) as _:
        assert log.take(3) == [1, 2, 3]
        wait_until(lambda: queue.stats().buried)
    assert [item.reason for item in queue.items("buried")] == ["attempts spent: ValueError: no such order"]


@pytest.mark.parametrize("batch", [0, 2])
def test_the_last_failure_is_reported_as_a_burial(
    broker: Broker, log: HandlerEvents, kind: Callable[[Handle], Handle], caplog: pytest.LogCaptureFixture, batch: int
) -> None:
    queue = broker.create_queue("orders", max_attempts=2)
    queue.produce(b"x")

    def handle(given: Any) -> None:
        raise ValueError("no such order")

    hooks = Hooks(finished=lambda item, seconds, outcome: log.add(outcome))
    made = Worker(queue, kind(handle), retry=RetryPolicy(base=0.001), hooks=hooks, batch=batch)
    with running_worker(made):
        assert log.take(2) == ["retried", "buried"]
        wait_until(lambda: made.stats().buried)
    stats = made.stats()
    assert (stats.failed, stats.retried, stats.buried, stats.in_hand) == (2, 1, 1, 0)
    assert [record.getMessage() for record in caplog.records if record.name == "penstock.worker"] == [
        "item 0-0 of queue 'orders' failed at attempt 1 and is retried in 0.0 s: ValueError: no such order",
        "item 0-0 of queue 'orders' failed at attempt 2, its last, and is buried: ValueError: no such order",
    ]


def test_a_burial_that_the_worker_could_not_expect_is_counted_and_logged(
    queue: Queue, log: HandlerEvents, caplog: pytest.LogCaptureFixture
) -> None:
    queue.produce(b"x")

    def handle(item: Item) -> None:
        queue.update(max_attempts=1)
        raise ValueError("no such order")

    made = Worker(queue, handle)
    with running_worker(made):
        wait_until(lambda: made.stats().buried)
    assert (made.stats().retried, made.stats().in_hand) == (0, 0)
    assert caplog.messages[-1] == "item 0-0 of queue 'orders' is not retried but buried: its ttl is over, or max_attempts was lowered"


def test_a_failed_item_waits_as_the_policy_says(queue: Queue, log: HandlerEvents, kind: Callable[[Handle], Handle]) -> None:
    item_id = queue.produce(b"x")

    def handle(item: Item) -> None:
        raise ValueError("busy")

    with running_worker(Worker(queue, kind(handle), retry=RetryPolicy(base=500, jitter=0))):
        wait_until(lambda: queue.stats().scheduled)
    found = queue.explain(item_id)
    assert (found.attempts, found.reason) == (1, "ValueError: busy")
    assert 480 < (found.ready_in_seconds or 0) <= 500


def test_a_handler_raises_the_outcome_of_its_item(queue: Queue, kind: Callable[[Handle], Handle]) -> None:
    errors = {b"retry": Retry(300, "full"), b"bury": Bury("poison"), b"snooze": Snooze(700), b"type": KeyError("k"), b"done": None}
    ids = dict(zip(errors, queue.produce_many(list(errors)), strict=True))

    def handle(item: Item) -> None:
        if (error := errors[item.payload]) is not None:
            raise error

    one = Worker(queue, kind(handle), concurrency=2, retry=RetryPolicy(by_type={LookupError: Bury}))
    with running_worker(one):
        wait_until(lambda: queue.stats(), lambda stats: stats.ready + stats.leased == 0)
        stats = wait_until(one.stats, lambda stats: stats.in_hand == 0)
    assert "backing off after attempt 1 (full), ready in" in queue.explain(ids[b"retry"]).why
    assert queue.explain(ids[b"bury"]).why == "buried because: poison"
    assert queue.explain(ids[b"type"]).why == "buried because: KeyError: 'k'"
    assert queue.explain(ids[b"snooze"]).attempts == 0
    assert queue.explain(ids[b"done"]).state == "completed"
    assert (stats.handled, stats.failed, stats.retried, stats.buried, stats.snoozed, stats.late) == (1, 3, 1, 2, 1, 0)


def test_a_snooze_counts_as_no_attempt(broker: Broker, log: HandlerEvents) -> None:
    queue = broker.create_queue("orders", max_attempts=1)
    queue.produce(b"x")

    def handle(item: Item) -> None:
        log.add(item.attempts)
        if len(seen) < 3:
            raise Snooze(0)

    seen: list[int] = []
    with running_worker(Worker(queue, handle)):
        while len(seen) < 4:
            seen.append(log.next())
        wait_completed(queue, 1)
    assert seen == [1, 1, 1, 1]


def test_many_failures_are_settled_together(queue: Queue, log: HandlerEvents) -> None:
    queue.produce_many([b"%d" % n for n in range(2_000)])

    def handle(item: Item) -> None:
        if item.attempts == 1:
            raise ValueError(f"reason {int(item.payload) % 10}")

    with running_worker(Worker(queue, handle, concurrency=4, retry=RetryPolicy(base=0.001, jitter=1))):
        wait_completed(queue, 2_000)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(), GeneratorExit()])
def test_whatever_a_handler_raises_is_a_failure_of_its_item_only(queue: Queue, log: HandlerEvents, error: BaseException) -> None:
    queue.produce_many([b"bad", b"good"])

    def handle(item: Item) -> None:
        if item.payload == b"bad":
            raise error
        log.add(item.payload)

    async def ahandle(item: Item) -> None:
        handle(item)

    for one in (handle, ahandle):
        with running_worker(Worker(queue, one, retry=RetryPolicy(base=100))):
            assert log.next() == b"good"
            wait_until(lambda: queue.stats().scheduled)
        assert queue.items("scheduled")[0].reason.startswith(
            type(error).__name__ if one is handle or type(error) is not StopIteration else "R"
        )
        queue.clear("scheduled")
        queue.produce_many([b"bad", b"good"])


def test_a_result_that_is_not_awaited_is_a_failure(queue: Queue, log: HandlerEvents) -> None:
    queue.produce(b"x")

    async def later(item: Item) -> None:
        log.add("done")

    with running_worker(Worker(queue, lambda item: later(item), retry=RetryPolicy(base=100))):
        wait_until(lambda: queue.stats().scheduled)
    assert "declare the handler with async def" in queue.items("scheduled")[0].reason
    assert log.rest() == []


def test_other_results_of_a_handler_are_ignored(queue: Queue) -> None:
    queue.produce_many([b"x", b"y"])
    results = [Failed({0: "not a batch"}), {0: "x"}]
    with running_worker(Worker(queue, lambda item: results.pop())):
        wait_completed(queue, 2)


# -- kinds ---------------------------------------------------------------------------------------------------


def test_items_go_to_the_handler_of_their_kind(queue: Queue, log: HandlerEvents) -> None:
    one = Worker(queue, lambda item: log.add(("other", item.payload)), concurrency=2)

    @one.on("invoice", "receipt")
    def paper(item: Item) -> None:
        log.add(("paper", item.payload))

    @one.on("mail")
    async def mail(item: Item) -> None:
        log.add(("mail", item.payload))

    queue.produce_many(
        [NewItem(b"1", kind="invoice"), NewItem(b"2", kind="mail"), b"3", NewItem(b"4", kind="x"), NewItem(b"5", kind="receipt")]
    )
    with running_worker(one):
        assert sorted(log.take(5)) == [("mail", b"2"), ("other", b"3"), ("other", b"4"), ("paper", b"1"), ("paper", b"5")]
        wait_completed(queue, 5)


def test_an_item_without_a_handler_is_returned_and_not_failed(broker: Broker, log: HandlerEvents, caplog: pytest.LogCaptureFixture) -> None:
    queue = broker.create_queue("orders", max_attempts=1)
    ids = queue.produce_many([NewItem(b"1", kind="invoice"), NewItem(b"2", kind="mail"), b"3"])
    first, second = Worker(queue), Worker(queue)
    first.on("invoice")(lambda item: log.add(("first", item.payload, item.attempts)))
    second.on("mail")(lambda item: log.add(("second", item.payload, item.attempts)))
    with running_worker(first):
        assert log.next() == ("first", b"1", 1)
        wait_until(lambda: queue.stats().scheduled, lambda count: count == 2)
        queue.produce_many([b"4", NewItem(b"5", kind="mail")])
        wait_until(lambda: first.stats().returned, lambda count: count >= 4)
        assert sorted(caplog.messages) == [
            f"queue 'orders' has items {which} and this worker has no handler for them; "
            "they are returned, and wait up to a minute each time"
            for which in ("of kind 'mail'", "without a kind")
        ]
        with running_worker(second):
            assert log.next()[0] == "second"
    assert queue.explain(ids[2]).attempts == 0
    assert first.stats().returned >= 4


# -- batches -------------------------------------------------------------------------------------------------


def test_a_batch_handler_gets_a_list(queue: Queue, log: HandlerEvents, kind: Callable[[Handle], Handle]) -> None:
    queue.produce_many([b"%d" % n for n in range(250)])
    with running_worker(Worker(queue, kind(lambda items: log.add([int(item.payload) for item in items])), batch=100)):
        seen: list[int] = []
        while len(seen) < 250:
            batch = log.next()
            assert 1 <= len(batch) <= 100
            seen += batch
        wait_completed(queue, 250)
    assert seen == list(range(250))


def test_some_of_a_batch_can_fail(queue: Queue, kind: Callable[[Handle], Handle]) -> None:
    ids = queue.produce_many([b"%d" % n for n in range(4)])

    def handle(items: list[Item]) -> Failed | None:
        if len(items) == 4:
            raise Failed({1: "full", ids[3]: Bury("poison")})
        return Failed({0: Bury("again")})

    with running_worker(Worker(queue, kind(handle), batch=10, retry=AT_ONCE)):
        wait_until(queue.stats, lambda stats: stats.buried == 2)
    assert {item.id: item.reason for item in queue.items("buried")} == {ids[1]: "again", ids[3]: "poison"}
    assert queue.stats().completed == 2


def test_a_whole_batch_fails_if_its_handler_raises_or_names_unknown_items(queue: Queue, log: HandlerEvents) -> None:
    queue.produce_many([b"1", b"2"])
    errors = [ValueError("down"), Failed({"0-77": "?"})]

    def handle(items: list[Item]) -> None:
        log.add([item.attempts for item in items])
        if errors:
            raise errors.pop(0)

    with running_worker(Worker(queue, handle, batch=10, retry=AT_ONCE)):
        assert log.take(3) == [[1, 1], [2, 2], [3, 3]]
        wait_completed(queue, 2)


def test_a_batch_is_split_by_handler(queue: Queue, log: HandlerEvents) -> None:
    one = Worker(queue, batch=10)
    one.on("a")(lambda items: log.add(("a", [item.payload for item in items])))
    one.on("b")(lambda items: log.add(("b", [item.payload for item in items])))
    queue.produce_many([NewItem(b"%d" % n, kind="ab"[n % 2]) for n in range(6)])
    with running_worker(one):
        assert sorted(log.take(2)) == [("a", [b"0", b"2", b"4"]), ("b", [b"1", b"3", b"5"])]
        wait_completed(queue, 6)


# -- forms of a worker -----------------------------------------------------------------------------------------


def test_a_function_becomes_a_worker(queue: Queue, log: HandlerEvents) -> None:
    @worker(queue, concurrency=3)
    def handle(item: Item) -> None:
        """Handle it."""
        log.add(item.payload)

    assert repr(handle) == "Worker('orders', concurrency=3)"
    queue.produce(b"x")
    with running_worker(handle):
        assert log.next() == b"x"
        assert repr(handle).endswith("running)")
    handle(queue.items()[0])
    assert log.next() == b"x"


def test_hooks_are_called_and_their_errors_have_no_effect(queue: Queue, log: HandlerEvents, kind: Callable[[Handle], Handle]) -> None:
    def broken(*told: Any) -> None:
        log.add(("started", *told))
        raise RuntimeError("a broken hook")

    def handle(item: Item) -> None:
        log.add("handler")
        if item.payload == b"bad":
            raise ValueError("no")

    hooks = Hooks(
        started=broken,
        finished=lambda item, seconds, outcome: log.add(("finished", item.payload, seconds >= 0, outcome)),
        failed=lambda item, error: log.add(("failed", item.payload, repr(error))),
        drained=lambda: log.add("drained"),
    )
    queue.produce(b"good")
    with running_worker(Worker(queue, kind(handle), hooks=hooks, retry=RetryPolicy(by_type={ValueError: Bury}))):
        words = log.take(3)
        assert (words[0][0], words[0][1].payload) == ("started", b"good")
        assert words[1:] == ["handler", ("finished", b"good", True, "completed")]
        queue.produce(b"bad")
        assert log.take(4)[1:] == ["handler", ("failed", b"bad", "ValueError('no')"), ("finished", b"bad", True, "buried")]
        wait_until(queue.stats, lambda stats: stats.completed == 1 and stats.buried == 1)
    assert log.rest() == ["drained"]
