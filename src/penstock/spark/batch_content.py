"""What a batch of a stream holds, and whether a batch of a known number holds it again.

Owns: `ContentSum` and `is_repeated`. Spark repeats the last batch of a stream after a crash: the same rows, perhaps in
another order and in other tasks. A checkpoint that was restored from an older copy repeats the numbers of batches with
other rows, which must not be dropped as known. See docs/adr/0026.
"""

import logging
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.api.arrow import COLUMNS
from penstock.words.errors import InvalidRequest
from penstock.words.sources import WriteContent

MASK = (1 << 63) - 1
SKIP_HINT = "or give repeatedBatch=skip if the queue already has the rows of these batches"
_log = logging.getLogger("penstock")


class ContentSum:
    """Sums a hash of every row that passes: the order of the rows does not matter."""

    def __init__(self) -> None:
        self.checksum = 0

    def passing(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches; each is added when it is asked for."""
        for batch in batches:
            self.checksum = (self.checksum + _sum_rows(batch)) & MASK
            yield batch


def _sum_rows(batch: pa.RecordBatch) -> int:
    """The sum of the hashes of the rows. A null counts as no column."""
    rows = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in COLUMNS and len(column) > column.null_count:
            weight = pa.scalar(xxhash.xxh3_64_intdigest(name.encode()) | 1, pa.uint64())
            weighted = pc.multiply(_hashes(name, column), weight)  # without a check: it wraps
            rows = weighted if rows is None else pc.add(rows, weighted)
    if rows is None:
        return 0
    # Not linear: otherwise two rows that swap their values of one column would give the same sum.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the mixing steps of SplitMix64
        rows = pc.multiply(pc.bit_wise_xor(rows, pc.shift_right(rows, pa.scalar(shift, pa.uint64()))), pa.scalar(factor, pa.uint64()))
    return int(pc.sum(rows).as_py())


def _hashes(name: str, column: pa.Array) -> pa.Array:
    """A hash of each value of a column; 0 for null."""
    if pa.types.is_nested(column.type):  # headers
        texts = (None if value is None else repr(sorted(value)).encode() for value in column.to_pylist())
        return pa.array([0 if text is None else xxhash.xxh3_64_intdigest(text) for text in texts], pa.uint64())
    if name == "payload":  # mostly different values
        found = pa.array(map(xxhash.xxh3_64_intdigest, _bytes(column.drop_null())), pa.uint64())
        zeros = pa.repeat(pa.scalar(0, pa.uint64()), len(column))
        return pc.replace_with_mask(zeros, column.is_valid(), found) if column.null_count else found
    coded = column.dictionary_encode()
    hashes = pa.array(map(xxhash.xxh3_64_intdigest, _bytes(coded.dictionary)), pa.uint64())
    return hashes.take(coded.indices).fill_null(0)


def _bytes(column: pa.Array) -> list[bytes]:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        found: list[bytes] = column.to_pylist()
        return found
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _bytes(column.cast(pa.large_binary() if pa.types.is_large_string(kind) else pa.binary()))
    return [b"%d" % value for value in column.cast(pa.int64()).to_pylist()]


def is_repeated(content: WriteContent, highest: int, known: Sequence[WriteContent], skip: bool) -> bool:
    """Whether a batch was published before, so that it adds nothing. Warns, or raises InvalidRequest, if it differs.

    highest: the highest published number of the stream; known: what its last batches held.
    skip: the batch adds nothing even if it differs.
    """
    if content.number > highest:
        return False
    before = next((one for one in known if one.number == content.number), None)
    if before == content or (before is None and content.number == highest):  # published by an earlier version
        return True
    difference = _difference(content, before, highest)
    if skip or (content.number == highest and before is not None and before.items == content.items):
        _log.warning("%s; it adds nothing", difference)
        return True
    raise InvalidRequest(
        f"{difference}; it would add nothing. The checkpoint was probably restored from an older copy: "
        f"use the newest one, start with a new checkpointLocation after what the queue has, {SKIP_HINT}"
    )


def _difference(content: WriteContent, before: WriteContent | None, highest: int) -> str:
    batch = f"batch {content.number - 1} of this stream"
    if before is None:
        return f"{batch} has {content.items:,} rows, and batches up to {highest - 1} were published, this one too long ago or without rows"
    if before.items != content.items:
        return f"{batch} was published with {before.items:,} rows and now has {content.items:,}"
    return f"{batch} was published with {content.items:,} rows and now has other ones"
