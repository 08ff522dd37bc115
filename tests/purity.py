"""A check that `decide` changes neither the state, nor anything derived from it, nor the command.

Owns: `watch_decisions`, which makes every `machine.decide` and `decide_due` of a test fail if it changes something.
"""

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from enum import Enum
from typing import Any

import msgspec
import pytest

from penstock.rules import machine
from penstock.rules.calendar import Calendar
from penstock.rules.leases import LiveLease
from penstock.rules.runs import RunSet
from penstock.rules.state import State
from penstock.words.batch import Batch
from penstock.words.limits import Policy

_PLAIN = (int, str, bytes, type(None), Enum, Policy, Batch)


def watch_decisions(patch: pytest.MonkeyPatch) -> None:
    for name in ("decide", "decide_due"):
        patch.setattr(machine, name, _watched(getattr(machine, name)))


def _watched(decide: Callable[..., Any]) -> Callable[..., Any]:
    def checked(state: State, *args: Any) -> Any:
        before = _snapshot([state, *args[:-1]])
        try:
            return decide(state, *args)
        finally:
            assert _snapshot([state, *args[:-1]]) == before, f"deciding {args[0]!r} changed the state or the command"

    return checked


def _snapshot(thing: object) -> object:
    """A comparable copy of everything that an object holds, including the order inside heaps.

    Three types are compared by their contents only: a LiveLease unpacks its items, a Calendar sorts a bucket, and a
    RunSet merges its changes, at first use. A RunSet is copied, so that it has its changes after the comparison too.
    """
    if isinstance(thing, LiveLease):
        fixed = (thing.number, thing.deadline, thing.timeout, thing.consumer, thing.size, thing.count)
        return fixed, _snapshot(thing.completed), [*thing.open_items.items()]
    if isinstance(thing, Calendar):
        return [*thing]
    if isinstance(thing, RunSet):
        return thing.total, deepcopy(thing).runs
    if isinstance(thing, _PLAIN):
        return thing
    if isinstance(thing, dict):
        return [(key, _snapshot(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple | deque):
        return [_snapshot(each) for each in thing]
    if isinstance(thing, msgspec.Struct):
        return [_snapshot(getattr(thing, name)) for name in thing.__struct_fields__]
    if type(thing).__module__.startswith("penstock."):
        names = [*getattr(type(thing), "__slots__", ()), *getattr(thing, "__dict__", ())]
        return [(name, _snapshot(getattr(thing, name))) for name in names]
    return repr(thing)  # arrays, bytearrays, sets: repr shows all elements
