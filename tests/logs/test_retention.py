"""Drops and rewrites of old segments, and offsets by time, on every backend."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.logs.log import FrameType, Gap, Log
from penstock.words.errors import InvalidRequest
from tests.logs.backends import LOG_BACKENDS, LogBackend, base_draft, comparable, draft, expected, state_draft
from tests.logs.items import SECOND, START, fill, items_draft, payload, plain_draft, recovered, runs, served_items

NewHome = Callable[[], LogBackend]
PER_SEGMENT = 24
"""The number of items in each of the five segments that `fill` writes."""


@pytest.fixture(scope="module", params=LOG_BACKENDS)
def new_home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NewHome:
    make = LOG_BACKENDS[request.param]
    return lambda: make(tmp_path_factory.mktemp("home"))


@pytest.fixture
def home(new_home: NewHome) -> LogBackend:
    return new_home()


@pytest.fixture
def log(home: LogBackend) -> Log:
    log = home.start()
    fill(log)
    return log


def reopened(home: LogBackend, log: Log) -> Log:
    log = home.reopen(log)
    list(log.recover())
    return log


# -- segments ----------------------------------------------------------------------------------------


def test_an_empty_log_is_one_empty_segment(home: LogBackend) -> None:
    log = home.start()
    assert log.segments() == [log.newest()] == [(0, 1, 0, 0, 0, False, -1)]
    log.append([draft(0, 1, b"a")])
    (segment,) = log.segments()
    assert segment[:2] == (0, 1)
    assert segment.size_bytes == log.segment_bytes > 0
    assert segment.first_wall == segment.last_wall == draft(0, 1).wall


def test_rotations_are_segments(home: LogBackend, log: Log) -> None:
    found = log.segments()
    assert [(segment.base_offset, segment.first_sequence) for segment in found] == [(0, 1), (24, 9), (48, 18), (72, 27), (96, 36)]
    walls = [(segment.first_wall - START, segment.last_wall - START) for segment in found]
    assert walls == [(number * 4 * SECOND, (number * 4 + 3) * SECOND) for number in range(5)]
    assert not any(segment.rewritten for segment in found)
    assert log.newest() == found[-1]
    assert found[-1].size_bytes == log.segment_bytes
    assert reopened(home, log).segments() == found


# -- drop --------------------------------------------------------------------------------------------


def test_dropped_items_read_as_a_gap(home: LogBackend, log: Log) -> None:
    before, state = log.segments(), recovered(home.reopen(log))
    log = reopened(home, log)
    assert log.drop(2) == before[0].size_bytes + before[1].size_bytes
    for _ in range(2):
        assert log.segments() == before[2:]
        everything = comparable(log.frames())
        assert (everything[0].type, everything[0].sequence) == (FrameType.BASE, 18)
        gap, *rest = log.read(40, 60)
        assert isinstance(gap, Gap)
        assert gap[:4] == (1, 17, 0, 48)
        assert "retention" in gap.why
        assert served_items(rest).items == {offset: payload(offset) for offset in range(48, 60)}
        assert log.read(0, 48) == [gap]
        assert comparable(log.read(48, 54)) == [frame for frame in everything if frame.type is FrameType.DATA][:1]
        log = home.reopen(log)
        assert recovered(log) == state


def test_a_log_is_appended_to_after_a_drop(home: LogBackend, log: Log) -> None:
    log.drop(4)
    log.append([items_draft(120, 121)])
    log.sync()
    log = home.reopen(log)
    assert recovered(log)[-1].sequence == 45
    assert served_items(log.read(96, 200)).items == {offset: payload(offset) for offset in range(96, 121)}
    log.rotate(base_draft(121))
    log.drop(1)
    assert [segment.base_offset for segment in log.segments()] == [121]


def test_reading_on_after_a_drop(log: Log) -> None:
    """The position of the last read must not be used after segments are removed."""
    assert served_items(log.read(96, 102)).items
    log.drop(2)
    assert list(served_items(log.read(102, 108)).items) == list(range(102, 108))


@pytest.mark.parametrize("count", [-1, 5, 6])
def test_the_newest_segment_is_never_dropped(log: Log, count: int) -> None:
    before = comparable(log.frames())
    with pytest.raises(InvalidRequest, match="; give"):
        log.drop(count)
    assert log.drop(0) == 0
    assert comparable(log.frames()) == before


def test_a_drop_syncs_what_was_appended(home: LogBackend, log: Log) -> None:
    log.append([items_draft(120, 122)])
    log.drop(1)
    assert not log.unsynced
    assert 121 in served_items(reopened(home, log).read(0, 200)).items


def test_frames_that_are_dropped_while_they_are_listed(log: Log) -> None:
    """A listing in progress continues: with frames of the open file, or a Gap for segments dropped before."""
    listing = log.frames()
    first = list(itertools.islice(listing, 3))
    log.drop(3)
    rest = list(listing)
    found, gaps = comparable(frame for frame in [*first, *rest] if not isinstance(frame, Gap)), served_items(rest).gaps
    counted = [frame.sequence for frame in found] + [number for gap in gaps for number in range(gap.first_sequence, gap.last_sequence + 1)]
    assert sorted(counted) == list(range(1, 45))
    assert all("retention" in gap.why for gap in gaps)


# -- rewrite -----------------------------------------------------------------------------------------


def test_a_rewrite_keeps_items_at_their_offsets(home: LogBackend, log: Log) -> None:
    before, history = log.segments(), comparable(log.frames())
    state = recovered(home.reopen(log))
    log = reopened(home, log)
    keep = [1, 2, 3, 5, 14, 15, 30, 36]
    freed = log.rewrite(0, 1, keep)
    kept = {1, 3, 4, 14, *range(30, 36)}
    for _ in range(2):
        found = served_items(log.read(0, 48))
        assert found.gaps == []
        assert {offset for offset, content in found.items.items() if content} == kept
        assert set(found.items) == kept | {2}, "only what lies between kept items of a frame is there besides them, blank"
        assert [(frame.sequence, frame.wall, frame.elapsed) for frame in comparable(log.read(0, 48))] == [
            (frame.sequence, frame.wall, frame.elapsed) for frame in history if frame.sequence in (1, 5, 12)
        ]
        rest = [frame for frame in comparable(log.frames()) if frame.sequence >= 18]
        assert rest == [frame for frame in history if frame.sequence >= 18]
        assert [frame.type for frame in comparable(log.frames())[:3]] == [FrameType.DATA] * 3
        facts = log.segments()
        assert [segment.rewritten for segment in facts] == [True, False, False, False]
        assert facts[0][:2] == (0, 1)
        assert facts[1:] == before[2:]
        assert freed == before[0].size_bytes + before[1].size_bytes - facts[0].size_bytes > 0
        log = home.reopen(log)
        assert recovered(log) == state


def test_a_rewrite_that_keeps_nothing(home: LogBackend, log: Log) -> None:
    log.rewrite(1, 2, [])
    for _ in range(2):
        found = served_items(log.read(0, 200))
        assert found.gaps == []
        assert sorted(found.items) == [*range(24), *range(72, 120)]
        assert log.read(30, 50) == []
        assert [segment.base_offset for segment in log.segments()] == [0, 24, 72, 96]
        log = reopened(home, log)


def test_rewriting_rewritten_segments(home: LogBackend, log: Log) -> None:
    log.rewrite(0, 0, runs([0, 7, 20]))
    log.rewrite(1, 2, runs([25, 60]))
    assert [segment.rewritten for segment in log.segments()] == [True, True, False, False]
    log.rewrite(0, 1, runs([7, 60]))
    for _ in range(2):
        found = served_items(log.read(0, 72))
        assert found.items == {7: payload(7), 60: payload(60)}
        assert found.gaps == []
        assert [segment.base_offset for segment in log.segments()] == [0, 72, 96]
        log = reopened(home, log)
    log.drop(1)
    assert [(segment.base_offset, segment.rewritten) for segment in log.segments()] == [(72, False), (96, False)]


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, 3), (4, 4), (2, 1), (-1, 0), (0, 9)])
def test_the_newest_two_are_never_rewritten(log: Log, first: int, last: int) -> None:
    before = comparable(log.frames())
    with pytest.raises(InvalidRequest, match="; give"):
        log.rewrite(first, last, [0, 1])
    assert comparable(log.frames()) == before


def test_a_frame_that_cannot_be_taken_apart_is_kept_as_it_is(home: LogBackend) -> None:
    log = home.start()
    drafts = [draft(0, 3, b"not columns"), state_draft(3), base_draft(3), base_draft(3), base_draft(3)]
    log.append(drafts[:2])
    for step in drafts[2:]:
        log.rotate(step)
    log.rewrite(0, 0, [1, 2])
    assert comparable(log.read(0, 3)) == expected(drafts[:1])


def test_frames_that_are_rewritten_while_they_are_listed(log: Log) -> None:
    listing = log.frames()
    begun = comparable(itertools.islice(listing, 3))
    log.rewrite(0, 2, runs([0, 50]))
    rest = list(listing)
    assert served_items(rest).gaps == []
    numbers = [frame.sequence for frame in [*begun, *comparable(rest)]]
    assert numbers == sorted(set(numbers))
    assert {1, 2, 3, *range(27, 45)} <= set(numbers)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_rewrite(new_home: NewHome, data: st.DataObject) -> None:
    """Kept items are served at their offsets, others are gone or blanked, and recovery yields the same."""
    home = new_home()
    log = home.start()
    stop = fill(log, segments=data.draw(st.integers(3, 6)), frames=3, count=data.draw(st.integers(1, 5)))
    state = recovered(home.reopen(log))
    log = reopened(home, log)
    kept = set(range(stop))
    for _ in range(data.draw(st.integers(1, 3))):
        facts = log.segments()
        if len(facts) < 3:
            break
        last = data.draw(st.integers(0, len(facts) - 3))
        first = data.draw(st.integers(0, last))
        low, high = facts[first].base_offset, facts[last + 1].base_offset
        wanted = data.draw(st.sets(st.integers(low, max(low, high - 1))))
        log.rewrite(first, last, runs(sorted(wanted)))
        kept -= set(range(low, high)) - wanted
    for _ in range(2):
        found = served_items(log.read(0, stop))
        assert found.gaps == []
        assert {offset for offset, content in found.items.items() if content} == kept
        assert served_items(log.frames()) == found
        for offset in sorted(kept)[:: max(1, len(kept) // 10)]:
            assert served_items(log.read(offset, offset + 1)).items[offset] == payload(offset)
        log = home.reopen(log)
        assert recovered(log) == state


def test_keep_may_reach_beyond_the_segments(log: Log) -> None:
    log.rewrite(1, 1, [0, 30, 40, 500])
    assert {offset for offset, content in served_items(log.read(0, 120)).items.items() if content} == {*range(30), *range(40, 120)}


# -- time --------------------------------------------------------------------------------------------


def test_offset_at_a_time(log: Log) -> None:
    """`fill` writes a frame of six items a second."""
    at = {second: log.offset_at(START + second * SECOND) for second in range(20)}
    assert at == {second: second * 6 for second in range(20)}
    assert log.offset_at(0) == 0
    assert log.offset_at(START + SECOND - 1) == 6
    assert log.offset_at(START + 19 * SECOND + 1) == 120


def test_offset_at_a_time_after_drop_and_rewrite(home: LogBackend, log: Log) -> None:
    log.drop(1)
    log.rewrite(0, 1, runs([30, 50]))
    for _ in range(2):
        assert log.offset_at(START) == 30
        assert log.offset_at(START + 6 * SECOND) == 50
        assert log.offset_at(START + 9 * SECOND) == 72
        log = reopened(home, log)


def test_offset_at_a_time_after_which_only_records_follow(log: Log) -> None:
    log.append([state_draft(120)._replace(wall=START + 99 * SECOND)])
    assert log.offset_at(START + 30 * SECOND) == 120
    log.append([items_draft(120, 121, START + 99 * SECOND)])
    assert log.offset_at(START + 30 * SECOND) == 120
    log.append([items_draft(121, 122, START + 100 * SECOND)])
    assert log.offset_at(START + 100 * SECOND) == 121


def test_offset_at_a_time_in_an_empty_log(home: LogBackend) -> None:
    log = home.start()
    assert log.offset_at(0) == 0
    log.append([state_draft(0)])
    assert log.offset_at(0) == 0


def test_offset_at_a_time_in_a_long_segment(home: LogBackend) -> None:
    """The segment has many index entries, with one or many frames between two of them."""
    log = home.start()
    for number in range(400):
        log.append([plain_draft(number * 3, number * 3 + 3, START + number * SECOND)])
        log.append([state_draft(number * 3 + 3, bytes(number % 300))._replace(wall=START + number * SECOND)])
    assert [log.offset_at(START + number * SECOND) for number in range(400)] == [number * 3 for number in range(400)]
    log.sync()
    log = reopened(home, log)
    assert [log.offset_at(START + number * SECOND - 1) for number in range(400)] == [number * 3 for number in range(400)]


def test_offset_at_a_time_after_the_clock_stepped_back(home: LogBackend) -> None:
    """The result was written at or after the time, and the latest such frames are never missed."""
    log = home.start()
    walls = [*range(50), *range(20, 90)]
    for number, second in enumerate(walls):
        log.append([plain_draft(number, number + 1, START + second * SECOND)])
    for second in range(90):
        found = log.offset_at(START + second * SECOND)
        assert walls[found] >= second
        assert found <= max(number for number, wall in enumerate(walls) if wall == second)
    assert log.offset_at(START + 90 * SECOND) == len(walls)
