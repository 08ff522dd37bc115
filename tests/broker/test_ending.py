"""Every request ends: by its answer, at its deadline, when its caller cancels, or at close. Too many are refused."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedBroker
from penstock.loop import loop as loop_module
from penstock.loop.requests import PLACES, RESERVED, AwaitRequest, FunctionRequest, LeaseRequest, ProduceRequest, SettleRequest
from penstock.loop.turn import QueueEngine
from penstock.operations import (
    CreateQueue,
    DeleteQueue,
    FindQueue,
    LeaseItems,
    ListQueues,
    ProduceItems,
    ReadMetrics,
    ReadStats,
    ResizeQueue,
    SetReadOnly,
    UpdateQueue,
)
from penstock.words.clock import MILLISECOND, SECOND, SystemClock
from penstock.words.errors import BrokerClosed, OutcomeUnknown, PenstockError, QueueBusy, QueueFull
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, SubmittedRequest, batch_of, run_threads, wait_until
from tests.broker.storages import DirectoryStorage, MemoryStorage

# -- pending requests ------------------------------------------------------------------------------------


def fill(queue: QueueUnderTest, number: int) -> list[SubmittedRequest]:
    return [queue.submit(LeaseRequest(1, deadline=queue.owner.deadline(600))) for _ in range(number)]


def test_too_many_pending_requests_are_refused_except_those_that_free_items(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    fill(queue, PLACES)
    for request in (ProduceRequest(batch_of("x")), LeaseRequest(1), AwaitRequest({0: 1})):
        with pytest.raises(QueueBusy, match=rf"{PLACES} requests wait for queue 'q'; try again in a moment") as caught:
            queue.submit(request)
        assert caught.value.retryable
    reserved = [queue.submit(SettleRequest("complete", [])) for _ in range(RESERVED - 1)]
    reserved.append(queue.submit(FunctionRequest(lambda engine: None)))
    with pytest.raises(QueueBusy):
        queue.submit(SettleRequest("complete", []))
    broker.turn()
    assert all(asked.done for asked in reserved)


def test_waiting_leases_count_as_pending_requests(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    line = fill(queue, PLACES)
    broker.turn()
    with pytest.raises(QueueBusy):
        queue.submit(ProduceRequest(batch_of("x")))
    broker.advance_in_steps(600)
    assert all(asked.leased.texts == [] for asked in line)
    queue.produce("x")


@pytest.mark.parametrize("taken", [False, True], ids=["in the inbox", "in line"])
def test_a_cancelled_request_is_not_pending_any_more(broker: BrokerUnderTest, taken: bool) -> None:
    queue = broker.create()
    line = fill(queue, PLACES)
    if taken:
        broker.turn()
    for asked in line:
        asked.cancel()
    broker.turn()
    queue.produce("x")
    assert queue.stats().waiting_consumers == 0
    assert queue.counts() == {"ready": 1}, "nothing is leased to nobody"


# -- deadlines -------------------------------------------------------------------------------------------


def test_a_request_that_no_turn_took_in_time_was_not_done(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    asked = queue.submit(ProduceRequest(batch_of("late"), deadline=broker.deadline(1)))
    broker.clock.advance(SECOND + 1)
    broker.turn()
    with pytest.raises(QueueBusy, match="did not get to the request in time; nothing was done, try again"):
        _ = asked.result
    assert queue.counts() == {}


def test_a_late_lease_still_gets_ready_items(broker: BrokerUnderTest) -> None:
    """The request came in time; the turn was late."""
    queue = broker.create()
    queue.produce("there")
    asked = queue.submit(LeaseRequest(1, deadline=broker.deadline(0)))
    broker.clock.advance(SECOND)
    broker.turn()
    assert asked.leased.texts == ["there"]


def test_awaiting_items_ends_with_new_items_or_at_the_deadline(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce("old", key="k")
    place = {one.partition: one.produced for one in queue.stats().partitions}
    watching, short = queue.watch(place, 60), queue.watch(place, 5)
    behind = queue.watch({}, 60)
    broker.turn()
    assert behind.result is True and not watching.done
    broker.advance_in_steps(5)
    assert short.result is False and not watching.done
    queue.produce("new", key="k")
    assert watching.result is True


def blocked(queue: QueueUnderTest) -> tuple[threading.Event, SubmittedRequest]:
    """A turn that does not end before the event is set."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(turns: QueueEngine) -> None:
        inside.set()
        go_on.wait(20)

    asked = queue.submit(FunctionRequest(wait))
    assert inside.wait(20)
    return go_on, asked


def test_a_caller_does_not_wait_for_a_turn_that_does_not_end(threaded_broker: BrokerUnderTest) -> None:
    queue = threaded_broker.create()
    go_on, _ = blocked(queue)
    with pytest.raises(QueueBusy, match="nothing was done"):
        queue.run(ProduceRequest(batch_of("x"), deadline=threaded_broker.deadline(0.05)))
    go_on.set()
    assert queue.counts() == {}


