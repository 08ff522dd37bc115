"""What happened: the records that a partition writes, reads back and applies. They are the whole truth.

Owns: the record types. A record states facts and is complete in itself: to apply one, nothing but the state before it is needed.
Records are MessagePack arrays headed by their tag; a field may be added at the end with a default, never moved or removed
(docs/format.md). Runs are flat `[start, stop, …]` (rules/runs.py). Instants ending in `deadline`, `until` and `due` are elapsed
microseconds, `…_at` wall microseconds. Key columns are packed little-endian u64, one per offset.
"""

from array import array
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from penstock.rules.lanes import KEYED
from penstock.words.batch import Batch
from penstock.words.limits import Policy


class Opened(msgspec.Struct, array_like=True, gc=False, tag=1):
    """An owner opened the partition. Written and synced before its first lease, so that no two owners share a token."""

    epoch: int
    boot_id: str
    clock_shift: int
    """Added to the machine's elapsed time to get the partition's, which never runs backwards."""
    rebooted: bool = False


class Configured(msgspec.Struct, array_like=True, gc=False, tag=2):
    """The policy is now this."""

    policy: Policy


class Produced(msgspec.Struct, gc=False):
    """Items took offsets from `base` on. Lies in a DATA frame, not among the state records."""

    base: int
    batch: Batch
    request: bytes | None = None
    ids: list[int] | None = None
    """The answer to the request, where some of its items were produced before (dedup)."""
    source: bytes | None = None
    sequence: int = 0
    replaced: list[int] | None = None
    """Items that return to where an item whose burial parked their key stood: flat pairs `[new offset, old offset, …]`."""


class LaneTake(msgspec.Struct, array_like=True, gc=False):
    """What a lease did with the offsets [start, stop) of a lane: it took some, passed over those of busy keys, left the rest."""

    lane: int
    start: int
    stop: int
    taken: list[int] | None = None
    """Runs; None is the whole of [start, stop)."""
    keys: bytes = b""
    """Key ids of `taken`; empty when none has a key."""
    passed: list[int] = []
    passed_keys: bytes = b""
    left: list[int] = []
    """Items without a key that stay ready where they are."""


class LineTake(msgspec.Struct, array_like=True, gc=False):
    """Items [start, stop) that had been passed over, taken from the front of their key's line."""

    key: int
    lane: int
    start: int
    stop: int


class Leased(msgspec.Struct, array_like=True, gc=False, tag=3):
    """Items were given to a consumer until `deadline`."""

    lease: int
    deadline: int
    timeout: int
    consumer: str
    takes: list[LaneTake] = []
    line_takes: list[LineTake] = []


class PassedOver(msgspec.Struct, array_like=True, gc=False, tag=4):
    """Items of busy keys were passed over; nobody got anything yet."""

    takes: list[LaneTake]


class Completed(msgspec.Struct, array_like=True, gc=False, tag=5):
    """Items of a lease are done: those of `runs`, or all that are still open."""

    lease: int
    runs: list[int] | None = None


class Retried(msgspec.Struct, array_like=True, gc=False, tag=6):
    """Items of a lease go back: those of `runs` because they failed, those of `returned` because an earlier one of their key did."""

    lease: int
    runs: list[int]
    due: int = 0
    """When they become ready; 0 is at once."""
    reason: str = ""
    counted: bool = True
    returned: list[int] = []


class LeaseExpired(msgspec.Struct, array_like=True, gc=False, tag=7):
    """A lease ended by its deadline; what was still open goes back."""

    lease: int


class Extended(msgspec.Struct, array_like=True, gc=False, tag=8):
    """A lease ends later."""

    lease: int
    deadline: int


class Buried(msgspec.Struct, array_like=True, gc=False, tag=9):
    """Items were given up, under a lease or (lease 0) while they waited."""

    lease: int
    runs: list[int]
    reason: str
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY where there is none), when their lines are touched: always with `park`."""
    returned: list[int] = []
    park: bool = False
    """Hold the keys until the items are redriven or cleared."""


class RequestAnswered(msgspec.Struct, array_like=True, gc=False, tag=17):
    """A request with an id was answered so; its repetition will be too. Stands behind the records of what it did."""

    request: bytes
    count: int = 0
    lease: int = 0
    refused: list[int] = []
    early: list[int] = []
    ids: list[int] | None = None
    """Of a produce that added nothing, because every item was there before (dedup)."""


class Due(msgspec.Struct, array_like=True, gc=False, tag=10):
    """Scheduled items became ready. Everything up to offset `last` at `until` is gone from the calendar named."""

    by_wall: bool
    until: int
    last: int
    runs: list[int]
    tags: list[int]
    """One per run: priority and whether it has a key, see lanes.py."""

    @property
    def keyed(self) -> list[int]:
        """The runs of items with keys."""
        flags = (tag & KEYED for tag in self.tags for _ in (0, 1))
        return [edge for edge, keyed in zip(self.runs, flags, strict=True) if keyed]


class TtlChecked(msgspec.Struct, array_like=True, gc=False, tag=11):
    """The ttl calendar was worked through up to offset `last` at `until`; what was found waiting is in a Buried record before this one."""

    until: int
    last: int
    overdue: list[int] = []
    """Leased when their ttl ended: buried if they come back."""


class Paused(msgspec.Struct, array_like=True, gc=False, tag=12):
    """Leasing and producing are held (True) or go on (False)."""

    lease: bool
    produce: bool


class Cleared(msgspec.Struct, array_like=True, gc=False, tag=13):
    """Items were resolved by an operator: all that were in the states named."""

    ready: list[int] = []
    scheduled: list[int] = []
    leased: list[int] = []
    buried: list[int] = []


class Sought(msgspec.Struct, array_like=True, gc=False, tag=14):
    """Completed items are ready again, in log order."""

    runs: list[int]


class RedrivenInPlace(msgspec.Struct, array_like=True, gc=False, tag=15):
    """Buried items are ready again: at the tail of their lanes, or, where their key was parked, at the front of its line."""

    runs: list[int]
    tags: bytes
    """One per offset: priority and KEYED."""
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY where there is none); empty when none has a key."""


