"""The step of a turn that leases items: shares ready items out to waiting requests.

Owns: `LeaseStep`; `LeaseSource` (the ready items of one partition) and `SourcesByRank` (partitions with ready items,
the best first); `shares`. A request waits until items are ready or its deadline passes; everything that makes an item
ready causes a turn. Requests are served round-robin, with the best items of the whole queue first: a partition is
leased from until another one has clearly better items.
- Partitions are compared by their best lane heads: priority raised by age, then waiting time. Each has its own
  elapsed time, so times are converted to the queue's clock first.
- Within one raised priority, a partition is leased from while its head is at most SAME_AGE younger than the oldest
  elsewhere: so a batch uses few partitions. The rules know times to about a second anyway (lanes.py: JOIN_WITHIN).
- A partition without changes is not examined again, unless aging raises one of its heads.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from penstock.loop import requests
from penstock.loop.partition import Partition
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import PartitionSet
from penstock.loop.resize import ResizeStep
from penstock.loop.retention import mean_bytes
from penstock.loop.transfer import TransferStep
from penstock.loop.waiting_leases import WaitingLeases
from penstock.rules import commands
from penstock.rules.commands import AskAgain, LeaseAnswer, StraysFound
from penstock.rules.fences import ENDLESS
from penstock.rules.lanes import Rank, best_rank
from penstock.words.clock import SECOND
from penstock.words.errors import LeaseLost, OutcomeUnknown, PenstockError, QueueFull, QueueHeld
from penstock.words.limits import MAX_BATCH_BYTES

MANY = 4
"""A lease of more items is also limited by their mean size in the log, so that a reply fits into memory."""
ROUNDS = 4
"""Rounds of searching a backlog of busy keys that one lease may take in a turn."""
MOST_FOUND_AGAIN = 1_000
"""When a partition has so many leases that were found again, it forgets those that have ended."""


# -- choosing partitions ----------------------------------------------------------------------------


SAME_AGE = 1 * SECOND
Entry: TypeAlias = "tuple[Rank, int, int, LeaseSource]"


class LeaseSource:
    """The ready items of a partition, as of its last change."""

    __slots__ = ("_aging", "_good_until", "_heads", "_partition", "_records_seen", "_shift", "_used", "entry", "handle", "rank", "ready")

    def __init__(self, handle: PartitionHandle) -> None:
        self.handle = handle
        self.ready = 0
        """How many items are ready, whether or not their keys are free; 0 while leasing is paused."""
        self.rank: Rank | None = None
        """The rank of its best head, by the queue's clock; None when there is nothing to lease."""
        self.entry: Entry | None = None
        """Its heap entry: by rank, then by the turn in which it was last leased from."""
        self._used = 0
        self._partition: Partition | None = None
        self._records_seen = -1
        self._good_until = 0
        self._heads: list[Rank] = []
        self._aging = self._shift = 0

    @property
    def changed(self) -> bool:
        """Whether the partition has changed since the last update."""
        return (
            self._partition is not self.handle.partition or self._partition is None or self._partition.records_applied != self._records_seen
        )

    def update(self, now: int) -> bool:
        """Update the rank for `now`, by the queue's clock; whether there is anything to lease."""
        if now >= self._good_until or self.changed:
            self._update(now)
        return self.rank is not None

    def _update(self, now: int) -> None:
        partition = self.handle.partition
        if partition is not None and self.changed:
            state = partition.state
            self._partition, self._records_seen = partition, partition.records_applied
            self._shift, self._aging = state.clock_shift, state.policy.priority_aging
            self.ready = 0 if state.paused_lease else state.ready
            self._heads = state.lane_heads() if self.ready else []
        own, aging = now + self._shift, self._aging
        best = best_rank(self._heads, aging, own)
        self.rank = None if best is None else Rank(best.priority, best.since - self._shift)
        self._good_until = now + min((aging - (own - head.since) % aging for head in self._heads), default=0) if aging else ENDLESS
        self._sort()

    def use(self, turn: int) -> None:
        """Note that it was leased from in this turn."""
        self._used = turn
        self._sort()

    def _sort(self) -> None:
        if self.rank is None:
            self.entry = None
        else:  # rounded to SAME_AGE: of about equally old ones, the one leased from longest ago comes first
            about = Rank(self.rank.priority, self.rank.since - self.rank.since % SAME_AGE)
            self.entry = (about, self._used, self.handle.number, self)

    def own_time(self, rank: Rank) -> Rank:
        """Convert a rank from the queue's clock to this partition's."""
        return Rank(rank.priority, rank.since + self._shift)

    def __repr__(self) -> str:
        return f"LeaseSource({self.handle.number}, {self.ready} ready, {self.rank})"


