"""The plan of a lease: what it would take, found by walking lanes and lines without changing them.

Owns: `LeasePlan`. Candidates are the heads of lanes and the heads of free key lines; the lowest (priority lifted by age, position)
wins, as long as it is not worse than the command's `until`. Items of busy keys met on the way are passed over into their key's line,
once. A keyed item may only go when no earlier item of its key can lie unread in another lane; where one might, that lane is read first.
Limits: a plan looks at about SCAN_ITEMS items and then stops with what it has, or with `more`.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from penstock.rules.commands import AcquireLease
from penstock.rules.fences import ENDLESS
from penstock.rules.keys import KeyLine
from penstock.rules.lanes import KEYED, SPARSE, Extent, Rank, aged_priority
from penstock.rules.records import LaneTake, LineTake, pack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import count, from_offsets, offsets
from penstock.rules.state import Block, BlockSource, State
from penstock.words.clock import Moment


class Candidate(NamedTuple):
    """Something that could be given next: an extent of a lane, or the head of a key's line."""

    rank: tuple[int, int, bool, int, int]
    """What goes first has the lowest: priority lifted by age, position, whether it stands there because it is the item of that offset,
    since when it is ready (what came back stands at one position with others), lane."""
    lane: int
    since: int
    head: tuple[int, int, int] | None = None
    line: KeyLine | None = None


class Walk:
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
        return self.start if self.extent.at_own_offset else self.extent.position

    def position_of(self, offset: int) -> int:
        """The position at which an item of the extent stands."""
        assert self.extent is not None
        return offset if self.extent.at_own_offset else self.extent.position

    def advance(self, stop: int) -> None:
        """On to `stop`, and to the next extent when this one ends there."""
        self.start = stop
        if self.extent is None or stop >= self.extent.stop:
            self.extent = next(self._rest, None)
            self.start = self.extent.start if self.extent is not None else 0


SCAN_ITEMS = 20_000
STRAY_ITEMS = 1_000
"""Items of a line that are sent on at a time."""
PASS_COST = 100
"""So many items are passed in the time that it takes to cut a lane once more."""


