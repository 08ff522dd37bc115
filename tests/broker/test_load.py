"""A queue under everything at once: random work, widths, kills and power cuts, checked against what must be true of any
of it.

Of each key: items are completed in the order in which they were produced, one at a time; none is lost, none is
completed twice. A failing seed is repeated with `pytest -k "load and seed17"`.
"""

import random
from dataclasses import dataclass, field

import pytest

from penstock.loop.requests import SettlePart
from penstock.operations import SetReadOnly
from penstock.rules.commands import Settled
from penstock.testing import Halt, SimulatedFiles
from penstock.words.errors import LeaseLost, Refused
from tests.broker.broker_under_test import BrokerUnderTest, LeasedItems, QueueUnderTest
from tests.broker.storages import MemoryStorage, SimulatedStorage

KEYS = [f"key-{number}" for number in range(14)]
STEPS = 90
LEASE_SECONDS = 30


@dataclass
class QueueLoadModel:
    """What a test knows of a queue."""

    produced: dict[str, int] = field(default_factory=dict)
    """key → the number of its next item."""
    completed: dict[str, list[int]] = field(default_factory=dict)
    held: list[tuple[LeasedItems, int]] = field(default_factory=list)
    """Leases, and when they end at the latest."""
    plain_made: set[str] = field(default_factory=set)
    plain_done: list[str] = field(default_factory=list)


class QueueLoad:
    """Random work on one queue."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.files = SimulatedFiles(random.Random(seed))
        self.broker = BrokerUnderTest(MemoryStorage() if seed % 3 == 0 else SimulatedStorage(self.files))
        self.queue: QueueUnderTest = self.broker.create(
            partitions=self.rng.choice((1, 2, 4)), lease_timeout=LEASE_SECONDS * 1_000_000, max_attempts=0
        )
        self.model = QueueLoadModel()
        self.requests = 0

    def run(self) -> None:
        steps = [self.produce] * 8 + [self.lease] * 10 + [self.settle] * 12 + [self.wait] * 4 + [self.resize] * 2 + [self.end]
        for _ in range(STEPS):
            if isinstance(self.broker.storage, SimulatedStorage) and self.rng.random() < 0.06:
                self.files.fail(self.files.calls + self.rng.randint(1, 12), "halt")
            step = self.rng.choice(steps)
            try:
                step()
            except Halt:
                self.end()
        self.files.clear_faults()
        self.finish()

    # -- steps -----------------------------------------------------------------------------------------------

    def produce(self) -> None:
        keys = [self.rng.choice([*KEYS, None]) for _ in range(self.rng.randint(1, 8))]
        texts: list[str] = []
        for key in keys:
            if key is None:
                texts.append(f"plain:{self.requests}.{len(texts)}")
                self.model.plain_made.add(texts[-1])
            else:
                number = self.model.produced.get(key, 0)
                self.model.produced[key] = number + 1
                texts.append(f"{key}:{number}")
        self.requests += 1
        try:
            self.queue.produce(*texts, keys=keys, request=f"r{self.requests}")
        except Halt:
            self.end()
            self.queue.produce(*texts, keys=keys, request=f"r{self.requests}")  # what was not answered is repeated

    def lease(self) -> None:
        per_key = self.rng.choice((1, 1, 1, 3))
        held = self.queue.lease(self.rng.randint(1, 9), per_key=per_key)
        busy = [key for other, until in self.model.held for key in other.keys if key and until > self.now]
        mine = [key for key in held.keys if key]
        assert not set(busy) & set(mine), "two holders of one key"
        assert per_key > 1 or len(set(mine)) == len(mine)
        if held:
            self.model.held.append((held, self.now + LEASE_SECONDS * 1_000_000))

    def settle(self) -> None:
        """Items of a lease one by one, in the order given: those of a key are one unit."""
        if not self.model.held:
            return
        held, _ = self.model.held.pop(self.rng.randrange(len(self.model.held)))
        back: set[str] = set()
        for item, text, key in zip(held.ids, held.texts, held.keys, strict=True):
            if key and key in back:
                continue  # it went back with the one before it
            if self.rng.random() < 0.7:
                if self._completed(held, item):
                    self._note(text, key)
                else:
                    back.add(key)
            elif self._settled("retry", held.part(item), delay=self.rng.choice((0, 0, 5, 100))):
                back.add(key)

    def _completed(self, held: LeasedItems, item: str) -> bool:
        try:
            return self._settled("complete", held.part(item))
        except Halt:
            self.end()
            return self.queue.explain(item).state == "completed"

    def _settled(self, action: str, part: SettlePart, delay: float = 0) -> bool:
        (answer,) = self.queue.settle(action, [part], delay=delay)  # type: ignore[arg-type]
        if isinstance(answer, Refused):
            assert answer.code == LeaseLost.code
            return False
        assert isinstance(answer, Settled) and not answer.early
        return answer.done == 1

    def _note(self, text: str, key: str) -> None:
        if not key:
            self.model.plain_done.append(text)
            return
        number = int(text.partition(":")[2])
        done = self.model.completed.setdefault(key, [])
        assert number == len(done), f"{text} was completed after {done[-3:]}"
        done.append(number)

    def wait(self) -> None:
        self.broker.advance_in_steps(self.rng.choice((1, 6, 40, 110)))

    def resize(self) -> None:
        if self.rng.random() < 0.25:
            partition = self.rng.choice(self.queue.info.active)
            self.broker.embedded.call(SetReadOnly(queue=self.queue.incarnation, partition=partition))
        else:
            self.queue.resize(self.rng.randint(1, 6))

    def end(self) -> None:
        """The process ends, perhaps the machine too."""
        self.files.clear_faults()
        if isinstance(self.broker.storage, SimulatedStorage) and self.rng.random() < 0.5:
            self.files.crash()
            self.model.held.clear()  # what was leased last may be forgotten, and leased anew
        self.broker.kill()

    # -- the end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self.broker.check()
        self.model.held.clear()
        self.broker.advance_in_steps(200)
        for _ in range(2_000):
            held = self.queue.lease(self.rng.randint(1, 20))
            if not held and not self.queue.stats().depth:
                break
            for text, key in zip(held.texts, held.keys, strict=True):
                self._note(text, key)
            held.complete()
        assert {key: len(done) for key, done in self.model.completed.items()} == self.model.produced
        assert sorted(self.model.plain_done) == sorted(self.model.plain_made)
        stats = self.queue.stats()
        assert (stats.resizing, stats.transfers, stats.depth) == ([], 0, 0)
        assert {one.status for one in stats.partitions} <= {"active", "drained"}
        self.broker.check()
        self.broker.embedded.close()

    @property
    def now(self) -> int:
        return self.broker.clock.read().elapsed


@pytest.mark.parametrize("seed", range(24), ids=lambda seed: f"seed{seed}")
def test_load(seed: int) -> None:
    QueueLoad(seed).run()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1_000, 1_400), ids=lambda seed: f"seed{seed}")
def test_load_for_long(seed: int) -> None:
    QueueLoad(seed).run()
