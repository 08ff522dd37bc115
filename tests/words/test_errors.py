"""Errors: unique codes, HTTP statuses, and which of them are retryable."""

import inspect

import pytest

from penstock.words import errors
from penstock.words.errors import PenstockError

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, PenstockError) and kind is not PenstockError]


def test_codes_are_unique() -> None:
    assert len({kind.code for kind in ALL}) == len(ALL) > 10


@pytest.mark.parametrize("kind", ALL)
def test_each_error_has_a_code_a_status_and_a_docstring(kind: type[PenstockError]) -> None:
    assert kind.code == "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).lstrip("_")
    assert 400 <= kind.http_status < 600
    assert kind.__doc__


def test_these_errors_are_retryable() -> None:
    assert {kind.__name__ for kind in ALL if kind.retryable} == {"QueueBusy", "QueueFull", "QueueHeld", "StorageFailed", "OutcomeUnknown"}
