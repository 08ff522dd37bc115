"""AnswerWindow and DedupIds, each compared with a plain dict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.rules.remembered_ids import AnswerWindow, DedupIds

NAMES = st.binary(min_size=1, max_size=1)


class WindowStateMachine(RuleBasedStateMachine):
    """An entry is found until its deadline. An id is put only if it is unknown, as the rules do it."""

    @initialize()
    def begin(self) -> None:
        self.window: AnswerWindow[int] = AnswerWindow()
        self.plain: dict[bytes, tuple[int, int]] = {}
        self.now = 1_000

    @rule(name=NAMES, value=st.integers(), span=st.sampled_from([1, 7, 160, 1_000]))
    def put(self, name: bytes, value: int, span: int) -> None:
        if self.window.get(name, self.now) is None:
            self.window.put(name, value, self.now, span)
            self.plain[name] = (self.now + span, value)

    @rule(passes=st.integers(0, 300))
    def advance(self, passes: int) -> None:
        self.now += passes

    @rule()
    def forget(self) -> None:
        self.window.forget(self.now)

    @rule()
    def restore(self) -> None:
        known = self.window.live(self.now)
        self.window = AnswerWindow()
        for name, deadline, value in known:
            self.window.restore(name, deadline, value)
        assert self.window.live(self.now) == known

    @invariant()
    def agrees_with_the_dict(self) -> None:
        live = {name: (deadline, value) for name, (deadline, value) in self.plain.items() if deadline > self.now}
        assert {name: (deadline, value) for name, deadline, value in self.window.live(self.now)} == live
        for name in self.plain:
            assert self.window.get(name, self.now) == (live[name][1] if name in live else None)
        assert len(self.window) >= len(live)


TestWindow = WindowStateMachine.TestCase


def test_expired_answers_are_deleted_by_the_next_put() -> None:
    window: AnswerWindow[int] = AnswerWindow()
    for number in range(100):
        window.put(b"%d" % number, number, now=0, span=160)
    window.put(b"new", 1, now=200, span=160)
    assert len(window) == 1


DIGESTS = st.sampled_from([bytes([first, 0]) + bytes([rest]) * 14 for first in (0, 1) for rest in (0, 1, 255)] + [b"\0\0" + b"\0\1" * 7])
STEPS = st.lists(st.tuples(DIGESTS, st.integers(0, 30), st.integers(1, 50)), max_size=60)


@given(STEPS)
def test_an_id_is_known_until_its_deadline_and_not_after(steps: list[tuple[bytes, int, int]]) -> None:
    ids, known, now = DedupIds(), dict[bytes, tuple[int, int]](), 0
    for offset, (name, passing, span) in enumerate(steps):
        now += passing
        for asked in {asked for asked, _, _ in steps}:
            deadline, first = known.get(asked, (0, 0))
            assert ids.get(asked, now) == (first if deadline > now else None)
        if ids.get(name, now) is None:
            ids.put_all([name], offset, now, span)
            known[name] = (now + span, offset)
    live = sorted((deadline, name, offset) for name, (deadline, offset) in known.items() if deadline > now)
    assert ids.live(now) == [(name, deadline, offset) for deadline, name, offset in live]
    ids.forget(now)
    assert len(ids) == len(live)
    assert [ids.get(name, now) for _, name, _ in live] == [offset for _, _, offset in live]


def test_bytes_across_two_entries_are_not_found_as_an_id() -> None:
    ids = DedupIds()
    ids.put_all([b"aa" + b"\x01" * 14], 0x0101010101010101, 0, 0x0101010101010101)
    assert ids.get(b"aa" + b"\x01" * 14, 0) == 0x0101010101010101
    ids.put_all([b"aa" + b"\x02" * 14], 7, 0, 9)
    assert ids.get(b"aa" + b"\x01" * 13 + b"\x02", 0) is None


def test_expired_ids_are_deleted_when_their_bucket_is_used() -> None:
    ids = DedupIds()
    for number in range(1_000):
        ids.put_all([b"aa" + number.to_bytes(14, "little")], number, number, 10)
    assert len(ids) <= 11


@pytest.mark.parametrize("add", ["put_all", "restore"])
def test_an_id_with_an_earlier_deadline_than_the_others_is_not_counted_after_it(add: str) -> None:
    """The window was shortened, or ids of moved slots have less time left."""
    ids = DedupIds()
    ids.put_all([b"aa" + bytes(14)], 0, now=0, span=1_000)
    ids.forget(0)
    if add == "put_all":
        ids.put_all([b"bb" + bytes(14), None], 1, now=0, span=10)
    else:
        ids.restore(b"bb" + bytes(14), 10, 1)
    assert [ids.count(now) for now in (9, 10, 999, 1_000)] == [2, 1, 1, 0]
    ids.limit(1, now=10)
    assert len(ids) == 1, "limit deletes it"
