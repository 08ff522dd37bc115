"""Many workers in real threads: no two ever have items of one key, and every key is handled in the order in which it
was produced.
"""

import random
import threading
from collections.abc import Callable

import pytest

from penstock.operations import ListItems, RedriveItems
from penstock.words.errors import BrokerClosed
from tests.broker.broker_under_test import BrokerUnderTest, LeasedItems, QueueUnderTest, run_threads, wait_until

KEYS, EACH, WORKERS = 20, 20, 16


class CheckingWorkers:
    """Workers that check on each other."""

    def __init__(self, queue: QueueUnderTest, total: int) -> None:
        self.queue = queue
        self.total = total
        self.handled: dict[str, list[int]] = {}
        self.failed: set[str] = set()
        self._holding: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def done(self) -> int:
        with self._lock:
            return sum(len(numbers) for numbers in self.handled.values())

    def worker(self, number: int, want: int) -> Callable[[], None]:
        def run() -> None:
            rng = random.Random(number)
            while self.done < self.total:
                held = self.queue.lease(want, wait=0.2, consumer=f"worker-{number}")
                self._take(held, number)
                for item, text, key in zip(held.ids, held.texts, held.keys, strict=True):
                    self._handle(held, item, text, key, rng)

        return run

    def _take(self, held: LeasedItems, worker: int) -> None:
        with self._lock:
            for key in held.keys:
                assert key not in self._holding, f"{key} is held by {self._holding[key]} and {worker}"
                self._holding[key] = worker

    def _handle(self, held: LeasedItems, item: str, text: str, key: str, rng: random.Random) -> None:
        """Every item fails once."""
        with self._lock:
            del self._holding[key]
            first = text not in self.failed
            self.failed.add(text)
            if not first:
                self.handled.setdefault(key, []).append(int(text.partition(":")[2]))
        if first:
            (answer,) = self.queue.settle("retry", [held.part(item)], delay=rng.choice((0, 0.001, 0.003)), reason="once")
        else:
            (answer,) = self.queue.settle("complete", [held.part(item)])
        assert answer.done == 1


def produce_all(queue: QueueUnderTest) -> None:
    """Each key's items in order, keys in a jumble, some before the workers come and some while they work."""
    rng = random.Random(1)
    left = {f"key-{number}": list(range(EACH)) for number in range(KEYS)}
    while left:
        chosen = rng.sample(sorted(left), min(len(left), rng.randint(1, 5)))
        queue.produce(*[f"{key}:{left[key].pop(0)}" for key in chosen], keys=chosen)
        left = {key: numbers for key, numbers in left.items() if numbers}


def check(shop: CheckingWorkers) -> None:
    assert shop.handled == {f"key-{number}": list(range(EACH)) for number in range(KEYS)}
    stats = shop.queue.stats()
    assert (stats.completed, stats.depth) == (stats.produced, 0)


@pytest.mark.parametrize("want", [1, 6])
def test_sixteen_workers_and_every_item_fails_once(threaded_broker: BrokerUnderTest, want: int) -> None:
    queue = threaded_broker.create(partitions=4)
    shop = CheckingWorkers(queue, KEYS * EACH)
    run_threads(lambda: produce_all(queue), *[shop.worker(number, want) for number in range(WORKERS)])
    check(shop)


def test_workers_during_resizes(threaded_broker: BrokerUnderTest) -> None:
    queue = threaded_broker.create(partitions=1)
    shop = CheckingWorkers(queue, KEYS * EACH)

    def resize() -> None:
        for step, width in enumerate((4, 5, 8, 3, 6, 1, 2)):
            wait_until(lambda step=step: queue.stats().completed > 45 * step)  # type: ignore[misc]
            queue.resize(width)

    run_threads(lambda: produce_all(queue), resize, *[shop.worker(number, 3) for number in range(WORKERS)])
    wait_until(lambda: not queue.stats().resizing)
    check(shop)
    assert queue.info.partitions == 2


def test_workers_with_dead_letters_that_are_redriven(threaded_broker: BrokerUnderTest) -> None:
    """Unkeyed items are given up at their second attempt; somebody redrives them until all are done."""
    dead = threaded_broker.create("dead")
    queue = threaded_broker.create(partitions=3, dead_queue="dead", max_attempts=2)
    queue.produce(*map(str, range(200)))
    seen: dict[str, int] = {}
    done: list[str] = []
    lock = threading.Lock()

    def work() -> None:
        while len(done) < 200:
            held = queue.lease(7, wait=0.1)
            with lock:
                for text in held.texts:
                    seen[text] = seen.get(text, 0) + 1
                good = [item for item, text in zip(held.ids, held.texts, strict=True) if seen[text] > 3]
                done.extend(text for text in held.texts if seen[text] > 3)
            for item in held.ids:
                (answer,) = queue.settle("complete" if item in good else "retry", [held.part(item)])
                assert answer.done == 1

    def redrive() -> None:
        while len(done) < 200:
            chosen: dict[int, list[int]] = {}
            for one in dead.call(ListItems(states=("ready", "buried"), limit=50)):
                chosen.setdefault(one.partition, []).append(one.offset)
            dead.call(RedriveItems(items=chosen, to=queue.incarnation))

    run_threads(redrive, work, work, work, work)
    assert sorted(done) == sorted(map(str, range(200)))
    assert set(seen.values()) == {4}
    assert (queue.stats().depth, dead.stats().depth) == (0, 0)


def test_workers_end_when_the_broker_closes(threaded_broker: BrokerUnderTest) -> None:
    queue = threaded_broker.create(partitions=2)
    shop = CheckingWorkers(queue, 1 << 30)

    def worker(number: int) -> Callable[[], None]:
        def run() -> None:
            with pytest.raises(BrokerClosed):
                shop.worker(number, 2)()

        return run

    def end() -> None:
        produce_all(queue)
        wait_until(lambda: queue.stats().completed > 100)
        threaded_broker.embedded.close()

    run_threads(end, *[worker(number) for number in range(WORKERS)])
