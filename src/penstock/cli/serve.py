"""`penstock serve DIR`: serve a broker over HTTP.

Owns: the command. It opens the directory as any process does: as its owner, or through the process that owns it. The
settings come from flags, the environment and a TOML file (server/server_settings.py).
"""

import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.api._sync.broker import Broker
from penstock.broker.shared import SharedHome
from penstock.cli import option_values
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command
from penstock.cli.failures import MISSING_EXTRA, NEGATIVE, RETRY_LATER, USAGE, CommandFailed
from penstock.logs.backends import holds_broker
from penstock.server.api_keys import KeyFile
from penstock.server.audit import AuditLog
from penstock.server.bind_addresses import DEFAULT_BIND, check_exposure, close_listeners
from penstock.server.declared_queues import Comparison, apply, compare
from penstock.server.key_ring import KeyRing
from penstock.server.open_files import allow_open_files
from penstock.server.server_settings import CONFIG_VARIABLE, ServerSettings, WrongSettings, load_settings
from penstock.server.service_notice import tell_service_manager
from penstock.server.tls import tls_context
from penstock.words.errors import PenstockError
from penstock.words.logs import LEVELS

if TYPE_CHECKING:
    from penstock.api.home_calls import ServedHome
    from penstock.server.http_server import HttpServer

_log = logging.getLogger("penstock")
group = typer.Typer()


@command(group, "serve")
def serve(
    session: CommandContext,
    directory: Annotated[
        str | None, typer.Argument(metavar="DIR", help="The broker's directory, instead of --broker.", show_default=False)
    ] = None,
    bind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="HOST:PORT, [IPV6]:PORT or unix:PATH; may be repeated. Port 0 is a free one, which is printed."
            f"  [default: {DEFAULT_BIND}]",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help=f"A TOML file with settings.  [default: ${CONFIG_VARIABLE}]", show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any setting, such as limits.connections=500; may be repeated."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Change nothing: print what is wrong with the settings (exit code 2), what differs in the declared queues "
            "(exit code 1), or that nothing differs (exit code 0).",
        ),
    ] = False,
    create: Annotated[bool, typer.Option("--create", help="Create the directory if it does not exist.")] = False,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="The certificate, in PEM format.", show_default=False)] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="The private key of the certificate.", show_default=False)] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Clients need a certificate of this authority.", show_default=False)
    ] = None,
    allow_without_keys: Annotated[
        bool, typer.Option("--allow-without-keys", help="Let other machines connect although there is no API key.")
    ] = False,
    drain_timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long running requests may take at the end.  [default: 30s]", show_default=False),
    ] = None,
    ready_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the URLs to this file when requests are accepted.", show_default=False)
    ] = None,
    audit_file: Annotated[str | None, typer.Option(metavar="FILE", help="Append the audit log to this file.", show_default=False)] = None,
    durability: Annotated[
        str | None,
        typer.Option(
            metavar="fsync|interval|os",
            help="When items count as stored, in queues without a durability of their own.  [default: fsync]",
            show_default=False,
        ),
    ] = None,
    min_free: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Refuse new items when the disk has less free space.  [default: 32MiB]", show_default=False),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="text|json", help="How the log is written to stderr.  [default: text]", show_default=False)
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(metavar="|".join(LEVELS), help="The least level that is logged.  [default: info]", show_default=False),
    ] = None,
) -> None:
    """Serve the broker over HTTP, until SIGTERM or Ctrl-C. Prints a line when requests are accepted.

    On a signal, requests that wait for items are answered at once and the others may finish; a second signal ends them.
    SIGHUP reads the certificate again. Exit code 0: all requests were answered; 1: some were ended unfinished.
    """
    given = {
        "bind": ("--bind", bind),
        "tls.cert": ("--tls-cert", tls_cert),
        "tls.key": ("--tls-key", tls_key),
        "tls.client_ca": ("--tls-client-ca", tls_client_ca),
        "allow_without_keys": ("--allow-without-keys", allow_without_keys or None),
        "drain_seconds": ("--drain-timeout", drain_timeout),
        "ready_file": ("--ready-file", ready_file),
        "audit_file": ("--audit-file", audit_file),
        "broker.create": ("--create", create or None),
        "broker.durability": ("--durability", durability),
        "broker.min_free_bytes": ("--min-free", min_free),
        "log.format": ("--log-format", log_format),
        "log.level": ("--log-level", log_level),
    }
    pairs = option_values.parse_pairs(settings or (), "--set", "NAME=VALUE, such as limits.connections=500")
    flags: dict[str, tuple[str, Any]] = {name: (f"--set {name}", value) for name, value in pairs.items()}
    flags |= {name: (flag, value) for name, (flag, value) in given.items() if value is not None and value != []}
    session = session.with_options(directory, False)
    if check:
        _check(session, flags, config)
        return
    loaded = load_settings(flags, os.environ, config)
    session.log.choose(loaded.log.format, loaded.log.level)
    session = _of_settings(session, loaded)
    if not loaded.broker.create:
        session.require_broker("penstock serve --create")
    _run(session, loaded)


