"""A disk in memory that fails the way disks fail, repeatably.

Owns: `SimulatedFiles`, the other kind of `Files` (logs/files/filesystem.py); its faults; `Halt`, which ends a simulated process inside a call.
Two ways to end: `kill` (the process is gone, all it wrote is there); `crash` (the power too: what was not synced is kept, lost or torn).
Limits: a rename, of a file or a directory, stays inside its parent; one process at a time, though locks are told apart by handle as the
system does.
Stricter than a system where systems differ: `write` only on an append handle, `pwrite` only on an update handle.
"""

import contextlib
import copy
import errno
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from penstock.logs.files.filesystem import Mode
from penstock.logs.log import Buffer
from penstock.testing.device import SimulatedDirectory, SimulatedFile, Truncate, Write
from penstock.testing.tree import Tree, error, names_of

Fault: TypeAlias = int | Literal["short", "torn", "halt", "interrupt"]
"""How a call goes wrong.

- an errno: it fails with that and does nothing. A failed `sync` loses what it should have written for ever, though later ones succeed.
- "short": a write writes a part and says so; the caller may go on. Another call is not affected.
- "torn": as "short", and the next write fails with ENOSPC.
- "halt": it happens, or a part of it, or nothing; the caller never learns which: `Halt` is raised, now and by every later call.
- "interrupt": it happens, or a part of it, or nothing, and `KeyboardInterrupt` is raised, once, as by Ctrl-C; nothing is lost by it.
"""

T = TypeVar("T")
TRACE_LENGTH = 1_000
PLENTY = 1 << 40
FIRST_HANDLE = 3


class Halt(BaseException):
    """The simulated process got no further. Not an Exception: no handler of errors may live on after it."""


class _Opened(NamedTuple):
    path: str
    file: SimulatedFile
    mode: Mode | Literal["lock"]


