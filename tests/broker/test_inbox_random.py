"""Drops, whatever happens around them: at the end every published item is there exactly once, and every key in order.

A seed is a whole life. What it did is in the failure's message; to repeat seed 17 with 60 steps:
    .venv/bin/python -c 'from tests.broker.test_inbox_random import live; live(17, 60)'
"""

import errno
import random
from collections import Counter
from contextlib import suppress

import pytest

from penstock.broker import inbox
from penstock.errors import PenstockError
from penstock.testing import Halt
from penstock.testing.clock import MicrosecondClock
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from tests.broker.broker_under_test import BrokerUnderTest, LeasedItems, batch_of
from tests.broker.other_process import OtherProcess, numbers_by_key, process_inbox
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage

SOURCES = ["red", "green", "blue"]
MOST_RESIZES = 6  # fences are inherited: with a backlog that nobody serves each resize makes more of them


class InboxSimulation:
    """A broker, those who write to it, and what they published."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.files = PartlyFailingFiles(random.Random(seed + 1))
        self.clock = MicrosecondClock()
        self.broker = BrokerUnderTest(SimulatedStorage(self.files), clock=self.clock)
        self.broker.create(partitions=self.rng.randint(1, 3), dedup_window=30 * SECOND)
        self.incarnation = self.broker.find().incarnation
        self.writes: dict[str, list[list[Batch]]] = {source: [] for source in SOURCES}
        self.published: list[str] = []
        self.served: list[str] = []
        self.given = 0
        self.resizes = 0
        self.did: list[str] = []

    def live(self, steps: int) -> None:
        verbs = {self.publish: 6, self.again: 1, self.look: 5, self.restart: 2, self.away: 2, self.resize: 1, self.pause: 1, self.resume: 2}
        verbs |= {self.break_partition: 1, self.mend: 2, self.serve: 2, self.fail: 2}
        for _ in range(steps):
            verb = self.rng.choices([*verbs], [*verbs.values()])[0]
            self.did.append(verb.__name__)
            verb()
        self.finish()

    # -- what happens ------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish the next write of a source; if cut off, publish it again, as a stream does with its batch."""
        source = self.rng.choice(SOURCES)
        batches = [self.frame(source) for _ in range(self.rng.randint(0, 4))]
        self.writes[source].append(batches)
        self.published += [payload.decode() for batch in batches for payload in batch.payloads]
        while not self.cut_off(lambda: self.put(source, len(self.writes[source]))):
            pass

    def again(self) -> None:
        """One that was published before."""
        source = self.rng.choice(SOURCES)
        if self.writes[source]:
            self.put(source, self.rng.randint(1, len(self.writes[source])))

    def look(self) -> None:
        self.cut_off(lambda: process_inbox(self.broker))

    def restart(self) -> None:
        self.cut_off(self.broker.restart)

    def away(self) -> None:
        self.clock.advance(self.rng.choice([SECOND, 40 * SECOND, 1_200 * SECOND]))
        self.broker.turn()

    def resize(self) -> None:
        if self.resizes < MOST_RESIZES:
            self.resizes += 1
            with suppress(PenstockError):  # a partition is failing
                self.broker.find().resize(self.rng.randint(1, 4))
            self.broker.turn()

    def pause(self) -> None:
        with suppress(PenstockError):
            self.broker.find().pause(produce=True)

    def resume(self) -> None:
        with suppress(PenstockError):
            self.broker.find().pause(produce=False)

    def break_partition(self) -> None:
        self.files.failing_paths.add(f"/{self.incarnation:016x}/{self.rng.randint(0, 3):05d}/")

    def mend(self) -> None:
        self.files.failing_paths.clear()
        self.broker.turn()

    def fail(self) -> None:
        """Some call to come fails, not of a change that a test makes itself."""
        self.files.fail(self.files.calls + self.rng.randint(1, 60), self.rng.choice([errno.EIO, errno.ENOSPC, "torn"]))
        process_inbox(self.broker)
        self.files.clear_faults()

    def serve(self) -> None:
        if not self.files.failing_paths:
            self.broker.advance_in_steps(40)
            held = self.broker.find().lease(self.rng.randint(1, 30))
            self.take(held)
            assert held.complete() == len(held.texts)

    # -- steps -------------------------------------------------------------------------------------------

    def take(self, held: LeasedItems) -> None:
        """Note what was served. Each item must have the key that its text names."""
        self.served += held.texts
        assert [key or "none" for key in held.keys] == [text.partition(":")[0] for text in held.texts]

    def frame(self, source: str) -> Batch:
        texts, keys = [], []
        for _ in range(self.rng.randint(1, 12)):
            self.given += 1
            key = self.rng.choice([f"{source}-{number}" for number in range(4)] + [None])
            keys.append(key)
            texts.append(f"{key or 'none'}:{self.given}")
        return batch_of(*texts, keys=keys, dedups=texts if self.rng.random() < 0.3 else None)

    def put(self, source: str, number: int) -> None:
        batches = self.writes[source][number - 1]
        parts = self.rng.randint(1, max(1, len(batches)))
        OtherProcess(self.files).publish(
            self.incarnation, *batches, source=source, number=number, parts=parts, write=f"{self.rng.random()}"
        )

    def cut_off(self, work: object) -> bool:
        """Do something, and perhaps end everything in the middle of it; whether it was done."""
        if self.rng.random() < 0.5:
            self.files.fail(self.files.calls + self.rng.randint(1, 120), "halt")
        try:
            work()  # type: ignore[operator]
            self.files.clear_faults()
            return True
        except Halt:
            self.did.append("cut off")
        except PenstockError:  # closing says so when a partition is failing
            self.did.append("failed")
        self.files.clear_faults()
        if self.rng.random() < 0.5:
            self.files.crash()
        else:
            self.files.kill()
        self.broker = BrokerUnderTest(SimulatedStorage(self.files), clock=self.clock)
        return False

    # -- the end -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        self.files.failing_paths.clear()
        self.broker.advance_in_steps(100)
        self.resume()
        self.broker.kill()
        other, queue = OtherProcess(self.files), self.broker.find()
        for _ in range(50):
            self.broker.advance_in_steps(40)
            process_inbox(self.broker)
        assert [name for name in other.inbox_files() if name.endswith(".drop")] == []
        while held := queue.lease(100) or queue.lease(100):
            self.take(held)
            held.complete()
        assert Counter(self.served) == Counter(self.published)
        for key, numbers in numbers_by_key(self.served).items():
            assert numbers == sorted(numbers) or key == "none", f"{key}: {numbers}"
        self.broker.check()
        self.broker.embedded.close()


def live(seed: int, steps: int) -> None:
    """A life of one seed. Some owners store several chunks of a write in one turn, some one."""
    life = InboxSimulation(seed)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inbox, "CHUNKS_AT_ONCE", (1, 2, 8)[seed % 3])
            life.live(steps)
    except BaseException as error:
        error.add_note(f"seed {seed}, {steps} steps: {' '.join(life.did)}")
        raise


@pytest.mark.parametrize("seed", range(25))
def test_random_inbox_work(seed: int) -> None:
    live(seed, 40)


@pytest.mark.long
@pytest.mark.parametrize("start", range(100, 2_100, 100))
def test_random_inbox_work_with_many_seeds(start: int) -> None:
    for seed in range(start, start + 100):
        live(seed, 60)
