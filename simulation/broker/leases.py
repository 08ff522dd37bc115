"""The leases of a simulated broker: checks the answers to lease, complete, retry, bury and extend.

Owns: `SharedModelState` (shared by the parts of the model) and `LeaseModel` (each lease as its holder knows it).
A lease is certainly valid before its deadline, unless its record may be lost: no other lease may have its items, and
its holder must not be refused. It is certainly stale when its items were granted to another lease or its deadline has
passed: its holder must be refused. After a power cut or a lost answer it may be either (`doubtful`). A failed write or
an interrupt ends no lease that was answered.
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
"""For how long no lease of a slow partition ends after its I/O has ended."""
LONGEST = 5 * MINUTE
"""The longest lease timeout that callers ask for."""
REMEMBERED = 15 * MINUTE
"""How long the broker remembers a request id, at least."""


class SharedModelState:
    """The time, all items ever sent, the queues and the inventory: shared by all parts of a broker's model."""

    def __init__(self, undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
        self.now = 0
        self.boot_count = 0
        """The number of reboots. After one, how much time has passed is not known exactly."""
        self.items: dict[bytes, TrackedItem] = {}
        self.queues: dict[int, QueueDescription] = {}
        self.inventory = ItemInventory(self._item_of, undisturbed)
        self.order = KeyOrder(self.inventory)
        self.priorities = PriorityOrder(self.inventory)

    def _item_of(self, payload: bytes) -> TrackedItem:
        item = self.items.get(payload)
        assert item is not None, f"{payload!r} was found and was never produced"
        return item

    def remembers(self, sent: SentRequest, later: int = 0) -> bool:
        """Whether the broker certainly remembers a request's id, now or `later` from now."""
        return self.boot_count == sent.era and self.now + later - sent.since < REMEMBERED


class LeaseModel:
    """Every lease that was granted to a caller."""

    def __init__(self, facts: SharedModelState) -> None:
        self._facts = facts
        self._inventory = facts.inventory
        self._order = facts.order
        self._priorities = facts.priorities
        self.held: list[TrackedLease] = []
        self.unknown_until: dict[int, int] = {}
        """Queue → until when items may be in a lease whose answer was lost."""
        self.lost = 0
        """The number of leases that may have been granted and whose answers were lost."""
        self._states: dict[tuple[int, int], object] = {}
        self._doubted: set[tuple[int, int]] = set()
        """Partitions that may have lost leases when the last process ended, also leases whose answers are not checked
        yet."""
        self._spared_until: dict[tuple[int, int], int] = {}
        """Slow partitions → until when none of their earlier leases ends."""
        self._doubted_at: dict[int, int] = {}
        """Queue → when leases of it may have been lost or ended, also leases whose answers are checked later."""
        self._cut = False
        """The power was cut and the last answers before are not checked yet: leases among them may be lost."""
        self._unopened: set[tuple[int, int]] = set()
        """Partitions not opened since the last reboot: when they are, their leases get their full timeout."""

    @property
    def now(self) -> int:
        return self._facts.now

    # -- time and faults -------------------------------------------------------------------------------

    def rebooted(self, ended: int, *, power: bool) -> None:
        self._cut = self._cut or power
        for held in self.held:
            held.doubtful = held.doubtful or power or held.deadline <= ended
            held.deadline = self.now + held.timeout
        self._unopened.update(self._inventory.partitions)
        for item in self._facts.items.values():
            item.not_before = 0
            item.attempt = 0 if power else item.attempt
        for incarnation in self.unknown_until:  # also those that are over, if the broker has not noticed it
            self.unknown_until[incarnation] = self.now + LONGEST

    def doubt(self, incarnation: int, partition: int | None = None) -> None:
        """Leases of this queue or partition may be lost."""
        self._doubted_at[incarnation] = self.now
        for held in self.held:
            if held.incarnation == incarnation and partition in (None, held.partition):
                held.doubtful = True

    def watch(self) -> None:
        """Remember the state object of each open partition, restart the timeouts of leases in those opened since a
        reboot, and postpone the end of leases in those opened since the last call."""
        for owner, seen in self._inventory.partitions.items():
            if seen.healthy and self._states.get(owner) is not seen.state:
                self._states[owner] = seen.state
                self.postpone_expiry(owner, self.now, sure=False)
            elif seen.healthy and seen.failed:
                self._doubt_end(owner)
        opened = {owner for owner in self._unopened if owner in self._states}
        self._unopened -= opened
        for held in self.held if opened else ():
            if (held.incarnation, held.partition) in opened:
                held.deadline = self.now + held.timeout
        for incarnation in {incarnation for incarnation, _ in opened}.intersection(self.unknown_until):
            self.unknown_until[incarnation] = self.now + LONGEST

    def look_back(self, loops: Iterable[Loop]) -> None:
        """The process has ended: partitions that were not usable, or were reopened unseen, may have lost leases."""
        for loop in loops:
            for number, handle in loop.engine.handles.items():
                known = self._states.get((loop.engine.incarnation, number))
                if handle.partition is None or not handle.is_usable or (known is not None and known is not handle.partition.state):
                    self.doubt(loop.engine.incarnation, number)
                    self._doubted.add((loop.engine.incarnation, number))
        self._states.clear()

    def last_answers_checked(self) -> None:
        """The answers of the last process were checked."""
        self._doubted.clear()
        self._cut = False

    def forget(self, incarnation: int) -> None:
        """Forget the leases of a deleted queue."""
        self.held = [held for held in self.held if held.incarnation != incarnation]

    def answer_lost(self, sent: SentLease) -> None:
        self.lost += 1
        if sent.incarnation not in self._facts.queues:
            return
        until = self.now + max(sent.timeout, self._facts.queues[sent.incarnation].options.policy.lease_timeout)
        self.unknown_until[sent.incarnation] = max(until, self.unknown_until.get(sent.incarnation, 0))

    def postpone_expiry(self, owner: tuple[int, int], since: int, *, sure: bool) -> None:
        """A slow partition ended its I/O, begun at `since`: leases that had not ended then do not end for `GRACE`, if
        nothing fails."""
        self._spared_until[owner] = self.now + GRACE
        if owner[0] in self.unknown_until:
            self.unknown_until[owner[0]] = max(self.unknown_until[owner[0]], self.now + GRACE)
        for held in self.held:
            if (held.incarnation, held.partition) == owner and held.open:  # the items of an ended lease may not be returned yet
                held.doubtful = held.doubtful or held.deadline <= since or (not sure and held.deadline <= self.now)
                held.spared_until = self.now + GRACE
                held.deadline = max(held.deadline, held.spared_until)

    def _doubt_end(self, owner: tuple[int, int]) -> None:
        """A partition works again and was not reopened: leases that would end within `GRACE` may end later."""
        if owner[0] in self.unknown_until:
            self.unknown_until[owner[0]] = max(self.unknown_until[owner[0]], self.now + GRACE)
        for held in self.held:
            if (held.incarnation, held.partition) == owner and held.deadline < self.now + GRACE:
                held.doubtful = True

    def check_known(self, unanswered: Collection[int]) -> None:
        """When idle: every lease is known to a caller, or its answer was lost or (`unanswered` queues) is pending."""
        known = {(held.incarnation, held.partition, held.lease) for held in self.held}
        for (incarnation, partition), seen in self._inventory.partitions.items():
            for lease, given in seen.held.items() if seen.healthy else ():
                sure = (incarnation, partition, lease) in known or self.unknown_until.get(incarnation, 0) > self.now
                sure = sure or incarnation in unanswered
                assert sure, f"{[seen.items[offset] for offset in given]} of partition {partition} are leased, and no caller was told"

    # -- lease -----------------------------------------------------------------------------------------

    def check_leased(self, sent: SentLease, answer: list[LeaseResult], error: PenstockError | None) -> None:
        if error is not None or not self._inventory.all_healthy or not self._priorities.judging:
            self.answer_lost(sent)  # it may have been given more, in a partition that was slow when its process ended
        if error is not None:
            return
        total = sum(handed.granted.count for handed in answer)
        assert total <= sent.want, f"{total} items were granted to {sent}"
        for handed in answer:
            self._check_granted(sent, handed)

    def _check_granted(self, sent: SentLease, handed: LeaseResult) -> None:
        granted = handed.granted
        items = self._facts.items
        given = {at: items[payload] for part in handed.items for at, payload in zip(part.offsets, part.batch.payloads, strict=True)}
        assert list(given) == offsets(granted.runs), f"{sent} was given {granted.runs} and got the items at {list(given)}"
        token = (sent.incarnation, handed.partition, granted.lease)
        known = [one for one in self.held if (one.incarnation, one.partition, one.lease) == token]
        if known:
            assert not sent.first, f"{known[0]} was given twice"
            assert known[0].open.keys() >= given.keys() or known[0].doubtful, f"{known[0]} was given again with {list(given)}"
            return
        left = round(handed.seconds * SECOND)
        held = TrackedLease(sent.incarnation, handed.partition, granted.lease, given, self.now + left, 0)
        held.given_at = sent.ran(sent.answered_at)
        held.timeout = sent.answered_at + left - held.given_at
        if sent.ran_at is not None:  # its partition may have been slow meanwhile
            held.spared_until = self._spared_until.get((held.incarnation, held.partition), 0)
            held.deadline = max(held.deadline, held.spared_until)
        held.doubtful = self._cut or (held.incarnation, held.partition) in self._doubted
        held.doubtful = held.doubtful or sent.ran(self.now) <= self._doubted_at.get(held.incarnation, -1)
        for offset, item in given.items():
            self._check_given(held, offset, item)
        self._check_attempts(held, granted.attempts)
        for item in given.values():
            item.holder, item.times_leased = held, item.times_leased + 1
        self._check_contents(handed, given)
        self._order.check(held, sent.per_key, self.held, self.now)
        if sent.ran_at is None:  # else items that are ready now may not have been then
            self._priorities.check(held, self.now)
        self.held.append(held)

    def _check_given(self, held: TrackedLease, offset: int, item: TrackedItem) -> None:
        place = CopyPlace(held.incarnation, held.partition, offset)
        there = self._inventory.at(place)
        assert there is None or there is item, f"{held} was given {item} at {place}, where {there} is"
        assert not item.resolved, f"{held} was given {item}, which is resolved"
        before = item.holder
        if before is not None:
            self._see_left(before, item)
        assert before is None or not before.holds(item, self.now), f"{held} was given {item}, which {before} has"
        assert not item.at, f"{held} was given {item} before its time"
        assert item.not_before <= self.now, f"{held} was given {item} {(item.not_before - self.now) / SECOND} s before its delay is over"

    def _see_left(self, held: TrackedLease, item: TrackedItem) -> None:
        """An item was granted to another lease while a settle of it is pending: the settle was executed, and its answer
        must say so."""
        offset = next((offset for offset, one in held.open.items() if one is item), None)
        if offset is None or offset not in held.leaving:
            return
        if not self._inventory.holds(CopyPlace(held.incarnation, held.partition, offset), held.lease):
            held.left.add(offset)
            if held.holds(item, self.now):
                held.surely_left.add(offset)
            before = {*held.open}
            held.close_behind(offset)
            held.left |= (before - held.open.keys()) & held.leaving  # the same settle returned the later ones of its key
            item.attempt = 0  # whether that attempt counts is known with the answer

    def _check_attempts(self, held: TrackedLease, attempts: Mapping[int, int]) -> None:
        """Check the attempts of granted items: every answered lease counts as one, unless it was retried uncounted."""
        keys: set[bytes] = set()
        for offset, item in held.open.items():
            attempt, before = attempts.get(offset, 1), item.holder
            sure = before is None or not before.doubtful
            assert attempt > item.attempt or not sure, (
                f"{held} was given {item} as attempt {attempt}, and {before} had it as {item.attempt}"
            )
            item.attempt = 0 if item.key in keys else attempt  # the attempts of later items of a unit may be returned
            keys.update([] if item.key is None else [item.key])

    def _check_contents(self, handed: LeaseResult, given: dict[int, TrackedItem]) -> None:
        for part in handed.items:
            keys = part.batch.keys or [None] * len(part.batch)
            priorities = part.batch.priorities or bytes([5]) * len(part.batch)
            for index, offset in enumerate(part.offsets):
                item = given[offset]
                assert (keys[index], priorities[index]) == (item.key, item.priority), f"{item} came with key {keys[index]!r}"

    # -- settling --------------------------------------------------------------------------------------

    def settle_sent(self, sent: SentSettle) -> None:
        for held, wanted in sent.wanted:
            held.busy = True
            held.leaving.update(wanted if sent.action != "extend" else ())
        for item in sent.follow_ups:  # an earlier try was refused; this one may produce it
            item.must_not_exist = False
        if sent.action == "complete":
            for item in sent.items:
                item.resolving_requests += 1

    def settle_lost(self, sent: SentSettle) -> None:
        """It is not known whether a settle was executed."""
        sent.answer_lost = True
        for held, _ in sent.parts:
            held.doubtful, held.busy = True, False
            held.leaving, held.left, held.surely_left = set(), set(), set()
        for item in sent.items:
            item.not_before = item.attempt = 0

    def check_settled(self, sent: SentSettle, answer: list[Settled | PenstockError], error: PenstockError | None) -> None:
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
            self.settle_lost(sent)
            return
        assert not held.surely_left, f"{sent} was refused, and another lease has {sorted(held.surely_left)} of {held}: {error}"
        if isinstance(error, LeaseLost) and not sent.answer_lost:
            sure = bool(wanted) and held.valid(self.now) and held.incarnation in self._facts.queues
            sure = sure and all(offset in held.open and held.open[offset].holder is held for offset in wanted)
            sure = sure and not (sent.then and held.early(wanted))
            assert not sure, f"{sent} was refused though {held} is valid for another {(held.deadline - self.now) / SECOND} s: {error}"
            for offset in wanted:
                held.close(offset)
        if not sent.answer_lost:
            self._undo(sent, held, wanted)
            for item in sent.follow_ups:
                item.must_not_exist = item.must_not_exist or not item.seen

    def _undo(self, sent: SentSettle, held: TrackedLease, wanted: Iterable[int]) -> None:
        """This request did not complete these items: it cannot have resolved them."""
        if sent.action == "complete":
            for item in sent.items:
                if any(item is held.open.get(offset) for offset in wanted):
                    item.resolving_requests = max(0, item.resolving_requests - 1)

    def _accepted(self, sent: SentSettle, held: TrackedLease, wanted: list[int], result: Settled) -> None:
        refused = {*result.refused, *result.early}
        done = [offset for offset in wanted if offset not in refused]
        known = held.surely_left.issubset(done) or sent.answer_lost
        assert known, f"{sent} was answered with {result}, and {sorted(held.surely_left)} are in other leases"
        if sent.answer_lost or sent.times > 1 or (held.doubtful and result.done < len(done)):
            self._accepted_later(sent, held, done, result)
            return
        settled = sum(offset in held.open or offset in held.done or offset in held.left for offset in done)
        assert result.done == settled, f"{sent} was answered with {result}, and {settled} items were asked for"
        for offset in done:
            item = held.open.get(offset)
            if item is None:
                known = offset in held.left or (sent.action == "complete" and offset in held.done)
                assert known, f"{held} settled offset {offset}, which it does not hold: {sent}"
                continue
            assert self._held_then(sent, held, item), f"{held} settled {item}, which {item.holder} has since"
            assert sent.ran(self.now) < held.deadline or held.doubtful, f"{held} settled {item} after its end"
        for offset in refused:
            item = held.open.get(offset)
            sure = item is not None and held.holds(item, self.now) and offset not in result.early
            assert not sure, f"{sent}: {item} was refused though {held} is valid"
        self._do(sent, held, done)

    def _held_then(self, sent: SentSettle, held: TrackedLease, item: TrackedItem) -> bool:
        """Whether no other lease was given an item before a settle of it was executed, or before an extension was over.

        The answer to an extension may wait for other partitions until the extended lease has ended, too.
        """
        if item.holder is held or sent.action != "extend" or item.holder is None or sent.ran_at is None:
            return item.holder is held
        return sent.ran_at + (sent.timeout or held.timeout) <= item.holder.given_at

    def _accepted_later(self, sent: SentSettle, held: TrackedLease, done: list[int], result: Settled) -> None:
        """Apply the answer to a repetition: the first request may have settled the items."""
        by_others = bool(done) and all(offset in held.done for offset in done)
        if sent.action == "complete":
            for offset in done:
                item = held.open.get(offset)
                if item is not None:
                    self._complete(held, offset, item, sure=False)
        for offset in done:
            if sent.action in ("retry", "bury"):
                if offset in held.open:
                    held.open[offset].attempt = 0
                held.close_behind(offset)
        if sent.action == "extend":
            held.doubtful = True
        for item in sent.follow_ups:
            if not by_others:
                item.acknowledged = item.acknowledged or result.done > 0
            elif sent.answered is None and not sent.answer_lost:  # another request, without these follow-ups, completed the items
                item.must_not_exist = item.must_not_exist or not item.seen

    def _do(self, sent: SentSettle, held: TrackedLease, done: list[int]) -> None:
        """Apply a settle that was accepted."""
        if sent.action == "extend":
            if sent.latest_era == self._facts.boot_count:
                held.deadline = max(sent.ran(self.now) + (sent.timeout or held.timeout), held.spared_until)
            else:  # a reboot came before the answer was checked: every lease got its full timeout again
                held.doubtful = True
            return
        for offset, item in [pair for pair in held.open.items() if pair[0] in done]:
            if offset not in held.open:
                continue
            if sent.action == "complete":
                self._complete(held, offset, item, sure=True)
            else:
                copy = self._inventory.live_copy_in(item, held.incarnation)
                known = copy is not None and not copy.buried and sent.latest_era == self._facts.boot_count
                if sent.action == "retry" and sent.delay:
                    item.not_before = sent.ran(self.now) + sent.delay if known else 0  # replaces an earlier delay
                if sent.action == "retry" and not sent.counted:
                    item.attempt = max(0, item.attempt - 1)
                held.close_behind(offset)
        for item in sent.follow_ups:
            item.acknowledged = True

    def _complete(self, held: TrackedLease, offset: int, item: TrackedItem, *, sure: bool) -> None:
        held.close(offset)
        held.done.add(offset)
        if item.completed_by is not None:
            assert item.completed_by is held, f"{item} was completed by {item.completed_by} and by {held}"
        if sure:
            found = self._inventory.of(item)
            assert not found.live or not self._inventory.all_healthy, f"{item} was completed by {held}, and is there: {found}"
            item.completed_by, item.resolved = held, True
            item.resolving_requests = max(0, item.resolving_requests - 1)
