"""The calls of Penstock's own client, as bytes."""

import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from penstock import operations
from penstock.operations import CreateQueue, FindQueue, LeaseItems, Operation, ProduceItems
from penstock.server.http_server import HttpServer
from penstock.wire.http_calls import ANSWER_TYPE, CALL_PATH, VERSION, VERSION_HEADER, decode_error
from penstock.wire.messages import decode_answer
from penstock.words.batch import Batch


class Poster:
    """One connection to a server."""

    def __init__(self, server: HttpServer) -> None:
        address = urlsplit(server.url)
        self.connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)

    def call(self, operation: Operation[Any]) -> Any:
        status, kind, body = self.post(CALL_PATH, operations.encode(operation), {VERSION_HEADER: VERSION})
        assert kind == ANSWER_TYPE
        if status == 200:
            return decode_answer(type(operation), body)
        raise decode_error(body)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str | None, bytes]:
        self.connection.request("POST", path, body, headers)
        response = self.connection.getresponse()
        return response.status, response.getheader("content-type"), response.read()


@pytest.fixture
def poster(server: HttpServer) -> Iterator[Poster]:
    poster = Poster(server)
    yield poster
    poster.connection.close()


def test_operations_are_answered(poster: Poster) -> None:
    queue = poster.call(CreateQueue(name="orders")).incarnation
    assert poster.call(FindQueue(name="orders")).incarnation == queue
    assert poster.call(FindQueue(queue=queue)).name == "orders"
    poster.call(ProduceItems(queue=queue, batch=Batch([b"1", b"2"])))
    (part,) = poster.call(LeaseItems(queue=queue, count=5))
    assert part.items[0].batch.payloads == [b"1", b"2"]
