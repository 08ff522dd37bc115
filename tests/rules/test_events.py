"""The events of items that records give."""

from collections.abc import Iterator

import pytest

from penstock.logs import codec
from penstock.logs.log import Frame, FrameType
from penstock.rules import base, events, machine, records
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


def event_runs(partition: PartitionUnderTest) -> list[EventRuns]:
    replay = EventReplay()
    return [one for record, now in recorded(partition) for one in replay.apply(record, now)]


def events_of(partition: PartitionUnderTest, offset: int) -> list[Event]:
    """All events of an item."""
    return [event for event in (one.event_of(offset) for one in event_runs(partition)) if event is not None]


def names(found: list[Event]) -> list[str]:
    return [event.event for event in found]


# -- whole histories -----------------------------------------------------------------------------------


WITHOUT_EVENTS = (
    *(records.Configured, records.PassedOver, records.RequestAnswered, records.TtlChecked, records.Paused, records.CursorMoved),
    *(records.CursorReleased, records.ProgressSet, records.FencesAdded, records.FenceNarrowed, records.FenceLifted),
    *(records.FollowUpSent, records.ParkedKeyReleased, records.CallAnswered, records.Restored),
)
"""Records that do nothing to an item of their partition."""


def test_every_kind_of_record_has_events_or_is_known_to_have_none() -> None:
    kinds = [*events.BEFORE, *events.AFTER, *WITHOUT_EVENTS]
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == set(machine._APPLY)


def test_every_kind_of_event_is_given_and_follows_the_table(partition: PartitionUnderTest) -> None:
    partition.produce("again")
    partition.retry(partition.lease().lease)
    write_every_record(partition)
    checker = EventChecker()
    for record, now in recorded(partition):
        checker.see(record, now)
    assert base.dump(checker.replay.state) == base.dump(partition.wrapped.state)
    assert checker.states == {offset: partition.state_of(offset) for offset in range(partition.wrapped.state.next_offset)}
    assert {one.event for one in event_runs(partition)} == set(Kind) - {Kind.LOST}


def test_a_replay_from_a_base_gives_the_same_events(partition: PartitionUnderTest) -> None:
    write_every_record(partition)
    whole, anew = EventReplay(), EventReplay()
    for record, now in recorded(partition):
        anew = EventReplay(base.load(base.dump(anew.state)))
        assert anew.apply(record, now) == whole.apply(record, now)


def test_the_events_of_a_simulated_broker_follow_the_table() -> None:
    """With transfers, resizes, kills and power cuts: the log of every partition is checked at the end."""
    kinds: set[Kind] = set()
    for seed in range(9_000, 9_008):  # in some of them every queue is deleted at the end
        simulation = BrokerSimulation(seed)
        simulation.run()
        kinds.update(kind for log in logs_of(simulation.harness) for kind in checked_kinds(log))
    assert {Kind.PRODUCED, Kind.LEASED, Kind.COMPLETED} <= kinds


def logs_of(harness: BrokerHarness) -> Iterator[list[Frame]]:
    for loop in harness.broker.loops():
        for handle in loop.engine.handles.values():
            yield [frame for frame in handle.usable_partition.log.frames() if isinstance(frame, Frame)]


def checked_kinds(frames: list[Frame]) -> set[Kind]:
    """Check the events of a log from Base to Base; returns their kinds."""
    kinds: set[Kind] = set()
    checker, last = EventChecker(), 0
    for frame in frames:
        last, unbroken = frame.sequence, frame.sequence == last + 1
        if frame.type is FrameType.BASE:
            checker, unbroken = EventChecker(base.load(frame.body)), True
        elif unbroken:
            for record in codec.decode_frame(frame, outline=True):
                kinds |= {one.event for one in checker.see(record, Moment(frame.elapsed, frame.wall))}
    return kinds


