"""Every kind of log implements penstock.logs.log, without faults. (Faults are in test_torture.py.)"""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.logs.log import Buffer, Draft, FrameType, Log
from penstock.words.errors import PenstockError
from tests.logs.backends import (
    INCARNATION,
    LOG_BACKENDS,
    PARTITION,
    LogBackend,
    append_all,
    base_draft,
    comparable,
    draft,
    expected,
    noise,
    state_draft,
)

NewBackend = Callable[[], LogBackend]
MIB = 1 << 20


@pytest.fixture(scope="module", params=LOG_BACKENDS)
def new_backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NewBackend:
    """Makes new backends of one kind, for tests with many examples."""
    make = LOG_BACKENDS[request.param]
    return lambda: make(tmp_path_factory.mktemp("backend"))


@pytest.fixture
def backend(new_backend: NewBackend) -> LogBackend:
    return new_backend()


@pytest.fixture
def log(backend: LogBackend) -> Log:
    return backend.start()


def survives(backend: LogBackend, log: Log) -> list[object]:
    """What is recovered when the log is reopened."""
    return list(comparable(backend.reopen(log).recover()))


# -- round trips -------------------------------------------------------------------------------------

U32, U64, I64 = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1)
BODIES = st.one_of(
    st.lists(st.binary(max_size=50), max_size=5),
    st.sampled_from([[], [b""], [b"x"], [bytes(5_000)], [noise(5_000)], [b"ab"] * 3_000, [b"a", b"", noise(700), bytearray(b"z" * 700)]]),
)
STATES = st.builds(Draft, st.just(FrameType.STATE), U64, U32, U32, I64, I64, BODIES)
GROUPS = st.lists(st.lists(STATES, min_size=1, max_size=4), max_size=6)


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS)
def test_frames_are_read_as_they_were_appended(new_backend: NewBackend, groups: list[list[Draft]]) -> None:
    backend = new_backend()
    log = backend.start()
    append_all(log, groups)
    wanted = expected(itertools.chain.from_iterable(groups))
    assert comparable(log.frames()) == wanted
    log.sync()
    assert comparable(log.frames()) == wanted
    assert survives(backend, log) == wanted


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4_096, 65_537, 8 * MIB])
@pytest.mark.parametrize("make", [noise, bytes], ids=["noise", "zeros"])
def test_bodies_of_any_size(backend: LogBackend, log: Log, size: int, make: Callable[[int], bytes]) -> None:
    drafts = [draft(0, 3, make(size)), draft(3, 1, b"after")]
    log.append(drafts)
    log.sync()
    assert comparable(log.read(0, 4)) == expected(drafts)
    assert survives(backend, log) == expected(drafts)


def test_a_body_of_more_parts_than_a_system_call_takes(backend: LogBackend, log: Log) -> None:
    parts = [noise(number % 4, number) for number in range(5_000)]
    log.append([draft(0, 5_000, *parts)])
    log.sync()
    assert survives(backend, log) == expected([draft(0, 5_000, b"".join(parts))])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_parts_of_every_kind_of_buffer(log: Log, kind: Callable[[bytes], Buffer]) -> None:
    log.append([draft(0, 1, kind(b"one"), kind(b"two"))])
    assert comparable(log.frames()) == expected([draft(0, 1, b"onetwo")])


@pytest.mark.parametrize("size", [5, 5_000])
def test_a_buffer_may_be_changed_after_the_append(log: Log, size: int) -> None:
    buffer = bytearray(b"x" * size)
    log.append([draft(0, 1, buffer)])
    buffer[:] = b"y" * size
    assert comparable(log.read(0, 1)) == expected([draft(0, 1, b"x" * size)])


def test_an_empty_log_has_no_frames(backend: LogBackend) -> None:
    log = backend.open()
    assert (log.incarnation, log.partition) == (INCARNATION, PARTITION)
    assert comparable(log.recover()) == comparable(log.frames()) == comparable(log.read(0, 100)) == []
    assert not log.unsynced
    assert log.findings == []


# -- sequences, groups, syncs ------------------------------------------------------------------------


