"""Transfers and fences among all other commands, compared with a plain model, with histories drawn by Hypothesis.

Owns: `TransferModel`, the model of tests/simulation with fences and an outbox, and the state machine that gives every
command to both. For a lease a fenced item counts as not ready yet: the model checks every lease and its order without
fenced items.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from penstock.rules import commands as c
from penstock.rules import machine, routing
from penstock.rules.explain import explain
from penstock.rules.fences import pack_slots, unpack_slots
from penstock.rules.item_states import TRANSITIONS, ItemState, Transition
from penstock.rules.outbox import moved_to, pack_destination
from penstock.rules.records import FenceSpec, Opened
from penstock.rules.runs import offsets
from penstock.rules.state import State
from penstock.words import ids
from penstock.words.clock import MINUTE, SECOND, Moment
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.limits import DEFAULT_PRIORITY, Policy
from simulation.partition.model import PartitionModel
from simulation.partition.model_state import EXPIRED, ComparedState
from simulation.partition.order import ModelItem
from tests.partition_under_test import slots_departed
from tests.rules.test_resize import A2
from tests.simulation.test_stateful import AHEAD, DEDUPS, POLICIES, PRIORITIES, START, TTLS, AllBlocks, RulesStateMachine

NAMES = [b"a", b"b", A2.encode()]
"""The last key has the slot of the first."""
SOME_NAMES = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)
ITEMS = st.lists(st.tuples(st.sampled_from([None, *NAMES]), PRIORITIES, AHEAD, TTLS, DEDUPS), min_size=1, max_size=4)
PLACES = st.sampled_from([pack_destination(1, 1), pack_destination(1, 2)])
WEIGHTS = {
    "produce": 5, "lease": 8, "settle": 5, "pass_time": 3, "operate": 2, "reload": 1,
    "send": 4, "confirm": 3, "release": 1, "fence": 2, "narrow": 2, "lift": 2, "depart": 1, "return": 1,
}  # fmt: skip
NEXT = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
Draw = Callable[..., Any]


@dataclass
class ModelFence:
    """Slots, or (when they are None) keys, whose items wait from `since` on."""

    number: int
    since: int
    slots: set[int] | None
    keys: set[int]

    def holds(self, item: ModelItem) -> bool:
        """Whether the item waits. An item at its old position counts with the offset at which it was first produced."""
        key = routing.key_id(item.key) if item.key is not None else 0
        covered = item.key is not None and (key in self.keys if self.slots is None else key & routing.SLOT_MASK in self.slots)
        return covered and item.earliest >= self.since


class TransferModel(PartitionModel):
    """The expected behaviour of a partition with fences and an outbox."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.fences: list[ModelFence] = []
        self.version = self.given = 0
        self.outbox: dict[bytes, list[tuple[int, list[int]]]] = {}
        self.last: dict[bytes, int] = {}
        self.elsewhere: dict[int, tuple[int, int, int]] = {}
        self.were_buried: set[int] = set()

    def fenced(self, item: ModelItem) -> bool:
        return any(fence.holds(item) for fence in self.fences)

    def view(self, now: Moment) -> ComparedState:
        view = super().view(now)
        left = [item for item in self.items if item.state is ItemState.MOVING]
        burials = {item.offset: (item.attempts, item.reason == EXPIRED) for item in left if item.offset in self.were_buried}
        failures = {offset: known for offset, known in view.failures.items() if self.items[offset].state is not ItemState.MOVING}
        return view._replace(failures=failures, burials=view.burials | burials)

    def check_answer(self, command: c.Command, now: Moment, answer: c.Answer | PenstockError) -> None:
        special = getattr(self, "_check_" + type(command).__name__.lower(), None)
        if special is None:
            super().check_answer(command, now, answer)
        else:
            self.step += 1
            special(command, now, answer)

    def _check_acquirelease(self, command: c.AcquireLease, now: Moment, answer: c.Answer) -> None:
        hidden = [item for item in self.items if item.state is ItemState.READY and self.fenced(item)]
        for item in hidden:
            item.state = ItemState.SCHEDULED
        super().check_answer(command, now, answer)
        for item in hidden:
            item.state = ItemState.READY

    def _check_seek(self, command: c.Seek, now: Moment, answer: c.Answer) -> None:
        """Transferred items are not sought; while there are fences, sought items go to the tail."""
        after = self.items[command.offset :]
        chosen = [item for item in after if item.state is ItemState.COMPLETED and item.offset not in self.elsewhere]
        assert answer == c.ItemCount(len(chosen)), f"seek gave {answer}, not {len(chosen)}"
        for item in chosen:
            item.lane, item.ttl_deadline = DEFAULT_PRIORITY, 0
            self.to_tail(item, now, position=None if self.fences else item.offset, cause=("sought", 0, item.offset))

    def _check_clear(self, command: c.Clear, now: Moment, answer: c.Answer) -> None:
        super().check_answer(command, now, answer)
        for item in self.items if command.buried else ():
            item.parked = False

    def _check_send(self, command: c.Send, now: Moment, answer: c.Answer | PenstockError) -> None:
        chosen = [self.items[offset] for offset in sorted(set(command.offsets))]
        if any(item.state not in (ItemState.READY, ItemState.SCHEDULED, ItemState.BURIED) for item in chosen):
            assert isinstance(answer, InvalidRequest), f"{chosen} were sent: {answer}"
            return
        assert answer == c.ItemCount(len(chosen)), f"send gave {answer}, not {len(chosen)}"
        for item in chosen:
            if item.state is ItemState.BURIED:
                self.were_buried.add(item.offset)
            else:
                item.attempts, item.reason = 0, ""
            item.state, item.jumps = ItemState.MOVING, False
        self.last[command.destination] = self.last.get(command.destination, 1 << 40) + 1
        entry = (self.last[command.destination], [item.offset for item in chosen])
        self.outbox.setdefault(command.destination, []).append(entry)

    def _check_confirmtransfer(self, command: c.ConfirmTransfer, now: Moment, answer: c.Answer) -> None:
        line = self.outbox.get(command.destination, [])
        if not line or line[0][0] != command.sequence:
            assert answer == c.ItemCount(0), f"a transfer that is not the first arrived: {answer}"
            return
        assert answer == c.ItemCount(1), f"an arrival gave {answer}"
        for index, offset in enumerate(line.pop(0)[1]):
            item = self.items[offset]
            item.state, item.attempts, item.reason = ItemState.COMPLETED, 0, ""  # it may park its key all the same
            self.elsewhere[offset] = (1, command.destination[-1], command.base + index)

    def _check_releaseparkedkey(self, command: c.ReleaseParkedKey, now: Moment, answer: c.Answer) -> None:
        parked = [item for item in self.items if item.parked and item.key is not None and routing.key_id(item.key) == command.key]
        assert answer == c.ItemCount(len(parked)), f"release gave {answer}, not {len(parked)}"
        for item in parked:
            item.parked = False

    def _check_addfences(self, command: c.AddFences, now: Moment, answer: c.Answer) -> None:
        if 0 < command.version <= self.version:
            assert answer == c.ItemCount(0), f"a version was taken twice: {answer}"
            return
        self.version = max(command.version, self.version)
        for spec in command.fences:
            self.given += 1
            since = max(0, spec.since or len(self.items))
            self.fences.append(ModelFence(self.given, since, set(unpack_slots(spec.slots or b"")), set()))
        for digest, left, number in command.dedup_ids:
            if self.dedups.get(digest, (0, 0))[0] <= now.elapsed:
                self.dedups[digest] = (now.elapsed + left, number)

    def _check_narrowfence(self, command: c.NarrowFence, now: Moment, answer: c.Answer) -> None:
        for fence in self.fences:
            if fence.number == command.number and fence.slots is not None:
                fence.slots, fence.keys = None, set(command.keys)
        self._drop_empty()

    def _check_liftfence(self, command: c.LiftFence, now: Moment, answer: c.Answer) -> None:
        lifted = [fence.keys & set(command.keys) for fence in self.fences if fence.number == command.number and fence.slots is None]
        assert answer == c.ItemCount(sum(map(len, lifted))), f"lift gave {answer}, not {lifted}"
        for fence in self.fences:
            if fence.number == command.number and fence.slots is None:
                fence.keys -= set(command.keys)
        self._drop_empty()

    def _drop_empty(self) -> None:
        self.fences = [fence for fence in self.fences if fence.slots or fence.keys]


