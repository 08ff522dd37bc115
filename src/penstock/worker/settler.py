"""The settler: it tells the queue the outcomes of handled items.

Owns: `Settler`, one thread per queue. It takes all outcomes there are, sends them in as few requests as possible, and then takes those
that came meanwhile. So many items share a commit, and a single item does not wait. At a high rate it waits a moment to gather more.
Rules: a lease whose items are all completed is settled as a whole. A request that storage fails is repeated with the same request id
until it succeeds or the lease is lost; other partitions do not wait for it. Items that the queue refuses are late: they are reported
and dropped.
"""

import logging
import os
import threading
from collections import defaultdict, deque
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from penstock.api.items import Item
from penstock.loop.requests import SettleAction, SettlePart
from penstock.operations import SettleItems
from penstock.rules.commands import Settled
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import BrokerClosed, LeaseLost, PenstockError, QueueNotFound, Refused
from penstock.worker.buffer import LeasedItem, SourceQueue, WorkerLease
from penstock.worker.outcomes import COMPLETED, Outcome, OutcomeName, failure_reason
from penstock.worker.stats import WorkerCounters
from penstock.worker.wakeup import WakeUp

BUSY_RATE = 2_000 / SECOND
"""Items a microsecond. Above this rate the settler gathers for GATHER before each round."""
GATHER = 4 * MILLISECOND
MAX_WAIT = 25 * MILLISECOND
"""At a high rate: how long a completed item may wait for the others of its lease."""
FIRST_PAUSE, LAST_PAUSE = 50 * MILLISECOND, 5 * SECOND
"""How long to wait before a failed request is repeated; doubled each time."""
MAX_IN_FLIGHT = 500
"""Requests that wait for an answer at the same time."""
VERBS: dict[OutcomeName, SettleAction] = {
    "completed": "complete",
    "retried": "retry",
    "buried": "bury",
    "snoozed": "retry",
    "returned": "retry",
}
_log = logging.getLogger("penstock.worker")


class Settlement:
    """Items of one lease that have the same outcome."""

    __slots__ = ("items", "lease", "lease_lost_once", "outcome", "pause", "repeat_at", "request_id")

    def __init__(self, lease: WorkerLease, items: list[Item], outcome: Outcome, request: bytes | None) -> None:
        self.lease = lease
        self.items = items
        self.outcome = outcome
        self.request_id = request
        """The request id, which makes a repetition harmless. Completing needs none."""
        self.pause = FIRST_PAUSE
        self.repeat_at = 0
        """When to repeat it."""
        self.lease_lost_once = False
        """The queue has answered once that the lease was lost."""

    def part(self) -> SettlePart:
        lease, items = self.lease, self.items
        whole = len(items) == lease.unsettled and not lease.has_abandoned_items
        return SettlePart(lease.partition, lease.number, None if whole else sorted([item.offset for item in items]))


class SettlerListener(Protocol):
    """What a settler calls when a lease or the queue is lost."""

    def fail(self, error: Exception) -> None:
        """The queue cannot be reached any more."""

    def report_late(self, lease: WorkerLease, items: list[Item]) -> None:
        """The lease of these items had ended before they were settled."""

    def lease_lost(self, lease: WorkerLease) -> None:
        """The whole lease has ended."""


