"""A script of operations on a file log on a simulated disk, and checks of what is left of it.

Owns: `STEPS` (every kind of operation that an owner does, in an order that covers the special cases), `ScriptedOwner`
(runs them and records what was synced), `check_survivors`. After a storage error the owner does what a turn does: it
resets and recovers the log, and continues.
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
"""The drafts of each append."""


class Step(NamedTuple):
    """One operation of an owner. The owner sets the offsets of the drafts."""

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
    """The log of a new owner, not recovered yet; the last owner is killed."""
    files.kill()
    return FileStore.open([ROOT], files=files, durability=durability).log(INCARNATION, PARTITION)


class ScriptedOwner:
    """Runs steps on a log. `synced` are the groups that were synced, `unsynced` those appended after them."""

    def __init__(self, files: SimulatedFiles, synced: Groups = (), unsynced: Groups = ()) -> None:
        """synced, unsynced: the groups that an earlier owner left."""
        self.files = files
        self.synced = list(synced)
        self.unsynced = list(unsynced)
        self.failures: list[str] = []
        self.log: FileLog

    def run(self, steps: Sequence[Step] = STEPS) -> None:
        """Do every step. After a step that fails, recover the log and do the next one."""
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
        self._take_as_synced()
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
            # These two sync before the call that may fail, so only they may store groups that were not synced before.
            extra = [group for group in self.synced[before:] if group[0].parts != (b"wanted",)]
            assert verb in ("rotate", "checkpoint") or not extra, f"{verb} failed and was stored all the same"

    def _take_as_synced(self) -> None:
        """Take the groups in the log for synced: all that were, and the first ones of the others, each whole."""
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
                self._all_synced()
            case "rotate":
                self.unsynced.append(group)
                self.log.rotate(group[0])
                self._all_synced()
            case "checkpoint":
                self.log.write_checkpoint(CHECKPOINT, 1, 2, next_offset(self.synced + self.unsynced))
                self._all_synced()
            case "read":
                self._read_everything()

    def _all_synced(self) -> None:
        self.synced += self.unsynced
        self.unsynced = []

    def _read_everything(self) -> None:
        groups = self.synced + self.unsynced
        wanted = [frame for frame in expected(chain(*groups)) if frame.type is FrameType.DATA]
        assert comparable(self.log.read(0, next_offset(groups))) == wanted


def next_offset(groups: Groups) -> int:
    return sum(step.count for step in chain(*groups) if step.type is FrameType.DATA)


def with_offsets(drafts: Sequence[Draft], offset: int) -> list[Draft]:
    """The drafts with their offsets, the first of which is `offset`."""
    group = []
    for step in drafts:
        group.append(step._replace(base_offset=offset))
        offset += step.count if step.type is FrameType.DATA else 0
    return group


def groups_stored(stored: list[ComparableFrame], synced: Groups, unsynced: Groups) -> list[Sequence[Draft]]:
    """The groups of these frames; fails unless they are all synced ones and the first of the unsynced ones."""
    for kept in range(len(unsynced) + 1):
        groups = [*synced, *unsynced[:kept]]
        if stored == expected(chain(*groups)):
            return groups
    first = expected(chain(*synced))
    rest = expected(chain(*unsynced), len(first) + 1)
    raise AssertionError(f"stored {brief(stored)}\nsynced {brief(first)}\nunsynced {brief(rest)}")


def brief(frames: Sequence[ComparableFrame]) -> list[tuple[str, int, bytes]]:
    return [(frame.type.name, frame.sequence, frame.body[:12]) for frame in frames]


def check_survivors(files: SimulatedFiles, synced: Groups, unsynced: Groups) -> None:
    """Open the log: synced groups are in it, groups are whole, replay agrees with the log, and it takes appends."""
    log = open_log(files)
    recovered = comparable(log.recover())
    stored = comparable(log.frames())
    groups = groups_stored(stored, synced, unsynced)
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
    """Every segment but the first begins with a Base, so that the segments before it can be dropped."""
    for path in segments(files)[1:]:
        assert parse_header(files.content(path)[:HEADER_BYTES]).type == FrameType.BASE


def segments(files: SimulatedFiles) -> list[str]:
    """The paths of the segment files, oldest first."""
    return [path for path in sorted(files.contents()) if path.startswith(FOLDER) and path.endswith(".log")]


def check_replay(recovered: list[ComparableFrame], stored: list[ComparableFrame]) -> None:
    """Replay yields the end of the log, from its start, from a Base or from a checkpoint on."""
    if not recovered:
        assert stored == []
    elif recovered[0].body == CHECKPOINT:
        assert recovered[1:] == [frame for frame in stored if frame.sequence > recovered[0].sequence]
    else:
        assert recovered == stored[-len(recovered) :]
        assert recovered[0].sequence == 1 or recovered[0].type is FrameType.BASE
