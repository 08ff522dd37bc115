"""The catalog of a broker's queues and its log.

Owns: `Catalog`, the only module that changes the catalog's state and its log together, and `apply_catalog_frames`,
which replays it. The log is that of incarnation 0, partition 0, which no queue has. STATE frames hold the records of
one change, BASE frames the whole catalog; there are no items, so every offset is 0.
    create, update, …, set_consumer_right   decide, then `run`
    run(records)                            append, sync, then apply: all records or none
Opening replays the log with the same `apply`. After a failed write the log is reset to what is synced and replayed; a
write is never repeated. A change is synced to the disk in every durability mode: logs of queues are made and deleted by
it. Not thread-safe: the broker holds a lock.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Concatenate, NoReturn, ParamSpec

import msgspec

from penstock.logs import codec
from penstock.logs.log import Draft, Frame, FrameType, Gap, Log
from penstock.rules import catalog
from penstock.rules.catalog import CallRecorded, CatalogRecord, CatalogState, QueueEntry
from penstock.rules.commands import Call
from penstock.rules.options import Options
from penstock.words.clock import Clock
from penstock.words.errors import BrokerClosed, CorruptLog, OutcomeUnknown, PenstockError, StorageFailed
from penstock.words.limits import MIB

INCARNATION, PARTITION = 0, 0
"""The incarnation and partition of the catalog's log."""
SEGMENT_BYTES = 1 * MIB
"""After so many bytes a new segment begins, with a Base; a large Base makes larger segments."""
KEPT_SEGMENTS = 2
"""The segment before the newest is kept, so that damage to one Base does not lose every queue."""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[CatalogRecord])
P = ParamSpec("P")


