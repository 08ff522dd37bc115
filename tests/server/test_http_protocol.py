"""Connections of clients that are slow, greedy or broken: raw bytes on a socket."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

import penstock
from penstock import operations
from penstock.operations import LeaseItems, ReadItems, ReadStats
from penstock.server import repeated_warnings
from penstock.server.http_protocol import MAX_PIPELINED
from penstock.server.http_server import HttpServer
from penstock.server.repeated_warnings import RepeatedWarnings
from penstock.server.server_limits import ServerLimits
from penstock.wire.http_calls import CALL_PATH, VERSION, VERSION_HEADER
from penstock.wire.messages import decode_answer
from penstock.words.clock import SECOND
from penstock.words.limits import MIB
from tests.server.conftest import serve
from tests.server.poster import address_of, wait_until

SOON = 0.05
GET = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"


@contextmanager
def served(**limits: Any) -> Iterator[HttpServer]:
    """A server of an empty broker in memory, with these limits."""
    with penstock.open("memory://") as broker, serve(broker.home, ServerLimits(**limits)) as server:
        yield server


class RawClient:
    """A connection on which a test writes bytes."""

    def __init__(self, server: HttpServer, buffer: int = 0) -> None:
        """buffer: how many bytes the operating system keeps that were not read."""
        self.socket = socket.socket()
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(30)
        self.socket.connect(address_of(server))

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """The status, the headers and the JSON of the next answer."""
        status, headers, body = self.answer_of_any_kind()
        return status, headers, json.loads(body)

    def answer_of_any_kind(self) -> tuple[int, dict[str, str], bytes]:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            more = self.socket.recv(1)
            assert more, f"the connection was closed after {head!r}"
            head += more
        status, *lines = head.decode().strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        body = b""
        while len(body) < int(headers["content-length"]):
            body += self.socket.recv(int(headers["content-length"]) - len(body))
        return int(status.split()[1]), headers, body

    def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        return b"".join(iter(lambda: self.socket.recv(1 << 16), b""))

    def refusal(self) -> tuple[int, str]:
        """The status and code of an error after which the server closes the connection."""
        head, _, body = self.rest().partition(b"\r\n\r\n")
        assert b"\r\nconnection: close" in head
        return int(head.split()[1]), json.loads(body)["code"]

    def close(self) -> None:
        self.socket.close()


def raw(server: HttpServer, data: bytes = b"", **options: int) -> "closing[RawClient]":
    client = RawClient(server, **options)
    if data:
        client.send(data)
    return closing(client)


def encoded(operation: operations.Operation[Any], body: bytes | None = None) -> bytes:
    """A request of Penstock's own client."""
    body = operations.encode(operation) if body is None else body
    return f"POST {CALL_PATH} HTTP/1.1\r\n{VERSION_HEADER}: {VERSION}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


# -- time --------------------------------------------------------------------------------------------


def test_a_head_that_does_not_end_is_answered_with_408() -> None:
    with served(header_seconds=SOON) as server, raw(server, b"GET / HTTP/1.1\r\nhost: ") as client:
        assert client.refusal() == (408, "head_too_slow")
        client.close()
        wait_until(lambda: server.connections == 0)


def test_a_head_that_comes_byte_by_byte_is_not_given_more_time() -> None:
    with served(header_seconds=SOON) as server, raw(server, b"GET / HTTP/1.1\r\nx: ") as client:
        client.socket.settimeout(0.005)
        found = b""
        while not found:
            client.send(b"a")
            with suppress(TimeoutError):
                found = client.socket.recv(1 << 16)
        assert found.startswith(b"HTTP/1.1 408 ")


def test_a_connection_without_a_request_is_closed() -> None:
    with served(header_seconds=SOON) as server, raw(server) as client:
        assert client.rest() == b""


def test_an_idle_connection_is_closed() -> None:
    with served(idle_seconds=SOON) as server, raw(server, GET) as client:
        assert client.answer()[0] == 404
        assert client.rest() == b""


