"""Affine maps under the row weights of the target's attention: the second pass of a fit.

The first pass (`Accumulator`) has picked the layers. Every target layer, head and component has
weights of its own, so each has a Gram matrix of its own, over the picked layers alone: of one
source head (head-local) or of all (full-head). How far the weights are trusted depends on all of
them (`shrinkage`); since moments are linear in the weights, those under weights one and under r are
kept, and blended at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore_xfer.fit.accumulate import (
    FitOptions,
    read_by,
    require_memory,
    require_split,
    split_of,
    stripped,
    weight_dtype,
)
from kvstore_xfer.fit.attention import later_weights, row_weights, shrinkage
from kvstore_xfer.fit.moments import Moments
from kvstore_xfer.fit.select import RIDGES, Choice
from kvstore_xfer.fit.solve import r_squared, solve_ridge
from kvstore_xfer.mapper.maps import LayerMap, Mapper, Method, assign_heads

if TYPE_CHECKING:
    from kvstore_xfer.blocks.page import KvPage
    from kvstore_xfer.models.description import ModelDescription

_COMPONENTS = ("keys", "values")


@dataclass(frozen=True)
class _Blend:
    """Moments of one target layer and component under the final weights."""

    fitted: Moments
    held_out: Moments


class WeightedAccumulator:
    """Streams caches and queries into weighted moments; `choice` says which layers are read.

    Raises ConfigError when the moments would not fit into memory.
    """

    def __init__(
        self,
        source: ModelDescription,
        target: ModelDescription,
        options: FitOptions,
        choice: Choice,
        device: str = "cpu",
    ) -> None:
        self._source, self._target = source, target
        self._options, self._choice = options, choice
        self._heads = assign_heads(source.kv_heads, target.kv_heads)
        read = 1 if options.method is Method.HEAD_LOCAL else source.kv_heads
        dims = (
            (read * source.key_dim, target.key_dim),
            (read * source.value_dim, target.value_dim),
        )
        shapes = {
            f"{name}.{layer}": (target.kv_heads, len(layers) * width_in, width_out)
            for name, (width_in, width_out) in zip(_COMPONENTS, dims, strict=True)
            for layer, layers in enumerate(choice.layers)
        }
        # Two sides, two weightings, and what blending takes for one layer.
        needed = 4 * sum(Moments.bytes_needed(*shape) for shape in shapes.values())
        require_memory(needed, device, "give fewer --layers or leave out --weights attention")
        self.moments = {
            f"{name}.{weighting}.{split}": Moments.zero(*shape, device=device)
            for name, shape in shapes.items()
            for weighting in ("plain", "attention")
            for split in ("fitted", "held_out")
        }

    def add(self, index: int, source: KvPage, target: KvPage, queries: torch.Tensor) -> None:
        """Add one sequence; `queries` are the target's, as `row_weights` wants them."""
        weights = map(later_weights, row_weights(target.keys, target.values, queries))
        pairs = (
            (stripped(source, self._source.rope), stripped(target, self._target.rope)),
            (source.values, target.values),
        )
        # Position 0 is not fitted: `Accumulator` has seen it in the first pass.
        later = ((inputs[:, 1:], outputs[:, 1:]) for inputs, outputs in pairs)
        split = split_of(index)
        for name, (inputs, outputs), rows in zip(_COMPONENTS, later, weights, strict=True):
            for layer, layers in enumerate(self._choice.layers):
                x = read_by(self._options.method, self._heads, inputs[list(layers)])
                x, y = x.expand(len(self._heads), -1, -1), outputs[layer].transpose(0, 1)
                self.moments[f"{name}.{layer}.plain.{split}"].update(x, y)
                self.moments[f"{name}.{layer}.attention.{split}"].update(x, y, rows[layer])

    def finish(self) -> tuple[Mapper, Choice]:
        """Pick the ridge per target layer and component, solve, and assemble the mapper."""
        first = self.moments["keys.0.plain.fitted"].rows
        require_split(first, self.moments["keys.0.plain.held_out"].rows)
        maps, ridges, scores = [], [], []
        for name in _COMPONENTS:
            solved = [self._solve(name, layer) for layer in range(self._target.layers)]
            maps.append(tuple(layer for layer, _, _ in solved))
            ridges.append(tuple(ridge for _, ridge, _ in solved))
            scores.append(tuple(score for _, _, score in solved))
        mapper = Mapper(
            self._options.method, self._source, self._target, self._heads, maps[0], maps[1]
        )
        mapper.validate()
        return mapper, Choice(self._choice.layers, tuple(ridges), tuple(scores))

    def _solve(self, name: str, layer: int) -> tuple[LayerMap, float, float]:
        """The map, its ridge and its weighted held-out R^2."""
        blend = self._blend(name, layer)
        inputs = torch.arange(blend.fitted.mean_x.shape[1])
        outputs = torch.arange(blend.fitted.mean_y.shape[1])
        given = self._options.ridge

        def score(ridge: float) -> float:
            affine = solve_ridge(blend.fitted, inputs, outputs, ridge)
            return float(r_squared(affine, blend.held_out, inputs, outputs).mean())

        ridges = RIDGES if given is None else (given,)
        best, reached = max(((rho, score(rho)) for rho in ridges), key=lambda pair: pair[1])
        everything = self._blend(name, layer, merged=True).fitted
        affine = solve_ridge(everything, inputs, outputs, best)
        weight = affine.weight.to("cpu", weight_dtype(affine.weight))
        if self._options.method is Method.FULL_HEAD:
            weight = weight.transpose(0, 1).flatten(1)  # all heads beside each other
        bias = affine.bias.to("cpu", torch.float32)
        return LayerMap(self._choice.layers[layer], weight, bias), best, reached

    def _blend(self, name: str, layer: int, *, merged: bool = False) -> _Blend:
        """Both sides under the final weights; `merged`: the fitted side holds all sequences."""
        plain, attention = (
            {
                split: self.moments[f"{name}.{layer}.{weighting}.{split}"]
                for split in ("fitted", "held_out")
            }
            for weighting in ("plain", "attention")
        )
        if merged:
            plain["fitted"] = plain["fitted"].plus(plain["held_out"])
            attention["fitted"] = attention["fitted"].plus(attention["held_out"])
        fitted = attention["fitted"]
        shares = shrinkage(fitted.rows, fitted.squares, fitted.mean_x.shape[1])
        return _Blend(
            plain["fitted"].blended(attention["fitted"], shares),
            plain["held_out"].blended(attention["held_out"], shares),
        )
