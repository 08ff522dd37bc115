"""What can be asked of a broker, of whichever kind, and what it answers.

Owns: `Operation` and every kind of it, `Home`. An operation is plain data: its type names its answer (`ReadStats` is an
`Operation[QueueStats]`, so `home.call(ReadStats(queue=1))` is a `QueueStats`) and the scope that an API key needs for it. A home answers
operations: the broker of this process, a directory that is only looked at, one that another process owns. Nobody who asks needs to know
which of them it is, and nobody reaches behind it.
Durations are microseconds from now, never instants: the clocks of those who ask and answer differ. A queue is named by its incarnation,
which `FindQueue` gives.
Errors are raised (`call`) or passed on (`submit`); of an answer in several parts each part says whether it was refused (`Refused`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar, Union, get_args

import msgspec

from penstock.logs.log import ReadableLog
from penstock.logs.store import StagedPart, Staging
from penstock.loop.item_cache import Items
from penstock.loop.requests import LeaseResult, SettleAction, SettlePart, StoredPart
from penstock.loop.retention import RetentionResult
from penstock.reports import (
    BrokerMetrics,
    GrantAnswer,
    HeldKey,
    ItemEvent,
    ItemExplanation,
    ItemTrace,
    ListedItemData,
    QueueDescription,
    QueueStats,
    StreamGrant,
)
from penstock.rules.commands import Settled
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, Clock
from penstock.words.errors import InvalidRequest, Refused

A = TypeVar("A")
Scope: TypeAlias = Literal["look", "read", "produce", "consume", "admin"]
"""What an API key may allow: counts and reasons, items as well, producing, working on items, everything."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Offsets: TypeAlias = dict[Count, Count]
"""partition → offset"""
ChosenItems: TypeAlias = Mapping[Count, Sequence[Count]]
"""partition → offsets"""
StreamName: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
StateName: TypeAlias = Literal["scheduled", "ready", "leased", "completed", "buried", "moving"]
TIMEOUT = 30 * SECOND
"""How long a call may take that names no time of its own."""


