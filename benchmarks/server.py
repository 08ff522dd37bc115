"""Measures the HTTP server: by JSON and by Penstock's client, compared with the embedded broker, the socket and peers.

    make bench-server      (python benchmarks/server.py [--rounds N] [--seconds S] [--quick] [--no-write])

100-byte payloads. Each figure is measured for some tenths of a second, and is the median of several rounds; what is
compared is measured in turn within each round, because machines are noisy: read the ratios.
- JSON: prepared requests over bare connections (http_load.py). Each sends its next request when it has its answer.
- Penstock's client: `penstock.open`, and `penstock.aopen` with a task per connection where there are several. The same
  code measures the embedded broker (target: a directory), the socket (a directory that another process owns), and the
  server (target: its address).
- Peers: streams of redis-server and JetStream of nats-server through their own Python clients (stream_peers.py), where
  they are on the PATH.
Writes benchmarks/results/server.json.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import stream_peers
import uvloop
from http_load import Load, Phase, request_bytes
from rates import Rate, Repeated, percentile, repeat, repeat_async

import penstock

PAYLOAD = b"x" * 100
BATCHES = (1, 100, 1_000)
CONNECTIONS = (1, 16, 256)
PEER_BATCH = 1_000
MANY = 64
"""The connections of single produces, also of peers."""
WAITING = 5_000
PINGS = 300
LEASE_SECONDS = 300
WARM_UP = 0.2
"""The share of the time for which the same is done before, and not counted."""
START_SECONDS = 20.0
VERBS = ("produce", "lease", "complete")
RESULTS = Path(__file__).parent / "results" / "server.json"

Durability = Literal["fsync", "os"]


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long."""

    seconds: float = 0.5
    """For each figure."""
    batches: tuple[int, ...] = BATCHES
    connections: tuple[int, ...] = CONNECTIONS
    waiting: int = WAITING
    pings: int = PINGS


