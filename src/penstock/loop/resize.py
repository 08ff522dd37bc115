"""Resizing a queue: slots move to other partitions, and the order of each key is kept.

Owns: `ResizeStep`. A resize is one record in the catalog: a new version of the slot map, and the next offset of each
partition at that moment (its mark). New items of moved slots go to their new partition. Its fences hold them back until
the old partition has resolved its items of those slots from before its mark: whole slots first, while that backlog
drains, then only the keys that are still unresolved. A partition inherits the fences of a slot's old partition, so a
resize may follow another at once. After a crash, missing fences are put up before anything else.
A log never records what another log could still undo: other partitions are read only at the start of a turn, through
`Partition.committed`. Changes of fences in a turn (put up, narrow, lift) count for other partitions from the next turn
on.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TypeVar

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

FENCED_AT_ONCE = 16
"""Partitions whose fences are put up at the same time."""
DEDUPS_PER_RECORD = 20_000
"""Dedup ids that one record moves."""
Group = TypeVar("Group", bound=Hashable)


class SlotMapChange:
    """The difference between two versions of the slot map, and the mark of each partition."""

    def __init__(self, old: SlotMap, new: SlotMap, marks: Mapping[int, int]) -> None:
        self.version = new.version
        self.marks = marks
        self.moves = slot_moves(old, new)
        self.arriving: dict[int, list[Move]] = {}
        """Moves by destination partition."""
        for move in self.moves:
            self.arriving.setdefault(move.destination, []).append(move)
        self.dedups: dict[int, dict[int, list[tuple[bytes, int, int]]]] = {}


class ResizeStep:
    """Puts up, narrows and lifts the fences of a queue."""

    def __init__(self, partitions: PartitionSet, transfer_step: TransferStep) -> None:
        self._partitions = partitions
        self._transfer_step = transfer_step
        self.changes: list[SlotMapChange] = []
        """Changes of the map whose fences may be missing in a partition, and those that later changes need."""
        self._backlogs: dict[int, dict[int, int]] = {}
        """Old partition → slot → mark: what fences wait for, including fences still to be put up."""
        self._awaited: dict[int, set[int]] = {}
        """Old partition → keys: what narrowed fences wait for."""
        self._unknown: set[int] = set()
        """Partitions that are not open and whose fences are not known."""
        self._stale = False
        """Whether this turn changed fences."""
        self._moved_slots: dict[int, MovedSlots] = {}
        self._drained: dict[tuple[int, int], tuple[int, bool]] = {}
        self._checked: set[tuple[int, int]] = set()
        """(Partition, fence) whose keys were all checked; after that only changed keys are."""
        self._missed_keys: dict[tuple[int, int], set[int]] = {}
        """(Partition, old partition) → keys that changed there while the partition was in I/O."""
        self.in_progress = False
        """Whether there is any fence, or one to be put up."""
        self.wanted: set[int] = set()
        """Partitions that a produce waits for: their fences are put up first."""

    def set_changes(self, changes: list[SlotMapChange]) -> None:
        """Set the changes of the map whose fences may be missing in a partition."""
        self.changes = changes
        for handle in self._partitions.handles.values():
            handle.fences_ready = self._is_fenced(handle)
        self.refresh()

    def restore_fences(self, handle: PartitionHandle) -> None:
        """Put up the missing fences of a recovered partition."""
        self._complete_fences(handle)
        self.invalidate()

    def note_opened(self, handle: PartitionHandle) -> None:
        """Take the fences of an opened partition into account."""
        handle.fences_ready = self._is_fenced(handle)
        self.refresh()

    def _complete_fences(self, handle: PartitionHandle) -> None:
        """Put up the missing fences of a partition, and set `fences_ready` when they are committed."""
        handle.fences_ready = self._is_fenced(handle)
        if handle.fences_ready:
            return
        self._partitions.request_open(handle)
        try:
            for change in self.changes:
                if handle.number in change.arriving and handle.state.fence_version < change.version and not self._put_up(handle, change):
                    return
        except PenstockError:
            return  # tried again when it is usable

    def _is_fenced(self, handle: PartitionHandle) -> bool:
        """Whether the fences that a partition needs are put up and committed."""
        last = max((change.version for change in self.changes if handle.number in change.arriving), default=0)
        if not last:
            return True
        if handle.closed and handle.summary is not None:
            return handle.summary.fence_version >= last
        return handle.is_usable and handle.usable_partition.is_committed and handle.state.fence_version >= last

    @property
    def putting_up_fences(self) -> bool:
        """Whether fences are being put up, which takes a turn or two: produces and further resizes wait for it."""
        handles = self._partitions.handles.values()
        return any(not handle.fences_ready and handle.error is None and self._sources_work(handle) for handle in handles)

    def is_source(self, number: int) -> bool:
        """Whether a fence waits for that partition."""
        return number in self._backlogs

    def _sources_work(self, handle: PartitionHandle) -> bool:
        return all(source.error is None for source in self._sources(handle))

    def _sources(self, handle: PartitionHandle) -> Iterator[PartitionHandle]:
        """The old partitions that a partition's missing fences will wait for."""
        for change in self.changes:
            if handle.fence_version < change.version:
                for move in change.arriving.get(handle.number, ()):
                    yield self._partitions.handles[move.source]

    def invalidate(self) -> None:
        """Forget everything cached, after something was undone."""
        self._checked.clear()
        self._missed_keys.clear()
        self._drained.clear()
        for change in self.changes:
            change.dedups.clear()
        self.refresh()

    def refresh(self) -> None:
        """Collect all fences again, after a resize or when a partition was opened."""
        self._stale = False
        self._moved_slots.clear()
        self._awaited.clear()
        handles = self._partitions.handles.values()
        self._unknown = {handle.number for handle in handles if handle.partition is None and not handle.has_no_fences}
        self.in_progress = not all(handle.fences_ready for handle in handles)
        found: dict[tuple[int, int], set[int]] = {}  # (old partition, mark) → slots
        for handle in handles:
            for fence in handle.partition.state.keys.fences if handle.partition is not None else ():
                self.in_progress = True
                if fence.slots is None:
                    self._awaited.setdefault(fence.source, set()).update(fence.keys)
                found.setdefault((fence.source, fence.mark), set()).update(fence.slots or ())
            if not handle.fences_ready and (handle.partition is not None or handle.summary is not None):
                for source, mark, slots in self._expected(handle.number, handle.fence_version):
                    found.setdefault((source, mark), set()).update(slots)
        self._backlogs = highest_marks([(source, mark, slots) for (source, mark), slots in found.items()])
        if not self.in_progress:
            self._checked.clear()
            for handle in self._partitions.usable():
                handle.state.keys.freed = None  # stop recording freed keys

    def _expected(self, number: int, version: int) -> Iterator[tuple[int, int, Sequence[int]]]:
        """What a partition will wait for when its fences of later versions are put up: (old partition, mark, slots)."""
        for change in self.changes:
            for move in change.arriving.get(number, ()) if change.version > version else ():
                yield move.source, change.marks.get(move.source, ENDLESS), move.slots

    def _put_up(self, handle: PartitionHandle, change: SlotMapChange) -> bool:
        """Put up a partition's fences of one change; False when an old partition cannot be read now."""
        arriving = change.arriving[handle.number]
        sources = [self._partitions.handles.get(move.source) for move in arriving]
        for source in sources:
            if source is not None:
                self._partitions.request_open(source)
        if not all(source is not None and source.is_usable and source.usable_partition.is_committed for source in sources):
            return False
        specs: list[FenceSpec] = []
        adopted: list[tuple[bytes, int, int]] = []
        left_at = self._departure_marks(handle.number, change)
        for move, source in zip(arriving, sources, strict=True):
            assert source is not None
            if not self._durable(source):
                return False
            known = source.usable_partition.committed
            awaited = slots_awaited(
                known, handle.number
            )  # of other slots all items here were resolved; items made ready by seek since then must wait
            left = {slot: mark if slot in awaited else 0 for slot, mark in left_at.items()}
            whole = FenceSpec(0, source.number, change.marks.get(source.number, known.next_offset), 0, pack_slots(move.slots))
            for spec in (whole, *inherited(known, move)):
                specs += split_by_departure_mark(spec, left)
            adopted += self._dedups(source, change).get(handle.number, ())
        for start in range(0, len(adopted), DEDUPS_PER_RECORD):
            self._partitions.run(handle, commands.AddFences(0, [], adopted[start : start + DEDUPS_PER_RECORD]))
        self._partitions.run(handle, commands.AddFences(change.version, merge_fence_specs(specs)))
        return True

    def _departure_marks(self, number: int, until: SlotMapChange) -> dict[int, int]:
        """Slot → the mark of a partition when the slot left it: later items there are strays, not older ones."""
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
        """The dedup ids that leave a partition, by destination: (digest, time left, number of the first item)."""
        if source.number not in change.dedups:
            destinations = {slot: move.destination for move in change.moves if move.source == source.number for slot in move.slots}
            now = source.usable_partition.now().elapsed
            found: dict[int, list[tuple[bytes, int, int]]] = {}
            known = source.usable_partition.committed
            for digest, deadline, number in known.dedup.live(now):
                destination = destinations.get(dedup_slot(digest))
                if destination is not None and number not in known.cancelled:
                    where = ids.locate(source.number, number)
                    item = where[1] if where[0] == destination else ids.foreign_number(*where)
                    found.setdefault(destination, []).append((digest, deadline - now, item))
            change.dedups[source.number] = found
        return change.dedups[source.number]

    # -- each turn -----------------------------------------------------------------------------------

    def advance_fences(self) -> None:
        """Put up missing fences, and narrow and lift others. Only at the start of a turn, when states are committed."""
        if self._stale:
            self.refresh()
        self._put_up_missing()
        found: list[tuple[PartitionHandle, commands.Command]] = []
        freed: dict[int, list[int] | None] = {}
        for handle in self._partitions.usable():
            for fence in handle.state.keys.fences:
                source = self._partitions.handles.get(fence.source)
                if source is not None and source.closed:
                    self._partitions.request_open(source)
                if source is None or not source.is_usable:
                    continue
                if not source.usable_partition.is_committed:  # it has new fences
                    self._partitions.wants_turn = True
                    continue
                if fence.slots is None and source.number not in freed:
                    freed[source.number] = source.usable_partition.committed.keys.take_freed()
                command = self._narrow(handle, fence, source) if fence.slots is not None else self._lift(handle, fence, source, freed)
                if command is not None:
                    found.append((handle, command))
        self._note_missed_keys(freed)
        for handle, command in found:  # only now: every partition was read in its committed state
            self._partitions.run(handle, command)
            self._stale = True

    def _put_up_missing(self) -> None:
        """Put up missing fences of some partitions: for many it takes several turns, with other requests in between."""
        unfenced = [handle for handle in self._partitions.handles.values() if not handle.fences_ready]
        lacking = [handle for handle in unfenced if self._can_put_up(handle)]
        lacking.sort(key=lambda handle: handle.number not in self.wanted)
        self.wanted.clear()
        some = lacking[: max(0, FENCED_AT_ONCE - sum(handle.in_io for handle in unfenced))]
        for handle in some:
            self._complete_fences(handle)
        if any(handle.fences_ready for handle in some):
            self.refresh()
        # where the commit is I/O, the turn after that finds the fences committed
        if any(self._needs_another_turn(handle) for handle in some):
            self._partitions.wants_turn = True

    def _can_put_up(self, handle: PartitionHandle) -> bool:
        """Whether a partition and the old partitions of its missing fences are neither in I/O nor failing."""
        sources = self._sources(handle)
        return not handle.in_io and handle.error is None and all(not source.in_io and source.error is None for source in sources)

    def _needs_another_turn(self, handle: PartitionHandle) -> bool:
        """Whether a partition still lacks a fence, or has one whose commit needs no I/O."""
        if handle.fences_ready:
            return False
        return any(self._sources(handle)) or (handle.is_usable and not handle.log.waits_for_disk)

    def _note_missed_keys(self, freed: Mapping[int, list[int] | None]) -> None:
        """Keep freed keys for partitions that cannot use them now: an old partition gives them only once."""
        for handle in self._partitions.handles.values():
            for source, keys in freed.items():
                if handle.is_usable:
                    self._missed_keys.pop((handle.number, source), None)
                elif keys is not None:
                    self._missed_keys.setdefault((handle.number, source), set()).update(keys)
                else:
                    self._checked = {seen for seen in self._checked if seen[0] != handle.number}

    def _narrow(self, handle: PartitionHandle, fence: Fence, source: PartitionHandle) -> commands.Command | None:
        """Narrow a fence from slots to keys, once the old partition has no backlog before the mark."""
        if not self._is_drained(source, fence.mark) or not self._durable(source):
            return None
        slots, known = fence.slots or (), source.usable_partition.committed
        left = [key for key in known.keys.by_key if key & SLOT_MASK in slots and key_is_unresolved(known, key, fence.mark, handle.number)]
        self._checked.discard((handle.number, fence.number))
        return commands.NarrowFence(fence.number, left)

    def _durable(self, source: PartitionHandle) -> bool:
        """Sync an old partition, because another log will record what depends on it; whether it succeeded."""
        try:
            source.usable_partition.make_durable()
        except PenstockError as error:
            self._partitions.touch(source)
            source.fail(error)
        return source.is_usable

    def _is_drained(self, source: PartitionHandle, mark: int) -> bool:
        """`is_drained`, cached until the partition changes."""
        changes = source.usable_partition.records_applied
        known = self._drained.get((source.number, mark))
        if known is None or known[0] != changes:
            known = self._drained[source.number, mark] = (changes, is_drained(source.state, mark))
        return known[1]

    def _lift(
        self, handle: PartitionHandle, fence: Fence, source: PartitionHandle, freed: Mapping[int, list[int] | None]
    ) -> commands.Command | None:
        """Lift a fence for the keys that are resolved. All keys are checked once, then only changed ones."""
        seen, happened = (handle.number, fence.number), freed[source.number]
        if happened is None or seen not in self._checked:
            keys: Collection[int] = fence.keys
        else:
            keys = fence.keys.intersection({*happened, *self._missed_keys.get((handle.number, source.number), ())})
        self._checked.add(seen)
        resolved = [key for key in keys if not key_is_unresolved(source.usable_partition.committed, key, fence.mark, handle.number)]
        return commands.LiftFence(fence.number, resolved) if resolved else None

    def forward(self, handle: PartitionHandle, runs: list[int]) -> None:
        """Send strays among items that just became ready to their partitions at once, to keep the order of keys."""
        moved = self.moved_slots(handle.number)
        if moved is None:
            return
        strays = []
        for items in handle.usable_partition.items(runs):
            for offset, key in enumerate(items.batch.key_ids or (), items.start):
                # an item that was passed over is in its key's line
                if key != NO_KEY and moved.strays_from(key) < ENDLESS and offset not in handle.state.passed_over:
                    strays.append(offset)
        if strays:
            self._transfer_step.forward(handle, strays)

    def moved_slots(self, number: int) -> MovedSlots | None:
        """The slots of a partition that moved to others, for leases; None when the queue was never resized."""
        partitions = self._partitions
        if partitions.map.version == 1:
            return None
        if number not in self._moved_slots:
            backlog = self._backlogs.get(number, {})
            self._moved_slots[number] = MovedSlots(partitions.map.owners, number, backlog, self._unknown, self._awaited.get(number, ()))
        return self._moved_slots[number]

    @property
    def progress(self) -> list[tuple[int, int, int, int]]:
        """(partition, old partition, fenced slots, fenced keys) of every fence."""
        return [
            (handle.number, fence.source, len(fence.slots or ()), len(fence.keys))
            for handle in self._partitions.usable()
            for fence in handle.state.keys.fences
        ]


