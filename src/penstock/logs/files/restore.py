"""The files of a backup put back into storage roots.

Owns: `RestoreTarget`. Everything is written below `<root>/restore.unfinished/`, which is a broker's directory of its
own until the caller is done with it. Then its content is moved up, the marker of the first root last: that makes it a
broker. A directory with `restore.unfinished` and without a marker is refused by every opening, and overwritten by the
next restore.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from google_crc32c import extend

from penstock.logs.files.backup import KEY_FILE, BackupManifest, copied_files, remove_tree
from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filesystem import COPY_BYTES, SystemFiles, read_file, storage_failed, sync_parents
from penstock.logs.files.lock import LOCK, take_lock
from penstock.logs.files.root import ANSWERS, INBOX, KEYS, LOGS, MARKER, RESTORING, Root, parse_marker, parse_roots, read_marker
from penstock.words.clock import SystemClock
from penstock.words.errors import CorruptLog, InvalidRequest

_MOVED = (LOGS, INBOX, KEYS, ANSWERS)


class RestoreTarget:
    """The storage roots into which a backup is restored. Use it as a context manager."""

    def __init__(self, roots: "Sequence[str | os.PathLike[str] | Root]") -> None:
        """InvalidRequest if a root is not empty, unless an unfinished restore left what is in it."""
        self.roots = parse_roots(roots)
        self._files = SystemFiles()
        inner = [root._replace(path=f"{root.path}/{RESTORING}") for root in self.roots]
        try:
            for root in self.roots:
                self._check(root.path, inner[0].path)
            for root in inner:
                os.makedirs(root.path, exist_ok=True)
            lock = take_lock(self._files, inner[0].path, SystemClock())  # BrokerLocked while another process restores here
            try:
                self._clear()
            finally:
                lock.release()
            self.store = FileStore.open(inner)
        except OSError as error:
            raise storage_failed(error, "restoring into", self.roots[0].path) from error

    def _check(self, path: str, first_inner: str) -> None:
        names = set(self._files.list(path)) if os.path.isdir(path) else set()
        if MARKER in names:
            # An unfinished restore into several roots may have made this one a broker's, but never the first.
            marker, restored = (_broker_id(self._files, one) for one in (path, first_inner))
            if path == self.roots[0].path or marker is None or marker != restored:
                raise InvalidRequest(f"{path} holds a broker; give a new or an empty directory")
        elif names and RESTORING not in names:
            raise InvalidRequest(f"{path} is not empty (it holds {min(names)!r}); give a new or an empty directory")
        elif not names:
            read_marker(self._files, path)  # refuses files and network file systems

    def _clear(self) -> None:
        """Remove what an earlier restore left."""
        for root in self.roots:
            for name in (*_MOVED, MARKER):
                remove_tree(f"{root.path}/{name}")
            for name in os.listdir(f"{root.path}/{RESTORING}"):
                if name != LOCK:
                    remove_tree(f"{root.path}/{RESTORING}/{name}")

    def copy(self, backup: str, manifest: BackupManifest, advance: Callable[[int], None]) -> None:
        """Copy all files of a backup. CorruptLog if one is not as the manifest says."""
        try:
            for log in manifest.logs:
                self.store.create_logs(log.incarnation, log.partition)
                directory = self.store.path_of(log.incarnation, log.partition)
                for file in copied_files(manifest, log):
                    self._copy(backup, file.path, f"{directory}/{os.path.basename(file.path)}", file.size, file.checksum, advance)
                self._files.sync_directory(directory)
            first = self.store.name
            for file in manifest.files:
                if file.path.startswith(f"{INBOX}/"):
                    self._copy(backup, file.path, f"{first}/{file.path}", file.size, file.checksum, advance)
                    sync_parents(self._files, f"{first}/{file.path}")
                elif file.path == KEY_FILE:
                    self._copy(backup, file.path, f"{first}/{KEYS}/{KEY_FILE}", file.size, file.checksum, advance, mode=0o600)
                    sync_parents(self._files, f"{first}/{KEYS}/{KEY_FILE}")
        except OSError as error:
            raise storage_failed(error, "restoring into", self.roots[0].path) from error

    def _copy(
        self, backup: str, path: str, target: str, size: int, checksum: int, advance: Callable[[int], None], mode: int = 0o644
    ) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        found = copied = 0
        if not os.path.exists(f"{backup}/{path}"):
            raise _damaged(backup, f"{path} is missing")
        with (
            open(f"{backup}/{path}", "rb") as source,
            os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as copy,
        ):
            while data := source.read(COPY_BYTES):
                found, copied = extend(found, data), copied + len(data)
                copy.write(data)
                advance(len(data))
            copy.flush()
            self._files.sync(copy.fileno())
        if (copied, found) != (size, checksum):
            raise _damaged(backup, f"{path} is not what the backup wrote")

    def finish(self) -> None:
        """Make the restored directory a broker's. The store is closed."""
        self.store.close()
        try:
            for root in self.roots[::-1]:  # the first one last: until then there is no broker
                inner = f"{root.path}/{RESTORING}"
                for name in (*_MOVED, MARKER):
                    if os.path.exists(f"{inner}/{name}"):
                        self._files.sync_directory(root.path)  # the marker's name must not be durable before the others
                        os.rename(f"{inner}/{name}", f"{root.path}/{name}")
                self._files.sync_directory(root.path)
            for root in self.roots:
                remove_tree(f"{root.path}/{RESTORING}")
        except OSError as error:
            raise storage_failed(error, "restoring into", self.roots[0].path) from error

    def __enter__(self) -> "RestoreTarget":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.store.close()
        if kind is not None:  # else it is finished
            with suppress(OSError):
                self._clear()
                for root in self.roots:
                    remove_tree(f"{root.path}/{RESTORING}")


def _broker_id(files: SystemFiles, root: str) -> str | None:
    raw = read_file(files, f"{root}/{MARKER}")
    marker = parse_marker(raw, root) if raw is not None else None
    return None if marker is None else marker.broker


def _damaged(backup: str, what: str) -> CorruptLog:
    return CorruptLog(f"the backup {backup} is damaged: {what}; use another backup")
