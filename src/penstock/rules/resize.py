"""What a resize does to a partition: fences are added, narrowed and lifted.

Owns: the decisions about fences (fences.py) and their application. A fence is added with slots that were moved to this
partition. It is narrowed to the keys that are still busy in the old partition when the backlog there is resolved, and
lifted from each key when the old partition has resolved that key. The queue reads both partitions and gives these
commands (loop/resize.py). The dedup ids of moved slots are moved too.
"""

from penstock.rules.commands import AddFences, ItemCount, LiftFence, NarrowFence
from penstock.rules.keys import KeyLine
from penstock.rules.records import FenceLifted, FenceNarrowed, FencesAdded, FenceSpec, Record, pack_keys, unpack_keys
from penstock.rules.routing import SLOT_MASK
from penstock.rules.state import BlockSource, State
from penstock.words.clock import Moment


def decide_add_fences(state: State, command: AddFences, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    if command.version and command.version <= state.fence_version:
        return [], ItemCount(0)
    fences = [
        FenceSpec(state.fences_given + index, spec.source, spec.mark, max(0, spec.since or state.next_offset), spec.slots, spec.keys)
        for index, spec in enumerate(command.fences, 1)
    ]
    known = state.dedup.get  # an id whose slot left and came back is still known here, by the item's own offset
    new_ids = [(digest, now.elapsed + left, item) for digest, left, item in command.dedup_ids if known(digest, now.elapsed) is None]
    return [FencesAdded(command.version, fences, new_ids)], ItemCount(len(fences))


def apply_fences_added(state: State, record: FencesAdded, now: Moment) -> None:
    state.fence_version = max(record.version, state.fence_version)
    for spec in record.fences:
        state.fences_given = max(state.fences_given, spec.number)
        state.keys.fences.add(spec)
    for digest, deadline, item in record.dedup_ids:
        state.dedup.restore(digest, deadline, item)


def decide_narrow_fence(state: State, command: NarrowFence, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    fence = state.keys.fences.find(command.number)
    if fence is None or fence.slots is None:
        return [], ItemCount(0)
    return [FenceNarrowed(command.number, pack_keys(sorted(command.keys)))], ItemCount(len(command.keys))


def apply_fence_narrowed(state: State, record: FenceNarrowed, now: Moment) -> None:
    fence = state.keys.fences.find(record.number)
    if fence is None or fence.slots is None:
        return
    slots, fence.slots = fence.slots, None
    fence.keys = set(unpack_keys(record.keys))
    state.keys.fences.drop_empty()
    for key, line in state.keys.lines():
        if key & SLOT_MASK in slots and key not in fence.keys:
            state.keys.update_head(key, line)


def decide_lift_fence(state: State, command: LiftFence, now: Moment, blocks: BlockSource) -> tuple[list[Record], ItemCount]:
    fence = state.keys.fences.find(command.number)
    keys = sorted(fence.keys.intersection(command.keys)) if fence is not None and fence.slots is None else []
    return ([FenceLifted(command.number, pack_keys(keys))] if keys else []), ItemCount(len(keys))


def apply_fence_lifted(state: State, record: FenceLifted, now: Moment) -> None:
    fence = state.keys.fences.find(record.number)
    if fence is None:
        return
    keys = unpack_keys(record.keys)
    fence.keys.difference_update(keys)
    state.keys.fences.drop_empty()
    for key in keys:
        line = state.keys.by_key.get(key)
        if isinstance(line, KeyLine):
            state.keys.update_head(key, line)
