"""Leases, for a whole queue: who waits, and who gets what from which partition.

Owns: `LeaseStep`; `LeaseSource` (what one partition has to give) and `SourcesByRank` (the partitions that have something, best items first); `shares`.
Whoever asks waits in line until there is something or the deadline passes; anything that makes an item ready ends in a turn, and every
turn deals. Items are dealt round-robin, the best of the whole queue first: a partition gives what it has up to the point where another
one has something clearly better.
- Partitions are compared by their best heads: priority lifted by age, then how long it waits. Each partition counts elapsed time for
  itself, so times are put on the queue's clock before they are compared.
- Of one lifted priority, a partition is leased from as long as its head is at most SAME_AGE younger than the oldest elsewhere: so a
  batch touches few partitions. The rules know a time to about a second anyway (lanes.py: JOIN_WITHIN).
- Looking is cheap: a partition in which nothing happened since is not looked into again, unless aging lifts one of its heads.
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
from penstock.rules import commands
from penstock.rules.commands import AskAgain, LeaseAnswer, StraysFound
from penstock.rules.fences import ENDLESS
from penstock.rules.lanes import Rank, best_rank
from penstock.rules.lease import validate_lease
from penstock.rules.routing import digest
from penstock.words.clock import SECOND
from penstock.words.errors import LeaseLost, PenstockError, QueueHeld
from penstock.words.limits import MAX_BATCH_BYTES

MANY = 4
"""From so many on, large items might make a reply that nobody can hold: the size of those in the log bounds it."""
ROUNDS = 4
"""Steps of looking through a backlog of held keys that one lease may take in a turn."""


# -- from which partition ---------------------------------------------------------------------------


SAME_AGE = 1 * SECOND
Entry: TypeAlias = "tuple[Rank, int, int, LeaseSource]"


class LeaseSource:
    """What a partition has to give, as it was when something last happened there."""

    __slots__ = ("_aging", "_changes", "_good_until", "_heads", "_partition", "_shift", "_used", "entry", "member", "rank", "ready")

    def __init__(self, handle: PartitionHandle) -> None:
        self.handle = handle
        self.ready = 0
        """How many items are ready, whether or not their keys are free; 0 while leasing is paused."""
        self.rank: Rank | None = None
        """Of its best head, by the queue's clock; None when there is nothing to lease."""
        self.entry: Entry | None = None
        """What it is sorted by: of partitions that are equally good, the one that was not leased from for longest comes first."""
        self._used = 0
        self._partition: Partition | None = None
        self._changes = -1
        self._good_until = 0
        self._heads: list[Rank] = []
        self._aging = self._shift = 0

    @property
    def changed(self) -> bool:
        """Whether anything happened in the partition since the last look."""
        return self._partition is not self.handle.partition or self._partition is None or self._partition.records_applied != self._changes

    def look(self, now: int) -> bool:
        """See what there is at `now`, by the queue's clock; whether there is anything to lease."""
        if now >= self._good_until or self.changed:
            self._look(now)
        return self.rank is not None

    def _look(self, now: int) -> None:
        partition = self.handle.partition
        if partition is not None and self.changed:
            state = partition.state
            self._partition, self._changes = partition, partition.records_applied
            self._shift, self._aging = state.clock_shift, state.policy.priority_aging
            self.ready = 0 if state.paused_lease else state.ready
            self._heads = state.lane_heads() if self.ready else []
        own, aging = now + self._shift, self._aging
        best = best_rank(self._heads, aging, own)
        self.rank = None if best is None else Rank(best.priority, best.since - self._shift)
        self._good_until = now + min((aging - (own - head.since) % aging for head in self._heads), default=0) if aging else ENDLESS
        self._sort()

    def use(self, turn: int) -> None:
        """It was leased from, in this turn."""
        self._used = turn
        self._sort()

    def _sort(self) -> None:
        if self.rank is None:
            self.entry = None
        else:  # by the second: of partitions that are about equally old, the one that was not leased from for longest comes first
            about = Rank(self.rank.priority, self.rank.since - self.rank.since % SAME_AGE)
            self.entry = (about, self._used, self.handle.number, self)

    def own_time(self, rank: Rank) -> Rank:
        """A rank by the queue's clock as this partition counts time."""
        return Rank(rank.priority, rank.since + self._shift)

    def __repr__(self) -> str:
        return f"Stock({self.handle.number}, {self.ready} ready, {self.rank})"


