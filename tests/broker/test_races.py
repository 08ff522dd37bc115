"""No wake-up is lost: work that goes on only if everybody is woken in time, again and again.

A lost one shows as a caller that waits until its deadline, which is an error here.
"""

import threading
from collections.abc import Callable

import pytest

from penstock.loop import requests
from penstock.loop.requests import FunctionRequest, LeaseRequest, ProduceRequest
from penstock.words.errors import BrokerClosed, QueueBusy
from tests.broker.broker_under_test import (
    WAIT_SECONDS,
    BrokerUnderTest,
    QueueUnderTest,
    SubmittedRequest,
    batch_of,
    run_threads,
    wait_until,
)

HOPS = 300


def taken(queue: QueueUnderTest) -> str:
    """The next item, waited for; completed by the caller."""
    held = queue.lease(1, wait=15)
    assert held, "nobody woke it"
    held.complete()
    return held.texts[0]


def test_two_threads_pass_an_item_back_and_forth(threaded_broker: BrokerUnderTest) -> None:
    one, other = threaded_broker.create("one"), threaded_broker.create("other", partitions=2)
    seen: list[int] = []

    def serve(own: QueueUnderTest, next_: QueueUnderTest) -> Callable[[], None]:
        def run() -> None:
            while True:
                number = int(taken(own))
                seen.append(number)
                next_.produce(str(number + 1))
                if number >= HOPS:
                    return

        return run

    one.produce("0")
    run_threads(serve(one, other), serve(other, one))
    assert seen == list(range(HOPS + 2))


def test_follow_ups_go_back_and_forth_between_queues(threaded_broker: BrokerUnderTest) -> None:
    """Each hop is a transfer between queues, carried by their runners: the consumers only wait."""
    one, other = threaded_broker.create("one", partitions=2), threaded_broker.create("other")
    seen: list[int] = []

    def serve(own: QueueUnderTest, next_: QueueUnderTest) -> Callable[[], None]:
        def run() -> None:
            while True:
                held = own.lease(1, wait=15)
                assert held, "nobody woke it"
                number = int(held.texts[0])
                seen.append(number)
                held.complete(then=[(next_.incarnation, batch_of(str(number + 1)))])
                if number >= HOPS:
                    return

        return run

    one.produce("0")
    run_threads(serve(one, other), serve(other, one))
    assert seen == list(range(HOPS + 2))


@pytest.mark.parametrize("delay", [0.0, 0.001])
def test_a_retried_item_is_leased_again(threaded_broker: BrokerUnderTest, delay: float) -> None:
    """One item, four consumers, retried with hardly a delay: whoever waits is woken by the timer, over and over."""
    queue = threaded_broker.create(max_attempts=0)
    queue.produce("again")
    times: list[int] = []

    def consume() -> None:
        while len(times) < 200:
            held = queue.lease(1, wait=15)
            assert held, "nobody woke it"
            times.append(held.attempts[0])
            held.retry(delay=delay)

    run_threads(*[consume] * 4)
    assert times[:200] == list(range(1, 201))


def test_an_earlier_schedule_resets_the_timer(threaded_broker: BrokerUnderTest) -> None:
    """The timer is set anew whenever something nearer appears."""
    queue = threaded_broker.create(partitions=2)
    queue.produce("far", at=threaded_broker.after(3_600))
    queue.submit_lease(wait=3_600)
    got: list[str] = []

    def consume() -> None:
        got.extend(taken(queue) for _ in range(29))

    def produce() -> None:
        for number in range(30, 0, -1):
            queue.produce(f"near-{number}", at=threaded_broker.after(0.105 + number / 1_000))

    run_threads(produce, consume)
    assert len(set(got)) == 29 and all(text.startswith("near-") for text in got)


def test_a_thousand_wait_and_a_thousand_are_served(threaded_broker: BrokerUnderTest) -> None:
    queue = threaded_broker.create(partitions=4)
    line = [queue.submit(LeaseRequest(1, deadline=threaded_broker.deadline(30))) for _ in range(1_000)]

    def produce(name: int) -> Callable[[], None]:
        def run() -> None:
            for number in range(250):
                queue.produce(f"{name}-{number}")

        return run

    run_threads(*[produce(name) for name in range(4)])
    texts = [text for asked in line for text in asked.leased.texts]
    assert sorted(texts) == sorted(f"{name}-{number}" for name in range(4) for number in range(250))
    assert queue.stats().leased == 1_000


