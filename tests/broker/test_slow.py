"""A disk that does not answer: its partition is slow, the others work, and it recovers when the disk answers."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import queries
from penstock.broker.embedded import EmbeddedBroker
from penstock.logs.files.filesystem import Mode, SystemFiles
from penstock.loop.partition_handle import GRACE_AFTER_SLOW, PartitionHandle
from penstock.loop.requests import FunctionRequest, LeaseRequest, ProduceRequest, StoredPart
from penstock.operations import PauseQueue, ReadStats
from penstock.words.clock import SECOND
from penstock.words.errors import OutcomeUnknown, QueueBusy, StorageFailed
from tests.broker.broker_under_test import (
    WAIT_SECONDS,
    BrokerUnderTest,
    QueueUnderTest,
    SubmittedRequest,
    batch_of,
    ids_of,
    keys_at,
    refusal,
    wait_until,
)
from tests.broker.storages import BrokerStorage, SimulatedStorage

SLOW = 1
"""The partition whose disk hangs."""


# -- by hand -----------------------------------------------------------------------------------------


class QueueWithSlowPartition:
    """A queue of three partitions, one of which stays in I/O for as long as a test wants."""

    def __init__(self, broker: BrokerUnderTest) -> None:
        self.broker = broker
        self.queue = broker.create(partitions=3)
        self.key = keys_at(self.queue, SLOW)[0]
        self.others = [keys_at(self.queue, number)[0] for number in (0, 2)]
        self.hangs = False
        self.queue.loop.stays_in_io = lambda handle: self.hangs and handle.number == SLOW

    def hang(self) -> SubmittedRequest:
        """The disk hangs from now on; gives the answer that waits for it."""
        self.hangs = True
        asked = self.queue.submit(ProduceRequest(batch_of("in flight", key=self.key), deadline=self.broker.deadline(10)))
        self.broker.turn()
        assert not asked.done
        return asked

    def slow(self) -> SubmittedRequest:
        """It hangs for so long that it counts as slow."""
        asked = self.hang()
        self.broker.advance_in_steps(0.6)
        return asked

    def answer(self) -> None:
        """The disk answers at last."""
        self.hangs = False
        self.broker.turn()

    @property
    def handle(self) -> PartitionHandle:
        return self.queue.loop.engine.handles[SLOW]

    def statuses(self) -> dict[int, str]:
        return {one.partition: one.status for one in self.queue.stats().partitions}


@pytest.fixture
def hanging() -> Iterator[QueueWithSlowPartition]:
    broker = BrokerUnderTest(SimulatedStorage())
    found = QueueWithSlowPartition(broker)
    yield found
    found.answer()
    broker.check()
    broker.embedded.close()


def test_the_other_partitions_produce_and_lease(hanging: QueueWithSlowPartition) -> None:
    queue = hanging.queue
    hanging.hang()
    for number in range(3):  # before it counts as slow, and after
        for key in hanging.others:
            queue.produce(f"{key}-{number}", key=key)
        held = queue.lease(10)
        assert sorted(held.texts) == sorted(f"{key}-{number}" for key in hanging.others)
        assert held.complete() == 2
        hanging.broker.advance_in_steps(0.4)


def test_slowness_and_its_end_are_logged(hanging: QueueWithSlowPartition, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock")
    hanging.slow()
    hanging.broker.advance_in_steps(5)
    hanging.answer()
    hanging.broker.turn()
    slow, well = [(record.levelname, record.getMessage()) for record in caplog.records if f"partition {SLOW} of" in record.getMessage()]
    assert slow[0] == "WARNING" and slow[1].startswith(f"partition {SLOW} of queue 'q' is slow: its disk has not answered for 0.")
    assert well == ("INFO", f"partition {SLOW} of queue 'q' works again")


def test_items_without_a_key_go_elsewhere(hanging: QueueWithSlowPartition) -> None:
    """At once: items without a key do not wait for a partition in I/O."""
    hanging.hang()
    for wait in (0, 0, 0.6, 0):
        hanging.broker.advance_in_steps(wait)
        answer = hanging.queue.produce_batch(batch_of("anywhere"))
        assert answer[0].refused is None and answer[0].partition != SLOW


def test_requests_from_before_it_was_slow_share_the_next_commit(hanging: QueueWithSlowPartition) -> None:
    first = hanging.hang()
    second = hanging.queue.submit(ProduceRequest(batch_of("second", key=hanging.key)))
    third = hanging.queue.submit(ProduceRequest(batch_of("third", key=hanging.key)))
    hanging.broker.turn()
    assert not (first.done or second.done or third.done)
    hanging.answer()
    assert [ids_of(asked.result, 1) for asked in (first, second, third)] == [[f"{SLOW}-{offset}"] for offset in range(3)]


def test_keyed_items_and_settles_of_a_slow_partition_are_refused_as_retryable(hanging: QueueWithSlowPartition) -> None:
    queue = hanging.queue
    queue.produce("held", key=hanging.key)
    held = queue.lease(1)
    hanging.slow()
    with pytest.raises(StorageFailed, match=r"partition 1 is slow \(its disk has not answered for .*try again in a moment") as caught:
        queue.produce("later", key=hanging.key)
    assert caught.value.retryable
    refused = refusal(queue.settle("complete", held.parts)[0])
    assert isinstance(refused, StorageFailed) and refused.retryable
    hanging.answer()
    assert held.complete() == 1


def test_a_wide_batch_is_refused_only_in_its_slow_part(hanging: QueueWithSlowPartition) -> None:
    hanging.slow()
    keys = [hanging.others[0], hanging.key, hanging.others[1]]
    answer = hanging.queue.produce_batch(batch_of("a", "b", "c", keys=keys))
    assert sorted((part.partition, part.refused is None) for part in answer) == [(0, True), (SLOW, False), (2, True)]


def test_a_batch_waits_only_for_partitions_in_io(hanging: QueueWithSlowPartition) -> None:
    """It was run before the disk hung: at its deadline it learns which parts are stored and which are unknown."""
    hanging.hangs = True
    keys = [hanging.others[0], hanging.key, hanging.others[1]]
    asked = hanging.queue.submit(ProduceRequest(batch_of("a", "b", "c", keys=keys), deadline=hanging.broker.deadline(5)))
    hanging.broker.turn()
    hanging.broker.advance_in_steps(4)
    assert not asked.done
    hanging.broker.advance_in_steps(2)
    found: dict[int, StoredPart] = {part.partition: part for part in asked.result}
    assert isinstance(refusal(found.pop(SLOW)), OutcomeUnknown)
    assert all(part.stored is not None for part in found.values())


def test_every_call_ends_by_its_own_deadline(hanging: QueueWithSlowPartition) -> None:
    queue, broker = hanging.queue, hanging.broker
    queue.produce("held", key=hanging.key)
    held = queue.lease(1)
    first = hanging.hang()
    waits = {seconds: queue.submit(LeaseRequest(5, deadline=broker.deadline(seconds))) for seconds in (0, 2, 4)}
    named = queue.submit(ProduceRequest(batch_of("named", key=hanging.key), b"request", broker.deadline(3)))
    broker.advance_in_steps(0.6)
    assert waits[0].result == []
    broker.advance_in_steps(2)
    assert waits[2].result == [] and not waits[4].done
    broker.advance_in_steps(2)
    assert waits[4].result == []
    with pytest.raises(QueueBusy):
        _ = named.result
    broker.advance_in_steps(8)
    assert isinstance(refusal(first.result[0]), OutcomeUnknown)
    hanging.answer()
    assert held.complete() == 1
    assert queue.drain() == ["in flight"], "both were possible; it was stored"


def test_an_empty_lease_is_answered_although_some_partition_is_always_in_io(
    hanging: QueueWithSlowPartition,
) -> None:
    queue, out = hanging.queue, 0
    queue.loop.stays_in_io = lambda handle: handle.number == out
    keys = [keys_at(queue, number)[0] for number in range(3)]
    later = queue.owner.after(100)
    scheduled = [queue.submit(ProduceRequest(batch_of("a", key=keys[0], at=later)))]
    queue.owner.turn()
    asked = queue.submit(LeaseRequest(1, deadline=queue.owner.deadline(0)))
    queue.owner.turn()
    assert not asked.done, "nobody can say yet"
    for out in (1, 2):
        scheduled.append(queue.submit(ProduceRequest(batch_of("b", key=keys[out], at=later))))
        queue.owner.turn()
    assert asked.done and asked.result == []
    out = -1
    queue.owner.turn()
    assert all(one.done for one in scheduled)


def test_stats_show_a_slow_partition_with_a_warning(hanging: QueueWithSlowPartition) -> None:
    hanging.slow()
    stats = hanging.queue.stats()
    assert {one.partition: one.status for one in stats.partitions} == {0: "active", SLOW: "slow", 2: "active"}
    assert any(f"partition {SLOW}" in warning for warning in stats.warnings)
    hanging.answer()
    assert set(hanging.statuses().values()) == {"active"}
    assert not any(f"partition {SLOW}" in warning for warning in hanging.queue.stats().warnings)


def test_a_slow_partition_whose_disk_fails_at_last_is_failing(hanging: QueueWithSlowPartition) -> None:
    hanging.slow()
    storage = hanging.broker.storage
    assert isinstance(storage, SimulatedStorage)
    for call in range(1, 100):
        storage.files.fail(storage.files.calls + call, errno.EIO)
    hanging.answer()
    storage.files.clear_faults()
    assert hanging.statuses()[SLOW] == "failing"
    hanging.broker.advance_in_steps(6)


def test_an_administrative_operation_does_not_wait_for_a_slow_partition(hanging: QueueWithSlowPartition) -> None:
    """A pause is applied to the slow partition when it recovers."""
    hanging.slow()
    hanging.queue.call(PauseQueue(lease=True))
    hanging.queue.produce("kept", key=hanging.others[0])
    assert hanging.handle.in_io
    hanging.answer()
    assert hanging.queue.lease(5).texts == []
    assert hanging.handle.state.paused_lease


def test_a_slow_partition_recovers_with_the_writes_that_it_committed(hanging: QueueWithSlowPartition) -> None:
    asked = hanging.slow()
    hanging.answer()
    assert ids_of(asked.result, 1) == [f"{SLOW}-0"]
    hanging.queue.produce("again", key=hanging.key)
    assert hanging.queue.drain() == ["in flight", "again"]


def test_no_lease_ends_for_two_seconds_after_a_slow_partition_recovers(hanging: QueueWithSlowPartition) -> None:
    queue, broker = hanging.queue, hanging.broker
    queue.produce("one", "two", keys=[hanging.key, keys_at(queue, SLOW, 2)[1]])
    first, second = queue.lease(1, timeout=5), queue.lease(1, timeout=5)
    hanging.hang()
    broker.advance_in_steps(20)
    hanging.answer()
    broker.advance_in_steps(GRACE_AFTER_SLOW / SECOND - 0.1)
    assert queue.lease(5).texts == [], "whoever had them before has them still"
    assert first.complete() == 1
    broker.advance_in_steps(0.2)
    assert second.texts[0] in queue.lease(5).texts, "then it ends as leases do"


def test_a_lease_that_ended_while_its_answer_waited_is_not_given(hanging: QueueWithSlowPartition) -> None:
    """The answer waits for two partitions; the lease of the first ends before the second has answered."""
    queue, broker = hanging.queue, hanging.broker
    queue.produce("here", key=hanging.others[0])
    queue.produce("there", key=hanging.key)
    hanging.hangs = True
    asked = queue.submit(LeaseRequest(5, timeout=1 * SECOND, deadline=broker.deadline(30)))
    beside = queue.submit(ProduceRequest(batch_of("beside", key=hanging.key)))
    broker.turn()
    broker.advance_in_steps(10)
    hanging.answer()
    broker.advance_in_steps(5)
    assert beside.result[0].refused is None
    assert all(one.seconds > 0 for one in asked.result)


def test_a_lease_without_a_wait_finds_what_others_have_when_its_partition_becomes_slow(hanging: QueueWithSlowPartition) -> None:
    """An empty answer would say that nothing is ready."""
    queue, broker = hanging.queue, hanging.broker
    queue.produce("there", key=hanging.key)
    broker.advance_in_steps(3)
    queue.produce("here", key=hanging.others[0])
    hanging.hangs = True
    asked = queue.submit(LeaseRequest(1, deadline=broker.deadline(0)))
    queue.submit(ProduceRequest(batch_of("beside", key=hanging.key)))
    broker.turn()
    assert not asked.done, "the older item is leased; its partition is in I/O"
    broker.advance_in_steps(1)
    assert asked.leased.texts == ["here"]
    hanging.answer()
    broker.advance_in_steps(5)
    assert queue.lease(5).texts == ["there"], "the item returned"


def test_an_item_leased_for_nobody_returns_when_its_partition_was_not_slow(hanging: QueueWithSlowPartition) -> None:
    """The thread that syncs began late: the request's time was over first, and then the sync came in time."""
    queue, broker = hanging.queue, hanging.broker
    queue.produce("there", key=hanging.key)
    hanging.hangs = True
    asked = queue.submit(LeaseRequest(1, deadline=broker.deadline(0)))
    queue.submit(ProduceRequest(batch_of("beside", key=hanging.key)))
    broker.turn()
    hanging.handle.io_began_at += SECOND
    broker.advance_in_steps(1)
    assert hanging.handle.undelivered_leases and not hanging.handle.slow
    hanging.answer()
    assert asked.leased.texts == ["there"]


