"""Rules for every command: errors are one line, exit codes, output streams, and the documentation is up to date."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import penstock
from penstock.cli import command_tree, failures, queues, reference
from penstock.cli.app import app
from penstock.cli.failures import EXIT_CODES, exit_code_of
from tests.cli.conftest import CommandLine, CommandResult

ROOT = Path(__file__).parent.parent.parent
LEAVES = dict(reference.commands(typer.main.get_command(app)))
CHANGING = [
    "queue create x", "queue update orders --ttl 1h", "queue delete orders --yes", "queue resize orders 3", "queue pause orders",
    "queue resume orders", "queue clear orders --yes", "queue seek orders 0-0", "queue compact orders", "produce orders x", "lease orders",
    "complete 0123456789abcdef.0.90000000001.0", "retry 0123456789abcdef.0.90000000001.0", "bury 0123456789abcdef.0.90000000001.0",
    "extend 0123456789abcdef.0.90000000001.0", "keys release orders a", "dead redrive orders.dead --to orders", "repair",
    "work os.path:exists -q orders", "serve --bind 127.0.0.1:0",
]  # fmt: skip


def process(*args: str, code: str = "", **options: object) -> CommandResult:
    """Run a command in a new process."""
    command = [sys.executable, "-c", f"{code}\nfrom penstock.cli.main import main; main()", *args]
    environment = {**os.environ, "PENSTOCK_BROKER": "", **(options.pop("env", {}))}  # type: ignore[dict-item]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, **options)  # type: ignore[call-overload]
    return CommandResult(found.returncode, found.stdout, found.stderr)


# -- every command -----------------------------------------------------------------------------------


def test_every_command_has_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for path in LEAVES:
        words = path.split()[1:]
        assert ", ".join(f'"{word}"' for word in words) in tests, f"{path} is not tried"


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_has_help_and_the_common_options(cli: CommandLine, path: str) -> None:
    text = cli.out(*path.split()[1:], "--help")
    assert text.startswith(f"Usage: {path} ")
    for option in ("--broker", "--json", "--help"):
        assert option in text
    assert cli.out(*path.split()[1:], "-h") == text


@pytest.mark.parametrize("path", sorted({*LEAVES} - {"penstock backup", "penstock restore"}))  # they name directories
def test_every_command_needs_a_broker(cli: CommandLine, path: str) -> None:
    words = path.split()[1:]
    arguments = [one for one in LEAVES[path].params if one.required]
    given = [
        text
        for one in arguments
        for text in ([one.opts[0], "x"] if one.opts[0].startswith("-") else [{"PARTITIONS": "1", "PARTITION": "1"}.get(one.metavar, "1-1")])
    ]
    given = ["os.path:exists", *given[1:]] if words == ["work"] else given
    extra = {"queue update": ["--ttl", "1h"], "queue seek": ["0-0"], "produce": ["x"], "reschedule": ["--now"]}.get(" ".join(words), [])
    tokens = ["0123456789abcdef.0.90000000001.0"] if words[0] in ("complete", "retry", "bury", "extend") else []
    if words == ["import", "ledgerq"]:
        cli.target.mkdir()
        (cli.target / f"{0:020d}.log").write_bytes(b"")
        given[0] = str(cli.target)
    said = cli.refused(*words, *given, *extra, *tokens, broker="", input="")
    assert said == "no broker is named; give its directory or address with --broker, or set PENSTOCK_BROKER"


@pytest.mark.parametrize("line", CHANGING)
def test_changing_commands_fail_beside_an_owner_that_does_not_share(orders_cli: CommandLine, line: str) -> None:
    with penstock.open(orders_cli.target, exclusive=True):
        before = orders_cli.files()
        said = orders_cli.refused(*shlex.split(line), code=4, input="")
        assert f"process {os.getpid()} on " in said if line == "repair" else "shares it with no other process" in said
        assert orders_cli.files() == before


@pytest.mark.parametrize("line", [line for line in CHANGING if not line.startswith("queue create")])
def test_only_create_makes_a_directory(cli: CommandLine, line: str) -> None:
    assert "there is no directory" in cli.refused(*shlex.split(line), code=5, input="")
    assert not cli.target.exists()


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("nonsense", 2, "no such command 'nonsense'"),
        ("queue nonsense", 2, "no such command 'nonsense'"),
        ("queue create", 2, "missing argument 'NAME'; see penstock queue create --help"),
        ("queue create a b", 2, "unexpected extra argument"),
        ("queue create ../evil", 2, "is no name for a queue"),
        ("queue create -x", 2, "no such option: -x"),
        ("queue create a --partitions 0", 2, "partitions is 0; give a whole number from 1 to 1024"),
        ("queue create a --partitions many", 2, "invalid value for '--partitions': 'many' is no whole number"),
        ("queue create a --ttl forever", 2, "--ttl is 'forever'; give seconds"),
        ("queue create a --lease-timeout 13h", 2, "--lease-timeout is 46800"),
        ("queue create a --max-bytes lots", 2, "--max-bytes is 'lots'; give bytes"),
        ("queue create a --on-bury explode", 2, "--on-bury is 'explode'; use 'release' or 'park'"),
        ("queue create a --dead-queue a", 2, "cannot be its own dead queue"),
        ("queue create a --dead-queue nope", 5, "nope"),
        ("queue create a --dead-queue orders", 2, "has a dead queue of its own"),
        ("queue create a --durability maybe", 2, "--durability is 'maybe'"),
        ("queue create a --max-attempts -1", 2, "--max-attempts is -1"),
        ("queue update orders --retention-max-segments -1", 2, "--retention-max-segments is -1; give"),
        ("queue update orders --retention-max-age 9999999w", 2, "--retention-max-age is 6047999395200"),
        ("queue create a --retention-max-bytes 9999999TiB", 2, "--retention-max-bytes is 10995"),
        ("queue create a --max-bytes 9999999999TiB", 2, "--max-bytes is 10995"),
        ("queue info nope", 5, "there is no queue 'nope'"),
        ("queue delete nope --yes", 5, "there is no queue 'nope'"),
        ("queue update nope --ttl 1h", 5, "there is no queue 'nope'"),
        ("queue update orders", 2, "there is nothing to change"),
        ("queue update orders --dead-queue a --no-dead-queue", 2, "were both given"),
        ("queue update orders --dead-queue ''", 2, "--dead-queue is empty"),
        ("queue resize orders", 2, "missing argument 'PARTITIONS'"),
        ("queue resize orders 0", 2, "partitions is 0"),
        ("queue resize orders x", 2, "'x' is no whole number"),
        ("queue pause orders --only sometimes", 2, "--only is 'sometimes'; use lease, produce, both"),
        ("queue seek orders x", 2, "is not the id of an item"),
        ("queue seek orders --at yesterday", 2, "--at is 'yesterday'; give a time"),
        ("queue compact orders --partition 7", 2, "has no partition 7"),
        ("queue delete orders --yes --timeout soon", 2, "--timeout is 'soon'"),
        ("stats nope", 5, "there is no queue 'nope'"),
        ("items orders --state lost", 2, "there is no state 'lost'"),
        ("items orders --after x", 2, "is not the id of an item"),
        ("items orders --limit 0", 2, "--limit is 0"),
        ("items", 2, "missing argument 'QUEUE'"),
        ("keys held nope", 5, "there is no queue 'nope'"),
        ("keys release orders", 2, "missing argument 'KEY'"),
        ("dead list nope", 5, "there is no queue 'nope'"),
        ("dead redrive orders --to orders --where colour=x", 2, "reason, state, origin_queue or headers.NAME"),
        ("find orders", 2, "give one of them, or list the items: penstock items"),
        ("--root nowhere/at/all stats", 2, "nowhere"),
    ],
)
def test_wrong_input_is_one_line(orders_cli: CommandLine, line: str, code: int, said: str) -> None:
    before = [orders_cli.json("queue", "list"), [one["produced"] for one in orders_cli.json("stats")["queues"]]]
    assert said in orders_cli.refused(*shlex.split(line), code=code, input="")
    assert [orders_cli.json("queue", "list"), [one["produced"] for one in orders_cli.json("stats")["queues"]]] == before


@pytest.mark.parametrize("line", ["../evil", "a --ttl x", "a --lease-timeout 1ms", "a --partitions 0", "a --on-bury x", "a --dead-queue b"])
def test_a_refused_queue_makes_no_directory(cli: CommandLine, line: str) -> None:
    cli.refused("queue", "create", *line.split(), code=5 if "dead" in line else 2)
    assert not cli.target.exists()


# -- brokers -----------------------------------------------------------------------------------------


def test_the_broker_option_before_or_after_the_command(orders_cli: CommandLine) -> None:
    target = str(orders_cli.target)
    for args in (["--broker", target, "queue", "list"], ["queue", "list", "--broker", target], ["queue", "list", "-b", target]):
        assert "orders.dead" in orders_cli.run(*args, broker="elsewhere").out
    assert "orders.dead" in orders_cli.run("--broker", "elsewhere", "queue", "list", "--broker", target, broker="").out
    assert json.loads(orders_cli.run("--json", "queue", "list").out) == orders_cli.json("queue", "list")


def test_a_tilde_in_the_broker_path_is_the_home_directory(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(orders_cli.target.parent))
    target = f"~/{orders_cli.target.name}"
    for args in (["queue", "list"], ["stats"], ["verify"], ["produce", "orders", "x"]):
        orders_cli.run(*args, broker=target)


@pytest.mark.parametrize(
    ("broker", "code", "said"),
    [
        ("memory://", 2, "ends with the process that opened it"),
        ("gopher://localhost:2319", 2, "cannot be opened"),
        ("/etc/passwd", 2, "is a file; give a directory"),
    ],
)
def test_paths_that_are_no_brokers(cli: CommandLine, broker: str, code: int, said: str) -> None:
    assert said in cli.refused("queue", "list", broker=broker, code=code)
    assert said in cli.refused("queue", "create", "x", broker=broker, code=code)


@pytest.mark.parametrize("line", ["queue list", "stats", "item q 0-0", "verify", "own"])
def test_a_directory_of_another_program_holds_no_broker(cli: CommandLine, tmp_path: Path, line: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    said = cli.refused(*line.split(), broker=str(tmp_path), code=5)
    assert said == f"{str(tmp_path)!r} holds no broker; fix the path"
    assert "is not a Penstock directory and not empty" in cli.refused("queue", "create", "x", broker=str(tmp_path))


def test_further_storage_roots(cli: CommandLine, tmp_path: Path) -> None:
    more = str(tmp_path / "more")
    with penstock.open(cli.target, roots=[more]) as broker:
        broker.create_queue("wide", partitions=4).produce_many([penstock.NewItem(b"x", key=str(number)) for number in range(50)])
    assert any(Path(more).rglob("*.log"))
    assert json.loads(cli.run("--root", more, "stats", "wide", "--json").out)["ready"] == 50
    assert json.loads(cli.run("--root", more, "lease", "wide", "100", "--json").out)
    assert "sound" in cli.run("--root", more, "verify").out


# -- exit codes and errors ---------------------------------------------------------------------------


def test_every_error_has_a_documented_exit_code() -> None:
    kinds = [getattr(penstock.errors, name) for name in penstock.errors.__all__ if name != "PenstockError"]
    assert all(exit_code_of(kind("what; do")) in set(EXIT_CODES) - {failures.INTERNAL_ERROR, failures.OK} for kind in kinds)
    assert exit_code_of(RuntimeError()) == failures.INTERNAL_ERROR


def test_an_unexpected_error_is_one_line(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(queues, "all_queues", broken)
    said = orders_cli.refused("queue", "list", code=70)
    assert said.startswith("unexpected RuntimeError: two lines; this is a bug in Penstock")
    monkeypatch.setenv(command_tree.DEBUG, "1")
    with pytest.raises(AssertionError, match="Traceback"):
        orders_cli.run("queue", "list", code=70)


def test_ctrl_c_is_quiet(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(queues, "all_queues", interrupted)
    assert orders_cli.run("queue", "list", code=130) == CommandResult(130, "", "")


def test_confirmation(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    ran = orders_cli.run("queue", "delete", "orders", input="n\n", code=1)
    assert "This deletes queue orders with 0 unresolved items. Continue?" in ran.err and "nothing was changed" in ran.err
    assert orders_cli.run("queue", "delete", "orders", input="y\n").out.endswith("queue orders deleted\n")


@pytest.mark.parametrize("command", ["delete", "clear"])
def test_no_process_owns_the_directory_while_the_user_is_asked(
    orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def confirm(*_: object, **options: object) -> bool:
        penstock.open(orders_cli.target, exclusive=True).close()
        return True

    monkeypatch.setattr("typer.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    monkeypatch.setattr(typer, "confirm", confirm)
    orders_cli.run("queue", command, "orders")


def test_missing_packages_are_named() -> None:
    for missing in ("typer", "rich"):
        ran = process("queue", "list", code=f"import sys; sys.modules['{missing}'] = None")
        assert ran == CommandResult(
            3, "", f"penstock: the command line needs {missing}, which is not installed; pip install 'penstock[cli]'\n"
        )


def test_a_closed_pipe(orders_cli: CommandLine) -> None:
    orders_cli.run("produce", "orders", "--lines", input="x\n" * 3000)
    command = f"{sys.executable} -m penstock.cli items orders --limit 3000 | head -1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PENSTOCK_BROKER": str(orders_cli.target), "PYTHONUNBUFFERED": ""}
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert (found.returncode, found.stderr) == (141, "") and found.stdout.startswith("ID")


def test_help_and_version(cli: CommandLine) -> None:
    assert cli.out("--version") == f"penstock {penstock.__version__}"
    assert "Commands:" in cli.out("--help")
    as_module = subprocess.run([sys.executable, "-m", "penstock", "--version"], capture_output=True, text=True, check=True)
    assert as_module.stdout == f"penstock {penstock.__version__}\n"
    for args in ([], ["queue"], ["dead"], ["keys"], ["import"]):
        ran = cli.run(*args, code=2)
        assert ran.out == "" and ran.err.startswith("Usage: penstock") and ran.err.count("Usage:") == 1


# -- completion --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock que", {"queue"}),
        ("penstock queue re", {"read-only", "resize", "resume"}),
        ("penstock stats or", {"orders", "orders.dead"}),
        ("penstock work a:b --queue orders.", {"orders.dead"}),
        ("penstock produce orders --key-f", {"--key-field"}),
        ("penstock stats --broker nowhere or", set()),
    ],
)
def test_completion(orders_cli: CommandLine, line: str, expected: set[str]) -> None:
    ran = orders_cli.run(_PENSTOCK_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(line.split()) - 1))
    assert ran.err == "" and set(ran.out.split()) == expected


def test_completion_can_be_installed() -> None:
    ran = process("--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert ran.code == 0 and "complete -o default -F _penstock_completion penstock" in ran.out


# -- documents ---------------------------------------------------------------------------------------


def test_the_document_has_every_command_and_exit_code(tmp_path: Path) -> None:
    document = ROOT / "docs" / "cli.md"
    copy = tmp_path / "cli.md"
    copy.write_text(document.read_text())
    reference.write(copy)
    assert copy.read_text() == document.read_text(), "run python -m penstock.cli.reference docs/cli.md"
    for path in LEAVES:
        assert f"\n### `{path}" in document.read_text()


def test_the_commands_in_the_document_are_commands(orders_cli: CommandLine) -> None:
    lines = [line.partition(" | ")[0] for line in (ROOT / "docs" / "cli.md").read_text().splitlines() if line.startswith("$ penstock ")]
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line.removeprefix("$ penstock "))
        path = next(path for path in LEAVES if words[: len(path.split()) - 1] == path.split()[1:])
        options = {option for one in LEAVES[path].params for option in one.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
