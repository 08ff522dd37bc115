"""Samples, and how Prometheus reads them.

Owns: `Samples`, the values of metric families by their labels; and the two text formats, that of Prometheus and
OpenMetrics. It is written here and not by the client library, which takes ten times as long: a broker with many
partitions has tens of thousands of lines.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from prometheus_client import Metric

from penstock.reports import Durations
from penstock.server.metric_families import Family

LabelValues: TypeAlias = tuple[str, ...]
OTHER = "(other)"
"""The value of a label for everything that has no value of its own."""
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_NOT_FINITE = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


class Samples:
    """The values of families. Values with the same labels are added up."""

    def __init__(self) -> None:
        self.values: dict[Family, dict[LabelValues, float]] = {}
        self.durations: dict[Family, dict[LabelValues, Durations]] = {}

    def add(self, family: Family, labels: LabelValues, value: float) -> None:
        of_family = self.values.setdefault(family, {})
        of_family[labels] = of_family.get(labels, 0) + value

    def raise_to(self, family: Family, labels: LabelValues, value: float) -> None:
        """For a value of which the largest counts."""
        of_family = self.values.setdefault(family, {})
        of_family[labels] = max(of_family.get(labels, 0), value)

    def add_durations(self, family: Family, labels: LabelValues, found: Durations) -> None:
        of_family = self.durations.setdefault(family, {})
        known = of_family.get(labels)
        if known is not None and known.bounds == found.bounds:
            counts = [one + other for one, other in zip(known.counts, found.counts, strict=True)]
            found = Durations(found.bounds, counts, known.sum + found.sum)
        of_family[labels] = found

    def map_counters(self, change: Callable[[Family, LabelValues, int, float], float]) -> None:
        """Replace the numbers of all counters and histograms. A histogram has several numbers; the third argument of
        `change` tells them apart.
        """
        for family, of_family in self.values.items():
            if family.kind == "counter":
                for labels, value in of_family.items():
                    of_family[labels] = change(family, labels, 0, value)
        for family, histograms in self.durations.items():
            for labels, found in histograms.items():
                counts = [round(change(family, labels, number, count)) for number, count in enumerate(found.counts, 1)]
                histograms[labels] = Durations(found.bounds, counts, change(family, labels, 0, found.sum))

    def text(self, families: Iterable[Family], label_names: Callable[[Family], Sequence[str]], *, open_metrics: bool) -> str:
        """The families that have values. label_names: the labels of a family, in the order of their values."""
        lines: list[str] = []
        known: dict[tuple[tuple[str, ...], LabelValues], str] = {}  # most labels occur in many families

        def labels(names: tuple[str, ...], values: LabelValues) -> str:
            return known.get((names, values)) or known.setdefault((names, values), _labels(names, values))

        for family in families:
            names = tuple(label_names(family))
            if family.kind == "histogram":
                histograms = self.durations.get(family)
                if histograms:
                    lines += _head(family.name, family.kind, family.help, open_metrics)
                    _write_histograms(lines, family.name, names, histograms)
            elif of_family := self.values.get(family):
                lines += _head(family.name, family.kind, family.help, open_metrics)
                name = family.name
                lines += [f"{name}{labels(names, values)} {_number(value)}" for values, value in of_family.items()]
        return "\n".join([*lines, ""]) if lines else ""


def text_of_metric(metric: Metric, *, open_metrics: bool) -> str:
    """A counter or gauge of the client library."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    lines = _head(name, metric.type, metric.documentation, open_metrics)
    lines += [f"{one.name}{_labels([*one.labels], [*one.labels.values()])} {_number(one.value)}" for one in metric.samples]
    return "\n".join([*lines, ""])


def _head(name: str, kind: str, text: str, open_metrics: bool) -> list[str]:
    """The lines before the samples. In OpenMetrics the name of a counter is without `_total`."""
    name = name.removesuffix("_total") if open_metrics and kind == "counter" else name
    return [f"# HELP {name} {text.translate(_ESCAPES if open_metrics else _HELP_ESCAPES)}", f"# TYPE {name} {kind}"]


def _write_histograms(lines: list[str], name: str, names: Sequence[str], histograms: Mapping[LabelValues, Durations]) -> None:
    for values, found in histograms.items():
        labels = _labels(names, values)
        inner = f"{labels[1:-1]}," if labels else ""
        until = 0
        for bound, count in zip(found.bounds, found.counts, strict=False):
            until += count
            lines.append(f'{name}_bucket{{{inner}le="{bound!r}"}} {until}')
        total = sum(found.counts)
        lines += (f'{name}_bucket{{{inner}le="+Inf"}} {total}', f"{name}_sum{labels} {_number(found.sum)}", f"{name}_count{labels} {total}")


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    return "{" + ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)]) + "}"


def _number(value: float) -> str:
    return str(value) if type(value) is int else _NOT_FINITE.get(text := repr(value), text)
