"""Programs that fork, each the main function of a process of its own (`run`): nothing of the test run is copied."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import penstock
from penstock.broker.shared import SharedBroker, SharedHome
from penstock.errors import PenstockError
from penstock.logs.backends import open_read_only
from penstock.logs.files.file_store import FileStore
from penstock.operations import DescribeOwner

TIMEOUT = 60


def run(program: Callable[..., None], *args: object) -> Any:
    """Run a program of this module in a new process, and give what it printed as JSON."""
    command = [sys.executable, "-c", f"from {__name__} import {program.__name__}; {program.__name__}{(*map(str, args), None)[:-1]}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert found.returncode == 0, found.stderr
    told_on_stderr = [line for line in found.stderr.splitlines() if "now owns" not in line]
    assert told_on_stderr == []
    return json.loads(found.stdout)


class Child:
    """A forked child. It sends what `work` gives, and ends."""

    def __init__(self, work: Callable[[], object], leave: Callable[[int], object] = os._exit) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(reading)
            answer = told(work)
            os.write(writing, json.dumps(answer).encode())
            os.close(writing)
            leave(0)
        os.close(writing)
        self._pipe = os.fdopen(reading)

    def answer(self) -> Any:
        with self._pipe:
            found = json.loads(self._pipe.read())
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, status
        return found


def forked(work: Callable[[], object], leave: Callable[[int], object] = os._exit) -> Any:
    return Child(work, leave).answer()


def told(verb: Callable[[], object]) -> object:
    try:
        return verb()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return repr(error)


def report(**found: object) -> None:
    print(json.dumps(found), flush=True)


def owner_pid(broker: penstock.Broker) -> int:
    return broker._home.call(DescribeOwner()).pid


def shared_broker(broker: penstock.Broker) -> SharedBroker:
    assert isinstance(broker._home, SharedHome)
    return broker._home.broker


def descriptors(directory: str) -> list[str]:
    """What this process has open of a directory, and its sockets."""
    return [path for path, _ in _open_files() if path.startswith((directory, "socket:", "anon_inode:[eventpoll]"))]


def locks_and_sockets() -> list[str]:
    return [path for path, info in _open_files() if path.startswith("socket:") or "lock:" in info]


def _open_files() -> Iterator[tuple[str, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), open(f"/proc/self/fdinfo/{name}") as info:
            yield os.readlink(f"/proc/self/fd/{name}"), info.read()


def values(queue: penstock.Queue) -> list[Any]:
    return sorted(item.value for item in queue.items(limit=10_000))


# -- what a child inherits -------------------------------------------------------------------------------


def inherit(directory: str) -> None:
    """A child uses everything that its parent had open before the fork."""
    with penstock.open(directory) as broker:
        queue = broker.create_queue("q", exist_ok=True)
        queue.produce_many([str(number) for number in range(6)])
        batch = queue.lease(2)
        cursor = queue.cursor("c")
        first = [item.value for item in cursor.read(3)]

        def work() -> dict[str, object]:
            lease = batch[0]

            def leave_a_block() -> None:
                with lease:
                    pass

            return {
                "descriptors": descriptors(directory),
                "produce": told(lambda: queue.produce("child") and "produced"),
                "complete": told(lease.complete),
                "complete all": told(batch.complete),
                "extend": told(lease.extend),
                "queue": told(lambda: queue.complete(batch)),
                "block": told(leave_a_block),
                "token": told(lambda: queue.complete(batch[1].token)),
                "cursor": told(lambda: [item.value for item in cursor.read(3)]),
                "own lease": told(lambda: queue.lease(1).complete()),
                "owner": owner_pid(broker) == os.getpid(),
                "again": told(broker.close),
                "closed": told(queue.stats),
            }

        child = forked(work)
        grandchild = forked(lambda: [forked(lambda: queue.produce("grandchild") and "produced"), queue.produce("child") and "produced"])
        batch[0].complete()
        report(
            first=first,
            child=child,
            grandchild=grandchild,
            cursor=[item.value for item in cursor.read(3)],
            completed=queue.stats().completed,
            values=values(queue),
        )


def inherit_async(directory: str) -> None:
    async def prepare() -> tuple[penstock.AsyncBroker, penstock.AsyncQueue, penstock.AsyncLeaseBatch]:
        broker = await penstock.aopen(directory)
        queue = await broker.create_queue("q", exist_ok=True)
        await queue.produce("parent")
        return broker, queue, await queue.lease(1)

    broker, queue, batch = asyncio.run(prepare())

    async def use() -> list[str]:
        found = [str(await queue.produce("child"))]
        try:
            await batch[0].complete()
        except penstock.errors.LeaseLost as error:
            found.append(str(error))
        cancelled = asyncio.create_task(queue.lease(1, wait=60))
        while (await queue.stats()).ready:
            await asyncio.sleep(0)
        cancelled.cancel()
        await broker.close()
        return found

    child = forked(lambda: asyncio.run(use()))

    async def end() -> int:
        await batch[0].complete()
        async with broker:
            return (await queue.stats()).completed

    report(child=child, completed=asyncio.run(end()))


def inherit_read_only(directory: str) -> None:
    with penstock.open(directory) as owner:
        owner.create_queue("q").produce("x")
        with penstock.open(directory, read_only=True) as broker:
            queue = broker.queue("q")
            busy, done = threading.Event(), threading.Event()

            def read() -> None:
                while not done.is_set():
                    queue.stats()
                    busy.set()

            thread = threading.Thread(target=read)
            thread.start()
            busy.wait()
            children = [forked(lambda: [queue.stats().ready, [item.value for item in queue.items()]]) for _ in range(5)]
            done.set()
            thread.join()
            report(children=children)


def change_directory(directory: str) -> None:
    """The directory is named by a relative path, and the child is elsewhere when it uses the broker."""
    os.makedirs(directory)
    os.chdir(directory)
    with penstock.open("data") as broker:
        queue = broker.create_queue("q")

        def work() -> list[str]:
            os.chdir("/")
            return [queue.produce("child")]

        report(child=forked(work), values=values(queue), made=os.path.exists("/data"))


def leave(directory: str) -> None:
    """Children end in every way, with and without having used the broker."""
    with penstock.open(directory) as broker:
        queue = broker.create_queue("q", exist_ok=True)

        def use_and_close() -> None:
            queue.produce("child")
            broker.close()

        for way in (os._exit, sys.exit):
            forked(lambda: None, way)
            forked(lambda: queue.produce("child") and None, way)
            forked(broker.close, way)
            forked(use_and_close, way)
        queue.produce("parent")
        report(values=values(queue))


# -- a parent at work ------------------------------------------------------------------------------------


def fork_at_work(directory: str) -> None:
    """Threads of the parent produce, wait and look who the owner is, at every moment at which it forks."""
    with penstock.open(directory) as broker:
        queue = broker.create_queue("q", partitions=4, exist_ok=True)
        done = threading.Event()
        produced = [0] * 3

        def produce(number: int) -> None:
            while not done.is_set():
                queue.produce_many([f"{number}-{produced[number]}"] * 3)
                produced[number] += 3

        def wait() -> None:
            while not done.is_set():
                queue.lease(1, wait=0.01).retry()

        def probe() -> None:
            while not done.is_set():
                with suppress(PenstockError):
                    open_read_only(directory).owner()

        threads = [threading.Thread(target=produce, args=(number,)) for number in range(3)]
        threads += [threading.Thread(target=wait), threading.Thread(target=probe)]
        for thread in threads:
            thread.start()
        children = [Child(lambda: [locks_and_sockets(), bool(queue.produce("child"))]) for _ in range(15)]
        answers = [child.answer() for child in children]
        done.set()
        for thread in threads:
            thread.join()
        report(children=answers, produced=sum(produced) + 15, stored=queue.stats().produced)


def fork_in_a_handler_of_a_signal(directory: str) -> None:
    """The fork is in the middle of a call of the same thread, through the owner; the child returns into it."""
    with penstock.open(directory) as broker:
        queue = broker.create_queue("q", exist_ok=True)
        reading, writing = os.pipe()
        parent = os.getpid()
        children = []

        def handle(number: int, frame: object) -> None:
            children.append(os.fork())
            if os.getpid() == parent:
                threading.Thread(target=produce_when_told).start()

        def produce_when_told() -> None:
            os.read(reading, 1)
            queue.produce("for the parent")

        def raise_signal_when_waiting() -> None:
            while not queue.stats().waiting_consumers:
                pass
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        signal.signal(signal.SIGUSR1, handle)
        threading.Thread(target=raise_signal_when_waiting).start()
        found = told(lambda: [lease.item.value for lease in queue.lease(1, wait=30)])
        if os.getpid() != parent:
            assert isinstance(found, str) and found.startswith("BrokerClosed"), found
            queue.stats()
            os.write(writing, b".")
            os._exit(0)
        _, status = os.waitpid(children[0], 0)
        report(found=found, status=status)


# -- a parent that ends ----------------------------------------------------------------------------------


def orphan(directory: str, uses: str) -> None:
    """The parent is killed; its child lives on, and the directory is free for it, or for another process."""
    reading, writing = os.pipe()
    go, told_to_go = os.pipe()
    parent = os.fork()
    if not parent:
        broker = penstock.open(directory)
        queue = broker.create_queue("q")
        queue.produce("parent")
        if not os.fork():
            if uses == "before":
                queue.produce("child")
            os.write(writing, json.dumps(os.getpid()).encode())
            os.read(go, 1)
            answer = [] if uses == "never" else [queue.produce("orphan"), owner_pid(broker) == os.getpid()]
            os.write(writing, json.dumps(answer).encode())
            os.read(go, 1)
            os._exit(0)
        signal.pause()
    child = json.loads(os.read(reading, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.write(told_to_go, b".")
    answer = json.loads(os.read(reading, 100))
    with penstock.open(directory, wait=20) as broker:
        report(orphan=answer, owner=owner_pid(broker) == os.getpid(), values=values(broker.queue("q")))
    os.kill(child, signal.SIGKILL)


def fork_during_a_take_over(directory: str, then: str) -> None:
    """The parent forks while another thread of it takes over, and the former owner was killed."""
    reading, writing = os.pipe()
    go, told_to_go = os.pipe()
    owner = os.fork()
    if not owner:
        penstock.open(directory).create_queue("q").produce("owner")
        os.write(writing, b".")
        signal.pause()
    os.read(reading, 1)
    parent = os.fork()
    if not parent:
        broker = penstock.open(directory)
        opening, opened = threading.Event(), threading.Event()
        wanted = SharedBroker._open_owner

        def open_owner(self: SharedBroker, store: FileStore) -> Any:
            opening.set()
            opened.wait()
            return wanted(self, store)

        SharedBroker._open_owner = open_owner  # type: ignore[method-assign]
        os.kill(owner, signal.SIGKILL)
        opening.wait()
        if not os.fork():
            SharedBroker._open_owner = wanted  # type: ignore[method-assign]
            os.write(writing, b".")
            queue = broker.queue("q")
            answer = [queue.produce("child"), owner_pid(broker) == os.getpid(), descriptors(directory)]
            os.write(writing, json.dumps(answer).encode())
            os.read(go, 1)
            os._exit(0)
        if then == "finished":
            opened.set()
        signal.pause()
    os.waitpid(owner, 0)
    os.read(reading, 1)
    if then == "killed":
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    answer = json.loads(os.read(reading, 1000))
    with penstock.open(directory, wait=20) as broker:
        report(child=answer, values=values(broker.queue("q")))
    os.write(told_to_go, b".")
    if then != "killed":
        os.kill(parent, signal.SIGKILL)


def start_programs(directory: str) -> None:
    """Programs started by the owner have nothing of it open, also when descriptors are not closed for them."""
    with penstock.open(directory) as broker:
        broker.create_queue("q").produce("x")
        code = f"import os\nfrom {__name__} import descriptors\nprint(descriptors({directory!r}), end='')"
        started = [subprocess.run([sys.executable, "-c", code], close_fds=close, stdout=subprocess.PIPE) for close in (True, False)]
        report(found=[one.stdout.decode() for one in started])


# -- workers and multiprocessing -------------------------------------------------------------------------


def work_in_both(directory: str) -> None:
    """A worker that is made before the fork runs in the parent and in the child at the same time."""
    with penstock.open(directory) as broker:
        queue = broker.create_queue("q")
        queue.produce_many([str(number) for number in range(2)])
        together = get_context("fork").Barrier(2)

        def handle(item: penstock.Item) -> None:
            together.wait(30)  # one item in each process
            worker.stop()

        worker = penstock.Worker(queue, handle)
        process = get_context("fork").Process(target=worker.run)
        thread = threading.Thread(target=lambda: worker.run(signals=False))
        thread.start()
        while worker._run is None:
            threading.Event().wait(0.001)
        process.start()
        thread.join()
        process.join()
        consumers = {event.consumer for item in queue.items() for event in queue.history(item.id) if event.event == "leased"}
        report(completed=queue.stats().completed, consumers=len(consumers), exitcode=process.exitcode)


def produce_from_a_pool(queue: penstock.Queue, value: str) -> str:
    return queue.produce(value)


async def produce_async(queue: penstock.AsyncQueue, value: str) -> str:
    return await queue.produce(value)


def produce_async_from_a_pool(queue: penstock.AsyncQueue, value: str) -> str:
    return asyncio.run(produce_async(queue, value))


def count_from_a_pool(broker: penstock.Broker) -> int:
    return broker.queue("q").stats().produced


def use_a_pool(directory: str, method: str) -> None:
    """Queues and brokers are arguments of functions that run in other processes."""
    with penstock.open(directory) as broker:
        queue = broker.create_queue("q", exist_ok=True)

        async def async_queue() -> penstock.AsyncQueue:
            return await (await penstock.aopen(directory)).queue("q")

        arguments = [(queue, f"{number}") for number in range(6)]
        with get_context(method).Pool(2) as pool:
            pool.starmap(produce_from_a_pool, arguments)
            pool.apply(produce_async_from_a_pool, (asyncio.run(async_queue()), "async"))
            count = pool.apply(count_from_a_pool, (broker,))
            with penstock.open(directory, read_only=True) as reader:
                read = pool.apply(count_from_a_pool, (reader,))
        report(values=values(queue), count=count, read=read)
