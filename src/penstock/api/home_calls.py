"""Operations that tasks of an event loop send to a home.

Owns: `HomeCalls`. Operations that come in one round of the event loop are submitted together, so that they share turns
and syncs; the turn runs in the event loop's thread as far as no disk is waited for. Answers that another thread has
wake the event loop once, however many they are. Used by the async API and by the server.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import msgspec

from penstock.operations import A, AnswerCallback, AwaitItems, Cancel, Home, LeaseItems, Operation, submit_each
from penstock.words.errors import OutcomeUnknown, PenstockError


class ServedHome(Home, Protocol):
    """A home that takes many operations at once."""

    def submit_all(self, submitted: Sequence[tuple[Operation[Any], AnswerCallback]], /) -> list[Cancel]: ...


class HomeCall:
    """One operation, until its task has the answer."""

    __slots__ = ("_cancel", "answered", "cancelled")

    def __init__(self, answered: "asyncio.Future[Any]") -> None:
        self.answered = answered
        """Its result is the answer, or a PenstockError."""
        self._cancel: Cancel | None = None
        self.cancelled = False

    def submitted(self, cancel: Cancel) -> None:
        self._cancel = cancel
        if self.cancelled:
            cancel()

    def cancel(self) -> None:
        """Give the operation up, before or after its answer: items that were leased for it return to their queue."""
        self.cancelled = True
        if self._cancel is not None:
            self._cancel()

    def fail(self, error: PenstockError) -> None:
        """Give the operation up, and have its task raise this."""
        self.cancel()
        self.finish(error)

    def finish(self, answer: Any) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)


class HomeCalls:
    """Sends operations of an event loop's tasks to a home."""

    def __init__(self, home: Home) -> None:
        """Call it in the event loop."""
        self.home = home
        self.loop = asyncio.get_running_loop()
        self._submit_all: Callable[[Sequence[tuple[Operation[Any], AnswerCallback]]], list[Cancel]] = getattr(
            home, "submit_all", partial(submit_each, home.submit)
        )
        self._submits_in = 0  # the thread that submits operations now
        self._entered: list[tuple[Operation[Any], HomeCall]] = []
        self._answers: deque[tuple[HomeCall, Any]] = deque()
        """Answers of other threads."""
        self._woken = False
        self.draining = False
        """Whether nothing is waited for any more: a lease gets the items that are ready."""
        self._waiting: dict[HomeCall, Any] = {}
        """Calls that wait for items → the answer when none came."""

    async def call(self, operation: Operation[A], *, is_large: bool = False) -> A:
        """Wait for the answer. When the task is cancelled, the operation is. is_large: as in `start`."""
        answer: A = await self.wait(self.start(operation, is_large=is_large))
        return answer

    def start(self, operation: Operation[Any], *, is_large: bool = False) -> HomeCall:
        """Send an operation. is_large: its turn takes long; another thread runs it."""
        call = HomeCall(self.loop.create_future())
        if is_large:
            call.submitted(self.home.submit(operation, partial(self._answered, call)))
            return call
        if not self._entered:
            self.loop.call_soon(self._submit)
        self._entered.append((operation, call))
        return call

    def start_waiting(self, operation: LeaseItems | AwaitItems) -> HomeCall:
        """Send an operation that may wait for items. `stop_waiting` must follow."""
        if self.draining:
            operation = msgspec.structs.replace(operation, wait=0)
        call = self.start(operation)
        self._waiting[call] = [] if isinstance(operation, LeaseItems) else False
        return call

    def stop_waiting(self, call: HomeCall) -> None:
        self._waiting.pop(call, None)

    def end_waiting(self) -> int:
        """Answer all calls that wait for items as if their wait was over, now and later; gives how many there were."""
        self.draining = True
        ended = [(call, answer) for call, answer in self._waiting.items() if not call.answered.done()]
        for call, answer in ended:
            call.cancel()  # items that were leased for it meanwhile return to their queue
            call.finish(answer)
        return len(ended)

    async def wait(self, call: HomeCall) -> Any:
        try:
            answer = await call.answered
        except asyncio.CancelledError:
            call.cancel()
            raise
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    def _submit(self) -> None:
        entered, self._entered = self._entered, []
        sent = [(operation, call) for operation, call in entered if not call.cancelled and not call.answered.done()]
        self._submits_in = get_ident()
        try:
            cancels = self._submit_all([(operation, partial(self._answered, call)) for operation, call in sent])
        except PenstockError as error:  # the home is closed
            for _, call in sent:
                call.finish(error)
        except BaseException as error:  # an interrupt, or a bug
            for _, call in sent:
                call.finish(OutcomeUnknown(f"the call was interrupted ({type(error).__name__}); repeat with the same request id"))
            raise
        else:
            for (_, call), cancel in zip(sent, cancels, strict=True):
                call.submitted(cancel)
        finally:
            self._submits_in = 0

    def _answered(self, call: HomeCall, answer: Any) -> None:
        """Take an answer, from any thread."""
        if get_ident() == self._submits_in:
            call.finish(answer)
            return
        self._answers.append((call, answer))
        if not self._woken or self.loop.is_closed():
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop is closed, so no task waits for the answers
                while self._answers:
                    with suppress(IndexError):  # another thread took it
                        self._answers.popleft()[0].cancel()

    def _deliver(self) -> None:
        self._woken = False  # before the answers are taken: one that comes now wakes the event loop again
        while self._answers:
            call, answer = self._answers.popleft()
            call.finish(answer)
