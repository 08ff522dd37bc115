"""Brokers whose queues are read as tables."""

from tests.broker.conftest import rig, yard

__all__ = ["rig", "yard"]
