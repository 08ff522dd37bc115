"""Real processes that have a directory open, for tests of processes that do not own it.

Owns: `OwnerProcess`.
"""

import signal
import subprocess
import sys
from types import TracebackType

PROGRAM = """
import sys
import penstock

with penstock.open(sys.argv[1]) as broker:
    queue = broker.create_queue("orders", exist_ok=True)
    if not queue.stats().produced:
        queue.produce_many([b"%d" % number for number in range(int(sys.argv[2]))])
    print("open", flush=True)
    sys.stdin.read()
"""


class OwnerProcess:
    """A process with the queue "orders" open. The first one on a directory owns it, the next takes over."""

    def __init__(self, directory: str, items: int = 0) -> None:
        command = [sys.executable, "-c", PROGRAM, directory, str(items)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "open\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._reap()

    def close(self) -> None:
        """Let it close the broker and end."""
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self._reap()

    def _reap(self) -> None:
        self.process.wait(60)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> "OwnerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
