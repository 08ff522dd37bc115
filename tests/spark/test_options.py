"""The options of the data source: parsed, or refused with what to give instead."""

import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import penstock
from penstock.errors import InvalidRequest, PenstockError
from penstock.spark import options
from penstock.spark.consuming_reader import SPARK_STREAM_MODULE
from penstock.spark.options import READ, STREAM, WRITE, SourceOptions, Use, parse_options
from penstock.spark.source import PenstockSource, spark_schema
from penstock.tables import schemas

NEEDED = {"broker": "/data", "queue": "orders"}


def of(**given: str) -> SourceOptions:
    return parse_options({**NEEDED, **given})


def test_broker_and_queue_suffice() -> None:
    found = of()
    assert found == SourceOptions(broker=("/data",), queue="orders")
    assert (found.table, found.columns, found.fail_on_data_loss, found.min_partitions, found.consume) == ("items", None, True, 1, False)


def test_every_option_is_read() -> None:
    given = {
        "TABLE": "Items",
        "columns": "Payload, id",
        "includeHeaders": "TRUE",
        "startingOffsets": '{"0": 12, "3": -2}',
        "endingOffsets": "Latest",
        "minPartitions": "8",
        "maxItemsPerTrigger": "250000",
        "failOnDataLoss": "false",
        "consume": "true",
        "cursor": "lake",
        "perKey": "5",
        "orderBy": "created, n",
        "writeId": "monday",
        "adoptTimeout": "2.5",
        "checkpointLocation": "/ck",
        "queryName": "mine",
    }
    assert (
        parse_options({**NEEDED, **{name.lower(): value for name, value in given.items()}})
        == parse_options({**NEEDED, **given})
        == SourceOptions(
            broker=("/data",),
            queue="orders",
            columns=("payload", "id"),
            include_headers=True,
            starting_offsets={0: 12, 3: -2},
            ending_offsets="latest",
            min_partitions=8,
            max_items_per_trigger=250_000,
            fail_on_data_loss=False,
            consume=True,
            cursor="lake",
            per_key=5,
            order_by=("created", "n"),
            write_id="monday",
            adopt_timeout=2.5,
        )
    )


@pytest.mark.parametrize(
    ("text", "microseconds"),
    [
        ("2026-05-01T12:00:00Z", 1_777_636_800_000_000),
        ("2026-05-01T14:00:00.000001+02:00", 1_777_636_800_000_001),
        ("2026-05-01 12:00", 1_777_636_800_000_000),
        ("2026-05-01", 1_777_593_600_000_000),
        (" 1777636800000000 ", 1_777_636_800_000_000),
        ("0", 0),
    ],
)
def test_times_are_dates_or_microseconds(text: str, microseconds: int) -> None:
    found = of(startingTimestamp=text, endingTimestamp=text)
    assert (found.starting_timestamp, found.ending_timestamp) == (microseconds, microseconds)


