"""Producers and workers of a simulated broker.

Owns: `Callers` (their requests, and repetitions of requests whose answers were lost; workers settle at once, late or
never) and `ConcurrentCallers` (several requests in one turn that meets a fault).
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

SHARED_TURN_FAULTS: list[Fault] = [errno.EIO, errno.EIO, errno.ENOSPC, "short", "torn", "halt", "halt", "halt", "interrupt", "interrupt"]
WIDTHS = [1, 1, 2, 3, 4, 8]
CATALOG = "/0000000000000000/"
"""Part of the paths of the catalog's files."""
MOST_RECOVERY_TURNS = 20


class Callers:
    """Producers and workers."""

    def __init__(self, harness: BrokerHarness, chance: RandomInput) -> None:
        self._harness = harness
        self._chance = chance
        self.sent: list[SentRequest] = []
        """Requests with an id or in a session, which may be repeated."""

    def _queue(self) -> int:
        return self._chance.pick(sorted(self._harness.model.queues))

    def remember(self, sent: SentRequest) -> None:
        """Remember a request that has an id or is a call of a session, so that it may be repeated."""
        if sent.named and sent not in self.sent:
            self.sent.append(sent)

    def _ask(self, sent: SentRequest, at_once: float = 0.6) -> None:
        """Submit a request and, mostly, run a turn that answers it."""
        self._harness.submit(sent)
        self.remember(sent)
        if self._chance.happens(at_once):
            for loop in self._harness.broker.loops():
                if loop.engine.incarnation == sent.incarnation:
                    self._harness.turn(loop)

    def produce(self) -> None:
        self._ask(self.new_produce(self._queue()))

    def new_produce(self, incarnation: int) -> SentProduce:
        chance, model = self._chance, self._harness.model
        batch, items = chance.batch(incarnation, chance.pick([1, 1, 2, 3, 6]), self._harness.clock.read().wall)
        for item in items:
            model.items[item.payload] = item
        limited = model.queues[incarnation].options.max_items
        return SentProduce(incarnation, batch, items, chance.request_id(), 10 * SECOND if limited else chance.pick([0, 0, 10 * SECOND]))

    def lease(self) -> None:
        self._ask(self.new_lease(self._queue()))

    def new_lease(self, incarnation: int) -> SentLease:
        chance = self._chance
        timeout = chance.pick([0, 0, 0, 2 * SECOND, 5 * MINUTE])
        want, per_key = chance.pick([1, 1, 2, 3, 10]), chance.pick([1, 1, 2, 3])
        wait = chance.pick([0, 0, 5 * SECOND, 60 * SECOND])
        return SentLease(incarnation, want, timeout, per_key, chance.request_id(), wait)

    def watch(self) -> None:
        """Wait for new items of a queue."""
        queue = self._queue()
        partitions = {
            number: len(seen.states) for (owner, number), seen in self._harness.model.inventory.partitions.items() if owner == queue
        }
        self._ask(SentWatch(queue, partitions, 20 * SECOND))

    def settle(self) -> None:
        """Settle items of a lease, mostly of one that is still valid."""
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
        """Settle items of several leases in one request."""
        model, chance = self._harness.model, self._chance
        idle = [held for held in model.leases.held[-12:] if not held.busy and held.incarnation in model.queues]
        queue = chance.pick(idle).incarnation if idle else 0
        several = [held for held in idle if held.incarnation == queue][-3:]
        if len({(held.partition, held.lease) for held in several}) > 1:
            self._ask(SentSettle(chance.pick(VERBS), [(held, None) for held in several], chance.request_id()))

    def some_lease(self, queue: int | None = None) -> TrackedLease | None:
        """A lease of this or any queue without a pending request, mostly a valid one."""
        model = self._harness.model
        idle = [held for held in model.leases.held if not held.busy and queue in (None, held.incarnation)]
        good = [held for held in idle if held.open and held.valid(model.now)]
        if good and self._chance.happens(0.85):
            return self._chance.pick(good)
        return self._chance.pick(idle[-8:]) if idle else None

    def _with_follow_ups(self, held: TrackedLease, wanted: list[int] | None, request: bytes | None) -> SentSettle:
        chance, model = self._chance, self._harness.model
        target = self._queue()
        batch, items = chance.batch(target, chance.pick([1, 2]), self._harness.clock.read().wall, plain=True)
        sent = SentSettle("complete", [(held, wanted)], request, then=[(target, batch)], follow_ups=items)
        for item in items:
            item.parents, item.scheduled = list(sent.items), True
            model.items[item.payload] = item
        return sent

    def repeat(self) -> None:
        """Repeat an earlier request, as after a lost answer."""
        known = [sent for sent in self.sent if sent.incarnation in self._harness.model.queues and self.may_repeat(sent)]
        if known:
            self._ask(self._chance.pick(known[-8:]), at_once=1)

    def may_repeat(self, sent: SentRequest) -> bool:
        """Whether a request is not pending and the broker still remembers its id."""
        busy = isinstance(sent, SentSettle) and any(held.busy for held, _ in sent.parts)
        return sent.named and self._harness.model.remembers(sent) and sent not in self._harness.pending and not busy

    def leave(self) -> None:
        """Cancel a waiting lease request, or abandon a new one."""
        waiting = [sent for sent in self._harness.pending if isinstance(sent, SentLease)]
        if waiting and self._chance.happens(0.5):
            self._harness.cancel(self._chance.pick(waiting))
        else:
            self._harness.submit_and_abandon(SentLease(self._queue(), 3, 0, 1, None))


# -- several requests in one turn ------------------------------------------------------------------


