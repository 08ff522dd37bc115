"""What crosses from one log to another arrives once, wherever the process ends on the way."""

import errno
from contextlib import suppress
from functools import cache
from typing import Any

from penstock.loop.requests import LeasePart
from penstock.operations import ListItems, RedriveItems
from penstock.testing import ManualClock, SimulatedFiles
from penstock.words import origin
from penstock.words.errors import PenstockError
from penstock.words.origin import Origin
from simulation.simulated_machine import InterruptingClock
from tests.broker.broker_under_test import Desk, Rig, batch_of, moving_key
from tests.broker.crashes import cut_off, prepared
from tests.broker.storages import Simulated

LEASE_SECONDS = 60


def served(rig: Rig, *names: str) -> list[str]:
    """Everything that queues give out, once whoever held something before the crash has lost it. Nothing stays on its way."""
    rig.pass_by(LEASE_SECONDS + 10)
    found: list[str] = []
    for name in names:
        desk = rig.find(name)
        found += [f"{name}: {text}" for text in desk.drain()]
        rig.pass_by(5)
    for name in names:
        stats = rig.find(name).stats()
        assert stats.transfers == 0 and stats.moving == 0 and stats.resizing == []
        assert set(rig.find(name).counts()) <= {"completed"}, "nothing is left"
    return sorted(found)


def origins(desk: Desk) -> list[Origin]:
    listed = desk.call(ListItems(limit=1_000))
    packed = [one.batch.origins[one.index] for one in listed if one.batch.origins]
    return [origin.decode(one) for one in packed if one]


class Started:
    """A disk that a test begins with, and the leases that its broker had given."""

    def __init__(self) -> None:
        self.parts: list[LeasePart] = []
        self.place: tuple[SimulatedFiles, ManualClock]


def test_no_transfer_is_forgotten_when_whoever_runs_a_turn_is_interrupted() -> None:
    """Wherever that comes: what leaves is sent, and the source learns of its arrival, without a restart."""
    for look in range(40):
        clock = InterruptingClock()
        rig = Rig(Simulated(), clock=clock)
        rig.create("dead", partitions=2)
        source = rig.create("source", partitions=2, dead_queue="dead", max_attempts=3)
        source.produce("a", "b", "c", keys=["k1", "k2", None])
        parts = source.lease().parts
        clock.interrupt_after = look
        with suppress(KeyboardInterrupt):
            source.settle("bury", parts, reason="bad", request=b"b")
            rig.turn()
        clock.interrupt_after = None
        rig.pass_by(10)
        assert source.stats().transfers == 0, f"interrupted at look {look}"


# -- dead letters -------------------------------------------------------------------------------------------


@cache
def with_dead_queue() -> Started:
    """Three items leased, of a queue that has a dead queue."""
    started = Started()

    def work(rig: Rig) -> None:
        rig.create("dead", partitions=2)
        source = rig.create("source", partitions=2, dead_queue="dead", max_attempts=3)
        source.produce("a", "b", "c", keys=["k1", "k2", None])
        started.parts = source.lease().parts

    started.place = prepared(work)
    return started


def test_a_dead_letter_arrives_once() -> None:
    start = with_dead_queue()

    def bury(rig: Rig) -> None:
        rig.find("source").settle("bury", start.parts, reason="bad", request=b"b")
        rig.turn()

    before = 0
    for rig, done in cut_off(start.place, bury):
        source, dead = rig.find("source"), rig.find("dead")
        before += not done and bool(dead.stats().produced)
        answer = source.settle("bury", start.parts, reason="bad", request=b"b")  # the caller repeats what was not answered
        assert sum(one.done for one in answer) in (0, 3)
        rig.pass_by(3)
        letters = origins(dead)
        assert len(letters) == 3 and all(one.queue == "source" and one.reason == "bad" and one.attempts == 1 for one in letters)
        assert served(rig, "source", "dead") == ["dead: a", "dead: b", "dead: c"]
    assert before, "it was also cut off when the letter was there and its source did not know"


def test_items_whose_attempts_are_spent_arrive_once_too() -> None:
    start = with_dead_queue()

    def expire(rig: Rig) -> None:
        """Nobody settles anything: three leases, three expiries."""
        for _ in range(2):
            rig.pass_by(LEASE_SECONDS)
            rig.find("source").lease()
        rig.pass_by(LEASE_SECONDS)
        rig.turn()

    for rig, _ in cut_off(start.place, expire, step=3):
        for _ in range(3):
            rig.pass_by(LEASE_SECONDS)
            rig.find("source").lease()
        rig.pass_by(LEASE_SECONDS + 3)
        assert [one.attempts for one in origins(rig.find("dead"))] == [3] * 3
        assert served(rig, "source", "dead") == ["dead: a", "dead: b", "dead: c"]


# -- redrive ------------------------------------------------------------------------------------------------


@cache
def with_letters() -> Started:
    """Letters in a dead queue, and one that was never buried anywhere."""
    started = Started()

    def work(rig: Rig) -> None:
        dead = rig.create("dead", partitions=2)
        source = rig.create("source", partitions=3, dead_queue="dead")
        source.produce(*"abcdef", keys=["k1", "k2", "k3", None, "k1", "k2"])
        while held := source.lease():
            held.bury(reason="bad")
        dead.produce("native")
        rig.turn()

    started.place = prepared(work)
    return started


def redrive(rig: Rig) -> None:
    """As a caller does it: everything that is there when it looks."""
    dead, source = rig.find("dead"), rig.find("source")
    chosen: dict[int, list[int]] = {}
    for one in dead.call(ListItems(states=("ready", "buried"), limit=1_000)):
        chosen.setdefault(one.partition, []).append(one.offset)
    dead.call(RedriveItems(items=chosen, to=source.incarnation))
    rig.turn()


