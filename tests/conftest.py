"""Options and hooks of the whole test run.

Owns: the `--seeds` and `--seed` options, the distribution of tests to workers, and the rule that no test is skipped in
CI.
A test that takes an argument named `seeds` gets a range of simulation seeds; each portion is a test case of its own.
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

if "CI" not in os.environ:  # there Hypothesis has such a profile of its own
    settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machine")

# The JVMs of Spark that tests start live for seconds: they compile quickly rather than well, which halves their work.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")

PORTION = 25
"""Seeds per test case: few enough that two workers end at about the same time."""
SPARK = "tests/spark/"
LONG = [
    SPARK,
    "tests/simulation/",
    "tests/crash/",
    "tests/processes/",
    "tests/server/test_campaign.py",
    "tests/server/test_load.py",
    "tests/broker/test_adopting_faults.py",
    "tests/broker/test_fences.py",
]
"""Tests that take seconds each. They start first, so that only short ones are left at the end of the run."""

_skipped: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("penstock")
    group.addoption("--seeds", type=int, default=125, metavar="N", help="simulate with seeds 0 … N-1")
    group.addoption("--seed", type=int, default=None, metavar="N", help="simulate with this seed only: the way to repeat a failure")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        portions = seed_portions(metafunc.config.getoption("--seeds"), metafunc.config.getoption("--seed"))
        metafunc.parametrize("seeds", portions, ids=[f"seeds{portion.start}-{portion.stop - 1}" for portion in portions])


def seed_portions(total: int, only: int | None) -> list[range]:
    if only is not None:
        return [range(only, only + 1)]
    return [range(start, min(start + PORTION, total)) for start in range(0, total, PORTION)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one worker all tests that share a JVM, before all others; every other test goes to any free worker.

    (`--dist=loadgroup` would do the same, but xdist 3.8 loses its groups with pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return SPARK if nodeid.startswith(SPARK) and shares_jvm(config.rootpath / nodeid.split("::")[0]) else nodeid

    return Sharing(config, log) if config.getoption("dist") == "load" else None


@cache
def shares_jvm(module: Path) -> bool:
    """Whether tests of a module take the fixture `spark`, the session that each worker makes once
    (tests/spark/conftest.py)."""
    return re.search(r"\bspark: ", module.read_text("utf-8")) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker, run the long tests first. (xdist moves the largest group, that of Spark, before all others.)"""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((place for place, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test fails the run."""
    if _skipped and os.environ.get("CI") == "true":
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped and os.environ.get("CI") == "true":
        terminalreporter.write_line(f"skipped in CI, which fails the run: {', '.join(_skipped)}", red=True)
