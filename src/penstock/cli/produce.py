"""`penstock produce`: items from the command line, from a file, or from a pipe.

Owns: the command, and `ItemLoader`, which stores items in batches and counts the stored items and the bad lines.
A bad line ends the command after all items before it are stored; with --skip-bad it is skipped and counted.
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
from penstock.api.arguments import wait_timeout
from penstock.api.items import NewItem, to_batch
from penstock.api.produced import stored_ids
from penstock.cli import option_values, text_input, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import QueueArgument, command
from penstock.cli.failures import NOT_FOUND, CommandFailed, exit_code_of
from penstock.cli.option_values import FIELD_OPTIONS, ITEM_OPTIONS, option_parameters, parse_item_options, parse_options
from penstock.cli.text_input import PAYLOAD_FORMATS, InputLines, NumberedItem, RecordFields
from penstock.loop.requests import StoredPart
from penstock.operations import ProduceItems
from penstock.words.batch import validate
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.limits import MAX_BATCH_BYTES, MAX_BATCH_ITEMS, check_range

BATCH = 5_000
COMMA = ","
BATCH_BYTES = MAX_BATCH_BYTES // 4
SHOWN = 10
"""How many bad lines are printed; further ones are only counted."""

group = typer.Typer()


class ItemLoader:
    """Stores items in batches, in input order."""

    def __init__(self, queue: Queue, batch: int, timeout: float, skip_bad: bool) -> None:
        self.produced = 0
        self.duplicates = 0
        self.bad_count = 0
        self.bad_lines: list[str] = []
        """The first bad lines, with what is wrong with each."""
        self._queue = queue
        self._batch = batch
        self._timeout = timeout
        self._skip_bad = skip_bad
        self._waiting: list[tuple[int, NewItem]] = []
        self._size = 0

    def load(self, source: Iterable[NumberedItem]) -> None:
        """Store all items of a source."""
        for line, item in source:
            if isinstance(item, str):
                self._reject(line, item)
                continue
            self._waiting.append((line, item))
            self._size += len(item.payload)  # type: ignore[arg-type]
            if len(self._waiting) >= self._batch or self._size >= BATCH_BYTES:
                self.flush()
        self.flush()

    def flush(self) -> None:
        """Store the items that were read so far."""
        batch, self._waiting, self._size = self._waiting, [], 0
        if not batch:
            return
        try:
            self._store(batch)
        except InvalidRequest:
            self._store_good(batch)

    def _store(self, batch: Sequence[tuple[int, NewItem]]) -> None:
        parts = _produce(self._queue, [item for _, item in batch], self._timeout)
        for part in parts:
            if part.stored is not None:
                self.produced += part.stored.count
                self.duplicates += _duplicates(part)
        stored_ids(parts, len(batch))  # raises if some were refused

    def _store_good(self, batch: Sequence[tuple[int, NewItem]]) -> None:
        """Store the valid items of a batch that was refused, and reject the others."""
        good: list[tuple[int, NewItem]] = []
        for line, item in batch:
            try:
                validate(to_batch([item]))
            except InvalidRequest as error:
                self._waiting = good
                self._reject(line, f"is refused ({str(error).removeprefix('item 0: ')})")
                good = self._waiting
            else:
                good.append((line, item))
        self._waiting = []
        if len(good) == len(batch):
            raise InvalidRequest(f"the items from line {batch[0][0]} on are refused together; use a smaller --batch")
        if good:
            self._store(good)

    def _reject(self, line: int, why: str) -> None:
        """Count a bad line; without --skip-bad, store the items before it and raise."""
        if not self._skip_bad:
            if self._waiting:
                good, self._waiting = self._waiting, []
                self._store(good)
            raise CommandFailed(f"line {line} {why}; fix it and continue from that line, or skip such lines with --skip-bad")
        self.bad_count += 1
        if len(self.bad_lines) < SHOWN:
            self.bad_lines.append(f"line {line} {why}")


def _produce(queue: Queue, items: Sequence[NewItem], timeout: float) -> list[StoredPart]:
    """Store items; unlike the queue's methods, this also tells which were duplicates."""
    return queue.home.call(ProduceItems(queue=queue.incarnation, batch=to_batch(items), wait=wait_timeout(timeout)))


def _duplicates(part: StoredPart) -> int:
    """How many items of a stored part were produced before, by their dedup ids."""
    return 0 if part.stored is None or part.stored.ids is None else len(part.stored.ids) - part.stored.count


# -- the command -------------------------------------------------------------------------------------


