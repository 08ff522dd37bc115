"""What records say happened to items."""

from collections.abc import Iterator

import pytest

from penstock.logs import codec
from penstock.logs.log import Frame, FrameType
from penstock.rules import base, events, machine
from penstock.rules.events import Event, Happening, Teller
from penstock.rules.item_states import LifeEvent as Kind
from penstock.rules.outbox import destination
from penstock.rules.records import Completed, Leased, Lost, Opened, Produced, Record, Take
from penstock.rules.state import State
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, Moment
from simulation.broker.harness import BrokerHarness
from simulation.broker.simulation import BrokerSimulation
from simulation.partition.checks import Witness
from tests.full_history import everything
from tests.partition_under_test import ELSEWHERE, Bench, given, items


def recorded(bench: Bench) -> Iterator[tuple[Record, Moment]]:
    """Every record in a log of one segment, and its time."""
    for frame in bench.partition.log.frames():
        assert isinstance(frame, Frame) and frame.type is not FrameType.BASE
        for record in codec.records(frame, outline=True):
            yield record, Moment(frame.elapsed, frame.wall)


def told(bench: Bench) -> list[Happening]:
    teller = Teller()
    return [one for record, now in recorded(bench) for one in teller.tell(record, now)]


def of(bench: Bench, offset: int) -> list[Event]:
    """What happened to an item."""
    return [event for event in (one.of(offset) for one in told(bench)) if event is not None]


def names(found: list[Event]) -> list[str]:
    return [event.event for event in found]


# -- whole histories -----------------------------------------------------------------------------------


def test_every_record_is_told_or_known_to_tell_nothing() -> None:
    kinds = [*events.BEFORE, *events.AFTER, *events.SILENT]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == set(machine._APPLY)


def test_everything_that_happens_is_told(bench: Bench) -> None:
    bench.produce("again")
    bench.retry(bench.lease().lease)
    everything(bench)
    witness = Witness()
    for record, now in recorded(bench):
        witness.see(record, now)
    assert base.dump(witness.teller.state) == base.dump(bench.partition.state)
    assert witness.lives == {offset: bench.life(offset) for offset in range(bench.partition.state.next_offset)}
    assert {one.event for one in told(bench)} == set(Kind) - {Kind.LOST}


def test_a_state_from_a_base_tells_the_same(bench: Bench) -> None:
    everything(bench)
    whole, anew = Teller(), Teller()
    for record, now in recorded(bench):
        anew = Teller(base.load(base.dump(anew.state)))
        assert anew.tell(record, now) == whole.tell(record, now)


def test_what_is_told_of_a_broker_is_what_happens() -> None:
    """Transfers and resizes, kills and power cuts: every partition's log is looked through when all is over."""
    kinds: set[Kind] = set()
    for seed in range(9_000, 9_008):  # in some of them every queue is deleted at the end
        simulation = BrokerSimulation(seed)
        simulation.run()
        kinds.update(kind for log in logs_of(simulation.harness) for kind in looked_through(log))
    assert {Kind.PRODUCED, Kind.LEASED, Kind.COMPLETED} <= kinds


def logs_of(harness: BrokerHarness) -> Iterator[list[Frame]]:
    for loop in harness.broker.loops():
        for member in loop.turns.members.values():
            yield [frame for frame in member.open.log.frames() if isinstance(frame, Frame)]


def looked_through(frames: list[Frame]) -> set[Kind]:
    """Follow a log from Base to Base."""
    kinds: set[Kind] = set()
    witness, last = Witness(), 0
    for frame in frames:
        last, unbroken = frame.sequence, frame.sequence == last + 1
        if frame.type is FrameType.BASE:
            witness, unbroken = Witness(base.load(frame.body)), True
        elif unbroken:
            for record in codec.records(frame, outline=True):
                kinds |= {one.event for one in witness.see(record, Moment(frame.elapsed, frame.wall))}
    return kinds


