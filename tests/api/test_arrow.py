"""Conversion between items and Arrow tables: the same items in both forms, and wrong tables are refused as a whole."""

import sys
from array import array
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api import arrow, items
from penstock.api.arrow import from_arrow, item_schema, items_to_arrow
from penstock.api.items import ItemSource, NewItem, items_of, to_batch
from penstock.words import values
from penstock.words.batch import Batch, validate
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_DELAY, MIB
from tests.logs.batches import column

UTC_MICROSECONDS = pa.timestamp("us", "UTC")
WHEN = datetime(2030, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
PAYLOAD = pa.array([b"a", b"b"])


def table(**columns: Any) -> Any:
    return pa.table({"payload": PAYLOAD, **columns})


def one(data: Any) -> Batch:
    (batch,) = from_arrow(data)
    return validate(batch)


@st.composite
def tables(draw: st.DrawFn) -> tuple[Any, list[NewItem]]:
    """A table, and the same items as a list."""
    payloads = draw(st.lists(st.binary(max_size=9), min_size=1, max_size=8))
    names, texts = st.none() | st.binary(max_size=5), st.none() | st.text(max_size=5)
    strategies = {
        "key": (names, pa.binary()),
        "kind": (texts, pa.string()),
        "encoding": (texts, pa.string()),
        "reference": (texts, pa.string()),
        "priority": (st.none() | st.integers(0, 9), pa.uint8()),
        "at": (st.none() | st.datetimes(datetime(1970, 1, 2), timezones=st.just(UTC)), UTC_MICROSECONDS),
        "ttl": (st.none() | st.timedeltas(timedelta(microseconds=1), timedelta(days=3_649)), pa.duration("us")),
        "dedup": (st.none() | st.binary(min_size=1, max_size=5), pa.binary()),
        "headers": (st.none() | st.dictionaries(st.text(max_size=3), st.binary(max_size=3)), pa.map_(pa.string(), pa.binary())),
    }
    given: dict[str, Any] = {"payload": pa.array(payloads, pa.binary())}
    options: list[dict[str, Any]] = [{} for _ in payloads]
    for name, (strategy, kind) in strategies.items():
        found = draw(column(strategy, len(payloads)))
        if found is not None:
            given[name] = pa.array([None if v is None else list(v.items()) for v in found] if name == "headers" else found, kind)
            for option, value in zip(options, found, strict=True):
                option[name] = value
    return pa.table(given), [NewItem(payload, **option) for payload, option in zip(payloads, options, strict=True)]


# -- a table to be produced --------------------------------------------------------------------------


@given(tables())
def test_a_table_gives_the_same_batch_as_a_list_of_items(case: tuple[Any, list[NewItem]]) -> None:
    given, news = case
    assert one(given) == to_batch(news).drop_empty_columns()


def test_a_dedup_window_counts_in_rows_with_a_dedup_id() -> None:
    windows = pa.array([timedelta(seconds=2)] * 2, pa.duration("us"))
    assert one(pa.table({"payload": [b"a", b"b"], "dedup": ["x", None], "dedup_window": windows})).dedup_windows == [2_000_000, 0]
    assert one(pa.table({"payload": [b"a", b"b"], "dedup_window": windows})).dedup_windows is None


def test_a_record_batch_and_another_librarys_stream_are_tables_too() -> None:
    class Frame:
        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return table().__arrow_c_stream__(requested_schema)

    assert one(table().to_batches()[0]) == one(table()) == one(Frame()) == Batch([b"a", b"b"])


BINARIES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1), pa.dictionary(pa.int8(), pa.binary())]
STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]


@pytest.mark.parametrize("kind", BINARIES, ids=str)
def test_bytes_of_every_type(kind: Any) -> None:
    given = pa.array([b"a", None], pa.binary()).cast(kind) if kind != pa.binary(1) else pa.array([b"a", None], kind)
    assert one(table(key=given)).keys == [b"a", None]
    assert one(pa.table({"payload": given[:1]})) == Batch([b"a"])


@pytest.mark.parametrize("kind", STRINGS, ids=str)
def test_text_of_every_type(kind: Any) -> None:
    given = pa.array(["é", None]).cast(kind)
    assert one(table(key=given, kind=given)) == to_batch([NewItem(b"a", key="é", kind="é"), b"b"])
    assert one(pa.table({"payload": given[:1]})) == to_batch(["é"])


def test_text_has_the_encoding_that_is_given_or_is_text() -> None:
    payload = pa.array(["{}", "x"])
    assert one(pa.table({"payload": payload, "encoding": ["json", None]})) == Batch([b"{}", b"x"], encodings=["json", "text"])
    assert one(pa.table({"payload": payload, "encoding": pa.nulls(2, pa.string())})).encodings == ["text", "text"]


