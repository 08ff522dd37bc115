"""The outbox: items leave for another partition, once, in order, and are remembered until they have arrived."""

import pytest

from penstock.rules import base
from penstock.rules.commands import Send
from penstock.rules.item_states import Life
from penstock.rules.leases import EPOCH_SHIFT
from penstock.rules.outbox import destination, moved_to, place_of
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import Retention
from tests.partition_under_test import ELSEWHERE, Bench, given

OTHER = destination(0xDEAD, 4)


def sequences(bench: Bench, to: bytes = ELSEWHERE) -> list[int]:
    """Of the transfers that wait, in their order."""
    return [entry.sequence for entry in bench.partition.state.outbox.get(to, [])]


def on_their_way(bench: Bench, to: bytes = ELSEWHERE) -> list[list[int]]:
    """The runs of the transfers that wait, in their order."""
    return [entry.runs for entry in bench.partition.state.outbox.get(to, [])]


def refused(bench: Bench, *which: int) -> None:
    """Sending is an error and changes nothing."""
    before = base.dump(bench.partition.state)
    with pytest.raises(InvalidRequest, match="cannot be sent; it must be buried or ready"):
        bench.send(*which)
    assert base.dump(bench.partition.state) == before


# -- what can be sent ----------------------------------------------------------------------------------


def test_a_ready_item_leaves_and_the_others_are_served(bench: Bench) -> None:
    bench.produce("a", "b", "c")
    assert bench.send(1) == 1
    assert (bench.life(1), bench.counts.moving) == (Life.MOVING, 1)
    assert bench.drain(10) == ["a", "c"]


def test_a_keyed_item_leaves_its_lane_and_its_key_goes_on(bench: Bench) -> None:
    bench.produce("a1", "b1", "a2", keys=["a", "b", "a"])
    bench.send(0)
    assert bench.drain(10) == ["b1", "a2"]


@pytest.mark.parametrize(("sent", "rest"), [(1, ["a3", "a4"]), (2, ["a2", "a4"]), (3, ["a2", "a3"])])
def test_an_item_in_line_behind_a_held_key_leaves_and_the_line_goes_on(bench: Bench, sent: int, rest: list[str]) -> None:
    bench.produce("a1", "a2", "a3", "a4", key="a")
    held = bench.lease()
    assert bench.take() == []
    bench.send(sent)
    assert bench.take() == []
    bench.complete(held.lease)
    assert bench.drain() == rest


def test_the_head_of_a_free_line_leaves_and_the_next_is_offered(bench: Bench) -> None:
    bench.produce("a1", "a2", "a3", key="a")
    bench.complete(bench.lease().lease)
    bench.retry(bench.lease().lease)  # first in line, and free
    bench.send(1)
    assert bench.drain() == ["a3"]


def test_a_whole_line_leaves_and_its_key_is_as_new(bench: Bench) -> None:
    bench.produce("a1", "a2", "a3", key="a")
    held = bench.lease()
    assert bench.take() == []
    bench.send(1, 2)
    bench.complete(held.lease)
    assert not bench.partition.state.keys.map
    bench.produce("a4", key="a")
    assert bench.drain() == ["a4"]


def test_a_buried_item_leaves_with_what_is_known_of_its_burial(bench: Bench) -> None:
    bench.produce("a", "b")
    bench.bury(bench.lease(1).lease, reason="no such customer")
    bench.send(0)
    bench.restart()
    assert (bench.life(0), bench.counts.buried) == (Life.MOVING, 0)
    assert (bench.partition.state.buried[0].reason, bench.partition.state.buried[0].attempts) == ("no such customer", 1)
    assert bench.redrive() == 0
    bench.deliver(5)
    assert bench.partition.state.buried == {}


def test_clearing_the_buried_leaves_what_is_known_of_those_on_their_way(bench: Bench) -> None:
    bench.produce("a", "b")
    bench.bury(bench.lease().lease, reason="no")
    bench.send(0)
    assert bench.clear(buried=True) == 1
    assert [(offset, burial.reason) for offset, burial in bench.partition.state.buried.items()] == [(0, "no")]