def test_sequences_are_consecutive_across_owners_and_rotations(backend: LogBackend) -> None:
    log = backend.start()
    for turn in range(4):
        log.append([draft(turn * 2, 1, b"a"), draft(turn * 2 + 1, 1, b"b")])
        log.rotate(base_draft(turn * 2 + 2))
        log.append([state_draft(turn * 2 + 2)])
        log.sync()
        log = backend.reopen(log)
        list(log.recover())
    assert [frame.sequence for frame in comparable(log.frames())] == list(range(1, 17))


def test_appended_frames_are_readable_before_they_are_synced(log: Log) -> None:
    log.append([draft(0, 5, b"items")])
    assert log.unsynced
    assert comparable(log.read(0, 5)) == comparable(log.frames()) == expected([draft(0, 5, b"items")])
    log.sync()
    assert not log.unsynced


def test_reset_removes_what_is_not_synced_and_appends_continue_there(backend: LogBackend, log: Log) -> None:
    log.append([draft(0, 1, b"kept")])
    log.sync()
    log.append([draft(1, 1, b"dropped"), draft(2, 1, b"dropped too")])
    log.reset()
    assert comparable(log.recover()) == expected([draft(0, 1, b"kept")])
    log.append([draft(1, 1, b"instead")])
    log.sync()
    wanted = expected([draft(0, 1, b"kept"), draft(1, 1, b"instead")])
    assert comparable(log.frames()) == comparable(log.read(0, 9)) == wanted
    assert survives(backend, log) == wanted


def test_reset_of_a_log_never_synced_leaves_it_empty(log: Log) -> None:
    log.append([draft(0, 1, b"dropped")])
    log.reset()
    assert comparable(log.recover()) == comparable(log.frames()) == []
    log.append([draft(0, 1, b"first")])
    log.sync()
    assert comparable(log.frames()) == expected([draft(0, 1, b"first")])


def test_a_sync_without_appends_works(log: Log) -> None:
    log.sync()
    log.append([draft(0, 1, b"a")])
    log.sync()
    log.sync()
    assert comparable(log.frames()) == expected([draft(0, 1, b"a")])


def test_an_append_before_recovery_is_complete_is_refused(backend: LogBackend, log: Log) -> None:
    log.append([draft(0, 1, b"a"), draft(1, 1, b"b")])
    log.sync()
    log = backend.reopen(log)
    with pytest.raises(PenstockError, match="recover"):
        log.append([draft(2, 1, b"too early")])
    assert comparable(log.recover()) == expected([draft(0, 1, b"a"), draft(1, 1, b"b")])
    log.append([draft(2, 1, b"now")])


# -- rotation ----------------------------------------------------------------------------------------


def rotated(log: Log) -> list[Draft]:
    """Write three segments; returns all drafts, including the Bases."""
    drafts = [draft(0, 10, b"one"), state_draft(10), base_draft(10), draft(10, 10, b"two"), base_draft(20), state_draft(20)]
    drafts.append(draft(20, 5, b"three"))
    for step in drafts:
        if step.type is FrameType.BASE:
            log.rotate(step)
        else:
            log.append([step])
    log.sync()
    return drafts


def test_recovery_starts_at_the_latest_base(backend: LogBackend, log: Log) -> None:
    drafts = rotated(log)
    log = backend.reopen(log)
    assert comparable(log.recover()) == expected(drafts)[4:]
    assert comparable(log.frames()) == expected(drafts)


def test_rotation_syncs_the_old_and_the_new_segment(backend: LogBackend, log: Log) -> None:
    log.append([draft(0, 10, b"one")])
    log.rotate(base_draft(10))
    assert not log.unsynced
    assert comparable(backend.reopen(log).recover()) == expected([base_draft(10)], first_sequence=2)


def test_reading_crosses_segments(log: Log) -> None:
    drafts = rotated(log)
    assert comparable(log.read(5, 21)) == [frame for frame in expected(drafts) if frame.type is FrameType.DATA]


def test_rotation_begins_an_empty_segment(log: Log) -> None:
    log.append([draft(0, 10, noise(50_000))])
    before = log.segment_bytes
    log.rotate(base_draft(10))
    assert log.segment_bytes < before
    assert before >= 50_000


def test_rotations_at_the_same_offset(backend: LogBackend, log: Log) -> None:
    drafts = [base_draft(0, b"first"), base_draft(0, b"second"), base_draft(0, b"third")]
    for step in drafts:
        log.rotate(step)
    log.append([draft(0, 1, b"a")])
    log.sync()
    log = backend.reopen(log)
    assert comparable(log.recover()) == expected([*drafts, draft(0, 1, b"a")])[2:]
    assert comparable(log.frames()) == expected([*drafts, draft(0, 1, b"a")])


