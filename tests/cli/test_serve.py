"""`penstock serve`: what it refuses, and --check. (tests/server/test_serve.py starts servers.)"""

from contextlib import closing
from pathlib import Path

import pytest

import penstock
from penstock.server.bind_addresses import listen
from tests.cli.conftest import CommandLine

# -- refused -----------------------------------------------------------------------------------------


def test_without_keys_it_refuses_to_listen_beyond_this_machine(orders_cli: CommandLine) -> None:
    said = orders_cli.refused("serve", "--bind", "0.0.0.0:0")
    assert said.startswith("0.0.0.0:0 can be reached from other machines, and there is no API key; create one with `penstock keys create`")


def test_an_address_in_use_is_told_before_the_directory_is_opened(orders_cli: CommandLine) -> None:
    with closing(listen("127.0.0.1", 0)) as taken, penstock.open(orders_cli.target, exclusive=True):
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert orders_cli.refused("serve", "--bind", address, code=9).startswith(f"cannot listen on {address} (Address already in use)")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--bind", "here"], "bind: 'here' is no address to listen on"),
        (["--set", "limits.connections=lots"], "--set limits.connections is 'lots'; give a whole number"),
        (["--set", "nonsense=1"], "--set nonsense: nonsense is unknown; use bind, "),
        (["--set", "nonsense"], "--set is 'nonsense'; give it as NAME=VALUE"),
        (["--drain-timeout", "soon"], "--drain-timeout is 'soon'; give seconds"),
        (["--durability", "maybe"], "--durability is 'maybe'; use fsync, interval, os"),
        (["--min-free", "lots"], "--min-free is 'lots'; give bytes"),
        (["--config", "/nowhere.toml"], "/nowhere.toml cannot be read"),
        (["--tls-key", "x"], "tls.cert is missing"),
        (["--tls-cert", "/nowhere.pem"], "the certificate '/nowhere.pem' cannot be used (no such file or directory)"),
        (["--audit-file", "/nowhere/audit.log", "--bind", "127.0.0.1:0"], "the audit log /nowhere/audit.log cannot be opened"),
    ],
)
def test_wrong_options(orders_cli: CommandLine, args: list[str], said: str) -> None:
    assert orders_cli.refused("serve", *args).startswith(said)


def test_a_server_that_cannot_say_that_it_is_ready_ends(orders_cli: CommandLine) -> None:
    said = orders_cli.run("serve", "--bind", "127.0.0.1:0", "--ready-file", "/nowhere/ready", code=2).err
    assert "penstock: the ready file /nowhere/ready cannot be written (No such file or directory); fix the path\n" in said
    assert orders_cli.json("stats")["owner"] is None


def test_a_server_serves_a_directory(cli: CommandLine) -> None:
    assert "a server opens a directory of its own machine" in cli.refused("serve", broker="http://127.0.0.1:1")
    advice = "fix the path, or create a broker there: penstock serve --create"
    assert f"there is no directory {str(cli.target)!r}; {advice}" in cli.refused("serve", code=5)
    Path(cli.target).write_text("")
    for option in ("--create", "--check"):
        assert f"{cli.target} is a file; give a directory" in cli.refused("serve", option)


# -- --check -----------------------------------------------------------------------------------------


def write_config(folder: Path, text: str) -> str:
    path = folder / "penstock.toml"
    path.write_text(text)
    return str(path)


def test_check_says_what_differs_and_changes_nothing(orders_cli: CommandLine, tmp_path: Path) -> None:
    config = write_config(tmp_path, "[queues.orders]\npartitions = 4\nresize = true\nmax_attempts = 3\n[queues.mail]\n")
    before = orders_cli.files()
    assert orders_cli.run("serve", "--check", "--config", config, code=1).out.splitlines() == [
        "queue orders: max_attempts 2 → 3",
        "queue orders: 2 partitions → 4",
        "queue mail: is created, with 1 partition",
    ]
    assert orders_cli.files() == before
    assert orders_cli.json("serve", "--check", "--config", config, code=1)["differences"][1] == {
        "queue": "orders",
        "change": "resize",
        "text": "queue orders: 2 partitions → 4",
    }


def test_check_without_differences(orders_cli: CommandLine, tmp_path: Path) -> None:
    config = write_config(tmp_path, '[queues.orders]\npartitions = 2\ndead_queue = "orders.dead"\n')
    assert orders_cli.out("serve", "--check", "--config", config) == "nothing differs"
    assert orders_cli.json("serve", "--check", "--config", config) == {"problems": [], "differences": []}


def test_check_says_everything_that_is_wrong(orders_cli: CommandLine, tmp_path: Path) -> None:
    wrong = write_config(tmp_path, 'bnid = 1\n[queues.orders]\npartitions = "x"\n')
    assert len(orders_cli.json("serve", "--check", "--config", wrong, code=2)["problems"]) == 2
    wrong = write_config(tmp_path, 'bind = ["0.0.0.0:0"]\n[tls]\ncert = "nowhere.pem"\n[queues.orders]\ndead_queue = "orders"\n')
    found = orders_cli.json("serve", "--check", "--config", wrong, code=2)["problems"]
    assert [problem.split(" ")[0] for problem in found] == ["the", "0.0.0.0:0", "queues.orders:"]


def test_check_of_a_directory_that_does_not_exist(cli: CommandLine, tmp_path: Path) -> None:
    config = write_config(tmp_path, "[queues.orders]\n")
    assert "there is no directory" in cli.refused("serve", "--check", "--config", config, code=5)
    assert cli.out("serve", "--check", "--create", "--config", config, code=1).splitlines() == [
        f"directory {cli.target}: is created",
        "queue orders: is created, with 1 partition",
    ]
    assert not cli.target.exists()
