"""Numbers and times as text, as a report writes them. All times are UTC."""

from datetime import datetime

NOTHING = "–"
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def number(value: int) -> str:
    return f"{value:,}"


def count_text(value: int, one: str, many: str = "") -> str:
    """A number with its noun: "1 item", "2,000 items"."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def share(part: float, whole: float) -> str:
    """A part in per cent. Only a real 0 % or 100 % is written so."""
    if not whole:
        return NOTHING
    percent = 100 * part / whole
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return (
        f"{percent:.1f} %" if percent < 10 and percent != round(percent) else f"{percent:.0f} %" if percent < 99.5 else f"{percent:.4g} %"
    )


def duration_text(seconds: float) -> str:
    """A duration with two or three digits: "0", "350 µs", "12 ms", "1.5 s", "3 min 20 s", "2 d 4 h"."""
    if seconds <= 0:
        return "0"
    for limit, factor, unit in ((0.000_999_5, 1e6, "µs"), (0.999_5, 1e3, "ms"), (59.95, 1, "s")):
        if seconds < limit:
            return f"{float(f'{seconds * factor:.3g}'):g} {unit}"
    whole = round(seconds)
    for (size, unit), (smaller, small_unit) in zip(_SPANS, (*_SPANS[1:], (1, "s")), strict=True):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size:,} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"


def step(seconds: float) -> str:
    """A time step, as in "per 5 min"."""
    for size, unit in (*_SPANS, (1, "s")):
        if seconds >= size:
            times = seconds / size
            return unit if times == 1 else f"{times:g} {unit}"
    return f"{seconds * 1_000:g} ms"


def rate(count: float, seconds: float) -> str:
    """A rate per second, minute, hour or day: the first unit in which it is at least 1."""
    for size, unit in ((1, "s"), (60, "min"), (3_600, "h"), (86_400, "d")):
        value = count / seconds * size
        if value >= 1 or unit == "d":
            return f"{value:,.0f} / {unit}" if value >= 10 else f"{value:.2g} / {unit}"
    return NOTHING


def when(at: datetime) -> str:
    """A date and time, in UTC."""
    return at.strftime("%Y-%m-%d %H:%M:%S")


def times(value: float) -> str:
    """A multiple: "1.4 ×", "30 ×"."""
    return f"{value:.1f} ×" if value < 10 else f"{value:,.0f} ×"
