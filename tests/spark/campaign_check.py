"""What a campaign must leave: every row once in the queue and in every sink, the rows of a key in order.

Owns: `find_problems` and `Row`. No Spark, no broker: tests doctor the rows.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

SHOWN = 5


class Row(NamedTuple):
    """A row of the source: its number is larger than those of all earlier rows of its key."""

    key: str
    number: int


def find_problems(source: Sequence[Row], places: Mapping[str, Sequence[Row]], ordered: Iterable[str]) -> list[str]:
    """The problems of all places, each of which should have the rows of the source; those in `ordered` in order by
    key."""
    problems = []
    for name, found in places.items():
        problems += [f"{name}: {problem}" for problem in _compare(source, found)]
        if name in ordered:
            problems += [f"{name}: {problem}" for problem in _disorder(found)]
    return problems


def _compare(source: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    counts, wanted = Counter(found), set(source)
    for what, rows in (
        ("are missing", sorted(wanted - set(counts))),
        ("are there more than once", sorted(row for row, count in counts.items() if count > 1 and row in wanted)),
        ("are not from the source", sorted(set(counts) - wanted)),
    ):
        if rows:
            yield f"{len(rows)} rows {what}, such as {', '.join(f'{row.key} {row.number}' for row in rows[:SHOWN])}"


def _disorder(found: Sequence[Row]) -> Iterator[str]:
    numbers: dict[str, list[int]] = defaultdict(list)
    for row in found:
        numbers[row.key].append(row.number)
    for key, seen in sorted(numbers.items()):
        late = next(((before, after) for before, after in pairwise(seen) if after < before), None)
        if late is not None:
            yield f"key {key} is out of order: row {late[1]} comes after row {late[0]}"