def _of_settings(session: CommandContext, settings: ServerSettings) -> CommandContext:
    """The context with the directory and the roots of the settings, where the command line names none."""
    if not session.names_broker:
        session = session.with_options(settings.broker.directory, False)
    session.roots = session.roots or [*settings.broker.roots]
    session.require_directory("a server opens a directory of its own machine")
    assert session.target
    if os.path.isfile(session.target):
        raise CommandFailed(f"{session.target} is a file; give a directory")
    return session


def _has_keys(session: CommandContext) -> bool:
    return KeyFile(session.target).read() is not None


# -- serve -------------------------------------------------------------------------------------------


def _run(session: CommandContext, settings: ServerSettings) -> None:
    server_class = _server_class()
    unfinished = 0
    with _log_to_stderr(session):
        tls = settings.tls if settings.tls.cert else None
        if tls is not None:
            tls_context(tls)  # before anything is opened, so that a wrong file is told at once
        warnings = check_exposure(
            settings.addresses, has_keys=_has_keys(session), allowed_without_keys=settings.allow_without_keys, has_tls=tls is not None
        )
        with _bound(settings) as listeners, closing(_audit_log(settings)) as audit, _interrupted_by_sigterm():
            with session.ended_by_interrupt(), _opened(session, settings) as broker:
                _apply_queues(broker, settings)
                for warning in filter(None, [*warnings, allow_open_files(settings.limits.connections)]):
                    _log.warning("%s", warning)
                keys = KeyRing(session.target)
                server = server_class(
                    cast("ServedHome", broker.home),
                    listeners,
                    settings.limits,
                    keys=keys,
                    audit=audit,
                    metrics=settings.metrics,
                    health=settings.health,
                    tls=tls,
                    drain_seconds=settings.drain_seconds,
                    trusted_proxies=settings.trusted_proxies,
                )
                document = {
                    "urls": server.urls,
                    "directory": session.target,
                    "owner": cast(SharedHome, broker.home).wait_until_owner(0),
                    "keys": not keys.is_open,
                    "tls": tls is not None,
                    "pid": os.getpid(),
                }
                _serve(session, settings, server, audit, document)
                unfinished = server.unfinished
            _log.info("closed")
    if unfinished:
        raise typer.Exit(NEGATIVE)


def _serve(session: CommandContext, settings: ServerSettings, server: "HttpServer", audit: AuditLog, document: Mapping[str, Any]) -> None:
    def started() -> None:
        role = "owner of the directory" if document["owner"] else "client of the directory's owner"
        facts = f"{role}, keys {'on' if document['keys'] else 'off'}, TLS {'on' if document['tls'] else 'off'}"
        if settings.ready_file:
            _write_ready_file(settings.ready_file, server.urls)
        session.print_next_answer(document, f"serving {document['directory']} on {', '.join(server.urls)}: {facts}")
        tell_service_manager("READY=1", f"STATUS=serving on {', '.join(server.urls)}")

    def draining() -> None:
        session.end_echo()
        tell_service_manager("STOPPING=1", "STATUS=draining")

    try:
        server.run(
            started,
            on_reload=audit.reopen,
            on_draining=draining,
            handle_signals=True,
        )
    finally:
        if settings.ready_file:
            with suppress(FileNotFoundError):
                os.unlink(settings.ready_file)


def _audit_log(settings: ServerSettings) -> AuditLog:
    try:
        return AuditLog(settings.audit_file or None)
    except OSError as error:
        raise CommandFailed(f"the audit log {settings.audit_file} cannot be opened ({error.strerror}); fix the path") from None


