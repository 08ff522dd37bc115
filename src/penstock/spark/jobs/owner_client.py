"""The owner of a broker's directory, asked to do something: this process, when nobody else is; else whoever is, through the inbox.

Owns: `OwnerClient`. Either way the operation goes through the inbox, so there is one way in which it is done.
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

LOOK_SECONDS = 0.02
OPEN_AGAIN = 1 * SECOND
"""An owner may end while it is waited for: then this process takes over."""


class OwnerClient:
    """Whoever owns a directory, as long as the block lasts."""

    def __init__(self, target: BrokerRoots, timeout: float) -> None:
        self._target = target
        self._timeout = int(timeout * SECOND)
        self._clock = SystemClock()
        self._broker: Broker | None = None
        self._tried = 0
        """When it was last tried to open the broker."""
        self._home: Home
        self._incarnations: dict[str, int] = {}

    def __enter__(self) -> "OwnerClient":
        self._open()
        with ExitStack() as stack:
            stack.callback(self._close)
            self._home = stack.enter_context(closing(open_home(self._target, timeout=self._timeout, meanwhile=self._take_over)))
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
        """Have it done, and give what came of it."""
        return self._home.call(operation)

    def wait_transfers(self) -> None:
        """Where this process is the owner: let what was sent arrive before it closes, as far as that comes soon."""
        deadline, pause = self._clock.read().elapsed + self._timeout, threading.Event()
        while self._broker is not None and self._clock.read().elapsed < deadline:
            if not any(self._broker.queue(name).stats().transfers for name in self._incarnations):
                return
            pause.wait(LOOK_SECONDS)

    def _take_over(self) -> None:
        if self._broker is None and self._clock.read().elapsed - self._tried >= OPEN_AGAIN:
            self._open()

    def _open(self) -> None:
        self._tried = self._clock.read().elapsed
        try:
            self._broker = open_broker(self._target[0], roots=list(self._target[1:]))
        except BrokerLocked:
            self._broker = None
