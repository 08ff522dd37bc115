"""Log lines as JSON."""

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.words.logs import LEVEL_VARIABLE, LINE_FIELDS, JsonLogFormatter, json_log, log_fields, log_of_child


def record(message: str, *args: object, **more: Any) -> logging.LogRecord:
    return logging.LogRecord("penstock", logging.WARNING, __file__, 1, message, args, more.pop("exc_info", None))


def line_of(made: logging.LogRecord, ids: tuple[str, str] | None = None) -> dict[str, Any]:
    text = JsonLogFormatter(lambda: ids).format(made)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    assert set(found) <= set(LINE_FIELDS)
    return found


def test_a_line_has_time_level_logger_and_message() -> None:
    made = record("item %s\nis late, 100%%", "0-1")
    made.created = 1_700_000_000.25
    assert line_of(made) == {
        "time": "2023-11-14T22:13:20.250000Z",
        "level": "warning",
        "logger": "penstock",
        "message": "item 0-1\nis late, 100%",
        "pid": made.process,
    }


def test_a_line_says_what_it_is_about_and_nothing_that_others_add() -> None:
    made = record("x")
    vars(made).update(log_fields(queue="orders", partition=0, item_id="0-1", worker="till-1"), payload="secret", item={"secret": 1})
    about = line_of(made)
    assert (about["queue"], about["partition"], about["item_id"], about["worker"]) == ("orders", 0, "0-1", "till-1")
    assert "secret" not in str(about)
    assert log_fields(queue="orders") == {"queue": "orders"}


def test_an_exception_is_type_message_and_traceback() -> None:
    try:
        raise ValueError("no card \udcff")
    except ValueError:
        found = line_of(record("x", exc_info=sys.exc_info()))["exception"]
    assert (found["type"], found["message"]) == ("ValueError", "no card \udcff")
    assert found["traceback"].startswith("Traceback (most recent call last):")


def test_a_line_names_the_current_span() -> None:
    found = line_of(record("x"), ("a" * 32, "b" * 16))
    assert (found["trace_id"], found["span_id"]) == ("a" * 32, "b" * 16)
    assert "trace_id" not in line_of(record("x"))


@contextmanager
def configured_with(*handlers: logging.Handler) -> Iterator[None]:
    """A process whose program has configured logging so, or not at all. (pytest has.)"""
    root, own = logging.getLogger(), logging.getLogger("penstock")
    former, before = root.handlers, (root.level, own.level, own.propagate)
    root.handlers = list(handlers)
    try:
        yield
        assert (root.handlers, root.level, own.level, own.propagate) == (list(handlers), *before)
    finally:
        root.handlers = former


def lines(stream: io.StringIO) -> list[tuple[str, str]]:
    return [(found["logger"], found["level"]) for found in map(json.loads, stream.getvalue().splitlines())]


def log_everywhere() -> None:
    for name in ("penstock.worker", "shop"):
        logging.getLogger(name).info("x")
        logging.getLogger(name).error("x")


def test_the_program_has_json_lines_too_if_it_has_not_configured_logging() -> None:
    stream = io.StringIO()
    with configured_with(), json_log(stream, "info", lambda: None):
        log_everywhere()
    assert lines(stream) == [("penstock.worker", "info"), ("penstock.worker", "error"), ("shop", "info"), ("shop", "error")]


def test_what_the_program_has_configured_stays_as_it_is() -> None:
    stream, other = io.StringIO(), io.StringIO()
    with configured_with(logging.StreamHandler(other)):
        with json_log(stream, "warning", lambda: None):
            log_everywhere()
        logging.getLogger("penstock").error("after")
    assert lines(stream) == [("penstock.worker", "error")]
    assert other.getvalue() == "x\nafter\n"


@pytest.mark.parametrize(("said", "level", "wanted"), [("json", "error", 2), ("text", "error", 0), ("json", "loud", 0)])
def test_a_child_writes_as_the_variables_say(said: str, level: str, wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", said)
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    monkeypatch.setattr(logging, "lastResort", logging.NullHandler())
    stream = io.StringIO()
    with configured_with(), log_of_child(stream, lambda: None):
        log_everywhere()
    assert len(lines(stream)) == wanted
