"""A log with real items, ways to damage it, and checks of its repair.

Owns: `undamaged`, `DAMAGES`, `damaged`; `run_repair`, and checks after it: `listed`, `opened`, `lost`,
`check_append_works`, `check_second_repair`.
"""

import random
from collections.abc import Callable
from functools import cache
from itertools import chain

from penstock.logs.files.repair import RepairReport, repair
from penstock.logs.log import Frame, Gap
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from tests.logs.backends import INCARNATION, PARTITION, ComparableFrame, comparable, state_draft
from tests.logs.items import fill, items_draft, payload
from tests.logs.scripted_owner import FOLDER, open_log, segments

STOP = 120


def undamaged(seed: int = 0) -> SimulatedFiles:
    """A closed log of five segments; the last one ends with a group of three frames."""
    return _undamaged(seed).copy()


@cache
def _undamaged(seed: int) -> SimulatedFiles:
    files = SimulatedFiles(random.Random(seed))
    log = open_log(files)
    list(log.recover())
    fill(log)
    log.append([items_draft(STOP, STOP + 2), state_draft(STOP + 2), items_draft(STOP + 2, STOP + 4)])
    log.close()
    files.kill()
    return files


def flip_frames_with(files: SimulatedFiles, *contents: bytes) -> None:
    """Damage the frames that contain these bytes."""
    for content in contents:
        path = next(path for path in segments(files) if content in files.content(path))
        files.flip_bit(path, 8 * files.content(path).index(content))


def remove(files: SimulatedFiles, paths: list[str]) -> None:
    for path in paths:
        files.remove(path)


def cut(files: SimulatedFiles, path: str, size: int) -> None:
    files.put_file(path, files.content(path)[:size])


def zero(files: SimulatedFiles, path: str, start: int, stop: int) -> None:
    content = files.content(path)
    files.put_file(path, content[:start] + bytes(stop - start) + content[stop:])


def lose_position(files: SimulatedFiles) -> None:
    flip_frames_with(files, payload(100))
    files.remove(f"{FOLDER}/synced")


DAMAGES: dict[str, Callable[[SimulatedFiles], None]] = {
    "an item frame": lambda files: flip_frames_with(files, payload(30)),
    "an item frame of the newest": lambda files: flip_frames_with(files, payload(100)),
    "a state frame": lambda files: flip_frames_with(files, b"state after 30"),
    "a Base": lambda files: flip_frames_with(files, b"Base 3"),
    "the newest Base": lambda files: flip_frames_with(files, b"Base 4"),
    "the first frame of all": lambda files: flip_frames_with(files, payload(3)),
    "the last frame": lambda files: flip_frames_with(files, payload(STOP + 3)),
    "the end": lambda files: cut(files, segments(files)[-1], 900),
    "the end of an old one": lambda files: cut(files, segments(files)[1], 1_000),
    "an old one whole": lambda files: files.remove(segments(files)[2]),
    "the newest whole": lambda files: files.remove(segments(files)[-1]),
    "everything": lambda files: remove(files, segments(files)),
    "an old one's content": lambda files: cut(files, segments(files)[1], 0),
    "a stretch over two frames": lambda files: zero(files, segments(files)[3], 600, 1_000),
    "two segments": lambda files: flip_frames_with(files, payload(30), payload(80)),
    "the synced position too": lose_position,
}


def damaged(name: str, seed: int = 0) -> SimulatedFiles:
    """A disk with that damage, which a power cut does not undo."""
    files = undamaged(seed)
    DAMAGES[name](files)
    for path, data in files.contents().items():
        if not path.endswith("/"):
            files.put_file(path, data)
    return files


def run_repair(files: SimulatedFiles, *, discard: bool = False) -> RepairReport:
    files.kill()
    return repair(files, FOLDER, INCARNATION, PARTITION, discard=discard, clock=MicrosecondClock())


def listed(files: SimulatedFiles) -> tuple[list[ComparableFrame], list[Gap]]:
    """The frames and gaps of the whole log after an opening."""
    log = open_log(files.copy())
    list(log.recover())
    found = list(log.frames())
    return comparable(frame for frame in found if isinstance(frame, Frame)), [gap for gap in found if isinstance(gap, Gap)]


def opened(files: SimulatedFiles) -> tuple[list[ComparableFrame], list[Gap]]:
    """The frames and gaps that recovery yields."""
    found = list(open_log(files).recover())
    return comparable(frame for frame in found if isinstance(frame, Frame)), [gap for gap in found if isinstance(gap, Gap)]


def lost(gaps: list[Gap]) -> tuple[set[int], set[int]]:
    """The lost sequences and offsets."""
    numbers = chain.from_iterable(range(gap.first_sequence, gap.last_sequence + 1) for gap in gaps)
    return set(numbers), set(chain.from_iterable(range(gap.start, gap.stop) for gap in gaps))


def without_lock(files: SimulatedFiles) -> dict[str, bytes]:
    return {path: data for path, data in files.contents().items() if not path.endswith("LOCK")}


def check_append_works(files: SimulatedFiles) -> None:
    """The log opens, and a frame can be appended."""
    log = open_log(files)
    gaps = [gap for gap in log.recover() if isinstance(gap, Gap)]
    assert all(gap.repaired for gap in gaps)
    assert not log.wants_base
    end = log.sequence
    log.append([items_draft(STOP + 4, STOP + 5)])
    log.sync()
    found = list(open_log(files).recover())
    assert isinstance(found[-1], Frame)
    assert found[-1].sequence == end + 1


def check_second_repair(files: SimulatedFiles) -> None:
    """A second repair changes nothing."""
    before = without_lock(files)
    done = run_repair(files)
    assert not done.changed
    assert done.gaps == []
    assert without_lock(files) == before
