"""A queue's partitions, and what all steps of its turn share.

Owns: `PartitionSet`: the members, the slot map, the answers that wait for the commit, and what the steps of a turn tell each other.
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
        self.handles: dict[int, PartitionHandle] = {}
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
        self.wants_turn = False
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
        self.partitions_to_add: set[int] = set()
        """Partitions that a reshape is about to add."""
        self.handles_in_io: dict[int, PartitionHandle] = {}
        """Partitions that are out."""
        self.with_ready_items: set[int] = set()
        self.used: set[int] = set()
        """Numbers of the partitions that an operator's word had to do with."""
        self.uncommitted_answers: deque[tuple[Request, Any]] = deque()
        self.post: Callable[[Request], None] = lambda request: None
        """Puts a message of the queue's own into its inbox."""
        self._setup = setup

    def set_partitions(self, slots: SlotMap, active: Sequence[int], numbers: Sequence[int], older: Sequence[SlotMap] = ()) -> None:
        """The queue has these partitions (`numbers`), of which `active` take items as `slots` says; new ones are opened."""
        for number in sorted(numbers):
            self.add(number)
        for number, handle in self.handles.items():
            handle.idle_after = IDLE_AFTER if number in active else RETIRED_IDLE_AFTER
        self.map, self.active, self.older_maps = slots, active, older

    def add(self, number: int) -> PartitionHandle:
        """The member of that number, closed when it is new: it is opened when somebody needs it, at once if it must be looked into."""
        if number not in self.handles:
            summary = self._setup.summary_of(number)
            self.handles[number] = handle = PartitionHandle(number, self._setup.open_partition, self.clock, self._setup.chance, summary)
            self.closed[number] = handle
            self.touch(handle)
            if summary is None or summary.must_stay_open:
                self.to_open[number] = handle
        return self.handles[number]

    def remove(self, handle: PartitionHandle) -> None:
        """A new partition that is not to be after all."""
        del self.handles[handle.number]
        for others in (self.closed, self.to_open, self.handles_in_io):
            others.pop(handle.number, None)
        self.partitions_to_add.discard(handle.number)
        self.visits_changed = True
        self.with_ready_items.discard(handle.number)
        if handle in self.touched:
            self.touched.remove(handle)
        self.used.discard(handle.number)
        if handle.partition is not None:
            with suppress(PenstockError):
                handle.partition.close()

    def request_open(self, handle: PartitionHandle) -> None:
        """Somebody needs a partition that is closed: the next turn opens it."""
        if handle.closed:
            self.to_open[handle.number] = handle
            self.wants_turn = True

    def apply_queue_settings(self, handle: PartitionHandle, *, new: bool = False) -> None:
        """A partition that is new, or was away, does as the others do."""
        others = [other.state for other in self.usable() if other is not handle]
        with suppress(PenstockError):  # the commit says what is wrong
            if self.policy is not None:
                self.run(handle, Configure(self.policy))
            if new:
                self.run(handle, Pause(*(bool(others) and all(getattr(state, side) for state in others) for side in _SIDES)))
            elif handle.missed_pause is not None:
                self.run(handle, handle.missed_pause)
            handle.missed_pause = None
            for name in {name for state in others for name in state.cursors} - handle.state.cursors.keys():
                self.run(handle, PutCursor(name, handle.state.dropped.first_missing(0)))

    def pause(self, word: Pause) -> None:
        """For the whole queue; who is away hears of it when it comes back."""
        for handle in self.handles.values():
            if handle.is_usable:
                self.run(handle, word)
            elif handle.missed_pause is None:
                handle.missed_pause = word
            else:
                lease = handle.missed_pause.lease if word.lease is None else word.lease
                handle.missed_pause = Pause(lease, handle.missed_pause.produce if word.produce is None else word.produce)

    def usable(self) -> Iterator[PartitionHandle]:
        """Partitions that can be used now: in order, and not out."""
        return (handle for handle in list(self.handles.values()) if handle.is_usable)

    @property
    def any_worth_waiting_for(self) -> bool:
        """Whether a partition is out that is soon to land."""
        return any(handle.is_worth_waiting_for for handle in self.handles_in_io.values())

    @property
    def all_in_io(self) -> bool:
        """Whether a turn now could do nothing but wait."""
        return (
            bool(self.handles_in_io)
            and len(self.handles_in_io) == len(self.handles)
            and all(handle.is_worth_waiting_for for handle in list(self.handles_in_io.values()))
        )

    def maybe_ready(self) -> list[PartitionHandle]:
        """Partitions that may have something ready, by number: those that had at the end of the last turn, and those touched since."""
        return [self.handles[number] for number in sorted(self.with_ready_items.union(handle.number for handle in self.touched))]

    def note_ready(self) -> None:
        """At the end of a turn."""
        for handle in self.touched:
            if handle.is_usable and handle.state.ready:
                self.with_ready_items.add(handle.number)
            else:
                self.with_ready_items.discard(handle.number)

    def run(self, handle: PartitionHandle, command: Command, rounds: int = 0) -> Answer:
        """Run a command in a partition; it is committed with the turn."""
        partition = handle.usable_partition
        self.touch(handle)
        return partition.run(command, rounds)

    def touch(self, handle: PartitionHandle) -> None:
        """This partition has to do with the turn: it is committed and planned with it."""
        if not handle.touched:
            handle.touched = True
            self.touched.append(handle)
        self.used.add(handle.number)

    def answer(self, request: Request, result: Any) -> None:
        """This will be the answer, if what it rests on can be committed."""
        self.uncommitted_answers.append((request, result))

    def attempt(self, request: Any, step: Callable[[Any], None]) -> None:
        """One step for a request; a refusal is its answer."""
        try:
            step(request)
        except PenstockError as error:
            request.finish(error=error)

    def unresolved(self, *, with_bytes: bool = False) -> tuple[int, int]:
        """Items that are not resolved, and about how many bytes of log they take; where a partition cannot be asked, as last known."""
        items = size = 0
        for handle in self.handles.values():
            if handle.is_usable:
                state = handle.state
                count = state.next_offset - state.completed.total - state.buried_set.total
                handle.unresolved = count, unresolved_bytes(handle.usable_partition.log.segments(), state) if with_bytes else 0
            items += handle.unresolved[0]
            size += handle.unresolved[1]
        return items, size
