"""The writer of a file log: appends to the newest segment, syncs it, and publishes how much of it is durable.

Owns: `LogWriter`. It raises OSError as the system does; `FileLog` decides which calls are allowed and what a failure
means.
Invariants
- sequence, offset and size change only after the bytes are written;
- the synced position is published after the sync that it describes; before bytes are cut, a position that ends before
  them is published and synced;
- bytes are overwritten with zeros, durably, before they are cut: if a power cut undoes the cut, no frame comes back;
- after a failed sync (`sync_failed`) the page cache is not trusted: bytes that are kept are written again, and a new
  segment begins.
"""

from collections.abc import Sequence

import msgspec

from penstock.logs.files.filesystem import TEMPORARY, Files, overwrite_with_zeros, replace_file, write_again, write_all
from penstock.logs.files.recovery import Replay
from penstock.logs.files.segment import FIRST, ReadAhead, Segment, SegmentName, SparseIndex
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.files.sidefiles import CHECKPOINT, SUMMARY, SyncedFile, SyncedPosition, pack_checkpoint, pack_summary
from penstock.logs.frame import AFTER_SYNC, CONTINUES_GROUP, MORE_IN_GROUP, FrameEncoder
from penstock.logs.log import Buffer, Draft, Durability, FrameType

MAX_LAG_BYTES = 16 * 1024
"""How far the published position may lag in the modes other than fsync. `publish` writes the current one."""
NOTHING_PUBLISHED = SyncedPosition(SegmentName(-1, 0), 0, 0, 0, "os")
_DATA = FrameType.DATA  # a module constant, because every append reads it


