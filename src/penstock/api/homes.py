"""Homes as the two APIs use them: the sync one calls a `Home`, the async one an `AsyncHome`, whose calls wait in the event loop.

Owns: `AsyncHome` and `open_async_home`; `Home` and `open_home` are passed on, so that one API can be made from the other. Nothing blocks
the event loop: operations are answered by threads of the home. A task that is cancelled while it waits gives its place up.
"""

import asyncio
from typing import Any

from penstock.broker.targets import open_home
from penstock.operations import A, Home, Operation
from penstock.words.errors import InvalidRequest, PenstockError

__all__ = ["AsyncHome", "Home", "open_async_home", "open_home"]


class AsyncHome:
    """A home whose `call` is awaited."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.clock = home.clock

    async def call(self, operation: Operation[A], /) -> A:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[A | PenstockError] = loop.create_future()

        def done(answer: A | PenstockError) -> None:
            try:
                loop.call_soon_threadsafe(_tell, answered, answer)
            except RuntimeError:  # the event loop is closed: nobody waits any more
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


async def open_async_home(target: Any, *, threaded: bool, **options: Any) -> AsyncHome:
    """As `open_home`."""
    if not threaded:
        raise InvalidRequest("threaded is False, so that nobody would answer a task; leave it out, or use penstock.open")
    return AsyncHome(await asyncio.to_thread(open_home, target, **options))


def _tell(answered: "asyncio.Future[A | PenstockError]", answer: A | PenstockError) -> None:
    if not answered.done():
        answered.set_result(answer)
