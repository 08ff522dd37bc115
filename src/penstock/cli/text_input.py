"""Items from text: lines, JSON lines, CSV.

Owns: the readers of these formats. A reader gives for each line its number and the item, or a text that says what is
wrong with the line, so that the caller decides whether to stop. Only the current chunk of the input is in memory.
"""

import csv
import select
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import UnsupportedOperation
from os import fstat
from typing import Any, BinaryIO, TypeAlias

import msgspec

from penstock.api.items import NewItem
from penstock.cli.failures import CommandFailed
from penstock.words import values
from penstock.words.limits import MAX_PAYLOAD_BYTES, MIB

CHUNK = 1 * MIB
MAX_LINE_BYTES = MAX_PAYLOAD_BYTES + 4 * MIB
QUIET = 0.1
"""Seconds without input after which the items that were read are stored."""
PAYLOAD_FORMATS = ("text", "json", "bytes")
_BOM = b"\xef\xbb\xbf"
_from_json: Any = msgspec.json.Decoder().decode
_to_json = msgspec.json.Encoder().encode

NumberedItem: TypeAlias = tuple[int, NewItem | str]
ItemFactory: TypeAlias = Callable[..., NewItem]
RecordFields: TypeAlias = Mapping[str, str]
"""Field of an item → field (or column) of the record."""


class BadLine(Exception):
    """A line cannot become an item. The text completes "line 3 …"."""


# -- lines -------------------------------------------------------------------------------------------


class InputLines:
    r"""The lines of a stream without b"\n", numbered from 1. A b"\r" at the end of a line is kept.

    on_pause: called before it waits for more input.
    on_read: called with the number of bytes of each read.
    """

    def __init__(
        self, stream: BinaryIO, on_pause: Callable[[], None] = lambda: None, on_read: Callable[[int], None] = lambda size: None
    ) -> None:
        self.number = 0
        self._stream = stream
        self._on_pause = on_pause
        self._on_read = on_read
        self._handle = None if file_size(stream) is not None else _handle(stream)

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        while chunk := self._read():
            self._on_read(len(chunk))
            *lines, rest = (rest + chunk).split(b"\n")
            yield from map(self._count, lines)
            if len(rest) > MAX_LINE_BYTES:
                raise CommandFailed(f"line {self.number + 1} is longer than {MAX_LINE_BYTES // MIB} MiB; is this the right file?")
        if rest:
            yield self._count(rest)

    def _count(self, line: bytes) -> bytes:
        self.number += 1
        return line.removeprefix(_BOM) if self.number == 1 else line

    def _read(self) -> bytes:
        if self._handle is not None and not select.select([self._handle], [], [], QUIET)[0]:
            self._on_pause()
        return getattr(self._stream, "read1", self._stream.read)(CHUNK)  # read1 does not wait for a full chunk


def file_size(stream: BinaryIO) -> int | None:
    """The size of a regular file; None for other streams."""
    handle = _handle(stream)
    found = None if handle is None else fstat(handle)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def _handle(stream: BinaryIO) -> int | None:
    try:
        return stream.fileno()
    except (UnsupportedOperation, AttributeError):
        return None


def single_item(data: bytes, form: str, make: ItemFactory) -> NewItem:
    """One item from the whole input; BadLine if it does not have this format."""
    if form == "json":
        try:
            _from_json(data)
        except (ValueError, RecursionError) as error:
            raise BadLine(f"is not JSON ({error})") from None
        return make(data.strip(), encoding=values.JSON)
    if form == "text":
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise BadLine(f"is not UTF-8 (byte {error.start})") from None
        return make(data, encoding=values.TEXT)
    return make(data)


def line_items(source: InputLines, form: str, make: ItemFactory) -> Iterator[NumberedItem]:
    """An item for each line that is not empty."""
    for line in source:
        if line := line.removesuffix(b"\r"):
            yield source.number, _item_or_problem(single_item, line, form, make)


def json_items(source: InputLines, fields: RecordFields, make: ItemFactory) -> Iterator[NumberedItem]:
    """An item for each line, which is a JSON value. The payload is the text of the line."""
    for line in source:
        if line.strip():
            yield source.number, _item_or_problem(_json_line, line, fields, make)


def _json_line(line: bytes, fields: RecordFields, make: ItemFactory) -> NewItem:
    try:
        value = _from_json(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is not JSON ({error})") from None
    return make(line.strip(), encoding=values.JSON, **{name: _field(value, path) for name, path in fields.items()})


def _field(value: Any, path: str) -> str | None:
    """The text or number in a field, as text; `a.b` is the field b of the field a."""
    for name in [path] if isinstance(value, dict) and path in value else path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise BadLine(f"has no field {path!r}")
        value = value[name]
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise BadLine(f"has in its field {path!r} a {type(value).__name__}, where a text or a number must be")


# -- CSV ---------------------------------------------------------------------------------------------


def csv_items(
    source: InputLines, fields: RecordFields, make: ItemFactory, delimiter: str = ",", columns: Sequence[str] = ()
) -> Iterator[NumberedItem]:
    """An item for each row: a JSON object of texts, named by the first row or `columns`. An empty cell gives no key."""
    csv.field_size_limit(MAX_PAYLOAD_BYTES)
    reader = csv.reader((line.decode("utf-8", "surrogateescape") + "\n" for line in source), delimiter=delimiter, strict=True)
    header = list(columns) or _header(reader)
    if not header:
        return
    _check_columns(header, fields)
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            yield number, f"is not CSV ({error})"
            continue
        if row is None:
            return
        if row:
            yield number, _item_or_problem(_row, row, header, fields, make)


def _header(reader: "Iterator[list[str]]") -> list[str]:
    try:
        found = next((row for row in reader if row), [])
    except csv.Error as error:
        raise CommandFailed(f"the first row is not CSV ({error}); fix it, or give another --delimiter") from None
    double = next((name for index, name in enumerate(found) if name in found[:index]), None)
    if double is not None:
        raise CommandFailed(f"the first row names the column {double!r} twice; fix it, or give the names with --columns")
    return found


def _check_columns(header: Sequence[str], fields: RecordFields) -> None:
    for column in fields.values():
        if column not in header:
            raise CommandFailed(f"there is no column {column!r}; there are {', '.join(header):.300}")


def _row(row: Sequence[str], header: Sequence[str], fields: RecordFields, make: ItemFactory) -> NewItem:
    if len(row) != len(header):
        raise BadLine(f"has {len(row)} cells for {len(header)} columns")
    record = dict(zip(header, row, strict=True))
    try:
        payload = _to_json(record)
    except UnicodeEncodeError:
        raise BadLine("is not UTF-8") from None
    return make(payload, encoding=values.JSON, **{name: record[column] or None for name, column in fields.items()})


def _item_or_problem(parse: Callable[..., NewItem], *args: Any) -> NewItem | str:
    try:
        return parse(*args)
    except BadLine as error:
        return str(error)
