"""Random changes, failures and restarts: a catalog stays equal to a plain dict."""

import errno
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from penstock.logs.files.file_store import FileStore
from penstock.logs.log import Frame, Log
from penstock.logs.memory import MemoryLog
from penstock.loop import catalog as loop_catalog
from penstock.loop.catalog import Catalog
from penstock.rules.options import Options, merged
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.errors import InvalidRequest, PenstockError, QueueExists, QueueNotFound, StorageFailed

NAMES = st.sampled_from(["a", "b", "c", "d"])
CHANGES = st.fixed_dictionaries({}, optional={"ttl": st.integers(0, 3), "max_items": st.integers(0, 3), "dead_queue": NAMES | st.just("")})
FIRST: dict[str, Any] = {"ttl": 0, "max_items": 0, "dead_queue": "", "begun": 0, "adopting": {}, "adopted": {}, "holder": ""}


class CatalogStateMachine(RuleBasedStateMachine):
    """A catalog and its expected contents.

    By name: the incarnation, three options, the active partitions, the number of partitions ever made, the adopted
    writes, and the holder of the consumer right.
    """

    backend: str

    @initialize(seed=st.integers(0, 99))
    def begin(self, seed: int) -> None:
        self.clock = MicrosecondClock()
        self.kept: list[Frame] = []
        self.files = SimulatedFiles(random.Random(seed))
        self.catalog = Catalog(self.log(), self.clock)
        self.model: dict[str, dict[str, Any]] = {}
        self.deleted: set[int] = set()
        self.given = 0

    def log(self) -> Log:
        if self.backend == "memory":
            return MemoryLog(0, 0, self.kept)
        return FileStore.open("/data", files=self.files, clock=self.clock, entropy=bytes).log(0, 0)

    # -- what is asked -------------------------------------------------------------------------------

    @rule(name=NAMES, partitions=st.integers(1, 4), given=CHANGES, exist_ok=st.booleans())
    def create(self, name: str, partitions: int, given: dict[str, Any], exist_ok: bool) -> None:
        self.given += 1
        queue, options = self.model.get(name), merged(Options(), given)
        expected: type[PenstockError] | None = None
        if queue is None:
            expected = self.refusal(name, given.get("dead_queue", ""))
        elif not exist_ok or any(queue[option] != value for option, value in given.items()):
            expected = QueueExists
        asked = self.ask(
            expected, self.catalog.create, name, options, incarnation=self.given, partitions=partitions, exist_ok=exist_ok, given=given
        )
        if asked and queue is None:
            self.model[name] = {**FIRST, **given, "incarnation": self.given, "active": list(range(partitions)), "ever": partitions}

    @rule(name=NAMES, changes=CHANGES)
    def update(self, name: str, changes: dict[str, Any]) -> None:
        queue = self.model.get(name)
        if queue is None:
            self.ask(QueueNotFound, self.catalog.find, name)
            return
        dead = changes.get("dead_queue", queue["dead_queue"])
        expected = self.refusal(name, dead) if dead != queue["dead_queue"] else None
        if self.ask(expected, self.catalog.update, queue["incarnation"], changes):
            queue.update(changes)

    @rule(name=NAMES, keep=st.sets(st.integers(0, 9)), more=st.integers(0, 3))
    def reshape(self, name: str, keep: set[int], more: int) -> None:
        queue = self.model.get(name)
        if queue is None:
            return
        ever = queue["ever"]
        active = [number for number in range(ever + more) if number >= ever or number in keep]
        expected = None if active else InvalidRequest
        if self.ask(expected, self.catalog.reshape, queue["incarnation"], active, read_only=[], marks={}, keep_since=0):
            queue.update(active=active, ever=ever + more)

    @rule(name=NAMES, source=st.sampled_from("st"), number=st.integers(1, 4), finished=st.booleans())
    def adopt(self, name: str, source: str, number: int, finished: bool) -> None:
        queue = self.model.get(name)
        if queue is None:
            self.ask(QueueNotFound, self.catalog.begin_adoption, 1 << 60, "drop")
            return
        drop = f"{source}{number}"
        if self.ask(None, self.catalog.begin_adoption, queue["incarnation"], drop):
            if drop not in queue["adopting"]:
                queue["begun"] += 1
                queue["adopting"] = {**queue["adopting"], drop: queue["begun"]}
            assert self.catalog.begin_adoption(queue["incarnation"], drop) == queue["adopting"][drop]
            if finished and self.ask(None, self.catalog.end_adoption, queue["incarnation"], drop, source, number):
                queue["adopting"] = {name: own for name, own in queue["adopting"].items() if name != drop}
                queue["adopted"] = {**queue["adopted"], source: max(number, queue["adopted"].get(source, 0))}

    @rule(name=NAMES, holder=st.sampled_from(["", "h", "i"]))
    def hold(self, name: str, holder: str) -> None:
        queue = self.model.get(name)
        if queue is not None and self.ask(None, self.catalog.set_consumer_right, queue["incarnation"], holder, 5):
            queue["holder"] = holder

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        used = any(queue["dead_queue"] == name for queue in self.model.values())
        expected = QueueNotFound if name not in self.model else InvalidRequest if used else None
        if self.ask(expected, self.catalog.delete, name):
            self.deleted.add(self.model.pop(name)["incarnation"])

    @rule(data=st.data())
    @precondition(lambda self: self.deleted)
    def remove(self, data: st.DataObject) -> None:
        incarnation = data.draw(st.sampled_from(sorted(self.deleted)))
        if self.ask(None, self.catalog.record_removed, incarnation):
            self.deleted.remove(incarnation)

    def ask(self, expected: type[PenstockError] | None, call: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether the change was made: not when it was refused, or undone by a failing disk."""
        if expected is not None:
            with pytest.raises(expected, match="; "):
                call(*args, **kwargs)
            return False
        try:
            call(*args, **kwargs)
        except StorageFailed:
            return False
        return True

    def refusal(self, name: str, dead: str) -> type[PenstockError] | None:
        """Why a queue cannot have this dead queue."""
        if not dead:
            return None
        if dead != name and dead not in self.model:
            return QueueNotFound
        used = any(queue["dead_queue"] == name for queue in self.model.values())
        return InvalidRequest if dead == name or self.model[dead]["dead_queue"] or used else None

    # -- what happens to it ----------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        self.files.clear_faults()
        self.catalog.close()
        self.files.kill()
        self.catalog = Catalog(self.log(), self.clock)

    @rule()
    @precondition(lambda self: self.backend == "files")
    def lose_power(self) -> None:
        self.files.clear_faults()
        self.files.crash()
        self.catalog = Catalog(self.log(), self.clock)

    @rule(ahead=st.integers(1, 8))
    def let_a_call_fail(self, ahead: int) -> None:
        self.files.clear_faults()  # one at a time: two in a row may leave the outcome unknown
        self.files.fail(self.files.calls + ahead, errno.EIO)

    @invariant()
    def holds_what_it_should(self) -> None:
        found = {
            entry.name: {
                "incarnation": entry.incarnation,
                "ttl": entry.options.policy.ttl,
                "max_items": entry.options.max_items,
                "dead_queue": entry.options.dead_queue,
                "active": entry.active,
                "ever": entry.next_partition,
                "begun": entry.adoptions,
                "adopting": entry.adopting,
                "adopted": entry.adopted,
                "holder": entry.consumer_right_holder,
            }
            for entry in self.catalog.entries
        }
        assert found == self.model
        assert set(self.catalog.deleted) == self.deleted
        for entry in self.catalog.entries:
            counts = Counter(entry.map.owners)
            assert sorted(counts) == entry.active
            assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("backend", ["memory", "files"])
def test_a_catalog_behaves_like_a_dict_of_queues(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_catalog, "SEGMENT_BYTES", 600)
    machine = type("Machine", (CatalogStateMachine,), {"backend": backend})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))
