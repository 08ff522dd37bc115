"""docs/spark.md matches the code."""

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock.spark
from penstock.api import arrow
from penstock.spark import options
from penstock.spark.queue_tables import TABLES
from penstock.spark.source import spark_schema
from penstock.tables import schemas

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table after a text."""
    table = PAGE.partition(heading)[2].partition("|---")[2].partition("\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_every_option_is_there_and_no_other() -> None:
    assert sorted(row[0] for row in rows("## Options")) == sorted(f"`{option.name}`" for option in options.OPTIONS)


@pytest.mark.parametrize("name", list(schemas.TABLES))
def test_the_columns_of_a_table_are_those_of_the_code(name: str) -> None:
    schema = spark_schema(TABLES[name])
    real = [(field.name, field.dataType.simpleString()) for field in schema if name != "dead" or field.name not in schemas.ITEMS.names]
    assert [(row[0], row[1]) for row in rows(f"**{name}**")] == real


def test_the_columns_that_can_be_written_are_those_of_the_code() -> None:
    assert [name for row in rows("## Writing") for name in row[0].split(", ")] == list(arrow.COLUMNS)


def test_functions_named_in_the_page_exist() -> None:
    told = set(re.findall(r"`?\bspark\.(\w+)\(", PAGE)) - {"read", "readStream"}
    assert told <= set(penstock.spark.__all__)
    assert {"load", "archive", "report", "redrive", "settle", "write", "session", "register", "slot"} <= told


def test_the_quick_start_runs(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = re.findall(r"```python\n(import penstock.*?)```", PAGE, re.DOTALL)[0]
    for place in ("data/", "checkpoint/", "lake/"):  # the session of the tests was started elsewhere
        code = code.replace(f'"{place}"', repr(f"{tmp_path}/{place}"))
    for round in (1, 2):
        exec(code, {})
        told = capsys.readouterr().out
        assert f"{1000 * round} orders wait" in told
        assert f"{1000 * round} orders in the lake" in told
