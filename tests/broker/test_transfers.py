"""A transfer between logs arrives once, wherever the process crashes."""

import errno
from contextlib import suppress
from functools import cache
from typing import Any

from penstock.loop.requests import SettlePart
from penstock.operations import ListItems, RedriveItems
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words import origin
from penstock.words.errors import PenstockError
from penstock.words.origin import Origin
from simulation.simulated_machine import InterruptingClock
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, batch_of, key_that_moves
from tests.broker.crashes import crash_at_each_call, disk_after
from tests.broker.storages import SimulatedStorage

LEASE_SECONDS = 60


def served(broker: BrokerUnderTest, *names: str) -> list[str]:
    """All items of the queues, after the leases from before the crash have ended; no transfer is left."""
    broker.advance_in_steps(LEASE_SECONDS + 10)
    found: list[str] = []
    for name in names:
        queue = broker.find(name)
        found += [f"{name}: {text}" for text in queue.drain()]
        broker.advance_in_steps(5)
    for name in names:
        stats = broker.find(name).stats()
        assert stats.transfers == 0 and stats.moving == 0 and stats.resizing == []
        assert set(broker.find(name).counts()) <= {"completed"}, "nothing is left"
    return sorted(found)


def origins(queue: QueueUnderTest) -> list[Origin]:
    listed = queue.call(ListItems(limit=1_000))
    packed = [one.batch.origins[one.index] for one in listed if one.batch.origins]
    return [origin.decode(one) for one in packed if one]


class PreparedDisk:
    """A disk that a test begins with, and the leases that its broker had given."""

    def __init__(self) -> None:
        self.parts: list[SettlePart] = []
        self.place: tuple[SimulatedFiles, MicrosecondClock]


def test_no_transfer_is_forgotten_when_a_turn_is_interrupted() -> None:
    """At any point: the items are sent, and the source learns of their arrival, without a restart."""
    for look in range(40):
        clock = InterruptingClock()
        broker = BrokerUnderTest(SimulatedStorage(), clock=clock)
        broker.create("dead", partitions=2)
        source = broker.create("source", partitions=2, dead_queue="dead", max_attempts=3)
        source.produce("a", "b", "c", keys=["k1", "k2", None])
        parts = source.lease().parts
        clock.interrupt_after = look
        with suppress(KeyboardInterrupt):
            source.settle("bury", parts, reason="bad", request=b"b")
            broker.turn()
        clock.interrupt_after = None
        broker.advance_in_steps(10)
        assert source.stats().transfers == 0, f"interrupted at look {look}"


# -- dead letters -------------------------------------------------------------------------------------------


@cache
def with_dead_queue() -> PreparedDisk:
    """Three items leased, of a queue that has a dead queue."""
    started = PreparedDisk()

    def work(broker: BrokerUnderTest) -> None:
        broker.create("dead", partitions=2)
        source = broker.create("source", partitions=2, dead_queue="dead", max_attempts=3)
        source.produce("a", "b", "c", keys=["k1", "k2", None])
        started.parts = source.lease().parts

    started.place = disk_after(work)
    return started


def test_a_dead_letter_arrives_once() -> None:
    start = with_dead_queue()

    def bury(broker: BrokerUnderTest) -> None:
        broker.find("source").settle("bury", start.parts, reason="bad", request=b"b")
        broker.turn()

    before = 0
    for broker, done in crash_at_each_call(start.place, bury):
        source, dead = broker.find("source"), broker.find("dead")
        before += not done and bool(dead.stats().produced)
        answer = source.settle("bury", start.parts, reason="bad", request=b"b")  # the caller repeats what was not answered
        assert sum(one.done for one in answer) in (0, 3)
        broker.advance_in_steps(3)
        letters = origins(dead)
        assert len(letters) == 3 and all(one.queue == "source" and one.reason == "bad" and one.attempts == 1 for one in letters)
        assert served(broker, "source", "dead") == ["dead: a", "dead: b", "dead: c"]
    assert before, "it was also cut off when the letter was there and its source did not know"


