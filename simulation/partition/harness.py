"""Runs one real partition together with its model, and kills and reopens it.

Owns: `PartitionHarness` (a real `Partition` on a file log, a simulated disk and a manual clock, compared with its
model) and `ModelHistory` (takes the model back to what was found after a crash).
- The model checks every answer, and is compared with the partition after every step.
- What was committed and synced is found after every crash. What was committed, also leases that were not synced, is
  found after a process kill, a failed write and an interrupt. Of the appends after these any first part may be found,
  each append completely.
  After a crash the model is taken back to what was found, which must be one of these states.
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
from penstock.testing.clock import MicrosecondClock
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
"""More rounds of retention than are ever needed at one time; more count as an endless loop."""
DISPOSABLE = (".idx", "synced", "checkpoint", "penstock.json")
"""Files that may be deleted: they can be rebuilt from the logs."""


class Append(NamedTuple):
    """Frames that were written together."""

    last_sequence: int
    steps: int
    """The number of steps taken before the append."""


class ModelHistory:
    """A model that can be taken back to the steps that were found after a crash.

    It records a log's appends and so knows which steps were found: an append is found completely or not at all, and
    only with all appends before it. The harness checks that everything acknowledged is among them.
    """

    def __init__(self, model: PartitionModel) -> None:
        self.model = model
        self.appended = 0
        """The number of unsynced steps that were appended."""
        self.written = 0
        """The number of unsynced steps that were committed: a process kill may not undo them."""
        self._appends: list[Append] = []
        self._steps: list[Callable[[PartitionModel], None]] = []
        self._kept = _copy(model)
        """The model before the unsynced steps."""
        self._adjusted = False
        """Whether the model was changed by something that is not a step."""
        self._opening = True

    def apply_step(self, step: Callable[[PartitionModel], None]) -> None:
        """Apply a step to the model and record it."""
        step(self.model)
        self._steps.append(step)

    def adjust(self, change: Callable[[PartitionModel], None]) -> None:
        """Change the model by something that is not a step. The caller does it again after `go_back`."""
        change(self.model)
        self._adjusted = True

    def watch(self, log: FileLog) -> None:
        """Record every append to a log; when the log is recovered, forget the appends that were not found."""
        append, recover = log.append, log.recover
        opened: list[int] = []

        def noting_append(drafts: Sequence[Draft]) -> int:
            last = log.sequence + len(drafts)
            if not self._opening:
                self.appended = len(self._steps)
                self._appends.append(Append(last, self.appended))  # also if it fails: its frames may be on the disk
            elif opened:  # after the opening's record, which is no step: answered leases, appended again
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
        """The answers were sent: from now on a process kill may not undo the steps so far."""
        self.written = self.appended

    def mark_synced(self) -> None:
        """All steps so far are synced: from now on they must be found after every crash."""
        if self._adjusted:
            self._kept, self._adjusted = _copy(self.model), False
        else:  # faster than a copy
            for step in self._steps:
                step(self._kept)
        self._steps.clear()
        self._appends.clear()
        self.appended, self.written, self._opening = 0, 0, False

    @property
    def found(self) -> int:
        """The number of unsynced steps that were found."""
        return self._appends[-1].steps if self._appends else 0

    def go_back(self, steps: int) -> None:
        """Set the model to its state after this many unsynced steps."""
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
        super().__init__(seed, MicrosecondClock(), say)
        self.chance = RandomCommands(random.Random(seed))
        self._segment_bytes = self.chance.segment_bytes()
        self._produced: dict[int, checks.ItemContent] = {}
        self._produced_at: dict[int, int] = {}
        """Offset → elapsed time."""
        self._errors: list[int] = []
        """Numbers of the file calls that were made to fail."""
        self._calls = 0
        """The number of file calls before the current step."""
        self._owes_sync = False
        """Whether the turn did more than grant leases, and so must be synced."""
        policy = self.chance.policy()
        self._history = ModelHistory(PartitionModel(policy))
        self._open(policy)
        self._state = self.partition.state
        self._seen = checks.view_of(self._state, self.partition.now())
        """The partition's state when it was last compared with the model."""
        self._history.mark_synced()

    @property
    def model(self) -> PartitionModel:
        return self._history.model

    # -- commands --------------------------------------------------------------------------------------

    def send(self, command: c.Command) -> c.Answer | PenstockError | None:
        """Run a command and let the model check the answer; returns None when storage failed."""
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
        """Let the partition process up to `limit` due items; returns the number of records."""
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
        """Apply a step to the model and compare it with the partition."""
        before, now, state = self._seen, self.partition.now(), self.partition.state
        self._history.apply_step(step)
        real = checks.view_of(state, now)
        checks.check_transitions(kind, before.states, real.states)
        self._compare(real, self.model.view(now))
        checks.check_counts(state, real.states)
        # Only items, leases, pauses and policy are compared: a step that only remembers an answer need not be synced.
        self._owes_sync = self._owes_sync or (kind != "AcquireLease" and real[:6] != before[:6])

    def _compare(self, real: ComparedState, expected: ComparedState) -> None:
        checks.check_same(real, expected)
        self._seen = real

    def commit(self) -> bool:
        """Commit the turn; returns whether its answers may be sent."""
        if self._attempt(self.partition.commit) is None:
            return False
        self._committed()
        return True

    def compact(self) -> None:
        """Compact: drop everything that retention allows."""
        freed = self._attempt(self.partition.compact)
        if freed is not None:
            self.say("   %s", freed[0])
            self._committed()

    def upkeep(self) -> None:
        """Run the retention that is due."""
        for _ in range(MOST_LOOKS):
            when = self.partition.next_retention()
            if when is None or when > self.partition.now().elapsed:
                return
            if self._attempt(self.partition.apply_due_retention) is None:
                return
            self._committed()
        raise AssertionError("retention is due again and again without time passing")

    def check_retention(self) -> None:
        """At the end all items are resolved and old, and no cursor is left: retention must have dropped everything that
        it may."""
        retention, state = self.partition.state.policy.retention, self.partition.state
        if retention.max_age and retention.min_segments == 1:
            assert state.dropped.total == state.next_offset, f"{state.next_offset - state.dropped.total} items are kept for too long"

    def _committed(self) -> None:
        assert not (self._owes_sync and self.partition.log.unsynced), "a turn that did more than lease was not synced"
        self._history.mark_committed()
        if self.partition.failed:  # upkeep after the commit failed: its unsynced writes are undone at the next opening
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
        """Check that leased items that are not dropped are read as they were produced."""
        wanted = [offset for offset in leased if not self.model.items[offset].dropped]
        runs = [edge for offset in wanted for edge in (offset, offset + 1)]
        self._look(lambda: checks.check_read_back(self.partition.items(runs), self._produced, wanted))

    def inspect(self) -> None:
        """Run the checks that are too slow for every step."""
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

    # -- faults ----------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._calls = self.disk.calls

    def inject_fault(self, fault: Fault, ahead: int) -> None:
        """Make the file call after `ahead` more calls meet this fault."""
        super().inject_fault(fault, ahead)
        if fault != "halt":
            self._errors.append(self.disk.calls + ahead)

    def _attempt(self, action: Callable[[], T]) -> tuple[T] | None:
        """Run an action; None when storage failed or the action was interrupted."""
        try:
            return (action(),)
        except (StorageFailed, OutcomeUnknown) as failure:
            self._failed(failure)
        except KeyboardInterrupt:
            self._interrupted()
        return None

    def _failed(self, failure: PenstockError) -> None:
        """Storage failed: nothing of the turn is stored, or (OutcomeUnknown) it is not known whether it is."""
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
        # else only a read failed: nothing was lost, and the turn continues

    def _interrupted(self) -> None:
        """A call was interrupted: the turn may be stored or not; everything answered before is kept."""
        self.say("   interrupted")
        self._reopen(refused=False)

    def _reopen(self, *, refused: bool) -> None:
        """Reopen the partition in the same process: everything answered is kept, also leases that were not synced."""
        self.disk.clear_faults()
        self.partition.reopen()
        self._align_model(least=self._history.written, refused=refused)

    def crash_and_reopen(self, power: bool, sure: int | None = None) -> None:
        """End the process and open the partition in a new one. At least `sure` unsynced steps must be found."""
        if sure is None:  # after an error the partition may have undone unsynced steps
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
        """Close and open again, after a reboot that took `reboot` (None: no reboot), with some rebuildable files
        deleted."""
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
        """Damage a copy of this partition and check that the undamaged items are served."""
        damage.check_damaged_copy(self.disk, self.clock, ROOT, (INCARNATION, PARTITION), self._segment_bytes, rng, self.say)

    # -- opening ---------------------------------------------------------------------------------------

    def _open(self, policy: Policy | None = None) -> None:
        self._directory = FileStore.open(ROOT, files=self.disk, clock=self.clock, entropy=bytes)
        log = self._directory.log(INCARNATION, PARTITION)
        self._history.watch(log)
        self.partition = Partition(log, self.clock, policy, segment_bytes=self._segment_bytes)
        assert not self.partition.gaps, f"nothing was damaged, and yet: {self.partition.gaps}"

    def _align_model(self, *, least: int = 0, refused: bool = False, rebooted: bool = False) -> None:
        """Take the model back to the steps that were found: at least `least`, and none of the last turn if that was
        refused."""
        self._state = self.partition.state
        moment = self._state.moment
        history = self._history
        self.say("   found %d steps (at least %d, at most %d)", history.found, least, history.written if refused else history.appended)
        assert not refused or history.found <= history.written, "a turn that was refused was found"
        history.go_back(max(history.found, least))
        self._follow_drops()
        self._history.adjust(lambda model: model.opened(moment, rebooted=rebooted))
        self._compare(checks.view_of(self._state, moment), self.model.view(moment))
        self._produced = {offset: content for offset, content in self._produced.items() if offset < len(self.model.items)}
        self._produced_at = {offset: when for offset, when in self._produced_at.items() if offset < len(self.model.items)}
        self._all_kept()
        checks.check_base(self._state)
        if self.chance.happens(0.3):
            self.replay()

    def _follow_drops(self) -> bool:
        """Apply to the model what retention dropped after the commit, after a check that it was allowed; returns
        whether it dropped any."""
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
