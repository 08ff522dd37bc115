"""The audit log: which requests have a line, what is in it, what is in none, and the file."""

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import AccessDenied, InvalidRequest, PenstockError, QueueNotFound, Unauthenticated
from penstock.operations import (
    OPERATIONS,
    ClearItems,
    CreateQueue,
    DeleteQueue,
    Operation,
    PauseQueue,
    RedriveItems,
    ReleaseKey,
    SeekItems,
    UpdateQueue,
)
from penstock.rules.options import OPTION_NAMES
from penstock.server.api_keys import ApiKey
from penstock.server.audit import AUDITED, REFUSALS_AT_ONCE, AuditLog
from penstock.testing.clock import START_WALL, MicrosecondClock
from penstock.words.clock import SECOND
from penstock.words.limits import Retention
from tests.server.sample_operations import QUEUE, samples

KEY = ApiKey("k1", "ops", frozenset({"admin"}), ())
NAMES = {QUEUE: "orders", 8: "orders.dead"}
EXPIRED = Unauthenticated("expired")
EXPIRED.key_id = "k2"


class Recorded:
    """An audit log on the logger alone, and its lines."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "penstock.audit")
        self.caplog = caplog
        self.clock = MicrosecondClock()
        self.log = AuditLog(clock=self.clock)

    def write(self, operation: Operation[Any] | None, error: PenstockError | None = None, key: ApiKey | None = KEY) -> None:
        self.log.record(operation, error, key=key, client="10.0.0.1:5000", name_of=NAMES.get)

    def lines(self) -> list[dict[str, Any]]:
        found = [json.loads(record.getMessage()) for record in self.caplog.records if record.name == "penstock.audit"]
        self.caplog.clear()
        return found

    def parameters(self, operation: Operation[Any]) -> Any:
        self.write(operation)
        (line,) = self.lines()
        return line["parameters"]


@pytest.fixture
def recorded(caplog: pytest.LogCaptureFixture) -> Recorded:
    return Recorded(caplog)


# -- which requests ----------------------------------------------------------------------------------


def test_the_operations_that_need_admin_are_audited() -> None:
    assert {kind for kind in OPERATIONS if kind.scope == "admin"} == AUDITED


def test_a_line_says_who_did_what_from_where_and_how_it_ended(recorded: Recorded) -> None:
    recorded.write(DeleteQueue(queue=QUEUE))
    recorded.write(CreateQueue(name="bills", partitions=3), QueueNotFound("no 'dead'"))
    assert recorded.lines() == [
        {
            "time": "2026-01-01T00:00:00.000+00:00", "key": "k1", "key_name": "ops", "client": "10.0.0.1:5000",
            "operation": "DeleteQueue", "queue": "orders", "parameters": {}, "outcome": "ok",
        },
        {
            "time": "2026-01-01T00:00:00.000+00:00", "key": "k1", "key_name": "ops", "client": "10.0.0.1:5000",
            "operation": "CreateQueue", "queue": "bills", "parameters": {"partitions": 3, "exist_ok": False}, "outcome": "queue_not_found",
        },
    ]  # fmt: skip


@pytest.mark.parametrize("error", [None, InvalidRequest("no"), AccessDenied("no")])
def test_other_operations_have_a_line_only_if_they_were_refused(recorded: Recorded, error: PenstockError | None) -> None:
    for operation in samples("x"):
        recorded.write(operation, error)
        assert len(recorded.lines()) == (type(operation) in AUDITED or isinstance(error, AccessDenied)), operation
        recorded.clock.advance(SECOND)


@pytest.mark.parametrize(("error", "id"), [(Unauthenticated("who?"), ""), (EXPIRED, "k2")])
def test_a_request_without_a_valid_key_has_a_line(recorded: Recorded, error: Unauthenticated, id: str) -> None:
    recorded.write(None, error, None)
    (line,) = recorded.lines()
    found = (line["key"], line["key_name"], line["operation"], line["queue"], line["outcome"])
    assert found == (id, "", "", "", "unauthenticated")


def test_a_server_without_keys_has_an_audit_log_too(recorded: Recorded) -> None:
    recorded.write(DeleteQueue(queue=QUEUE), key=None)
    (line,) = recorded.lines()
    assert (line["key"], line["client"], line["outcome"]) == ("", "10.0.0.1:5000", "ok")


def test_refusals_are_bounded_and_other_lines_are_not(recorded: Recorded) -> None:
    for _ in range(REFUSALS_AT_ONCE + 50):
        recorded.write(None, Unauthenticated("who?"), None)
    assert len(recorded.lines()) == REFUSALS_AT_ONCE
    for _ in range(3):
        recorded.write(DeleteQueue(queue=QUEUE))
    assert [line.get("refusals_left_out") for line in recorded.lines()] == [50, None, None]
    recorded.clock.advance(2 * SECOND)
    for _ in range(5):
        recorded.write(DeleteQueue(queue=QUEUE), AccessDenied("no"))
    assert len(recorded.lines()) == 2
    recorded.clock.advance(SECOND)
    recorded.write(None, Unauthenticated("who?"), None)
    assert [line.get("refusals_left_out") for line in recorded.lines()] == [3]


# -- what is in a line -------------------------------------------------------------------------------


def test_parameters(recorded: Recorded) -> None:
    assert recorded.parameters(PauseQueue(queue=QUEUE, lease=True, partition=0)) == {"lease": True, "partition": 0}
    assert recorded.parameters(ClearItems(queue=QUEUE, states=["ready", "buried"])) == {"states": ["ready", "buried"]}
    assert recorded.parameters(SeekItems(queue=QUEUE, start={0: 5, 1: 6})) == {"start": {"0": 5, "1": 6}, "skip": False}
    assert recorded.parameters(SeekItems(queue=QUEUE, start=START_WALL)) == {"start": START_WALL, "skip": False}
    assert recorded.parameters(RedriveItems(queue=8, to=QUEUE)) == {"to": "orders", "items": "all"}
    assert recorded.parameters(RedriveItems(queue=8, to=99, items={0: [1, 2], 1: [3]})) == {"to": f"{99:016x}", "items": 3}
    assert recorded.parameters(ReleaseKey(queue=QUEUE, key=123)) == {}


def test_options_are_parameters(recorded: Recorded) -> None:
    changes = {"max_attempts": 3, "dead_queue": "orders.dead", "on_bury": "park", "retention": {"max_age": 5, "else": "x"}, "else": "x"}
    shown = {"max_attempts": 3, "dead_queue": "orders.dead", "on_bury": "park", "retention": {"max_age": 5}}
    assert recorded.parameters(UpdateQueue(queue=QUEUE, changes=changes)) == shown
    found = recorded.parameters(UpdateQueue(queue=QUEUE, changes={"retention": Retention(max_segments=4), "dead_queue": ""}))
    assert (found["retention"]["max_segments"], found["dead_queue"]) == (4, "")


def test_what_could_be_a_secret_is_not_shown(recorded: Recorded) -> None:
    text = f"pk_{'0' * 12}_{'a' * 64}"
    for operation in (CreateQueue(name=text), CreateQueue(name="q", options={"dead_queue": text})):
        recorded.write(operation)
        (line,) = recorded.lines()
        assert "a" * 64 not in json.dumps(line) and "(an API key)" in json.dumps(line)


def with_options(operation: Operation[Any], text: str) -> Operation[Any]:
    """The operation with the text as the value of every option."""
    options: dict[str, Any] = {**dict.fromkeys(OPTION_NAMES, text), "retention": dict.fromkeys(Retention.__struct_fields__, text)}
    fields = {name for name in ("options", "changes", "given") if hasattr(operation, name)}
    return msgspec.structs.replace(operation, **dict.fromkeys(fields, options))


@settings(max_examples=10)
@given(middle=st.text(max_size=20))
def test_no_line_has_a_text_that_a_client_sent(middle: str) -> None:
    """Nothing but names that a queue can have: no payload, key, header, reason, consumer, cursor or message."""
    text = f"SECRET {middle} SECRET"
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("penstock.audit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        log = AuditLog(clock=MicrosecondClock())
        for operation in samples(text):
            for variant in (operation, with_options(operation, text)):
                for error in (None, InvalidRequest(text), AccessDenied(text), Unauthenticated(text)):
                    log._refusals_left = REFUSALS_AT_ONCE
                    log.record(variant, error, key=KEY, client="10.0.0.1", name_of=NAMES.get)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert len(lines) > 2 * len(OPERATIONS)
    assert [line for line in lines if "SECRET" in line] == []


# -- the file ----------------------------------------------------------------------------------------


def record(log: AuditLog, name: str) -> None:
    log.record(CreateQueue(name=name), None, key=KEY, client="10.0.0.1")


def names(path: Path) -> list[str]:
    return [json.loads(line)["queue"] for line in path.read_text().splitlines()]


def test_lines_are_appended_to_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    before = os.umask(0)
    try:
        for name in ("a", "b"):
            log = AuditLog(str(path))
            record(log, name)
            log.close()
    finally:
        os.umask(before)
    assert names(path) == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_file_is_opened_again_after_a_rotation(tmp_path: Path) -> None:
    path, rotated = tmp_path / "audit.log", tmp_path / "audit.log.1"
    log = AuditLog(str(path))
    record(log, "a")
    path.rename(rotated)
    record(log, "b")
    log.reopen()
    record(log, "c")
    log.close()
    assert (names(rotated), names(path)) == (["a", "b"], ["c"])


def test_a_file_that_cannot_be_opened_again_is_used_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, rotated = tmp_path / "audit.log", tmp_path / "audit.log.1"
    log = AuditLog(str(path))
    path.rename(rotated)
    path.mkdir()
    log.reopen()
    record(log, "a")
    log.close()
    assert names(rotated) == ["a"]
    assert "cannot be opened again" in caplog.text


def test_a_log_without_a_file_can_be_opened_again_and_closed() -> None:
    log = AuditLog()
    log.reopen()
    log.close()


def test_a_full_disk_is_logged_once_and_the_lines_stay_on_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.audit")
    log = AuditLog("/dev/full")
    for name in ("a", "b"):
        record(log, name)
    log.close()
    assert [json.loads(one.getMessage())["queue"] for one in caplog.records if one.name == "penstock.audit"] == ["a", "b"]
    (error,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert error.startswith("the audit log /dev/full cannot be written, its lines are only on the logger penstock.audit")
