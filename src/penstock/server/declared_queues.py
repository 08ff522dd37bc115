"""Queues that the settings of a server declare: they are created or changed when it starts.

Owns: `DeclaredQueue`, `read_queues` (from the tables of a TOML file), `compare` (what is different in the broker) and
`apply`. What a table does not name is left as it is. A queue gets more partitions, but never fewer: if somebody has
made it wider since the file was written, a restart must not undo that, so it is only reported.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.api.options import QueueInfo, queue_info, to_catalog
from penstock.operations import CreateQueue, FindQueue, Home, Operation, ResizeQueue, UpdateQueue
from penstock.reports import QueueDescription
from penstock.rules.options import OPTION_NAMES, Options, check_name, merged
from penstock.words.errors import InvalidRequest, PenstockError, QueueNotFound
from penstock.words.limits import MAX_PARTITIONS, Retention, check_range
from penstock.words.quantities import parse_duration, parse_size

_log = logging.getLogger("penstock")
NONE = "none"
"""In a file: no value, for options that may have none."""
_DURATIONS = ("lease_timeout", "ttl", "priority_aging", "dedup_window", "sync_interval", "segment_age")
_SIZES = ("max_bytes", "segment_bytes", "compression_min_bytes")
_MAY_BE_NONE = (
    *("ttl", "priority_aging", "max_items", "max_bytes", "dead_queue", "durability", "sync_interval"),
    *("segment_bytes", "segment_age", "compression", "compression_level", "compression_min_bytes"),
)
ENTRIES = ("partitions", *OPTION_NAMES)
"""What the table of a queue may have."""
Change: TypeAlias = Literal["create", "update", "grow", "shrink"]


class DeclaredQueue(msgspec.Struct, frozen=True):
    """A queue as the settings declare it."""

    name: str
    partitions: int | None = None
    options: dict[str, Any] = {}
    """Some of the options of `create_queue`."""


class QueueDifference(msgspec.Struct, frozen=True):
    """Something that a declared queue is not yet."""

    queue: str
    change: Change
    text: str

    def __str__(self) -> str:
        return f"queue {self.queue}: {self.text}"


class Comparison(msgspec.Struct, frozen=True):
    """The declared queues beside those of the broker."""

    differences: list[QueueDifference]
    problems: list[str]
    """Why they cannot be made as they are declared."""
    steps: list[Operation[Any]]
    """What `apply` does."""


# -- the file ----------------------------------------------------------------------------------------


def read_queues(tables: Mapping[str, Any]) -> tuple[list[DeclaredQueue], list[str]]:
    """The queues of the table `queues` of a TOML file, and what is wrong with them."""
    found, problems = [], []
    for name, table in tables.items():
        try:
            found.append(_read_queue(name, table))
        except InvalidRequest as error:
            problems.append(f"queues.{name}: {error}")
    return found, problems


def _read_queue(name: str, table: Any) -> DeclaredQueue:
    check_name(name)
    if not isinstance(table, Mapping):
        raise InvalidRequest(f"it is {table!r}; give a table, such as [queues.{name}]")
    for entry, value in table.items():
        if entry not in ENTRIES:
            dotted = f' (a name with dots is written [queues."{name}.{entry}"])' if isinstance(value, Mapping) else ""
            raise InvalidRequest(f"{entry} is unknown{dotted}; use any of {', '.join(ENTRIES)}")
    partitions = table.get("partitions")
    if partitions is not None:
        check_range("partitions", partitions, 1, MAX_PARTITIONS)
    options = {entry: _read_option(entry, value) for entry, value in table.items() if entry != "partitions"}
    merged(Options(), to_catalog(options))
    return DeclaredQueue(name, partitions, options)


def _read_option(name: str, value: Any) -> Any:
    """An option as `create_queue` takes it: durations and sizes may be text."""
    if name == "retention":
        if isinstance(value, Mapping):
            return {field: _read_number(f"retention.{field}", value, field) for field, value in value.items()}
        return parse_duration(value, name) if isinstance(value, str) else value
    if name in _MAY_BE_NONE and value == NONE:
        return None
    return _read_number(name, value, name)


def _read_number(name: str, value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    if field in _DURATIONS or field == "max_age":
        return parse_duration(value, name)
    return parse_size(value, name) if field in _SIZES else value


# -- the broker --------------------------------------------------------------------------------------


def compare(home: Home | None, declared: Sequence[DeclaredQueue]) -> Comparison:
    """What is different in a broker. None: it does not exist yet, and has no queues."""
    found = Comparison([], [], [])
    # A queue that is the dead queue of another has none itself: those without one come first.
    for queue in sorted(declared, key=lambda queue: bool(queue.options.get("dead_queue"))):
        existing = _find(home, queue.name)
        if existing is None:
            count = queue.partitions or 1
            found.differences.append(QueueDifference(queue.name, "create", f"is created, with {_partitions(count)}"))
            found.steps.append(_creation(queue))
        else:
            _compare_options(existing, queue, found)
            _compare_width(existing, queue, found)
    found.problems.extend(_dead_queue_problems(home, declared))
    return found


def apply(home: Home, comparison: Comparison) -> None:
    """Create and change the queues. What cannot be changed at the moment is logged."""
    for difference in comparison.differences:
        if difference.change == "shrink":
            _log.warning("%s", difference)
        else:
            _log.info("%s", difference)
    for step in comparison.steps:
        try:
            home.call(step)
        except PenstockError as error:
            if not error.retryable:
                raise
            _log.error("a declared queue is not changed now: %s", error)


def _find(home: Home | None, name: str) -> QueueDescription | None:
    try:
        return None if home is None else home.call(FindQueue(name=name))
    except QueueNotFound:
        return None


def _creation(queue: DeclaredQueue) -> CreateQueue:
    options = to_catalog(queue.options)
    given = options if queue.partitions is None else {**options, "partitions": queue.partitions}
    return CreateQueue(name=queue.name, options=options, partitions=queue.partitions or 1, exist_ok=True, given=given)


def _compare_options(existing: QueueDescription, queue: DeclaredQueue, found: Comparison) -> None:
    wanted = msgspec.structs.replace(existing, options=merged(existing.options, to_catalog(queue.options)))
    before, after = _option_values(queue_info(existing)), _option_values(queue_info(wanted))
    changed = [name for name in after if after[name] != before[name]]
    if not changed:
        return
    if "durability" in changed:
        found.problems.append(
            f"queues.{queue.name}: durability is {after['durability']}, and that of the queue, {before['durability']}, cannot be changed; "
            "leave it out, or make another queue"
        )
        return
    text = ", ".join(f"{name} {before[name]} → {after[name]}" for name in changed)
    found.differences.append(QueueDifference(queue.name, "update", text))
    found.steps.append(UpdateQueue(queue=existing.incarnation, changes=to_catalog(queue.options)))


def _compare_width(existing: QueueDescription, queue: DeclaredQueue, found: Comparison) -> None:
    if queue.partitions is None or queue.partitions == existing.partitions:
        return
    text = f"{_partitions(existing.partitions)} → {queue.partitions}"
    if queue.partitions < existing.partitions:
        advice = f"a server makes no queue narrower: penstock queue resize {queue.name} {queue.partitions}"
        found.differences.append(QueueDifference(queue.name, "shrink", f"{text} is left as it is; {advice}"))
        return
    found.differences.append(QueueDifference(queue.name, "grow", text))
    found.steps.append(ResizeQueue(queue=existing.incarnation, partitions=queue.partitions))


def _dead_queue_problems(home: Home | None, declared: Sequence[DeclaredQueue]) -> list[str]:
    by_name = {queue.name: queue for queue in declared}
    problems = []
    for queue in declared:
        dead = queue.options.get("dead_queue")
        if not dead:
            continue
        existing = _find(home, dead)
        if dead == queue.name:
            problems.append(f"queues.{queue.name}: it cannot be its own dead queue; name another")
        elif dead not in by_name and existing is None:
            problems.append(f"queues.{queue.name}: there is no queue {dead!r} to be its dead queue; declare it too")
        else:
            former = None if existing is None else existing.options.dead_queue
            declared_dead = by_name[dead].options.get("dead_queue", former) if dead in by_name else former
            if declared_dead:
                problems.append(f"queues.{queue.name}: queue {dead!r} has a dead queue of its own, so it cannot be one; choose another")
    return problems


# -- text --------------------------------------------------------------------------------------------


def _partitions(count: int) -> str:
    return f"{count} partition{'' if count == 1 else 's'}"


def _option_values(info: QueueInfo) -> dict[str, str]:
    """The options as text, those of the retention by their own names."""
    values: dict[str, Any] = {name: getattr(info, name) for name in OPTION_NAMES if name != "retention"}
    kept: Mapping[str, Any] = {**info.retention}
    values |= {f"retention.{name}": kept[name] for name in Retention.__struct_fields__}
    return {name: _text(name.rpartition(".")[2], value) for name, value in values.items()}


def _text(name: str, value: Any) -> str:
    if value is None:
        return NONE
    return f"{value:g}s" if name in (*_DURATIONS, "max_age") else str(value)
