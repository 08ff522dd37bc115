"""The catalog at work: which queues there are, over a log of its own.

Owns: `Catalog`, the only place where the catalog's state and its log meet, and `carry_on`, by which it is replayed. The log is that of
incarnation 0, partition 0, which is no queue's: STATE frames hold the records of one change, BASE frames the whole catalog; there are no
items, so every offset is 0.
    create, update, …, adopted, hold             decide, then `run`
    run(records)                                 append, sync, then apply: all of it or nothing
Opening is replay through the same `apply`. After a failed write the log goes back to what is synced and is replayed; nothing is retried.
A change is really synced in every durability mode: the logs of queues come and go by what is said here.
Not thread-safe: the broker holds a lock.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Concatenate, NoReturn, ParamSpec

import msgspec

from penstock.logs import codec
from penstock.logs.log import Draft, Frame, FrameType, Gap, Log
from penstock.rules import catalog
from penstock.rules.catalog import CatalogRecord, CatalogState, QueueEntry
from penstock.rules.options import Options
from penstock.words.clock import Clock
from penstock.words.errors import BrokerClosed, CorruptLog, OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.limits import MIB

INCARNATION, PARTITION = 0, 0
"""Whose log it is."""
SEGMENT_BYTES = 1 * MIB
"""A larger segment is followed by another, which begins with a Base; a large Base makes for larger segments."""
KEPT_SEGMENTS = 2
"""The one before the newest stays, so that a damaged Base does not take every queue with it."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[CatalogRecord])
P = ParamSpec("P")


