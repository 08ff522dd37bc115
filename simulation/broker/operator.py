"""The operator of a simulated broker: creates, changes, resizes, clears and inspects queues.

Owns: `Operator` (each operation runs at once, and the model gets its answer before other answers are checked) and
`Inspector` (the answers of explain, list, read and cursors must agree with the inventory).
"""

from collections.abc import Callable
from typing import Any

from penstock.api.redrive import REDRIVABLE
from penstock.operations import (
    CancelItems,
    ClearItems,
    CompactQueue,
    CreateQueue,
    DeleteQueue,
    ExplainItem,
    FindOffsets,
    ListCursors,
    ListHeldKeys,
    ListItems,
    ListQueues,
    MoveCursor,
    Operation,
    Page,
    PauseQueue,
    ReadItems,
    RedriveItems,
    ReleaseCursor,
    ReleaseKey,
    RescheduleItems,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    UpdateQueue,
)
from penstock.reports import ItemExplanation, ListedItemData, QueueDescription
from penstock.rules.item_states import ItemState
from penstock.rules.routing import key_id
from penstock.words import ids
from penstock.words.clock import MINUTE, SECOND
from simulation.broker.harness import BrokerHarness
from simulation.broker.inventory import ItemCopy
from simulation.broker.items import CopyPlace, TrackedItem
from simulation.broker.random_input import RandomInput

MOST_PARTITIONS = 4
MOVED = "moved"

MOST_TURNS = 1_000
"""More than the pending requests of a queue need."""


