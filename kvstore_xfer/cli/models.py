"""Options that name two models, and loading them: for `fit`, `check`, `predict` and `eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.errors import ConfigError
from kvxfer_transformers.model import load_model

if TYPE_CHECKING:
    import argparse

    from kvstore_xfer.models.description import ModelDescription
    from kvxfer_transformers.model import LoadedModel

DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Two models and a text to run them over."""
    parser.add_argument("--source", required=True, help="model folder or hub id to read from")
    parser.add_argument("--target", required=True, help="model folder or hub id to write for")
    parser.add_argument("--text", required=True, type=Path, help=".txt, .jsonl or .parquet file")
    add_model_options(parser)


def load_pair(
    source: str, target: str, options: argparse.Namespace
) -> tuple[LoadedModel, LoadedModel]:
    """Source and target in the one dtype and on the device that `add_model_options` asks for."""
    device = torch_device(options.device)
    loaded = load_model(target, dtype=torch_dtype(options.dtype), device=device)
    return load_model(source, dtype=loaded.dtype, device=device), loaded


def require_two_models(source: ModelDescription, target: ModelDescription) -> None:
    """Raises ConfigError when both are the same: its blocks are served as they are."""
    if source.fingerprint() == target.fingerprint():
        raise ConfigError(
            f"--target {target.name}: is the source itself, whose blocks need no mapper; give "
            "another model"
        )


def torch_dtype(name: str) -> torch.dtype | str:
    """The dtype of a `--dtype` option; 'auto' is passed on: the model's own."""
    if name == "auto":
        return name
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def torch_device(name: str) -> str:
    """The device of a `--device` option; 'auto' prefers a GPU. Raises ConfigError if missing."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"--device {name}: not available here; give cpu or auto") from None
    return name


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="dtype both models run and cache in (default: the target's own)",
    )
    parser.add_argument("--device", default="auto", help="torch device (default: a GPU if any)")
