"""The inbox in files: the folders `inbox/` and `answers/` of a broker's first root.

Owns: `FileInbox`, and its staged parts: `StagedWriter`, `StagedReader` and `frames`, which verify.
    inbox/<write>.staged/                    a write under way: its tasks' parts and their sidecars
    inbox/<incarnation>-<name>.drop/         a published write: parts and a manifest, to be adopted
    inbox/<incarnation>-<name>.errand        a request to the owner
    inbox/<incarnation>-<name>.done          an errand that is done, or one that came in its place just then and is to be done, too
    inbox/<anything>.gone/                   adopted or given up, being removed
    answers/<incarnation>-<name>             a note; the answer to an errand is the note of its name
Everything is made under another name, synced, and renamed. A drop is named by its source and number, so that the same one cannot be in
the inbox twice.
A part is one group of DATA frames as docs/format.md draws them: every frame but the last says that more follow, so that a part that was
cut, even between two frames, is not taken for a whole one. Frames are not compressed: a part lives for seconds, and its owner would only
have to expand it.
"""

import errno
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import BinaryIO, ClassVar

import msgspec

from penstock.logs.files.filesystem import TEMPORARY, Files, read_file, replace_file, storage_failed, sync_parents, write_all, write_file
from penstock.logs.files.root import ANSWERS, INBOX, LOCK
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
    MANIFEST_VERSION,
    InboxEntry,
    StagedPart,
    SweepCounter,
    WriteManifest,
    check_file_name,
    kept_sweeps,
    leading_number,
    publishable_manifest,
    published_write_name,
    refuse_missing,
)
from penstock.words.errors import CorruptLog, InvalidRequest, OutcomeUnknown

STAGED, DROP, ERRAND, DONE, GONE = ".staged", ".drop", ".errand", ".done", ".gone"
MANIFEST = "drop.json"
SIDECAR = ".order"


