"""A whole partition in a world that goes wrong, run from one seed beside its model.

Owns: `Simulation`. One real `Partition` on a real file log lives on a simulated disk under a manual clock; it is sent random commands,
time passes, the date is set back, calls fail, the process is killed, the power is cut, files that may be deleted are.
After every step it must be what the model says (model.py) and what must always hold must hold (checks.py).
When it dies, what was acknowledged must be there afterwards; of what was not, any beginning may be: the model looks and settles on what it finds.
A failure is an AssertionError that ends in the line to repeat it: `python -m penstock.testing.simulation --seed 1234`.
"""

import argparse
import errno
import pickle
import random
from collections.abc import Callable, Iterable
from functools import partial

from penstock.logs.directory import Directory
from penstock.loop.partition import Partition
from penstock.rules import commands as c
from penstock.rules.runs import offsets
from penstock.testing import checks
from penstock.testing.chance import Chance
from penstock.testing.checks import Content
from penstock.testing.clock import ManualClock
from penstock.testing.disk import Fault, Halt, SimulatedFiles
from penstock.testing.model import Model
from penstock.words.clock import DAY, HOUR, MINUTE, SECOND
from penstock.words.errors import OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.limits import Policy

STEPS = 60
DRAIN_DAYS = 5
ROOT = "/data"
INCARNATION, PARTITION = 0x5EED, 3
DISPOSABLE = (".idx", "synced", "checkpoint", "penstock.json")
FAULTS: list[Fault] = [errno.EIO, errno.ENOSPC, "short", "torn", "halt"]
TURNS = {"work": 60, "come_due": 14, "let_time_pass": 12, "disturb": 6, "kill": 3, "cut_power": 3, "restart": 3, "step_wall": 1}


