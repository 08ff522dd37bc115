"""A view of a directory: through its owner while that answers, else from its files."""

from pathlib import Path
from threading import Timer

import pytest

import penstock
from penstock.broker.directory_view import DirectoryView
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.files.lock import take_lock
from penstock.operations import ClearItems, DescribeOwner, FindQueue, ReadStats
from penstock.words.clock import MILLISECOND, SystemClock
from penstock.words.errors import BrokerClosed, InvalidRequest, QueueNotFound


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("orders").produce_many(["a", "b"])
    return tmp_path / "data"


def ready(view: DirectoryView) -> int:
    return view.call(ReadStats(queue=view.call(FindQueue(name="orders")).incarnation)).ready


def test_it_follows_the_owner(place: Path) -> None:
    notes: list[str] = []
    view = DirectoryView(place, on_silent=notes.append)
    assert (ready(view), view.is_live, view.call(DescribeOwner()).pid) == (2, False, 0)
    with penstock.open(place) as broker:
        broker.queue("orders").lease(1)
        assert (ready(view), view.is_live) == (1, True)
        with pytest.raises(QueueNotFound, match="nothing"):
            view.call(FindQueue(name="nothing"))
    view.refresh()
    assert (ready(view), view.is_live) == (1, False)
    with penstock.open(place) as broker:
        broker.queue("orders").produce("c")
        assert (ready(view), view.is_live) == (2, True)
    assert notes == []
    view.close()
    with pytest.raises(BrokerClosed):
        ready(view)


def test_it_answers_queries_only(place: Path) -> None:
    view = DirectoryView(place)
    with pytest.raises(InvalidRequest, match="ClearItems is no query"):
        view.call(ClearItems(queue=1, states=["ready"]))
    with pytest.raises(InvalidRequest, match="only looked at"):
        view.auto_extend(1, 0, 0, 1.0)
    view.close()


def test_a_process_that_is_opening_the_directory_is_no_owner_that_answers(place: Path) -> None:
    notes: list[str] = []
    lock = take_lock(SystemFiles(), str(place), SystemClock(), exclusive=False)
    view = DirectoryView(place, patience=20 * MILLISECOND, on_silent=notes.append)
    assert (ready(view), view.is_live) == (2, False)
    assert len(notes) == 1 and "does not answer; this is read from its files" in notes[0]
    lock.release()
    view.close()


def test_an_opening_waits_for_a_process_that_has_just_begun_to_open(place: Path) -> None:
    """Between taking the lock and telling clients how to connect, an owner looks like one that does not share."""
    lock = take_lock(SystemFiles(), str(place), SystemClock(), exclusive=False)
    Timer(0.1, lock.release).start()
    with penstock.open(place) as broker:
        assert broker.queue("orders").stats().ready == 2
