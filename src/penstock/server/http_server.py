"""Runs the application under uvicorn.

Owns: `HttpServer`, and how it ends. When it is stopped it takes no new connections, gives waiting leases their answer
(no items), closes idle connections and lets the other requests finish, at most for the drain timeout. A second stop
ends it at once. Requests that are ended unfinished are answered with OutcomeUnknown.
"""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from penstock.api.home_calls import ServedHome
from penstock.server.application import Application
from penstock.server.audit import AuditLog
from penstock.server.bind_addresses import BACKLOG, close_listeners, listen, url_of
from penstock.server.health import HealthSettings
from penstock.server.http_protocol import LINGER_SECONDS, ConnectionWatch, HttpProtocol
from penstock.server.key_ring import KeyRing
from penstock.server.metrics import MetricsSettings
from penstock.server.server_limits import ServerLimits
from penstock.server.tls import TlsFiles, tls_context
from penstock.words.errors import InvalidRequest

__all__ = ["DRAIN_SECONDS", "HttpServer", "listen"]

_log = logging.getLogger("penstock")
DRAIN_SECONDS = 30.0
LAST_SECONDS = 1.0
"""How long the answers of requests that were ended unfinished may take."""


class HttpServer:
    """A server of a home, on listening sockets."""

    def __init__(
        self,
        home: ServedHome,
        listeners: Sequence[socket.socket],
        limits: ServerLimits | None = None,
        *,
        keys: KeyRing | None = None,
        audit: AuditLog | None = None,
        metrics: MetricsSettings | None = None,
        health: HealthSettings | None = None,
        tls: TlsFiles | None = None,
        drain_seconds: float = DRAIN_SECONDS,
        trusted_proxies: Sequence[str] = (),
    ) -> None:
        """keys: None when requests need none. tls: None is plain HTTP. trusted_proxies: addresses whose X-Forwarded-For
        header is believed.
        """
        self._limits = limits or ServerLimits()
        self.application = Application(home, self._limits, keys=keys, audit=audit, metrics=metrics, health=health)
        self.urls = [url_of(listener, tls is not None) for listener in listeners]
        config = uvicorn.Config(
            self.application,
            loop="uvloop",
            lifespan="on",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=bool(trusted_proxies),
            forwarded_allow_ips=[*trusted_proxies],
        )
        self._server = DrainingServer(config, self.application, listeners, self._limits, tls, drain_seconds)

    @property
    def url(self) -> str:
        """The address of the first listener."""
        return self.urls[0]

    @property
    def draining(self) -> bool:
        """Whether the server has begun to end."""
        return self.application.draining

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._server.server_state.connections)

    @property
    def requests(self) -> int:
        """How many requests the application works on."""
        return len(self._server.server_state.tasks)

    @property
    def unfinished(self) -> int:
        """How many requests were ended unfinished when the server was stopped."""
        return self._server.unfinished

    def run(
        self,
        on_started: Callable[[], None] | None = None,
        *,
        on_reload: Callable[[], None] | None = None,
        on_draining: Callable[[], None] | None = None,
        handle_signals: bool = False,
    ) -> None:
        """Serve until `stop`.

        on_started: called when connections are accepted. on_reload: called by `reload`, for files that others keep
        open. on_draining: called when the server begins to end. handle_signals: SIGTERM and SIGINT stop the server,
        SIGHUP reloads it.
        """
        self._server.on_started, self._server.on_reload, self._server.on_draining = on_started, on_reload, on_draining
        self._server.handles_signals = handle_signals
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._server.serve())

    def stop(self) -> None:
        """End `run`, from any thread; called twice, at once."""
        self._server.stop()

    def reload(self) -> None:
        """Read the files of the certificate again, from any thread: new connections use them."""
        self._server.reload()


