"""The fixture of the rules' tests: a partition, on every backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.partition_under_test import PARTITION_BACKENDS, PartitionUnderTest
from tests.purity import watch_decisions


@pytest.fixture(params=list(PARTITION_BACKENDS))
def partition(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PartitionUnderTest]:
    """A new partition. In tests of rules a decision that changes its state fails. After the test its counts and its log
    are checked against its state."""
    # The rules do not depend on the backend, so one is enough; the loop's tests do not need it.
    if "tests/rules/" in request.node.nodeid and request.param == "memory":
        watch_decisions(monkeypatch)
    partition = PartitionUnderTest(PARTITION_BACKENDS[request.param](tmp_path))
    yield partition
    partition.check()
