"""Brokers whose queues are read as tables."""

from tests.broker.conftest import directory_broker, file_broker

__all__ = ["directory_broker", "file_broker"]
