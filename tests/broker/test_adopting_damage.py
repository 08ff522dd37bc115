"""Damaged published writes: nothing of them is adopted, and an error is logged."""

import random

import msgspec
import pytest

from penstock.broker import inbox
from penstock.logs.columns import encode
from penstock.logs.files.inbox import MANIFEST
from penstock.logs.store import WriteManifest, write_name
from penstock.loop.requests import Request
from penstock.rules.records import Produced
from penstock.testing import SimulatedFiles
from penstock.words.clock import Moment
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, batch_of
from tests.broker.other_process import BEGAN, ROOT, OtherProcess, keyed_batch, logged_warnings, other_process, process_inbox, texts
from tests.broker.storages import SimulatedStorage

# -- as it is found -----------------------------------------------------------------------------------


def valid_write(broker: BrokerUnderTest) -> tuple[QueueUnderTest, OtherProcess, list[str]]:
    """A valid write of three parts, and the paths of its files, for a test to damage."""
    queue, other = broker.create(partitions=2), other_process(broker)
    broker.embedded.close()
    other.publish(queue.incarnation, *[keyed_batch(*texts(n, n + 1)[:3]) for n in range(5)], parts=3)
    folder = f"{ROOT}/inbox/{other.inbox.waiting()[0].label}"
    return queue, other, [f"{folder}/{name}" for name in other.files.list(folder)]


def reopened(broker: BrokerUnderTest, files: SimulatedFiles) -> BrokerUnderTest:
    again = BrokerUnderTest(SimulatedStorage(files), clock=broker.clock)
    again.turn()
    return again


def test_nothing_of_a_damaged_write_is_adopted(caplog: pytest.LogCaptureFixture) -> None:
    """Truncated at any byte, or with a flipped bit: it stays in the inbox, and is logged once."""
    broker = BrokerUnderTest(SimulatedStorage())
    _, other, paths = valid_write(broker)
    assert isinstance(other.files, SimulatedFiles)
    chance, tried = random.Random(1), 0
    for path in paths:
        good = other.files.content(path)
        sizes = {0, 1, len(good) - 1, *chance.sample(range(len(good)), 12)}
        bits = [None, *chance.sample(range(8 * len(good)), 25)]
        for size, bit in [*((size, None) for size in sizes), *((None, bit) for bit in bits)]:
            disk = other.files.copy()
            if size is not None:
                disk.put_file(path, good[:size])
            elif bit is not None:
                disk.flip_bit(path, bit)
            else:
                disk.remove(path)
            caplog.clear()
            again = reopened(broker, disk)
            adopted = again.find().stats().ready
            if adopted:  # a bit of the manifest that says nothing
                assert adopted == 15 and path.endswith(MANIFEST), f"{path} {size} {bit}"
                continue
            tried += 1
            for _ in range(3):
                again.advance(1)
                assert not process_inbox(again)
            assert again.find().counts() == {}
            assert OtherProcess(disk).inbox_files() == other.inbox_files()
            assert len(logged_warnings(caplog)) == 1 and "write it again" in logged_warnings(caplog)[0]
            again.find().produce("the queue goes on")
            again.embedded.close()
    assert tried > 100


