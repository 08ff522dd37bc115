"""The inbox in files: the folders `inbox/` and `answers/` of a broker's first root.

Owns: `FileInbox`, and the staged parts of writes: `StagedWriter`, `StagedReader` and `read_part`, which verify them.
    inbox/<write>.staged/                a write that is not published yet: its tasks' parts and their sidecars
    inbox/<incarnation>-<name>.drop/     a published write: its parts and a manifest; the owner adopts it
    inbox/<anything>.gone/               an adopted or abandoned write that is being removed
    inbox/<anything>.errand, .done       an operation that an earlier version left for the owner; a sweep removes it
    answers/<incarnation>-<name>         a blob
Every file is written under another name, synced, and renamed. The name of a published write is made of its source and
number, so that the same write cannot be in the inbox twice.
A part is one group of DATA frames (docs/format.md). Every frame but the last has the flag MORE_IN_GROUP, so a part that
was cut, even between two frames, is recognised. Frames are not compressed: a part exists for seconds only, and the
owner would have to decompress it.
"""

import errno
import logging
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import BinaryIO, ClassVar

import msgspec

from penstock.logs.files.filesystem import TEMPORARY, Files, read_file, replace_file, storage_failed, sync_parents, write_all, write_file
from penstock.logs.files.lock import LOCK
from penstock.logs.files.root import ANSWERS, INBOX
from penstock.logs.frame import (
    CHECKSUM_BYTES,
    CONTINUES_GROUP,
    HEADER_BYTES,
    MORE_IN_GROUP,
    DamagedFrame,
    FrameEncoder,
    FrameHeader,
    frame_bytes,
    parse_header,
    unpack_body,
)
from penstock.logs.log import Buffer, Draft, Frame, FrameType
from penstock.logs.store import (
    BLOB_SWEEPS,
    MANIFEST_VERSION,
    InboxEntry,
    StagedPart,
    SweepCounter,
    WriteManifest,
    check_file_name,
    leading_number,
    publishable_manifest,
    published_write_name,
    refuse_missing,
)
from penstock.words.errors import CorruptLog, InvalidRequest, OutcomeUnknown

STAGED, DROP, GONE = ".staged", ".drop", ".gone"
FORMER_OPERATIONS = (".errand", ".done")
MANIFEST = "drop.json"
SIDECAR = ".order"
_log = logging.getLogger("penstock")
_WRITE_AGAIN = "move it out of the inbox and write it again"


