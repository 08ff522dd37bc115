"""The machine that a simulation runs on: its disk and its clock, and how they go wrong.

Owns: `FaultInjectingFiles`, which can be looked at without disturbing it and tells interrupts from failures; `InterruptingClock`; `SimulatedMachine`.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.testing.clock import ManualClock
from penstock.testing.disk import Fault, SimulatedFiles
from penstock.words.clock import Moment
from simulation.simulation import StepPrinter


class FaultInjectingFiles(SimulatedFiles):
    """A simulated disk that can be read as if nothing were ever wrong with it, and whose faults can wait for a certain sync."""

    _waiting: tuple[str, Fault, int] | None = None
    """(Part of a path, fault, how many calls after the next sync of such a file.)"""

    def fail_after_sync(self, path: str, how: Fault, ahead: int) -> None:
        """Make a call go wrong soon after a file was synced whose path contains this."""
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
        """Calls in here meet no fault and do not count."""
        kept = self.calls, self._faults, self._next_write_fails, self._capacity, self._readonly
        self._faults, self._next_write_fails, self._capacity, self._readonly = {}, False, None, False
        try:
            yield
        finally:
            self.calls, self._faults, self._next_write_fails, self._capacity, self._readonly = kept

    @property
    def fault_pending(self) -> bool:
        """Whether something may still go wrong."""
        return bool(self._faults or self._waiting or self.failure_pending)

    @property
    def failure_pending(self) -> bool:
        """Whether a call may still fail, or the process end. An interrupt is neither."""
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


class InterruptingClock(ManualClock):
    """A manual clock; whoever reads it may be interrupted, at a point of a turn at which no file is used."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt_after: int | None = None
        """So many more times it is read; then `KeyboardInterrupt` is raised, once."""

    def read(self) -> Moment:
        if self.interrupt_after is not None:
            self.interrupt_after -= 1
            if self.interrupt_after < 0:
                self.interrupt_after = None
                raise KeyboardInterrupt
        return super().read()


class SimulatedMachine:
    """The disk and the clock that something is run on, and how it is switched off."""

    def __init__(self, seed: int, clock: ManualClock, say: StepPrinter) -> None:
        self.say = say
        self.clock = clock
        self.disk = FaultInjectingFiles(random.Random(seed))

    def inject_fault(self, fault: Fault, ahead: int) -> None:
        """One of the next file calls will go wrong."""
        self.say("   call %d will meet %s", self.disk.calls + ahead, fault)
        self.disk.fail(self.disk.calls + ahead, fault)

    def kill_process(self) -> None:
        """Kill the process: everything that it wrote is there."""
        self.disk.kill()
        self.say("   killed: %r", self.disk)

    def cut_power(self, downtime: int) -> None:
        """Cut the power: what was not synced is kept, lost or torn, and elapsed time begins anew."""
        self.disk.crash()
        self.clock.reboot(downtime)
        self.say("   power cut: %r", self.disk)
