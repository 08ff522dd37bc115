"""A queue's partitions, and the state that the steps of a turn share.

Owns: `PartitionSet`: the partition handles, the slot map, the uncommitted answers, and the flags of a turn.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.loop.partition_handle import IDLE_AFTER, RETIRED_IDLE_AFTER, OpenPartition, PartitionHandle
from penstock.loop.requests import Request
from penstock.loop.retention import unresolved_bytes
from penstock.rules.calls import RememberedAnswer, check_age
from penstock.rules.commands import Answer, Command, Configure, Pause, PutCursor
from penstock.rules.options import StorageOptions
from penstock.rules.slots import SlotMap
from penstock.rules.summary import Summary
from penstock.words.clock import Clock
from penstock.words.errors import PenstockError, StorageFailed
from penstock.words.limits import Policy

_SIDES = ("paused_lease", "paused_produce")


class QueueSetup(NamedTuple):
    """The queue's identity, and what its partitions need of the broker."""

    name: str
    incarnation: int
    open_partition: OpenPartition
    clock: Clock
    chance: Callable[[], float]
    summary_of: Callable[[int], Summary | None]
    """The summary of a closed partition; None when it must be opened."""


class PartitionSet:
    """The partitions of one queue."""

    def __init__(self, setup: QueueSetup) -> None:
        self.name = setup.name
        self.incarnation = setup.incarnation
        self.clock = setup.clock
        self.handles: dict[int, PartitionHandle] = {}
        self.active: Sequence[int] = ()
        """Numbers of the partitions that take new items."""
        self.map = SlotMap(0, [])  # type: ignore[arg-type]  # until `set_partitions`
        self.older_maps: Sequence[SlotMap] = ()
        """Earlier slot maps, newest first: chunks of an unfinished write may have been divided by them."""
        self.read_only: Sequence[int] = ()
        self.policy: Policy | None = None
        self.storage = StorageOptions()
        self.now = 0
        """The elapsed time at the start of the turn."""
        self.alone = False
        """Whether this turn has one request, and nothing else to do."""
        self.wants_turn = False
        """Whether another turn has something to do now."""
        self.answered: list[Request] = []
        """Requests answered by the last turn."""
        self.touched: list[PartitionHandle] = []
        """Partitions that this turn used."""
        self.closed: dict[int, PartitionHandle] = {}
        """Partitions that were closed because they were idle."""
        self.to_open: dict[int, PartitionHandle] = {}
        """Closed partitions that the next turn opens."""
        self.visits_changed = False
        """Whether a partition was removed, so that the next visit must be planned again."""
        self.partitions_to_add: set[int] = set()
        """Partitions that a resize is about to add."""
        self.handles_in_io: dict[int, PartitionHandle] = {}
        """Partitions in I/O, by number."""
        self.with_ready_items: set[int] = set()
        self.used: set[int] = set()
        """Numbers of the partitions that an administrative operation used."""
        self.uncommitted_answers: deque[tuple[Request, Any]] = deque()
        self.post: Callable[[Request], None] = lambda request: None
        """Adds a message to the queue's own pending requests."""
        self._setup = setup

    def set_partitions(self, slots: SlotMap, active: Sequence[int], numbers: Sequence[int], older: Sequence[SlotMap] = ()) -> None:
        """Set the queue's partitions (`numbers`), those that take new items (`active`) and the slot map."""
        for number in sorted(numbers):
            self.add(number)
        for number, handle in self.handles.items():
            handle.idle_after = IDLE_AFTER if number in active else RETIRED_IDLE_AFTER
        self.map, self.active, self.older_maps = slots, active, older

    def add(self, number: int) -> PartitionHandle:
        """The handle of a partition, added when it is new. The next turn opens it if its summary says so."""
        if number not in self.handles:
            summary = self._setup.summary_of(number)
            self.handles[number] = handle = PartitionHandle(number, self._setup.open_partition, self.clock, self._setup.chance, summary)
            self.closed[number] = handle
            self.touch(handle)
            if summary is None or summary.must_stay_open:
                self.to_open[number] = handle
        return self.handles[number]

    def remove(self, handle: PartitionHandle) -> None:
        """Remove a new partition whose resize was cancelled, and close it."""
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
        """Have the next turn open a closed partition."""
        if handle.closed:
            self.to_open[handle.number] = handle
            self.wants_turn = True

    def set_storage(self, options: StorageOptions) -> None:
        """Write the logs of all partitions by these options from now on."""
        self.storage = options
        for handle in self.handles.values():
            handle.configure_storage(options)

    def apply_queue_settings(self, handle: PartitionHandle, *, new: bool = False) -> None:
        """Apply the queue's options, pause and cursors to a partition that is new or has recovered."""
        handle.configure_storage(self.storage)
        others = [other.state for other in self.usable() if other is not handle]
        with suppress(PenstockError):  # the commit reports the error
            if self.policy is not None:
                self.run(handle, Configure(self.policy))
            if new:
                self.run(handle, Pause(*(bool(others) and all(getattr(state, side) for state in others) for side in _SIDES)))
            elif handle.missed_pause is not None:
                self.run(handle, handle.missed_pause)
            handle.missed_pause = None
            for name in {name for state in others for name in state.cursors} - handle.state.cursors.keys():
                self.run(handle, PutCursor(name, handle.state.dropped.first_missing(0)))

    def note_missed_pause(self, command: Pause) -> None:
        """Have partitions that are not usable apply a pause of the whole queue when they recover."""
        for handle in self.handles.values():
            if handle.is_usable:
                continue
            if handle.missed_pause is None:
                handle.missed_pause = command
            else:
                lease = handle.missed_pause.lease if command.lease is None else command.lease
                handle.missed_pause = Pause(lease, handle.missed_pause.produce if command.produce is None else command.produce)

    def usable(self) -> Iterator[PartitionHandle]:
        """Partitions that are open, not in I/O and not failing."""
        return (handle for handle in list(self.handles.values()) if handle.is_usable)

    @property
    def any_worth_waiting_for(self) -> bool:
        """Whether a partition is in I/O and not slow."""
        return any(handle.is_worth_waiting_for for handle in self.handles_in_io.values())

    def maybe_ready(self) -> list[PartitionHandle]:
        """Partitions that had ready items at the end of the last turn or were used since, by number."""
        if len(self.handles) == 1:
            return [*self.handles.values()]
        return [self.handles[number] for number in sorted(self.with_ready_items.union([handle.number for handle in self.touched]))]

    # -- calls that partitions remember ---------------------------------------------------------------

    def remembered(self, handle: PartitionHandle, request: Request) -> list[RememberedAnswer] | None:
        """What a partition did for the call of a request, when it was sent before; None: nothing.

        A call that is not in the memory of a partition in I/O, or failing, is not stored there: records are applied
        before they are written. Raises when that cannot be known, or whether what it did will stay.
        """
        memory = handle.call_memory(self.now)
        if memory is None:
            why = handle.error or "it is being opened"
            unknown = StorageFailed(f"partition {handle.number} cannot be asked whether it knows this request ({why}); try again later")
            raise request.outcome_after(unknown)
        now = handle.elapsed_at(self.now)
        answers = memory.answers(request.calls, now)
        if answers is not None:
            if handle.error is not None:
                raise request.outcome_after(handle.refusal)
        elif request.first_sent is not None:
            if request.request is None:
                memory.check_not_evicted(now - (self.now - request.first_sent), now)
            check_age(self.now - request.first_sent)
        return answers

    def partitions_to_ask(self, request: Request) -> set[int]:
        """Numbers of the partitions that must be opened, or waited for, to learn what they did for a request."""
        handles = self.handles.items()
        return {number for number, handle in handles if handle.must_be_asked(self.now) or self._must_be_usable(handle, request)}

    def _must_be_usable(self, handle: PartitionHandle, request: Request) -> bool:
        """Whether a partition remembers a call, but cannot be used yet."""
        if handle.is_usable or handle.error is not None:
            return False
        memory = handle.call_memory(self.now)
        with suppress(PenstockError):  # `remembered` raises it
            return memory is not None and memory.answers(request.calls, handle.elapsed_at(self.now)) is not None
        return False

    def run(self, handle: PartitionHandle, command: Command, rounds: int = 0) -> Answer:
        """Run a command in a partition; it is committed with the turn. Raises when the partition is not usable."""
        partition = handle.partition
        if partition is None or handle.error is not None or handle.in_io:
            raise handle.refusal
        self.touch(handle)
        return partition.run(command, rounds)

    def touch(self, handle: PartitionHandle) -> None:
        """Mark a partition as used by this turn: it is committed, and its next visit planned, at the end."""
        if not handle.touched:
            handle.touched = True
            self.touched.append(handle)
        self.used.add(handle.number)

    def answer(self, request: Request, result: Any) -> None:
        """Set the answer of a request; it is sent when the partitions that it used are committed."""
        self.uncommitted_answers.append((request, result))

    def attempt(self, request: Any, step: Callable[[Any], None]) -> None:
        """Run a step for a request; an error is its answer."""
        try:
            step(request)
        except PenstockError as error:
            self.answer_now(request, error=error)

    def answer_now(self, request: Request, answer: Any = None, error: PenstockError | None = None) -> None:
        """Send an answer that waits for no commit."""
        if not request.done:
            self.answered.append(request)
            request.finish(answer, error)

    def unresolved(self, *, with_bytes: bool = False) -> tuple[int, int]:
        """Unresolved items and about how many bytes they take; of a partition that is not usable, the last known."""
        items = size = 0
        for handle in self.handles.values():
            if handle.is_usable:
                state = handle.state
                count = state.next_offset - state.completed.total - state.buried_set.total
                handle.unresolved = count, unresolved_bytes(handle.usable_partition.log.segments(), state) if with_bytes else 0
            items += handle.unresolved[0]
            size += handle.unresolved[1]
        return items, size
