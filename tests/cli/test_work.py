"""`penstock work module:function`: a worker from the command line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import pytest

from penstock.cli.failures import CommandFailed
from penstock.cli.work import import_function
from tests.cli.conftest import CommandLine

PATIENCE = 60.0
"""Seconds after which a waiting test fails."""

HANDLERS = """
import pathlib

def handle(item):
    print("handled", item.value)

def fail(item):
    raise ValueError("no \\x1b[31m card")

async def later(item, context):
    context.progress(0.5)

def many(items):
    print(len(items), "at once")

def slow(item):
    with open("go") as gate:
        print("began", flush=True)
        gate.read()

class Shop:
    @staticmethod
    def handle(item): ...

number = 17
"""


@pytest.fixture
def handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a module of handlers."""
    (tmp_path / "shop_handlers.py").write_text(HANDLERS)
    (tmp_path / "shop_broken.py").write_text("1 / 0")
    (tmp_path / "shop_needy.py").write_text("import nothing_of_that_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("shop_handlers", "shop_broken", "shop_needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_work_until_nothing_is_left(orders_cli: CommandLine, handlers: Path) -> None:
    orders_cli.run("produce", "orders", "--lines", input="a\nb\nc\n")
    orders_cli.run("produce", "orders.dead", "d")
    ran = orders_cli.run("work", "shop_handlers:handle", "--queue", "orders=3", "-q", "orders.dead", "--until-empty", "-c", "2")
    *handled, answer = ran.out.splitlines()
    assert sorted(handled) == ["handled a", "handled b", "handled c", "handled d"] and answer == "4 done"
    assert [one["depth"] for one in orders_cli.json("stats")["queues"]] == [0, 0]


def test_work_until_no_item_comes(orders_cli: CommandLine, handlers: Path) -> None:
    orders_cli.run("produce", "orders", "later", "--at", "2099-01-31T08:00:00Z")
    orders_cli.run("produce", "orders", "now")
    ran = orders_cli.run("work", "shop_handlers:handle", "-q", "orders", "--until-idle", "100ms")
    assert ran.out.splitlines() == ["handled now", "1 done"]


def test_the_answer_as_json_is_alone_on_stdout(orders_cli: CommandLine, handlers: Path, capfd: pytest.CaptureFixture[str]) -> None:
    orders_cli.run("produce", "orders", "--lines", input="a\nb\nc\n")
    found = orders_cli.json("work", "shop_handlers:handle", "-q", "orders", "--until-empty", "--name", "me")
    assert found["handled"] == 3 and found["failed"] == 0
    assert orders_cli.json("work", "shop_handlers:later", "-q", "orders", "--until-empty")["handled"] == 0


def test_async_batch_and_process_handlers(orders_cli: CommandLine, handlers: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for target, *options in (
        ["shop_handlers:later", "-c", "3"],
        ["shop_handlers:many", "--batch", "10"],
        ["shop_handlers:Shop.handle", "--processes", "1"],
    ):
        orders_cli.run("produce", "orders", "--lines", input="a\nb\nc\n")
        assert orders_cli.json("work", target, "-q", "orders", "--until-empty", *options)["handled"] == 3


def test_failed_items_are_retried_and_buried(orders_cli: CommandLine, handlers: Path) -> None:
    orders_cli.run("produce", "orders", "x")
    found = orders_cli.json("work", "shop_handlers:fail", "-q", "orders", "--until-empty", "--retry-delay", "1ms")
    assert found["handled"] == 0 and found["failed"] == 2
    (letter,) = orders_cli.json("dead", "list", "orders")
    assert letter["origin"]["attempts"] == 2 and "ValueError: no " in letter["origin"]["reason"]


@contextmanager
def penstock(handlers: Path, broker: CommandLine, *args: str) -> "Iterator[subprocess.Popen[str]]":
    """Run a command in a new process, which is killed at the end of the block."""
    command = [sys.executable, "-m", "penstock.cli", *args]
    environment = {**os.environ, "PENSTOCK_BROKER": str(broker.target)}
    with subprocess.Popen(command, cwd=handlers, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watchdog = Timer(PATIENCE, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


@contextmanager
def held_back(handlers: Path) -> "Iterator[Callable[[], None]]":
    """Gives a function; the handler `slow` does not end before it is called."""
    os.mkfifo(handlers / "go")
    handle = os.open(handlers / "go", os.O_RDWR)  # read and write: opening does not wait for the other end
    try:
        yield lambda: os.close(handle)
    except BaseException:
        with suppress(OSError):
            os.close(handle)
        raise


def test_each_failure_is_one_line(orders_cli: CommandLine, handlers: Path) -> None:
    orders_cli.run("produce", "orders", "x")
    with penstock(handlers, orders_cli, "work", "shop_handlers:fail", "-q", "orders", "--until-empty", "--retry-delay", "1ms") as process:
        out, err = process.communicate()
    assert process.returncode == 0
    assert out in ("2 retried\n", "1 retried, 1 buried\n")
    first, second, third = sorted(err.splitlines(), key=lambda line: ("buried" in line, line))
    assert first.startswith("penstock: item ") and r"ValueError: no \x1b[31m card" in first
    assert "attempt 2" in second and "was buried: attempts spent" in third


def test_output_of_child_processes_is_not_in_the_document(orders_cli: CommandLine, handlers: Path) -> None:
    orders_cli.run("produce", "orders", "a")
    with penstock(
        handlers, orders_cli, "work", "shop_handlers:handle", "-q", "orders", "--processes", "1", "--until-empty", "--json"
    ) as process:
        out, err = process.communicate()
    assert json.loads(out)["handled"] == 1 and err == "handled a\n"


def test_a_signal_lets_it_drain(orders_cli: CommandLine, handlers: Path) -> None:
    orders_cli.run("produce", "orders", "x")
    with held_back(handlers) as go_on, penstock(handlers, orders_cli, "work", "shop_handlers:slow", "-q", "orders") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        process.send_signal(signal.SIGTERM)
        go_on()
        out, err = process.communicate()
    said = "penstock: draining: 1 item is being handled; Ctrl-C again ends at once\n"
    assert (process.returncode, out, err) == (0, "1 done\n", said)
    assert orders_cli.json("stats", "orders")["completed"] == 1


def test_a_second_signal_ends_it_with_items_unfinished(orders_cli: CommandLine, handlers: Path) -> None:
    orders_cli.run("produce", "orders", "x")
    with held_back(handlers) as go_on, penstock(handlers, orders_cli, "work", "shop_handlers:slow", "-q", "orders") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "began\n"
        process.send_signal(signal.SIGTERM)
        assert "draining" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
        go_on()
    assert (process.returncode, err) == (
        1,
        "penstock: ended at once: 1 item not finished, to be handled again when the leases are over\n",
    )


def test_a_running_worker_owns_the_directory_and_other_commands_work(orders_cli: CommandLine, handlers: Path) -> None:
    orders_cli.run("produce", "orders", "x")
    with held_back(handlers) as go_on, penstock(handlers, orders_cli, "work", "shop_handlers:slow", "-q", "orders", "--json") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "began\n"
        assert orders_cli.json("stats", "orders")["owner"]["pid"] == process.pid
        orders_cli.run("produce", "orders.dead", "y")
        assert [(one["leased"], one["ready"]) for one in orders_cli.json("stats")["queues"]] == [(1, 0), (0, 1)]
        process.send_signal(signal.SIGINT)
        go_on()
        out, _ = process.communicate()
    assert process.returncode == 0 and json.loads(out)["handled"] == 1


# -- wrong input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("shop_handlers", 2, "give it as module:function"),
        ("shop_handlers:", 2, "give it as module:function"),
        (":handle", 2, "give it as module:function"),
        ("shop_nothing:handle", 5, "there is no module 'shop_nothing' here"),
        ("shop_handlers.inner:handle", 5, "there is no module 'shop_handlers.inner'"),
        ("shop_handlers:nothing", 5, "module 'shop_handlers' has no 'nothing'"),
        ("shop_handlers:handle.nothing", 5, "has no 'handle.nothing'"),
        ("shop_handlers:number", 2, "is int; name a function"),
        ("shop_broken:handle", 2, "module 'shop_broken' cannot be imported: ZeroDivisionError"),
        ("shop_needy:handle", 5, "cannot be imported: there is no module 'nothing_of_that_name'; install it"),
    ],
)
def test_unknown_functions(orders_cli: CommandLine, handlers: Path, target: str, code: int, said: str) -> None:
    assert said in orders_cli.refused("work", target, "-q", "orders", code=code)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        ([], 2, "missing option '--queue'"),
        (["-q", "nope"], 5, "there is no queue 'nope'"),
        (["-q", "orders=0"], 2, "--queue is 'orders=0'"),
        (["-q", "orders", "-q", "orders=2"], 2, "give each queue once"),
        (["-q", "orders", "-c", "0"], 2, "--concurrency is 0"),
        (["-q", "orders", "-c", "4", "--processes", "2"], 2, "leave concurrency out"),
        (["-q", "orders", "--rate", "0"], 2, "the rate is 0"),
        (["-q", "orders", "--handler-timeout", "x"], 2, "--handler-timeout is 'x'"),
        (["-q", "orders", "--retry-delay", "-1"], 2, "--retry-delay is '-1'"),
    ],
)
def test_wrong_options(orders_cli: CommandLine, handlers: Path, args: list[str], code: int, said: str) -> None:
    assert said in orders_cli.refused("work", "shop_handlers:handle", *args, code=code)


def test_a_worker_is_no_function(handlers: Path) -> None:
    made = "worker = Worker(penstock.open('memory://').create_queue('q'))"
    (handlers / "shop_worker.py").write_text(f"import penstock\nfrom penstock.worker.worker import Worker\n{made}\n")
    with pytest.raises(CommandFailed, match="is Worker; name a function"):
        import_function("shop_worker:worker")
