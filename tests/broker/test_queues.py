"""Queues are created, changed, deleted and created again; operations on one partition of a queue."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from penstock.loop.requests import FunctionRequest, ProduceRequest, Request, SettlePart
from penstock.loop.turn import MAX_RERUNS
from penstock.operations import (
    ClearItems,
    CompactQueue,
    CreateQueue,
    ListQueues,
    Operation,
    PauseQueue,
    RedriveItems,
    SeekItems,
    UpdateQueue,
)
from penstock.rules.options import Options
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.errors import BrokerClosed, InvalidRequest, LeaseLost, OutcomeUnknown, QueueBusy, QueueExists, QueueNotFound
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, SubmittedRequest, batch_of, keys_at, refusal, run_threads
from tests.broker.crashes import crash_at_each_call, disk_after
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage

# -- made ---------------------------------------------------------------------------------------------------


def test_exist_ok_gives_an_existing_queue_with_the_same_options(broker: BrokerUnderTest) -> None:
    made = broker.embedded.call(CreateQueue(name="q", options={"max_attempts": 3, "ttl": 77}, partitions=4))
    again = broker.embedded.call(CreateQueue(name="q", options={"max_attempts": 3}, exist_ok=True, given={"max_attempts": 3}))
    assert again == made, "what was not given does not matter"
    for partitions in (4, 5):
        assert broker.embedded.call(CreateQueue(name="q", partitions=partitions, exist_ok=True, given={"partitions": partitions})) == made
    with pytest.raises(QueueExists, match="there is a queue 'q' with another max_attempts"):
        broker.embedded.call(CreateQueue(name="q", options={"max_attempts": 4}, exist_ok=True, given={"max_attempts": 4}))
    with pytest.raises(QueueExists, match="there is a queue 'q' already"):
        broker.embedded.call(CreateQueue(name="q", partitions=4))
    assert broker.find().info == made


def test_a_refused_create_leaves_nothing(broker: BrokerUnderTest) -> None:
    for name, options, partitions in (("../etc", {}, 1), ("q", {"max_attempts": -1}, 1), ("q", {"colour": 1}, 1), ("q", {}, 0)):
        with pytest.raises(InvalidRequest, match="; "):
            broker.embedded.call(CreateQueue(name=name, options=options, partitions=partitions))
    assert broker.embedded.call(ListQueues()) == []


def test_queues_are_listed_by_name(broker: BrokerUnderTest) -> None:
    for name in ("b.2", "a", "b.1", "c", "b.3"):
        broker.create(name)
    names = [
        [info.name for info in broker.embedded.call(ListQueues(prefix=args[0], after=args[1], limit=args[2]))]
        for args in (("", "", 9), ("b", "", 2), ("b", "b.2", 9), ("x", "", 9))
    ]
    assert names == [["a", "b.1", "b.2", "b.3", "c"], ["b.1", "b.2"], ["b.3"], []]


def test_which_queues_can_be_dead_queues(broker: BrokerUnderTest) -> None:
    with pytest.raises(QueueNotFound, match="there is no queue 'dead' to be the dead queue of 'q'; create it first"):
        broker.create(dead_queue="dead")
    with pytest.raises(InvalidRequest, match="queue 'q' cannot be its own dead queue"):
        broker.create(dead_queue="q")
    dead = broker.create("dead")
    queue = broker.create(dead_queue="dead")
    other = broker.create("other")
    with pytest.raises(InvalidRequest, match="'q' has a dead queue of its own"):
        other.update(dead_queue="q")
    with pytest.raises(InvalidRequest, match="queue 'dead' is the dead queue of 'q', so it cannot have one"):
        dead.update(dead_queue="other")
    with pytest.raises(InvalidRequest, match="queue 'dead' is the dead queue of 'q'; give them another or none, then delete it"):
        broker.delete("dead")
    queue.update(dead_queue="")
    broker.delete("dead")
    assert [info.name for info in broker.embedded.call(ListQueues())] == ["other", "q"]


# -- changed ------------------------------------------------------------------------------------------------


def test_an_update_of_one_option_leaves_the_others_and_reaches_the_live_queue(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2, ttl=900_000_000, max_attempts=9, max_items=50)
    before = queue.info.options
    queue.produce("a", key=keys_at(queue, 0)[0])
    queue.produce("b", key=keys_at(queue, 1)[0])
    changed = queue.update(lease_timeout=7_000_000).options
    assert changed == Options(policy=changed.policy, dead_queue="", max_items=50)
    assert changed.policy.lease_timeout == 7_000_000 and changed.policy.ttl == before.policy.ttl and changed.policy.max_attempts == 9
    assert all(handle.state.policy == changed.policy for handle in queue.loop.engine.usable())
    held = queue.lease()
    assert [round(one.seconds) for one in held.parts_granted] == [7, 7]
    broker.kill()
    assert queue.info.options == changed
    broker.advance_in_steps(7)
    assert queue.counts() == {"ready": 2}


def test_lower_attempts_and_a_dead_queue_count_at_once(broker: BrokerUnderTest) -> None:
    dead = broker.create("dead")
    queue = broker.create(partitions=2)
    queue.produce("tried", "new", keys=["k1", "k2"])
    for _ in range(2):
        held = queue.lease(1)
        assert held.texts == ["tried"]
        held.retry(reason="no luck")
    queue.update(max_attempts=2)
    assert queue.counts() == {"ready": 1, "buried": 1}
    queue.update(dead_queue="dead")
    broker.turn()
    assert queue.counts() == {"ready": 1}, "what is buried leaves for it"
    assert dead.drain() == ["tried"]


def test_a_wrong_update_changes_nothing(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    before = queue.info
    for changes in ({"ttl": 5, "colour": 1}, {"lease_timeout": 1}, {"durability": "os"}):
        with pytest.raises(InvalidRequest, match="; "):
            broker.embedded.call(UpdateQueue(queue=queue.incarnation, changes=changes))
    assert queue.info == before
    with pytest.raises(QueueNotFound):
        broker.embedded.call(UpdateQueue(queue=queue.incarnation + 1, changes={"ttl": 5}))


# -- deleted ------------------------------------------------------------------------------------------------


def test_a_queue_created_again_has_nothing_of_the_deleted_one(broker: BrokerUnderTest) -> None:
    old = broker.create(partitions=2)
    old.produce("old", key="k")
    held = old.lease()
    waiting = [old.submit_lease(), old.watch({0: 99, 1: 99})]
    broker.turn()
    broker.delete("q")
    for asked in waiting:
        with pytest.raises((QueueNotFound, BrokerClosed)):
            _ = asked.result
    verbs: list[Callable[[], object]] = [
        lambda: old.produce("x"),
        lambda: old.lease(),
        lambda: old.stats(),
        lambda: held.complete(),
        lambda: old.update(ttl=5),
        lambda: old.resize(3),
        lambda: old.call(RedriveItems(items={}, to=old.incarnation)),
    ]
    new = broker.create(partitions=2)
    for verb in verbs:
        with pytest.raises(QueueNotFound, match=r"the queue was deleted .*; ask the broker for it by name"):
            verb()
    assert new.incarnation != old.incarnation
    assert new.counts() == {} and new.stats().produced == 0
    new.produce("new", key="k")
    mine = new.lease()
    (answer,) = new.settle("complete", [SettlePart(one.partition, one.lease + 1) for one in mine.parts])
    assert isinstance(refusal(answer), LeaseLost), "a number that was not given here is nobody's"
    assert isinstance(refusal(new.settle("complete", held.parts)[0]), LeaseLost) or held.parts == mine.parts
    broker.kill()
    assert [info.incarnation for info in broker.embedded.call(ListQueues())] == [new.incarnation]


def test_the_files_of_a_deleted_queue_are_removed() -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue, other = broker.create(partitions=3), broker.create("other")
    queue.produce("x")
    broker.delete("q")
    assert not [path for path in files.contents() if f"{queue.incarnation:016x}" in path]
    assert [path for path in files.contents() if f"{other.incarnation:016x}" in path]
    broker.embedded.close()


@cache
def with_two() -> tuple[SimulatedFiles, MicrosecondClock]:
    def work(broker: BrokerUnderTest) -> None:
        broker.create("q", partitions=2).produce("x")
        broker.create("other").produce("y")

    return disk_after(work)


def test_a_delete_cut_off_anywhere_is_done_or_not_begun() -> None:
    def delete(broker: BrokerUnderTest) -> None:
        broker.delete("q")

    found = set()
    for broker, done in crash_at_each_call(with_two(), delete):
        names = [info.name for info in broker.embedded.call(ListQueues())]
        assert names in (["other"], ["other", "q"])
        found.add((names == ["other"], done))
        assert isinstance(broker.storage, SimulatedStorage)
        if names == ["other"]:
            left = {
                path.split("/")[3] for path in broker.storage.files.contents() if path.startswith("/data/logs/") and path.count("/") > 4
            }
            assert left == {"0" * 16, f"{broker.find('other').incarnation:016x}"}, "what a crash left lying about is removed at opening"
        else:
            assert broker.find("q").drain() == ["x"]
        again = broker.create("q") if names == ["other"] else broker.find("q")
        again.produce("z")
        assert again.drain() == ["z"]
        assert broker.find("other").drain() == ["y"]
    assert found == {(False, False), (True, False), (True, True)}


def test_a_create_cut_off_anywhere_is_done_or_not_begun() -> None:
    def create(broker: BrokerUnderTest) -> None:
        broker.create("new", partitions=3, max_attempts=7)

    for broker, done in crash_at_each_call(with_two(), create, step=4):
        names = [info.name for info in broker.embedded.call(ListQueues())]
        assert names in ([["new", "other", "q"]] if done else [["other", "q"], ["new", "other", "q"]])
        info = broker.embedded.call(
            CreateQueue(name="new", options={"max_attempts": 7}, partitions=3, exist_ok=True, given={"max_attempts": 7, "partitions": 3})
        )
        QueueUnderTest(broker, info).produce("a", "b", "c", keys=["k1", "k2", "k3"])
        assert sorted(QueueUnderTest(broker, info).drain()) == ["a", "b", "c"]


def test_a_queue_is_not_deleted_while_items_are_on_their_way() -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    target, source = broker.create("target"), broker.create("source")
    source.produce("x")
    held = source.lease()
    files.failing_paths.add(f"{target.incarnation:016x}")  # nothing can arrive there
    held.complete(then=[(target.incarnation, batch_of("then"))])
    for name in ("target", "source"):
        with pytest.raises(QueueBusy, match="on their way"):
            broker.delete(name)
    assert [info.name for info in broker.embedded.call(ListQueues())] == ["source", "target"]
    files.failing_paths.clear()
    broker.advance_in_steps(10)
    assert target.drain() == ["then"]
    broker.delete("target")
    broker.delete("source")
    assert broker.embedded.call(ListQueues()) == []
    broker.embedded.close()


def test_a_queue_that_another_caller_deletes_meanwhile_is_not_found(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, router = broker.create(), broker.embedded._router
    without_transfers = router.without_transfers

    def delete_first(*args: Any) -> Any:
        monkeypatch.undo()
        broker.delete("q")
        return without_transfers(*args)

    monkeypatch.setattr(router, "without_transfers", delete_first)
    with pytest.raises(QueueNotFound, match="queue 'q' was deleted by another caller"):
        broker.delete("q")
    assert not router._being_deleted
    with pytest.raises(QueueNotFound):
        queue.stats()
    broker.create()
    broker.delete("q")


def test_a_queue_is_deleted_although_another_one_is_deleted_meanwhile(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = broker.create("a").loop
    broker.create("b")
    call = loop.call

    def delete_other(request: Request) -> Any:
        monkeypatch.undo()
        broker.delete("b")
        return call(request)

    monkeypatch.setattr(loop, "call", delete_other)
    broker.delete("a")
    assert broker.embedded.call(ListQueues()) == []


def test_deleting_waits_for_transfers_and_keeps_new_ones_back(threaded_broker: BrokerUnderTest) -> None:
    """Threads complete with follow-ups for a queue that is being deleted: they arrive before that, or are refused."""
    queue, target = threaded_broker.create(partitions=2), threaded_broker.create("target", partitions=2)
    queue.produce(*map(str, range(100)))

    def work() -> None:
        while held := queue.lease(5, wait=0.05):
            try:
                held.complete(then=[(target.incarnation, batch_of(*held.texts))])
            except InvalidRequest:  # the queue of its follow-up is gone
                assert held.complete() == len(held), "nothing was completed before"

    def delete() -> None:
        threaded_broker.delete("target")

    run_threads(work, work, delete)
    assert queue.counts() == {"completed": 100}
    assert queue.stats().transfers == 0
    assert [info.name for info in threaded_broker.embedded.call(ListQueues())] == ["q"]


def test_deleting_a_queue_in_use(threaded_broker: BrokerUnderTest) -> None:
    """Callers get an error, none hangs, and the name is free."""
    queue = threaded_broker.create(partitions=2)
    begun = threading.Barrier(5)

    def use() -> None:
        begun.wait(20)
        with suppress(QueueNotFound, BrokerClosed):
            while True:
                queue.produce("x")
                queue.lease(1).complete()

    def delete() -> None:
        begun.wait(20)
        threaded_broker.delete("q")

    run_threads(*[use] * 4, delete)
    threaded_broker.create().produce("fresh")
    assert threaded_broker.find().drain() == ["fresh"]


# -- one partition of it ------------------------------------------------------------------------------------


def test_operations_on_one_partition_leave_the_others_alone(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    for number in range(3):
        queue.produce(f"{number}a", f"{number}b", key=keys_at(queue, number)[0])
    queue.pause(lease=True, partition=1)
    assert sorted(queue.lease().texts) == ["0a", "2a"]
    assert [one.paused_lease for one in queue.stats().partitions] == [False, True, False]
    assert queue.call(ClearItems(states=["ready"], partition=2)) == 1
    assert queue.counts() == {"ready": 3, "leased": 2, "completed": 1}
    assert queue.call(ClearItems(states=["leased"], partition=0)) == 1
    assert queue.call(SeekItems(start={2: 0})) == 1
    assert queue.call(SeekItems(start={0: 0, 2: 0})) == 1
    queue.pause(lease=False, partition=1)
    broker.turn()
    assert sorted(queue.drain()) == ["0a", "0b", "1a", "1b"], "2a is leased, and holds its key"
    freed = queue.call(CompactQueue(partition=1))
    assert len(freed) == 1 and len(queue.call(CompactQueue())) == 3
    wrong: list[Operation[Any]] = [PauseQueue(lease=True, partition=9), CompactQueue(partition=9), SeekItems(start={9: 0})]
    for operation in wrong:
        with pytest.raises(InvalidRequest, match=r"queue 'q' has no partition 9; it has \[0, 1, 2\]"):
            queue.call(operation)


class UnknownOperation(Operation[None]):
    """An operation that a broker does not know."""


def test_an_unknown_operation_is_refused(broker: BrokerUnderTest) -> None:
    with pytest.raises(
        InvalidRequest, match=r"UnknownOperation cannot be asked of a broker; use a kind of operation of penstock\.operations"
    ):
        broker.create().call(UnknownOperation())


def test_a_bug_in_one_query_does_not_stop_the_turn(broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    queue = broker.create(partitions=2)
    waiting: list[SubmittedRequest] = [queue.submit_lease(), queue.submit(ProduceRequest(batch_of("with it")))]
    bad = queue.submit(FunctionRequest(lambda engine: 1 / 0))
    broker.turn()
    with pytest.raises(OutcomeUnknown, match=r"this failed because of a bug \(ZeroDivisionError: division by zero\), .*; please report it"):
        _ = bad.result
    assert "went wrong" in caplog.text
    assert waiting[0].leased.texts == ["with it"] and waiting[1].result[0].refused is None


def test_a_bug_in_a_turn_does_not_stop_the_queue(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug inside every turn: no caller waits for ever, the answers are true, and the queue works afterwards."""
    queue = broker.create(partitions=2)
    in_line = queue.submit_lease(wait=600)
    waiting = queue.submit(ProduceRequest(batch_of("unknown"), b"r"))
    with monkeypatch.context() as patch:
        patch.setattr(queue.loop.engine.lease_step, "assign", lambda now: 1 / 0)
        for _ in range(MAX_RERUNS + 1):
            assert not waiting.done
            with pytest.raises(ZeroDivisionError):
                queue.loop.turn()
    with pytest.raises(OutcomeUnknown, match="repeat with the same request id"):
        _ = waiting.result
    assert not in_line.done
    broker.advance_in_steps(10)
    queue.produce_batch(batch_of("unknown"), "r")
    assert in_line.leased.texts == ["unknown"]
    assert queue.counts() == {"leased": 1}
