"""Damages a copy of a simulated partition and checks what it still serves.

Owns: `check_damaged_copy`.
Checked: every undamaged item is read, explained and delivered exactly once; exactly the damaged items are recorded as
lost; `verify` reports the damage, and reports none after a repair; all of this takes a bounded number of steps.
"""

import copy
import random
from collections.abc import Sequence

import msgspec

from penstock.logs.files.file_store import FileStore
from penstock.logs.files.repair import repair
from penstock.logs.files.verify import verify
from penstock.logs.log import DURABILITIES, Durability
from penstock.loop import recovery
from penstock.loop.item_cache import Items
from penstock.loop.partition import Partition
from penstock.rules import commands as c
from penstock.rules.explain import LOST
from penstock.rules.item_states import ItemState
from penstock.rules.runs import RunSet, offsets
from penstock.testing.clock import MicrosecondClock
from penstock.testing.disk import SimulatedFiles
from penstock.words.clock import DAY
from simulation.damage import LogDamage, check_served, payloads
from simulation.partition.commands import KEEP_ALL
from simulation.simulation import StepPrinter

ROUNDS = 4
"""The number of rounds that one call of a command may take."""
DAYS = 4


class PartitionCopy:
    """A partition on a copy of a disk."""

    def __init__(
        self,
        files: SimulatedFiles,
        clock: MicrosecondClock,
        root: str,
        owner: tuple[int, int],
        segment_bytes: int,
        durability: Durability = "fsync",
    ) -> None:
        self.durability: Durability = durability
        self.files = files.copy()
        self.files.clear_faults()
        self.files.kill()
        self.clock = copy.deepcopy(clock)
        self._root = root
        self._owner = owner
        self._segment_bytes = segment_bytes
        self.folder = ""
        self.open()

    def open(self) -> None:
        self._directory = FileStore.open(self._root, files=self.files, clock=self.clock, entropy=bytes, durability=self.durability)
        self.folder = self._directory.path_of(*self._owner)
        self.partition = Partition(self._directory.log(*self._owner), self.clock, segment_bytes=self._segment_bytes)

    def close(self) -> None:
        self.partition.close()
        self._directory.close()

    def verified(self) -> bool:
        """Whether `verify` finds no damage."""
        return verify(self.files, self.folder, *self._owner, recovery.find_missing_front).sound

    def repair(self) -> None:
        report = repair(self.files, self.folder, *self._owner, clock=self.clock, lost_front=recovery.find_missing_front)
        assert report.opens and report.changed, f"the damage was not repaired: {report}"

    def ask(self, command: c.Command) -> c.Answer:
        """Run a command until it is answered; fail after a bounded number of calls."""
        for _ in range(100 + self.partition.state.next_offset):
            answer = self.partition.run(command, ROUNDS)
            self.partition.commit()
            if not isinstance(answer, c.AskAgain):
                return answer
        raise AssertionError(f"{command} was not answered in a bounded number of calls")


def check_damaged_copy(
    files: SimulatedFiles,
    clock: MicrosecondClock,
    root: str,
    owner: tuple[int, int],
    segment_bytes: int,
    rng: random.Random,
    say: StepPrinter,
) -> None:
    """Damage a copy of a partition and use it; raises AssertionError when a check fails."""
    if rng.random() < 0.15:
        _lose_everything(PartitionCopy(files, clock, root, owner, segment_bytes, rng.choice(DURABILITIES)), rng)
        return
    twin = PartitionCopy(files, clock, root, owner, segment_bytes)
    twin.ask(c.Configure(msgspec.structs.replace(twin.partition.state.policy, retention=KEEP_ALL, max_attempts=0)))
    twin.ask(c.Pause(False, False))
    state = twin.partition.state
    there = state.dropped.missing(0, state.next_offset)
    before = payloads(twin.partition.items(there))
    wanted = {offset for offset in before if state.state_of(offset) not in (ItemState.COMPLETED, ItemState.CANCELLED)}
    if not before:
        return
    in_use = rng.random() < 0.4
    twin.close()
    if in_use:
        twin.open()
    damaged = LogDamage(twin.files, twin.folder, rng, say).items & set(before)
    if not in_use:
        assert not damaged or not twin.verified(), f"{sorted(damaged)} are damaged, and verify does not report it"
        if damaged and rng.random() < 0.3:
            say("   repair")
            twin.repair()
            assert twin.verified(), "damage was repaired, and verify still finds it"
        twin.open()
    DamagedPartition(twin, before, damaged, wanted, rng, sure=not in_use).check_all()


