"""A whole broker under test: its storage, its clock, and short methods for its queues.

Owns: `BrokerUnderTest` (a broker that can be killed and opened again), `QueueUnderTest` (one of its queues),
`SubmittedRequest` and `LeasedItems` (answers), `batch_of`.
A broker runs in one of two ways:
- by hand: a manual clock and no threads; things happen only in `turn`, so a test sees every step;
- threaded: real threads and the real clock.
Every method waits for its answer; by hand it runs turns until there is nothing to do. Times are seconds here.
"""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from typing import Any, cast

from penstock.broker.embedded import EmbeddedBroker
from penstock.loop.loop import Loop
from penstock.loop.requests import (
    AwaitRequest,
    FunctionRequest,
    LeaseRequest,
    LeaseResult,
    ProduceRequest,
    Request,
    SettleAction,
    SettlePart,
    SettleRequest,
    StoredPart,
)
from penstock.operations import (
    A,
    CreateQueue,
    DeleteQueue,
    ExplainItem,
    FindQueue,
    ListItems,
    Operation,
    PauseQueue,
    ReadStats,
    RedriveItems,
    ResizeQueue,
    UpdateQueue,
)
from penstock.reports import ItemExplanation, QueueDescription, QueueStats
from penstock.rules import routing, slots
from penstock.rules.commands import Settled
from penstock.rules.item_states import ItemState
from penstock.rules.runs import RunSet
from penstock.testing.clock import MicrosecondClock
from penstock.words import ids
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import PenstockError, Refused
from tests.broker.storages import BrokerStorage
from tests.partition_under_test import items, slot

MOST_TURNS = 3_000
"""More than any test here needs."""
MANY = 1_000_000
WAIT_SECONDS = 20.0
"""After so long a threaded test that still waits has failed."""


def batch_of(*payloads: str | bytes, dedups: Sequence[str | None] | None = None, **options: Any) -> Batch:
    """A batch of payloads, with the options of `items`; dedup ids are hashed as the API does it."""
    batch = items(payloads, **options)
    if dedups is not None:
        keys = batch.keys or [None] * len(batch)
        batch.dedups = [None if name is None else routing.dedup_digest(key, name.encode()) for key, name in zip(keys, dedups, strict=True)]
    return batch


# -- a broker ------------------------------------------------------------------------------------------


