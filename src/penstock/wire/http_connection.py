"""The client's side of HTTP/1.1: connections of an event loop to one server.

Owns: `HttpConnection`, which carries one request at a time, `ConnectionPool` and `ServerUnreachable`. Nothing here is
repeated: a request whose connection ends gets `ConnectionLost`, and the caller decides (broker/http_client.py).
The head and the body of a response are bounded. A forked child closes the sockets when it starts (words/forks.py).
"""

import asyncio
import os
import socket
import ssl
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import httptools

from penstock.wire.connection import ConnectionLost
from penstock.wire.http_address import SCHEMES, SERVER_PORT, HttpAddress
from penstock.wire.messages import MAX_MESSAGE_BYTES
from penstock.words import forks
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import KIB
from penstock.words.threads import InterruptSafeThread

MAX_HEAD_BYTES = 64 * KIB
MAX_BODY_BYTES = MAX_MESSAGE_BYTES
IDLE_SECONDS = 30.0
"""How long a connection is kept without a request. Servers and proxies keep it longer, so they seldom close it just
when a request is sent."""
JOINED_BYTES = 64 * KIB
"""A smaller body is sent together with the head."""


class ServerUnreachable(Exception):
    """No connection could be made, so nothing was sent."""


class ResponseTooLarge(ConnectionLost):
    """The response is larger than what is read here; a repetition would be, too."""


class HttpResponse(NamedTuple):
    status: int
    headers: dict[bytes, bytes]
    """By name in lower case; of several with one name the last."""
    body: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()


