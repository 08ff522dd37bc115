"""The outcome of an item whose handler failed, and the delay of its next attempt."""

import pickle
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.words.clock import SECOND
from penstock.worker.outcomes import Bury, Failed, Outcome, Retry, RetryPolicy, Snooze, batch_failures, outcome_of

MIDDLE = 0.5


def outcome(error: BaseException, attempts: int = 1, chance: float = MIDDLE, **policy: Any) -> Outcome:
    return outcome_of(error, attempts, RetryPolicy(**policy), lambda: chance)


def test_each_attempt_waits_longer_up_to_a_limit() -> None:
    policy = RetryPolicy(base=1, factor=3, most=50)
    assert [policy.delay(attempt, lambda: MIDDLE) / SECOND for attempt in (1, 2, 3, 4, 5, 9_999)] == [1, 3, 9, 27, 50, 50]


@pytest.mark.parametrize(("chance", "seconds"), [(0.0, 7.5), (0.5, 10.0), (1.0, 12.5)])
def test_jitter_varies_the_delay_by_a_share(chance: float, seconds: float) -> None:
    assert RetryPolicy(base=10, jitter=0.25).delay(1, lambda: chance) == seconds * SECOND


def test_a_policy_without_delay_retries_at_once() -> None:
    assert RetryPolicy(base=0).delay(7, lambda: 1.0) == 0


def test_an_error_is_retried_with_its_name_and_text() -> None:
    assert outcome(KeyError("x"), 2) == Outcome("retried", 2 * SECOND, "KeyError: 'x'")
    assert outcome(ValueError()) == Outcome("retried", SECOND, "ValueError")


def test_retry_bury_and_snooze_give_their_outcomes() -> None:
    assert outcome(Retry(30, "busy")) == Outcome("retried", 30 * SECOND, "busy")
    assert outcome(Retry(), 2) == Outcome("retried", 2 * SECOND)
    assert outcome(Bury("poison")) == Outcome("buried", 0, "poison")
    assert outcome(Snooze(5)) == Outcome("snoozed", 5 * SECOND)


class Special(ConnectionError):
    pass


def test_by_type_uses_the_most_specific_class() -> None:
    by_type = {OSError: RetryPolicy(base=7), ConnectionError: Bury, Special: Retry(3), ValueError: Snooze(9, "later"), KeyError: Bury("k")}
    assert outcome(OSError("disk"), by_type=by_type) == Outcome("retried", 7 * SECOND, "OSError: disk")
    assert outcome(ConnectionResetError("gone"), by_type=by_type) == Outcome("buried", 0, "ConnectionResetError: gone")
    assert outcome(Special("s"), by_type=by_type) == Outcome("retried", 3 * SECOND, "Special: s")
    assert outcome(UnicodeError("u"), by_type=by_type) == Outcome("snoozed", 9 * SECOND, "later")
    assert outcome(KeyError(1), by_type=by_type) == Outcome("buried", 0, "k")
    assert outcome(TypeError("t"), by_type=by_type) == Outcome("retried", SECOND, "TypeError: t")


def test_items_of_a_batch_fail_by_index_or_id() -> None:
    bury = Bury("b")
    found = batch_failures(Failed({0: "first", "0-9": bury}), ["0-7", "0-8", "0-9"])
    assert [(place, type(error), str(error)) for place, error in found.items()] == [(0, Retry, "first"), (2, Bury, "b")]


@pytest.mark.parametrize("name", [3, -1, "0-1", None])
def test_an_item_that_was_not_in_the_batch_cannot_fail(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="which it was not given"):
        batch_failures(Failed({name: "x"}), ["0-7", "0-8", "0-9"])


def test_policies_and_outcomes_can_be_pickled() -> None:
    policy = RetryPolicy(base=2, by_type={ValueError: Bury, KeyError: RetryPolicy(base=3)})
    assert pickle.loads(pickle.dumps(policy)) == policy
    for word in (Retry(3, "r"), Bury("b"), Snooze(4, "s")):
        assert vars(pickle.loads(pickle.dumps(word))) == vars(word)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"base": -1}, "base is -1; give a number from 0"),
        ({"base": "1"}, "base is '1'; give a number"),
        ({"factor": 0.5}, "factor is 0.5; give a number from 1"),
        ({"most": float("nan")}, "most is nan"),
        ({"jitter": 2}, "jitter is 2; give a number from 0 to 1"),
        ({"jitter": True}, "jitter is True"),
        ({"by_type": {"ValueError": Bury}}, "by_type has 'ValueError'; name classes of exceptions"),
        ({"by_type": {ValueError: 3}}, "by_type gives 3 for ValueError; give Bury"),
    ],
)
def test_a_wrong_policy_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RetryPolicy(**wrong)
    assert sentence in str(caught.value)


def test_wrong_arguments_of_retry_snooze_and_failed_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="delay is -1; give 0 to"):
        Retry(-1)
    with pytest.raises(InvalidRequest, match="delay is str; give seconds"):
        Snooze("5")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="failed is list; give a dict"):
        Failed(["0-1"])  # type: ignore[arg-type]
