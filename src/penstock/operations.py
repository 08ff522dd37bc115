"""The operations that a broker answers, whatever its kind.

Owns: `Operation` and every kind of it, `Home`. An operation is plain data. Its type names its answer
(`ReadStats` is an `Operation[QueueStats]`, so `home.call(ReadStats(queue=1))` is a `QueueStats`) and the scope that an
API key needs for it. A home answers operations: the broker of this process, a read-only snapshot of a directory, or a
client of a directory that another process owns. Callers use them all in the same way, and only through `Home`.
Durations are microseconds from now, never instants: the clocks of caller and home differ. A queue is named by its
incarnation, which `FindQueue` gives.
`call` raises errors, `submit` passes them to the callback. Where an answer has several parts, each part says whether it
was refused (`Refused`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, Union, get_args

import msgspec

from penstock.logs.log import ReadableLog
from penstock.logs.store import StagedPart, Staging
from penstock.loop.item_cache import Items
from penstock.loop.requests import LeaseResult, SettleAction, SettlePart, StoredPart
from penstock.loop.retention import RetentionResult
from penstock.reports import (
    BackupPoint,
    BrokerMetrics,
    FoundItems,
    GrantAnswer,
    HeldKey,
    ItemChange,
    ItemEvent,
    ItemExplanation,
    ItemLease,
    ItemTrace,
    ListedItemData,
    OwnerDescription,
    QueueDescription,
    QueueStats,
    StreamGrant,
)
from penstock.rules.commands import Call, Settled
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, Clock
from penstock.words.errors import InvalidRequest, PenstockError, Refused
from penstock.words.limits import MAX_BATCH_ITEMS
from penstock.words.sources import MAX_SOURCE_LENGTH, WriteContent

A = TypeVar("A")
Scope: TypeAlias = Literal["look", "read", "produce", "consume", "admin"]
"""What an API key may allow: "look" at counts, states and reasons, "read" items as well, "produce", "consume" (lease
and settle), or "admin" (everything)."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Offsets: TypeAlias = dict[Count, Count]
"""partition → offset"""
ChosenItems: TypeAlias = Mapping[Count, Sequence[Count]]
"""partition → offsets"""
StreamName: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
StreamRun: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
StateName: TypeAlias = Literal["scheduled", "ready", "leased", "completed", "buried", "moving", "cancelled"]
TIMEOUT = 30 * SECOND
"""How long a call may take by default."""


