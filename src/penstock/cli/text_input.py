"""Items from text: lines, JSON lines, CSV.

Owns: how they are read, line by line, as they come. A source gives for each line its number and either the item or, as a text, what is
wrong with it; so the caller decides whether to stop there. Nothing is kept but the line at hand.
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
"""Seconds without input after which what has come so far is stored."""
PAYLOAD_FORMATS = ("text", "json", "bytes")
_BOM = b"\xef\xbb\xbf"
_from_json: Any = msgspec.json.Decoder().decode
_to_json = msgspec.json.Encoder().encode

NumberedItem: TypeAlias = tuple[int, NewItem | str]
ItemFactory: TypeAlias = Callable[..., NewItem]
RecordFields: TypeAlias = Mapping[str, str]
"""Field of an item → the field (or column) of a record that gives it."""


class BadLine(Exception):
    """What is wrong with a line."""


# -- lines -------------------------------------------------------------------------------------------


class InputLines:
    """The lines of a stream, without their ends, numbered from 1. Before it has to wait for more, it says so."""

    def __init__(
        self, stream: BinaryIO, waits: Callable[[], None] = lambda: None, moved: Callable[[int], None] = lambda size: None
    ) -> None:
        self.number = 0
        self._stream = stream
        self._waits = waits
        self._moved = moved
        self._handle = None if file_size(stream) is not None else _handle(stream)

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        while chunk := self._read():
            self._moved(len(chunk))
            *lines, rest = (rest + chunk).split(b"\n")
            yield from map(self._numbered, lines)
            if len(rest) > MAX_LINE_BYTES:
                raise CommandFailed(f"line {self.number + 1} is longer than {MAX_LINE_BYTES // MIB} MiB; is this the right file?")
        if rest:
            yield self._numbered(rest)

    def _numbered(self, line: bytes) -> bytes:
        self.number += 1
        if self.number == 1:
            line = line.removeprefix(_BOM)
        return line.removesuffix(b"\r")

    def _read(self) -> bytes:
        if self._handle is not None and not select.select([self._handle], [], [], QUIET)[0]:
            self._waits()
        return getattr(self._stream, "read1", self._stream.read)(CHUNK)  # what is there, not more


def file_size(stream: BinaryIO) -> int | None:
    """How much there is to read, when the stream is a file."""
    handle = _handle(stream)
    found = None if handle is None else fstat(handle)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def _handle(stream: BinaryIO) -> int | None:
    try:
        return stream.fileno()
    except (UnsupportedOperation, AttributeError):
        return None


def single_item(data: bytes, form: str, make: ItemFactory) -> NewItem:
    """One item of all the data."""
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
    """Each line an item; empty ones are passed over."""
    for line in source:
        if line:
            yield source.number, _tried(single_item, line, form, make)


def json_items(source: InputLines, fields: RecordFields, make: ItemFactory) -> Iterator[NumberedItem]:
    """Each line a JSON value, stored as it is written."""
    for line in source:
        if line.strip():
            yield source.number, _tried(_json_line, line, fields, make)


def _json_line(line: bytes, fields: RecordFields, make: ItemFactory) -> NewItem:
    try:
        value = _from_json(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is not JSON ({error})") from None
    return make(line.strip(), encoding=values.JSON, **{name: _field(value, path) for name, path in fields.items()})


def _field(value: Any, path: str) -> str | None:
    """What a field says, as a key or another name; `a.b` is the field b of the field a."""
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
    """Each row a JSON object of texts, named by the first row unless the columns are given. An empty cell names nothing."""
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
            yield number, _tried(_row, row, header, fields, make)


def _header(reader: "Iterator[list[str]]") -> list[str]:
    try:
        found = next((row for row in reader if row), [])
    except csv.Error as error:
        raise CommandFailed(f"the first row is not CSV ({error}); mend it, or choose another --delimiter") from None
    double = next((name for place, name in enumerate(found) if name in found[:place]), None)
    if double is not None:
        raise CommandFailed(f"the first row names the column {double!r} twice; mend it, or give the names with --columns")
    return found


def _check_columns(header: Sequence[str], fields: RecordFields) -> None:
    for column in fields.values():
        if column not in header:
            raise CommandFailed(f"there is no column {column!r}; there are {', '.join(header):.300}")


def _row(row: Sequence[str], header: Sequence[str], fields: RecordFields, make: ItemFactory) -> NewItem:
    if len(row) != len(header):
        raise BadLine(f"has {len(row)} cells, and there are {len(header)} columns")
    record = dict(zip(header, row, strict=True))
    try:
        payload = _to_json(record)
    except UnicodeEncodeError:
        raise BadLine("is not UTF-8") from None
    return make(payload, encoding=values.JSON, **{name: record[column] or None for name, column in fields.items()})


def _tried(read: Callable[..., NewItem], *args: Any) -> NewItem | str:
    try:
        return read(*args)
    except BadLine as error:
        return str(error)
