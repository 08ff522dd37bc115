"""Damage to a log: bits flipped in its files, or a segment deleted.

Owns: `LogDamage` (damages one log and records which items it hit) and `check_served` (which items must be found after
it).
Damage is done to a copy of a simulated disk; the simulation continues on the undamaged disk. Damage uses its own random
generator, so the other steps of a seed are the same with and without it.
"""

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

from penstock.logs.files.segment import parse_name
from penstock.logs.frame import CHECKSUM_BYTES, HEADER_BYTES, frame_bytes, parse_header
from penstock.logs.log import FrameType
from penstock.loop.item_cache import Items, LeasedItems
from penstock.testing.disk import SimulatedFiles
from simulation.simulation import StepPrinter

T = TypeVar("T")
MOST_FLIPS = 3


class FramePosition(NamedTuple):
    """A frame and its byte range in a file."""

    path: str
    start: int
    stop: int
    """The end of its checksum; padding follows, which readers ignore."""
    sequence: int
    type: int
    base: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nothing here uses

    @property
    def items(self) -> set[int]:
        return set(range(self.base, self.base + self.count)) if self.type == FrameType.DATA else set()


def frame_positions(files: SimulatedFiles, path: str, following: int | None) -> list[FramePosition]:
    """The frames of an undamaged segment. `following`: the sequence that the next segment begins at; None if there is
    none."""
    content, at, found = files.content(path), 0, list[FramePosition]()
    while at < len(content):
        # Bytes are overwritten with zeros, durably, before they are cut. If the sync of a cut fails, the log continues
        # in a new segment, and a later power cut may undo the cut: then zeros follow the last frame, and readers ignore
        # them. Zeros in place of a frame, or in the newest segment (opening cuts them there), are not accepted.
        if following is not None and found and found[-1].sequence + 1 >= following and not any(content[at:]):
            break
        header = parse_header(content[at : at + HEADER_BYTES])
        stop = at + HEADER_BYTES + header.stored_bytes + CHECKSUM_BYTES
        found.append(FramePosition(path, at, stop, header.sequence, header.type, header.base, header.count))
        at += frame_bytes(header.stored_bytes)
    return found


class LogDamage:
    """Damages one log whose files are complete and synced. Bits are flipped only in frames that hold items."""

    def __init__(self, files: SimulatedFiles, folder: str, rng: random.Random, say: StepPrinter) -> None:
        paths = [path for path in sorted(files.contents()) if path.startswith(folder) and path.endswith(".log")]
        self.items: set[int] = set()
        """Offsets in the damaged frames; retention may have dropped some of them before."""
        deleted = rng.choice(paths[:-1]) if len(paths) > 1 and rng.random() < 0.5 else ""
        data = [frame for path in paths if path != deleted for frame in _valid(files, path, paths) if frame.items]
        for frame in rng.sample(data, min(len(data), rng.randint(0 if deleted else 1, MOST_FLIPS))):
            bit = rng.randrange(8 * frame.start, 8 * frame.stop)
            files.flip_bit(frame.path, bit)
            self.items |= frame.items
            say("   damage: bit %d of %s", bit, frame.path)
        if deleted:
            for frame in _valid(files, deleted, paths):
                self.items |= frame.items
            files.remove(deleted)
            say("   damage: %s is deleted", deleted)


def _valid(files: SimulatedFiles, path: str, paths: Sequence[str]) -> list[FramePosition]:
    """The valid frames of a segment: after a failed sync its last frames may be repeated in the next segment, and only
    those count."""
    next_path = next((other for other in paths if other > path), None)
    name = None if next_path is None else parse_name(next_path.rpartition("/")[2])
    following = None if name is None else name.first_sequence
    return [frame for frame in frame_positions(files, path, following) if following is None or frame.sequence < following]


def check_served(
    found: Collection[T], before: Iterable[T], damaged: set[T], what: str, *, sure: bool, named: Callable[[set[T]], object]
) -> None:
    """Check that every undamaged item of `before` was found exactly once. With `sure`, no damaged item may be found.

    `what` is the verb for the messages (read, listed, delivered); `named` formats a set of items for them.
    """
    there = set(before)
    whole = there - damaged
    missed = whole - set(found)
    assert not missed, f"{named(missed)} are not damaged and were not {what}"
    wrong = set(found) - (whole if sure else there)
    assert not wrong, f"{named(wrong)} were {what}: they are damaged, completed or were not there before"
    assert len(found) == len(set(found)), f"some of {found} were {what} twice"


def payloads(items: Sequence[Items | LeasedItems]) -> dict[int, bytes]:
    """Offset → payload."""
    return {offset: payload for part in items for offset, payload in zip(part.offsets, part.batch.payloads, strict=True)}
