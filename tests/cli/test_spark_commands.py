"""`penstock spark …` without Spark; tests/spark/test_jobs_cli.py tests the commands with Spark."""

import shlex
from importlib import import_module
from pathlib import Path

import pytest

from penstock.cli import spark
from penstock.cli.command_context import CommandContext
from tests.cli.conftest import CommandLine, CommandResult
from tests.cli.test_usage import process

COMMANDS = {
    ("spark", "load"): ("orders", __file__, "--format", "csv"),
    ("spark", "archive"): ("orders", "lake"),
    ("spark", "report"): ("orders",),
    ("spark", "redrive"): ("orders", "--where", "true"),
}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_without_spark_the_commands_print_what_to_install(orders_cli: CommandLine, words: tuple[str, str]) -> None:
    line = [*words, *COMMANDS[words], "--broker", str(orders_cli.target)]
    ran = process(*line, code="import sys; sys.modules['pyspark'] = sys.modules['pyarrow'] = None")
    assert ran == CommandResult(3, "", "penstock: Spark is not installed (no module pyspark); pip install 'penstock[spark]'\n")


def test_without_spark_other_commands_work(orders_cli: CommandLine) -> None:
    code = "import sys; sys.modules['pyspark'] = sys.modules['pyarrow'] = sys.modules['pandas'] = None"
    ran = process("produce", "orders", "x", "--broker", str(orders_cli.target), code=code)
    assert (ran.code, ran.err) == (0, "")


def test_no_command_line_loads_spark() -> None:
    code = "import atexit, sys; atexit.register(lambda: print({'pyspark', 'pyarrow', 'pandas'} & set(sys.modules)))"
    assert process("spark", "load", "--help", code=code).out.endswith("set()\n")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_broker_that_is_not_there(cli: CommandLine, words: tuple[str, str]) -> None:
    assert "there is no directory" in cli.refused(*words, *COMMANDS[words], code=5)
    assert not cli.target.exists()


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("load orders nope.csv", 5, "there is no 'nope.csv'; fix the path"),
        ("load orders", 2, "missing argument 'SOURCE"),
        ("load orders /dev/null --option sep", 2, "--option is 'sep'; give it as sep=;"),
        ("load orders /dev/null --conf x", 2, "--conf is 'x'; give it as spark.driver.memory=4g"),
        ("archive orders", 2, "missing argument 'DIR'"),
        ("archive orders lake --max-items-per-batch many", 2, "'many' is no whole number"),
        ("redrive orders", 2, "missing option '--where'"),
        ("redrive orders --where true --timeout soon", 2, "--timeout is 'soon'"),
    ],
)
def test_wrong_input_is_one_line(orders_cli: CommandLine, line: str, code: int, said: str) -> None:
    assert said in orders_cli.refused("spark", *shlex.split(line), code=code)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("load nope /dev/null --format csv", 5, "there is no queue 'nope'"),
        ("load orders /dev/null --format xml", 2, "format is 'xml'; use parquet, csv, json"),
        ("load orders /dev/null --load-id ' '", 2, "--load-id is empty"),
        ("load orders /dev/null --order-by 'a sideways'", 2, "orderBy has 'a sideways'"),
        ("load orders /dev/null --master local[x]", 2, "--master is 'local[x]'; give local[*]"),
        ("archive nope lake", 5, "there is no queue 'nope'"),
        ("archive orders lake --table foo", 2, "table 'foo' cannot be archived; use items, events"),
        ("archive orders lake --max-items-per-batch 0", 2, "--max-items-per-batch is 0; give 1 or more"),
        ("archive orders s3a://bucket/lake", 2, "give a directory that every node of Spark sees"),
        ("archive orders lake --master local[0]", 2, "--master is 'local[0]'"),
        ("redrive nope --where true", 5, "there is no queue 'nope'"),
        ("redrive orders --where true --to nope", 5, "there is no queue 'nope'"),
        ("redrive orders --where true --limit -1", 2, "--limit is -1; give a whole number from 1"),
        ("redrive orders --where ' '", 2, "the predicate is empty"),
        ("redrive orders --where true --master somewhere", 2, "--master is 'somewhere'"),
        ("report nope", 5, "there is no queue 'nope'"),
        ("report orders -o /", 2, "--out is '/', a directory"),
        ("report orders -o nowhere/x.html", 2, "there is no directory 'nowhere'"),
        ("report orders --since 2024-02-01 --until 2024-01-01", 2, "--since is not before --until"),
    ],
)
def test_arguments_are_checked_before_spark_is_started(
    orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch, line: str, code: int, said: str
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setattr(import_module("penstock.spark.session"), "session", lambda **_: pytest.fail("Spark was started"))
    monkeypatch.chdir(orders_cli.target.parent)
    assert said in orders_cli.refused("spark", *shlex.split(line), code=code)
    assert not Path("lake").exists()


def test_a_spark_that_does_not_start(orders_cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = pytest.importorskip("pyspark.errors")

    def fail(**_: object) -> None:
        raise errors.PySparkException("no master answers")

    monkeypatch.setattr(import_module("penstock.spark.session"), "session", fail)
    line = ("spark", "archive", "orders", "lake", "--master", "spark://nowhere:1")
    assert "starting Spark failed (no master answers)" in orders_cli.refused(*line, code=6)


@pytest.mark.parametrize(
    "master", ["local", "local[*]", "local[4]", "local[2,4]", "local[*, 3]", "local-cluster[2,1,1024]", "spark://h:7077", "sc://h", "yarn"]
)
def test_valid_masters(master: str) -> None:
    pytest.importorskip("pyspark")
    assert spark.check_spark(master, ["a=b"]) == {"a": "b"}


def test_storage_roots_go_with_the_broker(orders_cli: CommandLine, tmp_path: Path) -> None:
    target = str(orders_cli.target)
    assert spark.broker_option(CommandContext(target)) == target
    assert spark.broker_option(CommandContext(target, ["more"])) == f'["{target}", "more"]'


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    session = CommandContext("x")
    with spark.job_progress_bar(session) as said:
        assert said is None  # stderr is no terminal here
    monkeypatch.setattr(type(session.err), "is_terminal", property(lambda _: True))
    with spark.job_progress_bar(session) as said:
        assert said is not None
        said("loading [x]", 1, 0)
        said("loading [x]", 2, 3)
    with spark.job_progress_bar(CommandContext("x", as_json=True)) as said:
        assert said is None
