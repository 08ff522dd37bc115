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
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from penstock.api.items import Item
from penstock.loop.requests import Part, Verb
from penstock.operations import SettleItems
from penstock.rules.commands import Settled
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import BrokerClosed, LeaseLost, PenstockError, QueueNotFound, Refused
from penstock.worker.bell import Bell
from penstock.worker.holding import Hold, Pair, Source
from penstock.worker.tally import Tally
from penstock.worker.verdicts import DONE, Outcome, Verdict, reason_of

MUCH = 2_000 / SECOND
"""When more items than this come to their end in a microsecond, they are gathered for a while:"""
GATHER = 4 * MILLISECOND
PATIENCE = 25 * MILLISECOND
"""How long a finished item may wait for the others of its lease, while there is much."""
FIRST_PAUSE, LAST_PAUSE = 50 * MILLISECOND, 5 * SECOND
"""Before a refused request is sent again."""
AT_ONCE = 500
"""Requests in flight."""
VERBS: dict[Outcome, Verb] = {"completed": "complete", "retried": "retry", "buried": "bury", "snoozed": "retry", "returned": "retry"}
_log = logging.getLogger("penstock.worker")


class Claim:
    """Items of one lease that are to be settled alike."""

    __slots__ = ("doubted", "due", "hold", "items", "pause", "request", "verdict")

    def __init__(self, hold: Hold, items: list[Item], verdict: Verdict, request: bytes | None) -> None:
        self.hold = hold
        self.items = items
        self.verdict = verdict
        self.request = request
        """Sent along, so that repeating it does nothing twice. Completing needs none."""
        self.pause = FIRST_PAUSE
        self.due = 0
        self.doubted = False
        """The queue said that the lease was lost, for the first time."""

    def part(self) -> Part:
        hold, items = self.hold, self.items
        whole = len(items) == hold.left and not hold.torn
        return Part(hold.partition, hold.lease, None if whole else sorted([item.offset for item in items]))


class Boss(Protocol):
    """Whom a settler tells what others must know."""

    def fail(self, error: Exception) -> None:
        """The queue cannot be reached any more."""

    def late(self, hold: Hold, items: list[Item]) -> None:
        """These were not held any more when they were to be settled."""

    def lost(self, hold: Hold) -> None:
        """Nothing of this lease is held any more."""