def test_a_lease_without_a_wait_fails_when_its_only_partition_becomes_slow() -> None:
    broker = BrokerUnderTest(SimulatedStorage())
    queue = broker.create(partitions=1)
    queue.produce("item")
    queue.loop.stays_in_io = lambda handle: True
    asked = queue.submit(LeaseRequest(1, deadline=broker.deadline(0)))
    queue.submit(ProduceRequest(batch_of("beside")))
    broker.turn()
    broker.advance_in_steps(1)
    with pytest.raises(StorageFailed, match="slow"):
        asked.result  # noqa: B018
    queue.loop.stays_in_io = lambda handle: False
    broker.advance_in_steps(5)
    assert sorted(queue.lease(5).texts) == ["beside", "item"]
    broker.embedded.close()


def repeat_while_hanging(hanging: QueueWithSlowPartition, wait: float = 0) -> SubmittedRequest:
    """Repeat the lease request `r` in a turn that also writes to the partition of its lease, whose disk hangs."""
    hanging.hangs = True
    asked = hanging.queue.submit(LeaseRequest(1, request=b"r", deadline=hanging.broker.deadline(wait)))
    hanging.queue.submit(ProduceRequest(batch_of("beside", key=hanging.key)))
    hanging.broker.turn()
    assert not asked.done
    return asked


def test_a_holder_keeps_its_lease_when_its_request_is_repeated_and_the_disk_does_not_answer(hanging: QueueWithSlowPartition) -> None:
    queue, broker = hanging.queue, hanging.broker
    queue.produce("there", key=hanging.key)
    held = queue.lease(1, request=b"r")
    queue.produce("here", key=hanging.others[0])
    asked = repeat_while_hanging(hanging)
    broker.advance_in_steps(1)
    with pytest.raises(OutcomeUnknown, match="repeat with the same request id"):
        asked.result  # noqa: B018
    hanging.answer()
    broker.advance_in_steps(1)
    assert queue.lease(5).texts == ["here"], "the repetition has not leased it, and the other item is with its holder"
    assert queue.lease(1, request=b"r").texts == held.texts
    assert held.complete() == 1


def test_a_holder_keeps_its_lease_when_the_caller_of_a_repetition_leaves(hanging: QueueWithSlowPartition) -> None:
    queue, broker = hanging.queue, hanging.broker
    queue.produce("there", key=hanging.key)
    held = queue.lease(1, request=b"r")
    repeat_while_hanging(hanging, wait=10).cancel()
    hanging.answer()
    broker.advance_in_steps(1)
    answered = queue.submit(LeaseRequest(1, request=b"r"))
    broker.turn()
    assert answered.leased.texts == held.texts
    answered.cancel()
    broker.advance_in_steps(1)
    assert queue.lease(5).texts == []
    assert held.complete() == 1


@pytest.mark.parametrize("taken_back_by_a_turn", [False, True])
def test_a_repetition_is_not_given_a_lease_that_is_returned_because_its_first_caller_left(
    hanging: QueueWithSlowPartition, taken_back_by_a_turn: bool
) -> None:
    queue, broker = hanging.queue, hanging.broker
    queue.produce("there", key=hanging.key)
    repeat_while_hanging(hanging, wait=10).cancel()
    again = queue.submit(LeaseRequest(1, request=b"r", deadline=broker.deadline(10)))
    broker.turn()
    if taken_back_by_a_turn:  # as with threads, when a turn begins before the disk's thread takes it back
        queue.loop._end_io = queue.loop.engine.note_io_over  # type: ignore[method-assign, assignment]
        queue.loop.run_io(hanging.handle)
        del queue.loop._end_io
    hanging.answer()
    broker.advance_in_steps(1)
    given = again.leased
    assert given.texts == [] or given.complete() == 1


def test_a_resize_while_one_is_slow_leaves_its_slots_alone(hanging: QueueWithSlowPartition) -> None:
    """The queue may grow meanwhile; a resize that would move slots of the slow partition is refused until it
    recovers.
    """
    owners = hanging.queue.loop.engine.map.owners
    its_own = [slot for slot, owner in enumerate(owners) if owner == SLOW]
    hanging.slow()
    hanging.queue.resize(5)
    owners = hanging.queue.loop.engine.map.owners
    assert [slot for slot, owner in enumerate(owners) if owner == SLOW] == its_own
    with pytest.raises(StorageFailed, match="slow"):
        hanging.queue.resize(1)
    hanging.answer()
    hanging.queue.resize(1)
    assert len(hanging.queue.info.active) == 1


