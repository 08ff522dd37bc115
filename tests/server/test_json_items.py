"""The JSON API for items: produce, lease, settle, list and read."""

import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import penstock
from penstock.server.http_server import HttpServer
from penstock.testing import SimulatedFiles
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
    return broker.create_queue(re.sub("[^a-z0-9_]", "-", request.node.name))


def leased(client: JsonClient, queue: penstock.Queue, count: int = 10, **options: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = client.ok("queue.lease", queue_name=queue.name, batch_size=count, **options)["items"]
    return items


def moment(text: str) -> datetime:
    assert text.endswith("Z")
    return datetime.fromisoformat(text)


# -- produce -----------------------------------------------------------------------------------------


def test_an_item_has_the_fields_that_it_was_produced_with(client: JsonClient, queue: penstock.Queue) -> None:
    given = {
        "bytes": b64encode(b"\x00\xff").decode(),
        "encoding": "raw",
        "kind": "order",
        "reference": "r-1",
        "key": "customer-1",
        "headers": {"a": "b"},
        "headers_bytes": {"raw": b64encode(b"\xff").decode()},
        "priority": 2,
        "enqueue_at": "2020-01-31T12:00:00+01:00",
        "ttl": "1h30m",
        "dedup_id": "d-1",
    }
    assert client.ok("queue.produce", queue_name=queue.name, items=[given]) == {"items": [{"id": "0-0"}]}
    (item,) = leased(client, queue)
    kept = {name: item[name] for name in given if name not in ("dedup_id", "enqueue_at")}
    assert kept == {name: given[name] for name in kept}
    assert (item["enqueue_at"], item["attempts"], item["partition"], item["id"]) == ("2020-01-31T11:00:00Z", 1, 0, "0-0")
    again = client.ok("queue.produce", queue_name=queue.name, items=[given])
    assert again == {"items": [{"id": "0-0", "duplicate": True}]}  # the dedup id is remembered
    queue.complete(item["lease_token"])
    others = [{**given, "dedup_id": None}, {}]
    client.ok("queue.produce", queue_name=queue.name, items=others)
    first, _ = leased(client, queue)
    assert {name: first[name] for name in kept} == kept  # also when they are not produced alone


def test_an_item_may_have_a_dedup_window_of_its_own(client: JsonClient, broker: penstock.Broker) -> None:
    broker.create_queue("windows", dedup_window=3600)
    (short, usual) = ({"dedup_id": "a", "dedup_window": "1ms"}, {"dedup_id": "b"})
    client.ok("queue.produce", queue_name="windows", items=[short, usual])
    wait_until(lambda: client.ok("queue.produce", queue_name="windows", items=[short])["items"][0]["id"] != "0-0")
    assert client.ok("queue.produce", queue_name="windows", items=[usual]) == {"items": [{"id": "0-1", "duplicate": True}]}
    assert client.refused("queue.produce", queue_name="windows", items=[{"dedup_window": 5}])[:2] == (400, "invalid_request")
    assert client.refused("queue.produce", queue_name="windows", items=[{"dedup_id": "c", "dedup_window": 0}])[:2] == (
        400,
        "invalid_request",
    )


@pytest.mark.parametrize(
    ("given", "payload", "encoding"),
    [
        ({}, b"", None),
        ({"utf8": "grün"}, "grün".encode(), "text"),
        ({"utf8": '{"a": 1}', "encoding": "json"}, b'{"a": 1}', "json"),
        ({"bytes": "AAE="}, b"\x00\x01", None),
        ({"bytes": "AAE=", "utf8": "not this"}, b"\x00\x01", None),
        ({"bytes": "", "utf8": "this"}, b"this", "text"),
        ({"utf8": "x", "encoding": "", "kind": "", "reference": "", "key": None, "headers": None}, b"x", "text"),
    ],
    ids=range(7),
)
def test_the_payload(client: JsonClient, queue: penstock.Queue, given: dict[str, Any], payload: bytes, encoding: str | None) -> None:
    client.ok("queue.produce", queue_name=queue.name, items=[given])
    (item,) = leased(client, queue)
    assert (item["bytes"], item.get("encoding")) == (b64encode(payload).decode(), encoding)
    assert item.get("utf8") == (payload.decode() if encoding in ("text", "json") else None)
    assert {"kind", "reference", "key", "headers"}.isdisjoint(item)


def test_keys_and_payloads_that_are_not_text(client: JsonClient, queue: penstock.Queue) -> None:
    raw = b64encode(b"\xff\xfe").decode()
    client.ok("queue.produce", queue_name=queue.name, items=[{"key_bytes": raw, "bytes": raw, "encoding": "text"}])
    (item,) = leased(client, queue)
    assert item["key_bytes"] == item["bytes"] == raw
    assert "key" not in item and "utf8" not in item


def test_many_items_are_produced_and_leased(client: JsonClient, queue: penstock.Queue) -> None:
    items = [{"utf8": str(number), "key": str(number % 7)} for number in range(5_000)]
    found = client.ok("queue.produce", queue_name=queue.name, items=items)["items"]
    assert [item["id"] for item in found] == [f"0-{number}" for number in range(5_000)]
    assert [item["utf8"] for item in leased(client, queue, 10_000, per_key=10_000)] == [str(number) for number in range(5_000)]


def test_a_request_id_makes_a_produce_repeatable(client: JsonClient, queue: penstock.Queue) -> None:
    items = [{"utf8": "a"}]
    first = client.ok("queue.produce", queue_name=queue.name, items=items, request_id="r")
    assert client.ok("queue.produce", queue_name=queue.name, items=items, request_id="r") == first
    body = f'{{"queue_name": "{queue.name}", "items": [{{"utf8": "a"}}]}}'.encode()
    assert client.send("/v1/queue.produce", body, idempotency_key="r").json == first
    assert client.send("/v1/queue.produce", body, idempotency_key="other").json == {"items": [{"id": "0-1"}]}
    both = body.replace(b"{", b'{"request_id": "r", ', 1)
    assert client.send("/v1/queue.produce", both, idempotency_key="r").json == first
    assert client.send("/v1/queue.produce", both, idempotency_key="x").status == 400


def test_items_that_cannot_be_stored_are_named(client: JsonClient, queue: penstock.Queue) -> None:
    def why(**item: Any) -> str:
        status, code, message = client.refused("queue.produce", queue_name=queue.name, items=[{"utf8": "fine"}, item])
        assert (status, code) == (400, "invalid_request")
        alone = client.refused("queue.produce", queue_name=queue.name, items=[item])
        assert alone[2] == message.removeprefix("item 1: ").replace("items[1]", "items[0]")
        return message

    assert why(color="red").startswith("the body is not as it must be: Object contains unknown field `color` - at `$.items[1]`")
    assert "`$.items[1].priority`" in why(priority=10)
    assert "`$.items[1].enqueue_at`" in why(enqueue_at="2020-01-31T12:00:00")  # no timezone
    assert why(ttl="soon") == ("item 1: the ttl is 'soon'; give a duration such as 30s, 5m, 1h30m or 250ms, or a number of seconds")
    assert why(ttl="0s") == "item 1: the ttl is 0; give more, or leave it out"
    assert why(key="k" * 1025) == "item 1: the key has 1025 bytes; give at most 1024"
    assert "kind has 1025 bytes" in why(kind="k" * 1025)
    assert client.ok("queue.stats", queue_name=queue.name)["produced"] == 0


def test_a_produce_that_stores_nothing_has_the_status_of_its_error(client: JsonClient, broker: penstock.Broker) -> None:
    queue = broker.create_queue("paused")
    queue.pause(lease=False)
    answer = client.post("queue.produce", queue_name="paused", items=[{"utf8": "a"}, {"utf8": "b"}])
    assert (answer.status, answer.json["code"]) == (409, "queue_held")
    full = broker.create_queue("full", max_items=1)
    full.produce(b"a")
    answer = client.post("queue.produce", queue_name="full", items=[{"utf8": "a"}], request_timeout="0s")
    assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (429, "queue_full", "1")


def test_a_produce_whose_storage_fails_is_an_error() -> None:
    files = SimulatedFiles()
    with penstock.open("data", files=files) as broker, serve(broker.home) as server, json_client(server) as client:
        broker.create_queue("orders")
        files.set_read_only()
        answer = client.post("queue.produce", queue_name="orders", items=[{"utf8": "a"}, {"utf8": "b"}])
        files.set_read_only(False)
        assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (503, "storage_failed", "1")


def test_a_produce_that_stores_some_items_says_which(client: JsonClient, broker: penstock.Broker) -> None:
    queue = broker.create_queue("half-paused", partitions=2)
    keys = {}
    for number in range(20):
        item_id = queue.produce(b"", key=str(number))
        keys[item_id.partition("-")[0]] = str(number)
    queue.pause(lease=False, partition=1)
    answer = client.post("queue.produce", queue_name=queue.name, items=[{"key": keys["1"]}, {"key": keys["0"]}])
    assert answer.status == 200
    refused, stored = answer.json["items"]
    assert refused["error"]["code"] == "queue_held" and "id" not in refused
    assert stored["id"].startswith("0-") and "error" not in stored
    queue.pause(lease=False, partition=0)
    answer = client.post("queue.produce", queue_name=queue.name, items=[{"key": keys["1"]}, {"key": keys["0"]}])
    assert answer.status == 409
    assert answer.json["items"] == [{"error": {"code": "queue_held", "message": answer.json["message"]}}] * 2


# -- lease -------------------------------------------------------------------------------------------


def test_a_lease_has_a_token_a_deadline_and_a_consumer(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b"])
    before = datetime.now(UTC)
    reply = client.ok("queue.lease", queue_name=queue.name, batch_size=1, client_id="worker-1", lease_timeout="1m30s")
    (item,) = reply["items"]
    assert (reply["queue_name"], reply["partition"]) == (queue.name, 0)
    assert abs(moment(item["lease_deadline"]) - before - timedelta(seconds=90)) < timedelta(seconds=20)
    assert abs(moment(item["produced_at"]) - before) < timedelta(seconds=20)
    assert client.ok("queue.stats", queue_name=queue.name)["consumers"] == {"worker-1": 1}
    queue.complete(item["lease_token"])  # the token is that of the Python API


def test_a_lease_waits_for_an_item(client: JsonClient, broker: penstock.Broker, queue: penstock.Queue) -> None:
    assert client.ok("queue.lease", queue_name=queue.name) == {"queue_name": queue.name, "items": []}
    assert client.ok("queue.lease", queue_name=queue.name, request_timeout="50ms")["items"] == []

    def produce() -> None:
        wait_until(lambda: queue.stats().waiting_consumers == 1)
        queue.produce(b"late")

    thread = threading.Thread(target=produce)
    thread.start()
    (item,) = leased(client, queue, request_timeout=30)
    thread.join()
    assert item["bytes"] == b64encode(b"late").decode()


def test_a_request_id_makes_a_lease_repeatable(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b"])
    first = leased(client, queue, 1, request_id="r")
    again = leased(client, queue, 1, request_id="r")
    assert [item["lease_token"] for item in again] == [item["lease_token"] for item in first]
    assert client.ok("queue.stats", queue_name=queue.name)["leased"] == 1


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("request_timeout", "16m", "request_timeout is '16m'; give 0s to 15m"),
        ("lease_timeout", "500ms", "lease_timeout is '500ms'; give 1s to 12h"),
        ("batch_size", 0, "`$.batch_size`"),
        ("per_key", 10_001, "`$.per_key`"),
        ("client_id", 5, "`$.client_id`"),
    ],
)
def test_a_lease_that_is_asked_for_wrongly(client: JsonClient, queue: penstock.Queue, field: str, value: Any, why: str) -> None:
    status, code, message = client.refused("queue.lease", queue_name=queue.name, **{field: value})
    assert (status, code) == (400, "invalid_request")
    assert why in message


def test_items_of_a_lease_whose_reply_cannot_be_made_return(client: JsonClient, broker: penstock.Broker) -> None:
    """Such as items whose headers another program has written wrongly."""
    from penstock.operations import ProduceItems
    from penstock.words.batch import Batch

    queue = broker.create_queue("wrong-headers")
    broker.home.call(ProduceItems(queue=queue._incarnation, batch=Batch([b"a"], headers=[b"\xc1"])))
    assert client.refused("queue.lease", queue_name=queue.name)[0] == 400
    wait_until(lambda: queue.stats().ready == 1)


# -- settle ------------------------------------------------------------------------------------------


def test_items_are_completed_by_token_and_by_id(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b", b"c"])
    first, second, third = leased(client, queue)
    tokens = [second["lease_token"], third["lease_token"]]
    done = client.ok("queue.complete", queue_name=queue.name, partition=0, ids=[first["id"], tokens[0]], lease_tokens=[tokens[1]])
    assert done == {"items": [{"id": "0-0"}, {"id": "0-1"}, {"id": "0-2"}]}
    assert queue.stats().completed == 3
    again = client.ok("queue.complete", queue_name=queue.name, ids=[first["id"]], lease_tokens=tokens)
    assert again == {"items": [{"id": "0-0"}, {"id": "0-1"}, {"id": "0-2"}]}


def test_an_id_is_no_lease_token(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce(b"a")
    (item,) = leased(client, queue)
    bodies: dict[str, dict[str, Any]] = {
        "queue.complete": {"lease_tokens": [item["id"]]},
        "queue.bury": {"lease_tokens": [item["id"]]},
        "queue.extend": {"lease_tokens": [item["id"]]},
        "queue.retry": {"items": [{"lease_token": item["id"]}]},
        "queue.progress": {"lease_token": item["id"], "text": "half"},
    }
    for path, body in bodies.items():
        refused = client.refused(path, queue_name=queue.name, **body)
        assert refused == (400, "invalid_request", "'0-0' is not a lease token; give one as lease returned it")
    assert queue.explain(item["id"]).state == "leased"


def test_a_token_is_refused_when_someone_else_has_the_item_and_an_id_is_not(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce(b"a")
    (late,) = leased(client, queue)
    client.ok("queue.retry", queue_name=queue.name, items=[{"lease_token": late["lease_token"]}])
    leased(client, queue)
    answer = client.post("queue.complete", queue_name=queue.name, lease_tokens=[late["lease_token"]])
    assert (answer.status, answer.json["code"]) == (410, "lease_lost")
    assert answer.json["items"] == [{"id": "0-0", "error": {"code": "lease_lost", "message": answer.json["message"]}}]
    client.ok("queue.complete", queue_name=queue.name, ids=[late["id"]])


def test_each_item_has_its_own_result(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b"])
    (item,) = leased(client, queue, 1)
    elsewhere = "0" * 15 + "1.0.10000000001.0"
    reply = client.ok("queue.complete", queue_name=queue.name, ids=["0-1", "7-0", item["id"]], lease_tokens=[elsewhere])
    waiting, unknown, done, lost = reply["items"]
    assert waiting["error"] == {"code": "lease_lost", "message": "item 0-1 is not leased, it is ready; drop the work, or lease it again"}
    assert unknown["error"]["message"].startswith("item 7-0 is not leased, it is unknown")
    assert done == {"id": "0-0"}
    assert lost["error"]["code"] == "lease_lost"
    assert client.ok("queue.complete", queue_name=queue.name) == {"items": []}


def test_what_is_no_id_is_refused_before_anything_is_done(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce(b"a")
    (item,) = leased(client, queue)
    status, code, message = client.refused("queue.complete", queue_name=queue.name, ids=[item["id"], "x"])
    assert (status, code) == (400, "invalid_request")
    assert message == "'x' is not the id of an item; give one as produce returned it, such as '3-17'"
    assert queue.stats().leased == 1
    many = ["0-0"] * 6_000
    assert client.refused("queue.complete", queue_name=queue.name, ids=many, lease_tokens=[item["lease_token"]] * 6_000)[0] == 400


def test_follow_ups_are_produced_with_the_completion(client: JsonClient, broker: penstock.Broker, queue: penstock.Queue) -> None:
    mails = broker.create_queue("mails")
    queue.produce_many([b"a", b"b"])
    first, second = leased(client, queue)
    then = [{"queue_name": "mails", "items": [{"utf8": "hello"}]}, {"queue_name": queue.name, "items": [{"kind": "next"}]}]
    client.ok("queue.complete", queue_name=queue.name, ids=[first["id"]], then=then)
    wait_until(lambda: mails.stats().ready == 1 and queue.stats().ready == 1)
    gone = client.post("queue.complete", queue_name=queue.name, ids=[first["id"]], then=then)
    assert (gone.status, gone.json["code"]) == (410, "lease_lost")  # it cannot know whether these follow-ups were made
    assert "is not leased, it is completed" in gone.json["message"] and "this call made no follow-ups" in gone.json["message"]
    by_token = client.refused("queue.complete", queue_name=queue.name, lease_tokens=[first["lease_token"]], then=then)
    assert by_token[:2] == (400, "invalid_request") and "this call made no follow-ups" in by_token[2]
    nowhere = client.refused("queue.complete", queue_name=queue.name, ids=[second["id"]], then=[{"queue_name": "none", "items": [{}]}])
    assert nowhere[:2] == (404, "queue_not_found")
    assert mails.stats().produced == 1


def test_a_repeated_request_with_follow_ups_is_answered_the_same(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce(b"a")
    (item,) = leased(client, queue)
    request = {"queue_name": queue.name, "lease_tokens": [item["lease_token"]], "request_id": "r1"}
    request["then"] = [{"queue_name": queue.name, "items": [{"utf8": "next"}]}]
    assert client.ok("queue.complete", **request) == client.ok("queue.complete", **request) == {"items": [{"id": item["id"]}]}
    wait_until(lambda: queue.stats().ready == 1)
    assert queue.stats().produced == 2


def test_follow_ups_need_items_of_one_lease(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b"])
    ids = [leased(client, queue, 1)[0]["id"] for _ in range(2)]
    then = [{"queue_name": queue.name, "items": [{}]}]
    assert "only with items of one lease" in client.refused("queue.complete", queue_name=queue.name, ids=ids, then=then)[2]
    assert queue.stats().leased == 2


def test_completing_is_repeatable_by_a_request_id(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce(b"a")
    (item,) = leased(client, queue)
    then = [{"queue_name": queue.name, "items": [{"utf8": "next"}]}]
    settle = {"queue_name": queue.name, "lease_tokens": [item["lease_token"]], "then": then, "request_id": "r"}
    first = client.ok("queue.complete", **settle)
    assert client.ok("queue.complete", **settle) == first
    wait_until(lambda: queue.stats().ready == 1)
    assert queue.stats().produced == 2


def test_items_are_retried_at_once_later_or_never(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b", b"c", b"d"])
    a, b, c, d = leased(client, queue)
    at = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
    items = [
        {"id": a["id"]},
        {"lease_token": b["lease_token"], "retry_at": at},
        {"lease_token": c["lease_token"], "dead": True},
        {"lease_token": d["lease_token"], "retry_at": "2020-01-01T00:00:00Z"},
    ]
    reply = client.ok("queue.retry", queue_name=queue.name, items=items, reason="busy", request_id="r")
    assert reply["items"] == [{"id": f"0-{number}"} for number in range(4)]
    found = {item["id"]: item for item in client.ok("storage/items.list", queue_name=queue.name)["items"]}
    assert [found[f"0-{number}"]["state"] for number in range(4)] == ["ready", "scheduled", "buried", "ready"]
    assert found["0-2"]["reason"] == "busy"
    why = client.ok("queue.explain", queue_name=queue.name, id="0-1")
    assert 7_000 < why["ready_in_seconds"] <= 7_200
    tokens = [{**item, "lease_token": lease["lease_token"]} for item, lease in zip(items, (a, b, c, d), strict=True)]
    again = client.ok("queue.retry", queue_name=queue.name, items=tokens, reason="busy", request_id="r")
    assert again == reply
    (ready, _) = leased(client, queue)
    assert ready["attempts"] == 2
    assert "neither an id nor a lease_token" in client.refused("queue.retry", queue_name=queue.name, items=[{}])[2]


def test_a_retry_may_wait_and_not_count(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce(b"a")
    (item,) = leased(client, queue)
    client.ok("queue.retry", queue_name=queue.name, items=[{"id": item["id"]}], delay="1h", counted=False)
    (listed,) = client.ok("storage/items.list", queue_name=queue.name)["items"]
    assert (listed["state"], listed["attempts"]) == ("scheduled", 0)


def test_items_are_buried_and_leases_extended(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce_many([b"a", b"b"])
    first, second = leased(client, queue)
    client.ok("queue.extend", queue_name=queue.name, ids=[second["id"]], lease_timeout="2h")
    (listed, _) = client.ok("storage/items.list", queue_name=queue.name, states=["leased"])["items"]
    assert listed["is_leased"] is True
    assert moment(listed["lease_deadline"]) > datetime.now(UTC) + timedelta(hours=1)
    client.ok("queue.bury", queue_name=queue.name, lease_tokens=[first["lease_token"]], reason="broken")
    explained = client.ok("queue.explain", queue_name=queue.name, id=first["id"])
    assert (explained["state"], explained["reason"]) == ("buried", "broken")


def test_items_of_one_key_are_settled_in_order(client: JsonClient, queue: penstock.Queue) -> None:
    client.ok("queue.produce", queue_name=queue.name, items=[{"key": "k"}, {"key": "k"}])
    first, second = leased(client, queue, per_key=2)
    status, code, message = client.refused("queue.complete", queue_name=queue.name, ids=[second["id"]])
    assert (status, code) == (400, "invalid_request")
    assert message == "item 0-1 must wait for earlier items of its key under this lease; settle those first"
    client.ok("queue.complete", queue_name=queue.name, ids=[first["id"], second["id"]])


def test_progress_is_shown(client: JsonClient, queue: penstock.Queue) -> None:
    queue.produce(b"a")
    (item,) = leased(client, queue, client_id="me")
    for name, value in (("id", item["id"]), ("lease_token", item["lease_token"])):
        assert client.ok("queue.progress", queue_name=queue.name, text=f"by {name}", **{name: value}) == {}
        explained = client.ok("queue.explain", queue_name=queue.name, id=item["id"])
        assert f"by {name}" in explained["why"] and explained["client_id"] == "me"
    client.ok("queue.complete", queue_name=queue.name, ids=[item["id"]])
    assert client.refused("queue.progress", queue_name=queue.name, text="x", id=item["id"])[:2] == (410, "lease_lost")


# -- lists and the log -------------------------------------------------------------------------------


def test_items_are_listed_page_by_page(client: JsonClient, broker: penstock.Broker) -> None:
    queue = broker.create_queue("listed", partitions=2, ttl=3600)
    ids = sorted((queue.produce(b"x", key=str(number)) for number in range(10)), key=lambda one: [*map(int, one.split("-"))])
    found: list[str] = []
    page = client.ok("storage/items.list", queue_name=queue.name, limit=3)
    while "next_pivot" in page:
        found += [item["id"] for item in page["items"]]
        page = client.ok("storage/items.list", queue_name=queue.name, limit=3, pivot=page["next_pivot"])
    assert (found, page["items"]) == (ids, [])
    from_fifth = client.ok("storage/items.list", queue_name=queue.name, limit=1, pivot=ids[4])["items"]
    assert [item["id"] for item in from_fifth] == [ids[4]]
    for number in (0, 1):
        some = client.ok("storage/items.list", queue_name=queue.name, partition=number)["items"]
        assert [item["id"] for item in some] == [one for one in ids if one.startswith(f"{number}-")]
    (item,) = from_fifth
    assert moment(item["expire_deadline"]) == moment(item["created_at"]) + timedelta(hours=1)
    assert client.ok("storage/items.list", queue_name=queue.name, states=["buried", "leased"]) == {"items": []}


def test_the_log_is_read_from_offsets_on(client: JsonClient, broker: penstock.Broker) -> None:
    queue = broker.create_queue("read", partitions=2)
    ids = {queue.produce(str(number).encode(), key=str(number)) for number in range(10)}
    page = client.ok("log.read", queue_name=queue.name, limit=4)
    found = [item["id"] for item in page["items"]]
    while page["items"]:
        page = client.ok("log.read", queue_name=queue.name, limit=4, offsets=page["next_offsets"])
        found += [item["id"] for item in page["items"]]
    assert sorted(found) == sorted(ids)
    end = client.ok("log.offsets", queue_name=queue.name, at="newest")["offsets"]
    assert page["next_offsets"] == end
    assert client.ok("log.offsets", queue_name=queue.name, at="oldest")["offsets"] == {"0": 0, "1": 0}
    assert client.ok("log.offsets", queue_name=queue.name, at="2020-01-01T00:00:00Z")["offsets"] == {"0": 0, "1": 0}
    assert "give oldest, newest, or a time" in client.refused("log.offsets", queue_name=queue.name, at="now")[2]


def test_reading_the_log_waits_for_items(client: JsonClient, queue: penstock.Queue) -> None:
    assert client.ok("log.read", queue_name=queue.name, wait="20ms") == {"items": [], "next_offsets": {"0": 0}}
    started = threading.Event()

    def produce() -> None:
        started.wait()
        queue.produce(b"late")

    thread = threading.Thread(target=produce)
    thread.start()
    started.set()
    page = client.ok("log.read", queue_name=queue.name, wait=30)
    thread.join()
    assert [item["bytes"] for item in page["items"]] == [b64encode(b"late").decode()]


def test_an_item_tells_where_it_came_from(client: JsonClient, broker: penstock.Broker) -> None:
    dead = broker.create_queue("dead")
    queue = broker.create_queue("alive", dead_queue="dead")
    queue.produce(b"a")
    (item,) = leased(client, queue)
    client.ok("queue.bury", queue_name=queue.name, ids=[item["id"]], reason="broken")
    wait_until(lambda: dead.stats().ready == 1)
    (letter,) = leased(client, dead)
    assert letter["origin"]["queue_name"] == "alive"
    assert (letter["origin"]["id"], letter["origin"]["reason"]) == (item["id"], "broken")
    assert moment(letter["origin"]["produced_at"]) == moment(item["produced_at"])
