"""The servers that Penstock's is compared with: streams of redis-server, and JetStream of nats-server.

Owns: `Peer`, `Redis`, `JetStream` and `find_peers`. Each is started in a directory of its own and used through its own
Python client, as one would for the work that Penstock does: produce, lease, complete.
"""

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rates import Rate, Repeated, repeat, repeat_async

STREAM, GROUP = "bench", "workers"
START_SECONDS = 10.0


class Peer(Protocol):
    name: str
    syncs: str
    """When it syncs what it wrote to the disk."""

    def missing(self) -> str:
        """Why it cannot be measured here; empty when it can."""
        ...

    def command(self, folder: Path, port: int) -> list[str]:
        """The program of the server and its arguments."""
        ...

    def in_batches(self, port: int, payload: bytes, batch: int, seconds: float) -> dict[str, Rate]:
        """Produce, lease and complete in batches, over one connection."""
        ...

    def singles(self, port: int, payload: bytes, connections: int, seconds: float) -> Rate:
        """Produce single items over so many connections, each as soon as the last is confirmed."""
        ...


@contextmanager
def served(peer: Peer, folder: Path) -> Iterator[int]:
    """Run the server of a peer; gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    folder.mkdir()
    process = subprocess.Popen(peer.command(folder, port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the server of {peer.name} does not run") from None
                time.sleep(0.01)
        yield port
    finally:
        process.terminate()
        process.wait()


def find_peers() -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be measured here, and for each other one the reason."""
    known: list[Peer] = [Redis(), JetStream(always=False), JetStream(always=True)]
    reasons = {peer.name: peer.missing() for peer in known}
    return [peer for peer in known if not reasons[peer.name]], {name: reason for name, reason in reasons.items() if reason}


def _missing(program: str, module: str, package: str) -> str:
    if shutil.which(program) is None:
        return f"{program} is not on the PATH"
    return "" if find_spec(module) else f"the Python package {package} is not installed"


# -- Redis -------------------------------------------------------------------------------------------


class Redis:
    name = "redis"
    syncs = "appendfsync always: before each answer, all commands of one pass of its loop together"

    def missing(self) -> str:
        return _missing("redis-server", "redis", "redis")

    def command(self, folder: Path, port: int) -> list[str]:
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        return ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), *durable]

    def in_batches(self, port: int, payload: bytes, batch: int, seconds: float) -> dict[str, Rate]:
        import redis

        client: Any = redis.Redis(port=port)
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)

        def produce() -> None:
            pipe = client.pipeline(transaction=False)
            for _ in range(batch):
                pipe.xadd(STREAM, {"p": payload})
            pipe.execute()

        def lease() -> list[bytes]:
            ((_, entries),) = client.xreadgroup(GROUP, "one", {STREAM: ">"}, count=batch)
            return [entry_id for entry_id, _ in entries]

        produced = repeat(produce, seconds)
        leased = repeat(lease, seconds, at_most=len(produced.times))
        rest = iter(leased.answers)

        def complete() -> None:
            client.xack(STREAM, GROUP, *next(rest))

        completed = repeat(complete, float("inf"), at_most=len(leased.times))
        client.delete(STREAM)
        client.close()
        return _rates(batch, produced, leased, completed)

    def singles(self, port: int, payload: bytes, connections: int, seconds: float) -> Rate:
        return asyncio.run(self._singles(port, payload, connections, seconds))

    async def _singles(self, port: int, payload: bytes, connections: int, seconds: float) -> Rate:
        import redis.asyncio

        clients: list[Any] = [redis.asyncio.Redis(port=port, single_connection_client=True) for _ in range(connections)]
        for client in clients:
            await client.ping()
        acts: list[Callable[[], Any]] = [partial(client.xadd, STREAM, {"p": payload}) for client in clients]
        produced = await repeat_async(acts, seconds)
        await clients[0].delete(STREAM)
        for client in clients:
            await client.aclose()
        return produced.rate(len(produced.times))


