"""The parts of the API that need no broker: arguments, answers, selections of leases, filters."""

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ListedItem, NewItem, QueueInfo, reports
from penstock.api import arguments, produced
from penstock.api.items import ItemSource, to_batch
from penstock.api.leases import LeaseBase, LeaseBatchBase, LeaseSelection, PartitionLease
from penstock.api.options import queue_info, to_catalog
from penstock.api.redrive import item_filter
from penstock.loop.item_cache import LeasedItems
from penstock.loop.requests import LeaseResult, SettlePart, StoredPart
from penstock.rules.commands import LeaseAnswer, Settled, Stored
from penstock.rules.options import Options, merged
from penstock.words.batch import Batch
from penstock.words.clock import MINUTE, SECOND
from penstock.words.errors import InvalidRequest, LeaseLost, PenstockError, Refused, StorageFailed
from penstock.words.ids import FIRST_FOREIGN_NUMBER, format_ids
from penstock.words.origin import Origin, encode

# -- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wait", "found"), [(0, 0), (30, 30 * SECOND), (30.0, 30 * SECOND), (0.5, SECOND // 2), (900, 15 * MINUTE)])
def test_a_wait_is_converted_to_microseconds(wait: float, found: int) -> None:
    assert arguments.wait_timeout(wait) == found
    assert arguments.wait_timeout(timedelta(seconds=wait)) == found


@pytest.mark.parametrize("wait", [-0.1, 900.1, float("nan"), float("inf"), timedelta(days=1), 10**400, None, "5", False])
def test_a_wait_out_of_bounds_is_refused(wait: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^wait is .*; give"):
        arguments.wait_timeout(wait, "wait")


def test_request_ids_become_bytes_and_each_chunk_has_its_own() -> None:
    assert arguments.request_bytes(None) is None
    assert arguments.request_bytes("kākā") == arguments.request_bytes("kākā".encode())
    assert arguments.chunk_request(None, 0) is None
    chunks = {arguments.chunk_request(name, number) for name in (b"a", b"b") for number in range(5)}
    assert len(chunks) == 10 and chunks.isdisjoint({b"a", b"b"})
    assert arguments.chunk_request(b"a", 3) == arguments.chunk_request(b"a", 3)


def test_follow_ups_are_grouped_by_queue() -> None:
    shares = arguments.follow_ups([NewItem(b"1", queue="a"), b"2", NewItem(b"3"), NewItem(b"4", queue="a", key="k")])
    assert {name: list(batch.payloads) for name, batch in shares.items()} == {"a": [b"1", b"4"], None: [b"2", b"3"]}
    assert shares["a"].keys == [None, b"k"]


def test_a_follow_up_is_checked_like_any_item() -> None:
    with pytest.raises(InvalidRequest, match="a payload has 16777217 bytes"):
        arguments.follow_ups([b"x" * (16 * 1024 * 1024 + 1)])
    with pytest.raises(InvalidRequest, match="the queue of a follow-up is int; give a text"):
        arguments.follow_ups([NewItem(b"", queue=7)])  # type: ignore[arg-type]


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "lease_timeout": st.integers(1, 43_200),
        "max_attempts": st.integers(0, 65_535),
        "ttl": st.none() | st.floats(1, 1e6).map(lambda seconds: round(seconds, 6)),
        "priority_aging": st.none() | st.integers(1, 1_000),
        "dedup_window": st.integers(1, 1_000),
        "on_bury": st.sampled_from(["release", "park"]),
        "dead_queue": st.none() | st.just("dead"),
        "max_items": st.none() | st.integers(1, 1_000),
        "max_bytes": st.none() | st.integers(1, 1_000),
        "durability": st.none() | st.sampled_from(["fsync", "interval", "os"]),
        "segment_bytes": st.none() | st.integers(4096, 1 << 40),
        "segment_age": st.none() | st.integers(1, 1_000),
        "compression": st.none() | st.booleans(),
        "compression_level": st.none() | st.integers(1, 19),
        "compression_min_bytes": st.none() | st.integers(1, 1 << 30),
        "retention": st.fixed_dictionaries({"max_age": st.integers(0, 1_000)}, optional={"max_segments": st.integers(0, 9)}),
    },
)


