"""What says that a directory is a Penstock storage root, and whose.

Owns: the marker file `penstock.json` and `inspect`, which tells what a directory is without changing anything in it.
The marker is not truth: deleted from a root that otherwise holds only our files, it is written anew.
"""

import json
import os
from typing import NamedTuple

from penstock.logs.failures import storage_failed
from penstock.logs.files.system import Files
from penstock.logs.files.writing import TEMPORARY, read_file, replace_file
from penstock.words.errors import CorruptLog, InvalidRequest

MARKER, LOCK, LOGS, INBOX, ANSWERS = "penstock.json", "LOCK", "logs", "inbox", "answers"
FORMAT = 1
_OURS = {MARKER, MARKER + TEMPORARY, LOCK, LOGS, INBOX, ANSWERS}

_NETWORK = {"nfs", "nfs4", "cifs", "smbfs", "smb2", "smb3", "afpfs", "afs", "webdav", "davfs", "ncpfs", "coda", "ocfs2", "gfs2"}
_NETWORK |= {"ceph", "glusterfs", "lustre", "gpfs", "beegfs", "pvfs2", "orangefs", "moosefs"}
_NETWORK_FUSE = {"sshfs", "glusterfs", "ceph", "s3fs", "gcsfuse", "rclone", "davfs2", "curlftpfs", "mfs", "juicefs", "smbnetfs"}
# 9p and virtiofs are not here: they are how virtual machines and containers reach a disk of their own host.


class Marker(NamedTuple):
    """Whose root it is."""

    broker: str
    """Random id, the same in all roots of a broker."""
    created: int
    """Wall time, in microseconds."""


def nearest(files: Files, path: str) -> str:
    """The path, or of its parents the nearest that exists."""
    parent = os.path.dirname(path.rstrip("/")) or "."
    return path if files.exists(path) or parent == path else nearest(files, parent)


def inspect(files: Files, root: str) -> Marker | None:
    """The root's marker; None for a new or empty directory, and for a root of ours that lost it. Anything else is refused."""
    _refuse_network(files, root)
    try:
        names = set(files.list(root)) if files.exists(root) else set()
        raw = read_file(files, f"{root}/{MARKER}") if MARKER in names else None
    except NotADirectoryError:
        raise InvalidRequest(f"{root} is a file; give a directory") from None
    except OSError as error:
        raise storage_failed(error, "looking into", root) from error
    marker = parse(raw, root) if raw is not None else None
    if marker is None and names - _OURS:
        strange = sorted(names - _OURS)[0]
        raise InvalidRequest(f"{root} is not a Penstock directory and not empty (it holds {strange!r}); give an empty or a new one")
    return marker


def parse(raw: bytes, root: str) -> Marker | None:
    """The marker in a file's bytes, or None when they are damaged."""
    try:
        found = json.loads(raw)
        form, marker = int(found["format"]), Marker(str(found["broker"]), int(found["created"]))
    except (ValueError, KeyError, TypeError):
        return None
    if form > FORMAT:
        raise CorruptLog(f"{root} has the newer format {form}, this Penstock knows {FORMAT}; upgrade Penstock, nothing was changed")
    return marker


def write(files: Files, root: str, marker: Marker) -> None:
    data = json.dumps({"format": FORMAT, **marker._asdict()}, indent=1).encode() + b"\n"
    replace_file(files, root, MARKER, data)


def _refuse_network(files: Files, root: str) -> None:
    kind = files.filesystem(nearest(files, root)).lower()
    family, _, name = kind.partition(".")
    if kind in _NETWORK or kind.startswith("smb") or (family == "fuse" and name in _NETWORK_FUSE):
        raise InvalidRequest(f"{root} lies on a network file system ({kind}), where locks and syncs cannot be relied on; use a local disk")
