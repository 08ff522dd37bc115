"""The queues of a broker at work, as they are looked at.

Owns: `Live`. Questions are answered inside a turn of the queue; a log, which may be long, is read beside its turns.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.broker import admin, tracing
from penstock.logs.store import Store
from penstock.loop.loop import Loop
from penstock.loop.requests import Do
from penstock.rules.events import Event
from penstock.words.errors import QueueNotFound


class Live:
    """A tracing.Source over loops."""

    def __init__(self, loop_of: Callable[[int], Loop], store: Store) -> None:
        """`loop_of` gives the loop of an incarnation, or raises QueueNotFound."""
        self._loop_of = loop_of
        self._store = store

    def look(self, incarnation: int, verb: str, **args: Any) -> Any:
        return self._loop_of(incarnation).call(Do(partial(admin.run, verb=verb, args=args), opens=not admin.needs_nothing_open(verb, args)))

    def name_of(self, incarnation: int) -> str | None:
        try:
            return self._loop_of(incarnation).turns.name
        except QueueNotFound:
            return None

    def told_of(self, incarnation: int, partition: int, offset: int) -> Sequence[Event]:
        self.look(incarnation, "publish", partition=partition)
        return tracing.read(self._store.reader(incarnation, partition), offset)
