"""Arrow streams whose buffers do not fit together."""

import struct

import pyarrow
import pytest

from penstock.server.arrow_streams import read_items
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MIB


def stream(payloads: list[bytes]) -> bytes:
    table = pyarrow.table({"payload": pyarrow.array(payloads, pyarrow.binary())})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return body


@pytest.mark.parametrize("wrong", [(0, 7, 1 << 20), (0, 1 << 30, 14), (-64, 7, 14), (0, 14, 7)])
def test_offsets_that_lead_out_of_the_body_are_refused(wrong: tuple[int, ...]) -> None:
    """Else the server would end, or store what is next to the body in its memory as an item."""
    body = stream([b"payload", b"another"])
    assert [payload for batch in read_items(body, MIB) for payload in batch.payloads] == [b"payload", b"another"]
    offsets = struct.pack("<3i", 0, 7, 14)
    assert body.count(offsets) == 1
    with pytest.raises(InvalidRequest, match="not an Arrow stream"):
        read_items(body.replace(offsets, struct.pack("<3i", *wrong)), MIB)
