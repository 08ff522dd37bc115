"""One partition of several fails: it alone is left alone, and comes back by itself."""

import errno
import random
from collections.abc import Iterator

import pytest

from penstock.loop.partition_handle import FIRST_WAIT, JITTER, LAST_WAIT
from penstock.loop.requests import LeaseRequest, ProduceRequest
from penstock.testing import SimulatedFiles
from penstock.words.errors import CorruptLog, OutcomeUnknown, PenstockError, StorageFailed
from tests.broker.broker_under_test import Desk, Rig, batch_of, ids_of, keys_at, refusal
from tests.broker.storages import PatchyFiles, Simulated

BAD = 2


@pytest.fixture
def patchy() -> Iterator[Rig]:
    rig = Rig(Simulated(PatchyFiles()))
    yield rig
    rig.check()
    rig.broker.close()


def disk(rig: Rig) -> PatchyFiles:
    assert isinstance(rig.ground, Simulated) and isinstance(rig.ground.files, PatchyFiles)
    return rig.ground.files


def one_key_each(desk: Desk) -> list[str]:
    """A key of each partition."""
    return [keys_at(desk, number)[0] for number in sorted(desk.loop.turns.active)]


def failing(rig: Rig, partitions: int = 4) -> Desk:
    """A queue of which one partition fails and is known to."""
    desk = rig.create(partitions=partitions)
    disk(rig).break_partition(BAD)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        desk.produce("lost", key=keys_at(desk, BAD)[0])
    assert statuses(desk)[BAD] == "failing"
    return desk


def statuses(desk: Desk) -> dict[int, str]:
    return {one.partition: one.status for one in desk.stats().partitions}


def test_items_without_a_key_go_elsewhere(patchy: Rig) -> None:
    desk = failing(patchy)
    for number in range(9):
        desk.produce(f"item-{number}")
    assert {one.partition: one.ready for one in desk.stats().partitions} == {0: 3, 1: 3, BAD: 0, 3: 3}
    assert len(desk.drain()) == 9


def test_items_with_a_key_get_an_error_that_may_be_repeated(patchy: Rig) -> None:
    desk = failing(patchy)
    with pytest.raises(StorageFailed, match=r"partition 2 is failing \(.*\); it is tried again by itself") as caught:
        desk.produce("later", key=keys_at(desk, BAD)[0])
    assert caught.value.retryable
    assert desk.counts() == {}


@pytest.mark.parametrize("known", [False, True], ids=["fails now", "known to fail"])
def test_a_mixed_batch_fails_only_in_part(patchy: Rig, known: bool) -> None:
    desk = failing(patchy) if known else patchy.create(partitions=4)
    disk(patchy).break_partition(BAD)
    keys = one_key_each(desk)
    answer = desk.place(batch_of("a", "b", "c", "d", keys=keys))
    assert [(part.partition, part.refused is None) for part in answer] == [(0, True), (1, True), (2, False), (3, True)]
    bad = answer[BAD]
    assert bad.stored is None and list(bad.indexes or ()) == [BAD]
    assert isinstance(refusal(bad), StorageFailed if known else OutcomeUnknown)
    assert sorted(desk.drain()) == ["a", "b", "d"]


def test_the_others_go_on_in_the_very_turn_in_which_it_fails(patchy: Rig) -> None:
    desk = patchy.create(partitions=4)
    keys = one_key_each(desk)
    desk.produce(*keys, keys=keys)
    held = desk.lease()
    disk(patchy).break_partition(BAD)
    requests = [desk.submit(ProduceRequest(batch_of(f"{key}-again", key=key))) for key in keys]
    waiting = desk.submit(LeaseRequest(10, deadline=patchy.deadline(60)))
    settled = desk.settle("complete", held.parts)
    assert [refusal(one) is not None for one in settled] == [part.partition == BAD for part in held.parts]
    assert [asked.result[0].refused is None for asked in requests] == [True, True, False, True]
    assert sorted(waiting.held.texts) == sorted(f"{key}-again" for index, key in enumerate(keys) if index != BAD)


def test_a_lease_that_cannot_be_stored_is_not_given(patchy: Rig) -> None:
    """Who waited goes on waiting, and gets the items when the partition is back."""
    desk = patchy.create(partitions=4)
    desk.produce("kept", key=keys_at(desk, BAD)[0])
    disk(patchy).break_partition(BAD)
    asked = desk.waiter(wait=600)
    assert not asked.done
    disk(patchy).broken.clear()
    patchy.pass_by(7)
    assert asked.held.texts == ["kept"]
    assert asked.held.attempts == [1]


