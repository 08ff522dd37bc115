"""The modes "os" and "interval": a kill loses nothing; a power cut loses no flushed frame; other losses are gaps."""

import contextlib
import random
from collections.abc import Sequence
from itertools import chain

import pytest

from penstock.logs.files.filelog import FileLog
from penstock.logs.log import Draft, Durability, Frame, Gap
from penstock.testing import Halt, SimulatedFiles
from tests.logs.backends import base_draft, comparable, draft, expected, noise, state_draft
from tests.logs.scripted_owner import open_log, with_offsets

CALLS = 45
"""More file calls than `OwnerWithoutFsync` makes."""


class OwnerWithoutFsync:
    """An owner that syncs without fsync, flushes now and then, and may be halted at any file call."""

    def __init__(self, durability: Durability, call: int, seed: int) -> None:
        self.files = SimulatedFiles(random.Random(seed))
        self.durability: Durability = durability
        self.appended: list[Sequence[Draft]] = []
        self.synced = 0
        self.flushed = 0
        self.files.fail(call, "halt")
        with contextlib.suppress(Halt):
            self._live(self.open())
        self.files.clear_faults()

    def open(self) -> FileLog:
        return open_log(self.files, self.durability)

    def _live(self, log: FileLog) -> None:
        list(log.recover())
        for turn in range(8):
            self._append(log, turn)
            log.sync()
            self.synced = len(self.appended)
            if turn % 3 == 2:
                log.force_sync()
                self.flushed = self.synced
            if turn == 5:
                self.appended.append(with_offsets([base_draft(0)], 3 * turn + 3))
                log.rotate(self.appended[-1][0])
                self.synced = self.flushed = len(self.appended)

    def _append(self, log: FileLog, turn: int) -> None:
        group = with_offsets([draft(0, 2, noise(300, turn)), state_draft(0), draft(0, 1, b"x")], 3 * turn)
        self.appended.append(group)
        log.append(group)


@pytest.mark.parametrize("durability", ["os", "interval"])
def test_a_kill_loses_nothing_that_was_synced(durability: Durability) -> None:
    for call in range(1, CALLS):
        owner = OwnerWithoutFsync(durability, call, seed=call)
        log = owner.open()
        list(log.recover())
        stored = comparable(log.frames())
        assert stored in [expected(chain(*owner.appended[:count])) for count in range(owner.synced, len(owner.appended) + 1)]


@pytest.mark.parametrize("durability", ["os", "interval"])
@pytest.mark.parametrize("seed", range(5))
def test_a_power_cut_loses_no_flushed_frame_and_other_losses_are_gaps(durability: Durability, seed: int) -> None:
    for call in range(1, CALLS):
        owner = OwnerWithoutFsync(durability, call, seed)
        owner.files.crash()
        log = owner.open()
        list(log.recover())
        check_what_is_left(list(log.frames()), owner.appended, owner.flushed)


def check_what_is_left(found: list[Frame | Gap], appended: list[Sequence[Draft]], flushed: int) -> None:
    """The log has whole groups, all flushed ones among them; what is missing before the last frame is in a Gap."""
    served = comparable(frame for frame in found if isinstance(frame, Frame))
    gaps = [gap for gap in found if isinstance(gap, Gap)]
    numbers = {frame.sequence for frame in served}
    named = {number for gap in gaps for number in range(gap.first_sequence, gap.last_sequence + 1)}
    assert served == [frame for frame in expected(chain(*appended)) if frame.sequence in numbers]
    assert numbers | named == set(range(1, max(numbers | named, default=0) + 1))
    assert numbers & named == set()
    first = 1
    for place, group in enumerate(appended):
        sequences = set(range(first, first + len(group)))
        first += len(group)
        assert sequences <= numbers if place < flushed else sequences <= numbers or not sequences & numbers


@pytest.mark.parametrize("durability", ["os", "interval"])
def test_sync_makes_no_fsync(durability: Durability) -> None:
    files = SimulatedFiles()
    log = open_log(files, durability)
    list(log.recover())
    before = files.calls
    for number in range(5):
        log.append([draft(number, 1, b"a")])
        log.sync()
    calls = [line.split()[1] for line in list(files.trace)[before - files.calls :]]
    assert set(calls) == {"write"}
    log.publish()
    assert files.trace[-1].split()[1] == "pwrite"
    log.force_sync()
    assert " sync " in " ".join(list(files.trace)[-3:])
