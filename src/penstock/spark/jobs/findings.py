"""The findings of a report: sentences about what is unusual.

Owns: `findings` and its thresholds. No I/O. Each rule has a minimum number of items, so that a few items are no
finding.
"""

from collections.abc import Iterator

from penstock.spark.jobs.report_metrics import ReportMetrics
from penstock.spark.jobs.report_text import count_text, duration_text, share, times

FEW = 50
"""Rules about proportions need at least this many items, attempts or waits."""
HOT_KEY = 0.10
BUSY_KEY = 0.20
TAIL = 20
"""p99 as a multiple of p50."""
UNEVEN = 1.5
FAILING = 0.05
EXPIRING = 0.01
FALLING_BEHIND = 1.2
OLD_SECONDS = 600.0
NONE = "Nothing stands out."


def findings(metrics: ReportMetrics) -> list[str]:
    """The findings, the most urgent first; at least one sentence."""
    if metrics.first_at is None and not metrics.states and not metrics.dead_letters:
        asked = metrics.since is not None or metrics.until is not None
        return ["Nothing happened in this time." if asked else "The log of this queue has no events."]
    found = [
        *(_dead(metrics)),
        *(_failures(metrics)),
        *(_backlog(metrics)),
        *(_tail(metrics)),
        *(_keys(metrics)),
        *(_skew(metrics)),
    ]
    return [*(found or [NONE]), *_gaps(metrics)]


def _dead(metrics: ReportMetrics) -> Iterator[str]:
    if metrics.dead_letters:
        verb = "is a dead letter" if metrics.dead_letters == 1 else "are dead letters"
        first = metrics.dead[0]
        text = f"{count_text(metrics.dead_letters, 'item')} {verb}"
        if metrics.distinct_dead > 1 and first.count * 2 > metrics.dead_letters:
            text += f", {share(first.count, metrics.dead_letters)} of them because of “{first.reason or 'no reason given'}”"
        elif metrics.distinct_dead == 1:
            text += f", because of “{first.reason}”" if first.reason else ", without a reason given"
        yield f"{text}."


def _failures(metrics: ReportMetrics) -> Iterator[str]:
    ended, failed = metrics.settled, metrics.failed
    if ended >= FEW and failed >= FAILING * ended:
        text = f"{share(failed, ended)} of all attempts failed or were retried"
        if metrics.reasons:
            first = metrics.reasons[0]
            text += f"; most often ({share(first.count, failed)}) because of “{first.reason or 'no reason given'}”"
        yield f"{text}."
    if ended >= FEW and metrics.leases_expired >= EXPIRING * ended:
        leases = f"{count_text(metrics.leases_expired, 'lease')} expired ({share(metrics.leases_expired, ended)} of all attempts)"
        yield f"{leases}: handlers died, or took longer than the lease timeout."


def _backlog(metrics: ReportMetrics) -> Iterator[str]:
    recent = metrics.buckets[-max(1, len(metrics.buckets) // 4) :]
    produced, completed = (sum(getattr(one, name) for one in recent) for name in ("produced", "completed"))
    behind = len(metrics.buckets) >= 8 and produced >= FEW and produced > FALLING_BEHIND * completed and metrics.ready >= FEW
    if behind:
        late = duration_text(len(recent) * metrics.bucket_seconds)
        yield f"In the last {late} of the report {produced:,} items were produced and {completed:,} completed: the backlog grows."
    if metrics.age.worst >= OLD_SECONDS:
        yield f"The oldest of {count_text(metrics.ready, 'ready item')} has been ready for {duration_text(metrics.age.worst)}."


def _tail(metrics: ReportMetrics) -> Iterator[str]:
    waited, took = "leases came after a wait of", "attempts took"
    for what, found, least in ((waited, metrics.waiting, 1.0), (took, metrics.handling, 0.1)):
        if found.count >= 2 * FEW and found.p50 > 0 and found.p99 >= TAIL * found.p50 and found.p99 >= least:
            p50, p99 = duration_text(found.p50), duration_text(found.p99)
            yield f"1 in 100 {what} {p99} or more, {times(found.p99 / found.p50)} the median of {p50}."


def _keys(metrics: ReportMetrics) -> Iterator[str]:
    if metrics.items >= FEW and metrics.keys > 1 and metrics.hot_keys[0].items >= HOT_KEY * metrics.items:
        hot, fair = metrics.hot_keys[0], metrics.keyed_items / metrics.keys
        if hot.items >= 3 * fair:
            yield (
                f"One key, “{hot.key}”, has {share(hot.items, metrics.items)} of all items; "
                "items of one key are handled one at a time, however many workers there are."
            )
    spent = metrics.keyed_handling_seconds
    if (
        metrics.handling.count >= FEW
        and metrics.keys > 1
        and metrics.busy_keys
        and metrics.busy_keys[0].handling_seconds >= BUSY_KEY * spent
    ):
        busy = metrics.busy_keys[0]
        if not metrics.hot_keys or busy.key != metrics.hot_keys[0].key:
            yield f"{share(busy.handling_seconds, spent)} of all handling time went into one key, “{busy.key}”."


def _skew(metrics: ReportMetrics) -> Iterator[str]:
    active = [one for one in metrics.partitions if one.active]
    if metrics.produced >= FEW * len(active) and metrics.imbalance >= UNEVEN:
        fullest = max(active, key=lambda one: one.items)
        text = f"Partition {fullest.partition} got {times(metrics.imbalance)} as many items as a partition does on average"
        slot = next((one for one in metrics.slots if one.partition == fullest.partition), None)
        if slot is not None and slot.items * 2 > fullest.items:
            text += f"; {share(slot.items, fullest.items)} of them belong to slot {slot.slot}, which cannot be divided"
        yield f"{text}."


def _gaps(metrics: ReportMetrics) -> Iterator[str]:
    if metrics.items_before_log:
        items, leases = count_text(metrics.items_before_log, "item"), metrics.leases_without_wait
        text = f"Retention has removed the first events of {items}: the report covers older items in part or not at all"
        yield text + (f", and the waiting time of {count_text(leases, 'lease')} is unknown." if leases else ".")
