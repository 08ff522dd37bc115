"""Calling handlers: from items in hand to what becomes of each.

Owns: `Caller`. The same for threads, tasks and processes: `begin`, then the handler, then `end`. No handler's error gets out of here, nor a
hook's.
"""

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from penstock.api.items import Item
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest
from penstock.worker.context import Context
from penstock.worker.handlers import Handler, Handlers
from penstock.worker.settings import Settings
from penstock.worker.verdicts import DONE, Bury, Failed, Retry, Snooze, Verdict, Worded, judge, of_a_batch

_log = logging.getLogger("penstock.worker")


def chance() -> float:
    return os.urandom(1)[0] / 255


class RanOver(Worded, TimeoutError):
    """A handler took more time than it may."""


class Caller:
    """Handlers and the way a worker calls them."""

    def __init__(self, handlers: Handlers, settings: Settings, now: Callable[[], int]) -> None:
        self.handlers = handlers
        self.hooks = settings.hooks
        self._settings = settings
        self._now = now
        self._timed = settings.hooks.finished is not None or settings.handler_timeout > 0

    @property
    def simple(self) -> Callable[[Item], Any] | None:
        """The handler itself, if nothing has to be done before and after but what `judge` does."""
        settings = self._settings
        if settings.batch or settings.handler_timeout or settings.hooks.any_per_item:
            return None
        alone = self.handlers.alone
        return None if alone is None else alone.function

    # -- one call ------------------------------------------------------------------------------------

    def call(self, context: Context, handler: Handler) -> list[Verdict] | None:
        """Run a handler in this thread; what becomes of each item, or None if that was decided meanwhile."""
        self.begin(context)
        try:
            result = handler(self.given(context), context)
        except BaseException as error:
            return self.end(context, error=error)
        return self.end(context, result)

    def given(self, context: Context) -> Any:
        """What the handler is called with."""
        return list(context.items) if self._settings.batch else context.items[0]

    def begin(self, context: Context) -> None:
        if self._timed:
            context.began = self._now()
            if self._settings.handler_timeout:
                context.deadline = context.began + self._settings.handler_timeout
        if self.hooks.started is not None:
            for item in context.items:
                self.tell(self.hooks.started, item)

    def end(self, context: Context, result: object = None, error: BaseException | None = None) -> list[Verdict] | None:
        """What becomes of each item of a call that gave this result, or raised this error."""
        if not context.claim():
            return None
        if error is None and result is not None:
            error = wrong_result(result, bool(self._settings.batch))
        if error is None:
            verdicts = [DONE] * len(context.items)
        elif isinstance(error, Failed):
            verdicts = self._partly(context.items, error)
        else:
            verdicts = [self.judge(item, error) for item in context.items]
        return self._tell_finished(context, verdicts)

    def over(self, context: Context, verdicts: list[Verdict]) -> list[Verdict]:
        """As `end`, of a call that somebody else has judged."""
        context.claim()
        return self._tell_finished(context, verdicts)

    def _tell_finished(self, context: Context, verdicts: list[Verdict]) -> list[Verdict]:
        if self.hooks.finished is not None:
            seconds = (self._now() - context.began) / SECOND
            for item, verdict in zip(context.items, verdicts, strict=True):
                self.tell(self.hooks.finished, item, seconds, verdict.outcome)
        return verdicts

    def ran_over(self) -> "RanOver":
        return RanOver(f"the handler ran longer than {self._settings.handler_timeout / SECOND:g} s")

    # -- what becomes of items -----------------------------------------------------------------------

    def judge(self, item: Item, error: BaseException) -> Verdict:
        """What becomes of an item whose handler raised this."""
        verdict = judge(error, item.attempts, self._settings.retry, chance)
        self.failed(item, verdict, error)
        return verdict

    def failed(self, item: Item, verdict: Verdict, error: BaseException) -> None:
        """Let it be known."""
        meant = isinstance(error, Retry | Bury | Snooze)
        delay = f" in {verdict.delay / SECOND:.1f} s" if verdict.delay else ""
        said = "item %s failed at attempt %d and is %s%s: %s"
        trace = None if meant or error.__traceback__ is None else error
        level = logging.DEBUG if meant else logging.WARNING
        _log.log(level, said, item.id, item.attempts, verdict.outcome, delay, verdict.reason, exc_info=trace)
        if self.hooks.failed is not None:
            self.tell(self.hooks.failed, item, error)

    def _partly(self, items: Sequence[Item], failed: Failed) -> list[Verdict]:
        try:
            errors = of_a_batch(failed, [item.id for item in items])
        except InvalidRequest as error:
            return [self.judge(item, error) for item in items]
        return [self.judge(item, errors[place]) if place in errors else DONE for place, item in enumerate(items)]

    def tell(self, hook: Callable[..., object], *told: object) -> None:
        try:
            hook(*told)
        except Exception:
            _log.exception("a hook of the worker went wrong; the work goes on")


def wrong_result(result: object, batch: bool) -> BaseException | None:
    """What a handler returned is its own business, unless it is a failure, or the work itself that nobody has done."""
    if isinstance(result, Failed) and batch:
        return result
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        return InvalidRequest("the handler returned something to await, which nobody does; declare it with async def")
    return None