class SourcesByRank:
    """The partitions with ready items, the best first, during one turn."""

    def __init__(self, found: Iterable[LeaseSource], now: int) -> None:
        self._now = now
        self._current: LeaseSource | None = None
        self._others = [source.entry for source in found if source.entry is not None]
        heapify(self._others)

    def __bool__(self) -> bool:
        return self._current is not None or bool(self._others)

    def __iter__(self) -> Iterator[LeaseSource]:
        yield from (source for *_, source in self._others)
        if self._current is not None:
            yield self._current

    def best(self) -> LeaseSource | None:
        """The partition to lease from next: the same as before, unless another is clearly better."""
        current, bound = self._current, self._bound()
        if current is not None:
            if current.update(self._now) and (bound is None or (current.rank is not None and current.rank <= bound)):
                return current
            self.add(current)
        self._current = heappop(self._others)[-1] if self._others else None
        return self._current

    def until(self) -> Rank | None:
        """The worst rank to lease from the partition that `best` gave: after that another one is clearly better."""
        bound = self._bound()
        return None if bound is None or self._current is None else self._current.own_time(bound)

    def leave_out(self) -> None:
        """Remove the partition that `best` gave for this turn, unless it is added again."""
        self._current = None

    def add(self, source: LeaseSource) -> None:
        if source.update(self._now) and source.entry is not None:
            heappush(self._others, source.entry)

    def _bound(self) -> Rank | None:
        """The worst rank that is not clearly worse than the best of the other partitions."""
        if not self._others:
            return None
        rank = self._others[0][-1].rank
        return None if rank is None else Rank(rank.priority, rank.since + SAME_AGE)


# -- fair shares ------------------------------------------------------------------------------------


