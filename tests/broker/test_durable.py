"""What was answered is durable: many callers share a sync, and a killed process takes nothing with it that it had
promised.
"""

import contextlib
import multiprocessing
import random
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from penstock.broker.embedded import EmbeddedBroker
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.log import Buffer, Durability
from penstock.loop.requests import SettlePart, SettleRequest
from penstock.operations import CreateQueue, ListItems
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, run_threads
from tests.broker.storages import BrokerStorage, DirectoryStorage

DISK_SECONDS = 0.002


class CountingFiles(SystemFiles):
    """Real files on a disk that takes its time, and knows what it was asked."""

    def __init__(self) -> None:
        self.syncs = 0
        self.unsynced: set[int] = set()

    def write(self, handle: int, parts: Sequence[Buffer]) -> int:  # type: ignore[override]
        self.unsynced.add(handle)
        return super().write(handle, parts)

    def sync(self, handle: int) -> None:
        self.syncs += 1
        threading.Event().wait(DISK_SECONDS)
        super().sync(handle)
        self.unsynced.discard(handle)


class CountingStorage(BrokerStorage):
    def __init__(self, path: Path, durability: Durability = "fsync") -> None:
        self.files = CountingFiles()
        self._path = path / "data"
        self._durability: Durability = durability

    def open(self, **options: object) -> EmbeddedBroker:
        return EmbeddedBroker.open(self._path, files=self.files, durability=self._durability, **options)  # type: ignore[arg-type]


def many(queue: QueueUnderTest, threads: int, each: int, work: Callable[[int, int], object]) -> None:
    def run(thread: int) -> Callable[[], None]:
        def go() -> None:
            for number in range(each):
                work(thread, number)

        return go

    run_threads(*[run(thread) for thread in range(threads)])


def test_callers_share_a_sync(tmp_path: Path) -> None:
    storage = CountingStorage(tmp_path)
    broker = BrokerUnderTest(storage, threaded=True)
    queue = broker.create()
    before = storage.files.syncs
    many(queue, 16, 25, lambda thread, number: queue.produce(f"{thread}-{number}"))
    syncs = storage.files.syncs - before
    assert 25 <= syncs <= 100, f"{syncs} syncs for 400 produces"
    assert sorted(queue.drain()) == sorted(f"{thread}-{number}" for thread in range(16) for number in range(25))
    broker.embedded.close()


def test_a_lone_caller_is_answered_after_its_own_sync(tmp_path: Path) -> None:
    storage = CountingStorage(tmp_path)
    broker = BrokerUnderTest(storage, threaded=True)
    queue = broker.create(partitions=3)
    for number in range(9):
        before = storage.files.syncs
        queue.produce("item")
        assert storage.files.syncs == before + 1 and not storage.files.unsynced, number
    before = storage.files.syncs
    held = queue.lease(3)
    assert storage.files.syncs == before, "a lease need not be synced"
    held.complete()
    assert storage.files.syncs > before and not storage.files.unsynced
    broker.embedded.close()


def test_partitions_are_synced_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch over eight partitions takes about as long as one sync: all eight are under way at once."""
    storage = CountingStorage(tmp_path)
    broker = BrokerUnderTest(storage, threaded=True)
    queue = broker.create(partitions=8)
    meeting = threading.Barrier(8)
    sync = CountingFiles.sync

    def meet(self: CountingFiles, handle: int) -> None:
        meeting.wait(20)
        sync(self, handle)

    monkeypatch.setattr(CountingFiles, "sync", meet)
    keys = [f"key-{number}" for number in range(200)]
    assert len(queue.produce(*keys, keys=keys)) == 200
    monkeypatch.undo()
    broker.embedded.close()


@pytest.mark.parametrize("durability", ["interval", "os"])
def test_weaker_durability_does_not_wait_for_the_disk(tmp_path: Path, durability: Durability) -> None:
    storage = CountingStorage(tmp_path, durability)
    broker = BrokerUnderTest(storage, threaded=True)
    queue = broker.create()
    before = storage.files.syncs
    for number in range(20):
        queue.produce(str(number))
    assert storage.files.syncs - before <= 2, "but for the one after a rest"
    broker.embedded.close()


# -- a process that is killed -------------------------------------------------------------------------------


def work(root: str, line: Connection) -> None:
    """Produce, lease and complete in several threads, for ever; report what was answered, each once it was."""
    broker = BrokerUnderTest(DirectoryStorage(Path(root), "fsync"), threaded=True)
    queue = QueueUnderTest(
        broker, broker.embedded.call(CreateQueue(name="q", options={"lease_timeout": 1 * SECOND}, partitions=3, exist_ok=True))
    )
    telling = threading.Lock()

    def tell(*message: object) -> None:
        with telling:
            line.send(message)

    def produce(name: str) -> None:
        for number in range(1 << 30):
            text = f"{name}-{number}"
            tell("asked", text)
            queue.produce(text, key=f"key-{number % 7}" if number % 2 else None)
            tell("produced", text)

    def consume() -> None:
        while True:
            held = queue.lease(3, wait=1)
            for item, text in zip(held.ids, held.texts, strict=True):
                part: SettlePart = held.part(item)
                queue.run(SettleRequest("complete", [part]))
                tell("completed", text)

    life = f"{broker.embedded.clock.read().elapsed}"
    for target in (lambda: produce(f"a{life}"), lambda: produce(f"b{life}"), consume):
        threading.Thread(target=target, daemon=True).start()
    threading.Event().wait()


context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


def life(root: str, reports: int) -> list[tuple[str, str]]:
    """Let a child work until it made so many reports, then kill it; all that it said."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(root, theirs), daemon=True)
    process.start()
    theirs.close()
    told: list[tuple[str, str]] = []
    with contextlib.suppress(EOFError):
        while True:
            told.append(ours.recv())
            if len(told) == reports:
                process.kill()
    process.join()
    ours.close()
    assert process.exitcode == -9
    return told


def test_a_killed_process_loses_nothing_that_it_had_answered(tmp_path: Path) -> None:
    rng = random.Random(1)
    asked: set[str] = set()
    produced: set[str] = set()
    completed: set[str] = set()
    for _ in range(8):
        told = life(str(tmp_path), rng.randint(20, 400))
        for verb, text in told:
            {"asked": asked, "produced": produced, "completed": completed}[verb].add(text)
        broker = BrokerUnderTest(DirectoryStorage(tmp_path), threaded=True)
        queue = broker.find()
        listed = queue.call(ListItems(limit=1_000_000))
        there = [one.batch.payloads[one.index].decode() for one in listed]
        left = {one.batch.payloads[one.index].decode() for one in listed if one.state != "completed"}
        assert len(set(there)) == len(there), "nothing is doubled"
        assert produced <= set(there) <= asked
        assert not completed & left, "what was completed stays so"
        broker.embedded.close()
    assert completed and len(produced) > 200
