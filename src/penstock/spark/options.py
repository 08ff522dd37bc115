"""The options of the data source.

Owns: `SourceOptions`, which holds all options, `parse_options`, which builds it from a user's texts, and `OPTIONS`, the
table of their names, parsers and uses. Option names are case-insensitive, as everywhere in Spark. An unknown name, a
value that cannot be parsed, or an option of another use is an InvalidRequest that says what to give instead. Whether
queue, partitions and offsets exist is not checked here; `require_directories` checks that the broker's directories do.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from penstock.rules.options import check_name
from penstock.spark.broker_access import BrokerRoots, parse_broker
from penstock.spark.positions import INCARNATION, QUEUES, StreamPosition, parse_position
from penstock.spark.queue_tables import QUEUE, TABLES
from penstock.spark.row_filter import RowFilter, parse_filter
from penstock.words import values
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.fields import FieldType
from penstock.words.ids import FIRST_FOREIGN_NUMBER, LAST_PARTITION
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_LEASE_TIMEOUT, MIN_LEASE_TIMEOUT
from penstock.words.sources import APPLICATION, MAX_SOURCE_LENGTH

EARLIEST: Literal["earliest"] = "earliest"
LATEST: Literal["latest"] = "latest"
RangeEnd: TypeAlias = Literal["earliest", "latest"] | dict[int, int]
"""An end of a range: the first or last position there is, or an offset per partition. -2 means earliest, -1 latest."""
MAX_NUMBER = 1 << 40
MAX_VERSION = (1 << 60) - 1
"""The highest txnVersion; its write has the next number."""
MILLENNIUM = 946_684_800 * SECOND
"""The year 2000, in microseconds: a smaller number is probably given in another unit."""
READ: Literal["read"] = "read"
STREAM: Literal["stream"] = "stream"
WRITE: Literal["write"] = "write"
CHECK: Literal["check"] = "check"
SKIP: Literal["skip"] = "skip"
Use: TypeAlias = Literal["read", "stream", "write"]
"""What a source is created for: spark.read, spark.readStream, or writing (batch or stream)."""
PATH = "path"
"""What load(path) and save(path) give: another name of the option broker."""
KAFKAS = {
    "kafka.bootstrap.servers": "broker",
    "maxoffsetspertrigger": "maxitemspertrigger",
    "subscribe": "queue",
    "subscribepattern": "queuepattern",
    "topic": "queue",
}
"""Options of Kafka's connector, and what they are called here, in small letters."""
SPARKS_OWN = frozenset({"checkpointlocation", "queryname", "outputmode"})
"""Spark's own options, which it passes to the source with the others."""

