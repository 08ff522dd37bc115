"""Damaged files: what becomes of a partition's items when bits are flipped in its log, or segments of it are deleted.

Owns: `Harm` (damage to one log, and which items it took) and `examine` (one partition, on a twin of its disk, damaged and used).
The story of a simulation goes on as if nothing had happened: the damage is done to a copy. Chance comes from a generator of its own, so
that the story is the same with and without.
What must hold: every undamaged item is read, listed, explained and delivered, once; exactly the damaged ones are recorded as lost; `verify`
tells of the damage before, and nothing after a repair; and all of that takes a bounded number of steps.
"""

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from penstock.logs.api import Durability, FrameType
from penstock.logs.files.directory import DURABILITIES, Directory
from penstock.logs.files.segment import parse_name
from penstock.logs.frame import CHECKSUM_BYTES, HEADER_BYTES, frame_bytes, parse_header
from penstock.loop import inspection
from penstock.loop.blocks import Items
from penstock.loop.partition import Partition
from penstock.rules import commands as c
from penstock.rules.explain import LOST
from penstock.rules.life import Life
from penstock.rules.runs import RunSet, offsets
from penstock.testing.clock import ManualClock
from penstock.testing.disk import SimulatedFiles
from penstock.words.clock import DAY
from penstock.words.limits import Retention

KEEP_ALL = Retention(max_age=0, max_bytes=0)
ROUNDS = 4
"""Steps that a lease may take before it must be asked again."""
DAYS = 4
MOST_FLIPS = 3


class Written(NamedTuple):
    """A frame as it lies in a file."""

    path: str
    start: int
    stop: int
    """Behind its last byte that counts: what pads it is not looked at."""
    sequence: int
    type: int
    base: int
    count: int  # type: ignore[assignment]  # tuple.count is not missed

    @property
    def items(self) -> set[int]:
        return set(range(self.base, self.base + self.count)) if self.type == FrameType.DATA else set()


def written(files: SimulatedFiles, path: str) -> list[Written]:
    """The frames of a segment that is whole."""
    content, at, found = files.content(path), 0, []
    while at < len(content):
        header = parse_header(content[at : at + HEADER_BYTES])
        stop = at + HEADER_BYTES + header.stored_bytes + CHECKSUM_BYTES
        found.append(Written(path, at, stop, header.sequence, header.type, header.base, header.count))
        at += frame_bytes(header.stored_bytes)
    return found


class Harm:
    """Damage to one log whose files are whole and synced. Frames that hold no items are spared, as far as no segment is deleted."""

    def __init__(self, files: SimulatedFiles, folder: str, rng: random.Random, say: Callable[[str], None]) -> None:
        paths = [path for path in sorted(files.contents()) if path.startswith(folder) and path.endswith(".log")]
        self.items: set[int] = set()
        """Those that were taken; some of them may have been let go by retention before."""
        deleted = rng.choice(paths[:-1]) if len(paths) > 1 and rng.random() < 0.5 else ""
        data = [frame for path in paths if path != deleted for frame in _valid(files, path, paths) if frame.items]
        for frame in rng.sample(data, min(len(data), rng.randint(0 if deleted else 1, MOST_FLIPS))):
            bit = rng.randrange(8 * frame.start, 8 * frame.stop)
            files.flip(frame.path, bit)
            self.items |= frame.items
            say(f"   damage: bit {bit} of {frame.path}")
        if deleted:
            for frame in _valid(files, deleted, paths):
                self.items |= frame.items
            files.remove(deleted)
            say(f"   damage: {deleted} is deleted")


def _valid(files: SimulatedFiles, path: str, paths: Sequence[str]) -> list[Written]:
    """The frames of a segment that count: behind a failed sync, what the next segment has again does not."""
    next_path = next((other for other in paths if other > path), None)
    name = None if next_path is None else parse_name(next_path.rpartition("/")[2])
    return [frame for frame in written(files, path) if name is None or frame.sequence < name.first_sequence]


# -- one partition -----------------------------------------------------------------------------------


