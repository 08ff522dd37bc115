"""Times between events, in Spark.

Owns: which events begin and end a wait and an attempt (`waits`, `attempts`), and under which name reasons are counted (`reason_class`).
All of it is DataFrame functions: no event reaches the driver. Event times are columns of wall microseconds here. The wall may have been
stepped back between two events: then no time passed.

waiting: from when an item became ready (produced, due, back from an attempt, brought back) to when it was leased, be it that nobody asked
for items or that its key was busy.
handling: from when an item was leased to when its holder settled it. A lease that ran out was not settled by anyone, and an item that came
back with an earlier one of its key was not handled.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from penstock.rules.events import RETURNED
from penstock.rules.item_states import Transition
from penstock.rules.removal import ATTEMPTS_EXHAUSTED as SPENT
from penstock.rules.removal import LEASE_EXPIRED as RAN_OUT
from penstock.rules.removal import TTL_EXPIRED

EVENT_COLUMNS = ("event", "partition", "offset", "at", "attempt", "reason", "lease", "sequence")
ARRIVED = (Transition.PRODUCED.value, Transition.SCHEDULED.value)
READY = tuple(
    one.value
    for one in (Transition.PRODUCED, Transition.DUE, Transition.RETRIED, Transition.LEASE_EXPIRED, Transition.SOUGHT, Transition.REDRIVEN)
)
"""Events that make an item ready."""
SETTLED = tuple(one.value for one in (Transition.COMPLETED, Transition.RETRIED, Transition.DELAYED, Transition.BURIED))
"""Events by which a holder settles an item; of some of them the lease says whether there was a holder."""
LEASED, COMPLETED, LEASE_EXPIRED = Transition.LEASED.value, Transition.COMPLETED.value, Transition.LEASE_EXPIRED.value
BURIED_EVENTS = (Transition.BURIED.value, Transition.TTL_EXPIRED.value)
SPENT_BY_LEASE = f"{SPENT}: {RAN_OUT}"
UNHANDLED = (RETURNED, SPENT_BY_LEASE, TTL_EXPIRED)
"""Reasons that no holder gave: what they say ended the lease."""
LONGEST_REASON = 160


def report_events(events: DataFrame) -> DataFrame:
    """The columns of the events table that a report needs, times as microseconds."""
    return events.select(*EVENT_COLUMNS).withColumn("at", F.unix_micros("at")).withColumn("reason", F.coalesce("reason", F.lit("")))


def within(at: Column, since: int | None, until: int | None) -> Column:
    """Whether a time is in [since, until)."""
    found = F.lit(True)
    if since is not None:
        found = found & (at >= since)
    if until is not None:
        found = found & (at < until)
    return found


def is_failure() -> Column:
    """Whether an event ends an attempt without completing the item."""
    return (
        F.col("lease").isNotNull()
        & F.col("event").isin(LEASE_EXPIRED, *(one for one in SETTLED if one != COMPLETED))
        & (F.col("reason") != RETURNED)
    )


def is_lease_expiry() -> Column:
    return (F.col("event") == LEASE_EXPIRED) | (F.col("lease").isNotNull() & (F.col("reason") == SPENT_BY_LEASE))


def waits(events: DataFrame) -> DataFrame:
    """Each lease of an item: when (`at`), and how long it had waited (`micros`); null where what is left of the log does not tell.

    One frame can hold several events of an item; a turn leases last. An item leased for the n-th time was made ready by something that knew
    of n - 1 attempts: whatever knew of fewer is followed by events that retention took.
    """
    item = Window.partitionBy("partition", "offset").orderBy("sequence", (F.col("event") == LEASED).cast("int"))
    made_ready = F.when(F.col("event").isin(*READY), F.struct("at", "attempt"))
    found = (
        events.where(F.col("event").isin(LEASED, *READY))
        .withColumn("ready", F.last(made_ready, ignorenulls=True).over(item.rowsBetween(Window.unboundedPreceding, Window.currentRow)))
        .where(F.col("event") == LEASED)
    )
    known = F.col("ready").isNotNull() & (F.coalesce("ready.attempt", F.lit(0)) >= F.col("attempt") - 1)
    return found.select("at", F.when(known, F.greatest(F.col("at") - F.col("ready.at"), F.lit(0))).alias("micros"))


def last_ready(events: DataFrame) -> DataFrame:
    """When each item became `ready` last."""
    made_ready = events.where(F.col("event").isin(*READY))
    return made_ready.groupBy("partition", "offset").agg(F.max_by("at", "sequence").alias("ready"))


def attempts(events: DataFrame) -> DataFrame:
    """Each attempt that its holder ended: of which item, when (`at`), and how long it took (`micros`)."""
    settles = F.col("event").isin(*SETTLED) & ~F.col("reason").isin(*UNHANDLED)
    return (
        events.where(F.col("lease").isNotNull() & ((F.col("event") == LEASED) | settles))
        .groupBy("partition", "offset", "lease")
        .agg(F.min(F.when(F.col("event") == LEASED, F.col("at"))).alias("begun"), F.max(F.when(settles, F.col("at"))).alias("at"))
        .where(F.col("begun").isNotNull() & F.col("at").isNotNull())
        .select("partition", "offset", "at", F.greatest(F.col("at") - F.col("begun"), F.lit(0)).alias("micros"))
    )


def reason_class(reason: Column) -> Column:
    """The name under which a reason is counted: its first line, with whatever tells one item from another left out.

    Long numbers and ids in hex become an ellipsis; codes such as "503" stay.
    """
    line = F.trim(F.regexp_extract(reason, r"^\s*([^\r\n]*)", 1))
    for pattern in (
        r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b",
        r"\b0x[0-9a-fA-F]{5,}\b",
        r"\b(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{12,}\b",
        r"\d{5,}",
    ):
        line = F.regexp_replace(line, pattern, "…")
    return F.when(F.length(line) > LONGEST_REASON, F.concat(F.substring(line, 1, LONGEST_REASON - 1), F.lit("…"))).otherwise(line)


def failure_class(reason: Column) -> Column:
    """As `reason_class`; the last attempt of an item failed for the same reason as the ones before."""
    return reason_class(F.regexp_replace(reason, f"^{SPENT}(: |$)", ""))
