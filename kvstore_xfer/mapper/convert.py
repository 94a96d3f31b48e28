"""Conversion of blocks: strip the source's RoPE, map, apply the target's RoPE.

`Converter` is the one interface; `TorchConverter` implements it with batched torch operations on
the CPU and is what every other implementation is compared with. Tokens of all blocks of a call
are handled together, in groups that bound the intermediate memory.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method
from kvstore_xfer.rope.rotate import apply_rope, rope_tables, strip_rope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_xfer.rope.spec import RopeSpec

_GROUP_BYTES = 512 * 1024  # one layer of a group in fp32: half a core's L2 cache


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
        self._ropes = _ropes(mapper)
        self._compute = _compute_dtype(dtype)
        widest = max(model.kv_heads * model.key_dim for model in (mapper.source, mapper.target))
        self._group_tokens = max(1, _GROUP_BYTES // (4 * widest))
        self._keys = _Component.of(mapper, mapper.keys, self._compute)
        self._values = _Component.of(mapper, mapper.values, self._compute)

    def convert(
        self, sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
    ) -> None:
        # docstring inherited
        groups = list(_groups(sources, first_tokens, targets, self._group_tokens))
        threads = torch.get_num_threads()
        if len(groups) == 1 or threads == 1:
            for group in groups:
                self._convert_group(group)
            return
        # One group per thread and no threads within an operation: a group's operations take less
        # than a millisecond each, and waiting for one another would cost more than they do.
        try:
            with ThreadPoolExecutor(threads, initializer=_single_threaded) as pool:
                list(pool.map(self._convert_group, groups))
        finally:
            torch.set_num_threads(threads)  # part of the setting is the process's, not the thread's

    @torch.inference_mode()  # of this thread: the engine's pages may be inference tensors
    def _convert_group(self, group: list[_Part]) -> None:
        positions = torch.cat(
            [torch.arange(part.first, part.first + part.tokens) for part in group]
        )
        self._convert_keys(group, positions)
        self._convert_values(group)

    def _convert_keys(self, group: list[_Part], positions: torch.Tensor) -> None:
        source_rope, target_rope = self._ropes
        strip_tables = rope_tables(source_rope, positions)
        apply_tables = rope_tables(target_rope, positions)
        inputs = self._keys.inputs(
            lambda layer: strip_rope(
                self._gather([part.source.keys[layer] for part in group]),
                source_rope,
                *strip_tables,
            ),
            positions.numel(),
        )
        for layer, mapped in self._keys.mapped(inputs):
            keys = apply_rope(mapped, target_rope, *apply_tables)
            _scatter(keys, [part.target.keys[layer] for part in group])

    def _convert_values(self, group: list[_Part]) -> None:
        inputs = self._values.inputs(
            lambda layer: self._gather([part.source.values[layer] for part in group]),
            sum(part.tokens for part in group),
        )
        for layer, mapped in self._values.mapped(inputs):
            _scatter(mapped, [part.target.values[layer] for part in group])

    def _gather(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Tokens of one layer, ``[N, heads read, d_s]``."""
        tokens = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        heads = self._mapper.head_assignment
        if self._mapper.method is Method.FULL_HEAD or heads == tuple(range(tokens.shape[1])):
            return tokens
        return tokens[:, list(heads)]


def _single_threaded() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class _Part:
    """Some tokens of one block; the pages are views of them."""

    source: KvPage
    first: int
    target: KvPage

    @property
    def tokens(self) -> int:
        return self.source.keys.shape[1]


def _groups(
    sources: Sequence[KvPage],
    first_tokens: Sequence[int],
    targets: Sequence[KvPage],
    most: int,
) -> Iterator[list[_Part]]:
    """The tokens of all blocks, at most `most` at a time, none of them empty."""
    group: list[_Part] = []
    room = most
    for source, first, target in zip(sources, first_tokens, targets, strict=True):
        start, tokens = 0, source.keys.shape[1]
        while start < tokens:
            cut = slice(start, min(start + room, tokens))
            group.append(_Part(_cut(source, cut), first + start, _cut(target, cut)))
            room -= cut.stop - start
            start = cut.stop
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _cut(page: KvPage, tokens: slice) -> KvPage:
    return KvPage(page.keys[:, tokens], page.values[:, tokens])


