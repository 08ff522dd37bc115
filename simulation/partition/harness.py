"""One partition that is killed and opened again, beside a model that knows what it has promised.

Owns: `PartitionHarness`: a real `Partition` on a real file log, on a simulated disk, under a manual clock, beside its model; and
`ModelHistory`, which takes the model back to what was found after a crash.
- Every step is judged by the model and compared with it.
- What was committed and synced is there after anything; what was committed is there after a process kill, and after a failed write or
  an interrupt, leases that were not synced included; of later appends any beginning may be there, each whole. After a death the model
  is brought to what is found, which must be one of these.
"""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.log import Draft, Frame, Gap
from penstock.loop.partition import Partition
from penstock.rules import commands as c
from penstock.rules.runs import offsets
from penstock.testing.clock import ManualClock
from penstock.testing.disk import Fault, Halt
from penstock.words.clock import HOUR, MINUTE
from penstock.words.errors import OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.limits import Policy
from simulation.partition import checks, damage
from simulation.partition.commands import RandomCommands
from simulation.partition.model import PartitionModel
from simulation.partition.model_state import ComparedState
from simulation.simulated_machine import SimulatedMachine
from simulation.simulation import StepPrinter

T = TypeVar("T")

ROOT = "/data"
INCARNATION, PARTITION = 0x5EED, 3
MOST_LOOKS = 100
"""More than retention ever needs at one time: whoever goes on has met a bug."""
DISPOSABLE = (".idx", "synced", "checkpoint", "penstock.json")
"""Files that may be deleted: what they say can be told from the logs."""


class Append(NamedTuple):
    """Frames that were written together."""

    last_sequence: int
    steps: int
    """How many steps had been taken by then."""


class ModelHistory:
    """A model, and how to take it back to what was found after a crash.

    It watches a log's appends, so that it knows exactly which of the steps are there: an append is found whole or not at all, and none
    without those before it. Whether those that were promised are among them is for the harness to check.
    """

    def __init__(self, model: PartitionModel) -> None:
        self.model = model
        self.appended = 0
        """How many of the steps that a power cut may take back were appended, found again or not."""
        self.written = 0
        """How many of them a process kill may not take back."""
        self._appends: list[Append] = []
        self._steps: list[Callable[[PartitionModel], None]] = []
        self._kept = _copy(model)
        """The model before them."""
        self._adjusted = False
        """The model was changed otherwise than by a step."""
        self._opening = True

    def apply_step(self, step: Callable[[PartitionModel], None]) -> None:
        """The model takes a step."""
        step(self.model)
        self._steps.append(step)

    def adjust(self, change: Callable[[PartitionModel], None]) -> None:
        """Change the model by something that is no step: it is done again, if need be, after the steps."""
        change(self.model)
        self._adjusted = True

    def watch(self, log: FileLog) -> None:
        """Take note of what is appended to a log, and, when it is recovered, forget what is not there any more."""
        append, recover = log.append, log.recover
        opened: list[int] = []

        def noting_append(drafts: Sequence[Draft]) -> int:
            last = log.sequence + len(drafts)
            if not self._opening:
                self.appended = len(self._steps)
                self._appends.append(Append(last, self.appended))  # also if it fails: it may be there
            elif opened:  # behind the record of the opening, which is no step: leases that were answered, once more
                self._appends.append(Append(last, self.written))
            opened.append(last)
            return append(drafts)

        def noting_recover() -> Iterator[Frame | Gap]:
            last, self._opening = 0, True
            opened.clear()
            for found in recover():
                last = found.sequence if isinstance(found, Frame) else last
                yield found
            self._appends = [one for one in self._appends if one.last_sequence <= last]

        log.append, log.recover = noting_append, noting_recover  # type: ignore[method-assign]

    def mark_committed(self) -> None:
        """The answers have left: from now on a process kill may take nothing back."""
        self.written = self.appended

    def mark_synced(self) -> None:
        """Everything up to here is synced: from now on it must be found, whatever happens."""
        if self._adjusted:
            self._kept, self._adjusted = _copy(self.model), False
        else:  # cheaper than a copy
            for step in self._steps:
                step(self._kept)
        self._steps.clear()
        self._appends.clear()
        self.appended, self.written, self._opening = 0, 0, False

    @property
    def found(self) -> int:
        """How many steps are there."""
        return self._appends[-1].steps if self._appends else 0

    def go_back(self, steps: int) -> None:
        """Make the model what it was after so many steps."""
        self.model, self._adjusted = _copy(self._kept), False
        for step in self._steps[:steps]:
            step(self.model)
        del self._steps[steps:]


