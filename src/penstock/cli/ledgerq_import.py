"""`penstock import …`: items from other systems.

Owns: the commands of that group. They only read the directory that they import.
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import msgspec
import typer

from penstock.api._sync.queue import Queue
from penstock.api.items import NewItem, to_batch
from penstock.cli import ledgerq_files, text_output
from penstock.cli.command_context import CommandContext
from penstock.cli.command_tree import command, queue_names
from penstock.cli.failures import NEGATIVE, NOT_FOUND, STORAGE, CommandFailed, exit_code_of
from penstock.cli.ledgerq_files import LedgerEntry, SkippedBytes
from penstock.words.batch import validate
from penstock.words.clock import SystemClock
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.limits import MAX_BATCH_BYTES

BATCH = 5_000
BATCH_BYTES = MAX_BATCH_BYTES // 4
PRIORITIES = {0: None, 1: 3, 2: 1}
"""LedgerQ priority → priority of the item. LedgerQ gives 0 (low) also to messages without a priority."""
SHOWN = 20
NANOSECONDS = 1_000_000_000

group = typer.Typer(no_args_is_help=True, help="Import items from other systems.")


class ImportCounts(msgspec.Struct):
    """How many messages were imported and skipped."""

    imported: int = 0
    consumed: int = 0
    """Skipped: LedgerQ had delivered them."""
    expired: int = 0
    """Skipped: their ttl was over."""
    imported_before: int = 0
    """Skipped: messages up to --after."""
    last_id: int = 0
    """The id of the last imported message."""
    skipped: list[dict[str, Any]] = []
    """The bytes and messages that could not be imported."""
    torn: int = 0
    """How many entries of `skipped` are the cut-off end of a file."""

    def skip(self, file: str, found: SkippedBytes) -> None:
        self.torn += found.torn
        self.skipped.append({"file": file, "byte": found.where, "size": found.size, "why": found.why, "torn": found.torn})


@command(group, "ledgerq")
def import_ledgerq(
    session: CommandContext,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory of a LedgerQ queue; nothing is written there.")],
    queue: Annotated[str, typer.Option(metavar="QUEUE", help="The queue for the items; it must exist.", autocompletion=queue_names)],
    everything: Annotated[bool, typer.Option("--all", help="Import also messages that LedgerQ had delivered.")] = False,
    after: Annotated[int, typer.Option(metavar="ID", help="Continue an interrupted import after this message.")] = 0,
    key_header: Annotated[str | None, typer.Option(metavar="NAME", help="The header with the key.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read everything, store nothing.")] = False,
) -> None:
    """Import the messages of a LedgerQ queue: payload, headers, priority and the rest of the ttl.

    The reference of an item is "ledgerq:<id>"; its header "ledgerq.time" is the time when it was enqueued. Exit code 1
    when something could not be imported, except the cut-off end of a file, which a crash leaves.
    """
    files = _segments(directory)
    start, notes = (0, []) if everything else _read_id(directory)
    source = LedgerReader(directory, files, start, after, key_header)
    total = sum(os.path.getsize(f"{directory}/{name}") for name in files)
    with session.progress_bar("importing", total, sizes=True) as source.on_read:
        if dry_run:
            for _, batch in source.batches():
                source.counts.imported += len(batch)
        else:
            with session.broker() as broker:
                _store(session, broker.queue(queue), source)
    _answer(session, source, notes, dry_run)


def _store(session: CommandContext, queue: Queue, source: "LedgerReader") -> None:
    counts = source.counts
    try:
        for last, batch in source.batches():
            counts.imported += len(queue.produce_many(batch))
            counts.last_id = last
    except PenstockError as error:
        done = f"{text_output.format_count(counts.imported, 'item')} imported before; continue with --after {counts.last_id}"
        raise CommandFailed(f"{error}; {done}", exit_code_of(error)) from None
    except KeyboardInterrupt:
        session.end_echo()
        session.print_note(f"stopped; {text_output.format_count(counts.imported, 'item')} imported, continue with --after {counts.last_id}")
        raise


def _answer(session: CommandContext, source: "LedgerReader", notes: list[str], dry_run: bool) -> None:
    counts = source.counts
    if source.priorities and counts.consumed:
        notes.append("priorities were used, so some messages below the read position may not have been delivered; --all imports them all")
    for note in notes:
        session.print_note(note)
    lines = [
        f"{text_output.format_count(counts.imported, 'item')} {'would be imported' if dry_run else 'imported'}",
        *([f"{counts.consumed:,} skipped: already delivered by LedgerQ"] if counts.consumed else []),
        *([f"{counts.expired:,} skipped: expired"] if counts.expired else []),
        *([f"{counts.imported_before:,} skipped: imported before (--after)"] if counts.imported_before else []),
        *(
            f"! {one['file']}, byte {one['byte']:,}: {one['why']} ({text_output.format_count(one['size'], 'byte')})"
            for one in counts.skipped[:SHOWN]
        ),
        *([f"! and {len(counts.skipped) - SHOWN} more; --json lists them all"] if len(counts.skipped) > SHOWN else []),
    ]
    session.print_answer({**msgspec.to_builtins(counts), "dry_run": dry_run, "notes": notes}, *map(text_output.printable, lines))
    if len(counts.skipped) > counts.torn:
        raise typer.Exit(NEGATIVE)


# -- reading -----------------------------------------------------------------------------------------


class LedgerReader:
    """Reads the messages of a directory as items, in batches, and counts what is skipped."""

    def __init__(self, directory: str, files: list[str], start: int, after: int, key_header: str | None) -> None:
        self.counts = ImportCounts()
        self.priorities = False
        """Whether any message has a priority above low."""
        self.on_read: Any = None
        """Called with the number of bytes that were read."""
        self._directory = directory
        self._files = files
        self._start = start
        self._after = after
        self._key_header = key_header
        self._now = SystemClock().read().wall * 1_000

    def batches(self) -> Iterator[tuple[int, list[NewItem]]]:
        """Batches of items that can be stored, each with the id of its last message."""
        batch: list[tuple[str, LedgerEntry, NewItem]] = []
        size = 0
        for found in self._items():
            batch.append(found)
            size += len(found[1].payload)
            if len(batch) >= BATCH or size >= BATCH_BYTES:
                yield batch[-1][1].id, self._storable(batch)
                batch, size = [], 0
        if batch:
            yield batch[-1][1].id, self._storable(batch)

    def _storable(self, batch: list[tuple[str, LedgerEntry, NewItem]]) -> list[NewItem]:
        """The items of a batch that are within the limits of an item."""
        items = [item for _, _, item in batch]
        if not _refusal(items):
            return items
        found = []
        for name, entry, item in batch:
            why = _refusal([item])
            if why:
                self.counts.skip(name, SkippedBytes(0, len(entry.payload), f"message {entry.id} is not imported: {why}", id=entry.id))
            else:
                found.append(item)
        return found

    def _items(self) -> Iterator[tuple[str, LedgerEntry, NewItem]]:
        for name in self._files:
            with _mapped(f"{self._directory}/{name}") as data:
                problem = ledgerq_files.check_header(data)
                if problem:
                    self.counts.skip(name, SkippedBytes(0, min(len(data), ledgerq_files.HEADER_BYTES), problem, torn=not len(data)))
                if not problem or problem == ledgerq_files.DAMAGED_HEADER:
                    yield from self._file_items(name, data)
            self.on_read(os.path.getsize(f"{self._directory}/{name}"))

    def _file_items(self, name: str, data: Any) -> Iterator[tuple[str, LedgerEntry, NewItem]]:
        for found in ledgerq_files.entries(data):
            if isinstance(found, SkippedBytes):
                if not found.id or found.id >= max(self._start, self._after + 1):
                    self.counts.skip(name, found)
                continue
            item = self._item(found)
            if item is not None:
                yield name, found, item

    def _item(self, entry: LedgerEntry) -> NewItem | None:
        """The item of a message; None if the message is skipped."""
        self.priorities = self.priorities or entry.priority > 0
        if entry.id <= self._after:
            self.counts.imported_before += 1
            return None
        if entry.id < self._start:
            self.counts.consumed += 1
            return None
        if entry.expires and entry.expires <= self._now:
            self.counts.expired += 1
            return None
        return _item(entry, self._now, self._key_header)


def _item(entry: LedgerEntry, now: int, key_header: str | None) -> NewItem:
    headers = {name.decode("utf-8", "backslashreplace"): _text(value) for name, value in entry.headers}
    key = None if key_header is None else headers.get(key_header)
    time = text_output.iso_time(max(entry.time, 0) // 1_000)
    return NewItem(
        entry.payload,
        key=key,
        headers={**headers, **({"ledgerq.time": time} if time else {})},
        reference=f"ledgerq:{entry.id}",
        priority=PRIORITIES.get(entry.priority),
        ttl=(entry.expires - now) / NANOSECONDS if entry.expires else None,
    )


def _refusal(items: list[NewItem]) -> str:
    """Why items cannot be stored; "" if they can."""
    try:
        validate(to_batch(items))
    except InvalidRequest as error:
        return str(error).removeprefix("item 0: ")
    return ""


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _segments(directory: str) -> list[str]:
    """The segment files, oldest first."""
    try:
        names = sorted(name for name in os.listdir(directory) if ledgerq_files.SEGMENT_NAME.fullmatch(name))
    except OSError as error:
        raise CommandFailed(f"{directory!r} cannot be read ({error.strerror}); fix the path", NOT_FOUND) from None
    if not names:
        raise CommandFailed(f"{directory!r} holds no segment of LedgerQ (<20 digits>.log); fix the path", NOT_FOUND)
    return names


def _read_id(directory: str) -> tuple[int, list[str]]:
    """The id of the first message that LedgerQ had not delivered, and notes about the metadata."""
    try:
        with open(f"{directory}/{ledgerq_files.METADATA_NAME}", "rb") as file:
            return ledgerq_files.read_id(file.read()), []
    except FileNotFoundError:
        return 0, [f"there is no {ledgerq_files.METADATA_NAME}: every message counts as not delivered"]
    except ValueError as error:
        return 0, [f"{ledgerq_files.METADATA_NAME} cannot be used ({error}): every message counts as not delivered"]
    except OSError as error:
        raise CommandFailed(
            f"{directory}/{ledgerq_files.METADATA_NAME} cannot be read ({error.strerror}); use --all to import without it", STORAGE
        ) from None


@contextmanager
def _mapped(path: str) -> Iterator[Any]:
    """The bytes of a file, mapped into memory."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
            size = os.fstat(file.fileno()).st_size
            found = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""
        except OSError as error:
            raise CommandFailed(f"{path} cannot be read ({error.strerror}); fix that, then import again", STORAGE) from None
        yield found
