"""Options of a queue about its files: segments by size and age, compression, and the sync interval."""

import random
from datetime import timedelta

import pytest

import penstock
from penstock.testing import ManualClock, SimulatedFiles
from tests.api.both_apis import run_all_turns

ROOT = "/data"
TEXT = b"a line of text that repeats itself; " * 200
NOISE = random.Random(7).randbytes(7_200)


def open_manual(files: SimulatedFiles, clock: ManualClock, **options: object) -> penstock.Broker:
    return penstock.open(ROOT, files=files, clock=clock, threaded=False, **options)  # type: ignore[arg-type]


def size_of(queue: penstock.Queue) -> int:
    return queue.stats().partitions[0].size_bytes


@pytest.fixture
def files() -> SimulatedFiles:
    return SimulatedFiles()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def run_timers(broker: penstock.Broker) -> None:
    """Run everything that is due."""
    for queue in broker.queues():
        broker.queue(queue.name).stats()
    run_all_turns(broker)


def log_files(files: SimulatedFiles, queue: penstock.Queue) -> int:
    folder = f"{queue.incarnation:016x}"
    return sum(folder in path and path.endswith(".log") for path in files.contents())


def test_each_queue_has_segments_of_its_own_size(files: SimulatedFiles, clock: ManualClock) -> None:
    with open_manual(files, clock, compression=False) as broker:
        small, large = broker.create_queue("small", segment_bytes=8_192), broker.create_queue("large")
        for queue in (small, large):
            for _ in range(6):
                queue.produce(NOISE)
        assert (log_files(files, small), log_files(files, large)) == (4, 1)
        large.update(segment_bytes=8_192)
        large.produce(NOISE)  # the newest segment is over the new limit
        assert log_files(files, large) == 2


def test_a_segment_is_closed_at_the_age_of_its_queue(files: SimulatedFiles, clock: ManualClock) -> None:
    with open_manual(files, clock) as broker:
        young, old = broker.create_queue("young", segment_age=60, retention=0), broker.create_queue("old", retention=0)
        for queue in (young, old):
            queue.produce(b"a")
        clock.advance(timedelta(seconds=61))
        for queue in (young, old):
            queue.produce(b"b")
        assert (log_files(files, young), log_files(files, old)) == (2, 1)
        old.update(segment_age=30)
        old.produce(b"c")
        assert log_files(files, old) == 2


def test_a_segment_of_an_idle_queue_is_closed_by_its_age(files: SimulatedFiles, clock: ManualClock) -> None:
    with open_manual(files, clock) as broker:
        queue = broker.create_queue("idle", segment_age=60)
        queue.produce(b"a")
        clock.advance(timedelta(seconds=61))
        run_timers(broker)
        assert log_files(files, queue) == 2


def test_compression_can_be_chosen_for_a_queue_and_changed(files: SimulatedFiles, clock: ManualClock) -> None:
    with open_manual(files, clock, compression=False) as broker:
        queue = broker.create_queue("orders")

        def growth() -> int:
            before = size_of(queue)
            queue.produce(TEXT)
            return size_of(queue) - before

        assert growth() > len(TEXT)  # as the broker
        queue.update(compression=True)
        assert growth() < len(TEXT) // 10
        queue.update(compression_min_bytes=len(TEXT) * 2)
        assert growth() > len(TEXT)
        queue.update(compression_min_bytes=None)
        assert growth() < len(TEXT) // 10
        queue.update(compression=None)
        assert growth() > len(TEXT)
        assert queue.lease(9).payloads == [TEXT] * 5


def test_a_higher_level_makes_smaller_files(files: SimulatedFiles, clock: ManualClock) -> None:
    words = random.Random(1).choices([f"word{number}" for number in range(500)], k=20_000)
    with open_manual(files, clock) as broker:
        quick, thorough = broker.create_queue("quick", compression_level=1), broker.create_queue("thorough", compression_level=19)
        for queue in (quick, thorough):
            queue.produce(" ".join(words))
        assert size_of(thorough) < size_of(quick) * 0.95


def test_the_options_hold_after_the_broker_is_opened_again(files: SimulatedFiles, clock: ManualClock) -> None:
    with open_manual(files, clock, compression=False) as broker:
        before = broker.create_queue("orders", segment_bytes=8_192, compression=True, segment_age=60).info()
    with open_manual(files, clock, compression=False) as broker:
        queue = broker.queue("orders")
        assert queue.info() == before
        queue.produce(TEXT)
        assert size_of(queue) < len(TEXT) // 2
        for _ in range(3):
            queue.produce(NOISE)
        assert log_files(files, queue) == 2


# -- the sync interval -------------------------------------------------------------------------------


def survivors(files: SimulatedFiles) -> set[int]:
    """How many items are there after a power cut, in ten trials of what it does with changes that were not synced."""
    found = set()
    for seed in range(10):
        disk = files.copy()
        disk._rng = random.Random(seed)
        disk.crash()
        with open_manual(disk, ManualClock()) as broker:
            found.add(broker.queue("orders").stats().ready)
    return found


def test_a_power_cut_loses_at_most_the_sync_interval(files: SimulatedFiles, clock: ManualClock) -> None:
    with open_manual(files, clock) as broker:
        queue = broker.create_queue("orders", durability="interval", sync_interval=5)
        clock.advance(timedelta(seconds=5))
        run_timers(broker)  # its creation is synced
        queue.produce(b"a")
        assert 0 in survivors(files)
        clock.advance(timedelta(seconds=4.9))
        run_timers(broker)
        queue.produce(b"b")
        assert 0 in survivors(files)
        clock.advance(timedelta(seconds=0.1))
        run_timers(broker)
        assert survivors(files) == {2}


def test_a_shorter_interval_applies_at_once(files: SimulatedFiles, clock: ManualClock) -> None:
    with open_manual(files, clock) as broker:
        queue = broker.create_queue("orders", durability="interval", sync_interval=3600)
        queue.produce(b"a")
        queue.update(sync_interval=0.01)
        clock.advance(timedelta(seconds=0.01))
        run_timers(broker)
        assert survivors(files) == {1}


def test_an_idle_queue_syncs_and_publishes_nothing(files: SimulatedFiles, clock: ManualClock) -> None:
    with open_manual(files, clock) as broker:
        queue = broker.create_queue("orders", durability="interval", sync_interval=0.05)
        queue.produce(b"a")
        for _ in range(4):
            clock.advance(timedelta(seconds=0.2))
            run_timers(broker)
        before = files.calls
        for _ in range(10):
            clock.advance(timedelta(seconds=0.2))
            run_timers(broker)
        assert files.calls == before
