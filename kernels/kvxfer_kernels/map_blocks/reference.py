"""The definition of `map_blocks`, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvxfer_kernels.strip_keys.reference import turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer_kernels.pack import AffineMap
    from kvxfer_kernels.rotation import Rotation


def map_blocks(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    key_maps: Sequence[AffineMap],
    value_maps: Sequence[AffineMap],
    source_rotation: Rotation,
    target_rotation: Rotation,
    head_assignment: Sequence[int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Source ``[L_s, N, H_s, d_s]`` -> target keys and values ``[L_t, N, H_t, d_t]``, float64.

    `head_assignment` is None for full-head maps.
    """
    stripped = turn(keys, source_rotation, positions, strip=True)
    mapped = torch.stack([_map(stripped, item, head_assignment) for item in key_maps])
    return (
        turn(mapped, target_rotation, positions, strip=False),
        torch.stack([_map(values.double(), item, head_assignment) for item in value_maps]),
    )


def _map(
    source: torch.Tensor, item: AffineMap, head_assignment: Sequence[int] | None
) -> torch.Tensor:
    chosen = source[list(item.source_layers)]  # [k, N, H_s, d_s]
    weight, bias = item.weight.double(), item.bias.double()
    if head_assignment is None:
        rows = chosen.permute(1, 0, 2, 3).flatten(1)
        return (rows @ weight).view(-1, *bias.shape) + bias
    by_head = chosen[:, :, list(head_assignment)].permute(2, 1, 0, 3).flatten(2)
    return torch.bmm(by_head, weight).transpose(0, 1) + bias
