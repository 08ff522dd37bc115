"""Brokers for the tests of the public API."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock import Broker
from tests.api.both_apis import Place


@pytest.fixture(params=["sync", "async"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A directory, and one of the two APIs to open it with."""
    with ExitStack() as stack:
        yield Place(str(tmp_path / "data"), request.param == "async", stack)


@pytest.fixture
def broker(place: Place) -> Broker:
    """A broker whose time passes."""
    place.target = "memory://"
    return place.open()


@pytest.fixture
def timed(place: Place) -> Broker:
    """A broker whose time stands still until `place.clock` is advanced."""
    place.target = "memory://"
    return place.timed()
