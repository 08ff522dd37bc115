"""Callers of a simulated broker whose requests share one turn, in which something goes wrong.

Owns: `Crowd`. Produces, leases, settles and an operator's word wait in one inbox; then one file call of the turn that serves them fails,
or the process ends there, or whoever runs the turn is interrupted. Afterwards those who were not served ask again, holders use their
leases, and the queue goes back to the width it had, with new items of every key before and after: whatever a partition has taken from
another one that was undone shows here. The model judges all of it (broker_model.py); nothing here expects a certain answer, nor that one
turn is enough for it.
"""

import errno
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from penstock.loop.loop import Loop
from penstock.testing.disk import Fault, Halt
from penstock.words.clock import MINUTE, SECOND
from simulation.broker.callers import VERBS, Callers
from simulation.broker.chance import DEDUPS, Chance
from simulation.broker.operator import Operator
from simulation.broker.sent import Sent, SentLease, SentProduce, SentSettle
from simulation.broker.world import World

FAULTS: list[Fault] = [errno.EIO, errno.EIO, errno.ENOSPC, "short", "torn", "halt", "halt", "halt", "interrupt", "interrupt"]
WIDTHS = [1, 1, 2, 3, 4, 8]
CATALOG = "/0000000000000000/"
"""In the paths of the catalog's files."""
MOST_TURNS = 20


class Leader(NamedTuple):
    """Who runs the turn."""

    run: Callable[[], None]
    undo: Callable[[], None]
    """Gives the queue the partitions that it had."""
    reshapes: bool = False
    """Whether it gives the queue other partitions."""


