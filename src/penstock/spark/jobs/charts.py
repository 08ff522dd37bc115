"""The plots of a report, as SVG to embed in the page.

Owns: the drawing and the colours. Plots contain no text from users (keys and reasons are in the page's tables), so
nothing here needs escaping or special fonts. An SVG refers to nothing outside itself; its text stays text, in the
page's font; its ids are unique in the page. matplotlib is imported when the first plot is drawn.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from math import ceil, floor
from typing import TYPE_CHECKING, Any, Literal

from penstock.spark.jobs.report_metrics import Percentiles, ReportMetrics, SpanCount
from penstock.spark.jobs.report_text import duration_text, step
from penstock.words.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, GREEN, RED, GREY, INK, FAINT = "#2563eb", "#0f9d76", "#d9480f", "#98a2b3", "#344054", "#e4e7ec"
RANKS = {"p99": ("#1e3a8a", 3.0), "p90": ("#4d93fb", 1.8), "p50": ("#a9ccfe", 1.2)}
"""Colour and width of each percentile. Lines may coincide; the thinner one is drawn over the thicker."""
DASHED = (0, (4, 2))
THROUGHPUT_LINES: tuple[tuple[str, str, str, Any], ...] = (
    ("produced", "items produced", BLUE, "-"),
    ("completed", "items completed", GREEN, "-"),
    ("leased", "attempts begun", GREY, DASHED),
    ("failed", "attempts failed", RED, DASHED),
)
"""The lines of the throughput: attribute of a bucket, label, colour, style. Lines of attempts are dashed."""
WIDE, HALF = 980, 480
"""Widths of plots, in points."""
HEIGHT = 240
FEW_POINTS = 40
"""Up to this many points of a line get markers."""
SHORTEST_SECONDS = 0.001
"""Shorter times are drawn as this: the axis is logarithmic."""
MOST_ATTEMPTS = 10
SPAN_NAMES = ("< 1\ns", "1–10\ns", "10–60\ns", "1–10\nmin", "10–60\nmin", "1–6\nh", "6–24\nh", "1–7\nd", "> 7\nd")
"""The labels of the spans between report_metrics.AGES."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_DURATION_TICKS = (0.001, 0.01, 0.1, 1, 10, 60, 600, 3_600, 6 * 3_600, 86_400, 7 * 86_400, 30 * 86_400, 365 * 86_400)
TIME_LABELS = 8
"""The most times on the axis of a wide plot."""
_TIME_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400)
"""The possible seconds between two ticks of a time axis; longer ones are whole days."""
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 3,
}


