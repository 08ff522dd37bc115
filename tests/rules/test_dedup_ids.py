"""Packed dedup ids beside a plain dict."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.rules.window import DedupIds

NAMES = st.sampled_from([bytes([first, 0]) + bytes([rest]) * 14 for first in (0, 1) for rest in (0, 1, 255)] + [b"\0\0" + b"\0\1" * 7])
STEPS = st.lists(st.tuples(NAMES, st.integers(0, 30), st.integers(1, 50)), max_size=60)


@given(STEPS)
def test_an_id_is_known_for_its_window_and_not_after(steps: list[tuple[bytes, int, int]]) -> None:
    ids, known, now = DedupIds(), dict[bytes, tuple[int, int]](), 0
    for offset, (name, passing, span) in enumerate(steps):
        now += passing
        for asked in {asked for asked, _, _ in steps}:
            deadline, first = known.get(asked, (0, 0))
            assert ids.get(asked, now) == (first if deadline > now else None)
        if ids.get(name, now) is None:
            ids.put(name, offset, now, span)
            known[name] = (now + span, offset)
    live = sorted((deadline, name, offset) for name, (deadline, offset) in known.items() if deadline > now)
    assert ids.live(now) == [(name, deadline, offset) for deadline, name, offset in live]
    ids.forget(now)
    assert len(ids) == len(live)
    assert [ids.get(name, now) for _, name, _ in live] == [offset for _, _, offset in live]


def test_what_looks_like_an_id_across_two_entries_is_none() -> None:
    ids = DedupIds()
    ids.put(b"aa" + b"\x01" * 14, 0x0101010101010101, 0, 0x0101010101010101)
    assert ids.get(b"aa" + b"\x01" * 14, 0) == 0x0101010101010101
    ids.put(b"aa" + b"\x02" * 14, 7, 0, 9)
    assert ids.get(b"aa" + b"\x01" * 13 + b"\x02", 0) is None


def test_what_is_over_is_let_go_as_its_bucket_is_used() -> None:
    ids = DedupIds()
    for number in range(1_000):
        ids.put(b"aa" + number.to_bytes(14, "little"), number, number, 10)
    assert len(ids) <= 11
