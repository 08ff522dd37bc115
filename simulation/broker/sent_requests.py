"""The requests that callers of a simulated broker have sent, and what the callers know about them.

Owns: `SentRequest` and its kinds. A request that has a request id, or is a call of a session, can be sent again when
its answer was lost.
"""

from collections.abc import Sequence
from typing import ClassVar

from penstock.loop import requests
from penstock.loop.requests import SettleAction, SettlePart
from penstock.rules.commands import Call
from penstock.rules.routing import digest
from penstock.words.batch import Batch
from simulation.broker.items import CopyPlace, TrackedItem, TrackedLease

SESSIONS = 60
"""The sessions of all callers: few enough that some are used again."""


class SentRequest:
    """One request. `make` builds a new object to submit, each time."""

    kind: ClassVar[str] = "request"
    request: requests.Request

    def __init__(self, incarnation: int, request_id: bytes | None, wait: int = 0) -> None:
        self.incarnation = incarnation
        kind = request_id[0] % 4 if request_id is not None else 0
        self.request_id = None if kind == 1 else request_id
        self.session = digest(b"session", bytes([request_id[1] % SESSIONS])) if request_id is not None and kind in (1, 2) else None
        """The session of which it is a call: a quarter of the named requests are calls, another quarter are both."""
        self.number = 0
        self.made_at = 0
        """The elapsed time when it was first sent."""
        self.wait = wait
        self.times = 0
        """How often it was sent."""
        self.since = 0
        """When it was first sent."""
        self.era = 0
        self.latest_era = 0
        """The number of reboots before it was sent the first (`era`) and the last time."""
        self.ran_at: int | None = None
        """When it was executed, if its answer then had to wait for a partition."""
        self.answered_at = 0
        """When it was last answered. Answers of a process that has ended are checked later, perhaps after a reboot."""
        self.awaits: set[int] = set()
        """The partitions for which its answer waited at the last look."""
        self.answer_lost = False
        """Whether an answer was lost: that sending may have been executed or not."""
        self.no_failure_expected = False
        """Since it was sent no file call failed and the process did not end: it must not fail, also if a turn was
        interrupted."""
        self.no_file_failed = False
        """The same, but partitions may have been failing or in I/O when it was sent."""

    @property
    def named(self) -> bool:
        """Whether it can be repeated."""
        return self.request_id is not None or self.session is not None

    @property
    def repeats_call(self) -> bool:
        """Whether it was last sent as the repetition of a session's call: then it may be of unknown outcome."""
        return self.session is not None and self.times > 1

    def make(self, now: int, number: int = 0) -> None:
        """Build the request. `number` is that of a new call."""
        self.request = self.build(now + self.wait if self.wait else 0)
        if not self.times:
            self.number, self.made_at = number, now
        if self.session is not None:
            self.request.call = Call(self.session, self.number, self.times > 0, max(0, now - self.made_at))
        self.ran_at = None
        self.times += 1

    def build(self, deadline: int) -> requests.Request:
        raise NotImplementedError

    def ran(self, now: int) -> int:
        """When an answered request was executed."""
        return now if self.ran_at is None else self.ran_at

    @property
    def first(self) -> bool:
        return self.times == 1

    def __repr__(self) -> str:
        name = f" {self.request_id.hex()[:6]}" if self.request_id else ""
        name += f" call {self.number} of {self.session.hex()[:4]}" if self.session else ""
        again = f", time {self.times}" if self.times > 1 else ""
        return f"{self.kind}{name} to {self.incarnation:x}{again}{f', waiting {self.wait / 1e6} s' if self.wait else ''}{self.details()}"

    def details(self) -> str:
        return ""


class SentProduce(SentRequest):
    """Store items."""

    kind = "produce"

    def __init__(self, incarnation: int, batch: Batch, items: list[TrackedItem], request_id: bytes | None, wait: int = 0) -> None:
        super().__init__(incarnation, request_id, wait)
        self.batch = batch
        self.items = items
        self.ids: dict[int, CopyPlace] = {}
        """Index of an item → the place that was answered for it."""

    @property
    def anywhere(self) -> bool:
        """Whether its items may be stored in any partition."""
        return (self.first or not self.named) and self.batch.key_ids is None and self.batch.dedups is None

    def build(self, deadline: int) -> requests.Request:
        return requests.ProduceRequest(self.batch, self.request_id, deadline)

    def details(self) -> str:
        return f": {self.items}"


class SentLease(SentRequest):
    """Lease items."""

    kind = "lease"

    def __init__(self, incarnation: int, want: int, timeout: int, per_key: int, request_id: bytes | None, wait: int = 0) -> None:
        super().__init__(incarnation, request_id, wait)
        self.want = want
        self.timeout = timeout
        self.per_key = per_key

    def build(self, deadline: int) -> requests.Request:
        return requests.LeaseRequest(self.want, "host-1", self.timeout, self.per_key, self.request_id, deadline)

    def details(self) -> str:
        return f": {self.want}, {self.per_key} a key"


class SentWatch(SentRequest):
    """Wait for new items."""

    kind = "watch"

    def __init__(self, incarnation: int, offsets: dict[int, int], wait: int) -> None:
        super().__init__(incarnation, None, wait)
        self.offsets = offsets

    def build(self, deadline: int) -> requests.Request:
        return requests.AwaitRequest(dict(self.offsets), deadline)


class SentSettle(SentRequest):
    """Settle items of one lease or several."""

    kind = "settle"

    def __init__(
        self,
        action: SettleAction,
        parts: Sequence[tuple[TrackedLease, list[int] | None]],
        request_id: bytes | None,
        *,
        delay: int = 0,
        counted: bool = True,
        timeout: int = 0,
        then: Sequence[tuple[int, Batch]] = (),
        follow_ups: Sequence[TrackedItem] = (),
    ) -> None:
        super().__init__(parts[0][0].incarnation, request_id)
        self.action = action
        self.parts = parts
        self.delay = delay
        self.counted = counted
        self.timeout = timeout
        self.then = then
        self.follow_ups = follow_ups
        self.wanted = [(held, list(held.open) if offsets is None else offsets) for held, offsets in parts]
        self.items = [item for held, offsets in self.wanted for item in (held.open.get(offset) for offset in offsets) if item is not None]
        self.answered: list[object] | None = None

    def build(self, deadline: int) -> requests.Request:
        parts = [SettlePart(held.partition, held.lease, offsets) for held, offsets in self.parts]
        return requests.SettleRequest(
            self.action,
            parts,
            delay=self.delay,
            reason="it failed",
            counted=self.counted,
            timeout=self.timeout,
            then=self.then,
            request=self.request_id,
            deadline=deadline,
        )

    def details(self) -> str:
        then = f", then {list(self.follow_ups)}" if self.follow_ups else ""
        return f": {self.action} {self.parts}{f' after {self.delay / 1e6} s' if self.delay else ''}{then}"
