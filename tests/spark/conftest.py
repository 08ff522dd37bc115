"""One real Spark for all tests of this folder.

Owns: the session-wide `spark`. A JVM costs ten seconds and half a gigabyte, so all of these tests run in one worker
(tests/conftest.py). Where pyspark is not installed the whole folder is skipped, and says so; in CI nothing may skip.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from penstock import Broker, Queue
from penstock.spark.session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).parent
IGNORED = [
    # py4j leaves its connections to the collector
    "ignore:unclosed <socket.socket.*raddr=\\('127.0.0.1':ResourceWarning",
]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if importlib.util.find_spec("pyspark") else WithoutSpark.from_parent(parent, path=module_path)


class WithoutSpark(pytest.Module):
    """Test modules that cannot be imported without Spark."""

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        pytest.skip("pyspark is not installed; run pip install 'penstock[spark]'", allow_module_level=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for warning in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """A local Spark with two threads and the data source; tasks have four attempts, as on a cluster."""
    places = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.sql.shuffle.partitions": 4,
        "spark.sql.warehouse.dir": (places / "warehouse").as_uri(),
        "spark.sql.streaming.checkpointLocation": str(places / "checkpoints"),
    }
    made = session("penstock-tests", "local[2,4]", **conf)
    yield made
    made.stop()


@pytest.fixture
def broker_dir(tmp_path: Path) -> str:
    """The path for the test's broker; nothing exists there yet."""
    return os.fspath(tmp_path / "broker")


@pytest.fixture
def broker(broker_dir: str) -> Iterator[Broker]:
    """The test's broker, open."""
    with penstock.open(broker_dir) as broker:
        yield broker


@pytest.fixture
def queue(broker: Broker) -> Queue:
    """The queue "orders", with three partitions."""
    return broker.create_queue("orders", partitions=3)


@pytest.fixture
def start(broker_dir: str) -> Iterator[Any]:
    """Starts runs of consuming streams, without a JVM; they are stopped after the test."""
    from tests.spark.consuming_runs import ConsumingStreamRun

    begun: list[ConsumingStreamRun] = []

    def start(*args: Any, **options: Any) -> ConsumingStreamRun:
        begun.append(ConsumingStreamRun(broker_dir, *args, **options))
        return begun[-1]

    yield start
    for one in begun:
        one.kill()