class TurnRunner(NamedTuple):
    """The caller that runs the turn."""

    run: Callable[[], None]
    undo: Callable[[], None]
    """Restores the queue's former partitions."""
    reshapes: bool = False
    """Whether `run` changes the queue's partitions."""


class ConcurrentCallers:
    """Callers whose requests share one turn that meets a fault.

    Produces, leases, settles and an administrative operation are pending together. In the turn that serves them a file
    call fails, or the process ends, or the thread that runs the turn is interrupted. Afterwards refused callers repeat
    their requests, holders use their leases, and the queue gets its former number of partitions, with new items of some
    keys produced before and after. This shows whether a partition relied on something of another partition that was
    undone. The model checks all answers.
    """

    def __init__(self, harness: BrokerHarness, chance: RandomInput, callers: Callers, operator: Operator) -> None:
        self._harness = harness
        self._chance = chance
        self._callers = callers
        self._operator = operator

    def share_failing_turn(self) -> None:
        """Run one turn for several requests, with a fault, and then what the callers do."""
        harness, chance = self._harness, self._chance
        queue = chance.pick(sorted(harness.model.queues))
        if chance.happens(0.6):  # leases that are answered but not synced when the turn begins
            self._ask(SentLease(queue, chance.pick([1, 2, 3]), chance.pick([0, 5 * MINUTE]), 1, None))
        runner = self._turn_runner(queue)
        sent: list[SentRequest] = []
        for _ in range(chance.rng.randint(1, 4)):
            sent.append(self._request(queue))
            harness.submit(sent[-1])
            self._callers.remember(sent[-1])
        self._disturb(runner.reshapes)
        try:
            runner.run()
        except Halt:
            harness.crash_and_reopen(power=chance.happens(0.5))
        harness.forget_interrupts()
        self._operator.look_up(queue)
        if chance.happens(0.8):
            harness.disk.remove_all_faults()
            self._continue(queue, sent, runner.undo)

    # -- one turn --------------------------------------------------------------------------------------

    def _request(self, queue: int) -> SentRequest:
        """Draw a request."""
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
        batch, items = self._chance.keyed(queue, names)
        for item in items:
            self._harness.model.items[item.payload] = item
        return SentProduce(queue, batch, items, request_id, 10 * SECOND)

    def _turn_runner(self, queue: int) -> TurnRunner:
        """Draw who runs the turn: an operator with an administrative operation, a caller, or the queue's own loop."""
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
        """Inject a fault into one of the next file calls. A resize makes many calls, some of them after its record is
        synced."""
        harness, chance = self._harness, self._chance
        if chance.happens(0.1):
            harness.interrupt_at_clock(chance.rng.randint(1, 20))
        elif reshapes and chance.happens(0.7):
            harness.arm_after_sync(CATALOG, chance.pick(SHARED_TURN_FAULTS), chance.rng.randint(1, 4))
        else:
            harness.inject_fault(chance.pick(SHARED_TURN_FAULTS), chance.rng.randint(1, chance.pick([3, 6, 12, 30])))

    def _turn(self, queue: int) -> None:
        loop = self._loop(queue)
        if loop is not None:
            self._harness.turn(loop)

    def _loop(self, queue: int) -> Loop | None:
        return next((loop for loop in self._harness.broker.loops() if loop.engine.incarnation == queue), None)

    # -- afterwards ------------------------------------------------------------------------------------

    def _continue(self, queue: int, sent: list[SentRequest], undo: Callable[[], None]) -> None:
        """Repeat requests, use the leases and restore the queue's former partitions, in random order."""
        self._recover(queue)
        actions = [
            partial(self._use_leases, queue),
            partial(self._restore_partitions, queue, undo),
            *(partial(self._repeat, one) for one in sent if isinstance(one, SentProduce)),
        ]
        self._chance.rng.shuffle(actions)
        for action in actions:
            if queue in self._harness.model.queues:
                action()

    def _recover(self, queue: int) -> None:
        """Run turns until failing partitions were tried again and transfers within the queue have arrived."""
        if not self._harness.model.inventory.all_healthy:
            self._harness.advance(1 * SECOND)
        for _ in range(MOST_RECOVERY_TURNS):
            loop = self._loop(queue)
            if loop is None or loop not in self._harness.loops_due():
                return
            self._harness.turn(loop)

    def _use_leases(self, queue: int) -> None:
        """Lease more items, and settle or extend valid leases."""
        model = self._harness.model
        self._ask(SentLease(queue, 3, 0, 1, None))
        for held in [held for held in model.leases.held if held.incarnation == queue and held.open and held.valid(model.now)][-3:]:
            if not held.busy:
                self._ask(SentSettle(self._chance.pick(VERBS), [(held, None)], None))

    def _repeat(self, sent: SentProduce) -> None:
        """Repeat a produce, as its error asks for: the same request, or new items with the same dedup ids."""
        if self._callers.may_repeat(sent):
            self._ask(sent)
        elif any(item.dedup is not None for item in sent.items):
            self._ask(self._produce(sent.incarnation, [(item.key, item.dedup) for item in sent.items if item.dedup is not None]))

    def _restore_partitions(self, queue: int, undo: Callable[[], None]) -> None:
        """Produce items of some keys, restore the former partitions, and produce items of these keys again."""
        names = self._chance.some_keys()
        self._ask(self._produce(queue, names))
        undo()
        self._ask(self._produce(queue, names))
        for _ in range(2):
            self._ask(SentLease(queue, 10, 5 * MINUTE, 1, None))

    def _ask(self, sent: SentRequest) -> None:
        """Submit a request and run a turn."""
        if sent.incarnation in self._harness.model.queues:
            self._harness.submit(sent)
            self._callers.remember(sent)
            self._turn(sent.incarnation)
