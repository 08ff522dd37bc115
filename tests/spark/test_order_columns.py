"""Texts that a load is ordered by: numbers sort as numbers, times as times, and what has no order is refused."""

import json
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import penstock
from penstock.errors import InvalidRequest
from penstock.spark.jobs import order_columns
from penstock.spark.jobs.load import load
from penstock.spark.jobs.order_columns import (
    CLOCK_TIME,
    DATE,
    DECIMAL,
    EXPONENT,
    FLOAT,
    LOCAL_NUMBER,
    LONG_DECIMAL,
    LONG_NUMBER,
    LONG_WHOLE,
    NESTED,
    NUMBERS,
    TEXT,
    UNKNOWN_TIME,
    WHOLE,
    ZONED_TIME,
    ColumnKinds,
    sort_column,
    sort_type,
    value_kind,
)

SORTED: dict[int, list[str]] = {
    WHOLE: ["-10", "-9", "0", " 8 ", "9", "+10", "011"],
    LONG_WHOLE: ["7", "9007199254740992", "9007199254740993", "123456789012345678"],
    DECIMAL: ["-1.5", "-1.25", ".5", "2", "10.", "1234567890.1234567"],
    LONG_DECIMAL: ["2", "10.", "10.000000000000000001", "9007199254740992.25", "9007199254740992.5", "99999999999999999999"],
    EXPONENT: ["-1e3", "1.5e-17", "9", "1.5e1", "2E10", "9007199254740992", "9.007199254740993e15", "9007199254740994"],
    FLOAT: ["-1e300", "1e-30", "1.5e1", "20.5", "1e20"],
    DATE: [
        "1969-12-31T23:59:59.5",
        "2026-03-29T02:30",  # in the zone of the test, this hour is left out
        "2026-03-29T03:10",
        "2026-05-01",
        "2026-05-01 00:00:00.000001",
        "2026-05-01T00:00:00.0000011",
        "2026-05-01T09:00",
    ],
    ZONED_TIME: [
        "2026-05-01T09:00:00+02:00",
        "2026-05-01T08:00:00.123456788Z",
        "2026-05-01 08:00:00.123456789 Z",
        "2026-05-01T05:00:00-0400",
    ],
    TEXT: ["09:05", "1-2", "10:00:30", "10a", "9a", "NaN", "a", "a 1", "true"],
}
"""Values of each kind, as they sort."""
REFUSED = {
    LONG_NUMBER: ["123456789012345678901", "1.0000000000000000001"],
    UNKNOWN_TIME: [
        "31.12.2025",
        "12/31/25",
        "2026-02-30",
        "2026-5-1",
        "2026-05-01T25:00:00Z",
        "01/02/2026 10:00",
        "5 Jan 2026",
        "Jan 5 2026",
        "5-Jan-2026",
        "Mon, 05 January 2026 10:00:00 GMT",
    ],
    LOCAL_NUMBER: [
        "9,5",
        "1,234.5",
        "-1.234.567,5",
        "1 000",
        "1\u202f000",
        "1'000",
        "9%",
        "9.5 %",
        "$9",
        "9 €",
        "9_000",
        "9 kg",
        "\u22125",
        "0x10",
    ],
    CLOCK_TIME: ["9:05", "9:05:30.5", "100:00", "09:05 PM", "9 a.m."],
    NESTED: ['{"a":1}', "[1]"],
}


def test_every_text_looks_like_its_kind() -> None:
    """Without Spark: the patterns alone. Whether a time exists and a number is exact, Spark finds out."""
    checked = {UNKNOWN_TIME: {UNKNOWN_TIME, DATE, ZONED_TIME}, FLOAT: {EXPONENT}, TEXT: {TEXT}, NESTED: {TEXT}}
    for kind, texts in {**SORTED, **REFUSED}.items():
        for text in texts:
            matching = (one for pattern, one in order_columns._KINDS if re.fullmatch(pattern, text.strip(), re.ASCII))
            found = next(matching, TEXT)
            lower = bool(kind & NUMBERS and found & NUMBERS and found < kind)
            assert found in checked.get(kind, {kind}) or lower, text


def test_what_texts_are_and_how_they_sort(spark: SparkSession) -> None:
    expected = [(kind, text) for kind, texts in {**SORTED, **REFUSED}.items() for text in texts]
    rows = spark.createDataFrame([(0, None), *expected], "kind int, text string")
    texts, numbers = F.col("text"), {kind for kind in SORTED if kind & NUMBERS}
    as_kind = {f"as_{kind}": F.when(F.col("kind") == kind, sort_column(texts, kind)) for kind in SORTED}
    kinds = {"found": value_kind(texts, json=True), "in_csv": value_kind(texts, json=False)}
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        collected = rows.withColumns({**kinds, **as_kind}).collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    assert (collected[0].text, collected[0].found) == (None, None)
    for row in collected[1:]:
        assert row.found == row.kind or (row.kind in numbers and row.found in numbers and row.found < row.kind), row
        assert row.in_csv == (TEXT if row.found == NESTED else row.found)
    for kind, ordered in SORTED.items():
        values = {row.text: row[f"as_{kind}"] for row in collected[1:] if row.kind == kind}
        assert sorted(values, key=lambda text: values[text]) == ordered, kind
        assert len({*values.values()}) == len(ordered), "no two are the same"


