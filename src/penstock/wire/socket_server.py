"""The owner's side of the wire: serves the clients of a broker with one thread.

Owns: `WireServer`. Its thread reads calls from all connections and submits those that arrived together to the broker,
which runs them in that thread as far as no disk is waited for; so they share turns and syncs. A call that waits is an
entry in a table, not a thread. The thread that has an answer sends it; what the connection cannot take at once is
buffered and sent by the server's thread.
A connection that does not read its answers is read no further once UNSENT_BYTES are buffered, and closed when it takes
none of them for STALLED. When a connection ends, its calls that still wait are cancelled.
A repeated call (of a client that lost its connection) first cancels the original if that still waits here. An original
that is read after its repetition is ignored: the old connection's bytes may be read late.
"""

import errno
import hmac
import logging
import os
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import msgspec

from penstock import operations
from penstock.operations import AnswerCallback, Cancel, LeaseItems, Operation, Query
from penstock.reports import ClientDescription
from penstock.wire.messages import (
    ANSWER,
    CALL,
    CANCEL,
    HELLO,
    MAJOR,
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    MINOR,
    WELCOME,
    BrokenMessage,
    Hello,
    Message,
    MessageBuffer,
    ReadBuffer,
    Welcome,
    encode_message,
    encode_refusal,
)
from penstock.wire.sessions import SessionTable
from penstock.words import forks
from penstock.words.clock import SECOND, Clock
from penstock.words.errors import AccessDenied, InvalidRequest, OutcomeUnknown, PenstockError, QueueBusy, caused_by_bug
from penstock.words.limits import MIB
from penstock.words.threads import InterruptSafeThread

_log = logging.getLogger("penstock")
MAX_CONNECTIONS = 1_000
MAX_WAITING_CALLS = 10_000
"""Of one connection."""
CALLS_AT_ONCE = 64
"""Calls of one connection that are taken together: their answers, of whatever size, are added to what is unsent."""
UNSENT_BYTES = 32 * MIB
"""A connection with more unsent bytes than this is not read until it has taken some of them."""
STALLED = 60 * SECOND
HELLO_WITHIN = 10 * SECOND
CHECK_SECONDS = 1.0


class ServedBroker(Protocol):
    """What the server needs of its broker."""

    @property
    def clock(self) -> Clock: ...
    def submit_all(self, submitted: Sequence[tuple[Operation[Any], AnswerCallback]], /) -> list[Cancel]: ...


class ServedCall:
    """A call of a client that is not answered yet."""

    __slots__ = ("cancel", "connection", "delivered", "is_returned", "kind", "number")

    def __init__(self, connection: "ServedConnection", number: int, kind: type[Operation[Any]]) -> None:
        self.connection = connection
        self.number = number
        self.kind = kind
        self.cancel: Cancel | None = None
        self.delivered = False
        """Whether its answer was sent, or buffered to be sent."""
        self.is_returned = False
        """Whether its leased items are returned, because the answer was too large to be sent."""


class ServedConnection:
    """One client. The server's thread reads; any thread sends."""

    def __init__(self, sock: socket.socket, now: int) -> None:
        self.socket = sock
        self.received = MessageBuffer(MAX_HELLO_BYTES)
        self.hello: Hello | None = None
        self.since = now
        self.since_wall = 0
        self.calls: dict[int, ServedCall] = {}
        self.backlog: deque[Message] = deque()
        """Messages that were read and not taken yet."""
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.progress_at = now
        """When it last took bytes, or had none to take."""
        self.watched = selectors.EVENT_READ
        self.ended = False
        self._sending = threading.Lock()

    def send(self, data: bytes | bytearray) -> bool:
        """Send bytes, or buffer what cannot be sent now. Gives whether the server's thread must see to it."""
        with self._sending:
            if self.ended:
                return False
            try:
                sent = 0 if self.unsent else self._send(data)
                if sent < len(data):
                    self.unsent.append(memoryview(data)[sent:])
                    self.unsent_bytes += len(data) - sent
                return sent < len(data)
            except OSError:
                self.ended = True
                return True
            except BaseException:  # an interrupt: it is not known what was sent
                self.ended = True
                raise

    def close(self) -> None:
        """Close the socket when no thread sends: its descriptor's number may be another connection's at once."""
        with self._sending:
            self.ended = True
            self.socket.close()

    def send_more(self, now: int) -> None:
        """Send what is buffered, as far as possible. Raises OSError."""
        with self._sending:
            while self.unsent:
                sent = self._send(self.unsent[0])
                if not sent:
                    return
                self.progress_at = now
                self.unsent_bytes -= sent
                if sent == len(self.unsent[0]):
                    self.unsent.popleft()
                else:
                    self.unsent[0] = self.unsent[0][sent:]

    def _send(self, data: bytes | bytearray | memoryview) -> int:
        try:
            return self.socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0


