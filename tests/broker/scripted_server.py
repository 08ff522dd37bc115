"""An HTTP server that answers operations as a test wants, over real connections.

Owns: `ScriptedServer`.
"""

import socket
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

from penstock import operations
from penstock.operations import Operation
from penstock.wire.http_calls import ANSWER_TYPE, encode_answer, encode_error
from penstock.words.errors import PenstockError

DROP = object()
"""A reply: the connection is closed without an answer."""
SILENCE = object()
"""A reply: none, and the connection stays open."""


class Raw(NamedTuple):
    """A reply of a proxy."""

    status: int
    body: bytes = b"<h1>sorry</h1>"
    content_type: str = "text/html"
    headers: str = ""


class ScriptedServer:
    """Takes operations, and answers each with the next reply: an answer, a PenstockError, a Raw, DROP or SILENCE."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.received: SimpleQueue[Operation[Any]] = SimpleQueue()
        self.heads: list[str] = []
        self.replies: SimpleQueue[Any] = SimpleQueue()
        self.left: SimpleQueue[None] = SimpleQueue()
        """An entry for each connection that its client has closed."""
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, *replies: Any) -> None:
        for reply in replies:
            self.replies.put(reply)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            self._sockets.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection.makefile("rb") as stream:  # the test may end meanwhile
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while head := _read_head(stream):
                self.heads.append(head)
                length = int(next(line for line in head.splitlines() if line.startswith("content-length")).split()[1])
                self.received.put(operations.decode(stream.read(length)))
                reply = self.replies.get()
                if reply is DROP:
                    connection.shutdown(socket.SHUT_RDWR)
                    break
                if reply is not SILENCE:
                    connection.sendall(_response(reply))
            self.left.put(None)
        connection.close()


def _read_head(stream: Any) -> str:
    lines: list[str] = []
    while (line := stream.readline().decode().rstrip("\r\n")) or (lines and line):
        lines.append(line)
    return "\n".join(lines)


def _response(reply: Any) -> bytes:
    if isinstance(reply, PenstockError):
        reply = Raw(reply.http_status, encode_error(reply), ANSWER_TYPE)
    elif not isinstance(reply, Raw):
        reply = Raw(200, encode_answer(reply), ANSWER_TYPE)
    lines = (f"HTTP/1.1 {reply.status} X", f"content-type: {reply.content_type}", f"content-length: {len(reply.body)}", reply.headers)
    body: bytes = reply.body
    return "\r\n".join(lines).encode() + b"\r\n" + body
