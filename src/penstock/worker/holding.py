"""Queues as a worker reaches them, and the leases it holds.

Owns: `Source` (a queue of the worker) and `Hold` (a lease in its hands). Everything a worker wants of a broker goes through `Source`.
While a hold is kept, the broker itself extends the lease before it would end: nothing a handler does can keep it from that, not even
holding the interpreter. Once `kept` says yes, nobody else gets these items before `let_go`.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from penstock.api.items import Item
from penstock.loop.requests import Handed, Part
from penstock.operations import Cancel, Done, FindQueue, LeaseItems, NoteProgress, SettleItems
from penstock.rules.commands import Settled
from penstock.words.clock import SECOND
from penstock.words.errors import PenstockError, Refused


class Source:
    """A queue, and the home that answers for it."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.name: str = queue.name
        self.incarnation: int = queue.incarnation
        self.home = queue.home

    def now(self) -> int:
        """Elapsed microseconds."""
        elapsed: int = self.home.clock.read().elapsed
        return elapsed

    # -- leasing -------------------------------------------------------------------------------------

    def lease(self, operation: LeaseItems) -> list[Handed]:
        """Wait for the answer here."""
        handed: list[Handed] = self.home.call(operation)
        return handed

    def submit(self, operation: LeaseItems | SettleItems, done: Done) -> Cancel:
        """Do not wait: `done` is called with the answer."""
        cancel: Cancel = self.home.submit(operation, done)
        return cancel

    # -- settling ------------------------------------------------------------------------------------

    def settle(self, operation: SettleItems) -> list[Settled | Refused]:
        """The answer for each part."""
        try:
            answer: list[Settled | Refused] = self.home.call(operation)
        except PenstockError as error:
            return [Refused.of(error)] * len(operation.parts)
        return answer

    def note(self, partition: int, lease: int, offset: int, text: str) -> None:
        self.home.call(NoteProgress(queue=self.incarnation, partition=partition, lease=lease, offset=offset, text=text))

    def find(self, name: str) -> int:
        """The incarnation of the queue of that name."""
        found: int = self.home.call(FindQueue(name=name)).incarnation
        return found

    def __repr__(self) -> str:
        return f"Source({self.name!r})"


class Hold:
    """A lease in the worker's hands: the items that one partition gave at once."""

    __slots__ = ("_safe_until", "keyed", "lease", "left", "partition", "settler", "since", "source", "torn")

    def __init__(self, source: Source, settler: Any, handed: Handed, asked_at: int) -> None:
        self.source = source
        self.settler = settler
        """Who settles its items."""
        self.partition = handed.partition
        self.lease = handed.granted.lease
        self._safe_until = asked_at + round(handed.seconds * SECOND)
        self.left = handed.granted.count
        """Items that are not settled yet. Counted by the settler."""
        self.torn = False
        """Some of its items were given up without the queue knowing: the rest must be named one by one."""
        self.since = 0
        """When its first items were done that are not settled yet."""
        self.keyed = any(part.batch.key_ids is not None for part in handed.items)

    def kept(self) -> bool:
        """Keep the lease from ending; False if it ended before that could be said, because this process stood still meanwhile."""
        source = self.source
        source.home.keep(source.incarnation, self.partition, self.lease)
        if source.now() < self._safe_until:
            return True
        (answer,) = source.settle(SettleItems(queue=source.incarnation, action="extend", parts=[Part(self.partition, self.lease)]))
        return isinstance(answer, Settled)

    def let_go(self) -> None:
        self.source.home.let_go(self.source.incarnation, self.partition, self.lease)

    def __repr__(self) -> str:
        return f"Hold({self.source.name!r}, lease {self.lease:#x} of partition {self.partition}, {self.left} left)"


Pair: TypeAlias = tuple[Hold, Item]
"""An item in hand, with the lease it is held by."""
Pairs: TypeAlias = Sequence[Pair]
