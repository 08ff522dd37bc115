"""Items as columns of a DATA frame, and back."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.logs.codec import encode_records
from penstock.logs.columns import FrameColumns, encode, trim_frame
from penstock.logs.log import Frame, FrameType
from penstock.rules.calls import FORMER, CallName
from penstock.rules.records import Produced
from penstock.rules.runs import RunSet, from_offsets
from penstock.words.batch import Batch, validate
from penstock.words.clock import Moment
from penstock.words.errors import InvalidRequest
from tests.logs.batches import batches, framed

NOW = Moment(5, 6)
FULL = Batch(
    [b"a", b"", b"ccc"],
    [b"k", None, b""],
    [7, 0, 9],
    [None, b"h", b""],
    ["x", None, ""],
    ["json"] * 3,
    [None, "r", None],
    bytes([1, 5, 9]),
    [0, 8, 0],
    [3] * 3,
    [None, bytes(range(16)), bytes(16)],
    [b"", None, b"o"],
)
OPTIONAL = [("keys", "key_ids"), *((name,) for name in Batch.__struct_fields__[3:])]


def encoded(*records: Produced) -> Frame:
    return framed(encode(records, NOW))


@given(batches(), st.integers(0, 1 << 40))
def test_a_decoded_batch_equals_the_encoded_one(batch: Batch, base: int) -> None:
    frame = encoded(Produced(base, batch))
    assert (frame.type, frame.base_offset, frame.count, frame.elapsed, frame.wall) == (
        FrameType.DATA,
        base,
        len(batch),
        NOW.elapsed,
        NOW.wall,
    )
    assert FrameColumns(frame).batch() == batch


@pytest.mark.parametrize("size", range(len(OPTIONAL) + 1))
def test_every_combination_of_columns_is_decoded_as_encoded(size: int) -> None:
    for chosen in itertools.combinations(OPTIONAL, size):
        batch = Batch(FULL.payloads, **{name: getattr(FULL, name) for names in chosen for name in names})
        assert FrameColumns(encoded(Produced(0, batch))).batch() == batch, chosen


@given(batches(), st.integers(0, 19), st.integers(0, 19))
def test_a_part_of_a_frame_is_that_part_of_the_batch(batch: Batch, start: int, stop: int) -> None:
    start, stop = sorted((start % len(batch), stop % len(batch) + 1))
    columns = FrameColumns(encoded(Produced(100, batch)))
    assert columns.batch(100 + start, 100 + stop) == batch.take(range(start, stop))
    assert columns.payloads(100 + start, 100 + stop) == list(batch.payloads[start:stop])


@given(st.lists(batches(max_size=5), min_size=1, max_size=5), st.data())
def test_several_produces_of_one_frame_are_decoded_as_encoded(several: list[Batch], data: st.DataObject) -> None:
    records, base = [], 30
    for batch in several:
        calls = tuple(CallName(name, 7, b"") for name in data.draw(st.lists(st.binary(min_size=16, max_size=16), max_size=2)))
        ids = data.draw(st.none() | st.lists(st.integers(0, 99))) if calls else None
        source = data.draw(st.none() | st.binary(min_size=1, max_size=20))
        sequence = data.draw(st.integers(0, 1 << 60)) if source is not None else 0
        places = data.draw(st.none() | st.lists(st.integers(0, 1 << 60), min_size=2, max_size=6))
        indexes = data.draw(st.none() | st.just([0, 1])) if calls else None
        records.append(Produced(base, batch, calls, ids, source, sequence, places, indexes))
        base += len(batch)
    assert FrameColumns(encoded(*records)).records() == records


@given(batches(), st.data())
def test_an_outline_has_the_replaced_items(batch: Batch, data: st.DataObject) -> None:
    places = data.draw(st.none() | st.lists(st.integers(0, 1 << 60), min_size=2))
    [outline] = FrameColumns(encoded(Produced(9, batch, replaced=places))).records(outline=True)
    assert (outline.base, len(outline.batch), outline.replaced) == (9, len(batch), places)


@pytest.mark.parametrize("fields", [[], [None]], ids=["oldest", "with replaced"])
def test_a_part_of_an_older_version_is_decoded(fields: list[None]) -> None:
    frame = encoded(Produced(0, Batch([b"a"]), source=b"s", sequence=3))
    with_places = msgspec.msgpack.encode([[1, None, None, b"s", 3, None, [], None]])
    without = msgspec.msgpack.encode([[1, bytes(16), None, b"s", 3, *fields]])
    assert with_places in bytes(frame.body)
    size = len(with_places).to_bytes(4, "little"), len(without).to_bytes(4, "little")
    body = bytes(frame.body).replace(size[0] + with_places, size[1] + without)
    assert FrameColumns(frame._replace(body=memoryview(body))).records() == [
        Produced(0, Batch([b"a"]), (CallName(bytes(16), 1, FORMER),), source=b"s", sequence=3)
    ]


@given(batches(), st.data())
def test_a_trimmed_frame_has_the_kept_items_and_empty_values_between(batch: Batch, data: st.DataObject) -> None:
    kept = sorted(data.draw(st.sets(st.integers(0, len(batch) - 1), min_size=1)))
    frame = encoded(Produced(50, batch, (CallName(bytes(16)),), replaced=[50, 7]))
    draft = trim_frame(frame, RunSet(from_offsets(50 + index for index in kept)))
    assert draft is not None
    [record] = FrameColumns(framed(draft)).records()
    assert (record.base, record.calls, record.replaced) == (50 + kept[0], (), None)
    assert record.batch.take([index - kept[0] for index in kept]).drop_empty_columns() == batch.take(kept).drop_empty_columns()
    others = sorted(set(range(kept[0], kept[-1])) - set(kept))
    blank = record.batch.take([index - kept[0] for index in others]).drop_empty_columns()
    assert blank == Batch([b""] * len(others))


@given(batches())
def test_every_buffer_starts_aligned(batch: Batch) -> None:
    body = b"".join(encode([Produced(0, batch, (CallName(bytes(16)),))], NOW).parts)
    assert len(body) % 8 == 0


@given(batches())
def test_rules_see_key_ids_and_priorities_of_a_frame(batch: Batch) -> None:
    block = FrameColumns(encoded(Produced(10, batch))).block()
    assert (block.base, block.stop, block.lost) == (10, 10 + len(batch), False)
    assert (block.key_ids, block.priorities) == (batch.key_ids, batch.priorities)


def test_a_value_that_all_items_share_is_stored_once() -> None:
    def size(batch: Batch) -> int:
        return len(encoded(Produced(0, batch)).body)

    plain = Batch([b"x"] * 1_000)
    shared = Batch([b"x"] * 1_000, kinds=["invoice"] * 1_000, encodings=["json"] * 1_000, priorities=bytes([3]) * 1_000, ttls=[60] * 1_000)
    assert size(shared) - size(plain) <= 64


def test_a_plain_item_costs_its_payload_and_four_bytes() -> None:
    assert len(encoded(Produced(0, Batch([b"x" * 100] * 1_000))).body) == 1_000 * 104 + 8  # one offset more than items, padded


# -- views -------------------------------------------------------------------------------------------


def refusal(batch: Batch) -> str | None:
    """Why no queue takes a batch."""
    try:
        validate(batch)
    except InvalidRequest as error:
        return str(error)
    return None


@given(batches(), st.integers(0, 1 << 40))
def test_a_view_is_written_with_the_bytes_of_its_items(batch: Batch, base: int) -> None:
    view = FrameColumns(encoded(Produced(0, batch))).view()
    assert view.is_view and len(view) == len(batch) and view.size_bytes == batch.size_bytes
    assert refusal(view) == refusal(batch)
    assert encoded(Produced(base, view.to_store(), source=b"s")) == encoded(Produced(base, batch, source=b"s"))


@given(batches(), st.data())
def test_a_part_of_a_view_is_that_part_of_the_batch(batch: Batch, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=20))
    share = FrameColumns(encoded(Produced(0, batch))).view().take(chosen).to_store()
    assert share.is_view
    assert FrameColumns(encoded(Produced(7, share))).batch() == batch.take(chosen).drop_empty_columns()


@given(batches(), batches())
def test_a_view_can_be_joined_with_another_batch(first: Batch, second: Batch) -> None:
    view = FrameColumns(encoded(Produced(0, first))).view()
    assert Batch.join([view, second]) == Batch.join([first, second])


def test_a_view_of_a_frame_has_a_value_for_each_item() -> None:
    whole = encoded(Produced(0, Batch([b"abcdefgh", b"i"], [b"k", b"l"], [1, 2])))
    for size in range(0, len(whole.body), 8):
        with pytest.raises((ValueError, LookupError, TypeError, InvalidRequest)):
            validate(FrameColumns(whole._replace(body=whole.body[:size])).view())


def test_views_are_written_in_frames_of_their_own() -> None:
    """A view is written by its bytes, which a frame that it shares with other produces would not allow."""
    view = FrameColumns(encoded(Produced(0, Batch([b"b", b"c"])))).view()
    drafts = encode_records([Produced(4, Batch([b"a"])), Produced(5, view), Produced(7, Batch([b"d"]))], NOW, 8)
    assert [(draft.base_offset, draft.count) for draft in drafts] == [(4, 1), (5, 2), (7, 1)]
    assert [FrameColumns(framed(draft)).batch().payloads for draft in drafts] == [[b"a"], [b"b", b"c"], [b"d"]]


@pytest.mark.parametrize("name", ["kinds", "references"])
def test_texts_of_a_view_must_be_utf_8(name: str) -> None:
    batch = Batch([b"a", b"b"], kinds=["ab", "cde"]) if name == "kinds" else Batch([b"a", b"b"], references=["ab", "cde"])
    frame = encoded(Produced(0, batch))
    broken = bytes(frame.body).replace(b"abcde", b"ab\xffde")
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        validate(FrameColumns(frame._replace(body=memoryview(broken))).view())
    split = bytes(frame.body).replace(b"abcde", "aéde".encode())  # valid as a whole, and cut inside a character
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        validate(FrameColumns(frame._replace(body=memoryview(split))).view())


def test_the_values_of_a_view_have_limits() -> None:
    for batch in (Batch([b"a", b"b"], kinds=["x" * 5_000, "y"]), Batch([b"a", b"b"], [b"k" * 2_000, b"l"], [1, 2])):
        with pytest.raises(InvalidRequest, match="at most"):
            validate(FrameColumns(encoded(Produced(0, batch))).view())
    frame = encoded(Produced(0, Batch([b"abc", b"d"])))
    swapped = frame._replace(body=memoryview(bytes(frame.body).replace(b"\3\0\0\0\4\0\0\0", b"\5\0\0\0\4\0\0\0")))
    with pytest.raises(InvalidRequest, match="not in order"):
        validate(FrameColumns(swapped).view())