def test_a_witness_misses_what_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    witness, now = Witness(), Moment(0, 0)
    witness.see(Produced(0, Batch([b"a", b"b"])), now)
    witness.see(Leased(1, 9, 9, "", [Take(5, 0, 2)]), now)
    monkeypatch.delitem(events.BEFORE, Completed)
    with pytest.raises(AssertionError, match=r"'leased': 2.*leased=0"):
        witness.see(Completed(1), now)


# -- one item ------------------------------------------------------------------------------------------


def test_an_item_that_is_tried_twice(bench: Bench) -> None:
    (offset,) = bench.produce("a")
    began = bench.wall
    first = bench.lease(consumer="one", timeout=5)
    bench.extend(first.lease, 10)
    bench.advance(10)
    second = bench.lease(consumer="two")
    bench.retry(second.lease, delay=3, reason="no")
    bench.advance(3)
    third = bench.lease(consumer="three")
    bench.complete(third.lease)
    assert of(bench, offset) == [
        Event("produced", offset, began),
        Event("leased", offset, began, 1, "", "one", first.lease),
        Event("extended", offset, began, 1, "", "one", first.lease),
        Event("lease expired", offset, began + 10 * SECOND, 1, "lease expired", "one", first.lease),
        Event("leased", offset, began + 10 * SECOND, 2, "", "two", second.lease),
        Event("delayed", offset, began + 10 * SECOND, 2, "no", "two", second.lease),
        Event("due", offset, began + 13 * SECOND, 2),
        Event("leased", offset, began + 13 * SECOND, 3, "", "three", third.lease),
        Event("completed", offset, began + 13 * SECOND, 3, "", "three", third.lease),
    ]


def test_an_item_is_given_up_when_its_attempts_are_spent(bench: Bench) -> None:
    bench.configure(max_attempts=2)
    (offset,) = bench.produce("a")
    for _ in range(2):
        bench.retry(bench.lease().lease, reason="no")
    found = of(bench, offset)
    assert [(event.event, event.attempt, event.reason) for event in found[2:]] == [
        ("retried", 1, "no"),
        ("leased", 2, ""),
        ("buried", 2, "attempts spent: no"),
    ]
    bench.redrive(offset)
    assert of(bench, offset)[-1] == Event("redriven", offset, bench.wall, 2)


def test_the_later_items_of_a_unit_return_with_the_first(bench: Bench) -> None:
    first, second, third = bench.produce("1", "2", "3", key="k")
    lease = bench.lease(3, per_key=3).lease
    bench.retry(lease, [first], reason="no")
    lease = bench.lease(3, per_key=3).lease
    bench.bury(lease, [first], reason="never")
    assert [(e.event, e.reason) for e in of(bench, second) if e.event != "leased"] == [
        ("produced", ""),
        ("retried", events.RETURNED),
        ("retried", events.RETURNED),
    ]
    assert [event.attempt for event in of(bench, third) if event.event == "leased"] == [1, 1]


def test_an_attempt_that_does_not_count_is_given_back(bench: Bench) -> None:
    (offset,) = bench.produce("a")
    bench.retry(bench.lease().lease, counted=False)
    bench.lease()
    assert [(event.event, event.attempt) for event in of(bench, offset)] == [("produced", 0), ("leased", 1), ("retried", 1), ("leased", 1)]


def test_a_ttl_is_told_apart_from_a_burial(bench: Bench) -> None:
    waiting, later = *bench.produce("a", ttl=5), *bench.produce("b", ttl=5, at=bench.after(60))
    held = *bench.produce("c", ttl=5, priority=0), bench.lease(1, timeout=60).lease
    bench.advance(5)
    bench.retry(held[1], [held[0]])
    assert names(of(bench, waiting)) == ["produced", "expired"]
    assert names(of(bench, later)) == ["scheduled", "expired"]
    assert names(of(bench, held[0])) == ["produced", "leased", "buried"] and of(bench, held[0])[-1].reason == "expired"