class DrainingServer(uvicorn.Server):
    """uvicorn's server with our protocol and our way to end."""

    def __init__(
        self,
        config: uvicorn.Config,
        application: Application,
        listeners: Sequence[socket.socket],
        limits: ServerLimits,
        tls: TlsFiles | None,
        drain_seconds: float,
    ) -> None:
        super().__init__(config)
        self.unfinished = 0
        self.on_started: Callable[[], None] | None = None
        self.on_reload: Callable[[], None] | None = None
        self.on_draining: Callable[[], None] | None = None
        self.handles_signals = False
        self._application = application
        self._listeners = listeners
        self._limits = limits
        self._tls = tls
        self._context = None if tls is None else tls_context(tls)
        self._drain_seconds = drain_seconds
        self._watch: ConnectionWatch
        self._reloads: set[asyncio.Task[None]] = set()
        self._stop_requests = 0
        self._stop_requested = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- start ---------------------------------------------------------------------------------------

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = loop = asyncio.get_running_loop()
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the application did not start; the log says why")
        await self.on_tick(0)  # sets the headers of all answers
        loop.set_exception_handler(self._report_error)
        self._watch = ConnectionWatch(self._limits, self.server_state, self._application.meter)
        self._watch.start()
        self.servers = []
        try:
            for listener in self._listeners:
                self.servers.append(await self._listen(listener))
            if not self._stop_requests and self.on_started is not None:
                self.on_started()
        except BaseException:
            self.force_exit = True
            await self.shutdown()
            raise
        self.started = True
        if self._stop_requests:
            self._see_stop()

    async def _listen(self, listener: socket.socket) -> asyncio.Server:
        """Accept connections on a copy of the socket: it stays open when this server of the event loop is replaced."""
        assert self._loop is not None
        options: dict[str, Any] = {"sock": listener.dup(), "ssl": self._context, "backlog": BACKLOG}
        if self._context is not None:
            options |= {"ssl_handshake_timeout": self._limits.header_seconds, "ssl_shutdown_timeout": LINGER_SECONDS}
        create = self._loop.create_unix_server if listener.family == socket.AF_UNIX else self._loop.create_server
        made: asyncio.Server = await create(self._make_protocol, **options)
        return made

    def _make_protocol(self) -> HttpProtocol:
        return HttpProtocol(self._watch, self.config, self.server_state, self.lifespan.state, self._loop)

    def _report_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop. (uvloop reports no handshakes that fail: they are the clients' errors.)"""
        _log.error("the server: %s", context.get("message"), exc_info=context.get("exception"))

    # -- while it runs -------------------------------------------------------------------------------

    async def main_loop(self) -> None:
        while not self._stop_requests:
            await self.on_tick(0)  # the date in the headers of answers
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._stop_requested.wait()

    def stop(self) -> None:
        """Begin to end; from any thread. The second call ends at once."""
        self._stop_requests += 1
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._see_stop)

    def _see_stop(self) -> None:
        self.should_exit = True
        self.force_exit = self._stop_requests > 1
        self._stop_requested.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if not self.handles_signals:
            yield
            return
        assert threading.current_thread() is threading.main_thread()
        loop = asyncio.get_running_loop()
        handlers = {signal.SIGTERM: self.stop, signal.SIGINT: self.stop, signal.SIGHUP: self.reload}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    def reload(self) -> None:
        """Read the files of the certificate again, from any thread. If they cannot be used, the old ones stay."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._reload)

    def _reload(self) -> None:
        if self.on_reload is not None:
            self.on_reload()
        if self._tls is None:
            _log.info("reloaded; the server has no certificate")
            return
        try:
            self._context = tls_context(self._tls)
        except InvalidRequest as error:
            _log.error("the certificate is not replaced: %s", error)
            return
        reloading = asyncio.ensure_future(self._listen_again(self._tls.cert))
        self._reloads.add(reloading)
        reloading.add_done_callback(self._reloads.discard)

    async def _listen_again(self, cert: str) -> None:
        """Accept connections with the new certificate. Those that wait to be accepted meanwhile are not lost."""
        for place, listener in enumerate(self._listeners):
            if self.should_exit:
                return
            former = self.servers[place]
            self.servers[place] = await self._listen(listener)
            former.close()
        _log.info("new connections get the certificate in %s", cert)

    # -- end -----------------------------------------------------------------------------------------

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for reloading in [*self._reloads]:
            await reloading
        requests = len(self.server_state.tasks)
        for server in self.servers:
            server.close()
        close_listeners(self._listeners)
        waiting = self._application.drain()
        if self.on_draining is not None:
            self.on_draining()
        again = "; a second signal (Ctrl-C) ends at once" if self.handles_signals else ""
        _log.info("draining: %s, %s%s", _count(requests, "request"), _count(waiting, "waiting lease"), again)
        for connection in self._watch.connections:
            connection.shutdown()
        if not await self._wait_for_end():
            await self._end_unfinished()
        self._watch.stop()
        await self.lifespan.shutdown()

    async def _wait_for_end(self) -> bool:
        """Wait until all requests are answered; False after the drain timeout, or when the server was stopped again."""
        assert self._loop is not None
        self._stop_requested.clear()
        if self.force_exit:
            return False
        answered = self._loop.create_task(self._all_answered())
        again = self._loop.create_task(self._stop_requested.wait())
        await asyncio.wait((answered, again), timeout=self._drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        return answered.done() or not answered.cancel()

    async def _all_answered(self) -> None:
        while self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks)
        await self._watch.wait_until_none_left()

    async def _end_unfinished(self) -> None:
        """Cancel the requests that run: each gets an error. Then end all connections."""
        for connection in self._watch.connections:
            if connection.flow.write_paused:  # its client does not read
                connection.transport.abort()
        await asyncio.sleep(0)  # their requests see it
        tasks = [*self.server_state.tasks]
        self.unfinished = len(tasks)
        if tasks:
            _log.warning("%s ended unfinished", _count(len(tasks), "request"))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=LAST_SECONDS)
        for connection in self._watch.connections:
            connection.transport.abort()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
