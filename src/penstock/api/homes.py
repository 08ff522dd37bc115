"""A `Home` for the async API.

Owns: `AsyncHome` and `open_async_home`. `Home` and `open_home` are re-exported: scripts/unasync.py replaces the async
names by them. Threads of the home answer operations, so the event loop is never blocked. Cancelling a task cancels the
operation it waits for.
"""

import asyncio
from typing import Any

from penstock.broker.targets import open_home
from penstock.operations import A, Home, Operation
from penstock.words.errors import InvalidRequest, PenstockError

__all__ = ["AsyncHome", "Home", "open_async_home", "open_home"]


class AsyncHome:
    """A home whose `call` and `close` are coroutines."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.clock = home.clock

    async def call(self, operation: Operation[A], /) -> A:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[A | PenstockError] = loop.create_future()

        def done(answer: A | PenstockError) -> None:
            try:
                loop.call_soon_threadsafe(_set_answer, answered, answer)
            except RuntimeError:  # the event loop is closed, so no task waits for the answer
                cancel()

        cancel = self.home.submit(operation, done)
        try:
            answer = await answered
        except BaseException:
            cancel()
            raise
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    async def close(self) -> None:
        await asyncio.to_thread(self.home.close)

    def __reduce__(self) -> tuple[type["AsyncHome"], tuple[Home]]:
        return AsyncHome, (self.home,)


async def open_async_home(target: Any, *, threaded: bool, **options: Any) -> AsyncHome:
    """Like `open_home`."""
    if not threaded:
        raise InvalidRequest("threaded is False, but the async API needs the broker's threads; leave it out, or use penstock.open")
    return AsyncHome(await asyncio.to_thread(open_home, target, **options))


def _set_answer(answered: "asyncio.Future[A | PenstockError]", answer: A | PenstockError) -> None:
    if not answered.done():
        answered.set_result(answer)
