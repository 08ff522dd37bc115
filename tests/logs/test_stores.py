"""Every kind of store implements store.py: logs, inbox and blobs, for the owner and for other processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.logs.backends import open_read_only
from penstock.logs.columns import FrameColumns, encode
from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filesystem import Files, SystemFiles
from penstock.logs.files.inbox import FileInbox
from penstock.logs.log import Log
from penstock.logs.memory import MemoryStore
from penstock.logs.store import BLOB_SWEEPS, Inbox, InboxEntry, ReadStore, StagedPart, Store, WriteManifest, write_name
from penstock.rules.records import Produced
from penstock.testing import SimulatedFiles
from penstock.words.clock import Moment
from penstock.words.errors import CorruptLog, InvalidRequest, StorageFailed
from tests.broker.broker_under_test import batch_of
from tests.logs.backends import base_draft, draft, state_draft

QUEUE, OTHER = 0x0A, 0x0B


class StoreBackend(ABC):
    """Opens a store of one kind again and again. A new kind needs a subclass and a line in STORE_BACKENDS."""

    @abstractmethod
    def own(self) -> Store:
        """Open the store as its owner; the previous owner is closed."""

    @abstractmethod
    def beside(self) -> Inbox:
        """The inbox for another process, while the owner has the store open."""

    def read(self) -> ReadStore | None:
        """The store for another process; None when other processes cannot read it."""
        return None


class MemoryStoreBackend(StoreBackend):
    def __init__(self) -> None:
        self._store = MemoryStore()

    def own(self) -> Store:
        return self._store

    def beside(self) -> Inbox:
        return self._store.inbox


class FileStoreBackend(StoreBackend):
    def __init__(self, root: str, files: Files) -> None:
        self._root = root
        self._files = files

    def own(self) -> Store:
        return FileStore.open(self._root, files=self._files)

    def beside(self) -> Inbox:
        return FileInbox(self._files, self._root)

    def read(self) -> ReadStore:
        return open_read_only(self._root, self._files)


STORE_BACKENDS: dict[str, Callable[[Path], StoreBackend]] = {
    "memory": lambda path: MemoryStoreBackend(),
    "files": lambda path: FileStoreBackend(str(path / "data"), SystemFiles()),
    "simulated files": lambda path: FileStoreBackend("/data", SimulatedFiles()),
}


@pytest.fixture(params=STORE_BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> StoreBackend:
    return STORE_BACKENDS[request.param](tmp_path)


@pytest.fixture
def store(backend: StoreBackend) -> Iterator[Store]:
    with closing(backend.own()) as found:
        yield found


@pytest.fixture
def inbox(backend: StoreBackend, store: Store) -> Inbox:
    return backend.beside()


def started(store: Store, incarnation: int = QUEUE, partition: int = 0) -> Log:
    log = store.log(incarnation, partition)
    assert [*log.recover()] == []
    return log


# -- logs --------------------------------------------------------------------------------------------


def test_a_log_can_be_opened_again(backend: StoreBackend, store: Store) -> None:
    log = started(store)
    log.append([draft(0, 3, b"abc")])
    log.sync()
    log.close()
    store.close()
    with closing(backend.own()) as again:
        assert len([*again.log(QUEUE, 0, create=False).recover()]) == 1


def test_another_process_reads_what_is_published(backend: StoreBackend, store: Store) -> None:
    log = started(store)
    log.append([base_draft(0), draft(0, 3, b"abc"), state_draft(3)])
    log.sync()
    log.publish()
    stores = [store, backend.read()]
    for each in [one for one in stores if one is not None]:
        with closing(each.reader(QUEUE, 0)) as reader:
            assert len([*reader.recover()]) == 3
            found = reader.readable_range()
            assert found == log.readable_range()
            assert (found.start, found.end, found.first_sequence, found.sequence, found.intact_from) == (0, 3, 1, 3, 1)
            assert reader.size_bytes() == log.size_bytes() > 0


def test_the_readable_range_of_a_new_log(store: Store) -> None:
    log = started(store)
    assert (log.readable_range().start, log.readable_range().end, log.readable_range().first_sequence, log.readable_range().sequence) == (
        0,
        0,
        1,
        0,
    )


def test_the_readable_range_after_retention(store: Store) -> None:
    log = started(store)
    log.append([base_draft(0), draft(0, 2, b"ab")])
    for start in (2, 4, 6, 8):
        log.rotate(base_draft(start))
        log.append([draft(start, 2, b"cd")])
    log.sync()
    assert log.readable_range() == (0, 10, 10, 1, [1, 3, 5, 7, 9])
    log.drop(1)
    log.rewrite(0, 1, [])
    log.sync()
    log.publish()
    assert log.readable_range() == (2, 10, 10, 7, [3, 7, 9])
    with closing(store.reader(QUEUE, 0)) as reader:
        assert [*reader.recover()] and reader.readable_range() == log.readable_range()


def test_the_logs_of_an_incarnation_are_removed(backend: StoreBackend, store: Store) -> None:
    store.create_logs(QUEUE, 0, 1)
    for incarnation, partition in ((QUEUE, 0), (QUEUE, 1), (OTHER, 0)):
        log = started(store, incarnation, partition)
        log.append([draft(0, 1, b"a")])
        log.close()
    store.remove_logs(QUEUE)
    store.remove_logs(QUEUE)
    beside = backend.read()
    if beside is not None:
        assert set(beside.incarnations()) == {OTHER}
        with pytest.raises(CorruptLog):
            beside.reader(QUEUE, 0)
    assert [*store.log(QUEUE, 0).recover()] == []
    assert len([*store.log(OTHER, 0, create=False).recover()]) == 1


def test_the_summary_of_a_log_that_was_never_opened_is_empty(store: Store) -> None:
    store.create_logs(QUEUE, 0)
    assert store.summary(QUEUE, 0) == b""
    log = started(store)
    log.append([draft(0, 1, b"a")])
    assert store.summary(QUEUE, 0) is None


def test_commits_and_jobs_run(store: Store) -> None:
    log = started(store)
    log.append([draft(0, 1, b"a")])
    ends: list[object] = []
    store.disk.commit([log], lambda log: True, lambda log, failure: ends.append(failure), here=log)
    store.disk.run_job(QUEUE, 0, lambda: ends.append("ran"))
    store.close()
    assert ends == [None, "ran"]


def test_looking_at_a_removed_log_does_not_create_it() -> None:
    store = MemoryStore()
    started(store).close()
    store.remove_logs(QUEUE)
    assert (store.summary(QUEUE, 0), store.reader(QUEUE, 0).readable_range().end) == (b"", 0)
    assert store._kept == {}


# -- published writes --------------------------------------------------------------------------------


def stage(inbox: Inbox, write: str, *parts: list[str]) -> list[StagedPart]:
    """Stage parts; each text becomes a frame."""
    inbox.begin_write(write)
    found = []
    for number, texts in enumerate(parts):
        writer = inbox.part_writer(write, f"part-{number}", QUEUE)
        for text in texts:
            writer.add(encode([Produced(0, batch_of(text))], Moment(0, 0)))
        found.append(writer.finish())
    return found


def publish(inbox: Inbox, *parts: list[str], write: str = "", number: int = 1) -> bool:
    write = write or write_name(1_000)
    return inbox.publish(write, QUEUE, WriteManifest(stage(inbox, write, *parts), "s", number))


def texts(inbox: Inbox, entry: InboxEntry) -> list[str]:
    frames = [frame for part in inbox.manifest(entry).parts for frame in inbox.frames(entry, part)]
    return [payload.decode() for frame in frames for payload in FrameColumns(frame).batch().payloads]


def test_a_published_write_waits_for_the_owner(store: Store, inbox: Inbox) -> None:
    assert not inbox.is_pending(QUEUE, "s", 1) and inbox.has_owner()
    assert publish(inbox, ["a", "b"], ["c"])
    (entry,) = store.inbox.waiting()
    assert entry.incarnation == QUEUE
    assert texts(store.inbox, entry) == ["a", "b", "c"]
    manifest = store.inbox.manifest(entry)
    assert [(part.frames, part.items) for part in manifest.parts] == [(2, 2), (1, 1)]
    assert (manifest.source, manifest.number, manifest.began_at, manifest.single_use) == ("s", 1, 1_000, False)
    assert inbox.is_pending(QUEUE, "s", 1) and not inbox.is_pending(QUEUE, "s", 2) and not inbox.is_pending(OTHER, "s", 1)
    store.inbox.remove(entry)
    assert store.inbox.waiting() == [] and not inbox.is_pending(QUEUE, "s", 1)


def test_the_same_write_is_published_once(store: Store, inbox: Inbox) -> None:
    assert publish(inbox, ["first"]) and not publish(inbox, ["second"]) and publish(inbox, ["third"], number=2)
    assert sorted(texts(store.inbox, entry) for entry in store.inbox.waiting()) == [["first"], ["third"]]
    assert len({entry.label for entry in store.inbox.waiting()}) == 2


def test_only_parts_of_the_manifest_are_published(store: Store, inbox: Inbox) -> None:
    write = write_name(1)
    parts = stage(inbox, write, ["a"], ["of an attempt that failed"])
    inbox.publish(write, QUEUE, WriteManifest(parts[:1], "s", 1))
    (entry,) = store.inbox.waiting()
    assert texts(store.inbox, entry) == ["a"]
    with pytest.raises(CorruptLog, match="lacks its part"):
        store.inbox.frames(entry, parts[1])


def test_an_abandoned_write_is_removed(store: Store, inbox: Inbox) -> None:
    stage(inbox, "w", ["a"])
    inbox.abandon_empty("w")
    assert texts_of_part(inbox, "w", "part-0") == "a", "it is not empty"
    inbox.abandon("w")
    inbox.abandon("w")
    with pytest.raises(StorageFailed):
        inbox.part_writer("w", "late", QUEUE).begin()
    inbox.begin_write("w")
    inbox.abandon_empty("w")
    inbox.abandon_empty("w")
    with pytest.raises(StorageFailed):
        inbox.part_writer("w", "late", QUEUE).begin()
    inbox.part_writer("w", "late", QUEUE, make=True).begin()
    assert store.inbox.waiting() == []


def texts_of_part(inbox: Inbox, write: str, name: str) -> str:
    with closing(inbox.part_reader(write, name, QUEUE)) as part:
        return FrameColumns(part.at(0, 1)).batch().payloads[0].decode()


def test_a_discarded_part_is_removed(inbox: Inbox) -> None:
    inbox.begin_write("w")
    writer = inbox.part_writer("w", "p", QUEUE)
    writer.begin()
    writer.add(encode([Produced(0, batch_of("a"))], Moment(0, 0)))
    writer.discard()
    writer.discard()
    inbox.abandon_empty("w")
    with pytest.raises(StorageFailed):
        inbox.part_writer("w", "late", QUEUE).begin()


def test_frames_of_a_part_are_read_at_the_positions_that_add_returned(inbox: Inbox) -> None:
    inbox.begin_write("w")
    writer = inbox.part_writer("w", "p", QUEUE)
    positions = [writer.add(encode([Produced(0, batch_of(text))], Moment(0, 0)), 3) for text in ("a", "bb", "c")]
    assert writer.finish() == StagedPart("p", 3, 3)
    with closing(inbox.part_reader("w", "p", QUEUE)) as part:
        found = [part.at(position, sequence) for sequence, position in enumerate(positions, 1)]
        assert [FrameColumns(frame).batch().payloads[0] for frame in found] == [b"a", b"bb", b"c"]
        assert [frame.sequence for frame in found] == [1, 2, 3]
        with pytest.raises(CorruptLog):
            part.at(positions[1], 3)
    with pytest.raises(InvalidRequest):
        writer.add(draft(5))


@pytest.mark.parametrize("name", ["a/b", "ü", "a" * 151, "a b"])
def test_names_that_some_store_cannot_use_are_refused(inbox: Inbox, name: str) -> None:
    for step in (
        inbox.begin_write,
        inbox.abandon,
        lambda name: inbox.put_blob(QUEUE, name, b""),
    ):
        with pytest.raises(InvalidRequest):
            step(name)


def test_a_write_with_a_wrong_manifest_is_not_published(store: Store, inbox: Inbox) -> None:
    with pytest.raises(InvalidRequest, match="a number from 1 on"):
        publish(inbox, ["a"], number=0)
    assert store.inbox.waiting() == []


# -- blobs -------------------------------------------------------------------------------------------


def test_blobs_are_stored_by_name(store: Store, inbox: Inbox) -> None:
    assert inbox.blob_names(QUEUE, "") == [] and inbox.blob(QUEUE, "grant.s.1") is None
    inbox.remove_blob(QUEUE, "grant.s.1")
    for name, body in (("grant.s.1", b"first"), ("grant.s.1", b"again"), ("grant.t.1", b""), ("answer", b"")):
        store.inbox.put_blob(QUEUE, name, body)
    store.inbox.put_blob(OTHER, "grant.s.1", b"")
    assert inbox.blob(QUEUE, "grant.s.1") == b"again"
    assert inbox.blob_names(QUEUE, "grant.s.") == ["grant.s.1"] and sorted(inbox.blob_names(QUEUE, "")) == [
        "answer",
        "grant.s.1",
        "grant.t.1",
    ]
    inbox.remove_blob(QUEUE, "grant.s.1")
    assert inbox.blob(QUEUE, "grant.s.1") is None and inbox.blob(OTHER, "grant.s.1") == b""


def test_a_sweep_removes_old_writes_and_blobs(store: Store, inbox: Inbox) -> None:
    for write in (write_name(999), write_name(1_000), "by-hand"):
        stage(inbox, write, ["a"])
    publish(inbox, ["a"], number=7)
    store.inbox.put_blob(QUEUE, "grant.s.1", b"")
    store.inbox.put_blob(OTHER, "grant.s.1", b"")
    store.inbox.sweep(1_000, {QUEUE})
    assert inbox.blob_names(OTHER, "") == []
    for _ in range(BLOB_SWEEPS):
        assert inbox.blob_names(QUEUE, "") == ["grant.s.1"]
        store.inbox.sweep(1_000, {QUEUE})
    assert inbox.blob_names(QUEUE, "") == [] and len(store.inbox.waiting()) == 1
    texts_of_part(inbox, "by-hand", "part-0")


def test_sidecars_can_be_read_until_the_write_is_published(tmp_path: Path) -> None:
    for inbox in (MemoryStore().inbox, FileInbox(SystemFiles(), str(tmp_path))):
        inbox.begin_write("w")
        writer = inbox.part_writer("w", "p", QUEUE)
        writer.begin()
        with writer.sidecar() as file:
            file.write(b"some notes")
        with inbox.sidecar("w", "p") as file:
            assert file.read() == b"some notes"
        assert inbox.publish("w", QUEUE, WriteManifest([writer.finish()], "s", 1))
