"""Every figure of a report, against the same figure computed without Spark on the same log."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from penstock.spark.jobs.report import report
from penstock.spark.jobs.report_metrics import ReportMetrics
from penstock.words import values
from penstock.words.clock import SECOND
from penstock.words.values import timestamp
from tests.spark.expected_report import QUEUE, ExpectedReport, ReportedQueue, counted, make_reported_queue, spread

MIDDLE = 25 * SECOND, 90 * SECOND
"""A time within the story, after its beginning."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportedQueue]:
    made = make_reported_queue(tmp_path_factory.mktemp("report") / "broker")
    yield made
    made.yard.broker.close()


Told = tuple[ReportMetrics, ExpectedReport]


@pytest.fixture(scope="module", params=["all", "a part"])
def both(spark: SparkSession, story: ReportedQueue, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Told:
    """The metrics of a report, computed by Spark and without; the broker is open."""
    begin = min(at for _, at in story.items.values())
    since, until = (None, None) if request.param == "all" else (begin + MIDDLE[0], begin + MIDDLE[1])
    path = tmp_path_factory.mktemp("page") / "report.html"
    times = [None if at is None else values.timestamp(at) for at in (since, until)]
    figures = report(spark, story.yard.path, QUEUE, path, since=times[0], until=times[1], clock=story.yard.clock)
    text = path.read_text("utf-8")
    assert "big" in text and "secret" not in text  # nothing of a payload is on the page
    return figures, ExpectedReport(story, since, until)


def test_events_are_counted(both: Told) -> None:
    figures, oracle = both
    assert figures.produced == oracle.count("produced", "scheduled") > 0
    assert figures.leased == oracle.count("leased") > 0
    assert figures.completed == oracle.count("completed") > 0
    assert figures.failed == len(oracle.failures()) > 0
    assert figures.buried == oracle.count("buried", "expired") > 0
    expired = [one for one in oracle.failures() if one.event == "lease expired" or one.reason == "attempts spent: lease expired"]
    assert figures.leases_expired == len(expired)
    assert figures.items_before_log == figures.leases_without_wait == 0


def test_the_time_is_that_of_the_events(both: Told) -> None:
    figures, oracle = both
    times = [timestamp(one.at) for one in oracle.events()]
    assert (figures.first_at, figures.last_at) == (min(times), max(times))
    assert figures.made_at == timestamp(oracle.now)


def test_throughput_and_times_by_steps_of_time(both: Told) -> None:
    figures, oracle = both
    assert figures.buckets == oracle.buckets(round(figures.bucket_seconds * SECOND))
    assert 10 < len(figures.buckets) <= 61


def test_waiting_and_handling_overall(both: Told) -> None:
    figures, oracle = both
    assert figures.waiting == spread(micros for _, micros in oracle.waits)
    assert figures.handling == spread(micros for _, _, micros in oracle.handlings)
    assert figures.waiting.p50 < figures.waiting.p99


def test_attempts(both: Told) -> None:
    figures, oracle = both
    assert [(one.attempt, one.completed, one.buried) for one in figures.attempts] == oracle.attempts()
    assert len(figures.attempts) >= 3


def test_reasons_of_failures(both: Told) -> None:
    figures, oracle = both
    assert figures.reasons == oracle.reasons()
    assert figures.distinct_reasons == len(oracle.reasons()) > 3


def test_hot_keys(both: Told) -> None:
    figures, oracle = both
    assert figures.items == len(oracle.items)
    assert figures.keyed_items == sum(1 for name in oracle.items if name in oracle.keys) < figures.items
    assert figures.keys == len({oracle.keys[name] for name in oracle.items if name in oracle.keys})
    assert figures.hot_keys == oracle.hot("items")
    assert figures.hot_keys[0].key == "big"
    assert figures.busy_keys == oracle.hot("handling_seconds")
    total = sum(micros for name, _, micros in oracle.handlings if name in oracle.keys)
    assert figures.keyed_handling_seconds == total / SECOND


def test_slots_and_partitions(both: Told) -> None:
    figures, oracle = both
    assert figures.slots == oracle.slots()[:10]
    assert figures.slots_used == len(oracle.slots())
    loads = {number: sum(1 for name in oracle.items if name.startswith(f"{number}-")) for number in oracle.active}
    assert {one.partition: one.items for one in figures.partitions} == loads
    assert figures.imbalance == pytest.approx(max(loads.values()) * 4 / sum(loads.values()))
    assert figures.imbalance > 1.5


def test_the_backlog_is_that_of_now(both: Told) -> None:
    figures, oracle = both
    stats = {name: getattr(oracle.stats, name) for name in ("ready", "scheduled", "leased", "buried", "moving")}
    assert figures.states == {name: count for name, count in stats.items() if count}
    assert figures.age == spread(oracle.ages())
    assert [one.items for one in figures.ages] == [
        sum(1 for age in oracle.ages() if one.from_seconds * SECOND <= age and (one.to_seconds is None or age < one.to_seconds * SECOND))
        for one in figures.ages
    ]
    assert sum(one.items for one in figures.ages) == figures.ready > 50


def test_scheduled_items_are_those_of_now(both: Told) -> None:
    figures, oracle = both
    assert (figures.next_ready_at, figures.last_ready_at) == (oracle.upcoming[0], oracle.upcoming[-1])
    left = [(at - timestamp(oracle.now)).total_seconds() for at in oracle.upcoming]
    assert [one.items for one in figures.upcoming] == [
        sum(1 for seconds in left if one.from_seconds <= seconds and (one.to_seconds is None or seconds < one.to_seconds))
        for one in figures.upcoming
    ]
    assert sum(one.items for one in figures.upcoming) == figures.scheduled == len(left) > 3
    assert sum(1 for one in figures.upcoming if one.items) > 2


def test_dead_letters_are_those_of_now(both: Told) -> None:
    figures, oracle = both
    assert figures.dead_letters == len(oracle.dead) > 10
    names = counted((one.reason, 0) for one in oracle.dead)
    assert [(one.reason, one.count) for one in figures.dead] == [(one.reason, one.count) for one in names]
    assert figures.distinct_dead == len(names)