@given(OPTIONS)
def test_info_returns_the_options_that_were_given(options: dict[str, Any]) -> None:
    found = merged(Options(), to_catalog(options))
    info: QueueInfo = queue_info(reports.QueueDescription("orders", 7, 0, found, 1, [0], [], []))
    for name, value in options.items():
        told = getattr(info, name)
        assert told == value if name != "retention" else {**told, **value} == told
    assert info.incarnation == "0000000000000007"


# -- answers -----------------------------------------------------------------------------------------


@given(
    st.integers(0, 9),
    st.integers(0, 5_000) | st.integers(FIRST_FOREIGN_NUMBER - 3_000, FIRST_FOREIGN_NUMBER - 2_500),
    st.integers(0, 2_500),
)
def test_ids_of_a_range_equal_those_formatted_one_by_one(partition: int, base: int, count: int) -> None:
    placed = [StoredPart(partition, None, Stored(base, count))]
    assert produced.stored_ids(placed, count) == format_ids(partition, range(base, base + count))


def test_ids_of_several_partitions_come_in_the_order_of_the_items() -> None:
    placed = [StoredPart(3, [1, 2], Stored(10, 2)), StoredPart(1, [0, 3], Stored(0, 0, [7, 5]))]
    assert produced.stored_ids(placed, 4) == ["1-7", "3-10", "3-11", "1-5"]


def test_the_first_error_has_all_results_and_is_a_copy_for_each_caller() -> None:
    shared = Refused.of(StorageFailed("the disk is full; make room"))
    placed = [StoredPart(0, [2], Stored(5, 1)), StoredPart(1, [0, 1], None, shared)]
    with pytest.raises(StorageFailed, match="the disk is full; make room") as caught:
        produced.stored_ids(placed, 3)
    results: list[str | PenstockError] = vars(caught.value)["results"]
    assert [str(result) for result in results] == [shared.message, shared.message, "0-5"]
    assert all(isinstance(result, StorageFailed) and not vars(result) for result in results[:2])
    with pytest.raises(StorageFailed, match="the disk is full; make room") as alone:
        produced.stored_id([StoredPart(1, None, None, shared)])
    assert alone.value is not caught.value


# -- leases ------------------------------------------------------------------------------------------


class UnsettledBatch(LeaseBatchBase[LeaseBase]):
    """A batch that cannot settle anything."""

    @staticmethod
    def _lease(home: Any, partition_lease: PartitionLease, items: LeasedItems, index: int, offset: int) -> LeaseBase:
        return LeaseBase(home, partition_lease, items, index, offset)


def batch_of(*sizes: int, incarnation: int = 1) -> UnsettledBatch:
    """A batch with one lease for each partition, of `sizes` items."""
    leases = []
    for partition, size in enumerate(sizes):
        granted = LeaseAnswer(partition + 100, 0, [0, size], {0: 2})
        result = LeaseResult(partition, granted, [LeasedItems([0, size], Batch([b"x"] * size), 0)], 60.0)
        leases.append(PartitionLease(incarnation, result, wall=1_000_000, queue="orders"))
    return UnsettledBatch(None, leases)


def parts(*given: Any, action: Any = "complete") -> list[SettlePart]:
    return LeaseSelection(1, action, "orders").add(list(given)).parts


def test_a_whole_batch_is_one_short_part_for_each_partition() -> None:
    assert parts(batch_of(1000, 2)) == [SettlePart(0, 100), SettlePart(1, 101)]


def test_a_partly_settled_batch_names_the_open_offsets() -> None:
    batch = batch_of(4, 1)
    LeaseSelection(1, "complete", "orders").add([batch[1], batch[4]]).apply_answers([Settled(1), Settled(1)])
    assert parts(batch) == [SettlePart(0, 100, [0, 2, 3])]
    assert parts(batch, batch[1]) == [SettlePart(0, 100, [0, 2, 3, 1])]


