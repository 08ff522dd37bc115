"""A broker inside this process: its catalog, its queues, and the transfers between them.

Owns: `EmbeddedBroker`, the home that owns a directory, or queues in memory. Each queue has its own loop. Which queues
exist, their options and their partitions are written to the catalog first and applied to the queues afterwards.
Locks are taken in one order: a queue's turn, then the catalog.
An operation is answered in one of three ways: as a request of its queue's loop (`_request`), as a function that runs in
a turn of the queue (queries.py, changes.py), or by the broker itself (`_BROKER_HANDLERS`).
A forked child cannot use its parent's broker: every call raises BrokerClosed.
"""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

from penstock.broker import changes, partition_layout, queries, trace
from penstock.broker.backup_point import cut_logs
from penstock.broker.inbox import INBOX_HANDLERS, InboxProcessor
from penstock.broker.metrics import read_metrics
from penstock.broker.queue_settings import QueueSettings
from penstock.broker.streams import StreamCoordinator, read_grant
from penstock.broker.transfer_router import TransferRouter
from penstock.logs.backends import Files, Target, open_store
from penstock.logs.log import SEGMENT_BYTES, Durability, ReadableLog
from penstock.logs.store import CATALOG, Staging, Store
from penstock.loop.catalog import Catalog
from penstock.loop.loop import Loop
from penstock.loop.partition import Partition
from penstock.loop.partition_set import QueueSetup
from penstock.loop.requests import AwaitRequest, FunctionRequest, LeaseRequest, ProduceRequest, Request, SettleRequest
from penstock.loop.restored_partition import keep_apart
from penstock.loop.runners import Runners
from penstock.loop.transfer import QueueRouter
from penstock.loop.turn import QueueEngine
from penstock.operations import (
    A,
    AnswerCallback,
    AwaitItems,
    Cancel,
    CreateQueue,
    CutLogs,
    DeleteQueue,
    DescribeOwner,
    EndStream,
    EnsureQueue,
    ExplainItem,
    FailGranted,
    FindQueue,
    LeaseItems,
    ListQueues,
    Operation,
    ProduceItems,
    PublishLog,
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
)
from penstock.reports import ClientDescription, ItemEvent, OwnerDescription, QueueDescription, describe_queue
from penstock.rules import catalog, summary
from penstock.rules.catalog import QueueEntry
from penstock.rules.commands import Configure
from penstock.rules.options import Options, merged
from penstock.rules.summary import Summary
from penstock.words.clock import Clock, SystemClock
from penstock.words.errors import BrokerClosed, InvalidRequest, OutcomeUnknown, PenstockError, QueueNotFound, StorageFailed, caused_by_bug
from penstock.words.logs import log_fields
from penstock.words.threads import InterruptSafePool

