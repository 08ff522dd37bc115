"""The turn: everything a queue does, one thing at a time.

Owns: `Turns`, a queue's partitions and what they do with a batch of requests:
    visit what is due → settle → transfers → produce → an operator's word → deal to those who wait → commit side by side → answer
No answer leaves before the commit of every partition it rests on; a partition that fails fails only its own part of each answer.
Single-threaded: whoever runs the turn. Who that is, is loop.py's business.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from typing import Any

from penstock.loop import requests
from penstock.loop.blocks import Items
from penstock.loop.carrying import Carrying, Office
from penstock.loop.leasing import Leasing
from penstock.loop.member import Member
from penstock.loop.partition import Partition
from penstock.loop.partitions import Partitions
from penstock.loop.producing import Producing
from penstock.loop.requests import Handed, Placed, Request
from penstock.loop.resizing import Resizing
from penstock.loop.settling import Settling
from penstock.rules.commands import Extend, Granted
from penstock.words.clock import SECOND, Clock
from penstock.words.errors import OutcomeUnknown, PenstockError

_log = logging.getLogger("penstock")
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
        self._next_visit: int | None = 0
        self._pool = pool
        self._steps: dict[type[Request], Callable[[Any], None]] = {
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
        try:
            self.look_at_shape()
            if self.resizing.under_way:
                self.resizing.upkeep()  # first: on what is committed
            if self._next_visit is not None and now >= self._next_visit:
                self._visit()
            for request in sorted(taken, key=self._place) if len(taken) > 1 else taken:
                self.attempt(request, self._steps[type(request)])
            if self.producing.waiting:
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
        touched = [member for member in self.touched if member.healthy]
        owing = [member for member in touched if member.open.prepare()]
        self.synced = any(member.open.log.durability == "fsync" for member in owing)
        if self._pool is not None and len(owing) > 1:
            outcomes = list(zip(owing, self._side_by_side(owing, self._pool), strict=True))
            synced = {member.number for member in owing}
            rest = [member for member in touched if member.number not in synced]
        else:
            outcomes, rest = [], touched
        outcomes += [(member, member.commit()) for member in rest]
        return {member.number: error for member, error in outcomes if error is not None}

    def _side_by_side(self, members: Sequence[Member], pool: Executor) -> list[PenstockError | None]:
        """Commit in several threads; whatever happens, none of them is at work any more when this returns."""
        futures = [pool.submit(member.commit) for member in members]
        try:
            return [future.result() for future in futures]
        except BaseException:
            while any(not future.done() for future in futures):
                with suppress(KeyboardInterrupt):
                    wait(futures)
            raise

    # -- answers -------------------------------------------------------------------------------------

    def _answer(self, failed: dict[int, PenstockError]) -> None:
        pending, self.pending = self.pending, []
        self.answered = [request for request, _ in pending]
        if failed:
            self.resizing.start_over()
        for request, result in pending:
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

    def _hand(self, request: requests.Lease, parts: list[Any], failed: dict[int, PenstockError]) -> None:
        """Give leased items out, with their bytes."""
        handed, lost = [], False
        for member, granted in parts:
            if member.number in failed:
                continue
            if not member.healthy:  # stored, but failing since: given back when it is in order again
                member.owed.append(granted.lease)
                continue
            try:
                items = [] if request.bare else member.open.items(granted.runs)
            except PenstockError as error:  # nobody gets it now, and asking again at once would not help; the others of the answer are good
                member.fail(error)
                member.owed.append(granted.lease)
                continue
            granted = granted if request.bare else _found(granted, items)
            if not granted.runs:  # damage took all of it: the lease has ended, and there may be other items
                lost = True
                continue
            seconds = (granted.deadline - member.open.now().elapsed) / SECOND
            handed.append(Handed(member.number, granted, items, seconds))
        if handed:
            request.finish(handed)
            if request.gone:
                self.settling.give_back(handed)
        elif lost or request.deadline > self.now:
            request.request = None  # what was remembered under its id was lost with the turn
            self.leasing.put_back(request)
            self.again = self.again or lost
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
        """Something went wrong that must not: nobody may wait for ever, and what was touched is opened anew."""
        self.rescue([*taken, *(request for request, _ in self.pending)], error)
        self.pending.clear()
        for member in self.touched:
            if member.partition is not None:
                member.partition.failed = True
                member.fail(_interrupted(error))
        self._plan()

    def rescue(self, taken: Sequence[Request], error: BaseException) -> None:
        """Requests of a turn that was broken off: those who wait for items go on waiting, the others are told."""
        lines: tuple[list[Any], ...] = (self.leasing.waiting, self.producing.waiting, self.watching)
        for request in taken:
            if request.done:
                request.tell()  # the interrupt may have come in between
                continue
            if any(request in line for line in lines):
                continue
            if isinstance(request, requests.Lease):
                self.leasing.put_back(request)  # what it was given is taken back with the turn
            else:
                request.finish(error=_interrupted(error))

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


def _found(granted: Granted, items: Sequence[Items]) -> Granted:
    """A lease without the items that damage was found to have taken."""
    if sum(len(part.batch) for part in items) == granted.count:
        return granted
    return Granted(
        granted.lease, granted.deadline, [edge for part in items for edge in (part.start, part.start + len(part.batch))], granted.attempts
    )


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
