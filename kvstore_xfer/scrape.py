"""Reading a metrics endpoint: samples of our metrics, sums, and quantiles of histograms."""

from __future__ import annotations

import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvstore_xfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_SECONDS = 10.0
_PREFIX = "kvxfer_"
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scrape:
    """The samples of some endpoints at one moment (of `time.monotonic`), summed by labels."""

    at: float
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def values(self, name: str, *by: str, **where: str) -> dict[tuple[str, ...], float]:
        """Sums of a sample's values by the labels `by`, of those whose labels match `where`."""
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for labels, value in self.samples.get(name, {}).items():
            given = dict(labels)
            if all(given.get(key) == wanted for key, wanted in where.items()):
                sums[tuple(given.get(key, "") for key in by)] += value
        return dict(sums)

    def total(self, name: str, **where: str) -> float:
        return self.values(name, **where).get((), 0.0)

    def quantile(self, name: str, share: float, **where: str) -> float:
        """Upper bound of the bucket that the quantile falls in; nan without observations."""
        buckets = sorted(
            (float(bound), count)
            for (bound,), count in self.values(f"{name}_bucket", "le", **where).items()
        )
        if not buckets or not buckets[-1][1]:
            return math.nan
        wanted = share * buckets[-1][1]
        return next(bound for bound, count in buckets if count >= wanted)


def scrape(urls: Sequence[str]) -> Scrape:
    """Our metrics of all endpoints together; gauges of several engines are the largest one's.

    Raises ConfigError when one cannot be read or has none of our metrics.
    """
    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    for url in urls:
        found = False
        for family in text_string_to_metric_families(_fetch(url)):
            if not family.name.startswith(_PREFIX):
                continue
            found = True
            for sample in family.samples:
                rows, labels = samples[sample.name], tuple(sorted(sample.labels.items()))
                old = rows.get(labels, 0.0)
                gauge = family.type == "gauge"
                rows[labels] = max(old, sample.value) if gauge else old + sample.value
        if not found:
            raise ConfigError(
                f"{url}: has no kvxfer metrics; is the tier attached, and the engine started with "
                "--enable-metrics?"
            )
    return Scrape(time.monotonic(), dict(samples))


def _fetch(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url}: {error}; give the engine's metrics URL") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"{url}: not an http URL; give one such as http://127.0.0.1:30000/metrics"
        )
    if parts.path in ("", "/"):
        url = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            text: str = answer.read().decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"{url}: {reason}; give the engine's metrics URL") from None
    return text
