"""What records say happened to items."""

from collections.abc import Iterator

import pytest

from penstock.logs import codec
from penstock.logs.log import Frame, FrameType
from penstock.rules import base, events, machine
from penstock.rules.events import Event, EventReplay, EventRuns
from penstock.rules.item_states import Transition as Kind
from penstock.rules.outbox import pack_destination
from penstock.rules.records import Completed, LaneTake, Leased, Lost, Opened, Produced, Record
from penstock.rules.state import State
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, Moment
from simulation.broker.harness import BrokerHarness
from simulation.broker.simulation import BrokerSimulation
from simulation.partition.checks import EventChecker
from tests.full_history import write_every_record
from tests.partition_under_test import ELSEWHERE, PartitionUnderTest, granted_offsets, items


def recorded(partition: PartitionUnderTest) -> Iterator[tuple[Record, Moment]]:
    """Every record in a log of one segment, and its time."""
    for frame in partition.wrapped.log.frames():
        assert isinstance(frame, Frame) and frame.type is not FrameType.BASE
        for record in codec.decode_frame(frame, outline=True):
            yield record, Moment(frame.elapsed, frame.wall)


def told(partition: PartitionUnderTest) -> list[EventRuns]:
    teller = EventReplay()
    return [one for record, now in recorded(partition) for one in teller.apply(record, now)]


def of(partition: PartitionUnderTest, offset: int) -> list[Event]:
    """What happened to an item."""
    return [event for event in (one.event_of(offset) for one in told(partition)) if event is not None]


def names(found: list[Event]) -> list[str]:
    return [event.event for event in found]


# -- whole histories -----------------------------------------------------------------------------------


def test_every_record_is_told_or_known_to_tell_nothing() -> None:
    kinds = [*events.BEFORE, *events.AFTER, *events.SILENT]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == set(machine._APPLY)


def test_everything_that_happens_is_told(partition: PartitionUnderTest) -> None:
    partition.produce("again")
    partition.retry(partition.lease().lease)
    write_every_record(partition)
    witness = EventChecker()
    for record, now in recorded(partition):
        witness.see(record, now)
    assert base.dump(witness.replay.state) == base.dump(partition.wrapped.state)
    assert witness.states == {offset: partition.state_of(offset) for offset in range(partition.wrapped.state.next_offset)}
    assert {one.event for one in told(partition)} == set(Kind) - {Kind.LOST}


def test_a_state_from_a_base_tells_the_same(partition: PartitionUnderTest) -> None:
    write_every_record(partition)
    whole, anew = EventReplay(), EventReplay()
    for record, now in recorded(partition):
        anew = EventReplay(base.load(base.dump(anew.state)))
        assert anew.apply(record, now) == whole.apply(record, now)


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
        for member in loop.engine.handles.values():
            yield [frame for frame in member.usable_partition.log.frames() if isinstance(frame, Frame)]


def looked_through(frames: list[Frame]) -> set[Kind]:
    """Follow a log from Base to Base."""
    kinds: set[Kind] = set()
    witness, last = EventChecker(), 0
    for frame in frames:
        last, unbroken = frame.sequence, frame.sequence == last + 1
        if frame.type is FrameType.BASE:
            witness, unbroken = EventChecker(base.load(frame.body)), True
        elif unbroken:
            for record in codec.decode_frame(frame, outline=True):
                kinds |= {one.event for one in witness.see(record, Moment(frame.elapsed, frame.wall))}
    return kinds


def test_a_witness_misses_what_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    witness, now = EventChecker(), Moment(0, 0)
    witness.see(Produced(0, Batch([b"a", b"b"])), now)
    witness.see(Leased(1, 9, 9, "", [LaneTake(5, 0, 2)]), now)
    monkeypatch.delitem(events.BEFORE, Completed)
    with pytest.raises(AssertionError, match=r"'leased': 2.*leased=0"):
        witness.see(Completed(1), now)


# -- one item ------------------------------------------------------------------------------------------


