"""The tensors of one block, in memory that an engine or a test owns.

A page is two strided views, keys ``[layers, tokens, heads, key_dim]`` and values
``[layers, tokens, heads, value_dim]``. Every engine layout can be shown as such views without a
copy; `KvPage.segments` says whether the canonical byte order can be read or written in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class KvShape:
    """Geometry of one block; the canonical payload is all keys, then all values."""

    layers: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        return (self.layers, self.tokens, self.heads, self.key_dim)

    @property
    def value_shape(self) -> tuple[int, int, int, int]:
        return (self.layers, self.tokens, self.heads, self.value_dim)

    @property
    def payload_bytes(self) -> int:
        rows = self.layers * self.tokens * self.heads
        return rows * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class KvPage:
    """Keys ``[L, T, H, Dk]`` and values ``[L, T, H, Dv]`` of one block, possibly strided."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, shape: KvShape) -> KvPage:
        """A canonical page in one allocation, keys before values."""
        flat = torch.empty(shape.payload_bytes // shape.dtype.itemsize, dtype=shape.dtype)
        split = shape.layers * shape.tokens * shape.heads * shape.key_dim
        return cls(flat[:split].view(shape.key_shape), flat[split:].view(shape.value_shape))

    @classmethod
    def empty_run(cls, shape: KvShape, blocks: int, device: torch.device | str = "cpu") -> KvPage:
        """One page for `blocks` consecutive blocks, layer by layer; `split` gives the blocks."""
        tokens = shape.tokens * blocks
        keys, values = (
            torch.empty(shape.layers, tokens, shape.heads, width, dtype=shape.dtype, device=device)
            for width in (shape.key_dim, shape.value_dim)
        )
        return cls(keys, values)

    def split(self, tokens: int) -> list[KvPage]:
        """Views of `tokens` tokens each, in order; a shorter rest at the end is left out."""
        starts = range(0, self.keys.shape[1] - tokens + 1, tokens)
        return [self.cut(start, start + tokens) for start in starts]

    def cut(self, start: int, stop: int) -> KvPage:
        """A view of the tokens ``[start, stop)``."""
        return KvPage(self.keys[:, start:stop], self.values[:, start:stop])

    @property
    def shape(self) -> KvShape:
        layers, tokens, heads, key_dim = self.keys.shape
        return KvShape(layers, tokens, heads, key_dim, self.values.shape[-1], self.keys.dtype)

    def segments(self) -> list[memoryview] | None:
        """Writable byte runs of the page in canonical order; None if the strides do not allow it.

        Contiguous components give one run each, pages of a layer-first pool one run per layer.
        """
        keys, values = _runs(self.keys), _runs(self.values)
        return None if keys is None or values is None else keys + values

    def copy_from(self, other: KvPage) -> None:
        self.keys.copy_(other.keys)
        self.values.copy_(other.values)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _runs(component: torch.Tensor) -> list[memoryview] | None:
    if component.device.type != "cpu":
        return None
    if component.is_contiguous():
        return [byte_view(component)]
    if not component.shape[0] or not component[0].is_contiguous():
        return None
    # One conversion for all layers: slicing the array is much cheaper than slicing the tensor.
    return array_runs(component.detach().view(torch.uint8).numpy())


def array_runs(component: np.ndarray) -> list[memoryview]:
    """The runs of ``[L, T, H, bytes]`` whose layers are contiguous, uint8."""
    if component.flags.c_contiguous:
        return [component.reshape(-1).data]
    return [layer.reshape(-1).data for layer in component]
