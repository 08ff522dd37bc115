"""The messages that a client and the owner of a broker send each other.

Owns: the layout of a message, `MessageBuffer`, `Hello` and `Welcome`, and the version of the protocol. A message is
    u32 length of the body | u8 kind | u32 number of the call | body          little-endian
A client begins with HELLO and the owner answers WELCOME, or REFUSED and closes the connection. Then the client sends
CALL (body: an operation) and CANCEL, and the owner sends one ANSWER or REFUSED for each call, in any order; REFUSED for
a call that was cancelled before it was answered. Bodies are MessagePack.
Compatibility: both sides must have the same MAJOR. Within it, fields are only added, with defaults that are not sent:
so an older side refuses only what it cannot do (an unknown kind of operation, or a field that it does not know).
"""

import socket
import struct
from typing import Any, NamedTuple

import msgspec

from penstock.operations import Operation, answer_type
from penstock.words.errors import InvalidRequest, PenstockError, Refused
from penstock.words.limits import KIB, MAX_BATCH_BYTES

MAJOR, MINOR = 1, 0
HELLO, WELCOME, CALL, CANCEL, ANSWER, REFUSED = 1, 2, 3, 4, 5, 6
HEADER = struct.Struct("<IBI")
MAX_HELLO_BYTES = 4 * KIB
"""Before a client has shown that it knows the secret, it cannot send more."""
MAX_MESSAGE_BYTES = 4 * MAX_BATCH_BYTES
"""A batch of the largest payloads, with keys and headers, fits."""
READ_BYTES = 256 * KIB

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Operation[Any]], "msgspec.msgpack.Decoder[Any]"] = {}


class Hello(msgspec.Struct, omit_defaults=True):
    """The first message of a client."""

    major: int
    minor: int
    secret: str
    """From the owner's lock file: who can read it may use the broker."""
    pid: int = 0
    name: str = ""
    """The client's program, shown to operators."""


class Welcome(msgspec.Struct, omit_defaults=True):
    """The owner's answer to `Hello`."""

    major: int
    minor: int
    pid: int = 0
    host: str = ""
    roots: list[str] = []
    """Its storage roots besides the directory itself."""


class Message(NamedTuple):
    kind: int
    number: int
    body: bytes


class BrokenMessage(Exception):
    """The other side sent what is no message: the connection must be closed."""


def encode_message(kind: int, number: int, body: Any) -> bytearray:
    """A message, with the body encoded; InvalidRequest when it is too large."""
    message = bytearray(HEADER.size)
    try:
        _encoder.encode_into(body, message, HEADER.size)
    except (UnicodeEncodeError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise InvalidRequest(
            f"{type(body).__name__} cannot be sent to the owner ({error}); give texts and numbers that can be stored"
        ) from error
    size = len(message) - HEADER.size
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the message has {size} bytes, of {MAX_MESSAGE_BYTES} that are allowed; ask for less at a time")
    HEADER.pack_into(message, 0, size, kind, number)
    return message


def encode_refusal(number: int, error: PenstockError) -> bytearray:
    return encode_message(REFUSED, number, Refused.of(error))


def decode_refusal(body: bytes) -> PenstockError:
    return msgspec.msgpack.decode(body, type=Refused).error()


def decode_answer(kind: type[Operation[Any]], body: bytes) -> Any:
    """The answer to a kind of operation. Raises MsgspecError or UnicodeDecodeError when it cannot be understood."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(answer_type(kind))
    return decoder.decode(body)


class ReadBuffer:
    """Memory to read into, used again and again: `recv` would allocate READ_BYTES each time, which is slow."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(READ_BYTES))

    def receive(self, sock: socket.socket) -> bytes:
        """The bytes that have arrived; b"" at the end of the connection. Raises as `recv_into`."""
        return bytes(self._memory[: sock.recv_into(self._memory)])


class MessageBuffer:
    """Bytes that arrived, until they are whole messages."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """The largest body that is accepted."""
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes; gives the messages that are whole. BrokenMessage when a message is too large."""
        found: list[Message] = []
        if self._bytes:
            self._bytes += data
            data = self._bytes  # type: ignore[assignment]
        at, end = 0, len(data)
        with memoryview(data) as view:
            while at + HEADER.size <= end:
                size, kind, number = HEADER.unpack_from(view, at)
                if size > self.limit:
                    raise BrokenMessage(f"a message of {size} bytes, of {self.limit} that are allowed")
                stop = at + HEADER.size + size
                if stop > end:
                    break
                found.append(Message(kind, number, bytes(view[at + HEADER.size : stop])))
                at = stop
        if data is self._bytes:
            del self._bytes[:at]
        elif at < end:
            self._bytes += data[at:]
        return found
