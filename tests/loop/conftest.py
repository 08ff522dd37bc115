"""Fixtures: the partition of the tests of the rules."""

from tests.rules.conftest import partition

__all__ = ["partition"]
