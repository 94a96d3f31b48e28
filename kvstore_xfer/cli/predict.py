"""`kvxfer predict`: before a fit, is this pair likely to pass the gate, and with which method."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from rich.table import Table

from kvstore_xfer.cli.common import judge_text, positive_int, progress, require_positions
from kvstore_xfer.cli.models import add_pair_options, load_pair, require_two_models
from kvstore_xfer.cli.output import open_console
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit.text import cut_sequences
from kvstore_xfer.gate.predict import (
    LEAST_SEQUENCES,
    LEAST_TOKENS,
    LIKELY,
    PLANNED_SEQUENCES,
    Forecast,
    predict,
)

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

EXIT_UNLIKELY = 3


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "predict",
        help="before a fit: is this pair likely to pass the check, and with which method",
        description="Exit code 0: likely, 3: unlikely. Nothing is written.",
    )
    add_pair_options(parser)
    parser.add_argument("--sequences", type=positive_int, default=48, help="default: 48")
    parser.add_argument(
        "--sequence-tokens", type=positive_int, default=1024, help="tokens each (default: 1024)"
    )
    parser.add_argument(
        "--planned",
        type=positive_int,
        default=PLANNED_SEQUENCES,
        help=f"sequences that the real fit will have (default: {PLANNED_SEQUENCES})",
    )
    parser.add_argument("--json", action="store_true", help="print the forecast as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    least = {"sequences": LEAST_SEQUENCES, "sequence_tokens": LEAST_TOKENS}
    for name, number in least.items():
        given = getattr(options, name)
        if given < number:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {given}: a forecast needs {number}; give more")
    source, target = load_pair(options.source, options.target, options)
    require_two_models(source.description, target.description)
    require_positions(options.sequence_tokens, source.description, target.description)
    sequences = cut_sequences(
        options.text, source.tokenize, tokens=options.sequence_tokens, count=options.sequences
    )
    judge_text(options.text, sequences, source.description.vocab_size)
    started = time.perf_counter()
    with progress("trying methods") as update:
        forecast = predict(
            source,
            target,
            sequences,
            planned=options.planned,
            device=str(target.device),
            progress=update,
        )
    if options.json:
        sys.stdout.write(json.dumps(forecast.to_json(), indent=2) + "\n")
    else:
        _print(forecast, time.perf_counter() - started, open_console())
    return 0 if forecast.verdict == LIKELY else EXIT_UNLIKELY


def _print(forecast: Forecast, seconds: float, console: Console) -> None:
    against = f": {forecast.reason}" if forecast.reason else ""
    method = f", with {forecast.method}" if forecast.verdict == LIKELY else ""
    console.print(f"{forecast.verdict.upper()} to pass{method}{against}", highlight=False)
    if not forecast.methods:
        return
    table = Table(
        "method", "k", "parameters", "KL here", "KL expected", "top-1", "cosine", "worst layer"
    )
    for m in forecast.methods:
        figures = (m.kl, m.expected_kl, m.top1, m.cosine, m.worst_cosine)
        cells = (f"{figure:.4f}" for figure in figures)
        table.add_row(m.method, str(m.layers), f"{m.parameters:,}", *cells)
    console.print(table)
    controls = ", ".join(f"{arm} {kl:.4f}" for arm, kl in forecast.controls)
    console.print(
        f"KL of the controls: {controls}; {forecast.sequences} sequences, {seconds:.0f} s",
        highlight=False,
    )