def split_by_departure_mark(spec: FenceSpec, left: Mapping[int, int]) -> list[FenceSpec]:
    """Divide a fence by the marks at which its slots left the partition that they return to; 0 for other slots."""
    if not left:
        return [spec]
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for slot in unpack_slots(spec.slots) if spec.slots is not None else ():
        groups.setdefault((left[slot] or -1) if slot in left else 0, ([], []))[0].append(slot)
    for key in unpack_keys(spec.keys):
        slot = key & SLOT_MASK
        groups.setdefault((left[slot] or -1) if slot in left else 0, ([], []))[1].append(key)
    return [
        FenceSpec(0, spec.source, spec.mark, since, None if spec.slots is None else pack_slots(slots), pack_keys(keys))
        for since, (slots, keys) in sorted(groups.items())
    ]


def slots_awaited(state: State, source: int) -> set[int]:
    """The slots whose items wait in a partition for `source`."""
    found: set[int] = set()
    for fence in state.keys.fences:
        if fence.source == source:
            found.update(fence.slots if fence.slots is not None else (key & SLOT_MASK for key in fence.keys))
    return found


def inherited(source: State, move: Move) -> list[FenceSpec]:
    """The fences of a slot's old partition, for its new one."""
    found: list[FenceSpec] = []
    moved = set(move.slots)
    for fence in source.keys.fences:
        if fence.source == move.destination:
            continue  # no fence for its own earlier items
        if fence.slots is not None:
            slots = fence.slots & moved
            if slots:
                found.append(FenceSpec(0, fence.source, fence.mark, 0, pack_slots(slots)))
        else:
            keys = sorted(key for key in fence.keys if key & SLOT_MASK in moved)
            if keys:
                found.append(FenceSpec(0, fence.source, fence.mark, 0, None, pack_keys(keys)))
    return found