class BrokerUnderTest:
    """A broker, its storage and its clock."""

    def __init__(self, storage: BrokerStorage, *, threaded: bool = False, clock: MicrosecondClock | None = None, **options: Any) -> None:
        self.storage = storage
        self.clock = clock or MicrosecondClock()
        self.threaded = threaded
        self._options = options
        self._entropy = random.Random(7).randbytes
        self.embedded = self._open()

    def _open(self) -> EmbeddedBroker:
        if self.threaded:
            return self.storage.open(**self._options)
        return self.storage.open(clock=self.clock, entropy=self._entropy, threaded=False, **self._options)

    def create(self, name: str = "q", partitions: int = 1, **options: Any) -> "QueueUnderTest":
        queue = QueueUnderTest(self, self.embedded.call(CreateQueue(name=name, options=options, partitions=partitions)))
        queue.open_all()  # so that a test does not see their opening
        return queue

    def find(self, name: str = "q") -> "QueueUnderTest":
        return QueueUnderTest(self, self.embedded.call(FindQueue(name=name)))

    def delete(self, name: str = "q") -> None:
        self.embedded.call(DeleteQueue(queue=self.embedded.call(FindQueue(name=name)).incarnation))

    # -- time ------------------------------------------------------------------------------------------

    def turn(self) -> int:
        """By hand: run turns of every queue that has something to do, until none has; gives how many."""
        turns = 0
        while due := [loop for loop in self.embedded.loops() if self._wants_turn(loop)]:
            for loop in due:
                loop.turn()
                turns += 1
            assert turns < MOST_TURNS, "the queues never become idle"
        return turns

    def _wants_turn(self, loop: Loop) -> bool:
        next_run = loop.engine.next_run
        return loop.busy or (next_run is not None and next_run <= self.clock.read().elapsed)

    def advance(self, seconds: float) -> None:
        """By hand: advance the clock, then run turns."""
        self.clock.advance(round(seconds * SECOND))
        self.turn()

    def advance_in_steps(self, seconds: float) -> None:
        """By hand: advance the clock, with a turn at every time at which a queue wants one."""
        end = self.clock.read().elapsed + round(seconds * SECOND)
        self.turn()
        for _ in range(MOST_TURNS):
            now = self.clock.read().elapsed
            due = min([end, *(loop.engine.next_run for loop in self.embedded.loops() if loop.engine.next_run is not None)])
            self.clock.advance(max(due - now, 0))
            self.turn()
            if self.clock.read().elapsed >= end:
                return
        raise AssertionError("a queue always wants another turn")

    def after(self, seconds: float) -> int:
        """The wall time so many seconds from now."""
        return self.embedded.clock.read().wall + round(seconds * SECOND)

    def deadline(self, wait: float) -> int:
        return self.embedded.clock.read().elapsed + round(wait * SECOND)

    # -- checks and restarts ---------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the counts of every partition agree with the states of its items."""
        for loop in self.embedded.loops():
            for handle in loop.engine.usable():
                state = handle.state
                lives = [state.state_of(offset) for offset in range(state.next_offset)]
                order = [ItemState(name) for name in state.counts._fields]
                assert list(state.counts) == [lives.count(life) for life in order], f"{loop!r}, partition {handle.number}"

    def restart(self) -> None:
        """Close, and open again."""
        self.embedded.close()
        self.embedded = self._open()

    def kill(self) -> None:
        """End the process without closing, and open again."""
        assert not self.threaded
        self.storage.kill()
        self.embedded = self._open()


