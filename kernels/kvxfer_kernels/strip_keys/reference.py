"""The definition of `strip_keys`, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvxfer_kernels.rotation import Rotation


def turn(
    keys: torch.Tensor, rotation: Rotation, positions: torch.Tensor, *, strip: bool
) -> torch.Tensor:
    """Rotate keys ``[..., N, H, D]`` to `positions` ``[N]``, or undo it; float64."""
    angles = (positions.to(torch.float32)[:, None] * rotation.inv_freq).double()[:, None]
    factor = 1 / rotation.attention_factor if strip else rotation.attention_factor
    cos, sin = angles.cos() * factor, angles.sin() * (-factor if strip else factor)
    dims = [dim[: rotation.rotated_pairs] for dim in rotation.pair_dims()]
    source = keys.double()
    first, second = source[..., dims[0]], source[..., dims[1]]
    result = source.clone()
    result[..., dims[0]] = first * cos - second * sin
    result[..., dims[1]] = second * cos + first * sin
    return result


def strip_keys(keys: torch.Tensor, rotation: Rotation, positions: torch.Tensor) -> torch.Tensor:
    """Keys ``[L, N, H, D]`` without their rotation, float64."""
    return turn(keys, rotation, positions, strip=True)
