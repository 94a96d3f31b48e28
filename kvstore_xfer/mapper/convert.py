"""Conversion of blocks: strip the source's RoPE, map, apply the target's RoPE.

`Converter` is the one interface; `TorchConverter` implements it with batched torch operations on
the CPU and is what every other implementation is compared with. Tokens of all blocks of a call
are handled together, in groups that bound the intermediate memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method
from kvstore_xfer.rope.rotate import apply_rope, rope_tables, strip_rope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.rope.spec import RopeSpec

GROUP_TOKENS = 1024  # bounds the stripped copy: layers * heads * width * 1024 numbers


class Converter(Protocol):
    """Maps whole blocks of the source into blocks of the target."""

    def convert(
        self, sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
    ) -> None:
        """Fill `targets` from `sources`, block by block of the same place.

        Parameters
        ----------
        sources
            Pages with all heads and layers of the source, keys rotated as its engine holds them.
        first_tokens
            Absolute position of the first token of every block.
        targets
            Pages with the heads this converter was made for; written in place, any strides.
        """
        ...


class TorchConverter:
    """The CPU implementation of `Converter`, fp32 accumulation.

    Parameters
    ----------
    mapper
        The maps, already narrowed to the heads of this rank (`Mapper.shard`).
    dtype
        The KV dtype of both models' blocks. bf16 and fp16 blocks are multiplied in bf16 where the
        CPU has instructions for it, else in fp32.
    """

    def __init__(self, mapper: Mapper, dtype: torch.dtype) -> None:
        self._mapper = mapper
        self._compute = _compute_dtype(dtype)
        self._heads = torch.tensor(mapper.head_assignment)
        self._keys = [_cast(layer, self._compute) for layer in mapper.keys]
        self._values = [_cast(layer, self._compute) for layer in mapper.values]

    def convert(
        self, sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
    ) -> None:
        start = 0
        while start < len(sources):
            stop, tokens = start, 0
            while stop < len(sources) and (stop == start or tokens < GROUP_TOKENS):
                tokens += sources[stop].keys.shape[1]
                stop += 1
            part = slice(start, stop)
            self._convert_group(sources[part], first_tokens[part], targets[part])
            start = stop

    def _convert_group(
        self, sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
    ) -> None:
        source_rope, target_rope = _ropes(self._mapper)
        positions = torch.cat(
            [
                torch.arange(first, first + page.keys.shape[1])
                for first, page in zip(first_tokens, sources, strict=True)
            ]
        )
        stripped = strip_rope(
            torch.cat([page.keys for page in sources], dim=1),
            source_rope,
            *rope_tables(source_rope, positions),
        )
        keys = self._map(stripped, self._keys)
        keys = apply_rope(keys, target_rope, *rope_tables(target_rope, positions))
        values = self._map(torch.cat([page.values for page in sources], dim=1), self._values)
        _scatter(keys, [page.keys for page in targets])
        _scatter(values, [page.values for page in targets])

    def _map(self, inputs: torch.Tensor, layers: list[LayerMap]) -> torch.Tensor:
        """``[L_s, N, H_s, d_s]`` of any float dtype -> ``[L_t, N, H_t, d_t]`` in float32."""
        inputs = inputs.to(self._compute)
        if self._mapper.method is Method.HEAD_LOCAL:
            by_head = inputs.index_select(2, self._heads).permute(2, 1, 0, 3).contiguous()
            mapped = [_head_local(by_head, layer) for layer in layers]
        else:
            by_token = inputs.transpose(0, 1).contiguous()
            mapped = [_full_head(by_token, layer) for layer in layers]
        return torch.stack(mapped)


def _head_local(by_head: torch.Tensor, layer: LayerMap) -> torch.Tensor:
    """Inputs ``[H_t, N, L_s, d_s]`` -> ``[N, H_t, d_t]``."""
    chosen = _select(by_head, 2, layer.source_layers).flatten(2)
    return torch.bmm(chosen, layer.weight).transpose(0, 1).float() + layer.bias


def _full_head(by_token: torch.Tensor, layer: LayerMap) -> torch.Tensor:
    """Inputs ``[N, L_s, H_s, d_s]`` -> ``[N, H_t, d_t]``."""
    chosen = _select(by_token, 1, layer.source_layers).flatten(1)
    return (chosen @ layer.weight).view(-1, *layer.bias.shape).float() + layer.bias


def _select(inputs: torch.Tensor, dim: int, layers: tuple[int, ...]) -> torch.Tensor:
    """The chosen source layers; a run of neighbours is a view, anything else a copy."""
    first, count = layers[0], len(layers)
    if layers == tuple(range(first, first + count)):
        return inputs.narrow(dim, first, count)
    return inputs.index_select(dim, torch.tensor(layers))


def _scatter(mapped: torch.Tensor, targets: list[torch.Tensor]) -> None:
    start = 0
    for target in targets:
        stop = start + target.shape[1]
        target.copy_(mapped[:, start:stop])
        start = stop


def _ropes(mapper: Mapper) -> tuple[RopeSpec, RopeSpec]:
    source, target = mapper.source.rope, mapper.target.rope
    if source is None or target is None:
        raise ValueError("a mapper between models without a supported RoPE cannot convert")
    return source, target


def _cast(layer: LayerMap, dtype: torch.dtype) -> LayerMap:
    return LayerMap(layer.source_layers, layer.weight.to(dtype), layer.bias.float())


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.float32 or not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return torch.bfloat16
