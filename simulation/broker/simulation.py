"""The simulation of a broker: callers, operators, time, faults, crashes.

Owns: `BrokerSimulation`: the steps. Callers produce, workers lease and settle at once, late, or never; operators
redrive, resize, pause and clear; time passes, the wall clock is set back, file calls fail, disks hang, the process is
killed, the power is cut. The harness compares the broker with its model after every turn. At the end all remaining
items must be delivered: buried items are redriven, dead letters whose keys are parked are sent back to their queues,
workers lease and complete all items. Sometimes a copy of the broker is damaged and checked (damage.py).
"""

import errno
import random
from collections.abc import Callable

from penstock.api.redrive import REDRIVABLE
from penstock.operations import ListItems, PauseQueue, RedriveItems
from penstock.reports import ListedItemData
from penstock.testing.disk import Fault
from penstock.words.clock import DAY, HOUR, MILLISECOND, MINUTE, SECOND
from simulation.broker.callers import Callers, ConcurrentCallers
from simulation.broker.harness import BrokerHarness
from simulation.broker.operator import Inspector, Operator
from simulation.broker.random_input import RandomInput
from simulation.broker.sent_requests import SentLease, SentSettle
from simulation.simulation import Simulation

FAULTS: list[Fault] = [errno.EIO, errno.EIO, errno.ENOSPC, "short", "torn", "halt", "halt"]
ROUNDS = [6 * MINUTE, MINUTE, *[HOUR] * 4, *[DAY] * 8]
"""The time before each round of work; the first one ends every lease."""
HANGS = [200 * MILLISECOND, 450 * MILLISECOND, 700 * MILLISECOND, 3 * SECOND, 9 * SECOND, 15 * SECOND]
"""How long a disk hangs: shorter and longer than the time after which a partition is slow."""
SHORT_WAITS = [100 * MILLISECOND, 300 * MILLISECOND, 600 * MILLISECOND, 1500 * MILLISECOND]
STEP_WEIGHTS = {
    "produce": 20, "lease": 18, "settle": 20, "repeat": 4, "leave": 3, "turn": 22, "run_until_idle": 4, "let_time_pass": 9, "step_wall": 1,
    "redrive_some": 4, "redrive": 2, "release": 1, "pause": 1, "resume": 2, "clear": 2, "seek": 1, "cancel": 2,
    "reschedule": 3, "update": 2, "resize": 4, "change_read_only": 1, "recreate": 1, "inspect": 2, "watch": 1, "compact": 1,
    "share_failing_turn": 1, "disturb": 4, "recover_all": 1, "kill": 2, "cut_power": 2, "restart": 1, "hang_disks": 2, "wait_a_little": 2,
}  # fmt: skip
STEP_PROFILES: dict[str, dict[str, int]] = {
    "any": {},
    "resizes": {"resize": 4, "change_read_only": 2, "redrive": 2},
    "transfers": {"redrive_some": 3, "redrive": 2, "clear": 2, "recreate": 4, "update": 2},
    "faults": {"disturb": 3, "kill": 2, "cut_power": 2, "restart": 2, "repeat": 2},
    "shared turns": {"share_failing_turn": 12},
    "slow disks": {"hang_disks": 8, "wait_a_little": 5, "resize": 2},
}
"""Steps that some seeds take more often, and how many times as often."""