def merge_fence_specs(specs: Sequence[FenceSpec]) -> list[FenceSpec]:
    """Merge fences: of each slot and key only the highest mark of a source counts.

    Else repeated resizes over the same backlog would double the inherited fences each time.
    """
    slots = highest_marks([((one.source, one.since), one.mark, unpack_slots(one.slots)) for one in specs if one.slots is not None])
    keys = highest_marks([((one.source, one.since), one.mark, unpack_keys(one.keys)) for one in specs if one.slots is None])
    for group, marks in keys.items():
        whole = slots.get(group, {})
        keys[group] = {key: mark for key, mark in marks.items() if mark > whole.get(key & SLOT_MASK, -1)}
    made = [
        FenceSpec(0, source, mark, since, pack_slots(some)) for (source, since), marks in slots.items() for mark, some in _by_mark(marks)
    ]
    return made + [
        FenceSpec(0, source, mark, since, None, pack_keys(some))
        for (source, since), marks in keys.items()
        for mark, some in _by_mark(marks)
    ]


def highest_marks(found: Iterable[tuple[Group, int, Iterable[int]]]) -> dict[Group, dict[int, int]]:
    """The highest mark of each slot or key, by group; `found`: (group, mark, slots or keys)."""
    marks: dict[Group, dict[int, int]] = {}
    for group, mark, chosen in sorted(found, key=itemgetter(1)):  # ascending: the highest mark stays
        marks.setdefault(group, {}).update(dict.fromkeys(chosen, mark))
    return marks


