"""The settler: it sends the outcomes of handled items to the queue.

Owns: `Settler`, one thread per queue. In each round it takes all outcomes that have come and sends them in as few
requests as possible. So many items share a commit, and a single item does not wait. At a high rate it waits a moment
before each round, to gather more.
Rules: a lease whose items are all completed is settled as a whole. A request that fails because of storage is repeated
with the same request id until it succeeds or the lease is lost; other partitions do not wait for it. Items that the
queue refuses are late: they are reported and not settled.
"""

import logging
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from penstock.api.items import Item, stored_headers
from penstock.api.traces import active_tracer
from penstock.loop.requests import SettleAction, SettlePart
from penstock.operations import SettleItems
from penstock.rules.commands import Settled
from penstock.words.clock import MILLISECOND, SECOND
from penstock.words.errors import BrokerClosed, LeaseLost, PenstockError, QueueNotFound, Refused
from penstock.words.logs import log_fields
from penstock.worker.buffer import LeasedItem, SourceQueue, WorkerLease
from penstock.worker.outcomes import COMPLETED, Outcome, OutcomeName, expected_outcome, failure_reason
from penstock.worker.stats import WorkerCounters
from penstock.worker.wakeup import WakeUp

if TYPE_CHECKING:
    from penstock.api.spans import TracedItem

BUSY_RATE = 2_000 / SECOND
"""Items per microsecond. Above this rate the settler waits for GATHER before each round."""
GATHER = 4 * MILLISECOND
MAX_WAIT = 25 * MILLISECOND
"""At a high rate: how long a completed item may wait for the other items of its lease."""
FIRST_PAUSE, LAST_PAUSE = 50 * MILLISECOND, 5 * SECOND
"""How long to wait before a failed request is repeated; doubled after each failure."""
MAX_IN_FLIGHT = 500
"""How many requests may wait for an answer at the same time."""
ACTIONS: dict[OutcomeName, SettleAction] = {
    "completed": "complete",
    "retried": "retry",
    "buried": "bury",
    "snoozed": "retry",
    "returned": "retry",
}
_log = logging.getLogger("penstock.worker")


class Settlement:
    """Items of one lease with the same outcome."""

    __slots__ = ("items", "later", "lease", "lease_lost_once", "outcome", "pause", "repeat_at", "request_id")

    def __init__(self, lease: WorkerLease, items: list[Item], outcome: Outcome, request_id: bytes | None, later: list[Item]) -> None:
        self.lease = lease
        self.items = items
        self.later = later
        """Later items of their units: the queue returns them together with `items`."""
        self.outcome = outcome
        self.request_id = request_id
        """Makes a repeated request harmless. None for a completion, which needs no id."""
        self.pause = FIRST_PAUSE
        self.repeat_at = 0
        """When to repeat the request."""
        self.lease_lost_once = False
        """The queue has answered once that the lease is lost."""

    def part(self) -> SettlePart:
        lease, items = self.lease, self.items
        whole = len(items) == lease.unsettled and not lease.has_abandoned_items and not self.later
        return SettlePart(lease.partition, lease.number, None if whole else sorted([item.offset for item in items]))

    def traced_items(self) -> "Iterator[TracedItem]":
        """The items with the spans of their handlers' calls; without such a span, with their headers."""
        spans = self.lease.handle_spans
        for item in self.items:
            yield item.partition, item.offset, spans.get(item.offset) or stored_headers(item)


