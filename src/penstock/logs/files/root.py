"""A storage root, and its marker file, which names the broker it belongs to.

Owns: `Root` and the names of its files; the marker `penstock.json`; `read_marker`, which checks a directory and changes
nothing; `check_order`.
The marker is rebuildable: if it is missing in a root that holds only Penstock's files, it is written again.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.logs.files.filesystem import TEMPORARY, Files, read_file, replace_file, storage_failed
from penstock.logs.files.lock import LOCK
from penstock.words.errors import CorruptLog, InvalidRequest


class Root(NamedTuple):
    """A storage root. weight: its share of new partitions. read_only: it gets none, so that it can be emptied."""

    path: str
    weight: float = 1.0
    read_only: bool = False


def parse_roots(
    given: "str | os.PathLike[str] | Iterable[str | os.PathLike[str] | tuple[str | os.PathLike[str], float] | Root]",
) -> list[Root]:
    """The storage roots that a caller gave, with absolute paths. The first is the primary one."""
    if isinstance(given, str | os.PathLike):
        given = [given]
    roots = [_root(one) for one in given]
    paths = [root.path for root in roots]
    if not roots or len(set(paths)) != len(paths):
        raise InvalidRequest(f"the storage roots are {paths}; give one or more different directories")
    return roots


def _root(given: "str | os.PathLike[str] | tuple[str | os.PathLike[str], float] | Root") -> Root:
    if isinstance(given, Root):
        root = given
    elif isinstance(given, tuple):
        root = Root(os.fspath(given[0]), given[1])
    else:
        root = Root(os.fspath(given))
    if "\0" in root.path:
        raise InvalidRequest(f"the path {root.path!r:.200} has a null character, which no path can have; give another")
    if not root.weight > 0:
        raise InvalidRequest(f"the weight of {root.path} is {root.weight}; give a number above 0, or set the root read-only")
    return root._replace(path=os.path.abspath(root.path))


# -- the marker ------------------------------------------------------------------------------------


MARKER, LOGS, INBOX, ANSWERS, SOCKET, KEYS = "penstock.json", "logs", "inbox", "answers", "socket", "keys"
RESTORING, BACKUP_FILES = "restore.unfinished", ("backup.json", "backup.unfinished")
"""Names in a directory into which a backup is being restored, and in a backup."""
FORMAT = 2
"""2: logs remember calls. An owner raises the number of an older root before it writes anything else."""
_OURS = {MARKER, MARKER + TEMPORARY, LOCK, LOGS, INBOX, ANSWERS, SOCKET, KEYS}

_NETWORK = {"nfs", "nfs4", "cifs", "smbfs", "smb2", "smb3", "afpfs", "afs", "webdav", "davfs", "ncpfs", "coda", "ocfs2", "gfs2"}
_NETWORK |= {"ceph", "glusterfs", "lustre", "gpfs", "beegfs", "pvfs2", "orangefs", "moosefs"}
_NETWORK_FUSE = {"sshfs", "glusterfs", "ceph", "s3fs", "gcsfuse", "rclone", "davfs2", "curlftpfs", "mfs", "juicefs", "smbnetfs"}
_NOT_STORED = {"proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "configfs", "bpf", "pstore", "devpts"}
_NOT_STORED |= {"mqueue", "fusectl", "efivarfs", "binfmt_misc", "nsfs", "selinuxfs", "devfs"}
# 9p and virtiofs are not listed: virtual machines and containers use them for disks of their own host.


class Marker(NamedTuple):
    """The content of a root's marker file."""

    broker: str
    """The random id of the broker, the same in all its roots."""
    created: int
    """Wall time in microseconds."""
    format: int = 0
    """The format of the root; 0: that of this Penstock."""
    root: str = ""
    """The id of this root, which stays when it is moved; "" in markers of earlier versions."""
    roots: tuple[tuple[str, str], ...] = ()
    """Every root that the broker ever had: its id, and its path when it was last open. The first is the primary one."""

    @property
    def is_first(self) -> bool | None:
        """Whether it is the primary root; None if that is not recorded."""
        return self.roots[0][0] == self.root if self.roots else None


