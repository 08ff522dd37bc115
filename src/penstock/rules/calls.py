"""The calls that a log remembers, so that a repetition changes nothing twice and gets the first answer again.

Owns: `CallName`, `RememberedAnswer`, `RememberedCall` and `CallMemory`.
- A client's session has one call at a time, with rising numbers: only the newest call of a session is remembered.
- A user's request id is remembered as the only call of a session of its own, with a fingerprint of its content.
- A call is remembered until its deadline. Of sessions at most MAX_SESSIONS are remembered: the oldest are evicted, and
  `watermark` is the time of the newest evicted one. A repetition whose call was first sent before that may be of an
  evicted call. Request ids are never evicted: beyond MAX_REQUEST_IDS new ones are refused.
Times are elapsed microseconds; those of the catalog's memory are wall microseconds.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import xxhash

from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, QueueFull
from penstock.words.limits import MIN_RESULT_MEMORY
from penstock.words.values import without_trace_context

MAX_SESSIONS = 20_000
MAX_REQUEST_IDS = 1_000_000
"""The most sessions and request ids that a partition remembers."""
MARGIN = 1 * SECOND
"""How inexactly the time is known at which a client first sent a call."""
NEVER = -(1 << 62)
_encoder = msgspec.msgpack.Encoder()
FORMER = b"former"
"""The fingerprint of request ids that a version without sessions remembered: they are kept, but not found."""


class CallName(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The name under which a log remembers a call."""

    session: bytes
    """16 bytes: a client's session, or the digest of a request id."""
    number: int = 1
    fingerprint: bytes = b""
    """Of a request id: a digest of the request's content. Sessions have none."""


class RememberedAnswer(msgspec.Struct, array_like=True, gc=False):
    """One thing that a log did for a call: it stored items, granted or settled a lease, or changed `count` items."""

    base: int = 0
    """The first offset of stored items; in the catalog, the queue's incarnation."""
    count: int = 0
    ids: list[int] | None = None
    lease: int = 0
    refused: list[int] = []
    early: list[int] = []
    indexes: list[int] | None = None
    """Of stored items: which of the call's items they are, as runs; None: all."""
    part: int = 0
    """Which part of the call it answers: the nth lease of a lease call, or the `settle_part` of a settle."""
    buried: list[int] = []
    """Items that were to be retried and were buried instead."""
    outcomes: list[int] = []
    """Of waiting items that were cancelled or rescheduled: what became of each (commands.ItemOutcome)."""


class RememberedCall(msgspec.Struct, array_like=True, gc=False):
    """The newest call of a session, and what the log did for it."""

    number: int
    at: int
    deadline: int
    answers: list[RememberedAnswer]
    fingerprint: bytes = b""


