"""A server of a broker in this process, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import penstock
from penstock.api.home_calls import ServedHome
from penstock.operations import Home
from penstock.server.http_server import HttpServer, listen
from penstock.server.server_limits import ServerLimits
from tests.server.poster import Poster


@contextmanager
def serve(home: Home, limits: ServerLimits | None = None, port: int = 0, **options: Any) -> Iterator[HttpServer]:
    """A server of this home, on a free port if none is given, in a thread."""
    server = HttpServer(cast(ServedHome, home), [listen("127.0.0.1", port)], limits, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    with penstock.open(tmp_path / "data") as broker, serve(broker.home) as running:
        yield running


@pytest.fixture
def poster(server: HttpServer) -> Iterator[Poster]:
    poster = Poster(server)
    yield poster
    poster.connection.close()
