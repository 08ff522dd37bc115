"""Another width: slots move, order stays.

Owns: `ResizeStep`. A resize is one record in the catalog: a new version of the slot map, and where each partition stood at that moment
(its mark). From then on items of the slots that moved go to their new partition, which keeps them back behind fences until the old one
has resolved what it holds of them from before its mark: whole slots while that backlog drains, then only the keys that are still busy
there. A new partition inherits the fences of the old one, so resizes may follow each other. After a crash fences that are missing are put
up before anything else happens.
One log never records what another could still undo: partitions are looked at only at the beginning of a turn, through
`Partition.committed`. What this turn does to fences (puts up, narrows, lifts) counts for other partitions from the next turn on.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import PartitionSet
from penstock.loop.transfer import TransferStep
from penstock.rules import commands
from penstock.rules.fences import ENDLESS, Fence, MovedSlots, pack_slots, unpack_slots
from penstock.rules.keys import KeyLine
from penstock.rules.lanes import KEYED, Extent
from penstock.rules.records import FenceSpec, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY, SLOT_MASK, dedup_slot
from penstock.rules.slots import Move, SlotMap, slot_moves
from penstock.rules.state import State
from penstock.words import ids
from penstock.words.errors import PenstockError

PREPARED = 16
"""Partitions that are given their fences at the same time."""
ADOPT = 20_000
"""Dedup ids carried over by one record."""


class SlotMapChange:
    """One version of the slot map after another, and the mark of each partition then."""

    def __init__(self, old: SlotMap, new: SlotMap, marks: Mapping[int, int]) -> None:
        self.version = new.version
        self.marks = marks
        self.moves = slot_moves(old, new)
        self.arriving: dict[int, list[Move]] = {}
        """By where the slots go."""
        for move in self.moves:
            self.arriving.setdefault(move.destination, []).append(move)
        self.dedups: dict[int, dict[int, list[tuple[bytes, int, int]]]] = {}


class ResizeStep:
    """The fences of a queue."""

    def __init__(self, partitions: PartitionSet, transfer_step: TransferStep) -> None:
        self._partitions = partitions
        self._transfer_step = transfer_step
        self.changes: list[SlotMapChange] = []
        """Changes of the map that may not have reached every partition, or that later ones rest on."""
        self._backlogs: dict[int, dict[int, int]] = {}
        """Old partition → slot → mark: what the fences that stand, or are still to be put up, wait for."""
        self._awaited: dict[int, set[int]] = {}
        """Old partition → keys: what the fences that stand wait for key by key."""
        self._unknown: set[int] = set()
        """Partitions that cannot be opened: nobody knows their fences."""
        self._stale = False
        """Whether fences were changed by this turn."""
        self._departed: dict[int, MovedSlots] = {}
        self._drained: dict[tuple[int, int], tuple[int, bool]] = {}
        self._looked_through: set[tuple[int, int]] = set()
        """(Partition, fence) of which every key was looked at: from then on only those that something happened to are."""
        self._unseen: dict[tuple[int, int], set[int]] = {}
        """(Partition, the one it waits for) → keys to which something happened while the partition was out."""
        self.in_progress = False
        """Whether any fence stands, or should."""
        self.wanted: set[int] = set()
        """Partitions that somebody waits for who wants to produce: they get their fences first."""

    def set_changes(self, changes: list[SlotMapChange]) -> None:
        """These changes of the map may not have reached every partition."""
        self.changes = changes
        for handle in self._partitions.handles.values():
            handle.fences_ready = self._is_fenced(handle)
        self.refresh()

    def restore_fences(self, handle: PartitionHandle) -> None:
        """A member that was away: put up the fences that it lacks."""
        self._prepare(handle)
        self.invalidate()

    def note_opened(self, handle: PartitionHandle) -> None:
        """A member was opened: now its fences can be seen."""
        handle.fences_ready = self._is_fenced(handle)
        self.refresh()

    def _prepare(self, handle: PartitionHandle) -> None:
        """A member may be used for the slots it owns once its fences stand, durably; put up what is missing."""
        handle.fences_ready = self._is_fenced(handle)
        if handle.fences_ready:
            return
        self._partitions.request_open(handle)
        try:
            for change in self.changes:
                if handle.number in change.arriving and handle.state.fence_version < change.version and not self._put_up(handle, change):
                    return
        except PenstockError:
            return  # tried again when it is in order

    def _is_fenced(self, handle: PartitionHandle) -> bool:
        """Whether the fences that a member needs stand, durably."""
        last = max((change.version for change in self.changes if handle.number in change.arriving), default=0)
        if not last:
            return True
        if handle.closed and handle.summary is not None:
            return handle.summary.fence_version >= last
        return handle.is_usable and handle.usable_partition.is_committed and handle.state.fence_version >= last

    @property
    def putting_up_fences(self) -> bool:
        """Whether fences are going up, and will stand in a turn or two: those who want to produce, or to resize again, wait for that."""
        handles = self._partitions.handles.values()
        return any(not handle.fences_ready and handle.error is None and self._sources_are_sound(handle) for handle in handles)

    def is_source(self, number: int) -> bool:
        """Whether a fence waits for that partition."""
        return number in self._backlogs

    def _sources_are_sound(self, handle: PartitionHandle) -> bool:
        return all(source.error is None for source in self._sources(handle))

    def _sources(self, handle: PartitionHandle) -> Iterator[PartitionHandle]:
        """The partitions that a member's missing fences will wait for."""
        for change in self.changes:
            if handle.fence_version < change.version:
                for move in change.arriving.get(handle.number, ()):
                    yield self._partitions.handles[move.source]

    def invalidate(self) -> None:
        """Something was undone: what was looked through must be looked through again."""
        self._looked_through.clear()
        self._unseen.clear()
        self._drained.clear()
        for change in self.changes:
            change.dedups.clear()
        self.refresh()

    def refresh(self) -> None:
        """Fences may have changed: by a resize, or because a partition was opened anew."""
        self._stale = False
        self._departed.clear()
        self._backlogs.clear()
        self._awaited.clear()
        handles = self._partitions.handles.values()
        self._unknown = {handle.number for handle in handles if handle.partition is None and not handle.has_no_fences}
        self.in_progress = not all(handle.fences_ready for handle in handles)
        for handle in handles:
            for fence in handle.partition.state.keys.fences if handle.partition is not None else ():
                self.in_progress = True
                if fence.slots is None:
                    self._awaited.setdefault(fence.source, set()).update(fence.keys)
                backlog = self._backlogs.setdefault(fence.source, {})
                raise_marks(backlog, fence.slots or (), fence.mark)
            if not handle.fences_ready and (handle.partition is not None or handle.summary is not None):
                self._expect(handle.number, handle.fence_version)
        if not self.in_progress:
            self._looked_through.clear()
            for handle in self._partitions.usable():
                handle.state.keys.freed = None  # nobody asks any more

    def _expect(self, number: int, version: int) -> None:
        """What a partition will wait for when the fences of later versions of the map are put up there."""
        for change in self.changes:
            for move in change.arriving.get(number, ()) if change.version > version else ():
                backlog, mark = self._backlogs.setdefault(move.source, {}), change.marks.get(move.source, ENDLESS)
                raise_marks(backlog, move.slots, mark)

    def _put_up(self, handle: PartitionHandle, change: SlotMapChange) -> bool:
        """The fences of one change, durably; False when something stands in the way."""
        arriving = change.arriving[handle.number]
        sources = [self._partitions.handles.get(move.source) for move in arriving]
        for source in sources:
            if source is not None:
                self._partitions.request_open(source)
        if not all(source is not None and source.is_usable and source.usable_partition.is_committed for source in sources):
            return False
        barriers: list[FenceSpec] = []
        adopted: list[tuple[bytes, int, int]] = []
        left_at = self._left(handle.number, change)
        for move, source in zip(arriving, sources, strict=True):
            assert source is not None
            if not self._durable(source):
                return False
            known = source.usable_partition.committed
            awaited = slots_awaited(known, handle.number)  # of the others all here was resolved: what was sought since then must wait
            left = {slot: mark if slot in awaited else 0 for slot, mark in left_at.items()}
            whole = FenceSpec(0, source.number, change.marks.get(source.number, known.next_offset), 0, pack_slots(move.slots))
            for barrier in (whole, *inherited(known, move)):
                barriers += split_by_departure_mark(barrier, left)
            adopted += self._dedups(source, change).get(handle.number, ())
        for start in range(0, len(adopted), ADOPT):
            self._partitions.run(handle, commands.AddFences(0, [], adopted[start : start + ADOPT]))
        self._partitions.run(handle, commands.AddFences(change.version, merge_barriers(barriers)))
        return True

    def _left(self, number: int, until: SlotMapChange) -> dict[int, int]:
        """slot → the mark of a partition when that slot left it: what became ready there since then is astray, not older."""
        left: dict[int, int] = {}
        for change in self.changes:
            if change is until:
                break
            for move in change.moves:
                if move.source == number:
                    left.update(dict.fromkeys(move.slots, change.marks.get(number, 0)))
                elif move.destination == number:
                    for slot in move.slots:
                        left.pop(slot, None)
        return left

    def _dedups(self, source: PartitionHandle, change: SlotMapChange) -> dict[int, list[tuple[bytes, int, int]]]:
        """The dedup ids that leave a partition, by where they go: (digest, time left, where the first item is). Looked up once a change."""
        if source.number not in change.dedups:
            homes = {slot: move.destination for move in change.moves if move.source == source.number for slot in move.slots}
            now = source.usable_partition.now().elapsed
            found: dict[int, list[tuple[bytes, int, int]]] = {}
            for digest, deadline, number in source.usable_partition.committed.dedup.live(now):
                home = homes.get(dedup_slot(digest))
                if home is not None:
                    where = ids.locate(source.number, number)
                    item = where[1] if where[0] == home else ids.foreign_number(*where)
                    found.setdefault(home, []).append((digest, deadline - now, item))
            change.dedups[source.number] = found
        return change.dedups[source.number]

    # -- each turn -----------------------------------------------------------------------------------

    def advance_fences(self) -> None:
        """Lower the fences whose time has come. Only at the beginning of a turn: what is not committed may yet be undone."""
        if self._stale:
            self.refresh()
        self._put_up_some()
        found: list[tuple[PartitionHandle, commands.Command]] = []
        freed: dict[int, list[int] | None] = {}
        for handle in self._partitions.usable():
            for fence in handle.state.keys.fences:
                source = self._partitions.handles.get(fence.source)
                if source is not None and source.closed:
                    self._partitions.request_open(source)
                if source is None or not source.is_usable:
                    continue
                if not source.usable_partition.is_committed:  # it was given fences just now
                    self._partitions.wants_turn = True
                    continue
                if fence.slots is None and source.number not in freed:
                    freed[source.number] = source.usable_partition.committed.keys.take_freed()
                command = self._narrow(handle, fence, source) if fence.slots is not None else self._lift(handle, fence, source, freed)
                if command is not None:
                    found.append((handle, command))
        self._note_unseen(freed)
        for handle, command in found:  # only now: every partition was looked at as it is committed
            self._partitions.run(handle, command)
            self._stale = True

    def _put_up_some(self) -> None:
        """Put up the fences of some members that lack them: a resize to many partitions takes a few turns, with others' work in between."""
        unfenced = [handle for handle in self._partitions.handles.values() if not handle.fences_ready]
        lacking = [handle for handle in unfenced if self._can_go_on(handle)]
        lacking.sort(key=lambda handle: handle.number not in self.wanted)
        self.wanted.clear()
        some = lacking[: max(0, PREPARED - sum(handle.in_io for handle in unfenced))]  # so that one who is wanted has not many before it
        for handle in some:
            self._prepare(handle)
        if any(handle.fences_ready for handle in some):
            self.refresh()
        # those whose fences were recorded just now go out to be committed, and the turn in which they land finds that they stand
        if any(self._needs_another_turn(handle) for handle in some):
            self._partitions.wants_turn = True

    def _can_go_on(self, handle: PartitionHandle) -> bool:
        """Whether nothing that a member's missing fences need is out or failing: what is out comes back by itself."""
        sources = self._sources(handle)
        return not handle.in_io and handle.error is None and all(not source.in_io and source.error is None for source in sources)

    def _needs_another_turn(self, handle: PartitionHandle) -> bool:
        """Whether a member whose fences were to be put up still lacks one, or has it recorded where no commit has to be waited for."""
        if handle.fences_ready:
            return False
        return any(self._sources(handle)) or (handle.is_usable and not handle.log.waits_for_disk)

    def _note_unseen(self, freed: Mapping[int, list[int] | None]) -> None:
        """Keep for partitions that are out what the others have just been told: it is told only once."""
        for handle in self._partitions.handles.values():
            for source, keys in freed.items():
                if handle.is_usable:
                    self._unseen.pop((handle.number, source), None)
                elif keys is not None:
                    self._unseen.setdefault((handle.number, source), set()).update(keys)
                else:
                    self._looked_through = {seen for seen in self._looked_through if seen[0] != handle.number}

    def _narrow(self, handle: PartitionHandle, fence: Fence, source: PartitionHandle) -> commands.Command | None:
        """From slots to keys, once the backlog of the old partition is worked off."""
        if not self._is_drained(source, fence.mark) or not self._durable(source):
            return None
        slots, known = fence.slots or (), source.usable_partition.committed
        left = [key for key in known.keys.by_key if key & SLOT_MASK in slots and key_is_unresolved(known, key, fence.mark, handle.number)]
        self._looked_through.discard((handle.number, fence.number))
        return commands.NarrowFence(fence.number, left)

    def _durable(self, source: PartitionHandle) -> bool:
        """Make really durable what a record in another log will rest on: also leases, without which items would be back in their lanes."""
        try:
            source.usable_partition.make_durable()
        except PenstockError as error:
            self._partitions.touch(source)
            source.fail(error)
        return source.is_usable

    def _is_drained(self, source: PartitionHandle, mark: int) -> bool:
        """Looked at anew only when something happened there."""
        changes = source.usable_partition.records_applied
        known = self._drained.get((source.number, mark))
        if known is None or known[0] != changes:
            known = self._drained[source.number, mark] = (changes, is_drained(source.state, mark))
        return known[1]

    def _lift(
        self, handle: PartitionHandle, fence: Fence, source: PartitionHandle, freed: Mapping[int, list[int] | None]
    ) -> commands.Command | None:
        """Let go of the keys that are resolved: all are looked at once, then only those that something happened to."""
        seen, happened = (handle.number, fence.number), freed[source.number]
        if happened is None or seen not in self._looked_through:
            keys: Collection[int] = fence.keys
        else:
            keys = fence.keys.intersection({*happened, *self._unseen.get((handle.number, source.number), ())})
        self._looked_through.add(seen)
        gone = [key for key in keys if not key_is_unresolved(source.usable_partition.committed, key, fence.mark, handle.number)]
        return commands.LiftFence(fence.number, gone) if gone else None

    def forward(self, handle: PartitionHandle, runs: list[int]) -> None:
        """Of items that became ready just now, those whose slot lives elsewhere leave at once, to have their place in their key's order."""
        departed = self.moved_slots(handle.number)
        if departed is None:
            return
        strays = []
        for items in handle.usable_partition.items(runs):
            for offset, key in enumerate(items.batch.key_ids or (), items.start):
                if (
                    key != NO_KEY and departed.strays_from(key) < ENDLESS and offset not in handle.state.passed_over
                ):  # passed: it is back in its line
                    strays.append(offset)
        if strays:
            self._transfer_step.forward(handle, strays)

    def moved_slots(self, number: int) -> MovedSlots | None:
        """What a lease must know of a partition: which of its slots live elsewhere. None when the width never changed."""
        partitions = self._partitions
        if partitions.map.version == 1:
            return None
        if number not in self._departed:
            backlog = self._backlogs.get(number, {})
            self._departed[number] = MovedSlots(partitions.map.owners, number, backlog, self._unknown, self._awaited.get(number, ()))
        return self._departed[number]

    @property
    def progress(self) -> list[tuple[int, int, int, int]]:
        """(partition, the one it waits for, slots still fenced, keys still fenced) for every fence that stands."""
        return [
            (handle.number, fence.source, len(fence.slots or ()), len(fence.keys))
            for handle in self._partitions.usable()
            for fence in handle.state.keys.fences
        ]


