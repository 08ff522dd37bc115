"""The client's side of the wire: one connection to the owner of a broker.

Owns: `WireConnection`, `SentCall` and `ConnectionLost`. Any number of threads share a connection. The thread that
waits for an answer reads the socket itself, and passes on the answers of others; so a lone caller needs no other
thread. Calls with a callback are read for by a thread of the connection, which starts with the first of them.
An interrupt in the middle of sending or reading breaks the connection: it is not known which bytes were taken. So does
a message that the other side breaks off. Then every call ends as lost, and may be sent again on another connection
(broker/remote.py).
"""

import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from penstock.operations import LeaseItems, Operation, Query
from penstock.wire.messages import (
    ANSWER,
    CALL,
    CANCEL,
    HELLO,
    MAJOR,
    MAX_MESSAGE_BYTES,
    MINOR,
    REFUSED,
    WELCOME,
    BrokenMessage,
    Hello,
    Message,
    MessageBuffer,
    ReadBuffer,
    Welcome,
    decode_answer,
    decode_refusal,
    encode_message,
)
from penstock.words.clock import MILLISECOND, SECOND, Clock
from penstock.words.errors import OutcomeUnknown, PenstockError, QueueBusy, StorageFailed
from penstock.words.threads import InterruptSafeThread, is_held_here

HANG_UP = getattr(select, "POLLRDHUP", 0)
"""macOS reports a hang-up without being asked for it."""
NO_ANSWER = "the owner does not answer"
_MAX_NUMBER = (1 << 32) - 1


class ConnectionLost(Exception):
    """The connection ended, or could not be made."""


class SentCall:
    """A call that was sent, until it has its answer."""

    __slots__ = ("_wakeup", "answer", "done", "error", "kind", "left", "lost", "number", "on_done", "queue")

    def __init__(self, kind: type[Operation[Any]], on_done: "Callable[[SentCall], None] | None" = None) -> None:
        self.kind = kind
        self.number = self.queue = 0
        self.done = False
        self.lost = False
        """Whether the connection ended before the answer."""
        self.left = False
        """Whether the thread that waited for it does not wait any more."""
        self.answer: Any = None
        self.error: PenstockError | None = None
        self.on_done = on_done
        """Called by some thread when it is done or lost; None: a thread waits for it."""
        self._wakeup: SimpleQueue[None] | None = None if on_done is not None else SimpleQueue()

    @property
    def outcome(self) -> Any:
        """The answer, or the error."""
        return self.answer if self.error is None else self.error

    def finish(self) -> None:
        self.done = True
        if self.on_done is not None:
            self.on_done(self)
        else:
            self.wake()

    def wake(self) -> bool:
        """Wake the thread that waits for it; False when none does."""
        if self._wakeup is None or self.left:
            return False
        self._wakeup.put(None)
        return True

    def sleep(self, seconds: float) -> None:
        assert self._wakeup is not None
        with suppress(Empty):
            self._wakeup.get(timeout=seconds)


