"""Checks of the source: which layer may import which, where time and random numbers come from, how long a file may be.

When a test fails, change the source, not the list, unless an ADR says otherwise.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "penstock"
LAYERS = ["words", "rules", "logs", "loop", "operations", "tables", "wire", "broker", "api", "worker", "server", "edges"]
EDGES = {"cli", "spark"}
"""Folders that together are the topmost layer."""
OPERATIONS = {"operations", "reports"}
"""Modules directly in the package that form a layer: the operations of a broker and their answers."""
FRONT = len(LAYERS)
"""The height of all other modules directly in the package: they may import every layer, and no layer imports them."""

PURE = {
    *("__future__", "abc", "array", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq"),
    *("itertools", "math", "operator", "penstock", "struct", "types", "typing", "msgspec", "xxhash"),
}
"""Modules that rules may import: none of them waits, reads a clock, draws random numbers or uses files."""

CLOCK_AND_CHANCE = {"time", "random", "secrets", "uuid"}
MAX_LINES = 650
PACKAGE_HOSTS = re.compile(r"https?://[A-Za-z0-9.-]*(pypi|pythonhosted|npmjs|debian|crates|conda)\.")


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    return {name_of(path): ast.parse(path.read_text("utf-8"), str(path)) for path in sorted(SOURCE.rglob("*.py"))}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(module: str) -> Iterator[str]:
    """What a module imports, as dotted names: for `from a.b import c` that is a.b.c when it is a module, else a.b."""
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: a relative import; name the module in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in sources() else str(node.module)


def own_imports(module: str) -> list[str]:
    return [name for name in imports(module) if name.split(".")[0] == "penstock"]


def folder(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else ""


def height(module: str) -> int:
    if module.removeprefix("penstock.") in OPERATIONS:
        return LAYERS.index("operations")
    return LAYERS.index("edges" if folder(module) in EDGES else folder(module)) if folder(module) else FRONT


def modules_outside_testing() -> list[str]:
    return [module for module in sources() if folder(module) != "testing"]


def test_every_folder_is_a_layer() -> None:
    assert {folder(module) for module in sources()} <= {"", "testing", *LAYERS, *EDGES}


def test_imports_go_downward() -> None:
    upward = [
        f"{module} imports {name}" for module in modules_outside_testing() for name in own_imports(module)
        if folder(name) != "testing" and height(name) > height(module)
    ]  # fmt: skip
    assert upward == []


def test_nothing_imports_testing() -> None:
    """Only the top-level module may, which has it as an attribute."""
    found = {module for module in modules_outside_testing() for name in own_imports(module) if folder(name) == "testing"}
    assert found <= {"penstock"}


DISCOVERED = ROOT / "src" / "pyspark_penstock"
"""The package that Spark imports when it looks for data sources."""


def test_the_wheel_holds_the_package_and_what_spark_looks_for() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/penstock", "src/pyspark_penstock"]}
    assert {path.name for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists()} == {"penstock", DISCOVERED.name}
    beside = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"src"}
    assert [f"{module} imports {name}" for module in sources() for name in imports(module) if name.split(".")[0] in beside] == []


def test_what_spark_looks_for_imports_nothing_of_the_package_until_it_is_used() -> None:
    """Spark imports it also in programs that use another source."""
    [path] = DISCOVERED.rglob("*.py")
    tree = ast.parse(path.read_text("utf-8"))
    at_once = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    assert {*imported(at_once)} == {"collections.abc", "typing", "pyspark.sql.datasource"}
    assert {name for name in imported(tree) if name.split(".")[0] == "penstock"} == {"penstock.spark.source"}


def test_the_simulation_imports_only_the_package_and_what_that_needs() -> None:
    allowed = {"penstock", "simulation", "msgspec", *sys.stdlib_module_names}
    paths = list((ROOT / "simulation").rglob("*.py"))
    assert paths
    found = [(path.name, name) for path in paths for name in imported(ast.parse(path.read_text("utf-8")))]
    assert [f"{path} imports {name}" for path, name in found if name.split(".")[0] not in allowed] == []


def imported(tree: ast.Module) -> Iterator[str]:
    """The imported modules, as they are written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def test_no_import_cycle() -> None:
    graph = {module: {name for name in own_imports(module) if name != module} for module in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' → '.join(error.args[1])}")


OF_FILES = {
    "penstock.cli.repair",
    "penstock.server.api_keys",
    "penstock.spark.part_files",
    "penstock.spark.jobs.archive",
    "penstock.spark.jobs.manifest",
    "penstock.spark.scratch",
}
"""Modules above logs/ that may use files: the commands that verify and repair them, the API keys (which commands and
servers change without the owner of the broker), Spark's scratch files and archives."""


def test_nothing_above_logs_imports_the_file_backend() -> None:
    """logs/backends.py chooses the store; everything above works on any store."""
    above = [module for module in modules_outside_testing() if folder(module) not in ("logs", "rules", "words") and module not in OF_FILES]
    assert [f"{module} imports {name}" for module in above for name in own_imports(module) if name.startswith("penstock.logs.files")] == []


