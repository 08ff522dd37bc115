"""The brokers on which scenarios are tested: each on every store."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.broker.broker_under_test import Rig
from tests.broker.directory_broker import Yard
from tests.broker.storages import Ground, Memory, Real, Simulated

GROUNDS: dict[str, Callable[[], Ground]] = {"memory": Memory, "files": Simulated}


@pytest.fixture(params=list(GROUNDS))
def broker(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A broker run by hand. However a test leaves it, its counts are true and it can be closed."""
    rig = Rig(GROUNDS[request.param]())
    yield rig
    rig.check()
    rig.broker.close()


@pytest.fixture(params=["memory", "files"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """A broker with real threads and the real clock."""
    rig = Rig(Memory() if request.param == "memory" else Real(tmp_path), live=True)
    yield rig
    rig.broker.close()


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
