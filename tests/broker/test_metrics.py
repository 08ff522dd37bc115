"""What a broker measures: outcomes of items in each partition, depths, ages, durations, retention, adoption.

The log is the judge of the counters: the events of its items are counted one by one.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest

from penstock.loop import requests
from penstock.loop.item_events import events
from penstock.loop.requests import LeaseRequest, ProduceRequest, SettlePart
from penstock.operations import ClearItems, PauseQueue, ReadMetrics, SeekItems
from penstock.reports import BrokerMetrics, Durations, PartitionMetrics, QueueMetrics
from penstock.rules.commands import Settled
from penstock.words.clock import SECOND
from penstock.words.errors import LeaseLost, PenstockError, QueueBusy
from tests.broker.broker_under_test import BrokerUnderTest, LeasedItems, batch_of, keys_at, refusal
from tests.broker.other_process import other_process, process_inbox, texts
from tests.broker.storages import partly_failing_disk

A_DAY = 24 * 3_600.0


def measured(broker: BrokerUnderTest, queue: str = "q") -> QueueMetrics:
    return everything(broker).queues[queue]


def everything(broker: BrokerUnderTest) -> BrokerMetrics:
    return broker.embedded.call(ReadMetrics())


def partition(broker: BrokerUnderTest, number: int = 0) -> PartitionMetrics:
    return measured(broker).partitions[number]


def filled_buckets(found: Durations) -> dict[float, int]:
    """Upper bound → count, of the buckets that are not empty."""
    return {bound: count for bound, count in zip([*found.bounds, float("inf")], found.counts, strict=True) if count}


# -- outcomes of items -------------------------------------------------------------------------------------


def test_what_was_done_is_counted(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce("a", "b", "c")
    held = queue.lease(2)
    held.complete()
    (answer,) = queue.settle("retry", held.parts)
    assert isinstance(refusal(answer), LeaseLost)
    found = measured(broker)
    assert found.items == {"produced": 3, "leased": 2, "completed": 2}
    assert found.requests["produce"] == 1 and found.requests["lease"] == 1 and found.requests["retry"] == 1
    assert found.errors == {"lease_lost": 1}
    assert found.latencies["produce"].count == 1


def test_items_that_their_lease_no_longer_holds_are_counted_as_refused(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a", "b")
    held = queue.lease(2)
    (part,) = held.parts
    one = SettlePart(part.partition, part.lease, [0])
    queue.settle("complete", [one])
    (answer,) = queue.settle("retry", [one])
    assert isinstance(answer, Settled) and answer.refused == [0], "the lease still holds the other item"
    assert measured(broker).errors == {"lease_lost": 1}
    broker.advance(3600)
    queue.settle("extend", [SettlePart(part.partition, part.lease)])
    assert measured(broker).errors == {"lease_lost": 2}


def test_each_partition_has_its_own_counters(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    for number, items in ((0, 1), (1, 3)):
        queue.produce(*"abc"[:items], key=keys_at(queue, number)[0])
    queue.lease().complete()
    assert [one.items for one in measured(broker).partitions] == [
        {"produced": 1, "leased": 1, "completed": 1},
        {"produced": 3, "leased": 1, "completed": 1},
    ]


def test_duplicates_are_counted_apart(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a", "b", dedups=["x", None])
    queue.produce("a", dedups=["x"])
    queue.produce("a", "c", dedups=["x", "y"])
    assert partition(broker).items == {"produced": 3, "duplicates": 2}


def test_a_repeated_request_counts_once(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    for _ in range(3):
        queue.produce("a", "a", dedups=["x", "x"], request="r")
    assert partition(broker).items == {"produced": 1, "duplicates": 1}


def test_the_last_failed_attempt_counts_as_a_burial(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_attempts=2)
    queue.produce("a")
    queue.lease().retry()
    assert partition(broker).items == {"produced": 1, "leased": 1, "retried": 1}
    queue.lease().retry(reason="expired")
    assert partition(broker).items == {"produced": 1, "leased": 2, "retried": 1, "buried_by_attempts": 1}
    assert measured(broker).items["buried"] == 1


def test_burials_have_causes(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_attempts=1)
    queue.produce("asked")
    queue.lease().bury(reason="expired")  # a consumer's own words
    queue.produce("attempts")
    queue.lease().retry()
    queue.produce("ttl", ttl=1)
    broker.advance(2)
    found = partition(broker).items
    assert {name: found[name] for name in found if name.startswith("buried")} == {
        "buried_by_consumer": 1,
        "buried_by_attempts": 1,
        "buried_by_ttl": 1,
    }
    assert measured(broker).items["buried"] == 3


def test_an_expired_lease_counts_each_item_once(broker: BrokerUnderTest) -> None:
    """One item is returned; the other was tried before, so that the end of the lease buries it."""
    queue = broker.create(max_attempts=2)
    queue.produce("a")
    queue.lease().retry()
    queue.produce("b")
    assert len(queue.lease(2, timeout=10)) == 2
    broker.advance(11)
    found = measured(broker)
    assert found.items["lease_expired"] == 2 and found.items["buried_by_attempts"] == 1 and found.items["retried"] == 1
    assert sum(found.lease_durations["expired"].counts) == 2 and "buried" not in found.lease_durations


def test_items_that_are_returned_unharmed_are_not_retries(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a", "b", key="k")
    held = queue.lease(2, per_key=2)
    queue.settle("retry", [held.part(held.ids[0])])  # the later item of the same key goes back with it
    queue.lease(2, per_key=2).retry(counted=False)
    assert partition(broker).items == {"produced": 2, "leased": 4, "retried": 1, "returned": 3}


def test_a_lease_of_a_caller_who_left_is_returned(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    asked = queue.submit_lease()
    queue.produce("a")
    assert asked.done
    asked.cancel()
    broker.turn()
    assert partition(broker).items == {"produced": 1, "leased": 1, "returned": 1}


def test_clearing_seeking_and_redriving_are_counted(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a", "b", "c")
    queue.lease(1).complete()
    queue.lease(1).bury()
    assert queue.redrive_buried() == 1
    queue.call(SeekItems(start={0: 0}))
    queue.call(ClearItems(states=["ready"]))
    found = partition(broker).items
    assert (found["redriven"], found["sought"], found["cleared"]) == (1, 1, 3)


def test_transfers_are_counted_at_both_ends(broker: BrokerUnderTest) -> None:
    broker.create("dead")
    queue = broker.create(dead_queue="dead")
    queue.produce("a")
    queue.lease().bury()
    broker.turn()
    assert measured(broker).items == {"produced": 1, "leased": 1, "buried_by_consumer": 1, "buried": 1, "sent": 1}
    assert measured(broker, "dead").items == {"received": 1}


def test_a_replay_counts_nothing(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a", "b")
    queue.lease(1).complete()
    broker.restart()
    broker.find().open_all()
    found = partition(broker)
    assert found.items == {} and found.states["ready"] == 1


def test_a_turn_that_is_undone_counts_nothing(patchy: BrokerUnderTest) -> None:
    queue, disk = patchy.create(), partly_failing_disk(patchy.storage)
    queue.produce("before")
    held = queue.lease()
    disk.break_partition(0)
    for request in (
        ProduceRequest(batch_of("a")),
        ProduceRequest(batch_of("b", dedups=["x"])),
        requests.SettleRequest("complete", held.parts),
    ):
        with suppress(PenstockError):
            queue.run(request)
    found = partition(patchy)
    assert (found.status, found.states, found.items) == ("failing", {}, {"produced": 1, "leased": 1})
    assert found.failures >= 1
    disk.failing_paths.clear()
    patchy.advance(10)
    held.complete()
    found = partition(patchy)
    assert (found.status, found.items) == ("active", {"produced": 1, "leased": 1, "completed": 1})
    assert measured(patchy).errors == {"outcome_unknown": 1, "storage_failed": 2}


@pytest.mark.parametrize("seed", range(6))
def test_the_counters_are_what_the_log_says(patchy: BrokerUnderTest, seed: int) -> None:
    """Random work on a disk that fails now and then: the events of the log are counted and compared."""
    rng, disk = random.Random(seed), partly_failing_disk(patchy.storage)
    queue = patchy.create(partitions=2, max_attempts=3, on_bury=rng.choice(["release", "park"]))
    held: list[LeasedItems] = []
    work: list[Callable[[], object]] = [
        lambda: queue.produce(*"abcdef"[: rng.randrange(1, 7)], key=rng.choice([None, "k", "l", "m"])),
        lambda: queue.produce("late", at=patchy.after(rng.randrange(1, 20))),
        lambda: queue.produce("short", ttl=rng.randrange(1, 20)),
        lambda: queue.produce("same", dedups=[rng.choice("xyz")]),
        *[lambda: held.append(queue.lease(rng.randrange(1, 5), timeout=rng.randrange(1, 30), per_key=rng.randrange(1, 3)))] * 3,
        *[lambda: settle_some(rng, held)] * 3,
        lambda: queue.redrive_buried(),
        lambda: patchy.advance(rng.randrange(1, 10)),
        lambda: disk.break_partition(rng.randrange(2)),
        *[lambda: disk.failing_paths.clear()] * 2,
    ]
    for _ in range(150):
        with suppress(PenstockError):
            rng.choice(work)()
        patchy.turn()
    disk.failing_paths.clear()
    patchy.advance(20)
    queue.open_all()
    for handle in queue.loop.engine.handles.values():
        told = Counter(one.event for one in events(handle.log))
        found = Counter(handle.tally.counts)
        assert found["produced"] == told["produced"] + told["scheduled"]
        assert found["leased"] == told["leased"]
        assert found["completed"] == told["completed"]
        assert found["retried"] + found["returned"] == told["retried"] + told["delayed"]
        assert sum(found[f"buried_by_{cause}"] for cause in ("consumer", "attempts", "ttl")) == told["buried"] + told["expired"]
        assert found["redriven"] == told["redriven"]
        in_leases = sum(one.total for one in handle.tally.lease_durations.values())
        leased_now = handle.state.counts.leased
        assert in_leases + leased_now == found["leased"], "every lease of an item has one end"


def settle_some(rng: random.Random, held: list[LeasedItems]) -> None:
    if held:
        chosen = held.pop(rng.randrange(len(held)))
        action = rng.choice(["complete", "complete", "retry", "retry", "bury", "extend"])
        if action == "extend":
            held.append(chosen)
        items = [chosen.part(item) for item in rng.sample(chosen.ids, rng.randrange(len(chosen.ids) + 1))]
        chosen.queue.settle(action, items or chosen.parts)  # type: ignore[arg-type]


# -- requests ----------------------------------------------------------------------------------------------


def test_every_request_that_ends_has_a_latency(broker: BrokerUnderTest) -> None:
    """Also those that are refused, that wait, and that end without items."""
    queue = broker.create(max_items=1)
    queue.produce("a")
    waiting = queue.submit(ProduceRequest(batch_of("b"), deadline=broker.deadline(5)))
    queue.lease()
    assert not queue.lease()
    watched = queue.watch({0: 9}, wait=3)
    broker.turn()
    broker.advance_in_steps(10)
    assert watched.result is False
    with pytest.raises(PenstockError):
        assert waiting.result
    found = measured(broker)
    assert {verb: one.count for verb, one in found.latencies.items()} == {**found.requests}
    assert filled_buckets(found.request_durations["watch"]) == {5.0: 1}
    assert found.request_durations["watch"].sum == 3.0
    assert found.errors == {"queue_full": 1}


def test_an_error_that_comes_with_the_commit_is_counted(patchy: BrokerUnderTest) -> None:
    queue, disk = patchy.create(), partly_failing_disk(patchy.storage)
    disk.break_partition(0)
    with pytest.raises(PenstockError):
        queue.produce("a")
    assert measured(patchy).errors == {"outcome_unknown": 1}


def test_requests_beyond_the_places_are_counted_as_refused(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = broker.create()
    monkeypatch.setattr(requests, "PLACES", 3)
    for _ in range(3):
        queue.submit(LeaseRequest(1, deadline=broker.deadline(60)))
    with pytest.raises(QueueBusy):
        queue.submit(LeaseRequest(1, deadline=broker.deadline(60)))
    found = measured(broker)
    assert (found.errors, found.pending_requests) == ({"queue_busy": 1}, 3)


def test_waiting_calls_are_counted(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_items=1)
    queue.produce("a")
    queue.pause(lease=True)
    leases = [queue.submit_lease() for _ in range(3)]
    queue.submit(ProduceRequest(batch_of("b"), deadline=broker.deadline(60)))
    queue.watch({0: 9})
    broker.turn()
    leases[0].cancel()
    found = measured(broker)
    assert (found.waiting_leases, found.waiting_produces, found.waiting_reads) == (2, 1, 1)


# -- durations ---------------------------------------------------------------------------------------------


def test_the_time_from_lease_to_settling_is_measured_for_each_item(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a", "b", "c", "d")
    held = queue.lease(timeout=60)
    broker.advance(3)
    queue.settle("complete", [held.part(held.ids[0])])
    queue.settle("extend", held.parts, timeout=60)
    broker.advance(40)
    queue.settle("retry", [held.part(held.ids[1])])
    queue.settle("complete", held.parts)
    found = measured(broker).lease_durations
    assert {outcome: filled_buckets(one) for outcome, one in found.items()} == {
        "completed": {5.0: 1, 60.0: 2},
        "retried": {60.0: 1},
    }
    assert found["completed"].sum == pytest.approx(3 + 43 + 43)


def test_turns_and_syncs_are_timed(threaded_broker: BrokerUnderTest) -> None:
    queue = threaded_broker.create()
    before = measured(threaded_broker)
    for _ in range(5):
        queue.produce("a")
    after = measured(threaded_broker)
    assert after.turn_durations is not None and before.turn_durations is not None and after.turns - before.turns >= 5
    assert sum(after.turn_durations.counts) == after.turns
    assert after.turn_durations.sum > before.turn_durations.sum


def test_a_sync_takes_as_long_as_the_disk(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    before = measured(file_broker).sync_durations
    assert before is not None
    queue.loop.stays_in_io = lambda handle: True
    asked = queue.submit(ProduceRequest(batch_of("a")))
    file_broker.turn()
    file_broker.advance(0.2)
    queue.loop.stays_in_io = lambda handle: False
    file_broker.turn()
    assert asked.result
    after = measured(file_broker).sync_durations
    assert after is not None
    assert after.sum - before.sum == pytest.approx(0.2) and filled_buckets(after)[0.25] == 1


# -- present figures ---------------------------------------------------------------------------------------


def test_depth_is_told_by_state(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a", "b", "c", "d")
    queue.produce("later", at=broker.after(100))
    queue.lease(1).bury()
    queue.lease(2)
    broker.advance(7)
    found = partition(broker)
    assert found.states == {"ready": 1, "scheduled": 1, "leased": 2, "buried": 1, "moving": 0}
    assert found.oldest_ready_seconds == 7
    assert (found.size_bytes > 0, found.status) == (True, "active")


def test_a_closed_partition_is_not_opened_and_its_items_grow_older(broker: BrokerUnderTest) -> None:
    """Nobody consumes: the partition is closed after a minute, and that is when the age matters."""
    queue = broker.create(on_bury="park", retention={"max_age": 0})
    queue.produce("bad", key="k")
    queue.lease().bury()
    queue.produce("a", "b", key="k")
    broker.advance_in_steps(600)
    (handle,) = queue.loop.engine.handles.values()
    assert handle.closed
    found = partition(broker)
    assert handle.closed, "the metrics did not open it"
    assert found.states == {"ready": 2, "scheduled": 0, "leased": 0, "buried": 1, "moving": 0}
    assert (found.held_keys, found.parked_keys, found.status) == (1, 1, "active")
    assert found.items == {"produced": 3, "leased": 1, "buried_by_consumer": 1}
    queue.produce("free")
    broker.advance_in_steps(300)
    assert handle.closed and partition(broker).oldest_ready_seconds == pytest.approx(900, abs=1)


def test_a_partition_in_io_is_measured_all_the_same(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce("a")
    queue.loop.stays_in_io = lambda handle: True
    queue.submit(ProduceRequest(batch_of("b", "c")))
    file_broker.turn()
    found = partition(file_broker)
    assert (found.states["ready"], found.items, found.status) == (3, {"produced": 1}, "active"), "b and c are not durable yet"
    file_broker.advance_in_steps(1)
    found = partition(file_broker)
    assert (found.states["ready"], found.status, found.slow) == (3, "slow", 1)
    queue.loop.stays_in_io = lambda handle: False
    file_broker.turn()
    found = partition(file_broker)
    assert (found.items, found.status, found.slow) == ({"produced": 3}, "active", 1)


def test_a_partition_that_must_be_opened_first_has_no_depth(file_broker: BrokerUnderTest) -> None:
    file_broker.create(partitions=2).produce("a")
    file_broker.kill()
    queue = file_broker.find()
    queue.loop.stays_in_io = lambda handle: True
    found = measured(file_broker)
    assert {(one.status, tuple(one.states)) for one in found.partitions} <= {("opening", ()), ("active", tuple(found.partitions[0].states))}
    queue.loop.stays_in_io = lambda handle: False
    queue.open_all()
    assert sum(one.states["ready"] for one in measured(file_broker).partitions) == 1


def test_held_and_parked_keys_are_counted(broker: BrokerUnderTest) -> None:
    queue = broker.create(on_bury="park")
    queue.produce("a", "b", "c", keys=["k", "l", "m"])
    queue.lease(1).bury()
    queue.lease(1)
    assert (partition(broker).held_keys, partition(broker).parked_keys) == (2, 1)
    queue.redrive_buried()
    assert partition(broker).parked_keys == 0


def test_a_pause_is_shown(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.call(PauseQueue(lease=True, partition=1))
    assert [(one.paused_lease, one.paused_produce) for one in measured(broker).partitions] == [(False, False), (True, False)]


def test_the_free_space_is_told(file_broker: BrokerUnderTest) -> None:
    file_broker.storage.files.set_free_bytes(12_345)  # type: ignore[attr-defined]
    assert everything(file_broker).free_bytes == {0: 12_345}


# -- retention and adoption --------------------------------------------------------------------------------


def test_what_retention_frees_is_counted(broker: BrokerUnderTest) -> None:
    queue = broker.create(retention={"max_age": round(A_DAY * SECOND), "max_bytes": 0})
    for hour in range(30):
        queue.produce(random.Random(hour).randbytes(10_000))
        queue.lease().complete()
        broker.advance_in_steps(3_600)
    found, stats = partition(broker), queue.stats().partitions[0]
    assert found.freed_segments >= 1 and found.freed_bytes > 10_000
    assert 0 < found.items["dropped"] < 30 and "buried_dropped" not in found.items
    assert found.size_bytes == pytest.approx(stats.size_bytes, rel=0.05)
    assert found.written_bytes > found.freed_bytes


def test_the_size_of_a_log_is_right_after_rotations_and_restarts(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(retention={"max_age": 0, "max_bytes": 0})
    for restart in (False, True, False, True):
        queue.produce(b"x" * 50_000)
        queue.run(requests.FunctionRequest(lambda engine: [one.usable_partition.compact() for one in engine.usable()]))
        if restart:
            file_broker.restart()
            queue = file_broker.find()
            queue.open_all()
        assert partition(file_broker).size_bytes == queue.stats().partitions[0].size_bytes


def test_adopted_writes_are_counted(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish_texts(queue, *texts(0, 2))
    assert process_inbox(file_broker)
    queue.produce("direct")
    found = measured(file_broker)
    assert (found.writes_waiting, found.writes_refused, found.writes_adopted) == (0, 0, 1)
    assert found.items == {"produced": 25, "adopted": 24}
    queue.pause(produce=True)
    other.publish_texts(queue, *texts(2, 3), number=2)
    process_inbox(file_broker)
    found = measured(file_broker)
    assert (found.writes_waiting, found.writes_refused, found.writes_adopted) == (1, 0, 1)


def test_a_write_that_cannot_be_adopted_is_shown(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish_texts(queue, "k:1")
    (write,) = other.inbox.waiting()
    path = f"/data/inbox/{write.label}/part-0.frames"
    file_broker.storage.files.flip_bit(path, 900)  # type: ignore[attr-defined]
    for _ in range(2):
        process_inbox(file_broker)
        found = measured(file_broker)
        assert (found.writes_waiting, found.writes_refused, found.writes_adopted) == (1, 1, 0)
