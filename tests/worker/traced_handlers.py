"""Handlers for child processes that are traced.

In a child, this module sets a tracer provider that writes one line for each span into the file that the variable
PENSTOCK_TEST_SPANS names.
"""

import json
import os
import signal
from collections.abc import Sequence
from multiprocessing import parent_process

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from penstock import Item, NewItem
from penstock.worker.context import Context


class FileExporter(SpanExporter):
    """Appends a line for each span to a file."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with open(os.environ["PENSTOCK_TEST_SPANS"], "a") as file:
            for span in spans:
                file.write(json.dumps(json.loads(span.to_json())) + "\n")
        return SpanExportResult.SUCCESS


if parent_process() is not None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter()))
    trace.set_tracer_provider(provider)


def follow_up(item: Item, context: Context) -> None:
    """Work in a span of its own, and follow up."""
    with trace.get_tracer("shop").start_as_current_span("charge"):
        pass
    context.follow_up(NewItem(b"mail", queue="mails"))


async def follow_up_later(item: Item, context: Context) -> None:
    follow_up(item, context)


def work(item: Item) -> None:
    """Nothing that the parent must be told."""


def kill_oneself(item: Item) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(item: Item) -> None:
    raise ValueError("no card")
