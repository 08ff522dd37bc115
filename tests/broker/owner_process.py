"""A second process that has a directory open, for tests of many processes.

Owns: `BrokerProcess`: a Python process that opens a directory and then evaluates what it is sent, line by line.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = """
import json, os, sys
import penstock
directory, options = sys.argv[1], json.loads(sys.argv[2])
broker = penstock.open(directory, **options)
print(json.dumps(os.getpid()), flush=True)
for line in sys.stdin:
    try:
        answer = eval(line)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer, default=str), flush=True)
broker.close()
"""


class BrokerProcess:
    """A process with `broker` open. `ask` evaluates an expression there."""

    def __init__(self, directory: Path | str, **options: Any) -> None:
        command = [sys.executable, "-c", PROGRAM, str(directory), json.dumps(options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = int(self._answer())
        """The process has opened the directory."""

    def ask(self, expression: str) -> Any:
        self.begin(expression)
        return self._answer()

    def begin(self, expression: str) -> None:
        """Ask without waiting for the answer; `answer` gives it."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Let it close its broker and end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(60)
        self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self) -> "BrokerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and self.process.poll() is None:
            self.process.kill()
        self.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"process {self.process.pid} has ended with {self.process.wait()}")
        return json.loads(line)
