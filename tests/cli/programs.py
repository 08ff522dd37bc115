"""Other processes beside the commands under test.

Owns: `Program`, a child process with pipes that is killed at the end of the test, and what such programs run.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Timer

PATIENCE = 60.0
"""Seconds after which a program is killed, so that no test waits for ever."""

OPEN = """
import sys, penstock
broker = penstock.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
broker.close()
"""
"""Has the broker open until it gets a line."""

OPEN_EXCLUSIVELY = OPEN.replace("(sys.argv[1])", "(sys.argv[1], exclusive=True)")

LEASE = """
import sys, penstock
broker = penstock.open(sys.argv[1], own=False)
print("ready", flush=True)
broker.queue("orders").lease(wait=60)
"""
"""Waits for an item as a client."""

DIE_IN_TAKE_OVER = """
import logging, os, signal, sys, penstock
from penstock.logs.files.filesystem import SystemFiles

logging.basicConfig(stream=sys.stdout, format="%(message)s")

def pwrite(handle, data, offset):
    written = os.pwrite(handle, data, offset)
    if b'"secret": "' in data and b'"unfinished": [' in data:  # it begins to open the broker
        os.kill(os.getpid(), signal.SIGKILL)
    return written

SystemFiles.pwrite = staticmethod(pwrite)
broker = penstock.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(broker.queue("orders").produce("survived"), flush=True)
"""
"""A client that is killed while it takes over; when it gets a line, it produces an item."""


class Program:
    """A child process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    def line(self) -> str:
        """The next line of its output; "" when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def note(self) -> str:
        """The next line that it prints to stderr."""
        assert self._process.stderr is not None
        return self._process.stderr.readline().rstrip("\n")

    def write_line(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: the exit code, and the rest of its output and of its errors."""
        out, err = self._process.communicate()
        return self._process.returncode, out, err


@contextmanager
def running(command: Sequence[str]) -> Iterator[Program]:
    """Run a command in a new process, which is killed at the end of the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "PENSTOCK_BROKER": ""}) as process:
        watchdog = Timer(PATIENCE, process.kill)
        watchdog.start()
        try:
            yield Program(process)
        finally:
            watchdog.cancel()
            process.kill()


@contextmanager
def python(code: str, directory: Path) -> Iterator[Program]:
    """Run a program that prints "ready" when it has opened the directory."""
    with running([sys.executable, "-c", code, str(directory)]) as program:
        said = program.line()
        assert said == "ready", (said, program.end())
        yield program


def penstock(*args: str) -> AbstractContextManager[Program]:
    """Run a command of the command line."""
    return running([sys.executable, "-m", "penstock.cli", *args])


@contextmanager
def stopped(program: Program) -> Iterator[None]:
    """Freeze a program for a while."""
    program.signal(signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
        yield
    finally:
        program.signal(signal.SIGCONT)
