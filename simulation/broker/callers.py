"""Producers and workers of a simulated broker.

Owns: `Callers`: what they ask, and what they do when an answer does not come. A worker acts at once, stalls, dies, or comes back late
with a lease that is no longer its own.
"""

from penstock.loop.requests import Verb
from penstock.words.clock import MINUTE, SECOND
from simulation.broker.chance import Chance
from simulation.broker.items import Held
from simulation.broker.sent import Sent, SentLease, SentProduce, SentSettle, SentWatch
from simulation.broker.world import World

VERBS: list[Verb] = ["complete", "complete", "complete", "retry", "retry", "bury", "extend"]


class Callers:
    """Everybody who uses a queue."""

    def __init__(self, world: World, chance: Chance) -> None:
        self._world = world
        self._chance = chance
        self.sent: list[Sent] = []
        """Requests with an id, which may be asked again."""

    def _queue(self) -> int:
        return self._chance.pick(sorted(self._world.model.queues))

    def note(self, sent: Sent) -> None:
        """It may be asked again, if it has an id."""
        if sent.request_id is not None and sent not in self.sent:
            self.sent.append(sent)

    def _ask(self, sent: Sent, at_once: float = 0.6) -> None:
        """Ask, and mostly let a turn answer at once."""
        self._world.submit(sent)
        self.note(sent)
        if self._chance.happens(at_once):
            for loop in self._world.broker.loops():
                if loop.turns.incarnation == sent.incarnation:
                    self._world.turn(loop)

    def produce(self) -> None:
        self._ask(self.new_produce(self._queue()))

    def new_produce(self, incarnation: int) -> SentProduce:
        chance, model = self._chance, self._world.model
        batch, tags = chance.batch(incarnation, chance.pick([1, 1, 2, 3, 6]), self._world.clock.read().wall)
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
        rooms = {number: len(room.lives) for (owner, number), room in self._world.model.census.rooms.items() if owner == queue}
        self._ask(SentWatch(queue, rooms, 20 * SECOND))

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

    def new_settle(self, held: Held) -> SentSettle:
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
        model, chance = self._world.model, self._chance
        idle = [held for held in model.leases.held[-12:] if not held.busy and held.incarnation in model.queues]
        queue = chance.pick(idle).incarnation if idle else 0
        several = [held for held in idle if held.incarnation == queue][-3:]
        if len({(held.partition, held.lease) for held in several}) > 1:
            self._ask(SentSettle(chance.pick(VERBS), [(held, None) for held in several], chance.request_id()))

    def some_lease(self, queue: int | None = None) -> Held | None:
        """A lease whose holder waits for nothing, mostly a good one; of one queue, or of any."""
        model = self._world.model
        idle = [held for held in model.leases.held if not held.busy and queue in (None, held.incarnation)]
        good = [held for held in idle if held.open and held.valid(model.now)]
        if good and self._chance.happens(0.85):
            return self._chance.pick(good)
        return self._chance.pick(idle[-8:]) if idle else None

    def _with_follow_ups(self, held: Held, wanted: list[int] | None, request: bytes | None) -> SentSettle:
        chance, model = self._chance, self._world.model
        target = self._queue()
        batch, tags = chance.batch(target, chance.pick([1, 2]), self._world.clock.read().wall, plain=True)
        sent = SentSettle("complete", [(held, wanted)], request, then=[(target, batch)], follow_ups=tags)
        for tag in tags:
            tag.parents, tag.scheduled = list(sent.tags), True
            model.tags[tag.payload] = tag
        return sent

    def repeat(self) -> None:
        """An answer was lost, or came late: the caller asks again with the same request id."""
        known = [sent for sent in self.sent if sent.incarnation in self._world.model.queues and self.may_repeat(sent)]
        if known:
            self._ask(self._chance.pick(known[-8:]), at_once=1)

    def may_repeat(self, sent: Sent) -> bool:
        """Whether its caller has an answer, or none will come, and the broker still knows the request by its id."""
        busy = isinstance(sent, SentSettle) and any(held.busy for held, _ in sent.parts)
        return sent.request_id is not None and self._world.model.remembers(sent) and sent not in self._world.pending and not busy

    def leave(self) -> None:
        """A caller that waits gives up."""
        waiting = [sent for sent in self._world.pending if isinstance(sent, SentLease)]
        if waiting and self._chance.happens(0.5):
            self._world.cancel(self._chance.pick(waiting))
        else:
            self._world.miss(SentLease(self._queue(), 3, 0, 1, None))
