"""Parsing of option values: durations, sizes, times, pairs, and the options of queues and items.

Owns: the text forms of values, and `QUEUE_OPTIONS` and `ITEM_OPTIONS`, the tables from which commands get their
parameters. A value that cannot be parsed raises CommandFailed or InvalidRequest, which names the option and shows how
to write it. An option that is not given is not passed to the API. A time without an offset is local time.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import typer

from penstock.api.options import to_catalog
from penstock.cli.failures import CommandFailed
from penstock.rules.options import Options, merged
from penstock.words import values
from penstock.words.clock import SystemClock
from penstock.words.errors import InvalidRequest
from penstock.words.fields import BY_NAME, GIVEN, Surface, fields_on
from penstock.words.quantities import parse_duration as parse_duration
from penstock.words.quantities import parse_size as parse_size

NONE = "none"


def parse_number(text: str, option: str) -> int:
    try:
        return int(text.strip().replace("_", "").replace(",", ""))
    except ValueError:
        raise CommandFailed(f"{option} is {text!r}; give a whole number") from None


def parse_switch(text: str, option: str) -> bool:
    if text.strip().lower() not in ("on", "off"):
        raise CommandFailed(f"{option} is {text!r}; give on or off")
    return text.strip().lower() == "on"


def or_none(parse: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """A parser that also takes "none", which gives None."""
    return lambda text, option: None if text.strip().lower() == NONE else parse(text, option)


def parse_time(text: str, option: str) -> datetime:
    """A time in ISO 8601; without an offset it is local time."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found if found.tzinfo is not None else found.astimezone()
    except (ValueError, OverflowError):
        raise CommandFailed(f"{option} is {text!r}; give a time as 2030-01-31T08:00:00Z, or without an offset for local time") from None


def parse_pairs(given: Iterable[str], option: str, example: str) -> dict[str, str]:
    """A dict from texts of the form name=value; each name may occur once."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CommandFailed(f"{option} is {text!r}; give it as {example}")
        if name in found:
            raise CommandFailed(f"{option} names {name!r} twice; give it once")
        found[name] = value
    return found


def parse_weights(given: Iterable[str], option: str) -> dict[str, int]:
    """Queue names with their weights: "orders=3", or "orders" for a weight of 1."""
    found: dict[str, int] = {}
    for text in given:
        name, equals, weight = text.partition("=")
        if not name or name in found or (equals and not (weight.isdecimal() and int(weight) > 0)):
            raise CommandFailed(f"{option} is {text!r}; give each queue once, as NAME or NAME=WEIGHT, such as orders=3")
        found[name] = int(weight) if equals else 1
    return found


# -- options -----------------------------------------------------------------------------------------

RETENTION = "retention_"


def parse_text(given: str, _: str) -> str:
    return given


class TextOption(NamedTuple):
    """An option whose value is text that a function parses."""

    name: str
    """The name of the parameter in the API."""
    metavar: str
    help: str
    parse: Callable[[str, str], Any] = parse_text
    alias: str = ""
    """A second name of the option."""
    default: str = ""
    """The default for a new queue or item, shown in the help."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