class Catalog:
    """Every queue of a broker, and the log that tells of them."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self.state = CatalogState()
        self.gaps: list[Gap] = []
        """What a repair found lost: queues may be missing, or be there again."""
        self._log = log
        self._clock = clock
        self._base_bytes = 0
        self._failed = False
        self._closed = False
        try:
            self._open()
        except BaseException:  # the log cannot be opened again while this one holds it; what went wrong first is what is said
            with contextlib.suppress(PenstockError):
                log.close()
            raise

    # -- looking -------------------------------------------------------------------------------------

    @property
    def entries(self) -> list[QueueEntry]:
        """The queues by name."""
        return [entry for _, entry in sorted(self.state.names.items())]

    @property
    def deleted(self) -> list[int]:
        """Incarnations of deleted queues whose files may still be there. (One that is merely unknown may be a queue that damage took.)"""
        return sorted(self.state.deleted)

    def find(self, name: str) -> QueueEntry:
        """The queue of that name."""
        return catalog.entry_by_name(self.state, name)

    def get(self, incarnation: int) -> QueueEntry:
        """The queue of that incarnation."""
        return catalog.entry_by_incarnation(self.state, incarnation)

    @property
    def failed(self) -> bool:
        """Whether it must be reopened before it can be changed: a write failed, or was interrupted."""
        return self._failed

    # -- changing ------------------------------------------------------------------------------------

    def create(
        self,
        name: str,
        options: Options,
        *,
        incarnation: int,
        partitions: int = 1,
        exist_ok: bool = False,
        given: Mapping[str, object] | None = None,
    ) -> QueueEntry:
        """Make a queue; see rules/catalog.py. The answer has another incarnation when the queue was there."""
        self._do(catalog.create, name, options, partitions, incarnation, self._wall(), exist_ok, given)
        return self.find(name)

    def update(self, incarnation: int, changes: Mapping[str, object]) -> QueueEntry:
        """Change options of a queue."""
        self._do(catalog.update, incarnation, changes)
        return self.get(incarnation)

    def reshape(
        self,
        incarnation: int,
        active: Collection[int],
        *,
        read_only: Collection[int],
        marks: Mapping[int, int],
        keep_since: int,
        fixed: Collection[int] = (),
    ) -> QueueEntry:
        """Give a queue other partitions."""
        self._do(catalog.change_partitions, incarnation, active, read_only, marks, self._wall(), keep_since, fixed)
        return self.get(incarnation)

    def delete(self, name: str) -> QueueEntry:
        """End a queue; its files may go from now on."""
        self._usable()
        entry = self.find(name)
        self._do(catalog.delete, name)
        return entry

    def record_removed(self, incarnation: int) -> None:
        """Say that the files of a deleted queue are gone."""
        self._do(catalog.confirm_files_removed, incarnation)

    def begin_adoption(self, incarnation: int, name: str) -> int:
        """Begin to adopt a drop, and give the number that is its own; the same when that was begun before."""
        self._do(catalog.begin_adoption, incarnation, name)
        return self.get(incarnation).adopting[name]

    def end_adoption(self, incarnation: int, name: str, source: str, number: int) -> None:
        """Say that a drop is adopted, all of it."""
        self._do(catalog.finish_adoption, incarnation, name, source, number)

    def set_consumer_right(self, incarnation: int, holder: str, timeout: int) -> None:
        """Give a queue's consumer right to a holder, or ("") to nobody."""
        self._do(catalog.set_consumer_right, incarnation, holder, timeout)

    def run(self, records: Sequence[CatalogRecord]) -> None:
        """Store records and make them true, all or none."""
        self._usable()
        if not records:
            return
        try:
            self._store(records)
        except StorageFailed as error:
            self._fail(error)
        if self._log.segment_bytes > max(SEGMENT_BYTES, 4 * self._base_bytes):
            self._keep_house()

    def _do(self, decide: Callable[Concatenate[CatalogState, P], Sequence[CatalogRecord]], *args: P.args, **kwargs: P.kwargs) -> None:
        self._usable()
        self.run(decide(self.state, *args, **kwargs))

    def _store(self, records: Sequence[CatalogRecord]) -> None:
        now = self._clock.read()
        self._failed = True  # until all is done: an interrupt may come anywhere, and then state and log may differ
        self._log.append([Draft(FrameType.STATE, 0, len(records), 0, now.elapsed, now.wall, [_encoder.encode(records)])])
        self._log.force_sync()
        for record in records:
            catalog.apply(self.state, record)
        self._failed = False

    def _fail(self, error: StorageFailed) -> NoReturn:
        """Go back to what is synced. If even that fails, nobody can say what will be found."""
        try:
            self.reopen()
        except PenstockError as worse:
            what = f"storage failed ({error}) and the catalog was not rolled back ({worse})"
            raise OutcomeUnknown(f"{what}; open the broker again, then look whether the change is there") from worse
        raise error

    def _keep_house(self) -> None:
        """The change is stored and stands even if this fails: the catalog goes on from what is synced, or fails next time."""
        self._failed = True
        try:
            self._rotate()
            self._log.drop(max(0, len(self._log.segments()) - KEPT_SEGMENTS))
            self._failed = False
        except StorageFailed:
            with contextlib.suppress(PenstockError):
                self.reopen()

    def _rotate(self) -> None:
        body = catalog.dump(self.state)
        self._log.rotate(codec.base_draft(body, self._clock.read(), 0))
        self._base_bytes = len(body)

    # -- opening and closing -------------------------------------------------------------------------

    def reopen(self) -> None:
        """After a failure: begin again from what is synced."""
        self._refuse_closed()
        self._failed = True
        self._log.reset()
        self._open()
        self._failed = False

    def close(self) -> None:
        """Let go of the log. Closing twice is fine."""
        self._closed = True
        self._log.close()

    def _open(self) -> None:
        self.state, self.gaps, self._base_bytes = apply_catalog_frames(CatalogState(), self._log.recover())
        if self._log.wants_base or self.gaps:  # what was made of the damage is said once, in a Base
            self._rotate()

    def _usable(self) -> None:
        self._refuse_closed()
        if self._failed:
            raise StorageFailed("the catalog failed before and could not go on; reopen it, then try again")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise BrokerClosed("the catalog is closed; open the broker again")

    def _wall(self) -> int:
        return self._clock.read().wall

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self._failed else "open"
        return f"Catalog({state}, {len(self.state.names)} queues)"


def apply_catalog_frames(state: CatalogState, frames: Iterable[Frame | Gap]) -> tuple[CatalogState, list[Gap], int]:
    """The catalog after more frames, the gaps among them, and the size of the last Base. The state given is not to be used any more."""
    gaps: list[Gap] = []
    base_bytes = 0
    for found in frames:
        if isinstance(found, Gap):
            gaps.append(_mended(found))
        elif found.type is FrameType.BASE:
            state, base_bytes = catalog.load(found.body), len(found.body)
        else:
            for record in _records(found):
                catalog.apply(state, record)
    return state, gaps, base_bytes


def _mended(gap: Gap) -> Gap:
    """The gap, unless it is damage that nobody has looked at: which queues there are is not to be guessed."""
    if not gap.repaired:
        raise CorruptLog(f"the catalog is damaged at {gap.where} ({gap.why}); run verify, then repair")
    return gap


def _records(frame: Frame) -> list[CatalogRecord]:
    try:
        return _decoder.decode(frame.body)
    except msgspec.MsgspecError as error:
        what = f"frame {frame.sequence} of the catalog is whole but cannot be understood ({error})"
        raise CorruptLog(f"{what}; use a newer Penstock") from error