@pytest.mark.parametrize("changes", [{"frames": 1}, {"frames": 3}, {"items": 5}, {"items": 7}, {"name": "part-7.frames"}, {"name": ".."}])
def test_a_part_that_is_not_as_its_manifest_says(changes: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    broker = BrokerUnderTest(SimulatedStorage())
    _, other, paths = valid_write(broker)
    assert isinstance(other.files, SimulatedFiles)
    manifest = msgspec.json.decode(other.files.content(paths[0]), type=WriteManifest)
    parts = [*manifest.parts[:2], msgspec.structs.replace(manifest.parts[2], **changes)]
    other.files.put_file(paths[0], msgspec.json.encode(msgspec.structs.replace(manifest, parts=parts)))
    again = reopened(broker, other.files)
    assert again.find().counts() == {} and len(other.inbox_files()) == 1 and len(logged_warnings(caplog)) == 1


def test_frames_that_no_queue_takes_are_refused_before_any_is_taken(file_broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    good, wrong = batch_of("good"), batch_of("wrong", keys=["k"])
    wrong.keys = [b"k" * 5_000]
    other.publish(queue.incarnation, good, wrong)
    process_inbox(file_broker)
    assert queue.counts() == {} and "no queue takes" in logged_warnings(caplog)[0]


def test_a_frame_with_a_valid_checksum_and_invalid_content_is_refused(
    file_broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    write = write_name(BEGAN)
    other.inbox.begin_write(write)
    writer = other.inbox.part_writer(write, "p.frames", queue.incarnation)
    draft = encode([Produced(0, batch_of("a", "b"))], Moment(0, 0))
    writer.add(draft)
    writer.add(draft._replace(column_bits=1 << 15))
    other.inbox.publish(write, queue.incarnation, WriteManifest([writer.finish()], "s", 1))
    process_inbox(file_broker)
    assert queue.counts() == {} and len(logged_warnings(caplog)) == 1


@pytest.mark.parametrize("edges", [b"\2\0\0\0\1\0\0\0", b"\1\0\0\0\x11\0\0\0", b"\377\377\377\377\2\0\0\0"])
def test_a_frame_whose_offsets_are_wrong_is_refused(edges: bytes, file_broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    """Its checksums are right, so whoever wrote it was wrong: no payload may end where another item's begins."""
    queue, other = file_broker.create(), other_process(file_broker)
    write = write_name(BEGAN)
    other.inbox.begin_write(write)
    writer = other.inbox.part_writer(write, "p.frames", queue.incarnation)
    draft = encode([Produced(0, batch_of("a", "b"))], Moment(0, 0))
    body = b"".join(draft.parts)
    assert body[4:12] == b"\1\0\0\0\2\0\0\0"
    writer.add(draft)
    writer.add(draft._replace(parts=[body[:4] + edges + body[12:]]))
    other.inbox.publish(write, queue.incarnation, WriteManifest([writer.finish()], "s", 1))
    process_inbox(file_broker)
    assert queue.counts() == {} and len(logged_warnings(caplog)) == 1 and "write" in logged_warnings(caplog)[0]


def test_writes_behind_a_damaged_one_of_the_same_source_wait(file_broker: BrokerUnderTest) -> None:
    """Writes of other sources are adopted. Those of the same source wait: after a later number this one never could
    be.
    """
    queue, other = file_broker.create(), other_process(file_broker)
    assert isinstance(other.files, SimulatedFiles)
    other.publish_texts(queue, "k:1", number=1)
    write = other.inbox.waiting()[0]
    path = f"{ROOT}/inbox/{write.label}/part-0.frames"
    good = other.files.content(path)
    other.files.flip_bit(path, 900)
    other.publish_texts(queue, "k:2", number=2)
    other.publish_texts(queue, "k:3", source="another")
    other.files.put_file(f"{ROOT}/inbox/{queue.incarnation:016x}-nonsense.drop/{MANIFEST}", b"{}")
    process_inbox(file_broker)
    assert queue.drain() == ["k:3"] and len(other.inbox_files()) == 3
    other.files.rename(f"{ROOT}/inbox/{write.label}", f"{ROOT}/inbox/aside")
    process_inbox(file_broker)
    assert queue.drain() == ["k:2"]
    other.files.put_file(f"{ROOT}/inbox/aside/part-0.frames", good)
    other.files.rename(f"{ROOT}/inbox/aside", f"{ROOT}/inbox/{write.label}")
    process_inbox(file_broker)
    assert queue.drain() == [], "it comes too late"


def test_a_repaired_write_is_adopted(file_broker: BrokerUnderTest) -> None:
    queue, other = file_broker.create(), other_process(file_broker)
    other.publish_texts(queue, "k:1", number=1)
    assert isinstance(other.files, SimulatedFiles)
    file = other.inbox.waiting()[0].label
    path = f"{ROOT}/inbox/{file}/part-0.frames"
    good = other.files.content(path)
    other.files.flip_bit(path, 900)
    process_inbox(file_broker)
    other.files.rename(f"{ROOT}/inbox/{file}", f"{ROOT}/inbox/aside")
    process_inbox(file_broker)
    other.files.put_file(f"{ROOT}/inbox/aside/part-0.frames", good)
    other.files.rename(f"{ROOT}/inbox/aside", f"{ROOT}/inbox/{file}")
    process_inbox(file_broker)
    assert queue.drain() == ["k:1"]


def test_damage_that_appears_during_an_adoption(
    file_broker: BrokerUnderTest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is adopted, so no other write may begin. Moved away and back, the write can only be refused."""
    monkeypatch.setattr(inbox, "CHUNKS_AT_ONCE", 1)
    queue, other = file_broker.create(), other_process(file_broker)
    assert isinstance(other.files, SimulatedFiles)
    other.publish(queue.incarnation, *[batch_of(f"{n}") for n in range(4)], parts=4)
    file = other.inbox.waiting()[0].label
    path = f"{ROOT}/inbox/{file}/part-2.frames"
    disk, good, run, calls = other.files, other.files.content(path), file_broker.embedded.run_request, 0

    def damaging(incarnation: int, request: Request) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            disk.flip_bit(path, 600)
        return run(incarnation, request)

    monkeypatch.setattr(file_broker.embedded, "run_request", damaging)
    process_inbox(file_broker)
    monkeypatch.setattr(file_broker.embedded, "run_request", run)
    other.publish_texts(queue, "k:1", source="another", write=write_name(1))
    process_inbox(file_broker)
    assert queue.drain() == ["0", "1"]
    other.files.rename(f"{ROOT}/inbox/{file}", f"{ROOT}/inbox/aside")
    process_inbox(file_broker)
    assert queue.drain() == ["k:1"]
    other.files.put_file(f"{ROOT}/inbox/aside/part-2.frames", good)
    other.files.rename(f"{ROOT}/inbox/aside", f"{ROOT}/inbox/{file}")
    process_inbox(file_broker)
    other.publish_texts(queue, "k:2", source="a third", write=write_name(1))
    process_inbox(file_broker)
    assert queue.drain() == ["k:2"] and len(other.inbox_files()) == 1
    assert "nobody can say which part" in logged_warnings(caplog)[-1]
