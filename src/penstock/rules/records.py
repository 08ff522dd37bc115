"""Records: what happened in a partition. A partition's state follows from its records alone.

Owns: the record types, and how key columns are packed. Applying a record needs only the state before it.
A record is a MessagePack array that begins with its tag. A field may be added at the end, with a default;
no field is ever moved or removed (docs/format.md). Runs are flat `[start, stop, …]` (runs.py).
Times named `deadline`, `until` and `due` are elapsed microseconds, `…_at` wall microseconds.
Key columns are packed little-endian u64, one per offset.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from penstock.rules.calls import CallName, RememberedAnswer
from penstock.rules.lanes import KEYED
from penstock.rules.routing import NO_KEY
from penstock.words.batch import Batch
from penstock.words.limits import Policy


class Opened(msgspec.Struct, array_like=True, gc=False, tag=1):
    """An owner opened the partition. Synced before its first lease, so that no two owners give one number."""

    epoch: int
    boot_id: str
    clock_shift: int
    """Added to the machine's elapsed time to get the partition's elapsed time, which never runs backwards."""
    rebooted: bool = False
    lease_grace: int = 0
    """No live lease ends for so long: while nobody owned the partition, its holder could not settle or extend it."""


class Configured(msgspec.Struct, array_like=True, gc=False, tag=2):
    """The partition has a new policy."""

    policy: Policy


class Produced(msgspec.Struct, gc=False):
    """Items were stored at offsets from `base` on. It is written as a DATA frame, not among the state records."""

    base: int
    batch: Batch
    calls: Sequence[CallName] = ()
    ids: list[int] | None = None
    """The offsets that the call was answered with, if some of its items were duplicates (dedup)."""
    source: bytes | None = None
    sequence: int = 0
    replaced: list[int] | None = None
    """Flat pairs `[new offset, old offset, …]`: new items at the positions of buried ones that parked their key."""
    indexes: list[int] | None = None
    """Which of the items of its call these are, as runs; None: all."""


class LaneTake(msgspec.Struct, array_like=True, gc=False):
    """What a lease did with [start, stop) of a lane: it took some, passed over those of busy keys, left the rest."""

    lane: int
    start: int
    stop: int
    taken: list[int] | None = None
    """Runs; None: all of [start, stop)."""
    keys: bytes = b""
    """Key ids of `taken`; empty if no item has a key."""
    passed: list[int] = []
    passed_keys: bytes = b""
    left: list[int] = []
    """Items without a key that stay ready at their positions."""


class LineTake(msgspec.Struct, array_like=True, gc=False):
    """Items [start, stop) that a lease took from the front of their key line."""

    key: int
    lane: int
    start: int
    stop: int


class Leased(msgspec.Struct, array_like=True, gc=False, tag=3):
    """A consumer leased items until `deadline`."""

    lease: int
    deadline: int
    timeout: int
    consumer: str
    takes: list[LaneTake] = []
    line_takes: list[LineTake] = []

    @property
    def runs(self) -> list[int]:
        """Flat runs of all leased items, in the order leased."""
        found: list[int] = []
        for take in self.takes:
            found += (take.start, take.stop) if take.taken is None else take.taken
        return [*found, *self.line_runs] if self.line_takes else found

    @property
    def line_runs(self) -> list[int]:
        """Flat runs of the items that were taken from key lines."""
        found = [0] * (2 * len(self.line_takes))
        found[::2] = [take.start for take in self.line_takes]
        found[1::2] = [take.stop for take in self.line_takes]
        return found

    @property
    def count(self) -> int:
        """How many items were leased."""
        found = sum([take.stop - take.start for take in self.line_takes]) if self.line_takes else 0
        for take in self.takes:
            found += take.stop - take.start if take.taken is None else sum(take.taken[1::2]) - sum(take.taken[::2])
        return found


class PassedOver(msgspec.Struct, array_like=True, gc=False, tag=4):
    """Items of busy keys were passed over; nothing was leased yet."""

    takes: list[LaneTake]


class Completed(msgspec.Struct, array_like=True, gc=False, tag=5):
    """Items of a lease were completed: `runs`, or (None) all that were still open."""

    lease: int
    runs: list[int] | None = None


class Retried(msgspec.Struct, array_like=True, gc=False, tag=6):
    """Items of a lease were returned: `runs` failed; before each of `returned`, an earlier item of its key failed."""

    lease: int
    runs: list[int]
    due: int = 0
    """When they become ready; 0: at once."""
    reason: str = ""
    counted: bool = True
    returned: list[int] = []


class LeaseExpired(msgspec.Struct, array_like=True, gc=False, tag=7):
    """A lease passed its deadline; its open items were returned."""

    lease: int


class Extended(msgspec.Struct, array_like=True, gc=False, tag=8):
    """A lease has a later deadline."""

    lease: int
    deadline: int


class Buried(msgspec.Struct, array_like=True, gc=False, tag=9):
    """Items were buried, under a lease or (lease 0) while they waited."""

    lease: int
    runs: list[int]
    reason: str
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY for none). Given if the burial changes key lines: always with `park`."""
    returned: list[int] = []
    park: bool = False
    """Whether the keys are held until the items are redriven or cleared."""


