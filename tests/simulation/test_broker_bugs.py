"""The simulation of a broker can fail: each of these planted bugs must be caught (planted_bugs.py)."""

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
from penstock.rules.calls import CallMemory
from penstock.rules.catalog import PartitionsChanged
from penstock.rules.fences import ENDLESS, Fences
from penstock.rules.lanes import Rank, best_rank
from penstock.rules.state import BlockSource, Counts, OutboxEntry, State
from penstock.words.batch import Batch
from penstock.words.clock import Moment
from simulation.broker.simulation import BrokerSimulation
from tests.simulation.planted_bugs import Patch, Plant, PlantedBugs

BUGS = PlantedBugs(BrokerSimulation)
bug = BUGS.caught_within


# -- transfers -------------------------------------------------------------------------------------


@bug(40)
def a_repeated_transfer_is_stored_twice(patch: Patch) -> None:
    def decide(state: State, command: commands.Produce, now: Moment, peek: BlockSource) -> Any:
        if command.source is not None:
            state.received_sequences.pop(command.source, None)
        return produce.decide_produce(state, command, now, peek)

    patch.setitem(machine._DECIDE, commands.Produce, decide)


@bug(100)
def transfer_sequences_start_again(patch: Patch) -> None:
    patch.setattr(outbox, "_next_sequence", lambda state, packed: len(state.outbox.get(packed, ())) + 1)


@bug(600)
def a_transfer_is_sent_before_its_record_is_durable(patch: Patch) -> None:
    def depart(self: QueueEngine) -> None:
        with patch.context() as here:
            here.setattr(Partition, "is_committed", True)
            self.transfer_step.send_outboxes(self.now)
        right(self)

    right = QueueEngine._commit
    patch.setattr(QueueEngine, "_commit", depart)


@bug(40)
def a_transfer_counts_as_arrived_when_it_is_sent(patch: Patch) -> None:
    def set_out(self: TransferStep, handle: PartitionHandle, packed: bytes, line: Sequence[OutboxEntry], now: int) -> None:
        right(self, handle, packed, line, now)
        self._partitions.post(ConfirmRequest(handle.number, packed, handle.transfers_under_way[packed], [(line[0].sequence, -1)], None))

    right = TransferStep._send_first
    patch.setattr(TransferStep, "_send_first", set_out)


@bug(300)
def a_transfer_that_fails_is_dropped(patch: Patch) -> None:
    def arrived(self: TransferStep, request: ConfirmRequest) -> None:
        handle = self._partitions.handles[request.partition]
        if request.failed is not None and handle.is_usable:
            line = handle.state.outbox.get(request.destination, ())
            request.failed, request.arrived = None, [(entry.sequence, -1) for entry in line if entry.sequence <= request.until]
        right(self, request)

    right = TransferStep.confirm
    patch.setattr(TransferStep, "confirm", arrived)


@bug(40)
def sent_items_stay_buried_and_are_sent_again(patch: Patch) -> None:
    def apply(state: State, record: records.Sent, now: Moment) -> None:
        buried = state.buried_set.within(0, state.next_offset)
        outbox.apply_sent(state, record, now)
        state.buried_set.add_all(buried)

    patch.setitem(machine._APPLY, records.Sent, apply)


@bug(40)
def sent_items_stay_scheduled_and_come_due(patch: Patch) -> None:
    def apply(state: State, record: records.Sent, now: Moment) -> None:
        scheduled = state.scheduled.within(0, state.next_offset)
        outbox.apply_sent(state, record, now)
        state.scheduled.add_all(scheduled)

    patch.setitem(machine._APPLY, records.Sent, apply)


@bug(100)
def redriven_items_lose_the_time_that_they_were_given(patch: Patch) -> None:
    right = TransferStep._with_origins
    patch.setattr(TransferStep, "_with_origins", lambda self, *args: msgspec.structs.replace(right(self, *args), ats=None))


