"""Several items of a key in one call of a batch handler."""

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from penstock import Bury, Failed, Item, NewItem, Queue, RetryPolicy, Worker
from penstock.errors import InvalidRequest
from penstock.worker.buffer import divided_unit


def produce(queue: Queue, keys: Sequence[str | None]) -> list[str]:
    return queue.produce_many([NewItem(str(at), key=key) for at, key in enumerate(keys)])


class Calls:
    """A batch handler that records its calls and checks that keys are handled in order, one call at a time."""

    def __init__(self) -> None:
        self.calls: list[list[Item]] = []
        self.handled: dict[str | None, list[int]] = defaultdict(list)
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self.problems: list[str] = []

    def __call__(self, items: list[Item]) -> None:
        keys = {item.key for item in items if item.key is not None}
        with self._lock:
            if self._busy & keys:
                self.problems.append(f"two calls at once had items of {self._busy & keys}")
            self._busy |= keys
            self.calls.append(items)
        with self._lock:
            for item in items:
                self.handled[item.key].append(item.offset)
            self._busy -= keys

    def check(self, items: int) -> None:
        assert not self.problems
        assert sum(map(len, self.handled.values())) == items
        assert all(offsets == sorted(offsets) for key, offsets in self.handled.items() if key is not None)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_worker_fills_its_batches_from_few_keys(queue: Queue, concurrency: int) -> None:
    keys = [f"key {at * 7 % 10}" for at in range(4_000)]
    produce(queue, keys)
    calls = Calls()
    Worker(queue, calls, batch=200, concurrency=concurrency).run(signals=False, until_empty=True)
    calls.check(4_000)
    assert len(calls.calls) < 200, "one item of each key in a call would be 400 calls"
    assert max(map(len, calls.calls)) <= 200


def test_one_key_fills_a_batch(queue: Queue) -> None:
    produce(queue, ["only"] * 1_000)
    calls = Calls()
    Worker(queue, calls, batch=100).run(signals=False, until_empty=True)
    calls.check(1_000)
    assert len(calls.calls) <= 15


def test_per_key_limits_the_items_of_a_key_in_a_call(queue: Queue) -> None:
    produce(queue, [*(["a", "b", None] * 20), *["a"] * 20])
    calls = Calls()
    Worker(queue, calls, batch=50, per_key=3).run(signals=False, until_empty=True)
    calls.check(80)
    most = [max(Counter(item.key for item in call if item.key is not None).values(), default=0) for call in calls.calls]
    assert max(most) == 3


def test_a_handler_of_single_items_gets_one_of_a_key_at_a_time(queue: Queue) -> None:
    produce(queue, ["a"] * 50)
    handled: list[int] = []
    Worker(queue, lambda item: handled.append(item.offset), concurrency=4).run(signals=False, until_empty=True)
    assert handled == list(range(50))


@pytest.mark.parametrize("error", ["failed", "raised", "buried"])
def test_the_later_items_of_a_failed_one_are_handled_again(queue: Queue, error: str) -> None:
    ids = produce(queue, ["a"] * 6 + ["b"] * 2)
    handled: dict[int, list[int]] = defaultdict(list)

    def handle(items: list[Item]) -> None:
        for item in items:
            handled[item.offset].append(item.attempts)
        chosen = [item for item in items if item.offset == 2 and len(handled[2]) == 1]
        if chosen and error == "raised":
            raise ValueError("all of them")
        if chosen:
            raise Failed({ids[2]: Bury("bad") if error == "buried" else ValueError("bad")})

    worker = Worker(queue, handle, batch=20, per_key=6, retry=RetryPolicy(base=0))
    worker.run(signals=False, until_empty=True)
    found = worker.stats()
    assert queue.stats().completed == (7 if error == "buried" else 8)
    assert found.late == 0
    again = {"failed": {2: [1, 2], 3: [1, 1]}, "buried": {2: [1], 3: [1, 1]}, "raised": {0: [1, 2], 1: [1, 1], 2: [1, 1], 6: [1, 2]}}
    assert {offset: handled[offset] for offset in again[error]} == again[error]
    if error != "raised":
        assert handled[1] == [1] and handled[6] == [1], "items before the failed one and of other keys are done"
        assert found.returned == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_key": 2}, "per_key is 2 and batch is 0"),
        ({"per_key": 5, "batch": 4}, "per_key is 5 and batch is 4"),
        ({"per_key": 0, "batch": 4}, "per_key"),
        ({"per_key": 2, "batch": 4, "per_partition": 1}, "per_key is 2 and per_partition 1"),
    ],
)
def test_a_per_key_that_cannot_work_is_refused(queue: Queue, options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Worker(queue, lambda items: None, **options)  # type: ignore[arg-type]


def test_per_key_needs_one_handler(queue: Queue) -> None:
    with pytest.raises(InvalidRequest, match="per_key needs one handler for all items"):
        Worker(queue, batch=4, per_key=2)


def test_handlers_by_kind_get_one_item_of_a_key_at_a_time(queue: Queue) -> None:
    queue.produce_many([NewItem("x", key="k", kind=kind) for kind in ("a", "b") * 20])
    handled: list[int] = []
    worker = Worker(queue, batch=10)
    worker.on("a")(lambda items: handled.extend(item.offset for item in items))
    worker.on("b")(lambda items: handled.extend(item.offset for item in items))
    worker.run(signals=False, until_empty=True)
    assert handled == list(range(40))


def test_an_item_that_follows_in_its_unit_is_not_left_behind() -> None:
    class Leased:
        def __init__(self, key: bytes | None) -> None:
            self.key_bytes = key

    lease, other = object(), object()
    a, b, none = ((lease, Leased(key)) for key in (b"a", b"b", None))
    assert divided_unit([b, a, a], a) == 2  # type: ignore[list-item, arg-type]
    assert divided_unit([b, a, a], b) == 0  # type: ignore[list-item, arg-type]
    assert divided_unit([b, none], none) == 0  # type: ignore[list-item, arg-type]
    assert divided_unit([b, a], (other, a[1])) == 0  # type: ignore[list-item, arg-type]
    assert divided_unit([a, a], a) == 0  # type: ignore[list-item, arg-type]
