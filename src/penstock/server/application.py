"""The ASGI application: finds the handler of a path in a table and sends its reply.

Owns: `Application`. Operations are dispatched by one dict lookup, before any router (which would take a third of the
time); Starlette serves the other pages.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from penstock import operations
from penstock.operations import LeaseItems, Operation, Query
from penstock.server import openapi
from penstock.server.audit import AuditLog
from penstock.server.gate import Gate
from penstock.server.home_calls import HomeCalls, ServedHome
from penstock.server.http_errors import MethodNotAllowed, unknown_path_error
from penstock.server.json_api import JsonApi
from penstock.server.key_ring import KeyRing
from penstock.server.served_request import (
    LARGE_BYTES,
    REPEATED,
    ClientGone,
    Receive,
    Reply,
    Scope,
    Send,
    ServedRequest,
    error_reply,
    refusal_headers,
)
from penstock.server.server_limits import ServerLimits
from penstock.wire.http_calls import ANSWER_TYPE, CALL_PATH, VERSION_HEADER, check_version, encode_answer, encode_error
from penstock.wire.sessions import SessionTable
from penstock.words.errors import BodyTooLarge, OutcomeUnknown, PenstockError, caused_by_bug

_log = logging.getLogger("penstock")
CLOSE = ((b"connection", b"close"),)

Handler: TypeAlias = Callable[[ServedRequest, bytes], Awaitable[Reply]]


class Application:
    """Serves a home over HTTP."""

    def __init__(
        self, home: ServedHome, limits: ServerLimits | None = None, *, keys: KeyRing | None = None, audit: AuditLog | None = None
    ) -> None:
        """keys: None for a broker without a directory: then requests need no key."""
        self._home = home
        self._limits = limits or ServerLimits()
        self._gate = Gate(keys, self._limits, audit or AuditLog())
        self.draining = False
        """Whether the server has begun to end."""
        self._calls: HomeCalls | None = None
        self._sessions: SessionTable[ServedRequest] = SessionTable()
        self._threads = ThreadPoolExecutor(4, "penstock-http")
        self._handlers: Mapping[str, Handler] = {CALL_PATH: self._call, **JsonApi(self._limits, self._run).handlers()}
        self._pages: Mapping[str, Callable[[], Reply]] = {openapi.PATH: lambda: openapi.document_reply(self._gate.needs_key)}
        self._error_replies: Mapping[str, Callable[[PenstockError], Reply]] = {CALL_PATH: _encoded_error}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            handler = self._handlers.get(scope["path"])
            if handler is not None and scope["method"] == "POST":
                await self._answer(handler, scope, receive, send)
                return
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        await _send(send, self._page(scope["method"], scope["path"]))

    def _page(self, method: str, path: str) -> Reply:
        """The page at a path, or an error."""
        page = self._pages.get(path)
        if page is not None and method in ("GET", "HEAD"):
            return page()
        if page is None and path not in self._handlers:
            return error_reply(unknown_path_error(path, [*self._handlers, *self._pages]))
        allowed = "POST" if page is None else "GET"
        reply = error_reply(MethodNotAllowed(f"{path} is not for {method[:20]}; use {allowed}"))
        return reply._replace(headers=((b"allow", allowed.encode()),))

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
        assert self._calls is not None
        error_as_reply = self._error_replies.get(scope["path"], error_reply)
        try:
            request = ServedRequest(self._calls, self._gate, scope, receive)
        except PenstockError as error:
            await _send(send, error_as_reply(error)._replace(headers=(*refusal_headers(error), *CLOSE)))  # its body is not read
            return
        try:
            reply = await self._reply(handler, request, error_as_reply)
        except ClientGone:
            request.give_up()
            return
        finally:
            request.end()
        try:
            await _send(send, reply)
            request.delivered()
        except BaseException:
            request.give_up()
            raise

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
            request.give_up()
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
            is_new, original = self._sessions.enter(operation.call, request)
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


async def _send(send: Send, reply: Reply) -> None:
    headers = [(b"content-type", reply.content_type.encode()), (b"content-length", str(len(reply.body)).encode()), *reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