def test_only_what_is_ready_or_buried_leaves(bench: Bench) -> None:
    bench.produce("completed", "leased", "moving", "ready")
    bench.produce("scheduled", at=bench.after(100))
    bench.complete(bench.lease(1).lease)
    bench.lease(1)
    bench.send(2)
    for which in ((0,), (1,), (2,), (4,), (99,), (3, 1), (3, 2)):
        refused(bench, *which)
    bench.deliver()
    refused(bench, 2)


def test_a_backing_off_item_cannot_be_sent(bench: Bench) -> None:
    bench.produce("a1", "a2", key="a")
    bench.retry(bench.lease().lease, delay=10)
    refused(bench, 0)
    bench.send(1)
    bench.advance(10)
    assert bench.drain() == ["a1"]


@pytest.mark.parametrize("to", [b"", b"elsewhere", ELSEWHERE + b"\0", "elsewhere"])
def test_a_destination_that_is_none_is_refused(bench: Bench, to: bytes) -> None:
    bench.produce("a")
    with pytest.raises(InvalidRequest, match="; make it with"):
        bench.send(0, to=to)
    assert bench.life(0) is Life.READY


def test_nothing_or_the_same_item_twice(bench: Bench) -> None:
    bench.produce("a", "b")
    assert (bench.send(), sequences(bench)) == (0, [])
    assert bench.send(1, 1, 0, 1) == 2
    assert on_their_way(bench) == [[0, 2]]


def test_a_destination_is_an_incarnation_and_a_partition() -> None:
    assert place_of(destination((1 << 64) - 1, (1 << 32) - 1)) == ((1 << 64) - 1, (1 << 32) - 1)
    assert place_of(ELSEWHERE) == (0xDEAD, 3)


# -- on its way ----------------------------------------------------------------------------------------


def test_nothing_happens_to_an_item_on_its_way(bench: Bench) -> None:
    bench.produce("a", "b", "a1", keys=[None, None, "a"], ttl=10)
    bench.send(0, 2)
    bench.advance(11)
    assert [bench.life(offset) for offset in range(3)] == [Life.MOVING, Life.BURIED, Life.MOVING]
    assert bench.take() == []
    assert bench.clear(ready=True, scheduled=True, leased=True, buried=True) == 1
    assert bench.seek(0) == 1
    assert bench.redrive() == 0
    with pytest.raises(InvalidRequest, match="moving cannot be redriven"):
        bench.redrive(0)
    bench.restart()
    assert bench.counts == (1, 0, 0, 0, 0, 2)


def test_lowering_max_attempts_leaves_what_is_on_its_way_alone(bench: Bench) -> None:
    bench.produce("a", "b")
    bench.retry(bench.lease().lease)
    bench.send(0)
    assert bench.configure(max_attempts=1) == 1
    assert (bench.life(0), bench.partition.state.failures) == (Life.MOVING, {})


def test_its_bytes_stay_until_it_has_arrived(bench: Bench) -> None:
    bench.produce("a", "b", "c", "d")
    bench.send(1, 2)
    bench.drain(10)
    for runs in ((0, 4), (1, 2), (2, 3)):
        with pytest.raises(InvalidRequest, match=r"item [12] is not resolved"):
            bench.drop(*runs)
    assert bench.drop(0, 1) == 1
    assert bench.partition.payloads([1, 3]) == [b"b", b"c"]
    bench.deliver(70)
    assert bench.drop(0, 4) == 3


def test_retention_passes_it_by_until_it_has_arrived(bench: Bench) -> None:
    bench.configure(retention=Retention(max_age=1))
    bench.produce(*"abcd")
    bench.send(2)
    bench.drain(10)
    bench.clock.advance(1 * SECOND)
    bench.partition.compact()
    bench.partition.compact()
    assert bench.partition.state.dropped.runs == [0, 2, 3, 4]
    bench.kill()
    assert bench.partition.payloads([2, 3]) == [b"c"]
    bench.deliver(70)
    bench.partition.compact()
    assert (bench.partition.state.dropped.runs, bench.partition.state.moved) == ([0, 4], {})


