"""Whole brokers in a world that goes wrong, run from one seed.

Owns: `Simulation`: what happens next. Callers produce, workers lease and settle at once, late, or never; operators redrive, resize, pause
and clear; time passes, the date is set back, files fail, the process is killed, the power is cut. World (broker_world.py) sees to it
that after every turn the broker is what its model says. At the end everything that is left must come out. Now and then a copy of the
broker is damaged and used (broker_damage.py).
A failure is an AssertionError that ends in the line to repeat it: `python -m simulation.broker.simulation --seed 1234`.
"""

import argparse
import random
from collections.abc import Callable

from penstock.testing.disk import Halt
from penstock.words.clock import DAY, HOUR, MILLISECOND, MINUTE, SECOND
from simulation.broker.callers import Callers
from simulation.broker.chance import Chance
from simulation.broker.crowd import Crowd
from simulation.broker.finish import finish
from simulation.broker.inspector import Inspector
from simulation.broker.operator import Operator
from simulation.broker.world import FAULTS, World

STEPS = 80
DAMAGED = 0.012
"""How often, per step, a copy is damaged."""
HANGS = [200 * MILLISECOND, 450 * MILLISECOND, 700 * MILLISECOND, 3 * SECOND, 9 * SECOND, 15 * SECOND]
"""How long a disk does not answer: less and more than a partition may be out before it counts as slow."""
SHORT_WAITS = [100 * MILLISECOND, 300 * MILLISECOND, 600 * MILLISECOND, 1500 * MILLISECOND]
STEP_WEIGHTS = {
    "produce": 20, "lease": 18, "settle": 20, "repeat": 4, "leave": 3, "turn": 22, "rest": 4, "let_time_pass": 9, "step_wall": 1,
    "redrive_some": 4, "redrive": 2, "release": 1, "pause": 1, "resume": 2, "clear": 2, "seek": 1, "update": 2, "resize": 4, "drain": 1,
    "recreate": 1, "look": 2, "watch": 1, "compact": 1, "crowd": 1,
    "disturb": 4, "calm": 1, "kill": 2, "cut_power": 2, "restart": 1, "hold_up": 2, "wait_a_little": 2,
}  # fmt: skip
MOODS: dict[str, dict[str, int]] = {
    "any": {},
    "resizes": {"resize": 4, "drain": 2, "redrive": 2},
    "transfers": {"redrive_some": 3, "redrive": 2, "clear": 2, "recreate": 4, "update": 2},
    "trouble": {"disturb": 3, "kill": 2, "cut_power": 2, "restart": 2, "repeat": 2},
    "crowds": {"crowd": 12},
    "slow disks": {"hold_up": 8, "wait_a_little": 5, "resize": 2},
}
"""What there is more of in some seeds, and how many times more."""


def _silence(line: str) -> None:
    """Nobody listens."""


class Simulation:
    """One seed's story."""

    def __init__(self, seed: int, steps: int = STEPS, say: Callable[[str], None] = _silence) -> None:
        self.seed = seed
        self.steps = steps
        self._say = say
        self.world = World(seed, say)
        self._chance = Chance(self.world.rng)
        more = MOODS[self._chance.pick(list(MOODS))]
        self._weights = {name: weight * more.get(name, 1) for name, weight in STEP_WEIGHTS.items()}
        self._callers = Callers(self.world, self._chance)
        self._operator = Operator(self.world, self._chance)
        self._inspector = Inspector(self.world, self._chance, self._operator)
        self._crowd = Crowd(self.world, self._chance, self._callers, self._operator)
        self._harm = random.Random(f"damage {seed}")

    def run(self) -> None:
        """Live through all steps; raises AssertionError when something is not as it should be."""
        try:
            self._operator.begin()
            for number in range(self.steps):
                self._step(number)
                if self._harm.random() < DAMAGED:
                    self._say("   damage to a copy")
                    self.world.damage_a_copy(self._harm)
            self._say("-- finish")
            finish(self.world, self._operator)
        except Exception as error:
            what = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            steps = "" if self.steps == STEPS else f" --steps {self.steps}"
            raise AssertionError(f"{what}\npython -m simulation.broker.simulation --seed {self.seed}{steps}") from error

    def _step(self, number: int) -> None:
        kind = self._chance.rng.choices(list(self._weights), list(self._weights.values()))[0]
        self._say(f"-- {number} {kind}")
        try:
            for owner in (self, self._callers, self._operator, self._inspector, self._crowd):
                action = getattr(owner, kind, None)
                if action is not None:
                    action()
                    return
            raise NotImplementedError(kind)
        except Halt:
            self.world.die(power=self._chance.happens(0.5))

    # -- time and trouble ----------------------------------------------------------------------------

    def turn(self) -> None:
        """A queue runs a turn: mostly one that wants to."""
        loops = self.world.wanting()
        self.world.turn(self._chance.pick(loops if loops and self._chance.happens(0.9) else list(self.world.broker.loops())))

    def rest(self) -> None:
        self.world.rest()

    def let_time_pass(self) -> None:
        self.world.advance(self._chance.duration())

    def step_wall(self) -> None:
        self.world.step_wall(self._chance.pick([-DAY, -HOUR, -SECOND, SECOND, HOUR, DAY]))

    def wait_a_little(self) -> None:
        self.world.advance(self._chance.pick(SHORT_WAITS))

    def hold_up(self) -> None:
        """The disks of some partitions of a queue do not answer for a while."""
        info = self.world.model.queues[self._chance.pick(sorted(self.world.model.queues))]
        duration = self._chance.pick(HANGS)
        for number in self._chance.rng.sample(info.active, self._chance.rng.randint(1, len(info.active))):
            self.world.hold_up(info.incarnation, number, duration)

    def disturb(self) -> None:
        if self._chance.happens(0.1):
            self.world.fill_disk(self._chance.rng.randrange(400))
        else:
            self.world.arm(self._chance.pick(FAULTS), self._chance.rng.randint(1, 14))

    def calm(self) -> None:
        self.world.calm()

    def kill(self) -> None:
        self.world.die(power=False)

    def cut_power(self) -> None:
        self.world.die(power=True)

    def restart(self) -> None:
        self.world.restart(self._chance.pick([None, None, MINUTE, DAY]))


def main() -> None:
    """Run one seed and tell every step of it."""
    parser = argparse.ArgumentParser(description="Run one simulated broker and print each step.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    Simulation(given.seed, given.steps, say=print).run()


if __name__ == "__main__":
    main()