def split_by_departure_mark(barrier: FenceSpec, left: Mapping[int, int]) -> list[FenceSpec]:
    """A barrier, cut by when its slots left the partition they now come back to; those that were never there begin now."""
    if not left:
        return [barrier]
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for slot in unpack_slots(barrier.slots) if barrier.slots is not None else ():
        groups.setdefault((left[slot] or -1) if slot in left else 0, ([], []))[0].append(slot)
    for key in unpack_keys(barrier.keys):
        slot = key & SLOT_MASK
        groups.setdefault((left[slot] or -1) if slot in left else 0, ([], []))[1].append(key)
    return [
        FenceSpec(0, barrier.source, barrier.mark, since, None if barrier.slots is None else pack_slots(slots), pack_keys(keys))
        for since, (slots, keys) in sorted(groups.items())
    ]


def slots_awaited(state: State, source: int) -> set[int]:
    """The slots of which something waits in a partition until `source` has resolved what it holds."""
    found: set[int] = set()
    for fence in state.keys.fences:
        if fence.source == source:
            found.update(fence.slots if fence.slots is not None else (key & SLOT_MASK for key in fence.keys))
    return found


def inherited(source: State, move: Move) -> list[FenceSpec]:
    """The fences of a slot's old partition, for its new one: what it waited for there it waits for here."""
    found: list[FenceSpec] = []
    moved = set(move.slots)
    for fence in source.keys.fences:
        if fence.source == move.destination:
            continue  # its own earlier items are in its own order
        if fence.slots is not None:
            slots = fence.slots & moved
            if slots:
                found.append(FenceSpec(0, fence.source, fence.mark, 0, pack_slots(slots)))
        else:
            keys = sorted(key for key in fence.keys if key & SLOT_MASK in moved)
            if keys:
                found.append(FenceSpec(0, fence.source, fence.mark, 0, None, pack_keys(keys)))
    return found


