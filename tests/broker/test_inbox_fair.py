"""Large writes delay no opening and no end of a right, single-use sources do not displace streams, and stale files are
removed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.broker import inbox
from penstock.broker.inbox import InboxProcessor
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.store import StagedPart, WriteManifest
from penstock.loop.requests import ProduceRequest, Request
from penstock.rules import catalog
from penstock.testing import Halt
from penstock.words.clock import DAY, SECOND
from tests.broker.broker_under_test import BrokerUnderTest, batch_of, wait_until
from tests.broker.grants import take_grant
from tests.broker.other_process import OtherProcess, logged_warnings, other_process, process_inbox
from tests.broker.storages import DirectoryStorage

TIMEOUT = 10


def slow(broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch, where: str, meanwhile: Callable[[], object]) -> None:
    """Make each step with a chunk of a write take seconds, and call `meanwhile` during it."""

    def passes() -> None:
        broker.clock.advance(4 * SECOND)
        meanwhile()

    if where == "adopted":
        ran = broker.embedded.run_request

        def run(incarnation: int, request: Request) -> Any:
            if isinstance(request, ProduceRequest):
                passes()
            return ran(incarnation, request)

        monkeypatch.setattr(broker.embedded, "run_request", run)
    else:
        monkeypatch.setattr(inbox, "validate", lambda batch: passes())


@pytest.mark.parametrize("where", ["looked through", "adopted"])
def test_a_consumer_right_ends_while_a_large_write_is(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(inbox, "CHUNKS_AT_ONCE", 1)
    queue, bulk, other = file_broker.create(), file_broker.create("bulk"), other_process(file_broker)
    take_grant(file_broker, queue, timeout=TIMEOUT)
    other.publish(bulk.incarnation, *[batch_of(f"{n}") for n in range(8)])
    holders: list[str] = []
    slow(file_broker, monkeypatch, where, lambda: holders.append(file_broker.embedded.entry(queue.incarnation).consumer_right_holder))
    process_inbox(file_broker)
    assert holders[0] and not holders[-1]
    assert len(bulk.drain()) == 8


def test_what_is_small_is_adopted_when_the_broker_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "OPENING_SECONDS", 60)  # else a busy machine may take longer
    broker = BrokerUnderTest(DirectoryStorage(tmp_path), threaded=True)
    queue, other = broker.create(), OtherProcess(SystemFiles(), str(tmp_path / "data"))
    broker.embedded.inbox.stop()
    other.publish_texts(queue, "a:1")
    broker.restart()
    assert queue.stats().ready == 1
    broker.embedded.close()


def test_a_large_write_does_not_delay_the_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = BrokerUnderTest(DirectoryStorage(tmp_path), threaded=True)
    queue, other = broker.create(), OtherProcess(SystemFiles(), str(tmp_path / "data"))
    broker.embedded.inbox.stop()
    other.publish_texts(queue, "a:1")
    opened, adopt = threading.Event(), InboxProcessor._adopt_items
    monkeypatch.setattr(InboxProcessor, "_adopt_items", lambda *args: (opened.wait(60), adopt(*args)))
    broker.restart()
    assert queue.stats().ready == 0
    queue.produce("b:1")
    opened.set()
    wait_until(lambda: queue.stats().ready == 2)
    broker.embedded.close()


# -- who is remembered -------------------------------------------------------------------------------------


def test_single_use_sources_do_not_displace_those_of_streams(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_SOURCES", 4)
    monkeypatch.setattr(catalog, "MAX_ONCE", 3)
    queue, other = file_broker.create(), other_process(file_broker)
    for source, number in (("stream", 7), ("load", 1)):
        other.publish_texts(queue, f"{source}:{number}", source=source, number=number)
        process_inbox(file_broker)
    for n in range(9):
        write, parts = other.stage(queue.incarnation, [[batch_of(f"anonymous:{n}")]])
        other.inbox.publish(write, queue.incarnation, manifest_of(parts, write))
        process_inbox(file_broker)
    file_broker.restart()
    for source, number in (("stream", 7), ("load", 1)):
        other.publish_texts(queue, f"{source}:{number}", source=source, number=number)
        process_inbox(file_broker)
    assert sorted(queue.drain()) == sorted(["stream:7", "load:1", *[f"anonymous:{n}" for n in range(9)]])
    known = file_broker.embedded.catalog.get(queue.incarnation).adopted
    assert len(known) == 5 and known["stream"] == 7


def manifest_of(parts: list[StagedPart], source: str) -> WriteManifest:
    return WriteManifest(parts, source, 1)


def test_a_single_use_write_is_adopted_once_although_its_removal_is_cut_off(
    file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    write, parts = other.stage(queue.incarnation, [[batch_of("a")]])
    other.inbox.publish(write, queue.incarnation, manifest_of(parts, write))

    def cut_off(*args: object) -> None:
        raise Halt("before it is removed")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.logs.files.inbox.FileInbox.remove", cut_off)
        with pytest.raises(Halt):
            process_inbox(file_broker)
    file_broker.kill()
    assert other.inbox_files() == [] and queue.drain() == ["a"]


# -- what is left behind -------------------------------------------------------------------------------------


def test_the_owner_sweeps_the_inbox_every_day(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    queue.produce("a")
    take_grant(file_broker, queue, timeout=TIMEOUT)
    other.stage(queue.incarnation, [[batch_of("a")]], f"{file_broker.clock.read().wall:016x}-0123")
    other.files.close(other.files.open(f"{other.root}/inbox/{queue.incarnation:016x}-x.tmp", "append"))
    process_inbox(file_broker)
    kept: dict[int, tuple[int, int]] = {}
    for day in range(1, 35):
        file_broker.clock.advance(DAY)
        process_inbox(file_broker)
        kept[day] = len(other.inbox_files()), len(other.answer_files())
    assert kept[1] == (2, 1), "a killed driver's write, a temporary file; a grant"
    assert kept[3] == (1, 1)
    assert kept[9] == (0, 1), "the grant is kept: its stream may come back"
    assert kept[34] == (0, 0)


def test_operations_that_an_earlier_version_left_in_the_inbox_are_removed(
    file_broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    names = [f"{queue.incarnation:016x}-MoveCursor-12ab.errand", f"{queue.incarnation:016x}-EndStream-34cd.done"]
    other.publish_texts(queue, "a:1")
    for name in names:
        other.files.close(other.files.open(f"{other.root}/inbox/{name}", "append"))
    file_broker.restart()
    assert queue.drain() == ["a:1"] and other.inbox_files() == []
    assert sum("an earlier version left this operation" in warning for warning in logged_warnings(caplog)) == 2
