"""Runs the application under uvicorn.

Owns: `HttpServer`.
"""

import asyncio
import socket

import uvicorn

from penstock.server.application import Application
from penstock.server.home_calls import ServedHome
from penstock.server.server_limits import ServerLimits


class HttpServer:
    """A server of a home, on a listening socket."""

    def __init__(self, home: ServedHome, listener: socket.socket, limits: ServerLimits | None = None) -> None:
        self._listener = listener
        limits = limits or ServerLimits()
        self._server = uvicorn.Server(
            uvicorn.Config(
                Application(home, limits),
                http="httptools",
                loop="uvloop",
                lifespan="on",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=round(limits.idle_seconds),
                backlog=1024,
            )
        )

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    def run(self) -> None:
        """Serve until `stop`."""
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._server._serve([self._listener]))

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address."""
    return socket.create_server((host, port), backlog=1024)
