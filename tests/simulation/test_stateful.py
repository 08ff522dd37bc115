"""The rules alone (no log, no disk, no partition) compared with the model, on histories that Hypothesis draws.

Unlike the simulation, it reduces a failure to the shortest history that shows it.
"""

from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from penstock.rules import base, machine, routing
from penstock.rules import commands as c
from penstock.rules.calls import CallName
from penstock.rules.item_states import ItemState
from penstock.rules.records import Opened, Produced, Record
from penstock.rules.runs import offsets
from penstock.rules.state import Block, MissingBlocks, State
from penstock.words.batch import Batch
from penstock.words.clock import HOUR, MINUTE, SECOND, Moment
from penstock.words.errors import PenstockError
from penstock.words.limits import Policy
from simulation.partition import checks
from simulation.partition.model import PartitionModel

START = Moment(1 * HOUR, 1_000 * HOUR)
KEYS = st.sampled_from([None, b"a", b"b"])
PRIORITIES = st.sampled_from([5, 0, 9])
AHEAD = st.sampled_from([0, 5 * SECOND, 1 * HOUR])
TTLS = st.sampled_from([0, 10 * SECOND])
DEDUPS = st.sampled_from([None, None, bytes(16)])
ITEMS = st.lists(st.tuples(KEYS, PRIORITIES, AHEAD, TTLS, DEDUPS), min_size=1, max_size=4)
REQUESTS = st.sampled_from([None, None, None, b"1" * 16, b"2" * 16, b"3" * 16])
POLICIES = st.builds(
    Policy,
    lease_timeout=st.sampled_from([5 * SECOND, 60 * SECOND]),
    max_attempts=st.sampled_from([0, 1, 2, 10]),
    ttl=st.sampled_from([0, 0, 30 * SECOND]),
    priority_aging=st.sampled_from([0, 10 * SECOND]),
    dedup_window=st.sampled_from([1 * SECOND, 1 * MINUTE]),
    on_bury=st.sampled_from(["release", "park"]),
)


