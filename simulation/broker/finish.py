"""The end of a simulated broker's story: trouble is over, and everything that is left must come out.

Owns: `finish`. What was given up is redriven, dead letters whose keys are parked go home, workers lease and complete whatever there is,
for as many days as it takes.
"""

from penstock.reports import ListedItem
from penstock.words.clock import DAY, HOUR, MINUTE
from simulation.broker.operator import Operator
from simulation.broker.sent import SentLease, SentSettle
from simulation.broker.world import World

ROUNDS = [6 * MINUTE, MINUTE, *[HOUR] * 4, *[DAY] * 8]
"""How long to wait before each round of work: at first until every lease is over."""


def finish(world: World, operator: Operator) -> None:
    """Let everything that is left be worked on."""
    world.calm()
    for queue in list(world.model.queues):
        operator.ask(queue, "pause", lease=False, produce=False)
        operator.set_options(queue, {"max_attempts": 0})
    for pause in ROUNDS:
        world.advance(pause)
        world.calm()
        _work_off(world, operator)
        if not world.model.left():
            break
    left = world.model.left()
    assert not left, f"{left[0]} never came: {world.model.census.of(left[0])}"
    world.calm()
    world.model.check_end(world.broker.loops())
    world.replay()


def _work_off(world: World, operator: Operator) -> None:
    """Bring back what was given up, then lease and complete whatever there is."""
    queues = world.model.queues
    for queue, key in world.model.order.stuck():
        if queue in queues:
            operator.free(queue, key)
    for queue in queues:
        operator.ask(queue, "redrive", partition_offsets=None)
        _send_home(world, operator, queue)
    world.rest()
    for queue in queues:
        _drain(world, queue)


def _send_home(world: World, operator: Operator, queue: int) -> None:
    """Dead letters whose keys are parked go back to where they came from."""
    model = world.model
    homes: dict[int, list[ListedItem]] = {}
    for item in operator.ask(queue, "redrivable", limit=1_000):
        tag = model.tags[item.batch.payloads[item.index]]
        for (home, _), holders in model.order.parked.items():
            if tag in holders and home != queue and home in model.queues:
                homes.setdefault(home, []).append(item)
    for home, items in homes.items():
        operator.send(queue, items, home)


def _drain(world: World, queue: int) -> None:
    leases = world.model.leases
    while True:
        before = len(leases.held)
        world.submit(SentLease(queue, 100, 0, 3, None))
        world.rest()
        if len(leases.held) == before:
            return
        for held in leases.held[before:]:
            world.submit(SentSettle("complete", [(held, None)], None))
        world.rest()
