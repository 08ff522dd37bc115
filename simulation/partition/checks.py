"""Checks of a partition that hold after every step.

Owns: `view_of` (a partition's state in the form that is compared with the model's) and the invariants that need no
model.
Nothing here changes a partition.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.logs import codec
from penstock.logs.log import Frame, FrameType, Gap
from penstock.loop.item_cache import Items
from penstock.loop.partition import Partition
from penstock.rules import base, machine
from penstock.rules.events import EventReplay, EventRuns
from penstock.rules.item_states import TRANSITIONS, ItemState, Transition
from penstock.rules.records import Record
from penstock.rules.routing import NO_KEY
from penstock.rules.runs import offsets
from penstock.rules.state import Counts, State
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from penstock.words.limits import DEFAULT_PRIORITY
from simulation.partition.model_state import EXPIRED, ComparedState

EVENTS = {
    "Produce": (Transition.PRODUCED, Transition.SCHEDULED),
    "AcquireLease": (Transition.LEASED,),
    "CompleteLeased": (Transition.COMPLETED,),
    "RetryLeased": (Transition.RETRIED, Transition.DELAYED, Transition.BURIED),
    "BuryLeased": (Transition.BURIED, Transition.RETRIED),
    "ExtendLease": (Transition.EXTENDED,),
    "Configure": (Transition.BURIED,),
    "Pause": (),
    "Clear": (Transition.CLEARED,),
    "Seek": (Transition.SOUGHT,),
    "Redrive": (Transition.REDRIVEN,),
    "CancelWaiting": (Transition.CANCELLED,),
    "SkipWaiting": (Transition.CLEARED,),
    "RescheduleWaiting": (Transition.RESCHEDULED, Transition.DUE),
    "PutCursor": (),
    "ForgetCursor": (),
    "due": (Transition.DUE, Transition.LEASE_EXPIRED, Transition.BURIED, Transition.TTL_EXPIRED),
}
"""The transitions that each command may cause. (When an item of a unit is buried, the later ones are retried.)"""

COUNTED = [ItemState(name) for name in Counts._fields]


def view_of(state: State, now: Moment) -> ComparedState:
    """A partition's state, as it is compared with the model."""
    return ComparedState(
        states_of(state),
        {offset: (failure.attempts, failure.reason) for offset, failure in state.failures.items()},
        {offset: (burial.attempts, burial.reason == EXPIRED) for offset, burial in state.burials.items()},
        {number: (lease.deadline, sorted(offsets(lease.runs()))) for number, lease in state.leases.live.items()},
        (state.paused_lease, state.paused_produce),
        state.policy,
        set(offsets(state.ttl_overdue.runs)),
        {name for entries in state.calls.live(now.elapsed) for name, _ in entries},
        {name: offset for name, _, offset in state.dedup.live(now.elapsed) if offset not in state.cancelled},
        set(offsets(state.dropped.runs)),
        dict(state.cursors),
    )


def states_of(state: State) -> list[ItemState]:
    """The state of every item."""
    state_of = state.state_of
    return [state_of(offset) or ItemState.COMPLETED for offset in range(state.next_offset)]


def check_same(real: ComparedState, expected: ComparedState) -> None:
    """Fail with the first difference between a partition and its model."""
    if real == expected:
        return
    for name in ComparedState._fields:
        is_, should = getattr(real, name), getattr(expected, name)
        if name == "states":
            is_, should = dict(enumerate(is_)), dict(enumerate(should))
        if isinstance(is_, dict) and isinstance(should, dict):
            wrong = sorted(key for key in is_.keys() | should.keys() if is_.get(key) != should.get(key))
            assert not wrong, f"{name} of {wrong}: {[is_.get(key) for key in wrong]}, not {[should.get(key) for key in wrong]}"
        assert is_ == should, f"{name}: {is_}, not {should}"


def check_transitions(kind: str, before: Sequence[ItemState], after: Sequence[ItemState]) -> None:
    """Every change of an item's state is in the table of transitions, for this kind of command."""
    for offset, then in enumerate(after):
        earlier = before[offset] if offset < len(before) else None
        if earlier is not then:
            known = [TRANSITIONS.get((earlier, event)) for event in EVENTS[kind]]
            assert then in known, f"{kind} made item {offset} {then} from {earlier}, which is in no table"


def check_counts(state: State, states: Sequence[ItemState]) -> None:
    """The state's counters, and its set of parked keys, equal a recount; items without a key are in no key line."""
    assert NO_KEY not in state.keys.by_key, "items without a key wait for each other"
    recount = tuple([states.count(one) for one in COUNTED])
    assert state.counts == recount, f"{state.counts}, but counted one by one {Counts(*recount)}"
    parked = {key for key, line in state.keys.lines() if line.parked}
    assert state.keys.parked == parked, f"the parked keys are {sorted(state.keys.parked)}, but a search finds {sorted(parked)}"


