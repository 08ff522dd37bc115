"""The JSON API for queues: create, describe, count and administer them; and for the broker."""

import os
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import penstock
from penstock.server.http_server import HttpServer
from tests.server.conftest import serve
from tests.server.json_client import JsonClient, json_client
from tests.server.poster import wait_until


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[penstock.Broker, HttpServer]]:
    with penstock.open("memory://") as broker, serve(broker.home) as server:
        yield broker, server


@pytest.fixture
def broker(served: tuple[penstock.Broker, HttpServer]) -> penstock.Broker:
    return served[0]


@pytest.fixture
def client(served: tuple[penstock.Broker, HttpServer]) -> Iterator[JsonClient]:
    with json_client(served[1]) as client:
        yield client


@pytest.fixture
def queue(broker: penstock.Broker, request: pytest.FixtureRequest) -> penstock.Queue:
    return broker.create_queue(request.node.name)


OPTIONS = {
    "lease_timeout": "1m30s",
    "expire_timeout": "36h",
    "max_attempts": 3,
    "requested_partitions": 2,
    "priority_aging": "500ms",
    "dedup_window": "1h",
    "on_bury": "park",
    "retention": {"max_age": "48h", "max_bytes": 1_000_000, "max_segments": 7, "min_segments": 2},
    "max_items": 100,
    "max_bytes": 1_000,
    "durability": "interval",
    "sync_interval": "50ms",
    "segment_bytes": 1_000_000,
    "segment_age": "1h",
    "compression": False,
    "compression_level": 3,
    "compression_min_bytes": 64,
    "dead_queue": "grave",
}

# -- queues ------------------------------------------------------------------------------------------


def test_a_queue_has_the_options_that_it_was_created_with(client: JsonClient, broker: penstock.Broker) -> None:
    broker.create_queue("grave")
    created = client.ok("queues.create", queue_name="optioned", reference="", **OPTIONS)
    assert created == client.ok("queues.info", queue_name="optioned")
    assert {name: created[name] for name in OPTIONS} == OPTIONS
    assert created["partitions"] == [{"partition": 0, "state": "active"}, {"partition": 1, "state": "active"}]
    info = broker.queue("optioned").info()
    assert (info.lease_timeout, info.ttl, info.dead_queue, info.retention["max_age"]) == (90, 36 * 3600, "grave", 48 * 3600)
    assert created["incarnation"] == info.incarnation
    assert datetime.fromisoformat(created["created_at"]) == info.created_at


def test_a_queue_is_created_once(client: JsonClient, queue: penstock.Queue) -> None:
    assert client.refused("queues.create", queue_name=queue.name)[:2] == (409, "queue_exists")
    found = client.ok("queues.create", queue_name=queue.name, exist_ok=True, lease_timeout=60)
    assert found["incarnation"] == queue.info().incarnation
    assert client.refused("queues.create", queue_name=queue.name, exist_ok=True, lease_timeout="2m")[:2] == (409, "queue_exists")
    assert client.ok("queues.create", queue_name=queue.name, exist_ok=True, requested_partitions=2) == found, "it keeps its width"
    assert client.refused("queues.create", queue_name="no spaces")[:2] == (400, "invalid_request")
    assert client.refused("queues.create", queue_name="new", reference="mine")[2] == "a queue has no reference here; leave it out"


def test_a_queue_is_ensured(client: JsonClient, broker: penstock.Broker) -> None:
    created = client.ok("queues.ensure", queue_name="orders", requested_partitions=2, max_attempts=3)
    assert (created["requested_partitions"], created["max_attempts"]) == (2, 3)
    changed = client.ok("queues.ensure", queue_name="orders", requested_partitions=4, max_attempts=5)
    assert changed == {**created, "max_attempts": 5}
    resized = client.ok("queues.ensure", queue_name="orders", requested_partitions=4, resize=True)
    assert (resized["requested_partitions"], resized["max_attempts"]) == (4, 5)
    wrong = client.refused("queues.ensure", queue_name="orders", durability="os", max_attempts=9)
    assert wrong[:2] == (400, "invalid_request") and "durability" in wrong[2]
    assert broker.queue("orders").info().max_attempts == 5


