"""The plain facts that everybody who judges a simulated broker shares.

Owns: `Book`: the time, every item ever sent, the queues there are, and the census.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from penstock.reports import QueueInfo
from penstock.words.clock import MINUTE
from simulation.broker.census import Census
from simulation.broker.items import Tag
from simulation.broker.order import Order
from simulation.broker.precedence import Precedence
from simulation.broker.sent import Sent

REMEMBERED = 15 * MINUTE
"""So long a request is known by its id, at least."""


class Book:
    """What is known."""

    def __init__(self, undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
        self.now = 0
        self.era = 0
        """How often the machine was rebooted: then nobody can say how much time has passed."""
        self.tags: dict[bytes, Tag] = {}
        self.queues: dict[int, QueueInfo] = {}
        self.census = Census(self._tag_of, undisturbed)
        self.order = Order(self.census)
        self.precedence = Precedence(self.census)

    def _tag_of(self, payload: bytes) -> Tag:
        tag = self.tags.get(payload)
        assert tag is not None, f"{payload!r} was found, which nobody produced"
        return tag

    def remembers(self, sent: Sent, later: int = 0) -> bool:
        """Whether a request is surely known by its id, now or so much later."""
        return self.era == sent.era and self.now + later - sent.since < REMEMBERED
