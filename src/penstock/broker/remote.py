"""The home of a broker that another process owns: sends operations to the owner and gives its answers.

Owns: `RemoteBroker`. Calls can be sent again without being done twice (broker/remote_calls.py).
When the connection is lost, one thread makes another (`reconnect`, which in a shared directory may make this process
the owner: broker/shared.py). Calls without an answer are sent again until their own deadlines.
A submitted call (async callers) is sent once on each connection: `_changing` guards that.
Leases are extended by the same thread, at a third of their time.
"""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from penstock.broker.inbox import publish_write
from penstock.broker.remote_calls import REPEAT_SECONDS, LeaseExtensions, RemoteCall, Sessions, items_to_return
from penstock.logs.log import ReadableLog
from penstock.logs.store import ReadStore, Staging
from penstock.operations import A, AnswerCallback, Cancel, LeaseDoubt, LeaseItems, Operation, PublishLog, PublishWrite, submit_at_once
from penstock.rules.commands import Call
from penstock.wire.connection import ConnectionLost, SentCall, WireConnection
from penstock.words.clock import Clock
from penstock.words.errors import BrokerClosed, PenstockError, broker_closed_error, caused_by_bug
from penstock.words.threads import InterruptSafeThread

_log = logging.getLogger("penstock")
RECONNECT_SECONDS = 0.01
FAILURE_SECONDS = 0.5
"""How long to wait after this process could not open the directory, before it is tried again."""
TICK_SECONDS = 0.1
"""How often deadlines of submitted calls and leases to extend are looked at, while there are any."""


class SubmittedCall(RemoteCall):
    """A call with a callback."""

    __slots__ = ("done", "ended", "sent", "where")

    def __init__(self, operation: Operation[Any], call: Call | None, now: int, done: AnswerCallback) -> None:
        super().__init__(operation, call, now)
        self.done = done
        self.sent: SentCall | None = None
        """Its last sending."""
        self.where: WireConnection | None = None
        """The connection of that sending; None: it is to be sent."""
        self.ended = False
        """Whether it was answered or cancelled."""