def test_it_comes_back_by_itself(patchy: Rig) -> None:
    desk = failing(patchy)
    patchy.pass_by(60)
    assert statuses(desk)[BAD] == "failing"
    disk(patchy).broken.clear()
    patchy.pass_by(7)
    assert set(statuses(desk).values()) == {"active"}
    assert desk.stats().warnings == []
    desk.produce("again", key=keys_at(desk, BAD)[0])
    assert desk.drain() == ["again"], "what failed is not there, what came since is"


def test_back_off_grows_from_half_a_second_to_five(patchy: Rig) -> None:
    desk = failing(patchy)
    member = desk.loop.turns.members[BAD]
    waits: list[int] = []
    for _ in range(40):
        now = patchy.clock.read().elapsed
        assert member.next_run is not None
        waits.append(member.next_run - now)
        before = len(disk(patchy).tried)
        patchy.advance((waits[-1] - 1) / 1_000_000)
        assert len(disk(patchy).tried) == before, "it is left alone until then"
        patchy.advance(0.000_001)
        assert len(disk(patchy).tried) > before
    plain = [min(LAST_WAIT, FIRST_WAIT * 1.5**number) for number in range(40)]
    assert (FIRST_WAIT, LAST_WAIT, JITTER) == (500_000, 5_000_000, 0.2)
    shares = [wait / expected for wait, expected in zip(waits, plain, strict=True)]
    assert all(0.8 - 1e-6 <= share <= 1.2 for share in shares)
    assert max(shares) > 1.1 and min(shares) < 0.9, "with jitter"


def test_back_off_begins_anew_after_a_success(patchy: Rig) -> None:
    desk = failing(patchy)
    patchy.pass_by(60)
    disk(patchy).broken.clear()
    patchy.pass_by(7)
    desk.produce("fine", key=keys_at(desk, BAD)[0])
    disk(patchy).break_partition(BAD)
    with pytest.raises(PenstockError):
        desk.produce("not", key=keys_at(desk, BAD)[0])
    member = desk.loop.turns.members[BAD]
    assert member.next_run is not None
    assert member.next_run - patchy.clock.read().elapsed <= FIRST_WAIT * (1 + JITTER)


def test_slots_do_not_go_to_one_that_fails(patchy: Rig) -> None:
    """The second partition cannot be let go of while the first, which would have to take its slots, fails."""
    desk = patchy.create(partitions=2)
    disk(patchy).break_partition(0)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        desk.produce("lost", key=keys_at(desk, 0)[0])
    with pytest.raises(StorageFailed, match=r"partition 0 is failing \(.*\); it is tried again by itself"):
        desk.resize(1)
    assert [*desk.loop.turns.active] == [0, 1]


def test_all_of_them_failing_is_said(patchy: Rig) -> None:
    desk = patchy.create(partitions=2)
    disk(patchy).broken.add("/0000")
    for _ in range(2):
        with pytest.raises((StorageFailed, OutcomeUnknown)):
            desk.produce("x")
    with pytest.raises(StorageFailed, match=r"no partition of queue 'q' is in order .*; try again"):
        desk.produce("x")
    disk(patchy).broken.clear()
    patchy.pass_by(7)
    desk.produce("y")
    assert desk.drain() == ["y"]


def test_one_failed_write_is_undone_and_said(patchy: Rig) -> None:
    """The disk is well again at once: the partition is rebuilt from what is synced, and left alone for half a second."""
    desk = patchy.create(partitions=2)
    (key,) = keys_at(desk, 1)
    desk.produce("before", key=key)
    for how in ("write", "sync"):
        files = disk(patchy)
        files.fail(files.calls + (1 if how == "write" else 2), errno.EIO)
        with pytest.raises(StorageFailed):
            desk.produce("lost", key=key)
        assert how in files.trace[-1] or any(f"{how} " in call and "[5]" in call for call in files.trace)
        with pytest.raises(StorageFailed, match="partition 1 is failing"):
            desk.produce("too soon", key=key)
        patchy.pass_by(0.6)
        desk.produce(f"after-{how}", key=key)
    assert desk.drain() == ["before", "after-write", "after-sync"]


