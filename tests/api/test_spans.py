"""The OpenTelemetry spans of the public API, and the trace context in the headers of items."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import SpanKind, StatusCode

import penstock
from penstock import Broker, LeaseBatch, NewItem, Queue
from penstock.api import spans as api_spans
from penstock.api.traces import active_tracer, current_span_ids
from penstock.errors import InvalidRequest, LeaseLost, QueueHeld
from penstock.words.batch import Batch
from penstock.words.limits import MAX_HEADERS_BYTES
from penstock.words.values import decode_headers, encode_headers
from tests.conformance.homes import HOMES
from tests.recorded_spans import RecordedSpans, header_of, linked, parent_id

USERS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""A context that a user gives."""


@pytest.fixture
def queue(broker: Broker, spans: RecordedSpans) -> Queue:
    return broker.create_queue("orders", max_attempts=5)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """The attributes without those that all spans of the queue have."""
    found = dict(span.attributes or {})
    assert found.pop("messaging.system") == "penstock"
    assert found.pop("messaging.destination.name") == "orders"
    assert span.name == f"{found.pop('messaging.operation.name')} orders"
    return found


# -- producing ---------------------------------------------------------------------------------------


def test_a_produce_is_a_span_and_the_item_carries_its_context(queue: Queue, spans: RecordedSpans) -> None:
    item_id = queue.produce(b"x", headers={"shop": "7"})
    span = spans.only("produce orders")
    assert (span.kind, span.parent, span.links) == (SpanKind.PRODUCER, None, ())
    assert attributes(span) == {
        "messaging.operation.type": "send",
        "messaging.message.id": item_id,
        "messaging.destination.partition.id": "0",
    }
    assert queue.items()[0].headers == {"shop": "7", "traceparent": header_of(span)}


def test_a_batch_has_one_span_whose_context_all_its_items_carry(broker: Broker, spans: RecordedSpans) -> None:
    queue = broker.create_queue("orders", partitions=2)
    queue.produce_many([NewItem(b"x", key=str(number)) for number in range(20)])
    span = spans.only("produce orders")
    assert attributes(span) == {"messaging.operation.type": "send", "messaging.batch.message_count": 20}
    assert [item.headers for item in queue.items()] == [{"traceparent": header_of(span)}] * 20


def test_the_context_is_injected_once_for_a_batch() -> None:
    carrier = {"traceparent": USERS}
    plain = api_spans.with_trace_context(Batch([b"x"] * 3), carrier).headers
    assert plain is not None and len({id(packed) for packed in plain}) == 1
    given = encode_headers({"shop": "7"})
    mixed = api_spans.with_trace_context(Batch([b"x"] * 4, headers=[given, None, given, None]), carrier).headers
    assert mixed is not None and len({id(packed) for packed in mixed}) == 2
    assert decode_headers(mixed[2]) == {"shop": "7", **carrier}


def test_a_context_that_the_user_gave_is_kept_and_linked(queue: Queue, spans: RecordedSpans) -> None:
    queue.produce_many([NewItem(b"1", headers={"traceparent": USERS, "tracestate": "shop=7"}), b"2"])
    queue.produce(b"3", headers={"traceparent": USERS.encode()})
    mixed, alone = spans.named("produce orders")
    assert (mixed.kind, alone.kind) == (SpanKind.PRODUCER, SpanKind.CLIENT)
    assert [link.context.span_id for link in (*mixed.links, *alone.links)] == [0xB7AD6B7169203331] * 2
    assert [item.headers for item in queue.items()] == [
        {"traceparent": USERS, "tracestate": "shop=7"},
        {"traceparent": header_of(mixed)},
        {"traceparent": USERS.encode()},
    ]


def test_headers_that_have_no_room_for_the_context_are_stored_without(queue: Queue) -> None:
    headers = {"long": "x" * (MAX_HEADERS_BYTES - 20)}
    queue.produce(b"x", headers=headers)
    assert queue.items()[0].headers == headers


