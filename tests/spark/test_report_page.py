"""The page of a report: valid HTML that loads nothing, and its sentences; from metrics made by hand, without Spark."""

import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import msgspec
import pytest

from penstock.spark.jobs import charts, page
from penstock.spark.jobs.findings import NONE, findings
from penstock.spark.jobs.report_metrics import (
    AGES,
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
)
from penstock.spark.jobs.report_queries import MOST_BUCKETS, STEPS, step_for
from penstock.spark.jobs.report_text import duration_text, rate, share, step
from penstock.words.clock import DAY, HOUR, SECOND

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TIMES = Percentiles(1_000, 0.05, 0.2, 0.5, 2.0)
HOSTILE = "</code><script>alert('x')</script><img src=\"https://evil.example/x.png\" onerror=alert(1)>&amp;"
QUIET = ReportMetrics(
    queue="orders",
    made_at=NOW + timedelta(hours=1),
    first_at=NOW,
    last_at=NOW + timedelta(minutes=19),
    produced=1_000,
    leased=1_000,
    completed=1_000,
    bucket_seconds=60.0,
    buckets=[Bucket(NOW + timedelta(minutes=number), 50, 50, 50, 0, TIMES, TIMES) for number in range(20)],
    waiting=TIMES,
    handling=TIMES,
    attempts=[AttemptCount(1, 1_000)],
    items=1_000,
    keyed_items=1_000,
    keys=100,
    hot_keys=[KeyLoad(f"key-{number}", 12, 0.6) for number in range(10)],
    busy_keys=[KeyLoad(f"key-{number}", 12, 0.6) for number in range(10)],
    keyed_handling_seconds=50.0,
    slots=[SlotLoad(number, number % 4, 12, 1) for number in range(10)],
    slots_used=100,
    partitions=[PartitionLoad(number, 250) for number in range(4)],
)
"""The metrics of a queue without findings."""


def but(**changes: object) -> ReportMetrics:
    return msgspec.structs.replace(QUIET, **changes)


EMPTY = ReportMetrics(queue="orders", made_at=NOW, partitions=[PartitionLoad(0, 0)])
ONE_EVENT = ReportMetrics(
    queue="orders",
    made_at=NOW,
    first_at=NOW,
    last_at=NOW,
    produced=1,
    bucket_seconds=0.1,
    buckets=[Bucket(NOW, 1)],
    items=1,
    partitions=[PartitionLoad(0, 1)],
    states={"ready": 1},
    age=Percentiles(1),
    ages=[SpanCount(start, stop, int(not start)) for start, stop in zip((0, *AGES), (*AGES, None), strict=True)],
)
BAD = but(
    failed=300,
    leases_expired=20,
    buried=30,
    reasons=[ReasonCount(HOSTILE, 200, NOW), ReasonCount("", 50, NOW), ReasonCount("timeout after … s", 30, NOW, "timeout after 5 s")],
    distinct_reasons=7,
    attempts=[AttemptCount(0, 0, 3), AttemptCount(1, 900, 2), AttemptCount(40, 1, 25)],
    hot_keys=[KeyLoad(key_text(HOSTILE.encode()), 400, 9.0), KeyLoad("", 20, 1.0), KeyLoad(key_text(b"\xff\x00"), 1, 0.0)],
    busy_keys=[KeyLoad("slow", 1, 30.0)],
    partitions=[PartitionLoad(0, 600), *(PartitionLoad(number, 100) for number in (1, 2, 3)), PartitionLoad(4, 100, active=False)],
    slots=[SlotLoad(7, 0, 400, 1)],
    states={"ready": 3, "leased": 1, "scheduled": 2},
    upcoming=[SpanCount(start, stop, int(start in (10, 21_600))) for start, stop in zip((0, *AGES), (*AGES, None), strict=True)],
    next_ready_at=NOW + timedelta(hours=1, seconds=30),
    last_ready_at=NOW + timedelta(hours=25),
    age=Percentiles(3, 1.0, 10 * DAY / SECOND, 10 * DAY / SECOND, 10 * DAY / SECOND),
    ages=[SpanCount(start, stop, int(stop is None or not start)) for start, stop in zip((0, *AGES), (*AGES, None), strict=True)],
    dead=[ReasonCount(HOSTILE, 25, NOW), ReasonCount("expired", 5)],
    distinct_dead=2,
    dead_letters=30,
    waiting=Percentiles(1_000, 0.1, 1.0, 3.0, 9.0),
    items_before_log=12,
    leases_without_wait=3,
)
PAGES = {"quiet": QUIET, "empty": EMPTY, "one event": ONE_EVENT, "bad": BAD}


