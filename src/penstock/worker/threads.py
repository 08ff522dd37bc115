"""Handlers in threads.

Owns: `ThreadPlaces`. The plain loop is for a handler that takes nothing but the item, without hooks and without a time limit: what it does
besides calling the handler is a few steps an item. Everything else goes through `Caller`.
With a `handler_timeout` a thread watches the others. A thread cannot be stopped, so a handler that runs over is left behind: its items go
back, what it does later is not looked at, and another thread takes its place, as long as not too many were left behind.
"""

import threading
from collections.abc import Callable
from typing import Any

from penstock.api.items import Item
from penstock.words.clock import SECOND
from penstock.worker.bell import Bell
from penstock.worker.calling import Caller, wrong_result
from penstock.worker.context import Context
from penstock.worker.line import RunLine
from penstock.worker.places import Places
from penstock.worker.settings import Settings
from penstock.worker.shelf import Waiting
from penstock.worker.verdicts import RETURNED, Verdict


class Slot:
    """What one thread is at."""

    __slots__ = ("context", "left_behind")

    def __init__(self) -> None:
        self.context: Context | None = None
        self.left_behind = False


class ThreadPlaces(Places):
    """Threads that call handlers."""

    def __init__(
        self, settings: Settings, shelf: Waiting, caller: Caller, line: RunLine, hungry: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        super().__init__(settings.concurrency, shelf, hungry, ended)
        self._settings = settings
        self._caller = caller
        self._line = line
        self._slots: set[Slot] = set()
        self._left_behind = 0
        self._watch = Bell()
        if settings.handler_timeout:
            line.on_extended = lambda _: self._watch.ring()
            threading.Thread(target=self._look_after, name="penstock watch", daemon=True).start()

    def close(self) -> None:
        super().close()
        self._watch.ring()

    def _work(self) -> bool:
        handle = self._caller.simple
        if handle is not None:
            self._plainly(handle)
            return False
        slot = Slot()
        self._slots.add(slot)
        try:
            self._fully(slot)
        finally:
            self._slots.discard(slot)
        return slot.left_behind

    def _plainly(self, handle: Callable[[Item], Any]) -> None:
        shelf, now = self.shelf, self._line.now
        take, finished = shelf.take, shelf.finished if shelf.counting else None
        stride = left = 1
        since = now()
        while True:
            try:
                pair = take()
            except IndexError:
                if not self._sleep():
                    return
                stride = left = 1
                since = now()
                continue
            try:
                result = handle(pair[1])
                if result is not None and (error := wrong_result(result, False)) is not None:
                    raise error
            except BaseException as error:
                pair[0].settler.settle(pair, self._caller.judge(pair[1], error))
            else:
                settler = pair[0].settler
                settler.completed.append(pair)
                if not settler.bell.rung:
                    settler.bell.ring()
            if finished is not None:
                finished(pair)
            left -= 1
            if not left:
                at = now()
                left = stride = self._note(stride, at - since)
                since = at
                self.hungry()

    def _fully(self, slot: Slot) -> None:
        now, batch = self._line.now, self._settings.batch or 1
        while not slot.left_behind:
            try:
                pairs = self.shelf.take_many(batch)
            except IndexError:
                if not self._sleep():
                    return
                continue
            since = now()
            for handler, context in self._line.contexts(pairs):
                if slot.left_behind:
                    self._line.settle(context, [RETURNED] * len(context.items))
                    continue
                slot.context = context
                verdicts = self._caller.call(context, handler)
                slot.context = None
                if verdicts is not None:
                    self._line.settle(context, verdicts)
            self._note(1, now() - since)
            self.hungry()
        with self._changing:
            self._left_behind -= 1

    # -- the watch -------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Find handlers that run over, for as long as there are any."""
        while not (self.closing and self._over):
            now = self._line.now()
            ends = [now + self._settings.handler_timeout]
            for slot in list(self._slots):
                context = slot.context
                if context is None or not context.deadline or context.cancelled:
                    continue
                if context.deadline > now:
                    ends.append(context.deadline)
                elif (verdicts := self._caller.end(context, error=self._caller.ran_over())) is not None:
                    self._ran_over(slot, context, verdicts)
            self._watch.wait((min(ends) - now) / SECOND)

    def _ran_over(self, slot: Slot, context: Context, verdicts: list[Verdict]) -> None:
        with self._changing:
            replaced = self.closing or self._left_behind < self.most
            if replaced:
                slot.left_behind = True
                self._left_behind += 1
        self._line.settle(context, verdicts)
        if replaced:
            self._count(1)
            self.hungry()
            self.spread()
