"""A history of a partition that contains every kind of record that is written, but Lost and Restored.

Owns: `write_every_record`, for tests that check whether a whole state survives something. No part of the state is left
empty.
"""

from penstock.rules.commands import FollowUpBatch
from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND
from tests.partition_under_test import ELSEWHERE, PartitionUnderTest, items


def write_every_record(partition: PartitionUnderTest) -> None:
    """Use the partition until every kind of record but Lost and Restored was written, and no other part of the
    state is empty."""
    partition.configure(on_bury="park", ttl=10_000 * SECOND, priority_aging=30 * SECOND)
    _produce(partition)
    _settle(partition)
    _consume(partition)
    _come_due(partition)
    _change_waiting(partition)
    _operate(partition)
    _transfer(partition)
    _resize(partition)
    _fill_every_part(partition)


def _produce(partition: PartitionUnderTest) -> None:
    partition.session_produce(*"abcdefghij")
    partition.produce("k1", "plain", "m1", "k2", keys=["k", None, "m", "k"], priorities=[5, 5, 2, 0])
    partition.store(items(["once", "twice"], dedups=["x", None]), request="produce")
    partition.store(items(["again", "new"], dedups=["x", "y"]), request="some were there")
    partition.store(items(["moved"]), source=b"elsewhere", sequence=3)


def _settle(partition: PartitionUnderTest) -> None:
    plain = partition.lease(6, "worker", request="lease")
    partition.complete(plain.lease, [plain.runs[0]], request="complete")
    partition.retry(plain.lease, [plain.runs[0] + 1], reason="no")
    partition.bury(plain.lease, [plain.runs[0] + 2], reason="never")
    partition.extend(plain.lease, 100)
    partition.complete(partition.lease(3).lease)


def _consume(partition: PartitionUnderTest) -> None:
    held, behind = partition.produce("held", "behind", key="consumed", priority=0)
    partition.bury(partition.lease(1).lease, [held], reason="in the way")
    partition.redrive(held)
    partition.consume(held, behind)


def _come_due(partition: PartitionUnderTest) -> None:
    partition.produce("soon", at=partition.after(5))
    partition.produce("mortal", "mortal too", key="q", ttl=20)
    partition.lease(4, timeout=2)
    partition.retry(partition.lease(2, timeout=500).lease, delay=3, reason="wait")
    partition.advance(2)
    partition.advance(3)
    partition.lease(5, timeout=400)
    partition.advance(15)


def _operate(partition: PartitionUnderTest) -> None:
    partition.pause(lease=True, produce=True)
    partition.restart()
    partition.pause(lease=False, produce=False)
    partition.skip(1 + partition.wrapped.state.runs_in(ItemState.READY)[0])
    partition.clear(ready=True)
    partition.redrive()
    partition.drop(*partition.wrapped.state.completed.runs[:2])
    (spent,) = partition.produce("never asked for again", priority=0)
    partition.bury(partition.lease(1).lease, [spent])
    partition.drop(spent, spent + 1)
    for name in ("audit", "gone"):
        partition.move_cursor(name, 2)
    partition.release_cursor("gone")
    partition.seek(2)


def _change_waiting(partition: PartitionUnderTest) -> None:
    first, second, later, dropped = partition.produce("first", "second", "later", "dropped", key="planned")
    partition.cancel(second, dropped)
    partition.drop(dropped, dropped + 1)
    partition.reschedule(first, at=partition.after(3_000))
    partition.reschedule(later, delay=4_000)
    partition.reschedule(first)
    partition.reschedule(first, later, at=partition.after(5_000))


def _transfer(partition: PartitionUnderTest) -> None:
    plain, parked, _ = partition.produce("plain", "parked", "left behind", keys=[None, "left", "left"], priority=0)
    partition.send(plain)
    partition.deliver(70)
    partition.bury(partition.lease(1).lease, reason="a dead letter")
    partition.send(parked)
    partition.deliver(71)
    partition.release("left")
    partition.complete(partition.lease(1).lease, then=[FollowUpBatch(ELSEWHERE, b"a follow-up")])
    partition.send(*partition.produce("on their way", "in one transfer"))


def _resize(partition: PartitionUnderTest) -> None:
    narrowed = partition.fence("lifted", "narrowed")
    partition.produce("1", "2", "3", keys=["lifted", "narrowed", None], priority=0)
    partition.complete(partition.lease(1).lease)
    partition.narrow(narrowed, "lifted", "narrowed")
    partition.lift(narrowed, "lifted")
    partition.complete(partition.lease(1).lease)
    partition.fence("whole slots")
    partition.produce("1", "2", key="whole slots", priority=0)


def _fill_every_part(partition: PartitionUnderTest) -> None:
    partition.produce("later", at=partition.after(500))
    for key in ("parked", "held", "slow"):
        partition.produce("1", "2", "3", key=key, priority=0)
    held = partition.lease(3, "holder", timeout=300, per_key=1)
    partition.bury(held.lease, [held.runs[0]], reason="parked")
    partition.note(held.lease, held.runs[0] + 3, "half way")
    partition.retry(held.lease, [held.runs[0] + 6], delay=200, reason="slow")
    partition.lease(1, timeout=300)
    partition.produce("overdue", priority=0, ttl=1)
    partition.lease(1, timeout=300)
    partition.advance(1)
    part = partition.lease(3, timeout=1)
    partition.complete(part.lease, [part.runs[0]])
    partition.advance(1)
    partition.pause(lease=True)
    partition.produce("ready")
