"""The report as one HTML file.

Owns: `render`. The file loads nothing, has no script, and can be printed. Text from the queue (its name, keys, reasons)
is escaped in `_text`; everything else is written here or is a plot.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal

from penstock.spark.jobs import charts
from penstock.spark.jobs.findings import findings
from penstock.spark.jobs.report_metrics import KeyLoad, Percentiles, ReasonCount, ReportMetrics
from penstock.spark.jobs.report_text import NOTHING, count_text, duration_text, number, rate, share, step, times, when

CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: #1d2939; font: 14px/1.5 FONT; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 24px 40px; }
header h1 { font-size: 26px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
header p, footer, .note { color: #667085; margin: 0; font-size: 13px; }
section { background: #fff; border: 1px solid #e4e7ec; border-radius: 10px; padding: 16px 18px; margin-top: 16px; break-inside: avoid; }
h2 { font-size: 15px; margin: 0 0 2px; }
.note { margin-bottom: 8px; }
.findings { border-left: 4px solid #2563eb; }
.findings ul { margin: 4px 0 0; padding-left: 18px; }
.findings li { margin: 3px 0; overflow-wrap: anywhere; }
.groups { display: grid; grid-template-columns: repeat(3, 1fr); gap: 16px; margin-top: 18px; }
.groups h2 { color: #667085; margin-bottom: 6px; }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 8px; }
.tile { background: #fff; border: 1px solid #e4e7ec; border-radius: 10px; padding: 8px 10px; min-width: 0; break-inside: avoid; }
.tile b { display: block; font-size: 18px; white-space: nowrap; line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: #667085; font-size: 12.5px; }
.tile small { display: block; color: #667085; font-size: 12px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; }
.pair > section { min-width: 0; }
.plot { width: 100%; height: auto; display: block; }
table { width: 100%; border-collapse: collapse; font-size: 13px; }
th { text-align: left; font-weight: 600; color: #667085; border-bottom: 1px solid #e4e7ec; padding: 3px 6px; }
td { padding: 3px 6px; border-bottom: 1px solid #f2f4f7; overflow-wrap: anywhere; vertical-align: top; }
th.n, td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bar { width: 26%; vertical-align: middle; }
td.bar i { display: block; height: 10px; border-radius: 2px; background: #2563eb; min-width: 1px; }
td.bad i { background: #d9480f; }
code { font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
td small { display: block; color: #667085; }
em { color: #667085; }
footer { margin-top: 20px; }
@media (max-width: 960px) { .groups { grid-template-columns: 1fr; } }
@media (max-width: 760px) { .pair { grid-template-columns: 1fr; } }
@page { margin: 12mm; }
@media print {
  body { background: #fff; }
  main { max-width: none; padding: 0; zoom: 0.7; }
  .groups { grid-template-columns: repeat(3, 1fr); }
  .pair { grid-template-columns: 1fr 1fr; }
}
""".replace("FONT", charts.FONT)

FOOTER = "<footer>Made by penstock from the queue’s log, without payloads. This page loads nothing from anywhere.</footer>"


def render(metrics: ReportMetrics) -> str:
    """The HTML of the page."""
    name = _text(metrics.queue)
    body = "\n".join([_header(metrics), _tiles(metrics), _findings(metrics), *_sections(metrics), FOOTER])
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>{name} · queue report</title>\n<style>{CSS}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """Escape text for HTML."""
    return escape(text, quote=True)


# -- the top -----------------------------------------------------------------------------------------


def _header(metrics: ReportMetrics) -> str:
    about = f"{_covers(metrics)} Made {when(metrics.made_at)}. All times are UTC."
    return f"<header>\n<h1>Queue {_text(metrics.queue)}</h1>\n<p>{about}</p>\n</header>"


def _covers(metrics: ReportMetrics) -> str:
    asked = [f"{word} {when(at)}" for word, at in (("since", metrics.since), ("until", metrics.until)) if at is not None]
    limits = f" (asked for: {', '.join(asked)})" if asked else ""
    if metrics.first_at is None or metrics.last_at is None:
        return f"No events{limits}."
    return f"Events from {when(metrics.first_at)} to {when(metrics.last_at)}{limits}."