def test_no_edge_imports_the_inside_of_a_home() -> None:
    """The API, workers, commands and Spark use operations only, not the code that answers them."""
    behind = ("penstock.broker.changes", "penstock.broker.queries", "penstock.broker.inbox", "penstock.loop.loop", "penstock.loop.turn")
    edges = [module for module in modules_outside_testing() if folder(module) in ("api", "worker", "cli", "spark")]
    assert [f"{module} imports {name}" for module in edges for name in own_imports(module) if name in behind] == []


def test_rules_import_nothing_that_can_block() -> None:
    assert [f"{m} imports {n}" for m in sources() if folder(m) == "rules" for n in imports(m) if n.split(".")[0] not in PURE] == []


def test_time_and_chance_are_passed_in() -> None:
    allowed = {"penstock.words.clock"}
    taken = [
        f"{module} imports {name}" for module in modules_outside_testing() for name in imports(module)
        if name.split(".")[0] in CLOCK_AND_CHANCE and module not in allowed
    ]  # fmt: skip
    assert taken == []
    assert [f"{module}, line {line}" for module in sources() for line in lines_asking_the_date(module)] == []


def lines_asking_the_date(module: str) -> Iterator[int]:
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(("datetime.now", "datetime.utcnow", "date.today")):
            yield node.lineno


def test_no_file_is_too_long() -> None:
    paths = [path for top in ("src", "simulation", "tests") for path in (ROOT / top).rglob("*.py")]
    long = [f"{path.relative_to(ROOT)}: split it where its data splits" for path in paths if len(path.read_text().splitlines()) > MAX_LINES]
    assert long == []


def test_every_module_has_a_docstring() -> None:
    silent = [module for module, tree in sources().items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


def test_a_class_name_has_one_meaning() -> None:
    """A class name exists once in the package; the two APIs count as one, because one is generated from the other."""
    modules = [module for module in sources() if not module.startswith("penstock.api._async")]
    names = [node.name for module in modules for node in ast.walk(sources()[module]) if isinstance(node, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == set()


GLOSSARY_CLASSES = {
    "api._sync.broker": {"Broker"},
    "api._sync.cursor": {"Cursor"},
    "api._sync.lease": {"Lease"},
    "api._sync.queue": {"Queue"},
    "api.items": {"Item"},
    "broker.snapshot": {"Snapshot"},
    "logs.files.segment": {"Segment"},
    "logs.files.sidefiles": {"Checkpoint", "SyncedPosition"},
    "logs.log": {"Frame", "Gap", "Log"},
    "logs.store": {"Inbox", "Store"},
    "loop.catalog": {"Catalog"},
    "loop.partition": {"Partition"},
    "loop.requests": {"PendingRequests", "Request"},
    "operations": {"Home", "Operation", "Query"},
    "rules.commands": {"Call", "Drop", "Redrive", "Seek"},
    "rules.fences": {"Fence"},
    "rules.keys": {"KeyLine"},
    "rules.lanes": {"Extent"},
    "rules.records": {"Lost", "PassedOver"},
    "rules.summary": {"Summary"},
    "server.api_keys": {"ApiKey"},
    "spark.consuming_reader": {"Heartbeat"},
    "words.batch": {"Batch"},
    "words.origin": {"Origin"},
    "worker.fetcher": {"Fetcher"},
    "worker.handlers": {"Handler"},
    "worker.outcomes": {"Bury", "Outcome"},
    "worker.settler": {"Settler"},
}
"""The classes that are named by a word of the glossary, and mean what the glossary says."""


def test_a_class_named_by_a_glossary_word_means_what_the_glossary_says() -> None:
    """A new class of such a name must be entered above; read the glossary first."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.MULTILINE)
    words = {word.strip() for row in rows for word in row.split(",")}
    names = {"".join(part.capitalize() for part in re.split(r"[ -]", word)) for word in words}
    found: dict[str, set[str]] = {}
    for module, tree in sources().items():
        for node in tree.body if not module.startswith("penstock.api._async") else []:
            if isinstance(node, ast.ClassDef) and node.name in names:
                found.setdefault(module.removeprefix("penstock."), set()).add(node.name)
    assert found == GLOSSARY_CLASSES


SAME_SUBJECT = {
    *("__main__", "api_keys", "backup", "catalog", "clock", "dead", "errors", "events", "inbox", "items", "lease"),
    *("leases", "metrics", "options", "produce", "recovery", "redrive", "repair", "resize", "restore", "retention"),
    *("routing", "settle", "state", "stats"),
}
"""Names that modules of several layers have because they are about the same thing."""


def test_modules_of_one_name_are_about_the_same_thing() -> None:
    """A module name that exists twice must be entered above; if the two mean different things, rename one of them."""
    names = [module.rpartition(".")[2] for module in sources() if "api._sync" not in module and folder(module) != module.rpartition(".")[2]]
    assert {name for name in names if names.count(name) > 1} == SAME_SUBJECT


def test_no_module_is_a_gerund() -> None:
    gerunds = {module.rpartition(".")[2] for module in sources() if module.endswith("ing")}
    assert gerunds <= {"testing", "routing", "staging", "row_mapping", "key_ring"}  # nouns


def test_no_file_names_a_package_host() -> None:
    assert [path.name for path in files_under_version_control() if PACKAGE_HOSTS.search(path.read_text("utf-8", "replace"))] == []


def files_under_version_control() -> list[Path]:
    """Tracked files, and untracked ones that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).is_file()]
