"""`strip_keys`: un-rotate the keys of all source layers and heads into one dense buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from kvxfer_kernels.launch import (
    FP8,
    as_codes,
    check_runnable,
    check_scales,
    interpreted,
)
from kvxfer_kernels.strip_keys.kernel import strip_keys_kernel
from kvxfer_kernels.tuning import next_power_of_2

if TYPE_CHECKING:
    from kvxfer_kernels.paged import Paged
    from kvxfer_kernels.rotation import Rotation

BLOCK = 32  # 4 warps hold 32 x 128 numbers and their angles in 64 registers a thread


def strip_keys(
    keys: Paged,
    rotation: Rotation,
    table: torch.Tensor,
    dtype: torch.dtype,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys without their rotation, dense ``[layers, N, heads, head_dim]`` of `dtype`.

    Parameters
    ----------
    keys
        bf16, fp16, fp32, or fp8 (e4m3) with `scales`, float32 ``[layers, heads]``.
    table
        ``rotation.strip_table(positions)`` on the same device.

    Raises ValueError when a shape, dtype or device does not fit.
    """
    base = keys.base
    check_runnable(strip_keys_kernel, base.device)
    scales = check_scales("keys", base, scales)
    if table.shape != (keys.tokens, 2, rotation.pairs) or table.device != base.device:
        raise ValueError(f"table: {tuple(table.shape)} on {table.device} for {keys.tokens} tokens")
    if base.shape[3] != rotation.head_dim:
        raise ValueError(f"keys: width {base.shape[3]}, rotation for {rotation.head_dim}")
    layers, heads = base.shape[0], base.shape[2]
    out = torch.empty(
        (layers, keys.tokens, heads, rotation.head_dim), dtype=dtype, device=base.device
    )
    block = 16 if interpreted(strip_keys_kernel) else BLOCK
    strip_keys_kernel[(triton.cdiv(keys.tokens, block), layers * heads)](
        as_codes(base),
        keys.rows,
        out,
        table,
        table if scales is None else scales,
        base.stride(0),
        base.stride(2),
        base.stride(3),
        keys.tokens,
        heads,
        INTERLEAVED=rotation.interleaved,
        HALF=rotation.rotated_pairs,
        PAIRS=rotation.pairs,
        WIDTH=next_power_of_2(rotation.pairs),
        BLOCK=block,
        FP8=base.dtype is FP8,
        SOURCE_VECTOR=keys.vector,
    )
    return out
