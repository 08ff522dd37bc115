"""What the documents say is what the code does."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import penstock
from penstock.api.options import QueueOptions
from penstock.logs import columns
from penstock.rules.item_states import diagram
from penstock.rules.records import FenceSpec, LaneTake, LineTake, StateRecord
from penstock.words.limits import Policy
from penstock.words.logs import LINE_FIELDS

ROOT = Path(__file__).parent.parent
README_SAYS = [
    "customer-42 has to wait",
    "customer-43 {'buy': 2}",
    "1 ready, 1 scheduled",
    "{'pay': 1} waits: its key is held: item 0-0 backs off",
]
EXAMPLES_SAY = {
    "07_nightly_pipeline.py": [
        "load: 400 orders, 1 malformed line set aside",
        "work: 360 completed, 40 buried",
        "archive: 400 orders",
        r"\|order … is above the limit of …\|40 +\|20 +\|",
        "redrive: 20 orders; 380 completed, 20 buried",
        r"\| *completed\| +3[678]\d\|",  # the last windows may be open
        "report: 380 completed, 40 buried",
    ]
}
"""Lines that the output of an example must have, as regular expressions."""
FORMAT = (ROOT / "docs" / "format.md").read_text()


def test_the_table_of_records_is_that_of_the_code() -> None:
    told = re.findall(r"^\| (\d+) \| (\w+) \| ([a-z_, ]+) \|$", FORMAT, re.MULTILINE)
    real = [(str(kind.__struct_config__.tag), kind.__name__, ", ".join(kind.__struct_fields__)) for kind in get_args(StateRecord)]
    assert told == sorted(real, key=lambda row: int(row[0]))
    for kind in (LaneTake, LineTake, FenceSpec, Policy):
        assert f"`[{', '.join(kind.__struct_fields__)}]`" in FORMAT, kind.__name__


def test_the_table_of_columns_is_that_of_the_code() -> None:
    told = {name: 1 << int(bit) for bit, name in re.findall(r"^\| (\d+) \| (\w+) \| (?:bitmap|as kind|n ×|u32)", FORMAT, re.MULTILINE)}
    assert told == {name: columns.BITS[name] for name in told}
    assert sum(told.values()) == columns.KNOWN


def test_the_diagram_is_that_of_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in (ROOT / "docs" / "architecture.md").read_text()


def test_the_example_of_the_readme_runs_and_says_what_it_says(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == README_SAYS


def test_the_first_example_is_that_of_the_readme() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples" / "01_first_steps.py").read_text() == code


def test_the_web_recipes_are_files() -> None:
    page = (ROOT / "docs" / "web-apps.md").read_text()
    told = re.findall(r"^`(examples/web/[\w./]+)`:\n\n```python\n(.*?)```$", page, re.DOTALL | re.MULTILINE)
    assert len(told) == page.count("```python")
    assert [name for name, code in told if (ROOT / name).read_text() != code] == []
    assert {name for name, _ in told} >= {f"examples/web/{path.name}" for path in (ROOT / "examples" / "web").glob("*.py")}


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "adr").glob("*.md")), ids=lambda path: path.stem[:4])
def test_a_decision_has_a_number_a_status_and_a_date(path: Path) -> None:
    title, _, status = path.read_text().splitlines()[:3]
    assert title.startswith(f"# {int(path.stem[:4])}. ")
    assert re.fullmatch(r"\*\*Status:\*\* (accepted|superseded)[^*]*\. \*\*Date:\*\* \d{4}-\d{2}-\d{2}\.", status), status


@pytest.mark.parametrize("name", ["spark", "testing", "errors"])
def test_a_part_of_the_package_is_an_attribute_of_it(name: str) -> None:
    code = f"import sys, penstock; assert 'penstock.{name}' not in sys.modules; penstock.{name}.__all__"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    assert [line for line in EXAMPLES_SAY.get(path.name, []) if not re.search(f"^{line}$", ran.stdout, re.MULTILINE)] == []
    assert len(path.read_text().splitlines()) <= 70


def test_the_hop_lists_are_those_of_today() -> None:
    ran = subprocess.run([sys.executable, "scripts/hops.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_no_document_promises_more_than_there_is() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`((?:src|docs|tests|benchmarks|examples)/[\w./-]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_the_api_page_names_what_there_is() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    owners = {
        "broker": penstock.Broker,
        "queue": penstock.Queue,
        "lease": penstock.Lease,
        "batch": penstock.LeaseBatch,
        "cursor": penstock.Cursor,
    }
    told = re.findall(r"`(broker|queue|lease|batch|cursor)\.(\w+)", page)
    assert len(told) > 40
    assert [f"{owner}.{name}" for owner, name in told if not hasattr(owners[owner], name)] == []
    public = {name for name in dir(penstock.Queue) if not name.startswith("_")}
    assert public - {name for owner, name in told if owner == "queue"} <= {"name"}
    for name in QueueOptions.__annotations__:
        assert f"`{name}`" in page, name


def test_the_examples_of_the_api_page_run(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    assert examples
    for code in examples:
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_the_example_of_the_page_about_traces_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "traces.md").read_text()
    (code,), (said,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "text"))
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout == said


def test_the_page_about_traces_names_every_attribute() -> None:
    told = set(re.findall(r"^\| `((?:messaging|error)\.[\w.]+)` \|", (ROOT / "docs" / "traces.md").read_text(), re.MULTILINE))
    source = (ROOT / "src" / "penstock" / "api" / "spans.py").read_text()
    assert told == set(re.findall(r'"((?:messaging|error)\.[\w.]+)"', source))


def test_the_page_for_operators_names_every_field_of_a_log_line() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page[page.index("## Logs") : page.index("## Space")]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(LINE_FIELDS)
