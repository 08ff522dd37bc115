"""Those outside of the owner's process: the owner's side of a directory's inbox.

Owns: `Outside`: it puts together what adopts drops and what does errands, and is to both of them what they need of a broker. A broker in
memory has none.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

from penstock.logs.directory import Directory
from penstock.logs.drops import Drops
from penstock.loop.catalog import Catalog
from penstock.loop.requests import Do, Request
from penstock.loop.turn import Turns
from penstock.rules.catalog import Entry
from penstock.service.adopting import Adopter
from penstock.service.errands import Errands
from penstock.service.reports import QueueInfo
from penstock.words.clock import Clock


class Broker(Protocol):
    """What is needed of a broker."""

    clock: Clock
    catalog: Catalog

    def recording(self) -> AbstractContextManager[None]: ...
    def find(self, name: str) -> QueueInfo: ...
    def call(self, incarnation: int, request: Request) -> Any: ...
    def ask(self, incarnation: int, verb: str, **args: Any) -> Any: ...


class Outside:
    """The inbox of an open directory."""

    def __init__(self, directory: Directory, broker: Broker) -> None:
        self._broker = broker
        self.clock = broker.clock
        self.find = broker.find
        self.call = broker.call
        self.ask = broker.ask
        drops = Drops(directory.files, directory.roots[0].path)
        self._adopter = Adopter(drops, directory.files, self, Errands(drops, self).run)

    def open(self, threaded: bool) -> None:
        """Take in what is there; then, if threads may be begun, look on."""
        self._adopter.sweep()
        self._adopter.look()
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

    def hold(self, incarnation: int, holder: str, timeout: int) -> None:
        """Give a queue's consumer right to a holder, or ("") to nobody, for so long as it is not renewed; refused while another has it."""
        self.call(incarnation, Do(lambda turns: self._hold(turns, holder, timeout), firm=True))

    def _hold(self, turns: Turns, holder: str, timeout: int) -> None:
        if holder:
            turns.leasing.refuse_other(holder)
        with self._broker.recording():
            self._broker.catalog.hold(turns.incarnation, holder, timeout)
        turns.leasing.hold(holder, timeout)