def test_a_lease_that_does_not_wait_waits_for_its_turn(threaded_broker: BrokerUnderTest) -> None:
    """While another caller runs a turn, the lease waits for it, and gets the ready items."""
    queue = threaded_broker.create()
    queue.produce("there")
    go_on, _ = blocked(queue)
    leased: list[str] = []
    run_threads(lambda: leased.extend(queue.lease(wait=0).texts), go_on.set)
    assert leased == ["there"]


def test_a_request_in_a_turn_that_does_not_end_has_an_unknown_outcome(
    threaded_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "GRACE", 50 * MILLISECOND)
    queue = threaded_broker.create()
    inside, go_on = threading.Event(), threading.Event()

    def wait(turns: QueueEngine) -> None:
        inside.set()
        go_on.wait(20)

    def leader() -> None:
        queue.run(FunctionRequest(wait))

    def caller() -> None:
        assert inside.wait(20)
        with pytest.raises(QueueBusy):
            queue.run(FunctionRequest(lambda engine: None, deadline=threaded_broker.deadline(0.05)))
        go_on.set()

    run_threads(leader, caller)
    inside.clear()
    go_on.clear()
    go, first = blocked(queue)
    monkeypatch.setattr(QueueEngine, "all_in_io", property(lambda engine: True))  # so that not the caller but a runner leads the turn
    both = [FunctionRequest(wait), FunctionRequest(lambda engine: "done", deadline=threaded_broker.deadline(0.2))]

    def stuck() -> None:
        queue.submit(both[0])  # taken by the same turn as the next
        with pytest.raises(OutcomeUnknown, match="repeat with the same request id"):
            queue.run(both[1])
        go_on.set()

    def free() -> None:
        wait_until(lambda: len(queue.loop._pending) == len(both))
        go.set()

    run_threads(stuck, free)
    assert first.done


# -- callers that are gone ---------------------------------------------------------------------------------


