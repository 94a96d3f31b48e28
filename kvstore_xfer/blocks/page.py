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
    from collections.abc import Iterator


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

    @property
    def shape(self) -> KvShape:
        layers, tokens, heads, key_dim = self.keys.shape
        return KvShape(layers, tokens, heads, key_dim, self.values.shape[-1], self.keys.dtype)

    def segments(self) -> list[memoryview] | None:
        """Writable byte runs of the page in canonical order; None if the strides do not allow it.

        Contiguous components give one run each, pages of a layer-first pool one run per layer.
        """
        runs: list[memoryview] = []
        for component in (self.keys, self.values):
            views = list(_contiguous_runs(component))
            if not views:
                return None
            runs.extend(byte_view(view) for view in views)
        return runs

    def copy_from(self, other: KvPage) -> None:
        self.keys.copy_(other.keys)
        self.values.copy_(other.values)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _contiguous_runs(component: torch.Tensor) -> Iterator[torch.Tensor]:
    if component.device.type != "cpu":
        return
    if component.is_contiguous():
        yield component
    elif component.shape[0] and component[0].is_contiguous():
        yield from component.unbind(0)
