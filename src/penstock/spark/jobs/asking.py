"""The owner of a broker's directory, asked to do something: this process, when nobody else is; else whoever is, through the inbox.

Owns: `Owner`. Either way the word goes through the inbox, so there is one way in which it is done.
"""

import os
import threading
from types import TracebackType
from typing import Any

import msgspec

from penstock.logs.drops import Drops
from penstock.logs.failures import storage_failed
from penstock.logs.files import SystemFiles
from penstock.service._sync.broker import Broker
from penstock.service._sync.broker import open as open_broker
from penstock.service.errands import Errand, Reply
from penstock.service.snapshot import Snapshot
from penstock.spark.home import Target
from penstock.words.clock import SECOND, SystemClock
from penstock.words.errors import BrokerLocked, OutcomeUnknown, StorageFailed

LOOK_SECONDS = 0.02
OPEN_AGAIN = 1 * SECOND
"""An owner may end while it is waited for: then this process takes over."""


class Owner:
    """Whoever owns a directory, as long as the block lasts."""

    def __init__(self, target: Target, timeout: float) -> None:
        self._target = target
        self._timeout = int(timeout * SECOND)
        self._drops = Drops(SystemFiles(), target[0])
        self._clock = SystemClock()
        self._pause = threading.Event()
        self._broker: Broker | None = None
        self._incarnations: dict[str, int] = {}

    def __enter__(self) -> "Owner":
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._broker is not None:
            self._broker.close()

    def ask(self, queue: str, verb: str, **args: Any) -> Any:
        """Have it done, and give what came of it. An owner that is silent too long: OutcomeUnknown; StorageFailed if nothing was begun."""
        incarnation, name = self._incarnation(queue), f"{verb}-{os.urandom(8).hex()}"
        try:
            self._drops.errand(incarnation, name, msgspec.msgpack.encode(Errand(verb, args)))
            raw = self._wait(incarnation, name)
            if raw is not None:
                self._drops.forget(incarnation, name)
                return msgspec.msgpack.decode(raw, type=Reply).result()
        except OSError as error:
            raise storage_failed(error, "asking the owner of", self._target[0]) from error
        raise OutcomeUnknown(f"the owner of {self._target[0]} took up the word and has not answered; look again what became of it")

    def settle(self) -> None:
        """Where this process is the owner: let what was sent arrive before it closes, as far as that comes soon."""
        deadline = self._clock.read().elapsed + self._timeout
        while self._broker is not None and self._clock.read().elapsed < deadline:
            if not any(self._broker.queue(name).stats().transfers for name in self._incarnations):
                return
            self._pause.wait(LOOK_SECONDS)

    def _wait(self, incarnation: int, name: str) -> bytes | None:
        started = self._clock.read().elapsed
        opened = started
        while True:
            raw = self._drops.answer(incarnation, name)
            now = self._clock.read().elapsed
            if raw is not None:
                return raw
            if now - opened >= OPEN_AGAIN and self._broker is None:
                opened = now
                self._open()
            if now - started >= self._timeout:
                return self._give_up(incarnation, name)
            self._pause.wait(LOOK_SECONDS)

    def _give_up(self, incarnation: int, name: str) -> bytes | None:
        waits = any(one.incarnation == incarnation and one.name == name for one in self._drops.waiting())
        self._drops.withdraw(incarnation, name)
        if waits and self._drops.answer(incarnation, name) is None:
            raise StorageFailed(
                f"the owner of {self._target[0]} did not take up the word within {self._timeout / SECOND:g} s; try again later"
            )
        return self._drops.answer(incarnation, name)

    def _open(self) -> None:
        try:
            self._broker = open_broker(self._target[0], roots=list(self._target[1:]))
        except BrokerLocked:
            self._broker = None

    def _incarnation(self, queue: str) -> int:
        if queue not in self._incarnations:
            with Snapshot.open(list(self._target)) as snapshot:
                self._incarnations[queue] = snapshot.find(queue).incarnation
        return self._incarnations[queue]
