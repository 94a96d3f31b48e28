"""LMCache's keys and objects in this package's terms."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvstore_xfer.blocks.page import KvPage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvxfer_lmcache.layouts import Layout
    from kvxfer_lmcache.tasks import Lease

STRONG_HASH_BYTES = 32  # blake3 and sha256; Python's own hash has 8


@dataclass(frozen=True)
class Origin:
    """Whose objects these are: what LMCache's key says of the engine, and what objects look like.

    The key says neither dtype nor layout, so two runs of one model in bfloat16 and float32 have
    equal keys; here they differ. `rank` and `ranks` are worker number and worker count,
    `block_sizes` those that LMCache's server has seen of such engines (see `BlockSizes`).
    """

    model: str
    rank: int
    ranks: int
    group: int
    hash_bytes: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    block_sizes: tuple[int, ...] = ()


def origin_of(key: Any, shapes: Sequence[Any], dtypes: Sequence[torch.dtype]) -> Origin:
    """`key` is LMCache's ObjectKey."""
    return Origin(
        model=str(key.model_name),
        rank=key.kv_rank >> 16 & 0xFF,
        ranks=key.kv_rank >> 24 & 0xFF,
        group=int(key.object_group_id),
        hash_bytes=len(key.chunk_hash),
        shapes=tuple(tuple(int(size) for size in shape) for shape in shapes),
        dtypes=tuple(dtypes),
    )


def form_of(memory: Any) -> tuple[list[Any], list[torch.dtype]]:
    """Shapes and dtypes of a MemoryObj; some of LMCache's own tools leave the lists out."""
    meta = memory.meta
    if meta.shapes is not None and meta.dtypes is not None:
        return list(meta.shapes), list(meta.dtypes)
    return [memory.get_shape()], [memory.get_dtype()]


def bytes_of(memory: Any) -> torch.Tensor:
    """The content of a MemoryObj, uint8 ``[size]``, in place."""
    raw: torch.Tensor = memory.raw_tensor
    return raw.view(torch.uint8).view(-1)[: memory.get_size()]


def block_name(chunk_hash: bytes, salt: str) -> str:
    """The hash part of our key. The salt keeps tenants apart; only a digest of it is stored."""
    text = chunk_hash.hex()
    return f"{text}-{hashlib.sha256(salt.encode()).hexdigest()}" if salt else text


class ObjectPage(KvPage):
    """An object to be filled: by one copy, and only while its task may still touch it."""

    _fill: Callable[[KvPage], None]

    def __init__(self, layout: Layout, raw: torch.Tensor, lease: Lease) -> None:
        nothing = torch.empty(0)
        super().__init__(nothing, nothing)

        def fill(page: KvPage) -> None:
            with lease.held():
                layout.pack(page, raw)

        object.__setattr__(self, "_fill", fill)  # the base class is frozen

    def segments(self) -> None:
        """None: whoever fills the page reads into memory of their own first."""

    def copy_from(self, other: KvPage) -> None:
        """Raises ExpiredError when the task was given up."""
        self._fill(other)
