"""Lease: ready items are given out, oldest first within priority, one at a time per key.

Owns: `decide_lease`, `apply_leased`, `apply_passed`.
A plan walks the lanes without changing them. Candidates are the heads of lanes and the heads of free key lines; the lowest
(priority lifted by age, position) wins. Items of busy keys met on the way are passed over into their key's line, once.
A keyed item may only go when no earlier item of its key can lie unread in another lane; where one might, that lane is read first.
Limits: a decision looks at about SCAN_ITEMS items, then asks to be called again (`Again`) or answers with what it has.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from penstock.rules.commands import Again, Answer, Granted, Lease
from penstock.rules.keys import Line, Waiting
from penstock.rules.lanes import KEYED, SPARSE, Extent
from penstock.rules.leases import EPOCH_SHIFT, Grant
from penstock.rules.records import Answered, Head, Leased, Lost, Passed, Record, Take, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import count, from_offsets, offsets
from penstock.rules.state import Block, Peek, State
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_LEASE_TIMEOUT, MAX_NAME_BYTES, MIN_LEASE_TIMEOUT, within

SCAN_ITEMS = 20_000
NOTHING = Granted(0)


def validate_lease(command: Lease) -> Lease:
    within("want", command.want, 1, MAX_BATCH_ITEMS)
    within("per_key", command.per_key, 1, MAX_BATCH_ITEMS)
    if command.timeout:
        within("lease_timeout", command.timeout, MIN_LEASE_TIMEOUT, MAX_LEASE_TIMEOUT)
    if len(command.consumer.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(f"the consumer's name is too long; give at most {MAX_NAME_BYTES} bytes")
    return command


def decide_lease(state: State, command: Lease, now: Moment, peek: Peek) -> tuple[list[Record], Answer]:
    if command.request is not None and (known := state.requests.get(command.request, now.elapsed)) is not None:
        grant = state.leases.live.get(known.lease)
        return [], NOTHING if grant is None else granted(state, grant.number, grant.deadline, grant.runs())
    if state.paused_lease:
        return [], NOTHING
    plan = _Plan(state, command, now, peek)
    plan.fill()
    if plan.lost is not None:
        return [Lost(plan.lost)], Again()
    if not plan.count:
        return ([Passed(plan.takes)] if plan.takes else []), (Again() if plan.more else NOTHING)
    timeout = command.timeout or state.policy.lease_timeout
    lease, deadline = state.next_lease, now.elapsed + timeout
    records: list[Record] = [Leased(lease, deadline, timeout, command.consumer, plan.takes, plan.heads)]
    if command.request is not None:
        records.append(Answered(command.request, lease=lease))
    return records, granted(state, lease, deadline, plan.runs)


def granted(state: State, lease: int, deadline: int, runs: list[int]) -> Granted:
    """The answer to a lease, with the attempt numbers that are above 1."""
    failures = state.failures
    attempts = {offset: failures[offset].attempts + 1 for offset in failures.keys() & set(offsets(runs))} if failures else {}
    return Granted(lease, deadline, runs, attempts)


class _Plan:
    """What a lease would take."""

    def __init__(self, state: State, command: Lease, now: Moment, peek: Peek) -> None:
        self.state, self.now, self.peek = state, now.elapsed, peek
        self.room = command.want
        self.per_key = command.per_key
        self.takes: list[Take] = []
        self.heads: list[Head] = []
        self.runs: list[int] = []
        self.count = 0
        self.scanned = 0
        self.more = False
        """Stopped before it knew whether there is something to give."""
        self.lost: list[int] | None = None
        self._held: dict[int, int] = {}  # keys taken by this plan → how many more of each may be taken
        self._walks = {lane: _Walk(lane, extents) for lane, extents in enumerate(state.lanes.lanes) if extents}
        self._lanes = sorted(self._walks.keys() | {lane for lane, heads in enumerate(state.keys.ready) if heads})
        self._popped: list[tuple[int, tuple[int, int, int]]] = []

    def fill(self) -> None:
        try:
            while self.room and self.lost is None and self._step():
                if self.scanned >= SCAN_ITEMS:
                    self.more = True
                    return
        finally:
            for lane, entry in self._popped:
                heappush(self.state.keys.ready[lane], entry)

    def _step(self) -> bool:
        """Take from the best candidate; False when there is none or the plan must stop here."""
        lane, line, entry = self._best()
        walk = self._walks.get(lane)
        if line is None and (walk is None or walk.extent is None):
            return False
        keyed_at = entry[0] if line is not None else walk.position if walk and walk.extent and walk.extent.flags & KEYED else None
        if keyed_at is not None and (before := self._unread_before(keyed_at, lane if line is None else None)) is not None:
            if not self.count:
                self._read_ahead(before)
                self.more = True
            return False
        if line is not None:
            self._take_head(lane, line, entry)
        elif walk and walk.extent:
            if walk.extent.flags:
                self._take_block(walk)
            else:
                self._take_plain(walk, walk.extent.stop)
        return True

    def _best(self) -> tuple[int, Line | None, tuple[int, int, int]]:
        best: tuple[int, int, int] | None = None
        found: tuple[int, Line | None, tuple[int, int, int]] = (-1, None, (0, 0, 0))
        for lane in self._lanes:
            walk = self._walks.get(lane)
            if walk is not None and walk.extent is not None:
                rank = (self._lifted(lane, walk.extent.ready_at), walk.position, lane)
                if best is None or rank < best:
                    best, found = rank, (lane, None, (0, 0, 0))
            line, entry = self._top_head(lane)
            if line is not None:
                rank = (self._lifted(lane, line.waiting[0].ready_at), entry[0], lane)
                if best is None or rank < best:
                    best, found = rank, (lane, line, entry)
        return found

    def _lifted(self, lane: int, ready_at: int) -> int:
        aging = self.state.policy.priority_aging
        return max(0, lane - (self.now - ready_at) // aging) if aging else lane

    def _top_head(self, lane: int) -> tuple[Line | None, tuple[int, int, int]]:
        ready = self.state.keys.ready[lane]
        while ready:
            entry = ready[0]
            line = self.state.keys.head(lane, *entry)
            if line is not None and entry[2] not in self._held:
                return line, entry
            heappop(ready)
            if line is not None:
                self._popped.append((lane, entry))
        return None, (0, 0, 0)

    def _take_head(self, lane: int, line: Line, entry: tuple[int, int, int]) -> None:
        key = entry[2]
        self._held[key] = 0
        allowed = min(self.per_key, self.room)
        for run in line.waiting:
            if not allowed:
                break
            stop = min(run.stop, run.start + allowed)
            allowed -= stop - run.start
            self.heads.append(Head(key, run.lane, run.start, stop))
            self._took([run.start, stop])

    def _took(self, runs: list[int]) -> None:
        self.runs += runs
        size = count(runs)
        self.count += size
        self.room -= size

    def _take_plain(self, walk: "_Walk", stop: int) -> None:
        """From an extent (or the part of it before `stop`) in which every item that is not away may be taken."""
        start = walk.start
        stop = min(stop, start + max(self.room, 1))
        runs = self.state.away.missing(start, stop)
        self.takes.append(Take(walk.lane, start, stop, None if runs == [start, stop] else runs))
        self._took(runs)
        self.scanned += 1
        walk.advance(stop)

    def _find(self, offset: int) -> Block:
        block = self.peek.find(offset)
        if block.lost:
            self.lost = [block.base, block.stop]
        return block

    def _take_block(self, walk: "_Walk") -> None:
        """From the part of an extent that one block covers, looking at priorities and keys."""
        block = self._find(walk.start)
        if self.lost is not None or walk.extent is None:
            return
        stop = min(walk.extent.stop, block.stop)
        mixed = block.priorities is not None and walk.extent.flags & SPARSE
        if block.key_ids is None and not mixed:
            self._take_plain(walk, stop)
        elif block.key_ids is None or mixed or not self._take_all(walk, block, stop):
            self._take_some(walk, block, stop)

    def _take_all(self, walk: "_Walk", block: Block, stop: int) -> bool:
        """The common case: every item has a key, no key is busy, none comes twice. Nothing is looked at one by one."""
        assert block.key_ids is not None
        start = walk.start
        stop = min(stop, start + self.room)
        keys = block.key_ids[start - block.base : stop - block.base]
        unique = set(keys)
        if len(unique) < len(keys) or NO_KEY in unique:
            return False
        if not unique.isdisjoint(self.state.keys.map) or not unique.isdisjoint(self._held):
            return False
        if self.state.away.within(start, stop):
            return False
        self._held.update(dict.fromkeys(keys, self.per_key - 1))
        self.takes.append(Take(walk.lane, start, stop, None, pack_keys(keys)))
        self._took([start, stop])
        self.scanned += stop - start
        walk.advance(stop)
        return True

    def _take_some(self, walk: "_Walk", block: Block, stop: int) -> None:
        start, busy, held, first_time = walk.start, self.state.keys.map, self._held, self.per_key - 1
        taken: list[int] = []
        taken_keys: list[int] = []
        passed: list[int] = []
        passed_keys: list[int] = []
        room = self.room
        for offset, key in self._candidates(walk, block, stop):
            if not room:
                stop = offset
                break
            if key == NO_KEY:
                free = True
            elif key in busy:
                free = False
            else:
                left = held.get(key)
                free = left is None or left > 0
                held[key] = first_time if left is None else max(0, left - 1)
            if free:
                room -= 1
                taken.append(offset)
                taken_keys.append(key)
            else:
                if key in held:
                    held[key] = 0  # the rest of its line comes later
                passed.append(offset)
                passed_keys.append(key)
        keys = pack_keys(taken_keys) if any(taken_keys) else b""
        runs = from_offsets(taken)
        self.takes.append(Take(walk.lane, start, stop, runs, keys, from_offsets(passed), pack_keys(passed_keys)))
        self._took(runs)
        self.scanned += stop - start
        walk.advance(stop)

    def _candidates(self, walk: "_Walk", block: Block, stop: int) -> list[tuple[int, int]]:
        """(offset, key) of the items of this lane that are ready here."""
        wanted = offsets(self.state.away.missing(walk.start, stop))
        base = block.base
        if block.priorities is not None and walk.extent is not None and walk.extent.flags & SPARSE:
            priorities, lane = block.priorities, walk.lane
            wanted = [offset for offset in wanted if priorities[offset - base] == lane]
        if block.key_ids is None:
            return [(offset, NO_KEY) for offset in wanted]
        keys = block.key_ids
        return [(offset, keys[offset - base]) for offset in wanted]

    def _unread_before(self, position: int, own_lane: int | None) -> "_Walk | None":
        """A lane (other than the candidate's own) that still holds unread items with keys from before `position`."""
        for lane in self._walks:
            if lane != own_lane:
                extent = self.state.lanes.first_keyed(lane)
                if extent is not None and extent.position < position:
                    return _Walk(lane, [extent])
        return None

    def _read_ahead(self, walk: "_Walk") -> None:
        """Pass the keyed items of a block into their lines and leave the others; nothing is taken."""
        block = self._find(walk.start)
        if self.lost is not None or walk.extent is None:
            return
        stop = min(walk.extent.stop, block.stop)
        found = self._candidates(walk, block, stop)
        keyed = [(offset, key) for offset, key in found if key != NO_KEY]
        left = from_offsets(offset for offset, key in found if key == NO_KEY)
        passed, keys = from_offsets(offset for offset, _ in keyed), pack_keys(key for _, key in keyed)
        self.takes.append(Take(walk.lane, walk.start, stop, [], b"", passed, keys, left))


class _Walk:
    """Where a plan stands in a lane."""

    __slots__ = ("_rest", "extent", "lane", "start")

    def __init__(self, lane: int, extents: Iterable[Extent]) -> None:
        self.lane = lane
        self._rest = iter(extents)
        self.extent: Extent | None = None
        self.start = 0
        self.advance(0)

    @property
    def position(self) -> int:
        assert self.extent is not None
        return self.start if self.extent.fresh else self.extent.position

    def advance(self, stop: int) -> None:
        """On to `stop`, and to the next extent when this one ends there."""
        self.start = stop
        if self.extent is None or stop >= self.extent.stop:
            self.extent = next(self._rest, None)
            self.start = self.extent.start if self.extent is not None else 0


def apply_leased(state: State, record: Leased, now: Moment) -> None:
    grant = Grant(record)
    for take in record.takes:
        _apply_take(state, take, record.lease, now)
    for head in record.heads:
        state.keys.take(head.key, head.start, head.stop)
        state.keys.hold((head.key,), record.lease)
        state.passed.remove(head.start, head.stop)
    state.leases.add(grant)
    state.leases_given = max(state.leases_given, record.lease - (state.epoch << EPOCH_SHIFT))


def apply_passed(state: State, record: Passed, now: Moment) -> None:
    for take in record.takes:
        _apply_take(state, take, 0, now)


def _apply_take(state: State, take: Take, lease: int, now: Moment) -> None:
    extent = state.lanes.trim(take.lane, take.start, take.stop, take.left)
    if take.taken is None:
        state.away.add(take.start, take.stop)
    else:
        state.away.add_all(take.taken)
    if take.keys:
        state.keys.hold(filter(None, unpack_keys(take.keys)), lease)
    if not take.passed:
        return
    ready_at = now.elapsed if extent is None else extent.ready_at
    state.away.add_all(take.passed)
    state.passed.add_all(take.passed)
    for offset, key in zip(offsets(take.passed), unpack_keys(take.passed_keys), strict=True):
        position = offset if extent is None or extent.fresh else extent.position
        state.keys.pass_over(key, Waiting(offset, offset + 1, take.lane, position, ready_at))
