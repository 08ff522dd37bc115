"""Brokers for the tests of the public API, and of the inbox."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock import Broker
from tests.broker.grounds import Simulated
from tests.broker.rig import Rig
from tests.service.api import Place
from tests.service.yard import Yard


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


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path / "data")
    yield yard
    yard.broker.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A broker run by hand, on a simulated disk. However a test leaves it, its counts are true and it can be closed."""
    rig = Rig(Simulated())
    yield rig
    rig.check()
    rig.broker.close()
