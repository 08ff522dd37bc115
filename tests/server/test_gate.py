"""Keys at the server: who is let in, what they may do, and what happens when a key ends."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import operations
from penstock.loop.requests import SettlePart
from penstock.operations import (
    CreateQueue,
    DescribeOwner,
    FindQueue,
    LeaseItems,
    ListQueues,
    Operation,
    ProduceItems,
    ReadMetrics,
    ReadStats,
    Scope,
    SettleItems,
)
from penstock.server.api_keys import KeyFile
from penstock.server.audit import AuditLog
from penstock.server.http_server import HttpServer
from penstock.server.key_ring import KeyRing
from penstock.server.server_limits import ServerLimits
from penstock.wire.http_calls import CALL_PATH, VERSION, VERSION_HEADER, decode_error
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import AccessDenied, QueueBusy, QueueNotFound, Unauthenticated
from tests.server.conftest import serve
from tests.server.poster import Poster, wait_until, waiting_leases


@contextmanager
def client(server: HttpServer, key: str = "") -> Iterator[Poster]:
    poster = Poster(server, key)
    with closing(poster.connection):
        yield poster


class KeyedServer:
    """A server whose broker has keys."""

    def __init__(self, server: HttpServer, keys: KeyFile, audit: Path) -> None:
        self.server = server
        self.keys = keys
        self.audit = audit
        self.made = 0

    def key(self, *scopes: Scope, prefixes: tuple[str, ...] = ()) -> str:
        self.made += 1
        return self.keys.create(f"test-{self.made}", scopes, prefixes)[1]

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text("utf-8").splitlines()]


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[KeyedServer]:
    with penstock.open(tmp_path / "data") as broker:
        keys = KeyFile(str(tmp_path / "data"))
        keys.create("first", ["admin"], [])
        audit = AuditLog(str(tmp_path / "audit"))
        with serve(broker.home, keys=KeyRing(str(tmp_path / "data")), audit=audit) as server:
            yield KeyedServer(server, keys, tmp_path / "audit")
        audit.close()


def queue_of(keyed: KeyedServer, name: str = "orders") -> int:
    with client(keyed.server, keyed.key("admin")) as admin:
        found: int = admin.call(CreateQueue(name=name, exist_ok=True)).incarnation
        return found


@pytest.mark.parametrize("key", ["", "pk_0_0", "nonsense"])
def test_a_request_without_a_valid_key_is_refused(keyed: KeyedServer, key: str) -> None:
    with client(keyed.server, key) as stranger, pytest.raises(Unauthenticated):
        stranger.call(ListQueues())
    assert keyed.audited()[-1]["outcome"] == "unauthenticated"


def test_a_key_allows_its_scopes_only(keyed: KeyedServer) -> None:
    queue = queue_of(keyed)
    with client(keyed.server, keyed.key("produce")) as producer:
        producer.call(ProduceItems(queue=producer.call(FindQueue(name="orders")).incarnation, batch=Batch([b"1"])))
        for operation in (LeaseItems(queue=queue), ReadStats(queue=queue), CreateQueue(name="other")):
            with pytest.raises(AccessDenied, match="needs the scope"):
                producer.call(operation)
    with client(keyed.server, keyed.key("consume")) as consumer:
        assert consumer.call(LeaseItems(queue=queue))
    assert [line["operation"] for line in keyed.audited() if line["outcome"] == "access_denied"] == [
        "LeaseItems",
        "ReadStats",
        "CreateQueue",
    ]


def test_prefixes_bind_every_queue_that_an_operation_names(keyed: KeyedServer) -> None:
    orders, secret = queue_of(keyed), queue_of(keyed, "secret")
    with client(keyed.server, keyed.key("admin", prefixes=("ord",))) as caller:
        assert [one.name for one in caller.call(ListQueues())] == ["orders"]
        assert [*caller.call(ReadMetrics()).queues] == ["orders"]
        caller.call(ProduceItems(queue=orders, batch=Batch([b"1"])))
        (part,) = caller.call(LeaseItems(queue=orders))
        refused: list[tuple[Operation[Any], type[Exception]]] = [
            (ReadStats(queue=secret), QueueNotFound),
            (ProduceItems(queue=secret, batch=Batch([b"1"])), QueueNotFound),
            (
                SettleItems(queue=orders, action="complete", parts=[SettlePart(0, part.granted.lease)], then=[(secret, Batch([b"1"]))]),
                QueueNotFound,
            ),
            (FindQueue(name="secret"), AccessDenied),
            (FindQueue(queue=secret), QueueNotFound),
            (CreateQueue(name="ordered", options={"dead_queue": "secret"}), AccessDenied),
            (DescribeOwner(), AccessDenied),
        ]
        for operation, error in refused:
            with pytest.raises(error):
                caller.call(operation)
    with client(keyed.server, keyed.key("look")) as other:
        assert other.call(ReadStats(queue=secret)).ready == 0


def test_a_key_that_is_revoked_ends_the_lease_that_waits_for_it(keyed: KeyedServer) -> None:
    queue = queue_of(keyed)
    text = keyed.key("consume")
    with client(keyed.server, text) as waiting, client(keyed.server, keyed.key("look", "produce")) as other:
        waiting.start(LeaseItems(queue=queue, wait=60 * SECOND))
        wait_until(lambda: waiting_leases(other, queue) == 1)
        keyed.keys.revoke(text.split("_")[1])
        response = waiting.connection.getresponse()
        assert response.status == 401
        assert "is not valid any more" in str(decode_error(response.read()))
        line = keyed.audited()[-1]
        assert (line["operation"], line["queue"], line["outcome"]) == ("LeaseItems", "orders", "unauthenticated")
        wait_until(lambda: waiting_leases(other, queue) == 0)
        other.call(ProduceItems(queue=queue, batch=Batch([b"1"])))
        assert other.call(ReadStats(queue=queue)).ready == 1


def test_a_key_that_is_revoked_while_a_body_comes_slowly_is_refused(keyed: KeyedServer) -> None:
    queue, key = queue_of(keyed), keyed.key("produce")
    body = operations.encode(ProduceItems(queue=queue, batch=Batch([b"1"])))
    with client(keyed.server) as slow:
        slow.connection.putrequest("POST", CALL_PATH)
        for name, value in {VERSION_HEADER: VERSION, "authorization": f"Bearer {key}", "content-length": str(len(body))}.items():
            slow.connection.putheader(name, value)
        slow.connection.endheaders()
        wait_until(lambda: keyed.server.requests == 1)
        keyed.keys.revoke(key.split("_")[1])
        time.sleep(1.2)
        slow.connection.send(body)
        refused = slow.connection.getresponse()
        assert (refused.status, decode_error(refused.read()).code) == (401, "unauthenticated")
    with client(keyed.server, keyed.key("look")) as other:
        assert other.call(ReadStats(queue=queue)).ready == 0


def test_the_first_key_closes_an_open_server(tmp_path: Path) -> None:
    with (
        penstock.open(tmp_path) as broker,
        serve(broker.home, keys=KeyRing(str(tmp_path))) as server,
        client(server) as waiting,
        client(server) as other,
    ):
        queue = other.call(CreateQueue(name="orders")).incarnation
        waiting.start(LeaseItems(queue=queue, wait=60 * SECOND))
        wait_until(lambda: waiting_leases(other, queue) == 1)
        KeyFile(str(tmp_path)).create("first", ["admin"], [])
        assert waiting.connection.getresponse().status == 401


def test_admin_operations_are_audited_with_names(keyed: KeyedServer) -> None:
    queue = queue_of(keyed)
    with client(keyed.server, keyed.key("admin")) as admin:
        admin.call(operations.PauseQueue(queue=queue, lease=True))
    line = keyed.audited()[-1]
    assert (line["operation"], line["queue"], line["key_name"], line["client"], line["outcome"]) == (
        *("PauseQueue", "orders", "test-2", "127.0.0.1", "ok"),
    )


def test_refusals_are_audited_with_names(keyed: KeyedServer) -> None:
    queue = queue_of(keyed)
    with client(keyed.server, keyed.key("look")) as caller, pytest.raises(AccessDenied):
        caller.call(LeaseItems(queue=queue))
    line = keyed.audited()[-1]
    assert (line["operation"], line["queue"], line["outcome"]) == ("LeaseItems", "orders", "access_denied")


def test_no_more_requests_wait_than_allowed(tmp_path: Path) -> None:
    with (
        penstock.open(tmp_path) as broker,
        serve(broker.home, ServerLimits(waiting_leases=1)) as server,
        client(server) as waiting,
        client(server) as other,
    ):
        queue = other.call(CreateQueue(name="orders")).incarnation
        waiting.start(LeaseItems(queue=queue, wait=60 * SECOND))
        wait_until(lambda: waiting_leases(other, queue) == 1)
        with pytest.raises(QueueBusy, match="too many requests wait"):
            other.call(LeaseItems(queue=queue, wait=SECOND))
        assert other.call(LeaseItems(queue=queue)) == []


def test_no_secret_is_logged(keyed: KeyedServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    text = keyed.key("admin")
    with client(keyed.server, text) as admin:
        admin.call(CreateQueue(name="orders"))
        admin.post(CALL_PATH, b"\xc1", {VERSION_HEADER: VERSION, "authorization": f"Bearer {text}"})
    assert text not in caplog.text + keyed.audit.read_text("utf-8")