def _server_class() -> "type[HttpServer]":
    try:
        from penstock.server.http_server import HttpServer
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("penstock"):
            raise
        raise CommandFailed(
            f"the server needs {error.name}, which is not installed; pip install 'penstock[server]'", MISSING_EXTRA
        ) from None
    return HttpServer


@contextmanager
def _opened(session: CommandContext, settings: ServerSettings) -> Iterator[Broker]:
    chosen = settings.broker
    with session.broker(
        create=chosen.create,
        durability=chosen.durability,
        min_free_bytes=chosen.min_free_bytes,
        segment_bytes=chosen.segment_bytes,
        compression=chosen.compression,
    ) as broker:
        yield broker


@contextmanager
def _bound(settings: ServerSettings) -> Iterator[list[socket.socket]]:
    """Sockets of all addresses. They do not listen yet."""
    listeners: list[socket.socket] = []
    try:
        for address in settings.addresses:
            try:
                listeners += address.bind()
            except OSError as error:
                raise CommandFailed(str(error), RETRY_LATER) from None
        yield listeners
    finally:
        close_listeners(listeners)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """While the directory is opened, SIGTERM raises KeyboardInterrupt, as SIGINT does."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def _log_to_stderr(session: CommandContext) -> Iterator[None]:
    """Print Penstock's log, and what uvicorn has to say, as the settings want it."""
    uvicorn_log, handler = logging.getLogger("uvicorn"), _ForwardingHandler(logging.WARNING)
    former = uvicorn_log.propagate
    uvicorn_log.propagate = False
    uvicorn_log.addHandler(handler)
    try:
        with session.log_to_stderr(traces=True):
            yield
    finally:
        uvicorn_log.removeHandler(handler)
        uvicorn_log.propagate = former


class _ForwardingHandler(logging.Handler):
    """Gives records of another logger to that of Penstock."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.handle(record)


def _write_ready_file(path: str, urls: Sequence[str]) -> None:
    """Write the file so that nobody reads a part of it."""
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.writelines(f"{url}\n" for url in urls)
        os.replace(f"{path}.new", path)
    except OSError as error:
        raise CommandFailed(f"the ready file {path} cannot be written ({error.strerror}); fix the path") from None


# -- declared queues ---------------------------------------------------------------------------------


def _apply_queues(broker: Broker, settings: ServerSettings) -> None:
    comparison = compare(broker.home, settings.queues)
    if comparison.problems:
        raise WrongSettings(comparison.problems)
    apply(broker.home, comparison)


def _check(session: CommandContext, flags: Mapping[str, tuple[str, Any]], config: str | None) -> None:
    """Print what a start would find wrong, and what it would change."""
    problems: list[str] = []
    differences: list[dict[str, str]] = []
    try:
        settings = load_settings(flags, os.environ, config)
        session = _of_settings(session, settings)
        problems += _problems(session, settings)
        found = _compared(session, settings)
        problems += found.problems
        differences += [{"queue": one.queue, "change": one.change, "text": str(one)} for one in found.differences]
        if not holds_broker(session.target):
            differences.insert(0, {"queue": "", "change": "create", "text": f"directory {session.target}: is created"})
    except WrongSettings as error:
        problems += error.problems
    lines = [*problems, *(one["text"] for one in differences)]
    session.print_answer({"problems": problems, "differences": differences}, *(lines or ["nothing differs"]))
    if lines:
        raise typer.Exit(USAGE if problems else NEGATIVE)


def _problems(session: CommandContext, settings: ServerSettings) -> Sequence[str]:
    found = []
    try:
        if settings.tls.cert:
            tls_context(settings.tls)
    except PenstockError as error:
        found.append(str(error))
    try:
        check_exposure(
            settings.addresses,
            has_keys=_has_keys(session),
            allowed_without_keys=settings.allow_without_keys,
            has_tls=bool(settings.tls.cert),
        )
    except PenstockError as error:
        found.append(str(error))
    return found


def _compared(session: CommandContext, settings: ServerSettings) -> Comparison:
    if settings.broker.create and not holds_broker(session.target):
        return compare(None, settings.queues)
    with session.view() as broker:
        return compare(broker.home, settings.queues)
