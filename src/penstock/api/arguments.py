"""Checks of the arguments of API calls, and conversion of answers; the async and the sync API share them.

Owns: the checks, `ListedItem` and `FoundPage`. No I/O. A wrong argument raises `InvalidRequest` here, before anything
is sent.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from penstock import reports
from penstock.api.items import Item, ItemSource, NewItem, to_batch
from penstock.operations import TIMEOUT
from penstock.rules.item_states import ItemState
from penstock.rules.routing import digest, key_id
from penstock.words import values
from penstock.words.batch import Batch, check_name, validate
from penstock.words.clock import MINUTE, SECOND
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.ids import LAST_PARTITION, format_id, parse_id
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_DELAY, MAX_LEASE_TIMEOUT, MAX_NAME_BYTES, MIN_LEASE_TIMEOUT, check_range
from penstock.words.values import Value

Seconds: TypeAlias = float | timedelta
RequestId: TypeAlias = str | bytes
Start: TypeAlias = datetime | str | Mapping[int, int]
E = TypeVar("E", bound=PenstockError)


class NamedQueue(Protocol):
    """A Queue or an AsyncQueue."""

    @property
    def name(self) -> str: ...


MAX_WAIT = 15 * MINUTE
STATES = tuple(state.value for state in ItemState)
_DEFAULT_TIMEOUT = TIMEOUT // SECOND
CLEARABLE = ("ready", "scheduled", "leased", "buried")


# -- arguments ---------------------------------------------------------------------------------------


def bounded_duration(given: Seconds, name: str, low: int = 0, high: int = MAX_DELAY) -> int:
    """A duration in microseconds, checked to be within `low` and `high`."""
    try:
        found = values.duration(given, name)
    except InvalidRequest:
        if isinstance(given, bool) or not isinstance(given, int | float | timedelta):
            raise
        found = -1
    if not low <= found <= high:
        raise InvalidRequest(f"{name} is {given}; give {low / SECOND:g} to {high // SECOND} seconds, or a timedelta")
    return found


def wait_timeout(given: Seconds, name: str = "timeout") -> int:
    """How long a call may wait, in microseconds."""
    return TIMEOUT if given == _DEFAULT_TIMEOUT else bounded_duration(given, name, 0, MAX_WAIT)


def lease_duration(given: Seconds | None, name: str = "lease_timeout") -> int:
    """How long a lease lasts, in microseconds; 0 is the default of the queue."""
    return 0 if given is None else bounded_duration(given, name, MIN_LEASE_TIMEOUT, MAX_LEASE_TIMEOUT)


def request_bytes(request_id: RequestId | None) -> bytes | None:
    """A request id as bytes, checked."""
    if request_id is None:
        return None
    name = values.encode_key(request_id, "request id")
    if not 1 <= len(name) <= MAX_NAME_BYTES:
        raise InvalidRequest(f"the request id has {len(name)} bytes; give 1 to {MAX_NAME_BYTES}, or None for no request id")
    return name


def chunk_request(request: bytes | None, number: int) -> bytes | None:
    """The request id of one chunk, of a call that is sent in several."""
    return None if request is None else digest(b"penstock.chunk", request, number.to_bytes(8, "big"))


def check_flag(name: str, given: object) -> bool:
    if type(given) is not bool:
        raise InvalidRequest(f"{name} is {type(given).__name__}; give True or False")
    return given


def check_text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise InvalidRequest(f"{name} is {type(given).__name__}; give a text")
    return given


def optional_text(name: str, given: object) -> str | None:
    """A secret is not repeated in the message."""
    return None if given is None else check_text(name, given)


def optional_path(name: str, given: object) -> str | None:
    if given is None:
        return None
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidRequest(f"{name} is {given!r:.80}; give the path of a file")
    return path


def partition_number(partition: int | None) -> int | None:
    return None if partition is None else check_range("partition", partition, 0, LAST_PARTITION)


def page_limit(limit: int) -> int:
    return check_range("limit", limit, 1, MAX_BATCH_ITEMS)


def states_of(given: str | Sequence[str] | None) -> list[Any]:
    """The states to list items of, checked; an empty list is all states."""
    if given is not None and not isinstance(given, str) and not (isinstance(given, Sequence) and given):
        raise InvalidRequest(f"state is {given!r:.80}; use one or some of {', '.join(STATES)}, or leave it out")
    found = [] if given is None else [given] if isinstance(given, str) else list(given)
    for state in found:
        if state not in STATES:
            raise InvalidRequest(f"there is no state {state!r}; use {', '.join(STATES)}")
    return found


def states_to_clear(state: str) -> list[Any]:
    """The states that `clear` names, checked."""
    if state != "all" and state not in CLEARABLE:
        raise InvalidRequest(f"there is no state {state!r} to clear; use {', '.join(CLEARABLE)} or all")
    return [clearable for clearable in CLEARABLE if state in (clearable, "all")]


def pause_changes(lease: bool, produce: bool, paused: bool) -> dict[str, Any]:
    """The flags of a `PauseQueue` operation: True pauses, False resumes, None does not change."""
    if not check_flag("lease", lease) and not check_flag("produce", produce):
        verb = "pause" if paused else "resume"
        raise InvalidRequest(f"there is nothing to {verb}; leave lease or produce True")
    return {"lease": paused if lease else None, "produce": paused if check_flag("produce", produce) else None}


def seek_start(item_id: str | None, at: datetime | None) -> dict[int, int] | int:
    """Where `seek` begins: {partition: offset}, or a time in wall microseconds."""
    if item_id is not None and at is None:
        return dict([parse_id(item_id)])
    if item_id is None and at is not None:
        return values.instant(at)
    raise InvalidRequest("seek takes either an id or a time; give an id, or at=")


def cursor_start(start: Start, name: str = "start") -> Literal["oldest", "newest"] | int | dict[int, int]:
    """Where a cursor begins: at an end, at a time in wall microseconds, or at an offset of each of these partitions.

    name: the argument that gave it.
    """
    if isinstance(start, Mapping):
        if not start:
            raise InvalidRequest(f"{name} is an empty mapping; give {{partition: offset}}")
        return {
            check_range(f"a partition of {name}", number, 0, LAST_PARTITION): check_range(f"an offset of {name}", offset, 0, 1 << 60)
            for number, offset in start.items()
        }
    if not isinstance(start, str):
        return values.instant(start, name)
    if start in ("oldest", "newest"):
        return "oldest" if start == "oldest" else "newest"
    try:
        return dict([parse_id(start)])
    except InvalidRequest:
        advice = "give 'oldest', 'newest', a datetime, the id of an item or {partition: offset}"
        raise InvalidRequest(f"{name} is {start!r:.80}; {advice}") from None


def cursor_name(name: str) -> str:
    check_name("cursor's name", name)
    if not name:
        raise InvalidRequest("the cursor has no name; give one")
    return name


def positions_of(given: "Sequence[str | Item]") -> list[tuple[int, int]]:
    """The partition and offset of each item, given by its id or as an Item."""
    check_range("the number of items", len(given), 0, MAX_BATCH_ITEMS)
    for one in given:
        if isinstance(one, list | tuple | set | frozenset):
            raise InvalidRequest(f"an item is given as {type(one).__name__}; give the items one by one, as in cancel(*items)")
    return [(one.partition, one.offset) if isinstance(one, Item) else parse_id(one) for one in given]


def new_time(at: datetime | None, delay: Seconds | None) -> tuple[int, int]:
    """The time (wall microseconds) or the delay (microseconds) that `reschedule` is given; both 0: now."""
    if (at is None) == (delay is None):
        raise InvalidRequest("reschedule takes either a time or a delay; give at= or delay=, delay=0 for now")
    return (values.instant(at), 0) if at is not None else (0, bounded_duration(delay if delay is not None else 0, "delay"))


def key_and_reference(key: str | bytes | None, reference: str | None) -> tuple[bytes | None, str | None]:
    """What `find` looks for, checked."""
    if key is None and reference is None:
        raise InvalidRequest("neither a key nor a reference is given; give one of them, or list the items with items()")
    return None if key is None else values.encode_key(key), optional_text("reference", reference)


def key_id_of(key: str | bytes) -> int:
    return key_id(values.encode_key(key))


def queue_name(given: "str | NamedQueue") -> str:
    """The name of a queue that is given by name or as a Queue."""
    name = getattr(given, "name", given)
    if not isinstance(name, str):
        raise InvalidRequest(f"the queue is {type(given).__name__}; give its name, or a Queue")
    return name


def follow_ups(items: Sequence[NewItem | Value]) -> dict[str | None, Batch]:
    """The follow-ups of `complete(then=…)` by queue name; None is the queue of the completed item."""
    if isinstance(items, NewItem | str | bytes | Mapping) or not isinstance(items, Sequence):
        raise InvalidRequest(f"then is {type(items).__name__}; give a list of NewItem")
    shares: dict[str | None, list[NewItem | Value]] = {}
    for item in items:
        shares.setdefault(item.queue if isinstance(item, NewItem) else None, []).append(item)
    for name in shares:
        if name is not None:
            check_text("the queue of a follow-up", name)
    return {name: validate(to_batch(share, follow_ups=True)) for name, share in shares.items()}


# -- answers -----------------------------------------------------------------------------------------


def copy_error(error: E, **attributes: object) -> E:
    """A copy of the error with more attributes. The original may have been given to several callers."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    vars(copy).update(attributes)
    return copy