class FileInbox:
    """The inbox of one broker."""

    shared: ClassVar[bool] = True

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._root = root
        self._inbox = f"{root}/{INBOX}"
        self._answers = f"{root}/{ANSWERS}"
        self._sweeps: SweepCounter[str] = SweepCounter()

    # -- for processes that do not own the broker ----------------------------------------------------

    def begin_write(self, write: str) -> None:
        with self._storage_errors("writing to"):
            self._begin(write)

    def part_writer(self, write: str, name: str, incarnation: int, make: bool = False) -> "StagedWriter":
        path = f"{self._staged(write)}/{check_file_name(name)}"
        return StagedWriter(self._files, path, incarnation, partial(self._begin, write) if make else None)

    def part_reader(self, write: str, name: str, incarnation: int) -> "StagedReader":
        return StagedReader(self._files, f"{self._staged(write)}/{check_file_name(name)}", incarnation)

    def sidecar(self, write: str, name: str) -> BinaryIO:
        with self._storage_errors("reading"):
            return open(f"{self._staged(write)}/{check_file_name(name)}{SIDECAR}", "rb")

    def publish(self, write: str, incarnation: int, manifest: WriteManifest) -> bool:
        manifest = publishable_manifest(write, manifest)
        target = f"{self._inbox}/{published_write_path(incarnation, manifest.source, manifest.number)}"
        with self._storage_errors("writing to"):
            if self._files.exists(target):
                self.abandon(write)
                return False
            named = {part.name for part in manifest.parts}
            path = self._staged(write)
            refuse_missing(write, manifest, [part.name for part in manifest.parts if self._files.exists(f"{path}/{part.name}")])
            self._begin(write)
            for file in self._files.list(path):
                if file not in named:  # a sidecar, or the part of a task attempt that failed or was repeated
                    self._files.remove(f"{path}/{file}")
            write_file(self._files, f"{path}/{MANIFEST}", msgspec.json.encode(manifest))
            self._files.sync_directory(path)
            try:
                self._files.rename(path, target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                self.abandon(write)
                return False
        try:
            self._files.sync_directory(self._inbox)
        except OSError as error:
            raise OutcomeUnknown(
                f"the write is in the inbox, but syncing the inbox failed ({error}), so a power cut may remove it; "
                "check whether its items arrive before you write them again"
            ) from error
        return True

    def abandon(self, write: str) -> None:
        with self._storage_errors("writing to"):
            if self._files.exists(self._staged(write)):
                self._discard(f"{write}{STAGED}")

    def abandon_empty(self, write: str) -> None:
        with suppress(OSError):
            self._files.remove_directory(self._staged(write))

    def is_pending(self, incarnation: int, source: str, number: int) -> bool:
        with self._storage_errors("reading"):
            return self._files.exists(f"{self._inbox}/{published_write_path(incarnation, source, number)}")

    def has_owner(self) -> bool:
        """Whether a process holds the lock. This takes the lock for a moment, so `take_lock` tries several times."""
        try:
            handle = self._files.lock(f"{self._root}/{LOCK}")
        except OSError:
            return True  # unknown, so there may be an owner
        if handle is None:
            return True
        self._files.unlock(handle)
        return False

    # -- for the owner -------------------------------------------------------------------------------

    def waiting(self) -> list[InboxEntry]:
        with self._storage_errors("reading"):
            return [entry for entry in map(_parse, self._names(self._inbox)) if entry is not None]

    def manifest(self, entry: InboxEntry) -> WriteManifest:
        label = entry.label
        with self._storage_errors("reading"):
            raw = read_file(self._files, f"{self._inbox}/{label}/{MANIFEST}")
        try:
            found = msgspec.json.decode(raw or b"", type=WriteManifest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptLog(f"the manifest of the published write {label} cannot be read ({error}); {_WRITE_AGAIN}") from error
        if found.version > MANIFEST_VERSION:
            known = f"this Penstock knows {MANIFEST_VERSION}"
            raise CorruptLog(f"the published write {label} has version {found.version}, {known}; use a newer Penstock")
        unique = len({part.name for part in found.parts}) == len(found.parts)
        if published_write_path(entry.incarnation, found.source, found.number) != label or not unique:
            raise CorruptLog(f"the published write {label} has the manifest of another write; {_WRITE_AGAIN}")
        return found

    def frames(self, entry: InboxEntry, part: StagedPart) -> Iterator[Frame]:
        path = f"{self._inbox}/{entry.label}/{check_file_name(part.name)}"
        with self._storage_errors("reading"):
            if not self._files.exists(path):
                raise CorruptLog(f"the published write {entry.label} lacks its part {part.name}; {_WRITE_AGAIN}")
        return read_part(self._files, path, entry.incarnation)

    def remove(self, entry: InboxEntry) -> None:
        with self._storage_errors("removing"):
            self._discard(entry.label)

    def sweep(self, started_before: int, queues: Container[int]) -> None:
        """Also removes folders whose removal was cut off, and temporary files that were present at the sweep before."""
        kept: dict[str, int] = {}
        with self._storage_errors("sweeping"):
            for name in self._names(self._inbox):
                stale = name.endswith(STAGED) and 0 < leading_number(name) < started_before
                if stale or name.endswith(GONE):
                    self._discard(name)
                elif name.endswith(FORMER_OPERATIONS):
                    _log.warning("%s/%s is removed: an earlier version left this operation, and it is not done any more", self._inbox, name)
                    self._remove(f"{self._inbox}/{name}")
                elif name.endswith(TEMPORARY):
                    kept[f"{self._inbox}/{name}"] = 1
            for name in self._names(self._answers):
                if leading_number(name) not in queues:
                    self._remove(f"{self._answers}/{name}")
                else:
                    kept[f"{self._answers}/{name}"] = 1 if name.endswith(TEMPORARY) else BLOB_SWEEPS
            for path in self._sweeps.overdue(kept):
                self._remove(path)

    # -- blobs ---------------------------------------------------------------------------------------

    def put_blob(self, incarnation: int, name: str, body: bytes) -> None:
        with self._storage_errors("writing to"):
            self._make(self._answers)
            replace_file(self._files, self._answers, _file_name(incarnation, name), body)

    def blob(self, incarnation: int, name: str) -> bytes | None:
        with self._storage_errors("reading"):
            return read_file(self._files, f"{self._answers}/{_file_name(incarnation, name)}")

    def blob_names(self, incarnation: int, prefix: str) -> list[str]:
        start = _file_name(incarnation, "")
        with self._storage_errors("reading"):
            names = [name.removeprefix(start) for name in self._names(self._answers) if name.startswith(start)]
        return [name for name in names if name.startswith(prefix) and not name.endswith(TEMPORARY)]

    def remove_blob(self, incarnation: int, name: str) -> None:
        with self._storage_errors("writing to"):
            self._remove(f"{self._answers}/{_file_name(incarnation, name)}")

    # -- steps ---------------------------------------------------------------------------------------

    def _begin(self, write: str) -> None:
        path = self._staged(write)
        self._files.make_directory(path)
        sync_parents(self._files, path)

    def _staged(self, write: str) -> str:
        return f"{self._inbox}/{check_file_name(write)}{STAGED}"

    def _names(self, folder: str) -> list[str]:
        return self._files.list(folder) if self._files.exists(folder) else []

    def _make(self, folder: str) -> None:
        """Create a folder, durably, if it does not exist."""
        if not self._files.exists(folder):
            self._files.make_directory(folder)
            sync_parents(self._files, folder)

    def _discard(self, name: str) -> None:
        """Remove a folder of the inbox. It is renamed first, so that no process uses a partly removed folder."""
        gone = name if name.endswith(GONE) else f"{name}{GONE}"
        if gone != name:
            if self._files.exists(f"{self._inbox}/{gone}"):  # an earlier folder of this name, whose removal was cut off
                self._discard(gone)
            self._files.rename(f"{self._inbox}/{name}", f"{self._inbox}/{gone}")
            self._files.sync_directory(self._inbox)
        for file in self._files.list(f"{self._inbox}/{gone}"):
            self._remove(f"{self._inbox}/{gone}/{file}")
        self._files.remove_directory(f"{self._inbox}/{gone}")

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):  # another process may remove it at the same time
            self._files.remove(path)

    @contextmanager
    def _storage_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_failed(error, f"{doing} the inbox of", self._root) from error

    def __repr__(self) -> str:
        return f"FileInbox({self._inbox!r})"


def published_write_path(incarnation: int, source: str, number: int) -> str:
    """The name of a published write's folder in the inbox."""
    return f"{_file_name(incarnation, published_write_name(source, number))}{DROP}"


def _file_name(incarnation: int, name: str) -> str:
    return f"{incarnation:016x}-{check_file_name(name)}"


def _parse(file: str) -> InboxEntry | None:
    incarnation, dash, name = file.removesuffix(DROP).partition("-")
    if not file.endswith(DROP) or not dash:
        return None
    try:
        return InboxEntry(int(incarnation, 16), name, file)
    except ValueError:
        return None


# -- staged parts --------------------------------------------------------------------------------------


MAX_FOLDER_ATTEMPTS = 100
"""How often a writer creates its part's folder again. A failing writer of the same write may remove it while empty."""


class StagedWriter:
    """Writes one part. The file is created by `begin` or with the first frame; a part without frames has no file."""

    def __init__(self, files: Files, path: str, incarnation: int, make_folder: Callable[[], None] | None = None) -> None:
        """make_folder: creates the folder of the part; None if the folder must exist."""
        self.path = path
        self.name = path.rpartition("/")[2]
        self._make_folder = make_folder
        self._files = files
        self._incarnation = incarnation
        self._encoders: dict[int, FrameEncoder] = {}
        self._handle: int | None = None
        self._unwritten: tuple[Draft, int] | None = None
        self._size = 0
        self._frames = 0
        self._items = 0

    def begin(self) -> None:
        """Create the file now."""
        if self._handle is None:
            try:
                self._handle = self._make()
            except OSError as error:
                raise storage_failed(error, "writing", self.path) from error

    def add(self, draft: Draft, partition: int = 0) -> int:
        """Append a frame and return its position.

        Each frame is written when the next one is added or the part is finished: only then is its MORE_IN_GROUP known.
        """
        if draft.type is not FrameType.DATA or draft.base_offset:
            raise InvalidRequest(f"a part takes DATA frames of base 0, not {draft._replace(parts=())}; use ArrowBatch.draft")
        self._write(MORE_IN_GROUP)
        self._unwritten = draft, partition
        return self._size

    def sidecar(self) -> BinaryIO:
        try:
            return open(self.path + SIDECAR, "wb")
        except OSError as error:
            raise storage_failed(error, "writing", self.path + SIDECAR) from error

    def finish(self) -> StagedPart:
        """Write the last frame, and sync the file and its folder."""
        self._write(0)
        if self._handle is not None:
            try:
                self._files.sync(self._handle)
                self._files.sync_directory(self.path.rpartition("/")[0] or ".")
            except OSError as error:
                raise storage_failed(error, "writing", self.path) from error
            finally:
                self.close()
        return StagedPart(self.name, self._frames, self._items)

    def close(self) -> None:
        if self._handle is not None:
            self._files.close(self._handle)
            self._handle = None

    def discard(self) -> None:
        """Remove the file and its sidecar, if they exist."""
        self._unwritten = None
        try:
            self.close()
            for path in (self.path, self.path + SIDECAR):
                if self._files.exists(path):
                    self._files.remove(path)
        except OSError as error:
            raise storage_failed(error, "removing", self.path) from error

    def _make(self) -> int:
        for _ in range(MAX_FOLDER_ATTEMPTS if self._make_folder is not None else 0):
            try:
                return self._files.open(self.path, "append")
            except FileNotFoundError:
                assert self._make_folder is not None
                self._make_folder()
        return self._files.open(self.path, "append")

    def _write(self, more: int) -> None:
        if self._unwritten is None:
            return
        draft, partition = self._unwritten
        encoder = self._encoders.setdefault(partition, FrameEncoder(self._incarnation, partition, compression=False))
        vector: list[Buffer] = []
        size = encoder.encode(draft, self._frames + 1, more | (CONTINUES_GROUP if self._frames else 0), vector)
        self.begin()
        assert self._handle is not None
        try:
            write_all(self._files, self._handle, vector, size)
        except OSError as error:
            raise storage_failed(error, "writing", self.path) from error
        self._size += size
        self._frames += 1
        self._items += draft.count
        self._unwritten = None

    def __repr__(self) -> str:
        return f"StagedWriter({self.path!r}, {self._frames} frames, {self._items} items)"


class StagedReader:
    """Reads a part frame by frame; CorruptLog if its bytes are not as they were written. Close it after use."""

    def __init__(self, files: Files, path: str, incarnation: int) -> None:
        self._files = files
        self._path = path
        self._incarnation = incarnation
        try:
            self._handle = files.open(path, "read")
            self._size = files.size(self._handle)
        except OSError as error:
            raise storage_failed(error, "reading", path) from error

    def at(self, position: int, sequence: int) -> Frame:
        """The frame that begins at a position and is number `sequence` of the part."""
        return self.with_header(position, sequence)[1]

    def with_header(self, position: int, sequence: int) -> tuple[FrameHeader, Frame]:
        """The frame as `at` returns it, and its header."""
        try:
            return self._read(position, sequence)
        except OSError as error:
            raise storage_failed(error, "reading", self._path) from error
        except DamagedFrame as error:
            raise self._corrupt(str(error)) from error

    def all(self) -> Iterator[tuple[FrameHeader, Frame]]:
        """Every frame with its header; CorruptLog if anything follows the last frame."""
        position, sequence, more = 0, 1, True
        while more:
            header, frame = self.with_header(position, sequence)
            yield header, frame
            position, sequence = position + frame_bytes(header.stored_bytes), sequence + 1
            more = bool(header.flags & MORE_IN_GROUP)
        if position != self._size:
            raise self._corrupt(f"{self._size - position} bytes follow its last frame")

    def close(self) -> None:
        self._files.close(self._handle)

    def _read(self, position: int, sequence: int) -> tuple[FrameHeader, Frame]:
        header = parse_header(self._files.pread(self._handle, HEADER_BYTES, position))
        _check(header, self._incarnation, sequence)
        size = frame_bytes(header.stored_bytes)
        if position + size > self._size:  # checked before the read, so that a wrong length is never read
            raise DamagedFrame("the file ends inside a frame")
        end = HEADER_BYTES + header.stored_bytes + CHECKSUM_BYTES
        stored = self._files.pread(self._handle, end - HEADER_BYTES, position + HEADER_BYTES)
        if size > end and any(self._files.pread(self._handle, size - end, position + end)):  # read alone: a body is not copied
            raise DamagedFrame("the padding after a frame is not zero")
        return header, unpack_body(header, stored)

    def _corrupt(self, why: str) -> CorruptLog:
        return CorruptLog(f"the staged part {self._path} is damaged ({why}) and cannot be used; write it again")

    def __repr__(self) -> str:
        return f"StagedReader({self._path!r}, {self._size} bytes)"


def read_part(files: Files, path: str, incarnation: int) -> Iterator[Frame]:
    """Yield the frames of a part; CorruptLog at the first frame that is not as it was written."""
    reader = StagedReader(files, path, incarnation)
    try:
        for _, frame in reader.all():
            yield frame
    finally:
        reader.close()


def _check(header: FrameHeader, incarnation: int, sequence: int) -> None:
    expected = (FrameType.DATA, incarnation, sequence, 0, CONTINUES_GROUP if sequence > 1 else 0)
    found = (header.type, header.incarnation, header.sequence, header.base, header.flags & ~MORE_IN_GROUP)
    if found != expected or not header.count:
        raise DamagedFrame(f"frame {sequence} has the header of another frame")
