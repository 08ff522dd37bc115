"""`penstock produce`: items from the command line, from a file, from a pipe.

Owns: the command, and `ItemLoader`, which stores the items of a source in batches and counts the stored items and the bad lines.
A bad line ends the command after everything before it is stored; with --skip-bad it is counted and left out.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from typing import Annotated, Any, BinaryIO

import typer

from penstock.api._sync.queue import Queue
from penstock.api.items import NewItem, to_batch
from penstock.cli import option_values, text_input, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import QueueArgument, command
from penstock.cli.failures import NOT_FOUND, CommandFailed, exit_code_of
from penstock.cli.option_values import FIELD_OPTIONS, ITEM_OPTIONS, option_parameters, parse_item_options, parse_options
from penstock.cli.text_input import PAYLOAD_FORMATS, InputLines, NumberedItem, RecordFields
from penstock.words.batch import validate
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.limits import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, check_range

BATCH = 5_000
BATCH_BYTES = MAX_BATCH_BYTES // 4
SHOWN = 10
"""Bad lines that are named; the others are counted."""


class ItemLoader:
    """Stores items in batches, in order."""

    def __init__(self, queue: Queue, batch: int, timeout: float, skip_bad: bool) -> None:
        self.produced = 0
        self.bad_count = 0
        self.bad_lines: list[str] = []
        """The first bad lines, and what is wrong with them."""
        self.ids: list[str] = []
        """Of the last batch."""
        self._queue = queue
        self._batch = batch
        self._timeout = timeout
        self._skip_bad = skip_bad
        self._waiting: list[tuple[int, NewItem]] = []
        self._size = 0

    def load(self, source: Iterable[NumberedItem]) -> None:
        """Store everything that a source gives."""
        for line, found in source:
            if isinstance(found, str):
                self._leave_out(line, found)
                continue
            self._waiting.append((line, found))
            self._size += len(found.payload)  # type: ignore[arg-type]
            if len(self._waiting) >= self._batch or self._size >= BATCH_BYTES:
                self.flush()
        self.flush()

    def flush(self) -> None:
        """Store what has come so far."""
        batch, self._waiting, self._size = self._waiting, [], 0
        if not batch:
            return
        try:
            self._store(batch)
        except InvalidRequest:
            self._store_good(batch)

    def _store(self, batch: Sequence[tuple[int, NewItem]]) -> None:
        try:
            self.ids = self._queue.produce_many([item for _, item in batch], timeout=self._timeout)
        except PenstockError as error:
            self.produced += sum(isinstance(result, str) for result in getattr(error, "results", ()))
            raise
        self.produced += len(batch)

    def _store_good(self, batch: Sequence[tuple[int, NewItem]]) -> None:
        """Some items of a batch are refused: find out which."""
        good: list[tuple[int, NewItem]] = []
        for line, item in batch:
            try:
                validate(to_batch([item]))
            except InvalidRequest as error:
                self._waiting = good
                self._leave_out(line, f"is refused ({str(error).removeprefix('item 0: ')})")
                good = self._waiting
            else:
                good.append((line, item))
        self._waiting = []
        if len(good) == len(batch):
            raise InvalidRequest(f"the items from line {batch[0][0]} on are refused together; use a smaller --batch")
        if good:
            self._store(good)

    def _leave_out(self, line: int, why: str) -> None:
        if not self._skip_bad:
            if self._waiting:
                good, self._waiting = self._waiting, []
                self._store(good)
            raise CommandFailed(f"line {line} {why}; mend it and go on from there, or leave such lines out with --skip-bad")
        self.bad_count += 1
        if len(self.bad_lines) < SHOWN:
            self.bad_lines.append(f"line {line} {why}")


# -- the command -------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    command(app, "produce", more=option_parameters(*ITEM_OPTIONS, *FIELD_OPTIONS))(produce)


def produce(
    session: CommandContext,
    queue: QueueArgument,
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="The payload; '-' reads it from stdin.", show_default=False)] = None,
    file: Annotated[str | None, typer.Option("--from", metavar="FILE", help="Read from a file.", show_default=False)] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line is an item.")] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Each line is a JSON value.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Each row is an item: a JSON object of its cells.")] = False,
    form: Annotated[str, typer.Option("--as", metavar="|".join(PAYLOAD_FORMATS), help="What a value or a line is.")] = "text",
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; may be repeated.", show_default=False)] = None,
    columns: Annotated[
        str, typer.Option(metavar="A,B,…", help="Names of the CSV columns, if the first row does not say.", show_default=False)
    ] = "",
    delimiter: Annotated[str, typer.Option(metavar="CHARACTER", help="What separates CSV cells; or 'tab'.")] = ",",
    batch: Annotated[int, typer.Option(metavar="N", help="How many lines are stored at once.")] = BATCH,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait while the queue is full.")] = "30s",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out, and count them.")] = False,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="On a terminal unless given.", show_default=False)
    ] = None,
    **options: str | None,
) -> None:
    """Store items: VALUE, or what comes from a file or a pipe, as one item or line by line.

    Prints the id of the item, or how many there were. What has come so far is stored whenever the input pauses.
    """
    check_range("--batch", batch, 1, MAX_BATCH_ITEMS)
    patience = option_values.parse_duration(timeout, "--timeout")
    cut = _cut(lines, jsonl, csv, form)
    fields = _fields(options, cut)
    make = partial(_item, parse_item_options(options, header or ()))
    with ExitStack() as stack:
        stream = _stream(value, file, cut, stack)
        if not cut:
            _produce_one(session, queue, _single(stream.read(), form, make), patience)
            return
        moved = stack.enter_context(session.progress_bar("producing", text_input.file_size(stream), progress, sizes=True))
        loader = ItemLoader(stack.enter_context(session.broker()).queue(queue), batch, patience, skip_bad)
        source = InputLines(stream, loader.flush, moved)
        if cut == "csv":
            found = text_input.csv_items(source, fields, make, _delimiter(delimiter), _columns(columns))
        else:
            found = text_input.json_items(source, fields, make) if cut == "jsonl" else text_input.line_items(source, form, make)
        _load(loader, found)
    _answer(session, loader)


def _produce_one(session: CommandContext, queue: str, item: NewItem, patience: float) -> None:
    with session.broker() as broker:
        (id,) = broker.queue(queue).produce_many([item], timeout=patience)
    session.print_answer({"id": id}, id)


def _load(loader: ItemLoader, source: Iterable[NumberedItem]) -> None:
    """Store all; when that fails, say how many were stored before."""
    try:
        loader.load(source)
    except (PenstockError, CommandFailed) as error:
        raise CommandFailed(f"{error}; {text_output.format_count(loader.produced, 'item')} stored before", exit_code_of(error)) from None
    except KeyboardInterrupt:
        typer.echo(f"penstock: stopped; {text_output.format_count(loader.produced, 'item')} stored before", err=True)
        raise


def _answer(session: CommandContext, loader: ItemLoader) -> None:
    for line in loader.bad_lines:
        session.print_note(f"{line}; left out")
    left_out = f", {text_output.format_count(loader.bad_count, 'bad line')} left out" if loader.bad_count else ""
    session.print_answer(
        {"produced": loader.produced, "bad": loader.bad_count}, f"{text_output.format_count(loader.produced, 'item')} produced{left_out}"
    )


# -- what was asked for ------------------------------------------------------------------------------


def _cut(lines: bool, jsonl: bool, csv: bool, form: str) -> str:
    """How the input is cut into items; "" when it is one."""
    if form not in PAYLOAD_FORMATS:
        raise CommandFailed(f"--as is {form!r}; use {', '.join(PAYLOAD_FORMATS)}")
    chosen = [name for name, wanted in (("lines", lines), ("jsonl", jsonl), ("csv", csv)) if wanted]
    if len(chosen) > 1:
        raise CommandFailed(f"--{chosen[0]} and --{chosen[1]} were both given; leave one out")
    return chosen[0] if chosen else ""


def _fields(options: Mapping[str, str | None], cut: str) -> RecordFields:
    found = parse_options(FIELD_OPTIONS, options)
    for name in found:
        common = name.removesuffix("_field")
        if cut not in ("jsonl", "csv"):
            raise CommandFailed(f"--{common}-field is of records; add --jsonl or --csv")
        if options[common] is not None:
            raise CommandFailed(f"--{common} and --{common}-field were both given; leave one out")
    return {name.removesuffix("_field"): field for name, field in found.items()}


def _item(common: dict[str, Any], payload: bytes, **own: Any) -> NewItem:
    return NewItem(payload, **{**own, **common})


def _single(data: bytes, form: str, make: text_input.ItemFactory) -> NewItem:
    try:
        return text_input.single_item(data, form, make)
    except text_input.BadLine as error:
        raise CommandFailed(f"the value {error}; mend it, or say what it is with --as") from None


def _stream(value: str | None, file: str | None, cut: str, stack: ExitStack) -> BinaryIO:
    """Where the input comes from."""
    if file is not None and value is not None:
        raise CommandFailed("a VALUE and --from were both given; leave one out")
    if value not in (None, "-"):
        if cut:
            raise CommandFailed(f"--{cut} reads a file or stdin, and a VALUE was given; leave one out")
        return BytesIO(os.fsencode(str(value)))
    if file not in (None, "-"):
        try:
            return stack.enter_context(open(str(file), "rb"))
        except OSError as error:
            raise CommandFailed(f"{file!r} cannot be read ({error.strerror}); mend the path", NOT_FOUND) from None
    if value is None and file is None and sys.stdin.isatty():
        raise CommandFailed("there is nothing to produce; give a VALUE, --from FILE, or pipe something in ('-' reads what you type)")
    return sys.stdin.buffer


def _delimiter(given: str) -> str:
    found = "\t" if given in ("tab", "\\t") else given
    if len(found) != 1 or found in '\r\n"':
        raise CommandFailed(f"--delimiter is {given!r}; give one character, or 'tab'")
    return found


def _columns(given: str) -> list[str]:
    names = [name.strip() for name in given.split(",")] if given else []
    if len(set(names)) != len(names) or "" in names:
        raise CommandFailed(f"--columns is {given!r}; give different names with commas between them")
    return names
