"""Producing: what goes in comes out as it was, once, in order."""

import pytest

from penstock.rules import routing
from penstock.rules.commands import Produce
from penstock.rules.life import State
from penstock.words.batch import Batch
from penstock.words.clock import MINUTE, SECOND
from penstock.words.errors import QueueFull, QueueHeld
from penstock.words.limits import MAX_HEADERS_BYTES, MAX_KEY_BYTES, MIB
from tests.support import Bench, given, items


def test_an_item_comes_out_with_every_field_it_went_in_with(bench: Bench) -> None:
    batch = Batch(
        [b"body"],
        [b"customer-42"],
        routing.key_ids([b"customer-42"]),
        [b"\x81\xa5trace\xa3abc"],
        ["invoice"],
        ["json"],
        ["ref-1"],
        bytes([3]),
        [bench.wall],
        [9 * SECOND],
        [routing.digest(b"once")],
    )
    bench.store(batch)
    granted = bench.lease(10, "host-1")
    [found] = bench.partition.items(granted.runs)
    assert (found.start, found.batch, found.produced_at) == (0, batch, bench.wall)
    assert granted.attempts.get(0, 1) == 1
    assert bench.complete(granted.lease).done == 1
    assert bench.counts == (0, 0, 0, 1, 0)


@pytest.mark.parametrize("payload", [b"", b"x", b"\xff\xfe\x00", bytes(range(256)) * 4, b"z" * 16 * MIB], ids=len)
def test_a_payload_of_any_size_and_content_is_kept(bench: Bench, payload: bytes) -> None:
    bench.produce(payload)
    assert bench.partition.payloads(bench.lease().runs) == [payload]


def test_the_longest_headers_and_key_are_kept(bench: Bench) -> None:
    key = b"k" * MAX_KEY_BYTES
    bench.store(Batch([b"x"], [key], routing.key_ids([key]), [b"h" * MAX_HEADERS_BYTES]))
    [found] = bench.partition.items(bench.lease().runs)
    assert (found.batch.keys, found.batch.headers) == ([key], [b"h" * MAX_HEADERS_BYTES])


def test_offsets_follow_each_other_and_are_never_given_again(bench: Bench) -> None:
    assert bench.produce("a", "b") == [0, 1]
    bench.drain()
    bench.restart()
    assert bench.produce("c") == [2]


def test_a_mixed_batch_keeps_each_items_own_options(bench: Bench) -> None:
    keys = [None, b"k", None]
    soon = bench.after(10)
    bench.store(Batch([b"plain", b"keyed", b"later"], keys, routing.key_ids(keys), priorities=bytes([9, 0, 5]), ats=[0, 0, soon]))
    assert [bench.life(offset) for offset in range(3)] == [State.READY, State.READY, State.SCHEDULED]
    assert bench.take() == ["keyed", "plain"]
    bench.advance(10)
    assert bench.take() == ["later"]


def test_a_repeated_request_answers_the_same_and_adds_nothing(bench: Bench) -> None:
    first = bench.store(items("ab"), request="r")
    bench.produce("between")
    bench.kill()
    again = bench.store(items("ab"), request="r")
    assert (again.offsets, again.again) == (first.offsets, True)
    assert bench.counts.ready == 3


def test_a_request_is_remembered_a_quarter_of_an_hour_and_then_forgotten(bench: Bench) -> None:
    bench.store(items("a"), request="r")
    bench.clock.advance(15 * MINUTE - 1)
    assert bench.store(items("a"), request="r").again
    bench.clock.advance(1)
    assert not bench.store(items("a"), request="r").again


def test_a_request_whose_items_were_all_duplicates_is_remembered_too(bench: Bench) -> None:
    bench.produce("a", dedups=["id"])
    first = bench.store(items(["a"], dedups=["id"]), request="r")
    bench.clock.advance(10 * MINUTE)  # beyond the dedup window, within that of requests
    again = bench.store(items(["a"], dedups=["id"]), request="r")
    assert list(first.offsets) == list(again.offsets) == [0]
    assert bench.counts.ready == 1


def test_a_dedup_id_within_its_window_returns_the_first_item(bench: Bench) -> None:
    bench.configure(dedup_window=60 * SECOND)
    assert bench.produce("a", dedups=["id"]) == [0]
    bench.clock.advance(60 * SECOND - 1)
    assert bench.produce("again", dedups=["id"]) == [0]
    bench.clock.advance(1)
    assert bench.produce("later", dedups=["id"]) == [1]


def test_duplicates_are_found_across_a_kill_and_a_restart(bench: Bench) -> None:
    bench.produce("a", dedups=["id"])
    bench.kill()
    assert bench.produce("a", dedups=["id"]) == [0]
    bench.restart()
    assert bench.produce("a", dedups=["id"]) == [0]


def test_duplicates_within_one_batch_and_one_turn_are_found(bench: Bench) -> None:
    assert bench.produce("a", "b", "a", "c", dedups=["1", "2", "1", None]) == [0, 1, 0, 2]
    assert bench.drain() == ["a", "b", "c"]


def test_a_duplicate_of_a_completed_item_stays_a_duplicate(bench: Bench) -> None:
    bench.produce("a", dedups=["id"])
    bench.drain()
    assert bench.produce("a", dedups=["id"]) == [0]
    assert bench.take() == []


def test_more_dedup_ids_than_the_limit_are_refused_rather_than_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rules.produce.MAX_DEDUP_IDS", 2)
    bench.produce("a", "b", dedups=["1", "2"])
    with pytest.raises(QueueFull, match="; wait"):
        bench.produce("c", dedups=["3"])
    assert bench.counts.ready == 2


def test_a_transfer_is_taken_once_by_its_sequence(bench: Bench) -> None:
    bench.store(items("a"), source=b"queue-1", sequence=1)
    bench.restart()
    assert bench.store(items("a"), source=b"queue-1", sequence=1).again
    assert not bench.store(items("b"), source=b"queue-1", sequence=2).again
    assert not bench.store(items("c"), source=b"queue-2", sequence=1).again
    assert bench.take() == ["a", "b", "c"]


def test_a_pause_holds_producers_but_not_transfers(bench: Bench) -> None:
    bench.pause(produce=True)
    with pytest.raises(QueueHeld, match="; resume"):
        bench.produce("a")
    bench.store(items("b"), source=b"queue", sequence=1)
    bench.pause(produce=False)
    bench.produce("c")
    assert bench.take() == ["b", "c"]


def test_produces_of_one_turn_share_it_and_come_out_in_order(bench: Bench) -> None:
    for batch in (items("ab"), items("cd", key="k"), items("e", priority=9)):
        bench.partition.run(Produce(batch))
    bench.partition.commit()
    assert given(bench.lease(per_key=2)) == [0, 1, 2, 3, 4]


def test_a_transfer_is_taken_by_its_sequence_whatever_its_dedup_id(bench: Bench) -> None:
    bench.produce("first", dedups=["order-1"])
    again = bench.store(items(["first, moved here"], dedups=["order-1"]), source=b"elsewhere", sequence=1)
    assert (again.count, again.again) == (1, False)
    assert bench.store(items(["first, moved here"], dedups=["order-1"]), source=b"elsewhere", sequence=1).again
    bench.restart()
    assert bench.partition.state.producers == {b"elsewhere": 1}
