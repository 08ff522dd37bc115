"""Leases as a consumer holds them, without the waiting.

Owns: `PartitionLease` (what one partition handed out under one lease), the halves of `Lease` and `LeaseBatch` that need no I/O, and `LeaseSelection`:
from whatever a caller wants settled to the parts of a request, and from the answer to what is over and what was lost.
A part remembers what became of its items through this object, so that a batch settles what is still open and nothing else. What the
queue says counts: it knows whether a lease is held, and is asked every time.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, overload

from penstock.api.arguments import check_text, copy_error
from penstock.api.items import Item, items_of
from penstock.loop.item_cache import Items
from penstock.loop.requests import LeaseResult, SettleAction, SettleAnswer, SettlePart
from penstock.rules.commands import Settled
from penstock.rules.routing import NO_KEY
from penstock.words import values
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, reason_of
from penstock.words.ids import Token, format_id, format_token, parse_token

if TYPE_CHECKING:
    import pyarrow as pa

L = TypeVar("L", bound="LeaseBase")
OPEN, LOST, RETURNED = "open", "lost", "returned"
DONE: dict[SettleAction, str] = {"complete": "completed", "retry": "retried", "bury": "buried"}
_SHOWN = 5


class PartitionLease:
    """What one partition handed out under one lease."""

    __slots__ = ("_over", "_rest", "attempts", "deadline", "incarnation", "lease", "partition", "parts", "timeout")

    def __init__(self, incarnation: int, handed: LeaseResult, wall: int) -> None:
        self.incarnation = incarnation
        self.partition = handed.partition
        self.lease = handed.granted.lease
        self.attempts = handed.granted.attempts
        self.parts: list[Items] = handed.items
        self.timeout = round(handed.seconds * SECOND)
        self.deadline = wall + self.timeout
        """Wall microseconds."""
        self._over: dict[int, str] = {}
        self._rest = OPEN  # what the others are

    def __len__(self) -> int:
        return sum(len(part.batch) for part in self.parts)

    def offsets(self) -> Iterator[int]:
        for part in self.parts:
            yield from range(part.start, part.start + len(part.batch))

    def state_of(self, offset: int) -> str:
        return self._over.get(offset, self._rest)

    @property
    def open_count(self) -> int:
        return 0 if self._rest != OPEN else len(self) - len(self._over)

    def open_offsets(self) -> list[int]:
        return [offset for offset in self.offsets() if self.state_of(offset) == OPEN]

    def open_part(self) -> SettlePart | None:
        """All that is open, as shortly as it can be said."""
        if self._rest != OPEN:
            return None
        if not self._over:
            return SettlePart(self.partition, self.lease)
        left = self.open_offsets()
        return SettlePart(self.partition, self.lease, left) if left else None

    def remember_outcome(self, offsets: Sequence[int] | None, state: str) -> None:
        """Remember what became of items; None is all that were open."""
        if offsets is None:
            self._rest = state
            return
        self._over.update(dict.fromkeys(offsets, state))
        if state == DONE["retry"] or state == DONE["bury"]:
            self._over.update(dict.fromkeys(self._behind(set(offsets)), RETURNED))

    def _behind(self, given_back: set[int]) -> list[int]:
        """Open items that went back with earlier ones of their key."""
        keys: set[int] = set()
        found = []
        for part in self.parts:
            for index, key in enumerate(part.batch.key_ids or ()):
                offset = part.start + index
                if offset in given_back:
                    keys.add(key)
                elif key in keys and key != NO_KEY and self.state_of(offset) == OPEN:
                    found.append(offset)
        return found

    def remember_extension(self, wall: int, timeout: int) -> None:
        self.deadline = wall + (timeout or self.timeout)


# -- what a consumer sees ----------------------------------------------------------------------------


class LeaseBase:
    """One item, and the right to work on it."""

    __slots__ = ("_home", "_index", "_item", "_items", "_partition_lease")

    def __init__(self, home: Any, grant: PartitionLease, items: Items, index: int) -> None:
        self._home = home
        self._partition_lease = grant
        self._items = items
        self._index = index
        self._item: Item | None = None

    @property
    def item(self) -> Item:
        """The item to work on."""
        if self._item is None:
            grant, index = self._partition_lease, self._index
            start, batch, produced_at = self._items
            self._item = Item(grant.partition, start + index, batch, index, produced_at, grant.attempts.get(start + index, 1))
        return self._item

    @property
    def offset(self) -> int:
        return self._items.start + self._index

    @property
    def id(self) -> str:
        """The id of the item."""
        return format_id(self._partition_lease.partition, self.offset)

    @property
    def token(self) -> str:
        """What proves the lease. It can be kept or passed on, and given to `queue.complete` and its like, even after a restart."""
        grant = self._partition_lease
        return format_token(Token(grant.incarnation, grant.partition, grant.lease, self.offset))

    @property
    def attempts(self) -> int:
        """How often the item was leased, this time included."""
        return self._partition_lease.attempts.get(self.offset, 1)

    @property
    def deadline(self) -> datetime:
        """When the lease ends unless it is extended. Setting the machine's date neither shortens nor lengthens a lease."""
        return values.timestamp(self._partition_lease.deadline)

    @property
    def state(self) -> str:
        """As far as this object knows: "open", "completed", "retried", "buried", "returned" (with an earlier item of its key) or "lost"."""
        return self._partition_lease.state_of(self.offset)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.item!r}, {self.state})"


