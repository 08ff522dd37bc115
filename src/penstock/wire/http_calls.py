"""Operations and answers as the bodies of HTTP requests and responses, as Penstock's own client sends them.

Owns: the path, the content types and the encoding (`decode_answer` is that of wire/messages.py). An operation is posted
to CALL_PATH as MessagePack. The response has status 200 and the answer as MessagePack, or the status of an error and
the error as `Refused`. A response of another content type is not the server's: a proxy in between made it.
Compatibility is that of `wire/messages.py`: the header VERSION_HEADER has the version of the client's protocol.
"""

from typing import Any

import msgspec

from penstock.wire.messages import MAJOR, MINOR
from penstock.words.errors import InvalidRequest, PenstockError, Refused

CALL_PATH = "/v1/call"
OPERATION_TYPE = "application/vnd.penstock.operation"
ANSWER_TYPE = "application/vnd.penstock.answer"
VERSION_HEADER = "penstock-protocol"
VERSION = f"{MAJOR}.{MINOR}"

_encoder = msgspec.msgpack.Encoder()
_refused = msgspec.msgpack.Decoder(Refused)


def check_version(given: str) -> None:
    """InvalidRequest when a client of this version cannot be served."""
    if given.partition(".")[0] != str(MAJOR):
        raise InvalidRequest(
            f"the server speaks version {VERSION} of the protocol and this client {given[:20]!r}; "
            "use the same major version of Penstock on both sides"
        )


def encode_answer(answer: Any) -> bytes:
    return _encoder.encode(answer)


def encode_error(error: PenstockError) -> bytes:
    return _encoder.encode(Refused.of(error))


def decode_error(body: bytes) -> PenstockError:
    """The error in a response. Raises MsgspecError or UnicodeDecodeError when it cannot be understood."""
    return _refused.decode(body).error()
