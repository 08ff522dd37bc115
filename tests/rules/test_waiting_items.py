"""Cancelling and rescheduling items that wait."""

import pytest

from penstock.rules import base, waiting_items
from penstock.rules.commands import ItemOutcome, RescheduleWaiting
from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from tests.partition_under_test import ELSEWHERE, PartitionUnderTest, items

DONE = ItemOutcome.DONE


# -- cancel ------------------------------------------------------------------------------------------


def test_each_item_has_its_own_outcome(partition: PartitionUnderTest) -> None:
    partition.produce("completed", "buried", "leased", "moved", "ready")
    (scheduled,) = partition.produce("scheduled", at=partition.after(60))
    partition.complete(partition.lease(1).lease)
    partition.bury(partition.lease(1).lease)
    partition.lease(1, timeout=1_000)
    partition.send(3)
    assert partition.cancel(3) == [ItemOutcome.MOVING]
    partition.deliver(7)
    expected = [ItemOutcome.COMPLETED, ItemOutcome.BURIED, ItemOutcome.LEASED, ItemOutcome.MOVED, DONE, DONE, ItemOutcome.UNKNOWN, DONE]
    assert partition.cancel(0, 1, 2, 3, 4, scheduled, 99, 4) == expected
    assert partition.cancel(4, scheduled) == [ItemOutcome.CANCELLED] * 2
    partition.advance(61)
    assert partition.lease_texts() == []
    assert partition.counts.cancelled == 2


def test_a_cancelled_item_never_comes_back(partition: PartitionUnderTest) -> None:
    partition.produce("cancelled", "completed", "ready")
    partition.cancel(0)
    partition.complete(partition.lease(1).lease)
    assert partition.seek(0) == 1
    partition.restart()
    assert partition.lease_texts() == ["completed", "ready"]
    assert partition.state_of(0) is ItemState.CANCELLED
    assert partition.why(0) == "cancelled while it waited: it is never leased"


