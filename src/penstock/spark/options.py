"""The options of the data source.

Owns: `SourceOptions`, the one frozen type of all of them, and `parse`, which makes it of what a user gave. Option names are
case-insensitive, as everywhere in Spark; a name that is not known, a value that cannot be meant, or an option of another use is refused
with what to give instead. Whether a queue, a partition or an offset exists is not known here; `present` says whether a broker does.
"""

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.rules.options import check_name
from penstock.spark.broker_access import BrokerRoots, parse_broker
from penstock.tables.schemas import TABLES
from penstock.words import values
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.fields import FieldType
from penstock.words.ids import FIRST_FOREIGN_NUMBER, LAST_PARTITION
from penstock.words.limits import MAX_BATCH_ITEMS, MAX_LEASE_TIMEOUT, MIN_LEASE_TIMEOUT

EARLIEST: Literal["earliest"] = "earliest"
LATEST: Literal["latest"] = "latest"
RangeEnd: TypeAlias = Literal["earliest", "latest"] | dict[int, int]
"""An end of a range: the first or last there is, or an offset for each partition. In JSON -2 and -1 are the same as the two words."""
MAX_NUMBER = 1 << 40
MILLENNIUM = 946_684_800 * SECOND
"""The year 2000: a number below it is not meant in microseconds."""
READ: Literal["read"] = "read"
STREAM: Literal["stream"] = "stream"
WRITE: Literal["write"] = "write"
Use: TypeAlias = Literal["read", "stream", "write"]
"""What a source is made for: spark.read, spark.readStream, or either way of writing."""
SPARKS_OWN = frozenset({"checkpointlocation", "queryname", "outputmode"})
"""Options that Spark hands on to the source with those that are meant for it."""

SPARK_TYPES = {
    FieldType.SMALL: "an integer type, such as int",
    FieldType.INSTANT: "timestamp (cast a date or timestamp_ntz to it), or bigint (microseconds since 1970)",
    FieldType.SPAN: "interval day to second, or bigint (microseconds)",
}
"""What columns that are written may be in Spark's words, where Arrow has others."""


class SourceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that may be chosen. Times are wall microseconds."""

    broker: BrokerRoots
    queue: str
    table: str = "items"
    columns: tuple[str, ...] | None = None
    """Only these columns, in this order; None: all."""
    include_headers: bool = False
    starting_offsets: RangeEnd | None = None
    """Of table items: item offsets; of table events: sequences of the log."""
    ending_offsets: RangeEnd | None = None
    starting_timestamp: int | None = None
    ending_timestamp: int | None = None
    min_partitions: int = 1
    max_items_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    consume: bool = False
    cursor: str = ""
    per_key: int = MAX_BATCH_ITEMS
    """Items of one key in one grant of a stream that consumes."""
    consumer_timeout: float = 60.0
    """Seconds after which a stream that consumes and is gone has no right any more."""
    order_by: tuple[str, ...] = ()
    write_id: str = ""
    adopt_timeout: float = 10.0
    """Seconds."""


def parse_options(given: Mapping[str, str], *uses: Use) -> SourceOptions:
    """The options as they are meant, or what is wrong with which: also one that is for none of these uses, if any are named."""
    found: dict[str, Any] = {}
    for name in given:
        low = name.lower()
        if low in SPARKS_OWN:
            continue
        known = _OPTIONS.get(low)
        if known is None:
            raise InvalidRequest(_unknown(name))
        proper, field, read = known
        if uses and not _USES.get(proper, _ALL_USES).intersection(uses):
            raise InvalidRequest(f"{proper} is for {_CALLED[_USES[proper]]}; leave it out")
        value = given[name]
        if value is None:
            raise InvalidRequest(f"the option {proper} has no value; give one or leave it out")
        found[field] = read(proper, str(value))
    for name, field in (("broker", "broker"), ("queue", "queue")):
        if field not in found:
            raise InvalidRequest(f'the option {name} is missing; give .option("{name}", …), {_MEANT[name]}')
    for side in ("starting", "ending"):
        if f"{side}_offsets" in found and f"{side}_timestamp" in found:
            raise InvalidRequest(f"both {side}Offsets and {side}Timestamp are given; leave one out")
    for name, field in (("perKey", "per_key"), ("consumerTimeout", "consumer_timeout")):
        if field in found and not found.get("consume"):
            raise InvalidRequest(f"{name} is for streams that consume; give consume=true with it, or leave it out")
    return _fitting(SourceOptions(**found))


def require_directories(broker: BrokerRoots) -> BrokerRoots:
    """A broker whose directories are there, seen from where this runs."""
    for path in broker:
        if not os.path.isdir(path):
            raise InvalidRequest(f"{path} does not exist; give a directory that does: that of a broker, which penstock.open makes")
    return broker


def _fitting(options: SourceOptions) -> SourceOptions:
    """The options, if they go together."""
    schema = TABLES[options.table]
    if options.include_headers and "headers" not in schema.names:
        raise InvalidRequest(f"includeHeaders is true but table {options.table} has no headers; leave it out, or read table items or dead")
    unknown = [name for name in options.columns or () if name not in schema.names]
    if unknown:
        raise InvalidRequest(f"table {options.table} has no column {unknown[0]!r}; it has {', '.join(schema.names)}")
    if options.consume and options.table != "items":
        raise InvalidRequest(f"consume is true but table {options.table} is read; only table items can be consumed")
    if options.table in ("state", "dead"):
        for name in ("starting_offsets", "ending_offsets", "starting_timestamp", "ending_timestamp"):
            if getattr(options, name) is not None:
                shown = name.partition("_")[0] + name.partition("_")[2].title()
                raise InvalidRequest(f"table {options.table} tells what is now; leave {shown} out, and filter the rows")
    return options


_MEANT = {"broker": "the directory in which the broker lives", "queue": "the name of a queue"}


def _unknown(name: str) -> str:
    near = get_close_matches(name.lower(), _OPTIONS, 1)
    if name.lower() == "path":
        return "a path is given, and this source has none; give the directory as option broker and the queue as option queue"
    meant = f"is {_OPTIONS[near[0]][0]} meant?" if near else f"there are {', '.join(sorted(proper for proper, _, _ in _OPTIONS.values()))}"
    return f"there is no option {name!r}; {meant}"


# -- how each is read ----------------------------------------------------------------------------------


def _broker(name: str, text: str) -> BrokerRoots:
    return parse_broker(text)


def _queue(name: str, text: str) -> str:
    return check_name(text.strip())


def _table(name: str, text: str) -> str:
    found = text.strip().lower()
    if found not in TABLES:
        raise InvalidRequest(f"there is no table {text!r:.100}; give one of {', '.join(TABLES)}")
    return found


def _names(name: str, text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise InvalidRequest(f"{name} is {text!r:.200}; give names with commas between them, such as 'id, payload'")
    twice = next((one for one in found if found.count(one) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"{name} names {twice!r} twice; name it once")
    return found


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


def _few(name: str, text: str) -> int:
    return _number(name, text, 1, 1_000_000)


def _per_key(name: str, text: str) -> int:
    return _number(name, text, 1, MAX_BATCH_ITEMS)


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise InvalidRequest(f"{name} is empty; give a text or leave it out")
    return text.strip()


def _seconds(name: str, text: str) -> float:
    try:
        found = float(text.strip())
    except ValueError:
        found = -1.0
    if not 0 <= found <= 86_400:
        raise InvalidRequest(f"{name} is {text!r:.100}; give seconds from 0 to 86400")
    return found


def _lease_seconds(name: str, text: str) -> float:
    found = _seconds(name, text)
    if not MIN_LEASE_TIMEOUT <= found * SECOND <= MAX_LEASE_TIMEOUT:
        raise InvalidRequest(f"{name} is {text!r:.100}; give seconds from 1 to 43200")
    return found


def _edge(name: str, text: str) -> RangeEnd:
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
    return dict(_place(name, partition, offset, example) for partition, offset in found.items())


def _place(name: str, partition: str, offset: object, example: str) -> tuple[int, int]:
    if not partition.isdecimal() or int(partition) > LAST_PARTITION:
        raise InvalidRequest(f"{name} names a partition {partition!r:.50}; {example}")
    if type(offset) is not int or not -2 <= offset < FIRST_FOREIGN_NUMBER:
        raise InvalidRequest(f"{name} gives partition {partition} the offset {json.dumps(offset):.50}; give a whole number, 0 or above")
    return int(partition), offset


def _instant(name: str, text: str) -> int:
    """Microseconds since 1970, or a date and time of ISO 8601; without an offset it is UTC."""
    text = text.strip()
    example = "give ISO 8601, such as 2026-05-01T12:00:00Z, or microseconds since 1970"
    try:
        if text.lstrip("-").isdecimal():
            found = values.check_instant(int(text), name)
        else:
            date = datetime.fromisoformat(text)
            return values.instant(date if date.tzinfo is not None else date.replace(tzinfo=UTC), name)
    except ValueError:
        raise InvalidRequest(f"{name} is {text!r:.100}; {example}") from None
    except InvalidRequest:
        raise InvalidRequest(f"{name} is {text!r:.100}; {example}") from None
    if 0 < found < MILLENNIUM:
        raise InvalidRequest(f"{name} is {text}, which in microseconds is before 2000; {example} (milliseconds × 1000)")
    return found


_Read: TypeAlias = Callable[[str, str], Any]
_ALL: tuple[tuple[str, str, _Read], ...] = (
    ("broker", "broker", _broker),
    ("queue", "queue", _queue),
    ("table", "table", _table),
    ("columns", "columns", _names),
    ("includeHeaders", "include_headers", _flag),
    ("startingOffsets", "starting_offsets", _edge),
    ("endingOffsets", "ending_offsets", _edge),
    ("startingTimestamp", "starting_timestamp", _instant),
    ("endingTimestamp", "ending_timestamp", _instant),
    ("minPartitions", "min_partitions", _few),
    ("maxItemsPerTrigger", "max_items_per_trigger", _number),
    ("failOnDataLoss", "fail_on_data_loss", _flag),
    ("consume", "consume", _flag),
    ("cursor", "cursor", _text),
    ("perKey", "per_key", _per_key),
    ("consumerTimeout", "consumer_timeout", _lease_seconds),
    ("orderBy", "order_by", _names),
    ("writeId", "write_id", _text),
    ("adoptTimeout", "adopt_timeout", _seconds),
)
_ALL_USES = frozenset({READ, STREAM, WRITE})
_READING, _OF_BATCHES, _OF_STREAMS, _WRITING = frozenset({READ, STREAM}), frozenset({READ}), frozenset({STREAM}), frozenset({WRITE})
_CALLED: Mapping[frozenset[str], str] = {
    _READING: "reading",
    _OF_BATCHES: "spark.read",
    _OF_STREAMS: "streams (spark.readStream)",
    _WRITING: "writing",
}
_USES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("columns", "includeHeaders", "startingOffsets", "startingTimestamp", "minPartitions", "failOnDataLoss"), _READING),
    **dict.fromkeys(("endingOffsets", "endingTimestamp"), _OF_BATCHES),
    **dict.fromkeys(("maxItemsPerTrigger", "cursor", "perKey", "consumerTimeout"), _OF_STREAMS),
    "consume": _READING,  # the reader of a batch says what to do instead
    **dict.fromkeys(("orderBy", "writeId", "adoptTimeout"), _WRITING),
}
"""What those options are for that are not for everything."""
_OPTIONS = {proper.lower(): (proper, field, read) for proper, field, read in _ALL}
