"""Limits: wrong input is refused with a message that says what is wrong and what to do."""

from typing import Any

import pytest

from penstock.rules.commands import AcquireLease, ExtendLease, RetryLeased
from penstock.rules.lease import validate_lease
from penstock.rules.settle import truncate_reason, validate_extend, validate_retry
from penstock.words.clock import HOUR, MINUTE, SECOND
from penstock.words.errors import InvalidRequest
from penstock.words.limits import MAX_ATTEMPTS, MAX_DELAY, Policy, check_range

SENTENCE = r"^[a-z][^;]+; [a-z].+$"


@pytest.mark.parametrize("value", [0, 11, -1, True, 5.0, "5", None])
def test_a_number_out_of_bounds_or_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^want is \S+; give a whole number from 1 to 10$"):
        check_range("want", value, 1, 10)


@pytest.mark.parametrize("value", [1, 10])
def test_a_number_at_a_limit_is_accepted(value: int) -> None:
    assert check_range("want", value, 1, 10) == value


@pytest.mark.parametrize(
    "options",
    [
        {"lease_timeout": SECOND - 1},
        {"lease_timeout": 12 * HOUR + 1},
        {"max_attempts": -1},
        {"max_attempts": MAX_ATTEMPTS + 1},
        {"max_attempts": 1.5},
        {"ttl": -1},
        {"ttl": MAX_DELAY + 1},
        {"priority_aging": -1},
        {"dedup_window": 0},
        {"on_bury": "burn"},
        {"on_bury": None},
    ],
)
def test_the_error_names_the_wrong_option(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(InvalidRequest, match=f"^{name} is .*; "):
        Policy(**options).validate()


def test_the_bounds_of_a_policy_are_valid() -> None:
    for policy in (Policy(), Policy(SECOND, 0, 0, 0, 1, "park"), Policy(12 * HOUR, MAX_ATTEMPTS, MAX_DELAY, MAX_DELAY, MAX_DELAY)):
        assert policy.validate() is policy


@pytest.mark.parametrize(("lease_timeout", "remember"), [(MINUTE, 15 * MINUTE), (8 * MINUTE, 16 * MINUTE)])
def test_results_are_kept_for_15_minutes_or_two_lease_timeouts(lease_timeout: int, remember: int) -> None:
    assert Policy(lease_timeout=lease_timeout).result_memory == remember


@pytest.mark.parametrize(
    "options",
    [
        {"want": 0},
        {"want": -1},
        {"want": 10_001},
        {"want": "1"},
        {"per_key": 0},
        {"timeout": SECOND - 1},
        {"timeout": 13 * HOUR},
        {"consumer": "x" * 1_025},
        {"consumer": "\ud800"},
        {"consumer": 7},
    ],
)
def test_a_wrong_lease_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=SENTENCE):
        validate_lease(AcquireLease(**{"want": 1, **options}))


def test_a_lease_at_the_limits_is_accepted() -> None:
    for command in (AcquireLease(1, "x" * 1_024), AcquireLease(10_000, "é" * 512, 12 * HOUR, 10_000)):
        assert validate_lease(command) is command


@pytest.mark.parametrize("options", [{"delay": -1}, {"delay": MAX_DELAY + 1}, {"delay": 0.5}, {"reason": b"no"}, {"reason": None}])
def test_a_wrong_retry_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=SENTENCE):
        validate_retry(RetryLeased(1, **options))


@pytest.mark.parametrize("timeout", [SECOND - 1, 13 * HOUR, -1, "1"])
def test_a_wrong_extension_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidRequest, match=SENTENCE):
        validate_extend(ExtendLease(1, timeout))


@pytest.mark.parametrize(
    ("reason", "kept"),
    [("", ""), ("x" * 1_024, "x" * 1_024), ("x" * 2_000, "x" * 1_024), ("x" + "🦀" * 500, "x" + "🦀" * 255), ("\ud800", "?")],
)
def test_a_reason_is_cut_at_a_character_and_never_refused_for_its_length(reason: str, kept: str) -> None:
    assert truncate_reason(reason) == kept
