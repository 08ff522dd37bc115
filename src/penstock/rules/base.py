"""Base: the whole state as bytes, and back. Replay may start from one instead of from the beginning.

Owns: `dump` and `load`. The bytes are canonical: they depend on what the state means, not on how it came about. So the same
records give the same bytes, whether they were applied live, replayed from the first, or replayed from a Base in between (tested).
What follows from other parts is not stored but derived: `away`, `passed`, held keys, offered heads.
"""

from collections.abc import Callable, Iterator

import msgspec

from penstock.rules.calendar import Calendar, CalendarEntry
from penstock.rules.keys import KeyLine
from penstock.rules.lanes import Extent
from penstock.rules.leases import Leases, LiveLease
from penstock.rules.records import FenceSpec, Leased, pack_keys, unpack_keys
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import RunSet, pairs
from penstock.rules.state import Burial, Failure, OutboxEntry, RememberedAnswer, State
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog
from penstock.words.limits import Policy

VERSION = 1


class _GrantImage(msgspec.Struct, array_like=True):
    number: int
    deadline: int
    timeout: int
    consumer: str
    size: int
    given: list[tuple[int, int, int, bytes]]
    done: list[int] | None


class _LineImage(msgspec.Struct, array_like=True):
    key: int
    lease: int
    backing_off: tuple[int, int] | None
    until: int
    parked: list[int]
    waiting: list[tuple[int, int, int, int, int]]
    places: list[tuple[int, int]] = []


class _Image(msgspec.Struct, array_like=True):
    """Everything, in the order of State. New fields go to the end, with a default."""

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
    grants: list[_GrantImage]
    finished: list[int]
    past: list[tuple[int, int, list[int]]]
    marks: list[tuple[int, int]]
    by_wall: list[int]
    by_elapsed: list[int]
    ttl: list[int]
    failures: list[tuple[int, tuple[int, int, int, str]]]
    buried: list[tuple[int, Burial]]
    requests: list[tuple[bytes, int, RememberedAnswer]]
    dedup: list[tuple[bytes, int, int]]
    producers: list[tuple[bytes, int]]
    dropped: list[int] = []
    cursors: list[tuple[str, int]] = []
    arrivals: list[tuple[bytes, int]] = []
    outbox: list[tuple[bytes, list[OutboxEntry]]] = []
    sequences: list[tuple[bytes, int]] = []
    moved: list[tuple[int, int, bytes, int]] = []
    fence_version: int = 0
    fences_given: int = 0
    fences: list[FenceSpec] = []
    notes: list[tuple[int, int, str]] = []
    buried_dropped: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Image)


def dump(state: State) -> bytes:
    """The state as bytes."""
    leases = state.leases
    image = _Image(
        VERSION,
        state.policy,
        state.epoch,
        state.boot_id,
        state.clock_shift,
        state.leases_given,
        (state.moment.elapsed, state.moment.wall),
        state.next_offset,
        state.paused_lease,
        state.paused_produce,
        state.completed.runs,
        state.scheduled.runs,
        state.ttl_overdue.runs,
        state.lost.runs,
        [[extent.astuple() for extent in lane] for lane in state.lanes.lanes],
        [_line_image(key, line) for key, line in sorted(state.keys.lines(), key=lambda pair: pair[0]) if not line.merely_leased],
        [_grant_image(grant) for _, grant in sorted(leases.live.items())],
        leases.fully_completed.runs,
        [(lease, until, runs) for lease, (until, runs) in sorted(leases.partly_completed.items())],
        leases.forget_points,
        _calendar_image(state.by_wall, lambda entry: state.scheduled.within(entry.start, entry.stop)),
        _calendar_image(state.by_elapsed, lambda entry: state.scheduled.within(entry.start, entry.stop)),
        _calendar_image(state.ttl, lambda entry: state.completed.missing(entry.start, entry.stop)),
        sorted(state.failures.items()),
        sorted(state.burials.items()),
        state.requests.live(state.moment.elapsed),
        state.dedup.live(state.moment.elapsed),
        sorted(state.received_sequences.items()),
        state.dropped.runs,
        sorted(state.cursors.items()),
        sorted(state.received_bases.items()),
        sorted(state.outbox.items()),
        sorted(state.sent_sequences.items()),
        [(start, *rest) for start, rest in sorted(state.moved.items())],
        state.fence_version,
        state.fences_given,
        [fence.spec for fence in state.keys.fences],
        [(offset, *note) for offset, note in sorted(state.live_progress().items())],
        state.buried_dropped,
    )
    return _encoder.encode(image)


def _line_image(key: int, line: KeyLine) -> _LineImage:
    until = line.until if line.backing_off else 0
    waiting = [run.astuple() for run in line.waiting]
    return _LineImage(key, line.lease, line.backing_off, until, line.parked, waiting, sorted(line.kept_positions.items()))


