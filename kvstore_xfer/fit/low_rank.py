"""One map of bounded rank for a whole pair: every target layer, head and component from one code.

A head-local map spends its parameters on what one source head says about one target head. Here all
keys and values of the source layers, joined, are encoded into r numbers a token, from which all of
the target is decoded; with as many parameters this predicts far better (docs/fidelity.md).

``Y = X W + b`` is the ridge solution; ``E D`` is the best approximation of W of rank r in the norm
``tr(M (W - E D)' A (W - E D))`` (reduced-rank regression), with A the centred Gram matrix and M
the target's sensitivity: block-diagonal, for each layer, head and component the mean of ``g g'``
over gradients g of the log-likelihood of tokens that the target itself would say. That is the
Fisher information, the second-order expansion of the KL divergence that an error of the cache
causes; it decides which directions of which layers the rank is spent on.

Between models of one geometry Y may be what the target's cache differs by from the source's own
layer and head (low-rank-residual): between fine-tunes that is little, and the rank is spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.fit.accumulate import (
    FitOptions,
    later_pairs,
    require_memory,
    require_options,
    require_rank,
    require_split,
    split_of,
    weight_dtype,
)
from kvstore_xfer.fit.first_token import FirstToken
from kvstore_xfer.fit.moments import Moments
from kvstore_xfer.fit.select import RIDGES, Choice
from kvstore_xfer.fit.solve import ridge_too_small
from kvstore_xfer.mapper.convert_dense import token_rows
from kvstore_xfer.mapper.maps import LayerMap, Mapper, assign_heads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.models.description import ModelDescription

MAX_INPUTS = 8192  # columns of X that 'auto' takes: the Gram matrix has their square
SENSITIVITY_SEQUENCES = 64  # whose gradients are taken: each costs a backward pass
_DENSE_SIDE = 4096  # up to here all eigenvectors are computed, beyond only the leading ones
_FLOOR = 1e-3  # of a block's mean sensitivity, for directions that no gradient has


class LowRankAccumulator:
    """Streams caches, and gradients of the target, into moments.

    Raises ModelError and ConfigError as `Accumulator` does, and ConfigError for a residual between
    models of different geometry.
    """

    def __init__(
        self,
        source: ModelDescription,
        target: ModelDescription,
        options: FitOptions,
        device: str = "cpu",
    ) -> None:
        require_options(source, target, options)
        self._source, self._target, self._options = source, target, options
        self._layers = _source_layers(source, options.layers)
        self._split_x = len(self._layers) * source.kv_heads * source.key_dim
        self._split_y = target.layers * target.kv_heads * target.key_dim
        p = self._split_x + len(self._layers) * source.kv_heads * source.value_dim
        q = self._split_y + target.layers * target.kv_heads * target.value_dim
        require_rank(options.rank, min(p, q))
        self._rank = options.rank or min(p, q, self._equal_rank(p, q))
        # Two sides, their sum, and what solving takes.
        require_memory(4 * Moments.bytes_needed(1, p, q), device, "give fewer --layers")
        blocks = target.layers * target.kv_heads
        self.moments = {
            "fitted": Moments.zero(1, p, q, device=device),
            "held_out": Moments.zero(1, p, q, device=device),
            "held_out.target": Moments.zero(1, 0, q, device=device),
            "sensitivity.keys": Moments.zero(blocks, target.key_dim, 0, device=device),
            "sensitivity.values": Moments.zero(blocks, target.value_dim, 0, device=device),
        }
        self._first = FirstToken(target, device)
        self.moments |= self._first.moments

    @property
    def rank(self) -> int:
        return self._rank

    def add(
        self, index: int, source: KvPage, target: KvPage, gradients: KvPage | None = None
    ) -> None:
        """Add one sequence; `gradients` are those of the target's stripped keys and its values."""
        models = ((self._source, source), (self._target, target))
        pairs = later_pairs(index, *models, self._first).values()
        x = _rows(part[self._layers] for part, _ in pairs)
        y = target_rows = _rows(part for _, part in pairs)
        if self._options.method.residual:
            y = target_rows - _rows(part for part, _ in pairs)
        split = split_of(index)
        self.moments[split].update(x, y)
        if split == "held_out":
            self.moments["held_out.target"].update(x[..., :0], target_rows)
        if gradients is not None:
            for name in ("keys", "values"):
                part = getattr(gradients, name)[:, 1:].transpose(1, 2).flatten(0, 1)
                self.moments[f"sensitivity.{name}"].update(part, part[..., :0])

    def finish(self) -> tuple[Mapper, Choice]:
        """Pick the ridge, solve, reduce the rank, assemble the mapper."""
        fitted, held_out = self.moments["fitted"], self.moments["held_out"]
        require_split(fitted.rows, held_out.rows)
        given = self._options.ridge
        ridges = RIDGES if given is None else (given,)
        scored = [(self._scores(_solve(fitted, rho, self._split_x)), rho) for rho in ridges]
        scores, ridge = max(scored, key=lambda pair: float(pair[0].mean()))
        everything = fitted.plus(held_out)
        factors = self._reduce(_solve(everything, ridge, self._split_x), everything)
        mean_x, mean_y = everything.mean_x[0].cpu(), everything.mean_y[0].cpu()
        # From the factors as they are stored, so that their rounding moves no mean.
        bias = mean_y - mean_x @ factors.encoder.double() @ factors.decoder.double()
        mapper = self._first.give(self._assemble(factors, bias))
        picked = ((ridge,) * self._target.layers,) * 2
        values = tuple(tuple(row) for row in scores.tolist())
        return mapper, Choice((tuple(self._layers),) * self._target.layers, picked, values)

    def _equal_rank(self, p: int, q: int) -> int:
        """The rank that makes as many parameters as a head-local map of the same layers."""
        source, target = self._source, self._target
        per_head = source.key_dim * target.key_dim + source.value_dim * target.value_dim
        budget = target.layers * target.kv_heads * len(self._layers) * per_head
        return max(1, budget // (p + q))

    def _scores(self, weight: torch.Tensor) -> torch.Tensor:
        """Held-out R^2 of the target's keys and values per layer, ``[2, L_t]``."""
        held_out = self.moments["held_out"]
        gram, cross, squares = held_out.xx[0], held_out.xy[0], held_out.yy[0]
        total = self.moments["held_out.target"].yy[0]
        fitted = self.moments["fitted"]
        shift_x = held_out.mean_x[0] - fitted.mean_x[0]
        offset = held_out.mean_y[0] - fitted.mean_y[0] - shift_x @ weight
        error = squares - 2 * (weight * cross).sum(0) + (weight * (gram @ weight)).sum(0)
        error = error + held_out.rows * offset.square()
        parts = (slice(None, self._split_y), slice(self._split_y, None))
        layers = self._target.layers
        return torch.stack(
            [1 - error[p].view(layers, -1).sum(1) / total[p].view(layers, -1).sum(1) for p in parts]
        )

    def _reduce(self, weight: torch.Tensor, moments: Moments) -> Factors:
        keys, values = (self._roots(f"sensitivity.{name}") for name in ("keys", "values"))
        split = self._split_y

        def times(matrix: torch.Tensor, *, inverse: bool) -> torch.Tensor:
            parts = zip((matrix[:, :split], matrix[:, split:]), (keys, values), strict=True)
            return torch.cat([_by_block(part, roots[inverse]) for part, roots in parts], 1)

        scaled = times(weight, inverse=False)
        vectors, strengths = _leading(scaled, moments.xx[0] @ scaled, self._rank)
        size = (strengths / moments.rows).clamp_min(1e-30).sqrt()  # of the codes: makes it one
        encoder = scaled @ vectors / size
        decoder = times((vectors * size).T, inverse=True)
        return Factors(_stored(encoder), _stored(decoder))

    def _roots(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Square roots of the sensitivity's blocks ``[L_t * H_t, d, d]`` and their inverses."""
        moments = self.moments[name]
        blocks, width = moments.mean_x.shape
        unit = torch.eye(width, dtype=torch.float64, device=moments.xx.device)
        if not moments.rows:
            return unit.repeat(blocks, 1, 1), unit.repeat(blocks, 1, 1)
        second = moments.xx / moments.rows + moments.mean_x[:, :, None] * moments.mean_x[:, None]
        mean = second.diagonal(dim1=1, dim2=2).mean(1)
        floor = _FLOOR * mean + 1e-3 * _FLOOR * mean.mean() + 1e-30
        values, vectors = torch.linalg.eigh(second + floor[:, None, None] * unit)
        root = values.sqrt()[:, None]
        return (vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT

    def _assemble(self, factors: Factors, bias: torch.Tensor) -> Mapper:
        target = self._target
        split = self._split_y
        keys, values = (
            tuple(
                LayerMap(tuple(self._layers), part, layer_bias.view(target.kv_heads, -1))
                for part, layer_bias in zip(
                    decoder.chunk(target.layers, 1), biases.chunk(target.layers), strict=True
                )
            )
            for decoder, biases in (
                (factors.decoder[:, :split], bias[:split].float()),
                (factors.decoder[:, split:], bias[split:].float()),
            )
        )
        return Mapper(
            self._options.method,
            self._source,
            target,
            assign_heads(self._source.kv_heads, target.kv_heads),
            keys,
            values,
            encoder=factors.encoder,
        )


def _rows(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Keys and values side by side, float64 ``[1, N, columns]``."""
    return torch.cat([token_rows(part.double()) for part in parts], 1)[None]


@dataclass(frozen=True)
class Factors:
    """W of rank r as stored: encoder ``[p, r]``, decoder ``[r, q]``, codes of variance one."""

    encoder: torch.Tensor
    decoder: torch.Tensor


def _source_layers(source: ModelDescription, wanted: int | None) -> list[int]:
    """Evenly spaced layers from the first to the last: as many as asked for, or as is bounded."""
    width = source.kv_heads * (source.key_dim + source.value_dim)
    count = wanted or max(1, min(source.layers, MAX_INPUTS // width))
    return [round((n + 0.5) * source.layers / count - 0.5) for n in range(count)]


def _solve(moments: Moments, rho: float, split: int) -> torch.Tensor:
    """Ridge solution ``[p, q]``; keys and values differ in scale, so each has its own lambda."""
    gram = moments.xx[0].clone()
    diagonal = gram.diagonal()
    for part in (diagonal[:split], diagonal[split:]):
        scale = part.mean()
        part += torch.where(scale > 0, rho * scale, 1)
    factor, failed = torch.linalg.cholesky_ex(gram)
    if failed.any():
        raise ridge_too_small(rho)
    return torch.cholesky_solve(moments.xy[0], factor)


def _by_block(matrix: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """``[n, B * d]`` times the block-diagonal matrix of ``[B, d, d]``."""
    count, width, _ = blocks.shape
    parts = matrix.view(len(matrix), count, width).transpose(0, 1)
    return torch.bmm(parts, blocks).transpose(0, 1).reshape(len(matrix), -1)


def _leading(
    scaled: torch.Tensor, image: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `rank` leading eigenvectors ``[q, r]`` and eigenvalues of ``scaled' image``.

    That product is symmetric, and not formed where it is large: block power iteration then, which
    separates all but directions of nearly equal strength.
    """
    size = scaled.shape[1]
    if size <= _DENSE_SIDE:
        values, vectors = torch.linalg.eigh(scaled.T @ image)
        return vectors[:, -rank:], values[-rank:]
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(size, min(size, rank + 32), generator=generator, dtype=scaled.dtype)
    block = block.to(scaled.device)
    for _ in range(8):
        block = torch.linalg.qr(scaled.T @ (image @ block)).Q
    values, vectors = torch.linalg.eigh(block.T @ (scaled.T @ (image @ block)))
    return block @ vectors[:, -rank:], values[-rank:]


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", weight_dtype(tensor))
