"""Taking items out of the order in which they wait: those that are given up, and those that leave for other reasons.

Owns: the rules of giving up (`attempts_exhausted`, `parks_key`, and the two ways to a Buried record: `bury_held`, `bury_waiting`), and the steps by
which chosen items leave their keys' lines (`keys_in_line`, `withdraw_items`, `remove_from_line`, `add_burial`).
"""

from collections.abc import Sequence

from penstock.rules.leases import LiveLease
from penstock.rules.records import Buried, Lost, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import from_offsets, offsets
from penstock.rules.state import BlockSource, Burial, Failure, State, find_blocks, lost_runs
from penstock.words.clock import Moment
from penstock.words.limits import Policy

SPENT = "attempts spent"
TTL_EXPIRED = "expired"
LEASE_EXPIRED = "lease expired"
"""Reasons that the rules themselves give."""


def attempts_exhausted(policy: Policy, attempts: int) -> bool:
    """Whether an item that failed so often is given up."""
    return 0 < policy.max_attempts <= attempts


def parks_key(policy: Policy) -> bool:
    """Whether a burial holds its key, until the item is redriven or cleared or the key released."""
    return policy.on_bury == "park"


# -- deciding -----------------------------------------------------------------------------------------


def bury_held(state: State, grant: LiveLease, chosen: Sequence[int], reason: str, returned: Sequence[int] = ()) -> Buried:
    """The record that buries items of a lease; the runs `returned` go back with them."""
    park = parks_key(state.policy)
    keys = pack_keys(grant.open_items[offset][1] for offset in chosen) if park else b""
    return Buried(grant.number, from_offsets(chosen), reason, keys, list(returned), park)


def bury_waiting(state: State, policy: Policy, runs: list[int], reason: str, peek: BlockSource) -> Buried | Lost:
    """The record that buries items which nobody holds; or what damage took of them, which must be out of the way first.

    It says the key of each item whose line is touched by that: of those in lines, or, to park their keys, of all.
    """
    park, chosen = parks_key(policy), offsets(runs)
    keys = {offset: state.backing_off[offset] for offset in state.backing_off.keys() & set(chosen)}
    asked = [offset for offset in chosen if offset not in keys and (park or offset in state.passed_over)]
    blocks = find_blocks(peek, asked)
    if lost := lost_runs(state, blocks):
        return Lost(lost)
    keys.update((offset, block.key_of(offset)) for offset, block in zip(asked, blocks, strict=True))
    found = [keys.get(offset, NO_KEY) for offset in chosen]
    return Buried(0, runs, reason, pack_keys(found) if any(found) else b"", park=park)


def keys_in_line(state: State, chosen: Sequence[int], peek: BlockSource) -> bytes | Lost:
    """Packed key ids of items, NO_KEY for those in no line; nothing when none is. Or what damage took: without its key an item cannot
    be taken out of its line."""
    in_line = [offset for offset in chosen if offset in state.passed_over]
    blocks = find_blocks(peek, in_line)
    if lost := lost_runs(state, blocks):
        return Lost(lost)
    keys = {offset: block.key_of(offset) for offset, block in zip(in_line, blocks, strict=True)}
    return pack_keys(keys.get(offset, NO_KEY) for offset in chosen) if keys else b""


# -- applying -----------------------------------------------------------------------------------------


def withdraw_items(state: State, runs: list[int], packed: bytes) -> None:
    """The items are out of their lanes and lines, and their failures forgotten."""
    chosen = offsets(runs)
    keys = unpack_keys(packed) if packed else [NO_KEY] * len(chosen)
    for offset, key in zip(chosen, keys, strict=True):
        if offset in state.passed_over:
            remove_from_line(state, offset, key)
    for offset in state.failures.keys() & set(chosen) if state.failures else ():
        del state.failures[offset]
    state.outside_lanes.add_all(runs)


def remove_from_line(state: State, offset: int, key: int, *, park: bool = False) -> None:
    """An item that waited in (or held up) its key's line is gone from there."""
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
    """The item is buried, and what was known of its failures goes into the note of that."""
    failure = state.failures.pop(offset, None) or Failure(0, 0, 0, "")
    state.ttl_overdue.remove(offset, offset + 1)
    state.burials[offset] = Burial(reason, now.wall, failure.attempts, failure.first_failed_at, failure.last_failed_at, now.elapsed)
    state.buried_set.add(offset, offset + 1)
