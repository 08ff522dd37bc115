"""One partition at work: its rules over its log.

Owns: `Partition`, the only place where a state and its log meet.
    run(command)   decide and apply in memory, as often as wanted      (no answer may leave yet)
    prepare()      append what was decided; says whether it must be synced before its answers may leave
    commit()       prepare, sync if need be, and keep house: then answers may leave. Or the sync is left to others, and `landed` ends it
    read(runs)     the bytes of items
Opening is replay through the same `apply`. After a failed write the memory is thrown away and rebuilt from what is synced (`reopen`);
nothing is ever retried into success. A turn that only gave out leases needs no sync: if a power cut takes the record, the item is leased
anew, and the epoch keeps its token from being given twice. If a failed write takes it, `reopen` appends it again: its holder is at work.
What another log is to record about this partition is read through `committed`, which refuses while any of it could still be undone.
Single-threaded: whoever runs the turn.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

from penstock.logs import codec
from penstock.logs.log import Gap, Log
from penstock.loop import recovery
from penstock.loop.item_cache import BlockCache, CachedItems, ItemCache, Items
from penstock.loop.partition_reader import RetainedItems, read_retained
from penstock.loop.recovery import elapsed_shift, replay
from penstock.loop.retention import (
    DROPS_AT_ONCE,
    LEAST_ROTATION_AGE,
    SEGMENT_AGE,
    UNTOUCHED,
    FreeSpaceCheck,
    RetentionResult,
    RetentionSchedule,
    plan_retention,
    rotation_age,
)
from penstock.rules import base, machine, summary
from penstock.rules.commands import Answer, AskAgain, Command, Configure, Drop, Produce
from penstock.rules.explain import Explanation, explain
from penstock.rules.records import Due, Leased, Lost, Opened, PassedOver, Produced, ProgressSet, Record, RequestAnswered
from penstock.rules.runs import RunSet, count, pairs
from penstock.rules.state import MissingBlocks, State
from penstock.rules.summary import Summary
from penstock.words.clock import Clock, Moment
from penstock.words.errors import BrokerClosed, InvalidRequest, OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.limits import MIB, Policy

DUE_ITEMS = 2_000
CHECKPOINT_FRAMES = 50_000
"""Frames after which a checkpoint is worth it: a second or two of replay."""
CLOSE_FRAMES = 2
"""At closing no checkpoint, and at any time no rotation by age, is worth it when nothing happened but the opening."""
FRAME_WORTH_BYTES = 50
"""So many bytes of checkpoint cost about as much to write as one frame to replay."""
NOT_WRITTEN = 1 << 63
"""Higher than every sequence of a frame."""
Appended: TypeAlias = tuple[int, list[Record], Moment]
"""The sequence of the last frame that holds them, records, and their time."""
_NEEDS_NO_SYNC = (Leased, PassedOver, RequestAnswered, ProgressSet)


class DroppedBuried(NamedTuple):
    """Buried items that a pass of retention took."""

    items: int
    first: int
    last: int
    """Offsets of the first and the last of them."""


class Partition:
    """A state, its log, and the time."""

    def __init__(
        self,
        log: Log,
        clock: Clock,
        policy: Policy | None = None,
        *,
        segment_bytes: int = 128 * MIB,
        segment_age: int = SEGMENT_AGE,
        min_free_bytes: int = 0,
    ) -> None:
        self.log = log
        self.state = State()
        self.gaps: list[Gap] = []  # the damage met since it was opened
        self.became_ready: list[int] = []
        """Runs of the items with keys that became ready in the last `due`."""
        self.records_applied = 0
        """Records applied here, live: it tells whether anything happened."""
        self._clock = clock
        self._policy = policy.validate() if policy is not None else None
        self._segment_bytes = segment_bytes
        self._segment_age = segment_age
        self._free_space = FreeSpaceCheck(log, min_free_bytes)
        self.dropped_buried: list[DroppedBuried] = []
        """Buried items that retention took and nobody has told of yet: whoever does takes them off."""
        self.maintenance_error: StorageFailed | None = None
        """Why keeping the files in order failed, if it did and nobody has told of it yet."""
        self._schedule = RetentionSchedule()
        self._room = 0
        self._segment_base = 0
        self._segment_started = 0  # by elapsed time
        self._unreplayed = 0
        self._items = ItemCache(log)
        self._blocks = BlockCache(self._items)
        self._staged: list[Record] = []  # decided and applied, not yet appended
        self._appended: list[Appended] = []  # since the last commit
        self._answered: list[Appended] = []  # committed without a sync, and not synced since
        self._turn = Moment(0, 0)
        self.owes_sync = False  # the next commit syncs
        self._fetched = False
        self.failed = False
        """It must be reopened before it can go on."""
        self._undone = False
        self._midway = False  # a part of this turn was committed before its end
        self._failure: StorageFailed | None = None  # for which this turn is, or was, undone
        self._unsaid: PenstockError | None = None
        self._closed = False
        self._open()

    # -- opening -------------------------------------------------------------------------------------

    def _open(self, answered: Sequence[Appended] = ()) -> None:
        self.state, gaps = replay(self.log)
        self.gaps = recovery.gaps_at_opening(self.state, self.log, gaps)
        unwritten = [group for group in answered if group[0] > self.log.sequence and group[1]]
        state, raw = self.state, self._clock.read()
        shift, rebooted = elapsed_shift(state, raw, self._clock.boot)
        self._turn = Moment(raw.elapsed + shift, raw.wall)
        self._items.clear()
        self._blocks.clear()
        self._schedule.opened(self._turn.elapsed)
        if self.log.wants_base or self.gaps:  # what was made of the damage is said once, in a Base
            self._rotate()
        else:
            newest = self.log.newest()
            self._plan_rotation(0, newest.base_offset, newest.first_elapsed if newest.size_bytes else self._turn.elapsed)
        lost = sum(max(0, gap.last_sequence - gap.first_sequence + 1) for gap in self.gaps)  # each may have been an opening
        if not self.gaps:  # behind damage they may not fit any more: their holders are refused at their next call
            now = self._turn
            for _, records, then in unwritten:  # as they were: what they say of time counts from then
                self._turn = then
                self._stage(records)
                self._append()
            self._turn = now
        self._stage([Opened(state.epoch + 1 + lost, self._clock.boot, shift, rebooted)])
        self._append()
        if self._policy is not None:
            self.run(Configure(self._policy))
            self._append()
        self.log.sync()
        self._note_synced()
        self._policy = None  # said once: a reopening must not undo what was configured since
        self.failed = self._undone = False

    def reopen(self) -> None:
        """After a failure: forget what is not synced and begin again from what is. Leases that were answered are appended again."""
        self._staged, self._appended = [], []
        self._begin_again()

    def finish_interrupted_commit(self) -> None:
        """After an interrupt in the middle of `commit`: everything run before it is in the log when this returns, durably.

        Only for an interrupt, which says nothing of the storage: what a failed write takes back is never written again.
        """
        if self._failure is not None or self._undone:  # the interrupt came while that was being undone, or before anybody was told of it
            self.reopen()
            raise self._failure or StorageFailed("storage failed during the turn and everything in it was undone; run it again")
        self._answered += [*self._appended, (NOT_WRITTEN, self._staged, self._turn)]
        self._staged, self._appended = [], []
        self._begin_again()

    def _begin_again(self) -> None:
        self.failed = True
        self._unsaid = None
        answered = [*self._answered]
        try:
            self.log.reset()
            self.owes_sync = False
            self._open(answered)
        except BaseException:
            self._answered = answered  # still owed to their holders: the next attempt appends them
            raise

    def close(self) -> None:
        """Write what is owed, leave a checkpoint so that the next opening is quick, and let go of the log."""
        if self._closed:
            return
        try:
            if not self.failed:
                self.owes_sync = self.owes_sync or self.log.unsynced
                self.commit()
                with contextlib.suppress(PenstockError):  # they only make the next opening quicker, or spare it
                    if self._unreplayed > CLOSE_FRAMES:
                        self._checkpoint()
                    self.log.write_summary(summary.dump(self.summary()))
        finally:
            self._closed = True
            self.log.close()

    def summary(self) -> Summary:
        """What is worth knowing of it once it is closed."""
        segments = self.log.segments()
        self._schedule.learn(segments, self.now().elapsed)
        found = summary.summarize(self.state, sum(facts.size_bytes for facts in segments))
        due = [when for when in (found.due_elapsed, self.next_retention()) if when is not None]
        found.due_elapsed = min(due, default=None)
        return found

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way that needs it open."""
        return self.is_committed and not self._answered and not self.log.unsynced and not summary.must_stay_open(self.state)

    # -- the turn ------------------------------------------------------------------------------------

    def now(self) -> Moment:
        """The time of the turn: one for everything between two commits, as one frame carries it."""
        if not self._staged:
            state, raw = self.state, self._clock.read()
            elapsed, last = raw.elapsed + state.clock_shift, state.moment.elapsed
            self._turn = Moment(elapsed if elapsed > last else last, raw.wall)
        return self._turn

    def run(self, command: Command, rounds: int = 0) -> Answer:
        """Decide a command and apply it in memory. The answer may leave after `commit`.

        With `rounds`, a lease that must look through much gives up after so many and answers `AskAgain`: commit, then ask again.
        A storage failure in here undoes everything run since the last commit, and `commit` will say so too.
        """
        self._usable()
        if self._free_space.bytes and type(command) is Produce and command.source is None:
            self._free_space.check()
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
            self._stage(records)
            rounds -= 1
            if type(answer) is not AskAgain or rounds == 0:
                return answer

    def due(self, limit: int = DUE_ITEMS) -> int:
        """Do what came due by itself, about `limit` items of it; says how many records that took."""
        self._usable()
        now = self.now()
        while True:
            try:
                records = machine.decide_due(self.state, now, limit, self._blocks)
            except MissingBlocks as missing:
                self._fetch(missing.offsets)
            else:
                self._stage(records)
                self.became_ready = [edge for record in records if type(record) is Due for edge in record.keyed]
                return len(records)

    def begin_commit(self) -> bool:
        """Write what is staged. Whether a sync must follow (or an undoing, when this went wrong: `landed` says so)."""
        if self.failed or self._closed:
            return True
        if not self._undone:
            self._failure = None
        try:
            self._flush()
        except PenstockError as error:
            self._unsaid = error
        if self._unsaid is not None or self._undone or self.is_full or self._unreplayed > CHECKPOINT_FRAMES:
            return True
        if not self.owes_sync:
            self._answered += self._appended
            self._appended.clear()
            self._midway = False
            return False
        if self.log.waits_for_disk:
            return True
        return not self._sync_at_once()

    def _sync_at_once(self) -> bool:
        """Where a sync waits for no disk there is nothing to go out for. Whether it went well."""
        try:
            self.log.sync()
        except StorageFailed as error:
            try:
                self._fail(error)
            except PenstockError as failure:
                self._unsaid = failure
            self._undone = True
            return False
        self._note_synced()
        return True

    @property
    def is_full(self) -> bool:
        """Whether it is time for another segment."""
        if self._room <= 0:
            return True
        if self._turn.elapsed < self._segment_started + min(self._segment_age, LEAST_ROTATION_AGE):
            return False
        if self.state.next_offset > self._segment_base:
            age = rotation_age(self.state.policy.retention, self._segment_age)
        elif self._unreplayed > CLOSE_FRAMES:
            age = self._segment_age
        else:
            return False  # one that holds next to nothing
        return self._turn.elapsed >= self._segment_started + age

    def commit(self) -> None:
        """Everything run so far is in the log when this returns, and durable unless it was only leasing."""
        if not self.begin_commit():
            return
        failure = None
        if self.can_sync:
            try:
                self.log.sync()
            except StorageFailed as error:
                failure = error
        self.end_commit(failure)

    @property
    def can_sync(self) -> bool:
        """After `prepare`: whether all went well so far, so that the log can be synced."""
        return self._unsaid is None and not self._undone and not self.failed and not self._closed

    def end_commit(self, failure: StorageFailed | None) -> None:
        """The sync is over: keep house, or undo what was run since the last commit and say so."""
        unsaid, self._unsaid = self._unsaid, None
        midway, self._midway = self._midway, False
        if self.failed and midway:
            raise OutcomeUnknown("storage failed after a part of the turn was stored; repeat with the same request id")
        if unsaid is not None and not isinstance(unsaid, StorageFailed):
            raise unsaid
        self._usable()
        if self._undone:
            self.reopen()
            raise StorageFailed(f"storage failed during the turn and everything in it was undone ({unsaid or 'reading'}); run it again")
        if failure is not None:
            self._fail(failure)
        self._note_synced()
        full = self.is_full
        if full or self._unreplayed > CHECKPOINT_FRAMES:
            self._keep_house(self._rotate_and_tidy if full else self._checkpoint)

    def sync_and_publish(self) -> None:
        """Nothing more to do just now: commit, sync what could wait as the durability mode says, tell readers how far the log goes."""
        self.commit()
        if self.failed:
            return  # the turn is stored; keeping house failed behind it
        try:
            if self.log.durability == "interval":
                self.log.force_sync()
            else:
                self.log.sync()
            self._note_synced()
            self.log.publish()
        except StorageFailed as error:
            if self.log.durability != "fsync":
                self._fail(error)
            with contextlib.suppress(PenstockError):  # the turn was durable before this: its answers stand
                self.reopen()

    @property
    def is_committed(self) -> bool:
        """Whether nothing of the state could still be undone by a failed write, but for leases that were given lately, and nobody waits
        to be told that something was."""
        return not (self._staged or self._appended or self.owes_sync or self.failed or self._undone or self._unsaid)

    @property
    def committed(self) -> State:
        """The state, for what another log is to record. It is a mistake to ask while some of it could still be undone."""
        if not self.is_committed:
            raise AssertionError(f"partition {self.log.partition} has changes that are not committed; no other log may rest on them")
        return self.state

    def make_durable(self) -> None:
        """Make what is committed really durable, in every durability mode: another log is about to record something that rests on it."""
        try:
            self.log.force_sync()
            self._note_synced()
        except StorageFailed as error:
            self._fail(error)

    def _note_synced(self) -> None:
        """Everything appended so far is durable, as the durability mode promises."""
        self.owes_sync = False
        self._appended.clear()
        self._answered.clear()

    def _usable(self) -> None:
        if self._closed:
            raise BrokerClosed("the partition is closed; open it again")
        if self.failed:
            raise StorageFailed("the partition failed before and could not go on; reopen it, then try again")

    def _fail(self, error: StorageFailed) -> NoReturn:
        """Go back to what is synced. If even that fails, nobody can say what will be found."""
        self._failure = error
        try:
            self.reopen()
        except PenstockError as worse:
            what = f"storage failed ({error}) and was not rolled back ({worse}); repeat with the same request id"
            self._unsaid = OutcomeUnknown(what)  # for the others of this turn
            raise OutcomeUnknown(what) from worse
        raise error

    def _keep_house(self, work: Callable[[], object]) -> None:
        """The turn is stored, so its answers stand even if this fails: the partition goes on from what is synced, or fails next time."""
        try:
            work()
        except StorageFailed as error:
            self.maintenance_error = error
            with contextlib.suppress(PenstockError):
                self.reopen()
            self._schedule.postpone(self.now().elapsed, self.state.policy.retention)
        except InvalidRequest:  # a state too large for one frame: the segment goes on
            self._plan_rotation(self._segment_bytes, self._segment_base, self._turn.elapsed)
            self._schedule.postpone(self._turn.elapsed, self.state.policy.retention)
        except BaseException:  # an interrupt: the log may be half way into another segment
            self.failed = True
            raise

    def _rotate_and_tidy(self) -> None:
        self._rotate()
        self._tidy(drops=DROPS_AT_ONCE)

    def _checkpoint(self) -> None:
        """So that the next opening need not replay so many frames. A large state waits for more of them: writing it must stay cheap."""
        body = base.dump(self.state)
        self.log.write_checkpoint(body, self.state.moment.elapsed, self.state.moment.wall, self.state.next_offset)
        self._note_synced()
        self._unreplayed = -len(body) // FRAME_WORTH_BYTES

    def _stage(self, records: Sequence[Record]) -> None:
        try:
            for record in records:
                machine.apply(self.state, record, self._turn)
            self._staged += records
            self.records_applied += len(records)
        except BaseException:  # an interrupt, or a mistake of ours: the state may be half changed and must not be used
            self.failed = True
            raise

    def _append(self) -> None:
        try:
            self._write()
        except StorageFailed:
            raise
        except BaseException:  # state and log may differ now
            self.failed = True
            raise

    def _write(self) -> None:
        staged = self._staged
        for record in staged:
            if type(record) is Produced:
                self._items.put(record, self._turn.wall)
            if type(record) not in _NEEDS_NO_SYNC or (type(record) is RequestAnswered and record.ids is not None):
                self.owes_sync = True
        drafts = codec.encode_records(staged, self._turn, self.state.next_offset)
        size = self.log.append(drafts)
        group = (self.log.sequence, staged, self._turn)
        self._appended, self._staged = [*self._appended, group], []  # no interrupt comes between two assignments
        self._room -= size
        self._free_space.used(size)
        self._unreplayed += len(drafts)

    def _fetch(self, offsets: list[int]) -> list[int]:
        """Bring blocks to hand; what they may hold is written first, so that it can be read. Gives runs of what turned out to be lost."""
        self._flush()
        self._fetched = True
        return recovery.record_gaps(self.gaps, self.state, self.log.partition, [gap for o in offsets for gap in self._blocks.fetch(o)])

    def _flush(self) -> None:
        """Write what the turn has so far, so that it can be read. If that fails the turn is undone, and `commit` must not say otherwise."""
        if self._staged:
            try:
                self._append()
            except StorageFailed as error:
                try:
                    self._fail(error)
                finally:
                    self._undone = True

    def _rotate(self) -> None:
        """Begin a new segment with a Base. A large Base makes for larger segments, so that writing it stays a small part of the work."""
        state = self.state
        state.ttl.keep(lambda entry: state.completed.missing(entry.start, entry.stop))  # what is resolved has no ttl any more
        body = base.dump(state)
        self.log.rotate(codec.base_draft(body, self._turn, self.state.next_offset))
        self._note_synced()
        self._unreplayed = 0
        self._plan_rotation(len(body), state.next_offset, self._turn.elapsed)

    def _plan_rotation(self, base_bytes: int, offset: int, started: int) -> None:
        """The newest segment begins at that offset and was begun at that elapsed time."""
        self._room = max(self._segment_bytes, 4 * base_bytes) - self.log.segment_bytes
        self._segment_base, self._segment_started = offset, started

    # -- retention -----------------------------------------------------------------------------------

    def apply_retention(self, *, thorough: bool = False) -> RetentionResult:
        """Let go of what the policy's retention does not ask for. `thorough`: whatever frees anything.

        A part of it is done by itself: at every rotation, and, by whoever calls `upkeep` when `next_retention` says so, as time passes.
        """
        self._commit_so_far()
        try:
            return self._tidy(thorough=thorough)
        except StorageFailed as error:
            self._fail(error)
        except BaseException:
            self.failed = True  # as in `_keep_house`
            raise

    def compact(self) -> RetentionResult:
        """Close the newest segment and let go of everything that may go."""
        self._commit_so_far()
        try:
            self._rotate()
        except StorageFailed as error:
            self._fail(error)
        except BaseException:
            self.failed = True  # as in `_keep_house`
            raise
        return self.apply_retention(thorough=True)

    def _commit_so_far(self) -> None:
        """Commit in the middle of a turn. If that fails the turn is undone, and its own `commit` must not say otherwise."""
        try:
            self.commit()
        except PenstockError:
            self._undone = True
            raise
        self._midway = True

    def next_retention(self) -> int | None:
        """When retention has something to look at, by elapsed time; None: not unless something happens here."""
        state = self.state
        retention = state.policy.retention
        if self._closed or self.failed or not retention.max_age:
            return None
        if state.dropped.total == state.next_offset and self.log.first_offset == state.next_offset:
            return None
        return self._schedule.next(retention, self._rotate_at(), self.records_applied)

    def _rotate_at(self) -> int | None:
        """When the newest segment is closed although nothing is written to it; None when it holds no items."""
        state = self.state
        if state.next_offset == self._segment_base:
            return None
        retention = state.policy.retention
        when = self._segment_started + rotation_age(retention, self._segment_age)
        if retention.max_segments:  # the rotation may be what drops its items: they must have had their time
            when = max(when, state.moment.elapsed + retention.max_age)
        return when

    def apply_due_retention(self) -> None:
        """Do what retention has to do by now: close the newest segment if it is time, let go of some of what is old.

        What was run before is committed first. It stands, whatever becomes of the rest.
        """
        self.commit()
        if not self.failed:
            self._keep_house(self._retain_by_age)

    def _retain_by_age(self) -> None:
        now, rotate_at = self.now().elapsed, self._rotate_at()
        if (rotate_at is not None and rotate_at <= now) or self._would_rewrite_the_second(now):
            self._rotate()
        self._tidy(drops=DROPS_AT_ONCE)

    def _would_rewrite_the_second(self, now: int) -> bool:
        """Whether the last segment but one is worth rewriting, as it can be once another one is begun. An idle queue begins none itself."""
        segments = self.log.segments()
        chosen = plan_retention(segments, self.state, self.state.policy.retention, now, drops=DROPS_AT_ONCE, untouched=UNTOUCHED - 1)
        return chosen.rewrites and chosen.last >= len(segments) - UNTOUCHED

    def _tidy(self, *, thorough: bool = False, drops: int = 1 << 30) -> RetentionResult:
        """The record first, durably, then the files: a crash in between leaves bytes too many, never too few."""
        now, retention = self.now().elapsed, self.state.policy.retention
        chosen = plan_retention(self.log.segments(), self.state, retention, now, thorough=thorough, drops=drops)
        buried = [edge for start, stop in pairs(chosen.forget) for edge in self.state.buried_set.within(start, stop)]
        if chosen.forget:
            self.run(Drop(chosen.forget))
            self._append()
        self.log.sync()
        self._note_synced()
        if buried:
            self.dropped_buried.append(DroppedBuried(count(buried), buried[0], buried[-1] - 1))
        size = self.log.rewrite(chosen.first, chosen.last, chosen.keep) if chosen.rewrites else 0
        size += self.log.drop(chosen.drop) if chosen.drop else 0
        if size:
            self._items.clear()
        self._schedule.looked(self.log.segments(), now, retention, self.records_applied, chosen)
        return RetentionResult(chosen.drop, chosen.last - chosen.first + 1, count(chosen.forget), size, count(buried))

    # -- reading -------------------------------------------------------------------------------------

    def read_retained(self, start: int, limit: int) -> RetainedItems:
        """Up to `limit` retained items from offset `start` on, whatever became of them: what cursors read."""
        return read_retained(self, start, limit)

    def offset_at(self, wall: int) -> int:
        """The first offset produced at or after a wall time: where to `Seek` or to set a cursor."""
        self._usable()
        return max(self.log.offset_at(wall), self.state.dropped.first_missing(0))

    def payloads(self, runs: Sequence[int]) -> list[bytes]:
        """The payloads of items, in the order of `runs`; what damage took is left out and put out of the way."""
        return [payload for held, start, stop in self._read(runs) for payload in held.payloads(start, stop)]

    def items(self, runs: Sequence[int]) -> list[Items]:
        """Whole items, in the order of `runs`; what damage took is left out and put out of the way."""
        return [Items(start, held.batch(start, stop), held.wall) for held, start, stop in self._read(runs)]

    def _read(self, runs: Sequence[int]) -> list[tuple[CachedItems, int, int]]:
        self._usable()
        if len(runs) % 2:
            raise InvalidRequest("the runs are not pairs of offsets; give [start, stop, …] as a lease answers them")
        if any(type(record) is Produced for record in self._staged):  # else what is asked for is written
            self._flush()
        found = self._items.collect(runs)
        self._lose(recovery.record_gaps(self.gaps, self.state, self.log.partition, found.gaps))
        if RunSet(RunSet(found.absent).within(0, self.state.next_offset)).subtract(self.state.dropped.runs):
            raise StorageFailed("items were not found in their log, which does not say that it is damaged; try again")
        return found.parts

    def _lose(self, runs: list[int]) -> None:
        """Put what damage took out of the way. It is written now, and synced by the next commit."""
        if runs:
            self.now()
            self._stage([Lost(runs)])
            self._flush()

    def explain(self, offset: int) -> Explanation:
        """Why an item is not running."""
        self._usable()
        while True:
            try:
                return explain(self.state, offset, self.now(), self._blocks)
            except MissingBlocks as missing:
                self._lose(self._fetch(missing.offsets))

    def __repr__(self) -> str:
        return f"Partition({self.log.partition}, {self.state!r}{', failing' if self.failed else ''})"