class Operator:
    """Creates, changes, resizes and clears queues."""

    def __init__(self, harness: BrokerHarness, chance: RandomInput) -> None:
        self._harness = harness
        self._chance = chance
        self._former: dict[int, int] = {}
        """Queue → its former number of partitions."""

    @property
    def _broker(self) -> Any:
        return self._harness.broker

    def begin(self) -> None:
        self._create("dead", {})
        self._create("work", {"dead_queue": self._chance.pick(["", "dead", "dead"])})
        if self._chance.happens(0.5):
            self._create("more", {"dead_queue": self._chance.pick(["", "dead"])})

    def _create(self, name: str, extra: dict[str, object]) -> None:
        options = {**self._chance.options(), **self._chance.habitual(), **extra}
        partitions = self._chance.pick([1, 1, 2, 3])
        info = self._harness.operate(
            f"create {name}", lambda: self._broker.call(CreateQueue(name=name, options=options, partitions=partitions))
        )
        if isinstance(info, QueueDescription):
            self._harness.model.created(info)

    def _queue(self) -> QueueDescription:
        model = self._harness.model
        return model.queues[self._chance.pick(sorted(model.queues))]

    # -- width and options -----------------------------------------------------------------------------

    def resize(self) -> None:
        queue = self._queue()
        partitions = self._chance.rng.randint(1, MOST_PARTITIONS)
        if queue.incarnation in self._former and self._chance.happens(0.4):  # back to the former number
            partitions = self._former[queue.incarnation]
        self.resize_to(queue.incarnation, partitions)

    def resize_to(self, incarnation: int, partitions: int) -> None:
        queue = self._harness.model.queues.get(incarnation)
        if queue is None:
            return
        self._former[queue.incarnation] = len(queue.active)
        self.change(
            f"resize {queue.name} to {partitions}", queue, lambda: self._broker.call(ResizeQueue(queue=incarnation, partitions=partitions))
        )

    def change_read_only(self) -> None:
        """Set a partition read-only, or writable again."""
        queue = self._queue()
        number, read_only = self._chance.pick([*[(n, True) for n in queue.active], *[(n, False) for n in queue.read_only]])
        self.set_read_only(queue.incarnation, number, read_only)

    def set_read_only(self, incarnation: int, number: int, read_only: bool) -> None:
        queue = self._harness.model.queues.get(incarnation)
        if queue is not None:
            operation = SetReadOnly(queue=incarnation, partition=number, read_only=read_only)
            self.change(f"read-only {queue.name} {number} {read_only}", queue, lambda: self._broker.call(operation))

    def update(self) -> None:
        queue = self._queue()
        other = self._chance.options()
        changes: dict[str, object] = {name: other[name] for name in ("max_attempts", "on_bury") if self._chance.happens(0.5)}
        if queue.name != "dead" and self._chance.happens(0.5):
            changes["dead_queue"] = self._chance.pick(["", "dead"])
        self.change(
            f"update {queue.name} {changes}", queue, lambda: self._broker.call(UpdateQueue(queue=queue.incarnation, changes=changes))
        )

    def set_options(self, queue: int, changes: dict[str, object]) -> None:
        info = self._harness.model.queues[queue]
        self.change(f"update {changes}", info, lambda: self._broker.call(UpdateQueue(queue=queue, changes=changes)))

    def change(self, what: str, queue: QueueDescription, action: Any) -> None:
        def then(answer: Any) -> None:
            self._harness.model.changed(queue.incarnation, answer)

        self._harness.model.unsure_queues.add(queue.incarnation)
        self._harness.operate(what, action, then, leads=queue.incarnation)

    def look_up(self, queue: int) -> None:
        """Look up a queue after an interrupted change, and tell the model."""
        model = self._harness.model
        found = {info.incarnation: info for info in self._broker.call(ListQueues())}
        if queue in model.unsure_queues and queue in found:
            model.queues[queue] = found[queue]

    def recreate(self) -> None:
        """Delete a queue and create another one of that name."""
        queue = self._queue()
        if self._chance.happens(0.4):
            self._harness.run_until_idle()
        else:
            self.redrive_some(to=queue.incarnation)  # with transfers to it under way
        self.change(f"delete {queue.name}", queue, lambda: self._broker.call(DeleteQueue(queue=queue.incarnation, wait=0)))
        if queue.name not in [info.name for info in self._harness.model.queues.values()]:
            self._create(queue.name, {})

    # -- items -----------------------------------------------------------------------------------------

    def ask(self, operation: Operation[Any]) -> Any:
        """Run an operation; returns its answer, or the error if it was refused."""
        leads = None if isinstance(operation, ExplainItem) else operation.queue
        return self._harness.operate(f"{operation}", lambda: self._broker.call(operation), None, leads)

    def redrive_some(self, to: int = 0) -> None:
        """Redrive some items of one queue to another."""
        self.prepare_send(self._queue().incarnation, to)()

    def prepare_send(self, queue: int, to: int = 0) -> Callable[[], None]:
        """Choose some items of a queue; returns an action that redrives them to another queue."""
        to = to or self._queue().incarnation
        if queue == to:
            return lambda: None
        self.run_pending(queue)  # else an item could be buried and redriven in one turn, unseen by the inventory
        listed = self.ask(ListItems(queue=queue, states=REDRIVABLE, limit=20))
        chosen = [item for item in listed if self._chance.happens(0.4)] if isinstance(listed, list) else []
        return lambda: self.send(queue, chosen, to)

    def send(self, queue: int, items: list[ListedItemData], to: int) -> None:
        """Redrive items to another queue."""
        chosen: dict[int, list[int]] = {}
        for item in items:
            chosen.setdefault(item.partition, []).append(item.offset)
        if chosen:
            model = self._harness.model
            model.order.redrive_sent([model.items[item.batch.payloads[item.index]] for item in items], queue, to)
            self.ask(RedriveItems(queue=queue, items=chosen, to=to))

    def redrive(self) -> None:
        """Make the buried items of a queue ready again."""
        queue = self._queue().incarnation
        self.run_pending(queue)  # else items could be buried and redriven in one turn, unseen by the inventory
        self.ask(RedriveItems(queue=queue, to=queue))

    def release(self) -> None:
        model = self._harness.model
        parked = sorted(place for place, holders in model.order.parked.items() if holders and place[0] in model.queues)
        if parked:
            queue, key = self._chance.pick(parked)
            self.run_pending(queue)  # else a key parked and released in one turn would seem to be parked
            self.release_key(queue, key)

    def release_key(self, queue: int, key: bytes) -> None:
        """Release a parked key."""
        model = self._harness.model
        model.order.release(queue, key)
        answer = self.ask(ReleaseKey(queue=queue, key=key_id(key)))
        if isinstance(answer, int) and model.inventory.all_healthy:
            model.order.released(queue, [key])

    def compact(self) -> None:
        """Compact: drop everything that retention allows."""
        self.ask(CompactQueue(queue=self._queue().incarnation))

    def pause(self) -> None:
        lease, produce = self._chance.pick([(True, None), (None, True), (True, True)])
        self.ask(PauseQueue(queue=self._queue().incarnation, lease=lease, produce=produce))

    def resume(self) -> None:
        self.ask(PauseQueue(queue=self._queue().incarnation, lease=False, produce=False))

    def clear(self) -> None:
        model = self._harness.model
        queue = self._queue()
        partition = self._chance.pick([None, None, *queue.active])
        chosen = {name: self._chance.happens(0.4) for name in ("ready", "scheduled", "leased", "buried")}
        parked = sorted({place[0] for place, holders in model.order.parked.items() if holders and place[0] in model.queues})
        if parked and self._chance.happens(0.5):
            queue, partition = model.queues[self._chance.pick(parked)], None
            chosen = {name: name == "buried" for name in chosen}
        self.run_pending(queue.incarnation)
        keys = model.clear_sent(queue.incarnation, partition, chosen)
        states: list[Any] = [name for name, is_chosen in chosen.items() if is_chosen]
        answer = self.ask(ClearItems(queue=queue.incarnation, states=states, partition=partition))
        if isinstance(answer, int) and model.inventory.all_healthy:
            model.check_cleared(queue.incarnation, partition, chosen)
            model.order.released(queue.incarnation, keys)
            self._check_freed(queue.incarnation, keys)
        model.operation_done(queue.incarnation)

    def _check_freed(self, queue: int, keys: list[bytes]) -> None:
        """Check that keys parked for cleared items are not parked any more."""
        held = self.ask(ListHeldKeys(queue=queue, limit=1_000)) if keys else []
        for one in held if isinstance(held, list) else ():
            wrong = one.key in keys and one.why == "parked" and not self._harness.model.order.is_parked(queue, one.key)
            assert not wrong, f"the items that parked key {one.key!r} were cleared, and it is still parked: {one}"

    def _some_waiting(self) -> tuple[int, list[ListedItemData], list[TrackedItem]]:
        """A queue, and some of its items that wait."""
        queue = self._queue().incarnation
        self.run_pending(queue)
        listed = self.ask(ListItems(queue=queue, states=["ready", "scheduled"], limit=20))
        chosen = [item for item in listed if self._chance.happens(0.3)] if isinstance(listed, list) else []
        return queue, chosen, [self._harness.model.items[item.batch.payloads[item.index]] for item in chosen]

    def cancel(self) -> None:
        queue, chosen, items = self._some_waiting()
        if chosen:
            model = self._harness.model
            model.cancel_sent(queue, items)
            answer = self.ask(CancelItems(queue=queue, items=[(item.partition, item.offset) for item in chosen]))
            if isinstance(answer, list) and model.inventory.all_healthy:
                model.check_changes(items, answer, ())
            model.operation_done(queue)

    def reschedule(self) -> None:
        queue, chosen, items = self._some_waiting()
        if chosen:
            model, positions = self._harness.model, [(item.partition, item.offset) for item in chosen]
            delay = self._chance.pick([0, 0, 2 * SECOND, 1 * MINUTE])
            by_time = bool(delay) and self._chance.happens(0.5)
            model.reschedule_sent(items)
            at, wait = (model.wall + delay, 0) if by_time else (0, delay)
            answer = self.ask(RescheduleItems(queue=queue, items=positions, at=at, delay=wait))
            if isinstance(answer, list) and model.inventory.all_healthy and delay:
                model.check_changes(items, answer, (ItemState.SCHEDULED, ItemState.BURIED))

    def seek(self) -> None:
        queue = self._queue()
        self.run_pending(queue.incarnation)
        model = self._harness.model
        ends = self.ask(FindOffsets(queue=queue.incarnation, at="newest"))
        if not isinstance(ends, dict):
            return
        offsets = {number: self._chance.rng.randint(0, end) for number, end in ends.items()}
        model.seeking.add(queue.incarnation)
        before = model.sought
        answer = self.ask(SeekItems(queue=queue.incarnation, start=offsets))
        if isinstance(answer, int) and model.inventory.all_healthy:
            assert answer == model.sought - before, f"{answer} items were reported as sought, and {model.sought - before} were"
        model.operation_done(queue.incarnation)

    def run_pending(self, incarnation: int) -> None:
        """Run a queue's pending requests first, also those that wait for its disks."""
        self._harness.let_disks_answer(incarnation)
        for loop in self._broker.loops():
            if loop.engine.incarnation == incarnation:
                turns = 0
                while not turns or loop in self._harness.loops_due():
                    self._harness.turn(loop)
                    turns += 1
                    assert turns < MOST_TURNS, f"queue {loop.engine.name!r} wants one turn after the other, for ever"

    def run_all_pending(self) -> None:
        """Run turns until no queue has one due: one queue's turn can give another one, that has run its own, a request.

        A transfer that has arrived is confirmed to its sender. That can make room there for a waiting produce, which is
        stored in the turn with the confirmation, after the administrative operations of that turn.
        """
        rounds = 0
        while due := self._harness.loops_due():
            for loop in due:
                self.run_pending(loop.engine.incarnation)
            rounds += 1
            assert rounds < MOST_TURNS, f"{due} give each other requests for ever"