def shares(wants: Sequence[int], ready: int) -> list[int]:
    """Divide `ready` items fairly among requests that want so many each; the first ones get the remainder."""
    given = [0] * len(wants)
    open_ones = [index for index, want in enumerate(wants) if want > 0]
    while open_ones and ready > 0:
        each = min(ready // len(open_ones), min(wants[index] - given[index] for index in open_ones))
        if each == 0:
            for index in open_ones[:ready]:
                given[index] += 1
            return given
        for index in open_ones:
            given[index] += each
        ready -= each * len(open_ones)
        open_ones = [index for index in open_ones if given[index] < wants[index]]
    return given


class OnlySource:
    """The only partition that may have ready items: as `SourcesByRank` with one `LeaseSource`, without any ranks."""

    __slots__ = ("_left_out", "changed", "handle")

    def __init__(self, handle: PartitionHandle) -> None:
        self.handle = handle
        self.changed = False
        self._left_out = False

    def __iter__(self) -> "Iterator[OnlySource]":
        yield self

    def best(self) -> "OnlySource | None":
        return None if self._left_out else self

    def until(self) -> None:
        return None

    def use(self, turn: int) -> None:
        pass

    def leave_out(self) -> None:
        self._left_out = True


# -- requests ---------------------------------------------------------------------------------------


class LeaseStep:
    """Leases items to the requests that wait for them."""

    def __init__(self, partitions: PartitionSet, transfer_step: TransferStep, resize_step: ResizeStep) -> None:
        self._partitions = partitions
        self._transfer_step = transfer_step
        self._resize_step = resize_step
        self.waiting = WaitingLeases()
        self._sources: dict[int, LeaseSource] = {}  # by the number of the partition
        self._turns = 0
        self.search_unfinished = False  # a partition must search further to know whether it has items to lease
        self.holder = ""
        """The holder of the consumer right, which alone may lease; "" is none."""
        self.held_until = 0

    def set_consumer_right(self, holder: str, timeout: int) -> None:
        """Give the consumer right to a holder, or ("") end it. Waiting requests of other consumers are refused."""
        self.holder, self.held_until = holder, self._partitions.clock.read().elapsed + timeout
        for request in self.waiting:
            try:
                self.check_consumer_right(request.consumer)
            except QueueHeld as error:
                self._partitions.answer_now(request, error=error)
                self.waiting.remove(request)

    @property
    def active_holder(self) -> str:
        """The holder of the consumer right, if it has not ended; else ""."""
        return self.holder if self.holder and self._partitions.clock.read().elapsed < self.held_until else ""

    def check_consumer_right(self, consumer: str) -> None:
        """QueueHeld when another consumer has the right."""
        if consumer != self.active_holder != "":
            raise QueueHeld(
                f"queue {self._partitions.name!r} is consumed by {self.holder}, which alone may lease from it; "
                "end that consumer, or wait until its right has ended"
            )

    def run(self, request: requests.LeaseRequest) -> None:
        """Let a request wait for items, unless it may not lease or repeats one that was answered."""
        if self.holder:
            self.check_consumer_right(request.consumer)
        if request.may_be_known and (known := self._repeated(request)) is not None:
            request.found_again = bool(known)
            if known:
                self._partitions.answer(request, known)
            elif request.without_payloads:
                raise LeaseLost("the leases of this request have ended; repeat it with another request id")
            else:
                self._partitions.answer_now(request, [])  # its leases have ended
            return
        parts = self._lease_alone(request) if self._partitions.alone and not self.waiting else None
        if parts:
            self._partitions.answer(request, parts)
        else:
            self.waiting.add(request)

    def _lease_alone(self, request: requests.LeaseRequest) -> list[tuple[PartitionHandle, LeaseAnswer]]:
        """Lease for the only request of a turn, if only one partition may have ready items: none is compared."""
        available = self._partitions.maybe_ready()
        if len(available) != 1 or not available[0].is_usable:
            return []
        handle, want = available[0], request.want
        if want == 1:  # as below, without the rounds for more items
            granted = self._lease(handle, request, want, None)
            return [] if granted is None or not granted.lease else [(handle, granted)]
        return self._lease_for(request, want, OnlySource(handle))

    def _repeated(self, request: requests.LeaseRequest) -> list[tuple[PartitionHandle, LeaseAnswer]] | None:
        """The leases that the same call was given before; None when it is new.

        Raises when a failing partition may have granted some. Not for a request without payloads: its caller has
        recorded its leases, and lets others expire.
        """
        found: list[tuple[PartitionHandle, LeaseAnswer]] = []
        room, again = request.want, False
        for handle in [*self._partitions.handles.values()]:
            if request.without_payloads and not handle.is_usable:
                continue
            for part in range(len(self._partitions.remembered(handle, request) or ())):
                again = True
                granted = self._partitions.run(handle, self._command(request, request.want, part))
                # More than it wants was granted if the outcome of a commit was unknown: the rest expires.
                if isinstance(granted, LeaseAnswer) and granted.lease and (granted.count <= room or request.without_payloads):
                    found.append((handle, granted))
                    room -= granted.count
                    if len(handle.leases_found_again) >= MOST_FOUND_AGAIN:
                        handle.leases_found_again &= handle.state.leases.live.keys()
                    handle.leases_found_again.add(granted.lease)
        return found if again else None

    def assign(self, now: int) -> None:
        """Lease ready items to waiting requests; answer those whose deadline has passed."""
        waiting = self.waiting
        waiting.remove_cancelled()
        sources = self._find_sources(self._partitions.maybe_ready(), now)
        self.search_unfinished = False
        if sources:
            ready = sum([source.ready for source in sources])
            front = waiting.first(ready)  # there is at least one item for each
            given: list[list[tuple[PartitionHandle, LeaseAnswer]]] = [[] for _ in front]
            if front:
                left = shares([request.want for request in front], ready)
                self._turns += 1
                self._share_out(front, given, left, SourcesByRank(sources, now))
            for request, parts in zip(front, given, strict=True):
                if parts:
                    self._partitions.answer(request, parts)
                    waiting.remove(request)  # last: an interrupt before this forgets no request
        earliest = waiting.earliest
        if earliest is not None and earliest <= now and not self.search_unfinished:
            for request in waiting.expired(now):
                if self._checked_all(request):
                    self._answer_empty(request)
                    waiting.remove(request)

    def _checked_all(self, request: requests.LeaseRequest) -> bool:
        """Whether every partition that is not slow was checked since the deadline, perhaps in several turns."""
        in_io = {number for number, handle in self._partitions.handles_in_io.items() if handle.is_worth_waiting_for}
        request.unchecked_partitions = in_io if request.unchecked_partitions is None else request.unchecked_partitions & in_io
        return not request.unchecked_partitions

    def _answer_empty(self, request: requests.LeaseRequest) -> None:
        """Answer with no items; with an error when every partition is failing."""
        failing = next((handle for handle in self._partitions.handles.values() if handle.error is not None), None)
        if failing is not None and all(handle.error is not None for handle in self._partitions.handles.values()):
            self._partitions.answer_now(request, error=failing.refusal)
        else:
            self._partitions.answer_now(request, [])

    def _find_sources(self, available: Iterable[PartitionHandle], now: int) -> list[LeaseSource]:
        """The sources of the usable partitions that have ready items."""
        found = []
        for handle in available:
            source = self._sources.get(handle.number)
            if source is None or source.handle is not handle:
                source = self._sources[handle.number] = LeaseSource(handle)
            if handle.is_usable and source.update(now):
                found.append(source)
        return found

    def _share_out(
        self,
        waiting: list[requests.LeaseRequest],
        given: list[list[tuple[PartitionHandle, LeaseAnswer]]],
        left: list[int],
        sources: SourcesByRank,
    ) -> None:
        """Lease items in rounds. With keys, each request gets a part per round: busy keys may leave fewer items than
        `ready`.
        """
        several = len(waiting) > 1 and any(source.handle.state.keys.by_key or source.handle.state.lanes.keyed for source in sources)
        sharers = len(waiting) if several else 1
        handed = True
        while handed and sources:
            handed = False
            for index, request in enumerate(waiting):
                alone = sharers == 1
                portion = left[index] if alone else min(left[index], max(1, request.want // sharers))
                if not sources:
                    return
                if not portion:
                    continue
                parts = self._lease_for(request, portion, sources)
                given[index] += parts
                left[index] = 0 if alone else left[index] - sum(granted.count for _, granted in parts)
                handed = handed or bool(parts)

    def _lease_for(
        self, request: requests.LeaseRequest, want: int, sources: "SourcesByRank | OnlySource"
    ) -> list[tuple[PartitionHandle, LeaseAnswer]]:
        """Lease up to `want` items, the best first; partitions without (more) items are left out of later rounds."""
        parts: list[tuple[PartitionHandle, LeaseAnswer]] = []
        may_be_large, room = want > MANY and _log_bytes(sources) > MAX_BATCH_BYTES, MAX_BATCH_BYTES
        while want > 0 and (source := sources.best()) is not None:
            handle = source.handle
            each = self._mean_bytes(handle) if may_be_large else 0
            if parts and room < each:
                break
            until = sources.until()
            granted = self._lease(handle, request, _fitting(want, room, each), until)
            if granted is not None and granted.lease:  # a lease may be short: ask until it is empty
                parts.append((handle, granted))
                want -= granted.count
                room -= granted.count * each
                source.use(self._turns)
            elif granted is None or until is None or not source.changed:  # else its rank has changed
                sources.leave_out()
        return parts

    def _mean_bytes(self, handle: PartitionHandle) -> int:
        """About how many bytes an item of this partition takes."""
        with suppress(PenstockError):  # the commit reports the error
            partition = handle.usable_partition
            return mean_bytes(partition.log.segments(), partition.state)
        return 0

    def _lease(self, handle: PartitionHandle, request: requests.LeaseRequest, want: int, until: Rank | None) -> LeaseAnswer | None:
        partitions = self._partitions
        command = self._command(request, want, 0, until)
        command.moved_slots = self._resize_step.moved_slots(handle.number)
        while True:
            try:
                if request.calls:
                    command.part = len(handle.state.calls.answers(request.calls, handle.elapsed_at(partitions.now)) or ())
                answer = partitions.run(handle, command, rounds=ROUNDS)
                if isinstance(answer, StraysFound):
                    self._transfer_step.forward(handle, answer.offsets)
                    continue
            except PenstockError as error:
                if isinstance(error, OutcomeUnknown | QueueFull) and request.calls:
                    partitions.answer_now(request, error=error)  # the session has a newer call, or there are too many request ids
                return None  # the commit reports other errors
            if isinstance(answer, AskAgain):  # the search continues in the next turn
                partitions.wants_turn = self.search_unfinished = True
                return None
            return answer if isinstance(answer, LeaseAnswer) else None

    def _command(self, request: requests.LeaseRequest, want: int, part: int = 0, until: Rank | None = None) -> commands.AcquireLease:
        """The command for a partition, which remembers several leases of one call as its parts."""
        return commands.AcquireLease(want, request.consumer, request.timeout, request.per_key, request.calls, None, until, part, True)


def _log_bytes(sources: "SourcesByRank | OnlySource") -> int:
    """The size of the logs of all these partitions."""
    return sum([source.handle.partition.size_bytes for source in sources if source.handle.partition is not None])


def _fitting(want: int, room: int, each: int) -> int:
    """How many items of `each` bytes fit into `room` bytes, at least 1."""
    return max(1, min(want, room // each)) if each else want
