"""One of the processes of a campaign: `python -m tests.processes.program TARGET JOURNAL ROLE SEED`.

Owns: the roles. A role produces, leases, settles, operates or reads until SIGTERM, writes what it does to its journal,
and goes on after every documented error. Payloads are unique names, so that the checker can follow each item.
"""

import asyncio
import faulthandler
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import penstock
from penstock import AsyncLease, AsyncQueue, Broker, Item, Lease, NewItem, Queue
from penstock.errors import OutcomeUnknown
from tests.processes.journal import Facts, Failed, Journal

WORK, SECOND, DEAD = "work", "second", "dead"
"""The queues: most of the work, follow-ups, and what was given up."""
KEYS = [f"key-{number}" for number in range(12)]
LEASE_SECONDS = 2.0
MAX_ATTEMPTS = 5
OPEN_SECONDS = 10.0
SERVED_OPEN_SECONDS = 30.0
"""For a client of a server: nobody takes over from one that was killed, it must be started."""
CALL_SECONDS = 30.0
"""How long settling and operating may take, by the rules of the API."""
LEASE_GRACE_SECONDS = 5.0
"""How much longer than its wait a lease may take, by broker/remote.py."""
CURSOR = "audit"
LONG_SECONDS = 8.0


class Process:
    """What all threads of a process share."""

    def __init__(self, target: str, journal: Path, seed: int) -> None:
        """target: a directory, or the address of a server."""
        self.target = target
        self.open_seconds = SERVED_OPEN_SECONDS if "://" in target else OPEN_SECONDS
        self.name = journal.stem
        self.journal = Journal(journal)
        self.seed = seed
        self.stopping = threading.Event()
        self._names = itertools.count(1)

    def payload(self) -> str:
        return f"{self.name}-{next(self._names)}"

    def rng(self, thread: int) -> random.Random:
        return random.Random(f"{self.seed}:{self.name}:{thread}")

    def open(self) -> Broker:
        with self.journal.call("open", self.open_seconds):
            return penstock.open(self.target, wait=self.open_seconds)

    def repeat(self, thread: int, act: Callable[[random.Random], object], pause: float) -> None:
        """Act until the process shall end. An error that is in the journal does not end it."""
        rng = self.rng(thread)
        while not self.stopping.is_set():
            with suppress(Failed):
                act(rng)
            self.stopping.wait(rng.expovariate(1 / pause))


def item_facts(item: Item) -> Facts:
    return {"payload": item.value, "id": item.id, "key": item.key, "attempts": item.attempts}


# -- producing ---------------------------------------------------------------------------------------


def new_item(process: Process, rng: random.Random) -> tuple[NewItem, Facts]:
    """An item of a random sort, and what the checker must know of it."""
    payload = process.payload()
    facts: Facts = {"payload": payload, "key": rng.choice(KEYS) if rng.random() < 0.7 else None}
    options: Facts = {}
    if rng.random() < 0.2:
        options["priority"] = rng.randrange(10)
    chance = rng.random()
    if chance < 0.1:
        options["at"] = datetime.now(UTC) + timedelta(seconds=rng.uniform(0.1, 0.8))
        facts["scheduled"] = True
    elif chance < 0.25:
        number = int(time.monotonic() / 3) * 4 + rng.randrange(4)  # so that processes meet at one id, for a few seconds
        facts["dedup"] = options["dedup"] = f"once-{number}"
        facts["key"] = KEYS[number % len(KEYS)] if number % 3 else None
    return NewItem(payload, key=facts["key"], **options), facts


def options_of(item: NewItem) -> Facts:
    return {"key": item.key, "priority": item.priority, "at": item.at, "dedup": item.dedup}


