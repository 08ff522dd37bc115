"""Operations and answers as the bodies of HTTP requests and responses, as Penstock's own client sends them.

Owns: the path, the content types and the encoding (`decode_answer` is that of wire/messages.py). An operation is posted
to CALL_PATH as MessagePack. The response has status 200 and the answer as MessagePack, or the status of an error and
the error as `Refused`. A response of another content type is not the server's: a proxy in between made it.
Compatibility is that of `wire/messages.py`: the header VERSION_HEADER has the version of the client's protocol.
"""

from typing import Any

import msgspec

from penstock.operations import Operation
from penstock.wire.messages import MAJOR, MAX_MESSAGE_BYTES, MINOR
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


def encode_operation(operation: Operation[Any]) -> bytes:
    """InvalidRequest when it cannot be encoded, or is too large."""
    try:
        body = _encoder.encode(operation)
    except (UnicodeEncodeError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        what = f"{type(operation).__name__} cannot be sent to the server ({error})"
        raise InvalidRequest(f"{what}; give texts and numbers that can be stored") from error
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidRequest(f"the request has {len(body)} bytes, of {MAX_MESSAGE_BYTES} that are allowed; send less at a time")
    return body


def encode_answer(answer: Any) -> bytes:
    return _encoder.encode(answer)


def encode_error(error: PenstockError) -> bytes:
    return _encoder.encode(Refused.of(error))


def decode_error(body: bytes) -> PenstockError:
    """The error in a response. Raises MsgspecError or UnicodeDecodeError when it cannot be understood."""
    return _refused.decode(body).error()
