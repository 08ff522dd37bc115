"""Calls operations of a broker's owner: another process, or this one if the broker has no owner.

Owns: `OwnerClient`. In both cases the operation goes through the directory's inbox, so there is one code path.
"""

import threading
from contextlib import ExitStack, closing
from types import TracebackType

from penstock.api._sync.broker import Broker
from penstock.api._sync.broker import open as open_broker
from penstock.operations import A, FindQueue, Home, Operation
from penstock.spark.broker_access import BrokerRoots, open_home
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import BrokerLocked

POLL_SECONDS = 0.02
OPEN_AGAIN = 1 * SECOND
"""How often to try to open the broker: its owner may end while this process waits, which then becomes the owner."""


class OwnerClient:
    """A context manager; in its block, operations are done by the broker's owner."""

    def __init__(self, roots: BrokerRoots, timeout: float) -> None:
        self._roots = roots
        self._timeout = int(timeout * SECOND)
        self._clock = SystemClock()
        self._broker: Broker | None = None
        self._tried = 0
        """When this process last tried to open the broker."""
        self._home: Home
        self._incarnations: dict[str, int] = {}

    def __enter__(self) -> "OwnerClient":
        self._open()
        with ExitStack() as stack:
            stack.callback(self._close)
            self._home = stack.enter_context(closing(open_home(self._roots, timeout=self._timeout, meanwhile=self._take_over)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _close(self) -> None:
        if self._broker is not None:
            self._broker.close()

    def find(self, queue: str) -> int:
        """The incarnation of the queue of that name."""
        if queue not in self._incarnations:
            self._incarnations[queue] = self._home.call(FindQueue(name=queue)).incarnation
        return self._incarnations[queue]

    def call(self, operation: Operation[A]) -> A:
        """Call an operation and give its answer."""
        return self._home.call(operation)

    def wait_transfers(self) -> None:
        """If this process is the owner, wait up to the timeout until transfers have arrived."""
        deadline, pause = self._clock.read().elapsed + self._timeout, threading.Event()
        while self._broker is not None and self._clock.read().elapsed < deadline:
            if not any(self._broker.queue(name).stats().transfers for name in self._incarnations):
                return
            pause.wait(POLL_SECONDS)

    def _take_over(self) -> None:
        if self._broker is None and self._clock.read().elapsed - self._tried >= OPEN_AGAIN:
            self._open()

    def _open(self) -> None:
        self._tried = self._clock.read().elapsed
        try:
            self._broker = open_broker(self._roots[0], roots=list(self._roots[1:]))
        except BrokerLocked:
            self._broker = None
