"""Damages a copy of a simulated broker's disk, closed or while a broker has it open, and checks what it still serves.

Owns: `check_damaged_copy`. Items are read by cursors, listed, redriven to another queue, leased and completed.
Checked: every undamaged item is read, listed and, if it was not completed, delivered exactly once; exactly the damaged
items are counted as lost; no queue runs turns without end.
"""

import copy
import random
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from penstock.api.redrive import REDRIVABLE
from penstock.loop import requests
from penstock.loop.requests import LeaseResult, SettlePart
from penstock.operations import (
    A,
    ClearItems,
    ListHeldKeys,
    ListItems,
    Operation,
    PauseQueue,
    ReadItems,
    ReadStats,
    RedriveItems,
    UpdateQueue,
)
from penstock.rules.item_states import ItemState
from penstock.rules.runs import offsets
from penstock.testing.clock import MicrosecondClock
from penstock.testing.disk import SimulatedFiles
from penstock.words.clock import DAY, HOUR, MINUTE, SECOND
from simulation.broker.manual_broker import MOST_TURNS, ROOT, loops_due, open_broker
from simulation.damage import LogDamage, check_served, payloads
from simulation.simulation import StepPrinter

ROUNDS = [MINUTE, 6 * MINUTE, *[HOUR] * 2, *[DAY] * 3]
"""How long to wait before each round of work."""
OPTIONS = {"max_attempts": 0, "retention": {"max_age": 0, "max_bytes": 0, "max_segments": 0}, "max_items": 0}
CLEARED: list[Literal["buried"]] = ["buried"]
"""Nothing is buried when this is cleared: it releases keys that are parked for items in a dead queue, which may be lost
there."""

CopyPlace: TypeAlias = tuple[int, int, int]
"""Incarnation, partition, offset."""


class BrokerCopy:
    """A broker on a copy of a disk."""

    def __init__(self, files: SimulatedFiles, clock: MicrosecondClock, segment_bytes: int, rng: random.Random) -> None:
        self.files = files
        self.clock = clock
        self.rng = rng
        self._segment_bytes = segment_bytes
        self._entropy = random.Random(rng.random())
        self.open()

    def open(self) -> None:
        self.broker = open_broker(self.files, self.clock, self._entropy, self._segment_bytes)

    @property
    def queues(self) -> list[int]:
        return [loop.engine.incarnation for loop in self.broker.loops()]

    def run_until_idle(self) -> None:
        """Run turns until no queue has one due."""
        for _ in range(MOST_TURNS):
            loops = loops_due(self.broker)
            if not loops:
                return
            self.rng.choice(loops).turn()
        raise AssertionError("a damaged broker runs turns without end")

    def recover_all(self) -> None:
        """Run turns until no partition fails and every transfer has arrived."""
        for _ in range(12):
            self.run_until_idle()
            handles = [handle for loop in self.broker.loops() for handle in loop.engine.handles.values()]
            if all(handle.is_usable or handle.closed for handle in handles) and not any(
                loop.engine.transfer_step.outgoing_count for loop in self.broker.loops()
            ):
                return
            self.clock.advance(1 * SECOND)
        raise AssertionError("partitions still fail, or transfers do not arrive, though no more faults are injected")

    def ask(self, operation: Operation[A]) -> A:
        answer = self.broker.call(operation)
        self.run_until_idle()
        return answer

    def call(self, queue: int, request: requests.Request) -> Any:
        self.broker.loop(queue).submit(request)
        self.run_until_idle()
        return request.result()

    def states(self) -> Iterator[tuple[int, Any]]:
        """(incarnation, partition handle) of every partition."""
        return ((loop.engine.incarnation, handle) for loop in self.broker.loops() for handle in loop.engine.handles.values())

    # -- ways to read ----------------------------------------------------------------------------------

    def read(self, queue: int) -> dict[CopyPlace, bytes]:
        """All items that a cursor reads, page by page."""
        at: dict[int, int] = {}
        found: dict[CopyPlace, bytes] = {}
        limit = self.rng.choice([1, 3, 20, 1_000])
        while True:
            page = self.ask(ReadItems(queue=queue, start=at, limit=limit))
            for partition, part in page.items:
                for offset, payload in payloads([part]).items():
                    assert (queue, partition, offset) not in found, f"a cursor read {partition}-{offset} twice"
                    found[queue, partition, offset] = payload
            if not page.items and page.next_offsets == at:
                return found
            at = page.next_offsets

    def listed(self, queue: int) -> dict[CopyPlace, bytes]:
        """Every item in every state, page by page."""
        found: dict[CopyPlace, bytes] = {}
        after, limit = None, self.rng.choice([1, 3, 20, 1_000])
        while items := self.ask(ListItems(queue=queue, after=after, limit=limit)):
            found |= {(queue, item.partition, item.offset): item.batch.payloads[item.index] for item in items}
            after = items[-1].partition, items[-1].offset
        return found


