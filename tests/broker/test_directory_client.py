"""The home of a process that reads the files itself: queries and writes need no owner, changes go to the owner."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import penstock
from penstock.broker.directory_client import DirectoryClient
from penstock.broker.shared import SharedBroker
from penstock.errors import BrokerClosed, BrokerLocked
from penstock.logs.columns import encode
from penstock.logs.store import write_name
from penstock.operations import (
    DescribeOwner,
    FindImports,
    FindPublished,
    FindQueue,
    FindWrite,
    MoveCursor,
    Operation,
    PublishWrite,
    ReadMetrics,
    ReadStats,
    TakeGrant,
)
from penstock.rules.records import Produced
from penstock.wire import address
from penstock.words.clock import MILLISECOND, SECOND, Moment
from penstock.words.sources import WriteContent
from tests.broker.broker_under_test import batch_of, wait_until
from tests.broker.owner_process import BrokerProcess
from tests.conformance.homes import OPTIONS

SOON = 100 * MILLISECOND


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A directory with a queue of five items that no process has open."""
    path = str(tmp_path / "data")
    with penstock.open(path) as broker:
        broker.create_queue("orders").produce_many([b"%d" % number for number in range(5)])
    return path


@pytest.fixture
def client(directory: str) -> Iterator[DirectoryClient]:
    with closing(DirectoryClient(directory, SOON)) as found:
        yield found


def publish(client: DirectoryClient, queue: int, *texts: str, checksum: int | None = None) -> bool:
    write = write_name(1_000)
    client.staging().begin_write(write)
    writer = client.staging().part_writer(write, "part-0", queue)
    writer.add(encode([Produced(0, batch_of(*texts))], Moment(0, 0)))
    return client.call(PublishWrite(queue=queue, write=write, source="job", number=1, parts=[writer.finish()], checksum=checksum))


def move(queue: int, to: int) -> MoveCursor:
    return MoveCursor(queue=queue, name="lake", to={0: to})


# -- without an owner ------------------------------------------------------------------------------------


def test_queries_and_writes_need_no_owner(directory: str, client: DirectoryClient) -> None:
    queue = client.call(FindQueue(name="orders")).incarnation
    assert client.call(ReadStats(queue=queue)).ready == 5 and not client.has_owner()
    assert publish(client, queue, "a", "b")
    assert client.call(FindWrite(queue=queue, source="job", number=1)) == "unattended"
    with BrokerProcess(directory):
        wait_until(lambda: client.call(FindWrite(queue=queue, source="job", number=1)) == "adopted")
        wait_until(lambda: client.call(ReadStats(queue=queue)).ready == 7)


def test_a_change_without_an_owner_says_what_to_do(directory: str, client: DirectoryClient) -> None:
    queue = client.call(FindQueue(name="orders")).incarnation
    changes: list[Operation[Any]] = [move(queue, 1), ReadMetrics()]
    for change in changes:
        with pytest.raises(BrokerClosed, match=rf"no process has {directory} open, .*; keep it open in some program while this runs"):
            client.call(change)
    assert client.call(DescribeOwner()).pid == 0, "it has not become the owner"
    with BrokerProcess(directory):
        client.call(move(queue, 1))


def test_a_directory_that_is_not_shared_is_locked(directory: str, client: DirectoryClient) -> None:
    with penstock.open(directory, exclusive=True), pytest.raises(BrokerLocked, match="shares it with no other process"):
        client.call(ReadMetrics())


