"""The published pairs, and what mapping them must cost by counted bytes and operations.

Four terms, the largest of which is the floor of the map kernel:

- operations over the tensor cores' rate;
- bytes of device memory, every source, map and target number moved once;
- bytes between the L2 cache and the multiprocessors: a tile reads ``block`` rows of source and
  the whole map of its head;
- for keys that are un-rotated into memory first, one more pass over the source keys, added.

Filling and draining a tile's pipeline is not overlapped when one program has a multiprocessor to
itself; it is added per tile (docs/kernels.md derives the constants).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvxfer_kernels.tuning import Tuning

LENGTHS = (64, 256, 1024, 4096, 16384, 32768)


@dataclass(frozen=True)
class PairShape:
    """Geometry of a pair, widths of keys and values equal. The last three are the target's."""

    name: str
    source_layers: int
    source_heads: int
    source_width: int
    target_layers: int
    target_heads: int
    target_width: int
    chosen: int
    query_heads: int
    hidden: int
    intermediate: int

    def operations(self, tokens: int, *, full: bool) -> float:
        """Floating-point operations of the products of keys and values."""
        rows = self.chosen * self.source_width * (self.source_heads if full else 1)
        return 4.0 * tokens * self.target_layers * self.target_heads * rows * self.target_width

    def source_bytes(self, tokens: int, itemsize: int = 2) -> float:
        return 2.0 * tokens * self.source_layers * self.source_heads * self.source_width * itemsize

    def target_bytes(self, tokens: int) -> float:
        return 4.0 * tokens * self.target_layers * self.target_heads * self.target_width

    def map_bytes(self, *, full: bool) -> float:
        return self.operations(1, full=full)  # 2 components * 2 bytes, 4 operations per weight

    def prefill_operations(self, tokens: int) -> float:
        """The target's own prefill without attention: projections and gated MLP."""
        width = self.target_width
        attention = self.hidden * width * (2 * self.query_heads + 2 * self.target_heads)
        return 2.0 * tokens * self.target_layers * (attention + 3 * self.hidden * self.intermediate)


PAIRS = {
    shape.name: shape
    for shape in (
        PairShape("qwen3-14b-32b", 40, 8, 128, 64, 8, 128, 8, 64, 5120, 25600),
        PairShape("qwen3-8b-32b", 36, 8, 128, 64, 8, 128, 12, 64, 5120, 25600),
        PairShape("llama3.1-8b-70b", 32, 8, 128, 80, 8, 128, 20, 64, 8192, 28672),
        PairShape("ministral3-3b-14b", 26, 8, 128, 40, 8, 128, 26, 32, 5120, 16384),
    )
}


@dataclass(frozen=True)
class Device:
    """What a prediction needs to know; rates are what large plain kernels reach, not data sheets.

    `tile_seconds` is spent per tile before the first and after the last product.
    """

    name: str
    multiprocessors: int
    matrix_rate: float
    memory_rate: float
    l2_rate: float
    tile_seconds: float


# A100 SXM, H200, B200, RTX PRO 6000, MI300X: matrix and copy rates of large plain kernels (about
# 80 % and 90 % of the data sheets), L2 rates from 64 bytes per clock and multiprocessor, halved.
DEVICES = {
    "sm80": Device("A100", 108, 250e12, 1.8e12, 4.5e12, 3.0e-6),
    "sm90": Device("H200", 132, 780e12, 4.3e12, 7.5e12, 2.5e-6),
    "sm100": Device("B200", 148, 1600e12, 7.0e12, 9.0e12, 2.5e-6),
    "sm120": Device("RTX PRO 6000", 188, 400e12, 1.6e12, 9.0e12, 2.5e-6),
    "gfx942": Device("MI300X", 304, 650e12, 4.3e12, 10e12, 3.5e-6),
}


@dataclass(frozen=True)
class Prediction:
    """Seconds per term, and their composition."""

    matrix: float
    memory: float
    l2: float
    tiles: float
    strip: float

    @property
    def total(self) -> float:
        return max(self.matrix, self.memory, self.l2) + self.tiles + self.strip


def predict(
    shape: PairShape, tokens: int, tuning: Tuning, device: Device, *, full: bool
) -> Prediction:
    """Time of one call from counted bytes and operations."""
    blocks = -(-tokens // tuning.block)
    tiles = 2 * blocks * shape.target_layers * shape.target_heads
    rows = shape.chosen * shape.source_width * (shape.source_heads if full else 1)
    tile_bytes = 2.0 * rows * (tuning.block + shape.target_width)
    stripped = full or shape.chosen * shape.target_layers / shape.source_layers > tuning.strip_reuse
    padded = blocks * tuning.block
    moved = shape.source_bytes(tokens) + shape.target_bytes(tokens) + shape.map_bytes(full=full)
    waves = -(-tiles // (device.multiprocessors * tuning.programs))
    return Prediction(
        matrix=shape.operations(padded, full=full) / device.matrix_rate,
        memory=moved / device.memory_rate,
        l2=tiles * tile_bytes / device.l2_rate,
        tiles=waves * device.tile_seconds,
        strip=shape.source_bytes(tokens) / device.memory_rate if stripped else 0.0,
    )


def nearest_layers(
    layer: int, target_layers: int, source_layers: int, chosen: int
) -> tuple[int, ...]:
    """The `chosen` source layers around the same relative depth as a target layer."""
    centre = layer * source_layers // target_layers
    first = min(max(centre - chosen // 2, 0), source_layers - chosen)
    return tuple(range(first, first + chosen))