class LeaseBatchBase(Sequence[L], Generic[L]):
    """What one call leased: a sequence of leases."""

    def __init__(self, home: Any, grants: Sequence[PartitionLease]) -> None:
        self._home = home
        self._grants = grants
        self._leases: list[L] | None = None
        self._items: list[Item] | None = None

    @staticmethod
    @abstractmethod
    def _lease(home: Any, grant: PartitionLease, items: Items, index: int) -> L: ...

    def _all(self) -> list[L]:
        """Made when one is asked for: who settles a batch as a whole pays for none."""
        if self._leases is None:
            make, home = self._lease, self._home
            self._leases = [
                make(home, grant, items, index) for grant in self._grants for items in grant.parts for index in range(len(items.batch))
            ]
        return self._leases

    @property
    def items(self) -> list[Item]:
        """The items alone, in the same order."""
        if self._items is None:
            self._items = [
                item
                for grant in self._grants
                for start, batch, produced_at in grant.parts
                for item in items_of(grant.partition, start, batch, produced_at, grant.attempts)
            ]
        return self._items

    @property
    def payloads(self) -> list[bytes]:
        """The payloads alone, in order: the quickest way to the bytes of many items."""
        return [payload for grant in self._grants for part in grant.parts for payload in part.batch.payloads]

    def to_arrow(self) -> "pa.RecordBatch":
        """The items as an Arrow record batch, in the same order. Needs penstock[arrow]."""
        from penstock.api.arrow import items_to_arrow

        return items_to_arrow([(grant.partition, *part, grant.attempts) for grant in self._grants for part in grant.parts])

    def __len__(self) -> int:
        return sum(map(len, self._grants))

    @overload
    def __getitem__(self, index: int) -> L: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[L]: ...
    def __getitem__(self, index: int | slice) -> L | Sequence[L]:
        return self._all()[index]

    def __iter__(self) -> Iterator[L]:
        return iter(self._all())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} leases, {sum(grant.open_count for grant in self._grants)} open)"


LeasesOrTokens: TypeAlias = "str | LeaseBase | Iterable[str | LeaseBase | Iterable[str | LeaseBase]]"
"""A lease, its token, a LeaseBatch, or several of those."""


# -- settling ----------------------------------------------------------------------------------------


