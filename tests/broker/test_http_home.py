"""The broker of a server over HTTP, as users open it: addresses, options, lost connections, many calls, interrupts."""

import asyncio
import logging
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import penstock
from penstock.broker.http_home import HttpBroker
from penstock.errors import AccessDenied, BrokerClosed, InvalidRequest, PenstockError, Unauthenticated
from penstock.server.api_keys import KeyFile
from penstock.server.http_server import HttpServer
from penstock.server.key_ring import KeyRing
from penstock.wire.http_address import HttpAddress, HttpOptions
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import wait_until
from tests.broker.scripted_server import Raw, ScriptedServer
from tests.server.conftest import serve
from tests.server.poster import address_of
from tests.wire.tcp_proxy import Direction, TcpProxy
from tests.worker import child_handlers
from tests.worker.harness import HandlerEvents, running_worker, wait_completed

WAIT = 30.0


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[penstock.Broker]:
    """The broker that the server serves."""
    with penstock.open(tmp_path / "data") as owner:
        yield owner


@pytest.fixture
def server(owner: penstock.Broker) -> Iterator[HttpServer]:
    with serve(owner.home) as server:
        yield server


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# -- opening -------------------------------------------------------------------------------------------


def test_a_server_is_used_like_any_broker(server: HttpServer) -> None:
    with penstock.open(server.url) as broker:
        assert repr(broker) == f"Broker('{server.url}', open)"
        dead = broker.create_queue("dead")
        orders = broker.create_queue("orders", partitions=3, dead_queue="dead", max_attempts=1)
        ids = orders.produce_many([penstock.NewItem({"n": number}, key=f"k{number}") for number in range(10)])
        assert len(ids) == 10 and orders.stats().ready == 10
        with orders.lease()[0] as lease:
            assert lease.item.value["n"] in range(10)
        failed = orders.lease()[0]
        failed.retry(reason="no")
        wait_until(lambda: dead.stats().ready == 1)
        assert broker.redrive("dead", to="orders").items == 1
        wait_until(lambda: orders.stats().ready == 9)
        cursor = orders.cursor("audit")
        assert len(cursor.read(100)) == 11
        cursor.commit()
        assert orders.explain(ids[0]).state in ("ready", "completed", "buried", "moving")
        assert {info.name for info in broker.queues()} == {"dead", "orders"}
        assert broker.metrics().queues["orders"].requests["produce"] >= 1
        broker.delete_queue("orders")
    with pytest.raises(BrokerClosed):
        orders.stats()


def test_an_address_that_nobody_answers_fails_at_once_with_what_to_do() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    message = rf"no Penstock server answers at {url} \(.*[Rr]efused.*\); start it with `penstock serve`"
    with pytest.raises(BrokerClosed, match=message):
        penstock.open(url, wait=0)
    with pytest.raises(BrokerClosed, match=message):
        asyncio.run(penstock.aopen(url, wait=0.1))


def test_open_waits_for_a_server_that_is_started_meanwhile(owner: penstock.Broker) -> None:
    port = free_port()
    opened: SimpleQueue[penstock.Broker] = SimpleQueue()
    thread = threading.Thread(target=lambda: opened.put(penstock.open(f"http://127.0.0.1:{port}", wait=WAIT)))
    thread.start()
    with serve(owner.home, port=port):
        with opened.get(timeout=WAIT) as broker:
            broker.create_queue("orders")
        thread.join()


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (AccessDenied("the key is unknown; give another"), AccessDenied, "the key is unknown"),
        (InvalidRequest("the server speaks version 2.0 of the protocol; x"), InvalidRequest, "version 2.0"),
        (Raw(404), InvalidRequest, "no Penstock server answers at"),
    ],
)
def test_what_the_server_refuses_fails_when_it_is_opened(
    scripted: ScriptedServer, reply: Any, kind: type[PenstockError], message: str
) -> None:
    scripted.answer(reply)
    with pytest.raises(kind, match=message):
        penstock.open(scripted.url)


