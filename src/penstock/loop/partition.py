"""One partition: runs commands on its state and writes the records to its log.

Owns: `Partition`, the only module that changes a state and its log together.
    run(command)     decide a command and apply its records in memory; the answer may not be sent yet
    begin_commit()   append the records; gives whether a sync must follow before answers are sent
    commit()         begin_commit, sync if needed, end_commit: then answers may be sent. Another thread may do
                     the sync and `end_commit`
    items(runs)      the items of runs of offsets
Opening replays the log with the same `apply`. After a failed write the state is rebuilt from what is synced (`reopen`);
a write is never repeated. A turn that only leased needs no sync: if a power cut loses the record, the item is leased
again, and the epoch in the lease number keeps two leases apart. If a failed write loses it, `reopen` appends it again,
because its holder works on the item.
What another log records about this partition is read through `committed`, which fails while some of it could be undone.
One thread at a time: the one that runs the turn, or that does its I/O.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias

from penstock.logs import codec
from penstock.logs.log import Gap, Log
from penstock.loop import recovery
from penstock.loop.item_cache import BlockCache, CachedPart, ItemCache, Items
from penstock.loop.partition_reader import RetainedItems, read_retained
from penstock.loop.recovery import elapsed_shift, replay
from penstock.loop.retention import (
    DROPS_AT_ONCE,
    SEGMENT_AGE,
    DroppedBuried,
    FreeSpaceCheck,
    RetentionResult,
    RetentionSchedule,
    plan_retention,
    should_rotate_for_rewrite,
)
from penstock.loop.rotation import CLOSE_FRAMES, RotationPlan
from penstock.loop.tally import Tally
from penstock.rules import base, machine, summary
from penstock.rules.commands import Answer, AskAgain, Command, Configure, Drop, Produce
from penstock.rules.explain import Explanation, explain
from penstock.rules.options import StorageOptions
from penstock.rules.records import CallAnswered, Due, Leased, Lost, PassedOver, Produced, ProgressSet, Record
from penstock.rules.runs import RunSet, count, pairs
from penstock.rules.state import MissingBlocks, State
from penstock.rules.summary import Summary
from penstock.words.clock import MILLISECOND, Clock, Moment
from penstock.words.errors import BrokerClosed, InvalidRequest, OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.limits import MIB, Policy

DUE_ITEMS = 2_000
"""Items whose timers run in one turn; the rest waits for the next, so that other partitions are served in between."""
CHECKPOINT_FRAMES, SOON_FRAMES = 5_000, 500
"""Frames after which a checkpoint is written (about 65 ms of replay), and after an opening that replayed many."""
SYNC_INTERVAL = 200 * MILLISECOND
"""In durability mode "interval", the time from a commit to its sync unless the queue says another."""
FRAME_WORTH_BYTES = 50
"""Writing so many bytes of a checkpoint takes about as long as replaying one frame."""
NOT_WRITTEN = 1 << 63
"""Higher than every sequence of a frame."""
Appended: TypeAlias = tuple[int, list[Record], Moment]
"""The sequence of the records' last frame, the records, and their time."""
_UNDONE = "storage failed, and nothing was changed; send the request again"
_NEEDS_NO_SYNC = (Leased, PassedOver, CallAnswered, ProgressSet)


