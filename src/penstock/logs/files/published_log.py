"""A lock-free reader of a partition that another process may own.

Owns: `PublishedLog`. It writes nothing, takes no lock and stops at the published synced position, so it never sees what may yet be
taken back. Each `read` and `frames` looks first whether more was published.
Its owner may drop and rewrite segments meanwhile: then it looks again and serves what is there, or a Gap that says what happened.
Without a published position (the file was deleted) it reads up to the last whole group.
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
"""Readings of the synced position before it counts as damaged: the owner may be writing it."""


class PublishedLog:
    """One partition's published frames."""

    def __init__(self, files: Files, directory: str, incarnation: int, partition: int) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.directory = self.where = directory
        self.findings: list[str] = []
        self._files = files
        self._chain = SegmentFiles(files, directory, LogId(incarnation, partition))
        self._reading = LogReader(self._chain, self._look_again)
        self._synced_file = SyncedFile(files, directory)
        self._synced: SyncedPosition | None = None
        self._end = 0  # the next item offset, as far as published
        self._last = 0  # the sequence of the last frame published
        self._looked = False
        self._closed = False

    @property
    def first_offset(self) -> int:
        """As api.py says of logs, as far as published."""
        self._refresh()
        return self._chain.names[0].base_offset if self._chain.names else 0

    def recover(self) -> Iterator[Frame | Gap]:
        """Everything published from the latest readable Base on."""
        self._refresh()
        try:
            yield from self._opened()
        except OSError as error:
            raise storage_failed(error, "reading", self.directory) from error

    def _opened(self) -> Iterator[Frame | Gap]:
        for _ in range(ATTEMPTS):
            self.findings.clear()
            opening = LogOpening(self._files, self._chain, self._synced, self.findings)
            found = opening.frames() if self._chain.names else iter(self._all_missing())
            try:
                first = next(found, None)
            except FileNotFoundError:  # dropped before it was opened
                self._look_again()
            else:
                break
        if first is not None:
            yield first
            yield from found
            self._reading.remember_end(opening.replay)

    def read(self, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        """As api.py says of logs, as far as published."""
        self._refresh()
        if not self._chain.names:
            return [gap for gap in self._all_missing() if start < min(stop, gap.stop)]
        return self._reading.read(start, stop, *self._promised(), size_bytes)

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        """Everything retained and published behind frame `after`, oldest first."""
        self._refresh()
        if not self._chain.names:
            return (gap for gap in self._all_missing() if after < gap.last_sequence)
        return self._reading.frames(*self._promised(), after)

    def offset_at(self, wall: int) -> int:
        """As api.py says of logs, as far as published."""
        self._refresh()
        return self._reading.offset_at(wall, self._end)

    def segments(self) -> list[SegmentFacts]:
        """The segments retained, oldest first, as far as published."""
        self._refresh()
        return self._reading.segments()

    def readable_range(self) -> LogRange:
        self._refresh()
        return self._reading.published(lambda: (self._end, self._last))

    def size_bytes(self) -> int:
        self._refresh()
        return self._reading.size_bytes()

    def close(self) -> None:
        self._closed = True
        self._chain.close()

    def __repr__(self) -> str:
        return f"PublishedLog({self.directory!r}, {self._synced}, segments={len(self._chain.names)})"

    def _promised(self) -> tuple[int, int]:
        """The frame and the item offset that must be reached; none where the promise does not hold through a power cut."""
        synced = self._synced
        return (synced.sequence, synced.offset) if synced is not None and synced.durability == "fsync" else (0, 0)

    def _all_missing(self) -> list[Gap]:
        """There is no segment: a Gap for all that was published of a log, none when nothing was."""
        synced = self._synced
        return [] if synced is None or not synced.sequence else [whole_log_gap(synced, self.directory)]

    def _refresh(self) -> None:
        """Look whether more was published, or something taken back."""
        if self._closed:
            raise BrokerClosed(f"the log {self.directory} is closed; open it again")
        try:
            self._catch_up(anew=not self._looked)
        except OSError as error:
            raise storage_failed(error, "reading", self.directory) from error

    def _look_again(self) -> None:
        """A segment that was there before is gone."""
        self._catch_up(anew=True)

    def _catch_up(self, anew: bool) -> None:
        for left in reversed(range(ATTEMPTS)):
            try:
                synced = self._published()
                if anew or synced != self._synced:
                    self._advance(synced, anew)
                return
            except FileNotFoundError:  # what was published a moment ago is dropped already
                if not left:
                    raise
                anew = True

    def _published(self) -> SyncedPosition | None:
        return next((synced for synced in (self._synced_file.read() for _ in range(ATTEMPTS)) if synced is not None), None)

    def _advance(self, synced: SyncedPosition | None, anew: bool) -> None:
        before, self._synced = self._synced, synced
        if synced is not None:
            self._end, self._last = synced.offset, synced.sequence
        grown = before is not None and synced is not None and before.segment == synced.segment and before.position <= synced.position
        if synced is not None and grown and not anew and self._chain.names:
            self._bound(self._chain.segment(self._chain.names[-1]), synced)
        else:
            self._look(synced)
        self._looked = True

    def _look(self, synced: SyncedPosition | None) -> None:
        """Learn anew which segments there are and where they end."""
        chain = self._chain
        self._reading.forget_positions()
        chain.load()
        published = [name for name in chain.names if synced is not None and name <= synced.segment]
        if synced is not None and (published or not chain.names):
            self._synced = as_fsynced_if_missing(synced, chain.names)
            chain.names = published
            if published:
                self._bound(chain.open_newest("read"), synced)
        elif synced is not None and synced != self._published():
            raise FileNotFoundError(f"{synced.segment} is gone")
        else:
            self._look_for_whole_groups()  # nothing is published, or, after a power cut, only what was dropped since

    def _look_for_whole_groups(self) -> None:
        chain = self._chain
        opening = LogOpening(self._files, chain, None, [])
        while chain.names and opening.torn_rotation():
            chain.names = chain.names[:-1]
        if chain.names:
            newest = chain.open_newest("read")
            replay = Replay(chain, segment_start(chain, len(chain.names) - 1), opening.promise())
            deque(replay, maxlen=0)
            newest.size, self._end, self._last = replay.end, replay.offset, replay.sequence

    def _bound(self, newest: Segment, synced: SyncedPosition) -> None:
        """End the newest segment where it is published to; it may be shorter than that, when it is damaged."""
        size = self._chain.file_size(newest)
        newest.size = min(size, synced.position) if newest.name == synced.segment else size
        newest.read_ahead = ReadAhead(self._files, newest.handle)  # it may have read ahead of what was published, and that may have changed
