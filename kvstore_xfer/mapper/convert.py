"""Conversion of blocks: strip the source's RoPE, map, apply the target's RoPE.

`Converter` is the one interface; `TorchConverter` implements it with batched torch operations on
the CPU and is what every other implementation is compared with. Tokens of all blocks of a call
are handled together, in groups that stay in the processor's caches, in buffers that are made once
per call. The threads are those within torch's operations, as many as the process has set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvstore_xfer.blocks.page import KvPage
from kvstore_xfer.mapper.convert_products import Products
from kvstore_xfer.mapper.maps import Mapper, Method
from kvstore_xfer.rope.rotate import Rotor, apply_tables, strip_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore_xfer.mapper.convert_products import Operands
    from kvstore_xfer.rope.spec import RopeSpec

_LAYER_BYTES = 512 * 1024  # one layer of a thread's tokens in fp32: half a core's L2 cache
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
        compute = _compute_dtype(dtype)
        self._keys = Products(mapper, mapper.keys, compute)
        self._values = Products(mapper, mapper.values, compute)

    @torch.inference_mode()  # the engine's pages may be inference tensors
    def convert(
        self, sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
    ) -> None:
        # docstring inherited
        buffers: _Buffers | None = None
        for group in _groups(sources, first_tokens, targets, self._group_tokens()):
            tokens = sum(part.tokens for part in group)
            if buffers is None or buffers.tokens != tokens:
                buffers = self._buffers(tokens)
            self._convert_keys(group, buffers)
            self._convert_values(group, buffers)

    def _group_tokens(self) -> int:
        """Tokens of which one layer fits into the caches of all threads, within bounded memory."""
        model_widths = (m.kv_heads * m.key_dim for m in (self._mapper.source, self._mapper.target))
        cached = torch.get_num_threads() * (_LAYER_BYTES // (4 * max(model_widths)))
        read = max(self._keys.bytes_read, self._values.bytes_read)
        return max(1, min(cached, _INPUT_BYTES // read))

    def _buffers(self, tokens: int) -> _Buffers:
        source, target = self._ropes
        shape, mapped_shape = self._keys.source_shape(tokens), self._keys.target_shape(tokens)
        return _Buffers(
            Rotor(torch.empty(shape), source),
            Rotor(torch.empty(mapped_shape), target),
            self._keys.operands(tokens),
            self._values.operands(tokens),
        )

    def _convert_keys(self, group: list[_Part], buffers: _Buffers) -> None:
        source, target = self._ropes
        positions = torch.cat(
            [torch.arange(part.first, part.first + part.tokens) for part in group]
        )
        strip, apply = strip_tables(source, positions), apply_tables(target, positions)
        for place, layer in enumerate(self._keys.used):
            pieces = [part.source.keys[layer] for part in group]
            buffers.strip.input.copy_(self._gather(pieces))
            buffers.strip.turn(*strip)
            buffers.keys.layers[place].copy_(buffers.strip.output)
        for layer, mapped in self._keys.mapped(buffers.keys):
            buffers.apply.input.copy_(mapped)
            buffers.apply.turn(*apply)
            _scatter(buffers.apply.output, [part.target.keys[layer] for part in group])

    def _convert_values(self, group: list[_Part], buffers: _Buffers) -> None:
        for place, layer in enumerate(self._values.used):
            pieces = [part.source.values[layer] for part in group]
            buffers.values.layers[place].copy_(self._gather(pieces))
        for layer, mapped in self._values.mapped(buffers.values):
            _scatter(mapped, [part.target.values[layer] for part in group])

    def _gather(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        """Tokens of one layer, ``[N, heads read, d_s]``."""
        tokens = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        heads = self._mapper.head_assignment
        if self._mapper.method is Method.FULL_HEAD or heads == tuple(range(tokens.shape[1])):
            return tokens
        return tokens[:, list(heads)]


@dataclass(frozen=True)
class _Buffers:
    """What a group of tokens passes through; the next group of as many uses it again."""

    strip: Rotor
    apply: Rotor
    keys: Operands
    values: Operands

    @property
    def tokens(self) -> int:
        return self.strip.input.shape[0]


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