def test_a_column_without_values_is_no_column() -> None:
    assert one(table(key=pa.nulls(2), at=pa.nulls(2, pa.int8()), kind=pa.nulls(2, pa.float64()))) == Batch([b"a", b"b"])


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint64()], ids=str)
def test_priorities_of_every_type(kind: Any) -> None:
    assert one(table(priority=pa.array([0, None], kind))).priorities == bytes([0, 5])


@pytest.mark.parametrize(
    ("given", "microseconds"),
    [
        (pa.array([WHEN, None], UTC_MICROSECONDS), values.instant(WHEN)),
        (pa.array([WHEN, None], pa.timestamp("us", "Pacific/Auckland")), values.instant(WHEN)),
        (pa.array([1_500, None], pa.timestamp("ns", "UTC")), 1),
        (pa.array([3, None], pa.timestamp("s", "UTC")), 3_000_000),
        (pa.array([7, None], pa.int64()), 7),
        (pa.array([values.LAST_INSTANT, None], pa.int64()), values.LAST_INSTANT),
    ],
)
def test_times_of_every_type(given: Any, microseconds: int) -> None:
    assert one(table(at=given)).ats == [microseconds, 0]


@pytest.mark.parametrize(
    ("given", "microseconds"),
    [
        (pa.array([1_500, None], pa.duration("ns")), 1),
        (pa.array([3, None], pa.duration("s")), 3_000_000),
        (pa.array([7, None], pa.int32()), 7),
        (pa.array([MAX_DELAY, None], pa.int64()), MAX_DELAY),
    ],
)
def test_durations_of_every_type(given: Any, microseconds: int) -> None:
    assert one(table(ttl=given)).ttls == [microseconds, 0]


def test_headers_of_every_type() -> None:
    packed = values.encode_headers({"a": "x"})
    assert one(table(headers=pa.array([packed, None]))).headers == [packed, None]
    assert one(table(headers=pa.array([[("a", "x")], None], pa.map_(pa.string(), pa.string())))).headers == [packed, None]
    assert one(table(headers=pa.array([[("a", "x")], []], pa.map_(pa.large_string(), pa.large_string())))).headers == [packed, None]
    in_bytes = values.encode_headers({"a": b"x"})
    assert one(table(headers=pa.array([[("a", b"x")], None], pa.map_(pa.string(), pa.binary())))).headers == [in_bytes, None]


def test_batches_are_cut_by_count() -> None:
    payloads = [str(number).encode() for number in range(25_001)]
    chunks = pa.chunked_array([payloads[:7], payloads[7:12_000], payloads[12_000:]])
    batches = list(from_arrow(pa.table({"payload": chunks, "key": chunks})))
    assert [len(validate(batch)) for batch in batches] == [10_000, 10_000, 5_001]
    assert [payload for batch in batches for payload in batch.payloads] == payloads
    assert [key for batch in batches for key in batch.keys or ()] == payloads


def test_batches_are_cut_by_size() -> None:
    sizes = [16 * MIB, 16 * MIB, 16 * MIB, 16 * MIB, 1, 16 * MIB]
    batches = list(from_arrow(pa.table({"payload": pa.array([bytes(size) for size in sizes], pa.large_binary())})))
    assert [list(map(len, validate(batch).payloads)) for batch in batches] == [sizes[:4], sizes[4:]]


def test_a_batch_has_only_the_columns_of_its_own_rows() -> None:
    payloads, kinds = [b"x"] * 10_001, ["a"] + [None] * 10_000
    first, second = from_arrow(pa.table({"payload": payloads, "kind": kinds}))
    assert (first.kinds is not None, second) == (True, Batch([b"x"]))


def test_an_empty_table_has_no_batch() -> None:
    assert list(from_arrow(pa.table({"payload": pa.array([], pa.binary()), "key": pa.array([], pa.string())}))) == []
    assert list(from_arrow(pa.table({"payload": pa.array([], pa.string())}))) == []


