"""Batches for tests of the columns: every combination of columns, absent, empty, constant and mixed.

Owns: `batches` (a Hypothesis strategy), `framed` (the frame that a log reads of a draft).
"""

from typing import Any

from hypothesis import strategies as st

from penstock.logs.log import Draft, Frame
from penstock.rules.routing import key_ids
from penstock.words.batch import Batch

BYTES = st.binary(max_size=12)
NUMBERS = st.integers(0, 1 << 62)


def framed(draft: Draft, sequence: int = 1) -> Frame:
    return Frame(*draft[:1], sequence, *draft[1:-1], memoryview(b"".join(draft.parts)))


def column(values: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[list[Any] | None]:
    """No column, one with the same value for all items, or one with any values."""
    constant = values.map(lambda value: [value] * count)
    return st.none() | constant | st.lists(values, min_size=count, max_size=count)


@st.composite
def batches(draw: st.DrawFn, max_size: int = 20) -> Batch:
    payloads = draw(st.lists(BYTES, min_size=1, max_size=max_size))
    count = len(payloads)
    keys = draw(column(st.none() | BYTES, count))
    priorities = draw(column(st.integers(0, 9), count))
    texts = column(st.none() | st.text(max_size=5), count)
    return Batch(
        payloads,
        keys,
        None if keys is None else key_ids(keys),
        draw(column(st.none() | BYTES, count)),
        draw(texts),
        draw(texts),
        draw(texts),
        None if priorities is None else bytes(priorities),
        draw(column(NUMBERS, count)),
        draw(column(NUMBERS, count)),
        draw(column(st.none() | st.binary(min_size=16, max_size=16), count)),
        draw(column(st.none() | BYTES, count)),
    ).drop_empty_columns()