class CheckedPage(HTMLParser):
    """Parses a page, checks that its tags are closed in order, and remembers tags, ids, attributes and texts."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen(tag, attrs)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.open[-3:], self.getpos())

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def seen(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]


@pytest.fixture(scope="module", params=list(PAGES))
def metrics(request: pytest.FixtureRequest) -> ReportMetrics:
    return PAGES[request.param]


@pytest.fixture(scope="module")
def html(metrics: ReportMetrics) -> str:
    return page.render(metrics)


def test_the_page_is_valid_html(html: str) -> None:
    found = CheckedPage(html)
    assert html.startswith("<!DOCTYPE html>")
    assert len(found.ids) == len(set(found.ids))
    assert {"h1", "h2", "section"} <= found.tags


def test_the_page_loads_and_runs_nothing(html: str) -> None:
    found = CheckedPage(html)
    assert not found.tags & {"script", "link", "img", "iframe", "object", "embed", "video", "base", "form", "a", "image", "foreignobject"}
    assert [one for one in found.attributes if one[0].startswith("on") or one[0] in ("src", "srcset", "action")] == []
    addresses = [value for name, value in found.attributes if name.endswith("href")]
    assert all(value.startswith("#") and value[1:] in found.ids for value in addresses)
    inner = re.findall(r"url\(([^)]*)\)", html)
    assert all(value.strip("'\"")[0] == "#" and value.strip("'\"")[1:] in found.ids for value in inner)
    styles = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert not any(word in style for style in styles for word in ("@import", "http", "url(//"))
    visible = "".join(found.texts)
    assert html.count("http://") == visible.count("http://")  # addresses occur only in visible text
    assert html.count("https://") == visible.count("https://")


def test_text_from_a_queue_is_escaped() -> None:
    text = page.render(BAD)
    assert HOSTILE not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in text
    assert HOSTILE in "".join(CheckedPage(text).texts)  # and can be read as it is
    assert "0xff00" in text
    assert "empty key" in text


@pytest.mark.parametrize("queue", ["<b>x</b>", "a&b"])
def test_the_name_of_a_queue_is_escaped(queue: str) -> None:
    found = CheckedPage(page.render(but(queue=queue)))
    assert f"Queue {queue}" in "".join(found.texts)


def test_a_page_is_the_same_each_time() -> None:
    assert page.render(BAD) == page.render(BAD)


def test_text_in_plots_stays_text() -> None:
    assert ">per min</text>" in charts.throughput(QUIET)
    assert ">items produced</text>" in charts.throughput(QUIET)
    assert "DejaVu" not in charts.throughput(QUIET)


def test_each_span_has_a_name() -> None:
    assert len(charts.SPAN_NAMES) == len(AGES) + 1


def tiles(metrics: ReportMetrics) -> dict[str, list[str]]:
    """The names and numbers of the tiles, by the heading of their group."""
    groups = re.findall(r'<h2>([^<]*)</h2>\n<div class="tiles">(.*?)\n</div>', page.render(metrics), re.DOTALL)
    found = {title: re.findall(r"<span>(.*?)</span><b>(.*?)</b><small>(.*?)</small>", inner) for title, inner in groups}
    return {title: [" ".join(part for part in parts if part) for parts in drawn] for title, drawn in found.items()}


def test_a_group_of_tiles_counts_items_or_attempts() -> None:
    assert tiles(BAD) == {
        "Items in this time": ["produced 1,000 53 / min", "completed 1,000 at most 50 / min", "buried 30"],
        "Attempts in this time": ["failed 300 23 % of 1,300", "waiting, median 100 ms p99 3 s", "handling, median 50 ms p99 500 ms"],
        "Items now": ["ready 3 oldest 10 d", "scheduled 2 next in 30 s", "dead letters 30"],
    }
    assert tiles(EMPTY)["Attempts in this time"] == ["failed 0", "waiting, median –", "handling, median –"]


def test_scheduled_items_and_when_they_become_ready() -> None:
    text = page.render(BAD)
    assert "Now: 2 items, produced for a later time" in text
    assert "2026-01-01 01:00:30" in text and "2026-01-02 01:00:00" in text
    assert ">ready in</text>" in text
    assert "No item is scheduled." in page.render(QUIET)


def test_a_reason_has_its_last_example() -> None:
    assert "timeout after … s<small>timeout after 5 s</small>" in page.render(BAD)


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (0.4, ["23:59:58.0\n31 Dec 2025", "23:59:58.1", "23:59:58.2", "23:59:58.3", "23:59:58.4"]),
        (5, ["23:59:58\n31 Dec 2025", "23:59:59", "00:00:00\n1 Jan 2026", "00:00:01", "00:00:02", "00:00:03"]),
        (1_200, ["00:00\n1 Jan 2026", "00:05", "00:10", "00:15"]),
        (40_000, ["00:00\n1 Jan 2026", "02:00", "04:00", "06:00", "08:00", "10:00"]),
        (400_000, ["1 Jan 2026", "2 Jan 2026", "3 Jan 2026", "4 Jan 2026", "5 Jan 2026"]),
    ],
)
def test_an_axis_has_whole_times_of_day_and_dates(seconds: float, labels: list[str]) -> None:
    first = NOW - timedelta(seconds=2)
    assert [label for _, label in charts.time_ticks(first, first + timedelta(seconds=seconds))] == labels


@pytest.mark.parametrize("seconds", [0.001, 0.1, 7, 59, 3_599, 86_401, 6e6, 4e8])
@pytest.mark.parametrize("most", [4, 8])
def test_an_axis_has_few_times(seconds: float, most: int) -> None:
    last = NOW + timedelta(seconds=seconds)
    times = [at for at, _ in charts.time_ticks(NOW, last, most)]
    assert 1 <= len(times) <= most
    assert times[0] >= NOW and times[-1] <= last


@pytest.mark.parametrize("numbers", [[12], [11, 40], [10], [0], [1, 12]])
def test_attempts_above_the_last_bar(numbers: list[int]) -> None:
    text = charts.attempts(but(attempts=[AttemptCount(number, 0, 1) for number in numbers]))
    assert ("10+" in text) == (max(numbers) > 10)


@pytest.mark.parametrize("count", [1, 2, 3, 60])
@pytest.mark.parametrize("empty", [False, True])
def test_plots_of_any_length(count: int, empty: bool) -> None:
    times = Percentiles() if empty else TIMES
    buckets = [Bucket(NOW + timedelta(seconds=number), 1, 1, 1, 0, times, times) for number in range(count)]
    CheckedPage(page.render(but(buckets=buckets, bucket_seconds=1.0)))


# -- sentences ---------------------------------------------------------------------------------------


def test_a_quiet_queue_has_no_findings() -> None:
    assert findings(QUIET) == [NONE]
    assert findings(ONE_EVENT) == [NONE]


def test_the_finding_of_an_empty_queue() -> None:
    assert findings(EMPTY) == ["The log of this queue has no events."]
    assert findings(msgspec.structs.replace(EMPTY, since=NOW - timedelta(seconds=1))) == ["Nothing happened in this time."]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dead_letters": 1, "dead": [ReasonCount("", 1)], "distinct_dead": 1}, "1 item is a dead letter, without a reason given."),
        (
            {"dead_letters": 10, "dead": [ReasonCount("x", 8), ReasonCount("y", 2)], "distinct_dead": 2},
            "10 items are dead letters, 80 % of them because of “x”.",
        ),
        (
            {"failed": 250, "reasons": [ReasonCount("HTTP 503", 200)], "distinct_reasons": 3},
            "20 % of all attempts failed or were retried; most often (80 %) because of “HTTP 503”.",
        ),
        ({"leases_expired": 20}, "20 leases expired (2 % of all attempts): handlers died, or took longer than the lease timeout."),
        ({"states": {"ready": 9}, "age": Percentiles(9, 1, 1, 1, 7_200)}, "The oldest of 9 ready items has been ready for 2 h."),
        (
            {"states": {"ready": 90}, "buckets": [msgspec.structs.replace(one, completed=30) for one in QUIET.buckets]},
            "In the last 5 min of the report 250 items were produced and 150 completed: the backlog grows.",
        ),
        ({"waiting": Percentiles(1_000, 0.1, 1, 3, 9)}, "1 in 100 leases came after a wait of 3 s or more, 30 × the median of 100 ms."),
        ({"handling": Percentiles(1_000, 0.01, 1, 3, 9)}, "1 in 100 attempts took 3 s or more, 300 × the median of 10 ms."),
        (
            {"hot_keys": [KeyLoad("big", 400, 1.0)]},
            "One key, “big”, has 40 % of all items; items of one key are handled one at a time, however many workers there are.",
        ),
        ({"busy_keys": [KeyLoad("slow", 1, 25.0)]}, "50 % of all handling time went into one key, “slow”."),
        (
            {"partitions": [PartitionLoad(0, 700), *(PartitionLoad(number, 100) for number in (1, 2, 3))]},
            "Partition 0 got 2.8 × as many items as a partition does on average.",
        ),
    ],
)
def test_findings(changes: dict[str, object], said: str) -> None:
    assert findings(but(**changes)) == [said]


def test_the_finding_that_retention_removed_events() -> None:
    removed = "Retention has removed the first events of 12 items: the report covers older items in part or not at all"
    assert findings(but(items_before_log=12)) == [NONE, f"{removed}."]
    assert findings(but(items_before_log=12, leases_without_wait=3)) == [NONE, f"{removed}, and the waiting time of 3 leases is unknown."]


def test_a_few_items_are_no_finding() -> None:
    few = but(
        completed=9, failed=9, leases_expired=9, items=9, produced=9, waiting=Percentiles(9, 0.1, 9, 9, 9), reasons=[ReasonCount("x", 9)]
    )
    assert findings(few) == [NONE]


# -- words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (3.5e-4, "350 µs"),
        (0.0125, "12.5 ms"),
        (1.5, "1.5 s"),
        (59.96, "1 min"),
        (200, "3 min 20 s"),
        (7_300, "2 h 1 min"),
        (2e5, "2 d 7 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_shares_are_never_rounded_to_all_or_nothing() -> None:
    shares = [share(1, 3), share(1, 5_000), share(9_999, 10_000), share(1, 1), share(0, 4), share(1, 0)]
    assert shares == ["33 %", "< 0.1 %", "> 99.9 %", "100 %", "0 %", "–"]


def test_rates_and_steps() -> None:
    assert [rate(100, 1), rate(5, 2), rate(1, 100)] == ["100 / s", "2.5 / s", "36 / h"]
    assert [step(seconds) for seconds in (0.1, 1, 300, 3_600)] == ["100 ms", "s", "5 min", "h"]


def test_keys_are_one_printable_line() -> None:
    keys = [b"plain", "ключ".encode(), b"\xff\x01", b"a\nb\x1b[0m", b"x" * 200]
    assert [key_text(key) for key in keys] == ["plain", "ключ", "0xff01", "a\\nb\\x1b[0m", "x" * 79 + "…"]


@pytest.mark.parametrize("span", [0, 1, SECOND, 59 * SECOND, HOUR, DAY, 400 * DAY, 20_000 * DAY])
def test_any_time_has_at_most_the_maximum_of_steps(span: int) -> None:
    assert span // step_for(span) <= MOST_BUCKETS
    assert step_for(span) in STEPS or step_for(span) % DAY == 0