class RemoteBroker:
    """A broker that another process owns."""

    def __init__(
        self,
        connection: WireConnection,
        reconnect: Callable[[], WireConnection | None],
        describe_owner: Callable[[], str],
        files: Callable[[], ReadStore],
        clock: Clock,
    ) -> None:
        """reconnect: tries once to connect to the present owner; None when there is none yet. describe_owner: names
        it in messages. files: opens the store, to read logs and to stage writes.
        """
        self.clock = clock
        self._reconnect = reconnect
        self._describe_owner = describe_owner
        self._open_files = files
        self._files: ReadStore | None = None
        self._changing = threading.RLock()
        """Held for moments, to change the connection, or a submitted call."""
        self._connection: WireConnection | None = connection
        connection.on_late_lease = self._return_items
        self._sessions = Sessions()
        self._submitted: dict[int, SubmittedCall] = {}
        """Calls with a callback that have no answer yet, by id."""
        self._extended = LeaseExtensions()
        self._failure: PenstockError | None = None
        """Why no connection can be made: it ends calls that were not sent yet."""
        self._forked = False
        self._ticking = False
        """Whether the thread looks at deadlines every TICK_SECONDS."""
        self._closed = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._thread = InterruptSafeThread(self._watch)

    # -- operations ----------------------------------------------------------------------------------

    def call(self, operation: Operation[A], /) -> A:
        if isinstance(operation, PublishWrite):
            published: A = publish_write(self._store().inbox, operation)  # type: ignore[assignment]
            return published
        remote = RemoteCall(operation, self._sessions.take(operation), self.clock.read().elapsed)
        connection, sent = None, SentCall(type(operation))
        try:
            while True:
                connection = self._wait_for_connection(remote)
                prepared = remote.prepared(self.clock.read().elapsed)
                remote.sendings += 1
                connection.send(prepared, sent, remote.deadline)
                connection.wait(sent, remote.deadline)
                now, outcome = self.clock.read().elapsed, remote.judged(sent.outcome)
                if sent.done and not remote.may_be_repeated(outcome, now):
                    self._sessions.give_back(remote, outcome)
                    if isinstance(outcome, PenstockError):
                        raise outcome
                    answer: A = outcome
                    return answer
                if sent.done:
                    threading.Event().wait(REPEAT_SECONDS)
                elif not sent.lost or now >= remote.deadline:
                    connection.cancel(sent)
                    raise self._no_answer(remote)
                sent = SentCall(type(operation))
        except PenstockError:
            raise
        except BaseException:  # an interrupt
            if connection is not None:
                connection.cancel(sent)
            raise

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        """Does not wait, not even for room in the socket: the caller may be an event loop."""
        if self._closed or self._failure is not None:
            self._check_open()
        if isinstance(operation, PublishWrite):
            return submit_at_once(self.call, operation, done)
        remote = SubmittedCall(operation, self._sessions.take(operation), self.clock.read().elapsed, done or _ignore)
        with self._changing:
            self._submitted[id(remote)] = remote
        self._send_submitted(remote)
        if not self._ticking:
            self._wake()
        return lambda: self._cancel(remote)

    def _send_submitted(self, remote: SubmittedCall) -> None:
        """Send a submitted call on the present connection, unless it was sent on it already.

        When the connection is lost, the call is sent again on the next one.
        """
        with self._changing:
            connection = self._connection
            if connection is None or remote.ended or remote.where is connection:
                return
            remote.where = connection
            remote.sent = sent = SentCall(type(remote.operation), lambda sent: self._answered(remote, sent))
            operation = remote.prepared(self.clock.read().elapsed)
            remote.sendings += 1
        try:
            connection.send(operation, sent, None)
        except PenstockError as error:
            self._end(remote, error)
        except Exception as error:  # a bug: the caller still gets an answer
            _log.exception("%s was not sent", type(remote.operation).__name__)
            self._end(remote, caused_by_bug(error))
        if connection.has_unsent:
            self._wake()

    def _answered(self, remote: SubmittedCall, sent: SentCall) -> None:
        """A sending of a submitted call was answered, or lost with its connection."""
        with self._changing:
            if remote.sent is not sent or (sent.lost and not self._closed and not remote.ended):
                return  # a lost call is sent again on the next connection
            cancelled = remote.ended
            if not cancelled and sent.done and remote.may_be_repeated(remote.judged(sent.outcome), self.clock.read().elapsed):
                remote.where = None  # the thread that looks at deadlines sends it again
                return
        if cancelled:
            self._return_items(sent)
        elif sent.done:
            outcome = remote.judged(sent.outcome)
            self._sessions.give_back(remote, outcome)
            self._end(remote, outcome)
        else:
            self._end(remote, broker_closed_error())

    def _end(self, remote: SubmittedCall, answer: Any) -> None:
        """End a submitted call with its answer or error, once."""
        with self._changing:
            if remote.ended:
                return
            remote.ended = True
            self._submitted.pop(id(remote), None)
        try:
            remote.done(answer)
        except Exception:  # a mistake of the caller must not end the thread that reads for others
            _log.exception("a callback for the answer to %s failed", type(remote.operation).__name__)

    def _cancel(self, remote: SubmittedCall) -> None:
        with self._changing:
            answered, remote.ended = remote.ended, True
            self._submitted.pop(id(remote), None)
            connection, sent = remote.where, remote.sent
        if sent is not None and answered:
            self._return_items(sent)  # its caller has left before it saw the answer
        elif sent is not None and connection is not None:
            connection.cancel(sent)

    def _return_items(self, sent: SentCall) -> None:
        """Return items that were leased for a call that nobody waits for any more."""
        if sent.kind is LeaseItems and sent.answer:
            with suppress(PenstockError):
                self.submit(items_to_return(sent.queue, sent.answer))

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: LeaseDoubt | None = None, /) -> None:
        self._extended.add((queue, partition, lease), seconds, self.clock.read().elapsed, doubt)
        if not self._ticking:
            self._wake()

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        self._extended.remove((queue, partition, lease))

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        self.call(PublishLog(queue=queue, partition=partition))
        return self._store().reader(queue, partition)

    def staging(self) -> Staging:
        return self._store().inbox

    def _store(self) -> ReadStore:
        if self._files is None:
            self._files = self._open_files()
        return self._files

    def close(self) -> None:
        with self._changing:
            if self._closed:
                return
            self._closed = True
            connection = self._connection
        self._wake()
        if connection is not None:
            connection.close()
        self._thread.join()
        for remote in [*self._submitted.values()]:
            self._end(remote, broker_closed_error())
        for one in (self._wake_receiver, self._wake_sender):
            one.close()
        if self._files is not None:
            self._files.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptors, and leave the parent's connection alone."""
        self._forked = True
        if self._connection is not None:
            self._connection.abandon()
        for one in (self._wake_receiver, self._wake_sender):
            one.close()

    # -- the connection ------------------------------------------------------------------------------

    def _wait_for_connection(self, remote: RemoteCall) -> WireConnection:
        """The present connection. A call that was sent before waits for one until its own deadline."""
        while True:
            connection = self._connection
            if connection is not None and not connection.lost and not self._closed:
                return connection
            self._check_open(was_sent=bool(remote.sendings))
            if self.clock.read().elapsed >= remote.deadline:
                raise self._no_answer(remote)
            threading.Event().wait(RECONNECT_SECONDS / 2)

    def _no_answer(self, remote: RemoteCall) -> PenstockError:
        """The error of a call at its deadline."""
        return remote.no_answer_error(self._describe_owner(), self.clock.read().elapsed)

    def _watch(self) -> None:
        while not self._closed:
            connection = self._connection
            if connection is None or connection.lost:
                self._connect_again()
                continue
            self._ticking = False  # first: whoever adds something from here on wakes this thread
            self._ticking = bool(self._submitted or self._extended)
            connection.wait_for_hang_up(self._wake_receiver.fileno(), TICK_SECONDS if self._ticking else None)
            with suppress(OSError):
                self._wake_receiver.recv(4096)
            try:
                self._extend_leases()
                self._end_late_calls()
                self._send_all()
            except Exception:  # a bug: this thread must live on, for the next connection
                _log.exception("deadlines of calls to the owner were not looked at")

    def _connect_again(self) -> None:
        """Make another connection, and send calls again that had no answer on the last one."""
        with self._changing:
            former, self._connection = self._connection, None
        if former is not None:
            former.close()
        made: SimpleQueue[WireConnection | None] = SimpleQueue()
        InterruptSafeThread(lambda: made.put(self._reconnect_until_made()))  # opening the broker may take long
        self._ticking = True
        connection = None
        while not self._closed:
            with suppress(Empty):
                connection = made.get(timeout=TICK_SECONDS)
                break
            self._end_late_calls()
            self._extended.report_doubts(self.clock.read().elapsed)
        else:
            connection = made.get()
        if connection is None:
            return
        connection.on_late_lease = self._return_items
        with self._changing:
            self._connection = None if self._closed else connection
        if self._closed:
            connection.close()
        self._send_all()

    def _reconnect_until_made(self) -> WireConnection | None:
        """Try to connect until there is a connection; None when this broker was closed."""
        while not self._closed:
            pause = RECONNECT_SECONDS
            try:
                connection = self._reconnect()
                self._failure = None
                if connection is not None:
                    return connection
            except ConnectionLost:
                self._failure = None
            except PenstockError as error:
                self._failure, pause = error, FAILURE_SECONDS
            except Exception as error:  # a bug: the next attempt may succeed
                _log.exception("no connection to the owner was made")
                self._failure, pause = caused_by_bug(error), FAILURE_SECONDS
            threading.Event().wait(pause)
        return None

    def _send_all(self) -> None:
        """Send the submitted calls that were not sent on the present connection."""
        for remote in [*self._submitted.values()]:
            if remote.where is not self._connection:
                self._send_submitted(remote)

    def _end_late_calls(self) -> None:
        """End submitted calls at their deadlines; and those that cannot be sent."""
        now = self.clock.read().elapsed
        for remote in [*self._submitted.values()]:
            if now >= remote.deadline:
                if remote.where is not None and remote.sent is not None:
                    remote.where.cancel(remote.sent)
                self._end(remote, self._no_answer(remote))
            elif not remote.sendings and self._failure is not None:
                self._end(remote, self._failure)

    def _extend_leases(self) -> None:
        """Extend the leases that are due, one call for each queue."""
        for operation, leases in self._extended.due(self.clock.read().elapsed):
            try:
                self.submit(operation, lambda outcome, leases=leases: self._extended_leases(leases, outcome))  # type: ignore[misc]
            except PenstockError as error:
                self._extended_leases(leases, error)

    def _extended_leases(self, leases: list[tuple[int, int, int]], outcome: Any) -> None:
        self._extended.answered(leases, outcome, self.clock.read().elapsed)

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_sender.send(b"\0")

    def _check_open(self, was_sent: bool = False) -> None:
        if self._closed:
            raise broker_closed_error()
        if self._forked:
            raise BrokerClosed("this process was forked during the call, which is its parent's; make it again here")
        if self._failure is not None and not was_sent:
            raise type(self._failure)(str(self._failure))  # its own exception for each thread: a traceback grows


def _ignore(answer: Any) -> None:
    """The answer is not wanted."""
