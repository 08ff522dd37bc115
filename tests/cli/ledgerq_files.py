"""Files as LedgerQ's code writes them, byte by byte.

Owns: `entry`, `segment`, `metadata`, `index` and `LedgerQDirectory`, a directory of them. Written from the description
of the format, not from the reader under test.
"""

import gzip
import hashlib
import json
import struct
from pathlib import Path

import google_crc32c

NOW = 1_700_000_000_000_000_000
"""Nanoseconds; a time in 2023."""


def crc(data: bytes) -> bytes:
    return struct.pack("<I", google_crc32c.value(data))


def entry(
    id: int,
    payload: bytes = b"",
    *,
    time: int = NOW,
    priority: int | None = None,
    expires: int | None = None,
    headers: dict[bytes, bytes] | None = None,
    compression: int | None = None,
    kind: int = 1,
    flags: int = 0,
) -> bytes:
    """An entry with the four unused bytes after it. With `compression` the payload must be compressed already."""
    body = struct.pack("<Qq", id, time)
    if priority is not None:
        flags |= 16
        body += bytes([priority])
    if expires is not None:
        flags |= 4
        body += struct.pack("<q", expires)
    if headers is not None:
        flags |= 8
        body += struct.pack("<H", len(headers))
        for name, value in headers.items():
            body += struct.pack("<H", len(name)) + name + struct.pack("<H", len(value)) + value
    if compression is not None:
        flags |= 1
        body += bytes([compression])
    body += payload
    whole = struct.pack("<IBB", 4 + 1 + 1 + len(body) + 4, kind, flags) + body
    return whole + crc(whole) + bytes(4)


def zipped(id: int, payload: bytes, **options: int) -> bytes:
    return entry(id, gzip.compress(payload, mtime=0), compression=1, **options)  # type: ignore[arg-type]


def segment(*entries: bytes, base: int = 0, magic: int = 0x4C445151, version: int = 1, created: int = NOW) -> bytes:
    header = struct.pack("<IHHQqQQ", magic, version, 0, base, created, 0, 0) + bytes(20)
    assert len(header) == 60
    return header + crc(header) + b"".join(entries)


def metadata(next_id: int, read_id: int, version: int = 1) -> bytes:
    return struct.pack("<IQQI", version, next_id, read_id, 0)


def index(base: int, *entries: tuple[int, int, int]) -> bytes:
    header = struct.pack("<IHHQQI", 0x4C445149, 1, 0, base, len(entries), 0)
    return header + crc(header) + b"".join(struct.pack("<QQq", *one) for one in entries)


def retry_state(*entries: tuple[int, int, str], version: int = 1) -> bytes:
    """(message id, failed attempts, reason) → the file, indented as LedgerQ writes it."""
    found = [
        {"msg_id": id, "retry_count": count, "last_failure": "2023-11-14T23:13:20.123456789+01:00", "failure_reason": reason}
        for id, count, reason in entries
    ]
    return json.dumps({"version": version, "max_retries": 3, "entries": found}, indent=2).encode()


def dedup_state(*entries: tuple[int, str, int]) -> bytes:
    """(message id, the producer's dedup id, when its window ends) → the file."""
    found = [
        {"dedup_id": hashlib.sha256(name.encode()).hexdigest(), "message_id": id, "enqueued_at": NOW, "expires_at": expires}
        for id, name, expires in entries
    ]
    return json.dumps({"version": 1, "entries": found}, indent=2).encode()


class LedgerQDirectory:
    """A directory of LedgerQ."""

    def __init__(self, directory: Path, created: int = NOW) -> None:
        directory.mkdir()
        self.directory = directory
        self.created = created
        self._number = 0

    def add(self, *entries: bytes) -> Path:
        """Add a segment with these entries."""
        path = self.directory / f"{self._number:020d}.log"
        path.write_bytes(segment(*entries, base=self._number, created=self.created))
        self._number += 1_000
        return path

    def read_up_to(self, read_id: int, next_id: int = 1_000) -> None:
        (self.directory / "metadata.dat").write_bytes(metadata(next_id, read_id))

    def __str__(self) -> str:
        return str(self.directory)