QUEUE_OPTIONS = (
    TextOption("lease_timeout", "DURATION", "How long a consumer may work on an item.", parse_duration, default="60s"),
    TextOption("max_attempts", "N", "How often an item is leased before it is buried; 0 is no limit.", parse_number, default="10"),
    TextOption("ttl", "DURATION|none", "How long an item may wait before it is buried.", or_none(parse_duration), default="none"),
    TextOption(
        "priority_aging",
        "DURATION|none",
        "An item that waits this long rises by one priority step.",
        or_none(parse_duration),
        default="60s",
    ),
    TextOption("dedup_window", "DURATION", "How long dedup ids are remembered.", parse_duration, default="5m"),
    TextOption("on_bury", "release|park", "Whether the key of a buried item is released or parked.", default="release"),
    TextOption("dead_queue", "QUEUE", "The queue that buried items move to. Without one they stay buried in their queue."),
    TextOption("max_items", "N|none", "The most unresolved items; produce waits at this limit.", or_none(parse_number), default="none"),
    TextOption(
        "max_bytes",
        "SIZE|none",
        "The most bytes of unresolved items; produce waits at this limit.",
        or_none(parse_size),
        default="none",
    ),
    TextOption("retention_max_age", "DURATION", "How long completed items are kept; 0 is no limit.", parse_duration, default="1d"),
    TextOption(
        "retention_max_bytes",
        "SIZE",
        "The most bytes of a partition's log with completed items; 0 is no limit.",
        parse_size,
        default="1GiB",
    ),
    TextOption(
        "retention_max_segments",
        "N",
        "The most files of a partition's log with completed items; 0 is no limit.",
        parse_number,
        default="0",
    ),
    TextOption("retention_min_segments", "N", "How many of the newest log files are always kept.", parse_number, default="1"),
)
STORAGE_OPTIONS = (
    TextOption(
        "sync_interval",
        "DURATION|none",
        "With --durability interval, the longest time until stored items are on disk.",
        or_none(parse_duration),
        default="200ms",
    ),
    TextOption(
        "segment_bytes",
        "SIZE|none",
        "The size at which a log file is closed.",
        or_none(parse_size),
        default="as the broker",
    ),
    TextOption("segment_age", "DURATION|none", "The age at which a log file is closed.", or_none(parse_duration), default="1d"),
    TextOption("compression", "on|off|none", "Whether items are compressed.", or_none(parse_switch), default="as the broker"),
    TextOption("compression_level", "1…19|none", "1 is the quickest, 19 the smallest.", or_none(parse_number), default="1"),
    TextOption(
        "compression_min_bytes",
        "SIZE|none",
        "Smaller batches of items are not compressed.",
        or_none(parse_size),
        default="512",
    ),
)
"""Options of a queue about its files."""
DURABILITY = TextOption("durability", "fsync|interval|os", "When produced items count as stored. Cannot be changed later.", default="fsync")
_MEANINGS = {name: f"{BY_NAME[name].meaning}." for name in GIVEN}
ITEM_OPTIONS = (
    TextOption("key", "KEY", _MEANINGS["key"]),
    TextOption("kind", "TEXT", _MEANINGS["kind"]),
    TextOption("reference", "TEXT", _MEANINGS["reference"]),
    TextOption("encoding", "TEXT", f"{BY_NAME['encoding'].meaning}; set by --as unless given."),
    TextOption("priority", "0…9", _MEANINGS["priority"], parse_number, default="5"),
    TextOption("at", "TIME", _MEANINGS["at"], parse_time),
    TextOption("delay", "DURATION", "The item becomes ready after this time.", parse_duration),
    TextOption("ttl", "DURATION", _MEANINGS["ttl"], parse_duration),
    TextOption("dedup", "ID", _MEANINGS["dedup"]),
    TextOption("dedup_window", "DURATION", _MEANINGS["dedup_window"], parse_duration),
)
_CALLED = {"dedup": "dedup id"}
FIELD_OPTIONS = tuple(
    TextOption(
        f"{field.name}_field",
        "NAME",
        f"The JSON field or CSV column with the {_CALLED.get(field.name, field.name)} of the item.",
        alias=f"--{field.name}-column",
    )
    for field in fields_on(Surface.CLI_INPUT)
)


def option_parameters(*options: TextOption, defaults: bool = True) -> list[inspect.Parameter]:
    """The options as parameters of a command. `defaults`: whether their help shows the defaults."""
    return [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    *filter(None, (option.flag, option.alias)), metavar=option.metavar, help=_help(option, defaults), show_default=False
                ),
            ],
        )
        for option in options
    ]


def _help(option: TextOption, defaults: bool) -> str:
    return f"{option.help}  [default: {option.default}]" if defaults and option.default else option.help


def parse_options(options: Iterable[TextOption], given: Mapping[str, str | None]) -> dict[str, Any]:
    """The parsed values of the given options, by name."""
    texts = ((option, given[option.name]) for option in options if option.name in given)
    return {option.name: option.parse(text, option.flag) for option, text in texts if text is not None}


def parse_queue_options(given: Mapping[str, str | None]) -> dict[str, Any]:
    """The options of a queue as `create_queue` and `update` take them."""
    found = parse_options((*QUEUE_OPTIONS, DURABILITY, *STORAGE_OPTIONS), given)
    retention = {name.removeprefix(RETENTION): found.pop(name) for name in [*found] if name.startswith(RETENTION)}
    if found.get("dead_queue") == "":
        raise CommandFailed("--dead-queue is empty; name a queue, or use --no-dead-queue with update")
    if not retention:
        return found
    try:
        merged(Options(), to_catalog({"retention": retention}))
    except InvalidRequest as error:  # it names the field of the retention, such as max_bytes
        raise InvalidRequest(f"{RETENTION}{error}") from None
    return {**found, "retention": retention}


def parse_item_options(given: Mapping[str, str | None], headers: Iterable[str]) -> dict[str, Any]:
    """The options of an item as `NewItem` takes them."""
    found = parse_options(ITEM_OPTIONS, given)
    if "at" in found and "delay" in found:
        raise CommandFailed("--at and --delay were both given; leave one out")
    if "delay" in found:
        found["at"] = values.timestamp(SystemClock().read().wall + values.duration(found.pop("delay"), "--delay"))
    named = parse_pairs(headers, "--header", "NAME=VALUE")
    return {**found, **({"headers": named} if named else {})}
