"""The metrics of a broker: the answer to `ReadMetrics`.

Owns: `read_metrics`. It reads only what is in memory: no backlog is searched, no item is read and no closed partition
is opened. A queue is read between turns, so that everything it has answered is counted. It does not wait for partitions
in I/O: their figures are read while another thread syncs or deletes files, which changes no item. If retention deletes
buried items in the same microseconds, these may be counted as leased once.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.broker.inbox import InboxProcessor
from penstock.logs.store import Store
from penstock.loop.histogram import LEASE_BOUNDS, REQUEST_BOUNDS, SYNC_BOUNDS, Histogram
from penstock.loop.loop import Loop
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.tally import BURIED, OUTCOMES
from penstock.loop.turn import QueueEngine
from penstock.reports import BrokerMetrics, ClientDescription, Durations, Latency, PartitionMetrics, QueueMetrics
from penstock.rules.lanes import Rank
from penstock.rules.state import Counts, State
from penstock.words.clock import SECOND

_STATES = ("ready", "scheduled", "leased", "buried", "moving")
"""The states of items that a queue still has work with."""


class MeasuredBroker(Protocol):
    """What the metrics need of a broker."""

    store: Store
    inbox: InboxProcessor
    opened_at: int
    min_free_bytes: int

    def loops(self) -> Sequence[Loop]: ...
    def list_clients(self) -> list[ClientDescription]: ...


def read_metrics(broker: MeasuredBroker) -> BrokerMetrics:
    """The metrics of every queue, and of the broker."""
    return BrokerMetrics(
        queues={loop.engine.name: _queue(loop, broker.inbox) for loop in broker.loops()},
        opened_wall=broker.opened_at,
        clients=len(broker.list_clients()),
        free_bytes=broker.store.free_bytes(),
        min_free_bytes=broker.min_free_bytes,
    )


def _queue(loop: Loop, inbox: InboxProcessor) -> QueueMetrics:
    found: QueueMetrics = loop.run_between_turns(lambda engine: _between_turns(loop, engine, inbox))
    return found


def _between_turns(loop: Loop, engine: QueueEngine, inbox: InboxProcessor) -> QueueMetrics:
    meter, now = loop.meter, engine.clock.read().elapsed
    handles = list(engine.handles.values())
    partitions = [_partition(engine, handle, now) for handle in handles]
    items: dict[str, int] = {}
    for one in partitions:
        for name, count in one.items.items():
            items[name] = items.get(name, 0) + count
    buried = sum(items.get(name, 0) for name in BURIED)
    ended = {outcome: [found for one in handles for found in one.tally.durations_of(outcome)] for outcome in OUTCOMES}
    return QueueMetrics(
        name=engine.name,
        turns=meter.turns,
        requests=dict(meter.requests),
        errors=meter.all_errors(),
        items={**items, "buried": buried} if buried else items,
        latencies={verb: _latency(found) for verb, found in meter.latencies.items()},
        incarnation=engine.incarnation,
        partitions=partitions,
        waiting_leases=sum(not request.cancelled for request in engine.lease_step.waiting),
        waiting_produces=sum(not request.cancelled for request in engine.produce_step.waiting),
        waiting_reads=sum(not request.cancelled for request in engine.waiting_for_items),
        pending_requests=loop.pending,
        request_durations={verb: _durations(found, REQUEST_BOUNDS) for verb, found in meter.latencies.items()},
        lease_durations={outcome: _durations(Histogram(LEASE_BOUNDS).include(found)) for outcome, found in ended.items() if found},
        turn_durations=_durations(meter.turn_durations),
        sync_durations=_durations(Histogram(SYNC_BOUNDS).include(one.tally.sync_durations for one in handles)),
        writes_waiting=max(0, inbox.waiting_writes[engine.incarnation]),
        writes_refused=inbox.refused_writes[engine.incarnation],
        writes_adopted=inbox.adopted_writes[engine.incarnation],
    )


def _latency(found: Histogram) -> Latency:
    p50, p95, p99 = (found.quantile(share) / SECOND for share in (0.5, 0.95, 0.99))
    return Latency(found.total, p50, p95, p99, found.worst / SECOND)


def _durations(found: Histogram, bounds: Sequence[int] | None = None) -> Durations:
    counts = found.counts if bounds is None else found.counts_up_to(bounds)
    return Durations([bound / SECOND for bound in bounds or found.bounds], [*counts], found.sum / SECOND)


# -- partitions ---------------------------------------------------------------------------------------


class _Figures(NamedTuple):
    """What is known of a partition, open or closed; fields of PartitionMetrics."""

    oldest_ready_seconds: float
    held_keys: int
    parked_keys: int
    size_bytes: int
    lost: int
    paused_lease: bool
    paused_produce: bool


def _partition(engine: QueueEngine, handle: PartitionHandle, now: int) -> PartitionMetrics:
    tally = handle.tally
    counts, figures = _figures(handle, handle.elapsed_at(now)) or (None, None)
    return PartitionMetrics(
        partition=handle.number,
        status=_status(engine, handle, counts),
        states={} if counts is None else {name: max(0, getattr(counts, name)) for name in _STATES},
        items=dict(tally.counts),
        failures=tally.failures,
        slow=tally.slow,
        findings=tally.findings,
        written_bytes=tally.written,
        freed_bytes=tally.freed_bytes,
        freed_segments=tally.freed_segments,
        **({} if figures is None else figures._asdict()),
    )


def _figures(handle: PartitionHandle, elapsed: int) -> tuple[Counts, _Figures] | None:
    """The counts and figures of a partition; None when they are not known before it is opened, or reopened."""
    partition, known = handle.partition, handle.summary
    if partition is not None:
        state = partition.state
        if partition.failed:  # asked after the state: while it is reopened, only the new state changes
            return None
        return state.counts, _Figures(
            _oldest(_heads(state), elapsed),
            len(state.keys.by_key),
            len(state.keys.parked),
            partition.size_bytes,
            len(state.lost),
            state.paused_lease,
            state.paused_produce,
        )
    if known is None:
        return None
    return known.counts, _Figures(
        _oldest(known.heads, elapsed),
        known.busy_keys,
        known.parked_keys,
        known.size_bytes,
        known.lost,
        known.paused_lease,
        known.paused_produce,
    )


def _status(engine: QueueEngine, handle: PartitionHandle, counts: Counts | None) -> str:
    if handle.error is not None:
        return "slow" if handle.slow and handle.in_io else "failing"
    if handle.partition is None and (handle.in_io or counts is None):
        return "opening"
    if handle.number in engine.active:
        return "active"
    return "drained" if counts is not None and not (counts.ready or counts.scheduled or counts.leased or counts.moving) else "draining"


def _heads(state: State) -> list[Rank]:
    try:
        return state.lane_heads()
    except LookupError:  # retention, in another thread, has just removed an entry that was to be read
        return []


def _oldest(heads: Iterable[Rank], elapsed: int) -> float:
    return max((elapsed - head.since for head in heads), default=0) / SECOND
