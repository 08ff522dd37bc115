"""How tables read their logs: a little at a time, each frame once, and with an error for what was deleted meanwhile."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock import Broker, NewItem
from penstock.errors import InvalidRequest
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.files.segment_files import SegmentFiles
from penstock.logs.log import ENDLESS, Frame, Gap
from penstock.rules.runs import offsets
from penstock.tables.dead import dead
from penstock.tables.events import events
from penstock.tables.items import READ_BYTES, items
from penstock.tables.state import state_rows
from penstock.words.limits import MIB
from tests.tables.published_queue import PublishedQueue, published_queue, rows

LAST = 1 << 60


class ReadSizes:
    """Records the reads of logs, and how much each returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        read = PublishedLog.read

        def watched(log: PublishedLog, start: int, stop: int, size_bytes: int = ENDLESS) -> list[Frame | Gap]:
            found = read(log, start, stop, size_bytes)
            self.sizes.append(sum(len(one.body) for one in found if not isinstance(one, Gap)))
            return found

        monkeypatch.setattr(PublishedLog, "read", watched)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> ReadSizes:
    return ReadSizes(monkeypatch)


# -- items ---------------------------------------------------------------------------------------------


def test_a_read_is_limited_to_about_a_mebibyte(tmp_path: Path, watched: ReadSizes) -> None:
    """Also where large items follow many small ones."""
    with penstock.open(tmp_path, durability="os", compression=False) as broker:
        queue = broker.create_queue("q")
        for _ in range(3_000):
            queue.produce(b"small")
        for _ in range(12):
            queue.produce(bytes(MIB // 2))
    with published_queue(tmp_path, "q") as seen:
        found = rows(items(seen.log(0), [0, 3_012], ["offset"]))
    assert [row["offset"] for row in found] == [*range(3_012)]
    assert max(watched.sizes) <= READ_BYTES + MIB // 2 + 1_000 and len(watched.sizes) < 15


@pytest.mark.parametrize("step", [2, 7, 1_000])
def test_a_frame_is_read_once_for_all_runs_in_it(tmp_path: Path, watched: ReadSizes, step: int) -> None:
    with penstock.open(tmp_path, durability="os") as broker:
        queue = broker.create_queue("q")
        for frame in range(3):
            queue.produce_many([NewItem(b"" if n % 5 == 3 else b"%d" % (10_000 * frame + n)) for n in range(10_000)])
    runs = [edge for offset in range(0, 30_000, step) for edge in (offset, offset + 1)]
    with published_queue(tmp_path, "q") as seen:
        found = rows(items(seen.log(0), runs, ["offset", "payload"], exact=True))
    assert found == [{"offset": n, "payload": b"" if n % 5 == 3 else b"%d" % n} for n in offsets(runs)]
    assert len(watched.sizes) <= 3


def test_scattered_unresolved_items_are_read_once(tmp_path: Path, watched: ReadSizes) -> None:
    with penstock.open(tmp_path, durability="os") as broker:
        queue = broker.create_queue("q")
        queue.produce_many([b"%d" % n for n in range(1_000)])
        for lease in queue.lease(1_000):
            if lease.offset % 2:
                lease.complete()
            elif lease.offset % 4:
                lease.bury("no")
    with published_queue(tmp_path, "q") as seen:
        assert len(rows(state_rows(seen.log(0), ["id", "size_bytes"]))) == 500
        assert len(rows(dead(seen.log(0), "q", ["id", "payload"]))) == 250
    assert len(watched.sizes) <= 4


def test_reading_at_the_front_of_a_segment_needs_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    with penstock.open(tmp_path, compression=False) as broker:
        queue = broker.create_queue("q")
        queue.produce_many([b"%d" % n * 100 for n in range(100)])
        monkeypatch.setattr(SegmentFiles, "rebuild", lambda chain, segment, index: built.append(segment.size))
        with published_queue(tmp_path, "q") as seen:
            found = items(seen.log(0), [0, 100], ["offset"])
            assert [row["offset"] for row in rows(found)] == [*range(100)] and not built


# -- no columns ----------------------------------------------------------------------------------------


def test_rows_without_columns_are_counted(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as broker:
        queue = broker.create_queue("q")
        queue.produce_many([b"x"] * 100)
        queue.lease(10).bury("no")
        with published_queue(tmp_path, "q") as seen:
            for found, wanted in (
                (items(seen.log(0), [0, 100], []), 100),
                (events(seen.log(0), 1, LAST, []), 120),
                (state_rows(seen.log(0), []), 100),
                (dead(seen.log(0), "q", []), 10),
            ):
                assert sum(batch.num_rows for batch in found) == wanted


# -- what retention thins out ----------------------------------------------------------------------------


def thin(broker: Broker) -> None:
    """Let retention keep only every tenth item of all segments but the newest."""
    queue = broker.queue("q")
    for lease in queue.lease(300):
        if lease.offset % 10 and lease.offset < 250:
            lease.complete()
    queue.update(retention={"max_age": 0, "max_bytes": 1})
    queue.compact()


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[tuple[Broker, PublishedQueue]]:
    with penstock.open(tmp_path, segment_bytes=4_096, compression=False) as broker:
        queue = broker.create_queue("q", retention={"max_segments": 1_000})
        for n in range(0, 300, 10):
            queue.produce_many([b"%08d" % n + os.urandom(92) for _ in range(10)])
        with published_queue(tmp_path, "q") as seen:
            yield broker, seen


def rewritten(seen: PublishedQueue) -> bool:
    return any(facts.rewritten for facts in seen.log(0)().segments())


def test_exact_reading_raises_for_items_that_retention_dropped(seen: tuple[Broker, PublishedQueue]) -> None:
    broker, log = seen[0], seen[1].log(0)
    assert len(rows(items(log, [0, 300], ["id"], exact=True))) == 300
    thin(broker)
    assert rewritten(seen[1])
    left = rows(items(log, [0, 300], ["offset"]))
    assert len(left) < 100 and rows(items(log, [0, 300], ["offset"], strict=False, exact=True)) == left
    gone = r"items 0-1 to 0-\d+ were lost to retention or damage before they were read; set failOnDataLoss=false to continue without them"
    with pytest.raises(InvalidRequest, match=gone):
        rows(items(log, [0, 300], ["offset"], exact=True))
    kept = [edge for row in left for edge in (row["offset"], row["offset"] + 1)]
    assert rows(items(log, kept, ["offset"], exact=True)) == left


def test_exact_reading_raises_for_items_that_retention_blanked(tmp_path: Path) -> None:
    with penstock.open(tmp_path, segment_bytes=4_096, compression=False) as broker:
        queue = broker.create_queue("q", retention={"max_age": 0, "max_bytes": 1})
        for _ in range(4):
            queue.produce_many([b"x" * 300] * 10)
        for lease in queue.lease(40):
            if 0 < lease.offset < 9:  # its first and last item stay, so the frame keeps its range
                lease.complete()
        queue.compact()
        with published_queue(tmp_path, "q") as seen:
            assert rewritten(seen)
            with pytest.raises(InvalidRequest, match="items 0-1 to 0-8 were lost to retention"):
                rows(items(seen.log(0), [0, 40], ["offset"], exact=True))


def test_events_of_a_thinned_segment_are_an_error_if_strict(seen: tuple[Broker, PublishedQueue]) -> None:
    broker, log = seen[0], seen[1].log(0)
    last = rows(events(log, 1, LAST, ["sequence"]))[-1]["sequence"]
    thin(broker)
    whole = next(facts.first_sequence for facts in log().segments() if not facts.rewritten)
    assert rewritten(seen[1]) and whole > 10
    for start, stop in ((1, last + 1), (0, 4), (5, 6), (whole - 1, LAST)):
        with pytest.raises(InvalidRequest, match=rf"sequences {max(1, start)} to \d+ of partition 0 cannot be read: retention deleted"):
            rows(events(log, start, stop, ["id"]))
    assert rows(events(log, whole, LAST, ["sequence"]))[0]["sequence"] >= whole
    assert {row["event"] for row in rows(events(log, 1, whole, ["event"], strict=False))} == {"produced"}


def test_events_thinned_out_during_reading_are_an_error(seen: tuple[Broker, PublishedQueue], monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are thinned out after they were checked and before their frames are read: all of a range or an error."""
    broker, log = seen[0], seen[1].log(0)
    wanted = rows(events(log, 1, LAST, ["event", "id", "sequence"]))
    last, facts = wanted[-1]["sequence"], log().segments()
    thin(broker)
    assert rewritten(seen[1])
    monkeypatch.setattr(PublishedLog, "segments", lambda log: facts)
    missed = 0
    for start in range(1, last + 1):
        for stop in {start + 1, start + 2, start + 7, last + 1}:
            try:
                found = rows(events(log, start, stop, ["event", "id", "sequence"]))
            except InvalidRequest:
                missed += 1
            else:
                assert found == [row for row in wanted if start <= row["sequence"] < stop]
    assert missed


def test_events_of_segments_dropped_during_reading_are_an_error(
    seen: tuple[Broker, PublishedQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, log = seen[0], seen[1].log(0)
    facts = log().segments()
    queue = broker.queue("q")
    queue.lease(300).complete()
    queue.update(retention={"max_segments": 2})
    queue.compact()
    monkeypatch.setattr(PublishedLog, "segments", lambda log: facts)
    for start in (1, facts[1].first_sequence, facts[1].first_sequence + 3):
        with pytest.raises(InvalidRequest, match=rf"sequences {start} to \d+ of partition 0 cannot be read"):
            rows(events(log, start, start + 2, ["id"]))
