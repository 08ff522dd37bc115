"""Damaged files, through the API: all undamaged items are returned, and the lost ones are reported."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Broker, NewItem
from penstock.errors import CorruptLog, InvalidRequest, StorageFailed
from penstock.logs.files.repair import repair
from penstock.loop.partition import Partition
from penstock.loop.recovery import find_missing_front
from penstock.tables.items import items
from tests.api.both_apis import BrokerOpener
from tests.tables.published_queue import published_queue, rows

FRAMES, IN_A_FRAME = 10, 40
DAMAGED = range(3 * IN_A_FRAME, 4 * IN_A_FRAME)
UNDAMAGED = [offset for offset in range(FRAMES * IN_A_FRAME) if offset not in DAMAGED]


@pytest.fixture
def damaged(opener: BrokerOpener) -> Broker:
    """A queue of ten frames, the fourth of which is damaged, and an empty one."""
    create_damaged_log(Path(opener.target))
    opened: Broker = opener.open()
    return opened


def create_damaged_log(path: Path) -> Path:
    """Create a queue of ten frames, damage the fourth, and return the log file."""
    with penstock.open(path, compression=False) as broker:
        queue = broker.create_queue("q")
        broker.create_queue("other")
        for number in range(FRAMES):
            queue.produce_many([NewItem(payload(IN_A_FRAME * number + index)) for index in range(IN_A_FRAME)])
        incarnation = queue.info().incarnation
    (log,) = (path / "logs" / incarnation / "00000").glob("*.log")
    data = bytearray(log.read_bytes())
    data[data.index(payload(DAMAGED[5]))] ^= 1
    log.write_bytes(data)
    return log


def payload(offset: int) -> bytes:
    return b"<%06d>" % offset


def read(broker: Broker, size: int) -> list[int]:
    cursor, found = broker.queue("q").cursor("audit"), list[int]()
    while page := cursor.read(size):
        found += [item.offset for item in page]
        cursor.commit()
    assert cursor.position == {0: FRAMES * IN_A_FRAME}
    return found


def read_arrow(broker: Broker) -> list[int]:
    cursor, found = broker.queue("q").cursor("audit"), list[int]()
    while (batch := cursor.read_arrow(30)).num_rows:
        found += [int(text.split("-")[1]) for text in batch.column("id").to_pylist()]
    return found


def listed(broker: Broker, size: int) -> list[int]:
    queue, found, after = broker.queue("q"), list[int](), None
    while len(page := queue.items(limit=size, after=after)):
        found += [item.offset for item in page]
        after = page[-1].id
    return found


def leased(broker: Broker, size: int) -> list[int]:
    """Leased by a consumer that stops at the first empty batch."""
    queue, found = broker.queue("q"), list[int]()
    while len(batch := queue.lease(size)):
        found += [item.offset for item in batch.items]
        batch.complete()
    return found


WAYS: dict[str, Callable[[Broker], list[int]]] = {
    "read 1": lambda broker: read(broker, 1),
    "read 40": lambda broker: read(broker, 40),
    "read 1000": lambda broker: read(broker, 1_000),
    "iterate": lambda broker: [item.offset for item in broker.queue("q").cursor("audit")],
    "read_arrow": read_arrow,
    "items 7": lambda broker: listed(broker, 7),
    "items 40": lambda broker: listed(broker, 40),
    "items 1000": lambda broker: listed(broker, 1_000),
    "lease 1": lambda broker: leased(broker, 1),
    "lease 10": lambda broker: leased(broker, 10),
    "lease 60": lambda broker: leased(broker, 60),
    "lease 1000": lambda broker: leased(broker, 1_000),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_undamaged_items_are_returned(damaged: Broker, way: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    assert WAYS[way](damaged) == UNDAMAGED
    stats = damaged.queue("q").stats()
    (part,) = stats.partitions
    assert part.lost == IN_A_FRAME
    assert part.ready + part.completed == len(UNDAMAGED)
    assert any(f"{IN_A_FRAME} items of partition 0 were lost to damage" in warning for warning in stats.warnings)
    assert [note.startswith("damage: a frame body does not match its checksum") for note in part.notes] == [True]
    assert len([record for record in caplog.records if "damage in partition 0" in record.getMessage()]) == 1
    assert damaged.queue("q").explain("0-125").why == "lost: damage took its bytes"
    assert damaged.queue("q").history("0-125")[0].event == "lost"


def test_a_redrive_moves_all_undamaged_items(damaged: Broker) -> None:
    assert damaged.redrive("q", to="other", preview=True).items == len(UNDAMAGED)
    assert damaged.redrive("q", to="other").items == len(UNDAMAGED)
    given: list[bytes] = []
    while len(given) < len(UNDAMAGED):
        batch = damaged.queue("other").lease(100, wait=10)
        assert len(batch)
        given += [item.payload for item in batch.items]
        batch.complete()
    assert sorted(given) == [payload(offset) for offset in UNDAMAGED]


def test_a_waiting_lease_gets_items_after_the_damage(damaged: Broker) -> None:
    damaged.queue("q").lease(DAMAGED.start).complete()
    batch = damaged.queue("q").lease(10, wait=10)
    assert [item.offset for item in batch.items] == list(range(DAMAGED.stop, DAMAGED.stop + 10))


def test_a_lease_holds_only_the_items_that_were_returned(damaged: Broker) -> None:
    batch = damaged.queue("q").lease(1_000)
    assert [item.offset for item in batch.items] == UNDAMAGED
    batch.complete()
    assert damaged.queue("q").stats().completed == len(UNDAMAGED)


def test_a_worker_handles_all_undamaged_items(tmp_path: Path) -> None:
    create_damaged_log(tmp_path)
    with penstock.open(tmp_path) as broker:
        handled: list[bytes] = []

        def done(item: Any) -> None:
            handled.append(item.payload)
            if len(handled) == len(UNDAMAGED):
                worker.stop()

        worker = penstock.Worker(broker.queue("q"), done, concurrency=1)
        worker.run()
        assert sorted(handled) == [payload(offset) for offset in UNDAMAGED]
        assert broker.queue("q").stats().partitions[0].lost == IN_A_FRAME


def test_a_failing_read_raises_and_is_not_taken_for_the_end(damaged: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    cursor = damaged.queue("q").cursor("audit")
    first = cursor.read(10)
    right = Partition.items

    def fails(self: Partition, runs: Any) -> Any:
        raise StorageFailed("reading failed; try again")

    monkeypatch.setattr(Partition, "items", fails)
    with pytest.raises(StorageFailed, match="reading failed"):
        cursor.read(10)
    assert cursor.position == {0: 10}
    monkeypatch.setattr(Partition, "items", right)
    assert [item.offset for item in first + cursor.read(10)] == list(range(20))


# -- tables --------------------------------------------------------------------------------------------


def test_items_that_a_repair_marked_as_lost_are_no_error(tmp_path: Path) -> None:
    log = create_damaged_log(tmp_path)
    with published_queue(tmp_path, "q") as seen:
        with pytest.raises(CorruptLog, match="items 0-120 to 0-159 cannot be read"):
            seen.items(["offset"])
        repair(seen.directory.files, str(log.parent), seen.info.incarnation, 0, lost_front=find_missing_front)
        assert [row["offset"] for row in seen.items(["offset"])] == UNDAMAGED
        with pytest.raises(InvalidRequest, match="items 0-120 to 0-159 were lost to retention or damage before they were read"):
            rows(items(seen.log(0), [0, 200], ["offset"], exact=True))


def test_a_missing_segment_is_damage_and_not_retention(tmp_path: Path) -> None:
    with penstock.open(tmp_path, segment_bytes=1_000, compression=False) as broker:
        queue = broker.create_queue("q")
        for number in range(60):
            queue.produce(payload(number))
        incarnation = queue.info().incarnation
    oldest, second, *_ = sorted((tmp_path / "logs" / incarnation / "00000").glob("*.log"))
    first = int(second.name.split("-")[0])
    oldest.unlink()
    with published_queue(tmp_path, "q") as seen:
        with pytest.raises(CorruptLog, match=rf"items 0-0 to 0-{first - 1} cannot be read: the segment that held it is missing"):
            rows(items(seen.log(0), [0, 60], ["offset"]))
        assert [row["offset"] for row in rows(items(seen.log(0), [0, 60], ["offset"], strict=False))] == list(range(first, 60))
