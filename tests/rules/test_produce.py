"""Producing: items come out unchanged, once, in order."""

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.rules import routing
from penstock.rules.commands import Produce, Stored
from penstock.rules.item_states import ItemState
from penstock.rules.produce import apply_produced
from penstock.rules.records import Produced
from penstock.rules.state import Counts, Failure
from penstock.rules.state import State as PartitionState
from penstock.words.batch import Batch
from penstock.words.clock import MINUTE, SECOND, Moment
from penstock.words.errors import CorruptLog, QueueFull, QueueHeld
from penstock.words.limits import MAX_HEADERS_BYTES, MAX_KEY_BYTES, MIB
from penstock.words.origin import Origin, encode
from tests.partition_under_test import INCARNATION, PARTITION, PartitionUnderTest, granted_offsets, items


def test_an_item_is_leased_with_every_field_it_was_produced_with(partition: PartitionUnderTest) -> None:
    batch = Batch(
        [b"body"],
        [b"customer-42"],
        routing.key_ids([b"customer-42"]),
        [b"\x81\xa5trace\xa3abc"],
        ["invoice"],
        ["json"],
        ["ref-1"],
        bytes([3]),
        [partition.wall],
        [9 * SECOND],
        [routing.digest(b"once")],
    )
    partition.store(batch)
    granted = partition.lease(10, "host-1")
    [found] = partition.wrapped.items(granted.runs)
    assert (found.start, found.batch, found.produced_at) == (0, batch, partition.wall)
    assert granted.attempts.get(0, 1) == 1
    assert partition.complete(granted.lease).done == 1
    assert partition.counts == Counts(0, 0, 0, completed=1, buried=0)


@pytest.mark.parametrize("payload", [b"", b"x", b"\xff\xfe\x00", bytes(range(256)) * 4, b"z" * 16 * MIB], ids=len)
def test_a_payload_of_any_size_and_content_is_kept(partition: PartitionUnderTest, payload: bytes) -> None:
    partition.produce(payload)
    assert partition.wrapped.payloads(partition.lease().runs) == [payload]


def test_the_longest_headers_and_key_are_kept(partition: PartitionUnderTest) -> None:
    key = b"k" * MAX_KEY_BYTES
    partition.store(Batch([b"x"], [key], routing.key_ids([key]), [b"h" * MAX_HEADERS_BYTES]))
    [found] = partition.wrapped.items(partition.lease().runs)
    assert (found.batch.keys, found.batch.headers) == ([key], [b"h" * MAX_HEADERS_BYTES])


def test_offsets_follow_each_other_and_are_never_given_again(partition: PartitionUnderTest) -> None:
    assert partition.produce("a", "b") == [0, 1]
    partition.drain()
    partition.restart()
    assert partition.produce("c") == [2]


def test_a_mixed_batch_keeps_each_items_own_options(partition: PartitionUnderTest) -> None:
    keys = [None, b"k", None]
    soon = partition.after(10)
    partition.store(Batch([b"plain", b"keyed", b"later"], keys, routing.key_ids(keys), priorities=bytes([9, 0, 5]), ats=[0, 0, soon]))
    assert [partition.state_of(offset) for offset in range(3)] == [ItemState.READY, ItemState.READY, ItemState.SCHEDULED]
    assert partition.lease_texts() == ["keyed", "plain"]
    partition.advance(10)
    assert partition.lease_texts() == ["later"]


def test_a_repeated_request_answers_the_same_and_adds_nothing(partition: PartitionUnderTest) -> None:
    first = partition.store(items("ab"), request="r")
    partition.produce("between")
    partition.kill()
    again = partition.store(items("ab"), request="r")
    assert (again.offsets, again.repeated) == (first.offsets, True)
    assert partition.counts.ready == 3


