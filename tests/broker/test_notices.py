"""Nothing fails in silence: the lines in the program's log about queues and partitions."""

import logging
from pathlib import Path

import pytest

import penstock
from penstock.errors import OutcomeUnknown, QueueFull, StorageFailed
from penstock.loop.notices import BURIAL_LINES, STATE_LINES
from penstock.operations import ClearItems, ReadMetrics, RedriveItems, SeekItems
from penstock.testing import SimulatedFiles
from tests.broker.broker_under_test import BrokerUnderTest, keys_at
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage, partly_failing_disk


class LogLines:
    """The lines of the logger `penstock`, without those about the whole broker."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self) -> list[tuple[str, str]]:
        """(level, text) of the lines since the last call. Each must name its queue, in its text and as a field."""
        found = [record for record in self._caplog.records if record.name == "penstock" and hasattr(record, "queue")]
        assert all(repr(vars(record)["queue"]) in record.getMessage() for record in found)
        self._caplog.clear()
        return [(record.levelname, record.getMessage()) for record in found]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> LogLines:
    caplog.set_level(logging.INFO, "penstock")
    return LogLines(caplog)


# -- burials -----------------------------------------------------------------------------------------------------


def test_burials_are_logged_with_their_reasons(broker: BrokerUnderTest, lines: LogLines) -> None:
    queue = broker.create(max_attempts=1)
    queue.produce("a", "b")
    queue.produce("short", ttl=5)
    lines.take()
    queue.lease(2).retry(reason="no card")
    assert lines.take() == [("WARNING", "2 items (0-0 to 0-1) of queue 'q' were buried: attempts spent: no card")]
    broker.advance(5)
    broker.turn()
    assert lines.take() == [("WARNING", "item 0-2 of queue 'q' was buried: expired")]
    queue.produce("c")
    queue.lease(timeout=1)
    broker.advance(1)
    broker.turn()
    assert lines.take() == [("WARNING", "item 0-3 of queue 'q' was buried: attempts spent: lease expired")]
    queue.produce("d")
    queue.lease().bury(reason="poison")
    assert lines.take() == [("INFO", "item 0-4 of queue 'q' was buried: poison")], "a consumer asked for it"
    assert queue.stats().warnings == ["5 items are buried here; list them, then redrive or clear them"]


def test_only_so_many_burials_are_logged(broker: BrokerUnderTest, lines: LogLines) -> None:
    queue = broker.create(max_attempts=1)
    for number in range(BURIAL_LINES + 7):
        queue.produce(f"{number}")
        queue.lease().retry()
    assert len([line for line in lines.take() if "buried" in line[1]]) == BURIAL_LINES
    broker.advance(60)
    queue.produce("next")
    queue.lease().retry()
    more, last = lines.take()
    assert more == ("WARNING", "7 more items of queue 'q' were buried in the last minute; list its dead letters to see them")
    assert last[1] == f"item 0-{BURIAL_LINES + 7} of queue 'q' was buried: attempts spent"


def test_a_burial_that_is_undone_is_not_logged(lines: LogLines) -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create(max_attempts=1)
    queue.produce("a")
    leased = queue.lease()
    files.break_partition(0)
    with pytest.raises(OutcomeUnknown):
        leased.retry()
    files.failing_paths.clear()
    broker.advance_in_steps(10)
    assert not [line for line in lines.take() if "buried" in line[1]]
    broker.embedded.close()


def test_a_handler_of_the_log_may_use_the_broker(tmp_path: Path) -> None:
    """Lines are logged after the turn: within it, the call would wait for ever."""
    seen: list[int] = []

    class CountingHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "buried" in record.getMessage():
                seen.append(queue.stats().buried)

    handler, log = CountingHandler(), logging.getLogger("penstock")
    with penstock.open(tmp_path / "data") as broker:
        queue = broker.create_queue("q", max_attempts=1)
        queue.produce_many(["a", "b"])
        log.addHandler(handler)
        try:
            for lease in queue.lease(2):
                lease.retry()
        finally:
            log.removeHandler(handler)
    assert seen == [1, 2]


def test_the_line_of_a_burial_has_the_id_of_its_item(broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    queue = broker.create(max_attempts=1)
    queue.produce("a", "b", "c")
    queue.lease(1).retry()
    queue.lease(2).retry()
    found = [vars(record).get("item_id") for record in caplog.records if "buried" in record.getMessage()]
    assert found == ["0-0", None], "two items have no single id"


# -- partitions --------------------------------------------------------------------------------------------------


def test_a_partition_that_fails_and_heals_is_logged_once_each(patchy: BrokerUnderTest, lines: LogLines) -> None:
    queue, disk = patchy.create(partitions=4), partly_failing_disk(patchy.storage)
    disk.break_partition(2)
    lines.take()
    for _ in range(3):
        with pytest.raises((StorageFailed, OutcomeUnknown)):
            queue.produce("lost", key=keys_at(queue, 2)[0])
        patchy.advance_in_steps(10)
    ((level, text),) = lines.take()
    assert level == "WARNING" and text.startswith("partition 2 of queue 'q' is failing: ")
    disk.failing_paths.clear()
    patchy.advance_in_steps(10)
    assert lines.take() == [("INFO", "partition 2 of queue 'q' works again")]


def test_a_partition_that_fails_again_and_again_is_logged_only_so_often(lines: LogLines) -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create()
    lines.take()
    for _ in range(STATE_LINES):
        files.break_partition(0)
        with pytest.raises((StorageFailed, OutcomeUnknown)):
            queue.produce("lost")
        files.failing_paths.clear()
        broker.advance_in_steps(0.7)
        queue.produce("kept")
    assert len(lines.take()) == STATE_LINES
    files.break_partition(0)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        queue.produce("lost")
    assert lines.take() == []
    broker.advance_in_steps(60)
    ((_, text),) = lines.take()
    assert "is failing" in text
    files.failing_paths.clear()
    broker.advance_in_steps(10)
    broker.embedded.close()


def test_what_an_opening_finds_is_logged(lines: LogLines) -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create()
    for number in range(5):
        queue.produce(f"item-{number}")
    path = next(path for path in files.contents() if f"{queue.incarnation:016x}" in path and path.endswith(".log"))
    files.flip_bit(path, 8 * files.content(path).index(b"item-2"))
    lines.take()
    broker.kill()
    queue.stats()
    damage = [text for level, text in lines.take() if level == "WARNING"]
    assert len(damage) == 1 and damage[0].startswith("damage in partition 0 of queue 'q': ") and "items 0-2 to 0-2 are lost" in damage[0]
    broker.kill()
    queue.stats()
    assert not [text for level, text in lines.take() if level == "WARNING"], "it was told"
    broker.embedded.close()


def test_a_torn_tail_is_logged(lines: LogLines) -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create()
    queue.produce("a")
    path = next(path for path in files.contents() if f"{queue.incarnation:016x}" in path and path.endswith(".log"))
    lines.take()
    broker.embedded.close()
    files.put_file(path, files.content(path) + b"torn" * 20)
    broker.embedded = broker._open()
    queue.stats()
    queue.open_all()
    (told,) = [text for level, text in lines.take() if level == "WARNING"]
    assert told.startswith("at the opening of partition 0 of queue 'q': ") and "cut" in told
    assert [warning for warning in queue.stats().warnings if "partition 0, when opened: " in warning and "cut" in warning]
    assert [one.findings for one in broker.embedded.call(ReadMetrics()).queues["q"].partitions] == [1]
    broker.embedded.close()


def test_a_disk_without_room_for_new_items_is_logged_once(lines: LogLines) -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files), min_free_bytes=1_000_000)
    queue = broker.create(partitions=2)
    queue.open_all()
    lines.take()
    files.set_free_bytes(10_000)
    for _ in range(3):
        with pytest.raises(QueueFull):
            queue.produce("a")
    ((level, text),) = lines.take()
    assert level == "WARNING" and text.startswith("queue 'q' takes no new items, the disk of partition ")
    assert "only 10,000 bytes are free and 1,000,000 must stay so; make room, or wait for retention" in text
    (warning,) = queue.stats().warnings
    assert "takes no new items: only 10,000 bytes are free" in warning
    assert broker.embedded.call(ReadMetrics()).queues["q"].errors == {"queue_full": 3}
    files.set_free_bytes(None)
    assert queue.stats().warnings == []
    for _ in range(4):
        queue.produce("a")
    assert lines.take() == [("INFO", "queue 'q' takes new items again: the disk has room")]
    broker.embedded.close()


def test_a_full_disk_is_logged(lines: LogLines) -> None:
    files = SimulatedFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create()
    queue.produce("a")
    lines.take()
    files.set_free_bytes(10)
    for _ in range(2):
        with pytest.raises((StorageFailed, OutcomeUnknown), match="; free some space, then send the request again") as refused:
            queue.produce("b" * 1_000)
        assert str(refused.value).count("the disk is full") == 1, "said once"
    ((level, text),) = lines.take()
    assert level == "WARNING" and text.startswith("partition 0 of queue 'q' is failing: ") and "the disk is full" in text
    (warning,) = [warning for warning in queue.stats().warnings if "failing" in warning]
    assert "the disk is full" in warning
    files.set_free_bytes(None)
    broker.advance_in_steps(10)
    assert lines.take() == [("INFO", "partition 0 of queue 'q' works again")]
    broker.embedded.close()


# -- changes -----------------------------------------------------------------------------------------------------


def test_changes_are_logged(broker: BrokerUnderTest, lines: LogLines) -> None:
    queue = broker.create(partitions=2)
    assert lines.take() == [("INFO", "queue 'q' was created, with 2 partitions")]
    queue.update(max_attempts=7)
    assert lines.take() == [("INFO", "options of queue 'q' were changed: max_attempts 10 → 7")]
    queue.pause(lease=True, produce=False)
    queue.pause(lease=False, partition=1)
    assert lines.take() == [
        ("INFO", "leasing from queue 'q' is paused and producing to queue 'q' is resumed"),
        ("INFO", "leasing from queue 'q' is resumed, in partition 1"),
    ]
    queue.produce("a", "b", "c")
    queue.pause(lease=False)
    queue.lease(1).complete()
    queue.lease(1).bury()
    lines.take()
    queue.call(SeekItems(start=0))
    assert lines.take() == [("INFO", "1 completed items of queue 'q' are ready again after a seek")]
    queue.call(RedriveItems(to=queue.incarnation))
    assert lines.take() == [("INFO", "1 items were redriven from queue 'q' to queue 'q'")]
    queue.call(ClearItems(states=["ready", "buried"]))
    assert lines.take() == [("INFO", "3 items of queue 'q' (ready, buried) were cleared")]
    broker.delete("q")
    assert lines.take() == [("INFO", "queue 'q' was deleted")]


def test_a_resize_is_logged_and_its_end(broker: BrokerUnderTest, lines: LogLines) -> None:
    queue = broker.create()
    queue.produce(*[f"{number}" for number in range(20)], keys=[f"key-{number}" for number in range(20)])
    leased = queue.lease(20)
    lines.take()
    queue.resize(3)
    assert lines.take() == [("INFO", "queue 'q' has 3 partitions now (before: 1)")]
    leased.complete()
    broker.turn()
    assert lines.take() == [("INFO", "the resize of queue 'q' is finished: no key waits for another partition")]


def test_opening_and_closing_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("q")
    first, created, last = caplog.messages
    assert first.startswith(f"{tmp_path / 'data'} is open, with 0 queues; this process (")
    assert "'q' was created" in created and last == f"{tmp_path / 'data'} is closed"
