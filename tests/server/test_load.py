"""A server under load: many waiting and unfinished requests, clients that vanish, a full disk."""

import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import penstock
from penstock.broker.embedded import EmbeddedBroker
from penstock.loop.requests import LeaseResult, SettlePart
from penstock.operations import CreateQueue, LeaseItems, ProduceItems, ReadStats, SettleItems
from penstock.rules.commands import Settled
from penstock.testing.disk import SimulatedFiles
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import PenstockError, StorageFailed
from penstock.words.limits import KIB, MIB
from tests.server.conftest import serve
from tests.server.server_process import PYTHONPATH, ROOT, BareConnection, ServerProcess, allow_open_files, encode_request

WAITING = 5_000
HALF_OPEN = 1_000
DEADLINE_SECONDS = 20.0
LONG_WAIT = 60 * SECOND


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    allow_open_files(2 * WAITING)
    patient = ["--set", "limits.header_seconds=300", "--set", "limits.body_seconds=300"]
    with ServerProcess(tmp_path_factory.mktemp("load") / "data", *patient) as running:
        yield running


@pytest.fixture(params=["server", "another process"])
def server_of_owner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that owns its directory, or that is a client of the owner."""
    if request.param == "server":
        yield request.getfixturevalue("server")
        return
    with penstock.open(tmp_path / "data"), ServerProcess(tmp_path / "data") as running:
        yield running


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.01)


def waiting(connection: BareConnection, queue: int) -> int:
    return connection.call(ReadStats(queue=queue)).waiting_consumers


def create(connection: BareConnection, name: str, **options: Any) -> int:
    return connection.call(CreateQueue(name=name, options=options)).incarnation


def produce(connection: BareConnection, queue: int, payloads: list[bytes]) -> None:
    (part,) = connection.call(ProduceItems(queue=queue, batch=Batch(payloads), wait=0))
    if part.refused is not None:
        raise part.refused.error()


def complete(connection: BareConnection, queue: int, leased: list[LeaseResult]) -> list[bytes]:
    """Complete leased items. Gives their payloads."""
    parts = [SettlePart(part.partition, part.granted.lease) for part in leased]
    answers = connection.call(SettleItems(queue=queue, action="complete", parts=parts))
    payloads = [payload for part in leased for run in part.items for payload in run.batch.payloads]
    assert sum(answer.done for answer in answers if isinstance(answer, Settled)) == len(payloads)
    return payloads


def work(connection: BareConnection, queue: int, times: int) -> None:
    """Produce, lease and complete so many items, one at a time."""
    for number in range(times):
        produce(connection, queue, [b"%d" % number])
        assert complete(connection, queue, connection.call(LeaseItems(queue=queue))) == [b"%d" % number]


def test_five_thousand_leases_wait_while_others_work(server: ServerProcess) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(closing(BareConnection(server.port)))
        busy, idle = create(other, "beside-waiting"), create(other, "idle")
        lease = encode_request(LeaseItems(queue=idle, wait=LONG_WAIT))
        waiters = [stack.enter_context(closing(BareConnection(server.port))) for _ in range(WAITING)]
        for waiter in waiters:
            waiter.socket.sendall(lease)
        until(lambda: waiting(other, idle) == WAITING, "the waiting leases")
        began = time.monotonic()
        work(other, busy, 100)
        assert time.monotonic() - began < DEADLINE_SECONDS
        payloads = [b"%d" % number for number in range(WAITING)]
        for start in range(0, WAITING, 1_000):
            produce(other, idle, payloads[start : start + 1_000])
        answers = [waiter.receive(LeaseItems) for waiter in waiters]
        leased = [payload for parts in answers for part in parts for run in part.items for payload in run.batch.payloads]
        assert sorted(leased) == sorted(payloads)
        assert waiting(other, idle) == 0


def test_a_thousand_unfinished_requests_hinder_nobody(server: ServerProcess) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(closing(BareConnection(server.port)))
        queue = create(other, "beside-unfinished")
        whole = encode_request(ProduceItems(queue=queue, batch=Batch([b"unfinished"])))
        for number in range(HALF_OPEN):
            connection = stack.enter_context(closing(BareConnection(server.port)))
            connection.socket.sendall(whole[: number % len(whole)])  # nothing, a part of the head, or of the body
        work(other, queue, 100)
        assert other.call(ReadStats(queue=queue)).produced == 100


VANISHING = """
import sys
from tests.server.server_process import BareConnection
port, count, request = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
connections = [BareConnection(port) for _ in range(count)]
for connection in connections:
    connection.socket.sendall(request)
