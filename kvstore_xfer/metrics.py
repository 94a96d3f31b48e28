"""Every Prometheus metric of the tier, in one place.

Labels are bounded: models and pairs of the manifest, and values of enumerations; never keys, paths,
prompts or tenants. Base units. Gauges are set by several processes (the ranks of an engine), so in
prometheus_client's multiprocess mode the latest value counts. ``docs/metrics.md`` is the table.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from kvstore_xfer import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.metrics import MetricWrapperBase

# Where a lookup was answered and from whom: `source` and `direction` are empty for native blocks
# and for those that nobody has.
_ANSWER = ("target", "source", "direction", "outcome", "reason")
_PAIR = ("source", "target", "direction")
_SECONDS = (*(f * 10.0**p for p in range(-4, 1) for f in (1, 2.5, 5)), 10.0)
_BYTES = tuple(float(1 << power) for power in range(14, 36, 2))  # 16 KiB to 16 GiB

STAGES = ("find", "serve", "read", "copy_in", "map", "copy_out", "write")


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> Gauge:
    return Gauge(name, text, labels, multiprocess_mode="mostrecent")


LOOKUPS = Counter(
    "kvxfer_lookups",
    "Prompts that an engine asked for: the denominator of everything per lookup.",
    ("target",),
)
LOOKUP_BLOCKS = Counter(
    "kvxfer_lookup_blocks",
    "Blocks asked for, by how they were answered and why. The sum over all outcomes is the "
    "denominator of a hit rate.",
    _ANSWER,
)
LOOKUP_TOKENS = Counter(
    "kvxfer_lookup_tokens",
    "Tokens asked for, by how they were answered and why.",
    _ANSWER,
)
SAVED_SECONDS = Counter(
    "kvxfer_prefill_seconds_saved",
    "Estimate: served tokens over the prefill rate of the gate's record (or of the policy), less "
    "the seconds the lookup took. Nothing is counted where no rate is known, nor below zero.",
    ("target",),
)
STAGE_SECONDS = Histogram(
    "kvxfer_stage_seconds",
    "Seconds of one call of a stage. find: index only; serve: one whole read for the engine; read: "
    "store to memory; copy_in, map, copy_out: conversion; write: handing blocks to the store.",
    ("target", "stage"),
    buckets=_SECONDS,
)
STAGE_BYTES = Histogram(
    "kvxfer_stage_bytes",
    "Bytes that one call of a stage moved (map: bytes made).",
    ("target", "stage"),
    buckets=_BYTES,
)
WRITTEN_BLOCKS = Counter(
    "kvxfer_written_blocks",
    "Blocks handed to the store, by kind (native, unplaced, derived) and result.",
    ("target", "kind", "status"),
)
ERRORS = Counter(
    "kvxfer_errors",
    "Unexpected errors that became misses, by the call they happened in.",
    ("target", "call"),
)
STORE_UP = _gauge("kvxfer_store_up", "1 while the store tells its totals, else 0.", ("store",))
STORE_BLOCKS = _gauge("kvxfer_store_blocks", "Blocks in the store.", ("store",))
STORE_BYTES = _gauge("kvxfer_store_bytes", "Bytes in the store.", ("store",))
STORE_CAPACITY_BYTES = _gauge(
    "kvxfer_store_capacity_bytes", "Size cap of the store, where it has one.", ("store",)
)
STORE_OLDEST_USE_SECONDS = _gauge(
    "kvxfer_store_oldest_use_timestamp_seconds",
    "When the least recently used block was last used, Unix time: how far back the store reaches.",
    ("store",),
)
STORE_EVICTED_BLOCKS = _gauge(
    "kvxfer_store_evicted_blocks",
    "Blocks evicted since the store was made, by whichever process.",
    ("store",),
)
STORE_CORRUPT_BLOCKS = _gauge(
    "kvxfer_store_corrupt_blocks",
    "Damaged blocks found and removed since the store was made.",
    ("store",),
)
EVICTIONS = Counter(
    "kvxfer_evicted_blocks",
    "Blocks this process evicted: to stay below the size cap, or above the free-space floor.",
    ("store", "reason"),
)
STORE_MOVES = Counter(
    "kvxfer_store_moves",
    "Copies between the levels of a store, up (promotion) or far (upload), by result.",
    ("kind", "status"),
)
GATE_OPEN = _gauge("kvxfer_gate_open", "1 when the pair's mapper may serve, else 0.", _PAIR)
GATE_RETENTION = _gauge(
    "kvxfer_gate_retention",
    "Retention that the gate measured, mean and bounds of its 95 % interval.",
    (*_PAIR, "bound"),
)
OBSERVED_RETENTION = _gauge(
    "kvxfer_observed_retention",
    "Retention estimated from sampled prefixes in production, mean and bounds of its 95 % "
    "interval.",
    (*_PAIR, "bound"),
)
RETENTION_THRESHOLD = _gauge(
    "kvxfer_retention_threshold",
    "Below this the lower bound of the observed retention turns the pair off.",
    _PAIR,
)
SAMPLES = Counter(
    "kvxfer_samples",
    "Sampled prefixes, by what became of them: declined (left to the engine), compared, dropped.",
    (*_PAIR, "status"),
)
SAMPLE_COSINE = _gauge(
    "kvxfer_sample_attention_cosine",
    "Cosine between attention outputs over native and over converted blocks, with the stored "
    "probe queries, of the latest sample: mean and lowest layer.",
    (*_PAIR, "layers"),
)
SAMPLE_ERROR = _gauge(
    "kvxfer_sample_relative_error",
    "Norm of converted minus native over the norm of native, of the latest sample, per layer.",
    (*_PAIR, "component", "layer"),
)
SWITCHED_OFF = _gauge(
    "kvxfer_pair_switched_off",
    "1 while the pair is off because its observed retention stayed below the threshold.",
    _PAIR,
)
CONVERSION_REFUSED = _gauge(
    "kvxfer_conversion_refused",
    "1 while an engine is such that nothing is converted for it, by reason.",
    ("target", "reason"),
)
BUILD_INFO = _gauge(
    "kvxfer_build_info",
    "Always 1; the versions are labels.",
    ("version", "python", "engine", "engine_version"),
)


def set_build_info(engine: str = "", engine_version: str = "") -> None:
    """Say which versions run here; `engine` is empty outside an engine."""
    labels = (__version__, platform.python_version(), engine, engine_version)
    BUILD_INFO.labels(*labels).set(1)


def set_bounds(gauge: Gauge, pair: tuple[str, str, str], interval: Mapping[str, float]) -> None:
    """Set ``mean``, ``low`` and ``high`` of a gauge whose last label is the bound."""
    for bound in ("mean", "low", "high"):
        if bound in interval:
            gauge.labels(*pair, bound).set(interval[bound])


def all_metrics() -> list[MetricWrapperBase]:
    """Every metric object of this module, in the order of the source."""
    return [value for value in globals().values() if isinstance(value, (Counter, Gauge, Histogram))]


def exported_name(metric: MetricWrapperBase) -> str:
    """The name under which Prometheus knows it (histograms: without ``_bucket``, ``_sum``...)."""
    family = next(iter(metric.describe()))
    return f"{family.name}_total" if family.type == "counter" else family.name


def table() -> str:
    """The Markdown table of docs/metrics.md."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in all_metrics():
        family = next(iter(metric.describe()))
        labels = ", ".join(f"`{name}`" for name in metric._labelnames)
        rows.append(
            f"| `{exported_name(metric)}` | {family.type} | {labels} | {family.documentation} |"
        )
    return "\n".join(rows)
