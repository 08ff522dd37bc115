"""The owner's side of the inbox: drops are adopted, each exactly once, and operations that others left there are done.

Owns: `InboxProcessor`. One of a broker; it looks into the inbox when the broker is opened and then every few moments, in a thread of its own,
and is a caller like any other: it produces through the queues' turns and asks the broker by operations.
An errand is an operation as bytes. One that asks for an answer gets one, as a note of its name, whatever comes of it; one that could not
be done for now stays and is tried again, so each of them may be done twice.
A drop is looked through before anything of it is taken: one that is damaged is left where it is, whole.
It is adopted chunk by chunk. The catalog gives it a number before its first and notes its source after its last; in between each
partition remembers how far it has come (loop/produce.py). So a crash at any point neither loses nor doubles. That rests on order: a
queue's drops are adopted one after the other, those of a source by their numbers, and none is begun while another is not finished.
Errands do not wait for drops: they are done between the chunks of one, for a stream that gets no answer loses its right.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

import msgspec

from penstock import operations
from penstock.broker.streams import StreamCoordinator, StreamOwner
from penstock.logs.columns import FrameColumns
from penstock.logs.store import Inbox, InboxEntry, WriteManifest
from penstock.loop.requests import ProduceRequest
from penstock.operations import FindWrite, Operation, PublishWrite, WriteState
from penstock.rules.catalog import SINGLE_WRITE, QueueEntry
from penstock.rules.routing import digest
from penstock.words.batch import Batch, validate
from penstock.words.clock import DAY, SECOND
from penstock.words.errors import (
    BrokerClosed,
    CorruptLog,
    InvalidRequest,
    OutcomeUnknown,
    PenstockError,
    QueueBusy,
    QueueHeld,
    QueueNotFound,
    Refused,
)
from penstock.words.threads import InterruptSafeThread

_log = logging.getLogger("penstock")
IDLE_SECONDS = 0.25
BUSY_SECONDS = 0.01
OPENING = 2 * SECOND
"""For so long an opening takes in what waits in the inbox; the rest comes while the broker is at work."""
ERRANDS_EVERY = SECOND // 20
"""How often errands are looked for while a drop is adopted."""
BUSY_FOR = 10 * SECOND
"""How long after the last drop or errand the next is looked for more often."""
LATER = SECOND // 2
"""When something that could not be done just now is tried again."""
STALE = 7 * DAY
"""A write that began so long ago and was not published never will be."""
SWEEP_EVERY = DAY
CHUNKS = 1 << 32


class RemoteOperation(msgspec.Struct):
    """An operation for the owner of a broker, from a process that does not own it."""

    operation: msgspec.Raw
    answer: bool = True
    """Whether somebody waits for the answer."""


class RemoteAnswer(msgspec.Struct):
    """What came of an errand: the answer, as bytes of its type, or why it was refused."""

    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    refused: Refused | None = None


class TimeLimitReached(Exception):
    """The time that was given is over; the rest is done at the next look."""


class OwningBroker(StreamOwner, Protocol):
    """What the keeper needs of its broker."""

    streams: StreamCoordinator


class InboxProcessor:
    """Looks after the inbox of one broker."""

    def __init__(self, inbox: Inbox, broker: OwningBroker) -> None:
        self._inbox = inbox
        self._broker = broker
        self._clock = broker.clock
        self._later: dict[str, int] = {}
        """What could not be done, and when to try again."""
        self._refused: set[str] = set()
        """What never can be done: left for somebody to look at."""
        self._manifests: dict[str, WriteManifest] = {}
        self._whole: set[str] = set()
        """Drops that were looked through."""
        self._busy_until = 0
        self._looked_at = 0
        """When errands were last looked for."""
        self._sweep_at = 0
        self._look_until: int | None = None
        self._ended = threading.Event()
        self._threaded = False
        self._thread: InterruptSafeThread | None = None

    # -- writes --------------------------------------------------------------------------------------

    def publish(self, asked: PublishWrite) -> bool:
        """Let a staged write become a drop."""
        published = publish_write(self._inbox, asked)
        self._start()
        return published

    # -- looking in ----------------------------------------------------------------------------------

    def open(self, threaded: bool) -> None:
        """Take in what is there, if it is not too much; then, if threads may be begun, look on."""
        self.sweep()
        self.process(OPENING if threaded else 0)
        self._threaded = threaded
        if self._inbox.shared:
            self._start()

    def _start(self) -> None:
        """Look on, if threads may be begun. Where nobody else reaches the inbox, not before something was put into it."""
        if self._threaded and self._thread is None and not self._ended.is_set():
            self._thread = InterruptSafeThread(self._watch)

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: the thread is its parent's, and may have held the event's lock."""
        self._thread = None
        self._ended = threading.Event()
        self._ended.set()

    def process(self, most: int = 0) -> bool:
        """Do what there is to do, for so long at most (0: until it is done); whether anything was done."""
        now = self._clock.read().elapsed
        self._look_until = now + most if most else None
        if now >= self._sweep_at:
            self.sweep()
        waiting = self._waiting()
        self._forget_all_but({one.label for one in waiting})
        done = [self._do_errands(waiting)]
        drops = sorted((one for one in waiting if not one.is_operation), key=lambda one: one.incarnation)
        for _, of_queue in groupby(drops, lambda one: one.incarnation):
            done.append(self._adopt_all([*of_queue]))
        return any(done)

    def _waiting(self) -> list[InboxEntry]:
        self._looked_at = self._clock.read().elapsed
        try:
            return self._inbox.waiting()
        except PenstockError as error:
            _log.warning("the inbox cannot be read: %s", error)
            return []

    def _do_errands(self, waiting: Sequence[InboxEntry]) -> bool:
        self._broker.streams.expire_exclusive_consumers()
        done = False
        for one in waiting:
            if one.is_operation and not self._time_is_over():
                done = self._do(one, self._do_errand) or done
        return done

    def _time_is_over(self) -> bool:
        return self._look_until is not None and self._clock.read().elapsed >= self._look_until

    def _do_errand(self, waiting: InboxEntry) -> None:
        """Do one errand, answer it, and take it out of the inbox."""
        raw = self._inbox.operation(waiting)
        if raw is None:
            return
        wants_answer = True
        try:
            errand = _understood(raw)
            wants_answer = errand.answer
            operation = operations.decode(bytes(errand.operation))
            if operation.queue != waiting.incarnation:
                raise InvalidRequest("the errand is about another queue than its name says; use the same Penstock on both sides")
            if operation.queue:
                self._broker.entry(operation.queue)  # or it was deleted
            reply = RemoteAnswer(msgspec.Raw(msgspec.msgpack.encode(self._broker.call(_left_alone(operation, waiting.name)))))
        except PenstockError as error:
            known = isinstance(error, QueueHeld) or (wants_answer and isinstance(error, OutcomeUnknown))
            if error.retryable and not known:
                raise
            reply = RemoteAnswer(refused=Refused.of(error))
        except Exception as error:  # a mistake of ours: whoever waits is told
            _log.exception("doing %s went wrong", waiting.label)
            reply = RemoteAnswer(refused=Refused.of(OutcomeUnknown(f"it went wrong ({type(error).__name__}: {error}); please report this")))
        if reply.refused is not None and not wants_answer:
            _log.warning("%s was refused, and nobody waits to be told: %s", waiting.label, reply.refused.message)
        if wants_answer:
            self._inbox.put_blob(waiting.incarnation, waiting.name, msgspec.msgpack.encode(reply))
        self._inbox.remove(waiting, raw)

    @property
    def _queues(self) -> dict[int, QueueEntry]:
        return self._broker.catalog.state.entries

    def _forget_all_but(self, labels: set[str]) -> None:
        """Of what is not in the inbox any more nothing is kept in mind: it may come again, mended."""
        self._refused &= labels
        self._whole &= labels
        self._later = {label: at for label, at in self._later.items() if label in labels}
        self._manifests = {label: found for label, found in self._manifests.items() if label in labels}

    def sweep(self) -> None:
        """Remove what others left behind: when the broker is opened, and then every day."""
        now = self._clock.read()
        self._sweep_at = now.elapsed + SWEEP_EVERY
        try:
            self._inbox.sweep(now.wall - STALE, {0, *self._queues})
        except PenstockError as error:
            _log.warning("the inbox cannot be tidied up: %s", error)

    def _watch(self) -> None:
        while not self._ended.wait(BUSY_SECONDS if self._clock.read().elapsed < self._busy_until else IDLE_SECONDS):
            try:
                if self.process():
                    self._busy_until = self._clock.read().elapsed + BUSY_FOR
            except Exception:  # a mistake of ours must not end the watch
                _log.exception("looking into the inbox went wrong")

    def _do(self, one: InboxEntry, step: Callable[[InboxEntry], None]) -> bool:
        """A step with a drop or an errand; whether it could be done."""
        now = self._clock.read().elapsed
        if self._ended.is_set() or one.label in self._refused or now < self._later.get(one.label, 0):
            return False
        try:
            step(one)
            return True
        except (BrokerClosed, TimeLimitReached):
            return False
        except PenstockError as error:
            if not error.retryable:
                self._refuse(one, "%s is left in the inbox: %s", one.label, error)
            elif one.label not in self._later:
                _log.warning("%s cannot be taken from the inbox for now: %s", one.label, error)
            self._later[one.label] = now + LATER
        except Exception as error:  # a mistake of ours must not keep the others waiting, nor the broker from being opened
            self._refuse(one, "%s is left in the inbox: it went wrong (%r); please report this", one.label, error, exc_info=error)
        return False

    def _refuse(self, one: InboxEntry, text: str, *args: object, exc_info: Exception | None = None) -> None:
        self._refused.add(one.label)
        _log.error(text, *args, exc_info=exc_info)

    # -- adoption ------------------------------------------------------------------------------------

    def _adopt_all(self, drops: Sequence[InboxEntry]) -> bool:
        """The drops of one queue, in their order; whether any was adopted. What must wait lets no other overtake it."""
        if drops[0].incarnation not in self._queues:
            removed = [self._do(drop, self._adopt) for drop in drops]
            return any(removed)
        for drop in drops:
            known = drop.label in self._manifests or self._do(drop, self._read_manifest)
            if not known and drop.label not in self._refused:
                return False  # it may be the first
        adopted, held_up = False, set()
        for drop in self._in_order([drop for drop in drops if drop.label in self._manifests]):
            source = self._manifests[drop.label].source
            if source in held_up:
                continue
            if self._do(drop, self._adopt):
                adopted = True
            elif drop.label not in self._refused or self._begun(drop):
                break
            else:
                held_up.add(source)  # once a later one is in, it never can be: somebody must decide
        return adopted

    def _in_order(self, drops: Sequence[InboxEntry]) -> list[InboxEntry]:
        """One that was begun first; then as they were written, but those of a source by number."""
        manifests = self._manifests
        by_number: dict[str, list[InboxEntry]] = {}
        for drop in sorted(drops, key=lambda drop: (not self._begun(drop), manifests[drop.label].number), reverse=True):
            by_number.setdefault(manifests[drop.label].source, []).append(drop)
        by_age = sorted(drops, key=lambda drop: (not self._begun(drop), manifests[drop.label].began_at, drop.label))
        return [by_number[manifests[drop.label].source].pop() for drop in by_age]

    def _read_manifest(self, drop: InboxEntry) -> None:
        self._manifests[drop.label] = self._inbox.manifest(drop)

    def _begun(self, drop: InboxEntry) -> bool:
        """Whether it is the one that is to be finished before any other."""
        try:
            return self._broker.entry(drop.incarnation).unfinished == drop.name
        except QueueNotFound:
            return False

    def _adopt(self, drop: InboxEntry) -> None:
        try:
            self._take_in(drop)
        except QueueNotFound:
            if drop.incarnation in self._queues:  # it is still being opened
                raise QueueBusy(f"the queue of {drop.label} is not open yet; try again in a moment") from None
            _log.warning("the queue that %s was written for is deleted, so it is removed", drop.label)
        self._inbox.remove(drop)

    def _take_in(self, drop: InboxEntry) -> None:
        entry = self._broker.entry(drop.incarnation)
        manifest = self._manifests[drop.label]
        if manifest.number <= entry.adopted.get(manifest.source, 0):
            return
        if drop.name in entry.adopting and not self._begun(drop):  # it was moved away, and has come back
            raise CorruptLog(
                f"a part of the drop {drop.label} was adopted, and other drops since, so nobody can say which part; "
                "move it away and write again what is missing"
            )
        if drop.label not in self._whole:
            self._look_through(drop, manifest)
        with self._broker.changing_catalog():
            first = self._broker.catalog.begin_adoption(drop.incarnation, drop.name) * CHUNKS + 1
        for sequence, batch in enumerate(self._chunks(drop, manifest), first):
            self._between_chunks()
            self._produce(drop.incarnation, batch, sequence)
        with self._broker.changing_catalog():
            self._broker.catalog.end_adoption(
                drop.incarnation, drop.name, manifest.source, SINGLE_WRITE if manifest.single_use else manifest.number
            )

    def _between_chunks(self) -> None:
        """Between two chunks: is it time for something else?"""
        if self._ended.is_set():
            raise BrokerClosed("the broker is being closed; the rest of the drop is adopted when it is opened again")
        if self._time_is_over():
            raise TimeLimitReached
        if self._clock.read().elapsed >= self._looked_at + ERRANDS_EVERY:
            self._do_errands(self._waiting())

    def _look_through(self, drop: InboxEntry, manifest: WriteManifest) -> None:
        """All of it can be taken, or nothing is."""
        for batch in self._chunks(drop, manifest):
            self._between_chunks()
            try:
                validate(batch)
            except InvalidRequest as error:
                raise CorruptLog(f"the drop {drop.label} holds what no queue takes ({error}); move it away and write it again") from error
        self._whole.add(drop.label)

    def _chunks(self, drop: InboxEntry, manifest: WriteManifest) -> Iterator[Batch]:
        """Every frame of a drop; CorruptLog as soon as it shows not to be what was published."""
        for part in manifest.parts:
            if not part.frames and not part.items:  # of which no file was made
                continue
            frames, items = 0, 0
            for frame in self._inbox.frames(drop, part):
                try:
                    batch = FrameColumns(frame).batch()
                except (ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:  # whole, but not made as a frame is
                    raise CorruptLog(
                        f"part {part.name} of {drop.label} cannot be understood ({error}); move the drop away and write it again"
                    ) from error
                yield batch
                frames, items = frames + 1, items + len(batch)
            if (frames, items) != (part.frames, part.items):
                what = (
                    f"part {part.name} of {drop.label} holds {items} items in {frames} frames and should hold {part.items} in {part.frames}"
                )
                raise CorruptLog(f"{what}; move the drop away and write it again")

    def _produce(self, incarnation: int, batch: Batch, sequence: int) -> None:
        name = digest(b"adopted", incarnation.to_bytes(8, "big"), sequence.to_bytes(8, "big"))
        for one in self._broker.run_request(incarnation, ProduceRequest(batch, name, sequence=sequence)):
            if one.refused is not None:
                raise one.refused.error()


def publish_write(inbox: Inbox, asked: PublishWrite) -> bool:
    """Let a staged write become a drop."""
    return inbox.publish(asked.write, asked.queue, WriteManifest([*asked.parts], asked.source, asked.number))


def write_state(inbox: Inbox, entry_of: Callable[[int], QueueEntry], asked: FindWrite) -> WriteState:
    """What became of a write. The inbox is asked first: what waits there no more is in the catalog by then."""
    if inbox.is_pending(asked.queue, asked.source, asked.number):
        return "waiting" if inbox.has_owner() else "unattended"
    return "adopted" if entry_of(asked.queue).adopted.get(asked.source, 0) >= asked.number else "unknown"


def _left_alone(operation: Operation[Any], name: str) -> Operation[Any]:
    """An errand as it is done: it does not wait, for others would wait with it; and done twice, after a crash, it adds nothing twice."""
    if hasattr(operation, "wait"):
        operation.wait = 0
    if getattr(operation, "request", name) is None:
        operation.request = digest(b"errand", operation.queue.to_bytes(8, "big"), name.encode())  # type: ignore[attr-defined]
    return operation


def _understood(raw: bytes) -> RemoteOperation:
    try:
        return msgspec.msgpack.decode(raw, type=RemoteOperation)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the errand cannot be understood ({error}); use the same Penstock on both sides") from error
