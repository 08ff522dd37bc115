"""A client that posts operations as bytes, for tests of the server."""

import http.client
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock import operations
from penstock.operations import Operation, ReadStats
from penstock.server.http_server import HttpServer
from penstock.wire.http_calls import ANSWER_TYPE, CALL_PATH, VERSION, VERSION_HEADER, decode_error
from penstock.wire.messages import decode_answer


def address_of(server: HttpServer) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


class Poster:
    """One connection to a server."""

    def __init__(self, server: HttpServer, key: str = "") -> None:
        self.connection = http.client.HTTPConnection(*address_of(server), timeout=30)
        self.headers = {VERSION_HEADER: VERSION} | ({"authorization": f"Bearer {key}"} if key else {})

    def start(self, operation: Operation[Any]) -> None:
        self.connection.request("POST", CALL_PATH, operations.encode(operation), self.headers)

    def call(self, operation: Operation[Any]) -> Any:
        status, kind, body = self.post(CALL_PATH, operations.encode(operation), self.headers)
        assert kind == ANSWER_TYPE
        if status == 200:
            return decode_answer(type(operation), body)
        raise decode_error(body)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str | None, bytes]:
        self.connection.request("POST", path, body, headers)
        response = self.connection.getresponse()
        return response.status, response.getheader("content-type"), response.read()


def waiting_leases(poster: Poster, queue: int) -> int:
    found: int = poster.call(ReadStats(queue=queue)).waiting_consumers
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, at most 30 seconds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)
