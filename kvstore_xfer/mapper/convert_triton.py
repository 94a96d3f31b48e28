"""Conversion on a GPU by the kernels in `kvxfer_kernels`.

Pages in host memory pass through device memory of a fixed budget; pages that already lie on the
device are read and written where they are.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.mapper.first_token import FirstTokenWriter
from kvstore_xfer.mapper.maps import Method
from kvxfer_kernels.launch import tuning_for
from kvxfer_kernels.map_blocks import map_blocks
from kvxfer_kernels.pack import pack_maps
from kvxfer_kernels.paged import Paged
from kvxfer_kernels.rotation import Rotation
from kvxfer_kernels.staging import (
    DEFAULT_BUDGET,
    Block,
    Staging,
    Streams,
    batches,
    token_positions,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.mapper.maps import Mapper
    from kvstore_xfer.rope.spec import RopeSpec


def _nobody(stage: str, seconds: float, size: int) -> None:
    pass


class TritonConverter:
    """`Converter` on one device, on streams of its own.

    Parameters
    ----------
    mapper
        The maps, already narrowed to the heads of this rank (`Mapper.shard`). They are copied to
        the device and stay there, `device_bytes` in all.
    dtype
        The KV dtype of both models' blocks: bf16, fp16 or fp32.
    device
        A CUDA or ROCm device, or the CPU under Triton's interpreter.
    budget
        Bytes of device memory for pages on their way through it, beside the maps.

    Raises ValueError when a head width is outside 32..256, the budget too small for one token, or
    a model's RoPE is not supported; TypeError for another dtype.
    """

    # Called with a stage (copy_in, map, copy_out), the seconds on its own stream, and the bytes;
    # whoever wants to know replaces it.
    observe: Callable[[str, float, int], None] = staticmethod(_nobody)

    def __init__(
        self,
        mapper: Mapper,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        budget: int = DEFAULT_BUDGET,
    ) -> None:
        self._device = torch.device(device)
        full = mapper.method is Method.FULL_HEAD
        self._maps = pack_maps(
            mapper.keys,
            mapper.values,
            source_heads=mapper.source.kv_heads,
            source_rotation=_rotation(mapper.source.rope),
            target_rotation=_rotation(mapper.target.rope),
            compute=dtype,
            tuning=tuning_for(self._device, full=full, compute=dtype),
            device=self._device,
            head_assignment=None if full else mapper.head_assignment,
        )
        self._first = FirstTokenWriter(mapper)
        self._staging = Staging(self._maps, dtype, mapper.source.layers, budget)
        self._streams = Streams(self._device)
        self._lock = threading.Lock()  # the staging memory is one

    @property
    def device_bytes(self) -> int:
        """Device memory of the maps, which comes on top of the budget."""
        return self._maps.device_bytes

    @torch.inference_mode()  # the engine's pages may be inference tensors
    def convert(
        self, sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
    ) -> None:
        # docstring inherited
        blocks = [
            Block((source.keys, source.values), first, (target.keys, target.values))
            for source, first, target in zip(sources, first_tokens, targets, strict=True)
        ]
        pages = (*sources, *targets)
        with self._lock:
            if all(page.keys.device == page.values.device == self._device for page in pages):
                self._convert_in_place(blocks)
            else:
                self._staging.run(blocks)
            self._first.write(first_tokens, targets)
            taken = self._staging.clock.take()
        read, made = (sum(p.shape.payload_bytes for p in side) for side in (sources, targets))
        for stage, seconds in taken.items():
            self.observe(stage, seconds, read if stage == "copy_in" else made)

    def _convert_in_place(self, blocks: list[Block]) -> None:
        """Pages on the device; the caller's stream, which may still write them, goes first."""
        streams = self._streams
        streams.follow_caller()
        clock = self._staging.clock
        with streams.on(streams.compute), clock.on("map", streams.compute):
            for batch in batches(blocks, self._staging.capacity):
                keys, values = _components([block.sources for block in batch])
                key_targets, value_targets = _components([block.targets for block in batch])
                positions = token_positions(batch, self._device)
                map_blocks(self._maps, keys, values, positions, key_targets, value_targets)
        streams.synchronize()


def _components(pages: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Paged, Paged]:
    return Paged.from_views([keys for keys, _ in pages]), Paged.from_views([v for _, v in pages])


def _rotation(spec: RopeSpec | None) -> Rotation:
    if spec is None:
        raise ValueError("a mapper between models without a supported RoPE cannot convert")
    return Rotation(
        torch.tensor(spec.inv_freq, dtype=torch.float32),
        spec.head_dim,
        spec.attention_factor,
        spec.interleaved,
    )
