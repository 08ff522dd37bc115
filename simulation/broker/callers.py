"""Producers and workers of a simulated broker.

Owns: `Callers`: what they ask, and what they do when an answer does not come. A worker acts at once, stalls, dies, or comes back late
with a lease that is no longer its own. `Crowd`: several of them in one turn, in which something goes wrong.
"""

import errno
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from penstock.loop.loop import Loop
from penstock.loop.requests import SettleAction
from penstock.testing.disk import Fault, Halt
from penstock.words.clock import MINUTE, SECOND
from simulation.broker.harness import BrokerHarness
from simulation.broker.items import TrackedLease
from simulation.broker.operator import Operator
from simulation.broker.random_input import DEDUPS, RandomInput
from simulation.broker.sent_requests import SentLease, SentProduce, SentRequest, SentSettle, SentWatch

VERBS: list[SettleAction] = ["complete", "complete", "complete", "retry", "retry", "bury", "extend"]

CROWD_FAULTS: list[Fault] = [errno.EIO, errno.EIO, errno.ENOSPC, "short", "torn", "halt", "halt", "halt", "interrupt", "interrupt"]
WIDTHS = [1, 1, 2, 3, 4, 8]
CATALOG = "/0000000000000000/"
"""In the paths of the catalog's files."""
CROWD_TURNS = 20


class Callers:
    """Producers and workers."""

    def __init__(self, harness: BrokerHarness, chance: RandomInput) -> None:
        self._harness = harness
        self._chance = chance
        self.sent: list[SentRequest] = []
        """Requests with an id, which may be asked again."""

    def _queue(self) -> int:
        return self._chance.pick(sorted(self._harness.model.queues))

    def note(self, sent: SentRequest) -> None:
        """It may be asked again, if it has an id."""
        if sent.request_id is not None and sent not in self.sent:
            self.sent.append(sent)

    def _ask(self, sent: SentRequest, at_once: float = 0.6) -> None:
        """Ask, and mostly let a turn answer at once."""
        self._harness.submit(sent)
        self.note(sent)
        if self._chance.happens(at_once):
            for loop in self._harness.broker.loops():
                if loop.engine.incarnation == sent.incarnation:
                    self._harness.turn(loop)

    def produce(self) -> None:
        self._ask(self.new_produce(self._queue()))

    def new_produce(self, incarnation: int) -> SentProduce:
        chance, model = self._chance, self._harness.model
        batch, tags = chance.batch(incarnation, chance.pick([1, 1, 2, 3, 6]), self._harness.clock.read().wall)
        for tag in tags:
            model.tags[tag.payload] = tag
        limited = model.queues[incarnation].options.max_items
        return SentProduce(incarnation, batch, tags, chance.request_id(), 10 * SECOND if limited else chance.pick([0, 0, 10 * SECOND]))

    def lease(self) -> None:
        self._ask(self.new_lease(self._queue()))

    def new_lease(self, incarnation: int) -> SentLease:
        chance = self._chance
        timeout = chance.pick([0, 0, 0, 2 * SECOND, 5 * MINUTE])
        want, per_key = chance.pick([1, 1, 2, 3, 10]), chance.pick([1, 1, 2, 3])
        wait = chance.pick([0, 0, 5 * SECOND, 60 * SECOND])
        return SentLease(incarnation, want, timeout, per_key, chance.request_id(), wait)

    def watch(self) -> None:
        """Somebody follows a queue."""
        queue = self._queue()
        partitions = {number: len(seen.lives) for (owner, number), seen in self._harness.model.census.partitions.items() if owner == queue}
        self._ask(SentWatch(queue, partitions, 20 * SECOND))

    def settle(self) -> None:
        """A worker is done with something; mostly it is still in time."""
        if self._chance.happens(0.1):
            self._settle_several()
            return
        held = self.some_lease()
        if held is None:
            self.lease()
        else:
            self._ask(self.new_settle(held))

    def new_settle(self, held: TrackedLease) -> SentSettle:
        chance = self._chance
        wanted = None
        if chance.happens(0.4):
            wanted = [offset for offset in (*held.open, *held.done) if chance.happens(0.6)]
            chance.rng.shuffle(wanted)
        verb = chance.pick(VERBS)
        if not wanted or verb == "extend":
            wanted = None
        request = chance.request_id()
        if verb == "complete" and held.open and not held.doubtful and chance.happens(0.3):
            some = None if wanted is None else [offset for offset in wanted if offset in held.open] or None
            return self._with_follow_ups(held, some, request)
        delay = chance.pick([0, 0, 1, 2 * SECOND, 30 * SECOND])
        timeout = chance.pick([0, 10 * SECOND])
        return SentSettle(verb, [(held, wanted)], request, delay=delay, counted=chance.happens(0.85), timeout=timeout)

    def _settle_several(self) -> None:
        """One call for items of several leases."""
        model, chance = self._harness.model, self._chance
        idle = [held for held in model.leases.held[-12:] if not held.busy and held.incarnation in model.queues]
        queue = chance.pick(idle).incarnation if idle else 0
        several = [held for held in idle if held.incarnation == queue][-3:]
        if len({(held.partition, held.lease) for held in several}) > 1:
            self._ask(SentSettle(chance.pick(VERBS), [(held, None) for held in several], chance.request_id()))

    def some_lease(self, queue: int | None = None) -> TrackedLease | None:
        """A lease whose holder waits for nothing, mostly a good one; of one queue, or of any."""
        model = self._harness.model
        idle = [held for held in model.leases.held if not held.busy and queue in (None, held.incarnation)]
        good = [held for held in idle if held.open and held.valid(model.now)]
        if good and self._chance.happens(0.85):
            return self._chance.pick(good)
        return self._chance.pick(idle[-8:]) if idle else None

    def _with_follow_ups(self, held: TrackedLease, wanted: list[int] | None, request: bytes | None) -> SentSettle:
        chance, model = self._chance, self._harness.model
        target = self._queue()
        batch, tags = chance.batch(target, chance.pick([1, 2]), self._harness.clock.read().wall, plain=True)
        sent = SentSettle("complete", [(held, wanted)], request, then=[(target, batch)], follow_ups=tags)
        for tag in tags:
            tag.parents, tag.scheduled = list(sent.tags), True
            model.tags[tag.payload] = tag
        return sent

    def repeat(self) -> None:
        """An answer was lost, or came late: the caller asks again with the same request id."""
        known = [sent for sent in self.sent if sent.incarnation in self._harness.model.queues and self.may_repeat(sent)]
        if known:
            self._ask(self._chance.pick(known[-8:]), at_once=1)

    def may_repeat(self, sent: SentRequest) -> bool:
        """Whether its caller has an answer, or none will come, and the broker still knows the request by its id."""
        busy = isinstance(sent, SentSettle) and any(held.busy for held, _ in sent.parts)
        return sent.request_id is not None and self._harness.model.remembers(sent) and sent not in self._harness.pending and not busy

    def leave(self) -> None:
        """A caller that waits gives up."""
        waiting = [sent for sent in self._harness.pending if isinstance(sent, SentLease)]
        if waiting and self._chance.happens(0.5):
            self._harness.cancel(self._chance.pick(waiting))
        else:
            self._harness.submit_and_abandon(SentLease(self._queue(), 3, 0, 1, None))


