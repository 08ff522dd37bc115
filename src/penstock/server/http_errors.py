"""Errors that only an HTTP client can meet.

Owns: these classes. Their codes and statuses are listed in docs/http.md beside those of words/errors.py.
"""

from collections.abc import Sequence
from difflib import get_close_matches

from penstock.words.errors import PenstockError

_SHOWN = 80


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


def unknown_path_error(path: str, known: Sequence[str]) -> UnknownPath:
    """The error for a path that does not exist; it names similar ones."""
    near = get_close_matches(path[:_SHOWN], known, 3, 0.6)
    return UnknownPath(f"there is nothing at {path[:_SHOWN]!r}; {'did you mean ' + ' or '.join(near) if near else 'see /openapi.json'}")