def test_a_waiting_lease_does_not_keep_the_loop_busy(hanging: QueueWithSlowPartition) -> None:
    """The request waits for a partition in I/O: no turn helps until the I/O ends or the partition is slow."""
    hanging.hang()
    asked = hanging.queue.submit(LeaseRequest(1))
    hanging.broker.turn()
    assert not asked.done
    now, next_run = hanging.broker.embedded.clock.read().elapsed, hanging.queue.loop.engine.next_run
    assert next_run is not None and next_run > now


def test_a_request_whose_caller_gave_up_does_not_keep_the_loop_busy(hanging: QueueWithSlowPartition) -> None:
    """Its answer waits for the partition still; its deadline in the past is no reason for a turn."""
    asked = hanging.hang()
    asked.request.finish(error=OutcomeUnknown("the caller gave up"))
    hanging.broker.advance_in_steps(11)
    next_run = hanging.queue.loop.engine.next_run
    assert next_run is None or next_run > hanging.broker.embedded.clock.read().elapsed


def test_statistics_wait_for_a_partition_that_a_later_request_opens() -> None:
    broker = BrokerUnderTest(SimulatedStorage())
    queue = broker.create(partitions=2)
    keys = [keys_at(queue, number)[0] for number in (0, 1)]
    queue.produce("a", key=keys[1])
    loop = queue.loop
    for _ in range(7):  # partition 1 is idle for over a minute, and is closed
        queue.produce("b", key=keys[0])
        broker.advance_in_steps(10)
    busy, idle = loop.engine.handles[0], loop.engine.handles[1]
    assert idle.closed
    loop.stays_in_io = lambda handle: True
    queue.submit(ProduceRequest(batch_of("b", key=keys[0])))
    loop.turn()
    statistics = queue.submit(
        FunctionRequest(lambda engine: queries.stats(engine, ReadStats(queue=queue.incarnation)), needs_all_open=False)
    )
    loop.turn()
    assert busy.in_io and not statistics.done
    loop.run_io(busy)
    produced = queue.submit(ProduceRequest(batch_of("a", key=keys[1])))
    loop.turn()  # the statistics come first, and the produce opens partition 1
    loop.stays_in_io = lambda handle: False
    broker.turn()
    assert [one.status for one in statistics.result.partitions] == ["active", "active"]
    assert ids_of(produced.result, 1) == ["1-1"]
    broker.embedded.close()


