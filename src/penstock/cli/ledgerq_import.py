"""`penstock import …`: items from other systems.

Owns: the commands of that group. The directory that is imported is only read.
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
"""Low, which is also what LedgerQ gives to messages without a priority, is our default."""
SHOWN = 20
NANOSECONDS = 1_000_000_000

group = typer.Typer(no_args_is_help=True, help="Take items over from other systems.")


class ImportCounts(msgspec.Struct):
    """What became of the messages."""

    imported: int = 0
    consumed: int = 0
    """Left out: LedgerQ had given them to someone."""
    expired: int = 0
    """Left out: their time was over."""
    last_id: int = 0
    """The last message that was imported."""
    skipped: list[dict[str, Any]] = []
    """What could not be read or taken."""
    torn: int = 0
    """How many of those are just the cut-off end of a file."""

    def skip(self, file: str, found: SkippedBytes) -> None:
        self.torn += found.torn
        self.skipped.append({"file": file, "byte": found.where, "size": found.size, "why": found.why, "torn": found.torn})


@command(group, "ledgerq")
def import_ledgerq(
    session: CommandContext,
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory of a LedgerQ queue; nothing is written there.")],
    queue: Annotated[str, typer.Option(metavar="QUEUE", help="Where the items go; it must be there.", autocompletion=queue_names)],
    everything: Annotated[bool, typer.Option("--all", help="Take also what LedgerQ had given out already.")] = False,
    after: Annotated[int, typer.Option(metavar="ID", help="Go on behind this message, after an import that was cut short.")] = 0,
    key_header: Annotated[str | None, typer.Option(metavar="NAME", help="The header that is the key.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read everything, store nothing.")] = False,
) -> None:
    """Take over the messages of a LedgerQ queue: payload, headers, priority and what is left of the ttl.

    An item's reference is "ledgerq:<id>", its header "ledgerq.time" says when it was enqueued. Exit code 1 when something could not be
    taken, but for the cut-off end of a file, which a crash leaves.
    """
    files = _segments(directory)
    start, notes = (0, []) if everything else _read_id(directory)
    source = LedgerReader(directory, files, start, after, key_header)
    total = sum(os.path.getsize(f"{directory}/{name}") for name in files)
    with session.progress_bar("importing", total, sizes=True) as source.moved:
        if dry_run:
            for _, batch in source.batches():
                source.counts.imported += len(batch)
        else:
            with session.broker() as broker:
                _store(broker.queue(queue), source)
    _answer(session, source, notes, dry_run)


def _store(queue: Queue, source: "LedgerReader") -> None:
    account = source.counts
    try:
        for last, batch in source.batches():
            account.imported += len(queue.produce_many(batch))
            account.last_id = last
    except PenstockError as error:
        done = f"{text_output.format_count(account.imported, 'item')} imported before; go on with --after {account.last_id}"
        raise CommandFailed(f"{error}; {done}", exit_code_of(error)) from None
    except KeyboardInterrupt:
        typer.echo(f"penstock: stopped; {account.imported:,} items imported, go on with --after {account.last_id}", err=True)
        raise


def _answer(session: CommandContext, source: "LedgerReader", notes: list[str], dry_run: bool) -> None:
    account = source.counts
    if source.priorities and account.consumed:
        notes.append("priorities were used, so some messages below the read position may not have been given out; --all takes them all")
    for note in notes:
        session.print_note(note)
    lines = [
        f"{text_output.format_count(account.imported, 'item')} {'would be imported' if dry_run else 'imported'}",
        *([f"{account.consumed:,} left out: given out by LedgerQ already"] if account.consumed else []),
        *([f"{account.expired:,} left out: expired"] if account.expired else []),
        *(
            f"! {one['file']}, byte {one['byte']:,}: {one['why']} ({text_output.format_count(one['size'], 'byte')})"
            for one in account.skipped[:SHOWN]
        ),
        *([f"! and {len(account.skipped) - SHOWN} more; --json lists them all"] if len(account.skipped) > SHOWN else []),
    ]
    session.print_answer({**msgspec.to_builtins(account), "dry_run": dry_run, "notes": notes}, *map(text_output.printable, lines))
    if len(account.skipped) > account.torn:
        raise typer.Exit(NEGATIVE)


# -- reading -----------------------------------------------------------------------------------------


class LedgerReader:
    """The messages of a directory as items, in batches, with an account of what was left out."""

    def __init__(self, directory: str, files: list[str], start: int, after: int, key_header: str | None) -> None:
        self.counts = ImportCounts()
        self.priorities = False
        self.moved: Any = None
        self._directory = directory
        self._files = files
        self._start = max(start, after + 1)
        self._key_header = key_header
        self._now = SystemClock().read().wall * 1_000

    def batches(self) -> Iterator[tuple[int, list[NewItem]]]:
        """Items that can be stored, together with the id of the last message among them."""
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
        """The items of a batch that keep to our limits."""
        items = [item for _, _, item in batch]
        if not _refusal(items):
            return items
        found = []
        for name, entry, item in batch:
            why = _refusal([item])
            if why:
                self.counts.skip(name, SkippedBytes(0, len(entry.payload), f"message {entry.id} is not taken: {why}", id=entry.id))
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
                    yield from self._of_file(name, data)
            self.moved(os.path.getsize(f"{self._directory}/{name}"))

    def _of_file(self, name: str, data: Any) -> Iterator[tuple[str, LedgerEntry, NewItem]]:
        for found in ledgerq_files.entries(data):
            if isinstance(found, SkippedBytes):
                if not found.id or found.id >= self._start:
                    self.counts.skip(name, found)
                continue
            item = self._item(found)
            if item is not None:
                yield name, found, item

    def _item(self, entry: LedgerEntry) -> NewItem | None:
        """The item that a message becomes, unless it is left out."""
        self.priorities = self.priorities or entry.priority > 0
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
    """Why items cannot be stored; "" when they can."""
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
        raise CommandFailed(f"{directory!r} cannot be read ({error.strerror}); mend the path", NOT_FOUND) from None
    if not names:
        raise CommandFailed(f"{directory!r} holds no segment of LedgerQ (<20 digits>.log); mend the path", NOT_FOUND)
    return names


def _read_id(directory: str) -> tuple[int, list[str]]:
    """The first message that was not given out; and what there is to say about that."""
    try:
        with open(f"{directory}/{ledgerq_files.METADATA_NAME}", "rb") as file:
            return ledgerq_files.read_id(file.read()), []
    except FileNotFoundError:
        return 0, [f"there is no {ledgerq_files.METADATA_NAME}: every message counts as not given out"]
    except ValueError as error:
        return 0, [f"{ledgerq_files.METADATA_NAME} cannot be used ({error}): every message counts as not given out"]
    except OSError as error:
        raise CommandFailed(
            f"{directory}/{ledgerq_files.METADATA_NAME} cannot be read ({error.strerror}); use --all to do without", STORAGE
        ) from None


@contextmanager
def _mapped(path: str) -> Iterator[Any]:
    """A file's bytes, without reading them all at once."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
            size = os.fstat(file.fileno()).st_size
            found = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""
        except OSError as error:
            raise CommandFailed(f"{path} cannot be read ({error.strerror}); mend that, then import again", STORAGE) from None
        yield found