@dataclass(frozen=True)
class _Shared:
    """The maps of target layers that read the same source layers, side by side as one product.

    `runs` says where in the component's inputs the source layers lie. `weight` is
    ``[H_t, k * d_s, n * d_t]`` (head-local) or ``[k * H_s * d_s, n * H_t * d_t]`` for n layers.
    """

    layers: list[int]
    runs: list[slice]
    weight: torch.Tensor
    biases: list[torch.Tensor]


@dataclass(frozen=True)
class _Component:
    """The maps of keys or values, and all source layers they read, ascending."""

    method: Method
    maps: list[_Shared]
    used: list[int]

    @classmethod
    def of(cls, mapper: Mapper, maps: Sequence[LayerMap], dtype: torch.dtype) -> _Component:
        used = sorted({source for layer in maps for source in layer.source_layers})
        equal: dict[tuple[int, ...], list[int]] = {}
        for index, layer in enumerate(maps):
            equal.setdefault(tuple(sorted(layer.source_layers)), []).append(index)
        shared = [
            _Shared(
                layers,
                _runs([used.index(source) for source in chosen]),
                torch.cat([_ascending(maps[i], mapper.method) for i in layers], -1).to(dtype),
                [maps[i].bias.float() for i in layers],
            )
            for chosen, layers in equal.items()
        ]
        return cls(mapper.method, shared, used)

    def inputs(self, read: Callable[[int], torch.Tensor], tokens: int) -> torch.Tensor:
        """All used source layers, each ``[N, H, d_s]``, as the products want them.

        Head-local ``[H, N, used, d_s]``, full-head ``[N, used, H, d_s]``. Layers are read one by
        one, so that what happens to each stays in the processor's cache.
        """
        dtype = self.maps[0].weight.dtype
        first = read(self.used[0])
        heads, width = first.shape[1:]
        if self.method is Method.HEAD_LOCAL:
            inputs = torch.empty((heads, tokens, len(self.used), width), dtype=dtype)
            by_token = inputs.permute(1, 2, 0, 3)
        else:
            by_token = inputs = torch.empty((tokens, len(self.used), heads, width), dtype=dtype)
        for place, layer in enumerate(self.used):
            by_token[:, place] = read(layer) if place else first
        return inputs

    def mapped(self, inputs: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Every target layer with its mapped tokens, float32 ``[N, H_t, d_t]``."""
        for item in self.maps:
            heads, width = item.biases[0].shape
            if self.method is Method.HEAD_LOCAL:
                chosen = torch.cat([inputs[:, :, run] for run in item.runs], dim=2).flatten(2)
                product = torch.bmm(chosen, item.weight).transpose(0, 1)
                parts = product.chunk(len(item.layers), dim=2)
            else:
                chosen = torch.cat([inputs[:, run] for run in item.runs], dim=1).flatten(1)
                product = (chosen @ item.weight).view(-1, len(item.layers), heads, width)
                parts = product.unbind(1)
            for layer, part, bias in zip(item.layers, parts, item.biases, strict=True):
                yield layer, part.float() + bias


def _ascending(layer: LayerMap, method: Method) -> torch.Tensor:
    """The weight for source layers in ascending order, in which neighbours are found together."""
    count = len(layer.source_layers)
    order = sorted(range(count), key=layer.source_layers.__getitem__)
    dim = 1 if method is Method.HEAD_LOCAL else 0
    shape = layer.weight.shape
    blocks = layer.weight.reshape(*shape[:dim], count, -1, *shape[dim + 1 :])
    return blocks.index_select(dim, torch.tensor(order)).reshape(shape)


def _runs(places: list[int]) -> list[slice]:
    """The places as runs of neighbours, which are copied much faster than one by one."""
    runs: list[slice] = []
    for place in places:
        if runs and runs[-1].stop == place:
            runs[-1] = slice(runs[-1].start, place + 1)
        else:
            runs.append(slice(place, place + 1))
    return runs


def _scatter(mapped: torch.Tensor, targets: list[torch.Tensor]) -> None:
    """Write ``[N, H, d]`` into the tokens of several pages' layers."""
    start = 0
    for target in targets:
        stop = start + target.shape[0]
        target.copy_(mapped[start:stop])
        start = stop


def _ropes(mapper: Mapper) -> tuple[RopeSpec, RopeSpec]:
    source, target = mapper.source.rope, mapper.target.rope
    if source is None or target is None:
        raise ValueError("a mapper between models without a supported RoPE cannot convert")
    return source, target


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.float32 or not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return torch.bfloat16
