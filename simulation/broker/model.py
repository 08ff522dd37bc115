"""What a whole broker owes its callers: learnt from the answers that were seen, compared with what is found.

Owns: `BrokerModel`: every item that was ever sent, the promises made about it, and how they are compared with the census after every turn;
that nobody waits without a reason when the broker is at rest.
- what was acknowledged is in one place, or resolved by somebody who asked for that;
- what was refused is nowhere; what was never answered is there at most once;
- what was resolved stays so until it is sought.
LeaseModel are judged in leases.py, the order of items in order.py. Nothing here knows how a broker works; of its words it uses states only.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from penstock.loop.loop import Loop
from penstock.loop.partition_handle import SLOW_AFTER, PartitionHandle
from penstock.loop.requests import StoredPart
from penstock.reports import QueueDescription
from penstock.rules.item_states import ItemState
from penstock.words.clock import SECOND
from penstock.words.errors import OutcomeUnknown, PenstockError, Refused
from penstock.words.ids import locate
from penstock.words.limits import IMMEDIATE
from penstock.words.origin import Origin
from simulation.broker.inventory import ItemCopies
from simulation.broker.items import CopyPlace, TrackedItem
from simulation.broker.leases import LeaseModel, SharedModelState
from simulation.broker.sent_requests import SentLease, SentProduce, SentRequest, SentSettle, SentWatch


class UnverifiedPlace(NamedTuple):
    """An answer that names the place of an item."""

    sent: SentProduce
    tag: TrackedItem
    place: CopyPlace


@dataclass(slots=True)
class DedupEntry:
    """The first item with a dedup id, and until when others are its duplicates."""

    tag: TrackedItem
    until: int
    era: int


class BrokerModel(SharedModelState):
    """What should be true."""

    def __init__(self, undisturbed: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(undisturbed)
        self.undisturbed = undisturbed
        self.leases = LeaseModel(self)
        self.wall = 0
        self.date_set_at = 0
        self.windows: dict[int, int] = {}
        """Queue → its dedup window."""
        self._firsts: dict[tuple[int, bytes | None, bytes], DedupEntry] = {}
        self._asked: dict[TrackedItem, SentProduce] = {}
        """Items whose produce is not answered yet."""
        self._unsure: dict[tuple[int, bytes | None, bytes], int] = {}
        """Dedup ids that may or may not be taken, until when."""
        self._promises: list[UnverifiedPlace] = []
        """Answers that name places in partitions which failed when the answers came: judged when those are in order again."""
        self.clearing: set[int] = set()
        """Queues of which items may be resolved by an operator's word."""
        self.seeking: set[int] = set()
        self.unsure_queues: set[int] = set()
        """Queues of which a change was not answered."""
        self.sought = 0
        self.vanished: set[int] = set()
        """Queues that were deleted since the last whole look."""

    # -- time ----------------------------------------------------------------------------------------

    def pass_time(self, duration: int, wall: int) -> None:
        self.now += duration
        self.wall = wall
        for tag in self.tags.values():
            if tag.at and tag.at <= wall + IMMEDIATE:
                tag.at = 0

    def rebooted(self, downtime: int, wall: int, *, power: bool) -> None:
        """The machine was off: elapsed time began anew, and a power cut took what was not synced."""
        self.boot_count += 1
        ended = self.now
        self.pass_time(downtime, wall)
        self.leases.rebooted(ended, power=power)
        for name in self._unsure:  # its window goes on from the last that was recorded of the time
            self._unsure[name] = self.now + self.windows[name[0]]
        self.priorities.rebooted()

    # -- queues --------------------------------------------------------------------------------------

    def opened(self, there: Sequence[QueueDescription]) -> None:
        """Another process has the broker: the queues are those that were acknowledged."""
        self.priorities.judging = False
        found = {info.incarnation: info for info in there}
        for incarnation, info in self.queues.items():
            if incarnation in self.unsure_queues:
                continue
            assert incarnation in found, f"queue {info.name} is gone"
            now = found[incarnation]
            assert (now.active, now.options) == (info.active, info.options), f"queue {info.name} is {now}, not {info}"
        gone = [incarnation for incarnation in self.queues if incarnation not in found]
        self.queues = found
        for info in there:
            self.windows.setdefault(info.incarnation, info.options.policy.dedup_window)
        self.unsure_queues.clear()
        for incarnation in gone:
            self.deleted(incarnation)

    def decided(self) -> None:
        """What was found after an opening was looked at: lost requests have had their effect, or never will."""
        self.leases.decided()
        self.priorities.judging = True
        if self.census.all_healthy:
            self.clearing.clear()
            self.seeking.clear()
            for tag in self.tags.values():
                tag.resolving_requests = 0

    def created(self, info: QueueDescription) -> None:
        self.queues[info.incarnation] = info
        self.windows[info.incarnation] = info.options.policy.dedup_window

    def changed(self, incarnation: int, answer: QueueDescription | PenstockError | None) -> None:
        """A queue has other options or partitions now, or none any more, or (an error) nothing has changed."""
        if isinstance(answer, QueueDescription):
            self.queues[incarnation] = answer
        elif answer is None:
            self.deleted(incarnation)
        if not isinstance(answer, OutcomeUnknown):
            self.unsure_queues.discard(incarnation)

    def deleted(self, incarnation: int) -> None:
        """A queue is gone, and with it what was in it."""
        self.queues.pop(incarnation, None)
        self.unsure_queues.discard(incarnation)
        self.vanished.add(incarnation)
        self.leases.forget(incarnation)

    def _vanishes(self, tag: TrackedItem, found: ItemCopies) -> bool:
        """Whether an item went with a queue that was just deleted."""
        if not self.vanished or found.unresolved:
            return False
        last = self.census.before(tag)
        known = tag.queue in self.vanished or any(place.incarnation in self.vanished for place in tag.places)
        return known or bool(last.moving)

    def clears(self, incarnation: int, partition: int | None, chosen: dict[str, bool]) -> list[bytes]:
        """An operator sets out to resolve items; returns which keys that lets go on."""
        self.clearing.add(incarnation)
        if chosen["leased"]:
            self.leases.doubt(incarnation, partition)
        return self.order.clear_parked(incarnation, partition) if chosen["buried"] else []

    def cleared(self, incarnation: int, partition: int | None, chosen: dict[str, bool]) -> None:
        """An operator was told that items were resolved."""
        for tag in self.tags.values():
            for spot in self.census.of(tag).live if self.census.before(tag).live else ():
                here = spot.place.incarnation == incarnation and partition in (None, spot.place.partition)
                assert not (here and chosen[spot.life.value] and spot.life is not ItemState.LEASED), f"{tag} was cleared and is {spot}"

    def operation_done(self, incarnation: int) -> None:
        """An operator's word was answered, and what it did was looked at."""
        if self.census.all_healthy:
            self.clearing.discard(incarnation)
            self.seeking.discard(incarnation)

    # -- requests ------------------------------------------------------------------------------------

    def sending(self, sent: SentRequest) -> None:
        if sent.first:
            sent.since, sent.era = self.now, self.boot_count
        sent.latest_era = self.boot_count
        if isinstance(sent, SentProduce):
            for index, tag in enumerate(sent.tags):
                tag.must_not_exist = tag.must_not_exist and index in sent.ids
                self._asked[tag] = sent
        elif isinstance(sent, SentSettle):
            self.leases.settling(sent)

    def lost(self, sent: SentRequest) -> None:
        """The process ended before the answer."""
        sent.answer_lost = True
        if isinstance(sent, SentProduce):
            self._forget_asked(sent)
            self._unknown(sent, sent.tags)
        elif isinstance(sent, SentLease):
            self.leases.unknown(sent)
        elif isinstance(sent, SentSettle):
            self.leases.unsettled(sent)

    def check_answer(self, sent: SentRequest) -> None:
        """An answer came."""
        answer, error = sent.request.answer, sent.request.error
        if isinstance(sent, SentProduce):
            self._forget_asked(sent)
            self._produced(sent, answer, error)
        elif isinstance(sent, SentLease):
            self.leases.leased(sent, answer, error)
        elif isinstance(sent, SentSettle):
            self.leases.settled(sent, [one.error() if isinstance(one, Refused) else one for one in answer or ()], error)

    # -- produce -------------------------------------------------------------------------------------

    def _forget_asked(self, sent: SentProduce) -> None:
        for tag in sent.tags:
            self._asked.pop(tag, None)

    def _produced(self, sent: SentProduce, answer: list[StoredPart], error: PenstockError | None) -> None:
        every = range(len(sent.tags))
        if error is not None:
            self._refused(sent, every, error)
            return
        covered = sorted(index for part in answer for index in (every if part.indexes is None else part.indexes))
        assert covered == list(every), f"the parts of the answer are for {covered} of {len(sent.tags)} items: {answer}"
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
        """Nothing of these is stored, unless the error says that nobody knows."""
        indexes = list(indexes)
        tags = [sent.tags[index] for index in indexes]
        if isinstance(error, OutcomeUnknown):
            sent.answer_lost = True
            self._unknown(sent, tags)
        elif not sent.answer_lost:
            for index, tag in zip(indexes, tags, strict=True):
                if not tag.seen and index not in sent.ids:
                    tag.must_not_exist = True

    def _unknown(self, sent: SentProduce, tags: Iterable[TrackedItem]) -> None:
        for tag in tags:
            if tag.dedup is not None:
                self._unsure[sent.incarnation, tag.key, tag.dedup] = self.now + self.windows[sent.incarnation]

    def _stored(self, sent: SentProduce, index: int, place: CopyPlace, *, again: bool) -> None:
        tag, known = sent.tags[index], sent.ids.get(index)
        if known is not None and self.remembers(sent):
            assert place == known, f"{sent} was answered with {place} for {tag}, and before with {known}"
            return
        sent.ids[index] = place
        if self.census.healthy(place):
            self._look_up(sent, tag, place, again=again)
        elif sent.incarnation in self.queues:
            tag.acknowledged = tag.acknowledged or tag.dedup is None
            self._promises.append(UnverifiedPlace(sent, tag, place))

    def _keep_promises(self) -> None:
        """Look up what was answered while its partition failed."""
        promises, self._promises = self._promises, []
        promises.sort(key=lambda promise: self.census.at(promise.place) is not promise.tag)  # duplicates behind what they are duplicates of
        for promise in promises:
            if self.census.healthy(promise.place):
                self._look_up(*promise, again=True)
            elif promise.sent.incarnation in self.queues:
                self._promises.append(promise)

    def _look_up(self, sent: SentProduce, tag: TrackedItem, place: CopyPlace, *, again: bool) -> None:
        """At the place that an answer names there is the item, or the first one with its dedup id."""
        real = self.census.at(place)
        if real is None:
            dropped = place.offset in self.census.partitions[place[:2]].dropped
            assert dropped, f"{tag} was said to be at {place}, where nothing is: {sent}"
            tag.acknowledged = tag.acknowledged or tag.dedup is None
        elif real is tag:
            self._stored_anew(sent, tag, place, again=again)
        else:
            same = (real.queue, real.key, real.dedup) == (tag.queue, tag.key, tag.dedup) and tag.dedup is not None
            assert same, f"{tag} was said to be at {place}, where {real} is"
            self._duplicate(sent, tag, real)

    def _stored_anew(self, sent: SentProduce, tag: TrackedItem, place: CopyPlace, *, again: bool) -> None:
        fresh = sent.first and not again and not tag.acknowledged
        tag.acknowledged = True
        if fresh and not tag.scheduled:
            self.order.enter(tag)
        if tag.dedup is None:
            return
        name = (sent.incarnation, tag.key, tag.dedup)
        first = self._firsts.get(name)
        if first is not None and first.tag is not tag and not self._is_unsure(name, sent):
            assert first.until <= sent.ran(self.now) or first.era != self.boot_count, (
                f"{tag} was stored though it is a duplicate of {first.tag}"
            )
        if first is None or first.tag is not tag:
            window = self.windows[sent.incarnation]
            self._firsts[name] = DedupEntry(tag, sent.ran(self.now) + window, sent.latest_era)
            if not fresh:
                self._unsure[name] = self.now + self.windows[sent.incarnation]

    def _duplicate(self, sent: SentProduce, tag: TrackedItem, real: TrackedItem) -> None:
        assert tag.dedup is not None
        name = (tag.queue, tag.key, tag.dedup)
        first = self._firsts.get(name)
        asked = self._asked.get(real)
        over = first is None or first.until <= self.now or first.era != self.boot_count
        if asked is not None and asked.first and over:  # its answer waits for another partition
            window = self.windows[sent.incarnation]
            first = self._firsts[name] = DedupEntry(real, asked.ran(self.now) + window, asked.latest_era)
        if sent.first and not self._is_unsure(name, sent):
            assert first is not None and first.tag is real, f"{tag} was taken for a duplicate of {real}, which it is not"
            assert first.until > sent.ran(self.now) or first.era != self.boot_count, (
                f"{tag} was taken for a duplicate of {real}, whose window is over"
            )
        real.acknowledged = True  # whatever became of its own answer
        tag.must_not_exist = True

    def _is_unsure(self, name: tuple[int, bytes | None, bytes], sent: SentProduce) -> bool:
        """Whether nobody could say, when a produce was run, which item was the first of that name."""
        return self._unsure.get(name, -1) >= sent.ran(self.now)

    # -- after every turn ----------------------------------------------------------------------------

    def follow(self) -> None:
        """What happened by itself, or by an operator's word."""
        self._keep_promises()
        self.priorities.look(self.now, self.seeking)
        for tag, place, came in self.census.arrivals:
            self._check_origin(tag, place, came)
        self._bring_back()
        self.order.follow()
        self.leases.watch()

    def _check_origin(self, tag: TrackedItem, place: CopyPlace, came: Origin | None) -> None:
        """An item that comes from elsewhere says where it was, and what happened to it there."""
        before = tag.places[: tag.places.index(place)]
        if came is None:
            assert not before or not self.census.all_healthy, f"{tag} came to {place} from {before} and does not say so"
            return
        buried_in = CopyPlace(came.incarnation, *came.partition_and_offset)
        assert buried_in in before, f"{tag} came to {place} and says that it was at {buried_in}, where it never was: {before}"
        if came.buried_at and before and before[-1] == buried_in:
            known = self.queues.get(came.incarnation)
            assert known is None or known.name == came.queue, f"{tag} came from {came.queue}, and {buried_in} is of {known}"
            assert came.reason, f"{tag} was given up and nobody says why: {came}"
            assert came.attempts <= tag.times_leased + self.leases.lost, f"{tag} was handed out {tag.times_leased} times, and says {came}"

    def _bring_back(self) -> None:
        """Items that were sought are as new, but for their place in the order."""
        for tag, found in self.census.found.items() if self.seeking else ():
            if tag.resolved and any(spot.place.incarnation in self.seeking for spot in (*found.live, *found.moving)):
                tag.resolved, tag.completed_by = False, None
                tag.at = tag.not_before = tag.attempt = 0  # ready at once, whenever it was due before it was cleared
                tag.forget_order()
                self.sought += 1

    def compare(self) -> None:
        """Every item is where it should be."""
        census = self.census
        for tag in self.tags.values():
            found = census.of(tag)
            if tag.resolved and not found.live:
                continue
            if self._vanishes(tag, found):
                tag.resolved = tag.seen or tag.acknowledged
                tag.must_not_exist, tag.deleted_with_queue = not tag.resolved, True
                continue
            assert len(found.live) <= 1, f"{tag} is in several places: {found}"
            if found.anywhere:
                tag.seen = True
                assert not tag.must_not_exist, f"{tag} was refused, and yet it is there: {found}"
            if census.all_healthy:
                self._compare(tag, found)
        if census.all_healthy:
            self.vanished.clear()
        census.check_keys()

    def _compare(self, tag: TrackedItem, found: ItemCopies) -> None:
        if tag.resolved:
            assert tag.deleted_with_queue, f"{tag} was resolved, and is there again: {found}"
            tag.resolved = tag.deleted_with_queue = False
            tag.forget_order()
        if found.live:
            assert tag.completed_by is None, f"{tag} was completed by {tag.completed_by}, and is there: {found}"
        elif found.done and _latest(tag, found) in [spot.place for spot in found.done]:
            self._resolved(tag, found)
        elif not found.unresolved:
            assert not tag.acknowledged and not tag.seen, f"{tag} was stored, and is nowhere"

    def _resolved(self, tag: TrackedItem, found: ItemCopies) -> None:
        """An item was resolved where it was last found; another copy may still wait for the news of its arrival."""
        clearing = any(spot.place.incarnation in self.clearing for spot in found.done)
        dropped = any(spot.place.offset in self.census.partitions[spot.place[:2]].dropped for spot in found.done)
        dropped = dropped and (tag.has_ttl or bool(tag.times_leased or self.leases.lost) or self.order.was_buried(tag))
        assert tag.resolving_requests or clearing or dropped, f"{tag} was resolved and nobody asked for that: {found}"
        tag.resolved = True

    # -- at rest -------------------------------------------------------------------------------------

    def at_rest(self, loops: Sequence[Loop], pending: Sequence[SentRequest], now: int, *, troubled: bool) -> None:
        """No queue wants a turn: whoever waits must have a reason."""
        out = {loop.engine.incarnation: loop for loop in loops if loop.manual_io}
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
                self._check_waiting(sent, next(loop for loop in loops if loop.engine.incarnation == sent.incarnation))
        for queue, info in self.queues.items():
            self._check_producers(info, [sent for sent in pending if sent.incarnation == queue and isinstance(sent, SentProduce)])
            self._check_followers([sent for sent in pending if sent.incarnation == queue and isinstance(sent, SentWatch)])

    def _check_due(self) -> None:
        """What is due has come: schedules, delays, leases that ended."""
        for tag, found in self.census.found.items():
            for spot in found.live:
                if spot.life is ItemState.SCHEDULED:
                    late = bool(tag.not_before) and tag.not_before <= self.now
                    if tag.due and not tag.times_leased and not self.leases.lost:
                        late = late or (tag.due + SECOND < self.wall and self.date_set_at + SECOND < self.now)
                    assert not late, f"{tag} is due and still {found}"
                held = tag.holder
                if spot.life is ItemState.LEASED and held is not None and held.deadline <= self.now and not held.doubtful:
                    seen = self.census.partitions[spot.place[:2]]
                    mine = spot.place[:2] == (held.incarnation, held.partition) and spot.place.offset in seen.held.get(held.lease, ())
                    assert not mine, f"{held} of {tag} is over, and nobody took it back"

    def _check_producers(self, info: QueueDescription, waiting: Sequence[SentProduce]) -> None:
        """Whoever waits for room waits because there is none."""
        if waiting and self.census.all_healthy:
            partitions = [seen for (queue, _), seen in self.census.partitions.items() if queue == info.incarnation]
            there = sum(life not in (ItemState.COMPLETED, ItemState.BURIED) for seen in partitions for life in seen.lives)
            fits = there == 0 or there + len(waiting[0].tags) <= info.options.max_items
            assert not fits, f"{waiting[0]} waits though there is room: {there} of {info.options.max_items}"

    def _check_followers(self, waiting: Sequence[SentWatch]) -> None:
        """Whoever waits for something new is told when it is there."""
        for sent in waiting:
            for (queue, number), seen in self.census.partitions.items():
                new = queue == sent.incarnation and seen.healthy and len(seen.lives) > sent.offsets.get(number, 0)
                assert not new, f"{sent} waits though partition {number} has {len(seen.lives)} items"

    def _check_waiting(self, sent: SentLease, loop: Loop) -> None:
        """Whoever waits for items waits because there is none to be had."""
        members = [member for member in loop.engine.handles.values() if member.is_usable]
        whole = len(members) == len(loop.engine.handles)
        paused = any(seen.paused for (queue, _), seen in self.census.partitions.items() if queue == sent.incarnation)
        if sent.ran_at is not None or (loop.engine.deferred and not whole) or paused:
            return
        if any(member.is_worth_waiting_for and member.has_ready_items for member in loop.engine.handles.values()):
            return  # one that may have better items is being opened
        held: set[bytes] = set()
        ready: list[TrackedItem] = []
        for tag, found in self.census.found.items():
            spots = [spot for spot in (*found.live, *found.moving) if spot.place.incarnation == sent.incarnation]
            if found.moving and tag.key is not None:
                held.add(tag.key)
            for spot in spots:
                if spot.life is ItemState.READY:
                    ready.append(tag)
                elif tag.key is not None and spot.life is not ItemState.BURIED:
                    held.add(tag.key)
        for tag in ready:
            free = tag.key is None or (whole and tag.key not in held and not self.order.is_parked(sent.incarnation, tag.key))
            assert not free, f"{sent} waits though {tag} is ready: {self.census.of(tag)}"

    # -- when nothing goes wrong ---------------------------------------------------------------------

    def is_idle(self, loops: Sequence[Loop]) -> bool:
        """Whether every partition works and nothing is on its way."""
        return self.census.all_healthy and not any(loop.engine.transfer_step.outgoing_count for loop in loops)

    def check_calm(self, loops: Sequence[Loop]) -> None:
        """Long enough without trouble, everything that was acknowledged has arrived, once."""
        members = [(loop, member) for loop in loops for member in loop.engine.handles.values() if not member.closed]
        failing = [f"{loop.engine.name} {member}" for loop, member in members if not _works(member)]
        assert not failing, f"nothing goes wrong any more, and yet {failing}"
        stuck = [loop.engine.name for loop in loops if loop.engine.transfer_step.outgoing_count]
        assert not stuck, f"transfers from {stuck} do not arrive"
        for loop, member in members:
            options = self.queues[loop.engine.incarnation].options
            unsure = loop.engine.incarnation in self.unsure_queues
            assert unsure or member.state.policy == options.policy, f"partition {member.number} of {loop.engine.name} has old options"
        for tag in self.tags.values():
            found = self.census.of(tag)
            assert not found.moving and not found.promised, f"{tag} is on its way for ever: {found}"

    def unresolved_items(self) -> list[TrackedItem]:
        """Items that were stored and not resolved."""
        return [tag for tag in self.tags.values() if (tag.acknowledged or tag.seen) and not tag.resolved]

    def check_end(self, loops: Sequence[Loop]) -> None:
        """Everything was worked off: nothing is left behind."""
        for loop in loops:
            fences = loop.engine.resize_step.progress
            assert not fences, f"queue {loop.engine.name} still waits for {fences}"


def _latest(tag: TrackedItem, found: ItemCopies) -> CopyPlace:
    """The place to which an item came last."""
    there = {spot.place for spot in found.spots()}
    return next(place for place in reversed(tag.places) if place in there)


def _answered_by(sent: SentRequest, loop: Loop) -> int:
    """By when a request is answered although partitions are out: everybody is given the time for one turn.

    Whoever was run, or stands in line for items, is told when what it waits for has landed or is slow. That is later when no turn was run
    for so long that its time was over before they went out.
    """
    turns = loop.engine
    awaited = [member for member in turns.handles_in_io.values() if member.is_worth_waiting_for]
    if sent.ran_at is not None:
        awaited = [member for member in awaited if member.number in sent.awaits]
    elif sent.request not in turns.lease_step.waiting:
        awaited = []
    return max([sent.request.give_up_at, *(member.io_since + SLOW_AFTER for member in awaited)])


def _works(member: PartitionHandle) -> bool:
    return member.is_usable and not member.usable_partition.failed