def test_a_redrive_cut_off_and_repeated_moves_everything_once() -> None:
    for rig, _ in cut_off(with_letters().place, redrive):
        redrive(rig)
        rig.pass_by(3)
        assert rig.find("dead").stats().depth == 0
        assert served(rig, "source", "dead") == sorted(f"source: {text}" for text in [*"abcdef", "native"])


def test_a_redrive_cut_off_loses_nothing_even_if_nobody_repeats_it() -> None:
    for rig, done in cut_off(with_letters().place, redrive):
        rig.pass_by(3)
        found = [text.partition(": ") for text in served(rig, "source", "dead")]
        assert sorted(text for _, _, text in found) == sorted([*"abcdef", "native"])
        assert not done or {queue for queue, _, _ in found} == {"source"}


@cache
def with_parked_key() -> Started:
    """An item whose burial parks its key went to the dead queue; others of the key wait behind it."""
    started = Started()

    def work(rig: Rig) -> None:
        rig.create("dead")
        source = rig.create("source", partitions=2, dead_queue="dead", on_bury="park")
        source.produce("1", "2", "3", key="k")
        source.lease().bury()
        rig.turn()

    started.place = prepared(work)
    return started


def test_a_redriven_item_takes_its_old_place_wherever_it_is_cut_off() -> None:
    for rig, _ in cut_off(with_parked_key().place, redrive):
        redrive(rig)
        rig.pass_by(3)
        assert rig.find("source").drain(10) == ["1", "2", "3"]
        assert served(rig, "source", "dead") == []


def test_a_dead_letter_that_was_given_up_again_takes_its_old_place_too() -> None:
    rig = Rig(Simulated())
    dead = rig.create("dead", on_bury="park")
    source = rig.create("source", partitions=2, dead_queue="dead", on_bury="park")
    source.produce("1", "2", "3", key="k")
    source.lease(2, per_key=2).bury()
    rig.turn()
    dead.lease(2, per_key=2).bury()  # so the key is parked there too, and stays so for the other one
    dead.call(RedriveItems(items={0: [0]}, to=source.incarnation))
    redrive(rig)
    assert source.drain(10) == ["1", "2", "3"]


def test_a_queue_is_deleted_only_when_what_came_to_it_is_known_to_have_come() -> None:
    """The news of an arrival is undone by a failed write: the sender would look for the queue for ever."""
    for call in range(1, 60):
        rig = Rig(Simulated())
        dead, source = rig.create("dead"), rig.create("source")
        source.produce("1", key="k")
        disk = rig.ground.files  # type: ignore[attr-defined]
        disk.fail(disk.calls + call, errno.EIO)
        with suppress(PenstockError):
            source.call(RedriveItems(items={0: [0]}, to=dead.incarnation))
            rig.delete("dead")
        disk.mend()
        rig.pass_by(20)
        assert source.stats().transfers == 0
        if disk.calls < call:
            return


# -- follow-ups ---------------------------------------------------------------------------------------------


@cache
def with_work() -> Started:
    started = Started()

    def work(rig: Rig) -> None:
        rig.create("next", partitions=3)
        source = rig.create("source")
        source.produce("first")
        started.parts = source.lease().parts

    started.place = prepared(work)
    return started


def test_completion_and_follow_ups_happen_once_or_not_at_all() -> None:
    start = with_work()

    def options(rig: Rig) -> dict[str, Any]:
        then = [
            (rig.find("next").incarnation, batch_of("x", "y", "z", keys=["k1", "k2", "k3"])),
            (rig.find("source").incarnation, batch_of("own")),
        ]
        return {"then": then, "request": b"c"}

    def complete(rig: Rig) -> None:
        rig.find("source").settle("complete", start.parts, **options(rig))
        rig.turn()

    for rig, done in cut_off(start.place, complete):
        source = rig.find("source")
        rig.pass_by(3)
        finished = source.explain("0-0").state == "completed"
        assert finished or not done
        assert len(rig.find("next").call(ListItems(limit=100))) == (3 if finished else 0), "both or neither"
        assert source.settle("complete", start.parts, **options(rig))[0].done == 1
        rig.pass_by(3)
        assert served(rig, "source", "next") == ["next: x", "next: y", "next: z", "source: own"]


# -- items whose key lives elsewhere now ----------------------------------------------------------------------


@cache
def with_strays() -> Started:
    """Items that were scheduled far ahead, and will come due where their keys no longer live."""
    started = Started()

    def work(rig: Rig) -> None:
        desk = rig.create("source")
        keys = [moving_key(1, 4), moving_key(1, 4, 50), moving_key(1, 4, 100)]
        desk.produce("a1", "b1", "c1", keys=keys, at=rig.after(1_000))
        desk.produce("a2", "b2", keys=keys[:2], at=rig.after(1_001))
        desk.resize(4)
        assert desk.stats().resizing == [], "they hold nothing"

    started.place = prepared(work)
    return started


def test_strays_are_forwarded_once_and_in_order() -> None:
    def forward(rig: Rig) -> None:
        rig.pass_by(1_002)
        rig.find("source").lease(1)
        rig.turn()

    on_the_way = 0
    for rig, done in cut_off(with_strays().place, forward):
        desk = rig.find("source")
        on_the_way += not done and any(member.state.moving for member in desk.loop.turns.healthy())
        rig.pass_by(1_002 + LEASE_SECONDS)
        found = desk.drain(1)
        assert sorted(found) == ["a1", "a2", "b1", "b2", "c1"]
        assert found.index("a1") < found.index("a2") and found.index("b1") < found.index("b2")
        assert served(rig, "source") == []
        assert desk.explain("0-0").id != "0-0", "its old id leads to where it went"
    assert on_the_way