class Copy:
    """A twin of a partition, which can be damaged."""

    def __init__(
        self,
        files: SimulatedFiles,
        clock: ManualClock,
        root: str,
        owner: tuple[int, int],
        segment_bytes: int,
        durability: Durability = "fsync",
    ) -> None:
        self.durability: Durability = durability
        self.files = files.copy()
        self.files.mend()
        self.files.kill()
        self.clock = copy.deepcopy(clock)
        self._root = root
        self._owner = owner
        self._segment_bytes = segment_bytes
        self.folder = ""
        self.open()

    def open(self) -> None:
        self._directory = Directory.open(self._root, files=self.files, clock=self.clock, entropy=bytes, durability=self.durability)
        self.folder = self._directory.path_of(*self._owner)
        self.partition = Partition(self._directory.log(*self._owner), self.clock, segment_bytes=self._segment_bytes)

    def close(self) -> None:
        self.partition.close()
        self._directory.close()

    def verified(self) -> bool:
        """Whether nothing is said to be wrong with the log."""
        return inspection.verify(self.files, self.folder, *self._owner).sound

    def repair(self) -> None:
        report = inspection.repair(self.files, self.folder, *self._owner, clock=self.clock)
        assert report.opens and report.changed, f"the damage was not mended: {report}"

    def ask(self, command: c.Command) -> c.Answer:
        """Run a command to its end, in a bounded number of steps."""
        for _ in range(100 + self.partition.state.next_offset):
            answer = self.partition.run(command, ROUNDS)
            self.partition.commit()
            if not isinstance(answer, c.Again):
                return answer
        raise AssertionError(f"{command} finds no end")


def examine(
    files: SimulatedFiles,
    clock: ManualClock,
    root: str,
    owner: tuple[int, int],
    segment_bytes: int,
    rng: random.Random,
    say: Callable[[str], None],
) -> None:
    """Damage a twin of a partition and use it; raises AssertionError when an undamaged item is missed, or anything else is not right."""
    if rng.random() < 0.15:
        _lose_everything(Copy(files, clock, root, owner, segment_bytes, rng.choice(DURABILITIES)), rng)
        return
    twin = Copy(files, clock, root, owner, segment_bytes)
    twin.ask(c.Configure(msgspec.structs.replace(twin.partition.state.policy, retention=KEEP_ALL, max_attempts=0)))
    twin.ask(c.Pause(False, False))
    state = twin.partition.state
    there = state.dropped.missing(0, state.next_offset)
    before = payloads(twin.partition.items(there))
    wanted = {offset for offset in before if state.state_of(offset) is not Life.COMPLETED}
    if not before:
        return
    in_use = rng.random() < 0.4
    twin.close()
    if in_use:
        twin.open()
    damaged = Harm(twin.files, twin.folder, rng, say).items & set(before)
    if not in_use:
        assert not damaged or not twin.verified(), f"{sorted(damaged)} are damaged, and verify says nothing"
        if damaged and rng.random() < 0.3:
            say("   repair")
            twin.repair()
            assert twin.verified(), "damage was mended, and verify still finds it"
        twin.open()
    _Use(twin, before, damaged, wanted, rng, sure=not in_use).everything()


def _lose_everything(twin: Copy, rng: random.Random) -> None:
    """Delete every segment: whatever the durability mode, that is noticed."""
    state = twin.partition.state
    there = state.dropped.missing(0, state.next_offset)
    if rng.random() < 0.5:
        twin.close()
    else:
        twin.partition.rest()
        twin.files.kill()
    for path in [path for path in twin.files.contents() if path.startswith(twin.folder) and path.endswith(".log")]:
        twin.files.remove(path)
    assert not twin.verified(), "every segment is missing, and verify finds nothing"
    if rng.random() < 0.3:
        twin.repair()
        assert twin.verified(), "damage was mended, and verify still finds it"
    twin.open()
    lost, again = twin.partition.state.lost, twin.partition.state.next_offset
    assert not RunSet(there).without(lost.runs), f"every segment is missing, and only {lost} are recorded as lost"
    assert again >= state.next_offset, f"offset {again} is given again"
    assert twin.partition.gaps, "every segment is missing, and nobody says so"


