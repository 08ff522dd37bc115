"""A lock-free reader while segments are dropped and rewritten: it returns right bytes, or a Gap that says why not."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.log import Frame, FrameType, Gap
from penstock.testing import SimulatedFiles
from tests.logs.backends import INCARNATION, PARTITION, base_draft, comparable
from tests.logs.items import SECOND, START, fill, items_draft, runs, served_items
from tests.logs.scripted_owner import FOLDER, ROOT

STOP = 120
KEPT = [0, 14, 15, 30, 50, 70]


def rotate_and_drop(log: FileLog) -> None:
    log.rotate(base_draft(STOP))
    log.drop(5)
    log.append([items_draft(STOP, STOP + 1)])


ACTIONS: dict[str, Callable[[FileLog], object]] = {
    "drop": lambda log: log.drop(2),
    "rewrite": lambda log: log.rewrite(0, 2, runs(KEPT)),
    "both": lambda log: (log.rewrite(0, 2, runs(KEPT)), log.drop(1)),
    "rotate and drop all before": rotate_and_drop,
}
STILL_THERE = {"drop": range(48, STOP), "rewrite": range(72, STOP), "both": range(72, STOP), "rotate and drop all before": range(0)}


class InterceptedFiles:
    """Files that call `meddle` just before their n-th call."""

    def __init__(self, files: SimulatedFiles, call: int, meddle: Callable[[], object]) -> None:
        self._files = files
        self._left = call
        self._meddle = meddle
        self.done = False

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        return self._counted(found) if callable(found) else found

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._left -= 1
            if not self._left:
                self.done = True
                self._meddle()
            return call(*arguments)

        return counted


def owned() -> tuple[SimulatedFiles, FileLog]:
    files = SimulatedFiles()
    log = FileStore.open([ROOT], files=files).log(INCARNATION, PARTITION)
    list(log.recover())
    fill(log)
    return files, log


def check(found: Iterable[Frame | Gap], action: str) -> None:
    """No wrong item, no item twice, no kept item missing; an item missing without a Gap was removed by a rewrite."""
    result = served_items(found)
    assert all("retention" in gap.why for gap in result.gaps)
    excused = {offset for gap in result.gaps for offset in range(gap.start, gap.stop)}
    missing = set(range(STOP)) - {offset for offset, content in result.items.items() if content} - excused
    assert not missing & set(STILL_THERE[action])
    if action == "rewrite":
        assert not missing & set(KEPT)
    if action == "drop":  # a listing begun after it has nothing to say of what was before
        assert not {offset for offset in missing if offset >= min(result.items)}


READS: dict[str, Callable[[PublishedLog], Iterable[Frame | Gap]]] = {
    "read": lambda reader: reader.read(0, STOP),
    "reads": lambda reader: [found for start in range(0, STOP, 24) for found in reader.read(start, start + 24)],
    "frames": lambda reader: reader.frames(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("action", ACTIONS)
def test_retention_at_every_call_of_a_read(action: str, read: str) -> None:
    call = 0
    while True:
        call += 1
        files, log = owned()
        meddled = InterceptedFiles(files, call, lambda log=log: ACTIONS[action](log))  # type: ignore[misc]
        reader = PublishedLog(meddled, FOLDER, INCARNATION, PARTITION)
        found = list(READS[read](reader))
        if read == "reads":
            found = list(dict.fromkeys(found))  # what retention dropped is said in each
        assert STOP not in served_items(found).items, "what is not synced is not shown"
        check(found, action)
        check(dict.fromkeys(READS[read](reader)), action)
        if not meddled.done:
            return


@pytest.mark.parametrize("action", ACTIONS)
def test_retention_at_every_call_of_recovery(action: str) -> None:
    call = 0
    while True:
        call += 1
        files, log = owned()
        meddled = InterceptedFiles(files, call, lambda log=log: ACTIONS[action](log))  # type: ignore[misc]
        found = comparable(PublishedLog(meddled, FOLDER, INCARNATION, PARTITION).recover())
        assert found[0].type is FrameType.BASE
        assert found[-1].sequence in (44, 45)
        assert [frame.sequence for frame in found] == list(range(found[0].sequence, found[-1].sequence + 1))
        if not meddled.done:
            return


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("begun", [1, 9, 30])
def test_retention_between_two_frames_of_a_listing(action: str, begun: int) -> None:
    """The same reader also does other reads meanwhile."""
    files, log = owned()
    reader = PublishedLog(files, FOLDER, INCARNATION, PARTITION)
    listing = reader.frames()
    found = [next(listing) for _ in range(begun)]
    ACTIONS[action](log)
    log.append([items_draft(STOP + 1, STOP + 2)])
    log.sync()
    assert STOP + 1 in served_items(reader.read(STOP, STOP + 2)).items
    found += listing
    check(found, action)
    assert [frame.sequence for frame in comparable(frame for frame in found if not isinstance(frame, Gap))] == sorted(
        {frame.sequence for frame in found if not isinstance(frame, Gap)}
    )


def test_segments_and_times_follow_retention() -> None:
    files, log = owned()
    reader = PublishedLog(files, FOLDER, INCARNATION, PARTITION)
    assert [facts.base_offset for facts in reader.segments()] == [0, 24, 48, 72, 96]
    assert reader.offset_at(START + 2 * SECOND) == 12
    log.drop(1)
    log.rewrite(0, 1, runs([50]))
    log.rotate(base_draft(STOP))
    assert reader.segments() == log.segments()
    assert [facts.rewritten for facts in reader.segments()] == [True, False, False, False]
    assert reader.offset_at(START) == 50
    assert reader.offset_at(START + 99 * SECOND) == STOP


@pytest.mark.parametrize("deleted", [True, False], ids=["position deleted", "position there"])
def test_offset_at_a_time_after_the_last_item_is_the_next_offset(deleted: bool) -> None:
    files, log = owned()
    log.close()
    if deleted:
        files.remove(f"{FOLDER}/synced")
    assert PublishedLog(files, FOLDER, INCARNATION, PARTITION).offset_at(START * 2) == STOP
