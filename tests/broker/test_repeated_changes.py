"""Administrative calls of a client's session that are repeated after a lost answer."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest

from penstock.operations import (
    ClearItems,
    CreateQueue,
    DeleteQueue,
    EnsureQueue,
    ListCursors,
    MoveCursor,
    Operation,
    PauseQueue,
    RedriveItems,
    ReleaseCursor,
    ReleaseKey,
    ResizeQueue,
    SeekItems,
    SetReadOnly,
    UpdateQueue,
)
from penstock.reports import QueueDescription
from penstock.rules import catalog, routing
from penstock.rules.commands import Call
from penstock.testing import SimulatedFiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import MINUTE, SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, QueueExists, QueueNotFound, StorageFailed
from tests.broker.broker_under_test import BrokerUnderTest, QueueUnderTest, keys_at
from tests.broker.crashes import crash_at_each_call, disk_after
from tests.broker.storages import PartlyFailingFiles, SimulatedStorage

SESSION = bytes(range(16))
FIRST = Call(SESSION, 3)
AGAIN = Call(SESSION, 3, again=True, age=1 * SECOND)
KEYS = [f"key-{number}" for number in range(8)]


class Change(NamedTuple):
    """A change of a queue's items."""

    prepare: Callable[[QueueUnderTest], object]
    operation: Callable[[QueueUnderTest], Operation[Any]]
    undo: Callable[[QueueUnderTest], object]
    """After it, a second execution of the operation would show."""
    shows: Callable[[QueueUnderTest], object]


def add(queue: QueueUnderTest) -> None:
    queue.produce(*KEYS, keys=KEYS)


def counts(queue: QueueUnderTest) -> dict[str, int]:
    queue.owner.turn()
    return queue.counts()


def cursors(queue: QueueUnderTest) -> dict[str, dict[int, int]]:
    return queue.call(ListCursors())


def paused(queue: QueueUnderTest) -> list[bool]:
    return [handle.state.paused_lease for handle in queue.loop.engine.usable()]


def bury_all(queue: QueueUnderTest) -> None:
    while held := queue.lease(100):
        held.bury()


def complete_all(queue: QueueUnderTest) -> None:
    queue.drain()


def put_cursor(queue: QueueUnderTest) -> None:
    queue.call(MoveCursor(name="c", to=dict.fromkeys(range(3), 1)))


def chosen(queue: QueueUnderTest) -> dict[int, list[int]]:
    return {number: [*range(4)] for number in range(3)}


def other(queue: QueueUnderTest) -> int:
    return queue.owner.find("other").incarnation


def add_and(then: Callable[[QueueUnderTest], object]) -> Callable[[QueueUnderTest], object]:
    """Add items, then do this."""

    def both(queue: QueueUnderTest) -> None:
        add(queue)
        then(queue)

    return both


CHANGES = {
    "pause": Change(add, lambda q: PauseQueue(lease=True), lambda q: q.pause(lease=False), paused),
    "clear": Change(add, lambda q: ClearItems(states=["ready"]), add, counts),
    "seek": Change(add_and(complete_all), lambda q: SeekItems(start=0), complete_all, counts),
    "redrive all": Change(add_and(bury_all), lambda q: RedriveItems(to=q.incarnation), bury_all, counts),
    "redrive some": Change(add_and(bury_all), lambda q: RedriveItems(to=q.incarnation, items=chosen(q)), bury_all, counts),
    "redrive to another queue": Change(add, lambda q: RedriveItems(to=other(q), items=chosen(q)), add, counts),
    "release key": Change(
        lambda q: (q.produce("a", "b", key="k"), q.lease(1).bury()),
        lambda q: ReleaseKey(key=routing.key_id(b"k")),
        lambda q: (q.lease(1).bury(), q.produce("c", key="k")),
        lambda q: bool(q.lease(1)),
    ),
    "move cursor": Change(add, lambda q: MoveCursor(name="c", to={0: 2, 1: 2, 2: 2}), put_cursor, cursors),
    "release cursor": Change(add_and(put_cursor), lambda q: ReleaseCursor(name="c"), put_cursor, cursors),
}


def prepared(broker: BrokerUnderTest, change: Change) -> QueueUnderTest:
    broker.create("other")
    queue = broker.create(partitions=3, on_bury="park")
    change.prepare(queue)
    broker.turn()
    return queue


