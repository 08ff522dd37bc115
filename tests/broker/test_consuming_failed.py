"""What a stream said of items that failed: of one batch, of one that is repeated, and of what became of the others
meanwhile.
"""

import pytest

from penstock.broker.streams import StreamCoordinator
from penstock.errors import OutcomeUnknown
from penstock.logs.files.inbox import FileInbox
from penstock.operations import SeekItems
from penstock.testing import Halt
from penstock.words import ids
from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.grants import (
    fail,
    fail_items,
    grant,
    granted,
    ids_of_texts,
    produce_keyed,
    renew_operation,
    take_grant,
    take_grant_operation,
)
from tests.broker.other_process import ask_owner, numbers_by_key
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage

# -- in a key's line ---------------------------------------------------------------------------------------


def test_items_behind_a_buried_one_are_completed(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    produce_keyed(queue, *[f"k:{n}" for n in range(5)], *[f"l:{n}" for n in range(5)])
    take_grant(file_broker, queue)
    fail_items(file_broker, queue, ids_of_texts(granted(file_broker, queue, 1), "k:1", "k:3", "l:0"), "bury")
    assert take_grant(file_broker, queue, 1) == (1, 0)
    assert queue.counts() == {"completed": 7, "buried": 3}
    queue.redrive_buried()
    assert take_grant(file_broker, queue, 1) == (2, 3)
    assert numbers_by_key([*granted(file_broker, queue, 2).values()]) == {"k": [1, 3], "l": [0]}


def test_buried_for_several_reasons(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    produce_keyed(queue, *[f"k:{n}" for n in range(5)])
    take_grant(file_broker, queue)
    found = granted(file_broker, queue, 1)
    fail_items(file_broker, queue, ids_of_texts(found, "k:3"), "bury", reason="x")
    fail_items(file_broker, queue, ids_of_texts(found, "k:1"), "bury", reason="y")
    assert take_grant(file_broker, queue, 1) == (1, 0)
    assert queue.counts() == {"completed": 3, "buried": 2}
    assert [queue.explain(id).reason for id in ids_of_texts(found, "k:1", "k:3")] == ["y", "x"]


def test_one_buried_and_one_retried_of_a_key(file_broker: BrokerUnderTest) -> None:
    """What stands behind the retried one comes again with it, in order."""
    queue = file_broker.create()
    produce_keyed(queue, *[f"k:{n}" for n in range(6)], *[f"l:{n}" for n in range(3)])
    take_grant(file_broker, queue)
    found = granted(file_broker, queue, 1)
    fail_items(file_broker, queue, ids_of_texts(found, "k:3", "l:1"), "retry", reason="once more")
    fail_items(file_broker, queue, ids_of_texts(found, "k:1", "k:5"), "bury")
    assert take_grant(file_broker, queue, 1) == (2, 4)
    assert numbers_by_key([*granted(file_broker, queue, 2).values()]) == {"k": [3, 4], "l": [1, 2]}
    assert [queue.explain(id).attempts for id in ids_of_texts(found, "k:3", "k:4")] == [2, 1]
    assert take_grant(file_broker, queue, 2) == (2, 0)
    assert queue.counts() == {"completed": 7, "buried": 2}


@pytest.mark.parametrize("away", [0, 1_000])
@pytest.mark.parametrize("cut_at", ["_fail", "_complete", "remove_blob"])
def test_an_owner_cut_off_between_burying_and_completing(file_broker: BrokerUnderTest, cut_at: str, away: int) -> None:
    queue = file_broker.create()
    produce_keyed(queue, *[f"k:{n}" for n in range(5)])
    take_grant(file_broker, queue)
    found = granted(file_broker, queue, 1)
    fail_items(file_broker, queue, ids_of_texts(found, "k:1"), "bury")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileInbox if cut_at == "remove_blob" else StreamCoordinator, cut_at, _cut_off)
        with pytest.raises(Halt):
            ask_owner(file_broker, queue, take_grant_operation(done=1))
    file_broker.advance(away)  # the lease ends before the owner does: an opening would extend it
    file_broker.kill()
    file_broker.turn()
    ask_owner(file_broker, queue, take_grant_operation(done=1))
    if cut_at == "_fail" and away:
        assert queue.counts() == {"completed": 4, "ready": 1}, "its lease has ended, so it comes again"
    else:
        assert queue.counts() == {"completed": 4, "buried": 1}


def _cut_off(*args: object, **options: object) -> None:
    raise Halt("here")


# -- a batch that is repeated --------------------------------------------------------------------------------


def test_failures_of_a_batch_are_forgotten_when_it_is_repeated(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce(*"abc")
    take_grant(file_broker, queue, want=2)
    fail_items(file_broker, queue, ids_of_texts(granted(file_broker, queue, 1), "a"), "bury")
    ask_owner(file_broker, queue, renew_operation())
    assert grant(file_broker, queue, 1).failed, "a sign of life says nothing of that"
    ask_owner(file_broker, queue, renew_operation(run="2", again=1))
    assert grant(file_broker, queue, 1).failed, "that one is committed"
    ask_owner(file_broker, queue, renew_operation(run="2", again=0))
    assert grant(file_broker, queue, 1).failed == []
    assert take_grant(file_broker, queue, 1) == (2, 1)
    assert queue.counts() == {"completed": 2, "leased": 1}


# -- many reasons ----------------------------------------------------------------------------------------------


def test_many_reasons_at_once(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = file_broker.create()
    queue.produce(*[f"{n}" for n in range(50)])
    take_grant(file_broker, queue)
    saved = []
    save = StreamCoordinator._save

    def noted(self: StreamCoordinator, incarnation: int, stream: str, number: int, found: object) -> None:
        saved.append(number)
        save(self, incarnation, stream, number, found)  # type: ignore[arg-type]

    monkeypatch.setattr(StreamCoordinator, "_save", noted)
    lots = [(f"because {n}", {0: [n]}) for n in range(40)] + [("the last word", {0: [7, 7, 99]})]
    assert fail(file_broker, queue, "bury", lots) == (40, 1) and saved == [1]
    assert fail(file_broker, queue, "bury", [("no, because", {0: [5]})]) == (1, 0)
    take_grant(file_broker, queue, 1, want=0)
    assert queue.counts() == {"buried": 40, "completed": 10}
    reasons = {n: queue.explain(ids.format_id(0, n)).reason for n in (0, 5, 7, 39)}
    assert reasons == {0: "because 0", 5: "no, because", 7: "the last word", 39: "because 39"}


# -- what happened meanwhile -------------------------------------------------------------------------------------


def test_items_sought_again_since_are_not_completed_without_a_lease(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.produce(*"abc")
    take_grant(file_broker, queue, timeout=10)
    file_broker.advance_in_steps(10)
    queue.lease(2, consumer="other").complete()
    queue.call(SeekItems(start={0: 0}))
    assert queue.counts() == {"ready": 3}
    assert take_grant(file_broker, queue, 1) == (2, 2)
    assert sorted(granted(file_broker, queue, 2).values()) == ["a", "b"]
    assert queue.counts() == {"completed": 1, "leased": 2}


def test_a_failing_partition_stops_no_stream() -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create(partitions=3)
    produce_keyed(queue, *[f"k{n}:1" for n in range(30)])
    lost = queue.loop.engine.handles[1].state.ready
    files.break_partition(1)
    with pytest.raises(OutcomeUnknown):
        produce_keyed(queue, *[f"k{n}:2" for n in range(30)])
    assert not queue.loop.engine.handles[1].is_usable and lost
    assert ask_owner(broker, queue, take_grant_operation(want=1_000)).items == 30 - lost
    files.failing_paths.clear()
    broker.embedded.close()
