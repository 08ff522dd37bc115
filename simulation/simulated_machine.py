"""The simulated disk and clock that a simulation runs on, and their faults.

Owns: `FaultInjectingFiles` (a disk that checks can read without faults), `InterruptingClock`, `SimulatedMachine`.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.testing.clock import MicrosecondClock
from penstock.testing.disk import Fault, SimulatedFiles
from penstock.words.clock import Moment
from simulation.simulation import StepPrinter


class FaultInjectingFiles(SimulatedFiles):
    """A simulated disk. Checks can read it without meeting faults, and a fault can be set to follow a sync of a given
    file."""

    _waiting: tuple[str, Fault, int] | None = None
    """(Part of a path, fault, number of calls between the next sync of such a file and the fault.)"""

    def fail_after_sync(self, path: str, how: Fault, ahead: int) -> None:
        """Put a fault `ahead` calls after the next sync of a file whose path contains `path`."""
        self._waiting = (path, how, ahead)

    def sync(self, handle: int) -> None:
        super().sync(handle)
        if self._waiting is not None and self._waiting[0] in self._opened_file(handle).path:
            self.fail(self.calls + self._waiting[2], self._waiting[1])
            self._waiting = None

    def clear_faults(self) -> None:
        super().clear_faults()
        self._waiting = None

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """File calls inside this context meet no fault and are not counted."""
        kept = self.calls, self._faults, self._next_write_fails, self._capacity, self._readonly
        self._faults, self._next_write_fails, self._capacity, self._readonly = {}, False, None, False
        try:
            yield
        finally:
            self.calls, self._faults, self._next_write_fails, self._capacity, self._readonly = kept

    @property
    def fault_pending(self) -> bool:
        """Whether a later call may meet a fault."""
        return bool(self._faults or self._waiting or self.failure_pending)

    @property
    def failure_pending(self) -> bool:
        """Whether a later call may fail or halt the process. Interrupts do not count."""
        faults = [*self._faults.values(), *([] if self._waiting is None else [self._waiting[1]])]
        return any(fault != "interrupt" for fault in faults) or self._next_write_fails or self._capacity is not None or self._readonly

    def drop_interrupts(self) -> None:
        self._faults = {call: fault for call, fault in self._faults.items() if fault != "interrupt"}
        if self._waiting is not None and self._waiting[1] == "interrupt":
            self._waiting = None

    def remove_all_faults(self) -> None:
        self.clear_faults()
        self.set_free_bytes(None)
        self.set_read_only(False)


class InterruptingClock(MicrosecondClock):
    """A manual clock that can raise `KeyboardInterrupt` when it is read: an interrupt between two file calls."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt_after: int | None = None
        """The number of reads before one read raises `KeyboardInterrupt`; None: no read does."""

    def read(self) -> Moment:
        if self.interrupt_after is not None:
            self.interrupt_after -= 1
            if self.interrupt_after < 0:
                self.interrupt_after = None
                raise KeyboardInterrupt
        return super().read()


class SimulatedMachine:
    """A simulated disk and a clock; its process can be killed and its power cut."""

    def __init__(self, seed: int, clock: MicrosecondClock, say: StepPrinter) -> None:
        self.say = say
        self.clock = clock
        self.disk = FaultInjectingFiles(random.Random(seed))

    def inject_fault(self, fault: Fault, ahead: int) -> None:
        """Make the file call after `ahead` more calls meet this fault."""
        self.say("   call %d will meet %s", self.disk.calls + ahead, fault)
        self.disk.fail(self.disk.calls + ahead, fault)

    def kill_process(self) -> None:
        """Kill the process: everything that it wrote stays on the disk."""
        self.disk.kill()
        self.say("   killed: %r", self.disk)

    def cut_power(self, downtime: int) -> None:
        """Cut the power: unsynced bytes are kept, lost or torn at random, and elapsed time starts again at zero."""
        self.disk.crash()
        self.clock.reboot(downtime)
        self.say("   power cut: %r", self.disk)
