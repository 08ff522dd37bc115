"""The state of one partition, and queries on it.

Owns: `State`. Only the `apply` functions of the other modules change it.
Each item's state is stored once, by the set that its offset is in:
- completed, buried_set, scheduled, moving: the items in these states; cancelled: a part of completed;
- passed_over: ready, but in a key line (keys.py);
- outside_lanes: completed + buried + moving + scheduled + passed over + leased;
- leased items are those of outside_lanes that are in no other set; all other items are ready in a lane.
Counts are the sizes of these sets and are stored nowhere else.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec

from penstock.rules.calendar import Calendar, CalendarEntry, NewTimes
from penstock.rules.calls import CallMemory
from penstock.rules.item_states import ItemState
from penstock.rules.keys import KeyLines
from penstock.rules.lanes import Lanes, Rank
from penstock.rules.leases import EPOCH_SHIFT, Leases
from penstock.rules.remembered_ids import DedupIds
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet
from penstock.words.clock import Moment
from penstock.words.limits import DEFAULT_PRIORITY, Policy


class Block(NamedTuple):
    """The key ids and priorities of the items of one frame (None: no item has any)."""

    base: int
    stop: int
    key_ids: list[int] | None = None
    priorities: bytes | None = None
    lost: bool = False
    """Whether damage took these items."""

    def key_of(self, offset: int) -> int:
        return NO_KEY if self.key_ids is None else self.key_ids[offset - self.base]

    def priority_of(self, offset: int) -> int:
        return DEFAULT_PRIORITY if self.priorities is None else self.priorities[offset - self.base]


class MissingBlocks(Exception):
    """A decision needs the blocks of `offsets`: fetch them and decide again."""

    def __init__(self, offsets: list[int]) -> None:
        super().__init__(offsets)
        self.offsets = offsets


class BlockSource(Protocol):
    """Blocks in memory."""

    def find(self, offset: int) -> Block:
        """The block of `offset`. Raises MissingBlocks if it is not in memory."""
        ...


def find_blocks(blocks: BlockSource, offsets: Iterable[int]) -> list[Block]:
    """The block of each offset. Raises MissingBlocks with all that are not in memory, to be fetched together."""
    found, missing = [], []
    for offset in offsets:
        try:
            found.append(blocks.find(offset))
        except MissingBlocks:
            missing.append(offset)
    if missing:
        raise MissingBlocks(missing)
    return found


def lost_runs(state: "State", blocks: Iterable[Block]) -> list[int]:
    """Flat runs of the items of lost blocks that are not recorded as lost yet (`State.unrecorded_losses`)."""
    return RunSet(edge for block in blocks if block.lost for edge in state.unrecorded_losses(block.base, block.stop)).runs


class Failure(NamedTuple):
    """The failed attempts of an item."""

    attempts: int
    first_failed_at: int
    last_failed_at: int
    reason: str


class Burial(NamedTuple):
    """Why and when an item was buried."""

    reason: str
    buried_at: int
    attempts: int
    first_failed_at: int
    last_failed_at: int
    since: int = 0
    """When it was buried, by elapsed time; 0: unknown, from an older version."""


class OutboxEntry(msgspec.Struct, array_like=True):
    """A transfer that is not confirmed: items of this partition, or (follow-ups) a batch as bytes."""

    sequence: int
    runs: list[int]
    body: bytes = b""


class Counts(NamedTuple):
    """How many items are in each state."""

    ready: int
    scheduled: int
    leased: int
    completed: int
    buried: int
    moving: int = 0
    cancelled: int = 0


class State:
    """The whole state of a partition, except the bytes of its items."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.epoch = 0
        self.boot_id = ""
        self.clock_shift = 0
        self.leases_given = 0
        self.moment = Moment(0, 0)
        """The time of the newest record."""
        self.next_offset = 0
        self.paused_lease = False
        self.paused_produce = False
        self.outside_lanes = RunSet()
        self.completed = RunSet()
        self.scheduled = RunSet()
        self.passed_over = RunSet()
        self.ttl_overdue = RunSet()
        """Items that were leased when their ttl ended."""
        self.lost = RunSet()
        """Items that are completed because damage took them."""
        self.cancelled = RunSet()
        """Items of `completed` that were cancelled, and whose bytes retention has not deleted."""
        self.dropped = RunSet()
        """Items that are completed and whose bytes retention deleted."""
        self.holes = RunSet()
        """Offsets that were never given, because a restore skipped them; they are in `completed` and `dropped`, too."""
        self.first_lease = 0
        """The lease numbers of an opening begin after this one; 0: the partition was never restored."""
        self.buried_dropped = 0
        """How many of `dropped` were buried before."""
        self.cursors: dict[str, int] = {}
        """name → the offset that the cursor reads next."""
        self.lanes = Lanes()
        self.keys = KeyLines()
        self.leases = Leases()
        self.by_wall = Calendar()
        self.by_elapsed = Calendar()
        self.new_times = NewTimes()
        """Of items whose time was changed: the calendars may still have their old times. Not stored."""
        self.ttl = Calendar()
        self.backing_off: dict[int, int] = {}
        """offset → key, of keyed items whose back-off holds their key."""
        self.failures: dict[int, Failure] = {}
        self.burials: dict[int, Burial] = {}
        self.buried_set = RunSet()
        self.calls = CallMemory()
        self.dedup = DedupIds()
        self.received_sequences: dict[bytes, int] = {}
        """source → the last sequence received from it."""
        self.received_bases: dict[bytes, int] = {}
        """source → the first offset of that transfer's items."""
        self.moving = RunSet()
        """Items of unconfirmed transfers."""
        self.outbox: dict[bytes, list[OutboxEntry]] = {}
        """destination → transfers that are not confirmed, in order."""
        self.sent_sequences: dict[bytes, int] = {}
        """destination → the last sequence sent to it."""
        self.moved: dict[int, tuple[int, bytes, int]] = {}
        """first offset → (stop, destination, base there or -1) of transferred items."""
        self.moved_items = 0
        self.progress: dict[int, tuple[int, str]] = {}
        """offset → (lease, text): the progress of a handler. Valid while that lease holds the item."""
        self.fence_version = 0
        """The last version of the slot map that moved slots to this partition."""
        self.fences_given = 0
        """The number of the newest fence."""

    @property
    def next_lease(self) -> int:
        return (self.epoch << EPOCH_SHIFT) + self.leases_given + 1

    def attempts(self, offset: int) -> int:
        """How many attempts of an item failed."""
        found = self.failures.get(offset)
        return found.attempts if found else 0

    def unrecorded_losses(self, start: int, stop: int) -> list[int]:
        """Flat runs of the items of a lost range that must be recorded as lost: not those that retention deleted."""
        return RunSet(self.lost.missing(start, min(stop, self.next_offset))).subtract(self.dropped.runs)

    def live_progress(self) -> dict[int, tuple[int, str]]:
        """The progress of items that are still held by the lease that reported it."""
        live = self.leases.live
        return {o: known for o, known in self.progress.items() if known[0] in live and o in live[known[0]].open_items}

    def leased_within(self, start: int, stop: int) -> RunSet:
        """Offsets of [start, stop) that are leased."""
        found = RunSet(self.outside_lanes.within(start, stop))
        for not_leased in (self.completed, self.scheduled, self.passed_over, self.buried_set, self.moving):
            found.remove_all(not_leased.within(start, stop))
        return found

    def waiting_within(self, start: int, stop: int) -> RunSet:
        """Offsets of [start, stop) that are ready or scheduled."""
        found = RunSet(self.outside_lanes.missing(start, stop))
        found.add_all(self.scheduled.within(start, stop))
        found.add_all(self.passed_over.within(start, stop))
        return found

    def runs_in(self, state: ItemState, start: int = 0) -> list[int]:
        """The items from offset `start` on that are in one state, as flat runs."""
        stop = self.next_offset
        if state is ItemState.READY:
            found = RunSet(self.outside_lanes.missing(start, stop))
            found.add_all(self.passed_over.within(start, stop))
            return found.runs
        if state is ItemState.LEASED:
            return self.leased_within(start, stop).runs
        if state is ItemState.COMPLETED:
            return RunSet(self.completed.within(start, stop)).subtract(self.cancelled.within(start, stop))
        sets = {
            ItemState.SCHEDULED: self.scheduled,
            ItemState.CANCELLED: self.cancelled,
            ItemState.BURIED: self.buried_set,
            ItemState.MOVING: self.moving,
        }
        return sets[state].within(start, stop)

    def state_of(self, offset: int) -> ItemState | None:
        """The state of an item; None if it was never produced."""
        if not 0 <= offset < self.next_offset or offset in self.holes:
            return None
        if offset not in self.outside_lanes or offset in self.passed_over:
            return ItemState.READY
        if offset in self.completed:
            return ItemState.CANCELLED if offset in self.cancelled else ItemState.COMPLETED
        if offset in self.buried_set:
            return ItemState.BURIED
        if offset in self.moving:
            return ItemState.MOVING
        return ItemState.SCHEDULED if offset in self.scheduled else ItemState.LEASED

    @property
    def ready(self) -> int:
        """How many items are ready, including those whose keys are held."""
        return self.next_offset - self.outside_lanes.total + self.passed_over.total

    @property
    def counts(self) -> Counts:
        ready = self.ready
        scheduled, completed, buried, moving = len(self.scheduled), len(self.completed), len(self.buried_set), len(self.moving)
        leased = self.next_offset - ready - scheduled - completed - buried - moving
        cancelled = len(self.cancelled)
        return Counts(ready, scheduled, leased, completed - cancelled - self.holes.total, buried, moving, cancelled)

    def due_by(self, by_wall: bool) -> Callable[[CalendarEntry], list[int]]:
        """Gives the runs of the items that an entry of a calendar makes ready: scheduled items, each by one entry.

        Call it with the calendar's entries in order.
        """
        scheduled, times = self.scheduled, self.new_times
        if not times:
            return lambda entry: scheduled.within(entry.start, entry.stop)
        given = RunSet()

        def due(entry: CalendarEntry) -> list[int]:
            found = RunSet(scheduled.within(entry.start, entry.stop))
            for offset in times.changed_within(entry.start, entry.stop):
                if offset in given or not times.is_current(offset, by_wall, entry.when, entry.tag):
                    found.remove(offset, offset + 1)
                elif offset in scheduled:
                    given.add(offset, offset + 1)
            return found.runs

        return due

    def duplicate_of(self, dedup_id: bytes, now: int) -> int | None:
        """The item that was produced with a dedup id within its window; None for none, or if that was cancelled."""
        found = self.dedup.get(dedup_id, now)
        return None if found is not None and found in self.cancelled else found

    @property
    def produced(self) -> int:
        """How many items were ever produced."""
        return self.next_offset - self.holes.total

    def next_due(self) -> tuple[int | None, int | None]:
        """When the next lease, schedule or ttl comes due: by elapsed time and by wall time."""
        first = self.leases.next_deadline()
        for calendar in (self.by_elapsed, self.ttl):
            when = None if calendar.empty else calendar.next()
            if when is not None and (first is None or when < first):
                first = when
        return first, None if self.by_wall.empty else self.by_wall.next()

    def lane_heads(self) -> list[Rank]:
        """For each lane with something to lease: the lane, and since when (elapsed) the older of its two heads waits.

        `best_rank` of it is the best rank at any later time, as long as the state does not change.
        The heads are the first extent and the first free key. The older one counts, because a returned keyed item
        stands before older ones. An extent may begin with items of held keys: a lease passes them over.
        """
        found = []
        for lane, extents in enumerate(self.lanes.lanes):
            free = self.keys.first_free(lane)
            if free is not None:
                since = free.waiting.first.ready_at
                found.append(Rank(lane, min(since, extents[0].ready_at) if extents else since))
            elif extents:
                found.append(Rank(lane, extents[0].ready_at))
        return found

    def __repr__(self) -> str:
        counts = " ".join(f"{name}={value}" for name, value in self.counts._asdict().items() if value)
        return f"State(next={self.next_offset} {counts or 'empty'} epoch={self.epoch})"
