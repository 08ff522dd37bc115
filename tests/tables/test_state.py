"""The tables of states and of dead letters: row by row as the broker lists the items."""

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Broker, NewItem
from penstock.tables import item_columns, state
from penstock.tables.schemas import DEAD, STATE
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import wait_until
from tests.broker.directory_broker import DirectoryBroker, fill, run_sample_workload
from tests.tables.published_queue import published_queue

UNRESOLVED = ("ready", "scheduled", "leased", "buried", "moving")


def listed(broker: Broker, queue: str, *state: str) -> list[Any]:
    found: list[Any] = []
    after: str | None = None
    while page := broker.queue(queue).items(state, after, 1_000):
        found += page
        after = page[-1].id
    return found


# -- state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [10_000, 3])
def test_state_is_what_the_broker_lists(directory_broker: DirectoryBroker, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(item_columns, "ROWS", rows)
    monkeypatch.setattr(state, "ROWS", rows)
    run_sample_workload(directory_broker)
    directory_broker.broker.create_queue("parking", on_bury="park").produce_many([NewItem(b"x", key="k") for _ in range(4)])
    directory_broker.broker.queue("parking").lease(1).bury("no")
    directory_broker.run_and_publish()
    met = set()
    for name in ("orders", "dead", "parking"):
        queue = directory_broker.broker.queue(name)
        with published_queue(directory_broker.path, name) as seen:
            found = {row["id"]: row for row in seen.states(clock=directory_broker.clock)}
        items = listed(directory_broker.broker, name, *UNRESOLVED)
        assert [*found] == [item.id for item in items]
        stats = queue.stats()
        counts = [sum(row["state"] == state for row in found.values()) for state in UNRESOLVED]
        assert counts == [getattr(stats, state) for state in UNRESOLVED]
        for item in items:
            row, explained = found[item.id], queue.explain(item.id)
            assert (row["state"], row["attempts"], row["reason"]) == (item.state, item.attempts, item.reason or None)
            assert row["key"] == (None if item.key is None else item.key.encode())
            assert (row["kind"], row["reference"], row["priority"]) == (item.kind, item.reference, item.priority)
            assert (row["produced_at"], row["size_bytes"]) == (item.produced_at, len(item.payload))
            assert (row["partition"], row["offset"]) == (item.partition, item.offset)
            assert row["consumer"] == (explained.consumer or None)
            assert (row["lease_until"] is not None) == (row["state"] == "leased")
            if row["state"] == "scheduled":
                left = row["ready_at"].timestamp() - directory_broker.clock.read().wall / SECOND
                assert left == pytest.approx(explained.ready_in_seconds, abs=1e-3)
            else:
                assert row["ready_at"] is None
            met.add(row["state"])
    assert met == {"ready", "scheduled", "leased", "buried"}


def test_lease_until_is_the_time_at_which_a_lease_ends(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("q", lease_timeout=30)
    fill(queue, 6)
    queue.lease(2, consumer="a")
    directory_broker.clock.advance(5 * SECOND)
    queue.lease(3, consumer="b", lease_timeout=100)
    directory_broker.run_and_publish()
    with published_queue(directory_broker.path, "q") as seen:
        found = seen.states(["consumer", "lease_until", "attempts"], clock=directory_broker.clock)
    now = directory_broker.clock.read().wall / SECOND
    told = [(row["consumer"], row["lease_until"] and round(row["lease_until"].timestamp() - now), row["attempts"]) for row in found]
    assert told == [("a", 25, 1)] * 2 + [("b", 100, 1)] * 3 + [(None, None, 0)]


def test_counting_does_not_read_the_items(directory_broker: DirectoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = directory_broker.broker.create_queue("q")
    fill(queue, 50)
    queue.lease(20).complete()
    directory_broker.run_and_publish()
    monkeypatch.setattr(state, "_read", None)
    with published_queue(directory_broker.path, "q") as seen:
        found = seen.states(["state", "id", "offset", "partition", "attempts", "reason"])
    assert [row["id"] for row in found] == [f"0-{n}" for n in range(20, 50)] and {row["state"] for row in found} == {"ready"}


def test_each_column_of_state_can_be_read_alone(directory_broker: DirectoryBroker) -> None:
    run_sample_workload(directory_broker)
    directory_broker.run_and_publish()
    with published_queue(directory_broker.path, "orders") as seen:
        whole = seen.states(clock=directory_broker.clock)
        for name in STATE.names:
            assert seen.states([name], clock=directory_broker.clock) == [{name: row[name]} for row in whole]


# -- dead ----------------------------------------------------------------------------------------------


def broker_with_dead_letters(path: Path) -> Broker:
    """A broker with dead letters: buried in place, ready, leased and failed in a dead queue, and of several queues."""
    broker = penstock.open(path)
    dead = broker.create_queue("dead", partitions=2)
    orders = broker.create_queue("orders", partitions=3, dead_queue="dead", max_attempts=2)
    mails = broker.create_queue("mails", dead_queue="dead")
    plain = broker.create_queue("plain")
    for queue in (orders, mails, plain):
        queue.produce_many([NewItem(b"%d" % n, key=f"k{n}", headers={"n": str(n)}, kind="x", reference=f"r{n}") for n in range(12)])
    for lease in orders.lease(6):
        lease.bury(f"bad {lease.id}")
    orders.lease(4).retry(reason="first")
    orders.lease(2, consumer="w").retry(reason="second")
    mails.lease(3).bury("no such mail")
    plain.lease(4).bury("in place")
    wait_until(
        lambda: not any(queue.stats().transfers or queue.stats().buried for queue in (orders, mails))
    )  # the transfers run in the background
    dead.produce(b"by hand")
    dead.lease(2)
    dead.lease(1).retry(reason="still bad")
    dead.lease(1).bury("dead for good")
    return broker


def dead_letter(item: Any, queue: str) -> dict[str, Any]:
    """The row that the table must have for an item that the broker lists."""
    origin = item.origin if item.state != "buried" else None
    return {
        "id": origin.id if origin else item.id,
        "payload": item.payload,
        "key": None if item.key is None else item.key.encode(),
        "kind": item.kind,
        "reference": item.reference,
        "origin_queue": item.origin.queue if item.origin else None,
        "origin_id": item.origin.id if item.origin else None,
        "attempts": origin.attempts if origin else item.attempts,
        "reason": item.reason or (origin.reason if origin else "") or None,
        "dead_queue": queue,
        "dead_id": item.id,
    }


def test_dead_is_what_the_broker_lists(tmp_path: Path) -> None:
    waiting = ("ready", "scheduled", "leased")
    with broker_with_dead_letters(tmp_path) as broker:
        cases: list[tuple[str, dict[str, Any], list[Any]]] = [
            ("plain", {}, listed(broker, "plain", "buried")),
            ("orders", {}, []),
            ("dead", {}, listed(broker, "dead", "buried")),
            ("dead", {"waiting": True}, listed(broker, "dead", "buried", *waiting)),
            (
                "dead",
                {"waiting": True, "origin": "mails"},
                [i for i in listed(broker, "dead", *waiting) if i.origin and i.origin.queue == "mails"],
            ),
        ]
        for queue, which, items in cases:
            with published_queue(tmp_path, queue) as seen:
                found = seen.dead(**which)
            wanted = [dead_letter(item, queue) for item in items]
            assert [{name: row[name] for name in (wanted[0] if wanted else ())} for row in found] == wanted, (queue, which)
            for row, item in zip(found, items, strict=True):
                origin = item.origin if item.state != "buried" else None
                assert row["headers"] == {name: value.encode() for name, value in item.headers.items()} or (
                    not item.headers and row["headers"] is None
                )
                if origin is not None:
                    times = [row[name] for name in ("buried_at", "first_failed_at", "last_failed_at")]
                    assert times == [origin.buried_at, origin.first_failed_at, origin.last_failed_at]
                    assert row["produced_at"] == origin.produced_at
        assert len(cases[3][2]) >= 10 and cases[4][2], "there is something to compare"


def test_each_column_of_dead_can_be_read_alone(tmp_path: Path) -> None:
    with broker_with_dead_letters(tmp_path), published_queue(tmp_path, "dead") as seen:
        whole = seen.dead(waiting=True)
        for name in DEAD.names:
            assert seen.dead([name], waiting=True) == [{name: row[name]} for row in whole]
