"""A directory that is only looked at: through its owner while that answers, else as it is published.

Owns: `DirectoryView`, the home of commands that change nothing. The owner knows more than its files say: the newest
leases, who waits, which disk is slow. Without an owner, or if that does not answer (it is stopped, say), the queries
are answered by a snapshot. The view takes no lock that it keeps, writes nothing and never becomes the owner.
Single-threaded.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from penstock.broker.snapshot import Snapshot
from penstock.logs.backends import Target, directories, holder_of, open_read_only
from penstock.logs.log import ReadableLog
from penstock.logs.store import Staging
from penstock.operations import A, AnswerCallback, Cancel, LeaseDoubt, Operation, Query, submit_at_once
from penstock.wire import address
from penstock.wire.connection import ConnectionLost, SentCall, WireConnection
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import AccessDenied, InvalidRequest, PenstockError, broker_closed_error

PATIENCE = 2 * SECOND
"""How long the owner may take to answer a hello. It answers one at once, however slow its disks are."""
ASK_AGAIN = 5 * SECOND
"""How long an owner that did not answer is left alone."""
CONNECT_SECONDS = 0.01
ATTEMPTS = 3
"""How often a query is sent, if the connection is lost before the answer."""


class DirectoryView:
    """The queues of a directory, as its owner sees them now."""

    def __init__(
        self, target: Target, *, patience: int = PATIENCE, on_silent: Callable[[str], None] = lambda note: None, clock: Clock | None = None
    ) -> None:
        """on_silent: called with a note when there is an owner and the answers come from the files."""
        self.clock = clock or SystemClock()
        self._directory = directories(target)[0]
        self._store = open_read_only(target)
        self._patience = patience
        self._on_silent = on_silent
        self._connection: WireConnection | None = None
        self._ask_again_at = 0
        self._snapshot: Snapshot | None = None
        self._is_fresh = False
        """Whether the snapshot has been read since `refresh`."""
        self._closed = False

    # -- operations ----------------------------------------------------------------------------------

    def call(self, operation: Operation[A], /) -> A:
        if self._closed:
            raise broker_closed_error()
        if not isinstance(operation, Query):
            raise InvalidRequest(
                f"{self._directory} is only looked at, and {type(operation).__name__} is no query; open it with penstock.open"
            )
        for _ in range(ATTEMPTS):
            connection = self._connected()
            if connection is None:
                break
            sent = SentCall(type(operation))
            connection.send(operation, sent, self.clock.read().elapsed + self._patience)
            self._wait(connection, sent)
            if sent.error is not None:
                raise sent.error
            if sent.done:
                answer: A = sent.answer
                return answer
        found: A = self._published().call(operation)
        return found

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """`done` is called before this returns."""
        return submit_at_once(self.call, operation, done)

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: LeaseDoubt | None = None, /) -> None:
        raise InvalidRequest(f"{self._directory} is only looked at; open it with penstock.open to extend leases")

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        """Nothing is extended here."""

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        return self._published().log(queue, partition)

    def staging(self) -> Staging:
        return self._store.inbox

    @property
    def is_live(self) -> bool:
        """Whether the last query was answered by the owner."""
        return self._connection is not None

    def refresh(self) -> None:
        """Answer later queries with the present state."""
        self._is_fresh = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disconnect()
            (self._snapshot or self._store).close()

    # -- the owner -----------------------------------------------------------------------------------

    def _wait(self, connection: WireConnection, sent: SentCall) -> None:
        """Wait until the call is done or lost. It is given up when the owner does not answer a hello either."""
        while not sent.done:
            connection.wait(sent, self.clock.read().elapsed + self._patience)
            if sent.lost:
                self._disconnect()
                return
            if not sent.done:
                self._connection = None
                probe = self._connected()
                if probe is None:
                    connection.close()
                    return
                probe.close()
                self._connection = connection

    def _connected(self) -> WireConnection | None:
        """The connection to the owner; None when there is no owner, or it does not answer."""
        if self._connection is not None and not self._connection.lost:
            return self._connection
        self._disconnect()
        if self.clock.read().elapsed >= self._ask_again_at:
            self._connection = self._connect(self.clock.read().elapsed + self._patience)
        return self._connection

    def _connect(self, deadline: int) -> WireConnection | None:
        while True:
            try:
                holder = holder_of(self._directory)
            except AccessDenied:  # the lock file of another user: this one may read the logs only
                return None
            if holder is None or holder.exclusive:
                return None  # it was never opened, or its owner shares it with no other process
            try:
                if holder.secret:
                    return WireConnection(address.connect(self._directory, holder.socket), holder.secret, self.clock, deadline)
            except (OSError, ConnectionLost, AccessDenied):
                pass  # it has ended, another process has become the owner, or it is stopped
            except PenstockError as error:
                self._leave_alone(f"refuses this process ({error})")
                return None
            if not self._store.inbox.has_owner():
                return None
            if self.clock.read().elapsed >= deadline:
                self._leave_alone("does not answer")
                return None
            threading.Event().wait(CONNECT_SECONDS)

    def _leave_alone(self, why: str) -> None:
        with suppress(PenstockError):
            self._on_silent(
                f"{holder_of(self._directory) or 'another process'} owns {self._directory} and {why}; this is read from its files"
            )
        self._ask_again_at = self.clock.read().elapsed + ASK_AGAIN

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- the files -----------------------------------------------------------------------------------

    def _published(self) -> Snapshot:
        """The snapshot. It does not change between two calls of `refresh`."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self._store, self.clock)
        elif not self._is_fresh:
            self._snapshot.refresh()
        self._is_fresh = True
        return self._snapshot

    def __repr__(self) -> str:
        return f"DirectoryView({self._directory!r}, {'through its owner' if self.is_live else 'from its files'})"
