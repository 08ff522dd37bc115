"""What must be true of a partition after every step, whatever was asked of it.

Owns: `look` (a partition's state as a `ComparedState`, to be compared with the model's) and the invariants that need no model.
Everything here reads; nothing changes what it looks at.
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
    "PutCursor": (),
    "ForgetCursor": (),
    "due": (Transition.DUE, Transition.LEASE_EXPIRED, Transition.BURIED, Transition.TTL_EXPIRED),
}
"""What a step of each kind may do to an item. (The later items of a unit are retried when an earlier one is buried.)"""

COUNTED = [ItemState(name) for name in Counts._fields]


def view_of(state: State, now: Moment) -> ComparedState:
    """What a partition shows."""
    return ComparedState(
        states_of(state),
        {offset: (failure.attempts, failure.reason) for offset, failure in state.failures.items()},
        {offset: (burial.attempts, burial.reason == EXPIRED) for offset, burial in state.burials.items()},
        {number: (grant.deadline, sorted(offsets(grant.runs()))) for number, grant in state.leases.live.items()},
        (state.paused_lease, state.paused_produce),
        state.policy,
        set(offsets(state.ttl_overdue.runs)),
        {name for name, _, _ in state.requests.live(now.elapsed)},
        {name: offset for name, _, offset in state.dedup.live(now.elapsed)},
        set(offsets(state.dropped.runs)),
        dict(state.cursors),
    )


def states_of(state: State) -> list[ItemState]:
    """The state of every item."""
    state_of = state.state_of
    return [state_of(offset) or ItemState.COMPLETED for offset in range(state.next_offset)]


def check_same(real: ComparedState, expected: ComparedState) -> None:
    """A partition is what its model says."""
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
    """Every item that moved went a way that the table knows."""
    for offset, then in enumerate(after):
        earlier = before[offset] if offset < len(before) else None
        if earlier is not then:
            known = [TRANSITIONS.get((earlier, event)) for event in EVENTS[kind]]
            assert then in known, f"{kind} made item {offset} {then} from {earlier}, which is in no table"


def check_counts(state: State, states: Sequence[ItemState]) -> None:
    """Counts are a recount."""
    recount = tuple([states.count(life) for life in COUNTED])
    assert state.counts == recount, f"{state.counts}, but counted one by one {Counts(*recount)}"


def check_explained(partition: Partition, offset: int, states: Sequence[ItemState]) -> None:
    """What `explain` says is so."""
    said = partition.explain(offset)
    assert said.state is states[offset], f"item {offset} is {states[offset]} and was explained as {said}"
    if said.lease:
        assert offset in offsets(partition.state.leases.live[said.lease].runs()), f"{said}: that lease does not hold item {offset}"
    if said.held_by is not None:
        assert states[said.held_by] is not ItemState.COMPLETED, f"{said}: item {said.held_by} is completed"


def check_base(state: State) -> None:
    """A Base is the whole state."""
    body = base.dump(state)
    assert base.dump(base.load(body)) == body, "a state changed on its way through a Base"


def check_replay(partition: Partition) -> None:
    """The log tells the state, from its latest Base on and from its first frame on, and each Base on the way is what was told up to there
    (unless retention took frames in between). What each record is said to do to items it does, and nothing else."""
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
            told = base.dump(whole.teller.state) == bytes(frame.body)
            assert told or not unbroken, f"the Base of frame {frame.sequence} is not what the frames before it tell"
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
    assert base.dump(whole.teller.state) == body, "replay from the first frame gives another state"


class EventChecker:
    """Follows items by what is told of each record: every event must be in the table and lead to where the item is found then, and where
    nothing is told of an item it stays."""

    def __init__(self, state: State | None = None) -> None:
        self.teller = EventReplay(state)
        known = self.teller.state
        self.lives: dict[int, ItemState] = dict(enumerate(states_of(known)))
        self._counts = Counter(self.lives.values())

    def see(self, record: Record, now: Moment) -> list[EventRuns]:
        """Let a record be told and applied."""
        told = self.teller.apply(record, now)
        for happening in told:
            for offset in offsets(happening.runs):
                self._move(offset, happening.event)
        state = self.teller.state
        recount = tuple([self._counts[life] for life in COUNTED])
        same = len(self.lives) == state.next_offset and state.counts == recount
        assert same, f"{record}: told {Counts(*recount)._asdict()}, done {state.counts}"
        return told

    def _move(self, offset: int, event: Transition) -> None:
        before, after = self.lives.get(offset), self.teller.state.state_of(offset)
        assert after is not None, f"item {offset}, which never was, is told to be {event}"
        assert TRANSITIONS.get((before, event)) is after, f"item {offset} was {before}, is told to be {event}, and is {after}"
        self.lives[offset] = after
        self._counts[after] += 1
        if before is not None:
            self._counts[before] -= 1


class ItemContent(NamedTuple):
    """What a producer gave of one item."""

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
    """Items come back as they were produced, in the order asked for."""
    got = [(part.start + index, content) for part in found for index, content in enumerate(contents(part.batch))]
    assert [offset for offset, _ in got] == list(wanted), f"reading {wanted} gave {[offset for offset, _ in got]}"
    for offset, content in got:
        assert content == produced[offset], f"item {offset} was produced as {produced[offset]} and read back as {content}"
