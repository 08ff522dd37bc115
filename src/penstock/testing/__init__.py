"""A clock and a disk that tests control. Penstock's own tests use them; they are public, for tests of applications.

No other module of Penstock imports this package.
"""

from penstock.testing.clock import ManualClock
from penstock.testing.disk import Fault, Halt, SimulatedFiles

__all__ = ["Fault", "Halt", "ManualClock", "SimulatedFiles"]
