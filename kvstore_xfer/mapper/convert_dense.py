"""Conversion by the maps that are not one affine product a layer: low-rank, residuals, MLP.

Dense torch products over all tokens of some blocks at a time, in float32, on any torch device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kvstore_xfer.mapper.first_token import FirstTokenWriter
from kvstore_xfer.mapper.maps import Method
from kvstore_xfer.rope.rotate import apply_rope, rope_tables, strip_rope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.mapper.maps import LayerMap, Mapper
    from kvstore_xfer.rope.spec import RopeSpec

_TOKENS = 1024  # of whole blocks that are mapped together; bounds the memory in between


class DenseConverter:
    """`Converter` of every method that `TorchConverter` does not know.

    Parameters
    ----------
    mapper
        The maps, already narrowed to the heads of this rank (`Mapper.shard`).
    device
        Where the products run; the maps are copied there.

    Raises ValueError when a model's RoPE is not supported or the method is an affine one.
    """

    def __init__(self, mapper: Mapper, device: torch.device | str = "cpu") -> None:
        if mapper.source.rope is None or mapper.target.rope is None:
            raise ValueError("a mapper between models without a supported RoPE cannot convert")
        self._ropes: tuple[RopeSpec, RopeSpec] = (mapper.source.rope, mapper.target.rope)
        self._device = torch.device(device)
        self._map = _maps_of(mapper, self._device)
        self._first = FirstTokenWriter(mapper)

    @torch.inference_mode()  # the engine's pages may be inference tensors
    def convert(
        self, sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
    ) -> None:
        # docstring inherited
        for batch in _batches(sources, first_tokens, targets):
            pages = [source for source, _, _ in batch]
            positions = torch.cat(
                [torch.arange(first, first + _tokens(page)) for page, first, _ in batch]
            ).to(self._device)
            strip, apply = (rope_tables(rope, positions) for rope in self._ropes)
            keys, values = (
                torch.cat([getattr(page, name) for page in pages], dim=1).to(self._device).float()
                for name in ("keys", "values")
            )
            new_keys, new_values = self._map(strip_rope(keys, self._ropes[0], *strip), values)
            _scatter(
                apply_rope(new_keys, self._ropes[1], *apply),
                new_values,
                [target for _, _, target in batch],
            )
        self._first.write(first_tokens, targets)


def _tokens(page: KvPage) -> int:
    return page.keys.shape[1]


def _batches(
    sources: Sequence[KvPage], first_tokens: Sequence[int], targets: Sequence[KvPage]
) -> Iterator[list[tuple[KvPage, int, KvPage]]]:
    """Whole blocks, together at most `_TOKENS` tokens unless one alone is longer."""
    batch: list[tuple[KvPage, int, KvPage]] = []
    size = 0
    for block in zip(sources, first_tokens, targets, strict=True):
        tokens = _tokens(block[0])
        if batch and size + tokens > _TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(block)
        size += tokens
    if batch:
        yield batch


def _scatter(keys: torch.Tensor, values: torch.Tensor, targets: list[KvPage]) -> None:
    start = 0
    for target in targets:
        stop = start + _tokens(target)
        target.keys.copy_(keys[:, start:stop])
        target.values.copy_(values[:, start:stop])
        start = stop


class _Maps(Protocol):
    """Keys ``[L_s, N, H_s, dk]`` without RoPE and values, to those of the target; float32."""

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def _maps_of(mapper: Mapper, device: torch.device) -> _Maps:
    if mapper.method.encoded:
        return _LowRank(mapper, device)
    if mapper.method is Method.RESIDUAL:
        return _both(_Residual, mapper, device)
    if mapper.method is Method.MLP:
        return _both(_Mlp, mapper, device)
    raise ValueError(f"method {mapper.method.value} is converted by TorchConverter")


class _LowRank:
    """One product with the encoder, one with the decoders of all layers side by side."""

    def __init__(self, mapper: Mapper, device: torch.device) -> None:
        if mapper.encoder is None:
            raise ValueError("a low-rank mapper without an encoder cannot convert")
        maps = (*mapper.keys, *mapper.values)
        self._layers = list(maps[0].source_layers)
        self._encoder = mapper.encoder.to(device, torch.float32)
        self._decoder = torch.cat([layer.weight for layer in maps], 1).to(device, torch.float32)
        self._bias = torch.cat([layer.bias.flatten() for layer in maps]).to(device)
        self._heads = list(mapper.head_assignment)
        self._residual = mapper.method.residual
        self._layer_count = mapper.target.layers
        self._split = sum(layer.bias.numel() for layer in mapper.keys)

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([token_rows(part[self._layers]) for part in (keys, values)], 1)
        mapped = torch.addmm(self._bias, rows @ self._encoder, self._decoder)
        new_keys, new_values = (
            self._pages(mapped[:, : self._split]),
            self._pages(mapped[:, self._split :]),
        )
        if self._residual:
            return new_keys + keys[:, :, self._heads], new_values + values[:, :, self._heads]
        return new_keys, new_values

    def _pages(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(len(rows), self._layer_count, len(self._heads), -1).transpose(0, 1)


def token_rows(part: torch.Tensor) -> torch.Tensor:
    """``[L, N, H, d]`` -> ``[N, L * H * d]``, layer by layer, head by head."""
    return part.transpose(0, 1).flatten(1)


class _Layer(Protocol):
    """One component of one target layer: all source layers in, ``[N, H_t, d_t]`` out."""

    def __call__(self, part: torch.Tensor) -> torch.Tensor: ...


def _both(kind: Callable[..., _Layer], mapper: Mapper, device: torch.device) -> _Maps:
    """Keys from keys and values from values, layer by layer."""
    heads = list(mapper.head_assignment)
    key_maps, value_maps = (
        [kind(layer, heads, device) for layer in layers] for layers in (mapper.keys, mapper.values)
    )

    def maps(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.stack([layer(keys) for layer in key_maps]),
            torch.stack([layer(values) for layer in value_maps]),
        )

    return maps


class _Residual:
    def __init__(self, layer: LayerMap, heads: list[int], device: torch.device) -> None:
        (self._layer,) = layer.source_layers
        self._heads = heads
        self._down = layer.before[0].to(device, torch.float32)
        self._up = layer.weight.to(device, torch.float32)
        self._bias = layer.bias.to(device)

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        own = part[self._layer]
        correction = own.flatten(1) @ self._down @ self._up
        return own[:, self._heads] + correction.view(len(own), len(self._heads), -1) + self._bias


class _Mlp:
    def __init__(self, layer: LayerMap, heads: list[int], device: torch.device) -> None:
        self._layers, self._heads = list(layer.source_layers), heads
        tensors = (*layer.before, layer.weight, layer.bias)
        self._tensors = [tensor.to(device, torch.float32) for tensor in tensors]

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        rows = part[self._layers][:, :, self._heads].permute(2, 1, 0, 3).flatten(2)
        return mlp(rows, self._tensors).transpose(0, 1)


def mlp(rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows ``[H, N, p]`` through per-head ``(W_1, b_1, W_2, b_2, W_3, b_3)`` with ReLU between."""
    first, first_bias, second, second_bias, last, last_bias = tensors
    hidden = torch.baddbmm(first_bias[:, None], rows, first).relu()
    hidden = torch.baddbmm(second_bias[:, None], hidden, second).relu()
    return torch.baddbmm(last_bias[:, None], hidden, last)