def test_leases_tokens_and_batches_may_be_mixed_and_nested() -> None:
    batch = batch_of(3, 2)
    assert parts(batch[0], [batch[2].token, [batch[4]]]) == [SettlePart(0, 100, [0, 2]), SettlePart(1, 101, [1])]
    assert parts(batch[0], batch) == [SettlePart(0, 100), SettlePart(1, 101)]
    assert parts(lease for lease in batch) == [SettlePart(0, 100, [0, 1, 2]), SettlePart(1, 101, [0, 1])]


def test_extending_is_for_the_whole_lease() -> None:
    batch = batch_of(3, 2)
    assert parts(batch[0], batch[1].token, action="extend") == [SettlePart(0, 100)]
    selection = LeaseSelection(1, "extend", "orders").add(batch[0])
    selection.remember_extensions(5_000_000, 10 * SECOND, [Settled(3)])
    assert {lease.deadline.timestamp() for lease in batch[:3]} == {15.0}
    assert batch[3].deadline.timestamp() == 61.0


def test_leases_of_another_incarnation_are_lost_before_anything_is_sent() -> None:
    stranger = batch_of(2, incarnation=2)
    selection = LeaseSelection(1, "complete", "orders").add([stranger, stranger[0].token, batch_of(1)])
    assert selection.parts == [SettlePart(0, 100)]
    with pytest.raises(LeaseLost) as caught:
        selection.apply_answers([Settled(1)])
    assert vars(caught.value)["lost"] == ["0-0", "0-1"]


def test_a_failed_part_raises_its_error_and_its_items_stay_open() -> None:
    batch = batch_of(2, 2, 1)
    selection = LeaseSelection(1, "retry", "orders").add(batch)
    with pytest.raises(StorageFailed, match="no disk") as caught:
        selection.apply_answers([Settled(2), Refused.of(StorageFailed("no disk; attach it")), Refused.of(LeaseLost("gone; drop it"))])
    assert vars(caught.value)["lost"] == ["2-0"]
    assert [lease.state for lease in batch] == ["retried", "retried", "open", "open", "lost"]
    assert parts(batch, action="retry") == [SettlePart(1, 101)]


def test_the_attributes_and_the_repr_of_a_lease() -> None:
    batch = batch_of(2)
    assert [lease.attempts for lease in batch] == [2, 1]
    assert [item.attempts for item in batch.items] == [2, 1]
    assert batch[0].item is batch[0].item
    assert repr(batch[1]) == "LeaseBase(Item('0-1', b'x', attempts=1), open)"
    assert batch[1].token == "0000000000000001.0.64.1"


# -- lists and filters -------------------------------------------------------------------------------


def listed(new: NewItem, reason: str = "", origin: Origin | None = None) -> ListedItem:
    batch = to_batch([new])
    batch.origins = None if origin is None else [encode(origin)]
    return ListedItem(ItemSource("q"), reports.ListedItemData(3, 17, "buried", batch, 0, 0, 2, reason))


def test_a_listed_item_can_be_copied() -> None:
    item = listed(NewItem("text", key="k"), "bad")
    for copied in (copy.copy(item), pickle.loads(pickle.dumps(item))):
        assert (copied.id, copied.value, copied.key, copied.state, copied.reason) == ("3-17", "text", "k", "buried", "bad")


def test_a_filter_wants_everything_it_names() -> None:
    item = listed(NewItem(b"", key=b"\xff", headers={"a": b"\0"}, kind="k"), "", Origin("source", 1, "0-0", reason="why"))
    for where in (
        {},
        {"key": b"\xff"},
        {"headers.a": b"\0"},
        {"headers.b": None},
        {"reason": "why"},
        {"origin_queue": "source", "kind": "k"},
    ):
        assert item_filter(where)(item), where
    for where in ({"key": "x"}, {"headers.a": "x"}, {"reason": ""}, {"kind": "k", "reference": "r"}, {"origin_queue": None}):
        assert not item_filter(where)(item), where
    assert item_filter(None)(item)
    assert item_filter(lambda one: one.kind == "k")(item) is True
