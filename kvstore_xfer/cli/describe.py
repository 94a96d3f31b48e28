"""``kvxfer describe``: what a model is, and whether its cache can be converted."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from kvstore_xfer.models.description import ModelDescription


def register(subparsers: Any) -> None:
    """Add the parser of this subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "describe", help="show a model's geometry, RoPE, digests, and whether it converts"
    )
    parser.add_argument("model", metavar="MODEL", help="model folder, or hub id (owner/name)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description; 0 also for a model that does not convert. Raises ModelError."""
    from kvstore_xfer.models.description import describe

    description = describe(args.model, revision=args.revision)
    if args.json:
        sys.stdout.write(json.dumps(_json(description), indent=2) + "\n")
    else:
        _print_table(description)
    return 0


def _json(description: ModelDescription) -> dict[str, Any]:
    return {
        **description.to_json(),
        "convertible": description.convertible,
        "fingerprint": description.fingerprint(),
        "kv_bytes_per_token": description.kv_bytes_per_token(description.dtype),
    }


def _print_table(description: ModelDescription) -> None:
    from rich.table import Table

    from kvstore_xfer.cli.output import open_console

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    for label, value in _rows(description):
        table.add_row(label, value)
    open_console().print(table)


def _rows(model: ModelDescription) -> list[tuple[str, str]]:
    heads = f"{model.query_heads} query, {model.kv_heads} KV"
    return [
        ("model", model.name),
        ("type", f"{model.model_type}, {model.parameters:,} parameters, {model.dtype}"),
        ("layers", f"{model.layers}, hidden size {model.hidden_size}"),
        ("heads", f"{heads}, key width {model.key_dim}, value width {model.value_dim}"),
        ("vocabulary", f"{model.vocab_size:,} ids, up to {model.max_positions:,} positions"),
        ("KV cache", f"{model.kv_bytes_per_token(model.dtype):,} bytes a token"),
        ("attention", model.attention.value),
        ("RoPE", _rope_line(model)),
        ("tokenizer", model.tokenizer_digest),
        ("weights", model.weights_digest),
        ("fingerprint", model.fingerprint()),
        ("convertible", "yes" if model.refusal is None else f"no: {model.refusal}"),
    ]


def _rope_line(model: ModelDescription) -> str:
    rope = model.rope
    if rope is None:
        return "not supported"
    pairing = "interleaved pairs" if rope.interleaved else "half-split pairs"
    factor = f", attention factor {rope.attention_factor:.6g}"
    return f"{rope.rope_type}, {rope.rotary_dim} of {rope.head_dim} dimensions, {pairing}" + (
        factor if rope.attention_factor != 1.0 else ""
    )