@bug(40)
def delivered_items_stay_in_the_outbox(patch: Patch) -> None:
    patch.setitem(machine._APPLY, records.Delivered, lambda state, record, now: None)


@bug(40)
def transferred_keys_are_not_routed_by_the_new_slot_map(patch: Patch) -> None:
    patch.setattr(TransferStep, "_destinations", lambda self, items, *rest: [rest[-1][0]] * len(items.batch))


@bug(40)
def dead_letters_have_no_origin(patch: Patch) -> None:
    def addressed(self: TransferStep, *args: Any) -> Batch:
        batch = right(self, *args)
        batch.origins = None
        return batch

    right = TransferStep._with_origins
    patch.setattr(TransferStep, "_with_origins", addressed)


@bug(40)
def follow_ups_are_forgotten(patch: Patch) -> None:
    patch.setattr(settle, "follow_up_records", lambda state, batches: [])


@bug(150)
def a_queue_is_deleted_while_transfers_are_under_way(patch: Patch) -> None:
    patch.setattr(transfer_router, "_is_held_up", lambda incarnation, engine: False)


# -- parked keys -----------------------------------------------------------------------------------


@bug(100)
def a_redriven_item_does_not_return_to_its_position(patch: Patch) -> None:
    patch.setattr(produce, "_find_replaced", lambda state, command, batch, base: None)


@bug(160)
def clear_does_not_release_keys_parked_for_transferred_items(patch: Patch) -> None:
    def decide(state: State, command: commands.Clear, now: Moment, peek: BlockSource) -> Any:
        found, answer = admin.decide_clear(state, command, now, peek)
        return [record for record in found if not isinstance(record, records.ParkedKeyReleased)], answer

    patch.setitem(machine._DECIDE, commands.Clear, decide)


# -- resizing --------------------------------------------------------------------------------------


@bug(40)
def fences_hold_nothing(patch: Patch) -> None:
    patch.setattr(Fences, "waits_from", lambda self, key: ENDLESS)


@bug(400)
def fences_also_hold_items_stored_before_the_resize(patch: Patch) -> None:
    right = Fences.waits_from
    patch.setattr(Fences, "waits_from", lambda self, key: 0 if right(self, key) < ENDLESS else ENDLESS)


@bug(300)
def fences_are_not_inherited(patch: Patch) -> None:
    patch.setattr(resizing, "inherited", lambda *args: [])


@bug(40)
def fences_narrow_to_no_key_at_all(patch: Patch) -> None:
    def run(self: PartitionSet, handle: PartitionHandle, command: Any, rounds: int = 0) -> Any:
        if isinstance(command, commands.NarrowFence):
            command = commands.NarrowFence(command.number, [])
        return right(self, handle, command, rounds)

    right = PartitionSet.run
    patch.setattr(PartitionSet, "run", run)


@bug(400)
def fences_narrow_before_the_backlog_is_drained(patch: Patch) -> None:
    patch.setattr(resizing, "is_drained", lambda *args: True)


@bug(40)
def a_fence_does_not_wait_for_leased_items(patch: Patch) -> None:
    patch.setattr(resizing, "key_is_unresolved", lambda *args: False)


@bug(300)
def the_marks_of_a_resize_are_too_low(patch: Patch) -> None:
    def reshape(self: Catalog, *args: Any, marks: dict[int, int], **rest: Any) -> Any:
        return right(self, *args, marks=dict.fromkeys(marks, 0), **rest)

    right = Catalog.reshape
    patch.setattr(Catalog, "reshape", reshape)


@bug(200)
def strays_are_leased_in_their_old_partition(patch: Patch) -> None:
    patch.setattr(ResizeStep, "moved_slots", lambda self, number: None)


@bug(120)
def dedup_ids_do_not_move_in_a_resize(patch: Patch) -> None:
    def decide(state: State, command: commands.AddFences, now: Moment, peek: BlockSource) -> Any:
        return resize.decide_add_fences(state, msgspec.structs.replace(command, dedup_ids=()), now, peek)

    patch.setitem(machine._DECIDE, commands.AddFences, decide)


