"""How things are shown to people: one line of text each, whatever is in them.

Owns: the words for numbers, sizes, spans, times and payloads, and `Table`. Nothing shown can steer a terminal: what is not printable is
escaped.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.cells import cell_len, set_cell_size

from penstock.api.items import Item
from penstock.words.limits import GIB, KIB, MIB

NOTHING = "–"
GAP = "  "
SHORTEST = 8
"""No column is cut to less."""
_STEPS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
_SIZES = ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


class Table:
    """Rows under headings.

    right: the columns of numbers.
    whole: those that are never cut, however narrow the terminal.
    spare: those that are left out of a terminal that is too narrow for them, the first one first.
    """

    def __init__(
        self,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        right: Iterable[str] = (),
        whole: Iterable[str] = (),
        spare: Sequence[str] = (),
    ) -> None:
        self.headings = list(headings)
        self.rows = [[printable(cell) for cell in row] for row in rows]
        self.right = set(right)
        self.whole = {*whole, *self.right}
        self.spare = spare

    def lines(self, width: int | None = None) -> list[str]:
        """Columns side by side, the headings first. With a width, long texts are cut so that a row fits into it, as far as that can be."""
        widths = [max(map(cell_len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        if width is not None and not self._shrink(widths, width) and self.spare:
            return self._without(self.spare[0]).lines(width)
        return [self._line(row, widths) for row in [self.headings, *self.rows]]

    def _without(self, heading: str) -> "Table":
        at = self.headings.index(heading)
        rows = [row[:at] + row[at + 1 :] for row in self.rows]
        headings = self.headings[:at] + self.headings[at + 1 :]
        return Table(headings, rows, right=self.right, whole=self.whole, spare=self.spare[1:])

    def plain(self) -> str:
        """For a file or a pipe: nothing is cut."""
        heading, *rows = self.lines()
        return "\n".join([heading.upper(), *rows])

    def _shrink(self, widths: list[int], width: int) -> bool:
        """Take from the widest column that may be cut, until the row fits; whether it does."""
        floors = [
            found if heading in self.whole else max(SHORTEST, len(heading)) for heading, found in zip(self.headings, widths, strict=True)
        ]
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
        while excess > 0:
            place = max(range(len(widths)), key=lambda at: widths[at] if widths[at] > floors[at] else 0)
            if widths[place] <= floors[place]:
                return False
            widths[place] -= 1
            excess -= 1
        return True

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = []
        for heading, cell, width in zip(self.headings, cells, widths, strict=True):
            shown = cell if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1)}…"
            space = " " * (width - cell_len(shown))
            padded.append(space + shown if heading in self.right else shown + space)
        return GAP.join(padded).rstrip()


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
