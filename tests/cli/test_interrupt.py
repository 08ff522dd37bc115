"""Ctrl-C in a terminal: what the terminal echoes does not run into what the command says."""

import json
from pathlib import Path

import pytest

import penstock
from tests.cli.conftest import CommandLine
from tests.cli.terminals import Terminal, terminal
from tests.worker.harness import wait_until

HANDLERS = """
import time

def handle(item):
    print("handling", item.value, flush=True)
    time.sleep(60 if item.value == "long" else 0.5)
"""


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory of commands, with a module of handlers."""
    (tmp_path / "slow_shop.py").write_text(HANDLERS)
    monkeypatch.chdir(tmp_path)


def last_line(one: Terminal) -> str:
    """The last line on the screen; the cursor must be at the beginning of the next one."""
    *_, last, cursor = one.lines()
    assert cursor == "", one.screen
    return last


@pytest.mark.long
@pytest.mark.usefixtures("handlers")
def test_a_worker_says_that_it_drains(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "short")
    with terminal("-b", str(orders_cli.target), "work", "slow_shop:handle", "-q", "orders") as one:
        one.wait_for("handling short")
        one.interrupt()
        one.wait_for("draining: 1 item is being handled; Ctrl-C again ends at once")
        assert one.end() == 0
        assert last_line(one) == "1 done"
        assert "penstock: draining: 1 item is being handled; Ctrl-C again ends at once" in one.lines()


@pytest.mark.usefixtures("handlers")
def test_a_second_interrupt_ends_a_worker_at_once(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "long")
    with terminal("-b", str(orders_cli.target), "work", "slow_shop:handle", "-q", "orders", "--log-format", "json") as one:
        one.wait_for("handling long")
        one.interrupt()
        one.wait_for("draining: 1 item")
        one.interrupt()
        assert one.end() == 1
        *said, answer, _ = [line for line in one.lines() if line != "^C"]  # the terminal echoes when it has time
        drains, ended = (json.loads(line)["message"] for line in said[-2:])
        assert "draining: 1 item is being handled" in drains
        assert "ended at once: 1 item not finished" in ended
        assert answer == "nothing was done"


def test_a_server_says_that_it_drains(orders_cli: CommandLine) -> None:
    with terminal("serve", str(orders_cli.target), "--bind", "127.0.0.1:0") as one:
        one.wait_for("serving")
        one.interrupt()
        assert one.end() == 0
        found = one.lines()
        drains = "penstock: draining: 0 requests, 0 waiting leases; a second signal (Ctrl-C) ends at once"
        assert found[found.index("^C") :] == ["^C", drains, f"penstock: {orders_cli.target} is closed", "penstock: closed", ""]


def test_an_owner_ends(orders_cli: CommandLine) -> None:
    with terminal("own", str(orders_cli.target), "--log-level", "info") as one:
        one.wait_for(f"owns {orders_cli.target}")
        one.interrupt()
        assert one.end() == 0
        assert one.lines()[-3:] == ["^C", f"penstock: {orders_cli.target} is closed", ""]


@pytest.mark.long
def test_commands_that_wait_end_with_a_line_of_their_own(orders_cli: CommandLine) -> None:
    """A lease that waits, input from the terminal, statistics that are drawn again and again, a question."""
    at = ["-b", str(orders_cli.target)]
    with penstock.open(orders_cli.target) as broker:
        waiting = broker.queue("orders")
        with terminal(*at, "lease", "orders", "--wait", "60") as one:
            wait_until(lambda: waiting.stats().waiting_consumers)
            one.interrupt()
            assert (one.end(), one.lines()) == (130, ["^C", ""])
    with terminal(*at, "produce", "orders", "-", "--lines") as one:
        one.wait_for("producing")
        one.type("first\n")
        one.wait_for("6/?")
        one.interrupt()
        assert one.end() == 130
        assert last_line(one).startswith("penstock: stopped; ")
    with terminal(*at, "watch") as one:
        one.wait_for("Ctrl-C ends")
        one.interrupt()
        assert one.end() == 130
        assert "^C" not in "".join(one.lines()) and last_line(one)
    with terminal(*at, "queue", "delete", "orders") as one:
        one.wait_for("[y/N]")
        one.interrupt()
        assert one.end() == 130
        assert last_line(one).endswith("^C")