class QueueUnderTest:
    """One queue of a broker."""

    def __init__(self, broker: BrokerUnderTest, info: QueueDescription) -> None:
        self.owner = broker
        self.name = info.name
        self.incarnation = info.incarnation

    @property
    def broker(self) -> EmbeddedBroker:
        return self.owner.embedded

    @property
    def loop(self) -> Loop:
        return next(loop for loop in self.broker.loops() if loop.engine.incarnation == self.incarnation)

    @property
    def info(self) -> QueueDescription:
        return self.broker.call(FindQueue(name=self.name))

    def open_all(self) -> None:
        """Open every partition that is closed."""
        self.run(FunctionRequest(lambda engine: None))

    # -- requests --------------------------------------------------------------------------------------

    def submit(self, request: Request) -> "SubmittedRequest":
        """Submit a request without waiting for its answer; by hand nothing happens before the next turn."""
        asked = SubmittedRequest(self, request)
        self.broker.loop(self.incarnation).submit(request)
        return asked

    def run(self, request: Request) -> Any:
        """Run a request and give its answer; by hand with as many turns as needed."""
        if self.owner.threaded:
            return self.broker.run_request(self.incarnation, request)
        asked = self.submit(request)
        self.owner.turn()
        return asked.result

    def produce_batch(self, batch: Batch, request: str | None = None, wait: float = 0) -> list[StoredPart]:
        """Produce; gives the answer of each partition."""
        return cast(list[StoredPart], self.run(ProduceRequest(batch, _named(request), self.owner.deadline(wait) if wait else 0)))

    def produce(self, *payloads: str | bytes, request: str | None = None, **options: Any) -> list[str]:
        """Produce with the options of `batch_of`; gives the ids of the items in order. Any error is raised."""
        batch = batch_of(*payloads, **options)
        return ids_of(self.produce_batch(batch, request), len(batch))

    def submit_lease(self, want: int = 1, wait: float = 60.0, **options: Any) -> "SubmittedRequest":
        """Submit a lease that waits; a turn has seen it when this returns."""
        asked = self.submit(LeaseRequest(want, deadline=self.owner.deadline(wait), **options))
        if self.owner.threaded:
            self.stats()  # a turn that came after it
        else:
            self.owner.turn()
        return asked

    def lease(self, want: int = 100, wait: float = 0, timeout: float = 0, **options: Any) -> "LeasedItems":
        request = LeaseRequest(want, timeout=round(timeout * SECOND), deadline=self.owner.deadline(wait), **options)
        return LeasedItems(self, cast(list[LeaseResult], self.run(request)))

    def settle(
        self, action: SettleAction, parts: Sequence[SettlePart], *, delay: float = 0, timeout: float = 0, **options: Any
    ) -> list[Any]:
        """Settle; gives a Settled or a Refused for each part."""
        return cast(
            list[Any], self.run(SettleRequest(action, parts, delay=round(delay * SECOND), timeout=round(timeout * SECOND), **options))
        )

    def watch(self, offsets: Mapping[int, int], wait: float = 60.0) -> "SubmittedRequest":
        return self.submit(AwaitRequest(dict(offsets), self.owner.deadline(wait)))

    def drain(self, want: int = 100) -> list[str]:
        """Lease and complete until two leases in a row find nothing; gives the texts in the order of serving."""
        served: list[str] = []
        while held := self.lease(want) or self.lease(want):
            served += held.texts
            held.complete()
        return served

    # -- operations --------------------------------------------------------------------------------------

    def call(self, operation: Operation[A]) -> A:
        """Do an operation on this queue. Sets its queue."""
        operation.queue = self.incarnation
        return self.broker.call(operation)

    def stats(self) -> QueueStats:
        return self.call(ReadStats())

    def explain(self, item: str) -> ItemExplanation:
        partition, offset = ids.parse_id(item)
        return self.call(ExplainItem(partition=partition, offset=offset))

    def pause(self, lease: bool | None = None, produce: bool | None = None, partition: int | None = None) -> None:
        self.call(PauseQueue(lease=lease, produce=produce, partition=partition))

    def resize(self, partitions: int) -> QueueDescription:
        return self.call(ResizeQueue(partitions=partitions))

    def update(self, **changes: object) -> QueueDescription:
        return self.call(UpdateQueue(changes=changes))

    def redrive_buried(self) -> int:
        """Make all buried items ready again; gives how many."""
        chosen: dict[int, list[int]] = {}
        for one in self.call(ListItems(states=["buried"], limit=MANY)):
            chosen.setdefault(one.partition, []).append(one.offset)
        return self.call(RedriveItems(items=chosen, to=self.incarnation))

    def counts(self) -> dict[str, int]:
        """State → number of items, without the states that have none."""
        found = self.stats()
        return {name: number for name in STATES if (number := getattr(found, name))}


STATES = ("ready", "scheduled", "leased", "completed", "buried", "moving", "cancelled")


class SubmittedRequest:
    """A submitted request, and its answer."""

    def __init__(self, queue: QueueUnderTest, request: Request) -> None:
        self.queue = queue
        self.request = request
        self._event = threading.Event()
        request.on_done = lambda _: self._event.set()

    @property
    def done(self) -> bool:
        return self.request.done

    @property
    def result(self) -> Any:
        """The answer; a threaded test waits for it, by hand it must be there."""
        assert self._event.wait(WAIT_SECONDS if self.queue.owner.threaded else 0), f"{self.request!r} is not answered"
        return self.request.result()

    @property
    def leased(self) -> "LeasedItems":
        """The items of a lease request."""
        return LeasedItems(self.queue, cast(list[LeaseResult], self.result))

    def cancel(self) -> None:
        self.queue.loop.cancel(self.request)