class TransferStateMachine(RulesStateMachine):
    """All commands of a partition, with transfers, fences and strays; the next command is drawn by weight."""

    model: TransferModel
    produce = lease = settle = extend = repeat = configure = pause = clear = seek = redrive = None  # type: ignore[assignment]
    pass_time = set_the_date = due = reload = None  # type: ignore[assignment]

    @initialize(policy=POLICIES)
    def begin(self, policy: Policy) -> None:
        self.state, self.model, self.peek, self.now = State(policy), TransferModel(policy), AllBlocks(), START
        self.sent = {}
        self.departed: dict[int, int] = {}
        self._apply([Opened(1, "boot", 0)])

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        getattr(self, "_do_" + data.draw(st.sampled_from(NEXT), label="next"))(data.draw)

    def _offsets(self, *lives: ItemState) -> list[int]:
        return [item.offset for item in self.model.items if not lives or item.state in lives]

    def _do_produce(self, draw: Draw) -> None:
        """Items of moved slots are not produced here."""
        items = [item for item in draw(ITEMS) if item[0] is None or routing.slot(item[0]) not in self.departed]
        if items:
            RulesStateMachine.produce(self, items, None)

    def _do_lease(self, draw: Draw) -> None:
        self._send(
            c.AcquireLease(
                draw(st.sampled_from([1, 2, 100])), "consumer", 0, draw(st.integers(1, 3)), moved_slots=slots_departed(self.departed)
            )
        )

    def _do_settle(self, draw: Draw) -> None:
        for holding in self.model.live()[:1]:
            which = draw(st.none() | st.lists(st.sampled_from(holding.open), min_size=1, max_size=3, unique=True))
            delay = draw(st.sampled_from([0, 5 * SECOND]))
            verbs = [
                c.CompleteLeased(holding.number, which),
                c.RetryLeased(holding.number, which, delay, "no"),
                c.BuryLeased(holding.number, which, "no"),
            ]
            self._send(draw(st.sampled_from(verbs)))

    def _do_pass_time(self, draw: Draw) -> None:
        duration = draw(st.sampled_from([1 * SECOND, 5 * SECOND, 2 * MINUTE]))
        self.now = Moment(self.now.elapsed + duration, self.now.wall + duration)
        for _ in range(draw(st.integers(0, 3))):
            RulesStateMachine.due(self, draw(st.sampled_from([1, 100])))

    def _do_operate(self, draw: Draw) -> None:
        lives = draw(st.sampled_from(["buried", "buried", "ready", "scheduled", "leased"]))
        self._send(draw(st.sampled_from([c.Clear(**{lives: True}), c.Redrive(None), c.Seek(0), c.Seek(2)])))

    def _do_reload(self, draw: Draw) -> None:
        RulesStateMachine.reload(self)

    # -- transfers -----------------------------------------------------------------------------------

    def _do_send(self, draw: Draw) -> None:
        chosen = draw(st.sampled_from([self._offsets(ItemState.READY), self._offsets(ItemState.BURIED), self._offsets()]))
        if chosen:
            some = st.lists(st.sampled_from(chosen), min_size=1, max_size=2)
            self._tell(c.Send(draw(some), draw(PLACES)), Transition.SENT)

    def _do_confirm(self, draw: Draw) -> None:
        to = draw(PLACES)
        first = self.model.outbox.get(to) or [(1, [])]
        self._tell(
            c.ConfirmTransfer(to, first[0][0] + draw(st.sampled_from([0, 0, 0, 1, -1])), draw(st.integers(0, 50))), Transition.DELIVERED
        )

    def _do_release(self, draw: Draw) -> None:
        self._tell(c.ReleaseParkedKey(routing.key_id(draw(st.sampled_from(NAMES)))))

    # -- fences --------------------------------------------------------------------------------------

    def _do_fence(self, draw: Draw) -> None:
        names = draw(SOME_NAMES)
        groups = draw(st.sampled_from([[names], [[name] for name in names]]))
        since = draw(st.sampled_from([0, 0, 0, -1, 2]))
        specs = [FenceSpec(0, 3, 9, since, pack_slots(set(map(routing.slot, group)))) for group in groups]
        known = draw(st.sampled_from([[], [(bytes(16), 1 * MINUTE, ids.foreign_number(3, 5))]]))
        new = self.model.version + 1
        version, raised = draw(st.sampled_from([(new, specs), (new, specs), (max(1, new - 1), specs), (0, [])]))
        self._tell(c.AddFences(version, raised, known))

    def _do_narrow(self, draw: Draw) -> None:
        if self.model.fences:
            fence, names = draw(st.sampled_from(self.model.fences)), draw(st.lists(st.sampled_from(NAMES), unique=True))
            self._tell(c.NarrowFence(fence.number, [routing.key_id(name) for name in names if routing.slot(name) in (fence.slots or ())]))

    def _do_lift(self, draw: Draw) -> None:
        if self.model.fences:
            fence = draw(st.sampled_from(self.model.fences))
            self._tell(c.LiftFence(fence.number, [routing.key_id(name) for name in draw(SOME_NAMES)]))

    def _do_depart(self, draw: Draw) -> None:
        self.departed.update(dict.fromkeys(map(routing.slot, draw(SOME_NAMES)), len(self.model.items)))

    def _do_return(self, draw: Draw) -> None:
        self.departed.clear()

    # -- how it is told ------------------------------------------------------------------------------

    def _tell(self, command: c.Command, *events: Transition) -> None:
        before = self._view().states
        answer = self._decide(command)
        for earlier, then in zip(before, self._view().states, strict=True):
            assert earlier is then or then in [TRANSITIONS.get((earlier, event)) for event in events]
        self.model.check_answer(command, self.now, answer)

    def _send(self, command: c.Command) -> None:
        """Send strays before a lease."""
        command = self.sent.get(getattr(command, "request", None) or b"", command)
        while isinstance(command, c.AcquireLease):
            records, answer = machine.decide(self.state, command, self.now, self.peek)
            if isinstance(answer, c.StraysFound):
                assert answer.offsets
                assert all(self._astray(self.model.items[offset]) for offset in answer.offsets)
                self._tell(c.Send(answer.offsets, pack_destination(1, 1)), Transition.SENT)
            elif isinstance(answer, c.AskAgain):
                self._apply(records)
            else:
                taken = offsets(answer.runs) if isinstance(answer, c.LeaseAnswer) and records else []
                assert not [offset for offset in taken if self._surely_astray(self.model.items[offset])]
                break
        super()._send(command)

    def _mark(self, item: ModelItem) -> int | None:
        return self.departed.get(routing.slot(item.key)) if item.key is not None else None

    def _astray(self, item: ModelItem) -> bool:
        mark = self._mark(item)
        return item.state is ItemState.READY and mark is not None and item.earliest >= mark

    def _surely_astray(self, item: ModelItem) -> bool:
        """At the mark itself an item may have been ready, in its key's line, before the slot was moved."""
        mark = self._mark(item)
        return mark is not None and item.earliest > mark

    # -- what must hold ------------------------------------------------------------------------------

    @invariant()
    def what_is_on_its_way_is_in_the_outbox(self) -> None:
        real = {to: [(entry.sequence, offsets(entry.runs)) for entry in line] for to, line in self.state.outbox.items()}
        assert real == {to: line for to, line in self.model.outbox.items() if line}
        assert [moved_to(self.state, item.offset) for item in self.model.items] == [
            self.model.elsewhere.get(item.offset) for item in self.model.items
        ]

    @invariant()
    def every_item_is_explained(self) -> None:
        for item in self.model.items:
            said = explain(self.state, 0, item.offset, self.now, self.peek)
            assert said.state is item.state
            assert said.moved_to == self.model.elsewhere.get(item.offset)
            if said.waits_for is not None:
                assert any(self.model.fenced(one) for one in self.model.items if one.key == item.key)
            elif item.ttl_deadline and item.ttl_deadline <= self.now.elapsed:
                continue  # it is buried when the queue is next used
            elif item.state is ItemState.READY and self.model.fenced(item) and not self.state.paused_lease:
                assert said.held_by is not None, f"{item} is fenced and explained as {said}"


def test_transfers_and_fences_agree_with_the_model() -> None:
    run(examples=200, steps=40)


@pytest.mark.long
def test_transfers_and_fences_agree_with_the_model_in_long_histories() -> None:
    run(examples=2_000, steps=80)


def run(examples: int, steps: int) -> None:
    wanted = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(TransferStateMachine, settings=wanted)