class LogWriter:
    """Appends to a log. Call `resume` before anything else, and again after each `truncate_to_synced`."""

    segment: Segment
    index: SparseIndex
    """The index of `segment`."""

    def __init__(self, files: Files, segments: SegmentFiles, encoder: FrameEncoder) -> None:
        self.sequence = 0
        """The sequence of the last frame."""
        self.offset = 0
        """The next item offset."""
        self.synced: SyncedPosition | None = None
        """How far the log is durable, as its durability mode defines it."""
        self.sync_failed = False
        """Whether a sync failed and no new segment was begun since."""
        self._files = files
        self._segments = segments
        self._encoder = encoder
        self._synced_file = SyncedFile(files, segments.directory)
        self._last = 0  # the position of the last frame
        self._published = NOTHING_PUBLISHED  # the content of the file `synced`
        self._fsynced_bytes = 0  # how many bytes of the segment are covered by an fsync

    @property
    def unsynced(self) -> bool:
        return self.synced is None or self.sequence > self.synced.sequence

    def append(self, drafts: Sequence[Draft]) -> int:
        """Write frames as one group; returns their size in bytes."""
        segment, sequence, encode = self.segment, self.sequence, self._encoder.encode
        end, left = segment.size, len(drafts)
        synced = self.synced
        flags = 0 if synced is None or sequence > synced.sequence else AFTER_SYNC
        vector: list[Buffer] = []
        starts = []
        for draft in drafts:
            sequence += 1
            left -= 1
            starts.append(end)
            end += encode(draft, sequence, flags | MORE_IN_GROUP if left else flags, vector)
            flags = CONTINUES_GROUP
        size = end - segment.size
        write_all(self._files, segment.handle, vector, size)
        self._count(drafts, starts, end)
        return size

    def sync(self, durability: Durability) -> None:
        """Make every appended frame durable, as the mode defines it, and publish the new position."""
        if durability == "fsync":
            self._sync(self.segment)
            self._fsynced_bytes = self.segment.size
        self._publish(durability)

    def flush(self) -> None:
        """Fsync and publish every appended frame, unless that is done."""
        lacking = self.synced is None or self.synced.durability != "fsync"
        if lacking or self.unsynced or self._fsynced_bytes < self.segment.size:
            self.sync("fsync")

    def begin_segment(self, base: Draft) -> None:
        """Begin a new segment with a Base. Its file and name are synced before its position is published."""
        self._segments.store_index(self.segment)
        sequence = self.sequence + 1
        vector: list[Buffer] = []
        size = self._encoder.encode(base, sequence, AFTER_SYNC, vector)
        segment = self._segments.create(SegmentName(base.base_offset, sequence))
        write_all(self._files, segment.handle, vector, size)
        self._sync(segment)
        self._files.sync_directory(self._segments.directory)
        self._use_segment(segment)
        self._count([base], [0], size)
        self._fsynced_bytes = size
        self._publish("fsync")
        self.sync_failed = False

    def write_checkpoint(self, base: Draft) -> None:
        """Store a copy of the state after the last frame, which must be synced."""
        segment = self.segment
        data = pack_checkpoint(segment.name, self._last, segment.size, self.sequence, base, self._segments.log_id)
        self._segments.store_index(segment)
        replace_file(self._files, self._segments.directory, CHECKPOINT, data)

    def write_summary(self, body: bytes) -> None:
        """Store the owner's summary of the log, which must be synced.

        The summary is not synced: its reader checks that it is whole and matches the log.
        """
        self.publish()
        path = f"{self._segments.directory}/{SUMMARY}"
        if self.synced is None:
            return
        handle = self._files.open(path + TEMPORARY, "update")
        try:
            self._files.truncate(handle, 0)
            self._files.pwrite(handle, pack_summary(self.synced.pack(), body), 0)
        finally:
            self._files.close(handle)
        self._files.rename(path + TEMPORARY, path)

    def remove_checkpoint(self) -> None:
        self._files.remove(f"{self._segments.directory}/{CHECKPOINT}")
        self._files.sync_directory(self._segments.directory)

    # -- opening -------------------------------------------------------------------------------------

    def load_synced(self) -> SyncedPosition | None:
        """Read the published position from its file and use it as the synced position."""
        self.synced = self._synced_file.read()
        self._published = self.synced or NOTHING_PUBLISHED
        return self.synced

    def publish_as_fsynced(self) -> SyncedPosition | None:
        """Publish the same position with durability "fsync", durably.

        Called when the segment of the position is missing. Otherwise, if the opening crashed, the next one could take
        the missing frames for frames that were never synced.
        """
        if self.synced is not None and self.synced.durability != "fsync":
            self.synced = msgspec.structs.replace(self.synced, durability="fsync")
            self._write_synced(self.synced)
            self._synced_file.sync()
        return self.synced

    def create_first_segment(self) -> None:
        """Create the first segment of a new log, durably."""
        self._files.make_directory(self._segments.directory)
        self._segments.create(FIRST)
        self._files.sync_directory(self._segments.directory)

    def resume(self, replay: Replay) -> None:
        """Continue at the end that a replay reached."""
        self.sequence, self.offset, self._last = replay.sequence, replay.offset, replay.last
        self._use_segment(self._segments.segment(self._segments.names[-1]))

    def cut(self, end: int) -> None:
        """Cut the segment's bytes from `end` on.

        They are overwritten with zeros first. If the process ends before the cut is synced, the next process finds a
        log that ends at `end` and has no reason to sync it. A power cut may then undo the cut, and must not bring back
        the frames that were cut.
        """
        segment = self.segment
        self._segments.remove_index(segment.name)
        overwrite_with_zeros(self._files, segment.path, end, segment.size)
        self._sync(segment)
        self._files.truncate(segment.handle, end)
        self._sync(segment)
        segment.size = end
        segment.read_ahead = ReadAhead(self._files, segment.handle)  # the old one may hold bytes that were cut

    def confirm_end(self, fsynced_bytes: int, durability: Durability) -> None:
        """Make the bytes that recovery has read durable, then publish them. Those below `fsynced_bytes` are durable."""
        segment = self.segment
        self._fsynced_bytes = min(self._fsynced_bytes if self.sync_failed else fsynced_bytes, segment.size)
        if self._fsynced_bytes < segment.size and (self.sync_failed or durability == "fsync"):
            write_again(self._files, segment.path, self._fsynced_bytes, segment.size)
            self._fsynced_bytes = segment.size
        self.index = self._segments.index(segment)
        if self.synced is not None and self.synced.segment != segment.name:  # its name may not be synced
            self._files.sync_directory(self._segments.directory)
        self._republish(durability)

    def _republish(self, durability: Durability) -> None:
        """Publish the end of the log, unless it is published with the same durability or with "fsync"."""
        segment = self.segment
        here = (segment.name, segment.size, self.sequence, self.offset)
        if self.synced is None or not self.synced.sequence:  # nothing published, or an earlier opening failed here
            self._publish(durability)
            self._synced_file.sync()  # once: after this a power cut may leave an older position, but no empty file
            self._files.sync_directory(self._segments.directory)
        elif self.synced not in (SyncedPosition(*here, durability), SyncedPosition(*here, "fsync")):
            self._publish(durability)

    def truncate_to_synced(self) -> None:
        """Cut everything after the synced position.

        The position is published and synced first: a published position must not include bytes that are cut.
        """
        synced = self.synced
        if synced is None:
            return
        if self.segment.name != synced.segment or self._fsynced_bytes > synced.position:
            self._fsynced_bytes = synced.position
        self.close()
        self._segments.load()
        self._write_synced(synced)
        self._synced_file.sync()
        while self._segments.names and self._segments.names[-1] > synced.segment:
            self._segments.remove_newest()
        if self._segments.names and self._segments.names[-1] == synced.segment:
            self.segment = self._segments.open_newest()
            if self.segment.size > synced.position:
                self.cut(synced.position)

    def close(self) -> None:
        self._synced_file.close()

    # -- steps ---------------------------------------------------------------------------------------

    def _use_segment(self, segment: Segment) -> None:
        self.segment = segment
        self.index = segment.index or SparseIndex()

    def _count(self, drafts: Sequence[Draft], starts: list[int], end: int) -> None:
        """Update sequence, offset, size and index after frames were written."""
        index = self.index
        for draft, start in zip(drafts, starts):  # noqa: B905 - same length, and the check would cost on this hot path
            kind, base, count, _, _, wall, _ = draft
            if kind is _DATA:
                self.offset = base + count
                if start >= index.next_entry_at:
                    index.add(base, wall, start)
            elif base > self.offset:
                self.offset = base
        index.extend(end, wall)
        self.sequence += len(drafts)
        self._last = start
        self.segment.size = end

    def _sync(self, segment: Segment) -> None:
        try:
            self._files.sync(segment.handle)
        except OSError:
            self.sync_failed = True
            raise

    def publish(self) -> None:
        """Write the synced position to its file, if the file has an older one."""
        if self.synced is not None and self.synced != self._published:
            self._write_synced(self.synced)

    def _publish(self, durability: Durability) -> None:
        """Set the synced position to the end of the log, and write its file if needed.

        Writing the file costs as much as a small append, so in the modes other than fsync the file may lag.
        """
        synced, published = SyncedPosition(self.segment.name, self.segment.size, self.sequence, self.offset, durability), self._published
        if durability == "fsync" or published.segment != synced.segment or synced.position - published.position >= MAX_LAG_BYTES:
            self._write_synced(synced)
        self.synced = synced

    def _write_synced(self, synced: SyncedPosition) -> None:
        self._synced_file.publish(synced)
        self._published = synced
