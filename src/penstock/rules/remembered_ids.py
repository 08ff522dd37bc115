"""Dedup ids that a partition remembers for a time.

Owns: `DedupIds`. A dedup id is a 16-byte digest. Its first two bytes choose a bucket, in which it takes 30 bytes: the
rest of the digest, the offset of the first item produced with it (the item's number, words/ids.py, if that is in
another partition), the deadline. The entries of a bucket are in the order in which they were added. Expired ones are
deleted from its front whenever the bucket is used; behind others that last longer, each time the bucket has doubled;
and from all buckets when there are too many (`limit`). A million ids take about 35 MB; a lookup searches a few hundred
bytes.
"""

import struct
from collections.abc import Iterator, Sequence

from penstock.rules.runs import RunSet

_REST = struct.Struct("<14sQq")
_VALUES = struct.Struct("<Qq")
_NAME_BYTES = 14
_CLEANED_BYTES = 64 * _REST.size
"""Smaller buckets are not searched for expired entries behind others."""


class DedupIds:
    """Offsets by 16-byte id, each until its deadline."""

    __slots__ = ("_buckets", "_clean_at", "_none_expires_before", "total")

    def __init__(self) -> None:
        self._buckets: dict[bytes, bytearray] = {}
        self.total = 0
        self._clean_at: dict[bytes, int] = {}
        """The size at which a bucket is next searched for expired entries, of those that were."""
        self._none_expires_before = 0
        """No entry has an earlier deadline; 0: unknown."""

    def __len__(self) -> int:
        """The number of entries, also of those that have expired and are not deleted yet."""
        return self.total

    def count(self, now: int) -> int:
        """How many ids have not expired. Reads all entries if some may have expired."""
        if now < self._none_expires_before:
            return self.total
        known = (len({rest for rest, _, deadline in _REST.iter_unpack(bucket) if deadline > now}) for bucket in self._buckets.values())
        return sum(known)

    def get(self, name: bytes, now: int) -> int | None:
        """The offset of an id, or None if it is unknown or past its deadline."""
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

    def put_all(self, names: Sequence[bytes | None], base: int, now: int, span: int, spans: Sequence[int] | None = None) -> None:
        """Remember the ids of items from offset `base` on until now + span. Deletes expired ones of their buckets.

        spans: the span of each item; 0 is `span`.
        """
        for index, name in enumerate(names):
            if name is not None:
                bucket = self._buckets.get(name[:2])
                if bucket:
                    self._trim(bucket, now)
                    if len(bucket) >= _CLEANED_BYTES and len(bucket) >= self._clean_at.get(name[:2], 0):
                        self._clean(name[:2], bucket, now)
                self._add(name, now + (spans[index] or span if spans is not None else span), base + index)
        shortest = span if spans is None else min((one for one in spans if one), default=span)
        self._none_expires_before = min(self._none_expires_before, now + min(span, shortest))

    def remove(self, name: bytes, offset: int) -> None:
        """Remove the entry of an id with this offset."""
        bucket = self._buckets.get(name[:2], bytearray())
        for at in range(0, len(bucket), _REST.size):
            rest, found, _ = _REST.unpack_from(bucket, at)
            if rest == name[2:] and found == offset:
                del bucket[at : at + _REST.size]
                self.total -= 1
                return

    def remove_items(self, items: RunSet) -> None:
        """Remove the ids of these items. Reads all entries."""
        for name, _, offset in [entry for entry in self._entries() if entry[2] in items]:
            self.remove(name, offset)

    def restore(self, name: bytes, deadline: int, offset: int) -> None:
        """Add an entry of `live`; call it in the order of `live`."""
        self._add(name, deadline, offset)
        self._none_expires_before = min(self._none_expires_before, deadline)

    def _add(self, name: bytes, deadline: int, offset: int) -> None:
        bucket = self._buckets.get(name[:2])
        if bucket is None:
            bucket = self._buckets[name[:2]] = bytearray()
        bucket += _REST.pack(name[2:], offset, deadline)
        self.total += 1

    def _trim(self, bucket: bytearray, now: int) -> None:
        expired = 0
        while expired < len(bucket) and _VALUES.unpack_from(bucket, expired + _NAME_BYTES)[1] <= now:
            expired += _REST.size
        if expired:
            del bucket[:expired]
            self.total -= expired // _REST.size

    def _clean(self, first: bytes, bucket: bytearray, now: int) -> None:
        """Delete expired entries everywhere in a bucket, and plan the next time."""
        kept = b"".join(_REST.pack(*entry) for entry in _REST.iter_unpack(bucket) if entry[2] > now)
        self.total -= (len(bucket) - len(kept)) // _REST.size
        bucket[:] = kept
        self._clean_at[first] = 2 * max(len(kept), _CLEANED_BYTES)

    def limit(self, most: int, now: int) -> None:
        """Delete expired ids if there are an eighth more than `most`: so seldom that the cost per id is small."""
        if self.total > most + most // 8 and now >= self._none_expires_before:
            self.forget(now)

    def forget(self, now: int) -> None:
        """Delete all expired ids."""
        kept = self.live(now)
        self._buckets.clear()
        self._clean_at.clear()
        self.total = 0
        self._none_expires_before = kept[0][1] if kept else 0
        for name, deadline, offset in kept:
            self._add(name, deadline, offset)

    def live(self, now: int) -> list[tuple[bytes, int, int]]:
        """(id, deadline, offset) of all ids that have not expired, by deadline and id."""
        latest = {name: (deadline, offset) for name, deadline, offset in self._entries() if deadline > now}
        return [(name, *found) for name, found in sorted(latest.items(), key=lambda pair: (pair[1][0], pair[0]))]

    def _entries(self) -> Iterator[tuple[bytes, int, int]]:
        for first, bucket in self._buckets.items():
            for rest, offset, deadline in _REST.iter_unpack(bucket):
                yield first + rest, deadline, offset
