"""Completion by right, not by lease: what a queue's consumer had handled when its leases ended.

Owns: `decide_consume`, `apply_consumed`. A Spark stream that holds the consumer right may be away for longer than its leases last; what it
committed is done all the same, if nobody has taken it since: then it is ready, and still its own.
"""

from penstock.rules.commands import Again, Consume, Counted
from penstock.rules.life import State as Life
from penstock.rules.records import Consumed, Lost, Record, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import from_offsets, offsets
from penstock.rules.settle import LEASE_EXPIRED
from penstock.rules.settled import leave_line
from penstock.rules.state import Peek, State, find_all, lost_runs
from penstock.words.batch import check_name
from penstock.words.clock import Moment


def decide_consume(state: State, command: Consume, now: Moment, peek: Peek) -> tuple[list[Record], Counted | Again]:
    check_name("consumer", command.consumer)
    chosen = [offset for offset in sorted(set(command.offsets)) if state.state_of(offset) is Life.READY]
    if command.lapsed:  # one that was done by others and sought again since is to be handled again
        chosen = [offset for offset in chosen if (known := state.failures.get(offset)) is not None and known.reason == LEASE_EXPIRED]
    if not chosen:
        return [], Counted(0)
    in_line = [offset for offset in chosen if offset in state.passed]
    blocks = find_all(peek, in_line)
    if lost := lost_runs(blocks, state.next_offset):  # without its key an item cannot be taken out of its line
        return [Lost(lost)], Again()
    keys = {offset: block.key_of(offset) for offset, block in zip(in_line, blocks, strict=True)}
    packed = pack_keys(keys.get(offset, NO_KEY) for offset in chosen) if keys else b""
    return [Consumed(from_offsets(chosen), command.consumer, packed)], Counted(len(chosen))


def apply_consumed(state: State, record: Consumed, now: Moment) -> None:
    chosen = offsets(record.runs)
    keys = unpack_keys(record.keys) if record.keys else [NO_KEY] * len(chosen)
    for offset, key in zip(chosen, keys, strict=True):
        if offset in state.passed:
            leave_line(state, offset, key)
    for offset in state.failures.keys() & set(chosen) if state.failures else ():
        del state.failures[offset]
    state.away.add_all(record.runs)
    state.resolved.add_all(record.runs)
