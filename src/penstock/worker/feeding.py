"""Feeding: items are leased before places run out of them, and not much earlier.

Owns: `Feeder`, one thread per queue. It leases as many items as places are free, and of quick ones as many more as will be handled
within HORIZON, so that no place waits for storage; slow ones are left for others to take.
An item of a kind that has no handler here is given back at once, uncounted, for a while: others may have one for it.
"""

import logging
import threading
from collections.abc import Sequence
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock.api.items import Item, items_of
from penstock.loop.requests import Handed
from penstock.operations import LeaseItems
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import PenstockError
from penstock.words.limits import MIN_LEASE_TIMEOUT
from penstock.worker.calling import chance
from penstock.worker.handlers import Handlers
from penstock.worker.holding import Hold, Source
from penstock.worker.limits import Bucket, Strangers
from penstock.worker.settings import Settings
from penstock.worker.settling import Settler
from penstock.worker.shelf import Waiting
from penstock.worker.tally import Tally
from penstock.worker.verdicts import Verdict

HORIZON, FAR = 50 * MILLISECOND, 400 * MILLISECOND
"""How far ahead items are leased: further if places run dry all the same, because the feeder is kept waiting."""
FAST = 1_000 / SECOND
"""Items a microsecond, below which nothing is worth looking further ahead."""
MOST = 8_000
"""Items that wait for a place, at most."""
PORTION = 250
"""Items of one lease, or a quarter of what is to be ready, if that is more: a small one is settled as a whole sooner."""
UNSETTLED = 50_000
"""With so many handled and not settled yet, no more are leased."""
SPREAD = 2 * MILLISECOND
"""When items have waited so long while places are idle, more of these are woken."""
SAMPLE = 5 * MILLISECOND
FIRST_PAUSE, LAST_PAUSE = 100 * MILLISECOND, 5 * SECOND
"""After a lease that the queue refused."""
_log = logging.getLogger("penstock.worker")


class Places(Protocol):
    """Where handlers run, as a feeder sees them."""

    @property
    def free(self) -> int:
        """Places without an item."""

    def wake(self, count: int) -> None:
        """So many items more wait."""

    def spread(self) -> None:
        """They have waited for a while: let more places look."""


class Boss(Protocol):
    """Whom a feeder tells that its queue cannot be reached any more."""

    def fail(self, error: Exception) -> None: ...


