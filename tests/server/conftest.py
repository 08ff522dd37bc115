"""A server of a broker in this process, for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import penstock
from penstock.server.home_calls import ServedHome
from penstock.server.http_server import HttpServer, listen


@contextmanager
def serve(home: ServedHome) -> Iterator[HttpServer]:
    """A server of this home on a free port, in a thread."""
    server = HttpServer(home, listen("127.0.0.1", 0))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    with penstock.open(tmp_path / "data") as broker, serve(broker.home) as running:  # type: ignore[arg-type]
        yield running
