"""Brokers for the tests of the public API."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock import Broker
from tests.api.both_apis import BrokerOpener
from tests.recorded_spans import spans  # noqa: F401 (a fixture)


@pytest.fixture(params=["sync", "async"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerOpener]:
    """A directory, and one of the two APIs to open it with."""
    with ExitStack() as stack:
        yield BrokerOpener(str(tmp_path / "data"), request.param == "async", stack)


@pytest.fixture
def broker(opener: BrokerOpener) -> Broker:
    """A broker in memory with the system clock."""
    opener.target = "memory://"
    return opener.open()


@pytest.fixture
def manual_clock_broker(opener: BrokerOpener) -> Broker:
    """A broker in memory whose clock stands still until `opener.clock` is advanced."""
    opener.target = "memory://"
    return opener.open_with_manual_clock()
