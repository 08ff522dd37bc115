"""What may be asked of the catalog, decided: queues made, updated, reshaped, deleted.

Owns: `create`, `update`, `reshape`, `delete`, `removed`: each reads the state, changes nothing, and returns the records of what happens
(none when nothing does), or raises. Also `merged`, which turns options as callers name them into `Options`, and who is who (`named`, …).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from penstock.rules import slots
from penstock.rules.catalog import (
    OPTION_NAMES,
    Adopted,
    Adopting,
    Created,
    Deleted,
    Entry,
    Held,
    Options,
    Record,
    Removed,
    Reshaped,
    State,
    Updated,
    check_name,
)
from penstock.words.errors import InvalidRequest, QueueExists, QueueNotFound
from penstock.words.limits import MAX_PARTITIONS, Policy, Retention, within

MAX_INCARNATION = (1 << 64) - 1


# -- looking ------------------------------------------------------------------------------------------


def named(state: State, name: str) -> Entry:
    """The queue of that name."""
    entry = state.names.get(check_name(name))
    if entry is None:
        raise QueueNotFound(f"there is no queue {name!r}; create it, or mend the name")
    return entry


def known(state: State, incarnation: int) -> Entry:
    """The queue of that incarnation."""
    entry = state.entries.get(within("incarnation", incarnation, 1, MAX_INCARNATION))
    if entry is None:
        raise QueueNotFound(f"there is no queue of incarnation {incarnation:016x} (any more); look for it by its name")
    return entry


def users(state: State, name: str) -> list[str]:
    """The queues whose dead queue that is, in order."""
    return sorted(entry.name for entry in state.names.values() if entry.options.dead_queue == name)


# -- deciding -----------------------------------------------------------------------------------------


def create(
    state: State,
    name: str,
    options: Options,
    partitions: int,
    incarnation: int,
    at: int,
    exist_ok: bool = False,
    given: Mapping[str, object] | None = None,
) -> list[Record]:
    """Make a queue.

    With `exist_ok` nothing happens when there is one of that name, whatever its options: only what was `given` (OPTION_NAMES, partitions),
    because a caller cares about it, must be the same.
    """
    check_name(name)
    within("partitions", partitions, 1, MAX_PARTITIONS)
    options.validate()
    existing = state.names.get(name)
    if existing is not None:
        if not exist_ok:
            raise QueueExists(f"there is a queue {name!r} already; use it, pass exist_ok=True, or choose another name")
        _refuse_other_options(existing, given or {})
        return []
    within("incarnation", incarnation, 1, MAX_INCARNATION)
    if incarnation in state.entries or incarnation in state.deleted:
        raise InvalidRequest(f"incarnation {incarnation:016x} is given already; draw another")
    _check_dead_queue(state, name, options.dead_queue)
    return [Created(name, incarnation, options, partitions, at)]


def update(state: State, incarnation: int, changes: Mapping[str, object]) -> list[Record]:
    """Change options; those not named stay as they are."""
    entry = known(state, incarnation)
    options = merged(entry.options, changes)
    if options.durability != entry.options.durability:
        raise InvalidRequest(f"the durability of queue {entry.name!r} cannot be changed; create a new queue with the one you want")
    if options.dead_queue != entry.options.dead_queue:
        _check_dead_queue(state, entry.name, options.dead_queue)
    return [Updated(incarnation, options)] if options != entry.options else []


def reshape(
    state: State,
    incarnation: int,
    active: Collection[int],
    read_only: Collection[int],
    marks: Mapping[int, int],
    at: int,
    keep_since: int = 0,
    fixed: Collection[int] = (),
) -> list[Record]:
    """Give a queue other partitions: any it has or had, and new ones, numbered on from its next. Those that are `fixed` keep their slots.

    Maps that were replaced before `keep_since` are forgotten, but for the one replaced now. Where the active ones stay, so does the map.
    """
    entry = known(state, incarnation)
    numbers, held_back = _numbers("active", active), _numbers("read_only", read_only)
    within("the count of active partitions", len(numbers), 1, MAX_PARTITIONS)
    next_partition = max(entry.next_partition, numbers[-1] + 1)
    _refuse_strangers(entry, numbers, held_back, marks, next_partition)
    if (numbers, held_back) == (entry.active, entry.read_only):
        return []
    new, marked = entry.map, []
    if numbers != entry.active:
        new, marked = slots.spread(entry.map, numbers, fixed), list(marks.items())
    kept_from = next((old.version for old in entry.maps if old.replaced_at >= keep_since), entry.map.version)
    return [Reshaped(incarnation, new.version, new.pack(), numbers, next_partition, held_back, marked, at, kept_from)]


def delete(state: State, name: str) -> list[Record]:
    """End a queue."""
    entry = named(state, name)
    using = users(state, name)
    if using:
        raise InvalidRequest(f"queue {name!r} is the dead queue of {_listed(using)}; give them another or none, then delete it")
    return [Deleted(entry.incarnation)]


def removed(state: State, incarnation: int) -> list[Record]:
    """Say that the files of a deleted queue are gone; nothing when that was said before."""
    if incarnation in state.entries:
        raise InvalidRequest(f"queue {state.entries[incarnation].name!r} is not deleted; delete it before its files are removed")
    return [Removed(incarnation)] if incarnation in state.deleted else []


def adopting(state: State, incarnation: int, name: str) -> list[Record]:
    """Begin to adopt a drop; nothing when that was begun before."""
    return [] if name in known(state, incarnation).adopting else [Adopting(incarnation, name)]


def adopted(state: State, incarnation: int, name: str, source: str, number: int) -> list[Record]:
    """A drop is adopted."""
    known(state, incarnation)
    return [Adopted(incarnation, name, source, number)]


def hold(state: State, incarnation: int, holder: str, timeout: int) -> list[Record]:
    """Give the consumer right to a holder, or ("") to nobody."""
    entry = known(state, incarnation)
    return [] if (entry.holder, entry.hold_timeout) == (holder, timeout) else [Held(incarnation, holder, timeout)]


def merged(options: Options, changes: Mapping[str, object]) -> Options:
    """Options with some of them changed, named as in OPTION_NAMES; `retention` a Retention, or only some fields of one."""
    unknown = [name for name in changes if name not in OPTION_NAMES]
    if unknown:
        raise InvalidRequest(f"there is no option {unknown[0]!r}; the options are {', '.join(OPTION_NAMES)}")
    policy: dict[str, Any] = {name: value for name, value in changes.items() if name in Policy.__struct_fields__}
    others: dict[str, Any] = {name: value for name, value in changes.items() if name not in policy}
    if "retention" in policy:
        policy["retention"] = _retention(options.policy.retention, policy["retention"])
    return msgspec.structs.replace(options, policy=msgspec.structs.replace(options.policy, **policy), **others).validate()


def _retention(old: Retention, given: object) -> Retention:
    names = Retention.__struct_fields__
    if isinstance(given, Retention):
        return given
    if not isinstance(given, Mapping) or not set(given) <= set(names):
        raise InvalidRequest(f"retention is {given!r}; give a Retention, or a mapping with any of {', '.join(names)}")
    return msgspec.structs.replace(old, **given)


def _refuse_other_options(existing: Entry, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if not _has(existing, name, value):
            advice = f"leave {name} out, change it there, or choose another name"
            raise QueueExists(f"there is a queue {existing.name!r} with another {name}; {advice}")


def _has(entry: Entry, name: str, value: object) -> bool:
    if name == "partitions":
        return value == len(entry.active)
    return merged(entry.options, {name: value}) == entry.options


def _check_dead_queue(state: State, name: str, dead_queue: str) -> None:
    """Refuse a dead queue that cannot be one for the queue of that name."""
    if not dead_queue:
        return
    if dead_queue == name:
        raise InvalidRequest(f"queue {name!r} cannot be its own dead queue; give another one")
    target = state.names.get(dead_queue)
    if target is None:
        raise QueueNotFound(f"there is no queue {dead_queue!r} to be the dead queue of {name!r}; create it first")
    if target.options.dead_queue:
        raise InvalidRequest(f"queue {dead_queue!r} has a dead queue of its own, so it cannot be one; choose another")
    using = users(state, name)
    if using:
        raise InvalidRequest(f"queue {name!r} is the dead queue of {_listed(using)}, so it cannot have one; give them another first")


def _numbers(name: str, given: Collection[int]) -> list[int]:
    """Numbers of partitions in order, each once."""
    for number in given:
        within(f"a partition in {name}", number, 0, slots.MAX_NUMBER)
    if len(set(given)) < len(given):
        raise InvalidRequest(f"{name} names a partition twice; give each number once")
    return sorted(given)


def _refuse_strangers(entry: Entry, active: list[int], read_only: list[int], marks: Mapping[int, int], next_partition: int) -> None:
    skipped = set(range(entry.next_partition, next_partition)) - set(active)
    if skipped:
        what = f"partition {min(skipped)} of queue {entry.name!r} is skipped"
        raise InvalidRequest(f"{what}; number new partitions on from {entry.next_partition}")
    retired = set(range(next_partition)) - set(active)
    stray = [number for number in read_only if number not in retired]
    if stray:
        raise InvalidRequest(f"partition {stray[0]} of queue {entry.name!r} is active or not there; only a retired one can be read-only")
    for number, offset in marks.items():
        within("the number of a mark", number, 0, entry.next_partition - 1)
        within("the offset of a mark", offset, 0, (1 << 63) - 1)


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
