"""Calls of a client's session that are repeated after a lost answer: nothing is done twice, the answer is the same."""

from collections.abc import Callable
from functools import cache

import pytest

from penstock.loop.requests import LeaseRequest, LeaseResult, ProduceRequest, SettlePart, StoredPart
from penstock.operations import LeaseItems, ProduceItems, SettleItems
from penstock.rules import calls
from penstock.rules.commands import Call, Settled
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch
from penstock.words.clock import MINUTE, SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, PenstockError, QueueFull, StorageFailed
from tests.broker.broker_under_test import BrokerUnderTest, LeasedItems, QueueUnderTest, batch_of, ids_of, keys_at, refusal
from tests.broker.crashes import crash_at_each_call, disk_after
from tests.broker.storages import partly_failing_disk

KEYS = [f"key-{number}" for number in range(8)]
BAD = 2
SESSION = bytes(range(16))
FIRST = Call(SESSION, 7)
AGAIN = Call(SESSION, 7, again=True, age=1 * SECOND)


def produce(queue: QueueUnderTest, batch: Batch, call: Call, request: bytes | None = None) -> list[str]:
    """Produce in a call; gives the ids."""
    parts: list[StoredPart] = queue.call(ProduceItems(batch=batch, call=call, request=request))
    return ids_of(parts, len(batch))


def lease(queue: QueueUnderTest, count: int, call: Call, wait: int = 0) -> LeasedItems:
    return LeasedItems(queue, queue.call(LeaseItems(count=count, call=call, wait=wait)))


def settle(queue: QueueUnderTest, parts: list[SettlePart], call: Call, **options: object) -> list[object]:
    return list(queue.call(SettleItems(parts=parts, call=call, **({"action": "complete"} | options))))  # type: ignore[arg-type]


# -- produce -------------------------------------------------------------------------------------------


BATCHES = {
    "keyed": lambda: batch_of(*"abcdefgh", keys=KEYS),
    "not keyed": lambda: batch_of(*"abcdefgh"),
    "some keyed": lambda: batch_of(*"abcdefgh", keys=[None, *KEYS[1:7], None]),
}
BETWEEN: dict[str, Callable[[QueueUnderTest], object]] = {
    "nothing": lambda queue: None,
    "restart": lambda queue: queue.owner.restart(),
    "kill": lambda queue: queue.owner.kill(),
    "more partitions": lambda queue: queue.resize(5),
    "fewer partitions": lambda queue: queue.resize(1),
    "resized twice": lambda queue: (queue.resize(6), queue.owner.turn(), queue.resize(2)),
    "retired and closed": lambda queue: retire_and_close(queue),
    "retired and restarted": lambda queue: retire_and_close(queue, restart=True),
    "others in between": lambda queue: [queue.produce(f"other {number}") for number in range(5)],
}


def retire_and_close(queue: QueueUnderTest, *, restart: bool = False) -> None:
    queue.resize(1)
    queue.drain()
    queue.owner.advance_in_steps(70)
    if restart:
        queue.owner.restart()


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_repeated_produce_adds_nothing(file_broker: BrokerUnderTest, kind: str, between: str) -> None:
    queue = file_broker.create(partitions=3)
    first = produce(queue, BATCHES[kind](), FIRST)
    BETWEEN[between](queue)
    before = sum(queue.counts().values())
    assert produce(queue, BATCHES[kind](), AGAIN) == first
    assert sum(queue.counts().values()) == before


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_repeated_request_id_adds_nothing(file_broker: BrokerUnderTest, kind: str, between: str) -> None:
    queue = file_broker.create(partitions=3)
    first = ids_of(queue.produce_batch(BATCHES[kind](), "r"), 8)
    BETWEEN[between](queue)
    before = sum(queue.counts().values())
    assert ids_of(queue.produce_batch(BATCHES[kind](), "r"), 8) == first
    assert sum(queue.counts().values()) == before


