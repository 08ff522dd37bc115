"""Base: the whole state of a partition as bytes. A replay may start from a Base instead of the first record.

Owns: `dump` and `load`. The bytes are canonical: the same records give the same bytes, whether they were applied live,
replayed from the first one, or replayed from a Base in between (tested).
`load` derives what is not stored: `outside_lanes`, `passed_over`, `moving`, `buried_set`, leased keys, `free_heads`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock.rules.calendar import Calendar, CalendarEntry
from penstock.rules.calls import FORMER, NEVER, RememberedAnswer, RememberedCall
from penstock.rules.keys import KeyLine
from penstock.rules.lanes import Extent
from penstock.rules.leases import Leases, LiveLease
from penstock.rules.records import FenceSpec, Leased, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import Burial, Failure, OutboxEntry, State
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog
from penstock.words.limits import Policy

VERSION = 1


class _LeaseImage(msgspec.Struct, array_like=True):
    number: int
    deadline: int
    timeout: int
    consumer: str
    size: int
    given: list[tuple[int, int, int, bytes]]
    completed: list[int] | None


class _LineImage(msgspec.Struct, array_like=True):
    key: int
    lease: int
    backing_off: tuple[int, int] | None
    until: int
    parked: list[int]
    waiting: list[tuple[int, int, int, int, int]]
    kept_positions: list[tuple[int, int]] = []


class _StateImage(msgspec.Struct, array_like=True):
    """A State as it is stored. New fields go to the end, with a default."""

    version: int
    policy: Policy
    epoch: int
    boot_id: str
    clock_shift: int
    leases_given: int
    moment: tuple[int, int]
    next_offset: int
    paused_lease: bool
    paused_produce: bool
    completed: list[int]
    scheduled: list[int]
    ttl_overdue: list[int]
    lost: list[int]
    lanes: list[list[tuple[int, int, int, int, int]]]
    lines: list[_LineImage]
    leases: list[_LeaseImage]
    fully_completed: list[int]
    partly_completed: list[tuple[int, int, list[int]]]
    forget_points: list[tuple[int, int]]
    by_wall: list[int]
    by_elapsed: list[int]
    ttl: list[int]
    failures: list[tuple[int, Failure]]
    burials: list[tuple[int, Burial]]
    requests: list[tuple[bytes, int, RememberedAnswer]]
    """Not written any more: `request_ids` replaced it."""
    dedup: list[tuple[bytes, int, int]]
    received_sequences: list[tuple[bytes, int]]
    dropped: list[int] = []
    cursors: list[tuple[str, int]] = []
    received_bases: list[tuple[bytes, int]] = []
    outbox: list[tuple[bytes, list[OutboxEntry]]] = []
    sent_sequences: list[tuple[bytes, int]] = []
    moved: list[tuple[int, int, bytes, int]] = []
    fence_version: int = 0
    fences_given: int = 0
    fences: list[FenceSpec] = []
    progress: list[tuple[int, int, str]] = []
    buried_dropped: int = 0
    sessions: list[tuple[bytes, RememberedCall]] = []
    request_ids: list[tuple[bytes, RememberedCall]] = []
    call_watermark: int = NEVER
    cancelled: list[int] = []
    holes: list[int] = []
    first_lease: int = 0


_UNCHANGED = (
    *("policy", "epoch", "boot_id", "clock_shift", "leases_given", "next_offset", "paused_lease", "paused_produce"),
    *("fence_version", "fences_given", "buried_dropped", "first_lease"),
)
_RUN_SETS = ("completed", "scheduled", "ttl_overdue", "lost", "dropped", "cancelled", "holes")
_DICTS = ("failures", "burials", "received_sequences", "cursors", "received_bases", "outbox", "sent_sequences")
"""Fields that State and _StateImage both have: stored as they are, RunSets stored as runs, dicts stored as sorted
pairs.
"""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_StateImage)


def dump(state: State) -> bytes:
    """The state as bytes."""
    leases = state.leases
    sessions, request_ids = state.calls.live(state.moment.elapsed)
    fields: dict[str, Any] = {name: getattr(state, name) for name in _UNCHANGED}
    fields |= {name: getattr(state, name).runs for name in _RUN_SETS}
    fields |= {name: sorted(getattr(state, name).items()) for name in _DICTS}
    image = _StateImage(
        version=VERSION,
        moment=(state.moment.elapsed, state.moment.wall),
        lanes=[[extent.astuple() for extent in lane] for lane in state.lanes.lanes],
        lines=[_line_image(key, line) for key, line in sorted(state.keys.lines(), key=lambda pair: pair[0]) if not line.merely_leased],
        leases=[_lease_image(lease) for _, lease in sorted(leases.live.items())],
        fully_completed=leases.fully_completed.runs,
        partly_completed=[(number, until, runs) for number, (until, runs) in sorted(leases.partly_completed.items())],
        forget_points=leases.forget_points,
        by_wall=_calendar_image(state.by_wall, state.due_by(by_wall=True)),
        by_elapsed=_calendar_image(state.by_elapsed, state.due_by(by_wall=False)),
        ttl=_calendar_image(state.ttl, lambda entry: state.completed.missing(entry.start, entry.stop)),
        requests=[],
        dedup=state.dedup.live(state.moment.elapsed),
        moved=[(start, *rest) for start, rest in sorted(state.moved.items())],
        fences=[fence.spec for fence in state.keys.fences],
        progress=[(offset, *progress) for offset, progress in sorted(state.live_progress().items())],
        sessions=sessions,
        request_ids=request_ids,
        call_watermark=state.calls.watermark,
        **fields,
    )
    return _encoder.encode(image)


def _line_image(key: int, line: KeyLine) -> _LineImage:
    until = line.until if line.backing_off else 0
    waiting = [extent.astuple() for extent in line.waiting]
    return _LineImage(key, line.lease, line.backing_off, until, line.parked, waiting, sorted(line.kept_positions.items()))


def _lease_image(lease: LiveLease) -> _LeaseImage:
    """Adjacent runs of one lane are joined, so that the bytes do not depend on how the lease took them."""
    given: list[tuple[int, int, int, bytes]] = []
    for start, stop, lane, keys in _uniform_parts(lease):
        if given and given[-1][1] == start and given[-1][2] == lane and bool(given[-1][3]) == bool(keys):
            given[-1] = (given[-1][0], stop, lane, given[-1][3] + keys)
        else:
            given.append((start, stop, lane, keys))
    completed = lease.completed.runs if lease.completed is not None else None
    return _LeaseImage(lease.number, lease.deadline, lease.timeout, lease.consumer, lease.size, given, completed)


def _uniform_parts(lease: LiveLease) -> Iterator[tuple[int, int, int, bytes]]:
    """The parts of a lease, cut so that in each part all items have a key or none has."""
    for start, stop, lane, packed in lease.parts():
        keys = unpack_keys(packed)
        if NO_KEY not in keys:
            yield start, stop, lane, packed
        else:
            for offset, key in enumerate(keys, start):
                yield offset, offset + 1, lane, pack_keys([key]) if key else b""


def _calendar_image(calendar: Calendar, part: Callable[[CalendarEntry], list[int]]) -> list[int]:
    """Flat entries (when, start, stop, tag) of the runs that `part` gives for each entry, adjacent ones joined."""
    flat: list[int] = []
    for entry in calendar:
        for start, stop in pairs(part(entry)):
            if flat and flat[-4] == entry.when and flat[-2] == start and flat[-1] == entry.tag:
                flat[-2] = stop
            else:
                flat += (entry.when, start, stop, entry.tag)
    return flat


def load(body: bytes | memoryview) -> State:
    """The state that `dump` was given. Raises CorruptLog if the bytes are no Base, or of a newer version."""
    try:
        image = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"a Base cannot be read ({error}); run verify, then repair") from error
    if image.version > VERSION:
        raise CorruptLog(f"a Base has version {image.version} and this Penstock knows {VERSION}; use a newer Penstock")
    state = State()
    state.moment = Moment(*image.moment)
    for name in _UNCHANGED:
        setattr(state, name, getattr(image, name))
    for name in _RUN_SETS:
        setattr(state, name, RunSet(getattr(image, name)))
    for name in _DICTS:
        setattr(state, name, dict(getattr(image, name)))
    for spec in image.fences:
        state.keys.fences.add(spec)
    for lane, extents in zip(state.lanes.lanes, image.lanes, strict=True):
        lane.extend(Extent(*extent) for extent in extents)
    _load_leases(state, image)
    for line in image.lines:
        _load_line(state, line)
    for calendar, flat in ((state.by_wall, image.by_wall), (state.by_elapsed, image.by_elapsed), (state.ttl, image.ttl)):
        each = iter(flat)
        for calendar_entry in zip(each, each, each, each, strict=True):
            calendar.add(*calendar_entry)
    state.moving.add_all(edge for entries in state.outbox.values() for entry in entries for edge in entry.runs)
    state.moved = {start: (stop, destination, base) for start, stop, destination, base in image.moved}
    state.moved_items = sum(stop - start for start, stop, _, _ in image.moved)
    state.progress = {offset: (number, text) for offset, number, text in image.progress}
    for offset in state.burials:
        if offset not in state.moving:
            state.buried_set.add(offset, offset + 1)
    former = [(name, RememberedCall(1, 0, deadline, [answer], FORMER)) for name, deadline, answer in image.requests]
    state.calls.restore(image.sessions, [*former, *image.request_ids], image.call_watermark)
    for dedup_id in image.dedup:
        state.dedup.restore(*dedup_id)
    for items in (state.completed, state.scheduled, state.passed_over, state.buried_set, state.moving):
        state.outside_lanes.add_all(items.runs)
    return state


def _load_leases(state: State, image: _StateImage) -> None:
    leases: Leases = state.leases
    for stored in image.leases:
        lease = LiveLease(Leased(stored.number, stored.deadline, stored.timeout, stored.consumer))
        lease.restore(stored.given, stored.size, RunSet(stored.completed) if stored.completed is not None else None)
        leases.add(lease)
        state.keys.hold(lease.keys(), lease.number)
        state.outside_lanes.add_all(lease.runs())
    leases.fully_completed = RunSet(image.fully_completed)
    leases.partly_completed = {number: (until, runs) for number, until, runs in image.partly_completed}
    leases.forget_points = image.forget_points


def _load_line(state: State, image: _LineImage) -> None:
    line = KeyLine(image.lease)
    line.backing_off, line.until, line.parked = image.backing_off, image.until, image.parked
    line.kept_positions = dict(image.kept_positions)
    for extent in image.waiting:
        line.waiting.append(Extent(*extent))
        state.passed_over.add(extent[0], extent[1])
    if line.backing_off is not None:
        state.backing_off[line.backing_off[0]] = image.key
    state.keys.by_key[image.key] = line
    state.keys.update_head(image.key, line)
