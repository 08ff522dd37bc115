"""What is wrong with the files beside the segments: indexes, the synced position, the checkpoint, and what unfinished work left behind.

Owns: `judge`. None of these files is truth: one that is wrong or missing costs time, never an item. Reads only.
A segment that is damaged is not held against the files that speak of it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.logs.api import FrameType
from penstock.logs.files import checkpoint, index, synced
from penstock.logs.files.chain import Chain
from penstock.logs.files.index import SparseIndex
from penstock.logs.files.segment import INDEX, Segment, SegmentName, header_at
from penstock.logs.files.starting import stored_checkpoint
from penstock.logs.files.synced import Synced
from penstock.logs.files.system import Files
from penstock.logs.files.writing import read_file


class SideFile(NamedTuple):
    """A file that is not as it should be."""

    name: str
    what: str
    there: bool = True
    """Whether there is something to remove."""

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def judge(files: Files, chain: Chain, published: Synced | None, damaged: Sequence[SegmentName], strays: Sequence[str]) -> list[SideFile]:
    """Every side file of a log of at least one segment that is wrong or missing."""
    found = [SideFile(stray, "left behind by work that was cut off") for stray in strays]
    found += _synced(files, chain, published, damaged)
    notes: list[str] = []
    stored_checkpoint(files, chain, notes)
    found += [SideFile(checkpoint.FILE_NAME, note) for note in notes]
    for name in chain.names:
        found += _index(files, chain, name, sound=name not in damaged)
    return found


def _synced(files: Files, chain: Chain, published: Synced | None, damaged: Sequence[SegmentName]) -> Iterator[SideFile]:
    if published is None:
        there = files.exists(f"{chain.directory}/{synced.FILE_NAME}")
        yield SideFile(synced.FILE_NAME, "damaged" if there else "missing", there)
    elif published.segment >= chain.names[-1] not in damaged and published != true_position(chain, published):
        yield SideFile(synced.FILE_NAME, "does not fit the log")


def true_position(chain: Chain, published: Synced) -> Synced:
    """The same promise, with the place where its frame ends in the newest segment, or that segment's front when it is not there."""
    pieces = chain.pieces(chain.names[-1], 0)
    end = next((piece.end for piece in pieces if piece.frame is not None and piece.frame.sequence == published.sequence), 0)
    return msgspec.structs.replace(published, segment=chain.names[-1], position=end)


def _index(files: Files, chain: Chain, name: SegmentName, sound: bool) -> Iterator[SideFile]:
    data = read_file(files, chain.path(name) + INDEX)
    stored = index.unpack(data) if data is not None else None
    if data is None and name != chain.names[-1]:  # the newest one's is written when the log is closed
        yield SideFile(f"{name}{INDEX}", "missing", there=False)
    elif data is not None and stored is None:
        yield SideFile(f"{name}{INDEX}", "damaged")
    elif stored is not None and sound and not _fits(chain, chain.segment(name), stored):
        yield SideFile(f"{name}{INDEX}", "does not fit its segment")


def _fits(chain: Chain, segment: Segment, stored: SparseIndex) -> bool:
    headers = (header_at(segment, position, chain.owner) for position in stored.positions)
    entries = zip(headers, stored.offsets, stored.walls, strict=True)
    return stored.covered <= segment.size and all(
        header is not None and (header.type, header.base, header.wall) == (FrameType.DATA, offset, wall) for header, offset, wall in entries
    )