class FileInbox:
    """The inbox of one broker."""

    shared: ClassVar[bool] = True

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._root = root
        self._inbox = f"{root}/{INBOX}"
        self._answers = f"{root}/{ANSWERS}"
        self._sweeps: SweepCounter[str] = SweepCounter()

    # -- for those who do not own it -----------------------------------------------------------------

    def begin_write(self, write: str) -> None:
        with self._told("writing to"):
            self._begin(write)

    def part_writer(self, write: str, name: str, incarnation: int, make: bool = False) -> "StagedWriter":
        path = f"{self._staged(write)}/{check_file_name(name)}"
        return StagedWriter(self._files, path, incarnation, partial(self._begin, write) if make else None)

    def part_reader(self, write: str, name: str, incarnation: int) -> "StagedReader":
        return StagedReader(self._files, f"{self._staged(write)}/{check_file_name(name)}", incarnation)

    def sidecar(self, write: str, name: str) -> BinaryIO:
        with self._told("reading"):
            return open(f"{self._staged(write)}/{check_file_name(name)}{SIDECAR}", "rb")

    def publish(self, write: str, incarnation: int, manifest: WriteManifest) -> bool:
        manifest = publishable_manifest(write, manifest)
        target = f"{self._inbox}/{published_write_path(incarnation, manifest.source, manifest.number)}"
        with self._told("writing to"):
            if self._files.exists(target):
                self.abandon(write)
                return False
            named = {part.name for part in manifest.parts}
            path = self._staged(write)
            refuse_missing(write, manifest, [part.name for part in manifest.parts if self._files.exists(f"{path}/{part.name}")])
            self._begin(write)
            for file in self._files.list(path):
                if file not in named:  # of attempts that failed or came second, and sidecars
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
                f"the write is in the inbox, but the disk does not say that it stays there ({error}); "
                "look whether its items come before you write them again"
            ) from error
        return True

    def abandon(self, write: str) -> None:
        with self._told("writing to"):
            if self._files.exists(self._staged(write)):
                self._discard(f"{write}{STAGED}")

    def abandon_empty(self, write: str) -> None:
        with suppress(OSError):
            self._files.remove_directory(self._staged(write))

    def is_pending(self, incarnation: int, source: str, number: int) -> bool:
        with self._told("reading"):
            return self._files.exists(f"{self._inbox}/{published_write_path(incarnation, source, number)}")

    def put_operation(self, incarnation: int, name: str, body: bytes) -> None:
        with self._told("writing to"):
            self._make(self._inbox)
            replace_file(self._files, self._inbox, f"{_owned(incarnation, name)}{ERRAND}", body)

    def withdraw_operation(self, incarnation: int, name: str) -> None:
        with self._told("writing to"):
            for ending in (ERRAND, DONE):
                self._remove(f"{self._inbox}/{_owned(incarnation, name)}{ending}")

    def has_owner(self) -> bool:
        """Nobody is kept from opening the directory but for the moment of the look."""
        try:
            handle = self._files.lock(f"{self._root}/{LOCK}")
        except OSError:
            return True  # it cannot be told from here, so there may be somebody
        if handle is None:
            return True
        self._files.close(handle)
        return False

    # -- for the owner -------------------------------------------------------------------------------

    def waiting(self) -> list[InboxEntry]:
        with self._told("reading"):
            if not self._files.exists(self._inbox):
                return []
            found = [one for one in map(_parse, self._files.list(self._inbox)) if one is not None]
        return sorted(found, key=lambda one: not one.is_operation)

    def manifest(self, drop: InboxEntry) -> WriteManifest:
        with self._told("reading"):
            raw = read_file(self._files, f"{self._inbox}/{drop.label}/{MANIFEST}")
        try:
            found = msgspec.json.decode(raw or b"", type=WriteManifest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptLog(f"the manifest of the drop {drop.label} cannot be read ({error}); move it away and write it again") from error
        if found.version > MANIFEST_VERSION:
            known = f"this Penstock knows {MANIFEST_VERSION}"
            raise CorruptLog(f"the drop {drop.label} has version {found.version}, {known}; use a newer Penstock")
        unique = len({part.name for part in found.parts}) == len(found.parts)
        if published_write_path(drop.incarnation, found.source, found.number) != drop.label or not unique:
            raise CorruptLog(f"the drop {drop.label} has a manifest that is not its own; move it away and write it again")
        return found

    def frames(self, drop: InboxEntry, part: StagedPart) -> Iterator[Frame]:
        path = f"{self._inbox}/{drop.label}/{check_file_name(part.name)}"
        with self._told("reading"):
            if not self._files.exists(path):
                raise CorruptLog(f"the drop {drop.label} lacks its part {part.name}; move it away and write it again")
        return read_part(self._files, path, drop.incarnation)

    def operation(self, errand: InboxEntry) -> bytes | None:
        with self._told("reading"):
            return read_file(self._files, f"{self._inbox}/{errand.label}")

    def remove(self, one: InboxEntry, body: bytes | None = None) -> None:
        with self._told("removing"):
            if one.is_operation:
                self._remove_errand(f"{self._inbox}/{one.label}", body)
            else:
                self._discard(one.label)

    def sweep(self, started_before: int, queues: Container[int]) -> None:
        """Also what was being removed when somebody was cut off, and files half written that were there at the sweep before."""
        kept: dict[str, int] = {}
        with self._told("tidying up"):
            for name in self._names(self._inbox):
                stale = name.endswith(STAGED) and 0 < leading_number(name) < started_before
                if stale or name.endswith(GONE):
                    self._discard(name)
                elif name.endswith(TEMPORARY):
                    kept[f"{self._inbox}/{name}"] = 1
            for name in self._names(self._answers):
                if leading_number(name) not in queues:
                    self._remove(f"{self._answers}/{name}")
                else:
                    kept[f"{self._answers}/{name}"] = 1 if name.endswith(TEMPORARY) else kept_sweeps(name.partition("-")[2])
            for path in self._sweeps.overdue(kept):
                self._remove(path)

    # -- notes ---------------------------------------------------------------------------------------

    def put_blob(self, incarnation: int, name: str, body: bytes) -> None:
        with self._told("writing to"):
            self._make(self._answers)
            replace_file(self._files, self._answers, _owned(incarnation, name), body)

    def blob(self, incarnation: int, name: str) -> bytes | None:
        with self._told("reading"):
            return read_file(self._files, f"{self._answers}/{_owned(incarnation, name)}")

    def blob_names(self, incarnation: int, prefix: str) -> list[str]:
        start = _owned(incarnation, "")
        with self._told("reading"):
            names = [name.removeprefix(start) for name in self._names(self._answers) if name.startswith(start)]
        return [name for name in names if name.startswith(prefix) and not name.endswith(TEMPORARY)]

    def remove_blob(self, incarnation: int, name: str) -> None:
        with self._told("writing to"):
            self._remove(f"{self._answers}/{_owned(incarnation, name)}")

    # -- steps ---------------------------------------------------------------------------------------

    def _begin(self, write: str) -> str:
        path = self._staged(write)
        self._files.make_directory(path)
        sync_parents(self._files, path)
        return path

    def _staged(self, write: str) -> str:
        return f"{self._inbox}/{check_file_name(write)}{STAGED}"

    def _names(self, folder: str) -> list[str]:
        return self._files.list(folder) if self._files.exists(folder) else []

    def _make(self, folder: str) -> None:
        """A folder that lasts as what is put into it does."""
        if not self._files.exists(folder):
            self._files.make_directory(folder)
            sync_parents(self._files, folder)

    def _remove_errand(self, path: str, body: bytes | None) -> None:
        """It is put aside first: what is put in its place meanwhile is not removed with it."""
        aside = path
        if path.endswith(ERRAND):
            aside = path.removesuffix(ERRAND) + DONE
            if not self._files.exists(path):  # taken back
                return
            self._files.rename(path, aside)
        if body is None or read_file(self._files, aside) == body:
            self._remove(aside)

    def _discard(self, name: str) -> None:
        """Rename first: a folder that is half removed is none of those that anybody looks at."""
        gone = name if name.endswith(GONE) else f"{name}{GONE}"
        if gone != name:
            if self._files.exists(f"{self._inbox}/{gone}"):  # of an earlier one of this name, whose removal was cut off
                self._discard(gone)
            self._files.rename(f"{self._inbox}/{name}", f"{self._inbox}/{gone}")
            self._files.sync_directory(self._inbox)
        for file in self._files.list(f"{self._inbox}/{gone}"):
            self._remove(f"{self._inbox}/{gone}/{file}")
        self._files.remove_directory(f"{self._inbox}/{gone}")

    def _remove(self, path: str) -> None:
        if self._files.exists(path):
            self._files.remove(path)

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_failed(error, f"{doing} the inbox of", self._root) from error

    def __repr__(self) -> str:
        return f"FileInbox({self._inbox!r})"


def published_write_path(incarnation: int, source: str, number: int) -> str:
    """Where a drop lies."""
    return f"{_owned(incarnation, published_write_name(source, number))}{DROP}"


def _owned(incarnation: int, name: str) -> str:
    return f"{incarnation:016x}-{check_file_name(name)}"


def _parse(file: str) -> InboxEntry | None:
    for ending in (DROP, ERRAND, DONE):
        incarnation, dash, name = file.removesuffix(ending).partition("-")
        if file.endswith(ending) and dash:
            try:
                return InboxEntry(int(incarnation, 16), name, file, ending != DROP)
            except ValueError:
                return None
    return None


# -- staged parts --------------------------------------------------------------------------------------


MAKE_AGAIN = 100
"""How often the folder of a part is made again; it is gone as often as another writer fails at that very moment."""


class StagedWriter:
    """One part on its way to the disk. Made with its first frame, unless `begin` is called: what has none is no file."""

    def __init__(self, files: Files, path: str, incarnation: int, make_folder: Callable[[], object] | None = None) -> None:
        """make_folder: makes the folder of the part, where it may be missing."""
        self.path = path
        self.name = path.rpartition("/")[2]
        self._make_folder = make_folder
        self._files = files
        self._incarnation = incarnation
        self._encoders: dict[int, FrameEncoder] = {}
        self._handle: int | None = None
        self._kept: tuple[Draft, int] | None = None
        self._size = 0
        self._frames = 0
        self._items = 0

    def begin(self) -> None:
        """Make the file now."""
        if self._handle is None:
            try:
                self._handle = self._make()
            except OSError as error:
                raise storage_failed(error, "writing", self.path) from error

    def add(self, draft: Draft, partition: int = 0) -> int:
        """Append a frame, and say where it begins. The one before it is written now that it is known not to be the last."""
        if draft.type is not FrameType.DATA or draft.base_offset:
            raise InvalidRequest(f"a part takes DATA frames of base 0, not {draft._replace(parts=())}; give one that Sheet.draft made")
        self._write(MORE_IN_GROUP)
        self._kept = draft, partition
        return self._size

    def sidecar(self) -> BinaryIO:
        try:
            return open(self.path + SIDECAR, "wb")
        except OSError as error:
            raise storage_failed(error, "writing", self.path + SIDECAR) from error

    def finish(self) -> StagedPart:
        """Write what is left, and sync the file and its name."""
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
        """Remove the file, if it was begun, whatever is in it, and its sidecar."""
        self._kept = None
        try:
            self.close()
            for path in (self.path, self.path + SIDECAR):
                if self._files.exists(path):
                    self._files.remove(path)
        except OSError as error:
            raise storage_failed(error, "removing", self.path) from error

    def _make(self) -> int:
        for _ in range(MAKE_AGAIN if self._make_folder is not None else 0):
            try:
                return self._files.open(self.path, "append")
            except FileNotFoundError:
                assert self._make_folder is not None
                self._make_folder()
        return self._files.open(self.path, "append")

    def _write(self, more: int) -> None:
        if self._kept is None:
            return
        draft, partition = self._kept
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
        self._kept = None

    def __repr__(self) -> str:
        return f"StagedWriter({self.path!r}, {self._frames} frames, {self._items} items)"


class StagedReader:
    """A part that is read, frame by frame; CorruptLog for what is not as it was written. Close it."""

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
        """The frame that begins there, which is that one in the row."""
        return self.with_header(position, sequence)[1]

    def with_header(self, position: int, sequence: int) -> tuple[FrameHeader, Frame]:
        try:
            return self._at(position, sequence)
        except OSError as error:
            raise storage_failed(error, "reading", self._path) from error
        except DamagedFrame as error:
            raise self._corrupt(str(error)) from error

    def all(self) -> Iterator[tuple[FrameHeader, Frame]]:
        """Every frame, in order."""
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

    def _at(self, position: int, sequence: int) -> tuple[FrameHeader, Frame]:
        header = parse_header(self._files.pread(self._handle, HEADER_BYTES, position))
        _check(header, self._incarnation, sequence)
        size = frame_bytes(header.stored_bytes)
        if position + size > self._size:  # also where a length is wrong: it is not asked for
            raise DamagedFrame("the file ends inside a frame")
        stored = self._files.pread(self._handle, size - HEADER_BYTES, position + HEADER_BYTES)
        body_bytes = header.stored_bytes + CHECKSUM_BYTES
        if any(stored[body_bytes:]):
            raise DamagedFrame("there is something between two frames")
        return header, unpack_body(header, stored[:body_bytes])

    def _corrupt(self, why: str) -> CorruptLog:
        return CorruptLog(f"the staged part {self._path} is not whole ({why}); nothing of it can be taken: write it again")

    def __repr__(self) -> str:
        return f"StagedReader({self._path!r}, {self._size} bytes)"


def read_part(files: Files, path: str, incarnation: int) -> Iterator[Frame]:
    """The frames of a whole part, in order; CorruptLog as soon as it shows not to be one."""
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
        raise DamagedFrame(f"frame {sequence} is not the one that should be there")