class LeaseSelection:
    """Items that a caller wants settled together, by the lease that holds them."""

    def __init__(self, incarnation: int, verb: SettleAction) -> None:
        self.incarnation = incarnation
        self.verb: SettleAction = verb
        self._lost: list[str] = []
        self._groups: dict[tuple[int, int], tuple[PartitionLease | None, SettlePart]] = {}

    @property
    def parts(self) -> list[SettlePart]:
        parts = [part for _, part in self._groups.values()]
        return [SettlePart(part.partition, part.lease) for part in parts] if self.verb == "extend" else parts

    def add(self, given: object) -> "LeaseSelection":
        """Whatever names leases: one, its token, a batch, or several of those."""
        if isinstance(given, str):
            self._add_token(parse_token(given))
        elif isinstance(given, LeaseBase):
            self._add_lease(given)
        elif isinstance(given, LeaseBatchBase):
            self.add_open(given._grants)
        elif isinstance(given, Iterable) and not isinstance(given, bytes):
            for one in given:
                self.add(one)
        else:
            raise InvalidRequest(f"a lease is {type(given).__name__}; give a Lease, a LeaseBatch or the token of a lease")
        return self

    def add_open(self, grants: Iterable[PartitionLease]) -> "LeaseSelection":
        """What is still open of these."""
        for grant in grants:
            part = grant.open_part()
            if part is not None and not self._is_foreign(grant.incarnation, grant.partition, grant.open_offsets):
                self._put(grant, part)
        return self

    def _add_lease(self, lease: LeaseBase) -> None:
        grant, offset = lease._partition_lease, lease.offset
        if self.verb == "extend" and lease.state != OPEN:  # its grant may well live on, for others
            self._lost.append(lease.id)
        elif not self._is_foreign(grant.incarnation, grant.partition, lambda: [offset]):
            self._put(grant, SettlePart(grant.partition, grant.lease, [offset]))

    def _add_token(self, token: Token) -> None:
        if not self._is_foreign(token.incarnation, token.partition, lambda: [token.offset]):
            self._put(None, SettlePart(token.partition, token.lease, [token.offset]))

    def _is_foreign(self, incarnation: int, partition: int, offsets: Callable[[], list[int]]) -> bool:
        """Whether a lease is of another queue, or of an earlier one of this name; if so, it counts as lost."""
        if incarnation == self.incarnation:
            return False
        self._lost += [format_id(partition, offset) for offset in offsets()]
        return True

    def _put(self, grant: PartitionLease | None, part: SettlePart) -> None:
        place = part.partition, part.lease
        known_grant, known = self._groups.get(place, (None, None))
        if known is not None:
            if isinstance(known.offsets, list) and part.offsets is not None:
                known.offsets.extend(part.offsets)
                part = known
            else:
                both = None if known.offsets is None or part.offsets is None else [*known.offsets, *part.offsets]
                part = SettlePart(*place, both)
        self._groups[place] = (known_grant or grant, part)

    # -- the answer ----------------------------------------------------------------------------------

    def apply_answers(self, answer: SettleAnswer) -> None:
        """Remember what is over, and say what was refused."""
        early: list[str] = []
        failed: PenstockError | None = None
        for (grant, part), one in zip(self._groups.values(), answer, strict=True):
            if isinstance(one, Settled):
                early += [format_id(part.partition, offset) for offset in one.early]
                self._lose(grant, part, one.refused)
                self._settle(grant, part, {*one.refused, *one.early})
            elif one.code == LeaseLost.code:
                self._lose(grant, part, part.offsets)
            else:
                failed = failed or one.error()
        self._tell(failed, early)

    def mark_all_lost(self) -> None:
        """Their queue is no more, and so are the leases."""
        for grant, part in self._groups.values():
            self._lose(grant, part, part.offsets)
        self._tell(None, [])

    def extended(self, wall: int, timeout: int, answer: SettleAnswer) -> None:
        for (grant, _), one in zip(self._groups.values(), answer, strict=True):
            if grant is not None and isinstance(one, Settled):
                grant.remember_extension(wall, timeout)

    def _settle(self, grant: PartitionLease | None, part: SettlePart, refused: set[int]) -> None:
        if grant is None or self.verb == "extend":
            return
        if part.offsets is None or not refused:
            grant.remember_outcome(part.offsets, DONE[self.verb])
        else:
            grant.remember_outcome([offset for offset in part.offsets if offset not in refused], DONE[self.verb])

    def _lose(self, grant: PartitionLease | None, part: SettlePart, offsets: Sequence[int] | None) -> None:
        if offsets is None:
            assert grant is not None
            offsets = grant.open_offsets()
        self._lost += [format_id(part.partition, offset) for offset in offsets]
        if grant is not None and offsets:
            grant.remember_outcome(offsets, LOST)

    def _tell(self, failed: PenstockError | None, early: list[str]) -> None:
        lost = list(dict.fromkeys(self._lost))
        if failed is not None:
            raise copy_error(failed, lost=lost)
        if lost:
            raise copy_error(LeaseLost(_lost_sentence(lost)), lost=lost)
        if early:
            raise InvalidRequest(f"{_named(early)} must wait for earlier items of the same key under this lease; settle those first")


def _lost_sentence(lost: list[str]) -> str:
    if len(lost) == 1:
        return f"the lease of {_named(lost)} has ended; drop the work, the item may be someone else's now"
    return f"the leases of {_named(lost)} have ended; drop that work, the items may be someone else's now"


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"item{'s' if len(ids) > 1 else ''} {', '.join(ids[:_SHOWN])}{more}"


Reason: TypeAlias = str | BaseException
"""Why an item goes back or is given up: a text, or the exception that says so."""


def reason_text(reason: Reason) -> str:
    return reason_of(reason) if isinstance(reason, BaseException) else check_text("the reason", reason)