def nearest(files: Files, path: str) -> str:
    """The path if it exists, else its nearest parent that exists."""
    parent = os.path.dirname(path.rstrip("/")) or "."
    return path if files.exists(path) or parent == path else nearest(files, parent)


def read_marker(files: Files, root: str, *, may_be_foreign: bool = False) -> Marker | None:
    """The root's marker; None if the directory does not exist, is empty, or holds only Penstock's files.

    InvalidRequest for any other directory (None if it `may_be_foreign`), and for one on a network file system or one
    that stores nothing.
    """
    _refuse_unfit(files, root)
    try:
        names = set(files.list(root)) if files.exists(root) else set()
        raw = read_file(files, f"{root}/{MARKER}") if MARKER in names else None
    except NotADirectoryError:
        raise InvalidRequest(f"{root} is a file; give a directory") from None
    except OSError as error:
        raise storage_failed(error, "reading", root) from error
    marker = parse_marker(raw, root) if raw is not None else None
    if marker is None and RESTORING in names:
        raise InvalidRequest(f"a backup is being restored into {root}, or its restore was cut off; restore it again, or wait")
    if marker is None and names & set(BACKUP_FILES):
        raise InvalidRequest(f"{root} is a backup; restore it into another directory (penstock restore), and open that")
    if marker is None and names - _OURS and not may_be_foreign:
        other = sorted(names - _OURS)[0]
        raise InvalidRequest(f"{root} is not a Penstock directory and not empty (it holds {other!r}); give an empty or a new one")
    return marker


def parse_marker(raw: bytes, root: str) -> Marker | None:
    """The marker in a file's bytes; None if they are damaged; CorruptLog if the root has a newer format."""
    try:
        found = json.loads(raw)
        roots = tuple((str(root["id"]), str(root["path"])) for root in found.get("roots", ()))
        marker = Marker(str(found["broker"]), int(found["created"]), int(found["format"]), str(found.get("root", "")), roots)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if marker.format > FORMAT:
        known = f"this Penstock knows {FORMAT}"
        raise CorruptLog(f"{root} has the newer format {marker.format}, {known}; upgrade Penstock, nothing was changed")
    return marker


def write_marker(files: Files, root: str, marker: Marker) -> None:
    """Write the marker, with the format of this Penstock."""
    found: dict[str, object] = {"format": FORMAT, "broker": marker.broker, "created": marker.created}
    if marker.roots:
        found |= {"root": marker.root, "roots": [{"id": id, "path": path} for id, path in marker.roots]}
    replace_file(files, root, MARKER, json.dumps(found, indent=1).encode() + b"\n")


def root_id(marker: Marker, path: str) -> str:
    """The id of a root that has none yet: no other root of the broker has the same path at the same time."""
    return hashlib.blake2b(f"{marker.broker} {marker.created} {path}".encode(), digest_size=8).hexdigest()


def check_order(paths: Sequence[str], markers: Sequence[Marker | None]) -> None:
    """InvalidRequest unless the primary root, as far as the markers tell, is the first of the given ones.

    The inbox, the socket and the API keys are in the primary root: with another one in its place they would be missing.
    """
    known = [(path, marker) for path, marker in zip(paths, markers, strict=True) if marker is not None]
    first = next((path for path, marker in known if marker.is_first), None)
    if first is not None and first != paths[0]:
        raise InvalidRequest(f"{first} is the first storage root of its broker; give it first, and {paths[0]} among the further roots")
    if first is None and markers[0] is not None and markers[0].is_first is False:
        raise InvalidRequest(
            f"{paths[0]} is a further storage root of a broker whose first root, last open at {markers[0].roots[0][1]}, is missing; "
            f"give that one first, and {paths[0]} among the further roots"
        )


def _refuse_unfit(files: Files, root: str) -> None:
    kind = files.filesystem(nearest(files, root)).lower()
    family, _, name = kind.partition(".")
    if kind in _NETWORK or kind.startswith("smb") or (family == "fuse" and name in _NETWORK_FUSE):
        raise InvalidRequest(f"{root} is on a network file system ({kind}), where locks and syncs are not reliable; use a local disk")
    if kind in _NOT_STORED:
        raise InvalidRequest(f"{root} is in {kind}, a file system of the kernel that stores no files; use a local disk")
