"""A broker inside this process: its catalog, its queues, and the mail between them.

Owns: `Embedded`. Each queue is a loop of its own; what concerns several queues (which there are, their options and widths) is a record
in the catalog first and reaches the queues after. Locks are taken in one order: a queue's turn, then the catalog.
A forked child cannot use its parent's broker: it is told so.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from penstock.broker import looking, shaping, tracing
from penstock.broker.live import Live
from penstock.broker.mail import Mail
from penstock.broker.outside import Outside
from penstock.broker.store import CATALOG, Store, Target, open_store
from penstock.logs.api import Durability
from penstock.logs.files.directory import SEGMENT_BYTES, Directory
from penstock.logs.files.system import Files
from penstock.loop.carrying import Office
from penstock.loop.catalog import Catalog
from penstock.loop.loop import Loop
from penstock.loop.partition import Partition
from penstock.loop.partitions import QueueSetup
from penstock.loop.requests import Do, Request, Reshape
from penstock.loop.runners import Runners
from penstock.loop.turn import Turns
from penstock.reports import BrokerMetrics, QueueInfo, info
from penstock.rules import catalog, summary
from penstock.rules.catalog import Entry
from penstock.rules.commands import Configure
from penstock.rules.options import Options, merged
from penstock.rules.summary import Summary
from penstock.words.clock import SECOND, Clock, SystemClock
from penstock.words.errors import BrokerClosed, OutcomeUnknown, PenstockError, QueueNotFound, StorageFailed
from penstock.words.limits import MAX_PARTITIONS, within


class Embedded:
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
        self._mail = Mail(self._loops, self._entry)
        self._live = Live(self._loop, store)
        self._closed = self._forked = False
        self.outside = Outside(store, self) if isinstance(store, Directory) else None
        try:
            self.catalog = Catalog(store.log(CATALOG, CATALOG), self.clock)
            self._sweep()
            self._loops.update({entry.incarnation: self._open_queue(entry) for entry in self.catalog.entries})
            for loop in list(self._loops.values()):
                loop.turn()
                if loop.busy or loop.turns.next_run is not None:
                    loop.wake()
            if self.outside is not None:
                self.outside.open(threaded)
        except BaseException:
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
    ) -> "Embedded":
        """Open a directory (or several storage roots), or "memory://"."""
        clock = clock or SystemClock()
        store = open_store(target, files, durability, segment_bytes, compression, clock, entropy)
        return cls(store, clock=clock, entropy=entropy, threaded=threaded, min_free_bytes=min_free_bytes, segment_bytes=segment_bytes)

    # -- queues --------------------------------------------------------------------------------------

    def create(self, name: str, options: Mapping[str, object], partitions: int, exist_ok: bool, given: Mapping[str, object]) -> QueueInfo:
        """Make a queue; with `exist_ok` the one of that name will do if what was `given` is the same."""
        self._usable()
        chosen = merged(Options(), options)
        with self._creating:  # not the catalog: others go on meanwhile
            incarnation = int.from_bytes(self._entropy(8), "big") or 1
            wall = self.clock.read().wall
            if catalog.create(self.catalog.state, name, chosen, partitions, incarnation, wall, exist_ok, given):
                self.store.make(incarnation, *range(partitions))  # before the record: from then on they are missed when they are not there
            with self.recording():
                entry = self.catalog.create(name, chosen, incarnation=incarnation, partitions=partitions, exist_ok=exist_ok, given=given)
            if entry.incarnation not in self._loops:
                self._beginning = entry.incarnation
                self._begin(entry)
        return info(entry)

    def _begin(self, entry: Entry) -> None:
        """Open a new queue, or take it back when its partitions cannot be."""
        loop = self._open_queue(entry)
        broken = next((member for member in loop.turns.members.values() if member.error is not None), None)
        if broken is not None and broken.error is not None:
            loop.close()
            with self.recording():
                self.catalog.delete(entry.name)
            self._remove(entry.incarnation)
            raise broken.error
        loop.turn()
        self._loops[entry.incarnation] = loop

    def find(self, name: str) -> QueueInfo:
        self._usable()
        return info(self._opened(self.catalog.find(name)))

    def _opened(self, entry: Entry) -> Entry:
        """A queue that is recorded may be still being opened."""
        if entry.incarnation not in self._loops:
            with self._creating:
                pass
        return entry

    def list(self, prefix: str = "", after: str = "", limit: int = 100) -> "list[QueueInfo]":
        """Queues by name, behind `after`."""
        self._usable()
        found = [entry for entry in self.catalog.entries if entry.name.startswith(prefix) and entry.name > after]
        return [info(entry) for entry in found[:limit]]

    def update(self, incarnation: int, changes: Mapping[str, object]) -> QueueInfo:
        """Change options; those not named stay. New timeouts count for new leases and items, the rest at once."""
        loop = self._loop(incarnation)
        with self.recording():
            entry = self.catalog.update(incarnation, changes)
        loop.call(Do(self._configure, firm=True))
        return info(entry)

    def delete(self, name: str, timeout: int = 30 * SECOND, incarnation: int = 0) -> None:
        """End a queue (that of `incarnation`, if given) and remove its files, once nothing is on its way to it or from it."""
        self._usable()
        found = self.catalog.find(name).incarnation
        if incarnation not in (0, found):
            raise QueueNotFound(f"queue {name!r} was deleted (and created anew since); ask the broker for it by name")
        catalog.delete(self.catalog.state, name)  # refused while it is in use as a dead queue
        self._opened(self.catalog.get(found))
        loop = self._loop(found)
        with self._mail.ending(found, name, self.clock, timeout if self._threaded else 0), self.recording():
            self.catalog.delete(name)
            self._loops.pop(found)
        with suppress(PenstockError):  # it is gone, whatever its last words
            loop.close(QueueNotFound(f"queue {name!r} was deleted"))
        self._remove(found)

    def resize(self, incarnation: int, partitions: int) -> QueueInfo:
        """Give a queue another width; items go on being produced and leased meanwhile."""
        within("partitions", partitions, 1, MAX_PARTITIONS)
        return self._reshape(incarnation, lambda entry: shaping.resized(entry, partitions))

    def set_read_only(self, incarnation: int, partition: int, read_only: bool) -> QueueInfo:
        """Drain a partition: others take its slots; or let it take items again."""
        return self._reshape(incarnation, lambda entry: shaping.drained(entry, partition, read_only))

    def _reshape(self, incarnation: int, choose: Callable[[Entry], shaping.Shape]) -> QueueInfo:
        return info(self._loop(incarnation).call(Reshape(lambda turns: self._change_shape(turns, choose), firm=True)))

    def _change_shape(self, turns: Turns, choose: Callable[[Entry], shaping.Shape]) -> Entry:
        """Inside a turn: one record in the catalog, then the new map and its fences."""
        try:
            with self.recording():
                return shaping.change(self.catalog, turns, choose, self.clock.read().wall)
        finally:
            self._reshaped(turns)

    def _reshaped(self, turns: Turns) -> None:
        """What is recorded is so, whatever went wrong in between: looked at in every turn."""
        entry = self.catalog.state.entries.get(turns.incarnation)
        if entry is not None and (entry.map.version != turns.map.version or entry.read_only != turns.read_only):
            shaping.apply(turns, entry)

    # -- requests ------------------------------------------------------------------------------------

    def now(self) -> int:
        return self.clock.read().elapsed

    def call(self, incarnation: int, request: Request) -> Any:
        return self._loop(incarnation).call(request)

    def submit(self, incarnation: int, request: Request) -> None:
        self._loop(incarnation).submit(request)

    def cancel(self, incarnation: int, request: Request) -> None:
        loop = self._loops.get(incarnation)
        if loop is not None:
            loop.cancel(request)

    def keep(self, incarnation: int, partition: int, lease: int) -> None:
        """A holder in this process is at work: its lease does not end before `let_go`."""
        self._loop(incarnation).turns.kept[partition, lease] = None

    def let_go(self, incarnation: int, partition: int, lease: int) -> None:
        """That holder is done, or not to be waited for any longer."""
        loop = self._loops.get(incarnation)
        if loop is not None:
            loop.turns.kept.pop((partition, lease), None)

    def ask(self, incarnation: int, verb: str, **args: Any) -> Any:
        """An operator's verb (admin.py, tracing.py)."""
        if verb == "send":
            self._loop(args["to"])
        return tracing.ask(self._live, incarnation, verb, args)

    def metrics(self) -> BrokerMetrics:
        """Counters and latencies of every queue since it was opened here."""
        self._usable()
        return BrokerMetrics({loop.turns.name: looking.metrics(loop) for loop in list(self._loops.values())})

    def loops(self) -> Sequence[Loop]:
        """Every queue's loop: for whoever drives them by hand."""
        return [*self._loops.values()]

    # -- opening and closing -------------------------------------------------------------------------

    def _open_queue(self, entry: Entry) -> Loop:
        setup = QueueSetup(
            entry.name,
            entry.incarnation,
            lambda number: self._open_partition(entry.incarnation, number),
            self.clock,
            lambda: self._entropy(1)[0] / 255,
            lambda number: self._summary(entry.incarnation, number),
        )
        turns = Turns(setup, Office(self._mail.post, self._mail.map_of))
        turns.look_at_shape = lambda: self._reshaped(turns)
        loop = Loop(turns, self.store, self._runners, threaded=self._threaded)
        shaping.apply(turns, entry)
        self._set_options(turns, entry)
        turns.leasing.hold(entry.holder, entry.hold_timeout)  # whoever has it is given the time to say so again
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
            self.store.make(incarnation, number)
        log = self.store.log(incarnation, number, create=False, durability=options.durability or None)
        try:
            return Partition(log, self.clock, options.policy, segment_bytes=self._segment_bytes, min_free_bytes=self._min_free_bytes)
        except BaseException:
            log.close()
            raise

    def _set_options(self, turns: Turns, entry: Entry) -> None:
        options = entry.options
        turns.policy = options.policy
        turns.producing.max_items, turns.producing.max_bytes = options.max_items, options.max_bytes
        dead = self.catalog.state.names.get(options.dead_queue)
        turns.carrying.dead = dead.incarnation if dead is not None else 0

    def _configure(self, turns: Turns) -> None:
        """Inside a turn: what the catalog says now."""
        entry = self.catalog.get(turns.incarnation)
        self._set_options(turns, entry)
        for member in turns.healthy():
            turns.run(member, Configure(entry.options.policy))
        turns.again = True

    @contextmanager
    def recording(self) -> Iterator[None]:
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
            self.store.remove(incarnation)
            with self.recording():
                self.catalog.removed(incarnation)

    def close(self) -> None:
        """Answer everyone, make everything durable, let go of the directory."""
        if self._closed or self._forked:
            return
        if self.outside is not None:
            self.outside.stop()
        self._closed = True
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
        self._runners.close()
        with suppress(PenstockError, AttributeError):
            self.catalog.close()
        self.store.close()

    def abandon(self) -> None:
        """In a forked child."""
        self._forked = self._closed = True
        if self.outside is not None:
            self.outside.abandon()
        for loop in list(self._loops.values()):
            loop.abandon()

    # -- helpers -------------------------------------------------------------------------------------

    def _usable(self) -> None:
        if self._forked:
            raise BrokerClosed("this broker was opened by the parent process; open one in the child")
        if self._closed:
            raise BrokerClosed("the broker is closed; open it again")

    def _entry(self, incarnation: int) -> Entry:
        return self.catalog.get(incarnation)

    def _loop(self, incarnation: int) -> Loop:
        self._usable()
        loop = self._loops.get(incarnation)
        if loop is None:
            raise QueueNotFound("the queue was deleted (perhaps created anew since); ask the broker for it by name")
        return loop


_brokers: "weakref.WeakSet[Embedded]" = weakref.WeakSet()


def _after_fork() -> None:
    for broker in list(_brokers):
        with suppress(BaseException):  # nobody could be told of it, and the others must be let go of all the same
            broker.abandon()


os.register_at_fork(after_in_child=_after_fork)
