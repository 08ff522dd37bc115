"""Every request ends: by its answer, at its deadline, when its caller is gone, or at shutdown. And a full inbox refuses at once."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.embedded import Embedded
from penstock.loop import loop as loop_module
from penstock.loop.requests import PLACES, RESERVED, Do, LeaseRequest, ProduceRequest, SettleRequest, Watch
from penstock.loop.turn import Turns
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
from tests.broker.broker_under_test import Asked, Desk, Rig, batch_of, together, until
from tests.broker.storages import Memory, Real

# -- the inbox -------------------------------------------------------------------------------------------


def fill(desk: Desk, number: int) -> list[Asked]:
    return [desk.submit(LeaseRequest(1, deadline=desk.rig.deadline(600))) for _ in range(number)]


def test_a_full_inbox_refuses_at_once_but_for_what_relieves_it(broker: Rig) -> None:
    desk = broker.create()
    fill(desk, PLACES)
    for request in (ProduceRequest(batch_of("x")), LeaseRequest(1), Watch({0: 1})):
        with pytest.raises(QueueBusy, match=rf"{PLACES} requests wait for queue 'q'; try again in a moment") as caught:
            desk.submit(request)
        assert caught.value.retryable
    reserved = [desk.submit(SettleRequest("complete", [])) for _ in range(RESERVED - 1)]
    reserved.append(desk.submit(Do(lambda turns: None)))
    with pytest.raises(QueueBusy):
        desk.submit(SettleRequest("complete", []))
    broker.turn()
    assert all(asked.done for asked in reserved)


def test_who_waits_in_line_keeps_its_place(broker: Rig) -> None:
    desk = broker.create()
    line = fill(desk, PLACES)
    broker.turn()
    with pytest.raises(QueueBusy):
        desk.submit(ProduceRequest(batch_of("x")))
    broker.pass_by(600)
    assert all(asked.held.texts == [] for asked in line)
    desk.produce("x")


@pytest.mark.parametrize("taken", [False, True], ids=["in the inbox", "in line"])
def test_the_place_of_a_caller_that_is_gone_is_free(broker: Rig, taken: bool) -> None:
    desk = broker.create()
    line = fill(desk, PLACES)
    if taken:
        broker.turn()
    for asked in line:
        asked.cancel()
    broker.turn()
    desk.produce("x")
    assert desk.stats().waiting_consumers == 0
    assert desk.counts() == {"ready": 1}, "nothing is leased to nobody"


# -- deadlines -------------------------------------------------------------------------------------------


def test_a_request_that_no_turn_took_in_time_was_not_done(broker: Rig) -> None:
    desk = broker.create()
    asked = desk.submit(ProduceRequest(batch_of("late"), deadline=broker.deadline(1)))
    broker.clock.advance(SECOND + 1)
    broker.turn()
    with pytest.raises(QueueBusy, match="did not get to the request in time; nothing was done, try again"):
        _ = asked.result
    assert desk.counts() == {}


def test_a_late_lease_still_gets_what_is_there(broker: Rig) -> None:
    """It asked in time; that the queue was slow is no reason to send it away with nothing."""
    desk = broker.create()
    desk.produce("there")
    asked = desk.submit(LeaseRequest(1, deadline=broker.deadline(0)))
    broker.clock.advance(SECOND)
    broker.turn()
    assert asked.held.texts == ["there"]


def test_who_follows_a_queue_is_told_of_news_or_of_the_end(broker: Rig) -> None:
    desk = broker.create(partitions=2)
    desk.produce("old", key="k")
    place = {one.partition: one.produced for one in desk.stats().partitions}
    watching, short = desk.watch(place, 60), desk.watch(place, 5)
    behind = desk.watch({}, 60)
    broker.turn()
    assert behind.result is True and not watching.done
    broker.pass_by(5)
    assert short.result is False and not watching.done
    desk.produce("new", key="k")
    assert watching.result is True


def blocked(desk: Desk) -> tuple[threading.Event, Asked]:
    """A turn that does not end before the event is set."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(turns: Turns) -> None:
        inside.set()
        go_on.wait(20)

    asked = desk.submit(Do(wait))
    assert inside.wait(20)
    return go_on, asked