def test_a_request_is_remembered_a_quarter_of_an_hour_and_then_forgotten(partition: PartitionUnderTest) -> None:
    partition.store(items("a"), request="r")
    partition.clock.advance(15 * MINUTE - 1)
    assert partition.store(items("a"), request="r").repeated
    partition.clock.advance(1)
    assert not partition.store(items("a"), request="r").repeated


def test_a_request_whose_items_were_all_duplicates_is_remembered_too(partition: PartitionUnderTest) -> None:
    partition.produce("a", dedups=["id"])
    first = partition.store(items(["a"], dedups=["id"]), request="r")
    partition.clock.advance(10 * MINUTE)  # beyond the dedup window, within that of requests
    again = partition.store(items(["a"], dedups=["id"]), request="r")
    assert list(first.offsets) == list(again.offsets) == [0]
    assert partition.counts.ready == 1


def test_a_dedup_id_within_its_window_returns_the_first_item(partition: PartitionUnderTest) -> None:
    partition.configure(dedup_window=60 * SECOND)
    assert partition.produce("a", dedups=["id"]) == [0]
    partition.clock.advance(60 * SECOND - 1)
    assert partition.produce("again", dedups=["id"]) == [0]
    partition.clock.advance(1)
    assert partition.produce("later", dedups=["id"]) == [1]


def test_duplicates_are_found_across_a_kill_and_a_restart(partition: PartitionUnderTest) -> None:
    partition.produce("a", dedups=["id"])
    partition.kill()
    assert partition.produce("a", dedups=["id"]) == [0]
    partition.restart()
    assert partition.produce("a", dedups=["id"]) == [0]


def test_duplicates_within_one_batch_and_one_turn_are_found(partition: PartitionUnderTest) -> None:
    assert partition.produce("a", "b", "a", "c", dedups=["1", "2", "1", None]) == [0, 1, 0, 2]
    assert partition.drain() == ["a", "b", "c"]


def test_a_duplicate_of_a_completed_item_stays_a_duplicate(partition: PartitionUnderTest) -> None:
    partition.produce("a", dedups=["id"])
    partition.drain()
    assert partition.produce("a", dedups=["id"]) == [0]
    assert partition.lease_texts() == []


