"""`/metrics`: the figures of the broker and of the server, as Prometheus reads them.

Owns: `MetricsPage`. The number of time series is bounded: queues and partitions beyond a limit are summed up as
"(other)". A queue that has time series of its own keeps them while it exists. The sums of "(other)" never fall, because
Prometheus would take that for a restart and count everything again: when a queue in it is deleted, what it had counted
stays in, and what the others counted since the last time may be missed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from threading import Lock
from typing import NamedTuple

from prometheus_client import ProcessCollector
from prometheus_client.exposition import choose_encoder

from penstock.reports import BrokerMetrics, PartitionMetrics, QueueMetrics
from penstock.server import metric_families as families
from penstock.server.exposition import OTHER, LabelValues, Samples, text_of_metric
from penstock.server.metric_families import FAMILIES, Family
from penstock.server.server_meter import ServerMeter
from penstock.server.server_settings import MetricsSettings as MetricsSettings
from penstock.words.clock import SECOND
from penstock.words.errors import BrokerClosed, OutcomeUnknown, QueueBusy, StorageFailed

MAX_VIEWS = 100
"""How many different groups of prefixes of API keys have sums of their own."""


class MetricsText(NamedTuple):
    """The page, and its content type."""

    body: bytes
    content_type: str


class MetricsPage:
    """Makes the page."""

    def __init__(self, meter: ServerMeter, version: str, settings: MetricsSettings | None = None) -> None:
        """version: of Penstock."""
        self._meter = meter
        self._version = version
        self._settings = settings or MetricsSettings()
        self._process = ProcessCollector(registry=None)
        self._views: dict[Sequence[str], LabelBook] = {}
        self._lock = Lock()

    async def read(self, read: Callable[[], Awaitable[BrokerMetrics]], accept: str = "", prefixes: Sequence[str] = ()) -> MetricsText:
        """The page. read: asks the broker, with `ReadMetrics`. If the broker does not answer, the page says so.

        accept: the header of the request. prefixes: those of the caller's API key, who gets only what is about the
        queues in the broker's answer.
        """
        found: BrokerMetrics | None = None
        try:
            async with asyncio.timeout(self._settings.answer_seconds):
                found = await read()
        except (TimeoutError, BrokerClosed, OutcomeUnknown, QueueBusy, StorageFailed):
            pass  # the page says it: penstock_up is 0
        return await asyncio.to_thread(self.render, found, accept, prefixes)

    def render(self, found: BrokerMetrics | None, accept: str = "", prefixes: Sequence[str] = ()) -> MetricsText:
        """The page from the answer of the broker; None: it did not answer. Any thread may call this."""
        samples = Samples()
        with self._lock:
            if found is not None:
                self._book(tuple(prefixes)).add_queues(samples, found)
        if not prefixes:
            self._add_broker(samples, found)
            self._meter.add_to(samples)
        _, content_type = choose_encoder(accept)
        open_metrics = content_type.startswith("application/openmetrics-text")
        text = samples.text(FAMILIES, self._label_names, open_metrics=open_metrics)
        if not prefixes:
            text += "".join(text_of_metric(metric, open_metrics=open_metrics) for metric in self._process.collect())
        return MetricsText((text + "# EOF\n" if open_metrics else text).encode(), content_type)

    def _book(self, view: Sequence[str]) -> "LabelBook":
        book = self._views.pop(view, None) or LabelBook(self._settings)
        self._views[view] = book  # the last used is the last
        if len(self._views) > MAX_VIEWS:
            del self._views[next(iter(self._views))]
        return book

    def _label_names(self, family: Family) -> Sequence[str]:
        if family.per_partition and not self._settings.partitions:
            return [name for name in family.labels if name != "partition"]
        return family.labels

    def _add_broker(self, samples: Samples, found: BrokerMetrics | None) -> None:
        samples.add(families.UP, (), int(found is not None))
        samples.add(families.BUILD, (self._version,), 1)
        if found is None:
            return
        samples.add(families.OPENED_AT, (), found.opened_wall / SECOND)
        samples.add(families.QUEUES, (), len(found.queues))
        samples.add(families.CLIENTS, (), found.clients)
        samples.add(families.RESERVED, (), found.min_free_bytes)
        for root, size in found.free_bytes.items():
            samples.add(families.FREE, (str(root),), size)


class LabelBook:
    """Which queues have labels of their own, and the sums of the others."""

    def __init__(self, settings: MetricsSettings) -> None:
        self._settings = settings
        self._own: set[str] = set()
        self._sums: dict[tuple[str, LabelValues, int], tuple[float, float]] = {}
        """Number of "(other)" → what it was, and what is added to it so that it never falls."""

    def add_queues(self, samples: Samples, found: BrokerMetrics) -> None:
        """Add the metrics of all queues to the samples."""
        self._own &= found.queues.keys()
        free = self._settings.queues - len(self._own)
        self._own.update([name for name in sorted(found.queues) if name not in self._own][:free])
        for name, queue in sorted(found.queues.items()):
            label = name if name in self._own else OTHER
            _add_queue(samples, label, queue)
            for partition, metrics in self._partition_labels(queue.partitions):
                _add_partition(samples, (label, *partition), metrics)
        samples.map_counters(self._never_falling)

    def _partition_labels(self, found: Sequence[PartitionMetrics]) -> list[tuple[LabelValues, PartitionMetrics]]:
        """The label of each partition; with too many, those that are drained are the first without one."""
        most = self._settings.partitions
        if not most:
            return [((), one) for one in found]
        ranked = sorted(found, key=lambda one: (one.status == "drained", one.partition))
        return [((str(one.partition) if rank < most else OTHER,), one) for rank, one in enumerate(ranked)]

    def _never_falling(self, family: Family, labels: LabelValues, number: int, value: float) -> float:
        if OTHER not in labels:
            return value
        key = family.name, labels, number
        last, added = self._sums.get(key, (0, 0))
        added += max(0, last - value)
        self._sums[key] = value, added
        return value + added


def _add_queue(samples: Samples, label: str, queue: QueueMetrics) -> None:
    one = (label,)
    for status in ("active", "draining", "drained", "opening", "slow", "failing"):
        samples.add(families.PARTITIONS, (label, status), 0)
    for partition in queue.partitions:
        samples.add(families.PARTITIONS, (label, partition.status), 1)
    for verb, count in queue.requests.items():
        samples.add(families.REQUESTS, (label, verb), count)
    for code, count in queue.errors.items():
        samples.add(families.REQUEST_ERRORS, (label, code), count)
    for verb, count in (("lease", queue.waiting_leases), ("produce", queue.waiting_produces), ("watch", queue.waiting_reads)):
        samples.add(families.WAITING, (label, verb), count)
    samples.add(families.PENDING, one, queue.pending_requests)
    samples.add(families.WRITES_WAITING, one, queue.writes_waiting)
    samples.add(families.WRITES_REFUSED, one, queue.writes_refused)
    samples.add(families.WRITES_ADOPTED, one, queue.writes_adopted)
    for verb, found in queue.request_durations.items():
        samples.add_durations(families.REQUEST_DURATIONS, (label, verb), found)
    for outcome, found in queue.lease_durations.items():
        samples.add_durations(families.LEASE_DURATIONS, (label, outcome), found)
    if queue.turn_durations is not None:
        samples.add_durations(families.TURNS, one, queue.turn_durations)
    if queue.sync_durations is not None:
        samples.add_durations(families.SYNCS, one, queue.sync_durations)


def _add_partition(samples: Samples, labels: LabelValues, found: PartitionMetrics) -> None:
    for name, family in families.ITEM_COUNTERS.items():
        samples.add(family, labels, found.items.get(name, 0))
    for name, cause in families.CAUSES.items():
        samples.add(families.ITEMS_BURIED, (*labels, cause), found.items.get(name, 0))
    for family, count in (
        (families.FAILURES, found.failures),
        (families.SLOW, found.slow),
        (families.FINDINGS, found.findings),
        (families.WRITTEN, found.written_bytes),
        (families.FREED_BYTES, found.freed_bytes),
        (families.FREED_SEGMENTS, found.freed_segments),
    ):
        samples.add(family, labels, count)
    if not found.states:  # not known before the partition is opened
        return
    for state, count in found.states.items():
        samples.add(families.ITEMS, (*labels, state), count)
    samples.raise_to(families.OLDEST, labels, found.oldest_ready_seconds)
    for family, count in (
        (families.LOST, found.lost),
        (families.HELD_KEYS, found.held_keys),
        (families.PARKED_KEYS, found.parked_keys),
        (families.LOG_BYTES, found.size_bytes),
    ):
        samples.add(family, labels, count)
    for side, paused in (("lease", found.paused_lease), ("produce", found.paused_produce)):
        samples.raise_to(families.PAUSED, (*labels, side), int(paused))
