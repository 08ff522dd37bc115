"""Helpers that run one set of tests against the sync and the async API.

Owns: `SyncAdapter`, which lets a test use an object of the async API like one of the sync API, and `BrokerOpener`.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, cast

import penstock
from penstock import Broker
from penstock.broker.embedded import EmbeddedBroker
from penstock.testing.clock import MicrosecondClock

ADAPTED = (penstock.AsyncBroker, penstock.AsyncQueue, penstock.AsyncLease, penstock.AsyncLeaseBatch, penstock.AsyncCursor)
WAIT = 20.0
"""Seconds to wait for something that will happen. Only a failing test waits this long."""

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class SyncAdapter:
    """An object of the async API whose methods block."""

    def __init__(self, run: Run, target: Any) -> None:
        self._run = run
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return self._adapted(getattr(self._target, name))

    def _adapted(self, found: Any) -> Any:
        """The result of an attribute or call, usable without `await`."""
        if isinstance(found, ADAPTED):
            return SyncAdapter(self._run, found)
        if asyncio.iscoroutine(found):
            return self._adapted(self._run(found))
        if callable(found) and hasattr(found, "__self__"):
            return lambda *args, **named: self._adapted(
                found(*map(unadapted, args), **{name: unadapted(arg) for name, arg in named.items()})
            )
        return found

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._target, penstock.AsyncLeaseBatch):
            return map(self._adapted, self._target)
        return self

    def __next__(self) -> Any:
        try:
            return self._run(self._target.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __getitem__(self, index: Any) -> Any:
        found = self._target[index]
        return [self._adapted(one) for one in found] if isinstance(index, slice) else self._adapted(found)

    def __len__(self) -> int:
        return len(self._target)

    def __enter__(self) -> Any:
        return self._adapted(self._target.__aenter__())

    def __exit__(self, *error: Any) -> Any:
        return self._run(self._target.__aexit__(*error))

    def __repr__(self) -> str:
        return repr(self._target).removeprefix("Async")


def unadapted(given: Any) -> Any:
    """The object of the async API that an adapter wraps; other values unchanged."""
    if isinstance(given, SyncAdapter):
        return given._target
    return [unadapted(one) for one in given] if isinstance(given, list) else given


class BrokerOpener:
    """Opens brokers on one target, one after the other, with one of the two APIs."""

    def __init__(self, target: str, is_async: bool, stack: ExitStack) -> None:
        self.target = target
        self._runner = stack.enter_context(asyncio.Runner()) if is_async else None
        self.clock = MicrosecondClock()
        self._opened: list[Broker] = []
        stack.callback(self.close)

    def open(self, **options: Any) -> Broker:
        if self._runner is None:
            broker = penstock.open(self.target, **options)
        else:
            broker = cast(Broker, SyncAdapter(self._runner.run, self._runner.run(penstock.aopen(self.target, **options))))
        self._opened.append(broker)
        return broker

    def close(self) -> None:
        """Close every broker that was opened here."""
        for broker in self._opened:
            broker.close()

    def open_with_manual_clock(self, **options: Any) -> Broker:
        """A broker with a manual clock, which only `clock.advance` moves. Calls that wait cannot be used."""
        return self.open(clock=self.clock, **options)


def run_all_turns(broker: Broker) -> None:
    """Run turns until no queue has anything to do now. For brokers opened with threaded=False."""
    embedded = broker._home
    assert isinstance(embedded, EmbeddedBroker)
    loops = embedded.loops()
    while busy := [loop for loop in loops if loop.busy]:
        for loop in busy:
            loop.turn()
