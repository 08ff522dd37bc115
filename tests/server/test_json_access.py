"""The JSON API with API keys: every operation of a request is checked."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.operations import Scope
from penstock.server.api_keys import KeyFile
from penstock.server.http_server import HttpServer
from penstock.server.key_ring import KeyRing
from tests.server.conftest import serve
from tests.server.json_client import JsonClient, json_client


class KeyedApi:
    """A server with keys, whose broker has the queues a.one, a.two and b.one."""

    def __init__(self, server: HttpServer, keys: KeyFile, stack: ExitStack) -> None:
        self._server = server
        self._keys = keys
        self._stack = stack
        self._made = 0

    def client(self, *scopes: Scope, prefix: str = "") -> JsonClient:
        """A client with a new key."""
        self._made += 1
        _, key = self._keys.create(f"key-{self._made}", scopes, [prefix] if prefix else [])
        return self._stack.enter_context(json_client(self._server, key))

    def stranger(self) -> JsonClient:
        """A client without a key."""
        return self._stack.enter_context(json_client(self._server))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedApi]:
    data: Path = tmp_path_factory.mktemp("keyed") / "data"
    with penstock.open(data, durability="os") as broker, ExitStack() as stack:
        for name in ("a.one", "a.two", "b.one"):
            broker.create_queue(name)
        keys = KeyFile(str(data))
        keys.create("first", ["admin"], [])
        with serve(broker.home, keys=KeyRing(str(data))) as server:
            yield KeyedApi(server, keys, stack)
            stack.close()


ITEMS = [{"utf8": "x"}]


def test_a_page_in_a_browser_may_have_a_key(api: KeyedApi) -> None:
    assert api.client("look").send("/v1/queue.stats", b'{"queue_name": "a.one"}', origin="https://shop.example").status == 200


def test_a_request_needs_a_key(api: KeyedApi) -> None:
    answer = api.stranger().post("queue.stats", queue_name="a.one")
    assert (answer.status, answer.json["code"], answer.headers["www-authenticate"]) == (401, "unauthenticated", "Bearer")
    assert api.stranger().send("/v1/queue.stats", b"", content_type=None).status == 401  # before anything else is checked


def test_a_request_needs_the_scope_of_its_operations(api: KeyedApi) -> None:
    produce, consume, look, read = (api.client(scope) for scope in ("produce", "consume", "look", "read"))
    produce.ok("queue.produce", queue_name="a.one", items=ITEMS)
    assert produce.refused("queue.lease", queue_name="a.one")[:2] == (403, "access_denied")
    (item,) = consume.ok("queue.lease", queue_name="a.one")["items"]
    assert consume.refused("queue.produce", queue_name="a.one", items=ITEMS)[:2] == (403, "access_denied")
    then = [{"queue_name": "a.two", "items": ITEMS}]
    assert consume.refused("queue.complete", queue_name="a.one", ids=[item["id"]], then=then)[:2] == (403, "access_denied")
    consume.ok("queue.complete", queue_name="a.one", ids=[item["id"]])
    assert look.ok("queue.stats", queue_name="a.one")["completed"] == 1
    assert look.refused("storage/items.list", queue_name="a.one")[:2] == (403, "access_denied")
    assert [one["id"] for one in read.ok("log.read", queue_name="a.one", wait="10ms")["items"]] == [item["id"]]
    assert read.refused("queue.clear", queue_name="a.one", queue=True)[:2] == (403, "access_denied")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("queue.produce", {"queue_name": "b.one", "items": ITEMS}),
        ("queue.complete", {"queue_name": "b.one", "lease_tokens": ["0" * 15 + "1.0.10000000001.0"]}),
        ("queue.complete", {"queue_name": "b.one", "ids": ["0-0"]}),
        ("queue.complete", {"queue_name": "b.one"}),
        ("queue.complete", {"queue_name": "a.one", "then": [{"queue_name": "b.one", "items": ITEMS}]}),
        ("queue.redrive", {"queue_name": "a.one", "to": "b.one"}),
        ("queue.redrive", {"queue_name": "b.one", "to": "a.one"}),
        ("queues.create", {"queue_name": "b.two"}),
        ("queues.create", {"queue_name": "a.three", "dead_queue": "b.one"}),
        ("queues.update", {"queue_name": "a.one", "dead_queue": "b.one"}),
        ("queues.update", {"queue_name": "b.one"}),
        ("queues.delete", {"queue_name": "b.one"}),
        ("queues.info", {"queue_name": "b.one"}),
        ("queues.info", {"queue_name": "b.none"}),
    ],
)
def test_a_prefix_binds_every_queue_that_a_request_names(api: KeyedApi, path: str, fields: dict[str, Any]) -> None:
    api.client("admin").ok("queue.produce", queue_name="b.one", items=ITEMS)  # its name is known to the server now
    answer = api.client("admin", prefix="a.").post(path, **fields)
    assert (answer.status, answer.json["code"]) == (403, "access_denied")


def test_lists_show_only_the_queues_of_the_key(api: KeyedApi) -> None:
    client = api.client("look", prefix="a.")
    assert [one["queue_name"] for one in client.ok("queues.list")["items"]] == ["a.one", "a.two"]
    assert set(client.ok("broker.metrics")["queues"]) == {"a.one", "a.two"}
