"""Leasing and settling, as a user does it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import Broker, Lease, NewItem, Queue
from penstock.errors import InvalidRequest, LeaseLost
from penstock.words.clock import HOUR, SECOND
from tests.api.both_apis import WAIT, BrokerOpener


@pytest.fixture
def queue(broker: Broker) -> Queue:
    return broker.create_queue("orders")


def fill(queue: Queue, count: int) -> list[str]:
    return queue.produce_many([b"%d" % n for n in range(count)])


def payloads(leases: Any) -> list[bytes]:
    return [lease.item.payload for lease in leases]


class Broken(Exception):
    """A handler failed."""


# -- leasing -----------------------------------------------------------------------------------------


def test_one_item_from_beginning_to_end(broker: Broker, queue: Queue) -> None:
    item_id = queue.produce({"order": 1}, key="customer-42")
    assert [item.id for item in queue.items()] == [item_id]
    lease = queue.lease(consumer="host-1")[0]
    assert (lease.id, lease.item.value, lease.attempts, lease.state) == (item_id, {"order": 1}, 1, "open")
    assert queue.stats().consumers == {"host-1": 1}
    lease.complete()
    assert lease.state == "completed"
    assert not queue.lease()
    queue.delete()
    assert broker.queues() == []


def test_an_item_says_its_queue_and_how_many_attempts_it_has(broker: Broker, queue: Queue) -> None:
    fill(queue, 3)
    assert [item.queue for item in (*queue.items(), *queue.cursor("c").read(), *queue.cursor("d"))] == ["orders"] * 9
    (lease,) = queue.lease()
    assert (lease.item.queue, lease.item.max_attempts) == ("orders", 10)
    queue.update(max_attempts=2)
    batch = queue.lease(2)
    assert [(item.queue, item.max_attempts) for item in batch.items] == [("orders", 2)] * 2
    assert lease.item.max_attempts == 10, "as it was then"


def test_a_lease_that_is_retried_after_its_last_attempt_says_that_it_is_buried(broker: Broker) -> None:
    queue = broker.create_queue("orders", max_attempts=2)
    fill(queue, 1)
    queue.lease()[0].retry()
    fill(queue, 2)
    batch = queue.lease(3)
    batch.retry()
    assert sorted((lease.item.payload, lease.state) for lease in batch) == [(b"0", "buried"), (b"0", "retried"), (b"1", "retried")]
    again = queue.lease(2)
    again[0].retry()
    assert [lease.state for lease in again] == ["buried", "open"]


def test_leases_are_the_oldest_items_and_disjoint(queue: Queue) -> None:
    ids = fill(queue, 10_000)
    assert [lease.id for lease in queue.lease(10)] == ids[:10]
    assert [lease.id for lease in queue.lease(10)] == ids[10:20]


def test_an_empty_queue_gives_an_empty_batch(queue: Queue) -> None:
    batch = queue.lease(10)
    assert not batch
    assert (len(batch), list(batch), batch.items, repr(batch)) == (0, [], [], "LeaseBatch(0 leases, 0 open)")
    batch.complete()
    batch.extend()
    assert queue.lease(1, wait=0.01).to_arrow().num_rows == 0


def test_a_batch_is_a_sequence(queue: Queue) -> None:
    ids = fill(queue, 5)
    batch = queue.lease(10)
    assert len(batch) == 5 and batch
    assert [lease.id for lease in batch[1:3]] == ids[1:3]
    assert batch[-1].id == ids[-1]
    assert [item.id for item in batch.items] == ids
    with pytest.raises(IndexError):
        batch[5]


def test_one_consumer_drains_all_partitions(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=10)
    ids = queue.produce_many([NewItem(b"", key=str(n)) for n in range(200)])
    assert len({one.split("-")[0] for one in ids}) == 10
    assert {lease.id for lease in queue.lease(1_000)} == set(ids)


def test_a_repeated_request_gives_the_same_leases(queue: Queue) -> None:
    fill(queue, 6)
    first = queue.lease(3, request_id="r")
    again = queue.lease(3, request_id="r")
    assert [lease.token for lease in again] == [lease.token for lease in first]
    assert payloads(queue.lease(6, request_id="s")) == [b"3", b"4", b"5"]


def test_keys_are_handled_one_at_a_time_or_in_units(queue: Queue) -> None:
    queue.produce_many([NewItem(b"%d" % n, key="k") for n in range(4)])
    first = queue.lease(10)
    assert payloads(first) == [b"0"]
    first.complete()
    unit = queue.lease(10, per_key=2)
    assert payloads(unit) == [b"1", b"2"]
    with pytest.raises(InvalidRequest, match="item 0-2 must wait for earlier items of the same key under this lease; settle those first"):
        unit[1].complete()
    assert unit[1].state == "open"
    unit.complete()
    assert payloads(queue.lease(10)) == [b"3"]


# -- settling one ------------------------------------------------------------------------------------


def test_completing_twice_succeeds(queue: Queue) -> None:
    fill(queue, 1)
    lease = queue.lease()[0]
    lease.complete()
    lease.complete()
    assert queue.stats().completed == 1


def test_a_retried_item_goes_to_the_tail(queue: Queue) -> None:
    fill(queue, 3)
    queue.lease()[0].retry(reason="later")
    batch = queue.lease(3)
    assert payloads(batch) == [b"1", b"2", b"0"]
    assert [lease.attempts for lease in batch] == [1, 1, 2]


def test_a_retried_item_of_a_key_keeps_its_place(queue: Queue) -> None:
    queue.produce_many([NewItem(b"%d" % n, key="k") for n in range(2)])
    queue.lease()[0].retry()
    assert payloads(queue.lease(3)) == [b"0"]


def test_a_delayed_retry_is_leased_after_its_delay(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    queue.produce(b"1")
    queue.lease()[0].retry(delay=timedelta(seconds=30), reason="busy")
    assert not queue.lease()
    assert "backing off after attempt 1 (busy)" in queue.explain("0-0").why
    opener.clock.advance(31 * SECOND)
    assert payloads(queue.lease()) == [b"1"]


def test_an_attempt_does_not_count_with_counted_false(broker: Broker) -> None:
    queue = broker.create_queue("orders", max_attempts=1)
    queue.produce(b"1")
    queue.lease()[0].retry(counted=False)
    lease = queue.lease()[0]
    assert lease.attempts == 1
    lease.retry(reason="bad")
    assert not queue.lease()
    assert [item.reason for item in queue.items("buried")] == ["attempts spent: bad"]


@pytest.mark.parametrize("attempts", [1, 3])
def test_max_attempts_allows_exactly_so_many_leases(broker: Broker, attempts: int) -> None:
    queue = broker.create_queue("orders", max_attempts=attempts)
    queue.produce(b"1")
    leased = 0
    while batch := queue.lease():
        leased += 1
        batch.retry()
    assert leased == attempts


def test_a_buried_item_is_listed_with_its_reason(queue: Queue) -> None:
    fill(queue, 2)
    queue.lease()[0].bury("poison")
    (item,) = queue.items("buried")
    assert (item.value, item.state, item.reason, item.attempts) == (b"0", "buried", "poison", 1)
    assert queue.explain(item.id).why == "buried because: poison"
    assert payloads(queue.lease(10)) == [b"1"]


def test_extending_moves_the_deadline(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", lease_timeout=60)
    queue.produce(b"1")
    lease = queue.lease(lease_timeout=10)[0]
    assert lease.deadline == datetime(2026, 1, 1, 0, 0, 10, tzinfo=UTC)
    opener.clock.advance(8 * SECOND)
    lease.extend()
    assert lease.deadline == datetime(2026, 1, 1, 0, 0, 18, tzinfo=UTC)
    lease.extend(timedelta(hours=1))
    opener.clock.advance(HOUR - SECOND)
    assert not queue.lease()
    lease.complete()


def test_an_expired_lease_is_refused_and_the_new_one_works(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", lease_timeout=10)
    queue.produce(b"1")
    old = queue.lease()[0]
    opener.clock.advance(10 * SECOND)
    new = queue.lease()[0]
    assert new.attempts == 2
    for settle in (old.complete, old.retry, old.bury, old.extend):
        with pytest.raises(LeaseLost, match="the lease of item 0-0 has ended; drop the work") as caught:
            settle()
        assert vars(caught.value)["lost"] == ["0-0"]
    assert old.state == "lost"
    new.extend()
    new.complete()


def test_a_lease_that_this_program_settled_says_so(queue: Queue) -> None:
    fill(queue, 3)
    completed, retried, buried = queue.lease(3)
    completed.complete()
    retried.retry()
    buried.bury()
    refused: list[Callable[[], object]] = [completed.retry, completed.extend, retried.complete, buried.complete]
    for lease, settle in zip((completed, completed, retried, buried), refused, strict=True):
        state = lease.state
        with pytest.raises(LeaseLost, match=f"^item {lease.id} was {state} already under this lease; settle each lease once$"):
            settle()
        assert lease.state == state
    with pytest.raises(LeaseLost, match=r"^items .* were buried or retried already under this lease; settle each lease once$"):
        queue.complete([retried, buried])


def test_the_last_attempt_can_be_completed_until_its_lease_ends(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", lease_timeout=10, max_attempts=1)
    queue.produce(b"1")
    lease = queue.lease()[0]
    opener.clock.advance(9 * SECOND)
    assert not queue.lease() and not queue.items("buried")
    lease.complete()


# -- blocks ------------------------------------------------------------------------------------------


def test_a_block_completes_its_item(queue: Queue) -> None:
    fill(queue, 1)
    with queue.lease()[0] as lease:
        assert lease.item.payload == b"0"
    assert lease.state == "completed"


def test_a_block_that_fails_retries_its_item(queue: Queue) -> None:
    fill(queue, 1)
    with pytest.raises(Broken, match="no network"), queue.lease()[0]:
        raise Broken("no network")
    (item,) = queue.items("ready")
    assert (item.attempts, item.reason) == (1, "Broken: no network")


def test_the_reason_of_an_error_without_a_message_is_its_class(queue: Queue) -> None:
    fill(queue, 1)
    with pytest.raises(Broken), queue.lease():
        raise Broken
    assert queue.items("ready")[0].reason == "Broken"


def test_a_block_leaves_a_settled_item_alone(queue: Queue) -> None:
    fill(queue, 1)
    with queue.lease()[0] as lease:
        lease.bury("bad")
    assert queue.stats().buried == 1


def test_a_block_raises_lease_lost_only_if_it_did_not_fail(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", lease_timeout=10)
    fill(queue, 1)
    with pytest.raises(LeaseLost), queue.lease()[0]:
        opener.clock.advance(11 * SECOND)
    lease = queue.lease()[0]
    opener.clock.advance(11 * SECOND)
    with pytest.raises(Broken), lease:
        raise Broken


def test_a_block_of_a_batch_settles_what_is_open(queue: Queue) -> None:
    fill(queue, 4)
    with queue.lease(2) as batch:
        batch[0].bury("bad")
    assert [lease.state for lease in batch] == ["buried", "completed"]
    batch = queue.lease(2)
    batch[0].complete()
    with pytest.raises(Broken), batch:
        raise Broken("no")
    assert [lease.state for lease in batch] == ["completed", "retried"]
    assert [(item.value, item.reason) for item in queue.items("ready")] == [(b"3", "Broken: no")]


# -- settling many -----------------------------------------------------------------------------------


def test_a_batch_settles_what_is_still_open_and_nothing_else(queue: Queue) -> None:
    fill(queue, 3)
    batch = queue.lease(3)
    batch[1].retry()
    assert repr(batch) == "LeaseBatch(3 leases, 2 open)"
    batch.complete()
    batch.complete()
    assert [lease.state for lease in batch] == ["completed", "retried", "completed"]
    assert payloads(queue.lease(3)) == [b"1"]


def test_a_whole_batch_is_retried_buried_extended(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=3)
    fill(queue, 5)
    queue.produce_many([NewItem(b"", key=str(n)) for n in range(5)])
    batch = queue.lease(10)
    batch.extend(600)
    batch.retry(reason="again")
    batch = queue.lease(10)
    assert {lease.attempts for lease in batch} == {2}
    batch.bury("enough")
    assert {item.reason for item in queue.items("buried")} == {"enough"}
    assert queue.stats().buried == 10


def test_an_ended_lease_in_a_batch_is_named_and_the_others_are_settled(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", lease_timeout=10)
    fill(queue, 3)
    stale = queue.lease()
    opener.clock.advance(5 * SECOND)
    fresh = queue.lease(2)
    opener.clock.advance(6 * SECOND)
    with pytest.raises(LeaseLost, match="item 0-0 has ended") as caught:
        queue.complete([stale, fresh])
    assert vars(caught.value)["lost"] == ["0-0"]
    assert [lease.state for lease in [*stale, *fresh]] == ["lost", "completed", "completed"]
    stale.complete()  # it was told already, and there is nothing left to settle
    with pytest.raises(LeaseLost):
        stale[0].complete()


def test_many_lost_leases_are_named_in_one_sentence(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", lease_timeout=10)
    ids = fill(queue, 7)
    batch = queue.lease(7)
    opener.clock.advance(11 * SECOND)
    with pytest.raises(LeaseLost) as caught:
        batch.complete()
    assert str(caught.value).startswith("the leases of items 0-0, 0-1, 0-2, 0-3, 0-4 and 2 more have ended; drop that work")
    assert vars(caught.value)["lost"] == ids


def test_retrying_an_item_returns_the_later_ones_of_its_key(queue: Queue) -> None:
    queue.produce_many([NewItem(b"%d" % n, key="k") for n in range(3)])
    batch = queue.lease(3, per_key=3)
    batch[0].complete()
    batch[1].retry()
    assert [lease.state for lease in batch] == ["completed", "retried", "returned"]
    with pytest.raises(LeaseLost):
        batch[2].complete()
    batch.complete()
    again = queue.lease(3, per_key=3)
    assert [(lease.item.payload, lease.attempts) for lease in again] == [(b"1", 2), (b"2", 1)]


def test_a_settled_lease_cannot_be_extended(queue: Queue) -> None:
    fill(queue, 2)
    batch = queue.lease(2)
    batch[0].complete()
    with pytest.raises(LeaseLost, match="item 0-0 was completed already"):
        batch[0].extend()
    batch.extend()


# -- what is refused ---------------------------------------------------------------------------------

WRONG: list[tuple[str, Callable[[Queue, Lease], object], str]] = [
    ("none", lambda q, _: q.lease(0), "count is 0; give a whole number from 1 to 10000"),
    ("too many", lambda q, _: q.lease(10_001), "count is 10001; give a whole number from 1 to 10000"),
    ("no number", lambda q, _: q.lease("1"), "count is str; give a whole number from 1 to 10000"),  # type: ignore[arg-type]
    ("per key", lambda q, _: q.lease(per_key=0), "per_key is 0; give a whole number from 1 to 10000"),
    ("wait", lambda q, _: q.lease(wait=-1), "wait is -1; give 0 to 900 seconds"),
    ("long wait", lambda q, _: q.lease(wait=timedelta(minutes=16)), "wait is 0:16:00; give 0 to 900 seconds"),
    ("not a wait", lambda q, _: q.lease(wait=True), "wait is bool; give seconds or a timedelta"),
    ("short lease", lambda q, _: q.lease(lease_timeout=0.5), "lease_timeout is 0.5; give 1 to 43200 seconds"),
    ("consumer", lambda q, _: q.lease(consumer=7), "a consumer is int; give a text"),  # type: ignore[arg-type]
    ("delay", lambda _, one: one.retry(delay=-1), "delay is -1; give 0 to 315360000 seconds"),
    ("reason", lambda _, one: one.retry(reason=7), "the reason is int; give a text"),  # type: ignore[arg-type]
    ("counted", lambda _, one: one.retry(counted=0), "counted is int; give True or False"),  # type: ignore[arg-type]
    ("bury", lambda _, one: one.bury(None), "the reason is NoneType; give a text"),  # type: ignore[arg-type]
    ("extend", lambda _, one: one.extend(0), "timeout is 0; give 1 to 43200 seconds"),
    ("token", lambda q, _: q.complete("abc"), "'abc' is not a lease token; give one as lease returned it"),
    ("no lease", lambda q, _: q.complete(7), "a lease is int; give a Lease, a LeaseBatch or the token"),  # type: ignore[arg-type]
    ("item id", lambda q, one: q.complete([one.id]), "'0-0' is not a lease token; give one as lease returned it"),
    ("request id", lambda q, one: q.complete([one], request_id=b""), "the request id has 0 bytes; give 1 to 1024"),
    ("follow-up", lambda _, one: one.complete(then=b"x"), "then is bytes; give a list of NewItem"),
    ("follow-ups", lambda _, one: one.complete(then=[None]), "the payload is NoneType"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("call", "sentence"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_arguments_are_refused_and_nothing_is_done(queue: Queue, call: Callable[[Queue, Lease], object], sentence: str) -> None:
    fill(queue, 2)
    lease = queue.lease()[0]
    with pytest.raises(InvalidRequest) as caught:
        call(queue, lease)
    assert sentence in str(caught.value)
    assert (queue.stats().leased, queue.stats().ready) == (1, 1)
    assert not queue.lease(1, wait=WAIT)[0].attempts > 1


# -- follow-ups of what is completed already -----------------------------------------------------------


def test_follow_ups_for_an_item_that_is_completed_already_are_an_error(queue: Queue) -> None:
    fill(queue, 4)
    (one,) = queue.lease()
    one.complete()
    one.complete()  # nothing is lost by a second completion
    with pytest.raises(InvalidRequest, match="this call made no follow-ups"):
        one.complete(then=[b"next"])
    assert one.state == "completed"
    batch = queue.lease(2)
    batch.complete()
    with pytest.raises(InvalidRequest, match="this call made no follow-ups"):
        batch[0].complete(then=[b"next"])
    (last,) = queue.lease()
    queue.complete([last.token])
    with pytest.raises(InvalidRequest, match="this call made no follow-ups"), last:
        last.complete(then=[b"next"])
    assert (queue.stats().produced, queue.stats().completed) == (4, 4)
