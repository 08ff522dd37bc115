"""What a broker must guarantee to its callers, learnt from the answers that were seen and compared with what is found.

Owns: `BrokerModel`: every item ever sent and what was answered about it, compared with the inventory after every turn;
and the check that no request waits without a reason when the broker is idle.
- An acknowledged item is in exactly one place, or was resolved by a request that asked for it.
- A refused item is nowhere; an item without an answer is found at most once.
- A resolved item stays resolved until a seek.
leases.py checks the leases, order.py the order of items. Of the broker's code only item states are used.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from penstock.loop.loop import Loop
from penstock.loop.partition_handle import SLOW_AFTER, PartitionHandle
from penstock.loop.requests import StoredPart
from penstock.reports import ItemChange, QueueDescription
from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND
from penstock.words.errors import InvalidRequest, OutcomeUnknown, PenstockError, Refused
from penstock.words.ids import locate
from penstock.words.limits import IMMEDIATE
from penstock.words.origin import Origin
from simulation.broker.inventory import ItemCopies, ItemCopy
from simulation.broker.items import CopyPlace, TrackedItem
from simulation.broker.leases import LeaseModel, SharedModelState
from simulation.broker.sent_requests import SentLease, SentProduce, SentRequest, SentSettle, SentWatch


class UnverifiedPlace(NamedTuple):
    """An answer that gives an item's place and could not be verified yet."""

    sent: SentProduce
    item: TrackedItem
    place: CopyPlace


@dataclass(slots=True)
class DedupEntry:
    """The first item with a dedup id, and until when others are its duplicates."""

    item: TrackedItem
    until: int
    era: int