sys.stdin.read()
"""


def start_vanishing(port: int, count: int, request: bytes) -> "subprocess.Popen[bytes]":
    """A process with so many requests that wait."""
    command = [sys.executable, "-c", VANISHING, str(port), str(count), request.hex()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHONPATH})


def test_leases_of_killed_clients_are_cancelled(server_of_owner: ServerProcess) -> None:
    server = server_of_owner
    with closing(BareConnection(server.port)) as other:
        queue = create(other, "long-leases", lease_timeout=3600 * SECOND)
        request = encode_request(LeaseItems(queue=queue, wait=LONG_WAIT))
        clients = [start_vanishing(server.port, 100, request) for _ in range(3)]
        until(lambda: waiting(other, queue) == 300, "the waiting leases")
        for gone, client in enumerate(clients[:2], 1):
            client.kill()
            client.communicate()
            until(lambda left=300 - 100 * gone: waiting(other, queue) == left, "the end of the leases of a killed client")  # type: ignore[misc]
        produce(other, queue, [b"%d" % number for number in range(100)])
        until(lambda: other.call(ReadStats(queue=queue)).leased == 100, "the leases of the client that lives")
        assert waiting(other, queue) == 0
        clients[2].kill()
        clients[2].communicate()
        produce(other, queue, [b"later"])
        assert complete(other, queue, other.call(LeaseItems(queue=queue, count=10))) == [b"later"]


def test_items_that_were_leased_to_killed_clients_return(server: ServerProcess) -> None:
    """Clients are killed while they get items: each item is handled in the end, and completed once."""
    with closing(BareConnection(server.port)) as other:
        queue = create(other, "short-leases", lease_timeout=SECOND)
        request = encode_request(LeaseItems(queue=queue, wait=LONG_WAIT))
        clients = [start_vanishing(server.port, 50, request) for _ in range(2)]
        until(lambda: waiting(other, queue) == 100, "the waiting leases")
        for number in range(100):
            produce(other, queue, [b"%d" % number])
            if number in (20, 60):
                clients[number > 20].kill()
        for client in clients:
            client.communicate()
        done: Counter[bytes] = Counter()
        end = time.monotonic() + DEADLINE_SECONDS
        while done.total() < 100 and time.monotonic() < end:
            done.update(complete(other, queue, other.call(LeaseItems(queue=queue, count=100, wait=SECOND))))
        assert done == Counter(b"%d" % number for number in range(100))


# -- a disk that is full -----------------------------------------------------------------------------


def refusal(connection: BareConnection, queue: int) -> tuple[str, int, bool]:
    """The error of a produce: its code, its status, and whether to try again."""
    with pytest.raises(PenstockError) as caught:
        produce(connection, queue, [random.Random(0).randbytes(MIB)])
    return caught.value.code, caught.value.http_status, caught.value.retryable


def test_the_server_says_that_it_cannot_write_and_recovers(server: ServerProcess) -> None:
    """The files of the server cannot grow for a while, as on a disk that is full."""
    assert server.process is not None
    with closing(BareConnection(server.port)) as connection:
        queue = create(connection, "failing")
        produce(connection, queue, [b"before"])
        former = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (64 * KIB, resource.RLIM_INFINITY))
        assert refusal(connection, queue) == ("storage_failed", 503, True)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, former)
        until(lambda: can_produce(connection, queue), "the recovery")
        assert complete(connection, queue, connection.call(LeaseItems(queue=queue, count=10))) == [b"before", b"after"]


def can_produce(connection: BareConnection, queue: int) -> bool:
    try:
        produce(connection, queue, [b"after"])
    except StorageFailed:
        return False
    return True


def test_a_full_disk_refuses_new_items_and_lets_others_be_completed() -> None:
    files = SimulatedFiles()
    files.set_free_bytes(20 * MIB)
    with ExitStack() as stack:
        broker = stack.enter_context(closing(EmbeddedBroker.open("/data", files=files, min_free_bytes=10 * MIB)))
        server = stack.enter_context(serve(broker))
        connection = stack.enter_context(closing(BareConnection(urlsplit(server.url).port or 0)))
        queue = create(connection, "orders")
        produce(connection, queue, [b"before"])
        files.set_free_bytes(5 * MIB)
        assert refusal(connection, queue) == ("queue_full", 429, True)
        assert complete(connection, queue, connection.call(LeaseItems(queue=queue, count=10))) == [b"before"]
        files.set_free_bytes(20 * MIB)
        produce(connection, queue, [b"after"])
        assert complete(connection, queue, connection.call(LeaseItems(queue=queue, count=10))) == [b"after"]
