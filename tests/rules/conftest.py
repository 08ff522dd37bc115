"""The fixture on which every rule is tested: the same test on every backend."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.purity import watch_decisions
from tests.support import HOMES, Bench


@pytest.fixture(params=list(HOMES))
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A new partition. No decision changes it; however a test leaves it, its counts must be true and its log must tell its state."""
    watch_decisions(monkeypatch)
    bench = Bench(HOMES[request.param](tmp_path))
    yield bench
    bench.check()
