"""Every command works alone, beside another process that owns the directory, and on the broker of a server."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer

import penstock
from penstock.cli import reference
from penstock.cli.app import app
from penstock.server.api_keys import KeyFile
from penstock.server.key_ring import KeyRing
from tests.cli import programs
from tests.cli.conftest import CommandLine
from tests.cli.ledgerq_files import LedgerQDirectory, entry
from tests.server.conftest import serve
from tests.worker.harness import wait_until


def leased(terminal: CommandLine, queue: str = "orders") -> str:
    """Lease an item by a command; gives its token."""
    token: str = terminal.json("lease", queue)[0]["token"]
    return token


@contextmanager
def served(cli: CommandLine) -> Iterator[None]:
    """Serve the broker over HTTP, and let commands use it there."""
    with penstock.open(cli.target) as broker, serve(broker.home) as server:
        cli.address = server.url
        yield


@pytest.mark.parametrize("where", ["alone", "beside an owner", "over HTTP"])
def test_every_command(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    penstock.open(cli.target).close()
    (tmp_path / "live_handlers.py").write_text("def handle(item): ...")
    monkeypatch.chdir(tmp_path)
    ledger = LedgerQDirectory(tmp_path / "ledger")
    ledger.add(entry(1, b"from LedgerQ"))
    ledger.read_up_to(0)
    ran: set[str] = {"own", "serve", "backup", "restore"}  # test_own.py, test_serve.py and test_backup_commands.py

    def run(*args: str, code: int = 0) -> str:
        ran.add(args[0])
        ran.add(" ".join(args[:2]))
        return cli.out(*args, code=code)

    around: Any = served(cli) if where == "over HTTP" else nullcontext()
    with programs.python(programs.OPEN, cli.target) if where == "beside an owner" else around as owner:
        run("queue", "create", "orders.dead")
        run("queue", "create", "orders", "--dead-queue", "orders.dead")
        run("queue", "create", "parking", "--on-bury", "park")
        run("queue", "update", "orders", "--ttl", "1h")
        run("queue", "resize", "orders", "2")
        run("queue", "pause", "orders")
        run("queue", "resume", "orders")
        for value in ("one", "two", "three"):
            run("produce", "orders", value, "--key", "a")
        run("extend", leased(cli))
        assert cli.json("stats", "orders")["leased"] == 1
        assert "leased" in run("items", "orders", "--state", "leased")
        assert "one" in run("item", "orders", cli.json("items", "orders")[0]["id"])
        run("explain", "orders", cli.json("items", "orders")[0]["id"])
        assert "leased" in run("keys", "held", "orders")
        assert run("queue", "clear", "orders", "--state", "leased", "--yes") == "1 item cleared"
        token = leased(cli)
        run("retry", token)
        token = leased(cli)
        run("bury", token)
        run("complete", leased(cli))
        ran.add("lease")
        assert "orders" in run("dead", "list", "orders")
        wait_until(lambda: cli.json("stats", "orders.dead")["ready"] == 1)
        assert run("dead", "redrive", "orders.dead", "--to", "orders") == "1 item sent from orders.dead to orders"
        run("produce", "parking", "x", "--key", "b")
        run("bury", leased(cli, "parking"))
        assert run("keys", "release", "parking", "b") == "key released; 1 buried item stays buried"
        keys = (["create", "web", "--scope", "read", "--json"], ["rotate", "web", "--json"], ["revoke", "web"], ["list"])
        for name, *more in keys:
            if where == "over HTTP":
                assert "API keys are managed on the server's machine; run this command there" in cli.refused("keys", name, *more)
                ran.add(f"keys {name}")
            else:
                text = run("keys", name, *more)
        assert where == "over HTTP" or "revoked" in text
        run("import", "ledgerq", str(ledger), "--queue", "orders")
        wait_until(lambda: cli.json("stats", "orders")["ready"] == 2)
        assert run("work", "live_handlers:handle", "-q", "orders", "--until-empty") == "2 done"
        run("queue", "seek", "orders", "0-0")
        run("queue", "compact", "orders")
        assert "orders" in run("queue", "list") and "orders.dead" in run("queue", "info", "orders")
        run("queue", "delete", "parking", "--yes")
        run("queue", "ensure", "later")
        run("produce", "later", "x", "--delay", "1h", "--reference", "r")
        assert "scheduled" in run("find", "later", "--reference", "r")
        assert run("reschedule", "later", "0-0", "--now") == "1 item rescheduled"
        assert run("cancel", "later", "0-0") == "1 item cancelled"
        run("cursor", "create", "later", "audit")
        assert "audit" in run("cursor", "list", "later")
        assert run("cursor", "show", "later", "audit") != run("cursor", "seek", "later", "audit", "newest")
        assert run("cursor", "delete", "later", "audit", "--yes") == "cursor audit deleted"
        run("queue", "read-only", "later", "0")
        run("queue", "delete", "later", "--yes")
        if where == "over HTTP":
            for name in ("verify", "repair"):
                assert "logs are files of the server's machine; run this command there" in cli.refused(name)
                ran.add(name)
        else:
            assert "sound" in run("verify")
        text = run("stats") + run("watch", "--once")
        if where == "over HTTP":
            assert text.count(f"owner  process {os.getpid()} on {os.uname().nodename} since ") == 2
        elif owner is None:
            assert text.count("owner  none: no process has the directory open") == 2
            assert run("repair") == "nothing needs repair"
        else:
            assert text.count(f"owner  process {owner.pid} on {os.uname().nodename} since ") == 2 and "client" not in text
            said = cli.refused("repair", code=4)
            assert said.startswith(f"repair needs the directory alone, and process {owner.pid} on ")
            ran.add("repair")
            owner.write_line()
            assert owner.end() == (0, "", "")
            assert [one["name"] for one in cli.json("queue", "list")] == ["orders", "orders.dead"]
    leaves = {path.removeprefix("penstock ") for path, _ in reference.commands(typer.main.get_command(app))}
    assert {leaf for leaf in leaves if leaf not in ran and not leaf.startswith("spark")} == set()


def test_commands_use_the_key_of_the_environment_and_need_no_more_than_it_allows(cli: CommandLine) -> None:
    with penstock.open(cli.target) as broker:
        broker.create_queue("orders").produce("x")
        key = KeyFile(str(cli.target)).create("looker", ["look"], ["orders"])[1]
        with serve(broker.home, keys=KeyRing(str(cli.target))) as server:
            cli.address = server.url
            assert "no API key" in cli.refused("stats", code=10)
            shown = cli.run("stats", PENSTOCK_API_KEY=key).out
            assert "orders" in shown and "owner  not shown: the API key is for some queues only" in shown
            assert "needs the scope 'produce'" in cli.run("produce", "orders", "x", code=10, PENSTOCK_API_KEY=key).err


@pytest.mark.parametrize("options", [["--ca-file", "x.pem"], ["--cert-file", "x.pem"]])
def test_certificates_are_for_https(cli: CommandLine, options: list[str]) -> None:
    penstock.open(cli.target).close()
    assert "file is for a server, and the target is none" in cli.refused(*options, "queue", "create", "x")
    assert "is for https://, and the address is 'http://127.0.0.1:9'" in cli.refused(*options, "stats", broker="http://127.0.0.1:9")


def test_a_server_that_is_not_there_is_named(cli: CommandLine) -> None:
    said = cli.refused("--owner-timeout", "0", "stats", broker="http://127.0.0.1:9", code=4)
    assert said.startswith("no Penstock server answers at http://127.0.0.1:9 (") and "start it with `penstock serve`" in said
    assert "has its own storage roots" in cli.refused("--root", "more", "stats", broker="http://127.0.0.1:9")


def test_looking_sees_what_the_owner_has_not_published(orders_cli: CommandLine) -> None:
    with orders_cli.open() as broker:
        broker.queue("orders").produce_many(["a", "b"])
    with programs.python(programs.OPEN, orders_cli.target) as owner:
        tokens = orders_cli.out("lease", "orders", "2", "--tokens").split()
        assert orders_cli.json("stats", "orders")["leased"] == 2
        assert [one["state"] for one in orders_cli.json("items", "orders")] == ["leased", "leased"]
        orders_cli.run("complete", *tokens)
        assert orders_cli.json("stats", "orders")["completed"] == 2
        assert orders_cli.json("stats")["owner"]["pid"] == owner.pid


# -- who owns it -------------------------------------------------------------------------------------


def test_stats_and_watch_show_the_owner_and_its_clients(orders_cli: CommandLine) -> None:
    with programs.python(programs.OPEN, orders_cli.target) as owner, programs.python(programs.LEASE, orders_cli.target) as client:
        found = wait_until(lambda: orders_cli.json("stats")["owner"], lambda found: found["clients"][0]["waiting_calls"] == 1)
        assert (found["pid"], found["host"], found["answers"]) == (owner.pid, os.uname().nodename, True)
        assert [(one["pid"], one["name"]) for one in found["clients"]] == [(client.pid, "-c")]
        assert found["since"] <= found["clients"][0]["since"]
        assert orders_cli.json("stats", "orders")["owner"] == orders_cli.json("watch", "--once")["owner"] == found
        for text in (orders_cli.out("stats"), orders_cli.out("stats", "orders"), orders_cli.out("watch", "--once")):
            lines = text.splitlines()
            assert any(line.startswith(f"owner   process {owner.pid} on ") for line in lines)
            (line,) = [line for line in lines if line.startswith("client  ")]
            assert line.startswith(f"client  process {client.pid} (-c) since ") and line.endswith(", 1 call waiting")
        said = orders_cli.refused("repair", code=4)
        assert f"end it and its clients, of which one would take over (process {client.pid} (-c)), repair" in said


def test_watch_follows_the_ownership(orders_cli: CommandLine) -> None:
    with programs.penstock("watch", "--broker", str(orders_cli.target), "--json", "--interval", "100ms") as watch:
        assert json.loads(watch.line())["owner"] is None
        with programs.python(programs.OPEN, orders_cli.target) as owner:
            sample = wait_until(lambda: json.loads(watch.line()), lambda sample: sample["owner"] is not None)
            assert sample["owner"]["pid"] == owner.pid and sample["owner"]["clients"] == []
            owner.signal(signal.SIGKILL)
        wait_until(lambda: json.loads(watch.line()), lambda sample: sample["owner"] is None)
        with programs.python(programs.OPEN, orders_cli.target) as owner:
            wait_until(lambda: json.loads(watch.line()), lambda sample: (sample["owner"] or {}).get("pid") == owner.pid)
            watch.signal(signal.SIGINT)
            assert watch.end()[0] == 130


# -- an owner that does not answer -------------------------------------------------------------------


def test_beside_a_stopped_owner_commands_that_look_read_the_files(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "x")
    with programs.python(programs.OPEN, orders_cli.target) as owner:
        with programs.stopped(owner):
            for args in (["stats"], ["items", "orders"], ["queue", "list"], ["dead", "list"]):
                ran = orders_cli.run("--owner-timeout", "100ms", *args)
                assert f"process {owner.pid} on " in ran.err and "does not answer; this is read from its files" in ran.err
            found = json.loads(orders_cli.run("--owner-timeout", "100ms", "stats", "--json").out)["owner"]
            assert (found["pid"], found["answers"], found["clients"]) == (owner.pid, False, None)
            said = orders_cli.run("--owner-timeout", "100ms", "stats").out
            assert f"owner  process {owner.pid} on " in said and "which does not answer: its clients are not known" in said
        assert orders_cli.json("stats")["owner"]["answers"]


@pytest.mark.parametrize("args", [["produce", "orders", "x"], ["queue", "pause", "orders"], ["lease", "orders"]], ids=" ".join)
def test_beside_a_stopped_owner_commands_that_change_name_it(orders_cli: CommandLine, args: list[str]) -> None:
    with programs.python(programs.OPEN, orders_cli.target) as owner:
        with programs.stopped(owner):
            said = orders_cli.refused("--owner-timeout", "100ms", *args, code=4)
            assert (
                f"(process {owner.pid} on " in said
                and "does not answer; wait longer (penstock --owner-timeout …), or continue that process" in said
            )
            assert f"process {owner.pid} on " in orders_cli.run("--owner-timeout", "100ms", "repair", code=4).err
        orders_cli.run("produce", "orders", "y")


def test_watch_goes_on_when_the_owner_is_stopped(orders_cli: CommandLine) -> None:
    with programs.python(programs.OPEN, orders_cli.target) as owner:
        options = ["--broker", str(orders_cli.target), "--owner-timeout", "100ms"]
        with programs.penstock(*options, "watch", "--json", "--interval", "100ms") as watch:
            assert json.loads(watch.line())["owner"]["answers"]
            with programs.stopped(owner):
                wait_until(lambda: json.loads(watch.line()), lambda sample: not sample["owner"]["answers"])
                assert f"process {owner.pid} on " in watch.note()
            wait_until(lambda: json.loads(watch.line()), lambda sample: sample["owner"]["answers"])


def test_owner_timeout_is_a_duration(orders_cli: CommandLine) -> None:
    assert "--owner-timeout is 'soon'; give seconds" in orders_cli.refused("--owner-timeout", "soon", "stats")


# -- own=False ---------------------------------------------------------------------------------------


def test_a_worker_that_may_not_own(orders_cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "live_handlers.py").write_text("def handle(item): ...")
    monkeypatch.chdir(tmp_path)
    worker = ["work", "live_handlers:handle", "-q", "orders", "--until-empty", "--no-own"]
    said = orders_cli.run("--owner-timeout", "100ms", *worker, code=4).err
    assert "no process has " in said and "may not own it (--no-own); keep it open" in said and f"`penstock own {orders_cli.target}`" in said
    with programs.python(programs.OPEN, orders_cli.target):
        orders_cli.run("produce", "orders", "x")
        assert orders_cli.out(*worker) == "1 done"