def require_matplotlib() -> None:
    """InvalidRequest if matplotlib is not installed. Called before Spark starts to compute."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidRequest("the plots of a report need matplotlib, which is not installed; run pip install 'penstock[spark]'") from error


# -- over time ---------------------------------------------------------------------------------------


def throughput(metrics: ReportMetrics) -> str:
    """Items produced and completed, and attempts begun and failed, per time step."""
    with _plot("throughput", WIDE, HEIGHT) as (axes, svg):
        for name, label, colour, line in THROUGHPUT_LINES:
            counts = [getattr(one, name) for one in metrics.buckets]
            if name != "failed" or any(counts):
                axes.plot(_times(metrics), counts, linestyle=line, color=colour, label=label, marker="o" if len(counts) <= 3 else "")
        axes.set_ylabel(f"per {step(metrics.bucket_seconds)}")
        _counts_from_zero(axes)
        _dates(axes, metrics, TIME_LABELS)
        _legend(axes)
        return svg()


def percentiles(name: Literal["waiting", "handling"], metrics: ReportMetrics) -> str:
    """Percentiles of the waiting or handling time, per time step."""
    with _plot(name, HALF, HEIGHT) as (axes, svg):
        found: list[Percentiles] = [getattr(one, name) for one in metrics.buckets]
        for rank, (colour, width) in RANKS.items():
            seconds = [max(getattr(one, rank), SHORTEST_SECONDS) if one.count else float("nan") for one in found]
            axes.plot(_times(metrics), seconds, color=colour, linewidth=width, label=rank, **_marks([one.count for one in found]))
        axes.set_yscale("log")
        _duration_ticks(axes, found)
        _dates(axes, metrics, TIME_LABELS // 2)
        _legend(axes)
        return svg()


# -- distributions -----------------------------------------------------------------------------------


def attempts(metrics: ReportMetrics) -> str:
    """In which attempt items were completed or buried. Attempts above MOST_ATTEMPTS share one bar."""
    numbers = [one.attempt for one in metrics.attempts]
    first = min(*numbers, MOST_ATTEMPTS)
    names = [str(number) for number in range(first, min(max(numbers), MOST_ATTEMPTS) + 1)]
    if max(numbers) > MOST_ATTEMPTS:
        names[-1] += "+"
    completed, buried = [0] * len(names), [0] * len(names)
    for one in metrics.attempts:
        at = min(one.attempt, MOST_ATTEMPTS) - first
        completed[at] += one.completed
        buried[at] += one.buried
    with _plot("attempts", WIDE, HEIGHT) as (axes, svg):
        axes.bar(names, completed, 0.7, color=GREEN, label="completed")
        axes.bar(names, buried, 0.7, bottom=completed, color=RED, label="buried")
        _bar_labels(axes, names, [sum(both) for both in zip(completed, buried, strict=True)], buried)
        axes.set_xlabel("attempt")
        axes.set_ylabel("items")
        _counts_from_zero(axes)
        _legend(axes)
        return svg()


def ages(metrics: ReportMetrics) -> str:
    """How many items have been ready for how long."""
    return _by_span("ages", metrics.ages, "ready items", "ready for")


def upcoming(metrics: ReportMetrics) -> str:
    """How many scheduled items become ready in how long."""
    return _by_span("upcoming", metrics.upcoming, "scheduled items", "ready in")


def partitions(metrics: ReportMetrics) -> str:
    """Items produced into each partition, and their mean."""
    loads = metrics.partitions
    active = [one.items for one in loads if one.active]
    with _plot("partitions", HALF, HEIGHT) as (axes, svg):
        positions = range(len(loads))
        axes.bar(positions, [one.items for one in loads], 0.75, color=[BLUE if one.active else GREY for one in loads])
        if len(loads) <= 16:
            axes.set_xticks([*positions], [str(one.partition) for one in loads])
            _bar_labels(axes, positions, [one.items for one in loads])
        if len(active) > 1:
            axes.axhline(
                sum(active) / len(active), color=INK, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0.9, label="mean of active partitions"
            )
            _legend(axes)
        axes.set_xlabel("partition")
        axes.set_ylabel("items")
        _counts_from_zero(axes)
        return svg()


# -- parts -------------------------------------------------------------------------------------------


def _by_span(name: str, spans: Sequence[SpanCount], items: str, label: str) -> str:
    last = max(index for index, one in enumerate(spans) if one.items)
    names, counts = SPAN_NAMES[: last + 1], [one.items for one in spans[: last + 1]]
    with _plot(name, HALF, HEIGHT) as (axes, svg):
        axes.bar(names, counts, 0.8, color=BLUE)
        _bar_labels(axes, names, counts)
        axes.set_xlabel(label)
        axes.set_ylabel(items)
        _counts_from_zero(axes)
        return svg()


def _times(metrics: ReportMetrics) -> list[Any]:
    return [one.at for one in metrics.buckets]


def _marks(counts: Sequence[int]) -> dict[str, Any]:
    """Markers if there are few points: a point without neighbours would draw no line."""
    return {"marker": "o"} if sum(1 for one in counts if one) <= FEW_POINTS else {}


def _dates(axes: "Axes", metrics: ReportMetrics, most: int) -> None:
    """Label the time axis with at most so many times."""
    first, last = metrics.buckets[0].at, metrics.buckets[-1].at
    if first == last:  # one point gives no scale
        around = timedelta(seconds=2 * metrics.bucket_seconds)
        first, last = first - around, last + around
        axes.set_xlim(first, last)  # type: ignore[arg-type]
    times, labels = zip(*time_ticks(first, last, most), strict=True)
    axes.set_xticks(times, labels)


def time_ticks(first: datetime, last: datetime, most: int = TIME_LABELS) -> list[tuple[datetime, str]]:
    """Round times from `first` to `last`, and their labels: a time of day, and the date where it begins or changes."""
    begin, end = first.timestamp(), last.timestamp()
    days = int((end - begin) // (86_400 * most) + 1)
    apart = next((one for one in _TIME_STEPS if (end - begin) / one < most), 86_400 * days)
    numbers = range(ceil(round(begin / apart, 6)), floor(round(end / apart, 6)) + 1)
    times = [datetime.fromtimestamp(round(number * apart, 6), UTC) for number in numbers] or [first]
    found, date = [], ""
    for at in times:
        before, date = date, f"{at.day} {at:%b %Y}"
        clock = f"{at:%H:%M}" if apart >= 60 else f"{at:%H:%M:%S}" if apart >= 1 else f"{at:%H:%M:%S.%f}"[:-5]
        found.append((at, date if apart >= 86_400 else clock if date == before else f"{clock}\n{date}"))
    return found


def _counts_from_zero(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _duration_ticks(axes: "Axes", found: Sequence[Percentiles]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    known = [one for one in found if one.count]
    low = max(min((one.p50 for one in known), default=1.0), SHORTEST_SECONDS)
    high = max([*(one.p99 for one in known), low])
    begin = max((one for one in _DURATION_TICKS if one <= low), default=_DURATION_TICKS[0])
    end = min((one for one in _DURATION_TICKS if one > high), default=high * 2)
    axes.set_ylim(begin * 0.9, end * 1.1)
    axes.yaxis.set_major_locator(FixedLocator([one for one in _DURATION_TICKS if begin <= one <= end]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: duration_text(value) if value > SHORTEST_SECONDS else f"≤ {duration_text(value)}")
    )
    axes.yaxis.set_minor_locator(NullLocator())


def _bar_labels(axes: "Axes", positions: Sequence[Any], counts: Sequence[int], buried: Sequence[int] = ()) -> None:
    """Write above each bar its number, and how many of these items were buried."""
    for position, count, bad in zip_longest(positions, counts, buried, fillvalue=0):
        if count:
            axes.annotate(
                f"{count:,}" + (f"\n({bad:,} buried)" if bad else ""),
                (position, count),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=9 if len(positions) <= 10 else 7,
            )


def _legend(axes: "Axes") -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2, handlelength=1.4, columnspacing=1.4)


@contextmanager
def _plot(name: str, width: int, height: int) -> Iterator[tuple["Axes", Callable[[], str]]]:
    """Axes to draw on, and a function that gives the SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        yield axes, lambda: _svg(figure, name)


def _svg(figure: "Figure", name: str) -> str:
    """The SVG element alone: without prolog, metadata and addresses."""
    whole = io.StringIO()
    figure.savefig(whole, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = whole.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib gives every SVG a viewBox"
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", rest)
    rest = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", FONT, rest)
    return f'<svg class="plot" role="img" aria-label="{name}" {box[0]}>{rest}'.rstrip()