class SimulatedFiles:
    """An in-memory `Files` whose failures a test chooses and whose chance comes from one generator.

    Calls that can fail are counted from 1 (`calls` is the number of the latest); `fail(files.calls + 1, errno.EIO)` fails the next.
    `trace` tells the latest thousand of them. `copy()` gives an independent twin, to try what would happen if.
    """

    def __init__(self, rng: random.Random | None = None, filesystem_type: str = "ext4") -> None:
        self.filesystem_type = filesystem_type
        self.calls = 0
        self.trace: deque[str] = deque(maxlen=TRACE_LENGTH)
        self._rng = rng or random.Random(0)
        self._tree = Tree()
        self._opened: dict[int, _Opened] = {}
        self._faults: dict[int, Fault] = {}
        self._next_write_fails = False
        self._halted = False
        self._readonly = False
        self._capacity: int | None = None

    # -- what a test does to the disk ----------------------------------------------------------------

    def fail(self, call: int, how: Fault) -> None:
        """Make the call of that number go wrong."""
        if call <= self.calls:
            raise ValueError(f"call {call} has been made already; the next is {self.calls + 1}")
        self._faults[call] = how

    def clear_faults(self) -> None:
        """Drop the faults still to come. (What a failed sync lost stays lost.)"""
        self._faults.clear()
        self._next_write_fails = False

    def kill(self) -> None:
        """End the process: handles and locks are gone, everything written stays, and so do the faults still to come."""
        for opened in self._opened.values():
            opened.file.locked = False
        self._opened.clear()
        self._halted = False

    def crash(self) -> None:
        """Cut the power: as `kill`, and every change not synced is kept, lost or torn, as chance has it."""
        self.kill()
        self._tree.crash(self._rng)

    def flip_bit(self, path: str, bit: int) -> None:
        """Damage one bit of a file; bit 0 is the lowest of the first byte."""
        self._tree.file(path).flip(bit)

    def set_free_bytes(self, free_bytes: int | None) -> None:
        """Leave that much space; writes beyond it come out short and then fail with ENOSPC. None gives plenty again."""
        self._capacity = None if free_bytes is None else free_bytes + self._tree.used_bytes()

    def set_read_only(self, on: bool = True) -> None:
        """Refuse every change with EROFS, or allow them again."""
        self._readonly = on

    def copy(self) -> "SimulatedFiles":
        """An independent twin in the same state, open handles and chance included."""
        return copy.deepcopy(self)

    def content(self, path: str) -> bytes:
        """A file's bytes as a process sees them."""
        return bytes(self._tree.file(path).seen)

    def contents(self) -> dict[str, bytes]:
        """Every file's bytes by path, and every directory, as a path that ends in a slash, with none."""
        return {path: bytes(node.seen) if isinstance(node, SimulatedFile) else b"" for path, node in self._tree.walk()}

    def put_file(self, path: str, data: bytes) -> None:
        """Put these bytes into a file, new or not, whole and synced, whatever faults are set."""
        self._tree.make_directory("/".join(names_of(path)[:-1]))
        file = self._tree.make_file(path)
        file.change(Truncate(0))
        file.change(Write(0, data))
        file.sync()
        self._tree.sync_names()

    # -- Files ---------------------------------------------------------------------------------------

    def open(self, path: str, mode: Mode) -> int:
        if mode == "read":
            return self._step("open", path, lambda: self._register(path, self._tree.file(path), mode))
        return self._step("open", path, lambda: self._register(path, self._make_file(path), mode), changes=True)

    def close(self, handle: int) -> None:
        if self._halted:  # a `finally` that closes must not hide the Halt that led there
            return
        opened = self._at(handle)
        if opened.mode == "lock":
            opened.file.locked = False
        del self._opened[handle]

    def write(self, handle: int, parts: Sequence[Buffer]) -> int:
        opened = self._at(handle, "append")
        return self._write("write", opened, len(opened.file.seen), b"".join(parts))

    def pwrite(self, handle: int, data: Buffer, position: int) -> int:
        return self._write("pwrite", self._at(handle, "update", "lock"), position, bytes(data))

    def pread(self, handle: int, size: int, position: int) -> bytes:
        opened = self._at(handle)
        return self._step("pread", opened.path, lambda: bytes(opened.file.seen[position : position + size]))

    def truncate(self, handle: int, size: int) -> None:
        opened = self._at(handle, "append", "update", "lock")
        self._step("truncate", opened.path, lambda: opened.file.change(Truncate(size)), changes=True)

    def size(self, handle: int) -> int:
        return len(self._at(handle).file.seen)

    def sync(self, handle: int) -> None:
        opened = self._at(handle)
        try:
            self._step("sync", opened.path, opened.file.sync)
        except OSError:
            opened.file.forget()
            raise

    def sync_directory(self, path: str) -> None:
        """A failed one keeps the names pending: unlike a file's pages, they are not dropped."""
        self._step("sync_directory", path, lambda: self._tree.directory(path).sync())

    def exists(self, path: str) -> bool:
        self._go_on()
        return self._tree.find(path) is not None

    def list(self, path: str) -> "list[str]":
        return self._step("list", path, lambda: sorted(self._tree.directory(path).seen))

    def make_directory(self, path: str) -> None:
        missing = not isinstance(self._tree.find(path), SimulatedDirectory)
        self._step("make_directory", path, lambda: self._tree.make_directory(path), changes=missing)

    def rename(self, source: str, target: str) -> None:
        if names_of(source)[:-1] != names_of(target)[:-1]:
            raise ValueError(f"{source} to {target} leaves the directory, which a simulated rename cannot")
        self._step("rename", f"{source} to {target}", lambda: self._tree.rename(source, target), changes=True)

    def remove(self, path: str) -> None:
        self._step("remove", path, lambda: self._tree.remove(path), changes=True)

    def remove_directory(self, path: str) -> None:
        self._step("remove_directory", path, lambda: self._tree.remove_directory(path), changes=True)

    def lock(self, path: str) -> int | None:
        return self._step("lock", path, lambda: self._lock(path), changes=True)

    def free_bytes(self, path: str) -> int:
        self._go_on()
        return self._free()

    def filesystem(self, path: str) -> str:
        return self.filesystem_type

    # -- how calls go right and wrong ----------------------------------------------------------------

    def _go_on(self) -> None:
        if self._halted:
            raise Halt(f"the process ended at call {self.calls}")

    def _next_fault(self, call: str, subject: str) -> Fault | None:
        self._go_on()
        self.calls += 1
        fault = self._faults.pop(self.calls, None)
        self.trace.append(f"{self.calls} {call} {subject}" + (f" [{fault}]" if fault else ""))
        return fault

    def _step(self, call: str, path: str, effect: Callable[[], T], *, changes: bool = False) -> T:
        fault = self._next_fault(call, path)
        if isinstance(fault, int):
            raise error(fault, path)
        if changes:
            self._refuse_readonly(path)
        if fault in ("halt", "interrupt"):
            self._break_off(effect, fault)
        return effect()

    def _break_off(self, effect: Callable[[], T], fault: Fault) -> None:
        if self._rng.random() < 0.5:
            with contextlib.suppress(OSError):
                effect()
        if fault == "interrupt":
            raise KeyboardInterrupt
        self._halted = True
        self._go_on()

    def _write(self, call: str, opened: _Opened, position: int, data: bytes) -> int:
        fault = self._next_fault(call, f"{opened.path} {len(data)} bytes at {position}")
        self._refuse_readonly(opened.path)
        if self._next_write_fails:
            self._next_write_fails, fault = False, errno.ENOSPC
        if isinstance(fault, int):
            raise error(fault, opened.path)
        size = self._fitting(opened.file, position, len(data))
        if data and not size:
            raise error(errno.ENOSPC, opened.path)
        if fault in ("halt", "interrupt"):
            size = self._rng.randint(0, size)
        elif fault and size > 1:
            size = self._rng.randrange(1, size)
        opened.file.change(Write(position, data[:size]))
        self._halted = fault == "halt"
        self._next_write_fails = fault == "torn"
        if fault == "interrupt":
            raise KeyboardInterrupt
        self._go_on()
        return size

    def _refuse_readonly(self, path: str) -> None:
        if self._readonly:
            raise error(errno.EROFS, path)

    # -- space and handles ---------------------------------------------------------------------------

    def _free(self) -> int:
        return PLENTY if self._capacity is None else max(0, self._capacity - self._tree.used_bytes())

    def _fitting(self, file: SimulatedFile, position: int, size: int) -> int:
        """How much of a write there is space for; what is overwritten needs none."""
        return size if self._capacity is None else min(size, max(0, len(file.seen) - position) + self._free())

    def _make_file(self, path: str) -> SimulatedFile:
        if self._tree.find(path) is None and not self._free():
            raise error(errno.ENOSPC, path)
        return self._tree.make_file(path)

    def _lock(self, path: str) -> int | None:
        file = self._make_file(path)
        if file.locked:
            return None
        file.locked = True
        return self._register(path, file, "lock")

    def _register(self, path: str, file: SimulatedFile, mode: Mode | Literal["lock"]) -> int:
        """Give out a handle: always the lowest one free, as a system does, so that a handle used after its close is likely to show."""
        handle = next(number for number in count(FIRST_HANDLE) if number not in self._opened)
        self._opened[handle] = _Opened(path, file, mode)
        return handle

    def _at(self, handle: int, *modes: str) -> _Opened:
        self._go_on()
        opened = self._opened.get(handle)
        if opened is None:
            raise error(errno.EBADF, f"handle {handle}")
        if modes and opened.mode not in modes:
            raise ValueError(f"{opened.path} is open for {opened.mode}; this call needs it open for {' or '.join(modes)}")
        return opened

    def __repr__(self) -> str:
        files = self._tree.files()
        facts = [
            f"{len(files)} files",
            f"{self._tree.used_bytes()} bytes",
            f"{sum(file.unsynced_bytes for file in files)} unsynced",
            f"{len(self._opened)} open",
            f"{self.calls} calls",
            *(["halted"] * self._halted),
            *(["read-only"] * self._readonly),
            *(["full"] * (self._free() == 0)),
        ]
        return f"SimulatedFiles({', '.join(facts)})"