class Inspector:
    """Queries the broker and compares the answers with the inventory."""

    def __init__(self, harness: BrokerHarness, chance: RandomInput, operator: Operator) -> None:
        self._harness = harness
        self._chance = chance
        self._operator = operator

    def inspect(self) -> None:
        """Run a random query."""
        queue = self._chance.pick(sorted(self._harness.model.queues))
        for other in sorted(self._harness.model.queues):  # so that nothing changes between the answer and the look
            self._operator.run_pending(other)
        self._operator.run_all_pending()
        self._chance.pick([self._explain, self._list, self._read, self._cursor])(queue)

    def _explain(self, queue: int) -> None:
        """Explain an item by one of the ids that it ever had."""
        model = self._harness.model
        known = [
            (item, place)
            for item in model.items.values()
            for place in item.places
            if place.incarnation == queue and not item.must_not_exist
        ]
        if not known:
            return
        item, place = self._chance.pick(known)
        said = self._operator.ask(ExplainItem(queue=queue, partition=place.partition, offset=place.offset))
        if isinstance(said, ItemExplanation) and model.inventory.all_healthy and said.state != MOVED:
            self._compare(item, place, said)

    def _compare(self, item: TrackedItem, place: CopyPlace, said: ItemExplanation) -> None:
        """Check that an explanation is of a copy of this item and gives its state."""
        model = self._harness.model
        name = model.queues.get(place.incarnation)
        where = CopyPlace(next((q for q, info in model.queues.items() if info.name == said.queue), 0), *ids.parse_id(said.id))
        assert model.inventory.at(where) is item, f"{item} was explained as {said}, where {model.inventory.at(where)} is ({name})"
        copies: dict[CopyPlace, ItemCopy] = {copy.place: copy for copy in model.inventory.of(item).copies()}
        assert copies[where].state.value == said.state, f"{item} is {model.inventory.of(item)} and was explained as {said}"

    def _list(self, queue: int) -> None:
        """Check that a list has every item in the chosen states once."""
        model = self._harness.model
        states = [state for state in ItemState if self._chance.happens(0.5)] or [ItemState.READY]
        dropped = self._dropped(queue)
        listed = self._operator.ask(ListItems(queue=queue, states=[state.value for state in states], limit=1_000))
        if not isinstance(listed, list) or not model.inventory.all_healthy:
            return
        taken = self._dropped(queue) - dropped  # dropped by retention after the commit, perhaps after they were listed
        found = sorted(place for place in ((item.partition, item.offset) for item in listed) if place not in taken)
        left = {place[1:] for place in model.inventory.moved_from(queue)}  # they are listed at their new places
        expected = [
            (partition, offset) for (incarnation, partition), seen in model.inventory.partitions.items() if incarnation == queue
            for offset, one in enumerate(seen.states) if one in states and offset not in seen.dropped and (partition, offset) not in left
        ]  # fmt: skip
        assert found == sorted(expected), f"{found} were listed, not {sorted(expected)}"

    def _dropped(self, queue: int) -> set[tuple[int, int]]:
        """The items that retention dropped, as of the last look."""
        partitions = self._harness.model.inventory.partitions.items()
        return {(number, offset) for (incarnation, number), seen in partitions if incarnation == queue for offset in seen.dropped}

    def _read(self, queue: int) -> None:
        """Check that a read has every retained item of the queue, and items moved within the queue once."""
        model = self._harness.model
        answer = self._operator.ask(ReadItems(queue=queue, start={}, limit=10_000))
        if not isinstance(answer, Page) or not model.inventory.all_healthy:
            return
        read = [model.items[payload] for _, items in answer.items for payload in items.batch.payloads]
        for item in model.items.values():
            here = [place for place in item.places if place.incarnation == queue and model.inventory.at(place) is item]
            kept = [place for place in here if place.offset not in model.inventory.partitions[place[:2]].dropped]
            assert bool(kept) == (item in read) or len(here) > len(kept), f"{item} was {'not ' * (item not in read)}read, and is at {kept}"
            assert read.count(item) <= max(1, len(kept)), f"{item} was read {read.count(item)} times"

    def _cursor(self, queue: int) -> None:
        """Check that a cursor is where it was moved."""
        ends = self._operator.ask(FindOffsets(queue=queue, at="newest"))
        if not isinstance(ends, dict):
            return
        if self._chance.happens(0.3):
            self._operator.ask(ReleaseCursor(queue=queue, name="audit"))
            return
        offsets = {number: self._chance.rng.randint(0, end) for number, end in ends.items()}
        moved = self._operator.ask(MoveCursor(queue=queue, name="audit", to=offsets))
        found = self._operator.ask(ListCursors(queue=queue))
        if moved is None and isinstance(found, dict) and self._harness.model.inventory.all_healthy:
            assert found.get("audit", {}) == offsets, f"the cursor was moved to {offsets} and is at {found}"