def test_a_closed_client_refuses_everything(client: DirectoryClient) -> None:
    client.close()
    asked: list[Operation[Any]] = [FindQueue(name="orders"), ReadMetrics()]
    for operation in asked:
        with pytest.raises(BrokerClosed):
            client.call(operation)


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (partial(FindWrite, source="job", number=1), "adopted"),
        (partial(FindPublished, source="job"), (1, [WriteContent(1, 1, 77)])),
        (partial(FindImports, prefix="j"), {"job": 1}),
    ],
)
def test_a_write_that_is_adopted_while_it_is_looked_for_is_found(
    directory: str, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Operation[Any]], found: object
) -> None:
    """The catalog is read, then the write is adopted, then the inbox is read."""
    with closing(DirectoryClient(directory)) as client:
        queue = client.call(FindQueue(name="orders")).incarnation
        publish(client, queue, "a", checksum=77)
        snapshot = client._published._snapshot
        assert snapshot is not None
        refresh = snapshot.refresh

        def then_adopted() -> None:
            refresh()
            with penstock.open(directory):
                monkeypatch.undo()

        monkeypatch.setattr(snapshot, "refresh", then_adopted)
        assert client.call(ask(queue=queue)) == found


@pytest.mark.parametrize("checksum", [77, 78, None])
def test_a_write_that_is_dropped_although_it_holds_something_else_is_reported(
    directory: str, client: DirectoryClient, caplog: pytest.LogCaptureFixture, checksum: int | None
) -> None:
    queue = client.call(FindQueue(name="orders")).incarnation
    for given in (77, checksum):
        publish(client, queue, "a", checksum=given)
        with penstock.open(directory):
            wait_until(lambda: not [*Path(directory, "inbox").glob("*")])
    assert client.call(ReadStats(queue=queue)).ready == 5 + 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    if checksum == 78:
        assert len(said) == 1 and "number 1 of 'job' was adopted with 1 other items; write again what is missing" in said[0]
    else:
        assert said == []


# -- with an owner ---------------------------------------------------------------------------------------


def test_a_broker_that_this_process_has_open_is_used(directory: str, client: DirectoryClient) -> None:
    with penstock.open(directory, durability="os") as broker:
        queue = broker.queue("orders")
        client.call(move(queue.incarnation, 3))
        owner = queue.home.call(DescribeOwner())
        assert queue.cursors() == {"lake": {0: 3}} and (owner.pid, owner.clients) == (os.getpid(), [])


def test_the_owner_is_killed_and_another_process_takes_over(directory: str) -> None:
    with closing(DirectoryClient(directory)) as client, BrokerProcess(directory) as first, BrokerProcess(directory) as second:
        queue = client.call(FindQueue(name="orders")).incarnation
        client.call(move(queue, 1))
        grant: Any = {"queue": queue, "stream": "s", "run": "r", "per_key": 1, "timeout": 30 * SECOND}
        assert client.call(TakeGrant(done=0, want=3, **grant)).items == 3
        first.kill()
        taken = client.call(TakeGrant(done=1, want=3, **grant))
        assert (taken.grant, taken.items) == (2, 2)
        assert client.call(DescribeOwner()).pid == second.pid
        second.kill()
        assert client.call(ReadStats(queue=queue)).leased == 2, "queries go on"
        assert client.call(DescribeOwner()).pid == 0, "a client never takes over"
        with BrokerProcess(directory):
            assert client.call(TakeGrant(done=2, want=3, **grant)).items == 0
            wait_until(lambda: client.call(ReadStats(queue=queue)).completed == 5)


def test_an_owner_that_has_not_said_yet_that_it_shares_is_waited_for(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on, opened = Event(), Event(), []
    listen = address.listen

    def slow_listen(path: str) -> Any:
        reached.set()
        go_on.wait(20)
        return listen(path)

    monkeypatch.setattr(address, "listen", slow_listen)
    opening = Thread(target=lambda: opened.append(SharedBroker(directory, own=True, wait=0, **OPTIONS)))
    opening.start()
    assert reached.wait(20)
    with closing(DirectoryClient(directory)) as client:
        asking = Thread(target=lambda: client.call(ReadMetrics()))
        asking.start()
        asking.join(0.2)
        assert asking.is_alive()
        go_on.set()
        opening.join(20)
        asking.join(20)
        assert not asking.is_alive() and client._owner is not None
    opened[0].close()
