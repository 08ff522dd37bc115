"""The addresses on which the server listens.

Owns: `BindAddress`, its text form ("127.0.0.1:2319", "[::1]:2319", "localhost:2319" or "unix:/run/penstock.sock"), and
`check_exposure`, the rule that a server without keys is for this machine only.
"""

import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, NamedTuple

from penstock.words.errors import InvalidRequest

DEFAULT_BIND = "127.0.0.1:2319"
UNIX = "unix:"
UNIX_MODE = 0o660
"""Who may connect to a unix socket: the user and the group of the server."""
BACKLOG = 1024
_HOW = "give HOST:PORT, [IPV6]:PORT or unix:PATH, such as 127.0.0.1:2319"
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A client whose machine has vanished is noticed after a minute, and its waiting leases end."""


class BindAddress(NamedTuple):
    """An address as the operator wrote it."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""
    """Of a unix socket."""

    @classmethod
    def parse(cls, text: str) -> "BindAddress":
        """Raises InvalidRequest when it is no address."""
        if text.startswith(UNIX):
            path = text.removeprefix(UNIX)
            if not os.path.isabs(path):
                raise InvalidRequest(f"{text!r} is no address to listen on; give the whole path of the unix socket")
            return cls(text, path=path)
        host, colon, port = text.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not colon or not bare or (":" in bare) != (bare is not host) or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
            raise InvalidRequest(f"{text!r} is no address to listen on; {_HOW}")
        return cls(text, bare, int(port))

    def resolve(self) -> list[tuple[socket.AddressFamily, Any]]:
        """The families and addresses of the sockets."""
        if self.path:
            return [(socket.AF_UNIX, self.path)]
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            raise InvalidRequest(f"{self.text!r} is no address of this machine ({error}); {_HOW}") from error
        return list(dict.fromkeys((family, address) for family, _, _, _, address in found))

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can connect."""
        return all(family == socket.AF_UNIX or ip_address(address[0]).is_loopback for family, address in self.resolve())

    def bind(self) -> list[socket.socket]:
        """Sockets that do not listen yet. OSError when the address is in use or not one of this machine."""
        bound: list[socket.socket] = []
        try:
            for family, address in self.resolve():
                bound.append(_bind_unix(address) if family == socket.AF_UNIX else _bind_tcp(family, address))
        except OSError as error:
            close_listeners(bound)
            raise OSError(f"cannot listen on {self.text} ({error.strerror or error}); choose another address") from error
        return bound


def _bind_tcp(family: socket.AddressFamily, address: Any) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit this
        for option, value in _KEEP_ALIVE:
            bound.setsockopt(socket.IPPROTO_TCP, option, value)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _bind_unix(path: str) -> socket.socket:
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError("a file that is no socket is there")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)  # of a server that was killed
            else:
                raise OSError("another process listens there")
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    former = os.umask(0o777 & ~UNIX_MODE)
    try:
        bound.bind(path)
    except BaseException:
        bound.close()
        raise
    finally:
        os.umask(former)
    return bound


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address."""
    (bound,) = BindAddress(f"{host}:{port}", host, port).bind()
    bound.listen(BACKLOG)
    return bound


def url_of(listener: socket.socket, has_tls: bool) -> str:
    """The URL of a listener, with its real port; for a unix socket unix:PATH."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{'https' if has_tls else 'http'}://{host}:{name[1]}"


def close_listeners(listeners: Sequence[socket.socket]) -> None:
    """Close sockets, and remove the files of unix sockets."""
    for listener in listeners:
        with suppress(OSError):
            if listener.family == socket.AF_UNIX and listener.fileno() >= 0:
                os.unlink(listener.getsockname())
        listener.close()


def check_exposure(addresses: Sequence[BindAddress], *, has_keys: bool, allowed_without_keys: bool, has_tls: bool) -> list[str]:
    """Raise InvalidRequest if other machines can connect and no key exists; gives warnings."""
    exposed = [address.text for address in addresses if not address.is_local]
    if not exposed:
        return []
    where = ", ".join(exposed)
    if has_keys:
        return [] if has_tls else [f"keys are sent to {where} without encryption; set tls.cert and tls.key, or use a proxy with TLS"]
    if not allowed_without_keys:
        raise InvalidRequest(
            f"{where} can be reached from other machines, and there is no API key; create one with `penstock keys create`, "
            "listen on 127.0.0.1, or let everybody in with --allow-without-keys"
        )
    return [f"everybody who can reach {where} can read and change all queues: there is no API key"]
