"""Who holds what in a simulated broker, and whether the answers to lease, complete, retry, bury and extend are right.

Owns: `SharedModelState`, which the model and the leases share, and `LeaseModel`, which knows of each lease what its holder knows.
A lease is *surely valid* while its deadline lies ahead and nothing was lost that it rests on: then nobody else may have its items, and its
holder may not be refused. It is *surely stale* when its items were given to someone else, or its deadline is past: then it must be
refused. Between the two lies what a power cut or a lost answer leave in doubt. A write that fails, or an interrupt,
takes back no lease that was answered.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager

from penstock.loop.loop import Loop
from penstock.loop.requests import LeaseResult
from penstock.reports import QueueDescription
from penstock.rules.commands import Settled
from penstock.rules.runs import offsets
from penstock.words.clock import MINUTE, SECOND
from penstock.words.errors import LeaseLost, OutcomeUnknown, PenstockError
from simulation.broker.inventory import ItemInventory
from simulation.broker.items import CopyPlace, TrackedItem, TrackedLease
from simulation.broker.order import KeyOrder, PriorityOrder
from simulation.broker.sent_requests import SentLease, SentRequest, SentSettle

GRACE = 2 * SECOND
"""How long no lease of a slow partition ends after it is back."""
LONGEST = 5 * MINUTE
"""No lease is asked for longer than this."""
REMEMBERED = 15 * MINUTE
"""How long a request is known by its id, at least."""


class SharedModelState:
    """The time, every item that was ever sent, the queues there are, and the census: what every judge of a simulated broker needs."""

    def __init__(self, undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
        self.now = 0
        self.boot_count = 0
        """How often the machine was rebooted: then nobody can say how much time has passed."""
        self.tags: dict[bytes, TrackedItem] = {}
        self.queues: dict[int, QueueDescription] = {}
        self.census = ItemInventory(self._tag_of, undisturbed)
        self.order = KeyOrder(self.census)
        self.priorities = PriorityOrder(self.census)

    def _tag_of(self, payload: bytes) -> TrackedItem:
        tag = self.tags.get(payload)
        assert tag is not None, f"{payload!r} was found, which nobody produced"
        return tag

    def remembers(self, sent: SentRequest, later: int = 0) -> bool:
        """Whether a request is surely known by its id, now or so much later."""
        return self.boot_count == sent.era and self.now + later - sent.since < REMEMBERED


class LeaseModel:
    """Every lease that a caller was given."""

    def __init__(self, facts: SharedModelState) -> None:
        self._facts = facts
        self._census = facts.census
        self._order = facts.order
        self._priorities = facts.priorities
        self.held: list[TrackedLease] = []
        self.unknown_until: dict[int, int] = {}
        """Queue → until when items may be leased to somebody who never learnt of it."""
        self.lost = 0
        """How many leases somebody may have been given without learning of it."""
        self._states: dict[tuple[int, int], object] = {}
        self._doubted: set[tuple[int, int]] = set()
        """Partitions that lost leases in the last moments of a process, perhaps also such as were not judged yet."""
        self._spared_until: dict[tuple[int, int], int] = {}
        """Partitions that were slow: until when none of the leases ends that were given before."""
        self._doubted_at: dict[int, int] = {}
        """Queue → when leases of it may have been lost or ended: those whose answers come later may be among them."""
        self._cut = False
        """The power was cut and what the last process answered is not judged yet: leases among it may be lost."""
        self._unopened: set[tuple[int, int]] = set()
        """Partitions that were not opened since the machine was rebooted: their leases get their full timeout when they are."""

    @property
    def now(self) -> int:
        return self._facts.now

    # -- time and trouble ----------------------------------------------------------------------------

    def rebooted(self, ended: int, *, power: bool) -> None:
        self._cut = self._cut or power
        for held in self.held:
            held.doubtful = held.doubtful or power or held.deadline <= ended
            held.deadline = self.now + held.timeout
        self._unopened.update(self._census.partitions)
        for tag in self._facts.tags.values():
            tag.not_before = 0
            tag.attempt = 0 if power else tag.attempt
        for incarnation in self.unknown_until:  # also what was over, if nobody came by to notice it
            self.unknown_until[incarnation] = self.now + LONGEST

    def doubt(self, incarnation: int, partition: int | None = None) -> None:
        """What was given out last may be lost."""
        self._doubted_at[incarnation] = self.now
        for held in self.held:
            if held.incarnation == incarnation and partition in (None, held.partition):
                held.doubtful = True

    def watch(self) -> None:
        """Remember how each partition was opened. One that is opened anew in the same process keeps every lease that was answered."""
        for owner, seen in self._census.partitions.items():
            if seen.healthy:
                self._states[owner] = seen.state
        opened = {owner for owner in self._unopened if owner in self._states}
        self._unopened -= opened
        for held in self.held if opened else ():
            if (held.incarnation, held.partition) in opened:
                held.deadline = self.now + held.timeout
        for incarnation in {incarnation for incarnation, _ in opened}.intersection(self.unknown_until):
            self.unknown_until[incarnation] = self.now + LONGEST

    def look_back(self, loops: Iterable[Loop]) -> None:
        """The process has ended: of partitions that it opened anew in its last moments, leases may be lost too."""
        for loop in loops:
            for number, member in loop.engine.handles.items():
                known = self._states.get((loop.engine.incarnation, number))
                if member.partition is None or not member.is_usable or (known is not None and known is not member.partition.state):
                    self.doubt(loop.engine.incarnation, number)
                    self._doubted.add((loop.engine.incarnation, number))
        self._states.clear()

    def decided(self) -> None:
        """What the last process answered was judged."""
        self._doubted.clear()
        self._cut = False

    def forget(self, incarnation: int) -> None:
        """A queue is gone."""
        self.held = [held for held in self.held if held.incarnation != incarnation]

    def unknown(self, sent: SentLease) -> None:
        self.lost += 1
        if sent.incarnation not in self._facts.queues:
            return
        until = self.now + max(sent.timeout, self._facts.queues[sent.incarnation].options.policy.lease_timeout)
        self.unknown_until[sent.incarnation] = max(until, self.unknown_until.get(sent.incarnation, 0))

    def postpone_expiry(self, owner: tuple[int, int], since: int, *, sure: bool) -> None:
        """A slow partition is back: leases that had not ended when it went out (`since`) do not end for a while, if nothing fails."""
        self._spared_until[owner] = self.now + GRACE
        if owner[0] in self.unknown_until:
            self.unknown_until[owner[0]] = max(self.unknown_until[owner[0]], self.now + GRACE)
        for held in self.held:
            if (held.incarnation, held.partition) == owner and held.open:  # one that was over may not have been taken back yet
                held.doubtful = held.doubtful or held.deadline <= since or (not sure and held.deadline <= self.now)
                held.spared_until = self.now + GRACE
                held.deadline = max(held.deadline, held.spared_until)

    def check_known(self, unanswered: Collection[int]) -> None:
        """At rest: whatever is leased is in somebody's hands, or may be, because an answer was lost or (`unanswered` queues) waits."""
        known = {(held.incarnation, held.partition, held.lease) for held in self.held}
        for (incarnation, partition), seen in self._census.partitions.items():
            for lease, given in seen.held.items() if seen.healthy else ():
                sure = (incarnation, partition, lease) in known or self.unknown_until.get(incarnation, 0) > self.now
                sure = sure or incarnation in unanswered
                assert sure, f"{[seen.tags[offset] for offset in given]} of partition {partition} are leased and nobody has them"

    # -- lease ---------------------------------------------------------------------------------------

    def leased(self, sent: SentLease, answer: list[LeaseResult], error: PenstockError | None) -> None:
        if error is not None or not self._census.all_healthy:
            self.unknown(sent)
        if error is not None:
            return
        total = sum(handed.granted.count for handed in answer)
        assert total <= sent.want, f"{total} items were given to {sent}"
        for handed in answer:
            self._handed(sent, handed)

    def _handed(self, sent: SentLease, handed: LeaseResult) -> None:
        granted = handed.granted
        tags = self._facts.tags
        given = {part.start + index: tags[payload] for part in handed.items for index, payload in enumerate(part.batch.payloads)}
        assert list(given) == offsets(granted.runs), f"{sent} was given {granted.runs} and got the items at {list(given)}"
        token = (sent.incarnation, handed.partition, granted.lease)
        known = [one for one in self.held if (one.incarnation, one.partition, one.lease) == token]
        if known:
            assert not sent.first, f"{known[0]} was given twice"
            assert known[0].open.keys() >= given.keys() or known[0].doubtful, f"{known[0]} was given again with {list(given)}"
            return
        held = TrackedLease(sent.incarnation, handed.partition, granted.lease, given, self.now + round(handed.seconds * SECOND), 0)
        held.timeout = held.deadline - sent.ran(self.now)
        if sent.ran_at is not None:  # its partition may have been slow, and is back
            held.spared_until = self._spared_until.get((held.incarnation, held.partition), 0)
            held.deadline = max(held.deadline, held.spared_until)
        held.doubtful = self._cut or (held.incarnation, held.partition) in self._doubted
        held.doubtful = held.doubtful or sent.ran(self.now) <= self._doubted_at.get(held.incarnation, -1)
        for offset, tag in given.items():
            self._check_given(held, offset, tag)
        self._check_attempts(held, granted.attempts)
        for tag in given.values():
            tag.holder, tag.times_leased = held, tag.times_leased + 1
        self._check_contents(handed, given)
        self._order.check(held, sent.per_key, self.held, self.now)
        if sent.ran_at is None:  # else what waits now did not wait then
            self._priorities.check(held, self.now)
        self.held.append(held)

    def _check_given(self, held: TrackedLease, offset: int, tag: TrackedItem) -> None:
        place = CopyPlace(held.incarnation, held.partition, offset)
        there = self._census.at(place)
        assert there is None or there is tag, f"{held} was given {tag} at {place}, where {there} is"
        assert not tag.resolved, f"{held} was given {tag}, which is resolved"
        before = tag.holder
        if before is not None:
            self._see_left(before, tag)
        assert before is None or not before.holds(tag, self.now), f"{held} was given {tag}, which {before} has"
        assert not tag.at, f"{held} was given {tag} before its time"
        assert tag.not_before <= self.now, f"{held} was given {tag} {(tag.not_before - self.now) / SECOND} s before its delay is over"

    def _see_left(self, held: TrackedLease, tag: TrackedItem) -> None:
        """Somebody else has an item whose holder waits for an answer: what was asked was done, and the answer must say so."""
        offset = next((offset for offset, one in held.open.items() if one is tag), None)
        if offset is None or offset not in held.leaving:
            return
        if not self._census.holds(CopyPlace(held.incarnation, held.partition, offset), held.lease):
            held.left.add(offset)
            if held.holds(tag, self.now):
                held.surely_left.add(offset)
            held.close_behind(offset)
            tag.attempt = 0  # whether that one counts is known when the answer is there

    def _check_attempts(self, held: TrackedLease, attempts: Mapping[int, int]) -> None:
        """Every lease that was answered counts as an attempt, unless its holder said that it was none."""
        keys: set[bytes] = set()
        for offset, tag in held.open.items():
            attempt, before = attempts.get(offset, 1), tag.holder
            sure = before is None or not before.doubtful
            assert attempt > tag.attempt or not sure, f"{held} was given {tag} as attempt {attempt}, and {before} had it as {tag.attempt}"
            tag.attempt = 0 if tag.key in keys else attempt  # the later ones of a unit may get theirs back
            keys.update([] if tag.key is None else [tag.key])

    def _check_contents(self, handed: LeaseResult, given: dict[int, TrackedItem]) -> None:
        for part in handed.items:
            keys = part.batch.keys or [None] * len(part.batch)
            priorities = part.batch.priorities or bytes([5]) * len(part.batch)
            for index in range(len(part.batch)):
                tag = given[part.start + index]
                assert (keys[index], priorities[index]) == (tag.key, tag.priority), f"{tag} came with key {keys[index]!r}"

    # -- settling ------------------------------------------------------------------------------------

    def settling(self, sent: SentSettle) -> None:
        for held, wanted in sent.wanted:
            held.busy = True
            held.leaving.update(wanted if sent.action != "extend" else ())
        for tag in sent.follow_ups:  # it was refused before, and may be made now
            tag.must_not_exist = False
        if sent.action == "complete":
            for tag in sent.tags:
                tag.resolving_requests += 1

    def unsettled(self, sent: SentSettle) -> None:
        """Nobody knows whether it was done."""
        sent.answer_lost = True
        for held, _ in sent.parts:
            held.doubtful, held.busy = True, False
            held.leaving, held.left, held.surely_left = set(), set(), set()
        for tag in sent.tags:
            tag.not_before = tag.attempt = 0

    def settled(self, sent: SentSettle, answer: list[Settled | PenstockError], error: PenstockError | None) -> None:
        if error is not None:
            answer = [error] * len(sent.parts)
        if sent.answered is not None and self._facts.remembers(sent) and not any(isinstance(one, PenstockError) for one in sent.answered):
            same = [one for one in answer if not isinstance(one, PenstockError)]
            assert len(same) < len(answer) or same == sent.answered, f"{sent} was answered with {answer}, and before with {sent.answered}"
        for (held, wanted), result in zip(sent.wanted, answer, strict=True):
            if isinstance(result, Settled):
                self._accepted(sent, held, wanted, result)
            else:
                self._refused(sent, held, wanted, result)
            held.busy, held.leaving, held.left, held.surely_left = False, set(), set(), set()
        if all(isinstance(one, Settled) for one in answer):
            sent.answered = list(answer)

    def _refused(self, sent: SentSettle, held: TrackedLease, wanted: list[int], error: PenstockError) -> None:
        if isinstance(error, OutcomeUnknown):
            self.unsettled(sent)
            return
        assert not held.surely_left, f"{sent} was refused, and yet somebody else has {sorted(held.surely_left)} of {held}: {error}"
        if isinstance(error, LeaseLost) and not sent.answer_lost:
            sure = bool(wanted) and held.valid(self.now) and held.incarnation in self._facts.queues
            sure = sure and all(offset in held.open and held.open[offset].holder is held for offset in wanted)
            sure = sure and not (sent.then and held.early(wanted))
            assert not sure, f"{sent} was refused though {held} is valid for another {(held.deadline - self.now) / SECOND} s: {error}"
            for offset in wanted:
                held.close(offset)
        if not sent.answer_lost:
            self._undo(sent, held, wanted)
            for tag in sent.follow_ups:
                tag.must_not_exist = tag.must_not_exist or not tag.seen

    def _undo(self, sent: SentSettle, held: TrackedLease, wanted: Iterable[int]) -> None:
        """These were not completed by this request."""
        if sent.action == "complete":
            for tag in sent.tags:
                if any(tag is held.open.get(offset) for offset in wanted):
                    tag.resolving_requests = max(0, tag.resolving_requests - 1)

    def _accepted(self, sent: SentSettle, held: TrackedLease, wanted: list[int], result: Settled) -> None:
        refused = {*result.refused, *result.early}
        done = [offset for offset in wanted if offset not in refused]
        known = held.surely_left.issubset(done) or sent.answer_lost
        assert known, f"{sent} was answered with {result}, and {sorted(held.surely_left)} are with others"
        if sent.answer_lost or sent.times > 1 or (held.doubtful and result.done < len(done)):
            self._accepted_later(sent, held, done, result)
            return
        settled = sum(offset in held.open or offset in held.done or offset in held.left for offset in done)
        assert result.done == settled, f"{sent} was answered with {result}, and {settled} items were asked for"
        for offset in done:
            tag = held.open.get(offset)
            if tag is None:
                known = offset in held.left or (sent.action == "complete" and offset in held.done)
                assert known, f"{held} settled offset {offset}, which it does not hold: {sent}"
                continue
            assert tag.holder is held, f"{held} settled {tag}, which {tag.holder} has since"
            assert sent.ran(self.now) < held.deadline or held.doubtful, f"{held} settled {tag} after its end"
        for offset in refused:
            tag = held.open.get(offset)
            sure = tag is not None and held.holds(tag, self.now) and offset not in result.early
            assert not sure, f"{sent}: {tag} was refused though {held} is valid"
        self._do(sent, held, done)

    def _accepted_later(self, sent: SentSettle, held: TrackedLease, done: list[int], result: Settled) -> None:
        """A repetition: what it says was done may have been done the first time."""
        by_others = bool(done) and all(offset in held.done for offset in done)
        if sent.action == "complete":
            for offset in done:
                tag = held.open.get(offset)
                if tag is not None:
                    self._complete(held, offset, tag, sure=False)
        for offset in done:
            if sent.action in ("retry", "bury"):
                if offset in held.open:
                    held.open[offset].attempt = 0
                held.close_behind(offset)
        if sent.action == "extend":
            held.doubtful = True
        for tag in sent.follow_ups:
            if not by_others:
                tag.acknowledged = tag.acknowledged or result.done > 0
            elif sent.answered is None and not sent.answer_lost:  # another request has completed the items, and that one had no follow-ups
                tag.must_not_exist = tag.must_not_exist or not tag.seen

    def _do(self, sent: SentSettle, held: TrackedLease, done: list[int]) -> None:
        """What the answer means."""
        if sent.action == "extend":
            if sent.latest_era == self._facts.boot_count:
                held.deadline = max(sent.ran(self.now) + (sent.timeout or held.timeout), held.spared_until)
            else:  # the machine was rebooted before anybody learnt of it: every lease was given its time anew
                held.doubtful = True
            return
        for offset, tag in [pair for pair in held.open.items() if pair[0] in done]:
            if offset not in held.open:
                continue
            if sent.action == "complete":
                self._complete(held, offset, tag, sure=True)
            else:
                spot = self._census.lives_in(tag, held.incarnation)
                known = spot is not None and not spot.buried and sent.latest_era == self._facts.boot_count
                if sent.action == "retry" and sent.delay:
                    tag.not_before = sent.ran(self.now) + sent.delay if known else 0  # an earlier delay says nothing any more
                if sent.action == "retry" and not sent.counted:
                    tag.attempt = max(0, tag.attempt - 1)
                held.close_behind(offset)
        for tag in sent.follow_ups:
            tag.acknowledged = True

    def _complete(self, held: TrackedLease, offset: int, tag: TrackedItem, *, sure: bool) -> None:
        held.close(offset)
        held.done.add(offset)
        if tag.completed_by is not None:
            assert tag.completed_by is held, f"{tag} was completed by {tag.completed_by} and by {held}"
        if sure:
            found = self._census.of(tag)
            assert not found.live or not self._census.all_healthy, f"{tag} was completed by {held}, and is there: {found}"
            tag.completed_by, tag.resolved = held, True
            tag.resolving_requests = max(0, tag.resolving_requests - 1)
