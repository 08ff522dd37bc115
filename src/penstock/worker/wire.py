"""What a worker and its child processes send each other.

Owns: `Parcel` (items on their way to a child), the messages back, and `Cell`, two numbers in shared memory by which the parent knows what
a child is at, whatever happens to it. Calls of handlers are numbered; a child makes them in order.

    parent → child:  (number of the first call, parcels): each item is a call of its own, or with batch handlers all are one
    child → parent:  Ready once; Told when a call did not simply succeed; Said for progress; Through when a message is done
"""

from collections.abc import Sequence
from ctypes import c_longlong
from multiprocessing.context import SpawnContext
from typing import Any, NamedTuple

from penstock.api.items import Item, NewItem
from penstock.words.batch import Batch
from penstock.words.ids import Token
from penstock.words.values import Value
from penstock.worker.holding import Pair
from penstock.worker.verdicts import Verdict


class Parcel(NamedTuple):
    """Neighbours of one lease and one batch."""

    queue: str
    token: Token
    """Of the first one; the others have offsets behind it."""
    batch: Batch
    produced_at: int
    attempts: list[int]

    def items(self) -> list[Item]:
        _, partition, _, offset = self.token
        return [
            Item(partition, offset + index, self.batch, index, self.produced_at, attempts) for index, attempts in enumerate(self.attempts)
        ]


def pack(pairs: Sequence[Pair]) -> list[Parcel]:
    parcels = []
    start = 0
    for stop in range(1, len(pairs) + 1):
        if stop == len(pairs) or not _neighbours(pairs[stop - 1], pairs[stop]):
            parcels.append(_parcel(pairs[start:stop]))
            start = stop
    return parcels


def _neighbours(one: Pair, other: Pair) -> bool:
    return one[0] is other[0] and one[1]._batch is other[1]._batch and one[1]._index + 1 == other[1]._index


def _parcel(pairs: Sequence[Pair]) -> Parcel:
    hold, first = pairs[0]
    token = Token(hold.source.incarnation, hold.partition, hold.lease, first.offset)
    batch = first._batch.cut(first._index, first._index + len(pairs))
    return Parcel(hold.source.name, token, batch, first._produced_at, [item.attempts for _, item in pairs])


class Ready(NamedTuple):
    """The child has its handlers, and waits for items."""


class Told(NamedTuple):
    """What becomes of the items of a call, and, of those that failed, what there is to know."""

    number: int
    verdicts: list[Verdict]
    errors: dict[str, str]
    """A traceback, or nothing where the failure was meant, by the id of the item."""
    follow_ups: list[NewItem | Value]


class Said(NamedTuple):
    """Progress."""

    number: int
    text: str


class Through(NamedTuple):
    """All calls before this one have been made."""

    number: int


Message = Ready | Told | Said | Through


class Cell:
    """Numbers that a child writes and its parent reads."""

    def __init__(self, context: SpawnContext) -> None:
        self._numbers: Any = context.RawArray(c_longlong, 2)
        self._numbers[0] = -1

    @property
    def at(self) -> int:
        """The call that was begun last."""
        number: int = self._numbers[0]
        return number

    @property
    def deadline(self) -> int:
        """When that runs too long; 0 is never."""
        number: int = self._numbers[1]
        return number

    def begin(self, number: int, deadline: int) -> None:
        self._numbers[1] = 0
        self._numbers[0] = number
        self._numbers[1] = deadline

    def extend(self, deadline: int) -> None:
        self._numbers[1] = deadline
