"""Where a transferred item came from.

Owns: `Origin`, stored with dead letters and with redriven and forwarded items, and its bytes: a MessagePack array, to
which fields may be added at the end with a default. Times are wall microseconds; 0 means none.
"""

import msgspec

from penstock.words.errors import CorruptLog, InvalidRequest
from penstock.words.ids import parse_id
from penstock.words.limits import KIB

MAX_ORIGIN_BYTES = 8 * KIB


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The item from which a transferred item was made, and what happened to it in its queue."""

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
    """Burying it parked its key in the queue it comes from."""
    forwarded: bool = False
    """It is the same item, moved to the partition that has its key since a resize."""
    parked_in: int = 0
    """The incarnation of one more queue in which its key is parked; 0 for none."""
    parked_id: str = ""
    """The item's id in that queue."""
    continued: bool = False
    """Its failed attempts count in the queue that takes it as well: an importer brought it from another system."""

    @property
    def parkings(self) -> list[tuple[int, int, int]]:
        """Incarnation, partition and offset of each item (at most two) whose burial keeps this item's key parked."""
        here = [(self.incarnation, *self.partition_and_offset)] if self.parked else []
        return [*here, (self.parked_in, *parse_id(self.parked_id))] if self.parked_in else here

    def parking_in(self, incarnation: int) -> tuple[int, int] | None:
        """Partition and offset of the item of that queue whose burial keeps this item's key parked."""
        return next((parking[1:] for parking in self.parkings if parking[0] == incarnation), None)

    @property
    def partition_and_offset(self) -> tuple[int, int]:
        """The partition and the offset of `id`."""
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
