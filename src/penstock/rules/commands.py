"""The commands that a partition takes, and its answers.

Owns: command and answer types. Each command is checked before it is decided: an invalid one changes nothing.
Durations and times are microseconds. `calls` names the call (calls.py): by its session, by its request id, or both.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

from penstock.rules.calls import CallName, RememberedAnswer, check_calls
from penstock.rules.fences import MovedSlots
from penstock.rules.lanes import Rank
from penstock.rules.records import FenceSpec
from penstock.rules.runs import count
from penstock.words.batch import Batch
from penstock.words.limits import Policy, check_range

MAX_CALL_NUMBER = (1 << 62) - 1


class Call(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Names a call, so that every log that it changes remembers it, and its repetition changes nothing twice.

    A session has one call at a time, with rising numbers: a log remembers only the newest call of a session.
    """

    session: bytes
    """16 random bytes."""
    number: int
    again: bool = False
    """Whether the call was sent before, so that a log may know it."""
    age: int = 0
    """Of a repetition: microseconds since the call was first sent."""

    def name(self) -> CallName:
        """The name under which logs remember it. InvalidRequest when it is not valid."""
        check_range("the number of a call", self.number, 0, MAX_CALL_NUMBER)
        check_range("the age of a call", self.age, 0, MAX_CALL_NUMBER)
        name = CallName(self.session, self.number)
        check_calls((name,))
        return name


class Produce(msgspec.Struct, gc=False):
    """Store items. With a `source` (transfer, chunk of a published write), only if `sequence` is above its last one."""

    batch: Batch
    calls: Sequence[CallName] = ()
    source: bytes | None = None
    sequence: int = 0
    incarnation: int = 0
    """Incarnation and number (`partition`) of this partition, for transfers: a returning item is recognised by them."""
    partition: int = 0
    checked: bool = False
    """Whether the batch has been checked by `validate`."""
    dedup: bool = False
    """Whether dedup ids are checked although there is a `source`: true for chunks, whose items are new here."""
    indexes: list[int] | None = None
    """Which of the items of its call these are, as runs; None: all."""


class AcquireLease(msgspec.Struct, gc=False):
    """Lease up to `want` ready items to `consumer` for `timeout` (0: the policy's)."""

    want: int
    consumer: str = ""
    timeout: int = 0
    per_key: int = 1
    calls: Sequence[CallName] = ()
    moved_slots: MovedSlots | None = None
    """Slots that belong to other partitions. The queue knows them, the partition does not."""
    worst_rank: Rank | None = None
    """Stop before items with a worse rank: other partitions have better ones."""
    part: int = 0
    """How many leases the partition granted to the call before. One that it granted already is given again."""
    checked: bool = False
    """Whether `validate_lease` has checked it."""


class FollowUpBatch(msgspec.Struct, gc=False):
    """Follow-ups for one partition: its destination (outbox.py), and a batch as bytes, not decoded here."""

    destination: bytes
    body: bytes


class CompleteLeased(msgspec.Struct, gc=False):
    """Complete items of a lease; None: all open ones. With follow-ups, everything is done or nothing: all items are
    completed and all follow-ups produced."""

    lease: int
    offsets: Sequence[int] | None = None
    calls: Sequence[CallName] = ()
    follow_ups: Sequence[FollowUpBatch] = ()
    part: int = 0


class RetryLeased(msgspec.Struct, gc=False):
    """Return items of a lease after `delay`, because they failed. If not `counted`, no attempt is counted."""

    lease: int
    offsets: Sequence[int] | None = None
    delay: int = 0
    reason: str = ""
    counted: bool = True
    calls: Sequence[CallName] = ()
    part: int = 0


class BuryLeased(msgspec.Struct, gc=False):
    """Bury items of a lease."""

    lease: int
    offsets: Sequence[int] | None = None
    reason: str = ""
    calls: Sequence[CallName] = ()
    keep_later_items: bool = False
    """Leave the later items of their units leased, because they were handled too. Ignored if a burial parks its key."""
    part: int = 0


class CompleteUnleased(msgspec.Struct, gc=False):
    """Complete the ready ones of these items: the consumer right's holder handled them under ended leases."""

    offsets: Sequence[int]
    consumer: str
    only_lease_expired: bool = False
    """Only items whose last lease expired and to which nothing happened since."""


class ExtendLease(msgspec.Struct, gc=False):
    """Set the lease's deadline to `timeout` (0: its original timeout) from now."""

    lease: int
    timeout: int = 0
    calls: Sequence[CallName] = ()
    after_deadline: bool = False
    """Also extend a lease that is past its deadline, if it has not expired by a record yet. For consumers inside the
    owner's process, which may not have been given the time to ask earlier."""
    part: int = 0


class SetProgress(msgspec.Struct, gc=False):
    """Report the progress of the handler of a leased item, as a text."""

    lease: int
    offset: int
    text: str


class Configure(msgspec.Struct, gc=False):
    policy: Policy


class Pause(msgspec.Struct, gc=False):
    """Pause (True) or resume (False) leasing and producing; None: no change."""

    lease: bool | None = None
    produce: bool | None = None


class Clear(msgspec.Struct, gc=False):
    """Complete all items in the states that are True."""

    ready: bool = False
    scheduled: bool = False
    leased: bool = False
    buried: bool = False


class Seek(msgspec.Struct, gc=False):
    """Make completed items from `offset` on ready again."""

    offset: int


class Redrive(msgspec.Struct, gc=False):
    """Make buried items ready again; None: all of them."""

    offsets: Sequence[int] | None = None


class Drop(msgspec.Struct, gc=False):
    """Delete the bytes of resolved items (flat runs)."""

    runs: list[int]


