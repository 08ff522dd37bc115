"""Requests: what waits in a queue's inbox, and how its caller learns the answer.

Owns: `Request` and its kinds; `PendingRequests`, in which they wait for a turn.
A request is filled in by its caller, answered once by a turn, and never shared. Whoever waits holds the
gate; whoever answers opens it. A gate may also be opened to say that it is this caller's turn to lead.
Instants are elapsed microseconds of the queue's clock; 0 is no deadline.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Literal, NamedTuple

from penstock.loop.item_cache import Items
from penstock.rules.commands import LeaseAnswer, Settled, Stored
from penstock.rules.routing import with_key_ids
from penstock.words.batch import Batch, validate
from penstock.words.errors import BrokerClosed, InvalidRequest, PenstockError, QueueBusy, Refused


class Request:
    """One call, from its entry to its answer."""

    verb: ClassVar[str] = "request"
    reserved: ClassVar[bool] = False
    """May take one of the places kept free for what relieves a queue."""
    needs_all_open = True
    """Of a request for the whole queue: whether it needs every partition open, or the summaries of closed ones will do."""

    def __init__(self, deadline: int = 0) -> None:
        self.deadline = deadline
        self.answer: Any = None
        self.error: PenstockError | None = None
        self.done = False
        self.cancelled = False
        """The caller waits no longer."""
        self._unclaimed = [True]
        self.deferred = False
        """It has waited for a partition that was out."""
        self.undo_count = 0
        """How often a turn that had taken it was undone."""
        self.entered_at = 0
        self.give_up_at = 0
        """When its caller no longer waits for a turn to take it."""
        self.on_done: Callable[[Request], None] | None = None
        self._gate: SimpleQueue[None] | None = None

    def check(self) -> None:
        """Refuse, in the caller's thread, what would break a turn."""
        if not isinstance(getattr(self, "request", None), bytes | None):
            raise InvalidRequest("the request id is not bytes; give bytes, of any text that names the request")

    def finish(self, answer: Any = None, error: PenstockError | None = None) -> None:
        """Say the answer, once; who is late says nothing."""
        if self.done:
            return
        self.answer, self.error = answer, error
        self.done = True
        self.notify()

    def notify(self) -> None:
        """Let the caller know that there is an answer; telling twice does no harm."""
        if self.on_done is not None:
            with suppress(Exception):  # a caller that cannot be told must not break the turn for others
                self.on_done(self)
        self.wake()

    def claim(self) -> bool:
        """Whether this one may decide what becomes of the request: the first turn that takes it, or a caller that gives up before."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def release(self) -> None:
        """Undo `claim`: the turn that took it was undone, and another will take it."""
        self._unclaimed = [True]

    @property
    def taken(self) -> bool:
        """In a turn, or waiting for one to have something for it."""
        return not self._unclaimed

    def make_wakeup(self) -> None:
        self._gate = SimpleQueue()

    def wake(self) -> bool:
        """Wake the caller, if there is one that sleeps."""
        if self._gate is None:
            return False
        self._gate.put(None)
        return True

    def sleep(self, seconds: float | None) -> None:
        """Until the gate is opened or the time is over."""
        assert self._gate is not None
        try:
            self._gate.get(timeout=seconds)
        except Empty:
            return

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.answer

    def __repr__(self) -> str:
        state = "done" if self.done else "gone" if self.cancelled else "taken" if self.taken else "waiting"
        return f"{type(self).__name__}({state})"


class StoredPart(NamedTuple):
    """The part of a produce that one partition took or refused: the items at `indexes` (None: all)."""

    partition: int
    indexes: Sequence[int] | None
    stored: Stored | None
    refused: Refused | None = None


class ProduceRequest(Request):
    """Store items. Answered with a list of `StoredPart`."""

    verb = "produce"

    def __init__(self, batch: Batch, request: bytes | None = None, deadline: int = 0, sequence: int = 0) -> None:
        super().__init__(deadline)
        self.batch = batch
        self.request = request
        self.sequence = sequence
        """Of a chunk of a drop that is adopted: higher than that of every one before. Remembered for ever, not for a while."""

    def check(self) -> None:
        super().check()
        self.batch = validate(with_key_ids(self.batch))


class LeaseResult(NamedTuple):
    """The part of a lease that one partition gave."""

    partition: int
    granted: LeaseAnswer
    items: list[Items]
    seconds: float
    """How long it is given for, counted from now."""


class LeaseRequest(Request):
    """Give items. Answered with a list of `LeaseResult`, empty when nothing came before the deadline."""

    verb = "lease"

    def __init__(
        self,
        want: int,
        consumer: str = "",
        timeout: int = 0,
        per_key: int = 1,
        request: bytes | None = None,
        deadline: int = 0,
        without_payloads: bool = False,
    ) -> None:
        super().__init__(deadline)
        self.without_payloads = without_payloads
        """Which items is all that is asked; their bytes are read elsewhere."""
        self.lost_to_damage = False
        """Damage took what it was given: it is dealt anew."""
        self.unchecked_partitions: set[int] | None = None
        """Partitions that were out whenever it was dealt to since its deadline: when they were seen it is told that there is nothing."""
        self.want = want
        self.consumer = consumer
        self.timeout = timeout
        self.per_key = per_key
        self.request = request


class SettlePart(NamedTuple):
    """Items of one lease: all that are open when offsets are None."""

    partition: int
    lease: int
    offsets: Sequence[int] | None = None


SettleAction = Literal["complete", "retry", "bury", "extend"]


class SettleRequest(Request):
    """Settle items of leases. Answered with a `Settled` or a `Refused` for each part."""

    reserved = True

    def __init__(
        self,
        action: SettleAction,
        parts: Sequence[SettlePart],
        *,
        delay: int = 0,
        reason: str = "",
        counted: bool = True,
        timeout: int = 0,
        alone: bool = False,
        then: Sequence[tuple[int, Batch]] = (),
        request: bytes | None = None,
        deadline: int = 0,
    ) -> None:
        super().__init__(deadline)
        self.action = action
        self.parts = parts
        self.delay = delay
        self.reason = reason
        self.counted = counted
        self.timeout = timeout
        self.alone = alone
        """Of a burial: those behind in a key's line stay with their lease."""
        self.then = then
        """Follow-ups: (incarnation, items)."""
        self.request = request

    @property
    def verb(self) -> str:  # type: ignore[override]
        return self.action


