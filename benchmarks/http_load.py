"""A cheap load for an HTTP server: connections that send prepared bytes, each as soon as it has its last answer.

Owns: `Load` (the connections of one event loop), `Phase` (what they send) and `request_bytes`. It parses no more of an
answer than its status and length, so that on two cores the server is measured and not the load.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import cast

END_OF_HEAD = b"\r\n\r\n"
LENGTH = b"content-length:"


def request_bytes(path: str, body: bytes, headers: str = "Content-Type: application/json\r\n") -> bytes:
    """A POST request."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Phase:
    """Requests for the connections of a load: until there are no more, or until the time is over."""

    def __init__(self, requests: Iterable[bytes], seconds: float = float("inf"), *, keep: bool = False) -> None:
        """keep: collect the bodies of the answers."""
        self._requests: Iterator[bytes] = iter(requests)
        self._keep = keep
        self._running = 0
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bodies: list[bytes] = []
        self.times: list[float] = []
        """The seconds that each request took."""
        self.began = time.perf_counter()
        self.last = self.began
        """When the last answer came."""
        self._until = self.began + seconds

    @property
    def took(self) -> float:
        """From the first request to the last answer."""
        return self.last - self.began

    def start(self, connections: "Iterable[LoadConnection]") -> None:
        for connection in connections:
            self._running += 1
            self.next(connection)

    async def wait(self) -> "Phase":
        """Wait until all connections have their answers."""
        await self._ended
        return self

    def next(self, connection: "LoadConnection") -> None:
        """Give a connection its next request; it stops when there is none."""
        now = time.perf_counter()
        request = next(self._requests, None) if now < self._until else None
        if request is not None:
            connection.send(request, now, self)
            return
        self._running -= 1
        if not self._running and not self._ended.done():
            self._ended.set_result(None)

    def answered(self, connection: "LoadConnection", sent: float, status: bytes, body: bytes) -> None:
        self.last = time.perf_counter()
        self.times.append(self.last - sent)
        if status != b"200":
            self.fail(RuntimeError(f"the server answered {status.decode()}: {body[:500].decode(errors='replace')}"))
        elif self._keep:
            self.bodies.append(body)
        self.next(connection)

    def fail(self, error: Exception) -> None:
        self._until = 0.0
        if not self._ended.done():
            self._ended.set_exception(error)


class LoadConnection(asyncio.Protocol):
    """One connection, with at most one request under way."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._wanted = 0
        """The length of the answer, as soon as it is known."""
        self._body_at = 0
        self._phase: Phase | None = None
        self._sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._phase is not None:
            self._phase.fail(ConnectionError(f"the server closed a connection ({error})"))

    def send(self, request: bytes, now: float, phase: Phase) -> None:
        assert self._transport is not None
        self._sent, self._phase = now, phase
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        if not self._wanted:
            self._body_at = received.find(END_OF_HEAD) + len(END_OF_HEAD)
            if self._body_at < len(END_OF_HEAD):
                return
            head = bytes(received[: self._body_at]).lower()
            length_at = head.index(LENGTH) + len(LENGTH)
            self._wanted = self._body_at + int(head[length_at : head.index(b"\r\n", length_at)])
        if len(received) < self._wanted or self._phase is None:
            return
        status, body = bytes(received[9:12]), bytes(received[self._body_at : self._wanted])
        del received[: self._wanted]
        self._wanted = 0
        phase, self._phase = self._phase, None
        phase.answered(self, self._sent, status, body)

    def close(self) -> None:
        self._phase = None
        if self._transport is not None:
            self._transport.abort()


class Load:
    """Connections to a server, made and closed together."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self.connections: list[LoadConnection] = []

    async def __aenter__(self) -> "Load":
        loop = asyncio.get_running_loop()
        for _ in range(self._count):
            _, connection = await loop.create_connection(LoadConnection, "127.0.0.1", self._port)
            self.connections.append(connection)
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self.connections:
            connection.close()

    async def run(self, phase: Phase) -> Phase:
        """Let all connections send the requests of a phase, and wait for its end."""
        phase.start(self.connections)
        return await phase.wait()
