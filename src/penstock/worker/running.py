"""One run of a worker, from its first lease to its last settling.

Owns: `Run`, which puts the parts together and ends them in order.

    queue → Feeder → shelf → places (threads, tasks or child processes: handlers) → Settler → queue

Draining: feeders stop leasing, what is on the shelf goes back uncounted, places finish what they have, settlers say it, the run is over.
Stopping at once: places are not waited for. Tasks are cancelled and processes killed, so their items go back uncounted; a thread cannot be
stopped, so its lease is left to end by itself: giving it back could have two handlers at work on one item.
Everything that happens to a run comes as a word into one queue, read by the thread that runs it.
"""

import asyncio
import logging
from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import Literal

from penstock.api.items import Item
from penstock.worker.calling import Caller
from penstock.worker.children import ChildPlaces
from penstock.worker.feeding import Feeder
from penstock.worker.handlers import Handlers
from penstock.worker.holding import Hold, Source
from penstock.worker.limits import Bucket
from penstock.worker.line import RunLine
from penstock.worker.settings import Settings
from penstock.worker.settling import Settler
from penstock.worker.shelf import Shares, Shelf, Waiting
from penstock.worker.tally import Tally
from penstock.worker.tasks import TaskPlaces
from penstock.worker.threads import ThreadPlaces
from penstock.worker.verdicts import RETURNED

Word = Literal["drain", "stop", "ended", "settled"]
GRACE_SECONDS = 2.0
"""How long handlers that were stopped, and last words to the queue, are waited for."""
_log = logging.getLogger("penstock.worker")


class Run:
    """A worker at work."""

    def __init__(
        self,
        weights: Mapping[Source, int],
        rates: Mapping[Source, float],
        handlers: Handlers,
        settings: Settings,
        tally: Tally,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._settings = settings
        self._words: SimpleQueue[Word] = SimpleQueue()
        self._asked = 0
        self._error: Exception | None = None
        self._draining = False
        self._stopping = False
        limit = settings.per_partition * (settings.batch or 1)
        self._shelf: Waiting = Shares(weights, limit) if limit or len(weights) > 1 else Shelf()
        now = next(iter(weights)).now
        self._line = RunLine(now, self._shelf, handlers)
        caller = Caller(handlers, settings, now)
        self._caller = caller
        self._places = self._make_places(caller, handlers, loop)
        self._settlers = {source: Settler(source, tally, self) for source in weights}
        total = sum(weights.values())
        self._feeders = [
            Feeder(
                source,
                max(1, settings.concurrency * weight // total) if len(weights) > 1 else 0,
                settings,
                handlers,
                self._shelf,
                self._places,
                self._settlers[source],
                tally,
                self,
                Bucket(rates[source]) if source in rates else None,
            )
            for source, weight in weights.items()
        ]

    def _make_places(
        self, caller: Caller, handlers: Handlers, loop: asyncio.AbstractEventLoop | None
    ) -> ThreadPlaces | TaskPlaces | ChildPlaces:
        parts = self._settings, self._shelf, caller, self._line, self._hungry, lambda: self._words.put("ended")
        if self._settings.processes:
            return ChildPlaces(*parts, handlers, self.fail)
        if handlers.any_async:
            return TaskPlaces(*parts, loop)
        return ThreadPlaces(*parts)

    # -- for everybody -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Begin nothing more, finish what was begun."""
        self._lease_no_more()
        self._words.put("drain")

    def ask_to_end(self) -> None:
        """Drain; asked once more, stop at once. Safe in a signal handler."""
        self._asked += 1
        self._lease_no_more()
        self._words.put("drain" if self._asked == 1 else "stop")

    def stop(self) -> None:
        """Stop at once."""
        self._asked += 1
        self._lease_no_more()
        self._words.put("stop")

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._words.put("drain")

    def late(self, hold: Hold, items: list[Item]) -> None:
        for item in items:
            _log.warning("item %s of queue %r was late: its lease had ended", item.id, hold.source.name)
            if self._settings.hooks.late is not None:
                self._caller.tell(self._settings.hooks.late, item)

    def lost(self, hold: Hold) -> None:
        """Nothing of it is begun any more."""
        for pair in self._shelf.drop(hold):
            self._settlers[hold.source].settle(pair, RETURNED)

    def _hungry(self) -> None:
        """A place finds little on the shelf."""
        for feeder in self._feeders:
            if self._shelf.count(feeder.source) <= feeder.low:
                feeder.ring()

    # -- from the beginning to the end -------------------------------------------------------------------

    def execute(self) -> None:
        """Work until it is asked to end; raises if a queue can no longer be reached."""
        for settler in self._settlers.values():
            settler.start()
        for feeder in self._feeders:
            feeder.start()
        self._places.start()
        try:
            self._wait_for_places()
        except BaseException:  # this thread was interrupted
            if not self._draining:
                self._drain()
            self._stop()
            raise
        finally:
            self._finish()
        if self._error is not None:
            raise self._error

    def _wait_for_places(self) -> None:
        while not self._stopping:
            word = self._words.get()
            if word == "ended":
                return
            if not self._draining:
                self._drain()
            if word == "stop":
                self._stop()
        self._wait_for("ended", GRACE_SECONDS if self._places.stoppable else 0)

    def _lease_no_more(self) -> None:
        """At once, and not when the thread that runs this comes to it: a place that is free in between must find nothing new."""
        for feeder in self._feeders:
            feeder.close()

    def _drain(self) -> None:
        self._draining = True
        self._lease_no_more()
        for feeder in self._feeders:
            feeder.join()
        self._give_back()
        self._places.close()

    def _stop(self) -> None:
        self._stopping = self._line.stopping = True
        self._places.cancel()
        for settler in self._settlers.values():
            settler.hurry()

    def _give_back(self) -> None:
        for pair in self._shelf.clear():
            pair[0].settler.settle(pair, RETURNED)

    def _wait_for(self, wanted: Word, seconds: float) -> bool:
        try:
            while self._words.get(timeout=seconds) != wanted:
                pass
        except Empty:
            return False
        return True

    def _finish(self) -> None:
        self._give_back()
        self._line.reporter.close()
        for settler in self._settlers.values():
            while not settler.close(GRACE_SECONDS if self._stopping else 0.1) and not self._stopping:
                if self._wait_for("stop", 0):
                    self._stop()
        for settler in self._settlers.values():
            settler.let_go()
        if self._settings.hooks.drained is not None and not self._stopping:
            self._caller.tell(self._settings.hooks.drained)