def test_items_whose_attempts_are_spent_arrive_once_too() -> None:
    start = with_dead_queue()

    def expire(broker: BrokerUnderTest) -> None:
        """Nobody settles anything: three leases, three expiries."""
        for _ in range(2):
            broker.advance_in_steps(LEASE_SECONDS)
            broker.find("source").lease()
        broker.advance_in_steps(LEASE_SECONDS)
        broker.turn()

    for broker, _ in crash_at_each_call(start.place, expire, step=3):
        for _ in range(3):
            broker.advance_in_steps(LEASE_SECONDS)
            broker.find("source").lease()
        broker.advance_in_steps(LEASE_SECONDS + 3)
        assert [one.attempts for one in origins(broker.find("dead"))] == [3] * 3
        assert served(broker, "source", "dead") == ["dead: a", "dead: b", "dead: c"]


# -- redrive ------------------------------------------------------------------------------------------------


@cache
def with_dead_letters() -> PreparedDisk:
    """Dead letters in a dead queue, and one item that was never buried."""
    started = PreparedDisk()

    def work(broker: BrokerUnderTest) -> None:
        dead = broker.create("dead", partitions=2)
        source = broker.create("source", partitions=3, dead_queue="dead")
        source.produce(*"abcdef", keys=["k1", "k2", "k3", None, "k1", "k2"])
        while held := source.lease():
            held.bury(reason="bad")
        dead.produce("native")
        broker.turn()

    started.place = disk_after(work)
    return started


def redrive(broker: BrokerUnderTest) -> None:
    """Redrive all items that are listed now."""
    dead, source = broker.find("dead"), broker.find("source")
    chosen: dict[int, list[int]] = {}
    for one in dead.call(ListItems(states=("ready", "buried"), limit=1_000)):
        chosen.setdefault(one.partition, []).append(one.offset)
    dead.call(RedriveItems(items=chosen, to=source.incarnation))
    broker.turn()


def test_a_redrive_cut_off_and_repeated_moves_everything_once() -> None:
    for broker, _ in crash_at_each_call(with_dead_letters().place, redrive):
        redrive(broker)
        broker.advance_in_steps(3)
        assert broker.find("dead").stats().depth == 0
        assert served(broker, "source", "dead") == sorted(f"source: {text}" for text in [*"abcdef", "native"])


def test_a_redrive_cut_off_loses_nothing_even_if_nobody_repeats_it() -> None:
    for broker, done in crash_at_each_call(with_dead_letters().place, redrive):
        broker.advance_in_steps(3)
        found = [text.partition(": ") for text in served(broker, "source", "dead")]
        assert sorted(text for _, _, text in found) == sorted([*"abcdef", "native"])
        assert not done or {queue for queue, _, _ in found} == {"source"}


@cache
def with_parked_key() -> PreparedDisk:
    """An item whose burial parks its key went to the dead queue; others of the key wait behind it."""
    started = PreparedDisk()

    def work(broker: BrokerUnderTest) -> None:
        broker.create("dead")
        source = broker.create("source", partitions=2, dead_queue="dead", on_bury="park")
        source.produce("1", "2", "3", key="k")
        source.lease().bury()
        broker.turn()

    started.place = disk_after(work)
    return started


def test_a_redriven_item_takes_its_old_position_wherever_it_is_cut_off() -> None:
    for broker, _ in crash_at_each_call(with_parked_key().place, redrive):
        redrive(broker)
        broker.advance_in_steps(3)
        assert broker.find("source").drain(10) == ["1", "2", "3"]
        assert served(broker, "source", "dead") == []


def test_a_dead_letter_that_was_buried_again_takes_its_old_position_too() -> None:
    broker = BrokerUnderTest(SimulatedStorage())
    dead = broker.create("dead", on_bury="park")
    source = broker.create("source", partitions=2, dead_queue="dead", on_bury="park")
    source.produce("1", "2", "3", key="k")
    source.lease(2, per_key=2).bury()
    broker.turn()
    dead.lease(2, per_key=2).bury()  # so the key is parked there too, and stays so for the other one
    dead.call(RedriveItems(items={0: [0]}, to=source.incarnation))
    redrive(broker)
    assert source.drain(10) == ["1", "2", "3"]


