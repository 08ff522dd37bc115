"""The OpenTelemetry spans of producing, leasing, handling and settling, and the trace context in items.

Owns: `QueueTracer`, which makes the spans; their names, kinds, attributes and links, after the messaging conventions of
OpenTelemetry (docs/traces.md has the tables); and the headers `traceparent` and `tracestate` of items.
Only api/traces.py imports this module, when the process has a tracer provider. It needs opentelemetry-api, not the SDK.

The creation context of an item is the span that produced it. A span that is about items links to their creation
contexts: to each one once, and to MAX_LINKS of them at most. The handling of a single item is also a child of its
creation context, unless another span is current.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeAlias, TypeVar

import msgspec
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.context import Context as TraceContext
from opentelemetry.trace import Link, NonRecordingSpan, NoOpTracer, Span, SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.api.items import Item, NewItem, stored_headers
from penstock.loop.requests import LeaseResult, StoredPart
from penstock.words import values
from penstock.words.batch import Batch
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.ids import format_id
from penstock.words.limits import MAX_HEADERS_BYTES
from penstock.words.values import TRACE_PARENT, TRACE_STATE, Headers, Value
from penstock.words.version import __version__

SYSTEM = "penstock"
SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the semantic conventions that the attributes follow."""
MAX_LINKS = 128
"""The most links of a span; by default the SDK keeps no more."""

Origin: TypeAlias = bytes | SpanContext | None
"""Where the context to link to is: in an item's stored headers, or known already."""
TracedItem: TypeAlias = tuple[int, int, Origin]
"""Partition, offset and origin of an item."""
NOT_STORED = -1
"""Instead of the partition of an item that has no id yet."""
Attributes: TypeAlias = dict[str, str | int]
R = TypeVar("R")

_propagator = TraceContextTextMapPropagator()


def make_tracer(provider: trace.TracerProvider) -> "QueueTracer | None":
    """The tracer of a provider; None if the provider is switched off (OTEL_SDK_DISABLED)."""
    tracer = provider.get_tracer("penstock", __version__, SCHEMA)
    return None if isinstance(tracer, NoOpTracer) else QueueTracer(tracer)


# -- spans -------------------------------------------------------------------------------------------


