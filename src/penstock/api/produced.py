"""What `produce`, `produce_many` and `produce_arrow` return: ids that also say which items were duplicates.

Owns: `ProducedId`, `ProducedIds`, `ProducedRows`, and how they are made from the answers of partitions. An id is a str,
ids are a list and rows an int, so callers that do not use dedup ids need not know these classes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.api.arguments import copy_error
from penstock.loop.requests import StoredPart
from penstock.words.errors import PenstockError
from penstock.words.ids import format_id, format_ids

_ENDINGS = [f"{number:03d}" for number in range(1_000)]


class ProducedId(str):
    """The id of an item, as `produce` returns it."""

    __slots__ = ("duplicate",)

    duplicate: bool
    """True if no item was added, because the queue knew the dedup id. The id is then that of the earlier item."""

    def __new__(cls, text: str, duplicate: bool = False) -> "ProducedId":
        made = str.__new__(cls, text)
        made.duplicate = duplicate
        return made

    def __getnewargs__(self) -> Any:
        return str(self), self.duplicate


class ProducedIds(list[str]):
    """The ids of items in their order, as `produce_many` returns them."""

    __slots__ = ("duplicates",)

    def __init__(self, ids: Iterable[str] = (), duplicates: Sequence[int] = ()) -> None:
        super().__init__(ids)
        self.duplicates: list[int] = list(duplicates)
        """The indexes of items that were not added, because the queue knew their dedup ids, or an earlier item of the
        call has the same. Their ids are those of the earlier items."""


class ProducedRows(int):
    """The number of rows, as `produce_arrow` returns it."""

    duplicates: list[int]
    """The numbers of the rows that were not added, because the queue knew their dedup ids."""

    def __new__(cls, rows: int, duplicates: Sequence[int] = ()) -> "ProducedRows":
        made = super().__new__(cls, rows)
        made.duplicates = list(duplicates)
        return made

    def __getnewargs__(self) -> Any:
        return int(self), self.duplicates


def stored_id(parts: Sequence[StoredPart]) -> ProducedId:
    """The id of the only item of a produce; raises its error if it was refused."""
    partition, _, stored, refused = parts[0]
    if stored is None:
        assert refused is not None
        raise refused.error()
    if stored.ids is None:
        return ProducedId(format_id(partition, stored.base))
    return ProducedId(format_ids(partition, stored.ids)[0], not stored.count)


def stored_ids(parts: Sequence[StoredPart], count: int) -> ProducedIds:
    """The ids of the items of a produce. If some were refused, raises the first error, with the attribute `results`."""
    if len(parts) == 1 and parts[0].indexes is None and parts[0].stored is not None:
        return ProducedIds(_ids(parts[0].partition, parts[0].stored.offsets), parts[0].stored.duplicates)
    results: list[str | PenstockError] = [""] * count
    duplicates: list[int] = []
    for partition, chosen, stored, refused in parts:
        indexes = range(count) if chosen is None else chosen
        if stored is not None:
            duplicates += [indexes[index] for index in stored.duplicates]
            for index, item_id in zip(indexes, _ids(partition, stored.offsets), strict=True):
                results[index] = item_id
        elif refused is not None:
            error = refused.error()
            for index in indexes:
                results[index] = error
    first = next((result for result in results if isinstance(result, PenstockError)), None)
    if first is not None:
        known = set(duplicates)
        marked = [ProducedId(one, index in known) if isinstance(one, str) else one for index, one in enumerate(results)]
        raise copy_error(first, results=marked)
    return ProducedIds(results, sorted(duplicates))  # type: ignore[arg-type]


def _ids(partition: int, numbers: Sequence[int]) -> list[str]:
    """Like `format_ids`, but faster for a long range: the last three digits come from a table."""
    if not isinstance(numbers, range) or len(numbers) < 10 or numbers.stop >= 1 << 48:
        return format_ids(partition, numbers)
    found: list[str] = []
    at, stop = numbers.start, numbers.stop
    while at < stop:
        thousand, first = divmod(at, 1_000)
        last = min(1_000, first + stop - at)
        prefix = f"{partition}-{thousand}"
        if thousand:  # joined and split: that is twice as fast as one addition each
            found += (prefix + f"\n{prefix}".join(_ENDINGS[first:last])).split("\n")
        else:
            found += format_ids(partition, range(first, last))
        at += last - first
    return found