class Simulation:
    """One seed's world."""

    def __init__(self, seed: int, steps: int = STEPS, say: Callable[[str], None] = lambda line: None) -> None:
        self.seed = seed
        self.steps = steps
        self.files = SimulatedFiles(random.Random(seed))
        self.clock = ManualClock()
        self.chance = Chance(random.Random(seed))
        self._say = say
        self._segment_bytes = self.chance.segment_bytes()
        policy = self.chance.policy()
        self.model = Model(policy)
        self._produced: dict[int, Content] = {}
        self._since: list[Callable[[Model], None]] = []
        """Steps that a power cut may take back, oldest first."""
        self._written = 0
        """How many of them a process kill may not."""
        self._kept = b""
        """The model before them."""
        self._errors: list[int] = []
        """Numbers of the file calls that were made to fail."""
        self._calls = 0
        """How many had been made when this step began."""
        self._open(policy)
        self._state = self.partition.state
        self._all_kept()

    def run(self) -> None:
        """Live through all steps; raises AssertionError when something is not as it should be."""
        try:
            for number in range(self.steps):
                self._step(number)
            self._drain()
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            steps = "" if self.steps == STEPS else f" --steps {self.steps}"
            raise AssertionError(f"{what}\npython -m penstock.testing.simulation --seed {self.seed}{steps}") from error

    def _step(self, number: int) -> None:
        self._calls = self.files.calls
        kind = self.chance.rng.choices(list(TURNS), list(TURNS.values()))[0]
        self._say(f"-- {number} {kind}")
        try:
            getattr(self, "_" + kind)()
        except Halt:
            self._die(power=self.chance.happens(0.5))

    # -- a turn --------------------------------------------------------------------------------------

    def _work(self) -> None:
        granted: list[int] = []
        for _ in range(self.chance.pick([1, 1, 2, 3, 5])):
            command = self.chance.command(self.model, self.partition.now())
            answer = self._send(command)
            if isinstance(answer, c.Granted):
                granted += offsets(answer.runs)
            elif answer is None:
                return
        if self._commit():
            self._read_back(granted)

    def _send(self, command: c.Command) -> c.Answer | PenstockError | None:
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
        self._say(f"   {command} → {answer!r}")
        if isinstance(command, c.Produce) and isinstance(answer, c.Stored):
            for offset, content in zip(answer.offsets, checks.contents(command.batch), strict=False):
                self._produced.setdefault(offset, content)
        self._follow(type(command).__name__, partial(Model.judge, command=command, now=now, answer=answer))
        return answer

    def _come_due(self) -> None:
        """Some of what is due, or all of it, and now and then a commit in between."""
        for _ in range(self.chance.pick([1, 2, 100])):
            if not self._due(self.chance.pick([1, 2, 5, 100])) or (self.chance.happens(0.2) and not self._commit()):
                break
        self._commit()

    def _due(self, limit: int) -> int:
        """Once; says how many records it took."""
        now = self.partition.now()
        try:
            done = self.partition.due(limit)
        except (StorageFailed, OutcomeUnknown) as failure:
            self._failed(failure)
            return 0
        state = self.partition.state
        seen, overdue = checks.look(state, now).states, offsets(state.overdue.runs)
        self._say(f"   due: {done} records")
        self._follow("due", partial(Model.due, now=now, seen=seen, overdue=overdue, finished=not done))
        return done

    def _follow(self, kind: str, step: Callable[[Model], None]) -> None:
        """The model takes a step, and what it shows must be what the partition shows."""
        before = [item.state for item in self.model.items]
        step(self.model)
        self._since.append(step)
        now, state = self.partition.now(), self.partition.state
        real = checks.look(state, now)
        checks.check_transitions(kind, before, real.states)
        checks.check_same(real, self.model.view(now))
        checks.check_counts(state, real.states)

    def _commit(self) -> bool:
        """Write the turn; say whether its answers may leave."""
        try:
            self.partition.commit()
        except (StorageFailed, OutcomeUnknown) as failure:
            self._failed(failure)
            return False
        self._written = len(self._since)
        if self.partition.state is not self._state:  # a rotation failed after the turn was stored
            self._settle(self._written, self._written)
        if not self.partition.log.unsynced:
            self._all_kept()
        self._inspect()
        return True

    def _inspect(self) -> None:
        """What is too dear to be looked at after every step."""
        if not self.chance.happens(0.3):
            return
        try:
            if self.model.items:
                offset = self.chance.rng.randrange(len(self.model.items))
                checks.check_explained(self.partition, offset, [item.state for item in self.model.items], self.partition.now())
            checks.check_base(self.partition.state)
        except StorageFailed as failure:
            self._failed(failure)

    def _read_back(self, wanted: list[int]) -> None:
        runs = [edge for offset in wanted for edge in (offset, offset + 1)]
        try:
            found = self.partition.items(runs)
        except StorageFailed as failure:
            self._failed(failure)
        else:
            checks.check_read_back(found, self._produced, wanted)

    # -- the world -----------------------------------------------------------------------------------

    def _let_time_pass(self) -> None:
        duration = self.chance.pause_between_turns()
        before = self.partition.now()
        self.clock.advance(duration)
        self._say(f"   {duration / SECOND} s pass")
        assert self.partition.now().elapsed - before.elapsed == duration, "time passed differently for the partition"

    def _step_wall(self) -> None:
        before = self.partition.now()
        self.clock.step_wall(self.chance.pick([-DAY, -HOUR, -SECOND, SECOND, HOUR, DAY]))
        assert self.partition.now().elapsed == before.elapsed, "the date was set and time passed"

    def _disturb(self) -> None:
        """One of the next file calls goes wrong."""
        fault, ahead = self.chance.pick(FAULTS), self.chance.rng.randint(1, 12)
        call = self.files.calls + ahead
        self._say(f"   call {call} will meet {fault}")
        self.files.fail(call, fault)
        if fault != "halt":
            self._errors.append(call)

    def _kill(self) -> None:
        """The process ends, perhaps in the middle of a turn."""
        if self.chance.happens(0.5):
            self._send(self.chance.command(self.model, self.partition.now()))
        self._die(power=False)

    def _cut_power(self) -> None:
        if self.chance.happens(0.5):
            self._send(self.chance.command(self.model, self.partition.now()))
        self._die(power=True)

    def _restart(self) -> None:
        """Close and open again, perhaps on another day and without the files that may be missing."""
        try:
            self.partition.close()
            self._directory.close()
        except (StorageFailed, OutcomeUnknown):
            self._die(power=False)
            return
        self.files.mend()
        rebooted = self.chance.happens(0.3)
        if rebooted:
            self.clock.reboot(self.chance.pick([MINUTE, DAY]))
        self._delete(path for path in self.files.contents() if path.endswith(DISPOSABLE) and self.chance.happens(0.4))
        self._open()
        self._settle(len(self._since), len(self._since), rebooted=rebooted)

    def _delete(self, paths: Iterable[str]) -> None:
        for path in list(paths):
            self._say(f"   {path} is deleted")
            self.files.remove(path)

    # -- dying and living on -------------------------------------------------------------------------

    def _failed(self, failure: PenstockError) -> None:
        """Storage refused something: nothing of the turn is stored, or (OutcomeUnknown) nobody knows."""
        self._say(f"   {failure!r}")
        if isinstance(failure, StorageFailed):
            if self.partition.state is not self._state:
                self._settle(0, self._written)
            elif "failing" in repr(self.partition) or self.chance.happens(0.5):
                self._reopen(self._written)
            return  # else a read failed, and nothing was lost by it
        if self.chance.happens(0.5):
            self._reopen(len(self._since))
        else:
            self.files.mend()
            self._die(power=False, sure=0)

    def _reopen(self, most: int) -> None:
        self.files.mend()
        self.partition.reopen()
        self._settle(0, most)

    def _die(self, power: bool, sure: int | None = None) -> None:
        """The process ends here; then another one finds what there is. `sure` steps at least must be found."""
        if sure is None:  # going back after an error, it may have dropped what was not synced
            sure = 0 if any(self._calls < call <= self.files.calls for call in self._errors) else self._written
        rebooted = False
        while True:
            if power:
                self.files.crash()
                self.clock.reboot(self.chance.pick([0, MINUTE, HOUR]))
                sure, rebooted = 0, True
            else:
                self.files.kill()
            self._say(f"   {'power cut' if power else 'killed'}: {self.files!r}")
            try:
                self._open()
                break
            except Halt:
                power = self.chance.happens(0.5)
            except (StorageFailed, OutcomeUnknown):
                self.files.mend()
                power = False
        self._settle(sure, len(self._since), rebooted=rebooted)

    def _open(self, policy: Policy | None = None) -> None:
        self._directory = Directory.open(ROOT, files=self.files, clock=self.clock, entropy=bytes)
        log = self._directory.log(INCARNATION, PARTITION)
        self.partition = Partition(log, self.clock, policy, segment_bytes=self._segment_bytes)
        assert not self.partition.gaps, f"nothing was damaged, and yet: {self.partition.gaps}"

    def _settle(self, least: int, most: int, *, rebooted: bool = False) -> None:
        """Find out which of the steps since the last sync are there: at least `least`, at most `most` of them, the oldest first."""
        self._state = self.partition.state
        moment = self._state.moment
        real = checks.look(self.partition.state, moment)
        matching = [count for count in range(least, most + 1) if self._model_after(count).view(moment, rebooted=rebooted) == real]
        if not matching:
            checks.check_same(real, self._model_after(least).view(moment, rebooted=rebooted))
        self._say(f"   found {matching[-1]} of {len(self._since)} steps (at least {least}, at most {most})")
        self.model = self._model_after(matching[-1])
        if rebooted:
            self.model.rearm(moment)
        self._produced = {offset: content for offset, content in self._produced.items() if offset < len(self.model.items)}
        self._all_kept()
        checks.check_base(self.partition.state)
        if self.chance.happens(0.3):
            self._replay()

    def _model_after(self, count: int) -> Model:
        model: Model = pickle.loads(self._kept)
        for step in self._since[:count]:
            step(model)
        return model

    def _all_kept(self) -> None:
        """Whatever happens from now on, everything up to here must be found."""
        self._kept = pickle.dumps(self.model)
        self._since.clear()
        self._written = 0

    def _replay(self) -> None:
        try:
            checks.check_replay(self.partition)
        except StorageFailed as failure:
            self._failed(failure)

    # -- the end -------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Let everything that is left be worked on: it must all come, and come as it was produced."""
        self.files.mend()
        self._say("-- drain")
        self._send(c.Pause(False, False))
        for _ in range(DRAIN_DAYS):
            while self._due(100):
                pass
            self._send(c.Clear(buried=True))
            self._work_off()
            self.clock.advance(1 * DAY)
        left = [item for item in self.model.items if not item.state.resolved]
        assert not left, f"{left[0]} never came"
        self._replay()
        self._restart()

    def _work_off(self) -> None:
        """Lease and complete whatever there is."""
        while isinstance(granted := self._send(c.Lease(100, per_key=3)), c.Granted) and granted.lease:
            self._commit()
            self._read_back(offsets(granted.runs))
            self._send(c.Complete(granted.lease))
            self._commit()
        self._commit()


def main() -> None:
    """Run one seed and tell every step of it."""
    parser = argparse.ArgumentParser(description="Run one simulated partition and print each step.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    Simulation(given.seed, given.steps, say=print).run()


if __name__ == "__main__":
    main()