BAD_TARGETS = {
    "ftp://host": "ftp://… cannot be opened",
    "postgresql://user:hunter2@host/db": "postgresql://… cannot be opened",
    "http://user:hunter2@host:2319": "the address has a user name or password; give the API key as api_key=",
    "http://": "has no host",
    "http://host:99999": "cannot be understood",
    "http://host:x": "cannot be understood",
    "http://[::1": "cannot be understood",
    "http://host/?a=1": "has a query or a fragment",
    "http://host/#top": "has a query or a fragment",
    "http://host/#": "has a query or a fragment",
    "http://host name": "spaces, control or non-ASCII characters",
    "http://host\r\nx: y": "spaces, control or non-ASCII characters",
    "http://höst": "spaces, control or non-ASCII characters",
    "http://fe80::1%25eth0/": "cannot be understood",
}


@pytest.mark.parametrize("target", BAD_TARGETS)
def test_an_address_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(InvalidRequest) as found:
        penstock.open(target)
    assert BAD_TARGETS[target] in str(found.value) and "hunter2" not in str(found.value)


@pytest.mark.parametrize(
    ("url", "parsed", "canonical"),
    [
        ("http://host", HttpAddress(False, "host", 80, ""), "http://host"),
        ("https://Host:443/", HttpAddress(True, "host", 443, ""), "https://host"),
        ("http://host:2319/queues/", HttpAddress(False, "host", 2319, "/queues"), "http://host:2319/queues"),
        ("HTTP://[::1]:2319", HttpAddress(False, "::1", 2319, ""), "http://[::1]:2319"),
    ],
)
def test_an_address_has_a_host_a_port_and_perhaps_a_path(url: str, parsed: HttpAddress, canonical: str) -> None:
    assert HttpAddress.parse(url) == parsed and parsed.url == canonical


def test_a_path_before_that_of_the_server_is_sent(scripted: ScriptedServer) -> None:
    scripted.answer(penstock.errors.QueueNotFound("none; x"))
    penstock.open(f"{scripted.url}/queues/").close()
    assert scripted.heads[0].startswith("POST /queues/v1/call HTTP/1.1")


