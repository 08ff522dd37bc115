"""The loop is tested on the same bench as the rules."""

from tests.rules.conftest import bench

__all__ = ["bench"]