def test_a_caller_is_not_kept_by_a_turn_that_does_not_end(live: Rig) -> None:
    desk = live.create()
    go_on, _ = blocked(desk)
    with pytest.raises(QueueBusy, match="nothing was done"):
        desk.run(ProduceRequest(batch_of("x"), deadline=live.deadline(0.05)))
    go_on.set()
    assert desk.counts() == {}


def test_a_lease_that_does_not_wait_waits_for_its_turn(live: Rig) -> None:
    """Somebody else's turn is no reason for an error: it gets what is there."""
    desk = live.create()
    desk.produce("there")
    go_on, _ = blocked(desk)
    leased: list[str] = []
    together(lambda: leased.extend(desk.lease(wait=0).texts), go_on.set)
    assert leased == ["there"]


def test_a_caller_whose_request_is_in_a_turn_that_does_not_end_is_told_so(live: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "GRACE", 50 * MILLISECOND)
    desk = live.create()
    inside, go_on = threading.Event(), threading.Event()

    def wait(turns: Turns) -> None:
        inside.set()
        go_on.wait(20)

    def leader() -> None:
        desk.run(Do(wait))

    def caller() -> None:
        assert inside.wait(20)
        with pytest.raises(QueueBusy):
            desk.run(Do(lambda turns: None, deadline=live.deadline(0.05)))
        go_on.set()

    together(leader, caller)
    inside.clear()
    go_on.clear()
    go, first = blocked(desk)
    monkeypatch.setattr(Turns, "all_out", property(lambda turns: True))  # so that not the caller but a runner leads the turn
    both = [Do(wait), Do(lambda turns: "done", deadline=live.deadline(0.2))]

    def stuck() -> None:
        desk.submit(both[0])  # taken by the same turn as the next
        with pytest.raises(OutcomeUnknown, match="repeat with the same request id"):
            desk.run(both[1])
        go_on.set()

    def free() -> None:
        until(lambda: len(desk.loop._inbox) == len(both))
        go.set()

    together(stuck, free)
    assert first.done


# -- callers that are gone ---------------------------------------------------------------------------------


def test_who_is_gone_before_its_turn_gets_nothing(broker: Rig) -> None:
    desk = broker.create()
    gone, stays = desk.submit(LeaseRequest(1, deadline=broker.deadline(60))), desk.submit(LeaseRequest(1, deadline=broker.deadline(60)))
    gone.cancel()
    desk.produce("item")
    assert stays.held.texts == ["item"] and not gone.done


def test_what_was_leased_to_nobody_goes_back_uncounted(broker: Rig) -> None:
    desk = broker.create(max_attempts=1)
    asked = desk.waiter(10)
    desk.produce("a", "b", "c", key="k")
    desk.produce("d")
    assert asked.held.texts == ["a"]
    asked.cancel()
    broker.turn()
    held = desk.lease()
    assert sorted(held.texts) == ["a", "d"] and held.attempts == [1, 1]
    held.complete()
    assert desk.drain() == ["b", "c"]


def test_who_goes_in_the_very_moment_of_the_answer_keeps_nothing(broker: Rig) -> None:
    desk = broker.create(max_attempts=1)
    asked = desk.waiter()
    produce = ProduceRequest(batch_of("item"))
    desk.submit(produce)
    told = produce.on_done

    def gone(request: object) -> None:  # answers are given one after the other: between this one and the next the consumer goes
        asked.cancel()
        assert told is not None
        told(produce)

    produce.on_done = gone
    broker.turn()
    assert desk.counts() == {"ready": 1}
    assert desk.lease().attempts == [1]


def test_a_caller_interrupted_in_its_sleep_leaves_nothing_behind(live: Rig) -> None:
    """As Ctrl-C does to the main thread: the exception comes out of the sleep."""
    desk = live.create()

    def interrupt(seconds: float | None) -> None:
        raise KeyboardInterrupt

    request = LeaseRequest(1, deadline=live.deadline(60))
    request.sleep = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        live.broker.run(desk.incarnation, request)
    desk.produce("item")
    assert desk.lease(wait=15).texts == ["item"]


# -- the end -------------------------------------------------------------------------------------------------


