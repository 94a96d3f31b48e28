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
    rotor = Rotor(vectors.to(dtype), spec)
    rotor.turn(cos.to(dtype), sin.to(dtype))
    return rotor.output


class Rotor:
    """Rotates what lies in one buffer into another, for many batches of one shape.

    Parameters
    ----------
    vectors
        ``[..., T, H, head_dim]``, float32 or float64: the attribute `input`. `output`, of the same
        shape and dtype, is new.
    spec
        What is rotated, and how pairs lie.
    """

    def __init__(self, vectors: torch.Tensor, spec: RopeSpec) -> None:
        self.input = vectors
        self.output = torch.empty_like(vectors)
        self._from = _pairs(self.input, spec)
        self._to = _pairs(self.output, spec)
        plain = slice(spec.rotary_dim, spec.head_dim)
        self._rest = (
            (self.output[..., plain], self.input[..., plain])
            if spec.rotary_dim < spec.head_dim
            else None
        )

    def turn(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Fill `output`; tables ``[T, rotary_dim / 2]`` of the input's dtype, with any factor."""
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [T, 1, R/2]
        (first, second), (turned_first, turned_second) = self._from, self._to
        torch.mul(first, cos, out=turned_first)
        turned_first.addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=turned_second)
        turned_second.addcmul_(first, sin)
        if self._rest is not None:
            self._rest[0].copy_(self._rest[1])


def _pairs(vectors: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Views ``[..., R/2]`` of the first and second member of every rotated pair."""
    if spec.interleaved:
        return vectors[..., 0 : spec.rotary_dim : 2], vectors[..., 1 : spec.rotary_dim : 2]
    half = spec.rotary_dim // 2
    return vectors[..., :half], vectors[..., half : spec.rotary_dim]
