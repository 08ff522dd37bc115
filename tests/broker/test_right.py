"""The consumer right: only its holder leases from the queue."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import OutcomeUnknown, QueueHeld, QueueNotFound, StorageFailed
from penstock.operations import EndStream, TakeGrant
from penstock.reports import GrantAnswer
from penstock.rules.catalog import ConsumerRightSet
from penstock.testing import SimulatedFiles
from penstock.words.clock import MINUTE, SECOND
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, wait_until
from tests.broker.grants import renew_operation, take_grant_operation
from tests.broker.other_process import ask_owner, other_process, process_inbox
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage
from tests.worker.harness import running_worker

TIMEOUT = 10
US, THEM = "us", "them"


def take(
    broker: BrokerUnderTest, queue: QueueUnderTest, stream: str = US, want: int = 0, timeout: float = TIMEOUT, done: int = 0
) -> GrantAnswer:
    return ask_owner(broker, queue, take_grant_operation(stream, done=done, want=want, per_key=10, timeout=int(timeout * SECOND)))


def refused(queue: QueueUnderTest, consumer: str = "other") -> bool:
    """Whether another consumer is refused a lease."""
    try:
        queue.lease(1, consumer=consumer).retry()
    except QueueHeld:
        return True
    return False


def test_only_the_holder_of_the_right_leases(file_broker: BrokerUnderTest) -> None:
    queue, free = file_broker.create(), file_broker.create("free")
    queue.produce("a", "b")
    free.produce("c")
    assert not refused(queue)
    take(file_broker, queue)
    assert refused(queue) and refused(queue, "") and not refused(free)
    with pytest.raises(QueueHeld, match=r"consumed by spark:us, .* wait until its right has ended"):
        queue.lease(1)
    assert queue.stats().holder == "spark:us" and free.stats().holder == ""
    assert queue.lease(1, consumer="spark:us"), "the holder itself does"
    queue.produce("d")
    assert queue.stats().ready == 2, "all but leasing goes on"


def test_waiting_leases_of_other_consumers_are_refused(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    waiting, own = queue.submit_lease(consumer="other"), queue.submit_lease(consumer="spark:us", wait=30)
    take(file_broker, queue)
    with pytest.raises(QueueHeld):
        _ = waiting.result
    assert not own.done
    queue.produce("a")
    assert own.leased.texts == ["a"]


def test_a_right_ends_when_it_is_not_renewed(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    take(file_broker, queue)
    file_broker.advance_in_steps(TIMEOUT - 1)
    assert refused(queue)
    file_broker.advance_in_steps(1)
    assert not refused(queue) and queue.stats().holder == ""


def test_a_right_lasts_while_it_is_renewed(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    take(file_broker, queue)
    for _ in range(5):
        file_broker.advance_in_steps(TIMEOUT - 1)
        assert ask_owner(file_broker, queue, renew_operation(US, TIMEOUT * SECOND)) is None
    assert refused(queue)
    ask_owner(file_broker, queue, renew_operation(US, TIMEOUT * 2 * SECOND))
    file_broker.advance_in_steps(TIMEOUT + 1)
    assert refused(queue), "the last word counts"


def test_a_right_survives_a_restart_of_the_owner(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    take(file_broker, queue)
    for end in (file_broker.restart, file_broker.kill):
        file_broker.advance_in_steps(TIMEOUT - 1)
        end()
        assert refused(queue)
    file_broker.advance_in_steps(TIMEOUT - 1)
    assert refused(queue), "it has its full time again"
    file_broker.advance_in_steps(1)
    assert not refused(queue)


def test_a_right_that_has_ended_is_not_restored_at_opening(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    take(file_broker, queue)
    file_broker.advance_in_steps(TIMEOUT)
    process_inbox(file_broker)
    file_broker.kill()
    assert not refused(queue)


def test_a_stream_that_ends_gives_up_its_right(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    take(file_broker, queue)
    ask_owner(file_broker, queue, EndStream(stream=THEM, run=""))
    assert refused(queue), "only by its holder"
    ask_owner(file_broker, queue, EndStream(stream=US, run=""))
    assert not refused(queue)
    file_broker.kill()
    assert not refused(queue)
    ask_owner(file_broker, queue, EndStream(stream=US, run=""))


def test_a_run_that_ends_late_does_not_end_the_right_of_a_newer_run(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    timeout = TIMEOUT * SECOND
    ask_owner(file_broker, queue, take_grant_operation(US, timeout=timeout, run="old"))
    ask_owner(file_broker, queue, renew_operation(US, timeout, "new"))
    ask_owner(file_broker, queue, renew_operation(US, timeout, "old"))
    ask_owner(file_broker, queue, EndStream(stream=US, run="old"))
    assert refused(queue), "a stream is as old as its first word"
    ask_owner(file_broker, queue, EndStream(stream=US, run="new"))
    assert not refused(queue)
    ask_owner(file_broker, queue, renew_operation(US, timeout, "newest"))
    file_broker.restart()
    ask_owner(file_broker, queue, EndStream(stream=US, run="newest"))
    assert not refused(queue)


def test_a_run_that_ends_late_does_not_end_the_right_of_a_newer_run_at_the_next_owner(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    timeout = TIMEOUT * SECOND
    for run in ("old", "new"):
        ask_owner(file_broker, queue, take_grant_operation(US, timeout=timeout, run=run))
    for end in (file_broker.restart, file_broker.kill):
        end()
        ask_owner(file_broker, queue, EndStream(stream=US, run="old"))
        assert refused(queue)
        ask_owner(file_broker, queue, renew_operation(US, timeout, "old"))
        ask_owner(file_broker, queue, EndStream(stream=US, run="old"))
        assert refused(queue), "a renewal does not make the old run the newest"
    ask_owner(file_broker, queue, EndStream(stream=US, run="new"))
    assert not refused(queue)


def test_a_right_that_an_earlier_version_recorded_is_given_up_by_any_run(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    with file_broker.embedded.changing_catalog():
        file_broker.embedded.catalog.run([ConsumerRightSet(queue.incarnation, "spark:us", TIMEOUT * SECOND)])
    file_broker.restart()
    assert refused(queue)
    ask_owner(file_broker, queue, EndStream(stream=US, run="any"))
    assert not refused(queue)


def test_a_second_stream_is_refused_while_the_first_has_the_right(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a", "b")
    assert take(file_broker, queue, US, want=1).items == 1
    for verb in (
        lambda: take(file_broker, queue, THEM, want=1),
        lambda: ask_owner(file_broker, queue, renew_operation(THEM, SECOND)),
    ):
        with pytest.raises(QueueHeld):
            verb()
    assert other_process(file_broker).inbox_files() == []
    file_broker.advance_in_steps(TIMEOUT)
    assert take(file_broker, queue, THEM, want=9).items == 2
    with pytest.raises(QueueHeld):
        take(file_broker, queue, US)


def test_a_right_ends_with_its_queue(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    take(file_broker, queue)
    file_broker.delete("q")
    again = file_broker.create("q")
    again.produce("a")
    assert not refused(again)
    file_broker.advance_in_steps(TIMEOUT)
    process_inbox(file_broker)
    with pytest.raises(QueueNotFound):
        take(file_broker, queue)


def test_a_right_that_could_not_be_recorded_is_not_given() -> None:
    """The catalog's disk fails: the caller learns it, and asks again."""
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create()
    queue.produce("a")
    files.fail(files.calls + 1, 5)
    with pytest.raises(StorageFailed):
        take(broker, queue, want=1)
    assert not refused(queue)
    assert take(broker, queue, want=1).items == 1 and refused(queue)
    broker.embedded.close()


@pytest.mark.parametrize("call", range(1, 30, 2))
def test_a_right_is_given_or_not_whichever_file_call_fails(call: int) -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create()
    queue.produce("a")
    files.fail(files.calls + call, 5)
    with suppress(StorageFailed, OutcomeUnknown):
        take(broker, queue, want=1, timeout=600)
    files.clear_faults()
    for _ in range(9):
        broker.advance_in_steps(10)
    found = take(broker, queue, want=1, timeout=600)
    if not found.grant:  # nothing could be leased at that moment
        found = take(broker, queue, want=1, timeout=600)
    assert found == GrantAnswer(1, 1, 0) and refused(queue)
    broker.embedded.close()


def test_a_worker_waits_until_the_right_ends(tmp_path: Path) -> None:
    done: list[str] = []
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q")
        queue.produce("a")
        stream: dict[str, Any] = {"queue": queue.incarnation, "stream": US, "run": ""}
        queue.home.call(TakeGrant(**stream, done=0, want=0, per_key=1, timeout=MINUTE))
        with running_worker(penstock.Worker(queue, lambda item: done.append(item.payload.decode()))):
            queue.home.call(EndStream(**stream))
            wait_until(lambda: bool(done))
    assert done == ["a"]