@command(group, "produce", more=option_parameters(*ITEM_OPTIONS, *FIELD_OPTIONS))
def produce(
    session: CommandContext,
    queue: QueueArgument,
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="The payload; '-' reads it from stdin.", show_default=False)] = None,
    file: Annotated[str | None, typer.Option("--from", metavar="FILE", help="Read a file.", show_default=False)] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Make an item of each line that is not empty.")] = False,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Make an item of each line, which is a JSON value.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Make an item of each CSV row: a JSON object of its cells.")] = False,
    form: Annotated[str, typer.Option("--as", metavar="|".join(PAYLOAD_FORMATS), help="The format of the value or of a line.")] = "text",
    header: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header; may be repeated.", show_default=False)] = None,
    columns: Annotated[
        str, typer.Option(metavar="A,B,…", help="The names of the CSV columns, if the first row has none.", show_default=False)
    ] = "",
    delimiter: Annotated[str, typer.Option(metavar="CHARACTER", help="The delimiter of CSV cells, or 'tab'.")] = COMMA,
    batch: Annotated[int, typer.Option(metavar="N", help="How many lines are stored at once.")] = BATCH,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait while the queue is full.")] = "30s",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip bad lines and count them.")] = False,
    progress: Annotated[
        bool | None,
        typer.Option("--progress/--no-progress", help="Whether to show a progress bar.  [default: on a terminal]", show_default=False),
    ] = None,
    **options: str | None,
) -> None:
    """Produce VALUE, a file or stdin: as one item, or as one item per line.

    Prints the id of the item, or the number of items. Items that were read are stored whenever the input pauses.
    """
    check_range("--batch", batch, 1, MAX_BATCH_ITEMS)
    seconds = option_values.parse_duration(timeout, "--timeout")
    split = _split(lines, jsonl, csv, form)
    if split != "csv" and (columns or delimiter != COMMA):
        raise CommandFailed(f"--{'columns' if columns else 'delimiter'} is for CSV; add --csv, or leave it out")
    if skip_bad and not split:
        raise CommandFailed("--skip-bad is for several items; add --lines, --jsonl or --csv, or leave it out")
    fields = _fields(options, split)
    make = partial(_item, parse_item_options(options, header or ()))
    with ExitStack() as stack:
        stream = _stream(value, file, split, stack)
        if not split:
            _produce_one(session, queue, _single(stream.read(), form, make), seconds)
            return
        advance = stack.enter_context(session.progress_bar("producing", text_input.file_size(stream), progress, sizes=True))
        loader = ItemLoader(stack.enter_context(session.broker()).queue(queue), batch, seconds, skip_bad)
        source = InputLines(stream, loader.flush, advance)
        if split == "csv":
            items = text_input.csv_items(source, fields, make, _delimiter(delimiter), _columns(columns))
        else:
            items = text_input.json_items(source, fields, make) if split == "jsonl" else text_input.line_items(source, form, make)
        _load(session, loader, items)
    _answer(session, loader)


def _produce_one(session: CommandContext, queue: str, item: NewItem, timeout: float) -> None:
    with session.broker() as broker:
        parts = _produce(broker.queue(queue), [item], timeout)
        (id,) = stored_ids(parts, 1)
    duplicate = bool(_duplicates(parts[0]))
    session.print_answer({"id": id, "duplicate": duplicate}, id)
    if duplicate:
        session.print_note("an item with this dedup id was produced before: nothing was added")


def _load(session: CommandContext, loader: ItemLoader, source: Iterable[NumberedItem]) -> None:
    """Store all items. An error also says how many items were stored before it."""
    try:
        loader.load(source)
    except (PenstockError, CommandFailed) as error:
        raise CommandFailed(f"{error}; {text_output.format_count(loader.produced, 'item')} stored before", exit_code_of(error)) from None
    except KeyboardInterrupt:
        session.end_echo()
        session.print_note(f"stopped; {text_output.format_count(loader.produced, 'item')} stored before")
        raise


def _answer(session: CommandContext, loader: ItemLoader) -> None:
    for line in loader.bad_lines:
        session.print_note(f"{line}; skipped")
    more = f", {text_output.format_count(loader.duplicates, 'duplicate')} not added" if loader.duplicates else ""
    more += f", {text_output.format_count(loader.bad_count, 'bad line')} skipped" if loader.bad_count else ""
    session.print_answer(
        {"produced": loader.produced, "duplicates": loader.duplicates, "bad": loader.bad_count},
        f"{text_output.format_count(loader.produced, 'item')} produced{more}",
    )


# -- options -----------------------------------------------------------------------------------------


def _split(lines: bool, jsonl: bool, csv: bool, form: str) -> str:
    """How the input is split into items: "lines", "jsonl", "csv", or "" for a single item."""
    if form not in PAYLOAD_FORMATS:
        raise CommandFailed(f"--as is {form!r}; use {', '.join(PAYLOAD_FORMATS)}")
    chosen = [name for name, wanted in (("lines", lines), ("jsonl", jsonl), ("csv", csv)) if wanted]
    if len(chosen) > 1:
        raise CommandFailed(f"--{chosen[0]} and --{chosen[1]} were both given; leave one out")
    return chosen[0] if chosen else ""


def _fields(options: Mapping[str, str | None], split: str) -> RecordFields:
    found = parse_options(FIELD_OPTIONS, options)
    for name in found:
        common = name.removesuffix("_field")
        if split not in ("jsonl", "csv"):
            raise CommandFailed(f"--{common}-field needs records; add --jsonl or --csv")
        if options[common] is not None:
            raise CommandFailed(f"--{common} and --{common}-field were both given; leave one out")
    return {name.removesuffix("_field"): field for name, field in found.items()}


def _item(common: dict[str, Any], payload: bytes, **own: Any) -> NewItem:
    return NewItem(payload, **{**own, **common})


def _single(data: bytes, form: str, make: text_input.ItemFactory) -> NewItem:
    try:
        return text_input.single_item(data, form, make)
    except text_input.BadLine as error:
        raise CommandFailed(f"the value {error}; fix it, or give its format with --as") from None


def _stream(value: str | None, file: str | None, split: str, stack: ExitStack) -> BinaryIO:
    """The input: VALUE, the file of --from, or stdin."""
    if file is not None and value is not None:
        raise CommandFailed("a VALUE and --from were both given; leave one out")
    if value not in (None, "-"):
        if split:
            raise CommandFailed(f"--{split} reads a file or stdin, and a VALUE was given; leave one out")
        return BytesIO(os.fsencode(str(value)))
    if file not in (None, "-"):
        try:
            return stack.enter_context(open(str(file), "rb"))
        except OSError as error:
            raise CommandFailed(f"{file!r} cannot be read ({error.strerror}); fix the path", NOT_FOUND) from None
    if value is None and file is None and sys.stdin.isatty():
        raise CommandFailed("there is nothing to produce; give a VALUE, --from FILE, or input from a pipe ('-' reads the terminal)")
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
