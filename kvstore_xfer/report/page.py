"""From an artifact and the record of its check to one HTML page."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from kvstore_xfer.errors import ConfigError
from kvstore_xfer.gate.arms import ARM_NAMES
from kvstore_xfer.gate.decide import growth_of
from kvstore_xfer.gate.lengths import CALIBRATION

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore_xfer.gate.record import GateRecord
    from kvstore_xfer.mapper.artifact import Artifact

_MIB = 2**20


@dataclass(frozen=True)
class Criterion:
    """One threshold beside what was measured at the worse end of its interval."""

    name: str
    measured: str
    allowed: str
    met: bool


def require_report(file: Path) -> None:
    """Before a long check. Raises ConfigError when the page could not be made or written."""
    _libraries()
    if not os.access(file.absolute().parent, os.W_OK):
        raise ConfigError(f"--report {file}: its folder cannot be written; give another")


def write_report(file: Path, artifact: Artifact, record: GateRecord) -> None:
    """Raises ConfigError as `render` does, OSError when the file cannot be written."""
    file.write_text(render(artifact, record), encoding="utf-8")


def _libraries() -> tuple[Any, Any]:
    try:
        import jinja2

        from kvstore_xfer.report import plots
    except ImportError as error:
        raise ConfigError(
            f"--report: needs {error.name}; pip install 'kvstore-xfer[report]'"
        ) from None
    return jinja2, plots


def render(artifact: Artifact, record: GateRecord) -> str:
    """The page as HTML text. Raises ConfigError when the `report` extra is not installed."""
    jinja2, plots = _libraries()
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["interval"] = interval
    source = resources.files("kvstore_xfer.report").joinpath("page.html.jinja")
    template = environment.from_string(source.read_text(encoding="utf-8"))
    page: str = template.render(
        record=record,
        mapper=artifact.mapper,
        fit=artifact.fit,
        arm_names=ARM_NAMES,
        lengths=_lengths(record),
        criteria=_criteria(record),
        cost=_cost(artifact, record),
        figures=_figures(artifact, record, plots),
    )
    return page


def interval(cell: dict[str, float] | None, digits: int = 4) -> str:
    """A mean with its interval, as text."""
    if cell is None:
        return "not defined"
    return "{mean:.{d}f} [{low:.{d}f}, {high:.{d}f}]".format(d=digits, **cell)


def _lengths(record: GateRecord) -> dict[str, dict[str, Any]]:
    """All lengths by prefix, the calibration's among them; empty before the arms were run."""
    if not record.arms:
        return {}
    rows = {CALIBRATION: record.to_json(), **record.lengths}
    measured = {name: row for name, row in rows.items() if "arms" in row}
    skipped = {name: row for name, row in rows.items() if "arms" not in row}
    by_prefix = sorted(measured.items(), key=lambda item: int(item[1]["prefix_tokens"]))
    return {**dict(by_prefix), **skipped}


def _criteria(record: GateRecord) -> list[Criterion]:
    limits, rows = record.thresholds, []

    def low(name: str, value: float, limit: str) -> None:
        least = limits[limit]
        rows.append(Criterion(name, f"{value:.4f}", f"at least {least:g}", value >= least))

    def high(name: str, value: float, limit: str) -> None:
        most = limits[limit]
        rows.append(Criterion(name, f"{value:.4f}", f"at most {most:g}", value <= most))

    if record.attention:
        worst = record.attention["worst_layer"]
        low("attention output, mean cosine", record.attention["mean"]["low"], "min_cosine")
        low(
            f"attention output, cosine of layer {worst}",
            record.attention["by_layer"][worst]["low"],
            "min_layer_cosine",
        )
    for name, figures in _lengths(record).items():
        if "arms" not in figures:
            continue
        for arm, share in figures["kl_share"].items():
            high(f"{name}: share of the KL of: {ARM_NAMES[arm]}", share["high"], "max_kl_share")
        low(f"{name}: top-1 agreement", figures["arms"]["mapped"]["top1"]["low"], "min_top1")
        ratio = figures["perplexity_ratio"]["high"]
        high(f"{name}: perplexity ratio", ratio, "max_perplexity_ratio")
        behind = figures["behind_both"]["mean"]
        high(f"{name}: nats a token behind both models (mean)", behind, "max_behind_both")
        if figures["prefix_tokens"] > record.prefix_tokens:
            growth = growth_of(figures, record.to_json())
            high(f"{name}: growth of KL (means)", growth, "max_growth")
    kept = record.tasks.get("floor_normalised") if record.tasks else None
    if kept is not None:
        low("questions: floor-normalised retention", kept["low"], "min_task_retention")
    return rows


