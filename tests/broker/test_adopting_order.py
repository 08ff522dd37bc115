"""Which drop is adopted first: nothing overtakes what the ledger would then refuse."""

import random

from penstock.logs.files.inbox import MANIFEST
from penstock.logs.store import write_name
from penstock.testing import SimulatedFiles
from tests.broker.broker_under_test import Rig
from tests.broker.other_process import BEGAN, KEYS, ROOT, look, order_of, outsider, texts


def test_the_drops_of_a_source_are_adopted_by_number(rig: Rig) -> None:
    """An owner that was away finds several batches of a stream: none may be taken for one that came before."""
    desk, other = rig.create(partitions=2), outsider(rig)
    numbers = [*range(1, 31)]
    random.Random(5).shuffle(numbers)
    for number in numbers:
        other.drop(desk, *texts(number, number + 1), number=number)
    look(rig)
    assert order_of(desk.drain()) == {key: [*range(1, 31)] for key in KEYS}
    assert other.left() == []


def test_what_was_written_earlier_is_adopted_earlier(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    ages = [*range(30)]
    random.Random(6).shuffle(ages)
    for age in ages:
        other.drop(desk, f"k:{age}", source=f"write {age}", write=write_name(BEGAN + age))
    look(rig)
    assert order_of(desk.drain()) == {"k": [*range(30)]}


def test_numbers_count_for_more_than_dates(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    for number, age in ((1, 50), (2, 10), (3, 30)):
        other.drop(desk, f"k:{number}", number=number, write=write_name(BEGAN + age))
    other.drop(desk, "x:1", source="another", write=write_name(BEGAN + 20))
    look(rig)
    assert desk.drain() == ["k:1", "x:1", "k:2", "k:3"]


def test_nothing_overtakes_a_drop_that_must_wait(rig: Rig) -> None:
    desk, other = rig.create(), outsider(rig)
    other.drop(desk, "k:1", number=1)
    first = f"{ROOT}/inbox/{other.inbox.waiting()[0].label}/{MANIFEST}"
    other.drop(desk, "k:2", number=2)
    other.drop(desk, "k:3", source="another")

    class Unreadable(SimulatedFiles):
        def open(self, path: str, mode: str) -> int:
            if path == first:
                raise OSError(5, "Input/output error", path)
            return super().open(path, mode)  # type: ignore[arg-type]

    files = other.files
    files.__class__ = Unreadable  # the disk cannot read one file for a while
    look(rig)
    assert desk.counts() == {}
    files.__class__ = SimulatedFiles
    assert not look(rig), "not at once"
    rig.advance(1)
    look(rig)
    assert order_of(desk.drain()) == {"k": [1, 2, 3]}
