"""Where a Penstock server is, and how a client shows who it is.

Owns: `HttpAddress`, the parsed address of a server, and `HttpOptions`. The API key is in no message, no log and no
`repr`; it is in the pickle of a broker, whose receiver needs it.
"""

import os
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest

SCHEMES = {"http": 80, "https": 443}
"""Scheme → its standard port."""
SERVER_PORT = 2319
"""The port of `penstock serve`, unless it is told another."""
KEY_VARIABLE = "PENSTOCK_API_KEY"
CONNECT_TIMEOUT = 5 * SECOND
MAX_URL = 2_000
MAX_KEY = 1_000


class HttpAddress(NamedTuple):
    """The parts of a server's address."""

    is_secure: bool
    host: str
    """A name or an IP address, without brackets."""
    port: int
    base: str
    """The path before the paths of the server: "" or "/queues", say."""

    @classmethod
    def parse(cls, url: str) -> "HttpAddress":
        """InvalidRequest when it is not the address of a server. A password in it is not repeated in the message."""
        if len(url) > MAX_URL or not url.isascii() or any(char <= " " or char == "\x7f" for char in url):
            raise InvalidRequest("the address has spaces, control or non-ASCII characters, or is very long; give it as http://host:port")
        try:
            parts = urlsplit(url)
            port, host = parts.port, parts.hostname
        except ValueError as error:
            raise InvalidRequest(f"the address cannot be understood ({error}); give it as http://host:port") from None
        if parts.scheme not in SCHEMES:
            raise InvalidRequest(f"the address begins with {parts.scheme!r}; give http://host:port or https://host:port")
        if "@" in parts.netloc:
            raise InvalidRequest(f"the address has a user name or password; give the API key as api_key=…, or in {KEY_VARIABLE}")
        if not host:
            raise InvalidRequest(f"{url!r} has no host; give it as http://host:port")
        if parts.query or parts.fragment or url.endswith(("?", "#")):
            raise InvalidRequest(f"{url!r} has a query or a fragment; leave out what follows '?' or '#'")
        if "%" in host:
            raise InvalidRequest(f"{url!r} has a percent sign in its host; give a plain name or address")
        return cls(parts.scheme == "https", host, SCHEMES[parts.scheme] if port is None else port, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == SCHEMES["https" if self.is_secure else "http"] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.host_header}{self.base}"


class HttpOptions(msgspec.Struct, frozen=True):
    """How to connect to a server."""

    api_key: str = ""
    ca_file: str = ""
    """Certificates to trust instead of the system's."""
    cert_file: str = ""
    """The certificate of this client."""
    key_file: str = ""
    """The private key of that certificate, if it is not in the same file."""
    connect_timeout: int = CONNECT_TIMEOUT

    def __repr__(self) -> str:
        return f"HttpOptions(api_key={'…' if self.api_key else 'none'}, ca_file={self.ca_file!r}, cert_file={self.cert_file!r})"

    def checked(self, address: HttpAddress) -> "HttpOptions":
        """The options with the key of the environment if none is given, and absolute paths. InvalidRequest when one is
        wrong, or does not fit the address.
        """
        key = self.api_key or os.environ.get(KEY_VARIABLE, "")
        if len(key) > MAX_KEY or not all("!" <= char <= "~" for char in key):
            raise InvalidRequest(f"the API key has characters that no key has (spaces, say), or is very long; fix it, or {KEY_VARIABLE}")
        files = {name: getattr(self, name) for name in ("ca_file", "cert_file", "key_file")}
        given = [name for name, path in files.items() if path]
        if given and not address.is_secure:
            raise InvalidRequest(f"{given[0]} is for https://, and the address is {address.url!r}; give one of them")
        if self.key_file and not self.cert_file:
            raise InvalidRequest("key_file is the key of cert_file, which is missing; give both")
        return HttpOptions(key, connect_timeout=self.connect_timeout, **{name: _absolute(path) for name, path in files.items()})


def tls_context(address: HttpAddress, options: HttpOptions) -> ssl.SSLContext | None:
    """How to check the server's certificate, always with its name; None without TLS. InvalidRequest when a file cannot
    be used.
    """
    if not address.is_secure:
        return None
    try:
        context = ssl.create_default_context(cafile=options.ca_file or None)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"ca_file {options.ca_file!r} cannot be used ({error}); give a file of PEM certificates") from error
    context.set_alpn_protocols(["http/1.1"])
    if options.cert_file:
        try:
            context.load_cert_chain(options.cert_file, options.key_file or None, password=_no_password)
        except (OSError, ValueError) as error:
            what = f"cert_file {options.cert_file!r} with key_file {options.key_file!r} cannot be used ({error})"
            raise InvalidRequest(f"{what}; give a PEM certificate and its private key without a password") from error
    return context


def _no_password() -> str:
    """Without it, OpenSSL would ask on the terminal."""
    raise ValueError("the private key needs a password")


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path)) if path else ""