@bug(100)
def moved_dedup_ids_name_items_that_do_not_exist(patch: Patch) -> None:
    def decide(state: State, command: commands.AddFences, now: Moment, peek: BlockSource) -> Any:
        adopted = [(digest, left, item + 1_000) for digest, left, item in command.dedup_ids]
        return resize.decide_add_fences(state, msgspec.structs.replace(command, dedup_ids=adopted), now, peek)

    patch.setitem(machine._DECIDE, commands.AddFences, decide)


@bug(40)
def a_repetition_asks_no_partition(patch: Patch) -> None:
    patch.setattr(ProduceStep, "_remembered_parts", lambda self, *args: ([], None))


@bug(400)
def a_repetition_asks_only_active_partitions(patch: Patch) -> None:
    right = PartitionSet.remembered
    patch.setattr(
        PartitionSet,
        "remembered",
        lambda self, handle, request: right(self, handle, request) if handle.number in self.active else None,
    )


@bug(600)
def partitions_that_cannot_be_asked_count_as_not_knowing_the_call(patch: Patch) -> None:
    right = PartitionSet.remembered

    def remembered(self: PartitionSet, handle: PartitionHandle, request: requests.Request) -> Any:
        return right(self, handle, request) if handle.is_usable else None

    patch.setattr(PartitionSet, "remembered", remembered)


@bug(40)
def a_part_of_a_call_is_remembered_as_the_whole(patch: Patch) -> None:
    def command(self: ProduceStep, request: requests.ProduceRequest, share: Batch, indexes: Sequence[int] | None) -> commands.Produce:
        made = right(self, request, share, indexes)
        made.indexes = None
        return made

    right = ProduceStep._command
    patch.setattr(ProduceStep, "_command", command)


@bug(40)
def a_base_lacks_the_calls(patch: Patch) -> None:
    patch.setattr(CallMemory, "restore", lambda self, *args: None)


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


# -- the order of the whole queue ------------------------------------------------------------------


@bug(100)
def a_lease_takes_all_of_one_partition_before_it_looks_at_the_next(patch: Patch) -> None:
    patch.setattr(SourcesByRank, "_bound", lambda self: None)


@bug(100)
def partitions_are_leased_from_by_number(patch: Patch) -> None:
    patch.setattr(LeaseSource, "_sort", lambda self: setattr(self, "entry", self.rank and (Rank(0, 0), 0, self.handle.number, self)))


def ranked(patch: Patch, change: Callable[[Rank], Rank]) -> None:
    """Change the rank by which a lease compares partitions."""

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


@bug(900)
def aging_does_not_count_across_partitions(patch: Patch) -> None:
    patch.setattr("penstock.loop.lease.best_rank", lambda heads, aging, now: best_rank(heads, 0, now))


# -- the turn --------------------------------------------------------------------------------------


@bug(40)
def answers_are_sent_before_the_commit(patch: Patch) -> None:
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
def due_items_cause_no_turn(patch: Patch) -> None:
    patch.setattr(PartitionHandle, "plan", lambda self, now: setattr(self, "next_run", None))


@bug(40)
def leases_of_cancelled_requests_are_not_returned(patch: Patch) -> None:
    patch.setattr(SettleStep, "return_items", lambda self, results: None)


@bug(40)
def watchers_are_not_answered(patch: Patch) -> None:
    patch.setattr(QueueEngine, "_answer_awaiting", lambda self: None)


@bug(40)
def producers_wait_for_ever(patch: Patch) -> None:
    patch.setattr(ProduceStep, "retry", lambda self, now: None)


@bug(1_600)
def a_partition_that_failed_misses_new_options(patch: Patch) -> None:
    patch.setattr(PartitionSet, "apply_queue_settings", lambda self, *args, **kwargs: None)


@bug(40)
def items_with_a_key_are_stored_in_any_partition(patch: Patch) -> None:
    patch.setattr(producing, "_partitions_of", lambda batch, slots, default=producing.FREE: [producing.FREE] * len(batch))


