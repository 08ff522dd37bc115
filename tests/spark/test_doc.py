"""docs/spark.md matches the code."""

import re
from pathlib import Path
from typing import Any

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


PLACES = ("data/", "checkpoint/", "lake/", "prices/", "work/")


def test_the_examples_run_in_their_order(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one program; the first example twice, as the page says."""
    monkeypatch.chdir(tmp_path)
    page = PAGE
    for place in PLACES:  # the session of the tests was started elsewhere
        page = re.sub(rf"""(["'])(?:{place})\1""", rf"\g<1>{tmp_path}/{place}\1", page)
    quick_start, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    story: dict[str, Any] = {}
    for number in (1, 2):
        exec(quick_start, story)
        told = capsys.readouterr().out
        assert f"{1000 * number} orders wait" in told
        assert f"{1000 * number} orders in the lake" in told
    assert len(others) == 2
    for code in others:
        exec(code, story)
    for view in ("orders", "new_orders"):
        spark.catalog.dropTempView(view)
    told = capsys.readouterr().out
    assert "1980 orders are priced, 21 are buried" in told  # one of them by INSERT INTO
    assert spark.read.parquet(f"{tmp_path}/prices/").where("price > 0").count() == 1980