def test_cancelling_takes_an_item_out_of_the_line_of_its_key(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", "3", key="k")
    first = partition.lease(3)
    assert partition.cancel(1) == [DONE]
    partition.complete(first.lease)
    assert partition.lease_texts() == ["3"]


def test_cancelling_an_item_that_backs_off_frees_its_key(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", key="k")
    partition.retry(partition.lease(1).lease, delay=1_000)
    assert partition.lease_texts() == []
    assert partition.cancel(0) == [DONE]
    assert partition.lease_texts() == ["2"]


def test_a_cancelled_item_does_not_park_its_key(partition: PartitionUnderTest) -> None:
    partition.configure(on_bury="park")
    partition.produce("1", "2", key="k")
    partition.cancel(0)
    assert partition.lease_texts() == ["2"]


def test_the_dedup_id_of_a_cancelled_item_is_free_again(partition: PartitionUnderTest) -> None:
    first = partition.store(items(["1"], dedups=["once"])).base
    partition.cancel(first)
    again = partition.store(items(["2"], dedups=["once"]))
    assert not again.repeated
    partition.restart()
    assert partition.store(items(["3"], dedups=["once"])).ids == [again.base]
    assert partition.lease_texts() == ["2"]


def test_retention_forgets_cancelled_items_but_not_that_their_dedup_ids_are_free(partition: PartitionUnderTest) -> None:
    partition.configure(dedup_window=10_000 * SECOND)
    first = partition.store(items(["1"], dedups=["once"])).base
    partition.cancel(first)
    partition.drop(first, first + 1)
    assert partition.counts.cancelled == 0
    assert partition.why(first) == "resolved, and deleted by retention"
    assert not partition.store(items(["2"], dedups=["once"])).repeated


# -- skip --------------------------------------------------------------------------------------------


def test_waiting_items_before_a_point_are_skipped_and_a_seek_brings_them_back(partition: PartitionUnderTest) -> None:
    partition.produce("leased", "buried", "ready")
    partition.produce("scheduled", at=partition.after(60))
    partition.produce("after")
    partition.lease(1, timeout=1_000)
    partition.bury(partition.lease(1).lease)
    assert partition.skip(4) == 2
    assert partition.skip(4) == 0
    partition.restart()
    partition.advance(61)
    assert [partition.state_of(offset) for offset in range(4)] == [
        ItemState.LEASED,
        ItemState.BURIED,
        ItemState.COMPLETED,
        ItemState.COMPLETED,
    ]
    assert partition.lease_texts() == ["after"]
    assert partition.seek(0) == 2
    assert partition.lease_texts() == ["ready", "scheduled"]


def test_the_key_of_a_skipped_item_goes_on(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", "3", "4", key="k")
    first = partition.lease(4)
    assert partition.skip(3) == 2
    partition.complete(first.lease)
    assert partition.lease_texts() == ["4"]


def test_one_record_skips_a_limited_number_of_items(partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_items, "SKIP_ITEMS", 2)
    partition.produce("a", "b", "c", "d")
    assert [partition.skip(3), partition.skip(3), partition.skip(3)] == [2, 1, 0]
    assert partition.lease_texts() == ["d"]


# -- reschedule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_delay", [True, False])
def test_a_ready_item_becomes_scheduled(partition: PartitionUnderTest, by_delay: bool) -> None:
    partition.produce("1", "2")
    later = {"delay": 60} if by_delay else {"at": partition.after(60)}
    assert partition.reschedule(0, **later) == [DONE]
    assert partition.lease_texts() == ["2"]
    partition.advance(59)
    partition.restart()
    assert partition.lease_texts() == []
    assert partition.why(0) == "scheduled, ready in 1s"
    partition.advance(1)
    assert partition.lease_texts() == ["1"]


def test_a_scheduled_item_follows_its_newest_time(partition: PartitionUnderTest) -> None:
    partition.produce("earlier", "later", "there and back", at=partition.after(60))
    partition.reschedule(0, delay=10)
    partition.reschedule(1, at=partition.after(100))
    partition.reschedule(2, delay=5)
    partition.reschedule(2, at=partition.after(60))
    for seconds, text in ((10, "earlier"), (50, "there and back"), (40, "later")):
        partition.advance(seconds)
        assert partition.drain() == [text]


def test_the_old_time_of_an_item_does_not_end_a_later_back_off(partition: PartitionUnderTest) -> None:
    partition.produce("1", at=partition.after(20))
    partition.reschedule(0)
    partition.retry(partition.lease(1).lease, delay=100)
    partition.advance(50)
    assert partition.lease_texts() == []
    partition.advance(50)
    assert partition.lease_texts() == ["1"]


@pytest.mark.parametrize("key", [None, "k"])
def test_an_item_that_is_rescheduled_to_the_time_it_had_has_its_own_priority(partition: PartitionUnderTest, key: str | None) -> None:
    partition.produce("low", priority=9, key=key)
    partition.complete(partition.lease(1).lease)
    partition.seek(0)  # at the default priority
    partition.retry(partition.lease(1).lease, delay=60)
    partition.reschedule(0, delay=60)
    partition.restart()
    partition.advance(60)
    partition.produce("default")
    assert partition.lease_texts() == ["default", "low"]


@pytest.mark.parametrize("time", [{}, {"delay": 0.1}, {"at": 1}])
def test_now_is_also_what_is_past_or_at_most_100_ms_ahead(partition: PartitionUnderTest, time: dict[str, float]) -> None:
    partition.produce("scheduled", at=partition.after(60))
    (ready,) = partition.produce("ready")
    assert partition.reschedule(0, ready, **time) == [DONE, DONE]  # type: ignore[arg-type]
    assert partition.lease_texts() == ["ready", "scheduled"], "a ready item keeps its position"


def test_a_rescheduled_item_gives_up_its_place_in_the_order_of_its_key(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", "3", key="k")
    partition.reschedule(0, delay=60)
    assert partition.drain() == ["2", "3"]
    partition.produce("4", key="k")
    partition.advance(60)
    partition.produce("5", key="k")
    assert partition.drain() == ["4", "1", "5"]


def test_a_back_off_that_is_rescheduled_holds_its_key_no_longer(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", key="k")
    partition.retry(partition.lease(1).lease, delay=1_000, reason="no")
    partition.reschedule(0, delay=60)
    assert partition.drain() == ["2"]
    partition.advance(60)
    granted = partition.lease(1)
    assert partition.texts(granted) == ["1"] and granted.attempts == {0: 2}


def test_a_back_off_that_is_rescheduled_to_now_ends_at_its_own_place(partition: PartitionUnderTest) -> None:
    partition.produce("1", "2", key="k")
    partition.retry(partition.lease(1).lease, delay=1_000)
    partition.reschedule(0)
    assert partition.drain() == ["1", "2"]


def test_a_scheduled_item_that_is_rescheduled_to_now_takes_the_last_place_of_its_key(partition: PartitionUnderTest) -> None:
    (later,) = partition.produce("scheduled", key="k", at=partition.after(60))
    partition.produce("1", "2", key="k")
    partition.reschedule(later)
    assert partition.drain() == ["1", "2", "scheduled"]


def test_a_ttl_goes_on_counting(partition: PartitionUnderTest) -> None:
    partition.produce("mortal", ttl=30)
    partition.reschedule(0, delay=60)
    partition.advance(31)
    assert partition.state_of(0) is ItemState.BURIED


def test_items_that_do_not_wait_are_not_rescheduled(partition: PartitionUnderTest) -> None:
    partition.produce("leased", "sent")
    partition.lease(1, timeout=1_000)
    partition.send(1, to=ELSEWHERE)
    assert partition.reschedule(0, 1, 2, delay=60) == [ItemOutcome.LEASED, ItemOutcome.MOVING, ItemOutcome.UNKNOWN]


def test_a_time_and_a_delay_are_refused(partition: PartitionUnderTest) -> None:
    partition.produce("1")
    with pytest.raises(InvalidRequest, match="both a time and a delay are given"):
        partition.wrapped.run(RescheduleWaiting([0], 1, 1))


def test_old_times_are_removed_when_there_are_many(partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_items, "SPARE_CHANGES", 10)
    partition.produce("often", "once", at=partition.after(1_000))
    for seconds in range(100):
        partition.reschedule(0, at=partition.after(2_000 + seconds))
    entries = len(list(partition.wrapped.state.by_wall))
    assert entries <= 14, f"{entries} entries for two items"
    partition.advance(1_000)
    assert partition.lease_texts() == ["once"]
    assert base.dump(base.load(base.dump(partition.wrapped.state))) == base.dump(partition.wrapped.state)