def test_items_without_a_key_go_where_load_says_with_a_call_and_with_a_request_id(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=4)
    for number in range(4):
        produce(queue, batch_of("x"), Call(SESSION, number))
        queue.produce("x", request=f"r{number}")
    assert [one.ready for one in queue.stats().partitions] == [2, 2, 2, 2]


def test_a_call_that_was_never_done_is_done_by_its_repetition(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    produce(queue, batch_of("a"), Call(SESSION, 6))
    produce(queue, batch_of("b"), AGAIN)
    assert sorted(queue.drain()) == ["a", "b"]


def test_the_newest_call_of_a_session_replaces_the_one_before_which_is_then_refused(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    produce(queue, batch_of("a"), Call(SESSION, 1))
    produce(queue, batch_of("b"), Call(SESSION, 2))
    for repeated in (False, True):
        (part,) = queue.call(ProduceItems(batch=batch_of("a"), call=Call(SESSION, 1))) if not repeated else [None]
        if part is not None:
            assert isinstance(refusal(part), OutcomeUnknown)
        else:
            with pytest.raises(OutcomeUnknown, match="call 1 of this session came after its call 2"):
                produce(queue, batch_of("a"), Call(SESSION, 1, again=True, age=5))
    assert queue.drain() == ["a", "b"]


def test_a_repetition_that_is_too_old_or_from_before_an_eviction_does_nothing(
    broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_SESSIONS", 3)
    queue = broker.create()
    with pytest.raises(OutcomeUnknown, match="first sent 900 s ago"):
        produce(queue, batch_of("a"), Call(SESSION, 7, again=True, age=15 * MINUTE))
    for number in range(5):
        produce(queue, batch_of("x"), Call(b"%016d" % number, 1))
        broker.advance(2)
    with pytest.raises(OutcomeUnknown, match="repeated too late"):
        produce(queue, batch_of("x"), Call(b"%016d" % 1, 1, again=True, age=8 * SECOND))
    broker.embedded.close()
    broker.embedded = broker._open()
    queue = broker.find()
    with pytest.raises(OutcomeUnknown, match="repeated too late"):
        produce(queue, batch_of("x"), Call(b"%016d" % 1, 1, again=True, age=8 * SECOND))
    produce(queue, batch_of("new"), Call(b"%016d" % 9, 1, again=True, age=2 * SECOND))
    produce(queue, batch_of("x"), Call(b"%016d" % 4, 1, again=True, age=2 * SECOND))
    assert sorted(queue.drain()) == ["new", *["x"] * 5]


def test_a_produce_of_duplicates_only_is_remembered(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2, dedup_window=60 * SECOND)
    batch = batch_of("a", "b", dedups=["one", "two"])
    first = queue.produce("a", "b", dedups=["one", "two"])
    assert produce(queue, batch, FIRST) == first
    file_broker.kill()
    file_broker.advance(100)
    assert produce(queue, batch, AGAIN) == first
    assert queue.drain() == ["a", "b"]


def test_a_produce_that_waits_for_room_is_ended_by_its_repetition(broker: BrokerUnderTest) -> None:
    queue = broker.create(max_items=1)
    queue.produce("full")
    original = queue.submit(ProduceRequest(batch_of("a"), deadline=broker.deadline(60), call=FIRST))
    broker.turn()
    again = queue.submit(ProduceRequest(batch_of("a"), deadline=broker.deadline(60), call=AGAIN))
    broker.turn()
    with pytest.raises(OutcomeUnknown, match="its repetition gives the answer"):
        _ = original.result
    assert queue.drain() == ["full", "a"] and again.done


def test_a_full_queue_answers_the_repetition_of_what_is_stored(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2, max_items=1)
    first = produce(queue, batch_of("a"), FIRST)
    assert produce(queue, batch_of("a"), AGAIN) == first


def test_a_repetition_that_cannot_add_the_rest_says_which_items_are_stored(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    batch = batch_of("a", "b", keys=[keys_at(queue, number)[0] for number in (0, BAD)])
    partly_failing_disk(patchy.storage).break_partition(BAD)
    stored, unknown = queue.call(ProduceItems(batch=batch, call=FIRST))
    assert isinstance(refusal(unknown), OutcomeUnknown)
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    queue.update(max_items=1)
    answer = queue.submit(ProduceRequest(batch, deadline=patchy.deadline(5), call=AGAIN))
    patchy.advance_in_steps(6)
    again, full = answer.result
    assert (again.partition, list(again.stored.offsets)) == (stored.partition, [0])
    assert (full.indexes, type(refusal(full))) == ([1], QueueFull)


# -- request ids ---------------------------------------------------------------------------------------


def test_a_request_id_for_another_content_is_refused(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    queue.produce("a", "b", request="r")
    for batch in (batch_of("a"), batch_of("a", "c"), batch_of("a", "b", key="k"), batch_of("a", "b", priority=3)):
        with pytest.raises(InvalidRequest, match="used before, for another request"):
            queue.produce_batch(batch, "r")
    queue.produce("a", "b", request="r", at=broker.after(50), ttl=9)
    held = queue.lease(1, request=b"r")
    with pytest.raises(InvalidRequest, match="used before, for another request"):
        queue.lease(2, request=b"r")
    queue.settle("retry", held.parts, reason="x", request=b"r")
    (refused,) = queue.settle("retry", held.parts, reason="y", request=b"r")
    assert isinstance(refusal(refused), InvalidRequest)
    first = queue.settle("retry", held.parts, reason="x", request=b"r")
    assert queue.settle("retry", held.parts, reason="x", delay=4, request=b"r") == first
    assert sum(queue.counts().values()) == 2


def test_a_call_with_a_request_id_is_found_by_both(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    first = produce(queue, batch_of("a"), FIRST, b"r")
    assert produce(queue, batch_of("a"), Call(SESSION, 8), b"r") == first, "by its request id, in a new call"
    broker.advance(14 * 60)
    assert produce(queue, batch_of("a"), Call(SESSION, 9), b"r") == first
    broker.advance(2 * 60)
    assert produce(queue, batch_of("a"), Call(SESSION, 9, again=True, age=2 * MINUTE), b"r") == first, "the request id is forgotten"
    assert queue.drain() == ["a"]


def test_items_without_a_key_go_elsewhere_with_a_request_id_too(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    queue.produce("there", key=keys_at(queue, BAD)[0], request="known there")
    partly_failing_disk(patchy.storage).break_partition(BAD)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        queue.produce("lost", key=keys_at(queue, BAD)[0])
    for number in range(60):
        queue.produce("x", request=f"r{number}")
        queue.produce("x", request=f"r{number}")
        produce(queue, batch_of("y"), Call(SESSION, number, again=True, age=1))
    assert queue.counts()["ready"] == 120
    with pytest.raises(StorageFailed, match="partition 2 is failing"):
        queue.produce("there", key=keys_at(queue, BAD)[0], request="known there")
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    assert queue.produce("there", key=keys_at(queue, BAD)[0], request="known there") == ["2-0"]
    assert queue.counts()["ready"] == 121


def test_the_repetition_of_what_a_failing_partition_has_is_of_unknown_outcome(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    first = produce(queue, batch_of("a", key=keys_at(queue, BAD)[0]), FIRST)
    partly_failing_disk(patchy.storage).break_partition(BAD)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        queue.produce("lost", key=keys_at(queue, BAD)[0])
    with pytest.raises(OutcomeUnknown, match="its repetition could not be run"):
        produce(queue, batch_of("a", key=keys_at(queue, BAD)[0]), AGAIN)
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    assert produce(queue, batch_of("a", key=keys_at(queue, BAD)[0]), AGAIN) == first


def test_a_partition_that_was_never_open_cannot_be_asked(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    queue.produce("there", key=keys_at(queue, BAD)[0], request="r")
    partly_failing_disk(patchy.storage).break_partition(BAD)
    patchy.kill()
    queue.produce("no id")
    with pytest.raises(StorageFailed, match="partition 2 cannot be asked whether it knows this request") as refused:
        queue.produce("x", request="other")
    assert refused.value.retryable
    produce(queue, batch_of("first sending"), FIRST)
    for ask in (
        lambda: produce(queue, batch_of("x"), Call(bytes(16), 1, again=True, age=5)),
        lambda: lease(queue, 1, Call(bytes(16), 2, again=True, age=5)),
    ):
        with pytest.raises(OutcomeUnknown, match="cannot be asked"):
            ask()
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    queue.produce("x", request="other")
    assert sorted(queue.drain()) == ["first sending", "no id", "there", "x"]


def test_a_part_that_was_refused_is_added_by_the_repetition(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    keys = [keys_at(queue, number)[0] for number in range(4)]
    batch = batch_of("a", "b", "c", "d", keys=keys)
    partly_failing_disk(patchy.storage).break_partition(BAD)
    first = queue.call(ProduceItems(batch=batch, call=FIRST))
    assert isinstance(refusal(first[BAD]), OutcomeUnknown)
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    queue.resize(2)
    patchy.turn()
    second = produce(queue, batch, AGAIN)
    assert produce(queue, batch, AGAIN) == second
    assert sorted(queue.drain()) == ["a", "b", "c", "d"]


def test_a_closed_partition_is_asked_without_opening_it(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=3)
    first = queue.produce("a", key=keys_at(queue, 1)[0], request="r")
    queue.drain()
    file_broker.advance_in_steps(70)
    assert len(queue.loop.engine.closed) == 3
    assert queue.produce("a", key=keys_at(queue, 1)[0], request="r") == first
    queue.produce("b", key=keys_at(queue, 0)[0], request="other")
    assert sorted(queue.loop.engine.closed) == [2]
    file_broker.restart()
    assert queue.produce("a", key=keys_at(queue, 1)[0], request="r") == first
    assert 2 in queue.loop.engine.closed, "its summary says that it remembers no call"


# -- partitions in I/O ---------------------------------------------------------------------------------


def test_a_produce_with_a_request_id_waits_for_no_other_partition(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    busy = keys_at(queue, 0)[0]
    queue.loop.stays_in_io = lambda handle: handle.number == 0
    first = queue.submit(ProduceRequest(batch_of("a", key=busy), b"a"))
    file_broker.turn()
    assert not first.done, "its sync runs"
    assert queue.produce("b", request="b") == ["1-0"]
    assert queue.produce("b", request="b") == ["1-0"]
    assert produce(queue, batch_of("c"), AGAIN) == ["1-1"]
    again = queue.submit(ProduceRequest(batch_of("a", key=busy), b"a"))
    file_broker.turn()
    assert not again.done, "it may still be undone"
    queue.loop.stays_in_io = lambda handle: False
    file_broker.turn()
    assert ids_of(first.result, 1) == ids_of(again.result, 1) == ["0-0"]


def test_the_repetition_of_what_a_slow_partition_has_is_refused_at_once(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    busy = batch_of("a", key=keys_at(queue, 0)[0])
    queue.loop.stays_in_io = lambda handle: handle.number == 0
    queue.submit(ProduceRequest(busy, call=FIRST))
    queue.submit(ProduceRequest(busy, b"a"))
    file_broker.turn()
    file_broker.advance(1)
    known = queue.submit(ProduceRequest(busy, call=AGAIN))
    unkeyed = queue.submit(ProduceRequest(batch_of("b"), call=Call(bytes(16), 1, again=True, age=5)))
    file_broker.turn()
    with pytest.raises(OutcomeUnknown, match="partition 0 is slow"):
        _ = known.result
    assert ids_of(unkeyed.result, 1) == ["1-0"]
    queue.loop.stays_in_io = lambda handle: False
    file_broker.turn()


def test_the_repetition_of_a_lease_waits_for_the_partition_that_granted_it(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    queue.produce("a", key=keys_at(queue, 0)[0])
    held = lease(queue, 1, FIRST)
    queue.loop.stays_in_io = lambda handle: handle.number == 0
    queue.submit(ProduceRequest(batch_of("b", key=keys_at(queue, 0)[0])))
    file_broker.turn()
    again = queue.submit(LeaseRequest(1, call=AGAIN))
    other = queue.submit(LeaseRequest(1, call=Call(bytes(16), 1, again=True, age=5)))
    file_broker.turn()
    assert not again.done
    queue.loop.stays_in_io = lambda handle: False
    file_broker.turn()
    assert again.leased.parts == held.parts and other.done


# -- lease ---------------------------------------------------------------------------------------------


def test_a_repeated_lease_gives_the_same_leases(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=3)
    queue.produce(*"abcdefgh", keys=KEYS)
    first = lease(queue, 6, FIRST)
    file_broker.kill()
    file_broker.advance(10)
    again = lease(queue, 6, AGAIN)
    assert sorted(again.ids) == sorted(first.ids) and sorted(again.parts) == sorted(first.parts)
    assert all(one.seconds == 50 for one in again.parts_granted)
    assert len(lease(queue, 6, Call(SESSION, 8))) == 2
    again.complete()
    assert not lease(queue, 6, Call(bytes(16), 1))


def test_a_repeated_lease_whose_items_are_settled_is_empty(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce(*"ab", keys=KEYS[:2])
    lease(queue, 1, FIRST).complete()
    assert not lease(queue, 1, AGAIN)
    assert queue.counts() == {"ready": 1, "completed": 1}


def test_a_lease_that_waits_is_ended_by_its_repetition_which_gets_the_items(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    original = queue.submit_lease(5, call=FIRST)
    again = queue.submit_lease(5, call=AGAIN)
    with pytest.raises(OutcomeUnknown):
        _ = original.result
    queue.produce("a", "b")
    assert again.leased.texts == ["a", "b"]


def test_a_lease_and_its_repetition_that_come_in_one_turn_are_one(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    both = [queue.submit(LeaseRequest(5, deadline=broker.deadline(60), call=call)) for call in (FIRST, AGAIN)]
    queue.produce("a", "b")
    with pytest.raises(OutcomeUnknown):
        _ = both[0].result
    assert both[1].leased.texts == ["a", "b"]


def test_several_leases_of_one_partition_are_given_again(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    for priority in (5, 0, 5):
        queue.produce(*"ab", priority=priority)
    first = lease(queue, 6, FIRST)
    assert len(first) == 6
    assert sorted(lease(queue, 6, AGAIN).ids) == sorted(first.ids)


# -- settle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["complete", "retry", "bury", "extend"])
def test_a_repeated_settle_changes_nothing(file_broker: BrokerUnderTest, action: str) -> None:
    queue = file_broker.create(partitions=3)
    queue.produce(*"abcdefgh", keys=KEYS)
    held = queue.lease(8)
    first = settle(queue, held.parts, FIRST, action=action)
    file_broker.kill()
    before = queue.counts()
    assert settle(queue, held.parts, AGAIN, action=action) == first
    assert queue.counts() == before


def test_parts_of_one_lease_are_settled_each(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    queue.produce(*"abc")
    (part,) = queue.lease(3).parts
    parts = [part._replace(offsets=[offset]) for offset in range(3)]
    first = settle(queue, parts[:2], FIRST, action="retry")
    assert queue.counts() == {"ready": 2, "leased": 1}
    assert settle(queue, parts, AGAIN, action="retry")[:2] == first, "a repetition may have other parts"
    assert queue.counts() == {"ready": 3}


def test_follow_ups_of_a_repeated_complete_are_made_once(broker: BrokerUnderTest) -> None:
    queue, other = broker.create(partitions=2), broker.create("other")
    queue.produce("a")
    held = queue.lease(1)
    for call in (FIRST, AGAIN):
        settle(queue, held.parts, call, then=[(other.incarnation, batch_of("follow-up"))])
        broker.turn()
    assert other.drain() == ["follow-up"]


def test_a_repeated_settle_that_a_failing_partition_may_know_is_of_unknown_outcome(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    queue.produce("a", key=keys_at(queue, BAD)[0])
    held = queue.lease(1)
    settle(queue, held.parts, FIRST)
    partly_failing_disk(patchy.storage).break_partition(BAD)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        queue.produce("lost", key=keys_at(queue, BAD)[0])
    (unknown,) = settle(queue, held.parts, AGAIN)
    assert isinstance(refusal(unknown), OutcomeUnknown)  # type: ignore[arg-type]
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    assert settle(queue, held.parts, AGAIN) == settle(queue, held.parts, AGAIN)


# -- cut off anywhere ----------------------------------------------------------------------------------


@cache
def three_partitions() -> tuple[SimulatedFiles, MicrosecondClock]:
    def work(broker: BrokerUnderTest) -> None:
        queue = broker.create(partitions=3)
        queue.produce(*[f"old {key}" for key in KEYS], keys=KEYS)

    return disk_after(work)


def test_a_produce_cut_off_anywhere_is_done_once_by_its_repetition() -> None:
    """The crash may come between the commits of two partitions."""
    batch = batch_of(*"abcdefgh", keys=[*KEYS[:6], None, None])
    partly = 0
    for broker, done in crash_at_each_call(three_partitions(), lambda broker: _ignore(produce(broker.find(), batch, FIRST))):
        queue = broker.find()
        there = queue.counts()["ready"] - 8
        partly += 0 < there < 8
        assert there == 8 or not done
        queue.resize(2)
        broker.turn()
        found = produce(queue, batch, AGAIN)
        assert len(set(found)) == 8
        assert sorted(text for text in queue.drain() if len(text) == 1) == [*"abcdefgh"]
        assert produce(queue, batch, AGAIN) == found
    assert partly, "a crash came between two partitions"


def test_a_lease_and_its_settle_cut_off_anywhere_are_repeated() -> None:
    given: list[LeaseResult] = []

    def work(broker: BrokerUnderTest) -> None:
        queue = broker.find()
        given[:] = []
        given[:] = lease(queue, 8, FIRST).parts_granted
        settle(queue, LeasedItems(queue, given).parts, Call(SESSION, 8), action="bury")

    for broker, _ in crash_at_each_call(three_partitions(), work, step=2):
        queue = broker.find()
        if given:  # a power cut may have taken the leases, which were not synced
            answers = settle(queue, LeasedItems(queue, given).parts, Call(SESSION, 8, again=True, age=5), action="bury")
            assert queue.counts().get("buried", 0) == sum(answer.done for answer in answers if isinstance(answer, Settled))
        else:
            again = lease(queue, 8, AGAIN)
            assert again and lease(queue, 8, AGAIN).ids == again.ids
            assert queue.counts()["leased"] == len(again.ids)


def _ignore(found: object) -> None:
    """A piece of work has no result."""


def test_an_invalid_call_is_refused(broker: BrokerUnderTest) -> None:
    queue = broker.create()
    for call in (Call(b"short", 1), Call(SESSION, -1), Call(SESSION, 1, True, -1), Call(SESSION, 1 << 70)):
        with pytest.raises(PenstockError) as refused:
            produce(queue, batch_of("a"), call)
        assert isinstance(refused.value, InvalidRequest)
    assert not queue.counts()