class Settler:
    """Settles the items of one queue.

    fail: called when the queue cannot be reached any more.
    report_late: called when a lease ended before these items were settled.
    lease_lost: called when a whole lease has ended, or may have: returns its items that no handler has.
    """

    def __init__(
        self,
        source: SourceQueue,
        counters: WorkerCounters,
        fail: Callable[[Exception], None],
        report_late: Callable[[WorkerLease, list[Item]], None],
        lease_lost: Callable[[WorkerLease], None],
    ) -> None:
        self._source = source
        self._counters = counters
        self._fail = fail
        self._report_late = report_late
        self.lease_lost = lease_lost
        self.wakeup = WakeUp()
        self.completed: deque[LeasedItem] = deque()
        """Completed items that are not settled yet."""
        self.not_completed: deque[tuple[LeasedItem, Outcome, Sequence[Item]]] = deque()
        """Items with other outcomes that are not settled yet, each with the later items of its unit."""
        self.leases: set[WorkerLease] = set()
        """Leases with unsettled items."""
        self._partial: dict[WorkerLease, list[Item]] = {}
        """Completed items that wait for the other items of their lease."""
        self._busy = False
        """Whether items come at a high rate."""
        self._gathered_at = 0
        self._repeats: list[Settlement] = []
        """Settlements whose request failed and will be repeated."""
        self._prefix = os.urandom(8)
        self._requests = 0
        self._closing = threading.Event()
        self._repeating_stopped = False
        self._thread = threading.Thread(target=self._run, name=f"penstock settle {source.name}", daemon=True)

    # -- called by handlers ------------------------------------------------------------------------------

    def settle(self, pair: LeasedItem, outcome: Outcome, later: Sequence[Item] = ()) -> None:
        """Settle an item in the next round. If it failed, the queue returns the later items of its unit with it."""
        if outcome is COMPLETED:
            self.completed.append(pair)
        else:
            self.not_completed.append((pair, outcome, later))
        if not self.wakeup.is_set:
            self.wakeup.set()

    def __len__(self) -> int:
        """About how many items wait to be settled."""
        return len(self.completed) + len(self.not_completed)

    # -- the thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float | None = None) -> bool:
        """End the thread when all outcomes are settled. Waits up to this many seconds; gives whether it has ended."""
        self._closing.set()
        self.wakeup.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stop_repeating(self) -> None:
        """Repeat no request that fails from now on."""
        self._repeating_stopped = True
        self.wakeup.set()

    def stop_extending(self) -> None:
        """Stop extending the leases of unsettled items, so that they expire."""
        for lease in list(self.leases):
            lease.stop_extending()

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
        except Exception as error:  # the worker cannot continue without this thread, whatever the error is
            self._fail(error)

    def _wait_seconds(self) -> float | None:
        """How long to wait if no more outcomes come; None is without limit."""
        times = [settlement.repeat_at for settlement in self._repeats]
        if self._partial:
            times.append(min(lease.first_completed_at for lease in self._partial) + MAX_WAIT)
        if not times and self._closing.is_set():
            return 0.0
        return max(0.0, (min(times) - self._source.now()) / SECOND) if times else None

    # -- settlements -------------------------------------------------------------------------------------

    def _gather(self) -> list[list[Settlement]]:
        """The settlements of this round; each inner list becomes one request."""
        now = self._source.now()
        by_request = self._take_repeats(now)
        not_completed = self._take_not_completed()  # first: before an item of a unit fails, earlier ones are completed
        for lease, items in self._take_completed(now).items():
            by_request[None].append(Settlement(lease, items, COMPLETED, None, []))
        for outcome, leases in not_completed:
            request_id = self._next_request_id()
            by_request[request_id] = [Settlement(lease, items, outcome, request_id, later) for lease, (items, later) in leases.items()]
        return [settlements for settlements in by_request.values() if settlements]

    def _take_repeats(self, now: int) -> dict[bytes | None, list[Settlement]]:
        """The failed settlements to repeat now, by request id. Completions have no id: their key is None."""
        found: dict[bytes | None, list[Settlement]] = {None: []}
        if self._repeats:
            repeats, self._repeats = self._repeats, []
            for settlement in repeats:
                if settlement.repeat_at <= now or self._repeating_stopped:
                    found.setdefault(settlement.request_id, []).append(settlement)
                else:
                    self._repeats.append(settlement)
        return found

    def _take_completed(self, now: int) -> dict[WorkerLease, list[Item]]:
        """Completed items by lease. At a high rate, items whose lease will soon be complete wait for the next round."""
        completed, found = self.completed, self._partial
        count = len(completed)
        for lease, item in [completed.popleft() for _ in range(count)]:
            if lease in found:
                found[lease].append(item)
            else:
                found[lease] = [item]
                lease.first_completed_at = now
        # An item with a key is settled at once, because the next item of the key waits for that.
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

    def _take_not_completed(self) -> list[tuple[Outcome, dict[WorkerLease, tuple[list[Item], list[Item]]]]]:
        """Items with other outcomes and the later ones of their units, by outcome and lease.

        Each item with follow-ups gets a request of its own.
        """
        waiting = self.not_completed
        grouped: dict[Outcome, dict[WorkerLease, tuple[list[Item], list[Item]]]] = defaultdict(lambda: defaultdict(lambda: ([], [])))
        single: list[tuple[Outcome, dict[WorkerLease, tuple[list[Item], list[Item]]]]] = []
        for (lease, item), outcome, later in [waiting.popleft() for _ in range(len(waiting))]:
            if outcome.follow_ups:
                single.append((outcome, {lease: ([item], [])}))
            else:
                grouped[outcome][lease][0].append(item)
                grouped[outcome][lease][1].extend(later)
        return [*grouped.items(), *single]

    def _next_request_id(self) -> bytes:
        self._requests += 1
        return self._prefix + self._requests.to_bytes(8, "big")

    # -- requests ----------------------------------------------------------------------------------------

    def _send(self, batches: list[list[Settlement]]) -> None:
        for start in range(0, len(batches), MAX_IN_FLIGHT):
            portion = batches[start : start + MAX_IN_FLIGHT]
            operations = [self._operation(settlements) for settlements in portion]
            for settlements, answers in zip(portion, self._execute_traced(portion, operations), strict=True):
                for settlement, answer in zip(settlements, answers, strict=True):
                    self._handle_answer(settlement, answer)

    def _operation(self, settlements: list[Settlement]) -> SettleItems:
        outcome = settlements[0].outcome
        return SettleItems(
            queue=self._source.incarnation,
            action=ACTIONS[outcome.name],
            parts=[settlement.part() for settlement in settlements],
            delay=outcome.delay,
            reason=outcome.reason,
            counted=outcome.name not in ("snoozed", "returned"),
            then=outcome.follow_ups,
            request=settlements[0].request_id,
        )

    def _execute_traced(self, portion: list[list[Settlement]], operations: list[SettleItems]) -> list[list[Settled | Refused]]:
        """As `_execute`, with a span for each operation in a traced process."""
        tracer = active_tracer()
        if tracer is None:
            return self._execute(operations)
        spans = [
            tracer.settle(self._source.name, operation.action, [item for settlement in settlements for item in settlement.traced_items()])
            for settlements, operation in zip(portion, operations, strict=True)
        ]
        answers = self._execute(operations)
        for span, parts in zip(spans, answers, strict=True):
            refused = next((part for part in parts if isinstance(part, Refused)), None)
            if refused is not None:
                span.record_error(refused.code, refused.message)
            span.end()
        return answers

    def _execute(self, operations: list[SettleItems]) -> list[list[Settled | Refused]]:
        """Execute the operations and wait for all answers.

        All but the last are only submitted, so that the turn that executes the last one executes them too.
        """
        answered: SimpleQueue[None] = SimpleQueue()
        answers: dict[int, Any] = {}

        def done(index: int, answer: Any) -> None:
            answers[index] = answer
            answered.put(None)

        for index, operation in enumerate(operations[:-1]):
            try:
                self._source.submit(operation, partial(done, index))
            except PenstockError as error:
                answers[index] = error
        answers[len(operations) - 1] = self._source.settle(operations[-1])
        while len(answers) < len(operations):
            answered.get()
        for index, operation in enumerate(operations):
            if isinstance(answers[index], PenstockError):
                answers[index] = [Refused.of(answers[index])] * len(operation.parts)
        return [answers[index] for index in range(len(operations))]

    # -- answers -----------------------------------------------------------------------------------------

    def _handle_answer(self, settlement: Settlement, answer: Settled | Refused) -> None:
        lease, items, later = settlement.lease, settlement.items, settlement.later
        error = None if isinstance(answer, Settled) else answer.error()
        if isinstance(answer, Settled):
            refused = set(answer.refused)
            late = [item for item in items if item.offset in refused] if refused else []
            if answer.early:  # an earlier item of its unit is not settled yet
                self._settle_again(settlement, set(answer.early))
                later = settlement.later
            self._count(lease, settlement.outcome.name, len(items) - len(late) - len(answer.early) - len(answer.buried))
            self._count(lease, "returned", len(later))
            if answer.buried:
                self._count_buried(settlement, answer.buried)
        elif isinstance(error, LeaseLost) and not settlement.lease_lost_once:
            # The request may have arrived just before the broker extended the lease. The next turn extends it first.
            settlement.lease_lost_once = True
            self._repeats.append(settlement)
            return
        elif isinstance(error, LeaseLost):
            late = [*items, *later]
            self.lease_lost(lease)
        elif error is not None and settlement.outcome.follow_ups and not error.retryable and not isinstance(error, BrokerClosed):
            text = "the follow-ups of an item of queue %r could not be made, the item is retried if it is not completed: %s"
            _log.error(text, self._source.name, error, extra=self._log_fields(settlement))
            outcome = Outcome("retried", SECOND, f"its follow-ups could not be made: {failure_reason(error)}")
            for item in items:
                self.settle((lease, item), outcome)
            return
        elif isinstance(error, BrokerClosed | QueueNotFound):
            raise error
        else:
            assert error is not None
            self._repeat_later(settlement, error)
            return
        if late:
            self._count(lease, "late", len(late))
            self._report_late(lease, late)

    def _settle_again(self, settlement: Settlement, early: set[int]) -> None:
        """Settle items in the next round that came before an earlier item of their unit."""
        keys = {item.key_bytes for item in settlement.items if item.offset in early}
        for item in settlement.items:
            if item.offset in early:
                later = [other for other in settlement.later if other.key_bytes == item.key_bytes]
                self.settle((settlement.lease, item), settlement.outcome, later)
        settlement.later = [item for item in settlement.later if item.key_bytes not in keys]

    def discard_lease(self, lease: WorkerLease) -> None:
        """Count the items of a lease that ended before they were handled as late."""
        self._count(lease, "late", lease.unsettled)

    def _count_buried(self, settlement: Settlement, buried: list[int]) -> None:
        """Count items that were to be retried and were buried instead, and log those for which nobody expected it."""
        self._count(settlement.lease, "buried", len(buried))
        offsets = set(buried)
        for item in settlement.items:
            if item.offset in offsets and expected_outcome(item, settlement.outcome) != "buried":
                text = "item %s of queue %r is not %s but buried: its ttl is over, or max_attempts was lowered"
                about = log_fields(queue=item.queue, partition=item.partition, item_id=item.id)
                _log.warning(text, item.id, item.queue, settlement.outcome.name, extra=about)

    def _repeat_later(self, settlement: Settlement, error: PenstockError) -> None:
        """Repeat a failed request after a pause, or abandon its items if repeating cannot help."""
        if not error.retryable or self._repeating_stopped:
            text = "%d items of queue %r cannot be settled, their lease expires: %s"
            _log.error(text, len(settlement.items), self._source.name, error, extra=self._log_fields(settlement))
            settlement.lease.has_abandoned_items = True
            abandoned = [*settlement.items, *settlement.later]
            self._count(settlement.lease, "late", len(abandoned))
            self._report_late(settlement.lease, abandoned)
            return
        text = "settling %d items of queue %r failed and is repeated: %s"
        _log.warning(text, len(settlement.items), self._source.name, error, extra=self._log_fields(settlement))
        settlement.repeat_at = self._source.now() + settlement.pause
        settlement.pause = min(2 * settlement.pause, LAST_PAUSE)
        self._repeats.append(settlement)

    def _log_fields(self, settlement: Settlement) -> dict[str, object]:
        return log_fields(queue=self._source.name, partition=settlement.lease.partition)

    def _count(self, lease: WorkerLease, outcome: str, count: int) -> None:
        lease.unsettled -= count
        if lease.unsettled <= 0:
            self.leases.discard(lease)
            lease.stop_extending()
        self._counters.add(outcome, count, self._source.now())