class Operation(msgspec.Struct, Generic[A], kw_only=True, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something that can be asked; A is what is answered."""

    scope: ClassVar[Scope] = "admin"
    supersede_fields: ClassVar[tuple[str, ...]] = ()
    """Fields by which a newer one takes the place of one that still waits to be done; none: each is done."""
    queue: int = 0
    """The incarnation of the queue that it is about; 0 where it is about the broker."""


class Query(Operation[A], Generic[A]):
    """An operation that changes nothing: a snapshot answers it too."""

    scope: ClassVar[Scope] = "look"


# -- items: produce, lease, settle -------------------------------------------------------------------


class ProduceItems(Operation[list[StoredPart]]):
    """Store items. Each partition answers for the part that it took or refused."""

    scope: ClassVar[Scope] = "produce"
    batch: Batch
    wait: int = TIMEOUT
    """How long to wait for room in a queue that is full."""
    request: bytes | None = None
    """Repeating it with the same one adds nothing."""


class LeaseItems(Operation[list[LeaseResult]]):
    """Take items to work on. Answered with the part of each partition that had some, or with nothing when the wait is over."""

    scope: ClassVar[Scope] = "consume"
    count: int = 1
    wait: int = 0
    consumer: str = ""
    timeout: int = 0
    """How long the items are held; 0 is as the queue says."""
    per_key: int = 1
    request: bytes | None = None


class SettleItems(Operation[list[Settled | Refused]]):
    """Complete, retry, bury or extend items of leases. Each part is answered for itself."""

    scope: ClassVar[Scope] = "consume"
    action: SettleAction
    parts: Sequence[SettlePart]
    delay: int = 0
    reason: str = ""
    counted: bool = True
    """Of a retry: whether the attempt counts."""
    timeout: int = 0
    """Of an extension: until the leases end; 0 is as long as they were first given for."""
    then: Sequence[tuple[int, Batch]] = ()
    """Follow-ups of a completion: (queue, items)."""
    request: bytes | None = None
    wait: int = TIMEOUT


class ReportProgress(Operation[None]):
    """The holder of a lease says how far it has come with an item."""

    scope: ClassVar[Scope] = "consume"
    partition: int
    lease: int
    offset: int
    text: str


# -- queues ------------------------------------------------------------------------------------------


class FindQueue(Query[QueueDescription]):
    name: str


class ListQueues(Query[list[QueueDescription]]):
    """Queues by name, behind `after`."""

    prefix: str = ""
    after: str = ""
    limit: int = 100


class CreateQueue(Operation[QueueDescription]):
    """Make a queue. With `exist_ok` one of that name will do, if what was `given` (options, and partitions) is the same there."""

    name: str
    options: dict[str, Any] = {}
    partitions: int = 1
    exist_ok: bool = False
    given: dict[str, Any] = {}


class UpdateQueue(Operation[QueueDescription]):
    """Change options; those that are not named stay as they are."""

    changes: dict[str, Any]


class ResizeQueue(Operation[QueueDescription]):
    partitions: int


class SetReadOnly(Operation[QueueDescription]):
    """Drain a partition (it gives items but takes none), or let it take items again."""

    partition: int
    read_only: bool = True


class DeleteQueue(Operation[None]):
    """Remove a queue with all its items, once nothing is on its way to or from it."""

    wait: int = TIMEOUT


class ReadSlotMap(Query[bytes]):
    """Which partition has each slot of the queue, packed (rules/slots.py)."""


class PauseQueue(Operation[None]):
    """Stop leasing or producing (True), let it go on (False), or leave it as it is (None)."""

    lease: bool | None = None
    produce: bool | None = None
    partition: int | None = None


class CompactQueue(Operation[list[RetentionResult]]):
    """Drop and rewrite now what retention allows."""

    partition: int | None = None


# -- what is in them ---------------------------------------------------------------------------------


class ReadStats(Query[QueueStats]): ...


class ReadMetrics(Operation[BrokerMetrics]):
    """Counters and latencies of every queue since the broker was opened: only it knows them."""

    scope: ClassVar[Scope] = "look"


class ExplainItem(Query[ItemExplanation]):
    """Why is this item not running? Of one that was moved, that is asked where it is now; without `follow` it is told where that is."""

    partition: int
    offset: int
    follow: bool = True


class TraceItem(Query[ItemTrace]):
    """Where an item was before and where it went from here."""

    partition: int
    offset: int


class ReadHistory(Query[list[ItemEvent]]):
    """Everything that happened to an item, in every queue it was in."""

    partition: int
    offset: int


class ListItems(Query[list[ListedItemData]]):
    """Items in these states (none named: all), by partition and offset, behind `after`."""

    scope: ClassVar[Scope] = "read"
    states: Sequence[StateName] = ()
    after: tuple[int, int] | None = None
    limit: int = 100


class ListHeldKeys(Query[list[HeldKey]]):
    limit: int = 100


class ClearItems(Operation[int]):
    """Resolve all items in these states, as if they had been completed."""

    states: Sequence[Literal["ready", "scheduled", "leased", "buried"]]
    partition: int | None = None


class SeekItems(Operation[int]):
    """Completed items become ready again: of these partitions from an offset on, or of all from a time on (wall)."""

    start: Offsets | int


class RedriveItems(Operation[int]):
    """Of these items, the ready and buried ones go to another queue; to the same one, the buried ones go back to their places."""

    to: int
    items: ChosenItems | None = None
    """None is every buried one, which can only go back to its place."""


class ReleaseKey(Operation[int]):
    """A parked key goes on without the items it was parked for."""

    key: int


# -- reading, and cursors ----------------------------------------------------------------------------


class Page(msgspec.Struct):
    """Items, partition by partition, and where to read on."""

    items: list[tuple[int, Items]]
    next_offsets: Offsets


class ReadItems(Query[Page]):
    """Retained items from these offsets on, some of each partition."""

    scope: ClassVar[Scope] = "read"
    start: Offsets
    limit: int = 1_000


class AwaitItems(Query[bool]):
    """Wait until there are items at or beyond these offsets; False when the wait is over."""

    start: Offsets
    wait: int = SECOND


class FindOffsets(Query[Offsets]):
    """Of each partition the offset of its oldest item, the next to be given, or the first that was produced at a time (wall) or later."""

    at: Literal["oldest", "newest"] | int


class ListCursors(Query[dict[str, Offsets]]): ...


class MoveCursor(Operation[None]):
    """Keep a reading position. `onward`: never back."""

    scope: ClassVar[Scope] = "consume"
    supersede_fields: ClassVar[tuple[str, ...]] = ("queue", "name")
    name: str
    to: Offsets
    forward_only: bool = False


class ReleaseCursor(Operation[None]):
    scope: ClassVar[Scope] = "consume"
    name: str


# -- a stream that consumes a queue (ADR 15) ---------------------------------------------------------


class TakeGrant(Operation[GrantAnswer]):
    """All grants up to `done` are committed: complete them, and grant up to `want` more items."""

    scope: ClassVar[Scope] = "consume"
    stream: StreamName
    run: str
    """Which of the stream's processes asks."""
    done: Count
    want: int
    per_key: int
    timeout: int
    """How long the right to consume and the leases last without another word."""


class RenewStream(Operation[None]):
    """The stream is at work. With `again`, what was said of grants behind that one counts no more: they are handled anew."""

    scope: ClassVar[Scope] = "consume"
    stream: StreamName
    run: str
    timeout: int
    reset_after: Count | None = None


class EndStream(Operation[None]):
    """The stream is done: the right to consume is everybody's again."""

    scope: ClassVar[Scope] = "consume"
    supersede_fields: ClassVar[tuple[str, ...]] = ("queue", "stream", "run")
    stream: StreamName
    run: str


class ReadGrant(Query[StreamGrant]):
    """A grant by its number."""

    scope: ClassVar[Scope] = "consume"
    stream: StreamName
    number: int


class FailGranted(Operation[tuple[int, list[tuple[int, int]]]]):
    """Granted items failed: they are retried or buried when the others are completed. Answers how many, and which are in no grant.

    Each lot has a reason of its own; of an item the last word counts.
    """

    scope: ClassVar[Scope] = "consume"
    action: Literal["retry", "bury"]
    groups: Sequence[tuple[str, ChosenItems]]
    delay: int = 0


# -- a write that was staged -------------------------------------------------------------------------


class PublishWrite(Operation[bool]):
    """Let what was staged become items of the queue: all or none, and once for each source and number. False: it waits already."""

    scope: ClassVar[Scope] = "produce"
    write: str
    source: str
    number: int
    parts: Sequence[StagedPart]


WriteState: TypeAlias = Literal["unknown", "waiting", "unattended", "adopted"]
"""A write that is unattended waits, and nobody has the broker open who could adopt it."""


class FindWrite(Query[WriteState]):
    """What became of the write of a source with this number, or a later one."""

    scope: ClassVar[Scope] = "produce"
    source: str
    number: int


# -- homes -------------------------------------------------------------------------------------------


AnswerCallback: TypeAlias = Callable[[Any], None]
"""Called with the answer, or with a PenstockError."""
Cancel: TypeAlias = Callable[[], None]


class Home(Protocol):
    """Whoever answers operations."""

    @property
    def clock(self) -> Clock: ...

    def call(self, operation: Operation[A], /) -> A:
        """Wait here for the answer. The broker of this process runs the turn in this thread (ADR 13)."""
        ...

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """Do not wait: `done` is called with the answer, by some thread. Gives the function by which to say that nobody waits any more.

        Without `done` nobody wants to know: it is done when it can be, perhaps by another process later.
        """
        ...

    def keep(self, queue: int, partition: int, lease: int, /) -> None:
        """A lease does not end before `let_go`, or the end of this process."""
        ...

    def let_go(self, queue: int, partition: int, lease: int, /) -> None: ...

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        """The log of a partition, as far as it is published. Close it."""
        ...

    def staging(self) -> Staging: ...

    def close(self) -> None: ...


# -- as bytes ----------------------------------------------------------------------------------------


def _kinds(kind: type[Operation[Any]]) -> list[type[Operation[Any]]]:
    return [found for sub in kind.__subclasses__() for found in ([sub] if not sub.__subclasses__() else _kinds(sub))]


OPERATIONS: tuple[type[Operation[Any]], ...] = tuple(_kinds(Operation))
_DECODER: "msgspec.msgpack.Decoder[Operation[Any]]" = msgspec.msgpack.Decoder(Union[OPERATIONS])  # noqa: UP007 (it is made of a tuple)
_ENCODER = msgspec.msgpack.Encoder()


def answer_type(kind: type[Operation[Any]]) -> Any:
    """The type of its answer: to decode it by."""
    return get_args(kind.__orig_bases__[0])[0]  # type: ignore[attr-defined]


def encode(operation: Operation[Any]) -> bytes:
    return _ENCODER.encode(operation)


def decode(raw: bytes) -> Operation[Any]:
    """An operation from its bytes; InvalidRequest when they are none."""
    try:
        return _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the operation cannot be understood ({error}); use the same Penstock on both sides") from error
