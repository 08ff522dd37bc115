"""The checker of campaigns finds nothing in an honest history, and what is wrong in doctored ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.processes.checker import Checker, Evidence, FinalItem, Freeze
from tests.processes.journal import KILLED, Call, Facts


class History:
    """Journals and final items, made by hand. Each event is a second after the one before it."""

    def __init__(self) -> None:
        self.evidence = Evidence([], [], killed={"killed"}, max_attempts=5)
        self.now = 0.0

    def call(
        self, op: str, process: str = "a", answer: Any = None, error: str = "", allowed: float = 30, message: str = "", **facts: Any
    ) -> Call:
        self.now += 1
        call = Call(process, len(self.evidence.calls) + 1, op, self.now, allowed, facts, self.now + 0.5, error, message, answer)
        if error == KILLED:
            call.end = float("inf")
        self.evidence.calls.append(call)
        return call

    def produce(self, *payloads: str, key: str | None = None, stored: bool = True, **options: Any) -> Call:
        items: list[Facts] = [{"payload": payload, "key": key, **options.pop("item", {})} for payload in payloads]
        answer = [f"0-{payload}" for payload in payloads]
        for payload in payloads if stored else ():
            self.store(payload, key)
        return self.call("produce", answer=answer, queue="work", items=items, request=None, **options)

    def store(self, payload: str, key: str | None = None, origin: str = "", queue: str = "work", id: str = "") -> None:
        self.evidence.items.append(FinalItem(queue, id or f"0-{payload}", payload, key, origin, "completed"))

    def lease(
        self, *payloads: str, key: str | None = None, process: str = "b", seconds: float = 5, attempts: int = 1, **facts: Any
    ) -> Call:
        answer = [{"payload": payload, "id": f"0-{payload}", "key": key, "attempts": attempts} for payload in payloads]
        return self.call("lease", process, answer, queue="work", lease_timeout=seconds, **facts)

    def settle(self, lease: Call, action: str = "complete", error: str = "", then: tuple[str, ...] = (), **options: Any) -> Call:
        payloads = [item["payload"] for item in lease.answer]
        state = {"complete": "completed", "retry": "retried", "bury": "buried"}[action]
        state = "lost" if error == "lease_lost" else "open" if error else state
        follow_ups = [{"payload": payload, "key": None, "queue": "work"} for payload in then]
        facts: Facts = {"lease": lease.number, "action": action, "payloads": payloads, "then": follow_ups}
        return self.call("settle", lease.process, [state] * len(payloads), error, **facts, **options)

    def problems(self) -> set[str]:
        """The kinds of problems."""
        return {problem.split(":")[0] for problem in Checker(copy.deepcopy(self.evidence)).check()}


def honest() -> History:
    """Two items of a key, one after the other; one without a key that is retried; a follow-up; a dead letter."""
    history = History()
    history.produce("1", key="k")
    history.produce("2", key="k")
    history.settle(history.lease("1", key="k"))
    history.settle(history.lease("2", key="k", process="c"), then=("follow",))
    history.store("follow")
    history.settle(history.lease("follow"))
    history.produce("3")
    history.settle(history.lease("3"), "retry")
    history.settle(history.lease("3", attempts=2), "bury")
    history.store("3", queue="dead", origin="work/0-3")
    history.store("3", origin="work/0-3", id="0-30")
    again = history.lease("3")
    again.answer[0]["id"] = "0-30"
    history.settle(again)
    return history


def test_an_honest_history_has_no_problem() -> None:
    assert honest().problems() == set()


def test_unknown_outcomes_leave_two_possibilities() -> None:
    history = honest()
    history.produce("lost", stored=False, error="outcome_unknown")
    history.produce("there", error=KILLED, process="killed")
    history.settle(history.lease("there"), error=KILLED)
    history.evidence.killed.add("b")
    history.produce("full", stored=False, error="queue_full")
    assert history.problems() == set()


def test_a_unit_whose_lease_has_ended_is_handled_again() -> None:
    history = honest()
    history.produce("first", "second", key="unit")
    history.settle(history.lease("first", "second", key="unit", per_key=3, seconds=1.2), error="lease_lost")
    for payload in ("first", "second"):
        history.settle(history.lease(payload, key="unit", attempts=2))
    assert history.problems() == set()


def doubled_produce(history: History) -> None:
    history.store("1", "k", id="0-100")


def doubled_unknown_produce(history: History) -> None:
    history.produce("unknown", error="outcome_unknown")
    history.store("unknown", id="0-101")
    for _ in range(2):
        history.settle(history.lease("unknown"), error="outcome_unknown")


def doubled_dedup(history: History) -> None:
    for payload in ("d1", "d2"):
        history.produce(payload, item={"dedup": "same"})
        history.settle(history.lease(payload))


def doubled_follow_up(history: History) -> None:
    history.store("follow", id="0-102")


def lost_produce(history: History) -> None:
    history.produce("gone", stored=False)


def lost_follow_up(history: History) -> None:
    history.evidence.items = [item for item in history.evidence.items if item.payload != "follow"]


def stored_though_refused(history: History) -> None:
    history.produce("refused", error="queue_full")
    history.settle(history.lease("refused"))


def nobody_produced(history: History) -> None:
    history.store("strange")
    history.settle(history.lease("strange"))


def doubled_transfer(history: History) -> None:
    history.store("3", origin="work/0-3", id="0-103")


def completed_by_two(history: History) -> None:
    history.settle(history.lease("2", key="k", process="b", attempts=2))


def leased_after_completion(history: History) -> None:
    history.lease("1", key="k", attempts=2)


def nobody_completed(history: History) -> None:
    history.produce("left")


def left_at_the_end(history: History) -> None:
    history.evidence.items[0] = history.evidence.items[0]._replace(state="leased")


def two_holders_of_a_key(history: History) -> None:
    history.produce("x", "y", key="held")
    first, second = history.lease("x", key="held", seconds=60), history.lease("y", key="held", process="c")
    history.settle(first)
    history.settle(second)


def two_holders_of_an_item(history: History) -> None:
    history.produce("z")
    history.lease("z", seconds=60, process="killed")
    history.settle(history.lease("z", process="c", attempts=2))


def two_holders_after_an_extension(history: History) -> None:
    history.produce("z")
    first = history.lease("z", seconds=2)
    history.call("extend", "b", lease=first.number, payload="z", lease_timeout=60)
    history.now += 5
    history.settle(history.lease("z", process="c", attempts=2))


def two_handlers_at_once(history: History) -> None:
    history.produce("w")
    item: Facts = {"payload": "w", "id": "0-w", "key": None, "attempts": 1}
    history.call("handle", "b", "complete", queue="work", item=item, then=[]).end += 5
    history.call("handle", "c", "complete", queue="work", item={**item, "attempts": 2}, then=[])


def wrong_order(history: History) -> None:
    for payload in ("first", "second"):
        history.produce(payload, key="ordered")
    for payload in ("second", "first"):
        history.settle(history.lease(payload, key="ordered"))


def wrong_order_in_a_batch(history: History) -> None:
    history.produce("first", "second", key="ordered")
    for payload in ("second", "first"):
        history.settle(history.lease(payload, key="ordered"))


def wrong_order_in_units(history: History) -> None:
    for payload in ("first", "second"):
        history.produce(payload, key="ordered")
    for payload in ("second", "first"):
        history.settle(history.lease(payload, key="ordered", per_key=3))


def lost_too_early(history: History) -> None:
    history.produce("e")
    history.settle(history.lease("e", seconds=60), error="lease_lost")
    history.now += 60
    history.settle(history.lease("e", attempts=2))


def attempts_do_not_grow(history: History) -> None:
    history.produce("e")
    history.settle(history.lease("e"), "retry")
    history.settle(history.lease("e"))


def too_many_attempts(history: History) -> None:
    history.produce("e")
    history.settle(history.lease("e", attempts=6))


def ends_late(history: History) -> None:
    history.produce("e", allowed=1, error="queue_full", stored=False).end += 10


def no_answer(history: History) -> None:
    history.call("stats", error=KILLED)


def undocumented_error(history: History) -> None:
    history.call("stats", error="broker_locked")


def owner_not_named(history: History) -> None:
    history.call("stats", error="queue_busy", message="the owner of data has not answered for 1.0 s")


def another_owner_named(history: History) -> None:
    message = "the owner of data (process 17 on host since today) has not answered for 1.0 s"
    call = history.call("stats", error="queue_busy", message=message)
    history.evidence.freezes.append(Freeze("owner", 18, call.begin - 1, call.end + 1, True))


def cursor_skips(history: History) -> None:
    history.call("read", answer=["0-1", "0-2"], queue="work", cursor="audit")


@pytest.mark.parametrize(
    ("doctor", "kind"),
    [
        (doubled_produce, "doubled"),
        (doubled_unknown_produce, "doubled"),
        (doubled_dedup, "doubled"),
        (doubled_follow_up, "doubled"),
        (lost_produce, "lost"),
        (lost_follow_up, "lost"),
        (stored_though_refused, "refused"),
        (nobody_produced, "unexplained"),
        (doubled_transfer, "transfer"),
        (completed_by_two, "twice"),
        (leased_after_completion, "twice"),
        (nobody_completed, "lost"),
        (left_at_the_end, "left"),
        (two_holders_of_a_key, "two holders"),
        (two_holders_of_an_item, "two holders"),
        (two_holders_after_an_extension, "two holders"),
        (two_handlers_at_once, "two holders"),
        (wrong_order, "order"),
        (wrong_order_in_a_batch, "order"),
        (wrong_order_in_units, "order"),
        (lost_too_early, "lease lost"),
        (attempts_do_not_grow, "attempts"),
        (too_many_attempts, "attempts"),
        (ends_late, "late"),
        (no_answer, "no answer"),
        (undocumented_error, "error"),
        (owner_not_named, "unnamed"),
        (another_owner_named, "unnamed"),
        (cursor_skips, "cursor"),
    ],
)
def test_a_doctored_history_is_noticed(doctor: Callable[[History], None], kind: str) -> None:
    history = honest()
    doctor(history)
    assert kind in history.problems()
    if kind not in ("doubled", "two holders", "twice", "order"):
        assert history.problems() == {kind}