def _cost(artifact: Artifact, record: GateRecord) -> list[tuple[str, str]]:
    mapper = artifact.mapper
    tensors = [t for layer in (*mapper.keys, *mapper.values) for t in layer.tensors()]
    if mapper.encoder is not None:
        tensors.append(mapper.encoder)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    rows = [
        ("parameters of the mapper", f"{mapper.parameters:,} ({size / _MIB:.1f} MiB)"),
        ("multiply-adds a token", f"{sum(t.numel() for t in tensors):,}"),
        ("source KV read a token", f"{mapper.source.kv_bytes_per_token(record.dtype):,} bytes"),
        ("target KV written a token", f"{mapper.target.kv_bytes_per_token(record.dtype):,} bytes"),
    ]
    if record.conversion_tokens_per_second:
        prefill, conversion = record.prefill_tokens_per_second, record.conversion_tokens_per_second
        rows += [
            ("prefill, where this was checked", f"{prefill:,.0f} tokens a second"),
            ("conversion there, on the CPU", f"{conversion:,.0f} tokens a second"),
            ("conversion over prefill", f"{conversion / prefill:.1f} times as fast"),
        ]
    return rows


def _figures(artifact: Artifact, record: GateRecord, plots: Any) -> dict[str, str]:
    """SVG by name; a figure whose stage was not reached is left out."""
    figures: dict[str, str] = {}
    if record.structure:
        mapper = artifact.mapper
        used = {
            name: [layer.source_layers for layer in maps]
            for name, maps in (("keys", mapper.keys), ("values", mapper.values))
        }
        figures["heat_maps"] = plots.heat_maps(record.structure["layer_r2"], used)
        layers = range(len(record.structure["r2"]["keys"]))
        figures["r2"] = plots.lines(
            [
                plots.Series(name, layers, [_point(value) for value in values])
                for name, values in record.structure["r2"].items()
            ],
            "target layer",
            "explained variance ($R^2$)",
            limit=None,
            log=False,
        )
    if record.attention:
        rows = record.attention["by_layer"]
        figures["attention"] = plots.lines(
            [plots.Series("attention output", range(len(rows)), rows)],
            "target layer",
            "cosine",
            limit=record.thresholds["min_layer_cosine"],
            log=False,
        )
    if record.arms:
        shown = ["mapped", "wrong", "none", "source"]
        cells = [record.arms[arm]["kl"] for arm in shown]
        figures["arms"] = plots.dots(
            [ARM_NAMES[arm] for arm in shown], cells, "KL from the native answer, nats a token"
        )
        measured = {n: row for n, row in _lengths(record).items() if "arms" in row}
        tokens = [row["prefix_tokens"] for row in measured.values()]
        figures["lengths"] = plots.lines(
            [
                plots.Series(
                    ARM_NAMES[arm], tokens, [row["arms"][arm]["kl"] for row in measured.values()]
                )
                for arm in shown
            ],
            "tokens from the cache",
            "KL, nats a token",
            limit=None,
            log=True,
        )
    return figures


def _point(value: float) -> dict[str, float]:
    return {"mean": value, "low": value, "high": value}
