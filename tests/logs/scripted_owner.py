"""A scripted life of a file log on a simulated disk, and what must be true of it however it ended.

Owns: `STEPS` (every kind of thing an owner does, in an order that meets the corners), `ScriptedOwner` (does them and keeps account of what was
promised), `check_survivors`. An owner that meets a storage error does what a turn does: reset, recover, go on.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.filelog import FileLog
from penstock.logs.frame import HEADER_BYTES, parse_header
from penstock.logs.log import Draft, Durability, FrameType
from penstock.testing import SimulatedFiles
from penstock.words.errors import StorageFailed
from tests.logs.backends import INCARNATION, PARTITION, ComparableFrame, base_draft, comparable, draft, expected, noise, state_draft

ROOT = "/data"
FOLDER = f"{ROOT}/logs/{INCARNATION:016x}/{PARTITION:05}"
CHECKPOINT = b"a checkpoint"
Groups: TypeAlias = Sequence[Sequence[Draft]]
"""What was appended, append by append."""


class Step(NamedTuple):
    """One thing an owner does. The owner gives the drafts their offsets."""

    verb: str
    drafts: Sequence[Draft] = ()


STEPS = [
    Step("append", [draft(0, 3, b"first")]),
    Step("sync"),
    Step("append", [draft(0, 2, noise(900)), state_draft(0), draft(0, 1, b"z" * 900)]),
    Step("append", [state_draft(0, b"")]),
    Step("sync"),
    Step("read"),
    Step("append", [draft(0, 4, b"before the rotation")]),
    Step("rotate", [base_draft(0)]),
    Step("append", [draft(0, 1, b"a"), draft(0, 1, b"b")]),
    Step("sync"),
    Step("checkpoint"),
    Step("append", [state_draft(0)]),
    Step("sync"),
    Step("rotate", [base_draft(0, b"at the same offset")]),
    Step("rotate", [base_draft(0, b"and again")]),
    Step("append", [draft(0, 8, noise(3_000))]),
    Step("append", [draft(0, 1, b"last")]),
    Step("sync"),
    Step("checkpoint"),
    Step("append", [draft(0, 1, b"never synced"), draft(0, 1, b"never synced either")]),
]


def open_log(files: SimulatedFiles, durability: Durability = "fsync") -> FileLog:
    """A new owner's log, not yet recovered; the last owner is gone."""
    files.kill()
    return FileStore.open([ROOT], files=files, durability=durability).log(INCARNATION, PARTITION)


class ScriptedOwner:
    """Runs steps on a log and keeps account: groups in `promised` are synced; those in `offered` were appended after them."""

    def __init__(self, files: SimulatedFiles, synced: Groups = (), unsynced: Groups = ()) -> None:
        """`promised` and `offered` are what an owner before this one left."""
        self.files = files
        self.synced = list(synced)
        self.unsynced = list(unsynced)
        self.failures: list[str] = []
        self.log: FileLog

    def run(self, steps: Sequence[Step] = STEPS) -> None:
        """Do every step; one that storage refuses is given up, and the next is done on the log as it was recovered."""
        self._open()
        for step in steps:
            try:
                self._do(step)
            except StorageFailed as failure:
                self.failures.append(str(failure))
                self._go_back(step.verb)

    def _open(self) -> None:
        try:
            self.log = open_log(self.files)
            self._recover()
        except StorageFailed as failure:
            self.failures.append(str(failure))
            self._open()

    def _recover(self) -> None:
        list(self.log.recover())
        self._believe()
        if self.log.wants_base:
            self._do(Step("rotate", [base_draft(0, b"wanted")]))

    def _go_back(self, verb: str) -> None:
        before = len(self.synced)
        try:
            self.log.reset()
            self._recover()
        except StorageFailed as failure:
            self.failures.append(str(failure))
            self._open()
        else:
            # These two sync before they do what may fail, so they alone may leave behind more than was promised.
            extra = [group for group in self.synced[before:] if group[0].parts != (b"wanted",)]
            assert verb in ("rotate", "checkpoint") or not extra, f"{verb} failed and was stored all the same"

    def _believe(self) -> None:
        """What the log shows is from now on what it promised: everything promised before, and of the rest some first groups, whole."""
        stored = comparable(self.log.frames())
        self.synced = groups_stored(stored, self.synced, self.unsynced)
        self.unsynced = []

    def _do(self, step: Step) -> None:
        group = with_offsets(step.drafts, next_offset(self.synced + self.unsynced))
        match step.verb:
            case "append":
                self.unsynced.append(group)
                self.log.append(group)
            case "sync":
                self.log.sync()
                self._promise()
            case "rotate":
                self.unsynced.append(group)
                self.log.rotate(group[0])
                self._promise()
            case "checkpoint":
                self.log.write_checkpoint(CHECKPOINT, 1, 2, next_offset(self.synced + self.unsynced))
                self._promise()
            case "read":
                self._read_everything()

    def _promise(self) -> None:
        self.synced += self.unsynced
        self.unsynced = []

    def _read_everything(self) -> None:
        groups = self.synced + self.unsynced
        wanted = [frame for frame in expected(chain(*groups)) if frame.type is FrameType.DATA]
        assert comparable(self.log.read(0, next_offset(groups))) == wanted