class Producer:
    """Produces to the queue, one item or several at a time."""

    def __init__(self, process: Process, queue: Queue) -> None:
        self.process, self.queue = process, queue

    def act(self, rng: random.Random) -> None:
        timeout = rng.choice([1.0, 1.0, 2.0, 10.0])
        request = f"request-{rng.randrange(1 << 60)}" if rng.random() < 0.3 else None
        made = [new_item(self.process, rng) for _ in range(1 if rng.random() < 0.6 else rng.randrange(2, 12))]
        facts: Facts = {"queue": self.queue.name, "items": [facts for _, facts in made], "request": request}
        items = [item for item, _ in made]
        try:
            self._produce(items, facts, request, timeout)
        except Failed as failed:
            if request is None or not isinstance(failed.error, OutcomeUnknown):
                raise
            self._produce(items, facts, request, 10.0)  # the documented way to learn the outcome
        if request is not None and rng.random() < 0.3:
            self._produce(items, facts, request, timeout)  # adds nothing

    def _produce(self, items: Sequence[NewItem], facts: Facts, request: str | None, timeout: float) -> None:
        with self.process.journal.call("produce", timeout, **facts) as outcome:
            if len(items) == 1:
                (item,) = items
                outcome.answer = [self.queue.produce(item.payload, **options_of(item), request_id=request, timeout=timeout)]
            else:
                outcome.answer = self.queue.produce_many(items, request_id=request, timeout=timeout)


# -- consuming ---------------------------------------------------------------------------------------


def follow_up(process: Process, rng: random.Random) -> tuple[NewItem, Facts]:
    payload, key, queue = process.payload(), rng.choice([*KEYS, None]), rng.choice([WORK, SECOND, SECOND])
    return NewItem(payload, key=key, queue=queue), {"payload": payload, "key": key, "queue": queue}


def lease_facts(queue: str, count: int, per_key: int, timeout: float) -> Facts:
    return {"queue": queue, "count": count, "per_key": per_key, "lease_timeout": timeout}


class Consumer:
    """Leases items, and settles them in every way."""

    def __init__(self, process: Process, queue: Queue, per_key: int = 1, follow: float = 0.1) -> None:
        self.process, self.queue = process, queue
        self.per_key = per_key
        self.follow = follow
        """The share of completions that have a follow-up."""

    def act(self, rng: random.Random) -> None:
        count, wait, timeout = rng.choice([1, 1, 3, 10]), rng.choice([0.0, 0.3, 1.0]), rng.choice([1.0, LEASE_SECONDS])
        facts = lease_facts(self.queue.name, count, self.per_key, timeout)
        with self.process.journal.call("lease", wait + LEASE_GRACE_SECONDS, **facts) as outcome:
            batch = self.queue.lease(count, wait=wait, lease_timeout=timeout, per_key=self.per_key, consumer=self.process.name)
            outcome.answer = [item_facts(lease.item) for lease in batch]
        number, leases = outcome.number, list(batch)
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.01, 0.05, 0.3]))  # work on them
        if len(leases) > 1 and rng.random() < 0.3:
            self._settle(number, leases, "complete", lambda: batch.complete())
            return
        dropped: set[str] = set()
        for lease in leases:
            if lease.item.key not in dropped:
                self._settle_one(rng, number, lease, leases, dropped, timeout)

    def _settle_one(
        self, rng: random.Random, number: int, lease: Lease, leases: Sequence[Lease], dropped: set[str], timeout: float
    ) -> None:
        """Settle one item. If it is not completed, the later items of its key are not handled any more."""
        journal, chance, key = self.process.journal, rng.random(), lease.item.key
        later = [other for other in leases[leases.index(lease) + 1 :] if key is not None and other.item.key == key]

        def drop() -> None:
            if later and key is not None:
                dropped.add(key)
                journal.note("drop", payloads=[other.item.value for other in later], lease=number)

        try:
            if chance < 0.05:
                with journal.call("extend", CALL_SECONDS, lease=number, payload=lease.item.value, lease_timeout=timeout):
                    lease.extend(timeout)
            if chance < 0.03:
                drop()  # and forget this one: its lease ends by itself
            elif chance < 0.18:
                drop()
                delay = rng.choice([0.0, 0.0, 0.1, 0.5])
                self._settle(number, [lease], "retry", lambda: lease.retry(delay, reason="a try"))
            elif chance < 0.22:
                drop()
                self._settle(number, [lease], "bury", lambda: lease.bury(reason="given up"))
            elif rng.random() < self.follow:
                made, facts = zip(*(follow_up(self.process, rng) for _ in range(rng.choice([1, 1, 3]))), strict=True)
                self._settle(number, [lease], "complete", lambda: lease.complete(then=made), then=facts)
            else:
                self._settle(number, [lease], "complete", lease.complete)
        except Failed:
            drop()

    def _settle(self, number: int, leases: Sequence[Lease], action: str, do: Callable[[], object], then: Sequence[Facts] = ()) -> None:
        facts: Facts = {"lease": number, "action": action, "payloads": [lease.item.value for lease in leases], "then": list(then)}
        with self.process.journal.call("settle", CALL_SECONDS, **facts) as outcome:
            try:
                do()
            finally:
                outcome.answer = [lease.state for lease in leases]