class LeasePlan:
    """What a lease would take."""

    def __init__(self, state: State, command: AcquireLease, now: Moment, peek: BlockSource) -> None:
        self.state, self.now, self.peek = state, now.elapsed, peek
        self.room = command.want
        self.per_key = command.per_key
        self.takes: list[LaneTake] = []
        self.heads: list[LineTake] = []
        self.runs: list[int] = []
        self.count = 0
        self.scanned = 0
        self.more = False
        """Stopped before it knew whether there is something to give."""
        self.lost: list[int] | None = None
        self.strays: list[int] = []
        """Items of slots that live elsewhere: nothing is taken before they are gone."""
        self._departed = command.moved_slots
        self._until = command.worst_rank
        self._fenced = bool(state.keys.fences)
        self._jumped = False  # passed over what will be the head of a free key: nothing behind it may go before that is applied
        self._touched: set[int] = set()  # keys of which this plan takes no more
        self._left: dict[int, int] = {}  # keys of which it may take some more
        self._walks = {lane: Walk(lane, extents) for lane, extents in enumerate(state.lanes.lanes) if extents}
        self._free_keys = {lane: state.keys.free_lines(lane) for lane, heads in enumerate(state.keys.free_heads) if heads}
        self._top_heads = {lane: next(heads, None) for lane, heads in self._free_keys.items()}
        self._lanes = sorted(self._walks.keys() | self._free_keys.keys())

    def fill(self) -> None:
        while self.room and self.lost is None and not self.strays and self._step():
            if self._jumped or self.scanned >= SCAN_ITEMS:
                self.more = True
                return

    def _step(self) -> bool:
        """Take from the best candidate; False when there is none or the plan must stop here."""
        best, second, oldest = self._best()
        if best is None or self._too_late(Rank(best.rank[0], oldest)):
            return False
        lane, walk = best.lane, self._walks.get(best.lane)
        if best.head is None:
            assert walk is not None and walk.extent is not None
            if not walk.extent.tag:
                self._take_plain(walk, walk.extent.stop)
            elif not walk.extent.tag & KEYED or self._may_go(walk.position + walk.extent.at_own_offset, lane):
                self._take_block(walk)
            else:
                return False
            return True
        if not self._may_go(best.rank[1], None):
            return False
        while best is not None and best.head is not None:
            if self._departed is not None and best.line is not None and self._departed.is_stray_key(best.head[2]):
                waiting = (offset for run in best.line.waiting for offset in range(run.start, run.stop))
                self.strays = list(islice(waiting, STRAY_ITEMS))
                return False
            self._take_head(best.head, best.line)
            if not self.room:
                break
            following = self._top_head(lane)  # one key after the other, as long as no other candidate is better
            best = following if following is not None and (second is None or following.rank < second) else None
            if best is not None and self._too_late(Rank(best.rank[0], best.since)):
                return True  # unless something of its priority is older: the next step looks
            if best is not None and not self._may_go(best.rank[1], None):
                return False
        return True

    def _may_go(self, position: int, own_lane: int | None) -> bool:
        """Whether everything with a key from before `position` has been read; if not, some of it is read now."""
        if position <= self._unread(own_lane):
            return True
        if not self.count:
            if not self.takes:  # else what this plan passed over must be applied first
                self._read_ahead(position, own_lane)
            self.more = True
        return False

    def _too_late(self, rank: Rank) -> bool:
        """Whether other partitions have something better."""
        return self._until is not None and rank > self._until

    def _best(self) -> tuple[Candidate | None, tuple[int, int, bool, int, int] | None, int]:
        """The best candidate, the rank of the one after it, and since when the oldest of the same lifted priority waits.

        A keyed item that came back stands before older ones, which must not have to wait because it is young.
        """
        best: Candidate | None = None
        second: tuple[int, int, bool, int, int] | None = None
        oldest = 0
        for lane in self._lanes:
            walk = self._walks.get(lane)
            extent = None
            if walk is not None and walk.extent is not None:
                since = walk.extent.ready_at
                extent = Candidate((self._lifted(lane, since), walk.position, walk.extent.at_own_offset, since, lane), lane, since)
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

    def _lifted(self, lane: int, since: int) -> int:
        return aged_priority(lane, since, self.state.policy.priority_aging, self.now)

    def _top_head(self, lane: int) -> Candidate | None:
        """The first free key of a lane that this plan has not touched."""
        found = self._top_heads.get(lane)
        while found is not None and found[0][2] in self._touched:
            found = self._top_heads[lane] = next(self._free_keys[lane], None)
        if found is None:
            return None
        entry, line = found
        first = line.waiting.first
        return Candidate(
            (self._lifted(lane, first.ready_at), entry[0], first.at_own_offset, first.ready_at, lane), lane, first.ready_at, entry, line
        )

    def _take_head(self, entry: tuple[int, int, int], line: KeyLine | None) -> None:
        assert line is not None
        key = entry[2]
        self._touched.add(key)
        allowed = min(self.per_key, self.room)
        unread = self._unread(None) if self.per_key > 1 else ENDLESS
        limit = self.state.keys.fences.waits_from(key) if self.per_key > 1 and self.state.keys.fences else ENDLESS
        for place, run in enumerate(line.waiting):
            if not allowed or run.position >= limit:
                break
            stop = min(run.stop, run.start + allowed)
            if run.at_own_offset:
                stop = min(stop, limit, max(unread, run.start + (place == 0)))  # the head itself may go: whoever took it here saw to that
            if stop <= run.start or run.position > unread:
                break
            allowed -= stop - run.start
            self.heads.append(LineTake(key, run.tag, run.start, stop))
            self._took([run.start, stop])

    def _took(self, runs: list[int]) -> None:
        self.runs += runs
        size = count(runs)
        self.count += size
        self.room -= size

    def _take_plain(self, walk: Walk, stop: int) -> None:
        """From an extent (or the part of it before `stop`) in which every item that is not away may be taken."""
        start = walk.start
        stop = min(stop, self.state.outside_lanes.first_missing(start) + max(self.room, 1))  # past what is not ready any more in one step
        runs = self.state.outside_lanes.missing(start, stop)
        self.takes.append(LaneTake(walk.lane, start, stop, None if runs == [start, stop] else runs))
        self._took(runs)
        self.scanned += 1
        walk.advance(stop)

    def _look(self, walk: Walk) -> Block | None:
        """The block where a walk stands; None when it had to pass by what is not ready any more, or damage took the block."""
        if self._skipped_away(walk):
            return None
        block = self.peek.find(walk.start)
        if block.lost:
            self.lost = self.state.unrecorded_losses(block.base, block.stop)
            return None
        return block

    def _take_block(self, walk: Walk) -> None:
        """From the part of an extent that one block covers, looking at priorities and keys."""
        block = self._look(walk)
        if block is None or walk.extent is None:
            return
        stop = min(walk.extent.stop, block.stop)
        if walk.extent.at_own_offset and walk.extent.tag & KEYED:
            stop = min(stop, self._unread(walk.lane))  # beyond it, an earlier item of a key may lie in another lane
        mixed = walk.extent.tag & SPARSE
        if block.key_ids is None and not mixed:
            self._take_plain(walk, stop)
        elif block.key_ids is None or mixed or self._fenced or self.state.outside_lanes.within(walk.start, stop):
            self._take_some(walk, block, stop)
        else:
            keys = block.key_ids[walk.start - block.base : stop - block.base]
            if self._departed is not None and self._departed.moved_any(keys):
                self._take_some(walk, block, stop)
            else:
                self._take_most(walk, keys)

    def _skipped_away(self, walk: Walk) -> bool:
        """Pass by items at the front that are not ready any more. They are not looked at: retention may have let go of their bytes."""
        assert walk.extent is not None
        start, stop = walk.start, min(self.state.outside_lanes.first_missing(walk.start), walk.extent.stop)
        if start == stop:
            return False
        self.takes.append(LaneTake(walk.lane, start, stop, []))
        self.scanned += 1
        walk.advance(stop)
        return True

    def _take_most(self, walk: Walk, keys: list[int]) -> None:
        """The common case: nearly every key is free and comes once. Only the others are looked at one by one."""
        keys = keys[: self._far(keys)]
        unique = set(keys)
        doubtful = (self.state.keys.by_key.keys() & unique) | (self._touched & unique) | (self._left.keys() & unique)
        if len(unique) < len(keys):
            doubtful |= {key for key, times in Counter(keys).items() if times > 1}
        doubtful.discard(NO_KEY)
        jumps = (at for at, key in enumerate(keys) if key in doubtful and self._jumps(walk, walk.start + at, key))
        if doubtful and (jump := next(jumps, None)) is not None:
            keys = keys[: jump + 1]
            unique = set(keys)
            doubtful &= unique
        passed = [index for index, key in enumerate(keys) if key in doubtful and not self._free(key)] if doubtful else []
        if self.per_key == 1:
            self._touched |= unique - doubtful if doubtful else unique  # a busy key may still have its turn: what is passed stands behind
            self._touched.discard(NO_KEY)
        else:
            self._left.update(dict.fromkeys(unique - doubtful, self.per_key - 1))
        start, stop = walk.start, walk.start + len(keys)
        packed = pack_keys(keys) if unique != {NO_KEY} else b""
        if passed:
            self._add_cut(walk.lane, start, stop, packed, passed)
        else:
            self.takes.append(LaneTake(walk.lane, start, stop, None, packed))
            self._took([start, stop])
        self.scanned += stop - start
        walk.advance(stop)

    def _far(self, keys: list[int]) -> int:
        """How far to look: to the last that could be taken. So many of one busy key in a row are passed in one step."""
        if len(keys) <= self.room:
            return len(keys)
        busy, free = self.state.keys.by_key, 0
        for index, key in enumerate(keys):
            free += key not in busy
            if free == self.room:
                return index + 1
        return len(keys)

    def _add_cut(self, lane: int, start: int, stop: int, packed: bytes, passed: list[int]) -> None:
        """Take [start, stop), whose key ids are packed, but for the items at the indexes `passed`."""
        runs: list[int] = []
        kept: list[bytes] = []
        at = 0
        for index in (*passed, stop - start):
            if at < index:
                runs += (start + at, start + index)
                kept.append(packed[8 * at : 8 * index])
            at = index + 1
        passed_keys = b"".join([packed[8 * index : 8 * index + 8] for index in passed])
        self.takes.append(LaneTake(lane, start, stop, runs, b"".join(kept), from_offsets([start + index for index in passed]), passed_keys))
        self._took(runs)

    def _free(self, key: int, position: int = 0) -> bool:
        """Whether the next item of a key may be taken by this plan; noted as taken, or as passed for good."""
        if key in self._touched or key in self.state.keys.by_key:
            return False
        if self._fenced and position >= self.state.keys.fences.waits_from(key):
            self._touched.add(key)
            return False
        left = self._left.get(key, self.per_key) - 1
        if left:
            self._left[key] = left
        else:
            self._touched.add(key)
        return True

    def _jumps(self, walk: Walk, offset: int, key: int) -> bool:
        """Whether an item stands before those that wait, free to go, in its key's line: they were read ahead of it."""
        line = self.state.keys.by_key.get(key)
        if not isinstance(line, KeyLine) or line.busy or not line.waiting or key in self._touched or walk.extent is None:
            return False
        position = walk.position_of(offset)
        self._jumped = Extent(offset, offset + 1, walk.lane, position, walk.extent.ready_at).order < line.waiting.first.order
        return self._jumped

    def _take_some(self, walk: Walk, block: Block, stop: int) -> None:
        """Item by item."""
        start = walk.start
        taken: list[tuple[int, int]] = []
        passed: list[tuple[int, int]] = []
        candidates = self._candidates(walk, block, stop)
        if self._astray(walk, candidates):
            return
        for offset, key in candidates:
            if len(taken) == self.room:
                stop = offset
                break
            (taken if key == NO_KEY or self._free(key, walk.position_of(offset)) else passed).append((offset, key))
            if key != NO_KEY and self._jumps(walk, offset, key):
                stop = offset + 1
                break
        runs, taken_keys = _split(taken)
        passed_runs, passed_keys = _split(passed)
        packed = pack_keys(taken_keys) if any(taken_keys) else b""
        self.takes.append(LaneTake(walk.lane, start, stop, runs, packed, passed_runs, pack_keys(passed_keys)))
        self._took(runs)
        self.scanned += stop - start
        walk.advance(stop)

    def _candidates(self, walk: Walk, block: Block, stop: int) -> list[tuple[int, int]]:
        """(offset, key) of the items of this lane that are ready here."""
        wanted = offsets(self.state.outside_lanes.missing(walk.start, stop))
        base = block.base
        if walk.extent is not None and walk.extent.tag & SPARSE:
            wanted = [offset for offset in wanted if block.priority_of(offset) == walk.lane]
        if block.key_ids is None:
            return [(offset, NO_KEY) for offset in wanted]
        keys = block.key_ids
        return [(offset, keys[offset - base]) for offset in wanted]

    def _astray(self, walk: Walk, candidates: list[tuple[int, int]]) -> bool:
        """Whether some of these became ready where their slot no longer lives."""
        if self._departed is not None:
            for offset, key in candidates:
                if key != NO_KEY and walk.position_of(offset) >= self._departed.strays_from(key):
                    self.strays.append(offset)
        return bool(self.strays)

    def _unread(self, own_lane: int | None) -> int:
        """The position from which on some lane other than `own_lane` may hold unread items with keys."""
        found = ENDLESS
        if len(self._walks) > (own_lane is not None):
            for lane in self._walks:
                extent = self.state.lanes.first_keyed(lane) if lane != own_lane else None
                if extent is not None:
                    found = min(found, extent.position)
        return found

    def _read_ahead(self, position: int, own_lane: int | None) -> None:
        """Pass the keyed items of other lanes from before a position into their lines and leave the others; nothing is taken."""
        lanes = self.state.lanes.lanes
        walks = [Walk(lane, (extent for extent in lanes[lane] if extent.tag & KEYED)) for lane in self._walks if lane != own_lane]
        while self.scanned < SCAN_ITEMS and self.lost is None and not self.strays:
            unread = [walk for walk in walks if walk.extent is not None and walk.position < position]
            if not unread:
                return
            self._pass_block(min(unread, key=lambda walk: walk.position))

    def _pass_block(self, walk: Walk) -> None:
        """Of the part of an extent that one block covers: the keyed items into their lines."""
        block = self._look(walk)
        if block is None or walk.extent is None:
            return
        stop = min(walk.extent.stop, block.stop)
        found = self._candidates(walk, block, stop)
        if self._astray(walk, found):
            return
        passed, keys = _split([(offset, key) for offset, key in found if key != NO_KEY])
        left = from_offsets(offset for offset, key in found if key == NO_KEY)
        self.takes.append(LaneTake(walk.lane, walk.start, stop, [], b"", passed, pack_keys(keys), left))
        self.scanned += max(stop - walk.start, PASS_COST)
        walk.advance(stop)


def _split(items: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """(offset, key) pairs as runs of offsets and a list of keys."""
    return from_offsets(offset for offset, _ in items), [key for _, key in items]