SettleAnswer = list[Settled | Refused]


class FunctionRequest(Request):
    """Anything an operator asks: a function of the queue's `QueueEngine`, run in a turn."""

    verb = "admin"
    reserved = True

    def __init__(
        self, function: Callable[[Any], Any], deadline: int = 0, *, recorded_elsewhere: bool = False, needs_all_open: bool = True
    ) -> None:
        super().__init__(deadline)
        self.function = function
        self.needs_all_open = needs_all_open
        self.recorded_elsewhere = recorded_elsewhere
        """Done whatever becomes of the turn: it is recorded elsewhere, and made good in the partitions."""


class ResizeRequest(FunctionRequest):
    """Other partitions for the queue. It is run first in its turn: what it records in the catalog must rest on nothing uncommitted."""


class PartitionsNotOpen(Exception):
    """Raised by a reshape whose new partitions are not open yet: it is run again when they are."""


class AwaitRequest(Request):
    """Wait until there are items at or beyond these offsets; answered with True, or False at the deadline."""

    verb = "watch"

    def __init__(self, offsets: dict[int, int], deadline: int = 0) -> None:
        super().__init__(deadline)
        self.offsets = offsets


class DeliverRequest(Request):
    """Transfers arrive, in order. Answered with (sequence, offset of its first item, -1 when not known) for each that is taken."""

    verb = "transfer"
    reserved = True

    def __init__(self, partition: int, source: bytes, entries: "Sequence[tuple[int, Batch | None]]") -> None:
        super().__init__()
        self.partition = partition
        self.source = source
        self.entries = entries
        """(sequence, items); None when damage took all of them."""


class ConfirmRequest(Request):
    """What became of transfers from here, or an error."""

    verb = "transfer"
    reserved = True

    def __init__(
        self, partition: int, destination: bytes, until: int, arrived: Sequence[tuple[int, int]], failed: PenstockError | None
    ) -> None:
        super().__init__()
        self.partition = partition
        self.destination = destination
        self.until = until
        """The last sequence that was under way."""
        self.arrived = arrived
        """(sequence, base) of each that was taken."""
        self.failed = failed


# -- where they wait --------------------------------------------------------------------------------


PLACES = 10_000
RESERVED = 2_000


class PendingRequests:
    """Requests in the order in which they came.

    Bounded: a full one refuses at once (`QueueBusy`), but for the places kept free for what relieves the queue: complete, retry, bury,
    extend, an operator's word, transfers. Entering and taking out need no lock beyond the interpreter's: a deque is enough.
    """

    def __init__(self, name: str, places: int = PLACES, reserved: int = RESERVED) -> None:
        self._name = name
        self._places = places
        self._reserved = reserved
        self._waiting: deque[Request] = deque()
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, request: Request, held: int = 0) -> None:
        """Take a request in, or refuse it. `held` others have a place already although a turn has taken them."""
        if self.closed:
            raise queue_closed_error(self._name)
        if len(self._waiting) + held >= self._places + (self._reserved if request.reserved else 0):
            raise QueueBusy(f"{len(self._waiting) + held} requests wait for queue {self._name!r}; try again in a moment")
        self._waiting.append(request)
        if self.closed and request.claim():  # closing looked before this one came
            raise queue_closed_error(self._name)

    def post(self, request: Request) -> None:
        """Take in what must not be refused: the queue's own messages."""
        self._waiting.append(request)

    def requeue(self, requests: Sequence[Request]) -> None:
        """Take in again, before all others, what a turn had taken and that was undone with it."""
        for request in reversed(requests):
            request.release()
            self._waiting.appendleft(request)

    def take(self, most: int, taken: list[Request]) -> None:
        """Up to `most` requests whose callers have not given up, out of the inbox; at no moment is one in nobody's hands."""
        while self._waiting and len(taken) < most:
            taken.append(self._waiting[0])
            if not taken[-1].claim():
                taken.pop()
            self._waiting.popleft()

    def wake_one(self) -> bool:
        """Open the gate of one caller that sleeps, so that it leads the next turn."""
        try:
            return any(not request.taken and request.wake() for request in self._waiting)
        except RuntimeError:  # somebody entered while we looked
            return self.wake_one()


def queue_closed_error(name: str) -> BrokerClosed:
    return BrokerClosed(f"queue {name!r} is closed here; open the broker again")
