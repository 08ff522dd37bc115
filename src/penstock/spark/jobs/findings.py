"""What stands out in a report, in plain sentences.

Owns: `findings` and the thresholds beyond which something is worth a sentence. Pure. A finding that rests on a handful of items is none:
each rule says how many it needs.
"""

from collections.abc import Iterator

from penstock.spark.jobs.report_metrics import ReportMetrics
from penstock.spark.jobs.report_text import count_text, duration_text, share, times

FEW = 50
"""Of fewer items, attempts or waits no proportion is told."""
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


def findings(figures: ReportMetrics) -> list[str]:
    """The most pressing first; never empty."""
    if figures.first_at is None and not figures.states and not figures.dead_letters:
        asked = figures.since is not None or figures.until is not None
        return ["Nothing happened in this time." if asked else "Nothing has happened in this queue yet, as far as its log tells."]
    found = [
        *(_dead(figures)),
        *(_failures(figures)),
        *(_backlog(figures)),
        *(_tail(figures)),
        *(_keys(figures)),
        *(_skew(figures)),
    ]
    return [*(found or [NONE]), *_gaps(figures)]


def _dead(figures: ReportMetrics) -> Iterator[str]:
    if figures.dead_letters:
        verb = "is a dead letter" if figures.dead_letters == 1 else "are dead letters"
        first = figures.dead[0]
        text = f"{count_text(figures.dead_letters, 'item')} {verb}"
        if figures.distinct_dead > 1 and first.count * 2 > figures.dead_letters:
            text += f", {share(first.count, figures.dead_letters)} of them because of “{first.reason or 'no reason given'}”"
        elif figures.distinct_dead == 1:
            text += f", because of “{first.reason}”" if first.reason else ", without a reason given"
        yield f"{text}."


def _failures(figures: ReportMetrics) -> Iterator[str]:
    ended, failed = figures.settled, figures.failed
    if ended >= FEW and failed >= FAILING * ended:
        text = f"{share(failed, ended)} of all attempts failed or were put back"
        if figures.reasons:
            first = figures.reasons[0]
            text += f"; most often ({share(first.count, failed)}) because of “{first.reason or 'no reason given'}”"
        yield f"{text}."
    if ended >= FEW and figures.leases_expired >= EXPIRING * ended:
        leases = f"{count_text(figures.leases_expired, 'lease')} ran out ({share(figures.leases_expired, ended)} of all attempts)"
        yield f"{leases}: handlers died, or took longer than the lease timeout."


def _backlog(figures: ReportMetrics) -> Iterator[str]:
    recent = figures.buckets[-max(1, len(figures.buckets) // 4) :]
    produced, completed = (sum(getattr(one, name) for one in recent) for name in ("produced", "completed"))
    behind = len(figures.buckets) >= 8 and produced >= FEW and produced > FALLING_BEHIND * completed and figures.ready >= FEW
    if behind:
        late = duration_text(len(recent) * figures.bucket_seconds)
        yield f"In the last {late} of the report {produced:,} items were produced and {completed:,} completed: the backlog grows."
    if figures.age.worst >= OLD_SECONDS:
        yield f"The oldest of {count_text(figures.ready, 'ready item')} has been ready for {duration_text(figures.age.worst)}."


def _tail(figures: ReportMetrics) -> Iterator[str]:
    waited, took = "leases came after a wait of", "attempts took"
    for what, spread, least in ((waited, figures.waiting, 1.0), (took, figures.handling, 0.1)):
        if spread.count >= 2 * FEW and spread.p50 > 0 and spread.p99 >= TAIL * spread.p50 and spread.p99 >= least:
            yield f"1 in 100 {what} {duration_text(spread.p99)} or more, {times(spread.p99 / spread.p50)} the median of {duration_text(spread.p50)}."


def _keys(figures: ReportMetrics) -> Iterator[str]:
    if figures.items >= FEW and figures.keys > 1 and figures.hot_keys[0].items >= HOT_KEY * figures.items:
        hot, fair = figures.hot_keys[0], figures.keyed_items / figures.keys
        if hot.items >= 3 * fair:
            yield (
                f"One key, “{hot.key}”, has {share(hot.items, figures.items)} of all items; "
                "items of one key are handled one at a time, however many workers there are."
            )
    spent = figures.keyed_handling_seconds
    if (
        figures.handling.count >= FEW
        and figures.keys > 1
        and figures.busy_keys
        and figures.busy_keys[0].handling_seconds >= BUSY_KEY * spent
    ):
        busy = figures.busy_keys[0]
        if not figures.hot_keys or busy.key != figures.hot_keys[0].key:
            yield f"{share(busy.handling_seconds, spent)} of all handling time went into one key, “{busy.key}”."


def _skew(figures: ReportMetrics) -> Iterator[str]:
    active = [one for one in figures.partitions if one.active]
    if figures.produced >= FEW * len(active) and figures.imbalance >= UNEVEN:
        fullest = max(active, key=lambda one: one.items)
        text = f"Partition {fullest.partition} got {times(figures.imbalance)} as many items as a partition does on average"
        slot = next((one for one in figures.slots if one.partition == fullest.partition), None)
        if slot is not None and slot.items * 2 > fullest.items:
            text += f"; {share(slot.items, fullest.items)} of them belong to slot {slot.slot}, which cannot be divided"
        yield f"{text}."


def _gaps(figures: ReportMetrics) -> Iterator[str]:
    if figures.items_before_log:
        lost = f"Retention has taken the beginning of {count_text(figures.items_before_log, 'item')}: older items are told of in part or not at all"
        left_out = (
            f", and {count_text(figures.leases_without_wait, 'lease')} could not be measured for waiting"
            if figures.leases_without_wait
            else ""
        )
        yield f"{lost}{left_out}."