def _copy(model: PartitionModel) -> PartitionModel:
    copy: PartitionModel = pickle.loads(pickle.dumps(model))
    return copy


class PartitionHarness(SimulatedMachine):
    """A partition and its model."""

    def __init__(self, seed: int, say: StepPrinter) -> None:
        super().__init__(seed, ManualClock(), say)
        self.chance = RandomCommands(random.Random(seed))
        self._segment_bytes = self.chance.segment_bytes()
        self._produced: dict[int, checks.ItemContent] = {}
        self._produced_at: dict[int, int] = {}
        """Elapsed time."""
        self._errors: list[int] = []
        """Numbers of the file calls that were made to fail."""
        self._calls = 0
        """How many calls had been made when the present step began."""
        self._owes_sync = False
        """The turn did more than give out leases."""
        policy = self.chance.policy()
        self._history = ModelHistory(PartitionModel(policy))
        self._open(policy)
        self._state = self.partition.state
        self._seen = checks.view_of(self._state, self.partition.now())
        """What the partition showed when it was last compared with the model."""
        self._history.mark_synced()

    @property
    def model(self) -> PartitionModel:
        return self._history.model

    # -- what is asked of the partition --------------------------------------------------------------

    def send(self, command: c.Command) -> c.Answer | PenstockError | None:
        """Ask, and let the model judge the answer; None when storage failed."""
        now = self.partition.now()
        answer: c.Answer | PenstockError
        try:
            done = self._attempt(lambda: self.partition.run(command))
        except PenstockError as refusal:
            answer = refusal
        else:
            if done is None:
                return None
            answer = done[0]
        self.say("   %s → %r", command, answer)
        if isinstance(command, c.Produce) and isinstance(answer, c.Stored):
            for offset, content in zip(answer.offsets, checks.contents(command.batch), strict=False):
                self._produced.setdefault(offset, content)
                self._produced_at.setdefault(offset, now.elapsed)
        self._follow(type(command).__name__, partial(PartitionModel.check_answer, command=command, now=now, answer=answer))
        return answer

    def due(self, limit: int) -> int:
        """Let the partition do some of what is due; returns how many records that took."""
        now = self.partition.now()
        found = self._attempt(lambda: self.partition.due(limit))
        if found is None:
            return 0
        done = found[0]
        state = self.partition.state
        seen, overdue = checks.states_of(state), offsets(state.ttl_overdue.runs)
        self.say("   due: %d records", done)
        self._follow("due", partial(PartitionModel.due, now=now, seen=seen, overdue=overdue, finished=not done))
        return done

    def _follow(self, kind: str, step: Callable[[PartitionModel], None]) -> None:
        """Let the model take a step, and compare it with the partition."""
        before, now, state = self._seen, self.partition.now(), self.partition.state
        self._history.apply_step(step)
        real = checks.view_of(state, now)
        checks.check_transitions(kind, before.states, real.states)
        self._compare(real, self.model.view(now))
        checks.check_counts(state, real.states)
        # Comparing items, leases, pauses and policy: a remembered answer that changed none of these promises nothing.
        self._owes_sync = self._owes_sync or (kind != "AcquireLease" and real[:6] != before[:6])

    def _compare(self, real: ComparedState, expected: ComparedState) -> None:
        checks.check_same(real, expected)
        self._seen = real

    def commit(self) -> bool:
        """Write the turn; returns whether its answers may leave."""
        if self._attempt(self.partition.commit) is None:
            return False
        self._committed()
        return True

    def compact(self) -> None:
        """Compact: drop whatever retention allows."""
        freed = self._attempt(self.partition.compact)
        if freed is not None:
            self.say("   %s", freed[0])
            self._committed()

    def upkeep(self) -> None:
        """Let retention do what it has to do by now."""
        for _ in range(MOST_LOOKS):
            when = self.partition.next_retention()
            if when is None or when > self.partition.now().elapsed:
                return
            if self._attempt(self.partition.apply_due_retention) is None:
                return
            self._committed()
        raise AssertionError("retention always wants another look")

    def check_retention(self) -> None:
        """All is resolved, no cursor is left and everything is old: what may go has gone."""
        retention, state = self.partition.state.policy.retention, self.partition.state
        if retention.max_age and retention.min_segments == 1:
            assert state.dropped.total == state.next_offset, f"{state.next_offset - state.dropped.total} items are kept for too long"

    def _committed(self) -> None:
        assert not (self._owes_sync and self.partition.log.unsynced), "a turn that did more than lease was not synced"
        self._history.mark_committed()
        if self.partition.failed:  # keeping house failed behind it: what that wrote is not synced, and goes at the next opening
            self._reopen(refused=False)
            return
        if self.partition.state is not self._state:  # a rotation failed after the turn was stored
            self._align_model(least=self._history.written)
            return
        if self._follow_drops():
            now = self.partition.now()
            self._compare(checks.view_of(self._state, now), self.model.view(now))
        if not self.partition.log.unsynced:
            self._all_kept()

    def read_back(self, leased: list[int]) -> None:
        """Items are as they were produced, as long as they are kept."""
        wanted = [offset for offset in leased if not self.model.items[offset].dropped]
        runs = [edge for offset in wanted for edge in (offset, offset + 1)]
        self._look(lambda: checks.check_read_back(self.partition.items(runs), self._produced, wanted))

    def inspect(self) -> None:
        """Check what costs too much to be checked after every step."""
        states = [item.state for item in self.model.items]
        if states:
            offset = self.chance.rng.randrange(len(states))
            self._look(lambda: checks.check_explained(self.partition, offset, states))
        checks.check_base(self.partition.state)

    def replay(self) -> None:
        self._look(lambda: checks.check_replay(self.partition))

    def _look(self, check: Callable[[], None]) -> None:
        try:
            check()
        except StorageFailed as failure:
            self._failed(failure)
        except KeyboardInterrupt:
            self._interrupted()

    # -- trouble -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._calls = self.disk.calls

    def inject_fault(self, fault: Fault, ahead: int) -> None:
        """One of the next file calls will go wrong."""
        super().inject_fault(fault, ahead)
        if fault != "halt":
            self._errors.append(self.disk.calls + ahead)

    def _attempt(self, action: Callable[[], T]) -> tuple[T] | None:
        """Do something; None when storage failed or somebody interrupted it."""
        try:
            return (action(),)
        except (StorageFailed, OutcomeUnknown) as failure:
            self._failed(failure)
        except KeyboardInterrupt:
            self._interrupted()
        return None

    def _failed(self, failure: PenstockError) -> None:
        """Storage refused something: nothing of the turn is stored, or (OutcomeUnknown) nobody knows."""
        self.say("   %r", failure)
        if isinstance(failure, OutcomeUnknown):
            if self.chance.happens(0.5):
                self._reopen(refused=False)
            else:
                self.disk.clear_faults()
                self.crash_and_reopen(power=False, sure=0)
        elif self.partition.state is not self._state:
            self._align_model(least=self._history.written, refused=True)
        elif "failing" in repr(self.partition) or self.chance.happens(0.5):
            self._reopen(refused=True)
        # else a read failed, and nothing was lost by it: the turn goes on

    def _interrupted(self) -> None:
        """Ctrl-C in the middle of a call: nobody knows what became of the turn, and what was answered before it stands."""
        self.say("   interrupted")
        self._reopen(refused=False)

    def _reopen(self, *, refused: bool) -> None:
        """Open the partition anew in the same process: what was answered stands, also leases that were not synced."""
        self.disk.clear_faults()
        self.partition.reopen()
        self._align_model(least=self._history.written, refused=refused)

    def crash_and_reopen(self, power: bool, sure: int | None = None) -> None:
        """The process ends here; then another one finds what there is. `sure` steps at least must be found."""
        if sure is None:  # going back after an error, it may have dropped what was not synced
            sure = 0 if any(self._calls < call <= self.disk.calls for call in self._errors) else self._history.written
        rebooted = False
        while True:
            if power:
                sure, rebooted = 0, True
                self.cut_power(self.chance.pick([0, MINUTE, HOUR]))
            else:
                self.kill_process()
            try:
                self._open()
                break
            except Halt:
                power = self.chance.happens(0.5)
            except (StorageFailed, OutcomeUnknown, KeyboardInterrupt):
                self.disk.clear_faults()
                power = False
        self._align_model(least=sure, rebooted=rebooted)

    def restart(self, reboot: int | None, delete: float) -> None:
        """Close and open again, perhaps after a reboot that took so long, and without some of the files that may be missing."""
        try:
            self.partition.close()
            self._directory.close()
        except (StorageFailed, OutcomeUnknown, KeyboardInterrupt):
            went_back = self.partition.state is not self._state and not self.partition.failed  # and appended answered leases again
            self.crash_and_reopen(power=False, sure=self._history.written if went_back else None)
            return
        self.disk.clear_faults()
        if reboot is not None:
            self.clock.reboot(reboot)
        self._delete(path for path in self.disk.contents() if path.endswith(DISPOSABLE) and self.chance.happens(delete))
        self._open()
        self._align_model(least=self._history.appended, rebooted=reboot is not None)

    def _delete(self, paths: Iterable[str]) -> None:
        for path in list(paths):
            self.say("   %s is deleted", path)
            self.disk.remove(path)

    def damage_a_copy(self, rng: random.Random) -> None:
        """Items of a partition like this one, of which some are damaged: the others are served."""
        damage.check_damaged_copy(self.disk, self.clock, ROOT, (INCARNATION, PARTITION), self._segment_bytes, rng, self.say)

    # -- living on -----------------------------------------------------------------------------------

    def _open(self, policy: Policy | None = None) -> None:
        self._directory = FileStore.open(ROOT, files=self.disk, clock=self.clock, entropy=bytes)
        log = self._directory.log(INCARNATION, PARTITION)
        self._history.watch(log)
        self.partition = Partition(log, self.clock, policy, segment_bytes=self._segment_bytes)
        assert not self.partition.gaps, f"nothing was damaged, and yet: {self.partition.gaps}"

    def _align_model(self, *, least: int = 0, refused: bool = False, rebooted: bool = False) -> None:
        """Bring the model to what was found: at least so many of the steps, and, if the turn was refused, nothing of it."""
        self._state = self.partition.state
        moment = self._state.moment
        history = self._history
        self.say("   found %d steps (at least %d, at most %d)", history.found, least, history.written if refused else history.appended)
        assert not refused or history.found <= history.written, "a turn that was refused was found"
        history.go_back(max(history.found, least))
        self._follow_drops()
        self._compare(checks.view_of(self._state, moment), self.model.view(moment, rebooted=rebooted))
        if rebooted:
            self._history.adjust(lambda model: model.restart_timeouts(moment))
        self._produced = {offset: content for offset, content in self._produced.items() if offset < len(self.model.items)}
        self._produced_at = {offset: when for offset, when in self._produced_at.items() if offset < len(self.model.items)}
        self._all_kept()
        checks.check_base(self._state)
        if self.chance.happens(0.3):
            self.replay()

    def _follow_drops(self) -> bool:
        """Retention works after the turn is stored and tells nobody: what it took must be its to take. Says whether it took any."""
        dropped = offsets(self._state.dropped.runs)
        news = len(dropped) != sum(item.dropped for item in self.model.items)
        if news:
            retention, now = self.model.policy.retention, self.partition.now().elapsed
            if not retention.max_bytes and not retention.max_segments:
                gone = [offset for offset in dropped if not self.model.items[offset].dropped]
                young = [offset for offset in gone if not retention.max_age or now - self._produced_at[offset] < retention.max_age]
                assert not young, f"items {young} were dropped before their time"
            self._history.adjust(lambda model: model.check_drops(dropped))
        return news

    def _all_kept(self) -> None:
        self._history.mark_synced()
        self._owes_sync = False
