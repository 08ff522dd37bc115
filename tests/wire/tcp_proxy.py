"""A TCP proxy that cuts connections where a test wants, and can speak TLS to its clients."""

import socket
import ssl
import threading
from contextlib import suppress
from typing import Literal

Direction = Literal["request", "response"]


class TcpProxy:
    """Passes bytes on between its clients and a server, in threads."""

    def __init__(self, server: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self._server = server
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._cut: tuple[Direction, int] | None = None
        self._lock = threading.Lock()
        self.cuts = 0
        """How many connections were cut."""
        self.connections = 0
        self.is_silent = False
        """Whether bytes of clients are read and not passed on."""
        self.last_sizes: dict[Direction, int] = {}
        """How many bytes came last, in each direction."""
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    def cut_after(self, direction: Direction, size: int) -> None:
        """End the connection after so many more bytes in this direction, of all connections; once."""
        with self._lock:
            self._cut = direction, size

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for one in [*self._sockets]:
            _end(one)

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(self._server)
        except OSError:  # the client does not trust the certificate, say; or nobody listens
            client.close()
            return
        self._sockets += [client, server]
        answers = threading.Thread(target=self._pass_on, args=(server, client, "response"), daemon=True)
        answers.start()
        self._pass_on(client, server, "request")
        answers.join()
        _end(client)
        _end(server)

    def _pass_on(self, source: socket.socket, target: socket.socket, direction: Direction) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.last_sizes[direction] = len(data)
                if direction == "request" and self.is_silent:
                    continue
                left = self._left(direction, len(data))
                target.sendall(data[:left])
                if left < len(data):
                    self.cuts += 1
                    _end(source)
                    _end(target)
                    return
            target.shutdown(socket.SHUT_WR)

    def _left(self, direction: Direction, size: int) -> int:
        """How many of the next bytes may pass."""
        with self._lock:
            if self._cut is None or self._cut[0] != direction:
                return size
            left = self._cut[1]
            self._cut = None if left < size else (direction, left - size)
            return min(left, size)


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
