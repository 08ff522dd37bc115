"""Where the replay of a log may begin.

Owns: `beginning` and `stored_checkpoint`. Replay begins at the newest Base that can be read: a segment's first frame, or a checkpoint's
that is newer still; a log's very first segment needs none. It never crosses a rewritten segment, whose records are gone.
"""

from typing import NamedTuple

from penstock.logs.api import FrameType
from penstock.logs.files import checkpoint
from penstock.logs.files.chain import Chain
from penstock.logs.files.checkpoint import Checkpoint
from penstock.logs.files.replay import Start, front
from penstock.logs.files.segment import FIRST, header_at
from penstock.logs.files.system import Files
from penstock.logs.files.writing import read_file
from penstock.logs.frame import frame_bytes
from penstock.words.errors import CorruptLog


class Beginning(NamedTuple):
    """A place, and whether a checkpoint tells the state there; otherwise the frames from there on do."""

    start: Start
    at_checkpoint: bool


def beginning(chain: Chain, stored: Checkpoint | None, notes: list[str]) -> Beginning:
    """Where to begin a chain of at least one segment. Says in `notes` what cannot be used; CorruptLog when nothing can."""
    start, lowest = _newest_base(chain, notes)
    if stored is not None:
        number = chain.names.index(stored.segment)
        if number >= lowest and (start is None or stored.frame.sequence > start.sequence):
            return Beginning(Start(number, stored.end, stored.frame.sequence, stored.frame.base), at_checkpoint=True)
    if start is None:
        what = f"no Base from which {chain.directory} could be replayed can be read"
        raise CorruptLog(f"{what}; run verify to see what is left, then put a copy in its place")
    return Beginning(start, at_checkpoint=False)


def _newest_base(chain: Chain, notes: list[str]) -> tuple[Start | None, int]:
    """The newest segment to begin at, if any, and the lowest number that a checkpoint may begin in."""
    for number in range(len(chain.names) - 1, -1, -1):
        name = chain.names[number]
        if chain.begins_with_base(name):
            return front(chain, number), number
        if chain.rewritten(name):
            return None, number + 1
        if name == FIRST:  # it begins with whatever came first
            return front(chain, number), number
        notes.append(f"the Base of segment {name} cannot be read; replay begins at an earlier one")
    return None, 0


def stored_checkpoint(files: Files, chain: Chain, notes: list[str]) -> Checkpoint | None:
    """The checkpoint beside a log, if it can be used; says in `notes` why not."""
    data = read_file(files, f"{chain.directory}/{checkpoint.FILE_NAME}")
    if data is None:
        return None
    found = checkpoint.unpack(data, chain.owner)
    if found is None:
        notes.append("the checkpoint is damaged and was ignored")
        return None
    placed = _placed(chain, found)
    if placed is None:
        notes.append("the checkpoint does not fit the log and was ignored")
    return placed


def _placed(chain: Chain, found: Checkpoint) -> Checkpoint | None:
    """The checkpoint with the place of the frame that it names as its last; None when there is no such frame."""
    if found.segment not in chain.names:
        return None
    segment = chain.segment(found.segment)
    header = header_at(segment, found.last, chain.owner) if found.end <= segment.size else None
    fits = header is not None and header.sequence == found.frame.sequence and found.last + frame_bytes(header.stored_bytes) == found.end
    return found if fits else _placed_anew(chain, found)


def _placed_anew(chain: Chain, found: Checkpoint) -> Checkpoint | None:
    """A repair moves frames: look through the segment. A GAP frame may have taken the place of the last one and of some behind it."""
    sequence = found.frame.sequence
    for piece in chain.pieces(found.segment, 0):
        frame = piece.frame
        if frame is not None and frame.sequence == sequence:
            return found._replace(last=piece.position, end=piece.end)
        if frame is not None and frame.sequence > sequence:
            return found._replace(last=piece.position, end=piece.position) if frame.type is FrameType.GAP else None
    return None
