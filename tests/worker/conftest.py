"""Fixtures for workers."""

from collections.abc import Iterator

import pytest

import penstock
from penstock import Broker, Queue
from tests.recorded_spans import spans  # noqa: F401 (a fixture)
from tests.worker.harness import HandlerEvents


@pytest.fixture
def broker() -> Iterator[Broker]:
    with penstock.open("memory://") as broker:
        yield broker


@pytest.fixture
def queue(broker: Broker) -> Queue:
    return broker.create_queue("orders", lease_timeout=60)


@pytest.fixture
def log() -> HandlerEvents:
    return HandlerEvents()
