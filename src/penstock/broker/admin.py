"""An operator's verbs, run inside a turn of the queue they ask about.

Owns: `VERBS`. Each is a function of the queue's `Turns` and plain arguments; what it answers is plain data (reports.py), so that any kind
of broker can pass both on. Looking is in looking.py; here is what changes something.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.broker import looking
from penstock.loop.member import Member
from penstock.loop.retention import Freed
from penstock.loop.turn import Turns
from penstock.rules import commands
from penstock.rules.commands import Again, Counted
from penstock.rules.life import Life
from penstock.words.errors import InvalidRequest, StorageFailed


def chosen(turns: Turns, partition: int | None) -> list[Member]:
    """The partitions that an operation is for: one, or all that are in order."""
    if partition is None:
        broken = next((member for member in turns.members.values() if not member.healthy), None)
        if broken is not None:
            raise StorageFailed(f"partition {broken.number} is failing ({broken.error}); try again later, or name the partition it is for")
        return list(turns.healthy())
    if partition not in turns.members:
        raise InvalidRequest(f"queue {turns.name!r} has no partition {partition}; it has {sorted(turns.members)}")
    member = turns.members[partition]
    _ = member.open  # or why it cannot be used
    return [member]


def _total(turns: Turns, members: Sequence[Member], command: commands.Command) -> int:
    items = 0
    for member in members:
        answer = turns.run(member, command)
        while isinstance(answer, Again):
            answer = turns.run(member, command)
        assert isinstance(answer, Counted)
        items += answer.items
    return items


def pause(turns: Turns, lease: bool | None, produce: bool | None, partition: int | None = None) -> None:
    if partition is None:
        turns.pause(commands.Pause(lease, produce))
    else:
        _total(turns, chosen(turns, partition), commands.Pause(lease, produce))
    turns.again = True  # who waits may go on


def clear(turns: Turns, ready: bool, scheduled: bool, leased: bool, buried: bool, partition: int | None = None) -> int:
    turns.again = True
    return _total(turns, chosen(turns, partition), commands.Clear(ready, scheduled, leased, buried))


def seek(turns: Turns, offsets: Mapping[int, int] | None, at: int | None, partition: int | None = None) -> int:
    items = 0
    turns.again = True
    for member in chosen(turns, partition):
        if offsets is not None and member.number not in offsets:
            continue
        offset = offsets[member.number] if offsets is not None else member.open.offset_at(at or 0)
        items += _total(turns, [member], commands.Seek(offset))
    return items


def redrive(turns: Turns, partition_offsets: Mapping[int, Sequence[int]] | None) -> int:
    """Buried items become ready again where they are."""
    items = 0
    turns.again = True
    for member in turns.healthy():
        if partition_offsets is None:
            items += _total(turns, [member], commands.Redrive())
        elif member.number in partition_offsets:
            still = [o for o in partition_offsets[member.number] if member.state.state_of(o) is Life.BURIED]
            items += _total(turns, [member], commands.Redrive(still)) if still else 0
    return items


def send(turns: Turns, partition_offsets: Mapping[int, Sequence[int]], to: int) -> int:
    """Of these items, those that are still ready or buried leave for another queue. Refused as a whole while one cannot be looked up."""
    items = 0
    for number in partition_offsets:
        if number in turns.members:
            _ = turns.members[number].open  # or why it cannot be used
    for number, offsets in partition_offsets.items():
        member = turns.members.get(number)
        if member is None:
            continue
        still = [offset for offset in offsets if member.state.state_of(offset) in (Life.READY, Life.BURIED)]
        if still:
            turns.carrying.send(member, still, to)
            items += len(still)
            if to != turns.incarnation:
                _release_parked(turns, member, set(still))
    return items


def _release_parked(turns: Turns, member: Member, gone: set[int]) -> None:
    """Keys that were parked only for items which have left for another queue go on."""
    for key, line in member.state.keys.lines():
        if line.parked and gone.issuperset(line.parked):
            turns.run(member, commands.Release(key))


def release(turns: Turns, key_id: int) -> int:
    turns.again = True
    return _total(turns, chosen(turns, None), commands.Release(key_id))


def note(turns: Turns, partition: int, lease: int, offset: int, text: str) -> None:
    """A holder says how far it has come."""
    for member in chosen(turns, partition):
        turns.run(member, commands.Note(lease, offset, text))


def consume(turns: Turns, partition_offsets: Mapping[int, Sequence[int]], consumer: str, lapsed: bool = False) -> int:
    """Of these items, those that are ready are done: their consumer had handled them."""
    done = 0
    turns.again = True
    for number, offsets in partition_offsets.items():
        if number in turns.members:
            done += _total(turns, chosen(turns, number), commands.Consume(offsets, consumer, lapsed))
    return done


def publish(turns: Turns, partition: int | None = None) -> None:
    """Everything up to now, of one partition or of all that are in order, may be seen by those who read beside the queue."""
    for member in [*turns.healthy()] if partition is None else chosen(turns, partition):
        turns.touch(member)
        member.open.rest()


def compact(turns: Turns, partition: int | None = None) -> list[Freed]:
    freed = []
    for member in chosen(turns, partition):
        turns.touch(member)
        freed.append(member.open.compact())
    return freed


def move_cursor(turns: Turns, name: str, offsets: Mapping[int, int]) -> None:
    for member in chosen(turns, None):
        if member.number in offsets:
            turns.run(member, commands.MoveCursor(name, min(offsets[member.number], member.state.next_offset)))


def release_cursor(turns: Turns, name: str) -> None:
    found = [member for member in chosen(turns, None) if name in member.state.cursors]
    if not found:
        raise InvalidRequest(f"there is no cursor {name!r} in queue {turns.name!r}; there are {sorted(looking.cursors(turns)) or 'none'}")
    for member in found:
        turns.run(member, commands.ReleaseCursor(name))


VERBS: dict[str, Callable[..., Any]] = {
    "pause": pause,
    "clear": clear,
    "seek": seek,
    "redrive": redrive,
    "send": send,
    "release": release,
    "consume": consume,
    "publish": publish,
    "compact": compact,
    "note": note,
    "move_cursor": move_cursor,
    "release_cursor": release_cursor,
    "stats": looking.stats,
    "explain": looking.explain,
    "trace": looking.trace,
    "keys": looking.keys,
    "listed": looking.listed,
    "redrivable": looking.redrivable,
    "cursor": looking.cursor,
    "cursors": looking.cursors,
    "read": looking.read,
    "ends": looking.ends,
    "starts": looking.starts,
    "offsets_at": looking.offsets_at,
}


def needs_nothing_open(verb: str, args: Mapping[str, Any]) -> bool:
    """Whether what is known of closed partitions is enough to answer a verb."""
    return verb == "stats" or (verb == "publish" and args.get("partition") is None)


def run(turns: Turns, verb: str, args: Mapping[str, Any]) -> Any:
    """Run a verb by its name."""
    found = VERBS.get(verb)
    if found is None:
        raise InvalidRequest(f"there is no verb {verb!r}; there are {', '.join(sorted(VERBS))}")
    return found(turns, **args)
