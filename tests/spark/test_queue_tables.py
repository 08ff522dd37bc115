"""A broker's directory as the driver and tasks see it, without Spark."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock import Broker, NewItem, Queue
from penstock.errors import CorruptLog, InvalidRequest, QueueNotFound
from penstock.logs.log import LogRange
from penstock.operations import FindOffsets
from penstock.spark import queue_tables
from penstock.spark.batch_reader import BatchReader, EventTask, ItemTask
from penstock.spark.broker_access import parse_broker
from penstock.spark.options import parse_options
from penstock.spark.queue_tables import QueueTables
from penstock.tables.schemas import EVENTS
from penstock.words.clock import SECOND
from tests.broker.directory_broker import DirectoryBroker, fill, run_sample_workload


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[DirectoryBroker]:
    yard = DirectoryBroker(tmp_path / "data")
    yield yard
    yard.broker.close()


def look(path: Path) -> QueueTables:
    return QueueTables.open(parse_broker(str(path)))


def filled(path: Path, items: int = 500, **options: int) -> tuple[Broker, Queue]:
    """A queue of one partition whose log has several segments."""
    broker = penstock.open(path, segment_bytes=4_096, compression=False)
    queue = broker.create_queue("q", retention={"max_segments": 2})
    for start in range(0, items, 10):
        queue.produce_many([NewItem(b"%d" % n * 10) for n in range(start, start + 10)])
    return broker, queue


def ids(home: QueueTables, queue: str, partition: int, *runs: int) -> list[str]:
    info = home.find(queue)
    return [id for batch in home.items(info.incarnation, partition, runs, ["id"]) for id in batch.column(0).to_pylist()]


# -- how far it goes -----------------------------------------------------------------------------------


def test_bounds_are_those_of_the_published_log(yard: DirectoryBroker) -> None:
    run_sample_workload(yard)
    yard.run_and_publish()
    with look(yard.path) as home, yard.open_snapshot() as seen:
        info = home.find("orders")
        found = home.published(info)
        assert {number: one.end for number, one in found.items()} == seen.call(FindOffsets(queue=info.incarnation, at="newest"))
        assert sorted(found) == [0, 1, 2, 3, 4] and all((one.start, one.first_sequence) == (0, 1) for one in found.values())
        yard.broker.queue("orders").produce_many([NewItem(b"x") for _ in range(50)])
        home.refresh()
        more = home.published(info)
        assert sum(one.end for one in more.values()) == sum(one.end for one in found.values()) + 50
        assert all(more[number].sequence >= found[number].sequence for number in found)


def test_an_empty_partition_has_empty_bounds(yard: DirectoryBroker) -> None:
    yard.broker.create_queue("q", partitions=2)
    with look(yard.path) as home:
        found = home.published(home.find("q"))
    assert {(one.start, one.end, one.first_sequence) for one in found.values()} == {(0, 0, 1)}


def test_bounds_without_a_published_position(tmp_path: Path) -> None:
    broker, _ = filled(tmp_path)
    broker.close()
    with look(tmp_path) as home:
        before = home.published(home.find("q"))
        for path in tmp_path.rglob("synced"):
            path.unlink()
    with look(tmp_path) as home:
        after = home.published(home.find("q"))
        assert after == before == {0: LogRange(0, 500, before[0].sequence, 1, before[0].segments)}
        assert before[0].first_sequence == 1
        assert len(ids(home, "q", 0, 0, 500)) == 500


def test_bounds_after_retention(tmp_path: Path) -> None:
    broker, queue = filled(tmp_path)
    with broker, look(tmp_path) as home:
        info = home.find("q")
        queue.lease(500).complete()
        queue.compact()
        home.refresh()
        (found,) = home.published(info).values()
        assert 0 < found.start < found.end == 500 and found.first_sequence > 1
        assert home.missing(info, 0, 0, 500) == [0, found.start] and home.missing(info, 0, found.start, 500) == []
        assert ids(home, "q", 0, found.start, 500) == [f"0-{n}" for n in range(found.start, 500)]


def test_times_find_offsets_and_sequences(yard: DirectoryBroker) -> None:
    queue = yard.broker.create_queue("q")
    walls = []
    for _ in range(5):
        walls.append(yard.clock.read().wall)
        fill(queue, 10)
        queue.lease(1).complete()
        yard.run_and_publish()
        yard.clock.advance(10 * SECOND)
    with look(yard.path) as home:
        info = home.find("q")
        for n, wall in enumerate(walls):
            assert home.offsets_at(info, wall) == {0: 10 * n} and home.offsets_at(info, wall + 1) == {0: 10 * n + 10}
            (sequence,) = home.sequences_at(info, wall).values()
            batches = [*home.events(info.incarnation, 0, sequence, 1 << 60, ["at"])]
            assert min(batches[0].column(0).to_pylist()).timestamp() == wall / SECOND
        assert home.sequences_at(info, walls[-1] + 1) == {0: home.published(info)[0].sequence + 1}


def test_cursors_are_found(yard: DirectoryBroker) -> None:
    queue = yard.broker.create_queue("q")
    fill(queue, 10)
    cursor = queue.cursor("audit")
    cursor.read(4)
    cursor.commit()
    yard.run_and_publish()
    with look(yard.path) as home:
        assert home.cursor(home.find("q").incarnation, "audit") == {0: 4} and home.cursor(home.find("q").incarnation, "other") == {}


# -- where it is cut -----------------------------------------------------------------------------------


def test_ranges_are_cut_at_frames(tmp_path: Path) -> None:
    broker, _ = filled(tmp_path)
    with broker, look(tmp_path) as home:
        info = home.find("q")
        assert home.item_cuts(info, 0, 0, 500, 1) == []
        assert home.item_cuts(info, 0, 0, 500, 3) == [160, 330]  # a frame has ten items
        assert home.item_cuts(info, 0, 5, 495, 2) == [250]
        assert home.item_cuts(info, 0, 0, 500, 100) == [*range(5, 500, 5)]  # finer than frames
        assert home.item_cuts(info, 0, 3, 6, 10) == [4, 5]


def test_large_ranges_are_cut_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_tables, "TASK_BYTES", 4_096)
    broker, _ = filled(tmp_path)
    with broker, look(tmp_path) as home:
        info = home.find("q")
        cuts = home.item_cuts(info, 0, 0, 500, 1)
        assert 3 <= len(cuts) <= 8 and all(cut % 10 == 0 for cut in cuts)
        assert len(home.item_cuts(info, 0, 0, 100, 1)) <= 2


@pytest.mark.parametrize("pieces", ["1", "2", "7", "60"])
def test_tasks_cover_everything_once(tmp_path: Path, pieces: str) -> None:
    broker, queue = filled(tmp_path)
    with broker:
        queue.resize(3)
        queue.produce_many([NewItem(b"x", key=f"k{n}") for n in range(100)])
        reader = BatchReader(parse_options({"broker": str(tmp_path), "queue": "q", "minPartitions": pieces}), ["id"])
        tasks = pickle.loads(pickle.dumps(reader.partitions()))
        found = [id for task in tasks for batch in reader.read(task) for id in batch.column(0).to_pylist()]
        assert len(found) == len({*found}) == 600 and all(type(task) is ItemTask for task in tasks)
        assert len(tasks) >= max(3, int(pieces)) - (pieces == "1") * 2
        reader = BatchReader(
            parse_options({"broker": str(tmp_path), "queue": "q", "table": "events", "minPartitions": pieces}), EVENTS.names
        )
        tasks = reader.partitions()
        told = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
        assert all(type(task) is EventTask for task in tasks) and (len(tasks) > 3 or pieces in "12")
        assert sorted(row["id"] for row in told if row["event"] == "produced") == sorted(found)
        assert len({(row["partition"], row["sequence"], row["offset"], row["event"]) for row in told}) == len(told)


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"startingOffsets": '{"0": 501}'}, "startingOffsets gives partition 0 the offset 501, which is in the future; it ends at 500"),
    ({"endingOffsets": '{"0": 501}'}, "endingOffsets gives partition 0 the offset 501, which is in the future; it ends at 500"),
    ({"startingOffsets": '{"7": 0}'}, r"startingOffsets names partition 7; queue 'q' has \[0\]"),
    ({"endingOffsets": '{"7": 0}'}, r"endingOffsets names partition 7; queue 'q' has \[0\]"),
    (
        {"startingOffsets": '{"0": 9}', "endingOffsets": '{"0": 4}'},
        "the range of partition 0 of queue 'q' begins at 9 and ends at 4; let ending",
    ),
    ({"startingOffsets": "latest"}, "startingOffsets is latest, and a batch ends there; give earliest or offsets"),
    ({"endingOffsets": "earliest"}, "endingOffsets is earliest, so that there is nothing to read; give latest or offsets"),
    ({"startingTimestamp": "2999-01-01"}, "startingTimestamp is in the future; give a time that has passed"),
    ({"startingTimestamp": "2020-01-02", "endingTimestamp": "2020-01-01"}, "startingTimestamp is not before endingTimestamp; swap them"),
    ({"consume": "true"}, "consume is true, and a batch query consumes nothing; use spark.readStream"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_ranges_that_are_not_there_are_refused(tmp_path: Path, options: dict[str, str], message: str) -> None:
    broker, _ = filled(tmp_path)
    with broker, pytest.raises(InvalidRequest, match=message):
        BatchReader(parse_options({"broker": str(tmp_path), "queue": "q", **options}), ["id"]).partitions()


# -- what is not there ---------------------------------------------------------------------------------


def test_a_place_that_is_no_brokers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist; give a directory that does"):
        look(tmp_path / "nowhere").find("q")
    with pytest.raises(InvalidRequest, match="is no broker's directory"):
        look(tmp_path).find("q")


def test_a_queue_that_is_not_there_is_refused(yard: DirectoryBroker) -> None:
    queue = yard.broker.create_queue("q")
    fill(queue, 3)
    yard.run_and_publish()
    with look(yard.path) as home:
        with pytest.raises(QueueNotFound, match="'other'"):
            home.find("other")
        info = home.find("q")
        queue.delete()
        home.refresh()
        with pytest.raises(QueueNotFound):
            home.find("q")
    with look(yard.path) as home, pytest.raises(QueueNotFound, match="the queue was deleted"):
        [*home.items(info.incarnation, 0, [0, 3], ["id"])]


def test_several_storage_roots(tmp_path: Path) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    with penstock.open(roots[0], roots=roots[1:]) as broker:
        queue = broker.create_queue("q", partitions=4)
        given = sorted(queue.produce_many([NewItem(b"%d" % n, key=f"{n}") for n in range(40)]))
    both = parse_broker(f'["{roots[0]}", "{roots[1]}"]')
    with QueueTables.open(both) as home:
        info = home.find("q")
        found = [id for number, one in home.published(info).items() for id in ids(home, "q", number, one.start, one.end)]
        assert sorted(found) == given
    with look(roots[0]) as home, pytest.raises(CorruptLog, match="add the storage root that holds it"):
        home.published(home.find("q"))


def test_nothing_is_written_and_no_lock_is_taken(tmp_path: Path) -> None:
    broker, _ = filled(tmp_path)
    with broker:

        def files() -> dict[Path, tuple[int, int]]:
            return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*") if path.is_file()}

        before = files()
        with look(tmp_path) as home:
            info = home.find("q")
            assert home.published(info) and home.item_cuts(info, 0, 0, 500, 4) and len(ids(home, "q", 0, 0, 500)) == 500
            assert [*home.states(info.incarnation, 0, ["id"])] and not [*home.dead(home.dead_letter_partitions(info)[0], ["id"])]
        assert files() == before
