"""Strip and apply RoPE on many tokens at once.

Keys in a cache carry the rotation of their absolute position. The angle is the float32 product
``position * inv_freq``, rounded as transformers, SGLang and vLLM round it: at position 131,071
that rounding is worth 0.004 rad, so exact angles would not undo what the engine applied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvstore_xfer.rope.spec import RopeSpec


def rope_tables(spec: RopeSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[T, rotary_dim / 2]``, float32, without the attention factor.

    `positions`: int64 ``[T]``, absolute; the tables are on its device.
    """
    inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=positions.device)
    angles = positions.to(torch.float32)[:, None] * inv_freq
    return angles.cos(), angles.sin()


def apply_rope(
    content: torch.Tensor, spec: RopeSpec, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotate position-free keys ``[..., T, H, head_dim]`` to the positions of the tables.

    Any float dtype in; float32 out (float64 for float64 input). Always a new tensor.
    """
    return _rotate(content, spec, cos * spec.attention_factor, sin * spec.attention_factor)


def strip_rope(
    keys: torch.Tensor, spec: RopeSpec, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Undo `apply_rope` with the same tables; shapes and dtypes as there."""
    return _rotate(keys, spec, cos / spec.attention_factor, -sin / spec.attention_factor)


@torch.no_grad()
def _rotate(
    vectors: torch.Tensor, spec: RopeSpec, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    dtype = torch.float64 if vectors.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)  # [T, 1, R/2]
    source = vectors.to(dtype)
    result = torch.empty_like(source)
    first, second = _pairs(source, spec)
    rotated_first, rotated_second = _pairs(result, spec)
    torch.mul(first, cos, out=rotated_first)
    rotated_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated_second)
    rotated_second.addcmul_(first, sin)
    if spec.rotary_dim < spec.head_dim:
        result[..., spec.rotary_dim :] = source[..., spec.rotary_dim :]
    return result


def _pairs(vectors: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``[..., R/2]`` of the first and second member of every rotated pair."""
    if spec.interleaved:
        return vectors[..., 0 : spec.rotary_dim : 2], vectors[..., 1 : spec.rotary_dim : 2]
    half = spec.rotary_dim // 2
    return vectors[..., :half], vectors[..., half : spec.rotary_dim]
