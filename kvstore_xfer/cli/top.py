"""`kvxfer top`: the dashboards' figures in a terminal, from any metrics endpoint."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore_xfer.cli.common import positive_float
from kvstore_xfer.cli.output import open_console
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.metrics import STAGES
from kvstore_xfer.outcome import Outcome
from kvstore_xfer.scrape import Scrape, scrape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from rich.console import RenderableType

_TOKENS = "kvxfer_lookup_tokens_total"
_REASONS_SHOWN = 5


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "top",
        help="live view of running engines, from their metrics",
        description="Totals since the engines started, and rates since the last refresh.",
    )
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help="metrics endpoint; /metrics is added when missing"
    )
    parser.add_argument(
        "--interval", type=positive_float, default=2.0, help="seconds between refreshes"
    )
    parser.add_argument("--once", action="store_true", help="print the totals once and end")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    console = open_console()
    now = scrape(options.urls)
    if options.once:
        console.print(view(now, now))
        return 0
    with Live(view(now, now), console=console, screen=console.is_terminal) as live:
        while True:
            time.sleep(options.interval)
            before = now
            try:
                now = scrape(options.urls)
            except ConfigError as error:  # an engine that restarts comes back
                live.update(Group(view(before, before), Text(str(error), "red")))
                continue
            live.update(view(before, now))


def view(before: Scrape, now: Scrape) -> RenderableType:
    """Everything on one screen; rates are those between the two scrapes."""
    return Group(
        _answers(before, now), _declined(before, now), _stages(now), _stores(now), _pairs(now)
    )


def _answers(before: Scrape, now: Scrape) -> Table:
    table = Table(title="tokens asked for", title_justify="left", box=None, pad_edge=False)
    table.add_column("model")
    for heading in (*(o.value for o in Outcome), "tokens/s", "lookups", "prefill saved"):
        table.add_column(heading, justify="right")
    for (target,), all_tokens in sorted(now.values(_TOKENS, "target").items()):
        sums = now.values(_TOKENS, "outcome", target=target)
        cells = [_share(sums.get((o.value,), 0.0), all_tokens) for o in Outcome]
        rate = _rate(before, now, _TOKENS, target=target)
        lookups = now.total("kvxfer_lookups_total", target=target)
        saved = now.total("kvxfer_prefill_seconds_saved_total", target=target)
        table.add_row(target, *cells, rate, f"{lookups:,.0f}", f"{saved:,.1f} s")
    return table


def _declined(before: Scrape, now: Scrape) -> Table:
    """The commonest reasons of what was not served."""
    table = Table(title="why not served", title_justify="left", box=None, pad_edge=False)
    for heading in ("model", "from", "outcome", "reason"):
        table.add_column(heading)
    table.add_column("tokens", justify="right")
    by = ("target", "source", "outcome", "reason")
    rows = {
        labels: tokens
        for labels, tokens in now.values(_TOKENS, *by).items()
        if labels[2] in (Outcome.DECLINED.value, Outcome.MISSED.value)
    }
    for labels, tokens in _largest(rows.items()):
        table.add_row(*labels, f"{tokens:,.0f}")
    errors = now.total("kvxfer_errors_total") - before.total("kvxfer_errors_total")
    if errors:
        table.add_row(Text("errors since the last refresh", "red"), "", "", "", f"{errors:,.0f}")
    return table


def _largest(
    rows: Iterable[tuple[tuple[str, ...], float]],
) -> list[tuple[tuple[str, ...], float]]:
    return sorted(rows, key=lambda row: -row[1])[:_REASONS_SHOWN]


def _stages(now: Scrape) -> Table:
    table = Table(title="stages (per call)", title_justify="left", box=None, pad_edge=False)
    table.add_column("stage")
    for heading in ("calls", "p50 <=", "p95 <=", "seconds", "GiB"):
        table.add_column(heading, justify="right")
    for stage in STAGES:
        name = "kvxfer_stage_seconds"
        calls = now.total(f"{name}_count", stage=stage)
        if not calls:
            continue
        table.add_row(
            stage,
            f"{calls:,.0f}",
            *(_seconds(now.quantile(name, share, stage=stage)) for share in (0.5, 0.95)),
            f"{now.total(f'{name}_sum', stage=stage):,.1f}",
            f"{now.total('kvxfer_stage_bytes_sum', stage=stage) / (1 << 30):,.2f}",
        )
    return table


def _stores(now: Scrape) -> Table:
    table = Table(title="store", title_justify="left", box=None, pad_edge=False)
    table.add_column("store")
    for heading in ("up", "blocks", "GiB", "of GiB", "evicted", "corrupt"):
        table.add_column(heading, justify="right")
    for (store,), up in sorted(now.values("kvxfer_store_up", "store").items()):
        capacity = now.total("kvxfer_store_capacity_bytes", store=store)
        table.add_row(
            store,
            "yes" if up else Text("no", "red"),
            f"{now.total('kvxfer_store_blocks', store=store):,.0f}",
            f"{now.total('kvxfer_store_bytes', store=store) / (1 << 30):,.2f}",
            f"{capacity / (1 << 30):,.2f}" if capacity else "-",
            f"{now.total('kvxfer_store_evicted_blocks', store=store):,.0f}",
            f"{now.total('kvxfer_store_corrupt_blocks', store=store):,.0f}",
        )
    return table


def _pairs(now: Scrape) -> Table:
    table = Table(title="pairs", title_justify="left", box=None, pad_edge=False)
    for heading in ("source", "target", "direction", "state"):
        table.add_column(heading)
    for heading in ("retention at the gate", "observed", "samples"):
        table.add_column(heading, justify="right")
    by = ("source", "target", "direction")
    for labels, opened in sorted(now.values("kvxfer_gate_open", *by).items()):
        where = dict(zip(by, labels, strict=True))
        state = Text("open") if opened else Text("closed", "yellow")
        if now.total("kvxfer_pair_switched_off", **where):
            state = Text("switched off: retention", "red")
        table.add_row(
            *labels,
            state,
            _interval(now, "kvxfer_gate_retention", where),
            _interval(now, "kvxfer_observed_retention", where),
            f"{now.total('kvxfer_samples_total', **where, status='compared'):,.0f}",
        )
    return table


def _interval(now: Scrape, name: str, where: dict[str, str]) -> str:
    bounds = now.values(name, "bound", **where)
    if not bounds:
        return "-"
    mean, low, high = (bounds.get((bound,), math.nan) for bound in ("mean", "low", "high"))
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _share(part: float, whole: float) -> str:
    return f"{part:,.0f} ({part / whole:.0%})" if whole else "0"


def _rate(before: Scrape, now: Scrape, name: str, **where: str) -> str:
    seconds = now.at - before.at
    if seconds <= 0:
        return "-"
    return f"{max(0.0, now.total(name, **where) - before.total(name, **where)) / seconds:,.0f}"


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "> 10 s"
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"