class Operation(msgspec.Struct, Generic[A], kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request to a home; A is the type of its answer."""

    scope: ClassVar[Scope] = "admin"
    queue: int = 0
    """The incarnation of the queue; 0 for an operation on the broker."""
    call: Call | None = None
    """Which call it is of which session of a client; None when it is never repeated."""


class Query(Operation[A], Generic[A]):
    """An operation that changes nothing: a snapshot answers it too."""

    scope: ClassVar[Scope] = "look"


# -- items: produce, lease, settle -------------------------------------------------------------------


class ProduceItems(Operation[list[StoredPart]]):
    """Store items. Each partition answers for the part that it stored or refused."""

    scope: ClassVar[Scope] = "produce"
    batch: Batch
    wait: int = TIMEOUT
    """How long to wait for room in a full queue."""
    request: bytes | None = None
    """Request id: a repetition with the same id adds nothing."""


class LeaseItems(Operation[list[LeaseResult]]):
    """Lease items. Answers with a part for each partition that had some, or with no parts when the wait is over."""

    scope: ClassVar[Scope] = "consume"
    count: int = 1
    wait: int = 0
    consumer: str = ""
    timeout: int = 0
    """How long the lease lasts; 0: the queue's lease timeout."""
    per_key: int = 1
    request: bytes | None = None


class SettleItems(Operation[list[Settled | Refused]]):
    """Complete, retry, bury or extend items of leases. Each part has its own answer."""

    scope: ClassVar[Scope] = "consume"
    action: SettleAction
    parts: Sequence[SettlePart]
    delay: int = 0
    reason: str = ""
    counted: bool = True
    """For a retry: whether the attempt counts."""
    timeout: int = 0
    """For an extension: how long the leases last from now; 0: their first duration."""
    then: Sequence[tuple[int, Batch]] = ()
    """Follow-ups of a completion: (queue, items)."""
    request: bytes | None = None
    wait: int = TIMEOUT


class ReportProgress(Operation[None]):
    """The consumer reports the progress of an item that it has leased."""

    scope: ClassVar[Scope] = "consume"
    partition: int
    lease: int
    offset: int
    text: str


class FindLeases(Query[list[ItemLease]]):
    """The lease that holds each of these items now, for consumers that know only the ids of their items.

    It cannot tell a late consumer from the one that has the item now, as the lease number of an answer to LeaseItems
    does.
    """

    scope: ClassVar[Scope] = "consume"
    items: ChosenItems


# -- queues ------------------------------------------------------------------------------------------


class FindQueue(Query[QueueDescription]):
    """The queue of this name; without a name, the queue of this incarnation."""

    name: str = ""
    marks: bool = False
    """Whether the answer has the marks of the last resizes."""


class ListQueues(Query[list[QueueDescription]]):
    """Queues in the order of their names, those after the name `after`."""

    prefix: str = ""
    prefixes: Sequence[str] | None = None
    """Only names that begin with one of these as well; None: all."""
    after: str = ""
    limit: int = 100


class CreateQueue(Operation[QueueDescription]):
    """Create a queue.

    With `exist_ok` an existing queue of that name is given, if it agrees with `given`: the options that the user named.
    It may have another number of partitions.
    """

    name: str
    options: dict[str, Any] = {}
    partitions: int = 1
    exist_ok: bool = False
    given: dict[str, Any] = {}


class EnsureQueue(Operation[QueueDescription]):
    """Create a queue if there is none of that name; else change the options that are named and different.

    The partitions of an existing queue are changed only with `resize`. If one of the options cannot be changed, nothing
    is. Calls of several programs are executed one after the other.
    """

    name: str
    options: dict[str, Any] = {}
    partitions: int | None = None
    """None: 1 if the queue is created."""
    resize: bool = False


class UpdateQueue(Operation[QueueDescription]):
    """Change the options that are named."""

    changes: dict[str, Any]


class ResizeQueue(Operation[QueueDescription]):
    partitions: int


class SetReadOnly(Operation[QueueDescription]):
    """Make a partition read-only (its items can be leased, but it takes no new ones), or undo that."""

    partition: int
    read_only: bool = True


class DeleteQueue(Operation[None]):
    """Remove a queue with all its items, once no transfer to or from it is under way."""

    wait: int = TIMEOUT


class ReadSlotMap(Query[bytes]):
    """The slot map of the queue, packed (rules/slots.py)."""


class PauseQueue(Operation[None]):
    """Pause (True) or resume (False) leasing and producing; None changes nothing."""

    lease: bool | None = None
    produce: bool | None = None
    partition: int | None = None


class CompactQueue(Operation[list[RetentionResult]]):
    """Apply retention now: delete and rewrite segments."""

    partition: int | None = None


# -- the broker --------------------------------------------------------------------------------------


class DescribeOwner(Query[OwnerDescription]):
    """The process that owns the broker, and its clients."""


class CutLogs(Operation[BackupPoint]):
    """The end of every log at one instant, at which no record depends on one that is behind its log's end.

    For a backup by a process that sees the directory. QueueBusy while a partition is being opened.
    """


# -- the contents of queues --------------------------------------------------------------------------


class ReadStats(Query[QueueStats]): ...


class ReadMetrics(Operation[BrokerMetrics]):
    """Counters and latencies of every queue since the broker was opened. Only the owner has them: not a query."""

    scope: ClassVar[Scope] = "look"


class ExplainItem(Query[ItemExplanation]):
    """Why is this item not running?

    If the item was moved, the answer is about its present position; without `follow` it only names that position.
    """

    partition: int
    offset: int
    follow: bool = True


class TraceItem(Query[ItemTrace]):
    """The position that an item came from, and the one that it was moved to."""

    partition: int
    offset: int


class ReadHistory(Query[list[ItemEvent]]):
    """All events of an item, in every queue that it was in."""

    partition: int
    offset: int


class ListItems(Query[list[ListedItemData]]):
    """Items in these states (none given: all) by partition and offset, those after the position `after`."""

    scope: ClassVar[Scope] = "read"
    states: Sequence[StateName] = ()
    after: tuple[int, int] | None = None
    limit: int = 100


class FindItems(Query[FoundItems]):
    """Items with this key, this reference or both, in these states (none given: all), after the position `after`.

    It scans the queue, a bounded number of items at a time: an answer may have no items although there are some further
    on. `FoundItems.after` says where the next step begins.
    """

    scope: ClassVar[Scope] = "read"
    key: bytes | None = None
    reference: str | None = None
    states: Sequence[StateName] = ()
    after: tuple[int, int] | None = None
    limit: int = 100


class ListHeldKeys(Query[list[HeldKey]]):
    """Keys that are not free. A key is data of its items, like a header, so an API key needs "read" for it."""

    scope: ClassVar[Scope] = "read"
    limit: int = 100


class ClearItems(Operation[int]):
    """Resolve all items in these states, as if they had been completed."""

    states: Sequence[Literal["ready", "scheduled", "leased", "buried"]]
    partition: int | None = None


ItemPositions: TypeAlias = Annotated[Sequence[tuple[Count, Count]], msgspec.Meta(max_length=MAX_BATCH_ITEMS)]
"""(partition, offset) of each item"""


class CancelItems(Operation[list[ItemChange]]):
    """Cancel those of these items that wait: they are resolved for good. Each item has its own outcome."""

    items: ItemPositions


class RescheduleItems(Operation[list[ItemChange]]):
    """Give those of these items that wait another time: `at` (wall), or `delay` from now; neither is now."""

    items: ItemPositions
    at: Count = 0
    delay: Count = 0


class SeekItems(Operation[int]):
    """Make completed items ready again: from an offset on in each of these partitions, or in all from a time on
    (wall). With `skip`: complete the waiting items before that point.
    """

    start: Offsets | int
    skip: bool = False


class RedriveItems(Operation[int]):
    """Send the waiting and buried ones of these items to another queue; or make buried ones ready in the same queue."""

    to: int
    items: ChosenItems | None = None
    """None: all buried items; only within the same queue."""


class ReleaseKey(Operation[int]):
    """Free a parked key. The buried items that it was parked for stay buried."""

    key: int


# -- reading, and cursors ----------------------------------------------------------------------------


class Page(msgspec.Struct):
    """Items by partition, and the offsets from which to read on."""

    items: list[tuple[int, Items]]
    next_offsets: Offsets


class ReadItems(Query[Page]):
    """Retained items from these offsets on, a share from each partition."""

    scope: ClassVar[Scope] = "read"
    start: Offsets
    limit: int = 1_000


class AwaitItems(Query[bool]):
    """Wait until there are items at or beyond these offsets; False when the wait is over."""

    start: Offsets
    wait: int = SECOND


class FindOffsets(Query[Offsets]):
    """For each partition the oldest retained offset, the next offset, or the first item produced since a time
    (wall).
    """

    at: Literal["oldest", "newest"] | int


class ListCursors(Query[dict[str, Offsets]]): ...


class MoveCursor(Operation[None]):
    """Save a reading position. `forward_only`: a cursor that is further already stays where it is."""

    scope: ClassVar[Scope] = "consume"
    name: str
    to: Offsets
    forward_only: bool = False


class PublishLog(Operation[None]):
    """Publish everything up to now in the log of a partition, so that a process which reads its files finds it."""

    scope: ClassVar[Scope] = "read"
    partition: int


class ReleaseCursor(Operation[None]):
    scope: ClassVar[Scope] = "consume"
    name: str


# -- streams that consume a queue (ADR 15) -----------------------------------------------------------


class TakeGrant(Operation[GrantAnswer]):
    """Complete all grants up to `done`, which the stream has committed, and grant up to `want` more items."""

    scope: ClassVar[Scope] = "consume"
    stream: StreamName
    run: StreamRun
    """The stream's process that calls."""
    done: Count
    want: int
    per_key: int
    timeout: int
    """How long the consumer right and the leases last without a renewal."""


class RenewStream(Operation[None]):
    """Renew the stream's right and leases.

    With `reset_after`, failures reported for grants after that number are forgotten: their items are handled again.
    """

    scope: ClassVar[Scope] = "consume"
    stream: StreamName
    run: StreamRun
    timeout: int
    reset_after: Count | None = None


class EndStream(Operation[None]):
    """End the stream's consumer right: other consumers may lease again."""

    scope: ClassVar[Scope] = "consume"
    stream: StreamName
    run: StreamRun


class ReadGrant(Query[StreamGrant]):
    """A grant by its number."""

    scope: ClassVar[Scope] = "consume"
    stream: StreamName
    number: int


class FailGranted(Operation[tuple[int, list[tuple[int, int]]]]):
    """Mark granted items as failed: they are retried or buried when the others are completed.

    Answers how many, and the (partition, offset) of those that are in no grant. Each group has its own reason; for an
    item in several groups the last one counts.
    """

    scope: ClassVar[Scope] = "consume"
    action: Literal["retry", "bury"]
    groups: Sequence[tuple[str, ChosenItems]]
    delay: int = 0


# -- staged writes -----------------------------------------------------------------------------------


class PublishWrite(Operation[bool]):
    """Publish a staged write: its items are adopted all or none, once for each source and number.

    False when the same write was published before and still waits.
    """

    scope: ClassVar[Scope] = "produce"
    write: str
    source: str
    number: int
    parts: Sequence[StagedPart]
    checksum: int | None = None
    """What the write held, for `FindPublished` (WriteContent); None: that is not remembered."""


WriteState: TypeAlias = Literal["unknown", "waiting", "unattended", "adopted"]
"""An "unattended" write waits, and no process that could adopt it has the broker open."""


class FindWrite(Query[WriteState]):
    """The state of the write of a source with this number. A later adopted number counts as well."""

    scope: ClassVar[Scope] = "produce"
    source: str
    number: int


class FindPublished(Query[tuple[int, list[WriteContent]]]):
    """The highest number of a source that was published (0: none), and what its writes held, as far as it is known."""

    scope: ClassVar[Scope] = "produce"
    source: str


class ImportItems(Operation[bool]):
    """Store items of another system, once: they are published as the write of this source and number.

    False when the source is at this number or beyond: nothing is added. InvalidRequest when it is not at `after`: the
    caller has missed what another import did. `FindWrite` tells when the items are in the queue.
    """

    scope: ClassVar[Scope] = "produce"
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SOURCE_LENGTH)]
    after: Count
    """The number before this one; 0 for the first."""
    number: Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
    batch: Batch