class Restore(msgspec.Struct, gc=False):
    """Make a partition of a restored backup differ from every other copy of it (rules/restore.py)."""

    at: int
    """When the backup was restored (wall)."""
    first_lease: int
    """A random number, the same for all partitions of a restored queue; see `draw_first_lease`."""


class PutCursor(msgspec.Struct, gc=False):
    """Create or move a cursor: it has read everything before `offset`, and retention keeps everything from there on."""

    name: str
    offset: int


class ForgetCursor(msgspec.Struct, gc=False):
    """Remove a cursor."""

    name: str


class Send(msgspec.Struct, gc=False):
    """Transfer items that wait or are buried to another partition."""

    offsets: Sequence[int]
    destination: bytes


class ConfirmTransfer(msgspec.Struct, gc=False):
    """Confirm that a transfer arrived: its items have offsets from `base` on there (-1: unknown)."""

    destination: bytes
    sequence: int
    base: int = -1


class AddFences(msgspec.Struct, gc=False):
    """Fence slots that version `version` of the slot map moved here, until their old partitions are done with them.

    Version 0 only brings dedup ids: there may be too many for one record.
    """

    version: int
    fences: Sequence[FenceSpec]
    """A `since` of 0 means the next offset, -1 means position 0."""
    dedup_ids: Sequence[tuple[bytes, int, int]] = ()
    """Dedup ids of these slots: (digest, time left, number of the first item)."""


class NarrowFence(msgspec.Struct, gc=False):
    """Let a fence cover only these keys: the backlog that it waited for is resolved, except for them."""

    number: int
    keys: Sequence[int]


class LiftFence(msgspec.Struct, gc=False):
    """Let a narrowed fence no longer cover these keys."""

    number: int
    keys: Sequence[int]


class ReleaseParkedKey(msgspec.Struct, gc=False):
    """Release a parked key; its buried items stay buried."""

    key: int


class RememberCall(msgspec.Struct, gc=False):
    """Remember what was done for a call by other commands of the same turn."""

    calls: Sequence[CallName]
    answers: Sequence[RememberedAnswer]


class CancelWaiting(msgspec.Struct, gc=False):
    """Cancel those of these items that wait: they are never leased. Each item has its own outcome."""

    offsets: Sequence[int]


class SkipWaiting(msgspec.Struct, gc=False):
    """Complete waiting items before `offset`: the first of them, so many as one record may have."""

    offset: int


class RescheduleWaiting(msgspec.Struct, gc=False):
    """Give those of these items that wait another time: `at` (wall), or `delay` from now; neither is now."""

    offsets: Sequence[int]
    at: int = 0
    delay: int = 0


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
    | Restore
    | PutCursor
    | ForgetCursor
    | Send
    | ConfirmTransfer
    | AddFences
    | NarrowFence
    | LiftFence
    | ReleaseParkedKey
    | RememberCall
    | CancelWaiting
    | RescheduleWaiting
    | SkipWaiting
)


class Stored(msgspec.Struct, gc=False):
    """The offsets of produced items: `count` from `base` on, or `ids` if some are duplicates."""

    base: int
    count: int
    ids: list[int] | None = None
    repeated: bool = False
    """Whether nothing was added, because the request or transfer was stored before."""

    @property
    def offsets(self) -> Sequence[int]:
        return range(self.base, self.base + self.count) if self.ids is None else self.ids

    @property
    def duplicates(self) -> list[int]:
        """The indexes of the items that were not added, because their dedup ids were known."""
        found: list[int] = []
        new, stop = self.base, self.base + self.count
        for index, offset in enumerate(self.ids or ()):
            if offset == new < stop:  # the items that were added have consecutive offsets, in their order
                new += 1
            else:
                found.append(index)
        return found


class LeaseAnswer(msgspec.Struct, gc=False):
    """A lease; number 0 if nothing was leased."""

    lease: int
    deadline: int = 0
    runs: list[int] = []
    attempts: dict[int, int] = {}
    """offset → attempt number, where it is above 1."""
    max_attempts: int = 0
    """How many attempts the queue allowed when these items were leased."""

    @property
    def count(self) -> int:
        return count(self.runs)


class Settled(msgspec.Struct, gc=False, tag=True):
    """How many items were settled, and which were refused because the lease does not (or no longer) hold them."""

    done: int
    refused: list[int] = []
    early: list[int] = []
    """Items refused because an earlier item of their key under the same lease must be settled first."""
    buried: list[int] = []
    """Items that were to be retried and are buried instead: it was their last attempt, or their ttl is over."""


class ItemCount(msgspec.Struct, gc=False):
    """How many items a command changed."""

    items: int


class ItemOutcome(IntEnum):
    """What became of an item that was to be cancelled or rescheduled. The numbers are on disk (RememberedAnswer)."""

    DONE = 0
    LEASED = 1
    COMPLETED = 2
    CANCELLED = 3
    """Before."""
    BURIED = 4
    MOVING = 5
    """On its way to another queue or partition."""
    MOVED = 6
    """To another queue."""
    UNKNOWN = 7
    """There is no such item."""


class ItemOutcomes(msgspec.Struct, gc=False):
    """What became of each item of a command, in its order."""

    outcomes: list[ItemOutcome]


class AskAgain(msgspec.Struct, gc=False):
    """The command is not finished: apply the records and give the command again."""


class StraysFound(msgspec.Struct, gc=False):
    """These ready items belong to other partitions: send them, then give the command again."""

    offsets: list[int]


Answer: TypeAlias = Stored | LeaseAnswer | Settled | ItemCount | ItemOutcomes | AskAgain | StraysFound
