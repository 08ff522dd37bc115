"""One connection and the pool: responses as servers and proxies send them, whole, in pieces, broken and too large."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import pytest

from penstock.wire import http_connection
from penstock.wire.connection import ConnectionLost
from penstock.wire.http_address import HttpAddress
from penstock.wire.http_connection import ConnectionPool, HttpResponse, ResponseTooLarge, ServerUnreachable
from penstock.words.clock import SECOND

WAIT = 30.0
HEAD = b"POST /v1/call HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
REQUEST = HEAD + b"body"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=x\r\ncontent-length: 2\r\n\r\nhi"


class ScriptedServer:
    """Answers each request with the next bytes of the script; after b"" among them it sends no more."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.replies: SimpleQueue[list[bytes]] = SimpleQueue()
        self.connections: list[socket.socket] = []
        self.ended: SimpleQueue[bytes] = SimpleQueue()
        """What each connection had sent since its last request when its client closed it."""
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def address(self) -> HttpAddress:
        return HttpAddress(False, "127.0.0.1", self._listener.getsockname()[1], "")

    def reply(self, *parts: bytes) -> None:
        self.replies.put([*parts])

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        received = b""
        with suppress(OSError):  # the client may reset the connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := connection.recv(1 << 16):
                received = received[-4:] + data
                if not received.endswith(b"body"):
                    continue
                received = b""
                for part in self.replies.get():
                    if part:
                        connection.sendall(part)
                    else:
                        connection.shutdown(socket.SHUT_WR)
        self.ended.put(received)
        connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for one in self.connections:
            one.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.close()


def run(server: ScriptedServer, work: Callable[[ConnectionPool], Coroutine[Any, Any, Any]]) -> Any:
    """Run something with a pool of connections to the server."""

    async def main() -> Any:
        pool = ConnectionPool(server.address, None, 5 * SECOND)
        try:
            async with asyncio.timeout(WAIT):
                return await work(pool)
        finally:
            pool.close()
            await asyncio.sleep(0)

    return asyncio.run(main())


async def post(pool: ConnectionPool) -> HttpResponse:
    connection = await pool.take()
    try:
        return await connection.post(HEAD, b"body")
    finally:
        pool.give_back(connection)


def test_a_connection_is_used_again(server: ScriptedServer) -> None:
    async def work(pool: ConnectionPool) -> None:
        for number in range(5):
            server.reply(OK.replace(b"hi", b"%d!" % number))
            response = await post(pool)
            assert (response.status, response.content_type, response.body) == (200, "text/plain", b"%d!" % number)

    run(server, work)
    assert len(server.connections) == 1