def check_explained(partition: Partition, offset: int, states: Sequence[ItemState]) -> None:
    """The answer of `explain` agrees with the item's state."""
    said = partition.explain(offset)
    assert said.state is states[offset], f"item {offset} is {states[offset]} and was explained as {said}"
    if said.lease:
        assert offset in offsets(partition.state.leases.live[said.lease].runs()), f"{said}: that lease does not hold item {offset}"
    if said.held_by is not None:
        assert states[said.held_by] not in (ItemState.COMPLETED, ItemState.CANCELLED), f"{said}: item {said.held_by} is completed"


def check_base(state: State) -> None:
    """A state survives being written as a Base and read again."""
    body = base.dump(state)
    loaded = base.load(body)
    assert base.dump(loaded) == body, "a state is not the same after it was written as a Base and read"
    assert loaded.keys.parked == state.keys.parked, "other keys are parked after a state was written as a Base and read"


def check_replay(partition: Partition) -> None:
    """Replaying the log gives the state: from the latest Base, and from the first frame.

    Each Base in the log equals the replay up to it, unless retention deleted frames before it. The events that are
    reported for a record are exactly its effects on items (`EventChecker`).
    """
    whole, latest = EventChecker(), State()
    last, unbroken = 0, True
    frames: list[Frame] = []
    for frame in partition.log.frames():
        assert not isinstance(frame, Gap), f"there is a gap: {frame}"
        frames.append(frame)
    latest_base = max((number for number, frame in enumerate(frames) if frame.type is FrameType.BASE), default=-1)
    for number, frame in enumerate(frames):
        unbroken, last = unbroken and frame.sequence == last + 1, frame.sequence
        if frame.type is FrameType.BASE:
            same = base.dump(whole.replay.state) == bytes(frame.body)
            assert same or not unbroken, f"the Base of frame {frame.sequence} is not the state that the frames before it give"
            latest = base.load(frame.body) if number == latest_base else latest
            whole, unbroken = (whole, True) if unbroken else (EventChecker(base.load(frame.body)), True)
            continue
        if not unbroken:
            continue  # on to the next Base
        now = Moment(frame.elapsed, frame.wall)
        for record in codec.decode_frame(frame, outline=True) if number > latest_base else ():
            machine.apply(latest, record, now)
        for record in codec.decode_frame(frame):
            whole.see(record, now)
    body = base.dump(partition.state)
    assert base.dump(latest) == body, "replay from the latest Base gives another state"
    assert base.dump(whole.replay.state) == body, "replay from the first frame gives another state"


class EventChecker:
    """Follows the state of items by the events that are reported for each record.

    Every event must be in the table of transitions and lead to the item's actual state. An item without an event keeps
    its state.
    """

    def __init__(self, state: State | None = None) -> None:
        self.replay = EventReplay(state)
        known = self.replay.state
        self.states: dict[int, ItemState] = dict(enumerate(states_of(known)))
        self._counts = Counter(self.states.values())

    def see(self, record: Record, now: Moment) -> list[EventRuns]:
        """Apply a record, check the events that are reported for it, and return them."""
        events = self.replay.apply(record, now)
        for happening in events:
            for offset in offsets(happening.runs):
                self._move(offset, happening.event)
        state = self.replay.state
        recount = tuple([self._counts[one] for one in COUNTED])
        same = len(self.states) == state.produced and state.counts == recount
        assert same, f"{record}: its events give {Counts(*recount)._asdict()}, the state has {state.counts}"
        return events

    def _move(self, offset: int, event: Transition) -> None:
        before, after = self.states.get(offset), self.replay.state.state_of(offset)
        assert after is not None, f"item {offset}, which was never produced, has the event {event}"
        assert TRANSITIONS.get((before, event)) is after, f"item {offset} was {before}, has the event {event}, and is {after}"
        self.states[offset] = after
        self._counts[after] += 1
        if before is not None:
            self._counts[before] -= 1


class ItemContent(NamedTuple):
    """One item as its producer gave it."""

    payload: bytes
    key: bytes | None
    headers: bytes | None
    kind: str | None
    encoding: str | None
    reference: str | None
    priority: int
    at: int
    ttl: int


def contents(batch: Batch) -> list[ItemContent]:
    """The items of a batch, one by one."""
    count = len(batch)
    columns = (batch.keys, batch.headers, batch.kinds, batch.encodings, batch.references)
    optional = [column or [None] * count for column in columns]
    priorities = batch.priorities or bytes([DEFAULT_PRIORITY]) * count
    ats, ttls = batch.ats or [0] * count, batch.ttls or [0] * count
    return [ItemContent(*row) for row in zip(batch.payloads, *optional, priorities, ats, ttls, strict=True)]


def check_read_back(found: Sequence[Items], produced: dict[int, ItemContent], wanted: Sequence[int]) -> None:
    """Items are read as they were produced, in the order asked for."""
    got = [(part.start + index, content) for part in found for index, content in enumerate(contents(part.batch))]
    assert [offset for offset, _ in got] == list(wanted), f"reading {wanted} gave {[offset for offset, _ in got]}"
    for offset, content in got:
        assert content == produced[offset], f"item {offset} was produced as {produced[offset]} and read back as {content}"
