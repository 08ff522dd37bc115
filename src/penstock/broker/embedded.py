"""A broker inside this process: its catalog, its queues, and the transfers between them.

Owns: `EmbeddedBroker`, the home of queues in a directory or in memory. Each queue is a loop of its own; what concerns several queues (which there
are, their options and widths) is a record in the catalog first and reaches the queues after. Locks are taken in one order: a queue's turn,
then the catalog.
An operation is answered in one of three ways: as a request of its queue's loop (`_request`), as a function run in a turn of it
(queries.py, changes.py), or by the broker itself (`_OWN`).
A forked child cannot use its parent's broker: it is told so.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from penstock.broker import changes, partition_layout, queries, trace
from penstock.broker.inbox import InboxProcessor, write_state
from penstock.broker.streams import StreamCoordinator
from penstock.broker.transfer_router import TransferRouter
from penstock.logs.backends import Files, Target, open_store
from penstock.logs.log import SEGMENT_BYTES, Durability, ReadableLog
from penstock.logs.store import CATALOG, Staging, Store
from penstock.loop.catalog import Catalog
from penstock.loop.loop import Loop
from penstock.loop.partition import Partition
from penstock.loop.partition_set import QueueSetup
from penstock.loop.requests import AwaitRequest, FunctionRequest, LeaseRequest, ProduceRequest, Request, ResizeRequest, SettleRequest
from penstock.loop.runners import Runners
from penstock.loop.transfer import QueueRouter
from penstock.loop.turn import QueueEngine
from penstock.operations import (
    A,
    AnswerCallback,
    AwaitItems,
    Cancel,
    CreateQueue,
    DeleteQueue,
    EndStream,
    ExplainItem,
    FailGranted,
    FindQueue,
    FindWrite,
    LeaseItems,
    ListQueues,
    Operation,
    ProduceItems,
    PublishWrite,
    ReadGrant,
    ReadHistory,
    ReadMetrics,
    ReadSlotMap,
    ReadStats,
    RedriveItems,
    RenewStream,
    ResizeQueue,
    SetReadOnly,
    SettleItems,
    TakeGrant,
    UpdateQueue,
    WriteState,
)
from penstock.reports import BrokerMetrics, ItemEvent, ItemExplanation, QueueDescription, describe_queue
from penstock.rules import catalog, summary
from penstock.rules.catalog import QueueEntry
from penstock.rules.commands import Configure
from penstock.rules.options import Options, merged
from penstock.rules.summary import Summary
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import BrokerClosed, InvalidRequest, OutcomeUnknown, PenstockError, QueueNotFound, StorageFailed
from penstock.words.limits import MAX_PARTITIONS, check_range
from penstock.words.threads import InterruptSafePool

BLOCKING = 8
"""Threads for operations that are submitted and that no turn alone can answer."""
_log = logging.getLogger("penstock")


class EmbeddedBroker:
    """Queues in a directory or in memory."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        threaded: bool = True,
        min_free_bytes: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.store = store
        self.clock = clock or SystemClock()
        self._entropy = entropy
        self._threaded = threaded
        self._min_free_bytes = min_free_bytes
        self._segment_bytes = segment_bytes
        self._changing = threading.Lock()
        self._creating = threading.Lock()
        self._beginning = 0
        self._loops: dict[int, Loop] = {}
        self._runners = Runners(self.clock)
        self._blocking, self._quick = InterruptSafePool(BLOCKING), InterruptSafePool(1)
        self._delivery = TransferRouter(self._loops, self.entry)
        self._closed = self._forked = False
        self.streams: StreamCoordinator = StreamCoordinator(store.inbox, self)
        self.inbox = InboxProcessor(store.inbox, self)
        try:
            self.catalog = Catalog(store.log(CATALOG, CATALOG), self.clock)
            self._sweep()
            self._loops.update({entry.incarnation: self._open_queue(entry) for entry in self.catalog.entries})
            for loop in list(self._loops.values()):
                loop.turn()
                if loop.busy or loop.engine.next_run is not None:
                    loop.wake()
            self.streams.restore_exclusive_consumers()
            self.inbox.open(threaded)
        except BaseException:
            self._closed = True
            self.inbox.stop()
            self._let_go()
            raise
        _brokers.add(self)

    @classmethod
    def open(
        cls,
        target: Target,
        *,
        durability: Durability = "fsync",
        files: Files | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        compression: bool = True,
        clock: Clock | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        threaded: bool = True,
        min_free_bytes: int = 0,
    ) -> "EmbeddedBroker":
        """Open a directory (or several storage roots), or "memory://"."""
        clock = clock or SystemClock()
        store = open_store(target, files, durability, segment_bytes, compression, clock, entropy)
        return cls(store, clock=clock, entropy=entropy, threaded=threaded, min_free_bytes=min_free_bytes, segment_bytes=segment_bytes)

    # -- operations ----------------------------------------------------------------------------------

    def call(self, operation: Operation[A], /) -> A:
        request = self._request(operation)
        if request is None:
            found: A = _OWN[type(operation)](self, operation)
            return found
        answer: A = self.loop(operation.queue).call(request)
        return answer

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        tell = done or partial(_log_failure, operation)
        request = self._request(operation)
        if request is None:
            self._usable()
            pool = self._quick if type(operation) in _QUICK else self._blocking
            pool.submit(lambda: tell(self._outcome(operation)))
            return _nothing
        loop = self.loop(operation.queue)
        untold = [tell]  # a request may say twice that it is answered

        def on_done(answered: Request) -> None:
            if untold:
                untold.pop()(answered.answer if answered.error is None else answered.error)

        request.on_done = on_done
        loop.submit(request)
        return partial(loop.cancel, request)

    def _outcome(self, operation: Operation[Any]) -> Any:
        """The answer, or the error."""
        try:
            return self.call(operation)
        except PenstockError as error:
            return error
        except Exception as error:  # a mistake of ours: whoever waits is told all the same
            _log.exception("%s went wrong", type(operation).__name__)
            return OutcomeUnknown(f"it went wrong ({type(error).__name__}: {error}); please report this")

    def _request(self, operation: Operation[Any]) -> Request | None:
        """The operation as a request of its queue's loop; None for what the broker itself answers."""
        kind = type(operation)
        if kind in _REQUESTS:
            return _REQUESTS[kind](operation, self.clock.read().elapsed)
        if kind in changes.CHANGE_HANDLERS:
            if isinstance(operation, RedriveItems):
                self.loop(operation.to)  # or it is no more
            return FunctionRequest(partial(_changed, operation))
        if kind in queries.QUERY_HANDLERS and not (isinstance(operation, ExplainItem) and operation.follow):
            return FunctionRequest(partial(_queried, operation), needs_all_open=kind is not ReadStats)
        if kind not in _OWN:
            raise InvalidRequest(f"{kind.__name__} cannot be asked of a broker; use a kind of operation of penstock.operations")
        return None

    def run_request(self, incarnation: int, request: Request) -> Any:
        """Put a request of the broker's own to a queue, and wait for its answer."""
        return self.loop(incarnation).call(request)

    def keep(self, queue: int, partition: int, lease: int, /) -> None:
        self.loop(queue).engine.auto_extended_leases[partition, lease] = None

    def let_go(self, queue: int, partition: int, lease: int, /) -> None:
        loop = self._loops.get(queue)
        if loop is not None:
            loop.engine.auto_extended_leases.pop((partition, lease), None)

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        """Everything up to now is published first."""
        self.run_request(queue, FunctionRequest(partial(changes.publish_partitions, partition=partition)))
        return self.store.reader(queue, partition)

    def staging(self) -> Staging:
        return self.store.inbox

    # -- what the broker itself answers --------------------------------------------------------------

    def _find(self, asked: FindQueue) -> QueueDescription:
        self._usable()
        return describe_queue(self._opened(self.catalog.find(asked.name)))

    def _list(self, asked: ListQueues) -> list[QueueDescription]:
        self._usable()
        found = [entry for entry in self.catalog.entries if entry.name.startswith(asked.prefix) and entry.name > asked.after]
        return [describe_queue(entry) for entry in found[: asked.limit]]

    def _slot_map(self, asked: ReadSlotMap) -> bytes:
        self._usable()
        return self.entry(asked.queue).map.pack()

    def _create(self, asked: CreateQueue) -> QueueDescription:
        self._usable()
        chosen = merged(Options(), asked.options)
        name, partitions, exist_ok, given = asked.name, asked.partitions, asked.exist_ok, asked.given
        with self._creating:  # not the catalog: others go on meanwhile
            self._usable()
            incarnation = int.from_bytes(self._entropy(8), "big") or 1
            wall = self.clock.read().wall
            if catalog.create(self.catalog.state, name, chosen, partitions, incarnation, wall, exist_ok, given):
                self.store.create_logs(
                    incarnation, *range(partitions)
                )  # before the record: from then on they are missed when they are not there
            with self.changing_catalog():
                entry = self.catalog.create(name, chosen, incarnation=incarnation, partitions=partitions, exist_ok=exist_ok, given=given)
            if entry.incarnation not in self._loops:
                self._beginning = entry.incarnation
                self._begin(entry)
        return describe_queue(entry)

    def _begin(self, entry: QueueEntry) -> None:
        """Open a new queue, or take it back when its partitions cannot be."""
        loop = self._open_queue(entry)
        broken = next((member for member in loop.engine.handles.values() if member.error is not None), None)
        if broken is not None and broken.error is not None:
            loop.close()
            with self.changing_catalog():
                self.catalog.delete(entry.name)
            self._remove(entry.incarnation)
            raise broken.error
        loop.turn()
        self._loops[entry.incarnation] = loop

    def _opened(self, entry: QueueEntry) -> QueueEntry:
        """A queue that is recorded may be still being opened."""
        if entry.incarnation not in self._loops:
            with self._creating:
                pass
        return entry

    def _update(self, asked: UpdateQueue) -> QueueDescription:
        """New timeouts count for new leases and items, everything else at once."""
        loop = self.loop(asked.queue)
        with self.changing_catalog():
            entry = self.catalog.update(asked.queue, asked.changes)
        loop.call(FunctionRequest(self._configure, recorded_elsewhere=True))
        return describe_queue(entry)

    def _delete(self, asked: DeleteQueue) -> None:
        self._usable()
        found = self.catalog.state.entries.get(asked.queue)
        if found is None:
            raise _gone()
        name, incarnation = found.name, found.incarnation
        catalog.delete(self.catalog.state, name)  # refused while it is in use as a dead queue
        self._opened(found)
        loop = self.loop(incarnation)
        with self._delivery.without_transfers(incarnation, name, self.clock, asked.wait if self._threaded else 0), self.changing_catalog():
            self.catalog.delete(name)
            self._loops.pop(incarnation)
        with suppress(PenstockError):  # it is gone, whatever its last words
            loop.close(QueueNotFound(f"queue {name!r} was deleted"))
        self._remove(incarnation)

    def _resize(self, asked: ResizeQueue) -> QueueDescription:
        check_range("partitions", asked.partitions, 1, MAX_PARTITIONS)
        return self._reshape(asked.queue, lambda entry: partition_layout.resized_layout(entry, asked.partitions))

    def _set_read_only(self, asked: SetReadOnly) -> QueueDescription:
        return self._reshape(asked.queue, lambda entry: partition_layout.layout_with_read_only(entry, asked.partition, asked.read_only))

    def _reshape(self, incarnation: int, choose: Callable[[QueueEntry], partition_layout.PartitionLayout]) -> QueueDescription:
        return describe_queue(
            self.run_request(incarnation, ResizeRequest(lambda turns: self._change_shape(turns, choose), recorded_elsewhere=True))
        )

    def _change_shape(self, turns: QueueEngine, choose: Callable[[QueueEntry], partition_layout.PartitionLayout]) -> QueueEntry:
        """Inside a turn: one record in the catalog, then the new map and its fences."""
        try:
            with self.changing_catalog():
                return partition_layout.record_layout(self.catalog, turns, choose, self.clock.read().wall)
        finally:
            self._reshaped(turns)

    def _reshaped(self, turns: QueueEngine) -> None:
        """What is recorded is so, whatever went wrong in between: looked at in every turn."""
        entry = self.catalog.state.entries.get(turns.incarnation)
        if entry is not None and (entry.map.version != turns.map.version or entry.read_only != turns.read_only):
            partition_layout.apply_layout(turns, entry)

    def _metrics(self, asked: ReadMetrics) -> BrokerMetrics:
        self._usable()
        return BrokerMetrics({loop.engine.name: queries.metrics(loop) for loop in list(self._loops.values())})

    def _explain(self, asked: ExplainItem) -> ItemExplanation:
        return trace.explain(self, asked)

    def _history(self, asked: ReadHistory) -> list[ItemEvent]:
        return trace.history(self, asked, self._name_of)

    def _name_of(self, incarnation: int) -> str | None:
        loop = self._loops.get(incarnation)
        return None if loop is None else loop.engine.name

    def _publish_write(self, asked: PublishWrite) -> bool:
        self.loop(asked.queue)
        return self.inbox.publish(asked)

    def _find_write(self, asked: FindWrite) -> WriteState:
        return write_state(self.store.inbox, self.entry, asked)

    def loops(self) -> Sequence[Loop]:
        """Every queue's loop: for whoever drives them by hand."""
        return [*self._loops.values()]

    # -- opening and closing -------------------------------------------------------------------------

    def _open_queue(self, entry: QueueEntry) -> Loop:
        setup = QueueSetup(
            entry.name,
            entry.incarnation,
            lambda number: self._open_partition(entry.incarnation, number),
            self.clock,
            lambda: self._entropy(1)[0] / 255,
            lambda number: self._summary(entry.incarnation, number),
        )
        turns = QueueEngine(setup, QueueRouter(self._delivery.send_request, self._delivery.slot_map_of))
        turns.apply_recorded_shape = lambda: self._reshaped(turns)
        loop = Loop(turns, self.store.disk, self._runners, threaded=self._threaded)
        partition_layout.apply_layout(turns, entry)
        self._set_options(turns, entry)
        turns.lease_step.set_consumer_right(
            entry.consumer_right_holder, entry.consumer_right_timeout
        )  # whoever has it is given the time to say so again
        return loop

    def _summary(self, incarnation: int, number: int) -> Summary | None:
        """What is known of a partition that is not open; None when it must be opened to know anything."""
        known = self.catalog.state.entries.get(incarnation)
        if known is None or number >= known.next_partition:
            return Summary()
        data = self.store.summary(incarnation, number)
        return None if data is None else summary.load(data)

    def _open_partition(self, incarnation: int, number: int) -> Partition:
        options = self.catalog.get(incarnation).options
        if number >= self.catalog.get(incarnation).next_partition:  # a resize adds it; one that the catalog knows is missed, not made
            self.store.create_logs(incarnation, number)
        log = self.store.log(incarnation, number, create=False, durability=options.durability or None)
        try:
            return Partition(log, self.clock, options.policy, segment_bytes=self._segment_bytes, min_free_bytes=self._min_free_bytes)
        except BaseException:
            log.close()
            raise

    def _set_options(self, turns: QueueEngine, entry: QueueEntry) -> None:
        options = entry.options
        turns.policy = options.policy
        turns.produce_step.max_items, turns.produce_step.max_bytes = options.max_items, options.max_bytes
        dead = self.catalog.state.names.get(options.dead_queue)
        turns.transfer_step.dead = dead.incarnation if dead is not None else 0

    def _configure(self, turns: QueueEngine) -> None:
        """Inside a turn: what the catalog says now."""
        entry = self.catalog.get(turns.incarnation)
        self._set_options(turns, entry)
        for member in turns.usable():
            turns.run(member, Configure(entry.options.policy))
        turns.wants_turn = True

    @contextmanager
    def changing_catalog(self) -> Iterator[None]:
        """While the catalog is changed. When that fails it is read anew, and what it says then is so."""
        stale: Sequence[Loop] = ()
        try:
            with self._changing:
                try:
                    yield
                except BaseException as error:
                    if self.catalog.failed or isinstance(error, StorageFailed | OutcomeUnknown):
                        with suppress(PenstockError):
                            self.catalog.reopen()
                            stale = self._catch_up()
                    raise
        finally:
            for loop in stale:  # not while the catalog is held: a turn may be waiting for it
                with suppress(PenstockError):
                    loop.close()

    def _catch_up(self) -> Sequence[Loop]:
        """Open the queues that the catalog has; gives those that it has no more."""
        for entry in self.catalog.entries:
            if entry.incarnation not in self._loops and entry.incarnation != self._beginning:
                self._loops[entry.incarnation] = loop = self._open_queue(entry)
                loop.wake()
        return [self._loops.pop(one) for one in [*self._loops] if one not in self.catalog.state.entries]

    def _sweep(self) -> None:
        """Files of queues that were deleted just before the end."""
        for incarnation in self.catalog.deleted:
            self._remove(incarnation)

    def _remove(self, incarnation: int) -> None:
        with suppress(PenstockError):  # tried again at the next opening
            self.store.remove_logs(incarnation)
            with self.changing_catalog():
                self.catalog.record_removed(incarnation)

    def close(self) -> None:
        """Answer everyone, make everything durable, let go of the directory."""
        if self._closed or self._forked:
            return
        self.inbox.stop()
        self._closed = True
        with self._creating:  # a queue that is being opened is closed too
            pass
        errors: list[PenstockError] = []
        for loop in list(self._loops.values()):
            try:
                loop.close()
            except PenstockError as error:
                errors.append(error)
        self._let_go()
        if errors:
            raise errors[0]

    def _let_go(self) -> None:
        try:
            self._runners.close()
            self._blocking.close()
            self._quick.close()
        finally:  # an interrupt must not keep the directory from whoever opens it next
            with suppress(PenstockError, AttributeError):
                self.catalog.close()
            self.store.close()

    def detach_after_fork(self) -> None:
        """In a forked child."""
        self._forked = self._closed = True
        self.inbox.abandon()
        for loop in list(self._loops.values()):
            loop.abandon()

    # -- helpers -------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._forked:
            raise BrokerClosed("this broker was opened by the parent process; open one in the child")
        if self._closed:
            raise BrokerClosed("the broker is closed; open it again")

    def entry(self, incarnation: int) -> QueueEntry:
        """What the catalog says of a queue."""
        return self.catalog.get(incarnation)

    def loop(self, incarnation: int) -> Loop:
        self._usable()
        loop = self._loops.get(incarnation)
        if loop is None:
            raise _gone()
        return loop


