"""What a Prometheus would have scraped from this process, as series for promtool's tests."""

import json

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvstore_xfer import metrics


def forget():
    """As a process that has just started: no series yet."""
    for metric in metrics.all_metrics():
        metric.clear()


class Recorder:
    """One column of values per scrape."""

    def __init__(self):
        self._registry = CollectorRegistry()
        for metric in metrics.all_metrics():
            self._registry.register(metric)
        self._scrapes = 0
        self._values = {}

    def scrape(self):
        """Through the text format, as Prometheus gets it."""
        seen = set()
        for family in text_string_to_metric_families(generate_latest(self._registry).decode()):
            for sample in family.samples:
                series = _series(sample)
                seen.add(series)
                column = self._values.setdefault(series, ["_"] * self._scrapes)
                column.append(repr(sample.value))
        self._scrapes += 1
        for series, column in self._values.items():
            if series not in seen:  # Prometheus marks the first scrape without it
                column.append("_" if column[-1] in ("_", "stale") else "stale")

    def input_series(self):
        return [
            {"series": series, "values": " ".join(column)}
            for series, column in self._values.items()
        ]


def _series(sample):
    labels = (f"{name}={json.dumps(value)}" for name, value in sample.labels.items())
    return f"{sample.name}{{{','.join(labels)}}}"