# -- several at the same time ------------------------------------------------------------------------


class TurnRunner(NamedTuple):
    """Who runs the turn."""

    run: Callable[[], None]
    undo: Callable[[], None]
    """Gives the queue the partitions that it had."""
    reshapes: bool = False
    """Whether it gives the queue other partitions."""


class ConcurrentCallers:
    """Callers whose requests share one turn, in which something goes wrong.

    Produces, leases, settles and an operator's command wait in one inbox; then one file call of the turn that serves them fails, or the
    process ends there, or whoever runs the turn is interrupted. Afterwards those who were not served ask again, holders use their leases,
    and the queue goes back to the number of partitions it had, with new items of every key before and after: if a partition has taken
    anything from another one that was undone, it shows here. The model judges all of it; nothing here expects a certain answer.
    """

    def __init__(self, harness: BrokerHarness, chance: RandomInput, callers: Callers, operator: Operator) -> None:
        self._harness = harness
        self._chance = chance
        self._callers = callers
        self._operator = operator

    def share_failing_turn(self) -> None:
        """One turn for several requests, in which something goes wrong, and what its callers do then."""
        harness, chance = self._harness, self._chance
        queue = chance.pick(sorted(harness.model.queues))
        if chance.happens(0.6):  # leases that are answered, and not synced when the turn begins
            self._ask(SentLease(queue, chance.pick([1, 2, 3]), chance.pick([0, 5 * MINUTE]), 1, None))
        leader = self._leader(queue)
        sent: list[SentRequest] = []
        for _ in range(chance.rng.randint(1, 4)):
            sent.append(self._request(queue))
            harness.submit(sent[-1])
            self._callers.note(sent[-1])
        self._disturb(leader.reshapes)
        try:
            leader.run()
        except Halt:
            harness.crash_and_reopen(power=chance.happens(0.5))
        harness.forget_interrupts()
        self._operator.look_up(queue)
        if chance.happens(0.8):
            harness.disk.remove_all_faults()
            self._go_on(queue, sent, leader.undo)

    # -- one turn ------------------------------------------------------------------------------------

    def _request(self, queue: int) -> SentRequest:
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
        names = [(chance.pick(chance.keys), chance.pick(DEDUPS)) for _ in range(chance.rng.randint(1, 3))]
        return self._produce(queue, names, chance.request_id())

    def _produce(self, queue: int, names: Sequence[tuple[bytes | None, bytes | None]], request_id: bytes | None = None) -> SentProduce:
        batch, tags = self._chance.keyed(queue, names)
        for tag in tags:
            self._harness.model.tags[tag.payload] = tag
        return SentProduce(queue, batch, tags, request_id, 10 * SECOND)

    def _leader(self, queue: int) -> TurnRunner:
        """Who runs the turn: an operator with a word of its own, one of the callers, or nobody of them."""
        chance, operator, info = self._chance, self._operator, self._harness.model.queues[queue]
        width = len(info.active)
        undo = partial(operator.resize_to, queue, width)
        kind = chance.pick(["resize", "resize", "resize", "drain", "send", "call", "turn"])
        if kind == "resize":
            other = chance.pick([one for one in WIDTHS if one != width])
            return TurnRunner(partial(operator.resize_to, queue, other), undo, reshapes=True)
        if kind == "drain":
            number = chance.pick(info.active)
            return TurnRunner(
                partial(operator.set_read_only, queue, number, True), partial(operator.set_read_only, queue, number, False), reshapes=True
            )
        if kind == "send":
            return TurnRunner(operator.prepare_send(queue), undo)
        if kind == "call":
            sent = SentLease(queue, 2, 0, 1, None) if chance.happens(0.4) else self._callers.new_produce(queue)
            if not sent.wait:
                return TurnRunner(partial(self._harness.call, sent), undo)
        return TurnRunner(partial(self._turn, queue), undo)

    def _disturb(self, reshapes: bool) -> None:
        """One of the next file calls goes wrong. Most turns make a few; a resize makes many, some of them after its record is synced."""
        harness, chance = self._harness, self._chance
        if chance.happens(0.1):
            harness.interrupt_at_clock(chance.rng.randint(1, 20))
        elif reshapes and chance.happens(0.7):
            harness.arm_after_sync(CATALOG, chance.pick(CROWD_FAULTS), chance.rng.randint(1, 4))
        else:
            harness.inject_fault(chance.pick(CROWD_FAULTS), chance.rng.randint(1, chance.pick([3, 6, 12, 30])))

    def _turn(self, queue: int) -> None:
        loop = self._loop(queue)
        if loop is not None:
            self._harness.turn(loop)

    def _loop(self, queue: int) -> Loop | None:
        return next((loop for loop in self._harness.broker.loops() if loop.engine.incarnation == queue), None)

    # -- afterwards ----------------------------------------------------------------------------------

    def _go_on(self, queue: int, sent: list[SentRequest], undo: Callable[[], None]) -> None:
        """Callers ask again, holders use their leases, and the queue gets its former partitions back."""
        self._settle_down(queue)
        actions = [
            partial(self._use_leases, queue),
            partial(self._go_back, queue, undo),
            *(partial(self._repeat, one) for one in sent if isinstance(one, SentProduce)),
        ]
        self._chance.rng.shuffle(actions)
        for action in actions:
            if queue in self._harness.model.queues:
                action()

    def _settle_down(self, queue: int) -> None:
        """A partition that failed is tried again; what is under way within the queue arrives."""
        if not self._harness.model.census.all_healthy:
            self._harness.advance(1 * SECOND)
        for _ in range(CROWD_TURNS):
            loop = self._loop(queue)
            if loop is None or loop not in self._harness.wanting():
                return
            self._harness.turn(loop)

    def _use_leases(self, queue: int) -> None:
        """Whoever holds something extends it, or settles it; others ask for items meanwhile."""
        model = self._harness.model
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

    def _ask(self, sent: SentRequest) -> None:
        """Ask, and let a turn answer."""
        if sent.incarnation in self._harness.model.queues:
            self._harness.submit(sent)
            self._callers.note(sent)
            self._turn(sent.incarnation)