class QueueSpan:
    """A span that is the current one in a `with` block, which also ends it. An exception of the block is recorded."""

    __slots__ = ("_context", "_span", "_token")

    def __init__(self, span: Span, context: TraceContext | None = None) -> None:
        self._span = span
        self._context = trace.set_span_in_context(span, context)

    @property
    def span_context(self) -> SpanContext:
        return self._span.get_span_context()

    def record_error(self, error_type: str, message: str) -> None:
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(Status(StatusCode.ERROR, message))

    def end(self) -> None:
        self._span.end()

    def __enter__(self) -> Self:
        self._token = contexts.attach(self._context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        contexts.detach(self._token)
        if isinstance(error, Exception):  # a cancelled call is no error
            self.record_error(error_type(error), str(error))
        self.end()


class ProduceSpan(QueueSpan):
    """The span of a produce."""

    __slots__ = ("batch",)

    def __init__(self, span: Span, batch: Batch) -> None:
        super().__init__(span)
        self.batch = with_trace_context(batch, carrier_of(self._context))
        """The items with the context of this span in their headers. Items that had a context keep it."""

    def record_answer(self, parts: Sequence[StoredPart]) -> None:
        """Set what the answer says: where the items were stored, or why some were not."""
        refused = next((part.refused for part in parts if part.refused is not None), None)
        if refused is not None:
            self.record_error(refused.code, refused.message)
        if len(parts) == 1:
            partition, _, stored, _ = parts[0]
            self._span.set_attribute("messaging.destination.partition.id", str(partition))
            if stored is not None and len(self.batch) == 1:
                self._span.set_attribute("messaging.message.id", format_id(partition, stored.offsets[0]))


class LeaseSpan(QueueSpan):
    """The span of a lease."""

    __slots__ = ()

    def record_answer(self, results: Sequence[LeaseResult]) -> None:
        """Set how many items came, and link to their creation contexts."""
        if not self._span.is_recording():
            return
        self._span.set_attribute("messaging.batch.message_count", sum(len(block.batch) for one in results for block in one.items))
        if len(results) == 1:
            self._span.set_attribute("messaging.destination.partition.id", str(results[0].partition))
        for link in links_to(_items_of(results)):
            self._span.add_link(link.context, link.attributes)


class HandleSpan(QueueSpan):
    """The span of a handler's call. `run` and `await_result` make it current; `end_call` ends it."""

    __slots__ = ()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current span in a block, which does not end it."""
        token = contexts.attach(self._context)
        try:
            yield
        finally:
            contexts.detach(token)

    @property
    def header(self) -> str:
        """The header `traceparent` that names it."""
        return carrier_of(self._context).get(TRACE_PARENT, "")

    def run(self, function: Callable[..., R], *args: Any) -> R:
        with self.current():
            return function(*args)

    async def await_result(self, result: Awaitable[R]) -> R:
        with self.current():
            return await result

    def end_call(self, error: BaseException | None, outcomes: set[str], failed: bool = True) -> None:
        """End the span of a worker's call.

        outcomes: those of the items.
        failed: whether the error is a failure, not only a wish of the handler.
        """
        if len(outcomes) == 1:
            self._span.set_attribute("messaging.penstock.message.outcome", *outcomes)
        if error is not None and failed:
            self.record_failure(error)
        self.end()

    def record_failure(self, error: BaseException) -> None:
        self._span.record_exception(error)
        self.record_error(error_type(error), str(error))

    @contextmanager
    def ending(self, error: BaseException | None) -> Iterator[None]:
        """End the span after a block that settles the items; `error` is that of the handler."""
        try:
            yield
        finally:
            if error is not None:
                self.record_failure(error)
            self.__exit__(None, None, None)


class QueueTracer:
    """Makes the spans of queues."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def produce(self, queue: str, batch: Batch) -> ProduceSpan:
        """The span of a produce. Items of which the caller has set the context are linked."""
        given = batch.headers or ()
        own = {packed for packed in set(given) if packed is not None and TRACE_PARENT in _decoded(packed)}
        kind = SpanKind.CLIENT if own and own.issuperset(given) else SpanKind.PRODUCER
        attributes = _attributes(queue, "produce", "send")
        if len(batch) > 1:
            attributes["messaging.batch.message_count"] = len(batch)
        links = links_to((NOT_STORED, index, packed) for index, packed in enumerate(given) if packed in own) if own else None
        return ProduceSpan(self._tracer.start_span(f"produce {queue}", kind=kind, attributes=attributes, links=links), batch)

    def lease(self, queue: str, consumer: str) -> LeaseSpan:
        attributes = _attributes(queue, "lease", "receive")
        if consumer:
            attributes["messaging.client.id"] = consumer
        return LeaseSpan(self._tracer.start_span(f"lease {queue}", kind=SpanKind.CLIENT, attributes=attributes))

    def settle(self, queue: str, action: str, items: Sequence[TracedItem]) -> QueueSpan:
        """The span of a request that settles items. Without a current span it is a child of the only item's origin."""
        attributes = _attributes(queue, action, "settle")
        _add_items(attributes, items, batch=len(items) > 1)
        links = links_to(items)
        parent = _parent(links if len(items) == 1 else [])
        span = self._tracer.start_span(f"{action} {queue}", parent, SpanKind.CLIENT, attributes, links if parent is None else None)
        return QueueSpan(span)

    def handle(self, queue: str, items: Sequence[Item], *, batch: bool = False, client: str = "", start: int | None = None) -> HandleSpan:
        """The span of the handling of items.

        batch: the handler takes a list of items. Then the span is no child of their creation contexts.
        start: when it began, in nanoseconds since 1970, if that was earlier.
        """
        traced: list[TracedItem] = [(item.partition, item.offset, stored_headers(item)) for item in items]
        attributes = _attributes(queue, "handle", "process")
        _add_items(attributes, traced, batch)
        if client:
            attributes["messaging.client.id"] = client
        if not batch:
            attributes["messaging.penstock.message.attempts"] = items[0].attempts
            if items[0].kind is not None:
                attributes["messaging.penstock.message.kind"] = items[0].kind
        links = links_to(traced)
        parent = _parent([] if batch else links)
        return HandleSpan(self._tracer.start_span(f"handle {queue}", parent, SpanKind.CONSUMER, attributes, links, start), parent)

    @staticmethod
    def handled_elsewhere(header: str) -> HandleSpan:
        """The span of a call in another process, by its `header`. It has ended there."""
        return HandleSpan(trace.get_current_span(_propagator.extract({TRACE_PARENT: header}, TraceContext())))

    # -- follow-ups ----------------------------------------------------------------------------------

    def follow_up_batch(self, batch: Batch, item: Item) -> Batch:
        """Follow-ups of an item with the context of its handler: the current span, or else the item's own context."""
        carrier = carrier_of(None)
        if not carrier:
            found = _decoded(stored_headers(item))
            carrier = {name: found[name] for name in (TRACE_PARENT, TRACE_STATE) if name in found}
        return with_trace_context(batch, carrier)

    def follow_up(self, item: NewItem | Value) -> NewItem | Value:
        """A follow-up with the context of the current span."""
        carrier = carrier_of(None)
        if not carrier:
            return item
        if not isinstance(item, NewItem):
            return NewItem(item, headers=carrier)
        given = dict(item.headers or {})
        if TRACE_PARENT in given or _has_no_room({**given, **carrier}):
            return item
        return msgspec.structs.replace(item, headers={**given, **carrier})


# -- attributes and links ----------------------------------------------------------------------------


def error_type(error: BaseException) -> str:
    """The attribute error.type: the code of a PenstockError, else the name of the class with its module."""
    if isinstance(error, PenstockError):
        return error.code
    kind = type(error)
    module = "penstock" if kind.__module__.startswith("penstock.") else kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def _attributes(queue: str, name: str, kind: str) -> Attributes:
    return {
        "messaging.system": SYSTEM,
        "messaging.destination.name": queue,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
    }


def _add_items(attributes: Attributes, items: Sequence[TracedItem], batch: bool) -> None:
    partitions = {partition for partition, _, _ in items}
    if len(partitions) == 1:
        attributes["messaging.destination.partition.id"] = str(partitions.pop())
    if batch:
        attributes["messaging.batch.message_count"] = len(items)
    elif items:
        attributes["messaging.message.id"] = format_id(items[0][0], items[0][1])


def _items_of(results: Iterable[LeaseResult]) -> Iterator[TracedItem]:
    for result in results:
        for block in result.items:
            if block.batch.headers is not None:
                for offset, packed in zip(block.offsets, block.batch.headers, strict=True):
                    yield result.partition, offset, packed


def links_to(items: Iterable[TracedItem]) -> list[Link]:
    """One link for each context that the items come from, with the id of the item or the number of the items."""
    by_headers: dict[bytes, SpanContext | None] = {}
    found: dict[tuple[int, int], tuple[SpanContext, list[tuple[int, int]]]] = {}
    for partition, offset, origin in items:
        if isinstance(origin, bytes):
            if origin not in by_headers:
                by_headers[origin] = creation_context(origin) if len(found) < MAX_LINKS else None
            origin = by_headers[origin]
        if origin is not None:
            span = origin.trace_id, origin.span_id
            if span in found or len(found) < MAX_LINKS:
                found.setdefault(span, (origin, []))[1].append((partition, offset))
    return [Link(context, _link_attributes(linked)) for context, linked in found.values()]


def _link_attributes(linked: list[tuple[int, int]]) -> Attributes:
    if len(linked) > 1:
        return {"messaging.batch.message_count": len(linked)}
    return {} if linked[0][0] == NOT_STORED else {"messaging.message.id": format_id(*linked[0])}


def _parent(links: Sequence[Link]) -> TraceContext | None:
    """The context of a new span: the only link's if there is no current span; None is the current one."""
    if len(links) != 1 or trace.get_current_span().get_span_context().is_valid:
        return None
    return trace.set_span_in_context(NonRecordingSpan(links[0].context))


# -- the trace context of items ----------------------------------------------------------------------


def creation_context(headers: bytes | None) -> SpanContext | None:
    """The span that stored headers name, or None."""
    found = _decoded(headers)
    if TRACE_PARENT not in found:
        return None
    context = trace.get_current_span(_propagator.extract(found, TraceContext())).get_span_context()
    return context if context.is_valid else None


def carrier_of(context: TraceContext | None) -> dict[str, str]:
    """The headers that name the span of a context, or with None the current span; empty if there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return carrier


def with_trace_context(batch: Batch, carrier: dict[str, str]) -> Batch:
    """The batch with these headers added to every item that has no trace context of its own."""
    shared = values.encode_headers(carrier)
    if shared is None:
        return batch
    if batch.headers is None:
        return msgspec.structs.replace(batch, headers=[shared] * len(batch))
    merged: dict[bytes | None, bytes] = {None: shared}
    for packed in batch.headers:
        if packed not in merged:
            merged[packed] = _merged(packed, carrier)  # type: ignore[arg-type]
    return msgspec.structs.replace(batch, headers=[merged[packed] for packed in batch.headers])


def _merged(packed: bytes, carrier: dict[str, str]) -> bytes:
    try:
        given = values.decode_headers(packed)
    except InvalidRequest:
        return packed
    if TRACE_PARENT in given or _has_no_room({**given, **carrier}):
        return packed
    return values.encode_headers({**given, **carrier}) or packed


def _has_no_room(headers: Headers) -> bool:
    """Whether headers are too long with the context. Then they stay as they are: nothing fails because it is traced."""
    return len(values.encode_headers(headers) or b"") > MAX_HEADERS_BYTES


def _decoded(headers: bytes | None) -> dict[str, str]:
    """Stored headers as texts. Those that cannot be read are empty: a span is never a reason for an error."""
    try:
        found = values.decode_headers(headers)
    except InvalidRequest:
        return {}
    return {name: value if isinstance(value, str) else value.decode("latin-1") for name, value in found.items()}
