"""A queue's partitions, and what all steps of its turn share.

Owns: `Partitions`: the members, the slot map, the answers that wait for the commit, and what the steps of a turn tell each other.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.loop.partition import Partition
from penstock.loop.partition_handle import IDLE_AFTER, RETIRED_IDLE_AFTER, PartitionHandle
from penstock.loop.requests import Request
from penstock.loop.retention import unresolved_bytes
from penstock.rules.commands import Answer, Command, Configure, Pause, PutCursor
from penstock.rules.slots import SlotMap
from penstock.rules.summary import Summary
from penstock.words.clock import Clock
from penstock.words.errors import PenstockError
from penstock.words.limits import Policy

_SIDES = ("paused_lease", "paused_produce")


class QueueSetup(NamedTuple):
    """Which queue it is, and what its partitions need of the broker."""

    name: str
    incarnation: int
    open_partition: Callable[[int], Partition]
    clock: Clock
    chance: Callable[[], float]
    summary_of: Callable[[int], Summary | None]
    """What is known of a partition that is closed; None when it must be opened to know anything."""


class PartitionSet:
    """The members of one queue."""

    def __init__(self, setup: QueueSetup) -> None:
        self.name = setup.name
        self.incarnation = setup.incarnation
        self.clock = setup.clock
        self.members: dict[int, PartitionHandle] = {}
        self.active: Sequence[int] = ()
        """Those that take items."""
        self.opened_version = 0
        """Of the map when the queue was opened here."""
        self.map = SlotMap(0, [])  # type: ignore[arg-type]  # before `shape`
        self.older_maps: Sequence[SlotMap] = ()
        """Maps under which requests may have been cut that are still remembered, newest first."""
        self.read_only: Sequence[int] = ()
        self.policy: Policy | None = None
        self.now = 0
        """When the turn began, elapsed."""
        self.again = False
        """There is more to do at once."""
        self.produced = 0
        self.touched: list[PartitionHandle] = []
        """By this turn."""
        self.closed: dict[int, PartitionHandle] = {}
        """Partitions that nobody has needed for a while."""
        self.to_open: dict[int, PartitionHandle] = {}
        """Of these, those that are to be opened by the next turn."""
        self.visits_changed = False
        """Whether a member is gone that may have wanted the next visit."""
        self.newcomers: set[int] = set()
        """Partitions that a reshape is about to add."""
        self.outs: dict[int, PartitionHandle] = {}
        """Partitions that are out."""
        self.with_ready: set[int] = set()
        self.used: set[int] = set()
        """Numbers of the partitions that an operator's word had to do with."""
        self.pending: deque[tuple[Request, Any]] = deque()
        self.post: Callable[[Request], None] = lambda request: None
        """Puts a message of the queue's own into its inbox."""
        self._setup = setup

    def shape(self, slots: SlotMap, active: Sequence[int], numbers: Sequence[int], older: Sequence[SlotMap] = ()) -> None:
        """The queue has these partitions (`numbers`), of which `active` take items as `slots` says; new ones are opened."""
        for number in sorted(numbers):
            self.add(number)
        for number, member in self.members.items():
            member.idle_after = IDLE_AFTER if number in active else RETIRED_IDLE_AFTER
        self.map, self.active, self.older_maps = slots, active, older

    def add(self, number: int) -> PartitionHandle:
        """The member of that number, closed when it is new: it is opened when somebody needs it, at once if it must be looked into."""
        if number not in self.members:
            summary = self._setup.summary_of(number)
            self.members[number] = member = PartitionHandle(number, self._setup.open_partition, self.clock, self._setup.chance, summary)
            self.closed[number] = member
            self.touch(member)
            if summary is None or summary.busy:
                self.to_open[number] = member
        return self.members[number]

    def drop(self, member: PartitionHandle) -> None:
        """A new partition that is not to be after all."""
        del self.members[member.number]
        for others in (self.closed, self.to_open, self.outs):
            others.pop(member.number, None)
        self.newcomers.discard(member.number)
        self.visits_changed = True
        self.with_ready.discard(member.number)
        if member in self.touched:
            self.touched.remove(member)
        self.used.discard(member.number)
        if member.partition is not None:
            with suppress(PenstockError):
                member.partition.close()

    def open_up(self, member: PartitionHandle) -> None:
        """Somebody needs a partition that is closed: the next turn opens it."""
        if member.closed:
            self.to_open[member.number] = member
            self.again = True

    def catch_up(self, member: PartitionHandle, *, new: bool = False) -> None:
        """A partition that is new, or was away, does as the others do."""
        others = [other.state for other in self.healthy() if other is not member]
        with suppress(PenstockError):  # the commit says what is wrong
            if self.policy is not None:
                self.run(member, Configure(self.policy))
            if new:
                self.run(member, Pause(*(bool(others) and all(getattr(state, side) for state in others) for side in _SIDES)))
            elif member.missed is not None:
                self.run(member, member.missed)
            member.missed = None
            for name in {name for state in others for name in state.cursors} - member.state.cursors.keys():
                self.run(member, PutCursor(name, member.state.dropped.first_missing(0)))

    def pause(self, word: Pause) -> None:
        """For the whole queue; who is away hears of it when it comes back."""
        for member in self.members.values():
            if member.healthy:
                self.run(member, word)
            elif member.missed is None:
                member.missed = word
            else:
                lease = member.missed.lease if word.lease is None else word.lease
                member.missed = Pause(lease, member.missed.produce if word.produce is None else word.produce)

    def healthy(self) -> Iterator[PartitionHandle]:
        """Partitions that can be used now: in order, and not out."""
        return (member for member in list(self.members.values()) if member.healthy)

    @property
    def awaits(self) -> bool:
        """Whether a partition is out that is soon to land."""
        return any(member.awaited for member in self.outs.values())

    @property
    def all_out(self) -> bool:
        """Whether a turn now could do nothing but wait."""
        return bool(self.outs) and len(self.outs) == len(self.members) and all(member.awaited for member in list(self.outs.values()))

    def stocked(self) -> list[PartitionHandle]:
        """Partitions that may have something ready, by number: those that had at the end of the last turn, and those touched since."""
        return [self.members[number] for number in sorted(self.with_ready.union(member.number for member in self.touched))]

    def note_stock(self) -> None:
        """At the end of a turn."""
        for member in self.touched:
            if member.healthy and member.state.ready:
                self.with_ready.add(member.number)
            else:
                self.with_ready.discard(member.number)

    def run(self, member: PartitionHandle, command: Command, rounds: int = 0) -> Answer:
        """Run a command in a partition; it is committed with the turn."""
        partition = member.open
        self.touch(member)
        return partition.run(command, rounds)

    def touch(self, member: PartitionHandle) -> None:
        """This partition has to do with the turn: it is committed and planned with it."""
        if not member.touched:
            member.touched = True
            self.touched.append(member)
        self.used.add(member.number)

    def answer(self, request: Request, result: Any) -> None:
        """This will be the answer, if what it rests on can be committed."""
        self.pending.append((request, result))

    def attempt(self, request: Any, step: Callable[[Any], None]) -> None:
        """One step for a request; a refusal is its answer."""
        try:
            step(request)
        except PenstockError as error:
            request.finish(error=error)

    def unresolved(self, *, with_bytes: bool = False) -> tuple[int, int]:
        """Items that are not resolved, and about how many bytes of log they take; where a partition cannot be asked, as last known."""
        items = size = 0
        for member in self.members.values():
            if member.healthy:
                state = member.state
                count = state.next_offset - state.resolved.total - state.buried_set.total
                member.unresolved = count, unresolved_bytes(member.open.log.segments(), state) if with_bytes else 0
            items += member.unresolved[0]
            size += member.unresolved[1]
        return items, size
