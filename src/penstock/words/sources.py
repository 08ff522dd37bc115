"""The sources of published writes: who wrote, for the owner that remembers what it has adopted.

Owns: the prefixes of the sources, `source_kind`, and `WriteContent`. A source is a text: the id that a caller gave to a
write, or an id with a prefix. For each kind of source the newest are remembered, so that many of one kind displace none
of another. Prefixes are on disk: never change one.
"""

from typing import NamedTuple

MAX_SOURCE_LENGTH = 1_000
LOAD, STREAM, APPLICATION, LEDGERQ = "load:", "stream-", "txn:", "ledgerq:"
"""A load of files; a stream's query; an application that numbers its writes (txnAppId); an import."""
_PREFIXES = (LOAD, STREAM, APPLICATION, LEDGERQ)


class WriteContent(NamedTuple):
    """What a published write held."""

    number: int
    items: int
    checksum: int
    """A sum over its items that does not depend on their order; only writes of streams have one."""


def source_kind(source: str) -> str:
    """The prefix of a source; "" for an id that a caller gave."""
    return next((prefix for prefix in _PREFIXES if source.startswith(prefix)), "")
