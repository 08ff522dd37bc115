"""What is remembered for a while: answers to requests, and dedup ids.

Owns: `AnswerWindow` (request ids and what was answered) and `DedupIds`.
- In a Window entries lie in generations of a sixteenth of the window by the time they came, so that forgetting drops a whole
  generation and costs nothing per entry. An entry is answered for at least its window, and never after it.
- A dedup id is a 16-byte digest; its first two bytes choose a bucket, in which it lies as 30 bytes: the rest of the digest, the offset of
  the first item produced with it (if that lies elsewhere its number, words/ids.py), the deadline. Entries of a bucket come in the order in
  which they were put, so what is over is trimmed from the front whenever the bucket is used, and everywhere when there are too many
  (`limit`). A million ids take some 35 MB; looking one up searches a few hundred bytes.
"""

import struct
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")


class AnswerWindow(Generic[Value]):
    """Values by 16-byte id, each until its deadline."""

    __slots__ = ("_generations", "total")

    def __init__(self) -> None:
        self._generations: deque[tuple[int, dict[bytes, tuple[int, Value]]]] = deque()
        self.total = 0

    def __len__(self) -> int:
        return self.total

    def get(self, name: bytes, now: int) -> Value | None:
        for _, entries in self._generations:
            found = entries.get(name)
            if found is not None and found[0] > now:
                return found[1]
        return None

    def put(self, name: bytes, value: Value, now: int, span: int) -> None:
        """Remember `value` until now + span; also forgets what is over."""
        self.forget(now)
        deadline = now + span
        step = max(1, span // 16)
        last = deadline - deadline % step + step  # every entry of a generation is over by then
        entries = next((known for until, known in self._generations if until == last), None)
        if entries is None:
            entries = {}
            self._generations.append((last, entries))
        self.total += name not in entries
        entries[name] = (deadline, value)

    def forget(self, now: int) -> None:
        """Drop the generations that are over."""
        if any(until <= now for until, _ in self._generations):
            self._generations = deque(pair for pair in self._generations if pair[0] > now)
            self.total = sum(len(entries) for _, entries in self._generations)

    def live(self, now: int) -> list[tuple[bytes, int, Value]]:
        """What is remembered at `now` as (id, deadline, value), in a settled order."""
        latest: dict[bytes, tuple[int, Value]] = {}
        for _, entries in self._generations:
            for name, (deadline, value) in entries.items():
                if deadline > now and (name not in latest or deadline > latest[name][0]):
                    latest[name] = (deadline, value)
        return [(name, deadline, value) for name, (deadline, value) in sorted(latest.items(), key=lambda pair: (pair[1][0], pair[0]))]

    def restore(self, name: bytes, deadline: int, value: Value) -> None:
        """Put back an entry of `live` (in its order)."""
        if not self._generations:
            self._generations.append((deadline, {}))
        until, entries = self._generations[0]
        self._generations[0] = (max(until, deadline), entries)
        self.total += name not in entries
        entries[name] = (deadline, value)


_REST = struct.Struct("<14sQq")
_VALUES = struct.Struct("<Qq")
_NAME_BYTES = 14


class DedupIds:
    """Offsets by 16-byte id, each until its deadline."""

    __slots__ = ("_buckets", "next_over", "total")

    def __init__(self) -> None:
        self._buckets: dict[bytes, bytearray] = {}
        self.total = 0
        self.next_over = 0
        """When `forget` can next let go of something, as far as is known."""

    def __len__(self) -> int:
        return self.total

    def count(self, now: int) -> int:
        """How many ids are remembered at `now`. Unlike `len` it does not count those that are over, and looks at all when some may be."""
        if now < self.next_over:
            return self.total
        known = (len({rest for rest, _, deadline in _REST.iter_unpack(bucket) if deadline > now}) for bucket in self._buckets.values())
        return sum(known)

    def get(self, name: bytes, now: int) -> int | None:
        """The offset that an id led to, if its window is not over."""
        bucket = self._buckets.get(name[:2])
        if bucket is None:
            return None
        rest, at = name[2:], 0
        while (at := bucket.find(rest, at)) >= 0:
            if at % _REST.size == 0:
                offset, deadline = _VALUES.unpack_from(bucket, at + _NAME_BYTES)
                if deadline > now:
                    return int(offset)
            at += 1
        return None

    def put(self, name: bytes, offset: int, now: int, span: int) -> None:
        """Remember an id until now + span; what is over in its bucket goes."""
        bucket = self._buckets.get(name[:2])
        if bucket:
            self._trim(bucket, now)
        self.restore(name, now + span, offset)

    def restore(self, name: bytes, deadline: int, offset: int) -> None:
        """Put back an entry of `live`, in its order."""
        bucket = self._buckets.get(name[:2])
        if bucket is None:
            bucket = self._buckets[name[:2]] = bytearray()
        bucket += _REST.pack(name[2:], offset, deadline)
        self.total += 1

    def _trim(self, bucket: bytearray, now: int) -> None:
        over = 0
        while over < len(bucket) and _VALUES.unpack_from(bucket, over + _NAME_BYTES)[1] <= now:
            over += _REST.size
        if over:
            del bucket[:over]
            self.total -= over // _REST.size

    def limit(self, most: int, now: int) -> None:
        """Let go of what is over when there are more than `most` and an eighth: so seldom that it costs little for each id."""
        if self.total > most + most // 8 and now >= self.next_over:
            self.forget(now)

    def forget(self, now: int) -> None:
        """Let go of everything that is over."""
        kept = self.live(now)
        self._buckets.clear()
        self.total = 0
        self.next_over = kept[0][1] if kept else 0
        for name, deadline, offset in kept:
            self.restore(name, deadline, offset)

    def live(self, now: int) -> list[tuple[bytes, int, int]]:
        """What is remembered at `now` as (id, deadline, offset), in a settled order."""
        latest = {name: (deadline, offset) for name, deadline, offset in self._entries() if deadline > now}
        return [(name, *found) for name, found in sorted(latest.items(), key=lambda pair: (pair[1][0], pair[0]))]

    def _entries(self) -> Iterator[tuple[bytes, int, int]]:
        for first, bucket in self._buckets.items():
            for rest, offset, deadline in _REST.iter_unpack(bucket):
                yield first + rest, deadline, offset
