"""The texts of item ids and lease tokens.

Owns: the text of an item id ("3-17": partition and offset) and of a lease token; and foreign numbers, by which a
partition stores the ids of items of other partitions. Callers treat both texts as opaque. `parse_…` accepts only what
`format_…` writes.
Limits: partitions 0 to LAST_PARTITION and offsets below FIRST_FOREIGN_NUMBER, so that both fit into one unsigned 64-bit
number.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from penstock.words.errors import InvalidRequest

FIRST_FOREIGN_NUMBER = 1 << 48
"""Numbers from this one on are foreign numbers (items of other partitions); lower ones are offsets."""
LAST_PARTITION = (1 << 16) - 2

_PARTITION = r"(0|[1-9][0-9]{0,4})"
_OFFSET = r"(0|[1-9][0-9]{0,14})"
_ID = re.compile(f"{_PARTITION}-{_OFFSET}")
_TOKEN = re.compile(rf"([0-9a-f]{{16}})\.{_PARTITION}\.([1-9a-f][0-9a-f]{{0,15}})\.{_OFFSET}")
_SHOWN = 80


class Token(NamedTuple):
    """What a lease token names: the queue's incarnation, the item's partition and offset, and the lease number."""

    incarnation: int
    partition: int
    lease: int
    offset: int


# -- item ids ----------------------------------------------------------------------------------------


def format_id(partition: int, offset: int) -> str:
    return f"{partition}-{offset}"


def parse_id(text: str) -> tuple[int, int]:
    """The partition and the offset of an item id; InvalidRequest when the text is not one."""
    found = _ID.fullmatch(text) if isinstance(text, str) else None
    if found is not None:
        partition, offset = int(found[1]), int(found[2])
        if partition <= LAST_PARTITION and offset < FIRST_FOREIGN_NUMBER:
            return partition, offset
    raise InvalidRequest(f"{_shown(text)} is not the id of an item; give one as produce returned it, such as '3-17'")


def format_ids(partition: int, numbers: Sequence[int]) -> list[str]:
    """The item ids of numbers that a partition answered: its own offsets and foreign numbers."""
    ends = (*numbers[:1], *numbers[-1:]) if isinstance(numbers, range) else numbers
    if max(ends, default=0) >= FIRST_FOREIGN_NUMBER:
        return [format_id(*locate(partition, number)) for number in numbers]
    prefix = f"{partition}-"
    return [f"{prefix}{number}" for number in numbers]


def foreign_number(partition: int, offset: int) -> int:
    """The number that stands for an item of another partition; it never equals an offset."""
    return (partition + 1) << 48 | offset


def locate(own_partition: int, number: int) -> tuple[int, int]:
    """The partition and the offset that a number means: an offset of `own_partition`, or a foreign number."""
    if number < FIRST_FOREIGN_NUMBER:
        return own_partition, number
    return (number >> 48) - 1, number & (FIRST_FOREIGN_NUMBER - 1)


# -- lease tokens ------------------------------------------------------------------------------------


def format_token(token: Token) -> str:
    return f"{token.incarnation:016x}.{token.partition}.{token.lease:x}.{token.offset}"


def parse_token(text: str) -> Token:
    """The parts of a lease token; InvalidRequest when the text is not one."""
    found = _TOKEN.fullmatch(text) if isinstance(text, str) else None
    if found is not None:
        incarnation, partition, lease, offset = found.groups()
        token = Token(int(incarnation, 16), int(partition), int(lease, 16), int(offset))
        if token.partition <= LAST_PARTITION and token.offset < FIRST_FOREIGN_NUMBER:
            return token
    raise InvalidRequest(f"{_shown(text)} is not a lease token; give one as lease returned it")


def _shown(value: object) -> str:
    """A value for an error message, cut to _SHOWN characters."""
    if not isinstance(value, str):
        return f"a value of type {type(value).__name__}"
    return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}…"
