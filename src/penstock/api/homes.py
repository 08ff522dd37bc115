"""A `Home` for the async API.

Owns: `AsyncHome` and `open_async_home`. `Home` and `open_home` are re-exported: scripts/unasync.py replaces the async
names by them. The event loop never waits for a disk or for another thread: small operations run in its own thread up
to the point where a disk must be waited for; threads of the home do the rest (home_calls.py). Cancelling a task cancels
the operation it waits for.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from penstock.api.home_calls import HomeCalls
from penstock.broker.targets import open_home
from penstock.operations import A, AwaitItems, Home, LeaseItems, Operation, ProduceItems, SettleItems
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MIB
from penstock.words.threads import InterruptSafeThread

__all__ = ["AsyncHome", "Home", "open_async_home", "open_home"]
SMALL_ITEMS = 2_000
SMALL_BYTES = 1 * MIB
"""An operation with more items or bytes is run by another thread, so that other tasks run meanwhile."""
T = TypeVar("T")


class AsyncHome:
    """A home whose `call` and `close` are coroutines. May be used in several event loops."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.clock = home.clock
        self._last_calls: HomeCalls | None = None
        self._calls: dict[asyncio.AbstractEventLoop, HomeCalls] = {}

    async def call(self, operation: Operation[A], /) -> A:
        calls = self._last_calls
        if calls is None or calls.loop is not asyncio.get_running_loop():
            calls = self._last_calls = self._running_calls()
        return await calls.call(operation, is_large=not _is_small(operation))

    def _running_calls(self) -> HomeCalls:
        """The calls of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._calls.get(loop)
        if found is None:
            for closed in [one for one in list(self._calls) if one.is_closed()]:
                self._calls.pop(closed, None)
            found = self._calls[loop] = HomeCalls(self.home)
        return found

    async def close(self) -> None:
        await _run_in_thread(self.home.close)

    def __reduce__(self) -> tuple[type["AsyncHome"], tuple[Home]]:
        return AsyncHome, (self.home,)


def _is_small(operation: Operation[Any]) -> bool:
    """Whether the event loop may run it: it takes about as long as making it took."""
    kind = type(operation)
    if kind is ProduceItems:
        payloads = operation.batch.payloads  # type: ignore[attr-defined]
        return len(payloads) == 1 or (type(payloads) is list and len(payloads) <= SMALL_ITEMS and sum(map(len, payloads)) <= SMALL_BYTES)
    if kind is LeaseItems:
        return operation.count <= SMALL_ITEMS  # type: ignore[attr-defined, no-any-return]
    if kind is SettleItems:
        return not operation.then and len(operation.parts) <= SMALL_ITEMS  # type: ignore[attr-defined]
    return kind is AwaitItems


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
