"""`kvxfer check`: measure a mapper on held-out text, record the verdict, exit 0 or 3."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.check import check
from kvstore_xfer.gate.watch import make_watch, save_watch
from kvstore_xfer.mapper.artifact import load, record_gate
from kvstore_xfer.mapper.convert import TorchConverter
from kvxfer_transformers.model import load_model
from kvxfer_transformers.queries import capture_queries

if TYPE_CHECKING:
    import argparse

    from kvstore_xfer.gate.record import GateRecord

EXIT_REJECTED = 3
_ARMS = {
    "native": "target, own cache",
    "identity": "target, own cache through a store",
    "mapped": "mapped from the source",
    "wrong": "mapped from a wrong document",
    "none": "target, no context",
    "source": "source alone",
}


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
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    artifact = load(options.mapper)
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
    passages = cut_sequences(
        options.text, target.tokenize, tokens=prefix + tail, count=options.passages
    )
    with progress("checking") as update:
        record = check(artifact, source, target, passages, prefix, progress=update)
    record_gate(options.mapper, record.dtype, record.to_json())
    if record.accepted:
        with progress("relating it to retention") as update:
            watch = make_watch(
                artifact.mapper.digest,
                source,
                target,
                TorchConverter(artifact.mapper, target.dtype),
                partial(capture_queries, target),
                passages,
                prefix,
                update,
            )
        save_watch(options.mapper, record.dtype, watch)
    if options.json:
        sys.stdout.write(json.dumps(record.to_json(), indent=2) + "\n")
    else:
        print_record(record, Console())
    return 0 if record.accepted else EXIT_REJECTED


def print_record(record: GateRecord, console: Console) -> None:
    """Verdict first, then the arms with their 95 % intervals."""
    reason = f": {record.reason}" if record.reason else ""
    console.print(f"{record.verdict.upper()}{reason}", highlight=False)
    console.print(
        f"{record.passages} passages of {record.documents} documents, {record.prefix_tokens} "
        f"tokens from the cache, {record.tail_tokens} read after them, {record.dtype}",
        highlight=False,
    )
    if not record.arms:
        return
    table = Table("arm", "loss", "KL", "top-1 agreement", title="mean [95 % interval]")
    for arm, name in _ARMS.items():
        cells = record.arms[arm]
        table.add_row(name, *(_interval(cells[column]) for column in ("loss", "kl", "top1")))
    console.print(table)
    gap = "target no better than source" if record.gap_recovered is None else ""
    console.print(
        f"retention {_interval(record.retention)}, gap recovered "
        f"{gap or _interval(record.gap_recovered or {})}, identity differs by "
        f"{record.identity_max_abs_diff:g}",
        highlight=False,
    )


def _interval(cell: dict[str, float]) -> str:
    return f"{cell['mean']:.4f} [{cell['low']:.4f}, {cell['high']:.4f}]"
