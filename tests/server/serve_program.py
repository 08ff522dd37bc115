"""A server in a process of its own: `python -m tests.server.serve_program DIRECTORY PORT`."""

import signal
import sys

import penstock
from penstock.server.http_server import HttpServer, listen


def main(directory: str, port: str) -> None:
    with penstock.open(directory, wait=20) as broker:
        server = HttpServer(broker.home, listen("127.0.0.1", int(port)))  # type: ignore[arg-type]
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
