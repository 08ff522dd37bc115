"""The brokers on which scenarios are tested: each on every store."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.directory_broker import DirectoryBroker
from tests.broker.storages import BrokerStorage, DirectoryStorage, MemoryStorage, SimulatedStorage

GROUNDS: dict[str, Callable[[], BrokerStorage]] = {"memory": MemoryStorage, "files": SimulatedStorage}


@pytest.fixture(params=list(GROUNDS))
def broker(request: pytest.FixtureRequest) -> Iterator[BrokerUnderTest]:
    """A broker run by hand. However a test leaves it, its counts are true and it can be closed."""
    broker = BrokerUnderTest(GROUNDS[request.param]())
    yield broker
    broker.check()
    broker.embedded.close()


@pytest.fixture(params=["memory", "files"])
def threaded_broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerUnderTest]:
    """A broker with real threads and the real clock."""
    broker = BrokerUnderTest(MemoryStorage() if request.param == "memory" else DirectoryStorage(tmp_path), threaded=True)
    yield broker
    broker.embedded.close()


@pytest.fixture
def directory_broker(tmp_path: Path) -> Iterator[DirectoryBroker]:
    directory_broker = DirectoryBroker(tmp_path / "data")
    yield directory_broker
    directory_broker.broker.close()


@pytest.fixture
def file_broker() -> Iterator[BrokerUnderTest]:
    """A broker run by hand, on a simulated disk. However a test leaves it, its counts are true and it can be closed."""
    broker = BrokerUnderTest(SimulatedStorage())
    yield broker
    broker.check()
    broker.embedded.close()