def test_close_waits_for_a_slow_partition_and_answers_every_request(hanging: QueueWithSlowPartition) -> None:
    asked = hanging.slow()
    behind = hanging.queue.submit(LeaseRequest(1, deadline=hanging.broker.deadline(60)))
    hanging.broker.embedded.close()
    assert ids_of(asked.result, 1) == [f"{SLOW}-0"]
    assert behind.done
    hanging.broker.embedded = hanging.broker._open()
    assert hanging.broker.find().drain() == ["in flight"]


# -- with threads --------------------------------------------------------------------------------------


class HangingFiles(SystemFiles):
    """Real files; the sync of one partition waits until a test ends that."""

    def __init__(self) -> None:
        super().__init__()
        self.path = ""
        """Part of the path of the files whose sync waits; empty is none."""
        self.waiting = threading.Semaphore(0)
        """Released by every sync that waits."""
        self.go_on = threading.Event()
        self._paths: dict[int, str] = {}

    def open(self, path: str, mode: Mode) -> int:
        handle = super().open(path, mode)
        self._paths[handle] = path
        return handle

    def sync(self, handle: int) -> None:
        if self.path and self.path in self._paths.get(handle, ""):
            self.waiting.release()
            assert self.go_on.wait(WAIT_SECONDS), "nobody let the sync go on"
        super().sync(handle)

    def hang(self, partition: int) -> None:
        self.go_on.clear()
        self.path = f"/{partition:05d}/"

    def answer(self) -> None:
        self.path = ""
        self.go_on.set()


class HangingStorage(BrokerStorage):
    """A real directory whose disk may hang."""

    def __init__(self, path: Path) -> None:
        self.files = HangingFiles()
        self._path = path / "data"

    def open(self, **options: Any) -> EmbeddedBroker:
        return EmbeddedBroker.open(self._path, files=self.files, **options)


class ThreadedQueueWithSlowPartition:
    """A broker with threads, and a queue of which one partition's disk may hang."""

    def __init__(self, path: Path) -> None:
        storage = HangingStorage(path)
        self.files = storage.files
        self.broker = BrokerUnderTest(storage, threaded=True)
        self.queue: QueueUnderTest = self.broker.create(partitions=3)
        self.key = keys_at(self.queue, SLOW)[0]
        self.others = [keys_at(self.queue, number)[0] for number in (0, 2)]

    def hang(self) -> SubmittedRequest:
        """The disk hangs, and somebody waits for it."""
        self.files.hang(SLOW)
        asked = self.queue.submit(ProduceRequest(batch_of("in flight", key=self.key)))
        assert self.files.waiting.acquire(timeout=WAIT_SECONDS)
        return asked

    def status(self) -> str:
        return next(one.status for one in self.queue.stats().partitions if one.partition == SLOW)


@pytest.fixture
def slow_queue(tmp_path: Path) -> Iterator[ThreadedQueueWithSlowPartition]:
    found = ThreadedQueueWithSlowPartition(tmp_path)
    yield found
    found.files.answer()
    found.broker.embedded.close()


def test_with_threads_the_others_work_while_a_sync_hangs(slow_queue: ThreadedQueueWithSlowPartition) -> None:
    asked = slow_queue.hang()
    for number in range(20):
        slow_queue.queue.produce(f"anywhere-{number}")
        slow_queue.queue.produce(f"keyed-{number}", key=slow_queue.others[number % 2])
    assert len(slow_queue.queue.drain()) == 40
    assert not asked.done
    slow_queue.files.answer()
    wait_until(lambda: asked.done)
    assert ids_of(asked.result, 1) == [f"{SLOW}-0"]


