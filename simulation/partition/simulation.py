"""A whole partition in a world that goes wrong, run from one seed.

Owns: `Simulation`: what happens next. Random commands are sent, time passes, the date is set back, file calls fail, the process is killed,
the power is cut, files that may be deleted are. World (world.py) sees to it that after every step the partition is what its model says.
At the end everything that is left must come out. Now and then a copy of the partition is damaged and looked at (damage.py).
A failure is an AssertionError that ends in the line to repeat it: `python -m simulation.partition.simulation --seed 1234`.
"""

import argparse
import errno
import random
from collections.abc import Callable

from penstock.rules import commands as c
from penstock.rules.runs import offsets
from penstock.testing.disk import Fault, Halt
from penstock.words.clock import DAY, HOUR, MINUTE, SECOND
from simulation.partition.world import World

STEPS = 60
DAMAGED = 0.02
"""How often, per step, a copy is damaged."""
DRAIN_DAYS = 5
FAULTS: list[Fault] = [errno.EIO, errno.ENOSPC, "short", "torn", "halt", "interrupt"]
STEP_WEIGHTS = {
    "work": 60, "come_due": 14, "let_time_pass": 12, "step_wall": 1, "compact": 1,
    "disturb": 6, "kill": 3, "cut_power": 3, "restart": 3,
}  # fmt: skip


def _silence(line: str) -> None:
    """Nobody listens."""


class Simulation:
    """One seed's story."""

    def __init__(self, seed: int, steps: int = STEPS, say: Callable[[str], None] = _silence) -> None:
        self.seed = seed
        self.steps = steps
        self._say = say
        self.world = World(seed, say)
        self._chance = self.world.chance
        self._harm = random.Random(f"damage {seed}")

    def run(self) -> None:
        """Live through all steps; raises AssertionError when something is not as it should be."""
        try:
            for number in range(self.steps):
                self._step(number)
                if self._harm.random() < DAMAGED:
                    self._say("   damage to a copy")
                    self.world.damage_a_copy(self._harm)
            self._drain()
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            steps = "" if self.steps == STEPS else f" --steps {self.steps}"
            raise AssertionError(f"{what}\npython -m simulation.partition.simulation --seed {self.seed}{steps}") from error

    def _step(self, number: int) -> None:
        kind = self._chance.rng.choices(list(STEP_WEIGHTS), list(STEP_WEIGHTS.values()))[0]
        self._say(f"-- {number} {kind}")
        self.world.begin_step()
        try:
            getattr(self, "_" + kind)()
        except Halt:
            self.world.die(power=self._chance.happens(0.5))

    # -- steps ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        """A turn of a few commands."""
        granted: list[int] = []
        for _ in range(self._chance.pick([1, 1, 2, 3, 5])):
            answer = self._send_something()
            if isinstance(answer, c.Granted):
                granted += offsets(answer.runs)
            elif answer is None:
                return
        if self.world.commit():
            self.world.read_back(granted)
            if self._chance.happens(0.3):
                self.world.inspect()

    def _send_something(self) -> object:
        return self.world.send(self._chance.command(self.world.model, self.world.partition.now()))

    def _come_due(self) -> None:
        """Some of what is due, or all of it, and now and then a commit in between."""
        for _ in range(self._chance.pick([1, 2, 100])):
            if not self.world.due(self._chance.pick([1, 2, 5, 100])) or (self._chance.happens(0.2) and not self.world.commit()):
                break
        if self.world.commit():
            self.world.upkeep()

    def _let_time_pass(self) -> None:
        duration = self._chance.pause_between_turns()
        before = self.world.partition.now()
        self.world.clock.advance(duration)
        self._say(f"   {duration / SECOND} s pass")
        assert self.world.partition.now().elapsed - before.elapsed == duration, "time passed differently for the partition"

    def _step_wall(self) -> None:
        before = self.world.partition.now()
        self.world.clock.step_wall(self._chance.pick([-DAY, -HOUR, -SECOND, SECOND, HOUR, DAY]))
        assert self.world.partition.now().elapsed == before.elapsed, "the date was set and time passed"

    def _disturb(self) -> None:
        self.world.arm(self._chance.pick(FAULTS), self._chance.rng.randint(1, 12))

    def _compact(self) -> None:
        self.world.compact()

    def _kill(self) -> None:
        self._end_in_a_turn(power=False)

    def _cut_power(self) -> None:
        self._end_in_a_turn(power=True)

    def _end_in_a_turn(self, power: bool) -> None:
        """Before a turn, in the middle of one, or while it is being written."""
        for _ in range(self._chance.pick([0, 1, 4])):
            self._send_something()
        if self._chance.happens(0.4):
            self.world.arm("halt", 1)
            self.world.commit()
        self.world.die(power)

    def _restart(self) -> None:
        self.world.restart(self._chance.pick([None, None, MINUTE, DAY]), delete=self._chance.pick([0.0, 0.4, 1.0]))

    # -- the end -------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Let everything that is left be worked on: it must all come, and come as it was produced."""
        world = self.world
        world.files.mend()
        self._say("-- drain")
        world.send(c.Pause(False, False))
        for _ in range(DRAIN_DAYS):
            while world.due(100):
                pass
            world.send(c.Clear(buried=True))
            self._work_off()
            world.clock.advance(1 * DAY)
        left = [item for item in world.model.items if not item.state.resolved]
        assert not left, f"{left[0]} never came"
        for name in [*world.model.cursors]:
            world.send(c.ReleaseCursor(name))
        world.commit()
        for _ in range(DRAIN_DAYS):
            world.upkeep()
            world.clock.advance(1 * DAY)
        world.check_retention()
        world.replay()
        world.restart(None, delete=0.5)

    def _work_off(self) -> None:
        """Lease and complete whatever there is."""
        while isinstance(granted := self.world.send(c.Lease(100, per_key=3)), c.Granted) and granted.lease:
            self.world.commit()
            self.world.read_back(offsets(granted.runs))
            self.world.send(c.Complete(granted.lease))
            self.world.commit()
        self.world.commit()


def main() -> None:
    """Run one seed and tell every step of it."""
    parser = argparse.ArgumentParser(description="Run one simulated partition and print each step.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    Simulation(given.seed, given.steps, say=print).run()


if __name__ == "__main__":
    main()