def _tiles(metrics: ReportMetrics) -> str:
    """Three groups of figures, of which each counts one thing: items or attempts in the time, items now."""
    seconds = metrics.span_seconds
    peak = max((one.completed for one in metrics.buckets), default=0)
    items = [
        ("produced", number(metrics.produced), rate(metrics.produced, seconds) if seconds and metrics.produced else ""),
        ("completed", number(metrics.completed), f"at most {rate(peak, metrics.bucket_seconds)}" if peak else ""),
        ("buried", number(metrics.buried), ""),
    ]
    attempts = [
        (
            "failed",
            number(metrics.failed),
            f"{share(metrics.failed, metrics.settled)} of {number(metrics.settled)}" if metrics.settled else "",
        ),
        ("waiting, median", _time(metrics.waiting, "p50"), f"p99 {_time(metrics.waiting, 'p99')}" if metrics.waiting.count else ""),
        ("handling, median", _time(metrics.handling, "p50"), f"p99 {_time(metrics.handling, 'p99')}" if metrics.handling.count else ""),
    ]
    now = [
        ("ready", number(metrics.ready), f"oldest {duration_text(metrics.age.worst)}" if metrics.ready else ""),
        ("scheduled", number(metrics.scheduled), f"next {_next(metrics)}" if metrics.scheduled else ""),
        ("dead letters", number(metrics.dead_letters), ""),
    ]
    groups = (("Items in this time", items), ("Attempts in this time", attempts), ("Items now", now))
    return f'<div class="groups">\n{chr(10).join(_tile_group(title, tiles) for title, tiles in groups)}\n</div>'


def _tile_group(title: str, tiles: Sequence[tuple[str, str, str]]) -> str:
    drawn = (f'<div class="tile"><span>{name}</span><b>{value}</b><small>{more}</small></div>' for name, value, more in tiles)
    return f'<div>\n<h2>{title}</h2>\n<div class="tiles">\n{chr(10).join(drawn)}\n</div>\n</div>'


def _next(metrics: ReportMetrics) -> str:
    """When the first scheduled item becomes ready."""
    if metrics.next_ready_at is None:
        return NOTHING
    seconds = (metrics.next_ready_at - metrics.made_at).total_seconds()
    return f"in {duration_text(seconds)}" if seconds > 0 else "now"


def _time(overall: Percentiles, rank: str) -> str:
    return duration_text(getattr(overall, rank)) if overall.count else NOTHING


def _findings(metrics: ReportMetrics) -> str:
    lines = "".join(f"<li>{_text(one)}</li>" for one in findings(metrics))
    return f'<section class="findings">\n<h2>What stands out</h2>\n<ul>{lines}</ul>\n</section>'


# -- sections ----------------------------------------------------------------------------------------


def _sections(metrics: ReportMetrics) -> Iterable[str]:
    yield _section(
        "Throughput",
        f"Items produced and completed, and attempts begun and failed, per {step(metrics.bucket_seconds)}." if metrics.buckets else "",
        charts.throughput(metrics) if metrics.buckets else _none("Nothing happened in this time."),
    )
    yield _pair(
        _times("waiting", metrics.waiting, metrics, "From ready to leased; a key that was busy counts as waiting.", "leased"),
        _times("handling", metrics.handling, metrics, "From leased to settled by its holder; expired leases are left out.", "settled"),
    )
    yield _pair(_ages(metrics), _upcoming(metrics))
    yield _attempts(metrics)
    yield _reasons(metrics)
    yield _pair(_hot_keys(metrics), _busy_keys(metrics))
    yield _pair(_partitions(metrics), _slots(metrics))
    yield _dead(metrics)