def ask(queue: QueueUnderTest, change: Change, call: Call) -> Any:
    operation = change.operation(queue)
    operation.call = call
    return queue.call(operation)


@pytest.mark.parametrize("restart", [False, True], ids=["", "killed"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_repeated_change_does_nothing_and_gives_the_same_count(file_broker: BrokerUnderTest, name: str, restart: bool) -> None:
    change = CHANGES[name]
    queue = prepared(file_broker, change)
    first = ask(queue, change, FIRST)
    file_broker.turn()
    if restart:
        file_broker.kill()
        file_broker.turn()
    change.undo(queue)
    file_broker.turn()
    before = change.shows(queue)
    assert ask(queue, change, AGAIN) == first
    assert first is None or first > 0
    assert change.shows(queue) == before


@pytest.mark.parametrize("name", ["clear", "seek", "redrive to another queue", "pause"])
def test_a_change_cut_off_anywhere_is_finished_by_its_repetition(name: str) -> None:
    change = CHANGES[name]
    start = _prepared_disk(name)
    totals = set()
    for broker, done in crash_at_each_call(start, lambda broker: _ignore(ask(broker.find(), change, FIRST)), step=2):
        queue = broker.find()
        totals.add(ask(queue, change, AGAIN))
        broker.turn()
        after = change.shows(queue)
        totals.add(ask(queue, change, AGAIN))
        assert change.shows(queue) == after
        assert done in (True, False)
    assert totals == {None} or totals == {8}, "the count is that of the whole, whoever did which part"


@cache
def _prepared_disk(name: str) -> tuple[SimulatedFiles, MicrosecondClock]:
    return disk_after(lambda broker: _ignore(prepared(broker, CHANGES[name])))


def _ignore(found: object) -> None:
    """A piece of work has no result."""


def test_releasing_an_unknown_cursor_is_an_error_also_in_a_call(broker: BrokerUnderTest) -> None:
    queue = broker.create(partitions=2)
    for call in (FIRST, AGAIN):
        with pytest.raises(InvalidRequest, match="there is no cursor"):
            queue.call(ReleaseCursor(name="c", call=call))


def test_a_change_repeated_while_a_partition_fails_is_of_unknown_outcome() -> None:
    files = PartlyFailingFiles()
    broker = BrokerUnderTest(SimulatedStorage(files))
    queue = broker.create(partitions=3)
    add(queue)
    assert queue.call(ClearItems(states=["ready"], call=FIRST)) == 8
    files.break_partition(2)
    with pytest.raises((StorageFailed, OutcomeUnknown)):
        queue.produce("lost", key=keys_at(queue, 2)[0])
    with pytest.raises(OutcomeUnknown, match="its repetition could not be run"):
        queue.call(ClearItems(states=["ready"], call=AGAIN))
    with pytest.raises(StorageFailed):
        queue.call(ClearItems(states=["ready"], call=Call(SESSION, 4)))
    files.failing_paths.clear()
    broker.advance_in_steps(7)
    assert queue.call(ClearItems(states=["ready"], call=AGAIN)) == 8
    broker.embedded.close()


# -- the catalog ---------------------------------------------------------------------------------------


def test_a_repeated_create_gives_the_queue_that_it_made(file_broker: BrokerUnderTest) -> None:
    def create(call: Call) -> QueueDescription:
        return file_broker.embedded.call(CreateQueue(name="q", partitions=2, call=call))

    first = create(FIRST)
    assert create(AGAIN) == first
    file_broker.kill()
    assert create(AGAIN) == first
    with pytest.raises(QueueExists):
        create(Call(SESSION, 4))
    with pytest.raises(QueueExists):
        create(Call(SESSION, 4, again=True, age=5))
    file_broker.delete()
    with pytest.raises(QueueNotFound, match="its queue was deleted since"):
        create(AGAIN)


def test_a_repeated_update_changes_nothing(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create()
    queue.call(UpdateQueue(changes={"max_attempts": 3}, call=FIRST))
    queue.update(max_attempts=5)
    file_broker.restart()
    assert queue.call(UpdateQueue(changes={"max_attempts": 3}, call=AGAIN)).options.policy.max_attempts == 5
    assert queue.info.options.policy.max_attempts == 5


@pytest.mark.parametrize("options", [{"max_attempts": 3}, {}], ids=["options and width", "width"])
def test_a_repeated_ensure_changes_nothing(file_broker: BrokerUnderTest, options: dict[str, object]) -> None:
    queue = file_broker.create(partitions=2)

    def ensure(call: Call) -> QueueDescription:
        return file_broker.embedded.call(EnsureQueue(name=queue.info.name, options=options, partitions=4, resize=True, call=call))

    assert ensure(FIRST).partitions == 4
    queue.resize(3)
    queue.update(max_attempts=5)
    file_broker.restart()
    again = ensure(AGAIN)
    assert (again.partitions, again.options.policy.max_attempts) == (3, 5)
    assert ensure(Call(SESSION, 4)).partitions == 4, "another call is another matter"


def test_a_repeated_resize_changes_nothing(file_broker: BrokerUnderTest) -> None:
    queue = file_broker.create(partitions=2)
    assert queue.call(ResizeQueue(partitions=4, call=FIRST)).partitions == 4
    queue.resize(3)
    assert queue.call(ResizeQueue(partitions=4, call=AGAIN)).partitions == 3
    queue.call(SetReadOnly(partition=0, call=Call(SESSION, 4)))
    queue.call(SetReadOnly(partition=0, read_only=False))
    file_broker.kill()
    assert queue.call(SetReadOnly(partition=0, call=Call(SESSION, 4, again=True, age=5))).read_only == []


def test_a_repeated_delete_deletes_no_new_queue_of_that_name(file_broker: BrokerUnderTest) -> None:
    old = file_broker.create()

    def delete(call: Call) -> None:
        file_broker.embedded.call(DeleteQueue(queue=old.incarnation, call=call))

    delete(FIRST)
    file_broker.create()
    file_broker.kill()
    delete(AGAIN)
    assert file_broker.find().incarnation != old.incarnation
    with pytest.raises(QueueNotFound):
        delete(Call(SESSION, 4, again=True, age=5))


def test_the_calls_of_the_catalog_are_forgotten(file_broker: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_CALLS", 2)
    file_broker.restart()
    embedded = file_broker.embedded
    for number in range(4):
        embedded.call(CreateQueue(name=f"q{number}", call=Call(b"%016d" % number, 1)))
        file_broker.advance(2)
    repeated = CreateQueue(name="q1", call=Call(b"%016d" % 1, 1, again=True, age=6 * SECOND))
    with pytest.raises(OutcomeUnknown, match="repeated too late"):
        embedded.call(repeated)
    assert embedded.call(CreateQueue(name="q3", call=Call(b"%016d" % 3, 1, again=True, age=2 * SECOND))).name == "q3"
    with pytest.raises(OutcomeUnknown):
        embedded.call(CreateQueue(name="new", call=Call(SESSION, 1, again=True, age=15 * MINUTE)))
    file_broker.restart()
    with pytest.raises(OutcomeUnknown, match="repeated too late"):
        file_broker.embedded.call(repeated)


@pytest.mark.parametrize("verb", ["create", "resize", "delete"])
def test_a_change_of_the_catalog_cut_off_anywhere_is_finished_by_its_repetition(verb: str) -> None:
    def do(broker: BrokerUnderTest, call: Call) -> None:
        if verb == "create":
            broker.embedded.call(CreateQueue(name="new", partitions=2, call=call))
        elif verb == "resize":
            broker.find().call(ResizeQueue(partitions=3, call=call))
        else:
            broker.embedded.call(DeleteQueue(queue=_incarnation, call=call))

    def work(broker: BrokerUnderTest) -> None:
        broker.create(partitions=2)

    start = disk_after(work)
    _incarnation = BrokerUnderTest(SimulatedStorage(start[0].copy())).find().incarnation
    for broker, _ in crash_at_each_call(start, lambda broker: do(broker, FIRST), step=3):
        do(broker, AGAIN)
        do(broker, AGAIN)
        names = {entry.name: len(entry.active) for entry in broker.embedded.catalog.entries}
        assert names == {"create": {"q": 2, "new": 2}, "resize": {"q": 3}, "delete": {}}[verb]
