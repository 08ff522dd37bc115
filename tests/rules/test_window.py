"""Window, against a dict that never forgets on its own."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.rules.window import Window

NAMES = st.binary(min_size=1, max_size=1)


class AgainstADict(RuleBasedStateMachine):
    """An entry is answered for exactly its span. As its users do, an id is put only when it is not known."""

    @initialize()
    def begin(self) -> None:
        self.window: Window[int] = Window()
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
        self.window = Window()
        for name, deadline, value in known:
            self.window.restore(name, deadline, value)
        assert self.window.live(self.now) == known

    @invariant()
    def tells_the_same(self) -> None:
        live = {name: (deadline, value) for name, (deadline, value) in self.plain.items() if deadline > self.now}
        assert {name: (deadline, value) for name, deadline, value in self.window.live(self.now)} == live
        for name in self.plain:
            assert self.window.get(name, self.now) == (live[name][1] if name in live else None)
        assert len(self.window) >= len(live)


TestWindow = AgainstADict.TestCase


def test_what_is_over_is_let_go_when_something_new_comes() -> None:
    window: Window[int] = Window()
    for number in range(100):
        window.put(b"%d" % number, number, now=0, span=160)
    window.put(b"new", 1, now=200, span=160)
    assert len(window) == 1