class Feeder:
    """Leases from one queue."""

    def __init__(
        self,
        source: Source,
        share: int,
        settings: Settings,
        handlers: Handlers,
        shelf: Waiting,
        places: Places,
        settler: Settler,
        tally: Tally,
        boss: Boss,
        bucket: Bucket | None,
    ) -> None:
        self.source = source
        self._share = share
        """Items that its share of the places can have; 0 if there is no other queue."""
        self._settings = settings
        self._handlers = handlers
        self._shelf = shelf
        self._places = places
        self._settler = settler
        self._tally = tally
        self._boss = boss
        self._bucket = bucket
        self._strangers = Strangers(chance)
        self._mail: SimpleQueue[None] = SimpleQueue()
        self._rung = False
        self._closing = False
        self._dry = False
        """The last lease gave less than was wanted."""
        self._pause = FIRST_PAUSE
        self._span = MIN_LEASE_TIMEOUT
        """How long leases are given for, at least."""
        self._asked_at = 0
        self._leased = 0
        self._rate = 0.0
        """Items done a microsecond, lately."""
        self._sampled = (0, 0)
        self._horizon = HORIZON
        self.low = 0
        """With no more items than this waiting, the feeder wants to be rung for."""
        self._thread = threading.Thread(target=self._run, name=f"penstock feed {source.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ring(self) -> None:
        """There is room, or something else to look at."""
        if not self._rung:
            self._rung = True
            self._mail.put(None)

    def close(self) -> None:
        """Lease nothing more."""
        self._closing = True
        self.ring()

    def join(self) -> None:
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._round()
        except Exception as error:  # whatever it is, the worker must not go on without this thread
            self._boss.fail(error)

    def _round(self) -> None:
        if len(self._settler) > UNSETTLED:
            self._listen(FIRST_PAUSE)
            return
        room = self._room()
        if room < 1:
            self._listen()
            return
        if self._bucket is not None:
            room, wait = self._bucket.take(room, self.source.now())
            if room < 1:
                self._listen(wait)
                return
        try:
            handed = self._lease(room)
            self._pause = FIRST_PAUSE
        except PenstockError as error:
            if not error.retryable:
                raise
            _log.warning("nothing can be leased from queue %r for now: %s", self.source.name, error)
            self._listen(self._pause)
            self._pause = min(2 * self._pause, LAST_PAUSE)
            handed = []
        given = sum(one.granted.count for one in handed)
        if self._bucket is not None:
            self._bucket.put_back(room - given)
        for one in handed:
            self._shelve(one)

    def _listen(self, wait: int | None = None) -> None:
        """Until somebody rings, an answer is there, or (microseconds) the time is over. Meanwhile no item waits in vain."""
        stuck = self._shelf.ready and self._places.free > 0
        if stuck and (wait is None or wait > SPREAD):
            wait = SPREAD
        try:
            self._mail.get(timeout=None if wait is None else wait / SECOND)
        except Empty:
            if stuck:
                self._places.spread()
        self._rung = False  # from here on it is looked at what there is to do, so who rings later must be heard later

    # -- how many ----------------------------------------------------------------------------------------

    def _room(self) -> int:
        """How many items to lease now."""
        shelf, source = self._shelf, self.source
        waiting = shelf.count(source)
        ahead = self._ahead(waiting)
        self.low = ahead // 2
        batch = self._settings.batch or 1
        free = self._places.free * batch - (len(shelf) - waiting)
        if self._settings.per_partition:
            return self._room_by_partition(free, waiting, ahead, batch)
        if self._share:
            free = max(free, self._share * batch - shelf.taken(source))
        room = free + ahead - waiting
        return min(room, max(PORTION, ahead // 4)) if room > ahead // 2 else 0

    def _room_by_partition(self, free: int, waiting: int, ahead: int, batch: int) -> int:
        """Little by little, as each lease comes from another partition; what has no place now is held back, to a limit."""
        most = 2 * self._settings.places + ahead if free > 0 else ahead
        self.low = most
        return min(self._settings.per_partition * batch, most - waiting)

    def _ahead(self, waiting: int) -> int:
        """How many items to have ready beyond those that have a place."""
        now, (then, before) = self.source.now(), self._sampled
        if now - then >= SAMPLE:
            done = self._leased - waiting - self._in_places()
            self._rate = (self._rate + max(0, done - before) / (now - then)) / 2
            self._sampled = now, done
            if not waiting and not self._dry and self._rate > FAST:
                self._horizon = min(2 * self._horizon, FAR)
            else:
                self._horizon = max(HORIZON, self._horizon * 31 // 32)
        return min(MOST, int(self._rate * self._horizon))

    def _in_places(self) -> int:
        if self._shelf.counting:
            return self._shelf.taken(self.source)
        return (self._settings.concurrency - self._places.free) * (self._settings.batch or 1)

    # -- leasing -----------------------------------------------------------------------------------------

    def _lease(self, want: int) -> list[Handed]:
        handed: list[Handed] = []
        self._asked_at = self.source.now()
        if not self._dry:
            handed = self.source.lease(self._operation(want, 0))
        if not handed:
            # not for longer than half a lease: so, whenever it was given within that time, there is time to say that it is to be kept
            handed = self._wait_for(self._operation(want, self._span // 2))
        self._dry = sum(one.granted.count for one in handed) < want
        return handed

    def _operation(self, want: int, wait: int) -> LeaseItems:
        settings = self._settings
        return LeaseItems(queue=self.source.incarnation, count=want, wait=wait, consumer=settings.name, timeout=settings.lease_timeout)

    def _wait_for(self, operation: LeaseItems) -> list[Handed]:
        """The answer, when there is something, or nothing when the worker drains."""
        answers: list[list[Handed] | PenstockError] = []

        def done(answer: list[Handed] | PenstockError) -> None:
            answers.append(answer)
            self._mail.put(None)

        cancel = self.source.submit(operation, done)
        while not answers:
            self._listen()
            if self._closing and not answers:
                cancel()
                return []
        if isinstance(answers[0], PenstockError):
            raise answers[0]
        return answers[0]

    def _shelve(self, handed: Handed) -> None:
        hold = Hold(self.source, self._settler, handed, self._asked_at)
        self._span = max(MIN_LEASE_TIMEOUT, round(handed.seconds * SECOND))
        self._leased += hold.left
        self._tally.add("leased", hold.left, self.source.now())
        self._settler.holds.add(hold)
        if not hold.kept():
            _log.warning("a lease of queue %r ended before its items could be handled; they come again", self.source.name)
            self._settler.forget(hold)
            return
        granted = handed.granted
        items = [item for part in handed.items for item in items_of(handed.partition, *part, granted.attempts)]
        if self._handlers.default is None:
            items = self._known(hold, items)
        if items:
            self._shelf.put(self.source, list(zip(repeat(hold), items)))
            self._places.wake(-(-len(items) // (self._settings.batch or 1)))

    def _known(self, hold: Hold, items: Sequence[Item]) -> list[Item]:
        """Those that have a handler here; the others go back."""
        known = [item for item in items if self._handlers.find(item.kind) is not None]
        if len(known) < len(items):
            delay = self._strangers.delay(len(items) - len(known), self.source.now())
            verdict = Verdict("returned", delay, "no handler for its kind here")
            for item in items:
                if self._handlers.find(item.kind) is None:
                    self._settler.settle((hold, item), verdict)
            self._leased -= len(items) - len(known)
        return known
