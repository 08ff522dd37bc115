"""A directory that any number of processes use: one owns it, the others are its clients.

Owns: `SharedBroker`, the home of `penstock.open("data/")`, and `open_shared`. The first process that opens a directory
takes its lock, becomes the owner (broker/embedded.py) and serves the others through a socket (wire/). Every other
process is a client (broker/remote.py). When the owner ends, however it ends, one of the clients takes the lock and
becomes the owner; calls that were under way are repeated there. A process that is frozen keeps the lock: nobody takes
it away.
After MAX_UNFINISHED openings within a minute that did not finish, nobody takes over by itself: if opening the
directory kills a process (memory, say), it must not kill every one in turn.
A second `open` in the same process shares the home. A forked child opens its own at the first use. So does a process
that gets a pickled broker or queue, for which the directory and the options are sent.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.broker.embedded import EmbeddedBroker
from penstock.broker.remote import RemoteBroker
from penstock.logs.backends import FileStore, Target, directories, holder_of, holds_broker, open_directory, open_read_only, parse_roots
from penstock.logs.log import ReadableLog
from penstock.logs.store import Staging
from penstock.operations import A, AnswerCallback, Cancel, Home, LeaseDoubt, Operation, submit_each
from penstock.wire import address
from penstock.wire.connection import NO_ANSWER, ConnectionLost, WireConnection
from penstock.wire.socket_server import WireServer
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import (
    AccessDenied,
    BrokerClosed,
    BrokerLocked,
    CorruptLog,
    InvalidRequest,
    PenstockError,
    StorageFailed,
    broker_closed_error,
)
from penstock.words.threads import InterruptSafeThread

_log = logging.getLogger("penstock")
SECRET_BYTES = 16
MAX_UNFINISHED = 3
RETRY_SECONDS = 0.01
EXCLUSIVE_SECONDS = 0.05
HELLO_WITHIN = 5 * SECOND
"""How long a reconnecting client waits for the owner's answer to its hello, before it looks again who the owner is."""