def test_a_queue_is_deleted_only_when_transfers_to_it_are_confirmed() -> None:
    """A failed write undoes the confirmation of an arrival: the sender would look for the queue for ever."""
    for call in range(1, 60):
        broker = BrokerUnderTest(SimulatedStorage())
        dead, source = broker.create("dead"), broker.create("source")
        source.produce("1", key="k")
        disk = broker.storage.files  # type: ignore[attr-defined]
        disk.fail(disk.calls + call, errno.EIO)
        with suppress(PenstockError):
            source.call(RedriveItems(items={0: [0]}, to=dead.incarnation))
            broker.delete("dead")
        disk.clear_faults()
        broker.advance_in_steps(20)
        assert source.stats().transfers == 0
        if disk.calls < call:
            return


# -- follow-ups ---------------------------------------------------------------------------------------------


@cache
def with_work() -> PreparedDisk:
    started = PreparedDisk()

    def work(broker: BrokerUnderTest) -> None:
        broker.create("next", partitions=3)
        source = broker.create("source")
        source.produce("first")
        started.parts = source.lease().parts

    started.place = disk_after(work)
    return started


def test_completion_and_follow_ups_happen_once_or_not_at_all() -> None:
    start = with_work()

    def options(broker: BrokerUnderTest) -> dict[str, Any]:
        then = [
            (broker.find("next").incarnation, batch_of("x", "y", "z", keys=["k1", "k2", "k3"])),
            (broker.find("source").incarnation, batch_of("own")),
        ]
        return {"then": then, "request": b"c"}

    def complete(broker: BrokerUnderTest) -> None:
        broker.find("source").settle("complete", start.parts, **options(broker))
        broker.turn()

    for broker, done in crash_at_each_call(start.place, complete):
        source = broker.find("source")
        broker.advance_in_steps(3)
        finished = source.explain("0-0").state == "completed"
        assert finished or not done
        assert len(broker.find("next").call(ListItems(limit=100))) == (3 if finished else 0), "both or neither"
        assert source.settle("complete", start.parts, **options(broker))[0].done == 1
        broker.advance_in_steps(3)
        assert served(broker, "source", "next") == ["next: x", "next: y", "next: z", "source: own"]


# -- items whose key lives elsewhere now ----------------------------------------------------------------------


@cache
def with_strays() -> PreparedDisk:
    """Items scheduled far ahead that will become ready in a partition that no longer has their slots."""
    started = PreparedDisk()

    def work(broker: BrokerUnderTest) -> None:
        queue = broker.create("source")
        keys = [key_that_moves(1, 4), key_that_moves(1, 4, 50), key_that_moves(1, 4, 100)]
        queue.produce("a1", "b1", "c1", keys=keys, at=broker.after(1_000))
        queue.produce("a2", "b2", keys=keys[:2], at=broker.after(1_001))
        queue.resize(4)
        assert queue.stats().resizing == [], "they hold nothing"

    started.place = disk_after(work)
    return started


def test_strays_are_forwarded_once_and_in_order() -> None:
    def forward(broker: BrokerUnderTest) -> None:
        broker.advance_in_steps(1_002)
        broker.find("source").lease(1)
        broker.turn()

    on_the_way = 0
    for broker, done in crash_at_each_call(with_strays().place, forward):
        queue = broker.find("source")
        on_the_way += not done and any(handle.state.moving for handle in queue.loop.engine.usable())
        broker.advance_in_steps(1_002 + LEASE_SECONDS)
        found = queue.drain(1)
        assert sorted(found) == ["a1", "a2", "b1", "b2", "c1"]
        assert found.index("a1") < found.index("a2") and found.index("b1") < found.index("b2")
        assert served(broker, "source") == []
        assert queue.explain("0-0").id != "0-0", "its old id leads to where it went"
    assert on_the_way
