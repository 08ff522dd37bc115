"""One partition of several fails: the others work, and it recovers when its disk works again."""

import errno
import random

import pytest

from penstock.loop.partition_handle import FIRST_WAIT, GRACE_AFTER_SLOW, JITTER, LAST_WAIT
from penstock.loop.requests import LeaseRequest, ProduceRequest
from penstock.operations import ListCursors, MoveCursor, RedriveItems
from penstock.testing import SimulatedFiles
from penstock.words.clock import SECOND
from penstock.words.errors import CorruptLog, OutcomeUnknown, PenstockError, StorageFailed
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, batch_of, ids_of, keys_at, refusal
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage, partly_failing_disk

BAD = 2


def one_key_each(queue: QueueUnderTest) -> list[str]:
    """A key of each partition."""
    return [keys_at(queue, number)[0] for number in sorted(queue.loop.engine.active)]


def failing(broker: BrokerUnderTest, partitions: int = 4) -> QueueUnderTest:
    """A queue with one partition that is known to be failing."""
    queue = broker.create(partitions=partitions)
    partly_failing_disk(broker.storage).break_partition(BAD)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        queue.produce("lost", key=keys_at(queue, BAD)[0])
    assert statuses(queue)[BAD] == "failing"
    return queue


def statuses(queue: QueueUnderTest) -> dict[int, str]:
    return {one.partition: one.status for one in queue.stats().partitions}


def test_items_without_a_key_go_elsewhere(patchy: BrokerUnderTest) -> None:
    queue = failing(patchy)
    for number in range(9):
        queue.produce(f"item-{number}")
    assert {one.partition: one.ready for one in queue.stats().partitions} == {0: 3, 1: 3, BAD: 0, 3: 3}
    assert len(queue.drain()) == 9


def test_items_with_a_key_get_an_error_that_may_be_repeated(patchy: BrokerUnderTest) -> None:
    queue = failing(patchy)
    with pytest.raises(StorageFailed, match=r"partition 2 is failing \(.*\); it will be reopened") as caught:
        queue.produce("later", key=keys_at(queue, BAD)[0])
    assert caught.value.retryable
    assert queue.counts() == {}


@pytest.mark.parametrize("known", [False, True], ids=["fails now", "known to fail"])
def test_a_mixed_batch_fails_only_in_part(patchy: BrokerUnderTest, known: bool) -> None:
    queue = failing(patchy) if known else patchy.create(partitions=4)
    partly_failing_disk(patchy.storage).break_partition(BAD)
    keys = one_key_each(queue)
    answer = queue.produce_batch(batch_of("a", "b", "c", "d", keys=keys))
    assert [(part.partition, part.refused is None) for part in answer] == [(0, True), (1, True), (2, False), (3, True)]
    bad = answer[BAD]
    assert bad.stored is None and list(bad.indexes or ()) == [BAD]
    assert isinstance(refusal(bad), StorageFailed if known else OutcomeUnknown)
    assert sorted(queue.drain()) == ["a", "b", "d"]