def test_a_body_that_does_not_end_is_answered_with_408_and_frees_its_request() -> None:
    with served(body_seconds=SOON) as server, raw(server, encoded(LeaseItems(queue=1))[:-1]) as client:
        wait_until(lambda: server.requests == 1)
        assert client.refusal() == (408, "body_too_slow")
        client.close()
        wait_until(lambda: server.requests == server.connections == 0)


def test_the_rest_of_a_body_that_was_refused_early_does_not_come_for_ever() -> None:
    with served(body_seconds=SOON) as server, raw(server, GET.replace(b"host: x", b"content-length: 9")) as client:
        assert client.answer()[0] == 404
        with suppress(ConnectionResetError):
            assert client.rest() == b""
        wait_until(lambda: server.connections == 0)


def test_a_request_that_waits_is_not_closed() -> None:
    """Only the client's part has a time limit: not the answer to a lease that waits."""
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("orders")
        limits = ServerLimits(header_seconds=SOON, body_seconds=SOON, idle_seconds=SOON, send_seconds=SOON)
        with serve(broker.home, limits) as server, raw(server, encoded(LeaseItems(queue=queue.incarnation, wait=60 * SECOND))) as client:
            wait_until(lambda: queue.stats().waiting_consumers == 1)
            with raw(server) as other:
                assert other.rest() == b""  # the limits were applied meanwhile
            queue.produce("x")
            assert client.socket.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("orders")
        queue.produce_many([bytes(MIB)] * 16)
        with serve(broker.home, ServerLimits(send_seconds=SOON)) as server:
            request = encoded(LeaseItems(queue=queue.incarnation, count=16))
            with raw(server, request, buffer=4096) as client:
                wait_until(lambda: queue.stats().leased == 16)
                wait_until(lambda: server.connections == 0)
                with suppress(ConnectionResetError):
                    assert len(client.rest()) < 16 * MIB


def test_a_client_that_reads_none_of_many_answers_is_cut_off() -> None:
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("orders")
        queue.produce(bytes(MIB))
        with serve(broker.home, ServerLimits(send_seconds=SOON)) as server:
            request = encoded(ReadItems(queue=queue.incarnation, start={0: 0}))
            with raw(server, request * MAX_PIPELINED, buffer=4096) as client:
                wait_until(lambda: server.connections == 1)
                wait_until(lambda: server.connections == 0)
                with suppress(ConnectionResetError):
                    assert len(client.rest()) < MAX_PIPELINED * MIB
        assert server.unfinished == 0


