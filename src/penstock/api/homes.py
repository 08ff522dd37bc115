"""A `Home` for the async API.

Owns: `AsyncHome` and `open_async_home`. `Home` and `open_home` are re-exported: scripts/unasync.py replaces the async
names by them. Threads of the home answer operations, so the event loop is never blocked. Cancelling a task cancels the
operation it waits for.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from penstock.broker.targets import open_home
from penstock.operations import A, Home, Operation
from penstock.words.errors import InvalidRequest, PenstockError
from penstock.words.threads import InterruptSafeThread

__all__ = ["AsyncHome", "Home", "open_async_home", "open_home"]
T = TypeVar("T")


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
        await _run_in_thread(self.home.close)

    def __reduce__(self) -> tuple[type["AsyncHome"], tuple[Home]]:
        return AsyncHome, (self.home,)


async def open_async_home(target: Any, *, threaded: bool, **options: Any) -> AsyncHome:
    """Like `open_home`."""
    if not threaded:
        raise InvalidRequest("threaded is False, but the async API needs the broker's threads; leave it out, or use penstock.open")
    return AsyncHome(await _run_in_thread(partial(open_home, target, **options)))


async def _run_in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own.

    `asyncio.to_thread` is not possible after the end of the main thread, when other threads may still use the broker.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            resolve = partial(_set_error, ended, error)
        else:
            resolve = partial(_set_answer, ended, result)
        with suppress(RuntimeError):  # the event loop is closed, so no task waits for the result
            loop.call_soon_threadsafe(resolve)

    InterruptSafeThread(run)
    return await ended


def _set_answer(answered: "asyncio.Future[T]", answer: T) -> None:
    if not answered.done():
        answered.set_result(answer)


def _set_error(answered: "asyncio.Future[Any]", error: BaseException) -> None:
    if not answered.done():
        answered.set_exception(error)