def test_an_update_changes_only_what_it_names(client: JsonClient, broker: penstock.Broker) -> None:
    if "grave" not in [info.name for info in broker.queues()]:
        broker.create_queue("grave")
    before = client.ok("queues.create", queue_name="updated", **OPTIONS)
    assert client.ok("queues.update", queue_name="updated") == before
    after = client.ok("queues.update", queue_name="updated", lease_timeout="2m", retention={"max_segments": 9})
    retention = {**before["retention"], "max_segments": 9}
    assert after == {**before, "lease_timeout": "2m", "retention": retention}
    for name in ("dead_queue", "expire_timeout", "priority_aging", "max_items", "max_bytes"):
        after = client.ok("queues.update", queue_name="updated", **{name: None})
        assert name not in after
    assert after["max_attempts"] == 3
    assert client.ok("queues.update", queue_name="updated", max_attempts=0, requested_partitions=3)["requested_partitions"] == 3
    assert client.ok("queues.info", queue_name="updated")["max_attempts"] == 0
    assert client.refused("queues.update", queue_name="updated", expire_timeout="")[0] == 400
    assert client.refused("queues.update", queue_name="nothing", max_attempts=1)[:2] == (404, "queue_not_found")


def test_queues_are_listed_page_by_page(client: JsonClient, broker: penstock.Broker) -> None:
    names = [f"page{end}" for end in ("", "-", "-b", ".a", "0", "A", "_", "a", "a" * 100)]
    for name in names:
        broker.create_queue(name)
    names.sort()
    for limit in (1, 2, 100):
        found: list[str] = []
        page = client.ok("queues.list", prefix="page", limit=limit)
        while "next_pivot" in page:
            found += [one["queue_name"] for one in page["items"]]
            page = client.ok("queues.list", prefix="page", limit=limit, pivot=page["next_pivot"])
        assert found == names
    for index, name in enumerate(names):
        assert [one["queue_name"] for one in client.ok("queues.list", prefix="page", pivot=name)["items"]] == names[index:]
    assert client.ok("queues.list", pivot="é") == client.ok("queues.list", pivot="zzzz") == {"items": []}
    assert len(client.ok("queues.list", pivot="\x00")["items"]) >= len(names)


