"""The products of one component's maps with the source layers they read, in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Products:
    """The maps of keys or values, in the order and layout in which they are multiplied.

    Parameters
    ----------
    mapper
        Method and heads.
    maps
        One per target layer, of the mapper's keys or values.
    dtype
        Of the operands, float32 or bfloat16; sums are float32 in either.

    Attributes
    ----------
    used
        All source layers that are read, ascending.
    """

    def __init__(self, mapper: Mapper, maps: Sequence[LayerMap], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._local = mapper.method is Method.HEAD_LOCAL
        self.used = sorted({source for layer in maps for source in layer.source_layers})
        heads = len(mapper.head_assignment) if self._local else mapper.source.kv_heads
        bias = maps[0].bias
        self._target = (bias.shape[0], bias.shape[1])
        rows = maps[0].weight.shape[-2] // len(maps[0].source_layers)
        self._source = (heads, rows if self._local else rows // heads)
        equal: dict[tuple[int, ...], list[int]] = {}
        for index, layer in enumerate(maps):
            equal.setdefault(tuple(sorted(layer.source_layers)), []).append(index)
        self._maps = [
            _Shared.of(
                layers,
                _runs([self.used.index(source) for source in chosen]),
                [maps[index] for index in layers],
                mapper.method,
                dtype,
            )
            for chosen, layers in equal.items()
        ]

    @property
    def bytes_read(self) -> int:
        """Of the source layers of one token."""
        heads, width = self._source
        return len(self.used) * heads * width * self._dtype.itemsize

    def source_shape(self, tokens: int) -> tuple[int, int, int]:
        """One source layer as it is read, ``[N, H, d_s]``."""
        return (tokens, *self._source)

    def target_shape(self, tokens: int) -> tuple[int, int, int]:
        """One target layer, ``[N, H_t, d_t]``."""
        return (tokens, *self._target)

    def operands(self, tokens: int) -> Operands:
        """Empty buffers for `tokens` tokens."""
        heads, width = self._source
        used = len(self.used)
        if self._local:
            inputs = torch.empty((heads, tokens, used, width), dtype=self._dtype)
            layers = inputs.permute(2, 1, 0, 3)
        else:
            inputs = torch.empty((tokens, used, heads, width), dtype=self._dtype)
            layers = inputs.transpose(0, 1)
        columns = max(len(item.layers) for item in self._maps) * math.prod(self._target)
        return Operands(
            layers, inputs, torch.empty_like(inputs).flatten(), inputs.new_empty(tokens * columns)
        )

    def mapped(self, operands: Operands) -> Iterator[tuple[int, torch.Tensor]]:
        """Every target layer with its mapped tokens ``[N, H_t, d_t]``; read it before the next."""
        heads, width = self._target
        for item in self._maps:
            if self._local:
                product = _head_local(operands, item)
                parts = product.view(-1, heads, len(item.layers), width).unbind(2)
            else:
                product = _full_head(operands, item)
                parts = product.view(-1, len(item.layers), heads, width).unbind(1)
            yield from zip(item.layers, parts, strict=True)


@dataclass(frozen=True)
class Operands:
    """Buffers of one number of tokens, to be used again and again.

    Made anew for every product they would cost more than the product: the operating system clears
    every page of fresh memory.

    Attributes
    ----------
    layers
        ``[used, N, H, d_s]``, to be filled with the source layers; a view of `inputs`.
    inputs
        Head-local ``[H, N, used, d_s]``, full-head ``[N, used, H, d_s]``.
    """

    layers: torch.Tensor
    inputs: torch.Tensor
    _rows: torch.Tensor
    _product: torch.Tensor

    def rows(self, runs: list[slice], dim: int) -> torch.Tensor:
        """The inputs of some source layers, which lie along `dim`, without gaps."""
        chosen = [self.inputs.narrow(dim, run.start, run.stop - run.start) for run in runs]
        if chosen[0].shape == self.inputs.shape:
            return self.inputs
        shape = list(self.inputs.shape)
        shape[dim] = sum(part.shape[dim] for part in chosen)
        rows = self._rows[: math.prod(shape)].view(shape)
        return torch.cat(chosen, dim, out=rows)

    def product(self, *shape: int) -> torch.Tensor:
        return self._product[: math.prod(shape)].view(shape)


@dataclass(frozen=True)
class _Shared:
    """The maps of target layers that read the same source layers, side by side as one product.

    `runs` says where in the inputs the source layers lie. For n layers, `weight` is head-local
    ``[H_t, k * d_s, n * d_t]`` and full-head ``[k * H_s * d_s, n * H_t * d_t]``, `bias`
    ``[H_t, 1, n * d_t]`` and ``[n * H_t * d_t]``.
    """

    layers: list[int]
    runs: list[slice]
    weight: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(
        cls,
        layers: list[int],
        runs: list[slice],
        maps: list[LayerMap],
        method: Method,
        dtype: torch.dtype,
    ) -> _Shared:
        weight = torch.cat([_ascending(layer, method) for layer in maps], -1)
        if method is Method.HEAD_LOCAL:
            bias = torch.cat([layer.bias for layer in maps], -1).unsqueeze(1)
        else:
            bias = torch.cat([layer.bias.flatten() for layer in maps])
        return cls(layers, runs, weight.to(dtype), bias.to(dtype))


def _head_local(operands: Operands, item: _Shared) -> torch.Tensor:
    """``[N, H_t, n * d_t]``, token by token as targets lie."""
    rows = operands.rows(item.runs, 2).flatten(2)
    product = operands.product(rows.shape[1], rows.shape[0], item.weight.shape[2])
    torch.baddbmm(item.bias, rows, item.weight, out=product.transpose(0, 1))
    return product


def _full_head(operands: Operands, item: _Shared) -> torch.Tensor:
    """``[N, n * H_t * d_t]``."""
    rows = operands.rows(item.runs, 1).flatten(1)
    product = operands.product(rows.shape[0], item.weight.shape[1])
    return torch.addmm(item.bias, rows, item.weight, out=product)


def _ascending(layer: LayerMap, method: Method) -> torch.Tensor:
    """The weight for source layers in ascending order, in which neighbours are found together."""
    count = len(layer.source_layers)
    order = sorted(range(count), key=layer.source_layers.__getitem__)
    dim = 1 if method is Method.HEAD_LOCAL else 0
    shape = layer.weight.shape
    blocks = layer.weight.reshape(*shape[:dim], count, -1, *shape[dim + 1 :])
    return blocks.index_select(dim, torch.tensor(order)).reshape(shape)


def _runs(places: list[int]) -> list[slice]:
    """The places as runs of neighbours, which are read much faster than one by one."""
    runs: list[slice] = []
    for place in places:
        if runs and runs[-1].stop == place:
            runs[-1] = slice(runs[-1].start, place + 1)
        else:
            runs.append(slice(place, place + 1))
    return runs
