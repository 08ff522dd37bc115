"""The command line as a person or a script uses it, in this process.

Owns: `CommandLine`, which runs commands on a broker of its own and looks at what they print.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import typer.testing
from typer.testing import CliRunner

import penstock
from penstock.cli.app import app
from tests.api.both_apis import run_all_turns

MEMORY = "/dev/shm"
"""Where there is a file system in memory, brokers of these tests lie there: syncing is not what they are about."""

_command = typer.main.get_command(app)
typer.testing._get_command = lambda _: _command  # type: ignore[attr-defined, assignment]  # not built anew for every run


class CommandResult(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


class CommandLine:
    """Runs commands on one broker. Whatever ends badly must say so in one line."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def run(self, *args: str, code: int = 0, input: str | bytes | None = None, broker: str | None = None, **env: str) -> CommandResult:
        """Run a command that must end with this code."""
        target = str(self.target) if broker is None else broker
        found = CliRunner().invoke(app, list(args), input=input, env={"PENSTOCK_BROKER": target, **env}, prog_name="penstock")
        ran = CommandResult(found.exit_code, found.stdout, found.stderr)
        assert "Traceback" not in ran.err, ran.err
        assert ran.code == code, ran
        return ran

    def out(self, *args: str, code: int = 0, input: str | bytes | None = None) -> str:
        """What it prints; nothing else is said."""
        ran = self.run(*args, code=code, input=input)
        assert ran.err == ""
        return ran.out.rstrip("\n")

    def json(self, *args: str, code: int = 0, input: str | bytes | None = None) -> Any:
        """The one document it prints."""
        return json.loads(self.run(*args, "--json", code=code, input=input).out)

    def refused(self, *args: str, code: int = 2, input: str | bytes | None = None, broker: str | None = None) -> str:
        """The one line it says instead of an answer: what is wrong; what to do."""
        ran = self.run(*args, code=code, input=input, broker=broker)
        assert ran.out == ""
        assert ran.err.count("\n") == 1, ran.err
        assert ran.err.startswith("penstock: ")
        assert "; " in ran.err
        return ran.err.removeprefix("penstock: ").rstrip("\n")

    def open(self) -> penstock.Broker:
        return penstock.open(self.target)

    @contextmanager
    def open_unthreaded(self) -> Iterator[penstock.Broker]:
        """The broker, in which nothing happens by itself; at the end all that was sent has arrived."""
        with penstock.open(self.target, threaded=False) as broker:
            yield broker
            run_all_turns(broker)

    def files(self) -> dict[str, bytes]:
        """Every file of the broker."""
        return {str(path.relative_to(self.target)): path.read_bytes() for path in sorted(self.target.rglob("*")) if path.is_file()}


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[CommandLine]:
    if not os.access(MEMORY, os.W_OK):
        yield CommandLine(tmp_path / "data")
        return
    with TemporaryDirectory(dir=MEMORY, prefix="penstock-") as place:
        yield CommandLine(Path(place) / "data")


@pytest.fixture
def orders_cli(cli: CommandLine) -> CommandLine:
    """A broker with orders, and a dead queue for them."""
    with cli.open() as broker:
        broker.create_queue("orders.dead")
        broker.create_queue("orders", partitions=2, dead_queue="orders.dead", max_attempts=2)
    return cli
