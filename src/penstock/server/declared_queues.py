"""Queues that the settings of a server declare: they are created or changed when it starts.

Owns: `DeclaredQueue`, `read_queues` (from the tables of a TOML file), `compare` (what is different in the broker) and
`apply`. The rule is that of `ensure_queue`: a missing queue is created, an existing one gets the options that its table
names. It keeps its number of partitions, unless the table has `resize = true`: if somebody has resized it since the
file was written, a restart must not undo that, so it is only reported.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.api.arguments import check_flag
from penstock.api.options import to_catalog
from penstock.operations import EnsureQueue, FindQueue, Home
from penstock.reports import QueueDescription
from penstock.rules.options import OPTION_NAMES, Options, changed_options, check_name, merged
from penstock.words.errors import InvalidRequest, PenstockError, QueueNotFound
from penstock.words.limits import MAX_PARTITIONS, check_range
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
ENTRIES = ("partitions", "resize", *OPTION_NAMES)
"""What the table of a queue may have."""
Change: TypeAlias = Literal["create", "update", "resize", "keep"]
"""What happens to a queue; "keep": its number of partitions differs and stays."""


class DeclaredQueue(msgspec.Struct, frozen=True):
    """A queue as the settings declare it."""

    name: str
    partitions: int | None = None
    options: dict[str, Any] = {}
    """Some of the options of `create_queue`."""
    resize: bool = False
    """Whether an existing queue is resized to `partitions`."""


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
    steps: list[EnsureQueue]
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
    resize = check_flag("resize", table.get("resize", False))
    if resize and partitions is None:
        raise InvalidRequest("resize is true, and partitions is not given; give the number of partitions")
    options = {entry: _read_option(entry, value) for entry, value in table.items() if entry in OPTION_NAMES}
    merged(Options(), to_catalog(options))
    return DeclaredQueue(name, partitions, options, resize)


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
            differences = [QueueDifference(queue.name, "create", f"is created, with {_partitions(count)}")]
        else:
            differences = [*_compare_options(existing, queue, found.problems), *_compare_width(existing, queue)]
        found.differences.extend(differences)
        if any(one.change != "keep" for one in differences):
            options = to_catalog(queue.options)
            found.steps.append(EnsureQueue(name=queue.name, options=options, partitions=queue.partitions, resize=queue.resize))
    found.problems.extend(_dead_queue_problems(home, declared))
    return found


def apply(home: Home, comparison: Comparison) -> None:
    """Create and change the queues. What cannot be changed at the moment is logged."""
    for difference in comparison.differences:
        if difference.change == "keep":
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


def _compare_options(existing: QueueDescription, queue: DeclaredQueue, problems: list[str]) -> Iterator[QueueDifference]:
    wanted = merged(existing.options, to_catalog(queue.options))
    given, fixed = wanted.durability or NONE, existing.options.durability or NONE
    if given != fixed:
        problems.append(
            f"queues.{queue.name}: durability is {given}, and that of the queue, {fixed}, cannot be changed; "
            "leave it out, or make another queue"
        )
        return
    changed = changed_options(existing.options, wanted)
    if changed:
        yield QueueDifference(queue.name, "update", ", ".join(changed))


def _compare_width(existing: QueueDescription, queue: DeclaredQueue) -> Iterator[QueueDifference]:
    if queue.partitions is None or queue.partitions == existing.partitions:
        return
    text = f"{_partitions(existing.partitions)} → {queue.partitions}"
    if queue.resize:
        yield QueueDifference(queue.name, "resize", text)
    else:
        advice = f"resize = true in its table, or: penstock queue resize {queue.name} {queue.partitions}"
        yield QueueDifference(queue.name, "keep", f"{text} is left as it is; to change it: {advice}")


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
