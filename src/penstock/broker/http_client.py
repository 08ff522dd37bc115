"""Sends operations to a Penstock server over HTTP, from a thread with an event loop of its own.

Owns: `HttpClient`, the connections of one process to one server, and `HttpCall`. Each call is a task of the event loop:
it takes a connection, posts the operation and gives the answer. When the connection is lost, when nobody listens, or
when a proxy in between cannot reach the server, it is sent again with growing pauses, as the same call of its session
(broker/remote_calls.py), until its own deadline.
A lease that waits is sent in slices of WAIT_SLICE: proxies end a request without traffic after a minute or so, and a
server that vanished without a word is noticed then. A call that is cancelled closes its connection, so that the server
sees the client leave; items that were leased for it nevertheless are returned.
Connections are limited for each kind of call: calls that wait do not keep others from being sent, and items can be
settled while producers wait for room in a queue.
"""

import asyncio
import logging
import os
import selectors
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

import msgspec

from penstock.broker.remote_calls import (
    GRACE,
    LONG_OPERATIONS,
    REPEAT_SECONDS,
    WAITING_OPERATIONS,
    LeaseExtensions,
    RemoteCall,
    Sessions,
    items_to_return,
)
from penstock.operations import AnswerCallback, FindQueue, LeaseDoubt, LeaseItems, Operation, Query, SettleItems
from penstock.wire.connection import ConnectionLost
from penstock.wire.http_address import HttpAddress, HttpOptions, tls_context
from penstock.wire.http_calls import ANSWER_TYPE, CALL_PATH, OPERATION_TYPE, VERSION, VERSION_HEADER, decode_error, encode_operation
from penstock.wire.http_connection import ConnectionPool, HttpConnection, HttpResponse, ResponseTooLarge, ServerUnreachable
from penstock.wire.messages import decode_answer
from penstock.words import forks
from penstock.words.clock import MILLISECOND, SECOND, Clock
from penstock.words.errors import (
    AccessDenied,
    BrokerClosed,
    InvalidRequest,
    OutcomeUnknown,
    PenstockError,
    QueueNotFound,
    StorageFailed,
    Unauthenticated,
    broker_closed_error,
    caused_by_bug,
)
from penstock.words.threads import InterruptSafeThread

_log = logging.getLogger("penstock")
WAIT_SLICE = 25 * SECOND
SHORTEST_WAIT = MILLISECOND
"""A shorter rest of a wait is not asked for."""
WAITING_CONNECTIONS = 400
SETTLING_CONNECTIONS = 32
OTHER_CONNECTIONS = 64
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
"""Seconds between two sendings of a call. Each pause is twice as long as the one before, less a random part."""
MAX_RETRY_AFTER = 10
"""How many seconds of a proxy's Retry-After are obeyed."""
LATE_SECONDS = 5.0
"""How long the answer of a cancelled lease is waited for."""
CLOSING_SECONDS = 1.0
"""How long `close` waits until items of leases that it cancelled are returned."""
UNKNOWN_QUEUE = 1
"""The incarnation of no queue: they are random numbers of 64 bits."""
TEMPORARY = {408, 425, 429, 500, 502, 503, 504}
"""Statuses of proxies that cannot reach the server now, or do not know whether it did what was asked."""


class HttpCall:
    """Something that a task of the event loop does, and the callback for its outcome."""

    __slots__ = ("_callbacks", "is_cancelled", "operation", "outcome", "task", "work")

    def __init__(self, work: Callable[[], Awaitable[Any]], done: AnswerCallback | None, operation: Operation[Any] | None = None) -> None:
        """work: gives the outcome. operation: what is asked, if the outcome is its answer."""
        self.work = work
        self.operation = operation
        self.task: asyncio.Task[None] | None = None
        self.is_cancelled = False
        self.outcome: Any = None
        self._callbacks = [] if done is None else [done]

    def finish(self, outcome: Any) -> None:
        """Pass on the outcome, once, unless the call was cancelled."""
        self.outcome = outcome
        with suppress(IndexError):
            done = self._callbacks.pop()
            if not self.is_cancelled:
                try:
                    done(outcome)
                except Exception:  # a mistake of the caller must not end the task of others
                    _log.exception("a callback for the answer to %s failed", type(self.operation).__name__)