WHOLE = {
    "in pieces": ([OK[index : index + 1] for index in range(len(OK))], b"hi", True),
    "chunked": ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n", b"1\r\ni\r\n0\r\n\r\n"], b"hi", True),
    "after 100 Continue": ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], b"hi", True),
    "together with 100 Continue": ([b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK], b"hi", True),
    "empty": ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], b"", True),
    "without a body": ([b"HTTP/1.1 204 No Content\r\n\r\n"], b"", True),
    "connection: close": ([OK.replace(b"content-length", b"connection: close\r\ncontent-length")], b"hi", False),
    "of HTTP 1.0": ([b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi"], b"hi", False),
    "with more than was asked for": ([OK + b"HTTP/1.1 408 Timeout\r\n\r\n"], b"hi", False),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_response_comes_whole_and_says_whether_the_connection_can_be_used_again(server: ScriptedServer, kind: str) -> None:
    parts, body, is_reused = WHOLE[kind]

    async def work(pool: ConnectionPool) -> None:
        server.reply(*parts)
        assert (await post(pool)).body == body
        server.reply(OK)
        assert (await post(pool)).body == b"hi"

    run(server, work)
    assert len(server.connections) == (1 if is_reused else 2)


def test_a_body_without_a_length_ends_with_the_connection(server: ScriptedServer) -> None:
    async def work(pool: ConnectionPool) -> HttpResponse:
        server.reply(b"HTTP/1.0 502 Bad Gateway\r\ncontent-type: text/html\r\n\r\n<h1>", b"no</h1>", b"")
        return await post(pool)

    response = run(server, work)
    assert (response.status, response.content_type) == (502, "text/html") and response.body == b"<h1>no</h1>"


BROKEN = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "half a body": OK[:-1],
    "half a chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nh",
    "no HTTP": b"220 mail.example ESMTP\r\n",
    "a switch of protocols": b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nhi",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_response_that_breaks_off_or_is_none_loses_the_connection(server: ScriptedServer, kind: str) -> None:
    async def work(pool: ConnectionPool) -> None:
        server.reply(BROKEN[kind], b"")
        with pytest.raises(ConnectionLost):
            await post(pool)
        server.reply(OK)
        assert (await post(pool)).body == b"hi", "the next request gets a new connection"

    run(server, work)


@pytest.mark.parametrize("size", ["said", "chunked", "head"])
def test_what_is_too_large_is_not_read(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setattr(http_connection, "MAX_BODY_BYTES", 10_000)
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    replies = {
        "said": [b"HTTP/1.1 200 OK\r\ncontent-length: 10001\r\n\r\n"],
        "chunked": [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[chunk] * 3],
        "head": [b"HTTP/1.1 200 OK\r\n", *[b"x: " + b"y" * 4096 + b"\r\n"] * 17],
    }

    async def work(pool: ConnectionPool) -> None:
        server.reply(*replies[size])
        with pytest.raises(ResponseTooLarge):
            await post(pool)

    run(server, work)
    server.ended.get(timeout=WAIT)


def test_a_connection_that_the_server_closed_meanwhile_is_not_used(server: ScriptedServer) -> None:
    async def work(pool: ConnectionPool) -> None:
        server.reply(OK)
        await post(pool)
        server.connections[0].sendall(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n\r\n")
        server.connections[0].shutdown(socket.SHUT_RDWR)
        idle = pool._idle[0]
        while idle.is_usable:
            await asyncio.sleep(0.001)
        server.reply(OK)
        assert (await post(pool)).body == b"hi"

    run(server, work)
    assert len(server.connections) == 2


def test_idle_connections_are_closed_after_a_while(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "IDLE_SECONDS", 0.05)

    async def work(pool: ConnectionPool) -> None:
        for _ in range(2):
            server.reply(OK)
        await asyncio.gather(post(pool), post(pool))
        assert len(pool._idle) == 2
        await asyncio.to_thread(lambda: [server.ended.get(timeout=WAIT) for _ in range(2)])
        assert pool._idle == []

    run(server, work)


def test_a_large_body_is_sent_whole_while_the_server_reads_slowly(server: ScriptedServer) -> None:
    body = bytes(10_000_000) + b"body"

    async def work(pool: ConnectionPool) -> None:
        server.reply(OK)
        connection = await pool.take()
        assert (await connection.post(HEAD, body)).body == b"hi"
        pool.give_back(connection)

    run(server, work)


def test_a_client_that_leaves_closes_its_side_and_still_reads_what_was_on_its_way(server: ScriptedServer) -> None:
    async def leave(pool: ConnectionPool, *answer: bytes) -> HttpResponse:
        connection = await pool.take()
        posted = asyncio.ensure_future(connection.post(HEAD, b"body"))
        while not connection.requests:
            await asyncio.sleep(0)
        posted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posted
        late = asyncio.ensure_future(connection.read_late_response())
        await asyncio.sleep(0)  # its side is closed now
        server.reply(*answer)
        try:
            return await late
        finally:
            pool.give_back(connection)

    async def work(pool: ConnectionPool) -> None:
        assert (await leave(pool, OK)).body == b"hi"
        with pytest.raises(ConnectionLost):
            await leave(pool)

    run(server, work)
    assert [server.ended.get(timeout=WAIT) for _ in range(2)] == [b"", b""], "the server saw it leave"


def test_a_server_that_nobody_runs_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def connect(host: str) -> None:
        await ConnectionPool(HttpAddress(False, host, port, ""), None, 5 * SECOND).take()

    with pytest.raises(ServerUnreachable, match="Connect"):
        asyncio.run(connect("127.0.0.1"))
    with pytest.raises(ServerUnreachable, match="Connect"):
        asyncio.run(connect("localhost"))
    with pytest.raises(ServerUnreachable):
        asyncio.run(connect("no-such-host.invalid"))


def test_a_connection_that_is_not_made_in_time_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        filling = [socket.socket() for _ in range(4)]
        for one in filling:  # the backlog is full: further connections get no answer
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))

        async def connect() -> None:
            await ConnectionPool(HttpAddress(False, "127.0.0.1", port, ""), None, SECOND // 10).take()

        with pytest.raises(ServerUnreachable, match=r"does not answer within 0\.1 s"):
            asyncio.run(connect())
        for one in filling:
            one.close()
