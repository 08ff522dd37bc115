"""The memory of calls, compared with a plain model; and fingerprints."""

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.rules import base, calls
from penstock.rules.calls import (
    MARGIN,
    CallMemory,
    CallName,
    RememberedAnswer,
    batch_content,
    fingerprint,
    settle_part,
)
from penstock.rules.state import State
from penstock.words.clock import MINUTE, SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, QueueFull
from tests.partition_under_test import PartitionUnderTest, items

LIMIT = 3


class Known(NamedTuple):
    """A call of the model."""

    number: int
    at: int
    deadline: int
    answers: list[int]


class CallMemoryStateMachine(RuleBasedStateMachine):
    """Of a session the newest call is remembered until its deadline, of at most LIMIT sessions; of request ids all."""

    @initialize()
    def begin(self) -> None:
        self.memory = CallMemory(LIMIT)
        self.sessions: dict[bytes, Known] = {}
        self.requests: dict[bytes, Known] = {}
        self.evicted = [calls.NEVER]
        self.now = 1_000
        self.numbers = 0

    @rule(session=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), new=st.booleans(), span=st.sampled_from([50, 300]), both=st.booleans())
    def put(self, session: bytes, new: bool, span: int, both: bool) -> None:
        self.numbers += 1
        known = self.sessions.get(session)
        number = self.numbers if new or known is None else known.number
        names = [CallName(session, number), *([CallName(session, 1, b"content")] if both else [])]
        self.memory.put(names, [RememberedAnswer(count=self.numbers)], self.now, span)
        self._model_put(self.sessions, session, number, span)
        if both:
            self._model_put(self.requests, session, 1, span)
        live = sorted((entry.at, name) for name, entry in self.sessions.items() if entry.deadline > self.now)
        order = [name for name in self.sessions if self.sessions[name].deadline > self.now]
        for name in order[: max(0, len(live) - LIMIT)]:
            self.evicted.append(self.sessions.pop(name).at)

    def _model_put(self, entries: dict[bytes, Known], name: bytes, number: int, span: int) -> None:
        known = entries.pop(name, None)
        kept = known.answers if known is not None and known.number == number and known.deadline > self.now else []
        entries[name] = Known(number, self.now, self.now + span, [*kept, self.numbers])

    @rule(passes=st.integers(0, 120))
    def advance(self, passes: int) -> None:
        self.now += passes

    @rule()
    def restore(self) -> None:
        sessions, requests = self.memory.live(self.now)
        again = CallMemory(LIMIT)
        again.restore(sessions, requests, self.memory.watermark)
        assert again.live(self.now) == (sessions, requests)
        self.memory = again

    @invariant()
    def agrees_with_the_model(self) -> None:
        for entries, content in ((self.sessions, b""), (self.requests, b"content")):
            for name, known in entries.items():
                found = self.memory.find(CallName(name, known.number, content), self.now)
                expected = known.answers if known.deadline > self.now else None
                assert (found and [answer.count for answer in found.answers]) == expected
        assert self.memory.watermark == max(self.evicted)


TestCallMemory = CallMemoryStateMachine.TestCase


def put(memory: CallMemory, session: bytes, number: int = 1, now: int = 0) -> None:
    memory.put([CallName(session, number)], [RememberedAnswer()], now, 15 * MINUTE)


def test_an_older_call_of_a_session_is_refused() -> None:
    memory = CallMemory()
    put(memory, b"s", 5)
    assert memory.find(CallName(b"s", 5), 0) is not None
    assert memory.find(CallName(b"s", 6), 0) is None
    with pytest.raises(OutcomeUnknown, match="call 4 of this session came after its call 5"):
        memory.find(CallName(b"s", 4), 0)


def test_a_repetition_from_before_an_eviction_is_refused_and_one_after_it_is_not() -> None:
    memory = CallMemory(2)
    for second in range(3):
        put(memory, b"%d" % second, now=second * SECOND)
    assert memory.watermark == 0
    with pytest.raises(OutcomeUnknown, match="repeated too late"):
        memory.check_not_evicted(MARGIN, now=9 * SECOND)
    memory.check_not_evicted(MARGIN + 1, now=9 * SECOND)


def test_a_repetition_of_a_call_that_is_as_old_as_the_memory_is_refused() -> None:
    memory = CallMemory()
    memory.check_not_evicted(0, 15 * MINUTE - MARGIN - 1)
    with pytest.raises(OutcomeUnknown, match="first sent 899 s ago"):
        memory.check_not_evicted(0, 15 * MINUTE - MARGIN)


def test_a_request_id_with_other_content_is_refused() -> None:
    memory = CallMemory()
    memory.put([CallName(b"r", 1, b"one")], [RememberedAnswer()], 0, 10)
    with pytest.raises(InvalidRequest, match="used before, for another request"):
        memory.find(CallName(b"r", 1, b"two"), 0)
    assert memory.find(CallName(b"r", 1, b"two"), 10) is None, "it is forgotten"
    assert memory.find(CallName(b"r", 1), 0) is None, "a session of the same bytes is another name"


def test_too_many_request_ids_are_refused_and_none_is_evicted(monkeypatch: pytest.MonkeyPatch, partition: PartitionUnderTest) -> None:
    monkeypatch.setattr(calls, "MAX_REQUEST_IDS", 2)
    partition.store(items("a"), request="1")
    partition.store(items("b"), request="2")
    with pytest.raises(QueueFull, match="remembers 2 request ids"):
        partition.store(items("c"), request="3")
    assert partition.store(items("a"), request="1").repeated
    partition.store(items("d"))
    partition.advance(15 * 60 + 1)
    assert not partition.store(items("c"), request="3").repeated


def test_a_state_of_a_version_without_sessions_is_loaded() -> None:
    image: list[Any] = msgspec.msgpack.decode(base.dump(State()))
    fields = list(base._StateImage.__struct_fields__)
    old = image[: fields.index("sessions")]
    old[fields.index("requests")] = [[bytes(16), 77, [3, 2, None, 0, [], []]]]
    state = base.load(msgspec.msgpack.encode(old))
    assert len(state.calls) == 1
    _, [(name, known)] = state.calls.live(0)
    assert (name, known.deadline, known.answers) == (bytes(16), 77, [RememberedAnswer(3, 2)])
    assert base.load(base.dump(state)).calls.live(0) == state.calls.live(0)


def test_a_fingerprint_covers_everything_but_times() -> None:
    one = items("ab", keys=["k", None], priority=3)
    same = items("ab", keys=["k", None], priority=3, at=77, ttl=5)
    assert fingerprint(batch_content(one)) == fingerprint(batch_content(same))
    others = [items("ab"), items("ab", keys=["k", None]), items("ab", keys=[None, "k"], priority=3)]
    others.append(items("ac", keys=["k", None], priority=3))
    assert len({fingerprint(batch_content(other)) for other in [one, *others]}) == 5


def test_parts_of_a_settle_are_told_apart_by_lease_and_items() -> None:
    parts = [(7, None), (8, None), (7, [1]), (7, [2]), (7, [1, 2]), (8, [1])]
    assert len({settle_part(lease, offsets) for lease, offsets in parts}) == len(parts)
