"""Which drop is adopted first: nothing overtakes what the ledger would then refuse."""

import random

from penstock.logs.files.inbox import MANIFEST
from penstock.logs.store import write_name
from penstock.testing import SimulatedFiles
from tests.broker.broker_under_test import BrokerUnderTest
from tests.broker.other_process import BEGAN, KEYS, ROOT, look_into_inbox, numbers_by_key, other_process, texts


def test_the_drops_of_a_source_are_adopted_by_number(file_broker: BrokerUnderTest) -> None:
    """An owner that was away finds several batches of a stream: none may be taken for one that came before."""
    queue, other = file_broker.create(partitions=2), other_process(file_broker)
    numbers = [*range(1, 31)]
    random.Random(5).shuffle(numbers)
    for number in numbers:
        other.drop(queue, *texts(number, number + 1), number=number)
    look_into_inbox(file_broker)
    assert numbers_by_key(queue.drain()) == {key: [*range(1, 31)] for key in KEYS}
    assert other.inbox_files() == []


def test_what_was_written_earlier_is_adopted_earlier(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    ages = [*range(30)]
    random.Random(6).shuffle(ages)
    for age in ages:
        other.drop(queue, f"k:{age}", source=f"write {age}", write=write_name(BEGAN + age))
    look_into_inbox(file_broker)
    assert numbers_by_key(queue.drain()) == {"k": [*range(30)]}


def test_numbers_count_for_more_than_dates(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    for number, age in ((1, 50), (2, 10), (3, 30)):
        other.drop(queue, f"k:{number}", number=number, write=write_name(BEGAN + age))
    other.drop(queue, "x:1", source="another", write=write_name(BEGAN + 20))
    look_into_inbox(file_broker)
    assert queue.drain() == ["k:1", "x:1", "k:2", "k:3"]


def test_nothing_overtakes_a_drop_that_must_wait(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.drop(queue, "k:1", number=1)
    first = f"{ROOT}/inbox/{other.inbox.waiting()[0].label}/{MANIFEST}"
    other.drop(queue, "k:2", number=2)
    other.drop(queue, "k:3", source="another")

    class Unreadable(SimulatedFiles):
        def open(self, path: str, mode: str) -> int:
            if path == first:
                raise OSError(5, "Input/output error", path)
            return super().open(path, mode)  # type: ignore[arg-type]

    files = other.files
    files.__class__ = Unreadable  # the disk cannot read one file for a while
    look_into_inbox(file_broker)
    assert queue.counts() == {}
    files.__class__ = SimulatedFiles
    assert not look_into_inbox(file_broker), "not at once"
    file_broker.advance(1)
    look_into_inbox(file_broker)
    assert numbers_by_key(queue.drain()) == {"k": [1, 2, 3]}
