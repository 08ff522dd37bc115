"""The fixture on which every rule is tested: the same test on every backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.partition_under_test import PARTITION_BACKENDS, PartitionUnderTest
from tests.purity import watch_decisions


@pytest.fixture(params=list(PARTITION_BACKENDS))
def partition(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PartitionUnderTest]:
    """A new partition. In tests of rules no decision may change it. However a test leaves it, its counts are true and its log tells its
    state."""
    if (
        "tests/rules/" in request.node.nodeid and request.param == "memory"
    ):  # rules know no backend; the loop's tests are about other things
        watch_decisions(monkeypatch)
    partition = PartitionUnderTest(PARTITION_BACKENDS[request.param](tmp_path))
    yield partition
    partition.check()
