"""The simulation of a partition can fail: each of these planted bugs must be caught (planted_bugs.py)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import pytest

from penstock.logs.files import filelog, recovery
from penstock.logs.files.log_writer import LogWriter
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.log import Gap
from penstock.loop import recovery as partition_recovery
from penstock.loop import retention as planning
from penstock.loop.item_cache import BlockCache, CachedItems, ItemCache
from penstock.loop.partition import Partition
from penstock.loop.partition_reader import RetainedItems, retained_runs
from penstock.rules import admin, machine, records, removal, retention, settle, timers, waiting_items
from penstock.rules.calendar import Calendar, CalendarEntry, NewTimes
from penstock.rules.calls import CallMemory, CallName, RememberedAnswer
from penstock.rules.commands import Seek, Settled
from penstock.rules.keys import KeyLine, KeyLines, PackedExtents
from penstock.rules.lanes import Extent, Lanes
from penstock.rules.leases import Leases, LiveLease
from penstock.rules.remembered_ids import DedupIds
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import BlockSource, State
from penstock.words.clock import HOUR, SECOND, Moment
from penstock.words.errors import StorageFailed
from penstock.words.limits import DEFAULT_PRIORITY
from simulation.partition.simulation import PartitionSimulation
from tests.simulation.planted_bugs import SHORT_RUN, Patch, Plant, PlantedBugs

BUGS = PlantedBugs(PartitionSimulation)
bug = BUGS.caught_within(SHORT_RUN)


# -- leases ----------------------------------------------------------------------------------------


@bug
def expiry_keeps_the_old_lease_valid(patch: Patch) -> None:
    def apply(state: State, record: records.LeaseExpired, now: Moment) -> None:
        lease = state.leases.live[record.lease]
        timers.apply_lease_expired(state, record, now)
        state.leases.live[record.lease] = lease

    patch.setitem(machine._APPLY, records.LeaseExpired, apply)


@bug
def the_epoch_is_not_raised(patch: Patch) -> None:
    def apply(state: State, record: records.Opened, now: Moment) -> None:
        admin.apply_opened(state, msgspec.structs.replace(record, epoch=1), now)

    patch.setitem(machine._APPLY, records.Opened, apply)


@bug
def leases_end_at_once_after_an_opening(patch: Patch) -> None:
    patch.setattr(partition_recovery, "GRACE_AFTER_OPENING", 0)


@bug
def a_reboot_does_not_give_leases_their_full_timeout(patch: Patch) -> None:
    patch.setattr(Leases, "restart_timeouts", lambda self, now: None)


@bug
def a_complete_under_an_ended_lease_is_accepted(patch: Patch) -> None:
    patch.setattr(settle, "_answer_under_ended_lease", lambda state, lease, wanted: Settled(len(wanted)))


@bug
def attempts_are_not_counted(patch: Patch) -> None:
    patch.setattr(settle, "add_failure", lambda *_: None)


@bug
def one_attempt_too_many_is_allowed(patch: Patch) -> None:
    patch.setattr(State, "attempts", lambda self, offset: self.failures[offset].attempts - 1 if offset in self.failures else -1)


# -- order -----------------------------------------------------------------------------------------


@bug
def a_retried_item_with_a_key_goes_behind_later_items(patch: Patch) -> None:
    patch.setattr(PackedExtents, "appendleft", PackedExtents.append)


@bug
def lanes_are_last_in_first_out(patch: Patch) -> None:
    def add(self: Lanes, lane: int, start: int, stop: int, flags: int, position: int, ready_at: int) -> None:
        self.lanes[lane].appendleft(Extent(start, stop, flags, position, ready_at))

    patch.setattr(Lanes, "add", add)


@bug
def priorities_are_ignored(patch: Patch) -> None:
    add = Lanes.add
    patch.setattr(Lanes, "add", lambda self, lane, *rest: add(self, DEFAULT_PRIORITY, *rest))


def _plant_busy(patch: Patch, busy: Callable[[KeyLine], object]) -> None:
    """Let lines be busy that `busy` says; the loops over many keys do not ask them, so they are replaced too."""

    def head(self: KeyLines, lane: int, position: int, offset: int, key: int) -> KeyLine | None:
        line = self.by_key.get(key)
        if not isinstance(line, KeyLine) or line.busy or not line.waiting:
            return None
        first = line.waiting.first
        return line if (first.tag, first.position, first.start) == (lane, position, offset) else None

    def free_lines(self: KeyLines, lane: int, want: int = 1) -> Iterator[tuple[tuple[int, int, int], KeyLine]]:
        return ((entry, line) for entry in sorted(self.free_heads[lane]) if (line := head(self, lane, *entry)) is not None)

    def release(self: KeyLines, keys: Sequence[int], lease: int) -> None:
        for key in keys:
            line = self.by_key.get(key)
            if line == lease:
                del self.by_key[key]
            elif isinstance(line, KeyLine) and line.lease == lease:
                line.lease = 0
                self.update_head(key, line)

    patch.setattr(KeyLine, "busy", property(lambda self: bool(busy(self))))
    for function in (head, free_lines, release):
        patch.setattr(KeyLines, function.__name__, function)


@bug
def a_parked_key_is_released(patch: Patch) -> None:
    _plant_busy(patch, lambda line: line.lease or line.backing_off)


@bug
def a_back_off_does_not_hold_its_key(patch: Patch) -> None:
    _plant_busy(patch, lambda line: line.lease or line.parked)


@bug
def a_rescheduled_item_becomes_ready_at_its_old_time(patch: Patch) -> None:
    patch.setattr(NewTimes, "is_current", lambda self, offset, by_wall, when, tag: True)


@bug
def a_rescheduled_item_keeps_its_position_in_its_lane(patch: Patch) -> None:
    patch.setattr(Lanes, "drop", lambda self, runs: None)


@bug
def a_cancelled_back_off_still_holds_its_key(patch: Patch) -> None:
    def apply(state: State, record: records.Cancelled, now: Moment) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(removal, "leave_lines", lambda state, runs, keys: None)
            waiting_items.apply_cancelled(state, record, now)

    patch.setitem(machine._APPLY, records.Cancelled, apply)


@bug
def a_seek_brings_cancelled_items_back(patch: Patch) -> None:
    def decide(state: State, command: Seek, now: Moment, blocks: BlockSource) -> object:
        cancelled, state.cancelled = state.cancelled, RunSet()
        try:
            return admin.decide_seek(state, command, now, blocks)
        finally:
            state.cancelled = cancelled

    patch.setitem(machine._DECIDE, Seek, decide)


@bug
def two_of_a_key_are_leased_at_once(patch: Patch) -> None:
    _plant_busy(patch, lambda line: line.backing_off or line.parked)


@bug
def a_key_that_became_free_is_forgotten(patch: Patch) -> None:
    def release(self: KeyLines, keys: Sequence[int], lease: int) -> None:
        heads = [list(lane) for lane in self.free_heads]
        released(self, keys, lease)
        self.free_heads = heads

    released = KeyLines.release
    patch.setattr(KeyLines, "release", release)


@bug
def a_key_that_was_taken_stays_free(patch: Patch) -> None:
    def take(self: KeyLines, takes: Sequence[records.LineTake], lease: int) -> None:
        taken(self, takes, lease)
        for one in takes:
            self.line(one.key).lease = 0
            self.update_head(one.key, self.line(one.key))

    taken = KeyLines.take
    patch.setattr(KeyLines, "take", take)


@bug
def the_line_of_a_key_is_out_of_order(patch: Patch) -> None:
    def pass_over_each(self: KeyLines, keys: Sequence[int], start: int, lane: int, ready_at: int) -> None:
        for offset, key in reversed([*enumerate(keys, start)]):
            self.line(key).waiting.append(Extent(offset, offset + 1, lane, offset, ready_at))
            self.update_head(key, self.line(key))

    patch.setattr(KeyLines, "pass_over_each", pass_over_each)


@bug
def heads_that_are_stale_are_leased(patch: Patch) -> None:
    def valid(self: KeyLines, lane: int, ordered: Iterable[tuple[int, int, int]]) -> Iterator[tuple[tuple[int, int, int], KeyLine]]:
        return ((entry, line) for entry in ordered if isinstance(line := self.by_key.get(entry[2]), KeyLine) and line.waiting)

    patch.setattr(KeyLines, "_valid", valid)


@bug
def items_put_into_lines_together_are_out_of_order(patch: Patch) -> None:
    def append_items(self: PackedExtents, runs: list[int], lane: int, ready_at: int) -> None:
        for start, stop in reversed([*pairs(runs)]):
            self.append(Extent(start, stop, lane, start, ready_at))

    patch.setattr("penstock.rules.keys.GROUPED", 1)  # the simulation's batches are small
    patch.setattr(PackedExtents, "append_items", append_items)


@bug
def a_unit_skips_an_item(patch: Patch) -> None:
    def take(self: PackedExtents, start: int, stop: int) -> None:
        taken(self, start + (stop - start > 1), stop)

    taken = PackedExtents.take
    patch.setattr(PackedExtents, "take", take)


@bug
def later_items_of_a_unit_are_not_returned(patch: Patch) -> None:
    patch.setattr(LiveLease, "later_of_key", lambda self, offset: [])


# -- time ------------------------------------------------------------------------------------------


@bug
def the_ttl_buries_leased_items(patch: Patch) -> None:
    patch.setattr(State, "waiting_within", lambda self, start, stop: RunSet(self.completed.missing(start, stop)))


@bug
def schedules_fire_early(patch: Patch) -> None:
    def early(self: Calendar, now: int, limit: int) -> list[CalendarEntry]:
        return due_in_time(self, now + 3 * SECOND, limit)

    due_in_time = Calendar.due
    patch.setattr(Calendar, "due", early)


@bug
def elapsed_time_follows_the_wall_clock(patch: Patch) -> None:
    patch.setattr(Partition, "now", lambda self: Moment(max(self.state.moment.elapsed, self._clock.read().wall), self._clock.read().wall))


# -- remembered ids --------------------------------------------------------------------------------


@bug
def repeated_requests_are_executed_again(patch: Patch) -> None:
    patch.setattr(CallMemory, "find", lambda self, name, now: None)


@bug
def a_restart_forgets_dedup_ids_and_answers(patch: Patch) -> None:
    patch.setattr(DedupIds, "restore", lambda self, name, deadline, value: None)
    patch.setattr(CallMemory, "restore", lambda self, sessions, requests, watermark: None)


@bug
def a_newer_call_does_not_replace_the_older_one_of_its_session(patch: Patch) -> None:
    right = CallMemory.put

    def put(self: CallMemory, names: Sequence[CallName], answers: Sequence[RememberedAnswer], now: int, span: int) -> None:
        right(self, [name for name in names if name.fingerprint or name.session not in self._sessions], answers, now, span)

    patch.setattr(CallMemory, "put", put)


# -- storage ---------------------------------------------------------------------------------------


@bug
def answers_are_sent_before_the_sync(patch: Patch) -> None:
    patch.setattr(LogWriter, "_sync", lambda self, segment: None)


@bug
def a_storage_error_is_reported_as_success(patch: Patch) -> None:
    def commit(self: Partition) -> None:
        with contextlib.suppress(StorageFailed):
            right(self)

    right = Partition.commit
    patch.setattr(Partition, "commit", commit)


@bug
def a_failed_rotation_is_reported_as_a_failed_turn(patch: Patch) -> None:
    def commit(self: Partition) -> None:
        state = self.state
        right(self)
        if self.state is not state:
            raise StorageFailed("a failed rotation reported as a failed turn")

    right = Partition.commit
    patch.setattr(Partition, "commit", commit)


@bug
def half_of_a_torn_group_is_kept(patch: Patch) -> None:
    patch.setattr(recovery, "MORE_IN_GROUP", 0)
    patch.setattr(recovery, "CONTINUES_GROUP", 0)


@bug
def retention_drops_items_that_are_needed(patch: Patch) -> None:
    patch.setattr(retention, "offsets_to_keep", lambda state, stop: RunSet())
    patch.setattr(planning, "offsets_to_keep", lambda state, stop: RunSet())


@BUGS.caught_within(200)
def retention_drops_items_younger_than_max_age(patch: Patch) -> None:
    right = planning.segment_ends
    patch.setattr(planning, "segment_ends", lambda segments, now: [end - HOUR for end in right(segments, now)])


@bug
def retention_is_never_due(patch: Patch) -> None:
    patch.setattr(Partition, "next_retention", lambda self: None)


@bug
def items_are_read_in_the_wrong_order(patch: Patch) -> None:
    right = Partition.items
    patch.setattr(Partition, "items", lambda self, runs: right(self, runs)[::-1])


# -- damage ----------------------------------------------------------------------------------------


@bug
def a_gap_ends_a_read(patch: Patch) -> None:
    def read(self: ItemCache, start: int, stop: int) -> Iterator[CachedItems | Gap]:
        for found in right(self, start, stop):
            yield found
            if isinstance(found, Gap):
                return

    right = ItemCache.read
    patch.setattr(ItemCache, "read", read)


@bug
def after_a_gap_only_cached_items_are_read(patch: Patch) -> None:
    def fetch(self: ItemCache, start: int, stop: int) -> tuple[list[Gap], int]:
        gaps, reached = right(self, start, start + 1 if [one for one in self._log.read(start, start + 1) if isinstance(one, Gap)] else stop)
        return [], max(stop, reached) if gaps else reached

    right = ItemCache._fetch
    patch.setattr(ItemCache, "_fetch", fetch)


@bug
def a_damaged_block_reaches_too_far(patch: Patch) -> None:
    right = BlockCache._keep
    patch.setattr(BlockCache, "_keep", lambda self, block: right(self, block._replace(stop=block.stop + 10) if block.lost else block))


@bug
def a_page_of_lost_items_ends_the_reading_of_a_cursor(patch: Patch) -> None:
    def page(self: Partition, start: int, limit: int) -> RetainedItems:
        runs = retained_runs(self.state, start, limit)
        items = self.items(runs)
        return RetainedItems(items, runs[-1] if items else self.state.next_offset)

    patch.setattr(Partition, "read_retained", page)


@bug
def a_missing_oldest_segment_goes_unnoticed(patch: Patch) -> None:
    patch.setattr(partition_recovery, "mark_missing_front", lambda state, first_offset, where: [])


@bug
def verify_does_not_see_that_the_oldest_segment_is_missing(patch: Patch) -> None:
    patch.setattr(partition_recovery, "find_missing_front", lambda *_: [])


@bug
def a_segment_deleted_while_open_is_never_found_missing(patch: Patch) -> None:
    patch.setattr(SegmentFiles, "forget_missing", lambda self: None)


@bug
def a_missing_only_segment_is_a_new_log_unless_it_was_synced(patch: Patch) -> None:
    patch.setattr(filelog, "segment_missing", lambda synced, names: False)


@bug
def dropped_items_count_as_damaged(patch: Patch) -> None:
    patch.setattr(State, "unrecorded_losses", lambda self, start, stop: self.lost.missing(start, min(stop, self.next_offset)))


@bug
def damage_is_not_recorded(patch: Patch) -> None:
    patch.setattr(Partition, "_mark_lost", lambda self, runs: None)


# -- the tests -------------------------------------------------------------------------------------


def test_every_bug_can_be_planted() -> None:
    BUGS.check_plantable()


@pytest.mark.parametrize(("plant", "most_seeds"), BUGS.cases())
def test_a_planted_bug_is_caught(plant: Plant, most_seeds: int, monkeypatch: Patch) -> None:
    BUGS.check_caught(plant, most_seeds, monkeypatch)
