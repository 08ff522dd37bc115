"""The report as a page.

Owns: `render`. One file with everything in it: it loads nothing, runs nothing (no script), and prints. Whatever comes from a queue (its
name, keys, reasons) is escaped here, in `_text`, and nowhere else; everything else is this module's own or a plot.
"""

from collections.abc import Iterable, Sequence
from html import escape

from penstock.spark.jobs import charts
from penstock.spark.jobs.findings import findings
from penstock.spark.jobs.report_metrics import KeyLoad, Percentiles, ReasonCount, ReportMetrics
from penstock.spark.jobs.report_text import NOTHING, count_text, duration_text, number, rate, share, step, times, when
from penstock.words.clock import SECOND

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
.tiles { display: grid; grid-template-columns: repeat(7, 1fr); gap: 10px; margin-top: 18px; }
.tile { background: #fff; border: 1px solid #e4e7ec; border-radius: 10px; padding: 10px 12px; break-inside: avoid; }
.tile b { display: block; font-size: 21px; white-space: nowrap; line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums; }
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
em { color: #667085; }
footer { margin-top: 20px; }
@media (max-width: 860px) { .tiles { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); } }
@media (max-width: 760px) { .pair { grid-template-columns: 1fr; } }
@page { margin: 12mm; }
@media print {
  body { background: #fff; }
  main { max-width: none; padding: 0; zoom: 0.7; }
  .tiles { grid-template-columns: repeat(7, 1fr); }
  .pair { grid-template-columns: 1fr 1fr; }
}
""".replace("FONT", charts.FONT)


def render(figures: ReportMetrics) -> str:
    """The whole page."""
    name = _text(figures.queue)
    body = "\n".join([_header(figures), _tiles(figures), _findings(figures), *_sections(figures), _footer(figures)])
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>{name} · queue report</title>\n<style>{CSS}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """Text as HTML that shows it."""
    return escape(text, quote=True)


# -- the top -----------------------------------------------------------------------------------------


def _header(figures: ReportMetrics) -> str:
    about = f"{_covers(figures)} Made {when(figures.made_at)}. All times are UTC."
    return f"<header>\n<h1>Queue {_text(figures.queue)}</h1>\n<p>{about}</p>\n</header>"


def _covers(figures: ReportMetrics) -> str:
    asked = [f"{word} {when(at)}" for word, at in (("since", figures.since), ("until", figures.until)) if at is not None]
    limits = f" (asked for: {', '.join(asked)})" if asked else ""
    if figures.first_at is None or figures.last_at is None:
        return f"No events{limits}."
    return f"Events from {when(figures.first_at)} to {when(figures.last_at)}{limits}."


def _tiles(figures: ReportMetrics) -> str:
    seconds = figures.span_seconds
    peak = max((one.completed for one in figures.buckets), default=0)
    tiles = [
        ("produced", number(figures.produced), rate(figures.produced, seconds) + " on average" if seconds and figures.produced else ""),
        ("completed", number(figures.completed), f"at most {rate(peak, figures.bucket_seconds)}" if peak else ""),
        (
            "not completed",
            number(figures.failed),
            f"{share(figures.failed, figures.settled)} of all attempts" if figures.settled else "",
        ),
        ("waiting, median", _time(figures.waiting, "p50"), f"p99 {_time(figures.waiting, 'p99')}" if figures.waiting.count else ""),
        ("handling, median", _time(figures.handling, "p50"), f"p99 {_time(figures.handling, 'p99')}" if figures.handling.count else ""),
        ("ready now", number(figures.ready), f"oldest {duration_text(figures.age.worst)}" if figures.ready else ""),
        (
            "dead letters now",
            number(figures.dead_letters),
            f"{count_text(figures.buried, 'item')} given up in this time" if figures.buried else "",
        ),
    ]
    drawn = (f'<div class="tile"><span>{name}</span><b>{value}</b><small>{more}</small></div>' for name, value, more in tiles)
    return f'<div class="tiles">\n{chr(10).join(drawn)}\n</div>'


def _time(spread: Percentiles, rank: str) -> str:
    return duration_text(getattr(spread, rank)) if spread.count else NOTHING


def _findings(figures: ReportMetrics) -> str:
    lines = "".join(f"<li>{_text(one)}</li>" for one in findings(figures))
    return f'<section class="findings">\n<h2>What stands out</h2>\n<ul>{lines}</ul>\n</section>'


def _footer(figures: ReportMetrics) -> str:
    return "<footer>Made by penstock from the queue’s log, without payloads. This page loads nothing from anywhere.</footer>"


# -- sections ----------------------------------------------------------------------------------------


def _sections(figures: ReportMetrics) -> Iterable[str]:
    yield _section(
        "Throughput",
        f"Items produced, leased and completed, and attempts not completed, per {step(figures.bucket_seconds)}." if figures.buckets else "",
        charts.throughput(figures) if figures.buckets else _none("Nothing happened in this time."),
    )
    yield _pair(_waiting(figures), _handling(figures))
    yield _pair(_attempts(figures), _ages(figures))
    yield _reasons(figures)
    yield _pair(_hot_keys(figures), _busy_keys(figures))
    yield _pair(_partitions(figures), _slots(figures))
    yield _dead(figures)


def _waiting(figures: ReportMetrics) -> str:
    note = "From ready to leased; a key that was busy counts as waiting."
    plot = charts.waiting(figures) + _spread_table(figures.waiting) if figures.waiting.count else _none("Nothing was leased in this time.")
    return _section("Waiting time", note, plot)


def _handling(figures: ReportMetrics) -> str:
    note = "From leased to settled by its holder; leases that ran out are left out."
    plot = (
        charts.handling(figures) + _spread_table(figures.handling) if figures.handling.count else _none("Nothing was settled in this time.")
    )
    return _section("Handling time", note, plot)


def _spread_table(spread: Percentiles) -> str:
    cells = [number(spread.count), *(duration_text(one) for one in (spread.p50, spread.p90, spread.p99, spread.worst))]
    return _table(("overall", "p50", "p90", "p99", "longest"), [cells], right=range(5))


def _attempts(figures: ReportMetrics) -> str:
    note = "In which attempt items were completed, or given up. Given up in attempt 0: nobody had tried."
    if not any(one.attempt == 0 for one in figures.attempts):
        note = "In which attempt items were completed, or given up."
    return _section(
        "Attempts", note, charts.attempts(figures) if figures.attempts else _none("No item was completed or given up in this time.")
    )


def _reasons(figures: ReportMetrics) -> str:
    note = (
        f"Of {count_text(figures.failed, 'attempt')} that failed, were put back, or whose lease ran out. Long numbers and ids are left out."
    )
    if not figures.reasons:
        return _section("Why attempts were not completed", "", _none("Every attempt that ended completed its item."))
    return _section(
        "Why attempts were not completed", note, _reason_table(figures.reasons, figures.failed, figures.distinct_reasons, bad=True)
    )


def _hot_keys(figures: ReportMetrics) -> str:
    if not figures.hot_keys:
        return _section("Keys with most items", "", _none("No item of this time has a key."))
    without = figures.items - figures.keyed_items
    note = f"{count_text(figures.keys, 'key')} in {count_text(figures.keyed_items, 'item')}" + (
        f"; {number(without)} more without a key." if without else "."
    )
    rows = [
        _key_row(one, one.items, figures.hot_keys[0].items, number(one.items), share(one.items, figures.items)) for one in figures.hot_keys
    ]
    return _section("Keys with most items", note, _table(("key", "", "items", "of all"), rows, right=(2, 3), bars=1))


def _busy_keys(figures: ReportMetrics) -> str:
    if not figures.busy_keys:
        return _section("Keys with most handling time", "", _none("No time was spent on items with a key."))
    note = f"{duration_text(figures.keyed_handling_seconds)} in all were spent on items whose key is still known."
    whole, most = figures.keyed_handling_seconds, figures.busy_keys[0].handling_seconds
    rows = [
        _key_row(one, one.handling_seconds, most, duration_text(one.handling_seconds), share(one.handling_seconds, whole))
        for one in figures.busy_keys
    ]
    return _section("Keys with most handling time", note, _table(("key", "", "time", "of all"), rows, right=(2, 3), bars=1))


def _key_row(one: KeyLoad, value: float, most: float, *cells: str) -> list[str]:
    return [f"<code>{_text(one.key)}</code>" if one.key else "<em>empty key</em>", _bar(value, most), *cells]


def _partitions(figures: ReportMetrics) -> str:
    active = sum(1 for one in figures.partitions if one.active)
    note = f"The fullest of {count_text(active, 'active partition')} got {times(figures.imbalance)} the mean."
    if any(not one.active for one in figures.partitions):
        note += " Grey: partitions that take no more items."
    if not figures.produced:
        return _section("Partitions", "", _none("Nothing was produced in this time."))
    return _section("Partitions", note, charts.partitions(figures))


def _slots(figures: ReportMetrics) -> str:
    if not figures.slots:
        return _section("Busiest slots", "", _none("No item of this time has a key."))
    note = f"{number(figures.slots_used)} of 16,384 slots had items. A slot lives in one partition, as a whole."
    most = figures.slots[0].items
    rows = [
        [
            str(one.slot),
            _bar(one.items, most),
            number(one.items),
            share(one.items, figures.keyed_items),
            number(one.keys),
            str(one.partition),
        ]
        for one in figures.slots
    ]
    return _section(
        "Busiest slots", note, _table(("slot", "", "items", "of keyed", "keys", "partition"), rows, right=(0, 2, 3, 4, 5), bars=1)
    )


def _ages(figures: ReportMetrics) -> str:
    others = [f"{number(count)} {state}" for state, count in figures.states.items() if state != "ready"]
    note = f"Now: {number(figures.ready)} ready" + (f", {', '.join(others)}" if others else "") + "."
    if not figures.ready:
        return _section("Age of the backlog", _text(note), _none("No item is ready: there is no backlog."))
    return _section("Age of the backlog", _text(note), charts.ages(figures) + _age_line(figures.age))


def _age_line(age: Percentiles) -> str:
    return _table(("p50", "p90", "p99", "oldest"), [[duration_text(one) for one in (age.p50, age.p90, age.p99, age.worst)]], right=range(4))


def _dead(figures: ReportMetrics) -> str:
    if not figures.dead:
        return _section("Dead letters", "", _none("There are none."))
    note = f"Now: {count_text(figures.dead_letters, 'item')} given up and not redriven."
    return _section("Dead letters", note, _reason_table(figures.dead, figures.dead_letters, figures.distinct_dead, bad=True))


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


def _reason_table(reasons: Sequence[ReasonCount], total: int, distinct: int, *, bad: bool) -> str:
    rows = [
        [
            _text(one.reason) if one.reason else "<em>no reason given</em>",
            _bar(one.count, reasons[0].count),
            number(one.count),
            share(one.count, total),
            when(one.last_at)[:16] if one.last_at >= SECOND else NOTHING,
        ]
        for one in reasons
    ]
    rest = total - sum(one.count for one in reasons)
    if rest:
        rows.append([f"<em>{count_text(distinct - len(reasons), 'other reason')}</em>", "", number(rest), share(rest, total), ""])
    return _table(("reason", "", "number", "of all", "last"), rows, right=(2, 3, 4), bars=1, bad=bad)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = (), bars: int = -1, bad: bool = False) -> str:
    """Cells are HTML."""
    numeric = set(right)

    def cell(tag: str, at: int, content: str) -> str:
        names = ["n"] if at in numeric else ["bar", *(["bad"] if bad else [])] if at == bars and tag == "td" else []
        return f"<{tag}{' class=' + chr(34) + ' '.join(names) + chr(34) if names else ''}>{content}</{tag}>"

    head = "".join(cell("th", at, one) for at, one in enumerate(headings))
    body = "\n".join(f"<tr>{''.join(cell('td', at, one) for at, one in enumerate(row))}</tr>" for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
