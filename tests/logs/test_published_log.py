"""A lock-free reader sees what is published, no more, and follows its owner."""

import pytest

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.files.published_log import PublishedLog
from penstock.logs.log import Durability, Gap
from penstock.testing import SimulatedFiles
from penstock.words.errors import BrokerClosed
from tests.logs.backends import INCARNATION, PARTITION, base_draft, comparable, draft, expected, noise
from tests.logs.scripted_owner import FOLDER, ROOT


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


def test_what_an_owner_takes_back_was_never_shown() -> None:
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


def test_closed_is_closed() -> None:
    _, reader = owner_and_reader(SimulatedFiles())
    reader.close()
    reader.close()
    with pytest.raises(BrokerClosed, match="open it again"):
        reader.read(0, 1)
