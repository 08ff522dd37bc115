"""Durations and sizes as text: "30s", "1d12h", "64MiB".

Owns: `parse_duration`, `parse_size` and `format_seconds`. A text that cannot be parsed raises InvalidRequest, which
names what was given and shows how to write it.
"""

import re

from penstock.words.errors import InvalidRequest
from penstock.words.limits import GIB, KIB, MIB

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_STEPS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
_BYTES = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB, "kb": 1_000, "mb": 1_000_000, "gb": 1_000_000_000}
_BYTES |= {"k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB, "tb": 1_000_000_000_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def parse_duration(text: str, name: str) -> float:
    """Seconds: "30", "30s", "1.5h", "1d12h". name: what the text is for, in the error."""
    given = text.strip().lower()
    if _NUMBER.fullmatch(given):
        return float(given)
    parts = _PART.findall(given)
    if not parts or "".join(number + unit for number, unit in parts) != given:
        raise InvalidRequest(f"{name} is {text!r}; give seconds, or a number with ms, s, m, h, d or w, such as 30s, 5m or 1d12h")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def parse_size(text: str, name: str) -> int:
    """Bytes: "4096", "64MiB", "1GB". name: what the text is for, in the error."""
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None or found[2] not in _BYTES:
        raise InvalidRequest(f"{name} is {text!r}; give bytes, or a number with KiB, MiB, GiB or TiB, such as 64MiB")
    return round(float(found[1]) * _BYTES[found[2]])


def format_seconds(seconds: float) -> str:
    """The two largest units of a duration: "1d 2h", "5m", "0.25s"."""
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.2g}s"
    left = round(seconds)
    parts: list[str] = []
    for step, unit in _STEPS:
        if left >= step or (not parts and unit == "s"):
            parts.append(f"{left // step}{unit}")
            left %= step
        elif parts:
            break
    return " ".join(parts[:2])
