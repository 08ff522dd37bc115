"""What a queue tells of itself: exact counts, warnings, held keys, and of every item why it is not running."""

import random
from collections import Counter
from typing import Any

import pytest

from penstock.broker.queries import HOT_KEY_ITEMS
from penstock.loop.requests import SettleRequest
from penstock.operations import ListHeldKeys, ListItems, RedriveItems
from penstock.reports import HeldKey, ListedItemData
from penstock.testing import SimulatedFiles
from penstock.words.errors import InvalidRequest
from tests.broker.broker_under_test import STATES, BrokerUnderTest, QueueUnderTest, key_that_moves, keys_at
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage

# -- counts -------------------------------------------------------------------------------------------------


def listed(queue: QueueUnderTest, states: list[Any], page: int = 7) -> list[ListedItemData]:
    """Every item in these states, page by page."""
    found: list[ListedItemData] = []
    while more := queue.call(ListItems(states=states, after=_last(found), limit=page)):
        assert len(more) <= page
        found += more
    return found


def _last(found: list[ListedItemData]) -> tuple[int, int] | None:
    return (found[-1].partition, found[-1].offset) if found else None


def test_counts_are_exact_whatever_happens(broker: BrokerUnderTest) -> None:
    """After every step the totals are those of the items, listed one by one."""
    rng = random.Random(4)
    dead = broker.create("dead")
    tested_queue = broker.create(partitions=3, max_attempts=3, dead_queue="", ttl=400_000_000)
    held = []
    for step in range(120):
        what = rng.random()
        if what < 0.35:
            keys = [rng.choice((None, "a", "b", "c")) for _ in range(rng.randint(1, 6))]
            at = broker.after(rng.choice((50, 90))) if rng.random() < 0.3 else 0
            tested_queue.produce(*[f"{step}.{index}" for index in range(len(keys))], keys=keys, at=at)
        elif what < 0.6:
            held.append(tested_queue.lease(rng.randint(1, 5), consumer=rng.choice(("x", "y"))))
        elif what < 0.85 and held:
            one = held.pop(rng.randrange(len(held)))
            tested_queue.settle(rng.choice(("complete", "retry", "bury", "extend")), one.parts, delay=0)
        elif what < 0.95:
            broker.advance_in_steps(rng.choice((1, 30)))
        elif what < 0.97:
            tested_queue.resize(rng.randint(1, 5))
        else:
            tested_queue.update(dead_queue=rng.choice(("", "dead")))
            broker.turn()
        for queue in (tested_queue, dead):
            counted = Counter(one.state for one in listed(queue, []))
            assert queue.counts() == dict(counted)
            stats = queue.stats()
            assert stats.depth == sum(counted[state] for state in ("ready", "scheduled", "leased", "moving"))
            assert stats.produced >= sum(counted.values()), "what was moved is counted where it is"
            assert sum(stats.consumers.values()) == counted["leased"]
            for state in STATES:
                assert len(listed(queue, [state], 3)) == counted[state]
    assert set(tested_queue.counts()) >= {"ready", "completed"}


