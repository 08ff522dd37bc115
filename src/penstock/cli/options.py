"""The options of a queue and of an item, as they are typed.

Owns: `QUEUE_OPTIONS` and `ITEM_OPTIONS`, the tables from which commands get their parameters, and how what was typed becomes what the API
takes. What is not typed is not passed on.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import typer

from penstock.cli import reading
from penstock.cli.failures import Failed
from penstock.words.clock import SECOND, SystemClock
from penstock.words.fields import BY_NAME, GIVEN, Surface, on

RETENTION = "retention_"


def text(given: str, _: str) -> str:
    return given


class TextOption(NamedTuple):
    """One option: what it is called in the API, what its value looks like, what it does, and how it is read."""

    name: str
    metavar: str
    help: str
    read: Callable[[str, str], Any] = text
    alias: str = ""
    """A second way to write it."""
    default: str = ""
    """What counts for something new when it is not given."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


QUEUE_OPTIONS = (
    TextOption("lease_timeout", "DURATION", "How long a consumer may work on an item.", reading.duration, default="60s"),
    TextOption("max_attempts", "N", "How often an item is leased before it is given up; 0 is endless.", reading.number, default="10"),
    TextOption("ttl", "DURATION|none", "How long an item may wait before it is given up.", reading.duration_or_none, default="none"),
    TextOption(
        "priority_aging", "DURATION|none", "Waiting so long lifts an item one priority step.", reading.duration_or_none, default="60s"
    ),
    TextOption("dedup_window", "DURATION", "How long dedup ids are remembered.", reading.duration, default="5m"),
    TextOption("on_bury", "release|park", "What becomes of the key of an item that is given up.", default="release"),
    TextOption("dead_queue", "QUEUE", "Where items go that are given up; without one they stay, buried."),
    TextOption("max_items", "N|none", "With so many unresolved items, produce waits.", reading.number_or_none, default="none"),
    TextOption("max_bytes", "SIZE|none", "With so many bytes of them, produce waits.", reading.size_or_none, default="none"),
    TextOption("retention_max_age", "DURATION", "How long completed items are kept; 0 is no limit.", reading.duration, default="1d"),
    TextOption(
        "retention_max_bytes", "SIZE", "How large a partition's log may grow with them; 0 is no limit.", reading.size, default="1GiB"
    ),
    TextOption("retention_max_segments", "N", "How many files it may have.", reading.number, default="0, no limit"),
    TextOption("retention_min_segments", "N", "How many of the newest files stay whatever the limits say.", reading.number, default="1"),
)
DURABILITY = TextOption("durability", "fsync|interval|os", "When a produce counts as stored. Cannot be changed later.", default="fsync")
_MEANINGS = {name: f"{BY_NAME[name].meaning}." for name in GIVEN}
ITEM_OPTIONS = (
    TextOption("key", "KEY", _MEANINGS["key"]),
    TextOption("kind", "TEXT", _MEANINGS["kind"]),
    TextOption("reference", "TEXT", _MEANINGS["reference"]),
    TextOption("encoding", "TEXT", f"{BY_NAME['encoding'].meaning}; said by --as unless given."),
    TextOption("priority", "0…9", _MEANINGS["priority"], reading.number, default="5"),
    TextOption("at", "TIME", _MEANINGS["at"], reading.instant),
    TextOption("delay", "DURATION", "Not before so long from now.", reading.duration),
    TextOption("ttl", "DURATION", _MEANINGS["ttl"], reading.duration),
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
    for field in on(Surface.NAMED)
)


def parameters(*options: TextOption, defaults: bool = True) -> list[inspect.Parameter]:
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


def read(options: Iterable[TextOption], given: Mapping[str, str | None]) -> dict[str, Any]:
    """Those of the options that were typed, read."""
    typed = ((option, given[option.name]) for option in options if option.name in given)
    return {option.name: option.read(text, option.flag) for option, text in typed if text is not None}


def of_queue(given: Mapping[str, str | None]) -> dict[str, Any]:
    """The options of a queue, as `create_queue` and `update` take them."""
    found = read((*QUEUE_OPTIONS, DURABILITY), given)
    kept = {name.removeprefix(RETENTION): found.pop(name) for name in [*found] if name.startswith(RETENTION)}
    if found.get("dead_queue") == "":
        raise Failed("--dead-queue is empty; name a queue, or use --no-dead-queue with update")
    return {**found, **({"retention": kept} if kept else {})}


def of_item(given: Mapping[str, str | None], headers: Iterable[str]) -> dict[str, Any]:
    """The options of an item, as `NewItem` takes them."""
    found = read(ITEM_OPTIONS, given)
    if "at" in found and "delay" in found:
        raise Failed("--at and --delay were both given; leave one out")
    if "delay" in found:
        found["at"] = SystemClock().read().wall / SECOND + found.pop("delay")
    named = reading.pairs(headers, "--header", "NAME=VALUE")
    return {**found, **({"headers": named} if named else {})}
