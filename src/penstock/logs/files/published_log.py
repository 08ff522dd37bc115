"""A lock-free reader of a partition's log, which another process may own.

Owns: `PublishedLog`. It writes nothing, takes no lock and stops at the published synced position, so it never reads
frames that the owner may still cut. Each call first reads the published position again.
The owner may drop and rewrite segments meanwhile: then this reloads the list of segments and returns what they hold, or
a Gap that says what happened.
Without a published position (its file was deleted) it reads up to the last whole group of frames.
"""

from collections import deque
from collections.abc import Iterator

from penstock.logs.files.filesystem import Files, storage_failed
from penstock.logs.files.log_reader import LogReader
from penstock.logs.files.recovery import LogOpening, Replay, segment_start
from penstock.logs.files.segment import LogId, ReadAhead, Segment
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.files.sidefiles import SyncedFile, SyncedPosition, as_fsynced_if_missing, whole_log_gap
from penstock.logs.log import ENDLESS, Frame, Gap, LogRange, SegmentFacts
from penstock.words.errors import BrokerClosed

ATTEMPTS = 5
"""How often a read is repeated that met the owner's work: a position being written, or a segment being dropped."""


class PublishedLog:
    """The published frames of one partition."""

    def __init__(self, files: Files, directory: str, incarnation: int, partition: int) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.directory = self.where = directory
        self.findings: list[str] = []
        self._files = files
        self._segments = SegmentFiles(files, directory, LogId(incarnation, partition))
        self._reader = LogReader(self._segments, self._reload)
        self._synced_file = SyncedFile(files, directory)
        self._synced: SyncedPosition | None = None
        self._end = 0  # the next item offset after the published frames
        self._last = 0  # the sequence of the last published frame
        self._loaded = False
        self._closed = False

    @property
    def first_offset(self) -> int:
        self._refresh()
        return self._segments.names[0].base_offset if self._segments.names else 0

    def recover(self) -> Iterator[Frame | Gap]:
        """Yield the published frames and gaps from the newest readable Base on."""
        self._refresh()
        try:
            yield from self._replay()
        except OSError as error:
            raise storage_failed(error, "reading", self.directory) from error

    def _replay(self) -> Iterator[Frame | Gap]:
        for left in reversed(range(ATTEMPTS)):
            self.findings.clear()
            opening = LogOpening(self._files, self._segments, self._synced, self.findings)
            found = opening.frames() if self._segments.names else iter(self._lost_log())
            try:
                first = next(found, None)
                break
            except FileNotFoundError:  # the owner dropped a segment before this opened it
                if not left:
                    raise
                self._reload()
        if first is not None:
            yield first
            yield from found
            self._reader.remember_end(opening.replay)

    def read(self, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        self._refresh()
        if not self._segments.names:
            return [gap for gap in self._lost_log() if start < min(stop, gap.stop)]
        return self._reader.read(start, stop, *self._durable_end(), size_bytes)

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        self._refresh()
        if not self._segments.names:
            return (gap for gap in self._lost_log() if after < gap.last_sequence)
        return self._reader.frames(*self._durable_end(), after)

    def offset_at(self, wall: int) -> int:
        self._refresh()
        return self._reader.offset_at(wall, self._end)

    def segments(self) -> list[SegmentFacts]:
        self._refresh()
        return self._reader.segments()

    def readable_range(self) -> LogRange:
        self._refresh()
        return self._reader.readable_range(lambda: (self._end, self._last))

    def size_bytes(self) -> int:
        self._refresh()
        return self._reader.size_bytes()

    def close(self) -> None:
        self._closed = True
        self._segments.close()

    def __repr__(self) -> str:
        return f"PublishedLog({self.directory!r}, {self._synced}, segments={len(self._segments.names)})"

    def _durable_end(self) -> tuple[int, int]:
        """The last frame and the next item offset that must be readable; (0, 0) if they were not published by fsync."""
        synced = self._synced
        return (synced.sequence, synced.offset) if synced is not None and synced.durability == "fsync" else (0, 0)

    def _lost_log(self) -> list[Gap]:
        return whole_log_gap(self._synced, self.directory)

    def _refresh(self) -> None:
        """Read the published position again and follow it."""
        if self._closed:
            raise BrokerClosed(f"the log {self.directory} is closed; open it again")
        try:
            self._catch_up(reload=not self._loaded)
        except OSError as error:
            raise storage_failed(error, "reading", self.directory) from error

    def _reload(self) -> None:
        """Load the list of segments again, because the file of one is gone."""
        self._catch_up(reload=True)

    def _catch_up(self, reload: bool) -> None:
        for left in reversed(range(ATTEMPTS)):
            try:
                synced = self._read_synced()
                if reload or synced != self._synced:
                    self._advance(synced, reload)
                return
            except FileNotFoundError:  # the published segment was dropped meanwhile
                if not left:
                    raise
                reload = True

    def _read_synced(self) -> SyncedPosition | None:
        return next((synced for synced in (self._synced_file.read() for _ in range(ATTEMPTS)) if synced is not None), None)

    def _advance(self, synced: SyncedPosition | None, reload: bool) -> None:
        before, self._synced = self._synced, synced
        if synced is not None:
            self._end, self._last = synced.offset, synced.sequence
        grown = before is not None and synced is not None and before.segment == synced.segment and before.position <= synced.position
        if synced is not None and grown and not reload and self._segments.names:
            self._bound(self._segments.segment(self._segments.names[-1]), synced)
        else:
            self._load(synced)
        self._loaded = True

    def _load(self, synced: SyncedPosition | None) -> None:
        """Load the list of segments, and find where the newest one ends."""
        segments = self._segments
        self._reader.forget_positions()
        segments.load()
        published = [name for name in segments.names if synced is not None and name <= synced.segment]
        if synced is not None and (published or not segments.names):
            self._synced = as_fsynced_if_missing(synced, segments.names)
            segments.names = published
            if published:
                self._bound(segments.open_newest("read"), synced)
        elif synced is not None and synced != self._read_synced():
            raise FileNotFoundError(f"{synced.segment} is gone")
        else:
            self._load_unpublished()  # no position, or, after a power cut, one in a segment that was dropped

    def _load_unpublished(self) -> None:
        """Take the end of the last whole group of frames for the end of the log."""
        segments = self._segments
        opening = LogOpening(self._files, segments, None, [])
        while segments.names and opening.torn_rotation():
            segments.names = segments.names[:-1]
        if segments.names:
            newest = segments.open_newest("read")
            replay = Replay(segments, segment_start(segments, len(segments.names) - 1), opening.expected_end())
            deque(replay, maxlen=0)
            newest.size, self._end, self._last = replay.end, replay.offset, replay.sequence

    def _bound(self, newest: Segment, synced: SyncedPosition) -> None:
        """End the newest segment at the published position, or at the end of its file if that comes first (damage)."""
        size = self._files.size(newest.handle)
        newest.size = min(size, synced.position) if newest.name == synced.segment else size
        newest.read_ahead = ReadAhead(self._files, newest.handle)  # the old one may hold bytes that have changed
