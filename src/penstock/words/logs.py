"""Log lines as JSON, and the fields that Penstock's log records have besides their message.

Owns: `log_fields`, `JsonLogFormatter` and `json_log`. Penstock logs to the loggers `penstock` and `penstock.worker`;
the program decides how they are written. `json_log` is for processes of Penstock itself: the long-running commands,
and the child processes of a worker.
A line has the fields of LINE_FIELDS and no others, so that no payload gets into a log: the `extra` of other records is
left out.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TextIO, TypeAlias

FORMAT_VARIABLE: Final = "PENSTOCK_LOG_FORMAT"
LEVEL_VARIABLE: Final = "PENSTOCK_LOG_LEVEL"
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
DEFAULT_LEVEL: Final = "warning"
RECORD_FIELDS: Final = ("queue", "partition", "item_id", "worker")
LINE_FIELDS: Final = ("time", "level", "logger", "message", "pid", *RECORD_FIELDS, "exception", "trace_id", "span_id")

SpanIds: TypeAlias = Callable[[], tuple[str, str] | None]
"""Gives the trace id and the span id of the current span."""


def log_fields(
    *, queue: str | None = None, partition: int | None = None, item_id: str | None = None, worker: str | None = None
) -> dict[str, object]:
    """What a log record is about, for the argument `extra` of a logger's methods."""
    given = {"queue": queue, "partition": partition, "item_id": item_id, "worker": worker}
    return {name: value for name, value in given.items() if value is not None}


class JsonLogFormatter(logging.Formatter):
    """A log record as one line of JSON."""

    def __init__(self, span_ids: SpanIds) -> None:
        super().__init__()
        self._span_ids = span_ids

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        line |= {name: getattr(record, name) for name in RECORD_FIELDS if hasattr(record, name)}
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, _ = record.exc_info
            line["exception"] = {"type": kind.__qualname__, "message": str(error), "traceback": self.formatException(record.exc_info)}
        if (ids := self._span_ids()) is not None:
            line["trace_id"], line["span_id"] = ids
        return json.dumps(line, default=str)


@contextmanager
def json_log(stream: TextIO, level: str, span_ids: SpanIds) -> Iterator[None]:
    """Write the log to a stream as JSON lines while the block runs.

    It is the log of Penstock, and also that of the program unless the program has configured logging.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLogFormatter(span_ids))
    everything, own = logging.getLogger(), logging.getLogger("penstock")
    target = own if everything.handlers else everything
    former_level, former_propagate = target.level, own.propagate
    target.addHandler(handler)
    target.setLevel(LEVELS[level])
    own.propagate = target is everything
    try:
        yield
    finally:
        own.propagate = former_propagate
        target.setLevel(former_level)
        target.removeHandler(handler)


@contextmanager
def log_of_child(stream: TextIO, span_ids: SpanIds) -> Iterator[None]:
    """In a child process: write the log as the variables say, which its parent has set if it writes JSON lines."""
    level = os.environ.get(LEVEL_VARIABLE, DEFAULT_LEVEL)
    if os.environ.get(FORMAT_VARIABLE) != "json" or level not in LEVELS:
        yield
        return
    with json_log(stream, level, span_ids):
        yield