# -- the roles ---------------------------------------------------------------------------------------


def run_threads(process: Process, acts: Sequence[tuple[Callable[[random.Random], object], float]]) -> None:
    """Run each act again and again in a thread of its own, until the process shall end."""
    failed: list[BaseException] = []

    def run(number: int, act: Callable[[random.Random], object], pause: float) -> None:
        try:
            process.repeat(number, act, pause)
        except BaseException as error:
            failed.append(error)
            process.stopping.set()

    threads = [threading.Thread(target=run, args=(number, act, pause)) for number, (act, pause) in enumerate(acts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def produce_only(process: Process) -> None:
    with process.open() as broker:
        queue = find_queue(process, broker, WORK)
        run_threads(process, [(Producer(process, queue).act, 0.04)] * 2)


def produce_and_consume(process: Process) -> None:
    with process.open() as broker:
        queue = find_queue(process, broker, WORK)
        consumer = Consumer(process, queue)
        run_threads(process, [(Producer(process, queue).act, 0.06), (consumer.act, 0.01), (consumer.act, 0.01)])


def consume_only(process: Process) -> None:
    with process.open() as broker:
        work, second = find_queue(process, broker, WORK), find_queue(process, broker, SECOND)
        run_threads(process, [(Consumer(process, work).act, 0.005), (Consumer(process, second, follow=0).act, 0.05)])


def consume_units(process: Process) -> None:
    """Lease several items of a key at a time."""
    with process.open() as broker:
        run_threads(process, [(Consumer(process, find_queue(process, broker, WORK), per_key=3).act, 0.02)] * 2)


def find_queue(process: Process, broker: Broker, name: str) -> Queue:
    while True:
        try:
            return process.journal.run("find", CALL_SECONDS, lambda: broker.queue(name))
        except Failed:
            continue


def run_worker(process: Process) -> None:
    """A Worker with a handler that fails now and then, and that has follow-ups now and then."""
    journal = process.journal
    rng, ended = process.rng(0), threading.Event()

    def handle(item: Item, context: penstock.Context) -> None:
        chance, then = rng.random(), []
        if chance > 0.9:
            made, facts = follow_up(process, rng)
            context.follow_up(made)
            then = [facts]
        number = journal.begin("handle", CALL_SECONDS, queue=context.queue, item=item_facts(item), then=then)
        if chance < 0.3:
            time.sleep(rng.choice([0.01, 0.05, 0.3]))
        result = "retry" if chance < 0.08 else "bury" if chance < 0.1 else "complete"
        journal.write(n=number, answer=result, cancelled=context.cancelled)
        if result == "retry":
            raise penstock.Retry(rng.choice([0.0, 0.2]))
        if result == "bury":
            raise penstock.Bury("given up")

    def late(item: Item) -> None:
        journal.note("late", payload=item.value)

    with process.open() as broker:
        queues = [find_queue(process, broker, WORK), find_queue(process, broker, SECOND)]
        hooks = penstock.Hooks(late=late)
        worker = penstock.Worker(queues, handle, concurrency=3, lease_timeout=4, name=process.name, hooks=hooks)

        def stop() -> None:
            process.stopping.wait()
            while not ended.wait(0.1):
                worker.stop()

        threading.Thread(target=stop, daemon=True).start()
        try:
            worker.run(signals=False)
            if not process.stopping.is_set():
                raise RuntimeError("the worker ended by itself")
        finally:
            ended.set()


def run_async(process: Process) -> None:
    """Tasks that produce, lease and settle through the async API."""
    asyncio.run(_run_async(process))


async def _run_async(process: Process) -> None:
    with process.journal.call("open", process.open_seconds):
        broker = await penstock.aopen(process.target, wait=process.open_seconds)
    async with broker:
        queue = await _find_async(process, broker)
        acts: list[Callable[[random.Random], Awaitable[None]]] = [
            lambda rng: _produce_async(process, queue, rng),
            lambda rng: _consume_async(process, queue, rng),
            lambda rng: _consume_async(process, queue, rng),
        ]
        await asyncio.gather(*(_repeat_async(process, number, act) for number, act in enumerate(acts)))


async def _find_async(process: Process, broker: penstock.AsyncBroker) -> AsyncQueue:
    while True:
        try:
            with process.journal.call("find", CALL_SECONDS):
                return await broker.queue(WORK)
        except Failed:
            continue


async def _repeat_async(process: Process, number: int, act: Callable[[random.Random], Awaitable[None]]) -> None:
    rng = process.rng(number)
    while not process.stopping.is_set():
        with suppress(Failed):
            await act(rng)
        await asyncio.sleep(rng.expovariate(1 / 0.04))


async def _produce_async(process: Process, queue: AsyncQueue, rng: random.Random) -> None:
    made = [new_item(process, rng) for _ in range(rng.choice([1, 1, 5]))]
    timeout = rng.choice([1.0, 5.0])
    with process.journal.call("produce", timeout, queue=queue.name, items=[facts for _, facts in made], request=None) as outcome:
        outcome.answer = await queue.produce_many([item for item, _ in made], timeout=timeout)


async def _consume_async(process: Process, queue: AsyncQueue, rng: random.Random) -> None:
    count, wait = rng.choice([1, 4]), rng.choice([0.0, 0.5])
    facts = lease_facts(queue.name, count, 1, LEASE_SECONDS)
    with process.journal.call("lease", wait + LEASE_GRACE_SECONDS, **facts) as outcome:
        batch = await queue.lease(count, wait=wait, lease_timeout=LEASE_SECONDS, consumer=process.name)
        outcome.answer = [item_facts(lease.item) for lease in batch]
    await asyncio.sleep(rng.choice([0.0, 0.0, 0.02]))
    await asyncio.gather(*(_settle_async(process, rng, outcome.number, lease) for lease in batch))


async def _settle_async(process: Process, rng: random.Random, number: int, lease: AsyncLease) -> None:
    action = "complete" if rng.random() < 0.85 else "retry"
    try:
        facts: Facts = {"lease": number, "action": action, "payloads": [lease.item.value], "then": []}
        with process.journal.call("settle", CALL_SECONDS, **facts) as outcome:
            try:
                await (lease.complete() if action == "complete" else lease.retry(rng.choice([0.0, 0.2])))
            finally:
                outcome.answer = [lease.state]
    except Failed:
        pass


class Operator:
    """Resizes, pauses, redrives and looks."""

    def __init__(self, process: Process, broker: Broker, queue: Queue) -> None:
        self.process, self.broker, self.queue = process, broker, queue

    def act(self, rng: random.Random) -> None:
        run, queue, broker = self.process.journal.run, self.queue, self.broker
        chance = rng.random()
        if chance < 0.15:
            count = rng.randrange(1, 9)
            run("resize", CALL_SECONDS, lambda: queue.resize(count), partitions=count)
        elif chance < 0.3:
            sides = rng.choice([{}, {"lease": False}, {"produce": False}])
            run("pause", CALL_SECONDS, lambda: queue.pause(**sides))
            time.sleep(rng.uniform(0, 0.2))
            while not self.process.stopping.is_set():
                try:
                    run("resume", CALL_SECONDS, queue.resume)
                    break
                except Failed:
                    continue
        elif chance < 0.55:
            limit = rng.choice([None, 1, 20])
            run("redrive", 4 * CALL_SECONDS, lambda: broker.redrive(DEAD, to=WORK, limit=limit))
        elif chance < 0.7:
            run("stats", CALL_SECONDS, queue.stats)
        elif chance < 0.8:
            run("items", CALL_SECONDS, lambda: queue.items(rng.choice(["leased", "ready", None]), limit=50))
        elif chance < 0.9:
            run("held_keys", CALL_SECONDS, queue.held_keys)
        else:
            run("info", CALL_SECONDS, queue.info)


def operate(process: Process) -> None:
    with process.open() as broker:
        queue = find_queue(process, broker, WORK)
        run_threads(process, [(Operator(process, broker, queue).act, 0.15), (Producer(process, queue).act, 0.1)])


class Reader:
    """Reads along with a cursor, which continues where a former process of this role was killed."""

    def __init__(self, process: Process, queue: Queue) -> None:
        self.process, self.queue = process, queue
        self.cursor: penstock.Cursor | None = None

    def act(self, rng: random.Random) -> None:
        run = self.process.journal.run
        try:
            if self.cursor is None:
                self.cursor = run("cursor", 3 * CALL_SECONDS, lambda: self.queue.cursor(CURSOR))
            cursor = self.cursor
            with self.process.journal.call("read", CALL_SECONDS, queue=self.queue.name, cursor=CURSOR) as outcome:
                outcome.answer = [item.id for item in cursor.read(rng.choice([10, 100, 1000]))]
            run("commit", CALL_SECONDS, cursor.commit)
        except Failed:
            self.cursor = None  # it is not known how far it was committed: ask
            raise


def read_along(process: Process) -> None:
    with process.open() as broker:
        queue = find_queue(process, broker, WORK)
        run_threads(process, [(Reader(process, queue).act, 0.1), (Producer(process, queue).act, 0.1)])


def pulse(process: Process) -> None:
    """Produce all the time: for the measurement of take-overs."""
    with process.open() as broker:
        queue = find_queue(process, broker, WORK)

        def act(rng: random.Random) -> None:
            facts: Facts = {"queue": WORK, "items": [{"payload": process.payload(), "key": None}], "request": None}
            with process.journal.call("produce", CALL_SECONDS, **facts) as outcome:
                outcome.answer = [queue.produce(facts["items"][0]["payload"], timeout=CALL_SECONDS)]

        run_threads(process, [(act, 0.003)])


ROLES: dict[str, Callable[[Process], Any]] = {
    "producer": produce_only,
    "both": produce_and_consume,
    "consumer": consume_only,
    "units": consume_units,
    "worker": run_worker,
    "async": run_async,
    "operator": operate,
    "reader": read_along,
    "pulse": pulse,
}


def watch(process: Process) -> None:
    """Write the stacks of all threads to stderr when a call takes long: a hint for the search of the reason."""
    told: set[int] = set()
    while True:
        time.sleep(0.5)
        for number, (name, began) in [*process.journal.pending.items()]:
            if time.monotonic() - began > LONG_SECONDS and number not in told:
                told.add(number)
                print(f"{name} {number} takes more than {LONG_SECONDS} s", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.stderr)


def main(target: str, journal: str, role: str, seed: str) -> None:
    process = Process(target, Path(journal), int(seed))
    faulthandler.register(signal.SIGUSR1)  # the driver asks a process that does not end where its threads are
    signal.signal(signal.SIGTERM, lambda *_: process.stopping.set())
    threading.Thread(target=watch, args=(process,), daemon=True).start()
    ROLES[role](process)
    process.journal.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