class FindImports(Query[dict[str, int]]):
    """The sources whose names begin with a prefix, each with its highest number that was published."""

    scope: ClassVar[Scope] = "produce"
    prefix: str


# -- homes -------------------------------------------------------------------------------------------


AnswerCallback: TypeAlias = Callable[[Any], None]
"""Called with the answer, or with a PenstockError."""
Cancel: TypeAlias = Callable[[], None]


class LeaseDoubt(NamedTuple):
    """Whom to tell when a lease that is extended automatically has ended, or may have."""

    safe_until: int
    """Until then, by the monotonic clock of the home, it lasts without an extension."""
    tell: Callable[[], None]
    """Must not block. Called in any thread; once, and once more after each extension that was followed by none."""


class Home(Protocol):
    """Answers operations."""

    @property
    def clock(self) -> Clock: ...

    def call(self, operation: Operation[A], /) -> A:
        """Wait for the answer. The broker of this process may run the turn in the calling thread (ADR 13)."""
        ...

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """Do not wait: some thread calls `done` with the answer. Gives a function that cancels the operation if
        possible.

        Without `done` the answer is not wanted.
        """
        ...

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: LeaseDoubt | None = None, /) -> None:
        """Extend a lease of so many seconds automatically until `stop_extending`, or until this process ends.

        doubt: whom to tell when the lease has ended, or may have, because the broker could not be reached in time.
        The broker of this process always extends in time, and never calls it.
        """
        ...

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None: ...

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        """The log of a partition up to its published position. The caller closes it."""
        ...

    def staging(self) -> Staging: ...

    def close(self) -> None: ...


