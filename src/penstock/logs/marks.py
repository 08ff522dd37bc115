"""Frames that speak of frames which are not there: SKIP for what was removed on purpose, GAP for what was lost and is known to be.

Owns: their drafts, and reading a GAP back. Drawn in docs/format.md. A SKIP has no body. Also the words for what retention dropped, of which
no frame is left to speak.
"""

import msgspec

from penstock.logs.api import Draft, Frame, FrameType, Gap
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog

DROPPED = "retention dropped it"


class _Lost(msgspec.Struct, array_like=True):
    """The body of a GAP frame: the fields of a Gap without its place, which is the frame's own."""

    first_sequence: int
    last_sequence: int
    start: int
    stop: int
    why: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Lost)


def skip(base: int, then: Moment) -> Draft:
    """Says that what is not there, up to the frame's sequence and to the item before `base`, was removed on purpose."""
    return Draft(FrameType.SKIP, base, 0, 0, then.elapsed, then.wall, ())


def gap(lost: Gap, then: Moment) -> Draft:
    """Stands where frames were lost; to be written with the sequence of the last of them."""
    body = _encoder.encode(_Lost(lost.first_sequence, lost.last_sequence, lost.start, lost.stop, lost.why))
    return Draft(FrameType.GAP, lost.stop, 1, 0, then.elapsed, then.wall, [body])


def lost(frame: Frame, where: str) -> Gap:
    """What a GAP frame tells."""
    try:
        body = _decoder.decode(frame.body)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"GAP frame {frame.sequence} is whole but cannot be understood ({error}); use a newer Penstock") from error
    return Gap(body.first_sequence, body.last_sequence, body.start, body.stop, where, body.why, mended=True)


def dropped(first_sequence: int, base: int, where: str) -> Gap:
    """Everything before the oldest segment that is left."""
    return Gap(1, first_sequence - 1, 0, base, where, DROPPED)
