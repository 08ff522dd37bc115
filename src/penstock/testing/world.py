"""One partition that dies and lives on, and a model that keeps account of what it owes.

Owns: `World`: a real `Partition` on a real file log, on a simulated disk, under a manual clock, beside its model; and the promises made.
- Every step is judged by the model and compared with it; nothing is believed.
- What was committed and synced is there after anything; what was committed is there after a process kill; of later appends any beginning
  may be there, each whole. After a death the model is brought to what is found, which must be one of these.
"""

import contextlib
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from penstock.logs.api import Draft
from penstock.logs.directory import Directory
from penstock.logs.filelog import FileLog
from penstock.loop.partition import Partition
from penstock.rules import commands as c
from penstock.rules.runs import offsets
from penstock.testing import checks
from penstock.testing.chance import Chance
from penstock.testing.clock import ManualClock
from penstock.testing.disk import Fault, Halt, SimulatedFiles
from penstock.testing.model import Model
from penstock.words.clock import HOUR, MINUTE
from penstock.words.errors import OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.limits import Policy

ROOT = "/data"
INCARNATION, PARTITION = 0x5EED, 3
DISPOSABLE = (".idx", "synced", "checkpoint", "penstock.json")
"""Files that may be deleted: what they say can be told from the logs."""


class World:
    """A partition, its model, and what is between them."""

    def __init__(self, seed: int, say: Callable[[str], None]) -> None:
        self.say = say
        self.chance = Chance(random.Random(seed))
        self.clock = ManualClock()
        self.files = SimulatedFiles(random.Random(seed))
        self._segment_bytes = self.chance.segment_bytes()
        self._produced: dict[int, checks.Content] = {}
        self._since: list[Callable[[Model], None]] = []
        """Steps that a power cut may take back, oldest first."""
        self._written = 0
        """How many of them a process kill may not."""
        self._groups: list[int] = []
        """How many of them had been taken at each append: what is appended together is found together."""
        self._errors: list[int] = []
        """Numbers of the file calls that were made to fail."""
        self._calls = 0
        """How many calls had been made when the present step began."""
        self._owes_sync = False
        """The turn did more than give out leases."""
        policy = self.chance.policy()
        self.model = Model(policy)
        self._open(policy)
        self._state = self.partition.state
        self._kept = pickle.dumps(self.model)
        """The model before the steps of `_since`."""

    # -- what is asked of the partition --------------------------------------------------------------

    def send(self, command: c.Command) -> c.Answer | PenstockError | None:
        """Ask, and let the model judge the answer; None when storage failed."""
        now = self.partition.now()
        answer: c.Answer | PenstockError
        try:
            answer = self.partition.run(command)
        except (StorageFailed, OutcomeUnknown) as failure:
            self._failed(failure)
            return None
        except PenstockError as refusal:
            answer = refusal
        self.say(f"   {command} → {answer!r}")
        if isinstance(command, c.Produce) and isinstance(answer, c.Stored):
            for offset, content in zip(answer.offsets, checks.contents(command.batch), strict=False):
                self._produced.setdefault(offset, content)
        self._follow(type(command).__name__, partial(Model.judge, command=command, now=now, answer=answer))
        return answer

    def due(self, limit: int) -> int:
        """Let it do some of what is due; says how many records that took."""
        now = self.partition.now()
        try:
            done = self.partition.due(limit)
        except (StorageFailed, OutcomeUnknown) as failure:
            self._failed(failure)
            return 0
        state = self.partition.state
        seen, overdue = checks.look(state, now).states, offsets(state.overdue.runs)
        self.say(f"   due: {done} records")
        self._follow("due", partial(Model.due, now=now, seen=seen, overdue=overdue, finished=not done))
        return done

    def _follow(self, kind: str, step: Callable[[Model], None]) -> None:
        """The model takes a step, and what it shows must be what the partition shows."""
        now, state = self.partition.now(), self.partition.state
        before = self.model.view(now)
        step(self.model)
        self._since.append(step)
        real = checks.look(state, now)
        checks.check_transitions(kind, before.states, real.states)
        checks.check_same(real, self.model.view(now))
        checks.check_counts(state, real.states)
        # Comparing items, leases, pauses and policy: a remembered answer that changed none of these promises nothing.
        self._owes_sync = self._owes_sync or (kind != "Lease" and real[:6] != before[:6])

    def commit(self) -> bool:
        """Write the turn; says whether its answers may leave."""
        try:
            self.partition.commit()
        except (StorageFailed, OutcomeUnknown) as failure:
            self._failed(failure)
            return False
        self._committed()
        return True

    def compact(self) -> None:
        """Let go of whatever may go."""
        try:
            freed = self.partition.compact()
        except (StorageFailed, OutcomeUnknown) as failure:
            self._failed(failure)
        else:
            self.say(f"   {freed}")
            self._committed()

    def _committed(self) -> None:
        assert not (self._owes_sync and self.partition.log.unsynced), "a turn that did more than lease was not synced"
        self._written = len(self._since)
        if self.partition.state is not self._state:  # a rotation failed after the turn was stored
            self._settle(self._written, self._written)
            return
        dropped = set(offsets(self._state.dropped.runs))
        if dropped != self.model.view(self.partition.now()).dropped:
            self.model.retain(dropped)
            checks.check_same(checks.look(self._state, self.partition.now()), self.model.view(self.partition.now()))
        if not self.partition.log.unsynced:
            self._all_kept()

    def read_back(self, offsets: list[int]) -> None:
        """Items are as they were produced, as long as they are kept."""
        wanted = [offset for offset in offsets if not self.model.items[offset].dropped]
        runs = [edge for offset in wanted for edge in (offset, offset + 1)]
        self._look(lambda: checks.check_read_back(self.partition.items(runs), self._produced, wanted))

    def inspect(self) -> None:
        """What is too dear to be looked at after every step."""
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

    # -- trouble -------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._calls = self.files.calls

    def arm(self, fault: Fault, ahead: int) -> None:
        """One of the next file calls will go wrong."""
        call = self.files.calls + ahead
        self.say(f"   call {call} will meet {fault}")
        self.files.fail(call, fault)
        if fault != "halt":
            self._errors.append(call)

    def _failed(self, failure: PenstockError) -> None:
        """Storage refused something: nothing of the turn is stored, or (OutcomeUnknown) nobody knows."""
        self.say(f"   {failure!r}")
        if isinstance(failure, OutcomeUnknown):
            if self.chance.happens(0.5):
                self._reopen(len(self._since))
            else:
                self.files.mend()
                self.die(power=False, sure=0)
        elif self.partition.state is not self._state:
            self._settle(0, self._written)
        elif "failing" in repr(self.partition) or self.chance.happens(0.5):
            self._reopen(self._written)
        # else a read failed, and nothing was lost by it: the turn goes on

    def _reopen(self, most: int) -> None:
        self.files.mend()
        self.partition.reopen()
        self._settle(0, most)

    def die(self, power: bool, sure: int | None = None) -> None:
        """The process ends here; then another one finds what there is. `sure` steps at least must be found."""
        if sure is None:  # going back after an error, it may have dropped what was not synced
            sure = 0 if any(self._calls < call <= self.files.calls for call in self._errors) else self._written
        rebooted = False
        while True:
            if power:
                sure, rebooted = 0, True
            self._end_process(power)
            try:
                self._open()
                break
            except Halt:
                power = self.chance.happens(0.5)
            except (StorageFailed, OutcomeUnknown):
                self.files.mend()
                power = False
        self._settle(sure, len(self._since), rebooted=rebooted)

    def _end_process(self, power: bool) -> None:
        if power:
            self.files.crash()
            self.clock.reboot(self.chance.pick([0, MINUTE, HOUR]))
        else:
            self.files.kill()
        self.say(f"   {'power cut' if power else 'killed'}: {self.files!r}")

    def restart(self, reboot: int | None, delete: float) -> None:
        """Close and open again, perhaps after a reboot that took so long, and without some of the files that may be missing."""
        try:
            self.partition.close()
            self._directory.close()
        except (StorageFailed, OutcomeUnknown):
            self.die(power=False)
            return
        self.files.mend()
        if reboot is not None:
            self.clock.reboot(reboot)
        self._delete(path for path in self.files.contents() if path.endswith(DISPOSABLE) and self.chance.happens(delete))
        self._open()
        self._settle(len(self._since), len(self._since), rebooted=reboot is not None)

    def _delete(self, paths: Iterable[str]) -> None:
        for path in list(paths):
            self.say(f"   {path} is deleted")
            self.files.remove(path)

    # -- living on -----------------------------------------------------------------------------------

    def _open(self, policy: Policy | None = None) -> None:
        self._directory = Directory.open(ROOT, files=self.files, clock=self.clock, entropy=bytes)
        log = self._directory.log(INCARNATION, PARTITION)
        self._note_appends(log)
        self.partition = Partition(log, self.clock, policy, segment_bytes=self._segment_bytes)
        assert not self.partition.gaps, f"nothing was damaged, and yet: {self.partition.gaps}"

    def _note_appends(self, log: FileLog) -> None:
        append = log.append

        def noting(drafts: Sequence[Draft]) -> int:
            self._groups.append(len(self._since))
            return append(drafts)

        log.append = noting  # type: ignore[method-assign]

    def _settle(self, least: int, most: int, *, rebooted: bool = False) -> None:
        """Find out which of the steps since the last sync are there: at least `least`, at most `most` of them, the oldest first."""
        self._state = self.partition.state
        moment = self._state.moment
        real = checks.look(self._state, moment)
        possible = sorted({least, *(count for count in self._groups if least <= count <= most)})
        models = [(count, self._model_after(count, real.dropped)) for count in possible]
        matching = [(count, model) for count, model in models if model.view(moment, rebooted=rebooted) == real]
        if not matching:
            checks.check_same(real, models[0][1].view(moment, rebooted=rebooted))
        found, self.model = matching[-1]
        self.say(f"   found {found} of {len(self._since)} steps (at least {least}, at most {most})")
        if rebooted:
            self.model.rearm(moment)
        self._produced = {offset: content for offset, content in self._produced.items() if offset < len(self.model.items)}
        self._all_kept()
        checks.check_base(self._state)
        if self.chance.happens(0.3):
            self.replay()

    def _model_after(self, count: int, dropped: set[int]) -> Model:
        """After so many steps, and what retention then dropped, as far as it might."""
        model: Model = pickle.loads(self._kept)
        for step in self._since[:count]:
            step(model)
        if dropped != model.view(self._state.moment).dropped:
            with contextlib.suppress(AssertionError, IndexError):
                model.retain(dropped)
        return model

    def _all_kept(self) -> None:
        """Whatever happens from now on, everything up to here must be found."""
        self._kept = pickle.dumps(self.model)
        self._since.clear()
        self._groups.clear()
        self._written = 0
        self._owes_sync = False
