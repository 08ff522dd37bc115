"""Calendar, compared with a sorted list."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.rules.calendar import Calendar, CalendarEntry

WHEN = st.integers(0, 5_000_000)  # a few buckets of about a second
START = st.integers(0, 1_000).map(lambda number: 10 * number)  # far enough apart that no two entries are joined


class CalendarStateMachine(RuleBasedStateMachine):
    """Entries come out by (when, start), in any sequence of operations."""

    @initialize()
    def begin(self) -> None:
        self.calendar = Calendar()
        self.plain: list[CalendarEntry] = []

    @rule(when=WHEN, start=START, tag=st.integers(0, 31))
    def add(self, when: int, start: int, tag: int) -> None:
        self.calendar.add(when, start, start + 1, tag)
        self.plain = sorted([*self.plain, CalendarEntry(when, start, start + 1, tag)])

    @rule(now=WHEN, limit=st.integers(1, 5))
    def due(self, now: int, limit: int) -> None:
        assert self.calendar.due(now, limit) == [entry for entry in self.plain if entry.when <= now][:limit]

    @rule(now=WHEN, limit=st.integers(1, 5))
    def work_through(self, now: int, limit: int) -> None:
        found = self.calendar.due(now, limit)
        if found:
            self.discard(found[-1].when, found[-1].start)

    @rule(when=WHEN, start=START)
    def discard(self, when: int, start: int) -> None:
        self.calendar.discard(when, start)
        self.plain = [entry for entry in self.plain if (entry.when, entry.start) > (when, start)]

    @rule(divisor=st.integers(2, 4))
    def keep(self, divisor: int) -> None:
        self.calendar.keep(lambda entry: [] if entry.start % divisor else [entry.start, entry.stop])
        self.plain = [entry for entry in self.plain if not entry.start % divisor]

    @invariant()
    def agrees_with_the_list(self) -> None:
        assert list(self.calendar) == self.plain
        assert bool(self.calendar) == bool(self.plain)
        assert self.calendar.next() == (self.plain[0].when if self.plain else None)


TestCalendar = CalendarStateMachine.TestCase


@given(WHEN, st.integers(1, 50))
def test_neighbours_of_one_time_are_one_entry(when: int, size: int) -> None:
    calendar = Calendar()
    for start in range(size):
        calendar.add(when, start, start + 1, 5)
    assert list(calendar) == [CalendarEntry(when, 0, size, 5)]


def test_a_cleared_calendar_takes_new_entries() -> None:
    calendar = Calendar()
    calendar.add(9_000_000, 1, 2)
    assert calendar.next() == 9_000_000
    calendar.clear()
    assert not calendar
    calendar.add(1, 1, 2)
    assert list(calendar) == [CalendarEntry(1, 1, 2, 0)]