class WireConnection:
    """A connection to the owner of a broker."""

    def __init__(self, sock: socket.socket, secret: str, clock: Clock, deadline: int) -> None:
        """Introduce this process. ConnectionLost when the owner does not answer before the deadline (elapsed); the
        owner's error when it refuses.
        """
        sock.setblocking(False)
        self.lost = False
        self._socket = sock
        self._clock = clock
        self._memory = ReadBuffer()
        self._received = MessageBuffer(MAX_MESSAGE_BYTES)
        self._calls: dict[int, SentCall] = {}
        self._callback_numbers: set[int] = set()
        """Of calls with a callback."""
        self._numbers = count()
        self._sending = threading.RLock()  # reentrant only because it knows its owner
        """Held for moments, to add to `_unsent` and to send from it."""
        self._unsent: deque[memoryview] = deque()
        self._reading = threading.RLock()  # reentrant only because it knows its owner
        """Held by the thread that reads."""
        self._cancelled: dict[int, SentCall] = {}
        """Leases that were cancelled and not answered yet."""
        self.on_late_lease: Callable[[SentCall], None] = lambda call: None
        """Called with a lease that was answered after it was cancelled."""
        self._callback_thread: InterruptSafeThread | None = None
        self._callbacks_wait: SimpleQueue[None] = SimpleQueue()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        try:
            self.owner: Welcome = self._introduce(secret, deadline)
        except BaseException:
            sock.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- calls ---------------------------------------------------------------------------------------

    def send(self, operation: Operation[Any], call: SentCall, deadline: int | None) -> None:
        """Send a call. When that fails, the call is lost. InvalidRequest when it cannot be sent at all.

        deadline: how long to wait until the owner takes it; None: do not wait, `wait_for_hang_up` sends the rest.
        """
        if is_held_here(self._sending) or (deadline is not None and is_held_here(self._reading)):
            raise QueueBusy("called in the middle of another call of this thread (from a signal handler?); try again when it has returned")
        number = next(self._numbers) % _MAX_NUMBER + 1
        message = encode_message(CALL, number, operation)
        call.number, call.queue = number, operation.queue
        self._calls[number] = call
        if call.on_done is not None:
            self._callback_numbers.add(number)
            self._read_for_callbacks()
        try:
            self._send(message, deadline)
        except ConnectionLost:
            self.lose()

    def wait(self, call: SentCall, deadline: int) -> None:
        """Wait until the call is done or lost, or the deadline (elapsed) has passed."""
        try:
            while not call.done and not call.lost:
                left = deadline - self._clock.read().elapsed
                if left <= 0:
                    return
                if self._reading.acquire(blocking=False):
                    try:
                        self._read_until(lambda: call.done or call.lost, deadline)
                    finally:
                        self._reading.release()
                else:
                    call.sleep(left / SECOND)
        except BaseException:  # an interrupt: perhaps bytes were read and forgotten
            while is_held_here(self._reading):  # it may come between `acquire` and `try`
                self._reading.release()
            self.lose()
            raise
        finally:
            call.left = True  # so that the task of reading is passed on to another thread, and not to this one
            self._pass_on()

    def cancel(self, call: SentCall) -> None:
        """Give up a call: its answer is not wanted any more."""
        self._callback_numbers.discard(call.number)
        if self._calls.pop(call.number, None) is None or self.lost:
            return
        if call.kind is LeaseItems:
            self._cancelled[call.number] = call
            self._read_for_callbacks()  # the owner answers: with items that must be returned, or that it was cancelled
        try:
            self._send(encode_message(CANCEL, call.number, None), None)
        except ConnectionLost:
            self.lose()

    def lose(self) -> None:
        """End the connection; calls that have no answer are lost."""
        self.lost = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        self._callbacks_wait.put(None)
        while self._calls:
            with suppress(KeyError):
                _, call = self._calls.popitem()
                call.lost = True
                if call.on_done is not None:
                    call.on_done(call)
                call.wake()

    def close(self) -> None:
        """End the connection, and close its descriptor.

        Not while another thread reads: the number of a closed descriptor belongs to another file at once, and a thread
        that is about to poll would wait for that file.
        """
        self.lose()
        with self._reading, self._sending, suppress(OSError):
            self._socket.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptor, and do not end the parent's connection."""
        self.lost = True
        for call in self._calls.values():  # perhaps the fork is in a signal handler, in the middle of a call
            call.lost = True
        with suppress(OSError):
            self._socket.close()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait until the owner takes them."""
        return bool(self._unsent)

    def wait_for_hang_up(self, wake: int, seconds: float | None) -> None:
        """Wait until the connection ends, the descriptor `wake` can be read, or the time is over. Sends what waits."""
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        with suppress(OSError, ValueError):  # it was closed
            poll.register(self._socket, HANG_UP | (select.POLLOUT if self._unsent else 0))
        found = poll.poll(None if seconds is None else seconds * 1000)
        events = next((events for descriptor, events in found if descriptor != wake), 0)
        try:
            if events & select.POLLOUT:
                self._send_unsent()
            if events & ~select.POLLOUT:
                self.lose()
        except ConnectionLost:
            self.lose()

    # -- reading -------------------------------------------------------------------------------------

    def _read_until(self, ended: Callable[[], bool], deadline: int | None) -> None:
        """Read and pass on answers until `ended`, or the deadline; the caller holds `_reading`."""
        while not self.lost and not ended():
            left = None if deadline is None else max(0, deadline - self._clock.read().elapsed) / MILLISECOND
            if left == 0:
                return
            self._read_some(left)

    def _read_some(self, milliseconds: float | None) -> None:
        """Wait for bytes, and pass on the answers in them."""
        try:
            if not self._readable.poll(milliseconds):
                return
            data = self._memory.receive(self._socket)
            if not data:
                raise ConnectionLost("the owner closed the connection")
            for message in self._received.feed(data):
                self._take(message)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ValueError, BrokenMessage, ConnectionLost):
            self.lose()

    def _take(self, message: Message) -> None:
        call = self._calls.pop(message.number, None)
        self._callback_numbers.discard(message.number)
        if call is None:  # it was cancelled
            call = self._cancelled.pop(message.number, None)
            if call is not None and message.kind == ANSWER:
                call.answer = decode_answer(call.kind, message.body)
                self.on_late_lease(call)
            return
        try:
            if message.kind == REFUSED:
                call.error = decode_refusal(message.body)
            elif message.kind == ANSWER:
                call.answer = decode_answer(call.kind, message.body)
            else:
                raise BrokenMessage(f"kind {message.kind}")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            what = f"the owner's answer cannot be understood ({error}); use the same Penstock in all processes"
            call.error = StorageFailed(what) if issubclass(call.kind, Query) else OutcomeUnknown(what)
        call.finish()

    def _pass_on(self) -> None:
        """Let a thread that waits for an answer read, if none does."""
        if self._calls:
            for call in [*self._calls.values()]:
                if call.wake():
                    return

    def _read_for_callbacks(self) -> None:
        with self._sending:
            if self._callback_thread is None:
                self._callback_thread = InterruptSafeThread(self._run_callbacks)
        self._callbacks_wait.put(None)

    def _run_callbacks(self) -> None:
        while not self.lost:
            self._callbacks_wait.get()
            while not self._callbacks_wait.empty():
                self._callbacks_wait.get()
            with self._reading:
                self._read_until(lambda: not self._callback_numbers and not self._cancelled, None)
            self._pass_on()

    # -- sending -------------------------------------------------------------------------------------

    def _send(self, message: bytes | bytearray, deadline: int | None) -> None:
        """Send a message after those that wait. ConnectionLost when that fails or the deadline passes.

        deadline: None does not wait until the owner takes it.
        """
        with self._sending:
            self._unsent.append(memoryview(message))
        while not self._send_unsent() and deadline is not None:
            left = deadline - self._clock.read().elapsed
            if left <= 0 or not self._writable.poll(left / MILLISECOND):
                raise ConnectionLost("the owner takes no messages")

    def _send_unsent(self) -> bool:
        """Send what waits, without waiting; gives whether all was sent."""
        with self._sending:
            try:
                while self._unsent:
                    if self.lost:
                        raise ConnectionLost("the connection has ended")
                    sent = self._socket.send(self._unsent[0])
                    if sent == len(self._unsent[0]):
                        self._unsent.popleft()
                    else:
                        self._unsent[0] = self._unsent[0][sent:]
                return True
            except (BlockingIOError, InterruptedError):
                return False
            except (OSError, ValueError) as error:
                raise ConnectionLost(str(error)) from error
            except ConnectionLost:
                raise
            except BaseException:  # an interrupt: perhaps a part was sent
                self.lost = True
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # so that the other threads notice
                raise

    def _introduce(self, secret: str, deadline: int) -> Welcome:
        hello = Hello(MAJOR, MINOR, secret, os.getpid(), os.path.basename(sys.argv[0] if sys.argv else "")[:100])
        self._send(encode_message(HELLO, 0, hello), deadline)
        while True:
            left = deadline - self._clock.read().elapsed
            if left <= 0 or not self._readable.poll(left / MILLISECOND):
                raise ConnectionLost(NO_ANSWER)
            try:
                data = self._memory.receive(self._socket)
                found = self._received.feed(data)
            except (OSError, BrokenMessage) as error:
                raise ConnectionLost(str(error)) from error
            if found and found[0].kind == REFUSED:
                raise decode_refusal(found[0].body)
            if found and found[0].kind == WELCOME:
                return msgspec.msgpack.decode(found[0].body, type=Welcome)
            if found or not data:
                raise ConnectionLost("the owner did not answer the hello")
