"""The table of events: every transition, whatever range is read."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Broker
from penstock.errors import InvalidRequest
from penstock.loop import item_events
from penstock.rules.events import Event
from penstock.tables import events as table
from penstock.tables.events import events
from penstock.tables.schemas import EVENTS
from penstock.words.clock import SECOND
from penstock.words.ids import format_id
from penstock.words.values import timestamp
from tests.broker.directory_broker import DirectoryBroker, fill, run_sample_workload
from tests.tables.published_queue import PublishedQueue, published_queue, rows

ENDLESS = 1 << 60


def as_row(event: Event, partition: int) -> dict[str, Any]:
    return {
        "event": event.event,
        "id": format_id(partition, event.offset),
        "partition": partition,
        "offset": event.offset,
        "at": timestamp(event.at),
        "attempt": event.attempt,
        "reason": event.reason or None,
        "consumer": event.consumer or None,
        "lease": f"{event.lease:x}" if event.lease else None,
        "destination": event.destination or None,
        "source": event.source or None,
    }


def one_by_one(seen: PublishedQueue, partition: int) -> list[dict[str, Any]]:
    with closing(seen.log(partition)()) as log:
        return [as_row(event, partition) for event in item_events.events(log)]


def without_sequence(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "sequence"} for row in found]


@pytest.fixture
def busy(directory_broker: DirectoryBroker) -> DirectoryBroker:
    """A broker in which every kind of event happened, in three queues, transfers included."""
    run_sample_workload(directory_broker)
    orders = directory_broker.broker.queue("orders")
    directory_broker.clock.advance(40 * SECOND)
    directory_broker.run_and_publish()
    orders.lease(20, consumer="e").retry(reason="again")
    directory_broker.clock.advance(90 * SECOND)
    directory_broker.run_and_publish()
    orders.clear("buried")
    directory_broker.broker.redrive("dead", to="orders")
    orders.lease(100).complete()
    orders.seek(at=datetime(1970, 1, 1, tzinfo=UTC))
    directory_broker.run_and_publish()
    return directory_broker


def test_the_table_has_the_same_events_as_reading_them_one_by_one(busy: DirectoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    met = set()
    for limit in (10_000, 3):
        monkeypatch.setattr(table, "ROWS", limit)
        for queue in ("orders", "dead"):
            with published_queue(busy.path, queue) as seen:
                for partition in seen.partitions:
                    found = rows(events(seen.log(partition), 0, ENDLESS, EVENTS.names))
                    assert without_sequence(found) == one_by_one(seen, partition)
                    met |= {row["event"] for row in found}
                    met |= {name for name in ("destination", "source", "lease", "consumer", "reason") if any(row[name] for row in found)}
    assert met >= {
        "produced",
        "scheduled",
        "due",
        "leased",
        "completed",
        "retried",
        "delayed",
        "lease expired",
        "buried",
        "sent",
        "delivered",
    }
    assert met >= {"sought", "destination", "source", "lease", "consumer", "reason"}


def test_the_table_has_the_same_events_as_the_histories_of_all_items(busy: DirectoryBroker) -> None:
    orders = busy.broker.queue("orders")
    with published_queue(busy.path, "orders") as seen:
        found = seen.events(["event", "id", "at", "attempt", "reason", "consumer"])
    for id in {row["id"] for row in found}:
        told = [event for event in orders.history(id) if event.queue == "orders" and event.id == id]
        wanted = [(one.event, one.at, one.attempt, one.reason or None, one.consumer or None) for one in told]
        assert [(row["event"], row["at"], row["attempt"], row["reason"], row["consumer"]) for row in found if row["id"] == id] == wanted


@pytest.fixture
def long(tmp_path: Path) -> Iterator[tuple[Path, Broker]]:
    """A log of many segments."""
    with penstock.open(tmp_path, segment_bytes=4_096) as broker:
        queue = broker.create_queue("q", retention={"max_segments": 1_000})
        for _ in range(30):
            fill(queue, 20)
            leased = queue.lease(10)
            queue.complete(leased[:7])
            leased[7].retry(reason="no")
        yield tmp_path, broker


def test_any_range_of_sequences_can_be_read_alone(long: tuple[Path, Broker]) -> None:
    path, _ = long
    with published_queue(path, "q") as seen:
        whole = rows(events(seen.log(0), 0, ENDLESS, EVENTS.names))
        last = whole[-1]["sequence"]
        segments = [facts.first_sequence for facts in seen.log(0)().segments()]
        assert len(segments) > 3 and [row["sequence"] for row in whole] == sorted(row["sequence"] for row in whole)
        for edges in ([1, last + 1], [1, *segments[1:], last + 1], [*range(1, last, 37), last + 1]):
            parts = [rows(events(seen.log(0), a, b, EVENTS.names)) for a, b in pairwise(edges)]
            assert [row for part in parts for row in part] == whole


def test_since_and_until_choose_events_by_time(busy: DirectoryBroker) -> None:
    with published_queue(busy.path, "orders") as seen:
        whole = seen.events()
        times = sorted({row["at"] for row in whole})
        assert len(times) > 2
        low, high = (round(when.timestamp() * SECOND) for when in (times[1], times[-1]))
        chosen = [rows(events(seen.log(number), 0, ENDLESS, EVENTS.names, since=low, until=high)) for number in seen.partitions]
        assert [row for part in chosen for row in part] == [row for row in whole if times[1] <= row["at"] < times[-1]]


def test_only_the_columns_that_are_named_are_returned(busy: DirectoryBroker) -> None:
    with published_queue(busy.path, "orders") as seen:
        whole = seen.events()
        for name in EVENTS.names:
            assert seen.events([name]) == [{name: row[name]} for row in whole]


def test_what_retention_dropped_is_an_error_or_left_out(long: tuple[Path, Broker]) -> None:
    path, broker = long
    queue = broker.queue("q")
    queue.clear("all")
    queue.update(retention={"max_segments": 3})
    queue.compact()
    with published_queue(path, "q") as seen:
        first = seen.log(0)().segments()[0].first_sequence
        assert first > 1
        gone = f"sequences 1 to {first - 1} of partition 0 cannot be read: retention deleted them; start later, or set fail"
        with pytest.raises(InvalidRequest, match=gone):
            rows(events(seen.log(0), 1, ENDLESS, ["id"]))
        left = rows(events(seen.log(0), 1, ENDLESS, ["sequence"], strict=False))
        assert left == rows(events(seen.log(0), first, ENDLESS, ["sequence"])) and left[0]["sequence"] >= first
