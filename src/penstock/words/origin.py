"""Where a transferred item came from.

Owns: `Origin`, which a dead letter, a redriven or a forwarded item carries along, and its bytes: a MessagePack array, to which a field
may be added at the end with a default. Times are wall microseconds, 0 for none.
"""

import msgspec

from penstock.words.errors import CorruptLog, InvalidRequest
from penstock.words.ids import parse_id
from penstock.words.limits import KIB

MAX_ORIGIN_BYTES = 8 * KIB


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The item that another one was before, and what happened to it there."""

    queue: str
    incarnation: int
    id: str
    attempts: int = 0
    reason: str = ""
    produced_at: int = 0
    first_failed_at: int = 0
    last_failed_at: int = 0
    buried_at: int = 0
    parked: bool = False
    """Its key was parked at the origin when it was buried."""
    forwarded: bool = False
    """The same item, moved to the partition where its key lives now."""
    parked_in: int = 0
    """Another queue (incarnation) in which a key is parked for it, and the id it had there."""
    parked_id: str = ""

    @property
    def parkings(self) -> list[tuple[int, int, int]]:
        """Incarnation, partition and offset of the places at which a key is parked for it: where it was last buried, and another queue."""
        here = [(self.incarnation, *self.partition_and_offset)] if self.parked else []
        return [*here, (self.parked_in, *parse_id(self.parked_id))] if self.parked_in else here

    def parking_in(self, incarnation: int) -> tuple[int, int] | None:
        """Partition and offset of the place at which a key of that queue is parked for it."""
        return next((parking[1:] for parking in self.parkings if parking[0] == incarnation), None)

    @property
    def partition_and_offset(self) -> tuple[int, int]:
        """The partition and the offset that the id names."""
        return parse_id(self.id)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Origin)


def encode(origin: Origin) -> bytes:
    return _encoder.encode(origin)


def decode(data: bytes) -> Origin:
    try:
        origin = _decoder.decode(data)
        parse_id(origin.id)
        _ = origin.parkings
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest) as error:
        raise CorruptLog(f"the origin of an item cannot be understood ({error}); run verify, or use a newer Penstock") from error
    return origin
