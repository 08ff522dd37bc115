"""Leases, for a whole queue: who waits, and who gets what from which partition.

Owns: `Leasing`. Whoever asks waits in line until there is something or the deadline passes; anything that makes an item ready ends in
a turn, and every turn deals. Items are dealt round-robin (dealing.py). One consumer drains all partitions: each call goes on with the
partition behind the one where the last call ended, and takes what it can there before it looks at the next.
"""

from contextlib import suppress

from penstock.loop import requests
from penstock.loop.carrying import Carrying
from penstock.loop.dealing import shares
from penstock.loop.member import Member
from penstock.loop.partitions import Partitions
from penstock.loop.resizing import Resizing
from penstock.loop.retention import mean_bytes
from penstock.rules import commands
from penstock.rules.commands import Again, Granted, Strayed
from penstock.rules.lease import validate_lease
from penstock.rules.routing import digest
from penstock.words.errors import LeaseLost, PenstockError, QueueHeld
from penstock.words.limits import MAX_BATCH_BYTES

MANY = 4
"""From so many on, large items might make a reply that nobody can hold: the size of those in the log bounds it."""
ROUNDS = 4
"""Steps of looking through a backlog of held keys that one lease may take in a turn."""


class Leasing:
    """Those who wait for items."""

    def __init__(self, partitions: Partitions, carrying: Carrying, resizing: Resizing) -> None:
        self._partitions = partitions
        self._carrying = carrying
        self._resizing = resizing
        self.waiting: list[requests.Lease] = []
        self._next = 0  # the number of the partition to begin with
        self._looked_on = False  # a partition has to look further before it knows whether it has something
        self.left = False
        """Somebody who waited is gone. Set from any thread."""
        self.earliest: int | None = None
        """The deadline that comes first."""
        self.holder = ""
        """The consumer that has the right to lease from this queue, alone, if any has."""
        self.held_until = 0

    def hold(self, holder: str, timeout: int) -> None:
        """Give the consumer right to one for so long, or ("") back to all. Others who wait in line are told."""
        self.holder, self.held_until = holder, self._partitions.clock.read().elapsed + timeout
        waiting, self.waiting = self.waiting, []
        for request in waiting:
            try:
                self.refuse_other(request.consumer)
                self.waiting.append(request)
            except QueueHeld as error:
                request.finish(error=error)

    @property
    def held_by(self) -> str:
        """Who has the right now, if anybody."""
        return self.holder if self.holder and self._partitions.clock.read().elapsed < self.held_until else ""

    def refuse_other(self, consumer: str) -> None:
        """Say so when somebody else has the right."""
        if consumer != self.held_by != "":
            raise QueueHeld(
                f"queue {self._partitions.name!r} is consumed by {self.holder}, which alone may lease from it; "
                "end that consumer, or wait until its right has ended"
            )

    def run(self, request: requests.Lease) -> None:
        """Put a request in line, unless it is wrong, or the repetition of one that was answered."""
        validate_lease(self._command(request, request.want))
        if self.holder:
            self.refuse_other(request.consumer)
        if request.request is not None and (known := self._known(request)) is not None:
            if known:
                self._partitions.answer(request, known)
            elif request.bare:
                raise LeaseLost("what this request was given has ended; ask for something new under another id")
            else:
                request.finish([])  # what it was given has ended
            return
        self.put_back(request)

    def put_back(self, request: requests.Lease) -> None:
        """Wait in line, behind the others."""
        self.waiting.append(request)
        self.earliest = request.deadline if self.earliest is None else min(self.earliest, request.deadline)

    def _known(self, request: requests.Lease) -> list[tuple[Member, Granted]] | None:
        """What a request was given when it was first made; None when this is the first time.

        For a bare one it is no matter if a partition that is out of order knows more: whoever has not noted those leases lets them end.
        """
        command = self._command(request, request.want)
        found, again = [], False
        for member in self._partitions.healthy():
            if member.state.requests.get(command.request or b"", member.open.now().elapsed) is not None:
                again = True
                granted = self._partitions.run(member, command)
                if isinstance(granted, Granted) and granted.lease:
                    found.append((member, granted))
        if not again and not request.bare and len(list(self._partitions.healthy())) < len(self._partitions.members):
            raise next(member.refusal for member in self._partitions.members.values() if not member.healthy)  # it may be the one that knows
        return found if again else None

    def deal(self, now: int) -> None:
        """Give out what is ready; tell those whose time is over."""
        sources = self._sources()
        if not sources and (self.earliest is None or now < self.earliest) and not self._looked_on and not self.left:
            return
        self.left = False
        self._looked_on = False
        waiting = [request for request in self.waiting if not request.gone]
        there = sum(member.state.ready for member in sources)
        front = waiting[:there]  # nobody behind them can get anything
        given: list[list[tuple[Member, Granted]]] = [[] for _ in front]
        if front:
            self._hand_out(front, given, shares([request.want for request in front], there), sources)
        self.waiting = []
        for index, request in enumerate(waiting):
            if index < len(given) and given[index]:
                self._partitions.answer(request, given[index])
            elif request.deadline <= now and not self._looked_on and not self._partitions.awaits:
                self._give_nothing(request)
            else:
                self.waiting.append(request)
        self.earliest = min((request.deadline for request in self.waiting), default=None)

    def _give_nothing(self, request: requests.Lease) -> None:
        """There is nothing; or nobody can say, because no partition is in order."""
        broken = next((member for member in self._partitions.members.values() if not member.healthy), None)
        if broken is not None and not any(self._partitions.healthy()):
            request.finish(error=broken.refusal)
        else:
            request.finish([])

    def _sources(self) -> list[Member]:
        """Partitions that may have something, beginning behind the last one used."""
        members = self._partitions.stocked()
        found = [m for m in members if m.number >= self._next] + [m for m in members if m.number < self._next]
        return [m for m in found if m.healthy and m.state.ready and not m.state.paused_lease]

    def _hand_out(
        self, waiting: list[requests.Lease], given: list[list[tuple[Member, Granted]]], left: list[int], sources: list[Member]
    ) -> None:
        """Rounds of dealing. Where there are keys, each of several takes a part at a time: held keys make items scarcer than they seem.

        One whose request has an id takes all at once: a partition remembers one lease for it.
        """
        crowd = len(waiting) if any(member.state.keys.map or member.state.lanes.keyed for member in sources) else 1
        handed = True
        while handed and sources:
            handed = False
            for index, request in enumerate(waiting):
                alone = crowd == 1 or request.request is not None
                portion = left[index] if alone else min(left[index], max(1, request.want // crowd))
                if not sources:
                    return
                if not portion:
                    continue
                parts = self._take(request, portion, sources)
                given[index] += parts
                left[index] = 0 if alone else left[index] - sum(granted.count for _, granted in parts)
                handed = handed or bool(parts)

    def _take(self, request: requests.Lease, want: int, sources: list[Member]) -> list[tuple[Member, Granted]]:
        """Up to `want` items, from as few partitions as need be; those that have nothing (more) to give are left out from now on."""
        parts: list[tuple[Member, Granted]] = []
        want = self._holdable(want, sources)
        if request.request is not None:
            return self._take_by_name(request, want, sources)
        while want and sources:
            granted = self._lease(sources[0], self._command(request, want))
            if granted is not None and granted.lease:  # a plan may stop early: it is asked until it gives nothing
                parts.append((sources[0], granted))
                want -= granted.count
            else:
                sources.pop(0)
        if parts:
            self._next = parts[-1][0].number + 1
        if sources and len(sources) > 1:
            sources.append(sources.pop(0))  # the next one begins elsewhere
        return parts

    def _take_by_name(self, request: requests.Lease, want: int, sources: list[Member]) -> list[tuple[Member, Granted]]:
        """For a request with an id: each partition is asked once. That it gives nothing says nothing about the others who wait."""
        parts: list[tuple[Member, Granted]] = []
        for member in sources:
            granted = self._lease(member, self._command(request, want)) if want else None
            if granted is not None and granted.lease:
                parts.append((member, granted))
                want -= granted.count
        return parts

    def _holdable(self, want: int, sources: list[Member]) -> int:
        """So many items as make a reply that can be held."""
        if want > MANY and sources:
            with suppress(PenstockError):  # the commit says what is wrong
                most = MAX_BATCH_BYTES // max(1, mean_bytes(sources[0].open.log.segments(), sources[0].state))
                return max(1, min(want, most))
        return want

    def _lease(self, member: Member, command: commands.Lease) -> Granted | None:
        partitions = self._partitions
        command.departed = self._resizing.departed(member.number)
        while True:
            try:
                answer = partitions.run(member, command, rounds=ROUNDS)
                if isinstance(answer, Strayed):
                    self._carrying.forward(member, answer.offsets)
                    continue
            except PenstockError:
                return None  # the commit says what is wrong
            if isinstance(answer, Again):  # looked far enough for one turn
                partitions.again = self._looked_on = True
                return None
            return answer if isinstance(answer, Granted) else None

    def _command(self, request: requests.Lease, want: int) -> commands.Lease:
        name = None if request.request is None else digest(b"lease", request.request)
        return commands.Lease(want, request.consumer, request.timeout, request.per_key, name)