def test_more_dedup_ids_than_the_limit_are_refused_rather_than_forgotten(
    partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rules.produce.MAX_DEDUP_IDS", 2)
    partition.produce("a", "b", dedups=["1", "2"])
    with pytest.raises(QueueFull, match="; wait"):
        partition.produce("c", dedups=["3"])
    assert partition.counts.ready == 2


def test_expired_dedup_ids_do_not_count(partition: PartitionUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rules.produce.MAX_DEDUP_IDS", 2)
    partition.produce("a", "b", dedups=["1", "2"])
    partition.advance(5 * 60)
    assert partition.produce("c", "d", dedups=["1", "2"]) == [2, 3]
    with pytest.raises(QueueFull):
        partition.produce("e", dedups=["3"])
    assert len(partition.wrapped.state.dedup) == 2, "what is over went when the new ones came"


def test_a_transfer_is_taken_once_by_its_sequence(partition: PartitionUnderTest) -> None:
    partition.store(items("a"), source=b"queue-1", sequence=1)
    partition.restart()
    assert partition.store(items("a"), source=b"queue-1", sequence=1).repeated
    assert not partition.store(items("b"), source=b"queue-1", sequence=2).repeated
    assert not partition.store(items("c"), source=b"queue-2", sequence=1).repeated
    assert partition.lease_texts() == ["a", "b", "c"]


def test_a_repeated_transfer_says_where_the_first_one_is_if_it_was_the_last(partition: PartitionUnderTest) -> None:
    partition.produce("before")
    for sequence, payloads in enumerate(["ab", "cd"], 1):
        partition.store(items(payloads), source=b"queue", sequence=sequence)
    partition.kill()
    assert [partition.store(items("ab"), source=b"queue", sequence=sequence).base for sequence in (2, 1)] == [3, -1]


def test_a_pause_holds_producers_but_not_transfers(partition: PartitionUnderTest) -> None:
    partition.pause(produce=True)
    with pytest.raises(QueueHeld, match="; resume"):
        partition.produce("a")
    partition.store(items("b"), source=b"queue", sequence=1)
    partition.pause(produce=False)
    partition.produce("c")
    assert partition.lease_texts() == ["b", "c"]


def test_produces_of_one_turn_share_it_and_come_out_in_order(partition: PartitionUnderTest) -> None:
    for batch in (items("ab"), items("cd", key="k"), items("e", priority=9)):
        partition.wrapped.run(Produce(batch))
    partition.wrapped.commit()
    assert granted_offsets(partition.lease(per_key=2)) == [0, 1, 2, 3, 4]


def test_the_dedup_ids_of_a_transfer_are_not_checked(partition: PartitionUnderTest) -> None:
    partition.produce("first", dedups=["order-1"])
    again = partition.store(items(["first, moved here"], dedups=["order-1"]), source=b"elsewhere", sequence=1)
    assert (again.count, again.repeated) == (1, False)
    assert partition.store(items(["first, moved here"], dedups=["order-1"]), source=b"elsewhere", sequence=1).repeated
    partition.restart()
    assert partition.wrapped.state.received_sequences == {b"elsewhere": 1}


# -- back to the old place ---------------------------------------------------------------------------


def coming_back(
    *payloads: str,
    old: Sequence[str | None],
    key: str | None = "k",
    parked: bool = True,
    incarnation: int = INCARNATION,
    source: bytes | None = b"dead letters",
    sequence: int = 1,
    **options: Any,
) -> Produce:
    """A transfer that returns items that were buried here: `old` are their old ids."""
    batch = items(payloads, **({"key": key} | options))
    batch.origins = [None if name is None else encode(Origin("queue", incarnation, name, parked=parked)) for name in old]
    return Produce(batch, (), source, sequence, INCARNATION, PARTITION)


def parked(partition: PartitionUnderTest, *payloads: str, bury: int = 1) -> None:
    """Items of key k, the first of which are buried and park the key."""
    partition.configure(on_bury="park")
    partition.produce(*payloads, key="k")
    partition.bury(partition.lease(bury, per_key=bury).lease)
    assert partition.counts.buried == bury


def arrive(partition: PartitionUnderTest, transfer: Produce) -> list[int]:
    stored = partition.wrapped.run(transfer)
    partition.wrapped.commit()
    assert isinstance(stored, Stored)
    return list(stored.offsets)


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read before"])
def test_an_item_that_parked_its_key_returns_to_its_old_position(partition: PartitionUnderTest, read: bool) -> None:
    parked(partition, "a", "b", "c")
    partition.produce("d", key="k")
    if read:
        assert partition.lease_texts() == []  # passes the others over into the line of their key
    assert arrive(partition, coming_back("a", old=["7-0"])) == [4]
    partition.produce("e", key="k")
    assert partition.state_of(4) is ItemState.READY
    assert partition.drain() == ["a", "b", "c", "d", "e"]


def test_an_item_keeps_its_old_position_over_a_kill_and_a_restart(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b")
    arrive(partition, coming_back("a", old=["7-0"]))
    partition.kill()
    assert partition.lease_texts() == ["a"]
    partition.restart()
    assert partition.lease_texts() == []
    assert partition.why(1) == "its key is held: item 7-2 is leased by an unnamed consumer"


def test_a_key_stays_parked_until_all_its_buried_items_are_back_in_their_order(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b", "c", bury=2)
    arrive(partition, coming_back("b", old=["7-1"], sequence=1))
    assert partition.lease_texts() == []
    assert partition.why(3) == "its key is parked: item 7-0 was buried; redrive or clear it"
    arrive(partition, coming_back("a", old=["7-0"], sequence=2))
    assert partition.drain() == ["a", "b", "c"]


def test_items_of_one_transfer_go_to_their_old_positions_and_the_others_to_their_lanes(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b", "c", bury=2)
    transfer = coming_back("b", "new", "a", "plain", "later", old=["7-1", None, "7-0", None, None], keys=["k", "k", "k", None, None])
    transfer.batch.ats = [0, 0, 0, 0, partition.after(10)]
    arrive(partition, transfer)
    assert [partition.state_of(offset) for offset in range(3, 8)] == [ItemState.READY] * 4 + [ItemState.SCHEDULED]
    in_lanes = {offset for lane in partition.wrapped.state.lanes.lanes for extent in lane for offset in range(extent.start, extent.stop)}
    assert in_lanes == {2, 4, 6}
    assert partition.drain() == ["a", "b", "c", "new", "plain"]
    partition.advance(10)
    assert partition.drain() == ["later"]


def test_an_item_at_its_old_position_is_not_scheduled_and_keeps_its_priority(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b")
    transfer = coming_back("a", "other", old=["7-0", None], keys=["k", None], priorities=[9, 5], at=partition.after(3_600))
    assert arrive(partition, transfer) == [2, 3]
    assert [partition.state_of(2), partition.state_of(3)] == [ItemState.READY, ItemState.SCHEDULED]
    partition.produce("urgent", priority=8)
    assert partition.drain() == ["urgent", "a", "b"]


def test_an_item_at_its_old_position_has_its_ttl(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b")
    arrive(partition, coming_back("a", old=["7-0"], ttl=60))
    partition.advance(60)
    assert [partition.state_of(1), partition.state_of(2)] == [ItemState.READY, ItemState.BURIED]
    assert partition.why(1) == "its key is parked: item 7-2 was buried; redrive or clear it"


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read before"])
@pytest.mark.parametrize("event", ["retry", "delay", "expire", "bury", "redrive", "restart"])
def test_an_item_keeps_its_old_position_when_it_is_returned_or_redriven(partition: PartitionUnderTest, event: str, read: bool) -> None:
    parked(partition, "a", "b", "c")
    if read:
        assert partition.lease_texts() == []
    arrive(partition, coming_back("a", old=["7-0"]))
    granted = partition.lease(1)
    assert partition.texts(granted) == ["a"]
    if event == "restart":
        partition.restart()
    if event in ("retry", "delay", "restart"):
        partition.retry(granted.lease, delay=5 if event == "delay" else 0)
        partition.advance(5)
    elif event == "expire":
        partition.advance(60)
    else:
        partition.bury(granted.lease)
        if event == "redrive":
            partition.redrive(3)
        else:
            arrive(partition, coming_back("a", old=["7-3"], sequence=2))
    assert partition.drain() == ["a", "b", "c"]


def test_a_unit_with_items_at_old_positions_is_returned_in_order(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b", "c", "d", bury=3)
    assert partition.lease_texts() == []  # d is passed over
    for sequence, (text, old) in enumerate([("c", "7-2"), ("b", "7-1"), ("a", "7-0")], 1):
        arrive(partition, coming_back(text, old=[old], sequence=sequence))
    granted = partition.lease(per_key=4)
    assert partition.texts(granted) == ["a", "b", "c", "d"]
    partition.retry(granted.lease)
    assert partition.drain() == ["a", "b", "c", "d"]


def test_kept_positions_are_deleted_with_their_items(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b", "c", bury=2)
    arrive(partition, coming_back("a", "b", old=["7-0", "7-1"], sequence=1))
    partition.complete(partition.lease(1).lease)
    partition.bury(partition.lease(1).lease)
    arrive(partition, coming_back("b", old=["7-4"], sequence=2))
    line = partition.wrapped.state.keys.line(routing.key_id(b"k"))
    assert line.kept_positions == {5: 1}
    assert partition.drain() == ["b", "c"]
    assert not partition.wrapped.state.keys.by_key


def test_of_two_items_with_one_origin_only_one_gets_the_old_position(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b")
    arrive(partition, coming_back("a", "twice", old=["7-0", "7-0"], sequence=1))
    arrive(partition, coming_back("thrice", old=["7-0"], sequence=2))
    assert partition.drain() == ["a", "b", "twice", "thrice"]


@pytest.mark.parametrize(
    "options",
    [
        {"parked": False},
        {"incarnation": INCARNATION + 1},
        {"old": ["8-0"]},
        {"old": ["7-1"]},
        {"old": ["7-99"]},
        {"old": [None]},
        {"source": None},
        {"key": "another"},
        {"key": None},
    ],
    ids=str,
)
def test_an_item_that_did_not_park_this_key_goes_to_its_lane(partition: PartitionUnderTest, options: dict[str, Any]) -> None:
    parked(partition, "a", "b")
    arrive(partition, coming_back("came", **{"old": ["7-0"], **options}))
    other_key = options.get("key", "k") != "k"
    assert partition.drain() == (["came"] if other_key else [])
    assert partition.redrive() == 1
    assert partition.drain() == ["a", "b"] + ([] if other_key else ["came"])


def test_an_item_whose_key_was_released_goes_to_its_lane(partition: PartitionUnderTest) -> None:
    parked(partition, "a", "b", "c")
    partition.clear(buried=True)
    assert partition.lease_texts() == ["b"]
    arrive(partition, coming_back("a", old=["7-0"]))
    assert partition.drain() == []
    partition.complete(next(iter(partition.wrapped.state.leases.live)))
    assert partition.drain() == ["c", "a"]


def test_an_item_whose_burial_was_lost_goes_to_its_lane() -> None:
    state = PartitionState()
    record = Produced(5, items("ab", key="k"), source=b"s", sequence=1, replaced=[5, 0])
    apply_produced(state, record, Moment(1, 1))
    assert [state.state_of(5), state.state_of(6), len(state.passed_over)] == [ItemState.READY, ItemState.READY, 0]
    assert [extent.astuple()[:2] for extent in state.lanes.lanes[5]] == [(5, 7)]


def test_a_transfer_with_an_unreadable_origin_changes_nothing(partition: PartitionUnderTest) -> None:
    transfer = coming_back("a", old=["7-0"])
    transfer.batch.origins = [b"nonsense"]
    with pytest.raises(CorruptLog, match="; run verify"):
        partition.wrapped.run(transfer)
    assert partition.wrapped.state.next_offset == 0


def test_an_item_is_leased_with_the_origin_it_was_produced_with(partition: PartitionUnderTest) -> None:
    came = coming_back("a", old=["3-17"])
    arrive(partition, came)
    [found] = partition.wrapped.items(partition.lease().runs)
    assert found.batch.origins == came.batch.origins


def test_failed_attempts_in_another_system_count_on(partition: PartitionUnderTest) -> None:
    partition.configure(max_attempts=3)
    batch = items(["a", "b", "c", "d"])
    imported = Origin("other", 0, "0-7", 2, "no route", first_failed_at=5, last_failed_at=6, continued=True)
    batch.origins = [encode(imported), encode(Origin("other", 0, "0-8", 2)), None, b"nonsense"]
    partition.store(batch)
    for restarted in (False, True):
        assert [partition.wrapped.state.attempts(offset) for offset in range(4)] == [2, 0, 0, 0], restarted
        assert partition.wrapped.state.failures[0] == Failure(2, 5, 6, "no route")
        partition.restart()
    handed = partition.lease(4)
    assert handed.attempts == {0: 3}
    partition.retry(handed.lease, reason="again")
    assert partition.wrapped.state.state_of(0) is ItemState.BURIED and partition.wrapped.state.burials[0].attempts == 3
    assert partition.wrapped.state.state_of(1) is ItemState.READY