def test_an_item_that_is_tried_twice(partition: PartitionUnderTest) -> None:
    (offset,) = partition.produce("a")
    began = partition.wall
    first = partition.lease(consumer="one", timeout=5)
    partition.extend(first.lease, 10)
    partition.advance(10)
    second = partition.lease(consumer="two")
    partition.retry(second.lease, delay=3, reason="no")
    partition.advance(3)
    third = partition.lease(consumer="three")
    partition.complete(third.lease)
    assert of(partition, offset) == [
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


def test_an_item_is_given_up_when_its_attempts_are_spent(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=2)
    (offset,) = partition.produce("a")
    for _ in range(2):
        partition.retry(partition.lease().lease, reason="no")
    found = of(partition, offset)
    assert [(event.event, event.attempt, event.reason) for event in found[2:]] == [
        ("retried", 1, "no"),
        ("leased", 2, ""),
        ("buried", 2, "attempts spent: no"),
    ]
    partition.redrive(offset)
    assert of(partition, offset)[-1] == Event("redriven", offset, partition.wall, 2)


def test_the_later_items_of_a_unit_return_with_the_first(partition: PartitionUnderTest) -> None:
    first, second, third = partition.produce("1", "2", "3", key="k")
    lease = partition.lease(3, per_key=3).lease
    partition.retry(lease, [first], reason="no")
    lease = partition.lease(3, per_key=3).lease
    partition.bury(lease, [first], reason="never")
    assert [(e.event, e.reason) for e in of(partition, second) if e.event != "leased"] == [
        ("produced", ""),
        ("retried", events.RETURNED),
        ("retried", events.RETURNED),
    ]
    assert [event.attempt for event in of(partition, third) if event.event == "leased"] == [1, 1]


def test_an_attempt_that_does_not_count_is_given_back(partition: PartitionUnderTest) -> None:
    (offset,) = partition.produce("a")
    partition.retry(partition.lease().lease, counted=False)
    partition.lease()
    assert [(event.event, event.attempt) for event in of(partition, offset)] == [
        ("produced", 0),
        ("leased", 1),
        ("retried", 1),
        ("leased", 1),
    ]


def test_a_ttl_is_told_apart_from_a_burial(partition: PartitionUnderTest) -> None:
    waiting, later = *partition.produce("a", ttl=5), *partition.produce("b", ttl=5, at=partition.after(60))
    held = *partition.produce("c", ttl=5, priority=0), partition.lease(1, timeout=60).lease
    partition.advance(5)
    partition.retry(held[1], [held[0]])
    assert names(of(partition, waiting)) == ["produced", "expired"]
    assert names(of(partition, later)) == ["scheduled", "expired"]
    assert names(of(partition, held[0])) == ["produced", "leased", "buried"] and of(partition, held[0])[-1].reason == "expired"


def test_an_operators_word_is_told(partition: PartitionUnderTest) -> None:
    done, ready, leased = partition.produce("done", "ready", "leased", priorities=[0, 9, 5])
    partition.complete(partition.lease(1).lease)
    partition.lease(1)
    (later,) = partition.produce("later", at=partition.after(60))
    partition.clear(ready=True, scheduled=True, leased=True)
    assert names(of(partition, ready)) == ["produced", "cleared"]
    assert names(of(partition, later)) == ["scheduled", "cleared"]
    assert [(event.event, event.attempt) for event in of(partition, leased)] == [("produced", 0), ("leased", 1), ("cleared", 1)]
    partition.seek(0)
    partition.clear(ready=True)
    partition.drop(0, 1)
    assert names(of(partition, done)) == ["produced", "leased", "completed", "sought", "cleared", "dropped"]


def test_a_transfer_is_told_with_both_its_ends(partition: PartitionUnderTest) -> None:
    first, other, second = partition.produce("a", "b", "c")
    partition.send(first, second)
    partition.deliver(70)
    sent, delivered = of(partition, second)[1:]
    assert (sent.event, sent.destination) == ("sent", "000000000000dead/3")
    assert (delivered.event, delivered.destination) == ("delivered", "000000000000dead/3-71")
    assert names(of(partition, other)) == ["produced"]
    both = next(one for one in told(partition) if one.event is Kind.DELIVERED)
    assert [event.destination for event in both.events()] == ["000000000000dead/3-70", "000000000000dead/3-71"]
    partition.store(items(["back"]), source=ELSEWHERE, sequence=1)
    partition.store(items(["stranger"]), source=b"?", sequence=1)
    assert [of(partition, offset)[0].source for offset in (3, 4)] == ["000000000000dead/3", "3f"]


def test_an_arrival_that_is_not_placed_is_told_without_its_offset(partition: PartitionUnderTest) -> None:
    (offset,) = partition.produce("a")
    partition.send(offset, to=pack_destination(1, 2))
    partition.deliver(to=pack_destination(1, 2))
    assert of(partition, offset)[-1].destination == "0000000000000001/2"


def test_a_reboot_extends_every_lease(partition: PartitionUnderTest) -> None:
    (offset,) = partition.produce("a")
    lease = partition.lease(consumer="c").lease
    partition.wrapped.close()
    partition.clock.reboot(60 * SECOND)
    partition.open()
    assert of(partition, offset)[-1] == Event("extended", offset, partition.wall, 1, events.REBOOTED, "c", lease)


def test_damage_takes_what_is_not_resolved() -> None:
    teller, now = EventReplay(), Moment(0, 7)
    for record in (Opened(1, "boot", 0), Produced(0, Batch([b""] * 5)), Leased(1, 9, 9, "c", [LaneTake(5, 0, 2)]), Completed(1, [0, 1])):
        teller.apply(record, now)
    plain, held = teller.apply(Lost([0, 4]), now)
    assert (plain.runs, held.runs, held.attempt) == ([2, 4], [1, 2], 1)
    assert teller.apply(Lost([0, 4]), now) == []
    (unseen,) = teller.apply(Lost([5, 8]), now)  # records of these were never seen
    assert unseen.runs == [5, 8]


def test_a_completion_without_its_lease_is_told() -> None:
    """Damage took the record of the lease."""
    teller = EventReplay(State())
    teller.apply(Produced(0, Batch([b"a"])), Moment(0, 1))
    (done,) = teller.apply(Completed(4, [0, 1]), Moment(0, 2))
    assert list(done.events()) == [Event("completed", 0, 2, 1, lease=4)]


def test_a_happening_finds_its_items_in_any_order() -> None:
    one = EventRuns(Kind.LEASED, [7, 9, 2, 3], 5, 1, {8: 4}, consumer="c", lease=6)
    assert [(event.offset, event.attempt) for event in one.events()] == [(7, 1), (8, 4), (2, 1)]
    assert [one.event_of(offset) for offset in (7, 8, 2)] == list(one.events())
    assert one.event_of(9) is None and one.event_of(1) is None


def test_leases_of_many_are_one_happening(partition: PartitionUnderTest) -> None:
    """Told in bulk: what is told of a batch does not grow with it."""
    partition.produce(*map(str, range(500)))
    granted = partition.lease(500)
    partition.complete(granted.lease)
    assert [(one.event, one.runs) for one in told(partition)] == [(kind, [0, 500]) for kind in (Kind.PRODUCED, Kind.LEASED, Kind.COMPLETED)]
    assert granted_offsets(granted) == list(range(500))
