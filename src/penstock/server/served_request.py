"""A request of an HTTP client, as handlers see it, and the reply to it.

Owns: `ServedRequest`, `RequestWork`, `Reply` and `error_reply`.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from penstock.api.home_calls import HomeCall, HomeCalls
from penstock.operations import A, AwaitItems, LeaseItems, Operation
from penstock.server.gate import Gate
from penstock.words.clock import SECOND, Clock
from penstock.words.errors import BodyTooLarge, OutcomeUnknown, PenstockError
from penstock.words.limits import KIB

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
JSON_TYPE = "application/json"
RETRY_AFTER_SECONDS = 1
LARGE_BYTES = 64 * KIB
"""Larger bodies are decoded in another thread, so that other requests do not wait for that; and they count as bodies in
memory.
"""
DELIVERY = "penstock.delivery"
REPEATED = "this call was repeated meanwhile, on another connection; its answer was sent there"


class ClientGone(Exception):
    """The client closed its connection: nobody waits for the reply."""


class Reply(NamedTuple):
    """What is sent to the client."""

    body: bytes
    status: int = 200
    content_type: str = JSON_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Problem(msgspec.Struct):
    """The body of an error."""

    code: str
    message: str


def error_reply(error: PenstockError) -> Reply:
    """An error as JSON, with its status."""
    body = msgspec.json.encode(Problem(error.code, str(error)))
    return Reply(body, error.http_status, JSON_TYPE, refusal_headers(error))


def refusal_headers(error: PenstockError) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that the status of an error asks for."""
    if error.http_status == 401:
        return ((b"www-authenticate", b"Bearer"),)
    return ((b"retry-after", str(RETRY_AFTER_SECONDS).encode()),) if error.retryable and error.http_status in (429, 503) else ()


class Delivery(Protocol):
    """What becomes of the answers on a connection. It is in the scope of its requests, as DELIVERY."""

    @property
    def is_lost(self) -> bool:
        """Whether nothing that is sent now reaches the client."""
        ...

    async def is_taken(self) -> bool:
        """Wait until the operating system has (nearly) all that was sent; False if the client left before."""
        ...


class RequestWork:
    """What a request does at the broker. It is small: one is kept for each session of a client."""

    __slots__ = ("_is_replaced", "_started")

    def __init__(self) -> None:
        self._started: HomeCall | None = None
        """The newest operation, until its answer is the client's."""
        self._is_replaced = False

    def check(self) -> None:
        """OutcomeUnknown when the request was repeated meanwhile: then it must not begin anything."""
        if self._is_replaced:
            raise OutcomeUnknown(REPEATED)

    def begin(self, started: HomeCall) -> HomeCall:
        self._started = started
        return started

    def delivered(self) -> None:
        """The reply was sent: what became of it is the client's affair."""
        self._started = None

    def give_up(self) -> None:
        """The client did not get the reply: items that were leased for it return to their queue."""
        started, self._started = self._started, None
        if started is not None:
            started.cancel()

    def replace(self) -> None:
        """The client has repeated this request: end it, if it still waits. If it was answered, the repetition gets the
        same answer, so nothing is returned.
        """
        self._is_replaced = True
        started, self._started = self._started, None
        if started is not None and not started.answered.done():
            started.fail(OutcomeUnknown(REPEATED))


class ServedRequest:
    """One request."""

    def __init__(self, calls: HomeCalls, gate: Gate, scope: Scope, receive: Receive) -> None:
        """Raises as `Gate.enter`. `end` must follow."""
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._calls = calls
        self._gate = gate
        self._receive = receive
        self._held_bytes = 0
        self.body_bytes = 0
        """The size of the body that was read."""
        self.work = RequestWork()
        client = scope.get("client")
        self.caller = gate.enter(self.header(b"authorization"), client[0] if client else "", self.header(b"origin"))

    def end(self) -> None:
        self._gate.leave(self.caller)
        self._gate.release_body(self._held_bytes)

    @property
    def clock(self) -> Clock:
        return self._calls.home.clock

    def header(self, name: bytes) -> str:
        """The value of a header, named in lower case; empty when it was not sent."""
        for given, value in self.headers:
            if given == name:
                return value.decode("latin-1")
        return ""

    async def read_body(self, limit: int) -> bytes:
        """The body. BodyTooLarge, or QueueBusy if the server has too many bodies in memory; also before it is sent when
        the client says how large it is. Unauthenticated if the key was revoked while the body came slowly.
        """
        began = self.clock.read().elapsed
        length = self.header(b"content-length")
        if length.isdigit():
            if int(length) > limit:
                raise BodyTooLarge(f"the body has {length} bytes, of {limit} that are allowed; send less at a time")
            self._hold(int(length))
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            self.body_bytes = size = size + len(parts[-1])
            if size > limit:
                raise BodyTooLarge(f"the body has more than {limit} bytes; send less at a time")
            self._hold(size)
            if not message.get("more_body"):
                if self.clock.read().elapsed - began >= SECOND:
                    self._gate.check_key(self.caller)
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _hold(self, size_bytes: int) -> None:
        """Count this body, if it is large. (Small ones are limited by the number of connections.)"""
        if size_bytes > LARGE_BYTES and size_bytes > self._held_bytes:
            self._gate.hold_body(size_bytes - self._held_bytes)
            self._held_bytes = size_bytes

    async def call(self, operation: Operation[A], *, is_large: bool = False) -> A:
        """Wait for the answer to an operation, if the caller may do it. ClientGone when the client leaves meanwhile;
        then it is cancelled.
        """
        gate, calls, caller = self._gate, self._calls, self.caller
        checked: Operation[A] = await gate.check(caller, operation, calls)
        self.work.check()
        try:
            if isinstance(checked, LeaseItems | AwaitItems) and checked.wait:
                started = await self._wait_for_items(checked)
            else:
                started = self.work.begin(calls.start(checked, is_large=is_large))
            answer: A = await calls.wait(started)
        except PenstockError as error:
            await gate.record_failure(caller, checked, error, calls)
            raise
        gate.record(caller, checked, None)
        if isinstance(checked, LeaseItems) and checked.request is not None:
            self.work.delivered()  # if the client does not get it, it can ask again for the same items
        return answer if not caller.access.prefixes else await gate.filter_answer(caller, checked, answer, calls)

    async def _wait_for_items(self, operation: "LeaseItems | AwaitItems") -> HomeCall:
        """Wait until the operation is answered, the client leaves, or its key is not valid any more."""
        ends: list[HomeCall] = []
        end_wait = self._gate.begin_wait(self.caller, lambda error: ends[0].fail(error))
        started = self.work.begin(self._calls.start_waiting(operation))
        ends.append(started)
        try:
            await self._wait_or_leave(started)
        except (ClientGone, asyncio.CancelledError):
            self.work.give_up()
            raise
        finally:
            self._calls.stop_waiting(started)
            end_wait()
        return started

    async def _wait_or_leave(self, started: HomeCall) -> None:
        """Wait for an answer or for the end of the connection."""
        left = asyncio.ensure_future(self._receive())  # the body was read: all that comes now is http.disconnect
        try:
            await asyncio.wait((started.answered, left), return_when=asyncio.FIRST_COMPLETED)
            if left.done():
                raise ClientGone
        finally:
            left.cancel()
