"""How a partition of a restored backup is kept apart from the original, which may have gone on after the backup.

Owns: the decision and the application of `Restored`, `draw_first_lease`, `check_not_in_hole`, which refuses a position
that the original gave after the backup, and `no_item_error`. Everything before the backup stays as it is.
- Offsets. The next offset is beyond every offset that any copy of the partition can have given: OFFSETS_PER_SECOND for
  each second from 2026 to the restore, and at least LEAST_HOLE more than the backup has. The offsets in between, the
  hole, are never given. So an id or a position of an item that was produced after the backup names no item here.
- Leases. Lease numbers begin after a random number at every opening, so a token of another copy names no lease here.
  Leases in the backup end; their items return as after a retry that is not counted.
- Calls. Those made after the backup are not known: the repetition of one that began before the restore is refused.
"""

from collections.abc import Callable

from penstock.rules.commands import ItemCount, Restore, RetryLeased
from penstock.rules.leases import EPOCH_SHIFT
from penstock.rules.records import Record, Restored
from penstock.rules.runs import pairs
from penstock.rules.settle import decide_retry
from penstock.rules.state import BlockSource, State
from penstock.words.clock import SECOND, Moment
from penstock.words.errors import InvalidRequest, LeaseLost
from penstock.words.ids import FIRST_FOREIGN_NUMBER, format_id
from penstock.words.limits import check_range

OFFSETS_PER_SECOND = 1 << 16
"""More than a partition gives on average over its life, and few enough that a century of them is below the limit."""
SINCE = 1_767_225_600
"""The first second of 2026, in seconds since 1970."""
LEAST_HOLE = 1 << 36
"""The least number of offsets that a restore skips: for restores that follow each other, and for a wrong clock."""
LEAST_FIRST_LEASE = 1 << (EPOCH_SHIFT - 2)
"""More leases than an opening gives; a partition that was never restored begins at 0."""
RESTORED = "restored from a backup"


def draw_first_lease(entropy: Callable[[int], bytes]) -> int:
    """A random first lease for a queue that is restored."""
    return LEAST_FIRST_LEASE + int.from_bytes(entropy(8), "big") % LEAST_FIRST_LEASE


def decide_restore(state: State, command: Restore, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    check_range("first_lease", command.first_lease, LEAST_FIRST_LEASE, 2 * LEAST_FIRST_LEASE - 1)
    if state.first_lease == command.first_lease:
        return [], ItemCount(0)
    records: list[Record] = []
    returned = 0
    for number in sorted(state.leases.live):
        try:
            ended, answer = decide_retry(state, RetryLeased(number, reason=RESTORED, counted=False), now, blocks)
        except LeaseLost:  # it is past its deadline, and ends by its timer
            continue
        records += ended
        returned += answer.done
    offset = max((command.at // SECOND - SINCE) * OFFSETS_PER_SECOND, state.next_offset + LEAST_HOLE)
    check_range("the next offset after the restore", offset, 0, FIRST_FOREIGN_NUMBER - 1)
    return [*records, Restored(offset, command.first_lease)], ItemCount(returned)


def apply_restored(state: State, record: Restored, now: Moment) -> None:
    start, stop = state.next_offset, record.offset
    for items in (state.holes, state.completed, state.dropped, state.outside_lanes):
        items.add(start, stop)
    state.next_offset = stop
    state.first_lease = state.leases_given = record.first_lease
    state.calls.watermark = max(state.calls.watermark, now.elapsed)


def no_item_error(state: State, partition: int, offset: int) -> InvalidRequest:
    """The error for an offset at which there is no item."""
    none = f"there is no item {format_id(partition, offset)}"
    if offset in state.holes:
        return InvalidRequest(f"{none}; it was produced after the backup from which this broker was restored")
    return InvalidRequest(f"{none}; the next one of partition {partition} will be {format_id(partition, state.next_offset)}")


def check_not_in_hole(state: State, offset: int, partition: int | None = None) -> None:
    """Raise InvalidRequest for a position inside a hole. Its start is right: there the backup ends."""
    if offset not in state.holes or offset - 1 not in state.holes:
        return
    start = next(start for start, stop in pairs(state.holes.runs) if start <= offset < stop)
    where = "" if partition is None else f" of partition {partition}"
    raise InvalidRequest(
        f"offset {offset}{where} is not in the backup from which this broker was restored, which ends at {start}; "
        f"continue from {start}: what was produced after the backup is missing, and what was handled since then may come again"
    )