class SourcesByRank:
    """The partitions that have something to lease, as they are dealt from within one turn."""

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
        """The partition to lease from next: the last one, unless another is clearly better."""
        current, bound = self._current, self._bound()
        if current is not None:
            if current.look(self._now) and (bound is None or (current.rank is not None and current.rank <= bound)):
                return current
            self.add(current)
        self._current = heappop(self._others)[-1] if self._others else None
        return self._current

    def until(self) -> Rank | None:
        """How far to lease from the partition that `best` gave: beyond this another one is clearly better."""
        bound = self._bound()
        return None if bound is None or self._current is None else self._current.own_time(bound)

    def leave_out(self) -> None:
        """The partition that `best` gave has nothing (more) to give in this turn, unless it is added again."""
        self._current = None

    def add(self, source: LeaseSource) -> None:
        if source.look(self._now) and source.entry is not None:
            heappush(self._others, source.entry)

    def _bound(self) -> Rank | None:
        """The worst that is not clearly worse than the best of the others."""
        if not self._others:
            return None
        rank = self._others[0][-1].rank
        return None if rank is None else Rank(rank.priority, rank.since + SAME_AGE)


# -- fair shares ------------------------------------------------------------------------------------


def shares(wants: Sequence[int], there: int) -> list[int]:
    """How many each gets of `there` items; what does not divide evenly goes to those who came first."""
    given = [0] * len(wants)
    open_ones = [index for index, want in enumerate(wants) if want > 0]
    while open_ones and there > 0:
        each = min(there // len(open_ones), min(wants[index] - given[index] for index in open_ones))
        if each == 0:
            for index in open_ones[:there]:
                given[index] += 1
            return given
        for index in open_ones:
            given[index] += each
        there -= each * len(open_ones)
        open_ones = [index for index in open_ones if given[index] < wants[index]]
    return given


# -- who waits -----------------------------------------------------------------------------------


class LeaseStep:
    """Those who wait for items."""

    def __init__(self, partitions: PartitionSet, transfer_step: TransferStep, resize_step: ResizeStep) -> None:
        self._partitions = partitions
        self._transfer_step = transfer_step
        self._resize_step = resize_step
        self.waiting: list[requests.LeaseRequest] = []
        self._sources: dict[int, LeaseSource] = {}  # by the number of the partition
        self._rounds_dealt = 0
        self.search_unfinished = False  # a partition has to look further before it knows whether it has something
        self.has_cancelled = False
        """Somebody who waited is gone. Set from any thread."""
        self.earliest: int | None = None
        """The deadline that comes first."""
        self.holder = ""
        """The consumer that has the right to lease from this queue, alone, if any has."""
        self.held_until = 0

    def set_consumer_right(self, holder: str, timeout: int) -> None:
        """Give the consumer right to one for so long, or ("") back to all. Others who wait in line are told."""
        self.holder, self.held_until = holder, self._partitions.clock.read().elapsed + timeout
        for request in self.waiting:
            try:
                self.check_consumer_right(request.consumer)
            except QueueHeld as error:
                request.finish(error=error)
        self.waiting = [request for request in self.waiting if not request.done]

    @property
    def active_holder(self) -> str:
        """Who has the right now, if anybody."""
        return self.holder if self.holder and self._partitions.clock.read().elapsed < self.held_until else ""

    def check_consumer_right(self, consumer: str) -> None:
        """Say so when somebody else has the right."""
        if consumer != self.active_holder != "":
            raise QueueHeld(
                f"queue {self._partitions.name!r} is consumed by {self.holder}, which alone may lease from it; "
                "end that consumer, or wait until its right has ended"
            )

    def run(self, request: requests.LeaseRequest) -> None:
        """Put a request in line, unless it is wrong, or the repetition of one that was answered."""
        validate_lease(self._command(request, request.want))
        if self.holder:
            self.check_consumer_right(request.consumer)
        if request.request is not None and (known := self._known(request)) is not None:
            if known:
                self._partitions.answer(request, known)
            elif request.without_payloads:
                raise LeaseLost("what this request was given has ended; ask for something new under another id")
            else:
                request.finish([])  # what it was given has ended
            return
        self.add_waiting(request)

    def add_waiting(self, request: requests.LeaseRequest) -> None:
        """Wait in line, behind the others."""
        self.waiting.append(request)
        self.earliest = request.deadline if self.earliest is None else min(self.earliest, request.deadline)

    def _known(self, request: requests.LeaseRequest) -> list[tuple[PartitionHandle, LeaseAnswer]] | None:
        """What a request was given when it was first made; None when this is the first time.

        For a bare one it is no matter if a partition that is out of order knows more: whoever has not noted those leases lets them end.
        """
        found, again = [], False
        for handle in self._partitions.usable():
            part, command = 0, self._command(request, request.want)
            while handle.state.requests.get(command.request or b"", handle.usable_partition.now().elapsed) is not None:
                again = True
                granted = self._partitions.run(handle, command)
                if isinstance(granted, LeaseAnswer) and granted.lease:
                    found.append((handle, granted))
                part += 1
                command = self._command(request, request.want, part)
        broken = next((handle for handle in self._partitions.handles.values() if handle.error is not None), None)
        if broken is not None and not again and not request.without_payloads:
            raise broken.refusal  # it may be the one that knows
        return found if again else None

    def assign(self, now: int) -> None:
        """Give out what is ready; tell those whose time is over."""
        sources = self._look(self._partitions.maybe_ready(), now)
        if not sources and (self.earliest is None or now < self.earliest) and not self.search_unfinished and not self.has_cancelled:
            return
        self.has_cancelled = False
        self.search_unfinished = False
        waiting = [request for request in self.waiting if not request.cancelled and not request.done]
        there = sum([source.ready for source in sources])
        front = waiting[:there]  # nobody behind them can get anything
        given: list[list[tuple[PartitionHandle, LeaseAnswer]]] = [[] for _ in front]
        if front:
            left = shares([request.want for request in front], there)
            self._rounds_dealt += 1
            self._hand_out(front, given, left, SourcesByRank(sources, now))
        still: list[requests.LeaseRequest] = []
        for index, request in enumerate(waiting):
            if index < len(given) and given[index]:
                self._partitions.answer(request, given[index])
            elif request.deadline <= now and not self.search_unfinished and self._saw_all(request):
                self._give_nothing(request)
            else:
                still.append(request)
        self.waiting = still  # at the end: whoever is interrupted before that leaves nobody out of the line
        self.earliest = min((request.deadline for request in self.waiting), default=None)

    def _saw_all(self, request: requests.LeaseRequest) -> bool:
        """Whether every partition but slow ones was looked at for a request whose time is over: in a busy queue one is always out."""
        out = {number for number, handle in self._partitions.handles_in_io.items() if handle.is_worth_waiting_for}
        request.unchecked_partitions = out if request.unchecked_partitions is None else request.unchecked_partitions & out
        return not request.unchecked_partitions

    def _give_nothing(self, request: requests.LeaseRequest) -> None:
        """There is nothing; or nobody can say, because no partition is in order."""
        broken = next((handle for handle in self._partitions.handles.values() if handle.error is not None), None)
        if broken is not None and all(handle.error is not None for handle in self._partitions.handles.values()):
            request.finish(error=broken.refusal)
        else:
            request.finish([])

    def _look(self, available: Iterable[PartitionHandle], now: int) -> list[LeaseSource]:
        """What there is to lease in those of these partitions that are in order and have something."""
        found = []
        for handle in available:
            source = self._sources.get(handle.number)
            if source is None or source.handle is not handle:
                source = self._sources[handle.number] = LeaseSource(handle)
            if handle.is_usable and source.look(now):
                found.append(source)
        return found

    def _hand_out(
        self,
        waiting: list[requests.LeaseRequest],
        given: list[list[tuple[PartitionHandle, LeaseAnswer]]],
        left: list[int],
        sources: SourcesByRank,
    ) -> None:
        """Rounds of dealing. Where there are keys, each of several takes a part at a time: held keys make items scarcer than they seem.

        One whose request has an id takes all at once, so that a partition remembers few leases for it.
        """
        several = len(waiting) > 1 and any(source.handle.state.keys.by_key or source.handle.state.lanes.keyed for source in sources)
        crowd = len(waiting) if several else 1
        handed = True
        while handed and sources:
            handed = False
            for index, request in enumerate(waiting):
                alone = crowd == 1 or request.request is not None
                portion = left[index] if alone else min(left[index], max(1, request.want // crowd))
                if not sources:
                    return
                if not portion:
                    continue
                parts = self._take(request, portion, sources)
                given[index] += parts
                left[index] = 0 if alone else left[index] - sum(granted.count for _, granted in parts)
                handed = handed or bool(parts)

    def _take(self, request: requests.LeaseRequest, want: int, sources: SourcesByRank) -> list[tuple[PartitionHandle, LeaseAnswer]]:
        """Up to `want` items, the best of all partitions first; those that have nothing (more) to give are left out from now on."""
        parts: list[tuple[PartitionHandle, LeaseAnswer]] = []
        asked: dict[int, int] = {}
        left_out: list[LeaseSource] = []
        many, room = want > MANY, MAX_BATCH_BYTES
        while want > 0 and (source := sources.best()) is not None:
            handle = source.handle
            each = self._mean_bytes(handle) if many else 0
            if parts and room < each:
                break
            until = sources.until()
            granted = self._lease(handle, self._command(request, _holdable(want, room, each), asked.get(handle.number, 0), until))
            if granted is not None and granted.lease:  # a plan may stop early: it is asked until it gives nothing
                parts.append((handle, granted))
                asked[handle.number] = asked.get(handle.number, 0) + 1
                want -= granted.count
                room -= granted.count * each
                source.use(self._rounds_dealt)
            elif granted is None or until is None or not source.changed:  # else it passed over what was good, and is as good as what is left
                sources.leave_out()
                left_out.append(source)
        if request.request is not None:  # that a request with an id is given nothing says nothing about the others who wait
            for source in left_out:
                sources.add(source)
        return parts

    def _mean_bytes(self, handle: PartitionHandle) -> int:
        """About how many bytes an item of this partition takes in a reply."""
        with suppress(PenstockError):  # the commit says what is wrong
            return mean_bytes(handle.usable_partition.log.segments(), handle.state)
        return 0

    def _lease(self, handle: PartitionHandle, command: commands.AcquireLease) -> LeaseAnswer | None:
        partitions = self._partitions
        command.moved_slots = self._resize_step.moved_slots(handle.number)
        while True:
            try:
                answer = partitions.run(handle, command, rounds=ROUNDS)
                if isinstance(answer, StraysFound):
                    self._transfer_step.forward(handle, answer.offsets)
                    continue
            except PenstockError:
                return None  # the commit says what is wrong
            if isinstance(answer, AskAgain):  # looked far enough for one turn
                partitions.wants_turn = self.search_unfinished = True
                return None
            return answer if isinstance(answer, LeaseAnswer) else None

    def _command(self, request: requests.LeaseRequest, want: int, part: int = 0, until: Rank | None = None) -> commands.AcquireLease:
        """What a partition is asked. One that is asked for one request several times remembers each part under a name of its own."""
        name = None
        if request.request is not None:
            name = digest(b"lease", request.request, *([part.to_bytes(4, "big")] if part else []))
        return commands.AcquireLease(want, request.consumer, request.timeout, request.per_key, name, None, until)


def _holdable(want: int, room: int, each: int) -> int:
    """So many items of `each` bytes as make a reply that can be held."""
    return max(1, min(want, room // each)) if each else want
