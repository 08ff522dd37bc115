"""A directory that is only read, always as it is published now.

Owns: `LiveSnapshot`, the home of `penstock.open(…, read_only=True)`. It reads the new records before each query, takes
no lock, writes nothing, and needs no owner. Threads may share it. A forked child, or a process that gets a pickled one,
opens its own at the first use.
"""

import logging
import os
import threading
import weakref
from typing import Any

from penstock.broker.snapshot import Snapshot
from penstock.logs.backends import Files, Target, parse_roots
from penstock.logs.log import ReadableLog
from penstock.logs.store import Staging
from penstock.operations import A, AnswerCallback, AwaitItems, Cancel, FindImports, FindPublished, LeaseDoubt, Operation
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import InvalidRequest, PenstockError, broker_closed_error, caused_by_bug
from penstock.words.threads import InterruptSafePool

_log = logging.getLogger("penstock")
REFRESH_SECONDS = 0.05
"""How often new items are looked for while a call waits for them."""
THREADS = 4


class LiveSnapshot:
    """The queues of a directory, as they are published now."""

    def __init__(self, target: Target, files: Files | None = None, clock: Clock | None = None) -> None:
        """It is opened at the first use."""
        self.clock: Clock = clock or SystemClock()
        self._opened_with: tuple[Target, Files | None, Clock | None] = parse_roots(target), files, clock
        self._closed = False
        self.abandon_after_fork()
        _snapshots.add(self)

    @classmethod
    def open(cls, target: Target, *, files: Files | None = None, clock: Clock | None = None) -> "LiveSnapshot":
        opened = cls(target, files, clock)
        with opened._reading:
            opened._open()
        return opened

    def abandon_after_fork(self) -> None:
        """In a forked child: leave the parent's files, threads and lock alone. Another thread may hold the lock."""
        self._snapshot: Snapshot | None = None
        self._reading = threading.RLock()
        self._closing = threading.RLock()
        self._pool = InterruptSafePool(THREADS)

    def _open(self) -> Snapshot:
        """The snapshot, opened if it is not; the caller holds `_reading`."""
        if self._closed:
            raise broker_closed_error()
        if self._snapshot is None:
            target, files, _ = self._opened_with
            self._snapshot = Snapshot.open(target, files=files, clock=self.clock)
        return self._snapshot

    def call(self, operation: Operation[A], /) -> A:
        deadline = self._deadline(operation)
        while _is_awaited(operation, answer := self._answer(operation)) and self.clock.read().elapsed < deadline:
            threading.Event().wait(REFRESH_SECONDS)
        return answer

    def _deadline(self, operation: Operation[Any]) -> int:
        return self.clock.read().elapsed + (operation.wait if isinstance(operation, AwaitItems) else 0)

    def _answer(self, operation: Operation[A]) -> A:
        answer: Any = self._refreshed(operation)
        # A write may have been adopted between reading the catalog and the inbox. The second answer has it then; it may
        # itself lack a write that the first one has.
        if answer == "unknown":
            answer = self._refreshed(operation)
        elif isinstance(operation, FindImports):
            again = self._refreshed(operation)
            answer = {source: max(answer.get(source, 0), again.get(source, 0)) for source in {**answer, **again}}
        elif isinstance(operation, FindPublished):
            (highest, contents), (highest_again, more) = answer, self._refreshed(operation)
            answer = max(highest, highest_again), sorted({one.number: one for one in [*contents, *more]}.values())
        found: A = answer
        return found

    def _refreshed(self, operation: Operation[A]) -> A:
        with self._reading:
            snapshot = self._open()
            snapshot.refresh()
            return snapshot.call(operation)

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        if self._closed:
            raise broker_closed_error()
        wanted = [done] if done is not None else []
        deadline = self._deadline(operation)

        def run() -> None:
            try:
                answer: Any = self._answer(operation)
                if _is_awaited(operation, answer) and wanted and not self._closed and self.clock.read().elapsed < deadline:
                    threading.Event().wait(REFRESH_SECONDS)
                    self._pool.submit(run)  # behind the others: waiting calls must not take all threads
                    return
            except PenstockError as error:
                answer = error
            except Exception as error:  # a bug of Penstock: the caller still gets an answer
                _log.exception("%s went wrong", type(operation).__name__)
                answer = caused_by_bug(error)
            for callback in wanted:
                callback(answer)

        self._pool.submit(run)
        return wanted.clear

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: LeaseDoubt | None = None, /) -> None:
        with self._reading:
            self._open().auto_extend(queue, partition, lease, seconds, doubt)

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        """Nothing is extended here."""

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        with self._reading:
            return self._open().log(queue, partition)

    def staging(self) -> Staging:
        with self._reading:
            return self._open().staging()

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._pool.close()
                with self._reading:
                    if self._snapshot is not None:
                        self._snapshot.close()

    def __reduce__(self) -> tuple[type["LiveSnapshot"], tuple[Target]]:
        target, files, clock = self._opened_with
        if files is not None or clock is not None:
            raise InvalidRequest("a broker with a clock or files of its own cannot be sent to another process; open one there")
        return LiveSnapshot, (target,)

    def __repr__(self) -> str:
        return f"LiveSnapshot({self._snapshot!r})"


def _is_awaited(operation: Operation[Any], answer: object) -> bool:
    """Whether an operation waits for items, and there are none yet."""
    return isinstance(operation, AwaitItems) and not answer


_snapshots: "weakref.WeakSet[LiveSnapshot]" = weakref.WeakSet()


def _after_fork() -> None:
    for snapshot in list(_snapshots):
        snapshot.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork)