def test_the_event_checker_finds_a_missing_event(monkeypatch: pytest.MonkeyPatch) -> None:
    checker, now = EventChecker(), Moment(0, 0)
    checker.see(Produced(0, Batch([b"a", b"b"])), now)
    checker.see(Leased(1, 9, 9, "", [LaneTake(5, 0, 2)]), now)
    monkeypatch.delitem(events.BEFORE, Completed)
    with pytest.raises(AssertionError, match=r"'leased': 2.*leased=0"):
        checker.see(Completed(1), now)


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
    assert events_of(partition, offset) == [
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


def test_an_item_is_buried_when_its_attempts_are_exhausted(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=2)
    (offset,) = partition.produce("a")
    for _ in range(2):
        partition.retry(partition.lease().lease, reason="no")
    found = events_of(partition, offset)
    assert [(event.event, event.attempt, event.reason) for event in found[2:]] == [
        ("retried", 1, "no"),
        ("leased", 2, ""),
        ("buried", 2, "attempts spent: no"),
    ]
    partition.redrive(offset)
    assert events_of(partition, offset)[-1] == Event("redriven", offset, partition.wall, 2)


def test_the_later_items_of_a_unit_return_with_the_first(partition: PartitionUnderTest) -> None:
    first, second, third = partition.produce("1", "2", "3", key="k")
    lease = partition.lease(3, per_key=3).lease
    partition.retry(lease, [first], reason="no")
    lease = partition.lease(3, per_key=3).lease
    partition.bury(lease, [first], reason="never")
    assert [(e.event, e.reason) for e in events_of(partition, second) if e.event != "leased"] == [
        ("produced", ""),
        ("retried", events.RETURNED),
        ("retried", events.RETURNED),
    ]
    assert [event.attempt for event in events_of(partition, third) if event.event == "leased"] == [1, 1]


def test_an_attempt_that_does_not_count_is_given_back(partition: PartitionUnderTest) -> None:
    (offset,) = partition.produce("a")
    partition.retry(partition.lease().lease, counted=False)
    partition.lease()
    assert [(event.event, event.attempt) for event in events_of(partition, offset)] == [
        ("produced", 0),
        ("leased", 1),
        ("retried", 1),
        ("leased", 1),
    ]


def test_an_ended_ttl_and_a_burial_are_different_events(partition: PartitionUnderTest) -> None:
    waiting, later = *partition.produce("a", ttl=5), *partition.produce("b", ttl=5, at=partition.after(60))
    held = *partition.produce("c", ttl=5, priority=0), partition.lease(1, timeout=60).lease
    partition.advance(5)
    partition.retry(held[1], [held[0]])
    assert names(events_of(partition, waiting)) == ["produced", "expired"]
    assert names(events_of(partition, later)) == ["scheduled", "expired"]
    held_events = events_of(partition, held[0])
    assert names(held_events) == ["produced", "leased", "buried"] and held_events[-1].reason == "expired"


def test_administrative_operations_have_events(partition: PartitionUnderTest) -> None:
    done, ready, leased = partition.produce("done", "ready", "leased", priorities=[0, 9, 5])
    partition.complete(partition.lease(1).lease)
    partition.lease(1)
    (later,) = partition.produce("later", at=partition.after(60))
    partition.clear(ready=True, scheduled=True, leased=True)
    assert names(events_of(partition, ready)) == ["produced", "cleared"]
    assert names(events_of(partition, later)) == ["scheduled", "cleared"]
    assert [(event.event, event.attempt) for event in events_of(partition, leased)] == [("produced", 0), ("leased", 1), ("cleared", 1)]
    partition.seek(0)
    partition.clear(ready=True)
    partition.drop(0, 1)
    assert names(events_of(partition, done)) == ["produced", "leased", "completed", "sought", "cleared", "dropped"]


def test_the_events_of_a_transfer_name_its_source_and_destination(partition: PartitionUnderTest) -> None:
    first, other, second = partition.produce("a", "b", "c")
    partition.send(first, second)
    partition.deliver(70)
    sent, delivered = events_of(partition, second)[1:]
    assert (sent.event, sent.destination) == ("sent", "000000000000dead/3")
    assert (delivered.event, delivered.destination) == ("delivered", "000000000000dead/3-71")
    assert names(events_of(partition, other)) == ["produced"]
    both = next(one for one in event_runs(partition) if one.event is Kind.DELIVERED)
    assert [event.destination for event in both.events()] == ["000000000000dead/3-70", "000000000000dead/3-71"]
    partition.store(items(["back"]), source=ELSEWHERE, sequence=1)
    partition.store(items(["stranger"]), source=b"?", sequence=1)
    assert [events_of(partition, offset)[0].source for offset in (3, 4)] == ["000000000000dead/3", "3f"]


def test_a_delivery_to_an_unknown_offset_has_no_offset(partition: PartitionUnderTest) -> None:
    (offset,) = partition.produce("a")
    partition.send(offset, to=pack_destination(1, 2))
    partition.deliver(to=pack_destination(1, 2))
    assert events_of(partition, offset)[-1].destination == "0000000000000001/2"


def test_a_reboot_extends_every_lease(partition: PartitionUnderTest) -> None:
    (offset,) = partition.produce("a")
    lease = partition.lease(consumer="c").lease
    partition.wrapped.close()
    partition.clock.reboot(60 * SECOND)
    partition.open()
    assert events_of(partition, offset)[-1] == Event("extended", offset, partition.wall, 1, events.REBOOTED, "c", lease)


def test_lost_items_have_an_event_unless_they_are_completed() -> None:
    replay, now = EventReplay(), Moment(0, 7)
    for record in (Opened(1, "boot", 0), Produced(0, Batch([b""] * 5)), Leased(1, 9, 9, "c", [LaneTake(5, 0, 2)]), Completed(1, [0, 1])):
        replay.apply(record, now)
    plain, held = replay.apply(Lost([0, 4]), now)
    assert (plain.runs, held.runs, held.attempt) == ([2, 4], [1, 2], 1)
    assert replay.apply(Lost([0, 4]), now) == []
    (unseen,) = replay.apply(Lost([5, 8]), now)  # records of these were never seen
    assert unseen.runs == [5, 8]


def test_a_completion_has_an_event_even_if_its_lease_is_lost() -> None:
    """Damage took the record of the lease."""
    replay = EventReplay(State())
    replay.apply(Produced(0, Batch([b"a"])), Moment(0, 1))
    (done,) = replay.apply(Completed(4, [0, 1]), Moment(0, 2))
    assert list(done.events()) == [Event("completed", 0, 2, 1, lease=4)]


def test_event_runs_find_their_items_in_any_order() -> None:
    one = EventRuns(Kind.LEASED, [7, 9, 2, 3], 5, 1, {8: 4}, consumer="c", lease=6)
    assert [(event.offset, event.attempt) for event in one.events()] == [(7, 1), (8, 4), (2, 1)]
    assert [one.event_of(offset) for offset in (7, 8, 2)] == list(one.events())
    assert one.event_of(9) is None and one.event_of(1) is None


def test_the_lease_of_many_items_is_one_event_run(partition: PartitionUnderTest) -> None:
    """The number of event runs does not grow with the batch."""
    partition.produce(*map(str, range(500)))
    granted = partition.lease(500)
    partition.complete(granted.lease)
    assert [(one.event, one.runs) for one in event_runs(partition)] == [
        (kind, [0, 500]) for kind in (Kind.PRODUCED, Kind.LEASED, Kind.COMPLETED)
    ]
    assert granted_offsets(granted) == list(range(500))