def _times(name: Literal["waiting", "handling"], overall: Percentiles, metrics: ReportMetrics, note: str, event: str) -> str:
    plot = charts.percentiles(name, metrics) + _percentile_table(overall) if overall.count else _none(f"Nothing was {event} in this time.")
    return _section(f"{name.title()} time", note, plot)


def _percentile_table(overall: Percentiles) -> str:
    cells = [number(overall.count), *(duration_text(one) for one in (overall.p50, overall.p90, overall.p99, overall.worst))]
    return _table(("overall", "p50", "p90", "p99", "longest"), [cells], right=range(5))


def _attempts(metrics: ReportMetrics) -> str:
    note = "In which attempt items were completed or buried."
    if any(one.attempt == 0 for one in metrics.attempts):
        note += " Buried in attempt 0: never leased."
    return _section(
        "Attempts", note, charts.attempts(metrics) if metrics.attempts else _none("No item was completed or buried in this time.")
    )


def _reasons(metrics: ReportMetrics) -> str:
    note = (
        f"Of {count_text(metrics.failed, 'attempt')} that failed, were retried, or whose lease expired. "
        "Reasons that differ only in numbers and ids are one; the last one is given."
    )
    if not metrics.reasons:
        return _section("Why attempts failed", "", _none("Every attempt that ended completed its item."))
    return _section("Why attempts failed", note, _reason_table(metrics.reasons, metrics.failed, metrics.distinct_reasons))


def _hot_keys(metrics: ReportMetrics) -> str:
    if not metrics.hot_keys:
        return _section("Keys with most items", "", _none("No item of this time has a key."))
    without = metrics.items - metrics.keyed_items
    note = f"{count_text(metrics.keys, 'key')} in {count_text(metrics.keyed_items, 'item')}" + (
        f"; {number(without)} more without a key." if without else "."
    )
    rows = [
        _key_row(one, one.items, metrics.hot_keys[0].items, number(one.items), share(one.items, metrics.items)) for one in metrics.hot_keys
    ]
    return _section("Keys with most items", note, _table(("key", "", "items", "of all"), rows, right=(2, 3), bars=1))


def _busy_keys(metrics: ReportMetrics) -> str:
    if not metrics.busy_keys:
        return _section("Keys with most handling time", "", _none("No time was spent on items with a key."))
    note = f"{duration_text(metrics.keyed_handling_seconds)} in all were spent on items whose key is still known."
    whole, most = metrics.keyed_handling_seconds, metrics.busy_keys[0].handling_seconds
    rows = [
        _key_row(one, one.handling_seconds, most, duration_text(one.handling_seconds), share(one.handling_seconds, whole))
        for one in metrics.busy_keys
    ]
    return _section("Keys with most handling time", note, _table(("key", "", "time", "of all"), rows, right=(2, 3), bars=1))


def _key_row(one: KeyLoad, value: float, most: float, *cells: str) -> list[str]:
    return [f"<code>{_text(one.key)}</code>" if one.key else "<em>empty key</em>", _bar(value, most), *cells]


def _partitions(metrics: ReportMetrics) -> str:
    active = sum(1 for one in metrics.partitions if one.active)
    note = f"The fullest of {count_text(active, 'active partition')} got {times(metrics.imbalance)} the mean."
    if any(not one.active for one in metrics.partitions):
        note += " Grey: retired partitions, which take no new items."
    if not metrics.produced:
        return _section("Partitions", "", _none("Nothing was produced in this time."))
    return _section("Partitions", note, charts.partitions(metrics))


def _slots(metrics: ReportMetrics) -> str:
    if not metrics.slots:
        return _section("Busiest slots", "", _none("No item of this time has a key."))
    note = f"{number(metrics.slots_used)} of 16,384 slots had items. All keys of a slot are in one partition."
    most = metrics.slots[0].items
    rows = [
        [
            str(one.slot),
            _bar(one.items, most),
            number(one.items),
            share(one.items, metrics.keyed_items),
            number(one.keys),
            str(one.partition),
        ]
        for one in metrics.slots
    ]
    return _section(
        "Busiest slots", note, _table(("slot", "", "items", "of keyed", "keys", "partition"), rows, right=(0, 2, 3, 4, 5), bars=1)
    )