class CallMemory:
    """Calls by session, and calls by request id."""

    __slots__ = ("_earliest", "_limit", "_requests", "_sessions", "watermark")

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        """The most sessions; 0: MAX_SESSIONS."""
        self._sessions: OrderedDict[bytes, RememberedCall] = OrderedDict()
        self._requests: OrderedDict[bytes, RememberedCall] = OrderedDict()
        self._earliest = 0
        """No session has an earlier deadline; 0: unknown."""
        self.watermark = NEVER
        """When the newest evicted call was remembered."""

    def __len__(self) -> int:
        """The number of entries, also of those that are past their deadline and not deleted yet."""
        return len(self._sessions) + len(self._requests)

    def find(self, name: CallName, now: int) -> RememberedCall | None:
        """The call of that name, or None. OutcomeUnknown for a call that is older than the newest one of its session;
        InvalidRequest for a request id that was used with other content.
        """
        known = (self._requests if name.fingerprint else self._sessions).get(name.session)
        if known is None or known.deadline <= now:
            return None
        if known.fingerprint != name.fingerprint:
            raise InvalidRequest("this request id was used before, for another request; give each request an id of its own")
        if known.number > name.number:
            raise OutcomeUnknown(
                f"call {name.number} of this session came after its call {known.number}, and it is not known what became of it; "
                "a session has one call at a time, with rising numbers"
            )
        return known if known.number == name.number else None

    def answers(self, names: Iterable[CallName], now: int) -> list[RememberedAnswer] | None:
        """What was done for a call, by the first of its names that is known; None: the call is unknown."""
        found = [known for name in names if (known := self.find(name, now)) is not None]
        return found[0].answers if found else None

    def check_not_evicted(self, first_sent: int, now: int) -> None:
        """OutcomeUnknown for a repetition that is not found, but may have been known and forgotten."""
        if first_sent - MARGIN <= self.watermark:
            raise OutcomeUnknown("this call was repeated too late: so many other calls came since that it may be forgotten")
        check_age(now - first_sent)

    def check_room(self, names: Iterable[CallName], now: int) -> None:
        """QueueFull when there are too many request ids for another one."""
        if len(self._requests) < MAX_REQUEST_IDS or not any(name.fingerprint for name in names):
            return
        if sum(known.deadline > now for known in self._requests.values()) >= MAX_REQUEST_IDS:
            raise QueueFull(f"the partition remembers {MAX_REQUEST_IDS} request ids; send fewer requests with an id")

    def put(self, names: Iterable[CallName], answers: Sequence[RememberedAnswer], now: int, span: int) -> None:
        """Remember answers to a call until now + span, besides earlier answers to the same call."""
        for name in names:
            entries = self._requests if name.fingerprint else self._sessions
            known = entries.pop(name.session, None)
            if known is None or known.number != name.number or known.deadline <= now:
                entries[name.session] = RememberedCall(name.number, now, now + span, [*answers], name.fingerprint)
            else:
                entries[name.session] = RememberedCall(name.number, now, now + span, [*known.answers, *answers], name.fingerprint)
            self._earliest = min(self._earliest, now + span)
            _delete_expired_front(entries, now)
        if len(self._sessions) > (self._limit or MAX_SESSIONS):
            self._evict(now)

    def _evict(self, now: int) -> None:
        """Delete expired sessions, and the oldest ones if these were too few."""
        if now >= self._earliest:  # deadlines need not be in order: the policy may have changed
            for name in [name for name, known in self._sessions.items() if known.deadline <= now]:
                del self._sessions[name]
            self._earliest = min((known.deadline for known in self._sessions.values()), default=0)
        while len(self._sessions) > (self._limit or MAX_SESSIONS):
            self.watermark = max(self.watermark, self._sessions.popitem(last=False)[1].at)

    def live(self, now: int) -> tuple[list[tuple[bytes, RememberedCall]], list[tuple[bytes, RememberedCall]]]:
        """The sessions and the request ids that are not past their deadlines, oldest first."""
        return list(_live(self._sessions, now)), list(_live(self._requests, now))

    def restore(
        self, sessions: Iterable[tuple[bytes, RememberedCall]], requests: Iterable[tuple[bytes, RememberedCall]], watermark: int
    ) -> None:
        """Set what `live` gave."""
        self._sessions.update(sessions)
        self._requests.update(requests)
        self._earliest, self.watermark = 0, watermark

    def latest_deadline(self) -> int:
        """When the last of the calls is forgotten; NEVER if there are none."""
        return max((known.deadline for entries in (self._sessions, self._requests) for known in entries.values()), default=NEVER)

    def __repr__(self) -> str:
        return f"CallMemory({len(self._sessions)} sessions, {len(self._requests)} request ids)"


def _delete_expired_front(entries: OrderedDict[bytes, RememberedCall], now: int) -> None:
    while next(iter(entries.values())).deadline <= now:
        entries.popitem(last=False)


def _live(entries: OrderedDict[bytes, RememberedCall], now: int) -> Iterator[tuple[bytes, RememberedCall]]:
    return ((name, known) for name, known in entries.items() if known.deadline > now)


def check_age(age: int) -> None:
    """OutcomeUnknown for a repetition of a call that was first sent so long ago that it may be forgotten."""
    if age >= MIN_RESULT_MEMORY - MARGIN:
        kept = f"calls are remembered for {MIN_RESULT_MEMORY // SECOND} s"
        raise OutcomeUnknown(f"this call was first sent {age // SECOND} s ago, and {kept}: it may be forgotten")


def check_calls(names: Sequence[CallName]) -> None:
    """InvalidRequest when a call has no valid name."""
    for name in names:
        if type(name) is not CallName or type(name.session) is not bytes or len(name.session) != 16 or type(name.number) is not int:
            raise InvalidRequest("a call is not named by 16 bytes and a number; give a session and the number of the call in it")


def fingerprint(*content: object) -> bytes:
    """A digest of a request's content, to recognise a request id that is used again for another request."""
    return hashlib.blake2b(_encoder.encode(content), digest_size=8).digest()


def batch_content(batch: Batch) -> list[object]:
    """What tells the items of a batch from others: not times and trace context, which a repetition has anew."""
    headers = None if batch.headers is None else [without_trace_context(packed) for packed in batch.headers]
    if headers is not None and not any(headers):
        headers = None
    columns = (batch.payloads, batch.keys, headers, batch.kinds, batch.encodings, batch.references, batch.dedups)
    return [*(None if column is None else list(column) for column in columns), batch.priorities]


def settle_part(lease: int, offsets: Sequence[int] | None) -> int:
    """Names a part of a settle by its content: a repetition may have only some of the parts."""
    return lease if offsets is None else xxhash.xxh64_intdigest(array("q", [lease, *offsets]).tobytes())
