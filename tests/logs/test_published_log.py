"""A lock-free reader reads exactly the published frames and follows the owner."""

import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.filesystem import Mode
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.log import Durability, Gap
from penstock.testing import SimulatedFiles
from penstock.words.errors import BrokerClosed, StorageFailed
from tests.logs.backends import INCARNATION, PARTITION, base_draft, comparable, draft, expected, noise
from tests.logs.items import fill, runs
from tests.logs.scripted_owner import FOLDER, ROOT, segments


def owner_and_reader(files: SimulatedFiles, durability: Durability = "fsync") -> tuple[FileLog, PublishedLog]:
    log = FileStore.open([ROOT], files=files, durability=durability).log(INCARNATION, PARTITION)
    list(log.recover())
    return log, FileStore.open([ROOT], files=files, read_only=True).reader(INCARNATION, PARTITION)


@pytest.mark.parametrize("durability", ["fsync", "interval", "os"])
def test_it_stops_at_the_synced_position_and_follows_it(durability: Durability) -> None:
    log, reader = owner_and_reader(SimulatedFiles(), durability)
    drafts = [draft(0, 2, b"first"), draft(2, 1, noise(9_000)), base_draft(3), draft(3, 1, b"in a new segment")]
    assert comparable(reader.frames()) == []
    log.append(drafts[:1])
    assert comparable(reader.read(0, 10)) == []
    log.sync()
    log.publish()
    assert comparable(reader.read(0, 10)) == expected(drafts[:1])
    log.append(drafts[1:2])
    log.rotate(drafts[2])
    assert comparable(reader.frames()) == expected(drafts[:3])
    log.append(drafts[3:])
    log.sync()
    log.publish()
    assert comparable(reader.recover()) == expected(drafts)[2:]
    assert comparable(reader.read(1, 4)) == [expected(drafts)[place] for place in (0, 1, 3)]
    assert [segment.base_offset for segment in reader.segments()] == [0, 3]


def test_frames_that_a_reset_cuts_were_never_visible() -> None:
    log, reader = owner_and_reader(SimulatedFiles())
    log.append([draft(0, 1, b"kept")])
    log.sync()
    log.append([draft(1, 1, b"taken back")])
    assert comparable(reader.read(0, 10)) == expected([draft(0, 1, b"kept")])
    log.reset()
    list(log.recover())
    log.append([draft(1, 1, b"instead, and longer")])
    log.sync()
    assert comparable(reader.read(0, 10)) == expected([draft(0, 1, b"kept"), draft(1, 1, b"instead, and longer")])


def test_without_a_synced_position_it_reads_whole_groups() -> None:
    files = SimulatedFiles()
    log, reader = owner_and_reader(files)
    log.append([draft(0, 1, b"whole")])
    log.append([draft(1, 1, b"cut"), draft(2, 1, b"off")])
    (path,) = [path for path in files.contents() if path.endswith(".log")]
    files.put_file(path, files.content(path)[:-100])
    files.remove(f"{FOLDER}/synced")
    before = files.contents()
    assert comparable(reader.frames()) == expected([draft(0, 1, b"whole")])
    assert files.contents() == before


def test_damage_is_a_gap() -> None:
    files = SimulatedFiles()
    log, reader = owner_and_reader(files)
    for number in range(3):
        log.append([draft(number, 1, b"x" * 16)])
    log.sync()
    files.flip_bit(f"{FOLDER}/{0:020}-{1:020}.log", 8 * 80)
    (gap, second) = reader.read(0, 2)
    assert isinstance(gap, Gap)
    assert gap[:4] == (1, 1, 0, 1)
    assert comparable([second]) == expected([draft(1, 1, b"x" * 16)], 2)


def test_recover_fails_when_segments_are_removed_faster_than_they_are_opened() -> None:
    class Vanishing(SimulatedFiles):
        """A disk on which the owner always removes the first segment just before a reader opens it."""

        def open(self, path: str, mode: Mode) -> int:
            if path.endswith(f"{0:020}-{1:020}.log") and mode == "read":
                raise FileNotFoundError(2, "No such file or directory", path)
            return super().open(path, mode)

    files = Vanishing()
    log, reader = owner_and_reader(files)
    log.append([draft(0, 1, b"x")])
    log.rotate(base_draft(1, b"the newest Base"))
    path = segments(files)[-1]
    files.flip_bit(path, 8 * files.content(path).index(b"the newest Base"))  # replay begins in the first segment
    with pytest.raises(StorageFailed, match="No such file or directory"):
        list(reader.recover())


def test_nothing_is_intact_when_only_rewritten_segments_are_left() -> None:
    files = SimulatedFiles()
    log, reader = owner_and_reader(files)
    fill(log)
    log.rewrite(0, 2, runs([3, 50]))
    log.close()
    assert reader.readable_range().intact_from == log.sequence - 17
    for path in segments(files)[1:]:
        files.remove(path)
    found = FileStore.open([ROOT], files=files, read_only=True).reader(INCARNATION, PARTITION).readable_range()
    assert found.sequence == log.sequence and found.intact_from == log.sequence + 1


def test_closed_is_closed() -> None:
    _, reader = owner_and_reader(SimulatedFiles())
    reader.close()
    reader.close()
    with pytest.raises(BrokerClosed, match="open it again"):
        reader.read(0, 1)
