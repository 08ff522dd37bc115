"""The OpenTelemetry spans of a worker: of its handlers' calls, and of what settles their items."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from penstock import Broker, Item, NewItem, Queue
from penstock.api.traces import current_span_ids
from penstock.words.limits import MAX_HEADERS_BYTES
from penstock.worker.context import Context
from penstock.worker.outcomes import Bury, Failed, Retry, Snooze
from penstock.worker.settings import Hooks
from penstock.worker.worker import Worker
from tests.recorded_spans import RecordedSpans, header_of, linked, parent_id
from tests.worker import traced_handlers
from tests.worker.harness import HandlerEvents, running_worker, wait_completed, wait_until


def ids_of(span: ReadableSpan) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def run_once(queue: Queue, handler: Callable[..., Any], log: HandlerEvents, **options: Any) -> None:
    """Run a worker until it has handled one call, and drain it."""
    hooks = Hooks(finished=lambda item, seconds, outcome: log.add(outcome), failed=lambda item, error: log.add(current_span_ids()))
    with running_worker(Worker(queue, handler, name="till-1", hooks=hooks, **options)):
        log.next()


def check_chain(spans: RecordedSpans, item_id: str, seen: tuple[str, str]) -> None:
    """The spans of one item: produce, then handle below it, then complete below that."""
    (produce,) = spans.named("produce orders")
    (handle,), (complete,) = spans.named("handle orders"), spans.named("complete orders")
    assert (handle.kind, complete.kind) == (SpanKind.CONSUMER, SpanKind.CLIENT)
    assert (parent_id(handle), parent_id(complete)) == (produce.context.span_id, handle.context.span_id)
    assert {span.context.trace_id for span in spans.all} == {produce.context.trace_id}
    assert linked(handle) == [(produce.context.span_id, {"messaging.message.id": item_id})]
    assert seen == ids_of(handle)
    assert dict(handle.attributes or {}) == {
        "messaging.system": "penstock",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "handle",
        "messaging.operation.type": "process",
        "messaging.destination.partition.id": "0",
        "messaging.message.id": item_id,
        "messaging.client.id": "till-1",
        "messaging.penstock.message.attempts": 1,
        "messaging.penstock.message.outcome": "completed",
    }


def test_a_handler_in_a_thread_runs_in_its_span(queue: Queue, spans: RecordedSpans, log: HandlerEvents) -> None:
    item_id = queue.produce(b"x")
    with running_worker(Worker(queue, lambda item: log.add(current_span_ids()), name="till-1")):
        seen = log.next()
    check_chain(spans, item_id, seen)


def test_an_async_handler_runs_in_its_span(queue: Queue, spans: RecordedSpans, log: HandlerEvents) -> None:
    async def handle(item: Item) -> None:
        await asyncio.sleep(0)
        log.add(current_span_ids())

    item_id = queue.produce(b"x")
    with running_worker(Worker(queue, handle, name="till-1", concurrency=4)):
        seen = log.next()
    check_chain(spans, item_id, seen)


def test_a_plain_function_beside_async_handlers_runs_in_its_span(queue: Queue, spans: RecordedSpans, log: HandlerEvents) -> None:
    worker = Worker(queue, name="till-1")

    @worker.on("other")
    async def other(item: Item) -> None: ...

    @worker.on("plain")
    def plain(item: Item) -> None:
        log.add((threading.current_thread().name, current_span_ids()))

    queue.produce(b"x", kind="plain")
    with running_worker(worker):
        thread, seen = log.next()
    assert thread.startswith("penstock handler")
    assert seen == ids_of(spans.only("handle orders"))
    assert (spans.only("handle orders").attributes or {})["messaging.penstock.message.kind"] == "plain"


def test_concurrent_handlers_have_their_own_spans(queue: Queue, spans: RecordedSpans, log: HandlerEvents) -> None:
    gate = threading.Barrier(4)

    def handle(item: Item) -> None:
        gate.wait(20)
        log.add((item.headers["traceparent"], current_span_ids()))

    for number in range(4):
        queue.produce(str(number))
    with running_worker(Worker(queue, handle, concurrency=4)):
        seen = log.take(4)
    produced = {header_of(span): span.context.span_id for span in spans.named("produce orders")}
    handled = {ids_of(span): parent_id(span) for span in spans.named("handle orders")}
    assert len(handled) == 4
    assert {carried: handled[ids] for carried, ids in seen} == produced


def test_a_batch_links_to_what_produced_its_items(queue: Queue, spans: RecordedSpans, log: HandlerEvents) -> None:
    ids = [queue.produce(b"1"), queue.produce(b"2")]
    with running_worker(Worker(queue, lambda items: log.add(len(items)), batch=10)):
        assert log.next() == 2
    handle, produced = spans.only("handle orders"), spans.named("produce orders")
    assert handle.parent is None
    assert linked(handle) == [(span.context.span_id, {"messaging.message.id": one}) for span, one in zip(produced, ids, strict=True)]
    assert (handle.attributes or {})["messaging.batch.message_count"] == 2
    complete = spans.only("complete orders")
    assert linked(complete) == [(handle.context.span_id, {"messaging.batch.message_count": 2})]


@pytest.mark.parametrize(
    ("error", "action", "outcome", "error_type"),
    [
        (ValueError("no card"), "retry", "retried", "ValueError"),
        (Retry(30, "full"), "retry", "retried", "penstock.Retry"),
        (Bury("poison"), "bury", "buried", "penstock.Bury"),
        (Snooze(30), "retry", "snoozed", None),
    ],
    ids=["error", "retry", "bury", "snooze"],
)
def test_a_failure_is_recorded(
    error: Exception, action: str, outcome: str, error_type: str | None, queue: Queue, spans: RecordedSpans, log: HandlerEvents
) -> None:
    def handle(item: Item) -> None:
        raise error

    queue.produce(b"x")
    with running_worker(Worker(queue, handle, hooks=Hooks(failed=lambda item, error: log.add(current_span_ids())))):
        inside = log.next()
    handled = spans.only("handle orders")
    found = dict(handled.attributes or {})
    assert inside == ids_of(handled)
    assert (found["messaging.penstock.message.outcome"], found.get("error.type")) == (outcome, error_type)
    assert handled.status.status_code is (StatusCode.ERROR if error_type else StatusCode.UNSET)
    assert [event.name for event in handled.events] == (["exception"] if error_type else [])
    assert parent_id(spans.only(f"{action} orders")) == handled.context.span_id


def test_a_batch_that_failed_in_part_has_no_single_outcome(queue: Queue, spans: RecordedSpans, log: HandlerEvents) -> None:
    def handle(items: list[Item]) -> None:
        raise Failed({0: Bury("poison")})

    queue.produce_many([b"1", b"2"])
    run_once(queue, handle, log, batch=2)
    found = dict(spans.only("handle orders").attributes or {})
    assert found["error.type"] == "penstock.Failed"
    assert "messaging.penstock.message.outcome" not in found
    assert {"bury orders", "complete orders"} <= set(spans.names)


def test_the_span_of_a_handler_that_takes_too_long_ends_at_its_timeout(queue: Queue, spans: RecordedSpans) -> None:
    gate = threading.Event()
    queue.produce(b"x")
    with running_worker(Worker(queue, lambda item: gate.wait(20), handler_timeout=0.05)):
        (span,) = wait_until(lambda: spans.named("handle orders"))
        gate.set()
    assert (span.attributes or {})["error.type"] == "penstock.HandlerTimeout"


def test_the_span_of_a_cancelled_handler_ends(queue: Queue, spans: RecordedSpans, log: HandlerEvents) -> None:
    async def handle(item: Item) -> None:
        log.add("began")
        await asyncio.Event().wait()

    queue.produce(b"x")
    worker = Worker(queue, handle)
    with running_worker(worker):
        log.next()
        worker.stop(at_once=True)
    span = spans.only("handle orders")
    assert ((span.attributes or {})["messaging.penstock.message.outcome"], span.status.status_code) == ("returned", StatusCode.UNSET)


def test_items_that_no_handler_took_are_returned_in_a_span_below_their_producers(
    broker: Broker, queue: Queue, spans: RecordedSpans
) -> None:
    worker = Worker(queue)
    worker.on("other")(print)
    queue.produce(b"x", kind="invoice")
    with running_worker(worker):
        (span,) = wait_until(lambda: spans.named("retry orders"))
    assert parent_id(span) == spans.only("produce orders").context.span_id


def test_follow_ups_carry_the_context_of_the_handler(broker: Broker, queue: Queue, spans: RecordedSpans) -> None:
    mails = broker.create_queue("mails")

    def handle(item: Item, context: Context) -> None:
        context.follow_up(NewItem(b"1", queue="mails", headers={"shop": "7"}))
        context.follow_up(NewItem(b"2", queue="mails", headers={"traceparent": "mine"}))
        context.follow_up(NewItem(b"3", queue="mails", headers=long))
        context.follow_up(b"4")

    long = {"long": "x" * (MAX_HEADERS_BYTES - 20)}

    queue.produce(b"x", kind="first")
    worker = Worker(queue)
    worker.on("first")(handle)
    with running_worker(worker):
        found = wait_until(lambda: mails.items(), lambda found: len(found) == 3)
        found += wait_until(lambda: [item for item in queue.items() if item.payload == b"4"])
    carried = {"traceparent": header_of(spans.named("handle orders")[0])}
    assert [item.headers for item in found] == [{"shop": "7", **carried}, {"traceparent": "mine"}, long, carried]


# -- child processes ---------------------------------------------------------------------------------


@pytest.fixture
def child_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """Gives the spans that have ended in child processes, by name."""
    path = tmp_path / "spans"
    monkeypatch.setenv("PENSTOCK_TEST_SPANS", str(path))
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("handler", [traced_handlers.follow_up, traced_handlers.follow_up_later])
def test_a_handler_in_a_child_process_runs_in_its_span(
    handler: Callable[..., Any],
    broker: Broker,
    queue: Queue,
    spans: RecordedSpans,
    child_spans: Callable[[], list[dict[str, Any]]],
) -> None:
    mails = broker.create_queue("mails")
    queue.produce(b"x")
    with running_worker(Worker(queue, handler, processes=1, name="till-1")):
        (mail,) = wait_until(lambda: mails.items())
        wait_completed(queue, 1)
    produce = spans.only("produce orders")
    inner, handle = wait_until(child_spans, lambda found: len(found) == 2)
    trace_id = f"0x{produce.context.trace_id:032x}"
    assert (inner["name"], handle["name"]) == ("charge", "handle orders")
    assert (handle["parent_id"], handle["context"]["trace_id"]) == (f"0x{produce.context.span_id:016x}", trace_id)
    assert (inner["parent_id"], inner["context"]["trace_id"]) == (handle["context"]["span_id"], trace_id)
    assert str(mail.headers["traceparent"]).split("-")[2] == handle["context"]["span_id"].removeprefix("0x")
    assert handle["attributes"]["messaging.client.id"] == "till-1"
    assert spans.named("handle orders") == []
    assert parent_id(spans.only("complete orders")) == int(handle["context"]["span_id"], 16)


def test_the_parent_settles_below_the_spans_of_the_calls(
    queue: Queue, spans: RecordedSpans, child_spans: Callable[[], list[dict[str, Any]]]
) -> None:
    queue.produce_many([b"1", b"2", b"3"])
    with running_worker(Worker(queue, traced_handlers.work, processes=1)):
        wait_completed(queue, 3)
    handled = {int(span["context"]["span_id"], 16) for span in wait_until(child_spans, lambda found: len(found) == 3)}
    settled = spans.named("complete orders")
    assert {parent_id(span) for span in settled if span.parent} | {one for span in settled for one, _ in linked(span)} == handled


def test_the_parent_reports_a_failure_in_a_child_in_the_span_of_the_call(
    queue: Queue, spans: RecordedSpans, log: HandlerEvents, child_spans: Callable[[], list[dict[str, Any]]]
) -> None:
    queue.produce(b"x")
    hooks = Hooks(failed=lambda item, error: log.add(current_span_ids()))
    with running_worker(Worker(queue, traced_handlers.fail, processes=1, hooks=hooks)):
        _, span_id = log.next()
    (handle,) = wait_until(child_spans)
    assert (handle["context"]["span_id"], handle["attributes"]["error.type"]) == (f"0x{span_id}", "ValueError")
    assert parent_id(spans.only("retry orders")) == int(span_id, 16)


def test_the_parent_records_the_call_of_a_child_that_died(
    queue: Queue, spans: RecordedSpans, child_spans: Callable[[], list[dict[str, Any]]]
) -> None:
    queue.produce(b"x")
    with running_worker(Worker(queue, traced_handlers.kill_oneself, processes=1)):
        handle, *_ = wait_until(lambda: spans.named("handle orders"))
        wait_until(lambda: spans.named("retry orders"))
    assert ((handle.attributes or {})["error.type"], handle.status.status_code) == ("penstock.ChildProcessExited", StatusCode.ERROR)
    assert parent_id(handle) == spans.only("produce orders").context.span_id
    assert handle.start_time is not None and handle.end_time is not None and handle.start_time <= handle.end_time
    assert child_spans() == []