COLUMNS = "payload, key, headers, kind, encoding, reference, priority, at, ttl, dedup"
AT = "a timestamp with a timezone, or int64 (microseconds since 1970)"
TTL = "a duration, or int64 (microseconds)"
HEADERS = "map<string, string>, map<string, binary>, or binary that is MessagePack"


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"id": ["3-17", "3-18"]}, f"the column 'id' is not known; drop it or use one of {COLUMNS}"),
        ({"payload": [b"a", None]}, "row 1: the payload is null; give bytes or text"),
        ({"payload": pa.DictionaryArray.from_arrays([0, 1], pa.array([b"a", None]))}, "row 1: the payload is null; give bytes or text"),
        ({"payload": [1, 2]}, "the column 'payload' is int64; give binary or string"),
        ({"payload": [b"a", bytes(16 * MIB + 1)]}, "row 1: the payload has 16777217 bytes; give 0 to 16777216"),
        ({"key": [1, 2]}, "the column 'key' is int64; give binary or string"),
        ({"key": ["a", "é" * 513]}, "row 1: the key has 1026 bytes; give 0 to 1024"),
        ({"kind": [b"a", b"b"]}, "the column 'kind' is binary; give string"),
        ({"encoding": [None, "x" * 1_025]}, "row 1: the encoding has 1025 bytes; give 0 to 1024"),
        ({"reference": [["a"], ["b"]]}, "the column 'reference' is list<"),
        ({"dedup": [None, "x" * 1_025]}, "row 1: the dedup has 1025 bytes; give 1 to 1024"),
        ({"dedup": ["x", ""]}, "row 1: the dedup has 0 bytes; give 1 to 1024"),
        ({"priority": [None, 10]}, "row 1: the priority is 10; give 0 to 9"),
        ({"priority": [-1, 5]}, "row 0: the priority is -1; give 0 to 9"),
        ({"priority": [5.0, 5.0]}, "the column 'priority' is double; give an integer type"),
        ({"priority": pa.array([5, 1 << 63], pa.uint64())}, "the column 'priority' cannot be read (Integer value "),
        ({"at": pa.array([WHEN] * 2, pa.timestamp("us"))}, f"the column 'at' is timestamp[us]; give {AT}"),
        ({"at": ["a", "b"]}, f"the column 'at' is string; give {AT}"),
        ({"at": [0, -1]}, f"row 1: the at is -1; give 0 to {values.LAST_INSTANT}"),
        ({"at": pa.array([1 << 60] * 2, pa.timestamp("s", "UTC"))}, "the column 'at' cannot be read (Casting "),
        ({"ttl": [1.5, 2.5]}, f"the column 'ttl' is double; give {TTL}"),
        ({"ttl": [None, 0]}, f"row 1: the ttl is 0; give 1 to {MAX_DELAY}"),
        ({"ttl": pa.array([1 << 60] * 2, pa.duration("s"))}, "the column 'ttl' cannot be read (Casting "),
        ({"headers": ["a", "b"]}, f"the column 'headers' is string; give {HEADERS}"),
        ({"headers": [{"a": "b"}, {"a": "c"}]}, "the column 'headers' is struct<"),
        ({"headers": pa.array([[("a", 1)]] * 2, pa.map_(pa.string(), pa.int64()))}, "the column 'headers' is map<string, int64"),
        ({"headers": pa.array([[(b"a", "b")]] * 2, pa.map_(pa.binary(), pa.string()))}, "the column 'headers' is map<binary, string"),
        ({"headers": [None, b"\xc1"]}, "row 1: the headers are not MessagePack ("),
        (
            {"headers": pa.array([None, [("a", None)]], pa.map_(pa.string(), pa.string()))},
            "row 1: the header 'a' is NoneType; give str or ",
        ),
        ({"headers": pa.array([None, [("a", "x" * 65_536)]], pa.map_(pa.string(), pa.string()))}, "row 1: the headers has 65544 bytes; "),
    ],
)
def test_the_message_about_each_wrong_table(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        from_arrow(table(**columns))  # at once, not when the first batch is taken
    assert str(caught.value).startswith(says)
    assert "; " in str(caught.value)


def test_a_table_without_payloads_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^there is no column 'payload'; give one of binary or string$"):
        from_arrow(pa.table({"key": ["a"]}))


def test_a_repeated_column_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^there are several columns 'payload'; keep one$"):
        from_arrow(pa.Table.from_arrays([PAYLOAD, PAYLOAD], ["payload", "payload"]))


@pytest.mark.parametrize("given", [[b"a"], None, {"payload": [b"a"]}])
def test_something_else_than_a_table_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^the items are {type(given).__name__}; give a pyarrow Table or RecordBatch$"):
        from_arrow(given)


def test_a_stream_that_is_not_a_table_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^the items cannot be read as an Arrow table \(.+\); give a pyarrow Table or RecordBatch$"):
        from_arrow(pa.chunked_array([[1, 2]]))


@pytest.mark.parametrize(("kind", "edges"), [(pa.string(), [0, 1, 1]), (pa.binary(), [0, 255, 1])], ids=str)
def test_a_table_that_is_damaged_in_itself_is_refused(kind: Any, edges: list[int]) -> None:
    """Text that is not UTF-8, and a payload outside of its buffer: a foreign Arrow stream may hold both."""
    damaged = pa.Array.from_buffers(kind, 2, [None, pa.py_buffer(array("i", edges)), pa.py_buffer(b"\xff")])
    with pytest.raises(InvalidRequest, match=r"^the items cannot be read as an Arrow table \("):
        from_arrow(pa.table({"payload": damaged}))


# -- items to be handled -----------------------------------------------------------------------------


def test_the_schema() -> None:
    assert [f"{field.name} {field.type}" for field in item_schema()] == [
        "id string",
        "partition int32",
        "offset int64",
        "payload binary",
        "key binary",
        "headers map<string, binary>",
        "kind string",
        "encoding string",
        "reference string",
        "priority uint8",
        "produced_at timestamp[us, tz=UTC]",
        "at timestamp[us, tz=UTC]",
        "ttl duration[us]",
        "attempts int32",
    ]


def rows(part: arrow.ItemBlock) -> list[dict[str, Any]]:
    """The rows that `items_to_arrow` must give, made from the items one by one."""
    return [
        {
            "id": item.id,
            "partition": item.partition,
            "offset": item.offset,
            "payload": item.payload,
            "key": item.key_bytes,
            "headers": [(name, v.encode() if isinstance(v, str) else v) for name, v in item.headers.items()] or None,
            "kind": item.kind,
            "encoding": item.encoding,
            "reference": item.reference,
            "priority": item.priority,
            "produced_at": item.produced_at,
            "at": item.at,
            "ttl": None if item.ttl is None else timedelta(seconds=item.ttl),
            "attempts": item.attempts,
        }
        for item in items_of(ItemSource("q"), *part)
    ]


ATTEMPTS = st.dictionaries(st.integers(5, 9), st.integers(2, 9), max_size=3)
BATCHES = st.tuples(tables().map(lambda case: to_batch(case[1])), st.integers(0, 9), st.integers(1, 3))
PARTS = st.builds(
    lambda partition, chosen, produced_at, attempts: (
        partition,
        [chosen[1] + chosen[2] * index for index in range(len(chosen[0]))],
        chosen[0],
        produced_at,
        attempts,
    ),
    *(st.integers(0, 9), BATCHES, st.integers(0, 1 << 50), ATTEMPTS),
)


@given(st.lists(PARTS, max_size=3))
def test_items_are_the_same_in_arrow(parts: list[arrow.ItemBlock]) -> None:
    found = items_to_arrow(parts)
    found.validate(full=True)
    assert found.schema == item_schema()
    assert found.to_pylist() == [row for part in parts for row in rows(part)]


@given(tables())
def test_leased_items_can_be_produced_again(case: tuple[Any, list[NewItem]]) -> None:
    batch = to_batch(case[1]).drop_empty_columns()
    batch.dedups = None  # what a dedup id was called is not kept
    found = items_to_arrow([(3, range(17, 17 + len(batch)), batch, 5, {})])
    kept = found.select([name for name in found.schema.names if name not in ("id", "partition", "offset", "produced_at", "attempts")])
    assert one(kept) == batch


def test_items_that_were_never_leased_have_no_attempts() -> None:
    assert items_to_arrow([(0, [5, 6], Batch([b"a", b"b"]), 1, {6: 3})], usual_attempts=0).column("attempts").to_pylist() == [0, 3]


def test_headers_that_are_text_come_as_bytes() -> None:
    batch = items.single_item_batch(b"a", headers={"text": "é", "bytes": b"\xff"})
    assert items_to_arrow([(0, [0], batch, 1, {})]).column("headers").to_pylist() == [[("text", "é".encode()), ("bytes", b"\xff")]]


def test_damaged_headers_name_their_item() -> None:
    with pytest.raises(InvalidRequest, match=r"^item 3-18: the headers are not MessagePack"):
        items_to_arrow([(3, [17, 18], Batch([b"a", b"b"], headers=[None, b"\xc1"]), 1, {})])


def test_more_than_a_record_batch_can_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        items_to_arrow([(0, range(128), Batch([bytes(16 * MIB)] * 128), 1, {})])
    says = "the items have 2147483648 payload bytes, which one record batch cannot hold; take fewer at a time"
    assert str(caught.value) == says


@pytest.mark.parametrize("call", [item_schema.__wrapped__, lambda: from_arrow(table()), lambda: items_to_arrow([])])
def test_without_pyarrow_the_error_says_what_to_install(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.compute", None)
    with pytest.raises(InvalidRequest, match=r"^pyarrow is not installed; run pip install 'penstock\[arrow\]'$"):
        call()
