"""Requests to a queue, and how their callers get the answers.

Owns: `Request` and its kinds; `PendingRequests`, in which they wait for a turn; `AnsweredCallers`, who are woken.
A caller makes a request, and a turn answers it once. The caller's thread sleeps until it is woken with the answer, or
to run the next turn. Instants are elapsed microseconds of the queue's clock; 0 is no deadline.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import get_ident, main_thread
from typing import Any, ClassVar, Literal, NamedTuple

from penstock.loop.item_cache import LeasedItems
from penstock.rules.calls import CallName, batch_content, fingerprint
from penstock.rules.commands import AcquireLease, Call, LeaseAnswer, Settled, Stored
from penstock.rules.lease import validate_lease
from penstock.rules.routing import digest, with_key_ids
from penstock.words.batch import Batch, validate
from penstock.words.errors import BrokerClosed, InvalidRequest, OutcomeUnknown, PenstockError, QueueBusy, Refused


class Request:
    """One call of a caller."""

    verb: str = "request"
    reserved: ClassVar[bool] = False
    """Whether it may take one of the places that are reserved for requests which make a queue shorter."""
    gets_late_answer: ClassVar[bool] = False
    """Whether a turn answers it at its deadline, and its caller waits a little longer for that."""
    needs_all_open = True
    """Of a request for all partitions: whether it needs them open; else summaries of closed ones suffice."""
    request: bytes | None = None
    """The user's request id."""

    # What most requests keep is in the class: making a request sets little.
    calls: tuple[CallName, ...] = ()
    """The names under which partitions remember it: its call in a session, and its request id."""
    may_be_known = False
    """Whether partitions may remember it: it repeats a call, or has a request id."""
    first_sent: int | None = None
    """Of the repetition of a call: when the call was first sent."""
    answer: Any = None
    error: PenstockError | None = None
    done = False
    cancelled = False
    """Whether the caller has stopped waiting."""
    deferred = False
    """Whether it has waited for a partition in I/O."""
    undo_count = 0
    """How often a turn that had taken it was undone."""
    entered_at = 0
    give_up_at = 0
    """When its caller stops waiting for a turn to take it."""
    on_done: "Callable[[Any], None] | None" = None
    asleep = False
    """Whether its caller's thread sleeps, and may be woken by another caller."""
    _answered_callers: "AnsweredCallers | None" = None
    _wakeup: "SimpleQueue[None] | None" = None
    """Made when its caller's thread first sleeps."""
    _woken = False
    """Whether its caller's thread was woken, perhaps before it slept."""

    def __init__(self, deadline: int = 0, call: Call | None = None) -> None:
        self.deadline = deadline
        self.call = call
        self._unclaimed = [True]

    def check(self) -> None:
        """Validate it in the caller's thread, because an invalid request could fail a turn; and name its call."""
        if self.call is not None:
            self.calls = (self.call.name(),)
            self.may_be_known = self.call.again
        if self.request is not None:
            if not isinstance(self.request, bytes):
                raise InvalidRequest("the request id is not bytes; give bytes, of any text that names the request")
            self.calls += (CallName(digest(self.verb.encode(), self.request), 1, self.fingerprint()),)
            self.may_be_known = True

    def fingerprint(self) -> bytes:
        """A digest of its content: a request id that is used again for another content is an error."""
        raise NotImplementedError

    def entered(self, now: int) -> None:
        """Note when it came, by the queue's clock."""
        self.entered_at = now
        if self.call is not None and self.call.again:
            self.first_sent = now - self.call.age

    def outcome_after(self, error: PenstockError) -> PenstockError:
        """The error for a request that was not run because of `error`. What became of the first sending of a repeated
        call is not known then."""
        if self.first_sent is None or isinstance(error, OutcomeUnknown):
            return error
        return OutcomeUnknown(f"it is not known what became of this call: its repetition could not be run ({error})")

    def finish(self, answer: Any = None, error: PenstockError | None = None) -> None:
        """Set the answer or the error; ignored when there is one."""
        if self.done:
            return
        self.answer, self.error = answer, error
        self.done = True
        self.notify()

    def notify(self) -> None:
        """Call `on_done` and wake the caller, now or after others. May be called more than once."""
        if self.on_done is not None:
            with suppress(Exception):  # a callback that raises must not fail the turn
                self.on_done(self)
        if self.asleep and self._answered_callers is not None:
            self._answered_callers.add(self)
        else:
            self.wake()

    def claim(self) -> bool:
        """True once: for the turn that takes the request, or for the caller that gives up before."""
        try:
            return self._unclaimed.pop()
        except IndexError:
            return False

    def release(self) -> None:
        """Undo `claim` after the turn that took it was undone."""
        self._unclaimed = [True]

    @property
    def taken(self) -> bool:
        """Whether a turn has taken it, or its caller has given up."""
        return not self._unclaimed

    def wait_in_thread(self, answered_callers: "AnsweredCallers") -> None:
        """Note that its caller's thread waits for it, and may `sleep`."""
        self._answered_callers = answered_callers

    def wake(self) -> bool:
        """Wake the caller's thread, or keep it from sleeping; False when none waits for it."""
        if self._answered_callers is None:
            return False
        self._woken = True  # before the wake-up is looked for: the thread makes it before it looks at this
        if self._wakeup is not None:
            self._wakeup.put(None)
        return True

    def sleep(self, seconds: float | None) -> None:
        """Sleep until `wake` is called or the time is over. Returns at once if it was called before the first sleep."""
        if self._wakeup is None:
            self._wakeup = SimpleQueue()
            if self._woken:
                return
        self.asleep = get_ident() != main_thread().ident  # the main thread may be in a signal handler: it wakes no others
        try:
            self._wakeup.get(timeout=seconds)
        except Empty:
            return
        finally:
            self.asleep = False

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.answer

    def __repr__(self) -> str:
        state = "done" if self.done else "cancelled" if self.cancelled else "taken" if self.taken else "waiting"
        return f"{type(self).__name__}({state})"


