"""What Penstock's own tests put in place of the world, for the tests of those who use it: a clock and a disk under control.

Public. Nothing in Penstock imports this.
"""

from penstock.testing.clock import ManualClock
from penstock.testing.disk import Fault, Halt, SimulatedFiles

__all__ = ["Fault", "Halt", "ManualClock", "SimulatedFiles"]
