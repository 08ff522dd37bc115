"""Those outside of the owner's process: the owner's side of the inbox.

Owns: `Outside`: it puts together what adopts drops and what does errands, and is to both of them what they need of a broker.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from penstock.broker.adopting import Adopter
from penstock.broker.errands import Errands
from penstock.logs.store import Inbox
from penstock.loop.catalog import Catalog
from penstock.loop.requests import Do, Request
from penstock.loop.turn import Turns
from penstock.reports import QueueInfo
from penstock.rules.catalog import Entry
from penstock.words.clock import SECOND, Clock
from penstock.words.errors import PenstockError

OPENING = 2 * SECOND
"""For so long an opening takes in what waits in the inbox; the rest comes while the broker is at work."""


class Broker(Protocol):
    """What is needed of a broker."""

    clock: Clock
    catalog: Catalog

    def recording(self) -> AbstractContextManager[None]: ...
    def find(self, name: str) -> QueueInfo: ...
    def call(self, incarnation: int, request: Request) -> Any: ...
    def ask(self, incarnation: int, verb: str, **args: Any) -> Any: ...


class Outside:
    """The inbox of an open broker."""

    def __init__(self, inbox: Inbox, broker: Broker) -> None:
        self._broker = broker
        self.clock = broker.clock
        self.find = broker.find
        self.call = broker.call
        self.ask = broker.ask
        self._held: dict[int, int] = {}
        """Incarnations of queues whose consumer right somebody has, and when it ends (elapsed)."""
        self._adopter = Adopter(inbox, self, Errands(inbox, self).run)

    def open(self, threaded: bool) -> None:
        """Take in what is there, if it is not too much; then, if threads may be begun, look on."""
        now = self.clock.read().elapsed
        self._held = {entry.incarnation: now + entry.hold_timeout for entry in self._broker.catalog.entries if entry.holder}
        self._adopter.sweep()
        self._adopter.look(OPENING if threaded else 0)
        if threaded:
            self._adopter.start()

    def look(self) -> bool:
        """Do what there is to do; whether anything was done. By itself this happens every few moments, where there are threads."""
        return self._adopter.look()

    def stop(self) -> None:
        self._adopter.stop()

    def abandon(self) -> None:
        """In a forked child."""
        self._adopter.abandon()

    # -- what they need ------------------------------------------------------------------------------

    def entry(self, incarnation: int) -> Entry:
        """What the catalog says of a queue."""
        return self._broker.catalog.get(incarnation)

    def adopting(self, incarnation: int, name: str) -> int:
        """Begin to adopt a drop; the number that is its own."""
        with self._broker.recording():
            return self._broker.catalog.adopting(incarnation, name)

    def adopted(self, incarnation: int, name: str, source: str, number: int) -> None:
        with self._broker.recording():
            self._broker.catalog.adopted(incarnation, name, source, number)

    def queues(self) -> Sequence[int]:
        """The incarnations that there are."""
        return [*self._broker.catalog.state.entries]

    def hold(self, incarnation: int, holder: str, timeout: int) -> None:
        """Give a queue's consumer right to a holder, or ("") to nobody, for so long as it is not renewed; refused while another has it."""
        self.call(incarnation, Do(lambda turns: self._hold(turns, holder, timeout), firm=True, opens=False))
        self._held.pop(incarnation, None)
        if holder:
            self._held[incarnation] = self.clock.read().elapsed + timeout

    def upkeep(self) -> None:
        """A right whose holder has kept silent for too long is nobody's any more: the next opening must not give it back."""
        now = self.clock.read().elapsed
        for incarnation in [incarnation for incarnation, until in self._held.items() if until <= now]:
            with suppress(PenstockError):  # tried again at the next look
                if incarnation in self._broker.catalog.state.entries:
                    self.hold(incarnation, "", 0)
                self._held.pop(incarnation, None)

    def _hold(self, turns: Turns, holder: str, timeout: int) -> None:
        if holder:
            turns.leasing.refuse_other(holder)
        with self._broker.recording():
            self._broker.catalog.hold(turns.incarnation, holder, timeout)
        turns.leasing.hold(holder, timeout)