class Crowd:
    """Several who come at the same time."""

    def __init__(self, world: World, chance: Chance, callers: Callers, operator: Operator) -> None:
        self._world = world
        self._chance = chance
        self._callers = callers
        self._operator = operator

    def crowd(self) -> None:
        """One turn for several requests, in which something goes wrong, and what its callers do then."""
        world, chance = self._world, self._chance
        queue = chance.pick(sorted(world.model.queues))
        if chance.happens(0.6):  # leases that are answered, and not synced when the turn begins
            self._ask(SentLease(queue, chance.pick([1, 2, 3]), chance.pick([0, 5 * MINUTE]), 1, None))
        leader = self._leader(queue)
        sent: list[Sent] = []
        for _ in range(chance.rng.randint(1, 4)):
            sent.append(self._request(queue))
            world.submit(sent[-1])
            self._callers.note(sent[-1])
        self._disturb(leader.reshapes)
        try:
            leader.run()
        except Halt:
            world.die(power=chance.happens(0.5))
        world.forget_interrupts()
        self._operator.look_up(queue)
        if chance.happens(0.8):
            world.disk.heal()
            self._go_on(queue, sent, leader.undo)

    # -- one turn ------------------------------------------------------------------------------------

    def _request(self, queue: int) -> Sent:
        """Something that may wait in an inbox."""
        chance = self._chance
        kind = chance.pick(["produce", "produce", "named", "named", "named", "lease", "settle"])
        held = self._callers.some_lease(queue) if kind == "settle" else None
        if held is not None:
            return self._callers.new_settle(held)
        if kind == "lease":
            return self._callers.new_lease(queue)
        if kind == "produce":
            return self._callers.new_produce(queue)
        names = [(chance.key(), chance.pick(DEDUPS)) for _ in range(chance.rng.randint(1, 3))]
        return self._produce(queue, names, chance.request_id())

    def _produce(self, queue: int, names: Sequence[tuple[bytes | None, bytes | None]], request_id: bytes | None = None) -> SentProduce:
        batch, tags = self._chance.keyed(queue, names)
        for tag in tags:
            self._world.model.tags[tag.payload] = tag
        return SentProduce(queue, batch, tags, request_id, 10 * SECOND)

    def _leader(self, queue: int) -> Leader:
        """Who runs the turn: an operator with a word of its own, one of the callers, or nobody of them."""
        chance, operator, info = self._chance, self._operator, self._world.model.queues[queue]
        width = len(info.active)
        undo = partial(operator.resize_to, queue, width)
        kind = chance.pick(["resize", "resize", "resize", "drain", "send", "call", "turn"])
        if kind == "resize":
            other = chance.pick([one for one in WIDTHS if one != width])
            return Leader(partial(operator.resize_to, queue, other), undo, reshapes=True)
        if kind == "drain":
            number = chance.pick(info.active)
            return Leader(
                partial(operator.set_read_only, queue, number, True), partial(operator.set_read_only, queue, number, False), reshapes=True
            )
        if kind == "send":
            return Leader(operator.sending(queue), undo)
        if kind == "call":
            sent = SentLease(queue, 2, 0, 1, None) if chance.happens(0.4) else self._callers.new_produce(queue)
            if not sent.wait:
                return Leader(partial(self._world.call, sent), undo)
        return Leader(partial(self._turn, queue), undo)

    def _disturb(self, reshapes: bool) -> None:
        """One of the next file calls goes wrong. Most turns make a few; a resize makes many, some of them after its record is synced."""
        world, chance = self._world, self._chance
        if chance.happens(0.1):
            world.interrupt_at_clock(chance.rng.randint(1, 20))
        elif reshapes and chance.happens(0.7):
            world.arm_after_sync(CATALOG, chance.pick(FAULTS), chance.rng.randint(1, 4))
        else:
            world.arm(chance.pick(FAULTS), chance.rng.randint(1, chance.pick([3, 6, 12, 30])))

    def _turn(self, queue: int) -> None:
        loop = self._loop(queue)
        if loop is not None:
            self._world.turn(loop)

    def _loop(self, queue: int) -> Loop | None:
        return next((loop for loop in self._world.broker.loops() if loop.turns.incarnation == queue), None)

    # -- afterwards ----------------------------------------------------------------------------------

    def _go_on(self, queue: int, sent: list[Sent], undo: Callable[[], None]) -> None:
        """Callers ask again, holders use their leases, and the queue gets its former partitions back."""
        self._settle_down(queue)
        actions = [
            partial(self._use_leases, queue),
            partial(self._go_back, queue, undo),
            *(partial(self._repeat, one) for one in sent if isinstance(one, SentProduce)),
        ]
        self._chance.rng.shuffle(actions)
        for action in actions:
            if queue in self._world.model.queues:
                action()

    def _settle_down(self, queue: int) -> None:
        """A partition that failed is tried again; what is under way within the queue arrives."""
        if not self._world.model.census.whole:
            self._world.advance(1 * SECOND)
        for _ in range(MOST_TURNS):
            loop = self._loop(queue)
            if loop is None or loop not in self._world.wanting():
                return
            self._world.turn(loop)

    def _use_leases(self, queue: int) -> None:
        """Whoever holds something extends it, or settles it; others ask for items meanwhile."""
        model = self._world.model
        self._ask(SentLease(queue, 3, 0, 1, None))
        for held in [held for held in model.leases.held if held.incarnation == queue and held.open and held.valid(model.now)][-3:]:
            if not held.busy:
                self._ask(SentSettle(self._chance.pick(VERBS), [(held, None)], None))

    def _repeat(self, sent: SentProduce) -> None:
        """A producer asks again, as the error tells it to: the same request, or new items with the same dedup ids."""
        if self._callers.may_repeat(sent):
            self._ask(sent)
        elif any(tag.dedup is not None for tag in sent.tags):
            self._ask(self._produce(sent.incarnation, [(tag.key, tag.dedup) for tag in sent.tags if tag.dedup is not None]))

    def _go_back(self, queue: int, undo: Callable[[], None]) -> None:
        """New items of some keys, then the partitions of before, then again new items of these keys."""
        names = self._chance.some_keys()
        self._ask(self._produce(queue, names))
        undo()
        self._ask(self._produce(queue, names))
        for _ in range(2):
            self._ask(SentLease(queue, 10, 5 * MINUTE, 1, None))

    def _ask(self, sent: Sent) -> None:
        """Ask, and let a turn answer."""
        if sent.incarnation in self._world.model.queues:
            self._world.submit(sent)
            self._callers.note(sent)
            self._turn(sent.incarnation)