BROKER_THREADS = 8
"""Threads for submitted operations that the broker itself answers."""
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
        self.min_free_bytes = min_free_bytes
        self._segment_bytes = segment_bytes
        self._catalog_lock = threading.Lock()
        self._creation_lock = threading.Lock()
        self._closing = threading.RLock()
        self._being_created = 0  # the incarnation of the newest queue that `_create` opens
        self._loops: dict[int, Loop] = {}
        self._runners = Runners(self.clock)
        self._broker_pool, self._quick_pool = InterruptSafePool(BROKER_THREADS), InterruptSafePool(1)
        self._router = TransferRouter(self._loops, self.entry, lambda: self.catalog.state)
        self._closed = self._forked = False
        self.opened_at = self.clock.read().wall
        self.list_clients: Callable[[], list[ClientDescription]] = list
        """Gives the processes that use this broker through its socket. Set by whoever serves them."""
        self.streams: StreamCoordinator = StreamCoordinator(store.inbox, self)
        self.inbox = InboxProcessor(store.inbox, self)
        self.settings: QueueSettings = QueueSettings(self)
        try:
            self.catalog: Catalog = Catalog(store.log(CATALOG, CATALOG), self.clock)
            self._remove_deleted()
            self._loops.update({entry.incarnation: self._open_queue(entry) for entry in self.catalog.entries})
            for loop in list(self._loops.values()):
                loop.turn()
                if loop.busy or loop.engine.next_run is not None:
                    loop.wake()
            self.streams.restore_consumer_rights()
            self.inbox.open(threaded)
            store.note_opened()
        except BaseException:
            self._closed = True
            self.inbox.stop()
            store.note_opened()
            self._release()
            raise
        _brokers.add(self)
        _log.info("%s is open, with %d queues; this process (%d) owns it", store.name, len(self._loops), os.getpid())

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
            self._check_open()
            found: A = _BROKER_HANDLERS[type(operation)](self, operation)
            return found
        answer: A = self.loop(operation.queue).call(request)
        return answer

    def submit(self, operation: Operation[Any], done: AnswerCallback | None = None, /) -> Cancel:
        loop, cancel = self._enter(operation, done or partial(changes.log_failure, operation, self._name_of))
        if loop is not None:
            loop.wake()
        return cancel

    def submit_all(self, submitted: Sequence[tuple[Operation[Any], AnswerCallback]], /) -> list[Cancel]:
        """Submit operations that came together. This thread runs the turns of their queues, which they share."""
        loops: dict[int, Loop] = {}
        cancels: list[Cancel] = []
        try:
            for operation, done in submitted:
                try:
                    loop, cancel = self._enter(operation, done)
                    cancels.append(cancel)
                    if loop is not None:
                        loops[operation.queue] = loop
                except PenstockError as error:
                    cancels.append(_cannot_cancel)
                    done(error)
                except Exception as error:  # a bug of Penstock: the caller still gets an answer, and so do the others
                    changes.log_bug(operation, self._name_of)
                    cancels.append(_cannot_cancel)
                    done(caused_by_bug(error))
            for loop in loops.values():
                loop.run_submitted()
        except BaseException:  # an interrupt: other threads run the turns
            for loop in self.loops():
                loop.wake()
            raise
        return cancels

    def _enter(self, operation: Operation[Any], callback: AnswerCallback) -> tuple[Loop | None, Cancel]:
        """Add an operation to the requests of its queue, and give its loop, which must run a turn; None: none."""
        request = self._request(operation)
        if request is None:
            self._check_open()
            pool = self._quick_pool if type(operation) in _ANSWERED_FROM_MEMORY else self._broker_pool
            pool.submit(lambda: callback(self._outcome(operation)))
            return None, _cannot_cancel
        loop = self.loop(operation.queue)
        callbacks = [callback]  # emptied by the first call: a request may call `on_done` twice

        def on_done(answered: Request) -> None:
            if callbacks:
                callbacks.pop()(answered.answer if answered.error is None else answered.error)

        request.on_done = on_done
        loop.enter(request)
        return loop, partial(loop.cancel, request)

    def _outcome(self, operation: Operation[Any]) -> Any:
        """The answer, or the PenstockError."""
        try:
            return self.call(operation)
        except PenstockError as error:
            return error
        except Exception as error:  # a bug of Penstock: the caller still gets an answer
            changes.log_bug(operation, self._name_of)
            return caused_by_bug(error)

    def _request(self, operation: Operation[Any]) -> Request | None:
        """The operation as a request of its queue's loop; None when the broker itself answers it."""
        kind = type(operation)
        as_request = _REQUESTS.get(kind)
        if as_request is not None:
            now = self.clock.read().elapsed
            request = as_request(operation, now)
            request.entered(now)
            return request
        if kind in changes.CHANGE_HANDLERS:
            if isinstance(operation, RedriveItems) and (operation.call is None or not operation.call.again):
                self.loop(operation.to)  # QueueNotFound when it was deleted
            line = changes.log_line(operation, self._name_of)
            return FunctionRequest(lambda engine: changes.CHANGE_HANDLERS[kind](engine, operation), call=operation.call, log_line=line)
        if kind in queries.QUERY_HANDLERS and not (isinstance(operation, ExplainItem) and operation.follow):
            return FunctionRequest(lambda engine: queries.QUERY_HANDLERS[kind](engine, operation), needs_all_open=kind is not ReadStats)
        if kind not in _BROKER_HANDLERS:
            raise InvalidRequest(f"{kind.__name__} cannot be asked of a broker; use a kind of operation of penstock.operations")
        return None

    def run_request(self, incarnation: int, request: Request) -> Any:
        """Run a request that the broker itself made, in the loop of one queue, and wait for its answer."""
        return self.loop(incarnation).call(request)

    def auto_extend(self, queue: int, partition: int, lease: int, seconds: float, doubt: object = None, /) -> None:
        self.loop(queue).engine.auto_extended_leases[partition, lease] = None

    def stop_extending(self, queue: int, partition: int, lease: int, /) -> None:
        loop = self._loops.get(queue)
        if loop is not None:
            loop.engine.auto_extended_leases.pop((partition, lease), None)

    def log(self, queue: int, partition: int, /) -> ReadableLog:
        """The log of a partition. Everything up to now is published first."""
        self.call(PublishLog(queue=queue, partition=partition))
        return self.store.reader(queue, partition)

    def staging(self) -> Staging:
        return self.store.inbox

    # -- operations that the broker itself answers ---------------------------------------------------

    def _find(self, operation: FindQueue) -> QueueDescription:
        entry = self._wait_until_open(self.catalog.find(operation.name) if operation.name else self.entry(operation.queue))
        return describe_queue(entry, operation.marks)

    def _create(self, operation: CreateQueue) -> QueueDescription:
        chosen = merged(Options(), operation.options)
        name, partitions, exist_ok, given = operation.name, operation.partitions, operation.exist_ok, operation.given
        with self._creation_lock:  # not the catalog lock: other changes need not wait for the disk
            self._check_open()
            done = self.changed_before(operation)
            if done is not None:
                return describe_queue(done)
            incarnation = int.from_bytes(self._entropy(8), "big") or 1
            wall = self.clock.read().wall
            if catalog.create(self.catalog.state, name, chosen, partitions, incarnation, wall, exist_ok, given):
                # Before the record: once a queue is recorded, a missing log counts as damage.
                self.store.create_logs(incarnation, *range(partitions))
            with self.changing_catalog():
                entry = self.catalog.create(
                    name, chosen, incarnation=incarnation, partitions=partitions, exist_ok=exist_ok, given=given, call=operation.call
                )
            if entry.incarnation not in self._loops:
                self._being_created = entry.incarnation
                self._open_created(entry)
                many = "" if partitions == 1 else "s"
                _log.info("queue %r was created, with %d partition%s", name, partitions, many, extra=log_fields(queue=name))
        return describe_queue(entry)

    def _open_created(self, entry: QueueEntry) -> None:
        """Open a new queue. When a partition cannot be opened, delete the queue again and raise the error."""
        loop = self._open_queue(entry)
        broken = next((handle for handle in loop.engine.handles.values() if handle.error is not None), None)
        if broken is not None and broken.error is not None:
            loop.close()
            with self.changing_catalog():
                self.catalog.delete(entry.name)
            self._remove(entry.incarnation)
            raise broken.error
        loop.turn()
        self._loops[entry.incarnation] = loop

    def changed_before(self, operation: Operation[Any]) -> QueueEntry | None:
        """The queue that the call of an operation changed when it was sent before; None: it changed nothing."""
        incarnation = self.catalog.changed_by(operation.call)
        if incarnation is None:
            return None
        entry = self.catalog.state.entries.get(incarnation)
        if entry is None:
            raise QueueNotFound("this call was made before, and its queue was deleted since; create the queue again if it is needed")
        return entry

    def _wait_until_open(self, entry: QueueEntry) -> QueueEntry:
        """Wait while a queue that is in the catalog already is being opened."""
        if entry.incarnation not in self._loops:
            with self._creation_lock:
                pass
        return entry

    def _delete(self, operation: DeleteQueue) -> None:
        if self.catalog.changed_by(operation.call) is not None:
            return
        found = self.catalog.state.entries.get(operation.queue)
        if found is None:
            raise _gone()
        name, incarnation = found.name, found.incarnation
        catalog.delete(self.catalog.state, name)  # only checks: raises while it is the dead queue of another
        self._wait_until_open(found)
        loop = self.loop(incarnation)
        with (
            self._router.without_transfers(incarnation, name, self.clock, operation.wait if self._threaded else 0),
            self.changing_catalog(),
        ):
            if incarnation in self.catalog.state.entries:  # else another sending of the call has deleted it meanwhile
                self.catalog.delete(name, operation.call)
            self._loops.pop(incarnation, None)
        with suppress(PenstockError):  # the queue is deleted already
            loop.close(QueueNotFound(f"queue {name!r} was deleted"))
        self._remove(incarnation)
        _log.info("queue %r was deleted", name, extra=log_fields(queue=name))

    def apply_recorded_layout(self, engine: QueueEngine) -> None:
        """Inside a turn: apply the layout that is in the catalog, if the queue has another.

        Every turn does this: an error or interrupt may have come between the record and its application.
        """
        entry = self.catalog.state.entries.get(engine.incarnation)
        if entry is not None and (entry.map.version != engine.map.version or entry.read_only != engine.read_only):
            partition_layout.apply_layout(engine, entry)

    def _describe_owner(self, operation: DescribeOwner) -> OwnerDescription:
        return OwnerDescription(os.getpid(), os.uname().nodename, self.opened_at, self.list_clients())

    def _history(self, operation: ReadHistory) -> list[ItemEvent]:
        return trace.history(self, operation, self._name_of)

    def _name_of(self, incarnation: int) -> str | None:
        loop = self._loops.get(incarnation)
        return None if loop is None else loop.engine.name

    def loops(self) -> Sequence[Loop]:
        """The loop of every queue: for metrics, and for tests and simulations that run turns themselves."""
        return [*self._loops.values()]

    # -- opening and closing -------------------------------------------------------------------------

    def _open_queue(self, entry: QueueEntry) -> Loop:
        setup = QueueSetup(
            entry.name,
            entry.incarnation,
            lambda number, replayed: self._open_partition(entry.incarnation, number, replayed),
            self.clock,
            lambda: self._entropy(1)[0] / 255,
            lambda number: self._summary(entry.incarnation, number),
        )
        engine = QueueEngine(setup, QueueRouter(self._router.send_request, self._router.slot_map_of, self._router.is_dead_queue))
        engine.apply_recorded_shape = lambda: self.apply_recorded_layout(engine)
        loop = Loop(engine, self.store.disk, self._runners, self.loops, threaded=self._threaded)
        partition_layout.apply_layout(engine, entry)
        self._set_options(engine, entry)
        # The holder has the whole timeout, from now, to renew its right.
        engine.lease_step.set_consumer_right(entry.consumer_right_holder, entry.consumer_right_timeout)
        return loop

    def _summary(self, incarnation: int, number: int) -> Summary | None:
        """The summary of a closed partition; None when there is none and the partition must be opened."""
        known = self.catalog.state.entries.get(incarnation)
        if known is None or number >= known.next_partition:
            return Summary()
        data = self.store.summary(incarnation, number)
        return None if data is None else summary.load(data)

    def _open_partition(self, incarnation: int, number: int, replayed: Callable[[], None]) -> Partition:
        entry, options = self.catalog.get(incarnation), self.catalog.get(incarnation).options
        # From `next_partition` on, a resize adds it: its log is created. Any other log that is missing is damage.
        if number >= entry.next_partition:
            self.store.create_logs(incarnation, number)
        log = self.store.log(incarnation, number, create=False, durability=options.durability or None)
        try:
            given: dict[str, Any] = {"segment_bytes": self._segment_bytes, "min_free_bytes": self.min_free_bytes, "queue": entry.name}
            partition = Partition(log, self.clock, options.policy, **given, storage=options.storage, on_replayed=replayed)
            return keep_apart(partition, entry)
        except BaseException:
            log.close()
            raise

    def _set_options(self, engine: QueueEngine, entry: QueueEntry) -> None:
        options = entry.options
        engine.policy = options.policy
        engine.set_storage(options.storage)
        engine.produce_step.max_items, engine.produce_step.max_bytes = options.max_items, options.max_bytes
        dead = self.catalog.state.names.get(options.dead_queue)
        engine.transfer_step.dead = dead.incarnation if dead is not None else 0

    def configure(self, engine: QueueEngine) -> None:
        """Inside a turn: apply the options that are in the catalog now."""
        entry = self.catalog.get(engine.incarnation)
        self._set_options(engine, entry)
        for handle in engine.usable():
            engine.run(handle, Configure(entry.options.policy))
        engine.wants_turn = True

    @contextmanager
    def changing_catalog(self) -> Iterator[None]:
        """Hold the catalog lock for a change.

        After a failed write the catalog is read again; then queues that turn out to be recorded are opened, and those
        that are not are closed.
        """
        stale: Sequence[Loop] = ()
        try:
            with self._catalog_lock:
                try:
                    yield
                except BaseException as error:
                    if self.catalog.failed or isinstance(error, StorageFailed | OutcomeUnknown):
                        with suppress(PenstockError):
                            self.catalog.reopen()
                            stale = self._catch_up()
                    raise
        finally:
            for loop in stale:  # after the lock is released: a turn of the loop may wait for it
                with suppress(PenstockError):
                    loop.close()

    def _catch_up(self) -> Sequence[Loop]:
        """Open the queues that are new in the catalog; gives the loops of those that are not in it any more."""
        for entry in self.catalog.entries:
            if entry.incarnation not in self._loops and entry.incarnation != self._being_created:
                self._loops[entry.incarnation] = loop = self._open_queue(entry)
                loop.wake()
        return [self._loops.pop(one) for one in [*self._loops] if one not in self.catalog.state.entries]

    def _remove_deleted(self) -> None:
        """Remove files of deleted queues that were left when the broker ended."""
        for incarnation in self.catalog.deleted:
            self._remove(incarnation)

    def _remove(self, incarnation: int) -> None:
        with suppress(PenstockError):  # the next opening tries again
            self.store.remove_logs(incarnation)
            with self.changing_catalog():
                self.catalog.record_removed(incarnation)

    def close(self) -> None:
        """Answer every request, make everything durable, release the directory."""
        if self._forked:
            return
        for loop in list(self._loops.values()):
            loop.check_not_in_call()
        with self._closing:  # another thread that closes it meanwhile waits here: then it is closed
            if not self._closed:
                self._close()

    def _close(self) -> None:
        self.inbox.stop()
        self._closed = True
        with self._creation_lock:  # wait for a queue that is being opened, so that it is closed too
            pass
        errors: list[PenstockError] = []
        for loop in list(self._loops.values()):
            try:
                loop.close()
            except PenstockError as error:
                errors.append(error)
        self._release()
        _log.info("%s is closed", self.store.name)
        if errors:
            raise errors[0]

    def _release(self) -> None:
        try:
            self._runners.close()
            self._broker_pool.close()
            self._quick_pool.close()
        finally:  # an interrupt must not leave the directory locked
            with suppress(PenstockError, AttributeError):
                self.catalog.close()
            self.store.close()

    def detach_after_fork(self) -> None:
        """In a forked child: refuse every call from now on, and leave the parent's threads and files alone."""
        self._forked = self._closed = True
        self.inbox.abandon()
        for loop in list(self._loops.values()):
            loop.abandon()

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a broker in memory, or with exclusive=True, cannot be sent to another process; open one there")

    # -- helpers -------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._forked:
            raise BrokerClosed("this broker was opened by the parent process; open one in the child")
        if self._closed:
            raise BrokerClosed("the broker is closed; open it again")

    def entry(self, incarnation: int) -> QueueEntry:
        """The catalog's entry of a queue; QueueNotFound when it was deleted."""
        return self.catalog.get(incarnation)

    def loop(self, incarnation: int) -> Loop:
        if self._closed:
            self._check_open()
        loop = self._loops.get(incarnation)
        if loop is None:
            raise _gone()
        return loop


