"""The text and JSON forms of answers.

Owns: the text forms of numbers, sizes, durations, times and payloads, and `TextTable`. Characters that are not
printable are escaped, so that no answer can control a terminal.
Owns also the JSON form (`--json`) of items, queues and times, whose fields scripts rely on. Bytes that are not UTF-8
are given in base64, under their name with `_base64` appended.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from penstock.api.arguments import ListedItem
from penstock.api.items import Item, ItemOrigin
from penstock.api.leases import LeaseBase
from penstock.api.options import QueueInfo
from penstock.reports import HeldKey, ItemEvent, QueueStats
from penstock.words import values
from penstock.words.errors import InvalidRequest
from penstock.words.fields import FieldType, Surface, fields_on
from penstock.words.limits import GIB, KIB, MIB
from penstock.words.quantities import format_seconds

NO_VALUE = "–"
GAP = "  "
MIN_COLUMN_WIDTH = 8
"""No column is cut to less."""
_SIZES = ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


class TextTable:
    """A table of text.

    right: the columns that are aligned to the right, as numbers are.
    uncut: the columns that are never shortened.
    optional: the columns that are dropped, in this order, when the terminal is too narrow.
    """

    def __init__(
        self,
        headings: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        right: Iterable[str] = (),
        uncut: Iterable[str] = (),
        optional: Sequence[str] = (),
    ) -> None:
        self.headings = list(headings)
        self.rows = [[printable(cell) for cell in row] for row in rows]
        self.right = set(right)
        self.uncut = {*uncut, *self.right}
        self.optional = optional

    def lines(self, width: int | None = None) -> list[str]:
        """The headings and the rows. With a width, columns are shortened and dropped until a row fits, if possible."""
        widths = [max(map(cell_len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        if width is not None and not self._shrink(widths, width) and self.optional:
            return self._without(self.optional[0]).lines(width)
        return [self._line(row, widths) for row in [self.headings, *self.rows]]

    def _without(self, heading: str) -> "TextTable":
        index = self.headings.index(heading)
        rows = [row[:index] + row[index + 1 :] for row in self.rows]
        headings = self.headings[:index] + self.headings[index + 1 :]
        return TextTable(headings, rows, right=self.right, uncut=self.uncut, optional=self.optional[1:])

    def plain(self) -> str:
        """The table for a file or a pipe: nothing is shortened."""
        heading, *rows = self.lines()
        return "\n".join([heading.upper(), *rows])

    def for_terminal(self, width: int) -> Text:
        """The table for a terminal of this width."""
        heading, *rows = self.lines(width)
        return Text("\n").join([Text(heading, style="bold"), *map(Text, rows)])

    def _shrink(self, widths: list[int], width: int) -> bool:
        """Shorten the widest columns that may be cut until the row fits. Gives whether it fits."""
        floors = [
            found if heading in self.uncut else max(MIN_COLUMN_WIDTH, len(heading))
            for heading, found in zip(self.headings, widths, strict=True)
        ]
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
        while excess > 0:
            widest = max(range(len(widths)), key=lambda index: widths[index] if widths[index] > floors[index] else 0)
            if widths[widest] <= floors[widest]:
                return False
            widths[widest] -= 1
            excess -= 1
        return True

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = []
        for heading, cell, width in zip(self.headings, cells, widths, strict=True):
            shown = cell if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1)}…"
            space = " " * (width - cell_len(shown))
            padded.append(space + shown if heading in self.right else shown + space)
        return GAP.join(padded).rstrip()


def format_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    """One line for each name and value; pairs with an empty value are omitted."""
    given = [(name, printable(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in given), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in given)


# -- values ------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """The text with all characters escaped that are not printable."""
    return text if text.isprintable() else "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(one: str) -> str:
    code = ord(one)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a key that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return one.encode("unicode_escape").decode("ascii")


def format_count(number: int, one: str, many: str = "") -> str:
    """ "1 item", "2,000 items"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def format_number(value: int | None) -> str:
    return NO_VALUE if value is None else f"{value:,}"


