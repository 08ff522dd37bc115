"""The ASGI application: finds the handler of a path in a table and sends its reply.

Owns: `Application`. Operations are dispatched by one dict lookup, before any router (which would take a third of the
time); Starlette serves the other pages.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from penstock import operations
from penstock.api.home_calls import HomeCalls, ServedHome
from penstock.operations import LeaseItems, Operation, Query, ReadMetrics
from penstock.server.audit import AuditLog
from penstock.server.gate import Gate
from penstock.server.health import HealthSettings, Readiness
from penstock.server.json_api import JsonApi
from penstock.server.key_ring import KeyRing
from penstock.server.metrics import MetricsPage, MetricsSettings
from penstock.server.pages import PAGE_PATHS, make_pages
from penstock.server.served_request import (
    DELIVERY,
    LARGE_BYTES,
    REPEATED,
    ClientGone,
    Delivery,
    Receive,
    Reply,
    RequestWork,
    Scope,
    Send,
    ServedRequest,
    error_reply,
    refusal_headers,
)
from penstock.server.server_limits import ServerLimits
from penstock.server.server_meter import ServerMeter
from penstock.wire.http_calls import ANSWER_TYPE, CALL_PATH, VERSION_HEADER, check_version, encode_answer, encode_error
from penstock.wire.sessions import SessionTable
from penstock.words.errors import BodyTooLarge, OutcomeUnknown, PenstockError, caused_by_bug
from penstock.words.version import __version__

_log = logging.getLogger("penstock")
CLOSE = ((b"connection", b"close"),)

Handler: TypeAlias = Callable[[ServedRequest, bytes], Awaitable[Reply]]


class Application:
    """Serves a home over HTTP."""

    def __init__(
        self,
        home: ServedHome,
        limits: ServerLimits | None = None,
        *,
        keys: KeyRing | None = None,
        audit: AuditLog | None = None,
        metrics: MetricsSettings | None = None,
        health: HealthSettings | None = None,
    ) -> None:
        """keys: None for a broker without a directory: then requests need no key."""
        self._home = home
        self._limits = limits or ServerLimits()
        self.draining = False
        """Whether the server has begun to end."""
        self._calls: HomeCalls | None = None
        self._sessions: SessionTable[RequestWork] = SessionTable()
        self._threads = ThreadPoolExecutor(4, "penstock-http")
        self._handlers: Mapping[str, Handler] = {CALL_PATH: self._call, **JsonApi(self._limits, self._run).handlers()}
        self._error_replies: Mapping[str, Callable[[PenstockError], Reply]] = {CALL_PATH: _encoded_error}
        self.meter = ServerMeter([*self._handlers, *PAGE_PATHS])
        self._gate = Gate(keys, self._limits, audit or AuditLog(), self.meter)
        self.meter.waiting, self.meter.draining = lambda: self._gate.waiting, lambda: self.draining
        self._pages = make_pages(
            [*self._handlers],
            lambda scope, receive: ServedRequest(self._running_calls(), self._gate, scope, receive),
            Readiness(lambda: self._running_calls().call(ReadMetrics()), lambda: self.draining, health),
            MetricsPage(self.meter, __version__, metrics),
            lambda: self._gate.needs_key,
        )

    def _running_calls(self) -> HomeCalls:
        assert self._calls is not None
        return self._calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            handler = self._handlers.get(scope["path"])
            if handler is not None and scope["method"] == "POST":
                await self._answer(handler, scope, receive, send)
            else:
                await self._show(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a page."""
        began, status, size = self._begin(), 500, 0

        async def measured_send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, size
            status = message.get("status", status)
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self._pages(scope, receive, measured_send)
        finally:
            self._end(scope["path"], status, began, 0, size)

    def _begin(self) -> int:
        self.meter.request_begun()
        return self._home.clock.read().elapsed

    def _end(self, path: str, status: int, began: int, received: int, sent: int) -> None:
        self.meter.request_answered(path, status, self._home.clock.read().elapsed - began, received, sent)

    def drain(self) -> int:
        """Answer everything that waits for items, now and from now on; gives how many waited."""
        self.draining = True
        return 0 if self._calls is None else self._calls.end_waiting()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        self._calls = HomeCalls(self._home)
        refreshes = asyncio.ensure_future(self._gate.refresh_keys())
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        refreshes.cancel()
        self._gate.close()
        self._threads.shutdown()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an operation."""
        began, path = self._begin(), scope["path"]
        error_as_reply = self._error_replies.get(path, error_reply)
        try:
            request = ServedRequest(self._running_calls(), self._gate, scope, receive)
        except PenstockError as error:
            reply = error_as_reply(error)._replace(headers=(*refusal_headers(error), *CLOSE))  # its body is not read
            await _send(send, reply)
            self._end(path, reply.status, began, 0, len(reply.body))
            return
        try:
            reply = await self._reply(handler, request, error_as_reply)
        except ClientGone:
            request.work.give_up()
            self.meter.request_abandoned()
            return
        finally:
            request.end()
        delivery: Delivery | None = scope.get(DELIVERY)
        is_lost = delivery is not None and delivery.is_lost  # the client left while its answer was made
        try:
            await _send(send, reply)
        except BaseException:
            request.work.give_up()
            raise
        finally:
            self._end(path, reply.status, began, request.body_bytes, len(reply.body))
        if is_lost:
            request.work.give_up()
        else:
            await _finish(request, delivery)

    async def _reply(self, handler: Handler, request: ServedRequest, error_as_reply: Callable[[PenstockError], Reply]) -> Reply:
        try:
            return await handler(request, await request.read_body(self._limits.body_bytes))
        except ClientGone:
            raise
        except BodyTooLarge as error:  # the rest of the body is not read
            return error_as_reply(error)._replace(headers=CLOSE)
        except PenstockError as error:
            return error_as_reply(error)
        except asyncio.CancelledError:  # the server ends, and does not wait for this request any more
            request.work.give_up()
            return error_as_reply(OutcomeUnknown("the server ends; send the request again"))
        except Exception as error:
            _log.exception("a request of %s went wrong", request.path)
            return error_as_reply(caused_by_bug(error))

    # -- operations of Penstock's own client ---------------------------------------------------------

    async def _call(self, request: ServedRequest, body: bytes) -> Reply:
        check_version(request.header(VERSION_HEADER.encode()))
        is_large = len(body) > LARGE_BYTES
        operation = await self._run(is_large, partial(operations.decode, body))
        if operation.call is not None:
            is_new, original = self._sessions.enter(operation.call, request.work)
            if not is_new:
                raise OutcomeUnknown(REPEATED)
            if original is not None:
                original.replace()
        answer = await request.call(operation, is_large=is_large)
        return Reply(await self._run(_is_large_answer(operation), partial(encode_answer, answer)), 200, ANSWER_TYPE)

    async def _run(self, in_thread: bool, function: Callable[[], Any]) -> Any:
        if not in_thread:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def _is_large_answer(operation: Operation[Any]) -> bool:
    """Whether the answer may be large, so that encoding it takes long."""
    return isinstance(operation, Query | LeaseItems) and getattr(operation, "limit", getattr(operation, "count", 0)) > 1_000


def _encoded_error(error: PenstockError) -> Reply:
    return Reply(encode_error(error), error.http_status, ANSWER_TYPE, refusal_headers(error))


async def _finish(request: ServedRequest, delivery: Delivery | None) -> None:
    """See whether the client takes the answer. What was leased for an answer that was cut off is returned."""
    try:
        is_taken = delivery is None or await delivery.is_taken()
    except asyncio.CancelledError:  # the server ends
        is_taken = False
    if is_taken:
        request.work.delivered()
    else:
        request.work.give_up()


async def _send(send: Send, reply: Reply) -> None:
    headers = [(b"content-type", reply.content_type.encode()), (b"content-length", str(len(reply.body)).encode()), *reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
