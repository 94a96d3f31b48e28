"""A fit that was interrupted goes on where it was: moments and the number of the next sequence."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvstore_xfer.blocks.header import payload_checksum
from kvstore_xfer.blocks.page import byte_view
from kvstore_xfer.errors import ConfigError
from kvstore_xfer.fit.moments import Moments

if TYPE_CHECKING:
    from pathlib import Path

    import torch

FOLDER = ".fit"
NEEDS_ROOM = "give a folder that can be written and has room"
_TENSORS = tuple(field.name for field in fields(Moments) if field.name != "rows")


def save_checkpoint(
    out: Path,
    run: dict[str, str],
    moments: dict[str, Moments],
    next_sequence: int,
    number: int = 0,
) -> None:
    """Replace the checkpoint of pass `number` of the fit that writes to `out`.

    `run` says what is being fitted.

    Raises ConfigError when it cannot be written; the one before is kept.
    """
    folder = out / FOLDER
    tensors: dict[str, torch.Tensor] = {
        f"{name}/{tensor}": getattr(part, tensor).cpu()
        for name, part in moments.items()
        for tensor in _TENSORS
    }
    rows = {name: part.rows for name, part in moments.items()}
    state = {
        "run": json.dumps(run),
        "rows": json.dumps(rows),
        "next": str(next_sequence),
        "checksum": _checksum(tensors),
    }
    file = folder / _file(number)
    partial = file.with_name(f"{file.name}.partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata=state)
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"--out {folder}: cannot be written ({error}); {NEEDS_ROOM}") from None


def _file(number: int) -> str:
    return "moments.safetensors" if not number else f"moments.{number}.safetensors"


def load_checkpoint(
    out: Path, run: dict[str, str], moments: dict[str, Moments], number: int = 0
) -> int:
    """Fill `moments` of pass `number` and return its next sequence; 0 when there is none.

    Raises ConfigError when the checkpoint belongs to another fit or is damaged.
    """
    file = out / FOLDER / _file(number)
    if not file.exists():
        return 0
    try:
        with safe_open(file, "pt") as stored:
            state = stored.metadata()
            _require_same_run(file, json.loads(state["run"]), run)
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            if _checksum(tensors) != state["checksum"]:
                raise ValueError("its checksum does not match")
            rows = json.loads(state["rows"])
            for name, part in moments.items():
                part.rows = rows[name]
                for tensor in _TENSORS:
                    getattr(part, tensor).copy_(tensors[f"{name}/{tensor}"])
            return int(state["next"])
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: damaged checkpoint ({error}); fit without --resume") from None


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    return payload_checksum(byte_view(tensors[name].contiguous()) for name in sorted(tensors))


def drop_checkpoint(out: Path) -> None:
    shutil.rmtree(out / FOLDER, ignore_errors=True)


def told(name: str) -> str:
    """An entry of what tells one fit from another, by all the options that decide it."""
    return name.replace("--text", "--text, --sequences or --sequence-tokens")


def _require_same_run(file: Path, stored: dict[str, str], run: dict[str, str]) -> None:
    different = [told(name) for name in run if stored.get(name) != run[name]]
    if different:
        raise ConfigError(
            f"{file}: belongs to another fit ({', '.join(different)} differs); "
            "fit without --resume or with the same arguments"
        )
