"""The writing end of a file log: the newest segment, what it holds, and how much of it is promised.

Owns: `LogWriter`. It appends, syncs, publishes, begins segments, cuts; it keeps count and raises OSError as the system does.
What a failure means, and what may be asked when, is `FileLog`'s.
Invariants
- counts (sequence, offset, size) move only after the bytes are written;
- the synced position is published after the sync it speaks of, and taken back, durably, before bytes it speaks of are cut;
- bytes are blanked, durably, before they are cut: a cut that a power cut undoes brings no frame back;
- after a failed sync (`sync_failed`) the file's cached pages are not trusted: what is kept of them is written anew, then a new segment begun.
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
"""How far the published position may lag behind in the modes that promise less than fsync; `publish` brings it up."""
NOTHING_PUBLISHED = SyncedPosition(SegmentName(-1, 0), 0, 0, 0, "os")
_DATA = FrameType.DATA  # looked up at every append


class LogWriter:
    """Where a log grows. Use `begin` before anything else, again after each `go_back`."""

    segment: Segment
    index: SparseIndex
    """Of that segment."""

    def __init__(self, files: Files, chain: SegmentFiles, encoder: FrameEncoder) -> None:
        self.sequence = 0
        """Of the last frame."""
        self.offset = 0
        """The next item offset."""
        self.synced: SyncedPosition | None = None
        """What was published last."""
        self.sync_failed = False
        """A sync failed, and no new segment was begun since."""
        self._files = files
        self._chain = chain
        self._encoder = encoder
        self._synced_file = SyncedFile(files, chain.directory)
        self._last = 0  # where the last frame starts
        self._told = NOTHING_PUBLISHED  # what the file says
        self._solid = 0  # bytes of the segment that a real sync covers

    @property
    def unsynced(self) -> bool:
        return self.synced is None or self.sequence > self.synced.sequence

    def append(self, drafts: Sequence[Draft]) -> int:
        """Write frames as one group, and say how many bytes they took."""
        segment, sequence, encode = self.segment, self.sequence, self._encoder.encode
        end, left = segment.size, len(drafts)
        flags = 0 if self.unsynced else AFTER_SYNC
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
        """Keep and publish what was appended, as the mode promises."""
        if durability == "fsync":
            self._sync(self.segment)
            self._solid = self.segment.size
        self._publish(durability)

    def flush(self) -> None:
        """Really sync what is not."""
        lacking = self.synced is None or self.synced.durability != "fsync"
        if lacking or self.unsynced or self._solid < self.segment.size:
            self.sync("fsync")

    def begin_segment(self, base: Draft) -> None:
        """The new segment is whole and synced under its final name before anything is said of it."""
        self._chain.store_index(self.segment)
        sequence = self.sequence + 1
        vector: list[Buffer] = []
        size = self._encoder.encode(base, sequence, AFTER_SYNC, vector)
        segment = self._chain.create(SegmentName(base.base_offset, sequence))
        write_all(self._files, segment.handle, vector, size)
        self._sync(segment)
        self._files.sync_directory(self._chain.directory)
        self._take(segment)
        self._count([base], [0], size)
        self._solid = size
        self._publish("fsync")
        self.sync_failed = False

    def write_checkpoint(self, base: Draft) -> None:
        """Store a copy of the state after everything appended, which must be synced."""
        segment = self.segment
        data = pack_checkpoint(segment.name, self._last, segment.size, self.sequence, base, self._chain.log_id)
        self._chain.store_index(segment)
        replace_file(self._files, self._chain.directory, CHECKPOINT, data)

    def write_summary(self, body: bytes) -> None:
        """Store what the owner says of everything appended, which must be synced. Not synced itself: it is checked when it is read."""
        self.publish()
        path = f"{self._chain.directory}/{SUMMARY}"
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
        self._files.remove(f"{self._chain.directory}/{CHECKPOINT}")
        self._files.sync_directory(self._chain.directory)

    # -- opening -------------------------------------------------------------------------------------

    def load_synced(self) -> SyncedPosition | None:
        """What the file says, which is taken as published from now on."""
        self.synced = self._synced_file.read()
        self._told = self.synced or NOTHING_PUBLISHED
        return self.synced

    def publish_as_fsynced(self) -> SyncedPosition | None:
        """Publish the same position as one that must be there, durably: its segment is missing, and what a crash during the opening leaves
        must not look like an ordinary loss of what was not synced."""
        if self.synced is not None and self.synced.durability != "fsync":
            self.synced = msgspec.structs.replace(self.synced, durability="fsync")
            self._tell(self.synced)
            self._synced_file.sync()
        return self.synced

    def create_first_segment(self) -> None:
        """Make the first segment of a new log."""
        self._files.make_directory(self._chain.directory)
        self._chain.create(FIRST)
        self._files.sync_directory(self._chain.directory)

    def resume(self, replay: Replay) -> None:
        """Take up the end that a replay reached."""
        self.sequence, self.offset, self._last = replay.sequence, replay.offset, replay.last
        self._take(self._chain.segment(self._chain.names[-1]))

    def cut(self, end: int) -> None:
        """Drop the segment's bytes from there on.

        They are blanked first. When the process ends before the cut is synced, the next one finds a log that ends here and has no reason
        to sync it; a power cut may then undo the cut, and must not bring back frames that were given up.
        """
        segment = self.segment
        self._chain.remove_index(segment.name)
        overwrite_with_zeros(self._files, segment.path, end, segment.size)
        self._sync(segment)
        self._files.truncate(segment.handle, end)
        self._sync(segment)
        segment.size = end
        segment.read_ahead = ReadAhead(self._files, segment.handle)  # the old one may hold what was cut

    def confirm_end(self, solid: int, durability: Durability) -> None:
        """Make sure of bytes that were read back: below `solid` a sync is known to cover them. Then publish them."""
        segment = self.segment
        self._solid = min(self._solid if self.sync_failed else solid, segment.size)
        if self._solid < segment.size and (self.sync_failed or durability == "fsync"):
            write_again(self._files, segment.path, self._solid, segment.size)
            self._solid = segment.size
        self.index = self._chain.index(segment)
        if self.synced is not None and self.synced.segment != segment.name:  # whoever made the file may have died before its name was kept
            self._files.sync_directory(self._chain.directory)
        self._republish(durability)

    def _republish(self, durability: Durability) -> None:
        """Publish unless the same, or a firmer promise of the same, is published already."""
        segment = self.segment
        here = (segment.name, segment.size, self.sequence, self.offset)
        if self.synced is None or not self.synced.sequence:  # before the first promise: an opening that failed may have done half of this
            self._publish(durability)
            self._synced_file.sync()  # once, so that a power cut can leave it behind the log but not empty
            self._files.sync_directory(self._chain.directory)
        elif self.synced not in (SyncedPosition(*here, durability), SyncedPosition(*here, "fsync")):
            self._publish(durability)

    def truncate_to_synced(self) -> None:
        """Drop everything after the synced position. It is published again first: no promise may outlive the bytes it speaks of."""
        synced = self.synced
        if synced is None:
            return
        if self.segment.name != synced.segment or self._solid > synced.position:
            self._solid = synced.position
        self.close()
        self._chain.load()
        self._tell(synced)
        self._synced_file.sync()
        while self._chain.names and self._chain.names[-1] > synced.segment:
            self._chain.drop_newest()
        if self._chain.names and self._chain.names[-1] == synced.segment:
            self.segment = self._chain.open_newest()
            if self.segment.size > synced.position:
                self.cut(synced.position)

    def close(self) -> None:
        self._synced_file.close()

    # -- steps ---------------------------------------------------------------------------------------

    def _take(self, segment: Segment) -> None:
        self.segment = segment
        self.index = segment.index or SparseIndex()

    def _count(self, drafts: Sequence[Draft], starts: list[int], end: int) -> None:
        """Take up frames that were written."""
        index = self.index
        for draft, start in zip(drafts, starts):  # noqa: B905 - of one length, and checking costs on this path
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
        """Bring the file up to what is promised."""
        if self.synced is not None and self.synced != self._told:
            self._tell(self.synced)

    def _publish(self, durability: Durability) -> None:
        """Promise what was appended. Writing the file costs as much as a small append, so where the promise is a lesser one it may lag."""
        synced, told = SyncedPosition(self.segment.name, self.segment.size, self.sequence, self.offset, durability), self._told
        if durability == "fsync" or told.segment != synced.segment or synced.position - told.position >= MAX_LAG_BYTES:
            self._tell(synced)
        self.synced = synced

    def _tell(self, synced: SyncedPosition) -> None:
        self._synced_file.publish(synced)
        self._told = synced
