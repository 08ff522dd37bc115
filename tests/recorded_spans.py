"""Spans that a test records with the OpenTelemetry SDK.

Owns: `RecordedSpans` and the fixture `spans`, which sets a tracer provider for one test; and `header_of`, to compare a
span with the context in an item.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class RecordedSpans:
    """The spans that have ended, in the order of their ends."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("tests")

    @property
    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.all]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def only(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def forget(self) -> None:
        self._exporter.clear()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedSpans]:
    """Trace this process during a test. (A provider can be set only once for good: other tests must not be traced.)"""
    recorded = RecordedSpans()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", recorded.provider)
    yield recorded
    recorded.provider.shutdown()


def header_of(span: ReadableSpan) -> str:
    """The header `traceparent` that names a span."""
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def linked(span: ReadableSpan) -> list[tuple[int, dict[str, Any]]]:
    """The ids of the linked spans, and the attributes of the links."""
    return [(link.context.span_id, dict(link.attributes or {})) for link in span.links]
