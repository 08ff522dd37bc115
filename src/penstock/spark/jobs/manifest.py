"""The manifest of an archive: which rows of which partitions are in which files.

Owns: `ArchiveManifest` and its JSON, `describe_files`, which reads written files back, and `sync`.
A manifest is replaced by a rename: a reader sees the old or the new one, never a part.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.logs.files.filesystem import SystemFiles, read_file, replace_file, storage_failed
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import CorruptLog

VERSION = 1


class PartitionRange(msgspec.Struct, frozen=True):
    """The rows of one partition, from the first to the last offset (log sequence for events). There may be gaps."""

    partition: int
    first: int
    last: int
    rows: int
    last_rows: int = 0
    """How many rows have the number `last`: a frame holds any number of events. 0: from an earlier version."""


class ArchivedFile(msgspec.Struct, frozen=True):
    """One Parquet file; its path is relative to the table's folder."""

    path: str
    size_bytes: int
    rows: int
    ranges: list[PartitionRange]


class ArchivedBatch(msgspec.Struct, frozen=True):
    """The files of one micro-batch."""

    name: str
    archived_at: str
    files: list[ArchivedFile]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


class ArchiveManifest(msgspec.Struct, frozen=True):
    """The archive of one table of one queue."""

    table: str
    queue: str
    incarnation: str
    batches: list[ArchivedBatch] = []
    newest: str = ""
    """The micro-batch entered last, even if it had no rows: a checkpoint beyond it is of another archive."""
    version: int = VERSION

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)

    def last_numbers(self) -> dict[int, int]:
        """The last archived offset or log sequence of each partition."""
        found: dict[int, int] = {}
        for batch in self.batches:
            for file in batch.files:
                for part in file.ranges:
                    found[part.partition] = max(part.last, found.get(part.partition, -1))
        return found

    def last_rows(self, root: str) -> dict[int, int]:
        """How many archived rows of each partition have its last number. root: the table's folder."""
        lasts = self.last_numbers()
        found = dict.fromkeys(lasts, 0)
        for file in (file for batch in self.batches for file in batch.files):
            for part in file.ranges:
                if part.last == lasts[part.partition]:
                    found[part.partition] += part.last_rows or _count_last(f"{root}/{file.path}", part)
        return found

    def with_batch(self, batch: ArchivedBatch) -> "ArchiveManifest":
        """This manifest with a batch added; replaces a batch of the same name."""
        kept = [one for one in self.batches if one.name != batch.name]
        return msgspec.structs.replace(self, batches=[*kept, *([batch] if batch.files else [])], newest=batch.name)


def read(path: str) -> ArchiveManifest | None:
    """The manifest; None if there is no file. CorruptLog if it cannot be decoded."""
    try:
        raw = read_file(SystemFiles(), path)
    except OSError as error:
        raise storage_failed(error, "reading", path) from error
    if raw is None:
        return None
    try:
        found = msgspec.json.decode(raw, type=ArchiveManifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptLog(f"the manifest {path} cannot be read ({error}); restore it from a copy") from error
    if found.version > VERSION:
        raise CorruptLog(f"the manifest {path} has version {found.version}, this Penstock knows {VERSION}; use a newer Penstock")
    return found


def write(path: str, manifest: ArchiveManifest) -> ArchiveManifest:
    """Replace the manifest and sync it."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    try:
        replace_file(SystemFiles(), os.path.dirname(path), os.path.basename(path), body)
    except OSError as error:
        raise storage_failed(error, "writing", path) from error
    return manifest


def describe_files(paths: Sequence[str], root: str, number: str) -> list[ArchivedFile]:
    """Read written files back. Their ranges are those of the column `number`."""
    return [_describe(path, root, number) for path in paths]


def _count_last(path: str, part: PartitionRange) -> int:
    """How many rows of a file of events have the last sequence of a range; none if the file was removed."""
    if part.first == part.last:
        return part.rows
    if not os.path.exists(path):
        return 0
    wanted = [("partition", "==", part.partition), ("sequence", "==", part.last)]
    return int(pq.read_table(path, columns=["sequence"], partitioning=None, filters=wanted).num_rows)


def _describe(path: str, root: str, number: str) -> ArchivedFile:
    table = pq.read_table(path, columns=["partition", number], partitioning=None)
    grouped = table.group_by("partition").aggregate([(number, "min"), (number, "max"), (number, "count")]).sort_by("partition")
    names = ("partition", f"{number}_min", f"{number}_max", f"{number}_count")
    ranges = []
    for partition, first, last, rows in zip(*(grouped.column(name).to_pylist() for name in names), strict=True):
        last_rows = table.filter((pc.field("partition") == partition) & (pc.field(number) == last)).num_rows
        ranges.append(PartitionRange(partition, first, last, rows, last_rows))
    return ArchivedFile(os.path.relpath(path, root), os.path.getsize(path), table.num_rows, ranges)


def sync(paths: Sequence[str], root: str) -> None:
    """Sync the files and the folders above them, up to the parent of `root`; Spark does not sync."""
    files = SystemFiles()
    folders = {os.path.dirname(path) for path in paths}
    folders |= {os.path.dirname(folder) for folder in folders} | {root, os.path.dirname(root)}
    try:
        for path in paths:
            handle = files.open(path, "read")
            try:
                files.sync(handle)
            finally:
                files.close(handle)
        for folder in sorted(folders):
            if files.exists(folder):
                files.sync_directory(folder)
    except OSError as error:
        raise storage_failed(error, "syncing", root) from error


def now() -> str:
    return datetime.fromtimestamp(SystemClock().read().wall / SECOND, UTC).isoformat()
