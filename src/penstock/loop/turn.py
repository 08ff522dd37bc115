"""The turn: everything a queue does, one thing at a time.

Owns: `QueueEngine`, a queue's partitions and what they do with a batch of requests:
    reshape → fences → visit what is due → settle → transfers → produce → an operator's word → deal to those who wait
    → commit side by side → answer
No answer leaves before the commit of every partition it rests on; a partition that fails fails only its own part of each answer.
A turn that is broken off by an interrupt in the thread that runs it is undone, and its requests are run again by the next turn; if its
commit had begun, that is finished instead. So one caller's Ctrl-C changes nothing for the others.
Single-threaded: whoever runs the turn. Who that is, is loop.py's business.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from penstock.loop import requests
from penstock.loop.commits import CommitTracker
from penstock.loop.partition import Partition
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_set import QueueSetup
from penstock.loop.requests import PartitionsNotOpen, Request
from penstock.loop.transfer import QueueRouter
from penstock.rules.commands import ExtendLease
from penstock.words.clock import SECOND
from penstock.words.errors import OutcomeUnknown, PenstockError, QueueBusy
from penstock.words.ids import format_id

_log = logging.getLogger("penstock")
REDOS = 3
"""How often a request is run again after its turn was undone. More than that is a mistake of ours, not a row of interrupts."""
DUE_ITEMS = 2_000
"""Items that come due in one partition in one turn; the rest waits for the next, so that others have theirs in between."""


class QueueEngine(CommitTracker):
    """A queue's partitions, and the requests of the turn that is being run."""

    def __init__(self, setup: QueueSetup, office: QueueRouter) -> None:
        super().__init__(setup, office)
        self.next_run: int | None = None
        """When the queue wants a turn, if nobody asks before."""
        self.buried_dropped = 0
        """Buried items that retention took since the queue was opened."""
        self.waiting_for_items: list[requests.AwaitRequest] = []
        self.apply_recorded_shape: Callable[[], None] = lambda: None
        """Does what a resize recorded and an interrupt kept from being done."""
        self.auto_extended_leases: dict[tuple[int, int], None] = {}
        """(partition, lease) of holders inside this process, who are still at work. Changed from any thread."""
        self.requeue: Callable[[Sequence[Request]], None] = lambda requests: None
        """Puts requests of a turn that was undone back into the inbox."""
        self.deferred: list[Request] = []
        """Requests that wait for a partition to land."""
        self._running: Sequence[Request] = []
        """Requests that this turn took up, deferred ones among them."""
        self._blocked = False
        """Whether somebody waits for all partitions to land: nothing is given out meanwhile."""
        self._steps: dict[type[Request], Callable[[Any], None]] = {
            requests.ResizeRequest: self._do,
            requests.SettleRequest: self.settle_step.run,
            requests.ConfirmRequest: self.transfer_step.confirm,
            requests.DeliverRequest: self.transfer_step.deliver,
            requests.ProduceRequest: self.produce_step.run,
            requests.FunctionRequest: self._do,
            requests.LeaseRequest: self.lease_step.run,
            requests.AwaitRequest: self.waiting_for_items.append,
        }
        self._order = {kind: place for place, kind in enumerate(self._steps)}

    # -- the turn ------------------------------------------------------------------------------------

    def turn(self, taken: Sequence[Request], now: int) -> None:
        """Do all of it. Every request of `taken` is answered when this returns, or waits here: in line, deferred, or for a commit."""
        self.now = now
        self.wants_turn = False
        self.answered = []
        self._departing = False
        self._running = []
        requests_now: Sequence[Request] = taken
        try:
            if self.io_finished:
                self._land()
            if self._recovered:
                self._welcome()
            if self.to_open:
                self._open()
            if self._next_visit is not None and now >= self._next_visit:
                self._open_due()
            if self.handles_in_io:
                self._grow_slow()
            requests_now = self._runnable(taken) if self.handles_in_io or self.deferred or self.closed else self._in_order(taken)
            if self.to_open:
                self._open()
            if self.partitions_to_add and not any(isinstance(one, requests.ResizeRequest) for one in (*requests_now, *self.deferred)):
                self._drop_newcomers()
            if any(type(request) is requests.ResizeRequest for request in requests_now):
                requests_now = self._reshape(requests_now)
            self.apply_recorded_shape()
            if self.resize_step.in_progress:
                self.resize_step.advance_fences()  # before anything else: on what is committed
                if self.resize_step.putting_up_fences:
                    requests_now = self._without_produces(requests_now)
            if self._next_visit is not None and now >= self._next_visit:
                self._visit()
            for request in requests_now:
                self.attempt(request, self._steps[type(request)])
            if self.produce_step.waiting and not self.resize_step.putting_up_fences:
                self.produce_step.retry(now)
            if self.lease_step.waiting and not self._blocked:
                if self.closed:
                    self._open([number for number, member in self.closed.items() if member.has_ready_items])
                if not any(member.is_worth_waiting_for and member.has_ready_items for member in self.handles_in_io.values()):
                    self.lease_step.assign(now)
            if self.transfer_step.dead:
                self.transfer_step.send_buried()
            if self.touched or self.uncommitted_answers:
                self._depart()
        except BaseException as error:
            self._give_up([*taken, *self._running, *requests_now], error)
            raise
        self._end()

    def finish_io(self, now: int) -> None:
        """Take back the partitions that have landed and answer for them; what waited for them is left to the next turn."""
        self.now = now
        self.answered = []
        self._land()
        if self.deferred or self.lease_step.waiting or self.produce_step.waiting or self.resize_step.in_progress:
            self.wants_turn = True
        self._end()

    def _end(self) -> None:
        self.transfer_step.note_senders()
        if self.transfer_step.busy:
            self.transfer_step.send_outboxes(self.now)
        if self.waiting_for_items:
            self._watch()
        if self._waits_for_commit:
            self._expire()
        self._plan()

    def _in_order(self, taken: Sequence[Request]) -> Sequence[Request]:
        return sorted(taken, key=self._place) if len(taken) > 1 else taken

    def _place(self, request: Request) -> int:
        return self._order[type(request)]

    # -- who has to wait -----------------------------------------------------------------------------

    def _runnable(self, taken: Sequence[Request]) -> Sequence[Request]:
        """The requests that can be run now: of each kind those that were deferred first, as they came, then the others.

        One that needs a partition which is out waits for it, and lets nobody who comes later have any partition it needs: so a request
        for many partitions has its turn too. One that has waited for a slow partition alone goes on waiting; any other is run, and told.
        """
        found: list[Request] = []
        deferred: list[Request] = []
        reserved: set[int] = set()
        self._blocked = False
        for request in (*self.deferred, *self._in_order(taken)):
            if request.done or request.cancelled:
                continue
            known = self._needs(request)
            needs = self.handles.keys() if known is None else known
            if self.closed and not (known is None and not request.needs_all_open):
                self._open(number for number in needs if number in self.closed)
            awaited = any(number in self.handles_in_io and self.handles_in_io[number].is_worth_waiting_for for number in needs)
            if not awaited and reserved.isdisjoint(needs) and not (request.deferred and self._only_slow(known)):
                found.append(request)
            elif request.give_up_at and request.give_up_at <= self.now:
                request.finish(error=self._not_reached(needs))
            else:
                request.deferred = True
                deferred.append(request)
                if awaited:
                    reserved.update(needs)
                    self._blocked = self._blocked or known is None
        self._running = found  # before they leave the line: at no moment is one in nobody's hands
        self.deferred = deferred
        return self._in_order(found)  # a reshape is first, whoever waited longer

    def _needs(self, request: Request) -> Collection[int] | None:
        """Numbers of the partitions that a request cannot be run without; None is all there are."""
        kind = type(request)
        if kind is requests.SettleRequest:
            return {part.partition for part in request.parts}  # type: ignore[attr-defined]
        if kind is requests.ProduceRequest:
            return self.produce_step.needs(request)  # type: ignore[arg-type]
        if kind is requests.DeliverRequest or kind is requests.ConfirmRequest:
            return (request.partition,)  # type: ignore[attr-defined]
        if kind is requests.ResizeRequest:  # while new partitions are being opened, nobody else waits for that
            return (
                self.partitions_to_add
                if any(self.handles[number].in_io for number in self.partitions_to_add)
                else {*self.active, *self.partitions_to_add}
            )
        if kind is requests.AwaitRequest or (kind is requests.LeaseRequest and request.request is None):  # type: ignore[attr-defined]
            return ()
        return None

    def _open(self, numbers: Iterable[int] | None = None) -> None:
        """Open partitions that are closed, beside the turns; None is those that were asked for."""
        for number in [*self.to_open] if numbers is None else [*numbers]:
            member = self.closed.get(number)
            self.to_open.pop(number, None)
            if member is not None and not member.in_io:
                self.touch(member)
                self._send_out(member, member.reopen)

    def _only_slow(self, needs: Collection[int] | None) -> bool:
        """Whether somebody waits for slow partitions and for no other."""
        return bool(needs) and all(number in self.handles_in_io for number in needs or ())

    def _not_reached(self, needs: Collection[int]) -> PenstockError:
        slow = next((self.handles_in_io[number] for number in needs if number in self.handles_in_io), None)
        what = f"queue {self.name!r} did not get to the request in time; nothing was done, try again in a moment"
        return QueueBusy(what if slow is None else f"partition {slow.number} of {what}")

    def _grow_slow(self) -> None:
        for member in self.handles_in_io.values():
            if member.is_worth_waiting_for:
                member.mark_slow_if_due(self.now, self._last_landing)
                if member.slow:
                    _log.warning("partition %s of queue %r is slow: %s", member.number, self.name, member.error)

    # -- steps ---------------------------------------------------------------------------------------

    def _reshape(self, taken: Sequence[Request]) -> Sequence[Request]:
        """Run the first reshape before anything else, unless something is uncommitted; other ones wait for a turn. Gives the rest."""
        found = [request for request in taken if isinstance(request, requests.ResizeRequest)]
        waiting = found
        if not self.resize_step.putting_up_fences and all(member.usable_partition.is_committed for member in self.usable()):
            try:
                self.attempt(found[0], self._do)
                waiting = found[1:]
            except PartitionsNotOpen:  # new partitions are being opened: with the last of them comes another turn
                self._open()
                self.deferred += waiting
                waiting = []
        self._wait_a_turn(waiting)
        return [request for request in taken if type(request) is not requests.ResizeRequest]

    def _drop_newcomers(self) -> None:
        """Whoever wanted another shape waits for it no longer: the partitions made for it are not to be."""
        for number in [*self.partitions_to_add]:
            if not self.handles[number].in_io:
                self.remove(self.handles[number])

    def _without_produces(self, taken: Sequence[Request]) -> Sequence[Request]:
        """While fences go up, those who produce to a partition that lacks them wait: it may not take keys that moved to it yet."""
        waiting = [one for one in taken if isinstance(one, requests.ProduceRequest) and self._needs_unfenced(one)]
        for one in waiting:
            self.resize_step.wanted.update(self.produce_step.needs(one) or ())
        self._wait_a_turn(waiting)
        return [request for request in taken if request not in waiting] if waiting else taken

    def _needs_unfenced(self, request: requests.ProduceRequest) -> bool:
        numbers = self.produce_step.needs(request) or self.active
        return any(not self.handles[number].fences_ready for number in numbers)

    def _wait_a_turn(self, waiting: Sequence[Request]) -> None:
        """Let requests wait for the next turn; where a partition is out, that comes with its landing."""
        if waiting:
            self.deferred += waiting
            self.wants_turn = self.wants_turn or not self.any_worth_waiting_for

    def _visit(self) -> None:
        """What failed is tried again, what came due is done."""
        now = self.now
        for member in list(self.handles.values()):
            if member.next_run is None or member.next_run > now or member.in_io:
                continue
            if member.error is not None or member.closed:
                continue
            self.touch(member)
            if member.may_close(now):
                if self._is_needed_open(member):
                    member.stay_open(now)
                else:
                    member.wants_close = True
            if not member.fences_ready:
                self.resize_step.restore_fences(member)
            if member.take_due_publish(now):
                member.wants_publish = True
            member.wants_retention = not member.wants_publish and member.is_due_for_retention()
            try:
                self._keep_up(member)
                if member.usable_partition.due(DUE_ITEMS):
                    self.wants_turn = True  # there may be more
                    if member.usable_partition.became_ready:
                        self.resize_step.forward(member, member.usable_partition.became_ready)
            except PenstockError:
                continue  # the commit says what is wrong

    def _open_due(self) -> None:
        """Try again what failed a while ago, and open what is closed and has something due. First, because they are out from then on."""
        for member in list(self.handles.values()):
            if member.next_run is not None and member.next_run <= self.now and not member.in_io:
                if member.is_due_for_retry(self.now) or (member.closed and member.is_due):
                    self.touch(member)
                    self._send_out(member, member.reopen)
                elif member.closed or member.error is not None:
                    self.touch(member)  # it plans anew

    def _is_needed_open(self, member: PartitionHandle) -> bool:
        """Whether somebody looks at a partition although nothing happens in it."""
        return not member.fences_ready or self.resize_step.is_source(member.number) or bool(self.lease_step.waiting and member.state.ready)

    def _keep_up(self, member: PartitionHandle) -> None:
        """Leases whose holders work in this process do not end while they do, however busy the interpreter is."""
        for number, lease in [pair for pair in list(self.auto_extended_leases) if pair[0] == member.number]:
            grant = member.state.leases.live.get(lease)
            if grant is None:
                self.auto_extended_leases.pop((number, lease), None)
            elif grant.deadline <= member.usable_partition.now().elapsed + SECOND // 4:  # before `due` would end it, a moment later
                self.run(member, ExtendLease(lease, after_deadline=True))

    def _do(self, request: requests.FunctionRequest) -> None:
        self.used.clear()
        try:
            result = request.function(self)
        except PenstockError:
            raise
        except PartitionsNotOpen:
            raise
        except Exception as error:  # a mistake of ours in one question must not take the turn from the others
            _log.exception("an operator's question to queue %r went wrong", self.name)
            raise OutcomeUnknown(f"it went wrong ({type(error).__name__}: {error}); please report this") from error
        self.answer(request, (result, set(self.used)))

    def _watch(self) -> None:
        """Tell those who follow the queue that there is something new, or that their time is over."""
        still = []
        for request in self.waiting_for_items:
            if request.cancelled:
                continue
            if any(member.next_offset > request.offsets.get(member.number, 0) for member in self.handles.values()):
                request.finish(True)
            elif request.deadline <= self.now:
                request.finish(False)
            else:
                still.append(request)
        self.waiting_for_items[:] = still

    def _give_up(self, taken: Sequence[Request], error: BaseException) -> None:
        """The turn was broken off: its commit, if it had begun, is finished; before that it is undone, and its requests are run again."""
        if self._departing:
            for member in self.touched:
                if member.is_usable and member.partition is not None and not member.partition.is_committed:
                    self._send_out(member, None)
                    member.set_recovery_job()
            self._answer_or_wait()
        else:
            pending, self.uncommitted_answers = self.uncommitted_answers, deque()
            for member in self.touched:
                if not member.in_io:
                    member.undo(_interrupted(error))
            self.requeue_undone([*taken, *(request for request, _ in pending)], error)
            self.resize_step.invalidate()
        for member in [member for member in self.io_to_dispatch if not member.in_io]:  # the interrupt came while it was about to go
            self.io_to_dispatch.remove(member)
            self.handles_in_io.pop(member.number, None)
        self.transfer_step.note_senders()  # the next turn sends what this one did not come to
        self._plan()

    def requeue_undone(self, taken: Sequence[Request], error: BaseException) -> None:
        """Requests of a turn that was undone: those who wait for items go on waiting, the others are run again."""
        again: list[Request] = []
        answered = [waiting.request for waiting in self._waits_for_commit.values()]  # their commit had begun: it is finished, not run again
        lines = (self.lease_step.waiting, self.produce_step.waiting, self.waiting_for_items, self.deferred, answered, again)
        for request in taken:
            if request.done:
                request.notify()  # the interrupt may have come in between
                continue
            if not request.taken or any(request in line for line in lines):  # it was put back before, or waits
                continue
            request.undo_count += 1
            if request.undo_count > REDOS:
                request.finish(error=_interrupted(error))
            elif isinstance(request, requests.LeaseRequest):
                self.lease_step.add_waiting(request)  # what it was given was undone with the turn
            else:
                again.append(request)
        self.requeue(again)
        self.wants_turn = True

    def _plan(self) -> None:
        """When the queue wants its next turn, if nobody asks before."""
        if self.touched or self.visits_changed:
            self.visits_changed = False
            changed = False
            self.note_ready()
            for member in self.touched:
                if not member.in_io and member.partition is not None:
                    changed = member.changed() or changed
                    if member.partition.dropped_buried or member.partition.maintenance_error is not None:
                        self._tell_of_upkeep(member.number, member.partition)
                member.plan(self.now)
                member.touched = False
            self.touched.clear()
            if changed and self.resize_step.in_progress:
                self.wants_turn = True
            visits = [member.next_run for member in self.handles.values() if member.next_run is not None]
            self._next_visit = min(visits, default=None)
        self.next_run = self._next_visit
        if self.lease_step.waiting or self.produce_step.waiting or self.waiting_for_items or self.handles_in_io:
            lines: tuple[Sequence[Request], ...] = (self.produce_step.waiting, self.waiting_for_items)
            ends = [request.deadline for line in lines for request in line if request.deadline]
            ends += [request.give_up_at for request in self.deferred if request.give_up_at]
            ends += [waiting.expires for waiting in self._waits_for_commit.values() if waiting.expires]
            ends += [member.slow_at(self._last_landing) for member in self.handles_in_io.values() if member.is_worth_waiting_for]
            earliest = self.lease_step.earliest
            if earliest is not None and earliest <= self.now and self.any_worth_waiting_for:
                earliest = None  # whoever's time is over is told when what is out has landed, or is slow: no turn before that helps
            ends += [when for when in (self._next_visit, earliest) if when is not None]
            self.next_run = min(ends, default=None)

    def _tell_of_upkeep(self, number: int, partition: Partition) -> None:
        """Log and count what retention took that had been buried, and log that it failed."""
        for taken in partition.dropped_buried:
            self.buried_dropped += taken.items
            first, last = format_id(number, taken.first), format_id(number, taken.last)
            said = "retention of queue %r dropped %d buried items of partition %s (%s to %s): nobody redrove or cleared them in time"
            _log.warning(said, self.name, taken.items, number, first, last)
        partition.dropped_buried.clear()
        if partition.maintenance_error is not None:
            said = "keeping the files of partition %s of queue %r in order failed and is tried again later: %s"
            _log.warning(said, number, self.name, partition.maintenance_error)
            partition.maintenance_error = None

    # -- the end -------------------------------------------------------------------------------------

    def refuse_all(self, error: PenstockError) -> None:
        """Everybody who still waits is told that it is over."""
        for line in (self.lease_step.waiting, self.produce_step.waiting, self.waiting_for_items, self.deferred):
            for request in line:
                request.finish(error=error)
            line.clear()

    def close(self) -> None:
        """Close every partition, whatever happens to one of them."""
        first: PenstockError | None = None
        for member in self.handles.values():
            try:
                if member.partition is not None:
                    member.partition.close()
            except PenstockError as error:
                first = first or error
        if first is not None:
            raise first


def _interrupted(error: BaseException) -> OutcomeUnknown:
    return OutcomeUnknown(f"the turn was interrupted ({type(error).__name__}: {error}); repeat with the same request id")