def check_damaged_copy(files: SimulatedFiles, clock: MicrosecondClock, segment_bytes: int, rng: random.Random, say: StepPrinter) -> None:
    """Damage a copy of a broker's disk and use it; raises AssertionError when a check fails."""
    files = files.copy()
    files.clear_faults()
    files.set_free_bytes(None)
    files.set_read_only(False)
    files.kill()
    twin = BrokerCopy(files, copy.deepcopy(clock), segment_bytes, rng)
    for queue in twin.queues:
        twin.broker.call(UpdateQueue(queue=queue, changes=OPTIONS))
        twin.ask(PauseQueue(queue=queue, lease=False, produce=False))
    twin.recover_all()
    use = DamagedBroker(twin)
    twin.broker.close()
    in_use = rng.random() < 0.4
    if in_use:
        twin.open()
    use.damage_logs(say)
    if not in_use:
        twin.open()
    twin.recover_all()
    use.check_all(sure=not in_use)


class DamagedBroker:
    """Compares the items of a broker before and after damage."""

    def __init__(self, twin: BrokerCopy) -> None:
        self._twin = twin
        self._read = {place: payload for queue in twin.queues for place, payload in twin.read(queue).items()}
        self._listed = {place: payload for queue in twin.queues for place, payload in twin.listed(queue).items()}
        self._there: dict[CopyPlace, bytes] = {}
        self._wanted: dict[CopyPlace, bytes] = {}
        """The items that are not completed."""
        for queue, handle in twin.states():
            state = handle.state
            found = payloads(handle.usable_partition.items(state.dropped.missing(0, state.next_offset)))
            self._there |= {(queue, handle.number, offset): payload for offset, payload in found.items()}
            alive = {offset for offset in found if state.state_of(offset) not in (ItemState.COMPLETED, ItemState.CANCELLED)}
            self._wanted |= {(queue, handle.number, offset): found[offset] for offset in alive}
        self._damaged: set[CopyPlace] = set()
        self._logs = sorted({place[:2] for place in self._there})
        self._sure = True

    def damage_logs(self, say: StepPrinter) -> None:
        """Damage one log, or two."""
        rng = self._twin.rng
        for queue, partition in rng.sample(self._logs, min(len(self._logs), rng.choice([1, 1, 2]))):
            harm = LogDamage(self._twin.files, f"{ROOT}/logs/{queue:016x}/{partition:05d}/", rng, say)
            self._damaged |= {(queue, partition, offset) for offset in harm.items}

    def check_all(self, *, sure: bool) -> None:
        """`sure`: every damaged item must be noticed, because no file was open or cached when it was damaged."""
        self._sure = sure
        steps = [self._check_read, self._check_listed]
        self._twin.rng.shuffle(steps)
        if self._twin.rng.random() < 0.5:
            for step in steps:
                step()
            self._deliver()
        else:
            self._deliver()
            self._check_read(later=True)
        self._check_lost()

    def _check_read(self, *, later: bool = False) -> None:
        found = {place: payload for queue in self._twin.queues for place, payload in self._twin.read(queue).items()}
        if later:  # items redriven since then are read too
            found = {place: payload for place, payload in found.items() if place in self._there}
        self._check(found, self._read, "read")

    def _check_listed(self) -> None:
        self._check({place: p for queue in self._twin.queues for place, p in self._twin.listed(queue).items()}, self._listed, "listed")

    def _check(self, found: dict[CopyPlace, bytes], before: dict[CopyPlace, bytes], what: str) -> None:
        check_served(found, before, self._damaged, what, sure=self._sure, named=_named)
        changed = {place for place, payload in found.items() if before[place] != payload}
        assert not changed, f"{_named(changed)} have other payloads than before"

    def _check_lost(self) -> None:
        """At the end, when everything was read: exactly the damaged items are lost."""
        lost = {(queue, handle.number, offset) for queue, handle in self._twin.states() for offset in offsets(handle.state.lost.runs)}
        expected = self._damaged & self._there.keys()
        assert lost <= expected, f"{_named(lost - expected)} are lost and were not damaged"
        assert lost == expected or not self._sure, f"{_named(expected - lost)} are damaged and not lost"
        said = sum(part.lost for queue in self._twin.queues for part in self._twin.ask(ReadStats(queue=queue)).partitions)
        assert said == len(lost), f"{len(lost)} items are lost, and the statistics say {said}"

    # -- delivering ------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Every undamaged item that was not completed is delivered exactly once, from whichever queue has it."""
        twin, found = self._twin, list[bytes]()
        if twin.rng.random() < 0.5:
            self._redrive()
        whole = {payload for place, payload in self._wanted.items() if place not in self._damaged}
        pauses = list(ROUNDS)
        while pauses:
            if whole.issubset(found):  # let all the remaining time pass at once; nothing more may be delivered
                pauses = [sum(pauses)]
            twin.clock.advance(pauses.pop(0))
            twin.recover_all()
            for queue in twin.queues:
                twin.ask(RedriveItems(queue=queue, to=queue))
                twin.ask(ListHeldKeys(queue=queue, limit=1_000))
                twin.ask(ClearItems(queue=queue, states=CLEARED))
            for queue in twin.queues:
                found += self._drain(queue)
        wanted = set(self._wanted.values())
        check_served(found, wanted, wanted - whole, "delivered", sure=self._sure, named=sorted)

    def _redrive(self) -> None:
        """Redrive all items of one queue to another."""
        twin = self._twin
        source, to = twin.rng.choice(twin.queues), twin.rng.choice(twin.queues)
        after, limit = None, twin.rng.choice([3, 1_000])
        while source != to and (items := twin.ask(ListItems(queue=source, states=REDRIVABLE, after=after, limit=limit))):
            after = items[-1].partition, items[-1].offset
            chosen: dict[int, list[int]] = {}
            for item in items:
                chosen.setdefault(item.partition, []).append(item.offset)
            twin.ask(RedriveItems(queue=source, items=chosen, to=to))

    def _drain(self, queue: int) -> list[bytes]:
        twin, found = self._twin, list[bytes]()
        while True:
            asked = requests.LeaseRequest(
                twin.rng.choice([1, 5, 100]), "host-1", per_key=twin.rng.choice([1, 3]), deadline=twin.clock.read().elapsed
            )
            handed: list[LeaseResult] = twin.call(queue, asked)
            if not handed:
                return found
            for one in handed:
                given = payloads(one.items)
                assert given, f"a lease without items was given: {one}"
                found += given.values()
                assert one.granted.count == len(given), f"{one.granted} was given with {len(given)} items"
                twin.call(queue, requests.SettleRequest("complete", [SettlePart(one.partition, one.granted.lease)]))


def _named(places: Iterable[CopyPlace]) -> list[str]:
    return [f"{partition}-{offset} of {queue:x}" for queue, partition, offset in sorted(places)]
