"""The summary of a partition that is not open.

Owns: `Summary`, made from the state when a partition is closed, so that timers, leases and statistics need not open it.
It can be rebuilt: if the log has changed since, the partition is opened instead.
"""

import msgspec

from penstock.rules.calls import NEVER
from penstock.rules.lanes import Rank
from penstock.rules.outbox import moved_runs
from penstock.rules.runs import count, pairs
from penstock.rules.state import Counts, State
from penstock.words.clock import Moment

VERSION = 3


class Summary(msgspec.Struct, array_like=True):
    version: int = VERSION
    counts: Counts = Counts(0, 0, 0, 0, 0)
    next_offset: int = 0
    lost: int = 0
    gone: int = 0
    """Items that are in the state completed but were moved to another partition or lost."""
    busy_keys: int = 0
    buried_dropped: int = 0
    unresolved: int = 0
    size_bytes: int = 0
    paused_lease: bool = False
    paused_produce: bool = False
    fence_version: int = 0
    must_stay_open: bool = False
    """Whether the partition must be opened with its queue (`must_stay_open`)."""
    dropped_all: bool = False
    """Whether retention has deleted all items it ever had."""
    heads: list[Rank] = []
    due_elapsed: int | None = None
    due_wall: int | None = None
    epoch: int = 0
    boot_id: str = ""
    clock_shift: int = 0
    moment: Moment = Moment(0, 0)
    calls_until: int = NEVER
    """The elapsed time from which on it remembers no call."""
    parked_keys: int = 0
    produced: int = -1
    """How many items were ever produced; -1: as many as `next_offset`, in a summary of an earlier version."""

    @property
    def ready(self) -> int:
        """How many items can be leased: 0 while leasing is paused."""
        return 0 if self.paused_lease else self.counts.ready


def moved_or_lost(state: State) -> int:
    """How many items are in the state completed because they were moved to another partition or lost."""
    both = sum(count(state.lost.within(start, stop)) for start, stop in pairs(moved_runs(state))) if state.lost else 0
    cancelled = sum(count(state.lost.within(*pair)) for pair in pairs(state.cancelled.runs)) if state.lost else 0
    return state.moved_items + len(state.lost) - both - cancelled


def must_stay_open(state: State) -> bool:
    """Whether a partition must be open: it has leases, transfers or fences, or buried items that retention will delete
    by age, which is announced before."""
    return bool(state.leases.live or state.outbox or state.keys.fences or (state.buried_set and state.policy.retention.max_age))


def summarize(state: State, size_bytes: int) -> Summary:
    """The summary of a state."""
    elapsed, wall = state.next_due()
    return Summary(
        counts=state.counts,
        next_offset=state.next_offset,
        lost=len(state.lost),
        gone=moved_or_lost(state),
        busy_keys=len(state.keys.by_key),
        buried_dropped=state.buried_dropped,
        unresolved=state.next_offset - state.completed.total - state.buried_set.total,
        size_bytes=size_bytes,
        paused_lease=state.paused_lease,
        paused_produce=state.paused_produce,
        fence_version=state.fence_version,
        must_stay_open=must_stay_open(state),
        dropped_all=state.dropped.first_missing(0) >= state.next_offset,
        heads=state.lane_heads(),
        due_elapsed=elapsed,
        due_wall=wall,
        epoch=state.epoch,
        boot_id=state.boot_id,
        clock_shift=state.clock_shift,
        moment=state.moment,
        calls_until=state.calls.latest_deadline(),
        parked_keys=len(state.keys.parked),
        produced=state.produced,
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Summary)


def dump(summary: Summary) -> bytes:
    return _encoder.encode(summary)


def load(data: bytes) -> Summary | None:
    """The summary of `dump`; without bytes, that of a partition that was never opened. None if it cannot be read."""
    if not data:
        return Summary()
    try:
        found = _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
    return found if found.version == VERSION else None