class StoredPart(NamedTuple):
    """The part of a produce that one partition stored or refused: the items at `indexes` (None: all)."""

    partition: int
    indexes: Sequence[int] | None
    stored: Stored | None
    refused: Refused | None = None


class ProduceRequest(Request):
    """Store items. Answered with a list of `StoredPart`."""

    verb = "produce"

    def __init__(self, batch: Batch, request: bytes | None = None, deadline: int = 0, sequence: int = 0, call: Call | None = None) -> None:
        Request.__init__(self, deadline, call)
        self.batch = batch
        self.request = request
        self.sequence = sequence
        """Of a chunk of a published write: higher than those of earlier chunks, and remembered for ever; else 0."""
        self.following: Sequence[ProduceRequest] = ()
        """Of a chunk: chunks to be stored after it in the same turn, each only if those before it were stored whole."""
        self.shares: dict[int, dict[int, Sequence[int]]] = {}
        """Of a chunk: slot map version → partition → indexes of its items. Filled where needed (loop/produce.py)."""
        self.place = 0
        """Its place among the produces to a queue with a limit, which it keeps when its turn is undone; 0: none yet."""

    def check(self) -> None:
        if not self.sequence:  # the whole write was validated before its first chunk
            self.batch = validate(with_key_ids(self.batch))
            Request.check(self)

    def fingerprint(self) -> bytes:
        return fingerprint(batch_content(self.batch))


class LeaseResult(NamedTuple):
    """The items that one partition leased for a request."""

    partition: int
    granted: LeaseAnswer
    items: list[LeasedItems]
    seconds: float
    """How long the lease lasts from now."""


