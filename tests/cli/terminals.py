"""Commands in a terminal of their own.

Owns: `Terminal`, a pseudo-terminal with one command in it: what is typed is echoed, and Ctrl-C is a signal to it.
"""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PATIENCE = 60.0
"""Seconds that a command may take in all."""
_TOKEN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+")


class Terminal:
    """The terminal of a command."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._deadline = time.monotonic() + PATIENCE
        self._seen = 0
        self.screen = ""
        """Everything that was written, with the echo of what was typed."""

    def wait_for(self, text: str) -> None:
        """Wait until a text is written after everything that was waited for before."""
        while (found := self.screen.find(text, self._seen)) < 0:
            assert self._read(), f"it has ended: {self.screen!r}"
        self._seen = found + len(text)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C; waits for the echo."""
        self.type("\x03")
        self.wait_for("^C")

    def end(self) -> int:
        """Wait for the end of the command; gives its exit code."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def lines(self) -> list[str]:
        """The lines that a person sees now; the last one is that of the cursor."""
        rows, row, column = [""], 0, 0
        for token in _TOKEN.findall(self.screen):
            if token == "\n":
                row += 1
                rows += [""] * (row + 1 - len(rows))
            elif token == "\r":
                column = 0
            elif token == "\x1b[1A":
                row -= 1
            elif token == "\x1b[2K":
                rows[row] = ""
            elif not token.startswith("\x1b"):
                rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
                column += len(token)
        return rows[: row + 1]

    def _read(self) -> bool:
        if not select.select([self._descriptor], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
            raise AssertionError(f"it takes too long: {self.screen!r}")
        try:
            found = os.read(self._descriptor, 65536)
        except OSError:  # no process has it open any more
            return False
        self.screen += found.decode(errors="replace")
        return bool(found)


@contextmanager
def terminal(*args: str) -> Iterator[Terminal]:
    """Run a command of the command line in a terminal; it is killed at the end of the block."""
    main, other = os.openpty()
    environment = {**os.environ, "PENSTOCK_BROKER": "", "TERM": "xterm", "COLUMNS": "200"}
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", _IN_TERMINAL, *args],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, other, 0), (os.POSIX_SPAWN_CLOSE, main), (os.POSIX_SPAWN_CLOSE, other)],
        setsid=True,
    )
    os.close(other)
    try:
        yield Terminal(pid, main)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(main)


_IN_TERMINAL = """
import os, sys
os.login_tty(os.dup(0))
os.execv(sys.executable, [sys.executable, "-m", "penstock.cli", *sys.argv[1:]])
"""