def _lose_everything(twin: PartitionCopy, rng: random.Random) -> None:
    """Delete every segment and check that opening and `verify` notice it in every durability mode."""
    state = twin.partition.state
    there = state.dropped.missing(0, state.next_offset)
    if rng.random() < 0.5:
        twin.close()
    else:
        twin.partition.sync_and_publish()
        twin.files.kill()
    for path in [path for path in twin.files.contents() if path.startswith(twin.folder) and path.endswith(".log")]:
        twin.files.remove(path)
    assert not twin.verified(), "every segment is missing, and verify finds nothing"
    if rng.random() < 0.3:
        twin.repair()
        assert twin.verified(), "damage was repaired, and verify still finds it"
    twin.open()
    lost, again = twin.partition.state.lost, twin.partition.state.next_offset
    assert not RunSet(there).subtract(lost.runs), f"every segment is missing, and only {lost} are recorded as lost"
    assert again >= state.next_offset, f"offset {again} would be given a second time"
    assert twin.partition.gaps, "every segment is missing, and no gap is reported"


class DamagedPartition:
    """Reads, explains and delivers the items of a damaged partition, in random order."""

    def __init__(
        self, twin: PartitionCopy, before: dict[int, bytes], damaged: set[int], wanted: set[int], rng: random.Random, *, sure: bool
    ) -> None:
        self._twin = twin
        self._before = before
        self._damaged = damaged
        self._wanted = wanted
        self._rng = rng
        self._sure = sure
        """Whether every damaged item must be noticed. False if the partition was open when it was damaged: its caches
        are still good."""

    def check_all(self) -> None:
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
        """Read everything with a cursor, page by page."""
        partition, at, found = self._twin.partition, 0, []
        limit = self._rng.choice([1, 3, 10, 1_000])
        for _ in range(partition.state.next_offset + 2):
            items, stop = partition.read_retained(at, limit)
            found += self._right(items)
            assert bool(items) == (at < stop) or stop == partition.state.next_offset, f"a cursor at {at} read nothing and moved to {stop}"
            if not items:
                break
            at = stop
        check_served(found, self._before, self._damaged, "read", sure=self._sure, named=sorted)
        self._check_lost()

    def _explain(self) -> None:
        for offset in self._rng.sample(sorted(self._before), min(10, len(self._before))):
            said = self._twin.partition.explain(offset)
            lost = offset in self._twin.partition.state.lost
            assert (said.why == LOST) == lost, f"{offset} was explained as {said}"
            assert not lost or offset in self._damaged, f"{offset} is not damaged and was explained as {said}"
        self._check_lost()

    def _deliver(self) -> None:
        """Every undamaged item that is neither completed nor cancelled is delivered exactly once."""
        twin, found = self._twin, list[int]()
        changes = twin.partition.records_applied
        for _ in range(DAYS):
            twin.clock.advance(1 * DAY)
            while twin.partition.due():
                twin.partition.commit()
            twin.partition.commit()
            twin.ask(c.Redrive())
            found += self._work_off()
        check_served(found, self._wanted, self._damaged, "delivered", sure=self._sure, named=sorted)
        self._wanted = set()
        most = 40 * (len(self._before) + 10) * DAYS
        assert twin.partition.records_applied - changes < most, (
            f"{twin.partition.records_applied - changes} records for {len(self._before)} items"
        )

    def _work_off(self) -> list[int]:
        found: list[int] = []
        while True:
            granted = self._twin.ask(c.AcquireLease(self._rng.choice([1, 3, 100]), per_key=self._rng.choice([1, 3])))
            if not isinstance(granted, c.LeaseAnswer) or not granted.lease:
                return found
            given = self._right(self._twin.partition.items(granted.runs))
            found += given
            if given:
                self._twin.ask(c.CompleteLeased(granted.lease))

    def _right(self, items: Sequence[Items]) -> list[int]:
        """The offsets of items, after a check that their payloads are those of before the damage."""
        for offset, payload in payloads(items).items():
            assert self._before.get(offset) == payload, f"item {offset} is {payload!r}, and was {self._before.get(offset)!r}"
        return list(payloads(items))