class ListedItem(Item):
    """An item as `queue.items` returns it: an `Item` with its state and the reason of its last failure."""

    __slots__ = ("_buried_at", "_ends", "reason", "state")

    def __init__(self, source: ItemSource, found: reports.ListedItemData) -> None:
        super().__init__(source, found.partition, found.offset, found.batch, found.index, found.produced_at, found.attempts)
        self.state = found.state
        """"ready", "scheduled", "leased", "completed", "buried" or "moving"."""
        self.reason = found.reason
        """Why it was buried or last retried; "" if it never failed."""
        self._ends = found.lease_ends_at, found.expires_at
        self._buried_at = found.buried_at

    @property
    def lease_ends_at(self) -> datetime | None:
        """When the lease that holds the item ends unless it is extended; None if it is not leased."""
        return values.timestamp(self._ends[0]) if self._ends[0] else None

    @property
    def expires_at(self) -> datetime | None:
        """When it is buried if it still waits: the end of its ttl; None for never."""
        return values.timestamp(self._ends[1]) if self._ends[1] else None

    @property
    def buried_at(self) -> datetime | None:
        """When it was buried, in this queue or in the one that it came from; None if it was not."""
        if self._buried_at:
            return values.timestamp(self._buried_at)
        return None if self.origin is None else self.origin.buried_at

    def __reduce__(self) -> tuple[Any, ...]:
        alone = self._batch.slice(self._index, self._index + 1)
        fields = (self.partition, self.offset, self.state, alone, 0, self._produced_at, self.attempts, self.reason, *self._ends)
        return ListedItem, (self._source, reports.ListedItemData(*fields, buried_at=self._buried_at))

    def __repr__(self) -> str:
        because = f", reason={self.reason!r}" if self.reason else ""
        return f"Listed{super().__repr__()[:-1]}, state={self.state!r}{because})"


class FoundPage(list[ListedItem]):
    """The items that one call of `queue.find` found, and where to go on."""

    def __init__(self, items: Iterable[ListedItem], after: str | None) -> None:
        super().__init__(items)
        self.after = after
        """Give it to the next call; None: the whole queue was scanned."""

    def __repr__(self) -> str:
        return f"FoundPage({super().__repr__()}, after={self.after!r})"


def found_page(source: ItemSource, found: reports.FoundItems) -> FoundPage:
    after = None if found.after is None else format_id(*found.after)
    return FoundPage([ListedItem(source, one) for one in found.items], after)
