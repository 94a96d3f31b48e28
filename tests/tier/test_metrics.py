"""Metric names follow Prometheus' conventions, the documents list them, and labels stay bounded."""

import re
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from kvstore_xfer import exporter, metrics
from kvstore_xfer.family import MetricsEntry
from kvstore_xfer.outcome import Outcome, Reason
from kvstore_xfer.tier.policy import Direction

ROOT = Path(__file__).parents[2]
UNITS = ("_seconds", "_bytes", "_blocks", "_tokens", "_total", "_info", "_ratio")
# Gauges without a unit: flags, and shares between 0 and 1 whose name is the field's word.
UNITLESS = {
    "kvxfer_store_up",
    "kvxfer_gate_open",
    "kvxfer_gate_retention",
    "kvxfer_observed_retention",
    "kvxfer_retention_threshold",
    "kvxfer_sample_attention_cosine",
    "kvxfer_sample_relative_error",
    "kvxfer_pair_switched_off",
    "kvxfer_conversion_refused",
}
# Every label, and how many values it can have: models and pairs are those of the manifest.
BOUNDS = {
    "target": "models",
    "source": "models",
    "direction": len(Direction) + 1,
    "outcome": len(Outcome),
    "reason": 64,
    "stage": len(metrics.STAGES),
    "kind": 3,
    "status": 6,
    "call": 16,
    "store": 8,
    "bound": 3,
    "layers": 2,
    "layer": "layers",
    "component": 2,
    "version": 1,
    "python": 1,
    "engine": 1,
    "engine_version": 1,
}


def sample(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_the_documents_table_is_that_of_the_code():
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert metrics.table() in text, "run 'make dashboards', which writes the table anew"


@pytest.mark.parametrize("metric", metrics.all_metrics(), ids=metrics.exported_name)
def test_names_and_labels_follow_the_conventions(metric):
    name = metrics.exported_name(metric)
    assert re.fullmatch(r"kvxfer_[a-z_]+", name)
    assert name in UNITLESS or name.endswith(UNITS), "no base unit in the name"
    assert not re.search(r"_(ms|milli\w*|kb|mb|kilobytes|megabytes|percent)(_|$)", name)
    assert set(metric._labelnames) <= BOUNDS.keys()


def test_labels_stay_bounded_however_many_prompts_are_asked(toy, tiers):
    """A thousand prompts of as many tenants: as many series as ten prompts make."""
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())

    def ask(number):
        tokens = [number % 97, number % 89, *range(10)]
        if number % 3 == 0:
            toy.prefill(source, toy.source, tokens)
        plans = target.find(toy.hashes(tokens, salt=str(number) if number % 2 else ""))
        target.read(plans, toy.pages(target, len(plans)))

    for number in range(12):
        ask(number)
    before = sum(len(family.samples) for family in REGISTRY.collect())
    for number in range(12, 1000):
        ask(number)
    after = sum(len(family.samples) for family in REGISTRY.collect())
    assert after == before


def test_reasons_are_few_enough_for_a_label():
    assert len(Reason) <= BOUNDS["reason"]


def test_blocks_tokens_and_lookups_are_counted_with_their_origin(toy, tiers):
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    tokens = list(range(12))
    where = {"target": "target", "source": "source", "direction": "up"}
    converted = {**where, "outcome": "converted", "reason": "none"}
    before = sample("kvxfer_lookup_blocks_total", **converted)
    tokens_before = sample("kvxfer_lookup_tokens_total", **converted)
    lookups = sample("kvxfer_lookups_total", target="target")
    saved = sample("kvxfer_prefill_seconds_saved_total", target="target")
    toy.prefill(source, toy.source, tokens)
    toy.ask(target, tokens)
    assert sample("kvxfer_lookup_blocks_total", **converted) == before + 3
    assert sample("kvxfer_lookup_tokens_total", **converted) == tokens_before + 12
    assert sample("kvxfer_lookups_total", target="target") == lookups + 1
    # The toy's gate says 100 tokens a second.
    gained = sample("kvxfer_prefill_seconds_saved_total", target="target") - saved
    assert 0 < gained < 12 / 100
    target.flush()
    toy.ask(target, tokens)
    derived = {**where, "outcome": "derived", "reason": "none"}
    assert sample("kvxfer_lookup_blocks_total", **derived) >= 3
    for stage in ("find", "serve", "read", "map", "copy_out"):
        assert sample("kvxfer_stage_seconds_count", target="target", stage=stage) >= 1
    for stage in ("serve", "read", "map", "copy_out"):
        assert sample("kvxfer_stage_bytes_sum", target="target", stage=stage) > 0


