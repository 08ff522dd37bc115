"""A history in which everything happens that can happen to a partition whose disk is sound.

Owns: `everything`, for tests that ask whether a whole state survives something. It leaves something in every part of the state.
"""

from penstock.rules.commands import Letter
from penstock.words.clock import SECOND
from tests.partition_under_test import ELSEWHERE, Bench, items


def everything(bench: Bench) -> None:
    """Work the partition until every kind of record but Lost has been written and no part of the state is empty."""
    bench.configure(on_bury="park", ttl=10_000 * SECOND, priority_aging=30 * SECOND)
    _produce(bench)
    _settle(bench)
    _consume(bench)
    _come_due(bench)
    _operate(bench)
    _transfer(bench)
    _resize(bench)
    _leave_something_of_everything(bench)


def _produce(bench: Bench) -> None:
    bench.produce(*"abcdefghij")
    bench.produce("k1", "plain", "m1", "k2", keys=["k", None, "m", "k"], priorities=[5, 5, 2, 0])
    bench.store(items(["once", "twice"], dedups=["x", None]), request="produce")
    bench.store(items(["again", "new"], dedups=["x", "y"]), request="some were there")
    bench.store(items(["moved"]), source=b"elsewhere", sequence=3)


def _settle(bench: Bench) -> None:
    plain = bench.lease(6, "worker", request="lease")
    bench.complete(plain.lease, [plain.runs[0]], request="complete")
    bench.retry(plain.lease, [plain.runs[0] + 1], reason="no")
    bench.bury(plain.lease, [plain.runs[0] + 2], reason="never")
    bench.extend(plain.lease, 100)
    bench.complete(bench.lease(3).lease)


def _consume(bench: Bench) -> None:
    held, behind = bench.produce("held", "behind", key="consumed", priority=0)
    bench.bury(bench.lease(1).lease, [held], reason="in the way")
    bench.redrive(held)
    bench.consume(held, behind)


def _come_due(bench: Bench) -> None:
    bench.produce("soon", at=bench.after(5))
    bench.produce("mortal", "mortal too", key="q", ttl=20)
    bench.lease(4, timeout=2)
    bench.retry(bench.lease(2, timeout=500).lease, delay=3, reason="wait")
    bench.advance(2)
    bench.advance(3)
    bench.lease(5, timeout=400)
    bench.advance(15)


def _operate(bench: Bench) -> None:
    bench.pause(lease=True, produce=True)
    bench.restart()
    bench.pause(lease=False, produce=False)
    bench.clear(ready=True)
    bench.redrive()
    bench.drop(*bench.partition.state.resolved.runs[:2])
    (spent,) = bench.produce("never asked for again", priority=0)
    bench.bury(bench.lease(1).lease, [spent])
    bench.drop(spent, spent + 1)
    for name in ("audit", "gone"):
        bench.move_cursor(name, 2)
    bench.release_cursor("gone")
    bench.seek(2)


def _transfer(bench: Bench) -> None:
    plain, parked, _ = bench.produce("plain", "parked", "left behind", keys=[None, "left", "left"], priority=0)
    bench.send(plain)
    bench.deliver(70)
    bench.bury(bench.lease(1).lease, reason="a dead letter")
    bench.send(parked)
    bench.deliver(71)
    bench.release("left")
    bench.complete(bench.lease(1).lease, then=[Letter(ELSEWHERE, b"a follow-up")])
    bench.send(*bench.produce("on their way", "in one transfer"))


def _resize(bench: Bench) -> None:
    narrowed = bench.fence("lifted", "narrowed")
    bench.produce("1", "2", "3", keys=["lifted", "narrowed", None], priority=0)
    bench.complete(bench.lease(1).lease)
    bench.narrow(narrowed, "lifted", "narrowed")
    bench.lift(narrowed, "lifted")
    bench.complete(bench.lease(1).lease)
    bench.fence("whole slots")
    bench.produce("1", "2", key="whole slots", priority=0)


def _leave_something_of_everything(bench: Bench) -> None:
    bench.produce("later", at=bench.after(500))
    for key in ("parked", "held", "slow"):
        bench.produce("1", "2", "3", key=key, priority=0)
    held = bench.lease(3, "holder", timeout=300, per_key=1)
    bench.bury(held.lease, [held.runs[0]], reason="parked")
    bench.note(held.lease, held.runs[0] + 3, "half way")
    bench.retry(held.lease, [held.runs[0] + 6], delay=200, reason="slow")
    bench.lease(1, timeout=300)
    bench.produce("overdue", priority=0, ttl=1)
    bench.lease(1, timeout=300)
    bench.advance(1)
    part = bench.lease(3, timeout=1)
    bench.complete(part.lease, [part.runs[0]])
    bench.advance(1)
    bench.pause(lease=True)
    bench.produce("ready")