class _Use:
    """Everything that can be asked of a damaged partition, in any order."""

    def __init__(
        self, twin: Copy, before: dict[int, bytes], damaged: set[int], wanted: set[int], rng: random.Random, *, sure: bool
    ) -> None:
        self._twin = twin
        self._before = before
        self._damaged = damaged
        self._wanted = wanted
        self._rng = rng
        self._sure = sure
        """Whether it is certain that damaged items are met as such: what was open or in memory when the damage was done is still good."""

    def everything(self) -> None:
        steps = [self._read, self._explain, self._deliver]
        self._rng.shuffle(steps)
        for step in steps:
            step()
        self._read()
        self._check_lost()
        if self._sure:
            lost = set(offsets(self._twin.partition.state.lost.runs))
            assert lost == self._damaged, f"{sorted(self._damaged)} are damaged, and {sorted(lost)} were recorded as lost"

    def _check_lost(self) -> None:
        lost = set(offsets(self._twin.partition.state.lost.runs))
        assert lost <= self._damaged, f"{sorted(lost - self._damaged)} were recorded as lost and are not damaged"

    def _read(self) -> None:
        """A cursor goes from one end to the other."""
        partition, at, found = self._twin.partition, 0, []
        limit = self._rng.choice([1, 3, 10, 1_000])
        for _ in range(partition.state.next_offset + 2):
            items, stop = partition.history(at, limit)
            found += self._right(items)
            assert bool(items) == (at < stop) or stop == partition.state.next_offset, f"a cursor at {at} got nothing, and is at {stop} now"
            if not items:
                break
            at = stop
        self._check(found, self._before, "read")
        self._check_lost()

    def _explain(self) -> None:
        for offset in self._rng.sample(sorted(self._before), min(10, len(self._before))):
            said = self._twin.partition.explain(offset)
            lost = offset in self._twin.partition.state.lost
            assert (said.why == LOST) == lost, f"{offset} was explained as {said}"
            assert not lost or offset in self._damaged, f"{offset} is whole, and was explained as {said}"
        self._check_lost()

    def _deliver(self) -> None:
        """Whatever is left to be done is delivered, once."""
        twin, found = self._twin, list[int]()
        changes = twin.partition.changes
        for _ in range(DAYS):
            twin.clock.advance(1 * DAY)
            while twin.partition.due():
                twin.partition.commit()
            twin.partition.commit()
            twin.ask(c.Redrive())
            found += self._work_off()
        self._check(found, self._wanted, "delivered")
        self._wanted = set()
        most = 40 * (len(self._before) + 10) * DAYS
        assert twin.partition.changes - changes < most, f"{twin.partition.changes - changes} records for {len(self._before)} items"

    def _work_off(self) -> list[int]:
        found: list[int] = []
        while True:
            granted = self._twin.ask(c.Lease(self._rng.choice([1, 3, 100]), per_key=self._rng.choice([1, 3])))
            if not isinstance(granted, c.Granted) or not granted.lease:
                return found
            given = self._right(self._twin.partition.items(granted.runs))
            found += given
            if given:
                self._twin.ask(c.Complete(granted.lease))

    def _right(self, items: Sequence[Items]) -> list[int]:
        """The offsets of items, which are as they were before the damage."""
        for offset, payload in payloads(items).items():
            assert self._before.get(offset) == payload, f"item {offset} is {payload!r}, and was {self._before.get(offset)!r}"
        return list(payloads(items))

    def _check(self, found: list[int], wanted: Iterable[int], what: str) -> None:
        whole = set(wanted) - self._damaged
        missed = whole - set(found)
        assert not missed, f"{sorted(missed)} are whole, and were not {what}"
        wrong = set(found) - (whole if self._sure else set(wanted))
        assert not wrong, f"{sorted(wrong)} were {what}: they are damaged, or done"
        assert len(found) == len(set(found)), f"some of {found} were {what} twice"


def payloads(items: Sequence[Items]) -> dict[int, bytes]:
    """Offset → payload."""
    return {offset: payload for part in items for offset, payload in enumerate(part.batch.payloads, part.start)}