def _ages(metrics: ReportMetrics) -> str:
    others = [f"{number(count)} {state}" for state, count in metrics.states.items() if state != "ready"]
    note = f"Now: {number(metrics.ready)} ready" + (f", {', '.join(others)}" if others else "") + "."
    if not metrics.ready:
        return _section("Age of the backlog", _text(note), _none("No item is ready: there is no backlog."))
    return _section("Age of the backlog", _text(note), charts.ages(metrics) + _age_line(metrics.age))


def _upcoming(metrics: ReportMetrics) -> str:
    if not metrics.upcoming or metrics.next_ready_at is None or metrics.last_ready_at is None:
        return _section("Scheduled items", "", _none("No item is scheduled."))
    note = f"Now: {count_text(metrics.scheduled, 'item')}, produced for a later time or waiting for the next attempt."
    first, last = when(metrics.next_ready_at), when(metrics.last_ready_at)
    return _section(
        "Scheduled items", note, charts.upcoming(metrics) + _table(("first ready", "last ready"), [[first, last]], right=range(2))
    )


def _age_line(age: Percentiles) -> str:
    return _table(("p50", "p90", "p99", "oldest"), [[duration_text(one) for one in (age.p50, age.p90, age.p99, age.worst)]], right=range(4))


def _dead(metrics: ReportMetrics) -> str:
    if not metrics.dead:
        return _section("Dead letters", "", _none("There are none."))
    note = f"Now: {count_text(metrics.dead_letters, 'item')} buried and not redriven."
    return _section("Dead letters", note, _reason_table(metrics.dead, metrics.dead_letters, metrics.distinct_dead))


# -- parts -------------------------------------------------------------------------------------------


def _section(title: str, note: str, content: str) -> str:
    about = f'\n<p class="note">{note}</p>' if note else ""
    return f"<section>\n<h2>{title}</h2>{about}\n{content}\n</section>"


def _pair(*sections: str) -> str:
    return f'<div class="pair">\n{chr(10).join(sections)}\n</div>'


def _none(why: str) -> str:
    return f'<p class="note">{why}</p>'


def _bar(value: float, most: float) -> str:
    return f'<i style="width:{100 * value / most if most else 0:.1f}%"></i>'


def _reason(one: ReasonCount) -> str:
    """A reason without its numbers, and the last of them as it was given if that is something else."""
    if not one.reason:
        return "<em>no reason given</em>"
    return _text(one.reason) + (f"<small>{_text(one.example)}</small>" if one.example not in ("", one.reason) else "")


def _reason_table(reasons: Sequence[ReasonCount], total: int, distinct: int) -> str:
    rows = [
        [
            _reason(one),
            _bar(one.count, reasons[0].count),
            number(one.count),
            share(one.count, total),
            when(one.last_at)[:16] if one.last_at is not None else NOTHING,
        ]
        for one in reasons
    ]
    rest = total - sum(one.count for one in reasons)
    if rest:
        rows.append([f"<em>{count_text(distinct - len(reasons), 'other reason')}</em>", "", number(rest), share(rest, total), ""])
    return _table(("reason", "", "number", "of all", "last"), rows, right=(2, 3, 4), bars=1, bad=True)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = (), bars: int = -1, bad: bool = False) -> str:
    """An HTML table; its cells are HTML."""
    numeric = set(right)

    def cell(tag: str, at: int, content: str) -> str:
        names = ["n"] if at in numeric else ["bar", *(["bad"] if bad else [])] if at == bars and tag == "td" else []
        return f"<{tag}{' class=' + chr(34) + ' '.join(names) + chr(34) if names else ''}>{content}</{tag}>"

    head = "".join(cell("th", at, one) for at, one in enumerate(headings))
    body = "\n".join(f"<tr>{''.join(cell('td', at, one) for at, one in enumerate(row))}</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