def test_a_request_cancelled_before_its_turn_gets_nothing(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    gone, stays = queue.submit(LeaseRequest(1, deadline=broker.deadline(60))), queue.submit(LeaseRequest(1, deadline=broker.deadline(60)))
    gone.cancel()
    queue.produce("item")
    assert stays.leased.texts == ["item"] and not gone.done


def test_items_leased_to_a_cancelled_request_are_returned(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_attempts=1)
    asked = queue.submit_lease(10)
    queue.produce("a", "b", "c", key="k")
    queue.produce("d")
    assert asked.leased.texts == ["a"]
    asked.cancel()
    broker.turn()
    held = queue.lease()
    assert sorted(held.texts) == ["a", "d"] and held.attempts == [1, 1]
    held.complete()
    assert queue.drain() == ["b", "c"]


def test_a_request_cancelled_while_it_is_answered_keeps_nothing(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_attempts=1)
    asked = queue.submit_lease()
    produce = ProduceRequest(batch_of("item"))
    queue.submit(produce)
    told = produce.on_done

    def gone(request: object) -> None:  # answers are given one after the other: between this one and the next the consumer goes
        asked.cancel()
        assert told is not None
        told(produce)

    produce.on_done = gone
    broker.turn()
    assert queue.counts() == {"ready": 1}
    assert queue.lease().attempts == [1]


def test_an_interrupted_caller_leaves_no_request_behind(threaded_broker: BrokerUnderTest) -> None:
    """As Ctrl-C does to the main thread: the exception comes out of the sleep."""
    queue = threaded_broker.create()

    def interrupt(seconds: float | None) -> None:
        raise KeyboardInterrupt

    request = LeaseRequest(1, deadline=threaded_broker.deadline(60))
    request.sleep = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        threaded_broker.embedded.run_request(queue.incarnation, request)
    queue.produce("item")
    assert queue.lease(wait=15).texts == ["item"]


# -- the end -------------------------------------------------------------------------------------------------


def test_shutdown_answers_every_waiting_request_within_a_second(threaded_broker: BrokerUnderTest) -> None:
    queue = threaded_broker.create(max_items=1)
    queue.produce("fills it")
    other = threaded_broker.create("other")
    told: list[type[PenstockError]] = []

    def wait_for(request: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                request()
            except PenstockError as error:
                told.append(type(error))

        return run

    def close() -> None:
        wait_until(lambda: other.stats().waiting_consumers == 30 and queue.stats().waiting_producers == 19)
        begun = SystemClock().read().elapsed
        threaded_broker.embedded.close()
        assert SystemClock().read().elapsed - begun < SECOND

    waiters = [lambda: other.lease(wait=60)] * 30 + [lambda: queue.produce_batch(batch_of("more"), wait=60)] * 19
    waiters.append(lambda: other.run(AwaitRequest({0: 1}, other.owner.deadline(60))))
    run_threads(*[wait_for(one) for one in waiters], close)
    assert told == [BrokerClosed] * 50


def test_requests_from_before_the_close_are_served(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    asked = queue.submit(ProduceRequest(batch_of("last words")))
    waiting = queue.submit(LeaseRequest(5, deadline=broker.deadline(60), consumer="last"))
    broker.restart()
    assert asked.result[0].refused is None
    assert waiting.leased.texts == ["last words"]
    assert broker.find().stats().consumers == {"last": 1}


def test_requests_that_cannot_be_served_at_close_are_refused(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_items=1)
    queue.produce("fills it")
    queue.pause(lease=True)
    waiting = [queue.submit_lease(), queue.submit(ProduceRequest(batch_of("x"), deadline=broker.deadline(60))), queue.watch({0: 9})]
    broker.turn()
    broker.restart()
    for asked in waiting:
        with pytest.raises(BrokerClosed, match="queue 'q' is closed here; open the broker again"):
            _ = asked.result


def verbs(tested_broker: BrokerUnderTest, queue: QueueUnderTest) -> list[Callable[[], object]]:
    broker: EmbeddedBroker = tested_broker.embedded
    incarnation = queue.incarnation
    return [
        lambda: broker.run_request(incarnation, ProduceRequest(batch_of("x"))),
        lambda: broker.submit(ProduceItems(queue=incarnation, batch=batch_of("x"))),
        lambda: broker.call(CreateQueue(name="new", exist_ok=True)),
        lambda: broker.call(FindQueue(name="q")),
        lambda: broker.call(ListQueues()),
        lambda: broker.call(UpdateQueue(queue=incarnation, changes={"ttl": 1})),
        lambda: broker.call(DeleteQueue(queue=incarnation)),
        lambda: broker.call(ResizeQueue(queue=incarnation, partitions=2)),
        lambda: broker.call(SetReadOnly(queue=incarnation, partition=0)),
        lambda: broker.call(ReadStats(queue=incarnation)),
        lambda: broker.call(ReadMetrics()),
    ]


def test_a_call_that_comes_while_the_queue_begins_to_close_is_refused(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("before")
    assert queue.counts() == {"ready": 1}
    queue.loop._pending.closed = True
    with pytest.raises(BrokerClosed, match="queue 'q' is closed here"):
        queue.run(ProduceRequest(batch_of("late")))
    queue.loop._pending.closed = False
    assert queue.counts() == {"ready": 1}


def test_closing_twice_does_nothing_and_every_call_after_it_is_refused(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    closed = broker.embedded
    cancel = closed.submit(LeaseItems(queue=queue.incarnation, wait=60 * SECOND), lambda answer: None)
    closed.close()
    closed.close()
    for verb in verbs(broker, queue):
        with pytest.raises(BrokerClosed, match="the broker is closed; open it again"):
            verb()
    cancel()  # no harm
    broker.embedded = broker.storage.open()


def test_a_broker_may_be_closed_by_several_threads_at_once(threaded_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    threaded_broker.create("a")
    threaded_broker.create("b", partitions=3)
    broker, closed = threaded_broker.embedded, 0
    stop, close = broker.inbox.stop, broker.store.close

    def slow_stop() -> None:
        stop()
        threading.Event().wait(0.05)  # long enough for all threads to come

    def counting_close() -> None:
        nonlocal closed
        closed += 1
        close()

    monkeypatch.setattr(broker.inbox, "stop", slow_stop)
    monkeypatch.setattr(broker.store, "close", counting_close)
    run_threads(*[broker.close] * 4)
    assert closed == 1
    with pytest.raises(BrokerClosed):
        threaded_broker.embedded.call(FindQueue(name="a"))


@pytest.mark.parametrize("storage", ["memory", "files"])
def test_items_stored_before_the_close_are_found_after_it(tmp_path: Path, storage: str) -> None:
    """Producers run until the broker is closed: every item whose storing was answered is there once."""
    broker = BrokerUnderTest(MemoryStorage() if storage == "memory" else DirectoryStorage(tmp_path), threaded=True)
    queue = broker.create(partitions=3)
    told: list[str] = []

    def produce(name: str) -> Callable[[], None]:
        def run() -> None:
            for number in range(1 << 30):
                try:
                    queue.produce(f"{name}-{number}")
                except BrokerClosed:
                    return
                told.append(f"{name}-{number}")

        return run

    def close() -> None:
        wait_until(lambda: queue.stats().produced > 200)
        broker.embedded.close()

    run_threads(*[produce(f"p{index}") for index in range(8)], close)
    broker.embedded = broker.storage.open()
    found = QueueUnderTest(broker, broker.embedded.call(FindQueue(name="q"))).drain()
    assert len(set(found)) == len(found)
    assert set(told) <= set(found)
    broker.embedded.close()


def test_produce_into_a_full_queue_fails_at_the_deadline(threaded_broker: BrokerUnderTest) -> None:
    queue = threaded_broker.create(max_items=1)
    queue.produce("fills it")
    with pytest.raises(QueueFull, match="queue 'q' is full; wait until items are resolved, or raise max_items or max_bytes"):
        queue.produce_batch(batch_of("x"), wait=0.05)
    assert queue.drain() == ["fills it"]
