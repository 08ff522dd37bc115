"""Computes the metrics of a report in Spark.

Owns: `ReportTables` (what a report reads) and `compute_metrics`. Every metric is a DataFrame aggregation; at most a few
hundred rows of each reach the driver. The tables are arguments, so that tests can give rows made by hand.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from penstock.spark.jobs import event_durations
from penstock.spark.jobs.report_metrics import (
    AGES,
    STAGES,
    TOP,
    AttemptCount,
    Bucket,
    KeyLoad,
    PartitionLoad,
    Percentiles,
    ReasonCount,
    ReportMetrics,
    SlotLoad,
    SpanCount,
    key_text,
    printable,
)
from penstock.spark.routing import slot
from penstock.words.clock import DAY, HOUR, MILLISECOND, MINUTE, SECOND
from penstock.words.values import timestamp

STEPS = (
    *(number * MILLISECOND for number in (100, 200, 500)),
    *(number * SECOND for number in (1, 2, 5, 10, 15, 30)),
    *(number * MINUTE for number in (1, 2, 5, 10, 15, 30)),
    *(number * HOUR for number in (1, 2, 3, 6, 12)),
    *(number * DAY for number in (1, 2, 7, 14, 28)),
)
"""The possible lengths of a time step."""
MOST_BUCKETS = 60
MANY_REASONS = 1_000
FEW_TASKS = 16
"""The number of partitions of a cached aggregation. Spark would make hundreds of tiny ones, which costs seconds."""
RANKS = (0.5, 0.9, 0.99)


class ReportTables(NamedTuple):
    """The tables of a queue, as the data source `penstock` gives them, with the columns that a report needs."""

    events: DataFrame
    """event_durations.EVENT_COLUMNS"""
    items: DataFrame
    """partition, offset, key, produced_at"""
    state: DataFrame
    """partition, offset, state, produced_at, ready_at"""
    dead: DataFrame
    """reason, buried_at"""


class ReportRequest(NamedTuple):
    """Queue and time of a report."""

    queue: str
    now: int
    active: list[int]
    """The active partitions."""
    since: int | None = None
    until: int | None = None


def compute_metrics(tables: ReportTables, request: ReportRequest, begin: Callable[[str], None] = lambda _: None) -> ReportMetrics:
    """Compute all metrics. `begin` is called with each of STAGES when it begins."""
    stages = iter(STAGES)
    begin(next(stages))
    with kept(event_durations.report_events(tables.events)) as events:
        found = _overview(events, request)
        begin(next(stages))
        found |= _over_time(events, request, found["first_at"], found["last_at"])
        begin(next(stages))
        found |= _attempts(events, request) | _reasons(events, request)
        begin(next(stages))
        with kept(_by_key(tables.items, events, request)) as keys:
            found |= _keys(keys)
        begin(next(stages))
        found |= _backlog(tables.state, events, request)
    begin(next(stages))
    found |= _dead(tables.dead)
    found |= {name: _moment(found[name]) for name in ("first_at", "last_at")}
    found |= {"since": _moment(request.since), "until": _moment(request.until)}
    return ReportMetrics(queue=request.queue, made_at=timestamp(request.now), **found)


def _moment(at: int | None) -> datetime | None:
    return None if at is None else timestamp(at)


@contextmanager
def kept(frame: DataFrame) -> Iterator[DataFrame]:
    """Cache a DataFrame for several queries in the block."""
    frame.persist()
    try:
        yield frame
    finally:
        frame.unpersist()


# -- events ------------------------------------------------------------------------------------------


def _overview(events: DataFrame, request: ReportRequest) -> dict[str, Any]:
    asked = event_durations.within(F.col("at"), request.since, request.until)
    event = F.col("event")

    def number(condition: Column) -> Column:
        return F.count_if(asked & condition)

    rows = (
        events.groupBy("partition")
        .agg(
            F.min(F.when(asked, F.col("at"))).alias("first_at"),
            F.max(F.when(asked, F.col("at"))).alias("last_at"),
            number(event.isin(*event_durations.ARRIVED)).alias("produced"),
            number(event == event_durations.LEASED).alias("leased"),
            number(event == event_durations.COMPLETED).alias("completed"),
            number(event_durations.is_failure()).alias("failed"),
            number(event_durations.is_lease_expiry()).alias("leases_expired"),
            number(event.isin(*event_durations.BURIED_EVENTS)).alias("buried"),
            (F.max("offset") + 1 - F.count_if(event.isin(*event_durations.ARRIVED))).alias("items_before_log"),
        )
        .collect()
    )
    sums = ("produced", "leased", "completed", "failed", "leases_expired", "buried", "items_before_log")
    loads = {row.partition: row.produced for row in rows}
    partitions = sorted({*request.active, *(number for number, items in loads.items() if items)})
    return {
        "first_at": min((row.first_at for row in rows if row.first_at is not None), default=None),
        "last_at": max((row.last_at for row in rows if row.last_at is not None), default=None),
        "partitions": [PartitionLoad(number, loads.get(number, 0), number in request.active) for number in partitions],
        **{name: sum(row[name] for row in rows) for name in sums},
    }


def step_for(span: int) -> int:
    """The length of the time steps for a range, both in microseconds."""
    return next((one for one in STEPS if span < one * MOST_BUCKETS), (span // (MOST_BUCKETS * DAY) + 1) * DAY)


def _over_time(events: DataFrame, request: ReportRequest, first_at: int | None, last_at: int | None) -> dict[str, Any]:
    if first_at is None or last_at is None:
        return {}
    width = step_for(last_at - first_at)
    asked = event_durations.within(F.col("at"), request.since, request.until)
    bucket = F.floor(F.col("at") / width).cast("long").alias("bucket")
    event = F.col("event")
    counts = (
        events.where(asked)
        .groupBy(bucket)
        .agg(
            F.count_if(event.isin(*event_durations.ARRIVED)).alias("produced"),
            F.count_if(event == event_durations.LEASED).alias("leased"),
            F.count_if(event == event_durations.COMPLETED).alias("completed"),
            F.count_if(event_durations.is_failure()).alias("failed"),
        )
        .collect()
    )
    waits, unknown = _percentiles(event_durations.waits(events).where(asked), bucket)
    attempts, _ = _percentiles(event_durations.attempts(events).where(asked), bucket)
    happened = {row.bucket: row for row in counts}
    numbers = range(first_at // width, last_at // width + 1)
    return {
        "bucket_seconds": width / SECOND,
        "buckets": [_bucket(number * width, happened.get(number), waits.get(number), attempts.get(number)) for number in numbers],
        "waiting": waits.get(None, Percentiles()),
        "handling": attempts.get(None, Percentiles()),
        "leases_without_wait": unknown,
    }


def _bucket(at: int, row: Row | None, waiting: Percentiles | None, handling: Percentiles | None) -> Bucket:
    produced, leased, completed, failed = (row.produced, row.leased, row.completed, row.failed) if row is not None else (0, 0, 0, 0)
    return Bucket(timestamp(at), produced, leased, completed, failed, waiting or Percentiles(), handling or Percentiles())


def _percentiles(times: DataFrame, bucket: Column) -> tuple[dict[int | None, Percentiles], int]:
    """Percentiles by bucket, and of all rows under None; and the number of rows without a duration."""
    ranks = F.percentile_approx("micros", list(RANKS))
    rows = (
        times.withColumn("bucket", bucket)
        .rollup("bucket")
        .agg(F.count("micros").alias("known"), F.count(F.lit(1)).alias("all"), ranks.alias("ranks"), F.max("micros").alias("worst"))
        .collect()
    )
    found = {row.bucket: _percentiles_of(row.known, row.ranks, row.worst) for row in rows if row.known}
    return found, sum(row.all - row.known for row in rows if row.bucket is None)


def _percentiles_of(count: int, ranks: Iterable[int], worst: int) -> Percentiles:
    p50, p90, p99 = (micros / SECOND for micros in ranks)
    return Percentiles(count, p50, p90, p99, worst / SECOND)


def _attempts(events: DataFrame, request: ReportRequest) -> dict[str, Any]:
    asked = event_durations.within(F.col("at"), request.since, request.until)
    event = F.col("event")
    rows = (
        events.where(asked & event.isin(event_durations.COMPLETED, *event_durations.BURIED_EVENTS))
        .groupBy(F.least(F.col("attempt"), F.lit(MOST_BUCKETS)).alias("attempt"))
        .agg(
            F.count_if(event == event_durations.COMPLETED).alias("completed"),
            F.count_if(event != event_durations.COMPLETED).alias("buried"),
        )
        .collect()
    )
    return {"attempts": sorted((AttemptCount(row.attempt, row.completed, row.buried) for row in rows), key=lambda one: one.attempt)}


def _reasons(events: DataFrame, request: ReportRequest) -> dict[str, Any]:
    asked = event_durations.within(F.col("at"), request.since, request.until)
    failures = events.where(asked & event_durations.is_failure()).select(
        event_durations.without_prefix(F.col("reason")).alias("reason"), "at"
    )
    reasons, distinct, _ = _top_reasons(failures)
    return {"reasons": reasons, "distinct_reasons": distinct}


def _top_reasons(rows: DataFrame) -> tuple[list[ReasonCount], int, int]:
    """For rows of `reason` and `at`: the most frequent reasons, the number of reasons, and the number of rows."""
    last = F.max(F.struct(F.coalesce("at", F.lit(0)).alias("at"), event_durations.reason_line(F.col("reason")).alias("line")))
    counted = (
        rows.groupBy(event_durations.reason_class(F.col("reason")).alias("class"))
        .agg(F.count(F.lit(1)).alias("number"), last.alias("last"))
        .select(F.col("class").alias("reason"), "number", F.col("last.at").alias("last_at"), F.col("last.line").alias("example"))
    )
    found = counted.orderBy(F.desc("number"), "reason").limit(MANY_REASONS).collect()
    top = [ReasonCount(printable(row.reason), row.number, _moment(row.last_at or None), printable(row.example)) for row in found[:TOP]]
    if len(found) < MANY_REASONS:  # then these are all, and nothing need be computed twice
        return top, len(found), sum(row.number for row in found)
    total = _one(counted.agg(F.count(F.lit(1)).alias("reasons"), F.sum("number").alias("rows")))
    return top, total.reasons, total.rows


# -- keys --------------------------------------------------------------------------------------------


def _by_key(items: DataFrame, events: DataFrame, request: ReportRequest) -> DataFrame:
    """Each key (NULL: none) with its items in the time, its handling microseconds, and its newest item's partition."""
    asked = event_durations.within(F.col("at"), request.since, request.until)
    spent = event_durations.attempts(events).where(asked).groupBy("partition", "offset").agg(F.sum("micros").alias("spent"))
    known = items.select("partition", "offset", "key", F.unix_micros("produced_at").alias("at"))
    return (
        known.join(spent, ["partition", "offset"], "left")
        .groupBy("key")
        .agg(
            F.count_if(asked).alias("items"),
            F.coalesce(F.sum("spent"), F.lit(0)).alias("spent"),
            F.max_by("partition", "at").alias("partition"),
            F.max("at").alias("newest"),
        )
        .where((F.col("items") > 0) | (F.col("spent") > 0))
        .coalesce(FEW_TASKS)
    )