class SharedBroker:
    """The broker of a directory, owned by this process or by another."""

    def __init__(self, target: Target, *, own: bool, wait: int, min_free_bytes: int = 0, now: bool = True, **options: Any) -> None:
        """own: whether this process may become the owner. wait: how long to wait for an owner that does not answer
        yet. now: False opens it at the first use. options: those of `open_directory`, for when this process is the
        owner.
        """
        self.clock: Clock = SystemClock()
        self.directory = directories(target)[0]
        self._target: Target = parse_roots(target)  # absolute: a forked child may change its directory before it opens its own
        self._own = own
        self._wait = wait
        self._min_free_bytes = min_free_bytes
        self._options = options
        self._owner: EmbeddedBroker | None = None
        self._server: WireServer | None = None
        self._socket_path = ""
        self._remote: RemoteBroker | None = None
        self._opening = threading.RLock()
        self._closed = False
        self._told_unfinished = False
        self._became_owner = threading.Event()
        if now:
            self.open()
        _shared.add(self)

    # -- operations ----------------------------------------------------------------------------------

    def call(self, operation: Operation[A], /) -> A:
        return (self._owner or self._home()).call(operation)

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        home = self._owner or self._remote
        return self._submit_when_open(operation, done) if home is None else home.submit(operation, done)

    def submit_all(self, submitted: Sequence[tuple[Operation[Any], AnswerCallback]], /) -> list[Cancel]:
        """Submit operations that came together. The owner runs the turns that they share in this thread."""
        owner = self._owner
        return submit_each(self.submit, submitted) if owner is None else owner.submit_all(submitted)

    def _submit_when_open(self, operation: Operation[Any], done: AnswerCallback | None) -> Cancel:
        """Open the broker in another thread, then submit: the caller may be an event loop, and must not wait."""
        cancelled = False
        cancels: list[Cancel] = []

        def open_and_submit() -> None:
            try:
                if not cancelled:
                    cancels.append(self._home().submit(operation, done))
            except PenstockError as error:
                if done is not None:
                    done(error)
            if cancelled:
                run_cancel()

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            run_cancel()

        def run_cancel() -> None:
            with suppress(IndexError):
                cancels.pop()()

        InterruptSafeThread(open_and_submit)
        return cancel

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: LeaseDoubt | None = None, /) -> None:
        (self._owner or self._home()).auto_extend(queue, partition, lease, seconds, doubt)

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        for home in (self._owner, self._remote):  # it may have become the owner since the lease was given
            if home is not None:
                home.stop_extending(queue, partition, lease)

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        return self._home().log(queue, partition)

    def staging(self) -> Staging:
        return self._home().staging()

    @property
    def is_owner(self) -> bool:
        return self._owner is not None

    def wait_until_owner(self, seconds: float | None = None) -> bool:
        """Wait until this process is the owner, at most so long; gives whether it is."""
        return self._became_owner.wait(seconds)

    def open(self) -> None:
        """Become the owner or connect to it, unless that was done. A directory that does not exist is created."""
        with self._opening:
            if self._owner is None and self._remote is None and not self._closed:
                self._connect_or_own(self.clock.read().elapsed + self._wait)

    def _home(self) -> Home:
        """The home that answers now. The first use after a fork connects, or makes this process the owner."""
        home = self._owner or self._remote
        if home is None:
            with self._opening:
                if self._closed:
                    raise broker_closed_error()
                if self._owner is None and self._remote is None and not os.path.isdir(self.directory):
                    # Never make a new broker where one was expected.
                    raise BrokerClosed(f"{self.directory} is not here; a broker can be used by processes of one machine only")
                self.open()
                home = self._owner or self._remote
        assert home is not None
        return home

    def close(self) -> None:
        with self._opening:
            if self._closed:
                return
            self._closed = True
        try:
            if self._remote is not None:
                self._remote.close()
        finally:
            self._end_ownership()

    def _end_ownership(self) -> None:
        """Close the broker if this process owns it. Its clients then find another owner."""
        with self._opening:
            owner, server = self._owner, self._server
            if server is not None:
                server.stop()  # first: its clients must not be told that the broker was closed
                self._server = None
            if owner is not None:
                owner.close()

    # -- becoming the owner or a client --------------------------------------------------------------

    def _connect_or_own(self, deadline: int) -> None:
        """Become the owner, or connect to it. Raises when neither is possible before the deadline (elapsed)."""
        while True:
            try:
                connection = self._own_or_connect(deadline)
                break
            except ConnectionLost as error:
                if self.clock.read().elapsed >= deadline:
                    raise self._not_reached(error) from None
                threading.Event().wait(RETRY_SECONDS)
        if connection is not None:
            self._remote = RemoteBroker(connection, self._reconnect, self.describe_owner, lambda: open_read_only(self._target), self.clock)

    def _own_or_connect(self, deadline: int, by_itself: bool = False) -> WireConnection | None:
        """Try once to become the owner (None), or to connect to it. ConnectionLost when neither is possible now.

        by_itself: it is a take-over that no user asked for.
        """
        failure: PenstockError | None = None
        if self._own:
            try:
                if self._try_to_own(by_itself):
                    return None
            except (CorruptLog, StorageFailed) as error:  # a newer owner may understand what this version does not
                failure = error
        try:
            return self._connect(deadline)
        except ConnectionLost:
            if failure is not None:
                raise failure from None
            raise

    def _try_to_own(self, by_itself: bool) -> bool:
        """Take the lock and open the broker; False when another process has the lock, or it is too dangerous."""
        if by_itself and not holds_broker(self.directory):  # never make a new one
            raise StorageFailed(f"{self.directory} is not here any more: it was moved or deleted; put it back, or end this process")
        try:
            store = open_directory(self._target, None, clock=self.clock, lock_attempts=1, exclusive=False, **self._options)
        except BrokerLocked:
            return False
        if by_itself and self._opening_is_dangerous(store.lock.holder.unfinished[:-1]):
            store.lock.withdraw()
            store.close()
            return False
        listener = None
        try:
            secret = os.urandom(SECRET_BYTES).hex()
            listener, self._socket_path = address.listen(self.directory)
            store.before_unlock = partial(address.unlink, self.directory, self._socket_path)  # only the lock's holder may
            store.lock.announce(secret, self._socket_path)
            # Clients connect from here on, and are answered when the broker is open.
            owner = self._open_owner(store)
        except BaseException as error:
            if listener is not None:
                listener.close()
            store.close()
            if isinstance(error, OSError):
                raise StorageFailed(f"the socket of {self.directory} cannot be made ({error}); open it with exclusive=True") from error
            raise
        self._server = WireServer(owner, listener, secret, directories(self._target)[1:])
        owner.list_clients = partial(self._server.clients, without_self=True)
        self._owner = owner
        self._became_owner.set()
        return True

    def _open_owner(self, store: FileStore) -> EmbeddedBroker:
        return EmbeddedBroker(
            store,
            clock=self.clock,
            entropy=self._options["entropy"],
            min_free_bytes=self._min_free_bytes,
            segment_bytes=self._options["segment_bytes"],
        )

    def _connect(self, deadline: int) -> WireConnection:
        """Connect to the owner. ConnectionLost when that is not possible now."""
        holder = holder_of(self.directory)
        if holder is None:
            raise ConnectionLost("it was never opened")
        if holder.exclusive:
            threading.Event().wait(EXCLUSIVE_SECONDS)  # the text may be that of a process that has just ended
            if holder_of(self.directory) == holder and self._is_locked():
                raise BrokerLocked(f"{self.directory} is in use by {holder}, which shares it with no other process; close that one first")
        if holder.exclusive or not holder.secret:
            raise ConnectionLost("it takes no clients yet")
        try:
            connection = WireConnection(address.connect(self.directory, holder.socket), holder.secret, self.clock, deadline)
            self._compare_roots(connection.owner.roots)
            if self._owner is None:
                _log.info("this process (%d) uses %s through its owner (%s)", os.getpid(), self.directory, holder)
            return connection
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        except AccessDenied:
            now = holder_of(self.directory)
            if now is not None and now.secret == holder.secret:
                raise
            raise ConnectionLost("the owner has changed") from None

    def _compare_roots(self, roots: Sequence[str]) -> None:
        """Never take over from an owner with other storage roots: their partitions would be missing."""
        if self._own and sorted(roots) != sorted(directories(self._target)[1:]):
            self._own = False
            _log.warning(
                "the owner of %s has the storage roots %s, and this process was given others; it will not take over from it",
                self.directory, roots,
            )  # fmt: skip

    def _reconnect(self) -> WireConnection | None:
        """After the connection was lost: take over if nobody owns the directory, or connect to the owner.

        When this process has become the owner, calls that were under way go through its own socket.
        """
        deadline = self.clock.read().elapsed + HELLO_WITHIN
        with self._opening:
            if self._closed:
                return None
            if self._owner is not None:
                return self._connect(deadline)
            connection = self._own_or_connect(deadline, by_itself=True)
        if connection is not None:
            return connection
        _log.info("this process (%d) now owns %s: the former owner has ended", os.getpid(), self.directory)
        return self._connect(deadline)

    def _opening_is_dangerous(self, unfinished: Sequence[int]) -> bool:
        """Whether so many openings have ended with their process that nobody should try it again by itself."""
        if len(unfinished) < MAX_UNFINISHED:
            self._told_unfinished = False
            return False
        if not self._told_unfinished:
            self._told_unfinished = True
            _log.error(
                "%d processes have ended while they opened %s; nobody takes it over by itself now. Find out why, then open it "
                "with `penstock own %s`",
                len(unfinished), self.directory, self.directory,
            )  # fmt: skip
        return True

    def describe_owner(self) -> str:
        """The owner in words, for messages."""
        with suppress(PenstockError):
            holder = holder_of(self.directory)
            if holder is not None and not self._is_locked():
                return f"the owner of {self.directory} has ended ({holder}) and nobody has taken over (start `penstock own`): it"
            if holder is not None:
                return f"the owner of {self.directory} ({holder})"
        return f"the owner of {self.directory}"

    def _not_reached(self, error: Exception) -> PenstockError:
        if not self._own and not self._is_locked():
            return BrokerClosed(
                f"no process has {self.directory} open, and this one may not own it (own=False); keep it open in some program "
                f"while this runs: `penstock own {self.directory}`, a worker, or penstock.open({self.directory!r})"
            )
        why = "" if str(error) == NO_ANSWER else f" ({error})"
        return BrokerLocked(
            f"{self.describe_owner()} does not answer{why}; wait longer (wait=…), or continue that process (kill -CONT) or end it"
        )

    def _is_locked(self) -> bool:
        try:
            return open_read_only(self._target).owner() is not None
        except InvalidRequest:  # there is no such directory
            return False

    # -- other processes -----------------------------------------------------------------------------

    def pickled(self) -> tuple[Target, dict[str, Any]]:
        """The target and the options that open this broker in another process."""
        return self._target, {"own": self._own, "wait": self._wait, "min_free_bytes": self._min_free_bytes, **self._options}

    def abandon_after_fork(self) -> None:
        """In a forked child: leave the parent's broker, socket and connection alone. The next use opens its own.

        Another thread may have been anywhere at the fork: nothing of the parent's is used, and no lock is waited for.
        """
        self._opening, self._became_owner = threading.RLock(), threading.Event()
        owner, server, remote = self._owner, self._server, self._remote
        self._owner = self._server = self._remote = None
        if server is not None:
            server.abandon()
        if remote is not None:
            remote.abandon()
        if owner is not None:
            owner.detach_after_fork()

    def __repr__(self) -> str:
        role = "owner" if self._owner is not None else "client" if self._remote is not None else "not open yet"
        state = "closed" if self._closed else role
        return f"SharedBroker({self.directory!r}, {state})"


