"""What is typed, as values: durations, sizes, times, pairs.

Owns: how they may be written. Pure but for the time zone in which a time without one is read. Whatever cannot be read is refused with a
line that names the option and shows how to write it.
"""

import re
from collections.abc import Iterable
from datetime import datetime

from penstock.cli.failures import Failed
from penstock.words.limits import GIB, KIB, MIB

NONE = "none"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_BYTES = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB, "kb": 1_000, "mb": 1_000_000, "gb": 1_000_000_000}
_BYTES |= {"k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB, "tb": 1_000_000_000_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def duration(text: str, option: str) -> float:
    """Seconds: "30", "30s", "1.5h", "1d12h"."""
    given = text.strip().lower()
    if _NUMBER.fullmatch(given):
        return float(given)
    parts = _PART.findall(given)
    if not parts or "".join(number + unit for number, unit in parts) != given:
        raise Failed(f"{option} is {text!r}; give seconds, or a number with ms, s, m, h, d or w, such as 30s, 5m or 1d12h")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def duration_or_none(text: str, option: str) -> float | None:
    return None if text.strip().lower() == NONE else duration(text, option)


def size(text: str, option: str) -> int:
    """Bytes: "4096", "64MiB", "1GB"."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _BYTES:
        raise Failed(f"{option} is {text!r}; give bytes, or a number with KiB, MiB, GiB or TiB, such as 64MiB")
    return round(float(found[1]) * _BYTES[found[2]])


def size_or_none(text: str, option: str) -> int | None:
    return None if text.strip().lower() == NONE else size(text, option)


def number(text: str, option: str) -> int:
    try:
        return int(text.strip().replace("_", "").replace(",", ""))
    except ValueError:
        raise Failed(f"{option} is {text!r}; give a whole number") from None


def number_or_none(text: str, option: str) -> int | None:
    return None if text.strip().lower() == NONE else number(text, option)


def instant(text: str, option: str) -> datetime:
    """A time in ISO 8601; without an offset it is local time."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found if found.tzinfo is not None else found.astimezone()
    except (ValueError, OverflowError):
        raise Failed(f"{option} is {text!r}; give a time as 2030-01-31T08:00:00Z, or without an offset for local time") from None


def pairs(given: Iterable[str], option: str, example: str) -> dict[str, str]:
    """What was given as name=value, each name once."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Failed(f"{option} is {text!r}; give it as {example}")
        if name in found:
            raise Failed(f"{option} names {name!r} twice; give it once")
        found[name] = value
    return found


def weights(given: Iterable[str], option: str) -> dict[str, int]:
    """Queues with their weights: "orders=3", or "orders" for a weight of 1."""
    found: dict[str, int] = {}
    for text in given:
        name, equals, weight = text.partition("=")
        if not name or name in found or (equals and not (weight.isdecimal() and int(weight) > 0)):
            raise Failed(f"{option} is {text!r}; give each queue once, as NAME or NAME=WEIGHT, such as orders=3")
        found[name] = int(weight) if equals else 1
    return found
