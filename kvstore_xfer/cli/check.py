"""`kvxfer check`: measure a mapper on held-out text, record the verdict, exit 0 or 3."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvstore_xfer.cli.common import (
    add_model_options,
    positive_int,
    progress,
    torch_device,
    torch_dtype,
)
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.family import GateEntry, gate_of, load_family, thresholds_of
from kvstore_xfer.gate.arms import ARM_NAMES
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.lengths import CALIBRATION, LENGTHS, Length, cut_lengths
from kvstore_xfer.gate.tasks import read_tasks
from kvstore_xfer.gate.watch import make_watch, save_watch
from kvstore_xfer.mapper.artifact import load, record_gate
from kvstore_xfer.mapper.convert_select import make_converter
from kvstore_xfer.report.page import require_report, write_report
from kvxfer_transformers.model import load_model
from kvxfer_transformers.queries import capture_queries

if TYPE_CHECKING:
    from kvstore_xfer.gate.record import GateRecord
    from kvstore_xfer.mapper.artifact import Artifact
    from kvxfer_transformers.model import LoadedModel

EXIT_REJECTED = 3


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="measure a mapper on held-out text and decide whether it may serve",
        description="Exit code 0: accepted, 3: rejected. The record is kept in the mapper folder.",
    )
    parser.add_argument("mapper", type=Path, metavar="MAPPER", help="mapper folder")
    parser.add_argument("--text", required=True, type=Path, help="held-out .txt, .jsonl, .parquet")
    parser.add_argument("--source", help="source model, if it is no longer where it was fitted")
    parser.add_argument("--target", help="target model, likewise")
    parser.add_argument("--passages", type=positive_int, default=60, help="default: 60")
    parser.add_argument(
        "--prefix-tokens",
        type=positive_int,
        help="tokens served from the cache (default: three quarters of the fitted length)",
    )
    parser.add_argument(
        "--tail-tokens",
        type=positive_int,
        help="tokens read after it (default: a quarter of the fitted length)",
    )
    parser.add_argument(
        "--lengths",
        type=length_names,
        metavar="NAME,...",
        help=f"lengths to measure (default: {','.join(LENGTHS)})",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive_int,
        help="longest context both models can use (default: what their configs state)",
    )
    parser.add_argument("--tasks", type=Path, metavar="FILE", help=".jsonl of questions to answer")
    parser.add_argument(
        "--family", type=Path, metavar="FILE", help="family manifest with thresholds for this pair"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="also write a page, .html (extra: report)"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.report:
        require_report(options.report)
    artifact = load(options.mapper)
    gate = GateEntry() if options.family is None else _gate_entry(options.family, options.mapper)
    fitted = int(artifact.fit["calibration"]["tokens_per_sequence"])
    prefix = options.prefix_tokens or max(1, fitted * 3 // 4)
    tail = options.tail_tokens or max(2, fitted // 4)
    if tail < 2:
        raise ConfigError("--tail-tokens 1: one token leaves nothing to predict; give 2 or more")
    device = torch_device(options.device)
    target = load_model(
        options.target or artifact.mapper.target.name,
        dtype=torch_dtype(options.dtype),
        device=device,
    )
    source = load_model(
        options.source or artifact.mapper.source.name, dtype=target.dtype, device=device
    )
    stated = [m.description.max_positions for m in (source, target)]
    lengths = cut_lengths(
        options.text,
        target.tokenize,
        prefix=prefix,
        tail=tail,
        count=options.passages,
        longest=options.max_tokens or gate.max_tokens or min(filter(None, stated), default=0),
        wanted=(CALIBRATION, *(options.lengths or gate.lengths or LENGTHS)),
    )
    with progress("checking") as update:
        record = check(
            artifact,
            source,
            target,
            lengths[0].passages,
            prefix,
            lengths=lengths[1:],
            tasks=read_tasks(options.tasks, target.tokenize) if options.tasks else (),
            thresholds=thresholds_of(gate),
            progress=update,
        )
    if record.concerns_mapper:
        record_gate(options.mapper, record.dtype, record.to_json())
    if record.accepted:
        _keep_watch(options.mapper, artifact, (source, target), lengths[0])
    if options.report:
        write_report(options.report, artifact, record)
    if options.json:
        sys.stdout.write(json.dumps(record.to_json(), indent=2) + "\n")
    else:
        print_record(record, Console())
    return 0 if record.accepted else EXIT_REJECTED


def _keep_watch(
    folder: Path, artifact: Artifact, models: tuple[LoadedModel, LoadedModel], length: Length
) -> None:
    """What a running tier needs to relate what it sees to retention."""
    source, target = models
    with progress("relating it to retention") as update:
        watch = make_watch(
            artifact.mapper.digest,
            source,
            target,
            make_converter(artifact.mapper, target.dtype, "cpu"),
            partial(capture_queries, target),
            length.passages,
            length.prefix_tokens,
            update,
        )
    save_watch(folder, str(target.dtype).removeprefix("torch."), watch)


def length_names(text: str) -> list[str]:
    """An argparse type: names of lengths, with commas between."""
    names = text.split(",")
    unknown = [name for name in names if name not in LENGTHS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no length; known: {', '.join(LENGTHS)}"
        )
    return names


def _gate_entry(manifest: Path, mapper: Path) -> GateEntry:
    """The thresholds that a family manifest gives the pair with this mapper folder."""
    family = load_family(manifest)
    for pair in family.pairs:
        if (manifest.resolve().parent / pair.mapper).resolve() == mapper.resolve():
            return gate_of(family, pair) or GateEntry()
    raise ConfigError(f"--family {manifest}: no pair has the mapper {mapper}; correct one of them")


def print_record(record: GateRecord, console: Console) -> None:
    """Verdict first, then the arms with their 95 % intervals, length by length."""
    reason = f": {record.reason}" if record.reason else ""
    console.print(f"{record.verdict.upper()}{reason}", highlight=False)
    if not record.passages:
        return
    console.print(
        f"{record.passages} passages of {record.documents} documents, {record.prefix_tokens} "
        f"tokens from the cache, {record.tail_tokens} read after them, {record.dtype}",
        highlight=False,
    )
    if record.attention:
        worst = record.attention["by_layer"][record.attention["worst_layer"]]
        console.print(
            f"attention output, cosine: {_interval(record.attention['mean'])}, worst layer "
            f"{record.attention['worst_layer']} {_interval(worst)}",
            highlight=False,
        )
    if not record.arms:
        return
    console.print(_arms_table(record.to_json(), "mean [95 % interval]"))
    gap = "target no better than source" if record.gap_recovered is None else ""
    console.print(
        f"retention {_interval(record.retention)}, gap recovered "
        f"{gap or _interval(record.gap_recovered or {})}, identity differs by "
        f"{record.identity_max_abs_diff:g}",
        highlight=False,
    )
    for name, figures in record.lengths.items():
        if "skipped" in figures:
            console.print(f"{name}: not measured: {figures['skipped']}", highlight=False)
        else:
            console.print(_arms_table(figures, f"{name}: {figures['prefix_tokens']} tokens"))
    if record.tasks:
        _print_tasks(record.tasks, console)


def _arms_table(figures: dict[str, Any], title: str) -> Table:
    table = Table("arm", "loss", "KL", "top-1 agreement", title=title)
    for arm, name in ARM_NAMES.items():
        if arm in figures["arms"]:
            cells = figures["arms"][arm]
            table.add_row(name, *(_interval(cells[column]) for column in ("loss", "kl", "top1")))
    return table


def _print_tasks(figures: dict[str, Any], console: Console) -> None:
    table = Table("arm", "right answers", title=f"{figures['items']} questions")
    for arm, cell in figures["arms"].items():
        table.add_row(ARM_NAMES[arm], _interval(cell))
    console.print(table)
    ratios = {
        "retention": figures["retention"],
        "floor-normalised": figures["floor_normalised"],
        "gap recovered": figures["gap_recovered"],
    }
    told = (f"{name} {_interval(c) if c else 'not defined'}" for name, c in ratios.items())
    console.print(", ".join(told), highlight=False)


def _interval(cell: dict[str, float]) -> str:
    return f"{cell['mean']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]"
