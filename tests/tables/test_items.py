"""The table of items: what was produced, from frames of every kind, each item once."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Broker, NewItem
from penstock.errors import CorruptLog, InvalidRequest, StorageFailed
from penstock.logs import columns as frame_columns
from penstock.logs.memory import MemoryStore
from penstock.rules.records import Produced
from penstock.rules.runs import offsets
from penstock.tables import arrays, item_columns
from penstock.tables.items import items
from penstock.tables.schemas import ITEMS, TABLES, select_columns
from penstock.words import origin, values
from penstock.words.batch import Batch
from penstock.words.clock import SECOND, Moment
from penstock.words.ids import format_ids
from tests.broker.directory_broker import DirectoryBroker, fill, run_sample_workload
from tests.logs.batches import batches
from tests.tables.published_queue import PublishedQueue, published_queue, rows

WHEN = datetime(2030, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def small_steps(monkeypatch: pytest.MonkeyPatch, rows: int = 7, large: int = 5, few: int = 3) -> None:
    """Set the limits so low that a few items reach them all."""
    for name, value in (("ROWS", rows), ("LARGE_ROWS", large), ("FEW_ROWS", few), ("BATCH_BYTES", 60), ("LARGE_BYTES", 40)):
        monkeypatch.setattr(item_columns, name, value)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_steps(monkeypatch)


# -- frames of every kind ------------------------------------------------------------------------------


def sensible(batch: Batch) -> Batch:
    """The batch with valid headers and origins, and times within Arrow's range."""
    count = len(batch)
    if batch.headers is not None:
        batch.headers = [None if h is None else values.encode_headers({"h": h, "text": "é"}) for h in batch.headers]
    if batch.origins is not None:
        batch.origins = [None if o is None else origin.encode(origin.Origin(o.hex() or "q", 77, "3-17")) for o in batch.origins]
    if batch.ats is not None:
        batch.ats = [at % values.LAST_INSTANT for at in batch.ats]
    if batch.ttls is not None:
        batch.ttls = [ttl % (1 << 50) for ttl in batch.ttls]
    assert len(batch) == count
    return batch


def expected(batch: Batch, partition: int, base: int, wall: int) -> Iterator[dict[str, Any]]:
    def of(column: Any, index: int) -> Any:
        return None if column is None else column[index]

    for index, payload in enumerate(batch.payloads):
        packed = of(batch.origins, index)
        known = None if packed is None else origin.decode(packed)
        headers = of(batch.headers, index)
        at, ttl = of(batch.ats, index), of(batch.ttls, index)
        yield {
            "id": f"{partition}-{base + index}",
            "partition": partition,
            "offset": base + index,
            "key": of(batch.keys, index),
            "payload": payload,
            "headers": None
            if headers is None
            else {k: v if isinstance(v, bytes) else v.encode() for k, v in values.decode_headers(headers).items()},
            "kind": of(batch.kinds, index),
            "encoding": of(batch.encodings, index),
            "reference": of(batch.references, index),
            "priority": 5 if batch.priorities is None else batch.priorities[index],
            "produced_at": EPOCH + timedelta(microseconds=wall),
            "at": EPOCH + timedelta(microseconds=at) if at else None,
            "ttl": timedelta(microseconds=ttl) if ttl else None,
            "origin_queue": None if known is None else known.queue,
            "origin_id": None if known is None else known.id,
        }