def test_an_operators_word_is_told(bench: Bench) -> None:
    done, ready, leased = bench.produce("done", "ready", "leased", priorities=[0, 9, 5])
    bench.complete(bench.lease(1).lease)
    bench.lease(1)
    (later,) = bench.produce("later", at=bench.after(60))
    bench.clear(ready=True, scheduled=True, leased=True)
    assert names(of(bench, ready)) == ["produced", "cleared"]
    assert names(of(bench, later)) == ["scheduled", "cleared"]
    assert [(event.event, event.attempt) for event in of(bench, leased)] == [("produced", 0), ("leased", 1), ("cleared", 1)]
    bench.seek(0)
    bench.clear(ready=True)
    bench.drop(0, 1)
    assert names(of(bench, done)) == ["produced", "leased", "completed", "sought", "cleared", "dropped"]


def test_a_transfer_is_told_with_both_its_ends(bench: Bench) -> None:
    first, other, second = bench.produce("a", "b", "c")
    bench.send(first, second)
    bench.deliver(70)
    sent, delivered = of(bench, second)[1:]
    assert (sent.event, sent.destination) == ("sent", "000000000000dead/3")
    assert (delivered.event, delivered.destination) == ("delivered", "000000000000dead/3-71")
    assert names(of(bench, other)) == ["produced"]
    both = next(one for one in told(bench) if one.event is Kind.DELIVERED)
    assert [event.destination for event in both.events()] == ["000000000000dead/3-70", "000000000000dead/3-71"]
    bench.store(items(["back"]), source=ELSEWHERE, sequence=1)
    bench.store(items(["stranger"]), source=b"?", sequence=1)
    assert [of(bench, offset)[0].source for offset in (3, 4)] == ["000000000000dead/3", "3f"]


def test_an_arrival_that_is_not_placed_is_told_without_its_offset(bench: Bench) -> None:
    (offset,) = bench.produce("a")
    bench.send(offset, to=destination(1, 2))
    bench.deliver(to=destination(1, 2))
    assert of(bench, offset)[-1].destination == "0000000000000001/2"


def test_a_reboot_extends_every_lease(bench: Bench) -> None:
    (offset,) = bench.produce("a")
    lease = bench.lease(consumer="c").lease
    bench.partition.close()
    bench.clock.reboot(60 * SECOND)
    bench.open()
    assert of(bench, offset)[-1] == Event("extended", offset, bench.wall, 1, events.REBOOTED, "c", lease)


def test_damage_takes_what_is_not_resolved() -> None:
    teller, now = Teller(), Moment(0, 7)
    for record in (Opened(1, "boot", 0), Produced(0, Batch([b""] * 5)), Leased(1, 9, 9, "c", [Take(5, 0, 2)]), Completed(1, [0, 1])):
        teller.tell(record, now)
    plain, held = teller.tell(Lost([0, 4]), now)
    assert (plain.runs, held.runs, held.attempt) == ([2, 4], [1, 2], 1)
    assert teller.tell(Lost([0, 4]), now) == []
    (unseen,) = teller.tell(Lost([5, 8]), now)  # records of these were never seen
    assert unseen.runs == [5, 8]


def test_a_completion_without_its_lease_is_told() -> None:
    """Damage took the record of the lease."""
    teller = Teller(State())
    teller.tell(Produced(0, Batch([b"a"])), Moment(0, 1))
    (done,) = teller.tell(Completed(4, [0, 1]), Moment(0, 2))
    assert list(done.events()) == [Event("completed", 0, 2, 1, lease=4)]


def test_a_happening_finds_its_items_in_any_order() -> None:
    one = Happening(Kind.LEASED, [7, 9, 2, 3], 5, 1, {8: 4}, consumer="c", lease=6)
    assert [(event.offset, event.attempt) for event in one.events()] == [(7, 1), (8, 4), (2, 1)]
    assert [one.of(offset) for offset in (7, 8, 2)] == list(one.events())
    assert one.of(9) is None and one.of(1) is None


def test_leases_of_many_are_one_happening(bench: Bench) -> None:
    """Told in bulk: what is told of a batch does not grow with it."""
    bench.produce(*map(str, range(500)))
    granted = bench.lease(500)
    bench.complete(granted.lease)
    assert [(one.event, one.runs) for one in told(bench)] == [(kind, [0, 500]) for kind in (Kind.PRODUCED, Kind.LEASED, Kind.COMPLETED)]
    assert given(granted) == list(range(500))
