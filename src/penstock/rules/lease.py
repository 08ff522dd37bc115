"""Leasing: which ready items a lease takes, oldest first within a priority, one at a time per key.

Owns: `decide_lease`, `apply_leased`, `apply_passed_over`, and `LeasePlan`, which finds the items of a lease by reading
lanes and key lines without changing them. Its candidates are the first extents of lanes and the heads of free key
lines; the one with the lowest (aged priority, position) is taken, unless it is worse than the command's `worst_rank`.
Items of busy keys that are found on the way are passed over: moved into their key's line, once. A keyed item may only
be taken if no earlier item of its key can be unread in another lane; if one might, that lane is read first.
Limits: a plan scans about SCAN_ITEMS items. Then it stops with what it has, or answers AskAgain.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby, islice, repeat
from operator import attrgetter

from penstock.rules.calls import RememberedAnswer, check_calls
from penstock.rules.commands import AcquireLease, Answer, AskAgain, LeaseAnswer, StraysFound
from penstock.rules.fences import ENDLESS
from penstock.rules.keys import KeyLine
from penstock.rules.lanes import KEYED, SPARSE, Extent, Rank, aged_priority
from penstock.rules.leases import EPOCH_SHIFT, LiveLease
from penstock.rules.records import CallAnswered, LaneTake, Leased, LineTake, Lost, PassedOver, Record, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import complement, count, from_offsets, offsets, pairs
from penstock.rules.state import Block, BlockSource, State
from penstock.rules.walks import Candidate, Head, HeadWalk, Order, Walk, before
from penstock.words.batch import check_name
from penstock.words.clock import Moment
from penstock.words.limits import DEFAULT_PRIORITY, MAX_BATCH_ITEMS, check_lease_timeout, check_range

NOTHING = LeaseAnswer(0)
SCAN_ITEMS = 20_000
"""A plan stops after scanning about so many items."""
STRAY_ITEMS = 1_000
"""Most strays of one key line that a plan reports at a time."""
FIRST_HEADS, MORE_HEADS = 16, 4
"""A plan reads so many heads of free lines at first, and so many times more whenever all of them were taken."""
PASS_COST = 100
"""The cost of cutting a lane's extent, as a number of scanned items."""


def validate_lease(command: AcquireLease) -> AcquireLease:
    check_range("want", command.want, 1, MAX_BATCH_ITEMS)
    check_range("per_key", command.per_key, 1, MAX_BATCH_ITEMS)
    if command.timeout:
        check_lease_timeout(command.timeout)
    check_name("consumer", command.consumer)
    check_calls(command.calls)
    return command


def decide_lease(state: State, command: AcquireLease, now: Moment, blocks: BlockSource) -> tuple[list[Record], Answer]:
    if not command.checked:
        validate_lease(command)
    if command.calls:
        known = state.calls.answers(command.calls, now.elapsed) or ()
        if len(known) > command.part:
            lease = state.leases.live.get(known[command.part].lease)
            return [], NOTHING if lease is None else lease_answer(state, lease.number, lease.deadline, lease.runs())
        state.calls.check_room(command.calls, now.elapsed)
    if state.paused_lease:
        return [], NOTHING
    timeout = command.timeout or state.policy.lease_timeout
    number, deadline = state.next_lease, now.elapsed + timeout
    take = _simple_take(state, command, now.elapsed)
    if take is not None:
        leased = Leased(number, deadline, timeout, command.consumer, [take])
        return _with_answer(command, leased), lease_answer(state, number, deadline, [take.start, take.stop])
    plan = LeasePlan(state, command, now, blocks)
    plan.fill()
    if plan.lost is not None:
        return [Lost(plan.lost)], AskAgain()
    if plan.strays:
        return [], StraysFound(plan.strays)
    if not plan.count:
        return ([PassedOver(plan.takes)] if plan.takes else []), (AskAgain() if plan.more else NOTHING)
    leased = Leased(number, deadline, timeout, command.consumer, plan.takes, plan.line_takes)
    return _with_answer(command, leased), lease_answer(state, number, deadline, plan.runs)