class WireServer:
    """Serves a broker to other processes."""

    def __init__(self, broker: ServedBroker, listener: socket.socket, secret: str, roots: Sequence[str] = ()) -> None:
        self._broker = broker
        self._clock = broker.clock
        self._listener = listener
        self._secret = secret.encode()
        self._memory = ReadBuffer()
        self._welcome = Welcome(MAJOR, MINOR, os.getpid(), os.uname().nodename[:200], [*roots])
        self._connections: set[ServedConnection] = set()
        self._sessions: SessionTable[ServedCall] = SessionTable()
        self._backlogged: set[ServedConnection] = set()
        """Connections of which not all calls that were read have been taken."""
        self._attention: deque[ServedConnection] = deque()
        """Connections that another thread has found to be broken or slow."""
        self._submitted: list[tuple[Operation[Any], ServedCall]] = []
        self._outgoing: list[tuple[ServedCall, bytes | bytearray]] = []
        """Answers of turns that the server's thread ran, not sent yet."""
        self._thread_ident = 0
        self._stopping = False
        self._accepts = True
        self._woken = False
        self._checked_at = 0
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, self._drain_wakes)
        self._thread = InterruptSafeThread(self._run)

    def clients(self, *, without_self: bool = False) -> list[ClientDescription]:
        """The clients that are connected now, oldest first.

        without_self: leave out this process, which has a connection to itself after it has taken over.
        """
        return [
            ClientDescription(one.hello.pid, one.hello.name, one.since_wall, len(one.calls))
            for one in sorted([*self._connections], key=lambda one: one.since)
            if one.hello is not None and not (without_self and _is_own(one.socket))
        ]

    def stop(self) -> None:
        """End every connection: their clients repeat what was not answered, at the next owner."""
        self._stopping = True
        self._wake()
        self._thread.join()

    def abandon(self) -> None:
        """In a forked child: close the descriptors. It has closed the listener and the connections (words/forks.py)."""
        self._stopping = True
        with suppress(Exception):
            self._selector.close()  # nothing is unregistered: that would be for the parent, too
        for one in (self._wake_receiver, self._wake_sender):
            one.close()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._thread_ident = get_ident()
        try:
            while not self._stopping:
                try:
                    self._serve_once()
                except Exception:
                    _log.exception("the server of a broker's socket went wrong; it goes on")
        finally:
            for connection in [*self._connections]:
                self._end(connection, cancel=False)  # the broker answers or refuses all its requests when it is closed
            self._selector.close()
            for one in (self._listener, self._wake_receiver, self._wake_sender):
                one.close()

    def _serve_once(self) -> None:
        takeable = any(one.unsent_bytes <= UNSENT_BYTES for one in self._backlogged)
        ready = self._selector.select(0 if takeable else CHECK_SECONDS if self._connections or not self._accepts else None)
        self._take_backlogs()
        for key, events in ready:
            if isinstance(key.data, ServedConnection):
                self._serve(key.data, events)
            else:
                key.data()
        if self._submitted:
            self._submit()
        while self._attention:
            connection = self._attention.popleft()
            if connection.ended:
                self._end(connection)
            else:
                self._watch(connection)
        now = self._clock.read().elapsed
        if now - self._checked_at >= SECOND:
            self._checked_at = now
            self._end_stalled(now)
            if not self._accepts:
                self._accepts = True
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(OSError):
                self._wake_sender.send(b"\0")

    def _drain_wakes(self) -> None:
        with suppress(OSError):
            self._wake_receiver.recv(4096)
        self._woken = False  # afterwards: a wake-up whose byte was read just now is seen to in this round

    def _accept(self) -> None:
        try:
            accepted = forks.open_tracked(lambda: self._listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                _log.warning("a client cannot connect: %s; it is tried again in a moment", error)
                self._selector.unregister(self._listener)
                self._accepts = False
            return
        accepted.setblocking(False)
        connection = ServedConnection(accepted, self._clock.read().elapsed)
        connection.since_wall = self._clock.read().wall
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.send(encode_refusal(0, QueueBusy(f"{MAX_CONNECTIONS} clients are connected; close some, then try again")))
            accepted.close()
            return
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve(self, connection: ServedConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.send_more(self._clock.read().elapsed)
                self._watch(connection)
            if events & selectors.EVENT_READ:
                data = self._memory.receive(connection.socket)
                if not data:
                    self._end(connection)
                    return
                connection.backlog.extend(connection.received.feed(data))
                self._take_backlog(connection)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, BrokenMessage) as error:
            if isinstance(error, BrokenMessage):
                _log.warning("a client sent what cannot be understood (%s); its connection was closed", error)
            self._end(connection)

    def _take_backlog(self, connection: ServedConnection) -> None:
        """Take some of the calls that were read, unless the connection has too much unsent. Raises BrokenMessage."""
        for _ in range(CALLS_AT_ONCE):
            if not connection.backlog or connection.unsent_bytes > UNSENT_BYTES or connection.ended:
                break
            self._take(connection, connection.backlog.popleft())
        if connection.backlog:
            self._backlogged.add(connection)
        else:
            self._backlogged.discard(connection)
        self._watch(connection)

    def _take_backlogs(self) -> None:
        for connection in [*self._backlogged]:
            try:
                self._take_backlog(connection)
            except BrokenMessage as error:
                _log.warning("a client sent what cannot be understood (%s); its connection was closed", error)
                self._end(connection)

    def _watch(self, connection: ServedConnection) -> None:
        """Wait for what the connection needs: room to send, and calls unless it has too much unsent."""
        if connection.ended:
            self._end(connection)
            return
        wanted = 0 if connection.unsent_bytes > UNSENT_BYTES or connection.backlog else selectors.EVENT_READ
        if connection.unsent:
            wanted |= selectors.EVENT_WRITE
        if wanted != connection.watched and connection in self._connections:
            connection.watched = wanted
            connection.progress_at = self._clock.read().elapsed
            self._selector.modify(connection.socket, wanted, connection)

    def _end(self, connection: ServedConnection, cancel: bool = True) -> None:
        """Close a connection, and cancel its calls that still wait."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._backlogged.discard(connection)
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()
        self._sessions.forget(lambda call: call.connection is connection)
        self._submitted = [one for one in self._submitted if one[1].connection is not connection]
        for call in [*connection.calls.values()] if cancel else []:
            _cancel(call)

    def _end_stalled(self, now: int) -> None:
        for connection in [*self._connections]:
            silent = connection.hello is None and now - connection.since > HELLO_WITHIN
            if silent or (connection.unsent and now - connection.progress_at > STALLED):
                _log.warning("the connection of a client was closed: it %s", "did not say who it is" if silent else "takes no answers")
                self._end(connection)

    # -- messages ------------------------------------------------------------------------------------

    def _take(self, connection: ServedConnection, message: Message) -> None:
        if connection.hello is None:
            self._introduce(connection, message)
        elif message.kind == CALL:
            try:
                self._take_call(connection, message)
            except PenstockError as error:
                self._send(connection, encode_refusal(message.number, error))
        elif message.kind == CANCEL:
            call = connection.calls.pop(message.number, None)
            if call is not None:
                self._submitted = [one for one in self._submitted if one[1] is not call]
                _cancel(call)
                self._send(connection, encode_refusal(message.number, QueueBusy("the call was cancelled; nothing was done")))
        else:
            raise BrokenMessage(f"kind {message.kind}")

    def _introduce(self, connection: ServedConnection, message: Message) -> None:
        if message.kind != HELLO:
            raise BrokenMessage("it did not begin with a hello")
        try:
            hello = msgspec.msgpack.decode(message.body, type=Hello)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise BrokenMessage(str(error)) from error
        if not hmac.compare_digest(hello.secret.encode(), self._secret):
            self._refuse(
                connection, AccessDenied("the secret is wrong; it is in the LOCK file of the directory, and changes with its owner")
            )
        elif hello.major != MAJOR:
            versions = f"the owner speaks version {MAJOR}.{MINOR} of the protocol and this client {hello.major}.{hello.minor}"
            self._refuse(connection, InvalidRequest(f"{versions}; use the same major version of Penstock in all processes"))
        else:
            connection.hello = hello
            connection.received.limit = MAX_MESSAGE_BYTES
            self._send(connection, encode_message(WELCOME, 0, self._welcome))

    def _refuse(self, connection: ServedConnection, error: PenstockError) -> None:
        connection.send(encode_refusal(0, error))
        self._end(connection)

    def _take_call(self, connection: ServedConnection, message: Message) -> None:
        if len(connection.calls) >= MAX_WAITING_CALLS:
            raise QueueBusy(f"{MAX_WAITING_CALLS} calls of this process wait; try again when some are answered")
        operation = operations.decode(message.body)
        call = ServedCall(connection, message.number, type(operation))
        if operation.call is not None:
            is_new, original = self._sessions.enter(operation.call, call)
            if not is_new:
                return  # read late, from a connection that its client has left
            if original is not None:
                original.connection.calls.pop(original.number, None)
                self._submitted = [one for one in self._submitted if one[1] is not original]
                _cancel(original)
        connection.calls[message.number] = call
        self._submitted.append((operation, call))

    def _submit(self) -> None:
        submitted, self._submitted = self._submitted, []
        cancels = self._broker.submit_all([(operation, partial(self._answer, call)) for operation, call in submitted])
        for (_, call), cancel in zip(submitted, cancels, strict=True):
            if not call.delivered:
                call.cancel = cancel
        outgoing, self._outgoing = self._outgoing, []
        for call, message in outgoing:
            self._deliver(call, message)
        for _, call in submitted:
            if call.connection.ended:  # while it was submitted
                _cancel(call)

    def _answer(self, call: ServedCall, answer: Any) -> None:
        """Send the answer of a call, from any thread."""
        connection = call.connection
        if connection.calls.pop(call.number, None) is None:
            _cancel(call)  # it was cancelled meanwhile: items that were leased for it are returned
            return
        try:
            message = (
                encode_refusal(call.number, answer) if isinstance(answer, PenstockError) else encode_message(ANSWER, call.number, answer)
            )
        except PenstockError as error:  # it is too large
            call.is_returned = call.kind is LeaseItems
            known = call.is_returned or issubclass(call.kind, Query)
            message = encode_refusal(call.number, error if known else OutcomeUnknown(str(error)))
        except Exception as error:  # a bug of Penstock: the client still gets an answer
            _log.exception("the answer to %s cannot be encoded", call.kind.__name__)
            message = encode_refusal(call.number, caused_by_bug(error))
        if get_ident() == self._thread_ident:  # inside a turn: send it when the turn is over
            self._outgoing.append((call, message))
        else:
            self._deliver(call, message)

    def _deliver(self, call: ServedCall, message: bytes | bytearray) -> None:
        call.delivered = not call.is_returned
        self._send(call.connection, message)
        if call.connection.ended:
            call.delivered = False
        if call.delivered:
            call.cancel = None  # it holds the request, with its items
        else:
            _cancel(call)

    def _send(self, connection: ServedConnection, message: bytes | bytearray) -> None:
        if connection.send(message):
            self._attention.append(connection)
            self._wake()


def _is_own(connection: socket.socket) -> bool:
    """Whether this process is the other end of a connection. (A number that the client gives could be that of a process
    in another container.)"""
    if not hasattr(socket, "SO_PEERCRED"):
        return False
    with suppress(OSError):
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return bool(pid == os.getpid())
    return False


def _cancel(call: ServedCall) -> None:
    """Cancel a call. Items that were leased for it and not delivered are returned."""
    if call.cancel is not None and not call.delivered:
        with suppress(PenstockError):
            call.cancel()
