"""Opening a broker, creating queues, and what survives a restart."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Broker, NewItem, Queue, Root
from penstock.errors import (
    BrokerClosed,
    BrokerLocked,
    InvalidRequest,
    LeaseLost,
    QueueExists,
    QueueNotFound,
    StorageFailed,
)
from tests.api.both_apis import BrokerOpener

# -- opening and closing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("postgresql://host/db", "postgresql://… cannot be opened; this version opens directories, http://, https:// and 'memory://'"),
        ("a\0b", "the path 'a\\x00b' has a null character, which no path can have; give another"),
        ("", "the target is empty; give the path of a directory ('.' is this one), or http://host:port"),
        (
            "memory:",
            "'memory:' looks like an address and is none; write http://host:port or 'memory://', or ./memory: for a directory of that name",
        ),
        (
            "http:/h",
            "'http:/h' looks like an address and is none; write http://host:port or 'memory://', or ./http:/h for a directory of that name",
        ),
        (
            "h:2319",
            "'h:2319' looks like an address and is none; write http://host:port or 'memory://', or ./h:2319 for a directory of that name",
        ),
        (None, "the target is NoneType; give the path of a directory, or an address as text"),
        (b"data", "the target is bytes; give the path of a directory, or an address as text"),
    ],
)
def test_a_wrong_target_is_refused_with_a_message(opener: BrokerOpener, target: Any, sentence: str) -> None:
    opener.target = target
    with pytest.raises(InvalidRequest) as caught:
        opener.open()
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"durability": "never"}, "durability is 'never'; use one of fsync, interval, os"),
        ({"min_free_bytes": -1}, "min_free_bytes is -1; give a whole number from 0 to"),
        ({"segment_bytes": 0}, "segment_bytes is 0; give a whole number from 1 to"),
        ({"compression": "zstd"}, "compression is str; give True or False"),
        ({"wait": "10s"}, "wait is str; give seconds or a timedelta"),
        ({"roots": "/disk2"}, "roots is a single path; give a list of them"),
    ],
)
def test_a_wrong_option_makes_no_directory(opener: BrokerOpener, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        opener.open(**options)
    assert str(caught.value).startswith(sentence)
    assert not Path(opener.target).exists()


def test_memory_has_no_roots(opener: BrokerOpener, tmp_path: Path) -> None:
    opener.target = "memory://"
    with pytest.raises(InvalidRequest, match="'memory://' has no storage roots; leave roots out"):
        opener.open(roots=[tmp_path])


def test_partitions_are_spread_over_the_roots(opener: BrokerOpener, tmp_path: Path) -> None:
    broker = opener.open(roots=[tmp_path / "b", Root(str(tmp_path / "c"))])
    broker.create_queue("orders", partitions=6).produce(b"1")
    places = [Path(opener.target), tmp_path / "b", tmp_path / "c"]
    assert all(list((root / "logs").glob("*/*")) for root in places)
    broker.close()
    assert opener.open(roots=places[1:]).queue("orders").stats().ready == 1


def test_partitions_of_a_root_that_is_left_out_fail_and_are_not_created_empty(opener: BrokerOpener, tmp_path: Path) -> None:
    ids = (
        opener.open(roots=[tmp_path / "b"])
        .create_queue("orders", partitions=6)
        .produce_many([NewItem(b"x", key=str(n)) for n in range(60)])
    )
    opener.close()
    orders = opener.open().queue("orders")
    missed = [one for one in orders.stats().partitions if one.status == "failing"]
    assert 0 < len(missed) < 6 and all("add the storage root that holds it" in one.error for one in missed)
    with pytest.raises(StorageFailed, match="is failing, so the cursor 'audit' was not moved"):
        orders.cursor("audit").seek({one.partition: 5 for one in missed})
    opener.close()
    orders = opener.open(roots=[tmp_path / "b"]).queue("orders")
    assert orders.stats().ready == len(ids) == 60


def test_a_directory_has_one_exclusive_owner(opener: BrokerOpener) -> None:
    first = opener.open()
    with pytest.raises(BrokerLocked):
        opener.open(exclusive=True)
    first.close()
    opener.open()


def test_every_call_of_a_closed_broker_raises_broker_closed(broker: Broker) -> None:
    queue = broker.create_queue("orders")
    queue.produce_many([b"1", b"2"])
    batch, cursor = queue.lease(), queue.cursor("c")
    assert (repr(broker), broker.closed) == ("Broker('memory://', open)", False)
    broker.close()
    broker.close()
    assert (repr(broker), broker.closed) == ("Broker('memory://', closed)", True)
    calls: list[Callable[[], object]] = [
        *(lambda: broker.create_queue("q"), lambda: broker.queue("orders"), broker.queues, broker.metrics),
        *(lambda: broker.delete_queue("orders"), lambda: broker.redrive("orders", to="orders"), queue.info, queue.stats),
        *(lambda: queue.produce(b"3"), lambda: queue.produce_many([b"3"]), queue.lease, lambda: queue.lease(wait=5), batch.complete),
        *(lambda: queue.explain("0-0"), queue.items, queue.pause, queue.clear, lambda: queue.update(ttl=5), lambda: queue.seek("0-0")),
        *(lambda: queue.resize(2), lambda: queue.set_read_only(0), lambda: queue.release("k"), queue.held_keys, queue.compact),
        *(lambda: queue.cursor("d"), queue.cursors, queue.delete, cursor.read, lambda: next(cursor), lambda: cursor.seek("oldest")),
    ]
    for call in calls:
        with pytest.raises(BrokerClosed, match=r"closed.*; open"):
            call()


def test_a_block_closes_its_broker(opener: BrokerOpener) -> None:
    with opener.open() as broker:
        broker.create_queue("orders")
    assert broker.closed
    with pytest.raises(BrokerClosed):
        broker.queues()


# -- queues ------------------------------------------------------------------------------------------


def test_info_returns_the_options_that_were_given(opener: BrokerOpener, manual_clock_broker: Broker) -> None:
    manual_clock_broker.create_queue("dead")
    given: dict[str, Any] = {
        "lease_timeout": 90.5,
        "max_attempts": 3,
        "ttl": 3600.0,
        "priority_aging": None,
        "dedup_window": 60.0,
        "on_bury": "park",
        "retention": {"max_age": 7200.0, "max_bytes": 1 << 20, "max_segments": 4, "min_segments": 2},
        "dead_queue": "dead",
        "max_items": 1000,
        "max_bytes": 1 << 30,
        "durability": "interval",
        "sync_interval": 0.05,
        "segment_bytes": 1 << 20,
        "segment_age": 3600.0,
        "compression": False,
        "compression_level": 9,
        "compression_min_bytes": 100,
    }
    info = manual_clock_broker.create_queue("orders", partitions=3, **given).info()
    assert {name: getattr(info, name) for name in given} == given
    assert (info.name, info.partitions, info.active, info.retired, info.read_only) == ("orders", 3, [0, 1, 2], [], [])
    assert info.created_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert manual_clock_broker.queue("orders").info() == info


def test_options_left_out_have_their_defaults(broker: Broker) -> None:
    info = broker.create_queue("orders").info()
    assert (info.partitions, info.lease_timeout, info.max_attempts, info.ttl) == (1, 60.0, 10, None)
    assert (info.dead_queue, info.max_items, info.max_bytes, info.durability) == (None, None, None, None)


def test_times_may_be_timedeltas_and_a_dead_queue_a_queue(broker: Broker) -> None:
    dead = broker.create_queue("dead")
    queue = broker.create_queue("orders", lease_timeout=timedelta(minutes=5), retention=timedelta(days=2), dead_queue=dead)
    info = queue.info()
    assert (info.lease_timeout, info.retention.get("max_age"), info.dead_queue) == (300.0, 172_800.0, "dead")


def test_an_update_changes_what_is_named_and_nothing_else(broker: Broker) -> None:
    dead = broker.create_queue("dead")
    queue = broker.create_queue("orders", ttl=60, max_attempts=3, dead_queue=dead, retention={"max_age": 60, "max_segments": 5})
    before = queue.info()
    after = queue.update(ttl=None, retention={"max_age": 120})
    assert (after.ttl, after.retention.get("max_age"), after.retention.get("max_segments")) == (None, 120.0, 5)
    assert (after.max_attempts, after.dead_queue, after.lease_timeout) == (before.max_attempts, "dead", before.lease_timeout)
    assert queue.update(dead_queue=None).dead_queue is None
    assert broker.queue("orders").info() == queue.info()


def test_exist_ok_returns_a_queue_with_the_same_options(broker: Broker) -> None:
    first = broker.create_queue("orders", partitions=4, ttl=60)
    first.produce(b"1")
    with pytest.raises(QueueExists, match="there is a queue 'orders' already; use it, pass exist_ok=True"):
        broker.create_queue("orders")
    assert broker.create_queue("orders", exist_ok=True).stats().ready == 1
    assert broker.create_queue("orders", exist_ok=True, partitions=4, ttl=60).stats().ready == 1
    with pytest.raises(QueueExists, match="'orders' with another ttl; leave ttl out"):
        broker.create_queue("orders", exist_ok=True, ttl=61)


def test_exist_ok_returns_a_queue_that_was_resized(broker: Broker) -> None:
    broker.create_queue("orders", partitions=4, exist_ok=True).resize(6)
    assert broker.create_queue("orders", partitions=4, exist_ok=True).info().partitions == 6


def test_ensure_queue_creates_a_queue_and_later_changes_its_options(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    first = broker.ensure_queue("orders", partitions=2, max_attempts=3, ttl=60)
    assert (first.info().partitions, first.info().max_attempts, first.info().ttl) == (2, 3, 60)
    first.produce(b"1")
    caplog.clear()
    again = broker.ensure_queue("orders", partitions=2, max_attempts=3)
    assert (again.info(), caplog.messages) == (first.info(), []), "nothing differs"
    changed = broker.ensure_queue("orders", max_attempts=5, retention={"max_segments": 4})
    assert (changed.info().max_attempts, changed.info().ttl, changed.stats().ready) == (5, 60, 1)
    assert caplog.messages == ["options of queue 'orders' were changed: max_attempts 3 → 5, retention.max_segments 0 → 4"]


def test_ensure_queue_resizes_only_if_it_is_told_to(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    broker.create_queue("orders", partitions=2)
    caplog.clear()
    assert broker.ensure_queue("orders", partitions=4).info().partitions == 2
    assert caplog.messages == ["queue 'orders' keeps its 2 partitions, and 4 were asked for; resize it to change that"]
    assert broker.ensure_queue("orders", partitions=4, resize=True, ttl=9).info().partitions == 4
    assert broker.queue("orders").info().ttl == 9
    assert broker.ensure_queue("orders", partitions=1, resize=True).info().partitions == 1


def test_ensure_queue_changes_nothing_if_an_option_cannot_be_changed(broker: Broker) -> None:
    before = broker.create_queue("orders", durability="os").info()
    with pytest.raises(InvalidRequest, match="the durability of queue 'orders' cannot be changed"):
        broker.ensure_queue("orders", partitions=3, resize=True, max_attempts=7, durability="fsync")
    with pytest.raises(QueueNotFound, match="there is no queue 'nowhere' to be the dead queue"):
        broker.ensure_queue("orders", partitions=3, resize=True, dead_queue="nowhere")
    with pytest.raises(InvalidRequest, match="partitions is not given"):
        broker.ensure_queue("orders", resize=True)
    with pytest.raises(QueueNotFound, match="there is no queue 'nowhere' to be the dead queue"):
        broker.ensure_queue("mail", dead_queue="nowhere")
    assert broker.queue("orders").info() == before
    assert [queue.name for queue in broker.queues()] == ["orders"]
    assert broker.ensure_queue("orders", durability="os").info() == before


def test_threads_that_ensure_a_queue_at_the_same_time_agree() -> None:
    with penstock.open("memory://") as broker:

        def ensure(number: int) -> tuple[str, int, int]:
            info = broker.ensure_queue("orders", partitions=4, resize=True, max_attempts=5).info()
            return info.incarnation, info.partitions, info.max_attempts

        broker.create_queue("orders")
        for _ in range(2):
            with ThreadPoolExecutor(8) as pool:
                assert len({*pool.map(ensure, range(16))}) == 1
            broker.delete_queue("orders")
        assert ensure(0)[1:] == (4, 5)


def test_queues_are_listed_by_name_in_pages(broker: Broker) -> None:
    for name in ("b.2", "a.1", "b.1", "c", "b.3"):
        broker.create_queue(name)
    assert [info.name for info in broker.queues()] == ["a.1", "b.1", "b.2", "b.3", "c"]
    assert [info.name for info in broker.queues("b.", limit=2)] == ["b.1", "b.2"]
    assert [info.name for info in broker.queues("b.", after="b.2")] == ["b.3"]


def test_an_unknown_queue_is_not_found(broker: Broker) -> None:
    for call in (broker.queue, broker.delete_queue):
        with pytest.raises(QueueNotFound, match="there is no queue 'orders'; create it, or fix the name"):
            call("orders")


def test_a_queue_created_again_has_nothing_of_the_deleted_one(broker: Broker) -> None:
    old = broker.create_queue("orders")
    old.produce(b"1")
    lease = old.lease()[0]
    broker.delete_queue("orders")
    new = broker.create_queue("orders")
    new.produce(b"2")
    new.lease()
    with pytest.raises(LeaseLost) as caught:
        new.complete([lease.token])
    assert vars(caught.value)["lost"] == ["0-0"]
    with pytest.raises(LeaseLost, match="item 0-0 has ended"):
        lease.complete()
    for call in (old.stats, old.info, old.delete, lambda: old.produce(b"3"), old.lease):
        with pytest.raises(QueueNotFound):
            call()
    assert new.stats().leased == 1


def test_metrics_count_requests_and_items(broker: Broker) -> None:
    queue = broker.create_queue("orders")
    queue.produce_many([b"1", b"2"])
    queue.lease(2).complete()
    found = broker.metrics().queues["orders"]
    assert (found.items["produced"], found.items["leased"], found.items["completed"]) == (2, 2, 2)
    assert found.latencies["produce"].count == 1


WRONG: list[tuple[str, Callable[[Broker], object], str]] = [
    ("name", lambda b: b.create_queue("../x"), "'../x' is no name for a queue; use 1 to 200 letters"),
    ("no name", lambda b: b.create_queue(7), "7 is no name for a queue; use 1 to 200 letters"),  # type: ignore[arg-type]
    ("find", lambda b: b.queue("a/b"), "'a/b' is no name for a queue; use"),
    ("find type", lambda b: b.queue(None), "the queue is NoneType; give its name, or a Queue"),  # type: ignore[arg-type]
    ("partitions", lambda b: b.create_queue("q", partitions=0), "partitions is 0; give a whole number from 1 to 1024"),
    ("update partitions", lambda b: b.queue("there").update(partitions=2), "partitions is not changed by update; use resize"),  # type: ignore[call-arg]
    ("option", lambda b: b.create_queue("q", color=1), "there is no option 'color'; the options are lease_timeout"),  # type: ignore[call-arg]
    ("lease", lambda b: b.create_queue("q", lease_timeout=0), "lease_timeout is 0; give 1 to 43200 seconds"),
    ("attempts", lambda b: b.create_queue("q", max_attempts=-1), "max_attempts is -1; give a whole number from 0 to 65535"),
    ("ttl", lambda b: b.create_queue("q", ttl="1h"), "ttl is str; give seconds or a timedelta"),  # type: ignore[arg-type]
    ("window", lambda b: b.create_queue("q", dedup_window=0), "dedup_window is 0; give more, or leave it out"),
    ("bury", lambda b: b.create_queue("q", on_bury="x"), "on_bury is 'x'; use 'release' or 'park'"),  # type: ignore[arg-type]
    ("keep", lambda b: b.create_queue("q", retention={"age": 1}), "retention has no 'age'; give any of max_age"),  # type: ignore[arg-type]
    ("keep type", lambda b: b.create_queue("q", retention="1d"), "retention is str; give seconds or a timedelta"),  # type: ignore[arg-type]
    ("items", lambda b: b.create_queue("q", max_items=-1), "max_items is -1; give a whole number from 0 to"),
    ("durability", lambda b: b.create_queue("q", durability="x"), "durability is 'x'; use 'fsync'"),  # type: ignore[arg-type]
    ("sync", lambda b: b.create_queue("q", sync_interval=0), "sync_interval is 0; give 0.001 to 3600 seconds"),
    (
        "sync mode",
        lambda b: b.create_queue("q", durability="os", sync_interval=1),
        "sync_interval has no effect with durability 'os'; leave",
    ),
    ("segment", lambda b: b.create_queue("q", segment_bytes=100), "segment_bytes is 100; give a whole number from 4096 to"),
    ("age", lambda b: b.create_queue("q", segment_age=0.5), "segment_age is 0.5; give 1 to 31536000 seconds"),
    ("compress", lambda b: b.create_queue("q", compression="on"), "compression is str; give True or False"),  # type: ignore[arg-type]
    ("level", lambda b: b.create_queue("q", compression_level=20), "compression_level is 20; give a whole number from 1 to 19"),
    ("least", lambda b: b.create_queue("q", compression_min_bytes=0), "compression_min_bytes is 0; give a whole number from 1 to"),
    ("itself", lambda b: b.create_queue("q", dead_queue="q"), "queue 'q' cannot be its own dead queue; give another one"),
    ("dead", lambda b: b.create_queue("q", dead_queue=1), "the queue is int; give its name, or a Queue"),  # type: ignore[arg-type]
    ("resize", lambda b: b.ensure_queue("q", resize=1), "resize is int; give True or False"),  # type: ignore[arg-type]
    ("ensured partitions", lambda b: b.ensure_queue("q", partitions=0), "partitions is 0"),
    ("exist_ok", lambda b: b.create_queue("q", exist_ok=1), "exist_ok is int; give True or False"),  # type: ignore[arg-type]
    ("limit", lambda b: b.queues(limit=0), "limit is 0; give a whole number from 1 to 10000"),
    ("prefix", lambda b: b.queues(prefix=None), "prefix is NoneType; give a text"),  # type: ignore[arg-type]
    ("timeout", lambda b: b.delete_queue("there", timeout=-1), "timeout is -1; give 0 to 900 seconds"),
    ("changed", lambda b: b.queue("there").update(durability="os"), "the durability of queue 'there' cannot be changed; create"),
    ("update", lambda b: b.queue("there").update(lease_timeout=1e9), "lease_timeout is 1000000000.0; give 1 to 43200 seconds"),
]


@pytest.mark.parametrize(("call", "sentence"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_wrong_arguments_are_refused_and_nothing_is_changed(broker: Broker, call: Callable[[Broker], object], sentence: str) -> None:
    broker.create_queue("there")
    before = broker.queues()
    with pytest.raises(InvalidRequest) as caught:
        call(broker)
    assert str(caught.value).startswith(sentence)
    assert "; " in str(caught.value)
    assert broker.queues() == before


# -- what lasts --------------------------------------------------------------------------------------


def test_items_leases_and_tokens_survive_a_restart(opener: BrokerOpener) -> None:
    broker = opener.open()
    queue = broker.create_queue("orders", partitions=2, lease_timeout=600)
    queue.produce_many([NewItem(b"%d" % n, key=str(n)) for n in range(6)])
    tokens = [lease.token for lease in queue.lease(4)]
    broker.close()
    queue = opener.open().queue("orders")
    assert (queue.stats().leased, queue.stats().ready) == (4, 2)
    queue.extend(tokens[0], timeout=600)
    queue.complete(tokens[0])
    queue.complete(tokens[0])
    queue.retry([tokens[1]], reason="restarted")
    queue.bury(tokens[2:], reason="no")
    assert (queue.stats().ready, queue.stats().completed, queue.stats().buried) == (3, 1, 2)
    with pytest.raises(LeaseLost) as caught:
        queue.complete(tokens)
    assert len(vars(caught.value)["lost"]) == 3


def test_a_repeated_settling_gives_the_same_answer_after_a_restart(opener: BrokerOpener) -> None:
    broker = opener.open()
    queue = broker.create_queue("orders")
    queue.produce(b"1")
    token = queue.lease()[0].token
    queue.retry(token, request_id="once")
    broker.close()
    queue = opener.open().queue("orders")
    queue.retry(token, request_id="once")
    assert queue.lease()[0].attempts == 2
    with pytest.raises(LeaseLost):
        queue.retry(token, request_id="twice")


def test_a_queue_can_be_opened_with_a_path(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data", durability="os") as broker:
        queue: Queue = broker.create_queue("orders")
        queue.produce("kia ora")
    with penstock.open(str(tmp_path / "data")) as broker:
        assert broker.queue("orders").lease()[0].item.value == "kia ora"
