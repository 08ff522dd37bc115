"""What can be asked of a partition, and what it answers.

Owns: command and answer types. A command is checked when it is decided, before anything else: a wrong one changes nothing.
Durations and instants are microseconds; `request` is the 16-byte digest of a caller's request id.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from penstock.rules.fences import MovedSlots
from penstock.rules.lanes import Rank
from penstock.rules.records import FenceSpec
from penstock.words.batch import Batch
from penstock.words.limits import Policy


class Produce(msgspec.Struct, gc=False):
    """Store items. With a `source`, only if `sequence` is above the last one from there (transfers, and chunks of drops)."""

    batch: Batch
    request: bytes | None = None
    source: bytes | None = None
    sequence: int = 0
    incarnation: int = 0
    """Of a transfer: the incarnation and number of the partition it arrives in, by which it may know its old place."""
    partition: int = 0
    checked: bool = False
    """Whether `validate` has been over the batch."""
    dedup: bool = False
    """Of a chunk: unlike a transfer it is new here, so dedup ids count."""


class AcquireLease(msgspec.Struct, gc=False):
    """Give up to `want` ready items to `consumer` for `timeout` (0: the policy's)."""

    want: int
    consumer: str = ""
    timeout: int = 0
    per_key: int = 1
    request: bytes | None = None
    moved_slots: MovedSlots | None = None
    """Which slots live elsewhere. Known to the queue, not to the partition."""
    worst_rank: Rank | None = None
    """Stop before items that are worse than this: they wait until other partitions have given what is better."""


class FollowUpBatch(msgspec.Struct, gc=False):
    """Items to be produced elsewhere: a destination (outbox.py) and a batch as bytes, which rules do not look into."""

    destination: bytes
    body: bytes


class CompleteLeased(msgspec.Struct, gc=False):
    """These items of a lease are done; None is all that are open. With `then`, all of them and the letters, or nothing."""

    lease: int
    offsets: Sequence[int] | None = None
    request: bytes | None = None
    follow_ups: Sequence[FollowUpBatch] = ()


class RetryLeased(msgspec.Struct, gc=False):
    """These items of a lease failed and go back after `delay`. Not `counted`: the attempt is given back too."""

    lease: int
    offsets: Sequence[int] | None = None
    delay: int = 0
    reason: str = ""
    counted: bool = True
    request: bytes | None = None


class BuryLeased(msgspec.Struct, gc=False):
    """These items of a lease are given up."""

    lease: int
    offsets: Sequence[int] | None = None
    reason: str = ""
    request: bytes | None = None
    keep_later_items: bool = False
    """Those behind them in their keys' lines stay with the lease: they were handled, too. (Not where a burial parks its key.)"""


class CompleteUnleased(msgspec.Struct, gc=False):
    """Of these items, those that are ready are done: what the holder of the consumer right handled under leases that ended meanwhile."""

    offsets: Sequence[int]
    consumer: str
    only_lease_expired: bool = False
    """Only those that a lease has ended on, and nothing else has happened to since."""


class ExtendLease(msgspec.Struct, gc=False):
    """The lease ends `timeout` (0: as long as it was given for) from now."""

    lease: int
    timeout: int = 0
    request: bytes | None = None
    after_deadline: bool = False
    """Even if its deadline is past, as long as nobody has come by to take its items back: for holders inside the owner's process, who could
    not be given the time to ask earlier."""


class SetProgress(msgspec.Struct, gc=False):
    """How far the holder of an item has come, in its own words."""

    lease: int
    offset: int
    text: str


class Configure(msgspec.Struct, gc=False):
    policy: Policy


class Pause(msgspec.Struct, gc=False):
    """None leaves a side as it is."""

    lease: bool | None = None
    produce: bool | None = None


class Clear(msgspec.Struct, gc=False):
    """Resolve everything in the states named."""

    ready: bool = False
    scheduled: bool = False
    leased: bool = False
    buried: bool = False


class Seek(msgspec.Struct, gc=False):
    """Completed items from `offset` on become ready again."""

    offset: int


class Redrive(msgspec.Struct, gc=False):
    """Buried items become ready again; None is all of them."""

    offsets: Sequence[int] | None = None


class Drop(msgspec.Struct, gc=False):
    """Let go of the bytes of resolved items; runs, flat."""

    runs: list[int]


class PutCursor(msgspec.Struct, gc=False):
    """A cursor, made when it is new, has read everything before `offset`; from there on it holds retention back."""

    name: str
    offset: int


class ForgetCursor(msgspec.Struct, gc=False):
    """A cursor is done with."""

    name: str


class Send(msgspec.Struct, gc=False):
    """Items that are ready or buried leave for another partition."""

    offsets: Sequence[int]
    destination: bytes


class ConfirmTransfer(msgspec.Struct, gc=False):
    """A transfer arrived: its items have offsets from `base` on there (-1: not known)."""

    destination: bytes
    sequence: int
    base: int = -1


class AddFences(msgspec.Struct, gc=False):
    """Slots came here by version `version` of the slot map; their items wait until their old partitions have resolved what they hold.

    Version 0 says nothing of slots: it only brings dedup ids, of which there may be too many for one record.
    """

    version: int
    barriers: Sequence[FenceSpec]
    """Whose `since` is 0 begin here and now, and at the very beginning when it is -1."""
    dedup_ids: Sequence[tuple[bytes, int, int]] = ()
    """Dedup ids that come along: (digest, time left, where the first item is)."""


class NarrowFence(msgspec.Struct, gc=False):
    """The backlog behind a barrier is worked off; only these keys are left of it."""

    number: int
    keys: Sequence[int]


class LiftFence(msgspec.Struct, gc=False):
    """These keys of a narrowed barrier are free."""

    number: int
    keys: Sequence[int]


class ReleaseParkedKey(msgspec.Struct, gc=False):
    """A parked key goes on without its buried items."""

    key: int


Command: TypeAlias = (
    Produce
    | AcquireLease
    | CompleteLeased
    | RetryLeased
    | BuryLeased
    | CompleteUnleased
    | ExtendLease
    | SetProgress
    | Configure
    | Pause
    | Clear
    | Seek
    | Redrive
    | Drop
    | PutCursor
    | ForgetCursor
    | Send
    | ConfirmTransfer
    | AddFences
    | NarrowFence
    | LiftFence
    | ReleaseParkedKey
)


class Stored(msgspec.Struct, gc=False):
    """Each item's offset: `count` from `base` on, or, where some were there before, `ids`."""

    base: int
    count: int
    ids: list[int] | None = None
    repeated: bool = False
    """Nothing was added: the request or transfer was stored before."""

    @property
    def offsets(self) -> Sequence[int]:
        return range(self.base, self.base + self.count) if self.ids is None else self.ids


class LeaseAnswer(msgspec.Struct, gc=False):
    """A lease, or nothing (lease 0)."""

    lease: int
    deadline: int = 0
    runs: list[int] = []
    attempts: dict[int, int] = {}
    """Attempt numbers above 1; every other item is at its first."""

    @property
    def count(self) -> int:
        return sum(self.runs[1::2]) - sum(self.runs[::2])


class Settled(msgspec.Struct, gc=False, tag=True):
    """How many items the call settled, and which it refused, because the lease does not hold them (any more)."""

    done: int
    refused: list[int] = []
    early: list[int] = []
    """Refused because an earlier item of their key, held by the same lease, must be settled first."""


class ItemCount(msgspec.Struct, gc=False):
    """How many items an operator's command moved."""

    items: int


class AskAgain(msgspec.Struct, gc=False):
    """Progress was made but not enough to answer: apply the records and ask again."""


class StraysFound(msgspec.Struct, gc=False):
    """These ready items belong elsewhere: send them, then ask again."""

    offsets: list[int]


Answer: TypeAlias = Stored | LeaseAnswer | Settled | ItemCount | AskAgain | StraysFound
