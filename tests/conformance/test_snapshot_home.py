"""What a home that only looks does with operations."""

from pathlib import Path
from typing import Any

import pytest

from penstock.broker.snapshot import Snapshot
from penstock.operations import (
    ExplainItem,
    FindOffsets,
    FindQueue,
    ListCursors,
    ListHeldKeys,
    ListItems,
    ListQueues,
    Query,
    ReadHistory,
    ReadItems,
    ReadSlotMap,
    ReadStats,
    TraceItem,
)
from penstock.words.errors import InvalidRequest
from tests.conformance.homes import HOMES
from tests.conformance.test_homes import SAMPLES, create, lease, produce, settle


def test_a_snapshot_answers_queries_and_refuses_everything_else(tmp_path: Path) -> None:
    home_under_test = HOMES["directory"](tmp_path)
    with home_under_test.stack:
        queue = create(home_under_test.owner)
        produce(home_under_test.owner, queue, "a", "b")
        handed = lease(home_under_test.owner, queue)
        settle(home_under_test.owner, queue, "complete", handed)
        with Snapshot.open(str(tmp_path / "data")) as snapshot:
            same: list[Query[Any]] = [
                FindQueue(name="q"),
                ListQueues(),
                FindOffsets(queue=queue, at="newest"),
                ListCursors(queue=queue),
                ListItems(queue=queue),
                ListHeldKeys(queue=queue),
                ReadItems(queue=queue, start={}),
                ExplainItem(queue=queue, partition=0, offset=1),
                TraceItem(queue=queue, partition=0, offset=0),
                ReadHistory(queue=queue, partition=0, offset=0),
                ReadSlotMap(queue=queue),
            ]
            for query in same:
                assert str(snapshot.call(query)) == str(home_under_test.owner.call(query)), query
            before = snapshot.call(ReadStats(queue=queue))
            assert (before.ready, before.completed) == (1, 1)
            for sample in SAMPLES:
                if not isinstance(sample, Query):
                    with pytest.raises(InvalidRequest, match=f"is open read-only here, and {type(sample).__name__} is no query"):
                        snapshot.call(sample)
            snapshot.refresh()
            after = snapshot.call(ReadStats(queue=queue))
            assert (after.ready, after.completed, after.produced) == (before.ready, before.completed, before.produced)