def test_shutdown_answers_everyone_who_waits_within_a_second(live: Rig) -> None:
    desk = live.create(max_items=1)
    desk.produce("fills it")
    other = live.create("other")
    told: list[type[PenstockError]] = []

    def wait_for(request: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                request()
            except PenstockError as error:
                told.append(type(error))

        return run

    def close() -> None:
        until(lambda: other.stats().waiting_consumers == 30 and desk.stats().waiting_producers == 19)
        begun = SystemClock().read().elapsed
        live.broker.close()
        assert SystemClock().read().elapsed - begun < SECOND

    waiters = [lambda: other.lease(wait=60)] * 30 + [lambda: desk.place(batch_of("more"), wait=60)] * 19
    waiters.append(lambda: other.run(Watch({0: 1}, other.rig.deadline(60))))
    together(*[wait_for(one) for one in waiters], close)
    assert told == [BrokerClosed] * 50


def test_what_came_before_the_end_is_served(broker: Rig) -> None:
    desk = broker.create()
    asked = desk.submit(ProduceRequest(batch_of("last words")))
    waiting = desk.submit(LeaseRequest(5, deadline=broker.deadline(60), consumer="last"))
    broker.restart()
    assert asked.result[0].refused is None
    assert waiting.held.texts == ["last words"]
    assert broker.find().stats().consumers == {"last": 1}


def test_what_cannot_be_served_at_once_is_told_so(broker: Rig) -> None:
    desk = broker.create(max_items=1)
    desk.produce("fills it")
    desk.pause(lease=True)
    waiting = [desk.waiter(), desk.submit(ProduceRequest(batch_of("x"), deadline=broker.deadline(60))), desk.watch({0: 9})]
    broker.turn()
    broker.restart()
    for asked in waiting:
        with pytest.raises(BrokerClosed, match="queue 'q' is closed here; open the broker again"):
            _ = asked.result


def verbs(rig: Rig, desk: Desk) -> list[Callable[[], object]]:
    broker: Embedded = rig.broker
    incarnation = desk.incarnation
    return [
        lambda: broker.run(incarnation, ProduceRequest(batch_of("x"))),
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


def test_closing_twice_is_fine_and_nothing_works_after_it(broker: Rig) -> None:
    desk = broker.create()
    closed = broker.broker
    cancel = closed.submit(LeaseItems(queue=desk.incarnation, wait=60 * SECOND), lambda answer: None)
    closed.close()
    closed.close()
    for verb in verbs(broker, desk):
        with pytest.raises(BrokerClosed, match="the broker is closed; open it again"):
            verb()
    cancel()  # no harm
    broker.broker = broker.ground.open()


def test_a_broker_may_be_closed_by_several_threads_at_once(live: Rig) -> None:
    live.create("a")
    live.create("b", partitions=3)
    together(*[live.broker.close] * 4)
    with pytest.raises(BrokerClosed):
        live.broker.call(FindQueue(name="a"))


@pytest.mark.parametrize("ground", ["memory", "files"])
def test_what_was_answered_before_the_end_is_there_after_it(tmp_path: Path, ground: str) -> None:
    """Producers go on until they are told that it is over: what they were told is stored, is stored, once."""
    rig = Rig(Memory() if ground == "memory" else Real(tmp_path), live=True)
    desk = rig.create(partitions=3)
    told: list[str] = []

    def produce(name: str) -> Callable[[], None]:
        def run() -> None:
            for number in range(1 << 30):
                try:
                    desk.produce(f"{name}-{number}")
                except BrokerClosed:
                    return
                told.append(f"{name}-{number}")

        return run

    def close() -> None:
        until(lambda: desk.stats().produced > 200)
        rig.broker.close()

    together(*[produce(f"p{index}") for index in range(8)], close)
    rig.broker = rig.ground.open()
    found = Desk(rig, rig.broker.call(FindQueue(name="q"))).drain()
    assert len(set(found)) == len(found)
    assert set(told) <= set(found)
    rig.broker.close()


def test_a_queue_that_is_full_says_so_at_the_deadline(live: Rig) -> None:
    desk = live.create(max_items=1)
    desk.produce("fills it")
    with pytest.raises(QueueFull, match="queue 'q' is full; wait until items are resolved, or raise max_items or max_bytes"):
        desk.place(batch_of("x"), wait=0.05)
    assert desk.drain() == ["fills it"]