class BrokerSimulation(Simulation):
    """The run of one seed."""

    name = "broker"
    default_steps = 80
    damage_rate = 0.012

    def __init__(self, seed: int, steps: int | None = None, say: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, steps, say)
        self.harness = BrokerHarness(seed, self.say)
        chance = self.chance = RandomInput(self.harness.rng)
        more = STEP_PROFILES[chance.pick(list(STEP_PROFILES))]
        callers, self._operator = Callers(self.harness, chance), Operator(self.harness, chance)
        inspector = Inspector(self.harness, chance, self._operator)
        concurrent = ConcurrentCallers(self.harness, chance, callers, self._operator)
        weights = {name: weight * more.get(name, 1) for name, weight in STEP_WEIGHTS.items()}
        self.set_steps(weights, self, callers, self._operator, inspector, concurrent, self.harness)
        self._duration = chance.duration

    def begin(self) -> None:
        self._operator.begin()

    def finish(self) -> None:
        self.say("-- finish")
        _finish(self.harness, self._operator)

    def crash_and_reopen(self, power: bool) -> None:
        self.harness.crash_and_reopen(power)

    def damage_a_copy(self, rng: random.Random) -> None:
        self.harness.damage_a_copy(rng)

    # -- time and faults -------------------------------------------------------------------------------

    def turn(self) -> None:
        """Run a turn of a queue, mostly of one that has a turn due."""
        loops = self.harness.loops_due()
        self.harness.turn(self.chance.pick(loops if loops and self.chance.happens(0.9) else list(self.harness.broker.loops())))

    def let_time_pass(self) -> None:
        self.harness.advance(self._duration())

    def step_wall(self) -> None:
        self.harness.step_wall(self.chance.pick([-DAY, -HOUR, -SECOND, SECOND, HOUR, DAY]))

    def wait_a_little(self) -> None:
        self.harness.advance(self.chance.pick(SHORT_WAITS))

    def hang_disks(self) -> None:
        """Let the disks of some partitions of a queue hang for a while."""
        info = self.harness.model.queues[self.chance.pick(sorted(self.harness.model.queues))]
        duration = self.chance.pick(HANGS)
        for number in self.chance.rng.sample(info.active, self.chance.rng.randint(1, len(info.active))):
            self.harness.hang_disk(info.incarnation, number, duration)

    def disturb(self) -> None:
        if self.chance.happens(0.1):
            self.harness.fill_disk(self.chance.rng.randrange(400))
        else:
            self.harness.inject_fault(self.chance.pick(FAULTS), self.chance.rng.randint(1, 14))

    def kill(self) -> None:
        self.harness.crash_and_reopen(power=False)

    def cut_power(self) -> None:
        self.harness.crash_and_reopen(power=True)

    def restart(self) -> None:
        self.harness.restart(self.chance.pick([None, None, MINUTE, DAY]))


# -- the end ---------------------------------------------------------------------------------------


def _finish(harness: BrokerHarness, operator: Operator) -> None:
    """Deliver and complete all remaining items; fail if one is left."""
    harness.recover_all()
    for queue in list(harness.model.queues):
        operator.ask(PauseQueue(queue=queue, lease=False, produce=False))
        operator.set_options(queue, {"max_attempts": 0})
    for pause in ROUNDS:
        harness.advance(pause)
        harness.recover_all()
        _work_off(harness, operator)
        if not harness.model.unresolved_items():
            break
    left = harness.model.unresolved_items()
    assert not left, f"{left[0]} was never delivered: {harness.model.inventory.of(left[0])}"
    harness.recover_all()
    harness.model.check_end(harness.broker.loops())
    harness.replay()


def _work_off(harness: BrokerHarness, operator: Operator) -> None:
    """Release and redrive buried items, then lease and complete all items."""
    queues = harness.model.queues
    for queue, key in harness.model.order.stuck():
        if queue in queues:
            operator.release_key(queue, key)
    for queue in queues:
        operator.ask(RedriveItems(queue=queue, to=queue))
        _return_dead_letters(harness, operator, queue)
    harness.run_until_idle()
    for queue in queues:
        _drain(harness, queue)


def _return_dead_letters(harness: BrokerHarness, operator: Operator, queue: int) -> None:
    """Redrive dead letters to the queues where their keys are parked for them."""
    model = harness.model
    returning: dict[int, list[ListedItemData]] = {}
    listed = operator.ask(ListItems(queue=queue, states=REDRIVABLE, limit=1_000))
    assert isinstance(listed, list), f"listing queue {queue:x} failed: {listed!r}"
    for dead_letter in listed:
        item = model.items[dead_letter.batch.payloads[dead_letter.index]]
        for (source, _), holders in model.order.parked.items():
            if item in holders and source != queue and source in model.queues:
                returning.setdefault(source, []).append(dead_letter)
    for source, dead_letters in returning.items():
        operator.send(queue, dead_letters, source)


def _drain(harness: BrokerHarness, queue: int) -> None:
    leases = harness.model.leases
    while True:
        before = len(leases.held)
        harness.submit(SentLease(queue, 100, 0, 3, None))
        harness.run_until_idle()
        if len(leases.held) == before:
            return
        for held in leases.held[before:]:
            harness.submit(SentSettle("complete", [(held, None)], None))
        harness.run_until_idle()
