"""How the public API reaches a broker in this process: waiting in the calling thread, or in an event loop.

Owns: `SyncPort` and `AsyncPort`, which have the same methods. The async one never blocks its event loop: requests are answered by the
queue's own thread, everything else runs in a thread of asyncio's. A task that is cancelled while it waits gives its place up.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.broker.embedded import Embedded
from penstock.loop.requests import Request
from penstock.words.errors import InvalidRequest

T = TypeVar("T")


class SyncPort:
    """Calls wait in the calling thread."""

    def __init__(self, broker: Embedded) -> None:
        self.broker = broker
        self.now = broker.now
        """Elapsed microseconds, for deadlines."""
        self.call = broker.call
        """Put a request to the queue of an incarnation, and wait for its answer."""
        self.ask = broker.ask
        """Put an operator's question to it."""

    @classmethod
    def open(cls, target: Any, **options: Any) -> "SyncPort":
        return cls(Embedded.open(target, **options))

    def wall(self) -> int:
        """Microseconds since 1970."""
        return self.broker.clock.read().wall

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function that may block."""
        return function(*args)


class AsyncPort:
    """Calls wait in the event loop that runs."""

    def __init__(self, broker: Embedded) -> None:
        self.broker = broker
        self.now = broker.now

    @classmethod
    async def open(cls, target: Any, *, threaded: bool, **options: Any) -> "AsyncPort":
        if not threaded:
            raise InvalidRequest("threaded is False, so that nobody would answer a task; leave it out, or use penstock.open")
        return cls(await asyncio.to_thread(Embedded.open, target, **options))

    def wall(self) -> int:
        return self.broker.clock.read().wall

    async def call(self, incarnation: int, request: Request) -> Any:
        loop = asyncio.get_running_loop()
        answered = loop.create_future()

        def tell(_: Request) -> None:
            try:
                loop.call_soon_threadsafe(_mark, answered)
            except RuntimeError:  # the event loop is closed: nobody waits any more
                self.broker.cancel(incarnation, request)

        request.on_done = tell
        self.broker.submit(incarnation, request)
        try:
            await answered
        except BaseException:
            self.broker.cancel(incarnation, request)
            raise
        return request.result()

    async def ask(self, incarnation: int, verb: str, **args: Any) -> Any:
        return await asyncio.to_thread(self.broker.ask, incarnation, verb, **args)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.to_thread(function, *args)


def _mark(answered: "asyncio.Future[None]") -> None:
    if not answered.done():
        answered.set_result(None)