class LeaseRequest(Request):
    """Lease items. Answered with a list of `LeaseResult`, empty when none were ready before the deadline."""

    verb = "lease"
    gets_late_answer = True

    def __init__(
        self,
        want: int,
        consumer: str = "",
        timeout: int = 0,
        per_key: int = 1,
        request: bytes | None = None,
        deadline: int = 0,
        without_payloads: bool = False,
        call: Call | None = None,
    ) -> None:
        Request.__init__(self, deadline, call)
        self.without_payloads = without_payloads
        """Whether only the ids are wanted; the caller reads the items from the log."""
        self.lost_to_damage = False
        """Whether damage took all leased items: others are leased for it."""
        self.found_again = False
        """Whether it is answered with the leases of an earlier sending: then no other items are leased for it."""
        self.unchecked_partitions: set[int] | None = None
        """Partitions that were in I/O in every turn since its deadline; the answer is empty once all were checked."""
        self.want = want
        self.consumer = consumer
        self.timeout = timeout
        self.per_key = per_key
        self.request = request

    def check(self) -> None:
        super().check()
        validate_lease(AcquireLease(self.want, self.consumer, self.timeout, self.per_key, self.calls))

    def fingerprint(self) -> bytes:
        # A grant to a stream may be repeated with another number of items.
        return fingerprint("grant") if self.without_payloads else fingerprint(self.want, self.per_key, self.consumer)


class SettlePart(NamedTuple):
    """Items of one lease; None is all that are not settled."""

    partition: int
    lease: int
    offsets: Sequence[int] | None = None


SettleAction = Literal["complete", "retry", "bury", "extend"]


class SettleRequest(Request):
    """Settle items of leases. Answered with a `Settled` or a `Refused` for each part."""

    reserved = True
    undelivered = False
    """Whether it returns leases because a sending of their request could not be answered."""

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
        call: Call | None = None,
    ) -> None:
        Request.__init__(self, deadline, call)
        self.action = self.verb = action
        self.parts = parts
        self.delay = delay
        self.reason = reason
        self.counted = counted
        self.timeout = timeout
        self.alone = alone
        """Of a burial: whether later items of the same key stay leased."""
        self.then = then
        """Follow-ups: (incarnation, items)."""
        self.request = request

    def fingerprint(self) -> bytes:
        """Without its parts: a repetition may have fewer, and partitions tell parts apart by their content."""
        then = [(incarnation, batch_content(batch)) for incarnation, batch in self.then]
        return fingerprint(self.reason, self.counted, self.alone, then)


SettleAnswer = list[Settled | Refused]


class FunctionRequest(Request):
    """An administrative operation or a query: a function of the queue's `QueueEngine`, run in a turn."""

    verb = "admin"
    reserved = True

    def __init__(
        self,
        function: Callable[[Any], Any],
        deadline: int = 0,
        *,
        recorded_elsewhere: bool = False,
        needs_all_open: bool = True,
        call: Call | None = None,
        log_line: Callable[[Any], str] | None = None,
    ) -> None:
        super().__init__(deadline, call)
        self.function = function
        self.log_line = log_line
        """Gives the line for the program's log about a change that was made, from its answer."""
        self.needs_all_open = needs_all_open
        self.recorded_elsewhere = recorded_elsewhere
        """Whether it succeeds even when a commit fails: it is in the catalog, and partitions that missed it get it."""


class ResizeRequest(FunctionRequest):
    """Changes the queue's partitions. Runs first in its turn: the catalog may record only committed states."""


class PartitionsNotOpen(Exception):
    """Raised by a resize whose new partitions are not open; it is run again when they are."""


class AwaitRequest(Request):
    """Wait until a partition has an item at or after its offset. Answered with True, or False at the deadline."""

    verb = "watch"
    gets_late_answer = True

    def __init__(self, offsets: dict[int, int], deadline: int = 0) -> None:
        super().__init__(deadline)
        self.offsets = offsets


class DeliverRequest(Request):
    """Store transfers in a partition. Answered with (sequence, offset of the first item or -1) of each stored one."""

    verb = "transfer"
    reserved = True

    def __init__(self, partition: int, source: bytes, entries: "Sequence[tuple[int, Batch | None]]") -> None:
        super().__init__()
        self.partition = partition
        self.source = source
        self.entries = entries
        """(sequence, items); None when damage took all items."""