def next_offset(groups: Groups) -> int:
    return sum(step.count for step in chain(*groups) if step.type is FrameType.DATA)


def with_offsets(drafts: Sequence[Draft], offset: int) -> list[Draft]:
    """The drafts with the offsets they get when the next one to be given is `offset`."""
    group = []
    for step in drafts:
        group.append(step._replace(base_offset=offset))
        offset += step.count if step.type is FrameType.DATA else 0
    return group


def groups_stored(stored: list[ComparableFrame], promised: Groups, offered: Groups) -> list[Sequence[Draft]]:
    """The groups that these frames are; fails unless they are all those promised and some first ones of those offered."""
    for kept in range(len(offered) + 1):
        groups = [*promised, *offered[:kept]]
        if stored == expected(chain(*groups)):
            return groups
    promise = expected(chain(*promised))
    offer = expected(chain(*offered), len(promise) + 1)
    raise AssertionError(f"stored {brief(stored)}\npromised {brief(promise)}\noffered {brief(offer)}")


def brief(frames: Sequence[ComparableFrame]) -> list[tuple[str, int, bytes]]:
    return [(frame.type.name, frame.sequence, frame.body[:12]) for frame in frames]


def check_survivors(files: SimulatedFiles, promised: Groups, offered: Groups) -> None:
    """Open the disk anew: everything promised is there, groups are whole, replay agrees with the log, and the log takes more."""
    log = open_log(files)
    recovered = comparable(log.recover())
    stored = comparable(log.frames())
    groups = groups_stored(stored, promised, offered)
    check_replay(recovered, stored)
    more = [with_offsets([draft(0, 1, b"life goes on")], next_offset(groups))]
    if log.wants_base:
        more.insert(0, with_offsets([base_draft(0, b"wanted")], next_offset(groups)))
        log.rotate(more[0][0])
    log.append(more[-1])
    log.sync()
    again = open_log(files)
    check_replay(comparable(again.recover()), comparable(again.frames()))
    assert comparable(again.frames()) == expected(chain(*groups, *more))
    check_bases(files)


def check_bases(files: SimulatedFiles) -> None:
    """Every segment but the first begins with a Base: that is what lets a prefix be dropped."""
    for path in segments(files)[1:]:
        assert parse_header(files.content(path)[:HEADER_BYTES]).type == FrameType.BASE


def segments(files: SimulatedFiles) -> list[str]:
    """Paths of the segment files, oldest first."""
    return [path for path in sorted(files.contents()) if path.startswith(FOLDER) and path.endswith(".log")]


def check_replay(recovered: list[ComparableFrame], stored: list[ComparableFrame]) -> None:
    """Replay gives the end of the log, from its start, from a Base in it or from a checkpoint beside it."""
    if not recovered:
        assert stored == []
    elif recovered[0].body == CHECKPOINT:
        assert recovered[1:] == [frame for frame in stored if frame.sequence > recovered[0].sequence]
    else:
        assert recovered == stored[-len(recovered) :]
        assert recovered[0].sequence == 1 or recovered[0].type is FrameType.BASE
