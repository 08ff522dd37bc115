"""docs/spark.md has every argument of every job, with its default."""

import inspect
import re
from pathlib import Path

import msgspec
import pytest

from penstock import spark
from penstock.spark.jobs.archive import ArchiveResult
from penstock.spark.jobs.load import LoadResult
from penstock.spark.jobs.redrive import RedriveResult

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
EVERYWHERE = {"spark", "broker", "queue"}
"""Documented once for all jobs."""


def section(job: str) -> str:
    return PAGE.partition(f"\n### {job}\n")[2].partition("\n#")[0]


@pytest.mark.parametrize("job", ["load", "archive", "report", "redrive"])
def test_the_arguments_of_a_job(job: str) -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section(job), re.MULTILINE))
    real = {name: one for name, one in inspect.signature(getattr(spark, job)).parameters.items() if name not in EVERYWHERE}
    assert list(told) == list(real)
    for name, one in real.items():
        assert (told[name] == "(required)") == (one.default is inspect.Parameter.empty)
        if isinstance(one.default, str | bool | float):
            assert told[name] == (f"{one.default:g}" if type(one.default) is float else str(one.default))


@pytest.mark.parametrize(("job", "answer"), [("load", LoadResult), ("archive", ArchiveResult), ("redrive", RedriveResult)])
def test_what_a_job_gives(job: str, answer: type[msgspec.Struct]) -> None:
    assert f"a `{answer.__name__}`: {', '.join(answer.__struct_fields__)}." in " ".join(section(job).split()).replace("an `", "a `")