def _gone() -> QueueNotFound:
    return QueueNotFound("the queue was deleted (perhaps created anew since); ask the broker for it by name")


def _cannot_cancel() -> None:
    """Cancels nothing: the operation runs to its end."""


# -- operations as requests --------------------------------------------------------------------------


def _lease(operation: LeaseItems, now: int) -> LeaseRequest:
    deadline = now + operation.wait if operation.wait else 0
    return LeaseRequest(
        operation.count, operation.consumer, operation.timeout, operation.per_key, operation.request, deadline, call=operation.call
    )


def _settle(operation: SettleItems, now: int) -> SettleRequest:
    return SettleRequest(
        operation.action,
        operation.parts,
        delay=operation.delay,
        reason=operation.reason,
        counted=operation.counted,
        timeout=operation.timeout,
        then=operation.then,
        request=operation.request,
        deadline=now + operation.wait,
        call=operation.call,
    )


_REQUESTS: dict[type[Operation[Any]], Callable[[Any, int], Request]] = {
    ProduceItems: lambda operation, now: ProduceRequest(operation.batch, operation.request, now + operation.wait, call=operation.call),
    LeaseItems: _lease,
    SettleItems: _settle,
    AwaitItems: lambda operation, now: AwaitRequest(operation.start, now + operation.wait),
}
_ANSWERED_FROM_MEMORY = {DescribeOwner, FindQueue, ListQueues, ReadSlotMap, ReadMetrics}
"""Have a thread of their own when submitted, so that they do not wait behind operations that wait for a disk.

FindQueue may still wait, for the creation of the queue that it names."""
_BROKER_HANDLERS: dict[type[Operation[Any]], Callable[[EmbeddedBroker, Any], Any]] = {
    DescribeOwner: EmbeddedBroker._describe_owner,
    FindQueue: EmbeddedBroker._find,
    ListQueues: lambda broker, operation: queries.list_queues(broker.catalog.state, operation),
    ReadSlotMap: lambda broker, operation: broker.entry(operation.queue).map.pack(),
    CreateQueue: EmbeddedBroker._create,
    UpdateQueue: lambda broker, operation: broker.settings.update(operation),
    EnsureQueue: lambda broker, operation: broker.settings.ensure(operation),
    DeleteQueue: EmbeddedBroker._delete,
    ResizeQueue: lambda broker, operation: broker.settings.resize(operation),
    SetReadOnly: lambda broker, operation: broker.settings.set_read_only(operation),
    ReadMetrics: lambda broker, operation: read_metrics(broker),
    ExplainItem: trace.explain,
    ReadHistory: EmbeddedBroker._history,
    **INBOX_HANDLERS,
    TakeGrant: lambda broker, operation: broker.streams.take(operation),
    RenewStream: lambda broker, operation: broker.streams.renew(operation),
    EndStream: lambda broker, operation: broker.streams.end(operation),
    ReadGrant: lambda broker, operation: read_grant(broker.store.inbox, operation),
    FailGranted: lambda broker, operation: broker.streams.fail(operation),
    CutLogs: lambda broker, operation: cut_logs(broker.store, broker.catalog, broker._catalog_lock, broker.loops(), broker.clock),
}

_brokers: "weakref.WeakSet[EmbeddedBroker]" = weakref.WeakSet()


def _after_fork() -> None:
    for broker in list(_brokers):
        with suppress(BaseException):  # no caller could handle it, and the other brokers must still be detached
            broker.detach_after_fork()


os.register_at_fork(after_in_child=_after_fork)
