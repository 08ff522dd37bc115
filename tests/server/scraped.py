"""A page of metrics, parsed with the client library of Prometheus.

Owns: `Scrape`, and `busy_page`, the page of a real broker with which everything was done once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import penstock
from penstock.loop.requests import SettlePart
from penstock.operations import FindQueue, SettleItems
from penstock.server.metrics import MetricsPage, MetricsText
from penstock.server.server_meter import ServerMeter

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


class Scrape:
    """The samples of a page."""

    def __init__(self, page: MetricsText) -> None:
        is_open = page.content_type.startswith("application/openmetrics-text")
        self.families: Sequence[Metric] = list((parse_open_metrics if is_open else parse_text)(page.body.decode()))
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families:
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.values, f"{key} is there twice"
                self.values[key] = sample.value

    def value(self, name: str, **labels: str) -> float:
        return self.values[name, frozenset(labels.items())]

    def of(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        """Labels → value of all samples of one name."""
        return {labels: value for (found, labels), value in self.values.items() if found == name}

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples that have these labels, as PromQL's sum."""
        return sum(value for found, value in self.of(name).items() if labels.items() <= dict(found).items())

    @property
    def label_names(self) -> Mapping[str, set[str]]:
        """Name of a sample → names of its labels."""
        found: dict[str, set[str]] = {}
        for name, labels in self.values:
            found.setdefault(name, set()).update(label for label, _ in labels)
        return found


def busy_page(path: Path, accept: str = "") -> MetricsText:
    """The page of a real broker and a server, after all kinds of outcomes."""
    meter = ServerMeter(["/v1/call"])
    meter.connection_opened()
    for target in ("/v1/call", "/unknown"):
        meter.request_begun()
        meter.request_answered(target, 200, 1_500, 10, 20)
    meter.rejected("body")
    meter.auth_failed("unauthenticated")
    with penstock.open(path / "data") as broker:
        queue = broker.create_queue("orders", partitions=2)
        for number in range(20):
            queue.produce({"number": number}, key=f"key-{number}")
        queue.lease(3).complete()
        queue.lease(1).retry(reason="later")
        queue.lease(1).bury(reason="no")
        queue.lease(1)
        incarnation = broker.home.call(FindQueue(name="orders")).incarnation
        broker.home.call(SettleItems(queue=incarnation, action="complete", parts=[SettlePart(0, 12_345)]))  # it is refused
        return MetricsPage(meter, penstock.__version__).render(broker.metrics(), accept)
