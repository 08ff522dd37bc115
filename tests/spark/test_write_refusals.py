"""What cannot be written is refused on the driver, with what to do, before a task runs; no JVM is needed to see it."""

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.types import StructType

import penstock
from penstock.spark.options import parse
from penstock.spark.writer import BatchWriter, StreamWriter
from penstock.words.errors import InvalidRequest, QueueNotFound
from tests.spark.writes import inbox

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
    BatchWriter(parse({"broker": orders, "queue": "orders"}), schema(columns), False)
    StreamWriter(parse({"broker": orders, "queue": "orders"}), schema(columns), False)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("key string", "no column 'payload' but key; name the one with the items so"),
        ("payload int", "the column 'payload' is int; give binary or string"),
        ("payload void", "the column 'payload' is void; give binary or string"),
        ("payload variant", "the column 'payload' is variant; give binary or string"),
        ("payload binary; key long", "the column 'key' is bigint; give binary or string"),
        (
            "payload binary; value string",
            "the column 'value' is not known; drop it, name it in orderBy, or rename it to one of payload, key",
        ),
        ("payload binary; payload string", "several columns 'payload'; keep one"),
        ("payload binary; at timestamp_ntz", "the column 'at' is timestamp_ntz; give a timestamp with a timezone"),
        ("payload binary; at double", "the column 'at' is double; give a timestamp with a timezone"),
        ("payload binary; ttl string", "the column 'ttl' is string; give a duration, or int64"),
        ("payload binary; ttl calendar", "the column 'ttl' is interval; give a duration, or int64"),
        ("payload binary; priority string", "the column 'priority' is string; give an integer type"),
        ("payload binary; headers map<string,int>", "the column 'headers' is map<string,int>; give map<string, string>"),
        ("payload binary; headers array<string>", "the column 'headers' is array<string>; give map<string, string>"),
        ("payload binary; kind binary", "the column 'kind' is binary; give string"),
    ],
)
def test_columns_that_are_not(orders: str, columns: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BatchWriter(parse({"broker": orders, "queue": "orders"}), schema(columns), False)
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
        ({"table": "events"}, "table events cannot be written"),
    ],
)
def test_options_that_do_not_fit(orders: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BatchWriter(parse({"broker": orders, "queue": "orders", **options}), schema("payload binary; tags array<string>; seq long"), False)
    assert said in str(refused.value)


def test_overwriting_is_refused(orders: str) -> None:
    for writer in (BatchWriter, StreamWriter):
        with pytest.raises(InvalidRequest, match=r'not overwritten; use \.mode\("append"\)'):
            writer(parse({"broker": orders, "queue": "orders"}), schema("payload binary"), True)


def test_a_stream_has_no_write_id(orders: str) -> None:
    with pytest.raises(InvalidRequest, match="writeId is for batch writes"):
        StreamWriter(parse({"broker": orders, "queue": "orders", "writeId": "x"}), schema("payload binary"), False)


def test_a_queue_or_a_broker_that_is_not_there(orders: str, tmp_path: Path) -> None:
    with pytest.raises(QueueNotFound, match="no queue 'bills'"):
        BatchWriter(parse({"broker": orders, "queue": "bills"}), schema("payload binary"), False)
    with pytest.raises(InvalidRequest, match="nowhere does not exist; give a directory that does"):
        BatchWriter(parse({"broker": str(tmp_path / "nowhere"), "queue": "orders"}), schema("payload binary"), False)


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