def test_a_queue_with_items_is_deleted_only_by_force(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b"])
    queue.lease(1).bury()
    queue.lease(1).complete()
    status, code, message = client.refused("queues.delete", queue_name=queue.name)
    assert (status, code) == (409, "queue_not_empty")
    assert message.endswith("has 1 items that are not completed; complete or clear them, or delete it with force")
    assert client.ok("queues.delete", queue_name=queue.name, force=True) == {}
    assert client.refused("queues.delete", queue_name=queue.name, force=True)[:2] == (404, "queue_not_found")


def test_a_queue_that_is_created_again_is_found_by_its_name(client: JsonClient, broker: penstock.Broker) -> None:
    broker.create_queue("again")
    produce = {"queue_name": "again", "items": [{"utf8": "a"}]}
    client.ok("queue.produce", **produce)
    (item,) = client.ok("queue.lease", queue_name="again")["items"]
    broker.delete_queue("again")
    assert client.refused("queue.produce", **produce)[:2] == (404, "queue_not_found")
    broker.create_queue("again")
    client.ok("queue.produce", **produce)
    broker.delete_queue("again")
    broker.create_queue("again")
    assert client.ok("queue.produce", **produce) == {"items": [{"id": "0-0"}]}
    lost = client.post("queue.complete", queue_name="again", lease_tokens=[item["lease_token"]])
    assert (lost.status, lost.json["code"]) == (410, "lease_lost")
    assert client.ok("queue.stats", queue_name="again")["ready"] == 1


# -- counts and single items -------------------------------------------------------------------------


def test_stats_are_exact(client: JsonClient, broker: penstock.Broker) -> None:
    queue = broker.create_queue("counted", partitions=2)
    queue.produce_many([penstock.NewItem(b"x", key=str(number)) for number in range(20)])
    queue.produce(b"later", at=datetime.now(UTC) + timedelta(hours=1))
    queue.lease(3).complete()
    queue.lease(2).bury()
    queue.lease(4, consumer="me")
    found = client.ok("queue.stats", queue_name="counted")
    counts = {name: found[name] for name in ("ready", "scheduled", "leased", "completed", "buried", "moving", "produced")}
    assert counts == {"ready": 11, "scheduled": 1, "leased": 4, "completed": 3, "buried": 2, "moving": 0, "produced": 21}
    assert found["consumers"] == {"me": 4}
    (logical,) = found["logical_queues"]
    assert (logical["produce_waiting"], logical["lease_waiting"]) == (0, 0)
    assert [one["partition"] for one in logical["partitions"]] == [0, 1]
    assert sum(one["total"] for one in logical["partitions"]) == 18
    assert sum(one["total_leased"] for one in logical["partitions"]) == 4
    assert sum(one["scheduled"] for one in logical["partitions"]) == 1


def test_an_item_is_explained_and_its_history_told(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce(b"a")
    queue.lease(consumer="me").retry(delay=3600, reason="busy")
    explained = client.ok("queue.explain", queue_name=queue.name, id="0-0")
    assert explained["state"] == "scheduled" and explained["why"].startswith("backing off after attempt 1 (busy)")
    assert 3_500 < explained.pop("ready_in_seconds") <= 3_600
    events = client.ok("queue.history", queue_name=queue.name, id="0-0")["events"]
    assert [event["event"] for event in events] == ["produced", "leased", "delayed"]
    assert (events[1]["client_id"], events[1]["attempt"], events[2]["reason"]) == ("me", 1, "busy")
    assert abs(datetime.fromisoformat(events[0]["at"]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert client.refused("queue.explain", queue_name=queue.name, id="0-9")[0] == 400
    assert client.refused("queue.history", queue_name=queue.name, id="zero")[0] == 400


# -- administration ----------------------------------------------------------------------------------


def test_a_queue_is_paused_and_resumed(client: JsonClient, queue: penstock.Queue) -> None:
    def paused() -> tuple[bool, bool]:
        (one,) = client.ok("queue.stats", queue_name=queue.name)["logical_queues"][0]["partitions"]
        return one["paused_lease"], one["paused_produce"]

    assert client.ok("queue.pause", queue_name=queue.name) == {} and paused() == (True, True)
    client.ok("queue.resume", queue_name=queue.name, produce=False, partition=0)
    assert paused() == (False, True)
    assert client.refused("queue.produce", queue_name=queue.name, items=[{}])[:2] == (409, "queue_held")
    client.ok("queue.resume", queue_name=queue.name)
    assert paused() == (False, False)
    assert client.refused("queue.pause", queue_name=queue.name, lease=False, produce=False)[0] == 400
    assert client.refused("queue.pause", queue_name=queue.name, partition=5)[0] == 400


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        ({"queue": True}, {"scheduled": 2, "leased": 1, "buried": 1}),
        ({"queue": True, "destructive": True}, {"scheduled": 2, "buried": 1}),
        ({"scheduled": True, "retry": True}, {"ready": 1, "leased": 1, "buried": 1}),
        ({"buried": True, "partition": 0}, {"ready": 1, "scheduled": 2, "leased": 1}),
    ],
    ids=["queue", "destructive", "scheduled", "buried"],
)
def test_items_are_cleared_by_state(
    client: JsonClient, broker: penstock.Broker, chosen: dict[str, Any], left: dict[str, int], request: pytest.FixtureRequest
) -> None:
    queue = broker.create_queue(f"cleared-{request.node.callspec.id}")
    queue.produce_many([b"bury", b"retry", b"lease", b"ready"])
    queue.produce(b"later", at=datetime.now(UTC) + timedelta(hours=1))
    queue.lease().bury()
    queue.lease().retry(delay=3600)
    queue.lease()
    cleared = client.ok("queue.clear", queue_name=queue.name, **chosen)["items"]
    stats = queue.stats()
    assert {name: count for name in ("ready", "scheduled", "leased", "buried") if (count := getattr(stats, name))} == left
    assert cleared == stats.completed == 5 - sum(left.values())


def test_what_cannot_be_cleared(client: JsonClient, queue: penstock.Queue) -> None:
    assert "there is nothing to clear" in client.refused("queue.clear", queue_name=queue.name, destructive=True)[2]
    assert "give scheduled as well" in client.refused("queue.clear", queue_name=queue.name, queue=True, retry=True)[2]


def test_a_queue_is_resized_and_a_partition_made_read_only(client: JsonClient, queue: penstock.Queue) -> None:
    assert client.ok("queue.resize", queue_name=queue.name, requested_partitions=3)["requested_partitions"] == 3
    found = client.ok("queue.set_read_only", queue_name=queue.name, partition=1)
    assert [one["state"] for one in found["partitions"]] == ["active", "read_only", "active"]
    found = client.ok("queue.set_read_only", queue_name=queue.name, partition=1, read_only=False)
    assert [one["state"] for one in found["partitions"]] == ["active", "active", "active"]
    assert client.refused("queue.resize", queue_name=queue.name, requested_partitions=0)[0] == 400


def test_completed_items_return_by_seek(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b", b"c"])
    queue.lease(3).complete()
    assert client.ok("queue.seek", queue_name=queue.name, id="0-1") == {"items": 2}
    queue.lease(2).complete()
    assert client.ok("queue.seek", queue_name=queue.name, at="2020-01-01T00:00:00Z") == {"items": 3}
    assert client.refused("queue.seek", queue_name=queue.name)[0] == 400
    assert client.refused("queue.seek", queue_name=queue.name, id="0-1", at="2020-01-01T00:00:00Z")[0] == 400


def test_items_are_redriven(client: JsonClient, broker: penstock.Broker) -> None:
    source, target = broker.create_queue("source"), broker.create_queue("target")
    kinds = ["a", "b", "a", "a"]
    source.produce_many(
        [penstock.NewItem(b"", kind=kind, key=f"k{number}", headers={"n": str(number)}) for number, kind in enumerate(kinds)]
    )
    source.lease(4).bury(reason="broken")
    move = {"queue_name": "source", "to": "target"}
    preview = client.ok("queue.redrive", **move, where={"kind": "a"}, preview=True)
    assert (preview["items"], preview["ids"]) == (3, ["0-0", "0-2", "0-3"])
    first = preview["sample"][0]
    assert {first.pop("produced_at")[:2], first.pop("buried_at")[:2]} == {"20"}
    described = {"id": "0-0", "state": "buried", "key": "k0", "kind": "a", "reason": "broken"}
    assert first == {**described, "attempts": 1, "size_bytes": 0, "payload": ""}
    assert [item["id"] for item in preview["sample"]] == preview["ids"]
    assert client.ok("queue.redrive", **move, where={"state": "scheduled"}) == {"items": 0, "ids": []}
    assert client.ok("queue.redrive", **move, where={"headers": {"n": "2"}}) == {"items": 1, "ids": ["0-2"]}
    assert client.ok("queue.redrive", **move, where={"kind": "a", "reason": "broken"}, limit=1) == {"items": 1, "ids": ["0-0"]}
    assert client.ok("queue.redrive", queue_name="source", to="source", where={"key": "k1"}) == {"items": 1, "ids": ["0-1"]}
    wait_until(lambda: target.stats().ready == 2)
    assert source.stats().ready == 1
    assert client.ok("queue.redrive", **move, where={"kind": None}) == {"items": 0, "ids": []}
    assert client.refused("queue.redrive", queue_name="source", to="nowhere")[:2] == (404, "queue_not_found")


def test_a_queue_is_compacted(client: JsonClient, queue: penstock.Queue) -> None:
    found = client.ok("queue.compact", queue_name=queue.name)
    assert found == {"segments": 0, "rewritten": 0, "items": 0, "size_bytes": 0, "buried": 0}
    assert client.refused("queue.compact", queue_name=queue.name, partition=3)[0] == 400


# -- keys and cursors --------------------------------------------------------------------------------


def test_keys_that_are_held_are_listed_and_released(client: JsonClient, broker: penstock.Broker) -> None:
    queue = broker.create_queue("keyed", on_bury="park")
    queue.produce_many([penstock.NewItem(b"", key=key) for key in ("k", "k", b"\xff", b"\xff")])
    queue.lease(2).bury()
    raw = b64encode(b"\xff").decode()
    found = client.ok("queue.held_keys", queue_name="keyed")["keys"]
    assert sorted(found, key=lambda one: one["item"]) == [
        {"key": "k", "partition": 0, "why": "parked", "item": "0-0", "waiting": 1},  # a lease has met the second item
        {"key_bytes": raw, "partition": 0, "why": "parked", "item": "0-2", "waiting": 0},
    ]
    assert len(client.ok("queue.held_keys", queue_name="keyed", limit=1)["keys"]) == 1
    assert client.ok("queue.release_key", queue_name="keyed", key="k") == {"items": 1}
    assert client.ok("queue.release_key", queue_name="keyed", key_bytes=raw) == {"items": 1}
    assert [one["why"] for one in client.ok("queue.held_keys", queue_name="keyed")["keys"]] == ["waiting"]
    assert client.refused("queue.release_key", queue_name="keyed")[2] == "there is no key; give key, or key_bytes"
    assert client.refused("queue.release_key", queue_name="keyed", key="k" * 2000)[0] == 400


def test_cursors_are_moved_listed_and_released(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b", b"c"])
    assert client.ok("cursors.move", queue_name=queue.name, name="audit", offsets={"0": 2}) == {}
    client.ok("cursors.move", queue_name=queue.name, name="audit", offsets={"0": 1}, forward_only=True)
    assert client.ok("cursors.list", queue_name=queue.name) == {"cursors": [{"name": "audit", "offsets": {"0": 2}, "lag": 1}]}
    assert [item.payload for item in queue.cursor("audit")] == [b"c"]
    assert client.ok("cursors.release", queue_name=queue.name, name="audit") == {}
    assert client.ok("cursors.list", queue_name=queue.name) == {"cursors": []}
    assert "there is no cursor 'audit'" in client.refused("cursors.release", queue_name=queue.name, name="audit")[2]


# -- the broker --------------------------------------------------------------------------------------


def test_the_broker_describes_itself(client: JsonClient, queue: penstock.Queue) -> None:
    found = client.ok("broker.info")
    assert found["pid"] == os.getpid() and found["clients"] == []
    queue.produce(b"a")
    assert client.ok("broker.metrics")["queues"][queue.name]["items"]["produced"] == 1
    assert client.refused("broker.info", queue_name="x")[0] == 400


# -- waiting items -------------------------------------------------------------------------------------


def test_waiting_items_are_found_cancelled_and_rescheduled(client: JsonClient, queue: penstock.Queue) -> None:
    first, second = queue.produce("a", key="k", reference="r"), queue.produce("b", key="k")
    found = client.ok("queue.find", queue_name=queue.name, key="k", limit=1)
    assert ([one["id"] for one in found["items"]], found["next_pivot"]) == ([first], "0-1")
    rest = client.ok("queue.find", queue_name=queue.name, key_bytes=b64encode(b"k").decode(), pivot=found["next_pivot"])
    assert ([(one["id"], one["state"]) for one in rest["items"]], "next_pivot" in rest) == ([(second, "ready")], False)
    assert [one["id"] for one in client.ok("queue.find", queue_name=queue.name, reference="r")["items"]] == [first]
    done = client.ok("queue.cancel", queue_name=queue.name, ids=[first, "0-99"])
    assert done == {"items": [{"id": first, "outcome": "cancelled"}, {"id": "0-99", "outcome": "not found"}]}
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    for time, state in (({"at": later}, "scheduled"), ({"delay": "0s"}, "ready"), ({"delay": 60}, "scheduled")):
        done = client.ok("queue.reschedule", queue_name=queue.name, ids=[second], **time)
        assert done == {"items": [{"id": second, "outcome": "rescheduled"}]}
        assert queue.explain(second).state == state
    assert client.ok("queue.stats", queue_name=queue.name)["cancelled"] == 1


def test_bad_requests_about_waiting_items_change_nothing(client: JsonClient, queue: penstock.Queue) -> None:
    item = queue.produce("a")
    for path, body, message in (
        ("queue.cancel", {"ids": []}, "length >= 1"),
        ("queue.cancel", {"ids": [item, "x"]}, "is not the id of an item"),
        ("queue.reschedule", {"ids": [item]}, "either a time or a delay"),
        ("queue.reschedule", {"ids": [item], "delay": "1h", "at": "2999-01-01T00:00:00Z"}, "either a time or a delay"),
        ("queue.find", {}, "neither a key nor a reference"),
    ):
        assert message in client.refused(path, queue_name=queue.name, **body)[2]
    assert queue.stats().ready == 1