# -- size and number ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"GET /nothing HTTP/1.1\r\nx: " + b"a" * 3000,
        b"GET /nothing HTTP/1.1\r\nx: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\n" + b"a: b\r\n" * 20 + b"\r\n",
        b"GET /nothing HTTP/1.1\r\n" + b"a: b\r\n" * 1000,
    ],
    ids=["unfinished value", "long value", "long path", "many headers", "unfinished headers"],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_a_large_head_is_refused(head: bytes, pieces: int) -> None:
    with served(header_bytes=2000, header_count=15) as server, raw(server) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = -(-len(head) // pieces)
        for start in range(0, len(head), size):
            client.send(head[start : start + size])
        assert client.refusal() == (431, "head_too_large")


def test_only_the_head_counts_as_head() -> None:
    """Neither a large body nor requests that come together make a head too large."""
    many = GET * 30
    with served(header_bytes=300) as server, raw(server) as client:
        body = b"a" * 100_000
        client.send(b"POST /nothing HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body + many + GET[:-1])
        for _ in range(31):
            assert client.answer()[0] == 404
        client.send(GET[-1:])
        assert client.answer()[0] == 404


@pytest.mark.parametrize("piece", [b"abcdef: g\r\n" * 1_000, b"x" * 10_000], ids=["many headers", "one long header"])
@pytest.mark.parametrize("path", [b"/health/live", CALL_PATH.encode()])
def test_headers_behind_a_body_do_not_come_for_ever(path: bytes, piece: bytes) -> None:
    with served(header_bytes=20_000, body_seconds=60) as server:
        head = b"%b %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % (b"POST" if b"call" in path else b"GET", path)
        with raw(server, head + b"1\r\nx\r\n0\r\nx: ") as client:
            began = time.monotonic()
            with suppress(OSError):
                while time.monotonic() - began < 10:
                    client.send(piece)
            assert time.monotonic() - began < 10
        wait_until(lambda: server.connections == 0)


def test_headers_behind_a_body_are_not_those_of_the_request() -> None:
    with served() as server:
        head = b"POST /v1/queues.list HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        with raw(server, head + b"2\r\n{}\r\n0\r\ncontent-type: text/plain\r\n\r\n" + GET) as client:
            assert client.answer()[0] == 200
            assert client.answer()[0] == 404


def test_a_body_of_very_many_small_chunks_is_taken() -> None:
    with served(header_bytes=1_000) as server:
        head = b"POST /v1/queues.list HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        with raw(server, head) as client:
            client.send(b"1\r\n{\r\n" + b"1\r\n \r\n" * 50_000 + b"1\r\n}\r\n0\r\n\r\n")
            assert client.answer()[0] == 200


def test_the_whole_answer_reaches_a_client_whose_body_is_too_large() -> None:
    """The connection is not reset while the client sends: it gets the error, not a broken pipe."""
    with served(body_bytes=1000) as server, raw(server) as client:
        client.send(encoded(LeaseItems(), body=bytes(8 * MIB)))
        status, headers, _ = client.answer_of_any_kind()
        assert (status, headers["connection"]) == (413, "close")
        assert client.rest() == b""


def test_large_bodies_in_memory_are_limited() -> None:
    """While one is received, another is refused; then it is taken. A small one does not count."""
    body = bytes(100_000)
    with served(buffered_bytes=150_000) as server, raw(server) as client:
        with raw(server, encoded(LeaseItems(), body=body)[:-1]) as first:
            wait_until(lambda: server.requests == 1)
            client.send(encoded(LeaseItems(), body=body))
            assert client.answer_of_any_kind()[0] == 429
            client.send(encoded(LeaseItems()))
            assert client.answer_of_any_kind()[0] == 404
            first.send(body[-1:])
            assert first.answer_of_any_kind()[0] == 400
        client.send(encoded(LeaseItems(), body=body))
        assert client.answer_of_any_kind()[0] == 400


def test_a_wait_is_shortened_to_the_limit() -> None:
    with penstock.open("memory://") as broker, serve(broker.home, ServerLimits(request_seconds=SOON)) as server:
        lease = LeaseItems(queue=broker.create_queue("orders").incarnation, wait=600 * SECOND)
        with raw(server, encoded(lease)) as client:
            status, _, body = client.answer_of_any_kind()
            assert (status, decode_answer(LeaseItems, body)) == (200, [])


def test_connections_beyond_the_limit_are_told_so() -> None:
    with served(connections=2) as server, raw(server, GET) as first, raw(server, GET) as second:
        assert first.answer()[0] == second.answer()[0] == 404
        with raw(server) as third:
            status, headers, problem = third.answer()
            assert (status, problem["code"], headers["retry-after"]) == (503, "too_many_connections", "1")
            assert third.rest() == b""
        first.close()
        wait_until(lambda: server.connections == 1)
        with raw(server, GET) as fourth:
            assert fourth.answer()[0] == 404


# -- pipelining --------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order() -> None:
    with penstock.open("memory://") as broker, serve(broker.home) as server:
        queue = broker.create_queue("orders")
        lease = LeaseItems(queue=queue.incarnation, wait=60 * SECOND)
        with raw(server, encoded(lease) + GET + encoded(ReadStats(queue=1)) + GET) as client:
            wait_until(lambda: queue.stats().waiting_consumers == 1)
            queue.produce("x")
            assert [client.answer_of_any_kind()[0] for _ in range(4)] == [200, 404, 404, 404]


def test_what_is_wrong_behind_a_request_does_not_spoil_its_answer() -> None:
    with penstock.open("memory://") as broker, serve(broker.home) as server:
        queue = broker.create_queue("orders")
        with raw(server, encoded(LeaseItems(queue=queue.incarnation, wait=60 * SECOND)) + b"\0garbage") as client:
            wait_until(lambda: queue.stats().waiting_consumers == 1)
            queue.produce("x")
            assert client.answer_of_any_kind()[0] == 200
            assert client.rest() == b""


def test_too_many_pipelined_requests_are_not_taken() -> None:
    with penstock.open("memory://") as broker, serve(broker.home) as server:
        queue = broker.create_queue("orders")
        lease = LeaseItems(queue=queue.incarnation, wait=60 * SECOND)
        with raw(server, encoded(lease) + GET * (MAX_PIPELINED + 2)) as client:
            wait_until(lambda: queue.stats().waiting_consumers == 1)
            queue.produce("x")
            assert client.answer_of_any_kind()[0] == 200
            assert client.rest() == b""
        wait_until(lambda: server.connections == 0)


# -- garbage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"hello?\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
        b"GET http:// HTTP/1.1\r\n\r\n",
        b"CONNECT example.net:443 HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST / HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
    ],
)
def test_garbage_is_answered_with_400(data: bytes) -> None:
    with served() as server, raw(server, data) as client:
        assert client.refusal() == (400, "not_http")
        client.close()
        wait_until(lambda: server.connections == 0)


