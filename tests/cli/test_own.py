"""`penstock own`: a process that owns the directory and does nothing else."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from penstock.logs.backends import holder_of
from tests.cli import programs
from tests.cli.conftest import CommandLine


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_owns_the_directory_until_a_signal(orders_cli: CommandLine, number: int) -> None:
    with programs.penstock("own", str(orders_cli.target)) as owner:
        assert owner.line() == f"process {owner.pid} owns {orders_cli.target}"
        orders_cli.run("produce", "orders", "x")
        assert orders_cli.json("stats", "orders")["owner"]["pid"] == owner.pid
        owner.signal(number)
        assert owner.end() == (0, "", "")
    found = orders_cli.json("stats", "orders")
    assert (found["owner"], found["ready"]) == (None, 1)


def test_the_line_as_json(orders_cli: CommandLine) -> None:
    with programs.penstock("own", "--broker", str(orders_cli.target), "--json") as owner:
        found = json.loads(owner.line())
        assert found == {"pid": owner.pid, "host": os.uname().nodename, "directory": str(orders_cli.target)}


@pytest.mark.parametrize("number", [0, signal.SIGKILL], ids=["closed", "killed"])
def test_it_waits_for_the_owner_and_takes_over(orders_cli: CommandLine, number: int) -> None:
    with (
        programs.python(programs.OPEN, orders_cli.target) as first,
        programs.penstock("own", str(orders_cli.target)) as second,
    ):
        said = second.note()
        assert said.startswith(f"penstock: waiting for the owner of {orders_cli.target} (process {first.pid} on ")
        assert [one["pid"] for one in orders_cli.json("stats")["owner"]["clients"]] == [second.pid]
        if number:
            first.signal(number)
        else:
            first.write_line()
        assert second.line() == f"process {second.pid} owns {orders_cli.target}"
        orders_cli.run("produce", "orders", "x")
        found = orders_cli.json("stats")["owner"]
        assert (found["pid"], found["clients"]) == (second.pid, [])
        second.signal(signal.SIGTERM)
        assert second.end()[:2] == (0, "")


def test_a_signal_ends_it_while_it_waits(orders_cli: CommandLine) -> None:
    with programs.python(programs.OPEN, orders_cli.target) as first, programs.penstock("own", str(orders_cli.target)) as second:
        second.note()
        second.signal(signal.SIGTERM)
        assert second.end() == (0, "", "")
        assert orders_cli.json("stats")["owner"]["pid"] == first.pid


def test_it_waits_for_an_owner_that_does_not_share(orders_cli: CommandLine) -> None:
    with (
        programs.python(programs.OPEN_EXCLUSIVELY, orders_cli.target) as first,
        programs.penstock("own", str(orders_cli.target)) as second,
    ):
        said = second.note()
        assert f"process {first.pid} on " in said and "shares it with no other process" in said and said.endswith("; still waiting")
        first.write_line()
        assert second.line() == f"process {second.pid} owns {orders_cli.target}"


def test_a_directory_that_does_not_exist(cli: CommandLine) -> None:
    assert "there is no directory" in cli.refused("own", code=5)
    assert not cli.target.exists()
    with programs.penstock("own", str(cli.target), "--create", "--durability", "os", "--min-free", "1MiB") as owner:
        assert owner.line() == f"process {owner.pid} owns {cli.target}"
        assert cli.out("queue", "create", "orders") == "queue orders has 1 partition"


@pytest.mark.parametrize(
    ("args", "said"), [(["--durability", "maybe"], "durability is 'maybe'; use one of"), (["--min-free", "lots"], "--min-free is 'lots'")]
)
def test_wrong_options(orders_cli: CommandLine, args: list[str], said: str) -> None:
    assert said in orders_cli.refused("own", *args)


def test_own_is_the_way_to_try_again_after_three_unfinished_take_overs(orders_cli: CommandLine) -> None:
    program = [sys.executable, "-c", programs.DIE_IN_TAKE_OVER, str(orders_cli.target)]
    with ExitStack() as stack:
        first = stack.enter_context(programs.python(programs.OPEN, orders_cli.target))
        clients = [stack.enter_context(programs.running(program)) for _ in range(5)]
        assert [client.line() for client in clients] == ["ready"] * 5
        first.signal(signal.SIGKILL)
        with ThreadPoolExecutor(len(clients)) as pool:
            lines = [*pool.map(programs.Program.line, clients)]
        assert lines.count("") == 3
        survivor, said = next((client, line) for client, line in zip(clients, lines, strict=True) if line)
        assert "processes have ended while they opened " in said and f"`penstock own {orders_cli.target}`" in said
        holder = holder_of(str(orders_cli.target))
        assert holder is not None and len(holder.unfinished) - lines.count("") in (0, 1)  # one that then gave up may be counted
        assert orders_cli.json("stats")["owner"] is None

        owner = stack.enter_context(programs.penstock("own", str(orders_cli.target)))
        assert owner.line() == f"process {owner.pid} owns {orders_cli.target}"
        survivor.write_line()
        assert survivor.line() in ("0-0", "1-0")
        found = orders_cli.json("stats", "orders")
        assert (found["owner"]["pid"], found["ready"]) == (owner.pid, 1)