class AllBlocks:
    """A block source that holds all blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def find(self, offset: int) -> Block:
        for block in self.blocks:
            if block.base <= offset < block.stop:
                return block
        raise MissingBlocks([offset])


class RulesStateMachine(RuleBasedStateMachine):
    """One state, changed by decide and apply, and its model."""

    @initialize(policy=POLICIES)
    def begin(self, policy: Policy) -> None:
        self.state, self.model, self.peek, self.now = State(policy), PartitionModel(policy), AllBlocks(), START
        self.sent: dict[bytes, c.Command] = {}
        self._apply([Opened(1, "boot", 0)])

    # -- callers ---------------------------------------------------------------------------------------

    @rule(items=ITEMS, request=REQUESTS)
    def produce(self, items: list[tuple[bytes | None, int, int, int, bytes | None]], request: bytes | None) -> None:
        keys, priorities, ahead, ttls, dedups = zip(*items, strict=True)
        batch = Batch(
            [b"%d" % number for number in range(len(items))],
            keys,
            routing.key_ids(keys),
            priorities=bytes(priorities),
            ats=[self.now.wall + far if far else 0 for far in ahead],
            ttls=ttls,
            dedups=dedups,
        )
        self._send(c.Produce(batch, _named(request)))

    @rule(want=st.sampled_from([1, 2, 100]), per_key=st.integers(1, 3), request=REQUESTS)
    def lease(self, want: int, per_key: int, request: bytes | None) -> None:
        self._send(c.AcquireLease(want, "consumer", 0, per_key, _named(request)))

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), request=REQUESTS)
    def settle(self, data: st.DataObject, request: bytes | None) -> None:
        number = data.draw(st.sampled_from(list(self.model.leases)[-4:]), label="lease")
        lease = self.model.leases[number]
        some = st.sampled_from([*lease.open, *lease.done, 0])
        wanted = data.draw(st.none() | st.lists(some, min_size=1, max_size=4, unique=True), label="offsets")
        retry = self._retry(data, number, wanted)
        verbs = st.sampled_from([partial(c.CompleteLeased, number, wanted), partial(c.BuryLeased, number, wanted, "poison"), retry])
        self._send(data.draw(verbs, label="verb")(calls=_named(request)))

    @staticmethod
    def _retry(data: st.DataObject, number: int, wanted: list[int] | None) -> Any:
        delay = data.draw(st.sampled_from([0, 1 * SECOND, 1 * MINUTE]), label="delay")
        return partial(c.RetryLeased, number, wanted, delay, "failed", data.draw(st.booleans(), label="counted"))

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data(), timeout=st.sampled_from([0, 5 * MINUTE]))
    def extend(self, data: st.DataObject, timeout: int) -> None:
        self._send(c.ExtendLease(data.draw(st.sampled_from(list(self.model.leases)[-4:])), timeout))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self._send(self.sent[data.draw(st.sampled_from(sorted(self.sent)))])

    # -- operators -------------------------------------------------------------------------------------

    @rule(policy=POLICIES)
    def configure(self, policy: Policy) -> None:
        self._send(c.Configure(policy))

    @rule(lease=st.booleans(), produce=st.booleans())
    def pause(self, lease: bool, produce: bool) -> None:
        self._send(c.Pause(lease, produce))
        if lease and produce:
            self._send(c.Pause(False, False))

    @rule(states=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()))
    def clear(self, states: tuple[bool, bool, bool, bool]) -> None:
        self._send(c.Clear(*states))

    @rule(offset=st.integers(0, 20))
    def seek(self, offset: int) -> None:
        self._send(c.Seek(offset))

    @rule(chosen=st.none() | st.lists(st.integers(0, 20), max_size=3))
    def redrive(self, chosen: list[int] | None) -> None:
        self._send(c.Redrive([offset for offset in chosen if offset < len(self.model.items)] if chosen is not None else None))

    # -- time ------------------------------------------------------------------------------------------

    @rule(duration=st.sampled_from([1, 1 * SECOND, 10 * SECOND, 2 * MINUTE, 1 * HOUR]))
    def pass_time(self, duration: int) -> None:
        self.now = Moment(self.now.elapsed + duration, self.now.wall + duration)

    @rule(step=st.sampled_from([-1 * HOUR, 1 * HOUR]))
    def set_the_date(self, step: int) -> None:
        self.now = Moment(self.now.elapsed, self.now.wall + step)

    @rule(limit=st.sampled_from([1, 3, 1_000]))
    def due(self, limit: int) -> None:
        records = machine.decide_due(self.state, self.now, limit, self.peek)
        self._apply(records)
        self.model.due(self.now, self._view().states, offsets(self.state.ttl_overdue.runs), finished=not records)

    @rule()
    def reload(self) -> None:
        """Replace the state by itself after writing and reading it as a Base: nothing later may depend on that."""
        body = base.dump(self.state)
        self.state = base.load(body)
        assert base.dump(self.state) == body

    # -- checks ----------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        view = self._view()
        checks.check_same(view, self.model.view(self.now))
        checks.check_counts(self.state, view.states)

    def _view(self) -> Any:
        return checks.view_of(self.state, self.now)

    def _send(self, command: c.Command) -> None:
        calls: tuple[CallName, ...] = getattr(command, "calls", ())
        if calls:
            command = self.sent.setdefault(calls[0].session, command)
        before: list[ItemState] = self._view().states
        answer = self._decide(command)
        checks.check_transitions(type(command).__name__, before, self._view().states)
        self.model.check_answer(command, self.now, answer)

    def _decide(self, command: c.Command) -> c.Answer | PenstockError:
        while True:
            try:
                records, answer = machine.decide(self.state, command, self.now, self.peek)
            except PenstockError as refused:
                return refused
            self._apply(records)
            if not isinstance(answer, c.AskAgain):
                return answer

    def _apply(self, records: list[Record]) -> None:
        for record in records:
            if isinstance(record, Produced):
                batch = record.batch
                keys = None if batch.key_ids is None else list(batch.key_ids)
                self.peek.blocks.append(Block(record.base, record.base + len(batch), keys, batch.priorities))
            machine.apply(self.state, record, self.now)


def _named(request: bytes | None) -> tuple[CallName, ...]:
    return () if request is None else (CallName(request, 1, b"content"),)


def test_the_rules_agree_with_the_model() -> None:
    run(examples=300, steps=40)


@pytest.mark.long
def test_the_rules_agree_with_the_model_at_length() -> None:
    run(examples=2_000, steps=80)


def run(examples: int, steps: int) -> None:
    wanted = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(RulesStateMachine, settings=wanted)
