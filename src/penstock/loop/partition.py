"""One partition at work: its rules over its log.

Owns: `Partition`, the only place where a state and its log meet.
    run(command)   decide and apply in memory, as often as wanted      (no answer may leave yet)
    commit()       append what was decided, sync if it must be, then answers may leave
    read(runs)     the bytes of items
Opening is replay through the same `apply`. After a failed write the memory is thrown away and rebuilt from what is synced (`reopen`);
nothing is ever retried into success. A turn that only gave out leases needs no sync: a lost lease record costs at most a second delivery,
and the epoch keeps its token from being given twice.
Single-threaded: whoever runs the turn.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.logs import codec
from penstock.logs.api import Frame, FrameType, Gap, Log
from penstock.logs.columns import Columns
from penstock.loop.blocks import Blocks
from penstock.rules import base, machine
from penstock.rules.commands import Again, Answer, Command
from penstock.rules.explain import Explanation, explain
from penstock.rules.lease import NOTHING
from penstock.rules.records import Answered, Configured, Leased, Lost, Opened, Passed, Record
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import Missing, State
from penstock.words.batch import Batch
from penstock.words.clock import DAY, Clock, Moment
from penstock.words.errors import OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.limits import MIB, Policy

ROUNDS = 50
"""How often one command may ask to be decided again within a turn."""
DUE_ITEMS = 2_000
_NEEDS_NO_SYNC = (Leased, Passed, Answered)


class Items(NamedTuple):
    """Items that follow each other, from `start` on."""

    start: int
    batch: Batch
    produced_at: int


class Partition:
    """A state, its log, and the time."""

    def __init__(
        self, log: Log, clock: Clock, policy: Policy | None = None, *, segment_bytes: int = 128 * MIB, segment_age: int = 1 * DAY
    ) -> None:
        self.log = log
        self.state = State()
        self.gaps: list[Gap] = []
        self._clock = clock
        self._policy = policy.validate() if policy is not None else None
        self._segment_bytes = segment_bytes
        self._segment_age = segment_age
        self._segment_since = 0
        self._base_bytes = 0
        self._blocks = Blocks(log)
        self._staged: list[Record] = []
        self._turn = Moment(0, 0)
        self._owes_sync = False
        self._failed = False
        self._open()

    # -- opening -------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.state, self.gaps = replay(self.log)
        state, raw = self.state, self._clock.read()
        if state.epoch == 0:
            shift, rebooted = -raw.elapsed, False
        elif state.boot == self._clock.boot:
            shift, rebooted = max(state.shift, state.moment.elapsed - raw.elapsed), False
        else:  # elapsed time began anew; the wall says about how long the machine was away
            shift, rebooted = state.moment.elapsed + max(0, raw.wall - state.moment.wall) - raw.elapsed, True
        self._turn = Moment(raw.elapsed + shift, raw.wall)
        self._segment_since, self._base_bytes = raw.wall, 0
        self._blocks.clear()
        if self.log.wants_base:
            self._rotate()
        self._stage([Opened(state.epoch + 1, self._clock.boot, shift, rebooted)])
        if self._policy is not None and self._policy != state.policy:
            self._stage([Configured(self._policy)])
        self._append()
        self.log.sync()
        self._owes_sync = False

    def reopen(self) -> None:
        """After a failure: forget everything that is not synced and begin again from what is."""
        self._staged.clear()
        self.log.reset()
        self._failed, self._owes_sync = False, False
        self._open()

    def close(self) -> None:
        """Write what is owed, leave a checkpoint so that the next opening is quick, and let go of the log."""
        if not self._failed:
            self.commit()
            state = self.state
            self.log.write_checkpoint(base.dump(state), state.moment.elapsed, state.moment.wall, state.next_offset)
        self.log.close()

    # -- the turn ------------------------------------------------------------------------------------

    def now(self) -> Moment:
        """The time of the turn: one for everything between two commits, as one frame carries it."""
        if not self._staged:
            raw = self._clock.read()
            self._turn = Moment(max(raw.elapsed + self.state.shift, self.state.moment.elapsed), raw.wall)
        return self._turn

    def run(self, command: Command) -> Answer:
        """Decide a command and apply it in memory. The answer may leave after `commit`."""
        if self._failed:
            raise StorageFailed("the partition is failing; reopen it, then try again")
        now = self.now()
        for _ in range(ROUNDS):
            try:
                records, answer = machine.decide(self.state, command, now, self._blocks)
            except Missing as missing:
                self._fetch(missing.offset)
                continue
            self._stage(records)
            if type(answer) is not Again:
                return answer
        return NOTHING

    def due(self, limit: int = DUE_ITEMS) -> int:
        """Do what came due by itself, about `limit` items of it; says how many records that took."""
        now = self.now()
        while True:
            try:
                records = machine.decide_due(self.state, now, limit, self._blocks)
            except Missing as missing:
                self._fetch(missing.offset)
            else:
                self._stage(records)
                return len(records)

    def commit(self) -> None:
        """Everything run so far is in the log when this returns, and durable unless it was only leasing."""
        try:
            self._append()
            if self._owes_sync:
                self.log.sync()
                self._owes_sync = False
            if self._wants_rotation():
                self._rotate()
        except StorageFailed as error:
            self._fail(error)

    def _fail(self, error: StorageFailed) -> None:
        """Go back to what is synced. If even that fails, nobody can say what will be found."""
        self._failed = True
        try:
            self.reopen()
        except PenstockError as worse:
            self._failed = True
            raise OutcomeUnknown(f"storage failed ({error}) and could not be rolled back ({worse}); repeat with the same request id") from worse
        raise error

    def _stage(self, records: Sequence[Record]) -> None:
        for record in records:
            machine.apply(self.state, record, self._turn)
        self._staged += records

    def _append(self) -> None:
        if self._staged:
            staged, self._staged = self._staged, []
            self._owes_sync = self._owes_sync or any(type(record) not in _NEEDS_NO_SYNC for record in staged)
            self.log.append(codec.drafts(staged, self._turn, self.state.next_offset))

    def _fetch(self, offset: int) -> None:
        """Bring a block to hand; what it may need is written first, so that it can be read."""
        try:
            self._append()
        except StorageFailed as error:
            self._fail(error)
        self._blocks.fetch(offset)

    def _wants_rotation(self) -> bool:
        if self.log.wants_base or self.log.segment_bytes >= max(self._segment_bytes, 4 * self._base_bytes):
            return True
        return self.state.moment.wall - self._segment_since >= self._segment_age

    def _rotate(self) -> None:
        body = base.dump(self.state)
        self.log.rotate(codec.base(body, self._turn, self.state.next_offset))
        self._base_bytes, self._segment_since, self._owes_sync = len(body), self._turn.wall, False

    # -- reading -------------------------------------------------------------------------------------

    def payloads(self, runs: Sequence[int]) -> list[bytes]:
        """The payloads of items, in the order of `runs`; what damage took is left out and put out of the way."""
        found: list[bytes] = []
        for columns, start, stop in self._read(runs):
            found += columns.payloads(start, stop)
        return found

    def items(self, runs: Sequence[int]) -> list[Items]:
        """Whole items, in the order of `runs`; what damage took is left out and put out of the way."""
        return [Items(start, columns.batch(start, stop), columns.wall) for columns, start, stop in self._read(runs)]

    def _read(self, runs: Sequence[int]) -> list[tuple[Columns, int, int]]:
        found: list[tuple[Columns, int, int]] = []
        for start, stop in pairs(runs):
            missing = RunSet((start, stop))
            for frame in self.log.read(start, stop):
                if isinstance(frame, Frame):
                    columns = Columns(frame)
                    low, high = max(start, columns.base), min(stop, columns.stop)
                    found.append((columns, low, high))
                    missing.remove(low, high)
            if missing:
                self.now()
                self._stage([Lost(missing.runs)])
                self.commit()
        return found

    def explain(self, offset: int) -> Explanation:
        """Why an item is not running."""
        while True:
            try:
                return explain(self.state, offset, self.now(), self._blocks)
            except Missing as missing:
                self._fetch(missing.offset)

    def __repr__(self) -> str:
        return f"Partition({self.log.partition}, {self.state!r}{', failing' if self._failed else ''})"


def replay(log: Log) -> tuple[State, list[Gap]]:
    """The state that a log tells, from its latest Base on, and the gaps met on the way."""
    state, gaps = State(), []
    for found in log.recover():
        if isinstance(found, Gap):
            gaps.append(found)
            if found.start < found.stop:
                machine.apply(state, Lost([found.start, found.stop]), state.moment)
        elif found.type is FrameType.BASE:
            state = base.load(found.body)
        else:
            now = Moment(found.elapsed, found.wall)
            for record in codec.records(found, outline=True):
                machine.apply(state, record, now)
    return state, gaps