def test_with_threads_a_hanging_partition_becomes_slow_and_recovers(slow_queue: ThreadedQueueWithSlowPartition) -> None:
    slow_queue.hang()
    wait_until(lambda: slow_queue.status() == "slow")
    with pytest.raises(StorageFailed, match="slow"):
        slow_queue.queue.produce("later", key=slow_queue.key)
    slow_queue.files.answer()
    wait_until(lambda: slow_queue.status() == "active")
    slow_queue.queue.produce("again", key=slow_queue.key)
    assert slow_queue.queue.drain() == ["in flight", "again"]


def test_with_threads_a_caller_of_the_slow_partition_ends_by_its_deadline(slow_queue: ThreadedQueueWithSlowPartition) -> None:
    """It waits for its disk itself, and gets OutcomeUnknown."""
    slow_queue.hang()
    request = ProduceRequest(batch_of("mine", key=slow_queue.key), deadline=slow_queue.broker.deadline(0.1))
    with pytest.raises((QueueBusy, StorageFailed)):
        ids_of(slow_queue.queue.run(request), 1)


def test_with_threads_close_waits_for_the_disk_and_answers_every_request(slow_queue: ThreadedQueueWithSlowPartition) -> None:
    asked = slow_queue.hang()
    closing = threading.Thread(target=slow_queue.broker.embedded.close)
    closing.start()
    wait_until(lambda: slow_queue.broker.embedded._closed)
    also_closing = threading.Thread(target=slow_queue.broker.embedded.close)
    also_closing.start()
    also_closing.join(0.1)
    assert also_closing.is_alive(), "whoever closes it waits until it is closed"
    assert not asked.done
    slow_queue.files.answer()
    for thread in (closing, also_closing):
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    assert ids_of(asked.result, 1) == [f"{SLOW}-0"]


def test_with_threads_others_are_used_while_a_partition_is_being_opened(slow_queue: ThreadedQueueWithSlowPartition, tmp_path: Path) -> None:
    """Without summaries, as after a kill: how full it is is not known, and a keyed item waits for it."""
    slow_queue.queue.produce("before", key=slow_queue.key)
    slow_queue.broker.embedded.close()
    for summary in tmp_path.glob("**/summary"):
        summary.unlink()
    slow_queue.files.hang(SLOW)
    slow_queue.broker.embedded = slow_queue.broker._open()
    assert slow_queue.files.waiting.acquire(timeout=WAIT_SECONDS)
    asked = slow_queue.queue.submit(ProduceRequest(batch_of("keyed", key=slow_queue.key)))
    found = {slow_queue.queue.produce(f"anywhere-{number}")[0].partition("-")[0] for number in range(10)}
    assert found <= {"0", "2"} and not asked.done
    slow_queue.files.answer()
    wait_until(lambda: asked.done)
    assert ids_of(asked.result, 1) == [f"{SLOW}-1"]


def interrupted(work: Callable[[], object]) -> None:
    """Do the work; it must raise KeyboardInterrupt."""
    with pytest.raises(KeyboardInterrupt):
        work()


def test_with_threads_an_interrupted_sync_does_not_affect_other_callers(
    slow_queue: ThreadedQueueWithSlowPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread finishes its sync; the requests that shared it are answered, and their items are stored."""
    caller = threading.get_ident()
    right = slow_queue.files.sync

    def sync(handle: int) -> None:
        if threading.get_ident() == caller and f"/{SLOW:05d}/" in slow_queue.files._paths.get(handle, ""):
            monkeypatch.setattr(slow_queue.files, "sync", right)
            raise KeyboardInterrupt
        right(handle)

    monkeypatch.setattr(slow_queue.files, "sync", sync)
    slow_queue.queue.loop.engine.handles[SLOW].avoid_until = 0  # a caller waits itself only for a disk that was not late before
    shared = ProduceRequest(batch_of("shared", key=slow_queue.key))
    slow_queue.queue.loop.enter(shared)  # in the inbox: whoever leads the next turn takes it along
    interrupted(lambda: slow_queue.queue.produce("mine", key=slow_queue.key))
    wait_until(lambda: shared.done)
    assert ids_of(shared.result(), 1)
    assert sorted(slow_queue.queue.drain()) == ["mine", "shared"]
    slow_queue.queue.produce("later", key=slow_queue.key)
    assert slow_queue.queue.drain() == ["later"]
