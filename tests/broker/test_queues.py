"""Which queues there are: made, changed, deleted, made anew; and operations on one partition of them."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from penstock.loop.requests import Do, LeasePart, ProduceRequest
from penstock.loop.turn import REDOS
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
from penstock.testing import ManualClock, SimulatedFiles
from penstock.words.errors import BrokerClosed, InvalidRequest, LeaseLost, OutcomeUnknown, QueueBusy, QueueExists, QueueNotFound
from tests.broker.broker_under_test import Asked, Desk, Rig, batch_of, keys_at, refusal, together
from tests.broker.crashes import cut_off, prepared
from tests.broker.storages import PatchyFiles, Simulated

# -- made ---------------------------------------------------------------------------------------------------


def test_exist_ok_takes_what_is_there_if_it_is_what_was_meant(broker: Rig) -> None:
    made = broker.broker.call(CreateQueue(name="q", options={"max_attempts": 3, "ttl": 77}, partitions=4))
    again = broker.broker.call(CreateQueue(name="q", options={"max_attempts": 3}, exist_ok=True, given={"max_attempts": 3}))
    assert again == made, "what was not given does not matter"
    assert broker.broker.call(CreateQueue(name="q", partitions=4, exist_ok=True, given={"partitions": 4})) == made
    for options, given in (({"max_attempts": 4}, {"max_attempts": 4}), ({}, {"partitions": 5})):
        with pytest.raises(QueueExists, match="there is a queue 'q' with another"):
            broker.broker.call(CreateQueue(name="q", options=options, partitions=4, exist_ok=True, given=given))
    with pytest.raises(QueueExists, match="there is a queue 'q' already"):
        broker.broker.call(CreateQueue(name="q", partitions=4))
    assert broker.find().info == made


def test_a_wrong_queue_is_refused_and_leaves_nothing(broker: Rig) -> None:
    for name, options, partitions in (("../etc", {}, 1), ("q", {"max_attempts": -1}, 1), ("q", {"colour": 1}, 1), ("q", {}, 0)):
        with pytest.raises(InvalidRequest, match="; "):
            broker.broker.call(CreateQueue(name=name, options=options, partitions=partitions))
    assert broker.broker.call(ListQueues()) == []


def test_queues_are_listed_by_name(broker: Rig) -> None:
    for name in ("b.2", "a", "b.1", "c", "b.3"):
        broker.create(name)
    names = [
        [info.name for info in broker.broker.call(ListQueues(prefix=args[0], after=args[1], limit=args[2]))]
        for args in (("", "", 9), ("b", "", 2), ("b", "b.2", 9), ("x", "", 9))
    ]
    assert names == [["a", "b.1", "b.2", "b.3", "c"], ["b.1", "b.2"], ["b.3"], []]


def test_a_dead_queue_must_be_fit_for_it(broker: Rig) -> None:
    with pytest.raises(QueueNotFound, match="there is no queue 'dead' to be the dead queue of 'q'; create it first"):
        broker.create(dead_queue="dead")
    with pytest.raises(InvalidRequest, match="queue 'q' cannot be its own dead queue"):
        broker.create(dead_queue="q")
    dead = broker.create("dead")
    desk = broker.create(dead_queue="dead")
    other = broker.create("other")
    with pytest.raises(InvalidRequest, match="'q' has a dead queue of its own"):
        other.update(dead_queue="q")
    with pytest.raises(InvalidRequest, match="queue 'dead' is the dead queue of 'q', so it cannot have one"):
        dead.update(dead_queue="other")
    with pytest.raises(InvalidRequest, match="queue 'dead' is the dead queue of 'q'; give them another or none, then delete it"):
        broker.delete("dead")
    desk.update(dead_queue="")
    broker.delete("dead")
    assert [info.name for info in broker.broker.call(ListQueues())] == ["other", "q"]


# -- changed ------------------------------------------------------------------------------------------------


def test_an_update_of_one_option_leaves_the_others_and_reaches_the_live_queue(broker: Rig) -> None:
    desk = broker.create(partitions=2, ttl=900_000_000, max_attempts=9, max_items=50)
    before = desk.info.options
    desk.produce("a", key=keys_at(desk, 0)[0])
    desk.produce("b", key=keys_at(desk, 1)[0])
    changed = desk.update(lease_timeout=7_000_000).options
    assert changed == Options(policy=changed.policy, dead_queue="", max_items=50)
    assert changed.policy.lease_timeout == 7_000_000 and changed.policy.ttl == before.policy.ttl and changed.policy.max_attempts == 9
    assert all(member.state.policy == changed.policy for member in desk.loop.turns.healthy())
    held = desk.lease()
    assert [round(one.seconds) for one in held.handed] == [7, 7]
    broker.kill()
    assert desk.info.options == changed
    broker.pass_by(7)
    assert desk.counts() == {"ready": 2}


def test_lower_attempts_and_a_dead_queue_count_at_once(broker: Rig) -> None:
    dead = broker.create("dead")
    desk = broker.create(partitions=2)
    desk.produce("tried", "new", keys=["k1", "k2"])
    for _ in range(2):
        held = desk.lease(1)
        assert held.texts == ["tried"]
        held.retry(reason="no luck")
    desk.update(max_attempts=2)
    assert desk.counts() == {"ready": 1, "buried": 1}
    desk.update(dead_queue="dead")
    broker.turn()
    assert desk.counts() == {"ready": 1}, "what is buried leaves for it"
    assert dead.drain() == ["tried"]


def test_a_wrong_update_changes_nothing(broker: Rig) -> None:
    desk = broker.create()
    before = desk.info
    for changes in ({"ttl": 5, "colour": 1}, {"lease_timeout": 1}, {"durability": "os"}):
        with pytest.raises(InvalidRequest, match="; "):
            broker.broker.call(UpdateQueue(queue=desk.incarnation, changes=changes))
    assert desk.info == before
    with pytest.raises(QueueNotFound):
        broker.broker.call(UpdateQueue(queue=desk.incarnation + 1, changes={"ttl": 5}))


# -- deleted ------------------------------------------------------------------------------------------------


def test_a_deleted_queue_is_gone_and_a_new_one_never_meets_its_past(broker: Rig) -> None:
    old = broker.create(partitions=2)
    old.produce("old", key="k")
    held = old.lease()
    waiting = [old.waiter(), old.watch({0: 99, 1: 99})]
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
    (answer,) = new.settle("complete", [LeasePart(one.partition, one.lease + 1) for one in mine.parts])
    assert isinstance(refusal(answer), LeaseLost), "a number that was not given here is nobody's"
    assert isinstance(refusal(new.settle("complete", held.parts)[0]), LeaseLost) or held.parts == mine.parts
    broker.kill()
    assert [info.incarnation for info in broker.broker.call(ListQueues())] == [new.incarnation]


def test_the_files_of_a_deleted_queue_are_removed() -> None:
    files = SimulatedFiles()
    rig = Rig(Simulated(files))
    desk, other = rig.create(partitions=3), rig.create("other")
    desk.produce("x")
    rig.delete("q")
    assert not [path for path in files.contents() if f"{desk.incarnation:016x}" in path]
    assert [path for path in files.contents() if f"{other.incarnation:016x}" in path]
    rig.broker.close()


@cache
def with_two() -> tuple[SimulatedFiles, ManualClock]:
    def work(rig: Rig) -> None:
        rig.create("q", partitions=2).produce("x")
        rig.create("other").produce("y")

    return prepared(work)


def test_a_delete_cut_off_anywhere_is_done_or_not_begun() -> None:
    def delete(rig: Rig) -> None:
        rig.delete("q")

    found = set()
    for rig, done in cut_off(with_two(), delete):
        names = [info.name for info in rig.broker.call(ListQueues())]
        assert names in (["other"], ["other", "q"])
        found.add((names == ["other"], done))
        assert isinstance(rig.ground, Simulated)
        if names == ["other"]:
            left = {path.split("/")[3] for path in rig.ground.files.contents() if path.startswith("/data/logs/") and path.count("/") > 4}
            assert left == {"0" * 16, f"{rig.find('other').incarnation:016x}"}, "what a crash left lying about is removed at opening"
        else:
            assert rig.find("q").drain() == ["x"]
        again = rig.create("q") if names == ["other"] else rig.find("q")
        again.produce("z")
        assert again.drain() == ["z"]
        assert rig.find("other").drain() == ["y"]
    assert found == {(False, False), (True, False), (True, True)}


def test_a_create_cut_off_anywhere_is_done_or_not_begun() -> None:
    def create(rig: Rig) -> None:
        rig.create("new", partitions=3, max_attempts=7)

    for rig, done in cut_off(with_two(), create, step=4):
        names = [info.name for info in rig.broker.call(ListQueues())]
        assert names in ([["new", "other", "q"]] if done else [["other", "q"], ["new", "other", "q"]])
        info = rig.broker.call(
            CreateQueue(name="new", options={"max_attempts": 7}, partitions=3, exist_ok=True, given={"max_attempts": 7, "partitions": 3})
        )
        Desk(rig, info).produce("a", "b", "c", keys=["k1", "k2", "k3"])
        assert sorted(Desk(rig, info).drain()) == ["a", "b", "c"]


def test_a_queue_is_not_deleted_while_items_are_on_their_way() -> None:
    files = PatchyFiles()
    rig = Rig(Simulated(files))
    target, source = rig.create("target"), rig.create("source")
    source.produce("x")
    held = source.lease()
    files.broken.add(f"{target.incarnation:016x}")  # nothing can arrive there
    held.complete(then=[(target.incarnation, batch_of("then"))])
    for name in ("target", "source"):
        with pytest.raises(QueueBusy, match="on their way"):
            rig.delete(name)
    assert [info.name for info in rig.broker.call(ListQueues())] == ["source", "target"]
    files.broken.clear()
    rig.pass_by(10)
    assert target.drain() == ["then"]
    rig.delete("target")
    rig.delete("source")
    assert rig.broker.call(ListQueues()) == []
    rig.broker.close()


def test_deleting_waits_for_mail_and_new_mail_is_kept_back(live: Rig) -> None:
    """Threads complete with follow-ups for a queue that is being deleted: they arrive before it goes, or are refused."""
    desk, target = live.create(partitions=2), live.create("target", partitions=2)
    desk.produce(*map(str, range(100)))

    def work() -> None:
        while held := desk.lease(5, wait=0.05):
            try:
                held.complete(then=[(target.incarnation, batch_of(*held.texts))])
            except InvalidRequest:  # the queue of its follow-up is gone
                assert held.complete() == len(held), "nothing was completed before"

    def delete() -> None:
        live.delete("target")

    together(work, work, delete)
    assert desk.counts() == {"completed": 100}
    assert desk.stats().transfers == 0
    assert [info.name for info in live.broker.call(ListQueues())] == ["q"]


def test_deleting_while_others_use_it(live: Rig) -> None:
    """Callers are told; nobody hangs, and the name is free."""
    desk = live.create(partitions=2)
    begun = threading.Barrier(5)

    def use() -> None:
        begun.wait(20)
        with suppress(QueueNotFound, BrokerClosed):
            while True:
                desk.produce("x")
                desk.lease(1).complete()

    def delete() -> None:
        begun.wait(20)
        live.delete("q")

    together(*[use] * 4, delete)
    live.create().produce("fresh")
    assert live.find().drain() == ["fresh"]


# -- one partition of it ------------------------------------------------------------------------------------


def test_operations_on_one_partition_leave_the_others_alone(broker: Rig) -> None:
    desk = broker.create(partitions=3)
    for number in range(3):
        desk.produce(f"{number}a", f"{number}b", key=keys_at(desk, number)[0])
    desk.pause(lease=True, partition=1)
    assert sorted(desk.lease().texts) == ["0a", "2a"]
    assert [one.paused_lease for one in desk.stats().partitions] == [False, True, False]
    assert desk.call(ClearItems(states=["ready"], partition=2)) == 1
    assert desk.counts() == {"ready": 3, "leased": 2, "completed": 1}
    assert desk.call(ClearItems(states=["leased"], partition=0)) == 1
    assert desk.call(SeekItems(start={2: 0})) == 1
    assert desk.call(SeekItems(start={0: 0, 2: 0})) == 1
    desk.pause(lease=False, partition=1)
    broker.turn()
    assert sorted(desk.drain()) == ["0a", "0b", "1a", "1b"], "2a is leased, and holds its key"
    freed = desk.call(CompactQueue(partition=1))
    assert len(freed) == 1 and len(desk.call(CompactQueue())) == 3
    wrong: list[Operation[Any]] = [PauseQueue(lease=True, partition=9), CompactQueue(partition=9), SeekItems(start={9: 0})]
    for operation in wrong:
        with pytest.raises(InvalidRequest, match=r"queue 'q' has no partition 9; it has \[0, 1, 2\]"):
            desk.call(operation)


class Explode(Operation[None]):
    """None that a broker knows."""


def test_an_unknown_operation_is_refused(broker: Rig) -> None:
    with pytest.raises(InvalidRequest, match=r"Explode cannot be asked of a broker; use a kind of operation of penstock\.operations"):
        broker.create().call(Explode())


def test_a_mistake_in_one_question_takes_the_turn_from_nobody(broker: Rig, caplog: pytest.LogCaptureFixture) -> None:
    desk = broker.create(partitions=2)
    waiting: list[Asked] = [desk.waiter(), desk.submit(ProduceRequest(batch_of("with it")))]
    bad = desk.submit(Do(lambda turns: 1 / 0))
    broker.turn()
    with pytest.raises(OutcomeUnknown, match=r"it went wrong \(ZeroDivisionError: division by zero\); please report this"):
        _ = bad.result
    assert "went wrong" in caplog.text
    assert waiting[0].held.texts == ["with it"] and waiting[1].result[0].refused is None


def test_a_mistake_in_a_turn_ends_nothing(broker: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong inside, and again each time, nobody waits for ever, what was told is true, and the queue goes on."""
    desk = broker.create(partitions=2)
    in_line = desk.waiter(wait=600)
    waiting = desk.submit(ProduceRequest(batch_of("unknown"), b"r"))
    with monkeypatch.context() as patch:
        patch.setattr(desk.loop.turns.leasing, "deal", lambda now: 1 / 0)
        for _ in range(REDOS + 1):
            assert not waiting.done
            with pytest.raises(ZeroDivisionError):
                desk.loop.turn()
    with pytest.raises(OutcomeUnknown, match="repeat with the same request id"):
        _ = waiting.result
    assert not in_line.done
    broker.pass_by(10)
    desk.place(batch_of("unknown"), "r")
    assert in_line.held.texts == ["unknown"]
    assert desk.counts() == {"leased": 1}
