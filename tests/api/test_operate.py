"""Administration of a queue; dead letters, follow-ups and redrives."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import penstock
from penstock import Broker, Item, NewItem, Queue, Redriven
from penstock.errors import InvalidRequest, LeaseLost, QueueNotFound
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import SECOND
from tests.api.both_apis import WAIT, BrokerOpener, run_all_turns


@pytest.fixture
def queue(broker: Broker) -> Queue:
    return broker.create_queue("orders")


def fill(queue: Queue, count: int, **options: Any) -> list[str]:
    return queue.produce_many([NewItem(b"%d" % n, **options) for n in range(count)])


# -- looking -----------------------------------------------------------------------------------------


def test_items_are_listed_by_state_in_pages(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    ids = fill(queue, 6)
    queue.produce(b"later", at=datetime(2027, 1, 1, tzinfo=UTC))
    batch = queue.lease(3)
    batch[0].complete()
    batch[1].bury("bad")
    states = [item.state for item in queue.items()]
    assert states == ["completed", "buried", "leased", "ready", "ready", "ready", "scheduled"]
    assert [item.id for item in queue.items("ready", limit=2)] == ids[3:5]
    assert [item.id for item in queue.items("ready", after=ids[4])] == ids[5:]
    assert [item.value for item in queue.items(["leased", "scheduled"])] == [b"2", b"later"]
    assert repr(queue.items("buried")[0]) == "ListedItem('0-1', b'1', attempts=1, state='buried', reason='bad')"


def test_explain_says_why_an_item_is_not_running(queue: Queue) -> None:
    first, second = fill(queue, 2, key="k")
    assert queue.explain(first).why.startswith("ready")
    queue.lease(consumer="host-1")
    assert queue.explain(first).why.startswith("leased by host-1")
    found = queue.explain(second)
    assert (found.state, found.held_by) == ("ready", first)
    assert not queue.lease()  # met, and put into its key's line
    (key,) = queue.held_keys()
    assert (key.key, key.why, key.item, key.waiting) == (b"k", "leased", first, 1)


def test_stats_count_everything(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    fill(queue, 5)
    queue.lease(2, consumer="a")[0].complete()
    found = queue.stats()
    assert (found.name, found.ready, found.leased, found.completed, found.produced, found.depth) == ("orders", 3, 1, 1, 5, 4)
    assert found.consumers == {"a": 1} and len(found.partitions) == 2


# -- changing ----------------------------------------------------------------------------------------


def test_a_pause_stops_leasing_or_producing_or_both(queue: Queue) -> None:
    fill(queue, 2)
    lease = queue.lease()[0]
    queue.pause(produce=False)
    assert not queue.lease()
    queue.produce(b"goes in")
    lease.complete()
    queue.pause(lease=False)
    queue.resume(produce=False)
    assert len(queue.lease(5)) == 2
    assert queue.stats().partitions[0].paused_produce
    queue.resume()
    assert not queue.stats().partitions[0].paused_produce


@pytest.mark.parametrize(("state", "left"), [("ready", [2, 1]), ("scheduled", [3, 0]), ("buried", [2, 1]), ("all", [0, 0])])
def test_clear_completes_the_items_of_the_given_state(manual_clock_broker: Broker, state: Any, left: list[int]) -> None:
    queue = manual_clock_broker.create_queue("orders", lease_timeout=60)
    fill(queue, 4)
    queue.produce(b"later", at=datetime(2027, 1, 1, tzinfo=UTC))
    queue.lease(2)[0].bury("bad")
    before = queue.stats()
    cleared = queue.clear(state)
    after = queue.stats()
    assert cleared == (before.depth + before.buried) - (after.depth + after.buried)
    assert after.scheduled == (0 if state in ("scheduled", "all") else 1)
    assert (after.ready, after.leased, after.buried) == (
        0 if state in ("ready", "all") else 2,
        0 if state == "all" else 1,
        0 if state in ("buried", "all") else 1,
    )


def test_seek_makes_completed_items_ready_again(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    ids = fill(queue, 3)
    opener.clock.advance(60 * SECOND)
    ids += fill(queue, 2)
    queue.lease(10).complete()
    assert queue.seek(ids[2]) == 3
    assert [item.id for item in queue.lease(10).items] == ids[2:]
    assert queue.seek(at=datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)) == 0  # those are leased
    queue.clear("all")
    assert queue.seek(at=datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC)) == 2
    assert [item.id for item in queue.items("ready")] == ids[3:]


def test_seek_skips_waiting_items_before_a_point(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders")
    ids = fill(queue, 3)
    opener.clock.advance(60 * SECOND)
    ids += fill(queue, 2)
    assert queue.seek(ids[1], skip=True) == 1
    assert queue.seek(at=datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC), skip=True) == 2
    assert [item.id for item in queue.items("ready")] == ids[3:]
    assert queue.seek(ids[0]) == 3


def test_resize_keeps_everything_and_the_order_of_keys(broker: Broker) -> None:
    queue = broker.create_queue("orders")
    for n in range(3):
        queue.produce_many([NewItem(b"%d" % n, key=str(key)) for key in range(30)])
    assert queue.resize(4).partitions == 4
    queue.produce_many([NewItem(b"3", key=str(key)) for key in range(30)])
    assert queue.resize(2).partitions == 2
    seen: dict[str | None, list[bytes]] = {}
    while sum(map(len, seen.values())) < 120:
        with queue.lease(100, wait=WAIT) as batch:
            assert batch, "an item was lost"
            for item in batch.items:
                seen.setdefault(item.key, []).append(item.payload)
    assert all(found == [b"0", b"1", b"2", b"3"] for found in seen.values())


def test_a_read_only_partition_drains_and_takes_nothing(broker: Broker) -> None:
    queue = broker.create_queue("orders", partitions=2)
    info = queue.set_read_only(0)
    assert (info.active, info.read_only) == ([1], [0])
    assert {one.split("-")[0] for one in fill(queue, 5)} == {"1"}
    assert queue.set_read_only(0, False).active == [0, 1]


def test_a_parked_key_waits_until_it_is_released_or_redriven(broker: Broker) -> None:
    queue = broker.create_queue("orders", on_bury="park")
    fill(queue, 2, key="k")
    queue.lease()[0].bury("bad")
    assert not queue.lease()
    assert [key.why for key in queue.held_keys()] == ["parked"]
    assert queue.release("k") == 1
    assert [item.payload for item in queue.lease().items] == [b"1"]


def test_compact_returns_what_it_freed(opener: BrokerOpener) -> None:
    queue = opener.open(segment_bytes=4096).create_queue("orders", retention={"max_age": 0, "max_bytes": 1})
    for _ in range(10):
        queue.produce_many([b"x" * 1000] * 50)
        queue.lease(50).complete()
    queue.produce(b"y")
    before = queue.stats().partitions[0].size_bytes
    (freed,) = queue.compact()
    assert freed.items > 0 and freed.size_bytes > 0
    assert queue.stats().partitions[0].size_bytes < before
    assert queue.compact(partition=0)
    assert [item.payload for item in queue.lease(10).items] == [b"y"]


# -- follow-ups and dead letters ---------------------------------------------------------------------


def test_follow_ups_are_produced_when_the_item_is_completed(broker: Broker, queue: Queue) -> None:
    mails = broker.create_queue("mails", partitions=2)
    queue.produce(b"order")
    lease = queue.lease()[0]
    then: list[Any] = [
        NewItem({"to": "a"}, queue="mails", key="a"),
        NewItem(b"own", key="b"),
        "plain",
        NewItem("b", queue="mails", headers={"h": "1"}),
    ]
    lease.complete(then=then)
    found: list[Item] = []
    while len(found) < 2:
        found += mails.lease(5, wait=WAIT).items
    assert sorted([(item.value, item.headers) for item in found], key=repr) == [("b", {"h": "1"}), ({"to": "a"}, {})]
    own: list[Any] = []
    while len(own) < 2:
        own += [item.value for item in queue.lease(5, wait=WAIT).items]
    assert sorted(own, key=repr) == ["plain", b"own"]


def test_no_follow_up_is_produced_for_a_lost_lease(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    queue = manual_clock_broker.create_queue("orders", lease_timeout=10)
    queue.produce(b"order")
    lease = queue.lease()[0]
    opener.clock.advance(11 * SECOND)
    with pytest.raises(LeaseLost, match="item 0-0 has ended"):
        lease.complete(then=[b"next"])
    assert queue.stats().produced == 1


def test_a_follow_up_for_an_unknown_queue_completes_nothing(queue: Queue) -> None:
    queue.produce(b"order")
    lease = queue.lease()[0]
    with pytest.raises(QueueNotFound, match="there is no queue 'mails'"):
        lease.complete(then=[NewItem(b"", queue="mails")])
    assert lease.state == "open"
    lease.complete()


def test_a_buried_item_arrives_in_the_dead_queue(broker: Broker) -> None:
    dead = broker.create_queue("orders.dead")
    queue = broker.create_queue("orders", dead_queue=dead, max_attempts=2)
    item_id = queue.produce({"order": 1}, key="k", headers={"h": "1"}, kind="invoice")
    queue.lease()[0].retry(reason="first")
    queue.lease()[0].retry(reason="second")
    (item,) = dead.lease(wait=WAIT).items
    assert (item.value, item.key, item.headers, item.kind) == ({"order": 1}, "k", {"h": "1"}, "invoice")
    origin = item.origin
    assert origin is not None
    assert (origin.queue, origin.id, origin.attempts, origin.reason) == ("orders", item_id, 2, "attempts spent: second")
    times = [origin.produced_at, origin.first_failed_at, origin.last_failed_at, origin.buried_at]
    assert None not in times and sorted(filter(None, times)) == times
    assert all(at.tzinfo is UTC for at in times if at is not None)
    assert queue.stats().depth == 0
    assert queue.explain(item_id).queue == "orders.dead"


@pytest.mark.parametrize("wait", ["ready", "leased"])
def test_an_item_beyond_its_ttl_arrives_in_the_dead_queue(wait: str) -> None:
    clock = MicrosecondClock()
    with penstock.open("memory://", clock=clock, threaded=False) as broker:
        dead = broker.create_queue("orders.dead")
        queue = broker.create_queue("orders", dead_queue=dead, lease_timeout=10, max_attempts=1, ttl=20)
        queue.produce(b"1")
        if wait == "leased":
            queue.lease()
        clock.advance(21 * SECOND)
        queue.stats()
        run_all_turns(broker)
        (item,) = dead.lease().items
        assert item.origin is not None
        assert (item.origin.reason, item.origin.attempts) == (("expired", 0) if wait == "ready" else ("attempts spent: lease expired", 1))


def test_a_dead_queue_in_use_cannot_be_deleted(broker: Broker) -> None:
    dead = broker.create_queue("orders.dead")
    queue = broker.create_queue("orders", dead_queue=dead)
    with pytest.raises(InvalidRequest, match=r"'orders\.dead' is the dead queue of 'orders'; give them another or none"):
        dead.delete()
    queue.update(dead_queue=None)
    dead.delete()


# -- redrive -----------------------------------------------------------------------------------------


def dead_letters(broker: Broker, *items: NewItem) -> tuple[Queue, Queue]:
    """A queue, and its dead queue with the items, all buried."""
    dead = broker.create_queue("orders.dead", partitions=2)
    queue = broker.create_queue("orders", dead_queue=dead)
    queue.produce_many(items)
    batch = queue.lease(100, per_key=100)
    for number, lease in enumerate(batch):
        lease.bury(f"reason {number}")
    got: list[Any] = []
    while len(got) < len(items):
        got += dead.lease(100, wait=WAIT, request_id=f"look {len(got)}")
    dead.retry(got, counted=False)
    return queue, dead


def arrived(queue: Queue, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        with queue.lease(100, wait=WAIT) as batch:
            found += [item.payload for item in batch.items]
    assert not queue.lease()
    return sorted(found)


def test_redrive_moves_dead_letters_back_to_their_queue(broker: Broker) -> None:
    queue, dead = dead_letters(broker, *[NewItem(b"%d" % n) for n in range(5)])
    preview = broker.redrive("orders.dead", to="orders", preview=True)
    assert preview.items == 5 and dead.stats().ready == 5
    done = broker.redrive(dead, to=queue)
    assert (done.items, done.ids, done.sample) == (preview.items, preview.ids, [])
    assert arrived(queue, 5) == [b"0", b"1", b"2", b"3", b"4"]
    assert broker.redrive(dead, to=queue).items == 0


WHERE: list[tuple[str, Any, list[bytes]]] = [
    ("kind", {"kind": "invoice"}, [b"0", b"2"]),
    ("no kind", {"kind": None}, [b"3"]),
    ("key", {"key": "a"}, [b"0"]),
    ("reference", {"reference": "r"}, [b"1"]),
    ("encoding", {"encoding": "text"}, [b"3"]),
    ("reason", {"reason": "reason 2"}, [b"2"]),
    ("origin", {"origin_queue": "orders"}, [b"0", b"1", b"2", b"3"]),
    ("header", {"headers.h": "1"}, [b"0"]),
    ("state", {"state": "ready"}, [b"0", b"1", b"2", b"3"]),
    ("another state", {"state": "scheduled"}, []),
    ("both", {"kind": "invoice", "key": None}, [b"2"]),
    ("function", lambda item: item.payload > b"1", [b"2", b"3"]),
    ("nothing", {"kind": "other"}, []),
]


@pytest.mark.parametrize(("where", "found"), [case[1:] for case in WHERE], ids=[case[0] for case in WHERE])
def test_redrive_moves_the_items_that_match_where(broker: Broker, where: Any, found: list[bytes]) -> None:
    queue, dead = dead_letters(
        broker,
        NewItem(b"0", kind="invoice", headers={"h": "1"}, key="a"),
        NewItem(b"1", kind="order", reference="r"),
        NewItem(b"2", kind="invoice", headers={"h": "2"}),
        NewItem("3"),
    )
    done = broker.redrive(dead, to=queue, where=where)
    assert (done.items, len(done.ids)) == (len(found), len(found))
    assert arrived(queue, len(found)) == found
    assert dead.stats().ready == 4 - len(found)


def test_redrive_moves_scheduled_items_and_keeps_a_time_that_they_were_given(broker: Broker) -> None:
    source, target, later = broker.create_queue("source"), broker.create_queue("target"), datetime.now(UTC) + timedelta(hours=1)
    source.produce_many([b"delayed", b"leased", NewItem(b"keyed", key="k"), NewItem(b"its next", key="k"), NewItem(b"later", at=later)])
    delayed, leased, keyed = source.lease(3)
    delayed.retry(600, "the mail server is down")
    keyed.retry(600)
    preview = broker.redrive(source, to=target, preview=True)
    states = [("scheduled", "delayed"), ("scheduled", "keyed"), ("ready", "its next"), ("scheduled", "later")]
    assert [(item.state, item.payload) for item in preview.sample] == states
    assert broker.redrive(source, to=target, where={"state": "scheduled"}, limit=1).ids == [delayed.id]
    assert broker.redrive(source, to=target).items == 3
    assert arrived(target, 3) == [b"delayed", b"its next", b"keyed"], "the delay of a retry ends with the move"
    assert [item.at for item in target.items("scheduled")] == [later]
    leased.complete()
    assert source.stats().depth == 0


def test_a_dead_letter_that_was_scheduled_is_ready_in_the_dead_queue() -> None:
    clock = MicrosecondClock()
    with penstock.open("memory://", clock=clock, threaded=False) as broker:
        dead = broker.create_queue("dead")
        queue = broker.create_queue("orders", dead_queue="dead")
        queue.produce(b"late", at=datetime(2027, 1, 1, tzinfo=UTC), ttl=60)
        clock.advance(61 * SECOND)
        queue.stats()
        run_all_turns(broker)
        assert (dead.stats().ready, dead.stats().scheduled) == (1, 0)


def test_a_preview_describes_what_would_be_moved(broker: Broker) -> None:
    before = datetime.now(UTC)
    queue, dead = dead_letters(broker, NewItem("ä" * 300, key="customer-42", kind="order"))
    (first,) = broker.redrive(dead, to=queue, preview=True).sample
    assert (first.state, first.key, first.kind, first.reason) == ("ready", "customer-42", "order", "reason 0")
    assert (first.attempts, first.origin_queue, first.size_bytes, first.payload) == (1, "orders", 600, "ä" * 200)
    assert first.buried_at is not None and before <= first.buried_at <= first.produced_at
    dead.produce(b"\xff" * 300)
    (other,) = broker.redrive(dead, to=queue, preview=True, where={"origin_queue": None}).sample
    assert (other.key, other.size_bytes, other.payload, other.buried_at) == (None, 300, "0x" + "ff" * 100, None)
    assert (dead.stats().ready, queue.stats().depth) == (2, 0)


def test_a_preview_of_many_items_counts_all_and_describes_some(broker: Broker) -> None:
    source, target = broker.create_queue("source"), broker.create_queue("target")
    fill(source, 1_200)
    preview = broker.redrive(source, to=target, preview=True)
    assert (preview.items, len(preview.ids), len(preview.sample)) == (1_200, 100, 100)
    assert preview.ids == [item.id for item in preview.sample]
    assert broker.redrive(source, to=target, preview=True, limit=3).items == 3
    (buried,) = source.lease()
    buried.bury("bad")
    (found,) = broker.redrive(source, to=source, preview=True).sample
    assert (found.state, found.reason, found.attempts) == ("buried", "bad", 1) and found.buried_at is not None


def test_redrive_moves_no_more_than_its_limit(broker: Broker) -> None:
    queue, dead = dead_letters(broker, *[NewItem(b"%d" % n) for n in range(5)])
    done = broker.redrive(dead, to=queue, limit=2)
    assert (done.items, len(done.ids)) == (2, 2)
    assert len(arrived(queue, 2)) == 2
    assert dead.stats().ready == 3


def test_redrive_in_place_makes_buried_items_ready(queue: Queue, broker: Broker) -> None:
    ids = fill(queue, 3)
    batch = queue.lease(3)
    batch[0].bury("a")
    batch[1].bury("b")
    batch[2].retry()
    assert broker.redrive("orders", to="orders", where={"reason": "b"}) == Redriven(1, [ids[1]])
    assert [item.id for item in queue.items("buried")] == [ids[0]]
    assert broker.redrive(queue, to=queue).ids == [ids[0]]
    assert queue.stats().ready == 3


# -- what is refused ---------------------------------------------------------------------------------

WRONG: list[tuple[str, Callable[[Broker, Queue], object], str]] = [
    ("id", lambda _, q: q.explain("7"), "'7' is not the id of an item; give one as produce returned it"),
    ("no such item", lambda _, q: q.explain("0-99"), "there is no item 0-99; the next one of partition 0 will be 0-"),
    ("no partition", lambda _, q: q.explain("9-0"), "queue 'orders' has no partition 9; the id is of another queue"),
    ("state", lambda _, q: q.items("done"), "there is no state 'done'; use scheduled, ready, leased, completed, buried, moving"),
    ("after", lambda _, q: q.items(after="x"), "'x' is not the id of an item; give one as produce returned it"),
    ("limit", lambda _, q: q.items(limit=10_001), "limit is 10001; give a whole number from 1 to 10000"),
    ("clear", lambda _, q: q.clear("x"), "there is no state 'x' to clear; use ready, scheduled, leased, buried or all"),  # type: ignore[arg-type]
    ("clear there", lambda _, q: q.clear(partition=5), "queue 'orders' has no partition 5; it has [0]"),
    ("pause nothing", lambda _, q: q.pause(False, False), "there is nothing to pause; leave lease or produce True"),
    ("resume nothing", lambda _, q: q.resume(False, False), "there is nothing to resume; leave lease or produce True"),
    ("pause what", lambda _, q: q.pause(lease="x"), "lease is str; give True or False"),  # type: ignore[arg-type]
    ("pause where", lambda _, q: q.pause(partition=-1), "partition is -1; give a whole number from 0 to"),
    ("seek", lambda _, q: q.seek(), "seek takes either an id or a time; give an id, or at="),
    ("seek both", lambda _, q: q.seek("0-0", at=datetime.now(UTC)), "seek takes either an id or a time; give an id, or at="),
    ("seek date", lambda _, q: q.seek(at=datetime(2026, 1, 1)), "at has no timezone; give one"),
    ("resize", lambda _, q: q.resize(1025), "partitions is 1025; give a whole number from 1 to 1024"),
    ("read-only", lambda _, q: q.set_read_only(5), "queue 'orders' has no partition 5; those that take items are [0]"),
    ("release", lambda _, q: q.release(1), "the key is int; give str or bytes"),  # type: ignore[arg-type]
    ("where", lambda b, q: b.redrive(q, to=q, where={"color": 1}), "items cannot be chosen by 'color'; use kind, key"),
    ("where type", lambda b, q: b.redrive(q, to=q, where="x"), "where is str; give a dict such as {'kind': 'invoice'}"),  # type: ignore[arg-type]
    ("redrive limit", lambda b, q: b.redrive(q, to=q, limit=0), "limit is 0; give a whole number from 1 to"),
    ("preview", lambda b, q: b.redrive(q, to=q, preview=1), "preview is int; give True or False"),  # type: ignore[arg-type]
    ("source", lambda b, q: b.redrive(1, to=q), "the queue is int; give its name, or a Queue"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "sentence"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_arguments_are_refused_and_nothing_is_changed(
    broker: Broker, queue: Queue, call: Callable[[Broker, Queue], object], sentence: str
) -> None:
    fill(queue, 1)
    with pytest.raises(InvalidRequest) as caught:
        call(broker, queue)
    assert str(caught.value).startswith(sentence)
    assert "; " in str(caught.value)
    assert (queue.stats().ready, queue.info().partitions) == (1, 1)
