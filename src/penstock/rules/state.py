"""The state of one partition, and the questions that can be asked of it.

Owns: `State`. Only `apply` functions (the modules beside this one) change it; anybody may read it.
An item's state is kept in one way each, and READY is what is left:
- resolved, buried, scheduled: by their sets; passed: ready, but in its key's line (keys.py);
- moving: on its way to another partition (outbox.py);
- away: everything that is not ready in a lane = resolved + buried + moving + scheduled + passed + leased;
- leased: away and in none of the others. Counts follow from the sizes of the sets and are kept nowhere else.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from penstock.rules.calendar import Calendar
from penstock.rules.item_states import ItemState
from penstock.rules.keys import KeyLines
from penstock.rules.lanes import Lanes, Rank, best_rank
from penstock.rules.leases import EPOCH_SHIFT, Leases
from penstock.rules.remembered_ids import AnswerWindow, DedupIds
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet
from penstock.words.clock import Moment
from penstock.words.limits import DEFAULT_PRIORITY, Policy


class Block(NamedTuple):
    """What rules may need to see of items on disk: one frame's worth of key ids and priorities (None: no item has any)."""

    base: int
    stop: int
    key_ids: list[int] | None = None
    priorities: bytes | None = None
    lost: bool = False
    """Damage took these items."""

    def key_of(self, offset: int) -> int:
        return NO_KEY if self.key_ids is None else self.key_ids[offset - self.base]

    def priority_of(self, offset: int) -> int:
        return DEFAULT_PRIORITY if self.priorities is None else self.priorities[offset - self.base]


class MissingBlocks(Exception):
    """A decision needs the blocks that hold `offsets`: fetch them and decide again."""

    def __init__(self, offsets: list[int]) -> None:
        super().__init__(offsets)
        self.offsets = offsets


class BlockSource(Protocol):
    """Blocks at hand."""

    def find(self, offset: int) -> Block:
        """The block that holds `offset`; raises Missing when it is not at hand."""
        ...


def find_blocks(peek: BlockSource, offsets: Iterable[int]) -> list[Block]:
    """The block of each offset; raises Missing with all that are not at hand, so that they are fetched in one go."""
    found, missing = [], []
    for offset in offsets:
        try:
            found.append(peek.find(offset))
        except MissingBlocks:
            missing.append(offset)
    if missing:
        raise MissingBlocks(missing)
    return found


def lost_runs(state: "State", blocks: Iterable[Block]) -> list[int]:
    """What damage took of blocks that were looked at and is not recorded yet; what retention took was not damaged."""
    return RunSet(edge for block in blocks if block.lost for edge in state.unrecorded_losses(block.base, block.stop)).runs


class Failure(NamedTuple):
    """What is known of an item that came back."""

    attempts: int
    first_failed_at: int
    last_failed_at: int
    reason: str


class Burial(NamedTuple):
    """Why and when an item was given up."""

    reason: str
    buried_at: int
    attempts: int
    first_failed_at: int
    last_failed_at: int
    since: int = 0
    """When it was buried, by elapsed time; 0 where that was not written down."""


class OutboxEntry(msgspec.Struct, array_like=True):
    """A transfer on its way: items of this partition, or (follow-ups) a batch as bytes."""

    sequence: int
    runs: list[int]
    body: bytes = b""


class RememberedAnswer(msgspec.Struct, array_like=True):
    """The answer to a request, kept for its repetition."""

    base: int = 0
    count: int = 0
    ids: list[int] | None = None
    lease: int = 0
    refused: list[int] = []
    early: list[int] = []


class Counts(NamedTuple):
    """How many items are in each state."""

    ready: int
    scheduled: int
    leased: int
    completed: int
    buried: int
    moving: int = 0


