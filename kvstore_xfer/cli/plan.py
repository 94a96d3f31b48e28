"""`kvxfer plan`: what conversion would save, per ordered pair, for an expected traffic."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_xfer.economics import Rates, Saving, SwitchTraffic, Traffic, saving
from kvstore_xfer.errors import ConfigError, KvxferError
from kvstore_xfer.family import (
    Family,
    PairEntry,
    load_family,
    policy_of,
    unmet,
)
from kvstore_xfer.gate.record import GateRecord, refusal
from kvstore_xfer.mapper.artifact import load
from kvstore_xfer.tier.policy import direction_of
from kvstore_xfer.yaml_file import load_yaml

if TYPE_CHECKING:
    import argparse

    from kvstore_xfer.mapper.artifact import Artifact

_HOURS_PER_MONTH = 730


@dataclass(frozen=True)
class PairPlan:
    """One row: what the gate measured, what the traffic saves, and whether to enable the pair."""

    source: str
    target: str
    direction: str
    enable: bool
    why: str
    record: GateRecord | None
    saving: Saving | None

    def to_json(self, gpu_hour_price: float | None) -> dict[str, Any]:
        record, saved = self.record, self.saving
        row: dict[str, Any] = {
            "source": self.source,
            "target": self.target,
            "direction": self.direction,
            "enable": self.enable,
            "why": self.why,
            "dtype": record.dtype if record else None,
            "retention": record.retention if record else None,
            "kl_share": record.kl_share if record else None,
            "saving": asdict(saved) if saved else None,
        }
        if gpu_hour_price is not None and saved is not None:
            row["price_saved_per_month"] = _per_month(saved, gpu_hour_price)
        return row


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="what conversion would save for an expected traffic",
        description="Savings per ordered pair from the gate's figures and a traffic file. Rates in "
        "the traffic file go before those of the check, which ran on its own machine.",
    )
    parser.add_argument("manifest", type=Path, metavar="FAMILY.yaml")
    parser.add_argument("--traffic", type=Path, required=True, metavar="FILE", help="traffic, YAML")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    family = load_family(options.manifest)
    traffic = load_yaml(options.traffic, Traffic, "traffic file")
    entries = {(entry.source, entry.target): (n, entry) for n, entry in enumerate(family.pairs)}
    plans = []
    for number, switch in enumerate(traffic.switches):
        found = entries.get((switch.source, switch.target))
        if found is None:
            raise ConfigError(
                f"{options.traffic}: switches.{number}: no pair {switch.source} to {switch.target} "
                f"under pairs in {options.manifest}; fit, check and add it first"
            )
        artifact = _artifact(options.manifest, *found)
        plans.append(_plan(artifact, family, found[1], switch))
    if options.json:
        rows = [plan.to_json(traffic.gpu_hour_price) for plan in plans]
        sys.stdout.write(json.dumps({"family": family.family, "pairs": rows}, indent=2) + "\n")
    else:
        _print(family, plans, traffic.gpu_hour_price)
    return 0


def _artifact(manifest: Path, number: int, entry: PairEntry) -> Artifact:
    try:
        return load(manifest.resolve().parent / entry.mapper)
    except KvxferError as error:
        raise ConfigError(f"{manifest}: pairs.{number}.mapper: {error}") from None


def _plan(artifact: Artifact, family: Family, entry: PairEntry, traffic: SwitchTraffic) -> PairPlan:
    mapper = artifact.mapper
    direction = direction_of(mapper.source, mapper.target).value
    plan = PairPlan(entry.source, entry.target, direction, False, "", None, None)
    stored = artifact.gate.get(mapper.target.dtype) or next(iter(artifact.gate.values()), None)
    if stored is None:
        return replace(plan, why="not checked yet: kvxfer check")
    record = GateRecord.from_json(stored)
    plan = replace(plan, record=record)
    refused = refusal(record, mapper, mapper.target)
    if refused is not None:
        return replace(plan, why=f"the gate refuses it: {record.reason or refused.value}")
    failure = unmet(family, entry, record)
    if failure:
        return replace(plan, why=f"the manifest refuses it: {failure}")
    policy = replace(policy_of(entry.policy), enabled=True)
    rates = Rates(
        prefill=traffic.prefill_tokens_per_second
        or policy.prefill_tokens_per_second
        or record.prefill_tokens_per_second,
        conversion=traffic.conversion_tokens_per_second
        or policy.conversion_tokens_per_second
        or record.conversion_tokens_per_second,
    )
    checked = policy.checked_limit(record.longest_prefix_tokens)
    policy = replace(
        policy,
        max_prefix_tokens=min(checked, policy.max_prefix_tokens or checked),
        prefill_tokens_per_second=rates.prefill,
        conversion_tokens_per_second=rates.conversion,
    )
    bytes_per_token = mapper.target.kv_bytes_per_token(record.dtype)
    return _judged(replace(plan, saving=saving(traffic, policy, rates, bytes_per_token)), traffic)


def _judged(plan: PairPlan, traffic: SwitchTraffic) -> PairPlan:
    saved = plan.saving
    if saved is None or saved.break_even_tokens is None:
        return replace(plan, why="conversion is slower than the target's prefill at every length")
    if saved.converted_share == 0:
        longest = max(traffic.prefix_tokens)
        return replace(plan, why=f"no prefix is converted: the longest has {longest} tokens")
    share = f"{saved.converted_share:.0%} of switches are converted"
    return replace(plan, enable=True, why=share)


def _per_month(saved: Saving, gpu_hour_price: float) -> float:
    return saved.gpu_seconds_per_hour / 3600 * _HOURS_PER_MONTH * gpu_hour_price


def _print(family: Family, plans: list[PairPlan], price: float | None) -> None:
    lines = [f"{family.family}: what conversion saves"]
    for plan in plans:
        verdict = "enable" if plan.enable else "do not enable"
        lines.append(f"\n{plan.source} -> {plan.target} ({plan.direction}): {verdict}; {plan.why}")
        lines += [f"  {name:22}{value}" for name, value in _figures(plan, price)]
    sys.stdout.write("\n".join(lines) + "\n")


def _figures(plan: PairPlan, price: float | None) -> list[tuple[str, str]]:
    figures = []
    if plan.saving is not None:
        saved, tokens = plan.saving, plan.saving.break_even_tokens
        figures += [
            ("time to first token", f"{saved.seconds_per_switch * 1000:,.0f} ms less at a switch"),
            ("prefill saved", f"{saved.gpu_seconds_per_hour:,.0f} GPU seconds an hour"),
            ("derived blocks", f"{saved.derived_bytes_per_hour / 2**30:,.2f} GiB an hour"),
            ("breaks even at", "no length" if tokens is None else f"{tokens:,} tokens"),
        ]
        if price is not None:
            figures.append(("saved a month", f"{_per_month(saved, price):,.2f}"))
    if plan.record is not None and plan.record.retention:
        kept = plan.record.retention
        interval = f"{kept['low']:.3f} to {kept['high']:.3f}"
        dtype = plan.record.dtype
        figures.append(("retention (gate)", f"{kept['mean']:.3f} ({interval}), {dtype}"))
    return figures
