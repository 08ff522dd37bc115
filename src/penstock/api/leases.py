"""The parts of leases that need no I/O; the async and the sync API share them.

Owns: `PartitionLease` (the items that one partition leased in one call), `LeaseBase` and `LeaseBatchBase`, and
`LeaseSelection`, which turns leases and tokens into a settle request, and its answer into outcomes and errors.
A `PartitionLease` remembers the outcome of each item, so that a batch settles only the items that are still open.
That memory only avoids needless requests: whether a lease is still held is always decided by the queue.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from itertools import dropwhile, repeat
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeAlias, TypeVar, overload

from penstock.api.arguments import check_text, copy_error
from penstock.api.items import Item, ItemSource, items_of
from penstock.api.traces import active_tracer
from penstock.loop.item_cache import LeasedItems
from penstock.loop.requests import LeaseResult, SettleAction, SettleAnswer, SettlePart
from penstock.rules.commands import Settled
from penstock.rules.routing import NO_KEY
from penstock.words import forks, values
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, reason_of
from penstock.words.ids import Token, format_id, format_token, parse_token

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.api.spans import HandleSpan, TracedItem

L = TypeVar("L", bound="LeaseBase")
OPEN, LOST, RETURNED = "open", "lost", "returned"
DONE: dict[SettleAction, str] = {"complete": "completed", "retry": "retried", "bury": "buried"}
_SHOWN = 5


class PartitionLease:
    """The items that one partition leased in one call, and the outcome of each."""

    __slots__ = (
        *("_fork", "_outcomes", "_rest_state", "_units", "attempts", "blocks", "deadline", "incarnation", "lease"),
        *("partition", "source", "timeout"),
    )

    def __init__(self, incarnation: int, result: LeaseResult, wall: int, queue: str) -> None:
        self.incarnation = incarnation
        self.source = ItemSource(queue, result.granted.max_attempts)
        self.partition = result.partition
        self.lease = result.granted.lease
        self.attempts = result.granted.attempts
        self.blocks: list[LeasedItems] = result.items
        self.timeout = round(result.seconds * SECOND)
        self.deadline = wall + self.timeout
        """Wall microseconds."""
        self._outcomes: dict[int, str] = {}
        """The states of items that were settled one by one, by offset."""
        self._rest_state = OPEN
        """The state of all other items."""
        self._units: dict[int, list[int]] | None = None
        """Offset → all offsets of its key in this lease, in order, for keys that have several."""
        self._fork = forks.count

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self.source.queue

    def check_process(self, offsets: Callable[[], list[int]]) -> None:
        """LeaseLost in a forked child: the process that took the lease holds it, and may be at work on the items."""
        if self._fork != forks.count:
            ids = [format_id(self.partition, offset) for offset in offsets()]
            text = f"the lease of {_named(ids)} is held by the process that this one was forked from; lease items in this process"
            raise copy_error(LeaseLost(f"{text}, or settle them by their tokens"), lost=ids)

    def __len__(self) -> int:
        return sum(len(block.batch) for block in self.blocks)

    def offsets(self) -> Iterator[int]:
        for block in self.blocks:
            yield from block.offsets

    def traced_items(self, offsets: Sequence[int] | None) -> "Iterator[TracedItem]":
        """The items at these offsets, or with None the open ones, with their stored headers."""
        wanted = set(self.open_offsets() if offsets is None else offsets)
        for block in self.blocks:
            for offset, headers in zip(block.offsets, block.batch.headers or repeat(None), strict=False):
                if offset in wanted:
                    yield self.partition, offset, headers

    def state_of(self, offset: int) -> str:
        return self._outcomes.get(offset, self._rest_state)

    @property
    def open_count(self) -> int:
        return 0 if self._rest_state != OPEN else len(self) - len(self._outcomes)

    def open_offsets(self) -> list[int]:
        return [offset for offset in self.offsets() if self.state_of(offset) == OPEN]

    def open_part(self) -> SettlePart | None:
        """The open items as a part of a settle request; None if none is open."""
        if self._rest_state != OPEN:
            return None
        if not self._outcomes:
            return SettlePart(self.partition, self.lease)
        left = self.open_offsets()
        return SettlePart(self.partition, self.lease, left) if left else None

    def remember_outcome(self, offsets: Sequence[int] | None, state: str) -> None:
        """Set the state of some items, or with None of all open ones."""
        if offsets is None:
            self._rest_state = state
            return
        self._outcomes.update(dict.fromkeys(offsets, state))
        if state == DONE["retry"] or state == DONE["bury"]:
            self._outcomes.update(dict.fromkeys(self._later_of_keys(set(offsets)), RETURNED))

    def _later_of_keys(self, settled: set[int]) -> list[int]:
        """Open items that come after a settled item of the same key. The queue returns them together with it."""
        if self._units is None:
            by_key: dict[int, list[int]] = {}
            for block in self.blocks:
                for offset, key in zip(block.offsets, block.batch.key_ids or (), strict=False):
                    by_key.setdefault(key, []).append(offset)
            by_key.pop(NO_KEY, None)
            self._units = {offset: unit for unit in by_key.values() if len(unit) > 1 for offset in unit}
        units = {id(unit): unit for offset in settled if (unit := self._units.get(offset)) is not None}
        later = (dropwhile(lambda offset: offset not in settled, unit) for unit in units.values())
        return [offset for unit in later for offset in unit if offset not in settled and self.state_of(offset) == OPEN]

    def remember_extension(self, wall: int, timeout: int) -> None:
        self.deadline = wall + (timeout or self.timeout)


# -- leases and batches ------------------------------------------------------------------------------


class HandledInBlock:
    """The base of what a `with` block handles and settles: in a traced process the block has a span."""

    __slots__ = ("_span",)
    _span: "HandleSpan | None"

    @abstractmethod
    def _handled(self) -> tuple[str, Sequence[Item], bool]:
        """The name of the queue, the items, and whether they are handled as a batch."""

    def _begin_handling(self) -> None:
        tracer = active_tracer()
        if tracer is None or self._span is not None:
            return
        queue, items, batch = self._handled()
        if items:
            self._span = tracer.handle(queue, items, batch=batch).__enter__()

    def _end_handling(self, error: BaseException | None) -> AbstractContextManager[None]:
        """A block that settles the items; the span ends after it. `error` is that of the handling."""
        span, self._span = self._span, None
        return nullcontext() if span is None else span.ending(error)


class LeaseBase(HandledInBlock):
    """The base of `Lease` and `AsyncLease`: everything but the settle calls."""

    __slots__ = ("_home", "_index", "_item", "_items", "_partition_lease", "offset")

    def __init__(self, home: Any, partition_lease: PartitionLease, items: LeasedItems, index: int, offset: int) -> None:
        self._home = home
        self._partition_lease = partition_lease
        self._items = items
        self._index = index
        self.offset = offset
        self._item: Item | None = None
        self._span = None

    def _handled(self) -> tuple[str, Sequence[Item], bool]:
        return self._partition_lease.queue, [self.item], False

    @property
    def item(self) -> Item:
        """The item to work on."""
        if self._item is None:
            held, (_, batch, produced_at) = self._partition_lease, self._items
            self._item = Item(held.source, held.partition, self.offset, batch, self._index, produced_at, self.attempts)
        return self._item

    @property
    def id(self) -> str:
        """The id of the item."""
        return format_id(self._partition_lease.partition, self.offset)

    @property
    def token(self) -> str:
        """A text that identifies the lease, for `queue.complete`, `retry`, `bury` and `extend`.

        It can be stored or sent to another process, and remains valid after a restart of the broker.
        """
        partition_lease = self._partition_lease
        return format_token(Token(partition_lease.incarnation, partition_lease.partition, partition_lease.lease, self.offset))

    @property
    def attempts(self) -> int:
        """The number of attempts of the item, including this one."""
        return self._partition_lease.attempts.get(self.offset, 1)

    @property
    def deadline(self) -> datetime:
        """When the lease ends unless it is extended. Leases are measured in elapsed time, so setting the machine's
        clock does not change how long they last."""
        return values.timestamp(self._partition_lease.deadline)

    @property
    def state(self) -> str:
        """ "open", "completed", "retried", "buried", "returned" or "lost", as far as this object knows.

        "returned": an earlier item of the same key was retried or buried, so this item returned to the queue with it.
        "lost": the lease has ended. An expired lease is "open" until a call finds out.
        """
        return self._partition_lease.state_of(self.offset)

    def __reduce__(self) -> NoReturn:
        raise _not_pickled()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.item!r}, {self.state})"


class LeaseBatchBase(HandledInBlock, Sequence[L], Generic[L]):
    """The base of `LeaseBatch` and `AsyncLeaseBatch`: everything but the settle calls."""

    def __init__(self, home: Any, partition_leases: Sequence[PartitionLease]) -> None:
        self._home = home
        self._partition_leases = partition_leases
        self._leases: list[L] | None = None
        self._items: list[Item] | None = None
        self._span = None

    def _handled(self) -> tuple[str, Sequence[Item], bool]:
        return self._partition_leases[0].queue if self._partition_leases else "", self.items, True

    @staticmethod
    @abstractmethod
    def _lease(home: Any, partition_lease: PartitionLease, items: LeasedItems, index: int, offset: int) -> L: ...

    def _all(self) -> list[L]:
        """The leases, created at first use. A batch that is settled as a whole never creates them."""
        if self._leases is None:
            make, home = self._lease, self._home
            self._leases = [
                make(home, lease, items, index, offset)
                for lease in self._partition_leases
                for items in lease.blocks
                for index, offset in enumerate(items.offsets)
            ]
        return self._leases

    @property
    def items(self) -> list[Item]:
        """The items of the leases, in the same order."""
        if self._items is None:
            self._items = [
                item
                for lease in self._partition_leases
                for block in lease.blocks
                for item in items_of(lease.source, lease.partition, block.offsets, *block[1:], lease.attempts)
            ]
        return self._items

    @property
    def payloads(self) -> list[bytes]:
        """The payloads of the items, in the same order. Faster than `items` if only the bytes are needed."""
        found: list[bytes] = []
        for lease in self._partition_leases:
            for block in lease.blocks:
                found += block.batch.payloads
        return found

    def to_arrow(self) -> "pa.RecordBatch":
        """The items as an Arrow record batch, in the same order. Needs penstock[arrow]."""
        from penstock.api.arrow import items_to_arrow

        leases = self._partition_leases
        return items_to_arrow([(one.partition, block.offsets, *block[1:], one.attempts) for one in leases for block in one.blocks])

    def __len__(self) -> int:
        return sum(map(len, self._partition_leases))

    @overload
    def __getitem__(self, index: int) -> L: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[L]: ...
    def __getitem__(self, index: int | slice) -> L | Sequence[L]:
        return self._all()[index]

    def __iter__(self) -> Iterator[L]:
        return iter(self._all())

    def __reduce__(self) -> NoReturn:
        raise _not_pickled()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} leases, {sum(lease.open_count for lease in self._partition_leases)} open)"


def _not_pickled() -> InvalidRequest:
    return InvalidRequest("a lease cannot be pickled; send its token (lease.token), which any process can settle")


LeasesOrTokens: TypeAlias = "str | LeaseBase | Iterable[str | LeaseBase | Iterable[str | LeaseBase]]"
"""A lease, its token, a LeaseBatch, or an iterable of those."""


# -- settling ----------------------------------------------------------------------------------------


class LeaseSelection:
    """The items of one settle call, grouped by partition and lease."""

    def __init__(self, incarnation: int, action: SettleAction, queue: str) -> None:
        self.incarnation = incarnation
        self.action: SettleAction = action
        self.queue = queue
        """The name of the queue."""
        self._lost: list[str] = []
        """Ids of items whose leases have ended."""
        self._settled_before: dict[str, str] = {}
        """Those of them whose leases this program ended itself: id → how the item was settled."""
        self._groups: dict[tuple[int, int], tuple[PartitionLease | None, SettlePart]] = {}
        """By partition and lease number. Of tokens, the PartitionLease is not known."""

    @property
    def parts(self) -> list[SettlePart]:
        """The parts of the settle request. Extending is for whole leases, so its parts name no offsets."""
        parts = [part for _, part in self._groups.values()]
        return [SettlePart(part.partition, part.lease) for part in parts] if self.action == "extend" else parts

    def traced_items(self) -> "list[TracedItem]":
        """The items, with their stored headers where the leases are known."""
        found: list[TracedItem] = []
        for lease, part in self._groups.values():
            if lease is not None:
                found += lease.traced_items(part.offsets)
            else:
                found += [(part.partition, offset, None) for offset in part.offsets or ()]
        return found

    def add(self, given: object) -> "LeaseSelection":
        """Add a lease, its token, a batch, or an iterable of those."""
        if isinstance(given, str):
            self._add_token(parse_token(given))
        elif isinstance(given, LeaseBase):
            self._add_lease(given)
        elif isinstance(given, LeaseBatchBase):
            self.add_open(given._partition_leases)
        elif isinstance(given, Iterable) and not isinstance(given, bytes):
            for part in given:
                self.add(part)
        else:
            raise InvalidRequest(f"a lease is {type(given).__name__}; give a Lease, a LeaseBatch or the token of a lease")
        return self

    def add_open(self, partition_leases: Iterable[PartitionLease]) -> "LeaseSelection":
        """Add the open items of these leases."""
        for lease in partition_leases:
            part = lease.open_part()
            if part is None:
                continue
            lease.check_process(lease.open_offsets)
            if not self._belongs_elsewhere(lease.incarnation, lease.partition, lease.open_offsets):
                self._put(lease, part)
        return self

    def _add_lease(self, lease: LeaseBase) -> None:
        held, offset = lease._partition_lease, lease.offset
        held.check_process(lambda: [offset])
        if self.action == "extend" and lease.state != OPEN:  # other items may still hold the same lease
            self._note_lost(held, held.partition, [offset])
        elif not self._belongs_elsewhere(held.incarnation, held.partition, lambda: [offset]):
            self._put(held, SettlePart(held.partition, held.lease, [offset]))

    def _add_token(self, token: Token) -> None:
        if not self._belongs_elsewhere(token.incarnation, token.partition, lambda: [token.offset]):
            self._put(None, SettlePart(token.partition, token.lease, [token.offset]))

    def _belongs_elsewhere(self, incarnation: int, partition: int, offsets: Callable[[], list[int]]) -> bool:
        """Whether a lease is of another queue, or of an earlier one of this name. If so, its items are marked lost."""
        if incarnation == self.incarnation:
            return False
        self._lost += [format_id(partition, offset) for offset in offsets()]
        return True

    def _put(self, held: PartitionLease | None, part: SettlePart) -> None:
        group = part.partition, part.lease
        known_lease, known = self._groups.get(group, (None, None))
        if known is not None:
            if isinstance(known.offsets, list) and part.offsets is not None:
                known.offsets.extend(part.offsets)
                part = known
            else:
                part = SettlePart(*group)  # one of the two is the whole lease
        self._groups[group] = (known_lease or held, part)

    # -- the answer ----------------------------------------------------------------------------------

    def apply_answers(self, answers: SettleAnswer) -> None:
        """Remember the outcome of each item, and raise the error if some were refused."""
        early: list[str] = []
        failed: PenstockError | None = None
        for (lease, part), answer in zip(self._groups.values(), answers, strict=True):
            if isinstance(answer, Settled):
                if answer.early:
                    early += [format_id(part.partition, offset) for offset in answer.early]
                if answer.refused:
                    self._mark_lost(lease, part, answer.refused)
                self._mark_settled(lease, part, {*answer.refused, *answer.early})
                if lease is not None and answer.buried:
                    lease.remember_outcome(answer.buried, DONE["bury"])
            elif answer.code == LeaseLost.code:
                self._mark_lost(lease, part, part.offsets)
            else:
                failed = failed or answer.error()
        if failed is not None or early or self._lost:
            self._raise_refusals(failed, early)

    def mark_all_lost(self) -> None:
        """Mark all items as lost, because their queue was deleted, and raise `LeaseLost`."""
        for lease, part in self._groups.values():
            self._mark_lost(lease, part, part.offsets)
        self._raise_refusals(None, [])

    def remember_extensions(self, wall: int, timeout: int, answers: SettleAnswer) -> None:
        for (lease, _), answer in zip(self._groups.values(), answers, strict=True):
            if lease is not None and isinstance(answer, Settled):
                lease.remember_extension(wall, timeout)

    def _mark_settled(self, lease: PartitionLease | None, part: SettlePart, refused: set[int]) -> None:
        if lease is None or self.action == "extend":
            return
        if part.offsets is None or not refused:
            lease.remember_outcome(part.offsets, DONE[self.action])
        else:
            lease.remember_outcome([offset for offset in part.offsets if offset not in refused], DONE[self.action])

    def _mark_lost(self, lease: PartitionLease | None, part: SettlePart, offsets: Sequence[int] | None) -> None:
        if offsets is None:
            assert lease is not None
            offsets = lease.open_offsets()
        unexpected = self._note_lost(lease, part.partition, offsets)
        if lease is not None and unexpected:
            lease.remember_outcome(unexpected, LOST)

    def _note_lost(self, lease: PartitionLease | None, partition: int, offsets: Sequence[int]) -> list[int]:
        """Note items whose leases have ended. Gives those that this program did not settle itself."""
        unexpected: list[int] = []
        for offset in offsets:
            item_id = format_id(partition, offset)
            self._lost.append(item_id)
            state = OPEN if lease is None else lease.state_of(offset)
            if state in DONE.values():
                self._settled_before[item_id] = state
            else:
                unexpected.append(offset)
        return unexpected

    def _raise_refusals(self, failed: PenstockError | None, early: list[str]) -> None:
        lost = list(dict.fromkeys(self._lost))
        if failed is not None:
            raise copy_error(failed, lost=lost)
        if lost:
            raise copy_error(LeaseLost(_lost_message(lost, self._settled_before)), lost=lost)
        if early:
            raise InvalidRequest(f"{_named(early)} must wait for earlier items of the same key under this lease; settle those first")


def _lost_message(lost: list[str], settled_before: Mapping[str, str]) -> str:
    states = {settled_before.get(item_id, LOST) for item_id in lost}
    if LOST not in states:
        verb = "was" if len(lost) == 1 else "were"
        return f"{_named(lost)} {verb} {' or '.join(sorted(states))} already under this lease; settle each lease once"
    if len(lost) == 1:
        return f"the lease of {_named(lost)} has ended; drop the work, the item may be someone else's now"
    return f"the leases of {_named(lost)} have ended; drop that work, the items may be someone else's now"


def _named(ids: list[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return f"item{'s' if len(ids) > 1 else ''} {', '.join(ids[:_SHOWN])}{more}"


Reason: TypeAlias = str | BaseException
"""Why an item is retried or buried: a text, or an exception."""


def reason_text(reason: Reason) -> str:
    return reason_of(reason) if isinstance(reason, BaseException) else check_text("the reason", reason)