class SharedHome:
    """One `open` of a shared directory. The last one to be closed in this process closes the broker."""

    def __init__(self, broker: SharedBroker, counted: bool = True) -> None:
        """counted: False is for a home that was pickled and does not keep the broker open."""
        self.broker = broker
        self._counted = counted
        self.clock = broker.clock
        self._closed = False
        self.closing = threading.RLock()
        """Held by the thread that closes it: another one that closes it meanwhile waits until it is closed."""
        _homes.add(self)

    def call(self, operation: Operation[A], /) -> A:
        if self._closed:
            raise broker_closed_error()
        return self.broker.call(operation)

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        if self._closed:
            raise broker_closed_error()
        return self.broker.submit(operation, done)

    def submit_all(self, submitted: Sequence[tuple[Operation[Any], AnswerCallback]], /) -> list[Cancel]:
        """Submit operations that came together, for a server."""
        if self._closed:
            raise broker_closed_error()
        return self.broker.submit_all(submitted)

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: LeaseDoubt | None = None, /) -> None:
        self.broker.auto_extend(queue, partition, lease, seconds, doubt)

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        self.broker.stop_extending(queue, partition, lease)

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        if self._closed:
            raise broker_closed_error()
        return self.broker.log(queue, partition)

    def staging(self) -> Staging:
        return self.broker.staging()

    def wait_until_owner(self, seconds: float | None = None) -> bool:
        """Wait until this process is the owner, at most so long; gives whether it is."""
        return self.broker.wait_until_owner(seconds)

    def close(self) -> None:
        with self.closing:
            with _registry.changing:
                if self._closed:
                    return
                self._closed = True
                last = self._counted and _registry.leave(self.broker)
            if last:
                self.broker.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, a home is its directory and options; see `_unpickle`."""
        return _unpickle, self.broker.pickled()

    def __repr__(self) -> str:
        return f"SharedHome({self.broker!r}{', closed' if self._closed else ''})"


# -- the shared brokers of this process --------------------------------------------------------------


class _SharedDirectories:
    """The directories that this process has open, and how often."""

    def __init__(self) -> None:
        self.changing = threading.RLock()
        self._opened: dict[str, tuple[SharedBroker, int, dict[str, Any]]] = {}

    def enter(self, directory: str, options: dict[str, Any], make: Callable[[], SharedBroker]) -> SharedBroker:
        """The broker of a directory, made if there is none. InvalidRequest when it was opened with other options."""
        with self.changing:
            broker, count, known = self._opened.get(directory, (None, 0, options))
            other = sorted(name for name in options if options[name] != known.get(name))
            if other:
                raise InvalidRequest(f"{directory} is open in this process with another {other[0]}; give the same, or close it first")
            if broker is None:
                broker = make()
            self._opened[directory] = broker, count + 1, known
            return broker

    def find(self, directory: str) -> SharedBroker | None:
        return self._opened.get(directory, (None,))[0]

    def join(self, directory: str) -> SharedBroker | None:
        """The broker of a directory that this process has open, for one more user; None when it has not."""
        with self.changing:
            if directory not in self._opened:
                return None
            broker, count, known = self._opened[directory]
            self._opened[directory] = broker, count + 1, known
            return broker

    def leave(self, broker: SharedBroker) -> bool:
        """One `open` of the broker was closed; whether it was the last."""
        with self.changing:
            for directory, (known, count, options) in [*self._opened.items()]:
                if known is broker:
                    if count > 1:
                        self._opened[directory] = known, count - 1, options
                        return False
                    del self._opened[directory]
            return True


_registry = _SharedDirectories()
_shared: "weakref.WeakSet[SharedBroker]" = weakref.WeakSet()
_homes: "weakref.WeakSet[SharedHome]" = weakref.WeakSet()


def open_shared(target: Target, *, own: bool = True, wait: int = 10 * SECOND, now: bool = True, **options: Any) -> SharedHome:
    """Open a directory as its owner, or as a client of its owner. now: False opens it at its first use."""
    paths = directories(target)
    compared = {"set of roots": paths[1:], "own": own, **options}
    broker = _registry.enter(os.path.realpath(paths[0]), compared, lambda: SharedBroker(target, own=own, wait=wait, now=False, **options))
    home = SharedHome(broker)
    if now:
        try:
            broker.open()  # not while `_registry` is locked: it may take long
        except BaseException:
            home.close()
            raise
    return home


def join_shared(target: Target) -> SharedHome | None:
    """The home of a directory that this process has open already; None when it has not. The caller closes it."""
    broker = _registry.join(os.path.realpath(directories(target)[0]))
    return SharedHome(broker) if broker is not None else None


def _unpickle(target: Target, options: dict[str, Any]) -> SharedHome:
    """The home of a directory that another process has open. If this process has it open, too, that broker is used;
    otherwise it is opened at the first use, and stays open until it is closed or the process ends.
    """
    directory = os.path.realpath(directories(target)[0])
    with _registry.changing:
        known = _registry.find(directory)
        if known is not None:
            return SharedHome(known, counted=False)
        return open_shared(target, now=False, **options)


def _after_fork() -> None:
    _registry.changing = threading.RLock()
    for home in list(_homes):
        home.closing = threading.RLock()
    for broker in list(_shared):
        with suppress(BaseException):  # no caller could handle it, and the other brokers must still be abandoned
            broker.abandon_after_fork()


os.register_at_fork(after_in_child=_after_fork)
