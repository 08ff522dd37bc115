"""Fixtures: brokers on every kind of storage."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.directory_broker import DirectoryBroker
from tests.broker.storages import BrokerStorage, DirectoryStorage, MemoryStorage, PartlyFailingFiles, SimulatedStorage

STORAGES: dict[str, Callable[[], BrokerStorage]] = {"memory": MemoryStorage, "files": SimulatedStorage}


@pytest.fixture(params=list(STORAGES))
def broker(request: pytest.FixtureRequest) -> Iterator[BrokerUnderTest]:
    """A broker without threads. After each test its counts must be true, and it can be closed."""
    broker = BrokerUnderTest(STORAGES[request.param]())
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
    """A broker without threads on a simulated disk. After each test its counts must be true, and it can be closed."""
    broker = BrokerUnderTest(SimulatedStorage())
    yield broker
    broker.check()
    broker.embedded.close()


@pytest.fixture
def patchy() -> Iterator[BrokerUnderTest]:
    """The same on a disk of which a test makes parts fail (`partly_failing_disk`)."""
    broker = BrokerUnderTest(SimulatedStorage(PartlyFailingFiles()))
    yield broker
    broker.check()
    broker.embedded.close()
