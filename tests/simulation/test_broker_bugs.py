"""Proof that the simulation of brokers can fail: bugs are planted, one at a time, and each must be caught.

How many seeds each took is printed (`pytest -s`) and bounded: what takes many is what the simulation looks at seldom.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from penstock.broker import queries, transfer_router
from penstock.loop import commits, requests
from penstock.loop import produce as producing
from penstock.loop import resize as resizing
from penstock.loop.catalog import Catalog
from penstock.loop.lease import LeaseSource, SourcesByRank
from penstock.loop.partition import Partition
from penstock.loop.partition_handle import PartitionHandle
from penstock.loop.partition_reader import RetainedItems, retained_runs
from penstock.loop.partition_set import PartitionSet
from penstock.loop.produce import ProduceStep
from penstock.loop.requests import ConfirmRequest, LeaseResult
from penstock.loop.resize import ResizeStep
from penstock.loop.settle import SettleStep
from penstock.loop.transfer import TransferStep
from penstock.loop.turn import QueueEngine
from penstock.operations import ListItems
from penstock.reports import ListedItemData
from penstock.rules import admin, catalog, commands, machine, outbox, produce, records, resize, settle, summary
from penstock.rules.catalog import PartitionsChanged
from penstock.rules.fences import ENDLESS, Fences
from penstock.rules.lanes import Rank, best_rank
from penstock.rules.state import BlockSource, Counts, OutboxEntry, State
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from simulation.broker.simulation import BrokerSimulation

Patch = pytest.MonkeyPatch
BUGS: list[tuple[Callable[[Patch], None], int]] = []


def bug(most_seeds: int) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a bug that is caught by one of the first so many seeds."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append((plant, most_seeds))
        return plant

    return register


def failure(seed: int) -> str | None:
    """How a seed fails; that it breaks (some other error) proves nothing."""
    try:
        BrokerSimulation(seed).run()
    except AssertionError as caught:
        if not isinstance(caught.__cause__, AssertionError):
            raise
        return str(caught)
    return None


# -- transfers ---------------------------------------------------------------------------------------


@bug(40)
def a_transfer_is_taken_twice(patch: Patch) -> None:
    def decide(state: State, command: commands.Produce, now: Moment, peek: BlockSource) -> Any:
        if command.source is not None:
            state.received_sequences.pop(command.source, None)
        return produce.decide_produce(state, command, now, peek)

    patch.setitem(machine._DECIDE, commands.Produce, decide)


@bug(100)
def sequences_begin_anew(patch: Patch) -> None:
    patch.setattr(outbox, "_next_sequence", lambda state, packed: len(state.outbox.get(packed, ())) + 1)


@bug(200)
def a_transfer_sets_out_before_its_record_is_durable(patch: Patch) -> None:
    def depart(self: QueueEngine) -> None:
        with patch.context() as here:
            here.setattr(Partition, "is_committed", True)
            self.transfer_step.send_outboxes(self.now)
        right(self)

    right = QueueEngine._commit
    patch.setattr(QueueEngine, "_commit", depart)


@bug(40)
def a_transfer_counts_as_arrived_when_it_sets_out(patch: Patch) -> None:
    def set_out(self: TransferStep, member: PartitionHandle, packed: bytes, line: Sequence[OutboxEntry], now: int) -> None:
        right(self, member, packed, line, now)
        self._partitions.post(ConfirmRequest(member.number, packed, member.transfers_under_way[packed], [(line[0].sequence, -1)], None))

    right = TransferStep._send_first
    patch.setattr(TransferStep, "_send_first", set_out)


@bug(300)
def a_transfer_that_fails_is_dropped(patch: Patch) -> None:
    def arrived(self: TransferStep, request: ConfirmRequest) -> None:
        member = self._partitions.handles[request.partition]
        if request.failed is not None and member.is_usable:
            line = member.state.outbox.get(request.destination, ())
            request.failed, request.arrived = None, [(entry.sequence, -1) for entry in line if entry.sequence <= request.until]
        right(self, request)

    right = TransferStep.confirm
    patch.setattr(TransferStep, "confirm", arrived)


@bug(40)
def what_was_sent_is_sent_again(patch: Patch) -> None:
    def apply(state: State, record: records.Sent, now: Moment) -> None:
        buried = state.buried_set.within(0, state.next_offset)
        outbox.apply_sent(state, record, now)
        state.buried_set.add_all(buried)

    patch.setitem(machine._APPLY, records.Sent, apply)


@bug(40)
def what_arrived_stays_on_its_way(patch: Patch) -> None:
    patch.setitem(machine._APPLY, records.Delivered, lambda state, record, now: None)


@bug(40)
def keys_are_not_routed_anew(patch: Patch) -> None:
    patch.setattr(TransferStep, "_destinations", lambda self, items, *rest: [rest[-1][0]] * len(items.batch))


@bug(40)
def dead_letters_do_not_say_where_they_come_from(patch: Patch) -> None:
    def addressed(self: TransferStep, *args: Any) -> Batch:
        batch = right(self, *args)
        batch.origins = None
        return batch

    right = TransferStep._with_origins
    patch.setattr(TransferStep, "_with_origins", addressed)


@bug(40)
def follow_ups_are_forgotten(patch: Patch) -> None:
    patch.setattr(settle, "follow_up_records", lambda state, batches: [])


@bug(40)
def a_queue_is_deleted_while_mail_is_under_way(patch: Patch) -> None:
    patch.setattr(transfer_router, "_is_held_up", lambda incarnation, turns: False)


# -- parked keys -------------------------------------------------------------------------------------


@bug(100)
def a_parked_item_does_not_return_to_its_place(patch: Patch) -> None:
    patch.setattr(produce, "_find_replaced", lambda state, command, batch, base: None)


@bug(60)
def clear_forgets_keys_parked_for_what_was_carried_away(patch: Patch) -> None:
    def decide(state: State, command: commands.Clear, now: Moment, peek: BlockSource) -> Any:
        found, answer = admin.decide_clear(state, command, now, peek)
        return [record for record in found if not isinstance(record, records.ParkedKeyReleased)], answer

    patch.setitem(machine._DECIDE, commands.Clear, decide)


# -- resizing ----------------------------------------------------------------------------------------


@bug(40)
def fences_hold_nothing(patch: Patch) -> None:
    patch.setattr(Fences, "waits_from", lambda self, key: ENDLESS)


@bug(400)
def fences_also_hold_what_was_there_before(patch: Patch) -> None:
    right = Fences.waits_from
    patch.setattr(Fences, "waits_from", lambda self, key: 0 if right(self, key) < ENDLESS else ENDLESS)


@bug(300)
def fences_are_not_inherited(patch: Patch) -> None:
    patch.setattr(resizing, "inherited", lambda *args: [])


@bug(40)
def fences_narrow_to_no_key_at_all(patch: Patch) -> None:
    def run(self: PartitionSet, member: PartitionHandle, command: Any, rounds: int = 0) -> Any:
        if isinstance(command, commands.NarrowFence):
            command = commands.NarrowFence(command.number, [])
        return right(self, member, command, rounds)

    right = PartitionSet.run
    patch.setattr(PartitionSet, "run", run)


@bug(400)
def fences_narrow_before_the_backlog_is_read(patch: Patch) -> None:
    patch.setattr(resizing, "is_drained", lambda *args: True)


@bug(40)
def a_fence_does_not_wait_for_what_is_leased(patch: Patch) -> None:
    patch.setattr(resizing, "key_is_unresolved", lambda *args: False)


@bug(300)
def the_marks_of_a_resize_are_too_low(patch: Patch) -> None:
    def reshape(self: Catalog, *args: Any, marks: dict[int, int], **rest: Any) -> Any:
        return right(self, *args, marks=dict.fromkeys(marks, 0), **rest)

    right = Catalog.reshape
    patch.setattr(Catalog, "reshape", reshape)


@bug(200)
def strays_are_leased_where_they_are(patch: Patch) -> None:
    patch.setattr(ResizeStep, "moved_slots", lambda self, number: None)


@bug(120)
def dedup_windows_do_not_move(patch: Patch) -> None:
    def decide(state: State, command: commands.AddFences, now: Moment, peek: BlockSource) -> Any:
        return resize.decide_add_fences(state, msgspec.structs.replace(command, dedup_ids=()), now, peek)

    patch.setitem(machine._DECIDE, commands.AddFences, decide)


@bug(100)
def adopted_dedup_ids_name_items_that_are_not_there(patch: Patch) -> None:
    def decide(state: State, command: commands.AddFences, now: Moment, peek: BlockSource) -> Any:
        adopted = [(digest, left, item + 1_000) for digest, left, item in command.dedup_ids]
        return resize.decide_add_fences(state, msgspec.structs.replace(command, dedup_ids=adopted), now, peek)

    patch.setitem(machine._DECIDE, commands.AddFences, decide)


@bug(40)
def requests_are_not_looked_up_in_older_maps(patch: Patch) -> None:
    patch.setattr(ProduceStep, "_stored_parts", lambda self, *args: ([], None))


@bug(40)
def a_resize_is_not_recorded(patch: Patch) -> None:
    def store(self: Catalog, found: Any) -> None:
        if any(isinstance(record, PartitionsChanged) for record in found):
            for record in found:
                catalog.apply(self.state, record)
        else:
            right(self, found)

    right = Catalog._store
    patch.setattr(Catalog, "_store", store)


# -- the order of the whole queue ----------------------------------------------------------------------


@bug(40)
def a_lease_takes_all_of_one_partition_before_it_looks_at_the_next(patch: Patch) -> None:
    patch.setattr(SourcesByRank, "_bound", lambda self: None)


@bug(40)
def partitions_are_leased_from_by_number(patch: Patch) -> None:
    patch.setattr(LeaseSource, "_sort", lambda self: setattr(self, "entry", self.rank and (Rank(0, 0), 0, self.handle.number, self)))


def ranked(patch: Patch, change: Callable[[Rank], Rank]) -> None:
    """Partitions are compared by something else than their best heads."""

    def changed(heads: Any, aging: int, now: int) -> Rank | None:
        found = best_rank(heads, aging, now)
        return None if found is None else change(found)

    patch.setattr("penstock.loop.lease.best_rank", changed)


@bug(100)
def priorities_count_within_a_partition_only(patch: Patch) -> None:
    ranked(patch, lambda rank: Rank(0, rank.since))


@bug(40)
def ages_count_within_a_partition_only(patch: Patch) -> None:
    ranked(patch, lambda rank: Rank(rank.priority, 0))


@bug(100)
def instants_of_different_partitions_are_compared(patch: Patch) -> None:
    def look(self: LeaseSource, now: int) -> bool:
        changed = right(self, now)
        if self.rank is not None:
            self.rank = self.own_time(self.rank)
        return changed

    right = LeaseSource.update
    patch.setattr(LeaseSource, "update", look)


@bug(400)
def aging_does_not_count_across_partitions(patch: Patch) -> None:
    patch.setattr("penstock.loop.lease.best_rank", lambda heads, aging, now: best_rank(heads, 0, now))


# -- the turn ----------------------------------------------------------------------------------------


@bug(40)
def answers_leave_before_the_commit(patch: Patch) -> None:
    def depart(self: QueueEngine) -> None:
        for request, result in self.uncommitted_answers:
            found = self._collect(request, result) if isinstance(request, requests.LeaseRequest) else result
            self._answer(request, found, {})
        self.uncommitted_answers.clear()
        right(self)

    right = QueueEngine._commit
    patch.setattr(QueueEngine, "_commit", depart)


@bug(40)
def attempts_are_not_counted(patch: Patch) -> None:
    patch.setattr(settle, "add_failure", lambda *_: None)


@bug(40)
def a_failed_partition_is_reported_as_stored(patch: Patch) -> None:
    patch.setattr(commits, "_refused", lambda part, error: part)


@bug(40)
def nobody_is_woken_by_what_comes_due(patch: Patch) -> None:
    patch.setattr(PartitionHandle, "plan", lambda self, now: setattr(self, "next_run", None))


@bug(40)
def what_nobody_took_is_not_given_back(patch: Patch) -> None:
    patch.setattr(SettleStep, "return_items", lambda self, results: None)


@bug(40)
def followers_are_not_told(patch: Patch) -> None:
    patch.setattr(QueueEngine, "_answer_awaiting", lambda self: None)


@bug(40)
def producers_wait_for_ever(patch: Patch) -> None:
    patch.setattr(ProduceStep, "retry", lambda self, now: None)


@bug(300)
def a_partition_that_failed_misses_new_options(patch: Patch) -> None:
    patch.setattr(PartitionSet, "apply_queue_settings", lambda self, *args, **kwargs: None)


@bug(40)
def an_item_goes_to_any_partition(patch: Patch) -> None:
    patch.setattr(producing, "_partitions_of", lambda batch, request, slots: [producing.FREE] * len(batch))


# -- what could still be undone ------------------------------------------------------------------------


def reshape_last(patch: Patch) -> None:
    """A resize is run behind the produces of its turn, and nobody looks whether they are committed."""

    def reshape(self: QueueEngine, taken: Sequence[requests.Request]) -> Sequence[requests.Request]:
        for request in sorted(taken, key=lambda request: isinstance(request, requests.ResizeRequest)):
            try:
                self.attempt(request, self._steps[type(request)])
            except requests.PartitionsNotOpen:
                self._open()
                self._defer([request])
        return []

    patch.setattr(QueueEngine, "_run_resize", reshape)
    patch.setattr(Partition, "committed", property(lambda self: self.state))


@bug(100)
def marks_are_taken_from_what_is_not_committed(patch: Patch) -> None:
    reshape_last(patch)


@bug(100)
def dedup_ids_are_adopted_from_what_is_not_committed(patch: Patch) -> None:
    """The marks are those of the beginning of the turn."""

    def begin(self: QueueEngine, taken: Sequence[requests.Request], now: int) -> None:
        before[self.incarnation] = {number: member.state.next_offset for number, member in self.handles.items() if member.is_usable}
        right_turn(self, taken, now)

    def reshape(self: Catalog, incarnation: int, *args: Any, marks: dict[int, int], **rest: Any) -> Any:
        return right(self, incarnation, *args, marks={**marks, **before.get(incarnation, {})}, **rest)

    before: dict[int, dict[int, int]] = {}
    right_turn, right = QueueEngine.turn, Catalog.reshape
    reshape_last(patch)
    patch.setattr(QueueEngine, "turn", begin)
    patch.setattr(Catalog, "reshape", reshape)
    patch.setattr(Partition, "is_committed", property(lambda self: not self.failed))


@bug(100)
def fences_stand_before_they_are_committed(patch: Patch) -> None:
    def prepare(self: ResizeStep, member: PartitionHandle) -> None:
        right(self, member)
        member.fences_ready = True

    right = ResizeStep._complete_fences
    patch.setattr(ResizeStep, "_complete_fences", prepare)


@bug(40)
def leases_that_were_answered_are_lost_with_a_failed_write(patch: Patch) -> None:
    def open_again(self: Partition, answered: Sequence[Any] = ()) -> None:
        right(self)

    right = Partition._open
    patch.setattr(Partition, "_open", open_again)


@bug(100)
def an_interrupt_drops_the_requests_of_others(patch: Patch) -> None:
    patch.setattr(QueueEngine, "requeue_undone", lambda self, taken, error: None)


@bug(40)
def an_interrupt_runs_again_what_was_committed(patch: Patch) -> None:
    def give_up(self: QueueEngine, taken: Sequence[requests.Request], error: BaseException) -> None:
        self._committing = False
        right(self, taken, error)

    right = QueueEngine._abort
    patch.setattr(QueueEngine, "_abort", give_up)


# -- slow disks ----------------------------------------------------------------------------------------


@bug(40)
def answers_do_not_wait_for_what_is_out(patch: Patch) -> None:
    patch.setattr(commits, "_rests_on", lambda request, result: ())


@bug(40)
def an_answer_waits_for_one_of_its_partitions_only(patch: Patch) -> None:
    right = commits._rests_on
    patch.setattr(commits, "_rests_on", lambda request, result: sorted(right(request, result))[:1])


def opened(member: PartitionHandle) -> Partition:
    """The partition of a member, out or not."""
    if member.partition is None:
        raise member.refusal
    return member.partition


def read_what_is_out(patch: Patch, where: type, name: str) -> None:
    """One step of a turn takes partitions that are out for healthy ones, and what they have not committed for committed."""
    right = getattr(where, name)

    def step(self: Any, *args: Any) -> Any:
        with patch.context() as here:
            here.setattr(PartitionHandle, "is_usable", property(lambda self: self.partition is not None and self.error is None))
            here.setattr(PartitionHandle, "usable_partition", property(opened))
            here.setattr(Partition, "is_committed", True)
            return right(self, *args)

    patch.setattr(where, name, step)


@bug(400)
def fences_are_lowered_by_what_is_out(patch: Patch) -> None:
    read_what_is_out(patch, ResizeStep, "_narrow")
    read_what_is_out(patch, ResizeStep, "_lift")
    read_what_is_out(patch, ResizeStep, "advance_fences")


@bug(400)
def a_resize_counts_on_what_is_out(patch: Patch) -> None:
    """Its marks and the dedup ids that move are those of partitions that are out."""
    read_what_is_out(patch, QueueEngine, "_run_resize")
    right = QueueEngine._needs
    patch.setattr(QueueEngine, "_needs", lambda self, request: () if isinstance(request, requests.ResizeRequest) else right(self, request))


@bug(400)
def the_leases_of_a_slow_partition_end_when_it_is_back(patch: Patch) -> None:
    patch.setattr(QueueEngine, "_extend_leases", lambda self, member: None)


@bug(40)
def who_waits_for_a_partition_is_forgotten(patch: Patch) -> None:
    def runnable(self: QueueEngine, taken: Sequence[requests.Request]) -> Sequence[requests.Request]:
        found = right(self, taken)
        self.deferred.clear()
        return found

    right = QueueEngine._runnable
    patch.setattr(QueueEngine, "_runnable", runnable)


# -- damage -------------------------------------------------------------------------------------------


@bug(60)
def a_page_of_lost_items_is_the_end_of_a_list(patch: Patch) -> None:
    def listed(turns: QueueEngine, query: ListItems) -> list[ListedItemData]:
        lost = {member.number: len(member.state.lost) for member in turns.usable()}
        found = right(turns, query)
        return [one for one in found if lost[one.partition] == len(turns.handles[one.partition].state.lost)]

    right = queries.items
    found: dict[Any, Any] = {**queries.QUERY_HANDLERS, ListItems: listed}
    patch.setattr(queries, "QUERY_HANDLERS", found)


@bug(400)
def a_page_of_lost_items_is_the_end_for_a_cursor(patch: Patch) -> None:
    def page(self: Partition, start: int, limit: int) -> RetainedItems:
        runs = retained_runs(self.state, start, limit)
        items = self.items(runs)
        return RetainedItems(items, runs[-1] if items else self.state.next_offset)

    patch.setattr(Partition, "read_retained", page)


@bug(60)
def a_lease_of_lost_items_is_handed_out_empty(patch: Patch) -> None:
    patch.setattr(commits, "_without_lost", lambda granted, items: granted)


@bug(60)
def what_is_damaged_is_leased_again_and_again(patch: Patch) -> None:
    def collect(self: QueueEngine, request: requests.LeaseRequest, parts: list[Any]) -> list[Any]:
        if any(member.usable_partition._items.collect(granted.runs).gaps for member, granted in parts):
            self.settle_step.return_items([LeaseResult(member.number, granted, [], 0) for member, granted in parts])
            request.lost_to_damage = True
            return []
        return right(self, request, parts)

    right = QueueEngine._collect
    patch.setattr(QueueEngine, "_collect", collect)


# -- the test -----------------------------------------------------------------------------------------

SEEDS_OF_A_SHORT_RUN = 60


# -- closed partitions -----------------------------------------------------------------------------------


@bug(100)
def closed_partitions_hide_what_is_ready(patch: Patch) -> None:
    patch.setattr(PartitionHandle, "has_ready_items", property(lambda self: False))


@bug(60)
def what_comes_due_in_a_closed_partition_is_not_seen(patch: Patch) -> None:
    patch.setattr(PartitionHandle, "is_due", property(lambda self: False))


@bug(60)
def the_summary_of_a_closed_partition_is_of_another_time(patch: Patch) -> None:
    right = summary.summarize
    patch.setattr(summary, "summarize", lambda state, size: msgspec.structs.replace(right(state, size), counts=Counts(0, 0, 0, 0, 0)))


def _cases() -> list[Any]:
    """Those that are caught late are for the long run."""
    marks = {False: (), True: (pytest.mark.long,)}
    return [pytest.param(plant, most, marks=marks[most > SEEDS_OF_A_SHORT_RUN], id=plant.__name__) for plant, most in BUGS]


@pytest.mark.parametrize(("plant", "most_seeds"), _cases())
def test_a_planted_bug_is_caught(plant: Callable[[Patch], None], most_seeds: int, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    for seed in range(most_seeds):
        caught = failure(seed)
        if caught is not None:
            print(f"\n{plant.__name__}: {seed + 1} seeds: {caught.splitlines()[0][:120]}")
            return
    pytest.fail(f"{plant.__name__} was not caught by {most_seeds} seeds")
