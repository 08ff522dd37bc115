"""Damaged files under a whole broker: what becomes of the items of its queues.

Owns: `examine`: a twin of a simulated broker's disk is damaged, at rest or while a broker has it open, and then used as a broker is used:
cursors read, items are listed, some are redriven to another queue, the rest is leased and completed. As with one partition (damage.py),
the story goes on as if nothing had happened.
What must hold: every undamaged item is read, listed and, if it was not done, delivered, once; exactly the damaged ones are counted as lost;
no queue runs turn after turn without end.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from penstock.broker.embedded import Embedded
from penstock.loop import requests
from penstock.loop.requests import Handed, Part
from penstock.rules.life import Life
from penstock.rules.runs import offsets
from penstock.testing.clock import ManualClock
from penstock.testing.disk import SimulatedFiles
from penstock.words.clock import DAY, HOUR, MINUTE, SECOND
from simulation.partition.damage import Harm, payloads

MOST_TURNS = 400
"""So many turns in a row without any time passing are no progress any more."""
ROUNDS = [MINUTE, 6 * MINUTE, *[HOUR] * 2, *[DAY] * 3]
"""How long to wait before each round of work."""
OPTIONS = {"max_attempts": 0, "retention": {"max_age": 0, "max_bytes": 0, "max_segments": 0}, "max_items": 0}
CLEARED = {"partition": None, "ready": False, "scheduled": False, "leased": False, "buried": True}
"""Nothing is buried when this is said: it frees the keys that are parked for what went to a dead queue, and may be lost there."""

Spot: TypeAlias = tuple[int, int, int]
"""Incarnation, partition, offset."""


class Twin:
    """A broker on a copy of a disk."""

    def __init__(self, files: SimulatedFiles, clock: ManualClock, root: str, segment_bytes: int, rng: random.Random) -> None:
        self.files = files
        self.clock = clock
        self.rng = rng
        self._root = root
        self._segment_bytes = segment_bytes
        self._entropy = random.Random(rng.random())
        self.open()

    def open(self) -> None:
        self.broker = Embedded.open(
            self._root,
            files=self.files,
            clock=self.clock,
            entropy=self._entropy.randbytes,
            threaded=False,
            segment_bytes=self._segment_bytes,
            compression=False,
        )

    @property
    def queues(self) -> list[int]:
        return [loop.turns.incarnation for loop in self.broker.loops()]

    def rest(self) -> None:
        """Run turns until no queue wants one."""
        for _ in range(MOST_TURNS):
            now, loops = self.broker.now(), self.broker.loops()
            wanting = [loop for loop in loops if loop.busy or (loop.turns.next_run is not None and loop.turns.next_run <= now)]
            if not wanting:
                return
            self.rng.choice(wanting).turn()
        raise AssertionError("a damaged broker finds no rest")

    def calm(self) -> None:
        """Let what fails be tried again, and what is under way arrive."""
        for _ in range(12):
            self.rest()
            members = [member for loop in self.broker.loops() for member in loop.turns.members.values()]
            if all(member.healthy or member.closed for member in members) and not any(
                loop.turns.carrying.under_way for loop in self.broker.loops()
            ):
                return
            self.clock.advance(1 * SECOND)
        raise AssertionError("partitions fail, or transfers do not arrive, though nothing goes wrong any more")

    def ask(self, queue: int, verb: str, **args: Any) -> Any:
        answer = self.broker.ask(queue, verb, **args)
        self.rest()
        return answer

    def call(self, queue: int, request: requests.Request) -> Any:
        self.broker.submit(queue, request)
        self.rest()
        return request.result()

    def states(self) -> Iterator[tuple[int, Any]]:
        """(incarnation, member) of every partition."""
        return ((loop.turns.incarnation, member) for loop in self.broker.loops() for member in loop.turns.members.values())

    # -- ways to read --------------------------------------------------------------------------------

    def read(self, queue: int) -> dict[Spot, bytes]:
        """Everything that a cursor is given, page by page."""
        at: dict[int, int] = {}
        found: dict[Spot, bytes] = {}
        limit = self.rng.choice([1, 3, 20, 1_000])
        while True:
            items, behind = self.ask(queue, "read", offsets=at, limit=limit)
            for partition, part in items:
                for offset, payload in payloads([part]).items():
                    assert (queue, partition, offset) not in found, f"a cursor read {partition}-{offset} twice"
                    found[queue, partition, offset] = payload
            if not items and behind == at:
                return found
            at = behind

    def listed(self, queue: int) -> dict[Spot, bytes]:
        """Every item in every state, page by page."""
        found: dict[Spot, bytes] = {}
        after, limit = None, self.rng.choice([1, 3, 20, 1_000])
        while items := self.ask(queue, "listed", states=[], after=after, limit=limit):
            found |= {(queue, item.partition, item.offset): item.batch.payloads[item.index] for item in items}
            after = items[-1].partition, items[-1].offset
        return found


def examine(
    files: SimulatedFiles, clock: ManualClock, root: str, segment_bytes: int, rng: random.Random, say: Callable[[str], None]
) -> None:
    """Damage a twin of a broker's disk, whose process is gone, and use it."""
    files = files.copy()
    files.mend()
    files.fill(None)
    files.readonly(False)
    files.kill()
    twin = Twin(files, copy.deepcopy(clock), root, segment_bytes, rng)
    for queue in twin.queues:
        twin.broker.update(queue, OPTIONS)
        twin.ask(queue, "pause", lease=False, produce=False)
    twin.calm()
    use = _Use(twin)
    twin.broker.close()
    in_use = rng.random() < 0.4
    if in_use:
        twin.open()
    use.hurt(root, say)
    if not in_use:
        twin.open()
    twin.calm()
    use.everything(sure=not in_use)


