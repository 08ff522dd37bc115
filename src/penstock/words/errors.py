"""Every error that Penstock raises, grouped by what the caller should do.

Owns: the error classes, their stable codes and HTTP statuses; `Refused`, an error as data inside an answer.
A message reads ``<what is wrong>; <what to do>`` and names the queue, item, option or file that is wrong.
Other exceptions (OSError, struct.error, …) are turned into one of these where they are caught.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec


class PenstockError(Exception):
    """Root of all errors raised by Penstock."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    lost: Sequence[str] = ()
    """Ids of the items whose lease had ended before a settling call. All other items of the call were settled."""
    results: "Sequence[str | PenstockError]" = ()
    """When a produce failed for some of its items: the id or the error of each item."""


# -- the request itself must change ------------------------------------------------------------------


class InvalidRequest(PenstockError):
    """The request is wrong; fix it and send it again. Nothing was changed."""

    code = "invalid_request"
    http_status = 400


class QueueNotFound(PenstockError):
    """No queue has that name, or it was deleted and created again; create it or fix the name."""

    code = "queue_not_found"
    http_status = 404


class QueueExists(PenstockError):
    """A queue of that name exists with other options; use `exist_ok` or another name."""

    code = "queue_exists"
    http_status = 409


class Unauthenticated(PenstockError):
    """No API key was given, or it is unknown, expired or revoked; send a valid one."""

    code = "unauthenticated"
    http_status = 401
    key_id: str = ""
    """The id of the key, if it was valid once."""


class AccessDenied(PenstockError):
    """The API key does not allow this; use one with the scope or the queue prefix that the message names."""

    code = "access_denied"
    http_status = 403


# -- only an HTTP client can meet these -------------------------------------------------------------


class BodyTooLarge(PenstockError):
    """The body of an HTTP request is larger than the server allows; send less at a time."""

    code = "body_too_large"
    http_status = 413


class UnknownPath(PenstockError):
    """There is nothing at the path; use one that the message names, or see /openapi.json."""

    code = "unknown_path"
    http_status = 404


class MethodNotAllowed(PenstockError):
    """The path exists, but not with this method; use the one in the header Allow."""

    code = "method_not_allowed"
    http_status = 405


class NotAcceptable(PenstockError):
    """The reply cannot have a type that the header Accept names; accept application/json."""

    code = "not_acceptable"
    http_status = 406


class QueueNotEmpty(PenstockError):
    """The queue has items that are not completed; complete or clear them, or delete it with `force`."""

    code = "queue_not_empty"
    http_status = 409


class UnsupportedMediaType(PenstockError):
    """The body has a type or an encoding that is not understood here; send JSON, plain or compressed."""

    code = "unsupported_media_type"
    http_status = 415


# -- the same request may succeed later --------------------------------------------------------------


class QueueBusy(PenstockError):
    """Too many requests wait for the queue; send the request again in a moment."""

    code = "queue_busy"
    http_status = 429
    retryable = True


class QueueFull(PenstockError):
    """A limit of the queue is reached; wait until items are completed or buried, or raise the limit."""

    code = "queue_full"
    http_status = 429
    retryable = True


class QueueHeld(PenstockError):
    """The queue is paused, or another consumer holds the consumer right; resume the queue or wait."""

    code = "queue_held"
    http_status = 409
    retryable = True


class StorageFailed(PenstockError):
    """A write or read of the storage failed; nothing of the request is stored. Send it again."""

    code = "storage_failed"
    http_status = 503
    retryable = True


class OutcomeUnknown(PenstockError):
    """The request may or may not be stored; repeat it with the same request id."""

    code = "outcome_unknown"
    http_status = 503
    retryable = True


# -- a lease or a broker has ended -------------------------------------------------------------------


class LeaseLost(PenstockError):
    """The lease expired, was settled or replaced, or its queue was deleted. Stop working on the item."""

    code = "lease_lost"
    http_status = 410


class BrokerClosed(PenstockError):
    """The broker was closed; open it again."""

    code = "broker_closed"
    http_status = 503


def broker_closed_error() -> BrokerClosed:
    return BrokerClosed("the broker is closed; open it again")


# -- the directory needs attention -------------------------------------------------------------------


class BrokerLocked(PenstockError):
    """Another process has the directory open; the message names that process."""

    code = "broker_locked"
    http_status = 503


class CorruptLog(PenstockError):
    """Bytes on disk are not what was written, or were not written by Penstock; run `verify`, then `repair`."""

    code = "corrupt_log"
    http_status = 500


def reason_of(error: BaseException) -> str:
    """The class name and the message of an exception; many messages are unclear without the class name."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# -- errors as data ----------------------------------------------------------------------------------


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A PenstockError as data, for answers with a result per part. It has no `__cause__`."""

    code: str
    message: str

    @classmethod
    def of(cls, error: PenstockError) -> "Refused":
        return cls(error.code, str(error))

    def error(self) -> PenstockError:
        """The error, ready to be raised."""
        return ERRORS_BY_CODE.get(self.code, PenstockError)(self.message)


ERRORS_BY_CODE: dict[str, type[PenstockError]] = {kind.code: kind for kind in PenstockError.__subclasses__()}


def caused_by_bug(error: BaseException) -> OutcomeUnknown:
    """What a caller gets whose request failed because of a bug in Penstock."""
    why = f"this failed because of a bug ({type(error).__name__}: {error}), and it is not known what was done"
    return OutcomeUnknown(f"{why}; please report it")