# -- sequences -----------------------------------------------------------------------------------------


def test_two_sends_to_one_destination_keep_their_order(bench: Bench) -> None:
    bench.produce(*"abcd")
    for which in ((2,), (0, 3), (1,)):
        bench.send(*which)
    assert on_their_way(bench) == [[2, 3], [0, 1, 3, 4], [1, 2]]
    first, second, third = sequences(bench)
    assert first < second < third
    assert (bench.confirm(second), bench.confirm(third)) == (0, 0)  # not their turn
    assert bench.counts.moving == 4
    assert [bench.confirm(sequence) for sequence in (first, second, third)] == [1, 1, 1]
    assert (bench.partition.state.outbox, bench.counts.completed) == ({}, 4)


def test_each_destination_counts_for_itself(bench: Bench) -> None:
    bench.produce(*"abcd")
    bench.send(0)
    bench.send(1, to=OTHER)
    bench.send(2)
    [first, second], [other] = sequences(bench), sequences(bench, OTHER)
    assert (first, second) == (other, other + 1)
    assert bench.confirm(second, to=OTHER) == 0
    assert bench.confirm(other, to=OTHER) == 1
    assert sequences(bench) == [first, second]


@pytest.mark.parametrize("delivered", [False, True])
def test_sequences_grow_over_a_kill_right_after_a_send(bench: Bench, delivered: bool) -> None:
    bench.produce(*"abc")
    seen = []
    for offset in range(3):
        bench.send(offset)
        seen.append(sequences(bench)[-1])
        if delivered:
            bench.deliver()
        bench.kill()
        assert bench.life(offset) is (Life.COMPLETED if delivered else Life.MOVING)
    assert sorted(set(seen)) == seen
    epochs = [sequence >> EPOCH_SHIFT for sequence in seen]
    assert epochs == [epochs[0], epochs[0] + 1, epochs[0] + 2]


def test_a_sequence_whose_record_was_lost_with_the_machine_is_not_given_again(bench: Bench) -> None:
    bench.produce("a")
    bench.partition.run(Send([0], ELSEWHERE))  # never written
    [lost] = sequences(bench)
    bench.kill()
    assert (sequences(bench), bench.life(0)) == ([], Life.READY)
    bench.send(0)
    assert sequences(bench)[0] > lost


# -- it has arrived ------------------------------------------------------------------------------------


def test_an_item_that_arrived_is_resolved_and_its_old_id_tells_where_it_is(bench: Bench) -> None:
    bench.produce(*"abcdef")
    bench.send(1, 2, 4)
    assert bench.why(4) == "on its way to partition 3 of its destination"
    bench.deliver(70)
    bench.restart()
    places = [moved_to(bench.partition.state, offset) for offset in range(6)]
    assert places == [None, (0xDEAD, 3, 70), (0xDEAD, 3, 71), None, (0xDEAD, 3, 72), None]
    found = bench.partition.explain(4)
    assert (found.state, found.why, found.moved_to) == (Life.COMPLETED, "moved: it goes on elsewhere", (0xDEAD, 3, 72))
    assert bench.drain(10) == ["a", "d", "f"]
    assert bench.why(3) == "completed"


def test_why_an_item_on_its_way_was_buried_is_told(bench: Bench) -> None:
    bench.produce("a")
    bench.bury(bench.lease().lease, reason="no")
    bench.send(0, to=OTHER)
    found = bench.partition.explain(0)
    assert (found.state, found.reason) == (Life.MOVING, "no")
    assert found.why == "on its way to partition 4 of its destination, buried because: no"


def test_where_it_went_may_not_be_known(bench: Bench) -> None:
    bench.produce("a")
    bench.send(0)
    bench.deliver()
    assert (bench.life(0), bench.why(0)) == (Life.COMPLETED, "completed")


def test_a_wrong_or_repeated_confirmation_changes_nothing(bench: Bench) -> None:
    bench.produce("a", "b")
    assert bench.confirm(1, 70) == 0
    bench.send(0)
    [sequence] = sequences(bench)
    before = base.dump(bench.partition.state)
    assert [bench.confirm(wrong, 70) for wrong in (sequence - 1, sequence + 1, 0)] == [0, 0, 0]
    assert bench.confirm(sequence, 70, to=OTHER) == 0
    assert base.dump(bench.partition.state) == before
    assert bench.confirm(sequence, 70) == 1
    before = base.dump(bench.partition.state)
    assert bench.confirm(sequence, 80) == 0
    assert base.dump(bench.partition.state) == before


def test_an_item_that_went_on_elsewhere_is_not_sought_here(bench: Bench) -> None:
    bench.produce(*"abcd")
    bench.send(1, 2)
    bench.deliver(70)
    bench.drain(10)
    assert bench.seek(0) == 2
    assert bench.drain(10) == ["a", "d"]


def test_retention_forgets_where_dropped_items_went(bench: Bench) -> None:
    bench.produce(*"abcdef")
    bench.send(0, 1, 2, 3)
    bench.send(5)
    bench.deliver(70)
    bench.deliver(90)
    bench.drop(0, 2)
    bench.restart()
    places = [moved_to(bench.partition.state, offset) for offset in range(6)]
    assert places == [None, None, (0xDEAD, 3, 72), (0xDEAD, 3, 73), None, (0xDEAD, 3, 90)]
    assert bench.why(1) == "resolved, and let go by retention"
    bench.drop(3, 4)
    assert [moved_to(bench.partition.state, offset) for offset in (2, 3)] == [(0xDEAD, 3, 72), None]
    bench.drain()
    bench.drop(2, 6)
    assert bench.partition.state.moved == {}


# -- parked keys ---------------------------------------------------------------------------------------


def parked(bench: Bench) -> None:
    """Item 0 of key a is buried and parks it; a2 and a3 wait."""
    bench.configure(on_bury="park")
    bench.produce("a1", "a2", "a3", key="a")
    bench.bury(bench.lease().lease, reason="no")
    bench.send(0)


@pytest.mark.parametrize("freed_by", ["release", "clear"])
@pytest.mark.parametrize("delivered", [False, True])
def test_a_key_stays_parked_until_someone_frees_it(bench: Bench, delivered: bool, freed_by: str) -> None:
    parked(bench)
    assert bench.take() == []
    if delivered:
        bench.deliver(70)
    for _ in range(2):
        bench.restart()
        assert bench.take() == []
    assert bench.why(1) == "its key is parked: item 0 was buried; redrive or clear it"
    if freed_by == "release":
        assert (bench.release("b"), bench.release("a"), bench.release("a")) == (0, 1, 0)
    else:
        assert bench.clear(buried=True) == 0
    bench.kill()
    assert bench.drain() == ["a2", "a3"]
    assert bench.life(0) is (Life.COMPLETED if delivered else Life.MOVING)


def test_the_bytes_of_an_item_that_parks_its_key_stay(bench: Bench) -> None:
    parked(bench)
    bench.deliver(70)
    with pytest.raises(InvalidRequest, match="item 0 is not resolved"):
        bench.drop(0, 1)
    bench.release("a")
    assert bench.drop(0, 1) == 1


def test_clearing_the_buried_frees_keys_parked_here_and_elsewhere(bench: Bench) -> None:
    parked(bench)
    bench.produce("b1", "b2", key="b")
    bench.bury(bench.lease().lease, reason="no")
    assert bench.clear(buried=True) == 1
    assert bench.drain() == ["a2", "a3", "b2"]


def test_a_released_key_goes_on_and_what_was_buried_stays_so(bench: Bench) -> None:
    bench.configure(on_bury="park", lease_timeout=5 * SECOND)
    bench.produce("a1", "a2", "a3", key="a")
    bench.bury(bench.lease().lease)
    assert bench.release("a") == 1
    held = bench.lease()
    assert given(held) == [1]
    bench.bury(held.lease)
    assert bench.release("a") == 1
    assert (bench.drain(), bench.counts.buried) == (["a3"], 2)
    assert bench.redrive() == 2
    assert bench.drain() == ["a1", "a2"]
