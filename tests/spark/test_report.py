"""The report as a whole, where little is there, where something is missing or wrong, and as a command."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import penstock
from penstock.cli.app import app
from penstock.errors import InvalidRequest, QueueNotFound
from penstock.spark.jobs import charts, event_durations
from penstock.spark.jobs.findings import NONE, findings
from penstock.spark.jobs.report import report
from penstock.spark.jobs.report_metrics import Percentiles
from penstock.testing.clock import MicrosecondClock
from penstock.words.clock import SECOND
from penstock.words.values import timestamp
from tests.broker.directory_broker import DirectoryBroker, fill
from tests.spark.expected_report import DEAD, QUEUE, ExpectedReport, ReportedQueue, spread
from tests.spark.test_report_page import CheckedPage

EVENTS = "event string, partition int, offset long, at timestamp, attempt int, reason string, lease string, sequence long"
START = 1_767_225_600


# -- little ------------------------------------------------------------------------------------------


def test_report_of_an_empty_queue(spark: SparkSession, tmp_path: Path) -> None:
    """An existing page is replaced."""
    (tmp_path / "report.html").write_text("old")
    said: list[tuple[str, int, int]] = []
    with penstock.open(tmp_path / "broker") as broker:
        broker.create_queue("orders", partitions=3)
        figures = report(spark, tmp_path / "broker", "orders", tmp_path / "report.html", progress=lambda *one: said.append(one))
    assert (figures.produced, figures.items, figures.states, figures.dead_letters, figures.buckets) == (0, 0, {}, 0, [])
    assert [one.items for one in figures.partitions] == [0, 0, 0]
    assert figures.imbalance == 1
    text = "".join(CheckedPage((tmp_path / "report.html").read_text("utf-8")).texts)
    assert "The log of this queue has no events." in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broker", "report.html"]
    assert [(done, total) for _, done, total in said] == [(number, len(said)) for number in range(len(said))]


def test_report_of_one_event(spark: SparkSession, tmp_path: Path) -> None:
    clock = MicrosecondClock()
    with penstock.open(tmp_path / "broker", clock=clock, threaded=False) as broker:
        broker.create_queue("orders").produce(b"x")
        clock.advance(5 * SECOND)
        figures = report(spark, tmp_path / "broker", "orders", tmp_path / "report.html", clock=clock)
    assert (figures.produced, figures.leased, figures.states) == (1, 0, {"ready": 1})
    assert figures.age == Percentiles(1, 5.0, 5.0, 5.0, 5.0)
    assert len(figures.buckets) == 1
    assert findings(figures) == [NONE]
    CheckedPage((tmp_path / "report.html").read_text("utf-8"))


def test_report_of_a_time_without_events(spark: SparkSession, tmp_path: Path) -> None:
    with penstock.open(tmp_path / "broker") as broker:
        fill(broker.create_queue("orders"), 3)
        until = datetime(2020, 1, 1, tzinfo=UTC)
        figures = report(spark, tmp_path / "broker", "orders", tmp_path / "report.html", until=until)
    assert (figures.produced, figures.items, figures.hot_keys) == (0, 0, [])
    assert figures.ready == 3  # which is now
    assert "asked for: until 2020-01-01 00:00:00" in (tmp_path / "report.html").read_text("utf-8")


def test_report_after_retention_removed_events(spark: SparkSession, tmp_path: Path) -> None:
    """Waits whose beginning was removed are not measured."""
    yard = DirectoryBroker(tmp_path / "broker")
    yard.broker.close()
    yard.broker = penstock.open(yard.path, clock=yard.clock, threaded=False, segment_bytes=4_000, compression=False)
    yard.broker.create_queue(DEAD)
    queue = yard.broker.create_queue(QUEUE, retention={"max_segments": 1, "min_segments": 1}, priority_aging=None)
    fill(queue, 10, priority=9)
    for lease in queue.lease(10):
        yard.clock.advance(SECOND)
        lease.retry(reason="later")  # so that its item outlives what the log told of that
    for _ in range(20):
        fill(queue, 30)
        for lease in queue.lease(30):
            yard.clock.advance(SECOND)
            lease.complete()
        yard.run_and_publish()
        queue.compact()
    queue.lease(40)
    yard.run_and_publish()
    figures = report(spark, yard.path, "orders", tmp_path / "report.html", clock=yard.clock)
    oracle = ExpectedReport(ReportedQueue(yard, {}))
    assert figures.produced == oracle.count("produced", "scheduled") < 610
    assert figures.items_before_log == oracle.items_before_log() == 610 - figures.produced
    assert figures.leased == oracle.count("leased")
    assert figures.waiting == spread(micros for _, micros in oracle.waits)
    assert figures.leases_without_wait == oracle.leases_without_wait == 10
    assert figures.handling == spread(micros for *_, micros in oracle.handlings)
    assert any("Retention has removed the first events" in one for one in findings(figures))
    CheckedPage((tmp_path / "report.html").read_text("utf-8"))
    yard.broker.close()


# -- times, by hand ----------------------------------------------------------------------------------


def made(spark: SparkSession, *rows: tuple[Any, ...]) -> Any:
    """Events of one item: (event, seconds, attempt, reason, lease, sequence)."""
    events = [
        (event, 0, 7, timestamp((START + at) * SECOND), attempt, reason, lease, seq) for event, at, attempt, reason, lease, seq in rows
    ]
    return event_durations.report_events(spark.createDataFrame(events, EVENTS))


def test_one_frame_may_end_an_attempt_and_begin_the_next(spark: SparkSession) -> None:
    events = made(
        spark,
        ("leased", 5, 2, None, "b", 3),  # rows of a frame come in any order
        ("retried", 5, 1, "busy", "a", 3),
        ("produced", 0, 0, None, None, 1),
        ("leased", 2, 1, None, "a", 2),
        ("completed", 9, 2, None, "b", 4),
    )
    assert sorted(row.micros for row in event_durations.waits(events).collect()) == [0, 2 * SECOND]
    assert sorted(row.micros for row in event_durations.attempts(events).collect()) == [3 * SECOND, 4 * SECOND]


def test_a_wait_that_began_in_what_retention_took_is_not_known(spark: SparkSession) -> None:
    events = made(
        spark,
        ("produced", 0, 0, None, None, 1),
        ("leased", 9, 3, None, "c", 40),
        ("completed", 11, 3, None, "c", 41),
    )
    assert [row.micros for row in event_durations.waits(events).collect()] == [None]
    assert [row.micros for row in event_durations.attempts(events).collect()] == [2 * SECOND]
    lonely = made(spark, ("leased", 9, 1, None, "c", 40), ("completed", 11, 1, None, "d", 41))
    assert [row.micros for row in event_durations.waits(lonely).collect()] == [None]
    assert event_durations.attempts(lonely).collect() == []


def test_a_clock_that_was_set_back_gives_no_negative_times(spark: SparkSession) -> None:
    events = made(
        spark,
        ("produced", 50, 0, None, None, 1),
        ("leased", 20, 1, None, "a", 2),
        ("extended", 21, 1, None, "a", 3),
        ("completed", 10, 1, None, "a", 4),
    )
    assert [row.micros for row in event_durations.waits(events).collect()] == [0]
    assert [row.micros for row in event_durations.attempts(events).collect()] == [0]


def test_reasons_that_differ_in_numbers_are_one(spark: SparkSession) -> None:
    classes = {
        "HTTP 503 for order 7": "HTTP … for order …",
        "no 6ba7b810-9dad-11d1-80b4-00c04fd430c8 here\nTraceback": "no … here",
        "at 0x7f5": "at …",
        "digest deadbeef00deadbeef, commit 83a5b8e": "digest …, commit …",
        "ConnectionError: bank 10.0.0.3:443 does not answer": "ConnectionError: bank … does not answer",
        "Timeout after 1.5e-3 ms, 12ms or 1,250 s": "Timeout after … ms, …ms or … s",
        "late since 2026-01-31T10:05:00.123Z": "late since …",
        "charge ch_9fK2xQ of customer-42, customer7": "charge ch_… of customer-…, customer…",
        "items 0-17, 0-18 and [1, 2, 3], -5": "items … and […], …",
        "a decade of facades": "a decade of facades",
        "KeyError: 'name'": "KeyError: 'name'",
        "x" * 300: "x" * 159 + "…",
        "": "",
    }
    rows = spark.createDataFrame([(one,) for one in classes], "reason string")
    found = rows.select("reason", event_durations.reason_class(rows.reason)).collect()
    assert {row[0]: row[1] for row in found} == classes


# -- wrong -------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused_before_reading(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, path = tmp_path / "broker", tmp_path / "report.html"
    with penstock.open(target) as broker:
        broker.create_queue("orders")
    with pytest.raises(QueueNotFound, match="nothing"):
        report(spark, target, "nothing", path)
    with pytest.raises(InvalidRequest, match="not a Penstock directory"):
        report(spark, tmp_path, "orders", path)
    with pytest.raises(InvalidRequest, match="since is not before until"):
        report(spark, target, "orders", path, since=datetime(2020, 1, 1, tzinfo=UTC), until=datetime(2020, 1, 1, tzinfo=UTC))
    with pytest.raises(InvalidRequest, match="no timezone"):
        report(spark, target, "orders", path, since=datetime(2026, 1, 1))
    with pytest.raises(InvalidRequest, match="is a directory"):
        report(spark, target, "orders", tmp_path)
    with pytest.raises(InvalidRequest, match="there is no directory"):
        report(spark, target, "orders", tmp_path / "no" / "report.html")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match="penstock\\[spark\\]"):
        charts.require_matplotlib()
    assert not path.exists()


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    with penstock.open(tmp_path / "broker") as broker:
        queue = broker.create_queue("orders")
        fill(queue, 12, key="k")
        for lease in queue.lease(3, per_key=3):
            lease.complete()
    return tmp_path / "broker"


def run(*args: str, broker: Path, code: int = 0) -> str:
    ran = CliRunner().invoke(app, ["spark", "report", *args], env={"PENSTOCK_BROKER": str(broker)}, prog_name="penstock")
    assert ran.exit_code == code, ran.output
    return ran.stdout if code == 0 else ran.stderr


def test_the_command_prints_the_path_and_key_figures(
    spark: SparkSession, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("orders", broker=shop)
    assert said.splitlines()[0] == f"report  {tmp_path / 'orders-report.html'}"
    facts = dict(line.split("  ", 1) for line in said.splitlines() if "  " in line)
    assert (facts["produced"].strip(), facts["completed"].strip(), facts["failed attempts"].strip()) == ("12", "3", "0")
    assert facts["waiting"].strip().startswith("p50 ")
    assert facts["ready now"].strip().startswith("9, the oldest for ")
    assert said.splitlines()[-1] == NONE
    CheckedPage((tmp_path / "orders-report.html").read_text("utf-8"))


def test_the_command_as_a_program_uses_it(spark: SparkSession, shop: Path, tmp_path: Path) -> None:
    found = json.loads(run("orders", "--out", str(tmp_path / "x.html"), "--since", "2020-01-01T00:00:00Z", "--json", broker=shop))
    assert (found["report"], found["produced"], found["completed"]) == (str(tmp_path / "x.html"), 12, 3)
    assert found["hot_keys"] == [{"key": "k", "items": 12, "handling_seconds": found["hot_keys"][0]["handling_seconds"]}]
    assert found["findings"] == [NONE]


def test_the_command_says_what_is_wrong(spark: SparkSession, shop: Path, tmp_path: Path) -> None:
    assert "nothing" in run("nothing", broker=shop, code=5)
    assert "--since" in run("orders", "--since", "yesterday", broker=shop, code=2)
    assert "there is no directory" in run("orders", "-o", str(tmp_path / "no" / "x.html"), broker=shop, code=2)