class RequestAnswered(msgspec.Struct, array_like=True, gc=False, tag=17):
    """The answer to a request, for its repetition. Not written any more: CallAnswered replaced it."""

    request: bytes
    count: int = 0
    lease: int = 0
    refused: list[int] = []
    early: list[int] = []
    ids: list[int] | None = None
    """The offsets, if the request was a produce of which every item was a duplicate (dedup)."""


class Due(msgspec.Struct, array_like=True, gc=False, tag=10):
    """Scheduled items became ready. The calendar's entries up to offset `last` at `until` are removed."""

    by_wall: bool
    until: int
    last: int
    runs: list[int]
    tags: list[int]
    """One per run: priority, and KEYED if the item has a key (lanes.py)."""

    @property
    def keyed(self) -> list[int]:
        """The runs of items with keys."""
        flags = (tag & KEYED for tag in self.tags for _ in (0, 1))
        return [edge for edge, keyed in zip(self.runs, flags, strict=True) if keyed]


class TtlChecked(msgspec.Struct, array_like=True, gc=False, tag=11):
    """The ttls up to offset `last` at `until` were checked; a Buried record before this has the waiting items."""

    until: int
    last: int
    overdue: list[int] = []
    """Items that were leased when their ttl ended: they are buried if they are returned."""


class Paused(msgspec.Struct, array_like=True, gc=False, tag=12):
    """Whether leasing and producing are paused."""

    lease: bool
    produce: bool


class Cleared(msgspec.Struct, array_like=True, gc=False, tag=13):
    """All items in the given states were completed by an administrative operation."""

    ready: list[int] = []
    scheduled: list[int] = []
    leased: list[int] = []
    buried: list[int] = []


class Sought(msgspec.Struct, array_like=True, gc=False, tag=14):
    """Completed items became ready again, in log order."""

    runs: list[int]


class RedrivenInPlace(msgspec.Struct, array_like=True, gc=False, tag=15):
    """Buried items became ready again: at the tail of their lanes or, if they parked their key, in its line."""

    runs: list[int]
    tags: bytes
    """One per offset: priority and KEYED."""
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY for none); empty if no item has a key."""


class Lost(msgspec.Struct, array_like=True, gc=False, tag=16):
    """Damage took the bytes of items; the items count as completed."""

    runs: list[int]


class Dropped(msgspec.Struct, array_like=True, gc=False, tag=18):
    """Retention deletes the bytes of resolved items."""

    runs: list[int]


class CursorMoved(msgspec.Struct, array_like=True, gc=False, tag=19):
    """A cursor (new or known) has read everything before `offset`."""

    name: str
    offset: int


class CursorReleased(msgspec.Struct, array_like=True, gc=False, tag=20):
    """A cursor was removed; it no longer limits retention."""

    name: str


class ProgressSet(msgspec.Struct, array_like=True, gc=False, tag=28):
    """The holder of an item reported its progress."""

    lease: int
    offset: int
    text: str


class CompletedUnleased(msgspec.Struct, array_like=True, gc=False, tag=29):
    """Ready items were completed, because the holder of the consumer right had handled them."""

    runs: list[int]
    consumer: str
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY for items that are in no key line); empty if none is in a line."""