@settings(deadline=None)
@given(st.lists(batches(max_size=12), min_size=1, max_size=6), st.data())
def test_the_table_has_the_items_that_were_written(given: list[Batch], data: st.DataObject) -> None:
    store, base = MemoryStore(), 0
    wanted: list[dict[str, Any]] = []
    log = store.log(7, 3)
    assert [*log.recover()] == []
    for number, batch in enumerate(map(sensible, given)):
        wanted += expected(batch, 3, base, 1_000 + number // 2)
        log.append([frame_columns.encode([Produced(base, batch)], Moment(number, 1_000 + number // 2))])
        base += len(batch)
    log.sync()
    edges = sorted(data.draw(st.sets(st.integers(0, base), min_size=2, max_size=6) if base > 1 else st.just({0, base})))
    runs = edges[: len(edges) // 2 * 2]
    columns = data.draw(st.lists(st.sampled_from(ITEMS.names), min_size=1, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        small_steps(patch, *data.draw(st.tuples(st.integers(1, 20), st.integers(1, 15), st.integers(1, 15))))
        found = [*items(lambda: store.reader(7, 3), runs, columns)]
    assert all(batch.schema.equals(select_columns(ITEMS, columns)) for batch in found)
    assert rows(found) == [{name: wanted[offset][name] for name in columns} for offset in offsets(runs)]


def test_small_frames_are_combined_and_large_ones_are_not_copied(tmp_path: Path) -> None:
    with penstock.open(tmp_path, durability="os") as broker:
        queue = broker.create_queue("q")
        for n in range(300):
            queue.produce(b"small %d" % n, key=f"k{n}")
        queue.produce_many([NewItem(b"%0100d" % n) for n in range(5_000)])
        queue.produce(b"after")
    with published_queue(tmp_path, "q") as seen:
        found = [*items(seen.log(0), [0, 5_301], ["id", "payload", "key"])]
        assert [batch.num_rows for batch in found] == [300, 5_000, 1]
        payload = found[1].column("payload")
        (frame,) = (f for f in seen.log(0)().read(300, 301) if f.count == 5_000)
        assert payload.buffers()[2].size == 100 * 5_000 and payload.offset == 0 and len(frame.body) >= 500_000
        assert found[2].to_pylist() == [{"id": "0-5300", "payload": b"after", "key": None}]


def test_a_large_payload_is_a_batch_of_its_own(small: None, tmp_path: Path) -> None:
    with penstock.open(tmp_path, durability="os") as broker:
        queue = broker.create_queue("q")
        for size in (1, 2, 50, 3, 30, 31, 4):
            queue.produce(b"x" * size)
    with published_queue(tmp_path, "q") as seen:
        sizes = [[len(one) for one in batch.column(0).to_pylist()] for batch in items(seen.log(0), [0, 7], ["payload"])]
    assert sizes == [[1, 2], [50], [3, 30], [31, 4]]


def test_all_columns_of_an_item(tmp_path: Path) -> None:
    with penstock.open(tmp_path) as broker:
        queue = broker.create_queue("q", partitions=3)
        new = NewItem({"n": 1}, key="kunde-é", headers={"a": "1", "b": b"\xff"}, kind="invoice", reference="r", priority=2, at=WHEN, ttl=90)
        (first,) = queue.produce_many([new])
        second = queue.produce("text")
        with published_queue(tmp_path, "q") as seen:
            found = {row["id"]: row for row in seen.items()}
            produced_at = {item.id: item.produced_at for item in queue.items()}
    assert found[first] | {"partition": 0, "offset": 0} == {
        "id": first,
        "partition": 0,
        "offset": 0,
        "key": "kunde-é".encode(),
        "payload": b'{"n":1}',
        "headers": {"a": b"1", "b": b"\xff"},
        "kind": "invoice",
        "encoding": "json",
        "reference": "r",
        "priority": 2,
        "produced_at": produced_at[first],
        "at": WHEN,
        "ttl": timedelta(seconds=90),
        "origin_queue": None,
        "origin_id": None,
    }
    assert {name for name, value in found[second].items() if value is not None} == {
        *("id", "partition", "offset", "payload", "encoding", "priority", "produced_at"),
    }


def test_every_table_has_plain_types() -> None:
    plain = {
        pa.string(),
        pa.binary(),
        pa.int32(),
        pa.int64(),
        pa.timestamp("us", "UTC"),
        pa.duration("us"),
        pa.map_(pa.string(), pa.binary()),
    }
    assert {field.type for schema in TABLES.values() for field in schema} <= plain


@settings(deadline=None)
@given(
    st.integers(0, 65_534),
    st.lists(st.tuples(st.sampled_from([0, 990, 999, 9_998, 123_456, 10**14 - 5]), st.integers(1, 2_500)), min_size=1, max_size=12),
)
def test_ids_equal_those_formatted_one_by_one(partition: int, starts: list[tuple[int, int]]) -> None:
    runs = [edge for start, count in starts for edge in (start, start + count)]
    found = arrays.ids(partition, runs)
    found.validate(full=True)
    assert found.to_pylist() == format_ids(partition, offsets(runs))


# -- each item once ------------------------------------------------------------------------------------


def by_cursor(broker: Broker, queue: str) -> list[tuple[str, bytes]]:
    cursor = broker.queue(queue).cursor("all")
    found: list[tuple[str, bytes]] = []
    while page := cursor.read(1_000):
        found += [(item.id, item.payload) for item in page]
    return sorted(found)


def test_a_forwarded_item_is_read_in_its_first_partition_only(directory_broker: DirectoryBroker) -> None:
    run_sample_workload(directory_broker)
    directory_broker.run_and_publish()
    orders = directory_broker.broker.queue("orders")
    assert orders.stats().moving == 0
    with published_queue(directory_broker.path, "orders") as seen:
        found = sorted((row["id"], row["payload"]) for row in seen.items(["id", "payload"]))
    assert len(found) == 56 and len({payload for _, payload in found}) < 57
    assert found == by_cursor(directory_broker.broker, "orders")


def test_strays_of_a_resize_are_read_once(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("q", partitions=1)
    ids = [queue.produce(b"%d" % n, key=f"k{n}", at=directory_broker.clock.now() + timedelta(seconds=60)) for n in range(30)]
    queue.resize(4)
    directory_broker.clock.advance(120 * SECOND)
    directory_broker.run_and_publish()
    stats = queue.stats()
    assert stats.produced > 30  # some were forwarded to their new partitions
    with published_queue(directory_broker.path, "q") as seen:
        assert sorted(row["id"] for row in seen.items()) == sorted(ids)
        assert len(seen.states()) == 30


def test_dead_letters_forwarded_inside_their_dead_queue_are_read_once(directory_broker: DirectoryBroker) -> None:
    """Their origin is another queue, and does not change."""
    dead = directory_broker.broker.create_queue("dead", partitions=1)
    orders = directory_broker.broker.create_queue("orders", dead_queue="dead")
    for n in range(20):
        orders.produce(b"%d" % n, key=f"k{n}")
    orders.lease(20).bury("bad")
    directory_broker.run_and_publish()
    dead.lease(20).complete()
    dead.resize(4)
    # ready in partitions that no longer have their slots; a lease forwards them
    assert dead.seek(at=datetime(1970, 1, 1, tzinfo=UTC)) == 20
    dead.lease(20)
    directory_broker.run_and_publish()
    assert dead.stats().produced > 20
    with published_queue(directory_broker.path, "dead") as seen:
        found = seen.items(["payload", "origin_queue", "origin_id"])
    assert sorted(row["payload"] for row in found) == sorted(b"%d" % n for n in range(20))
    assert {row["origin_queue"] for row in found} == {"orders"} and len({row["origin_id"] for row in found}) == 20


# -- what is gone --------------------------------------------------------------------------------------


@pytest.fixture
def thinned(tmp_path: Path) -> Iterator[tuple[Path, Broker, dict[str, bytes]]]:
    """A queue of many segments in which retention has blanked completed items, and the payloads of the items left."""
    with penstock.open(tmp_path, segment_bytes=4_096, compression=False) as broker:
        queue = broker.create_queue("q", retention={"max_age": 0, "max_bytes": 1})
        for n in range(60):
            queue.produce_many([NewItem(b"" if m == 3 else b"%d-%d" % (n, m) * 20) for m in range(10)])
        queue.lease(100).complete()
        queue.compact()
        for lease in queue.lease(500):
            if lease.offset % 10 not in (3, 7):
                lease.complete()
        queue.compact()
        left = {item.id: item.payload for item in queue.items(limit=10_000)}
        yield tmp_path, broker, left


def test_blanked_items_are_not_returned_and_empty_ones_are(thinned: tuple[Path, Broker, dict[str, bytes]]) -> None:
    path, broker, left = thinned
    with published_queue(path, "q") as seen:
        assert any(facts.rewritten for facts in seen.log(0)().segments())
        found = {row["id"]: row["payload"] for row in seen.items(["id", "payload"])}
        assert rows(items(seen.log(0), [0, 600], ["id"], strict=False)) == [{"id": id} for id in found]
    assert found == {id: left[id] for id in found}
    unresolved = {item.id for item in broker.queue("q").items("leased", limit=1_000)}
    assert unresolved <= found.keys() and len(unresolved) == 100 and b"" in found.values()


def test_dropped_segments_are_an_error_or_left_out(tmp_path: Path) -> None:
    with penstock.open(tmp_path, segment_bytes=4_096, compression=False) as broker:
        queue = broker.create_queue("q", retention={"max_segments": 2})
        for n in range(60):
            queue.produce_many([NewItem(b"%d" % n * 50) for _ in range(10)])
            queue.lease(10).complete()
        queue.compact()
    with published_queue(tmp_path, "q") as seen:
        start = seen.log(0)().segments()[0].base_offset
        assert 0 < start < 600
        gone = f"items 0-0 to 0-{start - 1} cannot be read: retention dropped them; start at a later offset, or set failOnDataLoss=false"
        with pytest.raises(InvalidRequest, match=gone):
            seen.items()
        assert [row["offset"] for row in seen.items(strict=False)] == [*range(start, 600)]
        assert [row["offset"] for row in rows(items(seen.log(0), [start, 600], ["offset"]))] == [*range(start, 600)]


def test_items_blanked_during_reading_are_not_returned(tmp_path: Path) -> None:
    with penstock.open(tmp_path, segment_bytes=4_096, compression=False) as broker:
        queue = broker.create_queue("q", retention={"max_age": 0, "max_bytes": 1})
        for n in range(60):
            queue.produce_many([NewItem(b"%d" % n * 200) for _ in range(10)])
        with published_queue(tmp_path, "q") as seen:
            reading = items(seen.log(0), [0, 600], ["offset", "payload"], strict=False)
            first = next(reading)
            for lease in queue.lease(600):
                if lease.offset % 10 != 7 and lease.offset:
                    lease.complete()
            queue.compact()
            found = [*first.to_pylist(), *(row for batch in reading for row in batch.to_pylist())]
    assert len({row["offset"] for row in found}) == len(found) and {*range(7, 600, 10)} <= {row["offset"] for row in found}
    assert all(row["payload"] == b"%d" % (row["offset"] // 10) * 200 for row in found)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_damage_is_an_error_or_left_out(tmp_path: Path) -> None:
    with penstock.open(tmp_path, compression=False) as broker:
        queue = broker.create_queue("q")
        for n in range(10):
            queue.produce(b"%d" % n * 100)
    with published_queue(tmp_path, "q") as seen:
        log = next((tmp_path / "logs" / f"{seen.info.incarnation:016x}").rglob("*.log"))
        flip(log, log.read_bytes().index(b"4" * 100))
        with pytest.raises(CorruptLog, match=r"items 0-4 to 0-4 cannot be read: .*; run verify, then repair, or set failOnDataLoss=false"):
            seen.items()
        assert [row["offset"] for row in seen.items(strict=False)] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert [row["offset"] for row in rows(items(seen.log(0), [5, 10], ["offset"]))] == [5, 6, 7, 8, 9]


def test_reading_a_deleted_queue_is_an_error_and_not_an_empty_table(directory_broker: DirectoryBroker) -> None:
    queue = directory_broker.broker.create_queue("q")
    fill(queue, 10)
    seen = PublishedQueue(directory_broker.path, "q")
    queue.delete()
    with pytest.raises(StorageFailed, match="items 0 to 9 are missing in the log, and no record says why; the queue was deleted"):
        rows(items(seen.log(0), [0, 10], ["id"]))
    seen.directory.close()


def test_offsets_beyond_the_last_item_are_an_error(directory_broker: DirectoryBroker) -> None:
    fill(directory_broker.broker.create_queue("q"), 10)
    with published_queue(directory_broker.path, "q") as seen, pytest.raises(StorageFailed, match="items 10 to 11 are missing in the log"):
        rows(items(seen.log(0), [5, 12], ["id"]))
