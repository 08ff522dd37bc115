"""DedupIds, compared with a plain dict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.remembered_ids import DedupIds

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


def test_expired_ids_behind_one_that_lasts_are_deleted_too() -> None:
    ids = DedupIds()
    ids.put_all([b"aa" + b"\xff" * 14], 0, 0, 10, spans=[1_000_000])
    for number in range(1, 2_000):
        ids.put_all([b"aa" + number.to_bytes(14, "little")], number, number, 10)
    assert len(ids) <= 128
    assert ids.get(b"aa" + b"\xff" * 14, 2_000) == 0
    assert ids.count(2_000) == 10


def test_each_id_may_have_a_span_of_its_own() -> None:
    ids = DedupIds()
    names = [bytes([number]) + bytes(15) for number in range(3)]
    ids.put_all(names, 7, now=100, span=50, spans=[0, 10, 500])
    assert [[ids.get(name, now) for name in names] for now in (109, 110, 149, 150, 599, 600)] == [
        *([7, 8, 9], [7, None, 9], [7, None, 9], [None, None, 9], [None, None, 9], [None, None, None]),
    ]
    assert ids.live(120) == [(names[0], 150, 7), (names[2], 600, 9)]


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