def _by_mark(marks: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    if len(set(marks.values())) == 1:
        return [(next(iter(marks.values())), sorted(marks))]
    found: dict[int, list[int]] = {}
    for one, mark in sorted(marks.items()):
        found.setdefault(mark, []).append(one)
    return sorted(found.items())


def is_drained(state: State, mark: int) -> bool:
    """Whether no lane holds keyed items from before `mark`: the unresolved ones are in key lines, and known by key."""
    if state.next_offset == state.outside_lanes.total:
        return True
    return not any(extent.tag & KEYED and _before(extent, mark) for lane in state.lanes.lanes for extent in lane)


def key_is_unresolved(state: State, key: int, mark: int, asking: int = -1) -> bool:
    """Whether a key is busy, or its line has items from before `mark`.

    A late item exactly at the mark may be from before or after it. It counts, unless it waits here for the partition
    that asks (`asking`): else each would wait for the other.
    """
    found = state.keys.by_key.get(key)
    if not isinstance(found, KeyLine):
        return found is not None
    if found.busy or not found.waiting:
        return found.busy
    head = found.waiting.first
    if head.position < mark or not _before(head, mark):
        return head.position < mark
    return not any(fence.source == asking and fence.covers(key) and head.position >= fence.since for fence in state.keys.fences)


def _before(run: Extent, mark: int) -> bool:
    """Whether items are from before a mark. A late item has the next offset as position, perhaps the mark itself."""
    return run.position < mark or (run.position == mark and not run.at_own_offset)
