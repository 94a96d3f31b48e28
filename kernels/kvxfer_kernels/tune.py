"""Measure tile sizes on the device at hand and write its tuning table.

    python -m kvxfer_kernels.tune [--write]

Tries a grid around the table in use, for head-local and full-head maps of the Qwen3 14B -> 32B
shape at 4,096 tokens, prints every time, and with ``--write`` replaces the ``local`` and ``full``
entries of ``tuning/<architecture>.json``. A size that does not compile or fit is skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import torch
import triton

from kvxfer_kernels import bench, shapes, tuning
from kvxfer_kernels.launch import architecture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer_kernels.tuning import Tuning

TOKENS = 4096


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvxfer_kernels.tune", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace this architecture's table")
    options = parser.parse_args(argv)
    device = torch.device("cuda")
    name = architecture(device)
    work = bench.Workload(shapes.PAIRS["qwen3-14b-32b"], TOKENS, device)
    best = {kind: _best(work, tuning.load(name, kind), kind) for kind in ("local", "full")}
    if options.write:
        _write(name, best, torch.cuda.get_device_name(device))
    return 0


def candidates(table: Tuning) -> Iterator[Tuning]:
    """The table itself first, then its neighbours."""
    yield table
    for block in (64, 128, 256):
        for step in (32, 64, 128):
            for warps in (4, 8):
                for stages in (2, 3, 4):
                    for programs in (1, 2):
                        yield replace(
                            table,
                            block=block,
                            step=step,
                            warps=warps,
                            stages=stages,
                            programs=programs,
                        )


def _best(work: bench.Workload, table: Tuning, kind: str) -> Tuning:
    maps = work.maps(full=kind == "full")
    found: list[tuple[float, Tuning]] = []
    for candidate in candidates(table):
        # A reuse of zero means un-rotating into memory, infinity in registers.
        for reuse in (0.0, float("inf")) if kind == "local" else (table.strip_reuse,):
            choice = replace(candidate, strip_reuse=reuse)
            try:
                packed = work.pack(maps, choice, full=kind == "full")
                ms = bench.milliseconds(work.kernels(packed))
            except (triton.OutOfResources, triton.CompilationError, RuntimeError) as error:
                sys.stdout.write(f"{kind} {choice}: {type(error).__name__}\n")
                continue
            found.append((ms, choice))
            sys.stdout.write(f"{kind} {choice}: {ms:.3f} ms\n")
    ms, choice = min(found, key=lambda pair: pair[0])
    sys.stdout.write(f"best {kind}: {choice}: {ms:.3f} ms\n")
    # The measured pair reads a key 12.8 times; below that, the counted break-even still holds.
    in_memory = choice.strip_reuse == 0.0
    return replace(choice, strip_reuse=table.strip_reuse if in_memory else 16.0)


def _write(name: str, best: dict[str, Tuning], device: str) -> None:
    file = tuning.FOLDER / f"{name}.json"
    tables = {kind: asdict(tuning.load(name, kind)) for kind in ("local", "full", "fp8", "fp32")}
    tables.update({kind: asdict(table) for kind, table in best.items()})
    lines = ",\n".join(f'  "{kind}": {json.dumps(table)}' for kind, table in tables.items())
    measured = json.dumps(f"{device}, Triton {triton.__version__}")
    text = f'{{\n "measured": {measured},\n "tables": {{\n{lines}\n }}\n}}\n'
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