SPARK_TYPES = {
    FieldType.SMALL: "an integer type, such as int",
    FieldType.INSTANT: "timestamp (cast a date or timestamp_ntz to it), or bigint (microseconds since 1970)",
    FieldType.SPAN: "interval day to second, or bigint (microseconds)",
}
"""Spark's names for the types that a written column may have, where they differ from Arrow's."""


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed options. Times are wall-clock microseconds since 1970."""

    broker: BrokerRoots
    queue: str = ""
    """A name, or with commas several, for a stream; "" with a pattern."""
    queue_pattern: str = ""
    table: str = "items"
    columns: tuple[str, ...] | None = None
    """Only these columns, in this order; None: all."""
    include_headers: bool = False
    include_generation: bool = False
    where: RowFilter | None = None
    """Only the rows that match; None: all."""
    starting_offsets: "RangeEnd | StreamPosition | QueueStarts | None" = None
    """Item offsets for table items, log sequences for table events."""
    ending_offsets: RangeEnd | None = None
    starting_timestamp: int | None = None
    ending_timestamp: int | None = None
    min_partitions: int = 1
    max_items_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay: float = 900.0
    """Seconds after which a stream no longer waits for min_offsets_per_trigger."""
    fail_on_data_loss: bool = True
    consume: bool = False
    cursor: str = ""
    per_key: int = MAX_BATCH_ITEMS
    """How many items of one key a grant of a consuming stream holds at most."""
    consumer_timeout: float = 60.0
    """Seconds without a heartbeat after which a consuming stream loses its consumer right."""
    order_by: tuple[str, ...] = ()
    write_id: str = ""
    txn_app_id: str = ""
    txn_version: int | None = None
    repeated_batch: str = CHECK
    """What happens with a batch of a stream that was published before with other rows."""
    adopt_timeout: float = 10.0
    """Seconds that a write waits until the owner has adopted it."""

    @property
    def queues(self) -> list[str]:
        """The queues that are named."""
        return self.queue.split(",") if self.queue else []

    @property
    def several(self) -> bool:
        """Whether a stream reads a list of queues, or those of a pattern."""
        return bool(self.queue_pattern) or len(self.queues) > 1

    @property
    def schema(self) -> pa.Schema:
        """All columns of the table that is read."""
        schema = TABLES[self.table]
        return schema.insert(0, pa.field(QUEUE, pa.string())) if self.several else schema


class QueueStarts(msgspec.Struct, frozen=True):
    """Where a stream of several queues begins in each; queues that are not there are read from their beginning."""

    by_queue: dict[str, RangeEnd | StreamPosition]


def parse_options(given: Mapping[str, str], *uses: Use) -> SourceOptions:
    """Parse the options. With `uses`, an option that is for none of these uses is an InvalidRequest."""
    found: dict[str, Any] = {}
    for name in given:
        low = name.lower()
        if low in SPARKS_OWN:
            continue
        option = _BY_NAME.get(low)
        if option is None:
            raise InvalidRequest(_unknown(name))
        if uses and not option.uses.intersection(uses):
            raise InvalidRequest(f"{option.name} is for {_USE_NAMES[option.uses]}; leave it out")
        value = given[name]
        if value is None:
            raise InvalidRequest(f"the option {option.name} has no value; give one or leave it out")
        if option.field in found:
            raise InvalidRequest("both broker and path are given; leave path out: each is the directory of the broker")
        found[option.field] = option.read(option.name, str(value))
    if "queue" in found and "queue_pattern" in found:
        raise InvalidRequest("both queue and queuePattern are given; leave one out")
    for name, meaning in (("broker", "the directory of the broker"), ("queue", "the name of a queue")):
        if name not in found and not (name == "queue" and "queue_pattern" in found):
            raise InvalidRequest(f'the option {name} is missing; give .option("{name}", …), {meaning}')
    for side in ("starting", "ending"):
        if f"{side}_offsets" in found and f"{side}_timestamp" in found:
            raise InvalidRequest(f"both {side}Offsets and {side}Timestamp are given; leave one out")
    for name, field in (("perKey", "per_key"), ("consumerTimeout", "consumer_timeout")):
        if field in found and not found.get("consume"):
            raise InvalidRequest(f"{name} is for streams that consume; give consume=true with it, or leave it out")
    if "where" in found:
        found["where"] = parse_filter(found["where"], found.get("table", "items"), _instant)
    if "max_trigger_delay" in found and "min_offsets_per_trigger" not in found:
        raise InvalidRequest("maxTriggerDelay is given without minOffsetsPerTrigger, which it limits; give both, or leave it out")
    options = _check_together(SourceOptions(**found))
    if options.several and uses and STREAM not in uses:
        raise InvalidRequest("several queues are named, which only a stream can read together (spark.readStream); give one queue")
    return options


def require_directories(broker: BrokerRoots) -> BrokerRoots:
    """The broker; InvalidRequest if this process does not see all of its directories."""
    for path in broker:
        if not os.path.isdir(path):
            raise InvalidRequest(f"{path} does not exist; give the directory of a broker, which penstock.open makes")
    return broker


def _check_together(options: SourceOptions) -> SourceOptions:
    """The options; InvalidRequest if they contradict each other."""
    if (options.txn_version is None) == bool(options.txn_app_id):
        given, other = ("txnAppId", "txnVersion") if options.txn_app_id else ("txnVersion", "txnAppId")
        raise InvalidRequest(f"{given} is given without {other}; give both, the application and the number of its write")
    if options.txn_app_id and options.write_id:
        raise InvalidRequest("both writeId and txnAppId are given; leave one out: each identifies the write")
    schema = options.schema
    for wanted, name, column, having in (
        (options.include_headers, "includeHeaders", "headers", "items or dead"),
        (options.include_generation, "includeGeneration", "generation", "items"),
    ):
        if wanted and column not in schema.names:
            raise InvalidRequest(f"{name} is true but table {options.table} has no {column}; leave it out, or read table {having}")
    unknown = [name for name in options.columns or () if name not in schema.names]
    if unknown:
        raise InvalidRequest(f"table {options.table} has no column {unknown[0]!r}; it has {', '.join(schema.names)}")
    starts = options.starting_offsets
    if options.several and options.consume:
        raise InvalidRequest("consume is true, and a stream consumes one queue; name one, and start a stream for each")
    if options.several and isinstance(starts, dict | StreamPosition):
        raise InvalidRequest('startingOffsets has no names of queues; give earliest, latest, or JSON such as {"orders": {"0": 12}}')
    if isinstance(starts, QueueStarts):
        if not options.several:
            raise InvalidRequest(f'startingOffsets names queues, and queue {options.queue!r} is read; give JSON such as {{"0": 12}}')
        for name in starts.by_queue:
            if name not in options.queues and not (options.queue_pattern and re.fullmatch(options.queue_pattern, name)):
                raise InvalidRequest(f"startingOffsets names queue {name!r}, which this stream does not read; leave it out")
    least, most = options.min_offsets_per_trigger, options.max_items_per_trigger
    if least is not None and most is not None and least > most:
        raise InvalidRequest(f"minOffsetsPerTrigger is {least} and maxItemsPerTrigger {most}; give no larger minimum than the maximum")
    if options.max_bytes_per_trigger is not None and options.table == "events":
        raise InvalidRequest("maxBytesPerTrigger is given, and events have no payload; give maxItemsPerTrigger, or stream table items")
    if options.consume and options.table != "items":
        raise InvalidRequest(f"consume is true but table {options.table} is read; only table items can be consumed")
    if options.table in ("state", "dead"):
        for name in ("starting_offsets", "ending_offsets", "starting_timestamp", "ending_timestamp"):
            if getattr(options, name) is not None:
                shown = name.partition("_")[0] + name.partition("_")[2].title()
                raise InvalidRequest(f"table {options.table} shows only the present state; leave {shown} out, and filter the rows")
    return options


def _unknown(name: str) -> str:
    near = [KAFKAS[name.lower()]] if name.lower() in KAFKAS else get_close_matches(name.lower(), _BY_NAME, 1)
    hint = f"is {_BY_NAME[near[0]].name} meant?" if near else f"there are {', '.join(sorted(option.name for option in OPTIONS))}"
    return f"there is no option {name!r}; {hint}"


# -- parsers of the values -----------------------------------------------------------------------------


def _table(name: str, text: str) -> str:
    found = text.strip().lower()
    if found not in TABLES:
        raise InvalidRequest(f"there is no table {text!r:.100}; give one of {', '.join(TABLES)}")
    return found


def _names(name: str, text: str, example: str = "id, payload") -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise InvalidRequest(f"{name} is {text!r:.200}; give names with commas between them, such as {example!r}")
    twice = next((one for one in found if found.count(one) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"{name} names {twice!r} twice; name it once")
    return found


def _queues(name: str, text: str) -> str:
    """Parse the names of queues, with commas between them."""
    return ",".join(check_name(one) for one in (_names(name, text, "orders, refunds") if "," in text else (text.strip(),)))


def _columns(name: str, text: str) -> tuple[str, ...]:
    """Parse the names of columns of a table; like Spark, without regard to case."""
    return _names(name, text.lower())


def _pattern(name: str, text: str) -> str:
    try:
        re.compile(_text(name, text))
    except re.error as error:
        raise InvalidRequest(f"{name} is {text!r:.200}, which is no regular expression ({error}); give one, such as orders-.*") from None
    return text.strip()


def _flag(name: str, text: str) -> bool:
    found = {"true": True, "false": False}.get(text.strip().lower())
    if found is None:
        raise InvalidRequest(f"{name} is {text!r:.100}; give true or false")
    return found


def _number(name: str, text: str, low: int = 1, high: int = MAX_NUMBER) -> int:
    try:
        found = int(text.strip())
    except ValueError:
        found = low - 1
    if not low <= found <= high:
        raise InvalidRequest(f"{name} is {text!r:.100}; give a whole number from {low} to {high}")
    return found


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise InvalidRequest(f"{name} is empty; give a text or leave it out")
    return text.strip()


def _source(name: str, text: str, prefix: str = "") -> str:
    found, most = _text(name, text), MAX_SOURCE_LENGTH - len(prefix)
    if len(found) > most:
        raise InvalidRequest(f"{name} has {len(found):,} characters; give at most {most}")
    if not prefix and found.startswith(APPLICATION):
        raise InvalidRequest(f"{name} begins with {APPLICATION!r}, which is for txnAppId; choose another id")
    return found


def _repeated_batch(name: str, text: str) -> str:
    found = text.strip().lower()
    if found not in (CHECK, SKIP):
        raise InvalidRequest(f"{name} is {text!r:.100}; give {CHECK} or {SKIP}")
    return found


def _seconds(name: str, text: str) -> float:
    try:
        found = float(text.strip())
    except ValueError:
        found = -1.0
    if not 0 <= found <= 86_400:
        raise InvalidRequest(f"{name} is {text!r:.100}; give seconds from 0 to 86400")
    return found


def _span(name: str, text: str) -> float:
    """Parse a time with its unit, in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|d)", text.strip().lower())
    if found is None:
        raise InvalidRequest(f"{name} is {text!r:.100}; give a time with its unit, such as 15m, 90s or 500ms")
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400}[found[2]]


