"""The turn: everything a queue does, one thing at a time.

Owns: `Turns`, a queue's partitions and what they do with a batch of requests:
    reshape → fences → visit what is due → settle → transfers → produce → an operator's word → deal to those who wait
    → commit side by side → answer
No answer leaves before the commit of every partition it rests on; a partition that fails fails only its own part of each answer.
A turn that is broken off by an interrupt in the thread that runs it is undone, and its requests are run again by the next turn; if its
commit had begun, that is finished instead. So one caller's Ctrl-C changes nothing for the others.
Single-threaded: whoever runs the turn. Who that is, is loop.py's business.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from typing import Any

from penstock.loop import requests
from penstock.loop.carrying import Carrying, Office
from penstock.loop.leasing import Leasing
from penstock.loop.member import Member
from penstock.loop.partition import Partition
from penstock.loop.partitions import Partitions
from penstock.loop.producing import Producing
from penstock.loop.requests import Handed, Placed, Request
from penstock.loop.resizing import Resizing
from penstock.loop.settling import Settling
from penstock.rules.commands import Extend
from penstock.words.clock import SECOND, Clock
from penstock.words.errors import OutcomeUnknown, PenstockError

_log = logging.getLogger("penstock")
REDOS = 3
"""How often a request is run again after its turn was undone. More than that is a mistake of ours, not a row of interrupts."""
DUE_ITEMS = 2_000
"""Items that come due in one partition in one turn; the rest waits for the next, so that others have theirs in between."""


class Turns(Partitions):
    """A queue's partitions, and the requests of the turn that is being run."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        open_partition: Callable[[int], Partition],
        clock: Clock,
        chance: Callable[[], float],
        office: Office,
        pool: Executor | None = None,
    ) -> None:
        super().__init__(name, incarnation, open_partition, clock, chance)
        self.next_run: int | None = None
        """When the queue wants a turn, if nobody asks before."""
        self.answered: list[Request] = []
        """By the last turn."""
        self.carrying = Carrying(self, office)
        self.resizing = Resizing(self, self.carrying)
        self.producing = Producing(self)
        self.leasing = Leasing(self, self.carrying, self.resizing)
        self.settling = Settling(self, self.carrying)
        self.watching: list[requests.Watch] = []
        self.look_at_shape: Callable[[], None] = lambda: None
        """Does what a resize recorded and an interrupt kept from being done."""
        self.kept: dict[tuple[int, int], None] = {}
        """(partition, lease) of holders inside this process, who are still at work. Changed from any thread."""
        self.synced = False
        """Whether the last turn had to wait for a disk."""
        self.put_back: Callable[[Sequence[Request]], None] = lambda requests: None
        """Puts requests of a turn that was undone back into the inbox."""
        self._next_visit: int | None = 0
        self._outcomes: dict[int, PenstockError | None] = {}
        """What became of each partition that this turn has committed so far."""
        self._committing = False
        self._pool = pool
        self._steps: dict[type[Request], Callable[[Any], None]] = {
            requests.Reshape: self._do,
            requests.Settle: self.settling.run,
            requests.Arrived: self.carrying.arrived,
            requests.Deliver: self.carrying.deliver,
            requests.Produce: self.producing.run,
            requests.Do: self._do,
            requests.Lease: self.leasing.run,
            requests.Watch: self.watching.append,
        }
        self._order = {kind: place for place, kind in enumerate(self._steps)}

    # -- the turn ------------------------------------------------------------------------------------

    def turn(self, taken: Sequence[Request], now: int) -> None:
        """Do all of it. Every request of `taken` is answered when this returns, or waits in line here."""
        self.now = now
        self.again = False
        self._outcomes.clear()
        self._committing = False
        try:
            in_order = sorted(taken, key=self._place) if len(taken) > 1 else taken
            reshapes = self._reshape(in_order) if in_order and type(in_order[0]) is requests.Reshape else 0
            self.look_at_shape()
            if self.resizing.under_way:
                self.resizing.upkeep()  # before anything else: on what is committed
            if self._next_visit is not None and now >= self._next_visit:
                self._visit()
            if reshapes:
                in_order = in_order[reshapes:]
            preparing = self.resizing.under_way and self.resizing.preparing
            if preparing:
                in_order = self._without_produces(in_order)
            for request in in_order:
                self.attempt(request, self._steps[type(request)])
            if self.producing.waiting and not preparing:
                self.producing.retry(now)
            if self.leasing.waiting:
                self.leasing.deal(now)
            if self.carrying.dead:
                self.carrying.dispatch()
            self._answer(self._commit() if self.touched else {})
        except BaseException as error:
            self._give_up(taken, error)
            raise
        self.carrying.carry(now)
        if self.watching:
            self._watch()
        self._plan()

    def _place(self, request: Request) -> int:
        return self._order[type(request)]

    def _reshape(self, taken: Sequence[Request]) -> int:
        """Run the reshape that stands first; another one in this turn has to wait for its commit. Says how many are dealt with."""
        count = sum(type(request) is requests.Reshape for request in taken)
        done = 0
        if not (self.resizing.under_way and self.resizing.preparing):
            self.attempt(taken[0], self._do)
            done = 1
        self._wait_a_turn(taken[done:count])
        return count

    def _without_produces(self, taken: Sequence[Request]) -> Sequence[Request]:
        """While fences go up, those who produce wait: the partition that their keys moved to may not take them yet."""
        self._wait_a_turn([request for request in taken if type(request) is requests.Produce])
        return [request for request in taken if type(request) is not requests.Produce]

    def _wait_a_turn(self, waiting: Sequence[Request]) -> None:
        self.put_back(waiting)
        self.again = True

    def _visit(self) -> None:
        """What failed is tried again, what came due is done."""
        now = self.now
        for member in self.members.values():
            if member.next_run is None or member.next_run > now:
                continue
            self.touch(member)
            failed = member.error is not None
            if not member.recover(now):
                continue
            if failed:
                self.catch_up(member)
                self.settling.give_back_owed(member)
            if failed or not member.fenced:
                self.resizing.check(member)
            member.rest(now)
            try:
                self._keep_up(member)
                if member.open.due(DUE_ITEMS):
                    self.again = True  # there may be more
                    if member.open.ripe:
                        self.resizing.forward(member, member.open.ripe)
            except PenstockError:
                continue  # the commit says what is wrong

    def _keep_up(self, member: Member) -> None:
        """Leases whose holders work in this process do not end while they do, however busy the interpreter is."""
        for number, lease in [pair for pair in list(self.kept) if pair[0] == member.number]:
            grant = member.state.leases.live.get(lease)
            if grant is None:
                self.kept.pop((number, lease), None)
            elif grant.deadline <= member.open.now().elapsed + SECOND // 4:  # before `due` would end it, a moment later
                self.run(member, Extend(lease, late=True))

    def _do(self, request: requests.Do) -> None:
        self.used.clear()
        try:
            result = request.action(self)
        except PenstockError:
            raise
        except Exception as error:  # a mistake of ours in one question must not take the turn from the others
            _log.exception("an operator's question to queue %r went wrong", self.name)
            raise OutcomeUnknown(f"it went wrong ({type(error).__name__}: {error}); please report this") from error
        self.answer(request, (result, set(self.used)))

    def _commit(self) -> dict[int, PenstockError]:
        """Write and sync what was touched, side by side; gives the partitions that failed, and how."""
        self._committing = True
        touched = [member for member in self.touched if member.healthy]
        owing = [member for member in touched if member.open.prepare()]
        self.synced = any(member.open.log.durability == "fsync" for member in owing)
        if self._pool is not None and len(owing) > 1:
            self._side_by_side(owing, self._pool)
        for member in touched:
            if member.number not in self._outcomes:
                self._commit_one(member)
        return {number: error for number, error in self._outcomes.items() if error is not None}

    def _commit_one(self, member: Member) -> None:
        self._outcomes[member.number] = member.commit()

    def _side_by_side(self, members: Sequence[Member], pool: Executor) -> None:
        """Commit in several threads; whatever happens, none of them is at work any more when this returns."""
        futures = [pool.submit(self._commit_one, member) for member in members]
        try:
            for future in futures:
                future.result()
        except BaseException:
            while any(not future.done() for future in futures):
                with suppress(KeyboardInterrupt):
                    wait(futures)
            raise

    # -- answers -------------------------------------------------------------------------------------

    def _answer(self, failed: dict[int, PenstockError]) -> None:
        self.answered = [request for request, _ in self.pending]
        if failed:
            self.resizing.start_over()
        for request, result in self.pending:
            try:
                if isinstance(request, requests.Lease):
                    self._hand(request, result, failed)
                elif isinstance(request, requests.Produce):
                    request.finish([_refused(one, failed[one.partition]) if one.partition in failed else one for one in result])
                elif isinstance(request, requests.Settle):
                    request.finish([failed.get(part.partition, one) for part, one in zip(request.parts, result, strict=True)])
                elif isinstance(request, requests.Deliver):
                    member, taken = result
                    request.finish(taken, failed.get(member.number))
                elif isinstance(request, requests.Do):
                    answer, used = result
                    wrong = None if request.firm else _partly(used, failed)
                    request.finish(answer if wrong is None else None, wrong)
            except PenstockError as error:
                request.finish(error=error)
        self.pending.clear()

    def _hand(self, request: requests.Lease, parts: list[Any], failed: dict[int, PenstockError]) -> None:
        """Give leased items out, with their bytes."""
        handed = []
        for member, granted in parts:
            if member.number in failed:
                continue
            if not member.healthy:  # stored, but failing since: given back when it is in order again
                member.owed.append(granted.lease)
                continue
            try:
                items = [] if request.bare else member.open.items(granted.runs)
            except PenstockError:  # nobody gets it now; the others of the answer are good
                self.settling.give_back([Handed(member.number, granted, [], 0)])
                continue
            seconds = (granted.deadline - member.open.now().elapsed) / SECOND
            handed.append(Handed(member.number, granted, items, seconds))
        if handed:
            request.finish(handed)
            if request.gone:
                self.settling.give_back(handed)
        elif request.deadline > self.now:
            request.request = None  # what was remembered under its id was lost with the turn
            self.leasing.put_back(request)
        else:
            request.finish([])

    def _watch(self) -> None:
        """Tell those who follow the queue that there is something new, or that their time is over."""
        still = []
        for request in self.watching:
            if request.gone:
                continue
            if any(member.state.next_offset > request.offsets.get(member.number, 0) for member in self.healthy()):
                request.finish(True)
            elif request.deadline <= self.now:
                request.finish(False)
            else:
                still.append(request)
        self.watching[:] = still

    def _give_up(self, taken: Sequence[Request], error: BaseException) -> None:
        """The turn was broken off: its commit, if it had begun, is finished; before that it is undone, and its requests are run again."""
        if self._committing:
            for member in self.touched:
                if member.partition is not None and member.number not in self._outcomes:
                    self._outcomes[member.number] = member.finish()
            self._answer({number: wrong for number, wrong in self._outcomes.items() if wrong is not None})
        else:
            pending, self.pending = self.pending, []
            for member in self.touched:
                member.undo(_interrupted(error))
            self.rescue([*taken, *(request for request, _ in pending)], error)
            self.resizing.start_over()
        self._plan()

    def rescue(self, taken: Sequence[Request], error: BaseException) -> None:
        """Requests of a turn that was undone: those who wait for items go on waiting, the others are run again."""
        lines: tuple[list[Any], ...] = (self.leasing.waiting, self.producing.waiting, self.watching)
        again: list[Request] = []
        for request in taken:
            if request.done:
                request.tell()  # the interrupt may have come in between
                continue
            if not request.taken or any(request in line for line in (*lines, again)):  # it was put back before, or waits
                continue
            request.undone += 1
            if request.undone > REDOS:
                request.finish(error=_interrupted(error))
            elif isinstance(request, requests.Lease):
                self.leasing.put_back(request)  # what it was given was undone with the turn
            else:
                again.append(request)
        self.put_back(again)
        self.again = True

    def _plan(self) -> None:
        """When the queue wants its next turn, if nobody asks before."""
        if self.touched:
            changed = [member.changed() for member in self.touched]
            self.note_stock()
            for member in self.touched:
                member.plan(self.now)
                member.touched = False
            self.touched.clear()
            if self.resizing.under_way and any(changed):
                self.again = True
            visits = [member.next_run for member in self.members.values() if member.next_run is not None]
            self._next_visit = min(visits, default=None)
        self.next_run = self._next_visit
        if self.leasing.waiting or self.producing.waiting or self.watching:
            lines: tuple[Sequence[Request], ...] = (self.producing.waiting, self.watching)
            ends = [request.deadline for line in lines for request in line if request.deadline]
            ends += [when for when in (self._next_visit, self.leasing.earliest) if when is not None]
            self.next_run = min(ends, default=None)

    # -- the end -------------------------------------------------------------------------------------

    def refuse_all(self, error: PenstockError) -> None:
        """Everybody who still waits is told that it is over."""
        for line in (self.leasing.waiting, self.producing.waiting, self.watching):
            for request in line:
                request.finish(error=error)
            line.clear()

    def close(self) -> None:
        """Close every partition, whatever happens to one of them."""
        first: PenstockError | None = None
        for member in self.members.values():
            try:
                if member.partition is not None:
                    member.partition.close()
            except PenstockError as error:
                first = first or error
        if first is not None:
            raise first


def _interrupted(error: BaseException) -> OutcomeUnknown:
    return OutcomeUnknown(f"the turn was interrupted ({type(error).__name__}: {error}); repeat with the same request id")


def _refused(part: Placed, error: PenstockError) -> Placed:
    return part._replace(stored=None, error=error)


def _partly(used: set[int], failed: dict[int, PenstockError]) -> PenstockError | None:
    """What to tell an operator whose word reached several partitions, of which some failed."""
    hurt = [number for number in used if number in failed]
    if not hurt:
        return None
    if len(hurt) == len(used):
        return failed[hurt[0]]
    return OutcomeUnknown(f"it was done in some partitions and not in {hurt} ({failed[hurt[0]]}); do it again")