class Partition:
    """A partition's state and log, open for writing."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        policy: Policy | None = None,
        *,
        segment_bytes: int = 128 * MIB,
        segment_age: int = SEGMENT_AGE,
        storage: StorageOptions | None = None,
        min_free_bytes: int = 0,
        on_replayed: Callable[[], None] = lambda: None,
        queue: str = "",
    ) -> None:
        """storage: the options of the queue; they come before the sizes, which are the broker's.
        on_replayed: called when the log is replayed, before the opening is written and synced."""
        self._queue = queue
        self.log = log
        self.state = State()
        self.gaps: list[Gap] = []  # damage found since it was opened
        self.became_ready: list[int] = []
        """Runs of the keyed items that the last `due` made ready."""
        self.tally = Tally()
        self.records_applied = 0
        """Number of records applied since it was opened, without replayed ones: a change shows activity."""
        self._clock = clock
        self._policy = policy.validate() if policy is not None else None
        self.sync_interval = SYNC_INTERVAL
        self._segment_defaults = (segment_bytes, segment_age)
        self._rotation = RotationPlan(segment_bytes, segment_age)
        self.configure_storage(storage or StorageOptions())
        self.free_space = FreeSpaceCheck(log, min_free_bytes)
        self.dropped_buried: list[DroppedBuried] = []
        """Buried items that retention deleted; the caller logs them and clears the list."""
        self.maintenance_error: StorageFailed | None = None
        """The error of rotation, checkpoint or retention, until the caller has logged it."""
        self._schedule = RetentionSchedule()
        self._older_bytes = 0  # of all segments but the newest
        self._items = ItemCache(log)
        self._blocks = BlockCache(self._items)
        self._staged: list[Record] = []  # decided and applied, not yet appended
        self._appended: list[Appended] = []  # since the last commit
        self._answered: list[Appended] = []  # committed without a sync, and not synced since
        self._turn = Moment(0, 0)
        self.owes_sync = False  # the next commit syncs
        self.failed = False
        """Whether it must be reopened before it can be used."""
        self._undone = False
        self._partly_committed = False  # a part of this turn is committed
        self._failure: StorageFailed | None = None  # why this turn is or was undone
        self._commit_error: PenstockError | None = None
        self._closed = self._fetched = False
        self._open(on_replayed=on_replayed)

    # -- opening -------------------------------------------------------------------------------------

    def _open(self, answered: Sequence[Appended] = (), on_replayed: Callable[[], None] = lambda: None) -> None:
        self.state, gaps, frames = replay(self.log)
        on_replayed()
        with contextlib.suppress(PenstockError):  # only metrics need it
            self._older_bytes = self.log.size_bytes() - self.log.segment_bytes
        self._unreplayed = min(frames, CHECKPOINT_FRAMES - SOON_FRAMES) if frames > SOON_FRAMES else 0
        self.gaps = recovery.gaps_at_opening(self.state, self.log, self._queue, gaps)
        unwritten = [group for group in answered if group[0] > self.log.sequence and group[1]]
        state, raw = self.state, self._clock.read()
        shift, rebooted = elapsed_shift(state, raw, self._clock.boot)
        self._turn = Moment(raw.elapsed + shift, raw.wall)
        self.opened_at = self._turn.elapsed  # the record of this opening extends the leases
        self._items.clear()
        self._blocks.clear()
        self._schedule.opened(self._turn.elapsed)
        if self.log.wants_base or self.gaps:  # a Base records what was found lost
            self._rotate()
        else:
            newest = self.log.newest()
            started = newest.first_elapsed if newest.size_bytes else self._turn.elapsed
            self._rotation.begin(newest.base_offset, started, self.log.segment_bytes)
        if not self.gaps:  # after damage the records may not fit: their holders will be refused
            now = self._turn
            for _, records, then in unwritten:  # at their own time: deadlines count from it
                self._turn = then
                self._stage(records)
                self._append()
            self._turn = now
        self._stage([recovery.opened(state, self.gaps, self._clock.boot, shift, rebooted=rebooted)])
        self._append()
        if self._policy is not None:
            self.run(Configure(self._policy))
            self._append()
        self.log.sync()
        self._clear_unsynced()
        self._policy = None  # once: reopening must not undo a later Configure
        self.failed = self._undone = False

    def reopen(self) -> None:
        """After a failure: rebuild the state from what is synced. Leases that were answered are appended again."""
        self._staged, self._appended = [], []
        self.tally.undo()
        self._reset_and_open()

    def finish_interrupted_commit(self) -> None:
        """After an interrupt in `commit`: write everything that was run, durably.

        Only for interrupts: after a failed write nothing is written again. Raises StorageFailed when the turn is
        undone.
        """
        if self._failure is not None or self._undone:  # interrupted while a failure was handled
            self.reopen()
            raise self._failure or StorageFailed(_UNDONE)
        self._answered += [*self._appended, (NOT_WRITTEN, self._staged, self._turn)]
        self._staged, self._appended = [], []
        self._reset_and_open()

    def _reset_and_open(self) -> None:
        self.failed = True
        self._commit_error = None
        answered = [*self._answered]
        try:
            self.log.reset()
            self.owes_sync = False
            self._open(answered)
        except BaseException:
            self._answered = answered  # the next attempt appends them
            raise

    def close(self) -> None:
        """Commit, write a checkpoint and a summary so that the next opening is quick, and close the log."""
        if self._closed:
            return
        try:
            if not self.failed:
                self.owes_sync = self.owes_sync or self.log.unsynced
                self.commit()
                with contextlib.suppress(PenstockError):  # optional: they only make the next opening quicker
                    if self._unreplayed > CLOSE_FRAMES:
                        self._checkpoint()
                    self.log.write_summary(summary.dump(self.summary()))
        finally:
            self._closed = True
            self.log.close()

    def summary(self) -> Summary:
        """What its queue needs to know while it is closed."""
        segments = self.log.segments()
        self._schedule.note_segments(segments, self.now().elapsed)
        found = summary.summarize(self.state, sum(facts.size_bytes for facts in segments))
        due = [when for when in (found.due_elapsed, self.next_retention()) if when is not None]
        found.due_elapsed = min(due, default=None)
        return found

    @property
    def is_idle(self) -> bool:
        """Whether nothing needs it open."""
        return self.is_committed and not self._answered and not self.log.unsynced and not summary.must_stay_open(self.state)

    # -- the turn ------------------------------------------------------------------------------------

    def now(self) -> Moment:
        """The time of the turn: the same from its first record to the commit, because a frame has one time."""
        if not self._staged:
            state, raw = self.state, self._clock.read()
            elapsed, last = raw.elapsed + state.clock_shift, state.moment.elapsed
            self._turn = Moment(elapsed if elapsed > last else last, raw.wall)
        return self._turn

    def run(self, command: Command, rounds: int = 0) -> Answer:
        """Decide a command and apply it in memory. The answer may be sent after `commit`.

        With `rounds`, a lease that must search long gives up after so many rounds and answers `AskAgain`: commit, then
        run it again. A storage failure undoes everything run since the last commit; `commit` then fails too.
        """
        if self._closed or self.failed:
            self._check_usable()
        if self.free_space.bytes and type(command) is Produce and command.source is None:
            self.free_space.check()
        now = self.now()
        if self._fetched:
            self._blocks.trim()
            self._fetched = False
        while True:
            try:
                records, answer = machine.decide(self.state, command, now, self._blocks)
            except MissingBlocks as missing:
                self._fetch(missing.offsets)
                continue
            self.tally.note(self.state, records, now.elapsed, command)
            self._stage(records)
            rounds -= 1
            if type(answer) is not AskAgain or rounds == 0:
                return answer

    def due(self, limit: int = DUE_ITEMS) -> int:
        """Run expired timers, for about `limit` items; gives the number of records."""
        self._check_usable()
        now = self.now()
        while True:
            try:
                records = machine.decide_due(self.state, now, limit, self._blocks)
            except MissingBlocks as missing:
                self._fetch(missing.offsets)
            else:
                self.tally.note_timers(self.state, records, now.elapsed)
                self._stage(records)
                self.became_ready = [edge for record in records if type(record) is Due for edge in record.keyed]
                return len(records)

    def begin_commit(self) -> bool:
        """Append the staged records. Gives whether `end_commit` must follow: for a sync, or because this failed."""
        if self.failed or self._closed:
            return True
        if not self._undone:
            self._failure = None
        if self._staged:
            try:
                self._flush()
            except PenstockError as error:
                self._commit_error = error
        full = self._rotation.is_full(self.state, self._turn.elapsed, self._unreplayed)
        if full or self._commit_error is not None or self._undone or self._unreplayed > CHECKPOINT_FRAMES:
            return True
        if not self.owes_sync:
            self._answered += self._appended
            self._appended.clear()
            self.tally.commit()
            self._partly_committed = False
            return False
        if self.log.waits_for_disk:
            return True
        return not self._sync_at_once()

    def _sync_at_once(self) -> bool:
        """Sync a log whose sync waits for no disk; whether it succeeded."""
        try:
            self.log.sync()
        except StorageFailed as error:
            try:
                self._fail(error)
            except PenstockError as failure:
                self._commit_error = failure
            self._undone = True
            return False
        self._clear_unsynced()
        return True

    @property
    def size_bytes(self) -> int:
        """The size of its log. Any thread may ask."""
        return self._older_bytes + self.log.segment_bytes

    @property
    def is_full(self) -> bool:
        """Whether the newest segment is full or old, so that a new one begins."""
        return self._rotation.is_full(self.state, self._turn.elapsed, self._unreplayed)

    def commit(self) -> None:
        """Write everything run so far: durable when this returns, except leases. Raises when the turn was undone."""
        if not self.begin_commit():
            return
        failure = None
        if self.can_sync:
            try:
                self.tally.time_sync(self._clock, self.log.sync)
            except StorageFailed as error:
                failure = error
        self.end_commit(failure)

    @property
    def can_sync(self) -> bool:
        """After `begin_commit`: whether the log can be synced because nothing has failed."""
        return self._commit_error is None and not self._undone and not self.failed and not self._closed

    def end_commit(self, failure: StorageFailed | None) -> None:
        """After the sync: rotate or write a checkpoint if needed. After a failure: undo the turn and raise."""
        commit_error, self._commit_error = self._commit_error, None
        partly_committed, self._partly_committed = self._partly_committed, False
        if self.failed and partly_committed:
            raise OutcomeUnknown("storage failed after a part of the turn was stored; repeat with the same request id")
        if commit_error is not None and not isinstance(commit_error, StorageFailed):
            raise commit_error
        self._check_usable()
        if self._undone:
            self.reopen()
            raise StorageFailed(_UNDONE if commit_error is None else f"nothing was changed: {commit_error}")
        if failure is not None:
            self._fail(failure)
        self._clear_unsynced()
        full = self.is_full
        if full or self._unreplayed > CHECKPOINT_FRAMES:
            self._maintain(self._rotate_and_retain if full else self._checkpoint)

    def configure_storage(self, options: StorageOptions) -> None:
        """Write the log by these options from now on. Any thread may call it."""
        self.sync_interval = options.sync_interval or SYNC_INTERVAL
        size, age = self._segment_defaults
        self._rotation.set_limits(options.segment_bytes or size, options.segment_age or age)
        self.log.set_compression(options.compression, options.compression_level, options.compression_min_bytes)

    def publish(self) -> None:
        """Commit, and publish what was synced as the durability mode says; mode "interval" waits for its fsync."""
        self.sync_and_publish(force=False)

    def sync_and_publish(self, *, force: bool = True) -> None:
        """Commit, sync what was not synced yet, and publish the position up to which readers may read."""
        self.commit()
        if self.failed:
            return  # the turn is stored; maintenance failed
        try:
            if force and self.log.durability == "interval":
                self.tally.time_sync(self._clock, self.log.force_sync)
            else:
                self.log.sync()
            self._clear_unsynced()
            self.log.publish()
        except StorageFailed as error:
            if self.log.durability != "fsync":
                self._fail(error)
            with contextlib.suppress(PenstockError):  # the turn was durable before: its answers are right
                self.reopen()

    @property
    def is_committed(self) -> bool:
        """Whether a failed write can undo nothing but unsynced leases, and no failure is still to be reported."""
        return not (self._staged or self._appended or self.owes_sync or self.failed or self._undone or self._commit_error)

    @property
    def committed(self) -> State:
        """The state, for use by another log. AssertionError while some of it could be undone."""
        if not self.is_committed:
            raise AssertionError(f"partition {self.log.partition} has changes that are not committed; no other log may use them")
        return self.state

    def make_durable(self) -> None:
        """Sync to the disk in every durability mode, because another log will record something that depends on it."""
        try:
            self.log.force_sync()
            self._clear_unsynced()
        except StorageFailed as error:
            self._fail(error)

    def _clear_unsynced(self) -> None:
        """Forget the unsynced records: everything appended is synced."""
        if not self._staged:
            self.tally.commit()
        self.owes_sync = False
        self._appended.clear()
        self._answered.clear()

    def _check_usable(self) -> None:
        if self._closed:
            raise BrokerClosed("the partition is closed; open it again")
        if self.failed:
            raise StorageFailed("the partition failed before; reopen it, then try again")

    def _fail(self, error: StorageFailed) -> NoReturn:
        """Reopen from what is synced and raise the error; OutcomeUnknown when reopening fails."""
        self._failure = error
        try:
            self.reopen()
        except PenstockError as worse:
            undoing = "" if str(worse) == str(error) else f", and undoing it failed ({worse})"
            what = f"it is not known what was stored{undoing}; use the same request id again: {error}"
            self._commit_error = OutcomeUnknown(what)  # for the other requests of this turn
            raise OutcomeUnknown(what) from worse
        raise error

    def _maintain(self, work: Callable[[], object]) -> None:
        """Rotate, checkpoint or retain after a commit. A failure does not fail the turn: the partition is reopened."""
        try:
            work()
        except StorageFailed as error:
            self.maintenance_error = error
            with contextlib.suppress(PenstockError):
                self.reopen()
            self._schedule.postpone(self.now().elapsed, self.state.policy.retention)
        except InvalidRequest:  # the state is too large for one frame: stay in this segment
            self._rotation.postpone(self._turn.elapsed, self.log.segment_bytes)
            self._schedule.postpone(self._turn.elapsed, self.state.policy.retention)
        except BaseException:  # an interrupt: the rotation may be unfinished
            self.failed = True
            raise

    def _rotate_and_retain(self) -> None:
        self._rotate()
        self._retain(drops=DROPS_AT_ONCE)

    def _checkpoint(self) -> None:
        """Write a checkpoint, so that opening replays fewer frames. With a large state the next one is later."""
        body = base.dump(self.state)
        self.log.write_checkpoint(body, self.state.moment.elapsed, self.state.moment.wall, self.state.next_offset)
        self._clear_unsynced()
        self._unreplayed = -len(body) // FRAME_WORTH_BYTES

    def _stage(self, records: Sequence[Record]) -> None:
        try:
            for record in records:
                machine.apply(self.state, record, self._turn)
            self._staged += records
            self.records_applied += len(records)
        except BaseException:  # an interrupt or a bug: the state may be half changed
            self.failed = True
            raise

    def _append(self) -> None:
        try:
            staged, turn = self._staged, self._turn
            for record in staged:
                if type(record) is Produced:
                    self._items.put(record, turn.wall)
                    self.owes_sync = True
                elif type(record) not in _NEEDS_NO_SYNC or (type(record) is CallAnswered and record.answers[0].ids is not None):
                    self.owes_sync = True
            drafts = codec.encode_records(staged, turn, self.state.next_offset)
            size = self.log.append(drafts)
            group = (self.log.sequence, staged, turn)
            self._appended, self._staged = [*self._appended, group], []  # one statement: no interrupt in between
            self._rotation.room -= size
            self.tally.written += size
            self.free_space.written += size
            self._unreplayed += len(drafts)
        except StorageFailed:
            raise
        except BaseException:  # the state and the log may differ
            self.failed = True
            raise

    def _fetch(self, offsets: list[int]) -> list[int]:
        """Write the staged records, then read blocks into the cache. Gives runs of items found lost."""
        self._flush()
        self._fetched = True
        found = [gap for offset in offsets for gap in self._blocks.fetch(offset)]
        return recovery.record_gaps(self.gaps, self.state, self._queue, self.log.partition, found)

    def _flush(self) -> None:
        """Append the staged records. If that fails the turn is undone, and `commit` will fail."""
        if self._staged:
            try:
                self._append()
            except StorageFailed as error:
                try:
                    self._fail(error)
                finally:
                    self._undone = True

    def _rotate(self) -> None:
        """Begin a new segment with a Base. A large Base makes larger segments, so that few writes are Bases."""
        state = self.state
        state.ttl.keep(lambda entry: state.completed.missing(entry.start, entry.stop))  # resolved items need no ttl
        body, full = base.dump(state), self.log.segment_bytes
        self.log.rotate(codec.base_draft(body, self._turn, self.state.next_offset))
        self._older_bytes += full
        self._clear_unsynced()
        self._unreplayed = 0
        self._rotation.begin(state.next_offset, self._turn.elapsed, self.log.segment_bytes, len(body))

    # -- retention -----------------------------------------------------------------------------------

    def apply_retention(self, *, thorough: bool = False, rotate: bool = False) -> RetentionResult:
        """Delete resolved items beyond the policy's retention.

        `thorough`: also when little is freed. `rotate`: begin a new segment first. Without this call retention happens
        at every rotation, and when `apply_due_retention` is called at `next_retention`.
        """
        self._commit_so_far()
        try:
            if rotate:
                self._rotate()
            return self._retain(thorough=thorough)
        except StorageFailed as error:
            self._fail(error)
        except BaseException:
            self.failed = True  # as in `_maintain`
            raise

    def compact(self) -> RetentionResult:
        """Close the newest segment and delete everything that may be deleted."""
        return self.apply_retention(thorough=True, rotate=True)

    def _commit_so_far(self) -> None:
        """Commit in the middle of a turn. If that fails the turn is undone, and its own `commit` will fail."""
        try:
            self.commit()
        except PenstockError:
            self._undone = True
            raise
        self._partly_committed = True

    def next_retention(self) -> int | None:
        """The elapsed time at which retention must run; None: not before the next change."""
        state = self.state
        retention = state.policy.retention
        if self._closed or self.failed or not retention.max_age:
            return None
        if state.dropped.total == state.next_offset and self.log.first_offset == state.next_offset:
            return None
        return self._schedule.next(retention, self._rotation.due_at(state), self.records_applied)

    def apply_due_retention(self) -> None:
        """Commit, then close the newest segment if it is old and delete old items. The commit stays if that fails."""
        self.commit()
        if not self.failed:
            self._maintain(self._retain_due)

    def _retain_due(self) -> None:
        now, rotate_at = self.now().elapsed, self._rotation.due_at(self.state)
        if (rotate_at is not None and rotate_at <= now) or should_rotate_for_rewrite(self.log.segments(), self.state, now):
            self._rotate()
        self._retain(drops=DROPS_AT_ONCE)

    def _retain(self, *, thorough: bool = False, drops: int = 1 << 30) -> RetentionResult:
        """Run retention. The record is synced before files change, so that a crash in between loses no item."""
        now, retention = self.now().elapsed, self.state.policy.retention
        chosen = plan_retention(self.log.segments(), self.state, retention, now, thorough=thorough, drops=drops)
        buried = [edge for start, stop in pairs(chosen.forget) for edge in self.state.buried_set.within(start, stop)]
        if chosen.forget:
            self.run(Drop(chosen.forget))
            self._append()
        self.log.sync()
        self._clear_unsynced()
        if buried:
            self.dropped_buried.append(DroppedBuried(count(buried), buried[0], buried[-1] - 1))
        size = self.log.rewrite(chosen.first, chosen.last, chosen.keep) if chosen.rewrites else 0
        size += self.log.drop(chosen.drop) if chosen.drop else 0
        rewritten = chosen.last - chosen.first + 1
        if size:
            self._items.clear()
            self._older_bytes = max(0, self._older_bytes - size)
            self.tally.note_retention(size, chosen.drop + max(0, rewritten - 1))
        self._schedule.note_run(self.log.segments(), now, retention, self.records_applied, chosen)
        return RetentionResult(chosen.drop, rewritten, count(chosen.forget), size, count(buried))

    # -- reading -------------------------------------------------------------------------------------

    def read_retained(self, start: int, limit: int) -> RetainedItems:
        """Up to `limit` retained items from `start` on, in any state."""
        return read_retained(self, start, limit)

    def offset_at(self, wall: int) -> int:
        """The first offset produced at or after a wall time."""
        self._check_usable()
        return max(self.log.offset_at(wall), self.state.dropped.first_missing(0))

    def payloads(self, runs: Sequence[int]) -> list[bytes]:
        """The payloads of items, in the order of `runs`; damaged ones are left out and marked as lost."""
        return [payload for cached, found in self.read(runs) for run in pairs(found) for payload in cached.payloads(*run)]

    def items(self, runs: Sequence[int]) -> list[Items]:
        """Items in the order of `runs`; damaged ones are left out and marked as lost."""
        return [Items(run[0], cached.batch(*run), cached.wall) for cached, found in self.read(runs) for run in pairs(found)]

    def read(self, runs: Sequence[int]) -> list[CachedPart]:
        """Items in the order of `runs`. Damaged ones are as in `items`."""
        if len(runs) == 2 and not self._closed and not self.failed and (cached := self._items.find(runs[0], runs[1])) is not None:
            return [(cached, [*runs])]
        self._check_usable()
        if len(runs) % 2:
            raise InvalidRequest("the runs are not pairs of offsets; give [start, stop, …] as a lease answers them")
        if any(type(record) is Produced for record in self._staged):  # else the items are written already
            self._flush()
        found = self._items.collect([*runs])
        self._mark_lost(recovery.record_gaps(self.gaps, self.state, self._queue, self.log.partition, found.gaps))
        if RunSet(RunSet(found.absent).within(0, self.state.next_offset)).subtract(self.state.dropped.runs):
            raise StorageFailed("items were not found in their log, which does not say that it is damaged; try again")
        return found.parts

    def _mark_lost(self, runs: list[int]) -> None:
        """Mark items as lost. The record is written now and synced by the next commit."""
        if runs:
            self.now()
            self._stage([Lost(runs)])
            self._flush()

    def explain(self, offset: int) -> Explanation:
        """Why an item is not running."""
        self._check_usable()
        while True:
            try:
                return explain(self.state, self.log.partition, offset, self.now(), self._blocks)
            except MissingBlocks as missing:
                self._mark_lost(self._fetch(missing.offsets))

    def __repr__(self) -> str:
        return f"Partition({self.log.partition}, {self.state!r}{', failing' if self.failed else ''})"