class FenceSpec(msgspec.Struct, array_like=True, gc=False):
    """A fence: items at position `since` or later wait for partition `source`.

    They wait until `source` has resolved its items of the same slots (or keys) from before its position `mark`.
    """

    number: int
    source: int
    mark: int
    since: int
    slots: bytes | None
    """Packed u16, sorted; None if the fence covers only keys."""
    keys: bytes = b""


class FencesAdded(msgspec.Struct, array_like=True, gc=False, tag=21):
    """Slots were assigned to this partition by version `version` of the slot map: their fences and their dedup ids."""

    version: int
    fences: list[FenceSpec]
    dedup_ids: list[tuple[bytes, int, int]] = []
    """(digest, deadline, item): the item is in another partition; words/ids.py says how it is numbered."""


class FenceNarrowed(msgspec.Struct, array_like=True, gc=False, tag=22):
    """A fence now covers only these keys."""

    number: int
    keys: bytes


class FenceLifted(msgspec.Struct, array_like=True, gc=False, tag=23):
    """A narrowed fence no longer covers these keys; without any key it is removed."""

    number: int
    keys: bytes


class Sent(msgspec.Struct, array_like=True, gc=False, tag=24):
    """A transfer of items to another partition began."""

    destination: bytes
    sequence: int
    runs: list[int]
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY for items that are in no key line); empty if none is in a line."""


class FollowUpSent(msgspec.Struct, array_like=True, gc=False, tag=25):
    """A transfer of follow-ups to another partition began. They are not items of this partition."""

    destination: bytes
    sequence: int
    body: bytes


class Delivered(msgspec.Struct, array_like=True, gc=False, tag=26):
    """A transfer arrived; its items have offsets from `base` on there (-1: unknown)."""

    destination: bytes
    sequence: int
    base: int = -1


class ParkedKeyReleased(msgspec.Struct, array_like=True, gc=False, tag=27):
    """A parked key was released; its buried items stay buried."""

    key: int


class Cancelled(msgspec.Struct, array_like=True, gc=False, tag=31):
    """Waiting items were cancelled: they never become ready again."""

    runs: list[int]
    keys: bytes = b""
    """Key ids of `runs` (NO_KEY for items that are in no key line); empty if none is in a line."""


class Skipped(msgspec.Struct, array_like=True, gc=False, tag=34):
    """Waiting items before a point were completed without being handled. A seek can bring them back."""

    runs: list[int]
    keys: bytes = b""
    """As in Cancelled."""


class Rescheduled(msgspec.Struct, array_like=True, gc=False, tag=32):
    """Waiting items were given another time. Those that were ready gave up their positions."""

    runs: list[int]
    tags: bytes
    """One per offset: priority and KEYED."""
    keys: bytes = b""
    """As in Cancelled."""
    at: int = 0
    """When they become ready, wall; 0: at once, which only scheduled items are."""
    due: int = 0
    """When they become ready, by elapsed time: then `at` only tells about when that will be. 0: `at` counts."""


class CallAnswered(msgspec.Struct, array_like=True, gc=False, tag=30):
    """What was done for a call, for its repetition. It follows the records of what was done."""

    calls: list[CallName]
    answers: list[RememberedAnswer]


class Restored(msgspec.Struct, array_like=True, gc=False, tag=33):
    """The partition was restored from a backup: the next offset is `offset`, and none before it is given any more."""

    offset: int
    first_lease: int
    """Lease numbers of every opening begin after this one, which no other copy of the partition has."""


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
    | Cancelled
    | Skipped
    | Rescheduled
    | CallAnswered
    | Restored
)
Record: TypeAlias = Produced | StateRecord


def pack_keys(keys: Iterable[int]) -> bytes:
    return array("Q", keys).tobytes()


def unpack_keys(packed: bytes) -> list[int]:
    return array("Q", packed).tolist()


def unpack_keys_or_none(packed: bytes, count: int) -> list[int]:
    """The key ids of `count` items; NO_KEY for each when nothing is packed."""
    return array("Q", packed).tolist() if packed else [NO_KEY] * count
