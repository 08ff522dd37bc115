"""A directory that is only read, always as it is published now.

Owns: `LiveSnapshot`, the home of `penstock.open(…, read_only=True)`. It reads the new records before each query, takes
no lock, writes nothing, and needs no owner. Threads may share it.
"""

import threading
from typing import Any

from penstock.broker.snapshot import Snapshot
from penstock.logs.backends import Files, Target
from penstock.logs.log import ReadableLog
from penstock.logs.store import Staging
from penstock.operations import A, AnswerCallback, AwaitItems, Cancel, Operation
from penstock.words.clock import Clock
from penstock.words.errors import BrokerClosed, PenstockError
from penstock.words.threads import InterruptSafePool

REFRESH_SECONDS = 0.05
"""How often new items are looked for while a call waits for them."""
THREADS = 4


class LiveSnapshot:
    """The queues of a directory, as they are published now."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.clock = snapshot.clock
        self._snapshot = snapshot
        self._reading = threading.Lock()
        self._pool = InterruptSafePool(THREADS)
        self._closed = False

    @classmethod
    def open(cls, target: Target, *, files: Files | None = None, clock: Clock | None = None) -> "LiveSnapshot":
        return cls(Snapshot.open(target, files=files, clock=clock))

    def call(self, operation: Operation[A], /) -> A:
        deadline = self.clock.read().elapsed + (operation.wait if isinstance(operation, AwaitItems) else 0)
        while True:
            answer = self._refreshed(operation)
            if answer == "unknown":  # a write: it may have been adopted between reading the catalog and the inbox
                answer = self._refreshed(operation)
            if not isinstance(operation, AwaitItems) or answer or self.clock.read().elapsed >= deadline:
                return answer
            threading.Event().wait(REFRESH_SECONDS)

    def _refreshed(self, operation: Operation[A]) -> A:
        with self._reading:
            self._check_open()
            self._snapshot.refresh()
            return self._snapshot.call(operation)

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        self._check_open()
        wanted = [done] if done is not None else []

        def run() -> None:
            try:
                answer: Any = self.call(operation)
            except PenstockError as error:
                answer = error
            for callback in wanted:
                callback(answer)

        self._pool.submit(run)
        return wanted.clear

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, /) -> None:
        self._snapshot.auto_extend(queue, partition, lease, seconds)

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        """Nothing is extended here."""

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        self._check_open()
        return self._snapshot.log(queue, partition)

    def staging(self) -> Staging:
        return self._snapshot.staging()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.close()
            with self._reading:
                self._snapshot.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed("the broker is closed; open it again")

    def __repr__(self) -> str:
        return f"LiveSnapshot({self._snapshot!r})"