def test_dead_letters_wait_for_a_partition_that_fails(patchy: Rig) -> None:
    dead = patchy.create("dead", partitions=4)
    source = patchy.create("source", dead_queue="dead")
    key = keys_at(dead, BAD)[0]
    disk(patchy).broken.add(f"{dead.incarnation:016x}/{BAD:05d}/")
    source.produce("letter", key=key)
    source.lease().bury()
    patchy.pass_by(20)
    assert source.counts() == {"moving": 1} and source.stats().transfers == 1
    disk(patchy).broken.clear()
    patchy.pass_by(10)
    assert source.counts() == {} and source.stats().transfers == 0
    assert dead.drain() == ["letter"]


def test_a_partition_that_cannot_be_opened_is_left_out_and_reported(patchy: Rig) -> None:
    desk = patchy.create(partitions=4)
    keys = one_key_each(desk)
    desk.produce(*keys, keys=keys)
    logs = [path for path in disk(patchy).contents() if f"{desk.incarnation:016x}" in path and path.endswith(".log")]
    paths = [next(path for path in logs if f"/{number:05d}/" in path) for number in (1, BAD)]
    disk(patchy).plant(paths[1], disk(patchy).content(paths[0]))  # another partition's log
    patchy.kill()
    found = desk.stats().partitions[BAD]
    assert found.status == "failing" and "put the file back where it belongs" in found.error
    assert any(warning.startswith("partition 2 is failing") for warning in desk.stats().warnings)
    with pytest.raises(CorruptLog, match=r"partition 2 cannot be opened \(.*\); the others work"):
        desk.produce("x", key=keys[BAD])
    assert desk.explain("2-0").why.startswith("its partition is failing")
    assert sorted(desk.drain()) == sorted(key for index, key in enumerate(keys) if index != BAD)
    desk.produce("unkeyed")
    assert desk.drain() == ["unkeyed"]


def test_a_partition_that_fails_while_opening_is_tried_again(patchy: Rig) -> None:
    desk = patchy.create(partitions=4)
    keys = one_key_each(desk)
    desk.produce(*keys, keys=keys)
    disk(patchy).break_partition(BAD)
    patchy.kill()
    assert statuses(desk)[BAD] == "failing"
    assert len(desk.drain()) == 3
    disk(patchy).broken.clear()
    patchy.pass_by(7)
    assert desk.drain() == [keys[BAD]]


@pytest.mark.parametrize("lasting", [False, True], ids=["one call fails", "all fail from then on"])
def test_an_error_is_never_a_success_nor_the_other_way_round(lasting: bool) -> None:
    """Every call of a produce fails, once or from then on. What is said is what is found; the repetition settles what is unknown."""
    told: set[type | None] = set()
    for ahead in range(1, 30):
        files = PatchyFiles(random.Random(ahead))
        rig = Rig(Simulated(files))
        desk = rig.create(partitions=2)
        desk.produce("before")
        calls = files.calls
        for call in range(calls + ahead, calls + ahead + (500 if lasting else 1)):
            files.fail(call, errno.EIO)
        error: PenstockError | None = None
        try:
            desk.produce("item", request="r")
        except (StorageFailed, OutcomeUnknown) as caught:
            error = caught
        told.add(None if error is None else type(error))
        files.mend()
        crashed = files.copy()
        crashed.crash()
        found = items_on(crashed)
        assert found.count("item") == 1 if error is None else True
        assert found.count("item") == 0 if type(error) is StorageFailed else True
        rig.pass_by(10)
        desk.produce("item", request="r")
        rig.broker.close()
        assert sorted(items_on(files)) == ["before", "item"], f"after {error!r} at call {ahead}"
    assert told == {None, OutcomeUnknown if lasting else StorageFailed}


def items_on(files: SimulatedFiles) -> list[str]:
    """What a new broker finds on a copy of a disk."""
    files = files.copy()
    files.kill()
    rig = Rig(Simulated(files))
    found = rig.find().drain()
    rig.broker.close()
    return found


def test_an_unknown_outcome_of_part_of_a_batch_is_settled_by_repeating_it(patchy: Rig) -> None:
    desk = patchy.create(partitions=4)
    keys = one_key_each(desk)
    batch = batch_of("a", "b", "c", "d", keys=keys)
    disk(patchy).break_partition(BAD)
    first = desk.place(batch, "r")
    assert isinstance(refusal(first[BAD]), OutcomeUnknown)
    disk(patchy).broken.clear()
    patchy.pass_by(7)
    second = desk.place(batch, "r")
    assert [part.stored is not None and part.stored.again for part in second] == [True, True, False, True]
    assert len(set(ids_of(second, 4))) == 4
    assert sorted(desk.drain()) == ["a", "b", "c", "d"]