def test_reset_keeps_a_rotation(log: Log) -> None:
    log.append([draft(0, 1, b"a")])
    log.rotate(base_draft(1))
    log.append([draft(1, 1, b"dropped")])
    log.reset()
    assert comparable(log.recover()) == expected([base_draft(1)], first_sequence=2)


# -- reading ranges ----------------------------------------------------------------------------------


def test_read_gives_the_data_frames_that_overlap(log: Log) -> None:
    drafts = [draft(0, 10, b"one"), state_draft(10), draft(10, 1, b"two"), draft(11, 9, b"three")]
    log.append(drafts)
    one, _, two, three = expected(drafts)
    ranges = {(0, 1): [one], (9, 10): [one], (9, 11): [one, two], (10, 11): [two], (11, 12): [three], (0, 20): [one, two, three]}
    assert {asked: comparable(log.read(*asked)) for asked in ranges} == ranges
    assert comparable(log.read(19, 10_000)) == [three]
    assert comparable(log.read(20, 30)) == comparable(log.read(5, 5)) == []


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=40), data=st.data())
def test_reads_of_any_ranges_in_any_order(new_backend: NewBackend, counts: list[int], data: st.DataObject) -> None:
    log = new_backend().start()
    ends = list(itertools.accumulate(counts, initial=0))
    drafts = [draft(base, count, noise(count * 100, base)) for base, count in zip(ends, counts, strict=False)]
    for number, step in enumerate(drafts):
        log.append([step])
        if number % 9 == 8:
            log.rotate(base_draft(step.base_offset + step.count))
    frames = [frame for frame in comparable(log.frames()) if frame.type is FrameType.DATA]
    assert [frame.body for frame in frames] == [step.parts[0] for step in drafts]
    for _ in range(8):
        start = data.draw(st.integers(0, ends[-1]))
        stop = data.draw(st.integers(start, ends[-1] + 5))
        wanted = [frame for frame in frames if frame.base < stop and frame.base + frame.count > start] if start < stop else []
        assert comparable(log.read(start, stop)) == wanted


def test_reading_on_from_where_the_last_read_ended(log: Log) -> None:
    drafts = [draft(number * 10, 10, noise(1_000, number)) for number in range(300)]
    for step in drafts:
        log.append([step])
    assert [comparable(log.read(start, start + 10)) for start in range(0, 3_000, 10)] == [[frame] for frame in expected(drafts)]


def test_reads_do_not_disturb_appends(log: Log) -> None:
    for number in range(20):
        log.append([draft(number, 1, noise(300, number))])
        assert len(log.read(0, number + 1)) == number + 1
    log.sync()
    assert comparable(log.frames()) == expected(draft(number, 1, noise(300, number)) for number in range(20))


# -- the end -----------------------------------------------------------------------------------------


def test_close_syncs_and_may_be_repeated(backend: LogBackend, log: Log) -> None:
    log.append([draft(0, 1, b"a")])
    log.close()
    log.close()
    assert survives(backend, log) == expected([draft(0, 1, b"a")])


@pytest.mark.parametrize("call", ["append", "sync", "rotate", "read", "frames", "recover", "reset"])
def test_a_closed_log_refuses_calls(log: Log, call: str) -> None:
    log.append([draft(0, 1, b"a")])
    log.close()
    arguments = {"append": ([draft(1, 1, b"b")],), "rotate": (base_draft(1),), "read": (0, 1)}
    with pytest.raises(PenstockError, match="closed"):
        list(getattr(log, call)(*arguments.get(call, ())) or [])


def test_logs_of_other_partitions_and_incarnations_are_separate(backend: LogBackend) -> None:
    places = [(1, 0), (1, 1), (2, 0), (2**64 - 1, 1_023)]
    logs = [backend.start(*place) for place in places]
    for number, log in enumerate(logs):
        log.append([draft(0, 1, b"of %d" % number)])
        log.sync()
    assert [comparable(log.frames()) for log in logs] == [expected([draft(0, 1, b"of %d" % number)]) for number in range(len(logs))]
    assert [(log.incarnation, log.partition) for log in logs] == places