def format_size(value: int | None) -> str:
    if value is None:
        return NO_VALUE
    for unit, name in _SIZES:
        if value >= unit:
            return f"{value / unit:.3g} {name}" if value < 1_000 * unit else f"{value / unit:,.0f} {name}"
    return f"{value} B"


def format_duration(seconds: float | None) -> str:
    """The two largest units of a duration: "1d 2h", "5m", "0.25s"."""
    return NO_VALUE if seconds is None else format_seconds(seconds)


def format_time(moment: datetime | None) -> str:
    """A time in the local time zone."""
    return NO_VALUE if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def format_payload(item: Item) -> str:
    """A payload as text if it is UTF-8, else its length."""
    try:
        return printable(item.payload.decode())
    except UnicodeDecodeError:
        return f"<{format_count(len(item.payload), 'byte')}>"


# -- JSON documents ----------------------------------------------------------------------------------

Document = dict[str, Any]


def _textual(name: str, data: bytes | None) -> Document:
    """A field with bytes: as text if they are UTF-8, else in base64."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(data).decode("ascii")}


def _moment(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def iso_time(microseconds: int) -> str | None:
    return _moment(values.timestamp(microseconds)) if microseconds else None


def _headers(given: Mapping[str, str | bytes]) -> Document:
    found: Document = {}
    for name, value in given.items():
        found |= {name: value} if isinstance(value, str) else _textual(name, value)
    return found


def item_document(given: Item) -> Document:
    """An item. Optional fields without a value are omitted, except the key."""
    found: Document = {"id": given.id, **_textual("key", given.key_bytes), **_payload_document(given)}
    found |= {"attempts": given.attempts, "priority": given.priority, "produced_at": _moment(given.produced_at)}
    return found | {name: write(value) for name, write in _OPTIONAL if (value := getattr(given, name)) not in (None, {})}


def _payload_document(given: Item) -> Document:
    """The payload as text, and for a JSON payload also its value."""
    found = _textual("payload", given.payload)
    if given.encoding == values.JSON:
        try:
            found["value"] = given.value
        except InvalidRequest:  # the payload is not JSON, although its encoding is
            found["value"] = None
    return found


def listed_document(given: ListedItem) -> Document:
    return {**item_document(given), "state": given.state, **({"reason": given.reason} if given.reason else {})}


def lease_document(given: LeaseBase) -> Document:
    return {**item_document(given.item), "token": given.token, "deadline": _moment(given.deadline)}


def _origin_document(given: ItemOrigin) -> Document:
    fields: Document = msgspec.structs.asdict(given)
    times = {name: _moment(value) for name, value in fields.items() if name.endswith("_at")}
    return {**fields, **times, "incarnation": f"{given.incarnation:016x}"}


_REQUIRED = ("id", "key", "payload", "attempts", "priority", "produced_at")
_WRITE: dict[FieldType, Callable[[Any], Any]] = {
    FieldType.INSTANT: _moment,
    FieldType.HEADERS: _headers,
    FieldType.ORIGIN: _origin_document,
}
_OPTIONAL = [
    (field.name, _WRITE.get(field.type, lambda value: value))
    for field in sorted(
        fields_on(Surface.SHOWN), key=lambda field: field.type in (FieldType.HEADERS, FieldType.ORIGIN)
    )  # nested values come last
    if field.name not in _REQUIRED
]


def queue_document(given: QueueInfo) -> Document:
    return {**msgspec.structs.asdict(given), "created_at": _moment(given.created_at)}


def stats_document(given: QueueStats) -> Document:
    found: Document = msgspec.to_builtins(given)
    return {**found, "depth": given.depth}


def event_document(given: ItemEvent) -> Document:
    """An event of an item, without its empty fields."""
    found: Document = {name: value for name, value in msgspec.to_builtins(given).items() if value}
    return {**found, "at": iso_time(given.at_wall)}


def held_key_document(given: HeldKey) -> Document:
    found = msgspec.structs.asdict(given)
    return {**_textual("key", given.key), **{name: value for name, value in found.items() if name != "key"}}
