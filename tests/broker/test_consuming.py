"""A consumer outside of the owner's process: it is granted leases, and what it has committed is completed."""

from typing import Literal

import pytest

from penstock.broker.snapshot import Snapshot
from penstock.broker.streams import StreamCoordinator
from penstock.errors import InvalidRequest
from penstock.operations import FindOffsets, ReadStats
from penstock.reports import GrantAnswer
from penstock.testing import Halt
from penstock.words import ids
from penstock.words.clock import MINUTE, SECOND
from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.grants import fail_items, grant, granted, ids_of_texts, produce_keyed, renew_operation, take_grant, take_grant_operation
from tests.broker.other_process import ROOT, ask_owner, numbers_by_key, other_process
from tests.broker.storages import SimulatedStorage

# -- grants ----------------------------------------------------------------------------------------------


def test_grant_after_grant_until_nothing_is_left(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    queue.produce(*[f"{n}" for n in range(25)], keys=[f"k{n}" for n in range(25)])
    found = ask_owner(file_broker, queue, take_grant_operation(want=10, timeout=MINUTE))
    assert found == GrantAnswer(1, 10, 15)
    assert queue.counts() == {"ready": 15, "leased": 10}
    seen = [*granted(file_broker, queue, 1).values()]
    for number, items in ((1, 10), (2, 5)):
        assert take_grant(file_broker, queue, number, want=10) == (number + 1, items)
        seen += granted(file_broker, queue, number + 1).values()
        assert queue.counts().get("completed", 0) == len(seen) - items
    assert take_grant(file_broker, queue, 3) == (3, 0)
    assert sorted(seen, key=int) == [f"{n}" for n in range(25)]
    assert queue.counts() == {"completed": 25} and queue.stats().completed == 25
    assert other_process(file_broker).answer_files() == [], "grants that are done are removed"
    assert other_process(file_broker).inbox_files() == []


def test_nothing_is_granted_when_nothing_is_wanted_or_ready(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    assert take_grant(file_broker, queue) == (0, 0)
    queue.produce("a")
    assert take_grant(file_broker, queue, want=0) == (0, 0)
    assert take_grant(file_broker, queue) == (1, 1)
    assert take_grant(file_broker, queue, done=1, want=0) == (1, 0)
    assert queue.counts() == {"completed": 1}


def test_a_repeated_request_gets_the_same_grant(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=3)
    queue.produce(*"abcdef")
    assert take_grant(file_broker, queue, want=3) == (1, 3)
    first = granted(file_broker, queue, 1)
    queue.produce(*"ghi")
    assert take_grant(file_broker, queue, want=100) == (1, 3)
    file_broker.restart()
    assert take_grant(file_broker, queue, want=100) == (1, 3)
    assert granted(file_broker, queue, 1) == first


def test_a_large_grant_is_several_leases(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    for _ in range(3):
        queue.produce(*["x"] * 10_000)
    assert take_grant(file_broker, queue, want=25_000) == (1, 25_000)
    assert len(grant(file_broker, queue, 1).leases) == 3
    assert take_grant(file_broker, queue, 1, want=25_000) == (2, 5_000)
    assert queue.counts() == {"completed": 25_000, "leased": 5_000}


def test_keys_are_given_in_units(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    produce_keyed(queue, *[f"k{n % 3}:{n}" for n in range(12)])
    assert take_grant(file_broker, queue, per_key=2) == (1, 6)
    assert numbers_by_key([*granted(file_broker, queue, 1).values()]) == {"k0": [0, 3], "k1": [1, 4], "k2": [2, 5]}
    assert take_grant(file_broker, queue, 1, per_key=100) == (2, 6)
    assert numbers_by_key([*granted(file_broker, queue, 2).values()]) == {"k0": [6, 9], "k1": [7, 10], "k2": [8, 11]}


def test_a_stream_with_an_old_checkpoint_is_refused(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce(*"abc")
    for number in range(3):
        take_grant(file_broker, queue, number, want=1)
    assert take_grant(file_broker, queue, 1) == (3, 1)
    with pytest.raises(InvalidRequest, match="new checkpoint"):
        grant(file_broker, queue, 2)


def test_streams_do_not_mix_their_grants(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a", "b")
    take_grant(file_broker, queue, want=1, timeout=5, stream="one")
    file_broker.advance_in_steps(5)
    take_grant(file_broker, queue, want=1, timeout=5, stream="one-2")
    file_broker.advance_in_steps(5)
    assert take_grant(file_broker, queue, done=1, want=0, stream="one") == (1, 0)
    assert len(other_process(file_broker).answer_files()) == 1
    assert [*granted(file_broker, queue, 1, "one-2")] != []


def test_a_pause_of_leases_holds_grants_back(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    queue.pause(lease=True)
    assert take_grant(file_broker, queue) == (0, 0)
    queue.pause(lease=False)
    assert take_grant(file_broker, queue) == (1, 1)


@pytest.mark.parametrize("durability", ["fsync", "interval", "os"])
def test_granted_items_are_published_for_outside_readers(durability: str) -> None:
    broker = BrokerUnderTest(SimulatedStorage(), durability=durability)
    queue = broker.create(partitions=2)
    produce_keyed(queue, *[f"k{n}:1" for n in range(9)])
    take_grant(broker, queue)
    snapshot = Snapshot.open(ROOT, files=other_process(broker).files, clock=broker.clock)
    assert snapshot.call(FindOffsets(queue=queue.incarnation, at="newest")) == broker.embedded.call(
        FindOffsets(queue=queue.incarnation, at="newest")
    )
    assert snapshot.call(ReadStats(queue=queue.incarnation)).leased == 9
    snapshot.close()
    broker.embedded.close()


# -- leases that ended -----------------------------------------------------------------------------------


def test_leases_are_renewed_with_the_right(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    take_grant(file_broker, queue, timeout=10)
    for _ in range(5):
        file_broker.advance_in_steps(9)
        ask_owner(file_broker, queue, renew_operation(timeout=10 * SECOND))
    assert queue.counts() == {"leased": 1}
    file_broker.advance_in_steps(10)
    assert queue.counts() == {"ready": 1}
    ask_owner(file_broker, queue, renew_operation(timeout=10 * SECOND))
    assert queue.counts() == {"ready": 1}, "what has ended is not renewed, and that is no matter"


def test_committed_items_are_completed_although_their_leases_ended(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    produce_keyed(queue, *[f"k{n % 3}:{n}" for n in range(9)])
    take_grant(file_broker, queue, timeout=10, want=6)
    file_broker.kill()
    file_broker.advance_in_steps(1_000)
    assert queue.counts() == {"ready": 9}
    assert take_grant(file_broker, queue, 1) == (2, 3)
    assert queue.counts() == {"completed": 6, "leased": 3}
    assert take_grant(file_broker, queue, 2) == (2, 0)
    assert queue.counts() == {"completed": 9}


def test_items_leased_by_another_consumer_meanwhile_are_not_completed(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce(*"abcd")
    take_grant(file_broker, queue, timeout=10)
    file_broker.advance_in_steps(10)
    held = queue.lease(2, consumer="other")
    assert take_grant(file_broker, queue, 1) == (1, 0)
    assert queue.counts() == {"leased": 2, "completed": 2}
    held.complete()
    assert queue.counts() == {"completed": 4}


def test_an_unread_grant_whose_leases_ended_is_not_given_again(file_broker: BrokerUnderTest) -> None:
    """Its answer was lost with the stream; meanwhile somebody else has taken some of the items."""
    queue = file_broker.create()
    queue.produce(*"abcd")
    assert take_grant(file_broker, queue, timeout=10, want=3) == (1, 3)
    file_broker.advance_in_steps(10)
    held = queue.lease(2, consumer="other")
    assert take_grant(file_broker, queue) == (1, 2)
    held.complete()
    assert take_grant(file_broker, queue, 1) == (1, 0)
    assert queue.counts() == {"completed": 4}


def test_an_owner_down_for_long_between_leasing_and_saving_the_grant(file_broker: BrokerUnderTest) -> None:
    """What it leased then has ended; the stream gets those items again at once, not when the request is forgotten."""
    queue = file_broker.create()
    queue.produce(*"abc")
    for _ in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StreamCoordinator, "_save", _cut_off)
            with pytest.raises(Halt):
                ask_owner(file_broker, queue, take_grant_operation(want=2, timeout=10 * SECOND))
        file_broker.kill()
        assert queue.counts() == {"ready": 1, "leased": 2}
        file_broker.advance_in_steps(60)
        assert queue.counts() == {"ready": 3}
    assert take_grant(file_broker, queue, want=2) == (1, 2)


def _cut_off(*args: object) -> None:
    raise Halt("between leasing and noting")


# -- items that failed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["retry", "bury"])
def test_items_that_failed_are_not_completed_with_the_rest(file_broker: BrokerUnderTest, action: Literal["retry", "bury"]) -> None:
    queue = file_broker.create(partitions=2)
    queue.produce(*"abcdef")
    take_grant(file_broker, queue)
    bad = ids_of_texts(granted(file_broker, queue, 1), "b", "e")
    assert fail_items(file_broker, queue, bad, action, reason="no good") == (2, 0)
    assert queue.counts() == {"leased": 6}, "nothing happens before the batch is committed"
    number, items = take_grant(file_broker, queue, 1)
    if action == "bury":
        assert (number, items) == (1, 0) and queue.counts() == {"completed": 4, "buried": 2}
        assert {queue.explain(id).state for id in bad} == {"buried"}
    else:
        assert (number, items) == (2, 2) and sorted(granted(file_broker, queue, 2).values()) == ["b", "e"]
        assert take_grant(file_broker, queue, 2) == (2, 0)
        assert queue.counts() == {"completed": 6}


def test_failed_items_have_a_delay_and_count_attempts(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(max_attempts=2)
    queue.produce("a", "b")
    take_grant(file_broker, queue)
    fail_items(file_broker, queue, ids_of_texts(granted(file_broker, queue, 1), "a"), delay=30 * SECOND, reason="later")
    assert take_grant(file_broker, queue, 1) == (1, 0)
    assert queue.counts() == {"completed": 1, "scheduled": 1}
    file_broker.advance_in_steps(31)
    assert take_grant(file_broker, queue, 1) == (2, 1)
    fail_items(file_broker, queue, ids_of_texts(granted(file_broker, queue, 2), "a"))
    assert take_grant(file_broker, queue, 2) == (2, 0)
    assert queue.counts() == {"completed": 1, "buried": 1}, "attempts count as with any consumer"


def test_items_behind_a_failed_one_of_the_same_key_come_again(file_broker: BrokerUnderTest) -> None:
    """Whatever comes before it in its key's line is done, though it was not settled when it failed."""
    queue = file_broker.create(partitions=2)
    produce_keyed(queue, *[f"k:{n}" for n in range(5)], *[f"l:{n}" for n in range(5)])
    take_grant(file_broker, queue)
    assert fail_items(file_broker, queue, ids_of_texts(granted(file_broker, queue, 1), "k:2")) == (1, 0)
    assert take_grant(file_broker, queue, 1) == (2, 3)
    assert numbers_by_key([*granted(file_broker, queue, 2).values()]) == {"k": [2, 3, 4]}
    fail_items(file_broker, queue, ids_of_texts(granted(file_broker, queue, 2), "k:2"), "bury")
    assert take_grant(file_broker, queue, 2) == (2, 0)
    assert queue.counts() == {"completed": 9, "buried": 1}


def test_a_parked_key_stays_parked(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(on_bury="park")
    produce_keyed(queue, "k:0", "k:1", "k:2", "l:0")
    take_grant(file_broker, queue)
    fail_items(file_broker, queue, ids_of_texts(granted(file_broker, queue, 1), "k:1"), "bury")
    assert take_grant(file_broker, queue, 1) == (1, 0)
    assert queue.counts() == {"completed": 2, "buried": 1, "ready": 1}
    queue.redrive_buried()
    assert take_grant(file_broker, queue, 1) == (2, 2)
    assert numbers_by_key([*granted(file_broker, queue, 2).values()]) == {"k": [1, 2]}


def test_the_last_failure_reported_for_an_item_counts(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a", "b")
    take_grant(file_broker, queue)
    both = [*granted(file_broker, queue, 1)]
    assert fail_items(file_broker, queue, both, "bury") == (2, 0)
    assert fail_items(file_broker, queue, both[:1], "retry", delay=SECOND) == (1, 0)
    assert fail_items(file_broker, queue, both[:1] * 2, "retry", delay=SECOND) == (1, 0)
    take_grant(file_broker, queue, 1)
    assert queue.counts() == {"scheduled": 1, "buried": 1}


def test_items_that_are_not_granted_are_not_found(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a", "b")
    take_grant(file_broker, queue, want=1)
    (own,) = granted(file_broker, queue, 1)
    assert fail_items(file_broker, queue, [own, ids.format_id(0, 1), ids.format_id(0, 99), ids.format_id(7, 0)]) == (1, 3)
    take_grant(file_broker, queue, 1, want=0)
    assert fail_items(file_broker, queue, [own]) == (0, 1)
    assert queue.counts() == {"ready": 2}


def test_items_that_failed_under_leases_that_ended_come_again(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    produce_keyed(queue, "k:0", "k:1", "k:2", "l:0")
    take_grant(file_broker, queue, timeout=10)
    fail_items(file_broker, queue, ids_of_texts(granted(file_broker, queue, 1), "k:1"), "bury")
    file_broker.advance_in_steps(10)
    take_grant(file_broker, queue, 1, want=0)
    assert queue.stats().completed >= 2 and queue.stats().ready >= 1
    file_broker.advance_in_steps(60)
    assert "k:1" in queue.drain()