def _keys(keys: DataFrame) -> dict[str, Any]:
    keyed = keys.where(F.col("key").isNotNull())
    named = F.col("key").isNotNull() & (F.col("items") > 0)
    total = _one(
        keys.agg(
            F.sum("items").alias("items"),
            F.sum(F.when(named, F.col("items"))).alias("keyed_items"),
            F.count_if(named).alias("keys"),
            F.sum(F.when(F.col("key").isNotNull(), F.col("spent"))).alias("spent"),
            F.count_distinct(F.when(named, slot(F.col("key")))).alias("slots"),
        )
    )
    slots = (
        keyed.where(F.col("items") > 0)
        .groupBy(slot(F.col("key")).alias("slot"))
        .agg(F.sum("items").alias("items"), F.count(F.lit(1)).alias("keys"), F.max_by("partition", "newest").alias("partition"))
        .orderBy(F.desc("items"), "slot")
        .limit(TOP)
        .collect()
    )
    return {
        "items": total["items"] or 0,
        "keyed_items": total.keyed_items or 0,
        "keys": total["keys"],
        "keyed_handling_seconds": (total.spent or 0) / SECOND,
        "hot_keys": _top_keys(keyed, "items"),
        "busy_keys": _top_keys(keyed, "spent"),
        "slots": [SlotLoad(row.slot, row.partition, row["items"], row["keys"]) for row in slots],
        "slots_used": total.slots,
    }


