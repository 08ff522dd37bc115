"""Targets that a user gives to open a broker.

Owns: `checked_target`, which refuses targets that this version cannot open, and `open_home`. A target is a directory,
memory, or the address of a server.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from penstock.broker.embedded import EmbeddedBroker
from penstock.broker.live_snapshot import LiveSnapshot
from penstock.broker.shared import open_shared
from penstock.logs.backends import MEMORY, Root
from penstock.logs.log import SEGMENT_BYTES
from penstock.operations import Home
from penstock.wire.http_address import CONNECT_TIMEOUT, HttpAddress, HttpOptions
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MIB

OPEN_WAIT = 10 * SECOND
"""How long an `open` waits by default for an owner that does not answer yet."""
TargetPath: TypeAlias = str | os.PathLike[str]
MIN_FREE_BYTES = 32 * MIB
"""The default space that `produce` leaves free. Completing items, and deleting old files, need some space too."""
_MISWRITTEN = re.compile(r"(memory|https?):|[\w.-]+:\d+$", re.IGNORECASE)
"""Texts that are meant as an address: a directory of such a name would be made unnoticed."""
_OF_DIRECTORIES: dict[str, Any] = {
    "roots": None,
    "own": True,
    "exclusive": False,
    "read_only": False,
    "durability": "fsync",
    "min_free_bytes": MIN_FREE_BYTES,
    "segment_bytes": SEGMENT_BYTES,
    "compression": True,
    "clock": None,
    "entropy": os.urandom,
    "files": None,
    "threaded": True,
}
"""Options that a server, and not its client, decides on; with their defaults."""
_OF_SERVERS: dict[str, Any] = {"api_key": None, "ca_file": None, "cert_file": None, "key_file": None, "connect_timeout": CONNECT_TIMEOUT}
"""Options that only the client of a server has; with their defaults."""


def is_url(target: TargetPath) -> bool:
    """Whether it is the address of a server."""
    return isinstance(target, str) and target.lower().startswith(("http://", "https://"))


def checked_target(target: TargetPath, roots: Sequence[TargetPath | Root] | None) -> Any:
    """The target with its further storage roots, for `EmbeddedBroker.open`; InvalidRequest when it cannot be opened.

    The address of a server is given back as it is.
    """
    if not isinstance(target, str | os.PathLike) or not isinstance(path := os.fspath(target), str):
        raise InvalidRequest(f"the target is {type(target).__name__}; give the path of a directory, or an address as text")
    if not path:
        raise InvalidRequest("the target is empty; give the path of a directory ('.' is this one), or http://host:port")
    if is_url(path):
        HttpAddress.parse(path)
        if roots:
            raise InvalidRequest(f"{path!r} is a server, which has its own storage roots; leave roots out")
        return path
    if "://" in path and path != MEMORY:
        scheme = path.partition("://")[0]
        raise InvalidRequest(f"{scheme:.80}://… cannot be opened; this version opens directories, http://, https:// and {MEMORY!r}")
    if path != MEMORY and _MISWRITTEN.match(path) and isinstance(target, str) and not os.path.isdir(path):
        advice = f"write http://host:port or {MEMORY!r}, or ./{path:.80} for a directory of that name"
        raise InvalidRequest(f"{path!r:.80} looks like an address and is none; {advice}")
    path = path if path == MEMORY else os.path.expanduser(path)
    if not roots:
        return path
    if path == MEMORY:
        raise InvalidRequest(f"{MEMORY!r} has no storage roots; leave roots out, or give a directory")
    if isinstance(roots, str | os.PathLike):
        raise InvalidRequest("roots is a single path; give a list of them")
    return [path, *roots]


def open_home(target: TargetPath, *, wait: int = OPEN_WAIT, **options: Any) -> Home:
    """Open the broker of a directory (created if it is new), of a server, or one in memory.

    `options` are those of `penstock.open`; the ones that do not fit the target must have their defaults.
    """
    if not is_url(target):
        _refuse_others(options, _OF_SERVERS, "is for a server, and the target is none; leave it out, or give http://host:port")
        return open_local(target, wait=wait, **{name: value for name, value in options.items() if name not in _OF_SERVERS})
    checked_target(target, options.get("roots"))
    _refuse_others(options, _OF_DIRECTORIES, "is the server's, and the target is its address; leave it out, or give a directory")
    try:
        from penstock.broker.http_home import open_http
    except ModuleNotFoundError as error:
        if error.name != "httptools":
            raise
        raise InvalidRequest("httptools is not installed, which http:// needs; run pip install 'penstock[http]'") from None
    given = {name: options.get(name) or default for name, default in _OF_SERVERS.items()}
    for name in ("ca_file", "cert_file", "key_file"):
        given[name] = os.fspath(given[name]) if given[name] else ""
    return open_http(str(target), HttpOptions(**{**given, "api_key": given["api_key"] or ""}), wait)


def _refuse_others(options: dict[str, Any], defaults: dict[str, Any], why: str) -> None:
    for name, default in defaults.items():
        if options.get(name, default) != default:
            raise InvalidRequest(f"{name} {why}")


def open_local(
    target: TargetPath,
    *,
    roots: Sequence[TargetPath | Root] | None = None,
    wait: int,
    own: bool = True,
    exclusive: bool = False,
    read_only: bool = False,
    **options: Any,
) -> Home:
    """Open the broker of a directory (created if it is new), or one in memory.

    `options` are those of `EmbeddedBroker.open`. With a clock, files or no threads of its own, which are for tests, a
    process shares its directory with no other.
    """
    found = checked_target(target, roots)
    if read_only and exclusive:
        raise InvalidRequest("read_only and exclusive exclude each other; give one of them")
    if not own and exclusive:
        raise InvalidRequest("exclusive is for the owner, which own=False does not allow; give one of them")
    if read_only:
        return LiveSnapshot.open(found, files=options.get("files"), clock=options.get("clock"))
    for_tests = options.get("clock") is not None or options.get("files") is not None or not options.get("threaded", True)
    if found == MEMORY or exclusive or for_tests:
        if not own:
            raise InvalidRequest("own=False needs a directory that another process owns; leave it out")
        return EmbeddedBroker.open(found, **options)
    shared = {name: value for name, value in options.items() if name not in ("clock", "files", "threaded")}
    return open_shared(found, own=own, wait=wait, **shared)