class Lost(msgspec.Struct, array_like=True, gc=False, tag=16):
    """Damage took the bytes of items; they are out of the way."""

    runs: list[int]


class Dropped(msgspec.Struct, array_like=True, gc=False, tag=18):
    """Retention let go of the bytes of resolved items."""

    runs: list[int]


class CursorMoved(msgspec.Struct, array_like=True, gc=False, tag=19):
    """A cursor (new or known) has read everything before `offset`."""

    name: str
    offset: int


class CursorReleased(msgspec.Struct, array_like=True, gc=False, tag=20):
    """A cursor is no more and holds nothing back."""

    name: str


class ProgressSet(msgspec.Struct, array_like=True, gc=False, tag=28):
    """The holder of an item said how far it has come."""

    lease: int
    offset: int
    text: str


class CompletedUnleased(msgspec.Struct, array_like=True, gc=False, tag=29):
    """Ready items are done: the holder of the consumer right had handled them."""

    runs: list[int]
    consumer: str
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY where there is none, or its line is not touched); empty when no line is touched."""


class FenceSpec(msgspec.Struct, array_like=True, gc=False):
    """Items here from position `since` on wait for those of the same slot (or key) that partition `source` holds from before `mark`."""

    number: int
    source: int
    mark: int
    since: int
    slots: bytes | None
    """Packed u16, sorted; None when only keys are left."""
    keys: bytes = b""


class FencesAdded(msgspec.Struct, array_like=True, gc=False, tag=21):
    """Slots came here with version `version` of the slot map, and the dedup ids given with them."""

    version: int
    barriers: list[FenceSpec]
    dedup_ids: list[tuple[bytes, int, int]] = []
    """(digest, deadline, item): an item of another partition as words/ids.py numbers it."""


class FenceNarrowed(msgspec.Struct, array_like=True, gc=False, tag=22):
    """Of a barrier only these keys are left."""

    number: int
    keys: bytes


class FenceLifted(msgspec.Struct, array_like=True, gc=False, tag=23):
    """These keys of a narrowed barrier are free; without any left the barrier is gone."""

    number: int
    keys: bytes


class Sent(msgspec.Struct, array_like=True, gc=False, tag=24):
    """Items are on their way to another partition."""

    destination: bytes
    sequence: int
    runs: list[int]
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY where there is none, or its line is not touched); empty when no line is touched."""


class FollowUpSent(msgspec.Struct, array_like=True, gc=False, tag=25):
    """Items that are not of this partition are on their way to another: follow-ups."""

    destination: bytes
    sequence: int
    body: bytes


class Delivered(msgspec.Struct, array_like=True, gc=False, tag=26):
    """A transfer arrived, its items at offsets from `base` on (-1: not known)."""

    destination: bytes
    sequence: int
    base: int = -1


class ParkedKeyReleased(msgspec.Struct, array_like=True, gc=False, tag=27):
    """A parked key goes on without its buried items."""

    key: int


StateRecord: TypeAlias = (
    Opened
    | Configured
    | Leased
    | PassedOver
    | Completed
    | Retried
    | LeaseExpired
    | Extended
    | Buried
    | RequestAnswered
    | Due
    | TtlChecked
    | Paused
    | Cleared
    | Sought
    | RedrivenInPlace
    | Lost
    | Dropped
    | CursorMoved
    | CursorReleased
    | FencesAdded
    | FenceNarrowed
    | FenceLifted
    | Sent
    | FollowUpSent
    | Delivered
    | ParkedKeyReleased
    | ProgressSet
    | CompletedUnleased
)
Record: TypeAlias = Produced | StateRecord


def pack_keys(keys: Iterable[int]) -> bytes:
    return array("Q", keys).tobytes()


def unpack_keys(packed: bytes) -> list[int]:
    return array("Q", packed).tolist()
