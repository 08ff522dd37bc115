"""A broker in a real directory, for tests of readers of that directory.

Owns: `DirectoryBroker`, functions that fill a queue (`fill`, `run_sample_workload`), and `all_answers` of all queries.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock import Broker, NewItem, Queue
from penstock.broker import changes
from penstock.broker.embedded import EmbeddedBroker
from penstock.broker.snapshot import Snapshot
from penstock.loop.requests import FunctionRequest
from penstock.operations import (
    ExplainItem,
    FindOffsets,
    FindQueue,
    ListCursors,
    ListHeldKeys,
    ListItems,
    ListQueues,
    ReadHistory,
    ReadItems,
    ReadStats,
    TraceItem,
)
from penstock.testing.clock import MicrosecondClock
from tests.api.both_apis import run_all_turns


class DirectoryBroker:
    """A broker without threads, with a clock that stands still: things happen only in calls and in
    `run_and_publish`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = MicrosecondClock()
        self.broker: Broker = penstock.open(path, clock=self.clock, threaded=False)

    @property
    def embedded(self) -> EmbeddedBroker:
        found = self.broker._home
        assert isinstance(found, EmbeddedBroker)
        return found

    def open_snapshot(self) -> Snapshot:
        return Snapshot.open(self.path, clock=self.clock)

    def run_and_publish(self) -> None:
        """Run turns until there is nothing to do, and publish everything."""
        run_all_turns(self.broker)
        for info in self.embedded.call(ListQueues()):
            self.embedded.run_request(info.incarnation, FunctionRequest(changes.publish_partitions, needs_all_open=False))

    def incarnation(self, name: str) -> int:
        return self.embedded.call(FindQueue(name=name)).incarnation

    def reopen(self) -> None:
        self.broker.close()
        self.broker = penstock.open(self.path, clock=self.clock, threaded=False)


def fill(queue: Queue, count: int, **options: Any) -> list[str]:
    return queue.produce_many([NewItem(b"%d" % n, **options) for n in range(count)])


def run_sample_workload(directory_broker: DirectoryBroker) -> None:
    """Produce, lease, settle, read by cursor and resize, a little of each."""
    directory_broker.broker.create_queue("dead")
    orders = directory_broker.broker.create_queue("orders", partitions=3, dead_queue="dead", max_attempts=2)
    orders.produce_many([NewItem(b"%d" % n, key=f"k{n % 7}") for n in range(40)])
    fill(orders, 5, priority=1)
    orders.produce(b"later", at=directory_broker.clock.now() + timedelta(seconds=60))
    batch = orders.lease(12, consumer="c")
    batch[0].complete()
    batch[1].bury("bad")
    batch[2].retry(reason="no")
    batch[3].retry(delay=30, reason="wait")
    orders.lease(9, consumer="d")
    orders.cursor("audit").read(4)
    orders.resize(5)
    orders.produce_many([NewItem(b"new %d" % n, key=f"k{n % 7}") for n in range(10)])
    run_all_turns(directory_broker.broker)


def all_answers(source: EmbeddedBroker | Snapshot, incarnation: int) -> dict[str, Any]:
    """The answers to all queries about a queue, as plain data."""
    ends: dict[int, int] = source.call(FindOffsets(queue=incarnation, at="newest"))
    places = [(number, offset) for number, end in ends.items() for offset in range(end)]
    page = source.call(ReadItems(queue=incarnation, start={}, limit=30))
    lists = {name: source.call(msgspec.structs.replace(query, queue=incarnation)) for name, query in LISTS.items()}
    return {
        "ends": ends,
        "stats": source.call(ReadStats(queue=incarnation)),
        "explain": [source.call(ExplainItem(queue=incarnation, partition=number, offset=offset)) for number, offset in places],
        "trace": [source.call(TraceItem(queue=incarnation, partition=number, offset=offset)) for number, offset in places],
        "history": [source.call(ReadHistory(queue=incarnation, partition=number, offset=offset)) for number, offset in places[::5]],
        "keys": source.call(ListHeldKeys(queue=incarnation, limit=5)),
        "cursor": source.call(ListCursors(queue=incarnation)).get("audit", {}),
        "cursors": source.call(ListCursors(queue=incarnation)),
        "starts": source.call(FindOffsets(queue=incarnation, at="oldest")),
        "offsets_at": [source.call(FindOffsets(queue=incarnation, at=at)) for at in (0, 1 << 60)],
        "read": ([(number, part.start, list(part.batch.payloads)) for number, part in page.items], page.next_offsets),
        **{name: [(one.partition, one.offset, one.state, one.attempts, one.reason) for one in found] for name, found in lists.items()},
    }


LISTS = {
    "listed": ListItems(states=["ready", "leased", "scheduled"], after=(0, 2), limit=20),
    "redrivable": ListItems(states=["ready", "buried"], limit=50),
}
