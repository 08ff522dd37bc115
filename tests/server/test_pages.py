"""The pages of the server: health, metrics, and paths that do not exist."""

import json
from contextlib import closing
from pathlib import Path

import penstock
from penstock.operations import CreateQueue, LeaseItems, ProduceItems
from penstock.server.api_keys import KeyFile
from penstock.server.http_server import HttpServer
from penstock.server.key_ring import KeyRing
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from tests.server.conftest import serve
from tests.server.poster import Poster, wait_until, waiting_leases


def get(server: HttpServer, path: str, key: str = "", method: str = "GET") -> tuple[int, dict[str, str], str]:
    poster = Poster(server, key)
    with closing(poster.connection):
        poster.connection.request(method, path, headers=poster.headers)
        response = poster.connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()


def test_health(server: HttpServer) -> None:
    for path in ("/health/live", "/health/ready"):
        status, headers, body = get(server, path)
        assert (status, headers["content-type"], json.loads(body)["status"]) == (200, "application/json", "ok")


def test_metrics_show_the_broker_and_the_server(server: HttpServer, poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    poster.call(ProduceItems(queue=queue, batch=Batch([b"1", b"2"])))
    poster.call(LeaseItems(queue=queue))
    waiting = Poster(server)
    with closing(waiting.connection):
        waiting.start(LeaseItems(queue=poster.call(CreateQueue(name="empty")).incarnation, wait=60 * SECOND))
        wait_until(lambda: "penstock_http_waiting_requests 1" in get(server, "/metrics")[2])
    status, headers, body = get(server, "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    lines = body.splitlines()
    assert 'penstock_items{queue="orders",partition="0",state="ready"} 1' in lines
    assert 'penstock_http_requests_total{path="/v1/call",status="200"} 4' in lines
    assert any(line.startswith('penstock_http_request_duration_seconds_count{path="/v1/call"}') for line in lines)


def test_metrics_need_a_key_and_show_its_queues(tmp_path: Path) -> None:
    keys = KeyFile(str(tmp_path))
    _, admin = keys.create("admin", ["admin"])
    _, some = keys.create("some", ["look"], ["ord"])
    _, producer = keys.create("producer", ["produce"])
    with penstock.open(tmp_path) as broker, serve(broker.home, keys=KeyRing(str(tmp_path))) as server:
        broker.create_queue("orders")
        broker.create_queue("secret")
        assert get(server, "/metrics")[0] == 401
        assert get(server, "/metrics", producer)[0] == 403
        assert 'queue="secret"' in get(server, "/metrics", admin)[2]
        shown = get(server, "/metrics", some)[2]
        assert 'queue="orders"' in shown
        assert "secret" not in shown
        assert get(server, "/health/ready")[0] == 200
        assert 'penstock_http_auth_failures_total{code="unauthenticated"} 1' in get(server, "/metrics", admin)[2]


def test_a_path_that_does_not_exist_names_similar_ones(server: HttpServer) -> None:
    status, _, body = get(server, "/v1/queue.produse", method="POST")
    assert (status, json.loads(body)["code"]) == (404, "unknown_path")
    assert "/v1/queue.produce" in body
    status, headers, body = get(server, "/v1/queue.produce")
    assert (status, headers["allow"], json.loads(body)["code"]) == (405, "POST", "method_not_allowed")
    status, headers, body = get(server, "/metrics", method="POST")
    assert (status, headers["allow"], json.loads(body)["code"]) == (405, "GET", "method_not_allowed")


def test_the_start_page_says_where_things_are(server: HttpServer) -> None:
    assert "/openapi.json" in get(server, "/")[2]
    assert json.loads(get(server, "/openapi.json")[2])["openapi"].startswith("3.1")


def test_a_waiting_lease_keeps_nobody_from_the_pages(server: HttpServer, poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    waiting = Poster(server)
    with closing(waiting.connection):
        waiting.start(LeaseItems(queue=queue, wait=60 * SECOND))
        wait_until(lambda: waiting_leases(poster, queue) == 1)
        assert get(server, "/health/ready")[0] == 200
