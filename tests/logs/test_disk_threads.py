"""The threads that wait for disks: openings replay one at a time, and one that a caller waits for comes first."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from penstock.logs import disk_threads
from penstock.logs.disk_threads import DiskThreads

WAIT_SECONDS = 60
Opening = Callable[[Callable[[], None]], None]


class Openings:
    """Submits openings and records the order in which they ran; the first one waits until the test lets it go on."""

    def __init__(self) -> None:
        self.disk = DiskThreads(lambda incarnation, partition: incarnation)
        self.began, self.go_on = threading.Event(), threading.Event()
        self.ran: list[str] = []
        self.disk.run_opening(1, 0, self._first, lambda: False)
        assert self.began.wait(WAIT_SECONDS)

    def _first(self, replayed: Callable[[], None]) -> None:
        self.began.set()
        assert self.go_on.wait(WAIT_SECONDS)
        self.ran.append("first")
        replayed()

    def _later(self, name: str, ended: threading.Event, replayed: Callable[[], None]) -> None:
        self.ran.append(name)
        ended.set()

    def submit(self, name: str, root: int = 1, *, urgent: bool = False) -> threading.Event:
        ended = threading.Event()
        self.disk.run_opening(root, 0, partial(self._later, name, ended), lambda: urgent)
        return ended


def test_an_urgent_opening_comes_before_others() -> None:
    openings = Openings()
    openings.submit("second")
    openings.submit("third")
    openings.submit("urgent", urgent=True)
    openings.go_on.set()
    openings.disk.close()
    assert openings.ran[:2] == ["first", "urgent"]
    assert sorted(openings.ran[2:]) == ["second", "third"]


def test_an_opening_waits_for_the_replay_of_another_and_not_for_the_rest_of_it() -> None:
    openings = Openings()
    replayed, synced = threading.Event(), threading.Event()

    def slow_sync(on_replayed: Callable[[], None]) -> None:
        on_replayed()
        replayed.set()
        assert synced.wait(WAIT_SECONDS)

    openings.go_on.set()
    openings.disk.run_opening(1, 1, slow_sync, lambda: True)
    assert replayed.wait(WAIT_SECONDS)
    assert openings.submit("next").wait(WAIT_SECONDS)
    synced.set()
    openings.disk.close()


def test_another_root_does_not_wait() -> None:
    openings = Openings()
    assert openings.submit("elsewhere", root=2).wait(WAIT_SECONDS)
    openings.go_on.set()
    openings.disk.close()
    assert openings.ran == ["elsewhere", "first"]


def test_an_opening_that_hangs_does_not_hold_up_others_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_threads, "REPLAY_SECONDS", 0.01)
    openings = Openings()
    assert openings.submit("second").wait(WAIT_SECONDS)
    openings.go_on.set()
    openings.disk.close()
    assert openings.ran == ["second", "first"]
