"""The audit log: who changed what, and who was refused.

Owns: `AuditLog`. Every operation that needs the scope "admin", and every request that was refused for its key, is one
line of JSON on the logger `penstock.audit`, and in a file if there is one.
- A line has the time, the id and the name of the key, the client's address, the kind of the operation, the name of its
  queue, its parameters, and the outcome: "ok" or the code of the error.
- No line has a payload, a header, a key or an id of a key of an item, a secret, or the message of an error (which may
  quote what was sent). Parameters are those that `_PARAMETERS` lists, and of these only numbers and names.
- Refusals are bounded, so that nobody can fill the disk with them: REFUSALS_AT_ONCE lines, and one more each second.
  The next line says how many were left out.
A line that cannot be written to the file is still on the logger, and the failure is logged. The operation is not
undone.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.operations import (
    CancelItems,
    ClearItems,
    CompactQueue,
    CreateQueue,
    CutLogs,
    DeleteQueue,
    EnsureQueue,
    FindQueue,
    Operation,
    PauseQueue,
    RedriveItems,
    ReleaseKey,
    RescheduleItems,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    UpdateQueue,
)
from penstock.rules.options import OPTION_NAMES, check_name
from penstock.server.access import QueueNames
from penstock.server.api_keys import ApiKey, is_key_text
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import AccessDenied, InvalidRequest, PenstockError, Unauthenticated
from penstock.words.limits import Retention

_audit = logging.getLogger("penstock.audit")
_log = logging.getLogger("penstock")
REFUSALS_AT_ONCE = 100
MAX_CLIENT = 100

_PARAMETERS: Mapping[type[Operation[Any]], tuple[str, ...]] = {
    CreateQueue: ("options", "partitions", "exist_ok"),
    EnsureQueue: ("options", "partitions", "resize"),
    UpdateQueue: ("changes",),
    ResizeQueue: ("partitions",),
    SetReadOnly: ("partition", "read_only"),
    DeleteQueue: (),
    PauseQueue: ("lease", "produce", "partition"),
    CompactQueue: ("partition",),
    CutLogs: (),
    ClearItems: ("states", "partition"),
    CancelItems: ("items",),
    RescheduleItems: ("items", "at", "delay"),
    SeekItems: ("start", "skip"),
    RedriveItems: ("to", "items"),
    ReleaseKey: (),
}
"""The parameters that are logged, for every operation that needs "admin". Not `ReleaseKey.key`: with this hash anyone
who reads the log could test which key it was."""
AUDITED = frozenset(_PARAMETERS)


class AuditLog:
    """Writes the audit log."""

    def __init__(self, path: str | None = None, *, clock: Clock | None = None) -> None:
        """path: a file that lines are appended to, readable by its user only. Raises OSError if it cannot be opened."""
        self.path = path
        self._clock = clock or SystemClock()
        self._file = _open(path) if path is not None else None
        self._file_failed = False
        self._refusals_left = REFUSALS_AT_ONCE
        self._refilled_at = self._clock.read().elapsed
        self._left_out = 0

    def record(
        self,
        operation: Operation[Any] | None,
        error: PenstockError | None,
        *,
        key: ApiKey | None,
        client: str,
        name_of: QueueNames = lambda _: None,
    ) -> None:
        """Write what was asked for and its outcome, if that is to be audited.

        operation: None if the request was refused before it was read.
        error: None when it succeeded.
        client: its address.
        """
        is_refusal = isinstance(error, AccessDenied | Unauthenticated)
        if not (is_refusal or type(operation) in AUDITED) or (is_refusal and not self._may_write_refusal()):
            return
        known_id = key.id if key is not None else error.key_id if isinstance(error, Unauthenticated) else ""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(self._clock.read().wall / SECOND, UTC).isoformat(timespec="milliseconds"),
            "key": known_id,
            "key_name": key.name if key is not None else "",
            "client": client[:MAX_CLIENT],
            "operation": "" if operation is None else type(operation).__name__,
            "queue": "" if operation is None else _queue_name(operation, name_of),
            "parameters": {} if operation is None else _parameters(operation, name_of),
            "outcome": "ok" if error is None else error.code,
        }
        if self._left_out:
            line["refusals_left_out"] = self._left_out
            self._left_out = 0
        self._write(msgspec.json.encode(line))

    def reopen(self) -> None:
        """Open the file again, after a log rotation has renamed it. If that fails, the old one stays open."""
        if self.path is None:
            return
        try:
            opened = _open(self.path)
        except OSError as error:
            _log.error("the audit log %s cannot be opened again, the file that was open is used on: %s", self.path, error)
            return
        self.close()
        self._file = opened

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _may_write_refusal(self) -> bool:
        now = self._clock.read().elapsed
        more = (now - self._refilled_at) // SECOND
        self._refilled_at += more * SECOND
        self._refusals_left = min(REFUSALS_AT_ONCE, self._refusals_left + more)
        if not self._refusals_left:
            self._left_out += 1
            return False
        self._refusals_left -= 1
        return True

    def _write(self, line: bytes) -> None:
        _audit.info("%s", line.decode())
        if self._file is None:
            return
        try:
            written = os.write(self._file, line + b"\n")
            if written <= len(line):
                raise OSError(f"{written} of {len(line) + 1} bytes were written")
            self._file_failed = False
        except OSError as error:
            if not self._file_failed:
                _log.error("the audit log %s cannot be written, its lines are only on the logger penstock.audit: %s", self.path, error)
            self._file_failed = True


def _open(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


# -- what is logged of an operation ---------------------------------------------------------------------


def _queue_name(operation: Operation[Any], name_of: QueueNames) -> str:
    given = operation.name if isinstance(operation, CreateQueue | EnsureQueue | FindQueue) else ""
    return _name(given) if given else _name_or_number(operation.queue, name_of)


def _name_or_number(incarnation: int, name_of: QueueNames) -> str:
    return name_of(incarnation) or (f"{incarnation:016x}" if incarnation > 0 else "")


def _name(given: object) -> str:
    """A name that a queue can have; any other text, and that of an API key, is not logged."""
    try:
        name = check_name(given)
    except InvalidRequest:
        return "(not a name)"
    return "(an API key)" if is_key_text(name) else name


def _parameters(operation: Operation[Any], name_of: QueueNames) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _PARAMETERS.get(type(operation), ()):
        value = getattr(operation, name)
        if name in ("options", "changes"):
            found |= _options(value)
        elif name == "to":
            found[name] = _name_or_number(value, name_of)
        elif name == "items":
            found[name] = "all" if value is None else sum(map(len, value.values())) if isinstance(value, Mapping) else len(value)
        elif value is not None:
            found[name] = _plain(value)
    return found


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a queue that there are; their values are numbers, names, and a retention."""
    found: dict[str, Any] = {}
    for name in OPTION_NAMES:
        if name not in given:
            continue
        value = given[name]
        if isinstance(value, Retention):
            value = msgspec.structs.asdict(value)
        if isinstance(value, Mapping):
            value = {field: _plain(value[field]) for field in Retention.__struct_fields__ if field in value}
        found[name] = value if isinstance(value, dict) else _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Numbers, and texts that could be names, as they are; the states and offsets of items; nothing else."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _name(value) if value else ""
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(inner) for name, inner in value.items()}
    return [_plain(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, bytes) else "(not shown)"
