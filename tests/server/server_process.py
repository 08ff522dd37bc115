"""A server in a process of its own, and bare connections to it.

Owns: `ServerProcess` and `BareConnection`.
"""

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock import operations
from penstock.operations import A, Operation
from penstock.wire.http_calls import ANSWER_TYPE, CALL_PATH, VERSION, VERSION_HEADER, decode_error
from penstock.wire.messages import decode_answer

ROOT = Path(__file__).resolve().parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
START_SECONDS = 20.0
ANSWER_SECONDS = 30.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def serve_command(directory: Path, port: int) -> list[str]:
    """The module that serves a directory, and its arguments."""
    return ["penstock.cli", "serve", str(directory), "--create", "--bind", f"127.0.0.1:{port}"]


def allow_open_files(count: int) -> None:
    """Let this process, and those that it starts, have so many files and sockets open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(hard, count)))


class ServerProcess:
    """A server that can be killed, and started again on its port."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self._flags = flags
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServerProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        command = [sys.executable, "-m", *serve_command(self.directory, self.port), *self._flags]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": PYTHONPATH}, cwd=ROOT)
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                return BareConnection(self.port).close()
            except OSError:
                assert self.process.poll() is None, "the server ended"
                assert time.monotonic() < end, "the server does not take connections"
                time.sleep(0.005)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class BareConnection:
    """One connection that sends operations and receives answers, and nothing by itself."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS)
        self._received = b""

    def send(self, operation: Operation[Any]) -> None:
        self.socket.sendall(encode_request(operation))

    def receive(self, kind: type[Operation[A]]) -> A:
        """The answer to an operation that was sent; raises the error that it was answered with."""
        status, head, body = self.receive_response()
        assert ANSWER_TYPE in head, head
        if status != 200:
            raise decode_error(body)
        answer: A = decode_answer(kind, body)
        return answer

    def receive_response(self) -> tuple[int, str, bytes]:
        """Status, head and body of a response."""
        while b"\r\n\r\n" not in self._received:
            self._receive_some()
        raw, _, self._received = self._received.partition(b"\r\n\r\n")
        head = raw.decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        while len(self._received) < length:
            self._receive_some()
        body, self._received = self._received[:length], self._received[length:]
        return int(head.split()[1]), head, body

    def _receive_some(self) -> None:
        more = self.socket.recv(1 << 16)
        if not more:
            raise ConnectionError("the server closed the connection")
        self._received += more

    def call(self, operation: Operation[A]) -> A:
        self.send(operation)
        return self.receive(type(operation))

    def close(self) -> None:
        self.socket.close()


def encode_request(operation: Operation[Any]) -> bytes:
    """An operation as the bytes of an HTTP request."""
    body = operations.encode(operation)
    head = f"POST {CALL_PATH} HTTP/1.1\r\nHost: test\r\n{VERSION_HEADER}: {VERSION}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
