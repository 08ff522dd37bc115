"""Chosen items that leave: out of their keys' lines, whatever becomes of them then.

Owns: `keys_in_line`, what a record must say so that they can, and `leave_lines`, which does it.
"""

from collections.abc import Sequence

from penstock.rules.records import Lost, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import offsets
from penstock.rules.settled import leave_line
from penstock.rules.state import Peek, State, find_all, lost_runs


def keys_in_line(state: State, chosen: Sequence[int], peek: Peek) -> bytes | Lost:
    """Packed key ids of items, NO_KEY for those in no line; nothing when none is. Or what damage took: without its key an item cannot
    be taken out of its line."""
    in_line = [offset for offset in chosen if offset in state.passed]
    blocks = find_all(peek, in_line)
    if lost := lost_runs(state, blocks):
        return Lost(lost)
    keys = {offset: block.key_of(offset) for offset, block in zip(in_line, blocks, strict=True)}
    return pack_keys(keys.get(offset, NO_KEY) for offset in chosen) if keys else b""


def leave_lines(state: State, runs: list[int], packed: bytes) -> None:
    """The items are out of their lanes and lines, and their failures forgotten."""
    chosen = offsets(runs)
    keys = unpack_keys(packed) if packed else [NO_KEY] * len(chosen)
    for offset, key in zip(chosen, keys, strict=True):
        if offset in state.passed:
            leave_line(state, offset, key)
    for offset in state.failures.keys() & set(chosen) if state.failures else ():
        del state.failures[offset]
    state.away.add_all(runs)
