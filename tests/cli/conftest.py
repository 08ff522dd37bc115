"""Runs commands in the process of the tests.

Owns: `CommandLine`, which runs commands on a broker and checks their output.
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
"""A file system in memory, used for the brokers of these tests if it exists, because syncs are faster there."""

_command = typer.main.get_command(app)
typer.testing._get_command = lambda _: _command  # type: ignore[attr-defined, assignment]  # built once, not for every run


class CommandResult(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


class CommandLine:
    """Runs commands on one broker."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.address = ""
        """The address of the broker's server; if it is not empty, commands use it instead of the directory."""

    def run(self, *args: str, code: int = 0, input: str | bytes | None = None, broker: str | None = None, **env: str) -> CommandResult:
        """Run a command that must end with this code."""
        target = self.address or str(self.target) if broker is None else broker
        found = CliRunner().invoke(app, list(args), input=input, env={"PENSTOCK_BROKER": target, **env}, prog_name="penstock")
        ran = CommandResult(found.exit_code, found.stdout, found.stderr)
        assert "Traceback" not in ran.err, ran.err
        assert ran.code == code, ran
        return ran

    def out(self, *args: str, code: int = 0, input: str | bytes | None = None) -> str:
        """The output of a command that must print nothing to stderr."""
        ran = self.run(*args, code=code, input=input)
        assert ran.err == ""
        return ran.out.rstrip("\n")

    def json(self, *args: str, code: int = 0, input: str | bytes | None = None) -> Any:
        """The JSON document that a command prints."""
        return json.loads(self.run(*args, "--json", code=code, input=input).out)

    def refused(self, *args: str, code: int = 2, input: str | bytes | None = None, broker: str | None = None) -> str:
        """The error of a command that must print one line, "what is wrong; what to do", and no answer."""
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
        """The broker without threads; at the end all turns are run, so that transfers have arrived."""
        with penstock.open(self.target, threaded=False) as broker:
            yield broker
            run_all_turns(broker)

    def files(self) -> dict[str, bytes]:
        """The content of every file of the broker."""
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
    """A broker with the queue orders and its dead queue."""
    with cli.open() as broker:
        broker.create_queue("orders.dead")
        broker.create_queue("orders", partitions=2, dead_queue="orders.dead", max_attempts=2)
    return cli
