"""The four Grafana dashboards, from grafana-foundation-sdk's builders."""

from __future__ import annotations

from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphGradientMode, StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableHide

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_PAIR = '{target=~"$target"}'
_KINDS = {"timeseries": timeseries, "stat": stat, "table": table}


@dataclass(frozen=True)
class Panel:
    """One panel: `queries` maps an expression to its legend; `unit` is Grafana's."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12
    text: str = ""
    stacked: bool = False
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: list[Panel] = field(default_factory=list)


def _rate(metric: str, by: str, where: str = "") -> str:
    labels = f'target=~"$target"{"," if where else ""}{where}'
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def _quantile(share: float, metric: str, by: str, where: str = "") -> str:
    inner = _rate(f"{metric}_bucket", f"{by}, le" if by else "le", where)
    return f"histogram_quantile({share}, {inner})"


def _observed(bound: str) -> str:
    return f'min {_BY_PAIR} (kvxfer_observed_retention{{target=~"$target",bound="{bound}"}})'


_SERVED = 'outcome=~"native|derived|converted"'
_MAP = 'stage="map"'
_TOKENS = "kvxfer_lookup_tokens_total"
_BY_PAIR = "by (source, target, direction)"

OVERVIEW = [
    Row(
        "What the tier does",
        [
            Panel(
                "Served share of tokens",
                {
                    f"sum({_rate(_TOKENS, 'target', _SERVED)}) / sum({_rate(_TOKENS, 'target')})": (
                        "served"
                    )
                },
                "percentunit",
                "stat",
                6,
                "Tokens served from the store, of all that were looked up.",
            ),
            Panel(
                "Prefill seconds saved per second",
                {f"sum({_rate('kvxfer_prefill_seconds_saved_total', 'target')})": "saved"},
                "none",
                "stat",
                6,
                "Estimate, from the prefill rate that the gate measured.",
            ),
            Panel(
                "Time to first token saved per lookup",
                {
                    f"{_rate('kvxfer_prefill_seconds_saved_total', 'target')} / "
                    f"{_rate('kvxfer_lookups_total', 'target')}": "{{target}}"
                },
                "s",
                "stat",
                6,
            ),
            Panel(
                "Pairs switched off",
                {f"sum(max {_BY_PAIR} (kvxfer_pair_switched_off{_PAIR})) or vector(0)": "off"},
                "none",
                "stat",
                6,
            ),
            Panel(
                "Tokens looked up, by outcome",
                {_rate(_TOKENS, "outcome"): "{{outcome}}"},
                "short",
                stacked=True,
                text="Tokens a second; the whole is what engines asked for.",
            ),
            Panel(
                "Tokens looked up, by model",
                {_rate(_TOKENS, "target"): "{{target}}"},
            ),
            Panel(
                "Retention per pair",
                {
                    _observed(
                        bound
                    ): f"{{{{source}}}} -> {{{{target}}}} ({{{{direction}}}}) {bound}"
                    for bound in ("mean", "low")
                }
                | {
                    f"max {_BY_PAIR} (kvxfer_retention_threshold{_PAIR})": (
                        "{{source}} -> {{target}} threshold"
                    )
                },
                "percentunit",
                most=1.0,
            ),
            Panel(
                "Declined, by reason",
                {_rate(_TOKENS, "target, reason", 'outcome="declined"'): "{{target}} {{reason}}"},
                stacked=True,
            ),
        ],
    ),
]

STORE = [
    Row(
        "Store",
        [
            Panel("Up", {"min by (store) (kvxfer_store_up)": "{{store}}"}, "none", "stat", 6),
            Panel(
                "Blocks", {"max by (store) (kvxfer_store_blocks)": "{{store}}"}, "short", "stat", 6
            ),
            Panel(
                "Reaches back",
                {
                    "time() - max by (store) (kvxfer_store_oldest_use_timestamp_seconds)": (
                        "{{store}}"
                    )
                },
                "s",
                "stat",
                6,
                "Age of the least recently used block.",
            ),
            Panel(
                "Damaged blocks found",
                {"max by (store) (kvxfer_store_corrupt_blocks)": "{{store}}"},
                "short",
                "stat",
                6,
            ),
            Panel(
                "Size",
                {
                    "max by (store) (kvxfer_store_bytes)": "{{store}} used",
                    "max by (store) (kvxfer_store_capacity_bytes)": "{{store}} cap",
                },
                "bytes",
                least=0.0,
            ),
            Panel(
                "Evicted since the store was made",
                {"max by (store) (kvxfer_store_evicted_blocks)": "{{store}}"},
            ),
            Panel(
                "Blocks written, by kind and result",
                {
                    _rate("kvxfer_written_blocks_total", "target, kind, status"): (
                        "{{target}} {{kind}} {{status}}"
                    )
                },
                stacked=True,
            ),
            Panel(
                "Bytes a second",
                {
                    _rate("kvxfer_stage_bytes_sum", "target", 'stage="read"'): "{{target}} read",
                    _rate("kvxfer_stage_bytes_sum", "target", 'stage="write"'): "{{target}} write",
                },
                "Bps",
            ),
        ],
    )
]

PIPELINE = [
    Row(
        "Conversion pipeline",
        [
            Panel(
                "Seconds of a call, p50",
                {_quantile(0.5, "kvxfer_stage_seconds", "stage"): "{{stage}}"},
                "s",
            ),
            Panel(
                "Seconds of a call, p95",
                {_quantile(0.95, "kvxfer_stage_seconds", "stage"): "{{stage}}"},
                "s",
            ),
            Panel(
                "Busy seconds a second, by stage",
                {_rate("kvxfer_stage_seconds_sum", "stage"): "{{stage}}"},
                "none",
                stacked=True,
            ),
            Panel(
                "Bytes of a call, p50",
                {_quantile(0.5, "kvxfer_stage_bytes", "stage"): "{{stage}}"},
                "bytes",
            ),
            Panel(
                "Converted tokens a second",
                {
                    _rate(_TOKENS, "source, target", 'outcome="converted"'): (
                        "{{source}} -> {{target}}"
                    )
                },
            ),
            Panel(
                "Throughput of the mapping",
                {
                    f"{_rate('kvxfer_stage_bytes_sum', 'target', _MAP)} / "
                    f"{_rate('kvxfer_stage_seconds_sum', 'target', _MAP)}": "{{target}}"
                },
                "Bps",
            ),
            Panel(
                "Calls a second, by stage",
                {_rate("kvxfer_stage_seconds_count", "stage"): "{{stage}}"},
            ),
            Panel(
                "Engines",
                {
                    "max by (version, engine, engine_version, python) (kvxfer_build_info)": (
                        "{{engine}} {{engine_version}}, kvstore_xfer {{version}}"
                    )
                },
                "none",
                "table",
            ),
        ],
    )
]

GATE = [
    Row(
        "Gate",
        [
            Panel(
                "Open pairs",
                {
                    f"max by (source, target, direction) (kvxfer_gate_open{_PAIR})": (
                        "{{source}} -> {{target}} ({{direction}})"
                    )
                },
                "none",
                "stat",
            ),
            Panel(
                "Samples, by what became of them",
                {
                    f"sum by (source, target, status) (kvxfer_samples_total{_PAIR})": (
                        "{{source}} -> {{target}} {{status}}"
                    )
                },
            ),
            Panel(
                "Retention at the gate",
                {
                    f"max by (source, target, bound) (kvxfer_gate_retention{_PAIR})": (
                        "{{source}} -> {{target}} {{bound}}"
                    )
                },
                "percentunit",
            ),
            Panel(
                "Retention observed",
                {
                    f"min by (source, target, bound) (kvxfer_observed_retention{_PAIR})": (
                        "{{source}} -> {{target}} {{bound}}"
                    ),
                    f"max by (source, target) (kvxfer_retention_threshold{_PAIR})": (
                        "{{source}} -> {{target}} threshold"
                    ),
                },
                "percentunit",
            ),
            Panel(
                "Attention-output cosine of samples",
                {
                    f"min by (source, target, layers) (kvxfer_sample_attention_cosine{_PAIR})": (
                        "{{source}} -> {{target}} {{layers}}"
                    )
                },
                "none",
                most=1.0,
            ),
            Panel(
                "Relative error of samples, by layer",
                {
                    f"max by (component, layer) (kvxfer_sample_relative_error{_PAIR})": (
                        "{{component}} {{layer}}"
                    )
                },
                "percentunit",
            ),
        ],
    )
]

DASHBOARDS = {
    "kvxfer-overview": ("kvstore_xfer: overview", OVERVIEW),
    "kvxfer-store": ("kvstore_xfer: store", STORE),
    "kvxfer-pipeline": ("kvstore_xfer: conversion pipeline", PIPELINE),
    "kvxfer-gate": ("kvstore_xfer: gate", GATE),
}


def render() -> dict[str, str]:
    """The JSON of every dashboard by its uid."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {
        uid: encoder.encode(_dashboard(uid, title, rows).build()) + "\n"
        for uid, (title, rows) in DASHBOARDS.items()
    }


def _dashboard(uid: str, title: str, rows: list[Row]) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .tags(["kvstore_xfer"])
        .refresh("10s")
        .time("now-1h", "now")
        .readonly()
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Source").type("prometheus")
        )
        .with_variable(
            dashboard.QueryVariable("target")
            .label("Model")
            .query("label_values(kvxfer_lookups_total, target)")
            .datasource(_SOURCE)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .hide(VariableHide.DONT_HIDE)
        )
    )
    for row in rows:
        made = made.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            made = made.with_panel(_panel(panel))
    return made


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | table.Panel:
    made = (
        _KINDS[panel.kind]
        .Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .height(8)
        .span(panel.width)
    )
    if panel.least is not None:
        made = made.min(panel.least)
    if panel.most is not None:
        made = made.max(panel.most)
    if panel.stacked:
        made = (
            made.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
            .fill_opacity(30)
            .gradient_mode(GraphGradientMode.NONE)
        )
    for number, (expression, legend) in enumerate(panel.queries.items()):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(_ref(number))
        if panel.kind != "timeseries":
            query = query.instant()
        if panel.kind == "table":
            query = query.format("table")
        made = made.with_target(query)
    return made


def _ref(number: int) -> str:
    return chr(ord("A") + number)
