"""The loop is tested on the same bench as the rules."""

from tests.rules.conftest import partition

__all__ = ["partition"]
