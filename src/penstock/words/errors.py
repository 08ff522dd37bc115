"""Every error a caller of Penstock can meet, grouped by what the caller does next.

Owns: the error classes, their stable codes and HTTP statuses; `Refused`, an error as a part of an answer.
Rule: a message reads ``<what is wrong>; <what to do>`` and names the thing at fault.
Foreign exceptions (OSError, struct.error, …) are translated where they enter, never passed on bare.
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
    """Ids of the items that a settling call could not settle, because their lease had ended. The others were settled."""
    results: "Sequence[str | PenstockError]" = ()
    """Of a produce that failed in part: the id or the error of each item."""


# -- the request itself must change ------------------------------------------------------------------


class InvalidRequest(PenstockError):
    """The request is wrong as it stands; mend it and send it again. Nothing was changed."""

    code = "invalid_request"
    http_status = 400


class QueueNotFound(PenstockError):
    """There is no queue of that name (or no longer in that incarnation); create it or mend the name."""

    code = "queue_not_found"
    http_status = 404


class QueueExists(PenstockError):
    """A queue of that name exists with other options; use `exist_ok` or another name."""

    code = "queue_exists"
    http_status = 409


class AccessDenied(PenstockError):
    """The key does not allow this; ask for one with the scope that the message names."""

    code = "access_denied"
    http_status = 403


# -- the same request may succeed later --------------------------------------------------------------


class QueueBusy(PenstockError):
    """More requests wait than the queue takes; send the request again in a moment."""

    code = "queue_busy"
    http_status = 429
    retryable = True


class QueueFull(PenstockError):
    """A limit of the queue is reached; wait until items are resolved, or raise the limit."""

    code = "queue_full"
    http_status = 429
    retryable = True


class QueueHeld(PenstockError):
    """Someone paused the queue or holds its consumer right; resume it or wait."""

    code = "queue_held"
    http_status = 409
    retryable = True


class StorageFailed(PenstockError):
    """Storage refused or lost the write; nothing of the request is stored. Send it again."""

    code = "storage_failed"
    http_status = 503
    retryable = True


class OutcomeUnknown(PenstockError):
    """It cannot be known whether the request was stored; repeat it with the same request id."""

    code = "outcome_unknown"
    http_status = 503
    retryable = True


# -- this right is gone ------------------------------------------------------------------------------


class LeaseLost(PenstockError):
    """The lease ended (expired, superseded, settled or of another incarnation); drop the work, it is someone else's now."""

    code = "lease_lost"
    http_status = 410


class BrokerClosed(PenstockError):
    """The broker was closed; open it again."""

    code = "broker_closed"
    http_status = 503


# -- the place must be looked at ---------------------------------------------------------------------


class BrokerLocked(PenstockError):
    """Another process owns the directory; the message names it."""

    code = "broker_locked"
    http_status = 503


class CorruptLog(PenstockError):
    """Bytes on disk are not what was written, or not ours; run `verify`, then `repair`."""

    code = "corrupt_log"
    http_status = 500


def reason_of(error: BaseException) -> str:
    """What an exception says, with its name: many say little without it."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


# -- errors as data ----------------------------------------------------------------------------------


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why a part of a request was not done: an error as data, for answers that say it part by part. Its cause is not told."""

    code: str
    message: str

    @classmethod
    def of(cls, error: PenstockError) -> "Refused":
        return cls(error.code, str(error))

    def error(self) -> PenstockError:
        """The error that it stands for, to be raised."""
        return ERRORS_BY_CODE.get(self.code, PenstockError)(self.message)


ERRORS_BY_CODE: dict[str, type[PenstockError]] = {kind.code: kind for kind in PenstockError.__subclasses__()}
"""Every kind of error by its code."""