@pytest.mark.parametrize(
    ("kinds", "sorted_as"),
    [
        (0, TEXT),
        (WHOLE, WHOLE),
        (WHOLE | DECIMAL, DECIMAL),
        (WHOLE | LONG_WHOLE, LONG_WHOLE),
        (WHOLE | LONG_WHOLE | LONG_DECIMAL | EXPONENT, EXPONENT),
        (WHOLE | DECIMAL | EXPONENT | FLOAT, FLOAT),
        (TEXT, TEXT),
        (DATE, DATE),
        (ZONED_TIME, ZONED_TIME),
    ],
)
def test_values_of_one_kind_have_an_order(kinds: int, sorted_as: int) -> None:
    assert sort_type("seq", ColumnKinds(kinds, "a", "b")) == sorted_as


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ColumnKinds(WHOLE | TEXT, "7", "n/a"), "'seq' to order by has values of several kinds (numbers such as '7', texts such as 'n/a')"),
        (ColumnKinds(DATE | ZONED_TIME, "a", "b"), "(dates and times without a time zone such as 'a', times with a time zone such as 'b')"),
        (ColumnKinds(WHOLE | DATE | TEXT, "1", "x"), "(numbers such as '1', dates and times without a time zone, texts such as 'x')"),
        (ColumnKinds(WHOLE | LONG_NUMBER, "1", "9" * 21), "several kinds (numbers such as '1', numbers of more than 20 digits"),
        (ColumnKinds(LONG_NUMBER, "9", "9"), "has numbers of more than 20 digits, or 18 after the point ('9'); give a schema"),
        (ColumnKinds(UNKNOWN_TIME, "1.2.26", "1.2.26"), "dates of an unknown format, or that do not exist ('1.2.26'); write them as"),
        (ColumnKinds(LOCAL_NUMBER, "9,5", "9,5"), "has numbers with commas, spaces, signs or units ('9,5'); write them as 1234.5, or"),
        (ColumnKinds(CLOCK_TIME, "9:05", "9:05"), "times of day that are not written as 09:05 or 21:05 ('9:05'); write them so, or give"),
        (ColumnKinds(WHOLE | LOCAL_NUMBER, "9", "9,5"), "(numbers such as '9', numbers with commas, spaces, signs or units such as"),
        (ColumnKinds(TEXT | CLOCK_TIME, "10:00", "9:05"), "(texts such as '10:00', times of day that are not written as 09:05"),
        (ColumnKinds(LONG_WHOLE | FLOAT, "1", "1e300"), "very large or small numbers ('1e300') beside numbers of more than 15 digits"),
        (ColumnKinds(NESTED, "[]", "[]"), "has objects or lists ('[]'); order by a column of numbers, texts or times"),
    ],
)  # fmt: skip
def test_values_without_a_common_order_are_refused(found: ColumnKinds, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        sort_type("seq", found)
    assert said in str(raised.value)


def test_every_kind_has_a_name() -> None:
    others = TEXT | DATE | ZONED_TIME | LONG_NUMBER | LOCAL_NUMBER | UNKNOWN_TIME | CLOCK_TIME | NESTED
    assert sum(order_columns.KIND_NAMES) == NUMBERS | others
    assert sum({*order_columns._TYPES}) == NUMBERS


@pytest.mark.parametrize(("format", "order_by"), [("json", "seq"), ("csv", "customer, seq desc")])
def test_a_load_orders_numbers_as_numbers_and_keeps_their_text(
    spark: SparkSession, broker_dir: str, tmp_path: Path, format: str, order_by: str
) -> None:
    source, numbers = tmp_path / f"orders.{format}", [7, 12, 1, 10, 2, 9, 11]
    if format == "json":
        payloads = {number: f'{{"customer": "c", "seq": {number}}}' for number in numbers}
        source.write_text("\n".join(payloads.values()))
    else:
        payloads = {number: json.dumps({"customer": "c", "seq": str(number)}, separators=(",", ":")) for number in numbers}
        source.write_text("customer,seq\n" + "".join(f"c,{number}\n" for number in numbers))
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders")
        load(spark, str(source), broker_dir, "orders", key="customer", order_by=order_by)
        found = [item.payload.decode() for item in queue.lease(20, per_key=20).items]
    assert found == [payloads[number] for number in sorted(numbers, reverse="desc" in order_by)]


def test_a_load_whose_order_is_not_known_is_refused(spark: SparkSession, broker_dir: str, tmp_path: Path) -> None:
    with penstock.open(broker_dir) as broker:
        queue = broker.create_queue("orders")
        source = tmp_path / "orders.jsonl"
        source.write_text('{"customer": "c", "seq": 9}\n{"customer": "c", "seq": "later"}\n{"customer": "c"}\n')
        with pytest.raises(InvalidRequest, match=r"\(numbers such as '9', texts such as 'later'\), which have no common order"):
            load(spark, str(source), broker_dir, "orders", key="customer", order_by="seq")
        assert queue.stats().produced == 0


def test_a_load_id_that_is_too_long_is_refused_before_spark_reads(spark: SparkSession, broker_dir: str, tmp_path: Path) -> None:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    with pytest.raises(InvalidRequest, match="load_id has 996 characters; give at most 995"):
        load(spark, str(tmp_path / "nothing.csv"), broker_dir, "orders", load_id="i" * 996)
