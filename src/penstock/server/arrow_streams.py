"""Items as Arrow streams in the bodies of requests and replies.

Owns: `read_items`, `write_leases` and `write_log`. pyarrow is an optional dependency: without it, streams are refused.
A stream is checked before it is decoded: its buffers may be compressed, and its columns may name one long value many
times, so that a small body would need much memory. Call these functions outside the event loop.
"""

import struct
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import msgspec

from penstock.api.arrow import from_arrow, items_to_arrow
from penstock.loop.item_cache import Items
from penstock.loop.requests import LeaseResult
from penstock.operations import Offsets
from penstock.server.served_request import Reply
from penstock.words.batch import Batch
from penstock.words.clock import SECOND
from penstock.words.errors import BodyTooLarge, InvalidRequest
from penstock.words.ids import Token, format_token

ARROW_TYPE = "application/vnd.apache.arrow.stream"
MAX_ROWS = 200_000
"""The most rows in one request: each has a result in the reply."""
NEXT_OFFSETS = b"next_offsets"


def is_installed() -> bool:
    """Whether Arrow streams can be read and written."""
    return find_spec("pyarrow") is not None


def reply(stream: bytes) -> Reply:
    return Reply(stream, 200, ARROW_TYPE)


# -- reading -----------------------------------------------------------------------------------------


def read_items(body: bytes, limit: int) -> list[Batch]:
    """The rows of a stream as batches. InvalidRequest when it is wrong, BodyTooLarge when it is too large decoded."""
    import pyarrow

    try:
        _check_buffers(pyarrow, body, limit)
        with pyarrow.ipc.open_stream(pyarrow.py_buffer(body)) as reader:
            table = reader.read_all()
        if table.num_rows > MAX_ROWS:
            raise InvalidRequest(f"the stream has {table.num_rows} rows; send at most {MAX_ROWS} at a time")
        table.validate(full=True)  # before a value is read: its place in the buffers, which the client chose, may be wrong
        _check_values(pyarrow, table, limit)
    except (pyarrow.ArrowException, OSError, struct.error, ValueError) as error:
        raise InvalidRequest(f"the body is not an Arrow stream ({error}); send the bytes of an Arrow IPC stream") from None
    return list(from_arrow(table))


def _check_buffers(pyarrow: Any, body: bytes, limit: int) -> None:
    """BodyTooLarge when the buffers of a stream are longer than `limit` when they are decompressed."""
    total = 0
    for message in _each(pyarrow.ipc.MessageReader.open_stream(pyarrow.py_buffer(body))):
        if message.type in ("record batch", "dictionary"):
            total += sum(_buffer_sizes(message.metadata.to_pybytes(), message.body, message.type == "dictionary"))
        if total > limit:
            raise _too_large(limit)


def _each(messages: Any) -> Iterator[Any]:
    while True:
        try:
            yield messages.read_next_message()
        except StopIteration:
            return


def _buffer_sizes(metadata: bytes, body: Any, is_dictionary: bool) -> Iterator[int]:
    """The sizes of a message's decoded buffers. The metadata is a flatbuffer, described in Arrow's Message.fbs."""
    (root,) = struct.unpack_from("<I", metadata, 0)
    batch = _follow(metadata, _field(metadata, root, 2))
    if is_dictionary:
        batch = _follow(metadata, _field(metadata, batch, 1))
    is_compressed = _field(metadata, batch, 3) != 0
    vector = _field(metadata, batch, 2)
    if not vector:
        return
    vector = _follow(metadata, vector)
    (count,) = struct.unpack_from("<I", metadata, vector)
    for index in range(count):
        offset, length = struct.unpack_from("<qq", metadata, vector + 4 + 16 * index)
        if is_compressed and length >= 8:
            (size,) = struct.unpack_from("<q", body, offset)
            yield max(size, length - 8)  # -1: this buffer is not compressed
        else:
            yield max(length, 0)


def _field(data: bytes, table: int, index: int) -> int:
    """Where a field of a flatbuffer's table is; 0 when it is left out."""
    (distance,) = struct.unpack_from("<i", data, table)
    slots = table - distance
    (size,) = struct.unpack_from("<H", data, slots)
    if 4 + 2 * index >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, slots + 4 + 2 * index)
    return table + offset if offset else 0


def _follow(data: bytes, position: int) -> int:
    """Where the reference at a position leads."""
    (distance,) = struct.unpack_from("<I", data, position)
    return int(position + distance)


def _check_values(pyarrow: Any, table: Any, limit: int) -> None:
    """BodyTooLarge when values that are shared by rows are longer than `limit` in all."""
    types = pyarrow.types
    shared = [
        column
        for column in table.columns
        if types.is_dictionary(column.type) or types.is_string_view(column.type) or types.is_binary_view(column.type)
    ]
    total = sum(_value_bytes(pyarrow, chunk) for column in shared for chunk in column.chunks)
    if total > limit:
        raise _too_large(limit)


def _value_bytes(pyarrow: Any, chunk: Any) -> int:
    """The length of all values of a part of a column that shares them."""
    import pyarrow.compute as compute

    if not pyarrow.types.is_dictionary(chunk.type):
        views = chunk.buffers()[1]  # 16 bytes each, which begin with the length
        return 0 if views is None else sum(memoryview(views).cast("i")[4 * chunk.offset : 4 * (chunk.offset + len(chunk)) : 4])
    if not _is_binary(pyarrow, chunk.dictionary.type):
        return 0  # it is refused later
    lengths = compute.binary_length(chunk.dictionary)
    return compute.sum(compute.take(lengths, chunk.indices)).as_py() or 0


def _is_binary(pyarrow: Any, kind: Any) -> bool:
    types = pyarrow.types
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the stream has more than {limit} bytes when it is decoded; send less at a time")


# -- writing -----------------------------------------------------------------------------------------


def write_leases(incarnation: int, results: Sequence[LeaseResult], wall: int) -> bytes:
    """A stream of leased items, with the columns lease_token and lease_deadline."""
    import pyarrow

    blocks = [(one.partition, block.offsets, *block[1:], one.granted.attempts) for one in results for block in one.items]
    tokens, deadlines = [], []
    for result in results:
        deadline = wall + round(result.seconds * SECOND)
        for block in result.items:
            tokens += [format_token(Token(incarnation, result.partition, result.granted.lease, offset)) for offset in block.offsets]
            deadlines += [deadline] * len(block.batch)
    found = items_to_arrow(blocks)
    found = found.append_column("lease_token", pyarrow.array(tokens, pyarrow.string()))
    return _stream(pyarrow, found.append_column("lease_deadline", pyarrow.array(deadlines, pyarrow.timestamp("us", "UTC"))))


def write_log(items: Sequence[tuple[int, Items]], next_offsets: Offsets) -> bytes:
    """A stream of items. The metadata of its schema has the offsets from which to read on."""
    import pyarrow

    found = items_to_arrow([(partition, block.offsets, *block[1:], {}) for partition, block in items], 0)
    return _stream(pyarrow, found.replace_schema_metadata({NEXT_OFFSETS: msgspec.json.encode(next_offsets)}))


def _stream(pyarrow: Any, found: Any) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, found.schema) as writer:
        writer.write_batch(found)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream
