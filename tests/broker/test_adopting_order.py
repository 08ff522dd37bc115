"""The order of adoption: no write is adopted before one of the same source with a lower number."""

import random

from penstock.logs.files.inbox import MANIFEST
from penstock.logs.store import write_name
from penstock.testing import SimulatedFiles
from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.other_process import BEGAN, KEYS, ROOT, numbers_by_key, other_process, process_inbox, texts


def test_the_writes_of_a_source_are_adopted_by_number(file_broker: BrokerUnderTest) -> None:
    """An owner that was closed finds several batches of a stream; all must be adopted."""
    queue, other = file_broker.create(partitions=2), other_process(file_broker)
    numbers = [*range(1, 31)]
    random.Random(5).shuffle(numbers)
    for number in numbers:
        other.publish_texts(queue, *texts(number, number + 1), number=number)
    process_inbox(file_broker)
    assert numbers_by_key(queue.drain()) == {key: [*range(1, 31)] for key in KEYS}
    assert other.inbox_files() == []


def test_earlier_writes_are_adopted_first(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    ages = [*range(30)]
    random.Random(6).shuffle(ages)
    for age in ages:
        other.publish_texts(queue, f"k:{age}", source=f"write {age}", write=write_name(BEGAN + age))
    process_inbox(file_broker)
    assert numbers_by_key(queue.drain()) == {"k": [*range(30)]}


def test_numbers_count_for_more_than_dates(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    for number, age in ((1, 50), (2, 10), (3, 30)):
        other.publish_texts(queue, f"k:{number}", number=number, write=write_name(BEGAN + age))
    other.publish_texts(queue, "x:1", source="another", write=write_name(BEGAN + 20))
    process_inbox(file_broker)
    assert queue.drain() == ["k:1", "x:1", "k:2", "k:3"]


def test_no_write_overtakes_one_that_must_wait(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish_texts(queue, "k:1", number=1)
    first = f"{ROOT}/inbox/{other.inbox.waiting()[0].label}/{MANIFEST}"
    other.publish_texts(queue, "k:2", number=2)
    other.publish_texts(queue, "k:3", source="another")

    class Unreadable(SimulatedFiles):
        def open(self, path: str, mode: str) -> int:
            if path == first:
                raise OSError(5, "Input/output error", path)
            return super().open(path, mode)  # type: ignore[arg-type]

    files = other.files
    files.__class__ = Unreadable  # the disk cannot read one file for a while
    process_inbox(file_broker)
    assert queue.counts() == {}
    files.__class__ = SimulatedFiles
    assert not process_inbox(file_broker), "not at once"
    file_broker.advance(1)
    process_inbox(file_broker)
    assert numbers_by_key(queue.drain()) == {"k": [1, 2, 3]}
