"""The campaign of kills: its check can fail, its plan is what it says, and a small one passes.

`make test-spark-kills` runs a long one.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.spark.campaign import SparkCampaign, run_spark_campaign
from tests.spark.campaign_check import Row, find_problems
from tests.spark.kill_points import DIRECTIONS, DRIVER_STEPS, KINDS, WORKER, WORKER_STEPS

SOURCE = [Row(key, number) for number in (1, 2, 3) for key in ("a", "b")]


def problems(found: list[Row]) -> list[str]:
    return find_problems(SOURCE, {"sink": found}, ordered=["sink"])


def test_the_same_rows_are_no_problem() -> None:
    assert problems(SOURCE) == []
    assert problems(sorted(SOURCE)) == []  # keys may come in any order


def test_the_check_finds_what_is_wrong() -> None:
    assert problems(SOURCE[:-1]) == ["sink: 1 rows are missing, such as b 3"]
    assert problems([*SOURCE, Row("b", 3)]) == ["sink: 1 rows are there more than once, such as b 3"]
    assert problems([*SOURCE, Row("c", 1)]) == ["sink: 1 rows are not from the source, such as c 1"]
    assert problems([*SOURCE[2:], *SOURCE[:2]]) == [
        "sink: key a is out of order: row 1 comes after row 3",
        "sink: key b is out of order: row 1 comes after row 3",
    ]
    assert find_problems(SOURCE, {"queue": SOURCE[::-1]}, ordered=["sink"]) == []


def test_a_plan_has_the_wanted_number_of_kills_of_each_kind(tmp_path: Path) -> None:
    plan = SparkCampaign(tmp_path / "one", 3, 60).plan
    counts = Counter((order.kind, order.direction) for order in plan)
    assert sum(count for (kind, _), count in counts.items() if kind != WORKER) == 60 * (len(KINDS) - 1)
    assert [counts[WORKER, direction] for direction in DIRECTIONS] == [60, 60, 60]
    assert {(order.direction, order.step) for order in plan if order.step} == {
        (direction, step) for direction in DIRECTIONS for step in WORKER_STEPS[direction] + DRIVER_STEPS[direction]
    }
    assert plan == SparkCampaign(tmp_path / "again", 3, 60).plan != SparkCampaign(tmp_path / "other", 4, 60).plan


@pytest.mark.long
def test_sinks_equal_the_source_after_kills_of_every_kind(tmp_path: Path) -> None:
    problems, done = run_spark_campaign(tmp_path / "campaign", 11, 2)
    assert problems == [], done
