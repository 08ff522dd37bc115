"""Many processes, one directory: one owns it, the others work through it, and one of them takes over when it ends."""

import asyncio
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.broker import shared
from penstock.broker.shared import SharedHome
from penstock.errors import (
    AccessDenied,
    BrokerClosed,
    BrokerLocked,
    InvalidRequest,
    OutcomeUnknown,
    QueueBusy,
    QueueExists,
    QueueFull,
    StorageFailed,
)
from penstock.wire import address
from penstock.words.clock import SECOND
from tests.broker.owner_process import BrokerProcess


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def owner(directory: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(directory) as process:
        process.ask("broker.create_queue('q', partitions=2, exist_ok=True) and None")
        yield process


def is_owner(broker: penstock.Broker) -> bool:
    home = broker._home
    assert isinstance(home, SharedHome)
    return home.broker.is_owner


def await_ownership(broker: penstock.Broker) -> None:
    for _ in range(2_000):
        if is_owner(broker):
            return
        threading.Event().wait(0.01)
    raise AssertionError("this process did not become the owner")


# -- using a directory that another process owns ---------------------------------------------------------


def test_a_second_process_uses_the_same_queues(owner: BrokerProcess, directory: Path) -> None:
    with penstock.open(directory) as broker:
        assert not is_owner(broker)
        queue = broker.queue("q")
        queue.produce({"order": 1}, key="a")
        assert owner.ask("[lease.item.value for lease in broker.queue('q').lease(10)]") == [{"order": 1}]
        owner.ask("broker.queue('q').produce('from the owner', request_id='r')")
        (lease,) = queue.lease(10, wait=5)
        assert lease.item.value == "from the owner"
        lease.retry(reason="once more")
        (again,) = queue.lease(10, wait=5)
        assert (again.item.attempts, again.item.id) == (2, lease.item.id)
        again.complete()
        with pytest.raises(QueueExists):
            broker.create_queue("q")
        assert [one.name for one in broker.queues()] == ["q"]


def test_a_full_queue_is_the_answer_at_the_deadline_of_a_client(owner: BrokerProcess, directory: Path) -> None:
    """The owner says so at the very deadline, and the client waits for that."""
    with penstock.open(directory) as broker:
        queue = broker.create_queue("full", max_items=1)
        queue.produce("first")
        with ThreadPoolExecutor(20) as threads:
            errors = [one.exception() for one in [threads.submit(queue.produce, "second", timeout=1.5) for _ in range(20)]]
        assert [type(error) for error in errors] == [QueueFull] * 20


def test_async_clients_share_a_connection(owner: BrokerProcess, directory: Path) -> None:
    async def run() -> list[str]:
        async with await penstock.aopen(directory) as broker:
            queue = await broker.queue("q")
            waiting = [asyncio.create_task(queue.lease(1, wait=20)) for _ in range(20)]
            cancelled = asyncio.create_task(queue.lease(1, wait=20))
            while not (await queue.stats()).waiting_consumers:
                await asyncio.sleep(0)
            cancelled.cancel()
            await queue.produce_many([str(number) for number in range(20)])
            found = [lease.item.value for batch in await asyncio.gather(*waiting) for lease in batch]
            return sorted(found, key=int)

    assert asyncio.run(run()) == [str(number) for number in range(20)]


def test_many_threads_of_a_client_share_a_connection(owner: BrokerProcess, directory: Path) -> None:
    with penstock.open(directory) as broker:
        queue = broker.queue("q")

        def work(number: int) -> None:
            for index in range(50):
                queue.produce(f"{number}-{index}", key=str(number))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert queue.stats().ready == 400


def test_a_worker_runs_in_a_client(owner: BrokerProcess, directory: Path) -> None:
    handled: list[str] = []
    with penstock.open(directory) as broker:
        queue = broker.queue("q")
        queue.produce_many([penstock.NewItem(str(number), key=str(number % 7)) for number in range(100)])

        def handle(item: penstock.Item) -> None:
            handled.append(item.value)
            if len(handled) == 100:
                worker.stop()

        worker = penstock.Worker(queue, handle, concurrency=8)
        worker.run(signals=False)
        assert queue.stats().completed == 100
    assert sorted(handled, key=int) == [str(number) for number in range(100)]


def test_a_second_open_in_one_process_shares_the_broker(directory: Path) -> None:
    first, second = penstock.open(directory), penstock.open(directory)
    queue = first.create_queue("q")
    first.close()
    with pytest.raises(BrokerClosed):
        queue.produce(b"x")
    second.queue("q").produce(b"y")
    with pytest.raises(InvalidRequest, match="another durability"):
        penstock.open(directory, durability="os")
    with pytest.raises(BrokerLocked, match="this very process"):
        penstock.open(directory, exclusive=True)
    second.close()
    with penstock.open(directory, durability="os") as third:
        assert third.queue("q").stats().ready == 1


# -- kinds of open -----------------------------------------------------------------------------------------


def test_an_exclusive_owner_is_alone(directory: Path) -> None:
    with BrokerProcess(directory, exclusive=True) as owner:
        with pytest.raises(BrokerLocked, match=f"process {owner.pid} .* shares it with no other"):
            penstock.open(directory)
        with pytest.raises(BrokerLocked, match=f"process {owner.pid}"):
            penstock.open(directory, exclusive=True)
        with pytest.raises(BrokerLocked):
            penstock.open(directory, own=False, wait=0)
    penstock.open(directory, exclusive=True).close()


def test_an_exclusive_open_beside_an_owner_is_refused(owner: BrokerProcess, directory: Path) -> None:
    with pytest.raises(BrokerLocked, match=f"process {owner.pid}"):
        penstock.open(directory, exclusive=True)


def test_own_false_needs_an_owner(directory: Path) -> None:
    with pytest.raises(InvalidRequest):
        penstock.open(directory, own=False, exclusive=True)
    penstock.open(directory).close()
    with pytest.raises(BrokerClosed, match="penstock own"):
        penstock.open(directory, own=False, wait=0.05)
    with BrokerProcess(directory) as owner, penstock.open(directory, own=False) as broker:
        queue = broker.create_queue("q")
        queue.produce(b"x")
        owner.kill()
        with pytest.raises((QueueBusy, OutcomeUnknown), match="has not answered"):
            queue.produce(b"y", timeout=1)
        assert not is_owner(broker)
        with BrokerProcess(directory) as next_owner:
            queue.produce(b"z")
            assert next_owner.ask("broker.queue('q').stats().ready") == 2


def test_a_read_only_open_sees_what_the_owner_publishes_and_changes_nothing(owner: BrokerProcess, directory: Path) -> None:
    with penstock.open(directory, read_only=True) as broker:
        queue = broker.queue("q")
        assert queue.stats().ready == 0
        owner.ask("broker.queue('q').produce('x') and None")
        while not queue.stats().ready:  # published within a moment
            pass
        with pytest.raises(InvalidRequest, match="read-only"):
            queue.produce(b"y")
        assert [item.value for item in queue.items()] == ["x"]
    with pytest.raises(InvalidRequest, match="exclude each other"):
        penstock.open(directory, read_only=True, exclusive=True)


def test_a_directory_with_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    directory = tmp_path / ("long-" * 20) / ("name-" * 20) / "data"
    with BrokerProcess(directory) as owner, penstock.open(directory) as broker:
        broker.create_queue("q").produce(b"x")
        assert owner.ask("broker.queue('q').stats().ready") == 1


def test_without_sockets_in_the_directory_a_runtime_directory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / ("long-" * 25) / "data"
    runtime = Path(tempfile.mkdtemp(prefix="run-", dir="/tmp"))  # short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with monkeypatch.context() as patched:
        patched.setattr(address, "_short_path", _no_short_path)  # as without procfs
        broker = penstock.open(directory)
    (folder,) = runtime.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len([*folder.iterdir()]) == 1
    with BrokerProcess(directory) as client:
        client.ask("broker.create_queue('q').produce('x') and None")
    assert broker.queue("q").stats().ready == 1
    broker.close()
    assert not [*folder.iterdir()]
    shutil.rmtree(runtime)


def _no_short_path(directory: str) -> Any:
    raise OSError(f"{directory} has no short path")


def test_a_client_with_other_roots_does_not_take_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, roots = tmp_path / "data", [str(tmp_path / "more")]
    caplog.set_level(logging.WARNING)
    with BrokerProcess(directory, roots=roots) as owner, penstock.open(directory) as broker:
        queue = broker.create_queue("q", partitions=4)
        assert "was given others; it will not take over" in caplog.text
        owner.kill()
        with pytest.raises((QueueBusy, OutcomeUnknown), match="has ended"):
            queue.produce(b"x", timeout=1)
        with BrokerProcess(directory, roots=roots):
            queue.produce(b"x")
            assert all(one.status == "active" for one in queue.stats().partitions)


def test_a_directory_that_is_gone_is_not_made_anew_by_a_take_over(owner: BrokerProcess, directory: Path) -> None:
    with penstock.open(directory) as broker:
        queue = broker.queue("q")
        queue.produce(b"x")
        directory.rename(directory.with_name("moved"))
        owner.kill()
        with pytest.raises((OutcomeUnknown, StorageFailed)):  # it was sent before the end of the owner was noticed, or not
            queue.produce(b"y", timeout=1)
        with pytest.raises(StorageFailed, match="moved or deleted"):
            queue.produce(b"y", timeout=1)
        assert not directory.exists()
        directory.with_name("moved").rename(directory)
        while True:
            with suppress(StorageFailed):
                queue.produce(b"z")
                break


def test_closing_in_one_thread_waits_until_another_has_closed(directory: Path) -> None:
    for number in range(5):
        broker = penstock.open(directory)
        queue = broker.create_queue(f"q{number}", partitions=16)
        queue.produce_many([penstock.NewItem("x", key=str(key)) for key in range(500)])
        closing = threading.Thread(target=broker.close)
        closing.start()
        while not (isinstance(broker._home, SharedHome) and broker._home._closed):
            pass
        broker.close()
        penstock.open(directory, exclusive=True).close()  # BrokerLocked if it is still being closed
        closing.join()


def test_closing_in_a_signal_handler_in_the_middle_of_a_call_is_refused(directory: Path) -> None:
    """It would wait for ever for the call that it interrupted."""
    program = """
import signal, sys, penstock
broker = penstock.open(sys.argv[1])
queue = broker.create_queue("q")
def handler(*_):
    try:
        broker.close()
    except penstock.errors.QueueBusy as error:
        print(error, flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, handler)
print("ready", flush=True)
while True:
    queue.produce(b"x")
"""
    process = subprocess.Popen([sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(60) == 3
    process.stdout.close()


# -- who may connect -----------------------------------------------------------------------------------------


def test_only_the_user_can_read_the_secret(owner: BrokerProcess, directory: Path) -> None:
    for name in ("LOCK", "socket"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")
def test_another_user_is_refused_with_the_reason(owner: BrokerProcess, directory: Path) -> None:
    for parent in (directory, *directory.parents[:3]):
        parent.chmod(0o755)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.setuid(65534)
        try:
            penstock.open(directory)
        except AccessDenied as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "run as the user who owns the directory" in pipe.read()
    os.waitpid(child, 0)
    assert owner.ask("1 + 1") == 2


def test_a_lock_file_of_an_earlier_version_is_closed_to_others(directory: Path) -> None:
    penstock.open(directory).close()
    (directory / "LOCK").chmod(0o644)
    with penstock.open(directory):
        assert stat.S_IMODE((directory / "LOCK").stat().st_mode) == 0o600


# -- take-over -----------------------------------------------------------------------------------------------


def test_a_client_takes_over_when_the_owner_is_killed(owner: BrokerProcess, directory: Path) -> None:
    with penstock.open(directory) as broker:
        queue = broker.queue("q")
        ids = queue.produce_many([penstock.NewItem(str(number), key=str(number % 3)) for number in range(30)])
        held = queue.lease(3)
        owner.kill()
        assert queue.produce("after the kill", key="0") not in ids
        await_ownership(broker)
        held.complete()  # leases and their tokens are in the log
        assert queue.stats().completed == 3 and queue.stats().ready == 28
        assert (directory / "socket").exists()
    assert not (directory / "socket").exists()


def test_a_client_takes_over_when_the_owner_closes(directory: Path) -> None:
    first = BrokerProcess(directory)
    with penstock.open(directory) as broker:
        broker.create_queue("q").produce(b"x")
        first.close()
        await_ownership(broker)
        assert broker.queue("q").stats().ready == 1


def test_a_waiting_lease_goes_on_waiting_at_the_next_owner(owner: BrokerProcess, directory: Path) -> None:
    with BrokerProcess(directory) as client, penstock.open(directory) as broker:
        client.begin("[lease.item.value for lease in broker.queue('q').lease(1, wait=60)]")
        while not broker.queue("q").stats().waiting_consumers:
            pass
        owner.kill()
        broker.queue("q").produce("arrived later")
        assert client.answer() == ["arrived later"]


def test_a_waiting_lease_of_an_async_client_goes_on_waiting(owner: BrokerProcess, directory: Path) -> None:
    async def run() -> str:
        async with await penstock.aopen(directory) as broker:
            queue = await broker.queue("q")
            waiting = asyncio.create_task(queue.lease(1, wait=60))
            while not (await queue.stats()).waiting_consumers:
                await asyncio.sleep(0)
            owner.kill()
            await queue.produce("arrived later")
            (lease,) = await waiting
            await lease.complete()
            return str(lease.item.value)

    assert asyncio.run(run()) == "arrived later"


def test_a_stale_socket_file_is_replaced(owner: BrokerProcess, directory: Path) -> None:
    owner.kill()
    assert (directory / "socket").exists()
    with penstock.open(directory) as broker:
        assert is_owner(broker)
        with BrokerProcess(directory) as client:
            assert client.ask("broker.queue('q').produce('x') and None") is None
            assert broker.queue("q").stats().ready == 1


def test_a_frozen_owner_is_not_robbed_and_is_named(owner: BrokerProcess, directory: Path) -> None:
    with penstock.open(directory) as broker:
        queue = broker.queue("q")
        queue.produce("before")
        owner.freeze()
        try:
            with pytest.raises(OutcomeUnknown, match=f"process {owner.pid} .*has not answered"):
                queue.produce("meanwhile", timeout=1)
            assert not is_owner(broker)
            program = "import sys, penstock\npenstock.open(sys.argv[1], wait=0.3)"
            other = subprocess.run([sys.executable, "-c", program, directory], capture_output=True, text=True, timeout=60, check=False)
            assert "BrokerLocked" in other.stderr and f"process {owner.pid}" in other.stderr
        finally:
            owner.thaw()
        queue.produce("after")
        assert owner.ask("broker.queue('q').stats().ready") in (2, 3)  # the one whose outcome was unknown may be there


def test_after_three_unfinished_openings_nobody_takes_over_by_itself(
    owner: BrokerProcess, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with penstock.open(directory) as broker:
        queue = broker.queue("q")
        queue.produce("before")
        owner.freeze()
        said = json.loads((directory / "LOCK").read_bytes())
        said["unfinished"] = [broker._home.clock.read().wall - SECOND] * shared.MAX_UNFINISHED
        (directory / "LOCK").write_bytes(json.dumps(said).encode().ljust(511) + b"\n")
        with caplog.at_level(logging.ERROR):
            owner.kill()
            with pytest.raises((QueueBusy, OutcomeUnknown)):
                queue.produce("nobody is there", timeout=1)
        assert "penstock own" in caplog.text and not is_owner(broker)
        with BrokerProcess(directory) as deliberate:  # an explicit open is always allowed
            queue.produce("after")
            assert deliberate.ask("broker.queue('q').stats().ready") >= 2
            assert json.loads((directory / "LOCK").read_bytes()).get("unfinished", []) == []
