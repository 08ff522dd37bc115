"""The home of a process that reads a directory's files itself, and asks the owner only for changes.

Owns: `DirectoryClient`, the home of Spark's driver and tasks. It answers queries from what is published in the files,
and publishes a staged write by a rename, which the owner adopts later; neither needs an owner. Every other operation is
sent to the owner through its socket. The connection is made at the first such operation.
It never becomes the owner: Spark starts and kills such processes as it likes. If this process has the directory open
itself (broker/shared.py), that broker is used for changes. What only changes need is imported at the first one: most of
Spark's processes make none, and start sooner.
"""

import threading
from typing import Any

from penstock.broker.live_snapshot import LiveSnapshot
from penstock.logs.backends import Files, Target, open_read_only
from penstock.logs.log import ReadableLog
from penstock.logs.store import Staging
from penstock.operations import TIMEOUT, A, AnswerCallback, Cancel, Home, LeaseDoubt, Operation, PublishWrite, Query, submit_at_once
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import BrokerClosed


class DirectoryClient:
    """A broker's directory, from a process that does not own it."""

    def __init__(self, target: Target, timeout: int = TIMEOUT, files: Files | None = None) -> None:
        """timeout: how long the first change waits for an owner, which may be restarting. files: a replacement for the
        file system, for tests.
        """
        self.clock: Clock = SystemClock()
        self._target = target
        self._timeout = timeout
        self._store = open_read_only(target, files)
        self._published = LiveSnapshot(target, files)
        self._owner: Home | None = None
        self._opening = threading.Lock()
        self._closed = False

    def call(self, operation: Operation[A], /) -> A:
        """BrokerClosed when it is a change, and no process has the directory open."""
        if isinstance(operation, PublishWrite):
            from penstock.broker.inbox import publish_write

            self._check_open()
            published: A = publish_write(self._store.inbox, operation)  # type: ignore[assignment]
            return published
        return self._home_for(operation).call(operation)

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """The first change waits for the connection."""
        if isinstance(operation, PublishWrite):
            return submit_at_once(self.call, operation, done)
        return self._home_for(operation).submit(operation, done)

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: LeaseDoubt | None = None, /) -> None:
        self._connected().auto_extend(queue, partition, lease, seconds, doubt)

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        if self._owner is not None:
            self._owner.stop_extending(queue, partition, lease)

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        return self._published.log(queue, partition)

    def staging(self) -> Staging:
        return self._store.inbox

    def has_owner(self) -> bool:
        """Whether a process has the directory open now."""
        return self._store.owner() is not None

    def close(self) -> None:
        with self._opening:
            self._closed = True
        if self._owner is not None:
            self._owner.close()
        self._published.close()
        self._store.close()

    def _home_for(self, operation: Operation[Any]) -> Home:
        return self._published if isinstance(operation, Query) else self._connected()

    def _connected(self) -> Home:
        with self._opening:
            self._check_open()
            if self._owner is None:
                from penstock.broker.shared import SharedBroker, join_shared

                self._owner = join_shared(self._target) or SharedBroker(self._target, own=False, wait=self._timeout)
            return self._owner

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed("this client of the broker is closed; open it again")

    def __repr__(self) -> str:
        return f"DirectoryClient({self._store.name!r})"
