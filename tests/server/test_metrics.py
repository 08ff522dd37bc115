"""The metrics page: what Prometheus reads is what the broker and the server did, with a bounded number of series."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

import penstock
from penstock.api.homes import AsyncHome
from penstock.operations import ReadMetrics
from penstock.reports import BrokerMetrics
from penstock.server.metric_families import FAMILIES
from penstock.server.metrics import MetricsPage, MetricsSettings
from penstock.server.server_meter import ServerMeter
from penstock.words.errors import AccessDenied, BrokerClosed
from tests.server.scraped import OPEN_METRICS, Scrape, busy_page

FORBIDDEN = {"key", "item", "item_id", "consumer", "session", "client", "worker"}


def page_of(settings: MetricsSettings | None = None) -> MetricsPage:
    return MetricsPage(ServerMeter(), "1.2.3", settings)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Scrape:
    return Scrape(busy_page(tmp_path_factory.mktemp("busy")))


# -- format ------------------------------------------------------------------------------------------------


def test_every_family_is_exposed_with_its_type_help_and_labels(busy: Scrape) -> None:
    found = {one.name: one for one in busy.families}
    for family in FAMILIES:
        one = found[family.name.removesuffix("_total") if family.kind == "counter" else family.name]
        assert (one.type, one.documentation) == (family.kind, family.help)
        for sample in one.samples:
            assert set(sample.labels) - {"le"} == set(family.labels)


def test_no_label_is_about_a_single_item_or_caller() -> None:
    assert [one.name for one in FAMILIES if FORBIDDEN & set(one.labels)] == []


def test_names_follow_the_conventions() -> None:
    for one in FAMILIES:
        assert one.name.startswith("penstock_")
        assert one.name.endswith("_total") == (one.kind == "counter"), one.name
        assert one.kind != "histogram" or one.name.endswith("_duration_seconds")
        assert not one.help.endswith(".") and len(one.help) > 5
    assert len({one.name for one in FAMILIES}) == len(FAMILIES)


def test_both_formats_have_the_same_samples(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("q").produce("a")
        found, page = broker.metrics(), page_of()
    text, open_metrics = page.render(found), page.render(found, OPEN_METRICS)
    assert text.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert open_metrics.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert open_metrics.body.endswith(b"# EOF\n")

    def ours(one: Scrape) -> dict[object, float]:
        return {key: value for key, value in one.values.items() if key[0].startswith("penstock")}

    assert ours(Scrape(text)) == ours(Scrape(open_metrics))


def test_a_label_may_hold_any_character() -> None:
    meter = ServerMeter(['/a"b\\c\nd'])
    meter.request_begun()
    meter.request_answered('/a"b\\c\nd', 200, 1, 0, 0)
    for accept in ("", OPEN_METRICS):
        found = Scrape(MetricsPage(meter, "1").render(None, accept))
        assert found.value("penstock_http_requests_total", path='/a"b\\c\nd', status="200") == 1


def test_a_histogram_is_cumulative_and_whole(busy: Scrape) -> None:
    histograms = [family for family in busy.families if family.type == "histogram"]
    assert len(histograms) == sum(one.kind == "histogram" for one in FAMILIES)
    for family in histograms:
        series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                rest = frozenset((name, value) for name, value in sample.labels.items() if name != "le")
                series.setdefault(rest, []).append((float(sample.labels["le"]), sample.value))
        for labels, buckets in series.items():
            assert [bound for bound, _ in buckets] == sorted(bound for bound, _ in buckets) and buckets[-1][0] == float("inf")
            assert [count for _, count in buckets] == sorted(count for _, count in buckets)
            assert buckets[-1][1] == busy.value(f"{family.name}_count", **dict(labels))


# -- values ------------------------------------------------------------------------------------------------


def test_the_values_are_what_was_done(busy: Scrape) -> None:
    assert busy.value("penstock_up") == 1
    assert busy.total("penstock_items_produced_total", queue="orders") == 20
    assert busy.total("penstock_items_leased_total", queue="orders") == 6
    assert busy.total("penstock_items_completed_total", queue="orders") == 3
    assert busy.total("penstock_items_retried_total") == 1
    assert busy.total("penstock_items_buried_total") == busy.total("penstock_items_buried_total", cause="consumer") == 1
    assert busy.total("penstock_items", state="ready") == 15
    assert busy.total("penstock_items", state="leased") == 1
    assert busy.total("penstock_items", state="buried") == 1
    assert busy.value("penstock_requests_total", queue="orders", verb="produce") == 20
    assert busy.value("penstock_request_duration_seconds_count", queue="orders", verb="produce") == 20
    assert busy.value("penstock_lease_duration_seconds_count", queue="orders", outcome="completed") == 3
    assert busy.value("penstock_request_errors_total", queue="orders", code="lease_lost") == 1
    assert busy.value("penstock_partitions", queue="orders", status="active") == 2
    assert busy.value("penstock_partitions", queue="orders", status="failing") == 0
    assert busy.total("penstock_sync_duration_seconds_count") >= 20
    assert busy.total("penstock_log_bytes") == pytest.approx(busy.total("penstock_log_written_bytes_total"), rel=0.2)
    assert busy.value("penstock_disk_free_bytes", root="0") > 0
    assert busy.total("penstock_build_info", version=penstock.__version__) == 1


def test_partitions_differ(busy: Scrape) -> None:
    each = [busy.value("penstock_items_produced_total", queue="orders", partition=number) for number in ("0", "1")]
    assert sum(each) == 20 and all(each)


def test_counters_are_there_before_anything_happened(tmp_path: Path) -> None:
    """A rate needs the first zero: without it the first burial would not be seen."""
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("q")
        found = Scrape(page_of().render(broker.metrics()))
    for cause in ("consumer", "attempts", "ttl"):
        assert found.value("penstock_items_buried_total", queue="q", partition="0", cause=cause) == 0
    assert found.value("penstock_items_lease_expired_total", queue="q", partition="0") == 0


def test_the_server_counts_requests_by_route(busy: Scrape) -> None:
    assert busy.value("penstock_http_requests_total", path="/v1/call", status="200") == 1
    assert busy.value("penstock_http_requests_total", path="(other)", status="200") == 1
    assert busy.value("penstock_http_request_duration_seconds_bucket", path="/v1/call", le="0.001") == 0
    assert busy.value("penstock_http_request_duration_seconds_bucket", path="/v1/call", le="0.0025") == 1
    assert busy.value("penstock_http_received_bytes_total") == 20 and busy.value("penstock_http_sent_bytes_total") == 40
    assert busy.value("penstock_http_connections") == 1
    assert busy.value("penstock_http_rejected_total", limit="body") == 1
    assert busy.value("penstock_http_auth_failures_total", code="unauthenticated") == 1


def test_connections_and_requests_under_way_go_down_again() -> None:
    meter = ServerMeter()
    meter.waiting, meter.draining = lambda: 7, lambda: True
    for _ in range(3):
        meter.connection_opened()
        meter.request_begun()
    meter.connection_closed()
    meter.request_abandoned()
    meter.request_answered("/", 404, 10, 0, 0)
    found = Scrape(MetricsPage(meter, "1").render(None))
    assert found.value("penstock_http_connections") == 2 and found.value("penstock_http_connections_opened_total") == 3
    assert found.value("penstock_http_requests_under_way") == 1 and found.value("penstock_http_requests_abandoned_total") == 1
    assert found.value("penstock_http_waiting_requests") == 7 and found.value("penstock_draining") == 1


def test_the_process_is_measured(busy: Scrape) -> None:
    assert busy.value("process_resident_memory_bytes") > 1_000_000
    assert busy.value("process_open_fds") > 0


# -- bounded labels ----------------------------------------------------------------------------------------


def produced(found: Scrape) -> dict[tuple[str, str], float]:
    """(queue, partition) → items produced, of those that are not 0."""
    each = {
        (dict(labels)["queue"], dict(labels).get("partition", "")): value
        for labels, value in found.of("penstock_items_produced_total").items()
    }
    return {labels: value for labels, value in each.items() if value}


def test_queues_beyond_the_limit_are_summed_up() -> None:
    page = page_of(MetricsSettings(queues=2))
    with penstock.open("memory://") as broker:
        for number, name in enumerate("abcd", 1):
            queue = broker.create_queue(name)
            for _ in range(number):
                queue.produce("x")
        found = Scrape(page.render(broker.metrics()))
        assert produced(found) == {("a", "0"): 1, ("b", "0"): 2, ("(other)", "0"): 7}
        assert found.value("penstock_request_duration_seconds_count", queue="(other)", verb="produce") == 7
        assert found.value("penstock_queues") == 4
        assert found.total("penstock_items", state="ready") == 10


def test_a_queue_keeps_its_series_while_it_exists() -> None:
    page = page_of(MetricsSettings(queues=2))
    with penstock.open("memory://") as broker:
        for name in "mn":
            broker.create_queue(name).produce("x")
        page.render(broker.metrics())
        broker.create_queue("a").produce("x")
        assert produced(Scrape(page.render(broker.metrics()))) == {("m", "0"): 1, ("n", "0"): 1, ("(other)", "0"): 1}
        broker.delete_queue("m")
        assert produced(Scrape(page.render(broker.metrics())))[("a", "0")] == 1


def test_sums_of_others_never_fall() -> None:
    """Prometheus would take that for a restart, and count everything again."""
    page = page_of(MetricsSettings(queues=1))
    with penstock.open("memory://") as broker:
        for name, number in (("a", 1), ("b", 5), ("c", 3)):
            queue = broker.create_queue(name)
            for _ in range(number):
                queue.produce("x")
        before = Scrape(page.render(broker.metrics()))
        assert produced(before)[("(other)", "0")] == 8
        broker.delete_queue("b")
        deleted = Scrape(page.render(broker.metrics()))
        broker.queue("c").produce("x")
        after = Scrape(page.render(broker.metrics()))
    assert produced(deleted)[("(other)", "0")] == 8 and produced(after)[("(other)", "0")] == 9
    assert after.total("penstock_items", state="ready", queue="(other)") == 4, "a depth does fall"
    counting = {
        name for family in FAMILIES if family.kind != "gauge" for name in (family.name, f"{family.name}_bucket", f"{family.name}_count")
    }
    for (name, labels), value in before.values.items():
        if name in counting:
            assert deleted.values[name, labels] >= value, (name, labels)


def test_partitions_beyond_the_limit_are_summed_up_drained_ones_first() -> None:
    page = page_of(MetricsSettings(partitions=2))
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("q", partitions=4)
        for number in range(40):
            queue.produce("x", key=f"k{number}")
        assert [partition for _, partition in produced(Scrape(page.render(broker.metrics())))] == ["0", "1", "(other)"]
        found = Scrape(page.render(broker.metrics()))
        assert found.total("penstock_items_produced_total") == 40
        assert found.value("penstock_partitions", queue="q", status="active") == 4
        metrics = broker.metrics()
    drained = metrics.queues["q"].partitions
    drained[0] = msgspec.structs.replace(drained[0], status="drained")
    assert sorted(partition for _, partition in produced(Scrape(page.render(metrics)))) == ["(other)", "1", "2"]


def test_the_label_of_partitions_can_be_left_out() -> None:
    page = page_of(MetricsSettings(partitions=0))
    with penstock.open("memory://") as broker:
        queue = broker.create_queue("q", partitions=4)
        for number in range(40):
            queue.produce("x", key=f"k{number}")
        found = Scrape(page.render(broker.metrics()))
    assert produced(found) == {("q", ""): 40}
    assert found.value("penstock_items", queue="q", state="ready") == 40


def test_the_oldest_of_several_is_the_oldest() -> None:
    page = page_of(MetricsSettings(queues=0))
    metrics = BrokerMetrics({})
    with penstock.open("memory://") as broker:
        for name in "ab":
            broker.create_queue(name).produce("x")
        metrics = broker.metrics()
    for name, age in (("a", 30.0), ("b", 12.0)):
        partitions = metrics.queues[name].partitions
        partitions[0] = msgspec.structs.replace(partitions[0], oldest_ready_seconds=age)
    found = Scrape(page.render(metrics))
    assert found.value("penstock_oldest_ready_age_seconds", queue="(other)", partition="0") == 30


def test_a_key_with_prefixes_sees_its_queues_and_nothing_of_the_server() -> None:
    page = page_of(MetricsSettings(queues=1))
    with penstock.open("memory://") as broker:
        for name in ("a-1", "a-2", "b-1"):
            broker.create_queue(name).produce("x")
        whole = broker.metrics()
    assert produced(Scrape(page.render(whole)))[("(other)", "0")] == 2
    shown = BrokerMetrics({name: found for name, found in whole.queues.items() if name.startswith("a-")})
    found = Scrape(page.render(shown, prefixes=["a-"]))
    assert produced(found) == {("a-1", "0"): 1, ("(other)", "0"): 1}
    assert {name.split("_")[0] for name, _ in found.values} == {"penstock"}
    assert not any(name.startswith(("penstock_http", "penstock_up", "penstock_disk", "penstock_clients")) for name, _ in found.values)


# -- asking the broker -------------------------------------------------------------------------------------


def read(page: MetricsPage, ask: Callable[[], Awaitable[BrokerMetrics]]) -> Scrape:
    return Scrape(asyncio.run(page.read(ask)))


def test_the_page_is_read_through_a_home(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "data") as broker:
        broker.create_queue("q").produce("x")
        found = read(page_of(), lambda: AsyncHome(broker.home).call(ReadMetrics()))
    assert found.value("penstock_up") == 1 and produced(found) == {("q", "0"): 1}


async def never() -> BrokerMetrics:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def closed() -> BrokerMetrics:
    raise BrokerClosed("the broker is closed; open it again")


@pytest.mark.parametrize("ask", [never, closed])
def test_a_broker_that_does_not_answer_is_down_and_the_server_is_still_measured(ask: Callable[[], Awaitable[BrokerMetrics]]) -> None:
    found = read(page_of(MetricsSettings(answer_seconds=0.01)), ask)
    assert found.value("penstock_up") == 0
    assert found.value("penstock_http_connections") == 0 and found.of("penstock_items") == {}


def test_a_caller_who_may_not_look_is_told_so() -> None:
    async def refused() -> BrokerMetrics:
        raise AccessDenied("the key has no scope look; ask for another")

    with pytest.raises(AccessDenied):
        read(page_of(), refused)