class Catalog:
    """The queues of a broker, and their log."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self.state = CatalogState()
        self.gaps: list[Gap] = []
        """Repaired damage: queues may be missing, and deleted ones may exist again."""
        self._log = log
        self._clock = clock
        self._base_bytes = 0
        self._failed = False
        self._closed = False
        try:
            self._open()
        except BaseException:  # the first error is the one to report
            with contextlib.suppress(PenstockError):
                log.close()
            raise

    # -- reading -------------------------------------------------------------------------------------

    @property
    def entries(self) -> list[QueueEntry]:
        """The queues by name."""
        return [entry for _, entry in sorted(self.state.names.items())]

    @property
    def deleted(self) -> list[int]:
        """Incarnations of deleted queues whose files may remain; an unknown one may be a queue lost to damage."""
        return sorted(self.state.deleted)

    def find(self, name: str) -> QueueEntry:
        """The queue of a name; QueueNotFound."""
        return catalog.entry_by_name(self.state, name)

    def get(self, incarnation: int) -> QueueEntry:
        """The queue of an incarnation; QueueNotFound."""
        return catalog.entry_by_incarnation(self.state, incarnation)

    @property
    def failed(self) -> bool:
        """Whether it must be reopened before a change, because a write failed or was interrupted."""
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
        call: Call | None = None,
    ) -> QueueEntry:
        """Create a queue (see rules/catalog.py). Gives an existing queue with its own incarnation."""
        self._do_once(call, incarnation, catalog.create, name, options, partitions, incarnation, self._wall(), exist_ok, given)
        return self.find(name)

    def update(self, incarnation: int, changes: Mapping[str, object], call: Call | None = None) -> QueueEntry:
        self._do_once(call, incarnation, catalog.update, incarnation, changes)
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
        call: Call | None = None,
    ) -> QueueEntry:
        """Change the partitions of a queue."""
        wall = self._wall()
        self._do_once(call, incarnation, catalog.change_partitions, incarnation, active, read_only, marks, wall, keep_since, fixed)
        return self.get(incarnation)

    def delete(self, name: str, call: Call | None = None) -> QueueEntry:
        """Delete a queue; its files may be removed from now on."""
        self._check_usable()
        entry = self.find(name)
        self._do_once(call, entry.incarnation, catalog.delete, name)
        return entry

    def changed_by(self, call: Call | None) -> int | None:
        """The incarnation of the queue that a call changed when it was sent before; None: it changed nothing.

        OutcomeUnknown for a repetition that may be forgotten.
        """
        if call is None:
            return None
        wall = self._wall()
        answers = self.state.calls.answers([call.name()], wall)
        if answers is None and call.again:
            self.state.calls.check_not_evicted(wall - call.age, wall)
        return None if answers is None else answers[0].base

    def record_removed(self, incarnation: int) -> None:
        """Record that the files of a deleted queue are removed."""
        self._do(catalog.confirm_files_removed, incarnation)

    def begin_adoption(self, incarnation: int, name: str) -> int:
        """Record that the adoption of a published write begins. Gives its number, the same when it was begun before."""
        self._do(catalog.begin_adoption, incarnation, name)
        return self.get(incarnation).adopting[name]

    def end_adoption(self, incarnation: int, name: str, source: str, number: int, items: int = 0, checksum: int | None = None) -> None:
        """Record that a published write is adopted, and what it held."""
        self._do(catalog.finish_adoption, incarnation, name, source, number, items, checksum)

    def set_consumer_right(self, incarnation: int, holder: str, timeout: int, runs: Sequence[str] = ()) -> None:
        """Record the holder of a queue's consumer right and its runs; "" is none."""
        self._do(catalog.set_consumer_right, incarnation, holder, timeout, runs)

    def run(self, records: Sequence[CatalogRecord]) -> None:
        """Store and apply records, all or none."""
        self._check_usable()
        if not records:
            return
        try:
            self._store(records)
        except StorageFailed as error:
            self._fail(error)
        if self._log.segment_bytes > max(SEGMENT_BYTES, 4 * self._base_bytes):
            self._maintain()

    def _do(self, decide: Callable[Concatenate[CatalogState, P], Sequence[CatalogRecord]], *args: P.args, **kwargs: P.kwargs) -> None:
        self._check_usable()
        self.run(decide(self.state, *args, **kwargs))

    def _do_once(
        self,
        call: Call | None,
        incarnation: int,
        decide: Callable[Concatenate[CatalogState, P], Sequence[CatalogRecord]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Decide and store a change of a queue and the call that made it, unless the call has made it before."""
        self._check_usable()
        if self.changed_by(call) is not None:
            return
        records = decide(self.state, *args, **kwargs)
        if call is not None and records:
            records = [*records, CallRecorded(call.name(), incarnation, self._wall())]
        self.run(records)

    def _store(self, records: Sequence[CatalogRecord]) -> None:
        now = self._clock.read()
        self._failed = True  # until the end: after an interrupt the state and the log may differ
        self._log.append([Draft(FrameType.STATE, 0, len(records), 0, now.elapsed, now.wall, [_encoder.encode(records)])])
        self._log.force_sync()
        for record in records:
            catalog.apply(self.state, record)
        self._failed = False

    def _fail(self, error: StorageFailed) -> NoReturn:
        """Reopen from what is synced and raise the error; OutcomeUnknown when reopening fails."""
        try:
            self.reopen()
        except PenstockError as worse:
            what = f"storage failed ({error}) and the catalog was not rolled back ({worse})"
            raise OutcomeUnknown(f"{what}; open the broker again, then check whether the change was made") from worse
        raise error

    def _maintain(self) -> None:
        """Begin a new segment and delete old ones. A failure does not fail the change: the catalog is reopened."""
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
        """After a failure: replay what is synced."""
        self._check_open()
        self._failed = True
        self._log.reset()
        self._open()
        self._failed = False

    def close(self) -> None:
        """Close the log; may be called twice."""
        self._closed = True
        self._log.close()

    def _open(self) -> None:
        self.state, self.gaps, self._base_bytes = apply_catalog_frames(CatalogState(), self._log.recover())
        if self._log.wants_base or self.gaps:  # a Base records the state after damage
            self._rotate()

    def _check_usable(self) -> None:
        self._check_open()
        if self._failed:
            raise StorageFailed("the catalog failed before; reopen it, then try again")

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosed("the catalog is closed; open the broker again")

    def _wall(self) -> int:
        return self._clock.read().wall

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self._failed else "open"
        return f"Catalog({state}, {len(self.state.names)} queues)"


def apply_catalog_frames(state: CatalogState, frames: Iterable[Frame | Gap]) -> tuple[CatalogState, list[Gap], int]:
    """The catalog after more frames, the gaps, and the size of the last Base. Do not use the given state again."""
    gaps: list[Gap] = []
    base_bytes = 0
    for found in frames:
        if isinstance(found, Gap):
            gaps.append(_check_repaired(found))
        elif found.type is FrameType.BASE:
            state, base_bytes = catalog.load(found.body), len(found.body)
        else:
            for record in _records(found):
                catalog.apply(state, record)
    return state, gaps, base_bytes


def _check_repaired(gap: Gap) -> Gap:
    """The gap; CorruptLog when it is not repaired, because queues may be missing."""
    if not gap.repaired:
        raise CorruptLog(f"the catalog is damaged at {gap.where} ({gap.why}); run verify, then repair")
    return gap


def _records(frame: Frame) -> list[CatalogRecord]:
    try:
        return _decoder.decode(frame.body)
    except msgspec.MsgspecError as error:
        what = f"frame {frame.sequence} of the catalog is whole but cannot be understood ({error})"
        raise CorruptLog(f"{what}; use a newer Penstock") from error