class Settler:
    """Settles what was leased from one queue."""

    def __init__(self, source: Source, tally: Tally, boss: Boss) -> None:
        self._source = source
        self._tally = tally
        self._boss = boss
        self.bell = Bell()
        self.completed: deque[Pair] = deque()
        """What handlers have done."""
        self.others: deque[tuple[Pair, Verdict]] = deque()
        self.holds: set[Hold] = set()
        """Leases of which something is not settled."""
        self._partial: dict[Hold, list[Item]] = {}
        """Completed, of leases of which more will be in a moment."""
        self._much = False
        self._looked_at = 0
        self._again: list[Claim] = []
        self._prefix = os.urandom(8)
        self._requests = 0
        self._closing = threading.Event()
        self._hurried = False
        self._thread = threading.Thread(target=self._run, name=f"penstock settle {source.name}", daemon=True)

    # -- for those who have something to settle ----------------------------------------------------------

    def complete(self, pair: Pair) -> None:
        self.completed.append(pair)
        if not self.bell.rung:
            self.bell.ring()

    def settle(self, pair: Pair, verdict: Verdict) -> None:
        if verdict is DONE:
            self.completed.append(pair)
        else:
            self.others.append((pair, verdict))
        if not self.bell.rung:
            self.bell.ring()

    def __len__(self) -> int:
        """About how many items wait to be settled."""
        return len(self.completed) + len(self.others)

    # -- its life --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float | None = None) -> bool:
        """Settle what is there, then end; whether it has."""
        self._closing.set()
        self.bell.ring()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def hurry(self) -> None:
        """Whatever is refused from now on is not said again."""
        self._hurried = True
        self.bell.ring()

    def let_go(self) -> None:
        """What is not settled is left to itself: its leases end when their time is over."""
        for hold in list(self.holds):
            hold.let_go()

    def _run(self) -> None:
        try:
            while True:
                self.bell.wait(self._wait_seconds())
                if self._much:
                    self._closing.wait(GATHER / SECOND)
                batches = self._gather()
                if batches:
                    self._send(batches)
                elif self._closing.is_set() and not (self._again or len(self)):
                    return
        except Exception as error:  # whatever it is, the worker must not go on without this thread
            self._boss.fail(error)

    def _wait_seconds(self) -> float | None:
        """Until something has to be said although nobody rings."""
        dues = [claim.due for claim in self._again]
        if self._partial:
            dues.append(min(hold.since for hold in self._partial) + PATIENCE)
        if not dues and self._closing.is_set():
            return 0.0
        return max(0.0, (min(dues) - self._source.now()) / SECOND) if dues else None

    # -- what to say -------------------------------------------------------------------------------------

    def _gather(self) -> list[list[Claim]]:
        """Everything that is to be settled now, as claims that one request can make together."""
        now = self._source.now()
        done = self._due(now)
        for hold, items in self._done(now).items():
            done[None].append(Claim(hold, items, DONE, None))
        for verdict, holds in self._others():
            request = self._request_id()
            done[request] = [Claim(hold, items, verdict, request) for hold, items in holds.items()]
        return [claims for claims in done.values() if claims]

    def _due(self, now: int) -> dict[bytes | None, list[Claim]]:
        """What was refused, and may be said again by now."""
        found: dict[bytes | None, list[Claim]] = {None: []}
        if self._again:
            again, self._again = self._again, []
            for claim in again:
                if claim.due <= now or self._hurried:
                    found.setdefault(claim.request, []).append(claim)
                else:
                    self._again.append(claim)
        return found

    def _done(self, now: int) -> dict[Hold, list[Item]]:
        """What is completed, but, when there is much, for leases of which the rest will be in a moment."""
        completed, found = self.completed, self._partial
        count = len(completed)
        for hold, item in [completed.popleft() for _ in range(count)]:
            if hold in found:
                found[hold].append(item)
            else:
                found[hold] = [item]
                hold.since = now
        # an item of a key is settled at once: the next one of its key waits for that
        self._much = count > MUCH * (now - self._looked_at) and not any(hold.keyed for hold in found)
        self._looked_at = now
        self._partial = {}
        if self._much and not self._closing.is_set():
            for hold, items in found.items():
                if len(items) < hold.left and now - hold.since < PATIENCE:
                    self._partial[hold] = items
            for hold in self._partial:
                del found[hold]
        return found

    def _others(self) -> list[tuple[Verdict, dict[Hold, list[Item]]]]:
        """Everything else, by what becomes of it. Follow-ups belong to one item each."""
        others = self.others
        alike: dict[Verdict, dict[Hold, list[Item]]] = defaultdict(lambda: defaultdict(list))
        alone: list[tuple[Verdict, dict[Hold, list[Item]]]] = []
        for (hold, item), verdict in [others.popleft() for _ in range(len(others))]:
            if verdict.then:
                alone.append((verdict, {hold: [item]}))
            else:
                alike[verdict][hold].append(item)
        return [*alike.items(), *alone]

    def _request_id(self) -> bytes:
        self._requests += 1
        return self._prefix + self._requests.to_bytes(8, "big")

    # -- saying it ---------------------------------------------------------------------------------------

    def _send(self, batches: list[list[Claim]]) -> None:
        for start in range(0, len(batches), AT_ONCE):
            portion = batches[start : start + AT_ONCE]
            operations = [self._operation(claims) for claims in portion]
            for claims, answers in zip(portion, self._ask(operations), strict=True):
                for claim, answer in zip(claims, answers, strict=True):
                    self._judge(claim, answer)

    def _operation(self, claims: list[Claim]) -> SettleItems:
        verdict = claims[0].verdict
        return SettleItems(
            queue=self._source.incarnation,
            action=VERBS[verdict.outcome],
            parts=[claim.part() for claim in claims],
            delay=verdict.delay,
            reason=verdict.reason,
            counted=verdict.outcome not in ("snoozed", "returned"),
            then=verdict.then,
            request=claims[0].request,
        )

    def _ask(self, operations: list[SettleItems]) -> list[list[Settled | Refused]]:
        """The answers. All but the last are put into the inbox, so that the last one's turn takes them along."""
        told: SimpleQueue[None] = SimpleQueue()
        answers: dict[int, Any] = {}

        def done(place: int, answer: Any) -> None:
            answers[place] = answer
            told.put(None)

        for place, operation in enumerate(operations[:-1]):
            try:
                self._source.submit(operation, partial(done, place))
            except PenstockError as error:
                answers[place] = error
        answers[len(operations) - 1] = self._source.settle(operations[-1])
        while len(answers) < len(operations):
            told.get()
        for place, operation in enumerate(operations):
            if isinstance(answers[place], PenstockError):
                answers[place] = [Refused.of(answers[place])] * len(operation.parts)
        return [answers[place] for place in range(len(operations))]

    # -- the answer --------------------------------------------------------------------------------------

    def _judge(self, claim: Claim, answer: Settled | Refused) -> None:
        hold, items = claim.hold, claim.items
        error = None if isinstance(answer, Settled) else answer.error()
        if isinstance(answer, Settled):
            refused = set(answer.refused)
            late = [item for item in items if item.offset in refused] if refused else []
            self._over(hold, claim.verdict.outcome, len(items) - len(late))
        elif isinstance(error, LeaseLost) and not claim.doubted:
            # It may have been asked just when the lease was to be extended; the next turn does that first.
            claim.doubted = True
            self._again.append(claim)
            return
        elif isinstance(error, LeaseLost):
            late = items
            self._boss.lost(hold)
        elif error is not None and claim.verdict.then and not error.retryable and not isinstance(error, BrokerClosed):
            self.settle_all(hold, items, Verdict("retried", SECOND, f"its follow-ups could not be made: {reason_of(error)}"))
            return
        elif isinstance(error, BrokerClosed | QueueNotFound):
            raise error
        else:
            assert error is not None
            self._later(claim, error)
            return
        if late:
            self._over(hold, "late", len(late))
            self._boss.late(hold, late)

    def forget(self, hold: Hold) -> None:
        """Nothing of this lease is held any more."""
        self._over(hold, "late", hold.left)

    def settle_all(self, hold: Hold, items: list[Item], verdict: Verdict) -> None:
        for item in items:
            self.settle((hold, item), verdict)

    def _later(self, claim: Claim, error: PenstockError) -> None:
        """Say it again in a while, unless that cannot help."""
        if not error.retryable or self._hurried:
            _log.error("%d items of queue %r cannot be settled: %s", len(claim.items), self._source.name, error)
            claim.hold.torn = True
            self._over(claim.hold, "late", len(claim.items))
            self._boss.late(claim.hold, claim.items)
            return
        _log.warning("%d items of queue %r wait to be settled: %s", len(claim.items), self._source.name, error)
        claim.due = self._source.now() + claim.pause
        claim.pause = min(2 * claim.pause, LAST_PAUSE)
        self._again.append(claim)

    def _over(self, hold: Hold, outcome: str, count: int) -> None:
        hold.left -= count
        if hold.left <= 0:
            self.holds.discard(hold)
            hold.let_go()
        self._tally.add(outcome, count, self._source.now())