def _with_answer(command: AcquireLease, leased: Leased) -> list[Record]:
    """The record of a lease and, if the call has a name, that of the answer."""
    if not command.calls:
        return [leased]
    return [leased, CallAnswered([*command.calls], [RememberedAnswer(lease=leased.lease, part=command.part)])]


def _simple_take(state: State, command: AcquireLease, now: int) -> LaneTake | None:
    """The take of the common case, without a plan: one lane, no keys, enough in the first extent. Otherwise None."""
    lanes = state.lanes.lanes
    filled = [*filter(None, lanes)]
    if len(filled) != 1 or any(state.keys.free_heads):
        return None
    extent = filled[0][0]
    stop = extent.start + command.want
    if extent.tag or stop > extent.stop or state.outside_lanes.overlaps(extent.start, stop):
        return None
    lane = DEFAULT_PRIORITY if lanes[DEFAULT_PRIORITY] else next(lane for lane, extents in enumerate(lanes) if extents)
    if command.worst_rank is not None:
        priority = aged_priority(lane, extent.ready_at, state.policy.priority_aging, now)
        if Rank(priority, extent.ready_at) > command.worst_rank:
            return None
    return LaneTake(lane, extent.start, stop)


def lease_answer(state: State, number: int, deadline: int, runs: list[int]) -> LeaseAnswer:
    """The answer of a lease command, with the attempt numbers that are above 1."""
    failures = state.failures
    attempts = {offset: failures[offset].attempts + 1 for offset in failures.keys() & set(offsets(runs))} if failures else {}
    return LeaseAnswer(number, deadline, runs, attempts, state.policy.max_attempts)


def apply_leased(state: State, record: Leased, now: Moment) -> None:
    lease = LiveLease(record)
    for take in record.takes:
        _apply_take(state, take, record.lease, now)
    if record.line_takes:
        state.keys.take(record.line_takes, record.lease)
        state.passed_over.remove_later(record.line_runs)
    state.leases.add(lease)
    epoch, given = record.lease >> EPOCH_SHIFT, record.lease & ((1 << EPOCH_SHIFT) - 1)
    if epoch > state.epoch:  # damage took the record of that opening; its lease numbers must not be given again
        state.epoch, state.leases_given = epoch, state.first_lease
    state.leases_given = max(state.leases_given, given)


def apply_passed_over(state: State, record: PassedOver, now: Moment) -> None:
    for take in record.takes:
        _apply_take(state, take, 0, now)


def _apply_take(state: State, take: LaneTake, lease: int, now: Moment) -> None:
    extent = state.lanes.trim(take.lane, take.start, take.stop, take.left)
    if take.taken is None or count(take.taken) + count(take.passed) == take.stop - take.start:
        state.outside_lanes.add(take.start, take.stop)
    else:
        state.outside_lanes.add_all(take.taken)
        state.outside_lanes.add_all(take.passed)
    if take.keys:
        state.keys.hold([key for key in unpack_keys(take.keys) if key], lease)
    if not take.passed:
        return
    ready_at = now.elapsed if extent is None else extent.ready_at
    state.passed_over.add_all(take.passed)
    keys, at = unpack_keys(take.passed_keys), 0
    for start, stop in pairs(take.passed):
        following = keys[at : at + stop - start]
        at += stop - start
        if extent is None or extent.at_own_offset:
            state.keys.pass_over_each(following, start, take.lane, ready_at)
            continue
        for key, same in groupby(following):
            first, start = start, start + sum(1 for _ in same)
            state.keys.pass_over(key, Extent(first, start, take.lane, extent.position, ready_at))


# -- the plan ---------------------------------------------------------------------------------------


