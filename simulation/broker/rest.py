"""What must be true when a broker is at rest, and at the end.

Owns: `Model`: the facts about every item (broker_model.py), and that nobody waits without a reason.
"""

from collections.abc import Sequence

from penstock.loop.loop import Loop
from penstock.loop.member import SLOW_AFTER, Member
from penstock.reports import QueueInfo
from penstock.rules.life import Life
from penstock.words.clock import SECOND
from simulation.broker.items import Tag
from simulation.broker.model import Facts
from simulation.broker.sent import Sent, SentLease, SentProduce, SentWatch


class Model(Facts):
    """What should be true."""

    # -- at rest -------------------------------------------------------------------------------------

    def at_rest(self, loops: Sequence[Loop], pending: Sequence[Sent], now: int, *, troubled: bool) -> None:
        """No queue wants a turn: whoever waits must have a reason."""
        out = {loop.turns.incarnation: loop for loop in loops if loop.waiting_for_disk}
        self.leases.check_known({sent.incarnation for sent in pending if isinstance(sent, SentLease) and sent.ran_at is not None})
        self._check_due()
        with self.undisturbed():
            self.census.check_stats(loops)
        for sent in pending:
            deadline = sent.request.deadline
            late = _answered_by(sent, out[sent.incarnation]) if sent.incarnation in out else deadline
            assert not (deadline and late < now), f"{sent} was not answered by its deadline"
            assert deadline or sent.incarnation in out, f"{sent} does not wait, and was not answered"
            if isinstance(sent, SentLease) and sent.first:  # a repetition gets what it got then
                self._check_waiting(sent, next(loop for loop in loops if loop.turns.incarnation == sent.incarnation))
        for queue, info in self.queues.items():
            self._check_producers(info, [sent for sent in pending if sent.incarnation == queue and isinstance(sent, SentProduce)])
            self._check_followers([sent for sent in pending if sent.incarnation == queue and isinstance(sent, SentWatch)])

    def _check_due(self) -> None:
        """What is due has come: schedules, delays, leases that ended."""
        for tag, found in self.census.found.items():
            for spot in found.live:
                if spot.life is Life.SCHEDULED:
                    late = bool(tag.not_before) and tag.not_before <= self.now
                    if tag.due and not tag.handed and not self.leases.lost:
                        late = late or (tag.due + SECOND < self.wall and self.date_set_at + SECOND < self.now)
                    assert not late, f"{tag} is due and still {found}"
                held = tag.holder
                if spot.life is Life.LEASED and held is not None and held.deadline <= self.now and not held.doubtful:
                    room = self.census.rooms[spot.place[:2]]
                    mine = spot.place[:2] == (held.incarnation, held.partition) and spot.place.offset in room.held.get(held.lease, ())
                    assert not mine, f"{held} of {tag} is over, and nobody took it back"

    def _check_producers(self, info: QueueInfo, waiting: Sequence[SentProduce]) -> None:
        """Whoever waits for room waits because there is none."""
        if waiting and self.census.whole:
            rooms = [room for (queue, _), room in self.census.rooms.items() if queue == info.incarnation]
            there = sum(life not in (Life.COMPLETED, Life.BURIED) for room in rooms for life in room.lives)
            fits = there == 0 or there + len(waiting[0].tags) <= info.options.max_items
            assert not fits, f"{waiting[0]} waits though there is room: {there} of {info.options.max_items}"

    def _check_followers(self, waiting: Sequence[SentWatch]) -> None:
        """Whoever waits for something new is told when it is there."""
        for sent in waiting:
            for (queue, number), room in self.census.rooms.items():
                new = queue == sent.incarnation and room.healthy and len(room.lives) > sent.offsets.get(number, 0)
                assert not new, f"{sent} waits though partition {number} has {len(room.lives)} items"

    def _check_waiting(self, sent: SentLease, loop: Loop) -> None:
        """Whoever waits for items waits because there is none to be had."""
        members = [member for member in loop.turns.members.values() if member.healthy]
        whole = len(members) == len(loop.turns.members)
        paused = any(room.paused for (queue, _), room in self.census.rooms.items() if queue == sent.incarnation)
        if sent.ran_at is not None or (loop.turns.deferred and not whole) or paused:
            return
        if any(member.awaited and member.has_ready_items for member in loop.turns.members.values()):
            return  # one that may have better items is being opened
        held: set[bytes] = set()
        ready: list[Tag] = []
        for tag, found in self.census.found.items():
            spots = [spot for spot in (*found.live, *found.moving) if spot.place.incarnation == sent.incarnation]
            if found.moving and tag.key is not None:
                held.add(tag.key)
            for spot in spots:
                if spot.life is Life.READY:
                    ready.append(tag)
                elif tag.key is not None and spot.life is not Life.BURIED:
                    held.add(tag.key)
        for tag in ready:
            free = tag.key is None or (whole and tag.key not in held and not self.order.is_parked(sent.incarnation, tag.key))
            assert not free, f"{sent} waits though {tag} is ready: {self.census.of(tag)}"

    # -- when nothing goes wrong ---------------------------------------------------------------------

    def settled(self, loops: Sequence[Loop]) -> bool:
        """Whether every partition works and nothing is on its way."""
        return self.census.whole and not any(loop.turns.carrying.under_way for loop in loops)

    def check_calm(self, loops: Sequence[Loop]) -> None:
        """Long enough without trouble, everything that was acknowledged has arrived, once."""
        members = [(loop, member) for loop in loops for member in loop.turns.members.values() if not member.closed]
        failing = [f"{loop.turns.name} {member}" for loop, member in members if not _works(member)]
        assert not failing, f"nothing goes wrong any more, and yet {failing}"
        stuck = [loop.turns.name for loop in loops if loop.turns.carrying.under_way]
        assert not stuck, f"transfers from {stuck} do not arrive"
        for loop, member in members:
            options = self.queues[loop.turns.incarnation].options
            unsure = loop.turns.incarnation in self.unsure_queues
            assert unsure or member.state.policy == options.policy, f"partition {member.number} of {loop.turns.name} has old options"
        for tag in self.tags.values():
            found = self.census.of(tag)
            assert not found.moving and not found.promised, f"{tag} is on its way for ever: {found}"

    def left(self) -> list[Tag]:
        """Items that were stored and not resolved."""
        return [tag for tag in self.tags.values() if (tag.acknowledged or tag.seen) and not tag.resolved]

    def check_end(self, loops: Sequence[Loop]) -> None:
        """Everything was worked off: nothing is left behind."""
        for loop in loops:
            fences = loop.turns.resizing.progress
            assert not fences, f"queue {loop.turns.name} still waits for {fences}"


def _answered_by(sent: Sent, loop: Loop) -> int:
    """By when a request is answered although partitions are out: everybody is given the time for one turn.

    Whoever was run, or stands in line for items, is told when what it waits for has landed or is slow. That is later when no turn was run
    for so long that its time was over before they went out.
    """
    turns = loop.turns
    awaited = [member for member in turns.outs.values() if member.awaited]
    if sent.ran_at is not None:
        awaited = [member for member in awaited if member.number in sent.awaits]
    elif sent.request not in turns.leasing.waiting:
        awaited = []
    return max([sent.request.give_up_at, *(member.out_since + SLOW_AFTER for member in awaited)])


def _works(member: Member) -> bool:
    return member.healthy and not member.open.failed