def _gone() -> QueueNotFound:
    return QueueNotFound("the queue was deleted (perhaps created anew since); ask the broker for it by name")


def _nothing() -> None:
    """What cannot be cancelled runs to its end."""


def _log_failure(operation: Operation[Any], answer: Any) -> None:
    if isinstance(answer, PenstockError):
        _log.warning("%s failed: %s", type(operation).__name__, answer)


# -- operations as requests --------------------------------------------------------------------------


def _produce(asked: ProduceItems, now: int) -> ProduceRequest:
    return ProduceRequest(asked.batch, asked.request, now + asked.wait)


def _lease(asked: LeaseItems, now: int) -> LeaseRequest:
    deadline = now + asked.wait if asked.wait else 0
    return LeaseRequest(asked.count, asked.consumer, asked.timeout, asked.per_key, asked.request, deadline)


def _settle(asked: SettleItems, now: int) -> SettleRequest:
    return SettleRequest(
        asked.action,
        asked.parts,
        delay=asked.delay,
        reason=asked.reason,
        counted=asked.counted,
        timeout=asked.timeout,
        then=asked.then,
        request=asked.request,
        deadline=now + asked.wait,
    )


def _await(asked: AwaitItems, now: int) -> AwaitRequest:
    return AwaitRequest(asked.start, now + asked.wait)


