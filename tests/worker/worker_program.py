"""A program with a worker, to which tests send signals.

    python -m tests.worker.worker_program DIRECTORY MODE

It prints one line for each event: "ready", "begin ID ATTEMPTS", "end ID", "draining", "drained", "over". Handlers that
wait end when a line comes on stdin.
Modes: wait (two threads), quick (one), children (one process).
"""

import logging
import os
import signal
import sys
import threading

import penstock
from penstock import Item
from penstock.worker.settings import Hooks
from penstock.worker.worker import Worker

go = threading.Event()


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def wait(item: Item) -> None:
    say("begin", item.id, item.attempts)
    go.wait()
    say("end", item.id)


def quick(item: Item) -> None:
    say("begin", item.id, item.attempts)
    say("end", item.id)


def endless(item: Item) -> None:
    say("begin", item.id, os.getpid())
    threading.Event().wait()


def listen() -> None:
    sys.stdin.readline()
    go.set()


class DrainReporter(logging.Handler):
    """Prints "draining" when the worker begins to drain."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().endswith("waits for those that run"):
            say("draining")


def main() -> None:
    directory, mode = sys.argv[1:]
    log = logging.getLogger("penstock.worker")
    log.setLevel(logging.INFO)
    log.addHandler(DrainReporter())
    with penstock.open(directory, durability="os") as broker:
        queue = broker.create_queue("orders", lease_timeout=1, exist_ok=True)
        hooks = Hooks(started=lambda item: None, drained=lambda: say("drained"))
        workers = {
            "wait": lambda: Worker(queue, wait, concurrency=2, hooks=hooks),
            "quick": lambda: Worker(queue, quick, concurrency=2),
            "children": lambda: Worker(queue, endless, processes=1, hooks=hooks),
        }
        threading.Thread(target=listen, daemon=True).start()
        say("ready")
        workers[mode]().run()
        for number in (signal.SIGTERM, signal.SIGINT):  # a test may send one more: it is not for the end of the program
            signal.signal(number, signal.SIG_IGN)
    say("over")


if __name__ == "__main__":
    main()
