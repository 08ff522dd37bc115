"""How things are shown to people: one line of text each, whatever is in them.

Owns: the words for numbers, sizes, spans, times and payloads, and `Table`. Nothing shown can steer a terminal: what is not printable is
escaped.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

from penstock.service.items import Item
from penstock.words.limits import GIB, KIB, MIB

NOTHING = "–"
_STEPS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
_SIZES = ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


class Table:
    """Rows under headings. `right` names the columns of numbers, `whole` those that are never cut on a terminal."""

    def __init__(
        self, headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = (), whole: Iterable[str] = ()
    ) -> None:
        self.headings = list(headings)
        self.rows = [[printable(cell) for cell in row] for row in rows]
        self.right = set(right)
        self.whole = set(whole)

    def plain(self) -> str:
        """Columns side by side, for a file or a pipe: no borders, nothing cut."""
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        lines = [self._line([heading.upper() for heading in self.headings], widths), *(self._line(row, widths) for row in self.rows)]
        return "\n".join(lines)

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.rjust(width) if heading in self.right else cell.ljust(width)
            for heading, cell, width in zip(self.headings, cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values, one below the other; those without a value are left out."""
    given = [(name, printable(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in given), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in given)


# -- words -------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """The text with everything escaped that is not a printable character."""
    return text if text.isprintable() else "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(one: str) -> str:
    code = ord(one)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a key that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return one.encode("unicode_escape").decode("ascii")


def counted(number: int, one: str, many: str = "") -> str:
    """ "1 item", "2,000 items"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def number(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def size(value: int | None) -> str:
    if value is None:
        return NOTHING
    for unit, name in _SIZES:
        if value >= unit:
            return f"{value / unit:.3g} {name}" if value < 1_000 * unit else f"{value / unit:,.0f} {name}"
    return f"{value} B"


def span(seconds: float | None) -> str:
    """The two largest parts of a length of time: "1d 2h", "5m", "0.25s"."""
    if seconds is None:
        return NOTHING
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


def when(moment: datetime | None) -> str:
    """Local time."""
    return NOTHING if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def payload(item: Item) -> str:
    """A payload as text where it is text, else its length."""
    try:
        return printable(item.payload.decode())
    except UnicodeDecodeError:
        return f"<{counted(len(item.payload), 'byte')}>"
