"""Where the tokens of many blocks lie in memory.

A kernel reaches a number as ``base + rows[token] + layer * stride + head * stride + dim *
stride``. One int64 per token covers blocks of any length in separate allocations, pools read by a
block table and an engine's own token slots; 8 bytes against 160 KiB of cache for the same token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

VECTOR_BYTES = 16


@dataclass(frozen=True)
class Paged:
    """One component (keys or values) of N tokens.

    Attributes
    ----------
    base
        ``[layers, tokens, heads, dim]``: start address, dtype and the strides of layer, head and
        dimension. Its token count and stride are not used.
    rows
        int64 ``[N]`` on the device of `base`: offset of a token's first number, in elements.
    aligned
        Every row and stride is a multiple of 16 bytes, so that a kernel may use wide accesses.
    owners
        The tensors that the rows point into, kept alive with this object.
    """

    base: torch.Tensor
    rows: torch.Tensor
    aligned: bool
    owners: tuple[torch.Tensor, ...]

    @classmethod
    def from_views(cls, views: Sequence[torch.Tensor]) -> Paged:
        """The tokens of several blocks ``[layers, tokens_i, heads, dim]``, one after the other.

        Raises ValueError when there is no block or the blocks differ in anything but their token
        count, token stride and address.
        """
        if not views:
            raise ValueError("blocks: at least one is needed")
        base = views[0]
        for view in views:
            _check_like(base, view)
        size = base.element_size()
        offsets = [view.data_ptr() - base.data_ptr() for view in views]
        if any(offset % size for offset in offsets):
            raise ValueError(f"blocks: an address is not a multiple of {size} bytes")
        counts = torch.tensor([view.shape[1] for view in views])
        starts = torch.tensor([0, *accumulate(view.shape[1] for view in views)])[:-1]
        in_block = torch.arange(int(counts.sum())) - starts.repeat_interleave(counts)
        strides = torch.tensor([view.stride(1) for view in views])
        first = torch.tensor([offset // size for offset in offsets])
        rows = (first.repeat_interleave(counts)) + in_block * strides.repeat_interleave(counts)
        steps = [*(offset // size for offset in offsets), *(v.stride(1) for v in views)]
        return cls(base, _to(rows, base.device), _aligned(base, steps), tuple(views))

    @classmethod
    def from_pool(cls, pool: torch.Tensor, table: torch.Tensor, tokens: int) -> Paged:
        """The first `tokens` tokens of the blocks `table` (int64 ``[n]``) of a pool.

        `pool` is ``[blocks, layers, block_tokens, heads, dim]`` with any strides.
        Raises ValueError or IndexError when the table does not cover the tokens or leaves the
        pool.
        """
        if pool.dim() != 5 or table.dtype is not torch.int64 or table.dim() != 1:
            raise ValueError("pool: expected [blocks, layers, tokens, heads, dim] and int64 [n]")
        length = pool.shape[2]
        if not 0 < tokens <= table.numel() * length:
            raise ValueError(f"tokens: {tokens} are not in {table.numel()} blocks of {length}")
        if bool(((table < 0) | (table >= pool.shape[0])).any()):
            raise IndexError(f"table: a block outside the pool of {pool.shape[0]}")
        token = torch.arange(tokens, device=pool.device)
        block = table.to(pool.device)[token // length]
        rows = block * pool.stride(0) + token % length * pool.stride(2)
        return cls(pool[0], rows, _aligned(pool[0], [pool.stride(0), pool.stride(2)]), (pool,))

    @property
    def tokens(self) -> int:
        return self.rows.numel()

    @property
    def vector(self) -> int:
        """Elements per access that the alignment allows."""
        return VECTOR_BYTES // self.base.element_size() if self.aligned else 1


def _check_like(base: torch.Tensor, view: torch.Tensor) -> None:
    if view.dim() != 4 or view.shape[1] < 1:
        raise ValueError(f"block: shape {tuple(view.shape)}, expected [layers, tokens, heads, dim]")
    same = (
        view.dtype is base.dtype
        and view.device == base.device
        and view.shape[0] == base.shape[0]
        and view.shape[2:] == base.shape[2:]
        and view.stride(0) == base.stride(0)
        and view.stride()[2:] == base.stride()[2:]
    )
    if not same:
        raise ValueError(
            f"block: {view.dtype} {tuple(view.shape)} with strides {view.stride()} differs from "
            f"{base.dtype} {tuple(base.shape)} with strides {base.stride()}"
        )


def _aligned(base: torch.Tensor, steps: Sequence[int]) -> bool:
    wide = VECTOR_BYTES // base.element_size()
    strides = (base.stride(0), base.stride(2), *steps)
    return (
        base.stride(3) == 1
        and base.data_ptr() % VECTOR_BYTES == 0
        and all(stride % wide == 0 for stride in strides)
    )


def _to(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return rows
    return rows.pin_memory().to(device, non_blocking=True)