# -- uncommitted state and interrupts --------------------------------------------------------------


def reshape_last(patch: Patch) -> None:
    """Run a resize after the produces of its turn, without a check that they are committed."""

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
def marks_are_taken_from_uncommitted_state(patch: Patch) -> None:
    reshape_last(patch)


@bug(100)
def dedup_ids_are_taken_from_uncommitted_state(patch: Patch) -> None:
    """The marks are those of the beginning of the turn; only the dedup ids are uncommitted."""

    def begin(self: QueueEngine, taken: Sequence[requests.Request], now: int) -> None:
        before[self.incarnation] = {number: handle.state.next_offset for number, handle in self.handles.items() if handle.is_usable}
        right_turn(self, taken, now)

    def reshape(self: Catalog, incarnation: int, *args: Any, marks: dict[int, int], **rest: Any) -> Any:
        return right(self, incarnation, *args, marks={**marks, **before.get(incarnation, {})}, **rest)

    before: dict[int, dict[int, int]] = {}
    right_turn, right = QueueEngine.turn, Catalog.reshape
    reshape_last(patch)
    patch.setattr(QueueEngine, "turn", begin)
    patch.setattr(Catalog, "reshape", reshape)
    patch.setattr(Partition, "is_committed", property(lambda self: not self.failed))


@bug(1_300)
def fences_count_before_they_are_committed(patch: Patch) -> None:
    def prepare(self: ResizeStep, handle: PartitionHandle) -> None:
        right(self, handle)
        handle.fences_ready = True

    right = ResizeStep._complete_fences
    patch.setattr(ResizeStep, "_complete_fences", prepare)


@bug(40)
def a_failed_write_loses_answered_leases(patch: Patch) -> None:
    def open_again(self: Partition, answered: Sequence[Any] = (), **options: Any) -> None:
        right(self, **options)

    right = Partition._open
    patch.setattr(Partition, "_open", open_again)


@bug(100)
def an_interrupt_drops_the_requests_of_other_callers(patch: Patch) -> None:
    patch.setattr(QueueEngine, "requeue_undone", lambda self, taken, error: None)


@bug(500)
def an_interrupt_executes_committed_requests_again(patch: Patch) -> None:
    def give_up(self: QueueEngine, taken: Sequence[requests.Request], error: BaseException) -> None:
        self._committing = False
        right(self, taken, error)

    right = QueueEngine._abort
    patch.setattr(QueueEngine, "_abort", give_up)


# -- slow disks ------------------------------------------------------------------------------------


@bug(40)
def answers_do_not_wait_for_partitions_in_io(patch: Patch) -> None:
    patch.setattr(commits, "_rests_on", lambda request, result: ())


@bug(40)
def an_answer_waits_for_one_of_its_partitions_only(patch: Patch) -> None:
    right = commits._rests_on
    patch.setattr(commits, "_rests_on", lambda request, result: sorted(right(request, result))[:1])


def opened(handle: PartitionHandle) -> Partition:
    """The partition of a handle, in I/O or not."""
    if handle.partition is None:
        raise handle.refusal
    return handle.partition


def use_partitions_in_io(patch: Patch, where: type, name: str) -> None:
    """One step of a turn takes partitions that are out for healthy ones, and what they have not committed for
    committed."""
    right = getattr(where, name)

    def step(self: Any, *args: Any) -> Any:
        with patch.context() as here:
            here.setattr(PartitionHandle, "is_usable", property(lambda self: self.partition is not None and self.error is None))
            here.setattr(PartitionHandle, "usable_partition", property(opened))
            here.setattr(Partition, "is_committed", True)
            return right(self, *args)

    patch.setattr(where, name, step)


@bug(400)
def fences_are_lowered_by_partitions_in_io(patch: Patch) -> None:
    use_partitions_in_io(patch, ResizeStep, "_narrow")
    use_partitions_in_io(patch, ResizeStep, "_lift")
    use_partitions_in_io(patch, ResizeStep, "advance_fences")


