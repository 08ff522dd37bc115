"""Measures two other embedded queues with their best settings: put, get and acknowledge 100-byte payloads.

Durable: `synchronous=FULL`, so that an acknowledged item survives a power failure, and 1,000 items per transaction if
the queue has transactions. Single: one item per call, `synchronous=OFF`. They are measured with fewer items than
Penstock, because both become slower with depth.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litequeue
import persistqueue

ITEMS = 1_000
PEERS = ("litequeue", "persist_queue")

Rate = Callable[[int, Callable[[], object]], float]


def measure(root: Path, found: dict[str, list[float]], rate: Rate) -> None:
    payloads = [os.urandom(50).hex() for _ in range(ITEMS)]  # litequeue takes text
    _litequeue(root, found, rate, payloads)
    _persist_queue(root, found, rate, payloads)


def _litequeue(root: Path, found: dict[str, list[float]], rate: Rate, payloads: list[str]) -> None:
    for kind, level in (("durable", "FULL"), ("single", "OFF")):
        path = root / f"lite-{kind}.db"
        queue = litequeue.LiteQueue(path)
        queue.conn.execute(f"PRAGMA synchronous={level}")

        def put() -> None:
            for payload in payloads:
                queue.put(payload)  # noqa: B023 (called at once)

        def take() -> None:
            for _ in payloads:
                message = queue.pop()  # noqa: B023
                queue.done(message.message_id)  # noqa: B023

        def in_one(work: Callable[[], None]) -> None:
            with queue.transaction(mode="IMMEDIATE"):  # noqa: B023
                work()

        if kind == "durable":
            found["litequeue_durable_produce_per_s"].append(rate(ITEMS, lambda: in_one(put)))
            # `pop` begins its own transaction and cannot be batched
            found["litequeue_durable_consume_per_s"].append(rate(ITEMS, take))
        else:
            found["litequeue_single_produce_per_s"].append(rate(ITEMS, put))
            found["litequeue_single_consume_per_s"].append(rate(ITEMS, take))
        queue.conn.close()
        _remove(path)


def _persist_queue(root: Path, found: dict[str, list[float]], rate: Rate, payloads: list[str]) -> None:
    for kind, level in (("durable", "FULL"), ("single", "OFF")):
        directory = root / f"persist-{kind}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            queue = persistqueue.SQLiteAckQueue(str(directory), multithreading=False, auto_commit=True)
        connections: set[Any] = {queue._putter, queue._getter}
        for connection in connections:
            connection.execute(f"PRAGMA synchronous={level}")

        def put() -> None:
            for payload in payloads:
                queue.put(payload)  # noqa: B023

        def take() -> None:
            for _ in payloads:
                queue.ack(queue.get())  # noqa: B023

        found[f"persist_queue_{kind}_produce_per_s"].append(rate(ITEMS, put))
        found[f"persist_queue_{kind}_consume_per_s"].append(rate(ITEMS, take))
        queue.close()
        for left in directory.iterdir():
            left.unlink()
        directory.rmdir()


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