def test_a_repeated_request_is_recognised_although_its_context_is_another(
    queue: Queue, spans: RecordedSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    items: list[Any] = [b"x", NewItem(b"y", headers={"shop": "7"})]
    first = queue.produce(b"x", request_id="a"), queue.produce_many(items, request_id="b")
    assert (queue.produce(b"x", request_id="a"), queue.produce_many(items, request_id="b")) == first
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    assert (queue.produce(b"x", request_id="a"), queue.produce_many(items, request_id="b")) == first
    with pytest.raises(InvalidRequest):
        queue.produce(b"x", headers={"shop": "8"}, request_id="a")
    assert queue.stats().ready == 3


def test_a_refused_produce_says_why(queue: Queue, spans: RecordedSpans) -> None:
    queue.pause(lease=False)
    with pytest.raises(QueueHeld):
        queue.produce(b"x", timeout=0)
    span = spans.only("produce orders")
    assert attributes(span)["error.type"] == "queue_held"
    assert span.status.status_code is StatusCode.ERROR and "paused" in str(span.status.description)


def test_every_request_of_a_table_is_a_span(queue: Queue, spans: RecordedSpans) -> None:
    queue.produce_arrow(pa.table({"payload": [b"x"] * 10_001}))
    assert [attributes(span).get("messaging.batch.message_count", 1) for span in spans.all] == [10_000, 1]


# -- leasing and settling ----------------------------------------------------------------------------


def test_a_lease_links_to_what_produced_its_items(queue: Queue, spans: RecordedSpans) -> None:
    queue.produce_many([b"1", b"2"])
    third = queue.produce(b"3")
    queue.lease(10, consumer="till-1")
    span, (batch, single) = spans.only("lease orders"), spans.named("produce orders")
    assert (span.kind, span.parent) == (SpanKind.CLIENT, None)
    assert attributes(span) == {
        "messaging.operation.type": "receive",
        "messaging.batch.message_count": 3,
        "messaging.destination.partition.id": "0",
        "messaging.client.id": "till-1",
    }
    assert linked(span) == [
        (batch.context.span_id, {"messaging.batch.message_count": 2}),
        (single.context.span_id, {"messaging.message.id": third}),
    ]


def test_a_lease_without_items_counts_none(queue: Queue, spans: RecordedSpans) -> None:
    assert len(queue.lease()) == 0
    assert attributes(spans.only("lease orders"))["messaging.batch.message_count"] == 0


def test_the_links_of_a_span_are_bounded(queue: Queue, spans: RecordedSpans) -> None:
    items = [NewItem(b"x", headers={"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}) for number in range(200)]
    queue.produce_many([*items, *items])
    queue.lease(1_000)
    for span in spans.all:
        assert [link.context.span_id for link in span.links] == list(range(1, 129))
        assert {(link.attributes or {})["messaging.batch.message_count"] for link in span.links} == {2}


def test_what_is_no_context_is_ignored(queue: Queue, spans: RecordedSpans) -> None:
    queue.produce(b"x", headers={"traceparent": "nonsense"})
    with queue.lease()[0] as lease:
        assert lease.item.headers == {"traceparent": "nonsense"}
    assert [(span.name, span.links) for span in spans.all if span.kind is not SpanKind.PRODUCER] == [
        ("produce orders", ()),
        ("lease orders", ()),
        ("complete orders", ()),
        ("handle orders", ()),
    ]


def test_each_settlement_is_a_span(queue: Queue, spans: RecordedSpans) -> None:
    queue.produce_many([b"1", b"2", b"3", b"4"])
    produced = spans.only("produce orders")
    one, two, three, four = queue.lease(10)
    spans.forget()
    one.extend(30)
    queue.complete([one, two.token])
    three.retry()
    four.bury()
    both, retry, bury = spans.all
    assert [span.name for span in spans.all] == ["complete orders", "retry orders", "bury orders"]
    assert {(span.kind, attributes(span)["messaging.operation.type"]) for span in spans.all} == {(SpanKind.CLIENT, "settle")}
    assert attributes(both)["messaging.batch.message_count"] == 2
    assert attributes(bury)["messaging.message.id"] == four.id
    assert linked(both) == [(produced.context.span_id, {"messaging.batch.message_count": 2})]
    assert (parent_id(retry), retry.links) == (produced.context.span_id, ())


def test_a_settlement_that_fails_says_why(queue: Queue, spans: RecordedSpans) -> None:
    queue.produce(b"x")
    (lease,) = queue.lease()
    queue.retry(lease.token)
    with pytest.raises(LeaseLost):
        lease.complete()
    span = spans.only("complete orders")
    assert (attributes(span)["error.type"], span.status.status_code) == ("lease_lost", StatusCode.ERROR)


def test_a_whole_batch_is_settled_in_one_span(queue: Queue, spans: RecordedSpans) -> None:
    queue.produce_many([b"1", b"2", b"3"])
    batch = queue.lease(3)
    batch[0].complete()
    batch.complete()
    assert attributes(spans.named("complete orders")[1])["messaging.batch.message_count"] == 2


# -- handling in a block -----------------------------------------------------------------------------


@pytest.fixture
def sync_queue(spans: RecordedSpans) -> Any:
    with penstock.open("memory://") as broker:
        yield broker.create_queue("orders", max_attempts=5)


def test_a_block_is_a_span_below_that_of_the_producer(sync_queue: Queue, spans: RecordedSpans) -> None:
    item_id = sync_queue.produce(b"x", kind="invoice")
    with sync_queue.lease()[0]:
        inside = current_span_ids()
    assert spans.names == ["produce orders", "lease orders", "complete orders", "handle orders"]
    produce, _, complete, handle = spans.all
    assert (handle.kind, parent_id(handle), parent_id(complete)) == (SpanKind.CONSUMER, produce.context.span_id, handle.context.span_id)
    assert {span.context.trace_id for span in (produce, handle, complete)} == {produce.context.trace_id}
    assert inside == (f"{handle.context.trace_id:032x}", f"{handle.context.span_id:016x}")
    assert current_span_ids() is None
    assert linked(handle) == [(produce.context.span_id, {"messaging.message.id": item_id})]
    assert attributes(handle) == {
        "messaging.operation.type": "process",
        "messaging.message.id": item_id,
        "messaging.destination.partition.id": "0",
        "messaging.penstock.message.attempts": 1,
        "messaging.penstock.message.kind": "invoice",
    }


def test_a_block_in_another_span_is_its_child_and_links_to_the_producer(sync_queue: Queue, spans: RecordedSpans) -> None:
    sync_queue.produce(b"x")
    with spans.tracer.start_as_current_span("poll") as outer, sync_queue.lease()[0]:
        sync_queue.produce(b"y")
    handle = spans.only("handle orders")
    assert [parent_id(span) for span in (handle, spans.only("lease orders"))] == [outer.get_span_context().span_id] * 2
    assert [parent_id(span) for span in spans.named("produce orders")] == [None, handle.context.span_id]
    assert [span_id for span_id, _ in linked(handle)] == [spans.named("produce orders")[0].context.span_id]


def test_the_error_of_a_block_is_recorded(sync_queue: Queue, spans: RecordedSpans) -> None:
    sync_queue.produce(b"x")
    with pytest.raises(KeyError), sync_queue.lease()[0]:
        raise KeyError("card")
    handle = spans.only("handle orders")
    assert (attributes(handle)["error.type"], handle.status.status_code) == ("KeyError", StatusCode.ERROR)
    assert [event.name for event in handle.events] == ["exception"]
    assert parent_id(spans.only("retry orders")) == handle.context.span_id


def test_a_block_over_a_batch_links_to_the_producers(sync_queue: Queue, spans: RecordedSpans) -> None:
    sync_queue.produce(b"1")
    sync_queue.produce(b"2")
    with sync_queue.lease(2):
        pass
    handle, produced = spans.only("handle orders"), spans.named("produce orders")
    assert (handle.parent, attributes(handle)["messaging.batch.message_count"]) == (None, 2)
    assert [span_id for span_id, _ in linked(handle)] == [span.context.span_id for span in produced]


def test_a_block_over_nothing_has_no_span(sync_queue: Queue, spans: RecordedSpans) -> None:
    with sync_queue.lease() as batch:
        assert isinstance(batch, LeaseBatch)
    assert spans.names == ["lease orders"]


def test_blocks_of_concurrent_tasks_have_their_own_spans(spans: RecordedSpans) -> None:
    async def handle(queue: penstock.AsyncQueue, gate: asyncio.Barrier) -> tuple[str, Any]:
        (lease,) = await queue.lease()
        async with lease:
            await gate.wait()
            return str(lease.item.headers["traceparent"]), current_span_ids()

    async def main() -> list[tuple[str, Any]]:
        async with await penstock.aopen("memory://") as broker:
            queue = await broker.create_queue("orders")
            await asyncio.gather(queue.produce(b"1"), queue.produce(b"2"))
            return await asyncio.gather(*[handle(queue, gate) for gate in [asyncio.Barrier(2)] * 2])

    seen = asyncio.run(main())
    produced = {span.context.span_id: header_of(span) for span in spans.named("produce orders")}
    handled = {f"{span.context.span_id:016x}": parent_id(span) for span in spans.named("handle orders")}
    assert len(handled) == 2
    for carried, (_, span_id) in seen:
        assert carried == produced[handled[span_id] or 0]


# -- follow-ups --------------------------------------------------------------------------------------


def test_follow_ups_carry_the_context_of_the_handler(sync_queue: Queue, spans: RecordedSpans) -> None:
    sync_queue.produce(b"x")
    with sync_queue.lease()[0] as lease:
        lease.complete(then=[b"next", NewItem(b"own", headers={"traceparent": USERS})])
    handle = spans.only("handle orders")
    assert [item.headers["traceparent"] for item in sync_queue.items("ready")] == [header_of(handle), USERS]


def test_without_a_span_follow_ups_carry_the_context_of_their_item(queue: Queue, spans: RecordedSpans) -> None:
    queue.produce(b"x", headers={"traceparent": USERS, "shop": "7"})
    queue.lease()[0].complete(then=[b"next"])
    assert [item.headers for item in queue.items("ready")] == [{"traceparent": USERS}]


# -- every home, the conventions, switching off ------------------------------------------------------


@pytest.mark.parametrize("kind", HOMES)
def test_spans_are_the_same_for_every_home(kind: str, tmp_path: Path, spans: RecordedSpans) -> None:
    made = HOMES[kind](tmp_path)
    with made.stack:
        queue = Broker(made.home, kind).create_queue("orders")
        queue.produce(b"x")
        with queue.lease(wait=10)[0]:
            pass
    assert spans.names == ["produce orders", "lease orders", "complete orders", "handle orders"]
    assert len({span.context.trace_id for span in spans.all}) == 2  # that of the lease is its own


def test_attributes_are_those_of_the_conventions(sync_queue: Queue, spans: RecordedSpans) -> None:
    known = {value for module in (messaging_attributes, error_attributes) for value in vars(module).values() if isinstance(value, str)}
    types = {kind.value for kind in messaging_attributes.MessagingOperationTypeValues}
    sync_queue.produce(b"x", kind="invoice")
    with pytest.raises(ValueError, match="no"), sync_queue.lease(consumer="till-1")[0]:
        raise ValueError("no")
    for span in spans.all:
        given = dict(span.attributes or {})
        assert {name for name in given if not name.startswith("messaging.penstock.message.")} <= known
        assert given["messaging.operation.type"] in types
        scope = span.instrumentation_scope
        assert scope is not None and scope.name == "penstock" and scope.schema_url in {schema.value for schema in Schemas}


def test_without_a_provider_nothing_is_traced(broker: Broker) -> None:
    queue = broker.create_queue("orders")
    with trace.get_tracer("tests").start_as_current_span("outer"):
        queue.produce(b"x")
    assert (active_tracer(), queue.items()[0].headers) == (None, {})


def test_a_provider_is_found_without_the_private_name(spans: RecordedSpans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: spans.provider)
    monkeypatch.delattr(trace, "_TRACER_PROVIDER")
    assert active_tracer() is not None
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: trace.ProxyTracerProvider())
    assert active_tracer() is None


UNTRACED = """
import sys, penstock
with penstock.open("memory://") as broker:
    queue = broker.create_queue("orders")
    queue.produce(b"x")
    with queue.lease()[0] as lease:
        assert lease.item.headers == {}
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
"""
SWITCHED_OFF = """
import os
os.environ["OTEL_SDK_DISABLED"] = "true"
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
import penstock
with penstock.open("memory://") as broker:
    queue = broker.create_queue("orders")
    queue.produce(b"x")
    assert queue.items()[0].headers == {}
"""


@pytest.mark.parametrize("code", [UNTRACED, SWITCHED_OFF], ids=["not used", "switched off"])
def test_a_program_is_not_traced_unless_it_wants_that(code: str) -> None:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