def test_a_broker_is_a_directory_or_several_roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    for text, roots in [
        ("data", (str(tmp_path / "data"),)),
        ("~/q", ("/home/me/q",)),
        ("file:///data/q", ("/data/q",)),
        ('["/a, b", "c"]', ("/a, b", str(tmp_path / "c"))),
    ]:
        assert of(broker=text).broker == roots


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queue": "q"}, r"the option broker is missing; give .option\(\"broker\", …\), the directory of the broker"),
        ({"broker": "/d"}, r"the option queue is missing; give .option\(\"queue\", …\), the name of a queue"),
        ({**NEEDED, "que": "q"}, "there is no option 'que'; is queue meant?"),
        ({**NEEDED, "minPartition": "1"}, "there is no option 'minPartition'; is minPartitions meant?"),
        ({**NEEDED, "maxOffsetsPerTrigger": "1"}, "there is no option 'maxOffsetsPerTrigger'; is maxItemsPerTrigger meant?"),
        ({**NEEDED, "subscribe": "q"}, "there is no option 'subscribe'; is queue meant?"),
        ({**NEEDED, "startingOffsets": "{0: 1}"}, "startingOffsets is '{0: 1}'; give earliest, latest, or JSON"),
        ({**NEEDED, "zzz": "1"}, "there is no option 'zzz'; there are adoptTimeout, broker, columns, "),
        ({**NEEDED, "path": "/d"}, "both broker and path are given; leave path out"),
        (
            {"broker": "http://host:8080", "queue": "q"},
            "'http://host:8080' cannot be read or written by Spark; this version knows directories",
        ),
        ({"broker": "postgresql://h/db", "queue": "q"}, "this version knows directories, not postgresql://"),
        ({"broker": "memory://", "queue": "q"}, "'memory://' exists only in its own process, and Spark's tasks are other processes; give"),
        ({"broker": " ", "queue": "q"}, "the broker is empty; give the path of its directory"),
        ({"broker": "[1]", "queue": "q"}, "is not a list of paths; give"),
        ({"broker": "[", "queue": "q"}, "is not a JSON list"),
        ({"broker": "[]", "queue": "q"}, "is not a list of paths"),
        ({"broker": "/d", "queue": "a b"}, "'a b' is no name for a queue; use"),
    ],
)
def test_bad_places_and_names_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_options(given)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("table", "lines", "there is no table 'lines'; give one of items, events, dead, state"),
        ("columns", "id,,payload", "columns is 'id,,payload'; give names with commas between them, such as 'id, payload'"),
        ("columns", "id,ID", "columns names 'id' twice; name it once"),
        ("columns", "id,id", "columns names 'id' twice; name it once"),
        ("columns", "id,size", "table items has no column 'size'; it has id, partition, offset, key"),
        ("includeHeaders", "yes", "includeHeaders is 'yes'; give true or false"),
        ("minPartitions", "0", "minPartitions is '0'; give a whole number from 1 to 1000000"),
        ("minPartitions", "many", "minPartitions is 'many'; give a whole number"),
        ("maxItemsPerTrigger", "-1", "maxItemsPerTrigger is '-1'; give a whole number from 1"),
        ("perKey", "10001", "perKey is '10001'; give a whole number from 1 to 10000"),
        ("adoptTimeout", "soon", "adoptTimeout is 'soon'; give seconds from 0 to 86400"),
        ("adoptTimeout", "nan", "adoptTimeout is 'nan'; give seconds"),
        ("writeId", " ", "writeId is empty; give a text or leave it out"),
        (
            "startingOffsets",
            "first",
            r"startingOffsets is 'first'; give earliest, latest, or JSON with an offset for partitions, such as {\"0\": 12",
        ),
        ("startingOffsets", "[1]", r"startingOffsets is '\[1\]'; give earliest"),
        ("startingOffsets", "{}", "startingOffsets is '{}'; give earliest"),
        ("endingOffsets", '{"a": 1}', "endingOffsets names a partition 'a'; give earliest"),
        ("endingOffsets", '{"-1": 1}', "endingOffsets names a partition '-1'; give earliest"),
        ("endingOffsets", '{"0": "1"}', 'endingOffsets gives partition 0 the offset "1"; give a whole number, 0 or above'),
        ("endingOffsets", '{"0": true}', "gives partition 0 the offset true; give a whole number"),
        ("endingOffsets", '{"0": 1.5}', "gives partition 0 the offset 1.5; give a whole number"),
        ("endingOffsets", '{"0": -3}', "gives partition 0 the offset -3; give a whole number"),
        (
            "startingTimestamp",
            "yesterday",
            "startingTimestamp is 'yesterday'; give ISO 8601, such as 2026-05-01T12:00:00Z, or microseconds",
        ),
        ("endingTimestamp", "-5", "endingTimestamp is '-5'; give ISO 8601"),
        (
            "startingTimestamp",
            "1777636800000",
            r"startingTimestamp is 1777636800000, which in microseconds is before 2000; .* microseconds since 1970 \(milliseconds × 1000\)",
        ),
        ("endingTimestamp", "9" * 30, "endingTimestamp is '9+'; give ISO 8601"),
    ],
)
def test_bad_values_are_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        of(**{name: text})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"startingOffsets": "earliest", "startingTimestamp": "0"}, "both startingOffsets and startingTimestamp are given; leave one out"),
        ({"endingOffsets": "latest", "endingTimestamp": "0"}, "both endingOffsets and endingTimestamp are given; leave one out"),
        ({"table": "events", "includeHeaders": "true"}, "includeHeaders is true but table events has no headers"),
        ({"table": "events", "columns": "payload"}, "table events has no column 'payload'; it has event, id"),
        ({"table": "state", "consume": "true"}, "consume is true but table state is read; only table items can be consumed"),
        (
            {"table": "state", "startingOffsets": "earliest"},
            "table state shows only the present state; leave startingOffsets out, and filter the rows",
        ),
        ({"table": "dead", "endingTimestamp": "0"}, "table dead shows only the present state; leave endingTimestamp out"),
        ({"perKey": "3"}, "perKey is for streams that consume; give consume=true with it, or leave it out"),
        ({"consumerTimeout": "60", "consume": "false"}, "consumerTimeout is for streams that consume; give consume=true with it"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        of(**given)


# -- what an option is for ------------------------------------------------------------------------------

SAMPLE = {
    "columns": "id",
    "includeHeaders": "false",
    "startingOffsets": "earliest",
    "endingOffsets": "latest",
    "startingTimestamp": "0",
    "endingTimestamp": "0",
    "minPartitions": "1",
    "maxItemsPerTrigger": "1",
    "failOnDataLoss": "true",
    "consume": "true",
    "cursor": "lake",
    "perKey": "1",
    "consumerTimeout": "60",
    "orderBy": "nr",
    "writeId": "monday",
    "adoptTimeout": "10",
}
ITEMS = spark_schema(schemas.ITEMS)
READING = "columns includeHeaders startingOffsets startingTimestamp minPartitions failOnDataLoss consume"
OF_BATCHES, OF_STREAMS = "endingOffsets endingTimestamp", "maxItemsPerTrigger cursor perKey consumerTimeout"


@pytest.mark.parametrize(
    ("use", "taken"),
    [
        (READ, f"{READING} {OF_BATCHES}"),
        (STREAM, f"{READING} {OF_STREAMS}"),
        (WRITE, "orderBy writeId adoptTimeout"),
    ],
)
def test_an_option_of_another_use_is_refused_even_with_its_default(use: Use, taken: str) -> None:
    for name, text in SAMPLE.items():
        given = {**NEEDED, name: text} | ({"consume": "true"} if use == STREAM and name in ("perKey", "consumerTimeout") else {})
        if name in taken.split():
            parse_options(given, use)
        else:
            with pytest.raises(InvalidRequest, match=rf"^{name} is for .*; leave it out$"):
                parse_options(given, use)


def test_the_page_says_what_options_are_for() -> None:
    page = (Path(__file__).parents[2] / "docs" / "spark.md").read_text().partition("## Options")[2].partition("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page, re.MULTILINE))
    called = {"all": {READ, STREAM, WRITE}, "read, stream": {READ, STREAM}, "read": {READ}, "stream": {STREAM}}
    called |= {"consume": {STREAM}, "write": {WRITE}, "batch write": {WRITE}, "stream write": {WRITE}}
    assert told.pop("consume") == "stream" and told.pop("table") == "read, stream"
    assert {name: called[word] for name, word in told.items()} == {
        option.name: option.uses for option in options.OPTIONS if option.name not in ("consume", "table")
    }


@pytest.fixture
def orders(broker_dir: str) -> str:
    with penstock.open(broker_dir) as broker:
        broker.create_queue("orders")
    return broker_dir


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"orderBy": "nr"}, "orderBy is for writing; leave it out"),
        ({"writeId": "x"}, "writeId is for writing; leave it out"),
        ({"adoptTimeout": "10"}, "adoptTimeout is for writing; leave it out"),
        ({"perKey": "3"}, "perKey is for streams that consume"),
        ({"consume": "true", "startingOffsets": "latest"}, "startingOffsets is given, and consume=true takes what is ready"),
        ({"consume": "true", "cursor": "lake"}, "cursor is given, and consume=true takes what is ready"),
        ({"consume": "true", "failOnDataLoss": "false"}, "failOnDataLoss is false, and consume=true"),
    ],
)
def test_schema_refuses_options_that_no_reader_takes(orders: str, given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        PenstockSource({"broker": orders, "queue": "orders", **given}).schema()


@pytest.mark.parametrize("name", ["maxItemsPerTrigger", "cursor"])
def test_a_batch_refuses_what_is_for_streams(orders: str, name: str) -> None:
    source = PenstockSource({"broker": orders, "queue": "orders", name: SAMPLE[name]})
    with pytest.raises(InvalidRequest, match=rf"^{name} is for streams \(spark\.readStream\); leave it out$"):
        source.reader(source.schema())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"table": "state"}, "table state shows only the present state; read it with spark.read"),
        ({"table": "dead"}, "table dead shows only the present state; read it with spark.read"),
        ({"endingOffsets": "latest"}, "endingOffsets is for spark.read; leave it out"),
        ({"endingTimestamp": "0"}, "endingTimestamp is for spark.read; leave it out"),
    ],
)
def test_errors_of_a_stream_reach_spark(orders: str, given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's stream process hides an error that `streamReader` raises behind an error of its own."""
    source = PenstockSource({"broker": orders, "queue": "orders", **given})
    schema = source.schema()
    with pytest.raises(InvalidRequest, match=message):
        source.streamReader(schema)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(SPARK_STREAM_MODULE, None))
    reader = source.streamReader(schema)
    for ask in (
        reader.initialOffset,
        reader.getDefaultReadLimit,
        lambda: reader.latestOffset({}, ReadAllAvailable()),
        lambda: reader.partitions({}, {}),
        reader.prepareForTriggerAvailableNow,  # type: ignore[attr-defined]
    ):
        with pytest.raises(InvalidRequest, match=message):
            ask()
    reader.stop()


def test_a_broker_that_is_not_there(tmp_path: Path) -> None:
    source = PenstockSource({"broker": str(tmp_path / "nowhere"), "queue": "orders"})
    makes = (source.schema, lambda: source.reader(ITEMS), lambda: source.streamReader(ITEMS), lambda: source.writer(ITEMS, False))
    for make in makes:
        with pytest.raises(PenstockError, match=r"nowhere does not exist; give the directory of a broker, which penstock\.open makes$"):
            make()
