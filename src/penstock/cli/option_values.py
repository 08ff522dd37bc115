"""Values of options, as they are typed: durations, sizes, times, pairs, and the options of queues and items.

Owns: how values may be written, and `QUEUE_OPTIONS` and `ITEM_OPTIONS`, the tables from which commands get their parameters.
A value that cannot be read is refused with a line that names the option and shows how to write it. An option that is not typed is not
passed to the API. A time without an offset is local time.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, NamedTuple

import typer

from penstock.cli.failures import CommandFailed
from penstock.words.clock import SECOND, SystemClock
from penstock.words.fields import BY_NAME, GIVEN, Surface, fields_on
from penstock.words.limits import GIB, KIB, MIB

NONE = "none"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_BYTES = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB, "kb": 1_000, "mb": 1_000_000, "gb": 1_000_000_000}
_BYTES |= {"k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB, "tb": 1_000_000_000_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def parse_duration(text: str, option: str) -> float:
    """Seconds: "30", "30s", "1.5h", "1d12h"."""
    given = text.strip().lower()
    if _NUMBER.fullmatch(given):
        return float(given)
    parts = _PART.findall(given)
    if not parts or "".join(number + unit for number, unit in parts) != given:
        raise CommandFailed(f"{option} is {text!r}; give seconds, or a number with ms, s, m, h, d or w, such as 30s, 5m or 1d12h")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def duration_or_none(text: str, option: str) -> float | None:
    return None if text.strip().lower() == NONE else parse_duration(text, option)


def parse_size(text: str, option: str) -> int:
    """Bytes: "4096", "64MiB", "1GB"."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _BYTES:
        raise CommandFailed(f"{option} is {text!r}; give bytes, or a number with KiB, MiB, GiB or TiB, such as 64MiB")
    return round(float(found[1]) * _BYTES[found[2]])


def size_or_none(text: str, option: str) -> int | None:
    return None if text.strip().lower() == NONE else parse_size(text, option)


def parse_number(text: str, option: str) -> int:
    try:
        return int(text.strip().replace("_", "").replace(",", ""))
    except ValueError:
        raise CommandFailed(f"{option} is {text!r}; give a whole number") from None


def number_or_none(text: str, option: str) -> int | None:
    return None if text.strip().lower() == NONE else parse_number(text, option)


def parse_time(text: str, option: str) -> datetime:
    """A time in ISO 8601; without an offset it is local time."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found if found.tzinfo is not None else found.astimezone()
    except (ValueError, OverflowError):
        raise CommandFailed(f"{option} is {text!r}; give a time as 2030-01-31T08:00:00Z, or without an offset for local time") from None


def parse_pairs(given: Iterable[str], option: str, example: str) -> dict[str, str]:
    """What was given as name=value, each name once."""
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
    """Queues with their weights: "orders=3", or "orders" for a weight of 1."""
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
    """One option: what it is called in the API, what its value looks like, what it does, and how it is read."""

    name: str
    metavar: str
    help: str
    parse: Callable[[str, str], Any] = parse_text
    alias: str = ""
    """A second way to write it."""
    default: str = ""
    """What counts for something new when it is not given."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


QUEUE_OPTIONS = (
    TextOption("lease_timeout", "DURATION", "How long a consumer may work on an item.", parse_duration, default="60s"),
    TextOption("max_attempts", "N", "How often an item is leased before it is given up; 0 is endless.", parse_number, default="10"),
    TextOption("ttl", "DURATION|none", "How long an item may wait before it is given up.", duration_or_none, default="none"),
    TextOption("priority_aging", "DURATION|none", "Waiting so long lifts an item one priority step.", duration_or_none, default="60s"),
    TextOption("dedup_window", "DURATION", "How long dedup ids are remembered.", parse_duration, default="5m"),
    TextOption("on_bury", "release|park", "What becomes of the key of an item that is given up.", default="release"),
    TextOption("dead_queue", "QUEUE", "Where items go that are given up; without one they stay, buried."),
    TextOption("max_items", "N|none", "With so many unresolved items, produce waits.", number_or_none, default="none"),
    TextOption("max_bytes", "SIZE|none", "With so many bytes of them, produce waits.", size_or_none, default="none"),
    TextOption("retention_max_age", "DURATION", "How long completed items are kept; 0 is no limit.", parse_duration, default="1d"),
    TextOption("retention_max_bytes", "SIZE", "How large a partition's log may grow with them; 0 is no limit.", parse_size, default="1GiB"),
    TextOption("retention_max_segments", "N", "How many files it may have.", parse_number, default="0, no limit"),
    TextOption("retention_min_segments", "N", "How many of the newest files stay whatever the limits say.", parse_number, default="1"),
)
DURABILITY = TextOption("durability", "fsync|interval|os", "When a produce counts as stored. Cannot be changed later.", default="fsync")
_MEANINGS = {name: f"{BY_NAME[name].meaning}." for name in GIVEN}
ITEM_OPTIONS = (
    TextOption("key", "KEY", _MEANINGS["key"]),
    TextOption("kind", "TEXT", _MEANINGS["kind"]),
    TextOption("reference", "TEXT", _MEANINGS["reference"]),
    TextOption("encoding", "TEXT", f"{BY_NAME['encoding'].meaning}; said by --as unless given."),
    TextOption("priority", "0…9", _MEANINGS["priority"], parse_number, default="5"),
    TextOption("at", "TIME", _MEANINGS["at"], parse_time),
    TextOption("delay", "DURATION", "Not before so long from now.", parse_duration),
    TextOption("ttl", "DURATION", _MEANINGS["ttl"], parse_duration),
    TextOption("dedup", "ID", _MEANINGS["dedup"]),
)
_CALLED = {"dedup": "dedup id"}
FIELD_OPTIONS = tuple(
    TextOption(
        f"{field.name}_field",
        "NAME",
        f"{'The field of a JSON line, or the column,' if field.name == 'key' else '…'} that is the {_CALLED.get(field.name, field.name)}.",
        alias=f"--{field.name}-column",
    )
    for field in fields_on(Surface.CLI_INPUT)
)


def option_parameters(*options: TextOption, defaults: bool = True) -> list[inspect.Parameter]:
    """The options as parameters of a command; whether their help says the defaults."""
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
    """Those of the options that were typed, read."""
    typed = ((option, given[option.name]) for option in options if option.name in given)
    return {option.name: option.parse(text, option.flag) for option, text in typed if text is not None}


def parse_queue_options(given: Mapping[str, str | None]) -> dict[str, Any]:
    """The options of a queue, as `create_queue` and `update` take them."""
    found = parse_options((*QUEUE_OPTIONS, DURABILITY), given)
    kept = {name.removeprefix(RETENTION): found.pop(name) for name in [*found] if name.startswith(RETENTION)}
    if found.get("dead_queue") == "":
        raise CommandFailed("--dead-queue is empty; name a queue, or use --no-dead-queue with update")
    return {**found, **({"retention": kept} if kept else {})}


def parse_item_options(given: Mapping[str, str | None], headers: Iterable[str]) -> dict[str, Any]:
    """The options of an item, as `NewItem` takes them."""
    found = parse_options(ITEM_OPTIONS, given)
    if "at" in found and "delay" in found:
        raise CommandFailed("--at and --delay were both given; leave one out")
    if "delay" in found:
        found["at"] = SystemClock().read().wall / SECOND + found.pop("delay")
    named = parse_pairs(headers, "--header", "NAME=VALUE")
    return {**found, **({"headers": named} if named else {})}