def _changed(operation: Operation[Any], turns: QueueEngine) -> Any:
    return changes.CHANGE_HANDLERS[type(operation)](turns, operation)


def _queried(operation: Operation[Any], turns: QueueEngine) -> Any:
    return queries.QUERY_HANDLERS[type(operation)](turns, operation)


_REQUESTS: dict[type[Operation[Any]], Callable[[Any, int], Request]] = {
    ProduceItems: _produce,
    LeaseItems: _lease,
    SettleItems: _settle,
    AwaitItems: _await,
}
_QUICK = {FindQueue, ListQueues, ReadSlotMap, ReadMetrics}
"""Answered from memory: those who submit them do not wait behind others who wait for a disk."""
_OWN: dict[type[Operation[Any]], Callable[[EmbeddedBroker, Any], Any]] = {
    FindQueue: EmbeddedBroker._find,
    ListQueues: EmbeddedBroker._list,
    ReadSlotMap: EmbeddedBroker._slot_map,
    CreateQueue: EmbeddedBroker._create,
    UpdateQueue: EmbeddedBroker._update,
    DeleteQueue: EmbeddedBroker._delete,
    ResizeQueue: EmbeddedBroker._resize,
    SetReadOnly: EmbeddedBroker._set_read_only,
    ReadMetrics: EmbeddedBroker._metrics,
    ExplainItem: EmbeddedBroker._explain,
    ReadHistory: EmbeddedBroker._history,
    PublishWrite: EmbeddedBroker._publish_write,
    FindWrite: EmbeddedBroker._find_write,
    TakeGrant: lambda broker, asked: broker.streams.take(asked),
    RenewStream: lambda broker, asked: broker.streams.renew(asked),
    EndStream: lambda broker, asked: broker.streams.end(asked),
    ReadGrant: lambda broker, asked: broker.streams.grant(asked),
    FailGranted: lambda broker, asked: broker.streams.fail(asked),
}

_brokers: "weakref.WeakSet[EmbeddedBroker]" = weakref.WeakSet()


def _after_fork() -> None:
    for broker in list(_brokers):
        with suppress(BaseException):  # nobody could be told of it, and the others must be let go of all the same
            broker.detach_after_fork()


os.register_at_fork(after_in_child=_after_fork)