class Settler:
    """Settles the items of one queue."""

    def __init__(self, source: SourceQueue, counters: WorkerCounters, listener: SettlerListener) -> None:
        self._source = source
        self._counters = counters
        self._listener = listener
        self.wakeup = WakeUp()
        self.completed: deque[LeasedItem] = deque()
        """Completed items that are not settled yet."""
        self.not_completed: deque[tuple[LeasedItem, Outcome]] = deque()
        """Items with other outcomes that are not settled yet."""
        self.leases: set[WorkerLease] = set()
        """Leases with unsettled items."""
        self._partial: dict[WorkerLease, list[Item]] = {}
        """Completed items that wait for the others of their lease."""
        self._busy = False
        """Items come at a high rate."""
        self._gathered_at = 0
        self._repeats: list[Settlement] = []
        """Those whose request failed and will be repeated."""
        self._prefix = os.urandom(8)
        self._requests = 0
        self._closing = threading.Event()
        self._hurried = False
        self._thread = threading.Thread(target=self._run, name=f"penstock settle {source.name}", daemon=True)

    # -- from handlers -----------------------------------------------------------------------------------

    def complete(self, pair: LeasedItem) -> None:
        self.completed.append(pair)
        if not self.wakeup.is_set:
            self.wakeup.set()

    def settle(self, pair: LeasedItem, outcome: Outcome) -> None:
        if outcome is COMPLETED:
            self.completed.append(pair)
        else:
            self.not_completed.append((pair, outcome))
        if not self.wakeup.is_set:
            self.wakeup.set()

    def __len__(self) -> int:
        """About how many items wait to be settled."""
        return len(self.completed) + len(self.not_completed)

    # -- the thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float | None = None) -> bool:
        """Settle what is there, then end. Waits up to so many seconds; gives whether it has ended."""
        self._closing.set()
        self.wakeup.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop_repeating(self) -> None:
        """Repeat no request that fails from now on."""
        self._hurried = True
        self.wakeup.set()

    def let_go(self) -> None:
        """Stop extending the leases of unsettled items, so that they expire."""
        for lease in list(self.leases):
            lease.let_go()

    def _run(self) -> None:
        try:
            while True:
                self.wakeup.wait(self._wait_seconds())
                if self._busy:
                    self._closing.wait(GATHER / SECOND)
                batches = self._gather()
                if batches:
                    self._send(batches)
                elif self._closing.is_set() and not (self._repeats or len(self)):
                    return
        except Exception as error:  # whatever it is, the worker must not go on without this thread
            self._listener.fail(error)

    def _wait_seconds(self) -> float | None:
        """How long to wait if no more outcomes come; None is for ever."""
        dues = [settlement.repeat_at for settlement in self._repeats]
        if self._partial:
            dues.append(min(lease.first_completed_at for lease in self._partial) + MAX_WAIT)
        if not dues and self._closing.is_set():
            return 0.0
        return max(0.0, (min(dues) - self._source.now()) / SECOND) if dues else None

    # -- what to settle ----------------------------------------------------------------------------------

    def _gather(self) -> list[list[Settlement]]:
        """All that is to be settled now; each inner list goes into one request."""
        now = self._source.now()
        done = self._due(now)
        for lease, items in self._take_completed(now).items():
            done[None].append(Settlement(lease, items, COMPLETED, None))
        for outcome, leases in self._take_others():
            request = self._request_id()
            done[request] = [Settlement(lease, items, outcome, request) for lease, items in leases.items()]
        return [settlements for settlements in done.values() if settlements]

    def _due(self, now: int) -> dict[bytes | None, list[Settlement]]:
        """Failed settlements that are due to be repeated, by request id."""
        found: dict[bytes | None, list[Settlement]] = {None: []}
        if self._repeats:
            repeats, self._repeats = self._repeats, []
            for settlement in repeats:
                if settlement.repeat_at <= now or self._hurried:
                    found.setdefault(settlement.request_id, []).append(settlement)
                else:
                    self._repeats.append(settlement)
        return found

    def _take_completed(self, now: int) -> dict[WorkerLease, list[Item]]:
        """Completed items by lease. At a high rate those are left out whose lease will be complete in a moment."""
        completed, found = self.completed, self._partial
        count = len(completed)
        for lease, item in [completed.popleft() for _ in range(count)]:
            if lease in found:
                found[lease].append(item)
            else:
                found[lease] = [item]
                lease.first_completed_at = now
        # an item of a key is settled at once: the next one of its key waits for that
        self._busy = count > BUSY_RATE * (now - self._gathered_at) and not any(lease.keyed for lease in found)
        self._gathered_at = now
        self._partial = {}
        if self._busy and not self._closing.is_set():
            for lease, items in found.items():
                if len(items) < lease.unsettled and now - lease.first_completed_at < MAX_WAIT:
                    self._partial[lease] = items
            for lease in self._partial:
                del found[lease]
        return found

    def _take_others(self) -> list[tuple[Outcome, dict[WorkerLease, list[Item]]]]:
        """Items with other outcomes, by outcome and lease. Each item with follow-ups is settled alone."""
        others = self.not_completed
        alike: dict[Outcome, dict[WorkerLease, list[Item]]] = defaultdict(lambda: defaultdict(list))
        alone: list[tuple[Outcome, dict[WorkerLease, list[Item]]]] = []
        for (lease, item), outcome in [others.popleft() for _ in range(len(others))]:
            if outcome.follow_ups:
                alone.append((outcome, {lease: [item]}))
            else:
                alike[outcome][lease].append(item)
        return [*alike.items(), *alone]

    def _request_id(self) -> bytes:
        self._requests += 1
        return self._prefix + self._requests.to_bytes(8, "big")

    # -- requests ----------------------------------------------------------------------------------------

    def _send(self, batches: list[list[Settlement]]) -> None:
        for start in range(0, len(batches), MAX_IN_FLIGHT):
            portion = batches[start : start + MAX_IN_FLIGHT]
            operations = [self._operation(settlements) for settlements in portion]
            for settlements, answers in zip(portion, self._ask(operations), strict=True):
                for settlement, answer in zip(settlements, answers, strict=True):
                    self._handle_answer(settlement, answer)

    def _operation(self, settlements: list[Settlement]) -> SettleItems:
        outcome = settlements[0].outcome
        return SettleItems(
            queue=self._source.incarnation,
            action=VERBS[outcome.name],
            parts=[settlement.part() for settlement in settlements],
            delay=outcome.delay,
            reason=outcome.reason,
            counted=outcome.name not in ("snoozed", "returned"),
            then=outcome.follow_ups,
            request=settlements[0].request_id,
        )

    def _ask(self, operations: list[SettleItems]) -> list[list[Settled | Refused]]:
        """Send the operations and wait for all answers. All but the last are submitted, so that the turn of the last executes them too."""
        answered: SimpleQueue[None] = SimpleQueue()
        answers: dict[int, Any] = {}

        def done(place: int, answer: Any) -> None:
            answers[place] = answer
            answered.put(None)

        for place, operation in enumerate(operations[:-1]):
            try:
                self._source.submit(operation, partial(done, place))
            except PenstockError as error:
                answers[place] = error
        answers[len(operations) - 1] = self._source.settle(operations[-1])
        while len(answers) < len(operations):
            answered.get()
        for place, operation in enumerate(operations):
            if isinstance(answers[place], PenstockError):
                answers[place] = [Refused.of(answers[place])] * len(operation.parts)
        return [answers[place] for place in range(len(operations))]

    # -- answers -----------------------------------------------------------------------------------------

    def _handle_answer(self, settlement: Settlement, answer: Settled | Refused) -> None:
        lease, items = settlement.lease, settlement.items
        error = None if isinstance(answer, Settled) else answer.error()
        if isinstance(answer, Settled):
            refused = set(answer.refused)
            late = [item for item in items if item.offset in refused] if refused else []
            self._count(lease, settlement.outcome.name, len(items) - len(late))
        elif isinstance(error, LeaseLost) and not settlement.lease_lost_once:
            # The request may have come just before the broker extended the lease; the next turn extends it first.
            settlement.lease_lost_once = True
            self._repeats.append(settlement)
            return
        elif isinstance(error, LeaseLost):
            late = items
            self._listener.lease_lost(lease)
        elif error is not None and settlement.outcome.follow_ups and not error.retryable and not isinstance(error, BrokerClosed):
            self.settle_all(lease, items, Outcome("retried", SECOND, f"its follow-ups could not be made: {failure_reason(error)}"))
            return
        elif isinstance(error, BrokerClosed | QueueNotFound):
            raise error
        else:
            assert error is not None
            self._repeat_later(settlement, error)
            return
        if late:
            self._count(lease, "late", len(late))
            self._listener.report_late(lease, late)

    def discard_lease(self, lease: WorkerLease) -> None:
        """The lease had ended before its items were handled."""
        self._count(lease, "late", lease.unsettled)

    def settle_all(self, lease: WorkerLease, items: list[Item], outcome: Outcome) -> None:
        for item in items:
            self.settle((lease, item), outcome)

    def _repeat_later(self, settlement: Settlement, error: PenstockError) -> None:
        """Repeat a failed request after a pause, or give its items up if repeating cannot help."""
        if not error.retryable or self._hurried:
            _log.error("%d items of queue %r cannot be settled: %s", len(settlement.items), self._source.name, error)
            settlement.lease.has_abandoned_items = True
            self._count(settlement.lease, "late", len(settlement.items))
            self._listener.report_late(settlement.lease, settlement.items)
            return
        _log.warning("%d items of queue %r wait to be settled: %s", len(settlement.items), self._source.name, error)
        settlement.repeat_at = self._source.now() + settlement.pause
        settlement.pause = min(2 * settlement.pause, LAST_PAUSE)
        self._repeats.append(settlement)

    def _count(self, lease: WorkerLease, outcome: str, count: int) -> None:
        lease.unsettled -= count
        if lease.unsettled <= 0:
            self.leases.discard(lease)
            lease.let_go()
        self._counters.add(outcome, count, self._source.now())
