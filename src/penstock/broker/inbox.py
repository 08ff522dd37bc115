"""The owner's side of the inbox: it adopts published writes, each exactly once.

Owns: `InboxProcessor`, one for each broker. It reads the inbox when the broker is opened, and then repeatedly, in its
own thread. It produces through the queues' turns, as any caller does.
A published write is validated before any of it is adopted; a damaged one stays in the inbox as it is. It is adopted in
chunks, its frames, whose columns are taken as bytes (`FrameColumns.view`); several share a turn. The catalog gives it a
number before the first chunk and records its source after the last; in between, each partition remembers the chunks
that it has (loop/produce.py). So a crash at any point neither loses nor repeats items.
This depends on the order: the writes of a queue are adopted one after the other, those of one source in the order of
their numbers, and none is begun while another is unfinished.
The thread also ends the consumer rights that were not renewed.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec

from penstock.broker.streams import StreamCoordinator, StreamOwner
from penstock.logs.columns import FrameColumns, encode
from penstock.logs.store import Inbox, InboxEntry, WriteManifest, write_name
from penstock.loop.requests import ProduceRequest
from penstock.operations import FindImports, FindPublished, FindWrite, ImportItems, Operation, PublishWrite, WriteState
from penstock.rules.catalog import SINGLE_WRITE, QueueEntry
from penstock.rules.records import Produced
from penstock.rules.routing import digest, with_key_ids
from penstock.words.batch import Batch, validate
from penstock.words.clock import DAY, SECOND
from penstock.words.errors import BrokerClosed, CorruptLog, InvalidRequest, PenstockError, QueueBusy, QueueNotFound
from penstock.words.limits import MIB
from penstock.words.logs import log_fields
from penstock.words.sources import WriteContent
from penstock.words.threads import InterruptSafeThread

_log = logging.getLogger("penstock")
OPENING_SECONDS = 0.2
"""How long the opening of a broker waits for the thread to do what is in the inbox; it does the rest afterwards."""
IDLE_SECONDS = 0.25
BUSY_SECONDS = 0.01
BUSY_FOR = 10 * SECOND
"""How long after the last write the inbox is read every `BUSY_SECONDS`."""
RETRY_AFTER = SECOND // 2
"""When an entry that could not be done for now is tried again."""
STALE = 7 * DAY
"""The age at which a write that was not published is removed."""
SWEEP_EVERY = DAY
CHUNKS = 1 << 32
"""More than the chunks of one write: a write's number times this is the sequence before its first chunk."""

CHUNKS_AT_ONCE = 8
CHUNK_BYTES_AT_ONCE = 8 * MIB
"""Chunks that are stored in one turn, and the payload bytes that end a turn before: other requests wait for it."""


class OwningBroker(StreamOwner, Protocol):
    """What the inbox processor needs of its broker."""

    streams: StreamCoordinator


