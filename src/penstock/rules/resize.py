"""What a resize does to a partition: fences go up, narrow and are lifted.

Owns: the decisions about fences (fences.py) and their application. A fence goes up with the slots that came here, narrows to the
keys that are still busy in the old partition when the backlog there is worked off, and lets go of each key as it is resolved. The
queue looks at both partitions and says when (loop/resize.py). Dedup ids come along with their slots.
"""

from penstock.rules.commands import AddFences, ItemCount, LiftFence, NarrowFence
from penstock.rules.keys import KeyLine
from penstock.rules.records import FenceLifted, FenceNarrowed, FencesAdded, FenceSpec, Record, pack_keys, unpack_keys
from penstock.rules.routing import SLOT_MASK
from penstock.rules.state import BlockSource, State
from penstock.words.clock import Moment


def decide_fence(state: State, command: AddFences, now: Moment, peek: BlockSource) -> tuple[list[Record], ItemCount]:
    if command.version and command.version <= state.fence_version:
        return [], ItemCount(0)
    barriers = [
        FenceSpec(state.fences_given + index, one.source, one.mark, max(0, one.since or state.next_offset), one.slots, one.keys)
        for index, one in enumerate(command.barriers, 1)
    ]
    known = state.dedup.get  # an id that left with its slot and comes back is still known here, by the item's own number
    adopted = [(digest, now.elapsed + left, item) for digest, left, item in command.dedup_ids if known(digest, now.elapsed) is None]
    return [FencesAdded(command.version, barriers, adopted)], ItemCount(len(barriers))


def apply_fenced(state: State, record: FencesAdded, now: Moment) -> None:
    state.fence_version = max(record.version, state.fence_version)
    for barrier in record.barriers:
        state.fences_given = max(state.fences_given, barrier.number)
        state.keys.fences.add(barrier)
    for digest, deadline, item in record.dedup_ids:
        state.dedup.restore(digest, deadline, item)


def decide_narrow(state: State, command: NarrowFence, now: Moment, peek: BlockSource) -> tuple[list[Record], ItemCount]:
    fence = state.keys.fences.find(command.number)
    if fence is None or fence.slots is None:
        return [], ItemCount(0)
    return [FenceNarrowed(command.number, pack_keys(sorted(command.keys)))], ItemCount(len(command.keys))


def apply_narrowed(state: State, record: FenceNarrowed, now: Moment) -> None:
    fence = state.keys.fences.find(record.number)
    if fence is None or fence.slots is None:
        return
    slots, fence.slots = fence.slots, None
    fence.keys = set(unpack_keys(record.keys))
    state.keys.fences.drop_empty()
    for key, line in state.keys.lines():
        if key & SLOT_MASK in slots and key not in fence.keys:
            state.keys.update_head(key, line)


def decide_lift(state: State, command: LiftFence, now: Moment, peek: BlockSource) -> tuple[list[Record], ItemCount]:
    fence = state.keys.fences.find(command.number)
    keys = sorted(fence.keys.intersection(command.keys)) if fence is not None and fence.slots is None else []
    return ([FenceLifted(command.number, pack_keys(keys))] if keys else []), ItemCount(len(keys))


def apply_lifted(state: State, record: FenceLifted, now: Moment) -> None:
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
