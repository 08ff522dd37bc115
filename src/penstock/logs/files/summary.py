"""The summary file of a closed log: what its owner wants to know of it without opening it.

Owns: the layout of the `summary` file (docs/format.md) and the rule by which it counts: only while the log is exactly as it was when the
summary was written, which the synced position beside it tells. It is disposable: without it the log is opened.
"""

import struct

from google_crc32c import value

from penstock.logs.files.segment import LOG, parse_name
from penstock.logs.files.synced import FILE_NAME as SYNCED
from penstock.logs.files.synced import SIZE as SYNCED_BYTES
from penstock.logs.files.synced import unpack
from penstock.logs.files.system import Files
from penstock.logs.files.writing import read_file

FILE_NAME = "summary"
MAGIC = b"PSUM"
VERSION = 1
_HEAD = struct.Struct("<4sHH")
_CHECKSUM_BYTES = 8  # CRC-32C and padding


def pack(synced: bytes, body: bytes) -> bytes:
    """The bytes of a summary file: the synced position that it is true for, then what the owner has to say."""
    data = _HEAD.pack(MAGIC, VERSION, 0) + synced + body
    checksum: int = value(data)
    return data + checksum.to_bytes(_CHECKSUM_BYTES, "little")


def read(files: Files, directory: str) -> bytes | None:
    """What the owner said of a log that has not changed since; b"" for one that was never written to; None when it must be opened."""
    segments = sorted(name for name in map(parse_name, files.list(directory)) if name is not None)
    if not segments:
        return None if files.exists(f"{directory}/{SYNCED}") else b""
    data, synced = read_file(files, f"{directory}/{FILE_NAME}"), read_file(files, f"{directory}/{SYNCED}")
    if data is None or synced is None or len(data) < _HEAD.size + SYNCED_BYTES + _CHECKSUM_BYTES:
        return None
    content, checksum = data[:-_CHECKSUM_BYTES], int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
    magic, version, _ = _HEAD.unpack_from(content)
    said, body = content[_HEAD.size : _HEAD.size + SYNCED_BYTES], content[_HEAD.size + SYNCED_BYTES :]
    place = unpack(synced)
    if magic != MAGIC or version != VERSION or value(content) != checksum or said != synced or place is None:
        return None
    return body if place.segment == segments[-1] and _size(files, f"{directory}/{place.segment}{LOG}") == place.position else None


def _size(files: Files, path: str) -> int:
    handle = files.open(path, "read")
    try:
        return files.size(handle)
    finally:
        files.close(handle)
