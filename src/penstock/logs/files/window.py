"""Reading ahead in one file, so that many small frames cost one system call and a large one costs no copy.

Owns: `Window`. A file under it only grows: what was read once stays true. Whoever cuts a file,
or reads one whose end may still change, opens a new window.
"""

from collections.abc import Iterator

from penstock.logs.files.system import Files

MIN_CHUNK_BYTES = 4 * 1024
MAX_CHUNK_BYTES = 256 * 1024


class Window:
    """A stretch of a file held in memory. It widens while reads follow each other, and narrows when they jump or are large."""

    __slots__ = ("_chunk_bytes", "_files", "_handle", "_held", "_start")

    def __init__(self, files: Files, handle: int) -> None:
        self._files = files
        self._handle = handle
        self._held = b""
        self._start = 0
        self._chunk_bytes = MIN_CHUNK_BYTES

    def read(self, position: int, size: int) -> bytes:
        """That many bytes from there on, fewer only where the file ends."""
        start = position - self._start
        held = len(self._held)
        if start >= 0 and start + size <= held:
            return self._held[start : start + size]
        if size > MIN_CHUNK_BYTES and not 0 <= start <= held - size // 2:
            self._chunk_bytes = MIN_CHUNK_BYTES
            return self._files.pread(self._handle, size, position)
        return self._refill(position, size, follows=0 < start <= held)

    def places(self, what: bytes, position: int, stop: int, step: int) -> Iterator[int]:
        """Where `what`, no longer than `step`, lies inside [position, stop) at a multiple of `step`; `position` is one itself."""
        while position < stop:
            chunk = self._files.pread(self._handle, min(MAX_CHUNK_BYTES, stop - position), position)
            place = chunk.find(what)
            while place >= 0:
                if place % step == 0:
                    yield position + place
                place = chunk.find(what, place + 1)
            if not chunk:
                return
            position += len(chunk)

    def _refill(self, position: int, size: int, follows: bool) -> bytes:
        self._chunk_bytes = min(2 * self._chunk_bytes, MAX_CHUNK_BYTES) if follows else MIN_CHUNK_BYTES
        self._held = self._files.pread(self._handle, max(size, self._chunk_bytes), position)
        self._start = position
        return self._held[:size]