def test_callers_submitters_and_operators_at_once(threaded_broker: BrokerUnderTest) -> None:
    """Whoever leads a turn, everybody is answered, and what is answered is right."""
    queue = threaded_broker.create(partitions=3)
    asked: list[SubmittedRequest] = []
    lock = threading.Lock()

    def call(name: int) -> Callable[[], None]:
        def run() -> None:
            for number in range(80):
                assert len(queue.produce(f"c{name}-{number}")) == 1

        return run

    def submit(name: int) -> Callable[[], None]:
        def run() -> None:
            for number in range(80):
                one = queue.submit(ProduceRequest(batch_of(f"s{name}-{number}")))
                with lock:
                    asked.append(one)

        return run

    def operate() -> None:
        for _ in range(80):
            before = queue.stats().produced
            assert queue.run(FunctionRequest(lambda engine: sum(handle.state.next_offset for handle in engine.usable()))) >= before

    run_threads(call(0), call(1), submit(0), submit(1), operate, operate)
    assert all(one.result[0].refused is None for one in asked)
    assert len(queue.drain(1_000)) == 320


@pytest.mark.parametrize("how", ["calls", "runs what was submitted"])
def test_when_the_thread_that_answers_is_interrupted_all_callers_are_answered(threaded_broker: BrokerUnderTest, how: str) -> None:
    queue = threaded_broker.create(partitions=1)
    queue.produce("first")  # the partition is open
    loop, texts = queue.loop, [f"sleeper {number}" for number in range(6)]
    interrupts = [KeyboardInterrupt()]

    def interrupt(request: object) -> None:
        if interrupts:
            raise interrupts.pop()

    interrupting = ProduceRequest(batch_of("interrupting"))
    interrupting.on_done = interrupt
    threads = [threading.Thread(target=queue.produce, args=(text,), daemon=True) for text in texts]

    with loop._turning:  # no turn can run: some callers sleep before the request whose answer interrupts, and some behind it
        for number, thread in enumerate(threads):
            if number == 3:
                loop.enter(interrupting)
            thread.start()
            wait_until(lambda: sum(request.asleep for request in loop._pending) == number + 1)  # noqa: B023
    with pytest.raises(KeyboardInterrupt):
        queue.produce("mine") if how == "calls" else loop.run_submitted()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "nobody woke it"
    assert {*texts, "interrupting"} <= set(queue.drain(1_000))


@pytest.mark.parametrize("how", ["run_between_turns", "without_turns"])
def test_a_caller_that_comes_while_turns_are_held_back_is_woken_when_they_go_on(
    threaded_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    queue = threaded_broker.create()
    queue.produce("before")
    caller = threading.Thread(target=queue.produce, args=("meanwhile",), daemon=True)

    def let_it_come(_: object = None) -> None:
        caller.start()
        wait_until(lambda: any(request.asleep for request in list(queue.loop._pending)))

    with monkeypatch.context() as patch:
        patch.setattr(queue.loop, "run", lambda: None)  # no runner helps
        if how == "run_between_turns":
            queue.loop.run_between_turns(let_it_come)
        else:
            with queue.loop.without_turns(WAIT_SECONDS):
                let_it_come()
        caller.join(WAIT_SECONDS)
        assert not caller.is_alive(), "nobody woke it"
    assert queue.drain() == ["before", "meanwhile"]


@pytest.mark.parametrize("how", ["full", "closing"])
def test_a_caller_that_is_refused_while_another_thread_runs_a_turn_does_not_wait_for_it(
    threaded_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    queue = threaded_broker.create()
    queue.produce("before")
    assert queue.counts() == {"ready": 1}
    refused: list[type[BaseException]] = []

    def call() -> None:
        with pytest.raises((QueueBusy, BrokerClosed)) as error:
            queue.produce("refused")
        refused.append(error.type)

    with monkeypatch.context() as patch, queue.loop._turning:
        patch.setattr(*((queue.loop._pending, "closed", True) if how == "closing" else (requests, "PLACES", 0)))
        run_threads(call)
    assert refused == [BrokerClosed if how == "closing" else QueueBusy]
    assert queue.produce("after")
    assert queue.drain() == ["before", "after"]


def test_after_an_interrupt_at_the_end_of_a_turn_the_next_request_waits_for_the_sync(
    file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn ran a single request and had started the sync of its partition."""
    queue = file_broker.create(partitions=1)
    queue.produce("first")
    queue.loop.turn()  # it leaves nothing to do
    right, interrupts = queue.loop.engine.transfer_step.note_senders, [KeyboardInterrupt()]

    def interrupt() -> bool:
        if interrupts:
            raise interrupts.pop()
        return right()

    monkeypatch.setattr(queue.loop.engine.transfer_step, "note_senders", interrupt)
    with pytest.raises(KeyboardInterrupt):
        queue.produce("interrupted")
    assert queue.produce("next")
    assert queue.drain() == ["first", "interrupted", "next"]
