"""A disk in memory whose failures tests choose and can repeat.

Owns: `SimulatedFiles`, an implementation of `Files` (logs/files/filesystem.py); its faults; `Halt`, which ends a
simulated process in the middle of a call.
`kill` ends the process: everything it wrote stays. `crash` also cuts the power: changes that were not synced are kept,
lost or torn.
Limits: a rename stays inside its directory; only one process is simulated, but locks belong to handles, as in a system.
`write` works only on an append handle and `pwrite` only on an update handle, because systems differ otherwise.
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
from penstock.testing.device import SimulatedDirectory, SimulatedFile, Tree, Truncate, Write, error, names_of

Fault: TypeAlias = int | Literal["short", "torn", "halt", "interrupt"]
"""How a call fails.

- an errno: the call does nothing and raises OSError with it. The changes of a failed `sync` are never written, not even
  by a later one.
- "short": a write writes a part and returns its size. Other calls are not affected.
- "torn": as "short", and the next write fails with ENOSPC.
- "halt": the call has its effect, a part of it, or none. It raises `Halt`, and so does every later call.
- "interrupt": the call has its effect, a part of it, or none, and raises `KeyboardInterrupt`, as Ctrl-C does. Later
  calls work.
"""

T = TypeVar("T")
TRACE_LENGTH = 1_000
UNLIMITED_BYTES = 1 << 40
FIRST_HANDLE = 3


class Halt(BaseException):
    """The simulated process has ended. Not an Exception, so that no `except Exception` continues after it."""


class _Opened(NamedTuple):
    path: str
    file: SimulatedFile
    mode: Mode | Literal["lock"]


class SimulatedFiles:
    """An in-memory `Files` whose failures a test chooses. All randomness comes from one generator.

    Calls that can fail are numbered from 1; `calls` is the number of the latest. `fail(files.calls + 1, errno.EIO)`
    fails the next call. `trace` has the latest thousand calls.
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

    # -- for tests -----------------------------------------------------------------------------------

    def fail(self, call: int, how: Fault) -> None:
        """Make the call of that number fail."""
        if call <= self.calls:
            raise ValueError(f"call {call} has been made already; the next is {self.calls + 1}")
        self._faults[call] = how

    def clear_faults(self) -> None:
        """Cancel the faults of later calls. Changes that a failed sync lost stay lost."""
        self._faults.clear()
        self._next_write_fails = False

    def kill(self) -> None:
        """End the process: its handles and locks are released; its writes, and faults of later calls, remain."""
        for opened in self._opened.values():
            opened.file.locked = False
        self._opened.clear()
        self._halted = False

    def crash(self) -> None:
        """Cut the power: as `kill`, and every change that was not synced is kept, lost or torn at random."""
        self.kill()
        self._tree.crash(self._rng)

    def flip_bit(self, path: str, bit: int) -> None:
        """Damage one bit of a file; bit 0 is the lowest of the first byte."""
        self._tree.file(path).flip(bit)

    def set_free_bytes(self, free_bytes: int | None) -> None:
        """Limit the free space: a write beyond it is cut short, the next fails with ENOSPC. None: no limit."""
        self._capacity = None if free_bytes is None else free_bytes + self._tree.used_bytes()

    def set_read_only(self, on: bool = True) -> None:
        """Fail every change with EROFS, or stop doing so."""
        self._readonly = on

    def copy(self) -> "SimulatedFiles":
        """An independent copy of everything, including open handles and the random generator."""
        return copy.deepcopy(self)

    def content(self, path: str) -> bytes:
        """The bytes of a file as a process reads them."""
        return bytes(self._tree.file(path).seen)

    def contents(self) -> dict[str, bytes]:
        """The bytes of every file by path. A directory has a path that ends with a slash, and no bytes."""
        return {path: bytes(node.seen) if isinstance(node, SimulatedFile) else b"" for path, node in self._tree.walk()}

    def put_file(self, path: str, data: bytes) -> None:
        """Create or replace a file with these bytes, synced. Not affected by faults."""
        self._tree.make_directory("/".join(names_of(path)[:-1]))
        file = self._tree.make_file(path)
        file.change(Truncate(0))
        file.change(Write(0, data))
        file.sync()
        self._tree.sync_names()

    # -- Files ---------------------------------------------------------------------------------------

    def open(self, path: str, mode: Mode) -> int:
        if mode == "read":
            return self._call("open", path, lambda: self._register(path, self._tree.file(path), mode))
        return self._call("open", path, lambda: self._register(path, self._make_file(path), mode), changes=True)

    def close(self, handle: int) -> None:
        if self._halted:  # a close in a `finally` must not hide the Halt
            return
        opened = self._opened_file(handle)
        if opened.mode == "lock":
            opened.file.locked = False
        del self._opened[handle]

    def write(self, handle: int, parts: Sequence[Buffer]) -> int:
        opened = self._opened_file(handle, "append")
        return self._write("write", opened, len(opened.file.seen), b"".join(parts))

    def pwrite(self, handle: int, data: Buffer, position: int) -> int:
        return self._write("pwrite", self._opened_file(handle, "update", "private", "lock"), position, bytes(data))

    def pread(self, handle: int, size: int, position: int) -> bytes:
        opened = self._opened_file(handle)
        return self._call("pread", opened.path, lambda: bytes(opened.file.seen[position : position + size]))

    def truncate(self, handle: int, size: int) -> None:
        opened = self._opened_file(handle, "append", "update", "private", "lock")
        self._call("truncate", opened.path, lambda: opened.file.change(Truncate(size)), changes=True)

    def size(self, handle: int) -> int:
        return len(self._opened_file(handle).file.seen)

    def sync(self, handle: int) -> None:
        opened = self._opened_file(handle)
        try:
            self._call("sync", opened.path, opened.file.sync)
        except OSError:
            opened.file.forget()
            raise

    def sync_directory(self, path: str) -> None:
        """After a failure a later call syncs the names; unlike the changes of a file they are not lost."""
        self._call("sync_directory", path, lambda: self._tree.directory(path).sync())

    def exists(self, path: str) -> bool:
        self._check_not_halted()
        return self._tree.find(path) is not None

    def list(self, path: str) -> "list[str]":
        return self._call("list", path, lambda: sorted(self._tree.directory(path).seen))

    def make_directory(self, path: str) -> None:
        missing = not isinstance(self._tree.find(path), SimulatedDirectory)
        self._call("make_directory", path, lambda: self._tree.make_directory(path), changes=missing)

    def rename(self, source: str, target: str) -> None:
        if names_of(source)[:-1] != names_of(target)[:-1]:
            raise ValueError(f"{source} and {target} are in different directories; a simulated rename cannot move between directories")
        self._call("rename", f"{source} to {target}", lambda: self._tree.rename(source, target), changes=True)

    def remove(self, path: str) -> None:
        self._call("remove", path, lambda: self._tree.remove(path), changes=True)

    def remove_directory(self, path: str) -> None:
        self._call("remove_directory", path, lambda: self._tree.remove_directory(path), changes=True)

    def lock(self, path: str) -> int | None:
        return self._call("lock", path, lambda: self._lock(path), changes=True)

    def unlock(self, handle: int) -> None:
        self.close(handle)

    def free_bytes(self, path: str) -> int:
        self._check_not_halted()
        return self._free()

    def filesystem(self, path: str) -> str:
        return self.filesystem_type

    # -- effects and faults of calls -----------------------------------------------------------------

    def _check_not_halted(self) -> None:
        if self._halted:
            raise Halt(f"the process ended at call {self.calls}")

    def _next_fault(self, call: str, subject: str) -> Fault | None:
        self._check_not_halted()
        self.calls += 1
        fault = self._faults.pop(self.calls, None)
        self.trace.append(f"{self.calls} {call} {subject}" + (f" [{fault}]" if fault else ""))
        return fault

    def _call(self, call: str, path: str, effect: Callable[[], T], *, changes: bool = False) -> T:
        fault = self._next_fault(call, path)
        if isinstance(fault, int):
            raise error(fault, path)
        if changes:
            self._refuse_readonly(path)
        if fault in ("halt", "interrupt"):
            self._halt_or_interrupt(effect, fault)
        return effect()

    def _halt_or_interrupt(self, effect: Callable[[], T], fault: Fault) -> None:
        if self._rng.random() < 0.5:
            with contextlib.suppress(OSError):
                effect()
        if fault == "interrupt":
            raise KeyboardInterrupt
        self._halted = True
        self._check_not_halted()

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
        self._check_not_halted()
        return size

    def _refuse_readonly(self, path: str) -> None:
        if self._readonly:
            raise error(errno.EROFS, path)

    # -- space and handles ---------------------------------------------------------------------------

    def _free(self) -> int:
        return UNLIMITED_BYTES if self._capacity is None else max(0, self._capacity - self._tree.used_bytes())

    def _fitting(self, file: SimulatedFile, position: int, size: int) -> int:
        """How many bytes of a write fit into the free space; overwritten bytes need none."""
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
        """Return a new handle: the lowest free one, as in a system, so that tests find uses of a closed handle."""
        handle = next(number for number in count(FIRST_HANDLE) if number not in self._opened)
        self._opened[handle] = _Opened(path, file, mode)
        return handle

    def _opened_file(self, handle: int, *modes: str) -> _Opened:
        self._check_not_halted()
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
