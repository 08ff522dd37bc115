"""A partition's log in files: segments, each beginning with a Base, and beside them an index, the synced position, a checkpoint.

Owns: `FileLog`, the only writer of a partition's directory, and its states: what may be asked when, and what a failure means.
The work is in the modules beneath: frame (its bytes), segment and chain (files of frames), recovery (reading back, judging damage),
reader (items by offset), tail (writing), rewrite (thinning out old segments).
Limits: one thread, one process; the frames of one `append` go to one segment.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import NoReturn

from penstock.logs.files.filesystem import Files, storage_failed
from penstock.logs.files.log_reader import LogReader
from penstock.logs.files.log_writer import LogWriter
from penstock.logs.files.recovery import LogOpening
from penstock.logs.files.rewrite import check_removable, install_rewritten, write_rewritten
from penstock.logs.files.segment import LogId
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.files.sidefiles import segment_missing
from penstock.logs.frame import FrameEncoder
from penstock.logs.log import ENDLESS, Draft, Durability, Frame, FrameType, Gap, LogRange, SegmentFacts
from penstock.rules.runs import RunSet
from penstock.words.errors import BrokerClosed, InvalidRequest, StorageFailed


class LogState(Enum):
    """What a log may be asked to do."""

    NOT_RECOVERED = auto()
    """`recover` comes first."""
    OPEN = auto()
    WANTS_BASE = auto()
    """`rotate` comes first: the newest segment must not be appended to."""
    FAILED = auto()
    """`reset` comes first."""
    CLOSED = auto()


_OPEN = LogState.OPEN  # looked up at every append


class FileLog:
    """One partition's frames in a directory."""

    def __init__(
        self,
        files: Files,
        directory: str,
        incarnation: int,
        partition: int,
        *,
        durability: Durability = "fsync",
        compression: bool = True,
    ) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.directory = self.where = directory
        self.durability: Durability = durability
        self.waits_for_disk = durability == "fsync"
        self.findings: list[str] = []
        self._files = files
        self._chain = SegmentFiles(files, directory, LogId(incarnation, partition))
        self._compression = compression
        self._tail = LogWriter(files, self._chain, FrameEncoder(incarnation, partition, compression))
        self._reading = LogReader(self._chain, self._chain.forget_missing)
        self._state = LogState.NOT_RECOVERED

    @property
    def segment_bytes(self) -> int:
        return 0 if self._state in (LogState.NOT_RECOVERED, LogState.CLOSED) else self._tail.segment.size

    @property
    def log_id(self) -> LogId:
        return self._chain.log_id

    @property
    def first_offset(self) -> int:
        self._readable()
        return self._chain.names[0].base_offset

    @property
    def closed(self) -> bool:
        return self._state is LogState.CLOSED

    @property
    def sequence(self) -> int:
        """Of the last frame."""
        return self._tail.sequence

    @property
    def unsynced(self) -> bool:
        return self._state is _OPEN and self._tail.unsynced

    @property
    def wants_base(self) -> bool:
        """Whether `rotate` must come before the next `append`: the newest segment is damaged at its end, or a sync of it failed."""
        return self._state is LogState.WANTS_BASE

    def __repr__(self) -> str:
        return f"FileLog({self.directory!r}, {self._state.name}, sequence={self._tail.sequence}, segments={len(self._chain.names)})"

    # -- writing -------------------------------------------------------------------------------------

    def append(self, drafts: Sequence[Draft]) -> int:
        if self._state is not _OPEN:
            self._refuse()
        if not drafts:
            return 0
        try:
            return self._tail.append(drafts)
        except OSError as error:
            self._fail(error, "appending to")

    def sync(self) -> None:
        if self._state is not _OPEN:
            self._refuse()
        if self._tail.unsynced:
            try:
                self._tail.sync(self.durability)
            except OSError as error:
                self._fail(error, "syncing")

    def force_sync(self) -> None:
        """Really sync, whatever the durability mode: in "interval" mode a timer calls this."""
        self._attempt(self._tail.flush, "syncing")

    def publish(self) -> None:
        self._attempt(self._tail.publish, "publishing the synced position of")

    def rotate(self, base: Draft) -> None:
        if self._state not in (_OPEN, LogState.WANTS_BASE):
            self._refuse()
        try:
            if self._state is _OPEN:
                self._tail.flush()
            self._tail.begin_segment(base)
        except OSError as error:
            self._fail(error, "rotating")
        self._state = LogState.OPEN

    def write_checkpoint(self, body: bytes, elapsed: int, wall: int, base: int) -> None:
        """Store a copy of the state after everything appended, so that the next opening need not replay it."""
        self.force_sync()  # in every mode: a checkpoint that outlived the frames it rests on might fit those written in their place
        if not self._tail.segment.size:
            return
        try:
            self._tail.write_checkpoint(Draft(FrameType.BASE, base, 1, 0, elapsed, wall, [body]))
        except OSError as error:
            self._fail(error, "writing a checkpoint in")

    def write_summary(self, body: bytes) -> None:
        self.force_sync()
        self._attempt(lambda: self._tail.write_summary(body), "writing a summary in")

    # -- reading -------------------------------------------------------------------------------------

    def read(self, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
        self._readable()
        return self._reading.read(start, stop, self._tail.sequence, self._tail.offset, size_bytes)

    def frames(self, after: int = 0) -> Iterator[Frame | Gap]:
        self._readable()
        return self._reading.frames(self._tail.sequence, self._tail.offset, after)

    def offset_at(self, wall: int) -> int:
        self._readable()
        return self._reading.offset_at(wall, self._tail.offset)

    # -- letting go of what is old -------------------------------------------------------------------

    def segments(self) -> list[SegmentFacts]:
        self._readable()
        return self._reading.segments()

    def readable_range(self) -> LogRange:
        self._readable()
        return self._reading.published(lambda: (self._tail.offset, self._tail.sequence))

    def size_bytes(self) -> int:
        self._readable()
        return self._reading.size_bytes()

    def newest(self) -> SegmentFacts:
        self._readable()
        return self._reading.newest()

    def drop(self, count: int) -> int:
        if not count:
            return 0
        self.force_sync()
        try:
            check_removable(self._chain, 0, count - 1, spared=1)
            return self._chain.drop_oldest(count)
        except OSError as error:
            self._fail(error, "dropping segments of")
        finally:
            self._reading.forget_positions()

    def rewrite(self, first: int, last: int, keep: Sequence[int]) -> int:
        self.force_sync()
        encoder = FrameEncoder(self.incarnation, self.partition, self._compression)
        try:
            check_removable(self._chain, first, last, spared=2)
            new = write_rewritten(self._files, self._chain, first, last, RunSet(keep), encoder)
        except OSError as error:
            raise storage_failed(error, "rewriting segments of", self.directory) from error
        try:
            return install_rewritten(self._chain, first, last, new)
        except OSError as error:
            self._fail(error, "rewriting segments of")
        finally:
            self._reading.forget_positions()

    def free_bytes(self) -> int:
        try:
            return self._files.free_bytes(self.directory)
        except OSError as error:
            raise storage_failed(error, "looking at", self.directory) from error

    # -- opening and closing -------------------------------------------------------------------------

    def recover(self) -> Iterator[Frame | Gap]:
        if self._state is LogState.CLOSED:
            self._refuse()
        self._state = LogState.NOT_RECOVERED
        try:
            yield from self._open()
        except OSError as error:
            raise storage_failed(error, "opening", self.directory) from error

    def _open(self) -> Iterator[Frame | Gap]:
        chain, tail = self._chain, self._tail
        self.findings.clear()
        self._reading.forget_positions()
        for stray in chain.load():
            self._files.remove(f"{self.directory}/{stray}")
        synced = tail.load_synced()
        if segment_missing(synced, chain.names):
            synced = tail.publish_as_fsynced()
        if not chain.names:
            tail.create_first_segment()
        opening = LogOpening(self._files, chain, synced, self.findings)
        while opening.torn_rotation():
            self.findings.append(f"segment {chain.names[-1]} had no whole frame (a rotation was cut off) and was removed")
            chain.drop_newest()
        chain.open_newest()
        yield from opening.frames()
        tail.resume(opening.replay)
        if opening.unfit_checkpoint():
            tail.remove_checkpoint()
        self._settle(opening)

    def _settle(self, opening: LogOpening) -> None:
        """Bring the files in line with what was handed out."""
        tail, end = self._tail, opening.replay.end
        name, size = tail.segment.name, tail.segment.size
        if opening.damaged:
            self.findings.append(f"segment {name} is damaged at its end and was left as it is; the log goes on in a new segment")
            self._state = LogState.WANTS_BASE
            return
        if size > end:
            self.findings.append(f"segment {name} ended in {size - end} bytes that are no whole group of frames; they were cut")
            tail.cut(end)
        tail.confirm_end(opening.fsynced_bytes, self.durability)
        self._state = LogState.WANTS_BASE if tail.sync_failed else LogState.OPEN

    def reset(self) -> None:
        if self._state is LogState.CLOSED:
            self._refuse()
        try:
            self._reading.forget_positions()
            self._tail.truncate_to_synced()
        except OSError as error:
            self._fail(error, "resetting")
        self._state = LogState.NOT_RECOVERED

    def close(self) -> None:
        state, self._state = self._state, LogState.CLOSED
        try:
            if state is _OPEN:
                self._tail.flush()
                with contextlib.suppress(OSError):  # an index is made anew when it is missing
                    self._chain.store_index(self._tail.segment)
        except OSError as error:
            raise storage_failed(error, "closing", self.directory) from error
        finally:
            self._release()

    def close_without_sync(self) -> None:
        """Let go without writing anything: what a forked child does with its parent's log."""
        self._state = LogState.CLOSED
        self._release()

    def _release(self) -> None:
        self._chain.close()
        self._tail.close()

    # -- refusing ------------------------------------------------------------------------------------

    def _attempt(self, step: Callable[[], None], doing: str) -> None:
        if self._state is not _OPEN:
            self._refuse()
        try:
            step()
        except OSError as error:
            self._fail(error, doing)

    def _fail(self, error: OSError, doing: str) -> NoReturn:
        self._state = LogState.FAILED
        raise storage_failed(error, doing, self.directory) from error

    def _refuse(self) -> NoReturn:
        """Say why this cannot be done now."""
        if self._state is LogState.CLOSED:
            raise BrokerClosed(f"the log {self.directory} is closed; open it again")
        if self._state is LogState.FAILED:
            raise StorageFailed(f"the log {self.directory} failed before; reset and recover it first")
        if self._state is LogState.NOT_RECOVERED:
            raise InvalidRequest(f"the log {self.directory} is not recovered; exhaust recover() first")
        raise InvalidRequest(f"the log {self.directory} must begin a new segment; call rotate() with a Base first")

    def _readable(self) -> None:
        if self._state in (LogState.CLOSED, LogState.NOT_RECOVERED):
            self._refuse()