# -- JetStream ---------------------------------------------------------------------------------------


class JetStream:
    """Confirmations of messages are sent without waiting, as its client does by default; the last one is waited for."""

    def __init__(self, *, always: bool) -> None:
        self._always = always
        self.name = "jetstream_always" if always else "jetstream"
        self.syncs = "sync_interval always: before each answer" if always else "by default: every two minutes, not before it answers"

    def missing(self) -> str:
        reason = _missing("nats-server", "nats", "nats-py")
        if reason or not self._always:
            return reason
        config = self._config(Path("unused"), 4222)
        tried = subprocess.run(["nats-server", "-t", "-c", "/dev/stdin"], input=config, text=True, capture_output=True)
        return "" if tried.returncode == 0 else "this nats-server has no option sync_interval (2.10 has)"

    def _config(self, folder: Path, port: int) -> str:
        always = "sync_interval: always" if self._always else ""
        return f'host: 127.0.0.1\nport: {port}\njetstream {{ store_dir: "{folder}"\n {always} }}\n'

    def command(self, folder: Path, port: int) -> list[str]:
        (folder / "server.conf").write_text(self._config(folder, port))
        return ["nats-server", "-c", str(folder / "server.conf")]

    def in_batches(self, port: int, payload: bytes, batch: int, seconds: float) -> dict[str, Rate]:
        return asyncio.run(self._in_batches(port, payload, batch, seconds))

    async def _in_batches(self, port: int, payload: bytes, batch: int, seconds: float) -> dict[str, Rate]:
        from nats.js.api import ConsumerConfig

        client, stream = await self._connect(port)
        config = ConsumerConfig(max_ack_pending=-1, ack_wait=300)
        reader = await stream.pull_subscribe("items", GROUP, config=config)

        async def produce() -> None:
            confirmations = [await stream.publish_async("items", payload) for _ in range(batch)]
            await asyncio.gather(*confirmations)

        async def lease() -> list[Any]:
            taken: list[Any] = []
            while len(taken) < batch:
                taken += await reader.fetch(batch - len(taken))
            return taken

        produced = await repeat_async([produce], seconds)
        leased = await repeat_async([lease], seconds, at_most=len(produced.times))
        rest: Any = iter(leased.answers)

        async def complete() -> None:
            taken = next(rest)
            for message in taken[:-1]:
                await message.ack()
            await taken[-1].ack_sync()

        completed = await repeat_async([complete], float("inf"), at_most=len(leased.times))
        await self._disconnect([client], stream)
        return _rates(batch, produced, leased, completed)

    def singles(self, port: int, payload: bytes, connections: int, seconds: float) -> Rate:
        return asyncio.run(self._singles(port, payload, connections, seconds))

    async def _singles(self, port: int, payload: bytes, connections: int, seconds: float) -> Rate:
        connected = [await self._connect(port) for _ in range(connections)]
        acts: list[Callable[[], Any]] = [partial(stream.publish, "items", payload) for _, stream in connected]
        produced = await repeat_async(acts, seconds)
        await self._disconnect([client for client, _ in connected], connected[0][1])
        return produced.rate(len(produced.times))

    async def _connect(self, port: int) -> tuple[Any, Any]:
        import nats
        from nats.js.api import RetentionPolicy, StorageType

        client = await nats.connect(f"nats://127.0.0.1:{port}")
        stream = client.jetstream()
        await stream.add_stream(name=STREAM, subjects=["items"], storage=StorageType.FILE, retention=RetentionPolicy.WORK_QUEUE)
        return client, stream

    async def _disconnect(self, clients: list[Any], stream: Any) -> None:
        await stream.delete_stream(STREAM)
        for client in clients:
            await client.close()


def _rates(batch: int, produced: Repeated, leased: Repeated, completed: Repeated) -> dict[str, Rate]:
    verbs = {"produce": produced, "lease": leased, "complete": completed}
    return {verb: done.rate(batch * len(done.times)) for verb, done in verbs.items()}
