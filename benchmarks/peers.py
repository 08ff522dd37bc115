"""Measures two other embedded queues with their best settings: put, get and acknowledge 100-byte payloads.

Durable: `synchronous=FULL`, so that an acknowledged item survives a power failure, and 1,000 items per transaction if
the queue has transactions. Single: one item per call, `synchronous=OFF`. They are measured with fewer items than
Penstock, because both become slower with depth.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import litequeue
import persistqueue

ITEMS = 1_000
PEERS = ("litequeue", "persist_queue")
LEVELS = {"durable": "FULL", "single": "OFF"}
"""Kind of measurement → SQLite's `synchronous`."""

Rate = Callable[[int, Callable[[], object]], float]


def measure(root: Path, found: dict[str, list[float]], rate: Rate, kinds: Sequence[str] = tuple(LEVELS)) -> None:
    payloads = [os.urandom(50).hex() for _ in range(ITEMS)]  # litequeue takes text
    for kind in kinds:
        _litequeue(root, found, rate, payloads, kind)
        _persist_queue(root, found, rate, payloads, kind)


def _litequeue(root: Path, found: dict[str, list[float]], rate: Rate, payloads: list[str], kind: str) -> None:
    path = root / f"lite-{kind}.db"
    queue = litequeue.LiteQueue(path)
    queue.conn.execute(f"PRAGMA synchronous={LEVELS[kind]}")

    def put() -> None:
        for payload in payloads:
            queue.put(payload)

    def take() -> None:
        for _ in payloads:
            message = queue.pop()
            queue.done(message.message_id)

    def in_one(work: Callable[[], None]) -> None:
        with queue.transaction(mode="IMMEDIATE"):
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


def _persist_queue(root: Path, found: dict[str, list[float]], rate: Rate, payloads: list[str], kind: str) -> None:
    directory = root / f"persist-{kind}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        queue = persistqueue.SQLiteAckQueue(str(directory), multithreading=False, auto_commit=True)
    connections: set[Any] = {queue._putter, queue._getter}
    for connection in connections:
        connection.execute(f"PRAGMA synchronous={LEVELS[kind]}")

    def put() -> None:
        for payload in payloads:
            queue.put(payload)

    def take() -> None:
        for _ in payloads:
            queue.ack(queue.get())

    found[f"persist_queue_{kind}_produce_per_s"].append(rate(ITEMS, put))
    found[f"persist_queue_{kind}_consume_per_s"].append(rate(ITEMS, take))
    queue.close()
    for left in directory.iterdir():
        left.unlink()
    directory.rmdir()


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