class ForeignAnswer(ConnectionLost):
    """A proxy, and not the server, has answered."""

    def __init__(self, why: str, pause: int = 0, error: PenstockError | None = None) -> None:
        """pause: how many seconds the proxy asks to wait.
        error: what it means for a call that was not sent before; None: that it must be sent again.
        """
        super().__init__(why)
        self.pause = pause
        self.error = error


class EventLoopHandles:
    """An event loop. In a forked child `close` closes its descriptors, and changes nothing of what the parent waits
    for: the two share it.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.loop = asyncio.SelectorEventLoop(self._selector)

    def close(self) -> None:
        for name in ("_ssock", "_csock"):  # the pipe that wakes it
            with suppress(OSError, AttributeError):
                getattr(self.loop, name).close()
        self._selector.close()


class HttpClient:
    """The connections of this process to a server. It belongs to the process that made it."""

    def __init__(self, address: HttpAddress, options: HttpOptions, clock: Clock) -> None:
        """InvalidRequest when a certificate file cannot be used."""
        self._address = address
        self._clock = clock
        self._connect_timeout = options.connect_timeout
        self._pool = ConnectionPool(address, tls_context(address, options), options.connect_timeout)
        self._head = _request_head(address, options.api_key)
        self._sessions = Sessions()
        self._extended = LeaseExtensions()
        self._calls: dict[int, HttpCall] = {}
        """Calls without an outcome, by id."""
        self._waiting_places = asyncio.Semaphore(WAITING_CONNECTIONS)
        self._settling_places = asyncio.Semaphore(SETTLING_CONNECTIONS)
        self._other_places = asyncio.Semaphore(OTHER_CONNECTIONS)
        self._extension: asyncio.TimerHandle | None = None
        self._extension_at = 0
        """When leases are extended next."""
        self._background: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._handles = forks.open_tracked(EventLoopHandles)
        self._loop = self._handles.loop
        self._thread_ident = 0
        self._thread = InterruptSafeThread(self._run)

    # -- from any thread -----------------------------------------------------------------------------

    @property
    def is_own_thread(self) -> bool:
        return get_ident() == self._thread_ident

    def call_of(self, operation: Operation[Any], done: AnswerCallback | None) -> HttpCall:
        """A call for an operation; `enter` starts it."""
        return HttpCall(partial(self._answer, operation), done, operation)

    def check_of(self, wait: int, done: AnswerCallback) -> HttpCall:
        """A call that asks whether the server answers this client; its outcome is None or an error."""
        return HttpCall(partial(self._check, wait), done)

    def enter(self, call: HttpCall) -> None:
        """Start a call. BrokerClosed when the client was closed."""
        if self._closing:
            raise broker_closed_error()
        self._calls[id(call)] = call
        try:
            self._loop.call_soon_threadsafe(self._start, call)
        except RuntimeError:  # the event loop is closed
            self._calls.pop(id(call), None)
            raise broker_closed_error() from None

    def cancel(self, call: HttpCall) -> None:
        """Give a call up; its callback is not called any more."""
        call.is_cancelled = True
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._cancel, call)

    def auto_extend(self, lease: tuple[int, int, int], seconds: float, doubt: LeaseDoubt | None = None) -> None:
        self._extended.add(lease, seconds, self._clock.read().elapsed, doubt)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._extend_at, self._clock.read().elapsed + int(seconds * SECOND / 3))

    def stop_extending(self, lease: tuple[int, int, int]) -> None:
        self._extended.remove(lease)

    def close(self) -> None:
        """End all calls with BrokerClosed, and the connections."""
        self._closing = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._begin_close)
        self._thread.join()

    def end_calls_after_fork(self) -> None:
        """In a forked child, which has no thread of this client: end the call that the fork happened in, if any."""
        self._closing = True
        for call in [*self._calls.values()]:
            call.finish(BrokerClosed("this process was forked during the call, which is its parent's; make it again here"))

    # -- the event loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        self._thread_ident = get_ident()
        self._loop.set_exception_handler(_log_failure)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            for call in [*self._calls.values()]:  # entered too late
                call.finish(broker_closed_error())

    def _begin_close(self) -> None:
        for call in [*self._calls.values()]:
            if call.task is not None:
                call.task.cancel()
        self._background.add(self._loop.create_task(self._finish_close()))

    async def _finish_close(self) -> None:
        """Wait a little until items of cancelled leases are returned, then end the loop."""
        me = asyncio.current_task()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_SECONDS):
                while others := asyncio.all_tasks() - {me}:
                    await asyncio.wait(others)
        for one in asyncio.all_tasks() - {me}:
            one.cancel()
        self._pool.close()
        await asyncio.sleep(0)  # for transports, which are closed in a turn of their own
        while others := asyncio.all_tasks() - {me}:
            await asyncio.wait(others)
        self._loop.stop()

    def _start(self, call: HttpCall) -> None:
        if call.is_cancelled:
            self._calls.pop(id(call), None)
        elif self._closing:
            self._calls.pop(id(call), None)
            call.finish(broker_closed_error())
        else:
            call.task = self._loop.create_task(self._perform(call))

    async def _perform(self, call: HttpCall) -> None:
        try:
            outcome = await call.work()
        except asyncio.CancelledError:
            outcome = broker_closed_error()
        except PenstockError as error:
            outcome = error
        except Exception as error:  # a bug: the caller still gets an answer
            _log.exception("%s was not sent to %s", type(call.operation).__name__, self._address.url)
            outcome = caused_by_bug(error)
        self._calls.pop(id(call), None)
        if call.is_cancelled:  # just when the answer came
            self._return_items(call.operation, outcome)
        else:
            call.finish(outcome)

    def _cancel(self, call: HttpCall) -> None:
        if call.task is None:
            self._calls.pop(id(call), None)
        elif call.task.done():
            self._return_items(call.operation, call.outcome)  # its caller has left before it saw the answer
        else:
            call.task.cancel()

    def _in_background(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- calls ---------------------------------------------------------------------------------------

    async def _answer(self, operation: Operation[Any]) -> Any:
        """The outcome of an operation. One that waits is asked again until its time is over: after a slice of it, and
        when the server ended it sooner, because it is being stopped.

        A lease that was sent again and got nothing is asked once more, as a new call: items that the first sending
        leased were returned when its connection was lost.
        """
        began = self._clock.read().elapsed
        if not isinstance(operation, WAITING_OPERATIONS) or operation.call is not None:
            return await self._send_until_answered(RemoteCall(operation, self._sessions.take(operation), began))
        asked, end, pause, is_last = operation, began + operation.wait, FIRST_PAUSE, False
        while True:
            remote = RemoteCall(asked, self._sessions.take(asked), began)
            outcome = await self._send_until_answered(remote)
            now = self._clock.read().elapsed
            is_over = end - now < SHORTEST_WAIT
            if outcome or (is_over and (is_last or remote.sendings < 2 or not isinstance(asked, LeaseItems))):
                return outcome
            is_last = is_over
            if now - began < min(asked.wait, WAIT_SLICE) // 2:
                await asyncio.sleep(max(0, min(pause, (end - now) / SECOND)))
                pause = min(2 * pause, LONGEST_PAUSE)
            began = self._clock.read().elapsed
            asked = msgspec.structs.replace(asked, wait=max(0, end - began))

    async def _send_until_answered(self, remote: RemoteCall) -> Any:
        """Send a call until its outcome is known, or its deadline has passed."""
        pause, why = FIRST_PAUSE, ""
        try:
            async with asyncio.timeout((remote.deadline - self._clock.read().elapsed) / SECOND):
                while True:
                    try:
                        outcome = await self._send(remote)
                    except (ServerUnreachable, ConnectionLost, PenstockError) as failure:
                        outcome = _final_error(remote, failure)
                        if outcome is not None:
                            return outcome
                        why = str(failure)
                        await asyncio.sleep(max(pause * (0.5 + os.urandom(1)[0] / 512), getattr(failure, "pause", 0)))
                        pause = min(2 * pause, LONGEST_PAUSE)
                        continue
                    judged = remote.judged(outcome)
                    # One that may take minutes is not repeated for minutes.
                    is_long = judged is not outcome and isinstance(remote.operation, LONG_OPERATIONS)
                    is_final = is_long or isinstance(outcome, AccessDenied | Unauthenticated)
                    if is_final or not remote.may_be_repeated(judged, self._clock.read().elapsed):
                        self._sessions.give_back(remote, judged)
                        return judged
                    why = str(outcome)
                    await asyncio.sleep(max(pause, REPEAT_SECONDS))
                    pause = min(2 * pause, LONGEST_PAUSE)
        except TimeoutError:
            who = f"the server at {self._address.url}" + (f" ({why})" if why else "")
            return remote.no_answer_error(who, self._clock.read().elapsed)

    async def _send(self, remote: RemoteCall) -> Any:
        """Send a call once; gives its outcome.

        ServerUnreachable when it was not sent; ConnectionLost when it may have been executed.
        """
        async with self._places(remote.operation):
            connection = await self._pool.take()
            operation = remote.prepared(self._clock.read().elapsed)
            seconds = None
            if isinstance(operation, WAITING_OPERATIONS) and not remote.is_passed_on:
                operation.wait = min(operation.wait, WAIT_SLICE)
                seconds = (operation.wait + GRACE) / SECOND
            try:
                body = encode_operation(operation)
                remote.sendings += 1
                async with asyncio.timeout(seconds):
                    response = await connection.post(self._head + str(len(body)).encode() + b"\r\n\r\n", body)
            except asyncio.CancelledError:
                if isinstance(operation, LeaseItems):
                    self._in_background(self._read_late_lease(connection, operation))
                else:
                    self._pool.give_back(connection)
                raise
            except BaseException as error:
                self._pool.give_back(connection)
                if isinstance(error, TimeoutError):
                    raise ConnectionLost("it does not answer") from None
                raise
            self._pool.give_back(connection)
        return self._outcome(remote, response)

    def _places(self, operation: Operation[Any]) -> asyncio.Semaphore:
        """The connections that such an operation may use."""
        if isinstance(operation, WAITING_OPERATIONS) and operation.wait:
            return self._waiting_places
        return self._settling_places if isinstance(operation, SettleItems) else self._other_places

    def _outcome(self, remote: RemoteCall, response: HttpResponse) -> Any:
        """The outcome in a response. ConnectionLost when it is not known."""
        if response.content_type != ANSWER_TYPE:
            raise self._foreign_answer(response)
        kind = type(remote.operation)
        try:
            outcome = decode_answer(kind, response.body) if response.status == 200 else decode_error(response.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            what = f"the server's answer cannot be understood ({error}); use the same Penstock on both sides"
            return StorageFailed(what) if issubclass(kind, Query) else OutcomeUnknown(what)
        ends = response.headers.get(b"connection", b"").lower() == b"close"
        if isinstance(outcome, BrokerClosed) or (ends and isinstance(outcome, OutcomeUnknown)):  # it is being restarted
            raise ConnectionLost(str(outcome))
        return outcome

    def _foreign_answer(self, response: HttpResponse) -> ForeignAnswer:
        status, url = response.status, self._address.url
        if status in TEMPORARY:
            given = response.headers.get(b"retry-after", b"")
            return ForeignAnswer(
                f"a proxy answered {status}", min(int(given), MAX_RETRY_AFTER) if given.isdigit() and len(given) < 10 else 0
            )
        error: PenstockError
        if status in (401, 403, 407):
            error = AccessDenied(f"a proxy before {url} refuses this client (status {status}); ask for access there")
        elif status == 413:
            error = InvalidRequest(f"a proxy before {url} refuses a request of this size (status 413); send less at a time")
        elif 300 <= status < 400:
            target = response.headers.get(b"location", b"").decode("latin-1")
            error = InvalidRequest(f"{url} redirects to {target!r:.200} (status {status}); give the address of the server itself")
        else:
            kind = response.content_type or "no content type"
            error = InvalidRequest(f"no Penstock server answers at {url} (status {status}, {kind}); fix the address")
        return ForeignAnswer(str(error), error=error)

    async def _check(self, wait: int) -> PenstockError | None:
        """Ask the server about a queue that does not exist, which every key may ask.

        wait: how long to try again while it does not answer. BrokerClosed after that.
        """
        end, pause = self._clock.read().elapsed + wait, FIRST_PAUSE
        while True:
            now = self._clock.read().elapsed
            remote = RemoteCall(FindQueue(queue=UNKNOWN_QUEUE), None, now)
            try:
                async with asyncio.timeout(max(end - now, self._connect_timeout) / SECOND):
                    outcome = await self._send(remote)
                return outcome if isinstance(outcome, PenstockError) and not isinstance(outcome, QueueNotFound) else None
            except (ServerUnreachable, ConnectionLost, PenstockError, TimeoutError) as failure:
                error = _final_error(remote, failure)
                if error is not None:
                    return error
                if self._clock.read().elapsed + pause * SECOND >= end:
                    what = f"no Penstock server answers at {self._address.url} ({failure or 'no answer'})"
                    is_plain = isinstance(failure, ConnectionLost) and not self._address.is_secure
                    hint = " (https:// if it has a certificate)" if is_plain else ""
                    return BrokerClosed(f"{what}; start it with `penstock serve`, fix the address{hint}, or wait longer (wait=…)")
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    # -- leases --------------------------------------------------------------------------------------

    async def _read_late_lease(self, connection: HttpConnection, operation: LeaseItems) -> None:
        """Tell the server that nobody waits for a lease any more, and return what it has leased nevertheless."""
        try:
            async with asyncio.timeout(LATE_SECONDS):
                response = await connection.read_late_response()
            if response.status == 200 and response.content_type == ANSWER_TYPE:
                self._return_items(operation, decode_answer(LeaseItems, response.body))
        except (ConnectionLost, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError):
            pass  # the server returns the items, or the lease expires
        finally:
            self._pool.give_back(connection)

    def _return_items(self, operation: Operation[Any] | None, outcome: Any) -> None:
        if isinstance(operation, LeaseItems) and isinstance(outcome, list) and outcome:
            self._in_background(self._answer(items_to_return(operation.queue, outcome)))

    def _extend_at(self, when: int) -> None:
        """Look then whether leases are to be extended."""
        if self._extension is not None:
            if self._extension_at <= when:
                return
            self._extension.cancel()
        seconds = max(0, when - self._clock.read().elapsed) / SECOND
        self._extension, self._extension_at = self._loop.call_later(seconds, self._extend_due), when

    def _extend_due(self) -> None:
        self._extension = None
        for operation, leases in self._extended.due(self._clock.read().elapsed):
            self._in_background(self._extend(operation, leases))
        self._extend_next()

    def _extend_next(self) -> None:
        when = self._extended.next_time()
        if when is not None and not self._closing:
            self._extend_at(when)

    async def _extend(self, operation: SettleItems, leases: list[tuple[int, int, int]]) -> None:
        try:
            outcome = await self._answer(operation)
        except PenstockError as error:
            outcome = error
        self._extended.answered(leases, outcome, self._clock.read().elapsed)
        self._extend_next()


def _request_head(address: HttpAddress, api_key: str) -> bytes:
    """The head of every request, up to the length of the body."""
    lines = [
        f"POST {address.base}{CALL_PATH} HTTP/1.1",
        f"host: {address.host_header}",
        f"content-type: {OPERATION_TYPE}",
        f"accept: {ANSWER_TYPE}",
        f"{VERSION_HEADER}: {VERSION}",
        *([f"authorization: Bearer {api_key}"] if api_key else []),
        "content-length: ",
    ]
    return "\r\n".join(lines).encode("ascii")


def _final_error(remote: RemoteCall, failure: Exception) -> PenstockError | None:
    """The error that a failed sending means for its caller; None: it must be sent again.

    What is final for a first sending says nothing about what became of an earlier one.
    """
    if isinstance(failure, ResponseTooLarge):
        kind = InvalidRequest if isinstance(remote.operation, Query) else OutcomeUnknown
        return kind(f"{failure}; ask for less at a time")
    if isinstance(failure, ForeignAnswer):
        return failure.error if remote.sendings == 1 else None
    return failure if isinstance(failure, PenstockError) and not remote.sendings else None


def _log_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A bug: something went wrong in the event loop that no call was told of."""
    _log.error("%s", context.get("message"), exc_info=context.get("exception"))
