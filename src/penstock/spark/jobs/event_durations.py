"""Durations between events, computed in Spark.

Owns: which events begin and end a wait and an attempt (`waits`, `attempts`), and the classes of reasons
(`reason_class`). Everything is a DataFrame function: no event reaches the driver. Times are columns of wall-clock
microseconds. If the clock was set back between two events, the duration is 0.

waiting: from when an item became ready (produced, due, retried, redriven, …) to its lease; including the time in which
its key was busy.
handling: from an item's lease to when the holder settled it. Not counted: leases that expired, and items that were
returned because an earlier item of their key failed.
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
"""Events by which a holder settles an item. Some also happen without a holder; then they have no lease."""
LEASED, COMPLETED, LEASE_EXPIRED = Transition.LEASED.value, Transition.COMPLETED.value, Transition.LEASE_EXPIRED.value
BURIED_EVENTS = (Transition.BURIED.value, Transition.TTL_EXPIRED.value)
SPENT_BY_LEASE = f"{SPENT}: {RAN_OUT}"
UNHANDLED = (RETURNED, SPENT_BY_LEASE, TTL_EXPIRED)
"""Reasons that Penstock gave, not a holder: they ended the lease."""
LONGEST_REASON = 160
REMOVED = "…"
"""Stands for the numbers and ids of a reason in its class."""
_TOKEN = "[0-9A-Za-z]"
_VARYING = (
    r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b",
    r"\b0[xX][0-9a-fA-F]+\b",
    # hexadecimal digits: at least seven, a letter and a decimal digit among them
    rf"(?<!{_TOKEN})(?=[0-9a-fA-F]*[0-9])(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{{7,}}(?!{_TOKEN})",
    # letters and digits that alternate, such as 9fK2xQ: at least six
    rf"(?<!{_TOKEN})(?={_TOKEN}*(?:[A-Za-z][0-9]+[A-Za-z]|[0-9][A-Za-z]+[0-9])){_TOKEN}{{6,}}(?!{_TOKEN})",
    # numbers, addresses, dates and times
    r"(?:(?<![\w)\]])[-+])?[0-9]+(?:(?:[-.,:/T]|[eE][-+]?)[0-9]+)*(?:(?<=:[0-9]{2}|\.[0-9]{3}|\.[0-9]{6})Z)?",
)
"""What differs from one reason to the next of the same class, as regular expressions of Java."""


def report_events(events: DataFrame) -> DataFrame:
    """The columns of table events that a report needs, with times as microseconds and NULL reasons as ""."""
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
    """Each lease of an item: when (`at`), and how long the item had waited (`micros`); NULL if the log no longer says.

    A frame can hold several events of an item; a turn leases last. Before the n-th lease, the event that made the item
    ready has n - 1 attempts. If it has fewer, retention has removed the event that did.
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
    """When each item last became ready (`ready`)."""
    made_ready = events.where(F.col("event").isin(*READY))
    return made_ready.groupBy("partition", "offset").agg(F.max_by("at", "sequence").alias("ready"))


def attempts(events: DataFrame) -> DataFrame:
    """Each attempt that its holder ended: the item, when (`at`), and how long it took (`micros`)."""
    settles = F.col("event").isin(*SETTLED) & ~F.col("reason").isin(*UNHANDLED)
    return (
        events.where(F.col("lease").isNotNull() & ((F.col("event") == LEASED) | settles))
        .groupBy("partition", "offset", "lease")
        .agg(F.min(F.when(F.col("event") == LEASED, F.col("at"))).alias("begun"), F.max(F.when(settles, F.col("at"))).alias("at"))
        .where(F.col("begun").isNotNull() & F.col("at").isNotNull())
        .select("partition", "offset", "at", F.greatest(F.col("at") - F.col("begun"), F.lit(0)).alias("micros"))
    )


def reason_class(reason: Column) -> Column:
    """The class under which a reason is counted: its first line, with an ellipsis for every number and id.

    A list of them becomes one ellipsis, so that its length makes no difference.
    """
    line = _first_line(reason)
    for pattern in _VARYING:
        line = F.regexp_replace(line, pattern, REMOVED)
    return _shortened(F.regexp_replace(line, f"{REMOVED}(?:[,;]? ?{REMOVED})+", REMOVED))


def reason_line(reason: Column) -> Column:
    """The first line of a reason, with its numbers and ids."""
    return _shortened(_first_line(reason))


def without_prefix(reason: Column) -> Column:
    """A reason without the prefix of the last allowed attempt: it is then that of earlier ones."""
    return F.regexp_replace(reason, f"^{SPENT}(: |$)", "")


def _first_line(reason: Column) -> Column:
    return F.trim(F.regexp_extract(reason, r"^\s*([^\r\n]*)", 1))


def _shortened(line: Column) -> Column:
    return F.when(F.length(line) > LONGEST_REASON, F.concat(F.substring(line, 1, LONGEST_REASON - 1), F.lit("…"))).otherwise(line)
