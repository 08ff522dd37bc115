"""Settling: what handlers have decided becomes what the queue knows.

Owns: `Settler`, one thread per queue. It takes everything that has come to its end, says it to the queue in as few requests as can be, and
takes what has come meanwhile: so many items share a commit, and a lone one waits for nobody. When there is much, it gathers for a moment.
Rules: a lease whose items are all done is settled with one word. What storage refuses is said again, with the same request id, until
it is done or the lease is lost; other partitions do not wait for that. What the queue refuses is late: told, and dropped.
"""

import logging
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

from penstock.loop.requests import Part, Request, Settle, Verb
from penstock.rules.commands import Settled
from penstock.service.items import Item
from penstock.service.worker.bell import Bell
from penstock.service.worker.holding import Hold, Pair, Source
from penstock.service.worker.tally import Tally
from penstock.service.worker.verdicts import Outcome, Verdict
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import BrokerClosed, LeaseLost, PenstockError, QueueNotFound

TIMEOUT = 30 * SECOND
MUCH = 64
"""From so many at once on, more are waited for:"""
GATHER = 4 * MILLISECOND
PATIENCE = 12 * MILLISECOND
"""How long a finished item may wait for the others of its lease, while there is much."""
FIRST_PAUSE, LAST_PAUSE = 50 * MILLISECOND, 5 * SECOND
"""Before a refused request is sent again."""
AT_ONCE = 500
"""Requests in flight."""
VERBS: dict[Outcome, Verb] = {"completed": "complete", "retried": "retry", "buried": "bury", "snoozed": "retry", "returned": "retry"}
_log = logging.getLogger("penstock.worker")


class Claim:
    """Items of one lease that are to be settled alike."""

    __slots__ = ("due", "hold", "items", "pause", "request", "verdict")

    def __init__(self, hold: Hold, items: list[Item], verdict: Verdict, request: bytes | None) -> None:
        self.hold = hold
        self.items = items
        self.verdict = verdict
        self.request = request
        """Sent along, so that repeating it does nothing twice. Completing needs none."""
        self.pause = 0
        self.due = 0

    def part(self) -> Part:
        hold, items = self.hold, self.items
        return Part(hold.partition, hold.lease, None if len(items) == hold.left else [item.offset for item in items])


class Settler:
    """Settles what was leased from one queue."""

    def __init__(self, source: Source, tally: Tally, failed: Callable[[PenstockError], None], late: Callable[[Pair], None]) -> None:
        self._source = source
        self._tally = tally
        self._failed = failed
        self._late = late
        self.bell = Bell()
        self.completed: deque[Pair] = deque()
        """What handlers have done; whoever adds something rings the bell."""
        self.others: deque[tuple[Pair, Verdict]] = deque()
        self._partial: dict[Hold, list[Item]] = {}
        """Completed, of leases of which more will be in a moment."""
        self._partial_since = 0
        self._again: list[Claim] = []
        self._prefix = os.urandom(8)
        self._requests = 0
        self._closing = False
        self._hurried = False
        self._thread = threading.Thread(target=self._run, name=f"penstock settle {source.name}", daemon=True)

    # -- for those who have something to settle --------------------------------------------------------

    def complete(self, pair: Pair) -> None:
        self.completed.append(pair)
        if not self.bell.rung:
            self.bell.ring()

    def settle(self, pair: Pair, verdict: Verdict) -> None:
        if verdict.outcome == "completed" and not verdict.then:
            self.completed.append(pair)
        else:
            self.others.append((pair, verdict))
        self.bell.ring()

    def __len__(self) -> int:
        """About how many items wait to be settled."""
        return len(self.completed) + len(self.others)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float | None = None) -> bool:
        """Settle what is there, then end; whether that was done in time."""
        self._closing = True
        self.bell.ring()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Say nothing again that was refused."""
        self._hurried = True
        self.bell.ring()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                self.bell.wait(self._wait_seconds())
                if len(self.completed) >= MUCH and not self._closing:
                    self.bell.wait(GATHER / SECOND)
                claims = self._gather()
                if claims:
                    self._send(claims)
                elif self._closing and not (self._again or self._partial or self):
                    return
                if self or self._partial:
                    self.bell.ring()
        except PenstockError as error:
            self._failed(error)

    def _wait_seconds(self) -> float | None:
        if not self._again:
            return None
        due = min(claim.due for claim in self._again)
        return max(0.0, (due - self._source.now()) / SECOND)
