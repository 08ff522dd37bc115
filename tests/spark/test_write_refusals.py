"""What cannot be written is refused on the driver, with what to do, before a task runs; no JVM is needed to see it."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.types import StructType

import penstock
from penstock.api import arrow
from penstock.spark import routing
from penstock.spark.options import WRITE, parse_options
from penstock.spark.routing import write
from penstock.spark.writer import BatchWriter, StreamWriter
from penstock.words import limits
from penstock.words.errors import InvalidRequest, PenstockError, QueueNotFound
from penstock.words.limits import MAX_DELAY
from penstock.words.values import LAST_INSTANT
from tests.spark.failing_writers import inbox

KINDS: dict[str, T.DataType] = {
    "binary": T.BinaryType(),
    "string": T.StringType(),
    "byte": T.ByteType(),
    "int": T.IntegerType(),
    "long": T.LongType(),
    "double": T.DoubleType(),
    "void": T.NullType(),
    "timestamp": T.TimestampType(),
    "timestamp_ntz": T.TimestampNTZType(),
    "interval": T.DayTimeIntervalType(),
    "calendar": T.CalendarIntervalType(),
    "variant": T.VariantType(),
    "map<string,string>": T.MapType(T.StringType(), T.StringType()),
    "map<string,binary>": T.MapType(T.StringType(), T.BinaryType()),
    "map<string,int>": T.MapType(T.StringType(), T.IntegerType()),
    "array<string>": T.ArrayType(T.StringType()),
}


@pytest.fixture
def orders(broker_dir: str) -> str:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders", partitions=2)
    return broker_dir


def schema(text: str) -> StructType:
    found = StructType()
    for field in text.split("; "):
        name, kind = field.split(" ")
        found.add(name, KINDS[kind])
    return found


@pytest.mark.parametrize(
    "columns",
    [
        "payload binary",
        "payload string",
        "payload binary; key string; headers map<string,string>; kind string; encoding string; reference string",
        "payload binary; key binary; headers map<string,binary>; priority byte; at timestamp; ttl interval; dedup string",
        "payload binary; headers binary; priority long; at long; ttl long; dedup binary",
        "payload binary; key void; headers void; kind void; priority void; at void; ttl void; dedup void",
    ],
)
def test_columns_that_are_taken(orders: str, columns: str) -> None:
    BatchWriter(parse_options({"broker": orders, "queue": "orders"}), schema(columns), False)
    StreamWriter(parse_options({"broker": orders, "queue": "orders"}), schema(columns), False)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("key string", "no column 'payload' (it has key); give the column with the items this name"),
        ("payload int", "the column 'payload' is int; give binary or string"),
        ("payload void", "the column 'payload' is void; give binary or string"),
        ("payload variant", "the column 'payload' is variant; give binary or string"),
        ("payload binary; key long", "the column 'key' is bigint; give binary or string"),
        (
            "payload binary; value string",
            "the column 'value' is not known; drop it, name it in orderBy, or rename it to one of payload, key",
        ),
        (
            "payload binary; value string; a string; b int",
            "the columns 'value', 'a', 'b' are not known; drop them, name them in orderBy, or rename them to one of payload, key",
        ),
        ("payload binary; payload string", "several columns 'payload'; keep one"),
        (
            "payload binary; at timestamp_ntz",
            "the column 'at' is timestamp_ntz; give timestamp (cast a date or timestamp_ntz to it), or bigint (microseconds since 1970)",
        ),
        ("payload binary; at double", "the column 'at' is double; give timestamp (cast"),
        ("payload binary; ttl string", "the column 'ttl' is string; give interval day to second, or bigint (microseconds)"),
        ("payload binary; ttl calendar", "the column 'ttl' is interval; give interval day to second, or bigint"),
        ("payload binary; priority string", "the column 'priority' is string; give an integer type, such as int"),
        ("payload binary; headers map<string,int>", "the column 'headers' is map<string,int>; give map<string, string>"),
        ("payload binary; headers array<string>", "the column 'headers' is array<string>; give map<string, string>"),
        ("payload binary; kind binary", "the column 'kind' is binary; give string"),
    ],
)
def test_columns_that_are_not(orders: str, columns: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BatchWriter(parse_options({"broker": orders, "queue": "orders"}), schema(columns), False)
    assert said in str(refused.value)
    assert inbox(orders) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"orderBy": "ts"}, "orderBy names 'ts', and the DataFrame has payload, tags, seq; name one of these"),
        ({"orderBy": "seq downward"}, "orderBy has 'seq downward'; give columns such as 'ts, seq desc'"),
        ({"orderBy": "tags"}, "orderBy names 'tags', which is array<string>; name columns of numbers, texts or times"),
        ({"orderBy": "seq"}, "the column 'tags' is not known"),
        ({"startingOffsets": "earliest"}, "startingOffsets is for reading; leave it out"),
        ({"consume": "true"}, "consume is for reading; leave it out"),
        ({"includeHeaders": "true"}, "includeHeaders is for reading; leave it out"),
        ({"minPartitions": "4"}, "minPartitions is for reading; leave it out"),
        ({"maxItemsPerTrigger": "4"}, "maxItemsPerTrigger is for streams (spark.readStream); leave it out"),
        ({"table": "events"}, "table events cannot be written"),
    ],
)
def test_options_that_do_not_fit(orders: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BatchWriter(
            parse_options({"broker": orders, "queue": "orders", **options}, WRITE),
            schema("payload binary; tags array<string>; seq long"),
            False,
        )
    assert said in str(refused.value)


def test_overwriting_is_refused(orders: str) -> None:
    for writer in (BatchWriter, StreamWriter):
        with pytest.raises(InvalidRequest, match=r'not overwritten; use \.mode\("append"\)'):
            writer(parse_options({"broker": orders, "queue": "orders"}), schema("payload binary"), True)


def test_a_stream_has_no_write_id(orders: str) -> None:
    with pytest.raises(InvalidRequest, match="writeId is for batch writes"):
        StreamWriter(parse_options({"broker": orders, "queue": "orders", "writeId": "x"}), schema("payload binary"), False)


def test_a_queue_or_a_broker_that_is_not_there(orders: str, tmp_path: Path) -> None:
    with pytest.raises(QueueNotFound, match="no queue 'bills'"):
        BatchWriter(parse_options({"broker": orders, "queue": "bills"}), schema("payload binary"), False)
    with pytest.raises(InvalidRequest, match="nowhere does not exist; give the directory of a broker"):
        BatchWriter(parse_options({"broker": str(tmp_path / "nowhere"), "queue": "orders"}), schema("payload binary"), False)


# -- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"payload": ["a", None], "key": ["k", "c-17"]}, "row 1 (key 'c-17'): the payload is null; give bytes or text"),
        ({"payload": ["a", None], "key": [b"k", b"\xff7"]}, "row 1 (key '\\\\xff7'): the payload is null; give bytes or text"),
        ({"payload": ["a", None], "key": ["k", None]}, "row 1: the payload is null; give bytes or text"),
        ({"payload": ["a", None]}, "row 1: the payload is null; give bytes or text"),
        ({"payload": ["a", "b"], "key": ["k", "l"], "priority": [1, 10]}, "row 1 (key 'l'): the priority is 10; give 0 to 9"),
        ({"payload": ["a", "b"], "ttl": [1, 0]}, f"row 1: the ttl is 0; give 1 to {MAX_DELAY} microseconds"),
        ({"payload": ["a", "b"], "at": [-1, 0]}, f"row 0: the at is -1; give 0 to {LAST_INSTANT} microseconds"),
        ({"payload": ["a", "b"], "key": ["k", "x" * 1_025]}, "row 1: the key has 1025 bytes; give 0 to 1024"),
    ],
)
def test_a_row_that_cannot_be_is_named_by_its_key(columns: dict[str, list[object]], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        arrow.read_columns(pa.table(columns))
    assert str(refused.value) == said


def test_only_a_few_of_many_unknown_columns_are_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        arrow.read_columns(pa.table({"payload": ["a"], **{f"c{n}": [n] for n in range(200)}}))
    shown = ", ".join(f"'c{n}'" for n in range(8))
    assert str(refused.value).startswith(f"the columns {shown} and 192 more are not known; drop them or use one of payload, key")


def test_the_page_tells_the_limits() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text().partition("## Writing")[2]
    told = dict(re.findall(r"^\| (\w+)[^|]* \|[^|]*\| ([^|]+) \|$", page.partition("\n## ")[0], re.MULTILINE))
    sizes = {"payload": limits.MAX_PAYLOAD_BYTES, "headers": limits.MAX_HEADERS_BYTES, "key": limits.MAX_KEY_BYTES}
    sizes |= {"kind": limits.MAX_NAME_BYTES, "dedup": limits.MAX_NAME_BYTES}
    units = {"MiB": limits.MIB, "KiB": limits.KIB, "bytes": 1}
    for name, size in sizes.items():
        number, unit, *_ = told[name].replace(";", " ").split()
        assert int(number.replace(",", "")) * units[unit] == size, name
    assert told["priority"] == f"{limits.FIRST_PRIORITY} to {limits.LAST_PRIORITY}; null is {limits.DEFAULT_PRIORITY}"
    assert "case-sensitive: `Payload`" in page and told["ttl"] == "1 microsecond to 10 years"


# -- spark.write says it itself -------------------------------------------------------------------------


class FakeDataFrame:
    """The parts of a DataFrame that are used before Spark is."""

    isStreaming = False

    def __init__(self, columns: str) -> None:
        self.schema = schema(columns)
        self.columns = self.schema.names


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("payload int", {}, "the column 'payload' is int; give binary or string"),
        ("key string", {}, "no column 'payload' (it has key)"),
        ("payload string; a int; b int", {}, "the columns 'a', 'b' are not known; drop them"),
        ("payload string", {"order_by": "nr"}, "orderBy names 'nr', and the DataFrame has payload"),
        ("payload string", {"order_by": ""}, "orderBy is ''; give names with commas between them"),
        ("payload string", {"write_id": " "}, "writeId is empty; give a text or leave it out"),
        ("payload string", {"adopt_timeout": -1}, "adoptTimeout is '-1'; give seconds from 0 to 86400"),
        ("payload string", {"startingOffsets": "latest"}, "startingOffsets is for reading; leave it out"),
        ("payload string", {"queue": "bills"}, "no queue 'bills'"),
        ("payload string", {"broker": "/nowhere"}, "/nowhere does not exist; give the directory of a broker"),
    ],
)
def test_write_refuses_before_spark_begins(orders: str, columns: str, options: dict[str, object], said: str) -> None:
    given: dict[str, Any] = {"broker": orders, "queue": "orders", **options}
    with pytest.raises(PenstockError) as refused:
        write(FakeDataFrame(columns), **given)  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_write_takes_its_options_as_keywords(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = MagicMock()
    monkeypatch.setattr(routing, "routed", lambda df, broker, queue: seen)
    write(FakeDataFrame("payload string"), orders, "orders", write_id="monday", adopt_timeout=2.5)  # type: ignore[arg-type]
    options = seen.write.format.return_value.mode.return_value.options.call_args.kwargs
    assert options == {"broker": orders, "queue": "orders", "writeId": "monday", "adoptTimeout": "2.5"}
    write(FakeDataFrame("payload string"), orders, "orders", txn_app_id="app", txn_version=0)  # type: ignore[arg-type]
    options = seen.write.format.return_value.mode.return_value.options.call_args.kwargs
    assert options == {"broker": orders, "queue": "orders", "txnAppId": "app", "txnVersion": "0"}


# -- through Spark --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "mode", "said"),
    [
        ("id", "append", "the column 'id' is not known"),
        ("1 payload", "append", "the column 'payload' is int; give binary or string"),
        ("'x' payload", "overwrite", "items can be added to a queue, not overwritten"),
    ],
)
def test_spark_says_what_is_wrong_and_runs_no_task(spark: SparkSession, orders: str, columns: str, mode: str, said: str) -> None:
    tracker = spark.sparkContext.statusTracker()
    spark.sparkContext.setJobGroup("refused", "a write that is refused")
    try:
        df = spark.range(10).selectExpr(columns)
        with pytest.raises(PySparkException) as refused:
            df.write.format("penstock").options(broker=orders, queue="orders").mode(mode).save()
        assert said in str(refused.value)
        infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup("refused")]
        stages = [tracker.getStageInfo(stage) for info in infos if info is not None for stage in info.stageIds]
        assert all(stage is None or stage.numCompletedTasks + stage.numFailedTasks + stage.numActiveTasks == 0 for stage in stages)
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    assert inbox(orders) == []