def test_a_body_that_is_not_what_its_head_says_is_answered_with_400() -> None:
    head = f"POST {CALL_PATH} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    with served() as server, raw(server, head) as client:
        wait_until(lambda: server.requests == 1)
        client.send(b"not a chunk\r\n")
        assert client.refusal() == (400, "not_http")
        wait_until(lambda: server.requests == 0)


def test_much_garbage_on_many_connections_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with served() as server:
        for _ in range(20):
            with raw(server, b"\0" * 1000) as client:
                assert client.refusal()[0] == 400
        with raw(server) as client:
            client.send(b"\0" * 10 * MIB)
            assert client.refusal() == (400, "not_http")
        with raw(server, GET) as client:
            assert client.answer()[0] == 404
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["bytes that are not HTTP (client 127.0.0.1)"]


def test_repeated_warnings_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RepeatedWarnings()
    for moment in range(4):
        warnings.warn("garbage", f"10.0.0.{moment}", moment)
        warnings.log_counted(moment)
    period = repeated_warnings.PERIOD_SECONDS
    warnings.log_counted(period)
    warnings.log_counted(2 * period)  # nothing came: the next one is logged at once
    warnings.warn("garbage", "10.0.0.9", 2 * period)
    assert [record.getMessage() for record in caplog.records] == [
        "garbage (client 10.0.0.0)",
        "garbage: 3 times more in 60 s (last client 10.0.0.3)",
        "garbage (client 10.0.0.9)",
    ]


def test_a_request_for_another_protocol_is_answered_as_http(caplog: pytest.LogCaptureFixture) -> None:
    asked = GET.replace(b"host: x", b"connection: upgrade\r\nupgrade: websocket")
    with served() as server, raw(server, asked + b"\0\1\2") as client:
        assert client.answer()[0] == 404
        assert client.rest() == b""
    assert caplog.records == []


@pytest.mark.parametrize("data", [GET[:-2], encoded(LeaseItems())[:-1]], ids=["in the head", "in the body"])
def test_a_client_that_stops_sending_in_a_request_leaves_nothing_behind(data: bytes) -> None:
    with served() as server, raw(server, data) as client:
        client.socket.shutdown(socket.SHUT_WR)
        assert client.rest() == b""
        wait_until(lambda: server.requests == server.connections == 0)