def _top_keys(keyed: DataFrame, by: str) -> list[KeyLoad]:
    rows = keyed.where(F.col(by) > 0).orderBy(F.desc(by), "key").limit(TOP).collect()
    return [KeyLoad(key_text(bytes(row.key)), row["items"], row.spent / SECOND) for row in rows]


# -- now ---------------------------------------------------------------------------------------------


def _backlog(state: DataFrame, events: DataFrame, request: ReportRequest) -> dict[str, Any]:
    """States of the items, ages of the ready ones, and when the scheduled ones become ready.

    An age counts from when the item became ready; if that is unknown, from production.
    """
    since = F.coalesce("ready", F.unix_micros("produced_at"))
    age = F.when(F.col("state") == "ready", F.greatest(F.lit(request.now) - since, F.lit(0)))
    to_come = F.when(F.col("state") == "scheduled", F.greatest(F.unix_micros("ready_at") - F.lit(request.now), F.lit(0)))
    joined = state.join(event_durations.last_ready(events), ["partition", "offset"], "left")
    with kept(joined.select("state", age.alias("micros"), to_come.alias("to_come"), "ready_at")) as found:
        states = found.groupBy("state").count().collect()
        ages = _one(
            found.agg(
                F.count("micros").alias("known"),
                F.percentile_approx("micros", list(RANKS)).alias("ranks"),
                F.max("micros").alias("worst"),
                *_counts_by_span("micros"),
                *_counts_by_span("to_come"),
                F.unix_micros(F.min(F.when(F.col("to_come").isNotNull(), F.col("ready_at")))).alias("next_ready_at"),
                F.unix_micros(F.max(F.when(F.col("to_come").isNotNull(), F.col("ready_at")))).alias("last_ready_at"),
            )
        )
    return {
        "states": {row.state: row["count"] for row in sorted(states, key=lambda row: str(row.state))},
        "age": _percentiles_of(ages.known, ages.ranks, ages.worst) if ages.known else Percentiles(),
        "ages": _spans("micros", ages),
        "upcoming": _spans("to_come", ages),
        "next_ready_at": _moment(ages.next_ready_at),
        "last_ready_at": _moment(ages.last_ready_at),
    }


def _counts_by_span(column: str) -> Iterator[Column]:
    """How many values of a column are at least 0 and at least each of AGES."""
    return (F.count_if(F.col(column) >= seconds * SECOND).alias(f"{column}_{seconds}") for seconds in (0, *AGES))


def _spans(column: str, row: Row) -> list[SpanCount]:
    """The numbers of `_counts_by_span` as spans; empty if there is no value."""
    if not row[f"{column}_0"]:
        return []
    return [
        SpanCount(start, stop, row[f"{column}_{start}"] - (row[f"{column}_{stop}"] if stop is not None else 0))
        for start, stop in zip((0, *AGES), (*AGES, None), strict=True)
    ]


def _dead(dead: DataFrame) -> dict[str, Any]:
    reason = F.coalesce("reason", F.lit(""))
    reasons, distinct, number = _top_reasons(dead.select(reason.alias("reason"), F.unix_micros("buried_at").alias("at")))
    return {"dead": reasons, "distinct_dead": distinct, "dead_letters": number}


def _one(frame: DataFrame) -> Row:
    """The only row of an aggregation."""
    return frame.collect()[0]