def _grant_image(grant: LiveLease) -> _GrantImage:
    """Neighbouring runs of one lane are joined, however the grant came by them."""
    given: list[tuple[int, int, int, bytes]] = []
    for start, stop, lane, keys in _apart(grant):
        if given and given[-1][1] == start and given[-1][2] == lane and bool(given[-1][3]) == bool(keys):
            given[-1] = (given[-1][0], stop, lane, given[-1][3] + keys)
        else:
            given.append((start, stop, lane, keys))
    done = grant.completed.runs if grant.completed is not None else None
    return _GrantImage(grant.number, grant.deadline, grant.timeout, grant.consumer, grant.size, given, done)


def _apart(grant: LiveLease) -> Iterator[tuple[int, int, int, bytes]]:
    """The parts of a grant, each with a key for every item or for none."""
    for start, stop, lane, packed in grant.parts():
        keys = unpack_keys(packed)
        if NO_KEY not in keys:
            yield start, stop, lane, packed
        else:
            for offset, key in enumerate(keys, start):
                yield offset, offset + 1, lane, pack_keys([key]) if key else b""


def _calendar_image(calendar: Calendar, part: Callable[[CalendarEntry], list[int]]) -> list[int]:
    """Entries that still mean something, flat, joined where they can be."""
    flat: list[int] = []
    for entry in calendar:
        for start, stop in pairs(part(entry)):
            if flat and flat[-4] == entry.when and flat[-2] == start and flat[-1] == entry.tag:
                flat[-2] = stop
            else:
                flat += (entry.when, start, stop, entry.tag)
    return flat


def load(body: bytes | memoryview) -> State:
    """The state that `dump` saw."""
    try:
        image = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptLog(f"a Base cannot be read ({error}); run verify, then repair") from error
    if image.version > VERSION:
        raise CorruptLog(f"a Base has version {image.version} and this Penstock knows {VERSION}; use a newer Penstock")
    state = State(image.policy)
    for name in ("epoch", "boot_id", "clock_shift", "leases_given", "next_offset", "paused_lease", "paused_produce", "buried_dropped"):
        setattr(state, name, getattr(image, name))
    state.moment = Moment(*image.moment)
    for name in ("completed", "scheduled", "ttl_overdue", "lost", "dropped"):
        setattr(state, name, RunSet(getattr(image, name)))
    for barrier in image.fences:
        state.keys.fences.add(barrier)
    for lane, extents in zip(state.lanes.lanes, image.lanes, strict=True):
        lane.extend(Extent(*extent) for extent in extents)
    _load_leases(state, image)
    for one in image.lines:
        _load_line(state, one)
    for calendar, flat in ((state.by_wall, image.by_wall), (state.by_elapsed, image.by_elapsed), (state.ttl, image.ttl)):
        each = iter(flat)
        for entry in zip(each, each, each, each, strict=True):
            calendar.add(*entry)
    state.failures = {offset: Failure(*failure) for offset, failure in image.failures}
    state.burials = dict(image.buried)
    _load_outbox(state, image)
    for offset in state.burials:
        if offset not in state.moving:
            state.buried_set.add(offset, offset + 1)
    for request in image.requests:
        state.requests.restore(*request)
    for known in image.dedup:
        state.dedup.restore(*known)
    state.received_sequences = dict(image.producers)
    state.cursors = dict(image.cursors)
    for others in (state.completed, state.scheduled, state.passed_over, state.buried_set, state.moving):
        state.outside_lanes.add_all(others.runs)
    return state


def _load_outbox(state: State, image: _Image) -> None:
    state.received_bases = dict(image.arrivals)
    state.outbox = dict(image.outbox)
    state.sent_sequences = dict(image.sequences)
    state.moved = {start: (stop, destination, base) for start, stop, destination, base in image.moved}
    state.moved_items = sum(stop - start for start, stop, _, _ in image.moved)
    state.progress = {offset: (lease, text) for offset, lease, text in image.notes}
    state.fence_version, state.fences_given = image.fence_version, image.fences_given
    for line in state.outbox.values():
        for entry in line:
            state.moving.add_all(entry.runs)


def _load_leases(state: State, image: _Image) -> None:
    leases: Leases = state.leases
    for one in image.grants:
        grant = LiveLease(Leased(one.number, one.deadline, one.timeout, one.consumer))
        grant.given = one.given
        grant.count = sum(stop - start for start, stop, _, _ in one.given)
        grant.size = one.size
        grant.completed = RunSet(one.done) if one.done is not None else None
        leases.add(grant)
        state.keys.hold(grant.keys(), grant.number)
        state.outside_lanes.add_all(grant.runs())
    leases.fully_completed = RunSet(image.finished)
    leases.partly_completed = {lease: (until, runs) for lease, until, runs in image.past}
    leases.forget_points = image.marks


def _load_line(state: State, image: _LineImage) -> None:
    line = KeyLine(image.lease)
    line.backing_off, line.until, line.parked = image.backing_off, image.until, image.parked
    line.kept_positions = dict(image.places)
    for run in image.waiting:
        line.waiting.append(Extent(*run))
        state.passed_over.add(run[0], run[1])
    if line.backing_off is not None:
        state.backing_off[line.backing_off[0]] = image.key
    state.keys.by_key[image.key] = line
    state.keys.update_head(image.key, line)