@pytest.mark.parametrize(
    "options",
    [
        {"durability": "os"},
        {"roots": ["/more"]},
        {"own": False},
        {"exclusive": True},
        {"read_only": True},
        {"min_free_bytes": 0},
        {"segment_bytes": 1 << 20},
        {"compression": False},
        {"files": object()},
        {"clock": penstock.testing.ManualClock()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_a_directory_are_refused_for_a_server(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=rf"{next(iter(options))}.*leave"):
        penstock.open("http://127.0.0.1:9", **options)


@pytest.mark.parametrize(
    "options", [{"api_key": "k"}, {"ca_file": "ca.pem"}, {"cert_file": "c"}, {"key_file": "k"}, {"connect_timeout": 1}]
)
def test_options_of_a_server_are_refused_for_a_directory(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=rf"{next(iter(options))} is for a server"):
        penstock.open(tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ca_file": "ca.pem"}, "ca_file is for https://"),
        ({"api_key": "two words"}, "the API key has characters that no key has"),
        ({"api_key": "line\r\nx: y"}, "the API key has characters that no key has"),
        ({"api_key": 5}, "api_key is int; give a text"),
        ({"ca_file": 5}, "ca_file is 5; give the path of a file"),
        ({"connect_timeout": 0}, "connect_timeout is 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as found:
        penstock.open("http://127.0.0.1:9", **options)
    assert "two words" not in str(found.value)


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "from-the-environment")
    not_found = penstock.errors.QueueNotFound("none; x")
    scripted.answer(not_found, not_found, Raw(502), not_found)
    with caplog.at_level(logging.DEBUG):
        with penstock.open(scripted.url) as broker:
            assert "environment" not in repr(broker) + repr(broker.home) + repr(vars(broker)) + repr(vars(broker.home))
        with penstock.open(scripted.url, api_key="given-key") as broker, pytest.raises(penstock.errors.QueueNotFound):
            broker.queue("q")
    assert "authorization: bearer from-the-environment" in scripted.heads[0].lower()
    assert "authorization: bearer given-key" in scripted.heads[1].lower()
    assert "environment" not in caplog.text and "given-key" not in caplog.text


def test_a_server_with_keys_is_used_with_one(owner: penstock.Broker, tmp_path: Path) -> None:
    keys = KeyFile(str(tmp_path / "data"))
    key = keys.create("web", ["produce"], ["orders"])[1]
    owner.create_queue("orders")
    owner.create_queue("others")
    with serve(owner.home, keys=KeyRing(str(tmp_path / "data"))) as server:
        for wrong in (None, "pk_nonsense", key[:-1] + ("A" if key[-1] != "A" else "B")):
            with pytest.raises(Unauthenticated):
                penstock.open(server.url, api_key=wrong)
        with penstock.open(server.url, api_key=key) as broker:
            orders = broker.queue("orders")
            orders.produce("x")
            with pytest.raises(AccessDenied, match="needs the scope 'consume'"):
                orders.lease()
            with pytest.raises(AccessDenied, match="'others'"):
                broker.queue("others")
    assert owner.queue("orders").stats().ready == 1


def test_without_httptools_open_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    for module in ("penstock.broker.http_home", "penstock.broker.http_client", "penstock.wire.http_connection"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(InvalidRequest, match=r"run pip install 'penstock\[http\]'"):
        penstock.open("http://127.0.0.1:9")


# -- lost connections ----------------------------------------------------------------------------------


def test_nothing_is_done_twice_when_connections_end_anywhere(server: HttpServer, owner: penstock.Broker) -> None:
    """Within the request, so that the server never sees it whole; or within the response, when it was done."""
    proxy = TcpProxy(address_of(server))
    cuts: list[tuple[Direction, float]] = [
        *[("request", share) for share in (0, 0.01, 0.5, 0.9, 0.99)],
        *[("response", share) for share in (0, 0.01, 0.5, 0.9)],
    ]

    def repeated(verb: Callable[[int], Any]) -> list[Any]:
        """What a call gives that is cut once, for each of the cuts; and for none."""
        found = [verb(0)]
        sizes = {"request": proxy.last_sizes["request"], "response": proxy.last_sizes["response"]}
        for number, (direction, share) in enumerate(cuts, 1):
            before = proxy.cuts
            proxy.cut_after(direction, int(sizes[direction] * share))
            found.append(verb(number))
            assert proxy.cuts == before + 1, (direction, share)
        return found

    count = len(cuts) + 1
    with penstock.open(proxy.url) as broker:
        queue = broker.create_queue("orders", partitions=4)
        assert len({*repeated(lambda number: queue.produce(f"item {number}"))}) == count
        assert queue.stats().produced == count
        leases = [batch[0] for batch in repeated(lambda number: queue.lease(1))]
        assert sorted(lease.item.value for lease in leases) == sorted(f"item {number}" for number in range(count))
        repeated(lambda number: leases[number].complete())
        stats = owner.queue("orders").stats()
        assert (stats.completed, stats.ready, stats.leased) == (count, 0, 0)
        repeated(lambda number: broker.create_queue(f"queue-{number}"))
    proxy.close()
    assert len(owner.queues()) == 1 + count


def test_a_call_ends_at_its_deadline_when_the_network_takes_everything(server: HttpServer, owner: penstock.Broker) -> None:
    proxy = TcpProxy(address_of(server))
    with penstock.open(proxy.url) as broker:
        queue = broker.create_queue("orders")
        proxy.is_silent = True
        with pytest.raises(penstock.errors.OutcomeUnknown, match="has not answered"):
            queue.produce("lost", timeout=0)
        proxy.is_silent = False
        queue.produce("kept")
    proxy.close()
    assert owner.queue("orders").stats().ready == 1


def test_an_async_call_is_repeated_too(server: HttpServer, owner: penstock.Broker) -> None:
    proxy = TcpProxy(address_of(server))

    async def use() -> None:
        async with await penstock.aopen(proxy.url) as broker:
            queue = await broker.create_queue("orders")
            proxy.cut_after("response", 0)
            await asyncio.gather(*[queue.produce(str(number)) for number in range(20)])

    asyncio.run(use())
    proxy.close()
    assert sorted(item.value for item in owner.queue("orders").items(limit=100)) == sorted(map(str, range(20)))


def test_calls_go_on_when_the_server_is_stopped_and_started_again(owner: penstock.Broker) -> None:
    """A produce that waits for room is ended unfinished, a lease that waits is answered with nothing."""
    port = free_port()
    full, quiet = owner.create_queue("full", max_items=1), owner.create_queue("quiet")
    full.produce("first")
    found: SimpleQueue[Any] = SimpleQueue()
    with ExitStack() as stack:
        with serve(owner.home, port=port, drain_seconds=0.05):
            broker = stack.enter_context(penstock.open(f"http://127.0.0.1:{port}"))
            verbs = [lambda: broker.queue("full").produce("second"), lambda: broker.queue("quiet").lease(wait=20)[0].item.value]
            threads = [threading.Thread(target=lambda verb=verb: found.put(verb())) for verb in verbs]
            for thread in threads:
                thread.start()
            wait_until(lambda: quiet.stats().waiting_consumers == 1 and full.stats().waiting_producers == 1)
        with serve(owner.home, port=port):
            wait_until(lambda: quiet.stats().waiting_consumers == 1)
            full.lease().complete()
            quiet.produce("at last")
            assert {found.get(timeout=WAIT), found.get(timeout=WAIT)} == {"0-1", "at last"}
            for thread in threads:
                thread.join()
    assert full.stats().produced == 2


# -- leaving -------------------------------------------------------------------------------------------


def test_a_cancelled_task_ends_its_lease_at_the_server(server: HttpServer, owner: penstock.Broker) -> None:
    owner.create_queue("orders")

    async def use() -> None:
        async with await penstock.aopen(server.url) as broker:
            queue = await broker.queue("orders")
            waiting = asyncio.ensure_future(queue.lease(wait=60))
            await asyncio.to_thread(wait_until, lambda: owner.queue("orders").stats().waiting_consumers == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(wait_until, lambda: owner.queue("orders").stats().waiting_consumers == 0)
            await queue.produce("x")
            assert len(await queue.lease()) == 1

    asyncio.run(use())


def test_no_item_stays_leased_however_leases_are_cancelled(server: HttpServer, owner: penstock.Broker) -> None:
    """Each lease is cancelled at about the time when its item is produced."""
    queue = owner.create_queue("orders", lease_timeout=600)

    async def use() -> int:
        taken = 0
        async with await penstock.aopen(server.url) as broker:
            orders = await broker.queue("orders")
            for number in range(60):
                waiting = asyncio.ensure_future(orders.lease(wait=60))
                await asyncio.sleep(0)
                await asyncio.to_thread(queue.produce, "x")
                for _ in range(number % 12):
                    await asyncio.sleep(0.0002)
                waiting.cancel()
                try:
                    await (await waiting).complete()
                    taken += 1
                except asyncio.CancelledError:
                    pass
        return taken

    taken = asyncio.run(use())
    wait_until(lambda: queue.stats().leased == 0 and queue.stats().waiting_consumers == 0)
    assert queue.stats().ready == 60 - taken


# -- many and large calls ------------------------------------------------------------------------------


def test_a_thousand_concurrent_calls(server: HttpServer, owner: penstock.Broker) -> None:
    owner.create_queue("orders", partitions=4, durability="os")

    async def use() -> list[str]:
        async with await penstock.aopen(server.url) as broker:
            queue = await broker.queue("orders")
            return await asyncio.gather(*[queue.produce(str(number)) for number in range(1_000)])

    assert len({*asyncio.run(use())}) == 1_000
    assert {item.value for item in owner.queue("orders").items(limit=2_000)} == {str(number) for number in range(1_000)}


def test_hundreds_of_leases_wait_while_others_work(server: HttpServer, owner: penstock.Broker) -> None:
    queue = owner.create_queue("orders", durability="os")

    async def use() -> list[int]:
        async with await penstock.aopen(server.url) as broker:
            orders = await broker.queue("orders")
            waiting = [asyncio.ensure_future(orders.lease(wait=60)) for _ in range(300)]
            await asyncio.to_thread(wait_until, lambda: queue.stats().waiting_consumers == 300)
            await orders.produce_many([b"x"] * 300)
            return [len(batch) for batch in await asyncio.gather(*waiting)]

    assert asyncio.run(use()) == [1] * 300


def test_large_bodies_and_answers(server: HttpServer) -> None:
    payloads = [bytes([number]) * (2 << 20) for number in range(12)]
    with penstock.open(server.url) as broker:
        queue = broker.create_queue("orders", durability="os")
        queue.produce_many(payloads)
        assert [lease.item.payload for lease in queue.lease(100)] == payloads
        assert [item.payload for item in queue.cursor("all").read(100)] == payloads


# -- pickled brokers -----------------------------------------------------------------------------------


def test_a_pickled_queue_reconnects_and_queues_of_one_broker_share_it(server: HttpServer) -> None:
    with penstock.open(server.url, api_key="some-key") as broker:
        queue = broker.create_queue("orders")
        data = pickle.dumps((queue, broker))
        first: penstock.Queue = pickle.loads(data)[0]
        second: penstock.Queue = pickle.loads(data)[0]
        third: penstock.Broker = pickle.loads(data)[1]
        assert first.home is second.home is third.home is not queue.home
        assert isinstance(first.home, HttpBroker) and first.home._options == HttpOptions(api_key="some-key")
    first.produce("x")
    assert second.stats().ready == 1
    third.close()
    again: penstock.Queue = pickle.loads(data)[0]
    assert again.stats().ready == 1, "one that was closed is opened again"
    again.home.close()


def test_nothing_is_sent_before_a_pickled_broker_is_used() -> None:
    broker = HttpBroker(HttpAddress(False, "127.0.0.1", free_port(), ""), HttpOptions())
    copied: HttpBroker = pickle.loads(pickle.dumps(broker))
    assert "not open yet" in repr(copied)
    copied.stop_extending(1, 0, 5)
    copied.close()


# -- workers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "tasks", "processes"])
def test_a_worker_works_over_http(server: HttpServer, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # children do not import pytest's main module
    events = HandlerEvents()

    async def handle_in_task(item: penstock.Item) -> None:
        events.add(item.value["number"])

    options: dict[str, Any] = {
        "threads": {"handler": lambda item: events.add(item.value["number"]), "concurrency": 3},
        "tasks": {"handler": handle_in_task, "concurrency": 3},
        "processes": {"handler": child_handlers.run_instruction, "processes": 1},
    }[kind]
    with penstock.open(server.url) as broker:
        queue = broker.create_queue("orders", partitions=2)
        with running_worker(penstock.Worker(queue, **options)):
            queue.produce_many([{"do": "nothing", "file": str(tmp_path / "lines"), "number": number} for number in range(30)])
            wait_completed(queue, 30)
        assert sorted(events.rest()) == ([] if kind == "processes" else [*range(30)])
        assert queue.stats().leased == 0


def test_leases_of_a_worker_are_extended_over_http(server: HttpServer) -> None:
    go = threading.Event()
    with penstock.open(server.url) as broker:
        queue = broker.create_queue("orders", lease_timeout=1)
        queue.produce("slow")
        before = broker.home.clock.read().elapsed
        with running_worker(penstock.Worker(queue, lambda item: go.wait(WAIT))):
            wait_until(lambda: broker.home.clock.read().elapsed - before > 1.5 * SECOND)
            assert queue.stats().leased == 1
            go.set()
            wait_completed(queue, 1)
