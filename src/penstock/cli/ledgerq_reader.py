"""Reads the messages of a LedgerQ directory as items, and knows which of them were imported before.

Owns: `LedgerReader`, `SideFiles`, `MessageBatch` and `ImportCounts`. Only reads.
What was imported is remembered by the queue as ranges of message ids: the source "ledgerq:<segment>:<first id>" and its
number, the last id. Every message of that segment in the range was handled. A batch belongs to one range and makes it
longer, so an import that was killed goes on where it ended, and a later one takes only what is new.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec

from penstock.api.items import NewItem, to_batch
from penstock.cli import ledgerq_files, text_output
from penstock.cli.failures import NOT_FOUND, STORAGE, CommandFailed
from penstock.cli.ledgerq_files import FailedMessage, LedgerEntry, SkippedBytes
from penstock.words import origin
from penstock.words.batch import Batch, validate
from penstock.words.errors import InvalidRequest
from penstock.words.ids import FIRST_FOREIGN_NUMBER, format_id
from penstock.words.limits import MAX_BATCH_BYTES
from penstock.words.origin import Origin

BATCH = 5_000
BATCH_BYTES = MAX_BATCH_BYTES // 4
PRIORITIES = {0: None, 1: 3, 2: 1}
"""LedgerQ priority → priority of the item. LedgerQ gives 0 (low) also to messages without a priority."""
NANOSECONDS = 1_000_000_000
MIN_WINDOW = 0.001
MAX_REASON = 1_000
SYSTEM = "ledgerq"
PREFIX = f"{SYSTEM}:"


class ImportCounts(msgspec.Struct):
    """How many messages were imported and skipped."""

    imported: int = 0
    retried: int = 0
    """Of the imported ones: those that had failed in LedgerQ. Their attempts are continued."""
    deduplicated: int = 0
    """Of the imported ones: those with a dedup id."""
    consumed: int = 0
    """Skipped: LedgerQ had delivered them."""
    expired: int = 0
    """Skipped: their ttl was over."""
    imported_before: int = 0
    """Skipped: messages that an earlier import took, or up to --after."""
    last_id: int = 0
    """The id of the last imported message."""
    skipped: list[dict[str, Any]] = []
    """The bytes and messages that could not be imported."""
    torn: int = 0
    """How many entries of `skipped` are the cut-off end of a file."""

    def skip(self, file: str, found: SkippedBytes) -> None:
        self.torn += found.torn
        self.skipped.append({"file": file, "byte": found.where, "size": found.size, "why": found.why, "torn": found.torn})


class SideFiles:
    """What LedgerQ keeps beside its segments: the read position, failed attempts and dedup ids."""

    def __init__(self, directory: str, everything: bool, now: int) -> None:
        self.notes: list[str] = []
        """What is missing or cannot be used."""
        self.read_id = 0 if everything else self._read_id(directory)
        self.retries: dict[int, FailedMessage] = self._read(directory, ledgerq_files.RETRIES_NAME, ledgerq_files.read_retries, "retries")
        self.dedup_ids: dict[int, tuple[str, int]] = self._read(
            directory, ledgerq_files.DEDUP_NAME, lambda data: ledgerq_files.read_dedup_ids(data, now), "dedup ids"
        )

    def _read(self, directory: str, name: str, parse: Callable[[bytes], dict[int, Any]], what: str) -> dict[int, Any]:
        try:
            with open(f"{directory}/{name}", "rb") as file:
                return parse(file.read())
        except FileNotFoundError:
            return {}
        except (ValueError, OSError) as error:
            self.notes.append(f"{name} cannot be used ({error}): {what} are not imported")
            return {}

    def _read_id(self, directory: str) -> int:
        """The id of the first message that LedgerQ had not delivered."""
        name = ledgerq_files.METADATA_NAME
        try:
            with open(f"{directory}/{name}", "rb") as file:
                return ledgerq_files.read_id(file.read())
        except FileNotFoundError:
            self.notes.append(f"there is no {name}: every message counts as not delivered")
        except ValueError as error:
            self.notes.append(f"{name} cannot be used ({error}): every message counts as not delivered")
        except OSError as error:
            raise CommandFailed(f"{directory}/{name} cannot be read ({error.strerror}); use --all to import without it", STORAGE) from None
        return 0


class _Message(NamedTuple):
    file: str
    entry: LedgerEntry
    item: NewItem
    origin: Origin | None


class MessageBatch(NamedTuple):
    """Items that are stored together, and the range of messages to which they belong."""

    source: str
    after: int
    """The last id of the range before these items; 0: they begin it."""
    number: int
    """The last id of these items."""
    items: Batch
    retried: int
    deduplicated: int


class LedgerReader:
    """Reads the messages of a directory in batches, and counts what is skipped."""

    def __init__(
        self,
        directory: str,
        now: int,
        *,
        everything: bool = False,
        after: int = 0,
        key_header: str | None = None,
        dead_letters_of: str = "",
    ) -> None:
        """now: nanoseconds. dead_letters_of: the messages are dead letters of this queue."""
        self.counts = ImportCounts()
        self.files = _segments(directory)
        self.size_bytes = sum(os.path.getsize(f"{directory}/{name}") for name in self.files)
        self.side = SideFiles(directory, everything, now)
        self.priorities = False
        """Whether any message has a priority above low."""
        self.on_read: Any = None
        """Called with the number of bytes that were read."""
        self.positions: dict[str, int] = {}
        """What was imported: source → number."""
        self.left_dedup_ids = 0
        """How many messages were left out that have a dedup id."""
        self._directory = directory
        self._now = now
        self._after = after
        self._key_header = key_header
        self._dead_letters_of = dead_letters_of

    def batches(self) -> Iterator[MessageBatch]:
        """Batches of items that can be stored. `positions` must have their numbers before the next one is asked for."""
        for name in self.files:
            with _mapped(f"{self._directory}/{name}") as data:
                problem = ledgerq_files.check_header(data)
                if problem:
                    self.counts.skip(name, SkippedBytes(0, min(len(data), ledgerq_files.HEADER_BYTES), problem, torn=not len(data)))
                if not problem or problem == ledgerq_files.DAMAGED_HEADER:
                    yield from self._file_batches(name, data)
            self.on_read(os.path.getsize(f"{self._directory}/{name}"))

    def _file_batches(self, name: str, data: Any) -> Iterator[MessageBatch]:
        prefix = f"{PREFIX}{ledgerq_files.segment_identity(data)}:"
        ranges = {int(source.removeprefix(prefix)): last for source, last in self.positions.items() if source.startswith(prefix)}
        first = last = size = 0
        """The range to which the next message belongs (0: a new one), and its last message."""
        batch: list[_Message] = []
        for found in ledgerq_files.entries(data):
            if isinstance(found, SkippedBytes):
                if not found.id or found.id >= max(self.side.read_id, self._after + 1):
                    self.counts.skip(name, found)
                continue
            known = next((begin for begin, end in ranges.items() if begin <= found.id <= end), 0)
            item = None if known else self._item(found)
            left_out = not known and item is None and not self._is_expired(found)
            if batch and (known or left_out or found.id <= last or len(batch) >= BATCH or size >= BATCH_BYTES):
                yield from self._message_batch(prefix, first, batch)
                batch, size = [], 0
            if known:
                self.counts.imported_before += 1
                first, last = known, found.id
            elif item is not None:
                first = found.id if not first or found.id <= last else first
                last = found.id
                batch.append(_Message(name, found, *item))
                size += len(found.payload)
            elif left_out:
                first = 0  # the range ends before it
        if batch:
            yield from self._message_batch(prefix, first, batch)

    def _message_batch(self, prefix: str, first: int, batch: list[_Message]) -> Iterator[MessageBatch]:
        """The messages that are within the limits of an item."""
        source = f"{prefix}{first}"
        kept = self._storable(batch)
        if kept:
            items = to_batch([one.item for one in kept])
            if any(one.origin is not None for one in kept):
                items.origins = [None if one.origin is None else origin.encode(one.origin) for one in kept]
            retried = sum(one.origin is not None and one.origin.continued for one in kept)
            deduplicated = sum(one.item.dedup is not None for one in kept)
            yield MessageBatch(source, self.positions.get(source, 0), batch[-1].entry.id, items, retried, deduplicated)

    def _storable(self, batch: list[_Message]) -> list[_Message]:
        if not _refusal([one.item for one in batch]):
            return batch
        found = []
        for one in batch:
            why = _refusal([one.item])
            if why:
                entry = one.entry
                self.counts.skip(one.file, SkippedBytes(0, len(entry.payload), f"message {entry.id} is not imported: {why}", id=entry.id))
            else:
                found.append(one)
        return found

    def _is_expired(self, entry: LedgerEntry) -> bool:
        return bool(entry.expires) and entry.expires <= self._now

    def _item(self, entry: LedgerEntry) -> tuple[NewItem, Origin | None] | None:
        """The item of a message and its origin; None if the message is skipped."""
        self.priorities = self.priorities or entry.priority > 0
        failed = self.side.retries.get(entry.id)
        if entry.id <= self._after:
            self.counts.imported_before += 1
        elif entry.id < self.side.read_id and failed is None:
            self.counts.consumed += 1
            self.left_dedup_ids += entry.id in self.side.dedup_ids
        elif self._is_expired(entry):
            self.counts.expired += 1
        elif self._dead_letters_of:
            return _dead_letter(entry, self._now, self._key_header, self._dead_letters_of)
        else:
            item = _item(entry, entry.id, self._now, self._key_header, self.side.dedup_ids.get(entry.id))
            return item, None if failed is None else _origin(SYSTEM, entry.id, failed, continued=True)
        return None


def _item(
    entry: LedgerEntry, id: int, now: int, key_header: str | None, dedup: tuple[str, int] | None, leave_out: tuple[str, ...] = ()
) -> NewItem:
    headers = {name: value for name, value in _headers(entry).items() if name not in leave_out}
    key = None if key_header is None else headers.get(key_header)
    time = text_output.iso_time(max(entry.time, 0) // 1_000)
    return NewItem(
        entry.payload,
        key=key,
        headers={**headers, **({"ledgerq.time": time} if time else {})},
        reference=f"{PREFIX}{id}",
        priority=PRIORITIES.get(entry.priority),
        ttl=(entry.expires - now) / NANOSECONDS if entry.expires else None,
        dedup=None if dedup is None else dedup[0],
        dedup_window=None if dedup is None else max(dedup[1] / NANOSECONDS, MIN_WINDOW),
    )


def _dead_letter(entry: LedgerEntry, now: int, key_header: str | None, queue: str) -> tuple[NewItem, Origin]:
    told = {name: value if isinstance(value, str) else "" for name, value in _headers(entry).items()}
    id = _number(told.get(ledgerq_files.DEAD_ID, "")) or entry.id
    failed = FailedMessage(
        _number(told.get(ledgerq_files.DEAD_COUNT, "")),
        told.get(ledgerq_files.DEAD_REASON, ""),
        ledgerq_files.wall_time(told.get(ledgerq_files.DEAD_TIME, "")),
    )
    item = _item(entry, id, now, key_header, None, ledgerq_files.DEAD_HEADERS)
    return item, _origin(queue, id, failed, buried_at=max(entry.time, 0) // 1_000)


def _origin(queue: str, id: int, failed: FailedMessage, buried_at: int = 0, continued: bool = False) -> Origin:
    at = failed.last_failed_at
    here = format_id(0, min(id, FIRST_FOREIGN_NUMBER - 1))
    attempts, reason = max(0, failed.attempts), failed.reason[:MAX_REASON]
    return Origin(queue, 0, here, attempts, reason, 0, at, at, buried_at, continued=continued)


def _headers(entry: LedgerEntry) -> Mapping[str, str | bytes]:
    return {name.decode("utf-8", "backslashreplace"): _text(value) for name, value in entry.headers}


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


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


def holds_segments(directory: str) -> bool:
    try:
        return any(ledgerq_files.SEGMENT_NAME.fullmatch(name) for name in os.listdir(directory))
    except OSError:
        return False


def _segments(directory: str) -> list[str]:
    """The segment files, oldest first."""
    try:
        names = sorted(name for name in os.listdir(directory) if ledgerq_files.SEGMENT_NAME.fullmatch(name))
    except OSError as error:
        raise CommandFailed(f"{directory!r} cannot be read ({error.strerror}); fix the path", NOT_FOUND) from None
    if not names:
        raise CommandFailed(f"{directory!r} holds no segment of LedgerQ (<20 digits>.log); fix the path", NOT_FOUND)
    return names


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
