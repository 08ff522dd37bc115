"""The dashboard of Grafana, the alerts of Prometheus and the documentation use metrics and labels that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from penstock.server.metric_families import FAMILIES, table
from tests.server.scraped import Scrape, busy_page

ROOT = Path(__file__).parent.parent.parent
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "penstock.json").read_text("utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text("utf-8"))
PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to what it reads."""


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Name → labels of what a real broker and a server expose."""
    return {**Scrape(busy_page(tmp_path_factory.mktemp("busy"))).label_names}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[tuple[str, str, set[str]]]:
    """Where it is, an expression, and the labels that its legend or text names."""
    found = [
        (panel["title"], target["expr"], set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])))
        for panel in panels()
        for target in panel["targets"]
    ]
    for rule in rules():
        text = " ".join(rule["annotations"].values())
        found.append((rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", text))))
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def parsed(expression: str) -> Any:
    """The syntax tree; Grafana's variables are replaced as it does."""
    return promql_parser.parse(expression.replace("$__rate_interval", "5m"))


class Usage:
    """What an expression uses, and the labels of its result (None: all labels of what it reads)."""

    def __init__(self, expression: str) -> None:
        self.metrics: set[str] = set()
        self.labels: dict[str, set[str]] = {}
        """Metric → labels that the expression names."""
        self.result = self._visit(parsed(expression))

    def _visit(self, node: Any) -> set[str] | None:
        if isinstance(node, promql_parser.VectorSelector):
            assert node.name is not None
            self.metrics.add(node.name)
            self.labels.setdefault(node.name, set()).update(one.name for one in node.matchers.matchers)
            return None
        if isinstance(node, promql_parser.MatrixSelector):
            return self._visit(node.vector_selector)
        if isinstance(node, promql_parser.AggregateExpr):
            before = set(self.metrics)
            self.metrics = set()
            self._visit(node.expr)
            kept = set(node.modifier.labels) if node.modifier is not None else set()
            for metric in self.metrics:
                self.labels[metric] |= kept
            self.metrics |= before
            return kept
        if isinstance(node, promql_parser.Call):
            found = [self._visit(one) for one in node.args]
            return found[-1] if found else set()
        if isinstance(node, promql_parser.BinaryExpr):
            left, right = self._visit(node.lhs), self._visit(node.rhs)
            return right if isinstance(node.lhs, promql_parser.NumberLiteral) else left
        if isinstance(node, promql_parser.ParenExpr | promql_parser.SubqueryExpr | promql_parser.UnaryExpr):
            return self._visit(node.expr)
        assert isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral), type(node)
        return set()


@pytest.mark.parametrize(("where", "expression", "told"), expressions())
def test_an_expression_uses_metrics_and_labels_that_exist(
    where: str, expression: str, told: set[str], exposed: dict[str, set[str]]
) -> None:
    usage = Usage(expression)
    assert usage.metrics, where
    for metric in usage.metrics:
        assert metric in exposed, f"{where}: there is no metric {metric}"
        assert usage.labels[metric] <= exposed[metric] | OF_PROMETHEUS, f"{where}: {metric} has no such label"
    result = set().union(*(exposed[metric] for metric in usage.metrics)) | OF_PROMETHEUS if usage.result is None else usage.result
    assert told <= result, f"{where}: the text names labels that the result does not have"


def test_the_check_would_find_a_wrong_name_or_label(exposed: dict[str, set[str]]) -> None:
    usage = Usage('sum by (queue, consumer) (rate(penstock_items_leased_total{quue="a"}[5m])) / penstock_nothing > 3')
    assert usage.metrics == {"penstock_items_leased_total", "penstock_nothing"}
    assert usage.labels["penstock_items_leased_total"] == {"queue", "consumer", "quue"}
    assert "penstock_nothing" not in exposed and usage.result == {"queue", "consumer"}


@pytest.mark.parametrize("name", [one.name for one in FAMILIES if one.kind == "counter"])
def test_a_counter_is_only_used_in_a_rate(name: str) -> None:
    """The bare number means nothing: it begins again with every owner."""
    for where, expression, _ in expressions():
        bare = re.sub(rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[", "", expression)
        assert not re.search(rf"\b{name}\b", bare), where


def test_every_metric_but_a_few_is_in_the_dashboard() -> None:
    used = {metric for _, expression, _ in expressions() for metric in Usage(expression).metrics}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    assert {one.name for one in FAMILIES} - families == {"penstock_build_info", "penstock_opened_timestamp_seconds"}


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    assert DASHBOARD["schemaVersion"] >= 36 and DASHBOARD["uid"] and DASHBOARD["title"] and "id" not in DASHBOARD
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["type"] in {"timeseries", "stat"} and panel["targets"] and panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert list(overlapping()) == []
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - {"__rate_interval", "__all"} == names == {"datasource", "job", "queue"}


def overlapping() -> Iterator[tuple[str, str]]:
    """Pairs of panels of which one covers a part of the other, or which go beyond the width."""
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                if (x, y) in taken or x >= 24:
                    yield taken.get((x, y), "the edge"), panel["title"]
                taken[x, y] = panel["title"]


def test_the_variables_of_the_dashboard_ask_for_labels_that_exist(exposed: dict[str, set[str]]) -> None:
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["definition"]).groups()  # type: ignore[union-attr]
            assert label in exposed[metric] | OF_PROMETHEUS


def test_every_alert_says_what_to_do_and_is_in_the_documentation() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"] and rule["annotations"]["action"]
    assert re.findall(r"^\| (Penstock\w+) \|", PAGE, re.MULTILINE) == names


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    assert table() in PAGE, "run python -m penstock.server.metric_families and put its table into docs/metrics.md"


def test_every_exposed_metric_is_in_the_documentation(exposed: dict[str, set[str]]) -> None:
    told = set(re.findall(r"`(\w+)`", PAGE))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed if name.startswith("penstock_")}
    assert families <= told