def _lease_seconds(name: str, text: str) -> float:
    found = _seconds(name, text)
    if not MIN_LEASE_TIMEOUT <= found * SECOND <= MAX_LEASE_TIMEOUT:
        raise InvalidRequest(f"{name} is {text!r:.100}; give seconds from 1 to 43200")
    return found


def _range_end(name: str, text: str) -> RangeEnd:
    word = text.strip().lower()
    if word == EARLIEST:
        return EARLIEST
    if word == LATEST:
        return LATEST
    example = f'give {EARLIEST}, {LATEST}, or JSON with an offset for partitions, such as {{"0": 12, "1": 40}}'
    try:
        found = json.loads(text)
    except ValueError:
        raise InvalidRequest(f"{name} is {text!r:.200}; {example}") from None
    if not isinstance(found, dict) or not found:
        raise InvalidRequest(f"{name} is {text!r:.200}; {example}")
    return dict(_partition_offset(name, partition, offset, example) for partition, offset in found.items())


def _starting_offsets(name: str, text: str) -> RangeEnd | StreamPosition | QueueStarts:
    """As `_range_end`, or an offset of a stream, as its progress shows it; for several queues, by queue."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, dict) and INCARNATION not in found:
        by_queue = found.get(QUEUES, found)
        if isinstance(by_queue, dict) and by_queue and all(isinstance(each, dict) for each in by_queue.values()):
            return QueueStarts({check_name(queue): _queue_start(name, json.dumps(each)) for queue, each in by_queue.items()})
    return _queue_start(name, text, found)


def _queue_start(name: str, text: str, found: object = None) -> RangeEnd | StreamPosition:
    if found is None:
        with suppress(ValueError):
            found = json.loads(text)
    if not isinstance(found, dict) or INCARNATION not in found:
        return _range_end(name, text)
    try:
        return parse_position(found)
    except InvalidRequest:
        raise InvalidRequest(f"{name} is {text!r:.200}; paste an endOffset of a stream of items or events without changes") from None


def _partition_offset(name: str, partition: str, offset: object, example: str) -> tuple[int, int]:
    if not partition.isdecimal() or int(partition) > LAST_PARTITION:
        raise InvalidRequest(f"{name} names a partition {partition!r:.50}; {example}")
    if type(offset) is not int or not -2 <= offset < FIRST_FOREIGN_NUMBER:
        raise InvalidRequest(f"{name} gives partition {partition} the offset {json.dumps(offset):.50}; give a whole number, 0 or above")
    return int(partition), offset


def _instant(name: str, text: str) -> int:
    """Parse microseconds since 1970, or a date and time of ISO 8601, which is UTC unless it has a time zone."""
    text = text.strip()
    example = "give ISO 8601, such as 2026-05-01T12:00:00Z, or microseconds since 1970"
    try:
        if text.lstrip("-").isdecimal():
            found = values.check_instant(int(text), name)
        else:
            date = datetime.fromisoformat(text)
            return values.instant(date if date.tzinfo is not None else date.replace(tzinfo=UTC), name)
    except (ValueError, InvalidRequest):
        raise InvalidRequest(f"{name} is {text!r:.100}; {example}") from None
    if 0 < found < MILLENNIUM:
        raise InvalidRequest(f"{name} is {text}, which in microseconds is before 2000; {example} (milliseconds × 1000)")
    return found


class _Option(NamedTuple):
    name: str
    read: Callable[[str, str], Any]
    """Parses a value; gets the option's name for its message."""
    uses: frozenset[Use] = frozenset({READ, STREAM, WRITE})

    @property
    def field(self) -> str:
        if self.name == PATH:
            return "broker"
        return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", self.name)


