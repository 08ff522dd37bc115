"""A batch over several partitions: each part is whole or absent, and its repetition adds only what is missing."""

import copy

from penstock.operations import ListItems
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, batch_of, ids_of, keys_at
from tests.broker.crashes import crash_at_each_call, disk_after
from tests.broker.storages import SimulatedStorage

WIDTH = 4


def mixed(queue: QueueUnderTest) -> Batch:
    """Three items for each of four partitions, one with a dedup id, and three that may go anywhere."""
    owners = [keys_at(queue, number, 3) for number in range(WIDTH)]
    keys = [key for number in range(3) for own in owners for key in own[number : number + 1]]
    texts = [f"{key}!" for key in keys]
    return batch_of(*texts, "x", "y", "z", keys=[*keys, None, None, None], dedups=[None] * len(keys) + ["dedup", None, None])


def texts_of(batch: Batch) -> list[str]:
    return [payload.decode() for payload in batch.payloads]


def start() -> tuple[SimulatedFiles, MicrosecondClock, Batch]:
    batches: list[Batch] = []

    def work(broker: BrokerUnderTest) -> None:
        queue = broker.create(partitions=WIDTH)
        batches.append(mixed(queue))
        queue.produce("before")

    return *disk_after(work), batches[0]


def there(queue: QueueUnderTest) -> dict[int, list[str]]:
    """By partition, every item of the batch that was stored, in order."""
    found: dict[int, list[str]] = {number: [] for number in range(WIDTH)}
    for one in queue.call(ListItems(limit=1_000)):
        text = one.batch.payloads[one.index].decode()
        if text != "before":
            found.setdefault(one.partition, []).append(text)
    return found


def test_each_part_is_whole_or_absent_and_the_repetition_adds_what_is_missing() -> None:
    files, clock, batch = start()
    whole: dict[int, list[str]] = {}
    partly = 0

    def place(broker: BrokerUnderTest) -> None:
        queue = broker.find()
        ids_of(queue.produce_batch(batch, "r"), len(batch))
        whole.update(there(queue))

    place(BrokerUnderTest(SimulatedStorage(files.copy()), clock=copy.deepcopy(clock)))
    assert sorted(text for part in whole.values() for text in part) == sorted(texts_of(batch))
    for broker, _ in crash_at_each_call((files, clock), place):
        queue = broker.find()
        found = there(queue)
        assert all(found[number] in ([], whole[number]) for number in range(WIDTH)), "a part is whole or absent"
        partly += 0 < sum(map(bool, found.values())) < WIDTH
        again = ids_of(queue.produce_batch(batch, "r"), len(batch))
        assert there(queue) == whole
        assert len(set(again)) == len(batch)
        assert ids_of(queue.produce_batch(batch, "r"), len(batch)) == again, "and the ids stay the same"
        assert sorted(queue.drain(3)) == sorted(["before", *texts_of(batch)])
    assert partly, "it was cut off between two partitions"


def test_a_repeated_batch_across_a_resize_adds_what_is_missing() -> None:
    """The batch, a resize, the batch again, cut off anywhere; then once more: every item once, whichever map it was cut
    by.
    """
    for widths in ([5], [6, 3]):
        files, clock, batch = start()

        def work(broker: BrokerUnderTest, widths: list[int] = widths, batch: Batch = batch) -> None:
            queue = broker.find()
            ids_of(queue.produce_batch(batch, "r"), len(batch))
            for width in widths:
                queue.resize(width)
            ids_of(queue.produce_batch(batch, "r"), len(batch))

        for broker, done in crash_at_each_call((files, clock), work, step=6):
            queue = broker.find()
            if not done:
                for width in widths:
                    if queue.info.partitions != width:
                        queue.resize(width)
            broker.turn()
            first = ids_of(queue.produce_batch(batch, "r"), len(batch))
            assert len(set(first)) == len(batch)
            assert ids_of(queue.produce_batch(batch, "r"), len(batch)) == first
            found = [text for part in there(queue).values() for text in part]
            assert sorted(found) == sorted(texts_of(batch)), f"{widths}"
            assert sorted(queue.drain(3)) == sorted(["before", *texts_of(batch)])


def test_a_batch_may_mix_everything(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=3)
    batch = batch_of(
        "plain", "keyed", "later", "first", keys=[None, "k", "k2", None], priorities=[5, 5, 5, 0], dedups=[None, None, None, "once"]
    )
    batch.ats = [0, 0, broker.after(60), 0]
    found = ids_of(queue.produce_batch(batch), 4)
    assert len(set(found)) == 4
    assert queue.explain(found[2]).state == "scheduled"
    assert set(queue.drain()) == {"plain", "keyed", "first"}
    again = ids_of(queue.produce_batch(batch_of("another", dedups=["once"])), 1)
    assert again == [found[3]], "a dedup id inside its window gives the first one's id"
    broker.advance_in_steps(60)
    assert queue.drain() == ["later"]


def test_a_repeated_settle_answers_what_it_answered(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    queue.produce("a", key=keys_at(queue, 0)[0])
    queue.produce("b", key=keys_at(queue, 1)[0])
    held = queue.lease()
    first = queue.settle("retry", held.parts, delay=5, request=b"s")
    broker.kill()
    assert queue.settle("retry", held.parts, delay=5, request=b"s") == first
    assert queue.counts() == {"scheduled": 2}
    broker.advance_in_steps(5)
    assert queue.lease().attempts == [2, 2], "once"