@bug(2_400)
def a_resize_uses_partitions_in_io(patch: Patch) -> None:
    """Its marks and the dedup ids that move are those of partitions in I/O."""
    use_partitions_in_io(patch, QueueEngine, "_run_resize")
    right = QueueEngine._needs
    patch.setattr(QueueEngine, "_needs", lambda self, request: () if isinstance(request, requests.ResizeRequest) else right(self, request))


@bug(400)
def the_leases_of_a_slow_partition_end_at_once(patch: Patch) -> None:
    patch.setattr(QueueEngine, "_extend_leases", lambda self, handle: None)


@bug(40)
def deferred_requests_are_forgotten(patch: Patch) -> None:
    def runnable(self: QueueEngine, taken: Sequence[requests.Request]) -> Sequence[requests.Request]:
        found = right(self, taken)
        self.deferred.clear()
        return found

    right = QueueEngine._runnable
    patch.setattr(QueueEngine, "_runnable", runnable)


# -- damage ----------------------------------------------------------------------------------------


@bug(61)
def a_page_of_lost_items_ends_a_list(patch: Patch) -> None:
    def listed(engine: QueueEngine, query: ListItems) -> list[ListedItemData]:
        lost = {handle.number: len(handle.state.lost) for handle in engine.usable()}
        found = right(engine, query)
        return [one for one in found if lost[one.partition] == len(engine.handles[one.partition].state.lost)]

    right = queries.items
    found: dict[Any, Any] = {**queries.QUERY_HANDLERS, ListItems: listed}
    patch.setattr(queries, "QUERY_HANDLERS", found)


@bug(400)
def a_page_of_lost_items_ends_the_reading_of_a_cursor(patch: Patch) -> None:
    def page(self: Partition, start: int, limit: int) -> RetainedItems:
        runs = retained_runs(self.state, start, limit)
        items = self.items(runs)
        return RetainedItems(items, runs[-1] if items else self.state.next_offset)

    patch.setattr(Partition, "read_retained", page)


@bug(60)
def a_lease_of_lost_items_is_granted_empty(patch: Patch) -> None:
    patch.setattr(commits, "_without_lost", lambda granted, items: granted)


@bug(60)
def damaged_items_are_leased_again_and_again(patch: Patch) -> None:
    def collect(self: QueueEngine, request: requests.LeaseRequest, parts: list[Any]) -> list[Any]:
        if any(handle.usable_partition._items.collect(granted.runs).gaps for handle, granted in parts):
            self.settle_step.return_items([LeaseResult(handle.number, granted, [], 0) for handle, granted in parts])
            request.lost_to_damage = True
            return []
        return right(self, request, parts)

    right = QueueEngine._collect
    patch.setattr(QueueEngine, "_collect", collect)


# -- closed partitions -----------------------------------------------------------------------------


@bug(100)
def ready_items_of_closed_partitions_are_not_seen(patch: Patch) -> None:
    patch.setattr(PartitionHandle, "has_ready_items", property(lambda self: False))


@bug(60)
def due_items_of_closed_partitions_are_not_seen(patch: Patch) -> None:
    patch.setattr(PartitionHandle, "is_due", property(lambda self: False))


@bug(60)
def the_summary_of_a_closed_partition_has_wrong_counts(patch: Patch) -> None:
    right = summary.summarize
    patch.setattr(summary, "summarize", lambda state, size: msgspec.structs.replace(right(state, size), counts=Counts(0, 0, 0, 0, 0)))


# -- the tests -------------------------------------------------------------------------------------


def test_every_bug_can_be_planted() -> None:
    BUGS.check_plantable()


@pytest.mark.parametrize(("plant", "most_seeds"), BUGS.cases())
def test_a_planted_bug_is_caught(plant: Plant, most_seeds: int, monkeypatch: Patch) -> None:
    BUGS.check_caught(plant, most_seeds, monkeypatch)