def merge_barriers(barriers: Sequence[FenceSpec]) -> list[FenceSpec]:
    """The same, of each slot and key only the highest mark of a source: who waits for that has waited for the lower ones.

    Resizes over a backlog that nobody serves would double what is inherited again and again.
    """
    slots: dict[tuple[int, int], dict[int, int]] = {}
    keys: dict[tuple[int, int], dict[int, int]] = {}
    for barrier in barriers:
        kind, found = (keys, unpack_keys(barrier.keys)) if barrier.slots is None else (slots, unpack_slots(barrier.slots))
        marks = kind.setdefault((barrier.source, barrier.since), {})
        raise_marks(marks, found, barrier.mark)
    for place, marks in keys.items():
        whole = slots.get(place, {})
        keys[place] = {key: mark for key, mark in marks.items() if mark > whole.get(key & SLOT_MASK, -1)}
    made = [
        FenceSpec(0, source, mark, since, pack_slots(some)) for (source, since), marks in slots.items() for mark, some in _by_mark(marks)
    ]
    return made + [
        FenceSpec(0, source, mark, since, None, pack_keys(some))
        for (source, since), marks in keys.items()
        for mark, some in _by_mark(marks)
    ]


def raise_marks(marks: dict[int, int], chosen: Iterable[int], mark: int) -> None:
    """Let each of the chosen slots or keys have at least this mark."""
    raised = dict.fromkeys(chosen, mark)
    for one in marks.keys() & raised.keys() if marks else ():
        raised[one] = max(mark, marks[one])
    marks.update(raised)