class State:
    """Everything a partition knows but for the bytes of its items."""

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
        """Leased when their ttl ended."""
        self.lost = RunSet()
        """Resolved because damage took them."""
        self.dropped = RunSet()
        """Resolved, and their bytes let go by retention."""
        self.buried_dropped = 0
        """How many of those were buried when retention took them."""
        self.cursors: dict[str, int] = {}
        """name → the offset it reads next."""
        self.lanes = Lanes()
        self.keys = KeyLines()
        self.leases = Leases()
        self.by_wall = Calendar()
        self.by_elapsed = Calendar()
        self.ttl = Calendar()
        self.backing_off: dict[int, int] = {}
        """offset → key of keyed items whose delay holds their key."""
        self.failures: dict[int, Failure] = {}
        self.burials: dict[int, Burial] = {}
        self.buried_set = RunSet()
        self.requests: AnswerWindow[RememberedAnswer] = AnswerWindow()
        self.dedup = DedupIds()
        self.received_sequences: dict[bytes, int] = {}
        """source → the last sequence taken from it."""
        self.received_bases: dict[bytes, int] = {}
        """source → the offset at which that transfer's items begin."""
        self.moving = RunSet()
        """On their way to another partition."""
        self.outbox: dict[bytes, list[OutboxEntry]] = {}
        """destination → transfers not yet known to have arrived, in order."""
        self.sent_sequences: dict[bytes, int] = {}
        """destination → the last sequence given."""
        self.moved: dict[int, tuple[int, bytes, int]] = {}
        """first offset → (end, destination, base there or -1) of items that went elsewhere."""
        self.moved_items = 0
        self.progress: dict[int, tuple[int, str]] = {}
        """offset → (lease, text): how far a holder has come. Good while that lease holds the item."""
        self.fence_version = 0
        """The version of the slot map by which slots last came here."""
        self.fences_given = 0

    @property
    def next_lease(self) -> int:
        return (self.epoch << EPOCH_SHIFT) + self.leases_given + 1

    def attempts(self, offset: int) -> int:
        """How often an item was leased and came back."""
        found = self.failures.get(offset)
        return found.attempts if found else 0

    def unrecorded_losses(self, start: int, stop: int) -> list[int]:
        """Of a stretch that the log says it has lost: runs of the items that are to be recorded as lost. What retention took is not."""
        return RunSet(self.lost.missing(start, min(stop, self.next_offset))).subtract(self.dropped.runs)

    def live_progress(self) -> dict[int, tuple[int, str]]:
        """The notes of items that are still held by who wrote them."""
        live = self.leases.live
        return {o: note for o, note in self.progress.items() if note[0] in live and o in live[note[0]].open_items} if self.progress else {}

    def leased_within(self, start: int, stop: int) -> RunSet:
        """Offsets of [start, stop) that are leased."""
        found = RunSet(self.outside_lanes.within(start, stop))
        for others in (self.completed, self.scheduled, self.passed_over, self.buried_set, self.moving):
            found.remove_all(others.within(start, stop))
        return found

    def waiting_within(self, start: int, stop: int) -> RunSet:
        """Offsets of [start, stop) that are ready or scheduled."""
        found = RunSet(self.outside_lanes.missing(start, stop))
        found.add_all(self.scheduled.within(start, stop))
        found.add_all(self.passed_over.within(start, stop))
        return found

    def runs_in(self, life: ItemState, start: int = 0) -> list[int]:
        """The items from offset `start` on that are in one state, as flat runs."""
        stop = self.next_offset
        if life is ItemState.READY:
            found = RunSet(self.outside_lanes.missing(start, stop))
            found.add_all(self.passed_over.within(start, stop))
            return found.runs
        if life is ItemState.LEASED:
            return self.leased_within(start, stop).runs
        sets = {
            ItemState.SCHEDULED: self.scheduled,
            ItemState.COMPLETED: self.completed,
            ItemState.BURIED: self.buried_set,
            ItemState.MOVING: self.moving,
        }
        return sets[life].within(start, stop)

    def state_of(self, offset: int) -> ItemState | None:
        """Where an item is in its life; None when it was never produced."""
        if not 0 <= offset < self.next_offset:
            return None
        if offset not in self.outside_lanes or offset in self.passed_over:
            return ItemState.READY
        if offset in self.completed:
            return ItemState.COMPLETED
        if offset in self.buried_set:
            return ItemState.BURIED
        if offset in self.moving:
            return ItemState.MOVING
        return ItemState.SCHEDULED if offset in self.scheduled else ItemState.LEASED

    @property
    def ready(self) -> int:
        """How many items are ready, whether or not their keys are free."""
        return self.next_offset - self.outside_lanes.total + self.passed_over.total

    @property
    def counts(self) -> Counts:
        ready = self.ready
        scheduled, completed, buried, moving = len(self.scheduled), len(self.completed), len(self.buried_set), len(self.moving)
        leased = self.next_offset - ready - scheduled - completed - buried - moving
        return Counts(ready, scheduled, leased, completed, buried, moving)

    def next_due(self) -> tuple[int | None, int | None]:
        """When something comes due by itself: by elapsed time, by wall time."""
        elapsed = [when for when in (self.leases.next_deadline(), self.by_elapsed.next(), self.ttl.next()) if when is not None]
        return (min(elapsed) if elapsed else None, self.by_wall.next())

    def lane_heads(self) -> list[Rank]:
        """Of each lane that has something to lease: the lane, and since when the oldest of its heads waits, by elapsed time.

        With `best_rank` it says how good the best item is at any later time, as long as the state stays as it is.
        Heads are the first extent and the first free key. A keyed item that came back stands before older ones: so the oldest counts.
        An extent may begin with items of held keys: a lease that meets them passes them over, and the next look finds what is behind.
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

    def best_head(self, now: int) -> Rank | None:
        """How good the best item is that a lease might take at `now` (elapsed); None when there is nothing to lease."""
        return best_rank(self.lane_heads(), self.policy.priority_aging, now)

    def __repr__(self) -> str:
        counts = " ".join(f"{name}={value}" for name, value in self.counts._asdict().items() if value)
        return f"State(next={self.next_offset} {counts or 'empty'} epoch={self.epoch})"
