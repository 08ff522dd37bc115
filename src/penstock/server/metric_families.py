"""The metrics that the server exposes to Prometheus: their names, types, labels and meanings.

Owns: `FAMILIES`, from which the table in docs/metrics.md is made (`python -m penstock.server.metric_families`).
Names follow the conventions of Prometheus: base units, `_total` for counters. Labels are bounded: no label is a key, an
item, a consumer, a session or an API key.
"""

from typing import Literal, NamedTuple, TypeAlias

from penstock.loop.tally import BURIED, COUNTERS

Kind: TypeAlias = Literal["gauge", "counter", "histogram"]
QUEUE = ("queue",)
PARTITION = ("queue", "partition")


class Family(NamedTuple):
    """All time series of one name."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    @property
    def per_partition(self) -> bool:
        return self.labels[:2] == PARTITION


# -- items ---------------------------------------------------------------------------------------------

ITEMS = Family("penstock_items", "gauge", (*PARTITION, "state"), "Items by state: ready, scheduled, leased, buried or moving")
OLDEST = Family("penstock_oldest_ready_age_seconds", "gauge", PARTITION, "How long the oldest item that could be leased has been ready")
LOST = Family("penstock_items_lost", "gauge", PARTITION, "Items lost to damage")
ITEM_COUNTERS = {
    name: Family(f"penstock_items_{name}_total", "counter", PARTITION, text) for name, text in COUNTERS.items() if name not in BURIED
}
"""Counter of reports.py → its family."""
ITEMS_BURIED = Family(
    "penstock_items_buried_total",
    "counter",
    (*PARTITION, "cause"),
    "Items buried: by their consumer, because their attempts were spent, or because their ttl ended",
)
CAUSES = {name: name.removeprefix("buried_by_") for name in BURIED}
"""Counter of reports.py → value of the label `cause`."""

# -- keys, logs, partitions ----------------------------------------------------------------------------

HELD_KEYS = Family("penstock_held_keys", "gauge", PARTITION, "Keys that are not free: held, or with items waiting in their line")
PARKED_KEYS = Family("penstock_parked_keys", "gauge", PARTITION, "Keys that buried items hold")
PARTITIONS = Family(
    "penstock_partitions", "gauge", ("queue", "status"), "Partitions by status: active, draining, drained, opening, slow or failing"
)
PAUSED = Family("penstock_paused", "gauge", (*PARTITION, "side"), "1 while leasing or producing (the label side) is paused")
FAILURES = Family("penstock_partition_failures_total", "counter", PARTITION, "Failures of a partition's storage")
FINDINGS = Family(
    "penstock_log_findings_total", "counter", PARTITION, "Torn tails and damaged side files that were found when a partition was opened"
)
SLOW = Family("penstock_partition_slow_total", "counter", PARTITION, "How often a partition's storage did not answer in time")
LOG_BYTES = Family("penstock_log_bytes", "gauge", PARTITION, "Size of the logs")
WRITTEN = Family("penstock_log_written_bytes_total", "counter", PARTITION, "Bytes appended to the logs")
FREED_BYTES = Family("penstock_retention_freed_bytes_total", "counter", PARTITION, "Bytes that retention freed")
FREED_SEGMENTS = Family("penstock_retention_freed_segments_total", "counter", PARTITION, "Segments that retention deleted")
SYNCS = Family("penstock_sync_duration_seconds", "histogram", QUEUE, "Time of the syncs (fsync) for which answers wait")

# -- requests of queues --------------------------------------------------------------------------------

REQUESTS = Family("penstock_requests_total", "counter", ("queue", "verb"), "Requests to a queue, of all clients")
REQUEST_ERRORS = Family(
    "penstock_request_errors_total", "counter", ("queue", "code"), "Requests, and parts of requests, that were refused, by error code"
)
REQUEST_DURATIONS = Family(
    "penstock_request_duration_seconds",
    "histogram",
    ("queue", "verb"),
    "Time from the arrival of a request at its queue to its answer; a lease includes the wait for items",
)
WAITING = Family(
    "penstock_waiting_requests", "gauge", ("queue", "verb"), "Calls that wait: for items to lease, for room to produce, for items to read"
)
PENDING = Family("penstock_pending_requests", "gauge", QUEUE, "Requests that no turn has taken yet")
LEASE_DURATIONS = Family(
    "penstock_lease_duration_seconds",
    "histogram",
    ("queue", "outcome"),
    "Time from the lease of an item to its end: completed, retried, returned, buried or expired",
)
TURNS = Family("penstock_turn_duration_seconds", "histogram", QUEUE, "Time of the turns of a queue, without syncs")

# -- adoption ------------------------------------------------------------------------------------------

WRITES_WAITING = Family("penstock_writes_waiting", "gauge", QUEUE, "Published writes (Spark) that are not adopted yet")
WRITES_REFUSED = Family("penstock_writes_refused", "gauge", QUEUE, "Published writes that cannot be adopted until an operator acts")
WRITES_ADOPTED = Family("penstock_writes_adopted_total", "counter", QUEUE, "Published writes that were adopted")

# -- the broker ----------------------------------------------------------------------------------------

UP = Family("penstock_up", "gauge", (), "1 if the broker answered; without it there are no metrics of queues")
BUILD = Family("penstock_build_info", "gauge", ("version",), "1; the version of Penstock is a label")
OPENED_AT = Family("penstock_opened_timestamp_seconds", "gauge", (), "When the broker was opened: the counters of queues begin there")
QUEUES = Family("penstock_queues", "gauge", (), "Queues")
CLIENTS = Family("penstock_clients", "gauge", (), "Processes that use the broker through the socket of its owner")
FREE = Family("penstock_disk_free_bytes", "gauge", ("root",), "Free space of a storage root, by its number")
RESERVED = Family("penstock_disk_reserved_bytes", "gauge", (), "With less free space than this, produce is refused")

# -- the server ----------------------------------------------------------------------------------------

HTTP_CONNECTIONS = Family("penstock_http_connections", "gauge", (), "Open connections")
HTTP_CONNECTIONS_OPENED = Family("penstock_http_connections_opened_total", "counter", (), "Connections that clients opened")
HTTP_REQUESTS = Family("penstock_http_requests_total", "counter", ("path", "status"), "HTTP requests that were answered")
HTTP_DURATIONS = Family(
    "penstock_http_request_duration_seconds", "histogram", ("path",), "Time from the head of an HTTP request to its answer"
)
HTTP_UNDER_WAY = Family("penstock_http_requests_under_way", "gauge", (), "HTTP requests that are not answered yet")
HTTP_WAITING = Family("penstock_http_waiting_requests", "gauge", (), "HTTP requests that wait for items")
HTTP_ABANDONED = Family("penstock_http_requests_abandoned_total", "counter", (), "HTTP requests whose client left before the answer")
HTTP_RECEIVED = Family("penstock_http_received_bytes_total", "counter", (), "Bytes of the bodies of requests")
HTTP_SENT = Family("penstock_http_sent_bytes_total", "counter", (), "Bytes of the bodies of answers")
HTTP_REJECTED = Family("penstock_http_rejected_total", "counter", ("limit",), "Connections and requests refused because of a limit")
HTTP_AUTH_FAILURES = Family(
    "penstock_http_auth_failures_total", "counter", ("code",), "Requests refused because of their API key: unauthenticated or access_denied"
)
DRAINING = Family("penstock_draining", "gauge", (), "1 while the server ends")

QUEUE_FAMILIES: tuple[Family, ...] = (
    *(ITEMS, OLDEST, *ITEM_COUNTERS.values(), ITEMS_BURIED, LOST),
    *(HELD_KEYS, PARKED_KEYS, PARTITIONS, PAUSED, FAILURES, SLOW, FINDINGS, LOG_BYTES, WRITTEN, FREED_BYTES, FREED_SEGMENTS, SYNCS),
    *(REQUESTS, REQUEST_ERRORS, REQUEST_DURATIONS, WAITING, PENDING, LEASE_DURATIONS, TURNS),
    *(WRITES_WAITING, WRITES_REFUSED, WRITES_ADOPTED),
)
BROKER_FAMILIES: tuple[Family, ...] = (UP, BUILD, OPENED_AT, QUEUES, CLIENTS, FREE, RESERVED)
SERVER_FAMILIES: tuple[Family, ...] = (
    *(HTTP_CONNECTIONS, HTTP_CONNECTIONS_OPENED, HTTP_REQUESTS, HTTP_DURATIONS, HTTP_UNDER_WAY, HTTP_WAITING, HTTP_ABANDONED),
    *(HTTP_RECEIVED, HTTP_SENT, HTTP_REJECTED, HTTP_AUTH_FAILURES, DRAINING),
)
FAMILIES: tuple[Family, ...] = (*QUEUE_FAMILIES, *BROKER_FAMILIES, *SERVER_FAMILIES)


def table() -> str:
    """All families as a Markdown table."""
    rows = [f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.help} |" for one in FAMILIES]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
