"""The loop: who runs a queue's turns, and how callers reach them.

Owns: `Loop`. Group commit by flat combining: a caller puts its request into the inbox and, if nobody runs a turn, runs one itself, with
everything that waits; else it sleeps until its answer is there or it is woken to lead the next turn. So a lone caller never changes
threads, and many share one sync. One runner thread, begun when first needed, runs turns when something comes due, for those who cannot
run one themselves (`submit`: async callers, other queues) and for those who wait.
Every request ends: by its answer, by its deadline, when its caller is gone, or at shutdown.
Without threads (`threaded=False`) nothing runs by itself: whoever holds the loop calls `turn`, which is how simulations drive it.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from penstock.loop.inbox import Inbox, closed
from penstock.loop.meter import Meter
from penstock.loop.requests import Lease, Request, Watch
from penstock.loop.turn import Turns
from penstock.words.clock import SECOND
from penstock.words.errors import BrokerClosed, OutcomeUnknown, PenstockError, QueueBusy

TAKE = 1_000
"""Requests of one turn."""
GRACE = 5 * SECOND
"""A waiting request is answered by the turn in which its deadline passes; after this its caller gives up on that."""
IDLE_SECONDS = 60.0
GATHER_SECONDS = 0.0001
"""How long a turn waits for a crowd to gather, when it will sync: a part of what that takes."""
_log = logging.getLogger("penstock")


class Loop:
    """One queue at work."""

    def __init__(self, turns: Turns, *, threaded: bool = True) -> None:
        self.turns = turns
        self.meter = Meter()
        self._inbox = Inbox(turns.name)
        self._turning = threading.RLock()  # never taken twice: it can say who has it
        self._starting = threading.Lock()
        self._threaded = threaded
        self._runner: threading.Thread | None = None
        self._alarm: SimpleQueue[None] = SimpleQueue()
        self._wakes_at: int | None = None
        self._crowd = 0  # requests in the last turn
        self._gathering: SimpleQueue[None] = SimpleQueue()  # always empty: waiting for it lets others run
        self._closed = False
        turns.post = self._post
        turns.put_back = self._inbox.put_back

    # -- for callers ---------------------------------------------------------------------------------

    def call(self, request: Request) -> Any:
        """Put a request and wait for its answer; the calling thread runs the turn if nobody else does."""
        if self._leads():
            raise QueueBusy("called in the middle of a turn (from a signal handler?); try again when it has returned")
        request.make_gate()
        self._enter(request)
        try:
            while not request.done:
                if self._turning.acquire(blocking=False):
                    try:
                        self._lead(request)
                    finally:
                        self._turning.release()
                    self._pass_on()
                    if request.done:
                        break
                self._sleep(request)
        except BaseException:
            while self._leads():  # an interrupt may come between taking the turn and the `try`
                self._turning.release()
            self.cancel(request)
            self.wake()  # it may have been this one's turn to lead
            raise
        return request.result()

    def submit(self, request: Request) -> None:
        """Put a request; `request.on_done` is called with its answer, by whichever thread has it."""
        self._enter(request)
        self.wake()

    def cancel(self, request: Request) -> None:
        """The caller is gone: its place is free, and what a turn has leased to it meanwhile goes back."""
        request.gone = True
        if not request.claim() and request.done and isinstance(request, Lease) and request.answer:
            with suppress(BrokerClosed):
                self.turns.settling.give_back(request.answer)
        self.turns.leasing.left = self.turns.again = True  # the next turn frees its place
        self.wake()

    def _enter(self, request: Request) -> None:
        if self._closed:
            raise closed(self.turns.name)
        request.check()
        turns = self.turns
        request.entered_at = now = turns.clock.read().elapsed
        if request.deadline:  # a late lease still gets what is there; and everybody is given the time for one turn
            request.give_up_at = request.deadline + GRACE if isinstance(request, Lease | Watch) else max(request.deadline, now + SECOND)
        held = len(turns.leasing.waiting) + len(turns.producing.waiting) + len(turns.watching)
        self._inbox.enter(request, held)

    def _post(self, request: Request) -> None:
        """A message of the queue's own, or of another queue: never refused while the loop is open."""
        if self._closed:
            raise closed(self.turns.name)
        request.entered_at = self.turns.clock.read().elapsed
        self._inbox.post(request)
        self.wake()

    post = _post

    def _sleep(self, request: Request) -> None:
        """Until there is an answer, or it is time to lead, or to give up."""
        if not request.give_up_at:
            request.sleep(IDLE_SECONDS)
            return
        left = request.give_up_at - self.turns.clock.read().elapsed
        if left > 0:
            request.sleep(left / SECOND)
        elif request.claim():
            request.gone = True
            request.finish(error=late(self.turns.name))
            self.wake()  # it may have been this one's turn to lead
        elif left > -GRACE:  # the turn that has it will answer
            request.sleep((left + GRACE) / SECOND)
        else:
            request.gone = True
            request.finish(error=OutcomeUnknown("the answer did not come in time; repeat with the same request id"))

    # -- turns ---------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Run one turn by hand; whether there is more to do at once."""
        with self._turning:
            self._turn()
        return self.busy

    @property
    def busy(self) -> bool:
        """Whether a turn now would find something to do."""
        return self.turns.again or len(self._inbox) > 0

    def _lead(self, request: Request) -> None:
        """Run turns until this caller's request is answered or has to wait for something."""
        while True:
            self._turn()
            if request.done or (request.taken and not self.turns.again):
                return

    def _leads(self) -> bool:
        """Whether this thread has the turn."""
        owned: bool = getattr(self._turning, "_is_owned")()  # noqa: B009 (not in the type stubs)
        return owned

    def _turn(self) -> None:
        taken: list[Request] = []
        try:
            self._take_and_turn(taken)
        except BaseException as error:
            self.turns.rescue(taken, error)
            raise

    def _take_and_turn(self, taken: list[Request]) -> None:
        turns = self.turns
        if self._crowd > 2 and len(self._inbox) < self._crowd and turns.synced:
            with suppress(Empty):  # those who were just answered are about to ask again: one sync for all of them
                self._gathering.get(timeout=GATHER_SECONDS)
        self._inbox.take(TAKE, taken)
        self._crowd = len(taken)
        now = turns.clock.read().elapsed
        for request in taken:
            if request.give_up_at and now > request.give_up_at and not isinstance(request, Lease | Watch):
                request.finish(error=late(turns.name))
        before = turns.produced
        turns.turn([request for request in taken if not request.done] if taken else taken, now)
        if taken or turns.answered:
            self.meter.turn(taken, turns.answered, turns.clock.read().elapsed, turns.produced - before)

    def _pass_on(self) -> None:
        """After a turn: somebody must lead the next one, if there is a reason for it, now or later."""
        if self._inbox and self._inbox.wake_one():
            return
        if self.busy:
            self.wake()
            return
        next_run = self.turns.next_run
        if next_run is not None and (self._wakes_at is None or next_run < self._wakes_at):
            self.wake()

    # -- the runner ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the runner look what there is to do."""
        if not self._threaded or self._closed:
            return
        if self._runner is None:
            with self._starting:
                if self._runner is None and not self._closed:
                    runner = threading.Thread(target=self._run, name=f"penstock {self.turns.name}", daemon=True)
                    self._wakes_at = 0
                    runner.start()
                    self._runner = runner
        self._alarm.put(None)

    def _run(self) -> None:
        while not self._closed:
            self._wakes_at = None  # who plans something from here on rings
            self._wakes_at = self.turns.next_run
            if not self.busy:
                self._rest()
            self._wakes_at = 0
            with suppress(Empty):
                while True:
                    self._alarm.get_nowait()
            try:
                with self._turning:
                    if not self._closed:
                        self._turn()
            except Exception:  # the turn has told its callers and set its partitions aside; the next one may do better
                _log.exception("a turn of queue %r went wrong", self.turns.name)
            self._hand_over()

    def _rest(self) -> None:
        """Sleep until something comes due or somebody calls."""
        seconds = IDLE_SECONDS
        if self._wakes_at is not None:
            seconds = min(seconds, max(0.0, (self._wakes_at - self.turns.clock.read().elapsed) / SECOND))
        with suppress(Empty):
            self._alarm.get(timeout=seconds)

    def _hand_over(self) -> None:
        """A caller that sleeps with its request in the inbox leads its own turn."""
        if self._inbox:
            self._inbox.wake_one()

    # -- the end -------------------------------------------------------------------------------------

    def inspect(self, look: Callable[[Turns], Any]) -> Any:
        """Run a function between two turns, without one."""
        with self._turning:
            return look(self.turns)

    def close(self, error: PenstockError | None = None) -> None:
        """Answer everyone, make everything durable, let go. Who still waits gets `error`."""
        if self._closed:
            return
        self._inbox.closed = True
        with self._turning:
            try:
                while self._inbox:  # who came before the end is served, if it can be at once
                    with suppress(PenstockError):
                        self._turn()
            finally:
                self._closed = True
                self.turns.refuse_all(error or closed(self.turns.name))
                self._alarm.put(None)
                self.turns.close()
        with self._starting:
            runner = self._runner
        if runner is not None and runner is not threading.current_thread():
            runner.join()

    def abandon(self) -> None:
        """In a forked child: this loop is its parent's."""
        self._closed = True
        self._inbox.closed = True

    def __repr__(self) -> str:
        return f"Loop({self.turns.name!r}, {len(self.turns.members)} partitions{', closed' if self._closed else ''})"


def late(name: str) -> QueueBusy:
    return QueueBusy(f"queue {name!r} did not get to the request in time; nothing was done, try again in a moment")
