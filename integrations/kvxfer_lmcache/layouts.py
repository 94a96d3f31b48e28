"""The forms in which LMCache hands over one chunk, shown as canonical blocks.

With L layers, T tokens, H heads of width D (of one tensor-parallel rank), as seen in 0.5.6:

========= ====================== =========================================================
layout    shape of the object    handed over by
========= ====================== =========================================================
split     ``[2, L, T, H*D]``     vLLM on GPUs; the in-process mode
stacked   ``[2L, T, H*D]``       SGLang, all keys before all values; ``[1, 2L, T, H*D]``
                                 when LMCache's server moves the data itself
packed    ``[L, T, H*2*D]``      vLLM on CPUs; ``[1, L, T, H*2*D]`` when LMCache's server
                                 moves the data itself
opaque    any                    everything else: bytes that nobody looks into
========= ====================== =========================================================

The format tag of an object says nothing: it is the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.blocks.page import KvPage, KvShape
from kvstore_xfer.family import VLLM_CPU_PACK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

_PACKED_ALIGNMENT = VLLM_CPU_PACK_TOKENS  # of blocks and head widths; others are packed otherwise


class Kind(str, Enum):
    """See the module docstring; FUSED is what would be packed if its block size were fit for it."""

    SPLIT = "split"
    STACKED = "stacked"
    PACKED = "packed"
    FUSED = "fused"
    OPAQUE = "opaque"


@dataclass(frozen=True)
class Layout:
    """One form of chunk objects. `shape` is the canonical block's, `object_shape` LMCache's.

    Tensors are ``[bytes]`` uint8, contiguous; `block_tokens` is vLLM's block size (packed only).
    """

    kind: Kind
    shape: KvShape
    object_shape: tuple[int, ...] = ()
    block_tokens: int = 0

    @property
    def is_canonical(self) -> bool:
        """Whether keys and values can be told apart."""
        return self.kind in (Kind.SPLIT, Kind.STACKED, Kind.PACKED)

    def unpack(self, raw: torch.Tensor) -> KvPage:
        """The block of an object: a view of it, for packed objects a copy."""
        if not self.is_canonical:
            return _opaque_page(raw)
        tensor = raw.view(self.shape.dtype)
        if self.kind is Kind.PACKED:
            return self._unpack_blocks(tensor)
        halves = tensor.view(2, *self.shape.key_shape)
        return KvPage(halves[0], halves[1])

    def pack(self, page: KvPage, raw: torch.Tensor) -> None:
        """Write a canonical block into an object."""
        if self.kind is Kind.PACKED:
            raw.view(self.shape.dtype).copy_(self._pack_blocks(page))
        else:
            self.unpack(raw).copy_from(page)

    # vLLM's CPU attention sees a block as [H, 2, BS * D], the keys of a head column by column
    # ([D, BS]) and its values row by row ([BS, D]). LMCache takes it for [H, BS, 2 * D] and moves
    # the tokens to the front, so that a row of its object is no token.

    def _unpack_blocks(self, tensor: torch.Tensor) -> KvPage:
        shape, size = self.shape, self.block_tokens
        layers, heads, dim = shape.layers, shape.heads, shape.key_dim
        blocks = tensor.view(layers, -1, size, heads, 2 * dim).transpose(2, 3)
        halves = blocks.reshape(layers, -1, heads, 2, size * dim)
        keys = halves[:, :, :, 0].reshape(layers, -1, heads, dim, size).permute(0, 1, 4, 2, 3)
        values = halves[:, :, :, 1].reshape(layers, -1, heads, size, dim).permute(0, 1, 3, 2, 4)
        return KvPage(keys.reshape(shape.key_shape), values.reshape(shape.value_shape))

    def _pack_blocks(self, page: KvPage) -> torch.Tensor:
        shape, size = self.shape, self.block_tokens
        layers, heads, dim = shape.layers, shape.heads, shape.key_dim
        in_blocks = (layers, -1, size, heads, dim)
        keys = page.keys.reshape(in_blocks).permute(0, 1, 3, 4, 2)
        values = page.values.reshape(in_blocks).permute(0, 1, 3, 2, 4)
        halves = torch.stack([part.flatten(3) for part in (keys, values)], dim=3)
        return halves.view(layers, -1, heads, size, 2 * dim).transpose(2, 3).reshape(-1)


def recognise_layout(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], model: KvShape, packed: int = 0
) -> Layout:
    """The layout of objects of `shapes` and `dtypes` (one each per kernel group of LMCache).

    `model` is the block of one token that the model's files describe for this rank (its `tokens`
    and `dtype` do not matter), `packed` vLLM's block size on CPUs, 0 when it is not known.
    """
    if len(shapes) != 1 or model.key_dim != model.value_dim or not model.heads:
        return opaque_layout(shapes, dtypes)
    shape, dtype = tuple(int(size) for size in shapes[0]), dtypes[0]
    if len(shape) not in (3, 4) or not dtype.is_floating_point:
        return opaque_layout(shapes, dtypes)
    tokens = shape[-2]
    block = KvShape(model.layers, tokens, model.heads, model.key_dim, model.value_dim, dtype=dtype)
    width = model.heads * model.key_dim
    rest = shape[1:] if len(shape) == 4 and shape[0] == 1 else shape
    if shape == (2, model.layers, tokens, width):
        return Layout(Kind.SPLIT, block, shape)
    if rest == (2 * model.layers, tokens, width):
        return Layout(Kind.STACKED, block, shape)
    if rest == (model.layers, tokens, 2 * width):
        whole = packed and packed % _PACKED_ALIGNMENT == 0 and tokens % packed == 0
        if whole and model.key_dim % _PACKED_ALIGNMENT == 0:
            return Layout(Kind.PACKED, block, shape, packed)
        return opaque_layout(shapes, dtypes, Kind.FUSED)
    return opaque_layout(shapes, dtypes)


def opaque_layout(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], kind: Kind = Kind.OPAQUE
) -> Layout:
    """The layout of objects that are only bytes."""
    size = sum(
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return Layout(kind, KvShape(1, 1, 1, size, 0, torch.uint8))


def _opaque_page(raw: torch.Tensor) -> KvPage:
    keys = raw.view(1, 1, 1, -1)
    return KvPage(keys, keys[..., :0])