def test_items_are_listed_with_their_state_attempts_and_reason(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    for number in range(2):
        queue.produce(f"{number}a", f"{number}b", f"{number}c", key=keys_at(queue, number)[0])
    queue.lease(1).retry(reason="no luck", delay=10)
    queue.lease(1).bury(reason="bad")
    found = [(one.partition, one.offset, one.state, one.attempts, one.reason) for one in listed(queue, [])]
    assert found == [
        (0, 0, "scheduled", 1, "no luck"),
        (0, 1, "ready", 0, ""),
        (0, 2, "ready", 0, ""),
        (1, 0, "buried", 1, "bad"),
        (1, 1, "ready", 0, ""),
        (1, 2, "ready", 0, ""),
    ]
    assert [one.batch.payloads[one.index].decode() for one in listed(queue, ["buried", "scheduled"])] == ["0a", "1a"]


def test_stats_show_ages_sizes_and_waiting_callers(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce("old")
    broker.advance_in_steps(5)
    queue.produce("new")
    ages = [one.oldest_ready_seconds for one in queue.stats().partitions]
    assert sorted(ages) == [0.0, 5.0]
    queue.lease(1, consumer="a")
    queue.lease(1, consumer="b")
    for _ in range(3):
        queue.submit_lease()
    stats = queue.stats()
    assert stats.waiting_consumers == 3 and stats.consumers == {"a": 1, "b": 1}
    assert all(one.size_bytes > 0 for one in stats.partitions)


def test_items_of_a_closed_partition_grow_older(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce("a")
    broker.advance_in_steps(600)
    (handle,) = queue.loop.engine.handles.values()
    assert handle.closed
    assert [one.oldest_ready_seconds for one in queue.stats().partitions] == [600.0]
    assert handle.closed, "the statistics did not open it"
    queue.pause(lease=True)
    broker.advance_in_steps(600)
    assert handle.closed
    assert [one.oldest_ready_seconds for one in queue.stats().partitions] == [0.0], "no item can be leased"


def test_warnings_say_what_to_do(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    assert queue.stats().warnings == []
    queue.produce("a")
    assert queue.stats().warnings == ["1 item is ready and no consumer is there; start one"]
    queue.submit_lease()
    assert queue.stats().warnings == []
    queue.pause(lease=True)
    queue.produce("b")
    assert [warning for warning in queue.stats().warnings if "paused" in warning] == [
        "leasing from partition 0 is paused while 1 item is ready; resume it"
    ]


def test_damage_is_reported() -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create()
    for number in range(5):
        queue.produce(f"item-{number}")
    path = next(path for path in files.contents() if f"{queue.incarnation:016x}" in path and path.endswith(".log"))
    files.flip_bit(path, 8 * files.content(path).index(b"item-2"))
    broker.kill()
    assert any("damage" in warning and "run verify, then repair" in warning for warning in queue.stats().warnings)
    assert queue.drain() == ["item-0", "item-1", "item-3", "item-4"]
    assert queue.explain("0-2").why == "lost: damage took its bytes"
    broker.embedded.close()


# -- why ----------------------------------------------------------------------------------------------------


def test_why_an_item_is_not_running(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=1, on_bury="park")
    later = queue.produce("later", at=broker.after(60))[0]
    found = queue.explain(later)
    assert (found.state, found.why, found.ready_in_seconds) == ("scheduled", "scheduled, ready in 1m", 60.0)
    first, second = queue.produce("k1", "k2", key="k")
    held = queue.lease(1, consumer="worker-1", timeout=30)
    found = queue.explain(first)
    assert (found.state, found.why, found.consumer, found.attempts) == ("leased", "leased by worker-1 for another 30s", "worker-1", 1)
    found = queue.explain(second)
    assert (found.state, found.held_by) == ("ready", first)
    assert found.why == "its key is held: item 0-1 is leased by worker-1" and found.ready_in_seconds == 30.0
    held.retry(delay=20, reason="no luck")
    found = queue.explain(first)
    assert found.why == "backing off after attempt 1 (no luck), ready in 20s" and found.reason == "no luck"
    assert queue.explain(second).why == "its key is held: item 0-1 backs off" and queue.explain(second).held_by == first
    broker.advance_in_steps(20)
    assert queue.explain(first).why == "ready: first of its key, the next lease that reaches it gets it"
    assert queue.explain(second).why == "ready, behind item 0-1 of the same key"
    queue.lease(1).bury(reason="bad")
    found = queue.explain(first)
    assert (found.state, found.why, found.attempts, found.reason) == ("buried", "buried because: bad", 2, "bad")
    assert queue.explain(second).why == "its key is parked: item 0-1 was buried; redrive or clear it"
    plain = queue.produce("plain")[0]
    assert queue.explain(plain).why == "ready: the next lease that reaches it gets it"
    queue.pause(lease=True)
    assert queue.explain(plain).why == "ready, but leasing is paused; resume it"
    queue.pause(lease=False)
    queue.lease().complete()
    assert queue.explain(plain).why == "completed"
    for wrong in ("0-99", "7-0"):
        with pytest.raises(InvalidRequest, match="; "):
            queue.explain(wrong)


def test_why_an_item_waits_for_a_resize(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    key = key_that_moves(1, 2)
    queue.produce("a", "b", key=key)
    queue.resize(2)
    (fenced,) = queue.produce("c", key=key)
    sentence = "fenced by a resize: partition 0 still holds earlier items of its key or slot"
    assert fenced.startswith("1-") and queue.explain(fenced).why == sentence
    held = queue.lease()
    assert held.texts == ["a"]
    broker.turn()
    assert queue.explain(fenced).why == sentence, "by its key, now that the backlog is known"
    held.complete()
    assert queue.drain(1) == ["b", "c"]


def test_why_an_item_of_a_failing_partition_is_not_running() -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create()
    key = key_that_moves(1, 2)
    (old,) = queue.produce("old", key=key)
    queue.resize(2)
    (new,) = queue.produce("new", key=key)
    files.break_partition(0)
    queue.lease()  # its record cannot be written
    found = queue.explain(old)
    assert found.state == "unknown" and found.why.startswith("its partition is failing: ")
    assert "fenced by a resize: partition 0" in queue.explain(new).why and ", which is failing: " in queue.explain(new).why
    files.failing_paths.clear()
    broker.advance_in_steps(7)
    assert queue.drain(1) == ["old", "new"]
    broker.embedded.close()


def test_an_item_that_was_moved_answers_to_its_old_id(broker: BrokerUnderTest) -> None:
    dead = broker.create("dead")
    queue = broker.create(dead_queue="dead")
    (item,) = queue.produce("letter")
    queue.produce("other")
    queue.lease(1).bury(reason="bad")
    found = queue.explain(item)
    assert (found.id, found.queue, found.state) == ("0-0", "dead", "ready")
    assert dead.call(RedriveItems(items={0: [0]}, to=queue.incarnation)) == 1
    broker.turn()
    found = queue.explain(item)
    assert (found.queue, found.state, found.id) == ("q", "ready", "0-2"), "and back: through both moves"
    queue.update(dead_queue="")
    broker.delete("dead")
    assert queue.explain(item).why == "moved to a queue that was deleted"


def test_an_item_on_its_way_says_so(broker: BrokerUnderTest) -> None:
    dead = broker.create("dead")
    queue = broker.create(dead_queue="dead")
    (item,) = queue.produce("letter")
    held = queue.lease()
    paused = dead.loop.turn
    dead.loop.turn = lambda: False  # type: ignore[method-assign]  # nobody runs the other queue for a while
    asked = queue.submit(SettleRequest("bury", held.parts, reason="bad"))
    queue.loop.turn()
    assert asked.done
    found = queue.explain(item)
    assert (found.state, found.reason) == ("moving", "bad")
    assert found.why == "on its way to partition 0 of its destination, buried because: bad"
    assert queue.counts() == {"moving": 1} and queue.stats().transfers == 1
    dead.loop.turn = paused  # type: ignore[method-assign]
    broker.turn()
    assert queue.counts() == {} and queue.explain(item).queue == "dead"


# -- keys ---------------------------------------------------------------------------------------------------


def test_held_keys_are_visible(broker: BrokerUnderTest) -> None:
    queue = broker.create(on_bury="park")
    for key in ("leased", "backing", "parked", "free"):
        queue.produce(f"{key}-1", f"{key}-2", f"{key}-3", key=key)
    held = queue.lease()
    assert held.texts == ["leased-1", "backing-1", "parked-1", "free-1"]
    by_key = dict(zip(held.keys, held.ids, strict=True))
    queue.settle("retry", [held.part(by_key["backing"])], delay=60)
    queue.settle("bury", [held.part(by_key["parked"])])
    queue.settle("complete", [held.part(by_key["free"])])
    found = queue.call(ListHeldKeys(limit=10))
    assert sorted(found, key=lambda one: one.key) == [
        HeldKey(b"backing", 0, "backing off", by_key["backing"], 2),
        HeldKey(b"free", 0, "waiting", "0-10", 2),
        HeldKey(b"leased", 0, "leased", by_key["leased"], 2),
        HeldKey(b"parked", 0, "parked", by_key["parked"], 2),
    ]
    assert len(queue.call(ListHeldKeys(limit=2))) == 2
    assert queue.stats().partitions[0].busy_keys == 4
    queue.produce("hot", key="parked")
    queue.lease()  # it looks, and passes the item of the held key over
    assert [(one.key, one.waiting) for one in queue.call(ListHeldKeys(limit=1))] == [(b"parked", 3)], "the hottest key comes first"


def test_a_hot_key_is_a_warning(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce(*[f"{number}" for number in range(HOT_KEY_ITEMS)], key="hot")
    queue.produce("cold", key="cold")
    queue.lease(2, consumer="me")
    queue.lease(consumer="me")  # it looks, and passes the items of the held key over
    assert queue.stats().warnings == []
    queue.produce("one more", key="hot")
    queue.lease(consumer="me")
    (first,) = {one.partition for one in queue.call(ListHeldKeys(limit=10)) if one.waiting}
    assert queue.stats().warnings == [
        f"1000 items of one key wait for each other (the first is {first}-1): they are handled one at a time; see the held keys"
    ]


def test_a_dead_queue_needs_no_consumer(broker: BrokerUnderTest) -> None:
    dead = broker.create("dead")
    queue = broker.create("q", dead_queue="dead")
    queue.produce("a")
    queue.lease().bury(reason="bad")
    assert dead.stats().warnings == ["1 dead letter waits here; list them, then redrive or clear them"]
    broker.restart()
    assert dead.stats().warnings == ["1 dead letter waits here; list them, then redrive or clear them"]
    broker.delete("q")
    assert dead.stats().warnings == ["1 item is ready and no consumer is there; start one"]


def test_fenced_keys_are_visible(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    key = key_that_moves(1, 2)
    queue.produce("a", key=key)
    queue.lease()
    queue.resize(2)
    queue.produce("b", key=key)
    queue.lease()  # it looks, and finds it fenced
    found = {(one.partition, one.why) for one in queue.call(ListHeldKeys(limit=10))}
    assert found == {(0, "leased"), (1, "fenced")}
