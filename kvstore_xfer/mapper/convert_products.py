"""The products of one component's maps with the source layers they read, in plain torch.

A head-local map is one product per head. A full-head map is the same with a single head, which
holds the numbers of all. The source layers of a token lie side by side, so that the product reads
neighbouring layers where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SIDE_BY_SIDE = 4  # target layers with the same sources in one product
_BATCH = 8  # target layers whose products are kept until all heads are done


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
    runs
        All source layers that are read, as slices of neighbours, with their places in `inputs`.
    bias
        Of every target layer ``[H_t, d_t]``, float32.
    """

    def __init__(self, mapper: Mapper, maps: Sequence[LayerMap], dtype: torch.dtype) -> None:
        local = mapper.method is Method.HEAD_LOCAL
        self._dtype = dtype
        used = sorted({source for layer in maps for source in layer.source_layers})
        self._used = len(used)
        places = [slice(used.index(run.start), used.index(run.stop - 1) + 1) for run in _runs(used)]
        self.runs = list(zip(_runs(used), places, strict=True))
        heads = len(mapper.head_assignment) if local else mapper.source.kv_heads
        self.bias = [layer.bias.float() for layer in maps]
        self._target = (self.bias[0].shape[0], self.bias[0].shape[1])
        width = maps[0].weight.shape[-2] // len(maps[0].source_layers)
        self._source = (heads, width if local else width // heads)
        self._products = heads if local else 1
        equal: dict[tuple[int, ...], list[int]] = {}
        for index, layer in enumerate(maps):
            equal.setdefault(tuple(sorted(layer.source_layers)), []).append(index)
        shared = [
            _Shared.of(
                layers[start : start + _SIDE_BY_SIDE],
                [
                    slice(run.start * width, run.stop * width)
                    for run in _runs([used.index(source) for source in chosen])
                ],
                [maps[index] for index in layers[start : start + _SIDE_BY_SIDE]],
                mapper.method,
                dtype,
            )
            for chosen, layers in equal.items()
            for start in range(0, len(layers), _SIDE_BY_SIDE)
        ]
        self._batches = _batches(shared)

    @property
    def bytes_read(self) -> int:
        """Of the source layers of one token."""
        return self._used * math.prod(self._source) * self._dtype.itemsize

    def inputs(self, operands: Operands, tokens: int) -> torch.Tensor:
        """``[used, N, H, d_s]``, to be filled with the source layers; a view."""
        heads, width = self._source
        inputs = self._rows(operands, tokens)
        if self._products == 1:
            return inputs.view(tokens, -1, heads, width).transpose(0, 1)
        return inputs.view(tokens, heads, -1, width).permute(2, 0, 1, 3)

    def mapped(self, operands: Operands, tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Every target layer with its mapped tokens ``[N, H_t, d_t]``; read it before the next.

        Without the bias: as a sum that the product starts from, it costs a tenth of the product.
        """
        heads, width = self._target
        rows = self._rows(operands, tokens).unbind(1)
        for batch in self._batches:
            shapes = [(tokens, self._products, item.weight.shape[2]) for item in batch]
            results = operands.results(shapes)
            for head, inputs in enumerate(rows):
                for item, result in zip(batch, results, strict=True):
                    chosen = operands.rows(inputs, item.columns)
                    torch.mm(chosen, item.weight[head], out=result[:, head])
            for item, result in zip(batch, results, strict=True):
                shape = (tokens, self._products, len(item.layers), -1)
                for layer, mapped in zip(item.layers, result.view(shape).unbind(2), strict=True):
                    yield layer, mapped.view(tokens, heads, width)

    def _rows(self, operands: Operands, tokens: int) -> torch.Tensor:
        """``[N, products, used * d_s]``; the width is that of all heads for a full-head map."""
        columns = self._used * math.prod(self._source) // self._products
        return operands.inputs(tokens, self._products, columns)


class Operands:
    """Memory for the products of some tokens, which keys and values use in turn.

    It grows to the most that was asked for and is kept: clearing the pages of fresh memory costs
    the operating system a tenth of the products.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._inputs = self._joined = self._results = torch.empty(0, dtype=dtype)

    def inputs(self, *shape: int) -> torch.Tensor:
        """The left operands of all products; what they held is kept while they do not grow."""
        self._inputs = _room(self._inputs, math.prod(shape))
        return self._inputs[: math.prod(shape)].view(shape)

    def rows(self, inputs: torch.Tensor, columns: Sequence[slice]) -> torch.Tensor:
        """Some columns of one product's inputs; what has gaps is copied together."""
        chosen = [inputs[:, run] for run in columns]
        if len(chosen) == 1:
            return chosen[0]
        shape = (len(inputs), sum(part.shape[1] for part in chosen))
        self._joined = _room(self._joined, math.prod(shape))
        return torch.cat(chosen, 1, out=self._joined[: math.prod(shape)].view(shape))

    def results(self, shapes: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Room for several results at once."""
        borders = [0, *accumulate(math.prod(shape) for shape in shapes)]
        self._results = _room(self._results, borders[-1])
        parts = (self._results[start:stop] for start, stop in pairwise(borders))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _room(buffer: torch.Tensor, numbers: int) -> torch.Tensor:
    return buffer if buffer.numel() >= numbers else buffer.new_empty(numbers)


@dataclass(frozen=True)
class _Shared:
    """The maps of target layers that read the same source layers, side by side as one product.

    `columns` says where in the inputs the source layers lie. For n layers, `weight` is head-local
    ``[H_t, k * d_s, n * d_t]`` and full-head ``[1, k * H_s * d_s, n * H_t * d_t]``, with adjacent
    rows, which products re-order faster.
    """

    layers: list[int]
    columns: list[slice]
    weight: torch.Tensor

    @classmethod
    def of(
        cls,
        layers: list[int],
        columns: list[slice],
        maps: list[LayerMap],
        method: Method,
        dtype: torch.dtype,
    ) -> _Shared:
        weight = torch.cat([_ascending(layer, method) for layer in maps], -1).to(dtype)
        if method is Method.FULL_HEAD:
            weight = weight[None]
        return cls(layers, columns, weight.mT.contiguous().mT)


def _batches(items: list[_Shared]) -> list[list[_Shared]]:
    """Items in order, `_BATCH` target layers or fewer together."""
    batches: list[list[_Shared]] = []
    room = 0
    for item in items:
        if len(item.layers) > room:
            batches.append([])
            room = _BATCH
        batches[-1].append(item)
        room -= len(item.layers)
    return batches


def _ascending(layer: LayerMap, method: Method) -> torch.Tensor:
    """The weight for source layers in ascending order, in which neighbours are found together."""
    count = len(layer.source_layers)
    order = sorted(range(count), key=layer.source_layers.__getitem__)
    dim = 1 if method is Method.HEAD_LOCAL else 0
    shape = layer.weight.shape
    blocks = layer.weight.reshape(*shape[:dim], count, -1, *shape[dim + 1 :])
    return blocks.index_select(dim, torch.tensor(order)).reshape(shape)


def _runs(numbers: list[int]) -> list[slice]:
    """Ascending numbers as runs of neighbours, which are read where they are, without a copy."""
    runs: list[slice] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = slice(runs[-1].start, number + 1)
        else:
            runs.append(slice(number, number + 1))
    return runs
