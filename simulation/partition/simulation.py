"""The simulation of one partition: random commands, time, faults, crashes.

Owns: `PartitionSimulation`: the steps. Commands are sent, time passes, the wall clock is set back, file calls fail, the
process is killed, the power is cut, rebuildable files are deleted. The harness compares the partition with its model
after every step.
At the end all remaining items must be delivered. Sometimes a copy of the partition is damaged and checked (damage.py).
"""

import errno
import random
from collections.abc import Callable

from penstock.rules import commands as c
from penstock.rules.runs import offsets
from penstock.testing.disk import Fault
from penstock.words.clock import DAY, HOUR, MINUTE, SECOND
from simulation.partition.harness import PartitionHarness
from simulation.simulation import Simulation

DRAIN_DAYS = 5
FAULTS: list[Fault] = [errno.EIO, errno.ENOSPC, "short", "torn", "halt", "interrupt"]
STEP_WEIGHTS = {
    "work": 60, "come_due": 14, "let_time_pass": 12, "step_wall": 1, "compact": 1,
    "disturb": 6, "kill": 3, "cut_power": 3, "restart": 3,
}  # fmt: skip


class PartitionSimulation(Simulation):
    """The run of one seed."""

    name = "partition"
    default_steps = 60
    damage_rate = 0.02

    def __init__(self, seed: int, steps: int | None = None, say: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, steps, say)
        self.harness = PartitionHarness(seed, self.say)
        self.chance = self.harness.chance
        self.set_steps(STEP_WEIGHTS, self, self.harness)

    def begin(self) -> None:
        """Nothing: the harness has opened the partition."""

    def step(self, action: Callable[[], None]) -> None:
        self.harness.begin_step()
        super().step(action)

    def crash_and_reopen(self, power: bool) -> None:
        self.harness.crash_and_reopen(power)

    def damage_a_copy(self, rng: random.Random) -> None:
        self.harness.damage_a_copy(rng)

    # -- steps -----------------------------------------------------------------------------------------

    def work(self) -> None:
        """Run a turn of a few commands."""
        granted: list[int] = []
        for _ in range(self.chance.pick([1, 1, 2, 3, 5])):
            answer = self._send_something()
            if isinstance(answer, c.LeaseAnswer):
                granted += offsets(answer.runs)
            elif answer is None:
                return
        if self.harness.commit():
            self.harness.read_back(granted)
            if self.chance.happens(0.3):
                self.harness.inspect()

    def _send_something(self) -> object:
        return self.harness.send(self.harness.chance.command(self.harness.model, self.harness.partition.now()))

    def come_due(self) -> None:
        """Process some or all due items, sometimes with a commit in between."""
        for _ in range(self.chance.pick([1, 2, 100])):
            if not self.harness.due(self.chance.pick([1, 2, 5, 100])) or (self.chance.happens(0.2) and not self.harness.commit()):
                break
        if self.harness.commit():
            self.harness.upkeep()

    def let_time_pass(self) -> None:
        duration = self.harness.chance.pause_between_turns()
        before = self.harness.partition.now()
        self.harness.clock.advance(duration)
        self.say("   %s s pass", duration / SECOND)
        assert self.harness.partition.now().elapsed - before.elapsed == duration, "the partition's time advanced by another duration"

    def step_wall(self) -> None:
        before = self.harness.partition.now()
        self.harness.clock.step_wall(self.chance.pick([-DAY, -HOUR, -SECOND, SECOND, HOUR, DAY]))
        assert self.harness.partition.now().elapsed == before.elapsed, "the wall clock was set, and the partition's elapsed time changed"

    def disturb(self) -> None:
        self.harness.inject_fault(self.chance.pick(FAULTS), self.chance.rng.randint(1, 12))

    def kill(self) -> None:
        self._end_in_a_turn(power=False)

    def cut_power(self) -> None:
        self._end_in_a_turn(power=True)

    def _end_in_a_turn(self, power: bool) -> None:
        """End the process before a turn, within one, or while it is being written."""
        for _ in range(self.chance.pick([0, 1, 4])):
            self._send_something()
        if self.chance.happens(0.4):
            self.harness.inject_fault("halt", 1)
            self.harness.commit()
        self.harness.crash_and_reopen(power)

    def restart(self) -> None:
        self.harness.restart(self.chance.pick([None, None, MINUTE, DAY]), delete=self.chance.pick([0.0, 0.4, 1.0]))

    # -- the end ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Consume all remaining items: each must be delivered, as it was produced."""
        harness = self.harness
        harness.disk.clear_faults()
        self.say("-- drain")
        harness.send(c.Pause(False, False))
        for _ in range(DRAIN_DAYS):
            while harness.due(100):
                pass
            harness.send(c.Clear(buried=True))
            self._work_off()
            harness.clock.advance(1 * DAY)
        left = [item for item in harness.model.items if not item.state.resolved]
        assert not left, f"{left[0]} was never delivered"
        for name in [*harness.model.cursors]:
            harness.send(c.ForgetCursor(name))
        harness.commit()
        for _ in range(DRAIN_DAYS):
            harness.upkeep()
            harness.clock.advance(1 * DAY)
        harness.check_retention()
        harness.replay()
        harness.restart(None, delete=0.5)

    def _work_off(self) -> None:
        """Lease and complete all ready items."""
        while isinstance(granted := self.harness.send(c.AcquireLease(100, per_key=3)), c.LeaseAnswer) and granted.lease:
            self.harness.commit()
            self.harness.read_back(offsets(granted.runs))
            self.harness.send(c.CompleteLeased(granted.lease))
            self.harness.commit()
        self.harness.commit()