class HttpConnection(asyncio.Protocol):
    """One connection. The pool makes it."""

    def __init__(self) -> None:
        self.requests = 0
        """How many requests were sent."""
        self.idle_since = 0.0
        self._transport: Any = None
        self._parser: Any = None
        self._answered: asyncio.Future[HttpResponse] | None = None
        self._is_reusable = True
        self._clear()

    def _clear(self) -> None:
        """Forget the last response."""
        self._head_size = self._body_size = 0
        self._has_head = False
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._response: HttpResponse | None = None

    # -- requests ------------------------------------------------------------------------------------

    async def post(self, head: bytes, body: bytes) -> HttpResponse:
        """Send a request; gives the response. ConnectionLost when there is none: it may have been executed."""
        assert self._answered is None
        self.requests += 1
        self._clear()
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self.fail(ConnectionLost("the connection was closed"))
        elif len(body) < JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        response = await self._answered
        self._answered = self._response = None
        return response

    @property
    def is_usable(self) -> bool:
        """Whether it can carry another request."""
        return self._is_reusable and self._answered is None and not self._transport.is_closing()

    async def read_late_response(self) -> HttpResponse:
        """After the task that posted a request was cancelled: tell the server that this client leaves, and give the
        response if it was on its way. ConnectionLost when it was not.

        Only the sending side is closed, so that what the server has sent can still be read.
        """
        self._is_reusable = False
        if self._response is not None:
            return self._response
        answered: asyncio.Future[HttpResponse] = asyncio.get_running_loop().create_future()
        self._answered = answered
        if self._transport.is_closing() or self._transport.get_write_buffer_size():
            self.fail(ConnectionLost("the request was not sent whole"))
        else:
            try:
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_WR)
            except OSError as error:
                self.fail(ConnectionLost(str(error)))
        return await answered

    def close(self) -> None:
        """End the connection at once."""
        self._is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def fail(self, why: ConnectionLost) -> None:
        """End the connection, and the request with this error."""
        self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(why)

    # -- called by the event loop --------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answered is None or self._response is not None:  # a server that closes an idle connection may say why
            self.close()
            return
        if not self._has_head:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(ConnectionLost(f"the server did not answer in HTTP ({error})"))
        if not self._has_head and self._head_size > MAX_HEAD_BYTES:
            self.fail(ResponseTooLarge(f"the head of the answer has more than {MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answered is None or self._response is not None:
            return
        delimited = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        if self._has_head and not delimited and error is None:  # such a body ends with the connection
            self._finish()
        else:
            self.fail(ConnectionLost(str(error) if error is not None else "the server closed the connection without an answer"))

    # -- called by the parser ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._response is not None:  # more than was asked for
            self._is_reusable, self._headers = False, {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._has_head = True
        length = self._headers.get(b"content-length", b"")
        if length.isdigit():
            self._check_size(int(length))

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._check_size(self._body_size):
            self._body.append(body)

    def _check_size(self, size: int) -> bool:
        if size <= MAX_BODY_BYTES:
            return True
        self.fail(ResponseTooLarge(f"the answer has {size} bytes or more, of {MAX_BODY_BYTES} that are allowed"))
        return False

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # "100 Continue": the answer follows
            self._clear()
            return
        if not self._parser.should_keep_alive() or self._transport.get_write_buffer_size():
            self._is_reusable = False
        self._finish()

    def _finish(self) -> None:
        """Note the response, also when the task that waited for it was cancelled."""
        if self._response is None:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._response = HttpResponse(self._parser.get_status_code(), self._headers, body)
            self._body = []
            if self._answered is not None and not self._answered.done():
                self._answered.set_result(self._response)

    def __repr__(self) -> str:
        state = "closed" if self._transport is None or self._transport.is_closing() else "idle" if self._answered is None else "busy"
        return f"HttpConnection({state}, {self.requests} requests)"


class ConnectionPool:
    """The connections to one server. Only for the event loop's thread."""

    def __init__(self, address: HttpAddress, tls: ssl.SSLContext | None, connect_timeout: int) -> None:
        self._address = address
        self._tls = tls
        self._connect_seconds = connect_timeout / SECOND
        self._idle: list[HttpConnection] = []
        """The one used last is at the end, and is used next."""
        self._busy: set[HttpConnection] = set()
        self._closing_idle: asyncio.TimerHandle | None = None

    async def take(self) -> HttpConnection:
        """A connection for one request; `give_back` must follow.

        ServerUnreachable when none can be made now; InvalidRequest when none can ever be made: the certificate is
        wrong, say.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                self._busy.add(connection)
                return connection
            connection.close()
        connection = await self._connect()
        self._busy.add(connection)
        return connection

    def give_back(self, connection: HttpConnection) -> None:
        self._busy.discard(connection)
        if not connection.is_usable:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._closing_idle is None:
            self._closing_idle = loop.call_later(IDLE_SECONDS, self._close_idle)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        old = [one for one in self._idle if loop.time() - one.idle_since >= IDLE_SECONDS or not one.is_usable]
        self._idle = [one for one in self._idle if one not in old]
        for one in old:
            one.close()
        self._closing_idle = loop.call_later(IDLE_SECONDS / 4, self._close_idle) if self._idle else None

    def close(self) -> None:
        for connection in [*self._idle, *self._busy]:
            connection.fail(ConnectionLost("the broker was closed"))
        self._idle.clear()
        if self._closing_idle is not None:
            self._closing_idle.cancel()

    # -- connecting ----------------------------------------------------------------------------------

    async def _connect(self) -> HttpConnection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                found = await self._resolve()
            failure: Exception = OSError("the name has no address")
            for family, kind, protocol, _, address in found:
                try:
                    async with asyncio.timeout(self._connect_seconds / len(found)):
                        return await self._connect_to(family, kind, protocol, address)
                except ssl.SSLError as error:
                    raise _tls_failure(self._address, error) from error
                except (OSError, TimeoutError) as error:
                    failure = error
            raise failure
        except TimeoutError:
            raise ServerUnreachable(f"it does not answer within {self._connect_seconds:g} s") from None
        except OSError as error:
            hint = ""
            if isinstance(error, ConnectionRefusedError) and self._address.port in SCHEMES.values():
                hint = f"; `penstock serve` listens on port {SERVER_PORT} unless it is told another"
            is_system_error = error.errno is not None and not isinstance(error, socket.gaierror)
            why = os.strerror(error.errno or 0) if is_system_error else error.strerror or str(error)
            raise ServerUnreachable(f"{why}{hint}") from error

    async def _resolve(self) -> list[Any]:
        """The socket addresses of the server. A name is looked up by another thread, since that may take long."""
        look_up = partial(socket.getaddrinfo, self._address.host, self._address.port, type=socket.SOCK_STREAM)
        with suppress(socket.gaierror):
            return look_up(flags=socket.AI_NUMERICHOST)
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[Any]] = loop.create_future()

        def run() -> None:
            try:
                answer: Any = look_up()
            except (OSError, UnicodeError) as error:
                answer = error if isinstance(error, OSError) else OSError(str(error))
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_set_outcome, found, answer)

        InterruptSafeThread(run)
        return await found

    async def _connect_to(self, family: int, kind: int, protocol: int, address: Any) -> HttpConnection:
        loop = asyncio.get_running_loop()
        sock = forks.open_tracked(lambda: socket.socket(family, kind, protocol))
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await loop.sock_connect(sock, address)
            name = self._address.host if self._tls is not None else None
            _, connection = await loop.create_connection(HttpConnection, sock=sock, ssl=self._tls, server_hostname=name)
            return connection
        except BaseException:
            sock.close()
            raise


def _set_outcome(future: "asyncio.Future[Any]", outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _tls_failure(address: HttpAddress, error: ssl.SSLError) -> Exception:
    """What a failed handshake means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        what = f"the certificate of {address.url} is not trusted ({error.verify_message})"
        return InvalidRequest(f"{what}; give the file of its authority as ca_file=…, or the host name that is in it")
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return InvalidRequest(f"{address.url} does not speak TLS ({error.reason}); give the address as http://…, or another port")
    return ServerUnreachable(f"the TLS handshake failed ({error.reason or error})")