class InboxProcessor:
    """Adopts what waits in the inbox of one broker."""

    def __init__(self, inbox: Inbox, broker: OwningBroker) -> None:
        self._inbox = inbox
        self._broker = broker
        self._clock = broker.clock
        self._retry_at: dict[str, int] = {}
        """Label of an entry that could not be done → when to try again (elapsed)."""
        self._refused: set[str] = set()
        """Labels of entries that can never be done: they stay in the inbox for the operator."""
        self._manifests: dict[str, WriteManifest] = {}
        self._validated: set[str] = set()
        """Labels of writes that were validated."""
        self.waiting_writes: Counter[int] = Counter()
        """Incarnation → published writes that waited when the inbox was last read and are not adopted since."""
        self.refused_writes: Counter[int] = Counter()
        """Incarnation → those of them that can never be adopted."""
        self.adopted_writes: Counter[int] = Counter()
        """Incarnation → writes adopted since the broker was opened."""
        self._importing = threading.Lock()
        """Held while the number of a source is compared and the next one is published."""
        self._busy_until = 0
        self._sweep_at = 0
        self._ended = threading.Event()
        self._first_pass: SimpleQueue[None] = SimpleQueue()
        """Gets an entry when the thread has processed the inbox once."""
        self._threaded = False
        self._thread: InterruptSafeThread | None = None

    def publish(self, asked: PublishWrite) -> bool:
        """Publish a staged write; False when the same write was published before and still waits."""
        published = publish_write(self._inbox, asked)
        self._start()
        return published

    def import_items(self, asked: ImportItems) -> bool:
        """Publish items as the write of their source and number; False when the source is there or beyond."""
        batch = validate(with_key_ids(asked.batch))
        with self._importing:
            at = find_imports(self._inbox, self._broker.entry, FindImports(queue=asked.queue, prefix=asked.source)).get(asked.source, 0)
            if at >= asked.number:
                return False
            if at != asked.after:
                raise InvalidRequest(f"{asked.source} was imported up to {at} meanwhile, not up to {asked.after}; start the import again")
            now = self._clock.read()
            write = write_name(now.wall)
            writer = self._inbox.part_writer(write, "items", asked.queue, make=True)
            writer.add(encode([Produced(0, batch)], now))
            parts = [writer.finish()]
            return self.publish(PublishWrite(queue=asked.queue, write=write, source=asked.source, number=asked.number, parts=parts))

    # -- the thread ----------------------------------------------------------------------------------

    def open(self, threaded: bool) -> None:
        """Adopt what waits: with threads in the thread, for which the opening of the broker waits only shortly."""
        self._threaded = threaded
        if not threaded:
            self.process()
        elif self._inbox.shared:
            self._start()
            with suppress(Empty):
                self._first_pass.get(timeout=OPENING_SECONDS)

    def _start(self) -> None:
        """Start the thread, once, if threads are allowed. An inbox in memory needs it only after the first write."""
        if self._threaded and self._thread is None and not self._ended.is_set():
            self._thread = InterruptSafeThread(self._watch)

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: forget the parent's thread, and the event, whose lock that thread may hold."""
        self._thread = None
        self._importing = threading.Lock()
        self._ended = threading.Event()
        self._ended.set()

    def process(self) -> bool:
        """Adopt what waits; gives whether anything was adopted."""
        if self._clock.read().elapsed >= self._sweep_at:
            self.sweep()
        waiting = self._waiting()
        self._forget_removed({entry.label for entry in waiting})
        self.waiting_writes = Counter(entry.incarnation for entry in waiting)
        self.refused_writes = Counter(entry.incarnation for entry in waiting if entry.label in self._refused)
        self._broker.streams.expire_consumer_rights()
        writes = sorted(waiting, key=lambda entry: entry.incarnation)
        adopted = [self._adopt_writes([*of_queue]) for _, of_queue in groupby(writes, lambda entry: entry.incarnation)]
        return any(adopted)

    def _waiting(self) -> list[InboxEntry]:
        try:
            return self._inbox.waiting()
        except PenstockError as error:
            _log.warning("the inbox cannot be read: %s", error)
            return []

    @property
    def _queues(self) -> dict[int, QueueEntry]:
        return self._broker.catalog.state.entries

    def _forget_removed(self, labels: set[str]) -> None:
        """Forget the entries that are not in the inbox any more: an entry may come again, repaired."""
        self._refused &= labels
        self._validated &= labels
        self._retry_at = {label: at for label, at in self._retry_at.items() if label in labels}
        self._manifests = {label: found for label, found in self._manifests.items() if label in labels}

    def sweep(self) -> None:
        """Remove stale unpublished writes and the files of deleted queues: at opening, and then every day."""
        now = self._clock.read()
        self._sweep_at = now.elapsed + SWEEP_EVERY
        try:
            self._inbox.sweep(now.wall - STALE, {0, *self._queues})
        except PenstockError as error:
            _log.warning("stale files in the inbox cannot be removed: %s", error)

    def _watch(self) -> None:
        self._process_safely()
        self._first_pass.put(None)
        while not self._ended.wait(BUSY_SECONDS if self._clock.read().elapsed < self._busy_until else IDLE_SECONDS):
            self._process_safely()

    def _process_safely(self) -> None:
        try:
            if self.process():
                self._busy_until = self._clock.read().elapsed + BUSY_FOR
        except Exception:  # a bug of Penstock must not end the thread
            _log.exception("processing the inbox went wrong")

    def _attempt(self, entry: InboxEntry, step: Callable[[InboxEntry], None]) -> bool:
        """Do `step` with an entry. Gives False when it failed, must wait, or was refused before."""
        now = self._clock.read().elapsed
        if self._ended.is_set() or entry.label in self._refused or now < self._retry_at.get(entry.label, 0):
            return False
        try:
            step(entry)
            return True
        except BrokerClosed:
            return False
        except PenstockError as error:
            if not error.retryable:
                self._refuse(entry, "the write %s to queue %r is left in the inbox: %s", error)
            elif entry.label not in self._retry_at:
                name = self._name_of(entry)
                text = "the write %s to queue %r cannot be taken from the inbox for now: %s"
                _log.warning(text, entry.label, name, error, extra=log_fields(queue=name))
            self._retry_at[entry.label] = now + RETRY_AFTER
        except Exception as error:  # a bug of Penstock: the other entries, and the opening of the broker, go on
            text = "the write %s to queue %r is left in the inbox because of a bug (%r); please report it"
            self._refuse(entry, text, error, exc_info=error)
        return False

    def _refuse(self, entry: InboxEntry, text: str, error: Exception, exc_info: Exception | None = None) -> None:
        self._refused.add(entry.label)
        self.refused_writes[entry.incarnation] += 1
        name = self._name_of(entry)
        _log.error(text, entry.label, name, error, exc_info=exc_info, extra=log_fields(queue=name))

    def _name_of(self, entry: InboxEntry) -> str:
        """The name of the queue that a write is for; its incarnation when it was deleted."""
        try:
            return self._broker.entry(entry.incarnation).name
        except PenstockError:
            return f"{entry.incarnation:016x}"

    # -- adoption ------------------------------------------------------------------------------------

    def _adopt_writes(self, writes: Sequence[InboxEntry]) -> bool:
        """Adopt the writes of one queue in order; gives whether any was adopted. Later writes wait for one that must
        wait.
        """
        if writes[0].incarnation not in self._queues:
            removed = [self._attempt(write, self._adopt) for write in writes]
            return any(removed)
        for write in writes:
            known = write.label in self._manifests or self._attempt(write, self._read_manifest)
            if not known and write.label not in self._refused:
                return False  # it may be the first in the order
        adopted, held_up = False, set()
        for write in self._adoption_order([write for write in writes if write.label in self._manifests]):
            source = self._manifests[write.label].source
            if source in held_up:
                continue
            if self._attempt(write, self._adopt):
                adopted = True
            elif write.label not in self._refused or self._is_unfinished(write):
                break
            else:
                held_up.add(source)  # once a later write of the source is adopted, this one never can be
        return adopted

    def _adoption_order(self, writes: Sequence[InboxEntry]) -> list[InboxEntry]:
        """An unfinished write first; then by the time of writing, but those of one source by number."""
        manifests = self._manifests
        by_number: dict[str, list[InboxEntry]] = {}
        for write in sorted(writes, key=lambda write: (not self._is_unfinished(write), manifests[write.label].number), reverse=True):
            by_number.setdefault(manifests[write.label].source, []).append(write)
        by_age = sorted(writes, key=lambda write: (not self._is_unfinished(write), manifests[write.label].began_at, write.label))
        return [by_number[manifests[write.label].source].pop() for write in by_age]

    def _read_manifest(self, write: InboxEntry) -> None:
        self._manifests[write.label] = self._inbox.manifest(write)

    def _is_unfinished(self, write: InboxEntry) -> bool:
        """Whether its adoption was begun and must be finished before any other."""
        try:
            return self._broker.entry(write.incarnation).unfinished == write.name
        except QueueNotFound:
            return False

    def _adopt(self, write: InboxEntry) -> None:
        try:
            self._adopt_items(write)
        except QueueNotFound:
            if write.incarnation in self._queues:  # the queue is being opened
                raise QueueBusy(f"the queue of {write.label} is not open yet; try again in a moment") from None
            name = self._name_of(write)
            text = "the queue that %s was written for (%s) is deleted, so it is removed"
            _log.warning(text, write.label, name, extra=log_fields(queue=name))
        self._inbox.remove(write)
        self.waiting_writes[write.incarnation] -= 1

    def _adopt_items(self, write: InboxEntry) -> None:
        queue = self._broker.entry(write.incarnation)
        manifest = self._manifests[write.label]
        if manifest.number <= queue.adopted.get(manifest.source, 0):
            _report_difference(write, manifest, queue)
            return
        if write.name in queue.adopting and not self._is_unfinished(write):  # the file was moved away and has come back
            raise CorruptLog(
                f"a part of the write {write.label} was adopted, and other writes since, so nobody can say which part; "
                "move it away and write again what is missing"
            )
        if write.label not in self._validated:
            self._validate(write, manifest)
        with self._broker.changing_catalog():
            first = self._broker.catalog.begin_adoption(write.incarnation, write.name) * CHUNKS + 1
        for chunks in _grouped(enumerate(self._chunks(write, manifest), first)):
            self._between_chunks()
            self._produce(write.incarnation, chunks)
        with self._broker.changing_catalog():
            number = SINGLE_WRITE if manifest.single_use else manifest.number
            self._broker.catalog.end_adoption(write.incarnation, write.name, manifest.source, number, manifest.items, manifest.checksum)
        self.adopted_writes[write.incarnation] += 1
        _log.info("a published write of %d items was adopted by queue %r", manifest.items, queue.name, extra=log_fields(queue=queue.name))

    def _between_chunks(self) -> None:
        """Between two chunks: stop if the broker closes, and end the consumer rights that are over."""
        if self._ended.is_set():
            raise BrokerClosed("the broker is being closed; the rest of the write is adopted when it is opened again")
        self._broker.streams.expire_consumer_rights()

    def _validate(self, write: InboxEntry, manifest: WriteManifest) -> None:
        """Check that all items of a write are valid; CorruptLog when not, before any is adopted."""
        for batch in self._chunks(write, manifest):
            self._between_chunks()
            try:
                validate(batch)
            except InvalidRequest as error:
                raise CorruptLog(
                    f"the write {write.label} holds items that no queue takes ({error}); move it away and write it again"
                ) from error
        self._validated.add(write.label)

    def _chunks(self, write: InboxEntry, manifest: WriteManifest) -> Iterator[Batch]:
        """The items of a write, frame by frame; CorruptLog where it is not as it was published."""
        for part in manifest.parts:
            if not part.frames and not part.items:  # it has no file
                continue
            frames, items = 0, 0
            for frame in self._inbox.frames(write, part):
                try:
                    batch = FrameColumns(frame).view()
                except (ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:  # a valid checksum, invalid content
                    raise CorruptLog(
                        f"part {part.name} of {write.label} cannot be understood ({error}); move it away and write it again"
                    ) from error
                yield batch
                frames, items = frames + 1, items + len(batch)
            if (frames, items) != (part.frames, part.items):
                held = f"part {part.name} of {write.label} holds {items} items in {frames} frames"
                raise CorruptLog(f"{held} and should hold {part.items} in {part.frames}; move it away and write it again")

    def _produce(self, incarnation: int, chunks: Sequence[tuple[int, Batch]]) -> None:
        """Store chunks, given with their sequences, in one turn."""

        def request(sequence: int, batch: Batch) -> ProduceRequest:
            name = digest(b"adopted", incarnation.to_bytes(8, "big"), sequence.to_bytes(8, "big"))
            return ProduceRequest(batch, name, sequence=sequence)

        asked = request(*chunks[0])
        asked.following = [request(*chunk) for chunk in chunks[1:]]
        for part in self._broker.run_request(incarnation, asked):
            if part.refused is not None:
                raise part.refused.error()


def _grouped(chunks: Iterable[tuple[int, Batch]]) -> Iterator[list[tuple[int, Batch]]]:
    """Consecutive chunks that are stored in one turn: one sync makes them all durable."""
    group: list[tuple[int, Batch]] = []
    size = 0
    for chunk in chunks:
        group.append(chunk)
        size += chunk[1].size_bytes
        if len(group) >= CHUNKS_AT_ONCE or size >= CHUNK_BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def publish_write(inbox: Inbox, asked: PublishWrite) -> bool:
    """Publish a staged write; False when the same write was published before and still waits."""
    return inbox.publish(asked.write, asked.queue, WriteManifest([*asked.parts], asked.source, asked.number, checksum=asked.checksum))


def write_state(inbox: Inbox, entry_of: Callable[[int], QueueEntry], asked: FindWrite) -> WriteState:
    """The state of a write. The inbox is read before the catalog, which then has a write adopted in between."""
    if inbox.is_pending(asked.queue, asked.source, asked.number):
        return "waiting" if inbox.has_owner() else "unattended"
    return "adopted" if entry_of(asked.queue).adopted.get(asked.source, 0) >= asked.number else "unknown"


def find_imports(inbox: Inbox, entry_of: Callable[[int], QueueEntry], asked: FindImports) -> dict[str, int]:
    """The numbers of the sources with a prefix: adopted ones and those that wait in the inbox, which is read first."""
    waiting = [(manifest.source, manifest.number) for manifest in _waiting_manifests(inbox, asked.queue)]
    found: dict[str, int] = {}
    for source, number in [*waiting, *entry_of(asked.queue).adopted.items()]:
        if source.startswith(asked.prefix):
            found[source] = max(number, found.get(source, 0))
    return found


def find_published(inbox: Inbox, entry_of: Callable[[int], QueueEntry], asked: FindPublished) -> tuple[int, list[WriteContent]]:
    """The highest number of a source, adopted or in the inbox, which is read first; and what its writes held."""
    waiting = [manifest for manifest in _waiting_manifests(inbox, asked.queue) if manifest.source == asked.source]
    queue = entry_of(asked.queue)
    found = {content.number: content for content in queue.contents.get(asked.source, ())}
    for manifest in waiting:
        if manifest.checksum is not None:
            found[manifest.number] = WriteContent(manifest.number, manifest.items, manifest.checksum)
    return max([queue.adopted.get(asked.source, 0), *(manifest.number for manifest in waiting)]), sorted(found.values())


def _report_difference(write: InboxEntry, manifest: WriteManifest, queue: QueueEntry) -> None:
    """Report a write that is dropped, because its number was adopted, if it holds something else than the adopted one.
    Streams compare them before they publish, so this is a writer that did not see the other one."""
    content = WriteContent(manifest.number, manifest.items, manifest.checksum or 0)
    before = next((one for one in queue.contents.get(manifest.source, ()) if one.number == manifest.number), content)
    if manifest.checksum is not None and before != content:
        _log.error(
            "the write %s of %d items is dropped, because number %d of %r was adopted with %d other items; write again what is missing",
            write.label,
            manifest.items,
            manifest.number,
            manifest.source,
            before.items,
            extra=log_fields(queue=queue.name),
        )


def _waiting_manifests(inbox: Inbox, queue: int) -> Iterator[WriteManifest]:
    """The manifests of a queue's writes that wait in the inbox."""
    for entry in inbox.waiting():
        if entry.incarnation == queue:
            try:
                yield inbox.manifest(entry)
            except CorruptLog:
                if entry in inbox.waiting():
                    raise
                # else it was adopted meanwhile


def _checked_inbox(broker: Any, queue: int) -> InboxProcessor:
    """The inbox of a broker; QueueNotFound if the queue is not there."""
    broker.loop(queue)
    inbox: InboxProcessor = broker.inbox
    return inbox


INBOX_HANDLERS: dict[type[Operation[Any]], Callable[[Any, Any], Any]] = {
    PublishWrite: lambda broker, operation: _checked_inbox(broker, operation.queue).publish(operation),
    FindWrite: lambda broker, operation: write_state(broker.store.inbox, broker.entry, operation),
    ImportItems: lambda broker, operation: _checked_inbox(broker, operation.queue).import_items(operation),
    FindImports: lambda broker, operation: find_imports(broker.store.inbox, broker.entry, operation),
    FindPublished: lambda broker, operation: find_published(broker.store.inbox, broker.entry, operation),
}
"""How an embedded broker answers the operations of the inbox."""