def _by_mark(marks: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    if len(set(marks.values())) == 1:
        return [(next(iter(marks.values())), sorted(marks))]
    found: dict[int, list[int]] = {}
    for one, mark in sorted(marks.items()):
        found.setdefault(mark, []).append(one)
    return sorted(found.items())


def is_drained(state: State, mark: int) -> bool:
    """Whether nothing with a key stands in a lane from before `mark`: all that is left of that time is known by its key."""
    if state.next_offset == state.outside_lanes.total:
        return True
    return not any(extent.tag & KEYED and _before(extent, mark) for lane in state.lanes.lanes for extent in lane)


def key_is_unresolved(state: State, key: int, mark: int, waiter: int = -1) -> bool:
    """Whether a key is busy, or has items in line from before `mark`.

    What came late and stands just at the mark may be from before it or after: it counts, unless it waits here for the very partition
    (`waiter`) that asks: then neither would ever go.
    """
    found = state.keys.by_key.get(key)
    if not isinstance(found, KeyLine):
        return found is not None
    if found.busy or not found.waiting:
        return found.busy
    head = found.waiting.first
    if head.position < mark or not _before(head, mark):
        return head.position < mark
    return not any(fence.source == waiter and fence.covers(key) and head.position >= fence.since for fence in state.keys.fences)


def _before(run: Extent, mark: int) -> bool:
    """Whether it stood there when the mark was set. What came late stands at the offset that was to be given next: at the mark itself."""
    return run.position < mark or (run.position == mark and not run.at_own_offset)
