"""The home of a broker behind a Penstock server: `penstock.open("http://host:port")`.

Owns: `HttpBroker` and `open_http`. It has the verbs and errors of every home. The thread and the connections of a
process are its `HttpClient`; a forked child makes its own at the first use, with new sessions, and so does a process
that gets a pickled broker. The pickle has the address, the options and the API key: treat it like the key.
Logs and staged writes are files of the server's machine, which this home does not reach.
"""

import os
import threading
import weakref
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn

from penstock.broker.http_client import HttpCall, HttpClient
from penstock.logs.log import ReadableLog
from penstock.logs.store import Staging
from penstock.operations import A, AnswerCallback, Cancel, LeaseDoubt, Operation, PublishWrite
from penstock.wire.http_address import HttpAddress, HttpOptions
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import InvalidRequest, PenstockError, broker_closed_error


class HttpBroker:
    """A broker that a server has open."""

    def __init__(self, address: HttpAddress, options: HttpOptions) -> None:
        """options: checked ones. Nothing is sent before the first use."""
        self.clock: Clock = SystemClock()
        self._address = address
        self._options = options
        self._client: HttpClient | None = None
        self._opening = threading.RLock()
        self._closed = False
        _brokers.add(self)

    # -- operations ----------------------------------------------------------------------------------

    def call(self, operation: Operation[A], /) -> A:
        client = self._running()
        outcomes: SimpleQueue[Any] = SimpleQueue()
        answer: A = self._wait(client, client.call_of(operation, outcomes.put), outcomes)
        return answer

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """Does not wait. `done` is called by the thread that reads all answers, and must not wait either."""
        if isinstance(operation, PublishWrite):
            self._refuse_files()
        client = self._running()
        call = client.call_of(operation, done)
        client.enter(call)
        return lambda: client.cancel(call)

    def _wait(self, client: HttpClient, call: HttpCall, outcomes: "SimpleQueue[Any]") -> Any:
        """Start a call and wait for its outcome. An interrupt cancels it."""
        if isinstance(call.operation, PublishWrite):
            self._refuse_files()
        if client.is_own_thread:
            raise InvalidRequest("called by the thread that reads the answers, from a callback of submit; use submit there")
        try:
            client.enter(call)
            outcome = outcomes.get()
        except BaseException:
            client.cancel(call)
            raise
        if isinstance(outcome, PenstockError):
            raise outcome.with_traceback(None)
        return outcome

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: LeaseDoubt | None = None, /) -> None:
        self._running().auto_extend((queue, partition, lease), seconds, doubt)

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        client = self._client  # another thread may close this broker
        if client is not None:
            client.stop_extending((queue, partition, lease))

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        self._refuse_files()

    def staging(self) -> Staging:
        self._refuse_files()

    def _refuse_files(self) -> NoReturn:
        raise InvalidRequest(
            f"log files and staged writes, which Spark uses, are not reached through {self._address.url}; "
            "run this where the server's directory is, and give its path"
        )

    # -- opening and closing -------------------------------------------------------------------------

    def check(self, wait: int) -> None:
        """Raise unless the server answers this client. wait: how long to try while it does not answer at all."""
        client = self._running()
        outcomes: SimpleQueue[Any] = SimpleQueue()
        self._wait(client, client.check_of(wait, outcomes.put), outcomes)

    def _running(self) -> HttpClient:
        """The client of this process, started by the first use."""
        client = self._client
        if client is None:
            with self._opening:
                if self._closed:
                    raise broker_closed_error()
                if self._client is None:
                    self._client = HttpClient(self._address, self._options, self.clock)
                client = self._client
        return client

    def close(self) -> None:
        with self._opening:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- other processes -----------------------------------------------------------------------------

    def abandon_after_fork(self) -> None:
        """In a forked child: leave the parent's connections alone. The next use makes its own."""
        self._opening = threading.RLock()
        client, self._client = self._client, None
        if client is not None:
            _abandoned.append(client)
            client.end_calls_after_fork()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (tuple(self._address), self._options)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._client is not None else "not open yet"
        return f"HttpBroker({self._address.url!r}, {state})"


def open_http(url: str, options: HttpOptions, wait: int) -> HttpBroker:
    """Open the broker of a server, which must answer within `wait` and accept this client."""
    address = HttpAddress.parse(url)
    broker = HttpBroker(address, options.checked(address))
    try:
        broker.check(wait)
    except BaseException:
        broker.close()
        raise
    return broker


# -- the brokers of this process ---------------------------------------------------------------------

_brokers: "weakref.WeakSet[HttpBroker]" = weakref.WeakSet()
_unpickled: dict[tuple[HttpAddress, HttpOptions], HttpBroker] = {}
"""Brokers that came from other processes. Queues of one broker, pickled one by one, share it here."""
_abandoned: list[HttpClient] = []
"""Clients of the parent process. They are kept: to free them would close what the parent uses."""


def _unpickle(address: tuple[Any, ...], options: HttpOptions) -> HttpBroker:
    """The broker of a server that another process uses. It stays open until it is closed or the process ends."""
    key = HttpAddress(*address), options
    found = _unpickled.get(key)
    if found is None or found.is_closed:
        found = _unpickled[key] = HttpBroker(*key)
    return found


def _after_fork() -> None:
    for broker in list(_brokers):
        with suppress(BaseException):  # no caller could handle it, and the other brokers must still be abandoned
            broker.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork)