class BrokerModel(SharedModelState):
    """The model of a broker."""

    def __init__(self, undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(undisturbed)
        self.undisturbed = undisturbed
        self.leases = LeaseModel(self)
        self.wall = 0
        self.date_set_at = 0
        self.windows: dict[int, int] = {}
        """Queue → dedup window."""
        self._firsts: dict[tuple[int, bytes | None, bytes], DedupEntry] = {}
        self._asked: dict[TrackedItem, SentProduce] = {}
        """Items whose produce is pending."""
        self._unsure: dict[tuple[int, bytes | None, bytes], int] = {}
        """Dedup ids that may or may not be in use → until when."""
        self._unverified: list[UnverifiedPlace] = []
        """Answers with places in partitions that were failing: verified when those are healthy again."""
        self.clearing: set[int] = set()
        """Queues with a clear whose result is not verified yet."""
        self.seeking: set[int] = set()
        self.unsure_queues: set[int] = set()
        """Queues with a change that was not answered."""
        self.sought = 0
        self.vanished: set[int] = set()
        """Queues deleted since the last look at which all partitions were healthy."""

    # -- time ------------------------------------------------------------------------------------------

    def pass_time(self, duration: int, wall: int) -> None:
        self.now += duration
        self.wall = wall
        for item in self.items.values():
            if item.at and item.at <= wall + IMMEDIATE:
                item.at = 0

    def rebooted(self, downtime: int, wall: int, *, power: bool) -> None:
        """The machine was rebooted: elapsed time started again, and a power cut may have lost what was not synced."""
        self.boot_count += 1
        ended = self.now
        self.pass_time(downtime, wall)
        self.leases.rebooted(ended, power=power)
        for name in self._unsure:  # the broker measures the rest of the window from the last time that it recorded
            self._unsure[name] = self.now + self.windows[name[0]]
        self.priorities.rebooted()

    # -- queues ----------------------------------------------------------------------------------------

    def opened(self, there: Sequence[QueueDescription]) -> None:
        """A new process has opened the broker: check that the queues are those that were acknowledged."""
        self.priorities.judging = False
        found = {info.incarnation: info for info in there}
        for incarnation, info in self.queues.items():
            if incarnation in self.unsure_queues:
                continue
            assert incarnation in found, f"queue {info.name} is missing"
            now = found[incarnation]
            assert (now.active, now.options) == (info.active, info.options), f"queue {info.name} is {now}, not {info}"
        gone = [incarnation for incarnation in self.queues if incarnation not in found]
        self.queues = found
        for info in there:
            self.windows.setdefault(info.incarnation, info.options.policy.dedup_window)
        self.unsure_queues.clear()
        for incarnation in gone:
            self.deleted(incarnation)

    def last_answers_checked(self) -> None:
        """The state after an opening was checked: requests without an answer took effect before, or never will."""
        self.leases.last_answers_checked()
        self.priorities.judging = True
        if self.inventory.all_healthy:
            self.clearing.clear()
            self.seeking.clear()
            for item in self.items.values():
                item.resolving_requests = 0

    def created(self, info: QueueDescription) -> None:
        self.queues[info.incarnation] = info
        self.windows[info.incarnation] = info.options.policy.dedup_window

    def changed(self, incarnation: int, answer: QueueDescription | PenstockError | None) -> None:
        """Apply the answer to a change of a queue: its new description, None if it was deleted, or an error."""
        if isinstance(answer, QueueDescription):
            self.queues[incarnation] = answer
        elif answer is None:
            self.deleted(incarnation)
        if not isinstance(answer, OutcomeUnknown):
            self.unsure_queues.discard(incarnation)

    def deleted(self, incarnation: int) -> None:
        """A queue and its items were deleted."""
        self.queues.pop(incarnation, None)
        self.unsure_queues.discard(incarnation)
        self.vanished.add(incarnation)
        self.leases.forget(incarnation)

    def _vanishes(self, item: TrackedItem, found: ItemCopies) -> bool:
        """Whether an item was deleted with its queue."""
        if not self.vanished or found.unresolved:
            return False
        last = self.inventory.before(item)
        known = item.queue in self.vanished or any(place.incarnation in self.vanished for place in item.places)
        return known or bool(last.moving)

    def clear_sent(self, incarnation: int, partition: int | None, chosen: dict[str, bool]) -> list[bytes]:
        """A clear is about to be run; returns the parked keys that it will release."""
        self.clearing.add(incarnation)
        if chosen["leased"]:
            self.leases.doubt(incarnation, partition)
        return self.order.clear_parked(incarnation, partition) if chosen["buried"] else []

    def cancel_sent(self, incarnation: int, items: Sequence[TrackedItem]) -> None:
        """A cancel of items is about to be run: their dedup ids may be free afterwards."""
        self.clearing.add(incarnation)
        for item in items:
            if item.dedup is not None:
                for queue in {item.queue, incarnation}:
                    self._unsure[queue, item.key, item.dedup] = self.now + self.windows[queue]

    def check_changes(self, items: Sequence[TrackedItem], answer: Sequence[ItemChange], allowed: Container[ItemState]) -> None:
        """Items were cancelled or rescheduled: check that each one that was is now in an allowed state."""
        for item, change in zip(items, answer, strict=True):
            wrong = [copy for copy in self.inventory.of(item).live if copy.state not in allowed]
            assert not (change.done and wrong), f"{change} was answered for {item}, which is {wrong}"

    @staticmethod
    def reschedule_sent(items: Sequence[TrackedItem]) -> None:
        """A reschedule of items is about to be run: they lose their positions, and may become ready sooner or later."""
        for item in items:
            item.at = item.due = item.not_before = 0
            item.forget_order()

    def check_cleared(self, incarnation: int, partition: int | None, chosen: dict[str, bool]) -> None:
        """A clear was answered: check that no chosen item is left."""
        for item in self.items.values():
            for copy in self.inventory.of(item).live if self.inventory.before(item).live else ():
                here = copy.place.incarnation == incarnation and partition in (None, copy.place.partition)
                assert not (here and chosen[copy.state.value] and copy.state is not ItemState.LEASED), f"{item} was cleared and is {copy}"

    def operation_done(self, incarnation: int) -> None:
        """A clear or seek was answered and its effects were checked."""
        if self.inventory.all_healthy:
            self.clearing.discard(incarnation)
            self.seeking.discard(incarnation)

    # -- requests --------------------------------------------------------------------------------------

    def request_sent(self, sent: SentRequest) -> None:
        if sent.first:
            sent.since, sent.era = self.now, self.boot_count
        sent.latest_era = self.boot_count
        if isinstance(sent, SentProduce):
            for index, item in enumerate(sent.items):
                item.must_not_exist = item.must_not_exist and index in sent.ids
                self._asked[item] = sent
        elif isinstance(sent, SentSettle):
            self.leases.settle_sent(sent)

    def answer_lost(self, sent: SentRequest) -> None:
        """The answer to a request is lost."""
        sent.answer_lost = True
        if isinstance(sent, SentProduce):
            self._forget_asked(sent)
            self._unknown(sent, sent.items)
        elif isinstance(sent, SentLease):
            self.leases.answer_lost(sent)
        elif isinstance(sent, SentSettle):
            self.leases.settle_lost(sent)

    def check_answer(self, sent: SentRequest) -> None:
        """Check an answer and apply it."""
        answer, error = sent.request.answer, sent.request.error
        if isinstance(sent, SentProduce):
            self._forget_asked(sent)
            self._produced(sent, answer, error)
        elif isinstance(sent, SentLease):
            self.leases.check_leased(sent, answer, error)
        elif isinstance(sent, SentSettle):
            self.leases.check_settled(sent, [one.error() if isinstance(one, Refused) else one for one in answer or ()], error)

    # -- produce ---------------------------------------------------------------------------------------

    def _forget_asked(self, sent: SentProduce) -> None:
        for item in sent.items:
            self._asked.pop(item, None)

    def _produced(self, sent: SentProduce, answer: list[StoredPart], error: PenstockError | None) -> None:
        every = range(len(sent.items))
        if error is not None:
            self._refused(sent, every, error)
            return
        covered = sorted(index for part in answer for index in (every if part.indexes is None else part.indexes))
        assert covered == list(every), f"the parts of the answer are for {covered} of {len(sent.items)} items: {answer}"
        for part in answer:
            indexes = every if part.indexes is None else part.indexes
            if part.refused is not None:
                self._refused(sent, indexes, part.refused.error())
                continue
            assert part.stored is not None
            numbers = list(part.stored.offsets)
            assert len(numbers) == len(indexes), f"{len(indexes)} items got {len(numbers)} ids: {part}"
            for index, number in zip(indexes, numbers, strict=True):
                self._stored(sent, index, CopyPlace(sent.incarnation, *locate(part.partition, number)), again=part.stored.repeated)

    def _refused(self, sent: SentProduce, indexes: Iterable[int], error: PenstockError) -> None:
        """These items must not be stored, unless the error is `OutcomeUnknown`."""
        assert not isinstance(error, InvalidRequest), f"{sent} is valid and was refused: {error!r}"
        indexes = list(indexes)
        items = [sent.items[index] for index in indexes]
        if isinstance(error, OutcomeUnknown):
            sent.answer_lost = True
            self._unknown(sent, items)
        elif not sent.answer_lost:
            for index, item in zip(indexes, items, strict=True):
                if not item.seen and index not in sent.ids:
                    item.must_not_exist = True

    def _unknown(self, sent: SentProduce, items: Iterable[TrackedItem]) -> None:
        for item in items:
            if item.dedup is not None:
                self._unsure[sent.incarnation, item.key, item.dedup] = self.now + self.windows[sent.incarnation]

    def _stored(self, sent: SentProduce, index: int, place: CopyPlace, *, again: bool) -> None:
        item, known = sent.items[index], sent.ids.get(index)
        if known is not None and self.remembers(sent):
            assert place == known, f"{sent} was answered with {place} for {item}, and before with {known}"
            return
        sent.ids[index] = place
        if self.inventory.healthy(place):
            self._look_up(sent, item, place, again=again)
        elif sent.incarnation in self.queues:
            item.acknowledged = item.acknowledged or item.dedup is None
            self._unverified.append(UnverifiedPlace(sent, item, place))

    def _verify_places(self) -> None:
        """Verify answers whose partitions are healthy again."""
        unverified, self._unverified = self._unverified, []
        unverified.sort(key=lambda one: self.inventory.at(one.place) is not one.item)  # first items before their duplicates
        for one in unverified:
            if self.inventory.healthy(one.place):
                self._look_up(*one, again=True)
            elif one.sent.incarnation in self.queues:
                self._unverified.append(one)

    def _look_up(self, sent: SentProduce, item: TrackedItem, place: CopyPlace, *, again: bool) -> None:
        """Check that the answered place has the item, or the first item with its dedup id."""
        real = self.inventory.at(place)
        if real is None:
            dropped = place.offset in self.inventory.partitions[place[:2]].dropped
            assert dropped, f"{item} was answered to be at {place}, where no item is: {sent}"
            item.acknowledged = item.acknowledged or item.dedup is None
        elif real is item:
            self._stored_first(sent, item, place, again=again)
        else:
            same = (real.queue, real.key, real.dedup) == (item.queue, item.key, item.dedup) and item.dedup is not None
            assert same, f"{item} was answered to be at {place}, where {real} is"
            self._duplicate(sent, item, real)

    def _stored_first(self, sent: SentProduce, item: TrackedItem, place: CopyPlace, *, again: bool) -> None:
        fresh = sent.first and not again and not item.acknowledged
        item.acknowledged = True
        if fresh and not item.scheduled:
            self.order.enter(item)
        if item.dedup is None:
            return
        name = (sent.incarnation, item.key, item.dedup)
        first = self._firsts.get(name)
        if first is not None and first.item is not item and not self._is_unsure(name, sent.ran(self.now)):
            assert first.until <= sent.ran(self.now) or first.era != self.boot_count, (
                f"{item} was stored though it is a duplicate of {first.item}"
            )
        if first is None or first.item is not item:
            window = self.windows[sent.incarnation]
            self._firsts[name] = DedupEntry(item, sent.ran(self.now) + window, sent.latest_era)
            if not fresh:
                self._unsure[name] = self.now + self.windows[sent.incarnation]

    def _duplicate(self, sent: SentProduce, item: TrackedItem, real: TrackedItem) -> None:
        assert item.dedup is not None
        name = (item.queue, item.key, item.dedup)
        first = self._firsts.get(name)
        asked = self._asked.get(real)
        over = first is None or first.until <= self.now or first.era != self.boot_count
        if asked is not None and asked.first and over:  # its own answer still waits for another partition
            window = self.windows[sent.incarnation]
            first = self._firsts[name] = DedupEntry(real, asked.ran(self.now) + window, asked.latest_era)
        ran = sent.ran(sent.answered_at)  # its place may have been looked up much later, when that partition was healthy
        if sent.first and not self._is_unsure(name, ran):
            assert first is not None and first.item is real, f"{item} was treated as a duplicate of {real}, which it is not"
            assert first.until > ran or first.era != self.boot_count, f"{item} was treated as a duplicate of {real}, whose window is over"
        real.acknowledged = True  # even if its own answer was lost
        item.must_not_exist = True

    def _is_unsure(self, name: tuple[int, bytes | None, bytes], ran: int) -> bool:
        """Whether it was not known, when a produce was executed, which item was the first with this dedup id."""
        return self._unsure.get(name, -1) >= ran

    # -- after every turn ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Follow the changes that no answer reports: transfers, burials, expiries and effects of administrative
        operations."""
        self._verify_places()
        self.priorities.look(self.now, self.seeking)
        for item, place, came in self.inventory.arrivals:
            self._check_origin(item, place, came)
        self._bring_back()
        self.order.follow()
        self.leases.watch()

    def _check_origin(self, item: TrackedItem, place: CopyPlace, came: Origin | None) -> None:
        """Check the origin of a copy: a transferred item names its former place and why it was buried there."""
        before = item.places[: item.places.index(place)]
        if came is None:
            assert not before or not self.inventory.all_healthy, f"{item} came to {place} from {before} and has no origin"
            return
        buried_in = CopyPlace(came.incarnation, *came.partition_and_offset)
        assert buried_in in before, f"{item} came to {place}, and its origin is {buried_in}, where it never was: {before}"
        if came.buried_at and before and before[-1] == buried_in:
            known = self.queues.get(came.incarnation)
            assert known is None or known.name == came.queue, f"{item} came from {came.queue}, and {buried_in} is of {known}"
            assert came.reason, f"{item} was buried, and its origin has no reason: {came}"
            assert came.attempts <= item.times_leased + self.leases.lost, (
                f"{item} was leased {item.times_leased} times, and its origin says {came}"
            )

    def _bring_back(self) -> None:
        """Items found ready after a seek are no longer resolved; their position in the order is not known.

        While a partition cannot be read, an item that was found completed counts as unresolved still (`compare`).
        """
        for item, found in self.inventory.found.items() if self.seeking else ():
            before = self.inventory.before(item)
            resolved = item.resolved or (before.done and not before.unresolved)
            if resolved and any(copy.place.incarnation in self.seeking for copy in _brought_back(item, found)):
                item.resolved, item.completed_by = False, None
                item.at = item.not_before = item.attempt = 0  # ready at once, also if it was scheduled before
                item.forget_order()
                self.sought += 1

    def compare(self) -> None:
        """Check for every item that it is where it should be."""
        inventory = self.inventory
        for item in self.items.values():
            found = inventory.of(item)
            if item.resolved and not found.live:
                continue
            if self._vanishes(item, found):
                item.resolved = item.seen or item.acknowledged
                item.must_not_exist, item.deleted_with_queue = not item.resolved, True
                continue
            assert len(found.live) <= 1, f"{item} is in several places: {found}"
            if found.anywhere:
                item.seen = True
                assert not item.must_not_exist, f"{item} was refused, and is found: {found}"
            if inventory.all_healthy:
                self._compare(item, found)
        if inventory.all_healthy:
            self.vanished.clear()
        inventory.check_keys()

    def _compare(self, item: TrackedItem, found: ItemCopies) -> None:
        if item.resolved:
            assert item.deleted_with_queue, f"{item} was resolved, and is found again: {found}"
            item.resolved = item.deleted_with_queue = False
            item.forget_order()
        if found.live:
            assert item.completed_by is None, f"{item} was completed by {item.completed_by}, and is still found: {found}"
        elif found.done and _latest(item, found) in [copy.place for copy in found.done]:
            self._resolved(item, found)
        elif not found.unresolved:
            assert not item.acknowledged and not item.seen, f"{item} was stored, and is nowhere"

    def _resolved(self, item: TrackedItem, found: ItemCopies) -> None:
        """Check that an item was resolved by a request, a clear or retention. An older copy may still be moving."""
        clearing = any(copy.place.incarnation in self.clearing for copy in found.done)
        dropped = any(copy.place.offset in self.inventory.partitions[copy.place[:2]].dropped for copy in found.done)
        dropped = dropped and (item.has_ttl or bool(item.times_leased or self.leases.lost) or self.order.was_buried(item))
        assert item.resolving_requests or clearing or dropped, f"{item} was resolved without a request: {found}"
        item.resolved = True

    # -- when idle -------------------------------------------------------------------------------------

    def check_idle(self, loops: Sequence[Loop], pending: Sequence[SentRequest], now: int, *, troubled: bool) -> None:
        """No queue has a turn due: check that every pending request has a reason to wait."""
        in_io = {loop.engine.incarnation: loop for loop in loops if loop.manual_io}
        self.leases.check_known({sent.incarnation for sent in pending if isinstance(sent, SentLease) and sent.ran_at is not None})
        self._check_due()
        with self.undisturbed():
            self.inventory.check_stats(loops)
        for sent in pending:
            deadline = sent.request.deadline
            late = _answered_by(sent, in_io[sent.incarnation]) if sent.incarnation in in_io else deadline
            assert not (deadline and late < now), f"{sent} was not answered by its deadline"
            assert deadline or sent.incarnation in in_io, f"{sent} does not wait, and was not answered"
            if isinstance(sent, SentLease) and sent.first:  # a repetition is answered as the first request was
                self._check_waiting(sent, next(loop for loop in loops if loop.engine.incarnation == sent.incarnation))
        for queue, info in self.queues.items():
            self._check_producers(info, [sent for sent in pending if sent.incarnation == queue and isinstance(sent, SentProduce)])
            self._check_followers([sent for sent in pending if sent.incarnation == queue and isinstance(sent, SentWatch)])

    def _check_due(self) -> None:
        """Check that no schedule, delay or lease deadline has passed without effect."""
        for item, found in self.inventory.found.items():
            for copy in found.live:
                if copy.state is ItemState.SCHEDULED:
                    late = bool(item.not_before) and item.not_before <= self.now
                    if item.due and not item.times_leased and not self.leases.lost:
                        late = late or (item.due + SECOND < self.wall and self.date_set_at + SECOND < self.now)
                    assert not late, f"{item} is due and still {found}"
                held = item.holder
                if copy.state is ItemState.LEASED and held is not None and held.deadline <= self.now and not held.doubtful:
                    seen = self.inventory.partitions[copy.place[:2]]
                    mine = copy.place[:2] == (held.incarnation, held.partition) and copy.place.offset in seen.held.get(held.lease, ())
                    assert not mine, f"{held} of {item} is over, and its items were not returned"

    def _check_producers(self, info: QueueDescription, waiting: Sequence[SentProduce]) -> None:
        """Check that producers wait only while there is no room."""
        if waiting and self.inventory.all_healthy:
            partitions = [seen for (queue, _), seen in self.inventory.partitions.items() if queue == info.incarnation]
            there = sum(not state.resolved for seen in partitions for state in seen.states)
            fits = there == 0 or there + len(waiting[0].items) <= info.options.max_items
            assert not fits, f"{waiting[0]} waits though there is room: {there} of {info.options.max_items}"

    def _check_followers(self, waiting: Sequence[SentWatch]) -> None:
        """Check that no watcher waits although there are new items."""
        for sent in waiting:
            for (queue, number), seen in self.inventory.partitions.items():
                new = queue == sent.incarnation and seen.healthy and len(seen.states) > sent.offsets.get(number, 0)
                assert not new, f"{sent} waits though partition {number} has {len(seen.states)} items"

    def _check_waiting(self, sent: SentLease, loop: Loop) -> None:
        """Check that a lease request waits only while no item is available."""
        handles = [handle for handle in loop.engine.handles.values() if handle.is_usable]
        whole = len(handles) == len(loop.engine.handles)
        paused = any(seen.paused for (queue, _), seen in self.inventory.partitions.items() if queue == sent.incarnation)
        if sent.ran_at is not None or (loop.engine.deferred and not whole) or paused:
            return
        if any(handle.is_worth_waiting_for and handle.has_ready_items for handle in loop.engine.handles.values()):
            return  # a partition that may have better items is being opened
        held: set[bytes] = set()
        ready: list[TrackedItem] = []
        for item, found in self.inventory.found.items():
            copies = [copy for copy in (*found.live, *found.moving) if copy.place.incarnation == sent.incarnation]
            if found.moving and item.key is not None:
                held.add(item.key)
            for copy in copies:
                if copy.state is ItemState.READY:
                    ready.append(item)
                elif item.key is not None and copy.state is not ItemState.BURIED:
                    held.add(item.key)
        for item in ready:
            free = item.key is None or (whole and item.key not in held and not self.order.is_parked(sent.incarnation, item.key))
            assert not free, f"{sent} waits though {item} is ready: {self.inventory.of(item)}"

    # -- without faults --------------------------------------------------------------------------------

    def is_idle(self, loops: Sequence[Loop]) -> bool:
        """Whether every partition is healthy and no transfer is under way."""
        return self.inventory.all_healthy and not any(loop.engine.transfer_step.outgoing_count for loop in loops)

    def check_recovered(self, loops: Sequence[Loop]) -> None:
        """After enough time without faults: no partition fails, every transfer has arrived and every partition has the
        queue's options."""
        handles = [(loop, handle) for loop in loops for handle in loop.engine.handles.values() if not handle.closed]
        failing = [f"{loop.engine.name} {handle}" for loop, handle in handles if not _works(handle)]
        assert not failing, f"no more faults are injected, and these still fail: {failing}"
        stuck = [loop.engine.name for loop in loops if loop.engine.transfer_step.outgoing_count]
        assert not stuck, f"transfers from {stuck} do not arrive"
        for loop, handle in handles:
            options = self.queues[loop.engine.incarnation].options
            unsure = loop.engine.incarnation in self.unsure_queues
            assert unsure or handle.state.policy == options.policy, f"partition {handle.number} of {loop.engine.name} has old options"
        for item in self.items.values():
            found = self.inventory.of(item)
            assert not found.moving and not found.promised, f"{item} is still being transferred: {found}"

    def unresolved_items(self) -> list[TrackedItem]:
        """Stored items that are not resolved."""
        return [item for item in self.items.values() if (item.acknowledged or item.seen) and not item.resolved]

    def check_end(self, loops: Sequence[Loop]) -> None:
        """At the end: no fence is left."""
        for loop in loops:
            fences = loop.engine.resize_step.progress
            assert not fences, f"queue {loop.engine.name} still waits for {fences}"


def _latest(item: TrackedItem, found: ItemCopies) -> CopyPlace:
    """The last place of an item among those where it is found."""
    there = {copy.place for copy in found.copies()}
    return next(place for place in reversed(item.places) if place in there)


def _brought_back(item: TrackedItem, found: ItemCopies) -> list[ItemCopy]:
    """The copies of a resolved item that show that a seek made it ready again.

    Copies that are moving show it only if the item is also unresolved at its last place. Else it was resolved where it
    arrived, and its former partition does not know that yet; a seek there brings back no transferred item.
    """
    unresolved = [*found.live, *found.moving]
    return unresolved if any(copy.place == item.places[-1] for copy in unresolved) else found.live


def _answered_by(sent: SentRequest, loop: Loop) -> int:
    """By when a request must be answered although partitions are in I/O.

    A request that was executed, or waits for items, is answered when the partitions it waits for have ended their I/O
    or are slow.
    That may be after its deadline, if no turn was run for long and the I/O began after the deadline.
    """
    engine = loop.engine
    awaited = [handle for handle in engine.handles_in_io.values() if handle.is_worth_waiting_for]
    if sent.ran_at is not None:
        awaited = [handle for handle in awaited if handle.number in sent.awaits]
    elif sent.request not in engine.lease_step.waiting:
        awaited = []
    return max([sent.request.give_up_at, *(handle.io_since + SLOW_AFTER for handle in awaited)])


def _works(handle: PartitionHandle) -> bool:
    return handle.is_usable and not handle.usable_partition.failed
