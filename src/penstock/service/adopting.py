"""What others left in the inbox: the owner adopts their drops, each exactly once, and does their errands.

Owns: `Adopter`. One of a broker; it looks into the inbox when the broker is opened and then every few moments, in a thread of its own, and
is a caller like any other: it produces, leases and settles through the queues' turns.
A drop is adopted chunk by chunk. The catalog gives it a number before its first and notes its source after its last; in between each
partition remembers how far it has come (loop/producing.py). So a crash at any point neither loses nor doubles.
"""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from penstock.logs import staging
from penstock.logs.columns import Columns
from penstock.logs.drops import Drops, Waiting
from penstock.logs.failures import storage_failed
from penstock.logs.files import Files
from penstock.loop.requests import Produce, Request
from penstock.rules.catalog import Entry
from penstock.rules.routing import digest
from penstock.words.batch import Batch
from penstock.words.clock import DAY, SECOND, Clock
from penstock.words.errors import BrokerClosed, CorruptLog, PenstockError, QueueNotFound

_log = logging.getLogger("penstock")
IDLE_SECONDS = 0.25
BUSY_SECONDS = 0.01
BUSY_FOR = 10 * SECOND
"""How long after the last drop or errand the next is looked for more often."""
LATER = SECOND // 2
"""When something that could not be done just now is tried again."""
STALE = 7 * DAY
"""A write that began so long ago and was not published never will be."""
CHUNKS = 1 << 32


class Host(Protocol):
    """What a broker is to its adopter."""

    clock: Clock

    def entry(self, incarnation: int) -> Entry: ...
    def adopting(self, incarnation: int, name: str) -> int: ...
    def adopted(self, incarnation: int, name: str, source: str, number: int) -> None: ...
    def call(self, incarnation: int, request: Request) -> object: ...


class Adopter:
    """Looks after the inbox of one broker."""

    def __init__(self, drops: Drops, files: Files, host: Host, run_errand: Callable[[Waiting], None]) -> None:
        self._drops = drops
        self._files = files
        self._host = host
        self._run_errand = run_errand
        self._later: dict[str, int] = {}
        """What could not be done, and when to try again."""
        self._refused: set[str] = set()
        self._busy_until = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look on, every few moments."""
        self._thread = threading.Thread(target=self._watch, name="penstock inbox", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self) -> None:
        """In a forked child: the thread is its parent's."""
        self._thread = None
        self._ended.set()

    def look(self) -> bool:
        """Do what there is to do; whether anything was done."""
        try:
            waiting = self._drops.waiting()
        except OSError as error:
            _log.warning("the inbox cannot be read: %s", error)
            return False
        now = self._host.clock.read().elapsed
        self._later = {file: at for file, at in self._later.items() if any(one.file == file for one in waiting)}
        done = [self._do(one, now) for one in waiting if now >= self._later.get(one.file, 0)]
        return any(done)

    def sweep(self) -> None:
        """Remove what earlier writers left behind."""
        try:
            self._drops.sweep(self._host.clock.read().wall - STALE)
        except OSError as error:
            _log.warning("the inbox cannot be tidied up: %s", error)

    def _watch(self) -> None:
        while not self._ended.wait(BUSY_SECONDS if self._host.clock.read().elapsed < self._busy_until else IDLE_SECONDS):
            try:
                if self.look():
                    self._busy_until = self._host.clock.read().elapsed + BUSY_FOR
            except Exception:  # a mistake of ours must not end the watch
                _log.exception("looking into the inbox went wrong")

    def _do(self, one: Waiting, now: int) -> bool:
        """One drop or errand; whether it is out of the way."""
        if self._ended.is_set() or one.file in self._refused:
            return False
        try:
            if one.is_errand:
                self._run_errand(one)
            else:
                self._adopt(one)
        except BrokerClosed:
            return False
        except (PenstockError, OSError) as error:
            if one.file not in self._later:
                _log.warning("%s cannot be taken from the inbox for now: %s", one.file, error)
            self._later[one.file] = now + LATER
            if isinstance(error, PenstockError) and not error.retryable:
                self._refused.add(one.file)
                _log.error("%s is left in the inbox: %s", one.file, error)
            return False
        return True

    # -- adoption ------------------------------------------------------------------------------------

    def _adopt(self, drop: Waiting) -> None:
        try:
            entry = self._host.entry(drop.incarnation)
        except QueueNotFound:  # deleted since: so is what was meant for it
            self._drops.done(drop)
            return
        manifest = self._drops.manifest(drop)
        if manifest.number > entry.adopted.get(manifest.source, 0):
            first = self._host.adopting(drop.incarnation, drop.name) * CHUNKS
            chunk = 0
            for part in manifest.parts:
                path, items = self._drops.part(drop, part), 0
                for frame in staging.frames(self._files, path, drop.incarnation):
                    chunk += 1
                    batch = Columns(frame).batch()
                    self._produce(drop.incarnation, batch, first + chunk)
                    items += len(batch)
                if items != part.items:
                    raise CorruptLog(f"{path} holds {items} items and should hold {part.items}; move the drop away and write it again")
            self._host.adopted(drop.incarnation, drop.name, manifest.source, manifest.number)
        try:
            self._drops.done(drop)
        except OSError as error:
            raise storage_failed(error, "removing", drop.file) from error

    def _produce(self, incarnation: int, batch: Batch, sequence: int) -> None:
        name = digest(b"adopted", incarnation.to_bytes(8, "big"), sequence.to_bytes(8, "big"))
        by_sequence = batch.dedups is None  # with dedup ids, those and the request id tell what is there already
        placed = self._host.call(incarnation, Produce(batch, name, sequence=sequence if by_sequence else 0))
        assert isinstance(placed, list)
        for one in placed:
            if one.error is not None:
                raise one.error