class LeasePlan:
    """What a lease command would take."""

    def __init__(self, state: State, command: AcquireLease, now: Moment, blocks: BlockSource) -> None:
        self.state, self.now, self.blocks = state, now.elapsed, blocks
        self.room = command.want
        self.per_key = command.per_key
        self.takes: list[LaneTake] = []
        self.line_takes: list[LineTake] = []
        self.runs: list[int] = []
        self.count = 0
        self.scanned = 0
        self.more = False
        """Whether the plan stopped before it knew that nothing can be leased."""
        self.lost: list[int] | None = None
        self.strays: list[int] = []
        """Items whose slots moved to another partition: they must be sent there before anything is taken."""
        self._moved_slots = command.moved_slots
        self._worst_rank = command.worst_rank
        self._fenced = bool(state.keys.fences)
        self._jumped = False  # an item passed over becomes the head of a free line: apply that before anything after it is taken
        self._closed_keys: set[int] = set()  # keys of which this plan takes no more items
        self._first_unread: dict[int | None, Order] = {}  # what `_unread` found: the lanes do not change during a plan
        self._left: dict[int, int] = {}  # key → how many more of its items this plan may take
        self._walks = {lane: Walk(lane, extents) for lane, extents in enumerate(state.lanes.lanes) if extents}
        heads = enumerate(state.keys.free_heads)
        self._free_keys = {lane: HeadWalk(state.keys.free_lines(lane, command.want)) for lane, entries in heads if entries}
        self._lanes = sorted(self._walks.keys() | self._free_keys.keys())

    def fill(self) -> None:
        while self.room and self.lost is None and not self.strays and self._step():
            if self._jumped or self.scanned >= SCAN_ITEMS:
                self.more = True
                return

    def _step(self) -> bool:
        """Take from the best candidate; False if there is none or the plan must stop."""
        best, second, oldest = self._best()
        if best is None or self._beyond_worst_rank(Rank(best.rank[0], oldest)):
            return False
        lane, walk = best.lane, self._walks.get(best.lane)
        if not best.is_head:
            assert walk is not None and walk.extent is not None
            if not walk.extent.tag:
                self._take_plain(walk, walk.extent.stop)
            elif not walk.extent.tag & KEYED or self._may_go(walk.earlier_than, lane):
                self._take_block(walk)
            else:
                return False
            return True
        return self._may_go(before(best.rank[1]), None) and self._take_heads(lane, second)

    def _take_heads(self, lane: int, second: tuple[int, int, bool, int, int] | None) -> bool:
        """Take key after key from the heads of a lane, as long as no other candidate is better.

        The first is the best candidate. False if the plan must stop.
        """
        walk, size, is_best = self._free_keys[lane], FIRST_HEADS, True
        go_on = True
        while self.room and go_on:
            heads = walk.ahead(min(size, self.room))
            good, go_on = self._count_better(lane, heads, second, int(is_best))
            taken, size, is_best = heads[:good], size * MORE_HEADS, False
            if self._moved_slots is not None and self._find_stray_line(taken):
                return False
            if self.per_key == 1:
                self._take_singles(lane, taken)
                walk.advance(good)
            else:
                for (_, _, key), line in taken:
                    if not self.room:
                        break
                    self._take_unit(key, line)
                    walk.advance(1)
            if good < len(heads) or walk.first is None:
                break
        return go_on

    def _count_better(self, lane: int, heads: list[Head], second: tuple[int, int, bool, int, int] | None, first: int) -> tuple[int, bool]:
        """How many of these heads, from index `first` on, come before every other candidate, and whether the plan may
        go on after them. Nearly always all do: then they are not compared one by one."""
        unread, worst = self._unread(None)[0], self._worst_rank
        last = heads[-1][0][0]
        if second is None and worst is None and last <= unread:
            return len(heads), True
        sinces = [line.waiting.numbers[line.waiting.at + 4] for _, line in heads]
        youngest = max(sinces)
        priority = self._aged_priority(lane, youngest)
        if (
            last <= unread
            and (second is None or (priority, last) < second[:2])
            and (worst is None or (priority, youngest) <= worst)
            and priority == self._aged_priority(lane, min(sinces))
        ):
            return len(heads), True
        for index in range(first, len(heads)):
            (position, start, _), since = heads[index][0], sinces[index]
            priority = self._aged_priority(lane, since)
            if second is not None and (priority, position, position == start, since, lane) >= second:
                return index, True
            if worst is not None and (priority, since) > worst:
                return index, True  # an older candidate of its priority may still be good enough: the next step finds out
            if position > unread and not self._may_go(before(position), None):
                return index, False
        return len(heads), True

    def _find_stray_line(self, heads: list[Head]) -> bool:
        """Collect the items of the first of these lines whose slot moved away; whether there is one."""
        for (_, _, key), line in heads:
            if self._moved_slots is not None and self._moved_slots.is_stray_key(key):
                waiting = (offset for run in line.waiting for offset in range(run.start, run.stop))
                self.strays = list(islice(waiting, STRAY_ITEMS))
                return True
        return False

    def _take_singles(self, lane: int, heads: list[Head]) -> None:
        """Take the first item of each of these lines."""
        starts = [entry[1] for entry, _ in heads]
        keys = [entry[2] for entry, _ in heads]
        self._closed_keys.update(keys)
        self.line_takes += map(LineTake, keys, repeat(lane), starts, [start + 1 for start in starts])
        self._took(from_offsets(starts))

    def _may_go(self, bound: Order, own_lane: int | None) -> bool:
        """Whether all keyed items before `bound` in other lanes have been read; if not, read some of them now."""
        if bound <= self._unread(own_lane):
            return True
        if not self.count:
            if not self.takes:  # otherwise apply first what this plan passed over
                self._read_ahead(bound, own_lane)
            self.more = True
        return False

    def _beyond_worst_rank(self, rank: Rank) -> bool:
        """Whether another partition has a better item."""
        return self._worst_rank is not None and rank > self._worst_rank

    def _best(self) -> tuple[Candidate | None, tuple[int, int, bool, int, int] | None, int]:
        """The best candidate, the rank of the second best, and the earliest `since` at the best aged priority.

        A returned keyed item stands before older items but has waited less: these must not seem younger because of it.
        """
        best: Candidate | None = None
        second: tuple[int, int, bool, int, int] | None = None
        oldest = 0
        for lane in self._lanes:
            walk = self._walks.get(lane)
            extent = None
            if walk is not None and walk.extent is not None:
                since = walk.extent.ready_at
                extent = Candidate((self._aged_priority(lane, since), walk.position, walk.extent.at_own_offset, since, lane), lane, since)
            for found in (extent, self._top_head(lane)):
                if found is None:
                    continue
                if best is None or found.rank[0] < best.rank[0]:
                    oldest = found.since
                elif found.rank[0] == best.rank[0]:
                    oldest = min(oldest, found.since)
                if best is None or found.rank < best.rank:
                    best, second = found, best.rank if best is not None else None
                elif second is None or found.rank < second:
                    second = found.rank
        return best, second, oldest

    def _aged_priority(self, lane: int, since: int) -> int:
        return aged_priority(lane, since, self.state.policy.priority_aging, self.now)

    def _top_head(self, lane: int) -> Candidate | None:
        """The first free key of a lane of which this plan has taken nothing."""
        walk = self._free_keys.get(lane)
        if walk is None or walk.first is None:
            return None
        (position, start, _), line = walk.first
        since = line.waiting.numbers[line.waiting.at + 4]
        return Candidate((self._aged_priority(lane, since), position, position == start, since, lane), lane, since, is_head=True)

    def _take_unit(self, key: int, line: KeyLine) -> None:
        """Take from the front of a key line: as many items as the plan may take of a key."""
        self._closed_keys.add(key)
        waiting, allowed = line.waiting, min(self.per_key, self.room)
        unread = self._unread(None)[0]
        limit = self.state.keys.fences.waits_from(key) if self._fenced else ENDLESS
        runs = waiting.first_items(allowed)
        if runs and runs[-1] <= min(unread, limit):  # all may be taken: they are not compared one by one
            lanes = waiting.numbers[waiting.at + 2 : waiting.at + 5 * (len(runs) // 2) : 5]
            self.line_takes += map(LineTake, repeat(key), lanes, runs[::2], runs[1::2])
            self._took(runs)
            return
        for index, (start, stop, tag, position, _) in enumerate(waiting.each()):
            if not allowed or position >= limit:
                break
            stop = min(stop, start + allowed)
            if position == start:
                stop = min(stop, limit, max(unread, start + (not index)))  # _step has checked that the head itself may be taken
            if stop <= start or position > unread:
                break
            allowed -= stop - start
            self.line_takes.append(LineTake(key, tag, start, stop))
            self._took([start, stop])

    def _took(self, runs: list[int]) -> None:
        size = count(runs)
        if runs and self.runs and self.runs[-1] == runs[0]:
            self.runs[-1] = runs[1]
            runs = runs[2:]
        self.runs += runs
        self.count += size
        self.room -= size

    def _take_plain(self, walk: Walk, stop: int) -> None:
        """Take from an extent, up to `stop`, in which every ready item may be taken."""
        start = walk.start
        stop = min(stop, self.state.outside_lanes.first_missing(start) + max(self.room, 1))  # skips items that are no longer ready
        runs = self.state.outside_lanes.missing(start, stop)
        self.takes.append(LaneTake(walk.lane, start, stop, None if runs == [start, stop] else runs))
        self._took(runs)
        self.scanned += 1
        walk.advance(stop)

    def _read_block(self, walk: Walk) -> Block | None:
        """The block at a walk's position; None if it is lost, or if items that are no longer ready were skipped."""
        if self._skip_not_ready(walk):
            return None
        block = self.blocks.find(walk.start)
        if block.lost:
            self.lost = self.state.unrecorded_losses(block.base, block.stop)
            return None
        return block

    def _take_block(self, walk: Walk) -> None:
        """Take from the part of an extent that one block covers, checking priorities and keys."""
        block = self._read_block(walk)
        if block is None or walk.extent is None:
            return
        stop = min(walk.extent.stop, block.stop)
        if walk.extent.at_own_offset and walk.extent.tag & KEYED:
            stop = min(stop, self._unread(walk.lane)[0])  # from there on, an earlier item of a key may be unread in another lane
        mixed = walk.extent.tag & SPARSE
        if block.key_ids is None and not mixed:
            self._take_plain(walk, stop)
        elif block.key_ids is None or mixed or self._fenced or self.state.outside_lanes.within(walk.start, stop):
            self._take_item_by_item(walk, block, stop)
        else:
            keys = block.key_ids[walk.start - block.base : stop - block.base]
            if self._moved_slots is not None and self._moved_slots.moved_any(keys):
                self._take_item_by_item(walk, block, stop)
            else:
                self._take_mostly_free(walk, keys)

    def _skip_not_ready(self, walk: Walk) -> bool:
        """Skip items that are no longer ready, whose block may not exist; whether there were any."""
        assert walk.extent is not None
        start, stop = walk.start, min(self.state.outside_lanes.first_missing(walk.start), walk.extent.stop)
        if start == stop:
            return False
        self.takes.append(LaneTake(walk.lane, start, stop, []))
        self.scanned += 1
        walk.advance(stop)
        return True

    def _take_mostly_free(self, walk: Walk, keys: list[int]) -> None:
        """The common case: nearly every key is free and occurs once. Only other keys are checked one by one."""
        keys = keys[: self._scan_length(keys)]
        unique, by_key, closed = set(keys), self.state.keys.by_key, self._closed_keys
        busy = by_key.keys() & unique
        free_lines = {key for key in busy - closed if type(line := by_key[key]) is KeyLine and not line.busy}
        jumps = (at for at, key in enumerate(keys) if key in free_lines and self._precedes_free_line(walk, walk.start + at, key))
        if free_lines and (jump := next(jumps, None)) is not None:
            keys = keys[: jump + 1]
            unique = set(keys)
            busy &= unique  # counted below: with keys that were cut off, items without a key would seem busy too
        busy |= closed & unique
        free = unique - busy
        free.discard(NO_KEY)
        several = self._left.keys() & free
        if free and len(unique) < len(keys):
            several |= {key for key, times in Counter([key for key in keys if key in free]).items() if times > 1}
        passed: Sequence[int] = ()
        if len(busy) == len(unique):
            passed = range(len(keys))
        elif busy or several:
            passed = [index for index, key in enumerate(keys) if key in busy or (key in several and not self._claim_key(key))]
        if self.per_key == 1:
            closed |= free
        else:
            self._left.update(dict.fromkeys(free - several, self.per_key - 1))
        start, stop = walk.start, walk.start + len(keys)
        packed = pack_keys(keys) if unique != {NO_KEY} else b""
        if passed:
            self._add_take_without(walk.lane, start, stop, packed, passed)
        else:
            self.takes.append(LaneTake(walk.lane, start, stop, None, packed))
            self._took([start, stop])
        self.scanned += stop - start
        walk.advance(stop)

    def _scan_length(self, keys: list[int]) -> int:
        """How many items to scan: up to the last that there is room for. Busy keys in a row are passed in one step."""
        if len(keys) <= self.room:
            return len(keys)
        busy = self.state.keys.by_key
        if busy.keys() >= set(keys):
            return len(keys)
        free = [index for index, key in enumerate(keys) if key not in busy]
        return free[self.room - 1] + 1 if len(free) >= self.room else len(keys)

    def _add_take_without(self, lane: int, start: int, stop: int, packed: bytes, passed: Sequence[int]) -> None:
        """Take [start, stop), which has these packed key ids, but pass over the items at the indexes `passed`."""
        runs: list[int] = []
        if len(passed) == stop - start:
            self._add_passed(lane, start, stop, packed)
            return
        if 2 * len(passed) < stop - start:
            passed_runs = from_offsets([start + index for index in passed])
            runs = complement(passed_runs, start, stop)
        else:
            runs = from_offsets([start + index for index in sorted(set(range(stop - start)).difference(passed))])
            passed_runs = complement(runs, start, stop)
        kept, passed_keys = [
            b"".join([packed[8 * (low - start) : 8 * (high - start)] for low, high in pairs(part)]) for part in (runs, passed_runs)
        ]
        self.takes.append(LaneTake(lane, start, stop, runs, kept, passed_runs, passed_keys))
        self._took(runs)

    def _add_passed(self, lane: int, start: int, stop: int, packed: bytes) -> None:
        """Pass over all of [start, stop). Takes of one extent that only do this are joined: then the items of a key are
        put into its line together."""
        last, walk = self.takes[-1] if self.takes else None, self._walks[lane]
        if (
            last is not None
            and last.stop == start
            and last.lane == lane
            and last.passed == [last.start, start]
            and walk.begins_by(last.start)
        ):
            self.takes[-1] = LaneTake(lane, last.start, stop, [], b"", [last.start, stop], last.passed_keys + packed)
        else:
            self.takes.append(LaneTake(lane, start, stop, [], b"", [start, stop], packed))

    def _claim_key(self, key: int, position: int = 0) -> bool:
        """Whether this plan may take the next item of a key. It counts the item as taken, or closes the key."""
        if key in self._closed_keys or key in self.state.keys.by_key:
            return False
        if self._fenced and position >= self.state.keys.fences.waits_from(key):
            self._closed_keys.add(key)
            return False
        left = self._left.get(key, self.per_key) - 1
        if left:
            self._left[key] = left
        else:
            self._closed_keys.add(key)
        return True

    def _precedes_free_line(self, walk: Walk, offset: int, key: int) -> bool:
        """Whether an item stands before the head of its key's free line, because those items were read ahead of it."""
        line = self.state.keys.by_key.get(key)
        if not isinstance(line, KeyLine) or line.busy or not line.waiting or key in self._closed_keys or walk.extent is None:
            return False
        position = walk.position_of(offset)
        self._jumped = Extent(offset, offset + 1, walk.lane, position, walk.extent.ready_at).order < line.waiting.first.order
        return self._jumped

    def _take_item_by_item(self, walk: Walk, block: Block, stop: int) -> None:
        """Take from [walk.start, stop), deciding for each item by its priority and key."""
        start = walk.start
        taken: list[tuple[int, int]] = []
        passed: list[tuple[int, int]] = []
        candidates = self._candidates(walk, block, stop)
        if self._find_strays(walk, candidates):
            return
        for offset, key in candidates:
            if len(taken) == self.room:
                stop = offset
                break
            (taken if key == NO_KEY or self._claim_key(key, walk.position_of(offset)) else passed).append((offset, key))
            if key != NO_KEY and self._precedes_free_line(walk, offset, key):
                stop = offset + 1
                break
        runs, taken_keys = _runs_and_keys(taken)
        passed_runs, passed_keys = _runs_and_keys(passed)
        packed = pack_keys(taken_keys) if any(taken_keys) else b""
        self.takes.append(LaneTake(walk.lane, start, stop, runs, packed, passed_runs, pack_keys(passed_keys)))
        self._took(runs)
        self.scanned += stop - start
        walk.advance(stop)

    def _candidates(self, walk: Walk, block: Block, stop: int) -> list[tuple[int, int]]:
        """(offset, key) of the ready items of the walk's lane in [walk.start, stop)."""
        wanted = offsets(self.state.outside_lanes.missing(walk.start, stop))
        base = block.base
        if walk.extent is not None and walk.extent.tag & SPARSE:
            wanted = [offset for offset in wanted if block.priority_of(offset) == walk.lane]
        if block.key_ids is None:
            return [(offset, NO_KEY) for offset in wanted]
        keys = block.key_ids
        return [(offset, keys[offset - base]) for offset in wanted]

    def _find_strays(self, walk: Walk, candidates: list[tuple[int, int]]) -> bool:
        """Collect the strays among these items; whether there are any."""
        if self._moved_slots is not None:
            for offset, key in candidates:
                if key != NO_KEY and walk.position_of(offset) >= self._moved_slots.strays_from(key):
                    self.strays.append(offset)
        return bool(self.strays)

    def _unread(self, own_lane: int | None) -> Order:
        """The place of the first keyed items that a lane other than `own_lane` may have unread."""
        found = self._first_unread.get(own_lane)
        if found is None:
            firsts = [self.state.lanes.first_keyed(lane) for lane in self._walks if lane != own_lane]
            found = self._first_unread[own_lane] = min((extent.order for extent in firsts if extent is not None), default=before(ENDLESS))
        return found

    def _read_ahead(self, bound: Order, own_lane: int | None) -> None:
        """Pass over the keyed items of other lanes that stand before `bound`, into their lines. Nothing is taken."""
        lanes = self.state.lanes.lanes
        walks = [Walk(lane, (extent for extent in lanes[lane] if extent.tag & KEYED)) for lane in self._walks if lane != own_lane]
        while self.scanned < SCAN_ITEMS and self.lost is None and not self.strays:
            unread = [walk for walk in walks if walk.extent is not None and walk.order < bound]
            if not unread:
                return
            self._pass_block(min(unread, key=attrgetter("order")))

    def _pass_block(self, walk: Walk) -> None:
        """Pass over the keyed items of the part of an extent that one block covers; items without a key are left."""
        block = self._read_block(walk)
        if block is None or walk.extent is None:
            return
        stop = min(walk.extent.stop, block.stop)
        found = self._candidates(walk, block, stop)
        if self._find_strays(walk, found):
            return
        passed, keys = _runs_and_keys([(offset, key) for offset, key in found if key != NO_KEY])
        left = from_offsets(offset for offset, key in found if key == NO_KEY)
        self.takes.append(LaneTake(walk.lane, walk.start, stop, [], b"", passed, pack_keys(keys), left))
        self.scanned += max(stop - walk.start, PASS_COST)
        walk.advance(stop)


def _runs_and_keys(items: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """(offset, key) pairs as runs of offsets and a list of keys."""
    return from_offsets(offset for offset, _ in items), [key for _, key in items]