def test_a_conversion_is_a_span_of_the_current_trace(toy, tiers):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, seen = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    trace.set_tracer_provider(provider)
    source, target = tiers(toy.source), tiers(toy.target, toy.artifact())
    tokens = list(range(30, 42))
    toy.prefill(source, toy.source, tokens)
    with provider.get_tracer("engine").start_as_current_span("request") as request:
        toy.ask(target, tokens)
        target.flush()
        toy.ask(target, tokens)  # derived blocks: no conversion, no span
    spans = [span for span in seen.get_finished_spans() if span.name == "kvxfer.convert"]
    assert len(spans) == 1
    assert spans[0].context.trace_id == request.get_span_context().trace_id
    assert spans[0].parent.span_id == request.get_span_context().span_id
    assert spans[0].attributes["kvxfer.blocks_converted"] == 3
    assert spans[0].attributes["kvxfer.source"] == "source"


def test_the_own_port_is_the_first_free_one_and_serves_the_metrics():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]
        port = exporter.serve(MetricsEntry(port=first))
        assert port > first
        assert exporter.serve(MetricsEntry(port=first)) == port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"kvxfer_build_info" in answer.read()


def test_no_free_port_is_an_error_in_the_log_and_nothing_else(caplog):
    entry = MetricsEntry(port=65535, address="203.0.113.1")
    assert exporter.serve(entry) is None
    assert "change metrics in the manifest" in caplog.text


def test_the_stores_totals_are_gauges(tmp_path, toy):
    from kvstore_xfer.store.local import LocalStore
    from kvstore_xfer.tier.store_gauges import StoreGauges

    with LocalStore(tmp_path, max_bytes=1 << 30, min_free_bytes=0) as store:
        tier = toy.tier(store, toy.target)
        toy.prefill(tier, toy.target, list(range(12)))
        gauges = StoreGauges(store, "local")
        tier.close()
        gauges.close()
        stats = store.stats()
    assert sample("kvxfer_store_up", store="local") == 1
    assert sample("kvxfer_store_blocks", store="local") == stats.blocks > 3
    assert sample("kvxfer_store_bytes", store="local") == stats.bytes
    assert sample("kvxfer_store_capacity_bytes", store="local") == 1 << 30
    oldest = sample("kvxfer_store_oldest_use_timestamp_seconds", store="local")
    assert oldest == pytest.approx(stats.oldest_use)


def test_a_store_that_does_not_answer_is_down(tmp_path):
    from kvstore_xfer.store.local import LocalStore
    from kvstore_xfer.tier.store_gauges import StoreGauges

    store = LocalStore(tmp_path, min_free_bytes=0)
    store.close()
    StoreGauges(store, "closed").close()
    assert REGISTRY.get_sample_value("kvxfer_store_up", {"store": "closed"}) == 0


def test_evictions_are_counted_by_reason(tmp_path, toy):
    from kvstore_xfer.store.local import LocalStore

    before = sample("kvxfer_evicted_blocks_total", store="local", reason="size_cap")
    with LocalStore(tmp_path, max_bytes=16_384, min_free_bytes=0) as store:
        tier = toy.tier(store, toy.target)
        for start in range(20):
            toy.prefill(tier, toy.target, [start, *range(11)])
        tier.close()
        evicted = store.stats().evicted_blocks
    assert evicted > 0
    after = sample("kvxfer_evicted_blocks_total", store="local", reason="size_cap")
    assert after - before == evicted
