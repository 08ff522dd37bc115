"""Published writes in the inbox: the owner adopts each exactly once."""

import random
from pathlib import Path

import msgspec
import pytest

from penstock.broker import inbox
from penstock.logs.columns import FrameColumns, encode
from penstock.logs.files.filesystem import SystemFiles
from penstock.logs.log import Frame
from penstock.logs.store import WriteManifest, write_name
from penstock.loop.requests import ProduceRequest, Request
from penstock.rules.records import Produced
from penstock.rules.routing import slot
from penstock.testing import SimulatedFiles
from penstock.words.batch import Batch
from penstock.words.binary_column import BinaryColumn
from penstock.words.clock import DAY, SECOND, Moment
from tests.broker.broker_under_test import BrokerUnderTest, batch_of, keys_at, run_threads, wait_until
from tests.broker.other_process import (
    KEYS,
    OtherProcess,
    keyed_batch,
    logged_warnings,
    numbers_by_key,
    other_process,
    process_inbox,
    texts,
)
from tests.broker.storages import DirectoryStorage, MemoryStorage

# -- once ----------------------------------------------------------------------------------------------


def test_an_open_broker_adopts_a_published_write(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    assert not process_inbox(file_broker)
    other.publish_texts(queue, *texts(0, 2))
    assert process_inbox(file_broker)
    assert other.inbox_files() == []
    assert not process_inbox(file_broker)
    assert queue.counts() == {"ready": 24}
    assert numbers_by_key(queue.drain()) == {key: [0, 1] for key in KEYS}


def test_opening_adopts_writes_published_before(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(partitions=3), other_process(file_broker)
    file_broker.embedded.close()
    other.publish_texts(queue, *texts(0, 2))
    file_broker.embedded = file_broker._open()
    assert other.inbox_files() == []
    assert numbers_by_key(queue.drain()) == {key: [0, 1] for key in KEYS}


def test_a_broker_with_threads_adopts_soon(tmp_path: Path) -> None:
    broker = BrokerUnderTest(DirectoryStorage(tmp_path), threaded=True)
    queue, other = broker.create(partitions=2), OtherProcess(SystemFiles(), str(tmp_path / "data"))
    for number in range(1, 4):
        other.publish_texts(queue, *texts(number, number + 1), number=number)
    wait_until(lambda: queue.stats().ready == 36)
    wait_until(lambda: other.inbox_files() == [])
    assert numbers_by_key(queue.drain()) == {key: [1, 2, 3] for key in KEYS}
    broker.embedded.close()


def test_many_publish_at_once_while_the_owner_works(tmp_path: Path) -> None:
    broker = BrokerUnderTest(DirectoryStorage(tmp_path), threaded=True)
    queue, root = broker.create(partitions=2), str(tmp_path / "data")

    def publish(source: str) -> None:
        other = OtherProcess(SystemFiles(), root)
        for number in range(1, 6):
            other.publish_texts(queue, f"{source}:{number}", source=source, number=number)

    run_threads(*(lambda source=source: publish(source) for source in "abcd"))
    wait_until(lambda: queue.stats().ready == 20)
    assert numbers_by_key(queue.drain()) == {source: [1, 2, 3, 4, 5] for source in "abcd"}
    broker.embedded.close()


def test_adopted_numbers_of_a_source_and_lower_ones_are_not_adopted_again(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish_texts(queue, "a:5", number=5)
    process_inbox(file_broker)
    for number in (5, 4, 1):
        assert other.publish_texts(queue, "a:9", number=number), "it is not in the inbox any more"
        assert process_inbox(file_broker)
        assert other.inbox_files() == []
        file_broker.restart()
    other.publish_texts(queue, "a:6", number=6)
    other.publish_texts(queue, "b:1", number=1, source="another")
    process_inbox(file_broker)
    assert sorted(queue.drain()) == ["a:5", "a:6", "b:1"]


def test_a_write_published_twice_is_adopted_once(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    assert other.publish_texts(queue, "a:1")
    assert not other.publish_texts(queue, "a:2")
    process_inbox(file_broker)
    assert queue.drain() == ["a:1"] and other.inbox_files() == []


def test_a_write_that_a_killed_owner_adopted_is_not_adopted_again(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish_texts(queue, "a:1")
    process_inbox(file_broker)
    file_broker.kill()
    other.publish_texts(queue, "a:1")
    file_broker.kill()
    assert queue.drain() == ["a:1"]


def test_an_empty_write_is_adopted(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.inbox.publish(write_name(1), queue.incarnation, WriteManifest([], "s", 1))
    other.publish(queue.incarnation, number=2)
    assert process_inbox(file_broker)
    assert other.inbox_files() == [] and queue.counts() == {}


def test_writes_of_several_queues_do_not_wait_for_each_other(file_broker: BrokerUnderTest) -> None:
    one, two, other = file_broker.create("one"), file_broker.create("two"), other_process(file_broker)
    one.pause(produce=True)
    other.publish_texts(one, "a:1")
    other.publish_texts(two, "a:1")
    process_inbox(file_broker)
    assert (one.drain(), two.drain()) == ([], ["a:1"])


# -- where items go --------------------------------------------------------------------------------------


def test_adopted_items_go_to_the_partitions_of_their_keys(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(partitions=4), other_process(file_broker)
    keys = [key for number in range(4) for key in keys_at(queue, number, 3)]
    random.Random(3).shuffle(keys)
    other.publish_texts(queue, *[f"{key}:1" for key in keys])
    process_inbox(file_broker)
    owners = queue.loop.engine.map.owners
    held = queue.lease(100)
    assert sorted(held.keys) == sorted(keys)
    assert {
        one.partition: sorted(key.decode() for part in one.items for key in part.batch.keys or () if key) for one in held.parts_granted
    } == {number: sorted(key for key in keys if owners[slot(key.encode())] == number) for number in range(4)}


def test_items_without_keys_go_anywhere_and_mixed_ones_to_both(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(partitions=3), other_process(file_broker)
    mixed = batch_of(*[f"m:{n}" for n in range(20)], keys=[None if n % 2 else f"k{n}" for n in range(20)])
    other.publish(queue.incarnation, *[batch_of(*[f"p{at}:{n}" for n in range(5)]) for at in range(12)], mixed)
    process_inbox(file_broker)
    served = queue.drain()
    assert len(served) == 80 and len(set(served)) == 80
    filled = [handle.state.next_offset for handle in queue.loop.engine.handles.values()]
    assert all(filled), "frames without keys are dealt to all"


def test_adopted_items_keep_all_their_fields(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    batch = batch_of("now", "later", "never", keys=["k", None, "l"], priorities=[1, 5, 9], ttl=30)
    batch.headers = [None, msgspec.msgpack.encode({"a": b"1"}), None]
    batch.kinds = ["kind", None, None]
    batch.references = [None, "r", None]
    batch.ats = [0, file_broker.after(10), 0]
    other.publish(queue.incarnation, batch)
    process_inbox(file_broker)
    held = queue.lease(10)
    parts = [part.batch for one in held.parts_granted for part in one.items]
    found = [(part.payloads, part.keys, part.kinds, part.ttls) for part in parts]
    assert held.texts == ["now", "never"] and queue.counts() == {"leased": 2, "scheduled": 1}
    assert found[0] == ([b"now"], [b"k"], ["kind"], [30 * SECOND])
    file_broker.advance_in_steps(11)
    assert queue.lease(10).parts_granted[0].items[0].batch.headers == [msgspec.msgpack.encode({"a": b"1"})]


def test_items_with_every_field_are_divided_over_partitions(file_broker: BrokerUnderTest) -> None:
    """Before and after a kill, each partition has the items of its keys with all their fields, in order."""
    queue, other = file_broker.create(partitions=3), other_process(file_broker)
    count, chance = 60, random.Random(4)
    keys = [f"key-{chance.randrange(20)}" for _ in range(count)]
    batch = batch_of(*texts(0, 5), keys=keys, priorities=[n % 10 for n in range(count)], ttl=30, dedups=texts(0, 5))
    batch.headers = [msgspec.msgpack.encode({"n": str(n)}) if n % 3 else None for n in range(count)]
    batch.kinds, batch.encodings = [f"kind-{n % 4}" for n in range(count)], ["json"] * count
    batch.references = [f"r\N{EURO SIGN}{n}" if n % 5 else None for n in range(count)]
    batch.ats = [file_broker.after(n) if n % 2 else 0 for n in range(count)]
    batch.dedup_windows = [n * SECOND for n in range(count)]
    other.publish(queue.incarnation, batch)
    process_inbox(file_broker)
    owners = queue.loop.engine.map.owners
    expected = {
        number: batch.take([index for index, key in enumerate(keys) if owners[slot(key.encode())] == number]) for number in range(3)
    }
    for _ in range(2):
        handles = queue.loop.engine.handles
        retained = {number: handle.usable_partition.read_retained(0, count).items for number, handle in handles.items()}
        assert {number: Batch.join([part.batch for part in parts]) for number, parts in retained.items()} == expected
        file_broker.kill()
        file_broker.turn()
        queue = file_broker.find()


def test_a_write_is_adopted_without_reading_its_values(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of items for one partition are taken over as bytes, as Spark writes them."""
    queue, other = file_broker.create(partitions=2), other_process(file_broker)
    frames = [batch_of(*[f"{key}:{number}" for key in keys_at(queue, number, 3)], keys=keys_at(queue, number, 3)) for number in range(2)]
    frames[0].references, frames[1].references = ["a", "b", None], None
    other.publish(queue.incarnation, *frames, batch_of("none:1", "none:2"))

    cut = BinaryColumn._cut

    def read(column: BinaryColumn, start: int, stop: int) -> list[bytes]:
        assert stop - start <= 1, "more than the first value is read"
        return cut(column, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(BinaryColumn, "_cut", read)
        process_inbox(file_broker)
    held = queue.lease(100)
    assert sorted(held.texts) == sorted([text.decode() for frame in frames for text in frame.payloads] + ["none:1", "none:2"])
    assert sorted(held.keys) == sorted(["", ""] + [key for number in range(2) for key in keys_at(queue, number, 3)])


def test_parts_and_frames_are_adopted_in_order(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(partitions=3), other_process(file_broker)
    other.publish(queue.incarnation, *[keyed_batch(*texts(n, n + 1)) for n in range(9)], parts=3)
    process_inbox(file_broker)
    assert numbers_by_key(queue.drain()) == {key: [*range(9)] for key in KEYS}


# -- what holds adoption back ----------------------------------------------------------------------------


def test_a_pause_delays_adoption(file_broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    queue, other = file_broker.create(partitions=2), other_process(file_broker)
    queue.pause(produce=True)
    other.publish_texts(queue, *texts(0, 2))
    for _ in range(3):
        assert not process_inbox(file_broker)
        file_broker.advance(1)
    assert len(other.inbox_files()) == 1 and queue.counts() == {}
    file_broker.restart()
    assert len(other.inbox_files()) == 1
    assert len(logged_warnings(caplog)) == 2 and "paused" in logged_warnings(caplog)[0], "each owner says it once"
    queue.pause(produce=False)
    file_broker.advance(1)
    assert process_inbox(file_broker)
    assert numbers_by_key(queue.drain()) == {key: [0, 1] for key in KEYS}


def test_a_pause_during_an_adoption_delays_the_rest(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "CHUNKS_AT_ONCE", 1)
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish(queue.incarnation, *[batch_of(f"{n}") for n in range(4)])
    run, calls = file_broker.embedded.run_request, 0

    def pausing(incarnation: int, request: Request) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            queue.pause(produce=True)
        return run(incarnation, request)

    monkeypatch.setattr(file_broker.embedded, "run_request", pausing)
    process_inbox(file_broker)
    assert queue.counts() == {"ready": 2}
    other.publish_texts(queue, "k:1", source="another")
    queue.pause(produce=False)
    file_broker.restart()
    assert queue.drain() == ["0", "1", "2", "3", "k:1"]


def test_limits_and_waiting_producers_do_not_delay_adoption(file_broker: BrokerUnderTest) -> None:
    """A published write is on this disk already; if it waited, every stream that writes would wait behind it."""
    queue, other = file_broker.create(max_items=3, max_bytes=100), other_process(file_broker)
    queue.produce("1", "2", "3")
    waiting = queue.submit(ProduceRequest(batch_of("waits"), deadline=file_broker.deadline(60)))
    file_broker.turn()
    other.publish(queue.incarnation, batch_of(*["x" * 50] * 9), batch_of("d", dedups=["id"]))
    assert process_inbox(file_broker)
    assert queue.stats().ready == 13 and not waiting.done
    queue.drain()
    assert waiting.done


def test_a_full_disk_delays_adoption(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(partitions=2), other_process(file_broker)
    other.publish(queue.incarnation, *[keyed_batch(*texts(n, n + 1)) for n in range(6)])
    assert isinstance(other.files, SimulatedFiles)
    other.files.set_free_bytes(500)
    process_inbox(file_broker)
    other.files.set_free_bytes(None)
    for _ in range(9):
        file_broker.advance(30)
        process_inbox(file_broker)
    assert other.inbox_files() == []
    assert numbers_by_key(queue.drain()) == {key: [*range(6)] for key in KEYS}


# -- dedup ids -------------------------------------------------------------------------------------------


def test_the_same_dedup_ids_in_one_write_and_in_two(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(partitions=3, dedup_window=100 * SECOND), other_process(file_broker)
    names = [f"id-{n % 7}" for n in range(20)]
    first = batch_of(*[f"a{n}" for n in range(20)], dedups=names)
    again = batch_of(*[f"b{n}" for n in range(20)], dedups=names, keys=["k"] * 20)
    other.publish(queue.incarnation, first, batch_of(*["c"] * 3, dedups=["id-1", "id-7", None]), number=1)
    other.publish(queue.incarnation, first, again, number=2)
    process_inbox(file_broker)
    assert sorted(queue.drain()) == sorted([*[f"a{n}" for n in range(7)], "c", "c", *[f"b{n}" for n in range(7)]]), "ids are the key's own"
    file_broker.advance_in_steps(101)
    other.publish(queue.incarnation, first, number=3)
    process_inbox(file_broker)
    assert len(queue.drain()) == 7, "the window is over"


def test_dedup_ids_of_produced_items_count_too(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(dedup_window=100 * SECOND), other_process(file_broker)
    queue.produce("first", dedups=["id"])
    other.publish(queue.incarnation, batch_of("second", "third", dedups=["id", "other"]))
    process_inbox(file_broker)
    queue.produce("fourth", dedups=["other"])
    assert queue.drain() == ["first", "third"]


# -- queues that are no more -------------------------------------------------------------------------------


def test_the_write_of_a_deleted_queue_is_removed(file_broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    file_broker.delete("q")
    file_broker.create("q")
    other.publish_texts(queue, "a:1")
    other.publish_texts(queue, "a:2", number=2)
    assert process_inbox(file_broker)
    assert other.inbox_files() == [] and file_broker.find().counts() == {}
    assert len(logged_warnings(caplog)) == 2 and "is deleted" in logged_warnings(caplog)[0]


def test_a_queue_deleted_while_its_write_is_adopted(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "CHUNKS_AT_ONCE", 1)
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish(queue.incarnation, *[batch_of(f"{n}") for n in range(4)])
    run, calls = file_broker.embedded.run_request, 0

    def deleting(incarnation: int, request: Request) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            file_broker.delete("q")
        return run(incarnation, request)

    monkeypatch.setattr(file_broker.embedded, "run_request", deleting)
    process_inbox(file_broker)
    assert other.inbox_files() == []


def test_a_write_waits_for_a_queue_that_is_being_opened(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish_texts(queue, "a:1")
    loop = file_broker.embedded._loops.pop(queue.incarnation)
    process_inbox(file_broker)
    assert len(other.inbox_files()) == 1
    file_broker.embedded._loops[queue.incarnation] = loop
    file_broker.advance(1)
    process_inbox(file_broker)
    assert queue.drain() == ["a:1"]


# -- the owner -----------------------------------------------------------------------------------------------


def test_a_bug_in_one_entry_does_not_stop_the_others(
    file_broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish_texts(queue, "a:1", source="first")
    other.publish_texts(queue, "b:1", source="second")

    def mistaken(frame: Frame) -> FrameColumns:
        if b"a:1" in FrameColumns(frame).batch().payloads:
            raise ArithmeticError("a mistake")
        return FrameColumns(frame)

    monkeypatch.setattr(inbox, "FrameColumns", mistaken)
    file_broker.restart()
    assert queue.drain() == ["b:1"]
    assert len(logged_warnings(caplog)) == 1 and "please report" in logged_warnings(caplog)[0]


def test_writes_that_never_ended_are_removed_after_a_week(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    now = file_broker.clock.read().wall
    for age in (6 * DAY, 8 * DAY):
        other.stage(queue.incarnation, [[batch_of("a")]], write_name(now - age))
    file_broker.restart()
    assert len(other.inbox_files()) == 1


def test_closing_does_not_wait_for_a_large_write(tmp_path: Path) -> None:
    broker = BrokerUnderTest(DirectoryStorage(tmp_path), threaded=True)
    queue, other = broker.create(), OtherProcess(SystemFiles(), str(tmp_path / "data"))
    other.publish(queue.incarnation, *[batch_of(*[f"{n}"] * 10) for n in range(2_000)])
    wait_until(lambda: queue.stats().ready > 0)
    broker.embedded.close()
    assert len(other.inbox_files()) == 1, "it was cut off"
    again = BrokerUnderTest(DirectoryStorage(tmp_path), threaded=True)
    wait_until(lambda: again.find().stats().ready == 20_000 and other.inbox_files() == [])
    again.embedded.close()


def test_a_broker_in_memory_has_an_inbox_too() -> None:
    broker = BrokerUnderTest(MemoryStorage())
    queue, inbox = broker.create(), broker.embedded.store.inbox
    inbox.begin_write("w")
    writer = inbox.part_writer("w", "p", queue.incarnation)
    writer.add(encode([Produced(0, batch_of("a", "b"))], Moment(0, 0)))
    assert inbox.publish("w", queue.incarnation, WriteManifest([writer.finish()], "s", 1))
    assert process_inbox(broker) and queue.drain() == ["a", "b"] and inbox.waiting() == []
