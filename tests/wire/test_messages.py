"""Messages: whole ones come out, however their bytes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.operations import FindQueue
from penstock.wire import messages
from penstock.wire.messages import (
    CALL,
    HEADER,
    BrokenMessage,
    Message,
    MessageBuffer,
    decode_refusal,
    encode_message,
    encode_refusal,
)
from penstock.words.errors import InvalidRequest, QueueFull


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=50)), max_size=8), st.data())
def test_messages_come_out_whole_however_their_bytes_arrive(sent: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    raw = b"".join(HEADER.pack(len(body), kind, number) + body for kind, number, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    buffer = MessageBuffer(limit=50)
    found: list[Message] = []
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        found += buffer.feed(raw[start:stop])
    assert found == [Message(*one) for one in sent] and len(buffer) == 0


def test_a_message_that_is_too_large_breaks_the_connection() -> None:
    buffer = MessageBuffer(limit=10)
    with pytest.raises(BrokenMessage):
        buffer.feed(HEADER.pack(11, CALL, 1))


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(InvalidRequest, match="ask for less"):
        encode_message(CALL, 1, FindQueue(name="q" * 200))


def test_an_error_is_the_same_on_the_other_side() -> None:
    (message,) = MessageBuffer(1_000).feed(bytes(encode_refusal(7, QueueFull("no room; wait"))))
    error = decode_refusal(message.body)
    assert (type(error), str(error), message.number) == (QueueFull, "no room; wait", 7)
