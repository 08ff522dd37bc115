"""Why is this item not running? Every sentence that can be the answer."""

import pytest

from penstock.rules.item_states import Life
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from tests.partition_under_test import Bench


def test_ready(bench: Bench) -> None:
    bench.produce("a")
    assert bench.why(0) == "ready: the next lease that reaches it gets it"


def test_paused(bench: Bench) -> None:
    bench.produce("a")
    bench.pause(lease=True)
    assert bench.why(0) == "ready, but leasing is paused; resume it"


def test_leased(bench: Bench) -> None:
    bench.produce("a", "b")
    granted = bench.lease(1, "host-1", timeout=30)
    bench.lease(1)
    bench.advance(10)
    found = bench.partition.explain(0)
    assert found.why == "leased by host-1 for another 20.0 s"
    assert (found.state, found.attempts, found.consumer) == (Life.LEASED, 1, "host-1")
    assert (found.lease, found.until) == (granted.lease, granted.deadline)
    assert bench.why(1) == "leased by an unnamed consumer for another 50.0 s"


def test_scheduled(bench: Bench) -> None:
    when = bench.after(90)
    bench.produce("a", at=when)
    found = bench.partition.explain(0)
    assert (found.state, found.why, found.until) == (Life.SCHEDULED, "scheduled, ready in 90.0 s", when)


def test_backing_off(bench: Bench) -> None:
    bench.produce("a")
    bench.retry(bench.lease().lease, delay=30, reason="busy")
    found = bench.partition.explain(0)
    assert found.why == "backing off after attempt 1 (busy), ready in 30.0 s"
    assert (found.attempts, found.reason, found.until) == (1, "busy", bench.partition.now().elapsed + 30 * SECOND)


def test_a_key_held_by_a_lease(bench: Bench) -> None:
    bench.produce("a1", "b1", keys=["a", "b"])
    granted = bench.lease(2, "host-1")
    bench.produce("b2", key="b")
    for _ in range(2):  # before and after it was passed over
        found = bench.partition.explain(2)
        assert (found.why, found.held_by, found.until) == ("its key is held: item 1 is leased by host-1", 1, granted.deadline)
        bench.lease()


def test_a_key_held_by_a_back_off(bench: Bench) -> None:
    bench.produce("a1", "a2", key="a")
    bench.retry(bench.lease().lease, delay=30)
    found = bench.partition.explain(1)
    assert (found.why, found.held_by) == ("its key is held: item 0 backs off", 0)
    assert found.until == bench.partition.now().elapsed + 30 * SECOND


def test_a_parked_key(bench: Bench) -> None:
    bench.configure(on_bury="park")
    bench.produce("a1", "a2", key="a")
    bench.bury(bench.lease().lease, reason="no")
    found = bench.partition.explain(1)
    assert (found.why, found.held_by) == ("its key is parked: item 0 was buried; redrive or clear it", 0)


def test_first_of_its_key_and_behind_it(bench: Bench) -> None:
    bench.produce("a1", "a2", "a3", key="a")
    bench.complete(bench.lease(2).lease)
    assert bench.why(1) == "ready: first of its key, the next lease that reaches it gets it"
    found = bench.partition.explain(2)
    assert (found.why, found.held_by) == ("ready, behind item 1 of the same key", 1)


def test_buried(bench: Bench) -> None:
    bench.produce("a")
    bench.bury(bench.lease().lease, reason="no such customer")
    found = bench.partition.explain(0)
    assert (found.state, found.why, found.attempts) == (Life.BURIED, "buried because: no such customer", 1)


def test_completed(bench: Bench) -> None:
    bench.produce("a")
    bench.drain()
    assert bench.why(0) == "completed"


@pytest.mark.parametrize("offset", [1, -1])
def test_an_item_that_was_never_there(bench: Bench, offset: int) -> None:
    bench.produce("a")
    with pytest.raises(InvalidRequest, match="; the next to be given is 1"):
        bench.why(offset)