class LeasedItems:
    """The items of a lease."""

    def __init__(self, queue: QueueUnderTest, handed: list[LeaseResult]) -> None:
        self.queue = queue
        self.parts_granted = handed

    def __bool__(self) -> bool:
        return bool(self.parts_granted)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def texts(self) -> list[str]:
        return [payload.decode() for one in self.parts_granted for part in one.items for payload in part.batch.payloads]

    @property
    def ids(self) -> list[str]:
        return [ids.format_id(one.partition, offset) for one in self.parts_granted for part in one.items for offset in part.offsets]

    @property
    def keys(self) -> list[str]:
        """The key of each item."""
        parts = [part.batch for one in self.parts_granted for part in one.items]
        return ["" if key is None else key.decode() for batch in parts for key in batch.keys or [None] * len(batch)]

    @property
    def attempts(self) -> list[int]:
        return [one.granted.attempts.get(offset, 1) for one in self.parts_granted for part in one.items for offset in part.offsets]

    @property
    def parts(self) -> list[SettlePart]:
        return [SettlePart(one.partition, one.granted.lease) for one in self.parts_granted]

    def part(self, item: str) -> SettlePart:
        """One of the items, by its id."""
        partition, offset = ids.parse_id(item)
        mine = (one for one in self.parts_granted if one.partition == partition and offset in RunSet(one.granted.runs))
        return SettlePart(partition, next(mine).granted.lease, [offset])

    def settle(self, action: SettleAction, **options: Any) -> int:
        """Settle all items; gives how many. Any refusal is raised."""
        return count_settled(self.queue.settle(action, self.parts, **options))

    def complete(self, **options: Any) -> int:
        return self.settle("complete", **options)

    def retry(self, **options: Any) -> int:
        return self.settle("retry", **options)

    def bury(self, **options: Any) -> int:
        return self.settle("bury", **options)


# -- answers -------------------------------------------------------------------------------------------


def refusal(answer: StoredPart | Settled | Refused) -> PenstockError | None:
    """The error of a part of an answer, or None."""
    found = answer if isinstance(answer, Refused) else answer.refused if isinstance(answer, StoredPart) else None
    return None if found is None else found.error()


def count_settled(answer: Sequence[Settled | Refused]) -> int:
    done = 0
    for one in answer:
        if isinstance(one, Refused):
            raise one.error()
        assert not one.refused and not one.early
        done += one.done
    return done


def ids_of(answer: Sequence[StoredPart], number: int) -> list[str]:
    """The id of each produced item, in order; any error is raised."""
    found: dict[int, str] = {}
    for part in answer:
        if part.refused is not None:
            raise part.refused.error()
        assert part.stored is not None
        indexes = range(number) if part.indexes is None else part.indexes
        found.update(zip(indexes, ids.format_ids(part.partition, part.stored.offsets), strict=True))
    assert sorted(found) == list(range(number)), "every item has its id"
    return [found[index] for index in range(number)]


def _named(request: str | None) -> bytes | None:
    return None if request is None else request.encode()


# -- keys and threads ----------------------------------------------------------------------------------


def keys_at(queue: QueueUnderTest, partition: int, number: int = 1, prefix: str = "key") -> list[str]:
    """Keys whose slots are in a partition now."""
    owners = queue.loop.engine.map.owners
    names = (f"{prefix}-{number}" for number in count())
    return list(islice((name for name in names if owners[slot(name)] == partition), number))


def key_that_moves(old: int, new: int, start: int = 0) -> str:
    """A key that changes its partition when a new queue is resized."""
    before = slots.first_map(list(range(old)))
    after = slots.next_map(before, list(range(new)))
    names = (f"key-{number}" for number in count(start))
    return next(name for name in names if before.owners[slot(name)] != after.owners[slot(name)])


def wait_until(true: Callable[[], bool]) -> None:
    """Call the function until it gives True. It should run a turn of the queue, so that things happen."""
    clock = SystemClock()
    end = clock.read().elapsed + WAIT_SECONDS * SECOND
    while not true():
        assert clock.read().elapsed < end, "it did not come true"


def run_threads(*work: Callable[[], object]) -> None:
    """Run functions in threads at the same time; raises the first error."""
    errors: list[BaseException] = []

    def run(one: Callable[[], object]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "a thread still waits"
    if errors:
        raise errors[0]