def test_the_other_partitions_work_in_the_turn_in_which_one_fails(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    keys = one_key_each(queue)
    queue.produce(*keys, keys=keys)
    held = queue.lease()
    partly_failing_disk(patchy.storage).break_partition(BAD)
    requests = [queue.submit(ProduceRequest(batch_of(f"{key}-again", key=key))) for key in keys]
    waiting = queue.submit(LeaseRequest(10, deadline=patchy.deadline(60)))
    settled = queue.settle("complete", held.parts)
    assert [refusal(one) is not None for one in settled] == [part.partition == BAD for part in held.parts]
    assert [asked.result[0].refused is None for asked in requests] == [True, True, False, True]
    assert sorted(waiting.leased.texts) == sorted(f"{key}-again" for index, key in enumerate(keys) if index != BAD)


def test_a_lease_that_cannot_be_stored_is_not_given(patchy: BrokerUnderTest) -> None:
    """A waiting lease waits on, and gets the items when the partition has recovered."""
    queue = patchy.create(partitions=4)
    queue.produce("kept", key=keys_at(queue, BAD)[0])
    partly_failing_disk(patchy.storage).break_partition(BAD)
    asked = queue.submit_lease(wait=600)
    assert not asked.done
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    assert asked.leased.texts == ["kept"]
    assert asked.leased.attempts == [1]


def test_a_failing_partition_recovers_when_its_disk_works_again(patchy: BrokerUnderTest) -> None:
    queue = failing(patchy)
    patchy.advance_in_steps(60)
    assert statuses(queue)[BAD] == "failing"
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    assert set(statuses(queue).values()) == {"active"}
    assert queue.stats().warnings == []
    queue.produce("again", key=keys_at(queue, BAD)[0])
    assert queue.drain() == ["again"], "what failed is not there, what came since is"


def test_back_off_grows_from_half_a_second_to_five(patchy: BrokerUnderTest) -> None:
    queue = failing(patchy)
    handle = queue.loop.engine.handles[BAD]
    waits: list[int] = []
    for _ in range(40):
        now = patchy.clock.read().elapsed
        assert handle.next_run is not None
        waits.append(handle.next_run - now)
        before = len(partly_failing_disk(patchy.storage).tried)
        patchy.advance((waits[-1] - 1) / 1_000_000)
        assert len(partly_failing_disk(patchy.storage).tried) == before, "it is left alone until then"
        patchy.advance(0.000_001)
        assert len(partly_failing_disk(patchy.storage).tried) > before
    plain = [min(LAST_WAIT, FIRST_WAIT * 1.5**number) for number in range(40)]
    assert (FIRST_WAIT, LAST_WAIT, JITTER) == (500_000, 5_000_000, 0.2)
    shares = [wait / expected for wait, expected in zip(waits, plain, strict=True)]
    assert all(0.8 - 1e-6 <= share <= 1.2 for share in shares)
    assert max(shares) > 1.1 and min(shares) < 0.9, "with jitter"


def test_back_off_begins_anew_after_a_success(patchy: BrokerUnderTest) -> None:
    queue = failing(patchy)
    patchy.advance_in_steps(60)
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    queue.produce("fine", key=keys_at(queue, BAD)[0])
    partly_failing_disk(patchy.storage).break_partition(BAD)
    with pytest.raises(PenstockError):
        queue.produce("not", key=keys_at(queue, BAD)[0])
    handle = queue.loop.engine.handles[BAD]
    assert handle.next_run is not None
    assert handle.next_run - patchy.clock.read().elapsed <= FIRST_WAIT * (1 + JITTER)


def test_slots_do_not_move_to_a_failing_partition(patchy: BrokerUnderTest) -> None:
    """The second partition cannot be retired while the first, which would take its slots, is failing."""
    queue = patchy.create(partitions=2)
    partly_failing_disk(patchy.storage).break_partition(0)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        queue.produce("lost", key=keys_at(queue, 0)[0])
    with pytest.raises(StorageFailed, match=r"partition 0 is failing \(.*\); it will be reopened"):
        queue.resize(1)
    assert [*queue.loop.engine.active] == [0, 1]


def test_produce_says_that_all_partitions_are_failing(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=2)
    partly_failing_disk(patchy.storage).failing_paths.add("/0000")
    for _ in range(2):
        with pytest.raises((StorageFailed, OutcomeUnknown)):
            queue.produce("x")
    with pytest.raises(StorageFailed, match=r"no partition of queue 'q' is usable .*; try again"):
        queue.produce("x")
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    queue.produce("y")
    assert queue.drain() == ["y"]


def test_one_failed_write_is_undone_and_reported(patchy: BrokerUnderTest) -> None:
    """The disk works again at once: the partition is rebuilt from its synced log after half a second."""
    queue = patchy.create(partitions=2)
    (key,) = keys_at(queue, 1)
    queue.produce("before", key=key)
    for how in ("write", "sync"):
        files = partly_failing_disk(patchy.storage)
        files.fail(files.calls + (1 if how == "write" else 2), errno.EIO)
        with pytest.raises(StorageFailed):
            queue.produce("lost", key=key)
        assert how in files.trace[-1] or any(f"{how} " in call and "[5]" in call for call in files.trace)
        with pytest.raises(StorageFailed, match="partition 1 is failing"):
            queue.produce("too soon", key=key)
        patchy.advance_in_steps(0.6)
        queue.produce(f"after-{how}", key=key)
    assert queue.drain() == ["before", "after-write", "after-sync"]


def test_no_lease_ends_for_two_seconds_after_a_failing_partition_works_again(patchy: BrokerUnderTest) -> None:
    """A failed write is undone at once, and the back-off follows: the two seconds begin when it is over."""
    queue = patchy.create(partitions=2)
    keys, files = keys_at(queue, 1, 2), partly_failing_disk(patchy.storage)
    queue.produce("one", "two", keys=keys)
    first, second = queue.lease(1, timeout=1), queue.lease(1, timeout=1)
    files.fail(files.calls + 1, errno.EIO)
    with pytest.raises(StorageFailed):
        queue.produce("lost", key=keys[0])
    handle = queue.loop.engine.handles[1]
    while not handle.is_usable:
        patchy.advance(0.02)
    patchy.advance_in_steps(GRACE_AFTER_SLOW / SECOND - 0.1)
    assert queue.lease(5).texts == [], "whoever had them before has them still"
    assert first.complete() == 1
    patchy.advance_in_steps(0.2)
    assert queue.lease(5).texts == second.texts, "then it ends as leases do"


def test_dead_letters_wait_for_a_partition_that_fails(patchy: BrokerUnderTest) -> None:
    dead = patchy.create("dead", partitions=4)
    source = patchy.create("source", dead_queue="dead")
    key = keys_at(dead, BAD)[0]
    partly_failing_disk(patchy.storage).failing_paths.add(f"{dead.incarnation:016x}/{BAD:05d}/")
    source.produce("letter", key=key)
    source.lease().bury()
    patchy.advance_in_steps(20)
    assert source.counts() == {"moving": 1} and source.stats().transfers == 1
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(10)
    assert source.counts() == {} and source.stats().transfers == 0
    assert dead.drain() == ["letter"]


def test_a_redrive_is_refused_as_a_whole_while_a_partition_fails(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    keys = one_key_each(queue)
    queue.produce(*keys, keys=keys)
    queue.lease().bury()
    partly_failing_disk(patchy.storage).break_partition(BAD)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        queue.produce("lost", key=keys[BAD])
    for chosen in (None, {0: [0], BAD: [0]}):
        with pytest.raises(StorageFailed, match="partition 2 is failing"):
            queue.call(RedriveItems(items=chosen, to=queue.incarnation))
    assert {one.partition: one.buried for one in queue.stats().partitions if one.partition != BAD} == {0: 1, 1: 1, 3: 1}
    assert queue.call(RedriveItems(items={0: [0], 1: [0]}, to=queue.incarnation)) == 2
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    assert queue.call(RedriveItems(to=queue.incarnation)) == 2


def test_a_cursor_moves_in_the_other_partitions_while_one_fails(patchy: BrokerUnderTest) -> None:
    queue = failing(patchy)
    keys = one_key_each(queue)
    queue.produce("a", "b", keys=[keys[0], keys[1]])
    queue.call(MoveCursor(name="c", to={0: 1}))
    with pytest.raises(StorageFailed, match="partition 2 is failing"):
        queue.call(MoveCursor(name="c", to={1: 1, BAD: 0}))
    assert queue.call(ListCursors()) == {"c": {0: 1}}


def test_a_partition_that_cannot_be_opened_is_left_out_and_reported(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    keys = one_key_each(queue)
    queue.produce(*keys, keys=keys)
    logs = [
        path for path in partly_failing_disk(patchy.storage).contents() if f"{queue.incarnation:016x}" in path and path.endswith(".log")
    ]
    paths = [next(path for path in logs if f"/{number:05d}/" in path) for number in (1, BAD)]
    partly_failing_disk(patchy.storage).put_file(paths[1], partly_failing_disk(patchy.storage).content(paths[0]))  # another partition's log
    patchy.kill()
    found = queue.stats().partitions[BAD]
    assert found.status == "failing" and "put the file back where it belongs" in found.error
    assert any(warning.startswith("partition 2 is failing") for warning in queue.stats().warnings)
    with pytest.raises(CorruptLog, match=r"partition 2 cannot be opened \(.*\); the others work"):
        queue.produce("x", key=keys[BAD])
    assert queue.explain("2-0").why.startswith("its partition is failing")
    assert sorted(queue.drain()) == sorted(key for index, key in enumerate(keys) if index != BAD)
    queue.produce("unkeyed")
    assert queue.drain() == ["unkeyed"]


def test_a_partition_that_fails_while_opening_is_tried_again(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    keys = one_key_each(queue)
    queue.produce(*keys, keys=keys)
    partly_failing_disk(patchy.storage).break_partition(BAD)
    patchy.kill()
    assert statuses(queue)[BAD] == "failing"
    assert len(queue.drain()) == 3
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    assert queue.drain() == [keys[BAD]]


@pytest.mark.parametrize("lasting", [False, True], ids=["one call fails", "all fail from then on"])
def test_an_error_means_not_stored_and_an_answer_means_stored(lasting: bool) -> None:
    """Every file call of a produce fails, once or from then on. The answer is true; a repetition settles an unknown
    outcome.
    """
    told: set[type | None] = set()
    for ahead in range(1, 30):
        files = PartlyFailingFiles(random.Random(ahead))
        broker = BrokerUnderTest(SimulatedStorage(files))
        queue = broker.create(partitions=2)
        queue.produce("before")
        calls = files.calls
        for call in range(calls + ahead, calls + ahead + (500 if lasting else 1)):
            files.fail(call, errno.EIO)
        error: PenstockError | None = None
        try:
            queue.produce("item", request="r")
        except (StorageFailed, OutcomeUnknown) as caught:
            error = caught
        told.add(None if error is None else type(error))
        files.clear_faults()
        crashed = files.copy()
        crashed.crash()
        found = items_on(crashed)
        assert found.count("item") == 1 if error is None else True
        assert found.count("item") == 0 if type(error) is StorageFailed else True
        broker.advance_in_steps(10)
        queue.produce("item", request="r")
        broker.embedded.close()
        assert sorted(items_on(files)) == ["before", "item"], f"after {error!r} at call {ahead}"
    assert told == {None, OutcomeUnknown if lasting else StorageFailed}


def items_on(files: SimulatedFiles) -> list[str]:
    """The items that a new broker finds on a copy of a disk."""
    files = files.copy()
    files.kill()
    broker = BrokerUnderTest(SimulatedStorage(files))
    found = broker.find().drain()
    broker.embedded.close()
    return found


def test_an_unknown_outcome_of_part_of_a_batch_is_settled_by_repeating_it(patchy: BrokerUnderTest) -> None:
    queue = patchy.create(partitions=4)
    keys = one_key_each(queue)
    batch = batch_of("a", "b", "c", "d", keys=keys)
    partly_failing_disk(patchy.storage).break_partition(BAD)
    first = queue.produce_batch(batch, "r")
    assert isinstance(refusal(first[BAD]), OutcomeUnknown)
    partly_failing_disk(patchy.storage).failing_paths.clear()
    patchy.advance_in_steps(7)
    second = queue.produce_batch(batch, "r")
    assert [part.stored is not None and part.stored.repeated for part in second] == [True, True, False, True]
    assert len(set(ids_of(second, 4))) == 4
    assert sorted(queue.drain()) == ["a", "b", "c", "d"]
