"""A client of the JSON API, for tests."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from penstock.server.http_server import HttpServer
from tests.server.poster import address_of


class Answer(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.content)


class JsonClient:
    """One connection to a server."""

    def __init__(self, server: HttpServer, key: str = "") -> None:
        self.connection = http.client.HTTPConnection(*address_of(server), timeout=30)
        self.headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def send(self, path: str, body: bytes, method: str = "POST", **headers: str | None) -> Answer:
        """Any request. A header of the value None is not sent."""
        changed = {name.replace("_", "-"): value for name, value in headers.items()}
        given = {name: value for name, value in {**self.headers, **changed}.items() if value is not None}
        self.connection.request(method, path, body, given)
        response = self.connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())

    def post(self, path: str, **fields: Any) -> Answer:
        """Post these fields to /v1/<path>."""
        return self.send(f"/v1/{path}", json.dumps(fields).encode())

    def ok(self, path: str, **fields: Any) -> Any:
        """Post these fields; gives the reply, which must have status 200."""
        answer = self.post(path, **fields)
        assert answer.status == 200, answer
        return answer.json

    def refused(self, path: str, **fields: Any) -> tuple[int, str, str]:
        """Post these fields; gives the status, the code and the message of the error."""
        answer = self.post(path, **fields)
        return answer.status, answer.json["code"], answer.json["message"]


@contextmanager
def json_client(server: HttpServer, key: str = "") -> Iterator[JsonClient]:
    client = JsonClient(server, key)
    with closing(client.connection):
        yield client