_READING: frozenset[Use] = frozenset({READ, STREAM})
_BATCHES: frozenset[Use] = frozenset({READ})
_STREAMS: frozenset[Use] = frozenset({STREAM})
_WRITING: frozenset[Use] = frozenset({WRITE})
_USE_NAMES = {_READING: "reading", _BATCHES: "spark.read", _STREAMS: "streams (spark.readStream)", _WRITING: "writing"}
OPTIONS = (
    _Option("broker", lambda _, text: parse_broker(text)),
    _Option(PATH, lambda _, text: parse_broker(text)),
    _Option("queue", _queues),
    _Option("queuePattern", _pattern, _STREAMS),
    _Option("table", _table),
    _Option("columns", _columns, _READING),
    _Option("includeHeaders", _flag, _READING),
    _Option("includeGeneration", _flag, _READING),
    _Option("where", _text, _BATCHES),
    _Option("startingOffsets", _starting_offsets, _READING),
    _Option("endingOffsets", _range_end, _BATCHES),
    _Option("startingTimestamp", _instant, _READING),
    _Option("endingTimestamp", _instant, _BATCHES),
    _Option("minPartitions", partial(_number, high=1_000_000), _READING),
    _Option("maxItemsPerTrigger", _number, _STREAMS),
    _Option("maxBytesPerTrigger", _number, _STREAMS),
    _Option("minOffsetsPerTrigger", _number, _STREAMS),
    _Option("maxTriggerDelay", _span, _STREAMS),
    _Option("failOnDataLoss", _flag, _READING),
    _Option("consume", _flag, _READING),  # for streams only: BatchReader refuses it with a message of its own
    _Option("cursor", _text, _STREAMS),
    _Option("perKey", partial(_number, high=MAX_BATCH_ITEMS), _STREAMS),
    _Option("consumerTimeout", _lease_seconds, _STREAMS),
    _Option("orderBy", _names, _WRITING),
    _Option("writeId", _source, _WRITING),
    _Option("txnAppId", partial(_source, prefix=APPLICATION), _WRITING),
    _Option("txnVersion", partial(_number, low=0, high=MAX_VERSION), _WRITING),
    _Option("repeatedBatch", _repeated_batch, _WRITING),
    _Option("adoptTimeout", _seconds, _WRITING),
)
_BY_NAME = {option.name.lower(): option for option in OPTIONS}
