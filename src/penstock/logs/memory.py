"""A log in memory: the contract of api.py with nothing beneath it.

Owns: `MemoryLog`. What it keeps lives in a plain list that may be handed to a second log, which then finds what the first one wrote:
that is how tests and "memory://" brokers reopen one. It ends with the process, so every `append` is as durable as it will ever be
and `sync` only draws the line that `reset` goes back to.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from penstock.logs.api import Draft, Frame, FrameType, Gap
from penstock.words.errors import BrokerClosed, InvalidRequest


class MemoryLog:
    """One partition's frames, in a list."""

    def __init__(self, incarnation: int, partition: int, kept: list[Frame] | None = None) -> None:
        self.incarnation = incarnation
        self.partition = partition
        self.kept: list[Frame] = [] if kept is None else kept
        """Every frame, oldest first; frame n has sequence n + 1."""
        self.notes: list[str] = []
        self._synced = len(self.kept)
        self._segment_bytes = 0
        self._starts: list[int] = []  # of the DATA frames: first offset, and beside it the frame's place in `kept`
        self._places: list[int] = []
        self._recovered = False
        self._closed = False

    @property
    def segment_bytes(self) -> int:
        return self._segment_bytes

    @property
    def unsynced(self) -> bool:
        return len(self.kept) > self._synced

    @property
    def wants_base(self) -> bool:
        return False

    def recover(self) -> Iterator[Frame | Gap]:
        self._open()
        self._learn()
        yield from self.kept[self._latest_base() :]
        self._recovered = True

    def append(self, drafts: Sequence[Draft]) -> int:
        self._ready()
        frames = [_framed(draft, len(self.kept) + number) for number, draft in enumerate(drafts, 1)]
        for frame in frames:
            self._note(frame, len(self.kept))
            self.kept.append(frame)
        return sum(len(frame.body) for frame in frames)

    def sync(self) -> None:
        self._ready()
        self._synced = len(self.kept)

    def flush(self) -> None:
        self.sync()

    def publish(self) -> None:
        """Nobody else reads it."""
        self._ready()

    def rotate(self, base: Draft) -> None:
        self._ready()
        self._segment_bytes = 0
        self.append([base])
        self.sync()

    def write_checkpoint(self, body: bytes, elapsed: int, wall: int, base: int) -> None:
        """Nothing outlives this log that a checkpoint could speed up."""
        self._ready()

    def read(self, start: int, stop: int) -> list[Frame | Gap]:
        self._ready()
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, stop) if start < stop else first
        frames = [self.kept[place] for place in self._places[first:last]]
        return [frame for frame in frames if frame.base + frame.count > start]

    def frames(self) -> Iterator[Frame | Gap]:
        self._ready()
        yield from list(self.kept)

    def reset(self) -> None:
        self._open()
        del self.kept[self._synced :]
        self._recovered = False

    def close(self) -> None:
        self._closed = True

    def __repr__(self) -> str:
        return f"MemoryLog(partition={self.partition}, frames={len(self.kept)}, synced={self._synced})"

    def _open(self) -> None:
        if self._closed:
            raise BrokerClosed(f"the log of partition {self.partition} is closed; open it again")

    def _ready(self) -> None:
        self._open()
        if not self._recovered:
            raise InvalidRequest(f"the log of partition {self.partition} is not recovered; exhaust recover() first")

    def _latest_base(self) -> int:
        for place in range(len(self.kept) - 1, -1, -1):
            if self.kept[place].type is FrameType.BASE:
                return place
        return 0

    def _learn(self) -> None:
        self._starts.clear()
        self._places.clear()
        self._segment_bytes = 0
        for place, frame in enumerate(self.kept):
            if frame.type is FrameType.BASE:
                self._segment_bytes = 0
            self._note(frame, place)

    def _note(self, frame: Frame, place: int) -> None:
        self._segment_bytes += len(frame.body)
        if frame.type is FrameType.DATA:
            self._starts.append(frame.base)
            self._places.append(place)


def _framed(draft: Draft, sequence: int) -> Frame:
    kind, base, count, columns, elapsed, wall, parts = draft
    return Frame(FrameType(kind), sequence, base, count, columns, elapsed, wall, memoryview(b"".join(parts)))