class ConfirmRequest(Request):
    """Tells the source queue that transfers were stored, or why not."""

    verb = "transfer"
    reserved = True

    def __init__(
        self, partition: int, destination: bytes, until: int, arrived: Sequence[tuple[int, int]], failed: PenstockError | None
    ) -> None:
        super().__init__()
        self.partition = partition
        self.destination = destination
        self.until = until
        """The last sequence of the delivery."""
        self.arrived = arrived
        """(sequence, offset of the first item) of each that was stored."""
        self.failed = failed


# -- pending requests -------------------------------------------------------------------------------


PLACES = 10_000
RESERVED = 2_000


class PendingRequests(deque[Request]):
    """Requests that wait for a turn, in the order of arrival.

    At most PLACES; more are refused (`QueueBusy`). RESERVED further places are for complete, retry, bury, extend,
    administrative operations and transfers. Needs no lock: the methods of a deque are atomic.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.resizes = 0
        """How many of them are resizes; approximate, as it is counted without a lock."""
        self.closed = False

    def enter(self, request: Request, held: int = 0) -> None:
        """Add a request, or refuse it. `held` requests count too: a turn has taken them, and they still wait."""
        if self.closed:
            raise queue_closed_error(self._name)
        if len(self) + held >= PLACES + (RESERVED if request.reserved else 0):
            busy = QueueBusy(f"{len(self) + held} requests wait for queue {self._name!r}; try again in a moment")
            raise request.outcome_after(busy)
        self.append(request)
        if type(request) is ResizeRequest:
            self.resizes += 1
        if self.closed and request.claim():  # the queue was closed meanwhile
            raise queue_closed_error(self._name)

    def post(self, request: Request) -> None:
        """Add a message of a queue, which must not be refused."""
        self.append(request)

    def requeue(self, requests: Sequence[Request]) -> None:
        """Put requests of an undone turn back, before all others."""
        for request in reversed(requests):
            request.release()
            self.appendleft(request)

    def take(self, most: int, taken: list[Request]) -> None:
        """Move up to `most` requests to `taken`, without those whose callers gave up.

        A request is added to `taken` before it is removed here, so that an interrupt loses none.
        """
        while self and len(taken) < most:
            request = self[0]
            taken.append(request)
            if self.resizes and type(request) is ResizeRequest:
                self.resizes -= 1
            if not request.claim():
                taken.pop()
            self.popleft()

    def wake_one(self) -> bool:
        """Wake one caller, so that its thread runs the next turn."""
        try:
            return any(not request.taken and request.wake() for request in self)
        except RuntimeError:  # a request was added during the search
            return self.wake_one()


class AnsweredCallers(deque[Request]):
    """Callers that have their answers and still sleep. They are woken one by one: each wakes the next when it leaves.

    Woken together they would only wait for the interpreter, one behind the other, and each would be put to sleep
    and woken once more. Needs no lock: the methods of a deque are atomic.
    """

    def add(self, request: Request) -> None:
        """Add a request that has its answer. `wake_next` must follow."""
        self.append(request)

    def wake_next(self) -> None:
        """Wake one caller, if there is one. It is removed last, so that an interrupt loses none."""
        while self:
            with suppress(IndexError, ValueError):  # another thread has woken it
                request = self[0]
                was_asleep = request.asleep
                request.wake()
                self.remove(request)
                if was_asleep:
                    return

    def wake_all(self) -> None:
        """Wake all callers: the one that should wake the next was interrupted."""
        while self:
            self.wake_next()


def queue_closed_error(name: str) -> BrokerClosed:
    return BrokerClosed(f"queue {name!r} is closed here; open the broker again")


def not_reached_error(name: str, partition: int | None = None) -> QueueBusy:
    what = f"queue {name!r} did not get to the request in time; nothing was done, try again in a moment"
    return QueueBusy(what if partition is None else f"partition {partition} of {what}")
