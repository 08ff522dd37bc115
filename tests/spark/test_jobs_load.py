"""The job load: every format, every reason for which a row cannot be an item, and repeated loads."""

import csv
import io
import json
import signal
import subprocess
import sys
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import penstock
from penstock.errors import InvalidRequest, PenstockError, QueueNotFound
from penstock.spark import routing
from penstock.spark.jobs import load as job
from penstock.spark.jobs import row_mapping, source_files
from penstock.spark.jobs.load import LoadResult, load
from penstock.spark.jobs.progress import to_penstock_error
from penstock.words.limits import MAX_KEY_BYTES, MAX_PAYLOAD_BYTES

ROWS = 120


@pytest.fixture
def broker(broker_dir: str) -> str:
    with penstock.open(broker_dir) as made:
        made.create_queue("orders", partitions=3)
    return broker_dir


def items(broker: str) -> list[penstock.Item]:
    """The items of the queue, by partition, oldest first."""
    with penstock.open(broker) as opened:
        return opened.queue("orders").cursor("check").read(10_000)


def quarantined(found: LoadResult) -> list[dict[str, Any]]:
    assert found.quarantine is not None
    return [json.loads(line) for path in Path(found.quarantine).glob("*.json") for line in path.read_text().splitlines()]


def by_key(found: list[penstock.Item], field: str) -> dict[str | None, list[str]]:
    order: dict[str | None, list[str]] = defaultdict(list)
    for item in found:
        order[item.key].append(item.value[field])
    return order


