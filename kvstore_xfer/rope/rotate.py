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


def apply_tables(spec: RopeSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope_tables` with the attention factor, with which `Rotor.turn` applies the rotation."""
    cos, sin = rope_tables(spec, positions)
    return cos * spec.attention_factor, sin * spec.attention_factor


def strip_tables(spec: RopeSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables with which `Rotor.turn` undoes the rotation."""
    cos, sin = rope_tables(spec, positions)
    return cos / spec.attention_factor, -sin / spec.attention_factor


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
    return Rotor(spec).turn(vectors, cos.to(dtype), sin.to(dtype))


class Rotor:
    """Rotates any number of batches in two buffers, which grow to the largest of them."""

    def __init__(self, spec: RopeSpec) -> None:
        self._spec = spec
        self._exact = self._turned = torch.empty(0)

    def room(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory for what is to be rotated, until the next call."""
        self._exact = _grown(self._exact, shape.numel(), dtype)
        return self._exact[: shape.numel()].view(shape)

    def turn(self, vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotated vectors ``[..., T, H, head_dim]`` of any float dtype, valid until the next call.

        The tables are ``[T, rotary_dim / 2]``, float32 or float64, with any factor; their dtype is
        that of the result.
        """
        spec = self._spec
        if vectors.dtype != cos.dtype:
            vectors = self.room(vectors.shape, cos.dtype).copy_(vectors)
        self._turned = _grown(self._turned, vectors.numel(), cos.dtype)
        turned = self._turned[: vectors.numel()].view(vectors.shape)
        torch.mul(vectors, _wide(cos, spec).unsqueeze(-2), out=turned)
        sin = sin.unsqueeze(-2)  # [T, 1, R/2]
        (first, second), (turned_first, turned_second) = _pairs(vectors, spec), _pairs(turned, spec)
        turned_first.addcmul_(second, sin, value=-1)
        turned_second.addcmul_(first, sin)
        return turned


def _pairs(vectors: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``[..., R/2]`` of the first and second member of every rotated pair."""
    if spec.interleaved:
        return vectors[..., 0 : spec.rotary_dim : 2], vectors[..., 1 : spec.rotary_dim : 2]
    half = spec.rotary_dim // 2
    return vectors[..., :half], vectors[..., half : spec.rotary_dim]


def _wide(cos: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """``[T, head_dim]``: the cosine of each number's pair, and 1 for what is not rotated."""
    wide = cos.new_ones(len(cos), spec.head_dim)
    for half in _pairs(wide, spec):
        half.copy_(cos)
    return wide


def _grown(buffer: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    fits = buffer.dtype == dtype and buffer.numel() >= size
    return buffer if fits else torch.empty(size, dtype=dtype)
