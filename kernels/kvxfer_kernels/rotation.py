"""The rotary embedding as the kernels read it: one table of cosines and sines per call.

A key of even width D is D / 2 pairs of numbers. Rotated pairs come first; dimensions that the
model leaves alone (partial rotary) are paired too, with an angle of zero, so that a kernel has one
loop for all of them.

The table is made by torch once per call and shared by all layers and heads. Computing the angles
in the kernel instead would repeat accurate range reduction, needed at position 131,071, for every
target layer: some 40 instructions per number against 8 bytes from the L2 cache (docs/kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """What rotates the keys of one model.

    `inv_freq` is float32 ``[R / 2]`` for the first R of `head_dim` dimensions. Pairs are
    (i, i + R / 2), or (2 i, 2 i + 1) when `interleaved`. `attention_factor` scales the rotated
    dimensions.

    Raises ValueError when a size does not fit, TypeError when `inv_freq` is not float32.
    """

    inv_freq: torch.Tensor
    head_dim: int
    attention_factor: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.inv_freq.dtype is not torch.float32:
            raise TypeError(f"inv_freq: expected float32, got {self.inv_freq.dtype}")
        if self.inv_freq.dim() != 1 or not 0 < self.rotated_pairs <= self.pairs:
            raise ValueError(
                f"inv_freq: shape {tuple(self.inv_freq.shape)} does not fit head_dim "
                f"{self.head_dim}"
            )
        if self.attention_factor <= 0:
            raise ValueError(f"attention_factor: {self.attention_factor} is not positive")

    @property
    def pairs(self) -> int:
        return self.head_dim // 2

    @property
    def rotated_pairs(self) -> int:
        return self.inv_freq.numel()

    def pair_dims(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second dimension of every pair, int64 ``[D / 2]`` each."""
        if self.interleaved:
            first = torch.arange(0, 2 * self.pairs, 2)
            return first, first + 1
        pair = torch.arange(self.pairs)
        turned = pair < self.rotated_pairs
        first = torch.where(turned, pair, pair + self.rotated_pairs)
        return first, torch.where(turned, pair + self.rotated_pairs, pair + self.pairs)

    def strip_table(self, positions: torch.Tensor) -> torch.Tensor:
        """Float32 ``[N, 2, D / 2]`` of cosines and sines that undo the rotation at `positions`."""
        return self._table(positions, 1.0 / self.attention_factor)

    def apply_table(self, positions: torch.Tensor) -> torch.Tensor:
        """Float32 ``[N, 2, D / 2]`` of cosines and sines that rotate to `positions`."""
        return self._table(positions, self.attention_factor)

    def _table(self, positions: torch.Tensor, factor: float) -> torch.Tensor:
        table = torch.zeros(
            (positions.numel(), 2, self.pairs), dtype=torch.float32, device=positions.device
        )
        table[:, 0, self.rotated_pairs :] = 1.0
        # The float32 product is part of the definition: the engines round the angle this way.
        angles = positions.to(torch.float32)[:, None] * self.inv_freq.to(positions.device)
        table[:, 0, : self.rotated_pairs] = angles.cos() * factor
        table[:, 1, : self.rotated_pairs] = angles.sin() * factor
        return table
