"""Completion by right, not by lease: what a queue's consumer had handled when its leases ended.

Owns: `decide_consume`, `apply_consumed`. A Spark stream that holds the consumer right may be away for longer than its leases last; what it
committed is done all the same, if nobody has taken it since: then it is ready, and still its own.
"""

from penstock.rules.commands import Again, Consume, Counted
from penstock.rules.leaving import keys_in_line, leave_lines
from penstock.rules.life import State as Life
from penstock.rules.records import Consumed, Lost, Record
from penstock.rules.runs import from_offsets
from penstock.rules.settle import LEASE_EXPIRED
from penstock.rules.state import Peek, State
from penstock.words.batch import check_name
from penstock.words.clock import Moment


def decide_consume(state: State, command: Consume, now: Moment, peek: Peek) -> tuple[list[Record], Counted | Again]:
    check_name("consumer", command.consumer)
    chosen = [offset for offset in sorted(set(command.offsets)) if state.state_of(offset) is Life.READY]
    if command.lapsed:  # one that was done by others and sought again since is to be handled again
        chosen = [offset for offset in chosen if (known := state.failures.get(offset)) is not None and known.reason == LEASE_EXPIRED]
    if not chosen:
        return [], Counted(0)
    keys = keys_in_line(state, chosen, peek)
    if isinstance(keys, Lost):
        return [keys], Again()
    return [Consumed(from_offsets(chosen), command.consumer, keys)], Counted(len(chosen))


def apply_consumed(state: State, record: Consumed, now: Moment) -> None:
    leave_lines(state, record.runs, record.keys)
    state.resolved.add_all(record.runs)
