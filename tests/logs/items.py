"""Logs with real items, for tests that read the items of frames.

Owns: `items_draft` (items with values in every column), `fill` (writes several segments), `served_items`.
All values of an item are made of its offset, so that an item at a wrong offset is noticed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from penstock.logs import columns
from penstock.logs.columns import FrameColumns
from penstock.logs.log import Draft, Frame, FrameType, Gap, Log
from penstock.rules import routing
from penstock.rules.calls import CallName
from penstock.rules.records import Produced
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from tests.logs.backends import ComparableFrame, base_draft, comparable, state_draft

START = 1_767_225_600_000_000
SECOND = 1_000_000


def payload(offset: int) -> bytes:
    return b"payload of %d" % offset


def batch(start: int, stop: int) -> Batch:
    """Items with values in different columns."""
    offsets = range(start, stop)
    keys = [b"key %d" % offset if offset % 3 else None for offset in offsets]
    return Batch(
        [payload(offset) for offset in offsets],
        keys,
        routing.key_ids(keys),
        headers=[b"\x81\xa1a\xa1b" if offset % 5 == 0 else None for offset in offsets],
        kinds=[f"kind {offset}" if offset % 2 else None for offset in offsets],
        priorities=bytes(offset % 10 for offset in offsets),
        ats=[offset if offset % 7 == 0 else 0 for offset in offsets],
        dedups=[routing.digest(b"%d" % offset) if offset % 4 == 0 else None for offset in offsets],
    ).drop_empty_columns()


def items_draft(start: int, stop: int, wall: int = START, *, request: bytes | None = None) -> Draft:
    calls = () if request is None else (CallName(request),)
    return columns.encode([Produced(start, batch(start, stop), calls)], Moment(wall - START, wall))


def plain_draft(start: int, stop: int, wall: int = START) -> Draft:
    return columns.encode([Produced(start, Batch([payload(offset) for offset in range(start, stop)]))], Moment(wall - START, wall))


def fill(log: Log, segments: int = 5, frames: int = 4, count: int = 6) -> int:
    """Write segments of item frames, each followed by a state frame, one second apart; returns the next offset."""
    offset, clock = 0, START
    for number in range(segments):
        if number:
            log.rotate(base_draft(offset, b"Base %d" % number)._replace(wall=clock, elapsed=clock - START))
        for frame in range(frames):
            log.append([items_draft(offset, offset + count, clock, request=bytes(16) if frame % 2 else None)])
            log.append([state_draft(offset + count, b"state after %d" % offset)._replace(wall=clock, elapsed=clock - START)])
            offset += count
            clock += SECOND
    log.sync()
    return offset


@dataclass
class ServedItems:
    """The items and gaps that a log returned."""

    items: dict[int, bytes] = field(default_factory=dict)
    """Payloads by offset; b"" for a blanked item."""
    gaps: list[Gap] = field(default_factory=list)


def served_items(found: Iterable[Frame | Gap]) -> ServedItems:
    """The items of frames; fails if an item is there twice, or is neither as it was produced nor blanked."""
    result = ServedItems()
    for frame in found:
        if isinstance(frame, Gap):
            result.gaps.append(frame)
        elif frame.type is FrameType.DATA:
            content = payloads(ComparableFrame(*frame[:-1], bytes(frame.body)))
            assert not content.keys() & result.items.keys(), "items were returned twice"
            result.items.update(content)
    return result


@cache
def payloads(frame: ComparableFrame) -> dict[int, bytes]:
    """Payloads by offset. Each item must be as it was produced by `items_draft` or `plain_draft`, or blanked."""
    found, content = FrameColumns(Frame(*frame[:-1], memoryview(frame.body))), {}
    for offset in range(found.base, found.stop):
        one = found.batch(offset, offset + 1).drop_empty_columns()
        assert one in (batch(offset, offset + 1), Batch([payload(offset)]), Batch([b""])), f"{offset} is {one}"
        content[offset] = one.payloads[0]
    return content


def recovered(log: Log) -> list[ComparableFrame]:
    """The frames that recovery yields; fails on a Gap."""
    return comparable(log.recover())


def runs(offsets: Sequence[int]) -> list[int]:
    """Flat runs of single offsets."""
    return [edge for offset in offsets for edge in (offset, offset + 1)]
