"""Burying items, and taking items out of leases and key lines.

Owns: when an item is buried (`attempts_exhausted`) and whether that parks its key (`parks_key`); the two ways to make a
Buried record (`bury_held`, `bury_waiting`); the steps that take items out of their lines (`keys_in_line`,
`withdraw_items`, `leave_lines`, `remove_from_line`, `add_burial`) and close what a lease no longer needs
(`release_if_unused`, `end_if_empty`).
"""

from collections.abc import Sequence

from penstock.rules.leases import LiveLease
from penstock.rules.records import Buried, Lost, pack_keys, unpack_keys_or_none
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import from_offsets, offsets
from penstock.rules.state import BlockSource, Burial, Failure, State, find_blocks, lost_runs
from penstock.words.clock import Moment
from penstock.words.limits import Policy

ATTEMPTS_EXHAUSTED = "attempts spent"
TTL_EXPIRED = "expired"
LEASE_EXPIRED = "lease expired"
"""Reasons that the rules give, as they are stored."""


def attempts_exhausted(policy: Policy, attempts: int) -> bool:
    """Whether an item with so many failed attempts is buried."""
    return 0 < policy.max_attempts <= attempts


def parks_key(policy: Policy) -> bool:
    """Whether a burial holds the item's key until the item is redriven or cleared, or the key is released."""
    return policy.on_bury == "park"


# -- deciding -----------------------------------------------------------------------------------------


def bury_held(state: State, lease: LiveLease, chosen: Sequence[int], reason: str, returned: Sequence[int] = ()) -> Buried:
    """The record that buries items of a lease and returns the runs `returned`."""
    park = parks_key(state.policy)
    keys = pack_keys(lease.open_items[offset][1] for offset in chosen) if park else b""
    return Buried(lease.number, from_offsets(chosen), reason, keys, list(returned), park)


def bury_waiting(state: State, policy: Policy, runs: list[int], reason: str, blocks: BlockSource) -> Buried | Lost:
    """The record that buries items that are not leased; or the record of a loss, which must be applied first.

    It has the key of each item whose key line changes: of items in lines, or, if burials park keys, of all items.
    """
    park, chosen = parks_key(policy), offsets(runs)
    keys = {offset: state.backing_off[offset] for offset in state.backing_off.keys() & set(chosen)}
    unknown = [offset for offset in chosen if offset not in keys and (park or offset in state.passed_over)]
    found = find_blocks(blocks, unknown)
    if lost := lost_runs(state, found):
        return Lost(lost)
    keys.update((offset, block.key_of(offset)) for offset, block in zip(unknown, found, strict=True))
    key_ids = [keys.get(offset, NO_KEY) for offset in chosen]
    return Buried(0, runs, reason, pack_keys(key_ids) if any(key_ids) else b"", park=park)


def keys_in_line(state: State, chosen: Sequence[int], blocks: BlockSource) -> bytes | Lost:
    """Packed key ids of items, NO_KEY for those in no key line; empty if none is in a line.

    Or the record of a loss, which must be applied first: without its key an item cannot be taken out of its line.
    """
    in_line = [offset for offset in chosen if offset in state.passed_over]
    found = find_blocks(blocks, in_line)
    if lost := lost_runs(state, found):
        return Lost(lost)
    keys = {offset: block.key_of(offset) for offset, block in zip(in_line, found, strict=True)}
    return pack_keys(keys.get(offset, NO_KEY) for offset in chosen) if keys else b""


# -- applying -----------------------------------------------------------------------------------------


def withdraw_items(state: State, runs: list[int], packed: bytes) -> None:
    """Take waiting items out of their lanes, lines and schedules, and delete their failures."""
    leave_lines(state, runs, packed)
    for offset in state.failures.keys() & set(offsets(runs)) if state.failures else ():
        del state.failures[offset]
    state.scheduled.remove_all(runs)
    state.outside_lanes.add_all(runs)


def leave_lines(state: State, runs: list[int], packed: bytes) -> None:
    """Take items out of their key lines; a back-off no longer holds its key."""
    if not state.passed_over and not state.backing_off:
        return
    chosen = offsets(runs)
    for offset, key in zip(chosen, unpack_keys_or_none(packed, len(chosen)), strict=True):
        if offset in state.passed_over or offset in state.backing_off:
            remove_from_line(state, offset, key)


def remove_from_line(state: State, offset: int, key: int, *, park: bool = False) -> None:
    """Take an item that waits or backs off out of its key line. With `park` it then parks the key."""
    key = state.backing_off.pop(offset, key)
    in_line = offset in state.passed_over
    state.passed_over.remove(offset, offset + 1)
    if key == NO_KEY:
        return
    line = state.keys.line(key)
    if line.backing_off is not None and line.backing_off[0] == offset:
        line.backing_off = None
    elif in_line:
        line.drop(offset)
    if park:
        line.parked.append(offset)
    state.keys.update_head(key, line)


def add_burial(state: State, offset: int, reason: str, now: Moment) -> None:
    """Bury an item; its failures become part of the burial."""
    failure = state.failures.pop(offset, None) or Failure(0, 0, 0, "")
    state.ttl_overdue.remove(offset, offset + 1)
    state.burials[offset] = Burial(reason, now.wall, failure.attempts, failure.first_failed_at, failure.last_failed_at, now.elapsed)
    state.buried_set.add(offset, offset + 1)


def release_if_unused(state: State, lease: LiveLease, key: int) -> None:
    """Release a key of a lease, unless another open item of the lease has it."""
    if key != NO_KEY and not lease.items_per_key[key]:
        state.keys.release((key,), lease.number)


def end_if_empty(state: State, lease: LiveLease, now: int) -> None:
    """End a lease that has no open items."""
    if not lease.count:
        state.leases.end(lease, now, state.policy.result_memory)