class _Use:
    """What was there before the damage, and what is found after it."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self._read = {spot: payload for queue in twin.queues for spot, payload in twin.read(queue).items()}
        self._listed = {spot: payload for queue in twin.queues for spot, payload in twin.listed(queue).items()}
        self._there: dict[Spot, bytes] = {}
        self._wanted: dict[Spot, bytes] = {}
        """Those that are not done."""
        for queue, member in twin.states():
            state = member.state
            found = payloads(member.open.items(state.dropped.missing(0, state.next_offset)))
            self._there |= {(queue, member.number, offset): payload for offset, payload in found.items()}
            alive = {offset for offset in found if state.state_of(offset) is not Life.COMPLETED}
            self._wanted |= {(queue, member.number, offset): found[offset] for offset in alive}
        self._damaged: set[Spot] = set()
        self._logs = sorted({spot[:2] for spot in self._there})
        self._sure = True

    def hurt(self, root: str, say: Callable[[str], None]) -> None:
        """Damage one log, or two."""
        rng = self._twin.rng
        for queue, partition in rng.sample(self._logs, min(len(self._logs), rng.choice([1, 1, 2]))):
            harm = Harm(self._twin.files, f"{root}/logs/{queue:016x}/{partition:05d}/", rng, say)
            self._damaged |= {(queue, partition, offset) for offset in harm.items}

    def everything(self, *, sure: bool) -> None:
        """`sure`: damaged items are met as such, because nothing of them was open or in memory when the damage was done."""
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
        found = {spot: payload for queue in self._twin.queues for spot, payload in self._twin.read(queue).items()}
        if later:  # copies that were made since are read too
            found = {spot: payload for spot, payload in found.items() if spot in self._there}
        self._check(found, self._read, "read")

    def _check_listed(self) -> None:
        self._check({spot: p for queue in self._twin.queues for spot, p in self._twin.listed(queue).items()}, self._listed, "listed")

    def _check(self, found: dict[Spot, bytes], before: dict[Spot, bytes], what: str) -> None:
        missed = before.keys() - self._damaged - found.keys()
        assert not missed, f"{_named(missed)} are whole, and were not {what}"
        wrong = found.keys() - before.keys() | (found.keys() & self._damaged if self._sure else set())
        assert not wrong, f"{_named(wrong)} were {what}, and are damaged or new"
        changed = {spot for spot, payload in found.items() if before[spot] != payload}
        assert not changed, f"{_named(changed)} are not what they were"

    def _check_lost(self) -> None:
        """At the end, when everything was read: the damaged items are lost, and no others."""
        lost = {(queue, member.number, offset) for queue, member in self._twin.states() for offset in offsets(member.state.lost.runs)}
        expected = self._damaged & self._there.keys()
        assert lost <= expected, f"{_named(lost - expected)} are lost and were not damaged"
        assert lost == expected or not self._sure, f"{_named(expected - lost)} are damaged and not lost"
        said = sum(part.lost for queue in self._twin.queues for part in self._twin.ask(queue, "stats").partitions)
        assert said == len(lost), f"{len(lost)} items are lost, and {said} are said to be"

    # -- delivering ----------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Whatever was not done is delivered, once, wherever it is by then."""
        twin, found = self._twin, list[bytes]()
        if twin.rng.random() < 0.5:
            self._redrive()
        for pause in ROUNDS:
            twin.clock.advance(pause)
            twin.calm()
            for queue in twin.queues:
                twin.ask(queue, "redrive", partition_offsets=None)
                twin.ask(queue, "keys", limit=1_000)
                twin.ask(queue, "clear", **CLEARED)
            for queue in twin.queues:
                found += self._drain(queue)
        whole = {payload for spot, payload in self._wanted.items() if spot not in self._damaged}
        missed = whole - set(found)
        assert not missed, f"{sorted(missed)} are whole, and were not delivered"
        wrong = set(found) - (whole if self._sure else set(self._wanted.values()))
        assert not wrong, f"{sorted(wrong)} were delivered: they are damaged, or done"
        assert len(found) == len(set(found)), f"some of {found} were delivered twice"

    def _redrive(self) -> None:
        """Everything that a queue has leaves for another."""
        twin = self._twin
        source, to = twin.rng.choice(twin.queues), twin.rng.choice(twin.queues)
        after, limit = None, twin.rng.choice([3, 1_000])
        while source != to and (items := twin.ask(source, "redrivable", after=after, limit=limit)):
            after = items[-1].partition, items[-1].offset
            chosen: dict[int, list[int]] = {}
            for item in items:
                chosen.setdefault(item.partition, []).append(item.offset)
            twin.ask(source, "send", partition_offsets=chosen, to=to)

    def _drain(self, queue: int) -> list[bytes]:
        twin, found = self._twin, list[bytes]()
        while True:
            asked = requests.Lease(twin.rng.choice([1, 5, 100]), "host-1", per_key=twin.rng.choice([1, 3]), deadline=twin.broker.now())
            handed: list[Handed] = twin.call(queue, asked)
            if not handed:
                return found
            for one in handed:
                given = payloads(one.items)
                assert given, f"a lease without items was given: {one}"
                found += given.values()
                assert one.granted.count == len(given), f"{one.granted} was given with {len(given)} items"
                twin.call(queue, requests.Settle("complete", [Part(one.partition, one.granted.lease)]))


def _named(spots: Iterable[Spot]) -> list[str]:
    return [f"{partition}-{offset} of {queue:x}" for queue, partition, offset in sorted(spots)]
