"""Every Prometheus metric of the tier, in one place. Labels are bounded: models, never keys."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

LOOKUP_BLOCKS = Counter(
    "kvxfer_lookup_blocks",
    "Blocks asked for, by how they were answered and why.",
    ("target", "outcome", "reason"),
)
LOOKUP_TOKENS = Counter(
    "kvxfer_lookup_tokens",
    "Tokens asked for, by how they were answered.",
    ("target", "outcome"),
)
STAGE_SECONDS = Histogram(
    "kvxfer_stage_seconds",
    "Seconds of one call of a stage: find, read, convert, write.",
    ("target", "stage"),
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
WRITTEN_BLOCKS = Counter(
    "kvxfer_written_blocks",
    "Blocks handed to the store, by kind and result.",
    ("target", "kind", "status"),
)
ERRORS = Counter(
    "kvxfer_errors",
    "Unexpected errors that became misses, by the call they happened in.",
    ("target", "call"),
)
GATE_OPEN = Gauge(
    "kvxfer_gate_open",
    "1 when the pair's mapper may serve, else 0.",
    ("source", "target", "direction"),
)
CONVERSION_REFUSED = Gauge(
    "kvxfer_conversion_refused",
    "1 while an engine is such that nothing is converted for it, by reason.",
    ("target", "reason"),
)
