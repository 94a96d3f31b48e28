"""Tile sizes per architecture, read from ``tuning/*.json``.

The files are written by ``python -m kvxfer_kernels.tune`` on a device of that architecture.
``measured`` is null in a file that was chosen from the counted bytes and registers alone
(docs/kernels.md), else the device that was measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).parent / "tuning"


@dataclass(frozen=True)
class Tuning:
    """How the map kernel is cut and launched.

    `block` tokens per tile; `step` dimensions per product, `strip_step` where keys are un-rotated
    in registers; `programs` per multiprocessor. Keys that more than `strip_reuse` target layers
    read are un-rotated into memory first.
    """

    block: int
    step: int
    strip_step: int
    warps: int
    stages: int
    programs: int
    strip_reuse: float

    def for_columns(self, columns: int) -> Tuning:
        """The tables are for heads of up to 128 numbers; wider tiles hold fewer of everything.

        Nor do they leave registers to un-rotate in: keys are always un-rotated in memory.
        """
        if columns <= 128:
            return self
        block = min(64, self.block * 128 // columns)
        return replace(self, block=block, step=self.step * 128 // columns, strip_reuse=0.0)

    def parts(self, columns: int) -> int:
        """In how many parts a tile's columns are rotated and written.

        As many as keep the angles in registers, but no narrower than 32 columns, nor than the 16
        numbers (8 of either member of a pair) that a thread writes by 16 bytes.
        """
        if columns > 128:
            return 2
        return max(1, min(columns // 32, self.block * columns // (self.warps * 32 * 16)))


# The interpreter runs any size; small tiles and three programs exercise every loop.
INTERPRETER = Tuning(
    block=32, step=64, strip_step=32, warps=1, stages=1, programs=3, strip_reuse=8.0
)


def load(architecture: str, kind: str) -> Tuning:
    """The table of an architecture (``sm90``, ``gfx942``) for a kind of call.

    `kind` is ``local`` or ``full`` (16-bit operands) or ``fp32``. An unknown architecture gets
    the most frugal table, sm120's, which fits into every device's shared memory.
    """
    file = FOLDER / f"{architecture}.json"
    if not file.exists():
        file = FOLDER / "sm120.json"
    return Tuning(**json.loads(file.read_text(encoding="utf-8"))["tables"][kind])


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
