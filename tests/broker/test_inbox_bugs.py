"""The random inbox work (test_inbox_random.py) can fail: each of these planted bugs of adoption must be caught."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

from penstock.errors import PenstockError
from penstock.logs import columns
from penstock.logs.log import Draft
from penstock.loop import produce
from penstock.loop.produce import ProduceStep
from penstock.words.batch import Batch
from penstock.words.binary_column import BinaryColumn
from tests.broker.test_inbox_random import live

SEEDS = 25
Patch: TypeAlias = pytest.MonkeyPatch
Plant: TypeAlias = Callable[[Patch], None]


def an_adopted_frame_keeps_the_offsets_of_its_write(patch: Patch) -> None:
    right = columns.encode

    def wrong(records: Sequence[Any], now: Any) -> Draft:
        draft = right(records, now)
        return draft._replace(base_offset=0) if records[0].batch.is_view else draft

    patch.setattr(columns, "encode", wrong)


def the_last_item_of_a_chunk_is_lost(patch: Patch) -> None:
    right = ProduceStep._command

    def wrong(step: ProduceStep, request: Any, share: Batch, indexes: Any) -> Any:
        cut = request.sequence and len(share) > 1
        return right(step, request, share.take(range(len(share) - 1)) if cut else share, indexes)

    patch.setattr(ProduceStep, "_command", wrong)


def the_keys_of_a_share_are_not_those_of_its_items(patch: Patch) -> None:
    right = BinaryColumn.take

    def wrong(column: BinaryColumn, indexes: Sequence[int]) -> BinaryColumn:
        return right(column, indexes if column.bits is None else range(len(indexes)))

    patch.setattr(BinaryColumn, "take", wrong)


def the_values_of_a_share_are_not_cut_where_they_end(patch: Patch) -> None:
    right = BinaryColumn.take

    def wrong(column: BinaryColumn, indexes: Sequence[int]) -> BinaryColumn:
        taken = right(column, indexes)
        edges = array("i", taken.offsets)
        if column.bits is None and len(edges) > 2:
            edges[1] -= 1
        return type(column)(memoryview(edges), taken.data, taken.bits)

    patch.setattr(BinaryColumn, "take", wrong)


def a_chunk_is_divided_by_the_first_map_that_was_asked(patch: Patch) -> None:
    right = produce._chunk_shares

    def wrong(request: Any, slots: Any) -> Any:
        return next(iter(request.shares.values()), None) or right(request, slots)

    patch.setattr(produce, "_chunk_shares", wrong)


def the_partition_of_a_chunk_forgets_its_sequence(patch: Patch) -> None:
    right = ProduceStep._command

    def wrong(step: ProduceStep, request: Any, share: Batch, indexes: Any) -> Any:
        command = right(step, request, share, indexes)
        if request.sequence:
            command.source = None
        return command

    patch.setattr(ProduceStep, "_command", wrong)


def a_chunk_is_stored_although_one_before_it_was_refused(patch: Patch) -> None:
    right = ProduceStep._store_chunks

    def wrong(step: ProduceStep, first: Any) -> Any:
        chunks, first.following = [first, *first.following], ()
        return [part for chunk in chunks for part in right(step, chunk)]

    patch.setattr(ProduceStep, "_store_chunks", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        an_adopted_frame_keeps_the_offsets_of_its_write,
        the_last_item_of_a_chunk_is_lost,
        the_keys_of_a_share_are_not_those_of_its_items,
        the_values_of_a_share_are_not_cut_where_they_end,
        a_chunk_is_divided_by_the_first_map_that_was_asked,
        the_partition_of_a_chunk_forgets_its_sequence,
        a_chunk_is_stored_although_one_before_it_was_refused,
    ],
)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    for seed in range(SEEDS):
        try:
            live(seed, 40)
        except (AssertionError, PenstockError) as caught:
            print(f"\n{plant.__name__}: {seed + 1} seeds: {str(caught).splitlines()[0][:120]}")
            return
    pytest.fail(f"{plant.__name__} was not caught by {SEEDS} seeds")
