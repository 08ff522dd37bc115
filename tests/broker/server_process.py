"""A process that serves a directory over HTTP, for tests that kill it.

Owns: `ServerProcess`.
"""

import subprocess
import sys
from pathlib import Path
from types import TracebackType

PROGRAM = """
import sys
import penstock
from penstock.server.http_server import HttpServer, listen
listeners = [listen("127.0.0.1", int(sys.argv[2]))]
with penstock.open(sys.argv[1]) as broker:
    server = HttpServer(broker.home, listeners)
    print(server.url, flush=True)
    server.run()
"""


class ServerProcess:
    """A server of a directory, in a process of its own. `restart` starts it again on the same port."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = str(directory)
        self.url = ""
        self._start(0)

    def _start(self, port: int) -> None:
        command = [sys.executable, "-c", PROGRAM, self._directory, str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("http://")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def restart(self) -> None:
        """Start it on the port that it had."""
        self._start(int(self.url.rpartition(":")[2]))

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