def submit_at_once(call: Callable[[Operation[Any]], Any], operation: Operation[Any], done: AnswerCallback | None) -> Cancel:
    """The `submit` of a home that answers in the caller's thread: `done` is called before this returns."""
    try:
        answer = call(operation)
    except PenstockError as error:
        answer = error
    if done is not None:
        done(answer)
    return lambda: None


def submit_each(
    submit: Callable[[Operation[Any], AnswerCallback], Cancel], submitted: Sequence[tuple[Operation[Any], AnswerCallback]]
) -> list[Cancel]:
    """The `submit_all` of a home that submits one operation after the other. Errors are passed to the callbacks."""
    cancels: list[Cancel] = []
    for operation, done in submitted:
        try:
            cancels.append(submit(operation, done))
        except PenstockError as error:
            cancels.append(lambda: None)
            done(error)
    return cancels


# -- encoding ----------------------------------------------------------------------------------------


def _kinds(kind: type[Operation[Any]]) -> list[type[Operation[Any]]]:
    return [found for sub in kind.__subclasses__() for found in ([sub] if not sub.__subclasses__() else _kinds(sub))]


OPERATIONS: tuple[type[Operation[Any]], ...] = tuple(_kinds(Operation))
_DECODER: "msgspec.msgpack.Decoder[Operation[Any]]" = msgspec.msgpack.Decoder(Union[OPERATIONS])  # noqa: UP007 (made from a tuple)
_ENCODER = msgspec.msgpack.Encoder()


def answer_type(kind: type[Operation[Any]]) -> Any:
    """The type of the answer of a kind of operation."""
    return get_args(kind.__orig_bases__[0])[0]  # type: ignore[attr-defined]


def encode(operation: Operation[Any]) -> bytes:
    return _ENCODER.encode(operation)


def decode(raw: bytes) -> Operation[Any]:
    """An operation from its bytes; InvalidRequest when they do not encode one."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the operation cannot be understood ({error}); use the same Penstock on both sides") from error