def test_csv(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    good = [
        {"n": f"{n:05d}", "customer": f"c{n % 7}", "note": ('a "quote"\nand a line', "", "plain, with comma")[n % 3]} for n in range(ROWS)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, ["n", "customer", "note"])
    writer.writeheader()
    writer.writerows(sorted(good, key=lambda row: row["n"][::-1]))  # in an order that is not that of the keys
    lines = text.getvalue() + "90001,c1\r\n90002,c1,x,too many\r\n90003," + "c" * (MAX_KEY_BYTES + 1) + ",x\r\n"
    source = tmp_path / "orders.csv"
    source.write_text(lines, newline="")
    found = load(spark, str(source), broker, "orders", key="customer", kind="order", order_by="n", quarantine=str(tmp_path / "bad"))
    assert (found.files, found.rows, found.items, found.quarantined, found.repeated) == (1, ROWS + 3, ROWS, 3, False)
    assert found.reasons == {row_mapping.NOT_A_ROW: 2, row_mapping.LONG_KEY: 1}

    stored = items(broker)
    expected = [{**row, "note": row["note"].replace("\r\n", "\n") or None} for row in good]
    assert sorted((item.value for item in stored), key=lambda row: row["n"]) == expected
    assert {item.kind for item in stored} == {"order"} and {item.encoding for item in stored} == {"json"}
    assert by_key(stored, "n") == {f"c{k}": [f"{n:05d}" for n in range(k, ROWS, 7)] for k in range(7)}

    bad = sorted(quarantined(found), key=lambda row: row["raw"])
    assert [row["reason"] for row in bad] == [row_mapping.NOT_A_ROW, row_mapping.NOT_A_ROW, row_mapping.LONG_KEY]
    assert bad[0] == {
        "raw": "90001,c1",
        "file": source.as_uri().replace("///", "/"),
        "reason": row_mapping.NOT_A_ROW,
        "detail": "not a row of 3 columns",
    }
    assert bad[1]["raw"] == "90002,c1,x,too many" and json.loads(bad[2]["raw"])["n"] == "90003"


def test_json_lines(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    good = [b'{"id": %d, "price": 1.10, "big": 123456789012345678901234567890}' % n for n in range(ROWS)]
    wrong = [b'{"id": 1} and more', b'{"id": 2', b"{'id': 3}", b'{"id": "\xff"}', b'{"id": "' + b"k" * (MAX_KEY_BYTES + 1) + b'"}']
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n".join([*good[:50], b"", *wrong]))
    (tmp_path / "in" / "b.jsonl").write_bytes(b"\n".join([*good[50:], b'[1, "no object, and so without a key"]', b""]))
    given: dict[str, Any] = {"key": "id", "quarantine": str(tmp_path / "bad")}
    found = load(spark, str(tmp_path / "in"), broker, "orders", **given)
    assert (found.files, found.rows, found.items, found.quarantined) == (2, ROWS + 6, ROWS + 1, 5)
    assert found.reasons == {row_mapping.NOT_A_ROW: 4, row_mapping.LONG_KEY: 1} and not found.adopted
    details = {row["raw"]: row["detail"] for row in quarantined(found) if row["reason"] == row_mapping.NOT_A_ROW}
    assert "trailing characters" in details['{"id": 1} and more'] and "truncated" in details['{"id": 2']
    again = load(spark, str(tmp_path / "in"), broker, "orders", **given)
    assert again == LoadResult(found.load_id, 2, 0, 0, 0, {}, None, True, False)  # it still waits in the inbox

    stored = items(broker)
    assert sorted((item.key or "", item.payload) for item in stored) == sorted(
        [*((str(n), line) for n, line in enumerate(good)), ("", b'[1, "no object, and so without a key"]')]
    )
    assert load(spark, str(tmp_path / "in"), broker, "orders", **given) == LoadResult(found.load_id, 2, 0, 0, 0, {}, None, True, True)
    assert len(items(broker)) == ROWS + 1
    other = load(spark, str(tmp_path / "in" / "b.jsonl"), broker, "orders", load_id="once more")
    assert (other.load_id, other.items) == ("once more", ROWS - 50 + 1)
    assert len(items(broker)) == ROWS + 1 + other.items


@pytest.mark.parametrize(
    ("text", "whole", "faults"),
    [
        ("id,name\n1,a\r\n2,b\n", ["b"], ["ends with a carriage return"]),
        ("id,name\r\n1,a\n2,b\r\n3,c\r\n", ["c"], ["not a row of 2 columns, but several lines"]),
    ],
    ids=["first LF", "first CRLF"],
)
def test_csv_with_mixed_line_ends(spark: SparkSession, broker: str, tmp_path: Path, text: str, whole: list[str], faults: list[str]) -> None:
    """No cell gets a part of a line end: such rows are malformed. With multiLine=false they are rows."""
    source = tmp_path / "in.csv"
    source.write_bytes(text.encode())
    found = load(spark, str(source), broker, "orders", payload="name", quarantine=str(tmp_path / "bad"))
    assert [item.payload.decode() for item in items(broker)] == whole
    assert [row["detail"].partition(": line ends are mixed")[0] for row in quarantined(found)] == faults
    load(spark, str(source), broker, "orders", payload="name", load_id="again", options={"multiLine": "false"})
    every = ["a", "b", "c"][: text.count("\n") - 1]
    assert sorted(item.payload.decode() for item in items(broker)) == sorted([*whole, *every])


def test_csv_that_is_not_utf8(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "latin.csv").write_bytes("name,city\nmüller,Bonn\nmeier,Köln\nschmidt,Ulm\n".encode("latin-1"))
    # a replacement character that is meant
    (tmp_path / "in" / "unicode.csv").write_text("name,city\nmöller,\ufffd\n", "utf-8")
    source = str(tmp_path / "in")
    with pytest.raises(InvalidRequest, match=r"2 of 4 rows cannot be items .2 × not UTF-8: give the option encoding"):
        load(spark, source, broker, "orders", key="name")
    found = load(spark, source, broker, "orders", key="name", quarantine=str(tmp_path / "bad"))
    assert found.reasons == {source_files.NOT_UTF8: 2} and {row["detail"] for row in quarantined(found)} == {source_files.NOT_UTF8}
    assert {item.key: item.value["city"] for item in items(broker)} == {"schmidt": "Ulm", "möller": "\ufffd"}
    latin = load(spark, f"{source}/latin.csv", broker, "orders", key="name", options={"encoding": "ISO-8859-1"})
    assert (latin.items, latin.quarantined) == (3, 0)
    assert {"müller", "meier"} <= {item.key for item in items(broker)}


def test_json_without_columns_has_no_payload_column(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"payload": "x"}\n[1, 2]\n {"other": 1}\n3\n')
    found = load(spark, str(tmp_path / "a.jsonl"), broker, "orders", quarantine=str(tmp_path / "bad"))
    assert found.reasons == {row_mapping.NOT_A_ROW: 2, row_mapping.NO_PAYLOAD: 1}
    assert {row["raw"]: row["detail"] for row in quarantined(found) if row["reason"] == row_mapping.NOT_A_ROW} == dict.fromkeys(
        ("[1, 2]", "3"), row_mapping.NO_OBJECT
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.csv", "b.json"], "several formats .csv, json.; load each"),
        (["a.csv", "b.json", "c.txt"], "several formats .csv, json.; load each"),
        (["a.csv", "c.txt"], "'c.txt' has no known suffix, and others are csv; leave it out"),
        (["x/c.txt"], "'c.txt' has no known suffix; give format: parquet, csv, json"),
    ],
)
def test_files_whose_format_is_not_known(names: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        source_files._format_of(names)


def test_a_file_that_cannot_be_read_is_named() -> None:
    said = (
        "An error occurred while calling o70.parquet.\n: org.apache.spark.SparkException: [FAILED_READ_FILE.CANNOT_READ_FILE_FOOTER] "
        "Encountered error while reading file file:/in/a.parquet. Could not read footer.\nCaused by: java.lang.RuntimeException: too short"
    )
    found = to_penstock_error(PySparkException(said), "checking the rows")
    assert str(found) == "checking the rows failed: file:/in/a.parquet cannot be read (too short); fix that file, or leave it out"


def test_parquet_of_items(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    moment = datetime(2024, 1, 2, 3, 4, 5, 6, UTC)
    fields: dict[str, Any] = {
        "payload": b"p", "key": b"k", "headers": {"a": b"1"}, "kind": "k", "reference": "r", "priority": 3, "at": moment,
        "ttl": timedelta(hours=100_000 / 2), "dedup": b"d", "other": "left out",
    }  # fmt: skip
    plain = dict.fromkeys(fields) | {"payload": b"\x00\xff"}
    faults: dict[str, dict[str, Any]] = {
        row_mapping.NO_PAYLOAD: {"payload": None},
        row_mapping.LONG_PAYLOAD: {"payload": bytes(MAX_PAYLOAD_BYTES + 1)},
        row_mapping.LONG_KEY: {"key": bytes(MAX_KEY_BYTES + 1)},
        row_mapping.BAD_HEADERS: {"headers": {"a": None}},
        row_mapping.LONG_HEADERS: {"headers": {"a": bytes(65_536)}},
        row_mapping.LONG_TEXT: {"reference": "é" * 513},
        row_mapping.EMPTY_DEDUP: {"dedup": b""},
        row_mapping.BAD_PRIORITY: {"priority": 10},
        row_mapping.BAD_AT: {"at": datetime(1969, 1, 1, tzinfo=UTC)},
        row_mapping.BAD_TTL: {"ttl": timedelta(days=4_000)},
    }
    given = [fields, plain, *({**plain, **fault} for fault in faults.values())]
    binary = pa.map_(pa.string(), pa.binary())
    types = [
        pa.binary(),
        pa.binary(),
        binary,
        pa.string(),
        pa.string(),
        pa.int32(),
        pa.timestamp("us", "UTC"),
        pa.duration("us"),
        pa.binary(),
        pa.string(),
    ]
    columns = {
        name: pa.array([list(row[name].items()) if isinstance(row[name], dict) else row[name] for row in given], type)
        for name, type in zip(fields, types, strict=True)
    }
    pq.write_table(pa.table(columns | {"ttl": columns["ttl"].cast(pa.int64())}), tmp_path / "items.parquet")
    found = load(spark, str(tmp_path / "items.parquet"), broker, "orders", quarantine=str(tmp_path / "bad"))
    assert found.reasons == dict.fromkeys(faults, 1) and (found.rows, found.items) == (len(given), 2)
    stored = {item.payload: item for item in items(broker)}
    full = stored[b"p"]
    assert (full.key, full.headers, full.kind, full.reference, full.priority, full.encoding) == ("k", {"a": b"1"}, "k", "r", 3, None)
    assert (full.at, full.ttl) == (moment, fields["ttl"].total_seconds())
    assert stored[b"\x00\xff"].key is None and stored[b"\x00\xff"].priority == 5


def test_one_bad_row_refuses_a_load_without_quarantine(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    (tmp_path / "typed.csv").write_text("id,amount\n1,2.5\n2,much\n")
    with pytest.raises(InvalidRequest, match=r"1 of 2 rows cannot be items .1 × not a row of this format.; fix them, or give a quarantine"):
        load(spark, str(tmp_path / "typed.csv"), broker, "orders", schema="id long, amount double")
    assert not [*Path(broker, "inbox").glob("*")] and items(broker) == []


@pytest.mark.long  # its tasks are tried four times
def test_a_load_that_fails_adds_nothing_and_can_be_done_again(
    spark: SparkSession, broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"n": {n}}}' for n in range(ROWS)))
    write = routing.write

    def broken(good: DataFrame, *args: Any, **options: Any) -> None:
        last = F.col("payload") == F.lit(f'{{"n": {ROWS - 1}}}'.encode())
        payload = F.when(last, F.raise_error(F.lit("no more"))).otherwise(F.col("payload"))
        write(good.withColumn("payload", payload), *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(job, "write", broken)
        with pytest.raises(PenstockError, match="no more"):
            load(spark, str(tmp_path / "a.jsonl"), broker, "orders", key="n")
    assert items(broker) == []
    assert load(spark, str(tmp_path / "a.jsonl"), broker, "orders", key="n").items == ROWS
    assert len(items(broker)) == ROWS


@pytest.mark.parametrize(("suffix", "text"), [("json", '{"n": "%d"}'), ("csv", "n\n%d\n")])
def test_files_in_subfolders_are_loaded(spark: SparkSession, broker: str, tmp_path: Path, suffix: str, text: str) -> None:
    for number, folder in enumerate(("in", "in/sub", "in/sub/deep")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{number}.{suffix}").write_text(text % number)
    found = load(spark, str(tmp_path / "in"), broker, "orders")
    assert (found.files, found.rows, found.items) == (3, 3, 3)
    assert sorted(item.value["n"] for item in items(broker)) == ["0", "1", "2"]


def test_partition_folders_are_columns(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / "in" / f"day={day}").mkdir(parents=True)
        pq.write_table(pa.table({"n": [day]}), tmp_path / "in" / f"day={day}" / "a.parquet")
    found = load(spark, str(tmp_path / "in"), broker, "orders", key="day")
    assert (found.files, found.items) == (2, 2)
    assert sorted((item.key, item.value["n"]) for item in items(broker)) == [("1", 1), ("2", 2)]


def test_a_folder_of_tsv_files_is_read_with_tabs(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tsv").write_text("x\ty\n1\t2,3\n")
    assert load(spark, str(tmp_path / "in"), broker, "orders").items == 1
    assert [item.value for item in items(broker)] == [{"x": "1", "y": "2,3"}]


def test_a_load_id_does_not_lead_out_of_the_quarantine(spark: SparkSession, broker: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}\nnot json\n")
    found = load(spark, str(tmp_path / "a.json"), broker, "orders", quarantine=str(tmp_path / "bad"), load_id="x/../../kept")
    assert found.quarantine is not None and Path(found.quarantine).parent == tmp_path / "bad"
    assert len(quarantined(found)) == 1 and not (tmp_path / "kept").exists()


def test_load_registers_the_data_source(spark: SparkSession, broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that penstock.spark.session did not make does not have it."""
    registered: list[SparkSession] = []
    monkeypatch.setattr(job, "register", registered.append)
    (tmp_path / "a.json").write_text("{}\n")
    assert load(spark, str(tmp_path / "a.json"), broker, "orders").items == 1
    assert registered == [spark]


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("nope.csv", {}, "Path does not exist"),
        ("a.csv", {"format": "xml"}, "format is 'xml'; use parquet, csv, json"),
        ("a.csv", {"key": "nope"}, "the source has no column 'nope' for the key; it has id, name"),
        ("a.csv", {"order_by": "nope"}, "the source has no column 'nope' to order by"),
        ("a.csv", {"order_by": "id sideways"}, "orderBy has 'id sideways'"),
        ("a.csv", {"schema": "id nonsense nonsense"}, "the schema 'id nonsense nonsense' cannot be parsed"),
        ("a.csv", {"load_id": " "}, "load_id is empty"),
        ("empty.csv", {}, "empty.csv' is empty, so there is nothing to load"),
        ("hollow", {}, "there are no files in .*hollow', or only empty ones"),
        ("unknown.dat", {}, "'unknown.dat' has no known suffix; give format"),
        ("folder", {}, r"the files are of several formats .csv, json.; load each format separately, such as ..csv"),
        ("tabs", {}, r"the files are of several formats .csv, tsv.; load each format separately"),
        ("mixed", {}, r"'notes.txt' has no known suffix, and others are csv; leave it out \(..csv\), or give format"),
        ("names.csv", {}, "the names of the columns are not UTF-8: give the option encoding"),
        ("a.json", {"options": {"multiLine": "true"}}, "JSON is read line by line"),
        ("not.parquet", {}, "not a Parquet file.*; fix that file, or leave it out"),
    ],
)
def test_wrong_arguments_and_files_of_load(
    spark: SparkSession, broker: str, tmp_path: Path, source: str, options: dict[str, Any], said: str
) -> None:
    for name, text in {
        "a.csv": "id,name\n1,a\n",
        "a.json": '{"id": 1}\n',
        "empty.csv": "",
        "unknown.dat": "x",
        "not.parquet": "PAR1 nope",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "names.csv").write_bytes("straße\nx\n".encode("latin-1"))
    for name, inside in {"hollow": "a.csv", "mixed": "notes.txt"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).write_text("" if name == "hollow" else "x")
    (tmp_path / "mixed" / "a.csv").write_text("id\n1\n")
    (tmp_path / "tabs").mkdir()
    (tmp_path / "tabs" / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "tabs" / "b.tsv").write_text("x\ty\n1\t2\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.csv").write_text("id\n1\n")
    (tmp_path / "folder" / "b.json").write_text('{"id": 1}\n')
    with pytest.raises(PenstockError, match=said):
        load(spark, str(tmp_path / source), broker, "orders", **options)
    with pytest.raises(QueueNotFound):
        load(spark, str(tmp_path / source), broker, "nope", **options)


@pytest.mark.long
@pytest.mark.parametrize("step", ["before", "after"])
def test_killed_at_the_commit(spark: SparkSession, broker: str, tmp_path: Path, step: str) -> None:
    """A process is killed after staging and before publishing, or after publishing and before load returns."""
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"n": {n}}}' for n in range(ROWS)))
    command = [sys.executable, "-m", "tests.spark.load_program", broker, str(tmp_path / "a.jsonl"), step]
    ended = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(items(broker)) == (0 if step == "before" else ROWS)
    again = load(spark, str(tmp_path / "a.jsonl"), broker, "orders")
    assert (again.repeated, again.items) == ((False, ROWS) if step == "before" else (True, 0))
    assert sorted(item.value["n"] for item in items(broker)) == [*range(ROWS)]
