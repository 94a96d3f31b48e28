"""`strip_keys`: un-rotate the keys of all source layers and heads into one dense buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from kvxfer_kernels.launch import (
    FP8,
    TRITON_DTYPES,
    as_codes,
    check_runnable,
    check_scales,
)
from kvxfer_kernels.strip_keys.kernel import strip_keys_kernel
from kvxfer_kernels.tuning import next_power_of_2

if TYPE_CHECKING:
    from kvxfer_kernels.paged import Paged
    from kvxfer_kernels.rotation import Rotation

WARPS = 4


def block(pairs: int) -> int:
    """Tokens per program: 32 x 128 numbers and their angles are 64 registers a thread."""
    return max(32, 2048 // pairs)  # narrower heads need more tokens for accesses of 16 bytes


def strip_keys(
    keys: Paged,
    out: Paged,
    rotation: Rotation,
    table: torch.Tensor,
    layers: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write the keys of some layers without their rotation.

    Parameters
    ----------
    keys
        bf16, fp16, fp32, or fp8 (e4m3) with `scales`, float32 ``[layers, heads]``.
    out
        bf16, fp16 or fp32 of the same layers, tokens, heads and width, dimensions side by side;
        may be `keys` itself.
    table
        ``rotation.strip_table(positions)`` on the same device.
    layers
        int32, the layers to do.

    Raises ValueError when a shape, dtype or device does not fit.
    """
    base = keys.base
    check_runnable(strip_keys_kernel, base.device)
    scales = check_scales("keys", base, scales)
    _check(keys, out, rotation, table, layers)
    heads = base.shape[2]
    width = next_power_of_2(rotation.pairs)
    strip_keys_kernel[(triton.cdiv(keys.tokens, block(width)), layers.numel() * heads)](
        as_codes(base),
        keys.rows,
        out.base,
        out.rows,
        layers,
        table,
        table if scales is None else scales,
        base.stride(0),
        base.stride(2),
        base.stride(3),
        out.base.stride(0),
        out.base.stride(2),
        keys.tokens,
        heads,
        INTERLEAVED=rotation.interleaved,
        HALF=rotation.rotated_pairs,
        PAIRS=rotation.pairs,
        WIDTH=width,
        BLOCK=block(width),
        FP8=base.dtype is FP8,
        SOURCE_VECTOR=keys.vector,
        TARGET_VECTOR=out.vector,
        num_warps=WARPS,
        num_stages=1,
    )


def _check(
    keys: Paged, out: Paged, rotation: Rotation, table: torch.Tensor, layers: torch.Tensor
) -> None:
    base = keys.base
    if table.shape != (keys.tokens, 2, rotation.pairs) or table.device != base.device:
        raise ValueError(f"table: {tuple(table.shape)} on {table.device} for {keys.tokens} tokens")
    if base.shape[3] != rotation.head_dim:
        raise ValueError(f"keys: width {base.shape[3]}, rotation for {rotation.head_dim}")
    if layers.dtype is not torch.int32 or layers.device != base.device:
        raise ValueError(f"layers: {layers.dtype} on {layers.device}, expected int32 beside keys")
    same = (base.shape[0], *base.shape[2:]) == (out.base.shape[0], *out.base.shape[2:])
    if not same or out.tokens != keys.tokens or out.base.device != base.device:
        raise ValueError(f"out: {tuple(out.base.shape)}, keys {tuple(base.shape)}")
    if out.base.stride(3) != 1 or out.base.dtype not in TRITON_DTYPES:
        raise ValueError(f"out: {out.base.dtype} with strides {out.base.stride()}")
