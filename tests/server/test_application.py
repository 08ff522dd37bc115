"""The calls of Penstock's own client, as bytes."""

import asyncio
import gc
import socket
import struct
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import operations
from penstock.api.home_calls import HomeCalls
from penstock.operations import CreateQueue, FindQueue, LeaseItems, Operation, ProduceItems, ReadStats
from penstock.rules.commands import Call
from penstock.server.gate import Gate
from penstock.server.http_server import HttpServer
from penstock.server.served_request import ServedRequest
from penstock.server.server_limits import ServerLimits
from penstock.wire.http_calls import ANSWER_TYPE, CALL_PATH, VERSION, VERSION_HEADER, decode_error
from penstock.wire.messages import decode_answer
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import OutcomeUnknown
from tests.server.conftest import serve
from tests.server.poster import Poster, address_of, wait_until, waiting_leases


def test_operations_are_answered(poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    assert poster.call(FindQueue(name="orders")).incarnation == queue
    assert poster.call(FindQueue(queue=queue)).name == "orders"
    poster.call(ProduceItems(queue=queue, batch=Batch([b"1", b"2"])))
    (part,) = poster.call(LeaseItems(queue=queue, count=5))
    assert part.items[0].batch.payloads == [b"1", b"2"]


def test_a_client_that_leaves_cancels_its_lease(server: HttpServer, poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    with closing(Poster(server).connection) as other:
        other.request("POST", CALL_PATH, operations.encode(LeaseItems(queue=queue, wait=60 * SECOND)), {VERSION_HEADER: VERSION})
        wait_until(lambda: waiting_leases(poster, queue) == 1)
    wait_until(lambda: waiting_leases(poster, queue) == 0)
    poster.call(ProduceItems(queue=queue, batch=Batch([b"1"])))
    assert poster.call(LeaseItems(queue=queue))


def test_a_repetition_takes_the_place_of_the_original_that_still_waits(server: HttpServer, poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    original = LeaseItems(queue=queue, wait=60 * SECOND, call=Call(b"s" * 16, 1))
    with closing(Poster(server).connection) as old, closing(Poster(server).connection) as new:
        old.request("POST", CALL_PATH, operations.encode(original), {VERSION_HEADER: VERSION})
        wait_until(lambda: waiting_leases(poster, queue) == 1)
        repetition = LeaseItems(queue=queue, wait=60 * SECOND, call=Call(b"s" * 16, 1, True, SECOND))
        new.request("POST", CALL_PATH, operations.encode(repetition), {VERSION_HEADER: VERSION})
        ended = old.getresponse()
        assert (ended.status, decode_error(ended.read()).code) == (503, "outcome_unknown")
        wait_until(lambda: waiting_leases(poster, queue) == 1)
        poster.call(ProduceItems(queue=queue, batch=Batch([b"1"])))
        (part,) = decode_answer(LeaseItems, new.getresponse().read())
        assert part.items[0].batch.payloads == [b"1"]
        # The original's bytes may arrive after the repetition: they change nothing.
        old.request("POST", CALL_PATH, operations.encode(original), {VERSION_HEADER: VERSION})
        with pytest.raises(OutcomeUnknown, match="was repeated meanwhile"):
            raise decode_error(old.getresponse().read())


@pytest.mark.parametrize("is_cut", [False, True], ids=["before the answer", "in the middle of it"])
@pytest.mark.parametrize("path", [CALL_PATH, "/v1/queue.lease"])
def test_items_return_when_their_client_leaves_before_it_has_the_answer(
    server: HttpServer, poster: Poster, path: str, is_cut: bool
) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    items = Batch([b"x" * 5_000] * 2_000)  # more than the operating system takes at once
    poster.call(ProduceItems(queue=queue, batch=items))
    operation = LeaseItems(queue=queue, count=2_000, timeout=600 * SECOND)
    body = b'{"queue_name": "orders", "client_id": "c", "batch_size": 2000, "lease_timeout": "10m"}'
    leaver = Poster(server).connection
    headers = {VERSION_HEADER: VERSION, "content-type": "application/json"}
    leaver.request("POST", path, operations.encode(operation) if path == CALL_PATH else body, headers)
    if is_cut:
        assert leaver.sock.recv(100)
    leaver.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    leaver.close()
    wait_until(lambda: poster.call(ReadStats(queue=queue)).consumers == {} and poster.call(ReadStats(queue=queue)).leased == 0)
    time.sleep(0.3)  # if it has not begun yet
    assert (found := poster.call(ReadStats(queue=queue))).leased == 0 and found.ready == 2_000


def test_a_request_that_was_repeated_while_its_key_is_checked_does_nothing(
    server: HttpServer, poster: Poster, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    check, held, release = Gate.check, threading.Event(), threading.Event()

    async def slow_check(gate: Gate, caller: Any, operation: Operation[Any], calls: HomeCalls) -> Operation[Any]:
        if operation.call is not None and not operation.call.again:
            held.set()
            while not release.is_set():
                await asyncio.sleep(0.01)
        return await check(gate, caller, operation, calls)

    monkeypatch.setattr(Gate, "check", slow_check)
    with closing(Poster(server).connection) as old:
        original = ProduceItems(queue=queue, batch=Batch([b"1"]), call=Call(b"s" * 16, 1))
        old.request("POST", CALL_PATH, operations.encode(original), {VERSION_HEADER: VERSION})
        held.wait()
        poster.call(ProduceItems(queue=queue, batch=Batch([b"1"]), call=Call(b"s" * 16, 1, True, SECOND)))
        poster.call(ProduceItems(queue=queue, batch=Batch([b"2"]), call=Call(b"s" * 16, 2, True, SECOND)))
        release.set()
        with pytest.raises(OutcomeUnknown, match="was repeated meanwhile"):
            raise decode_error(old.getresponse().read())
    assert poster.call(ReadStats(queue=queue)).ready == 2


def test_a_session_keeps_little_of_its_last_request(server: HttpServer, poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    poster.call(ProduceItems(queue=queue, batch=Batch([b"1"]), call=Call(b"s" * 16, 1)))
    gc.collect()
    wait_until(lambda: sum(type(one) is ServedRequest for one in gc.get_objects()) == 0)


def test_a_repeated_produce_adds_nothing(poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    (first,) = poster.call(ProduceItems(queue=queue, batch=Batch([b"1"]), call=Call(b"s" * 16, 1)))
    (again,) = poster.call(ProduceItems(queue=queue, batch=Batch([b"1"]), call=Call(b"s" * 16, 1, True, SECOND)))
    assert (again.stored.base, again.stored.repeated) == (first.stored.base, True)
    assert poster.call(ReadStats(queue=queue)).ready == 1


def test_a_large_batch_comes_whole(poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    payloads = [bytes([number % 251]) * 20_000 for number in range(200)]
    poster.call(ProduceItems(queue=queue, batch=Batch(payloads)))
    (part,) = poster.call(LeaseItems(queue=queue, count=2_000))
    assert [payload for items in part.items for payload in items.batch.payloads] == payloads


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"\xc1garbage", {VERSION_HEADER: VERSION}, 400, "the operation cannot be understood"),
        (b"", {VERSION_HEADER: VERSION}, 400, "the operation cannot be understood"),
        (b"", {}, 400, "use the same major version"),
        (b"", {VERSION_HEADER: "2.0"}, 400, "use the same major version"),
        (operations.encode(FindQueue(name="nobody")), {VERSION_HEADER: VERSION}, 404, "there is no queue 'nobody'"),
    ],
)
def test_a_wrong_call_is_refused_with_what_to_do(poster: Poster, body: bytes, headers: dict[str, str], status: int, message: str) -> None:
    found, kind, answer = poster.post(CALL_PATH, body, headers)
    assert (found, kind) == (status, ANSWER_TYPE)
    assert message in str(decode_error(answer))


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as broker, serve(broker.home, ServerLimits(body_bytes=1_000)) as server:
        with closing(socket.create_connection(address_of(server), 30)) as sock:
            sock.sendall(f"POST {CALL_PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n".encode())
            assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
        with closing(socket.create_connection(address_of(server), 30)) as sock:
            sock.sendall(f"POST {CALL_PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            sock.sendall(b"3e8\r\n" + b"x" * 1_000 + b"\r\n1\r\nx\r\n")
            assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")
