"""`penstock lease`, `complete`, `retry`, `bury`, `extend`."""

import re

import pytest

from tests.cli.conftest import CommandLine


@pytest.fixture
def four(orders_cli: CommandLine) -> CommandLine:
    orders_cli.run("produce", "orders", "--lines", "--key", "k", input="a\n")
    orders_cli.run("produce", "orders", "--lines", input="b\nc\nd\n")
    return orders_cli


def test_lease_and_complete(four: CommandLine) -> None:
    lines = four.out("lease", "orders", "2").splitlines()
    assert lines[0].split() == ["ID", "KEY", "ATTEMPTS", "PAYLOAD", "TOKEN"]
    token = lines[1].split()[-1]
    assert four.out("complete", token) == "1 item completed"
    assert four.out("complete", token) == "1 item completed"  # completing again has no effect
    assert four.json("stats", "orders")["completed"] == 1


def test_lease_as_json(four: CommandLine) -> None:
    found = four.json("lease", "orders", "10", "--consumer", "me", "--lease-timeout", "5m")
    assert len(found) == 4
    assert {one["payload"] for one in found} == {"a", "b", "c", "d"}
    assert all(one["attempts"] == 1 and one["token"] and one["deadline"].endswith("Z") for one in found)
    assert four.json("stats", "orders")["consumers"] == {"me": 4}


def test_nothing_to_lease(orders_cli: CommandLine) -> None:
    assert orders_cli.out("lease", "orders", code=1) == "nothing is ready"
    assert orders_cli.out("lease", "orders", "--tokens", "--wait", "1ms", code=1) == ""
    assert orders_cli.json("lease", "orders", code=1) == []
    orders_cli.run("produce", "orders", "x", "--at", "2999-01-01T00:00:00Z")
    assert orders_cli.out("lease", "orders", code=1) == "nothing is ready; 1 item scheduled for later"


def test_why_ready_items_cannot_be_leased(orders_cli: CommandLine) -> None:
    for value in ("a", "b"):
        orders_cli.run("produce", "orders", value, "--key", "k")
    orders_cli.run("lease", "orders")
    assert orders_cli.out("lease", "orders", code=1) == (
        "nothing can be leased, of 1 ready item: their keys are held (`penstock keys held orders`), "
        "or their partition is paused or failing (`penstock stats orders`)"
    )


def test_tokens_through_a_pipe(four: CommandLine) -> None:
    tokens = four.out("lease", "orders", "10", "--tokens")
    assert len(tokens.split()) == 4
    assert four.json("complete", "-", input=tokens) == {"completed": 4, "lost": []}


def test_retry(four: CommandLine) -> None:
    first, second, *_ = four.out("lease", "orders", "4", "--tokens").split()
    assert four.out("retry", first, "--reason", "card declined") == "1 item retried"
    assert four.out("retry", second, "--delay", "1h", "--uncounted") == "1 item retried"
    by_state = {one["state"]: one for one in four.json("items", "orders")}
    assert by_state["ready"]["attempts"] == 1 and by_state["ready"]["reason"] == "card declined"
    assert by_state["scheduled"]["attempts"] == 0


def test_bury(four: CommandLine) -> None:
    tokens = four.out("lease", "orders", "2", "--tokens").split()
    assert four.json("bury", *tokens, "--reason", "no good") == {"buried": 2, "lost": []}
    assert {one["origin"]["reason"] for one in four.json("dead", "list", "orders")} == {"no good"}


def test_extend(four: CommandLine) -> None:
    (one,) = four.json("lease", "orders", "--lease-timeout", "2s")
    assert four.out("extend", one["token"], "--timeout", "1h") == "1 item extended"
    assert re.search(r"for another (1h|5\dm( \d+s)?)$", four.json("explain", "orders", one["id"])["why"])


def test_a_lease_that_is_lost(four: CommandLine) -> None:
    old, other, *_ = four.out("lease", "orders", "4", "--tokens").split()
    four.run("retry", old)
    (new,) = four.out("lease", "orders", "--tokens").split()
    ran = four.run("complete", old, new, other, "--json", code=7)
    assert ran.out.split() == ["{", '"completed":', "2,", '"lost":', "[", f'"{old}"', "]", "}"]
    assert f"the lease of {old.split('.')[1]}-{old.split('.')[3]} has ended; " in ran.err and ran.err.count("\n") == 1
    assert four.json("stats", "orders")["completed"] == 2


def test_tokens_of_several_queues_and_of_none(four: CommandLine) -> None:
    four.run("produce", "orders.dead", "z")
    (one,) = four.out("lease", "orders.dead", "--tokens").split()
    (two, *_) = four.out("lease", "orders", "--tokens").split()
    gone = "0123456789abcdef" + two[16:]
    assert four.run("complete", one, two, gone, code=7).out == "2 items completed\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["complete"], "no token was given"),
        (["complete", "xyz"], "'xyz' is not a lease token"),
        (["retry", "xyz", "--delay", "x"], "--delay is 'x'"),
        (["lease", "orders", "0"], "count is 0"),
        (["lease", "orders", "many"], "invalid value for 'COUNT': 'many' is no whole number"),
        (["lease", "orders", "--wait", "1d"], "--wait is 86400"),
        (["lease", "orders", "--lease-timeout", "1ms"], "--lease-timeout is 0.001; give 1 to 43200 seconds"),
        (["lease", "orders", "--per-key", "0"], "--per-key is 0"),
        (["extend", "xyz", "--timeout", "1d"], "not a lease token"),
    ],
)
def test_wrong_input_is_one_line(orders_cli: CommandLine, args: list[str], said: str) -> None:
    assert said in orders_cli.refused(*args, input="")
