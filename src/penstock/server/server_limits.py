"""How much the server takes from a client.

Owns: `ServerLimits`.
"""

import msgspec

from penstock.words.limits import KIB, MAX_BATCH_BYTES, MIB


class ServerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on requests and connections. Times are seconds."""

    body_bytes: int = 2 * MAX_BATCH_BYTES
    """The largest body of a request, also when it is decompressed: the largest batch fits, in base64."""
    header_bytes: int = 64 * KIB
    """The largest head of a request: its first line and its headers. Also the most bytes of headers behind a body."""
    header_count: int = 100
    """The most headers of a request."""
    header_seconds: float = 10
    """How long a client may take to send the head of a request, or for the handshake of TLS."""
    body_seconds: float = 60
    """How long a client may take to send the body of a request."""
    send_seconds: float = 60
    """How long a client may take to read an answer."""
    idle_seconds: float = 75
    """How long a connection may stay open without a request."""
    request_seconds: float = 300
    """How long a request may wait for items or for room: a longer wait of a client is shortened to this."""
    connections: int = 10_000
    requests_per_key: int = 10_000
    """The most requests of one API key that are under way at a time."""
    waiting_leases: int = 10_000
    """The most requests that wait for items at a time."""
    waiting_leases_per_key: int = 10_000
    buffered_bytes: int = 512 * MIB
    """Bodies of more than 64 KiB, of all requests, that are in memory at one time."""
