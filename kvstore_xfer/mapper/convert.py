"""Conversion of blocks: strip the source's RoPE, map, apply the target's RoPE.

`Converter` is the one interface; `TorchConverter` implements it with batched torch operations on
the CPU and is what every other implementation is compared with. Tokens of all blocks of a call
are handled together: keys are rotated a few at a time, products take many tokens, and what they
pass through is kept from call to call. The threads are those within torch's operations, as many
as the process has set.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.convert_products import Operands, Products
from kvstore_xfer.mapper.first_token import FirstTokenWriter
from kvstore_xfer.mapper.maps import Mapper, Method
from kvstore_xfer.rope.rotate import Rotor, apply_tables, strip_tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvstore_xfer.rope.spec import RopeSpec

_GROUP = 2048  # tokens per product: a map is re-ordered for each
_TILE = 1 << 20  # numbers of keys that are rotated at a time
_INPUT_BYTES = 128 << 20  # all layers of a group as the products read them, at most


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
    """The CPU implementation of `Converter`, fp32 accumulation; one call at a time.

    It keeps the memory that the largest call needed: of each token the source layers that are read,
    `_INPUT_BYTES` at most, the products of eight target layers, and four float32 tiles.

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
        self._first = FirstTokenWriter(mapper)
        compute = _compute_dtype(dtype)
        self._keys = Products(mapper, mapper.keys, compute)
        self._values = Products(mapper, mapper.values, compute)
        self._operands = Operands(compute)
        self._strip, self._apply = (Rotor(rope) for rope in self._ropes)
        self._lock = threading.Lock()  # the buffers are one

    @torch.inference_mode()  # the engine's pages may be inference tensors
    def convert(
        self, sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
    ) -> None:
        # docstring inherited
        parts = [
            _Part(source, first, target)
            for source, first, target in zip(sources, first_tokens, targets, strict=True)
        ]
        with self._lock:
            for group in _groups(parts, self._group_tokens(sum(part.tokens for part in parts))):
                positions = torch.cat(
                    [torch.arange(part.first, part.first + part.tokens) for part in group]
                )
                self._read_keys(group, positions)
                self._write_keys(group, positions)
                self._convert_values(group)
        self._first.write(first_tokens, targets)

    def _group_tokens(self, tokens: int) -> int:
        """Tokens per product, within bounded memory, of groups of about equal size."""
        read = max(self._keys.bytes_read, self._values.bytes_read)
        most = max(1, min(_GROUP, _INPUT_BYTES // read))
        return -(-tokens // max(1, -(-tokens // most)))

    def _read_keys(self, group: list[_Part], positions: torch.Tensor) -> None:
        """Un-rotate a few tokens of many layers at a time."""
        model = self._mapper.source
        inputs = self._keys.inputs(self._operands, len(positions))
        tables = strip_tables(self._ropes[0], positions)
        for layers, place in self._keys.runs:
            numbers = (layers.stop - layers.start) * model.kv_heads * model.key_dim
            for part, cut in _places(_pieces(group, max(1, _TILE // numbers))):
                keys = self._heads(part.source.keys[layers])
                inputs[place, cut].copy_(self._strip.turn(keys, *(table[cut] for table in tables)))

    def _write_keys(self, group: list[_Part], positions: torch.Tensor) -> None:
        tables = apply_tables(self._ropes[1], positions)
        for layer, tile, cut, mapped in self._mapped(self._keys, group):
            turned = self._apply.turn(mapped, *(table[cut] for table in tables))
            _scatter(turned, [part.target.keys[layer] for part in tile])

    def _convert_values(self, group: list[_Part]) -> None:
        inputs = self._values.inputs(self._operands, sum(part.tokens for part in group))
        for layers, place in self._values.runs:
            for part, cut in _places(group):
                inputs[place, cut].copy_(self._heads(part.source.values[layers]))
        for layer, tile, _, mapped in self._mapped(self._values, group):
            _scatter(mapped, [part.target.values[layer] for part in tile])

    def _mapped(
        self, products: Products, group: list[_Part]
    ) -> Iterator[tuple[int, list[_Part], slice, torch.Tensor]]:
        """Every target layer, tile by tile: float32 ``[N, H_t, d_t]`` until the next."""
        most = max(1, _TILE // products.bias[0].numel())
        for layer, mapped in products.mapped(self._operands, sum(part.tokens for part in group)):
            start = 0
            for tile in _groups(group, most):
                cut = slice(start, start + sum(part.tokens for part in tile))
                exact = self._apply.room(mapped[cut].shape).copy_(mapped[cut])
                yield layer, tile, cut, exact.add_(products.bias[layer])
                start = cut.stop

    def _heads(self, layers: torch.Tensor) -> torch.Tensor:
        """The heads that are read, of ``[layers, N, H, d_s]``."""
        heads = self._mapper.head_assignment
        if self._mapper.method is Method.FULL_HEAD:
            return layers
        if heads == tuple(range(heads[0], heads[0] + len(heads))):
            return layers.narrow(2, heads[0], len(heads))
        return layers[:, :, list(heads)]


@dataclass(frozen=True)
class _Part:
    """Some tokens of one block; the pages are views of them."""

    source: KvPage
    first: int
    target: KvPage

    @property
    def tokens(self) -> int:
        return self.source.keys.shape[1]

    def cut(self, tokens: slice) -> _Part:
        first = self.first + tokens.start
        return _Part(_cut(self.source, tokens), first, _cut(self.target, tokens))


def _groups(parts: Iterable[_Part], most: int) -> Iterator[list[_Part]]:
    """The tokens of all parts, at most `most` at a time, none of them empty."""
    group: list[_Part] = []
    room = most
    for part in parts:
        start = 0
        while start < part.tokens:
            cut = slice(start, min(start + room, part.tokens))
            group.append(part.cut(cut))
            room -= cut.stop - start
            start = cut.stop
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _pieces(parts: Iterable[_Part], most: int) -> Iterator[_Part]:
    """Every part in pieces of about equal size, of `most` tokens at most."""
    for part in parts:
        count = -(-part.tokens // most)
        borders = [part.tokens * piece // count for piece in range(count + 1)]
        for start, stop in pairwise(borders):
            yield part.cut(slice(start, stop))


def _places(parts: Iterable[_Part]) -> Iterator[tuple[_Part, slice]]:
    """Every part, and which tokens of all of them it is."""
    start = 0
    for part in parts:
        yield part, slice(start, start + part.tokens)
        start += part.tokens


def _cut(page: KvPage, tokens: slice) -> KvPage:
    return KvPage(page.keys[:, tokens], page.values[:, tokens])


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
