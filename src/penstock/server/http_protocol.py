"""One HTTP connection: what uvicorn's protocol does, with limits on time, size and number.

Owns: `HttpProtocol`, and `ConnectionWatch`, which all connections of a server share. The watch looks at every
connection a few times per limit, so that no request sets a timer; a limit is therefore met a little late.

    receiving the head ──► receiving the body ──► (the application answers) ──► idle ──► receiving the head …
      header_seconds         body_seconds           send_seconds, to read it      idle_seconds

A connection that breaks a limit gets an error, if no other answer is due on it, and is closed. What its client still
sends is read and discarded for LINGER_SECONDS: if it was closed at once, the operating system would discard the error.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.server.repeated_warnings import RepeatedWarnings
from penstock.server.served_request import DELIVERY, JSON_TYPE, RETRY_AFTER_SECONDS, Problem
from penstock.server.server_limits import ServerLimits
from penstock.server.server_meter import ServerMeter

LINGER_SECONDS = 2.0
MAX_PIPELINED = 64
"""Requests of one connection that wait for the answer to an earlier one."""
EXTRA_CONNECTIONS = 256
"""Connections beyond the limit that are told so. Beyond them, a connection is closed without a word."""
TLS_RECORD = b"\x16\x03"


class Refusal(NamedTuple):
    """An answer of the protocol itself, after which the connection is closed."""

    status: int
    code: str
    message: str
    cause: str
    """What is logged."""


NOT_HTTP = Refusal(400, "not_http", "this is not a valid HTTP/1.1 request; fix the client", "bytes that are not HTTP")
TLS_ON_PLAIN_PORT = NOT_HTTP._replace(cause="TLS on an address without TLS")
HEAD_TOO_LARGE = Refusal(431, "head_too_large", "the head of the request is too large; send fewer or shorter headers", "a head too large")
HEAD_TOO_SLOW = Refusal(408, "head_too_slow", "the head of the request took too long; send it at once", "a head too slow")
BODY_TOO_SLOW = Refusal(408, "body_too_slow", "the body of the request took too long; send less at a time", "a body too slow")
TOO_MANY_PIPELINED = Refusal(429, "too_many_requests", "too many requests at once on a connection; wait for answers", "too much pipelining")
TOO_MANY_CONNECTIONS = Refusal(503, "too_many_connections", "the server has too many connections; try again later", "too many connections")


class ConnectionWatch:
    """The limits of all connections of a server, and who breaks them."""

    def __init__(self, limits: ServerLimits, state: ServerState, meter: ServerMeter) -> None:
        self.limits = limits
        self.meter = meter
        self.warnings = RepeatedWarnings()
        self._state = state
        shortest = min(limits.header_seconds, limits.body_seconds, limits.send_seconds, limits.idle_seconds, LINGER_SECONDS)
        self._interval = min(max(shortest / 4, 0.01), 1.0)
        self._timer: asyncio.TimerHandle | None = None
        self._none_left = asyncio.Event()

    @property
    def connections(self) -> "list[HttpProtocol]":
        """All connections that are open now."""
        return cast("list[HttpProtocol]", [*self._state.connections])

    def start(self) -> None:
        """Begin to look at the connections. Call it in the event loop."""
        self._look(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._interval, self._look, loop)
        now = loop.time()
        for connection in self.connections:
            connection.check_time(now)
        self.warnings.log_counted(now)

    def lost(self) -> None:
        """A connection has ended."""
        self.meter.connection_closed()
        if not self._state.connections:
            self._none_left.set()

    async def wait_until_none_left(self) -> None:
        """Wait until no connection is open."""
        while self._state.connections:
            self._none_left.clear()
            await self._none_left.wait()


class HttpProtocol(HttpToolsProtocol):
    """A connection of a client."""

    def __init__(
        self,
        watch: ConnectionWatch,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._watch = watch
        self._answers: AnswerTransport
        self._delivery: ConnectionDelivery
        self._running: RequestResponseCycle | None = None
        """The request that the application answers; `cycle` is the one that was received last."""
        self._in_head = False
        self._in_body = False
        self._chunk_bytes = 0
        self._chunk_is_shared = False
        """Whether the bytes that are parsed now began with another request."""
        self._head_bytes = 0
        """Bytes in which the head that is received was found so far."""
        self._other_bytes = 0
        """How many of them may belong to an earlier request."""
        self._between_bytes = 0
        """Bytes of a chunked body since its last piece: sizes of chunks, and headers at its end."""
        self._got_piece = False
        """Whether the bytes that are parsed now have a piece of a body."""
        self._refusal = NOT_HTTP
        """Why the parser was stopped."""
        self._discarding = False
        """What the client sends is not looked at any more."""
        self._changed = True
        """Whether the time limit has changed since the watch looked."""
        self._deadline = math.inf
        self._read_deadline: float | None = None
        """By when the client must have read most of what was sent to it."""

    # -- the connection ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch.meter.connection_opened()
        self._answers = AnswerTransport(transport, self.close_after_answer)
        self._delivery = ConnectionDelivery(transport, self.flow)
        extra = len(self.connections) - self._watch.limits.connections
        if extra > EXTRA_CONNECTIONS:
            self._warn(TOO_MANY_CONNECTIONS.cause)
            self._watch.meter.rejected(TOO_MANY_CONNECTIONS.code)
            transport.abort()
        elif extra > 0:
            self._refuse(TOO_MANY_CONNECTIONS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._delivery.was_cut = self.flow.write_paused
        if self._running is not None and not self._running.response_complete:
            self._disconnect(self._running)
        super().connection_lost(exc)
        del self._answers  # which refers to this object
        self._watch.lost()

    def shutdown(self) -> None:
        """Close the connection, after the answer that the application works on."""
        self.pipeline.clear()
        if self._running is None:
            self._close()
        else:
            self._running.keep_alive = False

    def close_after_answer(self) -> None:
        """Close the connection: at once if the client has nothing more to send, else when it has read the answer."""
        if self._in_body or self._in_head or self.pipeline:
            self._linger()
        else:
            self._close()

    def _close(self) -> None:
        self._discarding = self._changed = True
        self.transport.close()

    def _linger(self) -> None:
        """Close the connection when the client has closed it, or after LINGER_SECONDS."""
        self._discarding = self._changed = True
        self._running = None
        self.pipeline.clear()
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()

    # -- what the client sends -----------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        self._chunk_bytes = len(data)
        self._chunk_is_shared = self._in_body
        self._got_piece = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # it is answered as if it had not asked for another protocol
            self._discarding = True
        except httptools.HttpParserError:
            is_tls = self._refusal is NOT_HTTP and data.startswith(TLS_RECORD)
            self._refuse(TLS_ON_PLAIN_PORT if is_tls else self._refusal)
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes - self._other_bytes > self._watch.limits.header_bytes:
                self._refuse(HEAD_TOO_LARGE)
        elif self._in_body:
            self._between_bytes = 0 if self._got_piece else self._between_bytes + len(data)
            if self._between_bytes > self._watch.limits.header_bytes:
                self._refuse(HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[DELIVERY] = self._delivery  # type: ignore[literal-required]
        self._head_bytes = 0
        self._other_bytes = self._chunk_bytes if self._chunk_is_shared else 0
        self._in_head = self._changed = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it follows the body, where nothing that is read here may be
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._got_piece = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        limits = self._watch.limits
        may_be_large = self._head_bytes + self._chunk_bytes > limits.header_bytes
        if len(self.headers) > limits.header_count or (may_be_large and self._size_of_head() > limits.header_bytes):
            self._stop_parser(HEAD_TOO_LARGE)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parser(TOO_MANY_PIPELINED)
        super().on_headers_complete()
        cycle = self.cycle
        cycle.transport = self._answers  # type: ignore[assignment]
        if self.parser.should_upgrade():
            cycle.keep_alive = False
        if self._running is None:
            self._running = cycle
        self._in_head = False
        self._between_bytes = 0
        self._in_body = self._changed = True

    def _size_of_head(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _stop_parser(self, refusal: Refusal) -> None:
        """Make the parser fail."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._chunk_is_shared = self._changed = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._running = None
        self._changed = True
        if self._discarding or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, application = self.pipeline.pop()
            self._running = cycle
            task = self.loop.create_task(cycle.run_asgi(application))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    # -- limits --------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._read_deadline = None
        super().pause_writing()

    def check_time(self, now: float) -> None:
        """End the connection if its client takes too long. Called by the watch."""
        if self._changed or self._deadline == math.inf:
            self._changed = False
            self._deadline = now + self._allowed_seconds()
        elif now >= self._deadline:
            self._deadline = math.inf
            self._end_late()
        if self.flow.write_paused:
            if self._read_deadline is None:
                self._read_deadline = now + self._watch.limits.send_seconds
            elif now >= self._read_deadline:
                self._warn("an answer that is not read")
                self.transport.abort()

    def _allowed_seconds(self) -> float:
        """How long the client may take for what it does now."""
        limits, running = self._watch.limits, self._running
        if self._discarding or self.transport.is_closing():
            if running is not None:
                return math.inf
            return limits.send_seconds if self.transport.get_write_buffer_size() else LINGER_SECONDS
        if self._in_body or self._in_head:
            if self.flow.read_paused:  # the client cannot send
                return math.inf
            return limits.body_seconds if self._in_body else limits.header_seconds
        if running is not None:
            return math.inf
        return limits.header_seconds if self.cycle is None else limits.idle_seconds

    def _end_late(self) -> None:
        """End the connection of a client that has taken too long."""
        if self._discarding or self.transport.is_closing():
            self.transport.abort()
        elif self._in_head:
            self._refuse(HEAD_TOO_SLOW)
        elif self._in_body:
            self._refuse(BODY_TOO_SLOW)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self._close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with an error, unless an answer to an earlier request is due, and close the connection."""
        self._warn(refusal.cause)
        self._watch.meter.rejected(refusal.code)
        running, self._discarding = self._running, True
        if running is None and not self._in_body:
            self.transport.write(self._encoded(refusal))
            self._linger()
        elif running is None:  # the client has got an answer before it had sent all of the body
            self.transport.abort()
        elif running is not self.cycle or not running.more_body:  # it was received: it is answered
            running.keep_alive = False
            self.pipeline.clear()
        else:
            self._disconnect(running)
            if running.response_started:
                self.transport.abort()
            else:
                self.transport.write(self._encoded(refusal))
                self._linger()

    def _encoded(self, refusal: Refusal) -> bytes:
        body = msgspec.json.encode(Problem(refusal.code, refusal.message))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", JSON_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if refusal.status == 503:
            headers.append((b"retry-after", str(RETRY_AFTER_SECONDS).encode()))
        return b"".join([STATUS_LINE[refusal.status], *(b"%b: %b\r\n" % header for header in headers), b"\r\n", body])

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """Tell the application that nobody waits for its answer."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _warn(self, cause: str) -> None:
        self._watch.warnings.warn(cause, self.client[0] if self.client else "on a unix socket", self.loop.time())


class AnswerTransport:
    """The transport as the application's answers use it."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class ConnectionDelivery:
    """What becomes of the answers on a connection."""

    __slots__ = ("_flow", "_transport", "was_cut")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow
        self.was_cut = False
        """Whether the connection ended before all was sent."""

    @property
    def is_lost(self) -> bool:
        return self._transport.is_closing()

    async def is_taken(self) -> bool:
        while self._flow.write_paused:
            await self._flow.drain()
        return not self.was_cut