class Figures:
    """What was measured in each round, by name."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float) -> None:
        self._values[name].append(value)

    def add_rate(self, name: str, rate: Rate) -> None:
        for part, value in rate._asdict().items():
            self.add(f"{name}_{part}", value)

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self._values.items()}


# -- processes ---------------------------------------------------------------------------------------


def own(directory: str, durability: Durability) -> None:
    """Own a directory until the standard input ends."""
    with penstock.open(directory, durability=durability):
        print("ready", flush=True)
        sys.stdin.read()


@contextmanager
def owner(directory: Path, durability: Durability) -> Iterator[None]:
    """Another process that owns the directory."""
    command = [sys.executable, __file__, "--own", str(directory), durability]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.communicate()


@contextmanager
def server(directory: Path, durability: Durability) -> Iterator[int]:
    """A server of the directory; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    command = [sys.executable, "-m", "penstock.cli", "serve", str(directory), "--create", "--bind", f"127.0.0.1:{port}"]
    process = subprocess.Popen([*command, "--durability", durability], stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the server does not run") from None
                time.sleep(0.01)
        yield port
    finally:
        process.terminate()
        process.wait()


# -- JSON --------------------------------------------------------------------------------------------


class LeasedItem(msgspec.Struct):
    id: str
    lease_token: str


class Leased(msgspec.Struct):
    items: list[LeasedItem]


_leased = msgspec.json.Decoder(Leased)
_queues = itertools.count(1)


def post(verb: str, **fields: Any) -> bytes:
    request: bytes = request_bytes(f"/v1/{verb}", msgspec.json.encode(fields))
    return request


def produce_request(queue: str, batch: int) -> bytes:
    return post("queue.produce", queue_name=queue, items=[{"utf8": PAYLOAD.decode()}] * batch)


def lease_request(queue: str, batch: int, wait: str = "0s") -> bytes:
    return post("queue.lease", queue_name=queue, batch_size=batch, request_timeout=wait, client_id="bench")


def complete_request(queue: str, leased: bytes) -> bytes:
    tokens = [item.lease_token for item in _leased.decode(leased).items]
    return post("queue.complete", queue_name=queue, lease_tokens=tokens)


@contextmanager
def json_queue(port: int) -> Iterator[str]:
    """A new queue, deleted afterwards."""
    name = f"json-{next(_queues)}"
    with penstock.open(f"http://127.0.0.1:{port}") as broker:
        broker.create_queue(name, lease_timeout=LEASE_SECONDS)
        yield name
        broker.delete_queue(name)


def by_json(port: int, batch: int, connections: int, seconds: float) -> dict[str, Rate]:
    """Produce, lease and complete by JSON."""

    async def run(queue: str) -> dict[str, Rate]:
        async with Load(port, connections) as load:
            for time_left in (seconds * WARM_UP, seconds):
                produced = await load.run(Phase(itertools.repeat(produce_request(queue, batch)), time_left))
                requests = itertools.repeat(lease_request(queue, batch), len(produced.times))
                leased = await load.run(Phase(requests, time_left, keep=True))
                completions = [complete_request(queue, body) for body in leased.bodies]
                completed = await load.run(Phase(completions))
        return {
            verb: Rate.of(batch * len(phase.times), phase.took, phase.times)
            for verb, phase in zip(VERBS, (produced, leased, completed), strict=True)
        }

    with json_queue(port) as queue:
        return uvloop.run(run(queue))


def json_singles(port: int, waiting: int, seconds: float) -> Rate:
    """Produce single items over many connections, while leases of another queue wait."""

    async def run(busy: str, idle: str) -> Rate:
        async with Load(port, waiting) as waiters, Load(port, MANY) as load:
            if waiting:
                Phase(itertools.repeat(lease_request(idle, 1, "300s"), waiting)).start(waiters.connections)
                await asyncio.sleep(1)  # the server takes them
            produced = await load.run(Phase(itertools.repeat(produce_request(busy, 1)), seconds))
        return Rate.of(len(produced.times), produced.took, produced.times)

    with json_queue(port) as busy, json_queue(port) as idle:
        return uvloop.run(run(busy, idle))


def json_pings(port: int, count: int) -> list[float]:
    """Seconds from a produce to the answer of a lease that waits for it, when nothing else goes on."""

    async def run(queue: str) -> list[float]:
        times: list[float] = []
        async with Load(port, 1) as waiter, Load(port, 1) as producer:
            for _ in range(count):
                lease = Phase([lease_request(queue, 1, "60s")], keep=True)
                lease.start(waiter.connections)
                await asyncio.sleep(0.01)  # now it waits
                produced = await producer.run(Phase([produce_request(queue, 1)]))
                times.append((await lease.wait()).last - produced.began)
                await producer.run(Phase([complete_request(queue, lease.bodies[0])]))
        return times

    with json_queue(port) as queue:
        return uvloop.run(run(queue))


# -- Penstock's client -------------------------------------------------------------------------------


def by_client(target: str, durability: Durability, batch: int, connections: int, seconds: float) -> dict[str, Rate]:
    """Produce, lease and complete by Penstock's API, at a directory or an address."""
    if connections == 1:
        return _by_one_client(target, durability, batch, seconds)
    return asyncio.run(_by_tasks(target, durability, batch, connections, seconds))


def options(target: str, durability: Durability) -> dict[str, Any]:
    return {} if "://" in target else {"durability": durability}


def _by_one_client(target: str, durability: Durability, batch: int, seconds: float) -> dict[str, Rate]:
    with penstock.open(target, **options(target, durability)) as broker:
        queue = broker.create_queue(name := f"client-{next(_queues)}", lease_timeout=LEASE_SECONDS)
        payloads = [PAYLOAD] * batch

        def produce() -> object:
            return queue.produce(PAYLOAD) if batch == 1 else queue.produce_many(payloads)

        def lease() -> object:
            leased = queue.lease(batch)
            assert len(leased.payloads) == batch
            return leased

        for time_left in (seconds * WARM_UP, seconds):
            produced = repeat(produce, time_left)
            leased = repeat(lease, time_left, at_most=len(produced.times))
            completed = _complete(leased)
        broker.delete_queue(name)
    return {verb: done.rate(batch * len(done.times)) for verb, done in zip(VERBS, (produced, leased, completed), strict=True)}


def _complete(leased: Repeated) -> Repeated:
    rest: Any = iter(leased.answers)
    return repeat(lambda: next(rest).complete(), float("inf"), at_most=len(leased.times))


async def _complete_in_tasks(leased: Repeated, connections: int) -> Repeated:
    rest: Any = iter(leased.answers)
    return await repeat_async([lambda: next(rest).complete()] * connections, float("inf"), at_most=len(leased.times))


async def _by_tasks(target: str, durability: Durability, batch: int, connections: int, seconds: float) -> dict[str, Rate]:
    async with await penstock.aopen(target, **options(target, durability)) as broker:
        queue = await broker.create_queue(name := f"client-{next(_queues)}", lease_timeout=LEASE_SECONDS)
        payloads = [PAYLOAD] * batch

        async def produce() -> object:
            return await (queue.produce(PAYLOAD) if batch == 1 else queue.produce_many(payloads))

        async def lease() -> object:
            leased = await queue.lease(batch)
            assert len(leased.payloads) == batch
            return leased

        for time_left in (seconds * WARM_UP, seconds):
            produced = await repeat_async([produce] * connections, time_left)
            leased = await repeat_async([lease] * connections, time_left, at_most=len(produced.times))
            completed = await _complete_in_tasks(leased, connections)
        await broker.delete_queue(name)
    return {verb: done.rate(batch * len(done.times)) for verb, done in zip(VERBS, (produced, leased, completed), strict=True)}


def client_pings(target: str, count: int) -> list[float]:
    """As `json_pings`."""

    async def run() -> list[float]:
        times: list[float] = []
        async with await penstock.aopen(target) as broker:
            queue = await broker.create_queue(name := f"client-{next(_queues)}", lease_timeout=LEASE_SECONDS)

            async def lease() -> tuple[penstock.AsyncLeaseBatch, float]:
                return await queue.lease(wait=60), time.perf_counter()

            for _ in range(count):
                waiting = asyncio.create_task(lease())
                await asyncio.sleep(0.01)  # now it waits
                began = time.perf_counter()
                await queue.produce(PAYLOAD)
                leased, came = await waiting
                times.append(came - began)
                await leased.complete()
            await broker.delete_queue(name)
        return times

    return asyncio.run(run())


# -- what is measured --------------------------------------------------------------------------------


def measure(root: Path, durability: Durability, plan: Plan, figures: Figures) -> None:
    """One round: each size by each way in turn."""
    with owner(root / "socket", durability), server(root / "served", durability) as port:
        url = f"http://127.0.0.1:{port}"
        targets = {"embedded": str(root / "embedded"), "socket": str(root / "socket"), "client": url}
        for batch, connections in itertools.product(plan.batches, plan.connections):
            for way, target in targets.items():
                for verb, rate in by_client(target, durability, batch, connections, plan.seconds).items():
                    figures.add_rate(f"{durability}_{way}_{verb}_{batch}_{connections}", rate)
            for verb, rate in by_json(port, batch, connections, plan.seconds).items():
                figures.add_rate(f"{durability}_json_{verb}_{batch}_{connections}", rate)
        figures.add_rate(f"{durability}_client_produce_1_{MANY}", by_client(url, durability, 1, MANY, plan.seconds)["produce"])
        figures.add_rate(f"{durability}_json_produce_1_{MANY}", json_singles(port, 0, plan.seconds))
        figures.add_rate(f"{durability}_json_produce_1_{MANY}_waiting", json_singles(port, plan.waiting, plan.seconds))
        for way, times in (("json", json_pings(port, plan.pings)), ("client", client_pings(url, plan.pings))):
            figures.add(f"{durability}_{way}_ping_p50_ms", percentile(times, 50) * 1e3)
            figures.add(f"{durability}_{way}_ping_p99_ms", percentile(times, 99) * 1e3)


def measure_peers(root: Path, plan: Plan, peers: list[stream_peers.Peer], figures: Figures) -> None:
    for peer in peers:
        with stream_peers.served(peer, root / peer.name) as port:
            for verb, rate in peer.in_batches(port, PAYLOAD, PEER_BATCH, plan.seconds).items():
                figures.add_rate(f"{peer.name}_{verb}_{PEER_BATCH}_1", rate)
            figures.add_rate(f"{peer.name}_produce_1_{MANY}", peer.singles(port, PAYLOAD, MANY, plan.seconds))


# -- what is read from it ----------------------------------------------------------------------------


def cycle(found: dict[str, float], way: str, batch: int, connections: int) -> float:
    """Items per second that are produced, leased and completed, one after the other."""
    return 1 / sum(1 / found[f"{way}_{verb}_{batch}_{connections}_per_s"] for verb in VERBS)


def read(found: dict[str, float], plan: Plan, peers: list[stream_peers.Peer]) -> dict[str, tuple[float, str]]:
    """Ratios and latencies, with their aims."""
    made: dict[str, tuple[float, str]] = {}
    large = plan.batches[-1]
    for durability, other in itertools.product(("fsync", "os"), ("embedded", "socket")):
        for connections in plan.connections:
            for verb in VERBS:
                size = f"{verb}_{large}_{connections}_per_s"
                ratio = found[f"{durability}_client_{size}"] / found[f"{durability}_{other}_{size}"]
                aim = "≥ 0.4" if (durability, other, connections) == ("fsync", "embedded", 1) else "–"
                made[f"client, {verb} in batches of {large}, {durability}, {connections} connections, of {other}"] = (ratio, aim)
    for durability in ("fsync", "os"):
        singles, waiting = found[f"{durability}_json_produce_1_{MANY}_per_s"], found[f"{durability}_json_produce_1_{MANY}_waiting_per_s"]
        made[f"JSON, single produces per second, {durability}, {MANY} connections"] = (singles, "≥ 5000" if durability == "fsync" else "–")
        made[f"the same while {plan.waiting} leases wait, of that, {durability}"] = (waiting / singles, "–")
        for way, name in (("json", "JSON"), ("client", "client")):
            for share in ("p50", "p99"):
                took = found[f"{durability}_{way}_ping_{share}_ms"]
                made[f"{name}, idle produce → waiting lease, {share}, ms, {durability}"] = (took, "≤ 10" if share == "p99" else "–")
    for peer in peers:
        aim = "≥ 3" if peer.name == "redis" else "≥ 10"
        ours = cycle(found, "fsync_client", PEER_BATCH, 1)
        made[f"client, all three in batches of {PEER_BATCH}, fsync, of {peer.name}"] = (ours / cycle(found, peer.name, PEER_BATCH, 1), aim)
        for verb in VERBS:
            ratio = found[f"fsync_client_{verb}_{PEER_BATCH}_1_per_s"] / found[f"{peer.name}_{verb}_{PEER_BATCH}_1_per_s"]
            made[f"client, {verb} in batches of {PEER_BATCH}, fsync, of {peer.name}"] = (ratio, "–")
        theirs = found[f"{peer.name}_produce_1_{MANY}_per_s"]
        for way, name, aim in (("client", "client", "> 1"), ("json", "JSON", "–")):
            ratio = found[f"fsync_{way}_produce_1_{MANY}_per_s"] / theirs
            made[f"{name}, single produces, fsync, {MANY} connections, of {peer.name}"] = (ratio, aim)
    return made


def print_rates(found: dict[str, float], plan: Plan) -> None:
    """Items per second, and the milliseconds of a call."""
    for durability in ("fsync", "os"):
        print(f"\n{durability}: items per second (p50 / p99 of a call in ms)")
        print(f"{'batch':>6} {'connections':>12}  {'':9}" + "".join(f"{way:>28}" for way in ("embedded", "socket", "client", "json")))
        for batch, connections, verb in itertools.product(plan.batches, plan.connections, VERBS):
            cells = []
            for way in ("embedded", "socket", "client", "json"):
                rate, p50, p99 = (found[f"{durability}_{way}_{verb}_{batch}_{connections}_{part}"] for part in Rate._fields)
                cells.append(f"{rate:,.0f} ({p50:.2f} / {p99:.2f})")
            print(f"{batch:>6} {connections:>12}  {verb:9}" + "".join(f"{cell:>28}" for cell in cells))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=Plan.seconds, help="for each figure")
    arguments.add_argument("--quick", action="store_true", help="one short round: whether it works, not how fast it is")
    arguments.add_argument("--no-write", action="store_true", help="print only")
    arguments.add_argument("--own", nargs=2, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.own:
        own(*given.own)
        return
    plan = Plan(0.05, (1, 1_000), (1, 16), 500, 20) if given.quick else Plan(given.seconds)
    rounds = 1 if given.quick else given.rounds
    limit = 2 * plan.waiting + 1_000
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, max(limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    peers, missing = stream_peers.find_peers()
    figures = Figures()
    for _ in range(rounds):
        durabilities: tuple[Durability, ...] = ("fsync", "os")
        for durability in durabilities:
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
                measure(Path(root), durability, plan, figures)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as root:
            measure_peers(Path(root), plan, peers, figures)
    found = figures.medians()
    table = read(found, plan, peers)
    print_rates(found, plan)
    print(f"\n{'':86} measured     aim")
    for name, (value, aim) in table.items():
        print(f"{name:86} {value:8.2f} {aim:>7}")
    for name, reason in missing.items():
        print(f"{name} was not measured: {reason}")
    if not given.no_write and not given.quick:
        about: dict[str, Any] = {
            "rounds": rounds,
            "seconds": plan.seconds,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "peers": {peer.name: f"syncs {peer.syncs}" for peer in peers} | {name: f"not measured: {why}" for name, why in missing.items()},
        }
        written = {"about": about, "read": {name: round(value, 3) for name, (value, _) in table.items()}, "measured": found}
        RESULTS.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
