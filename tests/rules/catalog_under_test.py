"""A catalog for tests.

Owns: `CatalogUnderTest`, and `refused`, which checks that a refused call changes nothing and says what to do.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest

from penstock.rules import catalog
from penstock.rules.catalog import CatalogRecord, CatalogState, QueueEntry
from penstock.rules.options import Options, merged
from penstock.words.errors import PenstockError


class CatalogUnderTest:
    """A catalog's state, all its records, and a method for each decision, which also applies its records."""

    def __init__(self) -> None:
        self.state = CatalogState()
        self.records: list[CatalogRecord] = []

    def create(self, name: str, partitions: int = 1, incarnation: int = 0, exist_ok: bool = False, **given: Any) -> QueueEntry:
        options = merged(Options(), given)
        number = incarnation or len(self.records) + 1
        self.apply(catalog.create(self.state, name, options, partitions, number, 1_000, exist_ok, given))
        return self.state.names[name]

    def update(self, name: str, **changes: Any) -> QueueEntry:
        self.apply(catalog.update(self.state, self.state.names[name].incarnation, changes))
        return self.state.names[name]

    def reshape(
        self,
        name: str,
        active: Collection[int],
        *,
        read_only: Collection[int] = (),
        marks: Mapping[int, int] | None = None,
        at: int = 2_000,
        keep_since: int = 0,
    ) -> QueueEntry:
        incarnation = self.state.names[name].incarnation
        self.apply(catalog.change_partitions(self.state, incarnation, active, read_only, marks or {}, at, keep_since))
        return self.state.names[name]

    def delete(self, name: str) -> int:
        incarnation = self.state.names[name].incarnation
        self.apply(catalog.delete(self.state, name))
        return incarnation

    def removed(self, incarnation: int) -> None:
        self.apply(catalog.confirm_files_removed(self.state, incarnation))

    def adopting(self, name: str, drop: str) -> int:
        """Begin the adoption of a published write; returns its number."""
        self.apply(catalog.begin_adoption(self.state, self.state.names[name].incarnation, drop))
        return self.state.names[name].adopting[drop]

    def adopted(self, name: str, drop: str, source: str, number: int) -> QueueEntry:
        self.apply(catalog.finish_adoption(self.state, self.state.names[name].incarnation, drop, source, number))
        return self.state.names[name]

    def hold(self, name: str, holder: str, timeout: int = 0, runs: Sequence[str] = ()) -> QueueEntry:
        self.apply(catalog.set_consumer_right(self.state, self.state.names[name].incarnation, holder, timeout, runs))
        return self.state.names[name]

    def apply(self, records: list[CatalogRecord]) -> None:
        for record in records:
            catalog.apply(self.state, record)
        self.records += records

    def check(self) -> None:
        """The state is the same when it is replayed from the first record, or from a Base before any record."""
        expected = catalog.dump(self.state)
        replayed = CatalogState()
        for cut, record in enumerate(self.records):
            loaded = catalog.load(catalog.dump(replayed))
            for later in self.records[cut:]:
                catalog.apply(loaded, later)
            assert catalog.dump(loaded) == expected, f"from a Base before record {cut}"
            catalog.apply(replayed, record)
        assert catalog.dump(replayed) == expected
        assert catalog.load(expected).names == self.state.names
        assert catalog.load(expected).entries == self.state.entries


def refused(book: CatalogUnderTest, error: type[PenstockError], match: str, ask: Callable[[], object]) -> None:
    """Check that a call raises this error, changes nothing, and says what to do."""
    before = catalog.dump(book.state)
    with pytest.raises(error, match=match) as caught:
        ask()
    assert "; " in str(caught.value)
    assert catalog.dump(book.state) == before
